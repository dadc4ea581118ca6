"""The ledger: one durable line per release, on disk before the release it pays for. It never says too little."""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.errors import UserError
from fednormec.privacy import accounting
from fednormec.privacy.accounting import Hidden, Open, Release
from fednormec.privacy.mechanism import Plan, require_delta


class Ledger:
    """An append-only file: the first line says what one release is, each further line is one of them."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "x", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._empty = True
        folder = os.open(path.parent, os.O_RDONLY)  # the name of a new file must be on the disk, too
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def add(self, number: int, plan: Plan) -> None:
        """Pays for a round: when this returns, the line is on the disk."""
        if self._empty:
            release = plan.mechanism.release()
            kind = "hidden" if isinstance(release, Hidden) else "open"
            self._write({"release": {"kind": kind, **release._asdict()}, "rounds_before": plan.rounds_before})
            self._empty = False
        spent = plan.spent(number)
        reached = spent if math.isfinite(spent) else None
        self._write({"round": number, "epsilon": reached, "delta": plan.delta, **plan.label})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class Spent(NamedTuple):
    """What a ledger says was released."""

    release: Release
    rounds: int
    rounds_before: int

    def epsilon(self, delta: float) -> float:
        """The ε of it at any δ, computed anew from the ledger alone."""
        return accounting.epsilon(self.release, self.rounds_before + self.rounds, require_delta(delta))


def read_ledger(path: Path | str) -> Spent:
    """Reads a ledger; a last line that was cut off counts as a release."""
    try:
        head, *lines = Path(path).read_text(encoding="utf-8").splitlines()
        content = json.loads(head)
        before = content["rounds_before"]
        if type(before) is not int or not 0 <= before <= 10**9:
            raise ValueError(f"rounds_before is {before!r}")
        return Spent(_release(content["release"]), len(lines), before)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        said = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UserError(f"{path} is not a ledger that can be read: {said}.") from error


def _release(facts: Any) -> Release:
    """What one release was, if it can have been one."""
    if facts["kind"] == "hidden":
        p, mu, mirrored = facts["p"], facts["mu"], facts["mirrored"]
        if not (0 < p < 1 and 0 < mu < math.inf and isinstance(mirrored, bool)):
            raise ValueError("no release has such a p, mu or mirrored")
        return Hidden(float(p), float(mu), mirrored)
    if facts["kind"] != "open":
        raise ValueError(f"a release of kind {facts['kind']!r} is unknown")
    weights, mus, unsure = tuple(map(float, facts["weights"])), tuple(map(float, facts["mus"])), float(facts["unsure"])
    possible = (
        weights and len(weights) == len(mus) and all(w >= 0 for w in weights) and all(0 < m < math.inf for m in mus)
    )
    if not (possible and unsure >= 0 and 0 < math.fsum(weights) + unsure <= 1 + 1e-9):
        raise ValueError("no release has such weights, mus or unsure")
    return Open(weights, mus, unsure)
