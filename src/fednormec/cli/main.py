"""Parse, call, print: the program and its commands, in the order of its help.

Heavy imports wait inside the commands, so that --help answers at once.
"""

import io
import os
import sys
from typing import Annotated

import click
import typer

from fednormec import __version__
from fednormec.cli import (
    audit,
    compare,
    config,
    data,
    evaluate,
    export,
    federation,
    federation_flower,
    federation_roster,
    methods,
    models,
    predict,
    privacy,
    recommend,
    report,
    reproduce,
    run,
    settings,
    sweep,
    theory,
)
from fednormec.cli.help import Command, Group
from fednormec.errors import Stopped, StoppedAtOnce, UserError, visible

app = typer.Typer(
    help="Differentially private federated learning: Fed-α-NormEC and its family.",
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(help=run.HELP, cls=Command)(run.run)
app.command(help=sweep.HELP, cls=Command)(sweep.sweep)
app.command(help=reproduce.HELP, cls=Command)(reproduce.reproduce)
app.command(help=config.HELP, cls=Command)(config.config)
app.command(help=settings.HELP, cls=Command)(settings.settings)
app.command(help=recommend.HELP, cls=Command)(recommend.recommend)
app.command(help=privacy.HELP, cls=Command)(privacy.privacy)
app.command(help=theory.HELP, cls=Command)(theory.theory)
app.command(help=audit.HELP, cls=Command)(audit.audit)
app.command(help=evaluate.HELP, cls=Command)(evaluate.evaluate)
app.command(help=predict.HELP, cls=Command)(predict.predict)
app.command(help=export.HELP, cls=Command)(export.export)
app.command(help=compare.HELP, cls=Command)(compare.compare)
app.command(help=report.HELP, cls=Command)(report.report)
app.command(help=methods.HELP, cls=Command)(methods.methods)
app.command(help=models.HELP, cls=Command)(models.models)
app.add_typer(data.app, name="data")
for more in (federation_roster, federation_flower):
    for command, text in more.COMMANDS.items():
        federation.app.command(help=text, cls=Command)(command)
app.add_typer(federation.app, name="federation")


def main() -> None:
    """Run the program: a user's mistake is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without ε still gets its result
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except click.ClickException as error:  # what it quotes may be the name of a file
        if not isinstance(error, click.UsageError) or error.ctx is None or error.message != error.ctx.get_help():
            error.message = visible(error.message)
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        print(f"fednormec: {visible(error)}", file=sys.stderr, flush=True)
        if isinstance(error, StoppedAtOnce):
            os._exit(130)  # a run's files survive that at any moment
        sys.exit(130 if isinstance(error, Stopped) else 2)


def _version(asked: bool) -> None:
    if asked:
        print(f"fednormec {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass
