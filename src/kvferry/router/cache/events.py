# SPDX-License-Identifier: Apache-2.0
"""One engine's events, from its publisher into the index.

vLLM publishes what its cache stores and removes (`--kv-events-config`): batches, numbered from 0,
over a PUB socket. A second socket, if the engine has one (`replay_endpoint`), sends the last
batches again, from a requested number on. A silent publisher means an idle engine; probes find out
whether the engine is alive.

The part of the index that the stream feeds is in one of these states:

    estimated   nothing was told yet
    replaying   missed batches are asked for
    live        every batch since the engine's start was applied
    lost        batches are missing. The router forgets what it knew before. Later events are true,
                but incomplete. This ends when the engine is reset or restarts, or has evicted
                what it had stored before

What happens:

    the first batch has number 0         live
    the stream begins later              replay from 0; live if it goes back that far, else lost
    a number is missing                  replay of what is missing; lost if it cannot be had
    the numbers begin again              the engine restarted: forget at once, begin again
    the connection was made again,       the replay is asked for the last batch. If it is the same,
    or the engine is up again            the engine did not restart. Without a replay, the next
                                         number tells; an engine that is known to have restarted
                                         is forgotten at once
    a batch cannot be read               it is missing, and no replay has it
    no answer to a replay                asked again after a while. Lost, if batches are missing or
                                         the engine was started again

A frame that is no batch at all is skipped. Nothing that a publisher sends ends the
stream. Before each batch the stream polls its sockets, so requests have their turn between batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvferry.router.cache.index import CacheIndex, Event

log = logging.getLogger(__name__)

_MOST_MESSAGES = 10_000  # that wait in a socket; the publisher drops more, which is a gap
_MOST_MESSAGE_BYTES = 64 << 20  # a step of 100,000 tokens has about 1 MB
_POLL_SECONDS = 0.5  # between two looks at `_replay_at`
_REPLAY_SECONDS = 60.0  # for all of a replay, of up to 10,000 batches
ANSWER_SECONDS = 2.0  # for its next batch; an idle vLLM answers within 0.1 s
_REPLAY_TRIES = 5  # that do not bring the stream further; a publisher drops most of a long replay
RETRY_SECONDS = 10.0  # after a replay that failed
_SETTLE_SECONDS = 0.2  # until a new connection surely carries everything that is published
_END = b"\xff" * 8  # the number after the last batch of a replay
_HEARTBEAT_SECONDS = 10  # by which a connection to a machine that is gone is noticed
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine publishes."""

    events: str  # tcp://host:port or ipc://path
    replay: str | None = None


class EventStreams:
    """The two streams of one engine: its events, and the replay of those that were missed.

    Everything but `came_up` happens in the task that calls `run`.
    """

    def __init__(self, index: CacheIndex, engine: str, source: EventSource) -> None:
        self._index = index
        self._part = index.part(engine)
        self.source = source
        self._last: int | None = None  # the last batch that was applied; None: any may come next
        self._last_payload = b""
        self._heard = -1  # number of the last batch that the publisher sent by itself
        self._replay_at: float | None = None  # when to ask; None: nothing is missing
        self._unanswered = False  # the last replay
        self._restarted = False  # perhaps: the replay will tell
        self._partial = False  # batches are missing, which a replay may have

    @property
    def applied(self) -> int:
        """Batches that the publisher has sent until the last one that was applied."""
        return 0 if self._last is None else self._last + 1

    async def run(self) -> None:
        """Follow the publisher until cancelled."""
        context = zmq.asyncio.Context()
        try:
            while True:
                try:
                    await self._follow(context)
                except Exception:  # without the stream, the engine's part would never change again
                    log.exception("the events of %s broke the stream", self._part.engine)
                    self._begin_again()
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            context.destroy(linger=0)

    def start(self) -> None:
        self._task = asyncio.create_task(self.run())

    def stop(self) -> asyncio.Task[None]:
        """Returns the task, which ends soon."""
        self._task.cancel()
        return self._task

    @property
    def _replays(self) -> bool:
        """Whether missed batches are to be had, as far as is known."""
        return self.source.replay is not None and not self._unanswered

    def came_up(self, restarted: bool) -> None:
        """The engine was down, perhaps only for the router."""
        if self._replays:
            self._replay_at, self._restarted = 0.0, restarted
        elif restarted:
            self._begin_again()

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.SUB)
        _set_up(socket)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        watch = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(watch, zmq.POLLIN)
        try:
            socket.connect(self.source.events)
            while True:
                if self._replay_at is not None and time.monotonic() >= self._replay_at:
                    await self._catch_up(context)
                ready = dict(await poller.poll(_POLL_SECONDS * 1000))
                if watch in ready:
                    await watch.recv_multipart()
                    if self.source.replay is not None:
                        self._replay_at = time.monotonic() + _SETTLE_SECONDS
                if socket in ready:
                    self._receive(await socket.recv_multipart())
        finally:
            socket.disable_monitor()
            watch.close(linger=0)
            socket.close(linger=0)

    def _receive(self, frames: list[bytes]) -> None:
        """A batch from the publisher itself."""
        if len(frames) != 3 or len(frames[1]) != 8:
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        if number <= self._heard:
            self._begin_again()
        self._heard = number
        if self._last is not None and number <= self._last:
            return  # a replay had it already
        due = self._replay_at is not None or number > self.applied
        if due and number and self._replays:
            self._replay_at = 0.0
            return  # the replay will have this batch too
        if number != self.applied:
            if self._last is not None:
                missing = number - self.applied
                self._part.lost_events += missing
                self._lose(f"{missing} batches are missing")
            self._partial = True
            self._index.incomplete(self._part)
        elif number == 0:
            self._index.whole(self._part)
            self._replay_at, self._unanswered, self._partial = None, False, False
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self._last, self._last_payload = number, payload
        events = decode(payload)
        if events is not None:
            self._index.told(self._part, events)
            return
        self._part.lost_events += 1
        self._lose("a batch cannot be read")

    def _begin_again(self) -> None:
        """Another process publishes, or the same one cannot tell what was missed."""
        log.info("the events of %s begin again", self._part.engine)
        self._index.forget_part(self._part)
        self._last, self._heard, self._restarted = None, -1, False
        if self.source.replay is not None:
            self._replay_at, self._unanswered = 0.0, False

    def _lose(self, why: str) -> None:
        """Events are missing, so nothing of this engine is certain any more."""
        log.warning("events of %s are lost (%s): its cache is forgotten", self._part.engine, why)
        self._index.forget_part(self._part)
        self._index.incomplete(self._part)

    # Replays

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Ask for everything that was missed."""
        part, tries = self._part, _REPLAY_TRIES
        part.replaying = True
        try:
            async with asyncio.timeout(_REPLAY_SECONDS):
                last = self._last
                while not await self._replay(context):
                    tries -= self._last == last
                    if not tries:
                        raise TimeoutError
                    last = self._last
        except (TimeoutError, zmq.ZMQError):
            missing = max(0, self._heard - self.applied + 1)
            if self._last is not None and (missing or self._restarted):
                part.lost_events += missing
                self._lose("the replay does not answer")
                self._last, self._partial = None, True
            self._unanswered = True
            self._replay_at = time.monotonic() + RETRY_SECONDS
        else:
            self._replay_at, self._unanswered = None, False
        finally:
            self._restarted = part.replaying = False

    async def _replay(self, context: zmq.asyncio.Context) -> bool:
        """Apply one answer. Returns False if the replay must be requested again.

        The request includes the last known batch: a publisher whose batch differs is another
        engine, or does not go back that far.
        """
        known = None if self._partial else self._last
        first = True
        try:
            async with aclosing(self._ask(context, known or 0)) as batches:
                async for number, payload in batches:
                    if first and known is not None:
                        if (number, payload) != (known, self._last_payload):
                            self._part.lost_events += max(0, number - known - 1)
                            self._begin_again()
                            return False
                    elif first:
                        self._begin_over(number)
                        self._apply(number, payload)
                    elif number == self.applied:
                        self._apply(number, payload)
                    else:  # the publisher drops what it cannot send at once
                        return False
                    first = False
        except TimeoutError:
            if first:
                raise
            return False  # the rest was dropped, with its end
        if first and known is not None:  # it has not published that much
            self._begin_again()
            return False
        if first:
            self._begin_over(0)
        return True

    def _begin_over(self, number: int) -> None:
        """A replay begins with this batch, in place of all that was told before."""
        self._index.forget_part(self._part)
        self._last, self._partial = None, False
        if number == 0:
            self._index.whole(self._part)
        else:
            self._index.incomplete(self._part)

    async def _ask(
        self, context: zmq.asyncio.Context, start: int
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """Numbers and bytes of the batches from `start` on. Raises TimeoutError."""
        assert self.source.replay is not None
        socket = context.socket(zmq.DEALER)
        _set_up(socket)
        try:
            socket.connect(self.source.replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while await socket.poll(ANSWER_SECONDS * 1000):
                frames = await socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    continue
                if frames[2] == _END:
                    return
                yield int.from_bytes(frames[2], "big"), frames[3]
            raise TimeoutError
        finally:
            socket.close(linger=0)


# The wire


def decode(payload: bytes) -> list[Event] | None:
    """The events of a batch as vLLM encodes it. None: it is not one, or an older vLLM's, whose
    events are arrays.

    Fields and kinds of events that this version does not know are left out.
    """
    try:
        return _EVENTS.decode(payload).events
    except _UNREADABLE:
        pass
    try:
        found = _ANYTHING.decode(payload).events
    except _UNREADABLE:
        return None
    if found and not any(isinstance(one, dict) for one in found):
        return None
    events: list[Event] = []
    for one in found:
        with suppress(*_UNREADABLE):
            events.append(msgspec.convert(one, Event))
    return events


class _EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]


class _AnyBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]


_EVENTS = msgspec.msgpack.Decoder(_EventBatch)
_ANYTHING = msgspec.msgpack.Decoder(_AnyBatch)


def _set_up(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _MOST_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_SECONDS * 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.IPV6, 1)
