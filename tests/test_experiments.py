"""The experiments: the least example exactly, their quick versions, and what their pages say."""

import json
import math
import re
from pathlib import Path
from typing import Any

import contrast
import entries
import gradients
import heads
import hospital_silos
import leaderboard
import numpy as np
import outlook
import pace
import private_at_scale
import pytest
import rates
import readings
import shakespeare
import silo_data
import standings
import torch
from paths import ROOT
from scipy.optimize import brentq

import fednormec as fn
from fednormec.config.assemble import rules
from fednormec.core.local import Moment
from fednormec.privacy.outlook import ENOUGH, LITTLE, NOTHING
from fednormec.results.reading import find_runs
from fednormec.theory.setting import Constants, constants_of
from fednormec.theory.watch import measure

EXPERIMENTS = ROOT / "experiments"
GAMMA = 1 / 16  # 1/(2L) in the least example
LEFT = torch.tensor([-5.0], dtype=torch.float64)


def end(algorithm: fn.Algorithm, *, holders: int = 2, x0: torch.Tensor = LEFT, rounds: int = 800) -> float:
    """Where the least example ends."""
    *_, last = fn.simulate(contrast.two_functions(holders), algorithm, rounds=rounds, x0=x0, on=fn.Threads(1))
    return last.x.item()


def size(x: float, holders: int = 2) -> float:
    return contrast.gradient_norm(contrast.two_functions(holders), torch.tensor([x], dtype=torch.float64))


# f_1 = x^2/2 with two clients, f_2 = 4 (x - 10)^2 with one: f is least at 80/10 = 8


@pytest.mark.long
@pytest.mark.parametrize("server_step", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("radius", [0.5, 2.0])
def test_clipped_averaging_stalls_where_clipped_updates_cancel(server_step: float, radius: float) -> None:
    """2 x = radius: the client of f_2 is clipped there, as 8 (10 - x) > radius, the other two are not."""
    x = end(fn.dp_fed_avg_clip(fn.gd(GAMMA), tau=radius * GAMMA, server_step=server_step))
    assert x == pytest.approx(radius / 2, rel=1e-6)
    assert size(x) > 0.5 * size(LEFT.item())


@pytest.mark.long
@pytest.mark.parametrize("server_step", [0.03, 0.1, 0.3])
def test_normalised_averaging_stalls_too(server_step: float) -> None:
    alpha = 0.1
    zero = brentq(lambda x: 2 * x / (alpha + x) - 8 * (10 - x) / (alpha + 8 * (10 - x)), 0, 9)
    x = end(fn.dp_fed_avg_normalized(fn.gd(GAMMA), alpha=alpha, server_step=server_step, bounded="update"))
    assert x == pytest.approx(zero, rel=1e-6) and zero < 0.11
    assert size(x) > 0.5 * size(LEFT.item())


@pytest.mark.long
@pytest.mark.parametrize("beta", [0.25, 0.5])
def test_error_feedback_with_the_same_radius_converges(beta: float) -> None:
    x = end(fn.fed_normec(fn.gd(GAMMA), alpha=1.0, beta=beta, server_step=0.2, server_normalization=False))
    assert size(x) < 1e-3 * size(LEFT.item())


# with one client each, updates of any length cancel under clipping, and only equal ones under normalisation


@pytest.mark.long
def test_with_one_client_each_clipping_stops_wherever_both_are_clipped() -> None:
    for start in (2.0, 5.0, 9.0):
        x0 = torch.tensor([start], dtype=torch.float64)
        assert end(fn.dp_fed_avg_clip(fn.gd(GAMMA), tau=GAMMA), holders=1, x0=x0, rounds=20) == start
    for server_step in (1.0, 4.0, 64.0):
        x = end(fn.dp_fed_avg_clip(fn.gd(GAMMA), tau=GAMMA, server_step=server_step), holders=1)
        assert 1 - 1e-6 <= x <= 10 - 1 / 8


@pytest.mark.long
def test_with_one_client_each_normalisation_has_its_zero_at_the_optimum() -> None:
    algorithm = fn.dp_fed_avg_normalized(fn.gd(GAMMA), alpha=10.0, server_step=4.0, bounded="update")
    assert end(algorithm, holders=1) == pytest.approx(80 / 9, rel=1e-6)


# contrast


def test_the_closed_form_is_the_local_operator() -> None:
    for setting in (contrast.Setting("gd", 5, 1.0), contrast.Setting("ig", 4, 1.0)):
        s = contrast.scene(setting)
        x, ids = torch.from_numpy(np.random.default_rng(0).standard_normal(contrast.DIM)), np.array([3, 0, 17])
        expected = s.local.run(s.problem, x, ids, Moment(0, 1), None)
        found = contrast.closed_form(s.problem, s.local).run(s.problem, x, ids, Moment(0, 1), None)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.long
def test_clipping_stalls_on_plain_random_quadratics_too() -> None:
    x0, relative = torch.from_numpy(np.random.default_rng(0).standard_normal(10)), []
    for seed in (1, 2, 3):
        problem = fn.random_quadratic(30, 10, heterogeneity=3.0, seed=seed)
        algorithm = fn.dp_fed_avg_clip(fn.gd(0.1), tau=0.03, server_step=10.0)
        *_, last = fn.simulate(problem, algorithm, rounds=400, x0=x0, on=fn.Threads(1))
        relative.append(contrast.gradient_norm(problem, last.x) / contrast.gradient_norm(problem, x0))
    assert min(relative) == pytest.approx(0.12, abs=0.01) and max(relative) == pytest.approx(0.26, abs=0.01)


@pytest.mark.long
def test_quick_contrast_shows_the_stall(tmp_path: Path) -> None:
    contrast.main(["--quick", "--out", str(tmp_path)])
    assert min((tmp_path / f"{name}.png").stat().st_size for name in ("contrast", "family")) > 10_000
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    everyone, sampled = (ends(results, setting) for setting in contrast.QUICK.settings)
    for method in ("clipped, tight", "normalised, tight"):
        assert everyone[method] > 0.2 and sampled[method] > 0.2
        assert everyone[method] > 1000 * everyone["Fed-α-NormEC"]
        assert sampled[method] > 2 * sampled["Fed-α-NormEC"]  # so few rounds leave it little time
    assert set(everyone) == set(sampled) == set(contrast.COLOURS) == {*contrast.FIRST, *contrast.FAMILY}


def test_the_contrast_page_says_what_was_measured() -> None:
    results = json.loads((EXPERIMENTS / "contrast" / "results.json").read_text())["results"]
    page = (EXPERIMENTS / "contrast" / "README.md").read_text()
    assert contrast.matrix(results, contrast.FIRST) in page
    assert contrast.matrix(results, contrast.FAMILY) in page
    for setting in contrast.FULL.settings:
        found = ends(results, setting)
        tight = min(found["clipped, tight"], found["normalised, tight"])
        assert tight > 0.2 and tight > 10 * found["Fed-α-NormEC"]
        assert min(found["EF14"], found["centred"]) > 0.2
        assert (found["centred, leaky"] < found["Fed-α-NormEC"]) == (setting.p < 1)
    for r in results:
        assert 0.3 * r["typical_update"] < r["least_update"]  # tight: everyone is clipped at the optimum
        assert 30 * r["typical_update"] > r["largest_update"]  # the largest radius clips nobody there


def ends(results: list[dict[str, Any]], setting: contrast.Setting) -> dict[str, float]:
    return {r["method"]: r["relative"] for r in results if r["setting"] == setting._asdict()}


# rates


@pytest.fixture(scope="module")
def constants() -> Constants:
    problem = rates.problem()
    return constants_of(problem, rates.start(problem))


@pytest.mark.parametrize("schedule", rates.SCHEDULES, ids=lambda s: s.title)
def test_the_guarantee_falls_at_its_rate(schedule: rates.Schedule, constants: Constants) -> None:
    counts = [2**j for j in range(10, 40, 3)]
    bounds = [rates.guaranteed(schedule, constants, n) for n in counts]
    assert all(b.holds for b in bounds)
    assert rates.slope(counts, [b.bound for b in bounds]) == pytest.approx(-schedule.powers.rate, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("schedule", rates.SCHEDULES, ids=lambda s: s.title)
def test_memories_stay_within_the_schedules_error(schedule: rates.Schedule, constants: Constants) -> None:
    """Corrected Lemma 1, with the R that the guarantee counts on."""
    problem, (s, R) = rates.problem(), rates.settings(schedule, constants, 64)
    algorithm = s.algorithm(rates.LOCAL_STEPS if s.local == "gd" else 1)
    runs = fn.simulate(problem, algorithm, fn.poisson(schedule.p), rounds=64, x0=rates.start(problem), on=fn.Threads(1))
    assert max(measure(problem, algorithm, r).memory_error for r in runs) <= R * (1 + 1e-9)


@pytest.mark.long
def test_quick_rates_stay_below_the_guarantee(tmp_path: Path) -> None:
    rates.main(["--quick", "--out", str(tmp_path)])
    assert (tmp_path / "rates.svg").stat().st_size > 10_000
    for r in json.loads((tmp_path / "results.json").read_text())["results"]:
        assert r["bound_holds"]
        assert all(m <= b for m, b in zip(r["measured"], r["bound"], strict=True))
        assert r["measured"] == sorted(r["measured"], reverse=True)


def test_the_rates_page_says_what_was_measured() -> None:
    results = json.loads((EXPERIMENTS / "rates" / "results.json").read_text())["results"]
    assert rates.table(results) in (EXPERIMENTS / "rates" / "README.md").read_text()
    for r in results:
        assert r["slope_bound"] == pytest.approx(-r["rate"], abs=0.02)
        assert r["slope_measured"] < -0.8 * r["rate"]
        assert all(m <= b for m, b in zip(r["measured"], r["bound"], strict=True))


# private at scale


@pytest.mark.long
def test_private_at_scale_tunes_with_one_seed_and_judges_with_others(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick version through the real runs: every ε is kept to, and the table is what the runs' folders say."""
    monkeypatch.setattr("sys.argv", ["x", "--quick", "--quiet", "--runs", f"{tmp_path}/runs", "--out", f"{tmp_path}"])
    private_at_scale.main()
    study = json.loads((tmp_path / "digits-iid.json").read_text())
    runs = find_runs([tmp_path / "runs"])
    assert len(runs) == 3 * 8 + 3 * 2 * 3
    for row in study["rows"]:
        assert row["spent"] <= row["epsilon"]
        same = [run for run in runs if run.epsilon == row["spent"] and run.seed in private_at_scale.SEEDS]
        assert set(row["accuracies"]) <= {run.final("test_accuracy") for run in same}
    for label in dict.fromkeys(row["method"] for row in study["rows"]):
        chosen = {(row["bound"], row["server_step"]) for row in study["rows"] if row["method"] == label}
        assert len(chosen) == 1  # tuned at the largest ε, used at every other
    assert "Tuning at ε = 8: all 24 private runs together, " in (tmp_path / "results.md").read_text()
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_private_at_scale_has_the_tables_of_its_raw_results() -> None:
    """results.md is what the files of all federations say, and the page quotes no accuracy that is not in it."""
    folder = EXPERIMENTS / "private-at-scale"
    studies = [_read(folder / f"{task.name}.json") for task in private_at_scale.TASKS]
    results = (folder / "results.md").read_text()
    assert private_at_scale.tables(studies) == results
    measured = {f"{mean} ± {spread}" for mean, spread in re.findall(r"([\d.]+)% ± ([\d.]+)%", results)}
    measured |= set(re.findall(r"[\d.]+ ± [\d.]+", shakespeare.table(_read(folder / "shakespeare.json"))))
    quoted = re.findall(r"[\d.]+ ± [\d.]+", (folder / "README.md").read_text())
    assert quoted and set(quoted) <= measured


def test_private_at_scale_compares_what_the_page_says() -> None:
    """Every federation, method, p and ε that its README promises."""
    plain = [task for task in private_at_scale.TASKS if task.features is None]
    fashion = [task for task in plain if task.data["source"] == "fashion_mnist"]
    assert [task.data["partition"] for task in fashion] == ["iid", "dirichlet"]
    for task in fashion:
        assert task.data["clients"] == 2000 and task.epsilons == (1.0, 2.0, 4.0, 8.0)
        families = {method.family for method in task.methods}
        assert families == {
            "Fed-α-NormEC", "DP-FedAvg (clip)", "DP-FedAvg (normalised)", "Clip21", "Clip21-SGD2M", "DP-SCAFFOLD"
        }  # fmt: skip
        for family in families:
            assert {method.p for method in task.methods if method.family == family} == {0.1, 1.0}
        ours = {(method.p, method.idle) for method in task.methods if method.family == "Fed-α-NormEC"}
        assert {(0.1, "advance"), (0.1, "sleep")} < ours
    cifar = [task for task in plain if task.data["source"] == "cifar10"]
    assert all(1000 <= task.data["clients"] <= 5000 and task.epsilons == (8.0,) for task in cifar)
    featured = {task.name: task for task in private_at_scale.TASKS if task.features is not None}
    assert [(task.data["clients"], task.data["partition"]) for task in featured.values()] == [
        (5000, "iid"), (5000, "shards"), (2000, "iid")
    ]  # fmt: skip
    assert all(task.epsilons == (1.0, 8.0) for task in featured.values())


def test_features_reach_the_accuracy_that_they_are_there_for() -> None:
    """CIFAR-10: 80 % at ε = 8 and 78 % at ε = 1, iid and with two classes a client; Fashion-MNIST: 84 % at ε = 1."""
    folder = EXPERIMENTS / "private-at-scale"
    wanted = {
        "cifar10-features-iid": {1.0: 0.78, 8.0: 0.8}, "cifar10-features-shards": {1.0: 0.78, 8.0: 0.8},
        "fashion-gradients": {1.0: 0.84},
    }  # fmt: skip
    for name, least in wanted.items():
        rows = _read(folder / f"{name}.json")["rows"]
        for epsilon, accuracy in least.items():
            best = max(np.mean(row["accuracies"]) for row in rows if row["epsilon"] == epsilon)
            assert best >= accuracy and all(row["spent"] <= epsilon for row in rows if row["epsilon"] == epsilon)


def test_the_page_has_the_table_of_shakespeare() -> None:
    folder = EXPERIMENTS / "private-at-scale"
    content = _read(folder / "shakespeare.json")
    assert [row["epsilon"] for row in content["rows"]] == [1.0, 8.0, None]
    assert shakespeare.table(content) in (folder / "README.md").read_text()


def test_features_of_gradients_are_the_histograms_of_a_literal_loop() -> None:
    image, bins, cell = np.random.default_rng(0).random((8, 8)), 6, 4
    padded = np.pad(image, 1, mode="edge")
    histograms = np.zeros((bins, 2, 2))
    for row in range(8):
        for column in range(8):
            across = padded[row + 1, column + 2] - padded[row + 1, column]
            down = padded[row + 2, column + 1] - padded[row, column + 1]
            angle = math.atan2(down, across) % math.pi / math.pi * bins  # a direction and its opposite count as one
            low, share = int(angle) % bins, angle - int(angle)
            for place, part in ((low, 1 - share), ((low + 1) % bins, share)):
                histograms[place, row // cell, column // cell] += part * math.hypot(across, down) / cell**2
    energy = (histograms**2).sum(0).mean()  # of two by two cells each has all for neighbours
    bright = image.reshape(2, cell, 2, cell).mean((1, 3))
    expected = np.concatenate([(histograms / math.sqrt(energy + 1e-3)).ravel(), bright.ravel()])
    found = gradients.extract(image[None, None], cell, bins).numpy()
    assert np.allclose(found[0], expected, atol=1e-5)


# what the paper may have run


@pytest.fixture
def small_task(monkeypatch: pytest.MonkeyPatch) -> readings.Task:
    """Images made up, twelve rounds."""
    monkeypatch.setattr(readings, "ROUNDS", 12)
    monkeypatch.setattr(readings, "POINTS", 3)
    monkeypatch.setattr(readings, "OWN", 64)
    rng = np.random.default_rng(0)
    pairs = [(rng.standard_normal((64, 3, 2, 2)), rng.integers(0, 10, 64)) for _ in range(readings.M)]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    inputs, targets = torch.as_tensor(pairs[0][0], dtype=torch.float32), torch.as_tensor(pairs[0][1])
    return readings.Task(fn.NeuralProblem(net, pairs, tile=readings.M), inputs, targets)


@pytest.mark.parametrize("method", ["normec", "fedavg"])
def test_a_reading_as_printed_is_the_librarys_recursion(small_task: readings.Task, method: str) -> None:
    reading = readings.Reading("gradient", "none")
    found = readings.run(small_task, reading, method, 0.1, 0.5)
    local = fn.gd(0.5)
    algorithm = (
        fn.fed_normec(local, alpha=0.01, beta=0.1, server_step=0.5, server_normalization=False)
        if method == "normec"
        else fn.dp_fed_avg_normalized(local, alpha=0.01, beta=0.1, server_step=0.5, bounded="update")
    )
    *_, last = fn.simulate(small_task.problem, algorithm, rounds=12, on=fn.Threads(1))
    start = small_task.problem.init(np.random.default_rng(0))
    assert found["moved"] == pytest.approx(float((last.x - start).norm()), rel=1e-4)
    assert found["last"] == pytest.approx(small_task.accuracy(last.x), abs=1e-4) and len(found["curve"]) == 3


@pytest.mark.parametrize("reading", readings.READINGS, ids=lambda reading: reading.name)
def test_every_reading_runs(small_task: readings.Task, reading: readings.Reading) -> None:
    for method in ("normec", "fedavg"):
        found = readings.run(small_task, reading, method, 0.1, 0.1)
        assert 0 < found["moved"] < 1e4 and len(found["curve"]) == 3


def test_noise_grows_with_the_exchanges_as_the_page_says(small_task: readings.Task) -> None:
    """Without gradients: βγ s √N in the model for FedAvg, about βγ s √(N³/3) with error feedback; s for 12 rounds."""
    still = readings.Task(Still(), small_task.inputs, small_task.targets)  # type: ignore[arg-type]
    reading = readings.Reading("gradient", "std")
    n, s = 12, readings.PAPER / np.sqrt(readings.M)
    moved = {m: readings.run(still, reading, m, 0.1, 0.1)["moved"] for m in ("normec", "fedavg")}
    assert moved["fedavg"] == pytest.approx(0.01 * s * np.sqrt(n), rel=0.03)
    assert moved["normec"] == pytest.approx(0.01 * s * np.sqrt(n * (n + 1) * (2 * n + 1) / 6), rel=0.03)


class Still:
    """A problem of 20,000 parameters without slope."""

    dim = 20_000

    def init(self, rng: np.random.Generator) -> torch.Tensor:
        return torch.zeros(self.dim)

    def grad(self, x: torch.Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> torch.Tensor:
        return torch.zeros(len(ids), self.dim)

    def model(self, x: torch.Tensor) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))


def test_the_page_of_outlook_has_its_tables_and_the_thresholds_part_its_runs() -> None:
    page = (EXPERIMENTS / "outlook" / "README.md").read_text()
    assert outlook.table() in page and outlook.bands() in page
    reached = [(outlook.decisive(*case), best) for *case, best in outlook.found()]
    assert max(best for ratio, best in reached if ratio >= NOTHING) < 0.3  # chance is 0.1
    assert max(best for ratio, best in reached if ratio >= LITTLE) < 0.55
    assert min(best for ratio, best in reached if ratio < ENOUGH) > 0.65


def test_a_case_of_outlook_has_the_noise_that_it_says() -> None:
    """And ends as its page says: learnt with little noise, at chance with much."""
    case, method = outlook.problem((), 20), outlook.METHODS["dp_fed_avg_normalized"](0.2)
    good, bad = (outlook.accuracy(case, method, 15, ratio) for ratio in (0.1, 16.0))
    assert good > 0.8
    assert bad < 0.2
    noise = fn.Mechanism(20, fn.full(), 4.0 * math.sqrt(15) * 20 / math.sqrt(case.dim))
    assert noise.noise_to_signal(case.dim) / math.sqrt(15) == pytest.approx(4.0)


def test_the_page_of_readings_has_its_table() -> None:
    assert readings.table() in (EXPERIMENTS / "readings" / "README.md").read_text()


def test_the_leaderboard_tunes_all_alike_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its quick version through real runs: as many tuning runs and seeds in one row as in another, each ε kept."""
    monkeypatch.setattr(entries, "ENTERED", ("DP-FedAvg (clip)", "Clip21"))
    asked, file = ["--quick", "--workers", "1", "--results", str(tmp_path)], tmp_path / "quick.jsonl"
    leaderboard.main(asked)
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(runs) == 12
    for family in entries.ENTERED:
        mine = [run for run in runs if run["row"].endswith(family)]
        assert [run["seed"] for run in mine].count(entries.TUNING_SEED) == 3
        judged = [run for run in mine if run["seed"] != entries.TUNING_SEED]
        assert sorted(run["seed"] for run in judged) == [*entries.SEEDS]
        assert all({"noise", "off"} <= run.keys() for run in judged)
        assert all(("lag" in run) == (family == "Clip21") for run in judged)
        best = max((run for run in mine if run not in judged), key=standings.score)
        assert all(run["settings"] == best["settings"] for run in judged)
    assert all(7.5 < run["epsilon"] <= 8 for run in runs)
    said = capsys.readouterr().out
    file.write_text("".join(json.dumps(run) + "\n" for run in runs if run != runs[1]))  # as if stopped before
    leaderboard.main(asked)
    assert capsys.readouterr().out == said
    again = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(again) == len(runs)
    assert {k: v for k, v in again[-1].items() if k != "seconds"} == {
        k: v for k, v in runs[1].items() if k != "seconds"
    }
    leaderboard.main(asked)  # nothing is missing
    assert len(file.read_text().splitlines()) == len(runs)


def test_the_pages_of_the_leaderboard_say_what_its_runs_say() -> None:
    """Each row that is shown had as many tuning runs as any other, and kept its ε."""
    held = standings.Held(leaderboard.RESULTS)
    rows = list(entries.rows_of(entries.TASKS, entries.EPSILONS, entries.SHARES))
    assert standings.page(held, rows) == (EXPERIMENTS / "leaderboard" / "results.md").read_text()
    assert pace.page(held) == pace.PAGE.read_text()
    said = (EXPERIMENTS / "leaderboard" / "README.md").read_text()
    assert standings.winners(held, rows) in said and pace.comparison(held, [*entries.TASKS]) in said
    shown = [row for own in standings.places(held, rows).values() for row in own.values()]
    assert len(shown) >= 200
    for row in [*shown, *entries.STUDY]:
        tuning = held.of(row, [entries.TUNING_SEED])
        assert len(tuning) == entries.DRAWN + entries.REFINED
        assert all(entries.draw(row, number) in [run["settings"] for run in tuning] for number in range(entries.DRAWN))
        assert all(0.9 * row.epsilon < run["epsilon"] <= row.epsilon for run in tuning + held.judged(row))


def test_what_the_leaderboard_recommends_is_within_its_reach() -> None:
    """The reasons that `fednormec recommend` gives, held against the runs that they rest on."""
    held = standings.Held(leaderboard.RESULTS)
    rows = list(entries.rows_of(entries.TASKS, entries.EPSILONS, entries.SHARES))
    behind, gains = [], {name: list[float]() for name in pace.CHANGES}
    for own in standings.places(held, rows).values():
        figures = {family: np.mean(held.figures(row)) for family, row in own.items()}
        behind.append(100 * (max(figures.values()) - figures[pace.FAMILY]))
    assert 1.5 < max(behind) < 2  # "no tuned method was over 2 points better"
    for own in pace.changed([*entries.TASKS]).values():
        found = {
            name: np.mean([run["last"] for run in held.of(row, entries.SEEDS) if run["settings"] == asked])
            for name, (row, asked) in own.items()
        }
        for name, figure in found.items():
            gains[name].append(100 * (figure - found["recommended"]))
    assert -4.0 < min(gains["one local step"]) < -3.5 and max(gains["one local step"]) < 0.65
    assert min(gains["constant step"]) < -17 and max(gains["momentum"]) < 1.45
    assert max(gains["step / 3"]) < 1 and max(gains["step · 3"]) < 0


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("correcting", [False, True])
@pytest.mark.parametrize("steps", [1, 5])
def test_heads_and_bags_of_the_leaderboard_take_the_steps_of_gd(steps: int, correcting: bool, alike: bool) -> None:
    rng, ids = np.random.default_rng(0), np.array([2, 3, 4, 7])
    sizes = [5] * 8 if alike else [3, 5, 5, 4, 5, 1, 2, 6]
    tokens = fn.data.Kind("tokens", "values")
    digits = [fn.data.Examples(rng.normal(size=(n, 7)), rng.integers(0, 3, n)) for n in sizes]
    words = [fn.data.Examples(rng.integers(0, 9, (n, 4)), rng.integers(0, 2, n), tokens) for n in sizes]
    names = tuple("abcdefgh")
    on_features = heads.heads(fn.data.FederatedData(tuple(digits), digits[0], names))
    of_tokens = fn.data.FederatedData(tuple(words), words[0], names)
    bag = fn.NeuralProblem(fn.models.bag((4,), 1, vocabulary=9), words, words[0], "binary_cross_entropy")
    for clients in (on_features, heads.bags(of_tokens, bag)):
        x = torch.as_tensor(rng.normal(size=clients.problem.dim), dtype=torch.float32)
        aside = torch.as_tensor(rng.normal(size=(4, x.numel())), dtype=torch.float32) if correcting else None
        found, literal = (
            local.run(clients.problem, x, ids, Moment(0, 1, 0.8), aside)
            for local in (clients.gd(0.7, steps), fn.gd(0.7, steps))
        )
        torch.testing.assert_close(found, literal, rtol=1e-4, atol=1e-5)


def test_settings_of_the_leaderboard_are_drawn_by_number_alone() -> None:
    """The same for all methods with the same ranges, and spread: every optimiser with 1 and 5 steps."""
    first, other = (entries.Row("quick", e, 0.5, f) for e, f in ((8.0, "Fed-α-NormEC"), (1.0, "Clip21")))
    drawn = [entries.draw(first, number) for number in range(entries.DRAWN)]
    assert drawn == [entries.draw(other, number) for number in range(entries.DRAWN)]
    for name in entries.SERVERS:
        mine = [settings for settings in drawn if settings["server"] == name]
        assert sorted(settings["local_steps"] for settings in mine) == [1, 5]
        assert sorted(settings["schedule"] for settings in mine) == ["constant", "cooldown"]
    alone = [entries.draw(first._replace(server="disk"), number) for number in range(entries.DRAWN)]
    assert {(settings["local_steps"], settings["schedule"]) for settings in alone} == {
        (steps, shape) for steps in (1, 5) for shape in ("constant", "cooldown")
    }
    low, high = (8.0 * end for end in entries.FAMILIES["Clip21"].bound)  # 8 is the length of the features
    bounds = np.sort([settings["bound"] for settings in drawn])
    tenths = np.log(bounds / low) / np.log(high / low) * entries.DRAWN
    assert [*tenths.astype(int)] == [*range(entries.DRAWN)]
    for number in range(entries.REFINED):
        near, most = entries.near(drawn[0], number), 3.01 if number < 3 else 1.71
        assert all(1 / most < near[name] / drawn[0][name] < most for name in ("bound", "step", "local_step"))
        assert {name: near[name] for name in ("server", "schedule", "local_steps")}.items() <= drawn[0].items()


def test_settings_of_the_leaderboard_mean_the_same_in_every_method() -> None:
    """A bound of 2 on updates, local steps of 0.5 in all: displacements are bounded at 1, and a round moves as far."""
    asked = {"bound": 2.0, "step": 3.0, "local_step": 0.5, "local_steps": 5, "unit": 8.0}
    problem, far, ends = fn.random_quadratic(20, 5, seed=1), torch.full((5,), 100.0, dtype=torch.float64), []
    for family in ("DP-FedAvg (clip)", "DP-FedAvg (normalised)", "DP-SCAFFOLD", "Clip21"):
        sections = entries.FAMILIES[family].sections(asked)
        method = rules({"local": {"step": 0.5}, **sections, "run": {"rounds": 1}}).algorithm
        *_, last = fn.simulate(problem, method, rounds=1, x0=far)
        ends.append((far - last.x).norm().item())
    assert all(0 < end <= 3.0 * 2.0 * 1.001 for end in ends)
    assert max(ends) < 1.6 * min(ends)  # of SCAFFOLD's message half is the control variate: 1/√2
    assert max(ends) > 0.5 * 3.0 * 2.0


# Silos that protect each of their records


def test_the_silos_of_the_experiment_hold_whole_persons_out() -> None:
    dealt = hospital_silos.split(silo_data.SETS["diabetes"], 3)
    assert [len(own) + len(aside) for own, aside in zip(*dealt, strict=True)] == [177, 110, 75, 49, 31]
    x, y, person = np.ones((40, 2)), np.zeros(40), np.arange(40) % 10
    made = silo_data.Set("", "", "accuracy", lambda seed: [silo_data.Examples(x, y, silo_data.VALUES, person)] * 2)
    train, test = hospital_silos.split(made, 0)
    for own, aside in zip(train, test, strict=True):
        assert own.person is not None and aside.person is not None
        assert len(set(aside.person.tolist())) == 3 and not set(own.person.tolist()) & set(aside.person.tolist())
    problem = hospital_silos.problem(made, hospital_silos.Split(train, test).together.train)
    assert isinstance(problem, fn.Logistic) and problem.record_sizes.tolist() == [14]  # of two silos, 7 persons each


@pytest.mark.long
def test_together_silos_learn_more_than_alone() -> None:
    """At ε = 1/2, where noise matters most: they lose less to it than each alone, and more than one silo would."""
    cancer = silo_data.SETS["breast cancer"]

    def reached(name: str, epsilon: float | None) -> float:
        return float(np.mean([hospital_silos.measured(cancer, name, epsilon, seed) for seed in range(4)]))

    together, alone, pooled = (reached(name, 0.5) for name in ("fed_avg", "local_training", "pooled"))
    assert alone + 4 < together < pooled < reached("exact", None) - 3
    assert reached("fed_avg", None) > together + 4


def test_the_page_on_silos_has_the_tables_of_its_results() -> None:
    assert hospital_silos.tables() in (EXPERIMENTS / "hospitals" / "README.md").read_text()
