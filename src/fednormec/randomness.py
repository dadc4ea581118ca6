"""All randomness comes from one function, addressed by (seed, purpose, round, client)."""

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A counter-based generator that depends on its address alone, not on who drew before.

    The 128-bit key is a hash of the address, so that millions of addresses do not collide
    (torch's own CPU generator keeps only 32 bits of its seed).

    >>> generator(1, "cohort", 7).random() == generator(1, "cohort", 7).random()
    True
    >>> generator(1, "cohort", 7).random() == generator(1, "cohort", 8).random()
    False
    """
    text = "/".join([str(seed), purpose, *map(str, address)])
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))
