"""Differentially private federated learning with guarantees: Fed-alpha-NormEC and its family.

The public names are those that `__init__.pyi` imports; type checkers read the same file. A name is imported when it is
first used, so that `fednormec --help` need not wait for torch.
"""

from typing import Any

__version__ = "0.1.0"


def _public() -> dict[str, str]:
    """Maps each public name to the module or package that it is imported from."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in found for alias in node.names}


_HOMES = _public()
__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'fednormec' has no attribute {name!r}")
    home = _HOMES[name]
    if home != __name__ and hasattr(found := import_module(home), name):
        return getattr(found, name)
    return import_module(f"{home}.{name}")
