# SPDX-License-Identifier: Apache-2.0
"""The protocol of carriers: one-sided reads and writes over registered memory.

    carrier.register(regions)                   make own memory reachable, before any peer connects
    carrier.endpoint()                          how a peer reaches it; plain bytes
    peer = carrier.connect(endpoint, deadline)  once per peer
    transfer = carrier.read(peer, copies)       remote `src` to local `dst`; returns at once
    transfer = carrier.write(peer, copies)      local `src` to remote `dst`; returns at once
    transfer.wait(deadline)                     until done, or the error that ended it
    carrier.disconnect(peer)                    forget a peer; ends its transfers
    carrier.close()                             idempotent; ends all transfers

Addresses are absolute, each in the address space of the process that owns it. Every remote range
must lie inside one region that the peer registered, and every local range inside one of this
carrier's own. All ranges are checked before the first byte moves: by the peer for tcp, by the
initiator for the others. *Done* means visible at the destination. Deadlines are absolute, on
`time.monotonic()`. `wait` raises all errors of a transfer. The caller must not change the arrays
until the transfer has ended. Its copies may be done in any order. A carrier whose `register` failed
can only be closed.

A transfer that was given up is *abandoned* if its bytes may still arrive: a library cannot take
back a batch that it has begun, or a peer does not confirm the end. While `settled` is false, the
memory is in use, and its owner must not give it to another request.

One suite of tests (tests/transport/test_conformance.py) runs on all carriers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeGuard, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.copies import Copies, Ints, StridedCopies
from kvferry.errors import OutOfBounds, ProtocolError, TransferError

Bytes = NDArray[np.uint8]
T = TypeVar("T")
GRANT_BYTES = 16


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory of this process that peers may reach."""

    address: int
    bytes: int


class TransferState(Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Transfer(Protocol):
    """A read or a write under way. Any thread may call any method, any number of times."""

    def wait(self, deadline: float) -> None:
        """Return when done; raise the `TransferError` that ended it, or `DeadlineExceeded`."""

    def poll(self) -> TransferState: ...

    def settled(self) -> bool:
        """Whether it has ended, and no byte of it can still arrive in this process's memory."""

    def cancel(self) -> None:
        """Give it up. Returns when no byte of it can still arrive. While it is abandoned, each call
        raises `DeadlineExceeded`."""


class Carrier(Protocol):
    """All members of a carrier. Carriers inherit the defaults that they do not override."""

    name: str
    can_revoke: bool = False  # the owner of memory can stop a peer's writes: a `GrantingCarrier`
    takes_strided: bool = False  # `read` and `write` queue `StridedCopies` on a device
    flavour: str = ""  # the protocol or backends of a carrier over a library

    def register(self, regions: Sequence[MemoryRegion]) -> None: ...
    def endpoint(self) -> bytes: ...
    def connect(self, endpoint: bytes, deadline: float) -> Any: ...
    def submit(self, peer: Any, copies: Any, *, reading: bool) -> Transfer: ...
    def disconnect(self, peer: Any) -> None: ...
    def close(self) -> None: ...

    def read(self, peer: Any, copies: Copies | StridedCopies) -> Transfer:
        return self.submit(peer, copies, reading=True)

    def write(self, peer: Any, copies: Copies | StridedCopies) -> Transfer:
        return self.submit(peer, copies, reading=False)


class GrantingCarrier(Carrier, Protocol):
    """A carrier by which the owner of memory grants ranges to writers, until it closes the grant. A
    writer must know the grant's unguessable id."""

    can_revoke: bool = True

    def open_grant(self, address: Ints, length: Ints) -> bytes:
        """Let peers that name the id write these ranges of registered memory."""

    def close_grant(self, grant: bytes, seconds: float) -> int:
        """Close a grant, and return how many bytes were written under it. None arrives later.
        `DeadlineExceeded` if a writer did not leave the memory in time: close it again."""

    def write_granted(self, peer: Any, copies: Copies, grant: bytes) -> Transfer: ...


def is_granting(carrier: Carrier | None) -> TypeGuard[GrantingCarrier]:
    return carrier is not None and carrier.can_revoke


class Memory(Protocol):
    """Registered memory of this process, by address. Several threads may call at once.

    Every method returns when it is done, and its bytes are visible to all users of that memory.
    A range outside of the memory raises `OutOfBounds` before anything is copied.
    """

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None:
        """Copy the runs, one after another, to the beginning of `into`."""

    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None:
        """Copy the beginning of `source` to the runs, in their order."""

    def zero(self, address: Ints, length: Ints) -> None: ...

    def close(self) -> None:
        """Free its own buffers."""
        return


class StagedMemory(Memory):
    """A GPU's memory, reached through chunks of staging memory. While the caller uses one chunk,
    the GPU works on others.

    Chunks come in the order of the runs' bytes. The caller must close the generator, even if it did
    not end. After that, nothing is under way.
    """

    @abstractmethod
    def outgoing(self, address: Ints, length: Ints) -> Generator[Bytes]:
        """The runs' bytes. A chunk is valid until the caller asks for the next one."""

    @abstractmethod
    def incoming(self, address: Ints, length: Ints) -> Generator[Bytes]:
        """Chunks that the caller fills, each before it asks for the next one. All bytes are visible
        when the generator has ended."""


def decode_endpoint(decoder: msgspec.msgpack.Decoder[T], raw: bytes, carrier: str) -> T:
    """Decode a peer's endpoint.

    Modules make their decoders on import, because many threads may use one for the first time.
    """
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"this is not the endpoint of a {carrier} carrier: {error}") from None


@dataclass(frozen=True, slots=True)
class RegionTable:
    """Registered memory, sorted by address. Regions that overlap or touch count as one."""

    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, regions: Sequence[MemoryRegion]) -> RegionTable:
        """The table of these regions; refuses addresses that no memory has."""
        for region in regions:
            if min(region.address, region.bytes) < 0 or region.address + region.bytes >= 1 << 63:
                raise TransferError(
                    f"a region of {region.bytes} bytes at {region.address:#x} cannot be registered"
                )
        return cls.of_arrays(
            np.array([region.address for region in regions], dtype=np.int64),
            np.array([region.bytes for region in regions], dtype=np.int64),
        )

    @classmethod
    def of_arrays(cls, address: Ints, length: Ints) -> RegionTable:
        """The same from two arrays, for thousands of ranges. The ranges must be real memory."""
        some = length > 0
        address, length = address[some], length[some]
        if len(address) == 0:
            return cls(address, length)
        order = np.argsort(address, kind="stable")
        starts = address[order]
        ends = np.maximum.accumulate(starts + length[order])
        heads = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
        lasts = np.append(heads[1:], len(starts)) - 1
        return cls(starts[heads], ends[lasts])

    def __len__(self) -> int:
        return len(self.starts)

    def regions(self) -> list[MemoryRegion]:
        pairs = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return [MemoryRegion(start, end - start) for start, end in pairs]

    def first_outside(self, address: Ints, length: Ints) -> int:
        """Index of the first range that is not inside one region, or -1. Nothing overflows."""
        if len(address) == 0 or self._holds_hull(address, length):
            return -1
        if len(self.starts) == 0:
            outside = length != 0
        else:
            at = np.searchsorted(self.starts, address, side="right") - 1
            # `room` does not overflow: neither address is negative
            room = np.where(at >= 0, self.ends[at] - np.maximum(address, 0), -1)
            outside = (length > room) & (length != 0) | (length < 0)
        return int(np.argmax(outside)) if bool(outside.any()) else -1

    def _holds_hull(self, address: Ints, length: Ints) -> bool:
        """Whether one region holds everything from the lowest address to the highest plus the
        longest length. This is quick to check, and true for most copies."""
        if int(np.minimum.reduce(length)) < 0:
            return False
        low, high = int(np.minimum.reduce(address)), int(np.maximum.reduce(address))
        at = int(self.starts.searchsorted(low, side="right")) - 1
        return at >= 0 and high <= int(self.ends[at]) - int(np.maximum.reduce(length))

    def require(self, whose: str, address: Ints, length: Ints) -> None:
        """Raise `OutOfBounds` naming the first range that leaves the regions."""
        bad = self.first_outside(address, length)
        if bad >= 0:
            raise OutOfBounds(
                f"{int(length[bad])} bytes at {int(address[bad]):#x} (copy {bad}) are not inside "
                f"the memory that {whose} registered ({len(self)} regions); nothing was copied"
            )


def checked(copies: Any, *, ours: RegionTable, theirs: RegionTable, reading: bool) -> Copies:
    """The copies, if both sides of each lie in registered memory; else `OutOfBounds`."""
    arrays = Copies.of(copies)
    for part in arrays.windows():
        here, there = (part.dst, part.src) if reading else (part.src, part.dst)
        theirs.require("the peer", there, part.length)
        ours.require("this carrier", here, part.length)
    return arrays


def slices(copies: Copies, max_bytes: int) -> Iterator[Copies]:
    """The same copies in order, at most `WINDOW` and `max_bytes` at a time, none empty.

    A copy that is longer than `max_bytes` comes in pieces.
    """
    for window in copies.windows():
        part = window.without_empty()
        ends = np.cumsum(part.length)
        first, done = 0, 0  # copies and bytes yielded so far
        while first < len(part):
            last = int(np.searchsorted(ends, done + max_bytes, side="right"))
            if last > first:
                yield part[first:last]
            else:
                yield from _pieces(part, first, max_bytes)
                last = first + 1
            first, done = last, int(ends[last - 1])


def _pieces(part: Copies, at: int, max_bytes: int) -> Iterator[Copies]:
    total = int(part.length[at])
    for offset in range(0, total, max_bytes):
        yield Copies(
            part.src[at : at + 1] + offset,
            part.dst[at : at + 1] + offset,
            np.array([min(max_bytes, total - offset)], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """Handles of a driver's events after which a device's memory is final."""

    last: int  # after this event, all memory is final
    early: int = 0  # after this event, `early_memory` is final
    early_memory: RegionTable | None = None

    def is_early(self, address: Ints, length: Ints) -> NDArray[np.bool_]:
        """Which of these ranges lie in memory that is final early."""
        if self.early_memory is None or not len(self.early_memory.starts):
            return np.zeros(address.shape, dtype=bool)
        at = np.searchsorted(self.early_memory.starts, address, side="right") - 1
        found: NDArray[np.bool_] = (at >= 0) & (address + length <= self.early_memory.ends[at])
        return found
