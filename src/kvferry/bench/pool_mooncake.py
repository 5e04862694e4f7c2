"""A Mooncake master of our own on loopback, as long as a measurement or a test takes."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvferry.errors import StoreError
from kvferry.pool.mooncake import MooncakeStore
from kvferry.pool.mooncake_config import MooncakeStoreConfig

START_SECONDS = 30.0


@contextlib.contextmanager
def master() -> Iterator[str]:
    """Its address; the process ends with the context."""
    beside = Path(sys.executable).with_name("mooncake_master")
    program = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if program is None:
        raise StoreError("mooncake_master is not installed")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        port, metrics = (one.getsockname()[1] for one in sockets)
    process = subprocess.Popen(
        [program, f"-rpc_port={port}", "-rpc_address=127.0.0.1", f"-metrics_port={metrics}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            if time.monotonic() > until or process.poll() is not None:
                raise StoreError("mooncake_master did not start")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def store_of(address: str, segment_bytes: int) -> MooncakeStore:
    return MooncakeStore(
        MooncakeStoreConfig(
            master_server_address=address,
            global_segment_size=segment_bytes,
            local_buffer_size=64 << 20,
        ),
        hold_memory=True,  # as engines use it
    )
