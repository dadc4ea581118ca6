"""Statement of what a run may claim, in plain words and as data.

It is exactly as strong as what was proved, and says what that leaves open.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.privacy.mechanism import Mechanism, Plan
from fednormec.privacy.outlook import outlook
from fednormec.privacy.record_statement import said_of
from fednormec.privacy.records import AnyPlan, RecordPlan

ADJACENCY = {
    "zero_out": "the client stays in the protocol and all its messages become 0",
    "replace_one": "the client's data become any other data",
}
TRUST = {
    "central": "an aggregator is trusted: it sees the messages and who takes part, keeps both secret, and adds the "
    "noise to every sum, empty ones included",
    "secagg": "nobody is trusted with a message: each sender adds its own noise, secure aggregation shows the server "
    "the sum only, and the server may know who takes part",
    "local": "nobody is trusted with an exact message: each sender adds its own noise, and the server may see every "
    "noisy message and who sent it",
}
PROTOCOL = (
    "nobody is trusted with a message: each sender adds its own noise, and the server learns noisy sums alone, over "
    "{least} messages or more, which the senders enforce{colluding}"
)
COLLUDING = "; with the messages of {colluders} colluders taken off, over {honest} or more{single}"
SINGLE = ", which can be one message with its own noise"
SIMULATED = "secure aggregation itself: the program that ran saw every message, and added noise as if it had not"
ONE_PROGRAM = "whoever runs the program: it is all clients and the server, with their data, keys and exact messages"
ASSUMED = (
    "what secure aggregation takes to be so: its cryptography (X25519, HKDF, AES, ECDSA, SHA-256) and its programs "
    "hold, the clients' keys are theirs alone, and no more of them collude with the server, or leave out their noise, "
    "than the statement says"
)
DRAWS = {"honest": "; who takes part is drawn honestly", "server": "; it may ask whom it likes, as often as it likes"}
LARGE = 20.0  # e^20 is half a billion: from here on a statement says so
SAMPLING = {
    True: "each client independently with probability {p:g}",
    False: "{name}: no amplification by sampling counted",
}


@dataclass(frozen=True)
class Statement:
    """Statement about a run.

    Attributes:
        epsilon: ε of what ran.
        delta: its δ.
        text: the whole text.
        facts: all the facts it rests on.
    """

    epsilon: float
    delta: float
    text: str
    facts: dict[str, Any]

    @property
    def headline(self) -> str:
        """First line: the claim itself."""
        return self.text.partition("\n")[0]


def state(
    plan: AnyPlan, rounds: int, again: int = 0, besides: Sequence[tuple[str, str]] = (), ended: str | None = None,
    one_program: bool = True,
) -> Statement:  # fmt: skip
    """States what may be claimed after `rounds` releases; where clients and records are protected, of both.

    Args:
        plan: what the run kept to.
        rounds: number of releases.
        again: number of them that were of rounds that were interrupted and then drawn again; does not matter where the
            protocol runs, since there all attempts count alike.
        besides: entries that follow from where it ran.
        ended: why it ended before its rounds, where something that was released decided that. Such a run is part of the
            whole one, and ε is that of all its rounds: the ε of those that ran would need a number fixed beforehand.
        one_program: whether one program was all clients and the server; in a federation each is its own.
    """
    if isinstance(plan, RecordPlan):
        return _state_of_records(plan, rounds, again, besides, ended, one_program)
    mechanism = plan.mechanism
    again = 0 if mechanism.protocol else again
    whole = plan.rounds + (again if plan.budget is None else 0)  # a budget counts what is drawn again
    counted = rounds if ended is None and mechanism.draws == "honest" else max(rounds, whole)
    epsilon, second = plan.epsilon(counted), mechanism.epsilon(plan.rounds_before + counted, plan.delta, "rdp")
    facts: dict[str, Any] = {
        "private": not plan.total_norm and math.isfinite(epsilon),
        "epsilon": epsilon,
        "delta": plan.delta,
        "accountant": "pld",
        "epsilon_rdp": second if math.isfinite(second) else None,
        "unit": "client",
        "adjacency": mechanism.adjacency,
        "trust": mechanism.trust,
        "noise_std": mechanism.noise_std,
        "radius": mechanism.radius,
        "noise_added_for_rounding": mechanism.rounding,
        "noise_to_signal": outlook(plan).facts,
        "clients": mechanism.num_clients,
        "participation": mechanism.participation.name,
        "p_accounted": mechanism.p,
        "draws": mechanism.draws,
        "colluders": mechanism.colluders,
        "min_cohort": mechanism.min_cohort,
        "protocol": mechanism.protocol,
        "one_program": one_program,
        "min_survivors": mechanism.min_survivors,
        "noise": "continuous" if mechanism.grid is None else "discrete",
        "unit_of_grid": None if mechanism.grid is None else mechanism.grid.unit,
        "unlike": mechanism.release().unlike,
        "rounds": rounds,
        "rounds_drawn_again": again,
        "rounds_counted": counted,
        "rounds_planned": plan.planned,
        "rounds_of_runs_before": plan.rounds_before,
        "budget": plan.budget,
        "nominal_epsilon_of_the_paper": plan.nominal,
        "noise_scale": "total_norm" if plan.total_norm else "per_coordinate",
        "randomness": "secure" if mechanism.secure else "seeded",
        "stream": mechanism.stream,
        "settings_from_data": plan.settings_from_data,
        "ended": ended,
    }
    open_ends = [("not covered", text) for text in _not_covered(plan, counted, one_program)]
    entries = [*_grounds(plan, rounds, again, second), *_early(plan, rounds, counted, ended), *besides, *open_ends]
    if plan.extras:
        facts["extras"] = list(plan.extras)
    if besides:
        facts["besides"] = [f"{name}: {text}" for name, text in besides]
    text = "\n".join([_claim(plan, epsilon), *(_entry(*entry) for entry in entries)])
    if plan.records is not None:
        second_one = _state_of_records(plan.records, rounds, again, (), ended, one_program)
        text, facts["records"] = f"{text}\n\n{second_one.text}", second_one.facts
    return Statement(epsilon, plan.delta, text, facts)


def _state_of_records(
    plan: RecordPlan, rounds: int, again: int, besides: Sequence[tuple[str, str]], ended: str | None, one_program: bool
) -> Statement:
    said = said_of(plan, rounds, again, ended, whole=not one_program)
    facts = dict(said.facts)
    if besides:
        facts["besides"] = [f"{name}: {text}" for name, text in besides]
    split = next(i for i, (name, _) in enumerate(said.entries) if name == "not covered")
    entries = (*said.entries[:split], *besides, *said.entries[split:])
    text = "\n".join([said.claim, *(_entry(*entry) for entry in entries)])
    return Statement(said.epsilon, plan.delta, text, facts)


def _claim(plan: Plan, epsilon: float) -> str:
    said, m = f"ε ≤ {up(epsilon)} at δ = {plan.delta:g}", plan.mechanism
    if math.isinf(epsilon):
        return f"{NOT_PRIVATE}: no finite ε holds at δ = {plan.delta:g}"
    if plan.total_norm:
        return f"{NOT_PRIVATE}: noise of std/√d on a coordinate; its true guarantee is {said}, which protects nobody"
    asked = "" if plan.nominal is None else f"; the paper's formula was asked for ε = {plan.nominal:g}"
    weak = f"; an ε above {LARGE:g} promises next to nothing" if epsilon > LARGE else ""
    return f"{said} for each client ({m.trust}, {m.adjacency}){asked}{weak}"


def _grounds(plan: Plan, rounds: int, again: int, second: float) -> Iterator[tuple[str, str]]:
    m = plan.mechanism
    yield "unit", f"the client with its whole data set; neighbours: {ADJACENCY[m.adjacency]}"
    yield "trust", trust(m)
    what = "rounds of noisy messages" if m.trust == "local" else "noisy sums, one a round,"
    if m.protocol:
        what = (
            "attempt at a noisy sum, counted as one,"
            if rounds == 1
            else "attempts at a noisy sum, each counted as one,"
        )
    repeated = f" ({again} of them of rounds that were interrupted and drawn again)" if again else ""
    yield "released", f"{rounds} {what} and all that follows from them: every model, the server's memory{repeated}"
    where = "the sum" if m.trust == "central" else "each message"
    kind, on = "Gaussian", ""
    if m.grid is not None:
        kind, on = "discrete Gaussian", f"; message and noise are whole multiples of {m.grid.unit:.5g}"
    yield "noise", f"{kind}, std {m.noise_std:.5g} x radius {m.radius:g} on every coordinate of {where}{on}"
    if plan.extras:
        yield "message", f"carries beside its vectors, within the same radius: {'; '.join(plan.extras)}"
    sampling = _sampling(m)
    yield "sampling", f"{sampling}; {m.num_clients} clients"
    if m.protocol:
        yield (
            "cohort",
            f"{m.colluders} clients may collude with the server; a sum has {m.min_survivors} messages or more, and ε "
            f"counts the noise of {m.min_survivors - m.colluders}",
        )
    elif m.trust == "secagg":
        yield (
            "cohort",
            f"{m.colluders} clients may collude with the server; a round needs {m.min_cohort} senders or more",
        )
    if plan.rounds_before:
        yield (
            "tuning",
            (
                f"{plan.rounds_before} rounds of other runs on the same clients are included in ε: with this same "
                "noise, sampling and trust, each with a seed or a stream of its own"
            ),
        )
    opinion = f"; Rényi accounting says {up(second)}" if math.isfinite(second) else ""
    yield "accounting", f"privacy loss distribution, rounded up{opinion}"


def trust(mechanism: Mechanism) -> str:
    """Returns who is trusted with what, in words."""
    if mechanism.protocol:
        honest = mechanism.min_survivors - mechanism.colluders
        single = SINGLE if honest == 1 else ""
        taken = COLLUDING.format(colluders=mechanism.colluders, honest=honest, single=single)
        said = PROTOCOL.format(least=mechanism.min_survivors, colluding=taken if mechanism.colluders else "")
        return said + DRAWS["server"]
    return TRUST[mechanism.trust] + ("" if mechanism.trust == "central" else DRAWS[mechanism.draws])


def _sampling(m: Mechanism) -> str:
    rate = m.participation.rate(m.num_clients)
    if m.draws == "server" and rate < 1:
        return (f"{m.participation.name}, a share of {rate:g} in a round if the server draws as agreed; nobody relies "
                "on that, and ε counts every client in every round")  # fmt: skip
    return SAMPLING[m.participation.select is None].format(p=m.p, name=m.participation.name)


def _early(plan: Plan, rounds: int, counted: int, ended: str | None) -> Iterator[tuple[str, str]]:
    if ended is not None:
        yield (
            "ended",
            f"after {rounds} of {plan.rounds} rounds: {ended}. What was released decided that, so ε counts "
            f"{counted} rounds; {up(plan.epsilon(rounds))} would hold for {rounds} if that number had been fixed "
            "beforehand",
        )
    elif counted > rounds:
        what = "sums" if plan.mechanism.protocol else "rounds"
        yield (
            "counted",
            f"all {counted} {what} that were agreed on: how many there are is up to a server that nobody trusts; "
            f"{up(plan.epsilon(rounds))} would hold for {rounds} if that number had been fixed beforehand",
        )


def _not_covered(plan: Plan, counted: int, one_program: bool) -> Iterator[str]:
    m = plan.mechanism
    if counted < plan.rounds:
        yield (
            f"stopping here because of what was released: the ε of all {plan.rounds} rounds holds then, "
            f"{up(plan.epsilon(plan.rounds))}"
        )
    yield "figures marked not private (training loss, cohort sizes, left-out clients): do not publish them"
    further = "further" if plan.rounds_before else "other"
    yield f"{further} runs on the same clients, tuning included: their ε adds up (privacy.tuning_runs)"
    yield (
        "what is taken as public: the number of clients, of classes and of features, the starting model, the settings, "
        "the test set, unless it is held out of clients' data (its figures are then marked not private)"
    )
    if plan.settings_from_data:
        yield "the settings: they follow from constants computed from the clients' data, which no noise protects"
    if m.protocol:
        yield "clients that send what they should not: one of them can spoil a sum"
    if m.draws == "honest":
        yield "parties that leave the protocol, such as a server that chooses whom to ask"
    if m.trust == "secagg" and not m.protocol:
        yield SIMULATED
    elif m.trust != "central" and one_program:
        yield ONE_PROGRAM
    elif m.protocol:
        yield ASSUMED
    if m.grid is None:
        yield "the gaps between floating-point numbers, which seeded noise does nothing about"
    yield "the last digits of a message, which can depend on the clients computed beside it"
    if not m.secure:
        yield ("whoever knows the seed, or sees two runs with the same seed and stream: noise and cohorts follow from "
               'it; deploy with privacy.randomness = "secure"')  # fmt: skip
    if plan.delta * m.num_clients >= 1:
        yield f"a failure with probability δ = {plan.delta:g}: with {m.num_clients} clients it should be far smaller"


def _entry(name: str, text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14)
