"""Listing of every setting, from the code: types and defaults from signatures, meanings from docstrings."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fednormec.config.signatures import in_words, parameters


class Setting(NamedTuple):
    """Setting of a section.

    Attributes:
        type: what it takes, in words.
        default: its default; None if it can be left out without one, or is required.
        required: whether there is no default.
        meaning: what it is for; empty if its constructor does not say.
    """

    type: str
    default: Any
    required: bool
    meaning: str


def about(build: Callable[..., Any]) -> str:
    """Returns the first line of a constructor's docstring."""
    return (inspect.getdoc(build) or "").partition("\n")[0]


def settings_of(build: Callable[..., Any], given: int = 0) -> dict[str, Setting]:
    """Returns the settings of a constructor, by key.

    Args:
        build: the constructor.
        given: number of first parameters that the program supplies, not the config.
    """
    said = meanings(inspect.getdoc(build) or "")
    return {
        key: Setting(
            in_words(parameter.hint), None if parameter.required else parameter.default, parameter.required,
            said.get(key, "").replace("None: ", "if left out: "),
        )
        for key, parameter in parameters(build, given).items()
    }  # fmt: skip


def meanings(docstring: str) -> dict[str, str]:
    """Returns the entries below Args: and Attributes: of a docstring in Google style, each in one line.

    >>> meanings("Adds.\\n\\nArgs:\\n    x: a number,\\n        any.\\n    y: another.\\n\\nReturns:\\n    z: the sum.")
    {'x': 'a number, any.', 'y': 'another.'}
    """
    found: dict[str, str] = {}
    within, key = False, ""
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            within = line in ("Args:", "Attributes:")
        entry = re.match(r"    (\w+): (\S.*)", line)
        if within and entry:
            key, found[entry[1]] = entry[1], entry[2]
        elif within and key and line.startswith(" " * 8):
            found[key] += f" {line.strip()}"
    return found
