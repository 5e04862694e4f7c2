"""The failure matrix: real processes die, stop, lie and come back; in time, and without a leak.

Each case runs where the consumer reads and where the producer writes. Before and after, the peers
that live are counted: threads, descriptors, holds, parked claims, grants, blocks, memory. Bytes are
compared with contents that are derived from positions.

    kill -9 P before, during, after a load;
        restart with the same address  test_a_producer_is_killed_and_comes_back_at_its_address
    kill -9 D before, during, after    test_a_consumer_is_killed
    SIGSTOP, a late write              test_a_late_write_does_not_land_in_reused_blocks
    SIGSTOP past the lease, and on     test_a_consumer_is_stopped_past_the_lease_and_goes_on,
                                       test_a_producer_is_stopped_past_the_deadline_and_goes_on
    abort at each stage                test_loads_are_given_up_at_every_moment; under vLLM's
                                       scheduler: tests/vllm/test_lifecycle.py, test_aborted_*
    D preempted after loading          tests/vllm/test_lifecycle.py, test_preempted_after_loading
    stale, restarted, another prompt   test_tickets_that_are_refused_leave_nothing
    wrong secret, another model,
        a peer that answers nothing    test_peers_that_are_refused_leave_nothing
    corrupted payload, checksums on    test_a_damaged_payload_is_noticed_with_checksums
    64 consumers on one producer       test_64_consumers_on_one_producer
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from handover_peers import (
    PATIENCE_SECONDS,
    SHORT_SECONDS,
    SILENT_SECONDS,
    SLACK_SECONDS,
    Child,
    Consumer,
    Prompt,
    Spec,
    WrappedCarrier,
    consumer,
    error_of,
    make_ticket,
    producer,
    start_and_hold,
)
from kvferry.handover import load as pieces_module
from kvferry.handover.load import Loaded
from kvferry.handover.ticket import Ticket
from vllm_engines import free_port
from waiting import wait_until

LEASE_SECONDS = 1.0
MOST_GROWTH_BYTES = 16 << 20
WARM = Prompt(90, 30, src_first=60, dst_first=60)  # the last blocks

WAYS = {
    "local read": ("local", "pull"),
    "tcp read": ("tcp", "pull"),
    "tcp write": ("tcp", "push"),
}


@dataclass(frozen=True, slots=True)
class Way:
    """Who moves the bytes, and by what."""

    p: Spec
    d: Spec

    def mover(self, p: Any, d: Any) -> Any:
        return p if self.d.is_written else d


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    carrier, mode = WAYS[request.param]
    return Way(
        Spec("p", "tp=2,block=16", carrier=carrier),
        Spec("d", "tp=1,block=24", carrier=carrier, mode=mode),
    )


def require_ok(loaded: list[Loaded]) -> None:
    assert error_of(loaded) == ""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds + SLACK_SECONDS


def census(peer: Any) -> dict[str, int]:
    """What a peer has; memory with what it may grow by."""
    alone = isinstance(peer, Child)  # else its memory is also the tests'
    counted: dict[str, int] = peer.ask("census") if alone else peer.census()
    memory = {"memory": peer.ask("resident_bytes") + MOST_GROWTH_BYTES} if alone else {}
    return {**counted, **memory}


def require_no_more(peer: Any, before: dict[str, int]) -> None:
    """Soon, a peer has no more of anything than it had before."""
    found: dict[str, int] = {}

    def settled() -> bool:
        found.update(census(peer))
        if "memory" in found:  # what may be added was added to what it had
            found["memory"] -= MOST_GROWTH_BYTES
        return all(found[what] <= count for what, count in before.items())

    wait_until(settled, what=lambda: f"{before} grew to {found}, and did not shrink")


def warm_up(p: Child, d: Consumer) -> None:
    """Threads and connections that stay are there before anything is counted.

    The holds open once all claims wait for them: all loads are under way at once, and no short
    lease runs out before a load on a busy machine has come to its claim.
    """
    for turn in range(2):
        names = [f"warm-{turn}-{n}" for n in range(8)]
        loads = [d.start(p.ticket(WARM, name), WARM, request_id=name) for name in names]
        wait_until(lambda: p.ask("parked") == 8 * len(p.infos))
        for name in names:
            p.hold(WARM, name)
        for loaded in d.wait(*loads):
            require_ok(loaded)
        p.closed(8)


# --- kill -9 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_producer_is_killed_and_comes_back_at_its_address(
    way: Way, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times: the consumer must not have more of anything after the third than before."""
    monkeypatch.setattr(pieces_module, "SLICE_DESCRIPTORS", 64)
    first, second = Prompt(1, 200, 1, 1), Prompt(2, 100, 20, 20)
    gate = 5 if when == "during" else None
    # The system gives this port to no other process while the producer is dead.
    port, stale, before = free_port(), None, {}
    with consumer(replace(way.d, gate_after=gate), way.p, alone=False) as d:
        for life in range(3):
            spec = replace(way.p, port=port, incarnation=f"life {life}")
            with producer(replace(spec, gate_after=gate, slice_descriptors=64)) as p:
                if stale is not None:  # tickets of the dead one are stale, not another's cache
                    with within(0.0):
                        errors = [error_of(d.load(stale, second)) for _ in range(2)]
                    assert "StaleTicket" in errors[1], errors
                tickets = [p.hold(first), p.hold(second)]
                stale = tickets[1]
                if when == "during":
                    load = d.start(tickets[0], first)
                    way.mover(p, d).wait_at_gate()
                    p.kill()
                    d.open_gate()
                    with within(0.0):
                        assert "PeerLost" in error_of(d.wait(load)[0])
                elif when == "before":
                    p.kill()
                    with within(0.0):
                        assert "PeerLost" in error_of(d.load(tickets[0], first))
                else:
                    require_ok(d.load(tickets[0], first))
                    p.kill()
                    assert d.wrong_bytes(first) == 0
                    with within(0.0):
                        assert "PeerLost" in error_of(d.load(tickets[1], second))
            for rack in d.racks if when == "during" else ():
                rack.carrier.shut(5)
            before = before or census(d)
        require_no_more(d, before)


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_consumer_is_killed(way: Way, when: str) -> None:
    source = replace(way.p, lease_seconds=2 * LEASE_SECONDS, gate_after=0, idle_seconds=0.5)
    prompts = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20)]
    with producer(source) as p:
        before = census(p)
        d = Child.start("consumer", replace(way.d, gate_after=0), source)
        try:
            if when == "before":
                p.hold(prompts[0])
            elif when == "during":
                start_and_hold(p, d, prompts[0])
                way.mover(p, d).wait_at_gate()
            else:
                d.open_gate()
                p.open_gate()
                require_ok(d.ask("wait", start_and_hold(p, d, prompts[0]))[0])
        finally:
            d.kill()
            d.pipe.close()
        p.open_gate()
        for reports in p.closed(1):
            assert [one.why for one in reports] == ["delivered" if when == "after" else "expired"]
        with consumer(replace(way.d, engine_id="e"), source, alone=False) as e:
            require_ok(e.wait(start_and_hold(p, e, prompts[1]))[0])
            assert e.wrong_bytes(prompts[1]) == 0
            p.closed(1)
        require_no_more(p, before)


# --- SIGSTOP, and late writes --------------------------------------------------------------------


@pytest.mark.parametrize("revoked", [True, False], ids=["revoked", "control: not revoked"])
def test_a_late_write_does_not_land_in_reused_blocks(revoked: bool) -> None:
    """The producer is stopped between two writes; its blocks are another prompt's when it goes on.

    The control leaves its grant open: then the bytes do land, so the test would see them.
    """
    source = Spec("p", "tp=2,block=16", carrier="tcp", gate_after=5, slice_descriptors=64)
    other = Spec("q", "tp=1,block=16", carrier="tcp")
    target = Spec("d", "tp=1,block=24", carrier="tcp", mode="push")
    late, fresh = Prompt(1, 200, 1, 1), Prompt(2, 200, 1, 1)  # the same blocks
    with producer(source) as p, producer(other) as q, consumer(target, other, alone=False) as d:
        carrier = d.racks[0].carrier
        if not revoked:
            carrier.close_grant = lambda grant, seconds: 0
        seconds = SHORT_SECONDS if revoked else 600.0  # or the writer would see it is late, itself
        load = d.start(p.hold(late), late, seconds=seconds, keep_open=True)
        p.wait_at_gate()
        p.signal(signal.SIGSTOP)
        if not revoked:
            d.cancel(load)
        with within(SHORT_SECONDS):
            assert error_of(d.wait(load)[0]).startswith(("DeadlineExceeded", "Cancelled"))
        if not revoked:
            del carrier.close_grant
        require_ok(d.load(q.hold(fresh), fresh))  # reported, so reused: by another request
        assert d.wrong_bytes(fresh) == 0
        p.signal(signal.SIGCONT)
        p.open_gate()
        wait_until(lambda: all(map(ended_pushes, p.ask("counters")[:2])))  # of both ranks
        ended = [ended_pushes(one) for one in p.ask("counters")[:2]]
        if revoked:
            assert ended == [{"pushes failed": 1}] * 2
            assert d.wrong_bytes(fresh) == 0
            assert d.census()["grants"] == 0
            assert p.ask("open_holds") == 2  # shared tickets stay open: no word was said
            again = Prompt(3, 100, 20, 40)  # the two get along after that
            p.ask("open_gate")
            require_ok(d.load(p.hold(again), again))
        else:
            assert ended == [{"pushes done": 1}] * 2
            assert d.wrong_bytes(fresh) > 0


def ended_pushes(counters: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counters.items() if name.startswith("pushes")}


def test_a_consumer_is_stopped_past_the_lease_and_goes_on(way: Way) -> None:
    """Its source's blocks are another prompt's by then; what it moved must not be believed."""
    source = replace(way.p, lease_seconds=LEASE_SECONDS, gate_after=0)
    target = replace(way.d, gate_after=0)
    prompt, fresh = Prompt(1, 100, 1, 1), Prompt(2, 100, 1, 20)  # the same blocks of the source
    with producer(source) as p:
        d = Child.start("consumer", target, source)
        try:
            load = start_and_hold(p, d, prompt)
            way.mover(p, d).wait_at_gate()
            d.signal(signal.SIGSTOP)
            for reports in p.closed(1):
                assert [(one.why, one.silent) for one in reports] == [("expired", 1)]
            p.ask("fill", fresh)  # the blocks are reused
            d.signal(signal.SIGCONT)
            p.open_gate()
            d.open_gate()
            error = error_of(d.ask("wait", load)[0])
            assert "StaleTicket" in error or "refuses the offer" in error, error
            require_ok(d.ask("wait", start_and_hold(p, d, fresh))[0])
            # what came for the first is in its blocks, discarded; what came for the second is right
            assert d.ask("wrong_bytes_of", fresh) == 0
            d.stop()
        finally:
            d.kill()
        assert p.ask("open_holds") == 0


def test_a_producer_is_stopped_past_the_deadline_and_goes_on(way: Way) -> None:
    """Loads end by their deadline; it holds nothing that nobody wants when it is back.

    The lease is long enough for eight writes at once on a busy machine.
    """
    source = replace(way.p, lease_seconds=5 * LEASE_SECONDS)
    with producer(source) as p, consumer(way.d, source, alone=False) as d:
        warm_up(p, d)
        prompts = [Prompt(n, 100, 1, 1) for n in (1, 2)]
        before, before_p = census(d), census(p)
        for prompt in prompts:
            ticket = p.hold(prompt)
            p.signal(signal.SIGSTOP)
            with within(SILENT_SECONDS):
                error = error_of(d.load(ticket, prompt, seconds=SILENT_SECONDS))
            assert "DeadlineExceeded" in error
            p.signal(signal.SIGCONT)
            for reports in p.closed(1):  # told that it failed, or by the end of the lease
                assert reports[0].why in ("failed", "expired")
        again = Prompt(3, 100, 1, 1)
        require_ok(d.wait(start_and_hold(p, d, again))[0])
        assert d.wrong_bytes(again, WARM) == 0
        require_no_more(d, before)
        require_no_more(p, before_p)


# --- aborts --------------------------------------------------------------------------------------


def test_loads_are_given_up_at_every_moment(way: Way) -> None:
    """Each is reported once; its hold closes; a success has its bytes; nothing is left."""
    rng = random.Random(5)
    source, target = replace(way.p, blocks=200), replace(way.d, blocks=140)
    good = 0
    with producer(source) as p, consumer(target, source, alone=False) as d:
        warm_up(p, d)
        before, before_p = census(d), census(p)
        for number in range(1, 25):
            if number == 8:
                resident = d.resident_bytes()
            prompt = Prompt(number, 1500, src_first=70, dst_first=70)
            if number % 4:
                ticket = p.hold(prompt)
            else:  # the hold comes after the end, or during
                p.ask("fill", prompt)
                ticket = p.ticket(prompt)
            load = d.start(ticket, prompt)
            time.sleep(rng.choice((0.0, 0.001, 0.005, 0.02, 0.05)))
            d.cancel(load)
            if not number % 4:
                p.ask("open", prompt)
            loaded = d.wait(load)[0]
            ends = {"delivered"}
            if not error_of(loaded):
                good += 1
                assert d.wrong_bytes(prompt, WARM) == 0
            else:
                ends.add("failed")  # unless it was given up after its last word
            for reports in p.closed(1):
                assert len(reports) == 1 and reports[0].why in ends
        assert good < 24
        require_no_more(d, before)
        require_no_more(p, before_p)
        assert d.resident_bytes() - resident < MOST_GROWTH_BYTES
        again = Prompt(50, 100, 1, 1)
        require_ok(d.load(p.hold(again), again))


# --- what is refused -----------------------------------------------------------------------------


def _twice(p: Child, d: Consumer, ticket: Ticket, prompt: Prompt) -> Ticket:
    d.load(ticket, prompt)
    return ticket


REFUSED: dict[str, tuple[Callable[..., Ticket], str]] = {
    "stale": (_twice, "StaleTicket"),
    "restarted": (lambda p, d, t, x: replace(t, incarnation="zeroth"), "StaleTicket"),
    "another engine": (lambda p, d, t, x: replace(t, engine_id="q"), "StaleTicket"),
    "another prompt": (lambda p, d, t, x: replace(t, digest="other"), "another prompt"),
}


@pytest.mark.parametrize("way", ["local read", "tcp write"], indirect=True)
@pytest.mark.parametrize("case", REFUSED)
def test_tickets_that_are_refused_leave_nothing(way: Way, case: str) -> None:
    change, words = REFUSED[case]
    with producer(way.p) as p, consumer(way.d, way.p, alone=False) as d:
        warm_up(p, d)
        prompt, before, before_p = Prompt(1, 100), {}, census(p)
        bad = change(p, d, p.hold(prompt), prompt)
        with within(0.0):
            for _ in range(8):
                assert words in error_of(d.load(bad, prompt, keep_open=True))
                before = before or census(d)
        p.ask("withdraw", "hold-1")
        require_no_more(d, before)
        require_no_more(p, before_p)
        if case != "stale":
            assert d.wrong_bytes(WARM) == 0  # not a byte was written


@pytest.mark.parametrize("way", ["local read", "tcp write"], indirect=True)
@pytest.mark.parametrize("case", ["secret", "model", "silent", "nobody"])
def test_peers_that_are_refused_leave_nothing(way: Way, case: str) -> None:
    words = {
        "secret": "AuthenticationError",
        "model": "IncompatibleError",
        "silent": "DeadlineExceeded",
        "nobody": "PeerLost: no process listens",
    }[case]
    prompt, before = Prompt(1, 100), {}
    with contextlib.ExitStack() as stack:
        d = stack.enter_context(consumer(way.d, way.p, alone=False))
        good = stack.enter_context(producer(way.p))
        warm_up(good, d)
        if case in ("secret", "model"):
            other = replace(way.p, engine_id="o")
            changed = {
                "secret": {"secret": "a secret of others"},
                "model": {"meaning": (("weights", "w2"),)},
            }[case]
            bad = stack.enter_context(producer(replace(other, **changed)))
            ticket = bad.hold(prompt)
        else:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = silent.getsockname()[1]
            if case == "nobody":
                silent.close()
            ticket = make_ticket(replace(way.p, engine_id="o"), port, prompt)
        seconds = 0.3 if case == "silent" else PATIENCE_SECONDS
        with within(6 * 0.3):
            for _ in range(6):
                assert words in error_of(d.load(ticket, prompt, seconds=seconds))
                before = before or census(d)  # one connection may stay
        require_no_more(d, before)
        if case in ("secret", "model"):
            assert bad.ask("open_holds") == 2  # still there for who may read it
        again = Prompt(2, 100)
        require_ok(d.load(good.hold(again), again))
        assert d.wrong_bytes(again, WARM) == 0


# --- damaged bytes -------------------------------------------------------------------------------


class Damaging(WrappedCarrier):
    """A carrier on whose way one bit of each transfer flips, after it was checked by others."""

    def read(self, peer: Any, copies: Any) -> Any:
        transfer = self._carrier.read(peer, copies)
        transfer.wait(time.monotonic() + PATIENCE_SECONDS)
        ctypes.c_uint8.from_address(int(copies.dst[-1])).value ^= 1
        return transfer


@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "control: none"])
def test_a_damaged_payload_is_noticed_with_checksums(way: Way, checksums: bool) -> None:
    """In push mode too: with checksums, blocks are read. The control shows that it is damaged."""
    target = replace(way.d, checksums=checksums, mode=way.d.mode if checksums else "pull")
    prompt = Prompt(1, 100)
    with producer(way.p) as p, consumer(target, way.p, alone=False) as d:
        warm_up(p, d)
        before = census(d)
        carrier = d.racks[0].carrier
        d.known().carriers = [Damaging(carrier)]
        for known in list(d.known().engines.values()):
            d.known().forget(known)
        loaded = d.load(p.hold(prompt), prompt)
        if checksums:
            assert "ChecksumError" in error_of(loaded)
            for reports in p.closed(1):
                assert reports[0].outcomes == {"failed": 1}
        else:
            require_ok(loaded)
        assert d.wrong_bytes(prompt, WARM) > 0
        d.known().carriers = [carrier]
        for known in list(d.known().engines.values()):
            d.known().forget(known)
        again = replace(prompt, number=2)
        require_ok(d.load(p.hold(again), again))
        assert d.wrong_bytes(again, WARM) == 0
        require_no_more(d, before)


# --- many ----------------------------------------------------------------------------------------

PROCESSES, MEMBERS, LOADS = 8, 8, 2


@pytest.mark.parametrize("way", ["tcp read", "tcp write"], indirect=True)
def test_64_consumers_on_one_producer(way: Way) -> None:
    source = replace(way.p, shape="tp=1,block=16", idle_seconds=1.0)
    source = replace(source, blocks=4 * PROCESSES * MEMBERS * LOADS + 8)
    specs = [
        [replace(way.d, engine_id=f"d{x}-{y}", blocks=16) for y in range(MEMBERS)]
        for x in range(PROCESSES)
    ]
    with producer(source) as p, contextlib.ExitStack() as stack:
        before = census(p)
        crowds = [Child.start("crowd", crowd, source) for crowd in specs]
        for crowd in crowds:
            stack.callback(crowd.kill)
        numbers = iter(range(1, 10_000))
        work = [
            [
                [
                    (p.hold(prompt), prompt)
                    for n in range(LOADS)
                    for number in [next(numbers)]
                    for prompt in [Prompt(number, 40, 1 + 4 * number, 1 + 4 * n)]
                ]
                for _ in range(MEMBERS)
            ]
            for _ in range(PROCESSES)
        ]
        for crowd, todo in zip(crowds, work, strict=True):
            crowd.pipe.send(("load_all", (todo, PATIENCE_SECONDS), {}))
        for crowd in crowds:
            assert crowd.pipe.poll(2 * PATIENCE_SECONDS)
            fine, (errors, wrong, _) = crowd.pipe.recv()
            assert fine
            assert errors == []
            assert wrong == 0
        p.closed(PROCESSES * MEMBERS * LOADS)
        assert p.ask("census")["holds"] == 0
        for crowd in crowds:
            crowd.kill()
        require_no_more(p, before)
