"""Run every combination of some settings: `fednormec sweep`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fednormec.cli.options import AsJson, ConfigPath, NotPrivate, Overrides, Quiet, crew
from fednormec.cli.printing import tell
from fednormec.errors import UserError, visible

HELP = """Run every combination of some settings and rank them.

CONFIG has a section [sweep] with lists; --over adds more. Without CONFIG: the quickstart. The same command with the
same --out goes on where it was stopped. A cell that fails does not stop the others. Cells that differ in run.seed only
are averaged. What all private runs cost together is computed from their ledgers.

\b
  [sweep]
  method.beta = [0.01, 0.03, 0.1]
  run.seed = [0, 1, 2]
  steps = [{local.step = 0.1, method.server_step = 0.5}, {local.step = 0.5, method.server_step = 1.5}]

\b
Examples:
  fednormec sweep my.toml --out sweeps/first
  fednormec sweep --over 'method.beta=[0.01,0.03]' --over 'run.seed=[0,1]'
  fednormec sweep my.toml --list                            the cells, without running them
  fednormec sweep my.toml --metric test_loss --json > result.json
"""


def sweep(
    config: ConfigPath = None,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None, typer.Option("--over", metavar="SECTION.KEY=LIST", help="One more setting to sweep over.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The sweep's folder, new or to go on with.", show_default="sweeps/NAME")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many cells at once.", show_default="one per core")] = None,
    metric: Annotated[str | None, typer.Option(help="What to rank by.", show_default="test_accuracy")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the cells and stop.")] = False,
    not_private: NotPrivate = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    from fednormec.config.schema import overridden, read_saying
    from fednormec.config.usual import start
    from fednormec.files import to_json
    from fednormec.runs.progress import tallied
    from fednormec.sweeps.grid import dropped, grid
    from fednormec.sweeps.ranking import check_settings, facts, line, text
    from fednormec.sweeps.ranking import sweep as run_sweep

    source = start(overrides or []) if config is None else Path(config)
    asked, notes = read_saying(source, overrides or [], sweep=True)
    axes: dict[str, Any] = asked.pop("sweep", {})
    for one in over or []:
        section, key, value = overridden(one, "--over", "method.beta=[0.01,0.1]")
        axes[f"{section}.{key}"] = value
    if not_private:
        asked.pop("privacy", None)
    cells = grid(asked, axes)
    notes = [] if quiet else [*notes, *dropped(asked, axes)]
    if not_private and any("privacy" in cell.config for cell in cells):
        raise UserError("--not-private drops [privacy], but the sweep is over settings of it: leave one of them out.")
    if only_list:
        check_settings(cells)
        tell(notes)
        print("\n".join(visible(cell.name) for cell in cells))
        return
    folder = Path("sweeps") / source.stem if out is None else Path(out)
    with tallied(len(cells), line, quiet) as news:
        done = run_sweep(cells, folder, crew(workers), metric, news, notes)
    print(to_json(facts(done)) if as_json else text(done))
    if len(done.failed) == len(cells):
        raise UserError(f"every cell failed; the first: {done.failed[0].error}")
