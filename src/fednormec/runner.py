"""A run from config to folder: assemble, train with progress, save, and say how it ended."""

import sys
from pathlib import Path
from typing import Any

from fednormec.config import Config
from fednormec.engine import record
from fednormec.errors import Diverged
from fednormec.experiment import Experiment, assemble, start
from fednormec.progress import shown, sparkline
from fednormec.randomness import generator
from fednormec.runs import RunFolder, default_path


def perform(config: Config, name: str, out: Path | None, quiet: bool) -> dict[str, Any]:
    """Trains what the config describes and returns the summary that also lies in the folder.

    The folder is made after everything was checked, so that a mistake leaves nothing behind. A run whose model
    diverges is kept, with the last finite model.
    """
    experiment = assemble(config)
    rounds = start(experiment)
    x, done, ended = experiment.problem.init(generator(experiment.run.seed, "init")), 0, None
    latest: dict[str, float] = {}
    looks_at_clients: set[str] = set()
    left_out = 0
    curve: list[float] = []
    with RunFolder(out or default_path(name), experiment.config) as folder:
        _mention(() if quiet else experiment.unused)
        try:
            with shown(experiment.run.rounds, quiet) as show:
                for r in rounds:
                    x, done, left_out = r.x, r.number, left_out + r.left_out
                    folder.add(record(r))
                    show(r.number, r.metrics)
                    if r.metrics is not None:
                        latest = {**r.metrics.public, **r.metrics.not_private}
                        looks_at_clients = set(r.metrics.not_private)
                        curve.append(latest.get("test_accuracy", latest["train_loss"]))
        except Diverged as end:
            ended = str(end)
        summary = _summary(experiment, done, latest, folder.path, ended)
        summary |= {"not_private": [*sorted(looks_at_clients), "left_out"], "left_out": left_out}
        folder.finish(experiment.problem.named(x), summary)
    return summary | {"curve": sparkline(curve)}


def _mention(unused: tuple[str, ...]) -> None:
    for section in unused:
        print(f"note: this run has no use for [{section}].", file=sys.stderr)


def describe(summary: dict[str, Any]) -> str:
    """The summary for a person."""
    metrics = summary["metrics"]
    lines = [f"{summary['method']}: {summary['rounds']} rounds, {summary['clients']} clients, "
             f"{summary['parameters']:,} parameters"]  # fmt: skip
    if "test_accuracy" in metrics:
        lines.append(f"test accuracy  {metrics['test_accuracy']:.1%}  {summary['curve']}")
    if "test_loss" in metrics:
        lines.append(f"test loss      {metrics['test_loss']:.4f}")
    if "train_loss" in metrics:
        lines.append(f"train loss     {metrics['train_loss']:.4f}  (a look at the clients' data: not private)")
    if "gradient_norm" in metrics:
        lines.append(f"gradient norm  {metrics['gradient_norm']:.3e}")
    if summary["left_out"]:
        lines.append(f"left out       {summary['left_out']} updates that were not finite")
    lines += [f"privacy        {summary['privacy']}", f"run folder     {summary['out']}"]
    return "\n".join(lines)


def _summary(
    experiment: Experiment, rounds: int, metrics: dict[str, float], out: Path, ended: str | None
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "method": experiment.algorithm.name,
        "rounds": rounds,
        "metrics": metrics,
        "out": str(out),
        "status": "done" if ended is None else "diverged",
        "message": ended,
        "local": experiment.algorithm.local.name,
        "bound": experiment.algorithm.bound.name,
        "participation": experiment.participation.name,
        "idle": experiment.participation.idle if experiment.algorithm.idle_clients_advance else "sleep",
        "clients": experiment.problem.num_clients,
        "parameters": experiment.problem.dim,
        "privacy": "none: no noise was added, the clients' data are not protected",
    }
    if experiment.privacy is not None:
        summary |= {
            "privacy": f"noise of std {experiment.privacy.noise_std:g} x radius ({experiment.privacy.trust}); "
            "its ε is not yet computed, so nothing is claimed",
            "epsilon": None,
            "delta": None,
            "noise_std": experiment.privacy.noise_std,
            "trust": experiment.privacy.trust,
            "adjacency": "zero_out",
        }
    return summary
