"""A crowd before a router: idle connections and clients that hardly read, while others are served.

What it shows: none of the idle connections is closed, each of them still works, the others get
their answers, and the router's memory grows by a bounded amount for each connection.
"""

from __future__ import annotations

import select
import socket
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

from router_process import RouterProcess, post, read_answer, router_process
from waiting import wait_until

_OTHERS = 50  # requests of others, while the crowd is there
_PLAIN = post(b'{"prompt": "x"}')
_STREAM = post(b'{"prompt": "x", "stream": true}')
_ADDRESSES = 8  # that the crowd connects from; each has 28,000 ports
# A connection that is idle: the socket's transport and the router's connection.
_MOST_BYTES_EACH = 40 << 10
# A slow client: the pieces of its stream that wait in the router, on both sides.
_MOST_BYTES_SLOW = 512 << 10


@dataclass(frozen=True, slots=True)
class Held:
    idle: int
    slow: int
    idle_bytes: int  # of the router's memory, for all idle connections
    slow_bytes: int
    median_ms: float  # of the others' answers
    worst_ms: float
    alone_ms: float  # median, before the crowd came

    def __str__(self) -> str:
        return (
            f"{self.idle} idle connections held, {self.idle_bytes / self.idle / 1024:.1f} KiB of "
            f"the router's memory each ({self.idle_bytes >> 20} MiB); {self.slow} slow clients, "
            f"{self.slow_bytes / max(1, self.slow) / 1024:.0f} KiB each; others served in "
            f"{self.median_ms:.1f} ms, {self.worst_ms:.1f} ms at most ({self.alone_ms:.1f} ms "
            "before)"
        )


def hold_a_crowd(idle: int, slow: int) -> Held:
    """Hold so many. Raises AssertionError if one of them, or one of the others, is not served."""
    limits = {
        "max_connections": idle + slow + 200,
        "address_share": 1.0,
        "header_seconds": 600.0,
        "client_seconds": 600.0,
        "chunk_seconds": 600.0,
    }
    with router_process(limits, more=["--place", "load"]) as router, ExitStack() as stack:
        _serve_others(router)  # warm
        alone = statistics.median(_serve_others(router))
        files, memory = router.files(), router.memory_bytes()
        crowd = []
        for number in range(idle):
            crowd.append(stack.enter_context(router.connect(f"127.0.0.{2 + number % _ADDRESSES}")))
        wait_until(lambda: router.files() > idle, 60, "not all connections were accepted")
        idle_bytes = router.memory_bytes() - memory
        readers = []
        for number in range(slow):
            reader = stack.enter_context(
                router.connect(f"127.0.0.{2 + number % _ADDRESSES}", receive_bytes=4096)
            )
            reader.sendall(_STREAM)
            readers.append(reader)
        for reader in readers:
            assert reader.recv(1), "a slow client was dropped"
        took = _serve_others(router)
        slow_bytes = router.memory_bytes() - memory - idle_bytes
        _require_open(crowd)
        for reader in readers:
            assert reader.recv(1), "a slow client was dropped"
        for connection in crowd[:: max(1, idle // 200)]:
            connection.sendall(_PLAIN)
            assert read_answer(connection)[0] == 200
        held = Held(
            idle,
            slow,
            idle_bytes,
            slow_bytes,
            1000 * statistics.median(took),
            1000 * max(took),
            1000 * alone,
        )
        assert idle_bytes < idle * _MOST_BYTES_EACH + (8 << 20), held
        assert slow_bytes < slow * _MOST_BYTES_SLOW + (8 << 20), held
        stack.close()
        wait_until(
            lambda: router.files() <= files + 8, 60, lambda: f"{router.files()} files, {files}"
        )
    return held


def _serve_others(router: RouterProcess) -> list[float]:
    """How long requests take, each on a connection of its own."""
    took = []
    for _ in range(_OTHERS):
        begun = time.monotonic()
        with router.connect() as connection:
            connection.sendall(_PLAIN)
            status, body = read_answer(connection)
        assert (status, b"fine" in body) == (200, True), body
        took.append(time.monotonic() - begun)
    return took


def _require_open(connections: list[socket.socket]) -> None:
    """A connection that the router closed, or wrote to, is ready to be read."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    ready = poll.poll(0)
    assert not ready, f"{len(ready)} of {len(connections)} idle connections were closed"
