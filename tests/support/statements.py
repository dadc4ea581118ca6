"""A printed statement with the numbers that it is asked at, some of which a test changes by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from fednormec.theory.guarantee import Guarantee
from fednormec.theory.printed import PaperNoise
from fednormec.theory.setting import Constants, Noise, Settings


def noise_of(clients: int, p: float, sigma: float) -> Noise:
    """The noise of a round where each client sends with probability p, and its own noise has E||z||^2 = sigma^2."""
    return Noise((1 - p) / (p * clients), sigma**2 / (p * clients))


class Asked(NamedTuple):
    constants: Constants
    settings: Settings
    noise: Noise | PaperNoise
    more: dict[str, float]

    def but(self, **changes: Any) -> "Asked":
        """The same with other values of fields and arguments, whichever object has them."""
        left = dict(changes)

        def take(names: Any) -> dict[str, Any]:
            return {name: left.pop(name) for name in list(left) if name in names}

        constants = replace(self.constants, **take(Constants.__dataclass_fields__))
        settings = replace(self.settings, **take(Settings.__dataclass_fields__))
        if isinstance(self.noise, Noise):
            noise: Noise | PaperNoise = self.noise._replace(**take(Noise._fields))
        else:
            noise = replace(self.noise, **take(PaperNoise.__dataclass_fields__))
        return Asked(constants, settings, left.pop("noise", noise), self.more | left)

    def of(self, statement: Callable[..., Guarantee]) -> Guarantee:
        return statement(self.constants, self.settings, self.noise, **self.more)
