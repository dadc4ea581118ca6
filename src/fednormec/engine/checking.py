"""Checks that a method keeps its side of a private run, before anything is sent.

What the noise cannot make good is tried. docs/algorithm.md ("What a method may do") has the properties that a private
run rests on. The engine measures every message that it adds; the rest is tried here, on hostile updates.
`require_keeps` does so before each private run, `check_method` tries more of them, and the local update on the problem
itself.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Server
from fednormec.core.bounds import Adding
from fednormec.core.local import LocalUpdate, Moment
from fednormec.core.participation import Weights
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.engine.clients import computed, summed, updated
from fednormec.errors import BoundBroken, UserError
from fednormec.problems.silence import Silence

HOSTILE = (1.0, 1e30, -1e4, 0.0, math.nan, 1e-30, math.inf, -1e38, 1e-44, 1e12)  # sizes of updates
UNLIKE = 1e3  # units in the last place by which a message may differ and still be the same


class Finding(NamedTuple):
    """Finding of one attempt.

    Attributes:
        tried: what was tried.
        wrong: what went wrong; None where nothing did.
    """

    tried: str
    wrong: str | None


@dataclass(frozen=True)
class MethodCheck:
    """Result of `check_method`.

    Attributes:
        method: name of the method.
        findings: what was tried, and what went wrong.
    """

    method: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True if nothing speaks against the method, which does not say that it is private."""
        return all(finding.wrong is None for finding in self.findings)

    def text(self) -> str:
        """Returns a line for each thing that was tried."""
        lines = (f"  {'ok' if f.wrong is None else 'WRONG':<6}{f.tried}" for f in self.findings)
        reasons = (f"         {f.wrong}" for f in self.findings if f.wrong is not None)
        return "\n".join([f"{self.method}: {'passed' if self.passed else 'failed'}", *lines, *reasons])


def require_keeps(algorithm: Algorithm, x: Tensor) -> None:
    """Tries a method on a few hostile updates before a private run from x; raises BoundBroken if it fails."""
    for _, attempt in _attempts(algorithm, x, clients=max(2, min(10, 2**22 // len(x))), rounds=2):
        attempt()


def check_method(algorithm: Algorithm, problem: Problem, *, clients: int = 10, rounds: int = 6) -> MethodCheck:
    """Tries whether a method keeps its side of a private run; takes seconds.

    Args:
        algorithm: the method, with the local update, the bound and the settings it will run with.
        problem: what it will train on. Only gradients of a few of its clients are computed.
        clients: number of made-up clients that send hostile updates: zeros, huge and tiny ones, some that are not
            numbers.
        rounds: number of rounds in which they do; the size of a client's update changes per round.

    Returns:
        What was tried and what went wrong: the bound on every message, one message of the promised width for each
        client, no client's update in another's message, the same message alone and in a tile, functions that depend on
        what they are given alone, no exact round before the first, local updates that do not depend on who is computed
        beside a client. A method that passes can still be wrong in a way that these updates do not show.

    >>> import fednormec as fn
    >>> method = fn.dp_fed_avg_clip(fn.gd(0.1))
    >>> check_method(method, fn.random_quadratic(5, 3)).passed
    True
    >>> from fednormec.core.bounds import Messages
    >>> loud = method._replace(client_=lambda server, rows, updates: Messages(updates.mul_(1000.0)))
    >>> check_method(loud, fn.random_quadratic(5, 3)).passed
    False
    """
    x = problem.init(generator(0, "init"))
    attempts = [*_attempts(algorithm, x, clients, rounds), *_local_attempts(algorithm, problem, x)]
    return MethodCheck(algorithm.name, tuple(Finding(tried, _wrong(attempt)) for tried, attempt in attempts))


def _wrong(attempt: Callable[[], None]) -> str | None:
    try:
        attempt()
    except UserError as error:
        return str(error)
    return None


def _attempts(algorithm: Algorithm, x: Tensor, clients: int, rounds: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields what is tried of the method itself, by name."""
    servers, updates = _servers(algorithm, x, rounds), _updates(clients, rounds, x)
    ends, longest = (0, clients - 1), algorithm.bound.radius
    close = UNLIKE * torch.finfo(x.dtype).eps * (longest if math.isfinite(longest) else 1.0)

    def play(given: Tensor, longest: float = math.inf, first: int = 0) -> Tensor:
        return _played(algorithm, servers, given, longest, first)

    usual = cache(lambda: play(updates))

    def bounded() -> None:
        if math.isinf(longest):
            raise BoundBroken(f"{algorithm.name} does not bound what a client sends.")
        play(_hostile(updates), longest)

    def exact() -> None:
        if algorithm.prime is not None:
            raise BoundBroken(f"{algorithm.name} begins with an exact round (prime), which no later noise mends.")

    def apart() -> None:
        sent = usual()
        cases = [(i, size) for i in ends for size in (1.0, 1e30, 0.0, math.nan)]
        if not all(_same(sent[:, i], play(_but(updates, i, size))[:, i], close) for i, size in cases):
            raise BoundBroken(f"{algorithm.name} lets other clients' updates into a client's message: one client can "
                              "move the sum by more than the noise counts on.")  # fmt: skip

    def alone() -> None:
        sent = usual()
        if not all(_same(sent[:, i], play(updates[:, i : i + 1], first=i)[:, 0], close) for i in ends):
            raise BoundBroken(f"{algorithm.name} gives a client another message in a tile of {clients} than alone.")

    def pure() -> None:
        steps = [_stepped(algorithm, servers)]
        sent = [usual(), play(_but(updates, 0, 1.0)), play(updates)]
        steps.append(_stepped(algorithm, servers))
        play(_but(updates, 0, 1.0))
        steps.append(_stepped(algorithm, servers))
        if not (_same(sent[0], sent[2], 0.0) and all(_same(steps[0], step, 0.0) for step in steps)):
            raise BoundBroken(f"{algorithm.name} remembers something outside its state: the same call gives another "
                              "result after other updates. Keep it in the rows or in Server.")  # fmt: skip

    yield "functions of what they are given, nothing else", pure  # first: what is remembered is still small
    yield "messages within the radius, one of the promised width for each client", bounded
    yield "no exact round before the first", exact
    yield "no client's update in another client's message", apart
    yield "the same message alone and in a tile", alone


def _local_attempts(algorithm: Algorithm, problem: Problem, x: Tensor) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields what is tried of the local update, by name."""
    server = _servers(algorithm, x, 1)[0]
    some = np.arange(min(problem.num_clients, max(2, problem.tile), 8))

    def local(ids: np.ndarray) -> Tensor:
        rows = x.new_zeros(len(ids), algorithm.memory_slots * problem.dim)
        return updated(problem, algorithm, server, rows, ids, Moment(0, 1)).clone()

    def apart() -> None:
        together, alone = local(some), local(some[:1])
        close = (1e-3 if x.dtype == torch.float32 else 1e-9) * float(alone.norm())
        if not _same(together[:1], alone, close):
            raise BoundBroken(f"{algorithm.local.name} gives a client another update beside {len(some) - 1} others "
                              "than alone: other clients' data enter it.")  # fmt: skip

    yield "a local update that does not depend on who is computed beside", apart


def _played(algorithm: Algorithm, servers: list[Server], updates: Tensor, longest: float, first: int) -> Tensor:
    """Returns the messages (rounds, B, width) of clients with these updates (rounds, B, d), from memories of zero.

    Their numbers are `first` and those after it.
    """
    _, clients, dim = updates.shape
    ids = np.arange(first, first + clients)
    memories, sent = updates.new_zeros(clients, algorithm.memory_slots * dim), []
    for server, given in zip(servers, updates, strict=True):
        now = algorithm._replace(local=_giving(algorithm.local, given))
        told = Server(server.x.clone(), server.memory.clone(), server.round, server.optimizer.clone())
        messages, _ = computed(Silence(dim, first + clients), now, told, memories, ids, Moment(0, 1))
        if longest < math.inf:
            summed(algorithm, messages, memories.new_ones(clients), Adding(longest=longest))
        sent.append(messages.whole().clone())
        if not all(_same(getattr(server, part), getattr(told, part), 0.0) for part in ("x", "memory", "optimizer")):
            raise BoundBroken(f"{algorithm.name} writes into the server's state from a client.")
    return torch.stack(sent)


def _giving(local: LocalUpdate, updates: Tensor) -> LocalUpdate:
    """Returns a local update that is known beforehand, but for the correction."""

    def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
        return updates.clone() if correction is None else updates + correction

    return local._replace(run=run)


def _servers(algorithm: Algorithm, x: Tensor, rounds: int) -> list[Server]:
    """Returns the server's state in rounds whose means are a public vector."""
    states = [algorithm.start(x)]
    for _ in range(rounds):
        states.append(_next(algorithm, states[-1]))
    return states[1:]


def _next(algorithm: Algorithm, server: Server) -> Server:
    width = algorithm.message_width(len(server.x))
    return algorithm.advance(server, server.x.new_full((width,), 1 / math.sqrt(width)), Weights(1.0, 1.0))


def _stepped(algorithm: Algorithm, servers: list[Server]) -> Tensor:
    after = _next(algorithm, servers[0])
    return torch.cat([after.x, after.memory, after.optimizer])


def _updates(clients: int, rounds: int, x: Tensor) -> Tensor:
    """Makes up ordinary updates (rounds, B, d), all unlike."""
    numbers = torch.arange(1, rounds * clients + 1, dtype=x.dtype, device=x.device).view(rounds, clients, 1)
    return torch.sin(numbers * torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device))


def _hostile(updates: Tensor) -> Tensor:
    """Returns the same updates in the sizes of HOSTILE; the size of a client's update changes per round."""
    rounds, clients, _ = updates.shape
    turns = [[HOSTILE[(number + client) % len(HOSTILE)] for client in range(clients)] for number in range(rounds)]
    return updates * torch.tensor(turns, dtype=torch.float64).to(updates)[:, :, None]


def _but(updates: Tensor, client: int, size: float) -> Tensor:
    """Returns other updates, of this size, for all clients but one."""
    others = (updates.roll(1, dims=1) * -3 + 1) * size
    others[:, client] = updates[:, client]
    return others


def _same(one: Tensor, other: Tensor, close: float) -> bool:
    """Returns whether two results are the same but for `close` in a norm; what is not a number in both is the same."""
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    both = one.isnan() & other.isnan()
    return float((one - other).masked_fill(both, 0.0).double().norm()) <= close * math.sqrt(max(1, len(one)))
