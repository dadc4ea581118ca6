"""Algorithm as a value: functions of what they are given, state in, state out."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fednormec.core.bounds import Bound, Messages
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Participation, Weights


class Server(NamedTuple):
    """State of the server between two rounds.

    Attributes:
        x: the model, (d,).
        memory: the server's own memory, a flat vector of any length, such as two moments one after the other; or empty.
        round: number of rounds that led here.
    """

    x: Tensor
    memory: Tensor
    round: int


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
            messages are (B, message_slots d), bounded by `bound`. `client` is the same without side effects.
        server: server(server, mean, weights) -> Server. `mean` is the noisy sum of the senders' messages over M, the
            only thing that ever crosses from clients to server.
        memory_slots: number of vectors (d,) in a client's memory.
        message_slots: number of vectors (d,) in a message.
        keeps_updates: whether a memory takes in an update as it is, unbounded.
        idle_clients_advance: whether a client that is not drawn may compute and move its memory all the same (`rule`).
        reads_memory: whether clients read the server's memory; a federation then sends it to them with the model.
        correction: correction(server, rows) -> (B, d), added to every local gradient; for methods with control
            variates.
        prime: algorithm that runs for one exact round before the first, to fill the memories with local updates. It is
            an exact, unbounded release: never with privacy.
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
    reads_memory: bool = False
    correction: Callable[[Server, Tensor], Tensor] | None = None
    prime: "Algorithm | None" = None

    def rule(self, participation: Participation) -> Participation:
        """Returns who computes with this method: idle clients sleep if the method has nothing for them to advance."""
        return participation if self.idle_clients_advance else participation._replace(idle="sleep")

    def client(self, server: Server, rows: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
        """Computes messages and moved memories without side effects.

        Args:
            server: state of the server.
            rows: memories of the clients, (B, memory_slots d).
            updates: their P_i, (B, d).

        Returns:
            The messages (B, message_slots d) and the moved rows, all new.
        """
        moved = rows.clone()
        return self.client_(server, moved, updates.clone()).whole(), moved
