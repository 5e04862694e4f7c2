"""Llama with an Eagle draft over the pool, on real engines: equal keys hold equal bytes.

Two engines, each with a store of its own, compute prompts that share whole blocks and then differ.
What both saved under the same key must be the same, also the bytes of the draft.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from test_pool import ask, folder, pool_engine, settle  # noqa: F401

from kvferry.carriers.base import MemoryRegion
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices
from tiny_models import make_eagle, make_model
from vllm_engines import Engine

BLOCK = 32
SHARED = [(i * 37) % 500 + 3 for i in range(64)]
FIRST, OTHER = [*SHARED, *range(10, 50)], [*SHARED, *range(110, 150)]


def eagle_engine(name: str, folder: Path, store: str) -> Engine:  # noqa: F811
    model = make_model(folder / "target") if not (folder / "target").exists() else folder / "target"
    draft = make_eagle(folder / "draft")
    extra = {"path": str(folder / store), "size": "64MiB"}
    engine = pool_engine(name, model, folder, block_size=BLOCK, extra=extra)
    speculative = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    engine.arguments += ["--speculative-config", json.dumps(speculative)]
    return engine.start()


def objects(path: Path) -> dict[str, np.ndarray]:
    """All blocks in a store, as numbers."""
    store, found = EmbeddedStore(path, 64 << 20), {}
    try:
        for one in store.listed():
            if one.key.split("/")[3] in ("layout", "index"):
                continue
            content = np.zeros(one.bytes, dtype=np.uint8)
            store.register([MemoryRegion(content.ctypes.data, one.bytes)])
            whole = [np.asarray([n], dtype=np.int64) for n in (0, content.ctypes.data, one.bytes)]
            assert store.get([one.key], [Slices(*whole)], time.monotonic() + 5) == [Outcome.DONE]
            found[one.key] = content.view(np.float32)
    finally:
        store.close()
    return found


@pytest.mark.matrix
def test_equal_keys_hold_equal_bytes(folder: Path) -> None:  # noqa: F811
    kept: list[dict[str, Any]] = []
    for name, prompts in (("first", [FIRST]), ("other", [OTHER, FIRST])):
        with eagle_engine(name, folder, f"store-{name}") as engine:
            engine.wait_ready()
            for tokens in prompts:
                _, hits, _ = ask(engine, tokens)
                assert hits == 0
                settle(engine)
        kept.append(objects(folder / f"store-{name}"))
    first, other = kept
    common = first.keys() & other.keys()
    assert len(common) == 3  # FIRST is 104 tokens long
    assert len(other) == 3 + 2  # and OTHER has a second and a third block of its own
    for key in common:
        assert np.allclose(first[key], other[key], rtol=1e-3, atol=1e-3), key


@pytest.mark.matrix
def test_an_engine_reads_what_another_drafted(folder: Path) -> None:  # noqa: F811
    with eagle_engine("writer", folder, "store") as engine:
        engine.wait_ready()
        truth, hits, _ = ask(engine, FIRST)
        assert hits == 0
        settle(engine)
    with eagle_engine("reader", folder, "store") as engine:
        engine.wait_ready()
        _, hits, _ = ask(engine, OTHER)
        assert hits == 32  # not the second block, whose last draft slot is of another token
        found, hits, _ = ask(engine, FIRST)
        assert found == truth and hits >= 64, hits
