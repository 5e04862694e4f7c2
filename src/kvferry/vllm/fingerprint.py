"""What decides the bytes of a cache beside tokens and shape: two engines must agree on all of it.

Engines compare it at a handshake, and the pool's namespace holds it. What changes cached values
for equal tokens belongs here; what only changes where they lie, or how they are rounded on the way
(backends, kernels, sizes of batches), does not: engines of any shape are to share.
"""

from __future__ import annotations

import secrets
import weakref
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import DescriptionError
from kvferry.handover.ticket import prompt_digest
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


# --------------------------------------------------------------------------------------------------
# Which prompts are known by what they say: only those are shared, or handed over.
#
# A cache is found by the tokens of its prompt, with LoRA, salt, and a digest of each image or other
# medium. Where these do not tell all of it, two prompts would look alike, so the request is
# computed here and kept to this engine:
#
# - embeddings in place of tokens have no name;
# - a session (`resumable`) gets more of its prompt, also images, after it was looked at;
# - media whose processed data the scheduler's process does not have cannot be hashed.
#
# vLLM's own names of media are not digests. A client may name an image (`uuid`), and vLLM takes
# that for the image's hash, also where it is the hash of another image. So kvferry hashes the
# processed data itself (`content`). That alone is not enough: vLLM finds blocks and outputs of its
# encoder by those names, and what it finds is then saved, or handed over, like what it computes.
# Therefore every request's media get new names (`name_media`) before the scheduler looks at the
# request. They are made from the content with a key of this process, so no client can work them
# out: vLLM does not show us media that come later in a session, and those keep the names that they
# came with.
# --------------------------------------------------------------------------------------------------

_KEY = secrets.token_bytes(32)  # of the names that this process gives to media
_hashed: dict[int, tuple[weakref.ref[Any], str]] = {}  # digests of items in memory, by `id`


@dataclass(frozen=True, slots=True)
class Prompts:
    """Facts of one engine."""

    media_unseen: str = ""  # why this engine's scheduler does not see the data of media

    @classmethod
    def of(cls, vllm_config: Any) -> Prompts:
        media = getattr(vllm_config.model_config, "multimodal_config", None)
        if media is None:
            return cls()
        if getattr(vllm_config, "ec_transfer_config", None) is not None:
            return cls(
                "outputs of encoders come from other engines, by names that clients may choose "
                "(ec_transfer_config)"
            )
        if media.mm_processor_cache_type == "shm" and media.mm_processor_cache_gb > 0:
            return cls(
                "only workers see what is in shared memory; set mm_processor_cache_type to lru"
            )
        return cls()

    def unfit(self, request: Any) -> str:
        """Why a request's cache is nobody else's; empty where it can be."""
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return "its prompt holds embeddings, which have no name"
        if getattr(request, "resumable", False):
            return "it is a session, whose prompt is not complete"
        features = getattr(request, "mm_features", None) or ()
        if features and self.media_unseen:
            return f"it has images or other media, and {self.media_unseen}"
        if not all(map(content, features)):
            return (
                "it has images or other media whose data the scheduler's process does not have in "
                "host memory, so that it cannot hash them"
            )
        return ""

    def name_media(self, request: Any) -> None:
        """Let vLLM know a request's media by their content. Every request must come here first."""
        features = getattr(request, "mm_features", None)
        if not features or self.media_unseen:
            return
        # The outputs of an encoder may depend on the adapter.
        lora = getattr(getattr(request, "lora_request", None), "lora_name", "")
        named = [replace(f, identifier=_name(f, lora)) for f in features]
        if all(a.identifier == b.identifier for a, b in zip(features, named, strict=True)):
            return
        request.mm_features = named
        request.block_hashes.clear()  # they hold the names
        request.update_block_hashes()


def content(feature: Any) -> str:
    """A digest of an image or other medium, as the model gets it; empty where it is not known."""
    data, where = feature.data, feature.mm_position
    if data is None:
        return ""
    known = _hashed.get(id(data))
    if known is None or known[0]() is not data:
        parts = [[key, type(elem.field).__name__, elem.data] for key, elem in sorted(data.items())]
        number = id(data)
        known = (weakref.ref(data, lambda _: _hashed.pop(number, None)), _digest(parts))
        _hashed[number] = known  # vLLM keeps processed media: each is hashed once while it does
    # Of the placeholders' tokens, `is_embed` tells which the medium replaces.
    mask = "all" if where.is_embed is None else _digest(where.is_embed)
    if not known[1] or not mask:
        return ""
    return prompt_digest((), (feature.modality, known[1], str(where.length), mask))


def _name(feature: Any, lora: str) -> str:
    digest = content(feature)
    if not digest:
        return str(feature.identifier)
    return blake2b(f"{digest} {lora}".encode(), key=_KEY, digest_size=32).hexdigest()


def _digest(value: Any) -> str:
    """A digest of nested lists of arrays and plain values; empty if it holds anything else.

    It is also empty without a single array: in vLLM's shared memory an item is an address.
    BLAKE3, which vLLM needs too, takes 8 ms for 25 MB, an image of a million pixels or more.
    """
    import torch
    from blake3 import blake3

    hasher, waiting, arrays = blake3(), [value], 0
    while waiting:
        part, raw = waiting.pop(), None
        if isinstance(part, (list, tuple)):
            head = f"list {len(part)}"
            waiting += reversed(part)
        elif part is None or type(part) in (bool, int, float, str):
            head = f"{type(part).__name__} {part!r}"
        elif isinstance(part, torch.Tensor):
            if part.device.type != "cpu" or part.layout != torch.strided or part.is_quantized:
                return ""
            head = f"array {part.dtype} {tuple(part.shape)}"
            raw = part.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
            head = f"numpy {part.dtype.str} {part.shape}"
            raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        else:
            return ""
        spelled = head.encode()
        hasher.update(len(spelled).to_bytes(8, "little") + spelled)  # also tells the size of `raw`
        if raw is not None:
            hasher.update(memoryview(raw))
            arrays += 1
    return str(hasher.hexdigest()) if arrays else ""
