# SPDX-License-Identifier: Apache-2.0
"""`mix128`: a checksum that a GPU makes of its own memory, as fast as it reads it.

Each word of 8 bytes is mixed with its position, and the results are added up. So any number of
threads can take part, in any order:

    runs are padded with zeros to whole words; words are numbered through all runs
    h = scramble(word ^ (number x A + B))      one to one for each number: a wrong word changes it
    g = scramble again                         a second sum, of other bits
    digest = xxh3 of (sum of h, sum of g, the runs' lengths)

It finds accidents, not malice: an attacker can construct words that go unseen. A GPU computes it in
cuda/staging.py; this module defines it in NumPy, for memory of any kind.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.carriers.base import Bytes, Memory, slices
from kvferry.carriers.host import copy_runs
from kvferry.copies import Copies, Ints

NAME = "mix128"
WORD_BYTES = 8
NUMBER_FACTOR, NUMBER_TERM = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
FIRST_FACTOR, SECOND_FACTOR = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
AGAIN_FACTOR = 0xBF58476D1CE4E5B9
_CHUNK_BYTES = 1 << 20  # gathered at a time: whole words
_MASK = (1 << 64) - 1

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Mixed:
    """Both sums, and the number of words in them."""

    first: int = 0
    second: int = 0
    words: int = 0

    def plus(self, other: Mixed) -> Mixed:
        """Add the sums of the words that follow, which were mixed with their own numbers."""
        return Mixed(
            (self.first + other.first) & _MASK,
            (self.second + other.second) & _MASK,
            self.words + other.words,
        )

    def digest(self, length: Ints) -> bytes:
        """The digest of runs of these lengths."""
        sums = struct.pack("<QQ", self.first, self.second)
        return xxhash.xxh3_128_digest(sums + length.astype("<i8").tobytes())


class MixingMemory(Memory):
    """Memory whose device computes the sums."""

    @abstractmethod
    def mix(self, address: Ints, length: Ints) -> Mixed: ...


def mix_on_host(memory: Memory, address: Ints, length: Ints) -> Mixed:
    """The same result as `MixingMemory.mix`, computed by the processor."""
    total = Mixed()
    buffer = np.empty(_CHUNK_BYTES, dtype=np.uint8)
    for part in slices(Copies(address, address, length), _CHUNK_BYTES):
        memory.gather(part.src, part.length, buffer)
        total = total.plus(mix_words(_padded(buffer, part.length), total.words))
    return total


def mix_words(words: Words, number: int) -> Mixed:
    """The sums of words that are numbered from `number` on."""
    h = np.arange(number, number + len(words), dtype=np.uint64)
    h *= np.uint64(NUMBER_FACTOR)
    h += np.uint64(NUMBER_TERM)
    h ^= words
    h ^= h >> np.uint64(32)
    h *= np.uint64(FIRST_FACTOR)
    h ^= h >> np.uint64(29)
    h *= np.uint64(SECOND_FACTOR)
    h ^= h >> np.uint64(32)
    g = h >> np.uint64(31)
    g ^= h
    g *= np.uint64(AGAIN_FACTOR)
    g ^= g >> np.uint64(33)
    return Mixed(int(np.add.reduce(h)), int(np.add.reduce(g)), len(words))


def _padded(dense: Bytes, length: Ints) -> Words:
    """The runs' bytes from a dense buffer, each run padded to whole words."""
    counts = -(-length // WORD_BYTES)
    ends = np.cumsum(counts)
    if int(ends[-1]) * WORD_BYTES == int(length.sum()):
        return dense[: int(ends[-1]) * WORD_BYTES].view("<u8")
    padded = np.zeros(int(ends[-1]) * WORD_BYTES, dtype=np.uint8)
    begins = dense.ctypes.data + np.cumsum(length) - length
    copy_runs(begins, padded.ctypes.data + (ends - counts) * WORD_BYTES, length)
    return padded.view("<u8")
