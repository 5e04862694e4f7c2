"""Tables of (address, length) as the kernel takes them, made by NumPy and resumed anywhere.

A table describes a stream of bytes: the ranges one after another. A system call takes at most
`VECTORS_PER_CALL` of them and moves what it likes; `Vectors` remembers how far the stream has come
and cuts the range that it stopped in. Python runs once per call, never per range.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np

from kvferry.transport.base import Ints

VECTORS_PER_CALL = 1024  # Linux's UIO_MAXIOV
IOVEC_BYTES = 16
SAMPLE = 512  # pairs of neighbours looked at before all are


@dataclass(slots=True)
class Vectors:
    """A stream of bytes as an iovec table, and how far it has come."""

    table: Ints  # (n, 2): address, length
    ends: Ints  # bytes of the stream up to the end of each vector
    first: int = 0  # vector that the next call begins with

    @classmethod
    def join(cls, address: Ints, length: Ints) -> Vectors:
        """The table of these ranges, none of them empty, with neighbours made one."""
        return cls.of(*joined(address, length))

    @classmethod
    def of(cls, address: Ints, length: Ints) -> Vectors:
        """The table of these ranges as they are."""
        table = np.empty((len(address), 2), dtype=np.int64)
        table[:, 0] = address
        table[:, 1] = length
        return cls(table, np.cumsum(length))

    @property
    def bytes(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def head(self) -> tuple[int, int]:
        """Where the next call's vectors lie, and how many there are."""
        count = min(VECTORS_PER_CALL, len(self.table) - self.first)
        return self.table.ctypes.data + IOVEC_BYTES * self.first, count

    def advance(self, done: int) -> None:
        """Go to byte `done` of the stream, cutting the vector that it falls into."""
        self.first = int(np.searchsorted(self.ends, done, side="right"))
        if self.first < len(self.table):
            vector = self.table[self.first]
            left = int(self.ends[self.first]) - done
            vector[0] += vector[1] - left
            vector[1] = left


def joined(address: Ints, length: Ints) -> tuple[Ints, Ints]:
    """The same bytes in the same order, with ranges that touch made one. None may be empty."""
    if len(length) < 2 or _apart(address, length):
        return address, length
    apart = np.flatnonzero(address[1:] != address[:-1] + length[:-1]) + 1
    if len(apart) + 1 == len(address):  # nothing to join, as is usual for scattered blocks
        return address, length
    heads = np.concatenate((np.zeros(1, dtype=np.int64), apart))
    return address[heads], np.add.reduceat(length, heads)


def _apart(address: Ints, length: Ints) -> bool:
    """Whether, of many ranges, no two touch as far as some of them show: then few do."""
    step = len(length) // SAMPLE
    if step < 2:
        return False
    return bool((address[1::step] != (address[:-1:step] + length[:-1:step])).all())


@cache
def libc() -> ctypes.CDLL:
    """The C library; its calls release the interpreter's lock."""
    return ctypes.CDLL(None, use_errno=True)
