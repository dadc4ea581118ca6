"""Clients on a Ray cluster: worker processes that own some of them each, their data and memories, for a whole run.

Only vectors move: the server's state goes out once per round, a few partial sums of each worker come back. What is
computed is `clients.tile`, as in process. Ray itself is imported when a run begins, and not before.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fednormec import __version__
from fednormec.core import kernels
from fednormec.core.algorithm import Server
from fednormec.core.bounds import Bound
from fednormec.core.local import Moment
from fednormec.core.machine import keep_freed_memory
from fednormec.core.participation import Cohort
from fednormec.core.problem import Divisible, Metrics, Problem
from fednormec.core.records import Grouped, apart_from_data, bounded_sum, examples_of, record_sizes
from fednormec.core.stages import Stage, looking, profiled
from fednormec.engine.clients import FREE, Branch, Clients, Exchanged, Job, Paying, Work, add, added, tile, tiles
from fednormec.engine.memories import Memories, Remembered, pieces
from fednormec.engine.threads import compute_alone
from fednormec.errors import UserError, WorkerLost, at_least_one, require_room, visible

ANSWERS_WITHIN = 20.0  # seconds: Ray itself would try for minutes
STARTS_WITHIN = 60.0
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what it prints on our stdout; what went wrong is told in our own words
    "RAY_worker_niceness": "0",  # as this process, not 15 behind all others
}
ONLY_THIS_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's name for listening on 127.0.0.1 alone


class Ray(NamedTuple):
    """Place where the workers of a Ray cluster compute the clients, each with data and memories of its own.

    Args:
        address: host:port of the cluster's head, or "auto" for one on this machine. Without it, the cluster that this
            process is connected to, else one of its own, which listens on this machine only and ends with the
            simulation.
        workers: number of worker processes; by default one for each CPU of the cluster.
    """

    address: str | None = None
    workers: int | None = None

    def check(self, job: Job) -> None:
        """Raises UserError if Ray is missing, no cluster answers, or it cannot compute the job."""
        if self.workers is not None:
            at_least_one("workers", self.workers)
        if job.protocol:
            raise UserError("the stages of secure aggregation run in one process or in a federation, not on Ray: leave "
                            "Ray out, or set privacy.protocol = false.")  # fmt: skip
        if find_spec("ray") is None:
            raise UserError("computing on Ray needs Ray: pip install 'fednormec[ray]'.")
        if job.x.device.type != "cpu":
            raise UserError(f"Ray's workers compute on the CPU, not on {job.x.device.type}: leave run.device out.")
        if self.address is not None:
            _require_listener(self.address)
            if "ray" in sys.modules and sys.modules["ray"].is_initialized():
                raise UserError("this process is connected to Ray already: leave the address out.")
            _require_answer(self.address)

    @contextmanager
    def clients(self, job: Job) -> Iterator[Clients]:
        """Opens the clients of a job in worker processes, each with whole stretches of them."""
        m, stretch = job.problem.num_clients, job.stretch
        stretches = -(-m // stretch)
        with _connected(self, stretches) as cpus:
            count = min(stretches, cpus if self.workers is None else self.workers)
            if count > cpus:
                raise UserError(f"the Ray cluster has {cpus} CPUs, one for each worker: ask for at most {cpus} "
                                "workers, or add machines.")  # fmt: skip
            ends = [min(m, stretches * k // count * stretch) for k in range(1, count + 1)]
            with _started(count) as handles:
                owners = [_Owner(*one) for one in zip(handles, [0, *ends[:-1]], ends, strict=True)]
                for owner in owners:  # one after another: no more than one part is on its way
                    _settle(owner, job)
                try:
                    yield _There(job, owners, _Elsewhere(owners, job.memory_shape, job.x.dtype))
                finally:
                    owners.clear()


class _Owner(NamedTuple):
    """Worker process and its clients, first to last - 1."""

    process: Any
    first: int
    last: int


class _There(NamedTuple):
    """Clients that compute in Ray's workers."""

    job: Job
    owners: list[_Owner]
    memories: Remembered
    noisy: bool = False

    def ready(self) -> None:
        pass

    def exchange(
        self, server: Server, cohort: Cohort, moment: Moment, prime: bool = False, paying: Paying = FREE
    ) -> Exchanged:
        """Numbers the tiles of a round over all clients; each worker adds up its own as far as it can."""
        import ray

        sent = ray.put((server.x.numpy(), server.memory.numpy(), server.round))
        cut, number, under_way = tiles(self.job, cohort), 0, []
        for process, _, last in self.owners:
            end = number
            while end < len(cut) and cut[end].computing[0] < last:
                end += 1
            if end > number:
                timed = looking() is not None
                under_way.append(process.exchange.remote(sent, number, cut[number:end], moment, prime, timed))
            number = end
        branches = list[Branch]()
        for sums, seconds in _got(under_way):
            for level, place, total, left_out in sums:
                add(branches, Branch(level, place, Exchanged(torch.tensor(total), left_out)))
            _note(seconds, len(under_way))
        return added(branches, self.job.work(prime).message_width, server.x.device)


class _Elsewhere(NamedTuple):
    """Memories of the workers as if they were here, some rows at a time."""

    owners: list[_Owner]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> Tensor:
        return torch.cat([torch.empty(0, self.shape[1], dtype=self.dtype), *self.blocks()]).view(self.shape)

    def blocks(self) -> Iterator[Tensor]:
        for process, start, end in self._pieces():
            yield torch.tensor(_got([process.block.remote(start, end)])[0])

    def fill(self, read: Callable[[int], Tensor]) -> None:
        for process, start, end in self._pieces():
            _got([process.put.remote(start, read(end - start).numpy())])

    def _pieces(self) -> Iterator[tuple[Any, int, int]]:
        if not self.owners:
            raise UserError("the memories lay in Ray's workers and ended with the simulation: look while it runs.")
        for process, first, last in self.owners:
            for start, end in pieces((last - first, self.shape[1]), self.dtype):
                yield process, start, end


class _Worker:
    """Worker process; it does its arithmetic on one thread, as any worker."""

    def __init__(self) -> None:
        compute_alone()
        keep_freed_memory()

    def versions(self) -> dict[str, str]:
        return _versions()

    def own(self, works: dict[bool, Work], clients: tuple[int, int], width: int, dtype: torch.dtype) -> None:
        """Takes over some clients.

        Args:
            works: their work, and by True that of the round before the first, if there is one.
            clients: number of the first, and number after that of the last.
            width: numbers in a client's memory.
            dtype: that of the memories.
        """
        shape = clients[1] - clients[0], width
        require_room("the memories of a worker's clients", math.prod(shape) * dtype.itemsize,
                     "take more workers, on more machines")  # fmt: skip
        self._works, self._memories = works, Memories(shape, dtype, first=clients[0])

    def exchange(
        self,
        sent: tuple[np.ndarray, np.ndarray, int],
        number: int,
        cut: list[Cohort],
        moment: Moment,
        prime: bool,
        timed: bool,
    ) -> tuple[list[tuple[int, int, np.ndarray, int]], dict[Stage, float]]:
        """Computes its tiles of a round; returns the branches they make, and the seconds per stage.

        Args:
            sent: model, memory and round of the server.
            number: number of the first tile.
            cut: the tiles.
            moment: seed and number of the round.
            prime: whether this is the exact round before the first.
            timed: whether the seconds are asked for; otherwise they are left out.
        """
        work = self._works[prime]
        server = Server(torch.tensor(sent[0]), torch.tensor(sent[1]), sent[2])
        branches = list[Branch]()
        with profiled() as profile:
            for place, some in enumerate(cut, number):
                add(branches, Branch(0, place, tile(work, server, self._memories, some, moment)))
        sums = [(level, place, one.total.numpy(), one.left_out) for level, place, one in branches]
        return sums, profile.facts(1)["stages"] if timed else {}

    def block(self, start: int, end: int) -> np.ndarray:
        rows: np.ndarray = self._memories.rows[start:end].numpy()
        return rows

    def put(self, start: int, rows: np.ndarray) -> None:
        self._memories.rows[start : start + len(rows)] = torch.tensor(rows)


@final
class _Part:
    """Part of a problem whose clients keep their numbers among all clients: local randomness goes by these."""

    def __init__(self, problem: Problem, first: int, client_sizes: np.ndarray) -> None:
        self._problem, self._first = problem, first
        self.dim, self.tile, self.num_clients, self.client_sizes = (
            problem.dim, problem.tile, len(client_sizes), client_sizes,
        )  # fmt: skip

    @property
    def grouped(self) -> bool:
        return isinstance(self._problem, Grouped) and self._problem.grouped

    @property
    def record_sizes(self) -> np.ndarray:
        """Number of records of each client, those of other workers' clients being 0."""
        own = record_sizes(self._problem)
        sizes = np.zeros(max(self.num_clients, self._first + len(own)), np.int64)
        sizes[self._first : self._first + len(own)] = own
        return sizes

    def examples_of(self, client: int, records: np.ndarray) -> np.ndarray:
        return examples_of(self._problem, client - self._first, records)

    def record_sum(self, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
        return bounded_sum(self._problem, x, client - self._first, records, bound)

    def apart_from_data(self, x: Tensor) -> Tensor | None:
        return apart_from_data(self._problem, x)

    def init(self, rng: np.random.Generator) -> Tensor:
        return self._problem.init(rng)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        return self._problem.grad(x, ids - self._first, examples)

    def evaluate(self, x: Tensor) -> Metrics:
        return self._problem.evaluate(x)

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return self._problem.named(x)

    def model(self, x: Tensor) -> Any:
        return self._problem.model(x)


def _settle(owner: _Owner, job: Job) -> None:
    """Sends a worker its clients, or the whole problem if that cannot be taken apart."""
    process, first, last = owner
    problem, sizes = job.problem, job.problem.client_sizes
    part = (
        _Part(problem.part(first, last), first, sizes) if isinstance(problem, Divisible) else _Part(problem, 0, sizes)
    )
    kinds = (False,) if job.algorithm.prime is None else (False, True)
    works = {prime: job.work(prime)._replace(problem=part) for prime in kinds}
    try:
        sending = process.own.remote(works, (first, last), job.memory_shape[1], job.x.dtype)
    except (TypeError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        said = next((line.strip() for line in lines if "pickle" in line), lines[0]).rstrip(".")
        raise UserError(f"the problem or the method cannot be sent to a worker: {visible(said, 200)}.") from error
    _got([sending])


@contextmanager
def _connected(on: Ray, most: int) -> Iterator[int]:
    """Connects to Ray, and ends a connection that it began; yields the number of CPUs of the cluster."""
    os.environ.update(SETTINGS)
    with _listening_here_alone(on.address is None):
        import ray
    if ray.is_initialized():
        yield _cpus()
        return
    quietly: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    with _own_answer_to_signals():
        try:
            if on.address is None:
                asked = min(most, torch.get_num_threads() if on.workers is None else on.workers)
                ray.init(address="local", num_cpus=asked, include_dashboard=False, **quietly)
            else:
                ray.init(address=on.address, **quietly)
        except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
            said = str(error).strip().partition("\n")[0].rstrip(".")
            raise UserError(f"Ray did not start: {said}.") from error
    try:
        yield _cpus()
    finally:
        ray.shutdown()


@contextmanager
def _started(count: int) -> Iterator[list[Any]]:
    """Starts worker processes, which end with the context; they are not restarted, since memories would be lost."""
    import ray

    kind = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(_Worker)
    handles = [kind.remote() for _ in range(count)]
    try:
        asked = [handle.versions.remote() for handle in handles]
        ready, waiting = ray.wait(asked, num_returns=count, timeout=STARTS_WITHIN)
        if waiting:
            raise UserError(f"{len(waiting)} of {count} workers did not start within {STARTS_WITHIN:.0f} s: the Ray "
                            "cluster is busy; ask for fewer workers, or later.")  # fmt: skip
        try:
            found = _got(ready)
        except WorkerLost as error:
            raise UserError("a worker could not start: fednormec must be installed on every machine of the Ray "
                            "cluster.") from error  # fmt: skip
        other = next((versions for versions in found if versions != _versions()), None)
        if other is not None:
            raise UserError(f"a worker has {_words(other)}, but here it is {_words(_versions())}: install the same on "
                            "every machine.")  # fmt: skip
        yield handles
    finally:
        for handle in handles:
            with suppress(Exception):  # of a connection that is gone
                ray.kill(handle)


def _got(asked: list[Any]) -> list[Any]:
    """Returns the workers' answers, in the order of the questions; raises their errors as ours."""
    import ray
    from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

    try:
        answers: list[Any] = ray.get(asked)
    except RayTaskError as error:
        raise error.cause from error
    except OutOfMemoryError:
        raise WorkerLost("a worker was ended by Ray because its machine was out of memory.") from None
    except RayError:
        raise WorkerLost("a worker died, and with it what its clients remembered.") from None
    return answers


def _note(seconds: dict[Stage, float], workers: int) -> None:
    """Adds the workers' seconds to the profile, if one is made.

    What workers do side by side counts as the time that passed meanwhile.
    """
    profile = looking()
    if profile is not None:
        for stage, spent in seconds.items():
            profile.add(stage, spent / workers)


def _require_listener(address: str) -> None:
    """Raises UserError if the address is none, or nobody listens there."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not (host and port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise UserError(f"the address of a Ray cluster is that of its head, such as 10.0.0.1:6379, or auto, not "
                        f"'{address}'.")  # fmt: skip
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN / 4).close()
    except OSError as error:
        raise UserError(_nobody_at(address)) from error


def _require_answer(address: str) -> None:
    """Raises UserError if no cluster answers; asks in a process of its own, since Ray would keep trying for minutes."""
    code = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')"
    try:
        subprocess.run(
            [sys.executable, "-c", code, address], env=os.environ | SETTINGS, capture_output=True, check=True,
            timeout=ANSWERS_WITHIN,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        if b"AuthToken" in (getattr(error, "stderr", None) or b""):
            raise UserError(f"the Ray cluster at {address} asks for a token and got none, or another one: set "
                            "RAY_AUTH_MODE=token and give Ray the cluster's token.") from error  # fmt: skip
        raise UserError(_nobody_at(address)) from error


def _nobody_at(address: str) -> str:
    return f"no Ray cluster answers at {address}: start one with `ray start --head --port=6379`, or check the address."


@contextmanager
def _listening_here_alone(alone: bool) -> Iterator[None]:
    """Sets what Ray reads when it is imported: a cluster of our own (`alone`) listens on this machine only."""
    before = {name: os.environ.get(name) for name in ONLY_THIS_MACHINE}
    if alone:
        os.environ.update(ONLY_THIS_MACHINE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_answer_to_signals() -> Iterator[None]:
    """Keeps our handler of SIGTERM, which finishes the round; Ray would replace it with its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cpus() -> int:
    import ray

    return int(ray.cluster_resources().get("CPU", 0))


def _versions() -> dict[str, str]:
    compiled = "compiled" if kernels.library() is not None else "not compiled"
    return {"fednormec": __version__, "torch": torch.__version__, "numpy": np.__version__, "kernels": compiled}


def _words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
