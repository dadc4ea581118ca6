"""Schedules: by how much a step shrinks or grows over the rounds of a run."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from fednormec.errors import UserError, at_least_one, non_negative, one_of

Shape = Literal["constant", "linear", "cosine", "cooldown"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
COOLDOWN = 0.25  # share of the rounds, the last ones


class Schedule(NamedTuple):
    """Factor on a step by the round.

    Args:
        name: what reports and errors call it.
        factor: factor(k) is that of the round with the number k, from 1.
    """

    name: str
    factor: Callable[[int], float]


def constant() -> Schedule:
    """Schedule that leaves every step as it is."""
    return Schedule("constant", lambda k: 1.0)


def schedule(shape: Shape, rounds: int, warmup: int = 0) -> Schedule:
    """Schedule over a run of known length. Only the number of a round decides, so it costs no privacy.

    With t = (k - 1)/rounds of the run done before round k: "linear" is 1 - t, "cosine" is (1 + cos(pi t))/2, and
    "cooldown" is 1 until the last quarter, in which it falls to 0 in a straight line. Each is above 0 in every round.
    Beyond the last round the factor stays what it was there.

    Args:
        shape: "constant", "linear", "cosine" or "cooldown".
        rounds: number of rounds of the run.
        warmup: number of first rounds over which the factor also grows from 0 in a straight line.

    >>> [round(schedule("linear", 4).factor(k), 3) for k in (1, 2, 3, 4, 9)]
    [1.0, 0.75, 0.5, 0.25, 0.25]
    >>> [round(schedule("cooldown", 8, warmup=2).factor(k), 3) for k in (1, 2, 6, 7, 8)]
    [0.5, 1.0, 1.0, 1.0, 0.5]
    """
    one_of("schedule", shape, SHAPES)
    at_least_one("rounds", rounds)
    non_negative("warmup", warmup)
    if warmup > rounds:
        raise UserError(f"warmup takes {warmup} rounds, and the run has {rounds}: take fewer.")
    falling: dict[Shape, Callable[[float], float]] = {
        "constant": lambda t: 1.0,
        "linear": lambda t: 1 - t,
        "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
        "cooldown": lambda t: min(1.0, (1 - t) / COOLDOWN),
    }
    fall = falling[shape]

    def factor(k: int) -> float:
        number = min(k, rounds)
        rise = min(1.0, number / warmup) if warmup else 1.0
        return rise * fall((number - 1) / rounds)

    return Schedule(shape if not warmup else f"{shape} after {warmup} rounds of warm-up", factor)
