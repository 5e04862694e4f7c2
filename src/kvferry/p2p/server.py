"""A thread that answers messages, and never dies of one.

Subclasses answer a request with a reply, or with None and answer later. Work of other threads is
handed in through `submit`, so that all state belongs to this one thread and needs no locks.

A peer that sends and does not read has few of its requests read ahead, and long replies that wait
for it share one copy (`pack`). A line of the log that a peer can cause is written once in a while.
Connections on which nobody has proved the secret and asked are few: see `Door`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvferry.errors import KvferryError, ProtocolError
from kvferry.p2p.door import Door, most_waiting
from kvferry.wire.messages import (
    Refused,
    Reply,
    ReplyBody,
    Request,
    decode_request,
    encode,
    read_id,
    refusal,
)
from kvferry.wire.sockets import Sockets

log = logging.getLogger("kvferry")

IDLE_SECONDS = 1.0  # at most between two looks at deadlines
MOST_FRAMES = 256  # answered before deadlines are looked at again
CLOSE_SECONDS = 5.0
SHARED_BYTES = 16 << 10  # of a reply's body; a shorter one is copied quicker than sent apart
COMPLAIN_SECONDS = 60.0  # between two lines of the log about one thing
MOST_COMPLAINTS = 20  # lines in that time, about all things

Packed = zmq.Frame  # a reply's body; sent to many, it is in memory once


def pack(body: ReplyBody) -> Packed:
    return zmq.Frame(msgspec.msgpack.encode(body), copy=True)


class Server:
    """One ROUTER socket and the thread that owns it."""

    def __init__(self, sockets: Sockets, host: str | None, port: int, name: str) -> None:
        self.counters: Counter[str] = Counter()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._socket, self.port = sockets.server(host, port)
        context = sockets.context
        self._door = Door(self._socket, self.port)
        self._complained: dict[str, float] = {}
        self._wake_address = f"inproc://{name}-{id(self)}"
        self._woken = context.socket(zmq.PULL)
        self._woken.bind(self._wake_address)
        self._waker = context.socket(zmq.PUSH)
        self._waker.connect(self._wake_address)
        self._wake_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Have the server's thread do something soon."""
        self._work.put(work)
        with self._wake_lock:
            if not self._stop.is_set():
                self._wake()

    def close(self) -> None:
        with self._wake_lock:
            if self._stop.is_set():
                return
            self._stop.set()
            self._wake()
        if self._thread.ident is None:  # it was never started
            self._close_sockets()
        else:
            self._thread.join(CLOSE_SECONDS)
        self._waker.close(linger=0)

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # it has many wakes before it already
            self._waker.send(b"", zmq.NOBLOCK)

    # What a server does

    def answer(self, sender: bytes, request: Request) -> ReplyBody | Packed | None:
        """The reply, or None to reply later."""
        raise ProtocolError("this server answers nothing")

    def tick(self, now: float) -> None:
        """Look at deadlines."""

    def next_deadline(self) -> float | None:
        return None

    def reply(self, sender: bytes, request_id: int, body: ReplyBody | Packed) -> None:
        """Send a reply; a peer that is gone is not worth waiting for."""
        if not isinstance(body, zmq.Frame):
            self._send([sender, encode(Reply(request_id, body))])
            return
        head = b"\x92" + msgspec.msgpack.encode(request_id)  # an array of two: id, body
        if len(body) < SHARED_BYTES:
            self._send([sender, head + body.bytes])
        else:  # two frames that are one message of MessagePack
            self._send([sender, head, body])

    def complain(self, what: str, message: str, *values: object) -> None:
        """Log a warning that a peer can cause; any thread.

        At most one a minute about `what`, and at most `MOST_COMPLAINTS` about all.
        """
        now = time.monotonic()
        recent = {k: when for k, when in self._complained.items() if now < when + COMPLAIN_SECONDS}
        if what in recent or len(recent) >= MOST_COMPLAINTS:
            self.counters["complaints not logged"] += 1
            return
        self._complained = {**recent, what: now}
        error = next((v for v in values if isinstance(v, Exception)), None)
        log.warning(message, *values, exc_info=error)

    def _send(self, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.counters["unsent"] += 1
            log.debug("a reply could not be sent: %s", error)

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._door.events, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                ready = dict(poller.poll(self._patience_ms()))
                if self._woken in ready:
                    self._drain_wakes()
                if self._door.events in ready:
                    self._guarded(self._watch_door)
                self._guarded(self._watch_unread)
                self._guarded(self._do_work)
                if self._socket in ready:
                    self._guarded(self._take_frames)
                self._guarded(lambda: self.tick(time.monotonic()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._door.close()
        self._socket.close(linger=0)
        self._woken.close(linger=0)

    def _watch_unread(self) -> None:
        shut = self._door.look_at_unread()
        if shut:
            self.counters["flooding connections closed"] += shut
            text = "%s closes connections whose requests never end; is a peer faulty?"
            self.complain("flood", text, self._thread.name)

    def _watch_door(self) -> None:
        turned_away = self._door.look()
        if self._door.strangers > self.counters["strangers"]:
            self.counters["strangers"] = self._door.strangers
            self.complain(
                "strangers",
                "%s turned somebody away who does not have our key: an engine with another secret "
                "or of another user, or one of vLLM's own connectors? Run kvferry's connector with "
                "the same secret on both sides",
                self._thread.name,
            )
        if turned_away:
            self.counters["silent connections closed"] += turned_away
            self.complain(
                "door",
                "%s closes connections on which nobody says anything, because there are more than "
                "%d: does something scan its port, or use another secret?",
                self._thread.name,
                most_waiting(),
            )

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except zmq.ContextTerminated:
            raise
        except Exception as error:
            self.counters["internal errors"] += 1
            text = "kvferry's %s goes on after an error: %.200r"
            self.complain("error", text, self._thread.name, error)

    def _patience_ms(self) -> int:
        due = self.next_deadline()
        seconds = IDLE_SECONDS if due is None else min(IDLE_SECONDS, due - time.monotonic())
        return max(0, int(seconds * 1000) + 1)  # not before the deadline

    def _drain_wakes(self) -> None:
        while self._woken.poll(0):
            self._woken.recv()

    def _do_work(self) -> None:
        while not self._work.empty():
            self._guarded(self._work.get())

    def _take_frames(self) -> None:
        for _ in range(MOST_FRAMES):
            if not self._socket.poll(0):
                return
            frames = self._door.receive()
            self._guarded(lambda frames=frames: self._take(frames))  # type: ignore[misc]

    def _take(self, frames: list[bytes]) -> None:
        self.counters["messages"] += 1
        if len(frames) != 2:
            self.counters["malformed"] += 1
            return
        sender, frame = frames
        try:
            request = decode_request(frame)
        except ProtocolError as error:
            self.counters["malformed"] += 1
            self.reply(sender, read_id(frame) or 0, refusal("malformed", error))
            return
        try:
            body = self.answer(sender, request)
        except KvferryError as error:
            body = refusal("malformed", error)
        except Exception as error:
            self.counters["internal errors"] += 1
            text = "kvferry's %s could not answer: %.200r"
            self.complain("answer", text, self._thread.name, error)
            body = refusal("malformed", f"this message could not be answered: {error!r}")
        if body is not None:
            if isinstance(body, Refused):
                self.counters[f"refused {body.reason}"] += 1
            self.reply(sender, request.id, body)
