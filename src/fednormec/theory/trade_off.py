"""Curves that `fednormec theory --plot` draws: the least bound against the number of rounds and against ε."""

from typing import NamedTuple

import numpy as np

from fednormec.theory.answer import Answer, with_epsilon
from fednormec.theory.corrected import Promise
from fednormec.theory.planner import NoiseAt, plan_exactly
from fednormec.theory.question import Question
from fednormec.theory.setting import Memory


class AgainstRounds(NamedTuple):
    """Least bound for each number of rounds, with its terms by name; and the plan as a point (rounds, bound)."""

    rounds: np.ndarray
    bound: np.ndarray
    terms: dict[str, np.ndarray]
    planned: tuple[int, float]


class AgainstEpsilon(NamedTuple):
    """Least bound for each ε at this δ and trust, and without privacy, within a number of rounds."""

    epsilon: np.ndarray
    bound: np.ndarray
    without_privacy: float
    delta: float
    trust: str
    most_rounds: int


class TradeOff(NamedTuple):
    """Curves of the least bound, against rounds and against ε.

    at_start: ||grad f(x^0)||; a bound above it is vacuous.
    from_data: whether the constants, and so the curves, were computed from the clients' data.
    """

    against_rounds: AgainstRounds
    against_epsilon: AgainstEpsilon
    at_start: float
    from_data: bool


def trade_off(found: Answer) -> TradeOff:
    """Plans for some numbers of rounds and for some ε.

    Args:
        found: the answer whose question is asked again with other rounds and another ε.
    """
    q = found.question
    return TradeOff(_against_rounds(found), _against_epsilon(found), q.constants.gradient_norm, q.from_data)


def _against_rounds(found: Answer) -> AgainstRounds:
    q, s = found.question, found.planned.settings
    rounds = np.unique(np.geomspace(min(8, q.rounds), q.rounds, 14).round().astype(int))
    best = _plans(q, q.noise_at, rounds, s.memory)
    terms = {name: np.array([promise.found.terms[name] for promise in best]) for name in best[0].found.terms}
    bound = np.array([promise.found.bound for promise in best])
    return AgainstRounds(rounds, bound, terms, (s.rounds, found.planned.found.bound))


def _against_epsilon(found: Answer) -> AgainstEpsilon:
    q = found.question
    rounds = np.unique(np.geomspace(max(1, q.rounds / 64), q.rounds, 7).round().astype(int))

    def least(noise_at: NoiseAt, memory: Memory) -> float:
        return min(promise.found.bound for promise in _plans(q, noise_at, rounds, memory))

    budgets = np.geomspace(0.5, 64, 8)
    bound = np.array([least(q.noise_with(with_epsilon(q, float(epsilon))), "zero") for epsilon in budgets])
    without_privacy = least(q.noise_with(None), found.planned.settings.memory)
    asked = with_epsilon(q, 1.0)
    return AgainstEpsilon(budgets, bound, without_privacy, asked.delta, asked.trust, q.rounds)


def _plans(q: Question, noise_at: NoiseAt, rounds: np.ndarray, memory: Memory) -> list[Promise]:
    return [plan_exactly(q.constants, q.local, noise_at(int(n)), int(n), memory) for n in rounds]
