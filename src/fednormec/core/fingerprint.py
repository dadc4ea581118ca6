"""Fingerprint of values and functions: for the same content the same in every process, for other content another.

Of a function it takes in what it computes: its bytecode, its defaults, what it closes over, and the globals that it
reads. Functions and classes of Python, of installed packages and of this one count by their names alone, so that an
update of these is not taken for another method; the bytecode of all others is that of one version of Python.
"""

import dis
import functools
import hashlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

PACKAGE = Path(__file__).parents[1]
INSTALLED = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
Part = str | bytes | memoryview
SIZES = ("num_clients", "dim", "tile")  # what every problem has
ADDRESS = " at 0x"  # what a repr says that is another in every process


def fingerprint(*values: object) -> str:
    """Returns a SHA-256 of the values, functions among them.

    >>> def scaled(by):
    ...     return lambda x: by * x
    >>> fingerprint(scaled(2)) == fingerprint(scaled(2)), fingerprint(scaled(2)) == fingerprint(scaled(3))
    (True, False)
    """
    return _Reader().of(list(values)).hex()


class _Reader:
    """Reader of values within each other; each is read once."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        self._kept: list[object] = []  # an id is one object's as long as that is there

    def of(self, value: Any) -> bytes:
        """Returns the digest of a value."""
        if isinstance(value, np.generic):
            return self.of(value.item())
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return _digest(type(value).__name__, repr(value))
        if id(value) not in self._known:
            self._known[id(value)] = b"within itself"
            self._kept.append(value)
            self._known[id(value)] = _digest(*self._parts(value))
        return self._known[id(value)]

    def _parts(self, value: Any) -> Iterator[Part]:
        """Yields what a value consists of."""
        for kind, read in self._readers.items():
            if isinstance(value, kind):
                yield kind.__name__
                yield from read(value)
                return
        yield from self._object(value)

    @functools.cached_property
    def _readers(self) -> dict[type, Callable[[Any], Iterator[Part]]]:
        return {
            Tensor: self._tensor,
            np.ndarray: self._array,
            tuple: self._sequence,
            list: self._sequence,
            set: self._set,
            frozenset: self._set,
            Mapping: lambda value: (self.of(part) for pair in value.items() for part in pair),
            FunctionType: self._function,
            MethodType: lambda value: map(self.of, (value.__func__, value.__self__)),
            functools.partial: lambda value: map(self.of, (value.func, value.args, value.keywords)),
            staticmethod: lambda value: iter([self.of(value.__func__)]),
            classmethod: lambda value: iter([self.of(value.__func__)]),
            property: lambda value: map(self.of, (value.fget, value.fset)),
            BuiltinFunctionType: lambda value: iter([f"{value.__module__}.{value.__qualname__}"]),
            ModuleType: lambda value: iter([value.__name__]),
            CodeType: self._code,
            type: self._class,
            threading.local: lambda value: iter(()),
        }

    def _tensor(self, value: Tensor) -> Iterator[Part]:
        yield f"{value.dtype} {tuple(value.shape)}"
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data

    def _array(self, value: np.ndarray) -> Iterator[Part]:
        yield f"{value.dtype.str} {value.shape}"
        if value.dtype.hasobject:
            yield self.of(value.tolist())
        else:
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data

    def _sequence(self, value: Any) -> Iterator[Part]:
        yield type(value).__name__
        yield from map(self.of, value)

    def _set(self, value: Any) -> Iterator[Part]:
        yield from sorted(map(self.of, value))

    def _function(self, value: FunctionType) -> Iterator[Part]:
        if _installed(value.__code__.co_filename):
            yield f"{value.__module__}.{value.__qualname__}"
        else:
            yield from self._code(value.__code__)
            for name in sorted(set(_globals(value.__code__)) & set(value.__globals__)):
                yield name
                yield self.of(value.__globals__[name])
        yield self.of((value.__defaults__, value.__kwdefaults__))
        for cell in value.__closure__ or ():
            try:
                yield self.of(cell.cell_contents)
            except ValueError:
                yield "empty"

    def _code(self, value: CodeType) -> Iterator[Part]:
        """Yields what a code computes, without where it stands."""
        yield value.co_code
        yield self.of((value.co_names, value.co_varnames, value.co_freevars, value.co_flags))
        yield from map(self.of, value.co_consts)

    def _class(self, value: type) -> Iterator[Part]:
        yield f"{value.__module__}.{value.__qualname__}"
        if _installed(_file_of(value)):
            return
        yield from map(self.of, value.__bases__)
        for name, member in sorted(vars(value).items()):
            if not name.startswith("__") or isinstance(member, FunctionType):
                yield name
                yield self.of(member)

    def _object(self, value: Any) -> Iterator[Part]:
        """Yields the type and what is known of an object: what it wraps, its attributes, else how it describes itself.

        What describes itself by an address only, such as a lock, counts by its type. A problem counts by its type and
        sizes: a method may read these, and its fingerprint must not follow from clients' data.
        """
        yield self.of(type(value))
        if all(hasattr(value, name) for name in SIZES):
            yield from (self.of(getattr(value, name)) for name in SIZES)
        elif hasattr(value, "__wrapped__"):
            yield self.of(value.__wrapped__)
        elif hasattr(value, "__dict__"):
            yield self.of(vars(value))
        elif ADDRESS not in repr(value):
            yield repr(value)


def _digest(*parts: Part) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.digest()


def _globals(code: CodeType) -> Iterator[str]:
    """Yields the names of the globals that a code and those within it read."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in GLOBALS)
    for within in code.co_consts:
        if isinstance(within, CodeType):
            yield from _globals(within)


def _installed(file: str) -> bool:
    """Returns whether a file is of Python, of an installed package or of this one."""
    return file.startswith((*INSTALLED, f"{PACKAGE}/", "<frozen"))


def _file_of(value: type) -> str:
    """Returns the file that a class is from; an empty text if it is from none."""
    functions = (member for member in vars(value).values() if isinstance(member, FunctionType))
    if (first := next(functions, None)) is not None:
        return first.__code__.co_filename
    module = sys.modules.get(value.__module__)
    return getattr(module, "__file__", None) or ("" if value.__module__ == "__main__" else INSTALLED[0])
