"""Sums of records' bounded gradients, most of which are never written out ("ghost clipping").

In a linear layer record j's gradient is delta_j a_j^T: its norm is ||delta_j|| ||a_j|| (Goodfellow 2015, arXiv
1510.01799), and the sum of all, each with its factor, is one product of matrices, without a second pass back (Bu et al.
2022, arXiv 2210.00038).
"""

import numpy as np
import torch
from torch import Tensor

from fednormec.core.bounds import STRIP, Adding, Bound, Messages
from fednormec.core.vectors import Layout, norm_error, row_norms
from fednormec.problems.layers import Outer, RecordGradients


def takes(bound: Bound) -> bool:
    """Returns whether gradients under such a bound can be added here: a norm alone must tell their factor."""
    return bound.law is not None and bound.grid is None and _products_are_whole()


def add_bounded(total: Tensor, gradients: RecordGradients, bound: Bound, layout: Layout) -> np.ndarray:
    """Adds the bounded gradients of n records to a total; returns which of them it left out, a mask (n,).

    Left out are those near the ends of the number range, or beyond them: whatever such a record holds, nothing of it
    touches the others. The bound holds for the numbers that are really added, as it does for messages.

    Args:
        total: sum so far (d,), float64.
        gradients: the records' gradients.
        bound: bound on each; `takes` says whether it may be asked for.
        layout: where parameters are stored in the total.
    """
    factors = _factors(gradients, bound, layout.dim)
    odd: np.ndarray = np.isnan(factors)
    weights = torch.from_numpy(np.where(odd, 0.0, factors)).to(total.device, gradients.rows.dtype)
    into = layout.views(total)
    for layer in gradients.outer:
        _add_outer(into, _whole(layer, odd), weights)
    if gradients.layout.dim:
        written = Messages(gradients.rows, weights).sum(torch.ones_like(weights), Adding())
        for name, part in gradients.layout.views(written).items():
            into[name].add_(part)
    return odd


def _factors(gradients: RecordGradients, bound: Bound, dim: int) -> np.ndarray:
    """Returns the factor of each record's gradient, (n,); nan for one of odd numbers, and 0 for a gradient of zero.

    They are kept below radius / norm by the errors that a norm, which is a product of two, and the rounding of factor
    and products may have.
    """
    assert bound.law is not None
    rows, n, law = gradients.rows, len(gradients.rows), bound.law
    tiny, most = torch.finfo(rows.dtype).tiny, bound.radius * (1 - 2 * norm_error(rows.new_empty(0, dim)))
    norms, into, back = row_norms(rows) if gradients.layout.dim else np.zeros(n), np.ones(n), np.zeros(n)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # odd ones are found below
        for layer in gradients.outer:
            a, delta = row_norms(layer.a), row_norms(layer.delta)
            norms = np.hypot(norms, (a if layer.bias is None else np.hypot(a, 1.0)) * delta)
            into, back = np.maximum(into, a), np.maximum(back, delta)
        factors = np.minimum(1.0 if law.clips else bound.radius / (norms + law.parameter), most / norms)
        usual = (norms < 1e15) & (factors > 1e-30) & (factors < 1e30)
        usual &= factors * back < 1e30
        # numbers below the least normal one are rounded by absolute amounts, which what goes in multiplies
        usual &= tiny * dim**0.5 * np.maximum(into, 1.0) < torch.finfo(rows.dtype).eps * bound.radius
    return np.where(norms == 0, 0.0, np.where(usual, factors, np.nan))


def _add_outer(into: dict[str, Tensor], layer: Outer, weights: Tensor) -> None:
    """Adds sum_j weight_j delta_j a_j^T, strips in their own dtype.

    `privacy.records.reach` counts on strips of at most STRIP records, whose places no record has a say in, and on
    float64 beyond.
    """
    scaled = layer.delta * weights[:, None]
    for delta, a in zip(torch.split(scaled, STRIP), torch.split(layer.a, STRIP), strict=True):
        into[layer.weight].add_(delta.mT @ a)
        if layer.bias is not None:
            into[layer.bias].add_(delta.sum(dim=0))


def _whole(layer: Outer, odd: np.ndarray) -> Outer:
    """Returns the layer's gradients with zeros for odd records, since 0 times what is no number is none either."""
    if not odd.any():
        return layer
    where = torch.from_numpy(np.flatnonzero(odd)).to(layer.a.device)
    return layer._replace(delta=layer.delta.index_fill(0, where, 0.0), a=layer.a.index_fill(0, where, 0.0))


def _products_are_whole() -> bool:
    """Returns whether torch multiplies matrices in their own dtype: with fewer bits no bound would hold."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set in a way that this function has no word for
        return False
