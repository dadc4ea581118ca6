"""Train by way of Flower: `fednormec federation app` and `fednormec federation answer`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.federation import Budget, Folder, LogFile, LogJson, NotPrivate, require_h11
from fednormec.errors import Stopped, visible

APP_HELP = """Write a Flower App of the federation. It runs with `flwr run`, on stock SuperLinks and SuperNodes.

It trains as `serve` does, with Flower (fednormec[flower], flwr 1.40 or newer) as the transport. The server's side reads
DIR on its machine; on a client's machine the app only carries bytes to the gateway that `fednormec federation answer`
opens. What all agreed on is in federation.toml, and no setting of a run changes it.

\b
Examples:
  fednormec federation app fed                               writes fed/app
  fednormec federation app fed --out flower-app
  flwr run fed/app my-superlink --stream                     with the SuperNodes of that SuperLink
  flwr run fed/app local --stream --federation-config 'num-supernodes=3'
                                                             a simulation; data in fed/clients/NAME/data.npz
"""


def app(
    folder: Folder,
    out: Annotated[str | None, typer.Option(help="The app's folder.", show_default="DIR/app")] = None,
) -> None:
    require_h11()
    from fednormec.federation.flower.app import write_app

    made = write_app(Path(folder), None if out is None else Path(out))
    print(visible(f"{made}: a Flower App; flwr run {made} trains with it"))


ANSWER_HELP = """Open a gateway for Flower: your data behind a socket. They stay here; DIR is this client's folder.

A SuperNode runs code that the server sends. So let it run as another user, who cannot read your data, and reach this
socket alone: all that comes through it is answered as `join` answers a server, with the same memory, budget and noise.

\b
Examples:
  fednormec federation answer client-1 --data mine.npz
  fednormec federation answer client-1 --data mine.npz --socket /run/fednormec/client-1.sock --group supernode
  flower-supernode --superlink fl.example.org:9443 --root-certificates client-1/ca.crt \\
    --auth-supernode-private-key node.key --node-config 'socket="/run/fednormec/client-1.sock"'

It ends when the training does. The same command goes on after a crash: the memory is in DIR.
"""


def answer(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder that was made for this client.")],
    data: Annotated[str, typer.Option(help="A .npz file, a table, images, or file.py:function.")],
    name: Annotated[str | None, typer.Option(help="The client's name.", show_default="DIR's")] = None,
    socket: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where to open the socket.", show_default="DIR/gateway.sock")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="A group of users who may reach it, too.", show_default="nobody else")
    ] = None,
    keep_model: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where to store the trained model at the end.")
    ] = None,
    not_private: NotPrivate = False,
    log_file: LogFile = None,
    log_json: LogJson = False,
    budget: Budget = None,
) -> None:
    require_h11()
    from fednormec.federation.flower.gateway import Door
    from fednormec.federation.flower.gateway import answer as serve
    from fednormec.federation.joining import Joining
    from fednormec.runs.interrupts import asked_to_stop

    path, kept, file = (None if given is None else Path(given) for given in (socket, keep_model, log_file))
    how = Joining(data, name, None, not_private, kept, file, log_json, budget)
    with asked_to_stop("stopping.") as stop:
        if not serve(Path(folder), how, Door(path, group), stop):
            raise Stopped("stopped; the same command answers again.")
    print("the training has come to its end.")


COMMANDS: dict[Callable[..., None], str] = {app: APP_HELP, answer: ANSWER_HELP}
