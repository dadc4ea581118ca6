"""How the clients of a round are cut into tiles, and how what these exchange is added: whoever computes which."""

import numpy as np
import pytest
import torch
from simulations import mlp_problem

import fednormec as fn
from fednormec.core.participation import Cohort
from fednormec.engine import clients
from fednormec.engine.clients import Branch, Exchanged, add, added, tiles


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 23, 64])
def test_a_sum_has_the_same_bits_whoever_adds_which_part(count):
    rng = np.random.default_rng(count)
    rows = torch.from_numpy(rng.standard_normal((count, 50)) * 10.0 ** rng.integers(-9, 9, (count, 1)))

    def branches(start: int, end: int) -> list[Branch]:
        found: list[Branch] = []
        for number in range(start, end):
            add(found, Branch(0, number, Exchanged(rows[number].clone(), 1)))
        return found

    whole = added(branches(0, count), 50, torch.device("cpu"))
    assert whole.left_out == count
    assert torch.allclose(whole.total, rows.sum(0), rtol=1e-12, atol=1e-6)
    for _ in range(20):
        cuts = [0, *sorted(rng.integers(0, count + 1, 3)), count]
        together: list[Branch] = []
        for start, end in zip(cuts[:-1], cuts[1:], strict=True):
            part = branches(start, end)
            assert len(part) <= 2 * (max(1, count) - 1).bit_length() + 1
            for branch in part:
                add(together, branch)
        assert torch.equal(added(together, 50, torch.device("cpu")).total, whole.total)


@pytest.mark.parametrize("tile", [1, 2, 5, 40])
@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_no_tile_has_clients_of_two_stretches_and_there_are_no_more_than_accounted(tile, rate):
    problem = mlp_problem(23, tile=tile)
    m, method, rule = problem.num_clients, fn.fed_avg(fn.gd(0.1)), fn.poisson(rate, "sleep")
    job = fn.Job(problem, method, rule, None, 0, torch.zeros(problem.dim))
    stretch = job.stretch
    assert stretch % tile == 0
    assert -(-m // stretch) >= min(clients.STRETCHES, -(-m // tile))
    for drawn in (np.arange(m), np.array([], int), np.flatnonzero(np.random.default_rng(0).random(m) < 0.4)):
        found = tiles(job, Cohort(drawn, np.ones(len(drawn), bool)))
        assert np.array_equal(np.concatenate([np.array([], int), *(t.computing for t in found)]), drawn)
        assert all(1 <= len(t.computing) <= tile and len(set(t.computing // stretch)) == 1 for t in found)
        assert len(found) <= -(-m // tile)
    assert job._replace(participation=fn.poisson(rate)).stretch == tile, "where all compute nothing changes"
