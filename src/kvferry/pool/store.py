"""What a store has to give: objects of bytes by key, written once, read whole or in ranges.

An object is all that one rank wrote of one block of one group; its bytes never change. Bytes come
from and go to registered memory of this process, by address, so that nothing is copied on the way
that need not be. All methods take batches, may be called from any thread, and end by their deadline
(absolute, on `time.monotonic()`). One object's failure is its own: it is told in the outcome, and
the rest of the batch goes on. Only what fails as a whole (the store cannot be reached) raises
`StoreError`.

A store keeps whole objects only: after a crash at any point, an object is there with all its bytes
or not at all, and a range that is read was checked against what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.base import MemoryRegion

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST_RECORD_BYTES = 64 << 20  # of `put_bytes`: a layout of thousands of ranks has a few MiB


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Local memory that makes up one object, in the object's order."""

    address: Ints
    length: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Parts of one object, and where they go: `length[i]` bytes at `offset[i]` to `address[i]`."""

    offset: Ints
    address: Ints
    length: Ints


class Outcome(Enum):
    DONE = "done"
    EXISTS = "exists"  # put: somebody wrote it before
    MISSING = "missing"  # get: it is not here (any more)
    CORRUPT = "corrupt"  # get: its bytes are not what was written
    FULL = "full"  # put: no room, and nothing that may be evicted
    DECLINED = "declined"  # put: worth less than everything that it would displace; not an error
    FAILED = "failed"  # any other failure; the store has logged the reason


@dataclass(frozen=True, slots=True)
class StoreStats:
    objects: int
    bytes: int
    capacity_bytes: int
    evicted: int = 0


class Store(Protocol):
    name: str

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Memory that objects are put from and got into."""

    def access(self, keys: Sequence[str], deadline: float) -> None:
        """One request came: its keys in prefix order, whether they are here or not.

        This is what eviction learns from, so it is told once per request and fragment (one rank's
        objects of one group), before the request's objects are got or put. Never raises: a store
        that has no use for it does nothing.
        """

    def exists(self, keys: Sequence[str], deadline: float) -> Bools: ...

    def put(
        self, keys: Sequence[str], objects: Sequence[Ranges], deadline: float
    ) -> list[Outcome]: ...

    def get(
        self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float
    ) -> list[Outcome]: ...

    def put_bytes(self, key: str, value: bytes, deadline: float) -> Outcome:
        """A small record, such as a layout."""

    def get_bytes(self, key: str, deadline: float) -> bytes | None: ...

    def remove(self, keys: Sequence[str], deadline: float) -> int:
        """How many of them were there."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Idempotent."""
