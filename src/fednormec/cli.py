"""The command line: parse, call, print. Heavy imports wait inside the commands, so that --help answers at once."""

import inspect
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fednormec import __version__
from fednormec.errors import UserError

app = typer.Typer(
    help="Differentially private federated learning: Fed-α-NormEC and its family.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RUN_HELP = """Train a model across clients. Without CONFIG: the built-in quickstart on real data.

\b
Examples:
  fednormec run
  fednormec run my.toml --out runs/first
  fednormec run --set run.rounds=50 --set method.beta=0.05
  fednormec run --set data.source=mydata.npz --set data.clients=50
  fednormec run --set method.name=clip21 --set method.tau=0.5
  fednormec run my.toml --json > result.json
"""
CONFIG_HELP = """Check a config and print it with every default spelled out, without running it.

\b
Examples:
  fednormec config > my.toml          the quickstart, as a start for your own
  fednormec config my.toml --set method.name=dp_scaffold
"""

ConfigPath = Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file; default: the quickstart.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for scripts.")]


def main() -> None:
    """The program: a user's mistake is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without ε still gets its result
    try:
        app()
    except UserError as error:
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
        print(f"fednormec: {line}", file=sys.stderr)
        sys.exit(2)


def _version(asked: bool) -> None:
    if asked:
        print(f"fednormec {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


@app.command(help=RUN_HELP)
def run(
    config: ConfigPath = None,
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="A new folder for the run.", show_default="runs/NAME-N")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print exactly one JSON object on stdout at the end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    from fednormec.config import QUICKSTART, read
    from fednormec.runner import describe, perform
    from fednormec.runs import to_json

    path = QUICKSTART if config is None else Path(config)
    summary = perform(read(path, overrides or []), path.stem, None if out is None else Path(out), quiet)
    print(to_json(summary) if as_json else describe(summary))
    if summary["status"] != "done":
        raise UserError(f"{summary['message']}. The rounds before it are kept in {summary['out']}.")


@app.command(help=CONFIG_HELP)
def config(config: ConfigPath = None, overrides: Overrides = None) -> None:
    from fednormec.config import QUICKSTART, dump, read
    from fednormec.experiment import assemble

    print(dump(assemble(read(QUICKSTART if config is None else config, overrides or [])).config), end="")


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the methods with their papers and settings."""
    from fednormec.algorithms.named import METHODS

    rows = {
        name: {
            "paper": method.paper,
            "can_be_private": method.can_be_private,
            "takes_local": method.takes_local,
            "settings": _settings(method.build, skip=1 if method.takes_local else 0),
            "about": _first_line(method.build),
        }
        for name, method in METHODS.items()
    }
    _print_rows(rows, as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the built-in models with their settings and sizes."""
    from fednormec.models import MODELS

    rows = {
        name: {
            "parameters on 3x32x32, 10 classes": sum(p.numel() for p in build((3, 32, 32), 10).parameters()),
            "settings": _settings(build, skip=2),
            "about": _first_line(build),
        }
        for name, build in MODELS.items()
    }
    _print_rows(rows, as_json)


def _settings(build: Callable[..., Any], skip: int) -> dict[str, Any]:
    return {name: p.default for name, p in list(inspect.signature(build).parameters.items())[skip:]}


def _first_line(build: Callable[..., Any]) -> str:
    return (build.__doc__ or "").splitlines()[0]


def _print_rows(rows: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name}\n    {row['about']}")
        for key, value in row.items():
            if key != "about":
                print(f"    {key.replace('_', ' ')}: {_words(value)}")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
