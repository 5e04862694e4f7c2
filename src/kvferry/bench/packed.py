"""`kvferry bench packed`: short runs, direct, packed and as the cost model chooses, in one run.

Owner and reader are separate processes. A batch is what a token-major cache leaves between engines
of different tp: blocks of 16 tokens from random places, of each token one run, as long as the gap
to the next, on both sides. Modes take turns; each number is the best of several rounds.

`chosen` is what `packing: "auto"` does. It must not be slower than direct by more than noise, and
what noise is, is measured: `noise` is how far two equal direct measurements were apart. On a busy
machine the processors' time says more than the clock: `cpu` is what both processes spent, in
nanoseconds a byte.

`calibrate` measures both modes at few and at many runs of several lengths, and fits the lines of
cost.py: non-negative, by relative error.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransferError
from kvferry.transport.base import Carrier, Ints, MemoryRegion
from kvferry.transport.cost import Cost, Costs, Mode, Packing, shipped_costs, user_path
from kvferry.transport.regions import Arrays
from kvferry.transport.registry import make_carrier

SIZES = tuple(64 << step for step in range(9))  # 64 B to 16 KiB
CARRIERS = ("local", "tcp")
PACKINGS: tuple[Packing, ...] = ("direct", "packed", "auto")
BUFFER_BYTES = 128 << 20
BATCH_BYTES = 16 << 20
MOST_RUNS = 1 << 16
BLOCK_TOKENS = 16
WAIT_SECONDS = 60.0
LEAST_ROUNDS = 3
CPU_SECONDS = 0.2  # spent on each measurement of it: twenty of the kernel's ticks
GB = 1e9


@dataclass(frozen=True, slots=True)
class PackedRow:
    carrier: str
    run_bytes: int
    runs: int
    direct_gb_s: float
    packed_gb_s: float
    chosen_gb_s: float
    noise: float  # of direct, as a share
    cpu_ns_per_byte: dict[str, float]  # by packing

    @property
    def chosen_of_direct(self) -> float:
        return self.chosen_gb_s / self.direct_gb_s


@dataclass(frozen=True, slots=True)
class PackedResult:
    costs: str  # name of the costs that chose
    rows: tuple[PackedRow, ...]
    crossover_bytes: dict[str, int]  # by carrier: the shortest run from which direct wins


def run(sizes: Sequence[int] = SIZES, seconds: float = 1.0) -> PackedResult:
    from kvferry.transport.cost import current_costs

    rows = []
    with _bench() as bench:
        for size in sizes:
            if not 1 <= size <= BUFFER_BYTES // (4 * BLOCK_TOKENS):
                raise TransferError(f"runs of {size} bytes cannot be measured here")
            copies = bench.token_major(size, min(BATCH_BYTES // size, MOST_RUNS))
            for carrier in CARRIERS:
                best = bench.seconds(carrier, copies, ("direct", *PACKINGS), seconds)
                again, direct, packed, chosen = best
                count = int(copies.length.sum())
                rows.append(
                    PackedRow(
                        carrier,
                        size,
                        len(copies),
                        count / min(direct, again) / GB,
                        count / packed / GB,
                        count / chosen / GB,
                        abs(direct - again) / max(direct, again),
                        {p: bench.cpu_seconds(carrier, copies, p) / count * 1e9 for p in PACKINGS},
                    )
                )
    crossover = {
        carrier: next(
            (
                row.run_bytes
                for row in rows
                if row.carrier == carrier and row.direct_gb_s >= row.packed_gb_s
            ),
            0,
        )
        for carrier in CARRIERS
    }
    return PackedResult(current_costs().name, tuple(rows), crossover)


def lines(result: PackedResult) -> Iterator[str]:
    """The result as a table for people."""
    yield f"costs: {result.costs}"
    yield (
        f"{'carrier':8}{'run':>8}{'runs':>9}{'direct':>9}{'packed':>9}{'chosen':>9} GB/s  "
        "chosen/direct  noise   cpu: direct  packed  chosen"
    )
    for row in result.rows:
        cpu = row.cpu_ns_per_byte
        yield (
            f"{row.carrier:8}{row.run_bytes:8,}{row.runs:9,}{row.direct_gb_s:9.2f}"
            f"{row.packed_gb_s:9.2f}{row.chosen_gb_s:9.2f}{row.chosen_of_direct:18.2f}"
            f"{row.noise:7.0%}{cpu['direct']:15.2f}{cpu['packed']:8.2f}{cpu['auto']:8.2f}"
        )
    for carrier, size in result.crossover_bytes.items():
        yield (
            f"{carrier}: direct wins from {size:,} bytes on" if size else f"{carrier}: packed wins"
        )


# --- calibration ---------------------------------------------------------------------------------

CALIBRATED_SIZES = (64, 256, 1024, 4096, 16384)
CALIBRATED_RUNS = (64, 1024, 16384)


def calibrate(seconds: float = 0.3) -> Costs:
    """Measure the embedded carriers on this machine; the others keep the costs that ship."""
    carriers = dict(shipped_costs().carriers)
    with _bench(shipped_costs()) as bench:  # the user's may not exist yet
        for carrier in CARRIERS:
            made: dict[Mode, Cost] = {}
            modes: tuple[Mode, ...] = ("direct", "packed")
            points: dict[Mode, list[tuple[int, int, float]]] = {mode: [] for mode in modes}
            for size in CALIBRATED_SIZES:
                for runs in CALIBRATED_RUNS:
                    if runs * size > 2 * BATCH_BYTES:
                        continue
                    # packed local reads covers: dense runs show what scattering them costs
                    scattered = bench.token_major(size, runs)
                    dense = bench.token_major(size, runs, gaps=False)
                    packed = dense if carrier == "local" else scattered
                    (first,) = bench.seconds(carrier, scattered, ("direct",), seconds / 2)
                    (second,) = bench.seconds(carrier, packed, ("packed",), seconds / 2)
                    points["direct"].append((runs, runs * size, first))
                    points["packed"].append((runs, runs * size, second))
            for mode in modes:
                made[mode] = fit(points[mode])
            if carrier == "local":
                made["packed"] = _beyond_covers(made["direct"], made["packed"])
            carriers[carrier] = made
    where = f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Costs(where, today, "kvferry bench transport --calibrate", carriers)


def _beyond_covers(direct: Cost, packed: Cost) -> Cost:
    """What packed reads cost on top of reading the covers, which is counted at the direct rate."""
    return Cost(
        0.0,  # a slice of a batch is chosen at a time, both ways
        packed.descriptor_seconds,
        max(0.0, packed.byte_seconds - direct.byte_seconds),
    )


def write_costs(costs: Costs) -> Path:
    path = user_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")
    return path


def fit(points: Sequence[tuple[int, int, float]]) -> Cost:
    """The line through (descriptors, bytes, seconds) with the least relative errors."""
    runs, sizes, seconds = (np.asarray(column, dtype=float) for column in zip(*points, strict=True))
    terms = np.stack([np.ones_like(runs), runs, sizes], axis=1) / seconds[:, None]
    best: tuple[float, NDArray[np.float64]] | None = None
    for used in ([0, 1, 2], [1, 2], [0, 1], [0, 2], [1], [2]):
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(terms[:, used], np.ones_like(seconds), rcond=None)[0]
        error = float(np.square(terms @ found - 1).sum())
        if (found >= 0).all() and (best is None or error < best[0]):
            best = (error, found)
    if best is None:
        raise TransferError("the measurements fit no line; measure again on a quiet machine")
    return Cost(*(float(f"{value:.4g}") for value in best[1]))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# --- the two processes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bench:
    owner: int  # process
    source: int  # address there
    landing: NDArray[np.uint8]
    reads: dict[tuple[str, Packing], Callable[[Arrays], None]]

    def token_major(self, size: int, runs: int, *, gaps: bool = True) -> Arrays:
        rng = np.random.default_rng(size)
        src = _tokens(rng, size, runs, 2 if gaps else 1)
        dst = _tokens(rng, size, runs, 2)
        return Arrays(
            src + self.source, dst + self.landing.ctypes.data, np.full(runs, size, dtype=np.int64)
        )

    def seconds(
        self, carrier: str, copies: Arrays, modes: Sequence[Packing], seconds: float
    ) -> list[float]:
        """The best of each, all taking turns."""
        best = [float("inf")] * len(modes)
        for mode in modes:
            self.reads[carrier, mode](copies)  # pages, connections, threads
        until, rounds = time.monotonic() + seconds, 0
        while rounds < LEAST_ROUNDS or time.monotonic() < until:
            rounds += 1
            for number, mode in enumerate(modes):
                begin = time.perf_counter()
                self.reads[carrier, mode](copies)
                best[number] = min(best[number], time.perf_counter() - begin)
        return best

    def cpu_seconds(self, carrier: str, copies: Arrays, mode: Packing) -> float:
        """What both processes spend on one batch."""
        begin, rounds = self._cpu(), 0
        while rounds < LEAST_ROUNDS or self._cpu() - begin < CPU_SECONDS:
            rounds += 1
            self.reads[carrier, mode](copies)
        return (self._cpu() - begin) / rounds

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self.owner}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # user and system
        return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


def _tokens(rng: np.random.Generator, size: int, runs: int, stride: int) -> Ints:
    """Offsets of runs: blocks of tokens anywhere, tokens `stride` runs apart."""
    block = BLOCK_TOKENS * stride * size
    blocks = -(-runs // BLOCK_TOKENS)
    begins = rng.permutation(BUFFER_BYTES // block)[:blocks] * block
    within = np.arange(BLOCK_TOKENS) * stride * size
    found: Ints = (begins[:, None] + within).reshape(-1)[:runs].astype(np.int64)
    return found


@contextmanager
def _bench(costs: Costs | None = None) -> Iterator[_Bench]:
    landing = np.full(BUFFER_BYTES, 1, dtype=np.uint8)
    code = f"from kvferry.bench.packed import _own; _own({costs is not None})"
    with (
        ExitStack() as stack,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout
        try:
            said = process.stdout.readline().split()
            if len(said) != 1 + len(CARRIERS) * len(PACKINGS):
                raise TransferError("the process that owns the memory did not start")
            reads: dict[tuple[str, Packing], Callable[[Arrays], None]] = {}
            for (name, packing), endpoint in zip(_all(), said[1:], strict=True):
                carrier = make_carrier(name, host="127.0.0.1", packing=packing, costs=costs)
                stack.callback(carrier.close)
                carrier.register([MemoryRegion(landing.ctypes.data, landing.nbytes)])
                reads[name, packing] = _reader(carrier, bytes.fromhex(endpoint))
            yield _Bench(process.pid, int(said[0]), landing, reads)
        finally:
            process.kill()


def _reader(carrier: Carrier, endpoint: bytes) -> Callable[[Arrays], None]:
    peer = carrier.connect(endpoint, time.monotonic() + WAIT_SECONDS)
    return lambda copies: carrier.read(peer, copies).wait(time.monotonic() + WAIT_SECONDS)


def _all() -> list[tuple[str, Packing]]:
    return [(name, packing) for name in CARRIERS for packing in PACKINGS]


def _own(shipped: bool) -> None:
    """The other process's program."""
    memory = np.full(BUFFER_BYTES, 3, dtype=np.uint8)
    costs = shipped_costs() if shipped else None
    carriers = [
        make_carrier(name, host="127.0.0.1", packing=packing, costs=costs)
        for name, packing in _all()
    ]
    for carrier in carriers:
        carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    print(memory.ctypes.data, *(c.endpoint().hex() for c in carriers), flush=True)
    sys.stdin.read()
    for carrier in carriers:
        carrier.close()
