"""vLLM's cache as ours: its configuration, specs and registered tensors to model, shape and layout.

Outer strides come from the tensors, interiors from the attention backend that each layer runs. What
the model's configuration says is checked against the specs that vLLM made; where the two differ, or
a backend's pages are unknown, the cache is refused at start or moves as opaque pages.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.layout.hf import model_from_config
from kvferry.layout.model import CacheModel, Group
from kvferry.layout.rank import RankLayout, Region
from kvferry.layout.shape import EngineShape, Rank
from kvferry.layout.tensors import LayerKey, TensorView, layout_from_tensors
from kvferry.topology import TransferRegion

# Backends that keep [K | V] of one head and slot side by side, in whatever order is registered.
JOINED = """
FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION CPU_MLA AMX_MLA TRITON_MLA FLASHMLA FLASH_ATTN_MLA
FLASHINFER_MLA CUTLASS_MLA
"""
CPU_ISA = {"vec": "cpu", "vec16": "cpu", "amx": "cpu_amx"}
# Keys of a model's configuration that do not change what its cache means.
IRRELEVANT = "_name_or_path transformers_version torch_dtype dtype architectures use_cache"


@dataclass(frozen=True, slots=True)
class Described:
    """One worker's cache."""

    model: CacheModel
    layout: RankLayout
    bases: tuple[int, ...]
    meaning: dict[str, str]
    regions: tuple[TransferRegion, ...]  # one a layer

    def summary(self) -> str:
        """How many layers have pages of which length."""
        lengths = Counter(region.block_len for region in self.regions)
        return ", ".join(f"{n} layers of {size} bytes a block" for size, n in lengths.items())


def describe_worker(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    rank: Rank,
    model_id: str = "",
) -> Described:
    """Describe what this worker registered, or refuse it with the reason."""
    model = cache_model(vllm_config, kv_cache_config)
    layers = vllm_config.compilation_config.static_forward_context
    keys = layer_keys(model, kv_cache_config)
    interiors: dict[str, str] = {}
    tensors: dict[LayerKey, list[TensorView]] = {}
    tables: dict[LayerKey, int] = {}
    padded: dict[str, int] = {}
    kernel_sizes: dict[str, int] = {}
    transfer_regions: list[TransferRegion] = []
    storages: dict[int, int] = {}  # region by address
    regions: list[Region] = []
    for table, cache_group in enumerate(kv_cache_config.kv_cache_groups):
        for name in cache_group.layer_names:
            if name not in keys or name not in kv_caches:
                continue
            key, tensor = keys[name], kv_caches[name]
            spec = layer_spec(cache_group.kv_cache_spec, name)
            _require_spec(model.group(key[0]), spec, name)
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = len(regions)
                regions.append(Region(f"storage {len(regions)}", storage.nbytes()))
            view = TensorView(
                storages[storage.data_ptr()],
                tensor.data_ptr() - storage.data_ptr(),
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.element_size(),
            )
            tensors[key], tables[key] = [view], table
            padded[key[0]] = getattr(spec, "page_size_padded", None) or 0
            interiors[key[0]] = _interior(layers[name], key[0], interiors)
            kernel_sizes[key[0]] = view.shape[2]
            blocks = spec.block_size // max(1, view.shape[2] * int(spec.tokens_per_state))
            transfer_regions.append(
                TransferRegion(
                    layer_name=name,
                    layer_index=key[1],
                    base_addr=tensor.data_ptr(),
                    block_len=view.stride_bytes(0) * blocks,
                    kv_block_len=view.page_bytes * blocks,
                    group_index=table,
                )
            )
    shape = engine_shape(vllm_config, kv_cache_config, model, interiors, kernel_sizes)
    layout = layout_from_tensors(
        model, shape, rank, regions, tensors, tables=tables, padded_page_bytes=padded
    )
    told = meaning(vllm_config, model_id)
    return Described(model, layout, tuple(storages), told, tuple(transfer_regions))


def cache_model(vllm_config: Any, kv_cache_config: Any) -> CacheModel:
    """The whole model's cache, over all stages, from its configuration."""
    config = vllm_config.model_config
    model = model_from_config(
        {**config.hf_text_config.to_dict(), "dtype": str(config.dtype).removeprefix("torch.")},
        name=str(config.model),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
    )
    if any(group.is_state for group in model.groups):
        raise DescriptionError(
            f"model {model.name!r} has recurrent states; handing those over needs a prefill that "
            "stops before the last token, which this connector does not do yet"
        )
    if vllm_config.speculative_config is not None:
        raise DescriptionError(
            "engines with a draft model are not supported yet; start without speculative decoding"
        )
    return model


def layer_keys(model: CacheModel, kv_cache_config: Any) -> dict[str, LayerKey]:
    """Our name of each of vLLM's layers: by ordinal, never by position."""
    from vllm.model_executor.models.utils import extract_layer_index

    keys: dict[str, LayerKey] = {}
    for cache_group in kv_cache_config.kv_cache_groups:
        for name in cache_group.layer_names:
            ordinal = extract_layer_index(name)
            groups = [g.name for g in model.groups if ordinal in g.layers]
            if len(groups) != 1:
                raise DescriptionError(
                    f"layer {name!r} caches something that the description of {model.name!r} does "
                    f"not have (groups with layer {ordinal}: {groups})"
                )
            keys[name] = (groups[0], ordinal)
    return keys


def layer_spec(spec: Any, layer: str) -> Any:
    """A layer's own spec, where its group holds several."""
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec


def _require_spec(group: Group, spec: Any, layer: str) -> None:
    """What vLLM made must be what the configuration promised."""
    content = spec.state_content_size_bytes
    expected = sum(c.unit_bytes for c in group.components)
    window = getattr(spec, "sliding_window", None) or 0
    chunk = getattr(spec, "attention_chunk_size", None) or 0
    span = group.residency.span
    if content != expected or span not in (window or chunk, 0):
        raise DescriptionError(
            f"layer {layer!r}: its configuration promises {expected} bytes a head and token and a "
            f"span of {span}, vLLM's {type(spec).__name__} has {content} bytes and "
            f"{window or chunk}; kvferry cannot describe this cache"
        )


def _interior(layer: Any, group: str, known: Mapping[str, str]) -> str:
    backend = layer.get_attn_backend().get_name()
    if backend == "CPU_ATTN":
        interior = CPU_ISA.get(getattr(layer, "isa", ""), "opaque")
    else:
        interior = "joined" if backend in JOINED.split() else "opaque"
    if known.get(group, interior) != interior:
        raise DescriptionError(
            f"layers of group {group!r} keep their pages differently: {known[group]!r} and "
            f"{interior!r} ({backend})"
        )
    return interior


def engine_shape(
    vllm_config: Any,
    kv_cache_config: Any,
    model: CacheModel,
    interiors: Mapping[str, str],
    kernel_sizes: Mapping[str, int],
) -> EngineShape:
    from vllm.distributed.utils import get_pp_indices

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    pp = parallel.pipeline_parallel_size
    bounds = [get_pp_indices(model.num_layers, stage, pp) for stage in range(pp)]
    sizes = {}
    for cache_group in kv_cache_config.kv_cache_groups:
        for name in cache_group.layer_names:
            key = layer_keys(model, kv_cache_config)[name]
            sizes[key[0]] = cache_group.kv_cache_spec.block_size
    split = {kernel_sizes[g] for g in kernel_sizes if kernel_sizes[g] != sizes[g]}
    if len(split) > 1:
        raise DescriptionError(f"groups with different kernel block sizes {sorted(split)}")
    residencies = {
        type(layer_spec(g.kv_cache_spec, g.layer_names[0])).__name__
        for g in kv_cache_config.kv_cache_groups
        if g.layer_names
    }
    windows = any(g.residency.kind in ("window", "chunk") for g in model.groups)
    return EngineShape(
        tp=parallel.tensor_parallel_size,
        pp=pp,
        stages=tuple(stop - start for start, stop in bounds) if pp > 1 else (),
        dcp=parallel.decode_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size or 1,
        block_size=cache.block_size,
        block_size_of=tuple(sorted(sizes.items())),
        kernel_block_size=split.pop() if split else 0,
        order=str(cache.kv_cache_layout),
        interior_of=tuple(sorted(interiors.items())),
        # without the hybrid manager every layer is a full one, and keeps all its blocks
        full_residency=windows and residencies <= {"FullAttentionSpec", "MLAAttentionSpec"},
        null_block=0,
    )


def meaning(vllm_config: Any, model_id: str) -> dict[str, str]:
    """What must be equal on two engines for their bytes to mean the same."""
    config = vllm_config.model_config
    text = {k: v for k, v in config.hf_text_config.to_dict().items() if k not in IRRELEVANT.split()}
    digest = hashlib.sha256(json.dumps(text, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "model": model_id or str(config.model).rstrip("/").rsplit("/", 1)[-1],
        "model configuration": digest[:16],
        "dtype": str(config.dtype),
        "cache dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(config.quantization),
    }
