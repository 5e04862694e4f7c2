"""Workers as vLLM shows them to a connector: specs of its own classes, real tensors.

What they registered is told by a captured engine (`golden`), or by one that vLLM's own code laid
out (`registered`).
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace as Fake
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1 import kv_cache_interface as kv

from golden import Golden
from kvferry.layout.shape import Rank
from kvferry.vllm.describe import Described, describe_worker, layer_specs

ON_NVIDIA = True  # of index keys, whose layout depends on the device


def make_spec(told: dict[str, Any]) -> Any:
    """A spec of vLLM's own class, from what was captured of it."""
    kind = getattr(kv, told["type"])
    if told["type"] == "UniformTypeKVCacheSpecs":
        each = {layer: make_spec(one) for layer, one in told["kv_cache_specs"].items()}
        return kind(block_size=told["block_size"], kv_cache_specs=each)
    values = {f.name: told[f.name] for f in fields(kind) if f.init and f.name in told}
    if "dtype" in values:
        values["dtype"] = getattr(torch, values["dtype"])
    if "kv_quant_mode" in values:
        values["kv_quant_mode"] = kv.KVQuantMode[values["kv_quant_mode"]]
    if told["type"] == "MambaSpec":
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

        values["mamba_type"] = MambaAttentionBackendEnum[told["mamba_type"]]
        values["shapes"] = tuple(map(tuple, told["shapes"]))
        values["dtypes"] = tuple(getattr(torch, d) for d in told["dtypes"])
    return kind(**values)


def heads_of(text: dict[str, Any]) -> int:
    """As vLLM counts them where all layers are alike."""
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])


def layers_of(text: dict[str, Any]) -> int:
    return int(text["num_hidden_layers"])


class Layer:
    def __init__(self, backend: dict[str, Any], scale: float = 1.0) -> None:
        self.isa = backend["isa"] or ""
        if "INDEXER" not in backend["backend"]:  # index keys carry their own
            self._k_scale = self._v_scale = torch.tensor(scale)
            self._k_scale_float = self._v_scale_float = scale
        self._backend = Fake(get_name=lambda: backend["backend"])

    def get_attn_backend(self) -> Any:
        return self._backend


def cache_config(captured: dict[str, Any]) -> Any:
    """vLLM's configuration of one rank's cache."""
    return Fake(
        num_blocks=captured["num_blocks"],
        kv_cache_groups=[
            Fake(layer_names=list(g["layers"]), kv_cache_spec=make_spec(g["spec"]))
            for g in captured["groups"]
        ],
    )


class Worker:
    """One rank of a captured engine, as vLLM shows it to a connector."""

    def __init__(self, engine: Golden, rank: Rank) -> None:
        captured, told = engine.rank(rank), engine.engine
        self.kv_cache_config = cache_config(captured)
        self.stages = [engine.rank(other) for other in engine.ranks if other.tp == rank.tp]
        storages = [torch.zeros(s["bytes"], dtype=torch.uint8) for s in captured["storages"]]
        self.kv_caches = {}
        for name, t in captured["tensors"].items():
            whole = storages[t["storage"]].view(getattr(torch, t["dtype"]))
            offset = t["storage_offset_bytes"] // t["element_size"]
            self.kv_caches[name] = whole.as_strided(t["shape"], t["strides"], offset)
        layers = {name: Layer(backend) for name, backend in captured["backends"].items()}
        text = engine.data["hf_config"]
        self.vllm_config = Fake(
            model_config=Fake(
                hf_text_config=Fake(to_dict=lambda: dict(text)),
                model_arch_config=[Fake(total_num_kv_heads=heads_of(text))] * layers_of(text),
                get_total_num_hidden_layers=lambda: layers_of(text),
                dtype=getattr(torch, told["dtype"]),
                model="models/tiny",
                quantization=None,
                max_model_len=4096,
            ),
            cache_config=Fake(
                cache_dtype=told["cache_dtype"],
                block_size=told["block_size"],
                kv_cache_layout=told["kv_cache_layout"],
            ),
            parallel_config=Fake(
                tensor_parallel_size=told["tp"],
                pipeline_parallel_size=told["pp"],
                decode_context_parallel_size=told.get("dcp", 1),
                cp_kv_cache_interleave_size=told.get("interleave", 1),
            ),
            speculative_config=None,
            num_prefill_lookahead_tokens=0,
            device_config=Fake(device_type="cpu"),
            compilation_config=Fake(static_forward_context=layers),
        )
        self.rank = rank

    def describe(self, from_last_stage: Any = None) -> Described:
        def of_all_stages(mine: Any) -> list[Any]:
            specs = isinstance(mine, list)  # of the target; else the draft's, which the last knows
            return self._of_all_stages(mine) if specs else [from_last_stage(mine)]

        with (
            patch("kvferry.vllm.describe.of_all_stages", of_all_stages),
            patch("kvferry.vllm.describe.of_all_ranks", lambda told: [told]),  # alike on each
            patch("kvferry.vllm.describe._on_nvidia", lambda: ON_NVIDIA),
        ):
            return describe_worker(
                self.vllm_config, self.kv_cache_config, self.kv_caches, self.rank
            )

    def _of_all_stages(self, mine: Any) -> list[Any]:
        every = [layer_specs(cache_config(captured)) for captured in self.stages]
        told = [[(name, spec) for _, name, spec in stage] for stage in every]
        assert told[self.rank.pp] == mine
        return told

    def add_draft(
        self,
        layers: int,
        heads: int,
        head_size: int,
        block: int,
        tp: int = 1,
        first: int = 4,
        isa: str = "vec",
    ) -> None:
        """A draft model behind the target's layers, in a group and a storage of its own. On all
        stages but the last, its configuration alone."""
        names = [f"model.layers.{first + i}.self_attn.attn" for i in range(layers)]
        if self.rank.pp < self.vllm_config.parallel_config.pipeline_parallel_size - 1:
            names = []  # vLLM's groups are those of all stages
        spec = kv.FullAttentionSpec(
            block_size=block, num_kv_heads=heads, head_size=head_size, dtype=torch.float32
        )
        self.kv_cache_config.kv_cache_groups.append(Fake(layer_names=names, kv_cache_spec=spec))
        for name in names:
            self.kv_caches[name] = torch.zeros(29, heads, block, 2 * head_size)
            self.layers[name] = Layer({"backend": "CPU_ATTN", "isa": isa})
        self.speculate(layers, heads * tp, tp)

    def speculate(self, layers: int, heads: int, tp: int) -> None:
        """The configuration of a draft model."""
        self.vllm_config.speculative_config = Fake(
            draft_parallel_config=Fake(tensor_parallel_size=tp),
            draft_model_config=Fake(
                model="models/draft",
                dtype=torch.float32,
                quantization=None,
                max_model_len=4096,
                get_total_num_kv_heads=lambda: heads,
                hf_text_config=Fake(to_dict=lambda: {"num_hidden_layers": layers}),
            ),
        )

    @property
    def layers(self) -> dict[str, Any]:
        found: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        return found
