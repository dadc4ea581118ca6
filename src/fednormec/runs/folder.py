"""Folder of a run, which is made once and never written over.

It holds what was asked (config.toml), where it ran (environment.json), what happened (metrics.jsonl), the model
(model.safetensors), what that takes and puts out (model.json) and how it ended (summary.json); of a private run also
what was released (ledger.jsonl; where clients and records are protected, ledger-records.jsonl, too) and what may be
said about it (privacy.txt, privacy.json); of a run that a theorem covers what is guaranteed (guarantee.json,
guarantee.png); of a run that was begun from Python the model as a flat vector (x.safetensors). A page about it is added
(report.html). Until the run has finished there are checkpoints (checkpoint-N.safetensors), from which it can resume
after a crash.
"""

import hashlib
import json
import shlex
from collections import deque
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fednormec.config.schema import Section, dump, read
from fednormec.config.settings import PYTHON
from fednormec.engine.record import Record
from fednormec.errors import NotWritten, UserError
from fednormec.files import PART, Lines, digest, replace_text, replaced, require_locks, to_json
from fednormec.privacy.ledger import LEDGER, LEDGER_OF_RECORDS, Ledger
from fednormec.privacy.records import AnyPlan, for_records
from fednormec.privacy.statement import Statement
from fednormec.runs.environment import environment
from fednormec.runs.records import SUMMARY, finished

MODEL = "model.safetensors"
VECTOR = "x.safetensors"
BEGUN = {"metrics.jsonl", "environment.json", f"environment.json{PART}", f"config.toml{PART}"}  # before its config


class RunFolder:
    """Folder that one run fills, and nobody else meanwhile.

    Attributes:
        records: records of the rounds that need not be computed again.
        differs: number of the first round that was computed again and came out differently; None if none did.
    """

    def __init__(self, path: Path, metrics: Lines) -> None:
        self.path, self._metrics = path, metrics
        self._ledger: Ledger | None = None
        self._of_records: Ledger | None = None  # beside that of clients
        self.records: list[Record] = []
        self._before = deque[bytes]()
        self._size, self._digest = 0, hashlib.sha256()  # of the records that stand
        self.differs: int | None = None
        self.config_digest = ""  # of the settings that this process goes by

    @classmethod
    def new(
        cls,
        path: Path,
        config: Mapping[str, Section],
        planned: bool = False,
        origin: Mapping[str, Any] | None = None,
    ) -> "RunFolder":
        """Makes the folder of a new run; raises UserError if it holds a run or other files.

        Args:
            path: where it is made.
            config: the config with every default spelled out.
            planned: whether the theory chose the settings.
            origin: digests of what the clients hold.
        """
        folder = cls(path, _fresh(path, PYTHON in config))
        try:
            folder.note("environment", environment() | {"planned": planned, "not_private": dict(origin or {})})
            replace_text(path / "config.toml", dump(config))  # last: from here on there is something to resume
            folder.config_digest = digest(path / "config.toml")
        except BaseException:
            folder._metrics.close()
            raise
        return folder

    @classmethod
    def again(cls, path: Path) -> "RunFolder":
        """Opens the folder of a run that was begun before; raises UserError if there is none."""
        if not (path / "config.toml").is_file() or not (path / "metrics.jsonl").is_file():
            raise UserError(f"{path} holds no run to go on with.")
        folder = cls(path, Lines(path / "metrics.jsonl", new=False))
        folder.config_digest = digest(path / "config.toml")
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._metrics.close()
        for ledger in filter(None, (self._ledger, self._of_records)):
            ledger.close()

    @property
    def releases(self) -> int:
        """Number of rounds that are paid for."""
        return max((one.releases for one in (self._ledger, self._of_records) if one is not None), default=0)

    def readable(self) -> list[Record]:
        """Returns the records that are there, as far as they are whole and in order."""
        return self._read()[0]

    def public_parts(self) -> Iterator[Record]:
        """Yields the public parts of `records`, as they were when they were new."""
        return (record.measured().public_part for record in self.records)

    def digest_of(self, rounds: int) -> str | None:
        """Returns the digest of the first `rounds` records; None if fewer can be read."""
        records, lines = self._read()
        return None if rounds > len(records) else hashlib.sha256(b"".join(lines[:rounds])).hexdigest()

    @property
    def digest(self) -> str:
        """Digest of all records up to now."""
        return self._digest.hexdigest()

    def go_on_after(self, round: int) -> None:
        """Keeps the records up to this round; later ones stay as long as they come out the same again."""
        records, lines = self._read()
        self.records, self._before = records[:round], deque(lines[round:])
        self._metrics.cut(sum(map(len, lines)))
        self._size, self._digest = sum(map(len, lines[:round])), hashlib.sha256(b"".join(lines[:round]))

    def pay(self, number: int, plan: AnyPlan) -> None:
        """Adds the line for a round about to be released to each ledger; it is on the disk when this returns."""
        ledger = self.open_ledger(plan)
        if self._of_records is not None:
            self._of_records.add(number)
        ledger.add(number)

    def open_ledger(self, plan: AnyPlan) -> Ledger:
        """Returns the ledger, which is opened at the first call, and that of records beside it if there is one."""
        records = for_records(plan)
        if self._ledger is None:
            self._ledger = Ledger(self.path / LEDGER, plan, self.config_digest)
            if records is not None and records is not plan:
                self._of_records = Ledger(self.path / LEDGER_OF_RECORDS, records, self.config_digest)
        return self._ledger

    def add(self, record: Record) -> None:
        """Adds the record of one round, readable at once."""
        line = f"{to_json(record)}\n".encode()
        before = self._before.popleft() if self._before else None
        if before != line:
            if before is not None:
                self._before.clear()
                self._metrics.cut(self._size)
                self.differs = record["round"]
            self._metrics.extend(line)
        self._size += len(line)
        self._digest.update(line)

    def sync(self) -> None:
        """Returns when all records, and all that was paid for, are on the disk."""
        for ledger in filter(None, (self._ledger, self._of_records)):
            ledger.sync()
        self._metrics.sync()

    def note(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes one more file, name.json."""
        replace_text(self.path / f"{name}.json", to_json(content, indent=2) + "\n")

    def finish(
        self,
        tensors: Mapping[str, Tensor],
        summary: Mapping[str, Any],
        statement: Statement | None,
        x: Tensor | None = None,
    ) -> None:
        """Writes the model and the summary: a folder that has both holds a run that has finished.

        Args:
            tensors: the model as named tensors.
            summary: how the run ended.
            statement: what may be said about privacy.
            x: the model as a flat vector, to be stored too.
        """
        self._metrics.cut(self._size)  # no record stays of rounds that were not computed again
        self.sync()
        if statement is not None:
            replace_text(self.path / "privacy.txt", statement.text + "\n")
            self.note("privacy", statement.facts)
        for name, content in {MODEL: tensors, VECTOR: {} if x is None else {"x": x}}.items():
            if content:
                with replaced(self.path / name) as file:
                    file.write(save({key: t.detach().cpu().contiguous().clone() for key, t in content.items()}))
        self.note(Path(SUMMARY).stem, summary)

    def _read(self) -> tuple[list[Record], list[bytes]]:
        """Returns records and their lines, as far as they are whole and in order."""
        records, lines = list[Record](), list[bytes]()
        for line in self._metrics.read()[:-1]:
            try:
                record = Record.read(json.loads(line), len(records) + 1)
            except (ValueError, RecursionError):
                break
            if record is None:
                break
            records.append(record)
            lines.append(line + b"\n")
        return records, lines


def default_path(name: str, under: Path = Path("runs")) -> Path:
    """Returns runs/NAME-1, or the next number that is free."""
    number = 1
    while (under / f"{name}-{number}").exists():
        number += 1
    return under / f"{name}-{number}"


def how_to_resume(path: Path) -> str:
    """Returns the command, or the call in Python, that resumes the run in this folder."""
    if PYTHON in _sections(path):
        return f"fn.resume({str(path)!r}, problem, algorithm)"
    return f"fednormec run --resume {shlex.quote(str(path))}"


def _sections(path: Path) -> Container[str]:
    try:
        return read(path / "config.toml")
    except UserError:
        return ()


def _fresh(path: Path, from_python: bool) -> Lines:
    """Makes the folder if it is missing, and returns the open metrics, the only file that counts in it.

    Raises UserError if it holds more than a run that was killed before its config was written.
    """
    require_locks()
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = sorted(entry.name for entry in path.iterdir())
        begun = "metrics.jsonl" in held and set(held) <= BEGUN
        if begun and not (path / "metrics.jsonl").stat().st_size:
            return Lines(path / "metrics.jsonl", new=False)  # of a run that was killed before its config was written
        if held:
            what = "already holds a run" if "config.toml" in held else f"is not empty (it holds {held[0]})"
            to_do = "choose another out" if from_python else "choose another with --out"
            if "config.toml" in held and finished(path) is None:
                to_do += f", or go on with it: {how_to_resume(path)}"
            raise UserError(f"the output folder {path} {what}: nothing was changed; {to_do}.")
        return Lines(path / "metrics.jsonl", new=True)
    except (OSError, NotWritten) as error:
        why = getattr(error.__cause__ or error, "strerror", None) or error
        raise UserError(f"the output folder {path} cannot be made: {why}.") from error
