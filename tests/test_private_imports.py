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

# documented, though the `__all__` of their modules leaves them out
DOCUMENTED = {
    "torch.overrides TorchFunctionMode",  # in "Extending PyTorch"
    "torch channels_last",  # in "Tensor Attributes", as the next
    "torch strided",
    "torch __version__",
    "torch.ops aten",  # the operators of "Core Aten IR"
}
# what a module offers that the tests' environment need not have
PUBLIC = {
    "flwr.app": {"ConfigRecord", "Context", "Message", "MessageType", "RecordDict"},
    "flwr.clientapp": {"ClientApp"},
    "flwr.serverapp": {"Grid", "ServerApp"},
}
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def private(source: str) -> Iterator[str]:
    """What a source takes from other packages that begins with an underscore, or that they do not offer."""
    tree = ast.parse(source)
    modules = dict[str, str]()  # by the names that the source has for them
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if others(alias.name):
                    modules[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
                    yield from taken(alias.name, "")
        elif isinstance(node, ast.ImportFrom) and others(str(node.module)):
            for alias in node.names:
                if imported(f"{node.module}.{alias.name}") is not None:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from taken(str(node.module), alias.name)
    for node in ast.walk(tree):
        name, parts = chain(node)
        module = modules.get(name, "")
        for part in parts if module else ():
            yield from taken(module, part)
            module = f"{module}.{part}"
            if imported(module) is None:
                break


def others(module: str) -> bool:
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "fednormec"}


def chain(node: ast.AST) -> tuple[str, list[str]]:
    """The name that attributes begin with, and the attributes: a.b.c is a, [b, c]."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return (node.id, parts) if isinstance(node, ast.Name) else ("", [])


def taken(module: str, name: str) -> Iterator[str]:
    hidden = any(part.startswith("_") and not part.startswith("__") for part in f"{module}.{name}".split("."))
    if hidden or not offered(module, name):
        yield f"{module} {name}".strip()


def offered(module: str, name: str) -> bool:
    """Whether a module offers this, itself or as a module within it; one that is not installed what PUBLIC says."""
    found = imported(module)
    if found is None:
        return module in PUBLIC and name in {"", *PUBLIC[module]}
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


def test_what_stands_for_a_module_that_is_not_here_is_what_it_offers() -> None:
    """Run where Flower is installed, too (make test-flower)."""
    for module, names in PUBLIC.items():
        if (found := imported(module)) is not None:
            assert names <= set(found.__all__)


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
        "import torch as t\nt._C",
        "from torch import nn as n\nn.modules.conv._ConvNd",
        "import torch.nn\nx = torch.nn.functional._in_projection",
        "import numpy as n\nn.linalg._umath_linalg",
        "import numpy as n\nn.thing_that_is_not_offered",
        "from numpy.linalg import numpy_thing_that_is_not_offered",
        "from flwr.server.superlink.linkstate import LinkState",
        "from flwr.app import NotThere",
        "import package_that_nobody_has",
    ],
)
def test_a_private_import_is_found(planted: str) -> None:
    source = Path(SOURCES[0]).read_text(encoding="utf-8")
    assert len({*private(f"{source}\n{planted}\n")}) == 1
