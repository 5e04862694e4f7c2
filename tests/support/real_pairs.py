"""What the caches of real engines hold."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from vllm_engines import Engine

SUPPORT = str(Path(__file__).parent)
Digests = dict[str, list[str | None]]


def probed(engine: Engine) -> Engine:
    """An engine whose workers tell what their caches hold."""
    path = [SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
    engine.environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(path)}
    engine.arguments += ["--worker-extension-cls", "cache_probe.CacheProbe"]
    return engine


def call(engine: Engine, method: str) -> list[Any]:
    """What each worker answers."""
    request = urllib.request.Request(
        f"{engine.url}/collective_rpc",
        json.dumps({"method": method}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        results: list[Any] = json.load(answer)["results"]
        return results


def seen(engine: Engine) -> list[Digests]:
    """Caches of requests that were held or loaded since the last call, over all workers.

    What several workers hold (a latent, a shared head) must be the same on all.
    """
    merged: dict[str, Digests] = {}
    for worker in call(engine, "seen_caches"):
        for request_id, digests in worker.items():
            mine = merged.setdefault(request_id, {})
            for key, values in digests.items():
                assert mine.setdefault(key, values) == values, f"ranks differ in {key}"
    return list(merged.values())


def require_same_cache(
    source: Digests, loaded: Digests, needed_from: int, computed: int = 0
) -> int:
    """Every entry that the destination has must be the source's; how many were compared.

    From token `needed_from` on every entry must be there; those of states always. The destination
    may have computed the first `computed` tokens by itself: they are not compared.
    """
    assert source.keys() == loaded.keys()
    compared = 0
    for key, values in loaded.items():
        # of models with windows, the destination computes the last token by itself
        assert 0 <= len(source[key]) - len(values) <= 1, key
        assert all(values[needed_from:]) or len(values) == 1, key
        for token, (theirs, ours) in enumerate(zip(source[key], values, strict=False)):
            if ours is not None and token >= computed:
                assert ours == theirs, f"{key}, entry {token}"
                compared += 1
    return compared
