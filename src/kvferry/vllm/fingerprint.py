# SPDX-License-Identifier: Apache-2.0
"""Names of prompts by their content. Only prompts that have such a name are shared.

A cache is found by the tokens of its prompt, with LoRA, salt, and a digest of each image or other
medium (`request_digest`). If these do not cover the whole prompt, two prompts could look alike. So
such a request is computed here, and its cache stays in this engine (`Prompts.unfit`):

- embeddings in place of tokens have no name;
- a session (`resumable`) gets more of its prompt, also images, after kvferry has seen it;
- media cannot be hashed if the scheduler's process does not have their processed data.

vLLM's own names of media are not digests. A client may name an image (`uuid`), and vLLM takes the
name for the image's hash, even if it is the hash of another image. So kvferry hashes the processed
data itself (`content`). That alone is not enough: vLLM finds blocks and outputs of its encoder by
those names, and kvferry saves or hands over what vLLM finds. Therefore every request's media get
new names (`name_media`) before the scheduler looks at the request. The names are made from the
content with a key of this process, so that no client can guess them. This matters for media that
come later in a session: vLLM does not show them to kvferry, and they keep their clients' names.
"""

from __future__ import annotations

import secrets
import weakref
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from kvferry.handover.ticket import prompt_digest

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
        """Why a request's cache cannot be shared, or an empty text."""
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
        """Rename a request's media by their content. Call this first for every request."""
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


def request_digest(request: Any) -> str:
    """A digest of what the prompt's cache depends on: tokens, images, salt. With LoRA, it differs
    from that of any prompt without LoRA, and `adapted` adds the adapter's files."""
    extra = []
    if getattr(request, "lora_request", None) is not None:
        extra.append("lora")
    for feature in getattr(request, "mm_features", None) or ():
        extra.append(f"mm {content(feature)} {feature.mm_position.offset}")
    if getattr(request, "cache_salt", None):
        extra.append(f"salt {request.cache_salt}")
    return prompt_digest(request.prompt_token_ids or (), extra)


def adapted(digest: str, adapter: str) -> str:
    """The digest of a prompt together with that of its adapter."""
    if not adapter:
        raise ValueError("an adapter that is not shared has no digest")
    return prompt_digest((), (digest, f"lora {adapter}"))


def content(feature: Any) -> str:
    """A digest of an image or other medium as the model gets it; empty if it cannot be made."""
    data, where = feature.data, feature.mm_position
    if data is None:
        return ""
    known = _hashed.get(id(data))
    if known is None or known[0]() is not data:
        parts = [[key, type(elem.field).__name__, elem.data] for key, elem in sorted(data.items())]
        number = id(data)
        known = (weakref.ref(data, lambda _: _hashed.pop(number, None)), _digest(parts))
        _hashed[number] = known  # vLLM keeps processed media: each is hashed once while it does
    # `is_embed` says which of the placeholder tokens the medium replaces.
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

    It is also empty if there is no array: in vLLM's shared memory an item is an address.
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
