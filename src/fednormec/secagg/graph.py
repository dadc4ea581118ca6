"""Who shares masks with whom: everyone with everyone in small cohorts, neighbours on a ring in large ones.

The ring's order is drawn from all keys of an attempt. Who chooses keys last can still try orders, so that secrecy rests
on nothing drawn: more shares than colluders recover a secret, and every member checks that the ring holds together
(`holds_together`). An order that was tried out can only end an attempt.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import comb, inf, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednormec.errors import UserError
from fednormec.secagg.ciphers import digest, number

ALL_PAIRS = 200  # members up to whom everyone is everyone's neighbour
LOG2_FAILURE = -40.0


class Neighbourhood(NamedTuple):
    """Numbers by which members watch over each other's secrets.

    Attributes:
        neighbours: number of neighbours of each member, k in the papers.
        shares_needed: number of shares that recover a secret, of those that a member and its neighbours hold.
        log2_failure: logarithm of a bound of the probability that a sum cannot be made though enough members are
            there; minus infinity where everyone is everyone's neighbour.
    """

    neighbours: int
    shares_needed: int
    log2_failure: float


def signatures_needed(n: int, floor: int, colluders: int) -> int:
    """Returns t: more than two thirds, no fewer than the floor, and so many that 2 t > n + colluders.

    It is never more than n, as colluders < floor <= n.
    """
    return max(2 * n // 3 + 1, floor, (n + colluders) // 2 + 1)


@lru_cache(maxsize=256)
def neighbourhood(n: int, floor: int, colluders: int, neighbours: int = 0) -> Neighbourhood:
    """Returns the number of neighbours and of shares that recover a secret.

    With t signatures needed and everyone everyone's neighbour, t shares recover a secret. On a ring of k neighbours
    s = max(colluders, floor(k/3)) + 1 do, and k is the smallest even number for which an attempt fails with probability
    2^-40 at most, if t members, chosen whatever the ring, survive to its end. Proof of the bound: a member and its
    neighbours are k + 1 fixed places of a random order, so that the survivors among them are hypergeometric,
    H(n, t, k + 1), and fewer than s of them for some member with probability n P[H(n, t, k + 1) < s] at most. The ring
    can be cut only if in some two disjoint windows of k/2 places there are `colluders` survivors or fewer: these are k
    places, there are fewer than n^2/2 such pairs, hence C(n, 2) P[H(n, t, k) <= colluders]. The bound is the sum of
    both. More survivors, or fewer members that ever came, make both smaller.

    Args:
        n: number of members of the cohort, 200 or fewer for all pairs.
        floor: least number of members in the sum.
        colluders: number of members who may work with the server.
        neighbours: the number of neighbours, if it is not to be found; n - 1 or more is all pairs.
    """
    t = signatures_needed(n, floor, colluders)
    everyone = Neighbourhood(n - 1, t, -inf)
    if neighbours:
        return everyone if neighbours >= n - 1 else _given(n, t, colluders, neighbours)
    if n > ALL_PAIRS:
        for k in range(2 * ((colluders + 1) // 2) or 2, n - 1, 2):
            found = _ring(n, t, colluders, k)
            if found.log2_failure <= LOG2_FAILURE:
                return found
    return everyone


def _given(n: int, t: int, colluders: int, k: int) -> Neighbourhood:
    if k < 2 or k % 2 or k < colluders:
        raise UserError(f"neighbours must be even, at least 2 and no fewer than the {colluders} colluders, not {k}.")
    return _ring(n, t, colluders, k)


def _ring(n: int, t: int, colluders: int, k: int) -> Neighbourhood:
    s = max(colluders, k // 3) + 1
    lonely = log(n) + _log_tail(n, t, k + 1, s - 1)
    cut = log(comb(n, 2)) + _log_tail(n, t, k, colluders)
    return Neighbourhood(k, s, round(min(float(np.logaddexp(lonely, cut)) / log(2), 0.0), 6))


def _log_tail(n: int, t: int, places: int, most: int) -> float:
    """Returns log P[H <= most] for the number H of survivors among some places, if t of n survive."""
    here = np.arange(max(0, places - (n - t)), min(most, places, t) + 1)
    if not here.size:
        return -inf
    terms = _log_comb(t, here) + _log_comb(n - t, places - here)
    return min(float(np.logaddexp.reduce(terms) - _log_comb(n, np.array(places))), 0.0)


def _log_comb(n: int, k: NDArray[np.int64]) -> NDArray[np.float64]:
    logs = _log_factorials(n)
    return np.asarray(logs[n] - logs[k] - logs[n - k])


@lru_cache(maxsize=4)
def _log_factorials(n: int) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])


def ring_order(transcript: bytes, members: Collection[int]) -> tuple[int, ...]:
    """Returns the members in the order of their places on the ring, drawn from all keys of this attempt."""
    return tuple(sorted(members, key=lambda one: digest("ring", transcript, number(one))))


def neighbours_of(me: int, ring: Sequence[int], k: int) -> tuple[int, ...]:
    """Returns the members within k/2 places of one on the ring, ascending; all others if there are no more than k."""
    if len(ring) <= k + 1:
        return tuple(sorted(one for one in ring if one != me))
    place = ring.index(me)
    return tuple(sorted(ring[(place + step) % len(ring)] for step in range(-(k // 2), k // 2 + 1) if step))


def holds_together(ring: Sequence[int], k: int, members: Collection[int], colluders: int) -> bool:
    """Returns whether the honest among these members stay connected, whichever `colluders` of them are not honest.

    Two members next to each other among those that remain are neighbours unless k/2 consecutive places between them
    were removed. So what remains is connected unless there are two such windows with somebody left in both arcs
    between them; to remove a window the server needs a colluder in each of its places that is held by a member.
    """
    places, window = len(ring), k // 2
    if places <= k + 1:
        return True
    chosen = set(members)
    there = np.array([one in chosen for one in ring])
    if not there.any():
        return True
    counts = np.concatenate([[0], np.cumsum(np.tile(there, 3))])
    costs = counts[window : 2 * places + window] - counts[: 2 * places]  # of the window that begins at each place
    at = np.flatnonzero(np.tile(there, 3))
    for begin in np.flatnonzero(costs[:places] <= colluders):
        after = at[np.searchsorted(at, begin + window)] + 1  # the other window leaves one member on this side
        before = at[np.searchsorted(at, begin + places) - 1] - window  # and one on that
        if after <= before and costs[begin] + costs[after : before + 1].min() <= colluders:
            return False
    return True
