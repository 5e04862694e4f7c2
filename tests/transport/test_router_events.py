"""Events over real sockets: gaps, replays, restarts, resets, and what no engine would send."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

import kvferry.router.cache.events as events_module
from kvferry.router.cache.events import EventSource, EventStreams, decode
from kvferry.router.cache.index import CacheIndex, Cleared, Namespace, PromptChain, Removed, Stored
from kvferry.router.cache.index import Publisher as Known
from waiting import PATIENCE_SECONDS

BLOCK = 4


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(events_module, "RETRY_SECONDS", 0.05)


URL = "http://engine:8000"


class Publisher:
    """vLLM's publisher, as far as a subscriber sees it, with faults that a test asks for."""

    def __init__(self, ports: tuple[int, int] = (0, 0), remembers: int = 10_000) -> None:
        self._context = zmq.asyncio.Context()
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        try:
            self.ports = (self._bind(self._pub, ports[0]), self._bind(self._router, ports[1]))
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.remembers = remembers
        self.number = 0  # of the next batch
        self.asked: list[int] = []
        self.drop_in_replays: set[int] = set()  # once
        self.most_in_replays = 100_000  # messages of one replay; the rest is dropped, with its end
        self.silent = False
        self._sent: list[tuple[int, bytes]] = []
        self._task = asyncio.create_task(self._answer())

    def _bind(self, socket: zmq.asyncio.Socket, port: int) -> int:
        socket.setsockopt(zmq.LINGER, 0)
        if port == 0:
            return socket.bind_to_random_port("tcp://127.0.0.1")
        socket.bind(f"tcp://127.0.0.1:{port}")
        return port

    @property
    def source(self) -> EventSource:
        events, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return EventSource(events, replay)

    async def publish(self, *events: Any, lose: bool = False) -> None:
        await self.publish_bytes(msgspec.msgpack.encode([1.5, list(events), 0]), lose=lose)

    async def publish_bytes(self, payload: bytes, *, lose: bool = False) -> None:
        number = self.number
        self.number += 1
        self._sent.append((number, payload))
        del self._sent[: -self.remembers]
        if not lose:
            await self.send(b"", number.to_bytes(8, "big"), payload)

    async def subscribed(self) -> None:
        """Wait for a subscriber: batches that are published from now on reach it."""
        while await self._pub.recv() != b"\x01":
            pass

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def reconnect(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        """Its connections break, and are made again."""
        self._pub.close(linger=0)
        if meanwhile is not None:
            await meanwhile()
        self._pub = self._context.socket(zmq.XPUB)
        while True:  # the old socket leaves the port a moment later
            try:
                self._bind(self._pub, self.ports[0])
                return
            except zmq.ZMQError:
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.silent:
                continue
            told = []
            for number, payload in list(self._sent):
                if number in self.drop_in_replays:
                    self.drop_in_replays.remove(number)
                elif number >= self.asked[-1]:
                    told.append([client, b"", b"", number.to_bytes(8, "big"), payload])
            told.append([client, b"", b"", b"\xff" * 8, b""])
            for message in told[: self.most_in_replays]:
                await self._router.send_multipart(message)


class World:
    """An index with one stream, before one publisher at a time."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.publisher = Publisher()
        self.stream: EventStreams
        self._task: asyncio.Task[None] | None = None

    def follow(self, *, replay: bool = True) -> None:
        source = self.publisher.source
        self.stream = EventStreams(
            self.index, URL, source if replay else EventSource(source.events)
        )
        self._task = asyncio.create_task(self.stream.run())

    async def restart(self, **options: Any) -> None:
        """The engine's process is another one; its ports are the same."""
        ports = self.publisher.ports
        await self.publisher.close()
        self.publisher = Publisher(ports, **options)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.publisher.close()

    @property
    def stats(self) -> Known:
        return self.index.part(URL)

    def held(self, seed: int) -> int:
        chain = PromptChain(Namespace(), [*tokens_of(seed), 1])
        return max((h.tokens for h in self.index.holdings(chain)), default=0)

    async def until(self, condition: Callable[[], object]) -> None:
        """The condition holds, and no replay is under way."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while self.stats.state == "replaying" or not condition():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"it did not happen; {self.stats}") from None

    async def connected(self) -> None:
        """Batches that are published from now on arrive."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.publisher.subscribed()


def in_a_world(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def inside() -> None:
            async with world() as made:
                await test(made)

        asyncio.run(inside())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    try:
        yield made
    finally:
        await made.close()


def tokens_of(seed: int, blocks: int = 3) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(blocks * BLOCK)]


def stored(seed: int, blocks: int = 3) -> Stored:
    hashes = [seed * 100 + n for n in range(blocks)]
    return Stored(hashes, None, tokens_of(seed, blocks), BLOCK, medium="GPU", group_idx=0)


def removed(seed: int, block: int) -> Removed:
    return Removed([seed * 100 + block], "GPU", 0)


@in_a_world
async def test_a_stream_from_the_first_batch_on(w: World) -> None:
    w.follow()
    await w.until(lambda: w.stats.state == "live")
    await w.connected()
    await w.publisher.publish(stored(1))
    await w.publisher.publish(stored(2), removed(1, 1))
    await w.until(lambda: w.held(2) == 12)
    assert (w.held(1), w.stats.state, w.stats.lost_events) == (4, "live", 0)
    await w.publisher.publish(Cleared())
    await w.until(lambda: w.held(2) == 0)
    assert (w.stats.known, w.stats.state) == (0, "live")


@in_a_world
async def test_a_router_that_comes_later_learns_everything(w: World) -> None:
    for seed in range(50):
        await w.publisher.publish(stored(seed))
    w.follow()
    await w.until(lambda: w.stats.state == "live")
    assert all(w.held(seed) == 12 for seed in range(50))
    assert w.stream.applied == 50


@in_a_world
async def test_a_router_that_comes_too_late_knows_what_it_does_not_know(w: World) -> None:
    w.publisher.remembers = 10
    for seed in range(50):
        await w.publisher.publish(stored(seed))
    w.follow()
    await w.until(lambda: w.held(49) == 12)
    await w.until(lambda: w.stats.state == "lost")
    assert [w.held(seed) for seed in (39, 40)] == [0, 12]
    await w.connected()
    await w.publisher.publish(Cleared())
    await w.until(lambda: w.stats.state == "live")
    assert w.held(49) == 0


@in_a_world
async def test_a_gap_is_filled_in_order(w: World) -> None:
    w.follow()
    await w.connected()
    await w.publisher.publish(stored(1))
    await w.until(lambda: w.held(1) == 12)
    replays = len(w.publisher.asked)
    await w.publisher.publish(removed(1, 0), lose=True)
    await w.publisher.publish(stored(2), lose=True)
    await w.publisher.publish(stored(3))
    await w.until(lambda: w.held(3) == 12)
    assert (w.held(1), w.held(2), w.stats.state, w.stats.lost_events) == (0, 12, "live", 0)
    assert len(w.publisher.asked) > replays and w.stream.applied == 4
    assert w.publisher.asked[-1] == 0  # the last that was known


@in_a_world
async def test_batches_that_a_replay_drops_are_asked_for_again(w: World) -> None:
    for seed in range(20):
        await w.publisher.publish(stored(seed))
    w.publisher.drop_in_replays = {7, 15}
    w.follow()
    await w.until(lambda: w.stats.state == "live")
    assert all(w.held(seed) == 12 for seed in range(20))
    assert w.publisher.asked[:2] == [0, 6] and w.stream.applied == 20


@in_a_world
async def test_a_long_replay_is_asked_for_in_as_many_parts_as_it_takes(w: World) -> None:
    """vLLM's publisher drops what its socket's queue of 1,000 has no room for."""
    for seed in range(9):
        await w.publisher.publish(stored(seed))
    w.publisher.most_in_replays = 2
    w.follow()
    await w.until(lambda: w.stats.state == "live" and len(w.publisher.asked) > 8)
    assert all(w.held(seed) == 12 for seed in range(9))
    assert w.publisher.asked[:9] == [0, *range(1, 9)] and w.stream.applied == 9


@in_a_world
async def test_a_gap_that_the_replay_cannot_fill_empties_the_view(w: World) -> None:
    w.follow()
    await w.connected()
    await w.publisher.publish(stored(1))
    await w.until(lambda: w.held(1) == 12)
    w.publisher.remembers = 2
    for seed in range(2, 9):
        await w.publisher.publish(stored(seed), lose=True)
    await w.publisher.publish(stored(9))
    await w.until(lambda: w.held(9) == 12)
    assert w.held(1) == w.held(2) == 0
    assert (w.held(8), w.stats.state) == (12, "lost")  # the replay still had this one
    assert w.stats.lost_events == 6


@in_a_world
async def test_a_silent_replay_is_asked_again(w: World) -> None:
    w.follow()
    await w.connected()
    await w.publisher.publish(stored(1))
    await w.until(lambda: w.held(1) == 12 and w.stats.state == "live")
    w.publisher.silent = True
    await w.publisher.publish(stored(2), lose=True)
    await w.publisher.publish(stored(3))
    await w.until(lambda: w.stats.state == "lost")
    assert w.held(1) == 0
    await w.publisher.publish(stored(4))
    await w.until(lambda: w.held(4) == 12)  # better than nothing, for the time being
    w.publisher.silent = False
    await w.until(lambda: w.stats.state == "live")
    assert all(w.held(seed) == 12 for seed in (1, 2, 3, 4))


@in_a_world
async def test_without_a_replay_a_gap_empties_the_view(w: World) -> None:
    w.follow(replay=False)
    assert w.stats.state == "estimated"
    await w.connected()
    await w.publisher.publish(stored(1))
    await w.until(lambda: w.held(1) == 12)
    assert w.stats.state == "live"
    await w.publisher.publish(stored(2), lose=True)
    await w.publisher.publish(stored(3))
    await w.until(lambda: w.held(3) == 12)
    assert (w.held(1), w.stats.state, w.stats.lost_events) == (0, "lost", 1)
    assert not w.publisher.asked


@in_a_world
async def test_without_a_replay_a_later_start_is_no_whole_view(w: World) -> None:
    await w.publisher.publish(stored(1))
    w.follow(replay=False)
    await w.connected()
    await w.publisher.publish(stored(2))
    await w.until(lambda: w.held(2) == 12)
    assert w.stats.state == "lost"


@pytest.mark.parametrize("replay", [True, False])
def test_a_restart_is_noticed_when_the_engine_is_back(replay: bool) -> None:
    """Also of an engine that has nothing to tell yet."""

    async def inside() -> None:
        async with world() as w:
            w.follow(replay=replay)
            await w.connected()
            for seed in range(3):
                await w.publisher.publish(stored(seed))
            await w.until(lambda: w.held(2) == 12)
            await w.restart()
            w.stream.came_up(restarted=True)
            await w.until(lambda: w.stats.known == 0)
            assert w.stats.state == ("live" if replay else "estimated")
            await w.connected()
            await w.publisher.publish(stored(7))
            await w.until(lambda: w.held(7) == 12)
            assert w.held(0) == 0 and w.stats.state == "live"

    asyncio.run(inside())


@in_a_world
async def test_a_restart_is_noticed_at_the_same_number(w: World) -> None:
    """The next batch of another process has just the number that is expected."""
    w.follow()
    await w.connected()
    for seed in range(3):
        await w.publisher.publish(stored(seed))
    await w.until(lambda: w.held(2) == 12)
    await w.restart()
    for seed in range(10, 13):
        await w.publisher.publish(stored(seed), lose=True)
    await w.until(lambda: w.held(10) == 12)
    await w.connected()
    await w.publisher.publish(stored(13))
    await w.until(lambda: w.held(13) == 12)
    assert [w.held(seed) for seed in (0, 1, 2, 11, 12)] == [0, 0, 0, 12, 12]
    assert w.stats.state == "live"


@in_a_world
async def test_numbers_that_begin_again_on_one_connection(w: World) -> None:
    """Such as through a proxy, which hides the connection's end."""
    w.follow(replay=False)
    await w.connected()
    for seed in range(3):
        await w.publisher.publish(stored(seed))
    await w.until(lambda: w.held(2) == 12)
    w.publisher.number = 0
    await w.publisher.publish(stored(9))
    await w.until(lambda: w.held(9) == 12)
    assert (w.held(2), w.stats.state) == (0, "live")


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_that_was_cut_off_for_a_moment_is_known_still(replay: bool) -> None:
    """Its probes failed, and it is up again: its replay does not go back to the beginning."""

    async def inside() -> None:
        async with world() as w:
            w.follow(replay=replay)
            await w.connected()
            for seed in range(5):
                await w.publisher.publish(stored(seed))
            await w.until(lambda: w.held(4) == 12 and w.stats.state == "live")
            w.publisher.remembers = 1
            asked = len(w.publisher.asked)
            w.stream.came_up(restarted=False)
            await w.until(lambda: len(w.publisher.asked) > asked or not replay)
            await w.publisher.publish(stored(5))
            await w.until(lambda: w.held(5) == 12)
            assert all(w.held(seed) == 12 for seed in range(6))
            assert (w.stats.state, w.stats.lost_events) == ("live", 0)

    asyncio.run(inside())


@in_a_world
async def test_a_replay_that_does_not_answer_costs_nothing_where_nothing_is_missing(
    w: World,
) -> None:
    w.follow()
    await w.connected()
    for seed in range(3):
        await w.publisher.publish(stored(seed))
    await w.until(lambda: w.held(2) == 12 and w.stats.state == "live")
    w.publisher.silent, w.publisher.remembers = True, 1
    asked = len(w.publisher.asked)
    w.stream.came_up(restarted=False)
    await w.until(lambda: len(w.publisher.asked) > asked)
    await w.publisher.publish(stored(3))
    await w.until(lambda: w.held(3) == 12)
    w.publisher.silent = False
    asked = len(w.publisher.asked)
    await w.until(lambda: len(w.publisher.asked) > asked)
    await w.until(lambda: not w.stream._unanswered)
    assert all(w.held(seed) == 12 for seed in range(4))
    assert (w.stats.state, w.stats.lost_events) == ("live", 0)


@pytest.mark.parametrize("replay", [True, False])
def test_a_connection_that_broke_while_nothing_was_told_costs_nothing(replay: bool) -> None:
    async def inside() -> None:
        async with world() as w:
            w.follow(replay=replay)
            await w.connected()
            for seed in range(3):
                await w.publisher.publish(stored(seed))
            await w.until(lambda: w.held(2) == 12 and w.stats.state == "live")
            await w.publisher.reconnect()
            await w.connected()
            await w.publisher.publish(stored(3))
            await w.until(lambda: w.held(3) == 12)
            assert all(w.held(seed) == 12 for seed in range(4))
            assert (w.stats.state, w.stats.lost_events) == ("live", 0)
            # what is told meanwhile is missing, without a replay
            await w.publisher.reconnect(lambda: w.publisher.publish(stored(4), lose=True))
            await w.connected()
            await w.publisher.publish(stored(5))
            await w.until(lambda: w.held(5) == 12)
            assert (w.held(3), w.stats.state) == ((12, "live") if replay else (0, "lost"))

    asyncio.run(inside())


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_that_came_up_without_its_publisher_is_forgotten(replay: bool) -> None:
    async def inside() -> None:
        async with world() as w:
            w.follow(replay=replay)
            await w.connected()
            await w.publisher.publish(stored(1))
            await w.until(lambda: w.held(1) == 12 and w.stats.state == "live")
            await w.publisher.close()
            w.stream.came_up(restarted=True)
            await w.until(lambda: w.stats.known == 0)

    asyncio.run(inside())


@pytest.mark.parametrize("publishes", [True, False])
def test_a_restart_is_noticed_also_while_replays_are_not_answered(publishes: bool) -> None:
    """The numbers of the new process are those that the old one had used."""

    async def inside() -> None:
        async with world() as w:
            await w.publisher.publish(stored(9))
            w.publisher.silent = True
            w.follow()
            await w.connected()
            await w.until(lambda: w.stream._unanswered)
            for seed in range(3):
                await w.publisher.publish(stored(seed))
            await w.until(lambda: w.held(2) == 12 and w.stats.state == "lost")
            if publishes:
                await w.restart()
                w.publisher.silent = True
                await w.connected()
                await w.publisher.publish(stored(7))
                await w.until(lambda: w.held(7) == 12)
            else:
                await w.publisher.close()
                w.stream.came_up(restarted=True)
            await w.until(lambda: w.held(0) == w.held(2) == 0)

    asyncio.run(inside())


@in_a_world
async def test_garbage_is_skipped(w: World) -> None:
    w.follow()
    await w.connected()
    await w.publisher.send(b"")
    await w.publisher.send(b"", b"\x00" * 7, b"")
    await w.publisher.send(b"", b"\x00" * 8, b"", b"")
    new = {"type": "BlockMoved", "to": 7}
    await w.publisher.publish(stored(1), new, stored(2), 5, [], None, {})
    await w.until(lambda: w.held(2) == 12)
    assert (w.held(1), w.stats.state) == (12, "live")
    # a batch that cannot be read may have been a removal
    await w.publisher.publish_bytes(b"\xc1 no msgpack")
    await w.until(lambda: w.stats.state == "lost")
    assert w.held(1) == 0 and w.stats.lost_events == 1
    await w.publisher.publish(stored(3))
    await w.until(lambda: w.held(3) == 12)


@in_a_world
async def test_random_bytes_do_not_end_a_stream(w: World) -> None:
    w.follow()
    await w.connected()
    source = random.Random(5)
    for _ in range(300):
        kind = source.random()
        noise = source.randbytes(source.randrange(40))
        if kind < 0.4:
            await w.publisher.publish_bytes(noise, lose=source.random() < 0.2)
        elif kind < 0.7:
            await w.publisher.send(*[noise] * source.randrange(1, 5))
        else:
            good = msgspec.msgpack.encode([1.5, [stored(source.randrange(50))], 0])
            at = source.randrange(len(good))
            await w.publisher.publish_bytes(good[:at] + noise[:2] + good[at + 2 :])
    await w.publisher.publish(Cleared())
    await w.publisher.publish(stored(77))
    await w.until(lambda: w.held(77) == 12)
    assert w.stats.state == "live"


@in_a_world
async def test_an_engine_that_starts_later(w: World) -> None:
    ports = w.publisher.ports
    await w.publisher.close()
    w.follow()
    await asyncio.sleep(0.3)
    assert w.stats.state == "estimated"
    w.publisher = Publisher(ports)
    await w.publisher.publish(stored(1), lose=True)
    await w.until(lambda: w.held(1) == 12)
    assert w.stats.state == "live"


@in_a_world
async def test_a_long_replay_leaves_time_for_requests(w: World) -> None:
    for seed in range(400):
        await w.publisher.publish(stored(seed, blocks=100))
    w.follow()
    seen = set()
    while w.stats.state != "live":
        seen.add(w.stats.known)
        await asyncio.sleep(0)
    assert w.stats.known == 40_000
    assert len(seen) > 200  # others had their turn between batches


def test_kinds_of_events_that_are_new_are_left_out() -> None:
    known, new = stored(1), {"type": "BlockMoved", "to": 7}
    removed = Removed([b"\x01" * 32], "CPU", 0)
    events = decode(msgspec.msgpack.encode([1.5, [known, new, removed, Cleared()], 3, "new"]))
    assert events == [known, removed, Cleared()]
    # what is no event
    events = decode(msgspec.msgpack.encode([1.5, [5, known, [], ["BlockRemoved", [7]], {7: 1}]]))
    assert events == [known]
    assert decode(msgspec.msgpack.encode([1.5, []])) is not None
    # the arrays of older engines: what cannot be read at all is lost
    assert decode(msgspec.msgpack.encode([1.5, [["BlockRemoved", [7], "GPU"]]])) is None
