"""Strict TOML: a section names a constructor and gives its arguments; an unknown key is an error."""

import difflib
import inspect
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fednormec.errors import UserError

Section = dict[str, Any]
Config = dict[str, Section]

QUICKSTART = Path(__file__).with_name("quickstart.toml")
SECTIONS = ("problem", "data", "model", "local", "method", "participation", "privacy", "run")
DEFAULT_NAMES = {"problem": "neural", "model": "mlp", "local": "gd", "method": "fed_normec", "participation": "full"}


@dataclass(frozen=True)
class PrivacySettings:
    """[privacy]: noise on every coordinate, relative to the bound's radius: of the sum (central) or per message."""

    noise_std: float
    trust: Literal["central", "secagg", "local"] = "central"


@dataclass(frozen=True)
class RunSettings:
    """[run]: how long, from which seed, on what."""

    rounds: int = 100
    seed: int = 0
    evaluate_every: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    workers: int | None = None
    chunk_size: int | None = None


class Call(NamedTuple):
    """A constructor with checked arguments, and those arguments spelled out, defaults included."""

    build: Callable[..., Any]
    arguments: Section

    def __call__(self, *given: Any) -> Any:
        return self.build(*given, **self.arguments)


def read(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The sections of a TOML file with `section.key=value` overrides applied; their content is not yet checked."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the config file {path} cannot be read: {error}.") from error
    try:
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    for name, section in config.items():
        known("section", name, SECTIONS)
        if not isinstance(section, dict):
            raise UserError(f"'{name}' is a section: write [{name}] and its settings below, not {name} = {section!r}.")
    for override in overrides:
        _override(config, override)
    return config


def dump(config: Mapping[str, Section]) -> str:
    """The config as TOML; reading it back gives the same run."""
    parts = []
    for name, section in config.items():
        lines = [f"{key} = {_toml(value)}" for key, value in section.items() if value is not None]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def choose(section: str, settings: Section, table: Mapping[str, Callable[..., Any]], given: int = 0) -> Call:
    """The constructor that a section names, with its arguments checked against its signature.

    The first `given` parameters are supplied by the program, not by the config.
    """
    name = settings.get("name", DEFAULT_NAMES.get(section))
    if not isinstance(name, str):
        raise UserError(f"[{section}] needs a name, one of {', '.join(table)}.")
    known(section, name, table)
    arguments = check(f"[{section}] {name}", {k: v for k, v in settings.items() if k != "name"}, table[name], given)
    return Call(table[name], arguments)


def check(where: str, settings: Section, build: Callable[..., Any], given: int = 0) -> Section:
    """Every argument of `build` by name, of the right type, with its defaults; else a UserError says what is wrong."""
    parameters = dict(list(inspect.signature(build).parameters.items())[given:])
    hints = get_type_hints(build.__init__ if inspect.isclass(build) else build)
    for key in settings:
        known(f"setting in {where}", key, parameters)
    arguments = {}
    for key, parameter in parameters.items():
        if key in settings:
            arguments[key] = _typed(f"{where}: {key}", settings[key], hints[key])
        elif parameter.default is inspect.Parameter.empty:
            raise UserError(f"{where} needs the setting '{key}'.")
        else:
            arguments[key] = parameter.default
    return arguments


def known(what: str, name: str, names: Iterable[str]) -> None:
    """Passes if `name` is one of `names`; otherwise the error says which is nearest."""
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(names) or 'none'}."
        raise UserError(f"unknown {what} '{name}'; {hint}")


def _override(config: Config, text: str) -> None:
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise UserError(f"--set takes section.key=value, such as method.beta=0.1, not '{text}'.")
    known("section", section, SECTIONS)
    if key == "name" and config.get(section, {}).get("name") != value:
        config[section] = {}  # another constructor: the old one's arguments do not apply
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    config.setdefault(section, {})[key] = parsed


def _typed(where: str, value: Any, hint: Any) -> Any:
    """The value in the hinted type: whole numbers pass as floats, lists as sequences; nothing else is converted."""
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


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if c < " " or c in '"\\\x7f' else c for c in value)
        return f'"{escaped}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return repr(value)
