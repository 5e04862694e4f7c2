"""A thread that answers messages, and never dies of one.

Subclasses answer a request with a reply, or with None and answer later. Work of other threads is
handed in through `submit`, so that all state belongs to this one thread and needs no locks.
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

import zmq

from kvferry.errors import KvferryError, ProtocolError
from kvferry.p2p.strangers import answer_stranger
from kvferry.wire.messages import (
    Refused,
    Reply,
    ReplyBody,
    Request,
    decode_request,
    encode,
    read_id,
)
from kvferry.wire.sockets import Sockets

log = logging.getLogger("kvferry")

IDLE_SECONDS = 1.0  # at most between two looks at deadlines
MOST_FRAMES = 256  # answered before deadlines are looked at again
CLOSE_SECONDS = 5.0


class Server:
    """One ROUTER socket and the thread that owns it."""

    def __init__(self, sockets: Sockets, host: str | None, port: int, name: str) -> None:
        self.counters: Counter[str] = Counter()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._socket, self.port = sockets.server(host, port)
        context = sockets.context
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
            self._socket.close(linger=0)
            self._woken.close(linger=0)
        else:
            self._thread.join(CLOSE_SECONDS)
        self._waker.close(linger=0)

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # it has many wakes before it already
            self._waker.send(b"", zmq.NOBLOCK)

    # What a server does

    def answer(self, sender: bytes, request: Request) -> ReplyBody | None:
        """The reply, or None to reply later."""
        raise ProtocolError("this server answers nothing")

    def tick(self, now: float) -> None:
        """Look at deadlines."""

    def next_deadline(self) -> float | None:
        return None

    def reply(self, sender: bytes, request_id: int, body: ReplyBody) -> None:
        """Send a reply; a peer that is gone is not worth waiting for."""
        self._send([sender, encode(Reply(request_id, body))])

    def _send(self, frames: list[bytes]) -> None:
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
        try:
            while not self._stop.is_set():
                ready = dict(poller.poll(self._patience_ms()))
                if self._woken in ready:
                    self._drain_wakes()
                self._guarded(self._do_work)
                if self._socket in ready:
                    self._guarded(self._take_frames)
                self._guarded(lambda: self.tick(time.monotonic()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(linger=0)
            self._woken.close(linger=0)

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except zmq.ContextTerminated:
            raise
        except Exception:
            self.counters["internal errors"] += 1
            log.exception("kvferry's %s goes on after an error", self._thread.name)

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
            frames = self._socket.recv_multipart()
            self._guarded(lambda frames=frames: self._take(frames))  # type: ignore[misc]

    def _turn_away(self, sender: bytes, refusal: list[bytes] | None) -> None:
        """A message that is not kvferry's."""
        if not self.counters["strangers"]:
            log.warning(
                "%s was asked by a peer that does not speak kvferry's protocol: is it one of "
                "vLLM's own connectors? It is refused; run kvferry's connector on both sides",
                self._thread.name,
            )
        self.counters["strangers"] += 1
        if refusal is not None:
            self._send([sender, *refusal])

    def _take(self, frames: list[bytes]) -> None:
        self.counters["messages"] += 1
        refusal = answer_stranger(frames[1:])
        if refusal is not None or len(frames) != 2:
            self._turn_away(frames[0], refusal)
            return
        sender, frame = frames
        try:
            request = decode_request(frame)
        except ProtocolError as error:
            self.counters["malformed"] += 1
            self.reply(sender, read_id(frame) or 0, Refused("malformed", str(error)))
            return
        try:
            body = self.answer(sender, request)
        except KvferryError as error:
            body = Refused("malformed", str(error))
        except Exception as error:
            self.counters["internal errors"] += 1
            log.exception("kvferry's %s could not answer", self._thread.name)
            body = Refused("malformed", f"this message could not be answered: {error!r}")
        if body is not None:
            if isinstance(body, Refused):
                self.counters[f"refused {body.reason}"] += 1
            self.reply(sender, request.id, body)
