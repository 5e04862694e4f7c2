"""Capture golden cache geometry from real vLLM engines on the CPU.

    python scripts/capture_fixtures.py --out tests/fixtures/vllm-0.32 [--only NAME ...]

Needs an environment with vLLM's CPU build; weights are vLLM's dummy ones, because only the
geometry of the cache and the code that writes into it matter. Each case runs in a process of its
own, with a deadline, and leaves one JSON file:

- what a connector's ``register_kv_caches`` receives (shapes, strides, offsets into storages),
- the cache config of every rank, and the conv/ssm views that state layers really use,
- ``probes``: one value at a time is written by vLLM's own cache-writing code into a zeroed
  cache, and the bytes that changed are recorded,
- ``interior``: the formula for the inside of a page, by backend, isa and cache dtype. It is
  recorded only after a whole block, written by vLLM over a sentinel, was found at exactly the
  bytes that the formula names, and nothing else in the storage had changed.

Cases whose ``expect_error`` is set do not start; the run checks that this is still so, and for
the reason given. Not attempted: speculative decoding, and ranks beyond tp 2 or pp 2.

No request is run: an engine that starts is enough. Two things depend on the processor: bf16
attention uses the isa ``amx``, and MLA the backend ``AMX_MLA``, only where AMX is advertised. The
recorded files come from such a processor. Writing the cache needs no AMX tiles, so the probes also
work in sandboxes that advertise AMX but trap on it (there a bf16 engine dies on its first request).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]

CASE_DEADLINE_SECONDS = 240  # a tp 2 start takes about a minute on two cores
NUM_BLOCKS = 29  # prime, so that no stride is mistaken for another; enough for six groups
MAX_MODEL_LEN = 256
SENTINEL = 0x5A

# ---------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------

_COMMON: Json = {
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA: Json = dict(
    config="LlamaConfig",
    architectures=["LlamaForCausalLM"],
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    **_COMMON,
)
DEEPSEEK: Json = dict(
    config="DeepseekV2Config",
    architectures=["DeepseekV2ForCausalLM"],
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    **_COMMON,
)  # the CPU's MLA kernels exist for a latent of 512 + 64 only
GEMMA3: Json = dict(
    config="Gemma3TextConfig",
    architectures=["Gemma3ForCausalLM"],
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    sliding_window=96,
    **_COMMON,
)
GPT_OSS: Json = dict(
    config="GptOssConfig",
    architectures=["GptOssForCausalLM"],
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    sliding_window=96,
    num_local_experts=4,
    num_experts_per_tok=2,
    **_COMMON,
)
MISTRAL: Json = dict(
    config="MistralConfig",
    architectures=["MistralForCausalLM"],
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    sliding_window=96,
    **_COMMON,
)
QWEN3_NEXT: Json = dict(
    config="Qwen3NextConfig",
    architectures=["Qwen3NextForCausalLM"],
    hidden_size=256,
    intermediate_size=256,
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
    **_COMMON,
)
GRANITE: Json = dict(
    config="GraniteMoeHybridConfig",
    architectures=["GraniteMoeHybridForCausalLM"],
    hidden_size=256,
    intermediate_size=256,
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
    num_local_experts=4,
    num_experts_per_tok=2,
    shared_intermediate_size=64,
    position_embedding_type="rope",
    **_COMMON,
)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: Json
    tp: int = 1
    pp: int = 1
    dtype: str = "float32"
    engine: Json = dataclasses.field(default_factory=dict)  # further arguments of vllm.LLM
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    probe: bool = True
    note: str | None = None  # goes into the file
    expect_error: str | None = None  # part of the message with which vLLM refuses to start


_CPU_MLA = {"attention_config": {"backend": "CPU_MLA"}}

CASES: list[Case] = [
    Case("llama-tp1", LLAMA),
    Case("llama-tp2", LLAMA, tp=2),
    Case("llama-pp2", LLAMA, pp=2),
    Case("llama-tp1-block32", LLAMA, engine={"block_size": 32}),
    Case("llama-tp1-block64-fp16", LLAMA, dtype="float16", engine={"block_size": 64}),
    Case("llama-tp1-bf16", LLAMA, dtype="bfloat16"),
    Case("llama-tp2-bf16-block32", LLAMA, tp=2, dtype="bfloat16", engine={"block_size": 32}),
    Case("llama-tp1-bf16-fp8", LLAMA, dtype="bfloat16", engine={"kv_cache_dtype": "fp8_e4m3"}),
    Case("llama-tp1-fp8", LLAMA, engine={"kv_cache_dtype": "fp8_e4m3"}),
    Case("llama-tp1-head80", {**LLAMA, "head_dim": 80}),
    Case(
        "llama-mqa-tp2", {**LLAMA, "num_key_value_heads": 1}, tp=2
    ),  # both ranks hold the one head
    Case("deepseek-v2-tp1", DEEPSEEK, dtype="bfloat16"),
    Case("deepseek-v2-tp2", DEEPSEEK, tp=2, dtype="bfloat16"),
    Case("deepseek-v2-tp1-cpu-mla", DEEPSEEK, engine=_CPU_MLA),
    Case("deepseek-v2-tp2-cpu-mla", DEEPSEEK, tp=2, engine=_CPU_MLA),
    Case(
        "deepseek-v2-tp1-blhnc",
        DEEPSEEK,
        dtype="bfloat16",
        env={"VLLM_KV_CACHE_LAYOUT": "BLHNC"},
        probe=False,
        note="geometry only: the engine starts, but AMX_MLA's cache write ignores the block stride "
        "(layer 0, block 1 is written one page, not one block of all layers, after block 0)",
    ),
    Case("gemma3-tp1", GEMMA3),
    Case("gemma3-tp2", GEMMA3, tp=2),
    Case("gpt-oss-tp1", GPT_OSS, dtype="bfloat16"),
    Case("gpt-oss-tp2", GPT_OSS, tp=2, dtype="bfloat16"),
    Case("mistral-tp1", MISTRAL),
    Case("mistral-tp2", MISTRAL, tp=2),
    Case("qwen3-next-tp1", QWEN3_NEXT, dtype="bfloat16"),
    Case("qwen3-next-tp2", QWEN3_NEXT, tp=2, dtype="bfloat16"),
    Case(
        "qwen3-next-tp2-ds",
        QWEN3_NEXT,
        tp=2,
        dtype="bfloat16",
        env={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
    ),
    Case("granite-hybrid-tp1", GRANITE),
    Case("granite-hybrid-tp2", GRANITE, tp=2),
    Case("granite-hybrid-1group-tp2", {**GRANITE, "mamba_n_groups": 1}, tp=2),
    # CPU attention takes multiples of 32 slots and head-major pages, nothing else.
    Case(
        "llama-tp1-block16",
        LLAMA,
        engine={"block_size": 16},
        expect_error="No common block size for 16 (CPU_ATTN: [MultipleOf(32)])",
    ),
    Case(
        "llama-tp1-lbnhc",
        LLAMA,
        env={"VLLM_KV_CACHE_LAYOUT": "LBNHC"},
        expect_error="valid layouts: ['LBHNC']",
    ),
    Case(
        "llama-tp1-blhnc",
        LLAMA,
        env={"VLLM_KV_CACHE_LAYOUT": "BLHNC"},
        expect_error="valid layouts: ['LBHNC']",
    ),
]

# ---------------------------------------------------------------------------------------------
# Page interiors. Offsets are in elements, inside one block's page of one head (K and V) or
# inside the page (latent); S is the kernel block size, D the head size.
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Interior:
    name: str
    description: str
    formulas: dict[str, str]  # component -> Python expression over head, slot, dim, S, D


INTERIORS = {
    "k_transposed": Interior(
        "k_transposed",
        "per head a K plane [dim][slot], then a V plane [slot][dim]",
        {
            "k": "head*2*S*D + dim*S + slot",
            "v": "head*2*S*D + S*D + slot*D + dim",
        },
    ),
    "amx_pairs": Interior(
        "amx_pairs",
        "per head a K plane [slot/16][dim/2][slot%16][dim%2], "
        "then a V plane [dim/16][slot/2][dim%16][slot%2]",
        {
            "k": "head*2*S*D + slot//16*16*D + dim//2*32 + slot%16*2 + dim%2",
            "v": "head*2*S*D + S*D + dim//16*16*S + slot//2*32 + dim%16*2 + slot%2",
        },
    ),
    "latent_rows": Interior(
        "latent_rows",
        "rows [slot][dim]; dims below kv_lora_rank are the latent, the rest the rotary key",
        {"latent": "slot*D + dim"},
    ),
}


def interior_for(backend: str, isa: str | None) -> Interior:
    if backend in ("CPU_MLA", "AMX_MLA"):
        return INTERIORS["latent_rows"]
    return INTERIORS["amx_pairs" if isa == "amx" else "k_transposed"]


# ---------------------------------------------------------------------------------------------
# Inside a worker
# ---------------------------------------------------------------------------------------------


@functools.cache
def _connector_class() -> type:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )

    class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
        """Moves nothing; keeps what it was given to register."""

        def __init__(self, vllm_config, role, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
            self.registered: Json = {}

        def register_kv_caches(self, kv_caches):
            self.registered = dict(kv_caches)

        def start_load_kv(self, forward_context, **kwargs): ...
        def wait_for_layer_load(self, layer_name): ...
        def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
        def wait_for_save(self): ...
        def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            return 0, False

        def build_connector_meta(self, scheduler_output):
            return KVConnectorMetadata()

        def request_finished_all_groups(self, request, block_ids):
            return False, None

    return RecordingConnector


def __getattr__(name: str) -> Any:
    # vLLM asks this module for the class; the driver must not need vLLM to be imported.
    if name == "RecordingConnector":
        return _connector_class()
    raise AttributeError(name)


class CaptureExtension:
    """Mixed into vLLM's worker; ``capture_fixture`` is called through ``collective_rpc``."""

    def capture_fixture(self, probe: bool) -> Json:
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        runner = self.model_runner  # type: ignore[attr-defined]
        registered = get_kv_transfer_group().registered
        check_same_as_runner(registered, runner)
        storages = Storages(registered)
        layers = runner.compilation_config.static_forward_context
        config = runner.kv_cache_config

        rank: Json = {
            "pp_rank": parallel_state.get_pp_group().rank_in_group,
            "tp_rank": parallel_state.get_tp_group().rank_in_group,
            "num_blocks": config.num_blocks,
            "kv_tp_replicas": config.kv_tp_replicas,
            "storages": storages.describe(),
            "groups": [
                {"group_id": i, "layers": list(g.layer_names), "spec": spec_json(g.kv_cache_spec)}
                for i, g in enumerate(config.kv_cache_groups)
            ],
            "kv_cache_tensors": [dataclasses.asdict(t) for t in config.kv_cache_tensors],
            "tensors": {name: storages.view_json(t) for name, t in registered.items()},
            "state_views": {},
            "backends": {},
            "probes": [],
        }
        interiors: Json = {}
        for group_id, group in enumerate(config.kv_cache_groups):
            kernel_block_size = runner._kernel_block_sizes[group_id]
            for name in group.layer_names:
                rank["backends"][name] = backend_json(layers[name], kernel_block_size)
                if isinstance(layers[name].kv_cache, tuple):
                    rank["state_views"][name] = state_views_json(layers[name], storages)
            if not probe:
                continue
            first = group.layer_names[0]
            if first in rank["state_views"]:
                rank["probes"] += probe_states(first, layers[first], storages, config.num_blocks)
                continue
            spec = layer_spec(group.kv_cache_spec, first)
            prober = AttentionProber(
                first,
                layers[first],
                spec,
                registered[first],
                storages,
                kernel_block_size,
                config.num_blocks,
                runner.dtype,
            )
            rank["probes"] += prober.probes()
            interiors[prober.key] = prober.verified_interior()
        storages.fill(0)
        return {"rank": rank, "interior": interiors, "engine": engine_json(runner.vllm_config)}


def check_same_as_runner(registered: Json, runner: Any) -> None:
    """The connector must have been given the very tensors that the runner keeps."""

    def key(t: Any) -> tuple:
        return t.data_ptr(), tuple(t.shape), t.stride(), t.dtype

    if sorted(map(key, registered.values()), key=str) != sorted(
        map(key, runner.kv_caches), key=str
    ):
        raise RuntimeError("register_kv_caches received other tensors than the model runner has")


class Storages:
    """The backing allocations, numbered in order of first use."""

    def __init__(self, tensors: Json) -> None:
        import torch

        self._ids: dict[int, int] = {}
        self.raw: list[Any] = []  # uint8 views of whole storages
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._ids:
                self._ids[storage.data_ptr()] = len(self.raw)
                self.raw.append(torch.empty(0, dtype=torch.uint8).set_(storage))

    def id_of(self, tensor: Any) -> int:
        return self._ids[tensor.untyped_storage().data_ptr()]

    def describe(self) -> list[Json]:
        return [{"id": i, "bytes": raw.numel()} for i, raw in enumerate(self.raw)]

    def view_json(self, t: Any) -> Json:
        return {
            "shape": list(t.shape),
            "strides": list(t.stride()),
            "dtype": dtype_name(t.dtype),
            "element_size": t.element_size(),
            "storage": self.id_of(t),
            "storage_offset_bytes": t.storage_offset() * t.element_size(),
        }

    def fill(self, value: int) -> None:
        for raw in self.raw:
            raw.fill_(value)

    def locate(self) -> tuple[int, int, int]:
        """(storage, byte offset, length) of the one run of non-zero bytes."""
        found = [(i, raw.nonzero().flatten().tolist()) for i, raw in enumerate(self.raw)]
        found = [(i, hits) for i, hits in found if hits]
        if len(found) != 1:
            raise RuntimeError(f"expected a write into one storage, found {len(found)}")
        storage, hits = found[0]
        if hits[-1] - hits[0] + 1 != len(hits):
            raise RuntimeError(f"expected one run of bytes, found offsets {hits[:16]}")
        return storage, hits[0], len(hits)


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def jsonable(value: Any) -> Any:
    import enum

    import torch

    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def layer_spec(spec: Any, layer: str) -> Any:
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec


def spec_json(spec: Any) -> Json:
    if hasattr(spec, "kv_cache_specs"):
        layers = {name: spec_json(s) for name, s in spec.kv_cache_specs.items()}
        return {
            "type": type(spec).__name__,
            "block_size": spec.block_size,
            "page_size_bytes": spec.page_size_bytes,
            "kv_cache_specs": layers,
        }
    out = {"type": type(spec).__name__}
    out |= {f.name: jsonable(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    for name in (
        "page_size_bytes",
        "num_heads",
        "num_states",
        "tokens_per_state",
        "state_content_size_bytes",
    ):
        out[name] = jsonable(getattr(spec, name))
    return out


def backend_json(layer: Any, kernel_block_size: int) -> Json:
    return {
        "backend": layer.get_attn_backend().get_name(),
        "isa": getattr(layer, "isa", None),
        "kernel_block_size": kernel_block_size,
    }


def engine_json(config: Any) -> Json:
    cache, parallel = config.cache_config, config.parallel_config
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "block_size": cache.block_size,
        "dtype": dtype_name(config.model_config.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "kv_cache_layout": cache.kv_cache_layout,
        "max_model_len": config.model_config.max_model_len,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "mamba_block_size": cache.mamba_block_size,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "mamba_page_size_padded": cache.mamba_page_size_padded,
        "mamba_ssm_cache_dtype": cache.mamba_ssm_cache_dtype,
    }


def one_hot_value(dtype: Any) -> float:
    """A value that the dtype holds exactly and none of whose bytes is zero."""
    import torch

    bits = {
        torch.float32: (torch.int32, 0x3F8F1F11),
        torch.bfloat16: (torch.int16, 0x3F8F),
        torch.float16: (torch.int16, 0x3C11),
    }
    int_dtype, pattern = bits[dtype]
    return torch.tensor([pattern], dtype=int_dtype).view(dtype).item()


class AttentionProber:
    """Writes through one attention layer's own cache update, and looks where it went."""

    def __init__(
        self,
        name: str,
        layer: Any,
        spec: Any,
        tensor: Any,
        storages: Storages,
        kernel_block_size: int,
        num_blocks: int,
        dtype: Any,
    ) -> None:
        self.name, self.layer, self.tensor, self.storages = name, layer, tensor, storages
        self.block_size, self.S, self.num_blocks = spec.block_size, kernel_block_size, num_blocks
        self.backend = layer.get_attn_backend().get_name()
        self.isa = getattr(layer, "isa", None)
        self.interior = interior_for(self.backend, self.isa)
        self.is_mla = "latent" in self.interior.formulas
        self.H, self.D = spec.num_heads, spec.head_size
        self.dtype = dtype
        self.key = "/".join([self.backend, self.isa or "-", dtype_name(tensor.dtype)])

    def write(self, slots: list[int], values: dict[str, Any]) -> None:
        """``values[component]`` is [tokens, heads, dim]."""
        import torch

        slot_mapping = torch.tensor(slots, dtype=torch.int64)
        impl, cache = self.layer.impl, self.layer.kv_cache
        if self.is_mla:
            latent = values["latent"][:, 0]
            rank = impl.kv_lora_rank
            impl.do_kv_cache_update(
                latent[:, :rank].contiguous(),
                latent[:, None, rank:].contiguous(),
                cache,
                slot_mapping,
                self.layer.kv_cache_dtype,
                self.layer._k_scale,
            )
        else:
            impl.do_kv_cache_update(self.layer, values["k"], values["v"], cache, slot_mapping)

    def points(self) -> list[tuple[int, int, int, int]]:
        """(block, slot, head, dim): all corners of block 1, and some from the middle."""
        slots, heads, dims, last = self.block_size, self.H, self.D, self.num_blocks - 1
        corners = [
            (1, s, h, d) for s in (0, slots - 1) for h in (0, heads - 1) for d in (0, dims - 1)
        ]
        inner = [
            (last, slots - 1, heads - 1, dims - 1),
            (last, slots // 2 + 1, 0, dims // 2 + 1),
            (2, 1, heads - 1, 1),
            (last - 1, slots - 2, heads // 2, 18),
            (2, 5, 0, dims - 2),
        ]
        if self.is_mla:  # both sides of the border between latent and rotary key
            rank = self.layer.impl.kv_lora_rank
            inner += [
                (b, s, 0, d)
                for b, s in ((3, 7), (4, slots // 2), (last, slots - 3))
                for d in (100, rank - 1, rank, dims - 3)
            ]
        return list(dict.fromkeys(corners + inner))

    def empty(self, tokens: int) -> dict[str, Any]:
        import torch

        return {
            c: torch.zeros(tokens, self.H, self.D, dtype=self.dtype) for c in self.interior.formulas
        }

    def probes(self) -> list[Json]:
        rows = []
        for component in self.interior.formulas:
            for block, slot, head, dim in self.points():
                self.storages.fill(0)
                values = self.empty(1)
                values[component][0, head, dim] = one_hot_value(self.dtype)
                self.write([block * self.block_size + slot], values)
                storage, offset, nbytes = self.storages.locate()
                if nbytes != self.tensor.element_size():
                    raise RuntimeError(f"{self.name}: one element wrote {nbytes} bytes")
                rows.append(
                    {
                        "layer": self.name,
                        "component": component,
                        "block": block,
                        "slot": slot,
                        "head": head,
                        "dim": dim,
                        "storage": storage,
                        "byte_offset": offset,
                        "nbytes": nbytes,
                    }
                )
                if offset != self.byte_offset(component, block, slot, head, dim):
                    raise RuntimeError(f"formula {self.interior.name} is wrong for {rows[-1]}")
        return rows

    def byte_offset(self, component: str, block: Any, slot: Any, head: Any, dim: Any) -> Any:
        """By the formula; works on ints and on integer tensors alike."""
        size = self.tensor.element_size()
        token = block * self.block_size + slot
        names = {"S": self.S, "D": self.D, "head": head, "dim": dim, "slot": token % self.S}
        inside = eval(self.interior.formulas[component], {}, names)
        start = self.tensor.storage_offset() + token // self.S * self.tensor.stride(0)
        return (start + inside) * size

    def verified_interior(self) -> Json:
        """Compare every byte of the storage after vLLM wrote one whole block over a sentinel."""
        import torch

        block = 3
        size = self.tensor.element_size()
        quantised = size != self.dtype.itemsize
        generator = torch.Generator().manual_seed(1)
        values = {
            c: torch.randn(v.shape, generator=generator).to(self.dtype)
            for c, v in self.empty(self.block_size).items()
        }
        if quantised:
            # Quantised on the way, by truncation on the CPU: take values that e4m3 holds exactly.
            values = {
                c: v.float().clamp(0.1, 2).to(torch.float8_e4m3fn).to(self.dtype)
                for c, v in values.items()
            }
        self.storages.fill(SENTINEL)
        slots = [block * self.block_size + s for s in range(self.block_size)]
        self.write(slots, values)

        raw = self.storages.raw[self.storages.id_of(self.tensor)]
        slot = torch.arange(self.block_size)[:, None, None]
        head = torch.arange(self.H)[None, :, None]
        dim = torch.arange(self.D)[None, None, :]
        touched = torch.zeros(raw.numel(), dtype=torch.bool)
        for component, expected in values.items():
            at = self.byte_offset(component, block, slot, head, dim)
            at_bytes = at[..., None] + torch.arange(size)
            touched[at_bytes.flatten()] = True
            found = raw[at_bytes]
            stored = expected.to(torch.float8_e4m3fn) if quantised else expected
            same = torch.equal(found, stored.contiguous().view(torch.uint8).reshape(found.shape))
            if not same:
                raise RuntimeError(
                    f"{self.name}: {component} is not where {self.interior.name} says"
                )
        if not bool((raw[~touched] == SENTINEL).all()):
            raise RuntimeError(f"{self.name}: the write changed bytes outside the block's formula")
        return {
            "name": self.interior.name,
            "description": self.interior.description,
            "element_offset": self.interior.formulas,
            "symbols": "S = kernel block size, D = head size; add the page's start: "
            "storage_offset_bytes + kernel_block * strides[0] * element_size",
            "whole_block_bytes_checked": int(touched.sum()),
        }


# ---------------------------------------------------------------------------------------------
# State layers: gated delta net and Mamba 2
# ---------------------------------------------------------------------------------------------


def is_gdn(layer: Any) -> bool:
    return hasattr(layer, "head_k_dim")


def conv_sections(layer: Any) -> list[Json]:
    """Channel ranges of this rank's conv state, in the order in which the layer splits them."""
    tp = layer.tp_size
    if is_gdn(layer):  # rearrange_mixed_qkv
        sizes = [
            ("q", layer.key_dim // tp),
            ("k", layer.key_dim // tp),
            ("v", layer.value_dim // tp),
        ]
        replicated: set[str] = set()
    else:  # split_hidden_states_B_C_fn; n_groups was raised to tp where one group is replicated
        bc = layer.groups_ssm_state_size // tp
        sizes = [("x", layer.intermediate_size // tp), ("B", bc), ("C", bc)]
        hf_groups = layer.model_config.hf_text_config.mamba_n_groups
        replicated = {"B", "C"} if hf_groups % tp else set()
    sections, start = [], 0
    for name, channels in sizes:
        sections.append(
            {
                "name": name,
                "start_channel": start,
                "channels": channels,
                "replicated_over_tp": name in replicated,
            }
        )
        start += channels
    return sections


def state_views_json(layer: Any, storages: Storages) -> list[Json]:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    conv, ssm = (storages.view_json(view) for view in layer.kv_cache)
    sections = conv_sections(layer)
    order = "channels_first" if is_conv_state_dim_first() else "rows_first"
    channels = conv["shape"][1 if order == "channels_first" else 2]
    if channels != sum(s["channels"] for s in sections):
        raise RuntimeError(f"sections {sections} do not add up to {channels} channels")
    conv = {"name": "conv", **conv, "conv_order": order, "conv_sections": sections}
    # The CPU's delta rule reinterprets the declared [head, v, k] as [head, k, v].
    axes = ["head", "k", "v"] if is_gdn(layer) else ["head", "head_dim", "state"]
    return [conv, {"name": "ssm", **ssm, "axes_as_written": axes}]


def conv_writer(layer: Any) -> Callable[[Any, int], None]:
    """write(x, block) runs the layer's convolution over x [tokens, channels] as a fresh prefill."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    conv = layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(-1, -2)

    def write(x: Any, block: int) -> None:
        common = {
            "x": x.transpose(0, 1),
            "bias": layer.conv1d.bias,
            "conv_states": conv,
            "query_start_loc": torch.tensor([0, x.shape[0]], dtype=torch.int32),
            "cache_indices": torch.tensor([block], dtype=torch.int32),
            "has_initial_state": torch.tensor([False]),
        }
        if is_gdn(layer):
            from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

            gdn_attention._causal_conv1d_fwd_cpu(
                weight=layer.conv1d.weight, silu_activation=True, is_weight_packed=True, **common
            )
        else:
            from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

            causal_conv1d_fn(weight=layer.conv_weights, activation=layer.activation, **common)

    return write


def write_gdn_state(layer: Any, block: int, index: tuple[int, int, int]) -> None:
    """One decode step with one-hot key and value: the state becomes one number, at [head, k, v].

    Decode and prefill share the state; only the decode kernel runs without AMX tiles, which some
    sandboxes advertise but do not allow.
    """
    import torch

    from vllm import _custom_ops as ops

    v_head, k_at, v_at = index
    k_heads, v_heads = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
    state = layer.kv_cache[1]
    slots, heads, v_dim, k_dim = state.size()
    query = torch.zeros(1, 1, k_heads, k_dim, dtype=torch.bfloat16)
    key = torch.zeros_like(query)
    key[0, 0, v_head * k_heads // v_heads, k_at] = 1
    value = torch.zeros(1, 1, v_heads, v_dim, dtype=torch.bfloat16)
    value[0, 0, v_head, v_at] = one_hot_value(torch.bfloat16)
    gates = torch.zeros(1, v_heads, dtype=torch.bfloat16)
    ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query,
        k=key,
        v=value,
        a=gates,
        b=gates,
        initial_state_source=state.view(slots, heads, k_dim, v_dim),
        initial_state_indices=torch.tensor([block], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )


def write_mamba2_state(layer: Any, block: int, index: tuple[int, int, int]) -> None:
    """One decode step with one-hot x and B: the state becomes one number, at [head, dim, state]."""
    import torch
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import selective_state_update

    head, dim_at, state_at = index
    _, heads, head_dim, d_state = layer.kv_cache[1].shape
    groups = layer.n_groups // layer.tp_size
    dtype = layer.kv_cache[0].dtype
    x = torch.zeros(1, heads, head_dim, dtype=dtype)
    x[0, head, dim_at] = one_hot_value(dtype)
    b = torch.zeros(1, groups, d_state, dtype=dtype)
    b[0, head * groups // heads, state_at] = 1
    # dt such that softplus(dt + bias) is a number without zero bytes
    dt = torch.full((1, heads), 0.7, dtype=dtype)
    selective_state_update(
        layer.kv_cache[1],
        x,
        dt[:, :, None].expand(-1, -1, head_dim),
        layer.A[:, None, None].expand(-1, head_dim, d_state).to(torch.float32),
        b,
        torch.zeros_like(b),
        layer.D[:, None].expand(-1, head_dim),
        dt_bias=layer.dt_bias[:, None].expand(-1, head_dim),
        dt_softplus=True,
        state_batch_indices=torch.tensor([block], dtype=torch.int32),
        out=torch.empty_like(x),
    )


def nonzero_cover(storages: Storages, size: int) -> tuple[int, int]:
    """(storage, byte offset of the one element) where arithmetic may leave zero bytes in it."""
    hits = [(i, raw.nonzero().flatten()) for i, raw in enumerate(storages.raw)]
    hits = [(i, h) for i, h in hits if h.numel()]
    if len(hits) != 1:
        raise RuntimeError(f"expected a write into one storage, found {len(hits)}")
    storage, found = hits[0]
    first, last = int(found[0]) // size * size, int(found[-1]) // size * size
    if first != last:
        raise RuntimeError(f"expected one element, found bytes {found.tolist()[:16]}")
    return storage, first


def probe_states(name: str, layer: Any, storages: Storages, num_blocks: int) -> list[Json]:
    """As for attention, with the layer's convolution and its state update."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    conv, ssm = layer.kv_cache
    channel_axis, row_axis = (1, 2) if is_conv_state_dim_first() else (2, 1)
    channels, rows = conv.shape[channel_axis], conv.shape[row_axis]
    write_conv = conv_writer(layer)
    probes: list[Json] = []
    starts = [s["start_channel"] for s in conv_sections(layer)]
    for block in (1, num_blocks - 1):
        for row in (0, rows - 1):
            for channel in [*starts, channels - 1]:
                storages.fill(0)
                x = torch.zeros(rows, channels, dtype=conv.dtype)  # row 0 is the oldest token
                x[row, channel] = one_hot_value(conv.dtype)
                write_conv(x, block)
                storage, offset, nbytes = storages.locate()
                expected = (
                    conv.storage_offset()
                    + block * conv.stride(0)
                    + row * conv.stride(row_axis)
                    + channel * conv.stride(channel_axis)
                )
                if offset != expected * conv.element_size():
                    raise RuntimeError(f"{name}: conv row {row} channel {channel} at {offset}")
                probes.append(
                    {
                        "layer": name,
                        "component": "conv",
                        "block": block,
                        "row": row,
                        "channel": channel,
                        "storage": storage,
                        "byte_offset": offset,
                        "nbytes": nbytes,
                    }
                )
    axes = ["head", "k", "v"] if is_gdn(layer) else ["head", "head_dim", "state"]
    write_state = write_gdn_state if is_gdn(layer) else write_mamba2_state
    sizes = list(ssm.shape[1:])
    if is_gdn(layer):
        sizes[1:] = sizes[:0:-1]  # declared [head, v, k], written [head, k, v]
    points = {
        (h, a, b) for h in (0, sizes[0] - 1) for a in (0, sizes[1] - 1) for b in (0, sizes[2] - 1)
    } | {(0, 1, 2), (sizes[0] - 1, 3, 1)}
    size = ssm.element_size()
    for index in sorted(points):
        storages.fill(0)
        write_state(layer, 2, index)
        storage, offset = nonzero_cover(storages, size)
        expected = (
            ssm.storage_offset()
            + 2 * ssm.stride(0)
            + (index[0] * sizes[1] + index[1]) * sizes[2]
            + index[2]
        )
        if offset != expected * size:
            raise RuntimeError(f"{name}: ssm {axes} {index} at {offset}, not {expected * size}")
        probes.append(
            {
                "layer": name,
                "component": "ssm",
                "block": 2,
                **dict(zip(axes, index, strict=True)),
                "storage": storage,
                "byte_offset": offset,
                "nbytes": size,
            }
        )
    return probes


# ---------------------------------------------------------------------------------------------
# One case, in its own process
# ---------------------------------------------------------------------------------------------


def write_model(case: Case, folder: Path) -> Json:
    import transformers

    fields = dict(case.model)
    config = getattr(transformers, fields.pop("config"))(**fields, dtype=case.dtype)
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def run_case(case: Case, out: Path) -> None:
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        hf_config = write_model(case, Path(folder))
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=case.dtype,
            tensor_parallel_size=case.tp,
            pipeline_parallel_size=case.pp,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=2,
            num_gpu_blocks_override=NUM_BLOCKS,
            kv_cache_memory_bytes=256 << 20,
            disable_log_stats=True,
            worker_extension_cls="capture_fixtures.CaptureExtension",
            kv_transfer_config={
                "kv_connector": "RecordingConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "capture_fixtures",
            },
            **case.engine,
        )
        answers = llm.collective_rpc("capture_fixture", args=(case.probe,))
    fixture = {
        "case": case.name,
        **({"note": case.note} if case.note else {}),
        "vllm_version": vllm.__version__,
        "hf_config": hf_config,
        "engine": {**answers[0]["engine"], "env": case.env},
        "interior": {k: v for a in answers for k, v in a["interior"].items()},
        "ranks": [a["rank"] for a in answers],
    }
    out.write_text(compact(fixture) + "\n")


def compact(value: Any, indent: int = 0, width: int = 110) -> str:
    """JSON with everything that fits on a line kept on one line."""
    flat = json.dumps(value)
    if len(flat) + indent <= width or not isinstance(value, (dict, list)) or not value:
        return flat
    if isinstance(value, list) and all(isinstance(v, (int, float)) for v in value):
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        if "byte_offset" in value:  # one probe, one line
            return flat
        items = [f"{json.dumps(k)}: {compact(v, indent + 1)}" for k, v in value.items()]
        return "{\n" + pad + f",\n{pad}".join(items) + "\n" + " " * indent + "}"
    return (
        "[\n"
        + pad
        + f",\n{pad}".join(compact(v, indent + 1) for v in value)
        + "\n"
        + " " * indent
        + "]"
    )


# ---------------------------------------------------------------------------------------------
# Driver
# ---------------------------------------------------------------------------------------------


def child_environment(case: Case) -> dict[str, str]:
    here = str(Path(__file__).resolve().parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # halves the start
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **case.env,
    }


def spawn(case: Case, out: Path) -> tuple[bool, str]:
    """(whether it ended well, its output)."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        case.name,
        "--out",
        str(out),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env=child_environment(case),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(CASE_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            # the workers are in the child's session; nothing of it may outlive the case
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code == 0, log.read()


def drive(cases: list[Case], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    failures = 0
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case.name} ...", end=" ", flush=True)
        started = time.monotonic()
        done, output = spawn(case, out)
        took = f"{time.monotonic() - started:.0f} s"
        path = out / f"{case.name}.json"
        if case.expect_error is not None:
            expected = not done and case.expect_error in output
            print(
                f"{'refused, as expected' if expected else 'EXPECTED A REFUSAL'} ({took})",
                flush=True,
            )
        else:
            expected = done
            print(
                f"{path.stat().st_size / 1000:.1f} kB ({took})" if done else f"FAILED ({took})",
                flush=True,
            )
        if not expected:
            failures += 1
            print("\n".join("    " + line for line in output.splitlines()[-25:]), flush=True)
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="run this case (repeatable)"
    )
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    wanted = [arguments.child] if arguments.child else arguments.only or list(by_name)
    if unknown := [name for name in wanted if name not in by_name]:
        parser.error(f"no such case: {', '.join(unknown)}; there are: {', '.join(by_name)}")
    if arguments.child:
        run_case(by_name[arguments.child], arguments.out / f"{arguments.child}.json")
        return 0
    return drive([by_name[name] for name in wanted], arguments.out)


if __name__ == "__main__":
    sys.exit(main())
