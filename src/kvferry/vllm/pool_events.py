"""vLLM's events of the pool's blocks, for routers that send a prompt where its prefix is.

stored     blocks that every worker has saved
missing    blocks that a load did not find
evicted    blocks, told of before, that the store has given up
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.pool.orders import Loaded
from kvferry.pool.save_jobs import SavedBlocks
from kvferry.pool.scheduler import PoolScheduler

MEDIUM = "STORAGE"  # vLLM's word for where a pool's blocks are


class PoolEvents:
    """What is to be told with the next step. A job's tag is vLLM's request."""

    def __init__(self, pool: PoolScheduler, *, wanted: bool) -> None:
        self.wanted = wanted
        self.hash_tokens: int | None = None  # that one of vLLM's hashes stands for
        self._pool = pool
        self._events: list[Any] = []

    @property
    def waiting(self) -> bool:
        return bool(self._events) or self._pool.watch.has_gone

    def take(self) -> list[Any]:
        if self._pool.watch.has_gone:
            self._evicted()
        events, self._events = self._events, []
        return events

    def stored(self, saved: SavedBlocks) -> None:
        if not self.wanted:
            return
        from vllm.distributed.kv_events import BlockStored

        request = saved.tag
        lora = getattr(request, "lora_request", None)
        for blocks in saved.tables:
            size = self._pool.block_tokens(blocks.table)
            hashes = _Hashes(request, self._hashes_per_block(size))
            numbers = [n for n in blocks.numbers if (blocks.table, n) not in saved.failed]
            numbers = [n for n in numbers if n in hashes]
            content = dict(zip(blocks.numbers, blocks.contents, strict=True))
            keys = self._pool.keys_of(blocks.table, [content[n] for n in numbers])
            for number, of_block in zip(numbers, keys, strict=True):
                self._pool.watch.add((hashes[number], blocks.table), of_block)
            for run in _runs(numbers):
                self._events.append(
                    BlockStored(
                        block_hashes=[hashes[number] for number in run],
                        parent_block_hash=hashes[run[0] - 1] if run[0] else None,
                        token_ids=list(request.all_token_ids[run[0] * size : (run[-1] + 1) * size]),
                        block_size=size,
                        lora_id=getattr(lora, "lora_int_id", None),
                        medium=MEDIUM,
                        lora_name=getattr(lora, "lora_name", None),
                        group_idx=blocks.table,
                    )
                )

    def missing(self, loaded: Loaded, request: Any) -> None:
        """request: vLLM's, or None where it is over."""
        if not self.wanted or request is None or not loaded.missing:
            return
        from vllm.distributed.kv_events import BlockRemoved

        size = self._pool.align_tokens
        hashes = _Hashes(request, self._hashes_per_block(size))
        numbers = sorted({token // size for _, token in loaded.missing})
        gone = [hashes[number] for number in numbers if number in hashes]
        if gone:
            self._events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM))
            for block_hash in gone:
                for table in range(self._pool.tables):
                    self._pool.watch.discard((block_hash, table))

    def _evicted(self) -> None:
        from vllm.distributed.kv_events import BlockRemoved

        by_table: dict[int, list[Any]] = {}
        for block_hash, table in self._pool.watch.take_gone():
            by_table.setdefault(table, []).append(block_hash)
        for table, hashes in by_table.items():
            self._events.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=table))

    def _hashes_per_block(self, block_tokens: int) -> int:
        """vLLM's hashes in one of our blocks; 0: the two do not fit."""
        size = self.hash_tokens or block_tokens
        return block_tokens // size if block_tokens % size == 0 else 0


class _Hashes:
    """vLLM's hash up to the end of each of our blocks; only those asked for are converted."""

    def __init__(self, request: Any, per_block: int) -> None:
        self._hashes, self._per = request.block_hashes, per_block

    def __contains__(self, block: int) -> bool:
        return self._per > 0 and (block + 1) * self._per <= len(self._hashes)

    def __getitem__(self, block: int) -> Any:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        return maybe_convert_block_hash(self._hashes[(block + 1) * self._per - 1])


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
