"""Say how good the model of a run is: `fednormec evaluate`."""

from typing import Annotated

import typer

from fednormec.cli.options import AsJson, Code, DataSettings, Model
from fednormec.errors import note

HELP = """Say how good the model of a run is. On its own test set, or on your data.

X is anything that [data] takes as a source: a built-in set, a .npz file with x and y, a table, a folder, or your own
code. Its test set is taken if it brings one, otherwise all of it; tables and images become numbers by the constants of
the run. Without --data the run's own test set is made again from its config and seed, and the figures are those that it
recorded.

The model is as private as the run says. A figure on it is public if the data are; on clients' own data it is not.

\b
Examples:
  fednormec evaluate runs/quickstart-1
  fednormec evaluate runs/quickstart-1 --data mine.npz
  fednormec evaluate runs/quickstart-1 --data mine.npz --metric accuracy --metric auc --json
  fednormec evaluate runs/mine-1 --data load.py:tests --set data.rows=100      your own code, with an argument
"""


def evaluate(
    run: Model,
    data: Annotated[str | None, typer.Option(metavar="X", help="The data.", show_default="the run's test set")] = None,
    overrides: DataSettings = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="A figure; may be repeated.", show_default="those of the run")
    ] = None,
    code: Code = ".",
    as_json: AsJson = False,
) -> None:
    from fednormec.files import to_json
    from fednormec.results.evaluating import evaluate as evaluated

    found = evaluated(run, data, tuple(overrides or ()), tuple(metric or ()), code)
    print(to_json(found.facts()) if as_json else found.text())
    for said in found.notes:
        note(f"{said}.")
