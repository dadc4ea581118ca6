"""JSON as the standard has it."""

import json
from typing import Any


def strictly(text: str) -> Any:
    """What a text holds, which must be JSON without NaN and Infinity."""

    def fail(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=fail)
