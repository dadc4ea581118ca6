"""Words that stand wherever an ε does."""

import math


def up(value: float, digits: int = 3) -> str:
    """Writes a bound in so many significant digits, rounded up: what is printed still holds.

    >>> up(7.9912), up(0.012341), up(4325699.0), up(8.0)
    ('8.00', '0.0124', '4.33e+06', '8.00')
    """
    if not math.isfinite(value) or value <= 0:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    raised = math.ceil(value / unit - 1e-9) * unit
    return f"{raised:.{max(0, digits - 1 - math.floor(math.log10(raised)))}f}" if raised < 1e4 else f"{raised:.2e}"


NOT_PRIVATE = "NOT PRIVATE"
