"""Compare runs side by side: `fednormec compare`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import AsJson, Force, Runs
from fednormec.cli.printing import tell_problems

HELP = """Compare runs side by side. Those that differ only in their seed share a line.

RUN is a run folder, or a folder with run folders in it, such as that of a sweep.

\b
Examples:
  fednormec compare runs
  fednormec compare runs/quickstart-1 runs/quickstart-2 --json
  fednormec compare runs --csv table.csv --markdown table.md
"""


def compare(
    runs: Runs,
    as_json: AsJson = False,
    csv: Annotated[str | None, typer.Option(help="Write the table into this CSV file.")] = None,
    markdown: Annotated[str | None, typer.Option(help="Write the table into this Markdown file.")] = None,
    force: Force = False,
) -> None:
    from fednormec.files import to_json
    from fednormec.results.compare import as_csv, as_markdown, as_text, facts, require_new, table, write
    from fednormec.results.groups import grouped
    from fednormec.results.reading import find_runs

    found = find_runs(runs)
    groups = grouped(found)
    shown = table(groups)
    files = {Path(path): text for path, text in ((csv, as_csv(groups)), (markdown, as_markdown(shown))) if path}
    require_new(files, force)
    for path, text in files.items():
        write(path, text, force)
    print(to_json({"runs": facts(groups)}) if as_json else as_text(shown))
    tell_problems(found)
