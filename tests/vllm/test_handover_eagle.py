"""Llama with an Eagle draft, prefilled by one real engine and decoded by another of other blocks.

Tokens are those of one engine alone, and what the draft's layer holds after a load is, byte for
byte, what it held on the prefill engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from real_pairs import call, probed, require_same_cache, seen
from tiny_models import make_eagle, make_model
from vllm_engines import Engine, hand_over
from vllm_pairs import ids, prompt, settled, started

DRAFT = "model.layers.4."  # behind the target's four layers
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("eagle")
    target, draft = make_model(folder / "target"), make_eagle(folder / "draft")
    speculative = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    engines = []
    for name, block in (("p", 64), ("d", 32)):
        config = {"lease_seconds": 60.0, "load_seconds": 60.0}
        engine = Engine(name, target, folder / f"{name}.log", block_size=block, connector=config)
        engine.arguments += ["--speculative-config", json.dumps(speculative)]
        engines.append(probed(engine))
    try:
        p, d = started(*engines)
        for engine in (p, d):
            call(engine, "watch_cache")
        yield p, d
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.matrix
@pytest.mark.parametrize("tokens", [20, 128, 333])
def test_bytes_and_tokens_are_equal(pair: Pair, tokens: int) -> None:
    p, d = pair
    drafted = d.metric(DRAFTED)
    asked = prompt(tokens, tokens)
    answer = ids(hand_over(p, d, asked, max_tokens=12))
    assert d.metric(DRAFTED) > drafted
    (source,), (loaded,) = seen(p), seen(d)
    assert sum(DRAFT in key for key in loaded) == 2 * 4  # K and V of four heads
    assert require_same_cache(source, loaded, 0) == tokens * len(loaded)
    assert answer == ids(p.complete(asked, max_tokens=12))  # which has it all in its own cache
    other = ids(hand_over(p, d, prompt(tokens + 1, tokens), max_tokens=12))
    assert other != answer
    ((another,), (there,)) = seen(p), seen(d)
    with pytest.raises(AssertionError):
        require_same_cache(another, loaded, 0)
    assert require_same_cache(another, there, 0) > 0
    assert "computed here" not in d.log.read_text()
    assert settled(p) and settled(d)
