# SPDX-License-Identifier: Apache-2.0
"""The `Store` protocol: objects of bytes by key, written once, read whole or in ranges.

An object is all that one rank wrote of one block of one group; its bytes never change. The store
reads and writes registered memory of this process, by address, without extra copies. All methods
take batches, may be called from any thread (`register` by one at a time), and end by their deadline
(absolute, on `time.monotonic()`). If one object fails, its outcome says so, and the rest of the
batch continues. Only a failure of the whole call (the store cannot be reached) raises `StoreError`.

A store keeps whole objects only: after a crash at any point, an object exists with all its bytes or
not at all. The embedded store and `CheckedStore` check each range that they read against the bytes
that were written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvferry.carriers.base import MemoryRegion, Ready, RegionTable
from kvferry.errors import StoreError

_log = logging.getLogger(__name__)

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST_RECORD_BYTES = 64 << 20  # of `put_bytes`: a layout of thousands of ranks has a few MiB


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Parts of one object in local memory: its `length[i]` bytes from `offset[i]` on belong at
    `address[i]`."""

    offset: Ints
    address: Ints
    length: Ints

    @classmethod
    def whole(cls, address: Ints, length: Ints) -> Slices:
        """All of an object, in its own order."""
        return cls(np.cumsum(length) - length, address, length)


class AlikeSlices(Sequence[Slices]):
    """The same parts of several objects: `address` has a row for each object."""

    def __init__(self, offset: Ints, address: Ints, length: Ints) -> None:
        self.offset, self.address, self.length = offset, address, length

    def __len__(self) -> int:
        return len(self.address)

    @overload
    def __getitem__(self, at: int) -> Slices: ...
    @overload
    def __getitem__(self, at: slice) -> AlikeSlices: ...
    def __getitem__(self, at: int | slice) -> Slices | AlikeSlices:
        made = AlikeSlices if isinstance(at, slice) else Slices
        return made(self.offset, self.address[at], self.length)


class Outcome(Enum):
    DONE = "done"
    EXISTS = "exists"  # put: it was written before, or another process writes it now
    MISSING = "missing"  # get: it is not here (any more)
    CORRUPT = "corrupt"  # get: its bytes are not what was written
    FULL = "full"  # put: no room, and nothing that may be evicted
    DECLINED = "declined"  # put: worth less than everything that it would displace; not an error
    FAILED = "failed"  # any other failure; the store has logged the reason


class Store(Protocol):
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Memory that objects are put from and got into."""

    def access(self, keys: Sequence[str], deadline: float) -> None:
        """Tell eviction about a request: its keys of one fragment (one rank's objects of one table)
        in prefix order, whether their objects exist or not. Never raises."""

    def exists(self, keys: Sequence[str], deadline: float) -> Bools: ...

    def put(
        self, keys: Sequence[str], objects: Sequence[Slices], deadline: float
    ) -> list[Outcome]: ...

    def get(
        self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float
    ) -> list[Outcome]: ...

    def put_bytes(self, key: str, value: bytes, deadline: float) -> Outcome:
        """A small record, such as a layout."""

    def get_bytes(self, key: str, deadline: float) -> bytes | None: ...

    def remove(self, keys: Sequence[str], deadline: float) -> int:
        """How many of them were there."""

    def close(self) -> None:
        """Idempotent."""


class Fence(Protocol):
    """A point in a device's queue. Memory may be read or written once the device has passed it."""

    @property
    def ready(self) -> Ready:
        """For work on the same device that has to wait for it."""

    def wait(self) -> None:
        """Wait until the device has passed it. Any thread may call this, any number of times."""

    def quiet(self) -> None:
        """Wait until the engine's thread is ahead of its device, some milliseconds at most. Called
        before work that nothing waits for."""


@runtime_checkable
class FencedStore(Store, Protocol):
    """A store whose device copies and waits by itself, so that a put is prepared while the device
    still computes."""

    def put_after(
        self, keys: Sequence[str], objects: Sequence[Slices], deadline: float, fence: Fence
    ) -> list[Outcome]:
        """Like `put`, for bytes that are final after the fence. This waits for the fence even past
        the deadline, because the device already has its orders."""


def inside(regions: RegionTable, parts: Sequence[Slices]) -> list[bool]:
    """Whether the memory of each object is registered."""
    if not len(parts):
        return []
    if isinstance(parts, AlikeSlices):
        address, length = parts.address.reshape(-1), np.tile(parts.length, len(parts))
    else:
        address = np.concatenate([p.address for p in parts])
        length = np.concatenate([p.length for p in parts])
    bad = regions.first_outside(address, length)  # one check for all, which usually passes
    if bad < 0:
        return [True] * len(parts)
    _log.warning("%d bytes at %#x are not inside the registered memory", length[bad], address[bad])
    return [regions.first_outside(p.address, p.length) < 0 for p in parts]


def sizes_of(objects: Sequence[Slices]) -> Ints:
    """Bytes of each object."""
    if isinstance(objects, AlikeSlices):
        return np.full(len(objects), objects.length.sum(), dtype=np.int64)
    return np.array([one.length.sum() for one in objects], dtype=np.int64)


def batch_parts(
    sizes: Sequence[int], most_bytes: int, most_objects: int = 1 << 30
) -> Iterator[slice]:
    """Cut a batch into parts, in order, each of at most `most_bytes` or of one object."""
    first = 0
    while first < len(sizes):
        last, total = first + 1, sizes[first]
        stop = min(len(sizes), first + most_objects)
        while last < stop and total + sizes[last] <= most_bytes:
            total += sizes[last]
            last += 1
        yield slice(first, last)
        first = last


def require_answers(answers: Sized, keys: Sequence[str]) -> None:
    """Refuse an answer that is not one for each key."""
    if len(answers) != len(keys):
        raise StoreError(f"a store answered {len(answers)} of {len(keys)} questions")
