"""The server's side of the sum: it passes on, counts and unmasks. Nothing of the members' secrecy rests on it.

A member that sends what it should not, or nothing, is left out of what follows.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar, final

import numpy as np

from fednormec.secagg.ciphers import SIGNATURE, Words, is_of_use, public_of
from fednormec.secagg.layout import (
    BOX,
    Keys,
    Refuses,
    list_bytes,
    pieces,
    read_keys,
    read_share,
    require_length,
)  # fmt: skip
from fednormec.secagg.masks import commitment, is_authentic, started
from fednormec.secagg.sharing import SHARE, Recovery
from fednormec.secagg.terms import Terms

Read = TypeVar("Read")
STAGES = ("keys", "shares", "masked", "agree", "unmask")


class TooFew(Exception):
    """End of an attempt without a sum: so many members are gone, or sent something wrong, that it cannot be made."""


class Total(NamedTuple):
    """Sum of the vectors.

    Attributes:
        words: the sum modulo 2^32, word by word.
        members: whose vectors are in it, ascending.
    """

    words: Words
    members: tuple[int, ...]


@final
class Aggregator:
    """Server of one attempt at one sum. Its five methods are called once each, in this order.

    Each takes what members sent at the stage of that name and returns what to send to each of them next; the last one
    returns the sum. All raise TooFew if too few members are left. Members that were not asked are passed over.

    Attributes:
        refused: why what a member sent was not taken, by its number.

    Args:
        terms: terms of this attempt.
    """

    def __init__(self, terms: Terms) -> None:
        self.refused = dict[int, str]()
        self._terms, self._done = terms.checked(), 0
        self._context = terms.context
        self._asked: Collection[int] = terms.cohort

    def keys(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Returns the list of keys for each member whose keys are right."""
        keys = self._read("keys", sent, self._keys_of)
        self._require("keys of {} members came", len(keys))
        self._attempt = started(self._terms, keys)
        self._asked, listed = tuple(keys), list_bytes(keys)
        self._near = {one: self._attempt.holders(one, keys) for one in keys}
        return dict.fromkeys(keys, listed)

    def shares(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Returns, for each member whose boxes came, the set of those members and its neighbours' boxes for it."""
        boxes = self._read("shares", sent, self._boxes_of)
        self._second = self._not_alone(boxes)
        self._require("shares of {} members came", len(self._second))
        self._asked = tuple(sorted(self._second))
        self._held = {one: tuple(near for near in self._near[one] if near in self._second) for one in self._asked}
        bits = self._attempt.bits(self._second)
        return {one: bits + b"".join(boxes[by][one] for by in self._held[one] if by != one) for one in self._asked}

    def masked(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Returns the set of members whose vectors came, for each that masked: a late one may still agree.

        The masked vectors are added here, and not kept.
        """
        self._words = np.zeros(self._terms.width, np.uint32)
        self._signed = self._read("masked", sent, self._add)
        self._third = frozenset(self._signed)
        self._require("vectors of {} members came", len(self._third), self._terms.floor)
        if not self._attempt.holds_together(self._third):
            raise TooFew("the members that are left are spread so thin on the ring that no member would unmask them")
        return dict.fromkeys(self._asked, self._attempt.bits(self._third))

    def agree(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Returns, for each member that agreed, enough signatures of the set and those of its neighbours' vectors."""
        signed = self._read("agree", sent, self._agreed)
        self._require("{} members agreed", len(signed))
        shown = sorted(signed)[: self._terms.threshold]
        start = self._attempt.bits(shown) + b"".join(signed[one] for one in shown)
        self._asked = tuple(signed)
        return {one: start + b"".join(self._signatures_for(one)) for one in signed}

    def unmask(self, sent: Mapping[int, bytes]) -> Total:
        """Returns the sum. Wrong shares are found, as every secret can be recognised, and noted in `refused`."""
        given = self._read("unmask", sent, self._shares_of)
        points = {one: place + 1 for place, one in enumerate(self._terms.cohort)}
        shares: dict[int, dict[int, int]] = {one: {} for one in self._second}
        for holder, of in given.items():
            for one, share in of.items():
                shares[one][points[holder]] = share
        recovery = Recovery(self._terms.neighbourhood.shares_needed)
        for one in sorted(self._third):
            seed = self._secret(recovery, one, shares[one], self._is_seed(one))
            self._words -= self._attempt.own_mask(one, seed)
        for one in sorted(self._second - self._third):
            self._take_away(recovery, one, shares[one])
        for one in self._terms.cohort:
            if points[one] in recovery.liars:
                self.refused.setdefault(one, "a share that it sent is not the one that others agree with")
        return Total(self._words, tuple(sorted(self._third)))

    def _read(self, stage: str, sent: Mapping[int, bytes], read: Callable[[int, bytes], Read]) -> dict[int, Read]:
        if STAGES[self._done : self._done + 1] != (stage,):
            raise RuntimeError(f"the stage {stage} is out of order: each is called once, in the order {STAGES}.")
        self._done += 1
        found = dict[int, Read]()
        for one in sorted(set(self._asked) & sent.keys()):
            try:
                found[one] = read(one, bytes(sent[one]))
            except Refuses as error:
                self.refused[one] = f"{stage}: {error}"
        return found

    def _require(self, what: str, count: int, needed: int | None = None) -> None:
        needed = self._terms.threshold if needed is None else needed
        if count < needed:
            raise TooFew(f"{what.format(count)}, and {needed} are needed: there is no sum in this attempt")

    def _keys_of(self, member: int, data: bytes) -> Keys:
        keys = read_keys(data)
        if not is_authentic(self._terms, self._context, member, keys):
            raise Refuses("its keys are not signed by it for this attempt")
        if not is_of_use(keys.box) or not is_of_use(keys.mask):
            raise Refuses("one of its keys is of low order")
        return keys

    def _boxes_of(self, member: int, data: bytes) -> dict[int, bytes]:
        others = [one for one in self._near[member] if one != member]
        require_length(data, BOX * len(others), "its boxes")
        return dict(zip(others, pieces(data, BOX), strict=True))

    def _not_alone(self, members: Iterable[int]) -> frozenset[int]:
        """Returns the members of whose secrets enough shares are left, given who else is left out for that."""
        left, before = frozenset(members), frozenset[int]()
        if all(len(near) == len(self._near) for near in self._near.values()):
            return left  # everyone holds shares of everyone: the threshold says what is too few, and blames nobody
        while left != before:
            before, needed = left, self._terms.neighbourhood.shares_needed
            left = frozenset(one for one in before if len(before.intersection(self._near[one])) >= needed)
            for one in before - left:
                self.refused[one] = "shares: too few of its neighbours are left"
        return left

    def _add(self, member: int, data: bytes) -> bytes:
        length = 4 * self._terms.width
        require_length(data, length + SIGNATURE, "its masked vector")
        signed = data[length:]
        if not self._attempt.is_masked(member, signed, self._second):
            raise Refuses("its masked vector is not signed for the set that it was given")
        self._words += np.frombuffer(data[:length], "<u4")
        return signed

    def _agreed(self, member: int, data: bytes) -> bytes:
        if not self._attempt.is_agreed(member, data, self._second, self._third):
            raise Refuses("it did not sign the set that it was given")
        return data

    def _signatures_for(self, member: int) -> Iterable[bytes]:
        return (self._signed[one] for one in self._held[member] if one in self._third and one != member)

    def _shares_of(self, member: int, data: bytes) -> dict[int, int]:
        require_length(data, SHARE * len(self._held[member]), "its shares")
        return dict(zip(self._held[member], map(read_share, pieces(data, SHARE)), strict=True))

    def _secret(
        self, recovery: Recovery, member: int, shares: Mapping[int, int], is_right: Callable[[bytes], bool]
    ) -> bytes:
        if len(shares) < recovery.needed:
            raise TooFew(f"{len(shares)} shares of member {member} came, and {recovery.needed} are needed")
        found = recovery.secret(shares, is_right)
        if found is None:
            raise TooFew(
                f"the shares of member {member} do not fit together: it, or those who hold them, sent wrong ones"
            )
        return found

    def _is_seed(self, member: int) -> Callable[[bytes], bool]:
        expected = self._attempt.keys[member].commitment
        return lambda seed: commitment(self._context, member, seed) == expected

    def _take_away(self, recovery: Recovery, gone: int, shares: Mapping[int, int]) -> None:
        """Takes the masks that others have with a member that dropped out from the sum."""
        near = [one for one in self._held[gone] if one in self._third]
        if not near:
            return
        expected = self._attempt.keys[gone].mask
        private = self._secret(recovery, gone, shares, lambda key: public_of(key) == expected)
        for one in near:
            mask = self._attempt.pair_mask(private, gone, one)
            (np.subtract if one < gone else np.add)(self._words, mask, out=self._words)
