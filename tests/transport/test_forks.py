"""A process that has forked: its peers see its end, and nothing of it is ended by its children."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from carrier_peer import copies, soon, threads_left

from kvferry.carriers import MemoryRegion
from kvferry.carriers.liveness import Liveness, LivenessServer
from kvferry.carriers.tcp.carrier import TcpCarrier
from kvferry.errors import PeerLost
from waiting import wait_until

HOST = "127.0.0.1"
SIZE = 1 << 16


class Owner:
    """A liveness server and a tcp server over some memory."""

    def __init__(self) -> None:
        self.memory = np.full(SIZE, 7, dtype=np.uint8)
        region = MemoryRegion(self.memory.ctypes.data, SIZE)
        self.liveness = LivenessServer(HOST)
        self.tcp = TcpCarrier()
        self.tcp.register([region])

    def told(self) -> str:
        """What a user must know."""
        liveness = self.liveness
        words = (liveness.port, liveness.token.hex(), liveness.incarnation.hex())
        return " ".join(map(str, (*words, self.tcp.endpoint().hex(), self.memory.ctypes.data)))

    def close(self) -> None:
        self.liveness.close()
        self.tcp.server.close(0.5)


class User:
    """Connected to all of an owner's."""

    def __init__(self, told: str) -> None:
        liveness_port, token, incarnation, endpoint, address = told.split()
        self.known = (bytes.fromhex(token), bytes.fromhex(incarnation))
        self.liveness_port = int(liveness_port)
        self.there = np.array([int(address)])
        self.liveness = self.new_liveness()
        self.tcp = TcpCarrier()
        self.memory = np.zeros(SIZE, dtype=np.uint8)
        self.tcp.register([MemoryRegion(self.memory.ctypes.data, SIZE)])
        self.peer = self.tcp.connect(bytes.fromhex(endpoint), soon())

    def new_liveness(self) -> Liveness:
        return Liveness.connect(HOST, self.liveness_port, *self.known, soon(5))

    def read(self) -> None:
        self.memory[:] = 0
        here = self.memory.ctypes.data
        self.tcp.read(self.peer, copies(self.there, here, SIZE)).wait(soon(5))
        assert (self.memory == 7).all()

    def close(self) -> None:
        self.liveness.close()
        self.tcp.close()


# Both an owner and a user. Says what a user must know, and serves; its child closes what it got.
PROGRAM = """
import os, sys, time, warnings
from test_forks import Owner, User
owner, user = Owner(), User(sys.argv[1])
print(owner.told(), flush=True)
sys.stdin.readline()
warnings.simplefilter("ignore")  # forks beside threads
if os.fork():
    time.sleep(60)
owner.close()
assert not user.liveness.alive()
print("forked", flush=True)
for _ in sys.stdin:
    print("still here", flush=True)
"""


@contextlib.contextmanager
def forking(told: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, told],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # its child ends with its input


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_a_killed_process_is_dead_though_its_child_lives() -> None:
    with contextlib.ExitStack() as undo:
        ours = undo.enter_context(contextlib.closing(Owner()))
        process = undo.enter_context(forking(ours.told()))
        assert process.stdout
        user = undo.enter_context(contextlib.closing(User(process.stdout.readline())))
        assert len(ours.liveness.guests) == ours.tcp.server.serving == 1
        user.read()
        assert said(process) == "forked\n"
        # the child has let go of all, which its parent does not notice
        assert user.liveness.alive(0.05)
        user.new_liveness().close()
        user.read()
        assert len(ours.liveness.guests) == ours.tcp.server.serving == 1
        process.kill()
        process.wait()
        # what it served
        assert not user.liveness.alive(5)
        with pytest.raises(PeerLost):
            user.read()
        with pytest.raises(PeerLost):
            user.new_liveness()
        # what it used
        wait_until(lambda: not ours.liveness.guests)
        wait_until(lambda: not ours.tcp.server.serving)
        assert said(process) == "still here\n"


def test_closing_a_liveness_connection_is_seen_whoever_else_has_a_copy() -> None:
    """As a child has that was forked before it could be told of a connection."""
    server = LivenessServer(HOST)
    visit = Liveness.connect(HOST, server.port, server.token, server.incarnation, soon(5))
    (visitor,) = server.guests
    kept = [os.dup(one.fileno()) for one in (server._listener, visitor.connection)]
    begin = time.monotonic()
    server.close()
    assert time.monotonic() - begin < 10
    assert threads_left("kvferry-liveness") == []
    assert not visit.alive(10)
    with pytest.raises(PeerLost):
        Liveness.connect(HOST, server.port, server.token, server.incarnation, soon(10))
    visit.close()
    for descriptor in kept:
        os.close(descriptor)


DROPPED = """
import gc, os, time
from kvferry.carriers.liveness import Liveness, LivenessServer
from kvferry.carriers.vouch import vouch_for
server = LivenessServer("127.0.0.1")
known = server.port, server.token, server.incarnation
visit = Liveness.connect("127.0.0.1", *known, time.monotonic() + 5)
vouch_for(str.encode)
if not (child := os.fork()):
    del server
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0 and visit.alive()
server.close()
assert not visit.alive(5)
"""


def test_a_child_that_drops_a_server_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DROPPED], timeout=300, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
