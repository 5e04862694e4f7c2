"""The last block of a request, moved whole.

Most prompts end inside a block. Where the inside of a page runs across its slots (K of vLLM's CPU
attention: one run a head and dimension), moving the tokens of that block alone takes hundreds of
short runs, and moving all of it takes one. What comes too much lies in blocks of this request, and
is zeroed with the rest of the tail that nothing covers.
"""

from __future__ import annotations

from kvferry.layout.model import CacheModel
from kvferry.layout.shape import EngineShape

MOST_PADDING = 1 / 8  # of the request; beyond it, bytes cost more than runs


def padded_tokens(model: CacheModel, src: EngineShape, dst: EngineShape, tokens: int) -> int:
    """Up to where to move: the end of both sides' last blocks, if that is one and near; else
    `tokens`. Windows and states depend on where a request ends: they are left as they are."""
    if any(group.residency.kind != "full" for group in model.groups):
        return tokens
    spans = {s.block_tokens(g) * s.dcp_for(g) for g in model.groups for s in (src, dst)}
    ends = {-(-tokens // span) * span for span in spans}
    end = max(ends)
    return end if len(ends) == 1 and end - tokens <= tokens * MOST_PADDING else tokens
