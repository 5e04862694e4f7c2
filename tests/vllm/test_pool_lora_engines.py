"""Real engines with a LoRA adapter over one pool: what its older weights computed is not found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from safetensors.numpy import save_file
from test_pool import COMPUTED, HITS, TOKENS, folder, ids, pool_engine, prompt, settle

from tiny_models import llama_config, make_model
from vllm_engines import Engine

__all__ = ["folder"]

RANK = 8


def make_adapter(path: Path, seed: int) -> Path:
    """Of keys and values: what is cached depends on it."""
    config, rng = llama_config(), np.random.default_rng(seed)
    hidden, cached = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    path.mkdir(exist_ok=True)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (cached, RANK))):
                values = rng.normal(0, 0.3, shape).astype(np.float32)
                tensors[f"{name}.{part}.weight"] = values
    save_file(tensors, path / "adapter_model.safetensors")
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(told))
    return path


def ask(engine: Engine, model: str, tokens: list[int]) -> tuple[list[int], int, int]:
    """Tokens out, tokens loaded, tokens computed."""
    hits, computed = engine.metric(HITS), engine.metric(COMPUTED)
    out = ids(engine.complete(tokens, model=model, max_tokens=TOKENS))
    return out, int(engine.metric(HITS) - hits), int(engine.metric(COMPUTED) - computed)


@pytest.mark.matrix
def test_an_adapter_trained_anew(folder: Path) -> None:
    """One name, one path, other files; then the first files again, elsewhere, under other names."""
    model = make_model(folder / "tiny")
    tokens = prompt(1, 300)

    def engine(number: int, name: str, path: Path, **options: object) -> Engine:
        made = pool_engine(f"engine{number}", model, folder, **options)
        made.arguments += ["--enable-lora", "--max-lora-rank", str(RANK)]
        made.arguments += ["--lora-modules", f"{name}={path}"]
        return made

    first = make_adapter(folder / "adapter", seed=1)
    with engine(1, "x", first).start() as one:
        one.wait_ready()
        plain = ask(one, "tiny", tokens)
        truth = ask(one, "x", tokens)
        assert plain[1:] == truth[1:] == (0, 300) and plain[0] != truth[0]
        settle(one)
    make_adapter(folder / "adapter", seed=2)
    copy = make_adapter(folder / "copy", seed=1)
    with engine(2, "x", first) as two, engine(3, "other", copy, tp=2, block_size=32) as three:
        two.start().wait_ready()
        anew = ask(two, "x", tokens)
        assert anew[1:] == (0, 300) and anew[0] not in (truth[0], plain[0])
        assert ask(two, "tiny", tokens) == (plain[0], 256, 44)
        three.start().wait_ready()
        # a copy is the same adapter, whatever it is called and wherever it lies
        assert ask(three, "other", tokens) == (truth[0], 256, 44)
        settle(three)
    with engine(4, "again", copy).start() as four:
        four.wait_ready()
        out, hits, computed = ask(four, "again", tokens)
        assert out == truth[0] and (hits, computed) == (256, 44)
