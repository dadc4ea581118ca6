"""Exchange between a server and its clients: what a training asks of whatever carries its messages."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol


class ClientStatus(NamedTuple):
    """How one client's connection is.

    Attributes:
        name: name of the client.
        here: whether it was heard of a short while ago.
        address: where it connected from the last time.
        silent: seconds since it was last heard of; None if it never was.
        missed: number of rounds in a row in which it was here and did not answer.
        refused: how often it was not let in.
        why_refused: why, the last time.
    """

    name: str
    here: bool
    address: str
    silent: float | None
    missed: int
    refused: int
    why_refused: str


class Exchange(Protocol):
    """Connections of all clients, which are known by their numbers. Two there are: HTTPS, and Flower's Grid.

    Attributes:
        names: names of the clients; the order numbers them.
        transport: what carries the messages, and who proves to be who, for the statement.
        command: the command that resumes a training; the federation's folder follows. None: the `flwr run` of its app.
        sent: number of bytes that clients were sent.
        received: number of bytes that they answered.
    """

    names: tuple[str, ...]
    transport: str
    command: str | None
    sent: int
    received: int

    def here(self) -> set[int]:
        """Returns the clients that can be asked."""
        ...

    def status(self) -> list[ClientStatus]:
        """Returns how each client's connection is."""
        ...

    def ask(
        self, bodies: Mapping[int, bytes], deadline: float, stop: Callable[[], bool] = lambda: False
    ) -> dict[int, bytes]:
        """Asks clients by their number and returns the answers that came in time.

        As long as nobody is here, no time passes: it waits for somebody to come; KeyboardInterrupt if it is asked to
        stop meanwhile.
        """
        ...

    def finish(self, said: bytes) -> None:
        """Tells all who are here that the training is over, and returns when they have heard it, or are too slow."""
        ...
