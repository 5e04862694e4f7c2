# SPDX-License-Identifier: Apache-2.0
"""What moves between two processes with a GPU, by size of the copies, beside its limits.

The owner (owner.py) holds device memory, this process reads it. In one run, on the same memory:

    copy peak     one long copy on the device, bytes read plus bytes written
    kernel        device time of the copy kernel on memory of the other process, its numbers already
                  on the device; as three arrays, and as strided runs (64 rows)
    transfer      wall time of `carrier.read(...).wait()`: bounds, upload, launches, event, liveness
    copies        the same without Triton, a `cuMemcpyAsync` for each copy
    NIXL          the same descriptors as a prepared transfer, where it is installed
    checksums     of device memory, through the host and by a kernel

Copies go from random slots to random slots.

`kernels` and `around` say where the time of short copies goes. *In the kernel*: the same 256-byte
copies, between slots that lie side by side or four times as far apart, in their order or at random;
beside long ones. *Around the kernel*: a transfer's clock, less the kernel's, and when its first
launch was queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_size_t, c_uint64, c_void_p
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.owner import Remote
from benchmarks.measuring import median_seconds
from kvferry.carriers import Carrier, MemoryRegion, make_carrier
from kvferry.carriers.cuda.driver import CudaEvent, CudaStream, Device, Function, device, driver
from kvferry.carriers.cuda.staging import DeviceMemory
from kvferry.carriers.cuda.stream import StreamBuffers
from kvferry.copies import Copies, Ints, StridedCopies
from kvferry.handover.checksum import MIX128, XXH3, Algorithm, digest

SIZES = (256, 1 << 10, 2 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20)
NIXL_SIZES = (4 << 10, 16 << 10, 64 << 10)
AREA_BYTES = 8 << 30
MOST_COPIES = 8 << 20
FEW_COPIES = 20_000  # where each costs microseconds
ROWS = 64
MOST_LAUNCHES = 1 << 10  # of one transfer
TOTAL_BYTES = 2 << 30
SUM_BYTES = 1 << 30
REPEATS = 7
WAIT_SECONDS = 120.0
GB, TB = 1e9, 1e12


class Bench:
    """The measuring side: one buffer, one stream, one carrier to the owner."""

    def __init__(self, owner: Remote) -> None:
        self.owner = owner
        self.on: Device = device(0)
        answer = owner.ask("allocate", sizes=[AREA_BYTES], seed=1)
        self.there: int = answer["addresses"][0]
        with self.on.current():
            self.here = self.on.allocate(AREA_BYTES)
            self.stream = CudaStream()
            self._events = [CudaEvent(timing=True) for _ in range(2)]
        self.region = MemoryRegion(self.here, AREA_BYTES)
        self.cuda = self._connect(make_carrier("cuda"), answer["cuda"])
        self.copies = self._connect(make_carrier("cuda", triton=False), answer["cuda"])
        memory = DeviceMemory([self.region])
        self.memory = memory
        self.tcp = self._connect(
            make_carrier("tcp", host="127.0.0.1", memory=memory), answer["tcp"]
        )
        peer = self.cuda[1]
        self.mapped = peer.memory
        shift = peer.memory.shift_of(self.there, self.there + AREA_BYTES)
        assert shift is not None
        self.there_here = self.there + shift  # the owner's memory, in this process
        seconds = self.device_seconds(
            lambda: self.stream.copy(self.here, self.there_here, AREA_BYTES)
        )
        self.peak = 2 * AREA_BYTES / seconds

    def _connect(self, carrier: Carrier, endpoint: str) -> tuple[Carrier, Any]:
        carrier.register([self.region])
        return carrier, carrier.connect(bytes.fromhex(endpoint), soon())

    def device_seconds(self, queue: Callable[[], None], repeats: int = REPEATS) -> float:
        """Median time of what `queue` puts on the stream, by events."""
        with self.on.current():
            queue()
            self.stream.synchronize()
            taken = []
            for _ in range(repeats):
                self._events[0].record(self.stream)
                queue()
                self._events[1].record(self.stream)
                self.stream.synchronize()
                taken.append(self._events[1].milliseconds_since(self._events[0]) / 1e3)
        return median(taken)

    def slots(self, size: int) -> tuple[Ints, Ints]:
        """Offsets of random slots on both sides."""
        rng = np.random.default_rng(size)
        count = min(AREA_BYTES // size, MOST_COPIES)
        spread = AREA_BYTES // size // count * size  # over all of it, however short they are
        src, dst = (rng.permutation(count).astype(np.int64) * spread for _ in range(2))
        return src, dst

    def arrays(self, size: int) -> Copies:
        src, dst = self.slots(size)
        return Copies(src + self.there, dst + self.here, np.full(len(src), size, dtype=np.int64))

    def strided(self, size: int) -> StridedCopies:
        """The same number of copies as rows x segments."""
        rows = min(ROWS, AREA_BYTES // size // 4)
        slots = AREA_BYTES // size // rows
        count = min(slots, MOST_COPIES // rows)
        return self.runs(size, rows, count, slots // count * size, slots * size)

    def runs(
        self, size: int, rows: int, count: int, apart: int, row_bytes: int, ordered: bool = False
    ) -> StridedCopies:
        """`count` copies a row, `apart` bytes from slot to slot, as a plan's batch says it."""
        rng, one = np.random.default_rng(size), np.zeros(1, dtype=np.int64)
        row = np.arange(rows, dtype=np.int64) * row_bytes
        src, dst = (
            (np.arange(count) if ordered else rng.permutation(count)).astype(np.int64) * apart
            for _ in range(2)
        )
        lengths = np.broadcast_to(np.asarray([size], dtype=np.int64), count)
        return StridedCopies(row + self.there, row + self.here, src, dst, lengths, one, one)

    def read(self, which: tuple[Carrier, Any], copies: Any) -> None:
        carrier, peer = which
        carrier.read(peer, copies).wait(soon())

    def read_seconds(
        self, which: tuple[Carrier, Any], copies: Any, repeats: int = REPEATS
    ) -> float:
        return median_seconds(partial(self.read, which, copies), repeats)

    def kernel_of(self, copies: Copies | StridedCopies) -> float:
        """Device time of the launches alone, with the numbers on the device."""
        carrier, peer = self.cuda
        launched: list[tuple[Function, int, Sequence[int]]] = []

        def note(kernel: Function, grid: int, _: CudaStream, values: Sequence[int]) -> None:
            launched.append((kernel, grid, values))

        with self.on.current():
            # a slot for each launch: launched again, each must find its own numbers
            buffers = StreamBuffers(self.on, slots=MOST_LAUNCHES)
            with launches(note):
                buffers.copy(copies, peer.memory, carrier.memory)  # type: ignore[attr-defined]
            buffers.finish()

            def queue() -> None:
                for kernel, grid, values in launched:
                    kernel.launch(grid, self.stream, values)

            seconds = self.device_seconds(queue)
            buffers.free()
        return seconds


@contextmanager
def launches(note: Callable[..., None]) -> Iterator[None]:
    """Call `note` after each launch of a kernel, with its arguments."""
    launch: Callable[..., None] = Function.launch

    def noted(kernel: Function, *arguments: Any) -> None:
        launch(kernel, *arguments)
        note(kernel, *arguments)

    Function.launch = noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.launch = launch  # type: ignore[method-assign]


def by_size(bench: Bench) -> Iterator[dict[str, Any]]:
    for size in SIZES:
        arrays, strided = bench.arrays(size), bench.strided(size)
        moved, strided_moved = len(arrays) * size, strided.bytes
        row: dict[str, Any] = {"bytes": size, "copies": len(arrays)}
        row["kernel_arrays_tb_s"] = 2 * moved / bench.kernel_of(arrays) / TB
        row["kernel_strided_tb_s"] = 2 * strided_moved / bench.kernel_of(strided) / TB
        row["arrays_gb_s"] = moved / bench.read_seconds(bench.cuda, arrays) / GB
        row["strided_gb_s"] = strided_moved / bench.read_seconds(bench.cuda, strided) / GB
        few = first(arrays, FEW_COPIES)
        row["copies_gb_s"] = len(few) * size / bench.read_seconds(bench.copies, few, 3) / GB
        row["right"] = _right(bench, arrays)
        yield row


def first(copies: Copies, count: int) -> Copies:
    return Copies(copies.src[:count], copies.dst[:count], copies.length[:count])


def _right(bench: Bench, copies: Copies) -> bool:
    """Whether some of the copies arrived, by plain copies of the driver."""
    shift = bench.there_here - bench.there
    bench.read(bench.cuda, copies)
    for i in np.random.default_rng(0).integers(0, len(copies), 64).tolist():
        size = int(copies.length[i])
        if download(bench.on, int(copies.src[i]) + shift, size) != download(
            bench.on, int(copies.dst[i]), size
        ):
            return False
    return True


def download(on: Device, address: int, size: int) -> bytes:
    out = np.empty(size, dtype=np.uint8)
    with on.current():
        driver().call(
            "cuMemcpyDtoH_v2", c_void_p(out.ctypes.data), c_uint64(address), c_size_t(size)
        )
    return out.tobytes()


def latency(bench: Bench) -> list[dict[str, Any]]:
    """Microseconds of a small read, from the call to the end of `wait`, and of its kernel."""
    found = []
    for count, size in ((1, 4096), (100, 16 << 10), (1000, 2048)):
        few = first(bench.arrays(size), count)
        read = bench.read_seconds(bench.cuda, few, 501)
        kernel = bench.kernel_of(few)
        found.append(
            {"copies": count, "bytes": size, "read_us": 1e6 * read, "kernel_us": 1e6 * kernel}
        )
    return found


def kernels(bench: Bench) -> list[dict[str, Any]]:
    """Shares of the copy peak, by how slots lie."""
    found = []
    for size in (256, 4096):
        row: dict[str, Any] = {"bytes": size}
        count = TOTAL_BYTES // size // ROWS
        for name, apart in (("dense", size), ("apart", 4 * size)):
            for order in ("ordered", "random"):
                ordered = order == "ordered"
                runs = bench.runs(size, ROWS, count, apart, count * apart, ordered)
                share = 2 * runs.bytes / bench.kernel_of(runs) / bench.peak
                row[f"{name}, {order}"] = share
        found.append(row)
    return found


def around(bench: Bench, size: int) -> dict[str, float]:
    """Microseconds of one transfer: to its first launch, until `read` returns, all, the kernel."""
    runs = bench.strided(size)
    kernel = bench.kernel_of(runs)
    carrier: Any
    carrier, peer = bench.cuda
    launched: list[float] = []
    rows = []
    with launches(lambda *_: launched.append(time.perf_counter())):
        for _ in range(31):
            launched.clear()
            begin = time.perf_counter()
            transfer = carrier.read(peer, runs)
            returned = time.perf_counter()
            transfer.wait(soon())
            rows.append((launched[0] - begin, returned - begin, time.perf_counter() - begin))
    names = ("first launch", "read returns", "done")
    found = {n: 1e6 * median(row[i] for row in rows) for i, n in enumerate(names)}
    return {"bytes": size, **found, "kernel": 1e6 * kernel}


def checksums(bench: Bench) -> list[dict[str, Any]]:
    """GB/s of a checksum over device memory, as a message asks for it, and as one long list."""
    found = []
    for size in (512, 8 << 10, 64 << 10):
        arrays = bench.arrays(size)
        row: dict[str, Any] = {"bytes": size}

        def rate(algorithm: Algorithm, most: int) -> float:
            count = min(len(arrays), most // size)  # noqa: B023, called at once
            at, length = arrays.dst[:count], arrays.length[:count]  # noqa: B023
            seconds = median_seconds(lambda: digest(bench.memory, at, length, algorithm))
            return count * size / seconds / GB  # noqa: B023

        row["xxh3"], row["mix128"] = rate(XXH3, XXH3.slice_bytes), rate(MIX128, SUM_BYTES)
        row["mix128 a message"] = rate(MIX128, min(MIX128.slice_bytes, (1 << 15) * size))
        found.append(row)
    return found


def beside_nixl(bench: Bench, rows: list[dict[str, Any]]) -> str:
    """Add NIXL's rates to these rows, or say why not. Last: its threads never sleep."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config

        metadata = bench.owner.ask("nixl")["metadata"]
        agent = nixl_agent("reader", nixl_agent_config(backends=["UCX"]))
        region = (bench.region.address, bench.region.bytes, 0, "")
        agent.register_memory([region], mem_type="VRAM")
        peer = agent.add_remote_agent(bytes.fromhex(metadata))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for row in rows:
        if row["bytes"] in NIXL_SIZES:
            few = first(bench.arrays(row["bytes"]), FEW_COPIES)
            moved = len(few) * row["bytes"]
            row["nixl_gb_s"] = moved / _nixl_seconds(agent, peer, few) / GB
            row["same_gb_s"] = moved / bench.read_seconds(bench.cuda, few) / GB
    return "yes"


def _nixl_seconds(agent: Any, peer: Any, copies: Copies) -> float:
    """Of a prepared transfer over the same memory."""
    rows = np.zeros((len(copies), 3), dtype=np.uint64)
    rows[:, 1] = copies.length
    lists = []
    for who, addresses in (("NIXL_INIT_AGENT", copies.dst), (peer, copies.src)):
        rows[:, 0] = addresses
        descriptors = agent.get_xfer_descs(rows, mem_type="VRAM")
        lists.append(agent.prep_xfer_dlist(who, descriptors))
    which = np.arange(len(copies), dtype=np.int32)

    def transfer() -> None:
        handle = agent.make_prepped_xfer("READ", lists[0], which, lists[1], which)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL ended with {state}")
        agent.release_xfer_handle(handle)

    return median_seconds(transfer, 3)


def soon() -> float:
    return time.monotonic() + WAIT_SECONDS
