"""Calculator behind `fednormec privacy`: σ for ε and ε for σ over trust models, adjacencies and accountants."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from fednormec.core.participation import Participation, fixed_size, full, poisson
from fednormec.errors import UserError, at_least_one, one_of, positive
from fednormec.privacy.accounting import Accountant, tuned_epsilon
from fednormec.privacy.asked import ADJACENCIES, PAPER, TRUSTS, Adjacency, Trust, require_delta
from fednormec.privacy.calibrate import paper_noise_std
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.privacy.mechanism import LEAST_NOISE, MOST_NOISE, Mechanism, require_noise

ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp")
TOLERATED = (0.0, 0.1, 0.3)  # shares of clients that drop out
TUNING = {"geometric": 1.0, "logarithmic": 0.0, "Poisson": math.inf}


@dataclass(frozen=True)
class Question:
    """Question to the calculator: the noise for epsilon, or the ε of noise_std.

    Args:
        clients: number of clients.
        rounds: number of rounds.
        delta: the δ at which every ε is stated.
        p: probability of Poisson sampling. Neither p nor fixed_size: everyone takes part in every round.
        fixed_size: size of the cohorts.
        epsilon: target; the noise is computed.
        noise_std: noise on every coordinate for radius 1; its ε is computed.
        trusts: trust models to answer for; none means all.
        adjacencies: adjacencies to answer for; none means all.
        colluders: number of clients who tell the server their own noise; matters in secagg.
        min_cohort: in secagg, a round with fewer senders is called off.
        min_survivors: in secagg, number of messages in a sum, at least, where the protocol really runs; None: it does
            not, and who takes part is drawn honestly.
        calibration: "exact", or "paper": σ from the paper's formula.
        total_norm: number of dimensions d; divides σ by √d, which is not private.
        runs: number of runs, to price tuning.
    """

    clients: int
    rounds: int
    delta: float = 1e-5
    p: float | None = None
    fixed_size: int | None = None
    epsilon: float | None = None
    noise_std: float | None = None
    trusts: tuple[str, ...] = TRUSTS
    adjacencies: tuple[str, ...] = ADJACENCIES
    colluders: int = 0
    min_cohort: int = 1
    min_survivors: int | None = None
    calibration: str = "exact"
    total_norm: int | None = None
    runs: int = 1

    def __post_init__(self) -> None:
        at_least_one("rounds", self.rounds)
        at_least_one("runs", self.runs)
        require_delta(self.delta)
        one_of("calibration", self.calibration, ("exact", PAPER))
        if (self.epsilon is None) == (self.noise_std is None):
            raise UserError("give either epsilon (to get the noise) or noise_std (to get the ε).")
        positive("epsilon" if self.noise_std is None else "noise_std", self.epsilon or self.noise_std or 0.0)
        if self.calibration == PAPER and self.epsilon is None:
            raise UserError("the paper's calibration computes the noise from epsilon: give that.")
        if self.p is not None and self.fixed_size is not None:
            raise UserError("give p (Poisson sampling) or a fixed size of the cohorts, not both.")
        for trust in self.trusts:
            one_of("trust", trust, TRUSTS)
        for adjacency in self.adjacencies:
            one_of("adjacency", adjacency, ADJACENCIES)
        if self.min_survivors is not None and self.trusts and "secagg" not in self.trusts:
            raise UserError("min_survivors is for trust = 'secagg': leave it out, or ask for secagg.")
        if self.total_norm is not None:
            at_least_one("the dimension for total_norm", self.total_norm)
            if self.calibration != PAPER and self.noise_std is None:
                raise UserError("noise by total norm is not private, so nothing can be calibrated for it: give "
                                "noise_std, or the paper's calibration.")  # fmt: skip

    @property
    def participation(self) -> Participation:
        if self.fixed_size is not None:
            return fixed_size(self.fixed_size)
        return full() if self.p is None else poisson(self.p)

    @property
    def given_noise(self) -> float | None:
        """Noise per coordinate, where it is not to be calibrated."""
        std = self.noise_std
        if self.calibration == PAPER and self.epsilon is not None:
            std = paper_noise_std(self.epsilon, self.delta, self.participation.rate(self.clients), self.rounds)
            std = require_noise(std, "the paper's formula", "another epsilon")
        if std is None or self.total_norm is None:
            return std
        return require_noise(std / math.sqrt(self.total_norm), f"σ/√{self.total_norm}", "fewer dimensions")


class Row(NamedTuple):
    """Row of the answer: one guarantee.

    Attributes:
        trust: trust model.
        adjacency: adjacency.
        accountant: accountant that computed it.
        noise_std: noise per coordinate for radius 1: of the sum in central, of each message elsewhere.
        epsilon: ε of all rounds.
        delta: its δ.
        mechanism: mechanism with this noise.
    """

    trust: Trust
    adjacency: Adjacency
    accountant: Accountant
    noise_std: float
    epsilon: float
    delta: float
    mechanism: Mechanism

    def facts(self, private: bool = True) -> dict[str, Any]:
        """Returns the row as data, with a label where it is not private."""
        label = {} if private else {"label": NOT_PRIVATE}
        return {key: value for key, value in self._asdict().items() if key != "mechanism"} | label


def rows(question: Question) -> Iterator[Row]:
    """Yields a guarantee for each trust model and adjacency, by each accountant that can tell."""
    q, std = question, question.given_noise
    for trust in q.trusts or TRUSTS:
        for adjacency in q.adjacencies or ADJACENCIES:
            asked = Mechanism(
                q.clients, q.participation, 1.0 if std is None else std, trust=cast(Trust, trust),
                adjacency=cast(Adjacency, adjacency), colluders=q.colluders,
                min_cohort=q.min_cohort if trust == "secagg" else 1,
            )  # fmt: skip
            if trust == "secagg" and q.min_survivors is not None:
                asked = running(asked, q.min_survivors)
            if trust == "secagg":  # raises UserError if hardly any round is held
                q.participation.rate_if_held(q.clients, asked.least_cohort)
            for accountant in ACCOUNTANTS:
                if math.isinf(asked.epsilon(q.rounds, q.delta, accountant)):
                    continue  # no Rényi bound is known for replace-one under Poisson sampling
                mechanism = asked
                if std is None and q.epsilon is not None:
                    mechanism = asked.calibrate(q.epsilon, q.delta, q.rounds, accountant)
                spent = mechanism.epsilon(q.rounds, q.delta, accountant)
                yield Row(
                    asked.trust, asked.adjacency, accountant, mechanism.noise_std, spent, q.delta, mechanism
                )  # fmt: skip


def running(mechanism: Mechanism, min_survivors: int) -> Mechanism:
    """Returns the same in secure aggregation that really runs; raises UserError if it cannot.

    Noise is on a grid then, for a million parameters: more of them change no digit.
    """
    return replace(
        mechanism, secure=True, draws="server", grid_dim=10**6, protocol=True, min_survivors=min_survivors, min_cohort=1
    )


def text(question: Question, answers: list[Row]) -> str:
    """Writes the rows for a person, with the paper's formula beside a target and the price of tuning."""
    q = question
    title = f"{q.clients} clients, {q.participation.name}, {q.rounds} rounds, δ = {q.delta:g}, for each client"
    lines = [
        title,
        f"{'trust':<9}{'adjacency':<13}{'accountant':<12}{'noise_std':>11}  {'ε at most':>10}   after ¼, ½, ¾",
    ]
    for row in answers:
        part = [row.mechanism.epsilon(-(-q.rounds * k // 4), q.delta, row.accountant) for k in (1, 2, 3)]
        label = f"  {NOT_PRIVATE}" if q.total_norm is not None else ""
        lines.append(
            f"{row.trust:<9}{row.adjacency:<13}{row.accountant:<12}{row.noise_std:>11.5g}  {up(row.epsilon, 4):>10}   "
            f"{', '.join(map(up, part))}{label}"
        )
    lines.append("noise_std: per coordinate for radius 1, of the sum in central, of each message in secagg and local")
    if q.min_survivors is not None:
        lines.append("secagg: the protocol runs, and all are counted as asked in every round, whoever is drawn")
    if q.total_norm is not None:
        lines.append(f"{NOT_PRIVATE}: noise of std σ/√{q.total_norm} on a coordinate protects nobody")
    elif q.epsilon is not None:
        lines.append(_paper(q, q.epsilon))
    lines += [line for row in answers for line in _tolerating(q, row)]
    if q.runs > 1:
        lines += [line for row in answers if row.accountant == "pld" for line in _tuning(q, row)]
    return "\n".join(lines)


class Tolerance(NamedTuple):
    """What it costs that some clients drop out of secure aggregation, or collude with the server.

    Attributes:
        dropping: share of the clients that may drop out.
        min_survivors: number of clients that are left then.
        noise_std: noise of each message that keeps to the target with as many; None: too few are left.
        more: how much more noise that is when all come, as a share.
        otherwise: ε if each client added its share of the noise that is enough when all come.
    """

    dropping: float
    min_survivors: int
    noise_std: float | None = None
    more: float | None = None
    otherwise: float | None = None


def tolerances(question: Question, row: Row) -> list[Tolerance]:
    """Returns what drop-outs and colluders cost where the protocol runs; nothing for a row of something else."""
    q, found = question, list[Tolerance]()
    calibrated = q.epsilon is not None and q.total_norm is None and q.calibration != PAPER
    if not calibrated or q.epsilon is None or row.trust != "secagg" or row.accountant != "pld":
        return found
    senders = math.floor(q.participation.rate(q.clients) * q.clients + 1e-9)
    plain = replace(row.mechanism, colluders=0)
    best = None if senders < 2 else running(plain, senders).calibrate(q.epsilon, row.delta, q.rounds).noise_std
    for share in TOLERATED:
        least = math.ceil((1 - share) * senders - 1e-9)
        if share and least == senders:
            continue  # of so few not one would be gone
        if best is None or least < 2 or least <= q.colluders:
            found.append(Tolerance(share, least))
            continue
        own = replace(running(plain, least), colluders=q.colluders)
        std = own.calibrate(q.epsilon, row.delta, q.rounds).noise_std
        otherwise = replace(own, noise_std=best).epsilon(q.rounds, row.delta)
        found.append(Tolerance(share, least, std, std / best - 1, otherwise))
    return found


def _tolerating(question: Question, row: Row) -> Iterator[str]:
    found, colluders = tolerances(question, row), question.colluders
    if found:
        who = f"{colluders} colluder{'' if colluders == 1 else 's'}"
        yield (f"secagg, {row.adjacency}: drop-outs and {who}, where the protocol runs and all are asked in every "
               "round:")  # fmt: skip
    for one in found:
        said = f"    {one.dropping:4.0%} drop out (min_survivors = {one.min_survivors}): "
        if one.noise_std is None or one.more is None or one.otherwise is None:
            yield f"{said}too few are left, with {who}"
        else:
            yield (f"{said}noise_std {one.noise_std:.5g}, {one.more:+.1%} when all come; without that "
                   f"ε ≤ {up(one.otherwise)}")  # fmt: skip


def _paper(question: Question, epsilon: float) -> str:
    q = question
    std = paper_noise_std(epsilon, q.delta, q.participation.rate(q.clients), q.rounds)
    if not LEAST_NOISE <= std <= MOST_NOISE:
        return f"the paper's σ = p √(rounds log 1/δ)/ε is {std:.4g}, beyond what can be accounted"
    true = Mechanism(q.clients, q.participation, std).epsilon(q.rounds, q.delta)
    return (
        f"the paper's σ = p √(rounds log 1/δ)/ε is {std:.4g}: "
        f"its true ε (central, zero_out) is {up(true, 4)}, not {epsilon:g}"
    )


def _tuning(question: Question, row: Row) -> Iterator[str]:
    q = question
    naive = row.mechanism.epsilon(q.rounds * q.runs, row.delta)
    yield f"{row.trust}, {row.adjacency}: {q.runs} runs on the same clients, all seen: ε ≤ {up(naive)}"
    for name, shape in TUNING.items():
        best = tuned_epsilon(row.mechanism.release(), q.rounds, row.delta, q.runs, shape)
        if math.isfinite(best):
            yield f"    a {name} number of runs, {q.runs} on average, only the best seen: ε ≤ {up(best)}"
