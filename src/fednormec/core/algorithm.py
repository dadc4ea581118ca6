"""Algorithm as a value: functions of what they are given, state in, state out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.core.bounds import Bound, Grid, Messages
from fednormec.core.local import LocalUpdate, Moment
from fednormec.core.participation import Participation, Weights
from fednormec.core.schedules import Schedule
from fednormec.core.vectors import plus

NOTHING = torch.empty(0)


class Server(NamedTuple):
    """State of the server between two rounds.

    Attributes:
        x: the point at which clients compute, (d,): the model, unless the optimiser looks ahead.
        memory: the method's own memory, a flat vector of any length, such as two moments one after the other; or empty.
        round: number of rounds that led here.
        optimizer: the optimiser's own memory, a flat vector of any length; or empty. Clients never hear of it.
    """

    x: Tensor
    memory: Tensor
    round: int
    optimizer: Tensor = NOTHING


class Step(NamedTuple):
    """Direction that a method takes from a round. The plain step is x <- x - size scale direction.

    Args:
        direction: where the loss rises, (d,), as far as the server knows.
        size: step of the server, eta; 0: the model stays, and so does what the optimiser remembers.
        memory: the method's memory after the round.
        scale: factor that makes the direction a mean over clients, such as 1/p. An optimiser whose step does not depend
            on the direction's length leaves it out.
        noise: variance of the privacy noise in each coordinate of the direction, one number or one for each; 0 if there
            is none. Where clients answer to earlier noise, that of this round alone.
    """

    direction: Tensor
    size: float
    memory: Tensor
    scale: float = 1.0
    noise: float | Tensor = 0.0


class ServerOptimizer(NamedTuple):
    """Optimiser of the server: makes models of directions. It sees what was released alone, so it costs no privacy.

    Args:
        name: what reports and errors call it.
        init: init(x0) -> its memory before the first round, a flat vector of any length.
        update: update(x, memory, step, number) -> the next x and memory, both new, from those of the round before;
            `number` is the round's, from 1.
        model: model(x, memory) -> the model; by default x, where clients compute.
        average: average(x, memory) -> an average of the models so far, or None if none is kept.
    """

    name: str
    init: Callable[[Tensor], Tensor]
    update: Callable[[Tensor, Tensor, Step, int], tuple[Tensor, Tensor]]
    model: Callable[[Tensor, Tensor], Tensor] = lambda x, memory: x
    average: Callable[[Tensor, Tensor], Tensor | None] = lambda x, memory: None


def descent() -> ServerOptimizer:
    """Gradient descent, the plain step: x <- x - size scale direction."""

    def update(x: Tensor, memory: Tensor, step: Step, number: int) -> tuple[Tensor, Tensor]:
        return plus(x, step.direction, -step.size * step.scale), memory

    return ServerOptimizer("sgd", lambda x0: x0.new_empty(0), update)


@dataclass(frozen=True)
class Bounded:
    """Client's side of a method, apart from the bound that makes its messages: the engine can put that on a grid.

    What a client remembers of its message is then what was sent, rounding included.

    Args:
        rule: rule(bound, server, rows, updates) -> Messages, `client_` of an `Algorithm` with its bound before.
        bound: the bound.
    """

    rule: Callable[[Bound, Server, Tensor, Tensor], Messages]
    bound: Bound

    def __call__(self, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        """Computes messages and moves the memories in place, as `client_` of an `Algorithm` does.

        Args:
            server: state of the server.
            rows: memories of the clients, moved in place.
            updates: their P_i, which may be overwritten.
        """
        return self.rule(self.bound, server, rows, updates)


class Algorithm(NamedTuple):
    """Method as a value: the two sides of a round.

    Client quantities are rows, one per client: a tile in process, one row on the wire.

    Args:
        name: what reports and errors call it.
        local: local operator, which gives the clients' updates P_i.
        bound: operator that bounds every message; noise and accounting read its radius.
        init: init(x0) -> Server, the state before the first round.
        client_: client_(server, rows, updates) -> Messages. `rows` (B, memory_slots d) are the clients' memories, all
            zero before the first round, and are moved in place; `updates` (B, d) are their P_i and may be overwritten;
            messages are (B, message_width(d)), bounded by `bound`. `client` is the same without side effects. Written
            as Bounded(rule, bound), what clients remember of a message on a grid is what was sent.
        server: server(server, mean, weights) -> Step. `mean` is the noisy sum of the senders' messages over M, the only
            thing that ever crosses from clients to server.
        memory_slots: number of vectors (d,) in a client's memory.
        message_slots: number of vectors (d,) in a message; `extras` come after them.
        keeps_updates: whether a memory takes in an update as it is, unbounded.
        idle_clients_advance: whether a client that is not drawn may compute and move its memory all the same (`rule`).
        reads_memory: whether clients read the server's memory; a federation then sends it to them with the model.
        correction: correction(server, rows) -> (B, d), added to every local gradient; for methods with control
            variates.
        prime: algorithm that runs for one exact round before the first, to fill the memories with local updates. It is
            an exact, unbounded release: never with privacy. Its Step has size 0.
        optimizer: what makes models of the method's steps; by default the plain step.
        with_beta: with_beta(schedule) -> the same method with its beta on a schedule; None if it has none to move.
        extras: what each number in a message after its vectors says, in words that the privacy statement repeats.
        draws: draws(ids, moment, dim) -> what each client draws for itself in a round, (B, w), such as a mask, which
            `client_` finds in the columns after the updates; None: nothing.
        own: own(server, rows) -> (B, d), each client's own model, where its local steps begin; None: at server.x.
        pull: strength with which local steps are pulled towards server.x: pull (y - server.x) is added to every local
            gradient at y, after any noise on it.
    """

    name: str
    local: LocalUpdate
    bound: Bound
    init: Callable[[Tensor], Server]
    client_: Callable[[Server, Tensor, Tensor], Messages]
    server: Callable[[Server, Tensor, Weights], Step]
    memory_slots: int
    message_slots: int = 1
    keeps_updates: bool = False
    idle_clients_advance: bool = False
    reads_memory: bool = False
    correction: Callable[[Server, Tensor], Tensor] | None = None
    prime: "Algorithm | None" = None
    optimizer: ServerOptimizer = descent()
    with_beta: "Callable[[Schedule], Algorithm] | None" = None
    extras: tuple[str, ...] = ()
    draws: Callable[[np.ndarray, Moment, int], Tensor] | None = None
    own: Callable[[Server, Tensor], Tensor] | None = None
    pull: float = 0.0

    def message_width(self, dim: int) -> int:
        """Returns the number of numbers in a message, where the model has `dim` parameters."""
        return self.message_slots * dim + len(self.extras)

    def start(self, x0: Tensor) -> Server:
        """Returns the state before the first round, the optimiser's memory included."""
        return self.init(x0)._replace(optimizer=self.optimizer.init(x0))

    def advance(self, server: Server, mean: Tensor, weights: Weights) -> Server:
        """Returns the state after a round.

        Args:
            server: state before it.
            mean: noisy sum of the senders' messages over M.
            weights: public factors.
        """
        step = self.server(server, mean, weights)
        x, memory = server.x, server.optimizer
        if step.size != 0:
            x, memory = self.optimizer.update(x, memory, step, server.round + 1)
        return Server(x, step.memory, server.round + 1, memory)

    def on_grid(self, grid: Grid | None) -> "Algorithm":
        """Returns the same method with messages on a grid; None: as it is.

        A `client_` that is not `Bounded` stays: its messages are rounded towards zero on their way.
        """
        if grid is None:
            return self
        client_ = self.client_
        if isinstance(client_, Bounded):
            client_ = replace(client_, bound=client_.bound.on(grid))
        return self._replace(client_=client_, bound=self.bound.on(grid))

    def with_optimizer(self, optimizer: ServerOptimizer) -> "Algorithm":
        """Returns the same method with another optimiser of the server, such as fn.optimizers.momentum(0.9)."""
        return self._replace(optimizer=optimizer)

    def model(self, server: Server) -> Tensor:
        """Returns the model of a state."""
        return self.optimizer.model(server.x, server.optimizer)

    def average(self, server: Server) -> Tensor | None:
        """Returns the average of models that the optimiser keeps; None if it keeps none."""
        return self.optimizer.average(server.x, server.optimizer)

    def rule(self, participation: Participation) -> Participation:
        """Returns who computes with this method: idle clients sleep if the method has nothing for them to advance."""
        return participation if self.idle_clients_advance else participation._replace(idle="sleep")

    def given(self, updates: Tensor, ids: np.ndarray, moment: Moment) -> Tensor:
        """Returns what `client_` is given: the updates, and beside them what each client draws.

        Args:
            updates: the clients' P_i, (B, d).
            ids: numbers of the clients.
            moment: seed and number of the round.
        """
        if self.draws is None:
            return updates
        return torch.cat([updates, self.draws(ids, moment, updates.shape[1]).to(updates)], dim=1)

    def client(self, server: Server, rows: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
        """Computes messages and moved memories without side effects.

        Args:
            server: state of the server.
            rows: memories of the clients, (B, memory_slots d).
            updates: their P_i, (B, d), and what they draw, as `given` returns them.

        Returns:
            The messages (B, message_width(d)) and the moved rows, all new.
        """
        moved = rows.clone()
        return self.client_(server, moved, updates.clone()).whole(), moved
