"""The ε of composed rounds to ten digits and more, in mpmath: an oracle that shares nothing with the accountant.

No grid of losses and no discretised distribution. With M(s) the mean of e^{s·loss} of one round, k rounds have

    δ(ε) = 1/(2πi) ∫ M(s)^k e^{−sε} / (s (s+1)) ds   from c − i∞ to c + i∞, for any c > 0,

the inverse Laplace transform of (1 − e^{−x})₊. The path may bend to the right, where e^{−sε} falls off, since M has no
poles. A Gaussian that is seen or not has M in closed form. Of a subsampled Gaussian it is an integral over the noise z.
Both integrals are taken by the trapezoidal rule: the integrands are analytic, so that it converges faster than any
power of its step, and the step is halved until nothing changes.
"""

from typing import NamedTuple

import mpmath
from mpmath import mpc, mpf

mpmath.mp.dps = 60
BEND = mpf("0.5")


def root(rising, low, high, close=1e-40):
    while high - low > close:
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return high


class Sampled(NamedTuple):
    """(1−p) N(0) + p N(mu) against N(0) ("remove"), the other way round ("add"), or against (1−p) N(0) + p N(−mu)."""

    p: float
    mu: float
    way: str

    def moment(self, right, top):
        """M(s) for 0 < Re s ≤ right and |Im s| ≤ top, from nodes in z that suffice for that."""
        width = 2 * mpmath.pi / (max(12, 20 * self.mu) + 2 * top * self.mu)
        low, high = -12 - right * self.mu * (self.way == "add"), 12 + self.mu * (1 + 2 * right)
        nodes = [low + width * i for i in range(int((high - low) / width) + 1)]
        terms = [(width * self._density(z), self._loss(z)) for z in nodes]
        return lambda s: mpmath.fsum(mass * mpmath.exp(s * loss) for mass, loss in terms)

    def once(self, epsilon):
        """δ(ε) of one round: P − e^ε Q of the z beyond z₀, whose loss is ε."""
        side = 1 if self.way != "add" else -1
        start = side * root(lambda z: self._loss(side * z) - epsilon, mpf(-80), mpf(80))

        def beyond(shift):
            return mpmath.ncdf(side * (shift - start))

        mixed, other = ((1 - mpf(self.p)) * beyond(0) + self.p * beyond(shift) for shift in (self.mu, -mpf(self.mu)))
        over, under = {"remove": (mixed, beyond(0)), "add": (beyond(0), mixed), "replace": (mixed, other)}[self.way]
        return over - mpmath.exp(epsilon) * under

    def steepest(self):
        return self.mu

    def _density(self, z):
        absent = mpmath.npdf(z)
        return absent if self.way == "add" else (1 - mpf(self.p)) * absent + self.p * mpmath.npdf(z - self.mu)

    def _loss(self, z):
        if self.way == "replace":
            return self._ratio(z) - self._ratio(-z)
        return self._ratio(z) if self.way == "remove" else -self._ratio(z)

    def _ratio(self, z):
        return mpmath.log(1 - mpf(self.p) + self.p * mpmath.exp(self.mu * z - mpf(self.mu) ** 2 / 2))


class Seen(NamedTuple):
    """With probability weights[j] a Gaussian of shift/std = mus[j], else nothing."""

    weights: tuple[float, ...]
    mus: tuple[float, ...]

    def moment(self, right, top):
        parts = [(mpf(w), mpf(mu) ** 2 / 2) for w, mu in zip(self.weights, self.mus, strict=True)]
        never = 1 - mpmath.fsum(w for w, _ in parts)
        return lambda s: never + mpmath.fsum(w * mpmath.exp(s * (s + 1) * half) for w, half in parts)

    def steepest(self):
        return max(self.mus)


def kind(trust, adjacency, p, std, clients=None):
    """One round of a trust model: what docs/privacy.md says of it, with every size of the cohort."""
    shift = 2 if adjacency == "replace_one" else 1
    if trust == "central" and p < 1:
        return Sampled(p, 1 / std, "replace" if shift == 2 else "remove")
    if trust != "secagg":
        return Seen((p,), (shift / std,))
    others = range(clients)
    chances = [p * mpmath.binomial(clients - 1, s) * mpf(p) ** s * (1 - mpf(p)) ** (clients - 1 - s) for s in others]
    sizes = [(w, shift / (std * mpmath.sqrt(s + 1))) for s, w in enumerate(chances) if w > mpf(10) ** -60]
    return Seen(*zip(*sizes, strict=True))


def exact_epsilon(kinds, delta):
    """The ε at which {kind: rounds} have this δ, which must be less than what they have at ε = 0."""
    if list(kinds.values()) == [1]:
        (kind,) = kinds
        return float(root(lambda e: delta - kind.once(e), mpf(0), mpf(100), 1e-15))
    path = Path(kinds, mpf(delta))
    found = path.epsilon()
    for _ in range(8):
        path.halve()
        before, found = found, path.epsilon()
        if abs(found - before) < mpf(10) ** -11 * found:
            return float(found)
    raise AssertionError(f"no convergence for {kinds} at {delta}")


class Path:
    """The values of M^k/(s (s+1)) ds along c + BEND (√(t² + c²) − c) + it, at equal steps of t ≥ 0."""

    def __init__(self, kinds, delta):
        self.kinds, self.delta_sought = kinds, delta
        self.c, self.bound = self._saddle()
        self.bend, self.top = BEND, 40 / (BEND * self.bound)
        bounded = any(getattr(kind, "way", "") == "add" for kind in kinds)  # then M^k grows to the right
        if bounded or self.bend * self.top * max(kind.steepest() for kind in kinds) > 10:  # or takes too many digits
            self.bend, self.top = mpf(0), 14 / self._spread(self.c / 50)
        self.step = min(self.top / 16, 2 * mpmath.pi / (24 * self._spread(self.c) + 50 / self.c))
        self._fill()

    def _log_moment(self, c):
        return mpmath.fsum(k * mpmath.log(kind.moment(c, 0)(c)) for kind, k in self.kinds.items())

    def _saddle(self):
        """c ≈ argmin (log M(c)^k + log 1/δ)/c, by steps of a fifth, and that bound on ε; every c is right."""

        def bound(c):
            return (self._log_moment(c) - mpmath.log(self.delta_sought)) / c

        c, here = mpf(1), bound(mpf(1))
        for factor in (mpf("1.2"), 1 / mpf("1.2")):
            while (there := bound(c * factor)) < here:
                c, here = c * factor, there
        return c, here

    def _spread(self, c):
        """The standard deviation of the loss that is tilted by c."""
        near = c / 1000
        return mpmath.sqrt(self._log_moment(c + near) - 2 * self._log_moment(c) + self._log_moment(c - near)) / near

    def halve(self):
        self.step /= 2
        self._fill()

    def _fill(self):
        right = self.c + self.bend * self.top
        moments = [(kind.moment(right, self.top), k) for kind, k in self.kinds.items()]
        self.terms = []
        for m in range(int(self.top / self.step) + 1):
            t = m * self.step
            root = mpmath.sqrt(t**2 + self.c**2)
            s, turn = mpc(self.c + self.bend * (root - self.c), t), mpc(1, -self.bend * t / root)
            value = mpmath.fprod(moment(s) ** k for moment, k in moments) * turn / (s * (s + 1))
            self.terms.append((s, value / 2 if m == 0 else value))
        first, last = (abs(value * mpmath.exp(-s * self.bound)) for s, value in (self.terms[0], self.terms[-1]))
        if last > mpf(10) ** -16 * first:  # it has not fallen off yet
            self.top *= mpf("1.5")
            self._fill()

    def delta(self, epsilon):
        return self.step / mpmath.pi * mpmath.fsum(mpmath.re(v * mpmath.exp(-s * epsilon)) for s, v in self.terms)

    def epsilon(self):
        """By Newton's method on log δ, whose slope is about −c."""
        epsilon, target = self.bound, mpmath.log(self.delta_sought)
        for _ in range(60):
            off = mpmath.log(abs(self.delta(epsilon))) - target
            epsilon += off / self.c
            if abs(off) < mpf(10) ** -15 * self.c * epsilon:
                break
        return epsilon
