"""Every way in which a server may lie to a member, and the member refuses it."""

from collections.abc import Callable

import numpy as np
import pytest
from summed import STAGES, Attempt, Drawn, private_key, stream, terms_of, value_at

from fednormec.errors import UserError
from fednormec.secagg.ciphers import common_secret, derived, sealed, signature
from fednormec.secagg.layout import BOX, Keys, Refuses, bits_of, list_bytes, read_keys, read_list
from fednormec.secagg.masks import agreed_parts, box_parts, keys_parts, masked_parts, started
from fednormec.secagg.member import Member
from fednormec.secagg.terms import Terms

LOW_ORDER = bytes(32)


def signed_keys(terms: Terms, member: int, box: bytes, mask: bytes, seal: bytes = bytes(32)) -> Keys:
    """Keys that a colluder signs."""
    keys = Keys(box, mask, seal, b"")
    return keys._replace(signed=signature(private_key(member), "keys", *keys_parts(terms.context, member, keys)))


def refused(attempt: Attempt, stage: str, one: int, request: bytes, why: str) -> None:
    """The member refuses, and all that comes after."""
    with pytest.raises(Refuses, match=why):
        attempt.asks(stage, one, request)
    for later in STAGES:
        with pytest.raises(Refuses, match="over"):
            attempt.asks(later, one, attempt.given.get(later, {}).get(one, b""))
    assert not vars(attempt.members[one])["_held"] and not vars(attempt.members[one])["_seed"]


A, B, C, D = 3, 10, 17, 24  # the first members


def substituted(keys: dict[int, Keys]) -> dict[int, Keys]:
    return keys | {B: keys[B]._replace(box=keys[C].box)}


LISTS: dict[str, tuple[Callable[[dict[int, Keys]], dict[int, Keys]], str]] = {
    "a substituted key": (substituted, f"{B} are not signed"),
    "a substituted mask key": (lambda keys: keys | {B: keys[B]._replace(mask=keys[C].mask)}, f"{B} are not signed"),
    "a substituted commitment": (lambda keys: keys | {B: keys[B]._replace(commitment=bytes(32))}, "are not signed"),
    "another's keys": (lambda keys: keys | {B: keys[C]}, f"{B} are not signed"),
    "a member of nowhere": (lambda keys: keys | {4: keys[B]}, "4 is not of the cohort"),
    "without me": (lambda keys: {one: keys[one] for one in keys if one != A}, f"{A} is not in the list"),
    "other keys of mine": (lambda keys: keys | {A: keys[B]}, "others for this member"),
    "too few": (lambda keys: {one: keys[one] for one in (A, B)}, "of 2 members, and 3 are needed"),
    "a bad signature": (lambda keys: keys | {B: keys[B]._replace(signed=bytes(64))}, f"{B} are not signed"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_keys_with_something_wrong(name: str) -> None:
    attempt = Attempt(terms_of(4))
    change, why = LISTS[name]
    listed = attempt.goes_to("shares")[A]
    refused(attempt, "shares", A, list_bytes(change(read_list(listed))), why)


def test_a_list_out_of_order_or_with_a_member_twice() -> None:
    listed = Attempt(terms_of(4)).goes_to("shares")[A]
    entry = len(listed) // 4
    for wrong in (listed[:entry] + listed, listed + listed[:entry], listed[entry:] + listed[:entry]):
        attempt = Attempt(terms_of(4))
        attempt.goes_to("shares")
        refused(attempt, "shares", A, wrong, "twice, or not in its place")


def test_keys_of_another_attempt() -> None:
    """So do those of other terms: a new width, another floor, another round."""
    for other in ({"attempt": 1}, {"round": 5}, {"run": "another"}, {"agreed": "b0ef"}, {"width": 6}, {"floor": 3}):
        attempt, before = Attempt(terms_of(4)), Attempt(terms_of(4, **other))
        now, old = read_list(attempt.goes_to("shares")[A]), read_list(before.goes_to("shares")[A])
        refused(attempt, "shares", A, list_bytes(now | {B: old[B]}), f"{B} are not signed by it for this attempt")


def test_my_own_keys_of_another_attempt() -> None:
    attempt, before = Attempt(terms_of(4)), Attempt(terms_of(4, attempt=1))
    now, old = read_list(attempt.goes_to("shares")[A]), read_list(before.goes_to("shares")[A])
    refused(attempt, "shares", A, list_bytes(now | {A: old[A]}), "others for this member than its own")


@pytest.mark.parametrize("which", ["box", "mask"])
def test_a_key_of_low_order(which: str) -> None:
    attempt = Attempt(terms_of(4))
    keys = read_list(attempt.goes_to("shares")[A])
    two = {"box": keys[B].box, "mask": keys[B].mask} | {which: LOW_ORDER}
    refused(attempt, "shares", A, list_bytes(keys | {B: signed_keys(attempt.terms, B, **two)}), "low order")


@pytest.mark.parametrize("neighbours", [0, 4])
def test_two_lists_that_differ_in_a_colluder_s_keys(neighbours: int) -> None:
    """Both are signed, and have the same keys for boxes; but what is sealed under one does not open under the other."""
    terms = terms_of(6, colluders=1, neighbours=neighbours)
    attempt = Attempt(terms)
    keys = read_list(attempt.goes_to("shares")[A])
    other = list_bytes(keys | {D: signed_keys(terms, D, keys[D].box, keys[D].mask)})
    attempt.given["shares"] |= {B: other}
    attempt.given["masked"] = attempt.server.shares(attempt.answers("shares"))
    refused(attempt, "masked", B, attempt.given["masked"][B], "does not open")


def boxes_of(attempt: Attempt, one: int) -> tuple[bytes, list[bytes]]:
    given = attempt.goes_to("masked")[one]
    return given[:1], [given[at : at + BOX] for at in range(1, len(given), BOX)]


def test_boxes_that_are_not_the_neighbours() -> None:
    for change, why in {
        "swapped": (lambda bits, boxes: bits + boxes[1] + boxes[0] + boxes[2], "does not open"),
        "missing": (lambda bits, boxes: bits + boxes[0] + boxes[1], "bytes, not"),
        "one more": (lambda bits, boxes: bits + b"".join(boxes) + boxes[0], "bytes, not"),
        "garbage": (lambda bits, boxes: bits + boxes[0] + boxes[1] + bytes(BOX), "does not open"),
        "twice the same": (lambda bits, boxes: bits + 2 * boxes[0] + boxes[2], "does not open"),
    }.values():
        attempt = Attempt(terms_of(4))
        refused(attempt, "masked", A, change(*boxes_of(attempt, A)), why)


def test_a_box_for_somebody_else_or_its_own_one_back() -> None:
    for way in ("for another", "back"):
        attempt = Attempt(terms_of(4))
        bits, boxes = boxes_of(attempt, A)
        _, others = boxes_of(attempt, C)
        mine = attempt.sent["shares"][A][:BOX]  # that of A for B
        first = others[1] if way == "for another" else mine
        refused(attempt, "masked", A, bits + first + b"".join(boxes[1:]), f"member {B} does not open")


def test_a_box_of_another_attempt() -> None:
    """Of the same draws, and so of the same keys."""
    attempt, before = Attempt(terms_of(4)), Attempt(terms_of(4, attempt=1))
    bits, boxes = boxes_of(attempt, A)
    _, old = boxes_of(before, A)
    refused(attempt, "masked", A, bits + old[0] + b"".join(boxes[1:]), "does not open")


def test_a_box_with_numbers_that_are_not_of_the_field() -> None:
    terms = terms_of(4)
    attempt = Attempt(terms)
    bits, boxes = boxes_of(attempt, A)
    parts = box_parts(attempt.server._attempt, B, A)
    drawn = Drawn(stream((0, B, "draws")))
    key = derived(common_secret(drawn.box_key, read_keys(attempt.sent["keys"][A]).box), "box", *parts)
    refused(attempt, "masked", A, bits + sealed(key, b"\xff" * 66, "box", *parts) + b"".join(boxes[1:]), "the field")
    for length in (65, 67, 0):
        attempt = Attempt(terms)
        boxes_of(attempt, A)
        with pytest.raises(Refuses):
            attempt.asks("masked", A, bits + sealed(key, bytes(length), "box", *parts) + b"".join(boxes[1:]))


SETS = {
    "without me": ((B, C, D), f"{A} is not in the set"),
    "too few": ((A, B), "of 2 members, and 3 are needed"),
    "beyond those with keys": ((A, B, C, D, 31), "members without keys"),
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_to_mask_against_with_something_wrong(name: str) -> None:
    attempt = Attempt(terms_of(5)) if name.startswith("beyond") else Attempt(terms_of(4))
    if name.startswith("beyond"):
        attempt.leaves = {31: 0}
    members, why = SETS[name]
    _, boxes = boxes_of(attempt, A)
    request = bits_of(members, attempt.terms.cohort) + b"".join(boxes)
    refused(attempt, "masked", A, request, why)


def test_bits_beyond_the_cohort() -> None:
    attempt = Attempt(terms_of(4))
    bits, boxes = boxes_of(attempt, A)
    refused(attempt, "masked", A, bytes([bits[0] | 1]) + b"".join(boxes), "beyond the cohort")


def test_a_set_in_which_nobody_holds_my_shares() -> None:
    terms = terms_of(9, colluders=1, neighbours=2)
    attempt = Attempt(terms)
    attempt.goes_to("masked")
    ring = attempt.server._attempt.ring
    me = ring[4]
    left = set(terms.cohort) - {ring[3], ring[5]}
    assert len(left) >= terms.threshold
    refused(attempt, "masked", me, bits_of(left, terms.cohort), "too few to recover")


def test_another_vector_or_another_set_is_never_masked() -> None:
    for change in ("vector", "set"):
        attempt = Attempt(terms_of(4))
        given = attempt.goes_to("masked")[A]
        first = attempt.asks("masked", A, given)
        assert attempt.asks("masked", A, given) == first
        if change == "vector":
            attempt.vectors[A][0] += np.uint32(1)
            refused(attempt, "masked", A, given, "twice")
        else:
            _, boxes = boxes_of(attempt, A)
            refused(attempt, "masked", A, bits_of((A, B, C), attempt.terms.cohort) + b"".join(boxes[:2]), "twice")


def at_agree(n: int = 4, **other: int) -> Attempt:
    attempt = Attempt(terms_of(n, **other))
    attempt.goes_to("agree")
    return attempt


def test_a_set_to_sum_with_something_wrong() -> None:
    attempt = at_agree(floor=3)
    refused(attempt, "agree", A, bits_of((A, B), attempt.terms.cohort), "2 members, and the floor is 3")
    attempt = Attempt(terms_of(5), {31: 1})
    attempt.goes_to("agree")
    refused(attempt, "agree", A, bits_of(attempt.terms.cohort, attempt.terms.cohort), "not masked against")


def test_two_sets_to_sum() -> None:
    attempt = at_agree()
    every, fewer = (bits_of(members, attempt.terms.cohort) for members in ((A, B, C, D), (A, B, C)))
    assert attempt.asks("agree", A, every) == attempt.asks("agree", A, every)
    refused(attempt, "agree", A, fewer, "twice")


def test_a_set_that_cuts_the_ring() -> None:
    """Two colluders next to one honest member, or two gaps, and its vector would stand alone."""
    terms = terms_of(9, colluders=1, neighbours=2)
    attempt = Attempt(terms)
    attempt.goes_to("agree")
    ring = attempt.server._attempt.ring
    refused(attempt, "agree", ring[4], bits_of(set(ring) - {ring[3]}, terms.cohort), "could cut")
    assert attempt.asks("agree", ring[0], bits_of(ring, terms.cohort))
    attempt = Attempt(terms._replace(neighbours=4))
    attempt.goes_to("agree")
    ring = attempt.server._attempt.ring
    assert attempt.asks("agree", ring[4], bits_of(set(ring) - {ring[3]}, terms.cohort))


def at_unmask(**other: int) -> tuple[Attempt, bytes, list[bytes]]:
    """An attempt before its last stage; and for A the bits of who agreed, and the signatures."""
    attempt = Attempt(terms_of(5, **other), {31: 2})
    given = attempt.goes_to("unmask")[A]
    return attempt, given[:1], [given[at : at + 64] for at in range(1, len(given), 64)]


def test_signatures_that_do_not_agree() -> None:
    attempt, _, signed = at_unmask()
    started_, cohort = attempt.server._attempt, attempt.terms.cohort
    second, third = cohort, (A, B, C, D)
    bits = bits_of(third, cohort)
    agreed, masked = signed[:4], signed[4:]
    assert [len(agreed), len(masked)] == [4, 3]

    def by(member: int, label: str, parts: tuple[bytes, ...]) -> bytes:
        return signature(private_key(member), label, *parts)

    others = [by(one, "agree", agreed_parts(started_, second, (A, B, C))) for one in third]
    elsewhere = [by(one, "agree", agreed_parts(started_, third, third)) for one in third]
    old = Attempt(terms_of(5, attempt=1), {31: 2})
    old.goes_to("unmask")
    before = [old.sent["agree"][one] for one in third]
    other_set = by(B, "masked", masked_parts(started_, third))
    keys = read_list(attempt.given["shares"][A])
    list_ = started(attempt.terms, keys | {B: signed_keys(attempt.terms, B, keys[B].box, keys[B].mask)})
    agreed_there = [by(one, "agree", agreed_parts(list_, second, third)) for one in third]
    masked_there = by(B, "masked", masked_parts(list_, second))
    cases = {
        "under another list": (bits, agreed_there + masked, f"{A} did not sign the set"),
        "masked under another list": (bits, [*agreed, masked_there, *masked[1:]], f"{B} did not sign that it masked"),
        "too few": (bits_of((A, B, C), cohort), agreed[:3] + masked, "3 members, and 4 are needed"),
        "one twice": (bits, [agreed[0], agreed[0], *agreed[2:], *masked], f"{B} did not sign the set"),
        "another set to sum": (bits, others + masked, f"{A} did not sign the set"),
        "one of another set": (bits, [*agreed[:3], others[3], *masked], f"{D} did not sign the set"),
        "another set masked against": (bits, elsewhere + masked, f"{A} did not sign the set"),
        "another attempt": (bits, before + masked, f"{A} did not sign the set"),
        "of no masked vector": (bits, agreed + masked[:2], "bytes, not"),
        "of masked vectors in another order": (bits, agreed + masked[::-1], f"{B} did not sign that it masked"),
        "of another set masked": (bits, [*agreed, other_set, *masked[1:]], f"{B} did not sign that it masked"),
        "of the wrong stage": (bits, [*masked, *agreed], "did not sign"),
        "beyond the cohort": (bytes([bits[0] | 1]), signed, "beyond the cohort"),
        "one more": (bits, [*signed, signed[0]], "bytes, not"),
    }
    for one, (shown, signatures, why) in cases.items():
        attempt, _, _ = at_unmask()
        refused(attempt, "unmask", A, shown + b"".join(signatures), why)
        assert one


def test_members_that_were_never_masked_against_cannot_agree() -> None:
    attempt = Attempt(terms_of(5), {31: 1})
    given = attempt.goes_to("unmask")[A]
    parts = agreed_parts(attempt.server._attempt, (A, B, C, D), (A, B, C, D))
    forged = bits_of(attempt.terms.cohort, attempt.terms.cohort) + given[1 : 1 + 4 * 64]
    forged += signature(private_key(31), "agree", *parts) + given[1 + 4 * 64 :]
    refused(attempt, "unmask", A, forged, "agreed that were not masked against")


def test_two_sets_to_mask_against() -> None:
    """B is told that D is gone. Its vector is then not masked against D, and nobody helps to take its own mask away."""
    attempt = Attempt(terms_of(5), {31: 2})
    bits, boxes = boxes_of(attempt, B)
    fewer = bits_of((A, B, C, 31), attempt.terms.cohort) + boxes[0] + boxes[1] + boxes[3]
    other = attempt.asks("masked", B, fewer)
    for one in (A, C, D):
        attempt.sent.setdefault("masked", {})[one] = attempt.asks("masked", one, attempt.given["masked"][one])
    third = bits_of((A, B, C, D), attempt.terms.cohort)
    signed = {one: attempt.asks("agree", one, third) for one in (A, C, D)}
    with pytest.raises(Refuses, match="not masked against"):
        attempt.asks("agree", B, third)
    parts = agreed_parts(attempt.server._attempt, attempt.terms.cohort, (A, B, C, D))
    signed[31] = signature(private_key(31), "agree", *parts)  # a colluder
    request = bits_of(signed, attempt.terms.cohort) + b"".join(signed[one] for one in sorted(signed))
    masked = {one: content[-64:] for one, content in attempt.sent["masked"].items()} | {B: other[-64:]}
    for one in (A, C, D):
        shown = b"".join(masked[near] for near in (A, B, C, D) if near != one)
        refused(attempt, "unmask", one, request + shown, f"member {B} did not sign that it masked against the same set")


def test_no_member_ever_gives_both_shares() -> None:
    attempt, _, _ = at_unmask()
    first = attempt.answers("unmask")
    cohort = attempt.terms.cohort
    given = attempt.given["unmask"]
    for one, answer in first.items():
        assert attempt.asks("unmask", one, given[one]) == answer
        shares = [answer[at : at + 33] for at in range(0, len(answer), 33)]
        x = cohort.index(one) + 1
        for dealer, share in zip(cohort, shares, strict=True):
            drawn = Drawn(stream((0, dealer, "draws")))
            both = [drawn.polynomial(secret, 4) for secret in (drawn.seed, drawn.mask_key)]
            assert share == value_at(both[dealer == 31], x).to_bytes(33, "big")
    all_in = bits_of(cohort, cohort)
    for one in first:
        refused(attempt, "agree", one, all_in, "twice")


def test_nothing_comes_before_its_stage() -> None:
    done = Attempt(terms_of(4))
    done.total()
    for place, stage in enumerate(STAGES):
        for later in STAGES[place + 1 :]:
            attempt = Attempt(terms_of(4))
            attempt.goes_to(stage)
            with pytest.raises(Refuses, match=f"{later} came before {stage}"):
                attempt.asks(later, A, done.given[later][A])
            with pytest.raises(Refuses, match="over"):
                attempt.asks(stage, A, done.given[stage][A])


def test_the_same_again_gives_the_same_bytes_and_anything_else_ends_it() -> None:
    attempt = Attempt(terms_of(4))
    attempt.total()
    for stage in STAGES:
        assert attempt.asks(stage, A, attempt.given[stage][A]) == attempt.sent[stage][A]
    for stage in STAGES[1:]:
        attempt = Attempt(terms_of(4))
        attempt.total()
        refused(attempt, stage, A, attempt.given[stage][A] + b"\0", "twice")


def test_a_stage_that_is_cut_short_ends_the_attempt() -> None:
    terms = terms_of(4)

    def draw(size: int) -> bytes:
        raise KeyboardInterrupt

    member = Member(terms, A, private_key(A), draw)
    with pytest.raises(KeyboardInterrupt):
        member.keys()
    with pytest.raises(Refuses, match="cut short"):
        member.keys()


def test_a_mistake_of_the_caller_ends_nothing() -> None:
    attempt = Attempt(terms_of(4))
    given = attempt.goes_to("masked")[A]
    for wrong in (np.zeros(5, np.int64), np.zeros(4, np.uint32), np.zeros((1, 5), np.uint32)):
        with pytest.raises(UserError, match="5 words of type uint32"):
            attempt.members[A].masked(given, wrong)
    before = attempt.vectors[A].copy()
    assert attempt.asks("masked", A, given)
    assert (attempt.vectors[A] == before).all()


@pytest.mark.parametrize(("me", "key"), [(A, B), (4, A)])
def test_a_key_that_is_not_on_the_roster(me: int, key: int) -> None:
    with pytest.raises(UserError, match="roster does not have this key"):
        Member(terms_of(4), me, private_key(key))


def test_a_restarted_member_signs_under_another_list() -> None:
    """Its agreement then counts nowhere else: every list has one set to sum, even if a member breaks the rule."""
    terms = terms_of(4)
    attempt = Attempt(terms)
    attempt.goes_to("agree")
    again = Member(terms, A, private_key(A), stream("again"))
    keys = read_list(attempt.given["shares"][A])
    again.keys()
    with pytest.raises(Refuses, match="others for this member than its own"):
        again.shares(list_bytes(keys))
    mine = Member(terms, A, private_key(A), stream("again")).keys()
    other = started(terms, keys | {A: read_keys(mine)})
    assert other.transcript != attempt.server._attempt.transcript
