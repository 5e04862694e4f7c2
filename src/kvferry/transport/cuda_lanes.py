"""Lanes of one device (cuda_lane.py), kept for the next transfer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvferry.transport.cuda_driver import Device
from kvferry.transport.cuda_lane import Lane


class Lanes:
    """Lanes of one device, made when needed and used again."""

    def __init__(self, device: Device, *, triton: bool | None = None) -> None:
        self.device = device
        self._triton = triton
        self._idle: list[Lane] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for this thread, with the device current; drained when it is given back."""
        with self.device.current():
            lane = self.take()
            try:
                yield lane
            except BaseException:
                lane.drain()
                raise
            finally:
                self.put(lane)

    def take(self) -> Lane:
        """A lane, which `put` gives back; the device is current."""
        with self._lock:
            lane = self._idle.pop() if self._idle else None
        if lane is None:
            return Lane(self.device, triton=self._triton)
        lane.begin()
        return lane

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lanes, self._idle = self._idle, []
        with self.device.current():
            for lane in lanes:
                lane.free()

    def put(self, lane: Lane) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(lane)
                return
        with self.device.current():
            lane.free()
