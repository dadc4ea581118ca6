"""Losses by name, one number per example, and what a model must put out for each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fednormec.errors import UserError, known

Loss = Callable[[Any, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy of each example, (n,).

    Args:
        outputs: a score for each class, (n, C); where an example has T targets (the next words of a text), (n, T, C).
        targets: classes, (n,) or (n, T). An example's loss is the mean over its targets.
    """
    if outputs.ndim == 2:
        return F.cross_entropy(outputs, targets, reduction="none")
    return F.cross_entropy(outputs.transpose(1, -1), targets, reduction="none").mean(dim=1)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy of yes or no for each example, (n,).

    Args:
        outputs: scores before the sigmoid, (n,) or (n, 1); with L labels that exclude nothing, (n, L).
        targets: 0 or 1 (or a probability), (n,) or (n, L). An example's loss is the mean over its labels.
    """
    return _of_each(F.binary_cross_entropy_with_logits(_like(outputs, targets), targets, reduction="none"))


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared error of each example, (n,); the mean over its values where it has several.

    Args:
        outputs: predictions, (n,), (n, 1) or (n, k).
        targets: values, (n,) or (n, k).
    """
    return _of_each(F.mse_loss(_like(outputs, targets), targets, reduction="none"))


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns Huber's loss of each example, (n,): e^2/2 up to an error of 1, |e| - 1/2 beyond.

    Args:
        outputs: predictions, (n,), (n, 1) or (n, k).
        targets: values, (n,) or (n, k).
    """
    return _of_each(F.huber_loss(_like(outputs, targets), targets, reduction="none"))


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "mse": mse,
    "huber": huber,
}
OURS = frozenset(LOSSES.values())


def loss_named(name: str) -> Loss:
    """Returns a loss of ours; raises UserError if none has that name."""
    known("loss", name, LOSSES)
    return LOSSES[name]


def require_fitting(loss: Loss, outputs: Any, targets: Sequence[Tensor]) -> None:
    """Raises UserError if a loss of ours cannot compare these outputs with these targets.

    Args:
        loss: any loss; one that is not ours is not looked at.
        outputs: what the model puts out for some examples.
        targets: targets of all examples.
    """
    if loss not in OURS:
        return
    shape = tuple(outputs.shape[1:]) if isinstance(outputs, Tensor) else type(outputs).__name__
    one = tuple(targets[0].shape[1:])
    if loss is cross_entropy:
        if any(t.is_floating_point() or t.ndim > 2 for t in targets):
            raise UserError("cross entropy needs one whole number (the class) per example as target, or a row of them; "
                            "or take another loss.")  # fmt: skip
        top = max(int(t.max()) for t in targets)
        if min(int(t.min()) for t in targets) < 0:
            raise UserError("cross entropy needs classes that are numbered 0, 1, ..., not a negative number.")
        if not isinstance(outputs, Tensor) or outputs.shape[1:-1] != one or outputs.shape[-1] <= top:
            raise UserError(f"the model gives outputs of shape {shape}, but the labels go up to {top}: it needs "
                            f"{top + 1 if not one else (*one, top + 1)}.")  # fmt: skip
        return
    if any(not t.is_floating_point() for t in targets):
        raise UserError(f"{loss.__name__} needs numbers with a point as targets, not whole ones: convert them.")
    if not isinstance(outputs, Tensor) or shape not in (one, (1,) if one == () else one):
        wanted = "one number" if one in ((), (1,)) else f"the shape {one}"
        raise UserError(f"the model gives outputs of shape {shape} for each example, but the targets have {wanted}.")
    if loss is binary_cross_entropy and any(bool(((t < 0) | (t > 1)).any()) for t in targets):
        raise UserError("binary_cross_entropy needs targets from 0 to 1: 1 for yes, 0 for no.")


def _like(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns outputs in the shape of the targets: (n, 1) beside (n,) would otherwise be every pair of examples."""
    return outputs.reshape(targets.shape)


def _of_each(losses: Tensor) -> Tensor:
    return losses if losses.ndim == 1 else losses.flatten(1).mean(dim=1)
