"""An algorithm is a value: functions of what they are given, state in, state out."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fednormec.core.bounds import Bound, Messages
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Participation, Weights


class Server(NamedTuple):
    """What the server knows after `round` rounds: the model x and its own memory (empty, or one vector)."""

    x: Tensor
    memory: Tensor
    round: int


class Algorithm(NamedTuple):
    """The two sides of a round. Client quantities are rows, one per client: a tile in process, one row on the wire.

    init(x0) -> Server
    client_(server, rows, updates) -> Messages: `rows` (B, memory_slots d) are the clients' memories, all zero before
        the first round, and are moved in place; `updates` (B, d) are their P_i and may be overwritten; messages are
        (B, message_slots d), bounded by `bound`. `client` is the same without side effects.
    server(server, mean, weights) -> Server: `mean` is the noisy sum of the senders' messages over M, the only thing
        that ever crosses from clients to server.
    correction(server, rows) -> (B, d): what is added to every local gradient, for methods with control variates.
    keeps_updates: whether a memory takes in an update as it is, unbounded.
    idle_clients_advance: whether a client that is not drawn may compute and move its memory all the same (`rule`).
    prime: an algorithm that runs for one exact round before the first, to fill the memories with local updates.
        It is an exact, unbounded release: never with privacy.
    """

    name: str
    local: LocalUpdate
    bound: Bound
    init: Callable[[Tensor], Server]
    client_: Callable[[Server, Tensor, Tensor], Messages]
    server: Callable[[Server, Tensor, Weights], Server]
    memory_slots: int
    message_slots: int = 1
    keeps_updates: bool = False
    idle_clients_advance: bool = False
    correction: Callable[[Server, Tensor], Tensor] | None = None
    prime: "Algorithm | None" = None

    def rule(self, participation: Participation) -> Participation:
        """Who computes with this method: idle clients sleep where the method has nothing for them to advance."""
        return participation if self.idle_clients_advance else participation._replace(idle="sleep")

    def client(self, server: Server, rows: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
        """(messages, moved rows), all new."""
        moved = rows.clone()
        return self.client_(server, moved, updates.clone()).whole(), moved
