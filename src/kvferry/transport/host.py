"""This process's own memory, by address: gathered, scattered and zeroed without a Python loop.

All regions are seen as one array of bytes that spans them, gaps included; ranges are checked
against the regions first, so nothing in a gap is ever touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from kvferry.errors import OutOfBounds, TransferError
from kvferry.transport.base import MemoryRegion
from kvferry.transport.iovec import joined
from kvferry.transport.memory import Bytes, Ints
from kvferry.transport.regions import WINDOW, RegionTable
from kvferry.transport.scatter import CHUNK_BYTES, copy_runs

ZEROS = np.zeros(CHUNK_BYTES, dtype=np.uint8)


class HostMemory:
    """Regions of host memory. Implements `memory.Memory`."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._table = RegionTable.of(regions)
        self._base, span = 0, 0
        if len(self._table):
            self._base = int(self._table.starts[0])
            span = int(self._table.ends.max()) - self._base
        self._bytes: Bytes = np.ctypeslib.as_array(
            (ctypes.c_uint8 * span).from_address(self._base or ctypes.addressof(_nowhere))
        )

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None:
        """The runs, one after another, to the beginning of `into`."""
        self._require(address, length, into)
        done = 0
        for first in range(0, len(address), WINDOW):
            runs, sizes = _some(address, length, first)
            where = done + np.cumsum(sizes) - sizes
            copy_runs(self._bytes, runs - self._base, into, where, sizes)
            done += int(sizes.sum())

    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None:
        """The beginning of `source` to the runs, in their order."""
        self._require(address, length, source)
        done = 0
        for first in range(0, len(address), WINDOW):
            runs, sizes = _some(address, length, first)
            where = done + np.cumsum(sizes) - sizes
            copy_runs(source, where, self._bytes, runs - self._base, sizes)
            done += int(sizes.sum())

    def place(self, source: Bytes, at: Ints, address: Ints, length: Ints) -> None:
        """Runs of `source`, from anywhere in it, to runs of this memory. One window at most."""
        self._require(address, length, None)
        if len(at) and (int(at.min()) < 0 or int((at + length).max()) > len(source)):
            raise TransferError(f"a run leaves its buffer of {len(source)} bytes")
        copy_runs(source, at, self._bytes, address - self._base, length)

    def zero(self, address: Ints, length: Ints) -> None:
        """Set ranges to zero."""
        self._require(address, length, None)
        for first in range(0, len(address), WINDOW):
            runs, sizes = _some(address, length, first)
            short = sizes <= CHUNK_BYTES
            nowhere = np.zeros(int(np.count_nonzero(short)), dtype=np.int64)
            copy_runs(ZEROS, nowhere, self._bytes, runs[short] - self._base, sizes[short])
            for at, size in zip(runs[~short].tolist(), sizes[~short].tolist(), strict=True):
                for begin in range(at - self._base, at - self._base + size, CHUNK_BYTES):
                    self._bytes[begin : min(begin + CHUNK_BYTES, at - self._base + size)] = 0

    def _require(self, address: Ints, length: Ints, buffer: Bytes | None) -> None:
        total = 0
        for first in range(0, len(address), WINDOW):
            part = slice(first, first + WINDOW)
            bad = self._table.first_outside(address[part], length[part])
            if bad >= 0:
                raise OutOfBounds(
                    f"{int(length[first + bad])} bytes at {int(address[first + bad]):#x} are "
                    f"outside of the registered memory ({len(self._table)} regions)"
                )
            total += int(length[part].sum())
        if buffer is not None and total > len(buffer):
            raise TransferError(f"runs of {total} bytes and a buffer of {len(buffer)}")


_nowhere = ctypes.c_uint8()


def _some(address: Ints, length: Ints, first: int) -> tuple[Ints, Ints]:
    """One window of the runs; neighbours are one run."""
    part = slice(first, first + WINDOW)
    runs, sizes = address[part], length[part]
    if not bool(sizes.all()):
        some = sizes != 0
        runs, sizes = runs[some], sizes[some]
    return joined(runs, sizes)
