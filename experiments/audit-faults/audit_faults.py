"""How small a fault `fednormec audit` finds, and how often it accuses what is right.

    python experiments/audit-faults/audit_faults.py [--runs 100] [--right 2000]

Plants one fault at a time into sampling, noise or messages and plays the part of the audit that looks at it, with other
seeds each time. Of a fault that has a size it looks for the smallest, on a grid, that is found in 99 % of the runs.
Also plays whole audits of right mechanisms and counts those called violated. Writes results.json here and prints the
table that docs/privacy.md has. Exits with 1 if a fault is never found or one right run in 1,000 is accused.
"""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import fednormec as fn
from fednormec.audit import audit
from fednormec.audit.evidence import LEVEL
from fednormec.audit.playing import TOLERANCE, longest_alone, stage_for
from fednormec.core import bounds
from fednormec.core.algorithm import Algorithm
from fednormec.core.bounds import Messages
from fednormec.core.participation import Cohort
from fednormec.core.randomness import generator
from fednormec.engine import simulation as engine
from fednormec.engine import threads
from fednormec.engine.clients import Exchanged

HERE = Path(__file__).parent
MECHANISM = fn.Mechanism(100, fn.poisson(0.25), 2.0)
DIM, ROUNDS, DELTA = 1200, 20, 1e-5
METHOD = fn.fed_normec(fn.gd(0.5), beta=0.1)
PROBLEM = dict(num_clients=10, dim=3000, examples=5, seed=0)
Plant = Callable[[float], contextlib.AbstractContextManager[Any]]


def played(algorithm: Algorithm = METHOD) -> Any:
    mechanism = replace(MECHANISM, radius=algorithm.bound.radius)
    return mechanism, stage_for(mechanism, algorithm, DIM, torch.float32, None)


# The parts of an audit: what fails


def nothing() -> None:
    pass


def failed(found: dict[str, float]) -> list[str]:
    return [name for name, p in found.items() if p < LEVEL]


def noise(seed: int, size: float = 0.0) -> list[str]:
    mechanism, stage = played()
    return failed(audit.watched_noise(stage, mechanism, audit.SIDE_ROUNDS, seed, nothing))


def cohorts(seed: int, size: float = 0.0) -> list[str]:
    return failed(audit.watched_cohorts(MECHANISM, audit.SIDE_ROUNDS, seed, nothing))


def messages(seed: int, size: float = 0.0, algorithm: Algorithm = METHOD) -> list[str]:
    _, stage = played(algorithm)
    return ["the length of messages"] if longest_alone(stage, seed, nothing) > 1 + TOLERANCE else []


def momentum(seed: int, size: float = 0.0) -> list[str]:
    return messages(seed, algorithm=unbounded_momentum(size))


def training(seed: int, size: float = 0.0) -> list[str]:
    found = fn.audit_training(
        fn.random_logistic(**PROBLEM), METHOD, fn.poisson(0.5), fn.Privacy(epsilon=8.0), rounds=40, seed=seed
    )  # fmt: skip
    return failed(found.checks)


# Faults


def in_noise(draw: Callable[..., np.ndarray]) -> Plant:
    """`draw(right, size, mechanism, dim, senders, seed, round)` in place of Mechanism.noise."""
    right = fn.Mechanism.noise
    return lambda size: mock.patch.object(
        fn.Mechanism, "noise", lambda self, *at, client=None: draw(right, size, self, *at)
    )


def in_cohort(draw: Callable[..., np.ndarray]) -> Plant:
    """`draw(size, mechanism, seed, round)`, who sends, in place of Mechanism.cohort."""

    def cohort(size: float, self: Any, seed: int, round: int) -> Cohort:
        sends = draw(size, self, seed, round)
        senders = np.flatnonzero(sends)
        return Cohort(senders, np.ones(len(senders), bool))

    return lambda size: mock.patch.object(fn.Mechanism, "cohort", lambda self, *at: cohort(size, self, *at))


def beyond(right: Any, size: float, self: Any, dim: int, senders: int, seed: int, round: int) -> np.ndarray:
    draw = right(self, dim, senders, seed, round)
    draw[1000:] *= 1 - size
    return draw


def left_out(right: Any, size: float, self: Any, dim: int, senders: int, seed: int, round: int) -> np.ndarray:
    missing = generator(seed, "fault", round).random() < size
    return right(self, dim, senders, seed, round) * (not missing)


def again(right: Any, size: float, self: Any, dim: int, senders: int, seed: int, round: int) -> np.ndarray:
    fresh = right(self, dim, senders, seed, round)
    return math.sqrt(1 - size**2) * fresh + size * right(self, dim, senders, seed, round - 2)


def flipped(right: Any, size: float, self: Any, dim: int, senders: int, seed: int, round: int) -> np.ndarray:
    draw = right(self, dim, senders, seed, round - round % 2)
    return draw * generator(seed, "fault", round).choice([-1.0, 1.0], dim)


def of_three(right: Any, size: float, self: Any, dim: int, senders: int, seed: int, round: int) -> np.ndarray:
    """Any two rounds are independent; in a share of the coordinates the sign of every third is that of two others."""
    one, two, three = (right(self, dim, senders, seed, round - k) for k in (2, 1, 0))
    bound = (round % 3 == 2) & (np.arange(dim) < size * dim)
    return np.where(bound, abs(three) * np.sign(one * two), three)


def coins(self: Any, seed: int, round: int) -> np.ndarray:
    return self._source(seed, "cohort", round).random(self.num_clients)


def more_often(size: float, self: Any, seed: int, round: int) -> np.ndarray:
    return coins(self, seed, round) < self.p + size


def three_rounds(size: float, self: Any, seed: int, round: int) -> np.ndarray:
    """Any two rounds are independent; for a share of the clients every third follows from the two before."""
    one, two, three = (coins(self, seed, round - k) for k in (2, 1, 0))
    bound = (round % 3 == 2) & (np.arange(self.num_clients) < size * self.num_clients)
    return np.where(bound, (one + two) % 1, three) < self.p


def three_clients(size: float, self: Any, seed: int, round: int) -> np.ndarray:
    """Any two clients are independent; of every three, up to a share, one follows from the other two."""
    u = coins(self, seed, round)
    third = np.arange(2, int(size * self.num_clients), 3)
    u[third] = (u[third - 1] + u[third - 2]) % 1
    return u < self.p


def longer(size: float) -> Any:
    """All messages are longer by this part, after whatever measures them: in the sums of tiles."""
    right = threads.tile

    def tile(*args: Any) -> Exchanged:
        found = right(*args)
        return found._replace(total=found.total * (1 + size))

    return mock.patch.object(threads, "tile", tile)


@contextlib.contextmanager
def beneath_the_guard(size: float = 0.0) -> Iterator[None]:
    """The engine refuses such a message by itself; here the audit must find it without that."""
    with (
        mock.patch.object(bounds, "_require_lengths", lambda *args: None),
        mock.patch.object(engine, "require_keeps", lambda *args: None),
    ):
        yield


def one_generator(size: float) -> Any:
    return mock.patch.object(
        fn.Mechanism, "_source", lambda self, seed, purpose, *at: generator(seed, "one", *at, stream=self.stream)
    )


def unbounded_momentum(size: float) -> Algorithm:
    """Clip21-SGD2M whose message has a part of the average of all updates in it, which nothing bounds."""
    right = fn.clip21_sgd2m()

    def client_(server: Any, rows: torch.Tensor, updates: torch.Tensor) -> Messages:
        sent = right.client_(server, rows, updates)
        return Messages(sent.whole() + size * rows[:, updates.shape[1] :])

    return right._replace(client_=client_)


class Fault(NamedTuple):
    """says: what is wrong. part: what of an audit is played. sizes: a grid, from small to large; none: no size."""

    says: str
    plant: Plant
    part: Callable[[int, float], list[str]]
    sizes: tuple[float, ...] = (1.0,)
    shown: str = ""


FAULTS: dict[str, Fault] = {
    "noise level": Fault(
        "noise too small everywhere, by", in_noise(lambda right, size, self, *at: (1 - size) * right(self, *at)),
        noise, (0.002, 0.004, 0.005, 0.006, 0.008, 0.01), "{:.1%}"),
    "beyond 1,000": Fault(
        "noise too small on the last 200 of 1,200 coordinates, by", in_noise(beyond), noise,
        (0.01, 0.03, 0.05, 0.1), "{:.1%}"),
    "left out": Fault(
        "noise left out in a share of the rounds", in_noise(left_out), noise,
        (0.002, 0.006, 0.01), "{:.1%}"),
    "nobody drawn": Fault(
        "noise left out when nobody is drawn",
        in_noise(lambda right, size, self, dim, senders, *at: right(self, dim, senders, *at) * (senders > 0)), noise),
    "lag 2": Fault(
        "noise drawn two rounds before that is in a round's noise, as a share", in_noise(again), noise,
        (0.005, 0.01, 0.02), "{:.1%}"),
    "lag 100": Fault(
        "the noise of 100 rounds, again in the next 100",
        in_noise(lambda right, size, self, dim, senders, seed, round: right(
            self, dim, senders, seed, round - 100 * (round // 100 % 2))), noise),
    "pairs": Fault(
        "the same noise for pairs of rounds",
        in_noise(lambda right, size, self, dim, senders, seed, round: right(self, dim, senders, seed, round // 2)),
        noise),
    "signs": Fault("the noise of every second round is the one before with other signs", in_noise(flipped), noise),
    "noise of three": Fault(
        "noise of three rounds that depends, of any two it does not, in a share of the coordinates",
        in_noise(of_three), noise, (0.02, 0.05, 0.1, 0.3), "{:.0%}"),
    "tile": Fault(
        "the noise of 600 coordinates is that of the 600 before",
        in_noise(lambda right, size, self, dim, *at: np.resize(right(self, 600, *at), dim)), noise),
    "seed": Fault(
        "a seed that is ignored",
        lambda size: mock.patch.object(
            fn.Mechanism, "_source", lambda self, seed, purpose, *at: generator(0, purpose, *at, stream=self.stream)
        ), lambda seed, size: noise(seed) + cohorts(seed)),
    "stream": Fault(
        "a stream that is ignored",
        lambda size: mock.patch.object(
            fn.Mechanism, "_source", lambda self, seed, purpose, *at: generator(seed, purpose, *at)
        ), noise),
    "one generator": Fault("cohort and noise from one generator", one_generator, cohorts),
    "rate": Fault(
        "clients drawn more often than with p = 0.25, by", in_cohort(more_often), cohorts,
        (0.004, 0.008, 0.012), "{:.3f}"),
    "pairs of cohorts": Fault(
        "the same cohort for pairs of rounds",
        in_cohort(lambda size, self, seed, round: coins(self, seed, round // 2) < self.p), cohorts),
    "three cohorts": Fault(
        "cohorts of which any two are independent and three are not, for a share of the clients",
        in_cohort(three_rounds), cohorts, (0.2, 0.5, 0.8, 1.0), "{:.0%}"),
    "three clients": Fault(
        "clients of whom any two are independent and three are not, a share of them",
        in_cohort(three_clients), cohorts, (0.2, 0.5, 0.8, 1.0), "{:.0%}"),
    "length": Fault(
        "messages in the error-feedback path too long, by", longer, messages, (1e-6, 5e-6, 2e-5, 1e-4, 0.05, 1.0),
        "{:.3%}"),
    "momentum": Fault(
        "a momentum kept unbounded, this part of which is in the message", beneath_the_guard,
        momentum, (1e-12, 1e-11, 1e-10, 1e-9, 1e-6, 1.0), "{:.0e}"),
    "training": Fault(
        "messages too long in a training with a claim of ε = 8, by", longer, training,
        (0.1, 0.25, 0.5, 1.0, 9.0), "{:.0%}"),
}  # fmt: skip


def caught(name: str, size: float, seed: int) -> list[str]:
    """The checks that fail where this fault is planted."""
    with FAULTS[name].plant(size):
        return FAULTS[name].part(seed, size)


# What is right

RIGHT: tuple[tuple[fn.Mechanism, Algorithm | None, int, torch.dtype], ...] = (
    (MECHANISM, METHOD, 100, torch.float32),
    (replace(MECHANISM, adjacency="replace_one", participation=fn.poisson(0.1)), METHOD, 60, torch.float64),
    (replace(MECHANISM, participation=fn.full(), secure=True, grid_dim=64), None, 64, torch.float64),
    (replace(MECHANISM, num_clients=50, noise_std=0.5, trust="secagg", min_cohort=4), fn.clip21(), 70, torch.float32),
    (replace(MECHANISM, noise_std=1.5, trust="local", stream=3), fn.dp_fed_avg_clip(fn.gd(0.1)), 40, torch.float32),
    (replace(MECHANISM, participation=fn.poisson(0.5), secure=True, grid_dim=64), fn.dp_scaffold(fn.gd(0.5)), 50,
     torch.float64),  # fmt: skip
)  # fmt: skip


def accused(number: int) -> list[str]:
    """The reasons against a right mechanism, in a small audit."""
    mechanism, algorithm, dim, dtype = RIGHT[number % len(RIGHT)]
    found = fn.audit_mechanism(
        mechanism, 4, DELTA, trials=40, seed=number, algorithm=algorithm, dim=dim, dtype=dtype, side_rounds=16
    )
    return list(found.reasons)


# All of it


def smallest(pool: ProcessPoolExecutor, name: str, runs: int) -> dict[str, Any]:
    """The first size on the grid that all but 1 % of the runs find, with the check that found it most often. A fault
    without a size, whose p-values are next to zero, is played a tenth as often."""
    fault = FAULTS[name]
    runs = runs if fault.shown else -(-runs // 10)
    tried = []
    for size in fault.sizes:
        found, by = 0, dict[str, int]()
        pending = [pool.submit(caught, name, size, seed) for seed in range(runs)]
        for done, future in enumerate(pending, 1):
            checks = future.result()
            found += bool(checks)
            for check in checks:
                by[check] = by.get(check, 0) + 1
            if done - found > runs // 100:  # fewer than 99 %
                _cancel(pending)
                break
        tried.append({"size": size, "runs": done, "found": found})
        if found >= 0.99 * runs:
            return {"says": fault.says, "size": size, "by": max(by, key=lambda k: by[k]), "tried": tried}
    return {"says": fault.says, "size": None, "by": None, "tried": tried}


def _cancel(pending: list[Future[list[str]]]) -> None:
    for future in pending:
        future.cancel()


def table(results: dict[str, Any]) -> str:
    """What docs/privacy.md says; all faults have been found."""
    lines = ["| planted fault | smallest found in 99 % of runs | by the check of |", "|---|---|---|"]
    for name, found in results["faults"].items():
        shown = FAULTS[name].shown
        size = (
            "never" if found["size"] is None else shown.format(found["size"]).replace("%", " %") if shown else "found"
        )
        lines.append(f"| {found['says']} | {size} | {found['by']} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="for each size of a fault")
    parser.add_argument("--right", type=int, default=2000, help="audits of right mechanisms")
    parser.add_argument(
        "--faults", nargs="*", default=list(FAULTS), help="only these; of the others, what was measured before stays"
    )
    parser.add_argument("--out", type=Path, default=HERE)
    asked = parser.parse_args()
    stored = asked.out / "results.json"
    before = json.loads(stored.read_text())["faults"] if stored.exists() else {}
    results: dict[str, Any] = {"faults": {n: before[n] for n in FAULTS if n in before}}
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for name in asked.faults:
            results["faults"][name] = smallest(pool, name, asked.runs)
            print(name, json.dumps(results["faults"][name]), flush=True)
        reasons = [reason for reason in pool.map(accused, range(asked.right), chunksize=8) if reason]
    results["right"] = {"audits": asked.right, "accused": len(reasons), "reasons": reasons}
    print(json.dumps(results["right"]))
    results["faults"] = {name: results["faults"][name] for name in FAULTS if name in results["faults"]}
    stored.write_text(json.dumps(results, indent=1) + "\n")
    missed = [name for name, found in results["faults"].items() if found["size"] is None]
    print(f"never found: {', '.join(missed)}" if missed else table(results))
    return int(bool(missed) or len(reasons) * 1000 >= max(asked.right, 1000))


if __name__ == "__main__":
    sys.exit(main())
