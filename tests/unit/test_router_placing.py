# SPDX-License-Identifier: Apache-2.0
"""Requests go where their first token comes soonest: a router before engines that answer as told.

Prompts are token ids, so no engine is asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvferry.errors import DescriptionError
from kvferry.router.api import RouterConfig
from kvferry.router.cache.index import Namespace, PromptChain
from kvferry.router.choice import Decision
from kvferry.router.flow import Router
from kvferry.router.placing import RequestWay, read_metrics
from kvferry.router.rates import EngineMeter, EngineMetrics
from router_cluster import CHUNKS, WHOLE, Cluster, FakeEngine, cluster, quick
from waiting import wait_until

LIMITS = quick(metrics_seconds=0.02, tokenize_seconds=5.0, chunk_seconds=60.0)


def ids(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + at * (seed + 3)) % 50_000 for at in range(count)]


def asked(engine: FakeEngine) -> list[list[int]]:
    """Prompts that an engine got to answer."""
    return [seen.body["prompt"] for seen in engine.seen if seen.path == "/v1/completions"]


@contextmanager
def routed(prefill: int = 1, decode: int = 1, **more: Any) -> Iterator[Cluster]:
    limits = more.pop("limits", LIMITS)
    with cluster(prefill, decode, limits=limits, place="cost", **more) as made:
        yield made


def last_decision() -> Decision:
    (decision,) = _decisions[-1:]
    return decision


_decisions: list[Decision] = []


@pytest.fixture(autouse=True)
def _watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep each decision, to look at."""
    from kvferry.router import placing

    place = placing.place
    _decisions.clear()

    def kept(*given: Any) -> Decision | None:
        decision = place(*given)
        if decision is not None:
            _decisions.append(decision)
        return decision

    monkeypatch.setattr(placing, "place", kept)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines cost what was measured on a GPU; the time that these here take means nothing."""
    monkeypatch.setattr("kvferry.costs.CostLine.add", lambda *_: None)


@contextmanager
def streams(c: Cluster, count: int) -> Iterator[None]:
    """Answers that the decode engines are in the middle of. At the end their clients leave."""
    for engine in c.decode:
        engine.always = "stall"
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=c.client.base_url, trust_env=False))
        for number in range(count):
            body = {"model": "m", "prompt": ids(900 + number, 40), "stream": True}
            stack.enter_context(client.stream("POST", "/v1/completions", json=body))
        for engine in c.decode:
            engine.always = "ok"
        yield


def test_an_idle_decode_engine_computes_what_it_decodes():
    with routed() as c:
        got = c.complete(prompt=ids(1, 2000), stream=True)
        assert got.headers["x-kvferry-path"] == "decode-only"
        assert got.headers["x-kvferry-decision"] == (
            "alone; source=none; tokens=2000; cached=0; expected-ms=56; options=2"
        )
        assert not c.prefill[0].seen
        c.expect("choices_total", 'way="alone"', count=1)
        c.expect("prompt_tokens_total", 'source="none"', count=2000)
        assert c.metric("fallbacks_total", 'reason="no_prefill_engine"') == 0


def test_a_long_prompt_is_handed_over_while_others_decode():
    with routed() as c:
        with streams(c, 20):
            got = c.complete(prompt=ids(1, 4000), stream=True)
            assert got.headers["x-kvferry-path"] == "prefill+decode"
            # on a busy machine some of the streams may have been handed over, too
            assert ids(1, 4000) in asked(c.prefill[0])
            short = c.complete(prompt=ids(2, 30), stream=True)
            assert short.headers["x-kvferry-path"] == "decode-only"
        wait_until(lambda: c.metric("choices_total", 'way="handed_over"') >= 1)
        wait_until(lambda: c.metric("choices_total", 'way="alone"') >= 1)


def test_a_conversation_stays_with_the_engine_that_has_it():
    with routed(0, 4) as c:
        homes = []
        for turn in range(1, 6):
            for number in range(6):
                c.complete(prompt=ids(number, 400 * turn))
                (home,) = [n for n, d in enumerate(c.decode) if ids(number, 400 * turn) in asked(d)]
                homes.append((number, home))
        assert len(set(homes)) == 6, "each has one home"
        assert len({home for _, home in homes}) > 1, "not all have the same"
        wanted = sum(400 * (turn - 1) for turn in range(1, 6)) * 6
        c.expect("prompt_tokens_total", 'source="local"', count=wanted)


def test_a_cache_of_a_restarted_engine_is_forgotten_at_once():
    with routed(0, 2) as c:
        c.complete(prompt=ids(1, 800))
        (home,) = [d for d in c.decode if asked(d)]
        server = c.servers[home.name]
        assert len(c.router.placing.index.stats()[server.url].estimates) == 50
        server.kill()
        wait_until(lambda: not c.up()[home.name])
        server.start()
        wait_until(lambda: c.up()[home.name])
        assert len(c.router.placing.index.stats()[server.url].estimates) == 0
        c.complete(prompt=ids(1, 800))
        assert last_decision().chosen.cached_tokens == 0


def test_what_an_engine_was_sent_is_known_after_it_was_not_reached_for_a_moment():
    with routed(0, 2) as c:
        c.complete(prompt=ids(1, 800))
        (home,) = [d for d in c.decode if asked(d)]
        home.health = 503
        wait_until(lambda: not c.up()[home.name])
        home.health = 200
        wait_until(lambda: c.up()[home.name])
        c.complete(prompt=ids(1, 1600))
        assert last_decision().chosen.cached_tokens == 800


def test_a_failed_answer_says_that_nothing_was_handed_over():
    with routed(0, 1) as c:
        c.complete(prompt=ids(0, 800))
        c.decode[0].always = "500"
        got = c.complete(prompt=ids(1, 800))
        assert (got.status_code, got.headers["x-kvferry-path"]) == (500, "decode-only")


def test_a_removed_engine_leaves_nothing_behind():
    with routed(0, 2) as c:
        c.complete(prompt=ids(1, 800))
        placing = c.router.placing
        url = next(c.servers[d.name].url for d in c.decode if asked(d))
        fleet = c.router.app.router.fleet
        assert url in placing.index.stats()
        fleet.remove(fleet.get(url))
        assert url not in placing.index.stats()
        assert url not in placing.meters.meters


def test_an_engine_that_is_removed_while_it_answers_leaves_nothing_behind():
    with routed(0, 1) as c:
        c.complete(prompt=ids(1, 320))
        engine, url = c.decode[0], c.servers["d0"].url
        fleet, index = c.router.app.router.fleet, c.router.placing.index
        engine.cached = 0
        said = engine.usage()

        def remove_and_say() -> bytes:
            fleet.remove(fleet.get(url))
            return said

        engine.usage = remove_and_say  # type: ignore[method-assign]
        assert c.complete(prompt=ids(1, 640)).status_code == 200
        c.expect("requests_total", 'outcome="ok"', count=2)
        assert url not in index.stats()


@pytest.mark.parametrize("place", ["cost", "load"])
def test_late_reports_of_a_removed_engine_leave_nothing_behind(place):
    router = Router(RouterConfig((), ("http://a", "http://b"), place=place))
    fleet, placing = router.fleet, router.placing
    chain = PromptChain(Namespace(), ids(1, 320))
    way, late = (RequestWay(placing, chain, 100, 10, streamed=True) for _ in range(2))
    way.decode("http://a", handed_over=True)
    fleet.remove(fleet.get("http://a"))
    way.first()
    way.ended()
    late.compute("http://a", decoded_elsewhere=True)
    late.decode("http://a", handed_over=False)
    late.ended()
    assert not placing.meters.meters and not placing.index.stats()


def test_late_metrics_of_a_removed_engine_leave_nothing_behind(monkeypatch):
    heard = []
    told = EngineMeter.told
    monkeypatch.setattr(
        EngineMeter, "told", lambda self, found: (told(self, found), heard.append(self))
    )
    leave = []

    def metrics(engine: FakeEngine) -> bytes:
        while leave:
            leave.pop()()
        return b"vllm:num_requests_running 1\n"

    monkeypatch.setattr(FakeEngine, "metrics", property(metrics, lambda engine, _: None))
    with routed(0, 1) as c:
        fleet, url = c.router.app.router.fleet, c.servers["d0"].url
        wait_until(lambda: heard)
        leave.append(lambda: (fleet.remove(fleet.get(url)), heard.clear()))
        wait_until(lambda: not leave and heard)
        assert not c.router.placing.meters.meters


def test_without_tokens_the_engine_with_the_fewest_requests_is_taken():
    """Texts, and engines that cannot tokenize: everything is as without a view."""
    with routed(1, 2) as c:
        for engine in c.decode:
            engine.script = ["ok", "404", "404"]  # models, render, tokenize
        got = c.complete(prompt="hello")
        assert got.status_code == 200 and got.content == WHOLE
        assert got.headers["x-kvferry-path"] == "prefill+decode"
        assert "x-kvferry-decision" not in got.headers
        c.expect("choices_total", 'way="by_load"', count=1)


def test_a_router_that_places_by_load_asks_engines_for_nothing():
    with cluster(1, 1) as c:
        c.complete(prompt=ids(1, 500))
        assert [seen.path for seen in c.prefill[0].seen + c.decode[0].seen] == [
            "/v1/completions",
            "/v1/completions",
        ]


def test_a_failed_decode_engine_is_not_chosen_again_for_the_request():
    with routed(0, 2) as c:
        c.complete(prompt=ids(1, 800))
        (home,) = [d for d in c.decode if asked(d)]
        (other,) = [d for d in c.decode if d is not home]
        home.script = ["drop"]
        got = c.complete(prompt=ids(1, 1600))
        assert got.content == WHOLE and asked(other) == [ids(1, 1600)]
        assert got.headers["x-kvferry-path"] == "decode-only"
        c.expect("retries_total", 'stage="decode"', count=1)


def test_a_failed_prefill_engine_is_replaced():
    with routed(2, 1) as c, streams(c, 20):
        for engine in c.prefill:
            engine.script = ["500"]
        got = c.complete(prompt=ids(1, 4000), stream=True)
        assert got.status_code == 200
        assert sorted(len(asked(p)) for p in c.prefill) == [1, 1]
        assert got.headers["x-kvferry-path"] == "decode-only"
        assert c.metric("fallbacks_total", 'reason="prefill_failed"') == 1


def test_a_decode_engine_that_fails_after_a_hand_over_makes_a_new_choice():
    with routed(1, 2) as c, streams(c, 40):
        before = [len(asked(d)) for d in c.decode]
        for engine in c.decode:
            engine.script = ["500"]
        assert c.complete(prompt=ids(1, 4000), stream=True).status_code == 500
        assert [len(asked(d)) - had for d, had in zip(c.decode, before, strict=True)] == [1, 1]
        assert len(asked(c.prefill[0])) == 2, "a ticket serves once"
        assert [d.chosen.prefill is None for d in _decisions[-2:]] == [False, False]
        assert len({d.chosen.decode for d in _decisions[-2:]}) == 2


def test_what_cannot_be_handed_over_is_placed_by_cost_too():
    with routed(1, 2) as c:
        c.complete(prompt=ids(1, 800), prompt_logprobs=1)
        got = c.complete(prompt=ids(1, 1600), prompt_logprobs=1)
        assert sorted(len(asked(d)) for d in c.decode) == [0, 2]
        assert got.headers["x-kvferry-decision"].startswith("alone; source=local; tokens=1600")
        assert c.metric("fallbacks_total", 'reason="prompt_logprobs"') == 2


def test_what_cannot_be_handed_over_is_not_even_if_that_were_faster():
    with routed() as c, streams(c, 20):
        got = c.complete(prompt=ids(1, 4000), prompt_logprobs=1, stream=True)
        assert got.headers["x-kvferry-decision"].startswith("alone; ")
        assert not c.prefill[0].seen


def test_an_engine_at_its_limit_is_not_chosen_for_its_cache():
    with routed(0, 2, limits=replace(LIMITS, max_running=1)) as c:
        c.complete(prompt=ids(1, 4000))
        (home,) = [d for d in c.decode if asked(d)]
        (other,) = [d for d in c.decode if d is not home]
        home.always = "stall"
        body = {"model": "m", "prompt": ids(1, 4100), "stream": True}
        with c.client.stream("POST", "/v1/completions", json=body):
            assert len(asked(home)) == 2
            c.complete(prompt=ids(1, 4200))
            assert asked(other) == [ids(1, 4200)]


def test_the_prefill_engine_that_holds_most_is_taken():
    with routed(3, 1) as c, streams(c, 20):
        c.complete(prompt=ids(1, 8000), stream=True)
        (home,) = [p for p in c.prefill if asked(p)]
        for turn in range(1, 6):
            c.complete(prompt=ids(1, 8000) + ids(9, 4000 * turn), stream=True)
        assert len(asked(home)) > 2
        assert [p for p in c.prefill if asked(p)] == [home]


def test_load_counts_while_requests_run_and_not_after():
    with routed(0, 1) as c:
        placing = c.router.placing
        url = c.servers["d0"].url
        with streams(c, 3):
            assert placing.meters[url].running == 3
        wait_until(lambda: placing.meters[url].running == 0)
        c.decode[0].script = ["500", "500", "500"]
        assert c.complete(prompt=ids(5, 3000), stream=True).status_code == 500
        wait_until(lambda: placing.meters[url].running == 0)
        assert placing.meters[url].waiting_work == 0


def test_metrics_of_engines_are_read_and_old_ones_forgotten():
    text = b'vllm:num_requests_running{engine="0"} 9.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    with routed(0, 1) as c:
        c.decode[0].metrics = text
        url = c.servers["d0"].url
        placing = c.router.placing
        # It had no metrics at first, so it is asked again only when it came up again.
        c.servers["d0"].kill()
        wait_until(lambda: not c.up()["d0"])
        c.servers["d0"].start()
        wait_until(lambda: placing.meters[url].metrics is not None)
        (view,) = placing.views({"prefill": set(), "decode": set()})
        assert (view.running, view.free_blocks) == (9, 0.75)


def test_an_estimate_has_the_blocks_that_the_engine_names():
    with routed(0, 1) as c:
        c.decode[
            0
        ].metrics = b'vllm:num_requests_running 0\nvllm:cache_config_info{block_size="64"} 1.0\n'
        d0 = c.servers["d0"].url
        wait_until(lambda: c.router.placing.meters[d0].metrics)
        c.complete(prompt=ids(1, 640))
        assert len(c.router.placing.index.stats()[d0].estimates) == 10


def test_an_estimate_is_no_larger_than_the_cache():
    with routed(0, 1) as c:
        c.decode[0].metrics = (
            b"vllm:num_requests_running 0\n"
            b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        )
        d0 = c.servers["d0"].url
        wait_until(lambda: c.router.placing.meters[d0].metrics)
        for number in range(4):
            c.complete(prompt=ids(number, 640))
        for number, cached in ((0, 0), (3, 624)):
            c.complete(prompt=ids(number, 640))
            assert last_decision().chosen.cached_tokens == cached
        assert len(c.router.placing.index.stats()[d0].estimates) <= 100


def test_a_word_that_is_no_way_to_place_names_the_option():
    with pytest.raises(DescriptionError, match="--place must be cost or load; found 'fastest'"):
        RouterConfig((), ("h:1",), place="fastest")


def test_regret_and_expectations_are_shown():
    with routed(0, 1) as c:
        for number in range(3):
            c.complete(prompt=ids(number, 100), stream=True)
        c.expect("regret_seconds_count", count=3)


def test_vllms_metrics_are_read():
    text = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 4.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 77.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 1.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="40"} 1.0
"""
    assert read_metrics(text) == EngineMetrics(7, 2, 0.75, 128 * 40, 128)


@pytest.mark.parametrize("text", [b"", b"{}", b"nginx_up 1\n", b"\xff\x00vllm:", b"vllm:x nan\n"])
def test_what_is_not_vllms_is_not_read(text: bytes):
    assert read_metrics(text) is None


def test_hostile_metrics_are_bounded() -> None:
    text = b"vllm:num_requests_running -5\nvllm:num_requests_waiting 1e999\n"
    text += b"vllm:kv_cache_usage_perc 17\n"
    found = read_metrics(text)
    assert found is not None
    assert found.running == 0 and found.used_blocks == 1.0
    assert 0 <= found.waiting < 10**9


def test_of_a_compressed_stream_no_tokens_are_counted():
    with routed(0, 1) as c:
        c.decode[0].coding = b"gzip"
        body = {"model": "m", "prompt": ids(1, 100), "stream": True}
        with c.client.stream("POST", "/v1/completions", json=body) as got:
            assert b"".join(got.iter_raw()) == b"".join(CHUNKS)
        c.expect("choices_total", 'way="alone"', count=1)
        assert c.router.placing.meters.output_tokens(None) == 256
        c.decode[0].coding = b""
        c.complete(prompt=ids(2, 100), stream=True)
        c.expect("choices_total", 'way="alone"', count=2)
        assert c.router.placing.meters.output_tokens(None) == len(CHUNKS)
