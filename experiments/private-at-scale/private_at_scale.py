"""Claim: with thousands of clients, client-level privacy with a true ε trains useful models on two cores; which method
does so best, at what ε, and what it costs in messages and gradients, is measured here and not assumed.

Fashion-MNIST, 2,000 clients (iid and Dirichlet 0.3), ε in {1, 2, 4, 8} at δ = 1e-5, a trusted aggregator; CIFAR-10 with
5,000 clients at ε = 8; and linear heads on public features of both, at ε in {1, 8}. Every method is tuned at ε = 8 over
the same grid with a seed of its own, and what was found is used at every ε with three other seeds.

Run it from the root of the project, where it finds head.py and gradients.py:
        python experiments/private-at-scale/private_at_scale.py            (over two hours on two cores; goes on where
                                                                            it was stopped)
        python experiments/private-at-scale/private_at_scale.py --quick    (a minute; digits, few clients)
Runs go to --runs (default: runs/private-at-scale); TASK.json of each federation, and results.md, accuracy.png and
features.png of all there are, to --out (default: beside this file).
Needs: fednormec data fetch fashion_mnist; fednormec data fetch cifar10; pip install 'fednormec[vision]'
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednormec.drawing import new_figure, save_figure
from fednormec.errors import UserError
from fednormec.results.reading import Run, read_run
from fednormec.runs.environment import environment
from fednormec.runs.progress import tallied
from fednormec.sweeps.pool import Cell, Outcome, run_all, with_own_noise
from fednormec.sweeps.ranking import line, price, price_text

ACCURACY = "test_accuracy"
TUNING_SEED, SEEDS = 0, (1, 2, 3)
BOUNDS, STEPS = (0.1, 0.3, 1.0), (0.1, 0.3, 1.0, 3.0)  # the grid: β or τ, and the server's step
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^Dv*"


class Method(NamedTuple):
    """A method with who takes part; `build` has the bound and the server's step as its arguments."""

    family: str
    p: float
    idle: str
    build: Callable[[float, float], dict[str, Any]]
    takes_local: bool = True
    local_steps: int = 1

    @property
    def label(self) -> str:
        idle = f", {self.idle}" if self.p < 1 and self.family in REMEMBER else ""
        return f"{self.family}, p = {self.p:g}{idle}" + (f", T = {self.local_steps}" if self.local_steps > 1 else "")

    @property
    def key(self) -> str:
        parts = [self.family.replace(" ", "-").replace("(", "").replace(")", ""), f"p={self.p:g}"]
        parts += [self.idle] if self.p < 1 and self.family == NORMEC else []
        return "_".join(parts + ([f"T={self.local_steps}"] if self.local_steps > 1 else []))


class Task(NamedTuple):
    """A federation to train, the methods to compare on it, and the accuracy that counts as there."""

    name: str
    data: dict[str, Any]
    model: dict[str, Any]
    rounds: int
    methods: tuple[Method, ...]
    epsilons: tuple[float, ...]
    target: float
    features: dict[str, Any] | None = None
    local_step: float = 1.0
    bounds: tuple[float, ...] = BOUNDS
    steps: tuple[float, ...] = STEPS


def _normec(beta: float, step: float) -> dict[str, Any]:
    return {"name": "fed_normec", "beta": beta, "server_step": step, "server_normalization": False}


def _clipped(tau: float, step: float) -> dict[str, Any]:
    return {"name": "dp_fed_avg_clip", "tau": tau, "server_step": step}


def _normalised(beta: float, step: float) -> dict[str, Any]:
    return {"name": "dp_fed_avg_normalized", "beta": beta, "server_step": step}


def _clip21(tau: float, step: float) -> dict[str, Any]:
    return {"name": "clip21", "tau": tau, "server_step": step}


def _sgd2m(tau: float, step: float) -> dict[str, Any]:
    return {"name": "clip21_sgd2m", "tau": tau, "server_step": step, "client_momentum": 0.5}


def _scaffold(tau: float, step: float) -> dict[str, Any]:
    return {"name": "dp_scaffold", "tau": tau, "server_step": step}


NORMEC, CLIPPED, NORMALISED = "Fed-α-NormEC", "DP-FedAvg (clip)", "DP-FedAvg (normalised)"
CLIP21, SGD2M, SCAFFOLD = "Clip21", "Clip21-SGD2M", "DP-SCAFFOLD"
REMEMBER = (NORMEC, CLIP21, SGD2M)  # their idle clients could advance their memories, too
WHOLE = (
    Method(NORMEC, 1.0, "advance", _normec),
    Method(CLIPPED, 1.0, "sleep", _clipped),
    Method(NORMALISED, 1.0, "sleep", _normalised),
    Method(CLIP21, 1.0, "sleep", _clip21, takes_local=False),
    Method(SGD2M, 1.0, "sleep", _sgd2m, takes_local=False),
    Method(SCAFFOLD, 1.0, "sleep", _scaffold),
)
SAMPLED = (
    Method(NORMEC, 0.1, "advance", _normec),
    Method(NORMEC, 0.1, "sleep", _normec),
    *(method._replace(p=0.1) for method in WHOLE[1:]),
)
SEVERAL = tuple(SAMPLED[i]._replace(local_steps=5) for i in (1, 3, 6))  # Fed-α-NormEC, DP-FedAvg, DP-SCAFFOLD
FEW = (SAMPLED[1], SAMPLED[2], SAMPLED[3])  # for CIFAR-10

FASHION, EPSILONS = "fashion_mnist", (1.0, 2.0, 4.0, 8.0)
HEAD = {"name": "experiments/private-at-scale/head.py:build"}
IMAGENET = {"name": "efficientnet_lite0", "size": 128}
GRADIENTS = {"name": "experiments/private-at-scale/gradients.py:extract", "bins": 6}
TASKS = (
    Task("fashion-iid", {"source": FASHION, "partition": "iid", "clients": 2000}, {"name": "mlp", "hidden": [16]},
         50, WHOLE + SAMPLED + SEVERAL, EPSILONS, 0.7),
    Task("fashion-dirichlet", {"source": FASHION, "partition": "dirichlet", "concentration": 0.3, "clients": 2000},
         {"name": "mlp", "hidden": [16]}, 50, WHOLE + SAMPLED + SEVERAL, EPSILONS, 0.7),
    Task("cifar10-linear", {"source": "cifar10", "partition": "iid", "clients": 5000}, {"name": "linear"},
         100, FEW, (8.0,), 0.3),
    Task("cifar10-cnn", {"source": "cifar10", "partition": "iid", "clients": 5000},
         {"name": "small_cnn", "channels": [8, 16], "norm": "none", "halving": "stride"}, 100, FEW, (8.0,), 0.3),
    Task("cifar10-features-iid", {"source": "cifar10", "partition": "iid", "clients": 5000}, HEAD,
         50, FEW, (1.0, 8.0), 0.8, IMAGENET, bounds=(0.3, 1.0), steps=(0.3, 1.0, 3.0)),
    Task("cifar10-features-shards", {"source": "cifar10", "partition": "shards", "clients": 5000}, HEAD,
         50, FEW, (1.0, 8.0), 0.8, IMAGENET, bounds=(0.3, 1.0), steps=(0.3, 1.0, 3.0)),
    Task("fashion-gradients", {"source": FASHION, "partition": "iid", "clients": 2000}, HEAD,
         100, SEVERAL, (1.0, 8.0), 0.8, GRADIENTS, local_step=5.0, bounds=(0.3, 1.0), steps=(1.0, 2.0, 6.0)),
)  # fmt: skip
QUICK = (
    Task("digits-iid", {"source": "digits", "partition": "iid", "clients": 200}, {"name": "linear"}, 6,
         (WHOLE[0], SAMPLED[1], SAMPLED[3]), (4.0, 8.0), 0.3, bounds=BOUNDS[:2]),
)  # fmt: skip


class Tuned(NamedTuple):
    bound: float
    step: float
    accuracy: float


class Study:
    """All runs of a task, in two rounds: the grid at the largest ε, then what it chose at every ε."""

    def __init__(self, task: Task, runs: Path, workers: int, quiet: bool) -> None:
        self.task, self._folder, self._workers, self._quiet = task, runs / task.name, workers, quiet
        top = max(task.epsilons)
        grid = {
            (m.key, b, s): self._cell(m, b, s, top, TUNING_SEED)
            for m in task.methods for b in task.bounds for s in task.steps
        }  # fmt: skip
        found = self._run(list(grid.values()))
        self.tuned: dict[str, Tuned] = {}
        for m in task.methods:
            tried = [Tuned(b, s, _final(found[cell.name])) for (key, b, s), cell in grid.items() if key == m.key]
            self.tuned[m.key] = max(tried, key=lambda one: one.accuracy)
        self.tuning_price = price(list(found.values()), self._folder)
        cells = {
            (m.key, e, seed): self._cell(m, self.tuned[m.key].bound, self.tuned[m.key].step, e, seed)
            for m in task.methods for e in task.epsilons for seed in SEEDS
        }  # fmt: skip
        ended = self._run(list(cells.values()))
        self.runs: dict[tuple[str, float], list[Run]] = {}
        for (key, e, _), cell in cells.items():
            self.runs.setdefault((key, e), []).append(read_run(ended[cell.name].path))

    def accuracies(self, method: Method, epsilon: float) -> list[float]:
        """The last of each seed; a model that diverged counts as none."""
        runs = self.runs[method.key, epsilon]
        return [0.0 if run.status == "diverged" else run.final(ACCURACY) or 0.0 for run in runs]

    def to_target(self, method: Method, epsilon: float) -> tuple[float, float] | None:
        """Messages of d numbers sent and client gradients computed, in expectation, when the mean curve reaches the
        target; DP-SCAFFOLD sends two such messages at once."""
        curves = [dict(run.values(ACCURACY)) for run in self.runs[method.key, epsilon]]
        common = sorted(set.intersection(*map(set, curves)))
        mean = {k: np.mean([curve[k] for curve in curves]) for k in common}
        rounds = next((k for k, value in mean.items() if value >= self.task.target), None)
        if rounds is None:
            return None
        clients = self.task.data["clients"]
        computing = clients if method.idle == "advance" else method.p * clients
        messages = rounds * method.p * clients * (2 if method.family == SCAFFOLD else 1)
        return messages, rounds * computing * method.local_steps

    def facts(self) -> dict[str, Any]:
        rows = []
        for m in self.task.methods:
            t = self.tuned[m.key]
            for e in self.task.epsilons:
                reached = self.to_target(m, e)
                rows.append({
                    "method": m.label, "epsilon": e, "bound": t.bound, "server_step": t.step,
                    "spent": max(run.epsilon or math.inf for run in self.runs[m.key, e]),
                    "accuracies": self.accuracies(m, e),
                    "messages_to_target": None if reached is None else reached[0],
                    "gradients_to_target": None if reached is None else reached[1],
                })  # fmt: skip
        tuning = "" if self.tuning_price is None else price_text(self.tuning_price)
        parameters = next(iter(self.runs.values()))[0].summary
        return {
            "task": self.task.name, "rounds": self.task.rounds, "target": self.task.target, "tuning": tuning,
            "clients": self.task.data["clients"], "parameters": (parameters or {}).get("parameters"), "rows": rows,
        }  # fmt: skip

    def _cell(self, m: Method, bound: float, step: float, epsilon: float, seed: int) -> Cell:
        who = {"name": "full"} if m.p == 1 else {"name": "poisson", "p": m.p, "idle": m.idle}
        config: dict[str, dict[str, Any]] = {
            "data": dict(self.task.data),
            "model": dict(self.task.model),
            "method": m.build(bound, step),
            "participation": who,
            "privacy": {"epsilon": epsilon, "delta": 1e-5, "trust": "central"},
            "run": {"rounds": self.task.rounds, "seed": seed, "evaluate_every": max(1, self.task.rounds // 10)},
        }
        if m.takes_local:
            several = {"steps": m.local_steps} if m.local_steps > 1 else {}
            config["local"] = {"name": "gd", "step": self.task.local_step, **several}
        if self.task.model["name"] == "small_cnn":
            config["problem"] = {"name": "neural", "vectorize": "vmap"}
        if self.task.features is not None:
            config["features"] = dict(self.task.features)
            config["problem"] = {"name": "neural", "loss_examples": 2}  # the training loss is not looked at
        settings = {"method": m.key, "bound": bound, "step": step, "epsilon": epsilon, "seed": seed}
        name = f"{m.key}_bound={bound:g}_step={step:g}_eps={epsilon:g}_seed={seed}"
        return with_own_noise(Cell(name, settings, config))

    def _run(self, cells: list[Cell]) -> dict[str, Outcome]:
        print(f"{self.task.name}: {len(cells)} runs", file=sys.stderr, flush=True)
        with tallied(len(cells), line, self._quiet) as tell:
            ended = run_all(cells, self._folder, self._workers, tell)
        failed = next((one for one in ended if one.summary is None), None)
        if failed is not None:
            raise UserError(f"{failed.cell.name} failed: {failed.error}; the same command tries it again.")
        return {one.cell.name: one for one in ended}


def _final(outcome: Outcome) -> float:
    """The last accuracy; a model that diverged counts as none."""
    assert outcome.summary is not None
    return float(outcome.summary["metrics"].get(ACCURACY, 0.0)) if outcome.status != "diverged" else 0.0


def tables(studies: Iterable[dict[str, Any]]) -> str:
    """The results for a document: the best of a column, and what is within its spread, in bold."""
    parts = []
    for study in studies:
        epsilons = sorted({row["epsilon"] for row in study["rows"]})
        at = {(row["method"], row["epsilon"]): row for row in study["rows"]}
        best = {e: max((row["accuracies"] for key, row in at.items() if key[1] == e), key=np.mean) for e in epsilons}
        top = epsilons[-1]
        head = ["method", "bound", "server step", *(f"ε = {e:g}" for e in epsilons),
                f"messages to {study['target']:.0%}, ε = {top:g}", "client gradients"]  # fmt: skip
        lines = []
        for method in dict.fromkeys(row["method"] for row in study["rows"]):
            row = at[method, top]
            cells = [_accuracy(at[method, e]["accuracies"], best[e]) for e in epsilons]
            lines.append([method, f"{row['bound']:g}", f"{row['server_step']:g}", *cells,
                          _count(row["messages_to_target"]), _count(row["gradients_to_target"])])  # fmt: skip
        title = (f"### {study['task']}: {study['clients']:,} clients, {study['parameters']:,} parameters, "
                 f"{study['rounds']} rounds")  # fmt: skip
        body = "\n".join("| " + " | ".join(cell) + " |" for cell in [head, ["---"] * len(head), *lines])
        parts.append(f"{title}\n\n{body}\n\nTuning at ε = {top:g}: {study['tuning']}.")
    return "\n\n".join(parts) + "\n"


def _accuracy(values: Sequence[float], best: Sequence[float]) -> str:
    text = f"{np.mean(values):.1%} ± {np.std(values, ddof=1):.1%}"
    return f"**{text}**" if np.mean(values) >= np.mean(best) - np.std(best, ddof=1) else text


def _count(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.0f}"


def draw(studies: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy against ε, a panel for each federation that was trained at several."""
    shown = [study for study in studies if len({row["epsilon"] for row in study["rows"]}) > 1]
    if not shown:
        return
    figure, families = new_figure(path, (5 * len(shown) + 3, 5)), [NORMEC, CLIPPED, NORMALISED, CLIP21, SGD2M, SCAFFOLD]
    for axes, study in zip(np.atleast_1d(figure.subplots(1, len(shown), sharey=True)), shown, strict=True):
        for method in dict.fromkeys(row["method"] for row in study["rows"]):
            rows = [row for row in study["rows"] if row["method"] == method]
            place = families.index(method.partition(", p")[0])
            style = "-." if "T =" in method else "-" if "p = 1" in method else ":" if "sleep" in method else "--"
            axes.errorbar(
                [row["epsilon"] for row in rows], [100 * np.mean(row["accuracies"]) for row in rows],
                yerr=[100 * np.std(row["accuracies"], ddof=1) for row in rows], linestyle=style, marker=MARKERS[place],
                color=COLOURS[place], markersize=4, linewidth=1.2, capsize=2, label=method,
            )  # fmt: skip
        axes.set(xscale="log", xlabel="ε at δ = 1e-05, each client", title=study["task"])
        axes.set_xticks(sorted({row["epsilon"] for row in study["rows"]}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy in %, mean and standard deviation of three seeds")
    named = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside right center", fontsize=8, edgecolor="none")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits, few clients, few rounds: a minute")
    parser.add_argument("--task", action="append", choices=[task.name for task in TASKS], help="only these")
    parser.add_argument("--runs", type=Path, default=Path("runs/private-at-scale"))
    parser.add_argument("--out", type=Path, help="default: beside this file; with --quick: --runs")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quiet", action="store_true")
    asked = parser.parse_args()
    wanted = asked.task or [task.name for task in TASKS]
    tasks = QUICK if asked.quick else [task for task in TASKS if task.name in wanted]
    out = asked.out or (asked.runs if asked.quick else Path(__file__).parent)
    out.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        started = time.perf_counter()
        facts = Study(task, asked.runs, asked.workers, asked.quiet).facts()
        where = {key: value for key, value in environment().items() if key != "command"}
        content = {**facts, "seconds_of_the_last_command": round(time.perf_counter() - started), "environment": where}
        (out / f"{task.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    files = [out / f"{task.name}.json" for task in (QUICK if asked.quick else TASKS)]
    studies = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    (out / "results.md").write_text(tables(studies), encoding="utf-8")
    featured = {task.name for task in TASKS if task.features is not None}
    draw([study for study in studies if study["task"] not in featured], out / "accuracy.png")
    draw([study for study in studies if study["task"] in featured], out / "features.png")
    print(tables(studies))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"private_at_scale: {error}")
