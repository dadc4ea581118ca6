"""The rooms of the house stand in one order, and no room uses one below it (docs/design.md); nor do tests use tests."""

import ast
import inspect
from collections.abc import Iterator

import pytest
from paths import ROOT

import fednormec as fn
from fednormec.engine import clients, simulation
from fednormec.federation.wire import Wire

HOUSE = ROOT / "src" / "fednormec"
BY_NAME = ("import_module", "__import__")
ORDER = (
    "errors", "files", "drawing", "core", "algorithms", "problems", "data", "secagg", "privacy", "engine", "config",
    "theory", "runs", "results", "sweeps", "python", "audit", "federation", "cli",
)  # fmt: skip


def imported(source: str) -> Iterator[str]:
    """Every module of ours that a source imports anywhere: in functions, under TYPE_CHECKING and by name, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fednormec")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute, so that a reader sees the room"
            if node.module is not None and node.module.split(".")[0] == "fednormec":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME:
            given = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from (name for name in given if name.split(".")[0] == "fednormec")


def against_the_order(room: str, source: str) -> list[str]:
    """Imports of rooms below this one; the package itself has all rooms in it, and so stands below each."""
    rooms = {name: (name.split(".") + [""])[1] for name in imported(source) if name != "fednormec.__version__"}
    below = ORDER[ORDER.index(room) + 1 :]
    return [name for name, used in rooms.items() if used in below or used not in ORDER]


def test_no_room_uses_one_below_it() -> None:
    files = [path for path in HOUSE.rglob("*.py") if path.parent != HOUSE or path.stem in ORDER]
    found = {path: against_the_order(path.relative_to(HOUSE).parts[0].removesuffix(".py"), path.read_text())
             for path in files}  # fmt: skip
    assert not {str(path): names for path, names in found.items() if names}
    assert len(files) > 100


@pytest.mark.parametrize(
    "planted",
    [
        "from fednormec.runs.runner import perform",
        "import fednormec.engine.simulation",
        "from fednormec import theory",
        "def work():\n    from fednormec.engine import threads",
        "if TYPE_CHECKING:\n    from fednormec.cli.main import app",
        "class A:\n    def work(self):\n        import fednormec.privacy.ledger as ledger",
        "import importlib\nimportlib.import_module('fednormec.runs.runner')",
        "__import__('fednormec.cli.main')",
        "import fednormec",
        "from fednormec import train",
    ],
)
def test_an_import_against_the_order_is_found(planted: str) -> None:
    source = (HOUSE / "core" / "bounds.py").read_text()
    assert not against_the_order("core", source)
    assert len(against_the_order("core", f"{source}\n{planted}\n")) == 1


def test_the_top_level_shows_the_rooms() -> None:
    held = {path.name for path in HOUSE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert held == set(ORDER[3:])
    assert {path.name for path in HOUSE.glob("*.py")} == {
        "__init__.py", "__main__.py", "errors.py", "files.py", "drawing.py",
    }  # fmt: skip


@pytest.mark.parametrize("room", ORDER[3:])
def test_every_room_says_what_it_is_for_and_what_it_may_use(room: str) -> None:
    said = ast.get_docstring(ast.parse((HOUSE / room / "__init__.py").read_text()))
    assert said is not None and len(said.splitlines()) == 3, "three lines"
    above, last = ORDER[: ORDER.index(room)], said.splitlines()[2]
    assert last.startswith("May use: ")
    named = set(above) if "every other room" in last else set(last.removeprefix("May use: ").rstrip(".").split(", "))
    used = {name.split(".")[1] for path in (HOUSE / room).rglob("*.py") for name in imported(path.read_text())}
    assert used - {room, "errors", "files", "drawing", "__version__"} <= named <= set(above)


def test_the_engine_knows_no_place_but_its_threads() -> None:
    """Ray and the federation are values that are given to it."""
    assert list(imported("from fednormec.engine import ray_cluster")) == ["fednormec.engine.ray_cluster"]
    loop = [path for path in (HOUSE / "engine").glob("*.py") if path.stem != "ray_cluster"]
    assert len(loop) > 8
    for path in loop:
        known = [name for name in imported(path.read_text()) if "ray_cluster" in name or "federation" in name]
        assert not known, path


def test_the_places_are_values_with_two_methods() -> None:
    asked = {name for name in vars(fn.Place) if not name.startswith("_")}
    assert asked == {"check", "clients"}
    for place in (fn.Threads, fn.Ray, Wire):
        own = {name for name, member in vars(place).items() if callable(member) and not name.startswith("_")}
        assert issubclass(place, tuple) and asked <= own, f"{place.__name__} is a value with {asked}"


@pytest.mark.parametrize(
    ("function", "most"), [(simulation.simulate, 11), (simulation._rounds, 6), (clients.tile, 5)]
)  # fmt: skip
def test_functions_of_the_engine_stay_short_of_parameters(function: object, most: int) -> None:
    assert len(inspect.signature(function).parameters) <= most


def test_no_test_module_imports_another() -> None:
    """What several need lies in tests/support."""
    modules = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[-1] for name in names} & modules, path
    assert len(modules) > 50
