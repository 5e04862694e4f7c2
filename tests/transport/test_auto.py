"""Which carrier is used for a peer."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from carrier_peer import KINDS, owner, soon
from msgspec.structs import replace

from handover_peers import LOOPBACK, Prompt, Spec, hold, memory_regions, said, side_by_side
from kvferry.carriers import Carrier, make_carrier
from kvferry.carriers.auto import connect, fastest_first, select
from kvferry.carriers.null import NullCarrier
from kvferry.errors import DeadlineExceeded, HandoverError, PermissionDenied, TransferError
from kvferry.handover import peers
from waiting import wait_until

SECRET = "a secret for these tests"


def test_the_fastest_that_connects_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    with owner(KINDS["local"]) as near, owner(KINDS["tcp"]) as far:
        offered = {"local": near.endpoint, "tcp": far.endpoint}
        ours = [make_carrier(n, secret=SECRET, host=LOOPBACK) for n in ("tcp", "local")]
        try:
            for some, expected in ((offered, "local"), ({"tcp": far.endpoint}, "tcp")):
                carrier, peer, *_ = connect(some, fastest_first(ours), soon(), "rank 7")
                assert carrier.name == expected
                carrier.disconnect(peer)
            near.kill()
            carrier, *_ = connect(offered, fastest_first(ours), soon(), "rank 8")
            assert carrier.name == "tcp"
            far.kill()
            with pytest.raises(HandoverError, match=r"tcp: .*local: "):
                connect(offered, ours, soon(10))
        finally:
            for one in ours:
                one.close()
    said = [r.getMessage() for r in caplog.records if ": carrier " in r.getMessage()]
    assert said[0].startswith("rank 7: carrier local")
    assert "ruled out: local: the peer does not offer it" in said[1]
    assert "rank 8: carrier tcp" in said[2]
    assert "is gone" in said[2]


class Scripted(Carrier):
    """A carrier that connects, or raises."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self._error = name, error

    def connect(self, endpoint: bytes, deadline: float) -> str:
        if self._error is not None:
            raise self._error
        return "a peer"


def test_one_carriers_fault_does_not_keep_the_next_from_being_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, tcp = Scripted("cuda", ZeroDivisionError("by nothing")), Scripted("tcp")
    forbidden = Scripted("local", PermissionDenied("the peer runs on another host"))
    offered = dict.fromkeys(("cuda", "local", "tcp"), b"")
    link = connect(offered, [broken, forbidden, tcp], soon(), "rank 3")
    assert link.carrier is tcp and "local: the peer runs on another host" in link.why
    assert "ZeroDivisionError" in caplog.text and "rank 3: carrier cuda failed" in caplog.text
    with pytest.raises(HandoverError, match="cuda: ZeroDivisionError: by nothing"):
        connect(offered, [broken], soon())


class Late(NullCarrier):
    """A carrier that does not connect in time at first."""

    asked = 0

    def connect(self, endpoint: bytes, deadline: float) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise DeadlineExceeded("its peer is busy")
        return super().connect(endpoint, deadline)


def test_loads_take_the_faster_way_once_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that was busy for the first handshake is not read by tcp for ever."""
    spec = Spec("p", carrier="tcp")
    prompts = [Prompt(n, 40, 4 * n, 4 * n) for n in range(1, 5)]
    with side_by_side(spec, target=Spec("d", carrier="tcp")) as (p, d):
        fast = NullCarrier(), Late()
        for carrier, engine in zip(fast, (p, d), strict=True):
            carrier.register(memory_regions(engine.racks[0].layout, engine.racks[0].memory))
        [info] = p.infos
        p.tell([replace(info, carriers={**info.carriers, "null": fast[0].endpoint()})])
        d.known().carriers = [fast[1], *d.known().carriers]
        for prompt in prompts[:2]:
            assert said(d.load(hold(p, prompt), prompt)[0]) == ""
        assert [name for name, _ in d.ranks[0].links] == ["tcp"] and fast[1].asked == 1
        monkeypatch.setattr(peers, "RETRY_SECONDS", 0.0)
        first = next(iter(d.known().engines.values()))
        first.retry_at = 0.0
        # as many handshakes with this address as may wait: the load must not fail of it
        monkeypatch.setattr(peers, "MOST_WAITING", 0)
        assert said(d.load(hold(p, prompts[2]), prompts[2])[0]) == ""
        monkeypatch.setattr(peers, "MOST_WAITING", 1024)
        assert said(d.load(hold(p, prompts[3]), prompts[3])[0]) == ""
        wait_until(lambda: [name for name, _ in d.ranks[0].links] == ["null"])
        again = Prompt(5, 40, 20, 20)
        assert said(d.load(hold(p, again), again)[0]) == ""
        assert d.wrong_bytes(*prompts, again) == 0
        for carrier in fast:
            carrier.close()


def test_the_order() -> None:
    by_tcp, by_rdma = (SimpleNamespace(name="mooncake", flavour=f) for f in ("tcp", "rdma"))
    others = {
        name: SimpleNamespace(name=name, flavour="") for name in ("tcp", "nixl", "local", "cuda")
    }
    given: list[Any] = [by_tcp, *others.values(), by_rdma]
    expected = [others["cuda"], others["local"], others["nixl"], by_rdma, others["tcp"], by_tcp]
    assert fastest_first(given) == expected


@pytest.mark.parametrize(
    ("name", "option"), [("local", "packing"), ("local", "force_fallback"), ("tcp", "packing")]
)
def test_former_options_are_accepted_and_have_no_effect(
    name: str, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_carrier(name, **{option: True}).close()
    (said,) = caplog.records
    assert said.getMessage() == f"carrier {name}: `{option}` has no effect any more; remove it"
    with pytest.raises(TransferError, match="has no option packing"):
        make_carrier("cuda", packing="auto")


def test_what_auto_opens() -> None:
    assert [(s.name, s.why_not) for s in select(["tcp", "pigeon"])] == [("tcp", ""), ("pigeon", "")]
    opened = {s.name for s in select(["auto"]) if not s.why_not}
    assert {"local", "tcp"} <= opened
    assert not opened & {"cuda", "nixl", "mooncake"}
    on_gpu = {s.name: s.why_not for s in select(["auto"], device=True)}
    assert on_gpu["local"] and not on_gpu["tcp"]
