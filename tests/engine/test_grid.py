"""Messages and noise as whole numbers on a grid: what is exact is exact, for every method and in every trust model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import CONTRACTS, build, finish, mlp_problem

import fednormec as fn
from fednormec.core.algorithm import Bounded
from fednormec.core.bounds import Adding, Bound, Grid, Messages, TooLong, clip, grid_for, smooth_normalize
from fednormec.errors import UserError
from fednormec.privacy import accounting
from fednormec.privacy.grid import gap

PRIVATE = [name for name in CONTRACTS if math.isfinite(build(name).bound.radius) and build(name).prime is None]
PROBLEM = fn.random_quadratic(7, 12, parts=3, heterogeneity=1.0, seed=0)
SECURE = {"randomness": "secure", "noise_std": 0.7}
ODD = st.floats(allow_nan=False, width=32) | st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-30, 3.4e38])


@given(st.floats(1e-30, 1e30), st.integers(16, 20))
def test_the_unit_is_a_power_of_two_and_the_radius_has_the_bits_asked_for(radius: float, bits: int) -> None:
    grid = grid_for(radius, bits)
    assert math.frexp(grid.unit)[0] == 0.5 and 2 ** (bits - 1) < grid.steps <= 2**bits
    steps = grid.steps
    assert steps == radius / grid.unit and grid.most <= steps**2 * (1 + 1e-15)


@settings(deadline=None)
@given(st.lists(st.lists(ODD, min_size=5, max_size=5), min_size=1, max_size=4), st.sampled_from([0.3, 1.0, 7.5]),
       st.sampled_from([torch.float32, torch.float64]), st.booleans())  # fmt: skip
def test_no_input_makes_a_message_longer_than_the_radius_in_units(rows, radius, dtype, clips) -> None:
    grid = grid_for(radius)
    bound = (clip(radius) if clips else smooth_normalize(0.01, radius)).on(grid)
    found = bound(torch.tensor(rows, dtype=dtype)).double() / grid.unit
    assert torch.equal(found, found.trunc())
    assert (found.square().sum(1) <= grid.most).all()


def test_a_message_is_rounded_towards_zero() -> None:
    grid = Grid(0.25, 2.0)
    rows = torch.tensor([[0.9, -0.9, 0.25, -0.1], [1.99, -0.24, 0.0, 0.26]])
    assert grid.truncate_(rows).tolist() == [[0.75, -0.75, 0.25, -0.0], [1.75, -0.0, 0.0, 0.25]]


def test_what_is_off_the_grid_is_cut_off_and_one_unit_too_long_is_not_added() -> None:
    grid = Grid(2.0**-4, 1.0)  # 16 units
    adding, ones = Adding(grid=grid), torch.ones(1)

    def add(*units: float) -> list[float]:
        return (Messages(torch.tensor([units]) * grid.unit).sum(ones, adding) / grid.unit).tolist()

    assert add(16.0, 0.0) == [16.0, 0.0] and add(9.0, 13.0) == [9.0, 13.0]
    for wrong in ((16.0, 1.0), (12.0, 11.0), (math.nan, 0.0), (math.inf, 0.0)):
        with pytest.raises(TooLong):
            add(*wrong)
    assert add(1.5, -2.9) == [1.0, -2.0] and add(16.9, 0.9) == [16.0, 0.0]
    assert Messages(torch.tensor([[math.nan, 99.0]])).sum(torch.zeros(1), adding).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", PRIVATE)
def test_what_a_client_remembers_is_what_it_sent(name: str) -> None:
    """The same recursion, which its oracle holds to the letter, with a bound whose result is rounded by hand."""
    method, grid = build(name), grid_for(build(name).bound.radius, 4)  # so coarse that rounding shows
    assert isinstance(method.client_, Bounded)

    def rounded(rows: torch.Tensor) -> Messages:
        return Messages(torch.from_numpy(np.trunc(method.bound(rows).numpy() / grid.unit) * grid.unit))

    by_hand = Bound("by hand", method.bound.radius, rounded, None, grid)
    server = method.start(torch.zeros(12, dtype=torch.float64))
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.standard_normal((3, method.memory_slots * 12)) / 10)
    updates = torch.from_numpy(rng.standard_normal((3, 12)))
    first, moved = method.on_grid(grid).client(server, rows, updates)
    expected, kept = method._replace(client_=replace(method.client_, bound=by_hand)).client(server, rows, updates)
    units = first / grid.unit
    assert torch.equal(units, units.trunc()) and bool(first.any())
    assert torch.equal(first, expected) and torch.allclose(moved, kept, rtol=0, atol=1e-14)
    plain, free = method.client(server, rows, updates)
    assert (first - plain).abs().max() < grid.unit * (1 + 1e-9)
    assert not method.memory_slots or (moved - free).abs().max() > 1e-4  # rounding shows


@pytest.mark.parametrize("trust", ["central", "secagg", "local"])
@pytest.mark.parametrize("name", PRIVATE)
def test_what_is_released_is_whole_numbers(name: str, trust: str) -> None:
    last = finish(PROBLEM, build(name), None, fn.Privacy(trust=trust, **SECURE), rounds=2)
    assert last.plan is not None and last.plan.mechanism.grid is not None
    units = last.released / last.plan.mechanism.grid.unit
    assert torch.equal(units, units.round()) and bool(units.any())


def test_the_servers_memory_is_the_mean_of_the_clients_but_for_noise() -> None:
    """In float32, with noise that is known: nothing of a message is lost between its client and the sum."""
    problem, method = mlp_problem(), fn.fed_normec(fn.gd(0.1), beta=1.0, server_step=0.1, server_normalization=False)
    asked = fn.Privacy(noise_std=1e-4, noise="discrete")
    total = torch.zeros(problem.dim, dtype=torch.float64)
    noise = torch.zeros(problem.dim, dtype=torch.float64)
    for r in fn.simulate(problem, method, None, asked, rounds=5, seed=3):
        total += r.released
        noise += torch.from_numpy(r.plan.mechanism.noise(problem.dim, 9, 3, r.number))
    error = (total - noise - r.memory.double().sum(0)).abs().max()
    assert error <= 9 * 5 * 2.0**-24  # memories are float32 numbers; sums are exact


def test_the_sum_does_not_depend_on_who_computes_what() -> None:
    asked = fn.Privacy(noise_std=0.5, noise="discrete")
    several = [
        list(fn.simulate(mlp_problem(), fn.dp_fed_avg_clip(fn.gd(0.1)), fn.poisson(0.5, idle), asked, rounds=4, seed=2,
                         on=fn.Threads(workers, chunk)))
        for workers, chunk in ((1, None), (3, 2)) for idle in ("sleep",)
    ]  # fmt: skip
    for one, other in zip(*several, strict=True):
        assert torch.equal(one.released, other.released) and torch.equal(one.x, other.x)


def test_a_method_that_the_engine_cannot_put_on_a_grid_is_rounded_on_its_way() -> None:
    base = fn.dp_fed_avg_clip(fn.gd(0.1))
    own = base._replace(client_=lambda server, rows, updates: base.client_(server, rows, updates))
    last = finish(PROBLEM, own, None, fn.Privacy(noise_std=0.5, noise="discrete"), rounds=2)
    units = last.released / last.plan.mechanism.grid.unit
    assert torch.equal(units, units.round())
    assert torch.equal(last.x, finish(PROBLEM, base, None, fn.Privacy(noise_std=0.5, noise="discrete"), rounds=2).x)


def test_a_message_that_was_made_longer_is_refused() -> None:
    base = fn.dp_fed_avg_clip(fn.gd(0.1))
    loud = base._replace(client_=lambda s, r, u: Messages(base.client_(s, r, u).whole() * 1.001))
    with pytest.raises(UserError, match="promises at most 1, and the noise counts on that"):
        finish(fn.random_quadratic(3, 5, heterogeneity=1e6), loud, None, fn.Privacy(noise="discrete", noise_std=1.0))


@pytest.mark.parametrize("protocol", [False, True])
def test_a_rule_that_leaves_the_grid_is_rounded_on_its_way(protocol: bool) -> None:
    """A third of each message, as numbers and as rows with factors; and a scaled method of one's own."""
    base, trust = fn.dp_fed_avg_clip(fn.gd(0.1)), "secagg" if protocol else "central"
    asked = fn.Privacy(noise="discrete", noise_std=0.5, trust=trust, protocol=protocol)
    for own in (
        base._replace(client_=Bounded(lambda b, s, r, u: Messages(b.scale_(u).whole() / 3), base.bound)),
        base._replace(client_=lambda s, r, u: Messages(base.client_(s, r, u).whole(), u.new_full((len(u),), 1 / 3))),
        fn.scaled(base._replace(client_=lambda s, r, u: Messages(base.client_(s, r, u).whole() / 3))),
    ):
        last = finish(PROBLEM, own, None, asked, rounds=2)
        units = last.released / last.plan.mechanism.grid.unit
        assert torch.equal(units, units.round()) and bool(units.any())


def test_secure_noise_is_on_a_grid_and_never_continuous() -> None:
    """Low bits of a small sum would prove that a client sent nothing."""
    assert fn.Privacy(epsilon=1.0, randomness="secure").discrete and not fn.Privacy(epsilon=1.0).discrete
    with pytest.raises(UserError, match="shows in the low bits of the sums who sent nothing"):
        fn.Privacy(epsilon=1.0, randomness="secure", noise="continuous")


@pytest.mark.parametrize("discrete", [True, False])
def test_low_bits_tell_nothing_on_a_grid(discrete: bool) -> None:
    """One client sends 1e-12 or 0; below the grid nothing of it is there, in floating-point numbers most of it is."""
    told = []
    for sent in (0.0, 1e-12):
        total = torch.full((400,), sent, dtype=torch.float64)
        if discrete:
            total = grid_for(1.0).truncate_(total)
        mechanism = fn.Mechanism(2, fn.full(), 2.0, secure=True, grid_dim=400 if discrete else 0)
        released = total.numpy() + mechanism.noise(400, 2, 0, 1)
        small = released[np.abs(released) < 0.125]
        told.append(np.mean((small / 2.0**-55) % 1 == 0))  # multiples of 2^-55 are what such sums without 1e-12 are
    assert told == [1.0, 1.0] if discrete else told[0] != told[1] or min(told) < 1.0


@pytest.mark.parametrize("trust", ["central", "secagg", "local"])
@pytest.mark.parametrize("p", [1.0, 0.3])
def test_epsilon_is_that_of_continuous_noise_to_ten_digits_and_never_below(trust: str, p: float) -> None:
    asked = {"noise_std": 6.0, "trust": trust}
    rule = fn.full() if p == 1 else fn.poisson(p)
    plain = fn.Mechanism(50, rule, **asked).epsilon(40, 1e-5)
    on_grid = fn.Mechanism(50, rule, **asked, grid_dim=25_000)
    assert plain <= on_grid.epsilon(40, 1e-5) <= plain * (1 + 1e-8)
    assert (
        on_grid.release().unlike >= gap(6.0 * 2**20 * 50, 25_000) and fn.Mechanism(50, rule, 6.0).release().unlike == 0
    )


@pytest.mark.parametrize("trust", ["central", "secagg", "local"])
def test_weak_noise_on_a_grid_has_an_epsilon_too(trust: str) -> None:
    for rule in (fn.full(), fn.poisson(0.3)):
        plain, on_grid = (fn.Mechanism(5, rule, 0.1, trust=trust, grid_dim=dim).epsilon(40, 1e-5) for dim in (0, 100))
        assert plain <= on_grid < 2 * fn.Mechanism(5, fn.full(), 0.1, trust="local").epsilon(40, 1e-5, "rdp")


def test_several_kinds_of_strong_releases_have_an_epsilon_together() -> None:
    near = [accounting.Open((1.0,), (mu,), unlike=1e-28) for mu in (1.5, 1.0)]
    exact = accounting.epsilon_of_all({release._replace(unlike=0.0): 20 for release in near}, 1e-5)
    assert 50 < exact <= accounting.epsilon_of_all(dict.fromkeys(near, 20), 1e-5) < 1.1 * exact
    hidden = accounting.Hidden(0.5, 1.5, False, 1e-28)
    assert exact < accounting.epsilon_of_all({near[0]: 20, near[1]: 20, hidden: 20}, 1e-5) < math.inf


def test_the_distance_from_continuous_noise_is_counted_wherever_epsilon_is() -> None:
    coarse = accounting.Open((1.0,), (0.1,), unlike=1e-8)
    exact = accounting.Open((1.0,), (0.1,))
    for spent in (
        lambda release: accounting.epsilon(release, 10, 1e-5),
        lambda release: accounting.epsilon(release, 10, 1e-5, "rdp"),
        lambda release: accounting.epsilon_of_all({release: 5, accounting.Hidden(0.5, 0.1): 5}, 1e-5),
        lambda release: accounting.epsilon_of_all({release: 5, release._replace(mus=(0.2,)): 5}, 1e-5),
        lambda release: accounting.tuned_epsilon(release, 10, 1e-5, 3, 1.0),
    ):
        assert spent(exact) < spent(coarse) < 1.2 * spent(exact)
    assert accounting.delta(coarse, 10, 1.0) == pytest.approx(accounting.delta(exact, 10, 1.0) + 1e-7 * (1 + math.e))
    assert accounting.epsilon(coarse._replace(unlike=1e-5), 10, 1e-5) == math.inf


def test_a_ledger_remembers_the_distance(tmp_path) -> None:
    done = fn.train(PROBLEM, build("fed_normec"), privacy=fn.Privacy(**SECURE), rounds=2, out=tmp_path / "run")
    spent = fn.read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert spent.release.unlike > 0 and spent.epsilon(1e-5) == done.statement.epsilon
    assert "gaps between floating-point" not in done.statement.text and "discrete Gaussian" in done.statement.text
    assert (
        "gaps between floating-point"
        in fn.train(PROBLEM, build("fed_normec"), privacy=fn.Privacy(noise_std=1.0), rounds=1).statement.text
    )


def test_too_little_noise_for_a_grid_is_said() -> None:
    with pytest.raises(UserError, match="too little for a grid"):
        finish(PROBLEM, build("fed_normec"), None, fn.Privacy(noise_std=1e-7, noise="discrete"))
    with pytest.raises(UserError, match="noise must be 'continuous' or 'discrete'"):
        fn.Privacy(epsilon=1.0, noise="gaussian")  # type: ignore[arg-type]
