"""Sweep of problems and methods from Python over values and seeds: a run folder for each, ranked and priced."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednormec.config.assemble import Experiment
from fednormec.config.settings import MADE_BY, PYTHON
from fednormec.core.algorithm import Algorithm
from fednormec.core.participation import Participation
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.engine.clients import Place
from fednormec.engine.observers import Observer
from fednormec.errors import UserError, known
from fednormec.privacy.asked import Privacy
from fednormec.python.training import placed
from fednormec.python.values import Values, begun, plain
from fednormec.runs.progress import tallied
from fednormec.runs.runner import Site, go_on, perform
from fednormec.sweeps.grid import file_name
from fednormec.sweeps.pool import Cell, require_names, run_all, with_own_noise
from fednormec.sweeps.ranking import SEED, Sweep, concluded, line

METHOD = "method"
TAKEN = {"seed": "seeds are given by seeds=[...]", METHOD: "several methods are given by algorithm={...}",
         "name": "call it something else"}  # fmt: skip

Axis = Sequence[Any] | Mapping[str, Any] | np.ndarray


def sweep(
    problem: Problem | Callable[..., Problem],
    algorithm: Algorithm | Callable[..., Algorithm] | Mapping[str, Algorithm | Callable[..., Algorithm]],
    participation: Participation | Callable[..., Participation] | None = None,
    privacy: Privacy | Callable[..., Privacy] | None = None,
    *,
    rounds: int,
    out: Path | str,
    grid: Mapping[str, Axis] | None = None,
    seeds: Sequence[int] = (0,),
    metric: str | None = None,
    evaluate_every: int | None = None,
    checkpoint_rounds: int | None = None,
    workers: int | None = None,
    on: Place | None = None,
    quiet: bool = False,
) -> Sweep:
    """Trains every combination of values and seeds, each in a run folder of its own, and ranks them.

    Problem, algorithm, participation and privacy are values, or functions that make them: a function gets those of the
    grid's values whose names are among its parameters, and the seed if it has a parameter `seed`. A method is not run
    again for values that nothing of it takes. The runs go one after another in this process, each on all its workers,
    since a function of your own cannot be sent to another. The same call goes on where one was stopped or killed. Every
    private run draws noise of its own. A run that fails is noted and tried again by the next call.

    Args:
        problem: the problem, or a function that makes it.
        algorithm: the method, a function that makes it, or several of these by name.
        participation: who takes part in a round, or a function that says so; by default everybody.
        privacy: what is kept private, or a function that says so; None: no noise.
        rounds: number of rounds of each run.
        out: the sweep's folder, new or to go on with.
        grid: the values by name, each a list, or a dict where values need names.
        seeds: the seeds, over which results are averaged.
        metric: what the runs are ranked by; by default the last test accuracy, without a test set the last training
            loss.
        evaluate_every: number of rounds between evaluations of the model, as in `train`.
        checkpoint_rounds: number of rounds between checkpoints, as in `train`.
        workers: number of workers of each run, as in `train`.
        on: where clients compute, as in `simulate`.
        quiet: shows no progress.

    Returns:
        The table, the best first, which is also stored in the folder as table.csv and table.md; print it.

    >>> import fednormec as fn, tempfile
    >>> def method(tau, step=0.5):
    ...     return fn.dp_fed_avg_clip(fn.gd(step), tau=tau)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = sweep(fn.random_quadratic(9, 3), {"clipped": method, "exact": fn.fed_avg(fn.gd(0.5))}, rounds=4,
    ...                  grid={"tau": [0.1, 1.0]}, out=folder, quiet=True)
    >>> [row.label for row in done.rows]
    ['method=clipped_tau=1', 'method=exact', 'method=clipped_tau=0.1']
    """
    asked = {"rounds": rounds, "evaluate_every": evaluate_every, "checkpoint_rounds": checkpoint_rounds}
    methods = algorithm if isinstance(algorithm, Mapping) else {None: algorithm}
    others = _Maker(problem), _Maker(participation), _Maker(privacy)
    makers = {name: _Makers(others[0], _Maker(own), *others[1:]) for name, own in methods.items()}
    axes, place = _axes(grid or {}, makers.values()), placed(on, workers)
    recipes = [recipe for name, own in makers.items() for recipe in _recipes(name, own, axes, _seeds(seeds), asked)]
    if not recipes:
        raise UserError("there is nothing to sweep over: give at least one method and one seed.")
    cells = [recipe.cell() for recipe in recipes]
    require_names(cells)
    made = dict(zip((cell.name for cell in cells), zip(recipes, cells, strict=True), strict=True))
    if metric is not None:
        _require_measured(metric, recipes[0].experiment().problem)

    def run(cell: Cell, path: Path, after: Callable[[int], None], stop: Callable[[], bool]) -> None:
        experiment = made[cell.name][0].experiment(cell)
        site, told = Site(lambda config: experiment, place), Observer(lambda r, record: after(r.number))
        if path.exists():
            go_on(path, True, [told], stop=stop, site=site)
        else:
            perform({}, cell.name, path, True, observers=[told], stop=stop, site=site)

    with tallied(len(cells), line, quiet) as tell:
        outcomes = run_all(cells, Path(out), 1, tell, run)
    done = concluded(outcomes, Path(out), metric)
    if len(done.failed) == len(cells):
        raise UserError(f"every run failed; the first: {done.failed[0].error}")
    return done


class _Option(NamedTuple):
    """Value of an axis, and how it is shown."""

    shown: Any
    value: Any


class _Maker:
    """Value, or a function that makes it; the last that was made is kept."""

    def __init__(self, given: Any) -> None:
        self._given, self.makes = given, callable(given) and (isinstance(given, type) or not _is_value(given))
        self.name = str(getattr(given, "__name__", type(given).__name__))
        self._parameters = dict(inspect.signature(given).parameters) if self.makes else {}
        self._any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self._last: tuple[dict[str, Any], Any] | None = None

    @property
    def named(self) -> list[str]:
        """Names of its parameters."""
        return [name for name, p in self._parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

    def takes(self, name: str) -> bool:
        return name in self.named or (self._any and name != "seed")

    def require(self, names: Sequence[str]) -> None:
        """Raises UserError if it needs something that is not among these names."""
        for name in self.named:
            if self._parameters[name].default is inspect.Parameter.empty and name not in names:
                raise UserError(f"{self.name} needs '{name}': add it to grid, or give it a default.")

    def __call__(self, values: Mapping[str, Any]) -> Any:
        if not self.makes:
            return self._given
        own = {name: value for name, value in values.items() if self.takes(name)}
        if self._last is None or any(self._last[0].get(name) is not value for name, value in own.items()):
            self._last = None  # two problems need not fit into the memory
            self._last = own, self._given(**own)
        return self._last[1]


class _Makers(NamedTuple):
    """Makers of a run's values."""

    problem: _Maker
    algorithm: _Maker
    participation: _Maker
    privacy: _Maker


class _Recipe(NamedTuple):
    """Run of a sweep before it is made.

    Attributes:
        method: name of the method, where there are several.
        makers: what its values come from.
        options: the values of the grid.
        run: settings of [run].
    """

    method: str | None
    makers: _Makers
    options: dict[str, _Option]
    run: dict[str, Any]

    def experiment(self, cell: Cell | None = None) -> Experiment:
        """Makes the values and returns the experiment; with the cell's own noise, if the cell is given."""
        values = {name: option.value for name, option in self.options.items()} | {"seed": self.run["seed"]}
        made = begun(Values(*(make(values) for make in self.makers)), self.run, self._settings())
        if self.makers.problem.makes:
            made.config[PYTHON][MADE_BY] = self.makers.problem.name
        if cell is None or made.privacy is None:
            return made
        own = replace(made.privacy, stream=cell.config["privacy"]["stream"])
        return made._replace(privacy=own, config=cell.config)

    def cell(self) -> Cell:
        """Returns the cell; raises UserError, which names it, if its values cannot be made."""
        several = {} if self.method is None else {METHOD: self.method}
        shown = several | {name: option.shown for name, option in self.options.items()} | {SEED: self.run["seed"]}
        name = file_name(shown)
        try:
            return with_own_noise(Cell(name, shown, self.experiment().config))
        except UserError as error:
            raise UserError(f"the run {name}: {error}") from error

    def _settings(self) -> dict[str, dict[str, Any]]:
        """Returns what the config says of the values, beside the makers that took them."""
        shown = {name: option.shown for name, option in self.options.items()}
        makers = {"problem": self.makers.problem, "method": self.makers.algorithm}
        own = {section: {n: v for n, v in shown.items() if maker.takes(n)} for section, maker in makers.items()}
        if self.method is not None:
            own["method"] = {"name": self.method, **own["method"]}
        return {section: settings for section, settings in own.items() if settings}


def _recipes(
    method: str | None,
    makers: _Makers,
    axes: Mapping[str, list[_Option]],
    seeds: Sequence[int],
    run: Mapping[str, Any],
) -> Iterator[_Recipe]:
    """Yields the runs of a method: every combination of the values that something of it takes, for every seed."""
    taken = [name for name in axes if any(maker.takes(name) for maker in makers)]
    for choice in itertools.product(*(axes[name] for name in taken)):
        for seed in seeds:
            yield _Recipe(method, makers, dict(zip(taken, choice, strict=True)), {**run, "seed": seed})


def _axes(grid: Mapping[str, Axis], makers: Any) -> dict[str, list[_Option]]:
    """Returns the values by name; raises UserError if nothing takes one, or something is missing."""
    for name in grid:
        if name in TAKEN:
            raise UserError(f"grid cannot have the name '{name}': {TAKEN[name]}.")
        if not any(maker.takes(name) for own in makers for maker in own):
            known("name in grid", name, sorted({n for own in makers for maker in own for n in maker.named}))
    for own in makers:
        for maker in own:
            maker.require([*grid, "seed"])
    return {name: _options(name, values) for name, values in grid.items()}


def _options(name: str, values: Axis) -> list[_Option]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | Mapping | np.ndarray) or not len(values):
        raise UserError(f"grid['{name}'] must be a list of at least one value, not {values!r}.")
    if isinstance(values, Mapping):
        return [_Option(str(shown), value) for shown, value in values.items()]
    return [_Option(_shown(name, plain(value)), plain(value)) for value in values]


def _shown(name: str, value: Any) -> Any:
    """Returns a value as a config and a folder's name can have it; raises UserError if it has no name of its own."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_shown(name, plain(item)) for item in value]
    own = getattr(value, "name", getattr(value, "__name__", None))
    if not isinstance(own, str):
        raise UserError(f"grid['{name}'] has a value without a name, of type {type(value).__name__}: write a dict, "
                        "{name: value, ...}, in the place of the list.")  # fmt: skip
    return own


def _seeds(seeds: Sequence[int]) -> list[int]:
    found = [plain(seed) for seed in seeds] if isinstance(seeds, Sequence | np.ndarray) else [None]
    if any(type(seed) is not int for seed in found):
        raise UserError(f"seeds is a list of whole numbers, such as [0, 1, 2], not {seeds!r}.")
    return found


def _is_value(given: Any) -> bool:
    return isinstance(given, Algorithm | Participation | Privacy) or hasattr(given, "grad")


def _require_measured(metric: str, problem: Problem) -> None:
    found = problem.evaluate(problem.init(generator(0, "init")))
    known("metric", metric, [*found.public, *found.not_private])
