"""What an attacker tried, and must not get: each test does what the attacker did.

Other users of the host are played by a process that gives up its privileges, so those tests need
root. A peer that has the secret is trusted with what is registered, and with nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from carrier_peer import FIRST, KINDS, Kind, Peer, copies, owner, soon

from handover_peers import Producer, Prompt, Spec, consumer, producer
from kvferry.carriers import MemoryRegion, vouch
from kvferry.carriers.liveness import Liveness, LivenessServer
from kvferry.carriers.local import LocalCarrier, LocalEndpoint, _start_ticks
from kvferry.carriers.tcp.carrier import TcpCarrier, TcpEndpoint
from kvferry.carriers.tcp.frames import (
    AUTH_BYTES,
    HEADER,
    HELLO_BYTES,
    INCARNATION_BYTES,
    NONCE_BYTES,
    mac,
)
from kvferry.carriers.tcp.server import ServerLimits
from kvferry.errors import (
    DeadlineExceeded,
    DescriptionError,
    KvferryError,
    PeerLost,
    PermissionDenied,
    TransferError,
)
from kvferry.net.guests import MOST_PENDING
from kvferry.net.keys import Key, runtime_directory
from kvferry.net.messages import VERSION, Look
from kvferry.net.rpc import Caller, Sockets
from waiting import wait_until

SECRET = "a secret for these tests"
NOBODY = 65534
TOKEN = b"HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


class Victim:
    """A carrier that reads, its cache, and something in its memory that is nobody's business."""

    def __init__(self) -> None:
        self.private = np.frombuffer(TOKEN, dtype=np.uint8).copy()
        self.cache = np.zeros(4096, dtype=np.uint8)
        self.carrier = LocalCarrier()
        self.carrier.register([MemoryRegion(self.cache.ctypes.data, self.cache.nbytes)])

    def loads(self, endpoint: bytes, address: int) -> None:
        """As a hand-over does: connect, then read what the peer's layout says into the cache."""
        link = self.carrier.connect(endpoint, soon(10))
        there = copies(address, self.cache.ctypes.data, len(TOKEN))
        self.carrier.read(link, there).wait(soon(10))


@pytest.fixture
def victim() -> Iterator[Victim]:
    made = Victim()
    with contextlib.closing(made.carrier):
        yield made


def forged(endpoint: bytes, **changes: object) -> bytes:
    found = LocalEndpoint.decode(endpoint)
    return msgspec.msgpack.encode(msgspec.structs.replace(found, **changes))


# Memory that nobody registered


def test_no_endpoint_has_a_process_read_itself(victim: Victim) -> None:
    """Its directory tells its pid and token; the regions are the attacker's choice."""
    address = victim.private.ctypes.data
    lie = forged(victim.carrier.endpoint(), regions=[(address, len(TOKEN))])
    with pytest.raises(KvferryError):
        victim.loads(lie, address)
    assert not victim.cache.any()


PROCESS = f"""
import ctypes
kept = ctypes.create_string_buffer({TOKEN!r})
token = ctypes.create_string_buffer(b"t" * 16)  # as a request's body would be, of a known content
print(ctypes.addressof(kept), ctypes.addressof(token), flush=True)
input()
"""


def test_no_endpoint_has_a_process_read_another_one_of_its_user(victim: Victim) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        kept, token = map(int, other.stdout.readline().split())
        lie = forged(
            victim.carrier.endpoint(),
            pid=other.pid,
            start_ticks=_start_ticks(other.pid),
            token_address=token,
            token=b"t" * 16,
            regions=[(kept, len(TOKEN))],
        )
        try:
            with pytest.raises(KvferryError):
                victim.loads(lie, kept)
        finally:
            other.kill()
    assert not victim.cache.any()


def test_a_true_owner_vouches_for_its_own_endpoint_alone(victim: Victim) -> None:
    with owner(KINDS["local"]) as peer:
        beyond = peer.address + FIRST[0] - 64  # mapped there, not registered
        told = LocalEndpoint.decode(peer.endpoint)
        (start, size), *more = told.regions
        lie = forged(peer.endpoint, regions=[(start - 64, size + 64), *more])
        with pytest.raises(PeerLost, match="no open carrier with this endpoint"):
            victim.loads(lie, beyond)
        with pytest.raises(KvferryError, match="not inside the memory that the peer registered"):
            victim.loads(peer.endpoint, beyond)
        victim.loads(peer.endpoint, peer.address + FIRST[0])


@pytest.mark.parametrize("known", [True, False], ids=["with-its-secret", "without-a-secret"])
def test_a_producer_that_lies_gets_nothing_of_its_readers_memory(known: bool) -> None:
    """The whole attack: a hand-over from a fake producer, which names memory of the decode engine
    as its own cache, and would read that out of the cache again."""
    secret = SECRET if known else None
    spec = Spec("p", "tp=1,block=16", secret=secret)
    fake = Producer(spec)
    private: list[np.ndarray] = []
    with contextlib.closing(fake), consumer(Spec("d", "tp=1,block=16", secret=secret), spec) as d:
        (told,), endpoint = fake.infos, d.racks[0].carrier.endpoint()  # as its directory tells it
        for region in told.regions:
            private.append(np.full(region.bytes, 0x5A, dtype=np.uint8))
        regions = [
            msgspec.structs.replace(region, address=held.ctypes.data)
            for region, held in zip(told.regions, private, strict=True)
        ]
        lie = forged(endpoint, regions=[(held.ctypes.data, held.nbytes) for held in private])
        fake.tell([msgspec.structs.replace(told, regions=regions, carriers={"local": lie})])
        prompt = Prompt(1, 100)
        fake.open(prompt)
        (loaded,) = d.load(fake.ticket(prompt), prompt, seconds=20)
        assert not loaded.ok
        assert d.wrong_bytes() == 0  # every block is as it was


@pytest.mark.parametrize("name", ["vouch-x", "../key", "vouch-" + "0" * 31 + "/", "/tmp/x"])
def test_an_endpoint_names_no_path(victim: Victim, name: str) -> None:
    with pytest.raises(KvferryError):
        victim.carrier.connect(forged(victim.carrier.endpoint(), voucher=name), soon(5))


def test_without_a_directory_for_its_socket_nobody_vouches(
    victim: Victim,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where another user has taken its name. With a secret, engines start all the same."""
    (tmp_path / "run").write_text("no directory")
    with owner(KINDS["local"]) as other, contextlib.closing(LocalCarrier()) as peer:
        monkeypatch.setenv("KVFERRY_RUNTIME_DIR", str(tmp_path / "run"))
        with pytest.raises(PermissionDenied, match="no socket to vouch for"):
            victim.carrier.connect(peer.endpoint(), soon())
        assert "no peer reaches this process by `local` or `cuda`" in caplog.text
        with pytest.raises(PermissionDenied, match="no owner can be asked"):  # from here
            victim.carrier.connect(other.endpoint, soon())


LIAR = f"""
import os, socket, sys
with socket.socket(socket.AF_UNIX) as liar:
    liar.bind(sys.argv[1])
    os.setgid({NOBODY}); os.setuid({NOBODY})
    liar.listen(8)  # now the kernel notes whose it is
    print("listening", flush=True)
    while True:
        question, _ = liar.accept()
        with question:
            question.sendall(bytes([1]))
"""


@as_root
def test_another_user_cannot_vouch() -> None:
    """Even where its socket lies in our directory, the kernel says whose it is."""
    name = "vouch-" + secrets.token_hex(16)
    path = runtime_directory() / name
    with subprocess.Popen([sys.executable, "-c", LIAR, str(path)], stdout=subprocess.PIPE) as liar:
        try:
            assert liar.stdout
            assert liar.stdout.readline()
            with pytest.raises(PermissionDenied, match=f"belongs to user {NOBODY}"):
                vouch.ask(name, b"endpoint", soon(5))
        finally:
            liar.kill()
            path.unlink()


# Other users of the host

STRANGER = """
import json, os, sys, time
import numpy as np
from kvferry.net.rpc import Caller
from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.tcp.carrier import TcpCarrier
from kvferry.copies import Copies
from kvferry.net.messages import VERSION, Look, Request, encode
from kvferry.net.rpc import Sockets
import zmq

port, key, uid = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
TcpCarrier().close(), "x".encode("idna")  # loads what it needs while it may read the files
os.setgroups([]); os.setgid(uid); os.setuid(uid)
got = {"welcome": False, "read": 0, "written": 0, "key": False, "answer": False, "why": ""}
try:
    got["key"] = bool(open(key, "rb").read())
except OSError:
    pass
plain = zmq.Context().socket(zmq.DEALER)  # without any key
plain.connect(f"tcp://127.0.0.1:{port}")
plain.send(encode(Request(1, Look(VERSION))))
got["answer"] = bool(plain.poll(1500))
sockets = Sockets()
until = time.monotonic() + 20
try:
    seen = Caller(sockets).call(f"127.0.0.1:{port}", Look(VERSION), until).result(20)
    got["welcome"] = True
    mine = np.full(4096, 66, dtype=np.uint8)
    carrier = TcpCarrier()
    carrier.register([MemoryRegion(mine.ctypes.data, mine.nbytes)])
    endpoint = seen.ranks[0].carriers["tcp"]
    def arrays(src, dst):
        return Copies(*(np.array([x], dtype=np.int64) for x in (src, dst, mine.nbytes)))
    link = carrier.connect(endpoint, until)
    address = int(link.regions.starts[0])
    carrier.write(link, arrays(mine.ctypes.data, address)).wait(until)
    got["written"] = mine.nbytes
    carrier.read(link, arrays(address, mine.ctypes.data)).wait(until)
    got["read"] = mine.nbytes
except Exception as error:
    got["why"] = f"{type(error).__name__}: {error}"
print(json.dumps(got))
os._exit(0)
"""


def visit(port: int, uid: int) -> dict[str, object]:
    ran = subprocess.run(
        [sys.executable, "-c", STRANGER, str(port), str(runtime_directory() / "key"), str(uid)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, object] = json.loads(ran.stdout)
    return found


@as_root
def test_another_user_gets_nothing_that_opens_anything() -> None:
    """No secret is configured: the engine is for its own user alone."""
    with producer(Spec("p", "tp=1,block=16", carrier="tcp")) as engine:
        got = visit(engine.port, NOBODY)
        assert "AuthenticationError" in str(got.pop("why"))
        assert got == {"welcome": False, "read": 0, "written": 0, "key": False, "answer": False}
        assert not any(c.get("messages") for c in engine.ask("counters"))


def test_the_same_user_needs_no_secret_and_writes_nothing_ungranted() -> None:
    with producer(Spec("p", "tp=1,block=16", carrier="tcp")) as engine:
        engine.hold(Prompt(1, 100))
        got = visit(engine.port, os.geteuid())
        assert (got["welcome"], got["answer"], got["written"]) == (True, False, 0)
        assert "nothing is written here without a grant" in str(got["why"])


def test_a_key_is_in_no_endpoint_and_no_message() -> None:
    key = Key.of(None)
    with contextlib.closing(LocalCarrier()) as local, contextlib.closing(TcpCarrier()) as tcp:
        for told in (local.endpoint(), tcp.endpoint()):
            assert key.derive("tcp") not in told
            assert (runtime_directory() / "key").read_bytes() not in told
    for encode in (msgspec.msgpack.encode, msgspec.json.encode, pickle.dumps):
        with pytest.raises(TypeError):
            encode(key)
    assert "user key" in repr(key)


def test_the_users_key_is_made_once_and_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", str(tmp_path / "run"))
    found: list[bytes] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait(30)
        found.append(Key.of(None).derive("x"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(found)) == 1
    path = tmp_path / "run" / "key"
    assert [p.name for p in path.parent.iterdir()] == ["key"]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.chmod(0o644)
    with pytest.raises(DescriptionError, match="chmod 600"):
        Key.of(None)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(DescriptionError, match="has 5 bytes, expected 32"):
        Key.of(None)


@as_root
def test_a_directory_that_another_user_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /dev/shm anybody may make one of our name, and put a key of his own there."""
    squatted = tmp_path / "run"
    squatted.mkdir(mode=0o700)
    os.chown(squatted, NOBODY, NOBODY)
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", str(squatted))
    with pytest.raises(KvferryError, match=r"belongs to .*65534"):
        Key.of(None)


# Writes


def test_no_write_without_a_grant() -> None:
    """Not from a peer that has the secret."""
    with owner(Kind("tcp", {"secret": SECRET, "host": "127.0.0.1"})) as peer:
        assert not peer.memory.bytes.any()
        noise = np.full(4096, 66, dtype=np.uint8)
        attacker = TcpCarrier(secret=SECRET, host="127.0.0.1")
        attacker.register([MemoryRegion(noise.ctypes.data, noise.nbytes)])
        with contextlib.closing(attacker):
            link = attacker.connect(peer.endpoint, soon())
            with pytest.raises(TransferError, match="without a grant"):
                written = copies(noise.ctypes.data, peer.address + FIRST[0], noise.nbytes)
                attacker.write(link, written).wait(soon())
        assert not peer.memory.bytes.any()


# Guessing


class Tap:
    """Stands between two peers, and keeps what it hears."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.heard = {"server": b"", "client": b""}
        self._to = port
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(("127.0.0.1", self._to))
        for source, sink, who in ((server, client, "server"), (client, server, "client")):
            threading.Thread(target=self._pass, args=(source, sink, who), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, who: str) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard[who] += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_a_recorded_handshake_is_slow_to_guess() -> None:
    """An attacker who has heard it tries secrets alone, as fast as one try is."""
    secret = SECRET.encode()
    server, client = (TcpCarrier(secret=SECRET, host="127.0.0.1") for _ in range(2))
    with contextlib.closing(server), contextlib.closing(client):
        endpoint = TcpEndpoint.decode(server.endpoint())
        tap = Tap(endpoint.port)
        with contextlib.closing(tap.listener):
            client.connect(
                msgspec.msgpack.encode(msgspec.structs.replace(endpoint, port=tap.port)), soon()
            )
    hello = tap.heard["server"][HEADER.size :][:HELLO_BYTES]
    auth = tap.heard["client"][HEADER.size :][:AUTH_BYTES]
    nonce, who, proof = (
        auth[:NONCE_BYTES],
        auth[NONCE_BYTES:][:INCARNATION_BYTES],
        auth[NONCE_BYTES + INCARNATION_BYTES :],
    )
    said = hello[:NONCE_BYTES] + nonce + hello[NONCE_BYTES:] + who
    assert mac(Key.of(secret).derive("tcp"), b"client", said) == proof  # the attacker has it all
    for guess in (secret, hashlib.sha256(secret).digest()):
        for role in (b"client", b"kvferry tcp 1 client", b"kvferry tcp 2 client"):
            assert hmac.digest(guess, role + said, hashlib.sha256) != proof
    begun = time.perf_counter()
    for number in range(3):
        Key.of(f"another guess, number {number}").derive("tcp")
    assert time.perf_counter() - begun > 3 * 0.005  # the bound is what is promised


# Strangers at the door


def silent(port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]


def test_silent_connections_keep_no_peer_out() -> None:
    limits = ServerLimits(handshake_seconds=60.0)
    server = TcpCarrier(secret=SECRET, host="127.0.0.1", limits=limits)
    memory = np.arange(4096, dtype=np.uint8)
    server.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    client = TcpCarrier(secret=SECRET, host="127.0.0.1")
    into = np.zeros(4096, dtype=np.uint8)
    client.register([MemoryRegion(into.ctypes.data, into.nbytes)])
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(server))
        stack.enter_context(contextlib.closing(client))
        port = TcpEndpoint.decode(server.endpoint()).port
        for one in silent(port, 3 * limits.max_pending):
            stack.enter_context(one)
        link = client.connect(server.endpoint(), soon(30))
        wanted = copies(memory.ctypes.data, into.ctypes.data, 4096)
        client.read(link, wanted).wait(soon(30))
        assert np.array_equal(into, memory)
        assert server.server.counters["busy"] == 0
        assert server.server.counters["evicted"] > limits.max_pending


def test_strangers_of_many_addresses_do_not_have_peers_evicted() -> None:
    """One connection an address, so that a peer with two is the address that has most."""
    limits = ServerLimits(handshake_seconds=60.0)
    server = TcpCarrier(secret=SECRET, host="127.0.0.1", limits=limits)
    client = TcpCarrier(secret=SECRET, host="127.0.0.1")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(server))
        stack.enter_context(contextlib.closing(client))
        endpoint = server.endpoint()
        port = TcpEndpoint.decode(endpoint).port
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", port)))]
        for number in range(limits.max_pending - 2):
            source = (f"127.0.1.{number + 1}", 0)
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10, source))
        peers += [stack.enter_context(socket.create_connection(("127.0.0.1", port)))]
        wait_until(lambda: server.server.counters["connections"] >= limits.max_pending)
        client.connect(endpoint, soon(20))
        peers[0].settimeout(20)
        while peers[0].recv(4096):  # the oldest makes room, whoever that is
            pass
        peers[1].settimeout(0.2)
        assert peers[1].recv(4096)  # it was greeted
        with pytest.raises(TimeoutError):
            peers[1].recv(1)  # and is not sent away
        assert server.server.counters["evicted"] == 1


def test_silent_visitors_keep_no_peer_from_a_liveness_server() -> None:
    server = LivenessServer("127.0.0.1")
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        first, *more = silent(server.port, 2 * MOST_PENDING)
        for one in (first, *more):
            stack.enter_context(one)
        where = "127.0.0.1", server.port
        liveness = Liveness.connect(*where, server.token, server.incarnation, soon(30))
        stack.callback(liveness.close)
        first.settimeout(30)
        assert first.recv(1) == b""  # the oldest was sent away
        liveness.require_alive()


def test_sockets_of_dead_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a process that was killed before its socket got its name. A process that is
    about to name its socket keeps it."""
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", str(tmp_path / "run"))
    where = runtime_directory()
    names = ("vouch-live", "vouch-dead", ".vouch-new", ".vouch-old")
    with contextlib.ExitStack() as stack:
        for name in names:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(where / name))
            if name == "vouch-live":
                one.listen()
        os.utime(where / ".vouch-old", (0, 0))
        vouch._sweep()
        assert {path.name for path in where.iterdir()} == {"vouch-live", ".vouch-new"}


def test_silent_visitors_delay_no_voucher() -> None:
    endpoint = vouch.vouch_for(lambda name: name.encode())
    with contextlib.ExitStack() as stack:
        stack.callback(vouch.forget, [endpoint])
        for _ in range(2 * MOST_PENDING):
            visitor = stack.enter_context(socket.socket(socket.AF_UNIX))
            visitor.settimeout(30)
            visitor.connect(str(runtime_directory() / endpoint.decode()))
        owner = vouch.ask(endpoint.decode(), endpoint, soon(vouch.ASK_SECONDS))
        assert owner == os.getpid()


@contextlib.contextmanager
def full_voucher() -> Iterator[tuple[str, socket.socket, contextlib.ExitStack]]:
    """The name of a voucher's socket with a full queue, the socket, and its visitors."""
    name = f"vouch-{secrets.token_hex(16)}"
    where = runtime_directory() / name
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as visitors:
        listener.bind(str(where))
        visitors.callback(where.unlink)
        listener.listen(0)
        waiting = visitors.enter_context(contextlib.ExitStack())
        with pytest.raises(BlockingIOError):
            while True:
                visitor = waiting.enter_context(socket.socket(socket.AF_UNIX))
                visitor.setblocking(False)
                visitor.connect(str(where))
        yield name, listener, waiting


def test_a_voucher_with_a_full_queue_is_waited_for() -> None:
    """It is not in another container: its memory can be reached a moment later."""
    with full_voucher() as (name, listener, visitors):
        with pytest.raises(DeadlineExceeded, match="does not answer"):
            vouch.ask(name, b"endpoint", soon(0.1))

        def answer() -> None:
            visitors.close()
            asked = b""
            while not asked:
                guest, _ = listener.accept()
                with guest:
                    asked = guest.recv(32)
                    if asked:  # not a visitor that is gone
                        guest.sendall(vouch.YES)

        answering = threading.Timer(0.1, answer)
        answering.start()
        assert vouch.ask(name, b"endpoint", soon(30)) == os.getpid()
        answering.join()


def test_a_voucher_that_is_slow_twice_is_waited_for_once() -> None:
    """There is room in its queue after a while, and then it does not answer."""
    with full_voucher() as (name, listener, visitors):

        def make_room() -> None:
            visitors.close()
            listener.accept()[0].close()

        making = threading.Timer(3.0, make_room)
        making.start()
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="does not answer"):
            vouch.ask(name, b"endpoint", soon(4))
        assert time.monotonic() - begin < 6  # each by itself, it would be seven
        making.join()


def test_a_voucher_that_ends_before_it_answers_is_gone() -> None:
    """The error does not speak of containers."""
    with full_voucher() as (name, listener, visitors):
        visitors.close()
        listener.accept()[0].close()
        ending = threading.Timer(0.3, lambda: listener.accept()[0].close())
        ending.start()
        with pytest.raises(PeerLost, match="is gone"):
            vouch.ask(name, b"endpoint", soon(30))
        ending.join()


class Gated(socket.socket):
    """Listens, and accepts while its gate is open."""

    gate, accepted = threading.Event(), 0

    def accept(self) -> tuple[socket.socket, object]:
        assert self.gate.wait(30)
        accepted = super().accept()
        Gated.accepted += 1
        return accepted


def test_a_visitor_that_speaks_while_it_is_sent_away_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server sees both at once: a newcomer that takes its place, and its words."""
    plain = socket.create_server
    monkeypatch.setattr(
        socket, "create_server", lambda *a, **k: Gated(fileno=plain(*a, **k).detach())
    )
    Gated.accepted = 0
    Gated.gate.set()
    server = LivenessServer("127.0.0.1")
    where = "127.0.0.1", server.port
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        liveness = Liveness.connect(*where, server.token, server.incarnation, soon(30))
        stack.callback(liveness.close)
        visitors = [
            stack.enter_context(socket.create_connection(where)) for _ in range(MOST_PENDING)
        ]
        wait_until(lambda: Gated.accepted == 1 + MOST_PENDING)
        Gated.gate.clear()
        for _ in range(2):  # the first one takes the place of the oldest
            stack.enter_context(socket.create_connection(where))
        visitors[1].sendall(b"words")
        Gated.gate.set()
        visitors[1].settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert visitors[1].recv(1) == b""
        assert liveness.alive(0.2)
        Liveness.connect(*where, server.token, server.incarnation, soon(30)).close()


# --- where a peer sends us -----------------------------------------------------------------------


def test_endpoints_are_dialed_within_what_was_allowed() -> None:
    """A peer that has the secret names a host of its choice."""
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        where = msgspec.msgpack.encode(
            TcpEndpoint("tcp", "localhost", there.getsockname()[1], bytes(INCARNATION_BYTES))
        )
        far = msgspec.msgpack.encode(TcpEndpoint("tcp", "192.0.2.1", 9, bytes(INCARNATION_BYTES)))
        narrow = TcpCarrier(secret=SECRET, host="127.0.0.1", admits=lambda host: host == "p")
        unconfigured = TcpCarrier()
        for carrier, endpoint in ((narrow, where), (unconfigured, far)):
            stack.enter_context(contextlib.closing(carrier))
            with pytest.raises(KvferryError, match=r"`peers`|no secret is configured"):
                carrier.connect(endpoint, soon(5))
        sockets = Sockets(SECRET, lambda host: host == "p")
        caller = Caller(sockets)
        stack.callback(sockets.close)
        stack.callback(caller.close)
        for host in ("127.0.0.1", "localhost"):  # a rank, as a directory names it
            call = caller.call(f"{host}:{there.getsockname()[1]}", Look(VERSION), soon(5))
            with pytest.raises(KvferryError, match="`peers`"):
                call.result(10)
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.accept()


def test_a_peer_of_the_tests_is_what_it_says(victim: Victim) -> None:
    """The way that the attacks above try works for a peer that does not lie."""
    with owner(KINDS["local"]) as peer:
        assert isinstance(peer, Peer)
        peer.memory.bytes[FIRST[0] : FIRST[0] + len(TOKEN)] = np.frombuffer(TOKEN, dtype=np.uint8)
        victim.loads(peer.endpoint, peer.address + FIRST[0])
        assert victim.cache[: len(TOKEN)].tobytes() == TOKEN
