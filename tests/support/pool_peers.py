"""Processes that use one embedded store at the same time, and the objects that they agree on.

Object number n has a length and bytes that follow from n alone, so that any process can tell
whether what it reads is what anyone wrote: the generator shares nothing with the store.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from kvferry.carriers.base import MemoryRegion
from kvferry.pool.embedded.eviction import Tiers
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices

ROOM = 1 << 20
MEMORY, DISK = 6 << 20, 16 << 20
OBJECTS = 80


def content(number: int) -> np.ndarray:
    length = 1 + (number * 7919) % 300_000
    return np.frombuffer(random.Random(number).randbytes(length), dtype=np.uint8)


def in_pieces(base: int, length: int, pieces: int) -> Slices:
    """The same bytes as several ranges of memory."""
    cuts = np.linspace(0, length, pieces + 1).astype(np.int64)
    return Slices.whole(base + cuts[:-1], np.diff(cuts))


def tiers_of(store: EmbeddedStore) -> Tiers:
    """What processes share of a store: tests damage it, and hold its lock."""
    return store._tiers


class Peer:
    """A store with one buffer to put from and one to get into."""

    def __init__(
        self, directory: Path, disk: bool = True, memory: int = MEMORY, **options: object
    ) -> None:
        self.memory = np.zeros(2 * ROOM, dtype=np.uint8)
        self.store = EmbeddedStore(
            directory / "memory",
            memory,
            directory / "disk" if disk else None,
            DISK if disk else 0,
            slots=1 << 12,
            **options,  # type: ignore[arg-type]
        )
        self.base = int(self.memory.ctypes.data)
        self.store.register([MemoryRegion(self.base, self.memory.nbytes)])

    @property
    def tiers(self) -> Tiers:
        return tiers_of(self.store)

    def put(self, number: int) -> Outcome:
        data = content(number)
        self.memory[: len(data)] = data
        ranges = in_pieces(self.base, len(data), 1 + number % 7)
        return self.store.put([f"object/{number}"], [ranges], time.monotonic() + 30)[0]

    def get(self, number: int) -> Outcome:
        """Some slices of it; they must be right where the store says so."""
        data = content(number)
        rng = random.Random(time.perf_counter_ns())
        begin = rng.randrange(len(data))
        end = rng.randrange(begin, len(data)) + 1
        if rng.random() < 0.5:
            begin, end = 0, len(data)
        pieces = in_pieces(self.base + ROOM, end - begin, 1 + rng.randrange(5))
        offset = pieces.address - (self.base + ROOM) + begin
        self.memory[ROOM:] = 0
        wanted = Slices(offset, pieces.address, pieces.length)
        outcome = self.store.get([f"object/{number}"], [wanted], time.monotonic() + 30)[0]
        if outcome is Outcome.DONE:
            got = self.memory[ROOM : ROOM + end - begin]
            assert np.array_equal(got, data[begin:end]), f"object {number} has wrong bytes"
        return outcome

    def close(self) -> None:
        self.store.close()


def work(directory: Path, seed: int, seconds: float) -> None:
    """Put, get, tell requests and remove at random; say what was not allowed to happen."""
    rng = random.Random(seed)
    peer = Peer(directory)
    print("ready", flush=True)
    until = time.monotonic() + seconds
    counts: dict[str, int] = {}
    while time.monotonic() < until:
        number = rng.randrange(OBJECTS)
        match rng.randrange(10):
            case 0:
                first = rng.randrange(OBJECTS - 8)
                keys = [f"object/{n}" for n in range(first, first + 8)]
                peer.store.access(keys, time.monotonic() + 30)
                continue
            case 1:
                peer.store.remove([f"object/{number}"], time.monotonic() + 30)
                continue
            case 2 | 3 | 4 | 5:
                outcome = peer.put(number)
            case _:
                outcome = peer.get(number)
        counts[outcome.value] = counts.get(outcome.value, 0) + 1
    peer.close()
    print(sorted(counts.items()), flush=True)
    bad = counts.get("corrupt", 0) + counts.get("failed", 0)
    sys.exit(1 if bad or not counts.get("done") else 0)


def nursery() -> None:
    """Fork a worker for each line `directory seed seconds`, and say its process id when ready.

    Python starts once; the workers open the store after the fork, as processes of their own.
    """
    for line in sys.stdin:
        directory, seed, seconds = line.split()
        heard, said = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(said, 1)
            try:
                work(Path(directory), int(seed), float(seconds))
            except SystemExit as end:
                os._exit(int(end.code or 0))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(said)
        answer = os.read(heard, 5)
        os.close(heard)
        print(child if answer == b"ready" else -child, flush=True)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    nursery() if len(sys.argv) == 1 else work(
        Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    )
