"""What a round writes down, and whether a line that was read back can be that."""

from typing import Any

from fednormec.engine.round import COUNTS, MISSED


def is_record(found: Any, number: int) -> bool:
    """Whether this can be what a round wrote down: numbers, those about clients apart and with a count of them."""
    if not (isinstance(found, dict) and found.get("round") == number and isinstance(found.get("not_private"), dict)):
        return False
    figures = {key: value for key, value in found.items() if key not in ("round", "label", "not_private")}
    apart = found["not_private"]
    numbers = all(value is None or type(value) in (int, float) for value in (*figures.values(), *apart.values()))
    counted = all(type(apart.get(name)) is int for name in COUNTS)
    return numbers and counted and ("train_loss" in apart or set(apart) <= {*COUNTS, MISSED})
