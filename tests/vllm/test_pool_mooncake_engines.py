"""Real engines over a real Mooncake Store: its master and its memory are processes of the test.

The engines give no memory to the pool, so what a writer stored outlives it. Also here, because the
engines are at hand: what routers hear on ZMQ when blocks come to the pool and turn out to be gone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
pytest.importorskip("mooncake")

import zmq
from test_pool import ask, event, folder, pool_engine, prompt, settle  # noqa: F401

from mooncake_master import Master
from tiny_models import make_model
from vllm_engines import Engine, free_port

MEMORY = 256 << 20
LENGTHS = (300, 1000)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path / "master.log")
    made.hold(MEMORY)
    yield made
    made.close()


class Stored(msgspec.Struct, tag="BlockStored"):
    """vLLM's event as it goes over the wire."""

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[Any]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]


class Listener:
    """A router's ear: what an engine's publisher says, from its replay buffer on."""

    def __init__(self) -> None:
        self.port = free_port()
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{self.port}")
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
        self._decoder = msgspec.msgpack.Decoder(Batch)

    @property
    def arguments(self) -> list[str]:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "topic": "kv",
        }
        return ["--kv-events-config", json.dumps(config)]

    def heard(self, wanted: int, seconds: float) -> list[Any]:
        """Events about the pool; at least so many, or what came in that time."""
        events: list[Any] = []
        deadline = time.monotonic() + seconds
        while len(events) < wanted and time.monotonic() < deadline:
            if self._socket.poll(100):
                _, _, payload = self._socket.recv_multipart()
                batch = self._decoder.decode(payload)
                events += [e for e in batch.events if getattr(e, "medium", "") == "STORAGE"]
        return events

    def close(self) -> None:
        self._socket.close(0)


def mooncake_engine(name: str, model: Path, place: Path, master: Master, **options: Any) -> Engine:
    engine = pool_engine(name, model, place, extra={"store": "mooncake"}, **options)
    engine.environment.update(master.environment())
    return engine


def told(listener: Listener, engine: Engine, hashes: set[Any]) -> list[Any]:
    """Events until all these blocks were told as gone."""
    events: list[Any] = []
    for _ in range(30):
        engine.complete(prompt(999, 5), max_tokens=1)  # events go out with steps
        events += listener.heard(1, 1)
        gone = {h for e in events if isinstance(e, Removed) for h in e.block_hashes}
        if hashes <= gone:
            return events
    raise AssertionError(f"evicted blocks were not told: {events}")


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_writer_that_is_gone(folder: Path, master: Master, tp: int) -> None:  # noqa: F811
    """Blocks of 128 are written, by an engine that is killed; one with blocks of 32 reads them."""
    model = make_model(folder / "tiny")
    listener = Listener()
    writer = mooncake_engine("writer", model, folder, master)
    reader = mooncake_engine("reader", model, folder, master, tp=tp, block_size=32)
    reader.arguments += listener.arguments
    again = mooncake_engine("again", model, folder, master)
    try:
        for engine in (writer, reader):
            engine.start()
        for engine in (writer, reader):
            engine.wait_ready()
        truth = {}
        for n in LENGTHS:
            out, hits, computed = ask(writer, prompt(1, n))
            assert (hits, computed) == (0, n), "the truth is computed, not loaded"
            truth[1, n] = out
        settle(writer)
        writer.kill()
        for n in LENGTHS:
            out, hits, computed = ask(reader, prompt(1, n))
            assert out == truth[1, n], n
            assert hits == n // 128 * 128 and computed == n - hits, (n, hits, computed)
        listener.heard(9, 2)  # blocks that the reader added
        for n in LENGTHS:
            other, hits, _ = ask(reader, prompt(2, n))  # a control, and something new to save
            assert other != truth[1, n] and hits == 0
            truth[2, n] = other
        settle(reader)
        stored = listener.heard(99, 3)
        assert stored and all(isinstance(e, Stored) and e.block_size == 32 for e in stored), stored
        first = {tuple(e.token_ids[:32]) for e in stored if e.parent_block_hash is None}
        assert first == {tuple(prompt(2, n)[:32]) for n in LENGTHS}
        assert event(reader, "load_failures") == 0
        if tp == 2:  # the writer is back
            again.start().wait_ready()
            for seed in (1, 2):
                for n in LENGTHS:
                    out, hits, _ = ask(again, prompt(seed, n))
                    assert out == truth[seed, n] and hits >= (n - 1) // 128 * 128
            settle(again)
        master.wipe()
        told(listener, reader, {h for e in stored for h in e.block_hashes})
    finally:
        listener.close()
        for engine in (writer, reader, again):
            engine.stop()
