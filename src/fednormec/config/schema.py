"""Strict TOML: a section names a constructor and gives its arguments; an unknown key is an error."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.settings import BESIDE, DEFAULT_NAMES, SECTIONS, DataSettings
from fednormec.config.signatures import parameters, typed
from fednormec.data.names import FEDERATIONS, built_in_name
from fednormec.errors import UserError, known, visible

Section = dict[str, Any]
Config = dict[str, Section]


class Call(NamedTuple):
    """Constructor, and its checked arguments with every default spelled out."""

    build: Callable[..., Any]
    arguments: Section

    def __call__(self, *given: Any) -> Any:
        return self.build(*given, **self.arguments)


class Changed(NamedTuple):
    """Config with some settings changed.

    Attributes:
        config: the sections.
        dropped: in a sentence each, the settings that a constructor of another name does not take.
    """

    config: Config
    dropped: list[str]


def read(path: str | Path, overrides: Iterable[str] = (), sweep: bool = False) -> Config:
    """Returns the sections of a TOML file with `section.key=value` overrides applied; their content is not yet checked.

    A section [sweep], which `fednormec.sweeps.grid` understands, is allowed only with `sweep`.
    """
    return read_saying(path, overrides, sweep).config


def read_saying(path: str | Path, overrides: Iterable[str] = (), sweep: bool = False) -> Changed:
    """Returns what `read` does, and which settings of the file the overrides drop."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the config file {path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    try:
        config = _loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    for name, section in config.items():
        if name == "sweep" and not sweep:
            raise UserError(f"{path} has a [sweep], which makes it many runs: fednormec sweep {path}")
        known("section", name, [*SECTIONS, "sweep"] if sweep else SECTIONS)
        if not isinstance(section, dict):
            raise UserError(f"'{name}' is a section: write [{name}] and its settings below, not {name} = {section!r}.")
    return _with(config, map(overridden, overrides), "--set")


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Returns a copy of the config with some settings changed, each named section.key, as --set would."""
    return changed_saying(config, settings, "").config


def changed_saying(config: Config, settings: Mapping[str, Any], option: str) -> Changed:
    """Returns what `changed` does, and which settings of the config that drops; the sentences begin with `option`."""
    return _with(config, ((*_setting(name), value) for name, value in settings.items()), option)


def overridden(text: str, option: str = "--set", example: str = "method.beta=0.1") -> tuple[str, str, Any]:
    """Returns section, key and value of section.key=value, the value in TOML or plain text.

    Args:
        text: what the user gave.
        option: the option that errors name.
        example: the example that errors give.
    """
    path, equals, value = text.partition("=")
    if not (equals and path.strip().partition(".")[2]):
        raise UserError(f"{option} takes section.key=value, such as {example}, not '{text}'.")
    section, key = _setting(path.strip())
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise UserError(f"{option} takes text in UTF-8, not '{text}'.")
    try:
        return section, key, _loads(f"value = {value}")["value"]
    except _TooLarge as error:
        raise UserError(f"{option} {text}: {error}; write it as 1e20, say, where any number will do.") from None
    except ValueError:
        return section, key, value.strip()


def dump(config: Mapping[str, Section]) -> str:
    """Returns the config as TOML; reading it back gives the same run."""
    parts = []
    for name, section in config.items():
        lines = [f"{_key(key)} = {as_toml(value)}" for key, value in section.items() if value is not None]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def as_toml(value: Any) -> str:
    """Returns a value as TOML spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(as_toml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {as_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)


def choose(section: str, settings: Section, table: Mapping[str, Callable[..., Any]], given: int = 0) -> Call:
    """Returns the constructor that a section names, with its arguments checked against its signature.

    The first `given` parameters are supplied by the program, not by the config.
    """
    name = settings.get("name", DEFAULT_NAMES.get(section))
    if not isinstance(name, str):
        raise UserError(f"[{section}] needs a name, one of {', '.join(table)}.")
    known(section, name, table)
    own = {key: value for key, value in settings.items() if key != "name"}
    beside = ("name", *(parameters(BESIDE[section]) if section in BESIDE else ()))
    return Call(table[name], check(f"[{section}] {name}", own, table[name], given, beside))


def check(
    where: str, settings: Section, build: Callable[..., Any], given: int = 0, beside: Iterable[str] = ()
) -> Section:
    """Returns all arguments of `build` by name, defaults included; raises UserError if one is wrong or not of its type.

    Args:
        where: the place that errors name.
        settings: the arguments that the config gives.
        build: the constructor.
        given: number of first parameters that the program supplies.
        beside: keys of the section that are not `build`'s and were looked at before.
    """
    taken = parameters(build, given, where)
    for key in settings:
        known(f"setting in {where}", key, [*taken, *beside])
    arguments = {}
    for key, parameter in taken.items():
        if key in settings:
            arguments[key] = typed(f"{where}: {key}", settings[key], parameter.hint)
        elif parameter.required:
            raise UserError(f"{where} needs the setting '{key}'.")
        else:
            arguments[key] = parameter.default
    return arguments


def _setting(name: str) -> tuple[str, str]:
    section, _, key = name.partition(".")
    known("section", section, SECTIONS)
    return section, key


def _with(config: Config, settings: Iterable[tuple[str, str, Any]], option: str) -> Changed:
    """Returns a copy of the config with these settings; a constructor of another name keeps all that it takes, too."""
    new = {name: dict(section) for name, section in config.items()}
    given: Config = {}
    for section, key, value in sorted(settings, key=_choices_first):
        given.setdefault(section, {})[key] = value
    dropped = []
    for section in _of_another_source(new, given):
        del new[section]
        source = given["data"]["source"]
        dropped.append(f"{option} data.source={source} drops [{section}], which was for other data than {source}.")
    for section, own in given.items():
        kept, sentence = _kept(section, new.get(section, {}), own, option)
        new[section] = kept | own
        dropped += [sentence] if sentence else []
    return Changed(new, dropped)


def _of_another_source(config: Config, given: Config) -> list[str]:
    """Returns the sections that fit the old source of data alone, where a real federation takes or loses its place."""
    old, new = (_chosen("data", one.get("data", {}), "source") for one in (config, given))
    if "source" not in given.get("data", {}) or built_in_name(old) == built_in_name(new):
        return []
    real = any(built_in_name(source) in FEDERATIONS for source in (old, new))
    return [name for name in ("problem", "model") if real and name in config and "name" not in given.get(name, {})]


def _choices_first(override: tuple[str, str, Any]) -> bool:
    """Returns a sort key: what chooses a constructor stands before its arguments, whichever was given first."""
    section, key, _ = override
    return key not in _choices(section)


def _choices(section: str) -> tuple[str, ...]:
    """Returns the keys of a section that choose which other keys it has."""
    return {"data": ("source", "partition"), "method": ("name", "bound")}.get(section, ("name",))


def _kept(section: str, old: Section, given: Section, option: str) -> tuple[Section, str]:
    """Returns what stays of a section when `given` is set, and in a sentence what does not; "" if all stays."""
    if section == "privacy" and "noise_std" in given:  # replaces epsilon, unless that is set with it
        return {key: value for key, value in old.items() if key != "epsilon"}, ""
    chosen = {key: given[key] for key in _choices(section) if key in given and given[key] != _chosen(section, old, key)}
    if not old or not chosen:
        return old, ""
    from fednormec.config.keeping import lost  # knows all constructors, and so imports all of them

    keys, why = lost(section, old, given)
    kept = {key: value for key, value in old.items() if key not in keys}
    return kept, _said(option, section, chosen, keys, why) if keys else ""


def _said(option: str, section: str, chosen: Section, keys: list[str], why: str) -> str:
    """Returns which settings a choice drops, in a sentence."""
    choices = " ".join(f"{option} {section}.{key}={value}" for key, value in chosen.items())
    *others, last = (f"{section}.{key}" for key in keys)
    names = f"{', '.join(others)} and {last}" if others else last
    chooser = " with ".join(str(value) for value in chosen.values())
    return f"{choices} drops {names}, which {chooser} does not take{f': {why}' if why else ''}."


def _chosen(section: str, settings: Section, key: str) -> Any:
    default = DEFAULT_NAMES.get(section) if key == "name" else DataSettings.source if key == "source" else None
    return settings.get(key, default)


class _TooLarge(ValueError):
    """Whole number that TOML has no room for."""


def _loads(text: str) -> dict[str, Any]:
    """Parses TOML; raises ValueError if anything cannot be used: TOML's whole numbers have 64 bits."""
    try:
        content = tomllib.loads(text)
        if _too_large(content):
            raise _TooLarge("a whole number in it does not fit 64 bits")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return content


def _too_large(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_too_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else as_toml(name)


def _escaped(c: str) -> str:
    """Returns a character of a TOML string, escaped where it must be or where nobody would see it."""
    if c not in '"\\' and visible(c) == c:
        return c
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
