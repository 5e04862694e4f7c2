"""Hand-overs between processes without an engine: bytes, and every way to fail, in time."""

from __future__ import annotations

import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Literal

import pytest

from handover_peers import (
    MODELS,
    PATIENCE_SECONDS,
    SHORT_SECONDS,
    SILENT_SECONDS,
    SLACK_SECONDS,
    Child,
    Consumer,
    Prompt,
    Spec,
    consumer,
    make_ticket,
    producer,
    said,
    start_and_hold,
)
from kvferry.handover import load as pieces_module
from kvferry.handover.load import Loaded, Loading
from kvferry.handover.ticket import Ticket
from kvferry.layout.shape import EngineShape, Rank
from kvferry.net import rpc
from kvferry.plan import plan_pair
from vllm_engines import free_port
from waiting import require_for, wait_until

Mode = Literal["pull", "push"]

P = Spec("p", "tp=2,block=16")
D = Spec("d", "tp=1,block=24")

# Every test runs when consumers read and when producers write. Where a test names its carrier, push
# by one that cannot be revoked is a signal, and the consumer reads.
MODES = {"pull": ("local", "pull"), "push": ("tcp", "push")}


@pytest.fixture(params=MODES, autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    carrier, mode = MODES[request.param]
    monkeypatch.setattr(sys.modules[__name__], "P", replace(P, carrier=carrier))
    monkeypatch.setattr(sys.modules[__name__], "D", replace(D, carrier=carrier, mode=mode))
    return mode


def mover(p: Child, d: Consumer) -> Child | Consumer:
    """Whose carrier moves the bytes: that one has the gate."""
    return p if d.spec.is_written else d


def require_ok(loaded: list[Loaded]) -> None:
    assert [one.error for one in loaded] == [""] * len(loaded)


def require_failed(loaded: list[Loaded], *words: str) -> None:
    for one in loaded:
        assert any(word in said(one) for word in words), said(one)


def require_all_closed(child: Child, holds: int, why: str, outcome: str = "done") -> None:
    """Every rank has reported every hold once, and none is open."""
    for reports in child.closed(holds):
        assert len(reports) == holds
        assert len({one.hold_id for one in reports}) == holds
        assert {one.why for one in reports} == {why}
        if why in ("delivered", "failed"):
            assert all(set(one.outcomes) == {outcome} for one in reports)
    assert child.ask("open_holds") == 0
    assert not any(child.ask("closed"))


# --- bytes ---------------------------------------------------------------------------------------

SHAPES = [
    ("gqa", "tp=1,block=16", "tp=2,block=16"),
    ("gqa", "tp=2,block=16", "tp=1,block=16"),
    ("gqa", "pp=2,block=16", "tp=1,block=16"),
    ("gqa", "tp=3,block=16,order=LBNHC", "tp=4,block=24,order=LBHNC"),
    ("gqa", "tp=2,pp=2,block=32", "tp=3,pp=3,block=16,order=BLNHC,interior=split"),
    ("window", "tp=2,block=16", "tp=1,pp=2,block=16"),
    ("mla", "tp=3,block=16", "tp=4,block=24"),
    ("mla", "tp=8,block=24", "tp=1,block=16"),  # 5 layers: 3 sources are not read at all
]


@pytest.mark.parametrize("carrier", ["local", "tcp"])
@pytest.mark.parametrize(("model", "src", "dst"), SHAPES, ids=str)
def test_bytes_arrive_between_shapes(
    carrier: str, mode: Mode, model: str, src: str, dst: str
) -> None:
    source = Spec("p", src, model, carrier=carrier, secret="a secret for these tests")
    target = Spec("d", dst, model, carrier=carrier, secret="a secret for these tests", mode=mode)
    prompts = [
        Prompt(1, 200, src_first=1, dst_first=1),  # its last block is filled in part
        Prompt(2, 101, src_first=20, dst_first=20, skip=48),
        Prompt(3, 7, src_first=40, dst_first=40),
        Prompt(4, 96, src_first=45, dst_first=45),
    ]
    with producer(source) as p, consumer(target, source) as d:
        for prompt in prompts:
            loaded = d.load(p.hold(prompt), prompt)
            require_ok(loaded)
            assert {one.pushed for one in loaded} == {target.is_written}
        assert d.wrong_bytes(*prompts) == 0
        require_all_closed(p, len(prompts), "delivered")
        speakers = [counters.get("last words: done", 0) for counters in p.ask("counters")[:-1]]
        assert min(speakers) >= len(prompts)  # also ranks that nobody reads


def test_some_sources_above_are_not_read_at_all() -> None:
    model, src, dst = SHAPES[-1]
    pair = plan_pair(MODELS[model], EngineShape.parse(src), EngineShape.parse(dst))
    assert len({edge.src for edge in pair.edges}) == 5
    assert len(pair.src.ranks) == 8


def test_ranks_in_processes_of_their_own() -> None:
    first = replace(P, only=(Rank(0, 0),))
    second = replace(P, only=(Rank(0, 1),))
    prompt = Prompt(1, 100)
    with producer(first) as a, producer(second) as b, consumer(D, P) as d:
        a.ask("tell", a.infos + b.infos)
        ticket = a.hold(prompt)
        b.hold(prompt)
        require_ok(d.load(ticket, prompt))
        assert d.wrong_bytes(prompt) == 0
        for child in (a, b):
            require_all_closed(child, 1, "delivered")


def test_a_wrong_byte_would_be_seen() -> None:
    """The check itself: what one prompt left is not what another would have."""
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        require_ok(d.load(p.hold(prompt), prompt))
        assert d.wrong_bytes(prompt) == 0
        assert d.wrong_bytes(replace(prompt, number=2)) > 0
        assert d.wrong_bytes(replace(prompt, tokens=99)) > 0
        assert d.wrong_bytes(replace(prompt, dst_first=2)) > 0


@pytest.mark.parametrize("carrier", ["local", "tcp"])
def test_64_loads_at_once(carrier: str, mode: Mode) -> None:
    source = replace(P, carrier=carrier, blocks=300)
    target = Spec("d", "tp=3,block=24", carrier=carrier, blocks=300, mode=mode)
    prompts = [Prompt(n, 20 + n, 1 + 4 * n % 256, 1 + 4 * n % 256) for n in range(64)]
    prompts = [replace(x, tokens=min(x.tokens, 60)) for x in prompts]
    with producer(source) as p, consumer(target, source) as d:
        tickets = [p.hold(prompt) for prompt in prompts]
        ids = [d.start(t, x) for t, x in zip(tickets, prompts, strict=True)]
        for loaded in d.wait(*ids):
            require_ok(loaded)
        assert d.wrong_bytes(*prompts) == 0
        require_all_closed(p, 64, "delivered")
        assert p.ask("counters")[-1]["messages"] == 3  # one handshake a rank, for all loads


def test_loads_that_share_a_ticket_leave_it_open_until_it_is_released() -> None:
    prompt = Prompt(1, 100)
    places = [replace(prompt, dst_first=1 + 6 * n) for n in range(3)]
    target = replace(D, shape="tp=2,block=24")
    with producer(P) as p, consumer(target, P) as d:
        ticket = p.hold(prompt)
        ids = [
            d.start(ticket, place, keep_open=True, request_id=f"{n}_sample")
            for n, place in enumerate(places)
        ]
        for loaded in d.wait(*ids):
            require_ok(loaded)
        assert d.wrong_bytes(*places) == 0
        assert p.ask("open_holds") == 2
        assert not any(p.ask("closed"))
        d.release(ticket)
        require_all_closed(p, 1, "delivered", "not needed")
        require_failed(d.load(ticket, prompt), "StaleTicket")


def test_a_second_engine_keeps_the_hold_open() -> None:
    prompt = Prompt(1, 100)
    slow = replace(D, engine_id="slow", mode="pull", gate_after=0)
    with producer(P) as p, consumer(D, P) as d, consumer(slow, P, alone=False) as e:
        ticket = p.hold(prompt)
        late = e.start(ticket, prompt)
        e.wait_at_gate()
        require_ok(d.load(ticket, prompt))
        assert p.ask("open_holds") == 2
        e.open_gate()
        require_ok(e.wait(late)[0])
        assert d.wrong_bytes(prompt) + e.wrong_bytes(prompt) == 0
        for reports in p.closed(1):
            assert reports[0].outcomes == {"done": 2}


# --- claims that come early ----------------------------------------------------------------------


def test_a_claim_before_the_hold_is_parked_and_then_answered() -> None:
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        p.ask("fill", prompt)
        load = d.start(p.ticket(prompt), prompt)
        wait_until(lambda: p.ask("parked") == 2)
        assert d.pending(load)
        p.ask("open", prompt)
        require_ok(d.wait(load)[0])
        assert d.wrong_bytes(prompt) == 0
        require_all_closed(p, 1, "delivered")


def test_a_hold_that_never_comes_ends_the_load_by_its_deadline() -> None:
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        begun = time.monotonic()
        loaded = d.load(p.ticket(prompt), prompt, seconds=SHORT_SECONDS)
        require_failed(loaded, "StaleTicket", "DeadlineExceeded")
        assert time.monotonic() - begun < SHORT_SECONDS + SLACK_SECONDS
        wait_until(lambda: p.ask("parked") == 0)
        p.ask("open", prompt)  # it comes after all: nobody wants it any more, and it knows
        require_all_closed(p, 1, "failed", "failed")


def test_a_cancelled_load_ends_at_once_and_its_hold_closes_when_it_comes() -> None:
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        load = d.start(p.ticket(prompt), prompt, seconds=600.0)
        wait_until(lambda: p.ask("parked") == 2)
        begun = time.monotonic()
        d.cancel(load)
        require_failed(d.wait(load)[0], "Cancelled")
        assert time.monotonic() - begun < SLACK_SECONDS
        wait_until(lambda: p.ask("counters")[0].get("last words: failed"))
        p.ask("open", prompt)
        require_all_closed(p, 1, "failed", "failed")


@pytest.mark.parametrize("fails", ["", "the device failed"])
def test_a_load_cancelled_before_it_begins_never_begins(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the device; its engine is met, so nothing else would hold it up."""
    first, prompt = Prompt(1, 100), Prompt(2, 100)
    with producer(P) as p, consumer(D, P) as d:
        require_ok(d.load(p.hold(first), first))
        require_all_closed(p, 1, "delivered")
        monkeypatch.delattr(Loading, "run")
        load = d.start(p.hold(prompt), prompt, seconds=600.0, waits=True)
        d.cancel(load)
        assert d.pending(load) and all(rank.busy for rank in d.ranks)
        d.begin(fails)
        assert {one.error for one in d.wait(load)[0]} == {fails or "the request was given up"}
        require_all_closed(p, 1, "failed", "failed")
        assert not any(rank.take_done() or rank.busy for rank in d.ranks)


def test_a_load_that_must_not_begin_fails_once_and_its_sources_are_told() -> None:
    """The device failed before the step's orders became true."""
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        p.ask("open", prompt)
        why = "the device failed: an illegal memory access"
        load = d.start(p.ticket(prompt), prompt, seconds=600.0, fails=why)
        assert [one.error for one in d.wait(load)[0]] == [why]
        require_all_closed(p, 1, "failed", "failed")
        assert not any(rank.take_done() for rank in d.ranks)
        d.close()
        late = d.start(p.ticket(prompt), prompt, request_id="late")  # closed: reported, not lost
        require_failed(d.wait(late)[0], "Cancelled")


def test_a_release_before_the_hold_closes_it_when_it_comes() -> None:
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        d.release(p.ticket(prompt))
        wait_until(lambda: all(c.get("last words: not needed") for c in p.ask("counters")[:-1]))
        p.ask("open", prompt)
        require_all_closed(p, 1, "delivered", "not needed")


def test_a_hold_withdrawn_before_it_comes_refuses_the_claims_that_wait() -> None:
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        load = d.start(p.ticket(prompt), prompt, seconds=600.0)
        wait_until(lambda: p.ask("parked") == 2)
        p.ask("withdraw", "hold-1")
        require_failed(d.wait(load)[0], "the hold is closed (withdrawn)")
        p.ask("open", prompt)
        require_all_closed(p, 1, "withdrawn")


# --- holds that close during a read --------------------------------------------------------------


@pytest.mark.parametrize("keep_open", [False, True])
@pytest.mark.parametrize("carrier", ["local", "tcp"])
def test_a_hold_withdrawn_during_the_read_fails_the_load(carrier: str, keep_open: bool) -> None:
    prompt = Prompt(1, 100)
    source = replace(P, carrier=carrier, gate_after=0)
    with producer(source) as p, consumer(replace(D, carrier=carrier, gate_after=0), source) as d:
        load = d.start(p.hold(prompt), prompt, keep_open=keep_open)
        mover(p, d).wait_at_gate()
        p.ask("withdraw", "hold-1")
        require_all_closed(p, 1, "withdrawn")
        mover(p, d).open_gate()
        if d.spec.is_written:
            require_failed(d.wait(load)[0], "refuses the offer", "the hold is closed")
        else:
            require_failed(d.wait(load)[0], "StaleTicket: rank (0, 0) closed the hold")
            assert d.wrong_bytes(prompt) == 0  # all bytes came; they must not be believed


def test_a_hold_that_expires_during_the_read_fails_the_load() -> None:
    prompt = Prompt(1, 100)
    source = replace(P, lease_seconds=1.0, gate_after=0)
    with producer(source) as p, consumer(replace(D, gate_after=0), source) as d:
        load = start_and_hold(p, d, prompt)
        mover(p, d).wait_at_gate()
        require_all_closed(p, 1, "expired")
        mover(p, d).open_gate()
        require_failed(d.wait(load)[0], "StaleTicket", "refuses the offer")


def test_a_load_cancelled_during_the_read_fails_and_tells_the_sources() -> None:
    prompt = Prompt(1, 100)
    with producer(replace(P, gate_after=0)) as p, consumer(replace(D, gate_after=0), P) as d:
        load = d.start(p.hold(prompt), prompt)
        mover(p, d).wait_at_gate()
        d.cancel(load)
        if d.spec.is_written:  # needs no word from the writer, which stands at its gate
            wait_until(lambda: not d.pending(load))
        mover(p, d).open_gate()
        require_failed(d.wait(load)[0], "Cancelled")
        require_all_closed(p, 1, "failed", "failed")


# --- producers that die --------------------------------------------------------------------------


def test_a_producer_that_was_killed_before_the_claim() -> None:
    prompts = [Prompt(1, 100), Prompt(2, 100)]
    other = replace(D, engine_id="e")
    with producer(P) as p, consumer(D, P) as d, consumer(other, P, alone=False) as e:
        tickets = [p.hold(prompt) for prompt in prompts]
        require_ok(d.load(tickets[0], prompts[0]))
        p.kill()
        begun = time.monotonic()
        require_failed(d.load(tickets[1], prompts[1]), "PeerLost")  # it had met it
        require_failed(d.load(tickets[1], prompts[1]), "PeerLost: no process listens")
        require_failed(e.load(tickets[1], prompts[1]), "PeerLost: no process listens")
        assert time.monotonic() - begun < SLACK_SECONDS


def test_a_producer_that_is_killed_while_a_claim_waits() -> None:
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        load = d.start(p.ticket(prompt), prompt, seconds=600.0)
        wait_until(lambda: p.ask("parked") == 2)
        begun = time.monotonic()
        p.kill()
        require_failed(d.wait(load)[0], "PeerLost")
        assert time.monotonic() - begun < SLACK_SECONDS


def test_a_producer_that_falls_silent_is_lost_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host died, say: no connection breaks, but heartbeats stay away."""
    monkeypatch.setattr(rpc, "HEARTBEAT_MS", 200)
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        load = d.start(p.ticket(prompt), prompt, seconds=600.0)
        wait_until(lambda: p.ask("parked") == 2)
        p.signal(signal.SIGSTOP)
        begun = time.monotonic()
        require_failed(d.wait(load)[0], "PeerLost")
        assert time.monotonic() - begun < SLACK_SECONDS
        p.kill()


@pytest.mark.parametrize("carrier", ["local", "tcp"])
def test_a_producer_that_is_killed_during_the_read(
    carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "SLICE_DESCRIPTORS", 64)
    prompt = Prompt(1, 200)
    source = replace(P, carrier=carrier, gate_after=5, slice_descriptors=64)
    with producer(source) as p, consumer(replace(D, carrier=carrier, gate_after=5), source) as d:
        load = d.start(p.hold(prompt), prompt)
        mover(p, d).wait_at_gate()
        p.kill()
        begun = time.monotonic()
        d.open_gate()
        require_failed(d.wait(load)[0], "PeerLost")
        assert time.monotonic() - begun < SLACK_SECONDS


def test_a_producer_that_stops_during_a_long_read() -> None:
    """It is stopped at some moment of a big transfer; wherever that is, the load fails in time.

    On a busy machine, a load may be over before this process stops its source. Then another load
    begins, and its source is stopped at once.
    """
    source = Spec("p", "tp=1,block=16", carrier="tcp", blocks=1300, gate_after=0)
    target = replace(D, carrier="tcp", blocks=900, gate_after=0)
    with producer(source) as p, consumer(target, source) as d:
        for number in range(1, 11):
            prompt = Prompt(number, 20_000)
            load = d.start(p.hold(prompt), prompt, seconds=2.0)
            if number == 1:
                mover(p, d).wait_at_gate()
                mover(p, d).open_gate()
                time.sleep(0.02)
            p.signal(signal.SIGSTOP)
            begun = time.monotonic()
            loaded = d.wait(load)[0]
            if any(one.error for one in loaded):
                break
            p.signal(signal.SIGCONT)
        require_failed(loaded, "DeadlineExceeded", "PeerLost")
        assert time.monotonic() - begun < 2.0 + SLACK_SECONDS
        p.kill()


def test_a_producer_that_is_stopped_past_the_deadline_and_goes_on() -> None:
    prompts = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20)]
    with producer(P) as p, consumer(D, P) as d:
        tickets = [p.hold(prompt) for prompt in prompts]
        p.signal(signal.SIGSTOP)
        begun = time.monotonic()
        loaded = d.load(tickets[0], prompts[0], seconds=SILENT_SECONDS)
        require_failed(loaded, "DeadlineExceeded")
        assert SILENT_SECONDS * 0.9 < time.monotonic() - begun < SILENT_SECONDS + SLACK_SECONDS
        p.signal(signal.SIGCONT)
        require_ok(d.load(tickets[1], prompts[1]))
        assert d.wrong_bytes(prompts[1]) == 0


def test_tickets_of_a_producer_that_was_restarted_are_stale() -> None:
    prompts = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20), Prompt(3, 100, 40, 40)]
    first = replace(P, port=free_port())
    with producer(first) as p, consumer(D, P, alone=False) as d:
        tickets = [p.hold(prompt) for prompt in prompts]
        require_ok(d.load(tickets[0], prompts[0]))
        p.kill()
        with producer(replace(first, incarnation="second")) as q:
            require_failed(d.load(tickets[1], prompts[1]), "PeerLost")
            require_failed(d.load(tickets[1], prompts[1]), "StaleTicket: engine 'p' was restarted")
            require_ok(d.load(q.hold(prompts[2]), prompts[2]))
            assert d.wrong_bytes(prompts[0], prompts[2]) == 0
            require_all_closed(q, 1, "delivered")


# --- consumers that die --------------------------------------------------------------------------


def test_the_holds_of_a_consumer_that_is_killed_expire_once() -> None:
    source = replace(P, lease_seconds=1.0, gate_after=0)
    target = replace(D, gate_after=0)
    prompts = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20)]
    with producer(source) as p:
        d = Child.start("consumer", target, source)
        try:
            start_and_hold(p, d, prompts[0])  # stands before its first byte
            (p if target.is_written else d).wait_at_gate()
        finally:
            d.kill()
            d.pipe.close()
        p.open_gate()
        require_all_closed(p, 1, "expired")
        with consumer(D, source) as e:  # the producer serves the next
            require_ok(e.wait(start_and_hold(p, e, prompts[1]))[0])
            assert e.wrong_bytes(prompts[1]) == 0
            require_all_closed(p, 1, "delivered")


# --- peers that do not belong together -----------------------------------------------------------

ONE, OTHER = "one secret of engines", "another secret of engines"


@pytest.mark.parametrize(("ours", "theirs"), [(ONE, OTHER), (None, OTHER), (ONE, None)])
def test_peers_without_the_same_secret_are_refused_at_once(
    ours: str | None, theirs: str | None
) -> None:
    source, target = replace(P, secret=theirs), replace(D, secret=ours)
    prompt = Prompt(1, 100)
    with producer(source) as p, consumer(target, source) as d:
        ticket = p.hold(prompt)
        begun = time.monotonic()
        require_failed(d.load(ticket, prompt), "AuthenticationError")
        assert time.monotonic() - begun < SLACK_SECONDS
        counters = p.ask("counters")
        assert not any(c.get("messages") for c in counters)  # nothing of it came through
        wait_until(lambda: p.ask("open_holds") == 2)


def test_without_a_secret_no_other_host_is_asked() -> None:
    prompt = Prompt(1, 100)
    ticket = replace(make_ticket(P, 9, prompt), host="192.0.2.1")
    with consumer(D, P) as d:
        require_failed(d.load(ticket, prompt), "AuthenticationError: the peer '192.0.2.1' is on")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(P, meaning=(("weights", "w2"),)), ("weights", "'w1'", "'w2'")),
        (replace(P, meaning=(("weights", "w1"), ("rope", "9"))), ("rope", "None", "'9'")),
        (replace(P, content="fp8"), ("content of component 'k'", "bf16", "fp8")),
        (replace(P, model="mla"), ("is on one side only", "'gqa'", "'mla'")),
    ],
    ids=["weights", "rope", "dtype", "model"],
)
def test_other_engines_are_refused(other: Spec, words: tuple[str, ...]) -> None:
    prompt = Prompt(1, 100)
    with producer(other) as p, consumer(D, P) as d:
        loaded = d.load(p.ticket(prompt), prompt)
        require_failed(loaded, "IncompatibleError: ")
        assert all(word in said(loaded[0]) for word in words), said(loaded[0])


def test_another_prompts_ticket_is_refused() -> None:
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        ticket = p.hold(prompt)
        for bad in (replace(ticket, digest="other"), replace(ticket, tokens=101)):
            require_failed(
                d.load(bad, replace(prompt, tokens=bad.tokens), keep_open=True),
                "HandoverError: rank (0, 0) refuses the claim: the ticket is for another prompt",
                "refuses the offer: the ticket is for another prompt",  # whichever says so first
                "HandoverError: the ticket promises 101 tokens, rank (0, 0) holds 100",
                "refuses the offer: the ticket promises 101 tokens, this rank holds 100",
            )
        assert d.wrong_bytes() == 0  # not a byte was written
        require_ok(d.load(ticket, prompt))


def test_a_state_is_of_all_tokens_or_of_none() -> None:
    """A ticket that was cut shorter would get the state of more tokens than it names."""
    source, target = replace(P, model="mamba2"), replace(D, model="mamba2")
    prompt = Prompt(1, 100)
    with producer(source) as p, consumer(target, source) as d:
        ticket = p.hold(prompt)
        require_failed(
            d.load(replace(ticket, tokens=99), replace(prompt, tokens=99), keep_open=True),
            "HandoverError: the ticket promises 99 tokens, rank (0, 0) holds 100",
            "refuses the offer: the ticket promises 99 tokens, this rank holds 100",
        )
        assert d.wrong_bytes() == 0
        require_ok(d.load(ticket, prompt))
        assert d.wrong_bytes(prompt) == 0


def test_a_ticket_with_a_wrong_address_fails_alone() -> None:
    """It names the right engine, so that others wait for its handshake; they make their own."""
    prompts = [Prompt(1, 100, 1, 1), Prompt(2, 100, 20, 20)]
    with producer(P) as p, consumer(D, P) as d:
        tickets = [p.hold(prompt) for prompt in prompts]
        with socket.create_server(("127.0.0.1", 0)) as silent:
            bad = replace(tickets[0], port=silent.getsockname()[1])
            load = d.start(bad, prompts[0], seconds=SHORT_SECONDS)
            silent.settimeout(PATIENCE_SECONDS)
            with silent.accept()[0]:  # it waits for an answer now
                require_ok(d.load(tickets[1], prompts[1]))
                require_failed(d.wait(load)[0], "DeadlineExceeded", "PeerLost")
        assert d.wrong_bytes(prompts[1]) == 0


def test_a_ticket_that_names_another_engines_directory_is_stale() -> None:
    prompt = Prompt(1, 100)
    with producer(P) as p, consumer(D, P) as d:
        ticket = replace(p.hold(prompt), engine_id="q")
        require_failed(d.load(ticket, prompt), "StaleTicket: the ticket is of engine 'q'")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_peer_that_never_answers(host: str) -> None:
    prompt = Prompt(1, 100)
    with socket.create_server(("127.0.0.1", 0)) as silent, consumer(D, P) as d:
        ticket = replace(make_ticket(P, silent.getsockname()[1], prompt), host=host)
        begun = time.monotonic()
        loaded = d.load(ticket, prompt, seconds=SILENT_SECONDS)
        require_failed(loaded, "DeadlineExceeded")
        assert time.monotonic() - begun < SILENT_SECONDS + SLACK_SECONDS


def test_addresses_that_are_none_end_the_load() -> None:
    prompt = Prompt(1, 100)
    spec = replace(D, secret="a secret for these tests")
    with consumer(spec, P) as d:
        for host in ("no-such-host.invalid", "a b", "x" * 400, "[::"):
            ticket = Ticket(**{**_fields(make_ticket(P, 9, prompt)), "host": host})
            require_failed(
                d.load(ticket, prompt, seconds=SHORT_SECONDS), "PeerLost", "DeadlineExceeded"
            )


def _fields(ticket: Ticket) -> dict[str, object]:
    return {name: getattr(ticket, name) for name in ticket.__slots__}


def test_a_directory_that_does_not_know_its_ranks_yet() -> None:
    prompt, seconds = Prompt(1, 100), 4 * SHORT_SECONDS  # the directory is to answer in time
    with producer(replace(P, told=False)) as p, consumer(D, P) as d:
        ticket = p.hold(prompt)
        begun = time.monotonic()
        require_failed(
            d.load(ticket, prompt, seconds=seconds), "does not know its ranks [(0, 0), (0, 1)] yet"
        )
        assert time.monotonic() - begun < seconds + SLACK_SECONDS
        load = d.start(ticket, prompt)
        require_for(0.3, lambda: d.pending(load))
        p.ask("tell")
        require_ok(d.wait(load)[0])
        assert d.wrong_bytes(prompt) == 0


def test_closing_ends_all_loads_soon() -> None:
    """`consumer` sees that threads and sockets go."""
    with producer(P) as p, consumer(D, P) as d:
        for number in range(12):
            prompt = Prompt(number, 10)
            d.start(p.ticket(prompt), prompt, seconds=600.0)
        wait_until(lambda: p.ask("parked") == 24)
        begun = time.monotonic()
        d.close()
        assert time.monotonic() - begun < SLACK_SECONDS


def test_many_loads_of_a_dead_peer_do_not_hold_up_others() -> None:
    other = replace(P, engine_id="q", shape="tp=1,block=16")
    prompts = [Prompt(n, 10, dst_first=n) for n in range(1, 21)]
    with producer(P) as stopped, producer(other) as p, consumer(D, P) as d:
        stopped.signal(signal.SIGSTOP)
        slow = [d.start(stopped.ticket(x), x, seconds=600.0) for x in prompts]
        prompt = Prompt(99, 100, dst_first=30)
        require_ok(d.load(p.hold(prompt), prompt))
        assert all(map(d.pending, slow))
        for load in slow:
            d.cancel(load)
        for loaded in d.wait(*slow):
            require_failed(loaded, "Cancelled")
        stopped.kill()
