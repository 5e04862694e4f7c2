"""The first words of the embedded store's index: what belongs to the store and to no record.

Words 0 to 3 are the magic number and the sizes (`embedded_index`); 4 and 5 are a number of the
store's own; words 8 to 15 are below; counts follow from word 16 on. Each word is written by whoever
holds the store's lock, but for some counts, which may miss a few.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

HEADER_WORDS = 512
MAX_GAPS = 1 << 15
COUNTERS = (
    "evicted",
    "demoted",
    "promoted",
    "dropped",  # evicted from the last tier
    "corrupt",
    "full",
    "declined",
    "disk_full",
    "mended",  # recoveries after a process died
    "hits",
    "misses",
    "puts",
)

# What is to be done about files without a record
NOTHING, SWEEP, ADOPT = range(3)


class Header:
    """Words in memory that all processes share."""

    def __init__(self, words: NDArray[np.int64]) -> None:
        self._header = words

    def _word(self, at: int) -> int:
        return int(self._header[at])

    @property
    def store_id(self) -> str:
        """Of this store alone; made when it is first asked for, under the lock."""
        words = self._header[4:6]
        if not words.any():
            words[:] = np.frombuffer(os.urandom(16), dtype=np.int64)
        return words.tobytes().hex()

    @property
    def dirty(self) -> bool:
        return bool(self._header[8])

    @dirty.setter
    def dirty(self, value: bool) -> None:
        self._header[8] = value

    @property
    def gaps(self) -> int:
        return min(max(self._word(9), 0), MAX_GAPS)  # whatever another process wrote

    @gaps.setter
    def gaps(self, value: int) -> None:
        self._header[9] = value

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that are backed by memory."""
        return self._word(10)

    @arena_bytes.setter
    def arena_bytes(self, value: int) -> None:
        self._header[10] = value

    @property
    def gaps_stale(self) -> bool:
        """Whether extents were given up since the gaps were found."""
        return bool(self._header[11])

    @gaps_stale.setter
    def gaps_stale(self, value: bool) -> None:
        self._header[11] = value

    @property
    def bar(self) -> tuple[float, float]:
        """Score of the last victim, and when that was."""
        score, when = self._header[12:14].view(np.float64).tolist()
        return score, when

    @bar.setter
    def bar(self, value: tuple[float, float]) -> None:
        self._header[12:14].view(np.float64)[:] = value

    @property
    def files_due(self) -> int:
        """SWEEP: files may lie there that no record names, and go. ADOPT: they are taken in."""
        return min(max(self._word(14), NOTHING), ADOPT)

    @files_due.setter
    def files_due(self, value: int) -> None:
        self._header[14] = value

    @property
    def files_by(self) -> int:
        """The member that is at it, or 0."""
        return self._word(15)

    @files_by.setter
    def files_by(self, value: int) -> None:
        self._header[15] = value

    def count(self, name: str, by: int = 1) -> None:
        self._header[16 + COUNTERS.index(name)] += by

    def counters(self) -> dict[str, int]:
        return {name: self._word(16 + at) for at, name in enumerate(COUNTERS)}
