"""Who is not needed for a while is let go, by both sides, and met again when needed.

Producers and consumers share this process: a test sees what each still has of the other.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from handover_peers import (
    PATIENCE_SECONDS,
    Consumer,
    Producer,
    Prompt,
    Spec,
    WrappedCarrier,
    hold,
    side_by_side,
)
from kvferry.handover import peers, push
from waiting import wait_until

P = Spec("p", "tp=2,block=16", carrier="tcp")
D = Spec("d", "tp=1,block=24", carrier="tcp")
WRITTEN = replace(D, mode="push")
IDLE_SECONDS = 0.1
beside = partial(side_by_side, target=D)
PROMPTS = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20), Prompt(3, 100, 40, 40)]


def require_loaded(d: Consumer, p: Producer, prompt: Prompt) -> None:
    loaded = d.load(hold(p, prompt), prompt)
    assert [one.error for one in loaded] == [""] * len(loaded)
    assert all(one.pushed == d.spec.is_written for one in loaded)
    assert d.wrong_bytes_of(prompt) == 0


def served(peer: Producer | Consumer) -> int:
    """Connections that others have to this one's memory."""
    return sum(rack.carrier.server.serving for rack in peer.racks)


def known_to(d: Consumer) -> set[str]:
    return {key.engine_id for n in range(len(d.ranks)) for key in d.known(n).engines}


# --- a consumer's acquaintances ------------------------------------------------------------------


def test_an_engine_that_nothing_is_loaded_from_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with beside(P, replace(P, engine_id="q")) as (p, q, d):
        require_loaded(d, p, PROMPTS[0])
        require_loaded(d, q, PROMPTS[1])
        assert known_to(d) == {"p", "q"} and served(p) and served(q)
        monkeypatch.setattr(peers, "IDLE_SECONDS", IDLE_SECONDS)
        time.sleep(IDLE_SECONDS)
        require_loaded(d, q, PROMPTS[2])
        assert known_to(d) == {"q"}
        wait_until(lambda: not served(p))  # their connections are given back
        assert served(q)
        again = replace(PROMPTS[0], number=4)
        require_loaded(d, p, again)  # met again
        assert served(p) and "p" in known_to(d)


def test_an_engine_that_is_being_loaded_from_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "IDLE_SECONDS", 0.0)
    with beside(P, replace(P, engine_id="q"), target=replace(D, gate_after=0)) as (p, q, d):
        slow = d.start(hold(p, PROMPTS[0]), PROMPTS[0])
        d.wait_at_gate()
        d.release(hold(q, PROMPTS[1]))  # meets it, and leaves: whoever is idle is forgotten then
        wait_until(lambda: all(server.counters["last words: not needed"] for server in q.ranks))
        wait_until(lambda: known_to(d) == {"p"})
        d.open_gate()
        assert d.wait(slow)[0][0].error == "" and d.wrong_bytes_of(PROMPTS[0]) == 0


# --- a producer's targets ------------------------------------------------------------------------


class Leaving(WrappedCarrier):
    """A real carrier that tells who ends connections, and takes its time to."""

    def __init__(self, carrier: Any) -> None:
        super().__init__(carrier)
        self.threads: list[str] = []
        self.may_leave = threading.Event()

    def disconnect(self, peer: Any) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.may_leave.wait(2 * PATIENCE_SECONDS)
        self._carrier.disconnect(peer)


def leaving(p: Producer) -> list[Leaving]:
    return p.wrap_carriers(Leaving)


def test_connections_to_an_idle_consumer_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the server's thread, which answers meanwhile; who it was is remembered."""
    monkeypatch.setattr(push, "IDLE_SECONDS", IDLE_SECONDS)
    with beside(P, target=WRITTEN) as (p, d):
        carriers = leaving(p)
        require_loaded(d, p, PROMPTS[0])
        assert served(d) == len(p.ranks)
        wait_until(lambda: all(carrier.threads for carrier in carriers))
        p.flush()  # servers answer though no connection has ended yet
        require_loaded(d, p, PROMPTS[1])  # over a new one
        for carrier in carriers:
            carrier.may_leave.set()
            assert all(name.startswith("kvferry-push") for name in carrier.threads)
        wait_until(lambda: not served(d))  # the new ones too, after a while
        require_loaded(d, p, PROMPTS[2])
        assert [server.counters["refused unmet"] for server in p.ranks] == [0, 0]


def test_connections_to_a_former_life_are_given_back() -> None:
    with beside(P, target=WRITTEN) as (p, d):
        carriers = leaving(p)
        require_loaded(d, p, PROMPTS[0])
        again = Consumer(replace(WRITTEN, incarnation="second"), P)
        try:
            require_loaded(again, p, PROMPTS[1])
            wait_until(lambda: all(carrier.threads for carrier in carriers))
            p.flush()
            assert served(d) == len(p.ranks)
            for carrier in carriers:
                carrier.may_leave.set()
                assert [name.startswith("kvferry-push") for name in carrier.threads] == [True]
            wait_until(lambda: not served(d))
            assert served(again) == len(p.ranks)
        finally:
            for carrier in carriers:
                carrier.may_leave.set()
            again.close()


def test_connections_that_are_written_to_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "IDLE_SECONDS", 0.01)
    with beside(replace(P, gate_after=0), target=WRITTEN) as (p, d):
        load = d.start(hold(p, PROMPTS[0]), PROMPTS[0])
        p.wait_at_gate()
        ticks = time.monotonic() + 10 * push.IDLE_SECONDS
        while time.monotonic() < ticks:
            p.flush()  # each ends with a look at who is idle
        p.open_gate()
        (loaded,) = d.wait(load)[0]
        assert loaded.ok and loaded.pushed and d.wrong_bytes_of(PROMPTS[0]) == 0


# --- what goes wrong meanwhile, where nobody waits for an answer ---------------------------------


def test_errors_that_nobody_waits_for_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(push, "IDLE_SECONDS", IDLE_SECONDS)
    with beside(P, target=WRITTEN) as (p, d):
        carriers = leaving(p)
        for carrier in carriers:
            carrier.may_leave = nothing = threading.Event()
            nothing.wait = lambda _: False  # type: ignore[method-assign, assignment]
        require_loaded(d, p, PROMPTS[0])
        wait_until(lambda: "a connection of tcp was not given back" in caplog.text)
        require_loaded(d, p, PROMPTS[1])
        for carrier in carriers:
            carrier.may_leave = threading.Event()
            carrier.may_leave.set()
