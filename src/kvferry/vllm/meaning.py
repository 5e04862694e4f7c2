"""What decides the bytes of a cache beside tokens and shape: two engines must agree on all of it.

Engines compare it at a handshake, and the pool's namespace holds it. What changes cached values
for equal tokens belongs here; what only changes where they lie, or how they are rounded on the way
(backends, kernels, sizes of batches), does not: engines of any shape are to share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.pool.weights import hub_snapshot
from kvferry.vllm.model import (
    configuration_digest,
    draft_cache_dtype,
    is_state,
    layer_specs,
    loaded_length,
    rope_factors,
)

LLAMA4 = "llama4_text"
# vLLM's: longer contexts make Llama 4 weigh attention by position, unless a file says otherwise
LLAMA4_TUNED_ABOVE_TOKENS = 32_768


def meaning(vllm_config: Any, kv_cache_config: Any, model_id: str) -> dict[str, str]:
    """What must be equal on two engines for their bytes to mean the same."""
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
    }
    told |= {name: value for name, value in maybe.items() if value}
    kinds = {s.mamba_type.name for _, _, s in layer_specs(kv_cache_config) if is_state(s)}
    if kinds:  # kernels of different kinds keep delta net states in different orders
        told["states"] = f"{'+'.join(sorted(kinds))} on {vllm_config.device_config.device_type}"
    return told


def _last_name(model: str) -> str:
    """Of a path or of a Hub's name; a snapshot in the Hub's cache has its repository's."""
    snapshot = hub_snapshot(Path(model))
    return (snapshot[0] if snapshot else model).rstrip("/").rsplit("/", 1)[-1]


def _temperature(config: Any) -> str:
    """Whether Llama 4 tunes its attention. vLLM decides it anew, in a copy of the configuration."""
    told = {**config.try_get_generation_config(), **config.override_generation_config}
    tuned = told.get("attn_temperature_tuning")
    if tuned is None:
        tuned = loaded_length(config) > LLAMA4_TUNED_ABOVE_TOKENS
    return "tuned" if tuned else "plain"


def _quantization(config: Any) -> str:
    """How weights are quantized while they are loaded, where a method's name does not tell."""
    told = getattr(config, "quantization_config", None)
    return configuration_digest({"told": repr(told)}) if told else ""


def _media(config: Any) -> str:
    """What is done to images and the like, of which their names (hashes of input) know nothing."""
    options = getattr(config, "multimodal_config", None)
    if options is None:
        return ""
    overrides = getattr(config, "hf_overrides", None)
    told = {
        "processor": options.mm_processor_kwargs,
        "pruned": options.video_pruning_rate
        and (
            options.video_pruning_rate,
            options.video_pruning_method,
        ),
        "encoder dtype": options.mm_encoder_attn_dtype,
        # of the text's configuration they are in its digest, of an encoder's here only
        "overrides": overrides if isinstance(overrides, dict) else None,
    }
    return configuration_digest(told) if any(told.values()) else ""


def _scales(vllm_config: Any, kv_cache_config: Any) -> str:
    """fp8 values mean something only together with their layers' scales."""
    dtypes = [str(vllm_config.cache_config.cache_dtype)]
    if vllm_config.speculative_config is not None:
        dtypes.append(draft_cache_dtype(vllm_config))
    if not any("fp8" in dtype for dtype in dtypes):
        return ""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise DescriptionError(
            "calculate_kv_scales finds each engine's own scales while it runs, so that equal bytes "
            "mean different values; use a checkpoint with scales, or none"
        )
    layers = vllm_config.compilation_config.static_forward_context
    found = {
        name: (float(layers[name]._k_scale_float), float(layers[name]._v_scale_float))
        for _, name, spec in layer_specs(kv_cache_config)
        if not is_state(spec)
    }
    if set(found.values()) <= {(1.0, 1.0)}:
        return "1.0"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise DescriptionError(
            "fp8 scales other than 1.0 with pipeline stages cannot be compared: each stage knows "
            "its own layers' only; use pipeline_parallel_size 1, or a cache without scales"
        )
    return configuration_digest({name: list(pair) for name, pair in found.items()})
