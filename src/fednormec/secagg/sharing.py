"""Shamir's secret sharing of 32 bytes over the prime field just above 2^256.

Shamir, "How to share a secret", Communications of the ACM 22(11), 1979. The arithmetic does not run in constant time.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33  # bytes
DRAWN = 48  # bytes for each coefficient: modulo the prime they are uniform up to 2^-127
TRIES, ALL_TRIES = 400, 1000  # subsets for one secret, and wrong ones for all secrets of an attempt
Draw: TypeAlias = Callable[[int], bytes]


def split(secret: bytes, points: Sequence[int], needed: int, draw: Draw) -> list[int]:
    """Returns a share for each point; any `needed` of them recover the secret, fewer say nothing about it.

    Args:
        secret: 32 bytes.
        points: distinct numbers from 1 on, where the polynomial is evaluated.
        needed: number of shares that recover the secret.
        draw: returns so many random bytes.
    """
    drawn = draw(DRAWN * (needed - 1))
    higher = [int.from_bytes(drawn[at : at + DRAWN], "big") % PRIME for at in range(0, len(drawn), DRAWN)]
    coefficients = [*higher, int.from_bytes(secret, "big")]  # the highest power first
    return [_value(coefficients, point) for point in points]


def _value(coefficients: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in coefficients:
        value = (value * point + coefficient) % PRIME
    return value


def weights(points: Sequence[int], at: int = 0) -> list[int]:
    """Returns the factors of the values at these points whose sum is the value elsewhere (Lagrange)."""
    found = []
    for one in points:
        above = below = 1
        for other in points:
            if other != one:
                above = above * (at - other) % PRIME
                below = below * (one - other) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found


class Recovery:
    """Recovery of secrets from shares of which some may be wrong. It remembers the holders of wrong ones.

    Attributes:
        needed: number of shares that recover a secret.
        liars: points at which a share was found to be wrong, where fewer lies explain the shares of a secret than if
            others had lied (whoever dealt a share may have lied as well).
    """

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.liars = set[int]()
        self._left = ALL_TRIES
        self._trusted = frozenset[int]()  # a subset that was right is tried first
        self._weights = dict[tuple[int, ...], list[int]]()

    def secret(self, shares: Mapping[int, int], is_right: Callable[[bytes], bool]) -> bytes | None:
        """Returns the secret; None if no subset that was tried has it.

        One subset after another is tried, up to a bound: what is right can be seen of the secret.

        Args:
            shares: the share at each point.
            is_right: whether this is the secret.
        """
        points = sorted(shares, key=lambda point: (point in self.liars, point not in self._trusted, point))
        for tried, subset in enumerate(self._subsets(points)):
            factors = self._weights.get(subset) or weights(subset)
            if not tried:  # the others hardly come again
                self._weights[subset] = factors
            elif not self._left:
                return None
            found = sum(shares[point] * factor for point, factor in zip(subset, factors, strict=True)) % PRIME
            if found < 2 ** (8 * SECRET) and is_right(found.to_bytes(SECRET, "big")):
                if tried:
                    self._trusted = frozenset(subset)
                    self._learn(shares, subset)
                return found.to_bytes(SECRET, "big")
            self._left = max(self._left - 1, 0)
        return None

    def _subsets(self, points: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yields the first subset; then those that leave out one of it, and between them any others."""
        s = self.needed
        if len(points) < s:
            return
        yield tuple(points[:s])
        if len(points) == s:
            return
        drawn = random.Random(0)  # nothing secret hangs on it
        for turn in range(TRIES // 2):
            if turn < s:
                yield (*points[:turn], *points[turn + 1 : s + 1])
            yield tuple(drawn.sample(points, s))

    def _learn(self, shares: Mapping[int, int], right: Sequence[int]) -> None:
        """Notes whose shares do not lie on the polynomial through these.

        Another polynomial with the same secret meets it at `needed` - 2 points at most. So if this is not the right
        one, because lies cancelled, at least len(shares) - (needed - 2) - len(off) of those that lie on it are lies.
        """
        off = set[int]()
        for point in shares.keys() - set(right):
            factors = weights(right, point)
            value = sum(shares[one] * factor for one, factor in zip(right, factors, strict=True)) % PRIME
            if value != shares[point]:
                off.add(point)
        if 2 * len(off) < len(shares) - self.needed + 2:
            self.liars |= off
