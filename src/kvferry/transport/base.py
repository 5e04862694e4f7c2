"""What a carrier has to give: one-sided reads and writes over registered memory.

    carrier.register(regions)                   make own memory reachable, before any peer connects
    carrier.endpoint()                          what a peer needs to reach it; plain bytes
    peer = carrier.connect(endpoint, deadline)  once per peer
    transfer = carrier.read(peer, copies)       remote `src` to local `dst`; returns at once
    transfer = carrier.write(peer, copies)      local `src` to remote `dst`; returns at once
    transfer.wait(deadline)                     until done, or the error that ended it
    carrier.disconnect(peer)                    forget a peer; ends its transfers
    carrier.close()                             idempotent; ends all transfers

Addresses are absolute, each in the address space of the process that owns it. Every remote range
must lie inside one region that the peer registered, and every local one inside one of this
carrier's own; who checks that differs by carrier (tcp: the peer; local and cuda: the initiator,
against what the owner has vouched for), that it is checked does not. All are checked before the
first byte moves. *Done* means visible at the destination. Deadlines are absolute, on
`time.monotonic()`.

Errors of the copies themselves come from `wait`, as all others do. The arrays must stay as they are
until the transfer has ended. Copies of one batch may be done in any order.

A transfer ends *abandoned* where it was given up and nobody can tell that its bytes have stopped: a
library that cannot take back what it has begun, a peer that does not confirm. Then `cancel` raises
`DeadlineExceeded`, each time; while `poll` says RUNNING, the memory is in use, and whoever owns it
must not give it to anyone else. Carriers that can come to this count it (`counters["abandoned"]`,
and `abandoned_now` for those that still run).

Where the owner of memory can take back what a peer may write (`can_revoke`), the carrier is a
`GrantingCarrier` too:

    grant = carrier.open_grant(address, length)           own ranges, and an unguessable id for them
    transfer = carrier.write_granted(peer, copies, grant) by a peer that was told the id
    written = carrier.close_grant(grant, seconds)         bytes that came; no more do after that

A carrier splits batches that its backend cannot take whole; no caller has to know. One suite of
tests (tests/transport/test_conformance.py) runs on all carriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
GRANT_BYTES = 16


class CopyArrays(Protocol):
    """`length[i]` bytes from address `src[i]` to address `dst[i]`; `kvferry.plan.Copies` is one."""

    @property
    def src(self) -> Ints: ...
    @property
    def dst(self) -> Ints: ...
    @property
    def length(self) -> Ints: ...


class StridedCopies(Protocol):
    """For each row, segment and step one copy, at the sum of the three; a plan's batch is one.

    Carriers whose `takes_strided` is true read and write these as they read and write arrays.
    """

    @property
    def src_rows(self) -> Ints: ...
    @property
    def dst_rows(self) -> Ints: ...
    @property
    def src_segments(self) -> Ints: ...
    @property
    def dst_segments(self) -> Ints: ...
    @property
    def lengths(self) -> Ints: ...  # of each segment
    @property
    def src_steps(self) -> Ints: ...
    @property
    def dst_steps(self) -> Ints: ...


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
    """A read or a write under way. Any method, from any thread, any number of times."""

    def wait(self, deadline: float) -> None:
        """Return when done; raise the `TransferError` that ended it.

        `DeadlineExceeded` where it goes on after the deadline (`poll` then says so), and where the
        carrier itself gave up on a peer that makes no progress.
        """

    def poll(self) -> TransferState: ...

    def settled(self) -> bool:
        """Whether it has ended, and no byte of it arrives in this side's memory any more."""

    def cancel(self) -> None:
        """Give it up. Returns when no byte of it can arrive any more.

        Bounded: `DeadlineExceeded` while bytes of it may still arrive, because neither the peer
        nor the library has confirmed its end in time: it is abandoned.
        """


class Carrier(Protocol):
    name: str
    can_revoke: bool  # whether the owner of the memory can stop a peer's writes

    def register(self, regions: Sequence[MemoryRegion]) -> None: ...
    def endpoint(self) -> bytes: ...
    def connect(self, endpoint: bytes, deadline: float) -> Any: ...
    def read(self, peer: Any, copies: CopyArrays) -> Transfer: ...
    def write(self, peer: Any, copies: CopyArrays) -> Transfer: ...
    def disconnect(self, peer: Any) -> None: ...
    def close(self) -> None: ...


class GrantingCarrier(Carrier, Protocol):
    """A carrier whose owner of memory decides what may be written, and until when."""

    def open_grant(self, address: Ints, length: Ints) -> bytes:
        """Let these ranges of registered memory be written by who names the id."""

    def close_grant(self, grant: bytes, seconds: float) -> int:
        """Bytes that were written under it; none arrives after this returns. Idempotent.

        `DeadlineExceeded` where a writer does not leave the memory in time: close it again.
        """

    def write_granted(self, peer: Any, copies: CopyArrays, grant: bytes) -> Transfer: ...


def is_granting(carrier: Carrier | None) -> TypeGuard[GrantingCarrier]:
    return carrier is not None and carrier.can_revoke
