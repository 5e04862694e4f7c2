# SPDX-License-Identifier: Apache-2.0
"""The carrier over Mooncake's TransferEngine: TCP anywhere, RDMA where there is hardware for it.

Each carrier is an engine of its own with Mooncake's P2P handshake, so no metadata server is needed.
The carrier adapts to how Mooncake treats batches (0.3.13, TCP):

- Mooncake queues 1,024 transfers for a peer, lets 1,024 more wait, and fails the rest of a batch.
  Batches of 512 pass and are as fast as any.
- Its blocking call spins until the batch is done, so one call for each peer at a time is fastest.
  The status of a batch under way is that of its *first* copy. So the carrier polls the status of
  single copies, which long runs make, and leaves a processor to the engine's threads.
- It reports a failed batch at its *first* failed copy, while other copies still move. So after a
  failure, a transfer waits until they must have ended (`SETTLE_SECONDS`).
- It gives up on a batch after 30 seconds, without stopping it. Unless MC_TRANSFER_TIMEOUT is set,
  the carrier raises that limit so far that the call returns only when the batch has ended.

The receiving engine checks addresses against its registered memory (TCP), or the NIC does (RDMA).
Mooncake's two ports listen on all interfaces, whatever `host` is. The carrier logs a warning.

Mooncake (0.3.13) ignores the protocol that it is given: it uses RDMA if it finds a device among
those named, and else TCP. So the carrier enforces the protocol. For `tcp`, it sets MC_FORCE_TCP
while it makes an engine; for `rdma`, the devices must exist. It accepts no other protocol, because
it cannot see whether a build of Mooncake has one.
"""

from __future__ import annotations

import os
import time
from typing import Any

from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.library.shared import (
    ENVIRONMENT,
    ON_HOST,
    RDMA_DEVICES,
    THREADS_PER_PEER,
    LibraryCarrier,
    LibraryEndpoint,
    LibraryPeer,
    environment,
    rdma_devices,
)
from kvferry.carriers.transfer import Job
from kvferry.copies import Copies, Ints
from kvferry.errors import DeadlineExceeded, PeerLost, TransferError, install_command
from kvferry.net.names import Admits

BATCH_DESCRIPTORS = 512
BATCH_BYTES = 32 << 20  # some 30 ms on loopback; between two checks for a cancel
REFUSED_SECONDS = 4.5  # a batch that failed after this time got stuck; it was not refused
DONE, MOVING, TIMED_OUT = 1, 0, -2  # states of a single copy
# Longer than MC_TCP_STATUS_TIMEOUT_SEC, after which the engine itself drops a silent connection.
SETTLE_SECONDS = 35.0
SETTLE_REFUSED_SECONDS = 1.0  # the engine answers, and moves the accepted part of a refused batch
SETTLE_DEAD_SECONDS = 0.2  # for the engine to see that the connections of a dead peer ended
TICK_SECONDS = 0.02
NAP_SECONDS = 50e-6  # between two polls of a single copy
PROTOCOLS = ("tcp", "rdma")
TIMEOUT_VARIABLE, TIMEOUT_SECONDS = "MC_TRANSFER_TIMEOUT", 86_400
FORCE_TCP, FORCE_RDMA = "MC_FORCE_TCP", "MC_FORCE_HCA"


class MooncakeCarrier(LibraryCarrier):
    """`protocol` and `device` are Mooncake's own: "tcp", or "rdma" with "mlx5_0,mlx5_1". `workers`:
    threads for each peer."""

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
        workers: int = THREADS_PER_PEER,
        admits: Admits | None = None,
        gpu: int = ON_HOST,
    ) -> None:
        self._engine_class = engine_class()
        with ENVIRONMENT:
            require_way(protocol, device)
        self._devices = device
        super().__init__(
            host=host, secret=secret, flavour=protocol, admits=admits, workers=workers, gpu=gpu
        )

    def _start(self) -> None:
        """Start an engine, which reads its settings once, from the environment. Variables that the
        user has set stay."""
        self._where = f"[{self.host}]" if ":" in self.host else self.host
        ours = {TIMEOUT_VARIABLE: str(TIMEOUT_SECONDS)}
        if self.flavour == "tcp":
            ours[FORCE_TCP] = "1"
        with environment(ours):
            self._engine = self._engine_class()
            code = self._engine.initialize(self._where, "P2PHANDSHAKE", self.flavour, self._devices)
        if code != 0:
            raise TransferError(
                f"Mooncake's engine does not start on {self._where} with protocol {self.flavour!r} "
                f"and device {self._devices!r} (code {code} of its error.h); its own log says why. "
                "`device` must name RDMA devices of this host (ibv_devices lists them); protocol "
                "tcp needs none"
            )

    def register_one(self, region: MemoryRegion) -> None:
        code = self._engine.register_memory(region.address, region.bytes)
        if code != 0:
            raise TransferError(
                f"Mooncake does not register {region.bytes} bytes at {region.address:#x} "
                f"(code {code} of its error.h): the memory must be mapped, and for RDMA the limit "
                "of locked memory (ulimit -l) must allow it"
            )

    def unregister_one(self, region: MemoryRegion) -> None:
        self._engine.unregister_memory(region.address)

    def _address(self) -> bytes:
        return f"{self._where}:{self._engine.get_rpc_port()}".encode()

    def _attach(self, endpoint: LibraryEndpoint) -> str:
        host, name = endpoint.host, endpoint.address.decode(errors="replace")
        if name.rpartition(":")[0] != (f"[{host}]" if ":" in host else host):
            raise TransferError(f"a peer at {host!r:.80} names {name!r:.80} as Mooncake's address")
        return name

    def _detach(self, handle: str) -> None:
        """Nothing to do: Mooncake keeps its record, and a new process has a new address."""

    def _carry(self, job: Job, peer: LibraryPeer, batch: Copies, *, reading: bool) -> None:
        local, remote = (batch.dst, batch.src) if reading else (batch.src, batch.dst)
        begun = time.monotonic()
        code = self._call(reading, peer.handle, local, remote, batch.length)
        if code == 0:
            return
        stuck = code == TIMED_OUT or time.monotonic() - begun > REFUSED_SECONDS
        # Mooncake does not report the other copies of a batch. A suspended peer may go on after
        # Mooncake's timeout.
        job.late_bytes |= stuck or len(batch) > 1
        self._settle(peer, SETTLE_SECONDS if stuck else SETTLE_REFUSED_SECONDS)
        job.checkpoint()
        peer.require_usable()
        if stuck:
            raise DeadlineExceeded(
                f"Mooncake's peer {peer.handle} lives and makes no progress with {len(batch)} "
                "copies"
            )
        raise TransferError(
            f"Mooncake refuses {len(batch)} copies to or from {peer.handle} (code {code}): the "
            "peer did not register that memory with it, its data port cannot be reached, or "
            f"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER is less than {BATCH_DESCRIPTORS}; its own log "
            "says which"
        )

    def _call(self, reading: bool, target: str, local: Ints, remote: Ints, length: Ints) -> int:
        """Zero, or an error: `TIMED_OUT` if the copy goes on, or another code."""
        # it takes lists; making a few hundred entries takes microseconds
        engine, lists = self._engine, (local.tolist(), remote.tolist(), length.tolist())
        if len(local) > 1:
            call = engine.batch_transfer_sync_read if reading else engine.batch_transfer_sync_write
            return -1 if call(target, *lists) else 0  # it has no other code, not even for a timeout
        call = engine.batch_transfer_async_read if reading else engine.batch_transfer_async_write
        batch = call(target, *lists)
        if batch == 0:
            return -1
        state = MOVING
        while state == MOVING:
            time.sleep(NAP_SECONDS)
            state = engine.transfer_check_status(batch)
        return 0 if state == DONE else int(state)

    def _settle(self, peer: LibraryPeer, seconds: float) -> None:
        """Wait until copies of a failed batch that were under way have ended."""
        until = time.monotonic() + seconds
        while True:
            if not peer.liveness.alive():
                time.sleep(SETTLE_DEAD_SECONDS)
                raise PeerLost("the peer is gone: it died or closed its carrier")
            if time.monotonic() >= until:
                return
            time.sleep(TICK_SECONDS)

    def _shut(self) -> None:
        self._engine = None


def engine_class() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransferError(
            f"the carrier 'mooncake' needs Mooncake's transfer engine ({error}) and the system's "
            f"libibverbs1: {install_command('mooncake-cpu')} (with CUDA the extra is 'mooncake')"
        ) from None
    return TransferEngine


def require_way(protocol: str, device: str) -> None:
    """Refuse a protocol or device that Mooncake would silently replace by another."""
    why = ""
    if protocol not in PROTOCOLS:
        why = f"its protocol is one of {', '.join(PROTOCOLS)}, found {protocol!r}"
    elif protocol == "tcp" and device:
        why = f"its device {device!r} is for protocol rdma; change the one, or drop the other"
    elif protocol == "rdma" and FORCE_TCP in os.environ:
        why = f"it is to use rdma, and {FORCE_TCP} is set; unset one of the two"
    if why:
        raise TransferError(f"the mooncake carrier: {why}")
    if protocol == "tcp":
        return
    there = rdma_devices()
    wanted = [name.strip() for name in device.split(",") if name.strip()]
    missing = [name for name in wanted if name not in there]
    if missing or (not there and FORCE_RDMA not in os.environ):
        raise TransferError(
            f"the mooncake carrier is to use rdma with {device or 'any device'}, and this host has "
            f"{', '.join(there) or 'no RDMA device'} ({RDMA_DEVICES}); name devices that are "
            "there, or set protocol to tcp"
        )
