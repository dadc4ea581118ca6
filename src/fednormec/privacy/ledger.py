"""Ledger: one durable line per release, on disk before the release it pays for. It never says too little."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.errors import UserError
from fednormec.files import Lines, to_json
from fednormec.privacy import accounting
from fednormec.privacy.accounting import Hidden, Open, Release
from fednormec.privacy.asked import require_delta
from fednormec.privacy.mechanism import Plan
from fednormec.privacy.records import AnyPlan

LEDGER, LEDGER_OF_RECORDS = "ledger.jsonl", "ledger-records.jsonl"  # the latter where clients are protected, too


class Ledger:
    """Ledger of a run, an append-only file: the first line says what one release is, each further line is one of them.

    A ledger that is there already is resumed. Rounds that it holds are computed again after a crash: with seeded noise
    that is the same release, whose line stays the only one; with secure noise it is a new one, with a new line.

    Args:
        path: the file.
        plan: what the run keeps to.
        config: digest of the settings, for the first line; None: it does not say.
    """

    def __init__(self, path: Path, plan: AnyPlan, config: str | None = None) -> None:
        self._plan, self._config, self._name, there = plan, config, path.name, path.exists()
        self._file = Lines(path, new=not there)
        try:
            self._old = self._take_up() if there else []
            if not self._old:
                self._file.add(self._head(), durable=True)
        except BaseException:
            self._file.close()
            raise
        self.releases = max(0, len(self._old) - 1)

    def add(self, number: int) -> None:
        """Pays for a round: when this returns, the line is on the disk, unless the noise protects nobody anyway."""
        if number > self.releases or self._plan.secure:
            self._file.add(self._line(number, self.releases + 1), durable=not self._plan.total_norm)
            self.releases += 1
        elif self._old[number] != self._line(number, number):
            raise UserError(f"{self._name} has another line for round {number} than this run: nothing was released.")

    def sync(self) -> None:
        """Returns when all lines are on the disk."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _head(self) -> str:
        about = {"rounds_before": self._plan.rounds_before, "config": self._config}
        if isinstance(self._plan, Plan):
            return to_json({"release": _facts(self._plan.mechanism.release()), **about})
        silos = [{"silo": one.number, "steps": one.steps, **_facts(one.sum.release())} for one in self._plan.silos]
        return to_json({"unit": "record", "silos": silos, **about})

    def _line(self, number: int, releases: int) -> str:
        spent = self._plan.spent(releases)
        return to_json({"round": number, "epsilon": spent, "delta": self._plan.delta, **self._plan.label})

    def _take_up(self) -> list[str]:
        """Returns the lines that are there.

        One that was cut off was never released, and is completed: a ledger only grows.
        """
        *whole, cut = self._file.read()
        lines = [line.decode(errors="replace") for line in whole]
        if lines and lines[0] != self._head():
            raise UserError(f"{self._name} is of another mechanism than this run's: nothing was changed.")
        if cut:
            self._complete(cut, lines)
        return lines

    def _complete(self, cut: bytes, lines: list[str]) -> None:
        if self._plan.secure and lines:  # of which round is not known: it counts, whatever it says
            missing, line = b"\n", cut.decode(errors="replace")
        else:
            line = self._line(len(lines), len(lines)) if lines else self._head()
            missing = f"{line}\n".encode().removeprefix(cut)
            if not line.encode().startswith(cut):
                raise UserError(f"the last line of {self._name} is damaged: nothing was changed.")
        self._file.extend(missing)
        self._file.sync()
        lines.append(line)


class Part(NamedTuple):
    """Releases of a round that the same party pays for.

    Attributes:
        release: what each of them is.
        times: number of them in a round.
    """

    release: Release
    times: int = 1


class Spent(NamedTuple):
    """Releases that a ledger holds.

    Attributes:
        parts: what is released in a round: one release of all clients, or those of each silo's records, by silo.
        rounds: number of rounds that were paid for.
        rounds_before: number of rounds of other runs that are counted with them.
        config: digest of the settings; None if the ledger does not say.
    """

    parts: tuple[Part, ...]
    rounds: int
    rounds_before: int
    config: str | None = None

    @property
    def release(self) -> Release:
        """Release of a round where clients are protected, or of a step of the first silo where records are."""
        return self.parts[0].release

    def epsilon(self, delta: float) -> float:
        """Computes the ε of it at any δ, anew from the ledger alone.

        It is inf where the ledger does not know what they are: a federation's server counts nobody's records.
        """
        rounds, delta = self.rounds_before + self.rounds, require_delta(delta)
        unknown = math.inf if rounds else 0.0
        return max((accounting.epsilon(one.release, rounds * one.times, delta) for one in set(self.parts)),
                   default=unknown)  # fmt: skip


def spent_in(folder: Path, name: str = LEDGER) -> Spent | None:
    """Reads the ledger of a run folder; None if there is none, or its first line is not whole.

    The first line is on the disk before anything is released.
    """
    path = folder / name
    return read_ledger(path) if path.exists() and b"\n" in path.read_bytes() else None


def read_ledger(path: Path | str) -> Spent:
    """Reads a ledger; a last line that was cut off counts as a release.

    Args:
        path: the ledger file, ledger.jsonl in a run folder.

    Raises:
        UserError: if it is not a ledger that can be read.
    """
    try:
        head, *lines = Path(path).read_text(encoding="utf-8").splitlines()
        content = json.loads(head)
        before = content["rounds_before"]
        if type(before) is not int or not 0 <= before <= 10**9:
            raise ValueError(f"rounds_before is {before!r}")
        config = content.get("config")
        return Spent(_parts(content), len(lines), before, config if isinstance(config, str) else None)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        said = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UserError(f"{path} is not a ledger that can be read: {said}.") from error


def _facts(release: Release) -> dict[str, Any]:
    """Returns a release as JSON holds it."""
    kind = "hidden" if isinstance(release, Hidden) else "open"
    return {"kind": kind, **{name: value for name, value in release._asdict().items() if name != "unlike" or value}}


def _parts(content: Any) -> tuple[Part, ...]:
    """Returns what a round releases; raises ValueError if it cannot be."""
    if "silos" not in content:
        return (Part(_release(content["release"])),)
    parts = tuple(Part(_release(one), one["steps"]) for one in content["silos"])
    if any(type(part.times) is not int or not 1 <= part.times <= 10**9 for part in parts):
        raise ValueError("a round has no such number of steps")
    return parts


def _release(facts: Any) -> Release:
    """Returns what one release was; raises ValueError if it cannot have been one."""
    kind, unlike = facts["kind"], float(facts.get("unlike", 0.0))
    if not 0 <= unlike <= 1:
        raise ValueError("no release is so unlike another")
    if kind == "hidden":
        p, mu, mirrored = facts["p"], facts["mu"], facts["mirrored"]
        if not (0 < p < 1 and 0 < mu < math.inf and isinstance(mirrored, bool)):
            raise ValueError("no release has such a p, mu or mirrored")
        return Hidden(float(p), float(mu), mirrored, unlike)
    if kind != "open":
        raise ValueError(f"a release of kind {kind!r} is unknown")
    weights, mus, unsure = tuple(map(float, facts["weights"])), tuple(map(float, facts["mus"])), float(facts["unsure"])
    possible = (
        weights and len(weights) == len(mus) and all(w >= 0 for w in weights) and all(0 < m < math.inf for m in mus)
    )
    if not (possible and unsure >= 0 and 0 < math.fsum(weights) + unsure <= 1 + 1e-9):
        raise ValueError("no release has such weights, mus or unsure")
    return Open(weights, mus, unsure, unlike)
