"""Server's side of a Flower App: the training of `serve`, with Flower's Grid as the transport."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednormec.errors import UserError
from fednormec.federation.agreement import Federation
from fednormec.federation.client import longest_answer
from fednormec.federation.exchange import Exchange
from fednormec.federation.flower.app import asked_for
from fednormec.federation.flower.nodes import Agreed, Nodes, Post
from fednormec.federation.flower.records import body_in, record_of
from fednormec.federation.keys import Public, public_key
from fednormec.federation.log import INFO, Log
from fednormec.federation.provision import roster_file
from fednormec.federation.sessions import Serving, train_over
from fednormec.files import require_locks
from fednormec.results.report import with_report
from fednormec.runs.summary import describe

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp


def server_app() -> "ServerApp":
    """Returns the ServerApp that Flower runs."""
    from flwr.serverapp import ServerApp

    def main(grid: "Grid", context: "Context") -> None:
        summary = train(GridPost(grid), context.run_id, context.run_config)
        print(describe(summary), flush=True)
        if summary["status"] == "diverged":
            raise UserError(f"{summary['message']}. The rounds before it are kept in {summary['out']}.")

    app = ServerApp()
    app.main()(main)
    return app


def train(post: Post, run: int, run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Trains with the clients that answer at Flower's nodes, or resumes a training; returns the run's summary.

    Args:
        post: carries bytes to nodes and back.
        run: Flower's number of the run.
        run_config: what was set for the run: the folder and options of the server, nothing of what all agreed on.
    """
    require_locks()
    asked = asked_for(run_config)
    how = Serving(
        asked.out, wait_for=asked.wait_for, not_private=asked.not_private, forget_memories=asked.forget_memories,
        quiet=True,
    )  # fmt: skip
    with Log() as log:

        @contextmanager
        def nodes(federation: Federation) -> Iterator[Exchange]:
            names = tuple(federation.settings.clients)
            agreed = Agreed(
                names, lambda: roster_keys(asked.folder, names), federation.agreed, federation.terms,
                longest_answer(federation),
            )  # fmt: skip
            yield Nodes(agreed, post, run, log, log.warn)

        summary = with_report(train_over(nodes, asked.folder, how, lambda: False, log))
        log.keep(INFO, f"the training is over after {summary['rounds']} rounds ({summary['status']})")
    return summary


def roster_keys(folder: Path, names: Sequence[str]) -> list[Public | None]:
    """Returns each client's public key, None for one whose key was revoked."""
    files = [roster_file(folder, name) for name in names]
    return [public_key(file) if file.exists() else None for file in files]


class GridPost:
    """Post that is Flower's Grid.

    Args:
        grid: the Grid that Flower gives to a ServerApp.
    """

    def __init__(self, grid: "Grid") -> None:
        self._grid, self._sent = grid, dict[str, int]()

    def nodes(self) -> Collection[int]:
        """Returns the nodes that are there."""
        return list(self._grid.get_node_ids())

    def push(self, node: int, body: bytes, seconds: float) -> str | None:
        """Sends a node a request that is kept for so long; returns its name, or None if it cannot be sent."""
        from flwr.app import Message, MessageType

        names = list(self._grid.push_messages([Message(record_of(body), node, MessageType.TRAIN, ttl=seconds)]))
        if not names or not names[0]:
            return None
        self._sent[names[0]] = node
        return str(names[0])

    def pull(self, sent: Collection[str]) -> Mapping[str, bytes | None]:
        """Returns the answers that have come to these requests; None for one that failed."""
        found = dict[str, bytes | None]()
        for reply in self._grid.pull_messages(list(sent)):
            name = str(reply.metadata.reply_to_message_id)
            if name in sent:
                found[name] = body_in(reply) if reply.metadata.src_node_id == self._sent.pop(name, None) else None
        return found
