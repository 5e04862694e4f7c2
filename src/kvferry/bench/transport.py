"""`kvferry bench transport`: what the carriers move, beside memcpy and a plain socket.

Owner and reader are separate processes. A batch reads scattered descriptors of one size, from
random slots of one buffer to random slots of the other. In the same run and on the same memory:

    memcpy_gb_s          one long memcpy, one thread
    scatter_memcpy_gb_s  memcpy over the same scatter inside one process, at `SCATTER_BYTES` (or the
                         nearest size asked for); all sizes are in `results` as carrier "memcpy"
    socket_gb_s          one TCP stream over loopback, `sendall` to `recv_into`, the whole buffer

Each number is the best of several rounds in which all take turns: on a shared machine, that is what
compares. `of_baseline` is the ratio to memcpy over the same scatter (local) or to the socket (tcp),
both from the rounds of that size. memcpy has one thread; `local` uses two for a large transfer.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransferError
from kvferry.transport.base import Carrier, Ints, MemoryRegion
from kvferry.transport.regions import Arrays
from kvferry.transport.registry import make_carrier

DEFAULT_SIZES = tuple(256 << (2 * step) for step in range(9))  # 256 B to 16 MiB
BUFFER_BYTES = 256 << 20  # per side: beyond the caches
MAX_DESCRIPTORS = 1 << 17
SCATTER_BYTES = 64 << 10
TAKE_BELOW_BYTES = 16 << 10  # under it, a memmove per descriptor would measure Python
BASELINES = {"memcpy": None, "local": "memcpy", "tcp": "socket"}
CARRIERS = ("local", "tcp")
WAIT_SECONDS = 60.0
GB = 1e9


@dataclass(frozen=True, slots=True)
class CarrierResult:
    carrier: str
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


def run(sizes: Sequence[int] = DEFAULT_SIZES, seconds: float = 1.0) -> TransportResult:
    """Measure all carriers at all sizes, about `seconds` for each size."""
    for size in sizes:
        if not 1 <= size <= BUFFER_BYTES // 2:
            raise TransferError(
                f"a descriptor of {size} bytes; this measures 1 to {BUFFER_BYTES // 2} bytes"
            )
    source, landing = _buffer(1), _buffer(2)
    with ExitStack() as stack:
        owner = stack.enter_context(_owner())
        reads: dict[str, Callable[[Arrays], None]] = {}
        for name in CARRIERS:
            carrier = stack.enter_context(_closing(make_carrier(name, host="127.0.0.1")))
            reads[name] = _reader(carrier, owner.endpoints[name], landing)
        best: dict[tuple[str, int], float] = {}
        long_copy = 0.0

        for size in sizes:
            src, dst = _slots(size)
            count = len(src)
            remote = Arrays(src + owner.address, dst + landing.ctypes.data, _full(count, size))
            tasks: dict[str, Callable[[], None]] = {
                "memcpy": _scattered_memcpy(source, landing, src, dst, size),
                **{name: _bound(read, remote) for name, read in reads.items()},
            }
            for task in tasks.values():
                task()  # pages, connections, threads
            until, rounds = time.monotonic() + seconds, 0
            while rounds < 2 or time.monotonic() < until:
                rounds += 1
                long_copy = max(long_copy, BUFFER_BYTES / _seconds(_memcpy(source, landing)))
                rates = {name: count * size / _seconds(task) for name, task in tasks.items()}
                rates["socket"] = BUFFER_BYTES / owner.stream_seconds(landing)
                for name, rate in rates.items():
                    best[name, size] = max(best.get((name, size), 0.0), rate)

    nearest = min(sizes, key=lambda s: abs(s - SCATTER_BYTES))
    return TransportResult(
        memcpy_gb_s=long_copy / GB,
        scatter_memcpy_gb_s=best["memcpy", nearest] / GB,
        socket_gb_s=max(best["socket", size] for size in sizes) / GB,
        results=tuple(
            CarrierResult(
                carrier=name,
                descriptor_bytes=size,
                gb_s=best[name, size] / GB,
                descriptors_s=best[name, size] / size,
                of_baseline=best[name, size] / best[baseline, size] if baseline else None,
            )
            for name, baseline in BASELINES.items()
            for size in sizes
        ),
    )


def lines(result: TransportResult) -> Iterator[str]:
    """The result as a table for people."""
    yield f"memcpy                  {result.memcpy_gb_s:6.2f} GB/s"
    yield f"memcpy, scattered       {result.scatter_memcpy_gb_s:6.2f} GB/s"
    yield f"one socket              {result.socket_gb_s:6.2f} GB/s"
    yield ""
    yield f"{'carrier':10}{'descriptor':>12}{'GB/s':>9}{'descriptors/s':>16}  of its baseline"
    for row in result.results:
        ratio = f"{row.of_baseline:.0%}" if row.of_baseline is not None else "-"
        yield (
            f"{row.carrier:10}{row.descriptor_bytes:12,}{row.gb_s:9.2f}{row.descriptors_s:16,.0f}"
            f"  {ratio}"
        )


def _buffer(seed: int) -> NDArray[np.uint8]:
    """Memory whose pages exist."""
    buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)
    buffer[:] = seed
    return buffer


def _full(count: int, size: int) -> Ints:
    return np.full(count, size, dtype=np.int64)


def _slots(size: int) -> tuple[Ints, Ints]:
    """Offsets of random slots on both sides."""
    slots = BUFFER_BYTES // size
    count = min(slots, MAX_DESCRIPTORS)
    rng = np.random.default_rng(size)
    src, dst = (rng.permutation(slots)[:count].astype(np.int64) * size for _ in range(2))
    return src, dst


def _seconds(task: Callable[[], None]) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


def _bound(read: Callable[[Arrays], None], copies: Arrays) -> Callable[[], None]:
    return lambda: read(copies)


def _memcpy(source: NDArray[np.uint8], landing: NDArray[np.uint8]) -> Callable[[], None]:
    return lambda: np.copyto(landing, source)


def _scattered_memcpy(
    source: NDArray[np.uint8], landing: NDArray[np.uint8], src: Ints, dst: Ints, size: int
) -> Callable[[], None]:
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


def _reader(
    carrier: Carrier, endpoint: bytes, landing: NDArray[np.uint8]
) -> Callable[[Arrays], None]:
    carrier.register([MemoryRegion(landing.ctypes.data, landing.nbytes)])
    peer = carrier.connect(endpoint, time.monotonic() + WAIT_SECONDS)
    return lambda copies: carrier.read(peer, copies).wait(time.monotonic() + WAIT_SECONDS)


@contextmanager
def _closing(carrier: Carrier) -> Iterator[Carrier]:
    try:
        yield carrier
    finally:
        carrier.close()


@dataclass(frozen=True, slots=True)
class _Owner:
    """The other process: owns the memory that is read."""

    address: int
    endpoints: dict[str, bytes]
    commands: IO[str]
    stream: socket.socket

    def stream_seconds(self, landing: NDArray[np.uint8]) -> float:
        """How long its buffer takes over one plain connection."""
        view = memoryview(landing.data)
        self.commands.write("stream\n")
        begin = time.perf_counter()
        self.commands.flush()
        while view:
            got = self.stream.recv_into(view)
            if got == 0:
                raise TransferError("the process that owns the memory ended")
            view = view[got:]
        return time.perf_counter() - begin


@contextmanager
def _owner() -> Iterator[_Owner]:
    code = "from kvferry.bench.transport import _own; _own()"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin and process.stdout
        try:
            process.stdin.write(f"{listener.getsockname()[1]}\n")
            process.stdin.flush()
            said = process.stdout.readline().split()
            if len(said) != 1 + len(CARRIERS):
                raise TransferError("the process that owns the memory did not start")
            endpoints = dict(zip(CARRIERS, map(bytes.fromhex, said[1:]), strict=True))
            listener.settimeout(WAIT_SECONDS)
            stream, _ = listener.accept()
            stream.settimeout(WAIT_SECONDS)
            with stream:
                yield _Owner(int(said[0]), endpoints, process.stdin, stream)
        finally:
            process.kill()


def _own() -> None:
    """The other process's program."""
    port = int(sys.stdin.readline())
    memory = _buffer(3)
    with ExitStack() as stack:
        endpoints = []
        for name in CARRIERS:
            carrier = stack.enter_context(_closing(make_carrier(name, host="127.0.0.1")))
            carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
            endpoints.append(carrier.endpoint().hex())
        stream = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        print(memory.ctypes.data, *endpoints, flush=True)
        for _ in sys.stdin:  # each line asks for the buffer once
            stream.sendall(memory.data)


if __name__ == "__main__":
    print("\n".join(lines(run())))
