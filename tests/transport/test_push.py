"""Push, beyond what both modes have in common: sources that lie, cannot write, or forgot us.

Producer and consumer share this process, so that a test can make one of them misbehave.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from handover_peers import (
    Consumer,
    Producer,
    Prompt,
    Spec,
    WrappedCarrier,
    error_of,
    hold,
    side_by_side,
)
from kvferry.carriers.base import TransferState
from kvferry.demo.cache import CANARY
from kvferry.errors import DeadlineExceeded, PeerLost
from kvferry.handover import push
from kvferry.handover.deadline import end_transfers
from kvferry.net.messages import Offer
from kvferry.plan import Copies
from waiting import wait_until

P = Spec("p", "tp=2,block=16", carrier="tcp")
D = Spec("d", "tp=1,block=24", carrier="tcp", mode="push")
PROMPT = Prompt(1, 100)
WAITED_SECONDS = 0.2


def peers(source: Spec = P, target: Spec = D) -> AbstractContextManager[Any]:
    return side_by_side(source, target=target)


class Crooked(WrappedCarrier):
    """A carrier that writes something else than it is told."""

    def __init__(self, carrier: Any, bend: Any) -> None:
        super().__init__(carrier)
        self._bend = bend

    def write_granted(self, peer: Any, copies: Any, grant: bytes) -> Any:
        return self._carrier.write_granted(peer, self._bend(copies), grant)


def bend(p: Producer, how: Any) -> None:
    p.wrap_carriers(lambda carrier: Crooked(carrier, how))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            lambda c: Copies(c.src[:-1], c.dst[:-1], c.length[:-1]),
            "were due; the bytes that came are disc",
        ),
        (lambda c: Copies(*(np.append(a, a[:1]) for a in (c.src, c.dst, c.length))), "were due"),
        (
            lambda c: Copies(c.src[::-1], c.dst[::-1] + (1 << 16), c.length[::-1]),
            "are not inside",
        ),
        (lambda c: Copies(c.src, c.dst - c.dst.min() + 8, c.length), "are not inside"),
    ],
    ids=["too little", "twice", "other blocks", "anywhere"],
)
def test_a_source_that_writes_something_else_is_not_believed(how: Any, words: str) -> None:
    with peers() as (p, d):
        bend(p, how)
        assert words in error_of(d.load(hold(p, PROMPT), PROMPT))
        assert d.wrong_bytes(PROMPT) > 0
        # whatever it wrote lies in blocks of that request
        free = np.setdiff1d(np.arange(D.blocks), PROMPT.tables(D, PROMPT.dst_first, P)[0])
        assert sum(view.wrong(free, CANARY) for view in d.racks[0].views) == 0
        assert d.census()["grants"] == 0


class Counting(WrappedCarrier):
    """Counts the transfers that are under way when another one is posted."""

    def __init__(self, carrier: Any) -> None:
        super().__init__(carrier)
        self.made: list[Any] = []
        self.most = 0

    def write_granted(self, peer: Any, copies: Any, grant: bytes) -> Any:
        under_way = sum(one.poll() is TransferState.RUNNING for one in self.made)
        self.most = max(self.most, under_way + 1)
        self.made.append(self._carrier.write_granted(peer, copies, grant))
        return self.made[-1]


def test_a_long_write_is_posted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its copies at once take 24 bytes for each run of each block and layer."""
    monkeypatch.setattr(push, "SLICE_DESCRIPTORS", 2)
    with peers() as (p, d):
        carriers = p.wrap_carriers(Counting)
        assert error_of(d.load(hold(p, PROMPT), PROMPT)) == ""
        assert d.wrong_bytes(PROMPT) == 0
        for carrier in carriers:
            assert len(carrier.made) > 10 and carrier.most <= push.FLYING


def test_a_hold_that_closes_during_the_write_is_the_answer() -> None:
    """The write is given up then, which is not the reason that the consumer should hear."""
    with peers() as (p, d):

        def withdraw(copies: Copies) -> Copies:
            p.withdraw(ticket.hold_id)
            p.flush()
            return copies

        bend(p, withdraw)
        ticket = hold(p, PROMPT)
        error = error_of(d.load(ticket, PROMPT))
        assert "StaleTicket" in error and "the hold is closed (withdrawn)" in error


def test_a_source_that_cannot_write_is_read() -> None:
    with peers(replace(P, writes=False)) as (p, d):
        loaded = d.load(hold(p, PROMPT), PROMPT)
        assert error_of(loaded) == ""
        assert not loaded[0].pushed
        assert d.wrong_bytes(PROMPT) == 0
        assert d.census()["grants"] == 0


def test_a_source_that_does_not_reach_us_is_read() -> None:
    """Its way to our carrier is blocked, ours to it is not: we read."""
    with peers() as (p, d):
        for rack in p.racks:
            rack.carrier.connect = _refuse
        loaded = d.load(hold(p, PROMPT), PROMPT)
        assert error_of(loaded) == ""
        assert not loaded[0].pushed
        assert d.wrong_bytes(PROMPT) == 0


def test_an_engine_that_answers_no_offer_is_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that answers no claim: it may have restarted."""
    with peers() as (p, d):
        caller = d.known().caller
        real = caller.call

        def call(address: str, body: Any, deadline: float) -> Future[Any]:
            return Future() if isinstance(body, Offer) else real(address, body, deadline)

        monkeypatch.setattr(caller, "call", call)
        assert "DeadlineExceeded" in error_of(
            d.load(hold(p, PROMPT), PROMPT, seconds=WAITED_SECONDS)
        )
        wait_until(lambda: not d.known().engines)
        monkeypatch.undo()
        again = replace(PROMPT, number=2)
        assert error_of(d.load(hold(p, again), again)) == ""


def test_an_offer_that_waited_for_the_prefill_leaves_time_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its patience began when it came, not when its hold did."""
    seconds, ends = 12.0, list[float]()
    monkeypatch.setattr(push, "CONNECT_SECONDS", seconds)  # so it may take half of what is left

    def drop(endpoint: bytes, deadline: float) -> Any:
        ends.append(deadline)  # when a source whose packets are dropped gives up
        raise DeadlineExceeded("a firewall, say")

    with peers() as (p, d):
        for rack in p.racks:
            rack.carrier.connect = drop
        begun = time.monotonic()
        load = d.start(p.ticket(PROMPT), PROMPT, seconds=seconds)
        wait_until(lambda: p.parked() == len(p.ranks))
        time.sleep(max(0.0, begun + seconds / 2 + 0.1 - time.monotonic()))
        hold(p, PROMPT)
        (loaded,) = d.wait(load)[0]
        assert len(ends) == len(p.ranks) and max(ends) < begun + seconds
        assert loaded.ok and not loaded.pushed and d.wrong_bytes(PROMPT) == 0


def _refuse(endpoint: bytes, deadline: float) -> Any:
    raise DeadlineExceeded("a firewall, say")


def test_a_source_that_forgot_us_is_told_again() -> None:
    prompts = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20)]
    with peers() as (p, d):
        for prompt in prompts:
            loaded = d.load(hold(p, prompt), prompt)
            assert error_of(loaded) == ""
            assert loaded[0].pushed
            for pusher in p.pushers:
                pusher._targets.clear()
        assert d.wrong_bytes(*prompts) == 0
        assert [server.counters["refused unmet"] for server in p.ranks] == [1, 1]


def test_a_restarted_consumer_voids_what_was_known_of_it() -> None:
    with peers() as (p, d):
        assert error_of(d.load(hold(p, PROMPT), PROMPT)) == ""
        again = Consumer(replace(D, incarnation="second"), P)
        try:
            prompt = Prompt(2, 100)
            assert error_of(again.load(hold(p, prompt), prompt)) == ""
            assert again.wrong_bytes(prompt) == 0
            for pusher in p.pushers:
                assert [reader.incarnation for reader in pusher._targets] == ["second"]
        finally:
            again.close()


def test_waiting_for_the_prefill_is_not_transferring() -> None:
    """The time until the hold arrives is told apart from that of the bytes, as it is for reads."""
    with peers() as (p, d):
        load = d.start(p.ticket(PROMPT), PROMPT)
        wait_until(lambda: p.parked() == len(p.ranks))
        time.sleep(WAITED_SECONDS)
        hold(p, PROMPT)
        (loaded,) = d.wait(load)[0]
        assert loaded.ok and loaded.pushed and d.wrong_bytes(PROMPT) == 0
        assert loaded.seconds["wait"] >= WAITED_SECONDS
        assert loaded.seconds["push"] > 0


def test_queueing_at_the_source_is_not_transferring(monkeypatch: pytest.MonkeyPatch) -> None:
    """One push at a time: the first stands at a gate, which is its transfer; the second waits."""
    monkeypatch.setattr(push, "THREADS_PER_TARGET", 1)
    prompts = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20)]
    with peers(replace(P, gate_after=0)) as (p, d):
        first = d.start(hold(p, prompts[0]), prompts[0])
        p.wait_at_gate()
        second = d.start(hold(p, prompts[1]), prompts[1])
        wait_until(lambda: p.pushes() == [2] * len(p.ranks))
        time.sleep(WAITED_SECONDS)
        p.open_gate()
        (one,), (other,) = d.wait(first, second)
        assert one.ok and other.ok and one.pushed and other.pushed
        assert d.wrong_bytes(*prompts) == 0
        assert one.seconds["push"] >= WAITED_SECONDS
        assert other.seconds["wait"] >= WAITED_SECONDS


def test_memory_is_written_under_grants_only() -> None:
    with peers() as (p, d):
        user, owner = p.racks[0].carrier, d.racks[0].carrier
        peer = user.connect(owner.endpoint(), time.monotonic() + 10)
        one = np.array([1])
        copies = Copies(p.racks[0].memory.bases[:1], d.racks[0].memory.bases[:1], one)
        with pytest.raises(Exception, match="without a grant"):
            user.write(peer, copies).wait(time.monotonic() + 10)


class Stubborn:
    """A transfer whose end its carrier confirms late."""

    def __init__(self, confirmed: threading.Event) -> None:
        self._confirmed = confirmed

    def wait(self, deadline: float) -> None: ...

    def poll(self) -> TransferState:
        return TransferState.FAILED if self._confirmed.is_set() else TransferState.RUNNING

    def settled(self) -> bool:
        return self._confirmed.is_set()

    def cancel(self) -> None:
        if not self._confirmed.wait(0.02):
            raise DeadlineExceeded("not confirmed")


def test_a_load_that_cannot_be_ended_is_counted_until_it_is() -> None:
    counted, confirmed = [], threading.Event()

    @contextlib.contextmanager
    def stuck() -> Iterator[None]:
        counted.append("begun")
        yield
        counted.append("over")

    transfers = [Stubborn(confirmed), Stubborn(confirmed)]
    ending = threading.Thread(target=end_transfers, args=(transfers, stuck))
    ending.start()
    until = time.monotonic() + 10
    while not counted:
        assert time.monotonic() < until
    assert counted == ["begun"] and ending.is_alive()
    confirmed.set()
    ending.join(10)
    assert not ending.is_alive() and counted == ["begun", "over"]


def test_how_a_transfer_that_was_cancelled_ended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    confirmed = threading.Event()

    class Failing(Stubborn):
        def wait(self, deadline: float) -> None:
            confirmed.set()
            raise PeerLost("it is gone")

    caplog.set_level("INFO", "kvferry")
    end_transfers([Failing(confirmed)], contextlib.nullcontext)
    assert "a transfer that was cancelled has failed: it is gone" in caplog.text
