"""Runs side by side, one line for those that differ only in their seed: for a terminal, Markdown, CSV, JSON, a page.

What is shown beside an ε is public (a public test set, what is expected), or says that it is not private.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.engine.figures import by_importance, figure_of, may_be_public
from fednormec.errors import UserError, visible
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.results.groups import Group, Spread
from fednormec.results.reading import NO_PRIVACY, PRIVATE, Run

WINNER = "*"


class Table(NamedTuple):
    """Cells ready to be shown, the winner's line first; the first column is text, the others are figures.

    Attributes:
        header: names of the columns.
        rows: the cells of each line.
        notes: what to know about them.
    """

    header: list[str]
    rows: list[list[str]]
    notes: list[str]

    def __str__(self) -> str:
        return as_text(self)


def ranked(groups: Sequence[Group]) -> list[Group]:
    """Sorts the groups by the figure that says most of those that any has, the best first.

    Those without that figure come last, as they came. Beside private groups, those that protect nobody come after them,
    for reference.
    """
    metric = ranking(groups)
    sign = -1 if figure_of(metric).higher else 1

    def place(group: Group) -> tuple[bool, bool, float]:
        found = group.final(metric)
        known = found is not None and math.isfinite(found.mean)
        return (is_reference(group, groups), not known, sign * found.mean if found is not None and known else 0.0)

    return sorted(groups, key=place)


def is_reference(group: Group, groups: Sequence[Group]) -> bool:
    """Returns whether this group protects nobody, beside others that do."""
    return group.protection != PRIVATE and any(other.protection == PRIVATE for other in groups)


def ranking(groups: Sequence[Group]) -> str:
    """Returns the figure that decides the ranking."""
    return next(iter(measured(groups)), "test_accuracy")


def measured(groups: Sequence[Group]) -> list[str]:
    """Returns the figures that any group has, the one that says most first."""
    return by_importance(name for group in groups for run in group.counted for name in run.figures)


def winner(groups: Sequence[Group]) -> Group | None:
    """Returns the best group, if it is one of several and has a figure to be best in; otherwise None."""
    first = ranked(groups)[0]
    found = first.final(ranking(groups))
    return first if len(groups) > 1 and found is not None and math.isfinite(found.mean) else None


def reference(groups: Sequence[Group]) -> Group | None:
    """Returns the best group without privacy, if private ones stand beside it; otherwise None."""
    ranked_last = (g for g in ranked(groups) if is_reference(g, groups) and g.protection == NO_PRIVACY)
    return next(ranked_last, None)


def table(groups: Sequence[Group]) -> Table:
    """Returns the comparison, in words and figures for people."""
    groups, best = ranked(groups), winner(groups)
    decisive = ranking(groups)
    deltas = {group.delta or math.nan for group in groups if group.epsilon is not None}
    metrics = [m for m in measured(groups) if may_be_public(m) or m == decisive]
    columns = {
        "run": [f"{WINNER if group is best else ' '} {group.label}" for group in groups],
        "seeds": [str(group.seeds) for group in groups],
        "rounds": [_range(group.rounds) for group in groups],
    }
    for metric in metrics:
        columns[title(metric, groups)] = [figure(metric, group.final(metric), metric == decisive) for group in groups]
        if metric == "test_accuracy":
            columns["best"] = [figure(metric, group.best(metric), False) for group in groups]
    columns["ε"] = [spent(group) for group in groups]
    if len(deltas) > 1:
        columns["δ"] = ["–" if group.epsilon is None else f"{group.delta:g}" for group in groups]
    columns["messages"] = [_count(group.runs[0].expected_messages) for group in groups]
    if any(group.status != "done" for group in groups):
        columns["status"] = [group.status for group in groups]
    delta = next(iter(deltas)) if len(deltas) == 1 else None
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(list(columns), rows, _notes(groups, best, decisive, delta))


def facts(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns the comparison for scripts, the winner first."""
    best = winner(groups)
    return [_facts(group, group is best) for group in ranked(groups)]


def as_text(table: Table) -> str:
    """Returns the table as text in aligned columns."""
    cells = [table.header, *table.rows]
    widths = [max(len(row[k]) for row in cells) for k in range(len(table.header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([line.rstrip() for line in lines] + [f"  {note}" for note in table.notes])


def as_markdown(table: Table) -> str:
    rows = ["| " + " | ".join(_markdown(cell.strip()) for cell in row) + " |" for row in [table.header, *table.rows]]
    rows.insert(1, "|---|" + "---:|" * (len(table.header) - 1))
    return "\n".join([*rows, "", *(f"- {_markdown(note)}" for note in table.notes)]) + "\n"


def as_csv(groups: Sequence[Group]) -> str:
    """Returns a line per group with plain numbers; what looks at clients' data says so in the column's name."""
    rows = [_flat(row) for row in facts(groups)]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def write(path: Path, content: str, force: bool) -> None:
    """Writes a new file; only with `force` may it replace one."""
    require_new([path], force)
    try:
        with open(path, "w" if force else "x", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error


def require_new(paths: Iterable[Path], force: bool) -> None:
    """Raises UserError if one of the files is there already, unless `force` is given."""
    there = [] if force else [path for path in paths if path.exists()]
    if there:
        raise UserError(
            f"{there[0]} exists already: nothing was changed; choose another name, or replace it with --force."
        )


def title(metric: str, groups: Sequence[Group]) -> str:
    """Returns a figure's name, with its warning if it is not public in all of these groups."""
    name = figure_of(metric).words
    return name if all(group.public(metric) for group in groups) else f"{name} (not private)"


def figure(metric: str, found: Spread | None, spread: bool = True) -> str:
    """Returns mean ± std as text; without the std unless `spread` is asked for and there is more than one run."""
    if found is None:
        return "–"
    if not math.isfinite(found.mean):
        return "not finite"
    scale, unit, digits = (100, " %", ".1f") if figure_of(metric).is_share else (1, "", ".4g")
    around = f" ± {scale * found.std:{'.1f' if unit else '.2g'}}" if spread and found.runs > 1 else ""
    return f"{scale * found.mean:{digits}}{around}{unit}"


def spent(group: Group) -> str:
    """Returns the ε as text, rounded up; never without its label where it protects nobody."""
    if group.protection in (PRIVATE, NOT_PRIVATE):
        value = "–" if group.epsilon is None else "∞" if math.isinf(group.epsilon) else up(group.epsilon)
        return _of_units(value, group.runs[0]) if group.protection == PRIVATE else f"{value} {NOT_PRIVATE}"
    return "none" if group.protection == NO_PRIVACY else "unknown"


def _of_units(value: str, run: Run) -> str:
    """Returns an ε as text, with the unit where that is not the client alone."""
    if run.units == ("record",):
        return f"{value} (record)"
    also = run.record_epsilon
    return value if also is None else f"{value} (client), {'∞' if math.isinf(also) else up(also)} (record)"


def _range(rounds: tuple[int, int]) -> str:
    return f"{rounds[0]}" if rounds[0] == rounds[1] else f"{rounds[0]}–{rounds[1]}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _notes(groups: Sequence[Group], best: Group | None, decisive: str, delta: float | None) -> list[str]:
    notes = []
    if best is not None:
        of = " of the private runs" if any(is_reference(group, groups) for group in groups) else ""
        notes.append(f"{WINNER} the best final {title(decisive, groups)}{of}.")
    if (found := reference(groups)) is not None:
        notes.append(f"without privacy, for reference: {figure(decisive, found.final(decisive))}, {found.label}.")
    if any(len(group.counted) > 1 for group in groups):
        notes.append("± is one standard deviation over the runs of a line.")
    if any(group.final("test_accuracy") for group in groups):
        notes.append("best: over the rounds, picked with the test set in hand, so rather too high.")
    if any(group.epsilon is not None for group in groups):
        at = "" if delta is None else f", at δ = {delta:g}"
        notes.append(f"ε is that of one run{at}; runs on the same clients add up.")
    notes.append("messages: how many clients are expected to send in all the rounds of a run.")
    return notes


def _facts(group: Group, best: bool) -> dict[str, Any]:
    public = {m: group.final(m) for m in measured([group]) if group.public(m)}
    private = {m: group.final(m) for m in measured([group]) if not group.public(m)}
    return {
        "name": group.label,
        "winner": best,
        "runs": [str(run.path) for run in group.runs],
        "seeds": group.seeds,
        "rounds": group.rounds[1],
        **{metric: _spread(found) for metric, found in public.items() if found is not None},
        "best_over_rounds": {m: _spread(s) for m in public if (s := group.best(m)) is not None},
        "privacy": group.protection,
        "epsilon": group.epsilon,
        "delta": group.delta if group.epsilon is not None else None,
        "expected_messages": group.runs[0].expected_messages,
        "status": group.status,
        "not_private": {metric: _spread(found) for metric, found in private.items() if found is not None},
        "problems": {run.title: ", ".join(run.problems) for run in group.runs if run.problems},
    }


def _spread(found: Spread) -> dict[str, float]:
    return {"mean": found.mean, "std": found.std, "low": found.low, "high": found.high}


def _flat(row: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and key != "problems":
            flat |= _flat(value, f"{above}{key}_")
        else:
            several = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else value
            flat[above + key] = visible("; ".join(several)) if isinstance(several, list) else value
    return flat


def _markdown(cell: str) -> str:
    for special in "\\|<>*_`[]":
        cell = cell.replace(special, "\\" + special)
    return cell
