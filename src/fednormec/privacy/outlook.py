"""Outlook of a private run before its first round: how far the noise outweighs what there is to learn from.

Only public numbers enter it: the noise, the number of clients, who takes part, the length of a message, the rounds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fednormec.privacy.asked import SILO, Trust
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import AnyPlan, RecordPlan, for_clients

ENOUGH, LITTLE, NOTHING = 0.3, 2.0, 4.0  # of the decisive ratio; this and the next line: experiments/outlook
OFTEN = 0.95  # probability of a round with a sum, from which on none without is worth a word
PARAMETERS, REMEMBERED = 625, 16  # number of parameters, and of rounds with a server memory, that count at most


@dataclass(frozen=True)
class Outlook:
    """Noise of a private run against its signal, as long as that can be.

    Attributes:
        per_round: norm of the noise in a round's mean message, over the longest that a mean message can be.
        dim: number of coordinates of a message.
        rounds: number of rounds.
        trust: "central", "secagg" or "local", as in `Privacy`, or "silo" where records are protected.
        remembers: whether the server has a memory, which keeps the noise of earlier rounds.
        total_norm: whether the noise is by total norm, which is not private; every sentence then says so.

    >>> found = Outlook(per_round=3.0, dim=20, rounds=9, trust="central")
    >>> found.over_rounds, found.decisive, found.sentence
    (1.0, 1.0, 'noise to signal: at least 3 in a round, 1 over all 9 rounds.')
    """

    per_round: float
    dim: int
    rounds: int
    trust: Trust | Literal["silo"]
    remembers: bool = False
    total_norm: bool = False

    @property
    def over_rounds(self) -> float:
        """Same ratio for the sum of all rounds: noises add up to √rounds of one, messages to `rounds` at most."""
        return self.per_round / math.sqrt(self.rounds)

    @property
    def decisive(self) -> float:
        """Ratio that tells what can be learnt: over all rounds, with limits to what counts.

        Of more than 625 parameters 625 count, because noise in most directions of a large model does little. With a
        server memory 16 rounds count, because later ones bring as much old noise as new signal.
        """
        return self.per_round * math.sqrt(min(self.dim, PARAMETERS) / self.dim / self._rounds)

    @property
    def _rounds(self) -> int:
        return min(self.rounds, REMEMBERED) if self.remembers else self.rounds

    @property
    def sentence(self) -> str:
        """Both ratios, for a person."""
        return (
            f"{self._label}noise to signal: at least {self.per_round:.2g} in a round, {self.over_rounds:.2g} over all "
            f"{self.rounds} rounds."
        )

    @property
    def warning(self) -> str | None:
        """What the ratio means and what to change, where little or nothing can be learnt; None elsewhere."""
        ratio, kept = self.decisive, self._rounds < self.rounds
        if ratio < LITTLE:
            return None
        if self.trust == SILO:
            return self._of_records(ratio)
        times = ratio / ENOUGH
        clients = times**2 if self.trust == "local" else times  # there each message has a noise of its own
        memory = f" (with a server memory only {self._rounds} rounds count)" if kept else ""
        helps = [
            "a larger ε",
            *(['privacy.trust = "central" (if the server is trusted)'] if self.trust == "local" else []),
            *(["fewer rounds", "a method without memory (dp_fed_avg_normalized)"] if kept else []),
            f"far fewer than {PARAMETERS} parameters, as a small model on public [features] has",
        ]
        useless = "more local steps" if kept else "more local steps or rounds"
        return (
            f"{self._label}{'nothing' if ratio >= NOTHING else 'little'} can be learnt: the noise that counts is "
            f"{ratio:.2g} times as long as the signal can be{memory}. At the same ε, {clients:,.0f} times the clients "
            f"would make it {ENOUGH:g}, which leaves enough to learn from. These help, too: {'; '.join(helps)}. "
            f"These do not: more data per client; {useless}."
        )

    def _of_records(self, ratio: float) -> str:
        return (
            f"{'nothing' if ratio >= NOTHING else 'little'} can be learnt: the noise that counts is {ratio:.2g} times "
            f"as long as the signal can be. At the same ε, {ratio / ENOUGH:,.0f} times the records of each client "
            f"would make it {ENOUGH:g}, which leaves enough to learn from. These help, too: a larger ε; more clients; "
            f"larger batches (local.batch_size); far fewer than {PARAMETERS} parameters."
        )

    @property
    def _label(self) -> str:
        return f"{NOT_PRIVATE}: " if self.total_norm else ""

    @property
    def facts(self) -> dict[str, Any]:
        """Ratios and warning as JSON can hold them."""
        ratios = {"per_round": self.per_round, "over_rounds": self.over_rounds, "decisive": self.decisive}
        return ratios | {"warning": self.warning}


def outlook(plan: AnyPlan) -> Outlook:
    """Returns the outlook of a run that keeps to this plan."""
    if isinstance(plan, RecordPlan):
        return Outlook(plan.noise_to_signal, plan.dim, plan.rounds, SILO)
    ratio = plan.mechanism.noise_to_signal(plan.dim)
    return Outlook(ratio, plan.dim, plan.rounds, plan.mechanism.trust, plan.remembers, plan.total_norm)


def notes(plan: AnyPlan | None) -> list[str]:
    """Returns what to say before the first round: the ratios, and a warning if there is one; nothing without a plan."""
    if plan is None:
        return []
    found = outlook(plan)
    clients = for_clients(plan)
    called_off = [] if clients is None else _called_off(clients.mechanism)
    return [found.sentence, *([] if found.warning is None else [found.warning]), *called_off]


def _called_off(m: Mechanism) -> Iterator[str]:
    """Yields a warning if fewer clients are drawn than a round needs in more than a twentieth of the rounds."""
    held = m.participation.held(m.num_clients, m.least_cohort)
    if held < OFTEN:
        setting = "privacy.min_survivors" if m.protocol else "privacy.min_cohort"
        yield (
            f"only about {held:.0%} of the rounds will have a sum: in the others fewer than {m.least_cohort} clients "
            f"are drawn. Draw more of them (participation), or ask for fewer ({setting})."
        )
