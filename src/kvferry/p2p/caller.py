"""Calls to servers of peers: many at once, one thread, every call with a deadline.

A call ends with the peer's reply, or with an error: `DeadlineExceeded`, `PeerLost` where nobody
listens or the connection broke, `AuthenticationError` where the peer does not take our secret. A
connection, a line, is made by the first call to an address and kept. Only what comes on that line
answers a call: a reply to another line's call is dropped and counted.

An address whose host is a name waits for its line until the name is resolved, on a thread of
`wire.names`; calls to others go on. Where a name has several addresses, they are tried in order,
each for a part of the time (`lines`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

import zmq

from kvferry.errors import (
    DeadlineExceeded,
    HandoverError,
    KvferryError,
    PeerLost,
    ProtocolError,
)
from kvferry.p2p.lines import Line
from kvferry.wire.messages import ReplyBody, Request, RequestBody, decode_reply, encode
from kvferry.wire.names import at_port, literal
from kvferry.wire.sockets import Sockets

log = logging.getLogger("kvferry")

IDLE_SECONDS = 1.0
CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class _Call:
    future: Future[ReplyBody]
    address: str
    deadline: float
    what: str


@dataclass(slots=True)
class _Unresolved:
    """An address whose name is being looked up, and the calls that wait for it."""

    answer: Future[tuple[str, ...]]
    frames: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Inbox:
    """Work for the caller's thread, and the socket that wakes it."""

    queue: queue.SimpleQueue[tuple[RequestBody, _Call]] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Caller:
    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._inbox = _Inbox()
        address = f"inproc://kvferry-caller-{id(self)}"
        self._woken = sockets.context.socket(zmq.PULL)
        self._woken.bind(address)
        self._waker = sockets.context.socket(zmq.PUSH)
        self._waker.connect(address)
        self.counters: Counter[str] = Counter()
        self._lines: dict[str, Line] = {}
        self._unresolved: dict[str, _Unresolved] = {}
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-caller", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many already
            self._woken.close(linger=0)
            self._waker.close(linger=0)
            raise

    def call(self, address: str, body: RequestBody, deadline: float) -> Future[ReplyBody]:
        """Send a request to `host:port`; the future ends by the deadline in every case."""
        future: Future[ReplyBody] = Future()
        call = _Call(future, address, deadline, type(body).__name__.lower())
        with self._inbox.lock:
            if self._stop.is_set():
                future.set_exception(PeerLost("kvferry is shutting down"))
                return future
            self._inbox.queue.put((body, call))
            self._wake()
        return future

    def close(self) -> None:
        with self._inbox.lock:
            if self._stop.is_set():
                return
            self._stop.set()
            self._wake()
        self._thread.join(CLOSE_SECONDS)
        self._waker.close(linger=0)

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # it has many wakes before it already
            self._waker.send(b"", zmq.NOBLOCK)

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                ready = dict(poller.poll(self._patience_ms()))
                while self._woken.poll(0):
                    self._woken.recv()
                self._guarded(lambda: self._send_all(poller))
                for address, line in list(self._lines.items()):
                    if line.socket in ready:
                        self._guarded(lambda line=line: self._receive(line))
                    if line.monitor in ready:
                        self._guarded(lambda a=address, x=line: self._watch(a, x, poller))
                self._expire(poller)
                self._guarded(lambda: self._move_on(poller))
        except zmq.ContextTerminated:
            pass
        finally:
            self._end_calls(None, PeerLost("kvferry is shutting down"))
            for line in self._lines.values():
                line.close()
            self._woken.close(linger=0)

    def _guarded(self, action: object) -> None:
        try:
            action()  # type: ignore[operator]
        except zmq.ContextTerminated:
            raise
        except Exception:
            log.exception("kvferry's caller goes on after an error")

    def _patience_ms(self) -> int:
        now = time.monotonic()
        due = min((call.deadline for call in self._calls.values()), default=now + IDLE_SECONDS)
        moves_on = min((line.connect_by for line in self._lines.values()), default=due)
        seconds = min(IDLE_SECONDS, due - now, moves_on - now)
        return max(0, int(seconds * 1000) + 1)

    def _send_all(self, poller: zmq.Poller) -> None:
        for address in [a for a, waiting in self._unresolved.items() if waiting.answer.done()]:
            self._resolved(address, self._unresolved.pop(address), poller)
        while not self._inbox.queue.empty():
            body, call = self._inbox.queue.get()
            number = next(self._ids)
            self._calls[number] = call
            try:
                self._send(number, encode(Request(number, body)), call, poller)
            except Exception as error:
                self._not_sent(number, error)

    def _send(self, number: int, frame: bytes, call: _Call, poller: zmq.Poller) -> None:
        line = self._lines.get(call.address)
        if line is None:
            self._sockets.require_trusted(call.address)
            host, _, port = call.address.rpartition(":")
            address = literal(host)
            if address is None:
                self._resolve(host, call).frames[number] = frame
                return
            line = self._connect(call.address, [at_port(address, port)], poller)
        line.send(number, frame, call.deadline)

    def _resolve(self, host: str, call: _Call) -> _Unresolved:
        """Have a host's name looked up, or let one more call wait for that."""
        waiting = self._unresolved.get(call.address)
        if waiting is None or not waiting.answer.done():
            answer = self._sockets.names.ask(host, call.deadline)  # asked already: wanted longer
            if waiting is None:
                waiting = self._unresolved[call.address] = _Unresolved(answer)
                answer.add_done_callback(lambda _: self._look_again())
        return waiting

    def _look_again(self) -> None:
        """A name was resolved; called by the thread that did so."""
        with self._inbox.lock:
            if not self._stop.is_set():
                self._wake()

    def _resolved(self, address: str, waiting: _Unresolved, poller: zmq.Poller) -> None:
        error = waiting.answer.exception()
        if error is not None:
            self._end_calls(address, error)
            return
        port = address.rpartition(":")[2]
        found = [at_port(one, port) for one in waiting.answer.result()]
        self._open(address, found, waiting.frames, poller)

    def _open(
        self, address: str, found: list[str], frames: dict[int, bytes], poller: zmq.Poller
    ) -> None:
        """Make a line, and send what waited for it; some of those calls may be over by now."""
        wanted = {number: frame for number, frame in frames.items() if number in self._calls}
        try:
            self._connect(address, found, poller)
            for number, frame in wanted.items():
                self._send(number, frame, self._calls[number], poller)
        except Exception as error:
            for number in wanted:
                self._not_sent(number, error)

    def _not_sent(self, number: int, error: Exception) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return  # it ended meanwhile
        if isinstance(error, KvferryError):
            call.future.set_exception(error)
        elif isinstance(error, (zmq.ZMQError, OSError, ValueError)):  # no address, a full queue
            call.future.set_exception(PeerLost(f"{call.address} cannot be reached: {error}"))
        else:  # ours, not the peer's; whoever waits is told at once
            log.error("a %s could not be sent", call.what, exc_info=error)
            call.future.set_exception(HandoverError(f"internal error: {error!r}"))

    def _connect(self, address: str, found: list[str], poller: zmq.Poller) -> Line:
        line = self._lines[address] = Line.open(self._sockets, address, found)
        poller.register(line.socket, zmq.POLLIN)
        poller.register(line.monitor, zmq.POLLIN)
        return line

    def _receive(self, line: Line) -> None:
        while line.socket.poll(0):
            frame = b"".join(line.socket.recv_multipart())  # several frames are no reply of ours
            try:
                reply = decode_reply(frame)
            except ProtocolError as error:
                log.warning("a peer sent %.300r", str(error))
                continue
            call = self._calls.get(reply.id)
            if call is None:
                self.counters["late replies"] += 1
            elif call.address != line.address:  # it answers for somebody else
                if not self.counters["misdirected replies"]:
                    log.warning(
                        "%s answers a call to %s; this and others of the kind are dropped",
                        line.address,
                        call.address,
                    )
                self.counters["misdirected replies"] += 1
            else:
                del self._calls[reply.id]
                call.future.set_result(reply.body)

    def _watch(self, address: str, line: Line, poller: zmq.Poller) -> None:
        """End the calls of a connection that broke; the next call makes a new one."""
        error = line.hear()
        if isinstance(error, PeerLost) and not line.greeted and line.others:
            self._try_next(address, line, poller)
        elif error is not None:
            self._hang_up(address, poller)
            self._end_calls(address, error)

    def _move_on(self, poller: zmq.Poller) -> None:
        """Leave addresses that were not reached in their time."""
        now = time.monotonic()
        for address, line in list(self._lines.items()):
            if line.not_reached(now):
                self._try_next(address, line, poller)

    def _try_next(self, address: str, line: Line, poller: zmq.Poller) -> None:
        self._hang_up(address, poller)
        self._open(address, line.others, line.unsaid, poller)

    def _hang_up(self, address: str, poller: zmq.Poller) -> None:
        line = self._lines.pop(address)
        poller.unregister(line.socket)
        poller.unregister(line.monitor)
        line.close()

    def _end_calls(self, address: str | None, error: BaseException) -> None:
        for number, call in list(self._calls.items()):
            if address is None or call.address == address:
                del self._calls[number]
                call.future.set_exception(error)
        while address is None and not self._inbox.queue.empty():
            self._inbox.queue.get()[1].future.set_exception(error)

    def _expire(self, poller: zmq.Poller) -> None:
        now = time.monotonic()
        late = set()
        for number, call in list(self._calls.items()):
            if call.deadline <= now:
                del self._calls[number]
                late.add(call.address)
                if call.address in self._unresolved:
                    why = f"the name of {call.address} was not resolved in time for a {call.what}"
                else:
                    why = f"{call.address} did not answer a {call.what} in time"
                call.future.set_exception(DeadlineExceeded(why))
        # a line on which nobody ever spoke, and nobody waits, is not worth its descriptors
        for address in late - {call.address for call in self._calls.values()} if late else ():
            self._unresolved.pop(address, None)
            if address in self._lines and not self._lines[address].greeted:
                self._hang_up(address, poller)
