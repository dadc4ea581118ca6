"""Make a page about runs: `fednormec report`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import Force, Runs
from fednormec.cli.printing import tell_problems
from fednormec.errors import visible

HELP = """Make a page about runs to send to others. It is one HTML file that needs nothing else.

RUN is a run folder, or a folder with run folders in it, such as that of a sweep.

\b
Examples:
  fednormec report runs/quickstart-1
  fednormec report runs --out all.html
  fednormec report runs --figures paper        also .png, .pdf, a Markdown and a CSV table
"""


def report(
    runs: Runs,
    out: Annotated[str, typer.Option(help="The page.")] = "report.html",
    figures: Annotated[
        str | None, typer.Option(metavar="DIR", help="Also figures as .png and .pdf, and the table, into this folder.")
    ] = None,
    force: Force = False,
) -> None:
    from fednormec.results.compare import require_new
    from fednormec.results.reading import find_runs
    from fednormec.results.report import write_figures, write_report

    found = find_runs(runs)
    require_new([Path(out)], force)
    drawn = [] if figures is None else write_figures(found, Path(figures), force)
    print(visible(f"report   {write_report(found, Path(out), force)}"))
    for path in drawn:
        print(visible(f"figures  {path}"))
    tell_problems(found)
