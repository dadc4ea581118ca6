"""What all tests have: one arithmetic thread (on a shared machine two wait for each other), data that are read once,
and the command and the cells of a sweep in this process."""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from command import Command, Said
from hypothesis import settings
from sweep_cells import serially

from fednormec.cli.main import main
from fednormec.config import datasets
from fednormec.sweeps import pool

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


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
def fednormec_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["fednormec", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return Said(end.value.code, *capsys.readouterr())

    return run
