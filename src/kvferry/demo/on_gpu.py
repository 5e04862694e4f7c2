"""A rank's memory on a GPU, for the carrier that moves nothing else. What the demo writes and
compares is a copy on the host, which goes there before bytes move and comes back after."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.cuda_driver import device
from kvferry.transport.staging import DeviceMemory


class OnGpu:
    """As long as its process lives."""

    def __init__(self, size: int) -> None:
        on = device(0)
        with on.current():
            self.address = on.allocate(size)
        self._memory = DeviceMemory([MemoryRegion(self.address, size)])
        self._whole = np.array([self.address]), np.array([size])

    def upload(self, source: NDArray[np.uint8]) -> None:
        self._memory.scatter(source, *self._whole)

    def download(self, into: NDArray[np.uint8]) -> None:
        self._memory.gather(*self._whole, into)

    def zero(self, offset: Ints, length: Ints) -> None:
        self._memory.zero(offset + self.address, length)
