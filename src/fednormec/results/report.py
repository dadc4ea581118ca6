"""Page to send: what was trained, how well, how private, with what settings. One HTML file that needs nothing else.

Everything that comes from a file is escaped; the same runs give the same bytes. A run that protects nobody says so
wherever its name or its ε stands; figures that look at clients' data say that they are not private.
"""

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fednormec import __version__
from fednormec.config.schema import dump
from fednormec.drawing import LEVELS, Look, look, svg
from fednormec.engine.figures import TEST
from fednormec.errors import UserError, note
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.results.clients import over_clients
from fednormec.results.compare import (
    as_csv,
    as_markdown,
    figure,
    is_reference,
    measured,
    ranked,
    ranking,
    reference,
    require_new,
    spent,
    table,
    title,
    winner,
    write,
)
from fednormec.results.curves import (
    AT_ONCE,
    curves,
    draw_curves,
    draw_trade_off,
    drawn,
    free,
    paid,
)
from fednormec.results.groups import Group, differing, grouped
from fednormec.results.html import (
    card,
    counted,
    escape,
    folded_table,
    legend_of,
    marked,
    plain_table,
    pre,
    word_table,
)
from fednormec.results.reading import NO_PRIVACY, PRIVATE, SAME_RUN, UNKNOWN, Run, number, settings
from fednormec.runs.summary import kept

WATCHED = ("memory_error", "tracking_error", "gradient_norm")
SIDE_BY_SIDE = 5  # more settings than this become the lines of a table
Levels = dict[str, dict[str, float]]
STYLE = Path(__file__).with_name("report.css")
WITHOUT = {
    NO_PRIVACY: "no noise was added, the clients' data are not protected",
    UNKNOWN: "too little of the run is left to tell whether noise was added",
}
NOT_PRIVATE_NOTE = "Not private: it looks at the clients' data, and no ε covers it."


def write_report(runs: Sequence[Run], out: Path, force: bool = False) -> Path:
    """Writes the page to a new file; only with `force` may it replace one."""
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file with --out, such as {out / 'report.html'}.")
    require_new([out], force)
    write(out, page(runs), force)
    return out


def write_figures(runs: Sequence[Run], folder: Path, force: bool = False) -> list[Path]:
    """Writes the figures on the test set and ε against rounds as .png and .pdf, where there are some, and the table."""
    groups = ranked(grouped(runs))
    found = [*(metric for metric in measured(groups) if metric.startswith(TEST)), "epsilon"]
    drawn = {metric.removeprefix(TEST): metric for metric in found if _known(groups, metric)}
    pictures = {folder / f"{name}{kind}": metric for name, metric in drawn.items() for kind in (".png", ".pdf")}
    texts = {folder / "table.md": as_markdown(table(groups)), folder / "table.csv": as_csv(groups)}
    require_new([*pictures, *texts], force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made: {error.strerror or error}.") from error
    for path, metric in pictures.items():
        curves(groups, metric, path)
    for path, text in texts.items():
        write(path, text, force)
    return [*pictures, *texts]


def page(runs: Sequence[Run]) -> str:
    """Returns the whole page as HTML."""
    groups = ranked(grouped(runs))
    parts = (
        _head(groups), _warnings(groups), _tiles(groups), _comparison(groups), _trade_off(groups), _training(groups),
        over_clients(groups), _privacy(groups),
        _guarantees(groups), _settings(groups), _environment(runs),
    )  # fmt: skip
    body = "\n".join(part for part in parts if part)
    foot = (
        f"Made by fednormec {__version__} from {counted(len(runs), 'run folder')}. The same folders give the same page."
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_name(groups))}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n<footer>{escape(foot)}</footer>\n</main>\n</body>\n</html>\n"
    )


# the sections


def _head(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    days = sorted({str(run.environment.get("started", ""))[:10] for run in runs} - {""})
    said = [counted(len(runs), "run"), *([" to ".join(dict.fromkeys((days[0], days[-1])))] if days else [])]
    first = runs[0].said.get("method")
    if len(groups) == 1 and first:
        said.insert(0, str(first))
    return (
        f'<header><p class="eyebrow">Federated learning report</p><h1>{marked(_name(groups))}</h1>'
        f'<p class="soft">{escape(" · ".join(said))}</p></header>'
    )


def _warnings(groups: Sequence[Group]) -> str:
    bad = [group.label for group in groups if group.protection == NOT_PRIVATE]
    missing = [(run.title, problem) for group in groups for run in group.runs for problem in run.problems]
    parts = []
    if bad:
        all_bad = "This run" if len(groups) == 1 else f"All {len(groups)} settings"
        who = all_bad if len(bad) == len(groups) else ", ".join(bad)
        parts.append(
            f'<div class="box alarm" role="alert"><p><strong>{NOT_PRIVATE}.</strong> {escape(who)}: the noise is '
            "too small to protect anybody; the ε shown is the true one and promises nothing.</p></div>"
        )
    if told := [(run.title, str(text)) for group in groups for run in group.runs for text in _told(run)]:
        items = "".join(f"<li>{marked(name)}: {escape(text)}</li>" for name, text in told)
        parts.append(f'<div class="box amber"><p><strong>What went wrong</strong></p><ul>{items}</ul></div>')
    if missing:
        items = "".join(f"<li>{marked(name)}: {escape(problem)}.</li>" for name, problem in missing)
        parts.append(f'<div class="box amber"><p><strong>What is missing</strong></p><ul>{items}</ul></div>')
    return "\n".join(parts)


def _told(run: Run) -> list[Any]:
    found = run.said.get("warnings")
    return found if isinstance(found, list) else []


def _tiles(groups: Sequence[Group]) -> str:
    group, decisive = groups[0], ranking(groups)
    run, found = group.counted[0], group.final(decisive)
    about = f"mean ± one standard deviation, {counted(group.seeds, 'seed')}" if found and found.runs > 1 else ""
    so_far = "so far: the run is unfinished" if run.summary is None else ""
    rivals = [one for one in groups if not is_reference(one, groups)]
    kind = " private ones" if 1 < len(rivals) < len(groups) else ""
    of = f"of {group.label}" * (len(groups) > 1)
    of += f", the best of {len(rivals)}{kind}" if winner(groups) and len(rivals) > 1 else ""
    stored = f"stored: {kept(run.summary)}" if run.summary and run.summary.get("kept", "last") != "last" else ""
    about = "; ".join(filter(None, (of, about, so_far, stored)))
    tiles = [card(title(decisive, groups), figure(decisive, found), about, "first")]
    tiles.append(_spent_tile(group))
    if (other := reference(groups)) is not None:
        tiles.append(
            card("without privacy, for reference", figure(decisive, other.final(decisive)), f"of {other.label}")
        )
    facts = run.said | {"clients": run.clients}
    asked = run.config.get("privacy", {})
    if asked:
        trust, adjacency = (facts.get(key, asked.get(key, "–")) for key in ("trust", "adjacency"))
        tiles.append(card("trust", trust, f"neighbours: {adjacency}"))
    low, high = group.rounds
    tiles.append(card("rounds", f"{high}" if low == high else f"{low} to {high}", group.status))
    for key, name in (("clients", "clients"), ("parameters", "parameters")):
        if (value := number(facts.get(key))) is not None:
            tiles.append(card(name, f"{value:,.0f}", facts.get("participation", "") if key == "clients" else ""))
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _spent_tile(group: Group) -> str:
    if group.protection == NOT_PRIVATE:
        return card("privacy", NOT_PRIVATE, f"true ε ≤ {spent(group)}", "wide alarm")
    if group.protection != PRIVATE:
        return card("privacy", group.protection.removeprefix("privacy "), WITHOUT[group.protection], "wide")
    value = spent(group)
    who = " and ".join(f"each {unit}" for unit in group.runs[0].units)
    at = "" if group.delta is None else f"at δ = {group.delta:g}, for {who}, of one run"
    return card("privacy", f"ε ≤ {value}" if group.epsilon is not None else value, at, "wide")


def _comparison(groups: Sequence[Group]) -> str:
    header, rows, notes = table(groups)
    best = winner(groups)
    kinds = ["winner" if group is best else "" for group in groups]
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<h2>Results</h2>{folded_table("figures-table", header, rows, kinds)}<ul class="notes">{listed}</ul>'


def _training(groups: Sequence[Group]) -> str:
    found = measured(groups)
    order = dict.fromkeys([*found[:1], "epsilon", *found])
    shown = [metric for metric in order if _known(groups, metric) and metric not in WATCHED]
    if not shown:
        return "<h2>Over the rounds</h2><p>No evaluated round could be read, so there is no curve to draw.</p>"
    return _figures("Over the rounds", groups, shown)


def _trade_off(groups: Sequence[Group]) -> str:
    """Returns accuracy against ε, if private runs differ in it."""
    points = paid(groups)
    if len({group.epsilon for group in points.values()}) < 2:
        return ""
    levels = [group for k, group in free(groups).items()]
    said = [f"{group.label}: {figure('test_accuracy', group.final('test_accuracy'))} at ε ≤ {spent(group)}"
            for group in points.values()]  # fmt: skip
    said += [f"{group.label}, without privacy: {figure('test_accuracy', group.final('test_accuracy'))}"
             for group in levels]  # fmt: skip
    drawing = svg(draw_trade_off(groups, (4.6, 3.1)), "trade_off")
    labelled = drawing.replace(
        "<svg ", f'<svg role="img" aria-label="{escape("Test accuracy against ε. " + "; ".join(said))}" ', 1
    )
    caption = "<b>Test accuracy</b> after the last round against the ε spent, of one run."
    caption += " Bar: the least to the largest over the seeds." if any(len(g.runs) > 1 for g in points.values()) else ""
    caption += " Dashed: without privacy, for reference." if levels else ""
    entries = [(look(k)._replace(dash=""), group.label) for k, group in points.items()]
    entries += [(Look(look(k).colour, "--"), group.label) for k, group in free(groups).items()]
    listed = legend_of(entries)
    return (
        f'<h2>Accuracy against ε</h2>{listed}<div class="figures"><figure>{labelled}'
        f"<figcaption>{caption}</figcaption></figure></div>"
    )


def _privacy(groups: Sequence[Group]) -> str:
    """Returns each statement once, with those it speaks of; of many only the first is unfolded."""
    said: dict[tuple[str, str, str], list[Run]] = {}
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        said.setdefault(_statement(run), []).append(run)
    parts = ["<h2>Privacy</h2>"]
    for k, ((kind, claim, rest), whose) in enumerate(said.items()):
        who = marked(", ".join(_who(groups, whose))) if len(runs) > 1 else ""
        box = f'<div class="box{kind}"><p class="claim">{marked(claim)}</p>{rest}</div>'
        if k and len(said) > 2:
            parts.append(f"<details><summary>{who}: {marked(claim)}</summary>{box}</details>")
        else:
            parts.append(f"<h3>{who}</h3>{box}" if who else box)
    if sum(run.protection == PRIVATE for run in runs) > 1:
        parts.append("<p>Each ε is that of one run. Runs on the same clients add up, those not shown here as well.</p>")
    return "\n".join(parts)


def _who(groups: Sequence[Group], runs: Sequence[Run]) -> Iterable[str]:
    """Yields names: of a group if all of its runs are there, otherwise of each run."""
    for group in groups:
        there = [run for run in group.runs if run in runs]
        yield from [group.label] if len(there) == len(group.runs) else [run.title for run in there]


def _statement(run: Run) -> tuple[str, str, str]:
    """Returns the kind of box, the claim and the rest.

    That is the statement word for word, or what is known if there is none.
    """
    alarm = " alarm" if run.protection == NOT_PRIVATE else ""
    if run.protection not in (PRIVATE, NOT_PRIVATE):
        what = run.said.get("privacy", WITHOUT[run.protection])
        return " none", run.protection.capitalize(), f"<p>{escape(what)}</p>"
    if run.statement is None:
        so_far = "Nothing was released yet" if run.epsilon is None else _so_far(run)
        why = "There is no privacy statement: the run has not come to its end, or the file is lost."
        return alarm or " amber", so_far, f"<p>{why}</p>"
    first, *others = run.statement.split("\n\n")  # one for each unit that is protected
    claim, *lines = first.split("\n")
    claim = claim if not alarm or NOT_PRIVATE in claim else f"{NOT_PRIVATE}: {claim}"
    listed = _listed([*_entries(lines), *_noise_to_signal(run)])
    for other in others:
        also, *lines = other.split("\n")
        listed += f'<p class="claim">{marked(also)}</p>{_listed(_entries(lines))}'
    whole = f"<details><summary>The statement as text</summary>{pre(run.statement)}</details>"
    return alarm, claim, f"{listed}{whole}"


def _listed(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries)
    return f'<dl class="statement">{items}</dl>'


def _noise_to_signal(run: Run) -> list[tuple[str, str]]:
    """Returns the entry on noise and signal; none of a run whose summary does not say."""
    found = run.said.get("noise_to_signal")
    known = found if isinstance(found, dict) else {}
    one, all_rounds = (number(known.get(key)) for key in ("per_round", "over_rounds"))
    if one is None or all_rounds is None:
        return []
    return [("noise to signal", f"at least {one:.2g} in a round, {all_rounds:.2g} over all rounds")]


def _so_far(run: Run) -> str:
    assert run.epsilon is not None
    value = "no finite ε" if math.isinf(run.epsilon) else f"ε ≤ {up(run.epsilon)}"
    paid = max(run.rounds, sum("round" in line for line in run.ledger))
    label = f"{NOT_PRIVATE}: " if run.protection == NOT_PRIVATE else ""
    at = "" if run.delta is None else f" at δ = {run.delta:g}"
    fixed = "if that number follows from nothing that was released (else the ε of all planned rounds holds)"
    return f"{label}{value}{at} after {counted(paid, 'release')}, by the run's own files, {fixed}"


def _entries(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the lines of a statement as (name, text), as privacy.statement lays them out."""
    entries: list[tuple[str, str]] = []
    for line in lines:
        if line[:2] == "  " and line[2:3].strip():
            entries.append((line[2:14].strip(), line[14:].strip()))
        elif entries:
            entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line.strip()}")
        else:
            entries.append(("", line.strip()))
    return entries


def _guarantees(groups: Sequence[Group]) -> str:
    watched = [metric for metric in WATCHED if _known(groups, metric)]
    promised = [(run, found) for group in groups for run in group.runs if (found := _guarantee(run))]
    if not watched:
        return ""
    intro = f"<p>What the theory bounds, measured in each run. {NOT_PRIVATE_NOTE}</p>"
    rows = [_guarantee_row(run, found) for run, found in promised]
    if rows:
        header = ("run", "guaranteed: min E‖∇f‖ ≤", "round by round", "measured, not private", "models measured")
        intro += word_table(header, rows)
    why = {str(found["why_not"]) for _, found in promised if "why_not" in found}
    intro += "".join(f'<p class="soft">No guarantee: {escape(text)}</p>' for text in sorted(why))
    levels = _levels(promised) if len(promised) == 1 else {}
    return _figures("Measured against guaranteed", groups, watched, intro, {"gradient_norm": levels})


def _guarantee(run: Run) -> dict[str, Any] | None:
    found = run.guarantee or run.said.get("guarantee")
    return found if isinstance(found, dict) and found else None


def _guarantee_row(run: Run, found: dict[str, Any]) -> list[str]:
    if found.get("covered") is not True:
        return [run.title, "nothing", "–", "–", "–"]
    values = [number(found.get(key)) for key in ("bound", "bound_round_by_round", "measured", "models_measured")]
    cells = ["–" if value is None else f"{value:.4g}" for value in values]
    cells[0] += " (vacuous)" if found.get("vacuous") else ""
    return [run.title, *cells]


def _levels(promised: Sequence[tuple[Run, dict[str, Any]]]) -> dict[str, float]:
    names = {"bound_round_by_round": "min guaranteed, round by round", "bound": "min guaranteed, closed form"}
    found = {name: number(promised[0][1].get(key)) for key, name in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _settings(groups: Sequence[Group]) -> str:
    known = [group for group in groups if group.runs[0].config]
    keys = [key for key in differing([run for group in known for run in group.runs]) if key not in SAME_RUN]
    parts = ["<h2>Settings</h2>"]
    if keys and len(known) > 1:
        parts.append(_differences(known, keys))
    for group in known:
        seeds = ", ".join(str(run.seed) for run in group.runs)
        about = group.label if len(group.runs) == 1 else f"{group.label}: the config with seed {group.runs[0].seed}"
        what = f"All settings of {about}" + (f" (seeds run: {seeds})" if len(group.runs) > 1 else "")
        parts.append(f"<details><summary>{marked(what)}</summary>{pre(_toml(group.runs[0]))}</details>")
    return "\n".join(parts) if known else "<h2>Settings</h2><p>No config could be read.</p>"


def _differences(groups: Sequence[Group], keys: Sequence[str]) -> str:
    """Returns the groups side by side while that fits a page, otherwise a line for each; their names say most of it."""
    flat = {group.label: settings(group.runs[0]) for group in groups}
    rows = [["setting", *keys], *([name, *(_setting(one, key) for key in keys)] for name, one in flat.items())]
    if len(groups) > SIDE_BY_SIDE:
        listed = plain_table("words narrow", rows[0], rows[1:], [""] * len(groups))
        return f"<details><summary>What differs between the runs</summary>{listed}</details>"
    header, *lines = zip(*rows, strict=True)
    return f"<p>What differs between the runs:</p>{word_table(header, lines)}"


def _toml(run: Run) -> str:
    try:
        return dump(run.config)
    except (TypeError, ValueError, AttributeError):
        return repr(run.config)


def _setting(flat: dict[str, Any], key: str) -> str:
    return str(flat[key]) if key in flat else "–"


def _environment(runs: Sequence[Run]) -> str:
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        if run.environment:
            found.setdefault(tuple(_machine(run.environment)), []).append(run.title)
    parts = ["<h2>Environment</h2>"] if found else []
    for facts, names in found.items():
        parts += [f"<h3>{marked(', '.join(names))}</h3>"] if len(found) > 1 else []
        parts.append(word_table(("what", "value"), [list(pair) for pair in facts]))
    rows = [[run.title, str(run.environment.get("started", "–")), _command(run.environment)] for run in runs]
    if found:
        listed = word_table(("run", "started", "command"), rows)
        parts.append(f"<details><summary>When and how each was started</summary>{listed}</details>")
    return "\n".join(parts)


def _machine(environment: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for key in ("python", "platform", "threads", "commit"):
        yield key, str(environment.get(key, "–"))
    versions = environment.get("versions")
    if isinstance(versions, dict):
        yield "packages", ", ".join(f"{name} {version}" for name, version in versions.items())


def _command(environment: dict[str, Any]) -> str:
    words = environment.get("command")
    if not isinstance(words, list) or not words:
        return "–"
    return shlex.join([Path(str(words[0])).name, *map(str, words[1:])])


# pieces


def _known(groups: Sequence[Group], metric: str) -> list[Group]:
    """Returns the groups that measured the metric."""
    return [group for group in groups if any(math.isfinite(value) for value in group.curve(metric).mean)]


def _figure(groups: Sequence[Group], metric: str, width: float, levels: dict[str, float] | None) -> str:
    drawing = svg(draw_curves(groups, metric, levels, (width, 3.1)), metric)
    caption = _caption(_known(groups, metric), metric)
    labelled = drawing.replace("<svg ", f'<svg role="img" aria-label="{re.sub("<[^>]*>", "", caption)}" ', 1)
    return f"<figure>{labelled}<figcaption>{caption}</figcaption></figure>"


def _caption(groups: Sequence[Group], metric: str) -> str:
    said = [f"<b>{escape(_heading(metric))}</b> against rounds."]
    if metric != "epsilon" and any(len(group.runs) > 1 for group in groups):
        said.append("Line: mean over the seeds; band: the least to the largest of them.")
    if len({run.rounds for group in groups for run in group.runs}) > 1 and any(len(g.runs) > 1 for g in groups):
        said.append("Where a run ended early, the mean is that of the others.")
    if len(groups) > AT_ONCE:
        said.append(f"The first {AT_ONCE} of {len(groups)} lines of the table.")
    if metric == "epsilon":
        deltas = sorted({group.delta for group in groups if group.delta is not None})
        said.append(f"ε of one run, at δ = {', '.join(f'{delta:g}' for delta in deltas)}.")
    if not all(group.public(metric) for group in groups):
        said.append(f'<span class="alarm-text">{escape(NOT_PRIVATE_NOTE)}</span>')
    return " ".join(said)


def _heading(metric: str) -> str:
    words = {
        "epsilon": "ε spent", "memory_error": "Error of the memories", "tracking_error": "Tracking error of the server",
        "gradient_norm": "Norm of the gradient",
    }  # fmt: skip
    return words.get(metric, metric.replace("_", " ").capitalize())


def _figures(
    heading: str, groups: Sequence[Group], metrics: Sequence[str], intro: str = "", levels: Levels | None = None
) -> str:
    kind, width = (" three", 3.7) if len(metrics) == 3 else ("", 4.6)
    pictures = "".join(_figure(groups, metric, width, (levels or {}).get(metric)) for metric in metrics)
    legend = _legend(groups, metrics, levels or {})
    return f'<h2>{escape(heading)}</h2>{intro}{legend}<div class="figures{kind}">{pictures}</div>'


def _legend(groups: Sequence[Group], metrics: Sequence[str], levels: Levels) -> str:
    """Returns one legend for all the figures: each line that any of them draws."""
    lines = {k: group.label for metric in metrics for k, group in drawn(groups, metric).items()}
    entries = [(look(k), lines[k]) for k in sorted(lines)] if len(groups) > 1 else []
    entries += [(one, name) for own in levels.values() for one, name in zip(LEVELS, own, strict=False)]
    return legend_of(entries)


def _name(groups: Sequence[Group]) -> str:
    labels = [group.label for group in groups]
    if len(labels) == 1:
        return labels[0]
    if len(labels) <= 3 and max(map(len, labels)) <= 40:
        return " against ".join(labels)
    bad = sum(group.protection == NOT_PRIVATE for group in groups)
    many = "all" if bad == len(groups) else "some"
    return f"{len(labels)} settings compared" + (f", {many} {NOT_PRIVATE}" if bad else "")


def with_report(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns the summary with the path of the run's report, a page that is made now unless it is there.

    A page that fails is a note, no more.
    """
    page = Path(summary["out"]) / "report.html"
    if page.exists():
        return summary | {"report": str(page)}
    try:
        from fednormec.results.reading import read_run

        return summary | {"report": str(write_report([read_run(page.parent)], page))}
    except Exception as error:
        note(f"the report could not be made: {error}")
        return summary
