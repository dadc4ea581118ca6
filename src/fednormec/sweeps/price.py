"""Price of many runs on the same clients together, from their ledgers alone."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.schema import read
from fednormec.config.settings import PYTHON
from fednormec.errors import UserError
from fednormec.files import read_json
from fednormec.privacy.accounting import epsilon_of_all, tuned_epsilon
from fednormec.privacy.asked import TOTAL_NORM
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.privacy.ledger import LEDGER_OF_RECORDS, Spent, spent_in

SAME_PROMISE = (
    "delta", "trust", "adjacency", "colluders", "protocol", "draws", "unit", "record_delta", "record_adjacency",
)  # fmt: skip


class Price(NamedTuple):
    """Price of the private runs together.

    Attributes:
        runs: number of private runs.
        rounds: number of their rounds in all.
        epsilon: their ε; None if there is no one number.
        delta: the δ of that ε.
        best_only: the ε if only the best of a random number of such runs were shown.
        note: what else to know.
        record_epsilon: the ε of a record, where clients are protected too; None: there is none, or `epsilon` is it.
        record_delta: the δ of that ε.
    """

    runs: int
    rounds: int
    epsilon: float | None
    delta: float | None
    best_only: float | None
    note: str
    record_epsilon: float | None = None
    record_delta: float | None = None


class _Run(NamedTuple):
    clients: str
    seed: Any
    privacy: dict[str, Any] | None
    spent: Spent | None
    of_records: Spent | None
    released: bool
    person: str


def price_of(paths: Sequence[Path], ranked_by: str | None = None) -> Price | None:
    """Returns the price of the runs in these folders, as if all were on the same clients; None if none is private.

    Every line of every ledger counts, also of runs that failed or were interrupted and then done again: with the same
    seed and stream that repeats the same releases, so that counting both is safe and more than needed. The runs that
    privacy.tuning_runs allows for are not counted again: what counts is what ran.

    Args:
        paths: the run folders.
        ranked_by: the metric that the runs are ranked by, if that looks at the clients' data: the note then says so.
    """
    try:
        runs = [_run(path) for path in paths if any((path / file).exists() for file in ("config.toml", "ledger.jsonl"))]
    except UserError as error:
        return Price(len(paths), 0, None, None, None, f"there is no ε of all runs: {error}".rstrip("."))
    spent = [run.spent for run in runs if run.spent is not None]
    if not spent:
        return None
    rounds, asked = sum(s.rounds for s in spent), [run.privacy for run in runs if run.privacy is not None]
    trouble = _no_number(runs, asked)
    if trouble:
        return Price(len(spent), rounds, None, None, None, trouble)
    of_records = [run.of_records for run in runs if run.of_records is not None]
    if len({len(s.parts) for s in of_records}) > 1 or len({len(s.parts) for s in spent}) > 1:
        why = "the runs have records with other numbers of clients: there is no one ε of them all"
        return Price(len(spent), rounds, None, None, None, why)
    of_each = of_records if of_records else spent if any(one.get("trust") == "silo" for one in asked) else []
    if len({run.clients for run in runs}) > 1 and any(len(set(s.parts)) > 1 for s in of_each):
        why = (
            "the seed or [data] deals the records anew, and clients have unlike noise: a record may have been with the "
            "one that pays most each time, so that there is no one ε of them all"
        )
        return Price(len(spent), rounds, None, None, None, why)
    delta, covered = asked[0]["delta"], ranked_by is None
    epsilon = _together(spent, delta)
    if math.isinf(epsilon):
        return Price(len(spent), rounds, None, delta, None, f"{NOT_PRIVATE}: no finite ε of all runs at δ = {delta:g}")
    notes = [] if covered else [f"it does not cover the ranking by {ranked_by}, which looks at the clients' data"]
    if len({run.clients for run in runs}) > 1:
        notes.append("as if the clients were the same in all of them; here the seed or [data] deals the data anew")
    one_seed = len({run.seed for run in runs}) == 1  # of several the table shows means, not one run
    best = _best_only(spent, delta) if covered and one_seed and not of_records else None
    price = Price(len(spent), rounds, epsilon, delta, best, "; ".join(notes))
    if not of_records:
        return price
    delta_of_records = asked[0].get("record_delta", delta)
    return price._replace(record_epsilon=_together(of_records, delta_of_records), record_delta=delta_of_records)


def price_text(price: Price) -> str:
    """Returns the price in words."""
    if price.epsilon is None:
        return price.note
    said = f"all {price.runs} private runs together, {price.rounds} rounds, cost ε ≤ {up(price.epsilon)}"
    said += f" at δ = {price.delta:g}"
    if price.record_epsilon is not None:
        said += f" for a client, and ε ≤ {up(price.record_epsilon)} at δ = {price.record_delta:g} for a record"
    said += f"; {price.note}" if price.note else ""
    if price.best_only is not None:
        said += (f"; showing only the best of a number of runs drawn at random, {price.runs} on average, would cost "
                 f"ε ≤ {up(price.best_only)}")  # fmt: skip
    return f"{said}. The ε of a row is that of its run alone"


def _run(path: Path) -> _Run:
    metrics = path / "metrics.jsonl"
    released = metrics.exists() and metrics.stat().st_size > 0
    config = read(path / "config.toml")
    seed = config.get("run", {}).get("seed")
    found = read_json(path / "environment.json").get("not_private") if PYTHON in config else None
    clients = repr((config.get("problem"), config.get("data"), seed))
    if isinstance(found, dict) and isinstance(found.get("problem"), dict):
        clients = repr([found["problem"].get(key) for key in ("clients", "data")])
    person = repr(config.get("data", {}).get("person"))
    spent, of_records = spent_in(path), spent_in(path, LEDGER_OF_RECORDS)
    return _Run(clients, seed, config.get("privacy"), spent, of_records, released, person)


def _no_number(runs: Sequence[_Run], asked: Sequence[dict[str, Any]]) -> str:
    """Returns why there is no one ε; an empty text if there is."""
    bare = sum(run.privacy is None and run.released for run in runs)
    if bare:
        return f"{NOT_PRIVATE}: {bare} of these runs had no noise, which no ε of the others makes good"
    if any(privacy.get("noise_scale") == TOTAL_NORM for privacy in asked):
        return f"{NOT_PRIVATE}: noise in some of these runs protects nobody"
    if len({run.person for run in runs if run.privacy is not None}) > 1:
        return "the cells differ in who a record is (data.person): there is no one ε of them all"
    if len({repr([privacy.get(key) for key in SAME_PROMISE]) for privacy in asked}) > 1:
        return "the cells differ in δ, trust, adjacency, colluders or who draws: there is no one ε of them all"
    return ""


def _together(spent: Sequence[Spent], delta: float) -> float:
    """Returns the ε of all these, of the party that pays most; inf where nobody's releases are known."""
    return max((epsilon_of_all(counts, delta) for counts in _by_party(spent)), default=math.inf)


def _by_party(spent: Sequence[Spent]) -> list[Counter[Any]]:
    """Returns how often each kind of release was made: of all clients, or of each silo's records."""
    found = [Counter[Any]() for _ in spent[0].parts]
    for s in spent:
        for counts, part in zip(found, s.parts, strict=True):
            counts[part.release] += s.rounds * part.times
    return list({tuple(sorted(counts.items(), key=repr)): counts for counts in found}.values())


def _best_only(spent: Sequence[Spent], delta: float) -> float | None:
    """Returns the ε of a geometric number of runs, as many on average, with only the best shown.

    It returns None unless all runs are alike.
    """
    if len(spent) < 2 or len({(s.parts, s.rounds) for s in spent}) > 1:
        return None
    found = max(tuned_epsilon(part.release, spent[0].rounds * part.times, delta, float(len(spent)), 1.0)
                for part in set(spent[0].parts))  # fmt: skip
    return found if math.isfinite(found) else None
