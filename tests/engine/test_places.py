"""Places: what one may do that is given to the engine, and what it may not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import fednormec as fn

PROBLEM = fn.random_quadratic(7, 5, parts=3, heterogeneity=1.0, seed=0)
METHOD = fn.dp_fed_avg_clip(fn.gd(0.1))


class Own(NamedTuple):
    """A place of one's own that computes on threads, and may say that its clients add their noise themselves."""

    noisy: bool = False

    def check(self, job: fn.Job) -> None:
        pass

    @contextmanager
    def clients(self, job: fn.Job) -> Iterator[Any]:
        with fn.Threads(1).clients(job) as found:
            yield found._replace(noisy=self.noisy)


def test_a_place_of_ones_own_computes_the_same_bits() -> None:
    asked: dict[str, Any] = {"privacy": fn.Privacy(epsilon=4.0), "rounds": 3, "seed": 1}
    assert torch.equal(fn.train(PROBLEM, METHOD, on=Own(), **asked).x, fn.train(PROBLEM, METHOD, **asked).x)


def test_a_place_without_settings_is_a_place() -> None:
    """A tuple without fields is false."""

    class Refusing(NamedTuple):
        def check(self, job: fn.Job) -> None:
            raise fn.UserError("asked")

        def clients(self, job: fn.Job) -> Any:
            raise AssertionError

    for run in (fn.simulate, fn.train):
        with pytest.raises(fn.UserError, match="asked"):
            run(PROBLEM, METHOD, rounds=1, on=Refusing())


@pytest.mark.parametrize("trust", ["central", "secagg"])
def test_only_with_local_trust_may_clients_add_their_noise_themselves(trust: Any) -> None:
    with pytest.raises(fn.UserError, match="only with trust = 'local'"):
        fn.train(PROBLEM, METHOD, privacy=fn.Privacy(epsilon=4.0, trust=trust), rounds=3, on=Own(noisy=True))


def test_workers_go_to_a_place_that_leaves_them_open() -> None:
    for on in (None, fn.Threads(), fn.Threads(chunk_size=2)):
        assert torch.equal(
            fn.train(PROBLEM, METHOD, rounds=2, workers=3, on=on).x, fn.train(PROBLEM, METHOD, rounds=2).x
        )
    for on in (fn.Threads(workers=2), Own(), fn.Ray(workers=1)):
        with pytest.raises(fn.UserError, match="leave workers out"):
            fn.train(PROBLEM, METHOD, rounds=2, workers=3, on=on)


def test_a_job_can_be_looked_at() -> None:
    """Ray looks at every member of what it cannot send, to say why."""
    job = fn.Job(PROBLEM, METHOD, fn.full(), None, 0, torch.zeros(5))
    assert all(hasattr(job, name) for name in dir(job))
