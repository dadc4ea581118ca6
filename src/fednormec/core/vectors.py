"""Flat vectors: a module's parameters as views of one buffer, and norms of rows that can be trusted."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

ALIGNED = 64  # bytes; where torch puts a tensor begins at a multiple of these
BLOCK = 128  # numbers whose squares are summed in float32 before float64 takes over


class Layout(NamedTuple):
    """Layout of the flat vector: where each trainable parameter is stored in it."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dim: int

    def views(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the parameters as views of x, a vector (d,) or rows (B, d); nothing is copied."""
        pieces = torch.split(x, [shape.numel() for shape in self.shapes], dim=-1)
        lead = x.shape[:-1]
        return {n: piece.view(lead + s) for n, s, piece in zip(self.names, self.shapes, pieces, strict=True)}


def layout_of(module: nn.Module) -> Layout:
    """Returns the layout of a module's trainable parameters, in the module's own order."""
    trainable = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]
    names, shapes = tuple(n for n, _ in trainable), tuple(s for _, s in trainable)
    return Layout(names, shapes, sum(s.numel() for s in shapes))


def flatten(module: nn.Module) -> Tensor:
    """Copies a module's trainable parameters into one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])


def neighbours(ids: np.ndarray) -> slice | None:
    """Returns the slice that ids make up if they are consecutive, as they are when every client computes; else None."""
    if len(ids) and (np.diff(ids) == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return None


def take(rows: Tensor, ids: np.ndarray) -> Tensor:
    """Returns rows[ids], without a copy if the ids are consecutive."""
    where = neighbours(ids)
    return rows[torch.tensor(ids, device=rows.device) if where is None else where]


def some_of(rows: Tensor, first: int, last: int) -> Tensor:
    """Copies rows first to last - 1, to the same distance from a multiple of 64 bytes.

    What a product of matrices rounds to can depend on that distance. The copy keeps it when it is sent elsewhere.
    """
    row_bytes = rows[:1].numel() * rows.element_size()
    before = first % (ALIGNED // math.gcd(ALIGNED, row_bytes)) if row_bytes else 0
    return torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows[first:last]])[before:]


def plus(x: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns x + scale v.

    A scale beyond the dtype's range is taken as its largest number, where torch would refuse it; the result says by
    itself if it is non-finite.
    """
    return torch.add(x, v, alpha=representable(scale, x.dtype))


def unit(v: Tensor) -> Tensor:
    """Returns v / ||v|| by way of float64; zero for zero."""
    length = float(row_norms(v[None])[0])
    return (v.double() / length).to(v.dtype) if length > 0 else torch.zeros_like(v)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one dtype hold the same bits, also where these are no number."""
    whole = {4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(whole), other.view(whole))


def representable(value: float, dtype: torch.dtype) -> float:
    """Returns the value, or the nearest that the dtype can hold."""
    most = torch.finfo(dtype).max
    return min(max(value, -most), most)


def row_norms(rows: Tensor) -> np.ndarray:
    """Returns the Euclidean norm of each row, float64 (B,).

    It is inf or nan only for a row that holds one or whose norm overflows. float32 rows: squares are added in float32
    within blocks of 128, then in float64, which is faster than float64 throughout; the relative error is below
    `norm_error(rows)` whatever the order of summation. A numpy array, since arithmetic on a few numbers is cheaper
    there, above all with several threads at work.
    """
    return mended(_plain_norms(rows), rows)


def mended(norms: np.ndarray, rows: Tensor, among: np.ndarray | None = None) -> np.ndarray:
    """Computes those norms anew whose squares may have left the number range. It may overwrite `norms`.

    Args:
        norms: norms that were computed from squares.
        rows: the rows that they are of.
        among: mask of the rows to look at; None: all.
    """
    low, high = (1e-15, 1e15) if rows.dtype == torch.float32 else (1e-140, 1e140)
    odd = ~((norms >= low) & (norms <= high))
    if among is not None:
        odd &= among
    if odd.any():
        norms[odd] = _scaled_norms(rows[torch.from_numpy(odd)])
    return norms


def norm_error(rows: Tensor) -> float:
    """Bounds the relative error of `row_norms`, plus the rounding of one product with each entry."""
    blocks = rows.shape[-1] / BLOCK
    return (
        (BLOCK + 8) * 2.0**-24 + blocks * 2.0**-53 if rows.dtype == torch.float32 else (8 + rows.shape[-1]) * 2.0**-53
    )


def _plain_norms(rows: Tensor) -> np.ndarray:
    even = rows.shape[1] // BLOCK * BLOCK if rows.dtype == torch.float32 else 0
    rest = _float64_norms(rows[:, even:])
    if not even:
        return rest
    blocks = torch.linalg.vector_norm(torch.unflatten(rows[:, :even], 1, (-1, BLOCK)), dim=2)
    norms: np.ndarray = np.hypot(_float64_norms(blocks), rest)
    return norms


def _float64_norms(rows: Tensor) -> np.ndarray:
    norms: np.ndarray = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu().numpy()
    return norms


def _scaled_norms(rows: Tensor) -> np.ndarray:
    rows = rows.double()
    top = rows.abs().amax(dim=1)
    unit = rows / top.where(top > 0, 1.0)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        norms: np.ndarray = top.cpu().numpy() * _float64_norms(unit)
    return norms
