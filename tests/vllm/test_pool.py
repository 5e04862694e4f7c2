"""Real engines of different shapes over one pool: what one computed, the others read.

fp32 and greedy, on vLLM's CPU build, with the embedded store. The truth for tokens is the engine
that computed a prompt first, with nothing in the pool; how much was computed is counted by vLLM.
Beside every equality stands a control: other prompts give other tokens, and hit nothing.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.vllm.metrics import POOL_EVENTS
from tiny_models import make_model
from vllm_engines import Engine

HITS = "vllm:external_prefix_cache_hits_total"
COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
USAGE = "vllm:kv_cache_usage_perc"
TOKENS = 12
LENGTHS = (140, 300, 1000)


def prompt(seed: int, tokens: int) -> list[int]:
    seed = 1013 * seed + tokens  # no prompt is the beginning of another
    return [(seed * 7919 + i * (37 + seed)) % 500 + 3 for i in range(tokens)]


def ids(answer: dict[str, Any]) -> list[int]:
    assert "choices" in answer, answer
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def event(engine: Engine, name: str) -> float:
    """One of the pool's own counters."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    metric, label = POOL_EVENTS[name]
    mine = [x for x in lines if re.match(f"vllm:kvferry_{metric}_total[{{ ]", x)]
    mine = [x for x in mine if not label or f'outcome="{label[0]}"' in x]
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


def pool_engine(name: str, model: Path, folder: Path, **options: Any) -> Engine:
    # tiny models compute faster than they load
    extra = {"min_load_tokens": 0, **options.pop("extra", {})}
    if "store" not in extra:
        extra = {"path": str(folder / "store"), "size": "256MiB", **extra}
    transfer = {
        "kv_connector": "FerryPoolConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    engine = Engine(name, model, folder / f"{name}.log", **options)
    engine.arguments = ["--kv-transfer-config", json.dumps(transfer)]
    engine.arguments += ["--max-num-batched-tokens", "512"]  # longer prompts come in chunks
    return engine


def settle(engine: Engine, seconds: float = 60.0) -> None:
    """Until all saves have ended: nothing is pinned, and the counts stand still."""
    deadline, last = time.monotonic() + seconds, -1.0
    while time.monotonic() < deadline:
        engine.complete(prompt(999, 5), max_tokens=1)  # counts travel with steps
        now = event(engine, "save_done") + event(engine, "save_known")
        if engine.metric(USAGE) == 0 and now == last:
            return
        last = now
        time.sleep(0.5)
    raise AssertionError(f"saves of {engine.name} do not end:\n{engine.tail()}")


def ask(engine: Engine, tokens: list[int]) -> tuple[list[int], int, int]:
    """Tokens out, tokens loaded, tokens computed."""
    hits, computed = engine.metric(HITS), engine.metric(COMPUTED)
    out = ids(engine.complete(tokens, max_tokens=TOKENS))
    return out, int(engine.metric(HITS) - hits), int(engine.metric(COMPUTED) - computed)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_engines_of_other_shapes_read(folder: Path) -> None:
    """tp 1, blocks of 128; tp 2, blocks of 32; tp 1, blocks of 64, when the first is gone."""
    model = make_model(folder / "tiny")
    first = pool_engine("one", model, folder)
    second = pool_engine("two", model, folder, tp=2, block_size=32)
    third = pool_engine("three", model, folder, block_size=64)
    truth: dict[tuple[int, int], list[int]] = {}
    try:
        for engine in (first, second):
            engine.start()
        first.wait_ready()
        for n in LENGTHS:
            out, hits, computed = ask(first, prompt(1, n))
            assert (hits, computed) == (0, n), "the truth is computed, not loaded"
            truth[1, n] = out
        settle(first)
        assert event(first, "save_done") == sum((n + TOKENS - 1) // 128 for n in LENGTHS)
        second.wait_ready()

        for n in LENGTHS:  # tp 1 -> 2, blocks of 128 -> 32
            out, hits, computed = ask(second, prompt(1, n))
            assert out == truth[1, n], n
            assert hits == n // 128 * 128 and computed == n - hits, (n, hits, computed)
            out, hits, _ = ask(second, prompt(2, n))  # a control, and something new to save
            assert out != truth[1, n] and hits == 0
            truth[2, n] = out
        assert event(second, "load_failures") == 0

        # both write the same new prefixes at once
        both = [prompt(3 + i, 400) for i in range(4)]
        with ThreadPoolExecutor(8) as threads:
            answers = [
                threads.submit(e.complete, p, max_tokens=TOKENS)
                for p in both
                for e in (first, second)
            ]
            outs = [ids(answer.result()) for answer in answers]
        assert outs[0::2] == outs[1::2]
        for engine in (first, second):
            settle(engine)
        first.stop()  # the writer is gone; what it wrote stays
        third.start().wait_ready()

        for n in LENGTHS:  # tp 2 -> 1, blocks of 32 -> 64; and from the first engine's blocks
            out, hits, computed = ask(third, prompt(2, n))
            assert out == truth[2, n], n
            assert hits == (n - 1) // 64 * 64 and computed == n - hits, (n, hits, computed)
            out, hits, _ = ask(third, prompt(1, n))
            # the first engine's blocks, and after them those that the second one added
            assert out == truth[1, n] and hits == (n - 1) // 64 * 64, (n, hits)
        for p, out in zip(both, outs[0::2], strict=True):
            again, hits, _ = ask(third, p)
            assert again == out and hits >= 384

        # damage: every object that is read turns out to be corrupt, and is computed again
        settle(third)
        look_at(folder / "store")
        second.stop()
        errors = damage(folder / "store")
        assert errors > 0
        fresh = pool_engine("four", model, folder, block_size=32)
        third.stop()
        try:
            fresh.start().wait_ready()
            for n in LENGTHS:
                out, _, _ = ask(fresh, prompt(1, n))
                assert out == truth[1, n], "a wrong token from damaged memory"
            settle(fresh)
            assert event(fresh, "load_corrupt") > 0 and event(fresh, "load_failures") > 0
            clean(folder / "store")
        finally:
            fresh.stop()
    finally:
        for engine in (first, second, third):
            engine.stop()


def command(store: Path, *words: str) -> tuple[int, str]:
    """`kvferry pool` as a user runs it, while engines use the store."""
    program = Path(sys.executable).with_name("kvferry")
    done = subprocess.run(
        [program, "pool", *words, "--dir", str(store)], capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout


def look_at(store: Path) -> None:
    status, out = command(store, "stats", "--json")
    assert status == 0 and json.loads(out)["objects"] > 0
    status, out = command(store, "ls", "--json", "--limit", "500")
    parts = [one["key"] for one in json.loads(out) if "/layout/" not in one["key"]]
    parts = [key for key in parts if "/index/" not in key]
    assert {key.split("/")[4].split(".")[2] for key in parts} == {
        "0",
        "1",
    }  # of the engine with tp 2
    assert command(store, "verify")[0] == 0


def clean(store: Path) -> None:
    assert command(store, "verify")[0] == 1  # removes what was damaged, and says so
    assert command(store, "verify")[0] == 0
    before = json.loads(command(store, "stats", "--json")[1])["objects"]
    status, out = command(store, "evict", "1KB", "--yes")
    evicted = int(out.split()[1])
    assert status == 0 and 1 <= evicted < before
    status, out = command(
        store, "clear", "--yes"
    )  # meanwhile the engine may publish its layout again
    assert status == 0 and int(out.split()[1]) >= before - evicted


def damage(place: Path) -> int:
    """Flip a byte of every block in the store's memory; not of layouts, which would be misses."""
    store = EmbeddedStore(place)
    keys = [one.key for one in store.listed() if not {"layout", "index"} & set(one.key.split("/"))]
    with store.lending(keys) as lent:
        for at in lent.place[lent.there].tolist():
            byte = (ctypes.c_uint8 * 1).from_address(at + 700)
            byte[0] ^= 0xFF
        flipped = int(lent.there.sum())
    store.close()
    return flipped
