"""What both sides compute of the list of all keys: who is whose neighbour, what is signed, and the masks."""

from collections.abc import Collection
from typing import NamedTuple

from fednormec.secagg.ciphers import Words, common_secret, derived, digest, is_signed, keystream, number
from fednormec.secagg.graph import holds_together, neighbours_of, ring_order
from fednormec.secagg.layout import Keys, bits_of, list_bytes, transcript_of
from fednormec.secagg.terms import Terms


class Started(NamedTuple):
    """An attempt whose keys are known.

    Attributes:
        terms: its terms.
        keys: the keys of each member that came, U1 in the papers.
        transcript: digest of the terms and all these keys.
        ring: the members in the order of their places.
    """

    terms: Terms
    keys: dict[int, Keys]
    transcript: bytes
    ring: tuple[int, ...]

    def holders(self, member: int, among: Collection[int]) -> tuple[int, ...]:
        """Returns who of these holds shares of a member's secrets: itself and its neighbours, ascending."""
        near = neighbours_of(member, self.ring, self.terms.neighbourhood.neighbours)
        return tuple(sorted(one for one in (member, *near) if one in among))

    def holds_together(self, members: Collection[int]) -> bool:
        """Returns whether the honest among these members are connected, whoever is not."""
        terms = self.terms
        return holds_together(self.ring, terms.neighbourhood.neighbours, members, terms.colluders)

    def bits(self, members: Collection[int]) -> bytes:
        """Returns which of the cohort are among these members."""
        return bits_of(members, self.terms.cohort)

    def is_masked(self, member: int, signed: bytes, second: Collection[int]) -> bool:
        """Returns whether a member signed that it masked its vector against these members, U2 in the papers."""
        return is_signed(self.terms.roster[member], signed, "masked", *masked_parts(self, second))

    def is_agreed(self, member: int, signed: bytes, second: Collection[int], third: Collection[int]) -> bool:
        """Returns whether a member signed that it saw these two sets, U2 and U3 in the papers."""
        return is_signed(self.terms.roster[member], signed, "agree", *agreed_parts(self, second, third))

    def own_mask(self, member: int, seed: bytes) -> Words:
        """Returns the mask that a member makes of its seed."""
        return keystream(derived(seed, "own mask", self.transcript, number(member)), self.terms.width)

    def pair_mask(self, private: bytes, member: int, other: int) -> Words:
        """Returns the mask that a member has with another, by its private key; raises ValueError if there is none.

        The one with the lower number adds it, the other subtracts it.
        """
        secret = common_secret(private, self.keys[other].mask)
        pair = (number(min(member, other)), number(max(member, other)))
        return keystream(derived(secret, "pair mask", self.transcript, *pair), self.terms.width)


def started(terms: Terms, keys: dict[int, Keys]) -> Started:
    """Returns the attempt with these keys."""
    transcript = transcript_of(terms.context, list_bytes(keys))
    return Started(terms, keys, transcript, ring_order(transcript, keys))


def keys_parts(context: bytes, member: int, keys: Keys) -> tuple[bytes, ...]:
    """Returns what is signed at the stage keys."""
    return (context, number(member), keys.box, keys.mask, keys.commitment)


def masked_parts(attempt: Started, second: Collection[int]) -> tuple[bytes, ...]:
    """Returns what is signed at the stage masked."""
    return (attempt.transcript, attempt.bits(second))


def agreed_parts(attempt: Started, second: Collection[int], third: Collection[int]) -> tuple[bytes, ...]:
    """Returns what is signed at the stage agree."""
    return (attempt.transcript, attempt.bits(second), attempt.bits(third))


def box_parts(attempt: Started, sender: int, receiver: int) -> tuple[bytes, ...]:
    """Returns what a box is bound to."""
    return (attempt.transcript, number(sender), number(receiver))


def commitment(context: bytes, member: int, seed: bytes) -> bytes:
    """Returns the digest by which the seed of a member's own mask is recognised."""
    return digest("seed", context, number(member), seed)


def is_authentic(terms: Terms, context: bytes, member: int, keys: Keys) -> bool:
    """Returns whether these keys are signed by the member's roster key for these terms."""
    return is_signed(terms.roster[member], keys.signed, "keys", *keys_parts(context, member, keys))
