"""The fleet by itself: who is there, who is next, who drains; nothing is sent."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import DescriptionError
from kvferry.router.api import EngineSpec
from kvferry.router.fleet.engines import LEAST_START_SECONDS, Fleet, UpstreamEngine
from router_cluster import QUICK, decoders


def spec(name: str, *roles: str, **more: object) -> EngineSpec:
    return EngineSpec(f"http://{name}", frozenset(roles or ("decode",)), **more)


def test_engines_come_change_drain_and_go() -> None:
    fleet = decoders("a")
    heard: list[tuple[str, str]] = []
    fleet.changed = lambda engine, kind: heard.append((kind, engine.url[-1]))
    (a,) = fleet.engines
    a.probed_well()
    b = fleet.add(spec("b", "prefill", "decode"))
    assert (b.role, fleet.with_role("prefill"), fleet.with_role("decode")) == (
        "prefill+decode",
        [b],
        [a, b],
    )
    b.probed_well()
    with pytest.raises(DescriptionError, match="in the fleet already, as prefill\\+decode"):
        fleet.add(spec("b"))
    fleet.change(b, spec("b", "prefill"))
    fleet.change(b, spec("b", "prefill"))  # nothing new
    assert fleet.pick("decode", besides={a}) is None and fleet.pick("prefill") is b
    with pytest.raises(DescriptionError, match="keeps its address"):
        fleet.change(b, spec("c"))
    a.in_flight = 1
    fleet.drain(a)
    assert not fleet.some_up("decode") and fleet.get("http://a") is a
    assert fleet.add(spec("a")) is a and fleet.some_up("decode")  # taken back
    fleet.drain(a, then="stay")
    a.in_flight = 0
    fleet.drain(a, then="stay")
    assert fleet.get("http://a") is a and not a.open
    fleet.drain(a)
    assert fleet.get("http://a") is None
    fleet.remove(a)  # once more is no mistake
    b.failed("gone", refused=True)
    assert heard == [
        ("up", "a"),
        ("added", "b"),
        ("up", "b"),
        ("changed", "b"),
        ("draining", "a"),
        ("changed", "a"),
        ("draining", "a"),
        ("draining", "a"),
        ("removed", "a"),
        ("down", "b"),
    ]


def test_a_drained_engine_stays_until_its_tickets_are_used() -> None:
    async def run() -> None:
        fleet = decoders("ab")
        a, b = fleet.engines
        a.tickets += 1
        fleet.drain(a)
        assert fleet.get(a.url) is a  # a stopped engine would break the hand-over
        fleet.ticket_ended(a)
        assert fleet.get(a.url) is None
        with fleet.reserved(b):
            fleet.drain(b)
            assert fleet.get(b.url) is b
        b.in_flight += 1  # the request goes there at once
        await asyncio.sleep(0)
        assert fleet.get(b.url) is b

    asyncio.run(run())


def test_a_listener_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fleet = decoders("")

    def broken(engine: UpstreamEngine, kind: str) -> None:
        raise ZeroDivisionError

    fleet.changed = broken
    fleet.add(spec("a"))
    assert [engine.url for engine in fleet.engines] == ["http://a"]
    assert "did not take in that http://a is added" in caplog.text


def test_weights_share_the_load() -> None:
    fleet = Fleet([spec("a", weight=3.0), spec("b")], QUICK)
    for engine in fleet.engines:
        engine.probed_well()
    for _ in range(40):
        picked = fleet.pick("decode")
        assert picked is not None
        picked.in_flight += 1
    assert [engine.in_flight for engine in fleet.engines] == [30, 10]


def test_an_engine_that_was_only_cut_off_was_not_restarted() -> None:
    """No one answered for it, and it is back sooner than an engine starts."""
    now = [100.0]
    fleet = decoders("a", clock=lambda: now[0])
    (a,) = fleet.engines
    a.probed_well()
    assert not a.restarted
    for away, refused, cut_off, restarted in (
        (2.0, True, True, False),
        (2.0, True, False, True),
        (2.0, False, True, False),
        (LEAST_START_SECONDS, True, True, True),
    ):
        for _ in range(QUICK.fail_after):
            a.failed("silent", refused=refused, cut_off=cut_off)
        now[0] += away
        for _ in range(QUICK.recover_after):
            a.probed_well()
        assert a.up and a.restarted == restarted


@pytest.mark.parametrize(
    ("error", "gone"),
    [(None, True), (OSError(113, "No route to host"), False), (TimeoutError(), False)],
)
def test_only_a_host_that_refuses_says_that_its_engine_has_ended(
    error: OSError | None, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        fleet = Fleet([EngineSpec("http://127.0.0.1:1", frozenset(["decode"]))], QUICK)
        if error is not None:

            async def fails(*_: object) -> None:
                raise error

            monkeypatch.setattr(fleet.transport, "_connect_to_any", fails)
        await fleet.probe_all()
        (engine,) = fleet.engines
        assert (engine.up, engine.gone) == (False, gone)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"roles": frozenset()}, "expected prefill, decode, or both"),
        ({"roles": frozenset(["router"])}, "expected prefill, decode, or both"),
        ({"events": "http://h:1"}, "expected tcp://host:port"),
        ({"events": "tcp://h:1\n"}, "expected tcp://host:port"),
        ({"replay": "tcp://h:1"}, "has replay and no events"),
        ({"weight": 0.0}, "the weight of http://h is 0.0"),
        ({"weight": float("nan")}, "the weight of http://h is nan"),
    ],
)
def test_specs_that_are_refused(more: dict, message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        EngineSpec(**{"url": "h", "roles": frozenset(["decode"])} | more)
