"""Reads the examples that a trained model is asked about, from whatever [data] takes as a source."""

import inspect
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fednormec.config.datasets import PARTITIONS, read_source
from fednormec.config.forms import WHOSE, Form, form_of, read_alike, read_inputs_alike
from fednormec.config.own import SECONDS_TO_LOAD, Loading, is_own
from fednormec.config.schema import Section, check
from fednormec.config.settings import DATA_SETTINGS
from fednormec.data import Examples, FederatedData, Kind, read_folder
from fednormec.data.names import BUILT_IN, built_in_name
from fednormec.data.sources import USUAL, Takeable, given_data, inputs, read_inputs
from fednormec.data.texts import are_texts
from fednormec.errors import UserError


class Asked(NamedTuple):
    """Examples that a model is asked about.

    Attributes:
        examples: the examples.
        is_test: whether they are the test set that their source brings; otherwise they are all that it has.
    """

    examples: Examples
    is_test: bool


class Reading(NamedTuple):
    """Way to read examples for a trained model: as its own were read.

    Attributes:
        kind: kind of what the model was trained with.
        classes: number of classes; None: targets are values.
        trained: [data] of the run, whose constants tables and folders of images are read by.
        raw: whether built-in images are pixels from 0 to 1, for [features], rather than normalised.
    """

    kind: Kind = USUAL
    classes: int | None = None
    trained: Section = {}
    raw: bool = False


def asked_about(source: str, settings: Section, how: Reading, load: Loading) -> Asked:
    """Returns the test set of a source if it brings one, otherwise all of its examples.

    Args:
        source: a built-in set, a file, a folder or code of the user's.
        settings: further settings of [data]: arguments of the user's code, or of a table or a folder of images.
        how: how examples are read.
        load: loads code of the user's.
    """
    source = built_in_name(source)
    if _is_code(source):
        return _of_code(_called(source, settings, load), source, how.kind)
    form = None if source in BUILT_IN else form_of(source)
    if form is not None:
        read = read_alike(source, form, _of_form(form, source, settings, how), how.kind, how.classes)
        return _whole(read.train, read.test)
    _require_nothing_else(source, settings)
    if source not in BUILT_IN and os.path.isdir(source):
        return _of_clients(read_folder(source, None, how.kind))
    return _whole(*read_source(source, how.kind, how.raw)[:2])


def asked_inputs(source: str, settings: Section, how: Reading, load: Loading) -> np.ndarray:
    """Returns the inputs that `asked_about` would; a .npz file or a table need not have targets, nor need code."""
    if _is_code(source):
        found = _called(source, settings, load)
        alone = how.kind.inputs == "texts" and are_texts(found)
        if isinstance(found, tuple | list | dict | Examples | FederatedData) and not alone:
            return _of_code(found, source, how.kind).examples.x
        return inputs(found, source, how.kind)
    if source.endswith(".npz") and not os.path.isdir(source):
        _require_nothing_else(source, settings)
        return read_inputs(source, how.kind)
    form = None if built_in_name(source) in BUILT_IN else form_of(source)
    of_table = None
    if form is not None:
        of_table = read_inputs_alike(source, _of_form(form, source, settings, how), how.kind)
    return asked_about(source, settings, how, load).examples.x if of_table is None else of_table


def _of_form(form: Form, source: str, settings: Section, how: Reading) -> Section:
    """Returns the settings of a table or a folder of images: those of the run, and what is given beside."""
    _require_none_of_training(source, [key for key in settings if key not in form.keys])
    known_keys = {key: how.trained[key] for key in form.keys if key in how.trained and key not in WHOSE}
    return known_keys | settings


def _whole(train: Takeable, test: Takeable | None) -> Asked:
    whole = train if test is None else test
    return Asked(whole if isinstance(whole, Examples) else whole.take(np.arange(len(whole))), test is not None)


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
