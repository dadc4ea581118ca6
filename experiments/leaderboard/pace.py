"""Claim: how far a private model should move in a round follows from public numbers: noise, rounds, length of inputs.

DP-FedAvg with normalised messages, five local steps and a cooldown, on every task of the leaderboard at every ε, with
20, 60 and 240 rounds, p = 0.1, seed 0: the lengths of a round's move and of the local steps are varied, in units of the
task's inputs. `fednormec recommend` takes its server step from what is best here. What it recommends then runs on seeds
1, 2 and 3, beside the same settings with one thing changed.

Run it: python experiments/leaderboard/pace.py              (half an hour on two cores; goes on where it was stopped)
        python experiments/leaderboard/pace.py --table      (pace.md, from what is done)
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from entries import EPSILONS, SEEDS, SHARES, TASKS, TUNING_SEED, Row, Settings, short, task_of
from leaderboard import RESULTS, Job, Runs
from standings import Held, cell, markdown, score

import fednormec as fn

FAMILY, SERVER, P = "DP-FedAvg (normalised)", "sgd", 0.1
MOVED = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # longest move of a round, in units of one over the inputs' length
LOCAL = (3.0, 30.0, 100.0, 300.0)  # local steps together, in units of one over their square
ROUNDS = (20, 60, 240)
PAGE = RESULTS.with_name("pace.md")
JUDGED = 60  # rounds of what is recommended, and of the leaderboard
Change = Callable[[Settings], Settings]
CHANGES: dict[str, Change] = {
    "recommended": dict,
    "one local step": lambda s: s | {"local_steps": 1},
    "constant step": lambda s: s | {"schedule": "constant"},
    "momentum": lambda s: s | {"server": "momentum", "step": short(s["step"] / 10)},
    "disk": lambda s: s | {"server": "disk"},
    "step / 3": lambda s: s | {"step": short(s["step"] / 3)},
    "step · 3": lambda s: s | {"step": short(s["step"] * 3)},
}


class Paced(Row):
    """A row whose runs are stored apart."""

    @property
    def file(self) -> str:
        return "pace"


def rows(tasks: list[str]) -> list[Row]:
    return [Paced(task, e, P, FAMILY, SERVER, rounds) for task, rounds, e in product(tasks, ROUNDS, EPSILONS)]


def grid(row: Row) -> list[tuple[float, float]]:
    """The moves and local steps that are tried; with another number of rounds than the leaderboard's moves alone."""
    return list(product(MOVED, LOCAL if row.rounds == JUDGED else LOCAL[2:3]))


def settings(task: str, moved: float, local: float) -> Settings:
    """Settings as the leaderboard has them, of a move and of local steps in units of the task."""
    unit = task_of(task).unit
    bound = 0.1 * unit  # whatever it is: only bound times step counts where messages are normalised
    return {
        "bound": short(bound), "step": short(moved / unit / bound), "local_step": short(local / unit**2),
        "local_steps": 5, "server": SERVER, "schedule": "cooldown", "unit": short(unit),
    }  # fmt: skip


def found(held: Held, row: Row) -> dict[tuple[float, float], dict[str, Any]]:
    """The runs of a row by move and local steps."""
    asked = {(m, c): settings(row.task, m, c) for m, c in grid(row)}
    runs = held.of(row, [TUNING_SEED])
    return {at: run for at, own in asked.items() for run in runs if run["settings"] == own}


def table(held: Held, tasks: list[str]) -> str:
    """For each task, number of rounds and ε: the noise, and the best figure of each move over the local steps, in %."""
    lines = [["task", "rounds", "ε", "noise", *(f"{m:g}" for m in MOVED), "best local steps"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows(tasks):
        cells = found(held, row)
        if len(cells) < len(grid(row)):
            continue
        by_move = {m: max((score(cells[n, c]), c) for n, c in grid(row) if n == m) for m in MOVED}
        top = max(figure for figure, _ in by_move.values())
        shown = [f"**{100 * f:.1f}**" if f > top - 0.003 else f"{100 * f:.1f}" for f, _ in by_move.values()]
        noise, local = next(iter(cells.values()))["noise_to_signal"], max(by_move.values())[1]
        lines.append([row.task, str(row.rounds), f"{row.epsilon:g}", f"{noise:.2g}", *shown, f"{local:g}"])
    return markdown(lines)


def recommended(task: str, epsilon: float, p: float = P) -> Settings:
    """What `fednormec recommend` says of a task, as settings of the leaderboard."""
    asked = task_of(task)
    config = fn.recommend(
        clients=asked.clients, dim=asked.dim, epsilon=epsilon, rounds=JUDGED, p=p, input_norm=asked.unit, linear=True
    ).config
    local, method, server = config["local"], config["method"], config["server"]
    assert (method["name"], local["name"]) == ("dp_fed_avg_normalized", "gd")
    return {
        "bound": short(1 / local["step"]), "step": short(method["server_step"] * local["step"]),
        "local_step": local["step"], "local_steps": local["steps"], "server": server["name"],
        "schedule": server["schedule"], "alpha": method["alpha"], "unit": short(asked.unit),
    }  # fmt: skip


def changed(tasks: list[str]) -> dict[tuple[str, float], dict[str, tuple[Row, Settings]]]:
    """What is recommended for a task at an ε, and the same with one thing changed."""
    found: dict[tuple[str, float], dict[str, tuple[Row, Settings]]] = {}
    for task, epsilon in product(tasks, EPSILONS):
        for name, change in CHANGES.items():
            asked = change(recommended(task, epsilon))
            row = Paced(task, epsilon, P, FAMILY, asked["server"], JUDGED)
            found.setdefault((task, epsilon), {})[name] = row, asked
    return found


def comparison(held: Held, tasks: list[str]) -> str:
    """What is recommended, on seeds 1, 2 and 3, and what each change adds to it, in points."""
    lines = [["task", "ε", *CHANGES], ["---"] * (2 + len(CHANGES))]
    for (task, epsilon), own in changed(tasks).items():
        figures = {
            name: [run["last"] for run in held.of(row, SEEDS) if run["settings"] == asked]
            for name, (row, asked) in own.items()
        }
        if all(len(values) == len(SEEDS) for values in figures.values()):
            base, *others = figures.values()
            gains = [f"{100 * (np.mean(values) - np.mean(base)):+.1f}" for values in others]
            lines.append([task, f"{epsilon:g}", cell(base), *gains])
    return markdown(lines)


def beyond(p: float) -> dict[float, Job]:
    """A look beyond the protocol: what is recommended for MovieLens at ε = 8, with momentum and a constant step.

    Returns:
        The run on the tuning seed for each factor on the step.
    """
    row, asked = Paced("movielens", 8.0, p, FAMILY, "momentum", JUDGED), recommended("movielens", 8.0, p)
    changes = {"server": "momentum", "schedule": "constant"}
    return {f: (row, asked | changes | {"step": short(asked["step"] * f / 10)}, TUNING_SEED) for f in (1.0, 2.0, 4.0)}


def best_beyond(held: Held, p: float) -> list[Job]:
    """The best of them on the other seeds."""
    row, settings, _ = max(beyond(p).values(), key=lambda job: _figure(held, job))
    return [(row, settings, seed) for seed in SEEDS]


def _figure(held: Held, job: Job) -> float:
    row, settings, seed = job
    return next(score(run) for run in held.of(row, [seed]) if run["settings"] == settings)


def look(held: Held) -> str:
    """The figure of each factor on the tuning seed, and of the best on the others."""
    lines = [["p", "step", "step · 2", "step · 4", "the best of them on seeds 1, 2, 3"], ["---"] * 5]
    for p in SHARES:
        if all(held.has(*job) for job in beyond(p).values()) and all(held.has(*job) for job in best_beyond(held, p)):
            tried = [f"{100 * _figure(held, job):.1f}" for job in beyond(p).values()]
            lines.append([f"{p:g}", *tried, cell([_figure(held, job) for job in best_beyond(held, p)])])
    return markdown(lines)


def page(held: Held) -> str:
    """All tables, for pace.md."""
    parts = {
        "How far to move in a round": table(held, [*TASKS]),
        "What is recommended, and each change to it": comparison(held, [*TASKS]),
        "Beyond the protocol: MovieLens at ε = 8 with momentum and a constant step": look(held),
    }
    return "# Pace\n\n" + "\n\n".join(f"## {title}\n\n{body}" for title, body in parts.items()) + "\n"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only say what there is")
    parser.add_argument("--task", action="append", choices=[*TASKS], help="only these")
    parser.add_argument("--rounds", action="append", type=int, choices=ROUNDS, help="only these")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(given)
    tasks, held = asked.task or [*TASKS], Held(RESULTS)
    if not asked.table:
        with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
            runs = Runs(held, pool, lambda said: print(said, file=sys.stderr, flush=True))
            mine = [row for row in rows(tasks) if row.rounds in (asked.rounds or ROUNDS)]
            runs.do([(row, settings(row.task, *at), TUNING_SEED) for row in mine for at in grid(row)])
            runs.do([(*job, seed) for own in changed(tasks).values() for job in own.values() for seed in SEEDS])
            runs.do([job for p in SHARES for job in beyond(p).values()])
            runs.do([job for p in SHARES for job in best_beyond(held, p)])
    PAGE.write_text(page(held), encoding="utf-8")
    print(table(held, tasks), comparison(held, tasks), sep="\n\n")


if __name__ == "__main__":
    main()
