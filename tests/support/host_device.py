"""A device that is none: its memory is this process's, what is queued on it happens at once.

So buffers and their owners can be looked at where there is no GPU. `live` has what was allocated
and not freed; freeing what is not live is an error, as it is a crash on a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xxhash

from kvferry.carriers.cuda import bus, kernels, staging, stream, xxh3
from kvferry.carriers.cuda.driver import CudaError, Rows

ahead: dict[int, Callable[[], None]] = {}  # by handle, what happens before others' events
made: list[Any] = []  # streams and events that were not destroyed
COUNT = 4  # chunks of a program


class Handle:
    def __init__(self) -> None:
        made.append(self)

    def destroy(self) -> None:
        made.remove(self)


class Event(Handle):
    def __init__(self, *, blocking: bool = False) -> None:
        super().__init__()

    def wait(self) -> None: ...

    def record(self, stream: Any, *, waits: bool = False) -> None: ...

    def done(self) -> bool:
        return True

    done_yet = done


class Stream(Handle):
    def __init__(self, *, urgency: int = 0) -> None:
        super().__init__()
        self.waited: set[int] = set()

    def begin(self) -> None:
        """Before what reads or writes objects: others' work that lies ahead was waited for, all of
        it or its beginning; bytes tell which was necessary."""
        assert not ahead or self.waited & set(ahead), "a stream does not wait for a step"

    def copy(self, dst: int, src: int, size: int) -> None:
        ctypes.memmove(dst, src, size)

    copy_at_once = copy

    def copy_rows(
        self,
        rows: Rows,
        *,
        outward: bool,
        waits: bool = False,
        gap: Callable[[], None] | None = None,
        gap_bytes: int = 1 << 62,
    ) -> None:
        self.begin()
        rows, cuts = rows.cut(gap_bytes)
        fields = (rows.host, rows.host_pitch, rows.device, rows.device_pitch)
        for number, copy in enumerate(zip(*fields, rows.width, rows.height, strict=True)):
            host, host_pitch, device, device_pitch, width, height = map(int, copy)
            if number in cuts[1:] and gap is not None:
                gap()
            for row in range(height):
                here, there = host + row * host_pitch, device + row * device_pitch
                dst, src = (here, there) if outward else (there, here)
                ctypes.memmove(dst, src, width)

    def zero(self, dst: int, size: int) -> None:
        ctypes.memset(dst, 0, size)

    def wait_for(self, event: Event | int, *, waits: bool = False) -> None:
        if isinstance(event, int):
            self.waited.add(event)
            ahead[event]()

    def synchronize(self) -> None: ...


@dataclass
class HostDevice:
    ordinal: int = 0
    uuid: bytes = b"u" * 16
    name: str = "none"
    room: int = 1 << 40  # bytes of device memory that are left
    live: dict[int, np.ndarray] = field(default_factory=dict)
    most_bytes: int = 0  # that were live at once
    registered: dict[int, int] = field(default_factory=dict)  # host memory, by address
    _lock: Any = field(default_factory=threading.Lock)

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allocate(self, size: int) -> int:
        if size > self.room:
            raise CudaError("out of memory")
        self.room -= size
        return int(self.pinned(size).ctypes.data)

    def pinned(self, size: int) -> np.ndarray:
        whole = np.full(size + 256, 0xEE, dtype=np.uint8)  # aligned as a device's memory is
        first = -whole.ctypes.data % 256
        memory = whole[first : first + size]
        with self._lock:
            self.live[memory.ctypes.data] = memory
            self.most_bytes = max(self.most_bytes, sum(m.nbytes for m in self.live.values()))
        return memory

    def free(self, address: int) -> None:
        self.room += self.live[address].nbytes
        self.free_pinned(address)

    def free_pinned(self, address: int) -> None:
        with self._lock:
            del self.live[address]

    def register_host(self, address: int, size: int) -> None:
        with self._lock:
            self.registered[address] = size

    def unregister_host(self, address: int) -> None:
        with self._lock:
            del self.registered[address]


@dataclass
class CopyKernel:
    """The copy kernel of one form, written down again: it reads nothing but the numbers that it is
    handed, item by item."""

    chunk: int
    search: bool
    fill: bool
    grain: int
    launches: int = 0

    def launch(self, grid: int, stream: Any, values: list[int]) -> None:
        tables, (length, src_shift, dst_shift) = values[:8], values[8:11]
        segments, steps, chunks, rounds, begin, end = values[11:17]
        assert grid == -(-(end - begin) // COUNT)
        assert 2**rounds > segments
        self.launches += 1

        def at(table: int, index: int) -> int:
            return ctypes.c_int64.from_address(tables[table] + 8 * index).value

        for item in range(begin, end):
            if self.search:
                outer, within = divmod(item, chunks)
                row, step = divmod(outer, steps)
                segment = max(s for s in range(segments) if at(7, s) <= within)
                chunk, full = within - at(7, segment), at(6, segment)
            else:
                copy, chunk = divmod(item, chunks)
                outer, step = divmod(copy, steps)
                row, segment = divmod(outer, segments)
                full = length
            done = chunk * self.chunk
            size = min(self.chunk, full - done)
            src = at(0, row) + at(2, segment) + at(4, step) + done + src_shift
            dst = at(1, row) + at(3, segment) + at(5, step) + done + dst_shift
            assert size > 0 and (src | dst | size) % self.grain == 0
            if self.fill:
                ctypes.memset(dst, 0, size)
            else:
                ctypes.memmove(dst, src, size)


def hash_at_once(
    device: Any,
    stream: Any,
    *,
    runs: int,
    run_bytes: int,
    offsets: int,
    lengths: int,
    table: int,
    sums: int,
    out: int,
    pieces: int,
    per_piece: int,
) -> None:
    """What the kernels of `xxh3` do, by the library that they must agree with."""
    stream.begin()

    def numbers(address: int) -> Any:
        return (ctypes.c_int64 * pieces).from_address(address)

    def of(offset: int, length: int) -> bytes:
        found = bytearray()
        while length:
            run, at = divmod(offset, run_bytes)
            (address,) = (ctypes.c_int64 * 1).from_address(runs + 8 * run)
            size = min(length, run_bytes - at)
            assert (address + at) % 16 == 0
            found += ctypes.string_at(address + at, size)
            offset, length = offset + size, length - size
        return bytes(found)

    assert pieces * per_piece * 8 * xxh3.SUMS <= bus.SCRATCH_BYTES
    into = (ctypes.c_uint64 * pieces).from_address(out)
    for at, (offset, length) in enumerate(zip(numbers(offsets), numbers(lengths), strict=True)):
        assert (length - 1) // 1024 <= per_piece
        into[at] = xxhash.xxh3_64_intdigest(of(offset, length))


def use_bus(patch: pytest.MonkeyPatch, on: HostDevice | None = None) -> HostDevice:
    """The same, with a bus that hashes."""
    found = use(patch, on)
    patch.setattr(bus, "CudaEvent", Event)
    patch.setattr(bus, "CudaStream", Stream)
    patch.setattr(bus, "device_of", lambda addresses: found)
    patch.setattr(bus.xxh3, "queue", hash_at_once)
    patch.setattr(bus.xxh3, "warm", lambda device: None)
    there = types.SimpleNamespace(available=lambda: True, warm=lambda device: None)
    patch.setattr(bus, "kernels", there)
    return found


def use(patch: pytest.MonkeyPatch, on: HostDevice | None = None) -> HostDevice:
    """All addresses are of this device from now on."""
    found = on or HostDevice()
    made.clear()
    for module in (stream, staging):
        patch.setattr(module, "CudaEvent", Event)
        patch.setattr(module, "CudaStream", Stream)
    patch.setattr(kernels, "available", lambda: False)
    patch.setattr(staging, "device_of", lambda addresses: found)
    patch.setattr(staging, "has_memory", lambda address: True)
    return found
