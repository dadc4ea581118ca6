"""Bounds: operators on rows that know how long their result can be. Noise and accounting read the radius from here."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fednormec.errors import at_least_one, non_negative, positive
from fednormec.vectors import norm_error, row_norms


class Bound(NamedTuple):
    """An operator on rows (B, d) and the L2 norm no row of its result exceeds (inf: none).

    With a finite radius it is a promise about floating-point numbers, not about the reals: it holds for every input,
    zeros, huge and tiny vectors included, and a row that is not finite becomes zero.
    """

    name: str
    radius: float
    apply: Callable[[Tensor], Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.apply(rows)


def smooth_normalize(alpha: float, radius: float = 1.0) -> Bound:
    """radius * v / (alpha + ||v||), one global norm over the whole vector; 0 stays 0, also with alpha = 0.

    >>> smooth_normalize(1.0)(torch.tensor([[3.0, 0.0], [0.0, 0.0]])).tolist()
    [[0.75, 0.0], [0.0, 0.0]]
    """
    non_negative("alpha", alpha)
    positive("radius", radius)

    def length(norms: Tensor) -> Tensor:  # nan for alpha = norm = 0, which _radial takes for 0
        return torch.where(norms.isinf(), radius, radius * (norms / (norms + alpha)))

    return Bound(f"smooth_normalize({alpha:g})", radius, lambda v: _radial(v, radius, length))


def clip(tau: float) -> Bound:
    """min(1, tau / ||v||) * v.

    >>> clip(5.0)(torch.tensor([[3.0, 0.0], [0.0, 10.0]])).round(decimals=3).tolist()
    [[3.0, 0.0], [0.0, 5.0]]
    """
    positive("tau", tau)
    return Bound(f"clip({tau:g})", tau, lambda v: _radial(v, tau, lambda n: n.clamp(max=tau)))


def identity() -> Bound:
    """No bound at all: the message itself. Nothing private can be built on it."""
    return Bound("identity", math.inf, lambda v: v)


def top_k(k: int) -> Bound:
    """Keeps the k coordinates of largest magnitude in each row: a contractive compressor, not a bound on the norm.

    >>> top_k(1)(torch.tensor([[1.0, -3.0, 2.0]])).tolist()
    [[0.0, -3.0, 0.0]]
    """
    at_least_one("k", k)

    def apply(v: Tensor) -> Tensor:
        kept = v.abs().topk(min(k, v.shape[1]), dim=1).indices
        return torch.zeros_like(v).scatter_(1, kept, v.gather(1, kept))

    return Bound(f"top_k({k})", math.inf, apply)


def _radial(rows: Tensor, radius: float, length: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows scaled to `length(norm)`, kept below the radius by the error that norm and product may have."""
    norms = row_norms(rows)
    lengths = length(norms).nan_to_num_(nan=0.0).clamp_(max=radius * (1 - norm_error(rows)))
    factors = (lengths / norms).to(rows.dtype)
    odd = ~((norms > 1e-15) & (norms < 1e15))
    if not odd.any():
        return rows * factors[:, None]
    out = rows * factors.masked_fill(odd, 0.0)[:, None]
    out[odd] = _direction(rows[odd]).mul_(lengths[odd, None]).to(rows.dtype)
    return out


def _direction(rows: Tensor) -> Tensor:
    """v / ||v|| in float64 where a plain quotient would leave the number range; zero for 0 and for non-finite rows."""
    rows = rows.double()
    top = rows.abs().amax(dim=1, keepdim=True)
    unit = torch.where(top.isfinite() & (top > 0), rows / top, 0.0)
    lengths: Tensor = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
    return unit / lengths.clamp(min=1.0)
