"""A run from config to folder: assemble, train with progress, save, and say how it ended."""

import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fednormec.config.assemble import Experiment, assemble
from fednormec.config.schema import Config, read
from fednormec.core.randomness import generator
from fednormec.core.stages import Profile, profiled, stage
from fednormec.engine.clients import Place
from fednormec.engine.planning import planned
from fednormec.engine.round import COUNTS, MISSED, Resumed, Round, record
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
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.privacy.mechanism import Plan
from fednormec.privacy.statement import Statement, state
from fednormec.runs.checkpoint import Checkpoint, Checkpoints, tidy
from fednormec.runs.folder import RunFolder, default_path
from fednormec.runs.progress import shown, sparkline
from fednormec.runs.resume import (
    changes,
    differs,
    repeated,
    require_same_config,
    require_same_data,
    with_resumption,
)
from fednormec.runs.start import checkpoint_rounds, choices, data_digest, place_of, start, threads_of, with_workers
from fednormec.runs.summary import summarize
from fednormec.runs.tensorboard import logged, require_tensorboard

if TYPE_CHECKING:
    from fednormec.theory.setting import Constants

ABOUT = ("round", "epsilon", "delta", "label", "not_private")  # what a record has besides figures of the model
NOT_OF_THE_MODEL = (*COUNTS, MISSED, "memory_error", "tracking_error")
SHOWN = ("test_accuracy", "train_loss")  # the curve of a run is that of the first of these that it has


class Manner(NamedTuple):
    """How a run is accompanied. `on_round` hears the number of each round that is done;
    `stop` is asked after each whether somebody wants it to end there."""

    quiet: bool = True
    on_round: Callable[[int], None] = lambda number: None
    tensorboard: bool = False
    profile: bool = False
    stop: Callable[[], bool] = lambda: False


class Site(NamedTuple):
    """Where a run's problem and clients are, if not here: what builds its experiment, what makes its clients, what its
    statement says besides, the command to go on with, and whether that lets all memories start over."""

    assemble: Callable[[Config], Experiment] = assemble
    on: Place | None = None
    says: tuple[tuple[str, str], ...] = ()
    command: str | None = None
    forgets: bool = False


HERE = Site()


def perform(
    config: Config,
    name: str,
    out: Path | None,
    quiet: bool,
    plan: bool = False,
    on_round: Callable[[int], None] = lambda number: None,
    tensorboard: bool = False,
    profile: bool = False,
    stop: Callable[[], bool] = lambda: False,
    site: Site = HERE,
    workers: int | None = None,
) -> dict[str, Any]:
    """Trains what the config describes and returns the summary that also lies in the folder.

    With `plan` the settings are those that the theory recommends. The folder is made after everything was checked, so
    that a mistake leaves nothing behind. A run whose model diverges is kept, with the last finite model. With
    `tensorboard` the figures also go into event files, with `profile` profile.json and the summary that is returned say
    where the time went. Clients compute where `site` says; `workers` overrides run.workers. Ray and workers change no
    bit and are not written down.
    """
    manner = Manner(quiet, on_round, tensorboard, profile, stop)
    if tensorboard:
        require_tensorboard()
    with profiled() if profile else nullcontext() as looking:
        advised = None
        if plan:
            from fednormec.theory.answer import answer, with_plan

            advised = answer(config)
            config = with_plan(config, advised)
        with stage("data"):
            experiment = with_workers(site.assemble(config), workers)
        if plan:
            from fednormec.theory.question import require_covered

            require_covered(experiment)
        path, paying = out or default_path(name), _Paying()
        rounds = start(experiment, place_of(experiment, site.on, path), paying)
        with RunFolder.new(path, experiment.config, plan, data_digest(experiment)) as folder:
            paying.folder = folder
            _mention(() if quiet else experiment.unused)
            known = None if advised is None else advised.question.constants
            with _says_how_to_go_on(path, site.command):
                return _train(experiment, folder, rounds, paying, manner, looking, by_plan=plan, known=known, site=site)


def go_on(
    path: Path,
    quiet: bool,
    tensorboard: bool = False,
    profile: bool = False,
    stop: Callable[[], bool] = lambda: False,
    site: Site = HERE,
    workers: int | None = None,
) -> dict[str, Any]:
    """Goes on with the run in this folder after its newest intact checkpoint, to the same bits as if it had never been
    interrupted. Of a run that came to its end, the summary once more."""
    if tensorboard:
        require_tensorboard()
    with profiled() if profile else nullcontext() as looking, RunFolder.again(path) as folder:
        finished = folder.finished
        if finished is not None:
            note(f"the run in {path} has come to its end already.")
            tidy(path, int(read(path / "config.toml").get("run", {}).get("keep_checkpoint") is True))
            return _with_texts(finished, folder)
        config = read(path / "config.toml")
        require_same_config(path, folder.config_digest)
        with stage("data"):
            experiment = with_workers(site.assemble(config), workers)
        begun = read_json(path / "environment.json")
        require_same_data(begun, experiment)
        checkpoint, trouble = _checkpoints(experiment, folder).newest(folder.digest_of)
        if checkpoint is not None and site.forgets:
            checkpoint = checkpoint.without_memories()
        done = 0 if checkpoint is None else checkpoint.facts.round
        again = repeated(experiment, path, checkpoint, len(folder.readable()))
        paying = _Paying(folder, again.releases - done if experiment.privacy is not None else 0)
        rounds = start(experiment, place_of(experiment, site.on, path), paying, Resumed(checkpoint, again.releases))
        for said in (*trouble, *changes(begun), f"goes on after round {done} of {experiment.run.rounds}", *again.notes):
            note(f"{said}.")
        folder.go_on_after(done)
        folder.note("environment", with_resumption(begun, done))
        manner = Manner(quiet, tensorboard=tensorboard, profile=profile, stop=stop)
        by_plan = begun.get("planned") is True
        with _says_how_to_go_on(path, site.command):
            return _train(experiment, folder, rounds, paying, manner, looking, checkpoint, by_plan, site=site)


class _Paying:
    """Pays for rounds, from the folder's ledger, and remembers by which plan. `again` of them are paid for twice: they
    were drawn again with new noise."""

    def __init__(self, folder: RunFolder | None = None, again: int = 0) -> None:
        self.folder, self.again = folder, again
        self.plan: Plan | None = None

    def __call__(self, number: int, plan: Plan) -> None:
        assert self.folder is not None
        self.plan = plan
        self.folder.pay(number, plan)


class _Progress:
    """What a run's records come to, whether they were read back or are new."""

    def __init__(self) -> None:
        self.done, self.left_out = 0, 0
        self.latest: dict[str, float] = {}
        self.looks_at_clients: set[str] = set()
        self.curve: list[float] = []
        self.evaluated: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        own = {key: _number(value) for key, value in line.items() if key not in ABOUT}
        private = {key: _number(v) for key, v in line["not_private"].items() if key not in NOT_OF_THE_MODEL}
        self.done, self.left_out = line["round"], self.left_out + line["not_private"]["left_out"]
        if own or private:
            self.latest, self.looks_at_clients = {**own, **private}, set(private)
            self.evaluated.append(line)
            self.curve.append(next(self.latest[key] for key in (*SHOWN, *self.latest) if key in self.latest))


def _train(
    experiment: Experiment,
    folder: RunFolder,
    rounds: Iterator[Round],
    paying: _Paying,
    manner: Manner,
    profile: Profile | None,
    checkpoint: Checkpoint | None = None,
    by_plan: bool = False,
    known: "Constants | None" = None,
    site: Site = HERE,
) -> dict[str, Any]:
    watch, progress, ended = _watch(experiment), _Progress(), None
    for line in folder.records:
        progress.add(line)
    begun, x = progress.done, experiment.problem.init(generator(experiment.run.seed, "init"))
    if checkpoint is not None:
        x = checkpoint.server.x
    checkpoints = _checkpoints(experiment, folder)
    try:
        with (
            shown(experiment.run.rounds, manner.quiet, begun) as show,
            logged(folder.path, begun) if manner.tensorboard else nullcontext() as log,
        ):
            for r in rounds:
                x = r.x
                with stage("evaluation"):
                    measured = None if watch is None or r.metrics is None else watch(r)
                line = record(r, measured)
                with stage("disk"):
                    folder.add(line)
                    if log is not None:
                        log(line)
                progress.add(line)
                show(r.number, r.metrics, None if r.plan is None else _spent(r))
                manner.on_round(r.number)
                if not r.last:
                    _keep(checkpoints, folder, r, manner.stop())
                elif experiment.run.keep_checkpoint:  # now: memories that lie elsewhere end with the rounds
                    with stage("disk"):
                        checkpoints.save(r, folder.digest)
    except Diverged as end:
        ended = str(end)
    for said in () if folder.differs is None else differs(folder.differs, experiment):
        note(f"{said}.")
        if experiment.privacy is not None and experiment.privacy.randomness == "seeded":
            site = site._replace(says=(*site.says, ("not covered", said)))
    statement = _statement(experiment, folder, paying, site.says, ended)
    summary = summarize(experiment, progress.done, progress.latest, folder.path, ended, statement)
    if watch is not None and ended is None:
        summary["guarantee"] = _guarantee(experiment, by_plan, known, progress.evaluated, folder)
    summary |= {"not_private": [*sorted(progress.looks_at_clients), "left_out"], "left_out": progress.left_out}
    with stage("disk"):
        folder.finish(experiment.problem.named(x), summary, statement)
        tidy(folder.path, 1 if experiment.run.keep_checkpoint else 0)
    if profile is not None:
        summary["profile"] = profile.facts(threads_of(experiment).pool(experiment.problem).workers) | {
            "choices": choices(experiment, site.on)
        }
        folder.note("profile", summary["profile"])
    return summary | {"curve": sparkline(progress.curve), "statement": None if statement is None else statement.text}


def _checkpoints(experiment: Experiment, folder: RunFolder) -> Checkpoints:
    seconds = experiment.run.checkpoint_seconds
    return Checkpoints(folder.path, folder.config_digest, checkpoint_rounds(experiment), seconds)


def _keep(checkpoints: Checkpoints, folder: RunFolder, r: Round, stop: bool) -> None:
    """A checkpoint when it is time, or when this is to be the last round for now."""
    if not (stop or checkpoints.due(r.number)):
        return
    with stage("disk"):
        folder.sync()
        try:
            checkpoints.save(r, folder.digest)
        except NotWritten as error:
            if stop:
                raise
            note(f"{error} The run goes on without this checkpoint.")
    if stop:
        raise Stopped(f"stopped after round {r.number}.")


@contextmanager
def _says_how_to_go_on(path: Path, command: str | None) -> Iterator[None]:
    """What ends a run early and leaves it fit to go on: being asked to, a full disk, a worker that died."""
    how = f"To go on: {command or f'fednormec run --resume {shlex.quote(str(path))}'}"
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


def _statement(
    experiment: Experiment, folder: RunFolder, paying: _Paying, says: tuple[tuple[str, str], ...], ended: str | None
) -> Statement | None:
    """What may be said of all that was released, which is what the ledger has paid for. `ended` says how it
    diverged."""
    if experiment.privacy is None:
        return None
    plan = paying.plan
    if plan is None:  # nothing was left to do
        plan = planned(
            experiment.problem,
            experiment.algorithm,
            experiment.participation,
            experiment.privacy,
            experiment.run.rounds,
        )
        folder.open_ledger(plan)
    return state(plan, folder.releases, paying.again, says, ended) if folder.releases else None


def _with_texts(summary: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    """A summary that was read back, with what is not in the file."""
    progress, text = _Progress(), folder.path / "privacy.txt"
    for line in folder.readable():
        progress.add(line)
    statement = text.read_text(encoding="utf-8").rstrip("\n") if text.is_file() else None
    return summary | {"out": str(folder.path), "curve": sparkline(progress.curve), "statement": statement}


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def _watch(experiment: Experiment) -> Callable[[Round], dict[str, float]] | None:
    """What measures the theory's invariants after a round, where the problem's constants are known."""
    from fednormec.theory.setting import knows_constants
    from fednormec.theory.watch import can_measure, measure

    known = knows_constants(experiment.problem) or "constants" in experiment.config
    if not (known and can_measure(experiment.algorithm)):
        return None
    return lambda r: measure(experiment.problem, experiment.algorithm, r, experiment.run.seed)._asdict()


def _guarantee(
    experiment: Experiment, by_plan: bool, known: "Constants | None", records: list[dict[str, Any]], folder: RunFolder
) -> dict[str, Any]:
    """Compares what was measured with what is guaranteed: a picture, a file, and the gist for the summary.

    A theorem speaks of the models before each round, so that the last one does not count.
    """
    from fednormec.theory.plots import measured_against_guaranteed
    from fednormec.theory.question import promise_of
    from fednormec.theory.watch import gradient_norms

    x0 = experiment.problem.init(generator(experiment.run.seed, "init"))
    at_start = gradient_norms(experiment.problem, x0)[0]
    picture = folder.path / "guarantee.png"
    try:
        promise, from_data = promise_of(experiment, known)
    except UserError as error:
        measured_against_guaranteed(None, records, at_start, picture)
        return {"covered": False, "why_not": str(error)}
    before_last = [line["not_private"]["gradient_norm"] for line in records if line["round"] < promise.settings.rounds]
    facts = promise.facts()
    gist = {
        "covered": True,
        "bound": facts["bound"],
        "vacuous": facts["vacuous"],
        "bound_round_by_round": facts["round_by_round"]["bound"],
        "measured": min([at_start, *before_last]),
        "models_measured": 1 + len(before_last),
        "planned": by_plan,
        "not_private": True,
    }
    whole = {"constants": asdict(promise.constants), "constants_from_data": from_data}
    folder.note("guarantee", gist | whole | facts | {"settings": asdict(promise.settings) | facts["settings"]})
    measured_against_guaranteed(promise, records, at_start, picture)
    return gist


def _spent(r: Round) -> str:
    assert r.plan is not None and r.epsilon is not None
    return f"ε {up(r.epsilon)}" + (f" {NOT_PRIVATE}" if r.plan.total_norm else "")


def _mention(unused: tuple[str, ...]) -> None:
    for section in unused:
        note(f"this run has no use for [{section}].")
