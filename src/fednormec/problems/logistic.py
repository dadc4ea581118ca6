"""Logistic regression with a non-convex regulariser: L is known, the infima lie in certified intervals."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from typing import Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fednormec.core.bounds import STRIP, Adding, Bound
from fednormec.core.fingerprint import fingerprint
from fednormec.core.problem import ByClient, Interval, Metrics, tile_size
from fednormec.core.randomness import generator
from fednormec.core.vectors import some_of, take
from fednormec.errors import UserError, at_least_one, non_negative
from fednormec.problems.grouping import grouped, own_padding
from fednormec.problems.metrics import checked_owners, means_of

EPS: Final = float(np.finfo(np.float64).eps)
PROJECTIONS: Final = 4
POLISHES: Final = 20
CUTS: Final = (0.0, 1e-9, 1e-6)


@final
class Logistic:
    """Logistic regression with the non-convex regulariser r(w) = sum_k w_k^2 / (1 + w_k^2).

    f_{i,j}(w) = log(1 + exp(-y_ij a_ij.w)) + lambda r(w). The clients' data are copied, signed (y a) and padded with
    zero rows to the largest N_i, so that a tile is one batched product; a padded row has weight zero.

    Args:
        features: a_i (N_i, d) of each client.
        labels: y_i (N_i,) of -1 and +1 of each client.
        regularizer: lambda, zero or positive.
        test: pair of features and labels to evaluate on; None: there is none.
        held_out: whether the test pair is clients' own data, so that figures on it are not private; else it is public.
        per_client: whether an evaluation also says how the accuracy is spread over the clients, on each one's own
            examples: that is not private.
        owners: number of the client that each example of the test pair was held out of, for `per_client` to look at
            these instead; None: they are nobody's.
        persons: whose each example of each client is, ids of any kind, where all examples of a person are one record;
            None: each example is one.

    >>> problem = Logistic([torch.eye(2)], [torch.tensor([1, -1])], regularizer=0.5)
    >>> problem.smoothness
    1.25
    """

    def __init__(
        self,
        features: Sequence[Tensor],
        labels: Sequence[Tensor],
        *,
        regularizer: float = 0.0,
        test: tuple[Tensor, Tensor] | None = None,
        held_out: bool = False,
        per_client: bool = False,
        owners: Sequence[int] | np.ndarray | None = None,
        persons: Sequence[np.ndarray] | None = None,
    ) -> None:
        _check_clients(features, labels)
        if test is not None:
            _check_pair("the test set", *test, like=features[0])
        self._sizes: Final = np.array([len(a) for a in features], dtype=np.int64)
        self._records: Final = grouped(persons, self._sizes)
        self._signed: Final = _padded([a * y.to(a).unsqueeze(1) for a, y in zip(features, labels, strict=True)])
        self._weights: Final = _padded([torch.full_like(y, 1 / len(y), dtype=self._signed.dtype) for y in labels])
        self._regularizer: Final = float(non_negative("regularizer", regularizer))
        self._test: Final = None if test is None else (test[0], test[1].to(test[0]))
        self._held_out: Final = held_out
        self._labels: Final = [y.to(self._signed) for y in labels]
        self._per_client: Final = per_client
        self._owners: Final = checked_owners(owners, 0 if test is None else len(test[1]), len(features))

    @property
    def dim(self) -> int:
        return self._signed.shape[2]

    @property
    def num_clients(self) -> int:
        return self._signed.shape[0]

    @property
    def tile(self) -> int:
        return tile_size(self.num_clients, self.dim)

    @property
    def client_sizes(self) -> np.ndarray:
        return self._sizes.copy()

    def init(self, rng: np.random.Generator) -> Tensor:
        """Returns zeros: the natural start, where every example has the loss log 2."""
        return self._signed.new_zeros(self.dim)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        """Computes - mean_j sigma(-z_ij) y_ij a_ij + lambda r'(w), with the margins z_ij = y_ij a_ij.w."""
        S, c = (take(self._signed, ids), take(self._weights, ids)) if examples is None else self._pick(ids, examples)
        w = x.expand(len(ids), self.dim)
        s = c * torch.sigmoid(-torch.bmm(S, w.unsqueeze(-1)).squeeze(-1))
        return self._regularizer * (2 * w / (1 + w * w) ** 2) - torch.bmm(s.unsqueeze(1), S).squeeze(1)

    def part(self, first: int, last: int) -> "Logistic":
        """Returns some clients, padded as all clients are: another width could round differently."""
        some = copy(self)
        own = {name: some_of(getattr(self, name), first, last) for name in ("_signed", "_weights")}
        vars(some).update(own, _sizes=self._sizes[first:last].copy(), _test=None)
        vars(some).update(_records=self._records.part(first, last), _labels=self._labels[first:last])
        return some

    # records

    @property
    def grouped(self) -> bool:
        """True if any record is more than one example."""
        return self._records.order is not None

    @property
    def record_sizes(self) -> np.ndarray:
        """Number of records of each client, (M,)."""
        return self._records.sizes

    def examples_of(self, client: int, records: np.ndarray) -> np.ndarray:
        """Returns the examples of some of a client's records, (n, b), padded with -1.

        Args:
            client: number of the client.
            records: numbers of its records.
        """
        return self._records.examples_of(client, records)

    def record_sum(self, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
        """Returns the sum (d,), float64, of bounded gradients of the records' losses, without the regulariser.

        Args:
            x: the model, (d,).
            client: number of the client.
            records: numbers of its records.
            bound: bound on each record's gradient.
        """
        total = torch.zeros(self.dim, dtype=torch.float64, device=x.device)
        examples = self.examples_of(client, records)
        for some in np.split(examples, range(STRIP, len(examples), STRIP)):
            S, c = self._pick(np.full(len(some), client), some)
            s = c * torch.sigmoid(-(S @ x))
            rows = -torch.bmm(s.unsqueeze(1), S).squeeze(1)
            total += bound.scale_(rows).sum(x.new_ones(len(some)), Adding(longest=bound.radius))
        return total

    def apart_from_data(self, x: Tensor) -> Tensor | None:
        """Returns the gradient of the regulariser, (d,); None if there is none.

        Args:
            x: the model, (d,).
        """
        return self._regularizer * (2 * x / (1 + x * x) ** 2) if self._regularizer else None

    def digest(self) -> str:
        """Returns a digest of the data and the loss, by which a run that is resumed knows the problem again."""
        looks = (self._held_out, self._per_client, self._owners, *((self._records,) if self.grouped else ()))
        return fingerprint(self._signed, self._weights, self._sizes, self._regularizer, self._test, looks)

    def evaluate(self, x: Tensor) -> Metrics:
        """Computes figures of the model x.

        Those on the test set are the logistic loss without the regulariser, and the accuracy.
        """
        losses = self._regularizer * _penalty(x) - (self._weights * logsigmoid(self._signed @ x)).sum(1)
        gradient = self.grad(x, np.arange(self.num_clients)).mean(0)
        train_loss = losses[losses.isfinite()].mean().item()
        own = {"train_loss": train_loss, "gradient_norm": gradient.norm().item()}
        tested = self._test_figures(x)
        spread = self._by_client(x) if self._per_client else None
        apart = own | tested if self._held_out else own
        return Metrics({} if self._held_out else tested, apart if spread is None else apart | spread.figures, spread)

    def evaluate_own(self, models: Tensor) -> ByClient:
        """Computes the accuracy of each client's own model on that client's examples.

        They are those that were held out of it, if `owners` says which, and else those it trains on.

        Args:
            models: a model for each client, (M, d).
        """
        if self._test is not None and self._owners is not None:
            a, y = self._test
            score = (a * models[torch.from_numpy(self._owners).to(models.device)]).sum(1)
            values = means_of(self._owners, _right(score, y).cpu().numpy())
            return ByClient.of("accuracy", True, values, held_out=True)
        margins = torch.bmm(self._signed, models.unsqueeze(-1)).squeeze(-1)
        return ByClient.of("accuracy", True, self._right_of_clients(margins))

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return {"w": x}

    def model(self, x: Tensor) -> Tensor:
        return x

    @cached_property
    def smoothness(self) -> float:
        """Smoothness L = max_ij ||a_ij||^2 / 4 + 2 lambda.

        The logistic loss has 0 <= l'' <= 1/4. With u = w^2, r'' = (2 - 6u) / (1 + u)^3, and |2 - 6u| <= 2 + 6u <= 2 (1
        + u)^3, so |r''| <= 2.
        """
        return self._signed.double().square().sum(2).max().item() / 4 + 2 * self._regularizer

    @cached_property
    def infimum(self) -> Interval:
        """Infimum f^inf. Every client weighs 1/M, so an example of client i weighs 1 / (M N_i)."""
        rows = np.concatenate([S for S, _ in self._client_data])
        weights = np.concatenate([c for _, c in self._client_data]) / self.num_clients
        with _one_thread():
            return _certified_infimum(rows, weights, self._regularizer)

    @cached_property
    def client_infima(self) -> tuple[Tensor, Tensor]:
        """Certified lower bounds of each f_i^inf and the lowest values found, both (M,) float64."""
        with _one_thread():
            found = [_certified_infimum(S, c, self._regularizer) for S, c in self._client_data]
        lower, upper = torch.tensor(found, dtype=torch.float64).unbind(1)
        return lower, upper

    @cached_property
    def lower_client_infima(self) -> Tensor:
        """Lower ends of `client_infima`, without the search for the upper ones, which takes far longer."""
        with _one_thread():
            found = [_certified_convex_part(S, c).lower for S, c in self._client_data]
        return torch.tensor(found, dtype=torch.float64)

    @property
    def component_infima(self) -> Tensor:
        """Lower bounds of each f_{i,j}^inf, (M, max N_i) float64: zeros, valid because no term is negative.

        Without regulariser they are exact unless a_ij = 0: the margin of one example can grow for ever.
        """
        return torch.zeros(self._weights.shape, dtype=torch.float64)

    def _pick(self, ids: np.ndarray, examples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns the signed rows of the chosen examples and their weights."""
        if (examples >= self._sizes[ids][:, None]).any():
            raise IndexError("an index in `examples` is not below the size of its client")
        owners = torch.tensor(ids, device=self._signed.device).unsqueeze(1)
        there = examples >= 0
        present = torch.tensor(there, device=self._signed.device).to(self._signed.dtype)
        own = torch.tensor(own_padding(examples, there), device=self._signed.device)
        return self._signed[owners, own], present / present.sum(1, keepdim=True)

    def _test_figures(self, x: Tensor) -> dict[str, float]:
        if self._test is None:
            return {}
        a, y = self._test
        score = a @ x
        return {"test_loss": -logsigmoid(y * score).mean().item(), "test_accuracy": _right(score, y).mean().item()}

    def _by_client(self, x: Tensor) -> ByClient:
        if self._test is not None and self._owners is not None:
            a, y = self._test
            values = means_of(self._owners, _right(a @ x, y).cpu().numpy())
            return ByClient.of("accuracy", True, values, held_out=True)
        return ByClient.of("accuracy", True, self._right_of_clients(self._signed @ x))

    def _right_of_clients(self, margins: Tensor) -> list[float]:
        """Returns each client's share of examples that are on the right side, of the margins y a.w (M, N)."""
        return [float(_right(y * margins[i, : len(y)], y).mean()) for i, y in enumerate(self._labels)]

    @property
    def _client_data(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Signed rows and weights 1/N_i of each client, in float64 and without padding."""
        signed = self._signed.to("cpu", torch.float64).numpy()
        return [(S[:n], np.full(n, 1 / n)) for S, n in zip(signed, self._sizes, strict=True)]


def random_logistic(
    num_clients: int,
    dim: int,
    *,
    examples: int = 20,
    heterogeneity: float = 1.0,
    regularizer: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Logistic:
    """Draws a random logistic problem with noisy labels.

    a_ij = g_j + h mu_i, all standard normal; y_j = sign(g_j.w + logistic noise). The last example is the first with the
    opposite label, so no client is separable and every f_i^inf is positive.

    Args:
        num_clients: number of clients M.
        dim: number of features d.
        examples: number of examples of each client, at least 2.
        heterogeneity: h scales the shift mu_i of each client's features; h = 0 gives identical clients.
        regularizer: lambda, zero or positive.
        seed: seed of the problem.
        dtype: dtype of the problem; it is drawn in float64.
    """
    shapes = [(examples, dim), (dim,), (at_least_one("num_clients", num_clients), 1, at_least_one("dim", dim))]
    if examples < 2:
        raise UserError(f"examples must be at least 2, not {examples}: a single one can always be separated.")
    h, rng = non_negative("heterogeneity", heterogeneity), generator(seed, "random_logistic")
    g, w, mu = (rng.standard_normal(shape) for shape in shapes)
    y = np.where(g @ w + rng.logistic(size=examples) > 0, 1.0, -1.0)
    g[-1], y[-1] = g[0], -y[0]
    features = torch.from_numpy(g + h * mu).to(dtype)
    labels = torch.from_numpy(y).to(dtype)
    return Logistic(list(features), [labels] * num_clients, regularizer=regularizer)


def _penalty(w: Tensor) -> Tensor:
    """Returns r(w), written so that a huge weight gives 1 instead of inf / inf."""
    return (w / torch.hypot(w, torch.ones_like(w))).square().sum()


def _right(score: Tensor, labels: Tensor) -> Tensor:
    """Returns 1 for each example that is on the right side, 0 for the others; a score of 0 says +1."""
    return ((score >= 0) == (labels > 0)).double()


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


# The infima, in numpy. With signed rows S (n, d) and weights c, F(w) = sum_j c_j l(S_j.w) + lambda r(w), where
# l(z) = log(1 + e^-z). p_j = sigma(-z_j) = -l'(z_j) are the dual variables, so grad of the convex part is -S^T (c p).


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits BLAS to one thread.

    Threads that wait for each other make the search several times slower: its matrices are small.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"):
        yield


class _ConvexPart(NamedTuple):
    """Knowledge of the convex part: a certified lower bound of its infimum, and a point near it."""

    lower: float
    point: np.ndarray


def _certified_infimum(S: np.ndarray, c: np.ndarray, regularizer: float) -> Interval:
    """Returns [lower, upper] around inf F.

    Below by weak duality of the convex part, since r >= 0; above by the best point found.
    """
    lower, point = _certified_convex_part(S, c)
    starts = [point] if regularizer == 0 else [
        _descend(S, c, regularizer, start) for start in (point, np.zeros_like(point))
    ]  # fmt: skip
    upper = min(_value(S, c, regularizer, start) for start in starts)
    return Interval(min(lower, upper), upper)


def _certified_convex_part(S: np.ndarray, c: np.ndarray) -> _ConvexPart:
    """Bounds the infimum of the convex part from below and finds a point near it.

    The convex part does not mind how features are scaled, its minimiser does: unit columns for that. Where some margins
    grow for ever, the best dual variables are zero: hence the cuts.
    """
    scale = np.sqrt((S * S).sum(0))
    scale[scale == 0] = 1.0
    unit = S / scale
    u = _polish(unit, c, _descend(unit, c, 0.0, np.zeros_like(scale)))
    p = _duals(unit @ u)
    return _ConvexPart(max(_dual_bound(unit, c, np.where(p > cut, p, 0.0)) for cut in CUTS), u / scale)


def _dual_bound(S: np.ndarray, c: np.ndarray, p: np.ndarray) -> float:
    """Bounds min_w sum_j c_j l(S_j.w) from below, by dual variables p near the best ones; 0 where they give no bound.

    l(z) = max_p H(p) - p z over p in [0, 1], with H the binary entropy. So any such p with S^T (c p) = 0 gives sum_j
    c_j l(S_j.w) >= sum_j c_j H(p_j) for every w. Newton steps project p on that subspace, in the metric that changes
    p_j by a multiple of p_j (1 - p_j), so that they hardly ever leave [0, 1].

    A rest of size rho, left by rounding, can still be taken away exactly by some change of p_j of at most t_j = p_j (1
    - p_j) ||S_j|| rho / lambda_min. H is concave: on [p_j - t_j, p_j + t_j] it is least at an end. What is left in
    directions without curvature must be rounding itself: features that depend on each other.
    """
    from scipy.special import entr  # type: ignore[import-untyped, unused-ignore]

    for _ in range(PROJECTIONS):
        p = p - p * (1 - p) * (S @ _newton(S, c, p).step)
        if not (p.min() >= 0 and p.max() <= 1):
            return 0.0
    newton, norms = _newton(S, c, p), np.sqrt((S * S).sum(1))
    rounding = len(c) * EPS * float(c * p @ norms)
    reach = norms * (newton.residual + rounding) / newton.smallest_curvature
    if newton.unreachable > rounding:
        return 0.0
    low, high = (p + sign * p * (1 - p) * reach for sign in (-1, 1))
    entropy = np.minimum(entr(low) + entr(1 - low), entr(high) + entr(1 - high))  # -inf outside [0, 1]
    return max(0.0, float(c @ entropy) * (1 - len(c) * EPS))


class _Newton(NamedTuple):
    """Newton step of the convex part, and how well the rest S^T (c p) can be taken away by one."""

    step: np.ndarray
    residual: float
    unreachable: float
    smallest_curvature: float


def _newton(S: np.ndarray, c: np.ndarray, p: np.ndarray) -> _Newton:
    """Solves (S^T D S) step = S^T (c p), D = diag(c p (1 - p)), in the directions whose curvature is not rounding."""
    _, sigma, V = np.linalg.svd(np.sqrt(c * p * (1 - p))[:, None] * S, full_matrices=False)
    keep = sigma > max(sigma[0] * max(S.shape) * EPS, 1e-150)  # squares of less would be zero
    sigma, V, r = sigma[keep], V[keep], S.T @ (c * p)
    reachable = V @ r
    unreachable = float(np.linalg.norm(r - V.T @ reachable))
    return _Newton(
        V.T @ (reachable / sigma**2), float(np.linalg.norm(r)), unreachable, float(np.min(sigma**2, initial=np.inf))
    )


def _polish(S: np.ndarray, c: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Takes Newton steps on the convex part for as long as they gain something."""
    for _ in range(POLISHES):
        better = w + _newton(S, c, _duals(S @ w)).step
        if not _value(S, c, 0.0, better) < _value(S, c, 0.0, w):
            break
        w = better
    return w


def _descend(S: np.ndarray, c: np.ndarray, regularizer: float, start: np.ndarray) -> np.ndarray:
    from scipy.optimize import minimize  # type: ignore[import-untyped, unused-ignore]

    def value_and_gradient(w: np.ndarray) -> tuple[float, np.ndarray]:
        q = 1 / np.hypot(w, 1.0)  # r' = 2 w q^4, in an order that cannot overflow
        gradient = 2 * regularizer * (w * q) * q**3 - S.T @ (c * _duals(S @ w))
        return _value(S, c, regularizer, w), gradient

    options = {"maxiter": 10_000, "maxfun": 20_000, "ftol": 1e-15, "gtol": 1e-11}
    return np.asarray(minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options).x)


def _value(S: np.ndarray, c: np.ndarray, regularizer: float, w: np.ndarray) -> float:
    penalty = np.square(w / np.hypot(w, 1.0)).sum()
    return float(c @ np.logaddexp(0.0, -(S @ w)) + regularizer * penalty)


def _duals(z: np.ndarray) -> np.ndarray:
    """Returns sigma(-z), without overflow and exact in its smallest values too."""
    return np.asarray(np.exp(-np.logaddexp(0.0, z)))


def _check_clients(features: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
    if len(features) == 0 or len(features) != len(labels):
        raise UserError(
            f"a logistic problem needs features and labels of at least one client, one of each per client, "
            f"but got {len(features)} features and {len(labels)} labels."
        )
    for i, (a, y) in enumerate(zip(features, labels, strict=True)):
        _check_pair(f"client {i}", a, y, like=features[0])


def _check_pair(owner: str, a: Tensor, y: Tensor, like: Tensor) -> None:
    """Raises UserError if features and labels do not fit together, or differ from `like` in number, dtype or device."""
    if a.ndim != 2 or 0 in a.shape or y.shape != a.shape[:1]:
        raise UserError(
            f"{owner} needs features (N, d) and labels (N,) with N and d at least 1, "
            f"but has {tuple(a.shape)} and {tuple(y.shape)}."
        )
    if a.shape[1] != like.shape[1]:
        raise UserError(f"{owner} has {a.shape[1]} features where the first client has {like.shape[1]}.")
    if not a.is_floating_point() or (a.dtype, a.device) != (like.dtype, like.device) or y.device != a.device:
        raise UserError(
            f"all features must share one floating-point dtype and one device with the labels, but {owner} has "
            f"{a.dtype} on {a.device} (labels on {y.device}) where the first client has {like.dtype} on {like.device}."
        )
    if not a.isfinite().all():
        raise UserError(f"features must be finite, but {owner} has entries that are infinite or not a number.")
    if not ((y == 1) | (y == -1)).all():
        raise UserError(f"labels must be -1 or +1, but {owner} has others; map classes 0 and 1 by 2 * y - 1.")
