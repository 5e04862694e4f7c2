"""Who a worker is to the pool when prefill context parallelism (pcp) is on.

vLLM lays its ranks out as pp, pcp, tp. What pcp does to the cache depends on decode context
parallelism (dcp), as vLLM's configuration says:

- dcp 1: every pcp rank keeps the whole cache of its tp rank. They are replicas, which load all of
  it and write in turns; block sizes stay as they are.
- dcp = pcp, or tp x pcp: tokens are shared out over the pcp ranks of a tp rank (and over tp). To
  the planner, pcp ranks are then tp ranks, next to each other, and blocks cover dcp times the
  tokens. That is right where all tp ranks keep the same heads (latents); other caches are refused
  when the registered tensors do not fit the description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.layout.shape import Rank


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
