# SPDX-License-Identifier: Apache-2.0
"""Device memory over tcp on loopback: beside plain sockets, and pinned copies across the bus.

The sockets send from and receive into rings of buffers like those that staging uses, so that what
differs is all that staging does; and from memory that no cache holds, as a device's bytes are in
none when they have crossed the bus.
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.bench import GB, Bench, first, soon
from benchmarks.gpu.owner import Remote
from benchmarks.measuring import median_seconds
from kvferry.carriers.cuda.staging import CHUNK_BYTES, RING_CHUNKS
from kvferry.carriers.tcp.carrier import STAGED_STREAMS_PER_TRANSFER
from kvferry.copies import Copies

RUNS = (512, 8 << 10, 64 << 10)
TRANSFERS = (1, 2, 4)
ROUNDS = 5
COLD_CHUNKS = 64  # of 4 MiB, each stream its own
TOTAL_BYTES = 1 << 30


def staging(bench: Bench) -> dict[str, Any]:
    """Device memory over tcp, and every limit that it could meet."""
    found: dict[str, Any] = {"cpus": os.cpu_count()}
    with bench.on.current():
        pinned = bench.on.pinned(TOTAL_BYTES)
    at = pinned.ctypes.data
    out = bench.device_seconds(lambda: bench.stream.copy(at, bench.here, TOTAL_BYTES), 3)
    back = bench.device_seconds(lambda: bench.stream.copy(bench.here, at, TOTAL_BYTES), 3)
    found["pinned_out_gb_s"] = TOTAL_BYTES / out / GB
    found["pinned_in_gb_s"] = TOTAL_BYTES / back / GB
    with bench.on.current():
        bench.on.free_pinned(at)
    for transfers in TRANSFERS:
        streams = transfers * STAGED_STREAMS_PER_TRANSFER
        for name, chunks in (("socket", RING_CHUNKS), ("cold", COLD_CHUNKS)):
            rates = [sockets(bench.owner, streams, chunks) for _ in range(ROUNDS)]
            found[f"{name}_{transfers}_gb_s"] = float(np.median(rates)) / GB
    found["rows"] = [_row(bench, run) for run in RUNS]
    return found


def _row(bench: Bench, run: int) -> dict[str, Any]:
    arrays = bench.arrays(run)
    count = min(len(arrays), TOTAL_BYTES // run)
    some = first(arrays, count)
    total = count * run
    row: dict[str, Any] = {"bytes": run}
    for name, chunks in (("gather", bench.memory.outgoing), ("scatter", bench.memory.incoming)):

        def drain() -> None:
            for _ in chunks(some.dst, some.length):  # noqa: B023, called at once
                pass

        row[f"{name}_gb_s"] = total / median_seconds(drain, 3) / GB
    for transfers in TRANSFERS:
        parts = [
            Copies(some.src[i::transfers], some.dst[i::transfers], some.length[i::transfers])
            for i in range(transfers)
        ]
        seconds = median_seconds(partial(together, bench, parts), ROUNDS)
        row[f"tcp_{transfers}_gb_s"] = total / seconds / GB
    return row


def together(bench: Bench, parts: list[Copies]) -> None:
    carrier, peer = bench.tcp
    started = [carrier.read(peer, part) for part in parts]
    for transfer in started:
        transfer.wait(soon())


def sockets(owner: Remote, streams: int, chunks: int) -> float:
    """Bytes a second over that many plain connections at once."""
    size = (2 << 30) // streams // CHUNK_BYTES * CHUNK_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listener:
        owner.start(
            "stream", port=listener.getsockname()[1], streams=streams, size=size, chunks=chunks
        )
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
