"""The two processes of `kvferry bench packed` and of calibration, and the batches they move.

A batch is what a token-major cache leaves between engines of different tp: blocks of 16 tokens from
random places, of each token one run, as long as the gap to the next, on both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.bench.movers import installed, quiet_libraries
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
CPU_SECONDS = 0.3  # spent on each measurement of it: thirty of the kernel's ticks
LEAST_CPU_ROUNDS = 3


def present(carriers: Sequence[str] = CARRIERS) -> list[str]:
    """Those of them whose libraries are installed."""
    reasons = installed()
    return [name for name in carriers if not reasons[name]]


def runs_of(carrier: str, size: int) -> int:
    return min(BATCH_BYTES // size, MOST_RUNS[carrier])


@dataclass(frozen=True, slots=True)
class Bench:
    owner: int  # process
    source: int  # address there
    landing: NDArray[np.uint8]
    reads: dict[tuple[str, Packing], Callable[[Arrays], None]]

    def token_major(self, size: int, runs: int) -> Arrays:
        rng = np.random.default_rng(size)
        src, dst = (_tokens(rng, size, runs) for _ in range(2))
        return Arrays(
            src + self.source, dst + self.landing.ctypes.data, np.full(runs, size, dtype=np.int64)
        )

    def rounds(
        self, carrier: str, copies: Arrays, modes: Sequence[Packing], seconds: float, least: int
    ) -> NDArray[np.float64]:
        """Seconds of each mode in each round; who is first changes from round to round."""
        for mode in modes:
            self.reads[carrier, mode](copies)  # pages, connections, threads
        found: list[list[float]] = []
        until = time.monotonic() + seconds
        while len(found) < least or time.monotonic() < until:
            times = [0.0] * len(modes)
            for turn in range(len(modes)):
                number = (turn + len(found)) % len(modes)
                begin = time.perf_counter()
                self.reads[carrier, modes[number]](copies)
                times[number] = time.perf_counter() - begin
            found.append(times)
        return np.array(found)

    def cpu_seconds(self, carrier: str, copies: Arrays, mode: Packing) -> float:
        """What both processes spend on one batch."""
        begin, rounds = self._cpu(), 0
        while rounds < LEAST_CPU_ROUNDS or self._cpu() - begin < CPU_SECONDS:
            rounds += 1
            self.reads[carrier, mode](copies)
        return (self._cpu() - begin) / rounds

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self.owner}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # user and system
        return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


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
def bench(names: Sequence[str], costs: Costs | None = None) -> Iterator[Bench]:
    """Every carrier in every mode, connected to another process; `costs`: not this machine's."""
    landing = np.full(BUFFER_BYTES, 1, dtype=np.uint8)
    code = f"from kvferry.bench.packed_pair import own; own({list(names)}, {costs is not None})"
    with (
        quiet_libraries(),
        ExitStack() as stack,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout
        try:
            said = _answer(process.stdout.readline())
            reads: dict[tuple[str, Packing], Callable[[Arrays], None]] = {}
            for (name, packing), endpoint in zip(_all(names), said[1:], strict=True):
                carrier = make_carrier(name, host="127.0.0.1", packing=packing, costs=costs)
                stack.callback(carrier.close)
                carrier.register([MemoryRegion(landing.ctypes.data, landing.nbytes)])
                reads[name, packing] = _reader(carrier, bytes.fromhex(endpoint))
            yield Bench(process.pid, int(said[0]), landing, reads)
        finally:
            process.kill()


def _answer(line: str) -> list[str]:
    try:
        found: list[str] = json.loads(line)
    except ValueError:
        raise TransferError("the process that owns the memory did not start") from None
    return found


def _reader(carrier: Carrier, endpoint: bytes) -> Callable[[Arrays], None]:
    peer = carrier.connect(endpoint, time.monotonic() + WAIT_SECONDS)
    return lambda copies: carrier.read(peer, copies).wait(time.monotonic() + WAIT_SECONDS)


def _all(names: Sequence[str]) -> list[tuple[str, Packing]]:
    return [(name, packing) for name in names for packing in PACKINGS]


def own(names: Sequence[str], shipped: bool) -> None:
    """The other process's program."""
    memory = np.full(BUFFER_BYTES, 3, dtype=np.uint8)
    costs = shipped_costs() if shipped else None
    carriers = [
        make_carrier(name, host="127.0.0.1", packing=packing, costs=costs)
        for name, packing in _all(names)
    ]
    for carrier in carriers:
        carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    answer = [str(memory.ctypes.data), *(c.endpoint().hex() for c in carriers)]
    print(json.dumps(answer), flush=True)
    sys.stdin.read()
    os._exit(0)  # whatever the libraries' threads do
