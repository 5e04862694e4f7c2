"""The layouts of a namespace: ours published, others' found.

A namespace has a fixed number of index slots. A writer puts its layout's record under the layout's
id, and the id into the first free slot; nothing is ever changed, so nothing can be torn or lost by
two writers at once. A slot or a record that the store evicted is written again by whoever finds it
missing and owns it; until then, to engines that do not know it yet, that layout is a miss.
"""

from __future__ import annotations

import logging
import time

from kvferry.errors import KvferryError
from kvferry.pool.keys import KeyMetadata
from kvferry.pool.reader import plan_read
from kvferry.pool.records import PoolLayout, is_usable, read_record
from kvferry.pool.stats import PoolCounters
from kvferry.pool.store import Outcome, Store

log = logging.getLogger("kvferry")

REFRESH_SECONDS = 2.0  # a new shape is noticed within this


class LayoutBook:
    """Used by one thread at a time."""

    def __init__(self, metadata: KeyMetadata, ours: PoolLayout, counters: PoolCounters) -> None:
        self.metadata, self.ours = metadata, ours
        self._counters = counters
        self._known: dict[str, PoolLayout] = {ours.id: ours}
        self._refused: set[str] = set()
        self._slots: dict[str, str] = {}  # layout id by index key
        self._next = 0.0

    @property
    def layouts(self) -> list[PoolLayout]:
        return list(self._known.values())

    def refresh(self, store: Store, deadline: float, now: float | None = None) -> None:
        """Look for new layouts, and publish ours where it is missing; now and then."""
        now = time.monotonic() if now is None else now
        if now < self._next:
            return
        index = self.metadata.index_keys()
        record = self.metadata.record_key(self.ours.id)
        found = store.exists([*index, record], deadline)
        self._slots.clear()  # a slot that was evicted may be another's by now
        for key, here in zip(index, found.tolist(), strict=False):
            name = store.get_bytes(key, deadline) if here else None
            if name is not None:
                self._slots[key] = name.decode(errors="replace")
        for layout_id in set(self._slots.values()) - set(self._known) - self._refused:
            self._learn(store, layout_id, deadline)
        if not found[-1]:
            self._count(store.put_bytes(record, self.ours.encoded, deadline))
        if self.ours.id not in self._slots.values():
            self._take_slot(store, index, deadline)
        self._next = now + REFRESH_SECONDS

    def _learn(self, store: Store, layout_id: str, deadline: float) -> None:
        encoded = store.get_bytes(self.metadata.record_key(layout_id), deadline)
        if encoded is None:
            self._counters.add("layouts_missing")
            return
        try:
            layout = read_record(encoded, layout_id)
            why = is_usable(self.ours, layout)
            if not why:  # what no rank could read must not be promised
                for rank in self.ours.ranks.values():
                    plan_read(layout, self.ours.model, rank)
        except KvferryError as error:
            why = str(error)
        except Exception as error:  # a record may hold anything
            why = f"{type(error).__name__}: {error}"
        if why:
            self._refused.add(layout_id)
            self._counters.add("layouts_refused")
            log.warning("layout %s of the pool is not read: %s", layout_id, why)
            return
        self._known[layout_id] = layout
        log.info("the pool has a layout %s: %s", layout_id, layout.shape.describe())

    def _take_slot(self, store: Store, index: list[str], deadline: float) -> None:
        for key in index:
            if key in self._slots:
                continue
            outcome = store.put_bytes(key, self.ours.id.encode(), deadline)
            if outcome is Outcome.EXISTS:  # somebody was faster: whose is it?
                name = store.get_bytes(key, deadline)
                if name != self.ours.id.encode():
                    continue
            elif outcome is not Outcome.DONE:
                self._count(outcome)
                return
            self._slots[key] = self.ours.id
            self._counters.add("layouts_published")
            return
        log.error(
            "all %d layouts that a pool's namespace can have are taken: what this engine saves "
            "cannot be found by others; give it a `cache_prefix` of its own",
            len(index),
        )

    def _count(self, outcome: Outcome) -> None:
        if outcome not in (Outcome.DONE, Outcome.EXISTS):
            self._counters.add("layouts_unpublished")
