"""The public names: run time and type checker see the same, and every parameter of them is documented."""

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

import pytest

import fednormec as fn
from fednormec.core.problem import Divisible

ROOT = Path(__file__).parent.parent
PARTS = {"data": fn.data, "theory": fn.theory, "models": fn.models}
PUBLIC = {
    "data": {
        "Columns", "Examples", "FederatedData", "Kind", "NpzData", "by_ids", "cifar10", "digits", "dirichlet",
        "fashion_mnist", "federate", "fetch", "from_arrays", "from_dataset", "from_datasets", "from_frame", "hold_out",
        "iid", "read_federation", "read_folder", "read_npz", "read_table", "shards", "split",
    },
    "theory": {
        "Condition", "Constants", "Course", "Guarantee", "Measured", "Noise", "Promise", "Settings", "constants_of",
        "follow", "guarantee", "measure", "plan", "promise", "round_noise",
    },
    "models": {
        "MODELS", "TOKEN_MODELS", "bag", "causal_net", "linear", "mlp", "reset", "resnet20", "small_cnn",
    },
}  # fmt: skip


def homes() -> dict[str, str]:
    """Maps each name that the stub imports to where it imports it from."""
    stub = ast.parse((ROOT / "src" / "fednormec" / "__init__.pyi").read_text(encoding="utf-8"))
    found = [(node.module, alias) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for _, alias in found), "`import X as X` makes a name of a stub public"
    return {alias.name: str(module) for module, alias in found}


def public() -> dict[str, Any]:
    """Maps every public name, those of the parts included, to what it stands for."""
    of_parts = {f"{part}.{name}": getattr(module, name) for part, module in PARTS.items() for name in module.__all__}
    return {name: getattr(fn, name) for name in fn.__all__} | of_parts


# Run time


def test_the_public_names_are_those_of_the_stub_and_nothing_else() -> None:
    assert set(fn.__all__) == {"__version__", *homes()} and len(fn.__all__) == len(set(fn.__all__))
    assert dir(fn) == sorted(fn.__all__)
    with pytest.raises(AttributeError, match="module 'fednormec' has no attribute 'nonsense'"):
        fn.nonsense  # noqa: B018


@pytest.mark.parametrize("name", homes())
def test_a_public_name_is_the_object_of_its_home(name: str) -> None:
    found, home = getattr(fn, name), homes()[name]
    if isinstance(found, ModuleType):
        assert found is import_module(f"{home}.{name}")
        return
    assert found is getattr(import_module(home), name)
    if inspect.isclass(found) or inspect.isfunction(found):
        assert found.__module__ == home, "the stub imports a name from where it is defined"


def test_everything_can_be_imported_at_once() -> None:
    names: dict[str, Any] = {}
    exec("from fednormec import *", names)
    del names["__builtins__"]
    assert names == {name: getattr(fn, name) for name in fn.__all__}


@pytest.mark.parametrize("part", PARTS)
def test_the_public_names_of_a_part(part: str) -> None:
    module, names = PARTS[part], dict[str, Any]()
    assert set(module.__all__) == PUBLIC[part] and list(module.__all__) == sorted(module.__all__)
    exec(f"from {module.__name__} import *", names)
    assert set(names) - {"__builtins__"} == PUBLIC[part]


# The type checker

PLANTED = ("nothing", "untyped")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Maps each public name, and planted ones, to what mypy says of it: a type, or an error."""
    lines = [
        "from typing import Any",
        "import fednormec as fn",
        "nothing: Any = 0",
        "def untyped(x): return x  # type: ignore",
    ]
    asked = {len(lines) + k: name for k, name in enumerate([*public(), "nonsense", *PLANTED], 1)}
    lines += [f"reveal_type({name if name in PLANTED else f'fn.{name}'})" for name in asked.values()]
    snippet = tmp_path_factory.mktemp("types") / "snippet.py"
    snippet.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--no-pretty", "--no-error-summary", "--hide-error-context", "--show-error-codes", "--no-color-output"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(snippet)], cwd=ROOT, env=os.environ | {"MYPYPATH": "src"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r".*?snippet\.py:(\d+)(?::\d+)?: (\w+): (.*)", line)
        assert match, f"{line}\n{done.stderr}"
        number, kind, text = int(match[1]), match[2], match[3]
        revealed = re.fullmatch(r'Revealed type is "(.*)"', text)
        if revealed:
            found.setdefault(asked[number], revealed[1].replace("builtins.", ""))
        else:
            found[asked.get(number, line)] = f"{kind}: {text}"
    return found


def is_typed(text: str) -> bool:
    return not (text.startswith("error: ") or text == "Any" or text.endswith("-> Any"))


def revealed_parameters(text: str) -> list[str]:
    """Names the parameters of `def (x: int, *, y: def (int) -> str =) -> T`."""
    names, depth, word = list[str](), 0, ""
    for c in text.removeprefix("def "):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            break
        if depth == 1 and c in "(,":
            names.append(word)
            word = ""
        else:
            word += c
    heads = (part.partition(":")[0].strip().lstrip("*") for part in [*names, word] if ":" in part)
    return [head for head in heads if head]


def test_the_type_checker_knows_every_public_name(said: dict[str, str]) -> None:
    assert set(said) == {*public(), "nonsense", *PLANTED}
    assert [name for name in public() if not is_typed(said[name])] == []
    assert said["__version__"] == "str" and said["METHODS"].startswith("dict[str, ")
    assert {said[part] for part in PARTS} == {"types.ModuleType"}


def test_the_type_checker_finds_a_name_that_is_not_there(said: dict[str, str]) -> None:
    assert said["nonsense"] == 'error: Module has no attribute "nonsense"  [attr-defined]'
    assert not any(is_typed(said[name]) for name in ("nonsense", *PLANTED))


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("clip", "def (tau: float, radius: float | None =) -> "),
        ("identity", "def () -> "),
        ("smooth_normalize", "def (alpha: float, radius: float =) -> "),
        ("top_k", "def (k: int) -> "),
    ],
)
def test_the_type_checker_knows_whole_signatures(said: dict[str, str], name: str, signature: str) -> None:
    assert said[name].startswith(signature) and said[name].endswith("fallback=fednormec.core.bounds.Bound]")


def test_run_time_and_type_checker_see_the_same_parameters(said: dict[str, str]) -> None:
    functions = {name: thing for name, thing in public().items() if inspect.isfunction(thing)}
    assert {name: revealed_parameters(said[name]) for name in functions} == {
        name: list(inspect.signature(thing).parameters) for name, thing in functions.items()
    }


# The documentation

PROTOCOLS = (fn.Problem, Divisible, fn.Place)  # what they say of a member holds for every class that has all of theirs
NO_FIRST_WORDS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"}


class Undocumented(NamedTuple):
    """What is not documented, and how many parameters were looked at."""

    missing: list[str]
    parameters: int


def ours(thing: Any) -> bool:
    module = str(getattr(thing, "__module__", ""))
    return module == __name__ or module.split(".")[0] == "fednormec"


def members(cls: type) -> dict[str, Any]:
    """Methods and properties that are a class's own, or its bases' of this package."""
    found = {name: member for base in reversed(cls.__mro__) if ours(base) for name, member in vars(base).items()}
    kinds = (FunctionType, property, cached_property, classmethod, staticmethod)
    return {
        name: member
        for name, member in found.items()
        if isinstance(member, kinds) and (not name.startswith("_") or name == "__call__")
    }


def parameters(thing: Any) -> list[str]:
    """Parameters of a function, a method or a constructor but self; the fields of a named tuple or a dataclass."""
    if isinstance(thing, property | cached_property):
        return []
    if not inspect.isclass(thing):
        function = getattr(thing, "__func__", thing)
        return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    if issubclass(thing, tuple):
        return list(thing._fields)  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if field.init]
    return parameters(thing.__init__) if ours(thing.__init__) else []


def written(thing: Any) -> str:
    """The docstring; empty if nobody wrote it (dataclasses and named tuples have one made of their signature)."""
    text = inspect.cleandoc(thing.__doc__ or "")
    return "" if inspect.isclass(thing) and text.startswith(f"{thing.__name__}(") else text


def documented(text: str) -> list[str]:
    """The entries `name: ...` under Args: or Attributes: in Google style."""
    found, within = list[str](), False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            within = line in ("Args:", "Attributes:")
        entry = re.match(r"    (\w+): \S", line)
        if within and entry:
            found.append(entry[1])
    return found


def docstrings(name: str, thing: Any) -> Iterator[tuple[str, list[str], list[str]]]:
    """A function or a class with its members: the name, its docstrings, the parameters that they must document."""
    yield name, [written(thing)], parameters(thing)
    for own, member in members(thing).items() if inspect.isclass(thing) else ():
        models = [p for p in PROTOCOLS if p is not thing and own in members(p) and set(members(p)) <= set(dir(thing))]
        asked = parameters(member)
        texts = [written(member), *(written(members(model)[own]) for model in models)]
        yield f"{name}.{own}", texts, asked if len(asked) > 1 else []  # one is what the method's name speaks of


def undocumented(things: dict[str, Any]) -> Undocumented:
    """Counts what has no docstring, parameters without an entry, and entries without a parameter."""
    missing, count = list[str](), 0
    for name, thing in things.items():
        for path, texts, asked in docstrings(name, thing):
            entries = [entry for text in texts for entry in documented(text)]
            count += len(asked)
            missing += [] if any(texts) else [f"{path} has no docstring"]
            missing += [f"{path}({parameter}) is undocumented" for parameter in asked if parameter not in entries]
            missing += [f"{path} has no {entry}" for entry in documented(texts[0]) if asked and entry not in asked]
    return Undocumented(missing, count)


def functions_and_classes() -> dict[str, Any]:
    return {name: thing for name, thing in public().items() if inspect.isfunction(thing) or inspect.isclass(thing)}


def test_every_parameter_of_a_public_name_is_documented() -> None:
    found = undocumented(functions_and_classes())
    assert found.missing == []
    assert found.parameters > 350


def test_a_docstring_begins_with_one_line_that_is_no_question() -> None:
    wrong = []
    for name, thing in functions_and_classes().items():
        for path, texts, _ in docstrings(name, thing):
            first, second, *_ = [*next(filter(None, texts), "?").splitlines(), ""]
            if second or not first[0].isalpha() or first.split()[0] in NO_FIRST_WORDS:
                wrong.append(f"{path}: {first}")
    assert wrong == [], "one line of purpose, then an empty one; the first word is a verb or a noun"


def planted_function(x: int, y: int) -> int:
    """Adds.

    Args:
        x: one number.
        z: a number that is not there.

    Returns:
        y: the sum, which is no entry.
    """
    return x + y


class PlantedTuple(NamedTuple):
    """Pair.

    Attributes:
        one: the first.
    """

    one: int
    other: int


@dataclasses.dataclass
class PlantedData:
    one: int


class PlantedClass:
    """Class.

    Args:
        one: the first.
    """

    def __init__(self, one: int, other: int) -> None:
        self.one = one

    @property
    def silent(self) -> int:
        return self.one

    def add(self, x: int, y: int) -> int:
        """Adds."""
        return x + y

    def alone(self, x: int) -> int:
        """Returns x; one parameter needs no entry."""
        return x


class PlantedProtocol(Protocol):
    """Protocol: nobody constructs it."""

    def work(self) -> None:
        """Works."""


def test_what_is_not_documented_is_counted() -> None:
    planted = (planted_function, PlantedTuple, PlantedData, PlantedClass, PlantedProtocol)
    found = undocumented({thing.__name__: thing for thing in planted})
    assert found.parameters == 2 + 2 + 1 + 2 + 2
    assert found.missing == [
        "planted_function(y) is undocumented",
        "planted_function has no z",
        "PlantedTuple(other) is undocumented",
        "PlantedData has no docstring",
        "PlantedData(one) is undocumented",
        "PlantedClass(other) is undocumented",
        "PlantedClass.silent has no docstring",
        "PlantedClass.add(x) is undocumented",
        "PlantedClass.add(y) is undocumented",
    ]
