# SPDX-License-Identifier: Apache-2.0
"""Device memory over tcp on loopback: beside plain sockets, and pinned copies across the bus.

The sockets send from memory that no cache holds, as a device's bytes are in none when they have
crossed the bus, and receive into rings of buffers like those that staging uses. So what differs is
all that staging does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from benchmarks.gpu.bench import GB, Bench, device_seconds, first, of, soon
from benchmarks.gpu.owner import Remote
from benchmarks.measuring import median_seconds
from benchmarks.report import Report
from kvferry.carriers.cuda.staging import CHUNK_BYTES, RING_CHUNKS
from kvferry.carriers.tcp.carrier import STAGED_STREAMS_PER_TRANSFER
from kvferry.copies import Copies, Ints
from kvferry.units import show_bytes

RUNS = (512, 8 << 10, 64 << 10)
TRANSFERS = (1, 2, 4)
ROUNDS = 5
TOTAL_BYTES = 1 << 30


def staging(bench: Bench, report: Report) -> None:
    """Device memory over tcp, and every limit that it could meet."""
    with bench.on.current():
        at = bench.on.pinned(TOTAL_BYTES).ctypes.data
        out, back = (
            TOTAL_BYTES / device_seconds(bench.stream, partial(bench.stream.copy, *ends), 3)
            for ends in ((at, bench.here, TOTAL_BYTES), (bench.here, at, TOTAL_BYTES))
        )
        bench.on.free_pinned(at)
    limits = {"pinned copy, out": out, "pinned copy, in": back}
    plain: dict[int, float] = {}
    for transfers in TRANSFERS:
        streams = transfers * STAGED_STREAMS_PER_TRANSFER
        rates = [sockets(bench.owner, streams) for _ in range(ROUNDS)]
        plain[transfers] = limits[f"plain sockets, {streams} streams"] = float(np.median(rates))
    for name, rate in limits.items():
        report.row(f"Staging's limits, {os.cpu_count()} cores", limit=name, GB_s=rate / GB)
    for run in RUNS:
        some = first(bench.arrays(run), TOTAL_BYTES // run)
        total = len(some) * run
        tcp = {transfers: _tcp_rate(bench, some, transfers, total) for transfers in TRANSFERS}
        report.row(
            "Staging over `tcp`, four streams a transfer, GB/s; in brackets: of its limits",
            run=show_bytes(run),
            gather=of(total / _drained(bench.memory.outgoing, some), out, GB),
            scatter=of(total / _drained(bench.memory.incoming, some), back, GB),
            tcp_1_at_a_time=of(tcp[1], plain[1], GB),
            tcp_2_at_a_time=of(tcp[2], plain[2], GB),
            tcp_4_at_a_time=of(tcp[4], plain[4], GB),
            best_of_pinned=f"{max(tcp.values()) / min(out, back):.0%}",
        )


def _drained(chunks: Callable[[Ints, Ints], Iterable[object]], some: Copies) -> float:
    """Seconds to gather or scatter all chunks, without a connection."""

    def drain() -> None:
        for _ in chunks(some.dst, some.length):
            pass

    return median_seconds(drain, 3)


def _tcp_rate(bench: Bench, some: Copies, transfers: int, total: int) -> float:
    parts = [
        Copies(some.src[i::transfers], some.dst[i::transfers], some.length[i::transfers])
        for i in range(transfers)
    ]
    return total / median_seconds(partial(together, bench, parts), ROUNDS)


def together(bench: Bench, parts: list[Copies]) -> None:
    carrier, peer = bench.tcp
    started = [carrier.read(peer, part) for part in parts]
    for transfer in started:
        transfer.wait(soon())


def sockets(owner: Remote, streams: int) -> float:
    """Bytes a second over that many plain connections at once."""
    size = (2 << 30) // streams // CHUNK_BYTES * CHUNK_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listener:
        owner.start("stream", port=listener.getsockname()[1], streams=streams, size=size)
        accepted = [listener.accept()[0] for _ in range(streams)]

    def receive(sock: socket.socket) -> None:
        memory = np.ones((RING_CHUNKS, CHUNK_BYTES), dtype=np.uint8)
        with sock:
            turn = 0
            while sock.recv_into(memory[turn % RING_CHUNKS].data, 0, socket.MSG_WAITALL):
                turn += 1

    begin = time.perf_counter()
    with ThreadPoolExecutor(streams) as threads:
        list(threads.map(receive, accepted))
    seconds = time.perf_counter() - begin
    owner.answer()
    return size * streams / seconds
