"""Saving: blocks into the store, on a thread of its own, while the engine goes on.

A job names whole blocks whose tokens are final. The scheduler keeps them pinned until every rank
has reported the job; a rank reports every job exactly once, whatever happens in the store, and only
when the store no longer reads the blocks' memory. Of each block a rank writes its own fragment, or
none where a replica has the turn. What the store has already is not written again. Objects are
whole or not there; a block of which one fragment failed is never found: a lookup asks for all.

A store that is full, slow or broken is left alone for a while (twice as long each time): jobs that
come meanwhile are reported at once, with nothing saved, and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from kvferry.errors import StoreError
from kvferry.pool.database import ChunkedTokenDatabase
from kvferry.pool.orders import Saved, SaveOrder, TableBlocks
from kvferry.pool.stats import PoolCounters
from kvferry.pool.store import Outcome, Store

log = logging.getLogger("kvferry")

BATCH_OBJECTS = 64  # put at a time, so that a deadline is looked at between
CLOSE_SECONDS = 5.0  # for what is under way when the engine ends
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 8.0


Fence = Callable[[], None]  # returns when the device has done what it was asked until then


class Saver:
    """One thread that saves jobs in order."""

    def __init__(self, store: Store, counters: PoolCounters) -> None:
        self._store, self._counters = store, counters
        self._queue: SimpleQueue[tuple[SaveOrder, ChunkedTokenDatabase, Fence | None] | None]
        self._queue = SimpleQueue()
        self._done: deque[Saved] = deque()
        self._open: set[int] = set()  # jobs that have no last word yet
        self._lock = threading.Lock()
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._paused_until = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def unfinished(self) -> int:
        with self._lock:
            return len(self._open)

    def start(
        self, order: SaveOrder, database: ChunkedTokenDatabase, fence: Fence | None = None
    ) -> None:
        """Take a job; its last word comes from `take_done`."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="kvferry-save", daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:  # the next job tries again
                    self._counters.add("save_errors")
                    log.warning("nothing is saved to the pool: %s", error)
                    self._done.append(Saved(order.job_id, tuple(sorted(_all_blocks(order)))))
                    return
                self._thread = thread
            self._open.add(order.job_id)
        self._queue.put((order, database, fence))

    def take_done(self) -> list[Saved]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def stop(self) -> None:
        """Begin nothing more: what the store was not given yet is reported as not saved."""
        self._closed = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop; what the store has now gets so long to end."""
        self.stop()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            order, database, fence = job
            failed = _all_blocks(order)
            try:
                if self._closed:
                    self._counters.add("save_dropped")
                else:
                    failed = self._save(order, database, fence)
            except Exception as error:
                self._pause()
                self._counters.add("save_errors")
                log.warning("saving to the pool failed: %s: %s", type(error).__name__, error)
            finally:  # also of what is no Exception: the blocks are pinned until this is said
                with self._lock:
                    self._open.discard(order.job_id)
                self._done.append(Saved(order.job_id, tuple(sorted(failed))))

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def _save(
        self, order: SaveOrder, database: ChunkedTokenDatabase, fence: Fence | None
    ) -> set[tuple[int, int]]:
        """Blocks that are not stored."""
        if time.monotonic() < self._paused_until:
            self._counters.add("save_dropped")
            return _all_blocks(order)
        if fence is not None:
            fence()
        deadline = time.monotonic() + order.seconds
        failed: set[tuple[int, int]] = set()
        for blocks in order.tables:
            if blocks.table in database.memory:
                failed |= self._save_table(blocks, database, deadline)
        if not failed:
            self._pause_seconds = FIRST_PAUSE_SECONDS
        return failed

    def _save_table(
        self, blocks: TableBlocks, database: ChunkedTokenDatabase, deadline: float
    ) -> set[tuple[int, int]]:
        numbers = np.asarray(blocks.numbers, dtype=np.int64)
        mine = database.my_turn(blocks.table, numbers)
        ids = np.asarray(blocks.block_ids, dtype=np.int64)
        keys = database.keys(blocks.table, [blocks.contents[i] for i in mine.tolist()])
        if not keys:
            return set()
        known = self._store.exists(keys, deadline)
        if len(known) != len(keys):
            raise StoreError(f"a store answered {len(known)} of {len(keys)} questions")
        self._counters.add("save_known", int(known.sum()))
        new = np.flatnonzero(~known)
        failed: set[tuple[int, int]] = set()
        for start in range(0, len(new), BATCH_OBJECTS):
            some = new[start : start + BATCH_OBJECTS]
            names = [keys[i] for i in some.tolist()]
            objects = database.objects(blocks.table, ids[mine[some]])
            if self._closed or time.monotonic() >= deadline:
                outcomes = [Outcome.FAILED] * len(names)
            else:
                outcomes = self._store.put(names, objects, deadline)
            if len(outcomes) != len(names):
                raise StoreError(f"a store told {len(outcomes)} of {len(names)} outcomes")
            for place, outcome in zip(some.tolist(), outcomes, strict=True):
                self._counters.add(f"save_{outcome.value}")
                if outcome not in (Outcome.DONE, Outcome.EXISTS):
                    failed.add((blocks.table, int(numbers[mine[place]])))
            done = sum(outcome is Outcome.DONE for outcome in outcomes)
            object_bytes = database.memory[blocks.table].object_bytes
            self._counters.add("saved_bytes", done * object_bytes)
            if Outcome.FULL in outcomes or Outcome.FAILED in outcomes:
                self._pause()  # and there is no point in trying the rest
                left = new[start + BATCH_OBJECTS :]
                failed |= {(blocks.table, n) for n in numbers[mine[left]].tolist()}
                break
        return failed


def _all_blocks(order: SaveOrder) -> set[tuple[int, int]]:
    return {(b.table, number) for b in order.tables for number in b.numbers}
