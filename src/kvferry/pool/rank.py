"""One rank's side of the pool, for any engine: orders in, reports out, nothing waits.

`tell` gives it the scope (keys, our own layout, others' records); `save` and `load` start work;
`take` collects what ended since. Every save and every load is reported exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import DescriptionError
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import RankLayout
from kvferry.pool.database import ChunkedTokenDatabase
from kvferry.pool.load import CLOSE_SECONDS, Loader, PlanShelf, Sources
from kvferry.pool.objects import object_memory
from kvferry.pool.orders import Loaded, LoadOrder, Saved, SaveOrder, Scope
from kvferry.pool.reader import ReadPlan, plan_read
from kvferry.pool.records import PoolLayout, read_record
from kvferry.pool.save import Fence, Saver
from kvferry.pool.stats import PoolCounters
from kvferry.pool.store import Store
from kvferry.transport.base import MemoryRegion


@dataclass(frozen=True, slots=True)
class Ended:
    """What ended since the last time."""

    saved: list[Saved] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)


class PoolRank:
    def __init__(
        self,
        store: Store,
        model: CacheModel,
        layout: RankLayout,
        bases: Sequence[int],
        counters: PoolCounters | None = None,
        *,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        """replica, replicas  among workers that the layout does not tell apart"""
        self.counters = counters or PoolCounters()
        self._replica, self._replicas = replica, replicas
        self._store, self._model, self._layout = store, model, layout
        self._bases = np.asarray(bases, dtype=np.int64)
        self._memory = object_memory(model, layout)
        self._records: dict[str, PoolLayout] = {}
        self._database: ChunkedTokenDatabase | None = None
        self._shelf = PlanShelf(self._plan)
        store.register(
            [
                MemoryRegion(base, region.bytes)
                for base, region in zip(bases, layout.regions, strict=True)
            ]
        )
        self._saver = Saver(store, self.counters)
        self._loader = Loader(store, self.counters)

    def tell(self, scope: Scope) -> None:
        """Learn what keys are made of."""
        for layout_id, encoded in scope.records.items():
            if layout_id not in self._records:
                self._records[layout_id] = read_record(encoded, layout_id)
        self._database = ChunkedTokenDatabase(
            scope.metadata,
            self._records[scope.layout_id],
            self._layout.rank,
            self._memory,
            self._bases,
            self._replica,
            self._replicas,
        )

    def _plan(self, layout_id: str) -> ReadPlan:
        if layout_id not in self._records:
            raise DescriptionError(f"layout {layout_id} was never told to this rank")
        return plan_read(self._records[layout_id], self._model, self._layout)

    def save(self, order: SaveOrder, fence: Fence | None = None) -> None:
        assert self._database is not None, "a scope is told before the first save"
        self._saver.start(order, self._database, fence)

    def load(self, order: LoadOrder, fence: Fence | None = None) -> None:
        assert self._database is not None, "a scope is told before the first load"
        sources = Sources(self._database.metadata, self._shelf.plan, self._bases)
        self._loader.start(order, sources, fence)

    def wait_done(self, seconds: float) -> None:
        """Wait for a load to end, or leave the processor to saves and lookups; but not long."""
        if self._loader.running:
            self._loader.wait_done(seconds)
        else:
            time.sleep(seconds)

    @property
    def busy(self) -> bool:
        return bool(self._saver.unfinished or self._loader.running)

    def take(self) -> Ended:
        return Ended(
            self._saver.take_done(), self._loader.take_done(), self._loader.take_recovered()
        )

    def close(self) -> None:
        """What is under way gets a while to end, all of it together."""
        deadline = time.monotonic() + CLOSE_SECONDS
        self._saver.stop()
        self._loader.stop()
        self._saver.close(max(0.0, deadline - time.monotonic()))
        self._loader.close(max(0.0, deadline - time.monotonic()))
        self._store.close()
