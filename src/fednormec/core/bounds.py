"""Bounds: operators on rows that know how long their result can be. Noise and accounting read the radius from here."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.core import kernels
from fednormec.core.vectors import mended, norm_error, representable, row_norms
from fednormec.errors import UserError, at_least_one, non_negative

BITS = 20  # of the largest number of units in a message; float32 holds 24
STRIP = 64  # messages that are added in their own dtype, whose error grows with the square of their number


class Grid(NamedTuple):
    """Grid of fixed-point numbers for messages: whole multiples of a unit, and no message longer than the radius.

    Args:
        unit: distance between two neighbouring numbers, a power of two: to multiply and divide by it rounds nothing.
        radius: largest L2 norm of a message.
    """

    unit: float
    radius: float

    @property
    def steps(self) -> float:
        """Number of units in the radius."""
        return self.radius / self.unit

    @property
    def most(self) -> int:
        """Largest sum of squares of a message in units: a whole number that no rounding has touched."""
        return math.floor((Fraction(self.radius) / Fraction(self.unit)) ** 2)

    def truncate_(self, rows: Tensor, factors: Tensor | None = None) -> Tensor:
        """Rounds rows, or factor_i row_i, towards zero, in place, to numbers of the grid: no row gets longer."""
        if kernels.take_rows(rows):
            kernels.truncate_(rows, factors, self.unit)
            return rows
        if factors is not None:
            rows.mul_(factors[:, None])
        return rows.div_(self.unit).trunc_().mul_(self.unit)

    def require(self, squares: Tensor) -> None:
        """Raises TooLong if a message is longer than the radius.

        Args:
            squares: sum of each message's squares in units, float64 (B,): of whole numbers, it has no rounding.
        """
        long = ~(squares <= self.most)
        if long.any():
            raise TooLong(math.sqrt(float(squares[long][0])) * self.unit)


def grid_for(radius: float, bits: int = BITS) -> Grid:
    """Returns the grid on which between 2^(bits-1) and 2^bits units make up the radius.

    >>> grid_for(1.0)
    Grid(unit=9.5367431640625e-07, radius=1.0)
    >>> grid_for(0.3, 16).steps
    39321.6
    """
    mantissa, exponent = math.frexp(radius)
    return Grid(math.ldexp(1.0, exponent - (mantissa == 0.5) - bits), radius)


class Messages(NamedTuple):
    """Rows (B, d) as clients send them: factor_i times row_i, or the rows themselves.

    They are not multiplied out, since all an engine wants of most is their sum.

    Args:
        rows: one row per client.
        factors: one factor per row, (B,); None: the rows are the messages.
        broken: indices of the rows that were non-finite and became zero.
    """

    rows: Tensor
    factors: Tensor | None = None
    broken: tuple[int, ...] = ()

    def sum(self, sends: Tensor, adding: "Adding") -> Tensor:
        """Adds the messages of those who send, in float64.

        Args:
            sends: 1 for each client that sends, 0 for the others, (B,).
            adding: how messages are added, and how long one may be.

        Raises:
            TooLong: if `adding` has a limit and a message that is sent is longer, or non-finite.
        """
        if adding.grid is not None:
            return self._sum_units(sends, adding.grid)
        weights = sends if self.factors is None else sends * self.factors
        if kernels.take_rows(self.rows):
            total, squares = kernels.sum_rows(self.rows, weights.contiguous(), adding.exactly)
            if adding.longest < math.inf:
                _require_lengths(self.rows, weights, squares.sqrt().numpy(), adding.longest)
            return total
        if adding.longest < math.inf:
            _require_lengths(self.rows, weights, row_norms(self.rows), adding.longest)
        size, dtype = (16, torch.float64) if adding.exactly else (STRIP, self.rows.dtype)
        total = torch.zeros(self.rows.shape[1], dtype=torch.float64, device=self.rows.device)
        for some, rows in zip(torch.split(weights, size), torch.split(self.rows, size), strict=True):
            part = some.to(dtype) @ rows.to(dtype)
            if not part.isfinite().all():  # a message that is not sent counts as 0, whatever it holds
                part = some.to(dtype) @ rows.to(dtype).where(some[:, None] != 0, 0.0)
            total += part
        return total

    def _sum_units(self, sends: Tensor, grid: Grid) -> Tensor:
        """Adds messages, rounded towards zero to whole units: float64 holds their sum without rounding."""
        rows = self.rows if self.factors is None else self.rows * self.factors[:, None]
        if kernels.take_rows(rows):
            total, squares = kernels.sum_units(rows, sends, grid.unit)
        else:
            units = (rows.double() / grid.unit).trunc_()
            units[sends == 0] = 0.0  # whatever a message that is not sent holds
            total, squares = units.sum(dim=0), units.square().sum(dim=1)
        grid.require(squares)
        return total.mul_(grid.unit)

    def whole(self) -> Tensor:
        """Returns the messages themselves; they may overwrite the rows."""
        return self.rows if self.factors is None else self.rows.mul_(self.factors[:, None])

    def move_(self, memory: Tensor, factor: float) -> None:
        """Moves memory <- memory + factor message, in place, row by row.

        Args:
            memory: rows (B, d), moved in place.
            factor: factor with which the messages enter.
        """
        if self.factors is None:
            memory.add_(self.rows, alpha=factor)
        else:
            memory.addcmul_(self.rows, self.factors[:, None], value=factor)


class Adding(NamedTuple):
    """Rule for adding messages.

    Args:
        exactly: whether all are added in float64; otherwise strips of them in their own dtype, and the strips' sums in
            float64.
        longest: largest length of a message that may be added, as measured, which errs by less than `norm_error`.
        grid: grid to which messages are rounded towards zero; its radius then says how long one may be. None: they
            are any numbers.
    """

    exactly: bool = False
    longest: float = math.inf
    grid: Grid | None = None


class TooLong(Exception):
    """Message that may not be added, with its length."""

    def __init__(self, length: float) -> None:
        super().__init__(f"a message of length {length}")
        self.length = length


class Law(NamedTuple):
    """Length that a bound gives to a vector of norm n.

    It is radius n / (n + parameter), or min(n, parameter) if it `clips`.
    """

    parameter: float
    clips: bool


class Bound(NamedTuple):
    """Operator on rows (B, d) and the L2 norm that no row of its result exceeds.

    `bound(rows)` leaves rows alone; `bound.scale_(rows)` may overwrite them and gives a factor for each.

    With a finite radius it is a promise about floating-point numbers, not about the reals: it holds for every input,
    zeros, huge and tiny vectors included, and a non-finite row becomes zero.

    Args:
        name: what reports and errors call it.
        radius: largest L2 norm of a row of the result; inf: there is none.
        scale_: scale_(rows) -> Messages, the operator; it may overwrite the rows.
        law: length of the result as a function of the norm, for the functions in C; None: they are not used.
        grid: grid that the result lies on; None: it is any numbers.
    """

    name: str
    radius: float
    scale_: Callable[[Tensor], Messages]
    law: Law | None = None
    grid: Grid | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the bounded rows, all new."""
        return self.scale_(rows.clone()).whole()

    def on(self, grid: Grid | None) -> "Bound":
        """Returns the same operator with its result rounded towards zero to a grid; None: as it is."""
        if grid is None:
            return self

        def scale_(rows: Tensor) -> Messages:
            found = self.scale_(rows)
            return Messages(grid.truncate_(found.rows, found.factors), None, found.broken)

        return self._replace(scale_=scale_, grid=grid)

    def track_(self, updates: Tensor, memory: Tensor, beta: float) -> Messages:
        """Computes Delta = bound(updates - memory) and moves memory <- memory + beta Delta, in place.

        Args:
            updates: rows (B, d); they may be overwritten.
            memory: rows (B, d), moved in place.
            beta: factor with which Delta enters the memory.

        Returns:
            Delta.
        """
        beta = representable(beta, memory.dtype)
        if self.law is None or not kernels.take_rows(updates, memory):
            delta = self.scale_(updates.sub_(memory))
            delta.move_(memory, beta)
            return delta
        most, unit = self.radius * (1 - norm_error(updates)), 0.0 if self.grid is None else self.grid.unit
        factors = kernels.feedback_(updates, memory, *self.law, self.radius, most, beta, unit)
        odd, still_to_apply, broken = factors.isnan().nonzero()[:, 0], factors if self.grid is None else None, ()
        if len(odd):
            moved, few = memory[odd], self.scale_(updates[odd])
            few.move_(moved, beta)
            memory[odd], updates[odd], factors[odd] = moved, few.whole(), 1.0
            broken = tuple(odd[list(few.broken)].tolist())
        return Messages(updates, still_to_apply, broken)


def smooth_normalize(alpha: float, radius: float = 1.0) -> Bound:
    """Normalises smoothly: radius * v / (alpha + ||v||), one global norm over the whole vector.

    0 stays 0, also with alpha = 0.

    Args:
        alpha: smoothing, zero or positive.
        radius: largest L2 norm of the result.

    >>> smooth_normalize(1.0)(torch.tensor([[3.0, 0.0], [0.0, 0.0]])).tolist()
    [[0.75, 0.0], [0.0, 0.0]]
    """
    non_negative("alpha", alpha)
    _require_radius("radius", radius)

    def length(norms: np.ndarray) -> np.ndarray:  # nan for alpha = norm = 0, which _radial takes for 0
        return np.where(np.isinf(norms), radius, radius * (norms / (norms + alpha)))

    return Bound(f"smooth_normalize({alpha:g})", radius, lambda v: _radial(v, radius, length), Law(alpha, False))


def clip(tau: float, radius: float | None = None) -> Bound:
    """Clips to a largest norm: min(1, tau / ||v||) * v, times radius / tau if a radius is given.

    Args:
        tau: largest norm that is left as it is.
        radius: largest L2 norm of the result; None: tau.

    >>> clip(5.0)(torch.tensor([[3.0, 0.0], [0.0, 10.0]])).round(decimals=3).tolist()
    [[3.0, 0.0], [0.0, 5.0]]
    """
    _require_radius("tau", tau)
    if radius is None:
        return Bound(f"clip({tau:g})", tau, lambda v: _radial(v, tau, lambda n: np.minimum(n, tau)), Law(tau, True))
    _require_radius("radius", radius)
    most = radius

    def length(norms: np.ndarray) -> np.ndarray:
        return most * np.minimum(norms / tau, 1.0)

    return Bound(f"clip({tau:g}) to {most:g}", most, lambda v: _radial(v, most, length))


def identity() -> Bound:
    """Bounds nothing: the message is the vector itself. Nothing private can be built on it."""
    return Bound("identity", math.inf, lambda v: Messages(v))


def top_k(k: int) -> Bound:
    """Keeps the k coordinates of largest magnitude in each row: a contractive compressor, not a bound on the norm.

    Args:
        k: number of coordinates that are kept.

    >>> top_k(1)(torch.tensor([[1.0, -3.0, 2.0]])).tolist()
    [[0.0, -3.0, 0.0]]
    """
    at_least_one("k", k)

    def apply(v: Tensor) -> Messages:
        kept = v.abs().topk(min(k, v.shape[1]), dim=1).indices
        return Messages(torch.zeros_like(v).scatter_(1, kept, v.gather(1, kept)))

    return Bound(f"top_k({k})", math.inf, apply)


def _require_lengths(rows: Tensor, weights: Tensor, norms: np.ndarray, longest: float) -> None:
    """Raises TooLong if |weight| times norm is above `longest` or not a number, for a row whose weight is not 0."""
    factors = weights.abs().double().cpu().numpy()
    norms = mended(norms, rows, among=factors != 0)
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.where(factors == 0, 0.0, factors * norms)
    if not (lengths <= longest).all():
        raise TooLong(float(lengths[np.argmin(lengths <= longest)]))


def _require_radius(name: str, value: float) -> None:
    """Raises UserError if a radius is not well inside float32.

    Near the ends of its range rounding is no longer relative, and the promise would break.
    """
    if not 1e-30 <= value <= 1e30:
        raise UserError(f"{name} must be a positive number between 1e-30 and 1e30, not {value}.")


def _radial(rows: Tensor, radius: float, length: Callable[[np.ndarray], np.ndarray]) -> Messages:
    """Returns the rows with the factors that give them `length(norm)`.

    They are kept below the radius by the error that norm and product may have.
    """
    norms = row_norms(rows)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # odd rows are mended below
        lengths = np.minimum(length(norms), radius * (1 - norm_error(rows)))
        quotients = lengths / norms
        odd = ~((norms > 1e-15) & (norms < 1e15) & (quotients > 1e-30) & (quotients < 1e30))
    broken: tuple[int, ...] = ()
    if odd.any():
        chosen = np.flatnonzero(odd)
        picked = rows[chosen]
        broken = tuple(chosen[~picked.isfinite().all(dim=1).cpu().numpy()].tolist())
        rows[chosen] = _rescaled(picked, np.nan_to_num(lengths[odd], nan=0.0))
        quotients[odd] = 1.0
    return Messages(rows, torch.from_numpy(quotients).to(rows.device, rows.dtype), broken)


def _rescaled(rows: Tensor, lengths: np.ndarray) -> Tensor:
    """Returns the rows at their new length; zero for 0 and for non-finite rows.

    It computes v / ||v|| in float64, since a plain quotient would leave the number range.
    """
    rows64 = rows.double()
    top = rows64.abs().amax(dim=1, keepdim=True)
    unit = torch.where(top.isfinite() & (top > 0), rows64 / top, 0.0)
    norms: Tensor = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
    return (unit / norms.clamp(min=1.0) * torch.from_numpy(lengths[:, None]).to(rows.device)).to(rows.dtype)
