"""Hand-over and pool in one connector, between real engines; and what routers are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from test_pool import HITS, ask, event, folder, ids, prompt, settle  # noqa: F401

from tiny_models import make_model
from vllm_engines import Engine, hand_over


@pytest.fixture
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:  # noqa: F811
    model = make_model(folder / "tiny")
    pool = {"path": str(folder / "both"), "size": "128MiB", "min_load_tokens": 0}
    made = [
        Engine("prefill", model, folder / "prefill.log", connector={"pool": pool}),
        Engine("decode", model, folder / "decode.log", block_size=32, connector={"pool": pool}),
    ]
    try:
        for engine in made:
            engine.start()
        for engine in made:
            engine.wait_ready()
        yield made[0], made[1]
    finally:
        for engine in made:
            engine.stop()


@pytest.mark.matrix
def test_hand_over_with_a_pool(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    # a ticket: handed over, and saved by the engine that computed it
    truth = ids(hand_over(prefill, decode, prompt(1, 300), max_tokens=12))
    settle(prefill)
    assert event(prefill, "save_done") == 2  # of 128 tokens
    assert decode.metric(HITS) == 300
    assert ids(prefill.complete(prompt(1, 300), max_tokens=12)) == truth
    # no ticket: from the pool
    first = ids(prefill.complete(prompt(2, 300), max_tokens=12))
    settle(prefill)
    out, hits, computed = ask(decode, prompt(2, 300))
    assert (out, hits, computed) == (first, 256, 44)
    assert out != truth
    # a prefill engine that finds its prompt in the pool loads it, and hands it over
    second = ids(decode.complete(prompt(3, 300), max_tokens=12))
    settle(decode)
    before = prefill.metric(HITS)
    assert ids(hand_over(prefill, decode, prompt(3, 300), max_tokens=12)) == second
    assert prefill.metric(HITS) - before == 256
    for engine in (prefill, decode):
        settle(engine)
        assert event(engine, "load_failures") == 0
