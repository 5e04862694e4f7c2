"""Hand-overs where the system has no more threads, or a source cannot connect to us.

Each load is reported once, and not a byte of one that was reported as failed arrives after that.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from test_push import D, P, peers

from handover_peers import Producer, Prompt, error_of, hold
from kvferry.carriers.tcp.carrier import TcpEndpoint
from kvferry.handover import push
from no_threads import no_threads
from waiting import require_for, wait_until

PULL = replace(D, mode="pull")
PROMPTS = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20)]


def test_a_load_that_was_refused_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(P, PULL) as (p, d):
        ticket = hold(p, PROMPTS[0])
        with no_threads(monkeypatch, "kvferry-load"):
            assert "no thread can be started" in error_of(d.load(ticket, PROMPTS[0]))
            d.release(ticket)  # nor does this end the engine
        other = hold(p, PROMPTS[1])
        assert error_of(d.load(other, PROMPTS[1])) == ""
        require_for(0.1, lambda: d.finished() == {})
        assert d.wrong_bytes(PROMPTS[1]) == 0  # of the first prompt's blocks, none was touched


def test_a_load_that_waits_for_a_thread_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(P, replace(PULL, gate_after=0)) as (p, d):
        first = d.start(hold(p, PROMPTS[0]), PROMPTS[0])
        d.wait_at_gate()
        with no_threads(monkeypatch, "kvferry-load"):
            second = d.start(hold(p, PROMPTS[1]), PROMPTS[1])
            assert d.pending(second)
            d.open_gate()
            for loaded in d.wait(first, second):
                assert error_of(loaded) == ""
        assert d.wrong_bytes(*PROMPTS) == 0


def test_without_a_thread_to_write_a_source_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers() as (p, d), no_threads(monkeypatch, "kvferry-push"):
        (loaded,) = d.load(hold(p, PROMPTS[0]), PROMPTS[0])
        assert loaded.ok and not loaded.pushed and d.wrong_bytes(PROMPTS[0]) == 0
        assert p.pushes() == [0, 0]


def test_a_source_that_has_too_much_to_write_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "MOST_PUSHES", 0)
    with peers() as (p, d):
        (loaded,) = d.load(hold(p, PROMPTS[0]), PROMPTS[0])
        assert loaded.ok and not loaded.pushed and d.wrong_bytes(PROMPTS[0]) == 0


def test_a_source_that_forgets_us_at_once_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "MOST_TARGETS", 0)
    with peers() as (p, d):
        (loaded,) = d.load(hold(p, PROMPTS[0]), PROMPTS[0])
        assert loaded.ok and not loaded.pushed and d.wrong_bytes(PROMPTS[0]) == 0


def test_a_write_is_answered_though_the_next_one_finds_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push, "THREADS_PER_TARGET", 1)
    with peers(replace(P, gate_after=0)) as (p, d):
        first = d.start(hold(p, PROMPTS[0]), PROMPTS[0])
        p.wait_at_gate()
        second = d.start(hold(p, PROMPTS[1]), PROMPTS[1])
        wait_until(lambda: p.pushes() == [2, 2])
        with no_threads(monkeypatch, "kvferry-push"):
            p.open_gate()
            for (loaded,) in d.wait(first, second):
                assert loaded.ok and loaded.pushed
        assert d.wrong_bytes(*PROMPTS) == 0


@contextlib.contextmanager
def dropped(p: Producer) -> Iterator[list[bytes]]:
    """What the source sends to our memory's port is dropped: it connects, and hears nothing."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = TcpEndpoint("tcp", "127.0.0.1", silent.getsockname()[1], bytes(16))
        for rack in p.racks:

            def connect(endpoint: bytes, deadline: float, real: Any = rack.carrier.connect) -> Any:
                asked.append(endpoint)
                return real(msgspec.msgpack.encode(nowhere), deadline)

            rack.carrier.connect = connect
        yield asked


def test_a_source_whose_packets_are_dropped_is_read_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push, "CONNECT_SECONDS", 0.5)
    with peers() as (p, d), dropped(p) as asked:
        for prompt in PROMPTS:
            (loaded,) = d.load(hold(p, prompt), prompt, seconds=6.0)
            assert loaded.ok and not loaded.pushed, loaded
            assert len(asked) == len(p.ranks)  # the second time, each remembers
        assert d.wrong_bytes(*PROMPTS) == 0


def test_a_source_that_is_connecting_is_given_up_and_ends_at_once() -> None:
    with peers() as (p, d), dropped(p) as asked:
        load = d.start(hold(p, PROMPTS[0]), PROMPTS[0])
        wait_until(lambda: len(asked) == len(p.ranks))
        begun = time.monotonic()
        for server in p.ranks:
            server.close()
        d.cancel(load)
        assert error_of(d.wait(load)[0]).startswith(("Cancelled", "PeerLost"))
        assert time.monotonic() - begun < 5  # to connect takes seven and a half


@pytest.mark.parametrize("target", [PULL, D], ids=["read", "written"])
def test_an_engine_is_known_still_after_a_void_ticket(target: Any) -> None:
    with peers(P, target) as (p, d):
        assert error_of(d.load(hold(p, PROMPTS[0]), PROMPTS[0])) == ""
        (known,) = d.known().engines.values()
        void = hold(p, PROMPTS[1])
        p.withdraw(void.hold_id)
        p.flush()
        assert "StaleTicket" in error_of(d.load(void, PROMPTS[1]))
        assert list(d.known().engines.values()) == [known]
        for server in p.ranks:  # another life
            server.reset("another")
        p.flush()
        assert "StaleTicket" in error_of(d.load(void, PROMPTS[1]))
        assert known not in d.known().engines.values()
