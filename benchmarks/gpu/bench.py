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
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import c_size_t, c_uint64, c_void_p
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.gpu.owner import Remote
from benchmarks.measuring import median_seconds
from benchmarks.report import Report
from kvferry.carriers import Carrier, MemoryRegion, make_carrier
from kvferry.carriers.cuda.driver import CudaEvent, CudaStream, Device, Function, device, driver
from kvferry.carriers.cuda.staging import DeviceMemory
from kvferry.carriers.cuda.stream import StreamBuffers
from kvferry.copies import Copies, StridedCopies
from kvferry.handover.checksum import MIX128, XXH3, Algorithm, digest
from kvferry.units import show_bytes, show_number

SIZES = (256, 1 << 10, 2 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20)
NIXL_SIZES = (4 << 10, 16 << 10, 64 << 10)
AREA_BYTES = 8 << 30
MOST_COPIES = 8 << 20
FEW_COPIES = 20_000  # where each costs microseconds
ROWS = 64
MOST_LAUNCHES = 1 << 10  # of one transfer
SUM_BYTES = 1 << 30
REPEATS = 7
WAIT_SECONDS = 120.0
GB, TB = 1e9, 1e12


class Bench:
    """The measuring side: one buffer, one stream, one carrier to the owner."""

    def __init__(self, owner: Remote, peak: float) -> None:
        self.owner, self.peak = owner, peak
        self.on: Device = device(0)
        answer = owner.ask("allocate", sizes=[AREA_BYTES], seed=1)
        self.there: int = answer["addresses"][0]
        with self.on.current():
            self.here = self.on.allocate(AREA_BYTES)
            self.stream = CudaStream()
        self.region = MemoryRegion(self.here, AREA_BYTES)
        self.cuda = self._connect(make_carrier("cuda"), answer["cuda"])
        self.copies = self._connect(make_carrier("cuda", triton=False), answer["cuda"])
        self.memory = DeviceMemory([self.region])
        tcp = make_carrier("tcp", host="127.0.0.1", memory=self.memory)
        self.tcp = self._connect(tcp, answer["tcp"])

    def _connect(self, carrier: Carrier, endpoint: str) -> tuple[Carrier, Any]:
        carrier.register([self.region])
        return carrier, carrier.connect(bytes.fromhex(endpoint), soon())

    def arrays(self, size: int) -> Copies:
        """From random slots to random slots."""
        rng = np.random.default_rng(size)
        count = min(AREA_BYTES // size, MOST_COPIES)
        spread = AREA_BYTES // size // count * size  # over all of it, however short they are
        src, dst = (rng.permutation(count).astype(np.int64) * spread for _ in range(2))
        return Copies(src + self.there, dst + self.here, np.full(len(src), size, dtype=np.int64))

    def strided(self, size: int) -> StridedCopies:
        """The same number of copies as rows x segments."""
        rows = min(ROWS, AREA_BYTES // size // 4)
        slots = AREA_BYTES // size // rows
        count = min(slots, MOST_COPIES // rows)
        rng, one = np.random.default_rng(size), np.zeros(1, dtype=np.int64)
        row = np.arange(rows, dtype=np.int64) * slots * size
        src, dst = (
            rng.permutation(count).astype(np.int64) * (slots // count * size) for _ in range(2)
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
        launch = Function.launch

        def noted(kernel: Function, grid: int, stream: CudaStream, values: Sequence[int]) -> None:
            launched.append((kernel, grid, values))
            launch(kernel, grid, stream, values)

        with self.on.current():
            # a slot for each launch: launched again, each must find its own numbers
            buffers = StreamBuffers(self.on, slots=MOST_LAUNCHES)
            with patch.object(Function, "launch", noted):
                buffers.copy(copies, peer.memory, carrier.memory)  # type: ignore[attr-defined]
            buffers.finish()

            def queue() -> None:
                for kernel, grid, values in launched:
                    kernel.launch(grid, self.stream, values)

            seconds = device_seconds(self.stream, queue)
            buffers.free()
        return seconds


def copy_peak(on: Device) -> float:
    """Bytes a second of one long copy on the device, read and written."""
    with on.current():
        src, dst, stream = on.allocate(AREA_BYTES), on.allocate(AREA_BYTES), CudaStream()
        seconds = device_seconds(stream, lambda: stream.copy(dst, src, AREA_BYTES))
        on.free(src)
        on.free(dst)
    return 2 * AREA_BYTES / seconds


def device_seconds(stream: CudaStream, queue: Callable[[], None], repeats: int = REPEATS) -> float:
    """Median time of what `queue` puts on the stream, by events. Its device must be current."""
    begin, end = CudaEvent(timing=True), CudaEvent(timing=True)
    queue()
    stream.synchronize()
    taken = []
    for _ in range(repeats):
        begin.record(stream)
        queue()
        end.record(stream)
        stream.synchronize()
        taken.append(end.milliseconds_since(begin) / 1e3)
    return median(taken)


def by_size(bench: Bench, report: Report) -> None:
    for size in SIZES:
        arrays, strided = bench.arrays(size), bench.strided(size)
        moved, strided_moved = len(arrays) * size, strided.bytes
        few = first(arrays, FEW_COPIES)
        strided_rate = strided_moved / bench.read_seconds(bench.cuda, strided)
        report.row(
            "Copies by size; in brackets: of the copy peak",
            run=show_bytes(size),
            kernel_arrays_TB_s=of(2 * moved / bench.kernel_of(arrays), bench.peak, TB),
            kernel_strided_TB_s=of(2 * strided_moved / bench.kernel_of(strided), bench.peak, TB),
            transfer_arrays_GB_s=moved / bench.read_seconds(bench.cuda, arrays) / GB,
            transfer_strided_GB_s=of(strided_rate, bench.peak / 2, GB),
            a_copy_each_GB_s=len(few) * size / bench.read_seconds(bench.copies, few, 3) / GB,
            right=yes(_right(bench, arrays)),
        )


def of(rate: float, limit: float, unit: float = 1.0) -> str:
    """A rate in that unit, and its share of a limit."""
    return f"{show_number(rate / unit)} ({rate / limit:.0%})"


def yes(right: bool) -> str:
    return "yes" if right else "NO"


def first(copies: Copies, count: int) -> Copies:
    return Copies(copies.src[:count], copies.dst[:count], copies.length[:count])


def _right(bench: Bench, copies: Copies) -> bool:
    """Whether some of the copies arrived, by plain copies of the driver."""
    shift = bench.cuda[1].memory.shift_of(bench.there, bench.there + AREA_BYTES)
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


def latency(bench: Bench, report: Report) -> None:
    """Of small reads: from the call to the end of `wait`, and of the kernel alone."""
    for count, size in ((1, 4096), (100, 16 << 10), (1000, 2048)):
        few = first(bench.arrays(size), count)
        report.row(
            "Latency, microseconds",
            run=f"{count:,} x {show_bytes(size)}",
            read_to_the_end_of_wait=1e6 * bench.read_seconds(bench.cuda, few, 501),
            kernel=1e6 * bench.kernel_of(few),
        )


def checksums(bench: Bench, report: Report) -> None:
    """Of device memory, as a message asks for it, and as one long list."""

    def rate(size: int, algorithm: Algorithm, most: int) -> float:
        arrays = bench.arrays(size)
        count = min(len(arrays), most // size)
        at, length = arrays.dst[:count], arrays.length[:count]
        seconds = median_seconds(lambda: digest(bench.memory, at, length, algorithm))
        return count * size / seconds / GB

    for size in (512, 8 << 10, 64 << 10):
        report.row(
            "Checksums of device memory, GB/s: xxh3 on the host, `mix128` by a kernel",
            run=show_bytes(size),
            xxh3_64_MiB=rate(size, XXH3, XXH3.slice_bytes),
            mix128_32768_runs=rate(size, MIX128, min(MIX128.slice_bytes, (1 << 15) * size)),
            mix128_1_GiB=rate(size, MIX128, SUM_BYTES),
        )


def beside_nixl(bench: Bench, report: Report) -> None:
    """The same copies by NIXL. Last: its threads never sleep."""
    table = "Beside NIXL, GB/s"
    try:
        from nixl._api import nixl_agent, nixl_agent_config

        metadata = bench.owner.ask("nixl")["metadata"]
        agent = nixl_agent("reader", nixl_agent_config(backends=["UCX"]))
        region = (bench.region.address, bench.region.bytes, 0, "")
        agent.register_memory([region], mem_type="VRAM")
        peer = agent.add_remote_agent(bytes.fromhex(metadata))
    except Exception as error:
        report.failed(table, "NIXL", f"{type(error).__name__}: {error}")
        return
    for size in NIXL_SIZES:
        few = first(bench.arrays(size), FEW_COPIES)
        theirs, ours = _nixl_seconds(agent, peer, few), bench.read_seconds(bench.cuda, few)
        report.row(
            table,
            run=show_bytes(size),
            NIXL=f"{len(few) * size / theirs / GB:.2f}",
            kvferry=len(few) * size / ours / GB,
            ratio=f"{theirs / ours:,.0f} x",
        )


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
