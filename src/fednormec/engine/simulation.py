"""Engine: one round after another. Where the clients compute is a value, the `Place`."""

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Server
from fednormec.core.local import Moment
from fednormec.core.machine import one_arithmetic_thread
from fednormec.core.participation import Cohort, Participation, full
from fednormec.core.personal import Personal
from fednormec.core.problem import Metrics, Problem
from fednormec.core.randomness import generator
from fednormec.core.stages import stage
from fednormec.core.vectors import same_bits
from fednormec.engine.checking import require_keeps
from fednormec.engine.clients import Clients, Job, Paying, Place
from fednormec.engine.figures import AVERAGED, CLIENT, OWN
from fednormec.engine.planning import planned, with_record_noise
from fednormec.engine.round import Resumed, Round, Saved
from fednormec.engine.threads import Threads
from fednormec.errors import BoundBroken, Diverged, UserError, at_least_one
from fednormec.privacy.asked import Privacy
from fednormec.privacy.records import AnyPlan, for_clients, for_records


def _nothing(number: int, plan: AnyPlan) -> None:
    pass


def simulate(
    problem: Problem,
    algorithm: Algorithm,
    participation: Participation | None = None,
    privacy: Privacy | None = None,
    *,
    rounds: int,
    seed: int = 0,
    x0: Tensor | None = None,
    evaluate_every: int | None = None,
    on: Place | None = None,
    before_release: Callable[[int, AnyPlan], None] = _nothing,
    resume: Resumed | None = None,
) -> Generator[Round, None, None]:
    """Runs `rounds` rounds and yields each; the same seed gives the same bits wherever clients compute.

    Args:
        problem: what is minimised, f_1, ..., f_M.
        algorithm: the method, with its local update and its bound.
        participation: who takes part in a round; by default everybody.
        privacy: what is kept private. The sum of each round gets its noise, and the rounds end before the one that
            would exceed the budget. None: no noise.
        rounds: number of rounds.
        seed: seed of all randomness but secure noise.
        x0: where to start; by default problem.init.
        evaluate_every: number of rounds between evaluations of the model, which is also evaluated after the last;
            None: never.
        on: where clients compute, such as Threads(workers=8) or Ray("10.0.0.1:6379"); by default on threads. A Round's
            memories lie there: copy what you want to keep.
        before_release: called with the round and the plan before anything of a private round is released.
        resume: state of the same simulation to resume from. The bits are then those of one that was never interrupted
            (secure noise excepted).

    Raises:
        UserError: if something does not fit together; before the first round.
        Diverged: if the model is no longer finite, or (without privacy: it looks at clients' data) no client's loss or
            update is.
    """
    at_least_one("rounds", rounds)
    at_least_one("evaluate_every", 1 if evaluate_every is None else evaluate_every)
    rule = algorithm.rule(participation or full())
    rule.weights(problem.num_clients)  # raises UserError now if the rule does not fit the number of clients
    x, plan = problem.init(generator(seed, "init")), None
    if privacy is not None:
        plan = planned(problem, algorithm, rule, privacy, rounds)
        rounds, algorithm = plan.rounds, with_record_noise(algorithm, plan)
    if (clients := for_clients(plan)) is not None:
        algorithm = algorithm.on_grid(clients.mechanism.grid)
        require_keeps(algorithm, x)
    job, place = Job(problem, algorithm, rule, plan, seed, _starting_point(x, x0)), Threads() if on is None else on
    if resume is not None and resume.saved is not None:
        _require_fit(resume.saved, job)
        if x0 is not None:
            raise UserError("a checkpoint has its own model: leave x0 out.")
    place.check(job)
    return _rounds(job, place, rounds, evaluate_every, before_release, resume or Resumed(None))


class _Released(NamedTuple):
    """Sum that left the clients in a round, and who took part."""

    total: Tensor
    cohort: Cohort
    left_out: int
    missed: int | None
    releases: int


def _rounds(
    job: Job,
    place: Place,
    rounds: int,
    evaluate_every: int | None,
    before_release: Callable[[int, AnyPlan], None],
    resume: Resumed,
) -> Generator[Round, None, None]:
    server, budget = job.algorithm.start(job.x), math.inf
    done, in_vain, releases = resume.round, resume.in_vain, resume.spent
    m, least = job.problem.num_clients, 1
    plans = (job.plan, for_records(job.plan))
    if job.protocol or any(plan is not None and plan.budget is not None for plan in plans):
        assert job.plan is not None
        budget = job.plan.rounds  # with the protocol clients agreed to no more messages than there are rounds
    if job.mechanism is not None:
        least = job.mechanism.least_cohort
    weights = job.participation.weights(m, least)
    if job.mechanism is not None:
        weights = weights._replace(noise=job.mechanism.variance / m**2)
    with place.clients(job) as clients:
        if resume.saved is not None:
            server = _restored(resume.saved, clients, job.x.device)
        elif job.algorithm.prime is not None:
            server = _primed(job, job.algorithm.prime, clients, server)
        for number in range(done + 1, rounds + 1):
            if releases >= budget:  # a round is one release, or more where it takes several attempts
                return
            clients.ready()
            with one_arithmetic_thread():
                pay = (lambda: None) if job.plan is None else partial(before_release, number, job.plan)
                paying = Paying(pay, budget - releases)
                total, cohort, left_out, missed, paid = _released(job, clients, server, number, paying)
                releases += paid
                last = number == rounds or releases >= budget
                with stage("server"):
                    server = job.algorithm.advance(server, (total / m).to(job.x.dtype), weights)
                    finite = bool(server.x.isfinite().all())
                    x, average = job.algorithm.model(server), job.algorithm.average(server)
            if not finite:
                raise Diverged(number, "its parameters are no longer finite; smaller steps may help")
            in_vain = in_vain + left_out if left_out == len(cohort.computing) else 0
            if job.plan is None and in_vain >= m:  # as many updates as there are clients, and none of them finite
                raise Diverged(number, "no client's update is finite any more; smaller local steps may help")
            due = evaluate_every is not None and (number % evaluate_every == 0 or last)
            metrics = _evaluated(job, server, clients, x, average) if due else None
            yield Round(
                number, server, clients.memories, cohort, left_out, in_vain, metrics, total, job.plan, releases,
                last, missed, x, average,
            )  # fmt: skip


def _released(job: Job, clients: Clients, server: Server, number: int, paying: Paying) -> _Released:
    """Returns what the clients send in a round, with its noise, which is paid for before any of it leaves them."""
    m, mechanism = job.problem.num_clients, job.mechanism
    if mechanism is None:
        cohort = job.participation.draw(m, generator(job.seed, "cohort", number))
        total, left_out, answered, missed = clients.exchange(server, cohort, Moment(job.seed, number), paying=paying)
        if job.plan is not None:
            with stage("disk"):
                paying.pay()
        return _Released(total, cohort if answered is None else answered, left_out, missed, paying.paid)
    cohort = mechanism.cohort(job.seed, number)
    own = mechanism.protocol or mechanism.trust == "local"  # whether clients may add noise of their own
    if (clients.noisy and not own) or (mechanism.protocol and not clients.noisy):
        raise UserError("clients add noise of their own only with trust = 'local', or where secure aggregation runs: "
                        f"not with trust = '{mechanism.trust}' here.")  # fmt: skip
    told = [part.clone() for part in (server.x, server.memory, server.optimizer)]
    total, left_out, answered, missed = clients.exchange(server, cohort, Moment(job.seed, number), paying=paying)
    if not all(map(same_bits, (server.x, server.memory, server.optimizer), told)):
        raise BoundBroken(f"{job.algorithm.name} or the model wrote into the server's state from a client, beside the "
                          "messages. Nothing of this round was released.")  # fmt: skip
    cohort = cohort if answered is None else answered
    if not clients.noisy:
        with stage("noise"):
            draw = mechanism.noise(len(total), int(cohort.sending.sum()), job.seed, number)
            total += torch.as_tensor(draw, device=job.x.device)
        with stage("disk"):
            paying.pay()
    return _Released(total, cohort, left_out, missed, paying.paid)


def _evaluated(job: Job, server: Server, clients: Clients, x: Tensor, average: Tensor | None) -> Metrics:
    """Returns the model's figures, and those of the average and of clients' own models beside them.

    Raises Diverged if no client's loss is finite, where that may be looked at.
    """
    with stage("evaluation"):
        metrics = job.problem.evaluate(x)
        if average is not None:
            metrics = metrics.beside(job.problem.evaluate(average), AVERAGED)
        metrics = metrics._replace(not_private=metrics.not_private | _of_own_models(job, server, clients))
    if job.plan is None and math.isnan(metrics.not_private.get("train_loss", 0.0)):
        raise Diverged(server.round, "no client's loss is finite any more; smaller steps may help")
    return metrics


def _of_own_models(job: Job, server: Server, clients: Clients) -> dict[str, float]:
    """Returns figures of the clients' own models on their own examples; none where they have the server's."""
    own, problem = job.algorithm.own, job.problem
    if own is None or not isinstance(problem, Personal):
        return {}
    found = problem.evaluate_own(own(server, clients.memories.rows)).figures
    return {f"{OWN}{name.removeprefix(CLIENT)}": value for name, value in found.items()}


def _primed(job: Job, prime: Algorithm, clients: Clients, server: Server) -> Server:
    """Returns the server after the exact round before the first, which fills the memories."""
    m = job.problem.num_clients
    everyone = full().draw(m, generator(job.seed, "cohort", 0))
    first = clients.exchange(server, everyone, Moment(job.seed, 0), prime=True)
    return server._replace(memory=prime.server(server, (first.total / m).to(job.x.dtype), full().weights(m)).memory)


def _restored(saved: Saved, clients: Clients, device: torch.device) -> Server:
    """Returns the server as it was saved, and gives the clients their memories back."""
    saved.fill(clients.memories)
    x, memory, _, optimizer = saved.server
    return Server(x.to(device), memory.to(device), saved.round, optimizer.to(device))


def _starting_point(x: Tensor, x0: Tensor | None) -> Tensor:
    """Returns x0, or x if it is None; raises UserError if x0 is no model of this problem."""
    if x0 is None:
        return x
    if x0.shape != x.shape or x0.dtype != x.dtype:
        raise UserError(f"x0 must be {len(x)} numbers in {x.dtype}, not of shape {tuple(x0.shape)} in {x0.dtype}.")
    return x0.detach().to(x.device, copy=True)


def _require_fit(saved: Saved, job: Job) -> None:
    """Raises UserError if a checkpoint is of another model or method."""
    like, server = job.algorithm.start(job.x), saved.server
    pairs = ((server.x, like.x), (server.memory, like.memory), (server.optimizer, like.optimizer))
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        sizes, wanted = (", ".join(f"{len(part)}" for part in pair) for pair in zip(*pairs, strict=True))
        raise UserError(f"{saved.path} is of another run: its model, its server's memory and its optimiser's have "
                        f"{sizes} numbers; here it is {wanted}.")  # fmt: skip
