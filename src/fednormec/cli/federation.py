"""Train with clients that are other people's machines: `fednormec federation`."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.help import Command, Group
from fednormec.cli.options import Quiet
from fednormec.cli.printing import print_end, tell
from fednormec.errors import Stopped, UserError, visible

HELP = """Train with clients that are other people's machines. Flower is the transport.

One party makes the federation's folder and hands each client its own; the clients keep their data.

\b
Examples:
  fednormec federation init fed --clients 3 --inputs 64 --classes 10
  fednormec federation serve fed
  fednormec federation join fed/clients/client-1 --data mine.npz
"""
app = typer.Typer(help=HELP, cls=Group, rich_markup_mode=None, no_args_is_help=True)
Folder = Annotated[str, typer.Argument(metavar="DIR", help="The federation's folder.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS; on this machine alone.")]
NotPrivate = Annotated[
    bool, typer.Option("--not-private", help="Go on although nothing, or only repeatable noise, protects the clients.")
]
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def require_flower() -> None:
    """Silence Flower; raises UserError if it is not installed."""
    os.environ.update(QUIET)
    if find_spec("flwr") is None:
        raise UserError("a federation needs Flower: pip install 'fednormec[flower]'.")
    import flwr.supercore.logger  # noqa: F401  which sets its own level

    logging.getLogger("flwr").setLevel(logging.CRITICAL)


INIT_HELP = """Make the folder of a federation. It holds settings, the certificate of the server, keys for all clients.

DIR/clients/NAME is for the client of that name: send it there and delete it here. CONFIG is a TOML file as for
`fednormec run`; each client brings its own data. Of its [data], what says how a table or an image becomes numbers
(label, features, labels, categories, missing, scale; size, channels) is part of what all agree on.

\b
Examples:
  fednormec federation init fed --clients 3 --inputs 64 --classes 10
  fednormec federation init fed --clients north,south,east --inputs 1,28,28 --classes 10 --address fl.example.org:9443
  fednormec federation init fed my.toml --clients 20 --inputs 64 --classes 10
  fednormec federation init fed prices.toml --clients 5 --inputs 12       with loss = "mse": values, not classes
  fednormec federation init fed reviews.toml --clients 5                  with data.inputs = "texts"

With report = true in its [federation], clients hold out a share of their examples (held_out) and tell the server how
good the model is on them: not private.

Code of your own that CONFIG names (model.name = "net.py:build") is copied into each client's folder, where the client
can read it; its digest is part of what all agree on. The server never sends code.
"""


@app.command(help=INIT_HELP, cls=Command)
def init(
    folder: Folder,
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file; default: a private one.")] = None,
    clients: Annotated[str, typer.Option(help="How many clients, or their names with commas between them.")] = "3",
    inputs: Annotated[
        str | None, typer.Option(help="The shape of one example, with commas.", show_default="64; none with --texts")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="How many classes there are.", show_default="by CONFIG, or 10")
    ] = None,
    targets: Annotated[str, typer.Option(help="The shape of a target; empty for one class or value.")] = "",
    tokens: Annotated[bool, typer.Option("--tokens", help='As data.inputs = "tokens" in CONFIG.')] = False,
    texts: Annotated[bool, typer.Option("--texts", help='As data.inputs = "texts" in CONFIG.')] = False,
    address: Annotated[str, typer.Option(help="Where clients find the server.")] = "localhost:9443",
) -> None:
    require_flower()
    from fednormec.config.schema import read
    from fednormec.federation.agreement import for_server, read_federation
    from fednormec.federation.provision import CLIENTS, make
    from fednormec.privacy.outlook import notes

    names = [f"client-{i + 1}" for i in range(int(clients))] if clients.isdecimal() else clients.split(",")
    begun = None if config is None else Path(config)
    kind = None if begun is None else read(begun).get("data", {}).get("inputs")
    texts, tokens = texts or kind == "texts", tokens or kind == "tokens"
    if texts and inputs is not None:
        raise UserError("inputs that are texts have no shape: leave --inputs out.")
    shape = [] if texts else _shape("--inputs", "64" if inputs is None else inputs)
    target = _shape("--targets", targets) if targets else []
    made = make(Path(folder), names, shape, classes, address, begun, target, tokens, texts)
    print(visible(f"{made / 'federation.toml'}: the settings; every client has a copy"))
    for name in names:
        print(visible(f"{made / CLIENTS / name}: for {name}; send it there and delete it here"))
    tell(notes(for_server(read_federation(made), made).plan))


def _shape(option: str, text: str) -> list[int]:
    try:
        return [int(length) for length in text.split(",")]
    except ValueError:
        raise UserError(f"{option} takes whole numbers with commas, such as 1,28,28, not '{text}'.") from None


ADD_HELP = """Put one more client on the roster. All clients need the new federation.toml, and it begins a new run.

\b
Examples:
  fednormec federation add fed west                          a key pair is made, in fed/clients/west
  fednormec federation add fed west --public-key west.pub    of a key that west made: ssh-keygen -t ecdsa -b 384
"""


@app.command(help=ADD_HELP, cls=Command)
def add(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The client's name.")],
    key: Annotated[str | None, typer.Option("--public-key", help="The public key of a pair it made itself.")] = None,
) -> None:
    require_flower()
    from fednormec.federation.provision import add as put

    made = put(Path(folder), name, None if key is None else Path(key))
    print(visible(f"{name} is on the roster; send every client the new {Path(folder) / 'federation.toml'}"))
    if made is not None:
        print(visible(f"{made}: for {name}; send it there and delete it here"))


SERVE_HELP = """Train with the clients that connect. The same command goes on where it was stopped, or killed.

With TLS, and only for clients whose key is on the roster. Ctrl-C finishes the round.

\b
Examples:
  fednormec federation serve fed
  fednormec federation serve fed --wait-for 2                begin when two clients are here
  fednormec federation serve fed --out runs/second           a new run with the same clients
  fednormec federation serve fed --forget-memories           go on, all clients' and the server's memories at zero
"""


@app.command(help=SERVE_HELP, cls=Command)
def serve(
    folder: Folder,
    out: Annotated[str | None, typer.Option(help="The run's folder.", show_default="DIR/run")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.", show_default="by the settings")] = None,
    port: Annotated[int | None, typer.Option(help="The port.", show_default="by the settings")] = None,
    wait_for: Annotated[
        int | None, typer.Option(help="How many clients must be here at the start.", show_default="all")
    ] = None,
    forget_memories: Annotated[
        bool, typer.Option("--forget-memories", help="Go on with all memories, the server's too, at zero.")
    ] = False,
    insecure: Insecure = False,
    not_private: NotPrivate = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout at the end, for scripts.")] = False,
    quiet: Quiet = False,
) -> None:
    require_flower()
    from fednormec.federation.sessions import Serving
    from fednormec.federation.sessions import serve as train
    from fednormec.results.report import with_report
    from fednormec.runs.interrupts import STOPPING, asked_to_stop

    how = Serving(
        None if out is None else Path(out), host, port, wait_for, insecure, not_private, forget_memories, quiet
    )
    with asked_to_stop(STOPPING) as stop:
        summary = with_report(train(Path(folder), how, stop))
    print_end(summary, as_json)


JOIN_HELP = """Take part in a federation with your own data. They stay on this machine; DIR is this client's folder.

Data are a .npz file with x and y; a table (.csv, .parquet) or a folder of images, which become numbers as [data] in
federation.toml says; or a function that returns x and y: module:function or file.py:function. The same command goes on
after a crash: the memory is in DIR.

\b
Examples:
  fednormec federation join client-1 --data mine.npz
  fednormec federation join client-1 --data mine.csv
  fednormec federation join client-1 --data load.py:examples
  fednormec federation join client-1 --data hospital.data:load --address fl.example.org:9443
"""


@app.command(help=JOIN_HELP, cls=Command)
def join(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder that was made for this client.")],
    data: Annotated[str, typer.Option(help="A .npz file, a table, images, or file.py:function.")],
    name: Annotated[str | None, typer.Option(help="The client's name.", show_default="DIR's")] = None,
    address: Annotated[str | None, typer.Option(help="Where the server is.", show_default="by the settings")] = None,
    insecure: Insecure = False,
    not_private: NotPrivate = False,
) -> None:
    require_flower()
    from fednormec.federation.sessions import join as take_part
    from fednormec.runs.interrupts import asked_to_stop

    with asked_to_stop("stopping.") as stop:
        take_part(Path(folder), data, stop, name, address, insecure, not_private)
        if stop():
            raise Stopped("stopped; the same command takes part again.")
    print("the training has come to its end.")
