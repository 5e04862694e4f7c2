"""vLLM's model as ours: what its layers cache, from its configuration and the specs it made.

Target layers are described from the model's configuration, over all stages, and checked against the
specs. A draft model's layers are described from their specs: they come after the target's, or under
another name, and are numbered by themselves. What the two do not agree on is refused at start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.layout.hf import model_from_config
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.shape import EngineShape, Rank
from kvferry.layout.tensors import LayerKey

# Keys of a model's configuration that do not change what its cache means. Some models write their
# engine's `max_model_len` there; what depends on it is said by itself (`rope_factors`).
IRRELEVANT = """
_name_or_path transformers_version torch_dtype dtype architectures use_cache max_model_len
"""


def cache_model(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheModel, dict[str, LayerKey]]:
    """The whole model's cache, and our name of each of this worker's layers."""
    config = vllm_config.model_config
    states = [group_spec(g.kv_cache_spec) for g in kv_cache_config.kv_cache_groups]
    states = [spec for spec in states if is_state(spec)]
    dtypes = [str(d).removeprefix("torch.") for d in states[0].dtypes] if states else []
    target = model_from_config(
        {**config.hf_text_config.to_dict(), "dtype": str(config.dtype).removeprefix("torch.")},
        name=str(config.model),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        state_dtype=dtypes[0] if dtypes else "auto",
        ssm_dtype=dtypes[-1] if dtypes else "auto",
    )
    if states:
        target = _with_rows(target, states[0])
    keys: dict[str, LayerKey] = {}
    drafts: list[tuple[str, Any]] = []
    named = {name for _, name, _ in layer_specs(kv_cache_config)}
    loaded = vllm_config.compilation_config.static_forward_context  # the target's come first
    prefix = next((_prefix(name) for name in loaded if name in named), "")
    speculates = vllm_config.speculative_config is not None
    for _, name, spec in layer_specs(kv_cache_config):
        if speculates and (_prefix(name) != prefix or _ordinal(name) >= target.num_layers):
            drafts.append((name, spec))
        else:
            keys[name] = _target_key(target, name)
    if not drafts:
        return target, keys
    groups, draft_keys = draft_groups(vllm_config, drafts)
    whole = replace(target, groups=(*target.groups, *groups), total_layers=target.num_layers)
    return whole, keys | draft_keys


def _ordinal(name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(name))


def _prefix(name: str) -> str:
    return name.partition("layers.")[0]


def _target_key(model: CacheModel, name: str) -> LayerKey:
    """By ordinal and role, never by position."""
    ordinal, role = _ordinal(name), "indexer" if ".indexer." in name else "target"
    groups = [g.name for g in model.groups if ordinal in g.layers and g.role == role]
    if len(groups) != 1:
        raise DescriptionError(
            f"layer {name!r} caches something that the description of {model.name!r} does not "
            f"have (groups with {role} layer {ordinal}: {groups})"
        )
    return groups[0], ordinal


def _with_rows(model: CacheModel, spec: Any) -> CacheModel:
    """Convolution states with the rows that the engine keeps: more with speculation."""
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
    vllm_config: Any, drafts: list[tuple[str, Any]]
) -> tuple[list[Group], dict[str, LayerKey]]:
    """A draft model's layers, numbered among themselves, and by what they keep."""
    speculative = vllm_config.speculative_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise DescriptionError(
            "an engine with pipeline stages and a draft model cannot be described: only the last "
            "stage knows the draft's layers; use pipeline_parallel_size 1, or no draft model"
        )
    config = speculative.draft_model_config
    heads = int(config.get_total_num_kv_heads())
    cached = draft_cache_dtype(vllm_config)
    content = f"{cached} {config.dtype} of {_identity(config, vllm_config.model_config)}"
    drafts = sorted(drafts, key=lambda d: (_prefix(d[0]), _ordinal(d[0])))
    groups: dict[str, Group] = {}
    keys: dict[str, LayerKey] = {}
    for number, (name, spec) in enumerate(drafts):
        if is_state(spec):
            raise DescriptionError(f"draft layer {name!r} keeps a state, which is not supported")
        span = int(getattr(spec, "sliding_window", None) or 0)
        group = f"draft.{span}" if span else "draft"
        size = spec.dtype.itemsize
        if "MLA" in type(spec).__name__:
            width = spec.state_content_size_bytes // size
            parts: tuple[Component, ...] = (
                Component("latent", 1, (width,), size, "replicated", content),
            )
        else:
            dims = {"k": int(spec.head_size), "v": int(spec.head_size_v)}
            parts = tuple(Component(c, heads, (d,), size, content=content) for c, d in dims.items())
        known = groups.get(group)
        if known is not None and known.components != parts:
            raise DescriptionError(f"draft layer {name!r} keeps other things than those before it")
        layers = (*(known.layers if known else ()), number)
        residency = Residency("window", span) if span else Residency()
        groups[group] = Group(group, layers, parts, residency, role="draft")
        keys[name] = (group, number)
    return list(groups.values()), keys


def require_spec(group: Group, shape: EngineShape, rank: Rank, spec: Any, layer: str) -> None:
    """What vLLM made must be what the configuration promised."""
    if group.is_state:
        _require_state(group, shape, rank, spec, layer)
        return
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


def _require_state(group: Group, shape: EngineShape, rank: Rank, spec: Any, layer: str) -> None:
    """Convolution states first, then the others, each as large as its sections are on this rank."""
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


def _identity(config: Any, target: Any) -> str:
    """A model's name, a digest of its configuration, and what else decides what it computes."""
    text = config.hf_text_config.to_dict()
    words = [str(config.model).rstrip("/").rsplit("/", 1)[-1], configuration_digest(text)]
    words += [rope_factors(text, told) for told in (target, config)]  # vLLM asks either, by method
    words.append(str(config.quantization or ""))
    return " ".join(filter(None, words))


def loaded_length(config: Any) -> int:
    """`max_model_len` as layers saw it: one that is fitted to memory (-1) is cut after loading."""
    if getattr(config, "original_max_model_len", None) == -1:
        return int(config.get_and_verify_max_len(-1))
    return int(config.max_model_len)


def rope_factors(text: Mapping[str, Any], config: Any) -> str:
    """Of LongRoPE, which factors an engine uses for all its tokens; empty for any other kind.

    vLLM takes the long ones where requests may grow longer than what the model was trained on
    first, so that keys of the same tokens differ between engines of one model.

    config  whose length counts
    """
    told = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kinds = [told, *(kind for kind in told.values() if isinstance(kind, Mapping))]
    originals = [
        _original_length(text, kind)
        for kind in kinds
        if (kind.get("rope_type") or kind.get("type")) in ("longrope", "su")
    ]
    if not originals:
        return ""
    length = loaded_length(config)
    return "+".join("long" if length > original else "short" for original in originals)


def _original_length(text: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return int(rope.get(key) or text.get(key) or text["max_position_embeddings"])


def configuration_digest(text: Mapping[str, Any]) -> str:
    told = {k: v for k, v in text.items() if k not in IRRELEVANT.split()}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# vLLM's cache specs, as far as we read them.
# --------------------------------------------------------------------------------------------------


def layer_spec(spec: Any, layer: str) -> Any:
    """A layer's own spec, where its group holds several."""
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec


def group_spec(spec: Any) -> Any:
    """One of a group's specs; those of states are alike."""
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def is_state(spec: Any) -> bool:
    return hasattr(spec, "mamba_type")


def layer_specs(kv_cache_config: Any) -> Iterator[tuple[int, str, Any]]:
    """Table, name and spec of every layer on this worker."""
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            yield table, name, layer_spec(group.kv_cache_spec, name)


# --------------------------------------------------------------------------------------------------
# Who a worker is to the pool when prefill context parallelism (pcp) is on.
#
# vLLM lays its ranks out as pp, pcp, tp. What pcp does to the cache depends on decode context
# parallelism (dcp), as vLLM's configuration says:
#
# - dcp 1: every pcp rank keeps the whole cache of its tp rank. They are replicas, which load all of
#   it and write in turns; block sizes stay as they are.
# - dcp = pcp, or tp x pcp: tokens are shared out over the pcp ranks of a tp rank (and over tp). To
#   the planner, pcp ranks are then tp ranks, next to each other, and blocks cover dcp times the
#   tokens. That is right where all tp ranks keep the same heads (latents); other caches are refused
#   when the registered tensors do not fit the description.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheRank:
    rank: Rank
    tp: int  # ranks that the cache is cut over, on one stage
    replica: int = 0  # of this rank's cache
    replicas: int = 1


def replicas(parallel_config: Any) -> int:
    """Workers that keep the same cache."""
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
