"""Hand-over and pool in one connector, between real engines; and what routers are told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from test_pool import HITS, ask, event, folder, ids, prompt, settle  # noqa: F401

from kvferry.demo.engines import Engine, free_port, hand_over
from kvferry.demo.tiny_model import make_model


class Router:
    """Listens to an engine's KV events."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.subscribe(b"")

    def stored(self, seconds: float = 10.0) -> int:
        """Blocks that were told as stored in the pool."""
        count, deadline = 0, time.monotonic() + seconds
        while time.monotonic() < deadline and self._socket.poll(500 if count == 0 else 1500):
            *_, payload = self._socket.recv_multipart()
            for told in msgspec.msgpack.decode(payload)[1]:
                if told["type"] == "BlockStored" and told.get("medium") == "STORAGE":
                    count += len(told["block_hashes"])
        return count

    def close(self) -> None:
        self._socket.close(0)


@pytest.fixture
def engines(folder: Path) -> Iterator[tuple[Engine, Engine, Router]]:  # noqa: F811
    model, port = make_model(folder / "tiny"), free_port()
    pool = {"path": str(folder / "both"), "size": "128MiB"}
    made = [
        Engine("prefill", model, folder / "prefill.log", connector={"pool": pool}),
        Engine("decode", model, folder / "decode.log", block_size=32, connector={"pool": pool}),
    ]
    events: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events["endpoint"] = f"tcp://127.0.0.1:{port}"
    made[0].arguments = ["--kv-events-config", json.dumps(events)]
    router = Router(port)
    try:
        for engine in made:
            engine.start()
        for engine in made:
            engine.wait_ready()
        yield made[0], made[1], router
    finally:
        router.close()
        for engine in made:
            engine.stop()


def test_hand_over_with_a_pool(engines: tuple[Engine, Engine, Router]) -> None:
    prefill, decode, router = engines
    # a ticket: handed over, and saved by the engine that computed it
    truth = ids(hand_over(prefill, decode, prompt(1, 300), max_tokens=12))
    settle(prefill)
    assert event(prefill, "save_done") == 2  # of 128 tokens
    assert router.stored() == 2
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
