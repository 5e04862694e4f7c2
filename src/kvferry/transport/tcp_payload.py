"""One end of a frame's payload: between a stream and this process's memory.

The wire carries the bytes of a frame's ranges one after another, whichever way an end moves them:

    host memory    the kernel sends from, and receives into, the ranges themselves, 1,024 a call
    a GPU's        chunk by chunk: its memory hands them out by itself, and gathers or scatters
                   others while one is on its way (staging.py)
"""

from __future__ import annotations

from contextlib import closing

from kvferry.transport.base import Ints
from kvferry.transport.iovec import Vectors
from kvferry.transport.memory import Memory, is_staged
from kvferry.transport.tcp_stream import Stream


def send_runs(stream: Stream, memory: Memory, address: Ints, length: Ints) -> None:
    """The ranges' bytes. Neighbours must have been joined, and all been checked."""
    if not is_staged(memory):
        stream.send_vectors(Vectors.of(address, length))
        return
    with closing(memory.outgoing(address, length)) as chunks:
        for chunk in chunks:
            stream.send(chunk.data)


def receive_runs(stream: Stream, memory: Memory, address: Ints, length: Ints) -> None:
    """Bytes into the ranges."""
    if not is_staged(memory):
        stream.recv_vectors(Vectors.of(address, length))
        return
    with closing(memory.incoming(address, length)) as chunks:
        for chunk in chunks:
            stream.recv_into(chunk.data)
