"""Host names are resolved where nobody else waits for them, and within a call's deadline."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvferry.errors import AuthenticationError, DeadlineExceeded, PeerLost
from kvferry.handover.producer import Directory
from kvferry.net import names, rpc
from kvferry.net.messages import VERSION, Look, Refused
from kvferry.net.names import MOST_THREADS, Names, at_port, literal
from kvferry.net.rpc import Caller, Sockets
from waiting import require_for, wait_until

SOON = 30.0  # seconds; the machine may be busy


class NameServer:
    """Answers at once, or when it is told to."""

    def __init__(self, **hosts: tuple[str, ...]) -> None:
        self.hosts, self.asked = hosts, list[str]()
        self.answers = threading.Event()

    def look_up(self, host: str) -> tuple[str, ...]:
        self.asked.append(host)
        if host.startswith("slow"):
            assert self.answers.wait(30)
        if host not in self.hosts:
            raise OSError("no such name")
        return self.hosts[host]


@contextlib.contextmanager
def peers(
    server: NameServer, secret: str | None = "a secret for these tests"
) -> Iterator[tuple[Caller, int]]:
    """A caller that asks this name server, and the port of a directory on 127.0.0.1. On 127.0.0.2
    no other process takes that port meanwhile."""
    sockets = Sockets(secret, names=Names(server.look_up))
    directory, caller = Directory(sockets), Caller(sockets)
    directory.start()
    with socket.socket() as beside:
        beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while not _binds(beside, "127.0.0.2", directory.port):
            directory.close()
            directory = Directory(sockets)
            directory.start()
        try:
            yield caller, directory.port
        finally:
            server.answers.set()
            caller.close()
            directory.close()
            sockets.close()


def _binds(free: socket.socket, host: str, port: int) -> bool:
    try:
        free.bind((host, port))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def dying(host: str, port: int, last_words: bytes = b"") -> Iterator[None]:
    """A process that takes one connection, reads from it, and ends."""
    listener = socket.create_server((host, port))

    def live() -> None:
        connection, _ = listener.accept()
        listener.close()
        with connection:
            connection.recv(100)
            connection.sendall(last_words)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    yield
    thread.join(SOON)


def ask(caller: Caller, address: str, seconds: float = SOON) -> Any:
    return caller.call(address, Look(VERSION), time.monotonic() + seconds)


@contextlib.contextmanager
def dropping(host: str, port: int) -> Iterator[None]:
    """An address that neither takes connections nor refuses them: its backlog is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(0)
        with contextlib.suppress(TimeoutError):
            for _ in range(16):
                stack.enter_context(socket.create_connection((host, port), 0.1))
            pytest.skip("this system's backlogs do not fill up")
        yield


@contextlib.contextmanager
def greeting_late(host: str, port: int, seconds: float) -> Iterator[None]:
    """Takes one connection at once, and after a while hands it on to the same port of 127.0.0.1."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def run() -> None:
        client, _ = server.accept()
        time.sleep(seconds)
        with client, socket.create_connection(("127.0.0.1", port)) as peer:
            back = threading.Thread(target=copy, args=(peer, client))
            back.start()
            copy(client, peer)
            back.join(SOON)

    with socket.create_server((host, port)) as server:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield
    thread.join(SOON)


def lookups() -> int:
    return sum(thread.name.startswith("kvferry-names") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("localhost", "127.0.0.1"),
        ("127.1", None),
        ("p.example", None),
        ("", None),
    ],
)
def test_addresses_need_no_lookup(host: str, address: str | None) -> None:
    assert literal(host) == address


def test_a_slow_name_holds_up_nobody_else() -> None:
    server = NameServer(slow=("127.0.0.1",))
    with peers(server) as (caller, port):
        late = ask(caller, f"slow:{port}", 0.3)
        patient = ask(caller, f"slow:{port}", 30)
        assert isinstance(ask(caller, f"127.0.0.1:{port}").result(SOON), Refused)
        assert isinstance(late.exception(SOON), DeadlineExceeded)
        assert "name" in str(late.exception()) and not patient.done()
        server.answers.set()
        assert isinstance(patient.result(SOON), Refused)
        assert isinstance(ask(caller, f"slow:{port}").result(SOON), Refused)
    assert server.asked == ["slow"]  # once for the line


def test_names_that_hang_take_few_threads() -> None:
    server = NameServer(fast=("127.0.0.1",))
    before = lookups()
    with peers(server) as (caller, port):
        hanging = [ask(caller, f"slow{number}:1", 0.5) for number in range(3 * MOST_THREADS)]
        behind = ask(caller, f"fast:{port}", 30)  # waits for its turn
        assert isinstance(ask(caller, f"127.0.0.1:{port}").result(SOON), Refused)
        assert {type(call.exception(SOON)) for call in hanging} == {DeadlineExceeded}
        assert lookups() - before <= MOST_THREADS and not behind.done()
        wait_until(lambda: len(caller._unresolved) <= 1)  # nobody waits for those
        server.answers.set()
        assert isinstance(behind.result(SOON), Refused)
    # those whose callers had left were not looked up
    assert len(server.asked) == MOST_THREADS + 1


def test_thousands_of_names_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are bounded, and when their callers have left, they do not hold up others for long."""
    monkeypatch.setattr(names, "MOST_WAITING", 4000)
    server = NameServer(fast=("127.0.0.1",))
    asked = Names(server.look_up)
    hanging = [asked.ask(f"slow{number}") for number in range(MOST_THREADS + 4000)]
    assert "others wait already" in str(asked.ask("fast").exception(0))
    for one in hanging:
        one.cancel()
    began = time.monotonic()
    server.answers.set()
    wait_until(lambda: not asked._threads._lanes)
    assert asked.ask("fast").result(SOON) == ("127.0.0.1",)
    assert time.monotonic() - began < 5  # a tenth of a second on an idle machine


def test_the_next_address_where_nobody_listens() -> None:
    with peers(NameServer(p=("127.0.0.2", "127.0.0.3", "127.0.0.1"))) as (caller, port):
        calls = [ask(caller, f"p:{port}") for _ in range(3)]
        assert [type(call.result(SOON)) for call in calls] == [Refused] * 3
    with peers(NameServer(p=("127.0.0.2", "127.0.0.3"))) as (caller, port):
        error = ask(caller, f"p:{port}", 30).exception(SOON)
        assert isinstance(error, PeerLost) and "no process listens" in str(error)


def test_the_next_address_where_what_is_sent_is_dropped() -> None:
    """Within the time of the call that has least."""
    with (
        peers(NameServer(p=("127.0.0.2", "127.0.0.3", "127.0.0.1"))) as (caller, port),
        dropping("127.0.0.2", port),
    ):
        calls = [ask(caller, f"p:{port}", seconds) for seconds in (30, 2.1, 30)]
        assert [type(call.result(SOON)) for call in calls] == [Refused] * 3
        assert isinstance(ask(caller, f"p:{port}", 1.0).result(SOON), Refused)  # it is kept


def test_the_last_address_has_all_the_time_that_is_left() -> None:
    with (
        peers(NameServer(p=("127.0.0.3", "127.0.0.2"))) as (caller, port),
        dropping("127.0.0.2", port),
    ):
        began = time.monotonic()
        error = ask(caller, f"p:{port}", 0.6).exception(SOON)
        assert isinstance(error, DeadlineExceeded) and time.monotonic() - began >= 0.6
        wait_until(lambda: not caller._lines)  # nobody waits for it


def test_who_takes_the_connection_may_greet_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "CONNECT_SECONDS", 0.2)
    with (
        peers(NameServer(p=("127.0.0.2", "127.0.0.3"))) as (caller, port),
        greeting_late("127.0.0.2", port, 0.6),
    ):
        call = ask(caller, f"p:{port}", 30)
        require_for(0.4, lambda: not call.done())
        assert isinstance(call.result(SOON), Refused)
        caller.close()


def test_a_peer_that_dies_during_the_handshake_is_lost() -> None:
    """It does not count as one with another secret, and the next address of its name is tried."""
    with peers(NameServer(p=("127.0.0.2", "127.0.0.1"))) as (caller, port):
        with dying("127.0.0.2", port):
            error = ask(caller, f"127.0.0.2:{port}", 30).exception(SOON)
        assert isinstance(error, PeerLost) and "no process listens" in str(error)
        with dying("127.0.0.2", port):
            assert isinstance(ask(caller, f"p:{port}", 30).result(SOON), Refused)


@pytest.mark.parametrize("other", ["secret", "protocol"])
def test_a_peer_with_another_secret_or_protocol(other: str) -> None:
    with peers(NameServer()) as (caller, port), contextlib.ExitStack() as stack:
        if other == "secret":
            sockets = Sockets("another secret of the same kind")
            stack.callback(sockets.close)
            server, port = sockets.server("127.0.0.1")
            stack.callback(server.close, linger=0)
        else:
            stack.enter_context(dying("127.0.0.2", port, b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        host = "127.0.0.1" if other == "secret" else "127.0.0.2"
        error = ask(caller, f"{host}:{port}", 30).exception(SOON)
        assert isinstance(error, AuthenticationError) and "does not take our secret" in str(error)


def test_a_name_that_is_unknown() -> None:
    with peers(NameServer()) as (caller, _):
        error = ask(caller, "nobody.example:1", 30).exception(SOON)
        assert isinstance(error, PeerLost) and "no such name" in str(error)


def test_without_a_secret_no_name_is_looked_up() -> None:
    server = NameServer(p=("127.0.0.1",))
    with peers(server, secret=None) as (caller, port):
        assert isinstance(ask(caller, f"p:{port}", 30).exception(SOON), AuthenticationError)
        assert isinstance(ask(caller, f"localhost:{port}").result(SOON), Refused)
    assert server.asked == []


def test_localhost_is_the_same_on_both_sides() -> None:
    """Whatever the system's files say: one side is resolved by libzmq, the other not at all."""
    sockets = Sockets()
    server, port = sockets.server("localhost")
    try:
        assert "127.0.0.1" in server.getsockopt_string(zmq.LAST_ENDPOINT)
        socket.create_connection(("127.0.0.1", port), SOON).close()
    finally:
        server.close(linger=0)
        sockets.close()


@pytest.mark.parametrize("form", ["[::1]:{}", "::1:{}"])
def test_ipv6(form: str) -> None:
    sockets = Sockets()
    try:
        server, port = sockets.server("[::1]")
    except Exception:
        sockets.close()
        pytest.skip("this machine has no IPv6")
    caller = Caller(sockets)
    try:
        ask(caller, form.format(port))
        assert server.poll(SOON * 1000) == zmq.POLLIN
        assert at_port("::1", port) == f"[::1]:{port}"
    finally:
        server.close(linger=0)
        caller.close()
        sockets.close()


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = NameServer(p=("127.0.0.1",))
    asked = Names(server.look_up)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        answer = asked.ask("p")
        assert isinstance(answer.exception(0), PeerLost)
    assert asked.resolved("p", time.monotonic() + SOON) == ("127.0.0.1",)  # it goes on


FORKED = """
import os, threading, time
from kvferry.net.names import NAMES
gate = threading.Event()
NAMES._look_up = lambda host: gate.wait(20) and ("127.0.0.2",)
asked = NAMES.ask("p")
child = os.fork()
if not child:
    NAMES._look_up = lambda host: ("127.0.0.3",)
    os._exit(NAMES.resolved("p", time.monotonic() + 5) != ("127.0.0.3",))
assert os.waitpid(child, 0)[1] == 0
gate.set()
assert asked.result(10) == ("127.0.0.2",)
"""


def test_a_forked_child_does_not_wait_for_its_parents_lookup() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], timeout=300, check=True)


def test_the_system_resolves() -> None:
    assert {"127.0.0.1", "::1"} & set(names.look_up("localhost"))
