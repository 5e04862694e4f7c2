"""The liveness connection: a peer lives, is gone, or is another process in its place."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from carrier_peer import soon, threads_left

from kvferry.carriers import make_carrier
from kvferry.carriers.liveness import MAGIC, Liveness, LivenessServer
from kvferry.errors import DeadlineExceeded, PeerLost, TransferError
from no_threads import no_threads
from waiting import wait_until

HOST = "127.0.0.1"
OWNER = """
import sys
from kvferry.carriers.liveness import LivenessServer
server = LivenessServer("127.0.0.1")
print(server.port, server.token.hex(), server.incarnation.hex(), flush=True)
sys.stdin.read()
"""


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def visit(server: LivenessServer) -> Liveness:
    return Liveness.connect(HOST, server.port, server.token, server.incarnation, soon(5))


def test_a_killed_process_is_noticed_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        port, token, incarnation = process.stdout.readline().split()
        liveness = Liveness.connect(
            HOST, int(port), bytes.fromhex(token), bytes.fromhex(incarnation), soon()
        )
        assert liveness.alive(0.05)
        os.kill(process.pid, signal.SIGSTOP)
        assert liveness.alive(0.05)  # slow is not dead
        assert not liveness.gone()
        process.kill()
        assert not liveness.alive(5)
        wait_until(liveness.gone)
    with pytest.raises(PeerLost, match="gone"):
        liveness.require_alive()
    liveness.close()


def test_a_closed_carrier_is_gone_and_leaves_no_thread() -> None:
    server = LivenessServer(HOST)
    first, second = visit(server), visit(server)
    first.close()
    assert not first.alive() and second.alive(0.05)
    server.close()
    server.close()
    assert not second.alive(5)
    second.close()
    with pytest.raises(PeerLost):
        visit(server)
    assert threads_left("kvferry-liveness") == []


def test_a_visitor_that_comes_while_the_server_closes() -> None:
    """Its connection is closed, and not forgotten: that would be a warning."""
    server, stopped, go_on = LivenessServer(HOST), threading.Event(), threading.Event()
    visit(server).close()  # from now on it accepts
    server.soon(lambda: (stopped.set(), go_on.wait(30)))
    assert stopped.wait(30)
    with socket.create_connection((HOST, server.port), 10) as visitor:
        threading.Timer(0.05, go_on.set).start()
        server.close()
        with contextlib.suppress(ConnectionResetError):
            assert visitor.recv(1) == b""
    gc.collect()


def test_a_carrier_that_is_being_closed_is_lost_and_not_gone() -> None:
    """Its library may still be at work, until the connection has ended."""
    server = LivenessServer(HOST)
    first, second = visit(server), visit(server)
    with socket.create_connection((HOST, server.port)) as stranger:
        time.sleep(0.05)
        server.leave()
        time.sleep(0.05)
        server.leave()
        for liveness in (first, second):
            assert not liveness.alive(5) and not liveness.gone()
            with pytest.raises(PeerLost):
                liveness.require_alive()
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    with pytest.raises(PeerLost, match="no process listens"):
        visit(server)
    second.close()
    assert not second.gone()  # a visitor that has left knows nothing
    server.close()
    wait_until(first.gone)
    assert threads_left("kvferry-liveness") == []
    first.close()
    assert first.gone()


def test_somebody_else_is_not_taken_for_the_peer() -> None:
    server = LivenessServer(HOST)
    with pytest.raises(PeerLost, match="token"):
        Liveness.connect(HOST, server.port, b"x" * 16, server.incarnation, soon(5))
    with pytest.raises(PeerLost, match="restarted"):
        Liveness.connect(HOST, server.port, server.token, b"x" * 16, soon(5))
    for words in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(500), MAGIC):
        with socket.create_connection((HOST, server.port)) as stranger:
            stranger.sendall(words)
    friend = visit(server)
    assert friend.alive(0.05)  # no stranger stops it
    friend.close()
    server.close()


class Short(socket.socket):
    """Listens, and has no descriptor left for the first half second."""

    def accept(self) -> tuple[socket.socket, object]:
        tries.append(time.monotonic())
        if tries[-1] < tries[0] + 0.5:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


tries: list[float] = []


def test_without_descriptors_it_waits_instead_of_trying_on_and_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create_server(*arguments: object, **options: object) -> Short:
        return Short(fileno=plain(*arguments, **options).detach())  # type: ignore[arg-type]

    plain = socket.create_server
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", create_server)
        server = LivenessServer(HOST)
    tries.clear()
    friend = visit(server)  # it is let in later
    assert friend.alive(0.05)
    assert tries[-1] - tries[0] >= 0.5
    assert len(tries) <= 5
    again = visit(server)
    assert again.alive(0.05)
    for one in (friend, again):
        one.close()
    server.close()
    assert threads_left("kvferry-liveness") == []


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    with no_threads(monkeypatch, "kvferry-liveness"), pytest.raises(RuntimeError):
        LivenessServer(HOST)
    wait_until(lambda: open_files() <= before)  # threads of other tests open and close some too


def test_a_peer_that_says_nothing_is_late() -> None:
    with socket.create_server((HOST, 0)) as mute:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            Liveness.connect(HOST, mute.getsockname()[1], b"x" * 16, b"y" * 16, soon(0.2))
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("name", "library", "install"),
    [("mooncake", "mooncake", "kvferry[mooncake"), ("nixl", "nixl", "kvferry[nixl]")],
)
def test_a_missing_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str, install: str
) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="pip install") as refused:
        make_carrier(name)
    assert install in str(refused.value)
    assert threads_left("kvferry-liveness") == []
