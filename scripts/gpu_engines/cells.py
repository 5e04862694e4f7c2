"""The cells: tiny models, and the engines that run them.

A side's options are vLLM's engine arguments. `cpu` says what differs where there is no GPU: a dry
run of this harness, which shows nothing about GPUs. None: the CPU build cannot run the cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
CPU_BLOCKS = {0: 0, 16: 32, 32: 64, 64: 128}  # the CPU's attention takes multiples of 32


@dataclass(frozen=True)
class Side:
    """One engine."""

    block: int = 0  # 0: vLLM's choice
    layout: str = ""  # VLLM_KV_CACHE_LAYOUT; empty: what the connector asks for
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    name: str
    model: str  # of `models`
    proves: str
    p: Side
    d: Side
    backend: str  # of attention
    dtype: str = "bfloat16"
    options: Mapping[str, Any] = field(default_factory=dict)  # of both engines
    connector: Mapping[str, Any] = field(default_factory=dict)  # keys of both
    draft: str = ""  # a model that `speculative_config` names
    exact: bool = True  # whether all tokens must be equal, if the type is fp32
    hits: bool = True  # whether there is a prefix cache
    pool: bool = True
    grows: bool = True  # whether requests need more blocks as they go on
    cpu: Mapping[str, Any] | None = field(default_factory=dict)

    @property
    def blocks(self) -> str:
        return f"{self.p.block or '·'} → {self.d.block or '·'}"


def _same(block: int, layout: str = "", **options: Any) -> tuple[Side, Side]:
    return Side(block, layout, options), Side(block, layout, options)


# vLLM's CPU build has no prefix cache for MLA, and its decode and prefill disagree by themselves
_CPU_MLA = {"backend": "CPU_MLA", "block": 16, "tokens": False, "hits": False}
_EAGLE = {"method": "eagle", "num_speculative_tokens": 2}
_MTP = {"method": "mtp", "num_speculative_tokens": 1}

# Those that take longest come first, then those that prove most.
CELLS: tuple[Cell, ...] = (
    Cell(
        "mla-mtp",
        "mla-mtp",
        "DeepSeek V3, MLA with a module for multi-token prediction",
        Side(32),
        Side(64),
        "TRITON_MLA",
        options={"speculative_config": _MTP},
        cpu=None,
    ),
    Cell(
        "qwen3-next",
        "qwen3-next",
        "Qwen3-Next, states of a gated delta net",
        *_same(0, gdn_prefill_backend="triton"),
        "FLASH_ATTN",
        grows=False,
        cpu={"options": {"enable_prefix_caching": False}, "hits": False, "pool": False},
    ),
    Cell(
        "granite",
        "granite",
        "Granite hybrid, states of Mamba 2",
        *_same(0),
        "TRITON_ATTN",
        "float32",
        exact=False,  # with exact products, Mamba's kernels would be compiled for minutes
        grows=False,
        cpu={"options": {"enable_prefix_caching": False}, "hits": False, "pool": False},
    ),
    Cell(
        "llama-triton-64-16",
        "llama",
        "Llama GQA in fp32, HND to NHD, smaller blocks",
        Side(64, "HND"),
        Side(16, "NHD"),
        "TRITON_ATTN",
        "float32",
    ),
    Cell(
        "llama-fa-16-64",
        "llama",
        "Llama GQA, FlashAttention, NHD to HND, larger blocks",
        Side(16, "NHD"),
        Side(64, "HND"),
        "FLASH_ATTN",
    ),
    Cell(
        "mla-16-64",
        "mla",
        "DeepSeek V2, MLA, larger blocks",
        Side(16),
        Side(64),
        "TRITON_MLA",
        cpu=_CPU_MLA,
    ),
    Cell(
        "llama-graphs",
        "llama",
        "CUDA graphs and asynchronous scheduling, FlashAttention",
        *(Side(block, "", {**GRAPHS, "async_scheduling": True}) for block in (32, 64)),
        "FLASH_ATTN",
    ),
    Cell(
        "llama-eagle",
        "llama",
        "Llama with an Eagle draft, in fp32",
        Side(64),
        Side(32),
        "TRITON_ATTN",
        "float32",
        options={"speculative_config": _EAGLE},
        draft="eagle",
        cpu={"samples": False},  # with drafts, the CPU build's sampler fails on top_k
    ),
    Cell(
        "gemma3-triton",
        "gemma3",
        "Gemma 3 in fp32, windows, smaller blocks",
        Side(32),
        Side(16),
        "TRITON_ATTN",
        "float32",
    ),
    Cell(
        "gpt-oss-triton",
        "gpt-oss",
        "gpt-oss in fp32, windows and sinks, smaller blocks",
        Side(64),
        Side(32),
        "TRITON_ATTN",
        "float32",
    ),
    Cell(
        "llama-fp8",
        "llama",
        "a cache in fp8, Triton",
        Side(16),
        Side(32),
        "TRITON_ATTN",
        options={"kv_cache_dtype": "fp8"},
        cpu={"options": {"kv_cache_dtype": "fp8_e4m3"}, "tokens": False},
    ),
    Cell(
        "llama-fa-fp8",
        "llama",
        "a cache in fp8, FlashAttention",
        Side(32),
        Side(16),
        "FLASH_ATTN",
        options={"kv_cache_dtype": "fp8"},
        cpu=None,
    ),
    Cell(
        "llama-tcp-push",
        "llama",
        "staged over `tcp`, pushed, in fp32, as between hosts",
        Side(16, "NHD"),
        Side(16, "HND"),
        "TRITON_ATTN",
        "float32",
        connector={"carriers": ["tcp"], "mode": "push", "checksums": True},
    ),
    Cell(
        "llama-old-runner",
        "llama",
        "vLLM's new model runner to its old one, without asynchronous scheduling, in fp32",
        Side(32, "NHD"),
        Side(32, "NHD", {"async_scheduling": False}, V1_RUNNER),
        "TRITON_ATTN",
        "float32",
    ),
    Cell(
        "gemma3-fa",
        "gemma3",
        "Gemma 3, FlashAttention, windows, token-major",
        *_same(16, "NHD"),
        "FLASH_ATTN",
        cpu=None,
    ),
    Cell(
        "gpt-oss-fa",
        "gpt-oss",
        "gpt-oss, FlashAttention, windows and sinks",
        *_same(16),
        "FLASH_ATTN",
        cpu=None,
    ),
    Cell(
        "mla-mtp-graphs",
        "mla-mtp",
        "DeepSeek V3 with its module, CUDA graphs, smaller blocks",
        *(Side(block, "", dict(GRAPHS)) for block in (64, 16)),
        "TRITON_MLA",
        options={"speculative_config": _MTP},
        cpu=None,
    ),
    Cell(
        "mla-fp8",
        "mla",
        "MLA, a cache in fp8",
        Side(64),
        Side(32),
        "TRITON_MLA",
        options={"kv_cache_dtype": "fp8"},
        cpu=None,
    ),
    Cell(
        "llama-deep",
        "llama-deep",
        "sixteen layers in fp32, saved while the step computes the last two; smaller blocks",
        Side(32),
        Side(16),
        "TRITON_ATTN",
        "float32",
        options={"max_num_batched_tokens": 512, "kv_cache_memory_bytes": 256 << 20},
    ),
    Cell(
        "llama-fa-tcp",
        "llama",
        "FlashAttention, staged over `tcp`, equal blocks",
        *_same(16, "NHD"),
        "FLASH_ATTN",
        connector={"carriers": ["tcp"]},
        cpu=None,
    ),
)
