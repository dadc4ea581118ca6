"""All randomness comes from here: addressed by (seed, purpose, round, client), or from the operating system."""

import hashlib
import math
import os
from typing import Protocol

import numpy as np


class Source(Protocol):
    """What cohorts and noise are drawn from: numpy's Generator, or SecureSource."""

    def random(self, size: int, /) -> np.ndarray:
        """Uniform numbers in [0, 1)."""

    def standard_normal(self, size: int, /) -> np.ndarray:
        """Independent standard normal numbers."""


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


class SecureSource:
    """Numbers nobody can predict or repeat: AES-256 in counter mode under a key from the operating system.

    Every call takes a fresh key, so a forked or restored process repeats nothing. Normal numbers are sums of four
    independent Box-Muller draws: one draw leaves only so many floating-point numbers possible that an observer can
    tell some sums apart, four hide that (Holohan and Braghin, arXiv 2107.10138).
    """

    def random(self, size: int, /) -> np.ndarray:
        return (_keystream(size) >> np.uint64(11)) * 2.0**-53

    def standard_normal(self, size: int, /) -> np.ndarray:
        import torch  # its logarithms and cosines are several times faster than numpy's

        pairs = -(-size // 2)
        total = torch.zeros(2, pairs, dtype=torch.float64)
        for _ in range(4):
            length, angle = torch.from_numpy(self.random(2 * pairs)).view(2, pairs)
            length = length.neg_().log1p_().mul_(-2).sqrt_()  # 1 - uniform is never 0
            angle = angle.mul_(2 * math.pi)
            total[0].addcmul_(length, angle.cos())
            total[1].addcmul_(length, angle.sin_())
        draw: np.ndarray = total.view(-1)[:size].numpy() / 2
        return draw


def _keystream(words: int, key: bytes | None = None) -> np.ndarray:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES256(os.urandom(32) if key is None else key), modes.CTR(bytes(16)))
    return np.frombuffer(cipher.encryptor().update(bytes(8 * words)), np.uint64)
