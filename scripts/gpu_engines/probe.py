"""Our connector, which remembers what an engine's cache held; vLLM imports it by this module.

Entries are read without our layouts: from the tensors that vLLM registers, `[block, head, slot,
content]` whatever their strides, and with the arrangement inside of a page that the CPU's attention
writes (`tests/vllm/test_cache_writes.py`). Recurrent states are read from the layer's own views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu_engines.entries import Entries, State
from kvferry.vllm import FerryConnector


class Remembered:
    """What the engine of this process has seen since it was last asked."""

    def __init__(self) -> None:
        self.held: dict[str, Entries] = {}
        self.loaded: dict[str, Entries] = {}
        self.pool_loaded: dict[str, Entries] = {}
        self.failed: list[str] = []  # loads

    def take(self) -> dict[str, Any]:
        taken = dict(vars(self))
        self.__init__()  # type: ignore[misc]
        return taken


remembered = Remembered()
saved: dict[tuple[str, str], Any] = {}  # by layer and content: bytes by token, or a state


class ProbedConnector(FerryConnector):
    """Hand-over and pool, as configured."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        layers = self._vllm_config.compilation_config.static_forward_context
        self._cache = _Cache(kv_caches, layers, self._kv_cache_config)
        assert self.worker is not None and self.pool_worker is not None
        _watch_handover(self.worker, self._cache)
        _watch_pool(self.pool_worker, self._cache)


def _watch_handover(worker: Any, cache: _Cache) -> None:
    start, results, loads = worker.start, worker.results, {}

    def watched_start(orders: Any, **how: Any) -> None:
        for hold in orders.holds:
            remembered.held[hold.request_id] = cache.read(hold.tables, hold.tokens)
        for load in orders.loads:
            loads[load.request_id] = load
        start(orders, **how)

    def watched_results() -> Any:
        ended = results()
        remembered.failed += ended.failed_recving
        for request_id in ended.finished_recving:
            load = loads.pop(request_id)
            if request_id not in ended.failed_recving:
                entries = cache.read(load.tables, load.ticket.tokens)
                entries.first = load.skip
                remembered.loaded[request_id] = entries
        return ended

    worker.start, worker.results = watched_start, watched_results


def _watch_pool(worker: Any, cache: _Cache) -> None:
    start, save, results, loads = worker.start, worker.save, worker.results, {}

    def watched_start(orders: Any, **how: Any) -> None:
        for load in orders.loads:
            loads[load.request_id] = load
        start(orders, **how)

    def watched_save() -> None:
        for order in worker._saves:
            for blocks in order.tables:
                cache.remember_saved(blocks)
        save()

    def watched_results() -> Any:
        ended = results()
        remembered.failed += ended.failed_recving
        for request_id in ended.finished_recving:
            order = loads.pop(request_id)
            if request_id not in ended.failed_recving:
                remembered.pool_loaded[request_id] = cache.read_pool_load(order)
        return ended

    worker.start, worker.save, worker.results = watched_start, watched_save, watched_results


class _Cache:
    """One worker's cache, as vLLM's kernels see it."""

    def __init__(self, tensors: dict[str, Any], layers: dict[str, Any], config: Any) -> None:
        self._tensors, self._layers, self._config = tensors, layers, config

    def read(
        self, tables: Sequence[Sequence[int]], tokens: int, stop: int | None = None
    ) -> Entries:
        """A request's entries. `stop`: where a state stands, if its table is not cut to it."""
        found = Entries(tokens)
        for table, name, spec in self._specs():
            blocks = tables[table]
            if hasattr(spec, "mamba_type"):
                at = -1 if stop is None else -(-stop // spec.block_size) - 1
                found.states[name] = self._state(name, blocks[at])
                continue
            blocks = blocks[: -(-tokens // spec.block_size)]
            held = np.repeat(np.asarray(blocks) != 0, spec.block_size)[:tokens]
            found.layers[name] = (self._rows(name, spec, blocks)[:tokens], held)
            window = getattr(spec, "sliding_window", None) or 0
            found.needed_from[name] = max(0, tokens - window + 1) if window else 0
        return found

    def read_pool_load(self, order: Any) -> Entries:
        stop = max(segment.stop for segment in order.segments)
        found = self.read(order.tables, stop, stop)
        starts = [s.start for s in order.segments if s.start < s.stop]
        found.first = min(starts, default=0)
        named = {table: names for (_, table), names in order.contents.items()}
        for table, name, spec in self._specs():
            if not hasattr(spec, "mamba_type"):
                found.contents[name] = named[table]
            else:
                found.state_content[name] = named[table][-(-stop // spec.block_size) - 1]
        return found

    def remember_saved(self, blocks: Any) -> None:
        for table, name, spec in self._specs():
            if table != blocks.table:
                continue
            for block, content in zip(blocks.block_ids, blocks.contents, strict=True):
                if hasattr(spec, "mamba_type"):
                    saved[name, content] = self._state(name, block)
                else:
                    saved[name, content] = self._rows(name, spec, [block])

    def describe(self) -> list[str]:
        """For the report: what was registered."""
        told = {}
        for table, name, spec in self._specs():
            tensor = self._tensors[name]
            backend = getattr(self._layers[name], "get_attn_backend", None)
            kind = backend().get_name() if backend else type(self._layers[name]).__name__
            told[table] = (
                f"{kind} block {spec.block_size} {tuple(tensor.shape)} "
                f"strides {tuple(tensor.stride())} {str(tensor.dtype).removeprefix('torch.')}"
            )
        return [told[table] for table in sorted(told)]

    def _specs(self) -> Iterator[tuple[int, str, Any]]:
        for table, group in enumerate(self._config.kv_cache_groups):
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            for name in group.layer_names:
                if name in self._tensors:
                    yield table, name, group.kv_cache_spec if specs is None else specs[name]

    def _rows(self, name: str, spec: Any, blocks: Sequence[int]) -> np.ndarray:
        """The bytes of all slots of some blocks: one row a token, its heads side by side."""
        import torch

        cache = self._tensors[name]
        if cache.element_size() == 1:  # not every operation has kernels for fp8
            cache = cache.view(torch.uint8)
        _, heads, slots, content = cache.shape
        ratio = spec.block_size // slots  # kernels may see smaller blocks
        wanted = [block * ratio + part for block in blocks for part in range(ratio)]
        if cache.is_cuda:
            torch.cuda.synchronize()
        pages = cache[torch.tensor(wanted, dtype=torch.int64, device=cache.device)]
        if self._layers[name].get_attn_backend().get_name() == "CPU_ATTN":
            dims = content // 2
            flat = pages.reshape(len(wanted), heads, -1)
            keys, values = flat.split(slots * dims, dim=2)
            keys = keys.reshape(-1, heads, dims, slots).transpose(2, 3)
            pages = torch.cat((keys, values.reshape(-1, heads, slots, dims)), dim=3)
        rows = pages.permute(0, 2, 1, 3).reshape(len(wanted) * slots, heads * content)
        return _bytes(rows)

    def _state(self, name: str, block: int) -> State:
        return tuple(_bytes(state[block].reshape(1, -1)) for state in self._layers[name].kv_cache)


def _bytes(rows: Any) -> np.ndarray:
    import torch

    found: np.ndarray = rows.contiguous().cpu().view(torch.uint8).numpy().copy()
    return found
