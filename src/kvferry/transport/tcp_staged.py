"""Payloads of memory that gathers and scatters by itself: two buffers, so that nothing waits.

    send      one buffer is gathered while the other is on its way
    receive   one buffer is scattered while the other arrives

What was begun is always waited for, whatever failed: nothing is written to memory after the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.transport.base import Ints
from kvferry.transport.memory import Bytes, Memory
from kvferry.transport.regions import Arrays, slices
from kvferry.transport.tcp_stream import Stream

Finish = Callable[[], None]  # waits for what was begun; called once


class StagedMemory(Memory, Protocol):
    """Memory that works while its caller does something else."""

    chunk_bytes: int

    def begin_gather(self, address: Ints, length: Ints, into: Bytes) -> Finish: ...
    def begin_scatter(self, source: Bytes, address: Ints, length: Ints) -> Finish: ...
    def buffer(self, count: int) -> Bytes: ...


class Staged:
    """Two buffers of one connection."""

    def __init__(self, memory: StagedMemory) -> None:
        self.memory = memory
        self._buffers = [memory.buffer(memory.chunk_bytes) for _ in range(2)]

    def send(self, stream: Stream, address: Ints, length: Ints, check: Finish | None) -> None:
        begun: list[tuple[Finish, Bytes]] = []  # at most one when a part is begun
        try:
            for number, part in enumerate(self._parts(address, length)):
                buffer = self._buffers[number % 2][: int(part.length.sum())]
                begun.append((self.memory.begin_gather(part.src, part.length, buffer), buffer))
                if len(begun) == 2:
                    self._send_first(stream, begun, check)
            if begun:
                self._send_first(stream, begun, check)
        finally:
            for finish, _ in begun:
                finish()

    def receive(self, stream: Stream, address: Ints, length: Ints, check: Finish | None) -> None:
        begun: list[Finish] = []  # oldest first
        try:
            for number, part in enumerate(self._parts(address, length)):
                if len(begun) == 2:
                    begun.pop(0)()
                buffer = self._buffers[number % 2][: int(part.length.sum())]
                if check is not None:
                    check()
                stream.recv_into(buffer.data)
                begun.append(self.memory.begin_scatter(buffer, part.src, part.length))
        finally:
            while begun:
                begun.pop(0)()

    def _parts(self, address: Ints, length: Ints) -> list[Arrays]:
        return list(slices(Arrays(address, address, length), self.memory.chunk_bytes))

    def _send_first(
        self, stream: Stream, begun: list[tuple[Finish, Bytes]], check: Finish | None
    ) -> None:
        finish, buffer = begun.pop(0)
        finish()
        if check is not None:
            check()
        stream.send(buffer.data)
