"""Reads the examples that a trained model is asked about, from whatever [data] takes as a source."""

import inspect
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fednormec.config.datasets import PARTITIONS, read_source
from fednormec.config.own import SECONDS_TO_LOAD, Loading, is_own
from fednormec.config.schema import Section, check
from fednormec.config.settings import DATA_SETTINGS
from fednormec.data import Examples, FederatedData, Kind, read_folder
from fednormec.data.names import BUILT_IN, built_in_name
from fednormec.data.sources import given_data, inputs, read_inputs
from fednormec.errors import UserError


class Asked(NamedTuple):
    """Examples that a model is asked about.

    Attributes:
        examples: the examples.
        is_test: whether they are the test set that their source brings; otherwise they are all that it has.
    """

    examples: Examples
    is_test: bool


def asked_about(source: str, settings: Section, kind: Kind, load: Loading, raw: bool = False) -> Asked:
    """Returns the test set of a source if it brings one, otherwise all of its examples.

    Args:
        source: a built-in set, a file, a folder or code of the user's.
        settings: further settings of [data]: the arguments of the user's code.
        kind: kind of the numbers that the model was trained with.
        load: loads code of the user's.
        raw: whether built-in images are pixels from 0 to 1, for [features], rather than normalised.
    """
    source = built_in_name(source)
    if _is_code(source):
        return _of_code(_called(source, settings, load), source, kind)
    _require_nothing_else(source, settings)
    if source not in BUILT_IN and os.path.isdir(source):
        return _of_clients(read_folder(source, None, kind))
    found = read_source(source, kind, raw)
    whole = found.train if found.test is None else found.test
    return Asked(whole if isinstance(whole, Examples) else whole.take(np.arange(len(whole))), found.test is not None)


def asked_inputs(source: str, settings: Section, kind: Kind, load: Loading, raw: bool = False) -> np.ndarray:
    """Returns the inputs that `asked_about` would; a .npz file, and what code of the user's returns, may be x alone."""
    if _is_code(source):
        found = _called(source, settings, load)
        if isinstance(found, tuple | list | dict | Examples | FederatedData):
            return _of_code(found, source, kind).examples.x
        return inputs(found, source, kind)
    if source.endswith(".npz") and not os.path.isdir(source):
        _require_nothing_else(source, settings)
        return read_inputs(source, kind)
    return asked_about(source, settings, kind, load, raw).examples.x


def _is_code(source: str) -> bool:
    return is_own(source) and not os.path.exists(source)


def _called(source: str, settings: Section, load: Loading) -> Any:
    code = load(source, "--data")
    takes = inspect.signature(code.function).parameters
    _require_none_of_training(source, [key for key in settings if key not in takes])
    return code.once(SECONDS_TO_LOAD, **check(f"[data] {source}", settings, code.function))


def _of_code(found: Any, source: str, kind: Kind) -> Asked:
    given = given_data(found, source, kind)
    return _of_clients(given) if isinstance(given, FederatedData) else Asked(given.train, False)


def _of_clients(data: FederatedData) -> Asked:
    if data.test is not None:
        return Asked(data.test, True)
    x, y = (np.concatenate([getattr(one, name) for one in data.clients]) for name in ("x", "y"))
    return Asked(Examples(x, y, data.kind), False)


def _require_nothing_else(source: str, settings: Section) -> None:
    _require_none_of_training(source, settings)
    check(f"[data] {source}", settings, lambda: None)


def _require_none_of_training(source: str, keys: Iterable[str]) -> None:
    dealing = {key for deal in PARTITIONS.values() for key in list(inspect.signature(deal).parameters)[3:]}
    for key in keys:
        if key in dealing or key in DATA_SETTINGS:
            raise UserError(f"data.{key} is for training: a trained model is asked about the test set of {source}, or "
                            f"all of it; leave data.{key} out.")  # fmt: skip
