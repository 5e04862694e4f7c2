"""One end of a frame's payload: between a stream and this process's memory.

The wire carries the bytes of a frame's ranges one after another, whichever way an end moves them:

    direct   the kernel sends from, and receives into, the ranges themselves, 1,024 a call
    packed   chunk by chunk through a staging buffer that is gathered from, or scattered to, the
             ranges. Transfers use two connections, so that one chunk is gathered or scattered
             while another is on its way; the sockets' own buffers overlap the rest

Memory that plain pointers do not reach is always packed; a GPU's hands out chunks by itself, and
gathers or scatters others while one is on its way (staging.py). A payload is one connection's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np

from kvferry.transport.base import Ints
from kvferry.transport.cost import Choice
from kvferry.transport.iovec import Vectors
from kvferry.transport.memory import Bytes, Memory, is_addressable, is_staged
from kvferry.transport.regions import Arrays, slices
from kvferry.transport.tcp_stream import Stream

CHUNK_BYTES = 1 << 20  # staged at a time: half a millisecond on loopback, and it stays cached

Check = Callable[[], None]


class Payload:
    def __init__(self, stream: Stream, choice: Choice) -> None:
        self._stream, self._choice = stream, choice
        self._buffer: Bytes | None = None

    def send(self, memory: Memory, address: Ints, length: Ints, check: Check | None = None) -> None:
        """The ranges' bytes. Neighbours must have been joined, and all been checked."""
        if not self._packs(memory, length):
            self._stream.send_vectors(Vectors.of(address, length), check)
            return
        if is_staged(memory):
            with closing(memory.outgoing(address, length)) as chunks:
                for chunk in chunks:
                    if check is not None:
                        check()
                    self._stream.send(chunk.data)
            return
        buffer = self._staging()
        for part in slices(Arrays(address, address, length), len(buffer)):
            if check is not None:
                check()
            count = int(part.length.sum())
            memory.gather(part.src, part.length, buffer)
            self._stream.send(buffer.data[:count])

    def receive(
        self, memory: Memory, address: Ints, length: Ints, check: Check | None = None
    ) -> None:
        """Bytes into the ranges."""
        if not self._packs(memory, length):
            self._stream.recv_vectors(Vectors.of(address, length), check)
            return
        if is_staged(memory):
            with closing(memory.incoming(address, length)) as chunks:
                for chunk in chunks:
                    if check is not None:
                        check()
                    self._stream.recv_into(chunk.data)
            return
        buffer = self._staging()
        for part in slices(Arrays(address, address, length), len(buffer)):
            if check is not None:
                check()
            count = int(part.length.sum())
            self._stream.recv_into(buffer.data[:count])
            memory.scatter(buffer, part.src, part.length)

    def _packs(self, memory: Memory, length: Ints) -> bool:
        if not is_addressable(memory):
            return True
        return self._choice.mode(len(length), int(length.sum())) == "packed"

    def _staging(self) -> Bytes:
        if self._buffer is None:
            self._buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
        return self._buffer
