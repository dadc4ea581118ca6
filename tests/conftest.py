"""What all tests have: one arithmetic thread (on a shared machine two wait for each other), data that are read once,
and in this process the command and the cells of a sweep."""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command, Said
from hypothesis import HealthCheck, settings
from sweep_cells import serially

from fednormec.cli.main import main
from fednormec.config import datasets
from fednormec.sweeps import pool

SLOW = Path(__file__).parent / "slow"
torch.set_num_threads(1)
# nothing fails because the machine is slow
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("patient"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with what takes longest come first, so that at the end nobody waits for one of them: those that start
    processes, then others with tests that are marked as long. All in tests/slow are."""
    weights = dict[Path, int]()
    for item in items:
        slow = SLOW in item.path.parents
        if slow:
            item.add_marker("long")
        weight = 2 * slow + (item.get_closest_marker("long") is not None)
        weights[item.path] = max(weight, weights.get(item.path, 0))
    items.sort(key=lambda item: -weights[item.path])


@pytest.fixture(autouse=True, scope="session")
def _digits_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "digits", cache(datasets.digits))
        yield


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of a sweep run in this process, one after another: for all that is not about processes."""
    monkeypatch.setattr(pool, "_work_off", serially)


@pytest.fixture
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are composed and not drawn, which takes longer than most runs, but in tests that are marked `drawn`."""
    if request.node.get_closest_marker("drawn"):
        return
    from matplotlib.figure import Figure

    def savefig(self: Figure, out: Any, **settings: Any) -> None:
        blank = '<svg viewBox="0 0 1 1"></svg>'
        out.write(blank) if hasattr(out, "write") else Path(out).write_text(blank)

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture
def fednormec_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["fednormec", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return Said(end.value.code, *capsys.readouterr())

    return run
