"""Start of an experiment's rounds: what a run takes from its settings, and what it chooses by rule."""

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fednormec.config.assemble import Experiment, evaluate_every
from fednormec.core import kernels
from fednormec.core.randomness import generator
from fednormec.engine.clients import Place
from fednormec.engine.planning import planned
from fednormec.engine.ray_cluster import Ray
from fednormec.engine.round import Resumed, Round
from fednormec.engine.simulation import simulate
from fednormec.engine.threads import Threads
from fednormec.errors import UserError, at_least_one
from fednormec.privacy.outlook import notes
from fednormec.privacy.records import AnyPlan
from fednormec.problems.neural import NeuralProblem


def start(
    experiment: Experiment, place: Place, before_release: Callable[[int, AnyPlan], None], resume: Resumed | None = None
) -> Generator[Round, None, None]:
    """Returns the rounds of an experiment; raises UserError before the first if something does not fit together."""
    run = experiment.run
    x0 = experiment.x0 if resume is None or resume.saved is None else None  # a checkpoint has a model of its own
    return simulate(
        experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy, rounds=run.rounds,
        seed=run.seed, x0=x0, evaluate_every=evaluate_every(experiment), on=place, before_release=before_release,
        resume=resume,
    )  # fmt: skip


def outlook_of(experiment: Experiment) -> list[str]:
    """Returns what to say of noise and signal before the first round."""
    problem, algorithm, participation, privacy, run, *_ = experiment
    return notes(None if privacy is None else planned(problem, algorithm, participation, privacy, run.rounds))


def place_of(experiment: Experiment, on: Place | None = None, folder: Path = Path()) -> Place:
    """Returns where clients compute: `on` with the workers that the run asks for, by default threads.

    `folder` is where memories are stored that are to lie in a file; it need not be there before the first round.
    """
    run, pool = experiment.run, threads_of(experiment)
    pool.pool(experiment.problem)  # raises UserError if there can be no such workers
    if on is None:
        return pool._replace(memories_in=folder) if run.memories == "file" else pool
    if not isinstance(on, Ray):
        return on
    if run.memories == "file":
        raise UserError("with Ray the memories lie in the workers' own memory: leave run.memories = 'file' out, or "
                        "compute in this process.")  # fmt: skip
    return on if run.workers is None else on._replace(workers=run.workers)


def threads_of(experiment: Experiment) -> Threads:
    """Returns the threads that a run asks for."""
    return Threads(experiment.run.workers, experiment.run.chunk_size)


def starting_point(experiment: Experiment) -> Tensor:
    """Returns the model before the first round."""
    own = experiment.x0
    return experiment.problem.init(generator(experiment.run.seed, "init")) if own is None else own


def checkpoint_rounds(experiment: Experiment) -> int | None:
    """Returns the number of rounds between checkpoints as asked; otherwise 1 with secure noise, and None without.

    With secure noise it is every round because one that must be drawn again is one more release.
    """
    run, privacy = experiment.run, experiment.privacy
    if run.checkpoint_rounds is None and privacy is not None and privacy.secure:
        return 1
    return run.checkpoint_rounds


def with_workers(experiment: Experiment, workers: int | None) -> Experiment:
    """Returns the experiment with another number of workers than its config asks for, which changes no bit."""
    if workers is None:
        return experiment
    return experiment._replace(run=replace(experiment.run, workers=at_least_one("--workers", workers)))


def choices(experiment: Experiment, on: Place | None = None) -> dict[str, Any]:
    """Returns what a run chooses by rule where its config leaves it open; none of it changes more than rounding.

    The number of workers that Ray's cluster gives by itself is its own affair: None.
    """
    problem, algorithm, run = experiment.problem, experiment.algorithm, experiment.run
    pool = threads_of(experiment).pool(problem)
    numbers = problem.num_clients * algorithm.memory_slots * problem.dim
    return {
        "gradients": problem.way if isinstance(problem, NeuralProblem) else "formula",
        "kernels": kernels.library() is not None,
        "tile": problem.tile,
        "engine": "threads" if on is None else "ray" if isinstance(on, Ray) else "elsewhere",
        "workers": pool.workers if on is None else run.workers,
        "chunk_size": pool.chunk_size,
        "memories": run.memories,
        "memories_bytes": numbers * (4 if run.dtype == "float32" else 8),
        "evaluate_every": evaluate_every(experiment),
        "checkpoint_rounds": checkpoint_rounds(experiment),
        "checkpoint_seconds": run.checkpoint_seconds,
    }
