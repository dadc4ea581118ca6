"""Environment of a run: what a result may depend on besides its config."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fednormec.core import kernels

PACKAGES = ("fednormec", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "dp-accounting", "cryptography")


def environment() -> dict[str, Any]:
    """Returns what a result may depend on besides its config."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "kernels": kernels.library() is not None,
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit of this source, with a + if it was changed since; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        inside = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        if inside.returncode:
            return None
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
