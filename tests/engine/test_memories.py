"""Memories in a file: the same bits, little of it resident, nothing left behind."""

from pathlib import Path

import numpy as np
import pytest
import torch
from paths import PLAIN

import fednormec as fn
from fednormec.config.schema import read
from fednormec.engine import memories
from fednormec.engine.memories import Memories
from fednormec.errors import UserError
from fednormec.runs import checkpoint
from fednormec.runs.runner import perform

QUICK = fn.random_quadratic(40, 30, parts=2, heterogeneity=1.0, seed=0)


@pytest.mark.parametrize("participation", [fn.full(), fn.poisson(0.4), fn.poisson(0.4, "sleep")])
@pytest.mark.parametrize("method", [fn.fed_normec(fn.gd(0.3)), fn.clip21_sgd2m(), fn.fed_avg(fn.gd(0.3))])
def test_a_file_holds_the_same_bits_as_memory(tmp_path, method, participation):
    in_file = fn.simulate(QUICK, method, participation, rounds=5, seed=3, on=fn.Threads(memories_in=tmp_path))
    for inside, outside in zip(fn.simulate(QUICK, method, participation, rounds=5, seed=3), in_file, strict=True):
        assert torch.equal(inside.x, outside.x)
        assert torch.equal(inside.memory, outside.memory)


def resident(kilobytes_of: int) -> int:
    """Resident bytes of this process' mappings of deleted files that are exactly so large."""
    found, looking = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            looking = "(deleted)" in line
        elif words[0] == "Size:":
            looking = looking and int(words[1]) == kilobytes_of
        elif words[0] == "Rss:" and looking:
            found += 1024 * int(words[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of a process' memory")
def test_what_is_done_with_need_not_be_resident(tmp_path, monkeypatch):
    clients, d = 512, 4_096  # 8 MB
    inputs, targets = np.random.default_rng(0).standard_normal((clients, 1, 511)), np.zeros((clients, 1), np.int64)
    problem = fn.NeuralProblem(fn.models.linear((511,), 8), list(zip(inputs, targets, strict=True)))
    rounds = fn.simulate(problem, fn.fed_normec(fn.gd(0.1)), rounds=3, on=fn.Threads(1, memories_in=tmp_path))
    assert problem.dim == d
    for _ in range(3):
        r = next(rounds)
        memory = r.memory
        assert resident(4 * clients * d // 1024) <= 4 * d * problem.tile
    monkeypatch.setattr(memories, "BLOCK", 2**20)  # of which a checkpoint needs one at a time
    checkpoint.save(tmp_path / "checkpoint", r)
    assert resident(4 * clients * d // 1024) <= 2**20
    checkpoint.load(tmp_path / "checkpoint").fill(r.memories)
    assert resident(4 * clients * d // 1024) <= 2**20
    assert memory.any(dim=1).all()
    assert resident(4 * clients * d // 1024) == 4 * clients * d, "looking at it all makes it resident"


def test_pages_that_a_neighbour_shares_are_kept(tmp_path):
    """Rows of 1,000 bytes do not begin where pages do: what is written must be there afterwards."""
    memories = Memories((100, 250), torch.float32, folder=tmp_path)
    expected = torch.arange(100 * 250, dtype=torch.float32).view(100, 250)
    for first in range(0, 100, 7):
        memories.rows[first : first + 7] = expected[first : first + 7]
        memories.let_go(first, min(99, first + 6))
    assert torch.equal(memories.rows, expected)
    for row in np.random.default_rng(0).permutation(100):
        memories.let_go(int(row), int(row))
    assert torch.equal(memories.rows, expected)


def test_nothing_is_left_behind(tmp_path):
    config = read(PLAIN, ["run.rounds=2", "run.memories=file"])
    perform(config, "test", tmp_path / "out", quiet=True)
    assert "model.safetensors" in {path.name for path in (tmp_path / "out").iterdir()}
    assert not [path for path in (tmp_path / "out").iterdir() if path.stat().st_size > 10**6]


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no file for the memories can be made in"):
        next(fn.simulate(QUICK, fn.fed_normec(fn.gd(0.3)), rounds=1, on=fn.Threads(memories_in=tmp_path / "missing")))
