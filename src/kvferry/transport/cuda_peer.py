"""What peers of the cuda carrier know of each other: the endpoint, and memory that is open here."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import Cancelled, ProtocolError, TransferError
from kvferry.transport.base import MemoryRegion
from kvferry.transport.cuda_driver import IPC_HANDLE_BYTES, CudaError, Device, Place, device
from kvferry.transport.cuda_mapped import Mapped
from kvferry.transport.local import MOST_ADDRESS
from kvferry.transport.pulse import TOKEN_BYTES, Pulse


@cache
def this_process() -> bytes:
    """What tells this process from all others, in whatever container or pid namespace."""
    return secrets.token_bytes(TOKEN_BYTES)


os.register_at_fork(after_in_child=this_process.cache_clear)


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """Memory that one IPC handle opens."""

    base: Annotated[int, Meta(ge=0, le=MOST_ADDRESS)]
    size: Annotated[int, Meta(ge=0, le=MOST_ADDRESS)]
    handle: bytes
    gpu: bytes  # its uuid


class CudaEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Which process this is, how to see that it lives, and what of its memory can be opened."""

    carrier: str
    boot: str
    process: bytes  # random: a pid may be another container's too
    host: str  # where its pulse is
    pulse_port: Annotated[int, Meta(ge=1, le=65535)]
    token: bytes
    incarnation: bytes
    allocations: list[Allocation]
    regions: list[tuple[int, int]]
    voucher: str  # the file of the socket at which the owner vouches for all this

    @classmethod
    def decode(cls, raw: bytes) -> CudaEndpoint:
        try:
            endpoint = _endpoints.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"this is not the endpoint of a cuda carrier: {error}") from None
        bad = any(len(a.handle) != IPC_HANDLE_BYTES for a in endpoint.allocations)
        named = endpoint.process, endpoint.token, endpoint.incarnation
        bad |= any(len(name) != TOKEN_BYTES for name in named)
        if endpoint.carrier != "cuda" or bad:
            raise ProtocolError(f"this is not a cuda carrier's endpoint: {endpoint.carrier!r}")
        return endpoint


_endpoints = msgspec.msgpack.Decoder(CudaEndpoint)  # made once: its first use is on many threads


class CudaPeer:
    """A process whose device memory this one has open."""

    def __init__(
        self, pulse: Pulse, memory: Mapped, opened: list[int], on: Device, *, near: bool
    ) -> None:
        self.memory, self._pulse, self._opened, self._device = memory, pulse, opened, on
        self.near = near  # all of its memory is on the GPU that copies
        self._lock = threading.Lock()
        self._users = 0
        self.connected = True

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Its memory stays open meanwhile."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Keep its memory open until `release`."""
        with self._lock:
            self.require_connected()
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
        if not self.connected:
            self._close_if_unused()

    def require_connected(self) -> None:
        if not self.connected:
            raise Cancelled("the peer was disconnected on this side")

    def require_alive(self) -> None:
        self._pulse.require_alive()

    def check(self) -> None:
        self.require_connected()
        self.require_alive()

    def disconnect(self) -> None:
        self.connected = False
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if self.connected or self._users:
                return
            opened, self._opened = self._opened, []
        self._pulse.close()
        with self._device.current():
            for address in opened:
                with contextlib.suppress(CudaError):
                    self._device.close(address)


def export(place: Place) -> Allocation:
    owner = device(place.ordinal)
    try:
        with owner.current():
            handle = owner.export(place.base)
    except CudaError as error:
        raise TransferError(
            f"device memory at {place.base:#x} cannot be shared between processes: {error}. It was "
            "not allocated by cudaMalloc; with torch, set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        ) from None
    return Allocation(place.base, place.bytes, handle, owner.uuid)


def within(regions: Iterable[MemoryRegion], base: int, size: int) -> list[MemoryRegion]:
    """The regions that lie in one allocation."""
    return [r for r in regions if base <= r.address and r.address + r.bytes <= base + size]
