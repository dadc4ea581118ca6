"""Settings that fit the real federations, one .toml file beside this one for each.

A run without a config begins with them where --set data.source names such a set. A config that names one and leaves
[problem] or [model] out has them from there, and the run folder's config.toml spells them out.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fednormec.config import settings as package
from fednormec.config.schema import Config, Section, overridden, read
from fednormec.config.settings import DEFAULT_NAMES
from fednormec.data.names import FEDERATIONS, built_in_name


def usual_path(source: Any) -> Path | None:
    """Returns the config that fits a source of data; None for one that is no real federation."""
    name = built_in_name(source)
    return Path(__file__).with_name(f"{name}.toml") if name in FEDERATIONS else None


def start(overrides: Iterable[str]) -> Path:
    """Returns the config that a run without one begins with, given what --set says."""
    settings = [overridden(text) for text in overrides]
    sources = [value for section, key, value in settings if (section, key) == ("data", "source")]
    return (usual_path(sources[-1]) if sources else None) or package.QUICKSTART


def with_usual(config: Config) -> Config:
    """Returns the config with the [problem] and the [model] that fit its data, as far as it leaves them open.

    A section that names no constructor is the usual one with some settings changed.
    """
    path = usual_path(config.get("data", {}).get("source"))
    if path is None:
        return config
    usual, given = read(path), config.get("problem", {})
    filled = {**config, "problem": _filled(usual["problem"], given)}
    if filled["problem"].get("name", DEFAULT_NAMES["problem"]) == DEFAULT_NAMES["problem"]:
        filled["model"] = _filled(usual["model"], config.get("model", {}))
    return filled


def _filled(usual: Section, given: Section) -> Section:
    return given if "name" in given else {**usual, **given}
