"""Plays of an audit through the engine: an attack, messages of a client alone, long runs of nothing but noise."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.algorithms.adaptive import MOST
from fednormec.algorithms.methods import dp_fed_avg_clip
from fednormec.audit.canaries import nothing_for, signs, with_canaries
from fednormec.core.algorithm import Algorithm
from fednormec.core.local import LocalUpdate, Moment, gd
from fednormec.core.participation import full, poisson
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.engine.round import Round
from fednormec.engine.simulation import simulate
from fednormec.engine.threads import Threads
from fednormec.engine.together import STAGES as STAGE_NAMES
from fednormec.engine.together import Together
from fednormec.errors import UserError
from fednormec.privacy.asked import Privacy
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import for_clients
from fednormec.problems.silence import Silence

FEWEST = 40  # canaries from which anything can be said
TRIALS = {"central": 1000, "secagg": 400, "local": 100}
SOME_TRIALS = 100  # as few as this before rounds are left out
ROOM = 2**25  # numbers in all clients' vectors
WORK = 3 * 10**9  # numbers that all clients of all rounds of the attack compute
BLOCKS, SAMPLE = 64, 1024
ALONE = 24  # rounds of each kind of a client alone
FEW, FLOORS = 8, 20  # clients and rounds in which they drop out
NARROW, STAGES = 512, 20_000  # parameters where the stages of secure aggregation run, and numbers a pair's stages cost
CROWD = 6  # rounds of the attack without noise
TOLERANCE = 1e-5  # by which a message may be longer than the radius: rounding, and the noise of a run next to without
QUIET = 1e-9  # the noise of such a run
DELTA = 1e-5  # of side runs, which claim nothing
Tick = Callable[[], None]


class Stage(NamedTuple):
    """Stage of a play: a method, the number of parameters and their dtype."""

    algorithm: Algorithm
    dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return self.algorithm.message_width(self.dim)

    @property
    def scale(self) -> float:
        """Length of gradients that the bound cuts to its radius, whatever the memories hold."""
        law = self.algorithm.bound.law
        parameter = 0.0 if law is None or law.clips else law.parameter
        if self.algorithm.extras:  # a threshold that adapts goes up as long as everybody is beyond it
            parameter = MOST
        return 1e6 * max(self.algorithm.bound.radius, parameter) / min(1.0, self.algorithm.local.step)

    @property
    def nothing(self) -> float:
        """Gradient that makes a message zero."""
        return nothing_for(self.algorithm, torch.zeros(self.dim, dtype=self.dtype))

    def silence(self, clients: int) -> Silence:
        return Silence(self.dim, clients, self.dtype, self.nothing)


def stage_for(
    mechanism: Mechanism, algorithm: Algorithm | None, dim: int | None, dtype: torch.dtype, trials: int | None
) -> Stage:
    """Returns the stage with the run's own method, or with clipping.

    The method takes one local step in place of many: gradients of canaries are the same everywhere. By default it has
    as many parameters as an attack has use for.
    """
    if algorithm is None:
        algorithm = dp_fed_avg_clip(gd(1.0), tau=mechanism.radius, server_step=1e-9)
    if algorithm.bound.radius != mechanism.radius:
        raise UserError(f"the mechanism is for messages of length {mechanism.radius:g}, but {algorithm.name} bounds "
                        f"them by {algorithm.bound.radius:g}.")  # fmt: skip
    played = algorithm._replace(local=algorithm.local._replace(run=gd(1.0).run))
    if dim is None:
        trials = trials or TRIALS[mechanism.trust]
        dim = max(64, {"central": trials, "secagg": min(mechanism.num_clients, trials), "local": 1}[mechanism.trust])
    return Stage(played, dim, dtype)


def in_parts(
    parts: Iterable[tuple[np.ndarray, LocalUpdate, Problem]], x: Tensor, ids: np.ndarray, moment: Moment,
    correction: Tensor | None,
) -> Tensor:  # fmt: skip
    """Computes updates of clients that do not all take the same local steps.

    Args:
        parts: masks of the clients, with the steps that they take and on what problem, in order.
        x: a model, or one for each client.
        ids: numbers of the clients.
        moment: seed and number of the round.
        correction: as in `LocalUpdate`.
    """
    rows = x.new_empty(len(ids), x.shape[-1])
    for some, local, problem in parts:
        if some.any():
            which = torch.from_numpy(some).to(x.device)
            start, more = (x if x.ndim == 1 else x[which]), (None if correction is None else correction[which])
            rows[which] = local.run(problem, start, ids[some], moment, more)
    return rows


def asked(mechanism: Mechanism, delta: float = DELTA) -> Privacy:
    """Returns what to ask for to get just this mechanism."""
    return Privacy(
        None, delta, mechanism.noise_std, mechanism.trust, mechanism.adjacency, mechanism.colluders,
        mechanism.min_cohort, randomness="secure" if mechanism.secure else "seeded", stream=mechanism.stream,
        noise="discrete" if mechanism.grid_dim else "continuous", protocol=mechanism.protocol,
        min_survivors=mechanism.min_survivors or None,
    )  # fmt: skip


def senders(r: Round, num_clients: int) -> np.ndarray:
    sent = np.zeros(num_clients, bool)
    sent[r.cohort.computing[r.cohort.sending]] = True
    return sent


def noise_std(r: Round) -> float:
    """Returns the standard deviation of a round's noise; 0 where none is due."""
    plan = for_clients(r.plan)
    assert plan is not None
    mechanism = plan.mechanism
    std = mechanism.noise_std * mechanism.radius * (1 + mechanism.rounding)
    return std if mechanism.trust == "central" else std * math.sqrt(r.sent)


# The attack


class Attack(NamedTuple):
    """Attack: R runs of K rounds with m canaries each, as many clients and parameters as there is time and room for."""

    stage: Stage
    mechanism: Mechanism
    canaries: int
    runs: int
    rounds: int


def attack(mechanism: Mechanism, stage: Stage, rounds: int, trials: int | None) -> Attack:
    """Plans an attack on the mechanism with as many clients as its attacker has to face.

    In central as many as there are canaries, since nothing there depends on it; in local one, since the server sees
    each message alone; else the mechanism's own. Where that is too much, there are fewer canaries (if nobody says how
    many), then fewer rounds; fewer parameters only where all clients' vectors have no room.
    """
    rule, own = mechanism.participation, mechanism.num_clients
    alike = mechanism.trust == "central" and (rule.select is None or rule.rate(own) == 1)
    if mechanism.trust == "local":
        own, rule = 1, rule if rule.select is None else full()
    if not alike:
        stage = stage._replace(dim=min(stage.dim, max(16, ROOM // own)))
    at_once = min(stage.dim, max(1, ROOM // stage.dim) if alike else own)
    wanted = TRIALS[mechanism.trust] if trials is None else trials
    if mechanism.protocol:
        stage = stage._replace(dim=min(stage.dim, NARROW))
        at_once = min(at_once, stage.dim)
    staged = STAGES * own**2 if mechanism.protocol else 0  # what the stages take beside the numbers
    cost = (staged / at_once) + stage.dim * (1 if alike else max(3 if own == 1 else 1, own / min(at_once, wanted)))
    if trials is None:
        wanted = min(wanted, max(SOME_TRIALS, int(WORK / (rounds * cost))))
    rounds = min(rounds, max(1, int(WORK / (wanted * cost))))
    runs = -(-wanted // at_once)
    m = -(-wanted // runs)
    clients = m if alike else own
    played = replace(
        mechanism, num_clients=clients, participation=rule, colluders=min(mechanism.colluders, clients - 1)
    )
    return Attack(stage, played, m, runs, rounds)


class Seen(NamedTuple):
    """Results of an attack, in units of the radius.

    Attributes:
        present: coins (R, m).
        along: sums along each canary's vector (R, K, m).
        sent: who sent (R, K, M), with the canaries last.
        std: standard deviation of the noise (R, K).
    """

    present: np.ndarray
    along: np.ndarray
    sent: np.ndarray
    std: np.ndarray

    @property
    def canaries_sent(self) -> np.ndarray:
        return self.sent[:, :, -self.present.shape[1] :]


def play(at: Attack, seed: int, tick: Tick) -> Seen:
    """Runs an attack: canaries on coordinates of their own, spread over all, and silent clients if there are more."""
    (stage, mechanism, m, runs, rounds), rng = at, generator(seed, "audit")
    clients, radius, dim = mechanism.num_clients, mechanism.radius, stage.dim
    places, axes = np.arange(m) * dim // m, torch.zeros(m, dim, dtype=stage.dtype)
    axes[torch.arange(m), torch.from_numpy(places)] = 1
    present = rng.random((runs, m)) < 0.5
    seen = Seen(present, np.empty((runs, rounds, m)), np.empty((runs, rounds, clients), bool), np.empty((runs, rounds)))
    for run, own_seed in enumerate(rng.integers(2**62, size=runs).tolist()):
        problem = with_canaries(
            stage.silence(clients - m), axes, present[run], mechanism.adjacency, stage.scale, stage.nothing
        )
        for r in _rounds(problem, stage, mechanism, rounds, own_seed):
            vectors = r.released.numpy()[: stage.algorithm.message_slots * dim].reshape(-1, dim)
            halves = vectors[:, places] / radius
            seen.along[run, r.number - 1] = halves.sum(0) / math.sqrt(len(halves))
            seen.sent[run, r.number - 1] = senders(r, clients)
            seen.std[run, r.number - 1] = noise_std(r) / radius
            tick()
    return seen


def _rounds(problem: Problem, stage: Stage, mechanism: Mechanism, rounds: int, seed: int) -> Iterator[Round]:
    return simulate(
        problem, stage.algorithm, mechanism.participation, asked(mechanism), rounds=rounds, seed=seed, on=Threads(1)
    )


# The length of messages


def all_short(at: Attack, seed: int, tick: Tick) -> bool:
    """Returns whether in the attack, next to without noise, no sender adds more than the radius, and others nothing."""
    mechanism = replace(in_the_clear(at.mechanism), noise_std=QUIET, grid_dim=0, secure=False)
    quiet = at._replace(mechanism=mechanism, runs=1, rounds=min(CROWD, at.rounds))
    seen = play(quiet, seed, tick)
    heard = seen.canaries_sent * signs(seen.present, at.mechanism.adjacency)[:, None]
    most, room = abs(heard), 10 * TOLERANCE
    return bool((seen.along * np.where(heard < 0, -1, 1) <= most + room).all() and
                (abs(seen.along)[heard == 0] <= room).all())  # fmt: skip


def longest_alone(stage: Stage, seed: int, tick: Tick) -> float:
    """Returns the length of the longest message of a client alone, relative to the radius, next to without noise.

    Its updates have a random direction and are always far too long; change sign; are too long at first and nothing
    then; grow; and wander, of all lengths. What a memory keeps and adds to a message later shows.
    """
    rng, radius, longest = generator(seed, "audit", 1), stage.algorithm.bound.radius, 0.0
    alone = Mechanism(1, full(), QUIET, radius)
    for kind in KINDS:
        problem = with_canaries(stage.silence(0), torch.zeros(1, stage.dim), np.ones(1, bool))
        direction = a_direction(stage.dim, rng)
        rounds = _rounds(problem, stage, alone, ALONE, int(rng.integers(2**62)))
        for k in range(ALONE):
            if kind == "wander":
                direction = a_direction(stage.dim, rng)
            problem.updates.copy_(stage.scale * length_of(kind, k, rng) * direction)
            longest = max(longest, float(next(rounds).released.norm()) / radius)
            tick()
    return longest


KINDS = ("always", "sign", "at first", "growing", "wander")


def length_of(kind: str, k: int, rng: np.random.Generator) -> float:
    """Returns how long an update of this kind is in round k, relative to one that is far too long."""
    if kind == "sign":
        return float(rng.choice([-1.0, 1.0]))
    if kind == "at first":
        return float(k < 4)
    if kind == "growing":
        return float(10.0 ** min(0, k - 12))
    return float(10.0 ** rng.uniform(-8, 0)) if kind == "wander" else 1.0


def a_direction(dim: int, rng: np.random.Generator) -> Tensor:
    """Draws a vector of length 1 in a random direction."""
    v = rng.standard_normal(dim)
    return torch.from_numpy(v / np.linalg.norm(v))


# Nothing but noise


class Watched(NamedTuple):
    """Record of K rounds in which nobody says anything: what is released is noise, in units of what it should be.

    Rounds without noise are zero.

    Attributes:
        sent: who sent (K, M).
        due: whether noise is due (K,).
        squares: squares (K, blocks), summed within blocks of neighbouring coordinates.
        sizes: sizes of the blocks.
        by_coordinate: squares of each coordinate, summed over rounds.
        sample: sample (K, up to 1,024) of coordinates, neighbours among them.
        first: first release, whole.
    """

    sent: np.ndarray
    due: np.ndarray
    squares: np.ndarray
    sizes: np.ndarray
    by_coordinate: np.ndarray
    sample: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, rounds: int, clients: int, width: int) -> "Watched":
        """Returns an empty record of so many rounds, with so many clients and numbers in a message."""
        starts, chosen = blocks(width), sampled(width)
        return cls(
            np.empty((rounds, clients), bool), np.zeros(rounds, bool), np.zeros((rounds, len(starts))),
            np.diff(np.append(starts, width)), np.zeros(width), np.zeros((rounds, len(chosen))), np.zeros(width),
        )  # fmt: skip

    def note(self, k: int, sent: np.ndarray, noise: np.ndarray | None) -> None:
        """Writes down a round.

        Args:
            k: number of the round, from 0.
            sent: who sent, (M,).
            noise: noise, in units of what it should be; None where none is due.
        """
        self.sent[k], self.due[k] = sent, noise is not None
        if noise is None:
            return
        squares = noise**2
        self.squares[k] = np.add.reduceat(squares, np.cumsum(self.sizes) - self.sizes)
        self.sample[k] = noise[sampled(len(noise))]
        np.add(self.by_coordinate, squares, out=self.by_coordinate)
        if self.due.sum() == 1:
            self.first[:] = noise


def watch(stage: Stage, mechanism: Mechanism, rounds: int, seed: int, tick: Tick) -> Watched:
    """Runs rounds in which nobody says anything, and records them."""
    clients = mechanism.num_clients
    seen = Watched.of(rounds, clients, stage.width)
    for r in _rounds(stage.silence(clients), stage, mechanism, rounds, seed):
        std = noise_std(r)
        seen.note(r.number - 1, senders(r, clients), r.released.numpy() / std if std > 0 else None)
        tick()
    return seen


def blocks(width: int) -> np.ndarray:
    """Returns where the blocks of neighbouring coordinates begin."""
    return np.unique(np.arange(BLOCKS) * width // BLOCKS)


def sampled(width: int) -> np.ndarray:
    """Returns all coordinates, or stretches of 32 neighbours that are spread over all."""
    if width <= SAMPLE:
        return np.arange(width)
    starts = np.linspace(0, width - 32, SAMPLE // 32).astype(int)
    return np.unique(starts[:, None] + np.arange(32))


def for_noise(mechanism: Mechanism) -> Mechanism:
    """Returns the mechanism with as few clients as there can be.

    Noise does not depend on them, unless on how many send. With Poisson sampling half of them do, so that in central
    many rounds have no sender.
    """
    clients = 3 if mechanism.trust == "secagg" else 1
    rule = poisson(0.5) if mechanism.p < 1 else full()
    least = min(2, mechanism.min_survivors)
    return replace(mechanism, num_clients=clients, participation=rule, colluders=0, min_cohort=1, min_survivors=least)


def floor_holds(mechanism: Mechanism, seed: int, tick: Tick) -> bool:
    """Returns whether no sum of fewer messages than there must be is opened, while clients drop out at every stage."""
    clients, rng = FEW, generator(seed, "audit", 3)
    least = max(2, math.ceil(FEW * mechanism.min_survivors / mechanism.num_clients))
    small = replace(mechanism, num_clients=clients, participation=full(), min_cohort=1, min_survivors=least,
                    colluders=min(mechanism.colluders, least - 1))  # fmt: skip
    gone = {(k, name): rng.permutation(clients)[: rng.integers(clients)] for k in range(1, FLOORS + 1)
            for name in (STAGE_NAMES[k % len(STAGE_NAMES)],)}  # fmt: skip
    place = Together(lambda round, attempt, name: gone.get((round, name), np.zeros(0, int)).tolist())
    stage = stage_for(small, None, 16, torch.float64, None)
    problem, held = stage.silence(clients), True
    for r in simulate(problem, stage.algorithm, full(), asked(small), rounds=FLOORS, seed=seed, on=place):
        held &= r.sent == 0 or r.sent >= least
        tick()
    return held


def in_the_clear(mechanism: Mechanism) -> Mechanism:
    """Returns the mechanism without the stages of secure aggregation: the engine adds up the same messages."""
    if not mechanism.protocol:
        return mechanism
    return replace(mechanism, protocol=False, draws="honest", min_survivors=0)


def for_cohorts(mechanism: Mechanism, p: float | None = None) -> Mechanism:
    """Returns the mechanism with 32 to 128 clients and no cohort called off.

    Clients are drawn with its own probability or with p.
    """
    rule = mechanism.participation if p is None else poisson(p)
    clients = min(max(mechanism.num_clients, 32), 128)
    return replace(mechanism, num_clients=clients, participation=rule, colluders=0, min_cohort=1)
