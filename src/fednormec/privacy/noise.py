"""Gaussian noise on the sum of messages. Its scale is relative to the bound's radius: nobody types a sensitivity."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fednormec.errors import one_of, positive
from fednormec.randomness import generator


@dataclass(frozen=True)
class GaussianNoise:
    """Noise of standard deviation std * radius on every coordinate.

    per="sum": a trusted aggregator adds one draw to the sum of each round, also when the cohort is empty.
    per="client": every sender adds its own draw; an empty cohort brings none. Only their sum is ever used here, so
        one draw of std * sqrt(senders) is made in place of many: the same law.
    """

    std: float
    per: Literal["sum", "client"] = "sum"

    def __post_init__(self) -> None:
        positive("noise_std", self.std)
        one_of("per", self.per, ("sum", "client"))

    def draw(self, dim: int, senders: int, radius: float, seed: int, round: int) -> np.ndarray:
        """This round's noise in the sum, float64 (dim,)."""
        scale = self.std * radius * (1.0 if self.per == "sum" else math.sqrt(senders))
        with np.errstate(over="ignore"):  # an absurd std ends as a model that is not finite, which the engine says
            draw: np.ndarray = scale * generator(seed, "noise", round).standard_normal(dim)
        return draw
