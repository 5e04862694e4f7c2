"""`kvferry bench transport`: what the carriers move, beside the libraries, memcpy and a socket.

Owner and reader are separate processes. A batch reads (or writes) scattered descriptors of one
size, from random slots of one buffer to random slots of the other. In the same run and on the same
memory:

    memcpy_gb_s          one long memcpy, one thread
    scatter_memcpy_gb_s  memcpy over the same scatter inside one process, at `SCATTER_BYTES` (or the
                         nearest size asked for); all sizes are in `results` as carrier "memcpy"
    socket_gb_s          one TCP stream over loopback, `sendall` to `recv_into`, the whole buffer

Each number is the best of several rounds in which all take turns: on a shared machine, that is what
compares. `of_baseline` is the ratio to memcpy over the same scatter (local), to the socket (tcp),
or to the library as its own examples use it (mooncake, nixl), all at that size. memcpy has one
thread; `local` uses two for a large transfer. What is not installed is in `missing`, with the
reason, and so is a `local` that the system makes go by tcp. Named, they are refused.

What the carriers over libraries add to them is measured apart, in pairs on one engine (`paired`,
see paired.py). What all of it should come to is in `targets` (targets.py).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvferry.bench import targets
from kvferry.bench.movers import (
    ALONE,
    MOST_DESCRIPTORS,
    MOVERS,
    Mover,
    quiet_libraries,
)
from kvferry.bench.owner import BUFFER_BYTES, Owner, buffer, owner
from kvferry.bench.paired import PairedRow, Task, paired, paired_lines, seconds_of, slots
from kvferry.bench.targets import Target
from kvferry.bench.wanted import Wanted
from kvferry.errors import TransferError
from kvferry.transport.base import Ints
from kvferry.transport.regions import Arrays

DEFAULT_SIZES = targets.SIZES
SCATTER_BYTES = 64 << 10
LEAST_ROUNDS = 4
TAKE_BELOW_BYTES = 16 << 10  # under it, a memmove per descriptor would measure Python
BASELINES = {
    "local": "memcpy",
    "tcp": "socket",
    "mooncake": "raw-mooncake",
    "nixl": "raw-nixl",
}
OPS = ("read", "write")
GB = 1e9


@dataclass(frozen=True, slots=True)
class CarrierResult:
    carrier: str
    op: str  # "copy" for memcpy
    descriptor_bytes: int
    gb_s: float
    descriptors_s: float
    of_baseline: float | None  # None for what is a baseline itself


@dataclass(frozen=True, slots=True)
class TransportResult:
    memcpy_gb_s: float
    scatter_memcpy_gb_s: float
    socket_gb_s: float
    results: tuple[CarrierResult, ...]
    missing: dict[str, str] = field(default_factory=dict)
    paired: tuple[PairedRow, ...] = ()
    targets: tuple[Target, ...] = ()


def run(
    sizes: Sequence[int] = DEFAULT_SIZES,
    seconds: float = 1.0,
    carriers: Sequence[str] = (),
    ops: Sequence[str] = OPS,
) -> TransportResult:
    """Measure carriers (all that are installed, or those named), about `seconds` for each size."""
    for size in sizes:
        if not 1 <= size <= BUFFER_BYTES // 2:
            raise TransferError(
                f"a descriptor of {size} bytes; this measures 1 to {BUFFER_BYTES // 2} bytes"
            )
    with quiet_libraries():
        wanted = Wanted.of(carriers, tuple(MOVERS))
        measured = _Measured(tuple(sizes), seconds, tuple(ops), buffer(1), buffer(2))
        with owner() as other:
            measured.all_sizes(other, wanted)
            pairs = paired(other, measured.landing, wanted.names, sizes, ops, seconds)
    result = replace(measured.result(wanted), paired=tuple(pairs))
    rates = {(r.carrier, r.op, r.descriptor_bytes): r.gb_s for r in result.results}
    return replace(result, targets=targets.judge(rates, pairs))


@dataclass(slots=True)
class _Measured:
    """The best rates so far, in bytes a second."""

    sizes: tuple[int, ...]
    seconds: float
    ops: tuple[str, ...]
    source: NDArray[np.uint8]
    landing: NDArray[np.uint8]
    best: dict[tuple[str, str, int], float] = field(default_factory=dict)
    long_copy: float = 0.0

    def all_sizes(self, owner: Owner, wanted: Wanted) -> None:
        alone = [name for name in wanted.names if name in ALONE]
        with ExitStack() as stack:
            movers = {n: self._open(stack, owner, n) for n in wanted.names if n not in ALONE}
            for name, mover in list(movers.items()):
                if not wanted.require_own_way(name, getattr(mover, "detour", "")):
                    del movers[name]
            for size in self.sizes:
                rounds = self._size(owner, movers, size)
                for name in alone:
                    with ExitStack() as short:
                        one = {name: self._open(short, owner, name)}
                        self._size(owner, one, size, rounds)

    def _open(self, stack: ExitStack, owner: Owner, name: str) -> Mover:
        """A mover on both sides."""
        mover = stack.enter_context(closing(MOVERS[name](self.landing)))
        endpoint = owner.open(name)
        stack.callback(owner.close, name)
        mover.connect(endpoint)
        return mover

    def _size(self, owner: Owner, movers: dict[str, Mover], size: int, only_rounds: int = 0) -> int:
        """Rounds of all that take turns, and the limits with them; or so many of a single one."""
        src, dst = slots(size)
        limits = not only_rounds
        tasks: dict[tuple[str, str], tuple[Task, int]] = {}
        if limits:
            copy = _scattered_memcpy(self.source, self.landing, src, dst, size)
            tasks["memcpy", "copy"] = copy, len(src) * size
        here, there = self.landing.ctypes.data, owner.address
        for op in self.ops:
            a, b = (there, here) if op == "read" else (here, there)
            for name, mover in movers.items():
                few = slice(0, MOST_DESCRIPTORS.get(name))
                length = np.full(len(src[few]), size, dtype=np.int64)
                copies = Arrays(src[few] + a, dst[few] + b, length)
                tasks[name, op] = mover.prepare(op, copies), len(length) * size
        for task, _ in tasks.values():
            task()  # pages, connections, threads
        until, rounds = time.monotonic() + self.seconds, 0
        while rounds < (only_rounds or LEAST_ROUNDS) or (limits and time.monotonic() < until):
            rounds += 1
            for (name, op), (task, count) in tasks.items():
                self._note(name, op, size, count / seconds_of(task))
            if limits:
                once = seconds_of(lambda: np.copyto(self.landing, self.source))
                self.long_copy = max(self.long_copy, BUFFER_BYTES / once)
                stream = BUFFER_BYTES / owner.stream_seconds(self.landing)
                self._note("socket", "copy", size, stream)
        return rounds

    def _note(self, name: str, op: str, size: int, rate: float) -> None:
        self.best[name, op, size] = max(self.best.get((name, op, size), 0.0), rate)

    def result(self, wanted: Wanted) -> TransportResult:
        rows = []
        for op in ("copy", *self.ops):
            for name in ["memcpy"] if op == "copy" else wanted.names:
                for size in self.sizes:
                    rate, limit = self.best[name, op, size], self._baseline(name, op, size)
                    ratio = rate / limit if limit else None
                    rows.append(CarrierResult(name, op, size, rate / GB, rate / size, ratio))
        nearest = min(self.sizes, key=lambda s: abs(s - SCATTER_BYTES))
        return TransportResult(
            memcpy_gb_s=self.long_copy / GB,
            scatter_memcpy_gb_s=self.best["memcpy", "copy", nearest] / GB,
            socket_gb_s=max(self.best["socket", "copy", size] for size in self.sizes) / GB,
            results=tuple(rows),
            missing=wanted.missing,
        )

    def _baseline(self, name: str, op: str, size: int) -> float | None:
        other = BASELINES.get(name, "")
        by_op = "copy" if other in ("memcpy", "socket") else op
        return self.best.get((other, by_op, size))


def lines(result: TransportResult) -> Iterator[str]:
    """The result as a table for people."""
    yield f"memcpy                  {result.memcpy_gb_s:6.2f} GB/s"
    yield f"memcpy, scattered       {result.scatter_memcpy_gb_s:6.2f} GB/s"
    yield f"one socket              {result.socket_gb_s:6.2f} GB/s"
    yield ""
    title = f"{'carrier':14}{'op':6}{'descriptor':>12}{'GB/s':>9}{'descriptors/s':>16}"
    yield title + "  of its baseline"
    for row in result.results:
        ratio = f"{row.of_baseline:.0%}" if row.of_baseline is not None else "-"
        yield (
            f"{row.carrier:14}{row.op:6}{row.descriptor_bytes:12,}{row.gb_s:9.2f}"
            f"{row.descriptors_s:16,.0f}  {ratio}"
        )
    for name, why in result.missing.items():
        yield f"not measured: {name}: {why}"
    yield from paired_lines(result.paired)
    yield from targets.lines(result.targets)


def _scattered_memcpy(
    source: NDArray[np.uint8], landing: NDArray[np.uint8], src: Ints, dst: Ints, size: int
) -> Task:
    if size < TAKE_BELOW_BYTES:
        # NumPy's loop over rows: the same reads, and the writes in order
        rows = source[: BUFFER_BYTES // size * size].reshape(-1, size)
        into = landing[: len(src) * size].reshape(-1, size)
        which = src // size

        def take() -> None:
            np.take(rows, which, axis=0, out=into, mode="clip")

        return take
    sources = (src + source.ctypes.data).tolist()
    targets = (dst + landing.ctypes.data).tolist()

    def copy() -> None:
        memmove = ctypes.memmove
        for a, b in zip(sources, targets, strict=True):
            memmove(b, a, size)

    return copy


if __name__ == "__main__":
    print("\n".join(lines(run())))
