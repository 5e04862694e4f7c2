"""What a process does with an embedded store, and a tracer that sees every line of its code."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from kvferry.carriers.base import MemoryRegion
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded import store as store_module
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices
from pool_peers import in_pieces, tiers_of
from waiting import soon

CODE = str(Path(store_module.__file__).parent)
MEMORY, DISK, ROOM = 512 << 10, 1 << 20, 64 << 10
KEYS = [f"key/{n}" for n in range(16)]
RECORD = b"a record" * 100
Point = tuple[str, int]  # a file of the store's code, and a line


@cache
def content(key: str) -> np.ndarray:
    """All need the same memory, so that any of them takes any other's place."""
    return np.frombuffer(random.Random(key).randbytes(60_000 + int(key[4:])), dtype=np.uint8)


class Process:
    """A store as one process has it open."""

    def __init__(self, place: Path, disk: int) -> None:
        self.store = EmbeddedStore(
            place / "s", MEMORY, place / "d" if disk else None, disk, slots=1 << 10
        )
        self.memory = np.zeros(3 * ROOM, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data)
        self.store.register([MemoryRegion(self.base, self.memory.nbytes)])
        self.tiers = tiers_of(self.store)

    def put(self, *keys: str, seconds: float = 20.0) -> list[Outcome]:
        parts = []
        for at, key in enumerate(keys):
            data = content(key)
            self.memory[at * ROOM : at * ROOM + len(data)] = data
            parts.append(in_pieces(self.base + at * ROOM, len(data), 3))
        return self.store.put(keys, parts, soon(seconds))

    def get(self, *keys: str, seconds: float = 20.0) -> list[Outcome]:
        wanted = []
        for at, key in enumerate(keys):
            pieces = in_pieces(self.base + at * ROOM, len(content(key)) - 1000, 2)
            offset = pieces.address - self.base - at * ROOM + 1000
            wanted.append(Slices(offset, pieces.address, pieces.length))
        self.memory[:] = 255
        outcomes = self.store.get(keys, wanted, soon(seconds))
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            if outcome is Outcome.DONE:
                data = content(key)[1000:]
                assert np.array_equal(self.memory[at * ROOM : at * ROOM + len(data)], data), key
        return outcomes

    def lend(self, *keys: str) -> list[Outcome]:
        """As a device reads: the bytes of objects that stayed are right."""
        with self.store.lending(keys) as lent:
            which, read = np.flatnonzero(lent.there), []
            for i in which.tolist():
                read.append(ctypes.string_at(int(lent.place[i]), int(lent.length[i])))
            stayed = lent.still(which).tolist()
            for i, data, there in zip(which.tolist(), read, stayed, strict=True):
                assert not there or data == content(keys[i]).tobytes(), keys[i]
        return []

    def close(self) -> None:
        self.store.close()


Work = Callable[[Process], list[Outcome]]


def nothing(result: object) -> list[Outcome]:
    return []


def record(one: Process) -> list[Outcome]:
    assert one.store.get_bytes("record", soon()) in (None, RECORD)
    return [one.store.put_bytes("record", RECORD, soon())]


# What the process does that is stopped
WORK: dict[str, Work] = {
    "get": lambda one: one.get("key/9", "key/8"),
    "get from disk": lambda one: one.get("key/0", "key/1"),
    "lend": lambda one: one.lend("key/9", "key/8"),
    "put": lambda one: one.put("key/10", "key/11"),
    "put again": lambda one: one.put("key/0", "key/12", "key/9"),
    "access": lambda one: nothing(one.store.access(KEYS[:6], soon())),
    "remove": lambda one: nothing(one.store.remove(["key/0", "key/9"], soon())),
    "evict": lambda one: nothing(one.store.evict(200_000, soon())),
    "clear": lambda one: nothing(one.store.clear(soon())),
    "record": record,
}


@contextmanager
def traced(before: Callable[[str, int], None]) -> Iterator[None]:
    """Call this before each line of the store's code that this thread comes to."""

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            before(Path(frame.f_code.co_filename).name, frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        return line if code.co_filename.startswith(CODE) or code.co_name == "lend" else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)


def fill(one: Process) -> None:
    """The same objects as each time: the first two on disk if there is one, eight in memory, which
    are as many as it takes."""
    one.store.clear(soon())
    one.put(*KEYS[:2])
    one.tiers.evict_rows(one.tiers.index.find(*ix.hash_keys(KEYS[:2])), soon())
    for first in range(2, 10, 2):
        assert one.put(*KEYS[first : first + 2]) == [Outcome.DONE] * 2


def lines_of(work: Callable[[], object]) -> list[Point]:
    """Those that it comes to."""
    found: dict[Point, None] = {}
    with traced(lambda file, line: found.setdefault((file, line))):
        work()
    return list(found)


def die_before(point: Point, times: int, work: Callable[[], object]) -> None:
    """The process is killed when it has come to this line so many times."""
    left = times

    def before(*here: object) -> None:
        nonlocal left
        left -= here == point
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    with traced(before):
        work()
