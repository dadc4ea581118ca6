"""What competes on the leaderboard: tasks, methods with the space that each is tuned in, and settings of that space."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

TUNING_SEED, SEEDS = 0, (1, 2, 3)
DRAWN, REFINED = 10, 6
EPSILONS, SHARES, DELTA = (1.0, 2.0, 8.0), (0.1, 1.0), 1e-5
Config = dict[str, dict[str, Any]]
Settings = dict[str, Any]


class Task(NamedTuple):
    """A federation to train.

    Attributes:
        sections: sections of a config.
        unit: length of an example's features, which is public: the unit of bounds and steps.
        dim: number of parameters.
        clients: number of clients.
        inputs: what the linear model is on, "features" or "tokens".
        figure: the figure that counts.
        width: number of directions, drawn at random, that features are projected to; None: they stay.
        servers: names of the optimisers; those that lost on the first task are left out of the others.
        shares: values of p.
    """

    sections: Config
    unit: float
    dim: int
    clients: int
    inputs: Literal["features", "tokens"] = "features"
    figure: str = "test_accuracy"
    width: int | None = None
    servers: tuple[str, ...] = ("sgd", "momentum", "adam", "low_pass", "disk")
    shares: tuple[float, ...] = SHARES


Kind = Literal["messages", "memories", "server"]
Range = tuple[float, float]


class Family(NamedTuple):
    """A method with the space that it is tuned in.

    Lengths are in units of the task: bounds in lengths of an example's features, steps in one over its square, and how
    far a model moves in one over its length. So the ranges fit any linear model.

    Attributes:
        sections: method and local work from the settings that were drawn.
        kind: where the server's direction comes from: the clients' "messages", their "memories" (error feedback), or
            the memory of the "server", against which clients measure (centred feedback).
        bound: range of the bound on an update, τ or β; of an adaptive one its start.
        step: range of the server's step, which multiplies a mean of updates.
        moves: whether `step` is how far the model can move in a round: bound times step.
    """

    sections: Callable[[Settings], Config]
    kind: Kind
    bound: Range = (0.003, 0.3)
    step: Range = (30.0, 2000.0)
    moves: bool = False


LOCAL, MOVES = (1.0, 200.0), (2.0, 100.0)  # the local step, all of a client's steps together; how far a model moves


def on_updates(name: str, bound: str, s: Settings, **more: Any) -> Config:
    """For methods that bound an update P."""
    return {"method": {"name": name, bound: s["bound"], "server_step": s["step"], **more}, "local": _local(s)}


def on_displacements(name: str, bound: str, s: Settings, **more: Any) -> Config:
    """For methods that bound a displacement, local step times P: so that settings mean the same in all methods."""
    method = {"name": name, bound: s["bound"] * s["local_step"], "server_step": s["step"] / s["local_step"]}
    smooth = {"alpha": s["alpha"]} if "alpha" in s else {}
    return {"method": method | smooth | more, "local": _local(s)}


def scaffold(s: Settings) -> Config:
    """DP-SCAFFOLD bounds updates and moves by displacements."""
    method = {"name": "dp_scaffold", "tau": s["bound"], "server_step": s["step"] / s["local_step"]}
    return {"method": method, "local": _local(s)}


def on_gradients(name: str, s: Settings, **more: Any) -> Config:
    return {"method": {"name": name, "tau": s["bound"], "server_step": s["step"], **more}}


def relative(s: Settings) -> Config:
    """Adaptive Fed-α-NormEC, whose β is relative to a length that it finds: it begins at a tenth of the unit."""
    more = {"start": 0.1 * s["unit"], "server_normalization": False}
    return on_updates("fed_normec_adaptive", "beta", s | {"bound": s["bound"] / s["unit"]}, **more)


def _local(s: Settings) -> dict[str, Any]:
    return {"name": "gd", "step": s["local_step"], "steps": s["local_steps"]}


FAMILIES: dict[str, Family] = {
    "DP-FedAvg (clip)": Family(
        partial(on_displacements, "dp_fed_avg_clip", "tau"), "messages", (0.02, 2.0), MOVES, moves=True
    ),
    "DP-FedAvg (normalised)": Family(
        partial(on_displacements, "dp_fed_avg_normalized", "beta"), "messages", (0.02, 2.0), MOVES, moves=True
    ),
    "DP-FedAvg (adaptive clip)": Family(
        partial(on_displacements, "dp_fed_avg_adaptive", "start"), "messages", (0.02, 2.0), (7.0, 400.0)
    ),
    "DP-SCAFFOLD": Family(scaffold, "messages", (0.02, 2.0), MOVES, moves=True),
    "Fed-α-NormEC": Family(partial(on_updates, "fed_normec", "beta", server_normalization=False), "memories"),
    "Fed-α-NormEC (adaptive)": Family(relative, "memories", (0.03, 1.0)),
    "Clip21": Family(partial(on_gradients, "clip21"), "memories"),
    "Clip21-SGD2M": Family(partial(on_gradients, "clip21_sgd2m", client_momentum=0.5), "memories"),
    "EF21-SGDM": Family(partial(on_updates, "ef21_sgdm", "tau", client_momentum=0.5), "memories"),
    "EControl": Family(partial(on_updates, "econtrol", "tau"), "memories"),
    "centred feedback": Family(partial(on_updates, "centred", "beta"), "server"),
}
ENTERED = tuple(FAMILIES)
SERVERS: dict[str, tuple[float, Settings]] = {  # the factor on the step, and settings
    "sgd": (1.0, {}),
    "momentum": (0.1, {"decay": 0.9}),
    "adam": (0.1, {}),
    "low_pass": (1.0, {}),
    "disk": (1.0, {}),
}

GRADIENTS = {"name": "experiments/private-at-scale/gradients.py:extract", "bins": 6}
FASHION: dict[str, Any] = {"source": "fashion_mnist", "clients": 2000}
CIFAR10: dict[str, Any] = {"source": "cifar10", "clients": 5000}
HISTOGRAMS: Config = {"features": GRADIENTS}
ROUNDS = 60
LEFT = ("sgd", "momentum", "disk")  # adam and low_pass lost on the first task, in the leaderboard and in the study
TASKS: dict[str, Task] = {
    "fashion-one-class": Task({
        "data": FASHION | {"partition": "shards", "shards_per_client": 1}, **HISTOGRAMS,
    }, 343**0.5, 3440, 2000),
    "cifar10-features": Task({
        "data": CIFAR10 | {"partition": "shards", "shards_per_client": 2},
        "features": {"name": "efficientnet_lite0", "size": 64},
    }, 16.0, 2570, 5000, width=256, servers=LEFT),
    "movielens": Task({  # with adam: most of its tokens are rare
        "data": {"source": "movielens"},
    }, 3.0, 1714, 943, "tokens", "test_auc", servers=("sgd", "momentum", "adam", "disk")),
    "fashion-iid": Task({
        "data": FASHION | {"partition": "iid"}, **HISTOGRAMS,
    }, 343**0.5, 3440, 2000, servers=LEFT, shares=(0.1,)),
}  # fmt: skip
QUICK = Task(
    {"data": {"source": "digits", "partition": "shards", "shards_per_client": 1, "clients": 60}},
    8.0,
    650,
    60,
    shares=(0.5,),
)


class Row(NamedTuple):
    """A row of the leaderboard, or of the study of optimisers, which fixes one (`server`) and varies the rounds."""

    task: str
    epsilon: float
    p: float
    family: str
    server: str | None = None
    rounds: int = ROUNDS

    @property
    def file(self) -> str:
        """Name of the file of results."""
        return self.task if self.server is None else "study"

    @property
    def key(self) -> str:
        study = "" if self.server is None else f" with {self.server}, {self.rounds} rounds"
        return f"{self.task} ε={self.epsilon:g} p={self.p:g} {self.family}{study}"


STUDIED = ("DP-FedAvg (clip)", "Fed-α-NormEC", "centred feedback")
STUDY = [
    Row("fashion-one-class", epsilon, 0.1, family, server, rounds)
    for rounds in (20, 60, 240) for epsilon in (1.0, 8.0) for family in STUDIED for server in SERVERS
]  # fmt: skip


# settings, drawn and refined


def draw(row: Row, number: int) -> Settings:
    """The settings of one of the first tuning runs: of its number alone, so that methods with the same ranges get the
    same. Each length takes a value in every tenth of its range, each optimiser 1 and 5 local steps and both schedules.
    """
    task, rng = task_of(row.task), np.random.default_rng(TUNING_SEED)
    where = [(rng.permutation(DRAWN)[number] + rng.random()) / DRAWN for _ in range(3)]
    names = task.servers if row.server is None else (row.server,)
    turn, place = divmod(number, len(names))
    name = names[place]
    bound, step = _lengths(row, name, *where[:2])
    return {
        "bound": bound, "step": step, "local_step": short(_between(where[2], *LOCAL) / task.unit**2),
        "local_steps": (1, 5)[turn % 2], "server": name,
        "schedule": ("constant", "cooldown")[(place + turn + turn // 2) % 2], "unit": short(task.unit),
    }  # fmt: skip


def _lengths(row: Row, server: str, bound: float, step: float) -> tuple[float, float]:
    """The bound and the server's step at these places of their ranges, each between 0 and 1."""
    family, task, factor = FAMILIES[row.family], task_of(row.task), SERVERS[server][0]
    tau = _between(bound, *family.bound) * task.unit
    if server == "adam":  # which moves every coordinate by about its step, whatever the bound
        h = _between(step, *MOVES) / task.unit / math.sqrt(task.dim)
    elif family.moves:
        h = _between(step, *family.step) / task.unit / tau
    else:
        h = _between(step, *family.step) / task.unit**2
    return short(tau), short(h * factor)


def near(best: Settings, number: int) -> Settings:
    """Settings near the best so far: each length within a factor of 3 at first, of 1.7 later; the rest as it is."""
    rng, most = np.random.default_rng([TUNING_SEED, 1, number]), 3.0 if number < REFINED // 2 else 1.7
    lengths = ("bound", "step", "local_step")
    return best | {name: short(best[name] * _between(rng.random(), 1 / most, most)) for name in lengths}


def _between(where: float, low: float, high: float) -> float:
    return low * (high / low) ** where


def config(task: Task, row: Row, settings: Settings, seed: int) -> Config:
    """The config of one run; noise and cohorts of no two runs are the same."""
    name = settings["server"]
    server = {"name": name, **SERVERS[name][1], "schedule": settings["schedule"], "average": "tail"}
    who = {"name": "full"} if row.p == 1 else {"name": "poisson", "p": row.p, "idle": "sleep"}
    mark = hashlib.sha256(json.dumps([row, settings, seed]).encode()).digest()
    return {
        **task.sections, **FAMILIES[row.family].sections(settings), "server": server, "participation": who,
        "privacy": {"epsilon": row.epsilon, "delta": DELTA, "stream": int.from_bytes(mark[:4], "little")},
        "run": {"rounds": row.rounds, "seed": seed},
    }  # fmt: skip


def short(value: Any) -> float:
    return float(f"{float(value):.3g}")


def task_of(name: str) -> Task:
    return QUICK if name == "quick" else TASKS[name]


def rows_of(tasks: Iterable[str], epsilons: Iterable[float], shares: Iterable[float]) -> Iterator[Row]:
    for task, p, epsilon in itertools.product(tasks, shares, epsilons):
        if p in task_of(task).shares:
            yield from (Row(task, epsilon, p, family) for family in ENTERED)
