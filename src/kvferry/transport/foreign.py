"""What carriers share whose bytes another library moves: `mooncake` and `nixl`.

The library gives batches between two processes; this gives the rest of the `Carrier` protocol:

    bounds      checked here, against what the endpoint says, before the library sees a descriptor;
                the library checks again, in its own way
    batches     below the library's limits, neighbours joined, so that no call of ours holds the
                interpreter's lock for long
    threads     the library's blocking calls run on a few threads for each peer, so a peer that
                does not answer holds up its own transfers only
    liveness    a `Pulse` beside the data plane: looked at before, during and after each transfer
    the end     no library here can take back a batch that it has begun. A cancelled transfer ends
                with the batch under way; one whose batch does not come back is *abandoned*:
                `cancel` raises `DeadlineExceeded`, `poll` says RUNNING, and its memory counts as
                in use, until the library has returned it or the peer is dead. It is counted.

Nobody is authenticated on these data planes: whoever reaches their ports can read and write all
registered memory, and with UCX over TCP any memory of the process. What an endpoint says of itself
cannot be checked either: a peer that has the secret is trusted with all of it. Use them in networks
whose hosts you trust (docs/security.md). The owner cannot stop a peer's writes (`can_revoke` is
false).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from kvferry.errors import Cancelled, PeerLost, ProtocolError, TransferError
from kvferry.transport.base import CopyArrays, MemoryRegion, Transfer
from kvferry.transport.foreign_jobs import Abandoned, ForeignJob
from kvferry.transport.foreign_library import Library
from kvferry.transport.foreign_peer import (
    LOOPBACK,
    ForeignEndpoint,
    ForeignPeer,
    look_at_host,
)
from kvferry.transport.foreign_regions import Registered
from kvferry.transport.jobs import CANCEL_SECONDS, Job
from kvferry.transport.pulse import Pulse, PulseServer
from kvferry.transport.regions import Arrays, RegionTable, require_all
from kvferry.wire.keys import Key
from kvferry.wire.names import Admits, Reach

GRACE_SECONDS = 1.0  # a dead peer's data plane may fail before its pulse does
SCRATCH_BYTES = 4096  # registered, for the byte that `connect` tries


class ForeignCarrier(Library):
    """`host` is the address that peers reach this one at. The libraries have no use for a `secret`:
    with one, the host may be a network's. `admits` says which hosts may be dialed, of those that
    endpoints name. Both sides must have the same `flavour`."""

    can_revoke = False

    def __init__(
        self,
        *,
        host: str | None,
        secret: bytes | str | None,
        flavour: str,
        admits: Admits | None = None,
    ) -> None:
        self.host = host or LOOPBACK
        look_at_host(self.name, self.host, self.listens_everywhere)
        self._reach = Reach(secret is not None and Key.of(secret).configured, admits)
        self._reach.require_listening(self.host)
        self.flavour = flavour
        self._pulse = PulseServer(self.host)
        self._lock = threading.Lock()
        self._registered = Registered(self)
        self._peers: list[ForeignPeer] = []
        self._scratch = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        self._own = MemoryRegion(self._scratch.ctypes.data, SCRATCH_BYTES)
        self._counts = dict.fromkeys(("transfers", "batches", "rejected_batches"), 0)
        self._abandoned = Abandoned(self.name)
        self._closed = self._was_shut = False

    @property
    def counters(self) -> Mapping[str, int]:
        """What was carried. `abandoned`: transfers that were given up and whose end was not seen in
        time; `abandoned_now`: those whose memory the library may still touch."""
        given_up = {"abandoned": self._abandoned.count, "abandoned_now": self._abandoned.now}
        with self._lock:
            return {**self._counts, **given_up}

    def count(self, what: str, more: int = 1) -> None:
        with self._lock:
            self._counts[what] += more

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        with self._lock:
            self._registered.add(regions)

    @property
    def _table(self) -> RegionTable:
        return self._registered.table

    def endpoint(self) -> bytes:
        if self._closed:
            raise TransferError("the carrier is closed")
        return msgspec.msgpack.encode(
            ForeignEndpoint(
                carrier=self.name,
                flavour=self.flavour,
                host=self.host,
                pulse_port=self._pulse.port,
                token=self._pulse.token,
                incarnation=self._pulse.incarnation,
                regions=[(r.address, r.bytes) for r in self._table.regions()],
                device=self.device,
                address=self._address(),
            )
        )

    def connect(self, endpoint: bytes, deadline: float) -> ForeignPeer:
        """Reaches the peer's pulse, and one byte of its memory through the library."""
        found = ForeignEndpoint.decode(endpoint, self.name)
        if found.flavour != self.flavour:
            raise TransferError(
                f"the peer's {self.name} uses {found.flavour}, this one {self.flavour}; configure "
                "both alike"
            )
        self._reach.require(found.host)
        if found.address == self._address():  # it would have us reach our own memory
            raise ProtocolError(f"the peer names this very process as the owner of its {self.name}")
        regions = found.table()
        pulse = Pulse.connect(
            found.host, found.pulse_port, found.token, found.incarnation, deadline
        )
        peer = ForeignPeer(found, regions, pulse)
        with self._lock:
            closed = self._closed
            if not closed:
                self._peers.append(peer)
        if closed:
            pulse.close()
            raise Cancelled("the carrier was closed")
        try:
            attach = self._job(peer, lambda job: self._greet(job, peer), "connecting")
            peer.workers.submit(attach).wait(deadline)
        except TransferError:
            peer.connected = False
            self._end(peer, 0.0)  # the deadline is now; what is stuck tidies up as it ends
            raise
        return peer

    def read(self, peer: ForeignPeer, copies: CopyArrays) -> Transfer:
        return self._submit(peer, copies, reading=True)

    def write(self, peer: ForeignPeer, copies: CopyArrays) -> Transfer:
        return self._submit(peer, copies, reading=False)

    def disconnect(self, peer: ForeignPeer) -> None:
        """Ends its transfers; the library forgets the peer once the last of them is over."""
        peer.connected = False
        self._end(peer, CANCEL_SECONDS)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers = list(self._peers)
        self._pulse.leave()
        for peer in peers:
            peer.connected = False
        until = time.monotonic() + CANCEL_SECONDS
        for peer in peers:
            self._end(peer, max(0.0, until - time.monotonic()))
        self._tidy(None)

    def _end(self, peer: ForeignPeer, seconds: float) -> None:
        peer.workers.close(seconds)
        for job in peer.workers.busy:
            if isinstance(job, ForeignJob):
                self._abandoned.note(job)
        self._tidy(peer)

    def _tidy(self, peer: ForeignPeer | None) -> None:
        """Let a disconnected peer go, unless a transfer is left; the library with the last one."""
        with self._lock:
            gone = peer is not None and peer in self._peers and not peer.workers.busy
            if gone and peer is not None:
                self._peers.remove(peer)
            shut = self._closed and not self._peers and not self._was_shut
            self._was_shut |= shut
        if gone and peer is not None:
            peer.pulse.close()
            if peer.handle is not None:
                self._detach(peer.handle)
        if shut:
            self._shut()
            self._pulse.close()  # the last: until then, bytes may be on their way to peers

    def _greet(self, job: Job, peer: ForeignPeer) -> None:
        peer.handle = self._attach(peer.endpoint)
        if len(peer.regions):
            one = np.ones(1, dtype=np.int64)
            into = np.array([self._own.address], dtype=np.int64)
            self._move(job, peer, Arrays(peer.regions.starts[:1], into, one), reading=True)

    def _submit(
        self,
        peer: ForeignPeer,
        copies: CopyArrays,
        *,
        reading: bool,
        last: Callable[[], None] | None = None,
    ) -> Transfer:
        """`last` is called when every byte is there, and belongs to the transfer."""

        def work(job: Job) -> None:
            arrays = Arrays.of(copies)
            src, dst = (peer.regions, self._table) if reading else (self._table, peer.regions)
            require_all(arrays, src, dst, reading=reading)
            self.count("transfers")
            moved = 0
            for batch in self._batches(peer, arrays, reading=reading):
                with peer.turn(job):
                    self._move(job, peer, batch, reading=reading)
                moved += 1
            self.count("batches", moved)
            job.checkpoint()
            peer.require_usable()  # it was the same process, and open, all along
            if last is not None:
                last()

        what = f"a {self.name} {'read' if reading else 'write'}"
        return peer.workers.submit(self._job(peer, work, what))

    def _job(self, peer: ForeignPeer, work: Callable[[Job], None], what: str) -> ForeignJob:
        def gone() -> bool:
            return peer.connected and peer.pulse.gone()

        def tidy() -> None:  # whoever disconnects after this look sees that the job has ended
            if not peer.connected:
                self._tidy(peer)

        return ForeignJob(self._abandoned, work, what, gone, tidy)

    def _move(self, job: Job, peer: ForeignPeer, batch: Arrays, *, reading: bool) -> None:
        """Whatever the library says of a batch that fails, a peer that is gone is the better
        reason."""
        try:
            self._carry(job, peer, batch, reading=reading)
        except (Cancelled, PeerLost):
            raise
        except TransferError as error:
            if peer.connected and not peer.pulse.alive(GRACE_SECONDS):
                raise PeerLost(f"the peer is gone ({error})") from None
            raise
