"""The member's side of the sum: five answers, and all that it refuses.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, doi
10.1145/3133956.3133982, against a server that may do anything; on a ring of neighbours in large cohorts, as in Bell et
al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020, doi 10.1145/3372297.3417885. What
differs from both papers: all that follows the keys is bound to the list of keys, masked vectors are signed together
with the set that they were masked against, and members check the ring themselves.

## Assumptions

The roster has each member's right key. The server and `colluders` members may do anything, together. X25519 with HKDF
gives keys that look random (a gap assumption, HKDF as a random oracle), AES-256 is a pseudorandom function, AES-GCM is
authenticated encryption, ECDSA cannot be forged, SHA-256 is a random oracle. `draw` gives fresh uniform bytes.
Python's arithmetic does not hide how long it takes: who can time a member's process precisely is not covered.

## Guarantee

Of the vectors given to honest `Member`s, the server and the colluders learn at most one sum for each list of keys:
over the honest members of one set U3 that has at least `floor` members. If every honest member makes one `Member` for
an attempt, the attempt has at most one such list, and so one sum; a member that makes two, such as after a restart,
may have two vectors in two sums. Nothing is promised about who is in U3 (the server chooses), nor that the sum is
right or comes about: every member can spoil it.

Call T the list of keys with the terms. A `Member` takes one T, as its own fresh keys are in it, and is said to be
under T. Boxes, masks and signatures are bound to T, so that what is given away under T concerns members under T alone.

1. Shares are given away only against t signatures of one (T, U2, U3), and a `Member` signs one. Two of them need 2 t >
   n + colluders signatures by n members: an honest one signed both. So each T has one (U2, U3), and there is one T
   unless an honest member made two `Member`s.
2. An honest member gives away shares of j's seed if j is in U3, of j's mask key otherwise, never both. The colluders
   hold fewer than s shares of each. So of an honest j in U3 the mask key stays secret, of one outside U3 the seed is,
   whose mask hides j's vector.
3. Let S be the honest members of U3. `agree` checks that S is connected by neighbours whichever `colluders` of U3 are
   not honest: exactly, nothing is left to chance. The mask of two neighbours in S, both under T, is known to no other.
4. If all of S masked against U2 under T, masks on a connected graph hide all but the sum over S, and |S| >= floor -
   colluders >= 1.
5. If i in S did not, while a neighbour k in S did: k opened i's box under T, so i is under T. Nobody honest sees i's
   signature over (T, U2), so nobody honest gives a share of i's seed, and s > colluders shares are needed: the seed
   hides i's vector, if there is one. The mask of i and k is then in no other vector that can be read, and hides k's.
   As S is connected, each connected part of those who masked has such a k: no sum of any of them is learned.

With floor - colluders = 1 the set S may be one member: what then protects it is the noise in its vector, nothing here.
"""

import hashlib
import os
from collections.abc import Callable
from typing import final

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fednormec.errors import UserError
from fednormec.secagg.ciphers import (
    KEY,
    SIGNATURE,
    Words,
    common_secret,
    derived,
    fingerprint,
    is_of_use,
    opened,
    public_of,
    sealed,
    signature,
)  # fmt: skip
from fednormec.secagg.layout import (
    BOX,
    Keys,
    Refuses,
    bits_length,
    pieces,
    read_bits,
    read_list,
    read_share,
    require_length,
    share_bytes,
)  # fmt: skip
from fednormec.secagg.masks import (
    agreed_parts,
    box_parts,
    commitment,
    is_authentic,
    keys_parts,
    masked_parts,
    started,
)  # fmt: skip
from fednormec.secagg.sharing import SHARE, Draw, split
from fednormec.secagg.terms import Terms

STAGES = ("keys", "shares", "masked", "agree", "unmask")


@final
class Member:
    """Member of a cohort in one attempt at one sum. Its five methods are called once each, in this order.

    Each takes what the server sent and returns what to send back; `Refuses` says why there is no answer. After a
    refusal every later call is refused, and the secrets are forgotten. The same call again returns the same bytes.

    Make one for each attempt and do not keep it: a member whose process restarts has dropped out of the attempt.

    Args:
        terms: terms of this attempt.
        me: number of this member.
        private_key: its key, whose public one is on the roster.
        draw: returns so many fresh random bytes; another than the system's is for tests.
    """

    def __init__(self, terms: Terms, me: int, private_key: ec.EllipticCurvePrivateKey, draw: Draw = os.urandom) -> None:
        self._terms, self._me, self._private, self._draw = terms.checked(), me, private_key, draw
        if me not in terms.roster or fingerprint(private_key.public_key()) != fingerprint(terms.roster[me]):
            raise UserError(f"the roster does not have this key for member {me}: is it the right number, and key?")
        self._context, self._cohort = terms.context, terms.cohort
        self._answers = list[tuple[bytes, bytes]]()  # digest of what came, and what was answered
        self._why = ""
        self._held = dict[int, tuple[bytes, bytes]]()  # of whom: share of its seed, share of its mask key

    def keys(self) -> bytes:
        """Returns this member's keys, drawn for this attempt, and its signature of them."""
        return self._answer("keys", b"", self._keys)

    def shares(self, listed: bytes) -> bytes:
        """Returns a box for each neighbour with shares of this member's two secrets.

        Raises Refuses if the list has an unknown member, one twice, a bad signature, other keys than this member's own,
        or fewer members than the threshold.

        Args:
            listed: members and their keys.
        """
        return self._answer("shares", listed, lambda: self._shares(bytes(listed)))

    def masked(self, boxes: bytes, vector: Words) -> bytes:
        """Returns the masked vector and a signature of the set that it is masked against.

        Raises Refuses if this member is not in that set, or it has members without keys, or fewer than the threshold;
        if a box is missing or does not open; if too few hold shares. Raises UserError for a vector of another kind.

        Args:
            boxes: the set, and for this member the box of each neighbour in it.
            vector: what is added to the sum: uint32, one word for each of the width. It is not changed.
        """
        if vector.dtype != np.uint32 or vector.shape != (self._terms.width,):
            raise UserError(
                f"the vector must have {self._terms.width} words of type uint32, not the shape {vector.shape} "
                f"of type {vector.dtype}."
            )
        words = np.array(vector, np.uint32)
        return self._answer("masked", words.tobytes() + boxes, lambda: self._masked(bytes(boxes), words))

    def agree(self, chosen: bytes) -> bytes:
        """Returns a signature of the set that is to be summed. This member need not be in it.

        Raises Refuses if it has fewer members than the floor or one that was not masked against, or if it leaves the
        ring of neighbours so thin that the colluders could cut it.

        Args:
            chosen: the set.
        """
        return self._answer("agree", chosen, lambda: self._agree(bytes(chosen)))

    def unmask(self, signatures: bytes) -> bytes:
        """Returns a share of the seed of each neighbour in the sum, and of the mask key of each that dropped out.

        Raises Refuses if there are fewer signatures of this very set than the threshold, if one is bad, or if a
        neighbour in the sum did not sign that it masked against the same set.

        Args:
            signatures: who agreed, their signatures, and those of the neighbours' masked vectors.
        """
        return self._answer("unmask", signatures, lambda: self._unmask(bytes(signatures)))

    def _answer(self, stage: str, request: bytes, work: Callable[[], bytes]) -> bytes:
        if self._why:
            raise Refuses(f"this attempt is over for member {self._me}: {self._why}")
        place, came = STAGES.index(stage), hashlib.sha256(request).digest()
        why = f"the stage {stage} was cut short"
        try:
            if place < len(self._answers):
                return self._again(stage, came)
            if place > len(self._answers):
                raise Refuses(f"the stage {stage} came before {STAGES[len(self._answers)]}")
            self._answers.append((came, work()))
            why = ""
        except Refuses as error:
            why = str(error)
            raise
        finally:
            if len(self._answers) <= place or self._answers[place][0] != came:
                self._forget(why)
        return self._answers[place][1]

    def _again(self, stage: str, came: bytes) -> bytes:
        before, answer = self._answers[STAGES.index(stage)]
        if came != before:
            raise Refuses(f"the stage {stage} came twice, and not with the same content")
        return answer

    def _forget(self, why: str) -> None:
        """Ends this attempt; references to secrets are dropped, which is all that Python can do."""
        self._why = why
        self._seed = self._box_key = self._mask_key = b""
        self._held.clear()
        self._answers.clear()

    def _keys(self) -> bytes:
        self._seed, self._box_key, self._mask_key = (self._draw(KEY) for _ in range(3))
        own = commitment(self._context, self._me, self._seed)
        keys = Keys(public_of(self._box_key), public_of(self._mask_key), own, b"")
        self._own = keys._replace(signed=signature(self._private, "keys", *keys_parts(self._context, self._me, keys)))
        return b"".join(self._own)

    def _shares(self, listed: bytes) -> bytes:
        keys = read_list(listed)
        for member, theirs in keys.items():
            self._check_listed(member, theirs)
        if self._me not in keys:
            raise Refuses(f"member {self._me} is not in the list of keys")
        self._require_threshold("keys came", len(keys))
        self._attempt = started(self._terms, keys)
        holders, points = self._holders(keys), self._points()
        at, needed = [points[one] for one in holders], self._terms.neighbourhood.shares_needed
        both = zip(
            map(share_bytes, split(self._seed, at, needed, self._draw)),
            map(share_bytes, split(self._mask_key, at, needed, self._draw)),
            strict=True,
        )
        dealt = dict(zip(holders, both, strict=True))
        self._held[self._me] = dealt.pop(self._me)
        self._secrets = {one: self._common(one, keys[one]) for one in dealt}
        return b"".join(self._sealed(one, b"".join(two)) for one, two in dealt.items())

    def _check_listed(self, member: int, keys: Keys) -> None:
        if member not in self._terms.roster:
            raise Refuses(f"member {member} is not of the cohort")
        if member == self._me:
            if keys != self._own:
                raise Refuses("the list of keys has others for this member than its own")
        elif not is_authentic(self._terms, self._context, member, keys):
            raise Refuses(f"the keys of member {member} are not signed by it for this attempt")

    def _masked(self, request: bytes, words: Words) -> bytes:
        length = bits_length(len(self._cohort))
        self._second = frozenset(read_bits(request[:length], self._cohort, "the set to mask against"))
        if self._me not in self._second:
            raise Refuses(f"member {self._me} is not in the set to mask against")
        if not self._second <= self._attempt.keys.keys():
            raise Refuses("the set to mask against has members without keys")
        self._require_threshold("shares came", len(self._second))
        others = [one for one in self._holders(self._second) if one != self._me]
        require_length(request, length + BOX * len(others), "what came with the boxes")
        for one, box in zip(others, pieces(request[length:], BOX), strict=True):
            self._held[one] = self._opened(one, box)
        words += self._attempt.own_mask(self._me, self._seed)
        for one in others:
            mask = self._attempt.pair_mask(self._mask_key, self._me, one)
            (np.add if self._me < one else np.subtract)(words, mask, out=words)
        signed = signature(self._private, "masked", *masked_parts(self._attempt, self._second))
        return words.astype("<u4", copy=False).tobytes() + signed

    def _agree(self, request: bytes) -> bytes:
        self._third = frozenset(read_bits(request, self._cohort, "the set to sum"))
        if len(self._third) < self._terms.floor:
            raise Refuses(f"the set to sum has {len(self._third)} members, and the floor is {self._terms.floor}")
        if not self._third <= self._second:
            raise Refuses("the set to sum has members that were not masked against")
        if not self._attempt.holds_together(self._third):
            raise Refuses("the set to sum leaves a ring of neighbours that colluders could cut")
        return signature(self._private, "agree", *agreed_parts(self._attempt, self._second, self._third))

    def _unmask(self, request: bytes) -> bytes:
        length = bits_length(len(self._cohort))
        signers = read_bits(request[:length], self._cohort, "who agreed")
        if not self._second.issuperset(signers):
            raise Refuses("members agreed that were not masked against")
        self._require_threshold("agreed", len(signers))
        masked = [one for one in self._held if one in self._third and one != self._me]
        require_length(request, length + SIGNATURE * (len(signers) + len(masked)), "what came with the signatures")
        signed = pieces(request[length:], SIGNATURE)
        for one in signers:
            if not self._attempt.is_agreed(one, next(signed), self._second, self._third):
                raise Refuses(f"member {one} did not sign the set to sum that this member was shown")
        for one in sorted(masked):
            if not self._attempt.is_masked(one, next(signed), self._second):
                raise Refuses(f"member {one} did not sign that it masked against the same set")
        return b"".join(self._held[one][one not in self._third] for one in sorted(self._held))

    def _require_threshold(self, what: str, count: int) -> None:
        if count < self._terms.threshold:
            raise Refuses(f"{what} of {count} members, and {self._terms.threshold} are needed")

    def _points(self) -> dict[int, int]:
        return {one: place + 1 for place, one in enumerate(self._cohort)}

    def _holders(self, among: "frozenset[int] | dict[int, Keys]") -> tuple[int, ...]:
        """Returns who of these holds this member's shares; raises Refuses if they could not recover a secret."""
        holders = self._attempt.holders(self._me, among)
        if len(holders) < self._terms.neighbourhood.shares_needed:
            raise Refuses(f"{len(holders)} members hold shares of member {self._me}, too few to recover a secret")
        return holders

    def _common(self, member: int, keys: Keys) -> bytes:
        """Returns the secret for boxes from and to a member; raises Refuses if one of its keys is of no use."""
        if not (is_of_use(keys.mask) and is_of_use(keys.box)):
            raise Refuses(f"a key of member {member} is of low order")
        return common_secret(self._box_key, keys.box)

    def _sealed(self, receiver: int, content: bytes) -> bytes:
        parts = box_parts(self._attempt, self._me, receiver)
        return sealed(derived(self._secrets[receiver], "box", *parts), content, "box", *parts)

    def _opened(self, sender: int, box: bytes) -> tuple[bytes, bytes]:
        parts = box_parts(self._attempt, sender, self._me)
        content = opened(derived(self._secrets[sender], "box", *parts), box, "box", *parts)
        if content is None:
            raise Refuses(f"the box of member {sender} does not open")
        first, second = content[:SHARE], content[SHARE:]
        read_share(first), read_share(second)
        return first, second
