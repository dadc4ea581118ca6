"""The run folder: what was asked (config.toml), where it ran (environment.json), what happened (metrics.jsonl), the
model (model.safetensors) and how it ended (summary.json); of a private run also what was released (ledger.jsonl) and
what may be said about it (privacy.txt, privacy.json); of a run that a theorem covers what is guaranteed
(guarantee.json, guarantee.png). `fednormec run` adds a page about it (report.html). A folder is made once and never
written over."""

import json
import math
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fednormec.config import Section, dump
from fednormec.errors import UserError
from fednormec.privacy.ledger import Ledger
from fednormec.privacy.mechanism import Plan
from fednormec.privacy.statement import Statement

PACKAGES = ("fednormec", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "dp-accounting", "cryptography")


class RunFolder:
    """A fresh folder being filled by one run."""

    def __init__(self, path: Path, config: Mapping[str, Section]) -> None:
        self.path = _fresh(path)
        (self.path / "config.toml").write_text(dump(config), encoding="utf-8")
        _write_json(self.path / "environment.json", environment())
        self._metrics = open(self.path / "metrics.jsonl", "w", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        self._ledger: Ledger | None = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._metrics.close()
        if self._ledger is not None:
            self._ledger.close()

    def pay(self, number: int, plan: Plan) -> None:
        """The ledger's line for a round about to be released; on the disk when this returns."""
        if self._ledger is None:
            self._ledger = Ledger(self.path / "ledger.jsonl")
        self._ledger.add(number, plan)

    def add(self, record: Mapping[str, Any]) -> None:
        """One round's record, readable at once."""
        self._metrics.write(to_json(record) + "\n")
        self._metrics.flush()

    def note(self, name: str, content: Mapping[str, Any]) -> None:
        """One more file, name.json."""
        _write_json(self.path / f"{name}.json", content)

    def finish(self, tensors: Mapping[str, Tensor], summary: Mapping[str, Any], statement: Statement | None) -> None:
        """The model and the summary: a folder that has both holds a run that came to its end."""
        if statement is not None:
            (self.path / "privacy.txt").write_text(statement.text + "\n", encoding="utf-8")
            _write_json(self.path / "privacy.json", statement.facts)
        save_file(
            {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()},
            self.path / "model.safetensors",
        )
        _write_json(self.path / "summary.json", summary)


def to_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON as the standard has it: a number that is not finite becomes null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def default_path(name: str, under: Path = Path("runs")) -> Path:
    """runs/NAME-1, or the next number that is free."""
    number = 1
    while (under / f"{name}-{number}").exists():
        number += 1
    return under / f"{name}-{number}"


def environment() -> dict[str, Any]:
    """What a result may depend on besides its config."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _fresh(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = sorted(entry.name for entry in path.iterdir())
        if held:
            what = "already holds a run" if "config.toml" in held else f"is not empty (it holds {held[0]})"
            raise UserError(f"the output folder {path} {what}: nothing was changed; choose another with --out.")
        (path / "metrics.jsonl").touch(exist_ok=False)
    except OSError as error:
        raise UserError(f"the output folder {path} cannot be made: {error.strerror or error}.") from error
    return path


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(to_json(content, indent=2) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this source, with a + when it was changed since; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        inside = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        if inside.returncode:
            return None
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
