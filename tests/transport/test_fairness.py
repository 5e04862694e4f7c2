"""One client's tickets hold up no others: hosts that take a connection and say nothing, directories
that nobody has heard of, prefills that are never done.

A listening socket whose owner never accepts is such a host: the kernel takes connections for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from handover_peers import LOOPBACK, Consumer, Prompt, Spec, hold, side_by_side
from kvferry.handover import consumer as consumer_module
from kvferry.handover import peers as meetings_module
from kvferry.handover.ticket import Ticket
from waiting import wait_until

P = Spec("p", "tp=1,block=16", carrier="tcp")
OTHER = replace(P, engine_id="other")
D = Spec("d", "tp=1,block=16", carrier="tcp")
peers = partial(side_by_side, target=D)
GOOD, MORE, NEVER = (Prompt(number, 60, 1 + 8 * number, 1 + 8 * number) for number in range(3))
# A load's own deadline is far away: none of these loads may end by it before the good one does.
SECONDS = 40.0


@contextlib.contextmanager
def silent(count: int) -> Iterator[list[int]]:
    """Ports that take connections and say nothing."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=1024)).getsockname()[1]
            for _ in range(count)
        ]


def flood(d: Consumer, ports: list[int], count: int, name: str = "attack") -> list[str]:
    """Loads by tickets to these ports, each of an engine with a name of its own."""
    return [
        d.start(
            Ticket(f"e{i}", "first", f"h{i}", "digest", 60, LOOPBACK, ports[i % len(ports)], "r"),
            NEVER,
            seconds=SECONDS,
            request_id=f"{name}-{i}",
        )
        for i in range(count)
    ]


def require_not_held_up(d: Consumer, ticket: Ticket, prompt: Prompt) -> None:
    loaded = d.load(ticket, prompt, seconds=60)
    assert [one.error for one in loaded] == [""]
    # the attack is still going on, or was refused: the load did not wait for its end
    ended = [one.kind for reports in d.finished().values() for one in reports]
    assert "DeadlineExceeded" not in ended
    assert d.wrong_bytes_of(prompt) == 0


@pytest.mark.parametrize("ports", [1, 40])
def test_silent_directories_hold_up_no_load(ports: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if ports > 1:  # the good ones have a part of it: three eighths
        monkeypatch.setattr(meetings_module, "MEET_SECONDS", 16.0)
    before = set(threading.enumerate())  # threads of other tests, which may still be ending
    with peers(P, OTHER) as (p, other, d), silent(ports) as told:
        require_not_held_up(d, hold(p, GOOD), GOOD)  # one engine is met, the other is not
        flood(d, told, 700)
        require_not_held_up(d, p.ticket(MORE) if hold(p, MORE) else None, MORE)
        require_not_held_up(d, hold(other, replace(GOOD, number=3)), replace(GOOD, number=3))
        names = [thread.name for thread in set(threading.enumerate()) - before]
        assert sum("kvferry-load" in name for name in names) < 10
        assert sum("kvferry-" in name for name in names) < 100
        # all of it ends long before the loads' own deadline
        wait_until(lambda: not d.ranks[0].busy, what="the attack did not end")


def test_a_directory_that_was_silent_is_not_asked_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meetings_module, "MEET_SECONDS", 1.5)
    monkeypatch.setattr(meetings_module, "SILENT_SECONDS", 3.0)
    with peers(P) as (p, d), silent(1) as ports:
        (first,) = d.load(Ticket("e", "i", "h", "d", 60, LOOPBACK, ports[0], "r"), NEVER)
        assert first.kind == "DeadlineExceeded"
        for number in range(50):  # each would be another second and a half
            ticket = Ticket(f"e{number}", "i", "h", "d", 60, LOOPBACK, ports[0], "r")
            (again,) = d.load(ticket, NEVER, request_id=f"again-{number}")
            assert "did not answer" in again.error and "meet" not in again.seconds
        # it is asked again, in the end
        wait_until(lambda: "is not asked" not in d.load(ticket, NEVER)[0].error)
        require_not_held_up(d, hold(p, GOOD), GOOD)


def test_loads_that_wait_to_meet_somebody_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings_module, "MOST_WAITING", 16)
    with peers(P) as (p, d), silent(4) as ports:
        flood(d, ports[:1], 50)
        refused = [one.error for reports in d.finished().values() for one in reports]
        assert len(refused) == 50 - 1 - 8  # one is asked, and eight wait
        assert all("others wait already" in error for error in refused)
        flood(d, ports[1:], 3, "more")  # another port of the host has a place, and a thread
        assert not d.finished()
        require_not_held_up(d, hold(p, GOOD), GOOD)


def test_a_burst_waits_until_its_engine_is_met() -> None:
    """vLLM orders as many loads in one step as blocks are free for: thousands of short prompts."""
    with peers(P) as (p, d):
        burst = [
            d.start(p.ticket(NEVER, f"b{i}"), NEVER, seconds=SECONDS, request_id=f"b{i}")
            for i in range(2000)
        ]
        wait_until(lambda: p.parked() >= 256)
        assert not d.finished()
        for one in burst:
            d.cancel(one)
        assert {loaded.kind for (loaded,) in d.wait(*burst)} == {"Cancelled"}


def test_prefills_that_are_never_done_leave_threads_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their claims are parked at a producer that is as it should be."""
    monkeypatch.setattr(consumer_module, "LOAD_THREADS", 16)
    with peers(P, OTHER) as (p, other, d):
        require_not_held_up(d, hold(p, GOOD), GOOD)
        parked = [
            d.start(p.ticket(NEVER, f"never-{i}"), NEVER, seconds=SECONDS, request_id=f"n{i}")
            for i in range(40)
        ]
        wait_until(lambda: p.parked() >= 8)
        for number in (3, 4, 5):
            prompt = replace(MORE, number=number)
            require_not_held_up(d, hold(other, prompt), prompt)
        assert p.parked() == 8 and all(map(d.pending, parked))  # half of the threads, no more
        for one in parked:
            d.cancel(one)
        d.wait(*parked)


def test_a_load_given_up_while_it_waits_for_a_thread_claims_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_module, "LOAD_THREADS", 2)
    with peers(P) as (p, d):
        require_not_held_up(d, hold(p, GOOD), GOOD)
        first, second = (
            d.start(p.ticket(NEVER, name), NEVER, seconds=SECONDS, request_id=name)
            for name in ("first", "second")
        )
        wait_until(lambda: p.parked() == 1)
        d.cancel(second)
        d.cancel(first)
        d.wait(first, second)
        d.release(p.ticket(NEVER, "behind them"))  # it comes after all that they sent
        wait_until(lambda: p.counters()[0].get("last words: not needed"))
        assert p.parked() == 1


def test_a_load_that_waits_for_a_thread_too_long_does_not_blame_its_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_module, "LOAD_THREADS", 2)
    with peers(P) as (p, d):
        require_not_held_up(d, hold(p, GOOD), GOOD)
        met = d.known().engines
        first = d.start(p.ticket(NEVER, "first"), NEVER, seconds=SECONDS, request_id="first")
        wait_until(lambda: p.parked() == 1)
        deadline = time.monotonic() + 0.01
        second = d.start(hold(p, MORE), MORE, seconds=0.01)
        wait_until(lambda: time.monotonic() > deadline + 0.01)
        d.cancel(first)
        ((loaded,),) = d.wait(second)
        assert "waited for a thread" in loaded.error
        assert d.known().engines == met
        wait_until(lambda: not p.open_holds())  # it was told


def test_a_release_that_waits_for_a_thread_does_not_blame_its_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_module, "LOAD_THREADS", 2)
    with peers(P) as (p, d):
        require_not_held_up(d, hold(p, GOOD), GOOD)
        met = d.known().engines
        first = d.start(p.ticket(NEVER, "first"), NEVER, seconds=SECONDS, request_id="first")
        wait_until(lambda: p.parked() == 1)
        with monkeypatch.context() as patch:
            patch.setattr(consumer_module, "WORD_SECONDS", 0.0)
            d.release(hold(p, MORE))
        d.cancel(first)
        wait_until(lambda: p.counters()[0].get("last words: not needed"))
        d.wait(first)
        require_not_held_up(d, hold(p, replace(MORE, number=3)), replace(MORE, number=3))
        assert d.known().engines == met
