"""Claim: which method is best at a true ε, and where, is measured. Each is tuned with the same number of runs, at every
ε by itself, and reported on seeds that did not tune.

A row is a task, an ε, a share p of clients per round and a method. Its tuning has 10 settings drawn at random from the
method's space, then 6 near the best of these, all on one seed; the best of all by the last test accuracy then runs on
three others. The space has the bound, both steps, one or five local steps, the server's optimiser and a schedule. An
average over the last quarter is evaluated beside the last model, and tuning may prefer it. ε is that of one run, client
level, central, at δ = 1e-5; no ε covers the tuning, and the test set chose the settings, in every row alike.

Run it from the root of the project; it goes on where it was stopped:
        python experiments/leaderboard/leaderboard.py              (--task, --epsilon and --p choose some)
        python experiments/leaderboard/leaderboard.py --table      (what results.jsonl says)
        python experiments/leaderboard/leaderboard.py --quick      (a minute; digits)
Needs: fednormec data fetch fashion_mnist; fednormec data fetch cifar10; pip install 'fednormec[vision]'
"""

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESULTS = Path(__file__).parent / "results.jsonl"
TUNING_SEED, SEEDS = 0, (1, 2, 3)
DRAWN, REFINED = 10, 6
EPSILONS, SHARES, DELTA = (1.0, 2.0, 8.0), (1.0, 0.1), 1e-5
ACCURACY, AVERAGED = "test_accuracy", "test_accuracy_averaged"
Config = dict[str, dict[str, Any]]
Settings = dict[str, Any]


class Task(NamedTuple):
    """A federation to train: sections of a config, and how many rounds."""

    rounds: int
    sections: Config


class Family(NamedTuple):
    """A method with the space that it is tuned in.

    Attributes:
        sections: method and local work from the settings that were drawn.
        feeds_back: whether it has error feedback or centred feedback, which the page compares with the others.
        bound: range of the bound, τ or β; of an adaptive one its start.
        step: range of the server's step; momentum takes a tenth, and Adam a hundredth.
        local: range of the local step.
    """

    sections: Callable[[Settings], Config]
    feeds_back: bool
    bound: tuple[float, float] = (0.03, 3.0)
    step: tuple[float, float] = (0.1, 10.0)
    local: tuple[float, float] = (0.3, 10.0)


def on_updates(name: str, bound: str, s: Settings, **more: Any) -> Config:
    local = {"name": "gd", "step": s["local_step"], "steps": s["local_steps"]}
    return {"method": {"name": name, bound: s["bound"], "server_step": s["step"], **more}, "local": local}


def on_gradients(name: str, s: Settings, **more: Any) -> Config:
    return {"method": {"name": name, "tau": s["bound"], "server_step": s["step"], **more}}


FAMILIES: dict[str, Family] = {
    "DP-FedAvg (clip)": Family(partial(on_updates, "dp_fed_avg_clip", "tau"), False),
    "DP-FedAvg (normalised)": Family(partial(on_updates, "dp_fed_avg_normalized", "beta"), False),
    "DP-FedAvg (adaptive clip)": Family(partial(on_updates, "dp_fed_avg_adaptive", "start"), False, bound=(0.003, 0.3)),
    "DP-SCAFFOLD": Family(partial(on_updates, "dp_scaffold", "tau"), False),
    "Fed-α-NormEC": Family(partial(on_updates, "fed_normec", "beta", server_normalization=False), True),
    "Fed-α-NormEC (adaptive)": Family(
        partial(on_updates, "fed_normec_adaptive", "beta", server_normalization=False), True, bound=(0.03, 1.0)
    ),
    "Clip21": Family(partial(on_gradients, "clip21"), True),
    "Clip21-SGD2M": Family(partial(on_gradients, "clip21_sgd2m", client_momentum=0.5), True),
    "EF21-SGDM": Family(partial(on_updates, "ef21_sgdm", "tau", client_momentum=0.5), True),
    "EControl": Family(partial(on_updates, "econtrol", "tau"), True),
    "centred feedback": Family(partial(on_updates, "centred", "beta"), True),
}
OPTIMIZERS: dict[str, tuple[float, Settings]] = {
    "sgd": (1.0, {}),
    "momentum": (0.1, {"decay": 0.9}),
    "adam": (0.01, {}),
    "low_pass": (1.0, {}),
    "disk": (1.0, {}),
}

GRADIENTS = {"name": "experiments/private-at-scale/gradients.py:extract", "bins": 6}
HEAD = {"name": "experiments/private-at-scale/head.py:build"}
BRIEF = {"name": "neural", "loss_examples": 2}  # the training loss is not looked at
FASHION: dict[str, Any] = {"source": "fashion_mnist", "clients": 2000}
CIFAR10: dict[str, Any] = {"source": "cifar10", "clients": 5000}
HISTOGRAMS: Config = {"model": HEAD, "features": GRADIENTS, "problem": BRIEF}
TASKS: dict[str, Task] = {
    "fashion-one-class": Task(60, {"data": FASHION | {"partition": "shards", "shards_per_client": 1}, **HISTOGRAMS}),
    "fashion-iid": Task(60, {"data": FASHION | {"partition": "iid"}, **HISTOGRAMS}),
    "fashion-dirichlet": Task(60, {"data": FASHION | {"partition": "dirichlet", "concentration": 0.3}, **HISTOGRAMS}),
    "cifar10-features": Task(60, {
        "data": CIFAR10 | {"partition": "shards", "shards_per_client": 2}, "model": HEAD, "problem": BRIEF,
        "features": {"name": "efficientnet_lite0", "size": 64},
    }),
    "cifar10-scratch": Task(60, {
        "data": CIFAR10 | {"partition": "iid"}, "problem": BRIEF,
        "model": {"name": "small_cnn", "channels": [8, 16], "norm": "none", "halving": "stride"},
    }),
}  # fmt: skip
QUICK = Task(4, {"data": {"source": "digits", "partition": "shards", "shards_per_client": 1, "clients": 60},
                 "model": {"name": "linear"}})  # fmt: skip


class Row(NamedTuple):
    """A row of the leaderboard."""

    task: str
    epsilon: float
    p: float
    family: str

    @property
    def key(self) -> str:
        return f"{self.task} ε={self.epsilon:g} p={self.p:g} {self.family}"


# settings, drawn and refined


def draw(row: Row, number: int) -> Settings:
    """The settings of one tuning run: of its number alone, so that methods with the same ranges get the same."""
    family, rng = FAMILIES[row.family], np.random.default_rng([TUNING_SEED, number])
    bound, step, within = (_log_uniform(rng, *ends) for ends in (family.bound, family.step, family.local))
    name = str(rng.choice([*OPTIMIZERS]))
    return {
        "bound": bound, "step": step * OPTIMIZERS[name][0], "local_step": within,
        "local_steps": int(rng.choice([1, 5])), "server": name, "schedule": str(rng.choice(["constant", "cooldown"])),
    }  # fmt: skip


def near(best: Settings, number: int) -> Settings:
    """Settings near the best so far: each length within a factor of 2.5, the rest as it is."""
    rng = np.random.default_rng([TUNING_SEED, 1, number])
    lengths = {name: best[name] * _log_uniform(rng, 0.4, 2.5) for name in ("bound", "step", "local_step")}
    return best | lengths


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def config(task: Task, row: Row, settings: Settings, seed: int) -> Config:
    """The config of one run; noise and cohorts of no two runs are the same."""
    name = settings["server"]
    server = {"name": name, **OPTIMIZERS[name][1], "schedule": settings["schedule"], "average": "tail"}
    who = {"name": "full"} if row.p == 1 else {"name": "poisson", "p": row.p, "idle": "sleep"}
    mark = hashlib.sha256(json.dumps([row, settings, seed]).encode()).digest()
    return {
        **task.sections, **FAMILIES[row.family].sections(settings), "server": server, "participation": who,
        "privacy": {"epsilon": row.epsilon, "delta": DELTA, "stream": int.from_bytes(mark[:4], "little")},
        "run": {"rounds": task.rounds, "seed": seed},
    }  # fmt: skip


# runs


@lru_cache(maxsize=4)
def problem(name: str, seed: int) -> Any:
    """The clients and the model of a task, dealt out by this seed; made once by every worker."""
    from fednormec.config.assemble import assemble

    return assemble({**_task(name).sections, "local": {"step": 1.0}, "run": {"seed": seed}}).problem


def run(job: tuple[Row, Settings, int]) -> dict[str, Any]:
    """One run: how accurate the last model and the average are."""
    import torch

    import fednormec as fn
    from fednormec.config.assemble import rules

    torch.set_num_threads(1)
    row, settings, seed = job
    task, started = _task(row.task), time.perf_counter()
    asked = rules(config(task, row, settings, seed))
    done = fn.train(
        problem(row.task, seed), asked.algorithm, asked.participation, asked.privacy, rounds=task.rounds, seed=seed,
        workers=1, evaluate_every=max(1, task.rounds // 6),
    )  # fmt: skip
    records = [record for record in done.history if ACCURACY in record]
    last = records[-1] if records and done.diverged is None else {}
    assert done.statement is not None
    return {
        "row": row.key, "settings": settings, "seed": seed, "last": last.get(ACCURACY, 0.0),
        "averaged": last.get(AVERAGED, 0.0), "curve": [[r["round"], round(r[ACCURACY], 4)] for r in records],
        "epsilon": done.statement.epsilon, "noise_to_signal": done.statement.facts["noise_to_signal"]["per_round"],
        "seconds": round(time.perf_counter() - started, 2),
    }  # fmt: skip


def _task(name: str) -> Task:
    return QUICK if name == "quick" else TASKS[name]


class Held:
    """The runs that are done, in a file that is only ever added to."""

    def __init__(self, path: Path) -> None:
        self._path, self._runs = path, dict[str, dict[str, Any]]()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            self._add(json.loads(line))

    def _add(self, found: dict[str, Any]) -> None:
        self._runs[self._key(found["row"], found["settings"], found["seed"])] = found

    @staticmethod
    def _key(row: str, settings: Settings, seed: int) -> str:
        return json.dumps([row, sorted(settings.items()), seed])

    def of(self, row: Row, seeds: Iterable[int]) -> list[dict[str, Any]]:
        return [run for run in self._runs.values() if run["row"] == row.key and run["seed"] in seeds]

    def do(self, jobs: list[tuple[Row, Settings, int]], pool: Any, tell: Callable[[str], None]) -> None:
        """Runs what is missing, in any order."""
        missing = [job for job in jobs if self._key(job[0].key, job[1], job[2]) not in self._runs]
        for number, found in enumerate(pool.imap_unordered(run, missing), 1):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found, ensure_ascii=False) + "\n")
            self._add(found)
            tell(f"{number}/{len(missing)} {found['row']}: {found['last']:.1%} in {found['seconds']} s")


def score(found: dict[str, Any]) -> float:
    """What tuning goes by: the better of the last model and the average."""
    return max(float(found["last"]), float(found["averaged"]))


def best_of(held: Held, row: Row) -> dict[str, Any] | None:
    return max(held.of(row, [TUNING_SEED]), key=score, default=None)


def compete(rows: list[Row], held: Held, pool: Any, tell: Callable[[str], None], drawn: int, refined: int) -> None:
    """Tunes every row, and runs what was best on the other seeds."""
    held.do([(row, draw(row, number), TUNING_SEED) for row in rows for number in range(drawn)], pool, tell)
    firsts = {row: _chosen(held, row, [draw(row, number) for number in range(drawn)]) for row in rows}
    held.do([(row, near(firsts[row], n), TUNING_SEED) for row in rows for n in range(refined)], pool, tell)
    winners = [(row, best_of(held, row)) for row in rows]
    held.do([(row, won["settings"], seed) for row, won in winners if won for seed in SEEDS], pool, tell)


def _chosen(held: Held, row: Row, among: list[Settings]) -> Settings:
    """The best of the settings that were drawn, whatever was tried after them."""
    tried = [found for found in held.of(row, [TUNING_SEED]) if found["settings"] in among]
    best: Settings = max(tried, key=score)["settings"]
    return best


# the page


def table(held: Held, rows: list[Row]) -> str:
    """Accuracy of every row on the three seeds; of each column the best, and what is within its spread, in bold."""
    parts = []
    for task, p in itertools.product(dict.fromkeys(row.task for row in rows), sorted({row.p for row in rows})):
        mine = [row for row in rows if (row.task, row.p) == (task, p)]
        found = {row: _figures(held, row) for row in mine}
        epsilons = sorted({row.epsilon for row in mine})
        top = {
            e: max((f for row, f in found.items() if row.epsilon == e and f), key=np.mean, default=[]) for e in epsilons
        }
        lines = [["method", *(f"ε = {e:g}" for e in epsilons), *(f"tuned, ε = {e:g}" for e in epsilons)]]
        lines.append(["---"] * len(lines[0]))
        for family in dict.fromkeys(row.family for row in mine):
            cells = {row.epsilon: row for row in mine if row.family == family}
            lines.append([family, *(_cell(found[cells[e]], top[e]) for e in epsilons),
                          *(_tuned(best_of(held, cells[e])) for e in epsilons)])  # fmt: skip
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"### {task}, p = {p:g}\n\n{body}")
    return "\n\n".join(parts)


def _figures(held: Held, row: Row) -> list[float]:
    """The accuracy on each seed, of the model that tuning preferred: the last or the average."""
    won = best_of(held, row)
    if won is None:
        return []
    which = "averaged" if won["averaged"] > won["last"] else "last"
    return [found[which] for found in held.of(row, SEEDS) if found["settings"] == won["settings"]]


def _cell(values: list[float], best: list[float]) -> str:
    if len(values) < 2:
        return "–"
    text = f"{np.mean(values):.1%} ± {np.std(values, ddof=1):.1%}"
    return f"**{text}**" if np.mean(values) >= np.mean(best) - np.std(best, ddof=1) else text


def _tuned(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    s, averaged = found["settings"], ", average" if found["averaged"] > found["last"] else ""
    return (f"bound {s['bound']:g}, step {s['step']:g}, T = {s['local_steps']}, {s['server']}, {s['schedule']}"
            f"{averaged}")  # fmt: skip


def rows_of(tasks: Iterable[str], epsilons: Iterable[float], shares: Iterable[float]) -> Iterator[Row]:
    for task, epsilon, p in itertools.product(tasks, epsilons, shares):
        yield from (Row(task, epsilon, p, family) for family in FAMILIES)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits, few clients, few rounds: a minute")
    parser.add_argument("--table", action="store_true", help="only say what there is")
    parser.add_argument("--task", action="append", choices=[*TASKS], help="only these")
    parser.add_argument("--epsilon", action="append", type=float, help="only these")
    parser.add_argument("--p", action="append", type=float, help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(given)
    tasks = ["quick"] if asked.quick else asked.task or [*TASKS]
    epsilons, shares = (EPSILONS[-1:], (0.5,)) if asked.quick else (EPSILONS, SHARES)
    rows = list(rows_of(tasks, asked.epsilon or epsilons, asked.p or shares))
    held = Held(asked.results)
    if not asked.table:
        with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
            for task in tasks:  # one after another: a worker holds the data of a few
                mine = [row for row in rows if row.task == task]
                drawn, refined = (2, 1) if asked.quick else (DRAWN, REFINED)
                compete(mine, held, pool, lambda said: print(said, file=sys.stderr, flush=True), drawn, refined)
    print(table(held, rows))


if __name__ == "__main__":
    main()
