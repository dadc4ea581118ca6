"""Linear models, on features or on tokens, whose local steps are cheap. Up to rounding they are those of fn.gd.

On features A, gradient descent on the weights moves the logits of a client's examples by z <- z - step (A A' + 1) D,
where D is the gradient of the loss by z. So the steps need A A' alone, which is small where a client has few examples,
and the features are read twice, whatever the number of steps. On tokens, a step reads and writes the weights of the
tokens that there are, and no others.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fednormec as fn
from fednormec.core.local import Moment
from fednormec.core.problem import Problem
from fednormec.data import FederatedData


class Heads(NamedTuple):
    """Examples of all clients, one client's after another's, with features that are centred and scaled row by row.

    Attributes:
        problem: the same examples as a problem: one linear layer.
        features: (N, F).
        labels: (N,).
        starts: where each client's examples begin.
        sizes: number of each client's examples.
        among: A A' + 1 of each client, (M, n, n), where all clients have the same number n of examples.
    """

    problem: fn.NeuralProblem
    features: Tensor
    labels: Tensor
    starts: np.ndarray
    sizes: np.ndarray
    among: Tensor | None

    def gd(self, step: float, steps: int) -> fn.LocalUpdate:
        """Returns fn.gd(step, steps) for these clients."""

        def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
            features, labels, weights = self._of(ids)
            classes = x.numel() // (features.shape[2] + 1)
            weight, bias = x[:-classes].view(classes, -1), x[-classes:]
            # by class, then by example: softmax over what lies far apart is several times as fast
            start = (features @ weight.T + bias).mT.contiguous()
            among = self._among(ids, features) if steps > 1 else None
            aside = None if correction is None or steps == 1 else _logits(correction, features, classes)
            total = torch.zeros(())
            for t in range(steps):
                z = start
                if among is not None and t:
                    moved = torch.bmm(total, among)
                    moved = moved if aside is None else moved.add_(aside, alpha=t)
                    z = start - (step * moment.factor / steps) * moved
                slope = z.softmax(1)
                slope.scatter_add_(1, labels[:, None], slope.new_full((1, 1, 1), -1.0).expand(len(ids), 1, z.shape[2]))
                slope.mul_(weights[:, None])
                total = total + slope if t else slope
            rows = torch.empty(len(ids), x.numel())
            torch.bmm(total, features, out=rows[:, :-classes].view(len(ids), classes, -1))
            torch.sum(total, dim=2, out=rows[:, -classes:])
            return rows.div_(steps) if correction is None else rows.div_(steps).add_(correction)

        return fn.gd(step, steps)._replace(run=run)

    def _of(self, ids: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Features (B, n, F), labels (B, n) and weights (B, n) of some clients; who has fewer examples is filled up."""
        sizes, starts = self.sizes[ids], self.starts[ids]
        n = int(sizes.max())
        weights = torch.tensor((np.arange(n) < sizes[:, None]) / sizes[:, None], dtype=torch.float32)
        if (sizes == n).all() and (np.diff(ids) == 1).all():
            where: Any = slice(int(starts[0]), int(starts[-1]) + n)
        else:
            where = torch.as_tensor(starts[:, None] + np.arange(n) % sizes[:, None]).flatten()
        shape = (len(ids), n)
        return self.features[where].view(*shape, -1), self.labels[where].view(shape), weights

    def _among(self, ids: np.ndarray, features: Tensor) -> Tensor:
        return _products(features) if self.among is None else self.among[torch.as_tensor(ids)]


class Bags(NamedTuple):
    """Examples of all clients that are so many tokens each; the model is logistic regression on them (`bag`).

    Attributes:
        problem: the same examples as a problem, with the bias first in its vector.
        tokens: (N, T).
        targets: (N,), 0 or 1.
        starts: where each client's examples begin.
        sizes: number of each client's examples.
    """

    problem: Problem
    tokens: Tensor
    targets: Tensor
    starts: np.ndarray
    sizes: np.ndarray

    def gd(self, step: float, steps: int) -> fn.LocalUpdate:
        """Returns fn.gd(step, steps) for these clients."""

        def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
            sizes, d = self.sizes[ids], x.numel()
            rows = np.repeat(np.arange(len(ids)), sizes)
            within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            which = torch.as_tensor(self.starts[ids][rows] + within)
            first = torch.as_tensor(rows * d)[:, None]
            places = torch.cat([first, first + 1 + self.tokens[which]], dim=1)  # of the bias and of each token
            targets, weights = self.targets[which], torch.as_tensor(1 / sizes[rows], dtype=x.dtype)
            total = torch.zeros(len(ids), d, dtype=x.dtype)
            for t in range(steps):
                y = x - total * (step * moment.factor / steps) if t else x.expand(len(ids), d).contiguous()
                slope = (y.view(-1)[places].sum(1).sigmoid() - targets) * weights
                total.view(-1).index_add_(0, places.flatten(), slope.repeat_interleave(places.shape[1]))
                if correction is not None:
                    total.add_(correction)
            return total.div_(steps)

        return fn.gd(step, steps)._replace(run=run)


def _logits(rows: Tensor, features: Tensor, classes: int) -> Tensor:
    """Logits (B, classes, n) by weights of each client's own, rows (B, d)."""
    weight, bias = rows[:, :-classes].view(len(rows), classes, -1), rows[:, -classes:]
    return torch.baddbmm(bias[..., None], weight, features.mT)


def _products(features: Tensor) -> Tensor:
    """A A' + 1 of each client, A (B, n, F)."""
    return torch.bmm(features, features.mT).add_(1)


def heads(data: FederatedData, width: int | None = None) -> Heads:
    """Returns the heads on some features: each row is centred and scaled by itself, which is public.

    Args:
        data: features and classes of all clients.
        width: number of directions, drawn at random and public, that the features are projected to; None: they stay.
    """
    assert data.test is not None
    across = None if width is None else np.random.default_rng(0).normal(size=(data.input_shape[0], width))
    starts, sizes = _dealt(data)
    features = _scaled(np.concatenate([examples.x for examples in data.clients]), across)
    labels = torch.as_tensor(np.concatenate([examples.y for examples in data.clients]))
    pairs = [(features[a : a + n], labels[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
    test = (_scaled(data.test.x, across), torch.as_tensor(data.test.y))
    problem = fn.NeuralProblem(nn.Linear(features.shape[1], data.num_classes), pairs, test, loss_examples=1)
    among = _products(features.view(len(sizes), int(sizes[0]), -1)) if (sizes == sizes[0]).all() else None
    return Heads(problem, features, labels, starts, sizes, among)


def bags(data: FederatedData, problem: Problem) -> Bags:
    """Returns the bags of some tokens; `problem` has the same data."""
    starts, sizes = _dealt(data)
    tokens = torch.as_tensor(np.concatenate([examples.x for examples in data.clients]))
    targets = torch.as_tensor(np.concatenate([examples.y for examples in data.clients]))
    return Bags(problem, tokens, targets, starts, sizes)


def _dealt(data: FederatedData) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.array([len(examples) for examples in data.clients])
    return np.cumsum(sizes) - sizes, sizes


def _scaled(x: np.ndarray, across: np.ndarray | None) -> Tensor:
    rows = torch.as_tensor(x, dtype=torch.float32).flatten(1)
    if across is not None:
        rows = rows @ torch.as_tensor(across, dtype=torch.float32)
    return nn.functional.layer_norm(rows, rows.shape[1:])
