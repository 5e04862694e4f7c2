"""The life of requests under vLLM's real scheduler, with real transfers and without a model.

Every answer is compared with what any engine must answer (`expected`), so it shows where the bytes
of a cache came from; after every test, no block is held, and no id was reported twice. All of it
twice: where the decode engine reads, and where the prefill engine writes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")

    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from modelless import Modelless, child, expected, run

from ipv6 import has_ipv6
from kvferry.handover.consumer import ConsumerRank
from kvferry.handover.load import ConsumerStats
from kvferry.handover.ticket import FORMAT
from kvferry.handover.wakeup import WhenReady
from kvferry.vllm.bootstrap import Bootstrap
from kvferry.vllm.connector import NOT_FOR_OTHERS
from kvferry.vllm.metadata import FerryReport
from tiny_models import make_model
from vllm_engines import free_port
from vllm_pairs import mooncake_decode, post, reaches

pytestmark = pytest.mark.filterwarnings("ignore")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def wanted_by(ferry: Any) -> dict[str, Any]:
    """Of each request that has a ticket, what is to be loaded."""
    return ferry.consuming.wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


class Pairs:
    """Engines of a test, ended and checked after it."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.mode, self.engines = folder, mode, []

    def __call__(self, name: str, **options: Any) -> Modelless:
        engine = Modelless(name, self.folder, **{"mode": self.mode, **options})
        self.engines.append(engine)
        return engine

    def pair(self, **options: Any) -> tuple[Modelless, Modelless]:
        return self("p", **options), self("d", **{**options, "block_size": 8, "blocks": 128})


@pytest.fixture(params=["pull", "push"])
def make(folder: Path, request: pytest.FixtureRequest) -> Iterator[Pairs]:
    pairs = Pairs(folder, request.param)
    yield pairs
    try:
        run(*pairs.engines, until=lambda: not any(e.used_blocks for e in pairs.engines))
        for engine in pairs.engines:
            assert not engine.scheduler.requests
            for ferry in [c.handover for c in engine.children if getattr(c, "STYLE", None)]:
                assert ferry.producing.held_blocks == 0 and not ferry.producing.held
                assert not wanted_by(ferry)
                run(engine, until=lambda: not ferry.consuming.unsettled)  # noqa: B023
    finally:
        for engine in pairs.engines:
            engine.close()


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 131 + i * 17) % 997 for i in range(count)]


def prefilled(engine: Modelless, name: str, tokens: list[int], **params: Any) -> dict[str, Any]:
    engine.add(name, tokens, 1, **{**PREFILL, **params})
    run(engine, until=lambda: name in engine.ended)
    return engine.params.get(name, {})


def loads(engine: Modelless) -> int:
    return sum(engine.told("loads"))


def test_abandoned_loads_are_told_until_they_have_ended(
    make: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told = make("d"), []
    for abandoned in (ConsumerStats(abandoned_now=1, quarantined_blocks=5), ConsumerStats()):
        monkeypatch.setattr(ConsumerRank, "stats", lambda _, now=abandoned: now)
        name = f"r{len(told)}"
        engine.add(name, prompt(1, 20), 2)
        run(engine, until=lambda: name in engine.ended)  # noqa: B023
        by_reporter: dict[str, dict[str, int]] = {}
        for levels in engine.told("levels"):
            by_reporter |= levels
        (worker,) = (levels for levels in by_reporter.values() if "claims_parked" in levels)
        told.append((worker["loads_abandoned"], worker["blocks_quarantined"]))
    assert told == [(1, 5), (0, 0)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_handed_over(make: Pairs, asynchronous: bool) -> None:
    """In chunks, to other blocks, with both kinds of scheduling; another prompt answers else."""
    p, d = make.pair(asynchronous=asynchronous)
    for seed, count in ((1, 5), (2, 150), (3, 64)):
        tokens = prompt(seed, count)
        d.add(f"d{seed}", tokens, 6, **prefilled(p, f"p{seed}", tokens))
        run(p, d, until=lambda: f"d{seed}" in d.ended)  # noqa: B023
        assert d.tokens[f"d{seed}"] == expected(tokens, 6)
        assert d.tokens[f"d{seed}"] != expected(prompt(seed + 50, count), 6)
    assert loads(d) == 3
    assert p.pushes == (3 if make.mode == "push" else 0)


class Device:
    """A device that computes until a test lets it end."""

    def __init__(self, engine: Modelless) -> None:
        self.idle, self.worker = threading.Event(), engine.workers[0]
        self.worker.ready = WhenReady(gpu=True, record=lambda: self)

    def record(self) -> None: ...

    def synchronize(self) -> None:
        assert self.idle.wait(30)


def test_vllm_counts_hits_by_where_they_come_from(make: Pairs) -> None:
    p, d = make.pair()
    ask, told = d.connector.get_external_cache_hit_sources, {}
    d.connector.get_external_cache_hit_sources = lambda request, count: told.setdefault(
        request.request_id, ask(request, count)
    )
    tokens = prompt(1, 150)
    d.add("d", tokens, 2, **prefilled(p, "p", tokens))
    run(p, d, until=lambda: "d" in d.ended)
    assert told == {"d": {CacheHitSource.P2P: 150}}
    from_the_pool: Any = SimpleNamespace(request_id="e")  # as no hand-over loads it
    assert ask(from_the_pool, 16) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 16}
    assert ask(from_the_pool, 0) == {}


def test_a_prompt_is_read_while_its_engine_computes_others(make: Pairs) -> None:
    """Steps are queued on the device one after another: a load that waited for the last of them
    would wait as long as the engine has prompts to compute. What vLLM calls after it has launched a
    step comes too late."""
    p, d = make.pair()
    device, tokens = Device(p), prompt(8, 40)
    for side in (*p.worker_sides, *d.worker_sides):
        side.start_load_kv = lambda *_: None
    d.add("d", tokens, 3, **prefilled(p, "p", tokens))
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 3) and loads(d) == 1
    device.idle.set()


def test_a_prompt_whose_blocks_are_written_later_is_not_read_before(make: Pairs) -> None:
    """As a draft model writes into them, after the token that vLLM tells its scheduler of."""
    p, d = make.pair()
    device, tokens = Device(p), prompt(9, 40)
    device.worker._written_late = True
    d.add("d", tokens, 3, **prefilled(p, "p", tokens))
    run(p, d, until=lambda: p.parked_claims)
    assert not loads(d)
    device.idle.set()
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 3) and loads(d) == 1


def test_a_load_waits_until_earlier_steps_have_left_its_blocks(make: Pairs) -> None:
    p, d = make.pair()
    device, tokens = Device(d), prompt(11, 40)
    d.add("d", tokens, 3, **prefilled(p, "p", tokens))
    for _ in range(20):
        p.step()
        d.step()
    assert not loads(d) and not p.parked_claims and p.used_blocks
    device.idle.set()
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 3) and loads(d) == 1


def test_a_load_is_given_up_while_the_device_computes(make: Pairs) -> None:
    p, d = make.pair()
    prefill, decode, tokens = Device(p), Device(d), prompt(12, 40)
    prefill.worker._written_late = True  # so the load waits for the hold
    decode.idle.set()
    d.add("d", tokens, 3, **prefilled(p, "p", tokens))
    run(p, d, until=lambda: p.parked_claims)
    decode.idle.clear()
    d.abort("d")
    run(p, d, until=lambda: not d.used_blocks, seconds=10)
    prefill.idle.set()
    run(p, d, until=lambda: not p.used_blocks, seconds=10)
    assert not loads(d)
    decode.idle.set()


def test_a_load_given_up_before_it_begins_tells_its_source(make: Pairs) -> None:
    p, d = make.pair()
    device, tokens = Device(d), prompt(13, 40)
    d.add("d", tokens, 3, **prefilled(p, "p", tokens))
    for _ in range(3):
        d.step()
    d.abort("d")
    for _ in range(3):
        d.step()
    assert d.used_blocks  # until the load is reported
    device.idle.set()
    run(p, d, until=lambda: not p.used_blocks and not d.used_blocks, seconds=10)
    assert not loads(d)


def test_at_a_stop_token(make: Pairs) -> None:
    p, d = make.pair()
    tokens = prompt(4, 40)
    request = p.add("p", tokens, 1, **PREFILL)
    request.sampling_params.stop_token_ids = expected(tokens, 1)
    request.sampling_params.update_from_generation_config({}, None)
    run(p, until=lambda: "p" in p.ended)
    d.add("d", tokens, 3, **p.params["p"])
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 3) and loads(d) == 1


def test_what_is_here_already_is_not_loaded(make: Pairs) -> None:
    """A full hit gives the ticket back; a partial one loads the rest."""
    p, d = make.pair()
    tokens = prompt(5, 64)
    d.add("before", [*tokens, 1], 1)
    run(d, until=lambda: "before" in d.ended)
    params = prefilled(p, "full", tokens)
    d.add("full", tokens, 3, **params)
    longer = tokens + prompt(6, 50)
    d.add("partial", longer, 3, **prefilled(p, "partial", longer))
    run(p, d, until=lambda: {"full", "partial"} <= set(d.ended))
    assert d.tokens["full"] == expected(tokens, 3)
    assert d.tokens["partial"] == expected(longer, 3)
    assert sum(d.told("bytes")) <= (8 + 50 + 8) * 8 * 2  # never what was here
    run(p, d, until=lambda: p.used_blocks == 0)


def test_preempted_after_loading(make: Pairs) -> None:
    p = make("p")
    d = make("d", blocks=24, block_size=8)
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        d.add(name, prompt(10 + i, 30), 40, **prefilled(p, name, prompt(10 + i, 30)))
    run(p, d, until=lambda: set(names) <= set(d.ended))
    for i, name in enumerate(names):
        assert d.tokens[name] == expected(prompt(10 + i, 30), 40)
    assert loads(d) == 4  # each once: what was lost is computed


def test_more_prefills_than_memory(make: Pairs) -> None:
    """Chunked prefills compete for blocks that holds keep: each comes through."""
    p, d = make("p", blocks=24, max_held_blocks=0), make("d", blocks=256, block_size=8)
    names = [f"r{i}" for i in range(8)]
    for i, name in enumerate(names):
        p.add(name, prompt(20 + i, 150), 1, **PREFILL)
    sent: set[str] = set()

    def forward() -> bool:
        for i, name in enumerate(names):
            if name in p.params and name not in sent:
                sent.add(name)
                d.add(name, prompt(20 + i, 150), 2, **p.params[name])
        return set(names) <= set(d.ended)

    run(p, d, until=forward)
    for i, name in enumerate(names):
        assert d.tokens[name] == expected(prompt(20 + i, 150), 2)
    assert loads(d) == 8


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_aborted_on_the_decode_engine(make: Pairs, after: int) -> None:
    """After so many steps: queued, loading, loaded; the producer gets its blocks back."""
    p, d = make.pair()
    tokens = prompt(30, 100)
    d.add("d", tokens, 5, **prefilled(p, "p", tokens))
    for _ in range(after):
        d.step()
    d.abort("d")
    run(p, d, until=lambda: p.used_blocks == 0 and d.used_blocks == 0)
    d.add("again", tokens, 3, **prefilled(p, "again", tokens))
    run(p, d, until=lambda: "again" in d.ended)
    assert d.tokens["again"] == expected(tokens, 3)


@pytest.mark.parametrize("after", [0, 1])
def test_aborted_on_the_prefill_engine(make: Pairs, after: int) -> None:
    """No ticket, no hold."""
    p = make("p")
    p.add("p", prompt(31, 200), 1, **PREFILL)
    for _ in range(after):
        p.step()
    p.abort("p")
    run(p, until=lambda: p.used_blocks == 0)
    assert "p" not in p.params


def mooncake(make: Pairs) -> tuple[Modelless, Modelless, dict[str, Any]]:
    port = free_port()
    p = make("p", connector="MooncakeConnector", bootstrap_port=port)
    d = make("d", connector="MooncakeConnector", role="kv_consumer", blocks=128, block_size=8)
    where = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p"}
    return p, d, {**where, "remote_bootstrap_addr": f"http://127.0.0.1:{port}"}


def asked(p: Modelless, d: Modelless) -> None:
    """Until the decode engine asks the prefill engine for a prompt. It owns no block meanwhile."""
    run(d, until=lambda: any(one.early and one.ranks for one in renewed_by(d).values()))
    assert not d.used_blocks and not p.parked_claims


def renewed_by(engine: Modelless) -> dict[Any, Any]:
    return engine.ferry.consuming.renewer._engines


class TestAtOnce:
    def test_the_decode_engine_first(self, make: Pairs) -> None:
        p, d, where = mooncake(make)
        tokens = prompt(40, 150)
        d.add("d", tokens, 4, transfer_id="t", **where)
        asked(p, d)
        p.add("p", tokens, 1, **PREFILL, transfer_id="t")
        run(p, d, until=lambda: "d" in d.ended)
        assert d.tokens["d"] == expected(tokens, 4) and loads(d) == 1

    def test_known_at_another_engines_bootstrap(self, make: Pairs) -> None:
        """No port of one's own is needed to register elsewhere."""
        elsewhere = Bootstrap(None, 0, None)
        try:
            p = make("p", bootstrap_server=f"127.0.0.1:{elsewhere.port}")
            d = make("d", connector="MooncakeConnector", role="kv_consumer", blocks=128)
            tokens = prompt(46, 150)
            prefilled(p, "p", tokens, transfer_id="t")
            where = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p"}
            address = f"http://127.0.0.1:{elsewhere.port}"
            d.add("d", tokens, 4, transfer_id="t", **where, remote_bootstrap_addr=address)
            run(p, d, until=lambda: "d" in d.ended)
            assert d.tokens["d"] == expected(tokens, 4) and loads(d) == 1
        finally:
            elsewhere.close()

    @pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
    def test_at_an_address_of_ipv6(self, make: Pairs) -> None:
        port = free_port()
        p = make("p", connector="MooncakeConnector", bootstrap_port=port, host="::1")
        d = make("d", connector="MooncakeConnector", role="kv_consumer", blocks=128)
        tokens = prompt(47, 150)
        prefilled(p, "p", tokens, transfer_id="t")
        where = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p"}
        address = f"http://[::1]:{port}"
        d.add("d", tokens, 4, transfer_id="t", **where, remote_bootstrap_addr=address)
        run(p, d, until=lambda: "d" in d.ended)
        assert d.tokens["d"] == expected(tokens, 4) and loads(d) == 1

    def test_an_id_serves_once(self, make: Pairs) -> None:
        p, d, where = mooncake(make)
        first, second = prompt(41, 60), prompt(42, 60)
        for name, tokens in (("1", first), ("2", second)):
            told = prefilled(p, f"p{name}", tokens, transfer_id="t")
            d.add(f"d{name}", tokens, 4, transfer_id="t", **where)
            run(p, d, until=lambda: f"d{name}" in d.ended)  # noqa: B023
            assert d.tokens[f"d{name}"] == expected(tokens, 4)
        assert "was used before" in told["kvferry"]["not_held"]
        assert loads(d) == 1

    def test_another_prompt_is_not_taken(self, make: Pairs) -> None:
        p, d, where = mooncake(make)
        prefilled(p, "p", prompt(43, 60), transfer_id="t")
        d.add("d", prompt(44, 60), 4, transfer_id="t", **where)
        run(p, d, until=lambda: "d" in d.ended)
        assert d.tokens["d"] == expected(prompt(44, 60), 4) and loads(d) == 0

    def test_an_aborted_prefill_ends_the_wait(self, make: Pairs) -> None:
        p, d, where = mooncake(make)
        tokens = prompt(45, 200)
        d.add("d", tokens, 4, transfer_id="t", **where)
        asked(p, d)
        p.add("p", tokens, 1, **PREFILL, transfer_id="t")
        p.step()
        p.abort("p")
        run(p, d, until=lambda: "d" in d.ended, seconds=10)  # long before the load's deadline
        assert d.tokens["d"] == expected(tokens, 4) and loads(d) == 0

    def test_aborted_before_its_producer_is_found(self, make: Pairs) -> None:
        """The producer's blocks come back all the same, though nobody ever claimed them."""
        p, d, where = mooncake(make)
        d.add("d", prompt(46, 60), 4, transfer_id="t", **where)
        d.abort("d")
        prefilled(p, "p", prompt(46, 60), transfer_id="t")
        run(p, d, until=lambda: p.used_blocks == 0, seconds=10)

    def test_in_tree_peers_are_refused(self, make: Pairs, caplog: pytest.LogCaptureFixture) -> None:
        """By their parameters and by their bootstrap, each with a message; computed here."""
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import (
            MooncakeBootstrapServer,
        )

        _, d, where = mooncake(make)
        theirs = MooncakeBootstrapServer("127.0.0.1", 0)
        theirs.start()
        try:
            entry = {"engine_id": "t", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "x:1"}
            assert post(f"http://127.0.0.1:{theirs.port}/register", entry)[0] == 200
            there = {**mooncake_decode("t", theirs.port, "t")}
            nixl = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "tp_size": 1}
            nixl |= {"remote_engine_id": "t", "remote_host": "127.0.0.1", "remote_port": 5600}
            for name, params, message in (
                ("1", there, "vLLM's own MooncakeConnector"),
                ("2", nixl, "vLLM's own NixlConnector"),
                ("3", {"do_remote_prefill": True}, "hold no kvferry ticket"),
                ("4", mooncake_decode("x", free_port(), "p"), "does not answer"),
                ("5", {**where, "transfer_id": "y", "remote_engine_id": "q"}, "not 'q'"),
                ("6", {**mooncake_decode("x", 1, "p"), "remote_bootstrap_addr": "http://[x"}, "[x"),
                ("7", {"kvferry": {"format": FORMAT}}, "hold"),
            ):
                tokens = prompt(int(name), 30)
                d.add(name, tokens, 2, **params)
                run(d, until=lambda: name in d.ended)  # noqa: B023
                assert d.tokens[name] == expected(tokens, 2)
                assert message in caplog.text, message
        finally:
            theirs.shutdown()

    def test_samples_share_a_hold(self, make: Pairs) -> None:
        p, d, where = mooncake(make)
        tokens = prompt(47, 60)
        for i in range(2):
            d.add(f"{i}_d", tokens, 3, transfer_id="t", **where)
            p.add(f"{i}_p", tokens, 1, **PREFILL, transfer_id="t")
        run(p, d, until=lambda: {"0_d", "1_d"} <= set(d.ended))
        assert d.tokens["0_d"] == d.tokens["1_d"] == expected(tokens, 3)

    @pytest.mark.parametrize("last", [False, True])
    def test_a_sample_is_aborted_while_it_waits_for_its_load(self, make: Pairs, last: bool) -> None:
        """Its sibling loads all the same; when both go, the producer hears of it."""
        p, d, where = mooncake(make)
        tokens = prompt(48, 60)
        for i in range(2):
            d.add(f"{i}_d", tokens, 3, transfer_id="t", **where)
        asked(p, d)
        d.abort("0_d")
        if last:
            d.abort("1_d")
        p.add("0_p", tokens, 1, **PREFILL, transfer_id="t")
        run(p, d, until=lambda: "0_p" in p.ended)
        if not last:
            run(p, d, until=lambda: "1_d" in d.ended)
            assert d.tokens["1_d"] == expected(tokens, 3)
        run(p, d, until=lambda: p.used_blocks == 0, seconds=10)  # long before its lease is over

    def test_a_reset_ends_the_wait_of_early_claims(self, make: Pairs) -> None:
        p, d, where = mooncake(make)
        tokens = prompt(49, 60)
        d.add("d", tokens, 3, transfer_id="t", **where)
        asked(p, d)
        p.scheduler.reset_prefix_cache(reset_connector=True)
        run(p, d, until=lambda: "d" in d.ended, seconds=10)  # long before the load's deadline
        assert d.tokens["d"] == expected(tokens, 3) and loads(d) == 0


def test_a_limit_of_held_blocks(make: Pairs) -> None:
    p, d = make("p", max_held_blocks=8), make("d", blocks=128, block_size=8)
    told = [prefilled(p, f"p{i}", prompt(50 + i, 60)) for i in range(3)]  # four blocks each
    assert ["not_held" in params["kvferry"] for params in told] == [False, False, True]
    assert p.connector.has_pending_block_frees()
    levels = [told["0/scheduler"] for told in p.told("levels")]
    assert levels[-1] == {"holds_open": 2, "held_blocks": 8}
    for i, params in enumerate(told):
        d.add(f"d{i}", prompt(50 + i, 60), 3, **params)
    run(p, d, until=lambda: len(d.ended) == 3)
    for i in range(3):
        assert d.tokens[f"d{i}"] == expected(prompt(50 + i, 60), 3)
    assert loads(d) == 2
    run(p, d, until=lambda: p.used_blocks == 0)
    assert not p.connector.has_pending_block_frees()


def test_prefills_that_nobody_fetches_leave_half_of_the_cache(make: Pairs) -> None:
    """Without a configured limit; a prompt beside which nothing is held may be longer than that."""
    p = make("p", blocks=33)  # one of them is vLLM's null block
    whole = prefilled(p, "long", prompt(90, 16 * 20))
    assert "not_held" in str(prefilled(p, "next", prompt(91, 60)))
    d = make("d", blocks=128, block_size=8)
    d.add("d", prompt(90, 16 * 20), 3, **whole)
    run(p, d, until=lambda: "d" in d.ended and p.used_blocks == 0)
    assert loads(d) == 1
    told = [prefilled(p, f"p{i}", prompt(50 + i, 60)) for i in range(8)]  # four blocks each
    held = ["not_held" not in str(params) for params in told]
    assert held == [True] * 4 + [False] * 4 and p.used_blocks == 16
    assert "share of the cache" in str(told[-1])
    p.add("own", prompt(99, 200), 4)  # whoever computes here has room
    run(p, until=lambda: "own" in p.ended)
    assert p.tokens["own"] == expected(prompt(99, 200), 4)
    for i, params in enumerate(told):
        d.add(f"d{i}", prompt(50 + i, 60), 3, **params)
    run(p, d, until=lambda: len(d.ended) == 9)


def test_a_reset_voids_tickets(make: Pairs) -> None:
    """Also of requests that are still queued, or whose hold the workers have not heard of."""
    p, d = make.pair()
    tokens = prompt(60, 60)
    old = prefilled(p, "old", tokens)
    p.scheduler.reset_prefix_cache(reset_connector=True)
    assert p.scheduler.has_requests()  # it steps until workers have heard
    run(p, until=lambda: p.used_blocks == 0, seconds=10)  # long before the lease ends
    assert p.scheduler.reset_prefix_cache(reset_connector=True)
    d.add("old", tokens, 3, **old)
    new = prefilled(p, "new", prompt(61, 60))
    d.add("new", prompt(61, 60), 3, **new)
    run(p, d, until=lambda: len(d.ended) == 2)
    assert d.tokens["old"] == expected(tokens, 3)
    assert d.tokens["new"] == expected(prompt(61, 60), 3)
    assert loads(d) == 1


def test_a_reset_of_the_decode_engine(make: Pairs) -> None:
    p, d = make.pair()
    tokens = prompt(62, 60)
    d.add("d", tokens, 3, **prefilled(p, "p", tokens))
    d.scheduler.reset_prefix_cache(reset_connector=True)
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 3) and loads(d) == 0
    run(p, d, until=lambda: p.used_blocks == 0, seconds=10)


def test_a_failed_load_fails_the_request_where_asked(make: Pairs) -> None:
    p, d = make("p"), make("d", load_failure_policy="fail")
    tokens = prompt(63, 60)
    used = prefilled(p, "p", tokens)
    for name in ("first", "second"):
        d.add(name, tokens, 3, **used)
        run(p, d, until=lambda: name in d.ended)  # noqa: B023
        d.scheduler.reset_prefix_cache()
    assert d.tokens["first"] == expected(tokens, 3)
    assert d.tokens["second"] == [] and str(d.ended["second"]) == "error"
    assert d.told("load_failures") == [{"StaleTicket": 1}]


def test_a_hold_that_was_not_loaded_is_not_counted_as_delivered(make: Pairs) -> None:
    """The producer finds that the ticket is for another prompt; the decode engine computes it."""
    p, d = make.pair()
    tokens = prompt(64, 60)
    for name, why in (("good", "delivered"), ("bad", "failed")):
        d.add(name, tokens, 3, **prefilled(p, f"p {name}", tokens))
        wanted = wanted_by(d.ferry)[name]
        if why == "failed":
            wanted.ticket = replace(wanted.ticket, digest="another prompt's")
        run(p, d, until=lambda: name in d.ended and not p.used_blocks)  # noqa: B023
        assert d.tokens[name] == expected(tokens, 3)
        d.scheduler.reset_prefix_cache()
        told = p.told("holds_closed")
        assert told[-1] == {why: 1} and len(told) == (1 if why == "delivered" else 2)


def test_a_failed_load_does_not_block_the_loads_behind_it(make: Pairs) -> None:
    """A load has the blocks of its window, computing needs those of all tokens. vLLM would wait for
    blocks at the failed request, while a loaded one behind it has them."""
    p, d = make("p", window=40), make("d", window=40, block_size=8, blocks=14)
    prompts = {name: prompt(seed, 80) for seed, name in enumerate(("bad", "good"), 65)}
    for name, tokens in prompts.items():
        d.add(name, tokens, 3, **prefilled(p, name, tokens))
    wanted = wanted_by(d.ferry)["bad"]
    wanted.ticket = replace(wanted.ticket, digest="another prompt's")
    run(p, d, until=lambda: d.ended.keys() == prompts.keys())
    assert d.tokens == {name: expected(tokens, 3, 40) for name, tokens in prompts.items()}
    assert loads(d) == 1 and len(d.told("load_failures")) == 1


def test_a_hold_ends_as_its_worst_part_did(make: Pairs) -> None:
    p, _ = make.pair()
    offering, stats = p.ferry.producing, p.ferry.parts.stats
    one = FerryReport(closed={"a": "delivered", "b": "failed"})
    both = one.aggregate(FerryReport(closed={"a": "failed", "b": "delivered", "c": "expired"}))
    offering.closed(both.closed)
    offering.closed({"c": "delivered", "d": "delivered"})  # another rank, a step later
    offering.sent(["a", "b", "c"])
    assert stats.take().data["holds_closed"] == {"failed": 2, "expired": 1}
    offering.sent(["d", "never held"])
    assert stats.take().data["holds_closed"] == {"delivered": 1}


def test_spans_of_both_engines_in_one_trace(make: Pairs) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):  # a process has one, for ever
        provider = TracerProvider()
        trace.set_tracer_provider(provider)  # as vLLM does where an endpoint is configured
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    p, d = make.pair(traces="http://127.0.0.1:1/v1/traces")
    tokens, trace_id = prompt(90, 60), "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    p.add("p", tokens, 1, **PREFILL).trace_headers = headers
    run(p, until=lambda: "p" in p.ended)
    for name in ("d", "again"):  # the second one's ticket is used
        d.add(name, tokens, 2, **p.params["p"]).trace_headers = headers
        run(p, d, until=lambda: name in d.ended)  # noqa: B023
        d.scheduler.reset_prefix_cache()
    run(p, d, until=lambda: p.used_blocks == 0)
    spans = [(s.name, s.attributes["gen_ai.request.id"]) for s in exporter.get_finished_spans()]
    assert sorted(spans) == [
        ("kvferry hold", "p"),
        ("kvferry load", "again"),
        ("kvferry load", "d"),
    ]
    told = {s.attributes["gen_ai.request.id"]: s for s in exporter.get_finished_spans()}
    assert all(f"{s.context.trace_id:032x}" == trace_id for s in told.values())
    assert told["d"].status.is_ok and not told["again"].status.is_ok
    assert told["d"].attributes["kvferry.producer"] == "p"


def test_an_in_tree_scheduler_takes_our_ticket_for_one_of_its_own(make: Pairs) -> None:
    """So it asks our directory, and is refused there; without block ids it would end its engine."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler as Theirs,
    )

    p, d = make.pair()
    params = prefilled(p, "p", prompt(92, 40))
    blocks = SimpleNamespace(
        get_unhashed_block_ids_all_groups=lambda: ([1, 2],), blocks=([],), get_block_ids=tuple
    )
    scheduler = SimpleNamespace(
        is_bidirectional_kv_xfer_enabled=False,
        use_host_buffer=False,
        _reqs_need_recv={},
        get_exchange_clipped_blocks=lambda ids: ids,
    )
    request = SimpleNamespace(request_id="r", kv_transfer_params=dict(params))
    Theirs.update_state_after_alloc(scheduler, request, blocks, 40)
    assert "r" in scheduler._reqs_need_recv
    d.add("d", prompt(92, 40), 2, **params)
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(prompt(92, 40), 2) and loads(d) == 1


@pytest.mark.parametrize(
    ("name", "how"), [("NixlPullConnector", "pull"), ("NixlPushConnector", "push")]
)
def test_an_answer_has_the_fields_of_vllms_own(make: Pairs, name: str, how: str) -> None:
    """Routers read them; what they say is this engine's."""
    p, d = make("p", connector=name), make("d", connector=name, block_size=8, blocks=128)
    tokens = prompt(93, 40)
    told = prefilled(p, "p", tokens)
    assert told["remote_block_ids"] == [[]] and told["remote_request_id"] == "p"
    expects = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "remote_num_tokens": 40,
        "remote_blocks_expiry_time": None,
        "transfer_mode": how,
    }
    assert {name: told[name] for name in expects} == expects
    d.add("d", tokens, 2, **told)
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 2) and loads(d) == 1


def test_an_in_tree_peer_at_the_door(make: Pairs, caplog: pytest.LogCaptureFixture) -> None:
    """Decode engines with vLLM's connectors do not have the key: nothing is answered, the log of
    ours says so, and it goes on."""
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    p, d = make.pair()
    with zmq.Context() as context, context.socket(zmq.REQ) as nixl:
        nixl.linger = 0
        nixl.connect(f"tcp://127.0.0.1:{p.ferry._directory.port}")
        nixl.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        assert reaches(lambda: "one of vLLM's own connectors" in caplog.text, True)
        assert not nixl.poll(0)
    tokens = prompt(91, 40)
    d.add("d", tokens, 2, **prefilled(p, "p", tokens))
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 2)


def test_in_tree_mooncake_workers_find_no_address() -> None:
    """What our bootstrap names to them cannot be connected to: they fail at once, and say why."""
    import zmq

    expected = pytest.raises(zmq.ZMQError, match="run kvferry's connector on both sides")
    with zmq.Context() as context, context.socket(zmq.DEALER) as worker, expected:
        worker.connect(NOT_FOR_OTHERS)


class TestMulti:
    """vLLM's MultiConnector, unmodified, on both sides of both engines."""

    def test_two_of_ours_and_one_of_vllms(self, make: Pairs, tmp_path: Path) -> None:
        """Each style is answered by its child; figures of both come apart and together again."""
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        storage = {"shared_storage_path": str(tmp_path)}
        theirs = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        theirs |= {"kv_connector_extra_config": storage}
        port = free_port()
        p = make(
            "p",
            children=[
                theirs,
                child("NixlConnector"),
                child("MooncakeConnector", bootstrap_port=port),
            ],
        )
        d = make(
            "d",
            blocks=128,
            block_size=8,
            children=[child("MooncakeConnector", bootstrap_port=0), child("NixlConnector"), theirs],
        )
        first, second = prompt(70, 100), prompt(71, 100)
        d.add("by ticket", first, 4, **prefilled(p, "p1", first))
        where = {"do_remote_prefill": True, "remote_engine_id": "p", "transfer_id": "t"}
        d.add("by id", second, 4, **where, remote_bootstrap_addr=f"http://127.0.0.1:{port}")
        p.add("p2", second, 1, **PREFILL, transfer_id="t")
        run(p, d, until=lambda: len(d.ended) == 2)
        assert d.tokens["by ticket"] == expected(first, 4)
        assert d.tokens["by id"] == expected(second, 4)
        for name in ("FerryMooncakeConnector", "FerryNixlConnector"):
            assert sum(step[name].get("loads", 0) for step in d.stats if name in step) == 1
        whole = MultiConnector.build_kv_connector_stats(d.stats[0])
        for step in d.stats[1:]:
            whole = whole.aggregate(MultiConnector.build_kv_connector_stats(step))
        assert {line["loads"] for line in whole.reduce().values()} == {1}

    def test_a_siblings_handshake_is_not_ours(self, make: Pairs) -> None:
        """What MultiConnector passes on may be an in-tree child's; ours came by itself."""
        p = make("p", children=[child("NixlConnector")])
        p.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object(), (1, 0): object()})
        assert p.worker_sides[0].get_handshake_metadata() is None
        assert p.ferry._described is None and p.connector.has_pending_push_work()
        p.step()
        assert p.ferry._described is not None and not p.connector.has_pending_push_work()

    def test_beside_vllms_own_nixl(self, make: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both answer a prefill; vLLM ends an engine whose children use the same key."""
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        theirs = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        p = Modelless(
            "p", make.folder, children=[theirs, child("NixlConnector")], with_worker=False
        )
        d = make("d")
        try:
            tokens = prompt(72, 30)
            told = prefilled(p, "p", tokens)
            assert told["remote_block_ids"] and told["kvferry"]["remote_engine_id"] == "p"
            assert told["remote_port"] != told["kvferry"]["remote_port"]
            d.add("d", tokens, 2, **told)
            assert wanted_by(d.ferry)["d"].ticket.tokens == 30
            d.abort("d")
        finally:
            p.connector.shutdown()


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


class TestStatesBesideVllmsOwn:
    """Of a model with a recurrent state, both connectors leave the last token to the decoder."""

    @pytest.fixture(autouse=True)
    def here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")

    def test_a_prompt_is_cut_once(self, folder: Path) -> None:
        """What is computed is what the decode engines of both take it for."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

        options: dict[str, Any] = {"with_worker": False, "states": True}
        p = Modelless("p", folder, children=[child("NixlConnector"), NIXL], **options)
        d = Modelless("d", folder, **options)
        try:
            theirs = next(c for c in p.children if isinstance(c, NixlConnector))
            tokens = prompt(73, 40)
            request = p.add("p", tokens, 1, **PREFILL)
            count = theirs.connector_scheduler._get_remote_prefill_token_count(len(tokens))
            assert request.num_prompt_tokens == request.num_tokens == count == 39
            run(p, until=lambda: "p" in p.ended)
            told = p.params["p"]
            assert told["remote_num_tokens"] == told["kvferry"]["tokens"] == 39
            d.add("d", tokens, 2, **told)
            assert wanted_by(d.ferry)["d"].ticket.tokens == 39
            d.abort("d")
        finally:
            p.connector.shutdown()
            d.connector.shutdown()

    def test_a_prompt_that_another_has_cut_is_not_held_and_the_response_says_so(
        self, folder: Path
    ) -> None:
        other = {**NIXL, "kv_connector_extra_config": {}}
        p = Modelless("p", folder, children=[other, child("NixlConnector")], with_worker=False)
        try:
            p.add("p", prompt(75, 40), 1, **PREFILL, _p_side_truncated=True)  # as that would say it
            run(p, until=lambda: "p" in p.ended)
            assert "list kvferry first" in p.params["p"]["kvferry"]["not_held"]
            assert "'cut': 1" in repr(p.stats)  # which a MultiConnector keeps by child
        finally:
            p.connector.shutdown()

    def test_clients_cannot_say_that_it_was_cut(self, folder: Path) -> None:
        p = Modelless("p", folder, states=True)
        try:
            request = p.add("p", prompt(74, 40), 1, **PREFILL, _p_side_truncated=True)
            assert request.num_prompt_tokens == 39
            p.abort("p")
        finally:
            p.worker_sides[0].shutdown()
            p.connector.shutdown()


def test_an_engine_ends_whole_though_one_of_its_parts_cannot_be_closed(folder: Path) -> None:
    """Its process may go on, and make another engine at the same port."""

    def fail() -> None:
        raise OSError("it is gone")

    port = free_port()
    p = Modelless("p", folder, with_worker=False, port=port)
    p.connector.pool = SimpleNamespace(close=fail)
    p.ferry._rendezvous.close = fail
    p.connector.shutdown()
    Modelless("p", folder, with_worker=False, port=port).connector.shutdown()


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2), (3, 2)])
def test_prefill_context_parallel_ranks(make: Pairs, p_ranks: int, d_ranks: int) -> None:
    """Each keeps the whole cache: one of P's is read, all of D's load, and no hold is left."""
    p = make("p", pcp=p_ranks)
    d = make("d", pcp=d_ranks, block_size=8, blocks=128)
    for seed, count in ((1, 5), (2, 150)):
        tokens = prompt(seed, count)
        d.add(f"d{seed}", tokens, 6, **prefilled(p, f"p{seed}", tokens))
        run(p, d, until=lambda: f"d{seed}" in d.ended)  # noqa: B023
        assert d.tokens[f"d{seed}"] == expected(tokens, 6)
    d.add("d here", prompt(9, 20), 2, **prefilled(p, "p unread", prompt(8, 20)))  # given back
    run(p, d, until=lambda: "d here" in d.ended)
    run(p, d, until=lambda: not p.used_blocks, seconds=5)  # a lease is longer
    assert loads(d) == 2 * d_ranks
    assert p.told("holds_closed") and not any("expired" in end for end in p.told("holds_closed"))


@pytest.mark.parametrize(
    ("p_shape", "d_shape"),
    [
        ({"pcp": 2, "dcp": 2}, {}),
        ({}, {"pcp": 2, "dcp": 2}),
        ({"pcp": 2, "dcp": 2}, {"tp": 2, "pcp": 2, "dcp": 4}),  # tokens over all ranks
        ({"tp": 2, "pcp": 2, "dcp": 2}, {"pcp": 3}),  # both tp ranks have each token
    ],
)
def test_context_parallel_ranks_that_share_tokens_out(
    make: Pairs, p_shape: dict[str, int], d_shape: dict[str, int]
) -> None:
    """With dcp beside pcp, a rank has some tokens alone: D's ranks read from all that have one."""
    p = make("p", **p_shape)
    d = make("d", **d_shape, block_size=8, blocks=128)
    for seed, count in ((1, 5), (2, 150), (3, 64)):
        tokens = prompt(seed, count)
        d.add(f"d{seed}", tokens, 6, **prefilled(p, f"p{seed}", tokens))
        run(p, d, until=lambda: f"d{seed}" in d.ended)  # noqa: B023
        assert d.tokens[f"d{seed}"] == expected(tokens, 6)
    assert loads(d) == 3 * len(d.memories)
    run(p, d, until=lambda: not p.used_blocks, seconds=5)  # a lease is longer
    assert {end for ends in p.told("holds_closed") for end in ends} == {"delivered"}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(
    ("window", "counts", "computed"),
    [(40, (20, 39, 150, 160, 162, 190, 195, 200, 210), 4), (256, (700, 716), 1)],
)
def test_windows_in_smaller_blocks(
    make: Pairs, policy: str, window: int, counts: tuple[int, ...], computed: int
) -> None:
    """What P has dropped of a block that D would fill is known before a load is promised: also
    where failed loads fail requests, none does."""
    options = {"window": window, "longest": 1024, "load_failure_policy": policy}
    p, d = make("p", block_size=16, **options), make("d", block_size=32, **options)
    assert d.scheduler.recompute_kv_load_failures == (policy == "recompute")
    here = 0
    for count in counts:
        tokens, name = prompt(count, count), f"{count}"
        dropped = (count - window + 1) // 16 * 16 if count >= window else 0
        here += dropped % 32 > 0
        d.add(name, tokens, 6, **prefilled(p, name, tokens))
        run(p, d, until=lambda: name in d.ended)  # noqa: B023
        assert str(d.ended[name]) == "length" and d.tokens[name] == expected(tokens, 6, window)
        run(p, d, until=lambda: not p.used_blocks)  # half of its cache is held at most
    assert here == computed and loads(d) == len(counts) - computed
    assert d.told("requests_computed_here") == [{"shape": 1}] * here
    assert not d.told("load_failures")


@pytest.mark.parametrize("p_block", [8, 16])
def test_the_last_token_of_a_prompt_reads_its_whole_window(make: Pairs, p_block: int) -> None:
    """vLLM computes it again if all of a prompt was loaded, and has dropped a block that only this
    token reads if the next token's window begins with a block."""
    p = make("p", window=40, block_size=p_block, blocks=1024 // p_block)
    d = make("d", window=40, block_size=8, blocks=128)
    for count in (39, 40, 41, 87, 88, 167):  # after 87 and 167 tokens, it begins at 48 and 128
        tokens, name = prompt(count, count), f"{count}"
        d.add(name, tokens, 6, **prefilled(p, name, tokens))
        run(p, d, until=lambda: name in d.ended)  # noqa: B023
        assert d.tokens[name] == expected(tokens, 6, 40)
        run(p, d, until=lambda: not p.used_blocks)
    assert loads(d) == 6 and not d.told("requests_computed_here")


def test_windows_before_the_workers_have_described_themselves(make: Pairs) -> None:
    """Under a MultiConnector they do so with their first step. A request that is there before it
    waits, and is then computed."""
    p = make("p", window=40, block_size=16)
    d = make("d", window=40, block_size=32, children=[child("FerryConnector")])
    tokens = prompt(5, 160)
    d.add("d", tokens, 3, **prefilled(p, "p", tokens))
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 3, 40)
    assert "'shape': 1" in repr(d.stats) and "load_failures" not in repr(d.stats)


ROLES = ("kv_both", "kv_producer", "kv_consumer")


class TestRoles:
    @pytest.mark.parametrize("style", ["NixlConnector", "NixlPushConnector"])
    @pytest.mark.parametrize("role", ROLES)
    def test_nixl_takes_prefills_and_decodes_in_every_role(
        self, make: Pairs, style: str, role: str
    ) -> None:
        """As vLLM's own connectors of these names, which do not read it."""
        options = {"connector": style, "role": role, "asynchronous": True}
        p, d = make.pair(**options)
        for there, here, seed in ((p, d, 1), (d, p, 2)):
            tokens, name = prompt(seed, 70), f"{here.name}{seed}"
            here.add(name, tokens, 3, **prefilled(there, name, tokens))
            run(p, d, until=lambda: name in here.ended)  # noqa: B023
            assert here.tokens[name] == expected(tokens, 3) and loads(here) == 1
            # or vLLM would give a load blocks that a step in flight still writes
            assert here.scheduler.defer_block_free and here.scheduler.requires_kv_delivery

    @pytest.mark.parametrize("style", ["FerryConnector", "MooncakeConnector"])
    def test_others_keep_to_their_role(self, make: Pairs, style: str) -> None:
        tokens, ours = prompt(3, 40), {"connector": style, "bootstrap_port": 0}
        p = make("p", role="kv_producer", **ours)
        d = make("d", role="kv_consumer", **ours)
        p.add("p", tokens, 2, **prefilled(d, "unheld", tokens, transfer_id="a"))
        assert not d.params
        held = prefilled(p, "held", tokens, transfer_id="b")
        p.add("loads", tokens, 2, **held)
        run(p, d, until=lambda: {"p", "loads"} <= p.ended.keys())
        assert p.tokens["loads"] == expected(tokens, 2) and not loads(p)
        d.add("d", tokens, 2, **held)  # its hold is not fetched otherwise
        run(p, d, until=lambda: "d" in d.ended)
        assert d.tokens["d"] == expected(tokens, 2)

    def test_beside_others_a_role_counts(self, make: Pairs) -> None:
        """There, vLLM's scheduler goes by the MultiConnector's role."""
        one = {**child("NixlConnector"), "kv_role": "kv_producer"}
        p, d = make("p"), make("d", children=[one], role="kv_producer")
        run(d, until=lambda: not d.connector.has_pending_push_work())
        tokens = prompt(4, 40)
        before = prefilled(p, "p", tokens)
        d.add("d", tokens, 2, **before)
        run(p, d, until=lambda: "d" in d.ended)
        assert d.tokens["d"] == expected(tokens, 2) and "'loads'" not in repr(d.stats)
        other = make("other", block_size=8, blocks=128)
        other.add("o", tokens, 2, **before)
        run(p, other, until=lambda: "o" in other.ended)


def test_the_shape_of_an_engine_that_is_gone(make: Pairs) -> None:
    """A ticket from before a reset, or of nobody: computed, before anything is promised."""
    p, d = make("p", window=40), make("d", window=40, block_size=8, blocks=128)
    tokens = prompt(3, 90)
    before = prefilled(p, "p", tokens)
    p.connector.reset_cache()
    d.add("d", tokens, 3, **before)
    run(p, d, until=lambda: "d" in d.ended)
    assert d.tokens["d"] == expected(tokens, 3, 40)
    after = prompt(4, 90)
    d.add("f", after, 3, **prefilled(p, "f", after))
    run(p, d, until=lambda: "f" in d.ended)
    assert d.tokens["f"] == expected(after, 3, 40) and loads(d) == 1
    assert d.told("requests_computed_here") == [{"not found": 1}]
