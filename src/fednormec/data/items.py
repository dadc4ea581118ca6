"""Items of a torch Dataset, put together into arrays; torch need not be imported for that."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from fednormec.errors import UserError


def is_dataset(value: Any) -> bool:
    """Returns whether this is a torch Dataset."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(value, torch_data.Dataset)


def gathered(dataset: Any, whose: str, texts: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and the targets of all items (x, y), each read once; raises UserError if they do not fit.

    Args:
        dataset: a torch Dataset, or anything else with `len` and an index, or that can be gone through.
        whose: what errors call it.
        texts: whether each x is a text, and not numbers.
    """
    pairs = [_pair(item, f"{whose}, item {i}", texts) for i, item in enumerate(_items(dataset, whose))]
    if not pairs:
        raise UserError(f"{whose}: expected at least one item (x, y), got an empty Dataset; leave it out.")
    for i, pair in enumerate(pairs):
        for name, value, first in zip("xy", pair, pairs[0], strict=True):
            if value.shape != first.shape:
                raise UserError(f"{whose}: {name} has the shape {first.shape} in item 0 and {value.shape} in item {i}; "
                                "make them alike.")  # fmt: skip
    x, y = (np.stack(values) for values in zip(*pairs, strict=True))
    return x, y


def _items(dataset: Any, whose: str) -> Iterator[Any]:
    """Yields the items; whatever the Dataset raises becomes a UserError that says at which item."""
    indexed, count = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"), 0
    try:
        for item in (dataset[i] for i in range(len(dataset))) if indexed else dataset:
            yield item
            count += 1
    except (UserError, MemoryError):
        raise
    except Exception as error:  # whatever a stranger's code raises
        said = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{whose}: reading item {count} raised {type(error).__name__}: {said}.") from error


def _pair(item: Any, where: str, texts: bool) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        got = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
        raise UserError(f"{where}: expected a pair (x, y), got {got}; make the Dataset return pairs.")
    if not texts:
        return _value(item[0], f"{where}, x"), _value(item[1], f"{where}, y")
    if not isinstance(item[0], str):
        raise UserError(f"{where}, x: expected a text, got {type(item[0]).__name__}; convert it in the Dataset.")
    return np.array(item[0], dtype=object), _value(item[1], f"{where}, y")


def _value(value: Any, where: str) -> np.ndarray:
    if hasattr(value, "getbands"):
        raise UserError(f"{where}: expected a tensor or an array, got an image; give the Dataset a transform that "
                        "makes tensors, such as ToTensor of torchvision.")  # fmt: skip
    found = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    if found.dtype.kind not in "biuf":
        raise UserError(f"{where}: expected numbers, got {type(value).__name__}; convert it in the Dataset.")
    return found
