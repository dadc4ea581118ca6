"""Quadratic problems: everything the theory speaks of (L, f^inf, f_i^inf) is known exactly."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from fednormec.core.fingerprint import fingerprint
from fednormec.core.problem import Interval, Metrics, tile_size
from fednormec.core.randomness import generator
from fednormec.core.vectors import some_of, take
from fednormec.errors import UserError, at_least_one, non_negative, require_room


@final
@dataclass(frozen=True, eq=False, repr=False)
class Quadratic:
    """Quadratic problem: f_{i,j}(x) = 1/2 (x - b_ij)^T A_ij (x - b_ij), with A_ij symmetric positive semi-definite.

    The constants are computed in float64 on the CPU and are exact up to its rounding; where float32 data leave open
    whether a direction is flat, infima are intervals. Both tensors are kept, not copied: do not write to them.

    Args:
        curvatures: A, (M, N, d, d).
        minimisers: b, (M, N, d).

    >>> problem = Quadratic(torch.ones(2, 1, 1, 1), torch.tensor([-1.0, 1.0]).reshape(2, 1, 1))
    >>> problem.smoothness, problem.infimum
    (1.0, Interval(lower=0.5, upper=0.5))
    """

    curvatures: Tensor
    minimisers: Tensor

    def __post_init__(self) -> None:
        _check_tensors(self.curvatures, self.minimisers)
        _check_curvatures(self.curvatures, self._spectrum)

    @property
    def dim(self) -> int:
        return self.minimisers.shape[2]

    @property
    def num_clients(self) -> int:
        return self.minimisers.shape[0]

    @property
    def tile(self) -> int:
        return tile_size(self.num_clients, self.dim)

    @property
    def client_sizes(self) -> np.ndarray:
        return np.full(self.num_clients, self.minimisers.shape[1], dtype=np.int64)

    def init(self, rng: np.random.Generator) -> Tensor:
        """Draws a standard normal vector."""
        return torch.from_numpy(rng.standard_normal(self.dim)).to(self.minimisers)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        """Computes the mean of A_ij (x - b_ij) as one batched product: the gradient is affine in x."""
        if examples is None:
            A, Ab = take(self._mean_curvatures, ids), take(self._mean_pulls, ids)
        else:
            A, Ab = self._means_over(ids, examples)
        rows = x.expand(len(ids), self.dim).unsqueeze(-1)
        return torch.bmm(A, rows).squeeze(-1) - Ab

    def part(self, first: int, last: int) -> "Quadratic":
        some = Quadratic(some_of(self.curvatures, first, last), some_of(self.minimisers, first, last))
        vars(some)["_mean_curvatures"] = some_of(self._mean_curvatures, first, last)
        return some

    def digest(self) -> str:
        """Returns a digest of the data and the loss, by which a run that is resumed knows the problem again."""
        return fingerprint(self.curvatures, self.minimisers)

    def evaluate(self, x: Tensor) -> Metrics:
        losses = _client_losses(x.expand(self.num_clients, -1), self.curvatures, self.minimisers)
        gradient = self.grad(x, np.arange(self.num_clients)).mean(0)
        train_loss = losses[losses.isfinite()].mean().item()
        return Metrics(public={}, not_private={"train_loss": train_loss, "gradient_norm": gradient.norm().item()})

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}

    def model(self, x: Tensor) -> Tensor:
        return x

    @property
    def smoothness(self) -> float:
        """Smoothness L: the top eigenvalue of the most curved component. No smaller number serves every f_{i,j}."""
        return self._spectrum.max().item()

    @cached_property
    def infimum(self) -> Interval:
        """Infimum f^inf, attained where the mean curvature maps x to the mean of A_ij b_ij."""
        A, b = self._exact
        everything = A.reshape(1, -1, self.dim, self.dim), b.reshape(1, -1, self.dim)
        lower, upper = _infima(*everything, self._roundings)
        return Interval(lower.item(), upper.item())

    @cached_property
    def client_infima(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of each f_i^inf, (M,) float64; the same unless a direction may be flat."""
        return _infima(*self._exact, self._roundings)

    @property
    def lower_client_infima(self) -> Tensor:
        """Lower ends of `client_infima`."""
        return self.client_infima[0]

    @property
    def component_infima(self) -> Tensor:
        """Infimum f_{i,j}^inf of each component, (M, N) float64: zero, attained at b_ij."""
        return torch.zeros(self.minimisers.shape[:2], dtype=torch.float64)

    @cached_property
    def _mean_curvatures(self) -> Tensor:
        return self.curvatures.mean(1)

    @cached_property
    def _pulls(self) -> Tensor:
        """Products A_ij b_ij, (M, N, d)."""
        return (self.curvatures @ self.minimisers.unsqueeze(-1)).squeeze(-1)

    @cached_property
    def _mean_pulls(self) -> Tensor:
        return self._pulls.mean(1)

    def _means_over(self, ids: np.ndarray, examples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns the means of A_ij and A_ij b_ij over the chosen components of each client."""
        owners = torch.tensor(ids, device=self.minimisers.device).unsqueeze(1)
        chosen = torch.tensor(examples, device=self.minimisers.device)
        present = (chosen >= 0).to(self.minimisers.dtype)
        weights = present / present.sum(1, keepdim=True)
        A, Ab = self.curvatures[owners, chosen.clamp(min=0)], self._pulls[owners, chosen.clamp(min=0)]
        return torch.einsum("rj,rjkl->rkl", weights, A), torch.einsum("rj,rjk->rk", weights, Ab)

    @property
    def _exact(self) -> tuple[Tensor, Tensor]:
        return self.curvatures.to("cpu", torch.float64), self.minimisers.to("cpu", torch.float64)

    @cached_property
    def _spectrum(self) -> Tensor:
        """Eigenvalues (M, N, d), ascending."""
        A, _ = self._exact
        eigenvalues: Tensor = torch.linalg.eigvalsh((A + A.mT) / 2)
        return eigenvalues

    @property
    def _roundings(self) -> tuple[float, float]:
        """Shares of the largest eigenvalue below which another may be rounding.

        The first for rounding of the data's own dtype, which may be meant; the second for rounding here.
        """
        return _relative_rounding(self.curvatures), _relative_rounding(self._exact[0])


def random_quadratic(
    num_clients: int,
    dim: int,
    *,
    parts: int = 1,
    heterogeneity: float = 1.0,
    condition: float = 10.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Quadratic:
    """Draws a random quadratic problem: eigenvalues log-uniform in [1/condition, 1], random rotations.

    Args:
        num_clients: number of clients M.
        dim: number of parameters d.
        parts: number of components N of each client.
        heterogeneity: h moves the minimisers apart (a standard normal distance times h, half of its variance common to
            a client's parts) and the curvatures from one shared matrix (h = 0) to independent ones (h >= 1; in between,
            a blend in logarithms that keeps the range of the eigenvalues). h = 0 gives identical f_{i,j}.
        condition: largest condition number of a curvature, at least 1.
        seed: seed of the problem.
        dtype: dtype of the problem; it is drawn in float64.
    """
    for name, value in {"num_clients": num_clients, "dim": dim, "parts": parts}.items():
        at_least_one(name, value)
    if not 1 <= condition < math.inf:
        raise UserError(f"condition must be a finite number of at least 1, not {condition}.")
    h = non_negative("heterogeneity", heterogeneity)
    rng, shape = generator(seed, "random_quadratic"), (num_clients, parts, dim)
    while_made = 3 * 8 * num_clients * parts * dim**2  # bytes
    require_room(f"{num_clients} x {parts} matrices of {dim} x {dim}", while_made, "ask for fewer or smaller ones")
    A = _blended_curvatures(rng, shape, min(h, 1.0), condition)
    centre, clients, components = (rng.standard_normal(s) for s in [(dim,), (num_clients, 1, dim), shape])
    with np.errstate(over="ignore"):  # an absurd distance is refused below, as not finite
        b = torch.from_numpy(centre + h * (clients + components) / math.sqrt(2))
    return Quadratic(A.to(dtype), b.to(dtype))


def _client_losses(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """Returns f_i at row i of x.

    The sum of squares as it stands: nothing cancels, so that near a minimum it stays exact.
    """
    gap = x.unsqueeze(1) - b
    return torch.einsum("mjk,mjkl,mjl->mj", gap, A, gap).mean(1) / 2


def _infima(A: Tensor, b: Tensor, roundings: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Returns min f_i for each client, from below and above.

    The normal equations are always solvable: A_ij b_ij lies in the range of the mean A. A direction that is almost flat
    in the data's own dtype may be meant or be rounding. Where it is rounding the value at the point that leaves it
    alone is attained; where it is meant the other reading is lower. No summand is negative.
    """
    mean_A, mean_Ab = A.mean(1), (A @ b.unsqueeze(-1)).mean(1)
    points = [torch.linalg.pinv(mean_A, rtol=rounding, hermitian=True) @ mean_Ab for rounding in roundings]
    attained, literal = (_client_losses(x.squeeze(-1), A, b) for x in points)
    return torch.minimum(attained, literal).clamp(min=0.0), attained


def _blended_curvatures(
    rng: np.random.Generator, shape: tuple[int, int, int], share: float, condition: float
) -> Tensor:
    """Draws curvatures (M, N, d, d): the shared one for share = 0, independent ones for share = 1."""
    d = shape[2]
    logs, gauss = rng.random(d), rng.standard_normal((d, d))
    if share > 0:  # not only for speed: a batch of equal matrices need not factorise to equal bits
        logs = (1 - share) * logs + share * rng.random(shape)
        gauss = (1 - share) * gauss + share * rng.standard_normal((*shape, d))
    Q = torch.linalg.qr(torch.from_numpy(gauss)).Q
    A: Tensor = (Q * torch.from_numpy(condition**-logs).unsqueeze(-2)) @ Q.mT
    return ((A + A.mT) / 2).expand(*shape, d).contiguous()


def _relative_rounding(A: Tensor) -> float:
    return 8 * A.shape[-1] * torch.finfo(A.dtype).eps


def _check_tensors(A: Tensor, b: Tensor) -> None:
    if b.ndim != 3 or 0 in b.shape or A.shape != (*b.shape, b.shape[2]):
        raise UserError(
            f"a quadratic problem needs curvatures (M, N, d, d) and minimisers (M, N, d) with no length zero, "
            f"but got {tuple(A.shape)} and {tuple(b.shape)}."
        )
    if not A.is_floating_point() or A.dtype != b.dtype or A.device != b.device:
        raise UserError(
            f"curvatures and minimisers must share one floating-point dtype and one device, "
            f"but are {A.dtype} on {A.device} and {b.dtype} on {b.device}."
        )
    if not (A.isfinite().all() and b.isfinite().all()):
        raise UserError("curvatures and minimisers must be finite, but some entries are infinite or not a number.")


def _check_curvatures(A: Tensor, spectrum: Tensor) -> None:
    tolerance = _relative_rounding(A) * spectrum.abs().amax(-1).to(A)
    if ((A - A.mT).abs().amax((-1, -2)) > tolerance).any():
        raise UserError("every curvature must be a symmetric matrix; replace A by (A + A^T) / 2.")
    if (spectrum[..., 0].to(A) < -tolerance).any():
        raise UserError(
            f"every curvature must be positive semi-definite, but one has the eigenvalue {spectrum.min().item():.3g}."
        )
