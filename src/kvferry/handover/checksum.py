# SPDX-License-Identifier: Apache-2.0
"""Optional checksums: a consumer rank compares the bytes that it read with those of the source.

After the last byte and before the last word, the consumer rank asks each source rank for a digest
of the runs that it read there, in the order of reading. Meanwhile it digests its own runs. If the
digests differ, the load fails. This order is sound: while the hold is open, the source's bytes stay
as they were read, and the answer to the last word proves that the hold was open. False alarms are
possible: a step after the prompt's last may write behind the prompt, into a page that moves whole.
The load then fails although its bytes are good, and the prompt is computed. The source digests on a
separate thread (`Summing`), so that other messages do not wait.

    xxh3     every rank has it. Runs are gathered into a buffer first, so that many short runs are
             as fast as one long run. Runs in GPU memory go through host memory
    mix128   a kernel digests GPU memory in place (carriers/checksum.py). Two ranks use it if both
             name it in the handshake
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvferry.carriers.base import Memory, StagedMemory, slices
from kvferry.carriers.checksum import NAME, MixingMemory, mix_on_host
from kvferry.copies import Copies, table_of
from kvferry.errors import KvferryError, ProtocolError
from kvferry.layout.placement import Ints
from kvferry.net.messages import MOST_RUNS, RUN_BYTES
from kvferry.net.server import Budget
from kvferry.plan import Bound
from kvferry.workers import Threads

log = logging.getLogger("kvferry")


@dataclass(frozen=True, slots=True)
class Algorithm:
    name: str
    slice_bytes: int  # most bytes digested for one message


XXH3 = Algorithm("xxh3", 64 << 20)  # some milliseconds
MIX128 = Algorithm(NAME, 1 << 30)  # half a millisecond
_ALGORITHMS = {one.name: one for one in (XXH3, MIX128)}

CHUNK_BYTES = 1 << 20  # gathered at a time
CLOSE_SECONDS = 5.0
# For tables that wait at one source rank: 512 of the largest. A connection (one reader) may use
# half.
WAITING_BYTES = 256 << 20
LEAST_WAITING_BYTES = WAITING_BYTES >> 10  # charged for each, so that at most 1,024 slices wait


def offered(memory: Memory) -> tuple[str, ...]:
    """The algorithms that a rank with this memory offers, the fastest first."""
    return (MIX128.name, XXH3.name) if isinstance(memory, MixingMemory) else (XXH3.name,)


def common(memory: Memory, theirs: Sequence[str]) -> Algorithm:
    """The fastest algorithm that both ranks have; every rank has xxh3."""
    return _ALGORITHMS[next((name for name in offered(memory) if name in theirs), XXH3.name)]


def named(name: str, memory: Memory) -> Algorithm:
    if name not in offered(memory):
        raise ProtocolError(
            f"this rank makes no {name!r} checksum; it makes {', '.join(offered(memory))}"
        )
    return _ALGORITHMS[name]


def digest(memory: Memory, address: Ints, length: Ints, algorithm: Algorithm = XXH3) -> bytes:
    if algorithm is MIX128:
        if isinstance(memory, MixingMemory):
            return memory.mix(address, length).digest(length)
        return mix_on_host(memory, address, length).digest(length)
    hasher = xxhash.xxh3_128()
    if isinstance(memory, StagedMemory):
        for chunk in memory.outgoing(address, length):
            hasher.update(chunk.data)
        return hasher.digest()
    buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
    for part in slices(Copies(address, address, length), CHUNK_BYTES):
        count = int(part.length.sum())
        memory.gather(part.src, part.length, buffer)
        hasher.update(buffer.data[:count])
    return hasher.digest()


def parts(bound: Bound, algorithm: Algorithm) -> Iterator[Copies]:
    """An edge's copies in the order of reading, cut to the size of messages."""
    for piece in bound.slices(MOST_RUNS):
        yield from slices(piece, algorithm.slice_bytes)


def decode_runs(raw: bytes, algorithm: Algorithm = XXH3) -> tuple[Ints, Ints]:
    """A table that a peer sent. `Memory.gather` checks later that the runs are registered."""
    if len(raw) % RUN_BYTES or not raw:
        raise ProtocolError(f"{len(raw)} bytes are not a table of runs")
    address, length = table_of(raw)
    most = algorithm.slice_bytes
    if int(length.min()) <= 0 or int(length.max()) > most:
        raise ProtocolError("a run is empty, negative or too long")
    if int(length.sum()) > most:
        raise ProtocolError(f"runs of {int(length.sum())} bytes; at most {most} at a time")
    return address, length


class Summing:
    """The thread that digests for readers. It starts with the first question."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._threads = Threads("kvferry-sums", 1)
        self._closed = False
        self._waiting = Budget(WAITING_BYTES)

    def submit(self, work: Callable[[Memory], None], bytes_: int = 0, sender: bytes = b"") -> bool:
        """Queue work; false if too much waits already, or if no thread can start.

        `bytes_` is the memory that the work keeps while it waits. One thread calls this method.
        """
        bytes_ = max(bytes_, LEAST_WAITING_BYTES)
        if not self._waiting.take(bytes_, sender):
            return False

        def counted() -> None:
            try:
                if not self._closed:
                    work(self.memory)
            finally:
                self._waiting.give_back(bytes_, sender)

        try:
            self._threads.submit(counted)
        except KvferryError as error:
            self._waiting.give_back(bytes_, sender)
            log.warning("a checksum is not made: %s", error)
            return False
        return True

    def close(self) -> None:
        """Stop the thread. After this returns, it touches no memory any more."""
        self._closed = True
        self._threads.close()
        self._threads.join(CLOSE_SECONDS)
