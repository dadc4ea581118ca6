"""Runs of the example without privacy, in this process: whole ones, stopped ones, and whether two left the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import PLAIN

from fednormec.config.schema import read
from fednormec.errors import Stopped
from fednormec.runs.runner import perform

SAME = ("metrics.jsonl", "model.safetensors", "ledger.jsonl", "privacy.txt")


def whole(out: Path, *overrides: str, config: Path = PLAIN, **settings: Any) -> dict[str, Any]:
    """A run to its end; its summary."""
    return perform(read(config, overrides), "test", out, quiet=True, **settings)


def stopping(after: int) -> Callable[[], bool]:
    """Asks to stop after so many rounds."""
    asked = iter(range(1, 10**6))
    return lambda: next(asked) >= after


def interrupted(out: Path, *overrides: str, after: int = 8, **settings: Any) -> None:
    """A run that was asked to stop after so many rounds."""
    with pytest.raises(Stopped, match=f"stopped after round {after}. To go on: fednormec run --resume "):
        whole(out, *overrides, stop=stopping(after), **settings)


def same(first: Path, second: Path, names: tuple[str, ...] = SAME) -> bool:
    """Whether two folders hold the same files of these names, bit by bit."""
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names if (first / name).exists())
