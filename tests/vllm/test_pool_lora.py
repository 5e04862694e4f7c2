"""The pool and LoRA adapters: one that was trained anew under its name finds nothing of the old."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch

pytest.importorskip(
    "vllm.v1.core.sched.scheduler", reason="this tier runs in the environment with vLLM"
)
pytest.importorskip("kvferry.vllm.connector")

from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from dir_store import DirStore
from kvferry.pool import weights as module
from kvferry.pool.weights import adapter_settings
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
def computed(tmp_path: Path) -> Iterator[Any]:
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


def test_an_adapter_trained_anew(tmp_path: Path, computed: Any) -> None:
    """Same name, number and path. Its own copy elsewhere finds what it computed."""
    folder = adapter(tmp_path / "x", b"first")
    whole = computed(LoRARequest("x", 1, str(folder)))
    hit = computed(LoRARequest("x", 1, str(folder)))
    assert hit == whole - 96
    adapter(folder, b"other")
    assert computed(LoRARequest("x", 1, str(folder))) == whole
    copy = adapter(tmp_path / "y", b"first")
    assert computed(LoRARequest("y", 2, str(copy))) == hit
    assert computed(None) == whole


def test_an_adapter_loaded_in_place(tmp_path: Path, computed: Any) -> None:
    """vLLM may read other files in every step."""
    path = adapter(tmp_path / "x", b"first")
    whole = computed(LoRARequest("x", 1, str(path)))
    for _ in range(2):
        assert computed(LoRARequest("x", 1, str(path), load_inplace=True)) == whole
    assert computed(LoRARequest("x", 1, str(path))) == whole - 96


def test_files_that_cannot_be_read_in_time(
    tmp_path: Path, computed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waits for its lookup's time, and is computed."""
    monkeypatch.setattr(module, "weight_files", lambda path: time.sleep(2))
    begin = time.monotonic()
    lora = LoRARequest("x", 1, str(adapter(tmp_path / "x", b"first")))
    assert computed(lora, lookup_seconds=0.3) == len(PROMPT) + 3
    assert 0.3 <= time.monotonic() - begin < 2


def test_engines_whose_adapters_compute_other_values() -> None:
    """Settings of vLLM's by which the same files change more or fewer modules, or otherwise."""
    settings: list[dict[str, Any]] = [
        {},
        {"lora_dtype": torch.float32},
        {"target_modules": ["q_proj"]},
        {"enable_moe_shared_loras": True},
        {"enable_tower_connector_lora": True},  # the encoder of images too
    ]
    told = [adapter_settings(Fake(lora_config=LoRAConfig(**some))) for some in settings]
    assert len(set(told)) == len(settings)
