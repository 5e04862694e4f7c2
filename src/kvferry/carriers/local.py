# SPDX-License-Identifier: Apache-2.0
"""The carrier on one host: the kernel copies between the two processes, one-sided.

`register` lets processes of the same user reach this one's memory. `connect` first has the owner
vouch for the endpoint (vouch.py), so that no peer can have this process read memory that its owner
has not registered. `connect` then reads the owner's *token*, sixteen random bytes, and a byte of
every region. The token is read again before and after every transfer. A dead process, another
process with its pid and a closed carrier do not have the token at that address.

Where this is not possible (Yama, seccomp, another pid namespace, user or host), `connect` raises
`PermissionDenied`, and another carrier may reach the peer.

One more run costs the kernel more time than one more kilobyte. So a read of short runs that lie
close together at the peer copies the long ranges that *cover* them into a buffer of the initiator,
and copies the runs from there to their places. Both ends of a cover lie in the same registered
region, so a cover never leaves it. All other copies move run by run.

The kernel checks addresses, but not regions: the initiator does, against those that the owner has
vouched for.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.carriers import host
from kvferry.carriers.base import (
    Carrier,
    MemoryRegion,
    RegionTable,
    Transfer,
    checked,
    decode_endpoint,
    slices,
)
from kvferry.carriers.transfer import Job, Workers, share
from kvferry.carriers.vouch import ask, forget, vouch_for
from kvferry.copies import Copies, Ints
from kvferry.errors import Cancelled, PeerLost, PermissionDenied, ProtocolError, TransferError

TOKEN_BYTES = 16
SLICE_BYTES = 8 << 20  # about two milliseconds; between two checks for a cancel
# One thread reaches 80 % of memcpy over the same scatter (the kernel pins every page), two pass it.
THREADS_PER_TRANSFER = 2
MOST_PID = (1 << 31) - 1
MOST_ADDRESS = (1 << 62) - 1  # no processor has higher ones, and the sum of two fits int64
# The most from the beginning of one run to that of the next in a cover (docs/benchmarks.md,
# "Carriers"). Runs that touch gain nothing from a cover.
MOST_STEP_BYTES = 1 << 10
COVERED_RUNS = 4096  # at a time
BUFFER_BYTES = COVERED_RUNS * MOST_STEP_BYTES


class LocalEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Which process this is, and where its token and its memory lie.

    Not trusted until the owner has vouched for it.
    """

    carrier: Literal["local"]
    boot: str
    pid_namespace: str
    pid: Annotated[int, msgspec.Meta(ge=1, le=MOST_PID)]
    start_ticks: int  # since boot; tells the process from an earlier one with its pid
    token_address: Annotated[int, msgspec.Meta(ge=0, le=MOST_ADDRESS)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    regions: list[tuple[int, int]]
    voucher: str  # the file of the socket at which the owner vouches for this endpoint

    @classmethod
    def decode(cls, raw: bytes) -> LocalEndpoint:
        return decode_endpoint(_endpoints, raw, "local")


_endpoints = msgspec.msgpack.Decoder(LocalEndpoint)


class LocalPeer:
    """A process whose memory this one reaches."""

    def __init__(self, endpoint: LocalEndpoint) -> None:
        self.connected = True
        self.pid = endpoint.pid
        self.regions = RegionTable.of([MemoryRegion(a, n) for a, n in endpoint.regions])
        self._token, self._token_address = endpoint.token, endpoint.token_address

    def require_alive(self) -> None:
        """Raise `PeerLost` unless the process that made the endpoint has its carrier open."""
        found = np.zeros(TOKEN_BYTES, dtype=np.uint8)
        try:
            host.read(self.pid, [self._token_address], [found.ctypes.data], [TOKEN_BYTES])
        except PermissionDenied:
            raise
        except TransferError as error:
            raise PeerLost(f"process {self.pid} is gone or closed its carrier: {error}") from None
        if found.tobytes() != self._token:
            raise PeerLost(
                f"process {self.pid} is not the peer any more: it closed its carrier, or another "
                "process has its number now"
            )

    def require_reachable(self) -> None:
        count = len(self.regions)
        if count:
            landing = np.zeros(count, dtype=np.uint8)
            where = landing.ctypes.data + np.arange(count)
            host.read(self.pid, self.regions.starts, where, np.ones(count, dtype=np.int64))


class LocalCarrier(Carrier):
    """Between processes of one user on one host."""

    name = "local"

    def __init__(
        self, *, workers: int = 4, threads_per_transfer: int = THREADS_PER_TRANSFER
    ) -> None:
        self._told: set[bytes] = set()  # endpoints that were given out
        self._workers = Workers("kvferry-local", workers)
        self._helping = threads_per_transfer - 1
        self._helpers = Workers("kvferry-local-help", workers * self._helping)
        self._token = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), dtype=np.uint8).copy()
        self._secret_token = self._token.tobytes()
        self._table = RegionTable.of([])

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        host.allow_any_reader()
        self._table = RegionTable.of([*self._table.regions(), *regions])

    def endpoint(self) -> bytes:
        def make(voucher: str) -> bytes:
            return msgspec.msgpack.encode(
                LocalEndpoint(
                    carrier="local",
                    boot=boot_id(),
                    pid_namespace=_pid_namespace(),
                    pid=os.getpid(),
                    start_ticks=_start_ticks(os.getpid()),
                    token_address=self._token.ctypes.data,
                    token=self._secret_token,
                    regions=[(r.address, r.bytes) for r in self._table.regions()],
                    voucher=voucher,
                )
            )

        told = vouch_for(make)
        self._told.add(told)
        return told

    def connect(self, endpoint: bytes, deadline: float) -> LocalPeer:
        found = LocalEndpoint.decode(endpoint)
        if found.boot != boot_id():
            raise PermissionDenied("the peer runs on another host")
        if found.pid_namespace != _pid_namespace():
            raise PermissionDenied("the peer runs in another pid namespace (container)")
        if _start_ticks(found.pid) != found.start_ticks:
            raise PeerLost(
                f"process {found.pid} is gone, or another process has its number now: the peer "
                "restarted. Ask for its new endpoint"
            )
        owner = ask(found.voucher, endpoint, deadline)
        if owner != found.pid:
            raise ProtocolError(f"an endpoint of process {owner} names the memory of {found.pid}")
        peer = LocalPeer(found)
        peer.require_alive()
        peer.require_reachable()
        return peer

    def disconnect(self, peer: LocalPeer) -> None:
        peer.connected = False

    def close(self) -> None:
        forget(self._told)
        self._token[:] = 0  # readers see that the carrier is closed
        self._workers.close()
        self._helpers.close()

    def submit(self, peer: LocalPeer, copies: Copies, *, reading: bool) -> Transfer:
        def work(job: Job) -> None:
            arrays = checked(copies, ours=self._table, theirs=peer.regions, reading=reading)
            peer.require_alive()

            def carry(part: Copies, _: Copies | None) -> None:
                if not peer.connected:
                    raise Cancelled("the peer was disconnected on this side")
                try:
                    _move(peer, part, reading=reading)
                except TransferError:
                    peer.require_alive()  # a lost peer is the better reason
                    raise

            share(job, slices(arrays, SLICE_BYTES), carry, self._helpers, self._helping)
            peer.require_alive()  # the bytes are right only if the peer was open until now

        return self._workers.submit(Job(work, "a local read" if reading else "a local write"))


def _move(peer: LocalPeer, part: Copies, *, reading: bool) -> None:
    """Move a slice of at most `WINDOW` copies, all of them checked and none empty."""
    if not reading or not covers_pay(part):
        (host.read if reading else host.write)(peer.pid, part.src, part.dst, part.length)
        return
    buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)
    for first in range(0, len(part), COVERED_RUNS):
        few = part[first : first + COVERED_RUNS]
        address, length, at = covers(peer.regions, few.src, few.length)
        host.read(peer.pid, address, buffer.ctypes.data + np.cumsum(length) - length, length)
        host.copy_runs(buffer.ctypes.data + at, few.dst, few.length)


def covers_pay(part: Copies) -> bool:
    """Whether all runs are short, and most begin close behind the one before, with a gap."""
    if int(part.length.max()) > MOST_STEP_BYTES:
        return False
    gap = part.src[1:] - part.src[:-1] - part.length[:-1]
    return 2 * int(np.count_nonzero(_near(part.src) & (gap > 0))) >= len(part)


def covers(regions: RegionTable, runs: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Addresses and lengths of the covers, in the order of the runs, and the offset of each run in
    the bytes of all covers."""
    near = _near(runs) & (runs[1:] >= runs[:-1] + length[:-1])
    if len(regions) > 1:
        of = np.searchsorted(regions.starts, runs, side="right")
        near &= of[1:] == of[:-1]
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(~near) + 1))
    tails = np.append(heads[1:], len(runs)) - 1
    address = runs[heads]
    sizes = runs[tails] + length[tails] - address
    begins = np.cumsum(sizes) - sizes
    return address, sizes, runs + np.repeat(begins - address, tails + 1 - heads)


def _near(runs: Ints) -> NDArray[np.bool_]:
    """Whether each run but the first begins within `MOST_STEP_BYTES` after the one before."""
    step = runs[1:] - runs[:-1]
    found: NDArray[np.bool_] = (step > 0) & (step <= MOST_STEP_BYTES)
    return found


def boot_id() -> str:
    return _text("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_ticks(pid: int) -> int:
    """When the process started, or -1 if there is no such process."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()  # the name may hold anything
    return int(fields[19]) if len(fields) > 19 else -1


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()  # a process's name may be any bytes
    except OSError:
        return ""
