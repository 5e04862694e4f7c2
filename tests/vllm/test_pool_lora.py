"""The pool and LoRA adapters: one that was trained anew under its name finds nothing of the old."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.core.sched.scheduler", reason="this tier runs in the environment with vLLM"
)
pytest.importorskip("kvferry.vllm")

from vllm.lora.request import LoRARequest

import vllm_scheduler
from dir_store import DirStore
from kvferry.pool import adapters as module
from vllm_scheduler import SchedulerEngine

PROMPT = [i * 37 % 5000 for i in range(100)]


def adapter(path: Path, data: bytes) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in (
        ("adapter_config.json", b'{"r": 8}'),
        ("adapter_model.safetensors", (2).to_bytes(8, "little") + b"{}" + data),
    ):
        (path / name).write_bytes(content)
        os.utime(path / name, (1_700_000_000, 1_700_000_000))
    return path


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Tokens that a new engine computes of the prompt with an adapter."""
    engines: list[SchedulerEngine] = []

    def by_an_engine(lora: LoRARequest | None, **extra: Any) -> int:
        engine = SchedulerEngine(
            tmp_path, lambda: DirStore(str(tmp_path / "store")), extra=extra or None
        )
        engines.append(engine)
        engine.add("a", PROMPT, lora=lora)
        engine.run()
        assert engine.pinned == 0 and engine.in_use == 0
        return engine.computed["a"]

    yield by_an_engine
    for engine in engines:
        engine.close()


def test_an_adapter_trained_anew(
    tmp_path: Path, computed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same name, number and path. Its own copy elsewhere finds what it computed."""
    monkeypatch.setattr(module, "CLOCK_SECONDS", -1e9)  # files are older than engines
    folder = adapter(tmp_path / "x", b"first")
    whole = computed(LoRARequest("x", 1, str(folder)))
    hit = computed(LoRARequest("x", 1, str(folder)))
    assert hit == whole - 96
    adapter(folder, b"other")
    assert computed(LoRARequest("x", 1, str(folder))) == whole
    copy = adapter(tmp_path / "y", b"first")
    assert computed(LoRARequest("y", 2, str(copy))) == hit
    assert computed(None) == whole


def test_files_younger_than_the_engine(
    tmp_path: Path, computed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which the engine has loaded, unless the operator says that files are final."""
    monkeypatch.setattr(module, "CLOCK_SECONDS", 1e9)
    lora = LoRARequest("x", 1, str(adapter(tmp_path / "x", b"first")))
    whole = computed(lora)
    assert computed(lora) == whole
    computed(lora, lora_files_final=True)
    assert computed(lora, lora_files_final=True) == whole - 96
    in_place = LoRARequest("x", 1, lora.lora_path, load_inplace=True)
    assert computed(in_place, lora_files_final=True) == whole


@pytest.mark.parametrize("change", ["none", "files", "host"])
def test_files_that_change_before_the_first_step(
    tmp_path: Path, computed: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What the workers load is not what the request was named for, or one of them cannot tell:
    none of them stores its part. Blocks are free in any case."""
    monkeypatch.setattr(module, "CLOCK_SECONDS", -1e9)
    lora = LoRARequest("x", 1, str(adapter(tmp_path / "x", b"first")))
    if change == "host":
        hosts = iter(["another host"])
        made = vllm_scheduler.FerryHandshake

        def elsewhere(engine: bytes, rank: bytes) -> Any:
            told = made(engine, rank)
            told.host = next(hosts, told.host)
            return told

        monkeypatch.setattr(vllm_scheduler, "FerryHandshake", elsewhere)
    engine = SchedulerEngine(tmp_path, lambda: DirStore(str(tmp_path / "store")), tp=2)
    engine.add("a", PROMPT, lora=lora)
    asked = engine.connector.scheduler._adapters_of["a"]
    while asked.name is None:
        time.sleep(0.001)
    if change == "files":
        adapter(tmp_path / "x", b"other")
    engine.run()
    assert engine.pinned == 0 and engine.in_use == 0
    counts = [worker.take_counts() for worker in engine.workers]
    engine.close()
    kept = "save_done" if change == "none" else "save_lora_refused"
    for counted in counts:
        assert counted.keys() & {"save_done", "save_lora_refused"} == {kept}
    copy = LoRARequest("y", 2, str(adapter(tmp_path / "y", b"first")))
    whole = len(PROMPT) + 3
    assert computed(copy) == (whole - 96 if change == "none" else whole)


def test_files_that_cannot_be_read_in_time(
    tmp_path: Path, computed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waits for its lookup's time, and is computed."""
    monkeypatch.setattr(module, "stamp_of", lambda path: time.sleep(2))
    begin = time.monotonic()
    lora = LoRARequest("x", 1, str(adapter(tmp_path / "x", b"first")))
    assert computed(lora, lookup_seconds=0.3) == len(PROMPT) + 3
    assert 0.3 <= time.monotonic() - begin < 2
