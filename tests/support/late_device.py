"""A device that is none, and as late as a device may be.

Its streams only note what is queued. Work is done when the host asks or waits, piece by piece, each
time of any stream whose next piece may begin: an order that a real device could choose as well. So
memory that is used again too early shows as wrong bytes. A wait that nothing ends is an error.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

import host_device
from host_device import CopyKernel, HostDevice, hash_at_once
from kvferry.carriers.cuda import bus, kernels, staging, stream
from kvferry.carriers.cuda.driver import Rows
from kvferry.carriers.cuda.kernels import Kernel

MOST_AT_A_TIME = 4
Work = Callable[[], object]


class Queues:
    """All streams of the device."""

    def __init__(self, seed: int) -> None:
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.streams: list[LateStream] = []

    def some(self) -> None:
        """The host asks, and a little has been done meanwhile."""
        for _ in range(self.random.randrange(MOST_AT_A_TIME)):
            self._one()

    def until(self, over: Callable[[], bool]) -> None:
        while True:
            with self.lock:
                if over():
                    return
                assert self._one(), "nothing ends this wait"

    def _one(self) -> bool:
        with self.lock:
            ready = [one for one in self.streams if one.queued and one.queued[0][0]()]
            if ready:
                self.random.choice(ready).queued.popleft()[1]()
            return bool(ready)


queues = Queues(0)


class AtOnce(host_device.Stream):
    """What a piece of work does when its turn has come."""

    def __init__(self) -> None:
        pass

    def begin(self) -> None:
        pass


at_once = AtOnce()


class LateEvent(host_device.Handle):
    by_handle: ClassVar[dict[int, LateEvent]] = {}

    def __init__(self, *, blocking: bool = False) -> None:
        super().__init__()
        self.recorded = self.reached = 0

    def record(self, stream: LateStream, *, waits: bool = False) -> None:
        self.recorded += 1
        stream.add(partial(setattr, self, "reached", self.recorded))

    def reaches(self, number: int) -> bool:
        return self.reached >= number

    def done(self) -> bool:
        queues.some()
        return self.reaches(self.recorded)

    done_yet = done

    def wait(self) -> None:
        queues.until(partial(self.reaches, self.recorded))


class LateStream(host_device.Handle):
    def __init__(self, *, urgency: int = 0) -> None:
        super().__init__()
        self.queued: deque[tuple[Callable[[], bool], Work]] = deque()
        with queues.lock:
            queues.streams.append(self)

    def add(self, work: Work, may_begin: Callable[[], bool] = lambda: True) -> None:
        with queues.lock:
            self.queued.append((may_begin, work))

    def copy(self, dst: int, src: int, size: int) -> None:
        self.add(partial(at_once.copy, dst, src, size))

    copy_at_once = copy

    def copy_rows(
        self,
        rows: Rows,
        *,
        outward: bool,
        waits: bool = False,
        gap: Work | None = None,
        gap_bytes: int = 1 << 62,
    ) -> None:
        rows, cuts = rows.cut(gap_bytes)
        for number, one in enumerate(zip(*_fields(rows), strict=True)):
            if number in cuts[1:] and gap is not None:
                gap()
            some = Rows.of([tuple(map(int, one))])  # type: ignore[list-item]
            self.add(partial(at_once.copy_rows, some, outward=outward))

    def zero(self, dst: int, size: int) -> None:
        self.add(partial(at_once.zero, dst, size))

    def wait_for(self, event: LateEvent | int, *, waits: bool = False) -> None:
        if isinstance(event, int):
            event = LateEvent.by_handle[event]
        self.add(lambda: None, partial(event.reaches, event.recorded))

    def synchronize(self) -> None:
        queues.until(lambda: not self.queued)


def _fields(rows: Rows) -> tuple[Any, ...]:
    return (rows.host, rows.host_pitch, rows.device, rows.device_pitch, rows.width, rows.height)


class LateKernel(CopyKernel):
    def launch(self, grid: int, stream: Any, values: list[int]) -> None:
        stream.add(partial(super().launch, grid, stream, list(values)))


class LateDevice(HostDevice):
    def free_pinned(self, address: int) -> None:
        """What is freed has other bytes, and is nobody's memory again."""
        memory = self.live[address]
        super().free_pinned(address)
        memory[:] = 0xDD
        _freed.append(memory)


_freed: list[np.ndarray] = []


def use(patch: pytest.MonkeyPatch, seed: int) -> HostDevice:
    """All addresses are of this device from now on. Kernels copy and hash."""
    _freed.clear()
    host_device.ahead.clear()
    found = host_device.use_bus(patch, LateDevice())
    patch.setattr("late_device.queues", Queues(seed))
    patch.setattr(LateEvent, "by_handle", {})
    for module in (bus, staging, stream):
        patch.setattr(module, "CudaEvent", LateEvent)
        patch.setattr(module, "CudaStream", LateStream)

    def hash_late(device: Any, on: LateStream, **what: Any) -> None:
        on.add(partial(hash_at_once, device, at_once, **what))

    def kernel(device: Any, chunk: int, *, search: bool, fill: bool, grain: int) -> Kernel:
        return Kernel(LateKernel(chunk, search, fill, grain), chunk, host_device.COUNT)  # type: ignore[arg-type]

    patch.setattr(bus.xxh3, "queue", hash_late)
    patch.setattr(kernels, "available", lambda: True)
    patch.setattr(kernels, "kernel", kernel)
    patch.setattr(staging.DeviceMemory, "_warm", lambda self: self.warmed.set())
    return found
