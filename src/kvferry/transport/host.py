"""This process's own memory, by address."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import OutOfBounds
from kvferry.transport.base import MemoryRegion

Ints = NDArray[np.int64]
CHUNK_BYTES = 1 << 20  # zeroed by one NumPy call


class HostMemory:
    """Regions of host memory as arrays of bytes."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        ordered = sorted(regions, key=lambda r: r.address)
        self._starts = np.asarray([r.address for r in ordered], dtype=np.int64)
        self._views = [
            np.ctypeslib.as_array((ctypes.c_uint8 * r.bytes).from_address(r.address))
            for r in ordered
        ]

    def zero(self, address: Ints, length: Ints) -> None:
        """Set ranges to zero; equal lengths go together."""
        which = np.searchsorted(self._starts, address, side="right") - 1
        for region in np.unique(which).tolist():
            mine = which == region
            self._zero(region, address[mine], length[mine])

    def _zero(self, region: int, address: Ints, length: Ints) -> None:
        view = self._views[region] if region >= 0 else np.empty(0, dtype=np.uint8)
        offsets = address - self._starts[max(region, 0)]
        if region < 0 or int((offsets + length).max()) > len(view):
            raise OutOfBounds("a range to be zeroed lies outside of the registered memory")
        for size in np.unique(length).tolist():
            starts = offsets[length == size]
            step = max(1, CHUNK_BYTES // max(1, size))
            within = np.arange(size, dtype=np.int64)
            for first in range(0, len(starts), step):
                view[starts[first : first + step, None] + within] = 0
