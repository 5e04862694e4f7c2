"""Rushes and outages: turns, trials, the budget of retries, and clients' own deadlines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.router.api import ApiError, client_seconds
from kvferry.router.guard import LineFull, RetryBudget, Turns
from router_cluster import CHUNKS, QUICK, WHOLE, cluster, decoders, quick
from waiting import wait_until


class Desk:
    """Room for some requests at engines `a` and `b`."""

    def __init__(self, most: int = 100, share: float = 1.0) -> None:
        self.free = {"a": 0, "b": 0}
        self.served: list[str] = []
        self.now = 0.0
        self.turns = Turns(most, share, self.room, lambda: self.now)

    def room(self, besides: Collection[str]) -> int:
        return sum(free for name, free in self.free.items() if name not in besides)

    async def ask(self, name: str, besides: Collection[str] = (), seconds: float = 30.0) -> bool:
        """The first letter of a name is its client."""
        if not self.turns.at_once(besides) and not await self.turns.wait(name[0], besides, seconds):
            return False
        self.free[next(n for n in self.free if n not in besides and self.free[n])] -= 1
        self.served.append(name)
        return True


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_clients_take_turns_and_nobody_passes_the_line() -> None:
    async def run() -> None:
        desk = Desk()
        tasks = [asyncio.create_task(desk.ask(n)) for n in ("x1", "x2", "x3", "x4", "y1", "z1")]
        await settle()
        assert desk.turns.waiting == 6
        desk.free["a"] = 3
        desk.turns.ended()
        assert not desk.turns.at_once()  # three have their turn, and have not gone yet
        late = asyncio.create_task(desk.ask("y2"))  # comes while those with a turn have not gone
        await settle()
        assert desk.served == ["x1", "y1", "z1"]
        desk.free["b"] = 10
        desk.turns.ended()
        await asyncio.gather(*tasks, late)
        assert desk.served[3:] == ["x2", "y2", "x3", "x4"]
        assert desk.turns.waiting == 0 and desk.room(()) == 6
        assert desk.turns.at_once()

        desk.free = {"a": 0, "b": 0}
        tasks = [asyncio.create_task(desk.ask(n)) for n in ("x5", "x6", "y3", "x7", "z2")]
        await settle()
        for _ in tasks:  # room for one at a time
            desk.free["a"] = 1
            desk.turns.ended()
            await settle()
        assert desk.served[7:] == ["x5", "y3", "z2", "x6", "x7"]

    asyncio.run(run())


def test_a_request_waits_for_engines_that_have_not_failed_it() -> None:
    async def run() -> None:
        desk = Desk()
        picky = asyncio.create_task(desk.ask("x1", besides=["a"]))
        await settle()
        desk.free["a"] = 1
        desk.turns.ended()
        assert not desk.turns.at_once()  # but by the line
        assert await desk.ask("y1")  # does not wait behind a request that has no use for `a`
        assert not picky.done()
        desk.free["b"] = 1
        desk.turns.ended()
        assert await picky
        assert desk.served == ["y1", "x1"]

    asyncio.run(run())


def test_turns_of_those_who_left_go_to_others() -> None:
    async def run() -> None:
        desk = Desk()
        first, _ = (asyncio.create_task(desk.ask(n)) for n in ("x1", "x2"))
        await settle()
        desk.free["a"] = 1
        desk.turns.ended()  # the turn is x1's, which is cancelled before it goes
        first.cancel()
        await settle()
        assert desk.served == ["x2"]
        assert not await desk.ask("x3", seconds=0.01)
        assert desk.turns.waiting == 0
        again, other = (asyncio.create_task(desk.ask(n, b)) for n, b in (("x4", "a"), ("x5", "b")))
        await settle()
        desk.turns.stir(lambda besides: besides == "a")
        assert not await again and not other.done() and desk.turns.waiting == 1
        desk.turns.stir(lambda besides: True)
        assert not await other and not desk.turns.waiting

    asyncio.run(run())


def test_a_request_does_not_wait_for_an_engine_that_is_lost() -> None:
    """`a` failed the request, and `b`, for which it waits, goes down."""

    async def run() -> None:
        fleet = decoders("ab", quick(max_running=1, recover_after=1))
        a, b = fleet.engines
        for engine in (a, b):
            engine.probed_well()
            engine.in_flight = 1
        line = asyncio.create_task(fleet.turns.wait("x", {a}, 30.0))
        everyone = asyncio.create_task(fleet.turns.wait("y", {b}, 30.0))
        await settle()
        b.failed("gone", refused=True)
        await settle()
        assert line.done() and not line.result()
        assert not everyone.done()
        everyone.cancel()

    asyncio.run(run())


def test_waiting_requests_end_with_the_last_decode_engine() -> None:
    token = "t" * 20
    limits = quick(max_running=1, queue_seconds=60.0)
    with cluster(limits=limits, token=token) as c, ThreadPoolExecutor(2) as pool:
        c.decode[0].always = "gate"
        running = pool.submit(c.complete, stream=True)
        wait_until(lambda: len(c.decode[0].seen) == 1)
        waiting = pool.submit(c.complete)
        c.expect("waiting", count=1)
        changed = c.client.patch(
            "/admin/engines",
            params={"url": c.servers["d0"].url},
            json={"roles": ["prefill"]},
            headers={"authorization": f"Bearer {token}"},
        )
        assert changed.status_code == 200
        answer = waiting.result(10)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_engine")
        for _ in CHUNKS:
            c.decode[0].gate.release()
        assert running.result().content == b"".join(CHUNKS)


def test_the_line_is_bounded_in_total_and_for_one_client() -> None:
    async def run() -> None:
        desk = Desk(most=4, share=0.5)
        tasks = [asyncio.create_task(desk.ask(n)) for n in ("x1", "x2", "y1", "z1")]
        await settle()
        with pytest.raises(LineFull, match=r"^4 requests wait$"):
            await desk.ask("w1")
        tasks[2].cancel()
        await settle()
        with pytest.raises(LineFull, match=r"^2 requests of this client wait$"):
            await desk.ask("x3")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert desk.turns.waiting == 0

    asyncio.run(run())


def test_when_a_turn_is_expected() -> None:
    desk = Desk()
    assert desk.turns.expected_seconds() == 30.0  # nothing was seen
    for _ in range(10):
        desk.now += 4.0
        desk.turns.ended()
    desk.now += 4.0
    assert desk.turns.expected_seconds() == 4.0
    desk.now += 10_000
    assert desk.turns.expected_seconds() == 60.0


def test_retries_are_a_share_of_requests() -> None:
    budget = RetryBudget(0.1, 3)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    for _ in range(25):
        budget.request()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(1000):
        budget.request()
    assert budget.left == 3


def test_an_engine_that_fails_requests_comes_back_on_trial() -> None:
    now = [0.0]
    limits = quick(probe_every_seconds=1.0, recover_after=2, fail_after=2, trial_seconds=20.0)
    (a,) = decoders("a", limits, clock=lambda: now[0]).engines

    def good_probes_until_up() -> float:
        begun = now[0]
        while not a.up:
            now[0] += 1
            a.probed_well()
            assert now[0] - begun < 100
        return now[0] - begun

    a.probed_well()
    assert (a.trial, a.room) == (0, limits.max_running)
    a.failed("silent")
    a.failed("silent")
    assert not a.up and good_probes_until_up() == 2
    assert (a.trial, a.room) == (1, 1)
    away = []
    for _ in range(4):
        a.failed("silent again")  # one failure ends a trial
        assert not a.up
        away.append(good_probes_until_up())
    assert away == [4, 8, 16, 20]
    a.in_flight = 1
    assert a.room == 0
    for _ in range(2):  # its request may take minutes: good probes widen the trial
        a.probed_well()
    assert (a.trial, a.room) == (2, 1)
    a.answered()
    assert (a.trial, a.room) == (0, limits.max_running - 1)
    a.failed("once")
    a.failed("twice")
    assert good_probes_until_up() == 2  # the failed trials are forgotten
    a.failed("gone", refused=True)
    assert a.gone
    good_probes_until_up()
    assert (a.trial, a.gone) == (0, False)  # it was started again


def test_a_trial_is_one_request_and_the_others_wait_for_it() -> None:
    limits = quick(tries=1, answer_seconds=0.3, fail_after=1, recover_after=40, wait_seconds=10.0)
    with cluster(prefill=0, limits=limits) as c, ThreadPoolExecutor(4) as pool:
        c.decode[0].script = ["hang"]
        assert c.complete().status_code == 504
        c.decode[0].always = "gate"
        body = {"prompt": "x", "stream": True}
        asked = [pool.submit(c.client.post, "/v1/completions", json=body) for _ in range(3)]
        wait_until(lambda: len(c.decode[0].seen) == 2)
        c.expect("waiting", count=2)
        assert len(c.decode[0].seen) == 2
        c.decode[0].gate.release(100)
        assert [a.result().content for a in asked] == [b"".join(CHUNKS)] * 3
        c.expect("waiting", count=0)


def test_an_outage_is_not_multiplied() -> None:
    limits = quick(retry_burst=4, fail_after=1000, max_held_bytes=1 << 30)
    with cluster(prefill=0, decode=3, limits=limits) as c:
        for d in c.decode:
            d.always = "500"
        assert {c.complete().status_code for _ in range(40)} == {500}
        asked = sum(len(d.seen) for d in c.decode)
        assert 40 + 4 <= asked <= 40 + 4 + 4  # a tenth, and a few; not three times as many
        c.expect("retries_total", 'stage="decode"', count=asked - 40)
        assert c.metric("retries_refused_total") >= 30


def test_requests_of_an_engine_that_died_are_not_counted() -> None:
    limits = quick(retry_burst=1, first_byte_seconds=20.0, probe_every_seconds=60.0)
    body = {"prompt": "x", "stream": True}
    with cluster(prefill=0, decode=2, limits=limits) as c, ThreadPoolExecutor(8) as pool:
        c.decode[0].always, c.decode[1].always = "hang", "gate"
        asked = [pool.submit(c.client.post, "/v1/completions", json=body) for _ in range(8)]
        wait_until(lambda: [len(d.seen) for d in c.decode] == [4, 4])
        c.servers["d0"].kill()
        wait_until(lambda: len(c.decode[1].seen) == 8)
        c.decode[1].gate.release(100)
        assert [a.result().content for a in asked] == [b"".join(CHUNKS)] * 8
        c.expect("retries_total", 'stage="decode"', count=4)
        c.expect("retries_refused_total", count=0)


def test_busy_engines_429_with_the_time_of_the_next_turn() -> None:
    limits = quick(max_running=1, max_queued=2, address_share=1.0, queue_seconds=3.0)
    body = {"prompt": "x", "stream": True}
    with cluster(limits=limits) as c, ThreadPoolExecutor(4) as pool:
        c.decode[0].script = ["gate"]
        c.decode[0].gate.release()
        with c.client.stream("POST", "/v1/completions", json=body) as got:
            chunks = got.iter_raw()
            next(chunks)
            late = c.complete()
            assert (late.status_code, late.json()["error"]["code"]) == (429, "engines_busy")
            assert "this request waited 3 s" in late.json()["error"]["message"]
            assert 1 <= int(late.headers["retry-after"]) <= 60
            line = [pool.submit(c.complete) for _ in range(2)]
            c.expect("waiting", count=2)
            full = c.complete()
            assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
            assert "2 requests of this client wait" in full.json()["error"]["message"]
            c.decode[0].gate.release(10)
            assert b"".join(chunks) == b"".join(CHUNKS[1:])
            assert [a.result().status_code for a in line] == [200, 200]
        assert len(c.prefill[0].seen) == 3  # none for those that were refused
        c.expect("requests_total", 'outcome="busy"', count=2)


@pytest.mark.parametrize("headers", [{}, {"X-Request-Timeout": "9"}])
def test_a_timeout_that_is_no_deadline_of_the_client_is_a_bug(
    headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*asked: object) -> None:
        raise TimeoutError("of something else")

    with cluster() as c:
        c.router.app.routes["/v1/completions"].__self__._answer = broken
        got = c.complete(headers)
        assert (got.status_code, got.json()["error"]["code"]) == (500, "internal_error")
        c.expect("requests_total", 'outcome="internal"', count=1)
        c.expect("requests_total", 'outcome="deadline"', count=0)
    assert "broke the router" in caplog.text and "of something else" in caplog.text


def test_deadlines_that_clients_name() -> None:
    with cluster() as c:
        c.decode[0].script = ["hang"]
        begun = time.monotonic()
        got = c.complete({"X-Request-Timeout": "1"})
        assert time.monotonic() - begun < QUICK.answer_seconds
        assert (got.status_code, got.json()["error"]["code"]) == (504, "deadline_exceeded")
        wait_until(lambda: c.decode[0].seen[0].done == "aborted")
        c.decode[0].script = ["stall"]
        body = {"prompt": "x", "stream": True}
        got = c.client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "1.5"})
        *events, error, end = got.content.split(b"\n\n")
        assert b"".join(event + b"\n\n" for event in events) == b"".join(CHUNKS[:2])
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        assert end == b""
        c.expect("requests_total", 'outcome="deadline"', count=2)
        assert c.complete({"X-Request-Timeout": "9"}).content == WHOLE
        got = c.complete({"X-Request-Timeout": "soon"})
        assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_timeout")
        assert all(c.up().values())  # not the engines' fault
    assert client_seconds([], 5.0) is None
    assert client_seconds([(b"x-request-timeout", b"7")], 5.0) == 5.0
    assert client_seconds([(b"x-request-timeout", b"2")], 5.0) == 2.0
    for value in (b"0", b"-1", b"nan", b"inf", b""):
        with pytest.raises(ApiError):
            client_seconds([(b"x-request-timeout", value)], 5.0)


def test_an_engine_that_breaks_off_its_requests_is_taken_out_also_without_retries() -> None:
    """A good probe, which tells whether it died, says nothing about its requests."""
    limits = quick(retry_burst=1, retry_share=0.001, probe_every_seconds=60.0)
    with cluster(0, 2, limits=limits) as c:
        c.decode[1].script = ["drop"]
        wait_until(lambda: c.complete().status_code == 200 and not c.decode[1].script)
        c.decode[0].always = "drop"
        statuses = [c.complete().status_code for _ in range(8)]
        assert statuses.count(502) == limits.fail_after and not c.up()["d0"]
