# SPDX-License-Identifier: Apache-2.0
"""Describes the cache that a vLLM worker registered: model, shape, layout and meaning.

- The model: target layers of all stages are described from the model's configuration, and checked
  against the specs that vLLM made. Where `layout.hf` does not know the model, they are described
  from the specs alone, as far as these prove what a layer caches (`model_from_specs`). A draft
  model's layers are described from their specs. vLLM numbers them after the target's layers or
  gives them another prefix; here they have numbers of their own. vLLM runs them on the last stage,
  which describes them to the other stages.
- The layout: outer strides come from the tensors, interiors from each layer's attention backend.
- The meaning: settings that decide the cached values of equal tokens. Two engines must agree on all
  of them. They compare them at a handshake, and they are part of the pool's namespace. Settings
  that only change where values lie or how they are rounded (backends, kernels, sizes of batches)
  are not part of the meaning, so that engines of any shape can share.

If configuration and specs differ, the cache is refused at start. Pages of a backend with an unknown
layout move as opaque pages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, groupby
from math import prod
from pathlib import Path
from typing import Any, Literal

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import DescriptionError
from kvferry.layout.hf import (
    DRAFT_GROUPS,
    ELEMENT_BYTES,
    INDEX_SCALED,
    index_components,
    knows,
    model_from_config,
)
from kvferry.layout.model import CacheModel, Component, Group, Residency, ResidencyKind
from kvferry.layout.placement import RankLayout, Region
from kvferry.layout.shape import EngineShape, Rank
from kvferry.layout.tensors import LayerKey, TensorView, layout_from_tensors
from kvferry.pool.weights import hub_snapshot

# Backends that keep [K | V] of one head and slot side by side, in the order of the registered axes.
JOINED = """
FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION CPU_MLA AMX_MLA TRITON_MLA FLASHMLA FLASH_ATTN_MLA
FLASHINFER_MLA CUTLASS_MLA FLASHMLA_SPARSE FLASH_ATTN_MLA_SPARSE FLASHINFER_MLA_SPARSE
FLASHINFER_MLA_SPARSE_SM90 FLASHINFER_MLA_SPARSE_SM120
"""
INDEXER = "DEEPSEEK_V32_INDEXER"
# vLLM's specs that say all of what a layer caches; our names of groups of such layers
PLAIN: dict[str, tuple[str, ResidencyKind]] = {
    "FullAttentionSpec": ("attention", "full"),
    "SlidingWindowSpec": ("window", "window"),
    "ChunkedLocalAttentionSpec": ("chunk", "chunk"),
    "MLAAttentionSpec": ("mla", "full"),
}
CPU_ISA = {"vec": "cpu", "vec16": "cpu", "amx": "cpu_amx"}
# Keys of a model's configuration that do not change what its cache means. Some models write their
# engine's `max_model_len` there; `rope_factors` covers what depends on it.
IRRELEVANT = """
_name_or_path transformers_version torch_dtype dtype architectures use_cache max_model_len
"""
# Those that say where it came from. An Eagle draft's configuration lies inside another.
ORIGIN = ("_name_or_path", "transformers_version")
ORIGINAL_LENGTH = "original_max_position_embeddings"
LLAMA4 = "llama4_text"
# vLLM's threshold: with longer contexts, Llama 4 tunes attention by position, unless the generation
# configuration decides
LLAMA4_TUNED_ABOVE_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Described:
    model: CacheModel
    layout: RankLayout
    bases: tuple[int, ...]
    meaning: dict[str, str]

    @property
    def memory(self) -> list[MemoryRegion]:
        pairs = zip(self.bases, self.layout.regions, strict=True)
        return [MemoryRegion(base, region.bytes) for base, region in pairs]

    def summary(self) -> str:
        """How many layers have blocks of which length."""
        lengths: Counter[int] = Counter()
        for part in self.layout.parts:
            lengths[part.placements[0].block_stride] += len(part.layers)
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

    tp  ranks that the cache is cut over, if that is not vLLM's tensor parallel size
    """
    if any(type(spec).__name__.startswith("HiSparse") for *_, spec in layer_specs(kv_cache_config)):
        raise DescriptionError(
            "HiSparse keeps the cache in host memory, which kvferry does not reach; start without "
            "hisparse_config"
        )
    target, drafts = split_layers(vllm_config, kv_cache_config, rank.pp)
    layers = vllm_config.compilation_config.static_forward_context
    draft_pages = {
        name: _pages(layers[name], spec, kv_caches[name])
        for name, spec in drafts
        if name in kv_caches and not is_state(spec)
    }
    content = _draft_content(vllm_config) if drafts else ""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and vllm_config.speculative_config is not None:
        # vLLM writes into a draft's configuration when it loads the draft, on the last stage only
        drafts, draft_pages, content = of_all_stages((drafts, draft_pages, content))[-1]
        if rank.pp < stages - 1:  # here a layer of the target may have the same name
            drafts = [(f"draft {name}", spec) for name, spec in drafts]
            draft_pages = {f"draft {name}": found for name, found in draft_pages.items()}
    model, keys = cache_model(vllm_config, kv_cache_config, target, drafts, content)
    pages = {keys[name][0]: found for name, found in draft_pages.items()}  # by group
    tensors: dict[LayerKey, list[TensorView]] = {}
    tables: dict[LayerKey, int] = {}
    padded: dict[str, int] = {}
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
        found = _pages(layers[name], spec, tensor)
        if pages.setdefault(group, found) != found:
            raise DescriptionError(
                f"layers of group {group!r} have different pages: {pages[group]} and {found}"
            )
    shape = engine_shape(vllm_config, kv_cache_config, model, pages)
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
    return Described(model, layout, tuple(storages), told)


@dataclass(frozen=True, slots=True)
class _Pages:
    """What the pages of a group's layers have in common."""

    interior: str
    block_size: int
    kernel_block_size: int


def _pages(layer: Any, spec: Any, tensor: Any) -> _Pages:
    slots = int(tensor.shape[2]) * max(1, int(spec.tokens_per_state))
    interior = _interior(layer)
    if spec.num_head_slots is not None and interior == "joined":
        # K of all heads, then V: FLASH_ATTN on AMD, which shuffles both
        interior = f"opaque:{layer.get_attn_backend().get_name()} of {spec.num_head_slots} slots"
    return _Pages(interior, int(spec.block_size), slots)


def of_all_ranks(told: Any) -> list[Any]:
    """The arguments of all tensor parallel ranks of a stage, in order. Every worker must call this
    at the same point of its start."""
    from vllm.distributed import get_tp_group

    return _of_all(get_tp_group(), told)


def of_all_stages(told: Any) -> list[Any]:
    """The same for pipeline stages."""
    from vllm.distributed import get_pp_group

    return _of_all(get_pp_group(), told)


def _of_all(group: Any, told: Any) -> list[Any]:
    import torch

    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, told, group=group.cpu_group)
    return found


def _interior(layer: Any) -> str:
    backend = layer.get_attn_backend().get_name()
    if backend == "CPU_ATTN":
        isa = getattr(layer, "isa", "")
        return CPU_ISA.get(isa, f"opaque:{backend}.{isa}")
    if backend == INDEXER and _on_nvidia():  # the values of a kernel's block, then their scales
        return "planes"
    # two unknown backends may have different pages
    return "joined" if backend in JOINED.split() else f"opaque:{backend}"


def _on_nvidia() -> bool:
    """Elsewhere kernels shuffle the values of index keys."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def engine_shape(
    vllm_config: Any,
    kv_cache_config: Any,
    model: CacheModel,
    pages: Mapping[str, _Pages],
) -> EngineShape:
    from vllm.distributed.utils import get_pp_indices

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    pp = parallel.pipeline_parallel_size
    bounds = [get_pp_indices(model.num_layers, stage, pp) for stage in range(pp)]
    specs = [group_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    kinds = {type(spec).__name__ for spec in specs if not is_state(spec)}  # on all stages
    windows = any(g.residency.kind in ("window", "chunk") for g in model.groups)
    # a setting that all groups share is given once, so that a stage that lacks a group has the same
    interiors = {g: p.interior for g, p in pages.items()}
    alike = len(set(interiors.values())) == 1
    own = {g: p.block_size for g, p in pages.items() if p.block_size != cache.block_size}
    split = {
        g: p.kernel_block_size for g, p in pages.items() if p.kernel_block_size != p.block_size
    }
    one_kernel = bool(split) and len({p.kernel_block_size for p in pages.values()}) == 1
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
        # without the hybrid cache manager, every layer keeps all its blocks
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


def split_layers(
    vllm_config: Any, kv_cache_config: Any, stage: int
) -> tuple[CacheModel, list[tuple[str, Any]]]:
    """The target model's cache, and those of this worker's layers that are a draft model's."""
    from vllm.distributed.utils import get_pp_indices

    config = vllm_config.model_config
    own = [(name, spec) for _, name, spec in layer_specs(kv_cache_config)]
    text = config.hf_text_config.to_dict()
    target = _configured_model(vllm_config, kv_cache_config, text) if knows(text) else None
    stages = vllm_config.parallel_config.pipeline_parallel_size
    drafts: list[tuple[str, Any]] = []
    if vllm_config.speculative_config is not None and stage == stages - 1:
        layers = target.num_layers if target else int(config.get_total_num_hidden_layers())
        # some methods number a draft's layers from the stage's count, others from the model's
        mine = range(*get_pp_indices(layers, stage, stages))
        named = {name for name, _ in own}
        loaded = vllm_config.compilation_config.static_forward_context  # the target's are first
        prefix = next((_prefix(name) for name in loaded if name in named), "")
        drafts = [
            (name, spec)
            for name, spec in own
            if _prefix(name) != prefix or _ordinal(name) not in mine
        ]
    if target is None:
        mine_alone = [layer for layer in own if layer not in drafts]
        told = of_all_stages(mine_alone) if stages > 1 else [mine_alone]
        target = model_from_specs(vllm_config, [*chain(*told)])
    return target, drafts


def _configured_model(vllm_config: Any, kv_cache_config: Any, text: dict[str, Any]) -> CacheModel:
    config = vllm_config.model_config
    specs = [group_spec(g.kv_cache_spec) for g in kv_cache_config.kv_cache_groups]  # of all stages
    states = [spec for spec in specs if is_state(spec)]
    dtypes = [str(d).removeprefix("torch.") for d in states[0].dtypes] if states else []
    dtype = str(config.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    target = model_from_config(
        {**text, "dtype": dtype},
        name=str(config.model),
        # vLLM has looked at the checkpoint's scales; where it leaves "auto", it does without
        cache_dtype=dtype if cache_dtype == "auto" else cache_dtype,
        state_dtype=dtypes[0] if dtypes else "auto",
        ssm_dtype=dtypes[-1] if dtypes else "auto",
    )
    return _with_rows(target, states[0]) if states else target


def model_from_specs(vllm_config: Any, layers: list[tuple[str, Any]]) -> CacheModel:
    """The target's cache from vLLM's specs of all its layers, for a model that we have no table of.

    Specs tell a rank's heads, not the model's, and not whether ranks repeat them. So each layer's
    heads must be those that vLLM reads in the model's configuration, and a rank must have several
    of them: one head a rank could be one of any number, and some models have layers with more heads
    than their configuration says first. Latents are the same on all ranks where vLLM says so.
    """
    config, cache = vllm_config.model_config, vllm_config.cache_config
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    groups: dict[str, Group] = {}
    for name, spec in sorted(layers, key=lambda layer: _ordinal(layer[0])):
        ordinal, plain = _ordinal(name), PLAIN.get(type(spec).__name__)

        def refuse(why: str, name: str = name, spec: Any = spec) -> DescriptionError:
            return DescriptionError(
                f"model_type {config.hf_text_config.to_dict().get('model_type')!r} is not in "
                f"kvferry's table of models, and vLLM's {type(spec).__name__} of layer {name!r} "
                f"does not prove what the layer caches: {why}"
            )

        if plain is None:
            raise refuse(f"only {', '.join(PLAIN)} do")
        kind, residency = plain
        if spec.tokens_per_state != 1 or getattr(spec, "non_causal", False):
            raise refuse("it stores other things than one entry a token, or is not causal")
        window = getattr(spec, "sliding_window", None)
        span = int(window or getattr(spec, "attention_chunk_size", None) or 0)
        if (span > 0) != (residency != "full"):
            raise refuse("without its hybrid cache manager, vLLM does not say which have a window")
        content = str(spec.dtype).removeprefix("torch.")
        if spec.dtype.itemsize == 1:
            content = str(cache.cache_dtype)
        if ELEMENT_BYTES.get(content) != spec.dtype.itemsize:
            raise refuse(f"cache type {content!r} is not known")
        heads = int(config.model_arch_config[ordinal].total_num_kv_heads)
        mla = kind == "mla"
        if mla and (spec.max_tp_shards, spec.num_kv_heads) != (1, 1):
            raise refuse("it is not said to be the same on all ranks")
        if mla and spec.state_content_size_bytes != spec.head_size * spec.dtype.itemsize:
            raise refuse("its latents are packed")
        if not mla and (spec.num_kv_heads * tp != heads or spec.num_kv_heads == 1 < tp):
            raise refuse(
                f"a rank of {tp} has {spec.num_kv_heads} heads of {heads}. With one head a rank, "
                "use a smaller tensor_parallel_size"
            )
        parts = _parts(spec, heads, content)
        group = Group(kind, (ordinal,), parts, Residency(residency, span))
        first = groups.setdefault(kind, group)
        if replace(first, layers=group.layers) != group:
            raise refuse(f"it is not as in layer {first.layers[0]}")
        if first is not group:
            groups[kind] = replace(group, layers=(*first.layers, ordinal))
    total = int(config.get_total_num_hidden_layers())
    ordered = tuple(groups[kind] for kind, _ in PLAIN.values() if kind in groups)
    return CacheModel(str(config.model), ordered, total_layers=total)


def _parts(spec: Any, heads: int, content: str) -> tuple[Component, ...]:
    """What a layer of attention caches, by its spec and the heads of the whole model."""
    size = spec.dtype.itemsize
    if "MLA" in type(spec).__name__:
        width = spec.state_content_size_bytes // size
        return (Component("latent", 1, (width,), size, "replicated", content),)
    dims = {"k": int(spec.head_size), "v": int(spec.head_size_v)}
    return tuple(Component(c, heads, (d,), size, content=content) for c, d in dims.items())


def cache_model(
    vllm_config: Any,
    kv_cache_config: Any,
    target: CacheModel,
    drafts: list[tuple[str, Any]],
    content: str,
) -> tuple[CacheModel, dict[str, LayerKey]]:
    """The whole model's cache, and our keys of this worker's layers and of all draft layers.

    content  of the draft layers
    """
    others = {name for name, _ in drafts}
    keys = {
        name: _target_key(target, name)
        for _, name, _ in layer_specs(kv_cache_config)
        if name not in others
    }
    if not drafts:
        return target, keys
    groups, draft_keys = draft_groups(vllm_config, drafts, content)
    whole = replace(target, groups=(*target.groups, *groups), total_layers=target.num_layers)
    return whole, keys | draft_keys


def _ordinal(name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    try:
        return int(extract_layer_index(name))
    except AssertionError as error:
        raise DescriptionError(f"{error}; kvferry cannot tell this model's layers apart") from None


def _is_indexer(name: str) -> bool:
    return ".indexer." in name


def _prefix(name: str) -> str:
    return re.split(r"\.\d+\.", name)[0]


def _target_key(model: CacheModel, name: str) -> LayerKey:
    """Our key of a target layer, found by its ordinal and role, never by its position."""
    ordinal, role = _ordinal(name), "indexer" if _is_indexer(name) else "target"
    groups = [g.name for g in model.groups if ordinal in g.layers and g.role == role]
    if len(groups) != 1:
        raise DescriptionError(
            f"layer {name!r} caches something that the description of {model.name!r} does not "
            f"have (groups with {role} layer {ordinal}: {groups})"
        )
    return groups[0], ordinal


def _with_rows(model: CacheModel, spec: Any) -> CacheModel:
    """Set the rows of convolution states; an engine with speculation keeps more."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    rows = int(spec.shapes[0][-1 if is_conv_state_dim_first() else 0])

    def resized(c: Component) -> Component:
        return replace(c, dims=(c.dims[0], rows)) if c.name.startswith("conv_") else c

    groups = tuple(
        replace(g, components=tuple(map(resized, g.components))) if g.is_state else g
        for g in model.groups
    )
    return replace(model, groups=groups)


def draft_groups(
    vllm_config: Any, drafts: list[tuple[str, Any]], content: str
) -> tuple[list[Group], dict[str, LayerKey]]:
    """A draft model's layers, with numbers of their own, in one group per window. Index keys of
    sparse attention have the number of their layer, and a group of their own."""
    heads = int(vllm_config.speculative_config.draft_model_config.get_total_num_kv_heads())
    place = {name: (_prefix(name), _ordinal(name)) for name, _ in drafts}
    numbers = {name: sorted({*place.values()}).index(place[name]) for name, _ in drafts}
    groups: dict[str, Group] = {}
    keys: dict[str, LayerKey] = {}
    for name, spec in sorted(drafts, key=lambda draft: numbers[draft[0]]):
        if is_state(spec):
            raise DescriptionError(f"draft layer {name!r} keeps a state, which is not supported")
        span = int(getattr(spec, "sliding_window", None) or 0)
        group, indexer = DRAFT_GROUPS
        group = indexer if _is_indexer(name) else f"{group}.{span}" if span else group
        if group == indexer:
            values = spec.state_content_size_bytes * INDEX_SCALED // (INDEX_SCALED + 4)
            parts = tuple(replace(c, content=content) for c in index_components(values))
        else:
            parts = _parts(spec, heads, content)
        known = groups.get(group)
        if known is not None and known.components != parts:
            raise DescriptionError(f"draft layer {name!r} has other components than the first")
        layers = (*(known.layers if known else ()), numbers[name])
        residency = Residency("window", span) if span else Residency()
        groups[group] = Group(group, layers, parts, residency, role="draft")
        keys[name] = (group, numbers[name])
    return list(groups.values()), keys


def require_spec(group: Group, shape: EngineShape, rank: Rank, spec: Any, layer: str) -> None:
    """Require that vLLM's spec of a layer matches the model's configuration."""
    if group.is_state:
        _require_state(group, shape, rank, spec, layer)
        return
    content = spec.state_content_size_bytes * spec.num_heads // spec.num_kv_heads
    expected = sum(c.unit_bytes for c in group.components)
    window = getattr(spec, "sliding_window", None) or getattr(spec, "rswa_window", None) or 0
    chunk = getattr(spec, "attention_chunk_size", None) or 0
    span = group.residency.span
    spans = {window or chunk}
    if type(spec).__name__ == "FullAttentionSpec":  # its window may be that of other layers
        spans.add(0)
    if content != expected or span not in spans:
        raise DescriptionError(
            f"layer {layer!r}: its configuration promises {expected} bytes a head and token and a "
            f"span of {span}, vLLM's {type(spec).__name__} has {content} bytes and "
            f"{window or chunk}; kvferry cannot describe this cache"
        )


def _require_state(group: Group, shape: EngineShape, rank: Rank, spec: Any, layer: str) -> None:
    """Require convolution states, then the others, each with the size of this rank's sections."""
    expected = {"conv": 0, "other": 0}
    for c in group.components:
        kind = "conv" if c.name.startswith("conv_") else "other"
        expected[kind] += shape.units(group, c, rank.tp).size * c.unit_bytes
    if is_state(spec):
        sizes = [prod(s) * d.itemsize for s, d in zip(spec.shapes, spec.dtypes, strict=True)]
        if sizes == list(expected.values()) and not spec.tp_replicated:
            return
    raise DescriptionError(
        f"layer {layer!r}: its configuration promises a convolution state of {expected['conv']} "
        f"bytes and {expected['other']} bytes of other state on rank {tuple(rank)}, vLLM's "
        f"{spec} is another cache; kvferry cannot describe it"
    )


def draft_cache_dtype(vllm_config: Any) -> str:
    own = getattr(vllm_config.speculative_config, "kv_cache_dtype", None)
    return str(own or vllm_config.cache_config.cache_dtype)


def _draft_content(vllm_config: Any) -> str:
    """Number format and identity of a draft model's cache: its name, a digest of its configuration,
    and settings that change its values."""
    target, config = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    text = config.hf_text_config.to_dict()
    words = [draft_cache_dtype(vllm_config), str(config.dtype), "of"]
    words += [_last_name(str(config.model)), configuration_digest(text)]
    words += [rope_factors(text, told) for told in (target, config)]  # vLLM uses either, by method
    words.append(str(config.quantization or ""))
    return " ".join(filter(None, words))


def loaded_length(config: Any) -> int:
    """`max_model_len` when layers were made. If it is fitted to memory (-1), vLLM cuts it later."""
    if getattr(config, "original_max_model_len", None) == -1:
        return int(config.get_and_verify_max_len(-1))
    return int(config.max_model_len)


def rope_factors(text: Mapping[str, Any], config: Any) -> str:
    """Which LongRoPE factors an engine uses for all its tokens; empty without LongRoPE.

    vLLM uses the long factors if requests may be longer than the model's original length. So two
    engines of one model may cache different keys for the same tokens.

    config  the model whose `max_model_len` decides
    """
    told, key = text.get("rope_parameters") or text.get("rope_scaling") or {}, ORIGINAL_LENGTH
    kinds = [told, *(kind for kind in told.values() if isinstance(kind, Mapping))]
    factors = []
    for kind in kinds:
        if (kind.get("rope_type") or kind.get("type")) in ("longrope", "su"):
            original = kind.get(key) or text.get(key) or text["max_position_embeddings"]
            factors.append("long" if loaded_length(config) > int(original) else "short")
    return "+".join(factors)


def configuration_digest(text: Mapping[str, Any]) -> str:
    told = {k: _placeless(v) for k, v in text.items() if k not in IRRELEVANT.split()}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _placeless(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {k: _placeless(v) for k, v in value.items() if k not in ORIGIN}


def meaning(vllm_config: Any, kv_cache_config: Any, model_id: str) -> dict[str, str]:
    """Settings that must be equal on two engines for their bytes to mean the same."""
    config = vllm_config.model_config
    text = config.hf_text_config.to_dict()
    told = {
        "model": model_id or _last_name(str(config.model)),
        "model configuration": configuration_digest(text),
        "dtype": str(config.dtype),
        "cache dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(config.quantization),
    }
    maybe = {
        "rope factors": rope_factors(text, config),
        "attention temperature": _temperature(config) if text.get("model_type") == LLAMA4 else "",
        "quantization configuration": _quantization(config),
        "media": _media(config),
        "cache scales": _scales(vllm_config, kv_cache_config),
        "fp8 format": _fp8_format(vllm_config, text),
    }
    told |= {name: value for name, value in maybe.items() if value}
    kinds = {s.mamba_type.name for _, _, s in layer_specs(kv_cache_config) if is_state(s)}
    if kinds:  # kernels of different kinds keep delta net states in different orders
        told["states"] = f"{'+'.join(sorted(kinds))} on {vllm_config.device_config.device_type}"
    return told


def _last_name(model: str) -> str:
    """The last part of a path or Hub name. A snapshot in the Hub's cache has its repository's."""
    snapshot = hub_snapshot(Path(model))
    return (snapshot[0] if snapshot else model).rstrip("/").rsplit("/", 1)[-1]


def _temperature(config: Any) -> str:
    """Whether Llama 4 tunes its attention. vLLM decides this in a copy of the configuration."""
    told = {**config.try_get_generation_config(), **config.override_generation_config}
    tuned = told.get("attn_temperature_tuning")
    if tuned is None:
        tuned = loaded_length(config) > LLAMA4_TUNED_ABOVE_TOKENS
    return "tuned" if tuned else "plain"


def _quantization(config: Any) -> str:
    """A digest of how weights are quantized at load time, if the method's name does not tell."""
    told = getattr(config, "quantization_config", None)
    return configuration_digest({"told": repr(told)}) if told else ""


def _media(config: Any) -> str:
    """A digest of how media are processed. vLLM's names of media are hashes of the input alone."""
    options = getattr(config, "multimodal_config", None)
    if options is None:
        return ""
    overrides, scales = getattr(config, "hf_overrides", None), options.mm_encoder_fp8_scale_path
    told = {
        "processor": options.mm_processor_kwargs,
        "pruned": options.video_pruning_rate
        and (options.video_pruning_rate, options.video_pruning_method),
        "encoder dtype": options.mm_encoder_attn_dtype,
        "encoder scales": scales and hashlib.sha256(Path(scales).read_bytes()).hexdigest(),
        # a request may switch off the processor's own, and its data then look like the raw ones
        "normalized by the encoder": options.mm_device_do_normalize,
        # overrides of the text model are in its digest; those of an encoder only here
        "overrides": overrides if isinstance(overrides, dict) else None,
    }
    return configuration_digest(told) if any(told.values()) else ""


def _has_fp8(vllm_config: Any) -> bool:
    dtypes = [str(vllm_config.cache_config.cache_dtype)]
    if vllm_config.speculative_config is not None:
        dtypes.append(draft_cache_dtype(vllm_config))
    return any("fp8" in dtype for dtype in dtypes)


def _fp8_format(vllm_config: Any, text: Mapping[str, Any]) -> str:
    """The format of fp8 values, which index keys always are, if it is not the usual e4m3: on MI300
    the same bytes are other numbers."""
    from vllm.platforms import current_platform

    fp8 = bool(text.get("index_head_dim")) or _has_fp8(vllm_config)
    return "fnuz" if fp8 and current_platform.is_fp8_fnuz() else ""


def _scales(vllm_config: Any, kv_cache_config: Any) -> str:
    """The scales of an fp8 cache, without which its bytes have no meaning; else empty."""
    if not _has_fp8(vllm_config):
        return ""
    layers = vllm_config.compilation_config.static_forward_context
    mine = {
        name: [s.flatten().tolist() for s in (layers[name]._k_scale, layers[name]._v_scale)]
        for _, name, spec in layer_specs(kv_cache_config)
        if not is_state(spec) and not _is_indexer(name)  # index keys carry their own scales
    }
    shared = vllm_config.parallel_config.tensor_parallel_size > 1
    ranks = of_all_ranks(mine) if shared else [mine]
    # A checkpoint may have a scale for each head. A rank has those of its own heads, and ranks may
    # repeat heads, so equal neighbours count once.
    found = {
        name: [
            [scale for scale, _ in groupby(chain(*kind))]
            for kind in zip(*(rank[name] for rank in ranks), strict=True)  # keys, then values
        ]
        for name in mine
    }
    if all(scales == [[1.0], [1.0]] for scales in found.values()):
        return "1.0"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise DescriptionError(
            "fp8 scales other than 1.0 with pipeline stages cannot be compared: each stage knows "
            "its own layers' only; use pipeline_parallel_size 1, or a cache without scales"
        )
    return configuration_digest(found)


def group_spec(spec: Any) -> Any:
    """One of a group's specs. All specs of states in a group are alike."""
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def is_state(spec: Any) -> bool:
    return hasattr(spec, "mamba_type")


def layer_specs(kv_cache_config: Any) -> Iterator[tuple[int, str, Any]]:
    """Table, name and spec of every layer on this worker; a group may hold several specs."""
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield table, name, group.kv_cache_spec if specs is None else specs[name]


@dataclass(frozen=True, slots=True)
class CacheRank:
    """A worker's rank, as the planner sees it, with or without prefill context parallelism (pcp).

    vLLM lays its ranks out as pp, pcp, tp. The effect of pcp on the cache depends on decode context
    parallelism (dcp):

    - dcp 1: every pcp rank keeps the whole cache of its tp rank. The pcp ranks are replicas: each
      loads all of it, and block sizes do not change. Replicas take turns to write into a pool. In a
      hand-over, decode engines read the first replica.
    - dcp = pcp, or tp x pcp: the pcp ranks of a tp rank share the tokens (and so do the tp ranks).
      To the planner, pcp ranks are then neighbouring tp ranks, and a block covers dcp times the
      tokens. That is right if all tp ranks keep the same heads (latents). Other caches are refused,
      because the registered tensors do not fit the description.
    """

    rank: Rank
    tp: int  # ranks that the cache is cut over, on one stage
    replica: int = 0  # of this rank's cache
    replicas: int = 1


def replicas(parallel_config: Any) -> int:
    pcp, dcp = (
        parallel_config.prefill_context_parallel_size,
        parallel_config.decode_context_parallel_size,
    )
    return int(pcp) if dcp == 1 else 1


def cache_rank(parallel_config: Any, pp: int, tp: int, pcp: int) -> CacheRank:
    size = int(parallel_config.tensor_parallel_size)
    copies = replicas(parallel_config)
    pcp_size = int(parallel_config.prefill_context_parallel_size)
    if copies == pcp_size:
        return CacheRank(Rank(pp, tp), size, pcp, copies)
    return CacheRank(Rank(pp, tp * pcp_size + pcp), size * pcp_size)


def this_place(parallel_config: Any) -> CacheRank:
    """The rank of this process's worker."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
    from vllm.distributed.parallel_state import get_pcp_group

    pcp = get_pcp_group().rank_in_group if parallel_config.prefill_context_parallel_size > 1 else 0
    pp, tp = get_pp_group().rank_in_group, get_tensor_model_parallel_rank()
    return cache_rank(parallel_config, pp, tp, pcp)
