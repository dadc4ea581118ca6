"""Local operators: the order of visits and what is refused. Their arithmetic is in test_oracles."""

import math

import numpy as np
import pytest
import torch

import fednormec as fn
from fednormec.core.local import Moment


class Recorder:
    """A problem without slope that remembers which examples each client was asked for."""

    dim, num_clients, tile = 2, 3, 3
    client_sizes = np.array([7, 2, 5])

    def __init__(self):
        self.asked = {0: [], 1: [], 2: []}

    def grad(self, x, ids, examples=None):
        for place, i in enumerate(ids):
            self.asked[int(i)].append([e for e in examples[place].tolist() if e >= 0])
        return torch.zeros(len(ids), 2)


def visits(local, round=1, seed=0):
    recorder = Recorder()
    local.run(recorder, torch.zeros(2), np.arange(3), Moment(seed, round), None)
    return recorder.asked


def test_ig_visits_every_component_once_in_order():
    assert visits(fn.ig(1.0, batch_size=3)) == {
        0: [[0, 1, 2], [3, 4, 5], [6]],
        1: [[0, 1]],
        2: [[0, 1, 2], [3, 4]],
    }


def test_reshuffled_ig_visits_every_component_once_per_epoch_in_a_fresh_order():
    local = fn.ig(1.0, order="reshuffle", epochs=2)
    asked = [e for batch in visits(local)[0] for e in batch]
    assert sorted(asked[:7]) == sorted(asked[7:]) == list(range(7))
    assert asked[:7] != asked[7:]
    assert visits(local, round=2) != visits(local, round=1) == visits(local, round=1)
    assert visits(local, seed=1) != visits(local, seed=0)


def test_sgd_sees_no_example_twice_within_an_epoch():
    asked = visits(fn.sgd(1.0, steps=9, batch_size=2))
    assert [len(batches) for batches in asked.values()] == [9, 9, 9]
    for client, size in enumerate(Recorder.client_sizes):
        for start in range(0, 9, size // 2):
            epoch = [e for batch in asked[client][start : start + size // 2] for e in batch]
            assert len(set(epoch)) == len(epoch)
    assert all(len(batch) == 2 for batch in visits(fn.sgd(1.0, steps=2, batch_size=4))[1])  # all it has


def test_the_order_does_not_depend_on_who_else_computes():
    alone, together = Recorder(), Recorder()
    local = fn.sgd(1.0, steps=3, batch_size=2)
    local.run(alone, torch.zeros(2), np.array([2]), Moment(0, 1), None)
    local.run(together, torch.zeros(2), np.arange(3), Moment(0, 1), None)
    assert alone.asked[2] == together.asked[2]


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("build", [fn.gd, fn.ig, fn.sgd])
def test_bad_steps_are_refused(build, step):
    with pytest.raises(fn.UserError, match="local step must be a positive number"):
        build(step)


@pytest.mark.parametrize(
    "build",
    [
        lambda: fn.gd(1.0, steps=0),
        lambda: fn.ig(1.0, batch_size=0),
        lambda: fn.ig(1.0, epochs=-1),
        lambda: fn.ig(1.0, order="random"),
        lambda: fn.sgd(1.0, steps=0),
        lambda: fn.sgd(1.0, batch_size=-3),
    ],
)
def test_other_bad_settings_are_refused(build):
    with pytest.raises(fn.UserError):
        build()


@pytest.mark.parametrize("steps", [1, 3])
def test_passes_go_on_where_the_round_before_stopped(steps):
    """Each client sees every example once (but for an incomplete batch) before one comes again, pass after pass."""
    local = fn.sgd(1.0, steps=steps, batch_size=2, order="passes")
    rounds = [visits(local, round=k) for k in range(1, 13)]
    orders = set()
    for client, size in enumerate(Recorder.client_sizes):
        met = [batch for asked in rounds for batch in asked[client]]
        per_pass = int(size) // 2
        for start in range(0, len(met) - per_pass + 1, per_pass):
            seen = [e for batch in met[start : start + per_pass] for e in batch]
            assert len(set(seen)) == len(seen) == 2 * per_pass
            orders.add((client, *seen))
    assert len(orders) > 10, "every pass has an order of its own"
    assert visits(local, round=2) == visits(local, round=2) != visits(local, round=2, seed=1)


def test_passes_and_fresh_orders_are_told_apart():
    with pytest.raises(fn.UserError, match="order must be"):
        fn.sgd(1.0, order="pass")
    assert "passes" in fn.sgd(1.0, order="passes").name and "order" not in fn.sgd(1.0).name
