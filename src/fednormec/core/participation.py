"""Participation: who computes and who sends in a round, with the public weights that undo the sampling."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from fednormec.core.randomness import Source
from fednormec.errors import UserError, at_least_one, one_of

Idle = Literal["advance", "sleep"]
SELDOM = 0.01  # share of rounds with enough senders below which a rule and a floor do not fit together


class Cohort(NamedTuple):
    """Clients of one round.

    Attributes:
        computing: ids of the clients that compute, sorted.
        sending: which of these send, a mask of the same length.
    """

    computing: np.ndarray
    sending: np.ndarray


class Weights(NamedTuple):
    """Public factors that the server multiplies sum/M with, never those of the realised cohort.

    Attributes:
        average: factor for a mean over the senders, 1/p.
        memory: factor q for a mean of all clients' memories: 1/p if idle clients advance, 1 if they sleep.
        noise: variance of the privacy noise in each coordinate of sum/M, expected where it depends on who sends.
    """

    average: float
    memory: float
    noise: float = 0.0


class Participation(NamedTuple):
    """Public rule for drawing cohorts.

    Args:
        name: what reports and errors call it.
        rate: rate(M) is p, the probability that a given client sends.
        select: select(M, source) -> who sends, a mask (M,). None: every client is drawn independently with probability
            p (Poisson), which is what amplifies privacy; sampler and accountant both read it from here. Any other rule
            is accounted as if everyone were always drawn.
        idle: "advance" if clients that are not drawn compute and move their memories all the same, "sleep" if not.
        least: least(M) is the least number of senders in a round that a rule with `select` promises.
    """

    name: str
    rate: Callable[[int], float]
    select: Callable[[int, Source], np.ndarray] | None
    idle: Idle
    least: Callable[[int], int] = lambda m: 1

    def draw(self, num_clients: int, source: Source, min_cohort: int = 1) -> Cohort:
        """Draws a cohort.

        Args:
            num_clients: number of clients M.
            source: randomness.
            min_cohort: a cohort that is smaller is called off: nobody computes, and nobody sends.

        Raises:
            UserError: if `select` does not keep to what it promises.
        """
        if self.select is None:
            sends = source.random(num_clients) < self.rate(num_clients)
        else:
            sends = self.select(num_clients, source)
            if sends.shape != (num_clients,) or sends.dtype != bool:  # numbers would be weights, beyond any bound
                raise UserError(f"{self.name} must say yes or no for each of the {num_clients} clients.")
            if 0 < sends.sum() < self.least(num_clients):  # secagg counts on so many noises
                raise UserError(
                    f"{self.name} drew {sends.sum()} clients and promised {self.least(num_clients)} at least."
                )
        if 1 < min_cohort > sends.sum():
            return Cohort(np.zeros(0, np.int64), np.zeros(0, bool))
        if self.idle == "advance":
            return Cohort(np.arange(num_clients), sends)
        senders = np.flatnonzero(sends)
        return Cohort(senders, np.ones(len(senders), bool))

    def weights(self, num_clients: int, min_cohort: int = 1) -> Weights:
        """Returns the server's weights.

        Args:
            num_clients: number of clients M.
            min_cohort: a cohort that is smaller is called off; the p of the weights is that of the others.
        """
        p = self.rate_if_held(num_clients, min_cohort)
        return Weights(average=1 / p, memory=1 / p if self.idle == "advance" else 1.0)

    def rate_if_held(self, num_clients: int, min_cohort: int) -> float:
        """Returns the probability that a client sends in a round that is not called off.

        Raises UserError if hardly any round would be held.

        Args:
            num_clients: number of clients M.
            min_cohort: a cohort that is smaller is called off.
        """
        p, held = self.rate(num_clients), self.held(num_clients, min_cohort)
        if held < SELDOM:
            why = f"{self.name} draws {round(p * num_clients)} clients"
            if self.select is None:
                why = f"with {self.name} of {num_clients:,} clients that has a probability of {held:.2g}"
            raise UserError(f"a round needs {min_cohort} senders, and {why}: ask for fewer (privacy.min_cohort, "
                            "privacy.min_survivors), or draw more.")  # fmt: skip
        if self.select is None and min_cohort > 1:
            from scipy.stats import binom

            p *= float(binom.sf(min_cohort - 2, num_clients - 1, p) / held)
        return p

    def held(self, num_clients: int, min_cohort: int) -> float:
        """Returns the probability that a round is not called off, as far as it is known.

        Args:
            num_clients: number of clients M.
            min_cohort: a cohort that is smaller is called off.
        """
        p = self.rate(num_clients)
        if min_cohort <= 1:
            return 1.0
        if self.select is None:
            from scipy.stats import binom

            return float(binom.sf(min_cohort - 1, num_clients, p))
        return 0.0 if self.least(num_clients) == round(p * num_clients) < min_cohort else 1.0  # as of a fixed size


def full() -> Participation:
    """Full participation: every client computes and sends in every round."""
    return Participation("full", lambda m: 1.0, lambda m, source: np.ones(m, bool), "advance", lambda m: m)


def poisson(p: float, idle: Idle = "advance") -> Participation:
    """Poisson participation: each client sends independently with probability p; the cohort may be empty.

    Args:
        p: probability that a client sends, in (0, 1].
        idle: "advance": who is not drawn computes and moves its memory all the same (the paper's rule). "sleep": only
            drawn clients compute (our practical variant; no theorem covers it).
    """
    one_of("idle", idle, ("advance", "sleep"))
    if not 0 < p <= 1:
        raise UserError(f"the participation probability must lie in (0, 1], not {p}.")
    return Participation(f"poisson({p:g})", lambda m: p, None, idle)


def fixed_size(m: int, idle: Idle = "advance") -> Participation:
    """Participation of exactly m clients, drawn without replacement. It has no Poisson amplification of privacy.

    Args:
        m: number of clients that send.
        idle: "advance": who is not drawn computes and moves its memory all the same. "sleep": only drawn clients
            compute, as in `poisson`.
    """
    one_of("idle", idle, ("advance", "sleep"))
    at_least_one("the size of a cohort", m)

    def rate(num_clients: int) -> float:
        if m > num_clients:
            raise UserError(f"a cohort of {m} clients cannot be drawn from {num_clients}.")
        return m / num_clients

    def select(num_clients: int, source: Source) -> np.ndarray:
        sends = np.zeros(num_clients, bool)
        sends[np.argsort(source.random(num_clients))[:m]] = True
        return sends

    return Participation(f"fixed_size({m})", rate, select, idle, lambda num_clients: m)
