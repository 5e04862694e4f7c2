# SPDX-License-Identifier: Apache-2.0
"""The process that owns device memory while `python -m benchmarks.gpu` reads it.

It gets orders over a pipe, and answers each. It takes no part in transfers over `cuda`.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.carriers import Carrier, MemoryRegion, make_carrier
from kvferry.carriers.cuda.driver import CudaStream, device
from kvferry.carriers.cuda.staging import CHUNK_BYTES, DeviceMemory
from kvferry.errors import TransferError

COLD_CHUNKS = 64  # of 4 MiB, each stream its own
PATTERN_BYTES = (64 << 20) - 4096 * 7 - 16  # no power of two: blocks at equal strides differ


def fill(address: int, size: int, seed: int) -> None:
    """Random bytes, repeated at a distance that no cache's stride divides."""
    on = device(0)
    with on.current():
        pattern = on.pinned(PATTERN_BYTES)
        words = np.random.default_rng(seed).integers(0, 1 << 63, PATTERN_BYTES // 8)
        pattern.view(np.int64)[:] = words
        stream = CudaStream()
        done = min(size, PATTERN_BYTES)
        stream.copy(address, pattern.ctypes.data, done)
        while done < size:  # double it, in whole patterns
            step = min(done // PATTERN_BYTES * PATTERN_BYTES, size - done)
            stream.copy(address + done, address, step)
            done += step
        stream.synchronize()
        on.free_pinned(pattern.ctypes.data)
        stream.destroy()


class Owner:
    """What the process does, order by order."""

    def __init__(self) -> None:
        self._areas: list[tuple[int, int]] = []
        self._carriers: list[Carrier] = []
        self._agent: Any = None

    def allocate(self, sizes: Sequence[int], seed: int) -> dict[str, Any]:
        """Fresh memory, registered with `cuda` and, staged, with `tcp`."""
        self.release()
        on = device(0)
        with on.current():
            self._areas = [(on.allocate(size), size) for size in sizes]
        for number, (address, size) in enumerate(self._areas):
            fill(address, size, seed + number)
        regions = [MemoryRegion(address, size) for address, size in self._areas]
        cuda = make_carrier("cuda")
        tcp = make_carrier("tcp", host="127.0.0.1", memory=DeviceMemory(regions), writable=True)
        for carrier in (cuda, tcp):
            carrier.register(regions)
        self._carriers = [cuda, tcp]
        return {
            "addresses": [address for address, _ in self._areas],
            "cuda": cuda.endpoint().hex(),
            "tcp": tcp.endpoint().hex(),
        }

    def release(self) -> dict[str, Any]:
        for carrier in self._carriers:
            carrier.close()
        self._carriers.clear()
        with device(0).current():
            for address, _ in self._areas:
                device(0).free(address)
        self._areas.clear()
        return {}

    def nixl(self) -> dict[str, Any]:
        """NIXL's metadata, with the same memory registered there too."""
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent("owner", nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(a, n, 0, "") for a, n in self._areas], mem_type="VRAM")
        return {"metadata": self._agent.get_agent_metadata().hex()}

    def stream(self, port: int, streams: int, size: int) -> dict[str, Any]:
        """Send host memory that no cache holds over plain connections, as fast as they go."""

        def send(_: int) -> None:
            memory = np.ones((COLD_CHUNKS, CHUNK_BYTES), dtype=np.uint8)
            with socket.create_connection(("127.0.0.1", port)) as sock:
                for number in range(size // CHUNK_BYTES):
                    sock.sendall(memory[number % COLD_CHUNKS].data)

        with ThreadPoolExecutor(streams) as threads:
            list(threads.map(send, range(streams)))
        return {}


class Remote:
    """The owner, as the measuring process sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def start(self, order: str, **arguments: Any) -> None:
        self._pipe.send((order, arguments))

    def answer(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._pipe.recv()
        except (EOFError, OSError):
            raise TransferError("the process that owns the device memory ended") from None
        if "error" in found:
            raise TransferError(f"the process that owns the device memory: {found['error']}")
        return found

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        self.start(order, **arguments)
        return self.answer()


@contextmanager
def start_owner() -> Iterator[Remote]:
    context = multiprocessing.get_context("spawn")  # with a driver and memory of its own
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Remote(ours)
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection) -> None:
    """The owner's process: one order after another."""
    owner = Owner()
    while True:
        order, arguments = pipe.recv()
        try:
            pipe.send(getattr(owner, order)(**arguments))
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}"})
