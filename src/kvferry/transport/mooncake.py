"""The carrier over Mooncake's TransferEngine: TCP anywhere, RDMA where there is hardware for it.

Each carrier is an engine of its own with Mooncake's P2P handshake, so no metadata server is needed.

    make_carrier("mooncake", protocol="rdma", device="mlx5_0")

What Mooncake does with a batch decides how it is called (0.3.13, TCP):

- It queues 1,024 transfers for a peer and lets 1,024 more wait, and fails the rest of a batch:
  4,096 at once are refused. Batches of 512 pass and are as fast as any. Where the environment sets
  lower limits (`MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER`), a refused batch comes again in halves, with
  a growing pause, until it passes or `patience_seconds` are over.
- Its blocking call spins until the batch is done, so one call a peer is at its best. A batch that
  was begun can be asked about, but is answered for its *first* copy: so single copies, as packed
  mode makes them, are asked about now and then, and leave a processor to the engine's threads.
- It reports a failed batch at its *first* failed copy, while others are still moving. After a
  failure, a transfer therefore does not end before they can have ended (`SETTLE_SECONDS`).
- It gives up on a batch after 30 seconds, without stopping it. Unless MC_TRANSFER_TIMEOUT is set,
  the carrier raises that so far that the call returns when the batch has ended, and not before.

The receiving engine checks addresses against its registered memory (TCP), or the NIC does (RDMA).
It authenticates nobody, and its two ports listen on all interfaces, whatever `host` is: even an
engine that only speaks on loopback can be read and written from the network, unless a firewall
keeps others out. The carrier says so in the log. See `foreign`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from kvferry.errors import DeadlineExceeded, PeerLost, TransferError
from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.cost import Costs, Packing
from kvferry.transport.foreign import ForeignCarrier
from kvferry.transport.foreign_peer import ForeignEndpoint, ForeignPeer
from kvferry.transport.jobs import Job
from kvferry.transport.regions import Arrays

BATCH_DESCRIPTORS = 512
BATCH_BYTES = 32 << 20  # some 30 ms on loopback: between two looks at cancel
PATIENCE_SECONDS = 10.0
SINGLE_SECONDS = 2.0  # a copy that is refused by itself for so long does not fail for want of room
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.2
REFUSED_SECONDS = 5.0  # a batch that failed later than this was not refused: it got stuck
# Longer than MC_TCP_STATUS_TIMEOUT_SEC, after which the engine itself drops a silent connection.
SETTLE_SECONDS = 35.0
SETTLE_REFUSED_SECONDS = 1.0  # the engine answers: what it took of a refused batch moves
SETTLE_RETRIED_SECONDS = 0.25  # after all of a batch was moved again: the rest is under way
SETTLE_DEAD_SECONDS = 0.2  # for the engine to see that a dead peer's connections ended
TICK_SECONDS = 0.02
NAP_SECONDS = 50e-6  # between two looks at a single copy
TIMEOUT_VARIABLE, TIMEOUT_SECONDS = "MC_TRANSFER_TIMEOUT", 86_400


class MooncakeCarrier(ForeignCarrier):
    """`protocol` and `device` are Mooncake's own: "tcp", or "rdma" with "mlx5_0,mlx5_1"."""

    name = "mooncake"
    batch_descriptors = BATCH_DESCRIPTORS
    batch_bytes = BATCH_BYTES
    listens_everywhere = True

    def __init__(
        self,
        *,
        host: str | None = None,
        secret: bytes | str | None = None,
        protocol: str = "tcp",
        device: str = "",
        patience_seconds: float = PATIENCE_SECONDS,
        packing: Packing = "auto",
        costs: Costs | None = None,
    ) -> None:
        engine = engine_class()
        super().__init__(
            host=host,
            secret=secret,
            flavour=protocol,
            costs_of=self.name if protocol == "tcp" else f"{self.name}-{protocol}",
            packing=packing,
            costs=costs,
        )
        self._patience = patience_seconds
        with _long_timeout():
            self._engine = engine()
        where = f"[{self.host}]" if ":" in self.host else self.host
        if self._engine.initialize(where, "P2PHANDSHAKE", protocol, device) != 0:
            self._fail_to_start()
            raise TransferError(
                f"Mooncake's engine does not start on {self.host} with protocol {protocol!r} and "
                f"device {device!r}; its own log says why. `device` must name RDMA devices of this "
                "host (ibv_devices lists them); protocol tcp needs none"
            )
        self._where = where
        self._register(self._own_regions(), [])

    def _register(self, added: list[MemoryRegion], gone: list[MemoryRegion]) -> None:
        for region in gone:
            self._engine.unregister_memory(region.address)
        for region in added:
            code = self._engine.register_memory(region.address, region.bytes)
            self._require(code, f"{region.bytes} bytes at {region.address:#x}")

    def _require(self, code: int, what: str) -> None:
        if code != 0:
            raise TransferError(
                f"Mooncake does not register {what} (code {code}): the memory must be mapped, and "
                "for RDMA the limit of locked memory (ulimit -l) must allow it"
            )

    def _address(self) -> bytes:
        return f"{self._where}:{self._engine.get_rpc_port()}".encode()

    def _attach(self, endpoint: ForeignEndpoint) -> _Target:
        return _Target(endpoint.address.decode())

    def _detach(self, handle: _Target) -> None:
        """Mooncake keeps what it knows of a peer; a new process has a new address."""

    def _carry(self, job: Job, peer: ForeignPeer, batch: Arrays, *, reading: bool) -> None:
        target = peer.handle
        local, remote = (batch.dst, batch.src) if reading else (batch.src, batch.dst)
        at, refusal, failed, doubt = 0, _Refusal(), False, False
        while at < len(batch):
            few = slice(at, at + target.limit)
            begun = time.monotonic()
            if self._call(reading, target.name, local[few], remote[few], batch.length[few]):
                at, refusal = few.stop, _Refusal()
                continue
            failed = True
            stuck = time.monotonic() - begun > REFUSED_SECONDS
            alone = min(target.limit, len(batch) - at) == 1
            doubt |= not alone  # it says nothing of the other copies: some may be under way
            over = refusal.seconds > self._patience
            over |= alone and refusal.alone_seconds() > min(SINGLE_SECONDS, self._patience)
            if over or stuck or job.cancelled or not peer.connected:
                self._settle(peer, SETTLE_SECONDS if stuck else SETTLE_REFUSED_SECONDS)
                # a peer that is only stopped may still go on, also where its own timeout came first
                job.late_bytes |= stuck or doubt
                job.checkpoint()
                peer.require_usable()
                raise self._given_up(target, len(batch) - at, stuck)
            peer.pulse.require_alive()
            self.count("rejected_batches")
            target.limit = max(1, min(target.limit, len(batch) - at) // 2)
            refusal.pause()
        if failed:
            self._settle(peer, SETTLE_RETRIED_SECONDS)

    def _given_up(self, target: _Target, left: int, stuck: bool) -> TransferError:
        if stuck:
            return DeadlineExceeded(
                f"Mooncake's peer {target.name} lives and makes no progress; {left} copies of a "
                "batch are left"
            )
        return TransferError(
            f"Mooncake refuses {left} copies to or from {target.name}, one by one: the peer did "
            "not register that memory with it, or its data port cannot be reached; its own log "
            "says which"
        )

    def _call(self, reading: bool, target: str, local: Ints, remote: Ints, length: Ints) -> bool:
        # it takes lists; of a few hundred, so that making them takes microseconds
        engine, lists = self._engine, (local.tolist(), remote.tolist(), length.tolist())
        if len(local) > 1:
            call = engine.batch_transfer_sync_read if reading else engine.batch_transfer_sync_write
            return bool(call(target, *lists) == 0)
        call = engine.batch_transfer_async_read if reading else engine.batch_transfer_async_write
        batch = call(target, *lists)
        if batch == 0:
            return False
        state = 0
        while state == 0:
            time.sleep(NAP_SECONDS)
            state = engine.transfer_check_status(batch)
        return bool(state == 1)

    def _settle(self, peer: ForeignPeer, seconds: float) -> None:
        """Wait until copies of a failed batch that were under way have ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not peer.pulse.alive():
                time.sleep(SETTLE_DEAD_SECONDS)
                raise PeerLost("the peer is gone: it died or closed its carrier")
            time.sleep(TICK_SECONDS)

    def _shut(self) -> None:
        for region in (*self._table.regions(), *self._own_regions()):
            self._engine.unregister_memory(region.address)
        self._engine = None


class _Refusal:
    """Since when a batch is refused, and how long to wait before it is tried again."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._alone_since: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def alone_seconds(self) -> float:
        """Since the first of its copies was refused by itself."""
        if self._alone_since is None:
            self._alone_since = time.monotonic()
        return time.monotonic() - self._alone_since

    def pause(self) -> None:
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)


class _Target:
    """A peer as Mooncake knows it, and the largest batch that it has not refused."""

    def __init__(self, name: str) -> None:
        self.name, self.limit = name, BATCH_DESCRIPTORS


def engine_class() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransferError(
            f"the carrier 'mooncake' needs Mooncake's transfer engine ({error}): pip install "
            "'kvferry[mooncake]' (with CUDA) or 'kvferry[mooncake-cpu]', and the system's "
            "libibverbs1"
        ) from None
    return TransferEngine


@contextlib.contextmanager
def _long_timeout() -> Iterator[None]:
    """The engine reads its timeout once, when it is made; what the user has set stays."""
    if TIMEOUT_VARIABLE in os.environ:
        yield
        return
    os.environ[TIMEOUT_VARIABLE] = str(TIMEOUT_SECONDS)
    try:
        yield
    finally:
        del os.environ[TIMEOUT_VARIABLE]
