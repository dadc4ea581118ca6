"""Predictions of a run's model, one line for each example, as CSV or as arrays."""

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fednormec.config.asking import asked_inputs
from fednormec.config.assemble import extractor_of
from fednormec.config.own import Loading
from fednormec.config.schema import Section
from fednormec.data import Examples, FederatedData
from fednormec.data.features import Extractor, with_features
from fednormec.data.sources import Shapes
from fednormec.errors import UserError
from fednormec.files import replaced
from fednormec.results.evaluating import BATCH_NORM, has_batch_norm, reading, require_fitting
from fednormec.results.loading import Stored, load, problem_name, require_code, stored

TOGETHER = 256  # examples in a batch
MOST_COLUMNS = 100  # classes whose probabilities have columns of their own
Show = Callable[[int, int], None]
Columns = dict[str, np.ndarray]


class Predictions(NamedTuple):
    """Predictions that were written.

    Attributes:
        path: the file.
        examples: number of examples.
        columns: what is written of each example, in words.
        notes: what else to know.
    """

    path: Path
    examples: int
    columns: str
    notes: tuple[str, ...]


class _Form(NamedTuple):
    """Form of predictions.

    Attributes:
        columns: turns the outputs of a batch into columns by name, one entry for each example.
        said: what they are, in words.
    """

    columns: Callable[[Tensor], Columns]
    said: str


def predict(
    run: str | Path,
    data: str,
    out: Path,
    settings: Section,
    force: bool = False,
    code: str | Path = ".",
    show: Show = lambda done, total: None,
) -> Predictions:
    """Writes what a run's model says of each example.

    Args:
        run: folder of a run that has finished.
        data: whatever [data] takes as a source; targets need not be there.
        out: the file, .csv or .npz, which must be new.
        settings: further settings of [data].
        force: whether the file may be replaced.
        code: folder that files of the user's own code are relative to.
        show: called with the number of examples done, and of all.
    """
    require_writable(out, force, (".csv", ".npz"))
    found = stored(run)
    require_code(found.config, Path(code))
    model, shapes = load(run, code=code), found.shapes
    x = asked_inputs(data, settings, reading(found), Loading())
    require_fitting(shapes, x, data)
    if shapes.before is not None:
        x = _features(x, shapes, extractor_of(found.config, {}, Loading(Path(code))))
    form = _form(found, shapes, _outputs(model, x[:2]), arrays=out.suffix == ".npz")
    batches = _batches(model, x, form, show)
    if out.suffix == ".npz":
        _write_arrays(out, batches)
    else:
        _write_lines(out, batches, shapes)
    return Predictions(out, len(x), form.said, (BATCH_NORM,) if has_batch_norm(model) else ())


def require_writable(out: Path, force: bool, endings: Sequence[str] = ()) -> None:
    """Raises UserError if a file cannot be made: it is there, has another ending, or its folder is not there."""
    if endings and out.suffix not in endings:
        raise UserError(f"--out must end in {' or '.join(endings)}, not '{out.name}'.")
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file with --out.")
    if out.exists() and not force:
        raise UserError(f"{out} exists already: nothing was changed; choose another name, or replace it with --force.")
    if not os.path.isdir(out.parent):
        raise UserError(f"there is no folder {out.parent} for {out.name}: make it first.")


def _features(x: np.ndarray, shapes: Shapes, extractor: Extractor) -> np.ndarray:
    """Returns what [features] makes of inputs, as it did before training."""
    _, kind = shapes.examples
    nobody = Examples(x, np.zeros(len(x)), kind._replace(targets="values"))
    return with_features(FederatedData((nobody,), None, ("nobody",)), extractor).clients[0].x


def _batches(model: nn.Module, x: np.ndarray, form: _Form, show: Show) -> Iterator[Columns]:
    for first in range(0, len(x), TOGETHER):
        yield form.columns(_outputs(model, x[first : first + TOGETHER]))
        show(min(first + TOGETHER, len(x)), len(x))


def _outputs(model: nn.Module, x: np.ndarray) -> Tensor:
    try:
        with torch.no_grad():
            found = model(_tensor(x, model))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"the model does not take these examples: {said}.") from error
    if not isinstance(found, Tensor) or not found.ndim or len(found) != len(x):
        raise UserError(f"the model puts out {type(found).__name__}, not one entry for each example of a batch.")
    return found


def _tensor(x: np.ndarray, model: nn.Module) -> Tensor:
    """Returns inputs in the model's dtype; tokens stay whole numbers."""
    tensor = torch.from_numpy(x)
    return tensor.to(next(model.parameters()).dtype) if tensor.is_floating_point() else tensor


# what is written, by the loss that gave the outputs their meaning


def _form(found: Stored, shapes: Shapes, outputs: Tensor, arrays: bool) -> _Form:
    config = found.config
    loss = config.get("problem", {}).get("loss", "cross_entropy")
    if problem_name(config) == "logistic":
        positive = config["problem"].get("positive", [1])
        return _Form(_yes_or_no, f"yes (1: one of the classes {positive}) or no (0), and the probability of yes")
    if shapes.kind.targets == "classes" and outputs.ndim == 2:
        return _of_classes(outputs.shape[1], loss == "cross_entropy", arrays)
    if shapes.kind.targets == "classes" and outputs.ndim == 3:
        return _of_rows(outputs, loss == "cross_entropy", arrays)
    if loss == "binary_cross_entropy":
        return _Form(_yes_or_no, "yes (1) or no (0), and the probability of yes")
    what = "the value" if loss in ("mse", "huber") else "the output of the model"
    return _Form(lambda outputs: {"value": _numpy(outputs)}, what)


def _of_classes(classes: int, probable: bool, arrays: bool) -> _Form:
    """Returns the form of one class for each example."""
    name, said = ("probability", "probabilities") if probable else ("score", "scores (the loss is your own)")
    few = arrays or classes <= MOST_COLUMNS

    def columns(outputs: Tensor) -> Columns:
        values = outputs.softmax(dim=-1) if probable else outputs
        best = outputs.argmax(dim=-1)
        return {"class": _numpy(best), name: _numpy(values if few else values.gather(1, best[:, None])[:, 0])}

    whose = "of all classes" if few else f"of that class (.npz has those of all {classes:,})"
    return _Form(columns, f"the class, and the {said} {whose}")


def _of_rows(outputs: Tensor, probable: bool, arrays: bool) -> _Form:
    """Returns the form of a class for each of several places, such as the next word after each word of a text."""
    places = outputs.shape[1]

    def columns(outputs: Tensor) -> Columns:
        best = {"class": _numpy(outputs.argmax(dim=-1))}
        values = outputs.softmax(dim=-1) if probable else outputs
        return best | ({"probability" if probable else "score": _numpy(values)} if arrays else {})

    rest = "and all probabilities" if arrays else "(.npz also has the probabilities)"
    return _Form(columns, f"the likeliest class at each of {places} places {rest}")


def _yes_or_no(scores: Tensor) -> Columns:
    scores = scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores
    return {"yes": _numpy((scores > 0).long()), "probability": _numpy(scores.sigmoid())}


def _numpy(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.detach().cpu().numpy()
    return array


# files


def _write_arrays(out: Path, batches: Iterator[Columns]) -> None:
    parts = list(batches)
    whole: Any = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    with replaced(out) as file:
        np.savez(file, **whole)


def _write_lines(out: Path, batches: Iterator[Columns], shapes: Shapes) -> None:
    number = 0
    with replaced(out) as file:
        for columns in batches:
            if shapes.classes is not None and "class" in columns and columns["class"].ndim == 1:
                columns = _with_names(columns, shapes.classes)
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            if not number:
                writer.writerow(["example", *_header(columns)])
            for row in zip(*map(_cells, columns.values()), strict=True):
                writer.writerow([number, *(cell for cells in row for cell in cells)])
                number += 1
            file.write(text.getvalue().encode())


def _with_names(columns: Columns, names: tuple[str, ...]) -> Columns:
    named = np.array([names[k] for k in columns["class"].tolist()])
    return {"class": columns["class"], "name": named} | {k: v for k, v in columns.items() if k != "class"}


def _header(columns: Columns) -> list[str]:
    wide = {
        name: column.reshape(len(column), -1).shape[1] if column.ndim > 1 else 0 for name, column in columns.items()
    }
    return [name if not many else f"{name}_{k}" for name, many in wide.items() for k in range(max(1, many))]


def _cells(column: np.ndarray) -> list[list[str]]:
    """Returns the cells of each example; numbers with as many digits as it takes to read them back as they were."""
    rows = column.reshape(len(column), -1)
    if rows.dtype.kind == "f":
        digits = 9 if rows.dtype == np.float32 else 17
        return [[f"{value:.{digits}g}" for value in row] for row in rows.tolist()]
    return [[str(value) for value in row] for row in rows.tolist()]
