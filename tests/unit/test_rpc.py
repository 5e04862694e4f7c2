"""Calls that cannot even be sent end at once, and say whose fault it is; who may answer one."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvferry.errors import AuthenticationError, DeadlineExceeded, HandoverError, PeerLost
from kvferry.net.messages import VERSION, Hello, Renew, Renewed, Reply, decode_request, encode
from kvferry.net.names import hang_up
from kvferry.net.rpc import Caller, Sockets, _Call
from waiting import wait_until

NOT_AN_ENGINE: Any = object()


@pytest.mark.parametrize(
    ("address", "body", "kind", "words"),
    [
        ("127.0.0.1:no port", Renew(VERSION, "i", ["h"]), PeerLost, "cannot be reached"),
        ("127.0.0.1:9", Hello(VERSION, NOT_AN_ENGINE), HandoverError, "internal error: TypeError"),
    ],
    ids=["the address", "ours"],
)
def test_what_cannot_be_sent(address: str, body: Any, kind: type, words: str) -> None:
    sockets = Sockets()
    caller = Caller(sockets)
    try:
        error = caller.call(address, body, time.monotonic() + 60).exception(timeout=30)
        assert type(error) is kind and words in str(error)
    finally:
        caller.close()
        sockets.close()


def test_a_peer_answers_its_own_calls_alone() -> None:
    sockets = Sockets()
    caller = Caller(sockets)
    silent, port = sockets.server(None)
    liar, other_port = sockets.server(None)
    deadline = time.monotonic() + 30
    try:
        awaited = caller.call(f"127.0.0.1:{port}", Renew(VERSION, "i", ["h"]), deadline)
        _, frame = silent.recv_multipart()
        known = decode_request(frame).id
        asked = caller.call(f"127.0.0.1:{other_port}", Renew(VERSION, "i", ["h"]), deadline)
        sender, frame = liar.recv_multipart()
        mine = decode_request(frame).id
        for number in (known, mine, mine):  # another's, its own, and its own again
            liar.send_multipart([sender, encode(Reply(number, Renewed(["h"], [])))])
        assert asked.result(10) == Renewed(["h"], [])
        assert not awaited.done()
        wait_until(lambda: caller.counters["late replies"])
        assert caller.counters == {"misdirected replies": 1, "late replies": 1}
        assert not awaited.done()
    finally:
        for server in (silent, liar):
            server.close(linger=0)
        caller.close()
        sockets.close()


def test_a_peer_that_floods_its_caller_delays_no_other_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here it sends as fast as the caller reads. It is named in the log once."""
    sockets = Sockets()
    caller = Caller(sockets)
    silent, port = sockets.server(None)
    flooding, other_port = sockets.server(None)
    really, over = caller._receive, threading.Event()

    def receive(line: Any) -> None:
        if line.address.endswith(f":{other_port}"):
            line = SimpleNamespace(address=line.address, socket=Endless(over))
        really(line)

    caller._receive = receive  # type: ignore[method-assign]
    try:
        caller.call(f"127.0.0.1:{other_port}", Renew(VERSION, "i", ["h"]), time.monotonic() + 60)
        sender, _ = flooding.recv_multipart()
        waits = caller.call(f"127.0.0.1:{port}", Renew(VERSION, "i", ["h"]), time.monotonic() + 0.5)
        silent.recv_multipart()
        flooding.send_multipart([sender, b"the first of many"])
        assert isinstance(waits.exception(10), DeadlineExceeded)
        assert caller.counters["malformed replies"] > 1
        (line,) = [one.getMessage() for one in caplog.records]
        assert str(other_port) in line and "malformed replies" in line
    finally:
        over.set()
        for server in (silent, flooding):
            server.close(linger=0)
        caller.close()
        sockets.close()


class Endless:
    """A socket on which a reply always waits."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def poll(self, _: int) -> bool:
        return not self._over.is_set()

    def recv_multipart(self) -> list[bytes]:
        return [b"no reply"]


def test_more_peers_than_zmq_allows_by_itself() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"this machine allows {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    sockets = Sockets()
    try:
        made = [sockets.context.socket(zmq.PAIR) for _ in range(1500)]
        assert len(made) == 1500
    finally:
        sockets.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_calls_end_with_their_caller() -> None:
    sockets = Sockets()
    caller = Caller(sockets)
    silent, port = sockets.server(None)
    far = time.monotonic() + 600
    try:
        waiting = caller.call(f"127.0.0.1:{port}", Renew(VERSION, "i", ["h"]), far)
        silent.recv_multipart()
        caller.close()
        late = caller.call(f"127.0.0.1:{port}", Renew(VERSION, "i", ["h"]), far)
        for call in (waiting, late):
            assert isinstance(call.exception(0), PeerLost)
        caller.close()
    finally:
        silent.close(linger=0)
        caller.close()
        sockets.close()


def test_a_reply_counts_though_the_line_broke_right_after_it() -> None:
    """The caller's thread has seen the handshake, and then both at once."""
    sockets = Sockets()
    caller, server_side = Caller(sockets), Sockets()
    server, port = server_side.server(None)
    turn, seen, over = caller._turn, threading.Event(), threading.Event()

    def late_turn(ready: Any) -> None:
        if any(line.monitor in ready for line in caller._lines.values()):
            seen.set()
            assert over.wait(30)
        turn(ready)

    caller._turn = late_turn  # type: ignore[method-assign]
    try:
        call = caller.call(f"127.0.0.1:{port}", Renew(VERSION, "i", ["h"]), time.monotonic() + 30)
        assert seen.wait(30)
        sender, frame = server.recv_multipart()
        server.send_multipart([sender, encode(Reply(decode_request(frame).id, Renewed([], [])))])
        (line,) = caller._lines.values()
        assert line.socket.poll(10_000)
        server.close(linger=0)
        time.sleep(0.2)  # libzmq's threads notice
        over.set()
        assert call.result(10) == Renewed([], [])
    finally:
        over.set()
        caller.close()
        for one in (sockets, server_side):
            one.close()


def test_a_call_that_meets_a_broken_handshake_ends_those_before_it_too() -> None:
    """libzmq has noticed, and the caller's thread has not looked at the line. Later calls must not
    find this line, which is of no use any more."""
    sockets = Sockets()
    caller = Caller(sockets)
    stranger = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{stranger.getsockname()[1]}"
    body, far = Renew(VERSION, "i", ["h"]), time.monotonic() + 600
    busy, over, calls = threading.Event(), threading.Event(), []
    accepted: list[socket.socket] = []

    def answer() -> None:
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                connection, _ = stranger.accept()
                assert busy.wait(30)
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 5)
                accepted.append(connection)

    def call_twice() -> None:
        """On the caller's thread, so that it looks at no line meanwhile."""
        busy.set()
        over.wait(30)
        for _ in range(2):  # libzmq takes one more before it tells this thread
            call = _Call(next(caller._numbers), address, body, far)
            caller._begin(call)
            calls.append(call.future)
            time.sleep(0.3)

    threading.Thread(target=answer, daemon=True).start()
    try:
        calls.append(caller.call(address, body, far))
        caller.submit(call_twice)
        wait_until(lambda: bool(accepted))
        time.sleep(0.3)
        over.set()
        wait_until(lambda: len(calls) == 3)
        for call in calls:
            assert isinstance(call.exception(10), AuthenticationError)
        assert not caller._lines
    finally:
        over.set()
        hang_up(stranger)
        for connection in accepted:
            connection.close()
        caller.close()
        sockets.close()


def test_an_authenticator_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is bound then, and the next server has an authenticator."""

    def refuse(_: ThreadAuthenticator) -> None:
        raise RuntimeError("can't start new thread")

    sockets = Sockets()
    try:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(ThreadAuthenticator, "start", refuse)
            sockets.server(None)
        server, _ = sockets.server(None)
        server.close(linger=0)
        authenticator = sockets._authenticator
        assert authenticator is not None and authenticator.is_alive()
    finally:
        sockets.close()
