"""Tiny models with random weights, as Hugging Face folders: one of every kind of cache that vLLM's
CPU build starts, and MLA with a module for multi-token prediction, which needs a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
# Larger than usual, so that greedy outputs depend on the prompt and not on rounding.
INITIALIZER_RANGE = 0.35
WINDOW = 96  # tokens; shorter than a block of 128, longer than one of 32


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        **changes,
    }


def make_model(folder: Path, config: dict[str, Any] | None = None, seed: int = 0) -> Path:
    """Write a model with random weights and a tokenizer of the words t0 t1 t2 ..."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or llama_config(), indent=1))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.float().save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t1", eos_token="t2")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def make_eagle(folder: Path) -> Path:
    """Write an Eagle draft of one layer for the model that `make_model` writes by default."""
    import torch
    from safetensors.torch import save_file

    config = llama_config(num_hidden_layers=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(1)
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (width, 2 * width),
        "layers.0.self_attn.q_proj": (queries, width),
        "layers.0.self_attn.k_proj": (keys, width),
        "layers.0.self_attn.v_proj": (keys, width),
        "layers.0.self_attn.o_proj": (width, queries),
        "layers.0.mlp.gate_proj": (inner, width),
        "layers.0.mlp.up_proj": (inner, width),
        "layers.0.mlp.down_proj": (width, inner),
    }
    weights = {f"{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    save_file(weights, folder / "model.safetensors")
    return folder


def make_mtp(folder: Path, seed: int = 0) -> Path:
    """Write DeepSeek V3 with one module for multi-token prediction behind its layers."""
    import torch
    from safetensors.torch import load_file, save_file

    config = TINY["mla-mtp"]
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    # the module's block has the weights of one more layer
    make_model(folder, {**config, "num_hidden_layers": layers + 1}, seed)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    target = load_file(folder / "model.safetensors")
    weights = {
        "enorm": torch.ones(width),
        "hnorm": torch.ones(width),
        "eh_proj": 0.1 * torch.randn(width, 2 * width),
        "shared_head.norm": torch.ones(width),
        "shared_head.head": target["lm_head.weight"].clone(),
        "embed_tokens": target["model.embed_tokens.weight"].clone(),
    }
    named = {f"model.layers.{layers}.{name}.weight": tensor for name, tensor in weights.items()}
    save_file(named, folder / "mtp.safetensors")
    return folder


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 256,
        "intermediate_size": 256,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        **fields,
    }


def _deepseek(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return _config(
        architecture,
        model_type,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,  # the CPU's MLA kernels exist for a latent of 512 + 64 only
        q_lora_rank=None,
        qk_nope_head_dim=128,  # FlashAttention's MLA prefill exists for DeepSeek's own sizes only
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        **fields,
    )


TINY: dict[str, dict[str, Any]] = {
    "llama": llama_config(),
    "llama-deep": llama_config(num_hidden_layers=16, num_key_value_heads=8),
    "mla": _deepseek(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        first_k_dense_replace=3,  # no experts: the CPU build has none in fp32
        topk_method="greedy",
    ),
    "mla-mtp": _deepseek(  # for `make_mtp`
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        first_k_dense_replace=4,
        num_nextn_predict_layers=1,
    ),
    "gemma3": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
    ),
    "gemma4": _config(  # the last two layers read what others cached
        "Gemma4ForCausalLM",
        "gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        head_dim=64,
        global_head_dim=128,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
    ),
    "stablelm": _config(  # one that kvferry has no table of
        "StableLmForCausalLM",
        "stablelm",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "gpt-oss": _config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "mistral": _config(
        "MistralForCausalLM",
        "mistral",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
    ),
    "granite": _config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_n_groups=2,
        mamba_d_conv=4,
        mamba_expand=2,
        num_local_experts=0,  # the CPU build has no experts in fp32
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        position_embedding_type="rope",
        initializer_range=0.1,
    ),
    "qwen3-next": _config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        initializer_range=0.1,
        dtype="bfloat16",
    ),
}


if (
    __name__ == "__main__"
):  # a model to try engines with: python tests/support/tiny_models.py FOLDER
    print(make_model(Path(sys.argv[1])))
