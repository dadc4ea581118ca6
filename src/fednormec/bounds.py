"""Bounds: operators on rows that know how long their result can be. Noise and accounting read the radius from here."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.errors import UserError, at_least_one, non_negative
from fednormec.vectors import norm_error, row_norms


class Bound(NamedTuple):
    """An operator on rows (B, d) and the L2 norm no row of its result exceeds (inf: none).

    `bound(rows)` leaves rows alone; `bound.apply_(rows)` may overwrite them with its result.

    With a finite radius it is a promise about floating-point numbers, not about the reals: it holds for every input,
    zeros, huge and tiny vectors included, and a row that is not finite becomes zero.
    """

    name: str
    radius: float
    apply_: Callable[[Tensor], Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.apply_(rows.clone())


def smooth_normalize(alpha: float, radius: float = 1.0) -> Bound:
    """radius * v / (alpha + ||v||), one global norm over the whole vector; 0 stays 0, also with alpha = 0.

    >>> smooth_normalize(1.0)(torch.tensor([[3.0, 0.0], [0.0, 0.0]])).tolist()
    [[0.75, 0.0], [0.0, 0.0]]
    """
    non_negative("alpha", alpha)
    _require_radius("radius", radius)

    def length(norms: np.ndarray) -> np.ndarray:  # nan for alpha = norm = 0, which _radial takes for 0
        return np.where(np.isinf(norms), radius, radius * (norms / (norms + alpha)))

    return Bound(f"smooth_normalize({alpha:g})", radius, lambda v: _radial(v, radius, length))


def clip(tau: float) -> Bound:
    """min(1, tau / ||v||) * v.

    >>> clip(5.0)(torch.tensor([[3.0, 0.0], [0.0, 10.0]])).round(decimals=3).tolist()
    [[3.0, 0.0], [0.0, 5.0]]
    """
    _require_radius("tau", tau)
    return Bound(f"clip({tau:g})", tau, lambda v: _radial(v, tau, lambda n: np.minimum(n, tau)))


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


def _require_radius(name: str, value: float) -> None:
    """Well inside float32: near the ends of its range rounding is no longer relative, and the promise would break."""
    if not 1e-30 <= value <= 1e30:
        raise UserError(f"{name} must be a positive number between 1e-30 and 1e30, not {value}.")


def _radial(rows: Tensor, radius: float, length: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """Rows scaled in place to `length(norm)`, kept below the radius by the error that norm and product may have."""
    norms = row_norms(rows)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # odd rows are mended below
        lengths = np.minimum(np.nan_to_num(length(norms), nan=0.0), radius * (1 - norm_error(rows)))
        quotients = lengths / norms
        odd = ~((norms > 1e-15) & (norms < 1e15) & (quotients < 1e30))
        factors = torch.from_numpy(quotients).to(rows.device, rows.dtype)
    exact = _rescaled(rows, odd, lengths) if odd.any() else None
    rows.mul_(factors[:, None])
    if exact is not None:
        rows[torch.from_numpy(odd)] = exact
    return rows


def _rescaled(rows: Tensor, chosen: np.ndarray, lengths: np.ndarray) -> Tensor:
    """The chosen rows at their new length, in float64 by way of v / ||v||, where a plain quotient would leave the
    number range; zero for 0 and for rows that are not finite."""
    picked = rows[torch.from_numpy(chosen)].double()
    top = picked.abs().amax(dim=1, keepdim=True)
    unit = torch.where(top.isfinite() & (top > 0), picked / top, 0.0)
    norms: Tensor = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
    return (unit / norms.clamp(min=1.0) * torch.from_numpy(lengths[chosen, None]).to(rows.device)).to(rows.dtype)
