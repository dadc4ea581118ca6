"""Experiments of the Fed-α-NormEC paper: the runs that its four figures need, and how its text is read.

The noise is the paper's, read as the norm of the whole vector: the only reading that trains, and NOT PRIVATE.
"""

import itertools
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.assemble import assemble
from fednormec.config.schema import Config, changed
from fednormec.core.randomness import generator
from fednormec.engine.simulation import simulate
from fednormec.engine.threads import Threads
from fednormec.errors import UserError, at_least_one, known
from fednormec.privacy.calibrate import paper_noise_std
from fednormec.privacy.mechanism import MOST
from fednormec.sweeps.pool import Cell, earlier, with_own_noise

WORK = {
    "epoch": "a round is a pass, an exchange for each of its {passes} mini-batches of {batch}, steps of length γ each",
    "gradient": "one gradient over all local data, a step of length γ",
    "pass": "one pass over the local data in batches of {batch}, steps of length γ in all",
    "steps": "{steps} steps on {batch} examples, each of length γ",
    "minibatch": "one gradient on {batch} examples, a step of length γ",
}
GAMMAS = BETAS = (0.001, 0.01, 0.1)
CLIENTS, ALPHA, BATCH = 20, 0.01, 32
EPSILON, DELTA, ROUNDS = 8.0, 1e-5, 300
EXAMPLES, TESTS = 54_000, 6_000  # nine tenths of CIFAR-10, and the rest
COMPENSATED, PLAIN = "Fed-α-NormEC", "FedAvg"

PAPER: Config = {
    "data": {
        "source": "cifar10", "pool": True, "test_fraction": 0.1, "partition": "iid", "clients": CLIENTS,
    },
    "privacy": {"delta": DELTA, "trust": "local", "noise_scale": "total_norm"},
    "run": {},
}  # fmt: skip
# in the tiles that were fastest here
MODELS: dict[str, Config] = {
    "resnet20": {
        "model": {"name": "resnet20", "norm": "batch"},
        "problem": {
            "name": "neural",
            "statistics": "training",
            "loss_examples": 25,
            "vectorize": "layers",
            "tile": 4,
        },
    },
    "conv": {
        "model": {"name": "small_cnn", "channels": [8, 16], "norm": "none", "halving": "stride"},
        "problem": {"name": "neural", "loss_examples": 100, "vectorize": "layers", "tile": CLIENTS},
    },
}
MOST_POINTS, SHARE = 30, 0.08  # of a curve, and of a run's time that they may take
NOISES = {
    "stated": "K is the number of rounds",
    "exchanges": "K is the number of exchanges",
}


class Point(NamedTuple):
    """Point of the paper's grid: what sets the runs of the figures apart, but for their seeds."""

    method: str
    p: float
    beta: float
    gamma: float


class Scale(NamedTuple):
    """Scale of the experiments, and how the paper's text is read.

    Attributes:
        name: "paper" or "small".
        model: a key of MODELS.
        examples: number of training images.
        tests: number of test images.
        seeds: the seeds.
        rounds: number of rounds, as the figures count them.
        local_work: a key of WORK.
        local_steps: number of local steps, for the local work "steps".
        noise: a key of NOISES.
        device: what to compute on.
    """

    name: str
    model: str
    examples: int
    tests: int
    seeds: tuple[int, ...]
    rounds: int = ROUNDS
    local_work: str = "minibatch"
    local_steps: int = 8
    noise: str = "stated"
    device: str = "cpu"

    @property
    def work(self) -> str:
        """Local work in words."""
        return WORK[self.local_work].format(steps=self.local_steps, batch=BATCH, passes=self._passes)

    @property
    def exchanges(self) -> int:
        """Number of exchanges between clients and server in a round."""
        return self._passes if self.local_work == "epoch" else 1

    @property
    def visits(self) -> int:
        """Number of images of which a client takes a gradient in a round."""
        per_round = {"minibatch": BATCH, "steps": BATCH * self.local_steps}
        return per_round.get(self.local_work, self.examples // CLIENTS)

    @property
    def _passes(self) -> int:
        return max(1, self.examples // CLIENTS // BATCH)

    @property
    def evaluate_every(self) -> int:
        """Number of exchanges between two points of a curve.

        There are 30 points, or as many as take 8 % of the time: a gradient costs about as much as three evaluations.
        """
        looked_at = CLIENTS * int(MODELS[self.model]["problem"]["loss_examples"])
        point = self.tests + looked_at * (2 if self.model == "resnet20" else 1)  # once for the statistics
        affordable = SHARE * 3 * self.rounds * CLIENTS * self.visits / point
        points = max(1, min(MOST_POINTS, self.rounds, int(affordable)))
        return -(-self.rounds // points) * self.exchanges

    def config(self, p: float) -> Config:
        """Returns what all runs with this p share."""
        data = {} if self.examples == EXAMPLES else {"data.examples": self.examples}
        data |= {} if self.tests == TESTS else {"data.test_examples": self.tests}
        rounds = self.rounds * self.exchanges
        if self.noise == "stated" and self.exchanges > 1:
            noise: dict[str, Any] = {"privacy.noise_std": paper_noise_std(EPSILON, DELTA, p, self.rounds)}
        else:
            noise = {"privacy.epsilon": EPSILON, "privacy.calibration": "paper"}
        run = {"run.device": self.device, "run.rounds": rounds, "run.evaluate_every": self.evaluate_every}
        return changed({**PAPER, **MODELS[self.model]}, {**data, **noise, **run})

    def facts(self) -> dict[str, Any]:
        """Returns scale and reading as data."""
        return {**self._asdict(), "exchanges": self.exchanges, "work": self.work}

    def reading(self) -> dict[str, Any]:
        """Returns what two runs of one point and seed must have alike to be the same."""
        alike = ("model", "examples", "tests", "rounds", "local_work", "noise")
        steps = {"local_steps": self.local_steps} if self.local_work == "steps" else {}
        return {name: getattr(self, name) for name in alike} | steps


def grid(method: str, ps: Iterable[float], betas: Iterable[float] = BETAS) -> list[Point]:
    return [Point(method, p, beta, gamma) for p, beta, gamma in itertools.product(ps, betas, GAMMAS)]


FIGURES: dict[str, list[Point]] = {
    "figure1": grid(COMPENSATED, (1.0, 0.25)),
    "figure2": grid(COMPENSATED, (1.0, 0.5, 0.25), betas=(0.01,)),
    "figure3": grid(COMPENSATED, (1.0,)) + grid(PLAIN, (1.0,)),
    "figure4": grid(PLAIN, (1.0,)),
}


def scale(
    name: str = "paper",
    model: str | None = None,
    examples: int | None = None,
    seeds: Sequence[int] | None = None,
    local_work: str | None = None,
    local_steps: int = 8,
    noise: str = "stated",
    rounds: int | None = None,
    device: str = "cpu",
) -> Scale:
    """Returns the paper's own scale, or a small one.

    The paper's is ResNet20 on all of CIFAR-10 with seed 42. The small one is a test of the whole command: a small
    convolutional net on 2,000 images, with three seeds.

    Args:
        name: "paper" or "small".
        model: a key of MODELS; by default "resnet20", for the small scale "conv".
        examples: number of training images.
        seeds: other seeds.
        local_work: a key of WORK; by default "minibatch".
        local_steps: number of local steps, for the local work "steps".
        noise: a key of NOISES.
        rounds: number of rounds; by default 300.
        device: what to compute on.
    """
    known("scale", name, ("paper", "small"))
    small, work = name == "small", local_work or "minibatch"
    model = model or ("conv" if small else "resnet20")
    known("model", model, MODELS)
    known("local work", work, WORK)
    known("noise", noise, NOISES)
    rounds = ROUNDS if rounds is None else at_least_one("rounds", rounds)
    images = at_least_one("examples", (2000 if small else EXAMPLES) if examples is None else examples)
    if not CLIENTS <= images <= EXAMPLES:
        raise UserError(f"examples must lie between {CLIENTS} and {EXAMPLES:,}, not {images:,}.")
    chosen = tuple(seeds or ((42, 43, 44) if small else (42,)))
    found = Scale(
        name, model, images, 2000 if small else TESTS, chosen, rounds, work, at_least_one("local steps", local_steps),
        noise, device,
    )  # fmt: skip
    if rounds * found.exchanges > MOST:
        raise UserError(f"accounting goes up to {MOST:,} rounds, not {rounds * found.exchanges:,}.")
    return found


def cells(figures: Iterable[str], scale: Scale) -> list[Cell]:
    """Returns the runs that these figures need, each once."""
    points = dict.fromkeys(point for figure in figures for point in FIGURES[figure])
    return [_cell(point, seed, scale) for point in points for seed in scale.seeds]


def point_of(cell: Cell) -> tuple[Point, int]:
    """Returns the point of the grid, and the seed, that a cell is a run of."""
    *point, seed = cell.settings.values()
    return Point(*point), seed


def hours(asked: Sequence[Cell], folder: Path, workers: int) -> float:
    """Estimates how long the runs that are missing will take, from some exchanges and an evaluation here and now.

    Raises UserError for what is missing, once and not for every run.
    """
    import torch

    missing = [cell for cell in asked if earlier(cell, folder) is None]
    if not missing:
        return 0.0
    problem, algorithm, participation, privacy, run, *_ = assemble(missing[0].config)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    try:
        rounds = simulate(problem, algorithm, participation, privacy, rounds=run.rounds, on=Threads(1))
        next(rounds)  # the first takes longer
        started, done = time.perf_counter(), 0
        while done < run.rounds - 1 and (done < 2 or time.perf_counter() - started < 1) and done < 50:
            last = next(rounds)
            done += 1
        exchange = (time.perf_counter() - started) / max(1, done)
        started = time.perf_counter()
        problem.evaluate(last.x if done else problem.init(generator(0, "init")))
        point = time.perf_counter() - started
        rounds.close()
    finally:
        torch.set_num_threads(threads)
    every = run.evaluate_every or 1
    seconds = len(missing) * (run.rounds * exchange + math.ceil(run.rounds / every) * point)
    return seconds / min(workers, len(missing)) / 3600


# the runs


def _cell(point: Point, seed: int, scale: Scale) -> Cell:
    local, k = _local(point.gamma, scale)
    steps = {"server_step": point.gamma * k, "alpha": ALPHA / k, "beta": point.beta / k}
    if point.method == COMPENSATED:
        method: dict[str, Any] = {"name": "fed_normec", "server_normalization": False, **steps}
    else:
        method = {"name": "dp_fed_avg_normalized", "bounded": "update", **steps}
    who = {"name": "full"} if point.p == 1 else {"name": "poisson", "p": point.p, "idle": "advance"}
    shared = scale.config(point.p)
    run = {**shared["run"], "seed": seed}
    config: Config = {**shared, "local": local, "method": method, "participation": who, "run": run}
    short = "normec" if point.method == COMPENSATED else "fedavg"
    name = f"{short}_p={point.p:g}_beta={point.beta:g}_gamma={point.gamma:g}_seed={seed}"
    return with_own_noise(Cell(name, {**point._asdict(), "seed": seed}, config), mark=name)


def _local(gamma: float, scale: Scale) -> tuple[dict[str, Any], int]:
    """Returns the local operator, and by how much P_i is larger in the paper's letters than here.

    Here γ is the length of all local steps together: the factor is 1 unless each of them is γ long.
    """
    k = scale.local_steps
    readings: dict[str, tuple[dict[str, Any], int]] = {
        "epoch": ({"name": "sgd", "step": gamma, "steps": 1, "batch_size": BATCH, "order": "passes"}, 1),
        "gradient": ({"name": "gd", "step": gamma}, 1),
        "pass": ({"name": "ig", "step": gamma, "batch_size": BATCH}, 1),
        "minibatch": ({"name": "sgd", "step": gamma, "steps": 1, "batch_size": BATCH}, 1),
        "steps": ({"name": "sgd", "step": gamma * k, "steps": k, "batch_size": BATCH}, k),
    }
    return readings[scale.local_work]
