"""Engines of sizes that no CPU runs, laid out by vLLM's own code, handing over as processes.

A captured engine (`golden`) says what the model is and what the inside of its pages looks like. For
another tp, pp or dcp, vLLM's own classes make the specs, its own code groups the layers, sizes the
pool, allocates it and makes the views that a connector is given. From there all is the product:
the adapter describes each worker, the handshake, plans and a carrier follow. Blocks are filled and
checked by the captured formulas over the views' strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from captured import CapturedConsumer, CapturedProducer, Rack, Tables, first_needed
from golden import Golden, golden, ordinal
from kvferry.carriers import make_carrier
from kvferry.carriers.base import MemoryRegion
from kvferry.layout.shape import Rank
from workers import Worker, make_spec

BLOCKS, BF16 = 29, torch.bfloat16
# FLASH_ATTN, on GPUs: K and V of one head and slot side by side, in the order of the view
JOINED = {
    "name": "joined",
    "element_offset": {
        "k": "head*2*S*D + slot*2*D + dim",
        "v": "head*2*S*D + slot*2*D + D + dim",
    },
}


# Sparse attention on GPUs: latents token by token; index keys as vLLM's kernels write them
# (`sparse_kernel`), the values of a kernel's block before their scales
SPARSE, INDEXER = "FLASHMLA_SPARSE", "DEEPSEEK_V32_INDEXER"
KEYS = "(dim < 128) * (slot*128 + dim) + (dim >= 128) * (S*128 + slot*4 + dim - 128)"
SPARSE_INTERIORS = {
    f"{SPARSE}/-/": {"name": "latent_rows", "element_offset": {"latent": "slot*D + dim"}},
    f"{INDEXER}/-/": {"name": "index_keys", "element_offset": {"latent": KEYS}},
}


@dataclass(frozen=True)
class Sparse:
    """The target has sparse attention, and maybe layers for multi-token prediction."""

    cache_dtype: str = "auto"
    mtp: int = 0
    layers: str = "FFF"  # F: with an indexer of its own; S: shares the last one's choice


@dataclass(frozen=True)
class Draft:
    """A draft model of full attention, registered behind the target's layers."""

    layers: int = 1
    heads: int = 4
    head_size: int = 32
    tp: int = 1
    backend: str = "FLASH_ATTN"  # or "CPU_ATTN", as captured


@dataclass(frozen=True)
class Registered:
    """An engine like a captured one, of another size."""

    like: str
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    interleave: int = 1
    block: int = 0  # 0: as captured
    changes: tuple[tuple[str, Any], ...] = ()  # of the model's configuration
    carrier: str = "local"
    draft: Draft | None = None
    sparse: Sparse | None = None
    order: str = ""  # of the cache; empty: as captured
    kernel: int = 0  # tokens of a kernel's block; 0: as a block

    @property
    def ranks(self) -> list[Rank]:
        return [Rank(stage, tp) for stage in range(self.pp) for tp in range(self.tp)]

    @property
    def config(self) -> dict[str, Any]:
        sparse: dict[str, Any] = {}
        if self.sparse is not None:
            pattern = self.sparse.layers
            sparse = {"model_type": "deepseek_v32", "index_head_dim": 128}
            sparse |= {"index_topk_pattern": pattern, "num_hidden_layers": len(pattern)}
        return {**golden(self.like).data["hf_config"], **sparse, **dict(self.changes)}

    @property
    def draft_layers(self) -> int:
        return self.draft.layers if self.draft else self.sparse.mtp if self.sparse else 0

    def specs(self) -> dict[str, Any]:
        """What the layers of one rank cache, by vLLM's classes."""
        if self.sparse is not None:
            return self._sparse_specs(self.sparse)
        captured = golden(self.like).data["ranks"]
        told = {
            layer: group["spec"]
            for rank in captured
            for group in rank["groups"]
            for layer in group["layers"]
        }
        made = {layer: self._spec(spec) for layer, spec in told.items()}
        pages = {type(s).__name__: s.page_size_bytes for s in made.values()}
        states = pages.pop("MambaSpec", 0)
        if states:  # as vLLM does: a page of attention is no smaller than a state
            (page,) = pages.values()
            assert page >= states, f"blocks of {page} bytes are too small for states of {states}"
            made = {
                layer: replace(spec, page_size_padded=page)
                if type(spec).__name__ == "MambaSpec"
                else spec
                for layer, spec in made.items()
            }
        made = dict(sorted(made.items(), key=lambda item: ordinal(item[0])))
        return made | self._draft_specs(made)

    def _sparse_specs(self, sparse: Sparse) -> dict[str, Any]:
        """Told by vLLM's own layers."""
        vllm = Fake(cache_config=Fake(block_size=self.block), model_config=Fake(dtype=BF16))
        specs: dict[str, Any] = {}
        for number, kind in enumerate(sparse.layers + "F" * sparse.mtp):
            block = "mtp_block." if number >= len(sparse.layers) else ""
            name = f"model.layers.{number}.{block}self_attn"
            attention = Fake(
                kv_cache_dtype=sparse.cache_dtype,
                head_size=576,
                sliding_window=None,
                indexer=True if kind == "F" else None,
                non_causal_multi_token_decode=False,
            )
            keys = Fake(head_dim=132, dtype=torch.uint8, cache_config=vllm.cache_config)
            spec = MLAAttention.get_kv_cache_spec(attention, vllm)
            specs[f"{name}.attn"] = align_blocks_to_rows(spec)  # as the backend customizes it
            if kind == "F":
                found = DeepseekV32IndexerCache.get_kv_cache_spec(keys, vllm)
                specs[f"{name}.indexer.k_cache"] = found
        return specs

    def _draft_specs(self, target: dict[str, Any]) -> dict[str, Any]:
        if (draft := self.draft) is None:
            return {}
        last = next(reversed(target.values()))
        spec = FullAttentionSpec(
            block_size=last.block_size,
            num_kv_heads=max(1, draft.heads // draft.tp),
            head_size=draft.head_size,
            dtype=last.dtype,
        )
        return {f"model.layers.{len(target) + i}.self_attn.attn": spec for i in range(draft.layers)}

    def _spec(self, told: dict[str, Any]) -> Any:
        block, config = self.block or told["block_size"], self.config
        told = {**told, "block_stride_alignment": None}  # captured as text; blocks are not split
        if told["type"] == "MambaSpec":
            calculate = MambaStateShapeCalculator
            if "linear_num_key_heads" in config:
                shapes = calculate.gated_delta_net_state_shape(
                    self.tp,
                    config["linear_num_key_heads"],
                    config["linear_num_value_heads"],
                    config["linear_key_head_dim"],
                    config["linear_value_head_dim"],
                    config["linear_conv_kernel_dim"],
                )
            else:
                shapes = calculate.mamba2_state_shape(
                    self.tp,
                    config["mamba_expand"] * config["hidden_size"],
                    config["mamba_n_groups"],
                    config["mamba_n_heads"],
                    config["mamba_d_head"],
                    config["mamba_d_state"],
                    config["mamba_d_conv"],
                )
            return make_spec(
                {**told, "block_size": block, "shapes": shapes, "page_size_padded": None}
            )
        heads = told["num_kv_heads"]
        if "MLA" not in told["type"]:
            heads = max(1, config["num_key_value_heads"] // self.tp)
        return make_spec({**told, "block_size": block, "num_kv_heads": heads})

    def lay_out(self) -> Golden:
        """What vLLM registers on each rank, told as a captured engine is told."""
        like, specs = golden(self.like), self.specs()
        layers = 1 + max(map(ordinal, specs)) - self.draft_layers
        ends = [get_pp_indices(layers, stage, self.pp)[1] for stage in range(self.pp)]
        ends[-1] += self.draft_layers
        mine = [
            {n: s for n, s in specs.items() if start <= ordinal(n) < end}
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        block = max(s.block_size for s in specs.values())
        engine = {
            **like.engine,
            "tp": self.tp,
            "pp": self.pp,
            "dcp": self.dcp,
            "interleave": self.interleave,
            "block_size": block,
            "kv_cache_layout": self.order or like.engine["kv_cache_layout"],
        }
        if self.sparse is not None:
            engine |= {"cache_dtype": self.sparse.cache_dtype, "dtype": "bfloat16"}
        configs = get_kv_cache_configs(
            self._vllm_config(engine), [mine[r.pp] for r in self.ranks], [1 << 34] * len(self.ranks)
        )
        ranks = [
            self._told(rank, config, like, engine)
            for rank, config in zip(self.ranks, configs, strict=True)
        ]
        interior = {**like.data["interior"], **SPARSE_INTERIORS}
        if self.draft is not None:
            interior |= {"FLASH_ATTN/-/": JOINED, **golden("llama-tp1").data["interior"]}
        return Golden(
            {
                **like.data,
                "hf_config": self.config,
                "engine": engine,
                "interior": interior,
                "ranks": ranks,
            }
        )

    def _vllm_config(self, engine: dict[str, Any]) -> Any:
        layout = KVCacheLayout[engine["kv_cache_layout"]]
        return Fake(
            scheduler_config=Fake(disable_hybrid_kv_cache_manager=False, max_num_seqs=4),
            cache_config=Fake(
                num_gpu_blocks_override=BLOCKS,
                block_size=engine["block_size"],
                kv_cache_layout=engine["kv_cache_layout"],
                get_resolved_kv_cache_layout=lambda: layout,
                enable_prefix_caching=True,
                prefix_cache_retention_interval=None,
                mamba_cache_mode="align",
            ),
            parallel_config=Fake(
                tensor_parallel_size=self.tp,
                pipeline_parallel_size=self.pp,
                decode_context_parallel_size=self.dcp,
                prefill_context_parallel_size=1,
                cp_kv_cache_interleave_size=self.interleave,
            ),
            model_config=Fake(max_model_len=64, original_max_model_len=64),
            speculative_config=None,
            attention_config=Fake(hisparse_config=None),
            kv_transfer_config=None,
            num_prefill_lookahead_tokens=0,
            max_in_flight_tokens=64,
        )

    def _told(
        self, rank: Rank, config: Any, like: Golden, engine: dict[str, Any]
    ) -> dict[str, Any]:
        layout = KVCacheLayout[engine["kv_cache_layout"]]
        kernels = [self.kernel] * len(config.kv_cache_groups) if self.kernel else None
        caches = allocate_kv_cache(config, torch.device("cpu"), layout, kernels)
        (storage,) = {t.untyped_storage().data_ptr() for t in caches.values()}
        (size,) = {t.untyped_storage().nbytes() for t in caches.values()}
        backends = {name: b for r in like.data["ranks"] for name, b in r["backends"].items()}
        if self.draft is not None:
            isa = {"CPU_ATTN": "vec"}.get(self.draft.backend)
            mine = {"backend": self.draft.backend, "isa": isa}
            backends = {name: backends.get(name, mine) for name in caches}
        if self.sparse is not None:
            names = {name: INDEXER if ".indexer." in name else SPARSE for name in caches}
            backends = {name: {"backend": one, "isa": None} for name, one in names.items()}
        told = {
            "pp_rank": rank.pp,
            "tp_rank": rank.tp,
            "num_blocks": config.num_blocks,
            "storages": [{"id": 0, "bytes": size}],
            "groups": [
                {
                    "group_id": number,
                    "layers": list(group.layer_names),
                    "spec": told_spec(group.kv_cache_spec),
                }
                for number, group in enumerate(config.kv_cache_groups)
            ],
            "tensors": {name: view(tensor, storage) for name, tensor in caches.items()},
            "backends": {name: backends[name] for name in caches},
            "state_views": {},
        }
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            for name in group.layer_names if type(spec).__name__ == "MambaSpec" else ():
                told["state_views"][name] = self._states(spec, caches[name], storage)
        return told

    def _states(self, spec: Any, cache: torch.Tensor, storage: int) -> list[dict[str, Any]]:
        """A layer's own views of its states, made by vLLM's layer."""
        layer = Fake(get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes)
        MambaBase.bind_kv_cache(layer, cache)
        conv, ssm = (view(one, storage) for one in layer.kv_cache)
        config, sections, start = self.config, [], 0
        for name, channels in self._channels(config):
            sections.append({"name": name, "start_channel": start, "channels": channels})
            start += channels
        order = "channels_first" if is_conv_state_dim_first() else "rows_first"
        assert start == conv["shape"][1 if order == "channels_first" else 2]
        return [{**conv, "conv_order": order, "conv_sections": sections}, ssm]

    def _channels(self, config: dict[str, Any]) -> list[tuple[str, int]]:
        if "linear_num_key_heads" in config:
            keys = config["linear_num_key_heads"] * config["linear_key_head_dim"] // self.tp
            values = config["linear_num_value_heads"] * config["linear_value_head_dim"] // self.tp
            return [("q", keys), ("k", keys), ("v", values)]
        groups = config["mamba_n_groups"]
        shared = groups * config["mamba_d_state"] // (1 if groups == 1 else self.tp)
        inner = config["mamba_expand"] * config["hidden_size"] // self.tp
        return [("x", inner), ("B", shared), ("C", shared)]


def told_spec(spec: Any) -> dict[str, Any]:
    """What was captured of a spec: enough to make it again, and to fill its blocks."""
    told: dict[str, Any] = {"type": type(spec).__name__, "block_size": spec.block_size}
    if told["type"] == "UniformTypeKVCacheSpecs":  # one table for layers of different pages
        each = {layer: told_spec(one) for layer, one in spec.kv_cache_specs.items()}
        return {**told, "kv_cache_specs": each}
    told |= {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    for name in ("dtype", "kv_quant_mode", "mamba_type"):
        if told.get(name) is not None:
            told[name] = getattr(told[name], "name", str(told[name]).removeprefix("torch."))
    if "dtypes" in told:
        told["dtypes"] = [str(d).removeprefix("torch.") for d in told["dtypes"]]
    return {**told, "page_size_bytes": spec.page_size_bytes}


def view(tensor: torch.Tensor, storage: int) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "element_size": tensor.element_size(),
        "storage": 0,
        "storage_offset_bytes": tensor.data_ptr() - storage,
    }


class LaidOut:
    """What `captured`'s racks, producers and consumers ask of an engine."""

    def __init__(self, registered: Registered) -> None:
        self.registered, self.carrier = registered, registered.carrier
        draft, sparse = registered.draft, registered.sparse
        if sparse is not None and sparse.mtp:
            draft = Draft(layers=sparse.mtp, heads=1, tp=registered.tp)
        self.engine = Described({**registered.lay_out().data, "draft": draft})

    def tables(self, tokens: int, seed: int) -> Tables:
        """As `Captured.tables`; a block of a rank holds a share of dcp blocks' tokens."""
        first = self.engine.data["ranks"][0]
        rng = np.random.default_rng(seed)
        ids = rng.permutation(np.arange(1, first["num_blocks"])).tolist()
        tables = []
        for group in first["groups"]:
            spec = group["spec"]
            if spec["type"] == "MambaSpec":
                tables.append([ids.pop()])
                continue
            span = spec["block_size"] * self.registered.dcp
            dropped = first_needed(spec, tokens) // span
            tables.append([0] * dropped + [ids.pop() for _ in range(-(-tokens // span) - dropped)])
        return tables


class Described(Golden):
    """Its layouts, model and shape are those that the adapter finds."""

    def worker(self, rank: Rank) -> Worker:
        worker = Worker(self, rank)
        if draft := self.data["draft"]:
            worker.speculate(draft.layers, draft.heads, draft.tp)
        return worker

    def describe(self, worker: Worker) -> Any:
        """The last stage tells the others of its draft."""
        if not self.data["draft"] or self.engine["pp"] == 1:
            return worker.describe()
        told: list[Any] = []
        self.worker(self.ranks[-1]).describe(lambda mine: told.append(mine) or mine)
        return worker.describe(lambda _: told[0])

    @property
    def model(self) -> Any:
        return self.describe(self.worker(self.ranks[0])).model

    @property
    def shape(self) -> Any:
        return self.describe(self.worker(self.ranks[0])).layout.shape


class RegisteredRack(Rack):
    """One rank's storages, described by the adapter."""

    def __init__(self, laid_out: LaidOut, rank: Rank, fill: int) -> None:
        self.captured, self.rank, self.engine = laid_out, rank, laid_out.engine  # type: ignore[assignment]
        worker = laid_out.engine.worker(rank)
        described = laid_out.engine.describe(worker)
        self.layout, self.bases = described.layout, list(described.bases)
        storages = {t.untyped_storage().data_ptr(): t for t in worker.kv_caches.values()}
        self.memory = [
            torch.empty(0, dtype=torch.uint8).set_(storages[base].untyped_storage()).numpy()
            for base in self.bases
        ]
        for storage in self.memory:
            storage[:] = fill
        self.regions = [
            MemoryRegion(base, len(storage))
            for base, storage in zip(self.bases, self.memory, strict=True)
        ]
        self.carrier = make_carrier(laid_out.carrier, secret=None, host="127.0.0.1")
        self.carrier.register(self.regions)

    def _layers(self) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
        """Where layers of different pages share a table, each with its own spec."""
        for group, layer, tensor in super()._layers():
            specs = group["spec"].get("kv_cache_specs")
            yield ({**group, "spec": specs[layer]} if specs else group), layer, tensor

    def _token_bytes(
        self, spec: dict[str, Any], layer: str, table: list[int], tokens: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        """A block is as many kernel blocks, one behind the other."""
        slots = self.engine.rank(self.rank)["tensors"][layer]["shape"][2]
        ratio = spec["block_size"] // slots
        split = [block and block * ratio + part for block in table for part in range(ratio)]
        return super()._token_bytes(spec, layer, split, tokens)

    def _first_head(self, layer: str) -> int:
        draft = self.engine.data["draft"]
        if draft is None or ordinal(layer) < self.engine.data["hf_config"]["num_hidden_layers"]:
            return super()._first_head(layer)
        return 0 if draft.tp == 1 else self.rank.tp * draft.heads // draft.tp

    def _positions(self, index: int, slots: int) -> Any:
        """Ranks of a dcp group take turns, `interleave` tokens at a time."""
        told = self.captured.registered  # type: ignore[attr-defined]
        local = index * slots + np.arange(slots)
        turn, within = np.divmod(local, told.interleave)
        return (turn * told.dcp + self.rank.tp % told.dcp) * told.interleave + within


class RegisteredProducer(CapturedProducer):
    rack = RegisteredRack

    def __init__(self, registered: Registered) -> None:
        super().__init__(LaidOut(registered))  # type: ignore[arg-type]


class RegisteredConsumer(CapturedConsumer):
    rack = RegisteredRack

    def __init__(self, registered: Registered) -> None:
        super().__init__(LaidOut(registered))  # type: ignore[arg-type]


class Host:
    """A process that is a producer of one engine after another: vLLM is imported once."""

    def __init__(self, first: Registered | None) -> None:
        self._producer: RegisteredProducer | None = None

    def hold(self, registered: Registered, tokens: int) -> Any:
        self.close()
        self._producer = RegisteredProducer(registered)
        return self._producer.hold(tokens)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
        self._producer = None
