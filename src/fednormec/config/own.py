"""Code of the user's own, by name: "file.py:function" or "package.module:function".

It is read from this machine's disk and from nowhere else. The digest of every file of it is part of the settings.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednormec.errors import UserError, note

REFERENCE = re.compile(r"(.+):([A-Za-z_]\w*)")
SECONDS = 300.0  # that a function of the user's may take, but for one that loads data
SECONDS_TO_LOAD = 3600.0
SECONDS_IN_SILENCE = 10.0


@dataclass(frozen=True, eq=False)
class Own:
    """Function of the user's own.

    Attributes:
        reference: its name in the config.
        function: the function itself.
        files: digest of every file it is in or imports from beside it, by name.
        folder: where it imports from.
    """

    reference: str
    function: Callable[..., Any]
    files: Mapping[str, str]
    folder: Path

    @property
    def __name__(self) -> str:
        return self.reference.rpartition(":")[2]

    def __call__(self, *given: Any, **settings: Any) -> Any:
        """Calls the function; whatever it raises becomes a UserError that names it."""
        try:
            return self.function(*given, **settings)
        except (UserError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"{self.reference} {_raised(error)}.") from error

    def once(self, seconds: float, *given: Any, **settings: Any) -> Any:
        """Calls the function, which may import what lies beside it; raises UserError if it takes longer than that."""
        with within(self.reference, seconds), _importing_from(self.folder):
            return self(*given, **settings)


class Loading:
    """Loads what a config names of the user's own code, and keeps the digests of its files.

    Args:
        folder: what files are relative to.
    """

    def __init__(self, folder: Path = Path()) -> None:
        self._folder, self.files = folder, dict[str, str]()

    def __call__(self, reference: str, what: str) -> Own:
        """Returns the function; raises UserError if there is none, as `own` does."""
        found = own(reference, what, self._folder)
        self.files |= found.files
        return found


def is_own(name: object) -> bool:
    """Returns whether a name is of the user's own code: file.py:function or package.module:function."""
    return isinstance(name, str) and REFERENCE.fullmatch(name) is not None


def own(reference: str, what: str, folder: Path = Path()) -> Own:
    """Loads a function; raises UserError if there is none.

    Args:
        reference: file.py:function or package.module:function.
        what: what it is for, in errors, such as "model.name".
        folder: what a file's path is relative to.
    """
    found = REFERENCE.fullmatch(reference)
    if found is None:
        raise UserError(f"{what} must be file.py:function or package.module:function, not '{reference}'.")
    where, name = found.groups()
    with within(f"{where}, which {what} names,", SECONDS):
        module, file, root = (_from_file if where.endswith(".py") else _from_package)(where, what, folder)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [(key, value) for key, value in vars(module).items() if inspect.isfunction(value)]
        there = [key for key, value in functions if value.__module__ == module.__name__ and key[0] != "_"]
        has = f"it has {', '.join(there)}" if there else "it has no function"
        raise UserError(f"{what}: there is no function '{name}' in {where}; {has}.")
    prefix = os.path.dirname(where) if where.endswith(".py") else ""
    files = {os.path.join(prefix, path.relative_to(root).as_posix()): _digest(path) for path in _sources(file, root)}
    return Own(reference, function, files, root)


def require_agreed(code: Mapping[str, str], agreed: Mapping[str, str]) -> None:
    """Raises UserError if a file of the user's code is not the one that was agreed on.

    Args:
        code: digests of the files here, by name.
        agreed: digests as [code] has them.
    """
    for name, digest in agreed.items():
        if name not in code:
            raise UserError(f"[code] names {name}, but the settings do not use it: leave it out.")
        if code[name] != digest:
            raise UserError(f"{name} is not the file that the settings were made with ([code] has its digest): put "
                            "that one back, or leave [code] out to begin anew.")  # fmt: skip
    missing = sorted(code.keys() - agreed.keys())
    if missing:
        raise UserError(f"{missing[0]} is used, but [code] has no digest of it: the code is not what it was.")


def require_made_with(code: Mapping[str, str], folder: Path) -> None:
    """Raises UserError if a file of the user's code in a folder is not the one that a run was made with.

    Nothing of the file is run. A file that is not there is no matter of this.

    Args:
        code: digests of the files as the run's [code] has them.
        folder: where the files are now.
    """
    for name, digest in code.items():
        if (folder / name).is_file() and _digest(folder / name) != digest:
            raise UserError(f"{folder / name} is not the file that the run was made with (its config.toml has the "
                            "digest under [code]): put that one back.")  # fmt: skip


def check_digests(section: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the digests of [code]; raises UserError if one is none."""
    for name, digest in section.items():
        if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            raise UserError(f"[code] {name} must be a SHA-256 digest, 64 hexadecimal digits, not {digest!r}.")
    return section


@contextmanager
def within(what: str, seconds: float) -> Iterator[None]:
    """Raises UserError if something of the user's takes longer, and says after some seconds that it is waited for.

    Only the main thread can be interrupted; elsewhere there is no limit.
    """
    waiting = threading.Timer(min(SECONDS_IN_SILENCE, seconds), lambda: note(f"waiting for {what.rstrip(',')} ..."))
    waiting.daemon = True
    limited = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def over(number: int, frame: object) -> None:
        raise UserError(f"{what} has not come to an end in {seconds:g} seconds.")

    before = signal.signal(signal.SIGALRM, over) if limited else None
    waiting.start()
    try:
        if limited:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        waiting.cancel()
        if limited:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Lets code import what lies in the folder, as if it were run there; these modules are not kept.

    Two files in different folders may import two that have the same name. And a class of a module that is not kept can
    be sent to a process that could not import it: by its content.
    """
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).resolve().is_relative_to(folder) and "site-packages" not in file:
                del sys.modules[name]


def _from_file(where: str, what: str, folder: Path) -> tuple[Any, Path, Path]:
    file = (folder / where).resolve()
    if not file.is_file():
        raise UserError(f"{what}: there is no file {where}.")
    name = f"own_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importing_from(file.parent):
        sys.modules[name] = module  # where dataclasses look for it
        try:
            spec.loader.exec_module(module)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"{what}: {where} cannot be loaded: it {_raised(error)}.") from error
    return module, file, file.parent


def _from_package(where: str, what: str, folder: Path) -> tuple[Any, Path, Path]:
    try:
        with _importing_from(folder.resolve()):
            module = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {where} cannot be imported: it {_raised(error)}.") from error
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        raise UserError(f"{what}: {where} has no Python file, so that nobody could tell which code it is.")
    root = Path(file).resolve().parent
    for _ in where.split(".")[1:] if Path(file).stem != "__init__" else where.split("."):
        root = root.parent
    return module, Path(file).resolve(), root


def _raised(error: BaseException) -> str:
    said = " ".join(str(error).split()).rstrip(".")
    return f"raised {type(error).__name__}" + (f": {said}" if said else "")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sources(file: Path, root: Path) -> list[Path]:
    """Returns the file, and those under the root that it imports, or that these import; of installed packages itself.

    What is imported in other ways than by an import statement is not seen.
    """
    if "site-packages" in file.parts:
        return [file]
    packages = [folder / "__init__.py" for folder in file.parents if folder != root and folder.is_relative_to(root)]
    found, left = set[Path](), [file, *(path for path in packages if path.is_file())]
    while left:
        at = left.pop()
        if at not in found:
            found.add(at)
            left += _imported(at, root)
    return sorted(found)


def _imported(file: Path, root: Path) -> list[Path]:
    names = list[tuple[Path, list[str]]]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names += [(root, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = root if not node.level else file.parents[node.level - 1]
            parts = node.module.split(".") if node.module else []
            names += [(base, parts), *((base, [*parts, alias.name]) for alias in node.names)]
    found = []
    for base, parts in names:
        for end in range(1, len(parts) + 1):
            stem = base.joinpath(*parts[:end])
            found += [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    return [path for path in found if path.is_relative_to(root)]
