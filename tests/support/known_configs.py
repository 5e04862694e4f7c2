"""Parts of public config.json files, without what those leave out, and the caches they make.

A cache is told as vLLM makes it: for each group its layers, span, and elements of a unit.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
Told = dict[str, tuple[int, int, dict[str, tuple[int, tuple[int, ...]]]]]


def kv(heads: int, head_dim: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {"k": (heads, (head_dim,)), "v": (heads, (head_dim,))}


def gemma3(**text: Any) -> Config:
    nested = {"model_type": "gemma3_text", "sliding_window": 1024, **text}
    return {"model_type": "gemma3", "text_config": nested, "torch_dtype": "bfloat16"}


NEMOTRON: Config = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 56,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
COHERE2: Config = {
    "model_type": "cohere2",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "sliding_window": 4096,
}
GLM_DSA: Config = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 12,
    "num_attention_heads": 64,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
}
MIXED = (["sliding_attention"] * 3 + ["full_attention"]) * 8
KNOWN: dict[str, tuple[Config, Told]] = {
    "command-r7b": (
        {**COHERE2, "sliding_window_pattern": 4},
        {"attention": (8, 0, kv(8, 128)), "window": (24, 4097, kv(8, 128))},
    ),
    "command-a": (
        {**COHERE2, "layer_types": MIXED},
        {"attention": (8, 0, kv(8, 128)), "window": (24, 4097, kv(8, 128))},
    ),
    "gemma-2-9b": (
        {
            "model_type": "gemma2",
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "hidden_size": 3584,
            "sliding_window": 4096,
        },
        {"attention": (21, 0, kv(8, 256)), "window": (21, 4096, kv(8, 256))},
    ),
    "gemma-3-4b": (
        gemma3(hidden_size=2560, num_hidden_layers=34),
        {"attention": (5, 0, kv(4, 256)), "window": (29, 1024, kv(4, 256))},
    ),
    "gemma-3-12b": (
        gemma3(
            hidden_size=3840, num_attention_heads=16, num_hidden_layers=48, num_key_value_heads=8
        ),
        {"attention": (8, 0, kv(8, 256)), "window": (40, 1024, kv(8, 256))},
    ),
    "gpt-oss": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "hidden_size": 2880,
            "sliding_window": 128,
        },
        {"attention": (12, 0, kv(8, 64)), "window": (12, 128, kv(8, 64))},
    ),
    "exaone-4-32b": (
        {
            "model_type": "exaone4",
            "num_hidden_layers": 32,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "hidden_size": 5120,
            "head_dim": 128,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "layer_types": MIXED,
        },
        {"attention": (8, 0, kv(8, 128)), "window": (24, 4096, kv(8, 128))},
    ),
    "exaone-4-1.2b": (
        {
            "model_type": "exaone4",
            "num_hidden_layers": 30,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 2048,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 30,
        },
        {"attention": (30, 0, kv(8, 64))},
    ),
    "pixtral-12b": (
        {
            "model_type": "llava",
            "text_config": {
                "model_type": "mistral",
                "num_hidden_layers": 40,
                "hidden_size": 5120,
                "head_dim": 128,
                "sliding_window": None,
            },
        },
        {"attention": (40, 0, kv(8, 128))},
    ),
    "llama-4-scout": (
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "num_hidden_layers": 48,
                "hidden_size": 5120,
                "no_rope_layers": [],
            },
        },
        {"attention": (12, 0, kv(8, 128)), "chunk": (36, 8192, kv(8, 128))},
    ),
    "phi-3-mini": (
        {
            "model_type": "phi3",
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_size": 3072,
            "sliding_window": 2047,
        },
        {"window": (32, 2047, kv(32, 96))},
    ),
    "qwen2.5-7b": (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "hidden_size": 3584,
            "sliding_window": 131072,
            "max_window_layers": 28,
        },
        {"attention": (28, 0, kv(4, 128))},
    ),
    "qwen2.5-vl-7b": (  # a file of before its text model had a name of its own
        {
            "model_type": "qwen2_5_vl",
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "hidden_size": 3584,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        {"attention": (28, 0, kv(4, 128))},
    ),
    "olmo-3-7b": (
        {
            "model_type": "olmo3",
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_size": 4096,
        },
        {"attention": (8, 0, kv(32, 128)), "window": (24, 4096, kv(32, 128))},
    ),
    "gemma-3n-e4b": (  # the last 15 layers read what others cached
        {
            "model_type": "gemma3n",
            "text_config": {
                "model_type": "gemma3n_text",
                "num_hidden_layers": 35,
                "hidden_size": 2048,
            },
        },
        {"attention": (4, 0, kv(2, 256)), "window": (16, 512, kv(2, 256))},
    ),
    "gemma-4-26b": (
        {
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text",
                "num_hidden_layers": 30,
                "hidden_size": 2816,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 2,
                "sliding_window": 1024,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
            },
        },
        {"attention": (5, 0, kv(2, 512)), "window": (25, 1024, kv(8, 256))},
    ),
    "glm-4.7-flash": (
        {
            "model_type": "glm4_moe_lite",
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "hidden_size": 2048,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        {"mla": (47, 0, {"latent": (1, (576,))})},
    ),
    "qwen3-4b": (
        {
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 2560,
        },
        {"attention": (36, 0, kv(8, 128))},
    ),
    "nemotron-nano-9b": (
        NEMOTRON,
        {
            "attention": (4, 0, kv(8, 128)),
            "state": (
                27,
                0,
                {
                    "conv_x": (128, (80, 3)),
                    "conv_B": (8, (128, 3)),
                    "conv_C": (8, (128, 3)),
                    "ssm": (128, (80, 128)),
                },
            ),
        },
    ),
    "glm-5": (
        {**GLM_DSA, "index_topk_freq": 1},
        {
            "mla": (12, 0, {"latent": (1, (576,))}),
            "indexer": (12, 0, {"index": (1, (128,)), "scale": (1, (1,))}),
        },
    ),
    "glm-5-shared": (  # layers 0 to 2, 6 and 10
        {**GLM_DSA, "index_topk_freq": 4, "index_skip_topk_offset": 3},
        {
            "mla": (12, 0, {"latent": (1, (576,))}),
            "indexer": (5, 0, {"index": (1, (128,)), "scale": (1, (1,))}),
        },
    ),
    "glm-5-pattern": (
        {**GLM_DSA, "index_topk_pattern": "FFSSFSSSFSSS"},
        {
            "mla": (12, 0, {"latent": (1, (576,))}),
            "indexer": (4, 0, {"index": (1, (128,)), "scale": (1, (1,))}),
        },
    ),
}
