"""Options and arguments that several commands share, and what becomes of them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednormec.errors import at_least_one

if TYPE_CHECKING:
    from fednormec.config.schema import Config

ConfigPath = Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file; default: the quickstart.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting.")]
NotPrivate = Annotated[bool, typer.Option("--not-private", help="Drop [privacy]: no noise, nothing is protected.")]
Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


def read_config(
    path: str | None, overrides: list[str] | None, not_private: bool, default: Path | None = None
) -> tuple[str, "Config"]:
    """The name and the sections of a config: of the file at `path`, else of `default`, else of the quickstart."""
    from fednormec.config.schema import read
    from fednormec.config.settings import QUICKSTART

    source = default or QUICKSTART if path is None else Path(path)
    sections = read(source, overrides or [])
    if not_private:
        sections.pop("privacy", None)
    return source.stem, sections


def crew(workers: int | None) -> int:
    """The number of workers asked for, else one per core; raises UserError if it is below one."""
    return at_least_one("workers", (os.cpu_count() or 1) if workers is None else workers)
