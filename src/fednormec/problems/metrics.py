"""Metrics by name: figures of a model on a test set."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednormec.errors import UserError, known
from fednormec.problems.losses import Loss, binary_cross_entropy, cross_entropy, huber, mse

Metric = Callable[[Any, Tensor], Any]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns which examples are right, (n,).

    Classes are the largest score; yes or no is a score above or below 0. With several targets of an example it is the
    share of those that are right.
    """
    if targets.is_floating_point():
        right = (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
    else:
        right = outputs.argmax(dim=-1) == targets
    return right.flatten(1).double().mean(dim=1) if right.ndim > 1 else right.double()


def top5(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns which examples have their class among the five largest scores, (n,)."""
    best = outputs.topk(min(5, outputs.shape[-1]), dim=-1).indices
    right = (best == targets.unsqueeze(-1)).any(dim=-1).double()
    return right.flatten(1).mean(dim=1) if right.ndim > 1 else right


def auc(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the area under the ROC curve: how often a yes has a higher score than a no; ties count half.

    With several labels, or several classes (each against the rest), it is the mean over those that have both a yes and
    a no; nan if none has.
    """
    if not targets.is_floating_point():
        targets = torch.nn.functional.one_hot(targets, outputs.shape[-1])
    scores, yes = outputs.reshape(len(outputs), -1).double(), targets.reshape(len(targets), -1) > 0.5
    if scores.shape[1] == 2 and yes.shape[1] == 2:  # one against the other, once
        scores, yes = scores[:, 1:] - scores[:, :1], yes[:, 1:]
    areas = [_area(scores[:, k], yes[:, k]) for k in range(yes.shape[1]) if 0 < int(yes[:, k].sum()) < len(yes)]
    return torch.stack(areas).mean() if areas else scores.new_tensor(math.nan)


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the root of the mean squared error."""
    return (outputs.reshape(targets.shape) - targets).double().square().mean().sqrt()


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the absolute error of each example, (n,)."""
    errors = (outputs.reshape(targets.shape) - targets).double().abs()
    return errors.flatten(1).mean(dim=1) if errors.ndim > 1 else errors


METRICS: dict[str, Metric] = {"accuracy": accuracy, "auc": auc, "mae": mae, "rmse": rmse, "top5": top5}
ADDITIVE = (accuracy, mae, top5)  # one number for each example: no need to keep all outputs
LOWER = ("loss", "mae", "rmse")  # the better; of the user's own a higher one is
FITTING: dict[Loss, tuple[str, ...]] = {
    cross_entropy: ("accuracy", "top5", "auc"),
    binary_cross_entropy: ("accuracy", "auc"),
    mse: ("rmse", "mae"),
    huber: ("rmse", "mae"),
}
USUAL = {**FITTING, cross_entropy: ("accuracy",)}


def metrics_of(loss: Loss, asked: Sequence[str | Metric] | None, classifies: bool) -> dict[str, Metric]:
    """Returns metrics by the names under which they are recorded.

    Args:
        loss: the loss, ours or not.
        asked: names and functions; None: those that are usual with the loss.
        classifies: whether outputs are scores of classes.
    """
    chosen = USUAL.get(loss, ("accuracy",) if classifies else ()) if asked is None else asked
    found = dict[str, Metric]()
    for metric in chosen:
        if isinstance(metric, str):
            known("metric", metric, METRICS)
            if metric not in FITTING.get(loss, METRICS):
                raise UserError(f"{metric} does not fit {loss.__name__}: take {' or '.join(FITTING[loss])}.")
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)
        if name in found or name == "loss":
            raise UserError(f"there are two metrics called '{name}': leave one out, or rename it.")
        found[name] = METRICS[metric] if isinstance(metric, str) else metric
    return found


def measured(name: str, metric: Metric, outputs: Any, targets: Tensor) -> float:
    """Returns a metric as one number: what it returns, or the mean of what it returns for each example.

    Args:
        name: what errors call it.
        metric: a function of all outputs and all targets.
        outputs: what the model puts out for the whole test set.
        targets: its targets.
    """
    try:
        found = metric(outputs, targets)
        values = found.detach().double() if isinstance(found, Tensor) else torch.as_tensor(found, dtype=torch.float64)
    except UserError:
        raise
    except Exception as error:  # whatever a stranger's code raises
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the metric {name} cannot be computed: {type(error).__name__}: {said.rstrip('.')}.") from error
    if tuple(values.shape) not in ((), (len(targets),)):
        raise UserError(
            f"the metric {name} must be one number, or one per example ({len(targets)}), not of shape "
            f"{tuple(values.shape)}."
        )
    return float(values.mean())


def checked_owners(owners: Sequence[int] | np.ndarray | None, examples: int, clients: int) -> np.ndarray | None:
    """Returns the numbers of the clients that a test set was held out of; raises UserError if they cannot be that.

    Args:
        owners: one number for each example; None: they are nobody's.
        examples: number of examples in the test set.
        clients: number of clients.
    """
    if owners is None:
        return None
    found = np.asarray(owners)
    if found.shape != (examples,) or not examples or found.dtype.kind not in "iu":
        raise UserError(f"owners must be the number of a client for each of the {examples} examples of the test pair.")
    if found.min() < 0 or found.max() >= clients:
        raise UserError(f"owners must be numbers of clients, from 0 to {clients - 1}.")
    return found


def means_of(owners: np.ndarray, values: np.ndarray) -> list[float]:
    """Returns the mean of the values of each owner that has any, by the owners' numbers."""
    counts = np.bincount(owners)
    means: list[float] = (np.bincount(owners, values) / np.maximum(counts, 1))[counts > 0].tolist()
    return means


def _area(scores: Tensor, yes: Tensor) -> Tensor:
    """Returns the Mann-Whitney statistic: ranks of the yes among all, ties sharing their mean rank."""
    scores = scores.contiguous()
    ordered = scores.sort().values
    ranks = (torch.searchsorted(ordered, scores) + torch.searchsorted(ordered, scores, right=True) + 1).double() / 2
    positive = int(yes.sum())
    above: Tensor = ranks[yes].sum() - positive * (positive + 1) / 2
    return above / (positive * (len(yes) - positive))
