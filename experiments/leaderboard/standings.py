"""What the runs of the leaderboard say: who wins where, by how much and why, as tables and as a picture."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from entries import FAMILIES, SEEDS, SERVERS, STUDIED, STUDY, TUNING_SEED, Row, Settings

Run = dict[str, Any]
Cells = list[list[str]]


class Held:
    """Runs that are done: a file for each task and one for the study, which are only ever added to."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, dict[str, dict[str, Run]]()
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                self._keep(json.loads(line))

    def _keep(self, found: Run) -> None:
        self._runs.setdefault(found["row"], {})[_key(found["settings"], found["seed"])] = found

    def add(self, row: Row, found: Run) -> None:
        """Stores a run."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / f"{row.file}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found, ensure_ascii=False) + "\n")
        self._keep(found)

    def has(self, row: Row, settings: Settings, seed: int) -> bool:
        return _key(settings, seed) in self._runs.get(row.key, {})

    def of(self, row: Row, seeds: Iterable[int]) -> list[Run]:
        return [run for run in self._runs.get(row.key, {}).values() if run["seed"] in seeds]

    def best(self, row: Row, among: Sequence[Settings] | None = None) -> Run | None:
        """The best of the tuning runs, or of those with settings `among` some."""
        tried = self.of(row, [TUNING_SEED])
        return max((run for run in tried if among is None or run["settings"] in among), key=score, default=None)

    def judged(self, row: Row) -> list[Run]:
        """The runs of the best settings on the seeds that did not tune."""
        won = self.best(row)
        return [] if won is None else [run for run in self.of(row, SEEDS) if run["settings"] == won["settings"]]

    def figures(self, row: Row) -> list[float]:
        """The figure on each of these seeds, of the model that tuning preferred: the last or the average."""
        won = self.best(row)
        return [] if won is None else [float(run[_preferred(won)]) for run in self.judged(row)]


def score(found: Run) -> float:
    """What tuning goes by: the better of the last model and the average."""
    return max(float(found["last"]), float(found["averaged"]))


def _key(settings: Settings, seed: int) -> str:
    return json.dumps([sorted(settings.items()), seed])


def _preferred(won: Run) -> str:
    return "averaged" if won["averaged"] > won["last"] else "last"


# tables


class Place(NamedTuple):
    """A column of the standings: where methods compete."""

    task: str
    p: float
    epsilon: float


def places(held: Held, rows: Iterable[Row]) -> dict[Place, dict[str, Row]]:
    """The rows by place and method, of those places where every method was judged."""
    found: dict[Place, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(Place(row.task, row.p, row.epsilon), {})[row.family] = row
    return {at: own for at, own in found.items() if all(len(held.figures(row)) == len(SEEDS) for row in own.values())}


def winners(held: Held, rows: Iterable[Row]) -> str:
    """Who wins: the best with error feedback, centred feedback included, against the best without."""
    lines = [["task", "p", "ε", "best with feedback", "", "best without", "", "difference"], ["---"] * 8]
    for at, own in places(held, rows).items():
        figures = {family: held.figures(row) for family, row in own.items()}
        sides = ([f for f in own if (FAMILIES[f].kind == "messages") is without] for without in (False, True))
        ours, theirs = (max(side, key=lambda family: np.mean(figures[family])) for side in sides)
        gap = 100 * (np.mean(figures[ours]) - np.mean(figures[theirs]))
        lines.append([
            at.task, f"{at.p:g}", f"{at.epsilon:g}", ours, cell(figures[ours]), theirs, cell(figures[theirs]),
            f"{gap:+.1f} ± {100 * np.hypot(_spread(figures[ours]), _spread(figures[theirs])):.1f}",
        ])  # fmt: skip
    return markdown(lines)


def table(held: Held, rows: Iterable[Row]) -> str:
    """The figure of every method, mean and spread of three seeds; the best, and what is within its spread, in bold."""

    def cells(own: dict[str, Row], family: str) -> str:
        best = max((held.figures(row) for row in own.values()), key=np.mean)
        mine = held.figures(own[family])
        text = cell(mine)
        return f"**{text}**" if np.mean(mine) >= np.mean(best) - _spread(best) else text

    return _by_task(held, rows, cells)


def tuned(held: Held, rows: Iterable[Row]) -> str:
    """The settings that won the tuning."""

    def cells(own: dict[str, Row], family: str) -> str:
        won = held.best(own[family])
        assert won is not None
        s = won["settings"]
        parts = [f"bound {s['bound']:g}", f"step {s['step']:g}", f"T = {s['local_steps']}", s["server"]]
        return ", ".join([*parts, s["schedule"], *(["average"] if _preferred(won) == "averaged" else [])])

    return _by_task(held, rows, cells)


def reasons(held: Held, rows: Iterable[Row]) -> str:
    """Why: noise, off and lag, as `Why` in leaderboard.py has them, each the mean of three seeds."""

    def cells(own: dict[str, Row], family: str) -> str:
        runs = held.judged(own[family])
        names = [name for name in ("noise", "off", "lag") if all(name in run for run in runs)]
        return " / ".join(f"{np.mean([run[name] for run in runs]):.2g}" for name in names)

    return _by_task(held, rows, cells)


def study(held: Held) -> str:
    """Each optimiser by itself: by method, ε and rounds; the best of a line, and what is within its spread, in bold."""
    lines = [["method", "ε", "rounds", *SERVERS], ["---"] * (3 + len(SERVERS))]
    by = {(row.family, row.epsilon, row.rounds, row.server): held.figures(row) for row in STUDY}
    for family, epsilon, rounds in product(STUDIED, *(sorted({row[i] for row in STUDY}) for i in (1, 5))):
        own = [by[family, epsilon, rounds, name] for name in SERVERS]
        if not all(len(values) == len(SEEDS) for values in own):
            continue
        best = max(own, key=np.mean)
        least = np.mean(best) - _spread(best)
        cells = [f"**{cell(values)}**" if np.mean(values) >= least else cell(values) for values in own]
        lines.append([family, f"{epsilon:g}", str(rounds), *cells])
    return markdown(lines)


def _by_task(held: Held, rows: Iterable[Row], cells: Callable[[dict[str, Row], str], str]) -> str:
    """A table for each task and p: a line for each method, a column for each ε."""
    found, parts = places(held, rows), []
    for task, p in dict.fromkeys((at.task, at.p) for at in found):
        mine = {at.epsilon: own for at, own in found.items() if (at.task, at.p) == (task, p)}
        lines = [["method", *(f"ε = {epsilon:g}" for epsilon in mine)], ["---"] * (1 + len(mine))]
        families = dict.fromkeys(family for own in mine.values() for family in own)
        lines += [[family, *(cells(own, family) for own in mine.values())] for family in families]
        parts.append(f"### {task}, p = {p:g}\n\n{markdown(lines)}")
    return "\n\n".join(parts)


def markdown(lines: Cells) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(values: list[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * _spread(values):.1f}"


def _spread(values: list[float]) -> float:
    return float(np.std(values, ddof=1))


def page(held: Held, rows: list[Row]) -> str:
    """All tables, for results.md."""
    parts = {
        "Who wins": winners(held, rows),
        "Each optimiser by itself": study(held),
        "All methods": table(held, rows),
        "Why: noise / off / lag": reasons(held, rows),
        "What was tuned": tuned(held, rows),
    }
    return "# Standings\n\n" + "\n\n".join(f"## {title}\n\n{body}" for title, body in parts.items()) + "\n"


# picture


def picture(held: Held, rows: list[Row], path: Path) -> None:
    """Draws the figure of every method at every ε: a panel for each task and p."""
    from fednormec.drawing import SERIES, new_figure, save_figure

    found = places(held, rows)
    panels = list(dict.fromkeys((at.task, at.p) for at in found))
    shares = sorted({p for _, p in panels})
    tasks = list(dict.fromkeys(task for task, _ in panels))
    figure = new_figure(path, (4.2 * len(tasks) + 1.6, 3.6 * len(shares)))
    axes = figure.subplots(len(shares), len(tasks), sharey=True, squeeze=False)
    families = list(FAMILIES)
    for (i, p), (j, task) in product(enumerate(shares), enumerate(tasks)):
        panel = axes[i][j]
        if (task, p) not in panels:
            panel.set_visible(False)
            continue
        for colour, (at, own) in zip(SERIES, ((a, o) for a, o in found.items() if a[:2] == (task, p)), strict=False):
            values = [held.figures(own[family]) for family in families]
            means, spreads = [100 * np.mean(v) for v in values], [100 * _spread(v) for v in values]
            panel.errorbar(means, range(len(families)), xerr=spreads, fmt="o", ms=5, color=colour,
                           label=f"ε = {at.epsilon:g}")  # fmt: skip
            panel.axvline(max(means), color=colour, lw=0.6, ls=":")
        panel.set_title(f"{task}, p = {p:g}", fontsize=10)
        panel.set_yticks(range(len(families)), families)
        panel.grid(axis="y", lw=0.3)
        if p == max(share for name, share in panels if name == task):
            panel.set_xlabel("test AUC, %" if task == "movielens" else "test accuracy, %")
    axes[0][0].invert_yaxis()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    save_figure(figure, path)
