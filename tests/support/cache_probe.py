"""What a worker's cache holds, logically, when a hold opens and when a load ends.

Mixed into vLLM's workers (`--worker-extension-cls cache_probe.CacheProbe`) and asked over
`/collective_rpc`. It looks at the registered tensors with the arrangement that vLLM's own kernels
write (`tests/vllm/test_cache_writes.py`), not with our layouts: a digest a layer, component, head
and token, so that engines of any shape can be compared.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np

DELAY_SECONDS = 2.0


class CacheProbe:
    """`watch_cache` begins; `seen_caches` answers with {request id: {what: [digest a token]}}."""

    def watch_cache(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().worker
        self._seen: dict[str, Any] = {}
        self._loads: dict[str, Any] = {}
        start, results = worker.start, worker.results

        def watched_start(orders: Any, **how: Any) -> None:
            for hold in orders.holds:
                self._seen[hold.request_id] = self._digests(hold.tables, hold.tokens)
            for load in orders.loads:
                self._loads[load.request_id] = (load.tables, load.ticket.tokens)
            start(orders, **how)

        def watched_results() -> Any:
            ended = results()
            for request_id in ended.finished_recving - ended.failed_recving:
                self._seen[request_id] = self._digests(*self._loads.pop(request_id))
            return ended

        worker.start, worker.results = watched_start, watched_results
        return {}

    def delay_reads(self) -> dict[str, Any]:
        """From now on, a read says that it begins, and does so a while later."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for carrier in get_kv_transfer_group().worker.carriers:
            _delay(carrier)
        return {}

    def seen_caches(self) -> dict[str, Any]:
        seen, self._seen = self._seen, {}
        return seen

    def _digests(self, tables: Any, tokens: int) -> dict[str, list[str | None]]:
        from vllm.distributed import get_tp_group

        runner = self.model_runner  # type: ignore[attr-defined]
        layers = runner.compilation_config.static_forward_context
        rank, size = get_tp_group().rank_in_group, get_tp_group().world_size
        heads = runner.model_config.get_total_num_kv_heads()
        found: dict[str, list[str | None]] = {}
        for table, group in zip(tables, runner.kv_cache_config.kv_cache_groups, strict=True):
            for name in group.layer_names:
                cache = layers[name].kv_cache
                if isinstance(cache, tuple):
                    found |= _states(name, layers[name], table[-1], rank)
                    continue
                mla = layers[name].get_attn_backend().get_name().endswith("MLA")
                cache = cache[:, None] if cache.dim() == 3 else cache
                first = 0 if mla else rank * heads // size
                found |= _attention(name, first, mla, cache, table, tokens)
        return found


def _delay(carrier: Any) -> None:
    read = carrier.read

    def delayed(peer: Any, copies: Any) -> Any:
        print("a read begins", flush=True)
        time.sleep(DELAY_SECONDS)
        transfer = read(peer, copies)
        print("a read is under way", flush=True)
        return transfer

    carrier.read = delayed


def _attention(
    name: str, first: int, mla: bool, cache: Any, table: Any, tokens: int
) -> dict[str, list[str | None]]:
    """`cache` is [block, head, slot, content]; `first` is the number of its first head."""
    _, heads, slots, content = cache.shape
    raw = cache.view(_uint(cache)).numpy()
    dims = content // 2
    found: dict[str, list[str | None]] = {}
    for index in range(-(-tokens // slots)):
        block = table[index]
        held = min(slots, tokens - index * slots)
        for head in range(heads):
            flat = np.ascontiguousarray(raw[block, head]).reshape(-1)
            if mla:
                parts = {"latent": flat.reshape(slots, content)}
            else:
                parts = {
                    "k": flat[: slots * dims].reshape(dims, slots).T,
                    "v": flat[slots * dims :].reshape(slots, dims),
                }
            for part, rows in parts.items():
                digests = found.setdefault(f"{name} {part} {first + head}", [])
                digests += [_digest(row) if block else None for row in rows[:held]]
    return found


def _states(name: str, layer: Any, block: int, rank: int) -> dict[str, list[str | None]]:
    """Convolution states by channel, the others by head; numbered over all ranks."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    conv, ssm = (s[block].contiguous().view(_uint(s)).numpy() for s in layer.kv_cache)
    channels = conv if is_conv_state_dim_first() else conv.T
    shared = layer.groups_ssm_state_size // layer.tp_size
    sizes = {"x": layer.intermediate_size // layer.tp_size, "B": shared, "C": shared}
    assert sum(sizes.values()) == len(channels)
    found: dict[str, list[str | None]] = {}
    start = 0
    for section, size in sizes.items():
        for number, channel in enumerate(channels[start : start + size]):
            found[f"{name} conv {section} {rank * size + number}"] = [_digest(channel)]
        start += size
    for head, state in enumerate(ssm):
        found[f"{name} ssm {rank * len(ssm) + head}"] = [_digest(state)]
    return found


def _uint(tensor: Any) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]


def _digest(row: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=8).hexdigest()
