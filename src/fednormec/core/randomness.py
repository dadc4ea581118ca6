"""Randomness, all of it: addressed by (seed, stream, purpose, round, client), or from the operating system."""

import hashlib
import math
import operator
import os
from collections.abc import Callable
from typing import Protocol

import numpy as np


class Source(Protocol):
    """Source of cohorts and noise: numpy's Generator, or SecureSource."""

    def random(self, size: int, /) -> np.ndarray:
        """Uniform numbers in [0, 1)."""

    def standard_normal(self, size: int, /) -> np.ndarray:
        """Independent standard normal numbers."""


def generator(seed: int, purpose: str, *place: int, stream: int = 0) -> np.random.Generator:
    """Returns a counter-based generator that depends on its address alone, not on who drew before.

    The address is (seed, stream, purpose, place). The 128-bit key is a hash of it, so that millions of addresses do not
    collide (torch's own CPU generator keeps only 32 bits of its seed).

    Args:
        seed: seed of the run.
        purpose: words that say what the numbers are for.
        place: nothing, a round, or a round and a client.
        stream: which of several runs with the same seed.

    >>> generator(1, "cohort", 7).random() == generator(1, "cohort", 7).random()
    True
    >>> generator(1, "cohort", 7).random() == generator(1, "cohort", 8).random()
    False
    """
    key = int.from_bytes(
        hashlib.blake2b(address(seed, purpose, *place, stream=stream), digest_size=16).digest(), "little"
    )
    return np.random.Generator(np.random.Philox(key=key))


def address(seed: int, purpose: str, *place: int, stream: int = 0) -> bytes:
    """Returns the address as bytes; no two addresses give the same.

    A purpose is words, numbers are digits, and the stream has a sign before it that neither has. Stream 0 is not
    written.

    >>> address(7, "noise", 3, 5), address(7, "noise", 5, stream=3)
    (b'7/noise/3/5', b'7:3/noise/5')
    """
    if not all(part.isalnum() for word in purpose.split(" ") for part in word.split("_")):
        raise ValueError(f"a purpose is words, not {purpose!r}")
    numbers = (operator.index(number) for number in place)
    own = f":{operator.index(stream)}" if stream else ""
    return "/".join([f"{operator.index(seed)}{own}", purpose, *map(str, numbers)]).encode()


class SecureSource:
    """Source that nobody can predict or repeat: AES-256 in counter mode under a key from the operating system.

    Every call takes a fresh key, so a forked or restored process repeats nothing. Normal numbers are sums of four
    independent Box-Muller draws: one draw leaves only so many floating-point numbers possible that an observer can tell
    some sums apart, four hide that (Holohan and Braghin, arXiv 2107.10138).
    """

    def words(self, size: int, /) -> np.ndarray:
        """Uniform uint64 words."""
        return _keystream(size)

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


def words_of(source: Source) -> Callable[[int], np.ndarray]:
    """Returns the function that draws so many independent uniform uint64 words from a source.

    Raises TypeError if the source is neither a SecureSource nor a Generator on Philox: `random_raw` of another may
    leave bits of a word empty (MT19937's has 32).

    >>> words_of(generator(1, "cohort", 7))(2)
    array([17254327382153918630, 15291499118137053568], dtype=uint64)
    """
    if isinstance(source, SecureSource):
        return source.words
    if isinstance(source, np.random.Generator) and isinstance(source.bit_generator, np.random.Philox):
        return source.bit_generator.random_raw
    raise TypeError(f"words come from a SecureSource or a Generator on Philox, not from {source!r}")


def _keystream(words: int, key: bytes | None = None) -> np.ndarray:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES256(os.urandom(32) if key is None else key), modes.CTR(bytes(16)))
    return np.frombuffer(cipher.encryptor().update(bytes(8 * words)), np.uint64)
