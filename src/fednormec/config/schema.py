"""Strict TOML: a section names a constructor and gives its arguments; an unknown key is an error."""

import inspect
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fednormec.config.settings import DATA_SETTINGS, DEFAULT_NAMES, SECTIONS, DataSettings
from fednormec.data.names import BUILT_IN, built_in_name
from fednormec.errors import UserError, known, visible

Section = dict[str, Any]
Config = dict[str, Section]


class Call(NamedTuple):
    """Constructor, and its checked arguments with every default spelled out."""

    build: Callable[..., Any]
    arguments: Section

    def __call__(self, *given: Any) -> Any:
        return self.build(*given, **self.arguments)


def read(path: str | Path, overrides: Iterable[str] = (), sweep: bool = False) -> Config:
    """Returns the sections of a TOML file with `section.key=value` overrides applied; their content is not yet checked.

    A section [sweep], which `fednormec.sweeps.grid` understands, is allowed only with `sweep`.
    """
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
    for section, key, value in sorted((overridden(text) for text in overrides), key=_choices_first):
        _set(config, section, key, value)
    return config


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Returns a copy of the config with some settings changed, each named section.key, as --set would."""
    copied = {name: dict(section) for name, section in config.items()}
    split = [(*_setting(name), value) for name, value in settings.items()]
    for section, key, value in sorted(split, key=_choices_first):
        _set(copied, section, key, value)
    return copied


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
        lines = [f"{_key(key)} = {_toml(value)}" for key, value in section.items() if value is not None]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def choose(section: str, settings: Section, table: Mapping[str, Callable[..., Any]], given: int = 0) -> Call:
    """Returns the constructor that a section names, with its arguments checked against its signature.

    The first `given` parameters are supplied by the program, not by the config.
    """
    name = settings.get("name", DEFAULT_NAMES.get(section))
    if not isinstance(name, str):
        raise UserError(f"[{section}] needs a name, one of {', '.join(table)}.")
    known(section, name, table)
    own = {key: value for key, value in settings.items() if key != "name"}
    return Call(table[name], check(f"[{section}] {name}", own, table[name], given, beside=("name",)))


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
    parameters = _parameters(where, build, given)
    hints = get_type_hints(build.__init__ if inspect.isclass(build) else build)
    for key in settings:
        known(f"setting in {where}", key, [*parameters, *beside])
    arguments = {}
    for key, parameter in parameters.items():
        if key in settings:
            arguments[key] = _typed(f"{where}: {key}", settings[key], hints.get(key, Any))
        elif parameter.default is inspect.Parameter.empty:
            raise UserError(f"{where} needs the setting '{key}'.")
        else:
            arguments[key] = parameter.default
    return arguments


def _parameters(where: str, build: Callable[..., Any], given: int) -> dict[str, inspect.Parameter]:
    """Returns the parameters that a config can set; the program supplies the first `given`."""
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    every = list(inspect.signature(build).parameters.values())
    first, rest = every[:given], every[given:]
    if len(first) < given or any(p.kind not in single for p in first):
        raise UserError(f"{where} must take {given} arguments before its own settings, and not as *args.")
    return {p.name: p for p in rest if p.kind in single}


def _setting(name: str) -> tuple[str, str]:
    section, _, key = name.partition(".")
    known("section", section, SECTIONS)
    return section, key


def _choices_first(override: tuple[str, str, Any]) -> int:
    """Returns a sort key: what chooses a constructor goes before its arguments, in whichever order they were given."""
    return {"name": 0, "source": 0, "partition": 1, "noise_std": 1}.get(override[1], 2)


def _set(config: Config, section: str, key: str, value: Any) -> None:
    """Sets one value; if it chooses another constructor, drops the old one's arguments, which do not apply."""
    settings = config.setdefault(section, {})
    if key == "name" and value != settings.get("name", DEFAULT_NAMES.get(section)):
        settings.clear()
    elif (section, key) == ("data", "source"):
        kept = _kept_from(settings.get("source", DataSettings.source), value, settings)
        config[section] = settings = {k: v for k, v in settings.items() if k in kept}
    elif (section, key) == ("data", "partition") and value != settings.get("partition"):
        config[section] = settings = {k: v for k, v in settings.items() if k in DATA_SETTINGS}
    elif (section, key) == ("privacy", "noise_std"):  # replaces epsilon, unless that is set with it
        settings.pop("epsilon", None)
    settings[key] = value


def _kept_from(old: Any, new: Any, settings: Section) -> set[str]:
    """Returns the settings of [data] that still apply when its source changes."""
    built_in = [built_in_name(source) in BUILT_IN for source in (old, new)]
    if built_in_name(old) == built_in_name(new) or not any(built_in):  # from one file to another the partition stays
        return set(settings)
    if all(built_in) and not settings.get("pool"):  # one brings a test set, another does not
        return set(settings) - {"test_fraction", "classes"}
    return set(settings) if all(built_in) else set()


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


def _typed(where: str, value: Any, hint: Any) -> Any:
    """Returns the value in the hinted type.

    Whole numbers pass as floats, lists as sequences; nothing else is converted.
    """
    if hint is Any:
        return value
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _typed(where, value, next(a for a in args if a is not type(None)))
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where} must be {' or '.join(repr(a) for a in args)}, not {value!r}.")
        return value
    if origin in (tuple, list) or (inspect.isclass(origin) and issubclass(origin, Sequence)):
        if not isinstance(value, list):
            raise UserError(f"{where} must be a list, such as [64, 64], not {value!r}.")
        return tuple(_typed(where, item, args[0]) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise UserError(f"{where} must be {words.get(hint, hint)}, not {value!r}.")
    return value


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return repr(value)


def _escaped(c: str) -> str:
    """Returns a character of a TOML string, escaped where it must be or where nobody would see it."""
    if c not in '"\\' and visible(c) == c:
        return c
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
