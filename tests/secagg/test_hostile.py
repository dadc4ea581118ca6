"""Members that send anything, and bytes that nobody sends: found, left out, and never an error of another kind."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summed import STAGES, Attempt, plain_sum, private_key, terms_of

from fednormec.secagg.aggregator import Aggregator, TooFew
from fednormec.secagg.ciphers import signature
from fednormec.secagg.layout import Keys, Refuses, pieces, read_keys
from fednormec.secagg.masks import keys_parts

A, B, C, D = 3, 10, 17, 24
PRIME_BYTES = (2**256 + 297).to_bytes(33, "big")


def one_changes(stage: str, change: Callable[[bytes], bytes], who: tuple[int, ...] = (B,)) -> Callable[..., object]:
    def tamper(at: str, sent: dict[int, bytes]) -> dict[int, bytes]:
        return {one: change(said) if at == stage and one in who else said for one, said in sent.items()}

    return tamper


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "change",
    [lambda said: b"", lambda said: said[:-1], lambda said: said + b"\0", lambda said: bytes(len(said) + 7)],
    ids=["nothing", "short", "long", "another length"],
)
def test_a_member_that_sends_no_message_is_left_out(stage: str, change: Callable[[bytes], bytes]) -> None:
    attempt = Attempt(terms_of(5))
    attempt.tamper = one_changes(stage, change)
    members = attempt.check().members
    assert (B in members) == (stage in ("agree", "unmask")) and len(members) >= 4
    assert list(attempt.server.refused) == [B]
    assert (
        attempt.server.refused[B].startswith(f"{stage}: ")
        and "bytes, not" in attempt.server.refused[B]
        or (stage == "agree" and "did not sign" in attempt.server.refused[B])
    )


@pytest.mark.parametrize(
    ("stage", "why"),
    [("keys", "not signed by it"), ("masked", "not signed for the set"), ("agree", "did not sign the set")],
)
def test_a_bad_signature_is_left_out(stage: str, why: str) -> None:
    for at in (-1, -33, -64):
        attempt = Attempt(terms_of(5))

        def spoil(said: bytes, at: int = at) -> bytes:
            return said[: at % len(said)] + bytes([said[at] ^ 1]) + said[at % len(said) + 1 :]

        attempt.tamper = one_changes(stage, spoil)
        attempt.check()
        assert why in attempt.server.refused[B] and len(attempt.server.refused) == 1


def test_keys_of_low_order_are_left_out() -> None:
    terms = terms_of(5)

    def low(said: bytes) -> bytes:
        keys = read_keys(said)
        low = Keys(keys.box, bytes(32), keys.commitment, b"")
        return b"".join(low)[:96] + signature(private_key(B), "keys", *keys_parts(terms.context, B, low))

    attempt = Attempt(terms)
    attempt.tamper = one_changes("keys", low)
    assert B not in attempt.check().members
    assert "low order" in attempt.server.refused[B]


def lie(said: bytes, at: int = 0) -> bytes:
    """Another share of the member in this place."""
    start = 33 * at
    return said[:start] + bytes(32) + b"\x05" + said[start + 33 :]


@pytest.mark.parametrize("liars", [(3,), (31,), (3, 45), (10, 66)])
def test_lying_shares_are_found(liars: tuple[int, ...]) -> None:
    """Of the seeds of all: ten hold shares, seven are needed."""
    attempt = Attempt(terms_of(10))
    attempt.tamper = one_changes("unmask", lambda said: b"".join(map(lie, pieces(said, 33))), liars)
    attempt.check()
    assert set(attempt.server.refused) == set(liars)


def test_who_lied_is_not_said_where_others_may_have() -> None:
    """Three of ten, where seven are needed: the sum is right all the same."""
    attempt = Attempt(terms_of(10))
    attempt.tamper = one_changes("unmask", lambda said: b"".join(map(lie, pieces(said, 33))), (A, C, 66))
    attempt.check()
    assert not attempt.server.refused


def test_a_lying_share_of_one_that_dropped_out_is_found() -> None:
    attempt = Attempt(terms_of(7), {A: 2})
    attempt.tamper = one_changes("unmask", lie, (C,))
    attempt.check()
    assert list(attempt.server.refused) == [C]


def test_with_too_many_lies_there_is_no_sum() -> None:
    attempt = Attempt(terms_of(7))
    attempt.tamper = one_changes("unmask", lie, (A, B, C))
    with pytest.raises(TooFew, match=f"shares of member {A} do not fit together"):
        attempt.total()


def test_a_share_that_is_no_number_of_the_field() -> None:
    attempt = Attempt(terms_of(5))
    attempt.tamper = one_changes("unmask", lambda said: PRIME_BYTES + said[33:])
    attempt.check()
    assert "the field" in attempt.server.refused[B]


def test_members_that_were_not_asked_are_passed_over() -> None:
    attempt = Attempt(terms_of(5), {B: 2})
    late = dict[int, bytes]()

    def tamper(stage: str, sent: dict[int, bytes]) -> dict[int, bytes]:
        late.update(dict.fromkeys((B, 999), b"?") if stage == "unmask" else {999: b"?"})
        return sent | late

    attempt.tamper = tamper
    assert attempt.check().members == (A, C, D, 31)
    assert 999 not in attempt.server.refused


def test_a_ring_that_is_too_thin_ends_before_anybody_unmasks() -> None:
    attempt = Attempt(terms_of(9, colluders=1, neighbours=2))
    attempt.goes_to("masked")
    attempt.leaves = {attempt.server._attempt.ring[3]: 2}
    with pytest.raises(TooFew, match="so thin on the ring"):
        attempt.goes_to("agree")


def test_a_member_whose_neighbours_are_gone_is_left_out() -> None:
    attempt = Attempt(terms_of(12, colluders=1, neighbours=2))
    attempt.goes_to("shares")
    ring = attempt.server._attempt.ring
    attempt.leaves = {ring[3]: 1, ring[5]: 1}
    with pytest.raises(TooFew, match="thin"):
        attempt.goes_to("agree")
    assert ring[4] not in attempt.given["masked"]
    assert "neighbours are left" in attempt.server.refused[ring[4]]


def test_the_stages_of_the_server_have_one_order() -> None:
    server = Aggregator(terms_of(4))
    with pytest.raises(RuntimeError, match="out of order"):
        server.masked({})
    with pytest.raises(TooFew):
        server.keys({})
    with pytest.raises(RuntimeError, match="out of order"):
        server.keys({})


MUTATIONS = st.one_of(
    st.binary(max_size=300).map(lambda other: lambda said: other),
    st.tuples(st.integers(0, 10**4), st.integers(1, 255)).map(
        lambda at: (
            lambda said: (
                said[: at[0] % len(said)] + bytes([said[at[0] % len(said)] ^ at[1]]) + said[at[0] % len(said) + 1 :]
            )
        )
    ),
    st.integers(0, 10**4).map(lambda at: lambda said: said[: at % len(said)]),
    st.binary(min_size=1, max_size=200).map(lambda more: lambda said: said + more),
    st.tuples(st.integers(0, 10**4), st.binary(min_size=1, max_size=64)).map(
        lambda at: lambda said: said[: at[0] % len(said)] + at[1] + said[at[0] % len(said) + len(at[1]) :]
    ),
)


@pytest.mark.long
@given(st.sampled_from(STAGES[1:]), MUTATIONS, st.sampled_from([0, 2]))
@settings(max_examples=120)
def test_whatever_a_member_is_sent_it_answers_or_refuses(
    stage: str, mutate: Callable[[bytes], bytes], neighbours: int
) -> None:
    attempt = Attempt(terms_of(4, neighbours=neighbours, width=2))
    real = attempt.goes_to(stage)[A]
    with suppress(Refuses):
        answer = attempt.asks(stage, A, mutate(real))
        assert mutate(real) == real or stage in ("agree", "shares")
        assert isinstance(answer, bytes)


@pytest.mark.long
@given(st.sampled_from(STAGES), st.lists(MUTATIONS, min_size=1, max_size=2), st.sampled_from([0, 2]))
@settings(max_examples=120)
def test_whatever_members_send_the_sum_is_right_or_too_few(
    stage: str, mutations: list[Callable[[bytes], bytes]], neighbours: int
) -> None:
    """A changed box spoils the attempt of who gets it: only then do honest members refuse."""
    attempt = Attempt(terms_of(5, neighbours=neighbours, width=2))
    for who, mutate in zip((B, D), mutations, strict=False):
        before = attempt.tamper
        attempt.tamper = lambda at, sent, who=who, mutate=mutate, before=before: one_changes(stage, mutate, (who,))(
            at, before(at, sent)
        )
    try:
        total = attempt.total()
    except (TooFew, Refuses) as error:
        assert isinstance(error, TooFew) or stage == "shares"
        return
    if stage != "masked":
        assert total.words.tolist() == plain_sum(attempt.vectors, total.members)
    assert total.words.dtype == np.uint32
