# SPDX-License-Identifier: Apache-2.0
"""The router's index at its size: memory of a block, and the time of events and lookups.

    python -m benchmarks.router_index

A million blocks of 16 tokens, by 16 engines, no two of them equal. Then all engines hold the same
prompt of 131,072 tokens, and it is looked up.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import time
from pathlib import Path
from statistics import median

from kvferry.router.cache.chain import Namespace, PromptChain
from kvferry.router.cache.index import CacheIndex, Stored

BLOCKS, ENGINES, BLOCK_TOKENS, BATCH = 1_000_000, 16, 16, 1000
PROMPT_TOKENS, LOOKUPS = 131_072, 50


def main() -> dict[str, float]:
    random_ = random.Random(1)
    index = CacheIndex(most_blocks=2 * BLOCKS)
    parts = [index.part(f"http://engine-{n}:8000") for n in range(ENGINES)]

    def tokens(count: int) -> list[int]:
        return random_.choices(range(100_000), k=count)

    def stored(token_ids: list[int]) -> Stored:
        hashes: list[int | bytes] = [
            random_.getrandbits(64) for _ in range(len(token_ids) // BLOCK_TOKENS)
        ]
        kind = "full_attention"
        return Stored(hashes, None, token_ids, BLOCK_TOKENS, group_idx=0, kv_cache_spec_kind=kind)

    gc.collect()
    before, applying = _resident_bytes(), 0.0
    for number in range(BLOCKS // BATCH):
        event = stored(tokens(BATCH * BLOCK_TOKENS))
        begun = time.perf_counter()
        index.told(parts[number % ENGINES], [event])
        applying += time.perf_counter() - begun
    block_bytes = (_resident_bytes() - before) / len(index)
    prompt = tokens(PROMPT_TOKENS)
    for part in parts:
        index.told(part, [stored(prompt)])
    chain = PromptChain(Namespace(), prompt)
    begun = time.perf_counter()
    chain.digests(BLOCK_TOKENS)
    digests_seconds = time.perf_counter() - begun
    times = []
    for _ in range(LOOKUPS):
        begun = time.perf_counter()
        index.holdings(chain)
        times.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    index.forget("http://engine-0:8000")
    return {
        "block_bytes": block_bytes,
        "event_us_per_block": applying / BLOCKS * 1e6,
        "digests_ms": digests_seconds * 1e3,
        "lookup_ms": median(times) * 1e3,
        "lookup_max_ms": max(times) * 1e3,
        "forget_ms": (time.perf_counter() - begun) * 1e3,
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps({name: round(value, 2) for name, value in main().items()}))
