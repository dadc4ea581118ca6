"""Local steps on records whose gradients are known, run through the engine and seen as an attacker of DP-SGD sees them.

He sees every point that the steps come by, as is accounted for, and no gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fednormec.algorithms.methods import fed_avg
from fednormec.core import records
from fednormec.core.algorithm import Algorithm, Server
from fednormec.core.bounds import Bound, Messages
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Participation, full
from fednormec.core.problem import Metrics
from fednormec.core.records import PerRecord
from fednormec.engine.planning import planned_for_records, with_record_noise
from fednormec.engine.simulation import simulate
from fednormec.engine.threads import Threads
from fednormec.errors import UserError
from fednormec.privacy.asked import Privacy
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import RecordPlan, Silo


class Scene(NamedTuple):
    """Scene of a play: a run's own local steps, the number of parameters and their dtype.

    Args:
        local: the local steps.
        dim: number of parameters.
        dtype: dtype of the parameters.
    """

    local: LocalUpdate
    dim: int
    dtype: torch.dtype

    @property
    def rule(self) -> PerRecord:
        """Rule by which the steps bound what they take of a record."""
        assert self.local.per_record is not None
        return self.local.per_record

    @property
    def scale(self) -> float:
        """Length of gradients that the bound cuts to its radius."""
        law = self.rule.bound.law
        return 1e6 * max(self.rule.bound.radius, 0.0 if law is None or law.clips else law.parameter)

    @property
    def rounding(self) -> float:
        """How far a step's sum may be from what models say it is, relative to its length: they are rounded."""
        return 4 * self.rule.steps * float(torch.finfo(self.dtype).eps)

    def method(self, rate: float | None) -> Algorithm:
        """Returns a method whose server stays where it is and whose clients remember what they send.

        Args:
            rate: probability with which a record is in a batch; None: that of the local steps.
        """
        rule = self.rule if rate is None else self.rule._replace(batch_size=None, rate=rate)
        own = fed_avg(self.local._replace(per_record=rule), server_step=1e-9)
        return own._replace(memory_slots=1, keeps_updates=True, client_=_remember)


def _remember(server: Server, rows: Tensor, updates: Tensor) -> Messages:
    rows.copy_(updates)
    return Messages(updates)


class Step(NamedTuple):
    """Local step as an attacker sees it.

    Attributes:
        client: number of the client.
        number: number of the step among all of that client, from 0.
        batch: numbers of the records whose gradients were taken.
        noisy: noisy sum of bounded gradients, in units of the radius.
        std: standard deviation of its noise, in units of the radius.
    """

    client: int
    number: int
    batch: np.ndarray
    noisy: np.ndarray
    std: float


Hear = Callable[[Step], None]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Told:
    """Problem whose records have the same gradients wherever the model is, and which tells where each step begins.

    Args:
        dim: number of parameters.
        client_sizes: number of records of each client.
        dtype: dtype of the parameters.
        gradients: gradients(numbers of records) -> rows, all new.
        begins: begins(x, batch) is called once in each step, with its model and the records whose gradients it took.
    """

    dim: int
    client_sizes: np.ndarray
    dtype: torch.dtype
    gradients: Callable[[np.ndarray], Tensor]
    begins: Callable[[Tensor, np.ndarray], None]
    asked: list[np.ndarray] = field(default_factory=list)

    @property
    def num_clients(self) -> int:
        return len(self.client_sizes)

    @property
    def tile(self) -> int:
        return self.num_clients

    def init(self, rng: np.random.Generator) -> Tensor:
        return torch.zeros(self.dim, dtype=self.dtype)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        assert examples is not None
        self.asked.append(examples[:, 0])
        return self.gradients(examples[:, 0])

    def record_sum(self, x: Tensor, client: int, numbers: np.ndarray, bound: Bound) -> Tensor:
        return records.sum_of_rows(self, x, client, numbers, bound)

    def apart_from_data(self, x: Tensor) -> Tensor | None:
        self.begins(x, np.concatenate([np.zeros(0, np.int64), *self.asked]))
        self.asked.clear()
        return None

    def evaluate(self, x: Tensor) -> Metrics:
        return Metrics({}, {"train_loss": 0.0})

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}

    def model(self, x: Tensor) -> Tensor:
        return x


class _Listener:
    """Listener who follows the models of local steps, and computes from two of them what the step between added.

    Args:
        scene: whose steps.
        silos: mechanisms of the silos that compute.
        hear: hears of every step.
    """

    def __init__(self, scene: Scene, silos: Sequence[Silo], hear: Hear) -> None:
        self._scene, self._silos, self._hear = scene, silos, hear
        self._rounds, self._begun = 0, 0
        self._first = self._latest = torch.empty(0)
        self._batch = np.zeros(0, np.int64)
        self._last = list[tuple[Tensor, np.ndarray]]()

    def begins(self, x: Tensor, batch: np.ndarray) -> None:
        """Hears that a step begins at x."""
        place, t = divmod(self._begun, self._steps)
        x, self._begun = x.detach().to(torch.float64, copy=True), self._begun + 1
        if t == 0:
            self._first = x
        else:
            self._tell(place, t - 1, self._batch, (self._latest - x) / self._size)
        self._latest, self._batch = x, batch
        if t == self._steps - 1:
            self._last.append(((self._first - x) / self._size, batch))

    def ends(self, sent: Tensor) -> None:
        """Hears what the clients sent in a round, rows (M, d)."""
        if self._begun != len(self._silos) * self._steps:
            raise UserError(f"{self._scene.local.name} cannot be followed: its steps are not those of dp_sgd, each of "
                            "which asks the problem once for what is apart from data.")  # fmt: skip
        for place, (before, batch) in enumerate(self._last):
            mean = sent[self._silos[place].number].double()
            self._tell(place, self._steps - 1, batch, mean * self._steps - before)
        self._last.clear()
        self._rounds, self._begun = self._rounds + 1, 0

    @property
    def _steps(self) -> int:
        return self._scene.rule.steps

    @property
    def _size(self) -> float:
        """Size of a step."""
        size = self._scene.local.step_in(self._rounds + 1) / self._steps
        if not size and self._steps > 1:
            raise UserError(f"in round {self._rounds + 1} the local step is 0, so that no step can be seen: audit the "
                            "same with a schedule that stays above 0.")  # fmt: skip
        return size or 1.0

    def _tell(self, place: int, t: int, batch: np.ndarray, mean: Tensor) -> None:
        number, mechanism = self._silos[place].number, self._silos[place].sum
        noisy = mean.mul_(rate_of(mechanism) * mechanism.num_clients / mechanism.radius).numpy()
        std = mechanism.noise_std * (1 + mechanism.rounding)
        self._hear(Step(number, self._rounds * self._steps + t, batch, noisy, std))


def perform(
    scene: Scene, sizes: np.ndarray, gradients: Callable[[np.ndarray], Tensor], kept: Privacy | RecordPlan,
    rounds: int, seed: int, hear: Hear, *, rate: float | None = None, among: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Runs rounds through the engine, and tells `hear` of every local step.

    Args:
        scene: the scene.
        sizes: number of records of each client.
        gradients: gradients(numbers of records) -> rows.
        kept: what the run must keep to, or the plan by which it does.
        rounds: number of rounds.
        seed: seed of the run.
        hear: hears of every step; the last one of a round when the round is over.
        rate: probability with which a record is in a batch; None: that of the local steps.
        among: numbers of the clients that compute; None: all.
    """
    method = scene.method(rate)
    silent = Told(scene.dim, sizes, scene.dtype, gradients, lambda x, batch: None)
    plan = kept if isinstance(kept, RecordPlan) else planned_for_records(silent, method, kept, rounds)
    silos = plan.silos if among is None else [plan.by_number[number] for number in among.tolist()]
    listener = _Listener(scene, silos, hear)
    told = Told(scene.dim, sizes, scene.dtype, gradients, listener.begins)
    privacy = None
    if isinstance(kept, RecordPlan):
        method = with_record_noise(method, kept)
    else:
        privacy = kept
    who = full() if among is None else _only(among)
    for r in simulate(told, method, who, privacy, rounds=rounds, seed=seed, on=Threads(1)):
        listener.ends(r.memory)


def _only(among: np.ndarray) -> Participation:
    """Returns the rule by which certain clients take part in each round."""
    return Participation(
        "some", lambda m: len(among) / m, lambda m, source: np.isin(np.arange(m), among), "sleep", lambda m: len(among)
    )


def rate_of(mechanism: Mechanism) -> float:
    """Returns the probability with which a record is in a batch."""
    return mechanism.participation.rate(mechanism.num_clients)
