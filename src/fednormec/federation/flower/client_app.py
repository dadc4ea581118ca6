"""Client's side of a Flower App: it carries bytes between Flower and a gateway, and remembers nothing."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednormec.errors import UserError
from fednormec.federation.flower.carrying import carry
from fednormec.federation.flower.records import body_in, record_of

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

WHERE = (
    "the SuperNode's --node-config must say where this client's answers come from: socket=\"…\", which fednormec "
    'federation answer opens, or, for who trusts the app with the data, folder="…" data="…"'
)


def client_app() -> "ClientApp":
    """Returns the ClientApp that Flower runs."""
    from flwr.clientapp import ClientApp

    def carried(message: "Message", context: "Context") -> "Message":
        from flwr.app import Message

        body = body_in(message)
        if body is None:
            raise UserError("a message of a fednormec server was expected, and something else came.")
        reply = answered(body, context.run_id, context.node_id, context.node_config, context.run_config)
        return Message(record_of(reply), reply_to=message)

    app = ClientApp()
    app.train()(carried)
    return app


def answered(body: bytes, run: int, node: int, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> bytes:
    """Returns the answer to a request: of the gateway, or of this process where it may read the data.

    Args:
        body: the request, as the server made it.
        run: Flower's number of the run.
        node: Flower's number of the node.
        node_config: what the client's owner set for the SuperNode: socket, or folder and data.
        run_config: settings of the run, of which a simulation reads the federation's folder, and nothing else is read.
    """
    if isinstance(path := node_config.get("socket"), str):
        return carry(path, body, run, node)
    folder, data = node_config.get("folder"), node_config.get("data")
    if isinstance(folder, str) and isinstance(data, str):
        answer = _desk(folder, data, node_config.get("not-private") is True)
    elif folder is None and data is None and isinstance(part := node_config.get("partition-id"), int):
        answer = _desk(*_simulated(run_config, part), True)  # all clients are this machine's
    else:
        raise UserError(f"{WHERE}.")
    return answer(body, run, node)


def _simulated(run_config: Mapping[str, Any], part: int) -> tuple[str, str]:
    """Returns the folder and the data of a client that Flower simulates on this machine."""
    from fednormec.federation.agreement import federation_settings, read_federation
    from fednormec.federation.flower.app import folder_in
    from fednormec.federation.provision import CLIENTS

    federation = folder_in(run_config)
    names = federation_settings(read_federation(federation)).clients
    if not 0 <= part < len(names):
        raise UserError(f"this federation has {len(names)} clients, and this is node {part + 1} of the simulation: "
                        f"give flwr run --federation-config 'num-supernodes={len(names)}'.")  # fmt: skip
    folder = federation / CLIENTS / names[part]
    found = sorted(folder.glob("data.*"))
    if len(found) != 1:
        raise UserError(f"a simulation needs the data of {names[part]} in {folder}, as data.npz or another form that "
                        f"fednormec federation join takes; {len(found)} such files are there.")  # fmt: skip
    return str(folder), str(found[0])


@cache
def _desk(folder: str, data: str, not_private: bool) -> Callable[[bytes, int, int], bytes]:
    """Returns what answers for a client in this process; its folder is locked while it does."""
    from fednormec.federation.agreement import read_federation
    from fednormec.federation.flower.gateway import desk_of
    from fednormec.federation.joining import Joining
    from fednormec.federation.log import Log
    from fednormec.federation.provision import needs_keys
    from fednormec.files import Lock

    if needs_keys(read_federation(Path(folder))):
        raise UserError("secure aggregation keeps its secrets in one process from stage to stage, and Flower may start "
                        "one for each message: start `fednormec federation answer` and give node_config its socket."
                        )  # fmt: skip
    desk = desk_of(Path(folder), Joining(data, not_private=not_private), Log())

    def answer(body: bytes, run: int, node: int) -> bytes:
        with Lock(Path(folder) / "lock") as lock:
            if not lock.take():
                raise UserError(f"another process is at work in {folder}: wait for its end.")
            return desk.answer(body, run, node)

    return answer
