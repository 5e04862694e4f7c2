"""Stand-ins for vLLM's connectors: alone, under a MultiConnector, and behind vLLM's own proxies.

One pair of engines runs MultiConnector with our MooncakeConnector, our NixlPushConnector and vLLM's
ExampleConnector. Requests are built exactly as vLLM's example proxies send them (the proxies
themselves run in test_proxies.py). What becomes of requests in every case is in test_lifecycle.py;
here is what needs whole engines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from otlp_collector import Collector
from vllm_engines import Engine, free_port, hand_over
from vllm_pairs import (
    OURS,
    ids,
    mooncake_decode,
    mooncake_prefill,
    post,
    prompt,
    push_decode,
    reaches,
    settled,
    started,
    toy_proxy_prefill,
)

ROOT = Path(__file__).parents[2]
HELD, OPEN = "vllm:kvferry_held_blocks", "vllm:kvferry_holds_open"
LOADS = "vllm:kvferry_loads_total"
LEASE, LOAD = 60.0, 90.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def bootstrap() -> int:
    return free_port()


@pytest.fixture(scope="module")
def side() -> int:
    return free_port()


Pair = tuple[Engine, Engine]


def multi(
    name: str,
    model: Path,
    logs: Path,
    bootstrap: int,
    collector: Collector,
    side: int | None = None,
    **options: Any,
) -> Engine:
    ours = {"lease_seconds": LEASE, "load_seconds": LOAD}
    children = [
        {
            "kv_connector": "MooncakeConnector",
            **OURS,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**ours, "mooncake_protocol": "tcp", "num_workers": 4},
        },
        {
            "kv_connector": "NixlPushConnector",
            **OURS,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**ours, "backends": ["UCX"], "carriers": ["tcp"]},
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(logs / f"example-{name}")},
        },
    ]
    return Engine(
        name,
        model,
        logs / f"{name}.log",
        connector={"connectors": children},
        transfer={"kv_connector": "MultiConnector", "kv_connector_module_path": None},
        on_failure="recompute",
        arguments=[
            "--disable-hybrid-kv-cache-manager",  # ExampleConnector does not know it
            "--otlp-traces-endpoint",
            collector.endpoint,
            "--shutdown-timeout",
            "60",
        ],
        environment={
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port() if side is None else side),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "VLLM_LOGGING_LEVEL": "DEBUG",
            "VLLM_SERVER_DEV_MODE": "1",
        },
        **options,
    )


@pytest.fixture(scope="module")
def family(
    model: Path, logs: Path, bootstrap: int, side: int, collector: Collector
) -> Iterator[Pair]:
    prefill = multi("mp", model, logs, bootstrap, collector, side)
    decode = multi("md", model, logs, free_port(), collector, block_size=32)
    started(prefill, decode)
    yield prefill, decode
    prefill.stop()
    decode.stop()


def at_once(
    pair: Pair, tokens: list[int], bootstrap: int, name: str, **options: Any
) -> dict[str, Any]:
    """Both engines get a request, the decode engine first."""
    prefill, decode = pair
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            decode.complete,
            tokens,
            kv_transfer_params=mooncake_decode(name, bootstrap, prefill.name),
            **{"max_tokens": 8, **options},
        )
        assert reaches(lambda: decode.metric("vllm:num_requests_waiting") > 0, True)
        prefill.complete(tokens, max_tokens=1, kv_transfer_params=mooncake_prefill(name))
        return answer.result(LOAD)


class TestFamily:
    """MultiConnector of our MooncakeConnector, our NixlPushConnector, vLLM's ExampleConnector."""

    def test_prefill_first(self, family: Pair) -> None:
        prefill, decode = family
        for tokens in (40, 300):  # the first one is also the engines' first step
            asked = prompt(tokens, tokens)
            before = decode.metric(LOADS)
            params = prefill.complete(asked, max_tokens=1, kv_transfer_params=toy_proxy_prefill())
            answer = decode.complete(
                asked, max_tokens=8, kv_transfer_params=params["kv_transfer_params"]
            )
            assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))
            assert ids(answer) != ids(prefill.complete(prompt(tokens + 1, tokens), max_tokens=8))
            assert decode.metric(LOADS) - before == 1

    def test_both_at_once(self, family: Pair, bootstrap: int) -> None:
        asked = prompt(2, 310)
        before = family[1].metric(LOADS)
        answer = at_once(family, asked, bootstrap, "xfer-2")
        assert ids(answer) == ids(family[0].complete(asked, max_tokens=8))
        assert ids(answer) != ids(family[0].complete(prompt(3, 310), max_tokens=8))
        assert family[1].metric(LOADS) - before == 1

    def test_a_proxy_learns_engine_ids(self, family: Pair, bootstrap: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{bootstrap}/query", timeout=10) as answer:
            told = json.load(answer)
        assert {int(rank): entry["engine_id"] for rank, entry in told.items()} == {0: "mp"}

    def test_known_by_request_id(self, family: Pair, side: int) -> None:
        prefill, decode = family
        asked = prompt(20, 300)
        prefill.complete(
            asked, max_tokens=1, request_id="r-20", kv_transfer_params=toy_proxy_prefill()
        )
        before = decode.metric(LOADS)
        answer = decode.complete(
            asked,
            max_tokens=8,
            request_id="r-20",
            kv_transfer_params=push_decode("r-20", "mp", side),
        )
        assert decode.metric(LOADS) - before == 1
        assert re.search(r"loaded .*push \d", decode.tail(2000))  # the producer wrote
        assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))

    def test_an_aborted_prefill_ends_the_wait_at_once(self, family: Pair, bootstrap: int) -> None:
        prefill, decode = family
        asked = prompt(6, 200)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                decode.complete,
                asked,
                max_tokens=8,
                kv_transfer_params=mooncake_decode("xfer-6", bootstrap, "mp"),
            )
            with pytest.raises(TimeoutError):  # a client that goes away
                prefill.complete(
                    asked, 1.0, max_tokens=1500, kv_transfer_params=mooncake_prefill("xfer-6")
                )
            assert ids(answer.result(LOAD / 2)) == ids(prefill.complete(asked, max_tokens=8))
        assert "its prefill was aborted or not held there" in decode.tail(2000)

    def test_a_reset_voids_all_tickets(self, family: Pair, bootstrap: int) -> None:
        prefill, decode = family
        asked = prompt(12, 260)
        params = prefill.complete(asked, max_tokens=1, kv_transfer_params=toy_proxy_prefill())
        assert prefill.metric(OPEN) >= 1
        status, _ = post(f"{prefill.url}/reset_prefix_cache?reset_external=true")
        assert status == 200
        assert reaches(lambda: prefill.metric(OPEN), 0.0)
        answer = decode.complete(
            asked, max_tokens=8, kv_transfer_params=params["kv_transfer_params"]
        )
        assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))
        assert re.search("before this engine restarted|was restarted since", decode.tail(2000))
        again = prompt(13, 260)
        before = decode.metric(LOADS)
        assert ids(hand_over(prefill, decode, again, max_tokens=8)) == ids(
            prefill.complete(again, max_tokens=8)
        )
        assert ids(at_once(family, prompt(14, 140), bootstrap, "xfer-14")) == ids(
            prefill.complete(prompt(14, 140), max_tokens=8)
        )
        assert decode.metric(LOADS) - before == 2

    def test_an_engine_that_slept_is_another(self, family: Pair) -> None:
        """It falls asleep when its holds are fetched; then all tickets of before are void."""
        prefill, decode = family
        asked, again = prompt(17, 280), prompt(18, 280)
        told = prefill.complete(asked, max_tokens=1, kv_transfer_params=toy_proxy_prefill())
        old = told["kv_transfer_params"]
        with ThreadPoolExecutor(1) as pool:
            asleep = pool.submit(post, f"{prefill.url}/sleep?level=1")
            time.sleep(1.0)
            assert not asleep.done()
            before = decode.metric(LOADS)
            answer = decode.complete(asked, max_tokens=8, kv_transfer_params=old)
            assert decode.metric(LOADS) - before == 1
            try:
                assert asleep.result(LEASE + 30)[0] == 200
            finally:
                assert post(f"{prefill.url}/wake_up")[0] == 200
        assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))
        said = len(decode.log.read_text(errors="replace"))
        assert post(f"{decode.url}/reset_prefix_cache")[0] == 200  # so that it is asked for again
        answer = decode.complete(asked, max_tokens=8, kv_transfer_params=old)
        assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))
        since = decode.log.read_text(errors="replace")[said:]
        assert re.search("before this engine restarted|was restarted since", since)
        assert ids(hand_over(prefill, decode, again, max_tokens=8)) == ids(
            prefill.complete(again, max_tokens=8)
        )
        assert decode.metric(LOADS) - before == 2

    def test_spans_of_both_engines_in_one_trace(self, family: Pair, collector: Collector) -> None:
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        body = {"model": "tiny", "prompt": prompt(15, 120), "max_tokens": 1}
        _, told = post(
            f"{family[0].url}/v1/completions",
            {**body, "kv_transfer_params": toy_proxy_prefill()},
            headers,
        )
        params = {"kv_transfer_params": told["kv_transfer_params"]}
        assert post(f"{family[1].url}/v1/completions", {**body, **params}, headers)[0] == 200

        def seen() -> set[str]:
            return {s.name for s in collector.spans if s.trace_id.hex() == trace_id}

        family[0].complete(prompt(16, 5), max_tokens=1)
        assert reaches(lambda: seen() >= {"kvferry load", "kvferry hold"}, True)

    def test_metrics_and_the_dashboard(self, family: Pair) -> None:
        prefill, decode = family
        with urllib.request.urlopen(f"{decode.url}/metrics", timeout=10) as answer:
            exposed = set(re.findall(r"^([a-z_:]+?)(?:\{| )", answer.read().decode(), re.M))
        dashboard = (ROOT / "dashboards" / "kvferry.json").read_text()
        named = set(re.findall(r"vllm:(?!kvferry_pool_)[a-z_]+", dashboard))
        assert len([name for name in named if "kvferry" in name]) >= 13
        assert named <= exposed, named - exposed
        assert decode.metric("vllm:kvferry_bytes_total") > 1e6
        assert decode.metric("vllm:kvferry_total_seconds_count") == decode.metric(LOADS)
        assert decode.metric("vllm:kvferry_plan_seconds_count") == decode.metric(LOADS)
        assert decode.metric('vllm:kvferry_load_failures_total{engine="0",model') >= 2
        delivered = prefill.metric("vllm:kvferry_holds_closed_total")
        assert delivered >= decode.metric(LOADS)
        assert reaches(lambda: "KV Transfer metrics: Ferry" in decode.tail(3000), True)

    def test_each_new_pair_is_described(self, family: Pair) -> None:
        assert "kvferry: met engine 'mp at " in family[1].log.read_text(errors="replace")

    def test_nothing_is_left(self, family: Pair) -> None:
        assert settled(family[0], LEASE + 30) and settled(family[1])
        for engine in family:
            assert engine.metric(OPEN) == engine.metric(HELD) == 0
            assert engine.metric("vllm:kvferry_claims_parked") == 0

    def test_a_producer_that_is_told_to_stop(self, family: Pair) -> None:
        """What it holds is fetched before it ends."""
        prefill, decode = family
        asked = prompt(80, 300)
        told = prefill.complete(asked, max_tokens=1, kv_transfer_params=toy_proxy_prefill())
        expected = ids(prefill.complete(asked, max_tokens=8))
        os.kill(prefill.pid, signal.SIGTERM)
        time.sleep(2.0)
        before = decode.metric(LOADS)
        answer = decode.complete(asked, max_tokens=8, kv_transfer_params=told["kv_transfer_params"])
        assert ids(answer) == expected
        assert decode.metric(LOADS) - before == 1
        assert reaches(lambda: alive(prefill.pid), False, 40.0)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
