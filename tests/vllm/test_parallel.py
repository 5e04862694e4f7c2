"""Several ranks of real engines: data parallel behind one bootstrap; stages and tp under Multi.

Each data parallel rank is an engine of its own, with its own id and directory; the first one's
bootstrap knows all of them. Under a MultiConnector, what ranks say of themselves comes with their
first step, from every stage.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from vllm_engines import Engine, free_port
from vllm_pairs import (
    OURS,
    ids,
    mooncake_decode,
    mooncake_prefill,
    post,
    prompt,
    reaches,
    settled,
    started,
    toy_proxy_prefill,
)

LOADS, OPEN = "vllm:kvferry_loads_total", "vllm:kvferry_holds_open"
SECONDS = {"lease_seconds": 120.0, "load_seconds": 120.0}
Pair = tuple[Engine, Engine]


def running(*pair: Engine) -> Iterator[Pair]:
    started(*pair)
    try:
        yield pair[0], pair[1]
    finally:
        for engine in pair:
            engine.stop()


# --- data parallel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bootstrap() -> int:
    return free_port()


@pytest.fixture(scope="module")
def two_to_one(model: Path, tmp_path_factory: pytest.TempPathFactory, bootstrap: int) -> Any:
    logs = tmp_path_factory.mktemp("logs")
    p = Engine("p", model, logs / "p.log", connector={**SECONDS, "bootstrap_port": bootstrap})
    p.arguments = ["--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1"]
    p.environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    d = Engine("d", model, logs / "d.log", block_size=32, connector=dict(SECONDS))
    yield from running(p, d)


def prefill_on(engine: Engine, rank: int, tokens: list[int], params: dict[str, Any]) -> Any:
    """On one data parallel rank, as a router does that knows them."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 1, "temperature": 0}
    status, told = post(
        f"{engine.url}/v1/completions",
        {**body, "kv_transfer_params": params},
        {"X-data-parallel-rank": str(rank)},
    )
    assert status == 200, told
    return told


@pytest.mark.matrix
class TestTwoToOne:
    def test_a_ticket_names_the_rank_that_prefilled(self, two_to_one: Pair) -> None:
        p, d = two_to_one
        for rank in (0, 1, 1, 0):
            asked = prompt(10 * rank + int(d.metric(LOADS)), 300)
            before = d.metric(LOADS)
            told = prefill_on(p, rank, asked, toy_proxy_prefill())["kv_transfer_params"]
            assert told["remote_engine_id"] == f"p_dp{rank}"
            answer = d.complete(asked, max_tokens=8, kv_transfer_params=told)
            assert ids(answer) == ids(p.complete(asked, max_tokens=8))
            assert ids(answer) != ids(p.complete(prompt(99, 300), max_tokens=8))
            assert d.metric(LOADS) - before == 1

    def test_one_bootstrap_knows_both(self, two_to_one: Pair, bootstrap: int) -> None:
        p, d = two_to_one
        with urllib.request.urlopen(f"http://127.0.0.1:{bootstrap}/query", timeout=10) as answer:
            told = {int(rank): one["engine_id"] for rank, one in json.load(answer).items()}
        assert told == {0: "p_dp0", 1: "p_dp1"}
        for rank, engine_id in told.items():
            asked, before = prompt(200 + rank, 260), d.metric(LOADS)
            with ThreadPoolExecutor(1) as pool:
                params = mooncake_decode(f"x{rank}", bootstrap, engine_id)
                answer = pool.submit(d.complete, asked, max_tokens=8, kv_transfer_params=params)
                assert reaches(lambda: d.metric("vllm:num_requests_waiting") > 0, True)
                prefill_on(p, rank, asked, mooncake_prefill(f"x{rank}"))
                assert ids(answer.result(120)) == ids(p.complete(asked, max_tokens=8))
            assert d.metric(LOADS) - before == 1

    def test_nothing_is_left(self, two_to_one: Pair) -> None:
        for engine in two_to_one:
            assert settled(engine)
            assert engine.metric(OPEN) == 0


# --- under a MultiConnector ----------------------------------------------------------------------

SHAPES = {"stages to tp": ({"pp": 2}, {"tp": 2}), "tp to stages": ({"tp": 2}, {"pp": 2})}


def under_multi(name: str, model: Path, logs: Path, port: int, **shape: int) -> Engine:
    children = [
        {
            "kv_connector": kind,
            **OURS,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**SECONDS, **more},
        }
        for kind, more in (
            ("NixlConnector", {}),
            ("MooncakeConnector", {"bootstrap_port": port} if port else {}),
        )
    ]
    return Engine(
        name,
        model,
        logs / f"{name}.log",
        connector={"connectors": children},
        transfer={"kv_connector": "MultiConnector", "kv_connector_module_path": None},
        environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        **shape,
    )


@pytest.mark.matrix
@pytest.mark.parametrize("shapes", SHAPES)
def test_ranks_under_a_multi_connector(shapes: str, model: Path, tmp_path: Path) -> None:
    """Both styles, both children, from every rank of one to every rank of the other."""
    source, target = SHAPES[shapes]
    port = free_port()
    p = under_multi("p", model, tmp_path, port, **source)
    d = under_multi("d", model, tmp_path, 0, **target, block_size=64)
    for _ in running(p, d):
        for seed, tokens in ((1, 40), (2, 300)):
            asked = prompt(seed, tokens)
            told = p.complete(asked, max_tokens=1, kv_transfer_params=toy_proxy_prefill())
            answer = d.complete(asked, max_tokens=8, kv_transfer_params=told["kv_transfer_params"])
            assert ids(answer) == ids(p.complete(asked, max_tokens=8))
            assert ids(answer) != ids(p.complete(prompt(seed + 7, tokens), max_tokens=8))
        asked = prompt(3, 260)
        p.complete(asked, max_tokens=1, kv_transfer_params=mooncake_prefill("x3"))
        answer = d.complete(
            asked, max_tokens=8, kv_transfer_params=mooncake_decode("x3", port, "p")
        )
        assert ids(answer) == ids(p.complete(asked, max_tokens=8))
        assert d.metric(LOADS) == 3 * 2  # by rank
        assert settled(p) and settled(d)
