"""Options and arguments that several commands share, and what becomes of them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fednormec.errors import at_least_one

if TYPE_CHECKING:
    from fednormec.config.schema import Config

ConfigPath = Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file; default: the quickstart.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting.")]
NotPrivate = Annotated[bool, typer.Option("--not-private", help="Drop [privacy]: no noise, nothing is protected.")]
Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")]
Model = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that has finished.")]
DataSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="DATA.KEY=VALUE", help="A setting of [data], for X.")
]
Code = Annotated[
    str, typer.Option(metavar="DIR", help="The folder of your own code, if the model is built by a file of yours.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


class Asked(NamedTuple):
    """What a command is to work on: a config, its name, and which of its settings --set drops, in a sentence each."""

    name: str
    config: "Config"
    dropped: list[str]


def read_config(path: str | None, overrides: list[str] | None, not_private: bool, default: Path | None = None) -> Asked:
    """The config in the file at `path`, else in `default`, else the quickstart, with the overrides.

    Where an override names a real federation as the source, its own config stands in the quickstart's place. Nothing is
    printed: what is dropped is to be said when all has been checked, as no note comes before a mistake.
    """
    from fednormec.config.schema import read_saying
    from fednormec.config.usual import start

    source = default or start(overrides or []) if path is None else Path(path)
    sections, dropped = read_saying(source, overrides or [])
    if not_private:
        sections.pop("privacy", None)
    return Asked(source.stem, sections, dropped)


def crew(workers: int | None) -> int:
    """The number of workers asked for, else one per core; raises UserError if it is below one."""
    return at_least_one("workers", (os.cpu_count() or 1) if workers is None else workers)
