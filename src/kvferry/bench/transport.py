"""`kvferry bench transport`: speed of the carriers, beside their libraries, memcpy and a socket.

There are two processes: the owner holds the memory, and this process reads and writes it. A batch
consists of scattered descriptors of one size, from random slots of one buffer to random slots of
the other. In the same run and on the same memory:

    memcpy_gb_s          one long memcpy, one thread
    scatter_memcpy_gb_s  memcpy over the same scatter inside one process, at `SCATTER_BYTES` (or the
                         nearest size asked for); all sizes are in `results` as carrier "memcpy"
    socket_gb_s          one TCP stream over loopback, `sendall` to `recv_into`, the whole buffer

Each number is the best of several rounds in which all take turns, because only such numbers can be
compared on a shared machine. `of_baseline` is the ratio to memcpy over the same scatter (local), to
the socket (tcp), or to the library as its own examples use it (mooncake, nixl), all at that size.
memcpy has one thread; `local` uses two for a large transfer. `missing` has the carriers that are
not installed, and `local` if the system makes it fall back to tcp, each with the reason. A named
carrier that cannot be measured is an error.

`paired` is the overhead of carriers over their libraries, measured in pairs on one engine.
`targets` judges the results.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.carriers.auto import make_carrier
from kvferry.carriers.base import (
    MemoryRegion,
)
from kvferry.carriers.library import mooncake, nixl, shared
from kvferry.carriers.library.shared import batches
from kvferry.copies import Copies, Ints
from kvferry.errors import TransferError
from kvferry.units import show_bytes

KIB = 1 << 10
SIZES = tuple(256 << (2 * step) for step in range(9))  # of descriptors: 256 B to 16 MiB
SCATTER_BYTES = 64 << 10
LEAST_ROUNDS = 4
TAKE_BELOW_BYTES = 16 << 10  # below, a memmove per descriptor would measure Python
BUFFER_BYTES = 256 << 20  # per side, more than the processor's caches
MAX_DESCRIPTORS = 1 << 17
# In one batch: what the slower movers move in about a tenth of a second.
MOST_DESCRIPTORS = {
    "mooncake": 1 << 11,
    "raw-mooncake": 1 << 11,
    "nixl": 1 << 15,
    "raw-nixl": 1 << 15,
}
# A turn takes either library about 50 ms, so that a carrier's own 0.5 ms are a hundredth of it.
PAIR_DESCRIPTORS = {"mooncake": 1 << 10, "nixl": 1 << 14}
PAIR_BYTES = {"mooncake": 64 << 20, "nixl": BUFFER_BYTES}
LEAST_PAIRS, MOST_PAIRS = 61, 101
BASELINES = {
    "local": "memcpy",
    "tcp": "socket",
    "mooncake": "raw-mooncake",
    "nixl": "raw-nixl",
}
# Measured in pairs with their libraries, over one engine.
IN_PAIRS = ("mooncake", "nixl")
# Measured alone, because the progress threads of plain NIXL agents spin on both sides all the time.
ALONE = ("raw-nixl",)
OPS = ("read", "write")
GB = 1e9
LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 60.0
QUIET = {"MC_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
Bytes = NDArray[np.uint8]
Task = Callable[[], None]
Timed = Callable[[], float]  # runs once, and returns the seconds
Cell = tuple[str, int]  # direction, bytes of a descriptor


@dataclass(frozen=True, slots=True)
class CarrierResult:
    carrier: str
    op: str  # "copy" for memcpy
    descriptor_bytes: int
    gb_s: float
    descriptors_s: float
    of_baseline: float | None  # None for a baseline itself


@dataclass(frozen=True, slots=True)
class PairedRow:
    carrier: str
    op: str
    descriptor_bytes: int
    pairs: int
    library_gb_s: float  # the median
    of_library: float  # median of the pairs' ratios; above 1 the carrier is faster
    lower_quartile: float
    upper_quartile: float
    mode: str = "direct"  # the only mode; results of earlier versions had another


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    text: str
    wanted: float
    found: float | None  # None: not measured in this run
    where: str  # the worst cell
    met: bool | None  # in all judged cells
    judged_bytes: tuple[int, ...] = ()  # judged sizes of descriptors
    left_out_bytes: tuple[int, ...] = ()  # other `SIZES` for which the target holds


@dataclass(frozen=True, slots=True)
class TransportResult:
    memcpy_gb_s: float
    scatter_memcpy_gb_s: float
    socket_gb_s: float
    results: tuple[CarrierResult, ...]
    missing: dict[str, str] = field(default_factory=dict)
    paired: tuple[PairedRow, ...] = ()
    targets: tuple[SpeedTarget, ...] = ()


def run(
    sizes: Sequence[int] = SIZES,
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
        wanted = _Wanted.of(carriers)
        measured = _Measured(tuple(sizes), seconds, tuple(ops), buffer(1), buffer(2))
        with owner() as other:
            measured.all_sizes(other, wanted)
            pairs = paired(other, measured.landing, wanted.names, sizes, ops, seconds)
    result = replace(measured.result(wanted), paired=tuple(pairs))
    rates = {(r.carrier, r.op, r.descriptor_bytes): r.gb_s for r in result.results}
    return replace(result, targets=judge(rates, pairs))


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
    yield from target_lines(result.targets)


# Rounds in which all movers take turns


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

    def all_sizes(self, owner: OwnerProcess, wanted: _Wanted) -> None:
        alone = [name for name in wanted.names if name in ALONE]
        with ExitStack() as stack:
            movers = {n: self._open(stack, owner, n) for n in wanted.names if n not in ALONE}
            for name, mover in list(movers.items()):
                if not wanted.require_own_way(name, mover.detour):
                    del movers[name]
            for size in self.sizes:
                rounds = self._size(owner, movers, size)
                for name in alone:
                    with ExitStack() as short:
                        one = {name: self._open(short, owner, name)}
                        self._size(owner, one, size, rounds)

    def _open(self, stack: ExitStack, owner: OwnerProcess, name: str) -> Mover:
        """Open a mover on both sides."""
        mover = stack.enter_context(closing(MOVERS[name](self.landing)))
        endpoint = owner.open(name)
        stack.callback(owner.close, name)
        mover.connect(endpoint)
        return mover

    def _size(
        self, owner: OwnerProcess, movers: dict[str, Mover], size: int, only_rounds: int = 0
    ) -> int:
        """Run rounds of all movers and the limits, or `only_rounds` rounds of a single mover."""
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
                copies = Copies(src[few] + a, dst[few] + b, length)
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

    def result(self, wanted: _Wanted) -> TransportResult:
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


def _scattered_memcpy(
    source: NDArray[np.uint8], landing: NDArray[np.uint8], src: Ints, dst: Ints, size: int
) -> Task:
    if size < TAKE_BELOW_BYTES:
        # NumPy's loop over rows: the same reads, with writes in order.
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


def slots(size: int) -> tuple[Ints, Ints]:
    """Offsets of random slots on both sides."""
    count = BUFFER_BYTES // size
    some = min(count, MAX_DESCRIPTORS)
    rng = np.random.default_rng(size)
    src, dst = (rng.permutation(count)[:some].astype(np.int64) * size for _ in range(2))
    return src, dst


def seconds_of(task: Task) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


# Pairs: a carrier and its library, in turns


def paired(
    owner: OwnerProcess,
    landing: NDArray[np.uint8],
    names: Sequence[str],
    sizes: Sequence[int],
    ops: Sequence[str],
    seconds: float,
) -> list[PairedRow]:
    """The overhead of the carriers `mooncake` and `nixl` over their libraries.

    Two engines of one library in the same two processes can differ by a factor of two, depending on
    which threads serve which connections. So the carrier, and its library called directly with the
    same batches, move the same copies over the *same* engine in turns: library, carrier, library,
    ... The result is the median of the turns' ratios, with their quartiles as the spread.
    """
    rows: list[PairedRow] = []
    for name in names:
        if name not in IN_PAIRS:
            continue
        with closing(OurCarrier(name, landing)) as mover:
            mover.connect(owner.open(name))
            try:
                for size, op in itertools.product(sizes, ops):
                    rows.append(_row(owner, landing, mover, name, op, size, seconds))
            finally:
                owner.close(name)
    return rows


def _row(
    owner: OwnerProcess,
    landing: NDArray[np.uint8],
    mover: OurCarrier,
    name: str,
    op: str,
    size: int,
    seconds: float,
) -> PairedRow:
    src, dst = slots(size)
    few = slice(0, max(1, min(PAIR_DESCRIPTORS[name], PAIR_BYTES[name] // size)))
    here, there = landing.ctypes.data, owner.address
    a, b = (there, here) if op == "read" else (here, there)
    length = np.full(len(src[few]), size, dtype=np.int64)
    copies = Copies(src[few] + a, dst[few] + b, length)
    ours, theirs = mover.prepare(op, copies), mover.library(op, copies)
    ours()  # pages, connections, threads
    theirs()
    theirs_seconds, ratios = in_turns(
        lambda: seconds_of(ours), lambda: seconds_of(theirs), LEAST_PAIRS, MOST_PAIRS, seconds
    )
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    rate = int(length.sum()) / float(np.median(theirs_seconds)) / GB
    return PairedRow(name, op, size, len(ratios), rate, middle, low, high)


def paired_lines(rows: Sequence[PairedRow]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    title = f"{'of its library, one engine':26}{'descriptor':>12}{'pairs':>7}{'median':>9}"
    yield title + "   quartiles"
    for row in rows:
        yield (
            f"{row.carrier:20}{row.op:6}{show_bytes(row.descriptor_bytes):>12}"
            f"{row.pairs:7}"
            f"{row.of_library:9.2f}   {row.lower_quartile:.2f} to {row.upper_quartile:.2f}"
        )


def in_turns(
    ours: Timed, theirs: Timed, least: int, most: int = 0, seconds: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Their seconds, and a ratio for each turn of ours: the mean of their turns before and after
    it, over its own. There are at least `least` turns, and up to `most` while there is time."""
    mine: list[float] = []
    others = [theirs()]
    until = time.monotonic() + seconds
    while len(mine) < least or (len(mine) < most and time.monotonic() < until):
        mine.append(ours())
        others.append(theirs())
    found = np.array(others)
    return found, (found[1:] + found[:-1]) / 2 / np.array(mine)


# Targets


@dataclass(frozen=True, slots=True)
class _Goal:
    carrier: str
    times: float
    than: str
    at_least: int  # bytes of a descriptor
    at_most: int

    @property
    def text(self) -> str:
        sizes = f"{show_bytes(self.at_least)} to {show_bytes(self.at_most)}"
        if self.at_least == self.at_most:
            sizes = show_bytes(self.at_least)
        return f"{self.carrier} at least {self.times:g} x {self.than}, {sizes}"


BESIDE = (
    _Goal("local", 2.0, "raw-nixl", 4 * KIB, 64 * KIB),
    _Goal("local", 5.0, "raw-mooncake", 4 * KIB, 16 * KIB),
    _Goal("tcp", 3.0, "raw-mooncake", 256, 16 * KIB),
    _Goal("tcp", 1.3, "raw-mooncake", 64 * KIB, 64 * KIB),
    _Goal("tcp", 1.0, "raw-mooncake", 256 * KIB, 16 * KIB * KIB),
)
OF_THE_LIBRARY = 0.95


def judge(
    rates: Mapping[tuple[str, str, int], float], pairs: Sequence[PairedRow]
) -> tuple[SpeedTarget, ...]:
    """Judge all targets. `rates` is by carrier, direction and size."""
    found = []
    for want in BESIDE:
        cells = {
            (op, size): rate / rates[want.than, op, size]
            for (name, op, size), rate in rates.items()
            if name == want.carrier
            and want.at_least <= size <= want.at_most
            and (want.than, op, size) in rates
        }
        sizes = [size for size in SIZES if want.at_least <= size <= want.at_most]
        found.append(_target(want.text, want.times, cells, sizes))
    for name in ("mooncake", "nixl"):
        text = f"{name} at least {OF_THE_LIBRARY:.0%} of its library, same batches, same engine"
        cells = {(r.op, r.descriptor_bytes): r.of_library for r in pairs if r.carrier == name}
        found.append(_target(text, OF_THE_LIBRARY, cells, SIZES))
    return tuple(found)


def _target(
    text: str, wanted: float, cells: Mapping[Cell, float], sizes: Sequence[int]
) -> SpeedTarget:
    if not cells:
        return SpeedTarget(text, wanted, None, "", None, (), tuple(sizes))
    worst = min(cells, key=lambda cell: cells[cell])
    judged = tuple(sorted({size for _, size in cells}))
    left_out = tuple(size for size in sizes if size not in judged)
    met = cells[worst] >= wanted
    where = f"{worst[0]} {show_bytes(worst[1])}"
    return SpeedTarget(text, wanted, cells[worst], where, met, judged, left_out)


def target_lines(targets: Sequence[SpeedTarget]) -> Iterator[str]:
    if targets:
        yield ""
    for target in targets:
        if target.found is None:
            yield f"{'not measured':13}{target.text}"
            continue
        verdict = "MISSED" if not target.met else "met in part" if target.left_out_bytes else "met"
        at = ", ".join(show_bytes(size) for size in target.judged_bytes)
        yield (
            f"{verdict:13}{target.text}: {target.found:.2f} at worst ({target.where}); "
            f"judged at {at}"
        )


# Which movers are measured


@dataclass(slots=True)
class _Wanted:
    """Movers to measure."""

    names: list[str]
    missing: dict[str, str]  # movers that are left out, and why
    named: bool  # the user named the carriers, so none may be left out

    @classmethod
    def of(cls, named: Sequence[str]) -> _Wanted:
        """The named movers, or all that are installed."""
        for name in named:
            if name not in MOVERS:
                raise TransferError(
                    f"the carrier {name!r} is not measured here; choose among {', '.join(MOVERS)}"
                )
        reasons = _why_not_installed()
        for name in named:
            if reasons[name]:
                raise TransferError(reasons[name])
        if named:
            return cls(list(dict.fromkeys(named)), {}, True)
        missing = {name: why for name, why in reasons.items() if why}
        return cls([name for name in MOVERS if name not in missing], missing, False)

    def require_own_way(self, name: str, detour: str) -> bool:
        """Leave out a carrier that falls back to another one; then returns False."""
        if not detour:
            return True
        why = f"it goes by tcp here, which is measured as tcp: {detour}"
        if self.named:
            raise TransferError(f"{name} cannot be measured: {why}")
        self.names.remove(name)
        self.missing[name] = why
        return False


def _why_not_installed() -> dict[str, str]:
    """By mover: why it cannot run here, or an empty string."""
    reasons = {}
    for name in MOVERS:
        reasons[name] = ""
        try:
            if "mooncake" in name:
                mooncake.engine_class()
            if "nixl" in name:
                nixl.api()
        except TransferError as error:
            reasons[name] = str(error)
    return reasons


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Set the libraries' log levels before they are loaded; they log every connection otherwise."""
    ours = {name: value for name, value in QUIET.items() if name not in os.environ}
    with shared.environment(ours):
        yield


# The process that owns the memory


@dataclass(frozen=True, slots=True)
class OwnerProcess:
    """The other process, which owns the memory that is read and written."""

    address: int
    commands: IO[str]
    stream: socket.socket

    def open(self, name: str) -> bytes:
        """Open its side of a mover. Returns the endpoint."""
        self._say(f"open {name}")
        return bytes.fromhex(_line(self.stream))

    def close(self, name: str) -> None:
        self._say(f"close {name}")
        _line(self.stream)

    def stream_seconds(self, landing: NDArray[np.uint8]) -> float:
        """Seconds for its whole buffer over one plain connection."""
        view = memoryview(landing.data)
        begin = time.perf_counter()
        self._say("stream")
        while view:
            got = self.stream.recv_into(view)
            if got == 0:
                raise TransferError("the process that owns the memory ended")
            view = view[got:]
        return time.perf_counter() - begin

    def _say(self, words: str) -> None:
        self.commands.write(words + "\n")
        self.commands.flush()


def _line(stream: socket.socket) -> str:
    """One answer of the owner."""
    heard = b""
    while not heard.endswith(b"\n"):
        got = stream.recv(1)
        if not got:
            raise TransferError("the process that owns the memory ended")
        heard += got
    answer = json.loads(heard)
    if "error" in answer:
        raise TransferError(answer["error"])
    return str(answer["value"])


@contextmanager
def owner() -> Iterator[OwnerProcess]:
    """Start the owner. It gets commands on its standard input and answers on a socket, because
    libraries print to its standard output."""
    code = "from kvferry.bench.transport import own; own()"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        ) as process,
    ):
        assert process.stdin
        try:
            process.stdin.write(f"{listener.getsockname()[1]}\n")
            process.stdin.flush()
            listener.settimeout(WAIT_SECONDS)
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                raise TransferError("the process that owns the memory did not start") from None
            stream.settimeout(WAIT_SECONDS)
            with stream:
                yield OwnerProcess(int(_line(stream)), process.stdin, stream)
        finally:
            process.kill()


def own() -> None:
    """The owner's program."""
    port = int(sys.stdin.readline())
    memory = buffer(3)
    movers: dict[str, Mover] = {}
    with socket.create_connection(("127.0.0.1", port)) as stream:

        def answer(**words: object) -> None:
            stream.sendall(json.dumps(words).encode() + b"\n")

        answer(value=memory.ctypes.data)
        for line in sys.stdin:
            match line.split():
                case ["stream"]:
                    stream.sendall(memory.data)
                case ["open", name]:
                    try:
                        movers[name] = MOVERS[name](memory)
                        answer(value=movers[name].endpoint().hex())
                    except Exception as error:
                        answer(error=f"{name}: {error}")
                case ["close", name]:
                    movers.pop(name).close()
                    answer(value="closed")
    os._exit(0)  # without waiting for the libraries' threads


def buffer(seed: int) -> NDArray[np.uint8]:
    """Memory whose pages are touched already."""
    made = np.empty(BUFFER_BYTES, dtype=np.uint8)
    made[:] = seed
    return made


# Carriers, and the libraries called directly


class Mover(Protocol):
    """Moves bytes between two processes; each makes one on its own memory.

    The owner's mover gives its endpoint. The other mover connects and prepares batches, so that the
    clock covers only moving. `raw-mooncake` and `raw-nixl` are the libraries as their own examples
    use them, with the batches of our carriers. The clock includes making a library's lists or
    descriptors, because every new request needs them.
    """

    @property
    def detour(self) -> str:
        """Why it goes to its peer by another carrier; empty where it does not."""
        return ""

    def endpoint(self) -> bytes: ...
    def connect(self, endpoint: bytes) -> None: ...
    def prepare(self, op: str, copies: Copies) -> Callable[[], None]: ...
    def close(self) -> None: ...


class OurCarrier(Mover):
    """A carrier of kvferry."""

    def __init__(self, name: str, memory: Bytes) -> None:
        options = {"writable": True} if name in ("local", "tcp") else {}
        self._carrier: Any = make_carrier(name, host=LOOPBACK, **options)
        self._carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        self._peer: Any = None

    @property
    def detour(self) -> str:
        return self._carrier.detour_to(self._peer) if self._peer is not None else ""

    def endpoint(self) -> bytes:
        endpoint: bytes = self._carrier.endpoint()
        return endpoint

    def connect(self, endpoint: bytes) -> None:
        self._peer = self._carrier.connect(endpoint, time.monotonic() + WAIT_SECONDS)

    def prepare(self, op: str, copies: Copies) -> Callable[[], None]:
        start = self._carrier.read if op == "read" else self._carrier.write
        return lambda: start(self._peer, copies).wait(time.monotonic() + WAIT_SECONDS)

    def library(self, op: str, copies: Copies) -> Callable[[], None]:
        """The same copies by the library alone, called directly on the carrier's engine."""
        carrier, peer = self._carrier, self._peer.handle.name
        if carrier.name == "mooncake":
            return mooncake_calls(carrier._engine, peer, op, copies)
        return nixl_calls(carrier._agent, peer, op, copies)

    def close(self) -> None:
        self._carrier.close()


class RawMooncake(Mover):
    """Mooncake's engine, with one blocking call after another."""

    def __init__(self, memory: Bytes) -> None:
        self._engine = mooncake.engine_class()()
        if self._engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferError("Mooncake's engine does not start")
        self._memory = memory.ctypes.data
        if self._engine.register_memory(self._memory, memory.nbytes) != 0:
            raise TransferError("Mooncake's engine does not register the memory")
        self._target = ""

    def endpoint(self) -> bytes:
        return f"{LOOPBACK}:{self._engine.get_rpc_port()}".encode()

    def connect(self, endpoint: bytes) -> None:
        self._target = endpoint.decode()

    def prepare(self, op: str, copies: Copies) -> Callable[[], None]:
        return mooncake_calls(self._engine, self._target, op, copies)

    def close(self) -> None:
        self._engine.unregister_memory(self._memory)
        self._engine = None


class RawNixl(Mover):
    """A NIXL agent with UCX, with a request for each batch, polled until it is done."""

    def __init__(self, memory: Bytes) -> None:
        api = nixl.api()
        config = api.nixl_agent_config(backends=["UCX"])
        with nixl.ucx_settings(loopback=True):
            self._agent = api.nixl_agent(f"raw-{os.getpid()}", config)
        self._registered = self._agent.register_memory(
            [(memory.ctypes.data, memory.nbytes, 0, "")], mem_type=nixl.MEMORY
        )
        self._peer: Any = None

    def endpoint(self) -> bytes:
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, endpoint: bytes) -> None:
        self._peer = self._agent.add_remote_agent(endpoint)

    def prepare(self, op: str, copies: Copies) -> Callable[[], None]:
        return nixl_calls(self._agent, self._peer, op, copies)

    def close(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
        self._agent = None


def mooncake_calls(engine: Any, target: str, op: str, copies: Copies) -> Callable[[], None]:
    call = getattr(engine, f"batch_transfer_sync_{op}")
    parts = list(batches(copies, mooncake.BATCH_DESCRIPTORS, mooncake.BATCH_BYTES))

    def go() -> None:
        for part in parts:
            local, remote = _sides(op, part)
            if call(target, local.tolist(), remote.tolist(), part.length.tolist()) != 0:
                raise TransferError("raw Mooncake failed a batch")

    return go


def nixl_calls(agent: Any, peer: Any, op: str, copies: Copies) -> Callable[[], None]:
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


def _ours(name: str) -> Callable[[Bytes], Mover]:
    return lambda memory: OurCarrier(name, memory)


# In the order of their turns: a carrier next to its library.
MOVERS: dict[str, Callable[[Bytes], Mover]] = {
    "local": _ours("local"),
    "tcp": _ours("tcp"),
    "mooncake": _ours("mooncake"),
    "raw-mooncake": RawMooncake,
    "nixl": _ours("nixl"),
    "raw-nixl": RawNixl,
}
