"""The flights (cuda_flight.py) of one carrier: begun by the thread that asks, ended by anyone."""

from __future__ import annotations

import contextlib

from kvferry.errors import TransferError
from kvferry.transport.base import CopyArrays, StridedCopies
from kvferry.transport.cuda_flight import Flight, Pace
from kvferry.transport.cuda_lanes import Lanes
from kvferry.transport.cuda_mapped import Mapped
from kvferry.transport.cuda_peer import CudaPeer
from kvferry.transport.cuda_quick import queue

# What the caller's thread queues by itself, whole: cancelling waits for its end. On the same GPU
# that is 9 milliseconds of an H200, and between GPUs without NVLink about 50.
FLIGHT_BYTES = 16 << 30
FAR_FLIGHT_BYTES = 1 << 30
SWEPT_FLIGHTS = 8  # from so many on, look which have ended without anybody's looking
MOST_FLIGHTS = 32  # each has a stream and its numbers; more wait for one of the carrier's threads


class Flights:
    def __init__(self) -> None:
        self._under_way: dict[Flight, CudaPeer] = {}  # each entry is set and removed in one step
        self._pace = Pace()
        self._closed = False

    def fly(
        self,
        lanes: Lanes,
        peer: CudaPeer,
        copies: CopyArrays | StridedCopies,
        ends: tuple[Mapped, Mapped],
        what: str,
    ) -> Flight | None:
        """Queue it here and now; None where it is not for that, or something stands against it.

        Whatever that is, the other way says it. That the peer lives is seen at the end: till then
        its memory is there, whether it lives or not.
        """
        if not self._room():
            return None
        try:
            peer.hold()
        except TransferError:
            return None
        queued, lane = 0, None
        try:
            with lanes.device.current():
                lane = lanes.take()
                most = FLIGHT_BYTES if peer.near else FAR_FLIGHT_BYTES
                try:
                    queued = queue(lane, copies, *ends, most)
                except BaseException:
                    lane.drain()
                    raise
        except TransferError:
            pass
        finally:
            if not queued:
                if lane is not None:
                    lanes.put(lane)
                peer.release()
        if not queued or lane is None:
            return None

        def land(flight: Flight) -> None:
            self._under_way.pop(flight, None)
            lanes.put(flight.lane)
            try:
                peer.check()
            finally:
                peer.release()

        flight = Flight(lane, what, queued, self._pace, land)
        self._under_way[flight] = peer
        if self._closed or not peer.connected:  # meanwhile, and so it was not seen there
            self.end(peer)
        return flight

    def end(self, peer: CudaPeer | None) -> None:
        """Those of one peer, or all."""
        for flight, its in list(self._under_way.items()):
            if peer is None or its is peer:
                with contextlib.suppress(TransferError):
                    flight.cancel()

    def close(self) -> None:
        self._closed = True
        self.end(None)

    def _room(self) -> bool:
        """Whether there is room for one more, after those have landed that can."""
        if len(self._under_way) >= SWEPT_FLIGHTS:
            for flight in list(self._under_way):
                flight.poll()
        return len(self._under_way) < MOST_FLIGHTS
