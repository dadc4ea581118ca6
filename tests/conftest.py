"""What the tests share: one arithmetic thread (on a shared machine two wait for each other), and the command line."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings

from fednormec.cli import main

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class Said(NamedTuple):
    code: object
    out: str
    err: str


Command = Callable[..., Said]


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


def sets(*overrides: str) -> list[str]:
    return [argument for override in overrides for argument in ("--set", override)]


def sentence(err: str) -> str:
    """What a mistake is told: one line."""
    assert err.startswith("fednormec: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    return err.removeprefix("fednormec: ").strip()
