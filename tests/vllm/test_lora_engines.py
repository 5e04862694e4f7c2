"""Real engines with LoRA: a decode engine takes over what its own adapter would have computed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from test_pool_lora_engines import RANK, make_adapter

from tiny_models import make_model
from vllm_engines import Engine, hand_over
from vllm_pairs import ids, prompt, started

HIT = "vllm:external_prefix_cache_hits_total"
NOT_HELD = "vllm:kvferry_requests_not_held_total"
COUNT = 300


def test_adapters_of_one_name(tmp_path: Path) -> None:
    """`same` has the same files on both engines, in two folders; `sql` has other weights."""
    model = make_model(tmp_path / "tiny")
    folders = {name: tmp_path / name for name in ("p", "d")}
    for path in folders.values():
        path.mkdir()
    make_adapter(folders["p"] / "same", seed=1)
    shutil.copytree(folders["p"] / "same", folders["d"] / "same")
    make_adapter(folders["p"] / "sql", seed=2)
    make_adapter(folders["d"] / "sql", seed=3)
    engines = []
    for name, path in folders.items():
        engine = Engine(name, model, tmp_path / f"{name}.log", connector={"carriers": ["local"]})
        engine.arguments = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"]
        engine.arguments += ["--lora-modules", *(f"{p.name}={p}" for p in sorted(path.iterdir()))]
        engines.append(engine)
    prefill, decode = started(*engines)
    with prefill, decode:

        def alone(engine: Engine, adapter: str, seed: int = 1) -> list[list[int]]:
            """What an engine computes with nobody's help, nor with that of its own cache."""
            options = {"model": adapter, "max_tokens": 12, "cache_salt": "alone"}
            return ids(engine.complete(prompt(seed, COUNT), **options))

        def handed(adapter: str, seed: int = 1) -> tuple[list[list[int]], int]:
            """Tokens out, tokens loaded."""
            before, asked = decode.metric(HIT), prompt(seed, COUNT)
            answer = hand_over(prefill, decode, asked, model=adapter, max_tokens=12)
            return ids(answer), int(decode.metric(HIT) - before)

        assert handed("same") == (alone(decode, "same"), COUNT)
        assert handed("sql") == (alone(decode, "sql"), 0)
        assert handed("tiny") == (alone(decode, "tiny"), COUNT)
        outputs = [alone(decode, name) for name in ("same", "sql", "tiny")]
        assert len({str(out) for out in [*outputs, alone(prefill, "sql")]}) == 4
        assert "LoRA adapter 'sql'" in decode.log.read_text()
        assert prefill.metric(NOT_HELD) == 0
