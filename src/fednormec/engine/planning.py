"""Decisions before the first round: the plan that keeps to a budget, and how often to evaluate."""

import math
from dataclasses import replace

import numpy as np
import torch

from fednormec.core.algorithm import Algorithm
from fednormec.core.bounds import STRIP
from fednormec.core.participation import Participation, Weights
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.core.records import Grouped, Named, Recorded, record_sizes
from fednormec.core.vectors import norm_error
from fednormec.engine.clients import regroups
from fednormec.errors import UserError
from fednormec.privacy.asked import Privacy
from fednormec.privacy.mechanism import Plan, plan
from fednormec.privacy.records import PERSON, ROW, AnyPlan, RecordPlan, Silos, for_records, plan_records

TYPICAL = 500  # number of a client's examples, where the true number must decide nothing


def planned(
    problem: Problem, algorithm: Algorithm, participation: Participation, privacy: Privacy, rounds: int
) -> AnyPlan:
    """Returns the plan by which `simulate` keeps to `privacy`; raises UserError if it cannot be kept."""
    records = planned_for_records(problem, algorithm, privacy, rounds) if privacy.for_records else None
    if records is not None and not privacy.for_clients:
        return records
    clients = planned_for_clients(problem, algorithm, participation, privacy, rounds)
    if records is None:
        return clients
    least = min(clients.rounds, records.rounds)
    return replace(clients, rounds=least, records=replace(records, rounds=least))


def planned_for_records(problem: Problem, algorithm: Algorithm, privacy: Privacy, rounds: int) -> RecordPlan:
    """Returns the plan by which each client protects its records; raises UserError if it cannot be kept."""
    rule = algorithm.local.per_record
    if rule is None:
        raise UserError(f"with unit = 'record' local steps must bound what they take of each record, and "
                        f"{algorithm.local.name} does not: take local.name = 'dp_sgd', and a method with local steps, "
                        "such as fed_avg, fed_normec or scaffold.")  # fmt: skip
    if algorithm.prime is not None:
        raise UserError("initial_memory = 'local_updates' computes one more round than is counted: start from zero.")
    if isinstance(problem, Recorded):
        problem.require_records()
    sizes, x = record_sizes(problem), problem.init(generator(0, "init"))
    there = np.flatnonzero(sizes).tolist()  # in a federation nobody knows how many records others have
    called = problem.client_names if isinstance(problem, Named) else None
    names = [f"client {number}" if called is None else called[number] for number in there]
    record = PERSON if isinstance(problem, Grouped) and problem.grouped else ROW
    silos = Silos(sizes[there].tolist(), there, names, len(sizes), problem.dim, x.dtype, record)
    return plan_records(privacy, silos, rule, rounds)


def with_record_noise(algorithm: Algorithm, plan: AnyPlan) -> Algorithm:
    """Returns the method with local steps that add the noise which protects records, if the plan has any."""
    records, rule = for_records(plan), algorithm.local.per_record
    if records is None:
        return algorithm
    assert rule is not None
    return algorithm._replace(local=rule.noised(records))


def planned_for_clients(
    problem: Problem, algorithm: Algorithm, participation: Participation, privacy: Privacy, rounds: int
) -> Plan:
    """Returns the plan by which clients are protected; raises UserError if it cannot be kept."""
    require_bounded(algorithm)
    participation = algorithm.rule(participation)
    x, width = problem.init(generator(0, "init")), algorithm.message_width(problem.dim)
    exactly = regroups(participation, problem)
    rounding = summing_error(problem.num_clients, x.dtype, exactly) + norm_error(x.new_empty(0, width))
    found = plan(privacy, problem.num_clients, participation, algorithm.bound.radius, width, rounds, rounding)
    return replace(found, remembers=_remembers(algorithm, x, width), extras=algorithm.extras)


def _remembers(algorithm: Algorithm, x: torch.Tensor, width: int) -> bool:
    """Returns whether a round's mean, noise included, is in the next direction, or in what corrects clients."""
    if algorithm.correction is not None:
        return True
    weights = Weights(1.0, 1.0)
    after = algorithm.advance(algorithm.start(x), x.new_full((width,), 1 / math.sqrt(width)), weights)
    return bool(algorithm.server(after, x.new_zeros(width), weights).direction.any())


def evaluation_interval(
    problem: Problem, algorithm: Algorithm, participation: Participation, rounds: int, private: bool = False
) -> int:
    """Returns the number of rounds between evaluations, by default.

    It gives 20 to 39 points of a curve, or fewer where that would take more than about 5 % of the time, but five points
    whatever they take. An evaluation looks at all clients' examples, which takes about half of their gradients' time,
    and at a test set: let that be 0.7 of it altogether. In a `private` run the number of a client's examples decides
    nothing: each client counts as if it had 500.
    """
    sizes, counts = np.unique(problem.client_sizes, return_counts=True)
    if private:
        sizes, counts = np.array([TYPICAL]), np.array([problem.num_clients])
    a_round: float = sum(int(count) * algorithm.local.visits(int(n)) for n, count in zip(sizes, counts, strict=True))
    if algorithm.rule(participation).idle == "sleep":
        a_round *= participation.rate(problem.num_clients)
    affordable = 0.7 / 0.05 * float(sizes @ counts) / max(a_round, 1.0)
    return max(1, rounds // 20, min(math.ceil(affordable), rounds // 5))


def require_bounded(algorithm: Algorithm) -> None:
    """Raises UserError if no noise can make the method private."""
    if math.isinf(algorithm.bound.radius):
        raise UserError(
            f"{algorithm.name} does not bound what a client sends, so no noise can make it private: "
            "choose a method with clipping or normalisation, protect records instead (privacy.unit = 'record'), or run "
            "without noise."
        )
    if algorithm.prime is not None:
        raise UserError(
            "initial_memory = 'local_updates' publishes the clients' exact updates, and no later noise mends that: "
            "start from zero (warmup_rounds lets the memories catch up), or run without noise."
        )


def summing_error(num_clients: int, dtype: torch.dtype, exactly: bool) -> float:
    """Bounds how far one client's message can move the computed sum beyond its own length, relative to the radius.

    Adding n numbers errs by at most n units in the last place of the sum of their magnitudes, with and without the
    client: a strip of messages in the model's dtype, all strips' sums (or, `exactly`, everything) in float64. That
    holds in any order, however the clients are cut into tiles: tiles can follow from how many examples clients have.
    """
    together = min(STRIP, num_clients)
    within = 0.0 if exactly else together**2 * torch.finfo(dtype).eps
    return within + num_clients**2 * torch.finfo(torch.float64).eps
