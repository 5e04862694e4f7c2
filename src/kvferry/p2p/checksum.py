"""Checksums over what was read, optional: the bytes that arrived are the bytes that the source has.

After its last byte and before its last word, a consumer rank asks each source rank for the digest
of the runs that it read there, in the order in which it read them, and takes that of its own runs
meanwhile. A difference fails the load. The order matters: an open hold means that the source's
bytes are still those that were read, and the last word that follows proves that it was open.

The runs travel as a table, at most `MOST_RUNS` and `SLICE_BYTES` a message. The source checks that
its hold is open, that the table is well formed and that every run lies in its registered memory,
and digests on a thread of its own (`Summing`), so that other messages do not wait. Runs are
gathered into a buffer first, which makes many short ones as fast to digest as one long one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from kvferry.errors import ProtocolError
from kvferry.layout.rank import Ints
from kvferry.plan import Bound
from kvferry.transport.memory import Memory, is_staged
from kvferry.transport.regions import Arrays, slices
from kvferry.wire.messages import MOST_RUNS, RUN_BYTES

log = logging.getLogger("kvferry")

SLICE_BYTES = 64 << 20  # digested for one message: some milliseconds
CHUNK_BYTES = 1 << 20  # gathered at a time
CLOSE_SECONDS = 5.0
MOST_WAITING = 1024  # slices that one source rank has before it


def digest(memory: Memory, address: Ints, length: Ints) -> bytes:
    """xxh3 (128 bits) of the runs' bytes, one after another."""
    hasher = xxhash.xxh3_128()
    if is_staged(memory):
        for chunk in memory.outgoing(address, length):
            hasher.update(chunk.data)
        return hasher.digest()
    buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
    for part in slices(Arrays(address, address, length), CHUNK_BYTES):
        count = int(part.length.sum())
        memory.gather(part.src, part.length, buffer)
        hasher.update(buffer.data[:count])
    return hasher.digest()


def parts(bound: Bound) -> Iterator[Arrays]:
    """An edge's copies, in the order in which they are read, as messages take them."""
    for piece in bound.slices(MOST_RUNS):
        mine = Arrays(piece.src.copy(), piece.dst.copy(), piece.length.copy())
        yield from slices(mine, SLICE_BYTES)


def encode_runs(address: Ints, length: Ints) -> bytes:
    table = np.empty((len(address), 2), dtype="<i8")
    table[:, 0] = address
    table[:, 1] = length
    return table.tobytes()


def decode_runs(raw: bytes) -> tuple[Ints, Ints]:
    """A table that a peer sent. Whether the runs are ours to read, `gather` sees."""
    if len(raw) % RUN_BYTES or not raw:
        raise ProtocolError(f"{len(raw)} bytes are not a table of runs")
    table = np.frombuffer(raw, dtype="<i8").reshape(-1, 2).astype(np.int64)
    address, length = np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
    if int(length.min()) <= 0 or int(length.max()) > SLICE_BYTES:
        raise ProtocolError("a run is empty, negative or too long")
    if int(length.sum()) > SLICE_BYTES:
        raise ProtocolError(f"runs of {int(length.sum())} bytes; at most {SLICE_BYTES} at a time")
    return address, length


class Summing:
    """The thread that digests for readers; started when the first one asks."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._queue: queue.SimpleQueue[Callable[[Memory], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: Callable[[Memory], None]) -> bool:
        """By one thread; false where too much waits already."""
        if self._queue.qsize() >= MOST_WAITING:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-sums", daemon=True)
            self._thread.start()
        self._queue.put(work)
        return True

    def close(self) -> None:
        """Returns when no memory is touched any more."""
        self._closed = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._closed:
                return
            try:
                work(self._memory)
            except Exception:
                log.exception("a checksum could not be made")
