"""vLLM's own model files, one of every family that we know, cache what we say that they cache.

The models are built without weights (`model_files`). Their specs, and nothing of ours, say which
layers have a cache, of how many heads, of which size, and with which window.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    import transformers

    from model_files import built, one_rank

from kvferry.layout.hf import FAMILIES, knows, model_from_config
from kvferry.layout.model import CacheModel
from kvferry.vllm.describe import model_from_specs

pytestmark = pytest.mark.filterwarnings("ignore")
Told = dict[int, tuple[str, int, tuple[tuple[int, int], ...]]]  # by layer: kind, span, heads
LAYERS = 12
# vLLM runs these on GPUs only, its CPU build lacks what their files import, or their layers keep
# states, of which captured engines tell (`test_describe.py`)
ELSEWHERE = """
bamba deepseek_v32 falcon_mamba glm_moe_dsa granitemoehybrid jamba kimi_k2 llama4 mamba
mamba2 nemotron_h qwen3_5_moe_text qwen3_5_text qwen3_next
"""
# what vLLM's files ask of a configuration, and transformers' class leaves out
MORE: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "norm_topk_prob": True},
    "glm4v_moe_text": {"head_dim": 128, "use_qk_norm": False},
    "hunyuan_v1_dense": {"head_dim": 128},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    "ministral": {"head_dim": 128},
    "phimoe": {"num_hidden_layers": 1},  # takes vLLM two seconds a layer
    "gemma3n_text": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 512,
        "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 4,
    },
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
WINDOW = {"sliding_window": 64}
USED = {"use_sliding_window": True, "max_window_layers": 0, **WINDOW}
WINDOWED = "mistral ministral3 mixtral phi3 starcoder2 cohere2 cohere2_moe olmo3 gemma2 gpt_oss"
CHANGED: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(WINDOWED.split(), (WINDOW,)),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "smollm3"), (USED,)),
    "llama": ({"num_key_value_heads": 8, "head_dim": 80},),
    "gemma4_text": (
        {"num_kv_shared_layers": 4},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_key_value_heads": 8},
    ),
}
# models of images and sound have one of these below
TEXT_OF = {
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_5": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe": "Qwen3MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe": "Glm4MoeForCausalLM",
}
# the text models of these have a name of their own
WHOLE = {"gemma3", "gemma3n", "gemma4", "llama4", "qwen2_vl", "qwen2_5_vl"}
# of which we have no table
OTHERS = """
gpt2 opt gptj falcon gpt_neox stablelm phi arcee cwm hunyuan_v1_dense laguna
"""
CASES = [
    (family, changes)
    for family in sorted({*FAMILIES} - {*ELSEWHERE.split()} - WHOLE) + OTHERS.split()
    for changes in ({}, *CHANGED.get(family, ()))
]


@pytest.fixture(scope="module", autouse=True)
def rank() -> Iterator[None]:
    with one_rank():
        yield


def configuration(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    more = {"num_hidden_layers": LAYERS, **MORE.get(family, {}), **changes}
    text = transformers.CONFIG_MAPPING[family](**more).to_dict()
    of_others = [known for name, known in TEXT_OF.items() if family.startswith(name)]
    architecture = of_others[0] if of_others else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    text.setdefault("tie_word_embeddings", False)
    return {**text, "architectures": [architecture], "dtype": "bfloat16"}


def by_layer(model: CacheModel) -> Told:
    kinds = {
        "full": "FullAttentionSpec",
        "window": "SlidingWindowSpec",
        "chunk": "ChunkedLocalAttentionSpec",
    }
    return {
        layer: (
            "MLAAttentionSpec" if group.name == "mla" else kinds[group.residency.kind],
            group.residency.span,
            tuple((c.units, *c.dims) for c in group.components),  # type: ignore[misc]
        )
        for group in model.groups
        for layer in group.layers
    }


def by_vllm(specs: dict[str, Any]) -> Told:
    told = {}
    for name, spec in specs.items():
        (layer,) = (int(word) for word in name.split(".") if word.isdigit())
        heads = [(spec.num_kv_heads, size) for size in (spec.head_size, spec.head_size_v) if size]
        span = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        told[layer] = (type(spec).__name__, span or 0, tuple(heads))
    return told


def name(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *case[1]])


@pytest.mark.parametrize(("family", "changes"), CASES, ids=map(name, CASES))
def test_layers_cache_what_is_described(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    asked = configuration(family, changes)
    device = "cpu" if family == "gemma3n_text" else "meta"  # it reads what it sets
    vllm_config, specs = built(tmp_path, asked, device)
    text = {**vllm_config.model_config.hf_text_config.to_dict(), "dtype": "bfloat16"}
    expected = by_vllm(specs)
    shared = asked.get("num_kv_shared_layers", 0)
    assert len(expected) == asked.get("num_hidden_layers", LAYERS) - shared
    from_specs = model_from_specs(vllm_config, [*specs.items()])
    assert by_layer(from_specs) == expected
    assert knows(text) == (family not in OTHERS.split())
    if knows(text):
        model = model_from_config(text)
        assert by_layer(model) == expected
        assert model.fingerprint() == from_specs.fingerprint()
