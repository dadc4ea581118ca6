"""The engine: one round after another. Where the clients compute is their affair (clients.py)."""

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.algorithms.base import Algorithm, Server
from fednormec.bounds import STRIP, Adding
from fednormec.checking import require_keeps
from fednormec.clients import Clients, here, regroups, stretch_size
from fednormec.errors import BoundBroken, Diverged, UserError, at_least_one
from fednormec.local import Moment
from fednormec.memories import Remembered
from fednormec.participation import Cohort, Participation, full
from fednormec.privacy.mechanism import Plan, Privacy, plan
from fednormec.privacy.statement import Statement, state
from fednormec.problems.base import Metrics, Problem
from fednormec.profile import stage
from fednormec.randomness import generator
from fednormec.ray_engine import Ray, ray_clients, require_usable
from fednormec.vectors import norm_error, same_bits
from fednormec.workers import Pool, one_arithmetic_thread

if TYPE_CHECKING:
    from fednormec.checkpoint import Checkpoint


COUNTS = ("computed", "sent", "left_out")  # what a round's record says of its clients in any case
MISSED = "missed"  # and where clients can fail to answer
TYPICAL = 500  # examples of a client, where how many it has must decide nothing
Place = Callable[[Algorithm, Plan | None, Tensor], AbstractContextManager[Clients]]


class Round(NamedTuple):
    """What a simulation knows after a round. Only `released`, the (noisy) sum of messages, and what the server made of
    it have left the clients; the rest is diagnostics. `plan` says what the release cost, None without privacy;
    `releases` is how many there were so far, which can be more than rounds where a run was interrupted. For `in_vain`
    updates in a row, to the last, none was finite. `last`: no round follows. `missed` counts who was asked and did not
    answer, where that can be."""

    number: int
    server: Server
    memories: Remembered
    cohort: Cohort
    left_out: int
    in_vain: int
    metrics: Metrics | None
    released: Tensor
    plan: Plan | None
    releases: int
    last: bool = False
    missed: int | None = None

    @property
    def x(self) -> Tensor:
        return self.server.x

    @property
    def memory(self) -> Tensor:
        """The live block of all clients' memories: copy what is to be kept. Brought here where they lie elsewhere."""
        return self.memories.rows

    @property
    def computed(self) -> int:
        return len(self.cohort.computing)

    @property
    def sent(self) -> int:
        return int(self.cohort.sending.sum())

    @property
    def epsilon(self) -> float | None:
        """The ε spent so far, at the plan's δ; None without privacy."""
        return None if self.plan is None else self.plan.spent(self.releases)

    @property
    def statement(self) -> Statement | None:
        """What may be said if the run ends here; None without privacy. The number of rounds must not follow from what
        was released: for that, `train` has `stop_when`."""
        return None if self.plan is None else state(self.plan, self.releases, max(0, self.releases - self.number))


class Trained(NamedTuple):
    """The end of a training: the model, the rounds' figures, why it stopped early if it did (`diverged`, or what
    `stop_when` said in `stopped`), and what was kept private.

    A run that stops before its budget would be exceeded has fewer rounds in its history than were asked for.
    """

    model: Any
    x: Tensor
    history: list[dict[str, Any]]
    diverged: Diverged | None
    statement: Statement | None
    stopped: str | None = None


def _nothing(number: int, plan: Plan) -> None:
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
    workers: int | None = None,
    chunk_size: int | None = None,
    memories_in: Path | None = None,
    on: Ray | Place | None = None,
    before_release: Callable[[int, Plan], None] = _nothing,
    resume: "Checkpoint | None" = None,
    released: int | None = None,
) -> Generator[Round, None, None]:
    """Runs `rounds` rounds and yields each; the same seed gives the same bits whatever `workers`, `chunk_size`, `on`.

    With `privacy` the sum of each round gets its noise, and the rounds end before the one that would exceed the budget;
    `before_release(round, plan)` is called before anything of a round leaves the clients.
    x0 is where to start (default: problem.init). evaluate_every=n evaluates the model every n rounds and after the
    last; None never does. `workers` threads (default: torch.get_num_threads()) each take `chunk_size` clients at a
    time (default: one tile). The memory in a Round is the live block: copy what you want to keep. With
    `memories_in`, a folder, it lies in a file there, for more clients than the machine has memory.
    `on=Ray(...)` computes in `workers` processes of a Ray cluster instead; memories lie there, and a Round's memory is
    a copy that is brought here when it is asked for. Else `on` makes clients that are elsewhere, given the algorithm,
    the plan and x.
    With `resume`, a checkpoint of the same simulation, it goes on after that round, with the bits of one that was never
    interrupted (secure noise excepted). `released` is how many releases there were before (default: those that the
    checkpoint knows); with secure noise, rounds that are computed again come on top of them.
    Raises Diverged when the model is no longer finite, or (without privacy: it looks at clients' data) no client's loss
    or update is.
    """
    at_least_one("rounds", rounds)
    at_least_one("evaluate_every", 1 if evaluate_every is None else evaluate_every)
    participation = participation or full()
    if not algorithm.idle_clients_advance:
        participation = participation.asleep()
    participation.weights(problem.num_clients)  # says now if the rule does not fit the number of clients
    x = problem.init(generator(seed, "init"))
    agreed = None
    if privacy is not None:
        agreed = planned(problem, algorithm, participation, privacy, rounds)
        rounds = agreed.rounds
        require_keeps(algorithm, x)
    if x0 is not None:
        if x0.shape != x.shape or x0.dtype != x.dtype:
            raise UserError(f"x0 must be {len(x)} numbers in {x.dtype}, not of shape {tuple(x0.shape)} in {x0.dtype}.")
        x = x0.detach().to(x.device, copy=True)
    if memories_in is not None and x.device.type != "cpu":
        raise UserError(f"memories in a file are for the CPU, not for {x.device.type}: keep them in memory.")
    if resume is not None:
        _require_fit(resume, problem, algorithm, x, here=on is None or isinstance(on, Ray))
        if x0 is not None:
            raise UserError("a checkpoint has its own model: leave x0 out.")
    longest = math.inf if agreed is None else agreed.mechanism.radius
    adding = Adding(regroups(algorithm, participation, problem), longest)
    stretch = stretch_size(algorithm, participation, problem)
    clients: AbstractContextManager[Clients]
    if on is None:
        pool = pool_for(problem, workers, chunk_size)
        clients = here(problem, algorithm, pool, stretch, adding, x, memories_in)
    elif isinstance(on, Ray):
        pool_for(problem, workers, chunk_size)  # says so if they cannot be
        require_usable(on, x, memories_in)
        clients = ray_clients(on, problem, algorithm, workers, stretch, adding, x)
    else:
        clients = on(algorithm, agreed, x)
    before = (resume.facts.releases if resume is not None else 0) if released is None else released
    return _rounds(
        problem, algorithm, participation, clients, agreed, rounds, seed, x, evaluate_every, before_release, resume,
        before,
    )  # fmt: skip


def pool_for(problem: Problem, workers: int | None, chunk_size: int | None) -> Pool:
    """By default a worker for each of torch's threads, and a tile at a time."""
    return Pool(
        min(at_least_one("workers", torch.get_num_threads() if workers is None else workers), problem.num_clients),
        at_least_one("chunk_size", problem.tile if chunk_size is None else chunk_size),
    )


def planned(
    problem: Problem, algorithm: Algorithm, participation: Participation, privacy: Privacy, rounds: int
) -> Plan:
    """What `simulate` will do to keep to `privacy`; says so if it cannot be kept."""
    require_bounded(algorithm)
    x, width = problem.init(generator(0, "init")), algorithm.message_slots * problem.dim
    exactly = regroups(algorithm, participation, problem)
    rounding = _summing_error(problem.num_clients, x.dtype, exactly) + norm_error(x.new_empty(0, width))
    return plan(privacy, problem.num_clients, participation, algorithm.bound.radius, width, rounds, rounding)


def train(
    problem: Problem,
    algorithm: Algorithm,
    participation: Participation | None = None,
    privacy: Privacy | None = None,
    *,
    rounds: int,
    seed: int = 0,
    x0: Tensor | None = None,
    evaluate_every: int | None = None,
    workers: int | None = None,
    chunk_size: int | None = None,
    memories_in: Path | None = None,
    on: Ray | Place | None = None,
    on_round: Callable[[Round], None] = lambda r: None,
    stop_when: Callable[[dict[str, Any]], str | None] = lambda public: None,
) -> Trained:
    """`simulate` to its end: the last finite model and the history, one record a round (see `record`).

    `evaluation_interval` says how often the model is evaluated, unless `evaluate_every` does. A divergence ends it
    without raising. `on_round` hears each round. `stop_when` may end the run after a round: it gets the public part of
    the round's record, nothing that looks at clients' data, and returns why to stop, or None to go on. The statement
    then says that the run was stopped and why, and its ε is that of all rounds, since what was released decided.

    >>> import fednormec as fn
    >>> problem, method = fn.random_quadratic(50, 3), fn.dp_fed_avg_clip(fn.gd(0.1))
    >>> done = train(problem, method, privacy=fn.Privacy(epsilon=4.0), rounds=9,
    ...              stop_when=lambda public: "ε above 1" if public["epsilon"] > 1 else None)
    >>> len(done.history) < 9, done.stopped, done.statement.facts["rounds_counted"]
    (True, 'ε above 1', 9)
    """
    every = evaluate_every
    if every is None:
        every = evaluation_interval(problem, algorithm, participation or full(), rounds, privacy is not None)
    x, history, diverged, statement, stopped = x0, [], None, None, None
    spent: list[Plan] = []
    simulation = simulate(
        problem, algorithm, participation, privacy, rounds=rounds, seed=seed, x0=x0, evaluate_every=every,
        workers=workers, chunk_size=chunk_size, memories_in=memories_in, on=on,
        before_release=lambda number, plan: spent.append(plan),
    )  # fmt: skip
    try:
        for r in simulation:
            x = r.x
            history.append(record(r))
            on_round(r)
            stopped = None if r.last else stop_when({k: v for k, v in history[-1].items() if k != "not_private"})
            if stopped is not None:
                simulation.close()
    except Diverged as end:
        diverged = end
    x = problem.init(generator(seed, "init")) if x is None else x
    if spent:
        why = str(diverged) if diverged is not None else None if stopped is None else f"stopped on request: {stopped}"
        statement = state(spent[-1], len(spent), ended=why)
    return Trained(problem.model(x), x, history, diverged, statement, stopped)


def evaluation_interval(
    problem: Problem, algorithm: Algorithm, participation: Participation, rounds: int, private: bool = False
) -> int:
    """How often to evaluate by default: 20 to 39 points of a curve, or fewer where that would take more than about 5 %
    of the time, but five points whatever they take.

    An evaluation looks at all clients' examples, which takes about half of their gradients' time, and at a test set:
    let that be 0.7 of it altogether. In a `private` run how many examples a client has decides nothing: each counts as
    if it had 500.
    """
    sizes, counts = np.unique(problem.client_sizes, return_counts=True)
    if private:
        sizes, counts = np.array([TYPICAL]), np.array([problem.num_clients])
    a_round: float = sum(int(count) * algorithm.local.visits(int(n)) for n, count in zip(sizes, counts, strict=True))
    if participation.idle == "sleep" or not algorithm.idle_clients_advance:
        a_round *= participation.rate(problem.num_clients)
    affordable = 0.7 / 0.05 * float(sizes @ counts) / max(a_round, 1.0)
    return max(1, rounds // 20, min(math.ceil(affordable), rounds // 5))


def record(r: Round, measured: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A round's figures, those that look at clients' data or at who took part under "not_private", `measured` too."""
    public, private = r.metrics or Metrics({}, {})
    private = dict(measured or {}) | private
    counts = dict(zip(COUNTS, (r.computed, r.sent, r.left_out), strict=True))
    if r.missed is not None:
        counts[MISSED] = r.missed
    spent = {} if r.plan is None else {"epsilon": r.epsilon, "delta": r.plan.delta, **r.plan.label}
    return {"round": r.number, **spent, **public, "not_private": {**private, **counts}}


def _rounds(
    problem: Problem,
    algorithm: Algorithm,
    participation: Participation,
    all_clients: AbstractContextManager[Clients],
    agreed: Plan | None,
    rounds: int,
    seed: int,
    x: Tensor,
    evaluate_every: int | None,
    before_release: Callable[[int, Plan], None],
    resume: "Checkpoint | None",
    releases: int,
) -> Generator[Round, None, None]:
    m, weights = problem.num_clients, participation.weights(problem.num_clients)
    server, done, in_vain = algorithm.init(x), 0, 0
    if resume is not None:
        done, in_vain = resume.facts.round, resume.facts.in_vain
        server = Server(resume.server.x.to(x.device), resume.server.memory.to(x.device), done)
    last = rounds
    if agreed is not None and agreed.budget is not None:  # one release a round, and no more than it pays for
        last = min(rounds, done + agreed.rounds - releases)
    with all_clients as clients:
        if resume is not None:
            resume.fill(clients.memories)
        elif algorithm.prime is not None:
            everyone = full().draw(m, generator(seed, "cohort", 0))
            first = clients.exchange(server, everyone, Moment(seed, 0), prime=True)
            server = algorithm.prime.server(server, (first.total / m).to(x.dtype), full().weights(m))
        for number in range(done + 1, last + 1):
            clients.ready()
            if agreed is None:
                cohort = participation.draw(m, generator(seed, "cohort", number))
            else:
                cohort = agreed.mechanism.cohort(seed, number)
            with one_arithmetic_thread():
                if agreed is not None and clients.noisy:  # what they send is the release
                    before_release(number, agreed)
                told = None if agreed is None else (server.x.clone(), server.memory.clone())
                total, left_out, answered, missed = clients.exchange(server, cohort, Moment(seed, number))
                if told is not None and not (same_bits(server.x, told[0]) and same_bits(server.memory, told[1])):
                    raise BoundBroken(f"{algorithm.name} or the model wrote into the server's state from a client, "
                                      "beside the messages. Nothing of this round was released.")  # fmt: skip
                cohort = cohort if answered is None else answered
                if agreed is not None and not clients.noisy:
                    with stage("noise"):
                        draw = agreed.mechanism.noise(len(total), int(cohort.sending.sum()), seed, number)
                        total += torch.as_tensor(draw, device=x.device)
                    with stage("disk"):
                        before_release(number, agreed)
                with stage("server"):
                    server = algorithm.server(server, (total / m).to(x.dtype), weights)
                    finite = bool(server.x.isfinite().all())
            if not finite:
                raise Diverged(number, "its parameters are no longer finite; smaller steps may help")
            in_vain = in_vain + left_out if left_out == len(cohort.computing) else 0
            if agreed is None and in_vain >= m:  # as many updates as there are clients, and none of them finite
                raise Diverged(number, "no client's update is finite any more; smaller local steps may help")
            due = evaluate_every is not None and (number % evaluate_every == 0 or number == last)
            with stage("evaluation"):
                metrics = problem.evaluate(server.x) if due else None
            if agreed is None and metrics is not None and math.isnan(metrics.not_private.get("train_loss", 0.0)):
                raise Diverged(number, "no client's loss is finite any more; smaller steps may help")
            releases += agreed is not None
            yield Round(
                number, server, clients.memories, cohort, left_out, in_vain, metrics, total, agreed, releases,
                number == last, missed,
            )  # fmt: skip


def _require_fit(checkpoint: "Checkpoint", problem: Problem, algorithm: Algorithm, x: Tensor, here: bool) -> None:
    """Says so if a checkpoint is of something else. What is remembered of clients that are not here is their place's
    affair."""
    like, server = algorithm.init(x), checkpoint.server
    rows = (problem.num_clients, algorithm.memory_slots * problem.dim) if here else checkpoint.shape
    pairs = ((server.x, like.x), (server.memory, like.memory))
    if checkpoint.shape != rows or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        raise UserError(f"{checkpoint.path} is of another run: its model has {len(server.x)} parameters and its "
                        f"clients' memories the shape {checkpoint.shape}; here it is {len(x)} and {rows}.")  # fmt: skip


def require_bounded(algorithm: Algorithm) -> None:
    """Says so where no noise can make a method private."""
    if math.isinf(algorithm.bound.radius):
        raise UserError(
            f"{algorithm.name} does not bound what a client sends, so no noise can make it private: "
            "choose a method with clipping or normalisation, or run without noise."
        )
    if algorithm.prime is not None:
        raise UserError(
            "initial_memory = 'local_updates' publishes the clients' exact updates, and no later noise mends that: "
            "start from zero (warmup_rounds lets the memories catch up), or run without noise."
        )


def _summing_error(num_clients: int, dtype: torch.dtype, exactly: bool) -> float:
    """By how much one client's message can move the computed sum beyond its own length, relative to the radius.

    Adding n numbers errs by at most n units in the last place of the sum of their magnitudes, with and without the
    client: a strip of messages in the model's dtype, all strips' sums (or, `exactly`, everything) in float64. That
    holds in any order, however the clients are cut into tiles: tiles can follow from how many examples clients have.
    """
    together = min(STRIP, num_clients)
    within = 0.0 if exactly else together**2 * torch.finfo(dtype).eps
    return within + num_clients**2 * torch.finfo(torch.float64).eps
