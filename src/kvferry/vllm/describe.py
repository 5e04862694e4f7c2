"""vLLM's cache as ours: its configuration, specs and registered tensors to model, shape and layout.

Outer strides come from the tensors, interiors from the attention backend that each layer runs. What
the model's configuration says is checked against the specs that vLLM made; where the two differ, or
a backend's pages are unknown, the cache is refused at start or moves as opaque pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvferry.errors import DescriptionError
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import RankLayout, Region
from kvferry.layout.shape import EngineShape, Rank
from kvferry.layout.tensors import LayerKey, TensorView, layout_from_tensors
from kvferry.topology import TransferRegion
from kvferry.vllm.fingerprint import meaning
from kvferry.vllm.model import cache_model, group_spec, is_state, layer_specs, require_spec

# Backends that keep [K | V] of one head and slot side by side, in whatever order is registered.
JOINED = """
FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION CPU_MLA AMX_MLA TRITON_MLA FLASHMLA FLASH_ATTN_MLA
FLASHINFER_MLA CUTLASS_MLA
"""
CPU_ISA = {"vec": "cpu", "vec16": "cpu", "amx": "cpu_amx"}


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
    tp: int | None = None,
) -> Described:
    """Describe what this worker registered, or refuse it with the reason.

    tp  ranks that the cache is cut over, where that is not vLLM's tensor parallel size
    """
    model, keys = cache_model(vllm_config, kv_cache_config)
    layers = vllm_config.compilation_config.static_forward_context
    interiors: dict[str, str] = {}
    tensors: dict[LayerKey, list[TensorView]] = {}
    tables: dict[LayerKey, int] = {}
    padded: dict[str, int] = {}
    block_sizes: dict[str, int] = {}
    kernel_sizes: dict[str, int] = {}
    storages: dict[int, int] = {}  # region by address
    regions: list[Region] = []
    for table, name, spec in layer_specs(kv_cache_config):
        if name not in kv_caches:
            continue
        (group, _), tensor = keys[name], kv_caches[name]
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
        tensors[keys[name]], tables[keys[name]] = [view], table
        padded[group] = getattr(spec, "page_size_padded", None) or 0
        if is_state(spec):
            continue
        _alike(group, "interiors", interiors, _interior(layers[name]))
        _alike(group, "block sizes", block_sizes, int(spec.block_size))
        slots = view.shape[2] * max(1, int(spec.tokens_per_state))
        _alike(group, "kernel block sizes", kernel_sizes, slots)
    shape = engine_shape(vllm_config, kv_cache_config, model, interiors, block_sizes, kernel_sizes)
    shape = replace(shape, tp=tp or shape.tp)
    for _, name, spec in layer_specs(kv_cache_config):
        require_spec(model.group(keys[name][0]), shape, rank, spec, name)
        if shape.dcp > 1 and not spec.dcp_sharded and not is_state(spec):
            raise DescriptionError(
                f"layer {name!r} keeps all tokens on every rank, while decode context parallelism "
                f"shares them out over {shape.dcp}; start without it, or without the draft model"
            )
    layout = layout_from_tensors(
        model, shape, rank, regions, tensors, tables=tables, padded_page_bytes=padded
    )
    told = meaning(vllm_config, kv_cache_config, model_id)
    return Described(
        model,
        layout,
        tuple(storages),
        told,
        _regions(model, shape, keys, tables, tensors, storages),
    )


def _alike(group: str, what: str, known: dict[str, Any], found: Any) -> None:
    """Layers of a group must agree."""
    if known.setdefault(group, found) != found:
        raise DescriptionError(
            f"layers of group {group!r} have different {what}: {known[group]!r} and {found!r}"
        )


def _regions(
    model: CacheModel,
    shape: EngineShape,
    keys: Mapping[str, LayerKey],
    tables: Mapping[LayerKey, int],
    tensors: Mapping[LayerKey, list[TensorView]],
    storages: Mapping[int, int],
) -> tuple[TransferRegion, ...]:
    bases = list(storages)
    made = []
    for name, key in keys.items():
        if key not in tensors:
            continue
        block, kernel = shape.entries(model.group(key[0]))
        (view,) = tensors[key]
        made.append(
            TransferRegion(
                layer_name=name,
                layer_index=key[1],
                base_addr=bases[view.region] + view.offset,
                block_len=view.stride_bytes(0) * (block // kernel),
                kv_block_len=view.page_bytes * (block // kernel),
                group_index=tables[key],
            )
        )
    return tuple(made)


def _interior(layer: Any) -> str:
    backend = layer.get_attn_backend().get_name()
    if backend == "CPU_ATTN":
        isa = getattr(layer, "isa", "")
        return CPU_ISA.get(isa, f"opaque:{backend}.{isa}")
    # two backends that nobody has looked into need not keep the same thing in a page
    return "joined" if backend in JOINED.split() else f"opaque:{backend}"


def engine_shape(
    vllm_config: Any,
    kv_cache_config: Any,
    model: CacheModel,
    interiors: Mapping[str, str],
    block_sizes: Mapping[str, int],
    kernel_sizes: Mapping[str, int],
) -> EngineShape:
    from vllm.distributed.utils import get_pp_indices

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    pp = parallel.pipeline_parallel_size
    bounds = [get_pp_indices(model.num_layers, stage, pp) for stage in range(pp)]
    specs = [group_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    kinds = {type(spec).__name__ for spec in specs if not is_state(spec)}  # on all stages
    windows = any(g.residency.kind in ("window", "chunk") for g in model.groups)
    # what is the same everywhere is said once: a stage without some group must say the same
    alike = len(set(interiors.values())) == 1
    own = {g: n for g, n in block_sizes.items() if n != cache.block_size}
    split = {g: n for g, n in kernel_sizes.items() if n != block_sizes[g]}
    one_kernel = bool(split) and len(set(kernel_sizes.values())) == 1
    return EngineShape(
        tp=parallel.tensor_parallel_size,
        pp=pp,
        stages=tuple(stop - start for start, stop in bounds) if pp > 1 else (),
        dcp=parallel.decode_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size or 1,
        role_tp=_draft_tp(vllm_config, model),
        block_size=cache.block_size,
        block_size_of=tuple(sorted(own.items())),
        kernel_block_size=next(iter(split.values())) if one_kernel else 0,
        kernel_block_size_of=() if one_kernel else tuple(sorted(split.items())),
        order=str(cache.kv_cache_layout),
        interior=next(iter(interiors.values())) if alike else "joined",
        interior_of=() if alike else tuple(sorted(interiors.items())),
        conv_order=_conv_order(model),
        # without the hybrid manager every layer is a full one, and keeps all its blocks
        full_residency=windows and kinds <= {"FullAttentionSpec", "MLAAttentionSpec"},
        null_block=0,
    )


def _draft_tp(vllm_config: Any, model: CacheModel) -> tuple[tuple[str, int], ...]:
    if not any(group.role == "draft" for group in model.groups):
        return ()
    tp = int(vllm_config.speculative_config.draft_parallel_config.tensor_parallel_size)
    return () if tp == vllm_config.parallel_config.tensor_parallel_size else (("draft", tp),)


def _conv_order(model: CacheModel) -> Literal["DS", "SD"]:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    has_states = any(group.is_state for group in model.groups)
    return "SD" if has_states and not is_conv_state_dim_first() else "DS"
