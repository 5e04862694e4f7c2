"""The two processes of `kvferry bench packed` and of calibration, and the batches they move.

Every carrier is there once, and is told before each batch how to move it: two engines of one
library in the same two processes differ, by luck, by up to a factor of two.

A batch is what a token-major cache leaves between engines of different tp: blocks of 16 tokens from
random places, of each token one run, as long as the gap to the next, on both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvferry.bench.movers import quiet_libraries
from kvferry.bench.wanted import Wanted
from kvferry.errors import TransferError
from kvferry.transport.base import Carrier, Ints, MemoryRegion
from kvferry.transport.cost import Costs, Packing, shipped_costs
from kvferry.transport.regions import Arrays
from kvferry.transport.registry import make_carrier

CARRIERS = ("local", "tcp", "mooncake", "nixl")
PACKINGS: tuple[Packing, ...] = ("direct", "packed", "auto")
BUFFER_BYTES = 128 << 20
BATCH_BYTES = 16 << 20
# Of one batch: what the slowest mode moves in about a tenth of a second.
MOST_RUNS = {"local": 1 << 16, "tcp": 1 << 16, "mooncake": 1 << 12, "nixl": 1 << 14}
BLOCK_TOKENS = 16
WAIT_SECONDS = 60.0
CPU_CLOCK = 2  # Linux: with a process's number, the clock of what its threads have spent


def runs_of(carrier: str, size: int) -> int:
    return min(BATCH_BYTES // size, MOST_RUNS[carrier])


class Packs(Carrier, Protocol):
    packing: Packing


@dataclass(frozen=True, slots=True)
class Owner:
    """The other process, as this one sees it."""

    process: subprocess.Popen[str]

    def hear(self) -> list[str]:
        assert self.process.stdout
        try:
            found: list[str] = json.loads(self.process.stdout.readline())
        except ValueError:
            raise TransferError("the process that owns the memory has ended") from None
        return found

    def set(self, carrier: str, packing: Packing) -> None:
        """How it serves, for carriers of which both ends choose."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([carrier, packing]) + "\n")
        self.process.stdin.flush()
        self.hear()

    def cpu_seconds(self) -> float:
        return time.clock_gettime((~self.process.pid << 3) | CPU_CLOCK)


@dataclass(frozen=True, slots=True)
class Bench:
    owner: Owner
    source: int  # address there
    landing: NDArray[np.uint8]
    peers: dict[str, tuple[Packs, Any]]  # of each carrier

    def token_major(self, size: int, runs: int) -> Arrays:
        return token_major(self.source, self.landing.ctypes.data, size, runs)

    def rounds(
        self, carrier: str, copies: Arrays, modes: Sequence[Packing], seconds: float, least: int
    ) -> NDArray[np.float64]:
        """By round and mode: seconds, and those that both processes' threads spent on it. In what
        order the modes come, is drawn for each round."""
        for mode in modes:
            self._measure(carrier, copies, mode)  # pages, connections, threads
        found: list[list[tuple[float, float]]] = []
        rng = np.random.default_rng(len(copies))
        until = time.monotonic() + seconds
        while len(found) < least or time.monotonic() < until:
            times = [(0.0, 0.0)] * len(modes)
            for number in rng.permutation(len(modes)).tolist():
                times[number] = self._measure(carrier, copies, modes[number])
            found.append(times)
        return np.array(found)

    def _measure(self, carrier: str, copies: Arrays, mode: Packing) -> tuple[float, float]:
        ours, peer = self.peers[carrier]
        ours.packing = mode
        self.owner.set(carrier, mode)
        spent, begin = self._cpu(), time.perf_counter()
        ours.read(peer, copies).wait(time.monotonic() + WAIT_SECONDS)
        return time.perf_counter() - begin, self._cpu() - spent

    def _cpu(self) -> float:
        return self.owner.cpu_seconds() + time.process_time()


def token_major(source: int, landing: int, size: int, runs: int) -> Arrays:
    rng = np.random.default_rng(size)
    src, dst = (_tokens(rng, size, runs) for _ in range(2))
    return Arrays(src + source, dst + landing, np.full(runs, size, dtype=np.int64))


def _tokens(rng: np.random.Generator, size: int, runs: int) -> Ints:
    """Offsets of runs: blocks of tokens anywhere, of each token one run of two."""
    stride = 2
    block = BLOCK_TOKENS * stride * size
    blocks = -(-runs // BLOCK_TOKENS)
    begins = rng.permutation(BUFFER_BYTES // block)[:blocks] * block
    within = np.arange(BLOCK_TOKENS) * stride * size
    found: Ints = (begins[:, None] + within).reshape(-1)[:runs].astype(np.int64)
    return found


@contextmanager
def bench(wanted: Wanted, costs: Costs | None = None) -> Iterator[Bench]:
    """Every carrier, connected to another process; `costs`: not this machine's. One that does not
    go its own way is refused or left out of `wanted`."""
    landing = np.full(BUFFER_BYTES, 1, dtype=np.uint8)
    names = list(wanted.names)
    code = f"from kvferry.bench.packed_pair import own; own({names}, {costs is not None})"
    with (
        quiet_libraries(),
        ExitStack() as stack,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            owner = Owner(process)
            source, *endpoints = owner.hear()
            peers: dict[str, tuple[Packs, Any]] = {}
            for name, endpoint in zip(names, endpoints, strict=True):
                carrier = _carrier(name, costs, landing)
                stack.callback(carrier.close)
                until = time.monotonic() + WAIT_SECONDS
                peer = carrier.connect(bytes.fromhex(endpoint), until)
                if wanted.require_own_way(name, getattr(peer, "detour", "")):
                    peers[name] = carrier, peer
            yield Bench(owner, int(source), landing, peers)
        finally:
            process.kill()


def _carrier(name: str, costs: Costs | None, memory: NDArray[np.uint8]) -> Packs:
    """Made to pack: one that is only told later has memory to stage in, too."""
    options: dict[str, Any] = {"writable": True} if name in ("local", "tcp") else {}
    options |= {"host": "127.0.0.1", "packing": "packed", "costs": costs}
    made = cast(Packs, make_carrier(name, **options))
    made.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    return made


def own(names: Sequence[str], shipped: bool) -> None:
    """The other process's program."""
    memory = np.full(BUFFER_BYTES, 3, dtype=np.uint8)
    costs = shipped_costs() if shipped else None
    carriers = {name: _carrier(name, costs, memory) for name in names}
    answer = [str(memory.ctypes.data), *(c.endpoint().hex() for c in carriers.values())]
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        name, packing = json.loads(line)
        carriers[name].packing = packing
        print(json.dumps([name]), flush=True)
    os._exit(0)  # whatever the libraries' threads do
