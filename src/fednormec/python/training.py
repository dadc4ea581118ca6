"""Training of a problem and a method from Python, in memory or with a run folder, and its resumption."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fednormec.config.schema import read
from fednormec.config.settings import PYTHON, Keep
from fednormec.core.algorithm import Algorithm
from fednormec.core.participation import Participation, full
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.engine.clients import Place
from fednormec.engine.observers import Observer, Watch, watching
from fednormec.engine.planning import evaluation_interval
from fednormec.engine.record import Record
from fednormec.engine.round import Trained, record
from fednormec.engine.simulation import simulate
from fednormec.engine.threads import Threads
from fednormec.errors import Diverged, UserError
from fednormec.files import read_json
from fednormec.privacy.asked import Privacy
from fednormec.privacy.records import AnyPlan
from fednormec.privacy.statement import Statement, state
from fednormec.python.values import Values, begun, known_again, require_kinds
from fednormec.results.reading import read_run
from fednormec.results.report import with_report
from fednormec.runs.folder import VECTOR, how_to_resume
from fednormec.runs.interrupts import STOPPING, asked_to_stop
from fednormec.runs.kept import Keeper, require_keepable
from fednormec.runs.records import finished
from fednormec.runs.runner import Site, go_on, perform
from fednormec.runs.summary import ON_REQUEST


def train(
    problem: Problem,
    algorithm: Algorithm,
    participation: Participation | None = None,
    privacy: Privacy | None = None,
    *,
    rounds: int,
    seed: int = 0,
    x0: Tensor | None = None,
    evaluate_every: int | None = None,
    workers: int | None = None,
    on: Place | None = None,
    observers: Sequence[Observer] = (),
    stop_when: Callable[[Record], str | None] = lambda public: None,
    keep: Keep = "last",
    out: Path | str | None = None,
    checkpoint_rounds: int | None = None,
) -> Trained:
    """Runs `simulate` to its end and returns the last finite model with the history. A divergence does not raise.

    With `out` it leaves the folder that `fednormec run` leaves: config, ledger, metrics, checkpoints until the end, the
    model, the privacy statement, a report. What was killed, or stopped by Ctrl-C, which finishes the round, goes on
    with `resume`. The model has the same bits with and without a folder.

    Args:
        problem: what is minimised, f_1, ..., f_M.
        algorithm: the method, with its local update and its bound.
        participation: who takes part in a round; by default everybody.
        privacy: what is kept private; None: no noise.
        rounds: number of rounds.
        seed: seed of all randomness but secure noise.
        x0: where to start; by default problem.init.
        evaluate_every: number of rounds between evaluations of the model; by default it is evaluated 20 to 39 times, or
            less often where that would take more than about 5 % of the time.
        workers: number of workers, where `on` leaves that open: workers=8 is short for on=Threads(workers=8).
        on: where clients compute, as in `simulate`.
        observers: who watches, told after each round and at the end.
        stop_when: may end the run after a round. It gets the public part of the round's record, nothing that looks at
            clients' data, and returns why to stop, or None to continue. The statement then says that the run was
            stopped and why, and its ε is that of all rounds, since what was released decided.
        keep: which model is returned and stored: that after the "last" round, the "average" that the server's optimiser
            keeps, or the "best" of all that were evaluated, by the first figure on the test set, averages included.
        out: a new folder for the run; None: nothing is written.
        checkpoint_rounds: number of rounds between checkpoints, with `out`; there is one every 30 seconds in any case,
            and with secure noise by default one after each round.

    Returns:
        The model, the history (one record per round), and what may be said about privacy.

    >>> import fednormec as fn
    >>> problem, method = fn.random_quadratic(50, 3), fn.dp_fed_avg_clip(fn.gd(0.1))
    >>> done = train(problem, method, privacy=fn.Privacy(epsilon=4.0), rounds=9,
    ...              stop_when=lambda public: "ε above 1" if public["epsilon"] > 1 else None)
    >>> len(done.history) < 9, done.stopped, done.statement.facts["rounds_counted"]
    (True, 'ε above 1', 9)
    """
    values, place = Values(problem, algorithm, participation, privacy, x0), placed(on, workers)
    if out is None:
        if checkpoint_rounds is not None:
            raise UserError("checkpoint_rounds is for a run with a folder: give out, such as out='runs/mine'.")
        require_kinds(values)
        return _in_memory(values, rounds, seed, evaluate_every, place, observers, stop_when, keep)
    Watch(observers)  # raises UserError now if one of them is no observer
    asked = {"rounds": rounds, "seed": seed, "evaluate_every": evaluate_every, "checkpoint_rounds": checkpoint_rounds,
             "keep": keep}  # fmt: skip
    experiment, path = begun(values, asked), Path(out)
    with asked_to_stop(STOPPING) as stop:
        site = Site(lambda config: experiment, place)
        done = perform({}, path.name, path, True, observers=observers, stop=stop, site=site, stop_when=stop_when)
    with_report(done)
    return _trained(path, problem)


def resume(
    folder: Path | str,
    problem: Problem,
    algorithm: Algorithm,
    participation: Participation | None = None,
    privacy: Privacy | None = None,
    *,
    rounds: int | None = None,
    x0: Tensor | None = None,
    workers: int | None = None,
    on: Place | None = None,
    observers: Sequence[Observer] = (),
    stop_when: Callable[[Record], str | None] = lambda public: None,
) -> Trained:
    """Resumes the run that `train` began in this folder; of a finished run, returns the result again.

    It goes on after the newest checkpoint, to the bits of a run that was never interrupted (secure noise excepted).
    Problem and method must be those that the run began with: their sizes, names and bounds, the starting model, the
    data and the method's functions with the numbers in them are compared. Of a problem of your own class a method
    digest() is asked, which returns a text that follows from its data; without one, gradients of a few clients are
    compared.

    Args:
        folder: the run folder.
        problem: the problem.
        algorithm: the method.
        participation: who takes part in a round; needed only if it is a rule of your own, else compared.
        privacy: what is kept private; compared, and by default that of the folder.
        rounds: number of rounds; compared, and by default that of the folder.
        x0: where the run started, if it was given one.
        workers: number of workers, as in `train`.
        on: where clients compute, as in `simulate`.
        observers: who watches from here on.
        stop_when: as in `train`; it first gets the rounds that need not be computed again.

    Raises:
        UserError: if the folder holds no run from Python, is damaged, or the run is of another problem or method.
    """
    path = Path(folder)
    if not (path / "config.toml").is_file():
        raise UserError(f"{path} holds no run to go on with.")
    config, place = read(path / "config.toml"), placed(on, workers)
    if PYTHON not in config:
        raise UserError(f"the run in {path} was begun by its config and not from Python: {how_to_resume(path)}")
    Watch(observers)
    experiment = known_again(config, Values(problem, algorithm, participation, privacy, x0), rounds)
    with asked_to_stop(STOPPING) as stop:
        site = Site(lambda config: experiment, place)
        done = go_on(path, True, observers, stop=stop, site=site, stop_when=stop_when)
    with_report(done)
    return _trained(path, problem)


def _in_memory(
    values: Values,
    rounds: int,
    seed: int,
    evaluate_every: int | None,
    place: Place,
    observers: Sequence[Observer],
    stop_when: Callable[[Record], str | None],
    keep: Keep,
) -> Trained:
    problem, algorithm, participation, privacy, x0 = values
    every = evaluate_every
    if every is None:
        every = evaluation_interval(problem, algorithm, participation or full(), rounds, privacy is not None)
    x = problem.init(generator(seed, "init")) if x0 is None else x0
    require_keepable(keep, privacy is not None, algorithm, x, problem)
    keeper = Keeper(keep, privacy is not None, x)
    history, diverged, statement, stopped = list[Record](), None, None, None
    spent: list[AnyPlan] = []
    simulation = simulate(
        problem, algorithm, participation, privacy, rounds=rounds, seed=seed, x0=x0, evaluate_every=every, on=place,
        before_release=lambda number, plan: spent.append(plan),
    )  # fmt: skip
    with watching(observers) as watch:
        try:
            for r in simulation:
                keeper.after(r)
                history.append(record(r))
                public = history[-1].public_part
                watch.after(r, history[-1])
                stopped = None if r.last else stop_when(public)
                if stopped is not None:
                    simulation.close()
        except Diverged as end:
            diverged = end
        why = str(diverged) if diverged is not None else None if stopped is None else f"{ON_REQUEST}{stopped}"
        watch.close(why)
    x = keeper.model()
    if spent:
        statement = state(spent[-1], len(spent), ended=why)
    return Trained(problem.model(x), x, history, diverged, statement, stopped)


def _trained(path: Path, problem: Problem) -> Trained:
    """Returns the end of a run that has finished, read back from its folder."""
    summary = finished(path)
    assert summary is not None
    try:
        x = load_file(path / VECTOR)["x"].to(problem.init(generator(0, "init")).device)
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(
            f"{path / VECTOR}, the model of a finished run, cannot be read: put it back from a copy."
        ) from error
    history, why = [line.measured() for line in read_run(path).records], str(summary.get("message"))
    begins = f"the model diverged in round {summary.rounds + 1}: "
    diverged = Diverged(summary.rounds + 1, why.removeprefix(begins)) if summary.status == "diverged" else None
    stopped = why.removeprefix(ON_REQUEST) if summary.status == "stopped" else None
    return Trained(problem.model(x), x, history, diverged, _statement(path), stopped, path)


def _statement(path: Path) -> Statement | None:
    facts = read_json(path / "privacy.json")
    if not facts:
        return None
    epsilon = float("inf") if facts["epsilon"] is None else facts["epsilon"]
    text = (path / "privacy.txt").read_text(encoding="utf-8").rstrip("\n")
    return Statement(epsilon, facts["delta"], text, facts | {"epsilon": epsilon})


def placed(on: Place | None, workers: int | None) -> Place:
    """Returns the place with a number of workers, where it leaves that open."""
    if on is None or workers is None:
        return Threads(workers) if on is None else on
    given: Any = on
    if "workers" in getattr(on, "_fields", ()) and given.workers is None:
        place: Place = given._replace(workers=workers)
        return place
    raise UserError("`on` says where clients compute and on how many workers: leave workers out.")
