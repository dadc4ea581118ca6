"""Turns a config's lists into cells: every combination, each with its own name and, if it has noise, its own noise."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fednormec.config.schema import Config, Section, changed, changed_saying
from fednormec.errors import UserError
from fednormec.sweeps.pool import Cell, with_own_noise

LONGEST_NAME = 120


class _Option(NamedTuple):
    settings: dict[str, Any]
    shown: Any


def grid(config: Config, axes: Section) -> list[Cell]:
    """Returns a cell for every combination of the axes' values, applied to the config.

    An axis is a setting with a list of values, section.key = [...], or a free name with a list of tables, each of which
    sets several settings at once and may have a name of its own.
    """
    return [
        with_own_noise(Cell(file_name(shown), shown, changed(config, settings)))
        for shown, settings in _combinations(axes)
    ]


def dropped(config: Config, axes: Section) -> list[str]:
    """Returns, in a sentence each, which settings of the config the cells of the grid drop; no sentence comes twice."""
    said = (changed_saying(config, settings, "[sweep]").dropped for _, settings in _combinations(axes))
    return list(dict.fromkeys(itertools.chain.from_iterable(said)))


def label(settings: Mapping[str, Any]) -> str:
    """Returns the settings in one line, each with as little of its name as tells it apart."""
    lasts = [_last(key) for key in settings]
    keys = [key if lasts.count(_last(key)) > 1 else _last(key) for key in settings]
    return "_".join(f"{key}={plain(value)}" for key, value in zip(keys, settings.values(), strict=True))


def file_name(settings: Mapping[str, Any]) -> str:
    """Returns the label as a folder's name, which differs wherever the labels do."""
    whole = label(settings)
    name = re.sub(r"[^\w.=,+-]+", "-", whole, flags=re.ASCII).strip("-.")
    if name == whole and len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.blake2b(whole.encode(), digest_size=4).hexdigest()}"


def plain(value: Any) -> str:
    """Returns a value in a few characters; different values look different.

    >>> plain(0.1), plain(1e-05), plain(0.1234567), plain([64, 32]), plain("iid")
    ('0.1', '1e-05', '0.1234567', '64x32', 'iid')
    """
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return ("x".join(map(plain, value)) or "none") if isinstance(value, list) else str(value)


def _combinations(axes: Section) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields what is shown of each combination, and what it sets."""
    lists = dict(_axes(axes))
    if not lists:
        raise UserError("there is nothing to sweep over: give [sweep] a setting with a list, such as "
                        "method.beta = [0.01, 0.1], or use --over.")  # fmt: skip
    for choice in itertools.product(*lists.values()):
        yield dict(zip(lists, (option.shown for option in choice), strict=True)), _settings(choice)


def _axes(section: Section) -> Iterator[tuple[str, list[_Option]]]:
    for name, values in _flat(section):
        if not isinstance(values, list) or not values:
            raise UserError(f"[sweep] {name} must be a list of at least one value, not {values!r}.")
        tables = [isinstance(value, dict) for value in values]
        if "." in name and not any(tables):
            yield name, [_Option({name: value}, value) for value in values]
        elif "." not in name and all(tables):
            yield name, [_table(name, value) for value in values]
        else:
            raise UserError(f"[sweep] {name}: a setting, such as method.beta, takes a list of values; a name without a "
                            "dot takes a list of tables, each with its settings.")  # fmt: skip


def _table(axis: str, table: Section) -> _Option:
    settings = dict(_flat({key: value for key, value in table.items() if key != "name"}))
    if not settings:
        raise UserError(f"[sweep] {axis}: every table must set something, such as method.beta = 0.1.")
    odd = next((key for key in settings if "." not in key), None)
    if odd is not None:
        raise UserError(f"[sweep] {axis}: '{odd}' is no setting: write section.key, such as method.beta.")
    unnamed = ",".join(f"{_last(key)}={plain(value)}" for key, value in settings.items())
    return _Option(settings, str(table.get("name", unnamed)))


def _settings(choice: tuple[_Option, ...]) -> dict[str, Any]:
    keys = [key for option in choice for key in option.settings]
    if "privacy.stream" in keys:
        raise UserError("[sweep] privacy.stream is not for you to sweep over: every cell gets a stream of its own.")
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UserError(f"[sweep] sets {twice} in two lists at once: leave it in one of them.")
    return {key: value for option in choice for key, value in option.settings.items()}


def _flat(section: Section, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _last(key: str) -> str:
    return key.rpartition(".")[2]
