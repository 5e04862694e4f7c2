"""Device memory for carriers that move host memory: gathered to and scattered from pinned chunks.

    outgoing   one kernel brings runs together on the device, the bus takes them to the host
    incoming   the bus takes them to the device, one kernel puts them where they belong

So two hosts with GPUs and nothing but TCP between them work: `TcpCarrier(memory=DeviceMemory(...))`
sends a chunk while the next ones cross the bus, and receives one while the last ones do. Both are
generators of pinned chunks, in the order of the runs:

    with closing(memory.outgoing(address, length)) as chunks:
        for chunk in chunks:        # holds the next bytes until the next one is asked for
            socket.send(chunk)
    with closing(memory.incoming(address, length)) as chunks:
        for chunk in chunks:        # to be filled before the next one is asked for
            socket.recv_into(chunk)

When `incoming` has ended, all is visible. One that is closed before its end waits for what it has
begun, so that nothing is written to memory after it. How a lane does it: staging_lane.py;
how many there are: staging_lanes.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager

from kvferry.errors import TransferError
from kvferry.transport import cuda_kernels, cuda_mix
from kvferry.transport.base import MemoryRegion
from kvferry.transport.cuda_driver import Device, device, place_of
from kvferry.transport.cuda_mapped import Mapped
from kvferry.transport.cuda_work import Runs
from kvferry.transport.memory import Bytes, Ints
from kvferry.transport.mixing import Mixed, mix_on_host
from kvferry.transport.regions import Arrays
from kvferry.transport.staging_lane import RING_CHUNKS, Chunk, Piece, StagingLane, pieces
from kvferry.transport.staging_lanes import StagingLanes


class DeviceMemory:
    """Regions of one GPU's memory. Implements `memory.StagedMemory`; any number of threads."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._lanes: StagingLanes | None = None
        self._regions: list[MemoryRegion] = []
        self._device: Device | None = None
        self._memory = Mapped.of([])
        self.register(regions)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for region in regions:
            found = place_of(region.address) if region.bytes else None
            if found is None or (self._device and found.ordinal != self._device.ordinal):
                raise TransferError(
                    f"{region.bytes} bytes at {region.address:#x} are not memory of one GPU"
                )
            if self._device is None:
                self._device = device(found.ordinal)
                self._lanes = StagingLanes(self._device)
                cuda_kernels.warm_aside(self._device)
        self._regions += regions
        self._memory = Mapped.of([(self._regions, 0)])

    def outgoing(self, address: Ints, length: Ints) -> Generator[Bytes]:
        """The runs' bytes in chunks, each of which stays until the next one is asked for."""
        self._require(address, length)
        with self._lane() as lane:
            parts = pieces(address, length, lane.width.piece_bytes)
            waiting: deque[Chunk] = deque()  # oldest first
            for chunk in self._gather(lane, parts):
                waiting.append(chunk)
                if len(waiting) == RING_CHUNKS:
                    yield waiting.popleft().settled()
            while waiting:
                yield waiting.popleft().settled()

    def incoming(self, address: Ints, length: Ints) -> Generator[Bytes]:
        """Chunks to be filled with the runs' bytes; when it ends, they are in their places."""
        self._require(address, length)
        on = self._on()
        with self._lane() as lane:
            parts, step = pieces(address, length, lane.width.piece_bytes), lane.width.chunk_bytes
            for number, piece in enumerate(parts):
                with on.current():
                    half = lane.half(number)
                for offset in range(0, piece.bytes, step):
                    chunk = lane.chunk(piece.bytes - offset)
                    yield chunk.settled()
                    with on.current():
                        lane.back(chunk, half, offset)
                with on.current():
                    lane.scatter(piece, half, self._memory)
            with on.current():
                lane.finish()

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None:
        """The runs, one after another, to the beginning of `into`; returns when they are there."""
        self._require(address, length, len(into))
        done = 0
        for chunk in self.outgoing(address, length):
            into[done : done + len(chunk)] = chunk
            done += len(chunk)

    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None:
        """The beginning of `source` to the runs; returns when they are visible."""
        self._require(address, length, len(source))
        done = 0
        for chunk in self.incoming(address, length):
            chunk[:] = source[done : done + len(chunk)]
            done += len(chunk)

    def mix(self, address: Ints, length: Ints) -> Mixed:
        """The sums of `mix128` (mixing.py): by a kernel, where runs are aligned as caches are."""
        self._require(address, length)
        if len(address) == 0 or not (cuda_kernels.available() and cuda_mix.takes(address, length)):
            return mix_on_host(self, address, length)
        with self._lane() as lane, self._on().current():
            return cuda_mix.mix(lane.lane, address, length)

    def zero(self, address: Ints, length: Ints) -> None:
        """Set the runs to zero; returns when that is visible."""
        self._require(address, length)
        with self._lane() as lane, self._on().current():
            lane.lane.copy(Runs.of_arrays(Arrays(address, address, length)), fill=True)
            lane.finish()

    def close(self) -> None:
        """Gives staging memory back, except what is still in use."""
        if self._lanes is not None:
            self._lanes.close()

    def _gather(self, lane: StagingLane, parts: Iterator[Piece]) -> Iterator[Chunk]:
        """Queue chunk after chunk; whoever asks for one has done with the one of a ring before."""
        on = self._on()
        for number, piece in enumerate(parts):
            with on.current():
                half = lane.half(number)
                lane.gather(piece, half, self._memory)
            for offset in range(0, piece.bytes, lane.width.chunk_bytes):
                chunk = lane.chunk(piece.bytes - offset)
                with on.current():
                    lane.out(half, offset, chunk)
                yield chunk
            with on.current():
                half.moved.record(lane.bus)

    def _on(self) -> Device:
        if self._device is None:
            raise TransferError("no device memory is registered")
        return self._device

    def _require(self, address: Ints, length: Ints, room: int | None = None) -> None:
        runs = Arrays.of(Arrays(address, address, length))
        self._memory.table.require("this process", runs.src, runs.length)
        if room is not None and int(runs.length.sum()) > room:
            raise TransferError(f"runs of {int(runs.length.sum())} bytes and a buffer of {room}")

    def _lane(self) -> AbstractContextManager[StagingLane]:
        """A lane for one thread; when it is given back, nothing of it is under way."""
        if self._lanes is None:
            raise TransferError("no device memory is registered")
        return self._lanes.lane()
