"""Outlook of a private run before its first round: how far the noise outweighs what there is to learn from.

Only public numbers enter it: the noise, the number of clients, who takes part, the length of a message, the rounds.
"""

import math
from dataclasses import dataclass
from typing import Any

from fednormec.privacy.mechanism import Plan, Trust

LITTLE, NOTHING = 1.0, 4.0  # over all rounds; measured in experiments/outlook


@dataclass(frozen=True)
class Outlook:
    """Noise of a private run against its signal, as long as that can be.

    Attributes:
        per_round: norm of the noise in a round's mean message, over the longest that a mean message can be.
        rounds: number of rounds.
        trust: "central", "secagg" or "local", as in `Privacy`.

    >>> found = Outlook(per_round=3.0, rounds=9, trust="central")
    >>> found.over_rounds, found.sentence
    (1.0, 'noise to signal: at least 3 in a round, 1 over all 9 rounds.')
    """

    per_round: float
    rounds: int
    trust: Trust

    @property
    def over_rounds(self) -> float:
        """Same ratio for the sum of all rounds: noises add up to √rounds of one, messages to `rounds` at most."""
        return self.per_round / math.sqrt(self.rounds)

    @property
    def sentence(self) -> str:
        """Both ratios, for a person."""
        return (
            f"noise to signal: at least {self.per_round:.2g} in a round, {self.over_rounds:.2g} over all "
            f"{self.rounds} rounds."
        )

    @property
    def warning(self) -> str | None:
        """What the ratio means and what to change, where little or nothing can be learnt; None elsewhere."""
        if self.over_rounds < LITTLE:
            return None
        what = "nothing can be learnt" if self.over_rounds >= NOTHING else "little can be learnt"
        times = self.over_rounds / LITTLE
        clients = times**2 if self.trust == "local" else times  # σ is for each message there, and adds up
        trusted = ', trust = "central" (if clients trust the server)' if self.trust == "local" else ""
        return (
            f"{what}: over all rounds the noise is at least {self.over_rounds:.2g} times as long as the signal. At the "
            f"same ε, {clients:,.0f} times the clients or 1/{times**2:,.0f} of the parameters would make it "
            f"{LITTLE:g}. A larger ε{trusted} and a small model on public [features] help; more data per client, more "
            "local steps and more rounds do not."
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Ratios and warning as JSON can hold them."""
        return {"per_round": self.per_round, "over_rounds": self.over_rounds, "warning": self.warning}


def outlook(plan: Plan) -> Outlook:
    """Returns the outlook of a run that keeps to this plan."""
    return Outlook(plan.mechanism.noise_to_signal(plan.dim), plan.rounds, plan.mechanism.trust)


def notes(plan: Plan | None) -> list[str]:
    """Returns what to say before the first round: the ratios, and a warning if there is one; nothing without a plan."""
    if plan is None:
        return []
    found = outlook(plan)
    return [found.sentence, *([] if found.warning is None else [found.warning])]
