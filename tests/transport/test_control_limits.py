"""A peer that knows the secret, and strangers that do not: neither fills memory, time, logs or
descriptors of a directory or a rank. Real sockets; memory is that of a process of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from handover_peers import LOOPBACK, PATIENCE_SECONDS, Child, Prompt, Spec, producer
from kvferry.handover.producer import Directory
from kvferry.net import server
from kvferry.net.messages import VERSION, decode_reply
from kvferry.net.rpc import Sockets
from kvferry.net.server import ConnectionLimit
from waiting import wait_until

SECRET = "0123456789abcdef0123456789abcdef"
MIB = 1 << 20
FRAMES = 49  # of a MiB each
MOST_GROWTH_BYTES = 160 * MIB  # the frames, what is read ahead, what the allocator keeps
ANSWER_SECONDS = 8.0  # for a good peer, on a machine that is busy; without limits it waits longer
STRANGERS = 1000
ARRIVE_SECONDS = 8.0  # for all of them, where the server accepts them
DESCRIPTORS = 600
READER = {"engine_id": "d", "incarnation": "x", "pp_rank": 0, "tp_rank": 0}


class Peer:
    """A connection to one server, with the secret."""

    def __init__(self, port: int) -> None:
        self.sockets = Sockets(SECRET)
        self.dealer = self.sockets.client(f"{LOOPBACK}:{port}")
        self.dealer.connect(f"tcp://{LOOPBACK}:{port}")
        self.sent = 0
        self.replies: Counter[str] = Counter()

    def send(self, body: dict[str, Any]) -> None:
        self.sent += 1
        self.dealer.send(msgspec.msgpack.encode([self.sent, body]))

    def drain(self) -> None:
        while self.dealer.poll(0):
            body: Any = decode_reply(b"".join(self.dealer.recv_multipart())).body
            self.replies[getattr(body, "reason", type(body).__name__)] += 1

    def ask(self, body: dict[str, Any], seconds: float = PATIENCE_SECONDS) -> Any:
        self.send(body)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.dealer.poll(100):
                reply = decode_reply(b"".join(self.dealer.recv_multipart()))
                if reply.id == self.sent:
                    return reply.body
        raise AssertionError(f"no answer to a {body['type']} in {seconds} s")

    def close(self) -> None:
        self.sockets.close()


@contextlib.contextmanager
def peers(*ports: int) -> Iterator[list[Peer]]:
    made = [Peer(port) for port in ports]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def rank_port(child: Child) -> int:
    return int(child.infos[0].address.rpartition(":")[2])


def about(child: Child, kind: str, hold_id: str) -> dict[str, Any]:
    return {
        "type": kind,
        "version": VERSION,
        "incarnation": child.infos[0].incarnation,
        "hold_id": hold_id,
        "digest": "d",
        "reader": READER,
        "readers": 1,
        "patience_seconds": 600.0,
    }


def plain(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("filling", [[], [70_000]], ids=["no blocks", "blocks"])
def test_offers_that_wait_take_no_more_memory_than_their_frames(filling: list[int]) -> None:
    with producer(Spec("p", secret=SECRET)) as child, peers(*[rank_port(child)] * 2) as (bad, good):
        count = (MIB - 1000) // len(msgspec.msgpack.encode(filling))
        offer = about(child, "offer", "")
        offer |= {"carrier": "tcp", "grant": b"g", "tokens": 1, "skip": 0, "keep_open": False}
        offer |= {"tables": [filling] * count}
        before = child.ask("resident_bytes")
        for number in range(FRAMES):
            bad.send({**offer, "hold_id": f"h{number}"})
        wait_until(
            lambda: child.ask("counters")[0].get("messages", 0) >= FRAMES,
            what="offers were not taken",
        )
        assert child.ask("resident_bytes") - before < MOST_GROWTH_BYTES
        child.ask("open", Prompt(1, 50), "good")
        claim = about(child, "claim", "good") | {"digest": child.ticket(Prompt(1, 50)).digest}
        assert type(good.ask(claim)).__name__ == "Claimed"


@pytest.mark.parametrize(("where", "frames"), [("shape", FRAMES), ("regions", 200)])
def test_introductions_take_no_more_memory_than_their_frames(where: str, frames: int) -> None:
    with producer(Spec("p", secret=SECRET)) as child, peers(rank_port(child)) as (bad,):
        engine, info = plain(child.ask("welcome").engine), plain(child.infos[0])
        if where == "shape":
            engine["shape"]["x"] = [[]] * (MIB - 8000)
        else:
            info["regions"] = [{"name": "", "address": 1 << 40, "bytes": 1 << 40}] * 16_000
        before = child.ask("resident_bytes")
        for number in range(frames):
            bad.send(
                {
                    "type": "introduce",
                    "version": VERSION,
                    "incarnation": info["incarnation"],
                    "engine": engine | {"engine_id": f"e{number}"},
                    "rank": info,
                }
            )
        wait_until(
            lambda: child.ask("counters")[0].get("messages", 0) >= frames,
            what="they were not taken",
        )
        assert child.ask("resident_bytes") - before < MOST_GROWTH_BYTES


def test_welcomes_that_nobody_reads_are_in_memory_once() -> None:
    with producer(Spec("p", secret=SECRET)) as child, peers(child.port) as (bad,):
        info = msgspec.structs.replace(child.infos[0], carriers={"tcp": bytes(200_000)})
        child.ask("tell", [info] * 40)
        engine = plain(child.ask("welcome").engine)
        before = child.ask("resident_bytes")
        for _ in range(200):
            bad.send({"type": "hello", "version": VERSION, "engine": engine})
        wait_until(
            lambda: child.ask("counters")[-1].get("messages", 0) >= 200,
            what="hellos were not taken",
        )
        assert child.ask("resident_bytes") - before < MOST_GROWTH_BYTES


class Strangers:
    """Connections that say nothing: so many, and then new ones for the oldest, all the time."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self._open: deque[socket.socket] = deque()
        self._stop, self.all_there = threading.Event(), threading.Event()
        self.come_anew = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.come_anew.set()
        self._thread.join()
        for one in self._open:
            one.close()

    def connected(self) -> int:
        """How many were ever accepted, or wait in the system's queue for that."""
        poll = select.poll()
        for one in list(self._open):
            poll.register(one, select.POLLOUT)
        return len(poll.poll(0))

    def _run(self) -> None:
        while not self._stop.wait(0.001 if self.all_there.is_set() else 0):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex((LOOPBACK, self._port))
            self._open.append(one)
            if len(self._open) > self._count:
                self.all_there.set()
                self.come_anew.wait()
                self._open.popleft().close()


def test_strangers_do_not_use_up_the_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * STRANGERS + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{STRANGERS} connections need {wanted} descriptors, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        with producer(Spec("p", secret=SECRET)) as child:
            child.ask("limit_descriptors", DESCRIPTORS)
            engine = plain(child.ask("welcome").engine)
            hello = {"type": "hello", "version": VERSION, "engine": engine}
            with peers(child.port) as (old,):
                assert type(old.ask(hello)).__name__ == "Welcome"
                with Strangers(child.port, STRANGERS) as strangers:
                    assert strangers.all_there.wait(PATIENCE_SECONDS)
                    arrived = time.monotonic() + ARRIVE_SECONDS
                    while strangers.connected() < STRANGERS and time.monotonic() < arrived:
                        time.sleep(0.05)
                    with peers(child.port) as (good,):
                        assert type(good.ask(hello, ANSWER_SECONDS)).__name__ == "Welcome"
                    strangers.come_anew.set()
                    with peers(child.port) as (good,):
                        assert type(good.ask(hello, ANSWER_SECONDS)).__name__ == "Welcome"
                    assert child.ask("census")["descriptors"] < DESCRIPTORS * 3 // 4
                assert type(old.ask(hello)).__name__ == "Welcome"  # it was let in before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_message_that_never_ends_is_cut_off() -> None:
    """libzmq keeps all frames of a message until its last one, and has no limit for that."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port(f"tcp://{LOOPBACK}")
    good = context.socket(zmq.DEALER)
    good.connect(f"tcp://{LOOPBACK}:{port}")
    door = ConnectionLimit(router, port)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    frame = b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB)  # long, and more to come
    try:
        with socket.create_connection((LOOPBACK, port), PATIENCE_SECONDS) as bad:
            bad.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
            sent = 0
            with pytest.raises(OSError):
                for sent in range(1000):  # noqa: B007
                    bad.sendall(frame)
                    good.send(b"a question")
                    door.look()
                    door.look_at_unread()
                    assert door.receive()[1:] == [b"a question"]
            assert 60 < sent < 900
    finally:
        door.close()
        context.destroy(linger=0)


def test_the_heartbeats_of_an_idle_peer_are_not_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq answers them by itself. In days, those of all idle peers would be a flood."""
    interval_ms, most, acked_at = 10, 2048, 120  # offset of tcpi_bytes_acked in Linux's tcp_info
    monkeypatch.setattr(server, "HEARTBEAT_MS", interval_ms)
    monkeypatch.setattr(server, "UNREAD_BYTES", most)
    sockets = Sockets(SECRET)
    directory = Directory(sockets, host=LOOPBACK)
    directory.start()
    idle = sockets.client(f"{LOOPBACK}:{directory.port}")
    idle.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    look = msgspec.msgpack.encode([1, {"type": "look", "version": VERSION}])

    def asked() -> zmq.Frame:
        idle.send(look)
        assert idle.poll(1000 * PATIENCE_SECONDS)
        return idle.recv(copy=False)

    def closed() -> int:
        return directory.counters["flooding connections closed"]

    try:
        idle.connect(f"tcp://{LOOPBACK}:{directory.port}")
        with socket.socket(fileno=os.dup(int(asked().get(zmq.SRCFD)))) as connection:

            def acked() -> int:
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, acked_at + 8)
                return int.from_bytes(told[acked_at:], "little")

            wait_until(lambda: acked() > 4 * most or closed())
        assert not closed()
        asked()
    finally:
        idle.close(linger=0)
        directory.close()
        sockets.close()
