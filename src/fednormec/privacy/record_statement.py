"""Statement of what may be claimed for single records, as entries of a text and as data."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from fednormec.privacy.asked import SILO
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.privacy.outlook import outlook
from fednormec.privacy.records import PERSON, RecordPlan, Silo

ADJACENCY = {
    "zero_out": "the record stays counted and enters no gradient",
    "replace_one": "the record is any other one",
}
TRUST = (
    "each client guards its own records: it draws its batches and adds its noise itself. Nobody else is trusted: not "
    "the server, not another client, not whoever sees messages or models"
)
FEW = 8  # silos that are listed one by one
LARGE = 20.0  # e^20 is half a billion: from here on a statement says so


class Said(NamedTuple):
    """What may be claimed, in parts.

    Attributes:
        epsilon: ε of the silo with the largest.
        claim: the claim itself, in a line.
        entries: what it rests on and what it leaves open, by name.
        facts: all of it as data.
    """

    epsilon: float
    claim: str
    entries: tuple[tuple[str, str], ...]
    facts: dict[str, Any]


def said_of(plan: RecordPlan, rounds: int, again: int = 0, ended: str | None = None, whole: bool = False) -> Said:
    """Returns what may be claimed for each record after `rounds` rounds.

    Args:
        plan: what the run kept to.
        rounds: number of rounds that were paid for; a client counts in each of them, whoever was drawn.
        again: number of them that were of rounds that were interrupted and then drawn again.
        ended: why the run ended before its rounds, where something that was released decided that.
        whole: whether all rounds that were planned count, since a server that nobody trusts decides how many there are.
    """
    counted = (
        rounds if ended is None and not whole else max(rounds, plan.rounds + (again if plan.budgets is None else 0))
    )
    epsilon = plan.epsilon(counted)
    second = plan.epsilon(counted, "rdp") if plan.silos else math.inf
    entries = (*_grounds(plan, rounds, again, counted, second), *_early(plan, rounds, counted, ended),
               *(("not covered", text) for text in _not_covered(plan, counted)))  # fmt: skip
    facts: dict[str, Any] = {
        "private": math.isfinite(epsilon),
        "epsilon": epsilon,
        "delta": plan.delta,
        "accountant": "pld",
        "epsilon_rdp": second if math.isfinite(second) else None,
        "unit": "record",
        "record": plan.record,
        "adjacency": plan.adjacency,
        "trust": SILO,
        "noise_std": max((silo.sum.noise_std for silo in plan.silos), default=None),
        "radius": plan.tau,
        "noise_to_signal": outlook(plan).facts,
        "clients": plan.num_silos,
        "steps": plan.steps,
        "silos": [_facts(silo, plan, counted) for silo in plan.silos],
        "noise": "discrete" if plan.discrete else "continuous",
        "rounds": rounds,
        "rounds_drawn_again": again,
        "rounds_counted": counted,
        "rounds_planned": plan.planned,
        "rounds_of_runs_before": plan.rounds_before,
        "budget": plan.budget,
        "randomness": "secure" if plan.secure else "seeded",
        "settings_from_data": plan.settings_from_data,
        "ended": ended,
    }
    return Said(epsilon, _claim(plan, epsilon), entries, facts)


def _claim(plan: RecordPlan, epsilon: float) -> str:
    if math.isinf(epsilon):
        return f"{NOT_PRIVATE}: no finite ε holds for a record at δ = {plan.delta:g}"
    weak = f"; an ε above {LARGE:g} promises next to nothing" if epsilon > LARGE else ""
    return f"ε ≤ {up(epsilon)} at δ = {plan.delta:g} for each record ({SILO}, {plan.adjacency}){weak}"


def _facts(silo: Silo, plan: RecordPlan, counted: int) -> dict[str, Any]:
    return {
        "client": silo.number,
        "name": silo.name,
        "records": silo.records,
        "rate": silo.rate,
        "noise_std": silo.sum.noise_std,
        "radius": silo.sum.radius,
        "noise_added_for_rounding": silo.sum.rounding,
        "unit_of_grid": None if silo.sum.grid is None else silo.sum.grid.unit,
        "unlike": silo.sum.release().unlike,
        "releases": (plan.rounds_before + counted) * plan.steps,
        "epsilon": silo.epsilon(plan.rounds_before + counted, plan.delta),
        "budget": None if plan.budgets is None else plan.budgets[silo.number],
    }


def _grounds(plan: RecordPlan, rounds: int, again: int, counted: int, second: float) -> Iterator[tuple[str, str]]:
    yield "unit", f"{plan.record}; neighbours: {ADJACENCY[plan.adjacency]}"
    yield "trust", TRUST
    repeated = f" ({again} of the rounds were interrupted and drawn again)" if again else ""
    where = "here" if 0 < len(plan.silos) < plan.num_silos else "in each client"
    yield (
        "released",
        f"{where} {rounds} rounds of {plan.steps} local steps, {rounds * plan.steps:,} noisy sums of bounded "
        f"gradients, and all that follows from them: messages, models, memories, control variates{repeated}",
    )
    kind = "discrete Gaussian on a grid" if plan.discrete else "Gaussian"
    yield "noise", f"{kind}, on every coordinate of each sum; below as std over the largest norm, {plan.tau:g}"
    yield "sampling", "in each step each record independently, with the rate below"
    for text in _listed(plan, counted):
        yield "clients", text
    if plan.rounds_before:
        yield "tuning", f"{plan.rounds_before} rounds of other runs on the same records are included in ε"
    opinion = f"; Rényi accounting says {up(second)}" if math.isfinite(second) else ""
    yield "accounting", f"privacy loss distribution of every step of every round, rounded up{opinion}"


def _listed(plan: RecordPlan, counted: int) -> Iterator[str]:
    def figures(silo: Silo) -> str:
        epsilon = silo.epsilon(plan.rounds_before + counted, plan.delta)
        return (
            f"{silo.records:,} records, rate {silo.rate:.4g}, noise {silo.sum.noise_std:.5g}, ε ≤ {up(epsilon)}"
        )  # fmt: skip

    if not plan.silos:
        targets = plan.budgets or ()
        same = len(set(targets)) == 1
        yield (
            f"{plan.num_silos} of them, whose records nobody else counts: each calibrates its noise for its own number "
            f"of records, so that it keeps to {f'ε = {targets[0]:g}' if same else 'its own ε'}"
        )
    elif len(plan.silos) <= FEW:
        yield from (f"{silo.name}: {figures(silo)}" for silo in plan.silos)
    else:
        sizes = sorted(plan.silos, key=lambda silo: silo.records)
        yield f"{len(plan.silos)} of them; the smallest: {figures(sizes[0])}; the largest: {figures(sizes[-1])}"


def _early(plan: RecordPlan, rounds: int, counted: int, ended: str | None) -> Iterator[tuple[str, str]]:
    if ended is not None:
        yield (
            "ended",
            f"after {rounds} of {plan.rounds} rounds: {ended}. What was released decided that, so ε counts {counted} "
            f"rounds; {up(plan.epsilon(rounds))} would hold for {rounds} if that number had been fixed beforehand",
        )
    elif counted > rounds:
        yield (
            "counted",
            f"all {counted} rounds that were agreed on: how many there are is up to a server that nobody trusts"
            + (f"; {up(plan.epsilon(rounds))} would hold for {rounds} if that number had been fixed beforehand"
               if plan.silos else ""),
        )  # fmt: skip


def _not_covered(plan: RecordPlan, counted: int) -> Iterator[str]:
    if counted < plan.rounds:
        yield (
            f"stopping here because of what was released: the ε of all {plan.rounds} rounds holds then, "
            f"{up(plan.epsilon(plan.rounds))}"
        )
    yield "what the client itself knows, and whoever runs the program on its machine: they have the records"
    if plan.record == PERSON:
        yield "a person whose rows are with several clients: the ε of each of them adds up"
    else:
        yield (
            "a person with several rows: the ε of one row does not hold for all of them together. Say who is who "
            "(data.person) where that matters"
        )
    yield "figures marked not private (training loss, left-out clients): do not publish them"
    yield "other runs on the same records, tuning included: their ε adds up (privacy.tuning_runs)"
    yield (
        "what is taken as public: the number of records of each client, of classes and of features, how columns were "
        "scaled, the largest norm of a gradient, the starting model, the settings, and the test set, unless it is "
        "held out of clients' data (its figures are then marked not private)"
    )
    if plan.settings_from_data:
        yield "the settings: they follow from constants computed from the clients' data, which no noise protects"
    if not plan.discrete:
        yield "the gaps between floating-point numbers, which seeded noise does nothing about"
    if not plan.secure:
        yield ("whoever knows the seed, or sees two runs with the same seed and stream: noise and batches follow from "
               'it; deploy with privacy.randomness = "secure"')  # fmt: skip
    yield "how long a step takes"
    if not plan.alone:
        yield (
            "the last digits of a gradient, which can depend on the records computed beside it: a server that makes up "
            'models can make much of them. With privacy.randomness = "secure" each is computed by itself'
        )
    small = [silo for silo in plan.silos if plan.delta * silo.records >= 1]
    if small:
        most = max(silo.records for silo in small)
        yield (
            f"a failure with probability δ = {plan.delta:g}: with {most:,} records in a client it should be far smaller"
        )
