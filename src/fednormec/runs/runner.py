"""Performs a run from config to folder: assembles, trains with progress, saves, and says how it ended."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fednormec.config.assemble import Experiment, assemble
from fednormec.config.schema import Config, read
from fednormec.config.settings import PYTHON
from fednormec.core.stages import Profile, profiled, stage
from fednormec.engine.clients import Place
from fednormec.engine.observers import Observer, Watch, watching
from fednormec.engine.planning import planned
from fednormec.engine.record import Record
from fednormec.engine.round import Resumed, Round, record
from fednormec.errors import (
    Diverged,
    NotWritten,
    Stopped,
    StoppedAtOnce,
    UserError,
    WorkerLost,
    note,
)
from fednormec.files import read_json
from fednormec.privacy.records import AnyPlan
from fednormec.privacy.statement import Statement, state
from fednormec.runs.checkpoint import Checkpoint, Checkpoints, tidy
from fednormec.runs.clients import by_client
from fednormec.runs.folder import RunFolder, default_path, how_to_resume
from fednormec.runs.guarantee import advised, against_guarantee, measures
from fednormec.runs.kept import Keeper, require_keepable
from fednormec.runs.origin import origin
from fednormec.runs.progress import progress, sparkline
from fednormec.runs.records import Summary, Tally, finished
from fednormec.runs.resume import (
    changes,
    differs,
    repeated,
    require_no_secure_model,
    require_same_config,
    require_same_data,
    with_resumption,
)
from fednormec.runs.shapes import SHAPES, about
from fednormec.runs.start import (
    checkpoint_rounds,
    choices,
    outlook_of,
    place_of,
    start,
    starting_point,
    threads_of,
    with_workers,
)
from fednormec.runs.summary import ON_REQUEST, Ending, summarize
from fednormec.runs.tensorboard import events, require_tensorboard

if TYPE_CHECKING:
    from fednormec.theory.setting import Constants


class Site(NamedTuple):
    """Site of a run's problem and clients, if they are not here.

    Args:
        assemble: builds the experiment.
        on: where clients compute; by default on threads.
        says: what the statement says besides.
        command: the command to resume with.
        forgets: whether all memories start over when the run resumes.
        waits: whether no round may begin before the checkpoint of the last one is stored: clients that remember only
            their last two rounds could not follow a server that falls back further.
        tell: called with what a person should know.
        one_program: whether one program is all clients and the server, which the statement then says.
    """

    assemble: Callable[[Config], Experiment] = assemble
    on: Place | None = None
    says: tuple[tuple[str, str], ...] = ()
    command: str | None = None
    forgets: bool = False
    waits: bool = False
    tell: Callable[[object], None] = note
    one_program: bool = True


HERE = Site()
RETRY = 1.0  # seconds between two attempts to write a checkpoint that a site waits for
StopWhen = Callable[[Record], str | None]


def never(public: Record) -> None:
    """Stops no run."""


def perform(
    config: Config,
    name: str,
    out: Path | None,
    quiet: bool,
    plan: bool = False,
    observers: Sequence[Observer] = (),
    tensorboard: bool = False,
    profile: bool = False,
    stop: Callable[[], bool] = lambda: False,
    site: Site = HERE,
    workers: int | None = None,
    notes: Sequence[str] = (),
    stop_when: StopWhen = never,
) -> Summary:
    """Trains what the config describes and returns the summary that is also stored in the folder.

    The folder is made after everything was checked, so that a mistake leaves nothing behind. A run whose model diverges
    is kept, with the last finite model. Where clients compute, and on how many workers, changes no bit and is not
    written down.

    Args:
        config: the sections of the config.
        name: what the run is called, where `out` is left out.
        out: the folder, which must not hold a run; by default runs/NAME-1 or the next number that is free.
        quiet: shows no progress.
        plan: takes the settings that the theory recommends.
        observers: who else watches.
        tensorboard: also writes the figures into event files.
        profile: also writes where the time went into profile.json and the summary that is returned.
        stop: asked after each round whether to stop there, fit to be resumed.
        site: where the problem and the clients are.
        workers: overrides run.workers.
        notes: what to say about the config when it has been checked, unless `quiet`.
        stop_when: asked after each round, with the public part of its record, why to end the run there; None: go on.
    """
    if tensorboard:
        require_tensorboard()
    with profiled() if profile else nullcontext() as looking:
        config, known = advised(config) if plan else (config, None)
        with stage("data"):
            experiment = with_workers(site.assemble(config), workers)
        if plan:
            from fednormec.theory.question import require_covered

            require_covered(experiment)
        problem = experiment.problem if site.command is None else None  # a federation's clients are not there yet
        private, x = experiment.privacy is not None, starting_point(experiment)
        require_keepable(experiment.run.keep, private, experiment.algorithm, x, problem)
        path, paying = out or default_path(name), _Paying()
        rounds = start(experiment, place_of(experiment, site.on, path), paying)
        with RunFolder.new(path, experiment.config, plan, origin(experiment)) as folder:
            paying.folder = folder
            unused = [f"this run has no use for [{section}]." for section in experiment.unused]
            for said in () if quiet else (*notes, *unused, *outlook_of(experiment)):
                site.tell(said)
            with _says_how_to_go_on(path, site.command):
                watchers = partial(_observers, folder, experiment.run.rounds, quiet, tensorboard, 0, observers)
                run = _Run(experiment, folder, paying, site, watchers, stop, stop_when, looking, None, plan, known)
                return _train(run, rounds)


def go_on(
    path: Path,
    quiet: bool,
    observers: Sequence[Observer] = (),
    tensorboard: bool = False,
    profile: bool = False,
    stop: Callable[[], bool] = lambda: False,
    site: Site = HERE,
    workers: int | None = None,
    stop_when: StopWhen = never,
) -> Summary:
    """Resumes the run in this folder after its newest intact checkpoint; of a finished run, returns the summary again.

    The bits are the same as if the run had never been interrupted, secure noise excepted.

    Args:
        path: the folder.
        quiet, observers, tensorboard, profile, stop, site, workers, stop_when: as in `perform`; `stop_when` first gets
            the rounds that need not be computed again.
    """
    if tensorboard:
        require_tensorboard()
    with profiled() if profile else nullcontext() as looking, RunFolder.again(path) as folder:
        summary = finished(path)
        if summary is not None:
            site.tell(f"the run in {path} has come to its end already.")
            tidy(path, int(read(path / "config.toml").get("run", {}).get("keep_checkpoint") is True))
            return _with_texts(summary, folder)
        config = read(path / "config.toml")
        require_same_config(path, folder.config_digest)
        if PYTHON in config and site.assemble is assemble:
            raise UserError(f"the run in {path} was begun from Python, where its problem and its method are. To go on, "
                            f"call {how_to_resume(path)} there.")  # fmt: skip
        with stage("data"):
            experiment = with_workers(site.assemble(config), workers)
        begun = read_json(path / "environment.json")
        require_same_data(begun, experiment)
        checkpoint, trouble = _checkpoints(experiment, folder).newest(folder.digest_of)
        if checkpoint is not None and site.forgets:
            checkpoint = checkpoint.without_memories()
        done = 0 if checkpoint is None else checkpoint.round
        if checkpoint is None:
            require_no_secure_model(path, experiment)
        again = repeated(experiment, path, checkpoint, len(folder.readable()))
        paying = _Paying(folder, again.releases - done if experiment.privacy is not None else 0)
        place = place_of(experiment, site.on, path)
        rounds = start(experiment, place, paying, Resumed(checkpoint, again.releases))
        for said in (*trouble, *changes(begun), f"goes on after round {done} of {experiment.run.rounds}", *again.notes):
            site.tell(f"{said}.")
        folder.go_on_after(done)
        folder.note("environment", with_resumption(begun, done))
        by_plan = begun.get("planned") is True
        with _says_how_to_go_on(path, site.command):
            watchers = partial(_observers, folder, experiment.run.rounds, quiet, tensorboard, done, observers)
            run = _Run(experiment, folder, paying, site, watchers, stop, stop_when, looking, checkpoint, by_plan)
            return _train(run, rounds)


class _Paying:
    """Payment for rounds, into the folder's ledger; remembers by which plan.

    Args:
        folder: the run folder, which must be known before the first round.
        again: number of rounds that are paid for twice, because they were drawn again with new noise.
    """

    def __init__(self, folder: RunFolder | None = None, again: int = 0) -> None:
        self.folder, self.again = folder, again
        self.plan: AnyPlan | None = None

    def __call__(self, number: int, plan: AnyPlan) -> None:
        assert self.folder is not None
        self.plan = plan
        self.folder.pay(number, plan)


class _Run(NamedTuple):
    """What a run needs besides its rounds.

    Attributes:
        observers: opens all who watch.
        by_plan: whether the theory chose the settings.
        known: the constants that it chose them from.
    """

    experiment: Experiment
    folder: RunFolder
    paying: _Paying
    site: Site
    observers: Callable[[], list[Observer]]
    stop: Callable[[], bool]
    stop_when: StopWhen
    profile: Profile | None
    checkpoint: Checkpoint | None = None
    by_plan: bool = False
    known: "Constants | None" = None


def _train(run: _Run, rounds: Generator[Round, None, None]) -> Summary:
    """Computes the rounds, and stores how the run ended."""
    experiment, folder = run.experiment, run.folder
    tally = Tally(folder.records)
    with watching(run.observers()) as watch:
        keeper, ending = _in_order(run, rounds, tally, watch)
        x = keeper.model()
        statement = _statement(run, ending.why)
        summary = summarize(experiment, tally, folder.path, ending, statement) | keeper.facts()
        if ending.why is None and tally.evaluated and measures(experiment) is not None:
            summary["guarantee"] = against_guarantee(experiment, folder, tally.evaluated, run.known, run.by_plan)
        summary |= {"not_private": [*sorted(tally.client_figures), "left_out"], "left_out": tally.left_out}
        with stage("disk"):
            if experiment.shapes is not None:
                folder.note(Path(SHAPES).stem, about(experiment.shapes))
            flat = x if PYTHON in experiment.config else None
            folder.finish(experiment.problem.named(x), summary, statement, flat)
            keeper.tidy()
            tidy(folder.path, 1 if experiment.run.keep_checkpoint else 0)
        watch.close(ending.why)
    if run.profile is not None:
        workers = threads_of(experiment).pool(experiment.problem).workers
        summary["profile"] = run.profile.facts(workers) | {"choices": choices(experiment, run.site.on)}
        folder.note("profile", summary["profile"])
    texts = {"curve": sparkline(tally.curve), "statement": None if statement is None else statement.text}
    return Summary(summary | texts)


def _in_order(run: _Run, rounds: Generator[Round, None, None], tally: Tally, watch: Watch) -> tuple[Keeper, Ending]:
    """Takes the rounds in the order that the privacy promise rests on.

    1. Ledger: `rounds` pays for a round (`_Paying`) before anything of it is released, and that is on the disk then. A
       crash right after it overstates what was spent; in any other order it could understate it.
    2. Release: the round comes out of `rounds`, with its noise.
    3. Record: what was released is written down before a checkpoint, which holds a digest of all records. Whoever
       resumes can thus tell which rounds are on record, and that they are those of the checkpoint.
    4. Checkpoint: last. A round in it is never computed again, and so, with secure noise, never released twice.

    Observers hear of a round after that: nothing rests on them.

    Returns:
        What kept the model to store, and how the rounds ended.
    """
    measure, checkpoints = measures(run.experiment), _checkpoints(run.experiment, run.folder)
    keeper = _keeper(run)
    why = next((said for said in map(run.stop_when, run.folder.public_parts()) if said is not None), None)
    try:
        for r in () if why is not None else rounds:
            with stage("evaluation"):
                measured = None if measure is None or r.metrics is None else measure(r)
            line = record(r, measured)
            with stage("disk"):
                keeper.after(r)
                run.folder.add(line)
            tally.add(line)
            stopped = _keep(run, checkpoints, r)
            watch.after(r, line)
            if stopped:
                raise Stopped(f"stopped after round {r.number}.")
            why = None if r.last else run.stop_when(line.public_part)
            if why is not None:
                rounds.close()
    except Diverged as end:
        return keeper, Ending("diverged", str(end))
    return keeper, Ending() if why is None else Ending("stopped", f"{ON_REQUEST}{why}")


def _keeper(run: _Run) -> Keeper:
    """Returns what keeps the model to store, as it was after the checkpoint."""
    algorithm, keep, private = run.experiment.algorithm, run.experiment.run.keep, run.experiment.privacy is not None
    if run.checkpoint is None:
        return Keeper(keep, private, starting_point(run.experiment), run.folder.path)
    server = run.checkpoint.server
    average = algorithm.average(server) if keep == "average" else None
    return Keeper(keep, private, algorithm.model(server) if average is None else average, run.folder.path, resumes=True)


def _keep(run: _Run, checkpoints: Checkpoints, r: Round) -> bool:
    """Writes a checkpoint if it is due, or if the run is to stop here; returns whether it is."""
    stop = not r.last and run.stop()
    due = run.experiment.run.keep_checkpoint if r.last else checkpoints.due(r.number)  # memories elsewhere end with it
    if stop or due:
        with stage("disk"):
            run.folder.sync()
            try:
                checkpoints.save(r, run.folder.digest)
            except NotWritten as error:
                if stop or r.last:
                    raise
                if not run.site.waits:
                    run.site.tell(f"{error} The run goes on without this checkpoint.")
                    return stop
                run.site.tell(f"{error} No client is asked before it is.")
                _save_at_last(run, checkpoints, r)
    return stop


def _save_at_last(run: _Run, checkpoints: Checkpoints, r: Round) -> None:
    """Tries again and again to write a checkpoint; raises NotWritten if the run is to stop meanwhile."""
    while True:
        time.sleep(RETRY)
        try:
            checkpoints.save(r, run.folder.digest)
        except NotWritten:
            if run.stop():
                raise
        else:
            run.site.tell(f"the checkpoint of round {r.number} is stored now")
            return


def _observers(
    folder: RunFolder, rounds: int, quiet: bool, tensorboard: bool, begun: int, others: Sequence[Observer] = ()
) -> list[Observer]:
    """Returns all who watch a run; `begun` rounds were done in an earlier command."""
    logged = [events(folder.path, begun)] if tensorboard else []
    return [by_client(folder), *logged, progress(rounds, quiet, begun), *others]


def _checkpoints(experiment: Experiment, folder: RunFolder) -> Checkpoints:
    seconds = experiment.run.checkpoint_seconds
    return Checkpoints(folder.path, folder.config_digest, checkpoint_rounds(experiment), seconds)


@contextmanager
def _says_how_to_go_on(path: Path, command: str | None) -> Iterator[None]:
    """Adds how to resume to what ends a run early and leaves it fit for that.

    That is being asked to stop, a full disk, a worker that died, too little memory.
    """
    how = f"To go on: {command or how_to_resume(path)}"
    try:
        yield
    except Stopped as end:
        raise Stopped(f"{end} {how}") from None
    except KeyboardInterrupt:
        raise StoppedAtOnce(f"stopped at once; the last checkpoint stands. {how}") from None
    except (NotWritten, WorkerLost, OSError) as error:
        raise UserError(f"{str(error).rstrip('.')}. {how}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise UserError(
            f"the memory of this machine does not suffice. With more of it, {how[0].lower()}{how[1:]}"
        ) from error


def _statement(run: _Run, ended: str | None) -> Statement | None:
    """Returns what may be said of all that was released, which is what the ledger has paid for.

    `ended` says why the run ended before its last round, if it did.
    """
    experiment, folder, says = run.experiment, run.folder, run.site.says
    for said in () if folder.differs is None else differs(folder.differs, experiment):
        run.site.tell(f"{said}.")
        if experiment.privacy is not None and not experiment.privacy.secure:
            says = (*says, ("not covered", said))
    if experiment.privacy is None:
        return None
    plan = run.paying.plan
    if plan is None:  # nothing was left to do
        plan = planned(
            experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy,
            experiment.run.rounds,
        )  # fmt: skip
        folder.open_ledger(plan)
    return state(plan, folder.releases, run.paying.again, says, ended, run.site.one_program)


def _with_texts(summary: Summary, folder: RunFolder) -> Summary:
    """Returns a summary that was read back, with what is not in the file."""
    text = folder.path / "privacy.txt"
    statement = text.read_text(encoding="utf-8").rstrip("\n") if text.is_file() else None
    curve = sparkline(Tally(folder.readable()).curve)
    return Summary(summary | {"out": str(folder.path), "curve": curve, "statement": statement})
