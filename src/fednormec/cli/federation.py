"""Train with clients that are other people's machines: `fednormec federation`."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednormec.cli.help import Command, Group
from fednormec.cli.options import AsJson, Quiet
from fednormec.cli.printing import print_end, tell
from fednormec.errors import Stopped, UserError, note, visible

if TYPE_CHECKING:
    from fednormec.federation.checking import Finding

HELP = """Train with clients that are other people's machines. HTTPS is the transport.

One party makes the federation's folder and hands each client its own; the clients keep their data.

\b
Examples:
  fednormec federation init fed --clients 3 --inputs 64 --classes 10 --not-private
  fednormec federation serve fed --not-private
  fednormec federation join fed/clients/client-1 --data mine.npz --not-private
"""
app = typer.Typer(help=HELP, cls=Group, rich_markup_mode=None, no_args_is_help=True)
Folder = Annotated[str, typer.Argument(metavar="DIR", help="The federation's folder.")]
NotPrivate = Annotated[
    bool, typer.Option("--not-private", help="Go on although nothing, or only repeatable noise, protects the clients.")
]
LogFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Also add every note to this file, with time and level.")
]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="EPSILON",
        help="The largest ε that all that leaves your data may come to, over all agreements.",
        show_default="what this agreement promises",
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Try what it needs, print what is wrong, and start nothing.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="A JSON object for each line of --log-file.")]


def require_h11() -> None:
    """Raises UserError if what a federation needs is not installed."""
    if find_spec("h11") is None:
        raise UserError("a federation needs h11: pip install 'fednormec[federation]'.")


INIT_HELP = """Make the folder of a federation. It holds settings, the certificate of the server, keys for all clients.

DIR/clients/NAME is for the client of that name: send it there and delete it here. CONFIG is a TOML file as for
`fednormec run`; each client brings its own data. Without it the settings are fitted to the number of clients: a linear
model at ε = 8, by a method that bears much noise. Too few clients would learn nothing, and are promised nothing.

Of CONFIG's [data], what says how a table or an image becomes numbers
(label, features, labels, categories, missing, scale; size, channels) is part of what all agree on.

\b
Examples:
  fednormec federation init fed --clients 3 --inputs 64 --classes 10 --not-private       to try things out
  fednormec federation init fed --clients 60 --inputs 64 --classes 10 --trust central
  fednormec federation init fed --clients 60 --inputs 64 --classes 10 --trust secagg
  fednormec federation init fed my.toml --clients north,south,east --inputs 1,28,28 --address fl.example.org:9443
  fednormec federation init fed my.toml --clients 20 --inputs 64 --classes 10
  fednormec federation init fed prices.toml --clients 5 --inputs 12       with loss = "mse": values, not classes
  fednormec federation init fed reviews.toml --clients 5                  with data.inputs = "texts"
  fednormec federation init fed my.toml --clients 5 --inputs 64 --with systemd,docker

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
    trust: Annotated[
        str | None,
        typer.Option(
            help="Without CONFIG: local (nobody is trusted), secagg (nobody is, and the server sees sums alone) or "
            "central (the server is).",
            show_default="local",
        ),
    ] = None,
    not_private: Annotated[bool, typer.Option("--not-private", help="Without CONFIG: settings without noise.")] = False,
    services: Annotated[
        str | None, typer.Option("--with", metavar="KINDS", help="Also write files for systemd, docker, or both.")
    ] = None,
) -> None:
    require_h11()
    from fednormec.config.schema import read
    from fednormec.federation.agreement import for_server, read_federation
    from fednormec.federation.deploying import require_kinds, write_services
    from fednormec.federation.provision import CLIENTS, make
    from fednormec.federation.stages import must_stay
    from fednormec.privacy.outlook import notes

    names = [f"client-{i + 1}" for i in range(int(clients))] if clients.isdecimal() else clients.split(",")
    begun = None if config is None else Path(config)
    kind = None if begun is None else read(begun).get("data", {}).get("inputs")
    texts, tokens = texts or kind == "texts", tokens or kind == "tokens"
    if texts and inputs is not None:
        raise UserError("inputs that are texts have no shape: leave --inputs out.")
    shape = [] if texts else _shape("--inputs", "64" if inputs is None else inputs)
    target = _shape("--targets", targets) if targets else []
    if begun is not None and (trust or not_private):
        raise UserError("CONFIG says what is private: --trust and --not-private are for settings of the package's own.")
    if trust and not_private:
        raise UserError("--not-private has no noise, so that --trust says nothing: leave one of them out.")
    whom = None if not_private else trust or "local"
    kinds = services.split(",") if services else []
    require_kinds(kinds)
    made = make(Path(folder), names, shape, classes, address, begun, target, tokens, texts, whom)
    print(visible(f"{made / 'federation.toml'}: the settings; every client has a copy"))
    for name in names:
        print(visible(f"{made / CLIENTS / name}: for {name}; send it there and delete it here"))
    for file in write_services(made, kinds)[: len(kinds)]:
        print(visible(f"{file}: runs the server as a service; each client's folder has one of its own"))
    federation = for_server(read_federation(made), made)
    if federation.mechanism is not None and federation.mechanism.protocol:
        print(f"secure aggregation: {must_stay(federation.mechanism)}")
    if federation.plan is not None and (federation.records is None or federation.mechanism is not None):
        tell(notes(federation.plan))


def _shape(option: str, text: str) -> list[int]:
    try:
        return [int(length) for length in text.split(",")]
    except ValueError:
        raise UserError(f"{option} takes whole numbers with commas, such as 1,28,28, not '{text}'.") from None


SERVE_HELP = """Train with the clients that connect. The same command goes on where it was stopped, or killed.

With TLS, and only for clients whose key is on the roster. Ctrl-C finishes the round.

The page of --status shows rounds, ε, clients, the curve and the log; /status.json and /metrics (for Prometheus) have
the same. It asks nobody who they are, and so is for this machine alone.

\b
Examples:
  fednormec federation serve fed
  fednormec federation serve fed --wait-for 2                begin no round with fewer than two clients
  fednormec federation serve fed --out runs/second           a new run with the same clients
  fednormec federation serve fed --status 127.0.0.1:8080     a page about it, for a browser on this machine
  fednormec federation serve fed --log-file serve.log        who came, went and was refused, and when
  fednormec federation serve fed --forget-memories           go on, all clients' and the server's memories at zero
  fednormec federation serve fed --check                     try ports, certificates, disk and settings; start nothing
"""


@app.command(help=SERVE_HELP, cls=Command)
def serve(
    folder: Folder,
    out: Annotated[str | None, typer.Option(help="The run's folder.", show_default="DIR/run")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.", show_default="by the settings")] = None,
    port: Annotated[int | None, typer.Option(help="The port.", show_default="by the settings")] = None,
    wait_for: Annotated[
        int | None, typer.Option(help="Begin no round with fewer clients.", show_default="all at the start, then 1")
    ] = None,
    forget_memories: Annotated[
        bool, typer.Option("--forget-memories", help="Go on with all memories, the server's too, at zero.")
    ] = False,
    not_private: NotPrivate = False,
    status: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to show a page about the training, on this machine.")
    ] = None,
    log_file: LogFile = None,
    log_json: LogJson = False,
    check: Check = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout at the end, for scripts.")] = False,
    quiet: Quiet = False,
) -> None:
    require_h11()
    from fednormec.federation.sessions import Serving
    from fednormec.federation.sessions import serve as train
    from fednormec.results.report import with_report
    from fednormec.runs.interrupts import STOPPING, asked_to_stop

    how = Serving(
        None if out is None else Path(out), host, port, wait_for, not_private, forget_memories, quiet, status,
        None if log_file is None else Path(log_file), log_json,
    )  # fmt: skip
    if check:
        from fednormec.federation.checking import check_server

        print_findings(check_server(Path(folder), how))
        return
    with asked_to_stop(STOPPING) as stop:
        summary = with_report(train(Path(folder), how, stop))
    print_end(summary, as_json)


STATUS_HELP = """Print how a training goes: rounds, ε, clients, the last notes.

It asks the server that runs with --status on this machine. Without one it prints what the run's folder knows.

\b
Examples:
  fednormec federation status fed
  fednormec federation status fed --out runs/second
  fednormec federation status fed --json
"""


@app.command(help=STATUS_HELP, cls=Command)
def status(
    folder: Folder,
    out: Annotated[str | None, typer.Option(help="The run's folder.", show_default="DIR/run")] = None,
    as_json: AsJson = False,
) -> None:
    require_h11()
    from fednormec.federation.sessions import RUN
    from fednormec.federation.status import ask, from_folder
    from fednormec.federation.status_forms import text
    from fednormec.files import to_json

    run = Path(folder) / RUN if out is None else Path(out)
    found = ask(run)
    if found is None:
        found = from_folder(Path(folder), run)
        note(
            "no server shows its status: none runs, or it was started without --status. This is what the folder knows."
        )
    print(to_json(found) if as_json else text(found))


JOIN_HELP = """Take part in a federation with your own data. They stay on this machine; DIR is this client's folder.

Data are a .npz file with x and y; a table (.csv, .parquet) or a folder of images, which become numbers as [data] in
federation.toml says; or a function that returns x and y: module:function or file.py:function. The same command goes on
after a crash: the memory is in DIR.

--explain says what would happen, for you to read before you take part: what leaves this machine, what is promised,
which code runs. --check tries data, certificate, disk and server.

Where records are protected (privacy.unit = "record"), DIR/statement.txt is in the end the privacy statement for the
people in your data.

\b
Examples:
  fednormec federation join client-1 --data mine.npz
  fednormec federation join client-1 --data mine.csv
  fednormec federation join client-1 --data load.py:examples
  fednormec federation join client-1 --data hospital.data:load --address fl.example.org:9443
  fednormec federation join client-1 --data mine.npz --log-file join.log
  fednormec federation join client-1 --data mine.npz --keep-model model.safetensors
  fednormec federation join client-1 --data mine.npz --budget 12       they took part in a training before
  fednormec federation join client-1 --data mine.npz --explain
  fednormec federation join client-1 --data mine.npz --check
"""


@app.command(help=JOIN_HELP, cls=Command)
def join(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder that was made for this client.")],
    data: Annotated[str, typer.Option(help="A .npz file, a table, images, or file.py:function.")],
    name: Annotated[str | None, typer.Option(help="The client's name.", show_default="DIR's")] = None,
    address: Annotated[str | None, typer.Option(help="Where the server is.", show_default="by the settings")] = None,
    keep_model: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where to store the trained model at the end.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what would happen, and connect to nobody.")] = False,
    check: Check = False,
    not_private: NotPrivate = False,
    log_file: LogFile = None,
    log_json: LogJson = False,
    budget: Budget = None,
) -> None:
    require_h11()
    from fednormec.federation import joining
    from fednormec.runs.interrupts import asked_to_stop

    kept, file = (None if given is None else Path(given) for given in (keep_model, log_file))
    how = joining.Joining(data, name, address, not_private, kept, file, log_json, budget)
    if explain:
        print(joining.explain(Path(folder), how))
    if check:
        from fednormec.federation.checking import check_client

        print_findings(check_client(Path(folder), how))
    if explain or check:
        return
    with asked_to_stop("stopping.") as stop:
        joining.join(Path(folder), how, stop)
        if stop():
            raise Stopped("stopped; the same command takes part again.")
    print("the training has come to its end.")


def print_findings(findings: "list[Finding]") -> None:
    """Print what was found; raises UserError if something would not work."""
    for one in findings:
        print(visible(one.line))
    wrong = sum(one.level == "wrong" for one in findings)
    if wrong:
        raise UserError(f"{wrong} of {len(findings)} checks failed: it would not work.")
