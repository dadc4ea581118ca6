"""Guarantee of a theorem for given numbers: its conditions and its terms, each by name."""

from typing import Any, NamedTuple


class Condition(NamedTuple):
    """Condition that a theorem asks for, with the numbers filled in.

    Attributes:
        name: what it is about, such as a setting.
        text: the condition with its numbers.
        holds: whether they meet it.
    """

    name: str
    text: str
    holds: bool


class Guarantee(NamedTuple):
    """Guarantee: min_k E||grad f(x^k)|| <= the sum of `terms`, if every condition holds.

    Attributes:
        source: which statement it is.
        terms: parts of the bound, by name.
        conditions: what the statement asks for.
        settings: settings that the statement itself fixes, such as a corollary's schedules.
    """

    source: str
    terms: dict[str, float]
    conditions: tuple[Condition, ...]
    settings: dict[str, float]

    @property
    def bound(self) -> float:
        """Bound: the sum of the terms."""
        return sum(self.terms.values())

    @property
    def holds(self) -> bool:
        """True if every condition holds."""
        return all(condition.holds for condition in self.conditions)

    @property
    def broken(self) -> list[str]:
        """Conditions that stand in the way, in words."""
        return [f"{c.name}: {c.text}" for c in self.conditions if not c.holds]

    def facts(self) -> dict[str, Any]:
        """Returns all of it as data."""
        return {
            "source": self.source,
            "bound": self.bound,
            "holds": self.holds,
            "terms": self.terms,
            "conditions": [c._asdict() for c in self.conditions],
            "settings": self.settings,
        }


def at_most(name: str, text: str, value: float, limit: float) -> Condition:
    """Returns value <= limit as a condition.

    >>> at_most("server_step", "eta <= 1/L", 0.5, 0.25)
    Condition(name='server_step', text='eta <= 1/L: 0.5 against 0.25', holds=False)
    """
    return Condition(name, f"{text}: {value:.4g} against {limit:.4g}", value <= limit)
