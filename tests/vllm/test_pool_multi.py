"""Hand-over and pool as two children of vLLM's MultiConnector, between real engines.

The prefill engine saves what it computes and hands it over; when it is gone, another one of another
shape loads its prefixes from the pool and hands those over. The truth is the decode engine alone:
asked under a cache salt, it finds nothing anywhere, and leaves nothing that others find.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from test_pool import (
    COMPUTED,
    HITS,
    TOKENS,
    ask,
    event,
    folder,  # noqa: F401
    ids,
    prompt,
    settle,
)

from tiny_models import make_model
from vllm_engines import Engine, hand_over
from vllm_pairs import OURS

LOADS, OPEN = "vllm:kvferry_loads_total", "vllm:kvferry_holds_open"


def engine_of_two(name: str, model: Path, place: Path, role: str, **shape: int) -> Engine:
    def child(kind: str, role: str, **extra: Any) -> dict[str, Any]:
        return {"kv_connector": kind, **OURS, "kv_role": role, "kv_connector_extra_config": extra}

    pool = {"path": str(place / "store"), "size": "128MiB", "min_load_tokens": 0}
    pool_role = "kv_both" if role == "kv_producer" else "kv_consumer"
    children = [child("FerryConnector", role), child("FerryPoolConnector", pool_role, **pool)]
    return Engine(
        name,
        model,
        place / f"{name}.log",
        connector={"connectors": children},
        transfer={"kv_connector": "MultiConnector", "kv_connector_module_path": None},
        on_failure="recompute",
        **shape,
    )


def counts(engine: Engine) -> tuple[int, int]:
    """Tokens that came from elsewhere, tokens that were computed."""
    return int(engine.metric(HITS)), int(engine.metric(COMPUTED))


def since(engine: Engine, before: tuple[int, int]) -> tuple[int, int]:
    now = counts(engine)
    return now[0] - before[0], now[1] - before[1]


def handed(
    prefill: Engine, decode: Engine, tokens: list[int]
) -> tuple[list[int], tuple[int, int], int]:
    """Tokens out; what the prefill engine loaded and computed; what was handed over."""
    before = counts(prefill), counts(decode)
    out = ids(hand_over(prefill, decode, tokens, max_tokens=TOKENS))
    return out, since(prefill, before[0]), since(decode, before[1])[0]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_hand_over_beside_a_pool(folder: Path, tp: int) -> None:  # noqa: F811
    """Prefilled with blocks of 128, and then of 64; decoded with blocks of 32, and another tp."""
    model = make_model(folder / "tiny")
    first = engine_of_two("p1", model, folder, "kv_producer")
    second = engine_of_two("p2", model, folder, "kv_producer", block_size=64)
    decode = engine_of_two("d", model, folder, "kv_consumer", tp=tp, block_size=32)
    given, kept, pooled, fresh = (prompt(seed, 300 + seed) for seed in (1, 2, 3, 4))
    try:
        for engine in (first, decode):
            engine.start()
        for engine in (first, decode):
            engine.wait_ready()
        truth = []
        for tokens in (given, kept, pooled, fresh):
            before = counts(decode)
            alone = decode.complete(tokens, max_tokens=TOKENS, cache_salt="alone")
            truth.append(ids(alone))
            assert since(decode, before) == (0, len(tokens)), "the truth is computed, not loaded"
        assert len({tuple(out) for out in truth}) == 4, "prompts that cannot be told apart"

        # prefilled, handed over, saved
        assert handed(first, decode, given) == (truth[0], (0, len(given)), len(given))
        for tokens in (kept, pooled):
            first.complete(tokens, max_tokens=1)
        settle(first)
        assert event(first, "save_done") == 3 * 2  # of 128 tokens each
        # no ticket: the decode engine has the pool, too
        out, hits, computed = ask(decode, pooled)
        assert (out, hits, computed) == (truth[2], 256, len(pooled) - 256)
        first.kill()

        # another engine prefills from the pool what that one computed, and hands over all of it
        second.start().wait_ready()
        rest = len(kept) - 256
        assert handed(second, decode, kept) == (truth[1], (256, rest), len(kept))
        # what the decode engine still has is not fetched again
        rest = len(given) - 256
        assert handed(second, decode, given) == (truth[0], (256, rest), len(given) % 32)
        # a control: what nobody has computed is in no pool, and gives its own tokens
        assert handed(second, decode, fresh) == (truth[3], (0, len(fresh)), len(fresh))

        for engine in (second, decode):
            settle(engine)
            assert event(engine, "load_failures") == 0
            assert engine.metric(OPEN) == 0
        assert event(second, "loads") == 2 and event(decode, "loads") == 1 * tp  # by rank
        assert decode.metric(LOADS) == 4 * tp
        assert event(decode, "save_jobs") == 0
    finally:
        for engine in (first, second, decode):
            engine.stop()
