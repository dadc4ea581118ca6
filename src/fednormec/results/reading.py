"""Run folders read back: whatever of a run can be read, and what could not be."""

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fednormec.config.schema import Config
from fednormec.config.settings import MADE_BY, PYTHON
from fednormec.core.problem import ByClient
from fednormec.engine.figures import by_importance, figure_of, may_be_public
from fednormec.engine.record import APART, Record
from fednormec.errors import UserError, visible
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.runs.clients import read_by_client
from fednormec.runs.records import SUMMARY, Summary, finished

PRIVATE, NO_PRIVACY, UNKNOWN = "private", "no privacy", "privacy unknown"
SAME_RUN = ("run.seed", "run.workers", "run.chunk_size", "privacy.stream")  # a repetition may differ in these
DEPTH = 3  # number of folders below a given one in which runs are looked for


@dataclass(frozen=True)
class Run:
    """Content of a run folder, as far as it could be read.

    Attributes:
        summary: how the run ended; None for a run that has not finished.
        statement: the text of privacy.txt, if there is one.
        guarantee: the content of guarantee.json, if there is one.
        problems: what could not be read, a sentence each.
        ledger: the lines of ledger.jsonl.
        by_client: the figure of each client after the last evaluation, if that was asked for.
    """

    path: Path
    name: str
    config: Config
    environment: dict[str, Any]
    summary: Summary | None
    records: tuple[Record, ...]
    statement: str | None
    guarantee: dict[str, Any] | None
    problems: tuple[str, ...]
    ledger: tuple[dict[str, Any], ...] = ()
    by_client: ByClient | None = None

    @property
    def title(self) -> str:
        """Name, never without the label of a run that protects nobody."""
        return f"{self.name} ({NOT_PRIVATE})" if self.protection == NOT_PRIVATE else self.name

    @property
    def said(self) -> dict[str, Any]:
        """Content of the summary; nothing for a run that has not finished."""
        return {} if self.summary is None else self.summary

    @property
    def status(self) -> str:
        return "unfinished" if self.summary is None else visible(self.summary.status)

    @property
    def rounds(self) -> int:
        """Number of rounds that were run."""
        if self.summary is not None:
            return self.summary.rounds
        return max((_round(line) for line in self.records), default=0)

    @property
    def seed(self) -> Any:
        return self.config.get("run", {}).get("seed")

    @property
    def clients(self) -> int | None:
        """Number of clients, as the summary or the config says; None if neither does."""
        own = (self.config.get(section, {}).get("clients") for section in ("data", "problem"))
        found = (number(value) for value in (self.said.get("clients"), *own))
        return next((int(value) for value in found if value is not None), None)

    @property
    def origin(self) -> dict[str, Any]:
        """Digests of the problem of a run from Python, whose config says too little of it; else nothing."""
        known = self.environment.get(APART)
        found = known.get("problem") if isinstance(known, dict) else None
        made = MADE_BY in self.config.get(PYTHON, {})  # by a function, which may give each seed data of its own
        return {key: found.get(key) for key in ("clients", "data")} if isinstance(found, dict) and not made else {}

    @property
    def protection(self) -> str:
        """Protection of the clients: PRIVATE, NOT_PRIVATE, NO_PRIVACY or UNKNOWN.

        NOT_PRIVATE is noise that protects nobody, NO_PRIVACY is none, and UNKNOWN means that too little is left to
        tell.
        """
        said, asked = self.said, self.config.get("privacy")
        lines = [*self.records, *self.ledger]
        if asked and asked.get("noise_scale") == "total_norm" or any("label" in line for line in lines):
            return NOT_PRIVATE
        if said.get("private", True) is not True or self.epsilon == math.inf:
            return NOT_PRIVATE
        if "private" in said or asked or self.epsilon is not None:
            return PRIVATE
        return NO_PRIVACY if self.config or said else UNKNOWN

    @property
    def epsilon(self) -> float | None:
        """Largest ε that any file says was spent, inf where no ε is finite; None if nothing was paid."""
        return self._largest("epsilon")

    @property
    def units(self) -> tuple[str, ...]:
        """What is protected: clients, their records, or both, each with an ε of its own."""
        unit = self.config.get("privacy", {}).get("unit", "client")
        return (unit,) if isinstance(unit, str) else tuple(map(str, unit))

    @property
    def record_epsilon(self) -> float | None:
        """Largest ε of a record that any file says was spent, where clients are protected, too."""
        return self._largest("record_epsilon")

    def _largest(self, name: str) -> float | None:
        spent = [line[name] for line in (self.said, *self.records, *self.ledger) if name in line]
        found = [number(value) for value in spent]
        return max((math.inf if value is None else value for value in found), default=None)

    @property
    def delta(self) -> float | None:
        """First δ that a file says; None if none does."""
        lines = (self.said, *self.records, *self.ledger, self.config.get("privacy", {}))
        return next((value for line in lines if (value := number(line.get("delta"))) is not None), None)

    @property
    def expected_messages(self) -> float | None:
        """Expected number of messages that clients send to the server: public, unlike the number of those sent."""
        who, m = self.config.get("participation", {}), self.clients
        each: dict[Any, Any] = {"full": m, "fixed_size": number(who.get("m"))}
        if m is None:
            return None
        each["poisson"] = None if (p := number(who.get("p"))) is None else p * m
        per_round = each.get(str(who.get("name", "full")))
        first = m if self.config.get("method", {}).get("initial_memory") == "local_updates" else 0
        return None if per_round is None else per_round * self.rounds + first

    def public(self, metric: str) -> bool:
        """Returns whether a metric is public: no client's data enter it but through what was released.

        Records put the others apart.
        """
        apart = [*(line.apart for line in self.records), self.said.get(APART) or ()]
        return may_be_public(metric) and not any(metric in names for names in apart)

    @property
    def figures(self) -> list[str]:
        """Figures of the model that it has, the one that says most first."""
        measured = [name for line in self.records for name in (*line.public_figures, *line.client_figures)]
        return by_importance([*measured, *(() if self.summary is None else self.summary.metrics)])

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Returns (round, value) wherever the metric was evaluated; nan for a non-finite value."""
        found = ((_round(line), _figure(line, metric)) for line in self.records)
        return [(at, value) for at, value in found if value is not None]

    def final(self, metric: str) -> float | None:
        """Returns the last value; None if there is none."""
        values = self.values(metric)
        if values:
            return values[-1][1]
        metrics = {} if self.summary is None else self.summary.metrics
        return _or_nan(metrics[metric]) if metric in metrics else None

    def best(self, metric: str) -> float | None:
        """Returns the best value over the rounds: the largest accuracy, the least loss."""
        values = [value for _, value in self.values(metric) if math.isfinite(value)]
        better: Callable[[Iterable[float]], float] = max if figure_of(metric).higher else min
        return better(values) if values else self.final(metric)


def read_run(path: Path | str) -> Run:
    """Reads what can be read of a run folder; never fails for what lies in it."""
    path, problems = Path(path), list[str]()
    summary = _summary(path, problems)
    statement = _text(path / "privacy.txt", problems, must=bool(summary and "private" in summary))
    run = Run(
        path=path,
        name=visible(path.name or path.resolve().name or str(path)),
        config=_config(path / "config.toml", problems),
        environment=_json(path / "environment.json", problems) or {},
        summary=summary,
        records=tuple(map(Record, _lines(path / "metrics.jsonl", problems))),
        statement=None if statement is None else statement.rstrip("\n"),
        guarantee=_json(path / "guarantee.json", problems, must=False),
        problems=(),
        ledger=_lines(path / "ledger.jsonl", problems, must=bool(summary and "private" in summary)),
        by_client=read_by_client(path),
    )
    return replace(run, problems=tuple(problems))


def find_runs(paths: Sequence[Path | str]) -> list[Run]:
    """Returns the runs in the folders given, each once: a folder is a run, or holds runs up to three folders deep."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            what = "is a file: give the folder that it lies in" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}; a run folder is what `fednormec run` made.")
        below = list(_runs_below(path, DEPTH))
        if not below:
            raise UserError(f"{path} holds no run, nor does a folder up to {DEPTH} deep in it.")
        found |= {run.resolve(): run for run in below if run.resolve() not in found}
    return _told_apart([read_run(path) for path in found.values()])


def settings(run: Run) -> dict[str, Any]:
    """Returns the config with one key for each setting, such as method.beta."""
    return {f"{section}.{key}": value for section, own in run.config.items() for key, value in own.items()}


def number(value: Any) -> float | None:
    """Returns the value as a finite number; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _figure(line: Record, metric: str) -> float | None:
    for where in (line, line.apart):
        if metric in where:
            return _or_nan(where[metric])
    return None


def _or_nan(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found


def _round(line: dict[str, Any]) -> int:
    return int(number(line.get("round")) or 0)


# files


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    if _is_run(path):
        yield path
    elif depth:
        try:
            inside = sorted((e for e in path.iterdir() if e.is_dir() and not e.is_symlink()), key=_natural)
        except OSError:
            return
        for folder in inside:
            yield from _runs_below(folder, depth - 1)


def _is_run(path: Path) -> bool:
    has = {name for name in ("metrics.jsonl", "config.toml", "environment.json") if (path / name).is_file()}
    return "metrics.jsonl" in has or len(has) == 2


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """Returns a sort key by which run 2 comes before run 10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", path.name)]


def _told_apart(runs: list[Run]) -> list[Run]:
    """Adds the folders above to the names of runs that share one."""
    parts = {run.path: run.path.resolve().parts for run in runs}
    for length in (2, 3, 4):
        names = [run.name for run in runs]
        runs = [
            replace(run, name=visible("/".join(parts[run.path][-length:]))) if names.count(run.name) > 1 else run
            for run in runs
        ]
    return runs


def _summary(folder: Path, problems: list[str]) -> Summary | None:
    """Returns the summary of a run that has finished; a damaged one is as good as none."""
    found = finished(folder)
    if found is None:
        there = (folder / SUMMARY).exists()
        what = "is damaged: the run counts as unfinished" if there else "is missing: the run did not come to its end"
        problems.append(f"{SUMMARY} {what}")
    return found


def _text(path: Path, problems: list[str], must: bool = True) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if must:
            problems.append(f"{path.name} is missing")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or 'it is not text in UTF-8'}")
    return None


def _json(path: Path, problems: list[str], must: bool = True) -> dict[str, Any] | None:
    text = _text(path, problems, must)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        problems.append(f"{path.name} is not a JSON object")
        return None
    return content


def _lines(path: Path, problems: list[str], must: bool = True) -> tuple[dict[str, Any], ...]:
    """Returns the lines that are JSON objects; counts those that are not."""
    lines = [line for line in (_text(path, problems, must) or "").split("\n") if line.strip()]
    found, bad = list[dict[str, Any]](), list[int]()
    for at, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict):
            found.append(content)
        else:
            bad.append(at)
    if bad == [len(lines)]:
        problems.append(f"the last line of {path.name} is cut off")
    elif bad:
        problems.append(f"{len(bad)} of {len(lines)} lines of {path.name} cannot be read, the first is line {bad[0]}")
    return tuple(found)


def _config(path: Path, problems: list[str]) -> Config:
    text = _text(path, problems)
    try:
        content = tomllib.loads(text or "")
    except (ValueError, RecursionError):
        problems.append(f"{path.name} is not valid TOML")
        return {}
    return {name: section for name, section in content.items() if isinstance(section, dict)}
