"""Attempts at a secure sum, stage by stage in one process, and the protocol once more in plain integers."""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fednormec.secagg.aggregator import Aggregator, Total
from fednormec.secagg.ciphers import Words
from fednormec.secagg.member import Member
from fednormec.secagg.terms import Terms

STAGES = ("keys", "shares", "masked", "agree", "unmask")
STAYS = len(STAGES)


@cache
def private_key(member: int) -> ec.EllipticCurvePrivateKey:
    """The roster key of a member, always the same."""
    return ec.derive_private_key(int.from_bytes(hashlib.sha256(b"roster %d" % member).digest()) >> 1, ec.SECP256R1())


def terms_of(n: int, floor: int = 2, colluders: int = 0, width: int = 5, **other: Any) -> Terms:
    """Terms for the members 3, 10, 17, ..."""
    roster = {7 * i + 3: private_key(7 * i + 3).public_key() for i in range(n)}
    plain = {"run": "a run", "agreed": "beef", "round": 4, "attempt": 0}
    return Terms(**plain | other, roster=roster, floor=floor, colluders=colluders, width=width)


def stream(name: object) -> Callable[[int], bytes]:
    """Bytes that follow from a name, and go on from call to call."""
    at = 0

    def draw(size: int) -> bytes:
        nonlocal at
        at += size
        return hashlib.shake_256(repr(name).encode()).digest(at)[-size:] if size else b""

    return draw


def vectors_of(terms: Terms, seed: int = 0) -> dict[int, Words]:
    drawn = np.random.default_rng(seed)
    return {one: drawn.integers(0, 2**32, terms.width, dtype=np.uint32) for one in terms.cohort}


def plain_sum(vectors: Mapping[int, Words], members: Iterable[int]) -> list[int]:
    return [sum(column) % 2**32 for column in zip(*(vectors[one].tolist() for one in members), strict=True)]


class Attempt:
    """An attempt of honest parties that goes on stage by stage.

    Attributes:
        terms: its terms.
        vectors: vector of each member.
        members: the members' side.
        server: the server's.
        sent: by stage, what each member sent.
        given: by stage, what the server sent each member for it.
        leaves: number of the stage from which on a member sends nothing.
    """

    def __init__(self, terms: Terms, leaves: Mapping[int, int] | None = None, seed: object = 0) -> None:
        self.terms, self.leaves, self.vectors = terms, dict(leaves or {}), vectors_of(terms)
        self.members = {one: Member(terms, one, private_key(one), stream((seed, one, "draws"))) for one in terms.cohort}
        self.server = Aggregator(terms)
        self.sent = dict[str, dict[int, bytes]]()
        self.given: dict[str, dict[int, bytes]] = {"keys": dict.fromkeys(terms.cohort, b"")}
        self.tamper: Callable[[str, dict[int, bytes]], dict[int, bytes]] = lambda stage, sent: sent

    def asks(self, stage: str, one: int, request: bytes) -> bytes:
        """What a member answers to a request."""
        if stage == "keys":
            return self.members[one].keys()
        more = (self.vectors[one],) if stage == "masked" else ()
        return bytes(getattr(self.members[one], stage)(request, *more))

    def goes_to(self, end: str) -> dict[int, bytes]:
        """All stages before this one that are still to come; what the server then sends."""
        for stage, after in zip(STAGES, STAGES[1:], strict=False):
            if stage == end:
                break
            if after not in self.given:
                self.given[after] = getattr(self.server, stage)(self.answers(stage))
        return self.given[end]

    def answers(self, stage: str) -> dict[int, bytes]:
        """What the members send at a stage."""
        at = STAGES.index(stage)
        there = [one for one in self.given[stage] if self.leaves.get(one, STAYS) > at]
        sent = {one: self.asks(stage, one, self.given[stage][one]) for one in there}
        self.sent[stage] = self.tamper(stage, sent)
        return self.sent[stage]

    def total(self) -> Total:
        """The sum, after all stages."""
        self.goes_to("unmask")
        return self.server.unmask(self.answers("unmask"))

    def check(self) -> Total:
        """The sum, which is the one of the vectors in plain integers."""
        total = self.total()
        assert total.words.dtype == np.uint32
        assert total.words.tolist() == plain_sum(self.vectors, total.members)
        return total


# the protocol once more, of integers, from its description alone

PRIME = 2**256 + 297
CURVE = 2**255 - 19


def tagged(label: str, *parts: bytes) -> bytes:
    whole = [b"fednormec secure aggregation 1", label.encode(), *parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in whole)


def eight(value: int) -> bytes:
    return value.to_bytes(8, "big")


def x25519(private: bytes, u: int) -> bytes:
    """The ladder of RFC 7748, section 5."""
    k = int.from_bytes(private, "little")
    k = k & ~7 & ~(1 << 255) | 1 << 254
    x2, z2, x3, z3, swapped = 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swapped ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swapped = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb, aa, bb = d * a, c * b, a * a, b * b
        x3, z3 = (da + cb) ** 2 % CURVE, u * (da - cb) ** 2 % CURVE
        x2, z2 = aa * bb % CURVE, (aa - bb) * (aa + 121665 * (aa - bb)) % CURVE
    if swapped:
        x2, z2 = x3, z3
    return (x2 * pow(z2, CURVE - 2, CURVE) % CURVE).to_bytes(32, "little")


def public(private: bytes) -> bytes:
    return x25519(private, 9)


def agreed(private: bytes, theirs: bytes) -> bytes:
    return x25519(private, int.from_bytes(theirs, "little") & (1 << 255) - 1)


def hkdf(secret: bytes, info: bytes) -> bytes:
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\1", "sha256")


def counter_words(key: bytes, width: int) -> list[int]:
    """AES in counter mode, made of single blocks."""
    blocks = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    whole = b"".join(blocks.update(i.to_bytes(16, "big")) for i in range(-(-width // 4)))
    return [int.from_bytes(whole[4 * i : 4 * i + 4], "little") for i in range(width)]


def context_by_hand(terms: Terms, fingerprints: Mapping[int, bytes]) -> bytes:
    k, s = terms.neighbourhood[:2]
    figures = (terms.round, terms.attempt, terms.floor, terms.colluders, terms.width, k, s)
    people = [part for one in sorted(fingerprints) for part in (eight(one), fingerprints[one])]
    return hashlib.sha256(
        tagged("terms", terms.run.encode(), terms.agreed.encode(), *map(eight, figures), *people)
    ).digest()


class Drawn:
    """What a member draws, from the stream that it draws from."""

    def __init__(self, draw: Callable[[int], bytes]) -> None:
        self.seed, self.box_key, self.mask_key = draw(32), draw(32), draw(32)
        self._draw = draw

    def polynomial(self, secret: bytes, needed: int) -> list[int]:
        """Coefficients, the constant first."""
        drawn = self._draw(48 * (needed - 1))
        higher = [int.from_bytes(drawn[48 * i : 48 * i + 48], "big") % PRIME for i in range(needed - 1)]
        return [int.from_bytes(secret, "big"), *reversed(higher)]


def value_at(polynomial: Sequence[int], x: int) -> int:
    return sum(c * x**i for i, c in enumerate(polynomial)) % PRIME


def transcript_by_hand(context: bytes, listed: bytes) -> bytes:
    return hashlib.sha256(tagged("transcript", context, listed)).digest()


def masked_by_hand(
    me: int, drawn: Drawn, keys: Mapping[int, bytes], transcript: bytes, second: Iterable[int], vector: Sequence[int]
) -> list[int]:
    """The masked vector of a member where everyone is everyone's neighbour."""
    words = list(vector)
    mask = counter_words(hkdf(drawn.seed, tagged("own mask", transcript, eight(me))), len(words))
    words = [word + more for word, more in zip(words, mask, strict=True)]
    for other in second:
        if other != me:
            secret = agreed(drawn.mask_key, keys[other][32:64])
            info = tagged("pair mask", transcript, eight(min(me, other)), eight(max(me, other)))
            sign = 1 if me < other else -1
            mask = counter_words(hkdf(secret, info), len(words))
            words = [word + sign * more for word, more in zip(words, mask, strict=True)]
    return [word % 2**32 for word in words]


def opened_by_hand(drawn: Drawn, theirs: bytes, transcript: bytes, sender: int, receiver: int, box: bytes) -> bytes:
    parts = tagged("box", transcript, eight(sender), eight(receiver))
    return AESGCM(hkdf(agreed(drawn.box_key, theirs[:32]), parts)).decrypt(bytes(12), box, parts)
