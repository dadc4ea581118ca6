"""Nothing private of anybody else's: what `src` takes from a dependency, the dependency offers."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

DOCUMENTED = {"torch.overrides TorchFunctionMode"}  # in "Extending PyTorch", though its module's __all__ leaves it out
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def private(source: str) -> Iterator[str]:
    """Names of other packages that a source uses and that begin with an underscore, or are not in an `__all__`."""
    tree = ast.parse(source)
    modules = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            taken = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            taken = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        for (module, name), alias in zip(taken, node.names, strict=True):
            if module.split(".")[0] in {*sys.stdlib_module_names, "fednormec"}:
                continue
            modules[alias.asname or alias.name.split(".")[0]] = module
            if any(part.startswith("_") for part in f"{module}.{name}".split(".")) or not offered(module, name):
                yield f"{module} {name}".strip()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            hidden = node.attr.startswith("_") and not node.attr.startswith("__")
            yield from [f"{node.value.id}.{node.attr}"] * hidden


def offered(module: str, name: str) -> bool:
    """Whether a module that says what it offers, and is installed, offers this, itself or as a module within it."""
    found = imported(module)
    listed = getattr(found, "__all__", None)
    return not name or listed is None or name in listed or imported(f"{module}.{name}") is not None


def imported(module: str) -> ModuleType | None:
    try:
        return import_module(module)
    except ModuleNotFoundError:  # such as what an extra brings
        return None


@pytest.mark.long  # imports all that src imports
@pytest.mark.filterwarnings("default")
def test_nothing_private_of_another_package_is_used() -> None:
    found = {str(path.relative_to(ROOT)): {*private(path.read_text("utf-8"))} - DOCUMENTED for path in SOURCES}
    assert not {path: names for path, names in found.items() if names}
    assert len(found) > 100


def test_flower_is_known_in_one_folder_alone() -> None:
    known = {path for path in SOURCES if re.search(r"^ *(import|from) flwr", path.read_text("utf-8"), re.M)}
    assert {path.stem for path in known} == {"client_app", "records", "server_app"}
    assert {path.parent.relative_to(ROOT).as_posix() for path in known} == {"src/fednormec/federation/flower"}


@pytest.mark.parametrize(
    "planted",
    [
        "from numpy._core import multiarray",
        "from torch.nn.modules.module import _global_parameter_registration_hooks",
        "def work():\n    import scipy._lib.doccer",
        "from safetensors.torch import _tobytes",
        "import torch as t\nt._C._log_api_usage_once('x')",
        "from numpy.linalg import numpy_thing_that_is_not_offered",
    ],
)
def test_a_private_import_is_found(planted: str) -> None:
    source = Path(SOURCES[0]).read_text(encoding="utf-8")
    assert len(list(private(f"{source}\n{planted}\n"))) == 1
