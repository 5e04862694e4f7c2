"""Leases while requests queue: renewed by a thread of its own, from processes that may die."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from handover_peers import Child, Prompt, Spec, consumer, make_ticket, producer
from kvferry.handover.describe import engine_info
from kvferry.handover.renew import MOST_HELLOS, Renewer
from kvferry.net.rpc import Sockets
from vllm_engines import free_port
from waiting import wait_until

LEASE_SECONDS = 1.5
P = Spec("p", "tp=2,block=16", lease_seconds=LEASE_SECONDS)
D = Spec("d", "tp=1,block=16")
ENGINE = engine_info("d", "first", D.cache_model, D.engine_shape, dict(D.meaning))


@contextmanager
def renewer(secret: str | None = None, introduced: bool = True) -> Iterator[Renewer]:
    before = set(threading.enumerate())
    sockets = Sockets(secret)
    made = Renewer(sockets, interval_seconds=LEASE_SECONDS / 6)
    if introduced:
        made.introduce(ENGINE)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvferry.handover.renew.CALL_SECONDS", 1.0)
            yield made
    finally:
        made.close()
        sockets.close()
    assert not [t for t in threading.enumerate() if t not in before and "kvferry" in t.name]


def a_lease_passes(p: Child) -> None:
    """A hold that nobody watches is the clock: all that were opened before it outlived a lease."""
    clock = p.hold(Prompt(9, 20, src_first=40)).hold_id
    assert [[(one.hold_id, one.why) for one in rank] for rank in p.closed(1)] == [
        [(clock, "expired")]
    ] * 2


def test_a_watched_hold_outlives_its_lease_and_expires_after_it_is_dropped() -> None:
    prompts = [Prompt(1, 50), Prompt(2, 50, src_first=20)]
    with producer(P) as p, renewer("a secret of others") as strange, renewer() as r:
        tickets = [p.hold(prompt) for prompt in prompts]
        r.watch(tickets[0])
        r.watch(tickets[0])
        strange.watch(tickets[1])  # without the secret, it renews nothing
        # the first was opened before the second, and would expire before it
        assert [[one.hold_id for one in rank] for rank in p.closed(1)] == [["hold-2"]] * 2
        assert p.ask("open_holds") == 2
        assert p.ask("counters")[-1]["messages"] == 1  # the directory was asked once
        r.drop("hold-1")
        r.drop("hold-1")
        assert r.watched == 0
        assert [[one.why for one in rank] for rank in p.closed(1)] == [["expired"]] * 2


def test_a_ticket_that_comes_before_the_engine_is_described() -> None:
    prompt = Prompt(1, 50)
    with producer(P) as p, renewer(introduced=False) as r:
        r.watch(p.ticket(prompt), early=True)
        time.sleep(LEASE_SECONDS / 6)  # when it would be renewed
        assert r.arrived("hold-1") is None and not p.ask("counters")[-1].get("messages")
        p.hold(prompt)
        r.introduce(ENGINE)
        wait_until(lambda: r.arrived("hold-1"))


def test_a_hold_that_comes_late_is_renewed_too_and_can_be_loaded() -> None:
    prompt = Prompt(1, 50)
    with producer(P) as p, renewer() as r, consumer(D, P, alone=False) as d:
        r.watch(p.ticket(prompt))
        wait_until(lambda: p.ask("counters")[0].get("messages"))
        ticket = p.hold(prompt)
        a_lease_passes(p)
        assert d.load(ticket, prompt)[0].error == ""
        assert d.wrong_bytes(prompt) == 0
        assert [[one.why for one in rank] for rank in p.closed(1)] == [["delivered"]] * 2
        wait_until(lambda: r.watched == 0)  # closed everywhere: forgotten by itself


def test_one_dead_producer_does_not_hold_up_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvferry")
    prompt = Prompt(1, 50)
    other = replace(P, engine_id="q", lease_seconds=3.0)
    with producer(P) as dead, producer(other) as p, renewer() as r:
        ticket = dead.hold(prompt)
        r.watch(ticket)
        wait_until(lambda: dead.ask("counters")[0].get("messages"))
        dead.signal(signal.SIGSTOP)
        r.watch(p.hold(Prompt(2, 50)))
        r.watch(make_ticket(replace(P, engine_id="nobody"), 9, Prompt(7, 50)))
        wait_until(lambda: caplog.text.count("does not answer") >= 2)
        a_lease_passes(p)
        assert p.ask("open_holds") == 2
        assert caplog.text.count("does not answer") == 2  # once each
        assert r.watched == 3
        dead.kill()


def test_directories_that_nobody_has_heard_of_are_asked_a_few_at_a_time() -> None:
    """Each question has sockets of its own; a good directory has its turn among silent ones."""
    with contextlib.ExitStack() as stack, producer(P) as p, renewer() as r:
        opened = lambda: len(list(Path("/proc/self/fd").iterdir()))  # noqa: E731
        before, most = opened(), 0
        silent = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(200)
        ]
        for number in range(1000):  # several engines are said to be at each
            stranger = replace(P, engine_id=f"e{number}")
            r.watch(make_ticket(stranger, silent[number % 200], Prompt(number, 50), f"h{number}"))
        r.watch(p.hold(Prompt(2000, 50)))

        def renewed() -> bool:
            nonlocal most
            most = max(most, opened() - before - len(silent))
            return bool(p.ask("counters")[0].get("messages"))  # of its first rank

        wait_until(renewed)
        assert most < 10 * MOST_HELLOS


def test_tickets_of_a_restarted_producer_are_forgotten() -> None:
    prompt = Prompt(1, 50)
    with producer(P) as p, renewer() as r:
        r.watch(replace(p.ticket(prompt), incarnation="earlier"))
        wait_until(lambda: r.watched == 0)
        assert p.ask("counters")[-1]["messages"] == 1


def test_a_new_ticket_shows_that_a_producer_is_alive_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [Prompt(1, 50), Prompt(2, 50, src_first=20)]
    port = free_port()  # no producer is there yet
    with renewer() as r:
        r.watch(make_ticket(P, port, prompts[0]))
        wait_until(lambda: "its holds are no longer renewed" in caplog.text)
        with producer(replace(P, port=port)) as p:
            r.watch(p.hold(prompts[1]))
            a_lease_passes(p)
            assert p.ask("open_holds") == 2


def test_closing_is_quick_and_twice_is_no_error() -> None:
    with producer(P) as p, renewer() as r:
        r.watch(p.ticket(Prompt(1, 50)))
        p.signal(signal.SIGSTOP)
        begun = time.monotonic()
        r.close()
        r.close()
        r.watch(p.ticket(Prompt(2, 50)))
        assert time.monotonic() - begun < 10.0
        p.kill()


def test_an_early_ticket_is_told_when_its_prompt_is_there() -> None:
    """Not before; and not delayed by an engine that is silent, nor by a long interval."""
    prompts = [Prompt(1, 50), Prompt(2, 50, src_first=20)]
    with producer(P) as p, renewer() as r, socket.create_server(("127.0.0.1", 0)) as silent:
        r._interval_seconds = 60.0
        tickets = [p.ticket(prompt) for prompt in prompts]
        r.watch(replace(tickets[1], hold_id="x", engine_id="s", port=silent.getsockname()[1]))
        for ticket in tickets:
            r.watch(ticket, early=True)
        wait_until(lambda: p.ask("counters")[0].get("messages", 0) > 5)
        assert [r.arrived(ticket.hold_id) for ticket in tickets] == [None, None]
        p.hold(prompts[0])
        wait_until(lambda: r.arrived(tickets[0].hold_id))
        assert r.arrived(tickets[1].hold_id) is None
    assert r.arrived("never watched") is False


def test_an_early_ticket_of_an_engine_that_is_gone() -> None:
    with producer(P) as p, renewer() as r:
        ticket = p.ticket(Prompt(1, 50))
        stale = replace(ticket, hold_id="of another life", incarnation="another")
        nobody = replace(ticket, hold_id="of nobody", engine_id="n", port=free_port())
        for one in (stale, nobody):
            r.watch(one, early=True)
        wait_until(lambda: [r.arrived(one.hold_id) for one in (stale, nobody)] == [False, False])


def test_every_early_ticket_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also among thousands that wait: those that are asked about first may come last."""
    monkeypatch.setattr("kvferry.handover.renew.MOST_EARLY_PER_CALL", 2)
    prompts = [Prompt(number, 10, src_first=1 + number) for number in range(20)]
    with producer(P) as p, renewer() as r:
        r._interval_seconds = 60.0
        for prompt in prompts:
            r.watch(p.ticket(prompt), early=True)
        wait_until(lambda: p.ask("counters")[0].get("messages", 0) > 5)  # all are renewed at first
        there = [p.hold(prompt).hold_id for prompt in prompts[::6]]
        wait_until(lambda: all(r.arrived(hold_id) for hold_id in there))
        waiting = {p.ticket(prompt).hold_id for prompt in prompts} - {*there}
        assert {r.arrived(hold_id) for hold_id in waiting} == {None}
