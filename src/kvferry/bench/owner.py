"""The other process of `kvferry bench transport`: owns the memory that is read and written.

It is told on its standard input what to do, and answers on a socket: its standard output belongs to
the libraries.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray

from kvferry.bench.movers import MOVERS, WAIT_SECONDS, Mover
from kvferry.errors import TransferError

BUFFER_BYTES = 256 << 20  # per side: beyond the caches


@dataclass(frozen=True, slots=True)
class Owner:
    """The other process: owns the memory that is read and written."""

    address: int
    commands: IO[str]
    stream: socket.socket

    def open(self, name: str) -> bytes:
        """Its side of a mover, ready to be reached."""
        self._say(f"open {name}")
        return bytes.fromhex(_line(self.stream))

    def close(self, name: str) -> None:
        self._say(f"close {name}")
        _line(self.stream)

    def stream_seconds(self, landing: NDArray[np.uint8]) -> float:
        """How long its buffer takes over one plain connection."""
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
    """One answer of the owner; its standard output belongs to the libraries."""
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
def owner() -> Iterator[Owner]:
    code = "from kvferry.bench.owner import own; own()"
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
                yield Owner(int(_line(stream)), process.stdin, stream)
        finally:
            process.kill()


def own() -> None:
    """The other process's program."""
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
    os._exit(0)  # whatever the libraries' threads do


def buffer(seed: int) -> NDArray[np.uint8]:
    """Memory whose pages exist."""
    made = np.empty(BUFFER_BYTES, dtype=np.uint8)
    made[:] = seed
    return made
