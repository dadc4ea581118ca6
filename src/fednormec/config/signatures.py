"""Signatures of constructors: which parameters a config supplies, of which types, and what that is in words."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fednormec.errors import UserError

WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class Parameter(NamedTuple):
    """Parameter of a constructor: its type hint, and its default."""

    hint: Any
    default: Any

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is inspect.Parameter.empty


def parameters(build: Callable[..., Any], given: int = 0, where: str = "") -> dict[str, Parameter]:
    """Returns the parameters of a constructor that a config supplies, by name; one without a hint takes anything.

    Args:
        build: the constructor, ours or the user's own.
        given: number of first parameters that the program supplies.
        where: the place that errors name.
    """
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    every = list(inspect.signature(build).parameters.values())
    if len(every) < given or any(parameter.kind not in single for parameter in every[:given]):
        raise UserError(f"{where} must take {given} arguments before its own settings, and not as *args.")
    hints = get_type_hints(build.__init__ if inspect.isclass(build) else build)
    found = [parameter for parameter in every[given:] if parameter.kind in single]
    return {one.name: Parameter(hints.get(one.name, Any), one.default) for one in found}


def typed(where: str, value: Any, hint: Any) -> Any:
    """Returns the value in the hinted type; raises UserError, which says where, if it is of another.

    Whole numbers pass as floats, lists as sequences, tables as mappings; nothing else is converted.
    """
    if hint is Any:
        return value
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return typed(where, value, _arm(where, value, _arms(args)))
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where} must be {' or '.join(repr(a) for a in args)}, not {value!r}.")
        return value
    if _is_list(origin):
        if not isinstance(value, list):
            raise UserError(f"{where} must be {_example(hint)}, not {value!r}.")
        return tuple(typed(where, item, args[0]) for item in value)
    if _is_table(origin):
        if not isinstance(value, dict):
            raise UserError(f"{where} must be {_example(hint)}, not {value!r}.")
        return {key: typed(f"{where}.{key}", item, args[1]) for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{where} must be {WORDS.get(hint, hint)}, not {value!r}.")
    return value


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a parameter with this hint takes the value."""
    try:
        typed("", value, hint)
    except UserError:
        return False
    return True


def in_words(hint: Any) -> str:
    """Returns what a parameter with this hint takes.

    >>> in_words(int | None), in_words(Literal["ram", "file"]), in_words(Sequence[float])
    ('a whole number', 'one of "ram", "file"', 'a list of numbers')
    """
    if hint is Any:
        return "anything"
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(in_words, _arms(args)))
    if origin is Literal:
        return "one of " + ", ".join(f'"{word}"' for word in args) if len(args) > 1 else f'"{args[0]}"'
    if _is_list(origin):
        items = in_words(args[0])
        if get_origin(args[0]) is Literal:
            return f"a list of {items.removeprefix('one of ')}"
        return f"a list, each {items}" if " or " in items else f"a list of {items.removeprefix('a ')}s"
    if _is_table(origin):
        return f"a table, each value {in_words(args[1])}"
    return WORDS.get(hint, str(hint))


def _arms(hints: tuple[Any, ...]) -> list[Any]:
    """Returns the types of a union but for None."""
    return [hint for hint in hints if hint is not type(None)]


def _arm(where: str, value: Any, hints: Sequence[Any]) -> Any:
    """Returns the type of several that the value is meant in: a table, a list, a text, a number."""
    shape = float if type(value) is int else type(value)
    fitting = [hint for hint in hints if _shape_of(hint) is shape] or [hint for hint in hints if len(hints) == 1]
    if not fitting:
        raise UserError(f"{where} must be {' or '.join(map(_example, hints))}, not {value!r}.")
    return fitting[0]


def _shape_of(hint: Any) -> Any:
    """Returns the Python type of what TOML has for this hint; float for all numbers."""
    origin = get_origin(hint)
    if origin is Literal:
        return type(get_args(hint)[0])
    if origin is None:
        return float if hint is int else hint
    return dict if _is_table(origin) else list


def _example(hint: Any) -> str:
    """Returns what a parameter with this hint takes, by an example where that is shorter."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(repr(word) for word in args)
    if _is_table(origin):
        return "a table, such as {age = [40, 20]}"
    if origin is not None:
        return 'a list, such as ["a", "b"]' if str in (args[0], *get_args(args[0])) else "a list, such as [64, 64]"
    return WORDS.get(hint, str(hint))


def _is_table(origin: Any) -> bool:
    return inspect.isclass(origin) and issubclass(origin, Mapping)


def _is_list(origin: Any) -> bool:
    return origin in (tuple, list) or (inspect.isclass(origin) and issubclass(origin, Sequence))
