"""Privacy for records: what the noise of a silo proves, and what plan, ledger, statement and price say of it."""

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian
from dp_accounting.pld import PLDAccountant
from example_runs import interrupted, same, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_json import lines, strictly
from torch import Tensor

import fednormec as fn
from fednormec.core.bounds import clip
from fednormec.core.local import LocalUpdate, Moment
from fednormec.core.records import batch_sum, bounded_sum
from fednormec.engine.planning import planned
from fednormec.privacy.accounting import Hidden, epsilon, epsilon_of_all
from fednormec.privacy.asked import OF_CLIENTS
from fednormec.privacy.ledger import LEDGER, LEDGER_OF_RECORDS, Ledger
from fednormec.privacy.mechanism import Plan
from fednormec.privacy.records import RecordPlan, reach
from fednormec.privacy.statement import state
from fednormec.runs import checkpoint as checkpoints
from fednormec.runs.folder import RunFolder
from fednormec.runs.runner import go_on
from fednormec.sweeps.price import price_of, price_text

pytestmark = pytest.mark.usefixtures("undrawn")

SIZES, DELTA, ROUNDS = (50, 30, 12), 1e-5, 6
RELATIONS = {"zero_out": dp.NeighboringRelation.REPLACE_SPECIAL, "replace_one": dp.NeighboringRelation.REPLACE_ONE}
EITHER = pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])


def logistic(sizes: tuple[int, ...] = SIZES, persons: list[np.ndarray] | None = None) -> fn.Logistic:
    rng = np.random.default_rng(0)
    features = [torch.from_numpy(rng.standard_normal((size, 3))) for size in sizes]
    return fn.Logistic(features, [torch.from_numpy(rng.choice([-1, 1], size)) for size in sizes], persons=persons)


PROBLEM = logistic()
LOCAL = fn.dp_sgd(0.5, steps=2, batch_size=6)


def records(**asked: Any) -> fn.Privacy:
    return fn.Privacy(unit="record", **asked)


def plan_of(
    asked: fn.Privacy, local: LocalUpdate = LOCAL, rounds: int = ROUNDS, sizes: tuple[int, ...] = SIZES
) -> RecordPlan:
    found = planned(logistic(sizes), fn.fed_avg(local), fn.full(), asked, rounds)
    assert isinstance(found, RecordPlan)
    return found


def both(**asked: Any) -> fn.Privacy:
    return fn.Privacy(unit=("client", "record"), **asked)


def oracle(rate: float, std: float, sums: int, delta: float, adjacency: str, width: float) -> tuple[float, float]:
    """dp-accounting's ε of so many Poisson-subsampled Gaussians, and how much half as fine a grid changes it."""
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(std)), sums)
    fine, coarse = (
        PLDAccountant(RELATIONS[adjacency], value_discretization_interval=w).compose(event).get_epsilon(delta)
        for w in (width, 2 * width)
    )
    return fine, abs(coarse - fine)


# what the noise of a silo proves


@pytest.mark.long
@EITHER
@pytest.mark.parametrize(("rate", "std", "rounds", "steps", "delta", "width"), [
    (0.12, 1.1, 10, 4, 1e-5, 1e-3), (0.02, 0.8, 30, 10, 1e-6, 5e-4), (0.5, 3.0, 5, 5, 1e-3, 1e-3),
    (0.3, 2.0, 100, 1, 1e-9, 1e-3),
])  # fmt: skip
def test_epsilon_agrees_with_dp_accounting(
    rate: float, std: float, rounds: int, steps: int, delta: float, width: float, adjacency: str
) -> None:
    local = fn.dp_sgd(1.0, steps, rate=rate)
    plan = plan_of(records(noise_std=std, delta=delta, adjacency=adjacency), local, rounds, (100, 40))
    fine, error = oracle(rate, std, rounds * steps, delta, adjacency, width)
    for silo in plan.silos:
        ours = silo.epsilon(rounds, delta)
        assert ours == pytest.approx(fine, rel=2e-3)
        assert ours >= fine - error  # both overstate, by a power of their grid
    assert plan.epsilon(rounds) == ours


@pytest.mark.long
@EITHER
def test_noise_agrees_with_dp_accounting(adjacency: str) -> None:
    """The least that keeps to the budget: its ε is just below it, by another accountant, too."""
    plan = plan_of(records(epsilon=3.0, adjacency=adjacency))
    for silo, size in zip(plan.silos, SIZES, strict=True):
        fine, error = oracle(6 / size, silo.sum.noise_std, 2 * ROUNDS, DELTA, adjacency, 1e-3)
        assert 2.99 <= fine - error <= 3.0
        assert 2.999 <= silo.epsilon(ROUNDS, DELTA) <= 3.0


def test_with_all_records_in_every_batch_there_is_a_closed_form() -> None:
    everyone, sums = fn.dp_sgd(1.0, steps=5, rate=1.0), 5 * ROUNDS
    for adjacency, shift in (("zero_out", 1.0), ("replace_one", 2.0)):
        (silo,) = plan_of(records(noise_std=9.0, adjacency=adjacency), everyone, sizes=(40,)).silos
        expected = get_epsilon_gaussian(9.0 / shift / math.sqrt(sums), DELTA)
        assert silo.epsilon(ROUNDS, DELTA) == pytest.approx(expected, rel=1e-6)
        (silo,) = plan_of(records(epsilon=2.0, adjacency=adjacency), everyone, sizes=(40,)).silos
        least = get_sigma_gaussian(2.0, DELTA) * math.sqrt(sums) * shift
        assert least * (1 - 1e-9) <= silo.sum.noise_std <= least * (1 + 2e-4)


@EITHER
def test_every_step_of_every_round_is_counted(adjacency: str) -> None:
    stds, spent = set[float](), set[float]()
    for rounds, steps in ((12, 1), (6, 2), (3, 4), (1, 12)):
        local = fn.dp_sgd(0.5, steps, batch_size=6)
        stds.add(plan_of(records(epsilon=3.0, adjacency=adjacency), local, rounds).silos[0].sum.noise_std)
        spent.add(plan_of(records(noise_std=2.0, adjacency=adjacency), local, rounds).epsilon(rounds))
    assert len(stds) == len(spent) == 1
    mirrored = adjacency == "replace_one"
    assert spent == {max(epsilon(Hidden(6 / size, 0.5, mirrored), 12, DELTA) for size in SIZES)}
    assert epsilon(Hidden(0.5, 0.5, mirrored), 6, DELTA) < 0.8 * spent.pop()  # what counting rounds alone would say


def test_replacing_a_record_tells_no_less_than_zeroing_it() -> None:
    for size, batch in ((50, 1), (50, 6), (50, 49), (12, 12), (1, 1)):
        local = fn.dp_sgd(0.5, steps=2, batch_size=batch)
        zeroed, replaced = (
            plan_of(records(noise_std=1.5, adjacency=a), local, sizes=(size,)) for a in ("zero_out", "replace_one")
        )
        for rounds in (1, ROUNDS):
            assert replaced.epsilon(rounds) >= zeroed.epsilon(rounds) > 0


# plans


def test_each_silo_has_the_noise_that_its_size_needs() -> None:
    plan = plan_of(records(epsilon=3.0), sizes=(50, 30, 50, 12))
    assert [silo.records for silo in plan.silos] == [50, 30, 50, 12]
    assert [silo.rate for silo in plan.silos] == [6 / 50, 6 / 30, 6 / 50, 6 / 12]
    for silo in plan.silos:
        asked = fn.Mechanism(silo.records, fn.poisson(6 / silo.records), 1.0).calibrate(3.0, DELTA, 2 * ROUNDS)
        assert silo.sum.noise_std == asked.noise_std
        assert 2.999 < silo.epsilon(ROUNDS, DELTA) <= 3.0
    assert plan.silos[0].sum == plan.silos[2].sum
    stds = [plan.silos[i].sum.noise_std for i in (0, 1, 3)]
    assert stds == sorted(stds) and stds[0] < 0.5 * stds[-1]
    assert plan.budgets == (3.0,) * 4 and plan.rounds == ROUNDS
    by_rate = plan_of(records(epsilon=3.0), fn.dp_sgd(0.5, steps=2, rate=0.25))
    assert len({silo.sum.noise_std for silo in by_rate.silos}) == 1


def test_each_silo_can_have_a_budget_of_its_own() -> None:
    plan = plan_of(records(silo_epsilons=(1.0, 2.0, 4.0)))
    for silo, target in zip(plan.silos, (1.0, 2.0, 4.0), strict=True):
        assert 0.999 * target < silo.epsilon(ROUNDS, DELTA) <= target
    assert plan.epsilon(ROUNDS) == plan.silos[2].epsilon(ROUNDS, DELTA)
    assert plan.budget == 4.0
    alike = plan_of(records(silo_epsilons=(1.0, 2.0, 1.0)), sizes=(30, 30, 30)).silos
    assert alike[0].sum == alike[2].sum != alike[1].sum
    with pytest.raises(fn.UserError, match="silo_epsilons has 2 values, and there are 3 clients: give one for each"):
        plan_of(records(silo_epsilons=(1.0, 2.0)))


def test_the_other_runs_of_tuning_are_paid_for() -> None:
    plan = plan_of(records(epsilon=3.0, tuning_runs=4))
    assert plan.rounds_before == 3 * ROUNDS
    for silo in plan.silos:
        assert 2.999 < silo.epsilon(4 * ROUNDS, DELTA) <= 3.0
    assert plan.epsilon(ROUNDS) == max(silo.epsilon(4 * ROUNDS, DELTA) for silo in plan.silos)
    assert "18 rounds of other runs on the same records are included in ε" in state(plan, ROUNDS).text


@EITHER
def test_a_budget_with_given_noise_ends_before_the_round_that_would_exceed_it(tmp_path: Path, adjacency: str) -> None:
    asked = records(noise_std=2.0, silo_epsilons=(9.0, 2.0, 4.5), adjacency=adjacency)
    plan = plan_of(asked, rounds=60)
    pays = [[k for k in range(61) if silo.epsilon(k, DELTA) <= budget][-1]
            for silo, budget in zip(plan.silos, (9.0, 2.0, 4.5), strict=True)]  # fmt: skip
    assert 0 < min(pays) < 60 and plan.rounds == min(pays)
    result = fn.train(PROBLEM, fn.fed_avg(LOCAL), privacy=asked, rounds=60, out=tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (len(result.history), summary["status"]) == (plan.rounds, "budget_spent")
    assert summary["message"] == (f"after {plan.rounds} of 60 rounds: one more would exceed the budget of a client's "
                                  "records, between ε = 2 and 9")  # fmt: skip
    assert result.statement is not None
    assert [silo["budget"] for silo in result.statement.facts["silos"]] == [9.0, 2.0, 4.5]
    for silo in result.statement.facts["silos"]:
        assert silo["epsilon"] <= silo["budget"]
    with pytest.raises(fn.UserError, match=r"the budget of ε = 0\.01 does not pay for one round of client 1"):
        plan_of(records(noise_std=2.0, silo_epsilons=(9.0, 0.01, 4.5)))


@pytest.mark.long
def test_with_both_units_the_budget_that_ends_first_ends_the_run(tmp_path: Path) -> None:
    method, asked = fn.fed_normec(LOCAL), {"noise_std": 9.0, "record_noise_std": 2.0}
    for name, budgets in {"client": (1.0, 90.0), "record": (90.0, 4.0)}.items():
        privacy = both(epsilon=budgets[0], record_epsilon=budgets[1], **asked)
        plan = planned(PROBLEM, method, fn.full(), privacy, 60)
        assert isinstance(plan, Plan) and plan.records is not None and plan.rounds == plan.records.rounds
        own = (plan.epsilon, 1.0) if name == "client" else (plan.records.epsilon, 4.0)
        assert 0 < plan.rounds < 60 and own[0](plan.rounds) <= own[1] < own[0](plan.rounds + 1)
        fn.train(PROBLEM, method, privacy=privacy, rounds=60, out=tmp_path / name)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["rounds"], summary["status"]) == (plan.rounds, "budget_spent")
        assert summary["message"].endswith(f"the budget of ε = {budgets[1]:g} for a record, or {budgets[0]:g} for a "
                                           "client")  # fmt: skip


# draws and sums, as they are accounted for


@EITHER
@pytest.mark.parametrize("noise", ["continuous", "discrete"])
def test_a_silo_draws_the_batches_and_adds_the_noise_that_it_accounts_for(adjacency: str, noise: str) -> None:
    local = fn.dp_sgd(0.5, steps=2, rate=0.2, tau=0.7)
    plan = plan_of(records(noise_std=2.0, adjacency=adjacency, noise=noise), local, sizes=(400, 30))
    drawn, at_all = np.zeros(400), 0
    for number in range(1, 101):
        for step in range(2):
            batch = plan.batch(0, 400, Moment(3, number), step)
            assert (np.diff(batch) > 0).all()
            drawn[batch] += 1
            at_all += len(batch)
    release = plan.silos[0].sum.release()
    assert isinstance(release, Hidden) and release.p == 0.2
    assert abs(at_all / 80_000 - 0.2) < 5 * math.sqrt(0.16 / 80_000)  # a rate of 0.21 is refused
    assert abs(drawn - 40).max() < 6 * math.sqrt(32)
    there = torch.zeros(20_000, dtype=torch.float64)
    added = plan.noised(there, 0, Moment(3, 1), 0)
    assert float(added.std()) == pytest.approx(2.0 * 0.7, rel=0.025)
    assert release.mu == pytest.approx(0.7 / float(added.std()), rel=0.025)
    grid = plan.silos[0].sum.grid
    assert (grid is None) == (noise == "continuous")
    if grid is not None:
        assert bool((added / grid.unit == (added / grid.unit).round()).all())
    for client, number, step in ((1, 1, 0), (0, 2, 0), (0, 1, 1)):
        other = plan.noised(there, client, Moment(3, number), step)
        assert abs(float(torch.corrcoef(torch.stack([added, other]))[0, 1])) < 5 / math.sqrt(20_000)


class Rows:
    """A problem of one client whose records have these gradients, wherever the model is."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.dim, self.num_clients, self.tile = rows, rows.shape[1], 1, 1
        self.client_sizes = np.array([len(rows)])

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray) -> Tensor:
        return self.rows[torch.from_numpy(examples[:, 0])].clone()


def test_a_record_that_is_drawn_moves_a_sum_by_no_more_than_the_noise_counts_on() -> None:
    """It moves the others of its part by a place, so that each strip of 64 rounds differently: here each loses 63 tiny
    numbers with it, and none without."""
    size, sums = 40_000, list[Tensor]()
    rows = torch.zeros(size, 2)
    rows[:, 0] = 2.0**-25
    rows[::64, 0], rows[0, 0] = 1.0, -1.0
    for batch in (np.arange(size), np.arange(1, size)):
        sums.append(batch_sum(Rows(rows), torch.zeros(2), 0, batch, clip(1.0), 0.99))
    at_once = [bounded_sum(Rows(rows), torch.zeros(2), 0, np.arange(k, size), clip(1.0)) for k in (0, 1)]
    moved, all_at_once = (float((a - b).norm()) for a, b in (sums, at_once))
    assert moved <= 1 + reach(2, torch.float32, size, rate=0.99)
    assert abs(moved - 1) < 1e-5 and all_at_once > 1.001  # what it would come to without parts


def test_what_rounding_costs_grows_with_the_batch_up_to_a_part_and_not_with_the_silo() -> None:
    few, many = (reach(1000, torch.float32, n, rate=50 / n) for n in (500, 50_000))
    assert few < many < 2 * few < 4e-3
    assert reach(1000, torch.float64, 500, rate=0.1) < 1e-9
    rates = [reach(1000, torch.float32, 500, rate=q) for q in (0.01, 0.1, 0.3)]
    assert rates == sorted(rates)
    assert max(reach(1000, torch.float32, n, rate=q) for n in (10**4, 10**6) for q in (0.01, 0.1, 0.9)) < 5e-3
    plan = plan_of(records(epsilon=3.0))
    for silo in plan.silos:
        assert silo.sum.rounding == reach(3, torch.float64, silo.records, rate=silo.rate) > 0


def test_a_grid_counts_its_own_rounding() -> None:
    """Rounding to it can move a sum by a unit in each coordinate: the radius has room for that."""
    grid = plan_of(records(noise_std=2.0, noise="discrete")).silos[0].sum.grid
    assert grid is not None and grid.radius >= 1 + math.sqrt(3) * grid.unit
    with pytest.raises(fn.UserError, match="a grid is too coarse for records and a model of 100,000,000,000"):
        reach(10**11, torch.float32, 50, exact_sums=True)


# the ledger


ASKED = {
    "alone": records(noise_std=2.0),
    "mirrored": records(noise_std=2.0, adjacency="replace_one"),
    "budgets": records(silo_epsilons=(1.0, 2.0, 4.0), delta=1e-6),
    "tuned": records(epsilon=4.0, tuning_runs=3),
    "grid": records(noise_std=2.0, noise="discrete"),
}


def written(path: Path, plan: RecordPlan, rounds: int = ROUNDS) -> None:
    with contextlib.closing(Ledger(path, plan)) as ledger:
        for number in range(1, rounds + 1):
            ledger.add(number)


@pytest.mark.long
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_epsilon_is_computed_anew_from_the_file_alone(tmp_path: Path, asked: fn.Privacy) -> None:
    path, plan = tmp_path / LEDGER, plan_of(asked)
    written(path, plan)
    head, *paid = lines(path)
    assert head["unit"] == "record" and [part["silo"] for part in head["silos"]] == [0, 1, 2]
    assert [(line["round"], line["epsilon"]) for line in paid] == [(k, plan.spent(k)) for k in range(1, ROUNDS + 1)]
    spent, statement = fn.read_ledger(path), state(plan, ROUNDS)
    assert [(part.release, part.times) for part in spent.parts] == [(s.sum.release(), s.steps) for s in plan.silos]
    assert (spent.rounds, spent.rounds_before) == (ROUNDS, plan.rounds_before)
    assert spent.epsilon(asked.delta) == plan.epsilon(ROUNDS) == statement.epsilon == statement.facts["epsilon"]
    before = plan.rounds_before + ROUNDS
    assert spent.epsilon(1e-8) == max(silo.epsilon(before, 1e-8) for silo in plan.silos) > spent.epsilon(asked.delta)


def test_many_silos_are_paid_for_at_steps_that_never_say_too_little(tmp_path: Path) -> None:
    plan = plan_of(records(noise_std=30.0), rounds=300, sizes=tuple(range(6, 12)))
    assert 300 * len(plan.different) > 400
    said = [plan.spent(k) for k in range(1, 301)]
    assert said == sorted(said) and said[-1] == plan.epsilon(300)
    for k in (1, 2, 7, 299):
        assert plan.epsilon(k) <= said[k - 1] <= plan.epsilon(min(300, k + 5))
    assert plan.spent(301) == plan.epsilon(301)  # secure rounds that are drawn again can be more than were planned


@pytest.mark.long
def test_a_line_that_was_cut_off_counts_wherever_it_was(tmp_path: Path) -> None:
    path, cut, plan = tmp_path / LEDGER, tmp_path / "cut.jsonl", plan_of(ASKED["alone"])
    written(path, plan)
    text = path.read_text()
    head = text.index("\n")
    for end in range(0, len(text), 7):
        cut.write_text(text[:end])
        if end < head:
            with pytest.raises(fn.UserError, match="is not a ledger that can be read"):
                fn.read_ledger(cut)
        else:
            begun = text[head + 1 : end].count("\n") + (end > head + 1 and text[end - 1] != "\n")
            assert fn.read_ledger(cut).rounds == begun
        if end > head:
            written(cut, plan)
            assert cut.read_text() == text


def test_a_ledger_of_other_silos_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    written(path, plan_of(ASKED["alone"]))
    text = path.read_text()
    others = [plan_of(ASKED["alone"], sizes=sizes) for sizes in ((50, 30, 13), (50, 30))]
    for other in (*others, plan_of(ASKED["mirrored"]), plan_of(ASKED["alone"], fn.dp_sgd(0.5, 3, batch_size=6))):
        with pytest.raises(fn.UserError, match="of another mechanism"):
            Ledger(path, other)
    assert path.read_text() == text


PART = {"silo": 0, "steps": 2, "kind": "hidden", "p": 0.5, "mu": 1.0, "mirrored": False}


@pytest.mark.parametrize(("silos", "before"), [
    *(([{**PART, "steps": bad}], 0) for bad in (0, -1, 1.5, True, None, "two", math.inf)),
    *(([PART, {**PART, "mu": bad}], 0) for bad in (0, -1.0, math.nan, "one", None)),
    ([{**PART, "p": 0}], 0), ([{**PART, "kind": "shut"}], 0), ([PART, 3], 0), (3, 0), (None, 0), ("two", 0),
    ([{key: value for key, value in PART.items() if key != "steps"}], 0), ([PART], -1), ([PART], None),
])  # fmt: skip
def test_impossible_facts_are_said(tmp_path: Path, silos: Any, before: Any) -> None:
    path = tmp_path / LEDGER
    path.write_text(json.dumps({"unit": "record", "silos": silos, "rounds_before": before}) + '\n{"round": 1}\n')
    with pytest.raises(fn.UserError, match="is not a ledger that can be read"):
        fn.read_ledger(path)


def test_a_ledger_that_knows_no_silo_promises_nothing(tmp_path: Path) -> None:
    """That of a federation's server, who counts nobody's records."""
    path = tmp_path / LEDGER
    path.write_text('{"unit": "record", "silos": [], "rounds_before": 0}\n')
    assert fn.read_ledger(path).epsilon(DELTA) == 0
    path.write_text(path.read_text() + '{"round": 1, "epsilon": 3.0, "delta": 1e-05}\n')
    assert fn.read_ledger(path).epsilon(DELTA) == math.inf


def test_a_line_is_on_disk_before_its_round_is_seen(tmp_path: Path) -> None:
    path, seen, plan = tmp_path / LEDGER, list[int](), plan_of(ASKED["alone"])
    with contextlib.closing(Ledger(path, plan)) as ledger:
        rounds = fn.simulate(PROBLEM, fn.fed_avg(LOCAL), fn.poisson(0.3), ASKED["alone"], rounds=ROUNDS,
                             before_release=lambda number, plan: ledger.add(number))  # fmt: skip
        for r in rounds:
            seen.append(r.number)
            assert lines(path)[1:][-1] == {"round": r.number, "epsilon": r.epsilon, "delta": DELTA}
    assert seen == list(range(1, ROUNDS + 1))  # a client counts in each, whoever was drawn


# resuming


SMALL = (
    "model.name=linear", "data.clients=6", "method.name=fed_avg", "local.name=dp_sgd", "local.batch_size=8",
    "local.steps=2", "local.step=0.5", "run.rounds=12", "run.checkpoint_rounds=5", "privacy.noise_std=2",
)  # fmt: skip
ALONE = (*SMALL, "privacy.unit=record")
BOTH = (*SMALL, "method.name=fed_normec", 'privacy.unit=["client","record"]', "privacy.record_noise_std=1.5")


@pytest.fixture
def plain_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The example without privacy, less the settings that belong to its method and its local steps."""
    text = (Path(__file__).parents[2] / "examples" / "not_private.toml").read_text()
    kept = re.sub(r"\[(method|local|model)\]\n(\w.*\n)*", "", text)
    assert "[data]" in kept and "alpha" not in kept
    path = tmp_path / "plain.toml"
    path.write_text(kept)
    return path


@pytest.mark.long
@pytest.mark.parametrize("asked", [ALONE, (*ALONE, "privacy.noise=discrete", "local.bound=normalize"), BOTH])
def test_a_stopped_run_goes_on_to_the_same_files(tmp_path: Path, plain_settings: Path, asked: tuple[str, ...]) -> None:
    expected = whole(tmp_path / "whole", *asked, config=plain_settings)
    interrupted(tmp_path / "out", *asked, config=plain_settings)
    checkpoints.path_in(tmp_path / "out", 8).unlink()
    assert go_on(tmp_path / "out", quiet=True) | {"out": None} == expected | {"out": None}
    names = ("metrics.jsonl", "model.safetensors", LEDGER, LEDGER_OF_RECORDS, "privacy.txt", "privacy.json")
    assert same(tmp_path / "whole", tmp_path / "out", names)
    assert (tmp_path / "out" / LEDGER_OF_RECORDS).exists() == (asked is BOTH)


@pytest.mark.long
def test_secure_rounds_that_are_drawn_again_count(tmp_path: Path, plain_settings: Path) -> None:
    """Eight rounds are done, the last three not kept: three more releases, which three rounds fewer make up for."""
    asked = (*ALONE, "privacy.randomness=secure", "privacy.epsilon=9")
    interrupted(tmp_path / "out", *asked, config=plain_settings)
    checkpoints.path_in(tmp_path / "out", 8).unlink()
    found = go_on(tmp_path / "out", quiet=True)
    _, *paid = lines(tmp_path / "out" / LEDGER)
    limit = len(paid)
    assert [line["round"] for line in paid] == [1, 2, 3, 4, 5, 6, 7, 8, *range(6, limit - 2)]
    assert (found["rounds"], found["epsilon"]) == (limit - 3, paid[-1]["epsilon"])
    assert found["epsilon"] == fn.read_ledger(tmp_path / "out" / LEDGER).epsilon(DELTA) <= 9
    assert "(3 of the rounds were interrupted and drawn again)" in " ".join(found["statement"].split())
    facts = strictly((tmp_path / "out" / "privacy.json").read_text())
    assert (facts["rounds"], facts["rounds_drawn_again"], facts["noise"]) == (limit, 3, "discrete")
    assert {silo["releases"] for silo in facts["silos"]} == {2 * limit}


@pytest.mark.long
def test_a_kill_between_two_ledgers_counts_in_both(
    tmp_path: Path, plain_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line for records comes first. With secure noise that round is drawn again: neither budget may be exceeded."""
    asked = (*BOTH, "privacy.randomness=secure", "privacy.epsilon=40", "privacy.record_epsilon=40")
    pay = RunFolder.pay

    def killed(self: RunFolder, number: int, plan: Any) -> None:
        if number == 7:
            self.open_ledger(plan)
            assert self._of_records is not None
            self._of_records.add(number)
            raise KeyboardInterrupt
        pay(self, number, plan)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "pay", killed)
        with pytest.raises(BaseException, match="stopped at once"):
            whole(tmp_path / "out", *asked, config=plain_settings)
    assert [fn.read_ledger(tmp_path / "out" / name).rounds for name in (LEDGER, LEDGER_OF_RECORDS)] == [6, 7]
    found = go_on(tmp_path / "out", quiet=True)
    assert found["rounds"] == 10  # 12 are paid for: round 6 was not kept, round 7 not released
    assert fn.read_ledger(tmp_path / "out" / LEDGER_OF_RECORDS).rounds == 12
    facts = strictly((tmp_path / "out" / "privacy.json").read_text())
    assert facts["rounds_counted"] == facts["records"]["rounds_counted"] == 12


@pytest.mark.long
@pytest.mark.parametrize("name", [LEDGER, LEDGER_OF_RECORDS])
def test_a_ledger_that_lacks_rounds_ends_it(tmp_path: Path, plain_settings: Path, name: str) -> None:
    interrupted(tmp_path / "out", *BOTH, config=plain_settings)
    path = tmp_path / "out" / name
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    with pytest.raises(fn.UserError, match=f"{name} has 6 rounds, but 8 were released: it is damaged"):
        go_on(tmp_path / "out", quiet=True)


# statements


def said(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.long
@EITHER
def test_the_statement_of_records(adjacency: str) -> None:
    result = fn.train(PROBLEM, fn.fed_avg(LOCAL), fn.poisson(0.5), records(epsilon=3.0, adjacency=adjacency),
                      rounds=ROUNDS)  # fmt: skip
    statement, plan = result.statement, plan_of(records(epsilon=3.0, adjacency=adjacency))
    assert statement is not None and statement.epsilon == plan.epsilon(ROUNDS)
    assert statement.headline == f"ε ≤ 3.00 at δ = 1e-05 for each record (silo, {adjacency})"
    neighbour = {"zero_out": "the record stays counted and enters no gradient", "replace_one": "any other one"}
    text = said(statement.text)
    for words in (
        neighbour[adjacency], "each client guards its own records", "6 rounds of 2 local steps, 12 noisy sums",
        "0: 50 records, rate 0.12, noise", "2: 12 records, rate 0.5, noise", "Say who is who (data.person)",
        "not covered what the client itself knows", "the gaps between floating-point numbers", "whoever knows the seed",
        "the number of records of each client",
    ):  # fmt: skip
        assert words in text
    assert "of the sum" not in text and "aggregator" not in text
    facts = statement.facts
    assert (facts["unit"], facts["trust"], facts["adjacency"], facts["private"]) == ("record", "silo", adjacency, True)
    assert (facts["steps"], facts["clients"], facts["budget"], facts["noise"]) == (2, 3, 3.0, "continuous")
    for found, silo in zip(facts["silos"], plan.silos, strict=True):
        assert found["epsilon"] == silo.epsilon(ROUNDS, DELTA)
        assert (found["records"], found["noise_std"], found["releases"]) == (silo.records, silo.sum.noise_std, 12)
    assert (facts["epsilon_rdp"] is None) == (adjacency == "replace_one")
    json.dumps(facts, allow_nan=False)


@pytest.mark.long
def test_a_statement_says_what_a_record_is_and_what_noise_it_had() -> None:
    persons = [np.arange(size) // 2 for size in SIZES]
    plan = planned(logistic(SIZES, persons), fn.fed_avg(LOCAL), fn.full(), records(noise_std=2.0), ROUNDS)
    assert isinstance(plan, RecordPlan) and [silo.records for silo in plan.silos] == [25, 15, 6]
    text = said(state(plan, ROUNDS).text)
    assert "all rows of one person at a client" in text and "a person whose rows are with several clients" in text
    assert "Say who is who" not in text
    for randomness, noise in (("seeded", "discrete"), ("secure", None)):
        statement = state(plan_of(records(noise_std=2.0, randomness=randomness, noise=noise)), ROUNDS)
        assert statement.facts["noise"] == "discrete" and "discrete Gaussian on a grid" in said(statement.text)
        assert "gaps between floating-point numbers" not in said(statement.text)
        assert ("whoever knows the seed" in said(statement.text)) == (randomness == "seeded")


def test_a_large_epsilon_and_a_large_delta_are_named() -> None:
    weak = state(plan_of(records(noise_std=0.3, delta=0.05)), ROUNDS)
    assert weak.epsilon > 20 and "an ε above 20 promises next to nothing" in weak.headline
    assert "δ = 0.05: with 50 records in a client it should be far smaller" in said(weak.text)
    assert "a failure with" not in state(plan_of(records(noise_std=0.3)), ROUNDS).text


@pytest.mark.long
def test_a_run_that_ends_early_counts_all_rounds() -> None:
    plan = plan_of(records(noise_std=2.0))
    early = state(plan, 2, ended="it was good enough")
    assert early.epsilon == plan.epsilon(ROUNDS) > plan.epsilon(2) and early.facts["rounds_counted"] == ROUNDS
    assert "after 2 of 6 rounds: it was good enough. What was released decided that" in said(early.text)
    fixed = state(plan, 2)
    assert fixed.epsilon == plan.epsilon(2) and "stopping here because of what was released" in said(fixed.text)


def test_with_both_units_there_are_two_statements_and_two_ledgers(tmp_path: Path) -> None:
    asked = both(epsilon=3.0, record_epsilon=2.0, record_delta=1e-6, record_adjacency="replace_one")
    result = fn.train(PROBLEM, fn.fed_normec(LOCAL), privacy=asked, rounds=ROUNDS, out=tmp_path / "out")
    assert result.statement is not None
    clients, silos = result.statement.text.split("\n\n")
    assert clients.startswith("ε ≤ 3.00 at δ = 1e-05 for each client (central, zero_out)")
    assert silos.startswith("ε ≤ 2.00 at δ = 1e-06 for each record (silo, replace_one)")
    of_records = result.statement.facts["records"]
    assert (result.statement.facts["unit"], of_records["unit"]) == ("client", "record")
    for name, facts in ((LEDGER, result.statement.facts), (LEDGER_OF_RECORDS, of_records)):
        head, *paid = lines(tmp_path / "out" / name)
        assert ("unit" in head) == (name == LEDGER_OF_RECORDS) and len(paid) == ROUNDS
        assert paid[-1]["epsilon"] == facts["epsilon"] and paid[-1]["delta"] == facts["delta"]
        assert fn.read_ledger(tmp_path / "out" / name).epsilon(facts["delta"]) == facts["epsilon"]
    last = result.history[-1]
    assert (last["epsilon"], last["delta"]) == (result.statement.epsilon, 1e-5)
    assert (last["record_epsilon"], last["record_delta"]) == (of_records["epsilon"], 1e-6)
    alone = fn.Mechanism(3, fn.full(), 1.0).calibrate(3.0, DELTA, ROUNDS)
    assert result.statement.facts["noise_std"] == alone.noise_std


# the price of several runs


def trained(folder: Path, asked: fn.Privacy, rounds: int = ROUNDS, sizes: tuple[int, ...] = SIZES) -> Path:
    fn.train(logistic(sizes), fn.fed_normec(LOCAL), privacy=asked, rounds=rounds, out=folder)
    return folder


@pytest.mark.long
def test_the_price_of_several_runs_is_that_of_the_silo_that_pays_most(tmp_path: Path) -> None:
    """Silo 0 has much noise in the first run and little in the second, silo 1 the other way round."""
    budgets = {"a": (1.0, 4.0, 0.5), "b": (4.0, 1.0, 0.5)}
    folders = [trained(tmp_path / name, records(silo_epsilons=own, stream=k))
               for k, (name, own) in enumerate(budgets.items())]  # fmt: skip
    plans = [plan_of(records(silo_epsilons=own)) for own in budgets.values()]
    of_silos = [
        epsilon_of_all({plan.silos[i].sum.release(): 2 * ROUNDS for plan in plans}, DELTA) for i in range(3)
    ]  # fmt: skip
    found = price_of(folders)
    assert found is not None and found.epsilon == max(of_silos) > 4.0
    assert (found.runs, found.rounds, found.record_epsilon) == (2, 2 * ROUNDS, None)
    worst = {max(plan.silos, key=lambda silo: silo.epsilon(ROUNDS, DELTA)).sum.release() for plan in plans}
    assert len(worst) == 2 and found.epsilon < epsilon_of_all({release: 2 * ROUNDS for release in worst}, DELTA)


@pytest.mark.long
def test_the_price_of_like_runs_is_that_of_all_their_steps(tmp_path: Path) -> None:
    folders = [trained(tmp_path / str(k), records(epsilon=3.0, stream=k)) for k in range(3)]
    found, plan = price_of(folders), plan_of(records(epsilon=3.0))
    assert found is not None and found.epsilon == plan.epsilon(3 * ROUNDS)
    assert found.best_only is not None and "cost ε ≤" in price_text(found)
    other = trained(tmp_path / "other", records(epsilon=3.0, stream=9), sizes=(50, 30))
    mixed = price_of([*folders, other])
    assert mixed is not None and mixed.epsilon is None and "other numbers of clients" in mixed.note
    client = fn.train(PROBLEM, fn.fed_normec(LOCAL), privacy=fn.Privacy(noise_std=9.0), rounds=2, out=tmp_path / "c")
    assert client.statement is not None
    mixed = price_of([*folders, tmp_path / "c"])
    assert mixed is not None and mixed.epsilon is None


@pytest.mark.long
def test_with_both_units_a_record_has_a_price_of_its_own(tmp_path: Path) -> None:
    asked = {"epsilon": 3.0, "record_epsilon": 2.0, "record_delta": 1e-6}
    found = price_of([trained(tmp_path / str(k), both(**asked, stream=k)) for k in range(2)])
    of_records = plan_of(records(epsilon=2.0, delta=1e-6))
    of_clients = fn.Mechanism(3, fn.full(), 1.0).calibrate(3.0, DELTA, ROUNDS)
    assert found is not None and found.epsilon == of_clients.epsilon(2 * ROUNDS, DELTA)
    assert (found.record_epsilon, found.record_delta) == (of_records.epsilon(2 * ROUNDS), 1e-6)
    assert re.search(r"cost ε ≤ 4\.\d+ at δ = 1e-05 for a client, and ε ≤ 2\.\d+ at δ = 1e-06 for a record",
                     price_text(found))  # fmt: skip


# what is refused


@pytest.mark.parametrize(("method", "message"), [
    (fn.fed_avg(fn.gd(0.1)), r"local steps must bound what they take of each record, and gd\(0\.1, steps=1\) does not"),
    (fn.fed_avg(fn.sgd(0.1)), r"sgd\(0\.1, steps=1, batch_size=32\) does not: take local\.name = 'dp_sgd'"),
    (fn.fed_avg(fn.ig(0.1)), "does not: take local.name = 'dp_sgd'"),
    (fn.alpha_normec(), "and a method with local steps, such as fed_avg"),
    (fn.fed_normec(LOCAL, initial_memory="local_updates"), "initial_memory = 'local_updates' computes one more round"),
])  # fmt: skip
def test_methods_that_bound_no_record_are_refused(method: Any, message: str) -> None:
    for asked in (records(noise_std=2.0), both(noise_std=9.0, record_noise_std=2.0)):
        with pytest.raises(fn.UserError, match=message):
            next(fn.simulate(PROBLEM, method, privacy=asked, rounds=2))


def test_a_client_with_too_few_records_is_named() -> None:
    with pytest.raises(fn.UserError, match=r"client 2 has 12 records, fewer than a batch of 13: take a smaller batch"):
        plan_of(records(noise_std=2.0), fn.dp_sgd(0.5, batch_size=13))


def test_with_both_units_the_message_must_be_bounded_too() -> None:
    with pytest.raises(fn.UserError, match="FedAvg does not bound what a client sends"):
        next(fn.simulate(PROBLEM, fn.fed_avg(LOCAL), privacy=both(noise_std=9.0, record_noise_std=2.0), rounds=2))


UNLIKE = {
    "colluders": 1, "min_cohort": 2, "calibration": "paper", "noise_scale": "total_norm", "draws": "server",
    "protocol": True, "min_survivors": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CLIENTS)
def test_what_is_for_clients_is_refused_for_records(name: str) -> None:
    with pytest.raises(fn.UserError, match=f"{name} is for clients as the unit, and here it is records: leave it out"):
        records(epsilon=3.0, **{name: UNLIKE[name]})


@pytest.mark.parametrize(("asked", "message"), [
    ({"unit": "patient"}, "unit must be 'client' or 'record', not 'patient'"),
    ({"unit": ()}, "unit must be 'client', 'record' or both, and it is an empty list"),
    ({"unit": ("record", "person")}, "unit must be 'client' or 'record', not 'person'"),
    ({"unit": "record", "trust": "local", "epsilon": 1.0}, "nobody but the client is trusted with a record"),
    ({"unit": "record", "trust": "secagg", "epsilon": 1.0}, "leave trust = 'secagg' out"),
    ({"unit": "client", "trust": "silo", "epsilon": 1.0}, "trust must be 'central' or 'secagg' or 'local', not 'silo'"),
    ({"unit": "record"}, "privacy needs epsilon"),
    ({"unit": "record", "silo_epsilons": ()}, "give a value for each client"),
    ({"unit": "record", "epsilon": 1.0, "silo_epsilons": (1.0,)}, "leave epsilon out"),
    ({"unit": "client", "epsilon": 1.0, "silo_epsilons": (1.0,)}, "silo_epsilons is for unit = 'record'"),
    ({"unit": ("client", "record"), "epsilon": 1.0}, "needs the budget of records, too: record_epsilon"),
    ({"unit": ("client", "record"), "record_epsilon": 1.0}, "privacy needs epsilon"),
    ({"unit": ("client", "record"), "epsilon": 1.0, "record_epsilon": 1.0, "record_delta": 1.0}, "delta must lie"),
    ({"unit": ("client", "record"), "epsilon": 1.0, "record_epsilon": 1.0, "record_adjacency": "any"},
     "record_adjacency must be 'zero_out' or 'replace_one', not 'any'"),
    ({"unit": "record", "epsilon": 1.0, "randomness": "secure", "noise": "continuous"}, "noise that is continuous"),
])  # fmt: skip
def test_bad_questions_get_a_sentence(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(fn.UserError, match=re.escape(message)) as raised:
        fn.Privacy(**asked)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


units = st.sampled_from(["client", "record", ("client", "record"), ("record", "client"), ["record"], ("record",) * 2])
numbers = st.one_of(st.none(), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-3, 1.0, 8.0]))
budgets = st.one_of(st.none(), st.lists(st.sampled_from([0.0, -2.0, math.nan, math.inf, 1.0, 3.0]), max_size=3))


@settings(max_examples=300)
@given(
    unit=units, epsilon=numbers, noise_std=numbers, record_epsilon=numbers, record_noise_std=numbers,
    record_delta=numbers, silo_epsilons=budgets, record_adjacency=st.sampled_from([None, "zero_out", "replace_one"]),
)  # fmt: skip
@pytest.mark.long
def test_what_is_asked_is_refused_or_has_a_budget_or_noise_for_each_unit(unit: Any, **asked: Any) -> None:
    own = {name: asked[name] for name in ("record_epsilon", "record_noise_std", "record_delta", "record_adjacency")}
    try:
        found = fn.Privacy(unit=unit, **asked)
    except fn.UserError as error:
        assert str(error).endswith(".") and "\n" not in str(error)
        return
    protected = set([unit] if isinstance(unit, str) else unit)
    assert (found.for_clients, found.for_records) == ("client" in protected, "record" in protected)
    given = [value for value in asked.values() if isinstance(value, float)] + list(asked["silo_epsilons"] or ())
    assert all(0 < value < math.inf for value in given)
    assert protected == {"client", "record"} or all(value is None for value in own.values())
    assert found.for_records or asked["silo_epsilons"] is None
    if found.for_clients:
        assert found.epsilon is not None or found.noise_std is not None
    if found.for_records:
        wanted = found.of_records
        assert wanted.epsilons is not None or wanted.noise_std is not None
        first = "record_" if found.for_clients else ""
        one, each = asked[f"{first}epsilon"], asked["silo_epsilons"]
        assert wanted.noise_std == asked[f"{first}noise_std"]
        assert wanted.epsilons == (tuple(each) if each else None if one is None else (one,))
