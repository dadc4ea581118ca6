"""JSON as the standard has it."""

import json
from pathlib import Path
from typing import Any


def strictly(text: str) -> Any:
    """What a text holds, which must be JSON without NaN and Infinity."""

    def fail(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=fail)


def lines(path: Path) -> list[dict[str, Any]]:
    """What the lines of a file hold, one object each."""
    return [strictly(line) for line in path.read_text(encoding="utf-8").splitlines()]
