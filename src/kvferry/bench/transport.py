# SPDX-License-Identifier: Apache-2.0
"""`kvferry bench transport`: speed of the carriers, beside their libraries, memcpy and a socket.

This process reads and writes memory of child processes, one for each mover: a carrier, or a library
called directly (`raw-`). A batch consists of scattered descriptors of one size, from random slots
of one buffer to random slots of the other. In the same run and on the same memory of this process:

    memcpy_gb_s          one long memcpy, one thread
    scatter_memcpy_gb_s  memcpy over the same scatter inside one process, at `SCATTER_BYTES` (or the
                         nearest size asked for); all sizes are in `results` as carrier "memcpy"
    socket_gb_s          one TCP stream over loopback

Each number is the best of several rounds in which all take turns. `of_baseline` is the ratio to
memcpy over the same scatter (local), to the socket (tcp), or to the library as its own examples use
it (mooncake, nixl). `missing` has the carriers that cannot be measured here, with the reason; if
the user named the carrier, that is an error. Only `python -m benchmarks.transport` in a checkout
fills `paired` and `targets`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any

import numpy as np

from kvferry.bench.trial import child
from kvferry.carriers.auto import make_carrier
from kvferry.carriers.base import Bytes, Carrier, MemoryRegion
from kvferry.carriers.library import mooncake, nixl, shared
from kvferry.carriers.library.shared import batches
from kvferry.copies import Copies, Ints
from kvferry.errors import KvferryError, TransferError

# In the order of their turns: a carrier next to its library.
MOVERS = ("local", "tcp", "mooncake", "raw-mooncake", "nixl", "raw-nixl")
SIZES = tuple(256 << (2 * step) for step in range(9))  # of descriptors: 256 B to 16 MiB
OPS = ("read", "write")
SCATTER_BYTES = 64 << 10
LEAST_ROUNDS = 8  # on a busy machine, the best of four varies by a quarter
TAKE_BELOW_BYTES = 16 << 10  # below, a memmove per descriptor would measure Python
BUFFER_BYTES = 256 << 20  # per side, more than the processor's caches
MAX_DESCRIPTORS = 1 << 17
# In one batch, by library: the slower movers take about a tenth of a second for it.
MOST_DESCRIPTORS = {"mooncake": 1 << 11, "nixl": 1 << 15}
BASELINES = {"local": "memcpy", "tcp": "socket", "mooncake": "raw-mooncake", "nixl": "raw-nixl"}
# Measured alone, because the progress threads of plain NIXL agents spin on both sides all the time.
ALONE = ("raw-nixl",)
GB = 1e9
LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 60.0
QUIET = {"MC_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
Task = Callable[[], object]
Tasks = dict[tuple[str, str], tuple[Task, int]]  # by mover and direction; the bytes that it moves


@dataclass(frozen=True, slots=True)
class CarrierResult:
    carrier: str
    op: str  # "copy" for memcpy
    descriptor_bytes: int
    gb_s: float
    descriptors_s: float
    of_baseline: float | None  # None for a baseline itself


@dataclass(frozen=True, slots=True)
class TransportResult:
    memcpy_gb_s: float
    scatter_memcpy_gb_s: float
    socket_gb_s: float
    results: tuple[CarrierResult, ...]
    missing: dict[str, str] = field(default_factory=dict)
    paired: tuple[Any, ...] = ()
    targets: tuple[Any, ...] = ()


def run(
    sizes: Sequence[int] = SIZES, seconds: float = 1.0, carriers: Sequence[str] = ()
) -> TransportResult:
    """Measure carriers (all that are installed, or those named), about `seconds` for each size."""
    for size in sizes:
        if not 1 <= size <= BUFFER_BYTES // 2:
            raise TransferError(
                f"a descriptor of {size} bytes; this measures 1 to {BUFFER_BYTES // 2} bytes"
            )
    with quiet_libraries():
        names, missing = _choose(carriers)
        bench = Bench(sizes, seconds)
        missing |= bench.measure(names, named=bool(carriers))
    names = [name for name in names if name not in missing]
    nearest = min(sizes, key=lambda size: abs(size - SCATTER_BYTES))
    return TransportResult(
        memcpy_gb_s=bench.fastest("long memcpy") / GB,
        scatter_memcpy_gb_s=bench.best["memcpy", "copy", nearest] / GB,
        socket_gb_s=bench.fastest("socket") / GB,
        results=tuple(bench.results(names)),
        missing=missing,
    )


def _choose(named: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Movers to measure, and movers that are not installed, with the reason.

    Named movers must exist and be installed.
    """
    for name in named:
        if name not in MOVERS:
            raise TransferError(
                f"the carrier {name!r} is not measured here; choose among {', '.join(MOVERS)}"
            )
    missing = {}
    for name in named or MOVERS:
        try:
            if "mooncake" in name:
                mooncake.engine_class()
            if "nixl" in name:
                nixl.api()
        except TransferError as error:
            if named:
                raise
            missing[name] = str(error)
    return [name for name in dict.fromkeys(named or MOVERS) if name not in missing], missing


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Set the libraries' log levels before they are loaded; they log every connection otherwise."""
    with shared.environment(QUIET):
        yield


class Bench:
    """The best rates so far, in bytes a second, and the memory of this process."""

    def __init__(self, sizes: Sequence[int], seconds: float) -> None:
        self.sizes, self.seconds = sizes, seconds
        self.source, self.landing = buffer(1), buffer(2)
        self.best: dict[tuple[str, str, int], float] = defaultdict(float)

    def measure(self, names: Sequence[str], *, named: bool) -> dict[str, str]:
        """Measure all sizes. Returns the movers that cannot be measured, with the reason. This is
        an error if the user named the movers."""
        left_out: dict[str, str] = {}
        movers: dict[str, Mover] = {}
        with ExitStack() as stack:
            receive = stack.enter_context(plain_socket(self.landing))
            for name in names:
                with ExitStack() as opened:
                    try:
                        mover = opened.enter_context(self.open(name))
                    except KvferryError as error:
                        if named:
                            raise TransferError(f"{name} cannot be measured: {error}") from None
                        left_out[name] = str(error)
                        continue
                    if name not in ALONE:
                        movers[name] = mover
                        stack.push(opened.pop_all())
            for size in self.sizes:
                copies = self.copies("copy", size, MAX_DESCRIPTORS, self.source.ctypes.data)
                long_copy = partial(np.copyto, self.landing, self.source)
                tasks: Tasks = {
                    ("memcpy", "copy"): (self._memcpy(copies, size), len(copies) * size),
                    **self._tasks(movers, size),
                    ("long memcpy", "copy"): (long_copy, BUFFER_BYTES),
                    ("socket", "copy"): (receive, BUFFER_BYTES),
                }
                rounds = self._rounds(size, tasks, LEAST_ROUNDS, self.seconds)
                for name in (set(ALONE) & set(names)) - set(left_out):
                    with self.open(name) as mover:
                        self._rounds(size, self._tasks({name: mover}, size), rounds)
        return left_out

    @contextmanager
    def open(self, name: str) -> Iterator[Mover]:
        """A mover, and a process that owns the memory at its other end."""
        with (
            child(own, {"name": name}, WAIT_SECONDS) as offer,
            closing(open_carrier(name, self.landing)) as carrier,
        ):
            endpoint = bytes.fromhex(offer["endpoint"])
            peer = carrier.connect(endpoint, time.monotonic() + WAIT_SECONDS)
            yield Mover(name, carrier, peer, offer["address"])

    def _memcpy(self, copies: Copies, size: int) -> Task:
        if size < TAKE_BELOW_BYTES:
            # NumPy's loop over rows: the same reads, with writes in order.
            rows = self.source[: BUFFER_BYTES // size * size].reshape(-1, size)
            into = self.landing[: len(copies) * size].reshape(-1, size)
            which = (copies.src - self.source.ctypes.data) // size
            return lambda: np.take(rows, which, axis=0, out=into, mode="clip")
        addresses = list(zip(copies.dst.tolist(), copies.src.tolist(), strict=True))

        def copy() -> None:
            memmove = ctypes.memmove
            for dst, src in addresses:
                memmove(dst, src, size)

        return copy

    def _tasks(self, movers: Mapping[str, Mover], size: int) -> Tasks:
        tasks = {}
        for op, (name, mover) in itertools.product(OPS, movers.items()):
            most = MOST_DESCRIPTORS.get(mover.carrier.name, MAX_DESCRIPTORS)
            copies = self.copies(op, size, most, mover.address)
            tasks[name, op] = mover.prepare(op, copies), len(copies) * size
        return tasks

    def copies(self, op: str, size: int, most: int, other: int) -> Copies:
        """At most `most` copies between random slots of this buffer and of the one at `other`."""
        here = self.landing.ctypes.data
        src, dst = (here, other) if op == "write" else (other, here)
        slots = BUFFER_BYTES // size
        count = min(most, slots)
        rng = np.random.default_rng(size)
        from_slots, to_slots = (rng.choice(slots, count, replace=False) for _ in range(2))
        length = np.full(count, size, dtype=np.int64)
        return Copies(src + from_slots * size, dst + to_slots * size, length)

    def _rounds(self, size: int, tasks: Tasks, least: int, seconds: float = 0.0) -> int:
        """Run at least this many rounds in which all tasks take turns. Returns their number."""
        for task, _ in tasks.values():
            task()  # pages, connections, threads
        until, rounds = time.monotonic() + seconds, 0
        while rounds < least or time.monotonic() < until:
            rounds += 1
            for (name, op), (task, moved_bytes) in tasks.items():
                rate = moved_bytes / seconds_of(task)
                self.best[name, op, size] = max(self.best[name, op, size], rate)
        return rounds

    def fastest(self, name: str) -> float:
        return max(self.best[name, "copy", size] for size in self.sizes)

    def results(self, names: Sequence[str]) -> Iterator[CarrierResult]:
        rows = [("memcpy", "copy"), *((name, op) for op in OPS for name in names)]
        for (name, op), size in itertools.product(rows, self.sizes):
            rate, other = self.best[name, op, size], BASELINES.get(name, "")
            by_op = "copy" if other in ("memcpy", "socket") else op
            limit = self.best.get((other, by_op, size))
            ratio = rate / limit if limit else None
            yield CarrierResult(name, op, size, rate / GB, rate / size, ratio)


def seconds_of(task: Task) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


@dataclass(frozen=True, slots=True)
class Mover:
    """A carrier, or its library called directly with the carrier's batches.

    Batches are prepared, so that the clock covers only moving. It includes making a library's lists
    or descriptors, because every new request needs them.
    """

    name: str
    carrier: Any
    peer: Any
    address: int  # of the peer's memory

    def prepare(self, op: str, copies: Copies) -> Task:
        if self.name.startswith("raw-"):
            return self.library(op, copies)
        start = self.carrier.read if op == "read" else self.carrier.write
        return lambda: start(self.peer, copies).wait(time.monotonic() + WAIT_SECONDS)

    def library(self, op: str, copies: Copies) -> Task:
        """The same copies by the library alone, on the carrier's engine."""
        if self.carrier.name == "mooncake":
            return mooncake_calls(self.carrier._engine, self.peer.handle, op, copies)
        return nixl_calls(self.carrier._agent, self.peer.handle, op, copies)


class PlainNixl(nixl.NixlCarrier):
    """A carrier with the agent of NIXL's own examples, whose progress thread spins."""

    def _start(self) -> None:
        config = self._api.nixl_agent_config(backends=["UCX"])
        with nixl.ucx_settings(loopback=True):
            self._agent = self._api.nixl_agent(f"raw-{os.getpid()}", config)


def open_carrier(mover: str, memory: Bytes) -> Carrier:
    """A mover's carrier, on memory of this process."""
    name = mover.removeprefix("raw-")
    if mover == "raw-nixl":
        carrier: Carrier = PlainNixl(host=LOOPBACK)
    else:
        options = {"writable": True} if name == "tcp" else {}
        carrier = make_carrier(name, host=LOOPBACK, **options)
    carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    return carrier


def own(question: dict[str, Any]) -> Generator[Any]:
    """The program of a child that owns a mover's memory."""
    memory = buffer(3)
    carrier = open_carrier(question["name"], memory)
    yield {"address": memory.ctypes.data, "endpoint": carrier.endpoint().hex()}


@contextmanager
def plain_socket(landing: Bytes) -> Iterator[Task]:
    """A task that receives the whole buffer of a child over one plain connection."""

    def receive() -> None:
        view = memoryview(landing.data)
        try:
            stream.sendall(b"?")
            while view:
                got = stream.recv_into(view)
                if got == 0:
                    raise ConnectionError("it ended")
                view = view[got:]
        except OSError as error:
            raise TransferError(f"the process at the socket's other end: {error}") from None

    with (
        child(send, {}, WAIT_SECONDS) as port,
        socket.create_connection((LOOPBACK, port), WAIT_SECONDS) as stream,
    ):
        yield receive


def send(_question: dict[str, Any]) -> Generator[int]:
    """The program of a child that sends its whole buffer for each byte that it receives."""
    memory, listener = buffer(3), socket.create_server((LOOPBACK, 0))

    def serve() -> None:
        stream, _ = listener.accept()
        while stream.recv(1):
            stream.sendall(memory.data)

    Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]


def buffer(seed: int) -> Bytes:
    """Memory whose pages are touched already."""
    return np.full(BUFFER_BYTES, seed, dtype=np.uint8)


def mooncake_calls(engine: Any, target: str, op: str, copies: Copies) -> Task:
    call = getattr(engine, f"batch_transfer_sync_{op}")
    parts = list(batches(copies, mooncake.BATCH_DESCRIPTORS, mooncake.BATCH_BYTES))

    def go() -> None:
        for part in parts:
            local, remote = _sides(op, part)
            if call(target, local.tolist(), remote.tolist(), part.length.tolist()) != 0:
                raise TransferError("raw Mooncake failed a batch")

    return go


def nixl_calls(agent: Any, peer: Any, op: str, copies: Copies) -> Task:
    parts = list(batches(copies, nixl.BATCH_DESCRIPTORS, nixl.BATCH_BYTES))

    def go() -> None:
        for part in parts:
            local, remote = (
                agent.get_xfer_descs(nixl.rows(side, part.length), mem_type=nixl.MEMORY)
                for side in _sides(op, part)
            )
            handle = agent.initialize_xfer(op.upper(), local, remote, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise TransferError("raw NIXL failed a batch")

    return go


def _sides(op: str, part: Copies) -> tuple[Ints, Ints]:
    """Local and remote addresses."""
    return (part.dst, part.src) if op == "read" else (part.src, part.dst)
