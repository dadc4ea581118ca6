"""Write what the model of a run says of each example: `fednormec predict`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import Code, DataSettings, Force, Model, Quiet
from fednormec.errors import note, visible

HELP = """Write what a run's model says of each example. A line of a CSV file, or a row of arrays.

X is anything that [data] takes as a source, and need not have targets: a .npz file with x will do, or a table without
the column to predict. Its test set is taken if it brings one, otherwise all of it, in its order; inputs are as they
were in training, and tables and images become numbers by the constants of the run.

Written are the number of the example (from 0) and, by what the model was trained for: the class (with its name, where
that is known) and the probabilities of all classes; yes or no and the probability of yes; the values; for a model that
predicts the next words of a text, the likeliest one at each place. A .npz file has the same as arrays.

\b
Examples:
  fednormec predict runs/quickstart-1 --data mine.npz --out y.csv
  fednormec predict runs/quickstart-1 --data mine.npz --out y.npz
  fednormec predict runs/mine-1 --data load.py:new_ones --out y.csv --force
"""


def predict(
    run: Model,
    data: Annotated[str, typer.Option(metavar="X", help="The data.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="A new file, .csv or .npz.")],
    overrides: DataSettings = None,
    code: Code = ".",
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    from fednormec.results.evaluating import data_settings
    from fednormec.results.predicting import predict as predicted
    from fednormec.runs.progress import counted

    with counted("predicting", quiet) as show:
        done = predicted(run, data, Path(out), data_settings(tuple(overrides or ())), force, code, show)
    print(visible(f"{done.path}: {done.examples:,} examples, for each {done.columns}"))
    for said in done.notes:
        note(f"{said}.")
