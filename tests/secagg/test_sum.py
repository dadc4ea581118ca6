"""The sum is right bit for bit, whoever drops out; the protocol agrees with one in plain integers, and stays."""

import hashlib
import itertools

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from summed import (
    STAGES,
    STAYS,
    Attempt,
    Drawn,
    context_by_hand,
    masked_by_hand,
    opened_by_hand,
    plain_sum,
    private_key,
    public,
    stream,
    tagged,
    terms_of,
    transcript_by_hand,
    value_at,
)

from fednormec.secagg.aggregator import TooFew
from fednormec.secagg.layout import upload_bytes
from fednormec.secagg.masks import started


@given(st.integers(2, 8), st.data())
@settings(max_examples=25)
def test_the_sum_is_the_plain_one(n: int, data: st.DataObject) -> None:
    floor = data.draw(st.integers(2, n))
    terms = terms_of(n, floor, data.draw(st.integers(0, floor - 1)), data.draw(st.integers(1, 40)))
    assert Attempt(terms, seed=data.draw(st.integers(0, 99))).check().members == terms.cohort


@pytest.mark.long
def test_every_pattern_of_drop_outs_of_five() -> None:
    """Four of five are needed: one may go at any stage, and two never may, unless no stage misses the second."""
    terms = terms_of(5)
    assert terms.threshold == 4
    for one, stage in itertools.product(terms.cohort, range(STAYS)):
        left = tuple(other for other in terms.cohort if other != one or stage > STAGES.index("masked"))
        assert Attempt(terms, {one: stage}).check().members == left
    for two in itertools.combinations(terms.cohort, 2):
        for stages in itertools.product(range(STAYS), repeat=2):
            with pytest.raises(TooFew, match=r"\d.* needed"):
                Attempt(terms, dict(zip(two, stages, strict=True))).total()


@pytest.mark.long
@pytest.mark.parametrize("neighbours", [0, 12])
def test_random_drop_outs_of_thirty(neighbours: int) -> None:
    drawn, made = np.random.default_rng(1), 0
    terms = terms_of(30, 15, 3, neighbours=neighbours)
    for seed in range(6):
        gone = drawn.choice(terms.cohort, drawn.integers(0, 11), replace=False)
        leaves = {int(one): int(drawn.integers(0, STAYS)) for one in gone}
        attempt = Attempt(terms, leaves, seed)
        try:
            total = attempt.check()
        except TooFew:
            assert len(gone) > 9 or neighbours
            continue
        made += 1
        assert total.members == tuple(one for one in terms.cohort if leaves.get(one, STAYS) > 2)
    assert made > 3


def test_on_a_ring_fewer_shares_do() -> None:
    """Once members have agreed, many more may go than where all hold shares."""
    terms = terms_of(9, neighbours=4)
    assert terms.neighbourhood[:2] == (4, 2) and terms.threshold == 7
    attempt = Attempt(terms)
    attempt.goes_to("unmask")
    attempt.leaves = dict.fromkeys(attempt.server._attempt.ring[2::3], 4)
    total = attempt.server.unmask(attempt.answers("unmask"))
    assert total.words.tolist() == plain_sum(attempt.vectors, terms.cohort)


@pytest.mark.long
def test_a_large_cohort_on_its_ring() -> None:
    terms = terms_of(202, 2, 1)._replace(neighbours=6)
    drop = {one: 1 + place % 4 for place, one in enumerate(terms.cohort[::21])}
    total = Attempt(terms, drop).check()
    assert len(total.members) == 202 - sum(stage < 3 for stage in drop.values())


def test_a_member_whose_vector_came_too_late_still_agrees() -> None:
    terms = terms_of(4, 2)
    attempt = Attempt(terms)
    late = terms.cohort[1]
    attempt.tamper = lambda stage, sent: {i: b for i, b in sent.items() if i != late or stage != "masked"}
    assert attempt.check().members == tuple(one for one in terms.cohort if one != late)
    assert late in attempt.sent["agree"] and late in attempt.sent["unmask"]


@pytest.mark.parametrize(("n", "neighbours"), [(2, 0), (7, 0), (12, 4)])
def test_the_bytes_of_an_upload(n: int, neighbours: int) -> None:
    terms = terms_of(n, width=11, neighbours=neighbours)
    attempt = Attempt(terms)
    attempt.check()
    for one in terms.cohort:
        assert sum(len(sent[one]) for sent in attempt.sent.values()) == upload_bytes(
            n, terms.neighbourhood.neighbours, 11
        )


def test_the_protocol_in_plain_integers_agrees() -> None:
    """Keys, shares and masked vectors, of the same draws."""
    terms = terms_of(4, width=9)
    attempt = Attempt(terms, {terms.cohort[3]: 2})
    attempt.check()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    ders = {one: key.public_bytes(serialization.Encoding.DER, form) for one, key in terms.roster.items()}
    context = context_by_hand(terms, {one: hashlib.sha256(der).digest() for one, der in ders.items()})
    assert context == terms.context
    drawn = {one: Drawn(stream((0, one, "draws"))) for one in terms.cohort}
    keys = attempt.sent["keys"]
    for one, own in drawn.items():
        seed = hashlib.sha256(tagged("seed", context, one.to_bytes(8, "big"), own.seed)).digest()
        assert keys[one][:96] == public(own.box_key) + public(own.mask_key) + seed
    transcript = transcript_by_hand(context, b"".join(i.to_bytes(4, "big") + keys[i] for i in terms.cohort))
    for one in terms.cohort[:3]:
        words = masked_by_hand(one, drawn[one], keys, transcript, terms.cohort, attempt.vectors[one].tolist())
        assert attempt.sent["masked"][one][:-64] == np.array(words, "<u4").tobytes()
    for place, one in enumerate(terms.cohort):
        both = [drawn[one].polynomial(secret, 3) for secret in (drawn[one].seed, drawn[one].mask_key)]
        others = [(x, other) for x, other in enumerate(terms.cohort) if x != place]
        for at, (x, other) in enumerate(others):
            box = attempt.sent["shares"][one][82 * at : 82 * at + 82]
            content = opened_by_hand(drawn[other], keys[one], transcript, one, other, box)
            assert content == b"".join(value_at(f, x + 1).to_bytes(33, "big") for f in both)
            answered = attempt.sent["unmask"].get(other)
            if answered is not None:
                assert answered[33 * place : 33 * place + 33] == (content[33:] if place == 3 else content[:33])


def deterministic() -> bool:
    try:
        ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
    except Exception:
        return False
    return True


FROZEN: dict[int, dict[str, str]] = {
    0: {
        "terms": "2e313800206f74b9",
        "total": "2fb83813dd4c80a5",
        "given keys": "e3b0c44298fc1c14",
        "given shares": "c1789d3d32c25d74",
        "given masked": "eaf9c344dcafb87d",
        "given agree": "d2ef1e5997b084e3",
        "given unmask": "2cb52c607d62ed4e",
        "sent keys": "bef12050b3391f7d",
        "sent shares": "c234979c790b964e",
        "sent masked": "ddd6c3183442d966",
        "sent agree": "f6aab1ccd026e5a7",
        "sent unmask": "905caeed08aea505",
    },
    2: {
        "terms": "df026eefdaa99c32",
        "total": "2fb83813dd4c80a5",
        "given keys": "e3b0c44298fc1c14",
        "given shares": "311746932904877d",
        "given masked": "ccc397e96be21d96",
        "given agree": "d2ef1e5997b084e3",
        "given unmask": "0b3eb36981d226bc",
        "sent keys": "723970faab27c0d3",
        "sent shares": "9855ba8cb6f2885b",
        "sent masked": "c6a9437be0194cee",
        "sent agree": "73f0d7658843c693",
        "sent unmask": "f80a8718878e16ca",
    },
}


@pytest.mark.skipif(not deterministic(), reason="the libraries here draw signatures at random")
@pytest.mark.parametrize("neighbours", [0, 2])
def test_every_byte_stays_as_it_was(neighbours: int) -> None:
    """Another value here is another protocol: change the version in `ciphers.PROTOCOL` with it."""
    terms = terms_of(5, 2, width=6, neighbours=neighbours)
    attempt = Attempt(terms, {terms.cohort[2]: 2}, seed="frozen")
    total = attempt.check()
    found = {"terms": terms.context.hex()[:16], "total": hashlib.sha256(total.words.tobytes()).hexdigest()[:16]}
    for way in ("given", "sent"):
        for stage in STAGES:
            said = b"".join(content for _, content in sorted(getattr(attempt, way)[stage].items()))
            found[f"{way} {stage}"] = hashlib.sha256(said).hexdigest()[:16]
    assert found == FROZEN[neighbours]


def test_the_list_of_keys_decides_the_ring() -> None:
    terms = terms_of(12, neighbours=4)
    first, other = Attempt(terms), Attempt(terms, seed=1)
    first.goes_to("shares"), other.goes_to("shares")
    rings = [attempt.server._attempt for attempt in (first, other)]
    assert rings[0].ring != rings[1].ring and set(rings[0].ring) == set(rings[1].ring)
    assert started(terms, rings[0].keys) == rings[0]
    assert private_key(3).public_key() == terms.roster[3]
