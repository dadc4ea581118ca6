"""Optimisers of the server: what it makes of a round's direction. They see what was released alone: no ε is spent.

Each is a value with `init` and `update` and fits every method: `algorithm.with_optimizer(momentum(0.9))`. In the
formulas d is the method's direction, h its step, s its scale (1/p for a mean over the clients that were drawn), and
the plain step is x <- x - h s d.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fednormec.core.algorithm import ServerOptimizer, Step, descent
from fednormec.core.schedules import Schedule
from fednormec.core.vectors import plus, representable
from fednormec.errors import UserError, at_least_one


def sgd() -> ServerOptimizer:
    """The plain step: x <- x - h s d. It has no memory."""
    return descent()


def momentum(decay: float = 0.9, nesterov: bool = False) -> ServerOptimizer:
    """Momentum, the heavy ball (Polyak 1964): m <- a m + d, x <- x - h s m. In the long run a step is 1/(1-a) as long.

    With `nesterov` x <- x - h s (d + a m). With a = 0 it is the plain step, to the bit.

    Args:
        decay: a, in [0, 1).
        nesterov: whether to take the step of the round after already (Nesterov 1983).
    """
    a = _share("decay", decay)

    def update(x: Tensor, memory: Tensor, step: Step, number: int) -> tuple[Tensor, Tensor]:
        m = plus(step.direction, memory, a)
        way = plus(step.direction, m, a) if nesterov else m
        return plus(x, way, -step.size * step.scale), m

    return ServerOptimizer("nesterov" if nesterov else "momentum", torch.zeros_like, update)


def adam(beta1: float = 0.9, beta2: float = 0.99, floor: float = 0.01) -> ServerOptimizer:
    """Adam (Kingma, Ba 2015), with the noise taken out of the second moment (DP-AdamBC, arXiv 2312.14334).

    m <- b1 m + (1-b1) d;  u <- b2 u + (1-b2)(d^2 - noise);  x <- x - h m' / sqrt(max(u', f mean(|u'|))).
    m' and u' are m and u over 1 - b^t. `noise` is the exact variance of the privacy noise in d, so that u' estimates
    the square of the signal alone. s has no part: the step does not depend on the length of d, and h is about how far
    each coordinate moves. The floor relative to the mean is ours; papers have a number that must be tuned to the
    length of d.

    Args:
        beta1: b1, in [0, 1).
        beta2: b2, in [0, 1).
        floor: f, the least second moment that is divided by, as a share of the mean over all coordinates, in (0, 1].
    """
    return _adaptive("adam", beta1, beta2, floor, lambda u, g, b2: plus(u * b2, g, 1 - b2), corrects=True)


def yogi(beta1: float = 0.9, beta2: float = 0.99, floor: float = 0.01) -> ServerOptimizer:
    """Yogi (Zaheer et al. 2018; FedYogi, arXiv 2003.00295): Adam whose second moment falls more slowly.

    u <- u - (1-b2) sign(u - g) |g| with g = d^2 - noise, the rest as in Adam; u begins at |g| of the first round and is
    not corrected for its start. The papers have g = d^2; the noise taken out is ours, after DP-AdamBC.

    Args:
        beta1: b1, in [0, 1).
        beta2: b2, in [0, 1).
        floor: f, the least second moment that is divided by, as a share of the mean over all coordinates, in (0, 1].
    """

    def moved(u: Tensor, g: Tensor, b2: float) -> Tensor:
        return plus(u, torch.sign(u - g) * g.abs(), b2 - 1)

    return _adaptive("yogi", beta1, beta2, floor, moved, corrects=False)


def low_pass(decay: float = 0.9) -> ServerOptimizer:
    """First-order low-pass filter (DOPPLER, arXiv 2408.13460): noise is white, and the gradients' path is not.

    m <- a m + ((1-a)/2)(d + d'), d' the direction before (0 at first), c the same of d = 1;  x <- x - h s m/c.
    The coefficients are from memory of the paper (a = .9).

    Args:
        decay: a, in [0, 1).
    """
    a = _share("decay", decay)

    def update(x: Tensor, memory: Tensor, step: Step, number: int) -> tuple[Tensor, Tensor]:
        m, before, (c, one) = _parts(memory, len(x), 2)
        half = (1 - a) / 2
        m = plus(m * a, step.direction + before, half)
        c = a * c + half * (1 + one)
        way = m / c
        return plus(x, way, -step.size * step.scale), torch.cat([m, step.direction, x.new_tensor([c, 1.0])])

    return ServerOptimizer("low_pass", lambda x0: x0.new_zeros(2 * len(x0) + 2), update)


def disk(kappa: float = 0.7) -> ServerOptimizer:
    """DiSK (arXiv 2410.03883), a simplified Kalman filter, with one gradient: clients compute at a point further on.

    G <- (1-k) G + k d;  x <- x - h s G;  clients compute at x + ((1-k)/k)(x - x'), x' the model before. G begins at the
    first d. The point is public, so clients do no more work than without. With k = 1 it is the plain step, to the bit.

    Args:
        kappa: k, share of the new direction, in (0, 1].
    """
    k = kappa
    if not 0 < k <= 1:
        raise UserError(f"kappa must lie in (0, 1], not {k}.")

    def init(x0: Tensor) -> Tensor:
        return torch.cat([x0, torch.zeros_like(x0), x0.new_zeros(1)])

    def update(point: Tensor, memory: Tensor, step: Step, number: int) -> tuple[Tensor, Tensor]:
        x, g, (begun,) = _parts(memory, len(point), 1)
        g = plus(step.direction * k, g, 1 - k) if begun else step.direction
        new = plus(x, g, -step.size * step.scale)
        return plus(new, new - x, (1 - k) / k), torch.cat([new, g, x.new_ones(1)])

    def model(point: Tensor, memory: Tensor) -> Tensor:
        return memory[: len(point)]

    return ServerOptimizer("disk", init, update, model)


def scheduled(optimizer: ServerOptimizer, schedule: Schedule) -> ServerOptimizer:
    """Returns the optimiser with the server's steps on a schedule: h times a factor that the round decides.

    Args:
        optimizer: the optimiser.
        schedule: factor by the round, such as schedule("cooldown", rounds=100).
    """

    def update(x: Tensor, memory: Tensor, step: Step, number: int) -> tuple[Tensor, Tensor]:
        return optimizer.update(x, memory, step._replace(size=step.size * schedule.factor(number)), number)

    return optimizer._replace(name=f"{optimizer.name}, {schedule.name}", update=update)


def ema(optimizer: ServerOptimizer, decay: float = 0.95) -> ServerOptimizer:
    """Returns the optimiser with an exponential average of its models beside them.

    a <- a + w (x - a) with w = (1 - c)/(1 - c^t), c the decay and t the number of steps: the starting point is not in
    it, and the weights of the models add up to 1.

    Args:
        optimizer: the optimiser.
        decay: c, in [0, 1).
    """
    c = _share("decay", decay)
    return _averaged(optimizer, f"EMA {c:g}", lambda t, k: 1.0 if t == 1 else (1 - c) / (1 - c**t))


def tail(optimizer: ServerOptimizer, after: int) -> ServerOptimizer:
    """Returns the optimiser with the plain average of its models after some round; until then that is the model itself.

    Args:
        optimizer: the optimiser.
        after: number of first rounds that are not averaged.
    """
    at_least_one("after", after + 1)
    return _averaged(optimizer, f"average after round {after}", lambda t, k: 1 / max(1, k - after))


class Optimizer(NamedTuple):
    """Row of the table of optimisers.

    Attributes:
        build: constructor of the optimiser.
        paper: what to cite.
        memory: number of vectors (d,) that the server keeps for it.
    """

    build: Callable[..., ServerOptimizer]
    paper: str
    memory: int


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(sgd, "the method as it is", 0),
    "momentum": Optimizer(momentum, "Polyak 1964, Nesterov 1983", 1),
    "adam": Optimizer(adam, "arXiv 2003.00295, 2312.14334", 2),
    "yogi": Optimizer(yogi, "arXiv 2003.00295", 2),
    "low_pass": Optimizer(low_pass, "arXiv 2408.13460", 2),
    "disk": Optimizer(disk, "arXiv 2410.03883", 2),
}


def _adaptive(
    name: str,
    beta1: float,
    beta2: float,
    floor: float,
    moved: Callable[[Tensor, Tensor, float], Tensor],
    corrects: bool,
) -> ServerOptimizer:
    """Returns an optimiser with a second moment that `moved` moves; whether it `corrects` for a start at 0."""
    b1, b2 = _share("beta1", beta1), _share("beta2", beta2)
    if not 0 < floor <= 1:
        raise UserError(f"floor must lie in (0, 1], not {floor}.")

    def update(x: Tensor, memory: Tensor, step: Step, number: int) -> tuple[Tensor, Tensor]:
        m, u, (done,) = _parts(memory, len(x), 1)
        t = done + 1
        m = plus(m * b1, step.direction, 1 - b1)
        g = step.direction.square() - step.noise
        u = g.abs() if done == 0 and not corrects else moved(u, g, b2)
        estimate = u / (1 - b2**t) if corrects else u
        least = representable(max(floor * float(estimate.abs().mean()), torch.finfo(x.dtype).tiny), x.dtype)
        way = m / (1 - b1**t) / estimate.clamp(min=least).sqrt()
        return plus(x, way, -step.size), torch.cat([m, u, x.new_tensor([t])])

    return ServerOptimizer(name, lambda x0: x0.new_zeros(2 * len(x0) + 1), update)


def _averaged(optimizer: ServerOptimizer, name: str, weight: Callable[[int, int], float]) -> ServerOptimizer:
    """Returns the optimiser with an average: a <- a + weight(t, k)(x - a) after the t-th step, in round k."""

    def init(x0: Tensor) -> Tensor:
        return torch.cat([optimizer.init(x0), x0, x0.new_zeros(1)])

    def own(memory: Tensor, dim: int) -> Tensor:
        return memory[: -dim - 1]

    def update(x: Tensor, memory: Tensor, step: Step, number: int) -> tuple[Tensor, Tensor]:
        dim = len(x)
        x, inner = optimizer.update(x, own(memory, dim), step, number)
        a, t = memory[-dim - 1 : -1], int(memory[-1]) + 1
        model, w = optimizer.model(x, inner), weight(t, number)
        a = model if w == 1 else plus(a, model - a, w)
        return x, torch.cat([inner, a, x.new_tensor([float(t)])])

    def model(x: Tensor, memory: Tensor) -> Tensor:
        return optimizer.model(x, own(memory, len(x)))

    def average(x: Tensor, memory: Tensor) -> Tensor:
        return memory[-len(x) - 1 : -1]

    return ServerOptimizer(f"{optimizer.name}, {name}", init, update, model, average)


def _parts(memory: Tensor, dim: int, numbers: int) -> tuple[Tensor, Tensor, list[float]]:
    """Returns the two vectors of a memory, and the numbers after them."""
    return memory[:dim], memory[dim : 2 * dim], memory[-numbers:].tolist()


def _share(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise UserError(f"{name} must lie in [0, 1), not {value}.")
    return value
