"""Device memory over tcp on loopback: beside plain sockets, and pinned copies across the bus."""

from __future__ import annotations

import os
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.bench.gpu_clock import GB, soon, wall
from kvferry.bench.gpu_owner import Remote
from kvferry.transport import Carrier, make_carrier
from kvferry.transport.regions import Arrays
from kvferry.transport.staging import DeviceMemory

if TYPE_CHECKING:
    from kvferry.bench.gpu import Bench


def staging(bench: Bench) -> dict[str, Any]:
    """Device memory over tcp, and every limit that it could meet."""
    found: dict[str, Any] = {"cpus": os.cpu_count()}
    size = 1 << 30
    with bench.on.current():
        pinned = bench.on.pinned(size)
    out = bench.device_seconds(lambda: bench.stream.copy(pinned.ctypes.data, bench.here, size), 3)
    back = bench.device_seconds(lambda: bench.stream.copy(bench.here, pinned.ctypes.data, size), 3)
    found["pinned_out_gb_s"], found["pinned_in_gb_s"] = size / out / GB, size / back / GB
    with bench.on.current():
        bench.on.free_pinned(pinned.ctypes.data)
    for streams in (1, 2, 4, 8):
        found[f"socket_{streams}_gb_s"] = sockets(bench.owner, streams) / GB
    found["rows"] = []
    for run in (512, 8 << 10, 64 << 10):
        arrays = bench.arrays(run)
        count = min(len(arrays), size // run)
        some = Arrays(arrays.src[:count], arrays.dst[:count], arrays.length[:count])
        total = count * run
        buffer = bench.memory.buffer(total)
        row: dict[str, Any] = {"bytes": run}
        row["gather_gb_s"] = (
            total / wall(partial(bench.memory.gather, some.dst, some.length, buffer), 3) / GB
        )
        row["scatter_gb_s"] = (
            total / wall(partial(bench.memory.scatter, buffer, some.dst, some.length), 3) / GB
        )
        for transfers in (1, 2, 4):
            parts = [
                Arrays(some.src[i::transfers], some.dst[i::transfers], some.length[i::transfers])
                for i in range(transfers)
            ]

            row[f"tcp_{transfers}_gb_s"] = total / wall(partial(together, bench, parts), 3) / GB
        found["rows"].append(row)
    found["chunks"] = by_chunk(bench, size)
    return found


def by_chunk(bench: Bench, size: int) -> dict[str, float]:
    """What four transfers reach by how much is staged at a time, in MiB; runs of 64 KiB."""
    arrays = bench.arrays(64 << 10)
    count = size >> 16
    parts = [
        Arrays(*(a[:count][i::4] for a in (arrays.src, arrays.dst, arrays.length)))
        for i in range(4)
    ]
    rates = {}
    for mib in (1, 4, 8, 16, 32):
        endpoint = bench.owner.ask("restage", chunk_bytes=mib << 20)["tcp"]
        memory = DeviceMemory([bench.region], chunk_bytes=mib << 20)
        carrier = make_carrier("tcp", host="127.0.0.1", memory=memory)
        carrier.register([bench.region])
        pair = carrier, carrier.connect(bytes.fromhex(endpoint), soon())
        rates[str(mib)] = size / wall(partial(together, bench, parts, pair), 3) / GB
        carrier.close()
    return rates


def together(bench: Bench, parts: list[Arrays], pair: tuple[Carrier, Any] | None = None) -> None:
    carrier, peer = pair or bench.tcp
    started = [carrier.read(peer, part) for part in parts]
    for transfer in started:
        transfer.wait(soon())


def sockets(owner: Remote, streams: int) -> float:
    """Bytes a second over that many plain connections at once."""
    size = (2 << 30) // streams
    with socket.create_server(("127.0.0.1", 0)) as listener:
        owner.start("stream", port=listener.getsockname()[1], streams=streams, size=size)
        accepted = [listener.accept()[0] for _ in range(streams)]

    def receive(sock: socket.socket) -> None:
        buffer = bytearray(4 << 20)
        with sock:
            while sock.recv_into(buffer):
                pass

    threads = [threading.Thread(target=receive, args=(sock,)) for sock in accepted]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    owner.answer()
    return size // (16 << 20) * (16 << 20) * streams / seconds
