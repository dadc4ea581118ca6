"""Figures of a run's model: on the run's own test set, or on any data."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fednormec.config.asking import Asked, Reading, asked_about
from fednormec.config.assemble import Experiment, assemble
from fednormec.config.own import Loading, is_own
from fednormec.config.schema import Config, Section, overridden
from fednormec.core.vectors import flatten
from fednormec.data import FederatedData
from fednormec.data.names import built_in_name
from fednormec.data.sources import Shapes
from fednormec.engine.figures import AVERAGED, TEST, by_importance, figure_of, over_clients
from fednormec.errors import UserError, known, visible
from fednormec.files import digest, read_json
from fednormec.results.loading import CONFIG, Stored, built, load, problem_name, require_code, stored
from fednormec.results.reading import read_run
from fednormec.runs.resume import require_same_data
from fednormec.runs.summary import spread

BATCH_NORM = (
    "the model has batch normalisation, which takes the statistics of the batch at hand: what it says of an example "
    "depends on those that share its batch"
)
BY_TRAINING = (
    "batch normalisation took the statistics of the clients' training examples (problem.statistics), so that every "
    "figure looks at clients' data; on other data (--data), and in `fednormec predict` and `export`, it takes those of "
    "the batch at hand"
)
THEIR_OWN = "not private: these are data of the run's own clients"


class Evaluation(NamedTuple):
    """Figures of a run's model on some data.

    Attributes:
        run: the run folder.
        on: the data, in words.
        metrics: the figures by name.
        not_private: names of those that look at clients' data.
        label: whether the others are public, in words; None if they are.
        recorded: whether the figures are those that the run recorded, to the bit; None if there is nothing to compare.
        privacy: what may be said of the model.
        epsilon: its ε and δ, if it has any.
        notes: what else to know.
    """

    run: Path
    on: str
    metrics: dict[str, float]
    not_private: tuple[str, ...]
    label: str | None
    recorded: bool | None
    privacy: str
    epsilon: dict[str, Any]
    notes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Returns the evaluation for scripts."""
        return self._asdict() | {"run": str(self.run)} | self.epsilon

    def text(self) -> str:
        """Returns the evaluation for a person."""
        lines = [f"{self.run} on {self.on}"]
        for name in by_importance(self.metrics):
            value, figure = self.metrics[name], figure_of(name)
            shown = format(value, figure.form) if math.isfinite(value) else "not finite"
            looks = "  (a look at the clients' data: not private)" if name in self.not_private else ""
            lines.append(f"{figure.words:<14} {shown}{looks}")
        if (spread_out := over_clients(self.metrics)) is not None:
            lines.append(
                f"over clients   {spread(self.metrics, spread_out)}  (a look at the clients' data: not private)"
            )
        if self.label is not None:
            lines.append(f"figures        {self.label}")
        if self.recorded is not None:
            same = "the same figures, to the bit" if self.recorded else "other figures: see `fednormec compare`"
            lines.append(f"recorded       {same}")
        lines.append(f"privacy        {self.privacy}")
        return "\n".join(map(visible, lines))


def evaluate(
    run: str | Path,
    data: str | None = None,
    overrides: tuple[str, ...] = (),
    metrics: tuple[str, ...] = (),
    code: str | Path = ".",
) -> Evaluation:
    """Returns figures of a run's model.

    Args:
        run: folder of a run that has finished.
        data: whatever [data] takes as a source: its test set if it brings one, otherwise all of it. By default the
            run's own test set, as its config and seed make it again.
        overrides: further settings of [data], section.key=value.
        metrics: figures in place of the run's own.
        code: folder that files of the user's own code are relative to.
    """
    found = stored(run)
    if data is None:
        if overrides:
            raise UserError("--set has the settings of --data: the run's own test set is as config.toml says.")
        return _on_its_own(found, metrics, Path(code))
    return _on_data(found, data, data_settings(overrides), metrics, Path(code))


def data_settings(overrides: tuple[str, ...]) -> Section:
    """Returns settings of [data] by name; raises UserError if one is of another section."""
    settings: Section = {}
    for text in overrides:
        section, key, value = overridden(text, example="data.rows=100")
        if section != "data":
            raise UserError(f"--set has settings of [data] here, such as data.rows=100, not of [{section}].")
        settings[key] = value
    return settings


def has_batch_norm(module: nn.Module) -> bool:
    """Returns whether what the module says of an example depends on the batch that it is in."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return any(isinstance(layer, kinds) for layer in module.modules())


def has_batch_norm_of(found: Stored, code: Path) -> bool:
    """Returns whether the model of a run has batch normalisation."""
    return problem_name(found.config) == "neural" and has_batch_norm(built(found, code))


def reading(found: Stored) -> Reading:
    """Returns how examples for a run's model are read: as its own were."""
    shapes = found.shapes
    neural = problem_name(found.config) == "neural" and shapes.kind.targets == "classes"
    trained = found.config.get("data", {})
    return Reading(shapes.examples[1], shapes.outputs if neural else None, trained, shapes.before is not None)


def require_fitting(shapes: Shapes, x: np.ndarray, source: str) -> None:
    """Raises UserError if inputs are not of the shape that a model takes."""
    wanted, _ = shapes.examples
    if x.shape[1:] != wanted:
        raise UserError(f"the model takes examples of shape {wanted}, those in {source} have the shape "
                        f"{x.shape[1:]}: reshape them.")  # fmt: skip


def _on_its_own(found: Stored, metrics: tuple[str, ...], code: Path) -> Evaluation:
    config = found.config
    if "federation" in config:
        raise UserError(f"the data of {found.path} are with its clients: say with --data on which to evaluate.")
    require_code(config, code)
    experiment = assemble(_asking_for(config, metrics), folder=code)
    require_same_data(read_json(found.path / "environment.json"), experiment)
    public, not_private = experiment.problem.evaluate(_vector(found, experiment, code))[:2]
    figures, notes = _chosen(public | not_private, metrics), tuple[str, ...]()
    written = _written(found)
    there = [name for name in figures if name in written]
    recorded = all(_same(figures[name], written[name]) for name in there) if there else None
    if has_batch_norm_of(found, code):
        training = config.get("problem", {}).get("statistics") == "training"
        notes = (BY_TRAINING if training else BATCH_NORM,)
    if recorded is False:
        notes += ("the figures are others than the run recorded: it may have been made on another machine or device, "
                 "or with another number of threads",)  # fmt: skip
    if found.summary.status == "diverged":
        notes, recorded = (*notes, "the run diverged: this is its last finite model"), None
    on = "its own test set" if public or any(name.startswith(TEST) for name in not_private) else "its own problem"
    return Evaluation(
        found.path, on, figures, tuple(name for name in figures if name in not_private), None, recorded,
        *_privacy(found), notes,
    )  # fmt: skip


def _written(found: Stored) -> dict[str, Any]:
    """Returns the figures that the run recorded of the model that it stored, which need not be the last."""
    best = found.summary.best
    records = read_run(found.path).records
    number = len(records) if best is None else best["round"]
    if not 0 < number <= len(records):
        return {}
    figures = records[number - 1].public_figures | records[number - 1].client_figures
    averaged = found.summary.get("kept") == "average" if best is None else best["figure"].endswith(AVERAGED)
    kept = {name: value for name, value in figures.items() if name.endswith(AVERAGED) is averaged}
    return {name.removesuffix(AVERAGED): value for name, value in kept.items()}


def _on_data(found: Stored, source: str, settings: Section, metrics: tuple[str, ...], code: Path) -> Evaluation:
    config = found.config
    if problem_name(config) == "quadratic":
        raise UserError(f"the run in {found.path} minimised quadratic functions, which no other data say anything "
                        "about: leave --data out.")  # fmt: skip
    require_code(config, code)
    shapes = found.shapes
    asked = asked_about(source, settings, reading(found), Loading())
    require_fitting(shapes, asked.examples.x, source)
    experiment = _with_test_set(_asking_for(config, metrics), shapes, asked, code)
    x = _vector(found, experiment, code)
    try:
        figures = _chosen(experiment.problem.evaluate(x).public, metrics)
    except (IndexError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"the model cannot be evaluated on {source}: {said}.") from error
    ours = not asked.is_test and _is_runs_own(found, source)
    public = f"as public as the model if {source} is public; not private on data of the run's own clients"
    label = THEIR_OWN if ours else public
    on = f"{'the test set of ' if asked.is_test else ''}{source}, {len(asked.examples):,} examples"
    notes = (BATCH_NORM,) if has_batch_norm_of(found, code) else ()
    apart = tuple(figures) if ours else ()
    return Evaluation(found.path, on, figures, apart, label, None, *_privacy(found), notes)


def _with_test_set(config: Config, shapes: Shapes, asked: Asked, code: Path) -> Experiment:
    """Returns the experiment of a run with these examples as its test set, and next to no clients."""
    unneeded = ("data", "constants", "faults", "federation", "code")
    kept = {name: dict(section) for name, section in config.items() if name not in unneeded}
    classes = shapes.outputs if problem_name(config) == "neural" and shapes.kind.targets == "classes" else None
    if problem_name(config) == "neural":
        kept["problem"] = kept.get("problem", {}) | {"statistics": "batch", "vectorize": "loop"}
    kept["problem"] = kept.get("problem", {}) | {"per_client": False}
    nobody = asked.examples.take(np.arange(min(2, len(asked.examples))))  # of one alone a batch has no variance
    return assemble(kept, FederatedData((nobody,), asked.examples, ("nobody",), classes), code)


def _asking_for(config: Config, metrics: tuple[str, ...]) -> Config:
    """Returns the settings of a run, for this machine's processor and with other metrics if some are asked for."""
    changed = {name: dict(section) for name, section in config.items()}
    changed["run"] = changed.get("run", {}) | {"device": "cpu"}
    if metrics and problem_name(config) == "neural":
        asked = dict.fromkeys(metric.removeprefix(TEST) for metric in metrics)
        changed["problem"] = changed.get("problem", {}) | {"metrics": [name for name in asked if name != "loss"]}
        changed.pop("code", None)  # a metric of the user's may be new; the files of the run were looked at before
    return changed


def _chosen(figures: dict[str, float], metrics: tuple[str, ...]) -> dict[str, float]:
    """Returns the figures that were asked for, or all."""
    if not metrics:
        return figures
    there = {name.removeprefix(TEST): name for name in figures if name.startswith(TEST)}
    for metric in metrics:
        known("metric", _short(metric), there)
    return {there[_short(metric)]: figures[there[_short(metric)]] for metric in metrics}


def _short(metric: str) -> str:
    return metric.rpartition(":")[2] if is_own(metric) else metric.removeprefix(TEST)


def _vector(found: Stored, experiment: Experiment, code: Path) -> Tensor:
    if problem_name(found.config) == "neural":
        return flatten(load(found.path, code=code))
    (x,) = found.tensors.values() if len(found.tensors) == 1 else [torch.empty(0)]
    if x.shape != (experiment.problem.dim,):
        raise UserError(f"the model in {found.path} is not of the problem that {CONFIG} describes.")
    return x


def _is_runs_own(found: Stored, source: str) -> bool:
    """Returns whether the run was trained on this source."""
    trained = str(found.config.get("data", {}).get("source"))
    if built_in_name(source) == built_in_name(trained):
        return True
    apart = read_json(found.path / "environment.json").get("not_private")
    known_digest = apart.get("data") if isinstance(apart, dict) else None
    return known_digest is not None and Path(source).exists() and digest(Path(source)) == known_digest


def _privacy(found: Stored) -> tuple[str, dict[str, Any]]:
    said = {key: found.summary[key] for key in ("epsilon", "delta", "private") if key in found.summary}
    return str(found.summary["privacy"]), said


def _same(value: float, written: Any) -> bool:
    return value == written or (written is None and not math.isfinite(value))
