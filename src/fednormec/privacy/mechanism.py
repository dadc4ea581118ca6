"""Mechanism: the one object that sampler, noise and accountant read, and the plan of a run that keeps to it."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from scipy.stats import binom

from fednormec.core.bounds import BITS, Grid, grid_for
from fednormec.core.discrete import discrete_gaussian
from fednormec.core.participation import Cohort, Participation
from fednormec.core.randomness import SecureSource, Source, generator, words_of
from fednormec.errors import UserError, at_least_one, non_negative, one_of, positive
from fednormec.privacy import accounting
from fednormec.privacy.accounting import Accountant, Hidden, Open, Release
from fednormec.privacy.asked import (
    ADJACENCIES,
    PAPER,
    TOTAL_NORM,
    TRUSTS,
    Adjacency,
    Draws,
    Privacy,
    Trust,
    require_delta,
    require_stream,
)
from fednormec.privacy.calibrate import least_noise, most_rounds, paper_noise_std
from fednormec.privacy.grid import LEAST_SIGMA, gap
from fednormec.privacy.labels import NOT_PRIVATE

if TYPE_CHECKING:
    from fednormec.privacy.records import RecordPlan

LEAST_UNITS = 16.0  # of noise on a grid: from here on the sum of several noises is one noise, for all that is counted
MOST_UNITS = 2.0**40  # of noise that is drawn
FEWEST_BITS, WORD = 16, 32  # of units in the radius, and of a number that secure aggregation adds up
SURVIVE = 0.7  # share of the senders without whom a sum is not opened, by default
LEAST_NOISE, MOST_NOISE = 1e-12, 1e12
MOST = 10**9  # beyond it binomial tails are no longer numbers


@dataclass(frozen=True)
class Mechanism:
    """Mechanism of one round's release: who is drawn, what noise is added, what that proves.

    It is frozen; sampler, noise and accountant all read it.

    Args:
        num_clients: number of clients M.
        participation: rule that draws the cohorts.
        noise_std: noise on every coordinate, relative to the radius: of the sum in central, of each message in secagg
            and local.
        radius: largest norm of a message.
        trust: "central", "secagg" or "local", as in `Privacy`.
        adjacency: "zero_out" or "replace_one", as in `Privacy`.
        colluders: number of clients who tell the server their own noise; matters in secagg.
        min_cohort: in secagg, a round with fewer senders is called off.
        secure: whether cohorts and noise are drawn from the operating system; otherwise from a seed.
        rounding: how much the sum of messages can differ by more than the radius, relative to it, because it is a sum
            of floating-point numbers; the noise grows by as much, so that what is proved holds for the numbers that
            were really added.
        stream: seeded runs with the same seed and different streams draw cohorts and noise of their own.
        draws: "honest" or "server", as in `Privacy`.
        grid_dim: number of coordinates of a message, where messages and noise are whole numbers on a grid; 0: noise is
            continuous.
        protocol: whether the stages of secure aggregation run, as in `Privacy`.
        min_survivors: with the protocol, number of messages in a sum, at least.
    """

    num_clients: int
    participation: Participation
    noise_std: float
    radius: float = 1.0
    trust: Trust = "central"
    adjacency: Adjacency = "zero_out"
    colluders: int = 0
    min_cohort: int = 1
    secure: bool = False
    rounding: float = 0.0
    stream: int = 0
    draws: Draws = "honest"
    grid_dim: int = 0
    protocol: bool = False
    min_survivors: int = 0

    def __post_init__(self) -> None:
        m = at_least_one("the number of clients", self.num_clients)
        if m > MOST:
            raise UserError(f"accounting goes up to {MOST:,} clients, not {m:,}.")
        positive("noise_std", self.noise_std)
        if not LEAST_NOISE <= self.noise_std <= MOST_NOISE:
            raise UserError(f"noise_std must lie between 1e-12 and 1e12, not {self.noise_std}.")
        positive("radius", self.radius)
        non_negative("rounding", self.rounding)
        require_stream(self.stream)
        one_of("trust", self.trust, TRUSTS)
        one_of("adjacency", self.adjacency, ADJACENCIES)
        one_of("draws", self.draws, ("honest", "server"))
        if self.draws == "server" and self.trust != "local" and not self.protocol:
            raise UserError("draws = 'server' is for trust = 'local': in central the server is trusted to draw, and in "
                            "secagg nothing is known of one that draws as it likes, unless the protocol really runs."
                            )  # fmt: skip
        non_negative("grid_dim", self.grid_dim)
        self.participation.rate(m)  # says so if the rule does not fit the number of clients
        if self.trust == "secagg" and m == 1:
            raise UserError("secure aggregation needs at least 2 clients: the sum over one is its message; "
                            "use trust = 'local'.")  # fmt: skip
        if not 0 <= self.colluders < m:
            raise UserError(f"colluders must be at least 0 and fewer than the {m} clients, not {self.colluders}.")
        if not 1 <= self.min_cohort <= m:
            raise UserError(f"min_cohort must be at least 1 and at most the {m} clients, not {self.min_cohort}.")
        if self.min_cohort > 1 and self.trust != "secagg":
            raise UserError("min_cohort belongs to trust = 'secagg': elsewhere calling a round off would tell who was "
                            "drawn, or gain nothing.")  # fmt: skip
        if self.protocol:
            self._require_protocol()

    def _require_protocol(self) -> None:
        """Raises UserError if the stages of secure aggregation cannot run so, or hide no client's message."""
        m, least = self.num_clients, self.min_survivors
        if self.trust != "secagg" or not self.grid_dim or not self.secure or self.draws != "server":
            raise UserError("the protocol is for trust = 'secagg', secure noise on a grid, and a server that draws as "
                            "it likes.")  # fmt: skip
        if not 2 <= least <= m:
            raise UserError(f"min_survivors must be at least 2 and at most the {m} clients, not {least}.")
        if self.colluders >= least:
            raise UserError(f"{self.colluders} colluders could be all of the {least} clients in a sum: more must "
                            "survive (min_survivors), or fewer collude.")  # fmt: skip

    @property
    def grid(self) -> Grid | None:
        """Grid of messages and noise; None where noise is continuous.

        A radius has up to 2^20 units, and fewer where the sum of all clients would not fit into 32 bits: a sum that
        does not fit costs accuracy, never privacy.
        """
        if not self.grid_dim:
            return None
        bits, spread = BITS, self.num_clients + 10 * self.noise_std * math.sqrt(self.num_clients)
        while self.protocol and bits > FEWEST_BITS and spread * 2**bits >= 2 ** (WORD - 1):
            bits -= 1
        return grid_for(self.radius, bits)

    @property
    def p(self) -> float:
        """Probability of being drawn that the accountant counts on: 1 unless the sampling is Poisson, and honest.

        Next to 0 and 1 it is rounded up, which never says too little.
        """
        known = self.participation.select is None and self.draws == "honest"
        p = self.participation.rate(self.num_clients) if known else 1.0
        return 1.0 if p > 1 - 1e-6 else max(p, 1e-6)

    def cohort(self, seed: int, round: int) -> Cohort:
        """Draws who computes and who sends in a round.

        Args:
            seed: seed of the run; a secure mechanism takes none.
            round: number of the round.
        """
        return self.participation.draw(self.num_clients, self._source(seed, "cohort", round), self.least_cohort)

    @property
    def least_cohort(self) -> int:
        """Number of senders below which a round is called off."""
        return max(self.min_cohort, self.min_survivors)

    def noise(self, dim: int, senders: int, seed: int, round: int, client: int | None = None) -> np.ndarray:
        """Draws the noise in a round's sum, float64 (dim,): one draw in central, also when nobody was drawn.

        In secagg and local every sender adds its own; only their sum is used here, so one draw of √senders times the
        std is made in place of many: the same law (on a grid, as near to it as accounting counts with).

        Args:
            dim: number of coordinates.
            senders: number of clients that send; does not matter in central.
            seed: seed of the run; a secure mechanism takes none.
            round: number of the round.
            client: number of a client that adds its own noise; None: the noise of all.
        """
        source = self._source(seed, "noise", round, *(() if client is None else (client,)))
        if self.grid is not None:
            return self._units(self.grid, dim, senders, source) * self.grid.unit
        scale = self.noise_std * self.radius * (1 + self.rounding)
        if self.trust != "central":
            scale *= math.sqrt(senders)
        with np.errstate(over="ignore"):  # an absurd std ends as a model that is not finite, which the engine says
            draw: np.ndarray = scale * source.standard_normal(dim)
        return draw

    def own_noise(self, dim: int) -> np.ndarray:
        """Draws the noise that one client adds to its message in secure aggregation, in units, int64 (dim,).

        Args:
            dim: number of coordinates.
        """
        assert self.grid is not None and self.secure
        return self._units(self.grid, dim, 1, SecureSource())

    def _units(self, grid: Grid, dim: int, senders: int, source: Source) -> np.ndarray:
        """Draws discrete noise, in units of the grid, int64 (dim,): zero where nobody adds any."""
        several = 1.0 if self.trust == "central" else math.sqrt(senders)
        if not several:
            return np.zeros(dim, np.int64)
        return discrete_gaussian(words_of(source), self.noise_std * grid.steps * several, dim)

    @property
    def variance(self) -> float:
        """Variance of the noise in each coordinate of a round's sum, expected where it depends on who sends."""
        return self._std**2 * self.radius**2

    @property
    def shift(self) -> float:
        """Distance by which one client can move a sum, over the radius."""
        return 2.0 if self.adjacency == "replace_one" else 1.0

    def noise_to_signal(self, dim: int) -> float:
        """Returns the norm of the noise in a round's mean message, over the longest that a mean message can be.

        The root mean square of that norm, for the expected number of senders; the longest is the radius, which cancels.

        Args:
            dim: number of coordinates of a message.
        """
        return self._std * math.sqrt(dim) / self._senders

    def release(self) -> Release:
        """Returns one round as the accountant sees it."""
        shift, p = self.shift, self.p
        if self.trust != "secagg":
            std, unlike = float(self._accounted(1)), self._unlike(1, 1)
            if self.trust == "local" or p == 1:
                return Open((p,), (shift / std,), unlike=unlike)
            return Hidden(p, 1 / std, self.adjacency == "replace_one", unlike)
        honest, weights, unsure = self._honest_senders()
        mus = shift / self._accounted(honest)
        return Open(
            tuple(weights.tolist()), tuple(mus.tolist()), unsure, self._unlike(int(honest.min()), int(honest.max()))
        )

    def own_release(self) -> Open:
        """Returns one message as the accountant sees it, hidden by its own noise alone, where clients add it."""
        return Open((1.0,), (self.shift / float(self._accounted(1)),), unlike=self._unlike(1, 1))

    def _accounted(self, noises: int | np.ndarray) -> np.ndarray:
        """Returns the std of the continuous noise that so many noises are accounted as, relative to the radius.

        On a grid it is that whose rounding they are next to: its variance is 1/12 less, in units (privacy.grid).
        """
        variance = self.noise_std**2 * np.asarray(noises, float)
        if self.grid is not None:
            variance = variance - np.minimum(1 / (12 * self.grid.steps**2), 0.75 * variance)  # far below 2 units
        return np.sqrt(variance)

    def _unlike(self, fewest: int, most: int) -> float:
        """Bounds how unlike noise on a grid and the rounding of continuous noise are, from fewest to most noises."""
        if self.grid is None:
            return 0.0
        sigma = self.noise_std * self.grid.steps
        if sigma < LEAST_SIGMA:
            return 1.0
        several = gap(sigma, self.grid_dim, most) if most > fewest else 0.0
        return min(1.0, gap(sigma, self.grid_dim, fewest) + several)

    def epsilon(self, rounds: int, delta: float, accountant: Accountant = "pld") -> float:
        """Returns the ε at this δ after so many rounds.

        Args:
            rounds: number of rounds, those of other runs included.
            delta: δ, strictly between 0 and 1.
            accountant: "pld" (privacy loss distribution, tight) or "rdp" (Rényi).
        """
        require_delta(delta)
        if rounds > MOST:
            raise UserError(f"accounting goes up to {MOST:,} rounds, those of other runs included, not {rounds:,}.")
        return accounting.epsilon(self.release(), rounds, delta, accountant)

    def would_exceed(self, rounds: int, epsilon: float, delta: float) -> bool:
        """Returns whether so many rounds cost more than (ε, δ).

        Args:
            rounds: number of rounds.
            epsilon: ε.
            delta: δ, strictly between 0 and 1.
        """
        return self.epsilon(rounds, delta) > epsilon

    def affordable(self, rounds: int, epsilon: float, delta: float) -> int:
        """Returns the number of rounds that fit into (ε, δ).

        Args:
            rounds: number of rounds planned, the most that is returned.
            epsilon: ε.
            delta: δ, strictly between 0 and 1.
        """
        return most_rounds(lambda k: not self.would_exceed(k, epsilon, delta), rounds)

    def calibrate(self, epsilon: float, delta: float, rounds: int, accountant: Accountant = "pld") -> "Mechanism":
        """Returns the same with the least noise for which so many rounds keep to (ε, δ); it never under-protects.

        Args:
            epsilon: ε.
            delta: δ, strictly between 0 and 1.
            rounds: number of rounds.
            accountant: "pld" (privacy loss distribution, tight) or "rdp" (Rényi).
        """
        positive("epsilon", epsilon)
        require_delta(delta)
        at_least_one("rounds", rounds)

        def at(std: float) -> float:
            return replace(self, noise_std=std).epsilon(rounds, delta, accountant)

        return replace(self, noise_std=least_noise(at, epsilon))

    @property
    def _senders(self) -> float:
        """Expected number of senders in a round that is not called off."""
        return self.participation.rate_if_held(self.num_clients, self.least_cohort) * self.num_clients

    @property
    def _std(self) -> float:
        """Noise in each coordinate of the sum of as many senders as are expected, relative to the radius."""
        return self.noise_std * (1 + self.rounding) * (1.0 if self.trust == "central" else math.sqrt(self._senders))

    def _source(self, seed: int, purpose: str, *address: int) -> Source:
        return SecureSource() if self.secure else generator(seed, purpose, *address, stream=self.stream)

    def _honest_senders(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns, for secagg, how many noises hide a given client's message, and with which probabilities.

        Its own noise is included. Also returns the probability of the cases left away. Colluders subtract their noises,
        and show up whenever that helps a round past min_cohort.
        """
        m, t, p = self.num_clients, self.colluders, self.p
        if self.protocol:
            return np.array([self.min_survivors - t]), np.ones(1), 0.0
        if self.participation.select is not None:
            at_least = max(self.participation.least(m), self.min_cohort)
            return np.array([max(1, at_least - t)]), np.ones(1), 0.0
        rate = self.participation.rate(m)
        others, mass, missed = _binomial(m - 1 - t, rate, least=max(0, self.min_cohort - 1 - t))
        return others + 1, p * mass, p * missed


@dataclass(frozen=True)
class Plan:
    """Plan of a run: a mechanism with what was asked of it.

    Attributes:
        mechanism: one round's release.
        rounds: number of rounds that the budget allows, of those planned.
        planned: number of rounds that were asked for.
        delta: the δ at which every ε is stated.
        budget: the ε to stay under; None: no limit.
        rounds_before: number of rounds of the runs before it, which count too.
        nominal: the ε that the paper's formula was given; None: another calibration.
        total_norm: whether the noise is by total norm, which is not private.
        settings_from_data: whether other settings were chosen by a look at the clients' data.
        dim: number of coordinates of a message.
        remembers: whether the server has a memory, which keeps the noise of earlier rounds.
        extras: what each number in a message after its vectors says.
        records: the plan by which records are protected, too; None: they are not by themselves.
    """

    mechanism: Mechanism
    rounds: int
    planned: int
    delta: float
    budget: float | None
    rounds_before: int
    nominal: float | None
    total_norm: bool
    settings_from_data: bool
    dim: int
    remembers: bool = False
    extras: tuple[str, ...] = ()
    records: "RecordPlan | None" = None

    @property
    def secure(self) -> bool:
        """True if noise and cohorts come from the operating system."""
        return self.mechanism.secure

    @property
    def label(self) -> dict[str, str]:
        """Label that stands beside every ε of a run that protects nobody."""
        return {"label": NOT_PRIVATE} if self.total_norm else {}

    def spent(self, rounds: int) -> float:
        """Returns the ε after so many rounds of this run (and the runs before it).

        It is computed at each of the first 1,000 rounds, then at steps of 0.1 % or less, rounded up to the next, which
        never says too little. For noise that protects nobody steps of 5 % will do.
        """
        step = 1 << max(0, (rounds // (20 if self.total_norm else 1000)).bit_length() - 1)  # the same for many rounds
        return self.epsilon(min(-(-rounds // step) * step, max(self.rounds, rounds)))

    def epsilon(self, rounds: int) -> float:
        """Returns the ε after so many rounds of this run (and the runs before it), exactly at this number."""
        return self.mechanism.epsilon(self.rounds_before + rounds, self.delta)


def plan(
    asked: Privacy, num_clients: int, participation: Participation, radius: float, dim: int, rounds: int,
    rounding: float = 0.0,
) -> Plan:  # fmt: skip
    """Plans what a run will do to keep to what was asked; raises UserError if it cannot be kept.

    Args:
        asked: what the run must keep to.
        num_clients: number of clients.
        participation: rule that draws the cohorts.
        radius: largest norm of a message.
        dim: number of coordinates of a message.
        rounds: number of rounds planned.
        rounding: as in `Mechanism`.
    """
    mechanism = Mechanism(
        num_clients, participation, 1.0 if asked.noise_std is None else asked.noise_std, radius,
        cast(Trust, asked.trust), asked.adjacency, asked.colluders, asked.min_cohort, asked.secure,
        0.0 if asked.discrete else rounding,
        asked.stream, asked.draws, dim if asked.discrete else 0, asked.protocol,
        least_survivors(asked, num_clients, participation),
    )  # fmt: skip
    before, paper = (asked.tuning_runs - 1) * rounds, asked.calibration == PAPER
    budget = None if paper else asked.epsilon
    affordable = rounds
    if paper and asked.epsilon is not None:
        std = paper_noise_std(asked.epsilon, asked.delta, participation.rate(num_clients), rounds)
        mechanism = replace(mechanism, noise_std=require_noise(std, "the paper's formula", "another epsilon"))
    elif asked.noise_std is None and asked.epsilon is not None:
        mechanism = mechanism.calibrate(asked.epsilon, asked.delta, before + rounds)
    if asked.noise_scale == TOTAL_NORM:
        std = mechanism.noise_std / math.sqrt(dim)
        mechanism = replace(mechanism, noise_std=require_noise(std, "noise by total norm", "more noise"))
    if mechanism.grid is not None and mechanism.noise_std * mechanism.grid.steps < LEAST_UNITS:
        more = "a larger privacy.noise_std" if asked.noise_std is not None else "a smaller privacy.epsilon"
        raise UserError(f"noise of std {mechanism.noise_std:g} is too little for a grid: it needs "
                        f"{LEAST_UNITS / mechanism.grid.steps:.2g} at least; ask for {more}.")  # fmt: skip
    if mechanism.grid is not None:
        _require_room(mechanism, "a smaller privacy.noise_std" if asked.noise_std is not None else "more ε")
    participation.rate_if_held(num_clients, mechanism.least_cohort)  # raises UserError if hardly any round is held
    if budget is not None and asked.noise_std is not None:
        affordable = max(0, mechanism.affordable(before + rounds, budget, asked.delta) - before)
        if not affordable:
            raise UserError(
                f"the budget of ε = {budget:g} does not pay for one round: with noise_std = {asked.noise_std:g} "
                f"{'it' if not before else 'together with the runs before it, it'} costs "
                f"ε = {mechanism.epsilon(before + 1, asked.delta):.4g} at δ = {asked.delta:g}; add noise or budget."
            )
    nominal = asked.epsilon if paper else None
    return Plan(
        mechanism, affordable, rounds, asked.delta, budget, before, nominal, asked.noise_scale == TOTAL_NORM,
        asked.settings_from_data, dim,
    )  # fmt: skip


def _require_room(mechanism: Mechanism, instead: str) -> None:
    """Raises UserError if noise on the grid, or a sum with it, is beyond what is drawn or added.

    Args:
        mechanism: one round's release.
        instead: what makes the noise less.
    """
    m, grid = mechanism.num_clients, mechanism.grid
    assert grid is not None
    drawn_at_once = 1 if mechanism.trust == "central" else m
    if mechanism.noise_std * grid.steps * math.sqrt(drawn_at_once) > MOST_UNITS:
        raise UserError(
            f"noise of std {mechanism.noise_std:g} is too much for a grid, where up to "
            f"{MOST_UNITS / grid.steps / math.sqrt(drawn_at_once):.2g} can be drawn: ask for {instead}."
        )
    if mechanism.protocol and grid.steps * (m + 10 * mechanism.noise_std * math.sqrt(m)) >= 2 ** (WORD - 1):
        raise UserError(
            f"secure aggregation adds numbers of {WORD} bits, into which the sum of {m:,} messages with "
            f"noise of std {mechanism.noise_std:g} does not fit: ask for fewer clients, or {instead}."
        )


def least_survivors(asked: Privacy, num_clients: int, participation: Participation) -> int:
    """Returns the number of messages that a sum must have where the protocol runs; 0 where it does not."""
    if not asked.protocol:
        return 0
    if asked.min_survivors is not None:
        return asked.min_survivors
    return max(2, math.ceil(SURVIVE * participation.rate(num_clients) * num_clients - 1e-9))


def require_noise(std: float, by: str, instead: str) -> float:
    """Returns the noise that something asked for comes to; raises UserError if accounting cannot tell its ε."""
    if not LEAST_NOISE <= std <= MOST_NOISE:
        raise UserError(f"{by} gives noise of std {std:g}, and accounting goes from {LEAST_NOISE:g} to {MOST_NOISE:g}: "
                        f"ask for {instead}.")  # fmt: skip
    return std


def _binomial(n: int, p: float, least: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns Bin(n, p) from `least` on, on at most 200 values.

    What lies between two of them counts at the smaller one. Also returns the mass of the lower tail that was left away,
    at most 1e-45: times 10⁹ rounds far below any δ that matters.
    """
    low, high = max(least, int(binom.ppf(1e-45, n, p))), n - int(binom.ppf(1e-45, n, 1 - p))
    kept = np.arange(low, max(low, high) + 1, max(1, -(-(high - low + 1) // 200)))
    mass = np.add.reduceat(binom.pmf(np.arange(low, max(low, high) + 1), n, p), kept - low)
    mass[-1] += binom.sf(max(low, high), n, p)
    return kept, mass, float(binom.cdf(low - 1, n, p)) if low > least else 0.0
