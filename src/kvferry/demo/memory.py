"""The memory of the demo's ranks: one mapping a rank, private or shared; or on a GPU, with a copy
in a private mapping.

Shared memory is a file without a name that child processes inherit, so that it needs no cleaning
up and no room in /dev/shm, which containers keep small.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.layout.rank import RankLayout
from kvferry.transport.scatter import copy_scattered

if TYPE_CHECKING:
    from kvferry.demo.on_gpu import OnGpu

PAGE_BYTES = 4096
MAP_NORESERVE = 0x4000  # blocks that no request uses are never touched

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Memory without a name, which child processes inherit: it ends with the last that has it."""

    descriptor: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (DupFd(self.descriptor),)


def _inherited(duplicate: Any) -> SharedFile:
    return SharedFile(duplicate.detach())


@dataclass(slots=True, eq=False)
class Memory:
    """One mapping that holds all regions of a rank, and its views."""

    layout: RankLayout
    bytes: Bytes
    starts: Ints
    on_gpu: OnGpu | None = None  # then `bytes` is a copy

    @classmethod
    def map(cls, layout: RankLayout, file: int | None, *, on_gpu: bool = False) -> Memory:
        starts = region_starts(layout)
        total = max(int(starts[-1]), PAGE_BYTES)  # a stage may cache nothing
        if file is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            mapped = mmap.mmap(-1, total, flags=flags)
        else:
            if os.fstat(file).st_size < total:
                os.ftruncate(file, total)
            mapped = mmap.mmap(file, total, flags=mmap.MAP_SHARED)
        found = cls(layout, np.frombuffer(mapped, dtype=np.uint8), starts[:-1])
        if on_gpu:
            from kvferry.demo.on_gpu import OnGpu

            found.on_gpu = OnGpu(total)
        return found

    @property
    def address(self) -> int:
        """Where carriers find it."""
        return self.on_gpu.address if self.on_gpu else self.bytes.ctypes.data

    def publish(self) -> None:
        """What was written to `bytes` is what carriers find."""
        if self.on_gpu:
            self.on_gpu.upload(self.bytes)

    def fetch(self) -> None:
        """What carriers wrote is in `bytes`."""
        if self.on_gpu:
            self.on_gpu.download(self.bytes)

    def zero(self, offset: Ints, length: Ints) -> None:
        if self.on_gpu:
            self.on_gpu.zero(offset, length)
            return
        zeros = np.zeros(int(length.max(initial=1)), dtype=np.uint8)
        copy_scattered(zeros, np.zeros_like(offset), self.bytes, offset, length)

    @property
    def bases(self) -> Ints:
        return self.starts + self.address

    def regions(self) -> dict[str, Bytes]:
        return {
            region.name: self.bytes[start : start + region.bytes]
            for region, start in zip(self.layout.regions, self.starts.tolist(), strict=True)
        }


def region_starts(layout: RankLayout) -> Ints:
    """Where each region begins in a rank's mapping, and where the mapping ends."""
    sizes = [-(-region.bytes // PAGE_BYTES) * PAGE_BYTES for region in layout.regions]
    return np.cumsum([0, *sizes], dtype=np.int64)
