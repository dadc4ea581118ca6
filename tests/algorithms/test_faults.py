"""Broken and hostile clients: no message beyond its bound, a server that stays finite, and every one counted."""

import math

import numpy as np
import pytest
import torch
from command import Command, sentence, sets
from simulations import build

import fednormec as fn
from fednormec.algorithms.faults import FAULTS
from fednormec.algorithms.methods import METHODS
from fednormec.core.bounds import Messages
from fednormec.errors import UserError

pytestmark = pytest.mark.usefixtures("undrawn")

COUNTED = ("not_a_number", "infinite", "short")
BOUNDED = [name for name, method in METHODS.items() if method.can_be_private]
CLIENTS, DIM, ROUNDS = 12, 8, 15


def with_fault(name: str, fault, clients=(1, 5, 11)) -> fn.Algorithm:
    algorithm = build(name)
    return algorithm._replace(local=fn.faulty(algorithm.local, fault, clients))


def watched(algorithm: fn.Algorithm, seen: list[float]) -> fn.Algorithm:
    """Keeps the length of every message, as it would be sent."""

    def client_(server, rows, updates):
        messages = algorithm.client_(server, rows, updates)
        whole = Messages(messages.rows.clone(), messages.factors).whole()
        seen.extend(torch.linalg.vector_norm(whole.double(), dim=1).tolist())
        return messages

    return algorithm._replace(client_=client_)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", BOUNDED)
def test_bounded_methods_survive_any_client(name, kind, dtype):
    problem = fn.random_quadratic(CLIENTS, DIM, seed=1, dtype=dtype)
    seen: list[float] = []
    algorithm = watched(with_fault(name, FAULTS[kind]), seen)
    for idle in ("advance", "sleep"):
        for r in fn.simulate(problem, algorithm, fn.poisson(0.7, idle), fn.Privacy(noise_std=0.5), rounds=ROUNDS):
            faulty = np.isin(r.cohort.computing, [1, 5, 11]).sum()
            assert r.left_out == (faulty if kind in COUNTED else 0)
            assert all(t.isfinite().all() for t in (r.server.x, r.server.memory, r.memory, r.released))
    assert len(seen) >= CLIENTS * ROUNDS
    assert max(seen) <= algorithm.bound.radius
    assert max(seen) > 0.1 * algorithm.bound.radius


@pytest.mark.parametrize("name", BOUNDED)
def test_one_client_moves_the_sum_by_no_more_than_the_radius(name):
    """Whatever it sends instead: two runs that differ in one client's fault, compared after their first round."""
    problem = fn.random_quadratic(CLIENTS, DIM, seed=2)
    sums = {}
    for kind, fault in (("honest", torch.clone), *FAULTS.items()):
        (r,) = fn.simulate(problem, with_fault(name, fault, [4]), rounds=1)
        sums[kind] = r.released
    radius = with_fault(name, torch.clone).bound.radius
    for kind in FAULTS:
        assert torch.linalg.vector_norm(sums[kind] - sums["honest"]) <= 2 * radius * (1 + 1e-12)
    assert not torch.equal(sums["huge"], sums["honest"])


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in BOUNDED])
def test_methods_without_a_bound_leave_out_what_is_no_number(name, kind):
    problem = fn.random_quadratic(CLIENTS, DIM, seed=1)
    for r in fn.simulate(problem, with_fault(name, FAULTS[kind]), rounds=ROUNDS):
        assert r.left_out == 3
        assert r.server.x.isfinite().all() and r.memory.isfinite().all()


def test_all_clients_broken_leaves_the_model_to_the_noise():
    problem = fn.random_quadratic(CLIENTS, DIM, seed=1)
    algorithm = with_fault("fed_normec", FAULTS["not_a_number"], range(CLIENTS))
    done = fn.train(problem, algorithm, privacy=fn.Privacy(noise_std=0.5), rounds=5)
    assert [line["not_private"]["left_out"] for line in done.history] == [CLIENTS] * 5
    assert done.x.isfinite().all()
    with pytest.raises(fn.Diverged, match="no client's update is finite any more"):
        list(fn.simulate(problem, algorithm, rounds=5))


def test_a_local_operator_with_the_wrong_shape_is_a_sentence():
    for shape in ((DIM - 1,), (DIM, 2), ()):
        broken = fn.gd(0.1)._replace(run=lambda problem, x, ids, *rest, shape=shape: torch.zeros(len(ids), *shape))
        with pytest.raises(UserError, match=r"gd\(.*\) gave updates of shape"):
            next(fn.simulate(fn.random_quadratic(3, DIM), fn.fed_normec(broken), rounds=1))


# from a config


@pytest.mark.long
@pytest.mark.parametrize("kind", FAULTS)
def test_a_run_reports_how_many_were_left_out(fednormec_: Command, kind):
    said = fednormec_(
        "run", *sets(f"faults.kind={kind}", "faults.clients=7", "run.rounds=4", "data.clients=30"), "--quiet"
    )
    assert said.code == 0
    assert ("left out" in said.out) == (kind in COUNTED)
    if kind in COUNTED:
        assert "left out       28 updates that were not finite" in said.out


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["faults.clients=2"], "[faults] needs the setting 'kind'"),
        (["faults.kind=odd"], "kind must be"),
        (["faults.kind=infinite", "faults.clients=0"], "clients must be at least 1"),
        (["faults.kind=infinite", "faults.clients=99", "data.clients=20"], "[faults] clients = 99, but there are 20"),
    ],
)
def test_impossible_faults_are_said(fednormec_: Command, settings, expected):
    assert expected in sentence(fednormec_("run", *sets(*settings)).err)


def test_no_theorem_covers_them(fednormec_: Command):
    covered = ("problem.name=quadratic", "method.server_normalization=true", "participation.name=full", "run.rounds=3")
    said = fednormec_("run", "--quiet", *sets(*covered, "local.step=0.01", "faults.kind=zero"))
    assert "guaranteed     nothing: no theorem covers [faults]" in said.out
    assert math.isfinite(float(said.out.partition("gradient norm")[2].split()[0]))
