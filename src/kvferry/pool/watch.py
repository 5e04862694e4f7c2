"""Blocks that others were told of, looked at again in turn; what is gone is told once.

A store evicts without asking anybody, so whoever has told a router about a block must notice by
itself that it went. Blocks are asked for round after round, some at a time, by the lookup server's
thread; the scheduler's thread adds them and takes what is gone.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

from kvferry.pool.store import Store

Name = TypeVar("Name", bound=Hashable)

PERIOD_SECONDS = 2.0
BLOCKS_AT_A_TIME = 1024
MOST_BLOCKS = 1 << 18  # the oldest are forgotten beyond: they are not told as gone


class Watch(Generic[Name]):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Name, tuple[str, ...]] = OrderedDict()
        self._gone: deque[Name] = deque()
        self._next_at = 0.0

    def add(self, name: Name, keys: Sequence[str]) -> None:
        """A block was told of; it is there while all these objects are."""
        with self._lock:
            self._blocks[name] = tuple(keys)
            if len(self._blocks) > MOST_BLOCKS:
                self._blocks.popitem(last=False)

    def discard(self, name: Name) -> None:
        """It was told as gone already."""
        with self._lock:
            self._blocks.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._gone.clear()

    @property
    def has_gone(self) -> bool:
        return bool(self._gone)

    def take_gone(self) -> list[Name]:
        with self._lock:
            gone = list(self._gone)
            self._gone.clear()
            return gone

    def look(self, store: Store, deadline: float) -> None:
        """Ask for the next blocks, if it is time; raises what the store raises."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_at or not self._blocks:
                return
            self._next_at = now + PERIOD_SECONDS
            names = [name for name, _ in zip(self._blocks, range(BLOCKS_AT_A_TIME), strict=False)]
            keys = [self._blocks[name] for name in names]
            for name in names:
                self._blocks.move_to_end(name)
        there = store.exists([key for of_block in keys for key in of_block], deadline)
        heads = np.cumsum([0, *map(len, keys)])[:-1]
        whole = np.logical_and.reduceat(there, heads).tolist()
        with self._lock:
            for name, known, is_there in zip(names, keys, whole, strict=True):
                if not is_there and self._blocks.get(name) == known:
                    del self._blocks[name]
                    self._gone.append(name)
