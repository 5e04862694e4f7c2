"""Which prompts are known by what they say: only those are shared, or handed over.

A cache is found by the tokens of its prompt, with LoRA, salt and the names of images and the like.
Where these do not tell all of it, two prompts would look alike, so the request is computed here and
kept to this engine:

- embeddings in place of tokens have no name;
- a session (`resumable`) gets more of its prompt, also images, after it was looked at;
- with prefix caching and the cache of processed media both off, vLLM numbers images and does not
  hash them. Another process, or this one once restarted, gives the same numbers to other images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompts:
    """Facts of one engine."""

    media_named: bool = True  # whether names of images come from what they show

    @classmethod
    def of(cls, vllm_config: Any) -> Prompts:
        # vLLM hashes media where either cache is on. An engine may turn one off after its front end
        # was configured, never on, so this errs on the safe side. vLLM keeps ids that clients
        # chose, but nothing tells them from numbers.
        media = getattr(vllm_config.model_config, "multimodal_config", None)
        if media is None or media.mm_processor_cache_gb > 0:
            return cls()
        return cls(media_named=bool(vllm_config.cache_config.enable_prefix_caching))

    def unfit(self, request: Any) -> str:
        """Why a request's cache is nobody else's; empty where it can be."""
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return "its prompt holds embeddings, which have no name"
        if getattr(request, "resumable", False):
            return "it is a session, whose prompt is not complete"
        if getattr(request, "mm_features", None) and not self.media_named:
            return (
                "it has images or other media, which this engine numbers and does not hash; set "
                "mm_processor_cache_gb above 0 or enable prefix caching, on all engines"
            )
        return ""
