"""Settings to start a private run with, from public numbers alone, by rules that were measured.

The rules and what they rest on: experiments/leaderboard and docs/algorithm.md. Nothing here looks at anybody's data.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from textwrap import wrap
from typing import Any, NamedTuple

from fednormec.config.assemble import Rules, rules
from fednormec.config.schema import Config, as_toml
from fednormec.core.participation import Participation, full, poisson
from fednormec.errors import UserError, at_least_one, one_of, positive, visible
from fednormec.privacy.asked import TRUSTS, Privacy, Trust
from fednormec.privacy.labels import up
from fednormec.privacy.mechanism import MOST, Plan, plan
from fednormec.privacy.outlook import Outlook, outlook

METHOD, STEPS = "dp_fed_avg_normalized", 5
LOGITS = 2.0  # noise that all rounds together may put into an output of a linear model
# A linear model's longest move of a round and a client's local steps together, in units of one over the length of an
# example's inputs and of one over its square. They broke nets, which get a shorter move, in no units, and local steps.
LINEAR_MOVE, LINEAR_LOCAL, NET_MOVE, NET_LOCAL = 128.0, 100.0, 1.0, 30.0
FEW, MANY = 60, 240  # numbers of rounds
WORTH = 0.6  # noise to signal of a round among many, below which many pay
TYPICAL = 5.0  # length of an example's inputs where nobody says
SHORTEST, LONGEST = 1e-6, 1e6  # lengths of inputs that make sense
LARGEST = 10**15  # number of parameters
TRIES = 3  # server steps to try: a third, this one, three times as much
COSTLY = 2.0  # how much more noise drawing clients may cost before it is mentioned


@dataclass(frozen=True)
class Situation:
    """Public numbers of a federation, as `recommend` takes them."""

    clients: int
    dim: int
    epsilon: float
    rounds: int | None = None
    p: float | None = None
    delta: float = 1e-5
    trust: Trust = "central"
    input_norm: float | None = None
    linear: bool = False

    def __post_init__(self) -> None:
        at_least_one("clients", self.clients)
        at_least_one("dim", self.dim)
        if self.dim > LARGEST:
            raise UserError(f"dim must be at most 10^15, not {visible(self.dim, 30)}.")
        positive("epsilon", self.epsilon)
        one_of("trust", self.trust, TRUSTS)
        if self.rounds is not None:
            at_least_one("rounds", self.rounds)
        if self.input_norm is not None and not SHORTEST <= self.input_norm <= LONGEST:
            raise UserError(f"input_norm must lie between {SHORTEST:g} and {LONGEST:g}, not {self.input_norm}.")

    @property
    def participation(self) -> Participation:
        """Rule that draws the cohorts."""
        return full() if self.p is None else poisson(self.p)

    @property
    def length(self) -> float:
        """Length of an example's inputs, or a guess."""
        return TYPICAL if self.input_norm is None else self.input_norm

    def plan(self, rounds: int) -> Plan:
        """Returns the plan of so many rounds of the recommended method, whose messages have norm 1 at most."""
        asked = Privacy(epsilon=self.epsilon, delta=self.delta, trust=self.trust)
        return plan(asked, self.clients, self.participation, 1.0, self.dim, rounds)


class Choice(NamedTuple):
    """Setting that is recommended, and why."""

    section: str
    key: str
    value: Any
    reason: str


class Recommendation(NamedTuple):
    """Config to start with.

    Attributes:
        situation: what it is for.
        choices: its settings, each with a reason.
        plan: noise and ε of the run.
        outlook: noise against signal.
        notes: what else to know.
    """

    situation: Situation
    choices: tuple[Choice, ...]
    plan: Plan
    outlook: Outlook
    notes: tuple[str, ...]

    @property
    def rules(self) -> Rules:
        """Method, participation, privacy and run that the config describes."""
        return rules({name: section for name, section in self.config.items() if name != "data"})

    @property
    def config(self) -> Config:
        """Sections of the config; [data] and [model] are the user's."""
        sections: Config = {}
        for choice in self.choices:
            sections.setdefault(choice.section, {})[choice.key] = choice.value
        return sections

    def toml(self) -> str:
        """Returns the config as TOML, with the reasons as comments."""
        about = [self._title, self.outlook.sentence, *self.notes]
        lines = [f"# {line}" for sentence in about for line in wrap(sentence, 110)]
        for name in self.config:
            lines += ["", f"[{name}]"]
            own = [choice for choice in self.choices if choice.section == name]
            written = [f"{choice.key} = {as_toml(choice.value)}" for choice in own]
            width = max(map(len, written))
            lines += [f"{line:<{width}}  # {choice.reason}" for line, choice in zip(written, own, strict=True)]
        return "\n".join(lines) + "\n"

    @property
    def facts(self) -> dict[str, Any]:
        """Config, reasons and figures as JSON can hold them."""
        return {
            "situation": asdict(self.situation),
            "config": self.config,
            "reasons": {f"{choice.section}.{choice.key}": choice.reason for choice in self.choices},
            "noise_std": self.plan.mechanism.noise_std,
            "noise_to_signal": self.outlook.facts,
            "notes": list(self.notes),
        }

    @property
    def _title(self) -> str:
        s, rounds = self.situation, self.plan.planned
        return (
            f"A start for {s.clients:,} clients, {s.dim:,} parameters, {rounds} rounds and ε = {s.epsilon:g} at δ = "
            f"{s.delta:g} ({s.trust} trust), by the rules of docs/algorithm.md; no data were looked at."
        )


def recommend(
    *,
    clients: int,
    dim: int,
    epsilon: float,
    rounds: int | None = None,
    p: float | None = None,
    delta: float = 1e-5,
    trust: Trust = "central",
    input_norm: float | None = None,
    linear: bool = False,
) -> Recommendation:
    """Returns settings to start a private run with, from public numbers alone.

    Args:
        clients: number of clients.
        dim: number of parameters that are trained.
        epsilon: ε that the run may cost.
        rounds: number of rounds; None: it is recommended.
        p: probability with which a client is drawn for a round; None: all take part in every round.
        delta: δ of that ε.
        trust: "central", "secagg" or "local", as in `Privacy`.
        input_norm: typical length of one example's inputs, a public number, such as √F for F standardised ones; None:
            unknown.
        linear: whether the model is linear, with no hidden layers; then it can take longer steps.

    Raises:
        UserError: if no noise keeps to this ε, or if something given is out of its range.

    >>> found = recommend(clients=2000, dim=3440, epsilon=2, rounds=60, p=0.1, input_norm=18.5, linear=True)
    >>> found.config["method"]
    {'name': 'dp_fed_avg_normalized', 'alpha': 0.054, 'server_step': 1.5}
    >>> found.rules.algorithm.name, found.rules.run.rounds
    ('DP-FedAvg (normalised)', 60)
    """
    situation = Situation(clients, dim, epsilon, rounds, p, delta, trust, input_norm, linear)
    number, why = (rounds, "as asked") if rounds is not None else _rounds(situation)
    kept = situation.plan(number)
    found = outlook(kept)
    choices = (
        Choice("data", "source", "mydata.npz", "put your own here; fednormec settings data says what can stand here"),
        Choice("data", "clients", clients, "deals the examples out; leave it out if your data name their clients"),
        *([Choice("model", "name", "linear", "as asked")] if situation.linear else []),
        *_method(situation, found),
        *_participation(situation),
        Choice("privacy", "epsilon", situation.epsilon, f"noise of std {kept.mechanism.noise_std:.3g} follows from it"),
        Choice("privacy", "delta", situation.delta, "should be well below 1 / number of clients"),
        Choice("privacy", "trust", situation.trust, "fednormec privacy shows what another one would cost"),
        Choice("run", "rounds", number, why),
    )
    return Recommendation(situation, choices, kept, found, tuple(_notes(situation, kept, found)))


def _rounds(situation: Situation) -> tuple[int, str]:
    """Returns how many rounds pay, and why: more of them let a model with little noise go on learning."""
    if outlook(situation.plan(MANY)).per_round < WORTH:
        return MANY, f"with this little noise {MANY} rounds were 0.3 points worse to 1.5 better than {FEW}"
    return FEW, f"with this much noise {MANY} rounds were 0.7 points worse to 0.9 better; 20 lost up to 2.2"


def _method(situation: Situation, found: Outlook) -> list[Choice]:
    unit, (move, why) = situation.length, _move(situation, found)
    local = (LINEAR_LOCAL if situation.linear else NET_LOCAL) / unit**2
    longer = "steps this long broke nets" if situation.linear else "linear models gained by longer ones (--linear)"
    return [
        Choice("local", "name", "gd", "full gradients; sgd for clients with many examples"),
        Choice("local", "steps", STEPS, "up to 4 points better than one step; 0.6 worse with one class per client"),
        Choice("local", "step", _short(local), f"sum of the {STEPS} local steps; {longer}"),
        Choice("method", "name", METHOD, "no tuned method was over 2 points better; no bound to tune"),
        Choice("method", "alpha", _short(0.01 * local * unit), "1 % of the longest step: only tiny updates are damped"),
        Choice("method", "server_step", _short(move), why),
        Choice("server", "name", "sgd", "momentum and a tenth of the step: -2.3 to +1.4 points, in nets -6.1 to +1.1"),
        Choice("server", "schedule", "cooldown", "up to 18 points better than a constant step, at no ε"),
    ]


def _move(situation: Situation, found: Outlook) -> tuple[float, str]:
    """Returns how far the model should move in a round, and why.

    Noise on a coordinate of all rounds' mean messages together is r √K/√d, r that of a round; times the move and the
    length of an example's inputs it is the noise in an output of a linear model.
    """
    unit, collected = situation.length, found.per_round * math.sqrt(found.rounds / found.dim)
    most = LINEAR_MOVE / unit if situation.linear else NET_MOVE
    move, why = LOGITS / collected / unit, f"the noise of all rounds then adds about {LOGITS:g} to an output"
    if move > most:
        move, why = most, f"as far as {'a linear model' if situation.linear else 'a net'} should move in a round"
    if situation.input_norm is None and move != NET_MOVE:
        why += f", if inputs have a length of about {TYPICAL:g} (--input-norm)"
    return move, why


def _participation(situation: Situation) -> list[Choice]:
    if situation.p is None:
        return [Choice("participation", "name", "full", "at one ε the noise to signal is least with all clients")]
    central = "who is drawn stays secret, which the accountant counts on"
    seen = "each client is drawn by chance; the server sees who"
    return [
        Choice("participation", "name", "poisson", central if situation.trust == "central" else seen),
        Choice("participation", "p", situation.p, "as asked: saves messages, not noise"),
    ]


def _notes(situation: Situation, kept: Plan, found: Outlook) -> Iterator[str]:
    """Yields what the user should know before the first round."""
    if found.warning is not None:
        yield found.warning
    every = outlook(replace(situation, p=None).plan(kept.planned)).per_round
    if found.per_round > COSTLY * every:
        yield (
            f"Drawing clients costs much here: with all of them in every round (no --p) the noise to signal would be "
            f"{every:.2g} in place of {found.per_round:.2g}."
        )
    if situation.delta * situation.clients >= 1:
        yield f"δ = {situation.delta:g} is not below 1 / {situation.clients:,}: one client's data could leak whole."
    if situation.trust != "central":
        yield "The rules were measured with central trust; elsewhere only the noise is certain."
    if TRIES * kept.planned <= MOST:
        together = kept.mechanism.epsilon(TRIES * kept.planned, kept.delta)
        yield (
            f"Tune method.server_step first, by factors of 3: {TRIES} such runs on the same clients cost ε = "
            f"{up(together)} together (privacy.tuning_runs = {TRIES} keeps them within {situation.epsilon:g})."
        )


def _short(value: float) -> float:
    return float(f"{value:.2g}")
