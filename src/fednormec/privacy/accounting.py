"""Accounting of what one round's release gives away and what many of them add up to: ε, δ, never rounded in our favour.

A `Release` is one round as an observer sees it, in public numbers alone. It comes in two shapes:

- `Hidden(p, mu)`: the client is in the sum with probability p and nobody sees whether. Poisson-subsampled Gaussian.
- `Open(weights, mus)`: the noise level of the round is public and does not depend on the data; with probability
  weights[j] the client is seen through a Gaussian of shift/std = mus[j], otherwise not at all.

`mirrored` says that both neighbours send something (replace-one), which matters for Hidden only: the shift of an Open
release already is the distance between the two. Where every round has the same mu there are closed forms; else the
privacy loss is put on a grid (`round_loss`) and composed (`composition`). Rényi accounting is dp-accounting's, whose
import takes seconds.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom

from fednormec.privacy import composition
from fednormec.privacy.grid import smoothed
from fednormec.privacy.round_loss import REACH, RoundLoss, gaussian, mirrored, on_grid, subsampled

Accountant = Literal["pld", "rdp"]
TIGHT = 1e-30  # for a smaller δ what is cut off of every round can count, and other bounds are looked at too
LOG_IGNORED = math.log(1e-50)  # counted in full as δ
LARGEST_WIDTH = 32.0  # e^width must be a number
CLOSEST = 1e-9  # relative width at which a search ends
NEXT_TO_NOTHING = 1e-15  # distance below which noise has 16 units and more, so that a sum of noises is one noise
MOST_EXCESS, MOST_GUESSED = 1e6, 1e300  # limits of numbers that a search interpolates between, and of where it begins
RENYI_ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)


class Hidden(NamedTuple):
    """Release of a Poisson-subsampled Gaussian: nobody sees whether the client is in the sum.

    Attributes:
        p: probability that it is.
        mu: radius/std.
        mirrored: whether the neighbour sends the opposite instead of nothing.
        unlike: distance in total variation between the round and this release, all of it counted: noise on a grid is
            not quite the rounding of continuous noise.
    """

    p: float
    mu: float
    mirrored: bool = False
    unlike: float = 0.0


class Open(NamedTuple):
    """Release of a mixture of Gaussians over public noise levels; what all lack to 1 is a round without the client.

    Attributes:
        weights: probability of each noise level.
        mus: shift/std at each noise level.
        unsure: probability per round of cases nobody looked into, all of it counted as δ.
        unlike: as in `Hidden`.
    """

    weights: tuple[float, ...]
    mus: tuple[float, ...]
    unsure: float = 0.0
    unlike: float = 0.0


Release = Hidden | Open


@lru_cache(maxsize=128)  # a round asks for its ε several times: for the ledger, the record, the screen
def epsilon(release: Release, rounds: int, delta: float, accountant: Accountant = "pld") -> float:
    """Returns the ε at this δ after `rounds` such releases, an upper bound; inf if the accountant has no answer.

    accountant="pld" is the tight one: a closed form or the privacy loss distribution; for a δ below 1e-30 also Rényi
    and a closed form for a client that is seen whenever it is drawn, whichever says least.
    """
    if rounds == 0:
        return 0.0
    if release.unlike:
        plain = _alike(release)
        found = smoothed(lambda left: epsilon(plain, rounds, left, accountant), delta, rounds * release.unlike)
        # e^ε times the distance outgrows δ where ε is large; Rényi's divergences of discrete Gaussians are no larger
        # than those of continuous ones (Canonne, Kamath and Steinke 2020), so that nothing is to be added there
        if math.isfinite(found) or release.unlike > NEXT_TO_NOTHING or accountant == "rdp":
            return found
        return _renyi_epsilon(plain if isinstance(plain, Open) else _unamplified(plain), rounds, delta)
    if accountant == "rdp":
        return _renyi_epsilon(release, rounds, delta)
    release = _computable(release)
    if isinstance(release, Open) and len(release.mus) == 1:
        return _closed_epsilon(release, rounds, delta)
    tight = max(composition.epsilon([(loss, rounds)], delta) for loss in _own_losses(release, rounds))
    if delta >= TIGHT:
        return tight
    return min(tight, _renyi_epsilon(release, rounds, delta), _closed_epsilon(_seen(release), rounds, delta))


def delta(release: Release, rounds: int, epsilon: float) -> float:
    """Returns the δ at this ε after `rounds` such releases, an upper bound."""
    if rounds == 0:
        return 0.0
    if release.unlike:
        unlike = rounds * release.unlike * (1 + math.exp(min(epsilon, 700.0)))
        return min(1.0, delta(_alike(release), rounds, epsilon) + unlike)
    release = _computable(release)
    if isinstance(release, Open) and len(release.mus) == 1:
        return min(1.0, math.exp(_log_delta_open(release, rounds, epsilon)) + rounds * release.unsure)
    return max(composition.delta([(loss, rounds)], epsilon) for loss in _own_losses(release, rounds))


def tuned_epsilon(release: Release, rounds: int, delta: float, mean_runs: float, shape: float) -> float:
    """Returns the ε of publishing only the best of a random number of runs (Papernot and Steinke, arXiv 2110.03620).

    The number of runs is drawn from a truncated negative binomial of this mean and shape (1: geometric, 0: logarithmic,
    inf: Poisson), and nothing else of them is shown. Rényi accounting; inf where that has no answer.
    """
    import dp_accounting as dp
    from dp_accounting.dp_event import RepeatAndSelectDpEvent
    from dp_accounting.rdp import RdpAccountant

    if release.unlike:  # as many runs on average, each with as many rounds
        plain = _alike(release)
        distance = mean_runs * rounds * release.unlike
        return smoothed(lambda left: tuned_epsilon(plain, rounds, left, mean_runs, shape), delta, distance)
    event = _event(release)
    if event is None:
        return math.inf
    best = RepeatAndSelectDpEvent(dp.SelfComposedDpEvent(event, rounds), mean_runs, shape)
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    with _without_warnings():
        return float(accountant.compose(best).get_epsilon(delta))


def epsilon_of_all(releases: Mapping[Release, int], delta: float) -> float:
    """Returns the ε of several kinds of releases together, so many of each, an upper bound.

    Gaussians that everyone takes part in are one Gaussian, mu² = Σ rounds mu²; several kinds that are left are composed
    on one grid. Where numbers would not do, it is the sum of what each costs at its share of δ.
    """
    distance = math.fsum(rounds * release.unlike for release, rounds in releases.items())
    if distance:
        plain = Counter[Release]()
        for release, rounds in releases.items():
            plain[_alike(release)] += rounds
        found = smoothed(lambda left: epsilon_of_all(plain, left), delta, distance)
        if math.isfinite(found) or any(release.unlike > NEXT_TO_NOTHING or _unsure(release) for release in releases):
            return found
        gaussians = Counter[Release]()
        for release, rounds in plain.items():
            gaussians[release if _is_gaussian(release) else _unamplified(release)] += rounds
        ((together, rounds),) = _with_one_gaussian(gaussians).items()  # as in `epsilon`
        return _renyi_epsilon(together, rounds, delta)
    kinds = _with_one_gaussian({release: rounds for release, rounds in releases.items() if rounds})
    if len(kinds) < 2:
        return math.fsum(epsilon(release, rounds, delta) for release, rounds in kinds.items())
    added = math.fsum(epsilon(release, rounds, delta / len(kinds)) for release, rounds in kinds.items())
    if any(_computable(release) is not release for release in kinds):
        return added
    return min(added, max(composition.epsilon(parts, delta) for parts in _composed_ways(kinds)))


def gaussian_log_delta(epsilon: Any, mu: Any) -> np.ndarray:
    """Returns the log of Φ(mu/2 − ε/mu) − e^ε Φ(−mu/2 − ε/mu), the δ of a Gaussian of shift/std = mu > 0.

    >>> float(np.exp(gaussian_log_delta(1.0, 0.5)).round(6))
    0.00683
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inside = log_ndtr(mu / 2 - epsilon / mu)
        outside = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        logs = inside + np.log1p(-np.exp(np.minimum(outside - inside, 0.0)))
    return np.where(np.isfinite(inside), logs, -np.inf)


def _unsure(release: Release) -> bool:
    return isinstance(release, Open) and release.unsure > 0


def _alike(release: Release) -> Release:
    return release._replace(unlike=0.0)


def _event(release: Release) -> Any:
    """Returns the release as dp-accounting knows it, for zero_out; None if it does not."""
    import dp_accounting as dp

    if isinstance(release, Hidden):
        gaussian = dp.GaussianDpEvent(1 / release.mu)
        return None if release.mirrored else dp.PoissonSampledDpEvent(release.p, gaussian)
    return dp.GaussianDpEvent(1 / release.mus[0]) if release.weights == (1.0,) and not release.unsure else None


def _unamplified(release: Release) -> Open:
    """Returns the same with the client in every round at the lowest noise: never more private."""
    if isinstance(release, Open):
        return Open((1.0,), (max(release.mus),), release.unsure)
    return Open((1.0,), (release.mu * (2 if release.mirrored else 1),))


def _seen(release: Release) -> Open:
    """Returns the same at the lowest noise, and seen whenever the client is there: never more private."""
    lowest = _unamplified(release)
    p = release.p if isinstance(release, Hidden) else min(1.0, math.fsum(release.weights))
    return Open((p,), lowest.mus, lowest.unsure)


def _computable(release: Release) -> Release:
    """Returns the same; an upper bound if the noise is so small or so large that numbers would not do."""
    seen = _seen(release)
    return release if 1e-6 < seen.mus[0] < 1000 else seen


def _closed_epsilon(release: Open, rounds: int, delta: float) -> float:
    """Returns the ε of a release with one mu, which has a closed form for δ."""
    left = delta - rounds * release.unsure
    if left <= 0:
        return math.inf
    seen = release if left > 1e-40 else _unamplified(release)  # LOG_IGNORED must stay far below
    mu = seen.mus[0] * math.sqrt(rounds * seen.weights[0])  # of a client that takes part as often as it should
    guess = mu * mu / 2 + mu * math.sqrt(2 * max(0.0, -math.log(left)))
    return _least(lambda e: _log_delta_open(seen, rounds, e) - math.log(left), guess)


def _log_delta_open(release: Open, rounds: int, epsilon: float) -> float:
    """Returns log δ of a release with one mu.

    The client takes part in n ~ Bin(rounds, weight) rounds, which together are one Gaussian of mu √n.
    """
    (weight,), (mu,) = release.weights, release.mus
    if weight == 1:
        return float(gaussian_log_delta(epsilon, mu * math.sqrt(rounds)))
    n, log_mass = _participations(rounds, weight)
    return float(logsumexp(np.append(log_mass + gaussian_log_delta(epsilon, mu * np.sqrt(n)), LOG_IGNORED)))


@lru_cache(maxsize=64)
def _participations(rounds: int, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns in how many rounds a client takes part, with log probabilities.

    What is left away weighs LOG_IGNORED at most.
    """
    tail = math.exp(LOG_IGNORED) / 2
    low, high = int(binom.ppf(tail, rounds, weight)), rounds - int(binom.ppf(tail, rounds, 1 - weight))
    n = np.arange(max(1, low), high + 1)
    return n, np.log(binom.pmf(n, rounds, weight)) + 1e-10  # more than it is off by, at 10⁹ rounds too


def _least(excess: Callable[[float], float], guess: float) -> float:
    """Finds the least ε at which a decreasing function is not positive, from above.

    It is what halving intervals finds. A faster search comes first and only tells which side of the zero most of their
    ends are on, so that the guess has no influence on the result.
    """
    below, above = -math.inf, math.inf  # the largest ε known to be too small, and the least known to be large enough

    def limited(e: float) -> float:
        nonlocal below, above
        found = min(max(excess(e), -MOST_EXCESS), MOST_EXCESS)
        below, above = (max(below, e), above) if found > 0 else (below, min(above, e))
        return found

    def holds(e: float) -> bool:
        return e >= above or (e > below and limited(e) <= 0)

    if holds(0.0):
        return 0.0
    start = min(max(guess, 1.0), MOST_GUESSED)
    while limited(start) > 0 and start < MOST_GUESSED:
        start *= 2
    while start > 1.0 and limited(start / 2) <= 0:
        start /= 2
    if 0 < below < above < math.inf:
        zero = brentq(limited, below, above, xtol=CLOSEST * below)
        limited(zero * (1 - CLOSEST))
        limited(zero * (1 + CLOSEST))
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
        if math.isinf(high):
            return high
    while high - low > CLOSEST * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _with_one_gaussian(kinds: Mapping[Release, int]) -> dict[Release, int]:
    """Returns the same releases with all Gaussians that everyone takes part in as a single one."""
    gaussians = {release: rounds for release, rounds in kinds.items() if _is_gaussian(release)}
    others = {release: rounds for release, rounds in kinds.items() if release not in gaussians}
    if len(gaussians) < 2:
        return dict(kinds)
    mu = math.sqrt(math.fsum(rounds * _unamplified(release).mus[0] ** 2 for release, rounds in gaussians.items()))
    return {Open((1.0,), (mu,)): 1, **others}


def _is_gaussian(release: Release) -> bool:
    return isinstance(release, Open) and release.weights == (1.0,) and not release.unsure


def _composed_ways(kinds: Mapping[Release, int]) -> Iterator[list[tuple[RoundLoss, int]]]:
    """Yields all kinds on one grid, for a client that is added to all of them, and for one that is taken away.

    What a grid adds to the variance counts against the variance of all rounds together: its width follows their mean.
    """
    rounds = sum(kinds.values())
    spreads, reaches = zip(*(_extent(release) for release in kinds), strict=True)
    mean = math.sqrt(math.fsum(k * s**2 for k, s in zip(kinds.values(), spreads, strict=True)) / rounds)
    losses = [_losses(release, _width(mean, max(reaches), rounds)) for release in kinds]
    for way in range(max(map(len, losses))):
        yield [(both[way % len(both)], k) for both, k in zip(losses, kinds.values(), strict=True)]


def _own_losses(release: Release, rounds: int) -> tuple[RoundLoss, ...]:
    return _losses(release, _width(*_extent(release), rounds))


@lru_cache(maxsize=16)
def _losses(release: Release, width: float) -> tuple[RoundLoss, ...]:
    """Returns one round's privacy loss on a grid of this width, for both directions where they differ."""
    if isinstance(release, Open):
        laws = [gaussian(weight, mu) for weight, mu in zip(release.weights, release.mus, strict=True)]
        absent = max(0.0, 1 - math.fsum(release.weights) - release.unsure)
        return (on_grid(width, laws, absent, release.unsure),)
    ways = (mirrored(release.p, release.mu),) if release.mirrored else subsampled(release.p, release.mu)
    return tuple(on_grid(width, [law]) for law in ways)


@lru_cache(maxsize=16)
def _extent(release: Release) -> tuple[float, float]:
    """Returns the standard deviation of one round's loss, and half of its range."""
    if isinstance(release, Hidden):
        return _hidden_spread(release)
    return _open_spread(release), max(release.mus) * (REACH + max(release.mus) / 2)


def _width(spread: float, reach: float, rounds: int) -> float:
    """Returns the width of the grid: a twentieth of the loss's standard deviation, 40,000 points at most.

    The connected dots add to the variance of each round's loss, always on the safe side and by a fraction of width²: a
    twentieth costs about 0.03 % of ε. Beyond 10⁸ rounds all of them must fit into a window.
    """
    fits = 20 * spread * math.sqrt(rounds) / composition.LARGEST
    return min(max(spread / 20, reach / 20_000, fits, 1e-30), LARGEST_WIDTH)


def _open_spread(release: Open) -> float:
    mus, weights = np.array(release.mus), np.array(release.weights)
    mean, square = (weights * mus**2 / 2).sum(), (weights * (mus**2 + mus**4 / 4)).sum()
    return math.sqrt(max(0.0, float(square - mean**2)))


def _hidden_spread(release: Hidden) -> tuple[float, float]:
    """Returns the standard deviation of the loss, and half of its range."""
    p, mu = release.p, release.mu
    z = np.linspace(-REACH, REACH, 2801)
    density = np.exp(-(z**2) / 2)
    density /= density.sum()
    out, within = _loss(release, z), _loss(release, z + mu)
    mean = density @ ((1 - p) * out + p * within)
    spread = density @ ((1 - p) * (out - mean) ** 2 + p * (within - mean) ** 2)
    return math.sqrt(spread), float(within[-1] - out[0]) / 2


def _loss(release: Hidden, z: np.ndarray) -> np.ndarray:
    """Returns the privacy loss at z, in units of the noise, where the client shifts the sum by mu."""
    p, mu = release.p, release.mu
    loss = np.logaddexp(math.log1p(-p), math.log(p) + mu * z - mu**2 / 2)
    if release.mirrored:
        loss -= np.logaddexp(math.log1p(-p), math.log(p) - mu * z - mu**2 / 2)
    return np.asarray(loss)


def _renyi_epsilon(release: Release, rounds: int, delta: float) -> float:
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant, compute_epsilon

    if isinstance(release, Hidden):
        event = _event(release)
        if event is None:
            return math.inf  # no Rényi bound is known to dp-accounting for replace-one under Poisson sampling
        accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
        with _without_warnings():
            return float(accountant.compose(event, rounds).get_epsilon(delta))
    orders = np.array(RENYI_ORDERS)
    absent = max(0.0, 1 - math.fsum(release.weights))
    exponents = orders[:, None] * (orders[:, None] - 1) * np.array([0.0, *release.mus]) ** 2 / 2
    curve = np.maximum(logsumexp(exponents, b=[absent, *release.weights], axis=1), 0.0) / (orders - 1)
    left = delta - rounds * release.unsure
    return float(compute_epsilon(orders, rounds * curve, left)[0]) if left > 0 else math.inf


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences dp-accounting, which logs each Rényi order that it leaves out; the bound holds without them."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
