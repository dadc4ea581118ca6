"""Shamir's sharing: right, silent below the threshold, and robust against wrong shares."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summed import PRIME, Drawn, stream, value_at

from fednormec.secagg import sharing
from fednormec.secagg.sharing import DRAWN, Recovery, split, weights


def probably_prime(n: int) -> bool:
    """Miller and Rabin's test, to forty bases."""
    d, r = n - 1, 0
    while d % 2 == 0:
        d, r = d // 2, r + 1
    drawn = random.Random(1)
    for _ in range(40):
        x = pow(drawn.randrange(2, n - 1), d, n)
        if x not in (1, n - 1) and all((x := x * x % n) != n - 1 for _ in range(r - 1)):
            return False
    return True


def test_the_field_has_a_prime_number_of_elements_and_room_for_every_secret() -> None:
    assert sharing.PRIME == PRIME and PRIME > 2**256 and probably_prime(PRIME)
    assert not probably_prime(PRIME - 2) and not probably_prime(561 * PRIME)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 4), st.randoms())
@settings(max_examples=60)
def test_any_shares_that_are_enough_recover_the_secret(
    secret: bytes, needed: int, more: int, drawn: random.Random
) -> None:
    points = drawn.sample(range(1, 50), needed + more)
    shares = dict(zip(points, split(secret, points, needed, stream(secret)), strict=True))
    some = drawn.sample(points, needed)
    factors = weights(some)
    assert sum(shares[x] * f for x, f in zip(some, factors, strict=True)) % PRIME == int.from_bytes(secret, "big")
    given_ = {x: shares[x] for x in some}
    assert Recovery(needed).secret(given_, lambda found: found == secret) == secret
    if needed > 1:
        del given_[some[0]]
        assert Recovery(needed).secret(given_, lambda found: True) is None


def test_shares_are_values_of_the_polynomial_that_was_drawn() -> None:
    secret, points = bytes(range(32)), [1, 2, 7, 5000]
    drawn = Drawn(stream("shares"))
    draw = stream("shares")
    assert draw(32) + draw(32) + draw(32)
    polynomial = drawn.polynomial(secret, 4)
    assert split(secret, points, 4, draw) == [value_at(polynomial, x) for x in points]


@pytest.mark.parametrize("needed", [2, 3])
def test_fewer_shares_say_nothing(needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, in the field of seven: over all polynomials, what fewer see is the same for every secret."""
    monkeypatch.setattr(sharing, "PRIME", 7)
    points = [1, 2, 3, 4]
    for seen in itertools.combinations(range(4), needed - 1):
        views = []
        for secret in range(7):
            found = Counter[tuple[int, ...]]()
            for coefficients in itertools.product(range(7), repeat=needed - 1):
                drawn = b"".join(one.to_bytes(DRAWN, "big") for one in coefficients)
                shares = split(bytes([secret]), points, needed, lambda _, drawn=drawn: drawn)
                found[tuple(shares[i] for i in seen)] += 1
            views.append(found)
        assert all(view == views[0] for view in views) and len(views[0]) == 7 ** (needed - 1)
    enough = {
        tuple(split(b"\1", points, 2, lambda _: bytes(DRAWN))[:2]),
        tuple(split(b"\2", points, 2, lambda _: bytes(DRAWN))[:2]),
    }
    assert len(enough) == 2, "as many as needed do tell them apart"


@pytest.mark.parametrize(
    ("holders", "needed", "wrong"), [(10, 7, 3), (30, 21, 2), (30, 21, 9), (30, 29, 1), (60, 41, 3)]
)
def test_wrong_shares_are_found(holders: int, needed: int, wrong: int) -> None:
    secret, points = b"s" * 32, list(range(1, holders + 1))
    shares = dict(zip(points, split(secret, points, needed, stream(holders)), strict=True))
    liars = random.Random(holders).sample(points[: needed + 1], wrong) if wrong < 9 else points[-wrong:]
    for liar in liars:
        shares[liar] += 1
    recovery = Recovery(needed)
    assert recovery.secret(shares, lambda found: found == secret) == secret
    assert recovery.liars <= set(liars)
    if set(liars) & set(points[:needed]) and 2 * wrong < holders - needed + 2:
        assert recovery.liars == set(liars)
        tried = list[bytes]()
        assert recovery.secret(shares, lambda found: bool(tried.append(found)) or found == secret) == secret
        assert len(tried) == 1, "those who lied once are asked last"


def test_the_number_of_tries_is_bounded() -> None:
    tried = list[bytes]()
    shares = dict.fromkeys(range(1, 21), 1) | {1: 5}
    assert Recovery(10).secret(shares, lambda found: bool(tried.append(found))) is None
    assert len(tried) <= sharing.TRIES + 1
    recovery, tried = Recovery(10), []
    for _ in range(20):
        assert recovery.secret(shares, lambda found: bool(tried.append(found))) is None
    assert len(tried) <= sharing.ALL_TRIES + 20


def test_lies_that_cancel_frame_nobody() -> None:
    """The factors of the points 1 to 4 are 4, -6, 4, -1: lies of 3 at 1 and 2 at 2 leave the secret right."""
    secret, points = b"s" * 32, [1, 2, 3, 4, 5]
    shares = dict(zip(points, split(secret, points, 4, stream(5)), strict=True))
    assert [(w + 100) % PRIME - 100 for w in weights(points[:4])] == [4, -6, 4, -1]
    shares |= {1: shares[1] + 3, 2: shares[2] + 2, 5: shares[5] + 9}
    recovery = Recovery(4)
    assert recovery.secret(shares, lambda found: found == secret) == secret
    assert not recovery.liars
