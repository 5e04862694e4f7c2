"""A model with windows and full attention over the pool, between engines with other blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from test_pool import ask, event, folder, pool_engine, prompt, settle  # noqa: F401

from tiny_models import TINY, make_model


@pytest.mark.matrix
def test_windows_and_full_attention(folder: Path) -> None:  # noqa: F811
    model = make_model(folder / "gemma", TINY["gemma3"])
    first = pool_engine("wide", model, folder)
    second = pool_engine("narrow", model, folder, block_size=32)
    try:
        for engine in (first, second):
            engine.start()
        for engine in (first, second):
            engine.wait_ready()
        truth = {}
        for n in (300, 1000):
            out, hits, computed = ask(first, prompt(1, n))
            assert (hits, computed) == (0, n)
            truth[n] = out
        settle(first)
        for n in (300, 1000):
            out, hits, computed = ask(second, prompt(1, n))
            assert out == truth[n]
            assert hits == n // 128 * 128 and computed == n - hits, (n, hits, computed)
            other, hits, _ = ask(second, prompt(2, n))
            assert hits == 0 and other != out
        assert event(second, "load_failures") == 0
        settle(second)
    finally:
        for engine in (first, second):
            engine.stop()
