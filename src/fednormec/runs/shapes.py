"""Shapes of a run's model, stored beside it (model.json), so that it can be built again where no data are."""

import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fednormec.data.sources import Kind, Shapes
from fednormec.files import read_json

SHAPES = "model.json"


def about(shapes: Shapes) -> dict[str, Any]:
    """Returns the shapes as JSON can hold them: what every privacy statement takes as public, and no more."""
    return shapes._asdict() | {"kind": shapes.kind._asdict()}


def read_shapes(folder: Path) -> Shapes | None:
    """Returns the shapes that a run folder holds; None if they are missing or damaged."""
    found = read_json(folder / SHAPES)
    try:
        names = None if found["classes"] is None else tuple(found["classes"])
        before = None if found["before"] is None else (tuple(found["before"][0]), found["before"][1])
        shapes = Shapes(
            tuple(found["inputs"]), tuple(found["targets"]), found["outputs"], Kind(**found["kind"]), names, before
        )
    except (IndexError, KeyError, TypeError):
        return None
    return shapes if _whole(shapes) else None


def _whole(shapes: Shapes) -> bool:
    lengths = (*shapes.examples[0], *shapes.inputs, *shapes.targets, shapes.outputs)
    numbers = all(type(length) is int and length >= 1 for length in lengths)
    hints = get_type_hints(Kind).items()
    kinds = all(getattr(k, name) in get_args(hint) for k in (shapes.kind, shapes.examples[1]) for name, hint in hints)
    names = shapes.classes is None or (
        len(shapes.classes) == shapes.outputs and all(isinstance(name, str) for name in shapes.classes)
    )
    return numbers and kinds and names and math.prod(lengths) <= 2**48
