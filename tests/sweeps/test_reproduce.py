"""The paper's experiments: the runs they ask for, the claims as arithmetic, and the whole command on a small scale."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from folders import made

import fednormec as fn
from fednormec.config.assemble import rules
from fednormec.core.randomness import generator
from fednormec.privacy.mechanism import plan
from fednormec.problems.quadratic import random_quadratic
from fednormec.runs.progress import News
from fednormec.runs.records import finished
from fednormec.sweeps import paper, paper_claims
from fednormec.sweeps.paper import (
    CLIENTS,
    COMPENSATED,
    FIGURES,
    GAMMAS,
    MODELS,
    NOISES,
    PLAIN,
    WORK,
    Point,
    Scale,
    _cell,
    cells,
    hours,
    scale,
)
from fednormec.sweeps.paper_claims import CLAIMS, Claim, Findings, Part, _c1, _c2, _c3, _c4, _c5, markdown, reproduce
from fednormec.sweeps.paper_runs import Reproduction, read_records
from fednormec.sweeps.pool import Cell, Outcome

Curve = Callable[[Point, int], list[float]]
TINY = Scale("tiny", "conv", 400, 100, (1, 2), rounds=2, local_work="epoch")


def as_in_the_paper(point: Point, seed: int) -> list[float]:
    """Curves of ten values that have every claim of the paper."""
    if point.method == PLAIN:
        top = 0.5 - 0.05 * abs(math.log10(point.beta * point.gamma) + 3) + 0.02 * (point.beta == 0.1)
    else:
        top = {0.001: 0.65, 0.01: 0.7, 0.1: 0.58}[point.beta] - 0.03 * (point.p < 1) - 0.01 * (point.gamma != 0.1)
    return [top * min(1.0, (k + 1) / (5 if point.p == 1 else 7)) + seed / 1e4 for k in range(10)]


def from_curves(tmp_path: Path, curve: Curve, seeds: tuple[int, ...] = (1, 2, 3)) -> Reproduction:
    asked = scale("small", seeds=seeds)
    outcomes = []
    for cell in cells(FIGURES, asked):
        *point, seed = cell.settings.values()
        accuracies = curve(Point(*point), seed)
        path = made(tmp_path / cell.name, accuracies, epsilon=3e4, label=True, run={"seed": seed})
        outcomes.append(Outcome(cell, path, {"metrics": {}}, None))
    return Reproduction(asked, outcomes)


# the runs


def test_every_figure_asks_for_the_grid_of_the_paper() -> None:
    assert len(cells(FIGURES, scale("small"))) == 3 * (9 + 9 + 3 + 9)
    assert {len(points) for points in FIGURES.values()} == {9, 18}
    for points in FIGURES.values():
        assert {point.gamma for point in points} == set(GAMMAS)
    assert [(cell.settings["seed"]) for cell in cells(["figure4"], scale("paper"))] == 9 * [42]


@pytest.mark.parametrize("name", ["small", "paper"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("work", WORK)
def test_every_run_is_one_that_can_be_run_and_says_that_it_is_not_private(name: str, noise: str, work: str) -> None:
    asked = scale(name, seeds=(1,), local_work=work, noise=noise)
    for cell in cells(FIGURES, asked):
        found = rules(cell.config)
        assert found.privacy is not None and found.privacy.noise_scale == "total_norm"
        assert (found.privacy.calibration == "paper") is (noise == "exchanges" or work != "epoch")
        assert found.privacy.stream > 0 and found.run.rounds == 300 * asked.exchanges


def test_a_pass_at_the_papers_scale_holds_84_exchanges() -> None:
    asked = scale("paper", local_work="epoch")
    assert asked.exchanges == 84 and asked.evaluate_every % 84 == 0 and "84 mini-batches" in asked.work
    assert scale("paper", local_work="epoch", examples=10_800).exchanges == 16
    assert scale("paper").exchanges == 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("rounds", [40, 300])
def test_evaluations_look_at_a_tenth_of_what_gradients_cost(model: str, work: str, rounds: int) -> None:
    """A gradient costs three forward passes; the statistics of batch normalisation are one pass more."""
    asked = scale("paper", model, local_work=work, rounds=rounds)
    points = math.ceil(rounds * asked.exchanges / asked.evaluate_every)
    looked_at = CLIENTS * MODELS[model]["problem"]["loss_examples"]
    seen = points * (6000 + looked_at * (1 + (model == "resnet20")))
    assert 1 <= points <= 30 and seen <= 0.1 * 3 * rounds * CLIENTS * asked.visits or points == 1


def test_cells_draw_their_own_noise() -> None:
    streams = [cell.config["privacy"]["stream"] for cell in cells(FIGURES, scale("small"))]
    assert len(set(streams)) == len(streams)


@pytest.mark.parametrize("method", [COMPENSATED, PLAIN])
@pytest.mark.parametrize("p", [1.0, 0.25])
def test_the_noise_of_a_message_has_the_papers_size_as_a_whole(method: str, p: float) -> None:
    """E‖β z_i‖² = (p β √(K log(1/δ))/ε)²: β is in the server's step of one method and in the radius of the other."""
    for work, noise, k in (("minibatch", "stated", 1), ("epoch", "stated", 1), ("epoch", "exchanges", 84)):
        asked = scale("paper", local_work=work, noise=noise)
        found = rules(_cell(Point(method, p, 0.01, 0.1), 1, asked).config)
        assert found.privacy is not None
        rule, radius = found.participation, found.algorithm.bound.radius
        made = plan(found.privacy, CLIENTS, rule, radius, 11_642, 300 * asked.exchanges)
        beta = 0.01 if method == COMPENSATED else 1.0  # what a message is multiplied with on arrival
        size = beta * made.mechanism.noise_std * made.mechanism.radius * math.sqrt(11_642)
        assert size == pytest.approx(p * 0.01 * math.sqrt(300 * k * math.log(1e5)) / 8)


def test_fedavg_moves_by_a_normalised_update() -> None:
    """One client, one step, no noise: x - γ β g/(α + ‖g‖), whatever the length of g."""
    found = rules(_cell(Point(PLAIN, 1.0, 0.1, 0.01), 1, scale("small", local_work="gradient")).config)
    problem = random_quadratic(1, 3, seed=1)
    x = problem.init(generator(0, "init"))
    g = problem.grad(x, np.array([0]))[0]
    (first,) = fn.simulate(problem, found.algorithm, rounds=1, on=fn.Threads(1))
    torch.testing.assert_close(first.x, x - 0.01 * 0.1 * g / (0.01 + g.norm()), rtol=1e-12, atol=0)


@pytest.mark.parametrize("k", [1, 4])
def test_steps_of_length_gamma_each_are_the_papers_recursion(k: int) -> None:
    """P_i = (x - T_i(x))/γ with T_i of k steps of length γ: our γ is the length of all of them, hence the scaling."""
    gamma, beta, alpha = 0.05, 0.1, 0.01
    config = _cell(Point(COMPENSATED, 1.0, beta, gamma), 0, scale("small", local_work="steps", local_steps=k)).config
    assert config["local"]["name"] == "sgd"  # here of full gradients, to compare with a loop
    config["local"] = {"name": "gd", "step": config["local"]["step"], "steps": config["local"]["steps"]}
    problem = random_quadratic(5, 3, seed=1)
    ours = rules(config).algorithm
    *_, last = fn.simulate(problem, ours, rounds=5, on=fn.Threads(1))
    x = problem.init(generator(0, "init"))
    start = x.clone()
    v, total = torch.zeros(5, 3, dtype=x.dtype), torch.zeros(3, dtype=x.dtype)
    for _ in range(5):
        sent = []
        for i in range(5):
            y = x.clone()
            for _ in range(k):
                y = y - gamma * problem.grad(y, np.array([i]))[0]
            gap = (x - y) / gamma - v[i]
            delta = gap / (alpha + gap.norm())
            v[i] += beta * delta
            sent.append(delta)
        total = total + beta * torch.stack(sent).mean(0)
        x = x - gamma * total
    assert not torch.equal(x, start)
    torch.testing.assert_close(last.x, x, rtol=1e-12, atol=1e-14)


# the claims


def test_the_papers_own_curves_have_all_its_claims(tmp_path: Path) -> None:
    done = from_curves(tmp_path, as_in_the_paper)
    found = {claim.name: claim.verdict for claim in (check(done) for check in CLAIMS)}
    assert found == {"C1": "holds", "C2": "holds", "C3": "holds", "C4": "holds", "C5": "holds"}
    assert Findings([], (1.0, 1.0), done.scale).warning.count("1.00") == 1
    assert done.tuned(COMPENSATED, 1.0, 0.01).gamma == 0.1


def test_margins_are_differences_of_last_accuracies(tmp_path: Path) -> None:
    parts = _c1(from_curves(tmp_path, as_in_the_paper)).parts
    assert parts[0].margins == pytest.approx([0.05] * 3) and parts[1].margins == pytest.approx([0.12] * 3)
    assert len(parts) == 6


def test_a_claim_can_fail_in_part_on_average_and_wholly(tmp_path: Path) -> None:
    def slow_is_best(point: Point, seed: int) -> list[float]:
        better = 0.2 if point.beta == 0.001 and point.method == COMPENSATED else 0.0
        return [value + better for value in as_in_the_paper(point, seed)]

    def few_are_better(point: Point, seed: int) -> list[float]:
        return [1 - value if point.method == COMPENSATED else value for value in as_in_the_paper(point, seed)]

    assert _c1(from_curves(tmp_path / "a", slow_is_best)).verdict == "holds in 4, does not hold in 2 of 6 parts"
    assert _c2(from_curves(tmp_path / "b", few_are_better)).verdict == "does not hold"
    assert Part("", (0.1, 0.3, -0.01)).verdict == "holds on average"
    assert Part("", (0.0,)).verdict == "does not hold"
    assert Part("", (0.1, -0.3, 0.1)).verdict == "does not hold"
    assert Claim("", "", 2 * (Part("", (0.1, 0.3, -0.01)),)).verdict == "holds on average"


def test_transmissions_count_messages_until_the_target(tmp_path: Path) -> None:
    """Full participation is at 65/70 of its end in round 10 of 20, p = 0.25 in round 14: 20 clients, k p M."""
    done = from_curves(tmp_path, as_in_the_paper)
    assert done.target() == pytest.approx(65 / 70 * (0.7 + 2e-4))
    whole, few = (done.tuned(COMPENSATED, p, 0.01) for p in (1.0, 0.25))
    assert done.transmissions(whole, 1, done.target()) == 10 * 20
    assert done.transmissions(few, 1, done.target()) == 14 * 0.25 * 20
    assert _c3(done).parts[1].margins == pytest.approx([200 / 70 - 1] * 3)


def test_a_target_that_is_not_reached_counts_against_the_claim(tmp_path: Path) -> None:
    def few_never_arrive(point: Point, seed: int) -> list[float]:
        return [0.1] * 10 if point.p == 0.25 else as_in_the_paper(point, seed)

    done = from_curves(tmp_path, few_never_arrive)
    assert [part.verdict for part in _c3(done).parts] == ["holds", "does not hold"]
    assert "not reached" in markdown([_c3(done)], done)


def test_compensation_is_judged_at_every_beta(tmp_path: Path) -> None:
    def plain_wins_once(point: Point, seed: int) -> list[float]:
        wins = point.method == PLAIN and point.beta == 0.01
        return [0.9] * 10 if wins else as_in_the_paper(point, seed)

    verdicts = [part.verdict for part in _c4(from_curves(tmp_path, plain_wins_once)).parts]
    assert verdicts == ["holds", "does not hold", "holds"]


def test_the_heat_map_is_judged_by_the_highest_accuracy_on_the_way(tmp_path: Path) -> None:
    def peaks_early(point: Point, seed: int) -> list[float]:
        curve = as_in_the_paper(point, seed)
        return [*curve[:-1], 0.0] if point.method == PLAIN else curve

    done = from_curves(tmp_path, peaks_early)
    assert _c5(done).verdict == "holds"
    point = Point(PLAIN, 1.0, 0.1, 0.01)
    assert done.highest(point, 1) == max(as_in_the_paper(point, 1)) and done.final(point, 1) == 0.0


def test_the_page_says_how_private_it_is_not(tmp_path: Path) -> None:
    done = from_curves(tmp_path, as_in_the_paper)
    page = markdown([check(done) for check in CLAIMS], done)
    assert page.startswith("NOT PRIVATE") and "3.00e+04" in page
    assert page.count("| C1 |") == 6 and f"| {COMPENSATED} | 0.5 | 0.01 |" in page
    assert f"| {COMPENSATED} | 0.5 | 0.1 |" not in page  # figure 2 has β = 0.01 alone


# the whole


@pytest.fixture
def on_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits in place of CIFAR-10, which need not have been fetched."""
    own = {"source": "digits", "test_fraction": 0.2, "partition": "iid", "clients": CLIENTS}
    monkeypatch.setitem(paper.PAPER, "data", own)


@pytest.mark.long
def test_figures_and_claims_from_real_runs_and_nothing_runs_twice(here: None, tmp_path: Path, on_digits: None) -> None:
    told: list[int] = []
    asked = cells(["figure4"], TINY)
    assert 0 < hours(asked, tmp_path, 2) < 1
    found = reproduce(["figure4"], TINY, tmp_path, 2, lambda news: None)
    assert [claim.name for claim in found.claims] == ["C5"]
    said = json.loads((tmp_path / "claims.json").read_text())
    assert found.text().startswith("NOT PRIVATE: ") and said["label"] == "NOT PRIVATE"
    assert said["true_epsilon"] == list(found.true_epsilons) and min(said["true_epsilon"]) > 1000
    for name in ("figure4.png", "figure4.pdf", "claims.md", "claims.json"):
        assert (tmp_path / name).stat().st_size > 200
    head, *kept = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert head == {"label": "NOT PRIVATE", "reading": TINY.reading()}
    assert len(kept) == 18 and {run["true_epsilon"] for run in kept} == set(found.true_epsilons)
    assert [at for at, _ in kept[0]["test_accuracy"]][-1] == TINY.rounds, "counted in rounds, not in exchanges"
    assert not (tmp_path / "figure1.png").exists()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/summary.json")}
    assert len(before) == 9 * 2
    assert hours(asked, tmp_path, 2) == 0
    reproduce(["figure4"], TINY, tmp_path, 2, lambda news: told.append(news.cells_ended))
    assert told == [18]
    past = read_records(tmp_path / "records.jsonl", TINY)
    again = reproduce(["figure4"], TINY, tmp_path / "elsewhere", 2, lambda news: None, past)
    assert not (tmp_path / "elsewhere" / "cells").exists() and again.text() == found.text()
    assert (tmp_path / "elsewhere" / "records.jsonl").read_text() == (tmp_path / "records.jsonl").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/summary.json")}


@pytest.mark.long
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(tmp_path: Path, name: str) -> None:
    from fednormec.sweeps.paper_figures import draw

    draw(name, from_curves(tmp_path, as_in_the_paper), tmp_path)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_records_say_what_the_runs_do(tmp_path: Path) -> None:
    done, path = from_curves(tmp_path, as_in_the_paper), tmp_path / "records.jsonl"
    done.write(path)
    past = read_records(path, done.scale)
    assert len(past) == 90
    again = Reproduction(done.scale, past=past)
    for check in CLAIMS:
        one, other = check(done), check(again)
        assert one.verdict == other.verdict
        for a, b in zip(one.parts, other.parts, strict=True):
            assert a.margins == pytest.approx(b.margins, abs=2e-4)
    assert again.true_epsilons() == done.true_epsilons()
    assert {run.protection for run in past.values()} == {"NOT PRIVATE"}


def test_records_of_a_run_that_diverged_come_back(tmp_path: Path) -> None:
    done = from_curves(tmp_path, lambda point, seed: [0.1, math.nan], (1,))
    done.write(tmp_path / "records.jsonl")
    past = read_records(tmp_path / "records.jsonl", done.scale)
    for (point, seed), run in past.items():
        (_, first), (_, last) = run.values("test_accuracy")
        assert first == 0.1 and math.isnan(last) and run.best("test_accuracy") == done.highest(point, seed)


def test_records_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    done, path = from_curves(tmp_path, as_in_the_paper, (1,)), tmp_path / "records.jsonl"
    done.write(path)
    with pytest.raises(fn.UserError, match="has runs with rounds = 300, and asked for is 2"):
        read_records(path, done.scale._replace(rounds=2))
    with pytest.raises(fn.UserError, match="there is no file"):
        read_records(tmp_path / "none.jsonl", done.scale)
    whole = path.read_text()
    for damaged in ("", "{}", "[1]\n", whole[:-20], whole.split("\n", 1)[1], whole.replace('"beta"', '"bta"')):
        path.write_text(damaged)
        with pytest.raises(fn.UserError, match=r"records.jsonl holds no records of fednormec reproduce"):
            read_records(path, done.scale)


def test_a_stopped_reproduction_has_records_of_what_ended(
    here: None, tmp_path: Path, on_digits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped_after_three(asked: list[Cell], folder: Path, workers: int, tell: Callable[[Any], None]) -> None:
        for n, cell in enumerate(asked[:3], 1):
            path = made(folder / "cells" / cell.name, [0.1, 0.2], epsilon=3e4, label=True, run={"seed": 1})
            tell(News(n, 9, Outcome(cell, path, finished(path), None), n))
        raise KeyboardInterrupt

    monkeypatch.setattr(paper_claims, "run_all", stopped_after_three)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["figure4"], TINY._replace(seeds=(1,)), tmp_path, 1, lambda news: None)
    assert len(read_records(tmp_path / "records.jsonl", TINY)) == 3


def test_a_run_that_failed_is_named(tmp_path: Path) -> None:
    cell = Cell("lost", {**Point(PLAIN, 1.0, 0.1, 0.1)._asdict(), "seed": 1}, {})
    with pytest.raises(fn.UserError, match="lost failed: no memory; the same command"):
        Reproduction(TINY, [Outcome(cell, tmp_path, None, "no memory")])


def test_mistakes_get_a_sentence(fednormec_: Command) -> None:
    for arguments, words in {
        ("reproduce", "figure9"): "did you mean 'figure4'",
        ("reproduce", "figure1", "--scale", "smal"): "did you mean 'small'",
        ("reproduce", "figure1", "--model", "resnet"): "did you mean 'resnet20'",
        ("reproduce", "figure1", "--noise", "state"): "did you mean 'stated'",
        ("reproduce", "figure1", "--examples", "19"): "examples must lie between 20 and 54,000",
        ("reproduce", "figure1", "--scale", "small", "--local-work", "stpes"): "did you mean 'steps'",
        ("reproduce", "figure1", "--scale", "small", "--workers", "0"): "workers",
        ("reproduce", "figure1", "--scale", "small", "--rounds", "0"): "rounds",
        (
            "reproduce",
            "figure1",
            "--scale",
            "small",
            "--rounds",
            "9" * 20,
        ): "accounting goes up to 1,000,000,000 rounds",
    }.items():
        said = fednormec_(*arguments)
        assert said.code == 2 and words in said.err, said


def test_data_that_are_missing_are_named_once(
    fednormec_: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "none"))
    said = fednormec_("reproduce", "figure4", "--scale", "small")
    assert said.code == 2 and said.err.count("\n") == 1 and "fednormec data fetch cifar10" in said.err
    assert not (tmp_path / "reproduction").exists()
