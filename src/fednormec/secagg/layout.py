"""What crosses between a member and the server, in bytes. All numbers are big-endian, but for the words of a vector.

| stage | a member sends | the server sends before it |
|---|---|---|
| keys | box key, mask key, commitment (32 each), signature (64) | nothing |
| shares | a box (82) for each neighbour | number (4) and keys (160) of each member of U1 |
| masked | the words (4 each, little end first), signature | U2 as bits; the box of each neighbour in U2 |
| agree | signature | U3 as bits |
| unmask | a share (33) for itself and each neighbour in U2 | signers as bits, the signature of each; the signature of \
the masked vector of each neighbour in U3 |

What is of several members comes in their ascending order. Bits are those of the cohort in ascending order, the first in
the highest bit, filled up with zeros.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fednormec.secagg.ciphers import KEY, SIGNATURE, TAG, digest
from fednormec.secagg.sharing import PRIME, SHARE

NUMBER = 4
KEYS = 3 * KEY + SIGNATURE
BOX = 2 * SHARE + TAG


class Refuses(Exception):
    """Reason why a member does not answer, or why something that came is not taken."""


class Keys(NamedTuple):
    """Keys of a member for one attempt.

    Attributes:
        box: X25519 public key for boxes.
        mask: X25519 public key for masks.
        commitment: digest of the seed of its own mask.
        signed: signature of the others by its roster key.
    """

    box: bytes
    mask: bytes
    commitment: bytes
    signed: bytes


def read_keys(data: bytes) -> Keys:
    """Returns the keys that were sent; raises Refuses if they are none."""
    require_length(data, KEYS, "its keys")
    return Keys(data[:KEY], data[KEY : 2 * KEY], data[2 * KEY : 3 * KEY], data[3 * KEY :])


def list_bytes(keys: dict[int, Keys]) -> bytes:
    """Returns the list of members and their keys."""
    return b"".join(one.to_bytes(NUMBER, "big") + b"".join(keys[one]) for one in sorted(keys))


def read_list(data: bytes) -> dict[int, Keys]:
    """Returns the members and their keys; raises Refuses if the list is none, or not ascending."""
    if len(data) % (NUMBER + KEYS):
        raise Refuses(f"the list of keys has {len(data)} bytes, which is no whole number of entries")
    found, last = dict[int, Keys](), -1
    for entry in pieces(data, NUMBER + KEYS):
        member = int.from_bytes(entry[:NUMBER], "big")
        if member <= last:
            raise Refuses(f"member {member} is in the list of keys twice, or not in its place")
        found[member], last = read_keys(entry[NUMBER:]), member
    return found


def transcript_of(context: bytes, listed: bytes) -> bytes:
    """Returns the digest of the terms and of all keys; all that follows is bound to it."""
    return digest("transcript", context, listed)


def bits_of(members: Collection[int], cohort: Sequence[int]) -> bytes:
    """Returns which of the cohort are among these members, a bit for each.

    >>> bits_of({2, 9}, (2, 5, 9)).hex()
    'a0'
    """
    chosen = set(members)
    return np.packbits([one in chosen for one in cohort]).tobytes()


def read_bits(data: bytes, cohort: Sequence[int], what: str) -> tuple[int, ...]:
    """Returns the members that the bits name; raises Refuses if there are more or fewer bits than the cohort has."""
    require_length(data, bits_length(len(cohort)), what)
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    if bits[len(cohort) :].any():
        raise Refuses(f"{what} names members beyond the cohort")
    return tuple(one for one, bit in zip(cohort, bits, strict=False) if bit)


def bits_length(n: int) -> int:
    """Returns the number of bytes with a bit for each of n members."""
    return (n + 7) // 8


def share_bytes(share: int) -> bytes:
    """Returns a share as bytes."""
    return share.to_bytes(SHARE, "big")


def read_share(data: bytes) -> int:
    """Returns the share in 33 bytes; raises Refuses if it is no number of the field."""
    share = int.from_bytes(data, "big")
    if share >= PRIME:
        raise Refuses("a share is no number of the field")
    return share


def pieces(data: bytes, length: int) -> Iterator[bytes]:
    """Yields one piece of this length after another."""
    return (data[at : at + length] for at in range(0, len(data), length))


def require_length(data: bytes, length: int, what: str) -> None:
    """Raises Refuses if there are not so many bytes."""
    if len(data) != length:
        raise Refuses(f"{what} has {len(data)} bytes, not {length}")


def upload_bytes(n: int, neighbours: int, width: int) -> int:
    """Returns the number of bytes that a member sends in an attempt in which nobody drops out.

    160 + 82 k + (4 width + 64) + 64 + 33 (k + 1) with k neighbours, n - 1 of them at most.

    >>> upload_bytes(10, 9, 25_000)
    101356

    Args:
        n: number of members of the cohort.
        neighbours: number of neighbours of each, as `neighbourhood` returns it.
        width: number of words in a vector.
    """
    k = min(neighbours, n - 1)
    return KEYS + BOX * k + 4 * width + SIGNATURE + SIGNATURE + SHARE * (k + 1)
