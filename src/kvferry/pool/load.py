"""Loading: parts of objects into a request's blocks, in parallel, while the engine goes on.

A load is cut into chunks of tokens, each bound and read on its own. Every object that is missing,
short or damaged is told with the first token that it leaves unwritten; nothing after the first
such token is trusted. A load ends exactly once: when all its chunks have ended, or, where the store
does not keep its deadline, as *hung*: failed for the engine, but its blocks must stay unused,
because the store may still write into them. When it comes back after all, that is told too. What
the store has not begun by the deadline has written nothing: such a load has just failed. So has one
that no thread was free for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from kvferry.errors import KvferryError, StoreError
from kvferry.layout.parts import Ints
from kvferry.p2p.threads import Threads
from kvferry.pool.crew import Crew
from kvferry.pool.hits import Segment
from kvferry.pool.keys import KeyMetadata, object_keys
from kvferry.pool.orders import Loaded, LoadOrder
from kvferry.pool.reader import ReadPlan
from kvferry.pool.save import Fence
from kvferry.pool.stats import PoolCounters
from kvferry.pool.store import Outcome, Store

log = logging.getLogger("kvferry")

CHUNK_TOKENS = 2048  # read at a time: bounds memory for descriptors, and shares work among threads
HUNG_SECONDS = 2.0  # after its deadline, a load that the store does not end is given up
CLOSE_SECONDS = 5.0  # for what is under way when the engine ends
THREADS = 4
MOST_LOADS = 64  # at once; each has a thread that waits for its chunks
MOST_LOST_THREADS = 32  # stuck in the store; beyond, loads wait for those that are left, and fail


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """How one chunk ended."""

    bytes: int
    bad: tuple[tuple[str, int, str], ...] = ()  # group, first token, what happened


@dataclass(slots=True, eq=False)
class _Running:
    order: LoadOrder
    deadline: float
    begun: bool = False
    hung: bool = False
    chunks: list[Future[_Chunk]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """What a load needs to know of the pool."""

    metadata: KeyMetadata
    plan: Callable[[str], ReadPlan]  # by layout id; raises a KvferryError
    bases: Ints


class Loader:
    """Runs loads; `take_done` tells their ends, each once."""

    def __init__(self, store: Store, counters: PoolCounters, threads: int = THREADS) -> None:
        self._store, self._counters = store, counters
        self._running: set[_Running] = set()
        self._done: deque[Loaded] = deque()
        self._recovered: deque[str] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._crew = Crew(threads, "kvferry-load", MOST_LOST_THREADS)
        self._threads = Threads("kvferry-load-one", MOST_LOADS)

    @property
    def running(self) -> int:
        with self._changed:
            return len(self._running)

    def start(self, order: LoadOrder, sources: Sources, fence: Fence | None = None) -> None:
        """Begin a load, once `fence` has returned; never raises, never waits."""
        running = _Running(order, time.monotonic() + order.seconds)
        with self._changed:
            self._running.add(running)
        try:
            self._threads.submit(partial(self._run, running, sources, fence))
        except KvferryError as error:
            with self._changed:
                self._give_up(running, f"it did not begin: {error}")

    def _give_up(self, running: _Running, why: str) -> None:
        """With the lock: it has written nothing, and never will."""
        self._running.discard(running)
        loaded = Loaded(running.order.request_id, why, bad_from=_first_token(running.order))
        self._done.append(loaded)
        self._counters.add("load_errors")
        self._count(loaded)

    def wait_done(self, seconds: float) -> None:
        """Wait until something has ended, but not long."""
        with self._changed:
            if self._running and not self._done:
                self._changed.wait(seconds)

    def take_done(self) -> list[Loaded]:
        now = time.monotonic()
        with self._changed:
            late = [r for r in self._running if not r.hung and now > r.deadline + HUNG_SECONDS]
            for running in late:
                if not running.begun:
                    self._give_up(running, "nothing had begun with it by its deadline")
                    continue
                running.hung = True
                self._counters.add("load_hung")
                error = "the store did not end the load by its deadline"
                first = _first_token(running.order)
                loaded = Loaded(running.order.request_id, error, bad_from=first, hung=True)
                self._done.append(loaded)
                self._count(loaded)
                self._crew.replace(running.chunks)  # others must not wait behind them
            done = list(self._done)
            self._done.clear()
            return done

    def take_recovered(self) -> list[str]:
        """Requests whose hung loads have ended after all: their blocks are nobody's any more."""
        with self._changed:
            recovered = list(self._recovered)
            self._recovered.clear()
            return recovered

    def stop(self) -> None:
        """Begin nothing more: what the store has not yet been asked for fails."""
        self._closed = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop; what the store has now gets so long to end."""
        self.stop()
        with self._changed:  # those that hang had their time
            self._changed.wait_for(lambda: all(r.hung for r in self._running), seconds)
        self._crew.close()
        self._threads.close()

    def _run(self, running: _Running, sources: Sources, fence: Fence | None) -> None:
        order, began = running.order, time.monotonic()
        first = _first_token(order)
        loaded = Loaded(order.request_id, "ended without a word", bad_from=first)
        raised = False
        try:
            if fence is not None:  # a step under way may write what was given away meanwhile
                fence()
            with self._changed:
                if running not in self._running:
                    return  # given up
                running.begun = True
            loaded = self._load(running, sources)
        except Exception as error:
            raised = True
            loaded = replace(loaded, error=f"{type(error).__name__}: {error}")
        finally:  # also of what is no Exception: the request waits until this is said
            loaded = replace(loaded, seconds=time.monotonic() - began)
            with self._changed:
                reported = running not in self._running
                self._running.discard(running)
                if running.hung:
                    self._recovered.append(order.request_id)
                elif not reported:
                    self._done.append(loaded)
                    self._counters.add("load_errors", int(raised))
                    self._count(loaded)
                self._changed.notify_all()

    def _count(self, loaded: Loaded) -> None:
        """With the lock, as the engine is told: what comes back late was counted when it hung."""
        self._counters.add("loads")
        self._counters.add("loaded_bytes", loaded.bytes)
        if not loaded.ok:
            self._counters.add("load_failures")
            log.warning("request %s: not all was loaded: %s", loaded.request_id, loaded.error)

    def _load(self, running: _Running, sources: Sources) -> Loaded:
        order, deadline, futures = running.order, running.deadline, running.chunks
        if self._closed:  # nobody is left who would read
            raise KvferryError("the engine is closing")
        if not order.segments:
            raise KvferryError("nothing was promised that could be loaded")
        tables = [np.asarray(ids, dtype=np.int64) for ids in order.tables]
        chunks = [c for s in order.segments for c in _cut(s, sources.plan(s.layout_id))]
        try:
            for chunk in chunks:
                read = partial(self._read, chunk, order.contents, tables, sources, deadline)
                futures.append(self._crew.submit(read))
            seconds = max(0.0, deadline - time.monotonic())
            wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
        finally:
            begun = [future for future in futures if not future.cancel()]
            wait(begun)  # nothing of this load may be written after it has ended
        ended = [future.result() for future in begun]
        if len(begun) < len(futures):
            raise KvferryError("the store had not begun with all of it by the load's deadline")
        bad = sorted((b for c in ended for b in c.bad), key=lambda b: b[1])
        moved = sum(c.bytes for c in ended)
        if not bad:
            return Loaded(order.request_id, bytes=moved)
        self._counters.add("load_bad_objects", len(bad))
        group, token, why = bad[0]
        missing = tuple((g, t) for g, t, w in bad if w == Outcome.MISSING.value)
        return Loaded(
            order.request_id,
            f"{len(bad)} objects, the first ({why}) of group {group!r} at token {token}",
            bad_from=token,
            bytes=moved,
            missing=missing,
        )

    def _read(
        self,
        segment: Segment,
        contents: Mapping[int, Sequence[str]],
        tables: Sequence[Ints],
        sources: Sources,
        deadline: float,
    ) -> _Chunk:
        plan = sources.plan(segment.layout_id)
        wanted = plan.bind(segment, tables, sources.bases)
        if not wanted.slices:
            return _Chunk(0)
        digests = contents[plan.theirs.block_tokens(segment.group)]
        keys: list[str] = []
        for fragment, block in zip(wanted.fragments, wanted.blocks, strict=True):
            keys += object_keys(sources.metadata, segment.layout_id, fragment, [digests[block]])
        if self._closed:
            raise KvferryError("the engine is closing")
        if time.monotonic() >= deadline:
            raise KvferryError("the load's deadline has passed")
        outcomes = self._store.get(keys, wanted.slices, deadline)
        if len(outcomes) != len(keys):
            raise StoreError(f"a store told {len(outcomes)} of {len(keys)} outcomes")
        bad = []
        for outcome, start in zip(outcomes, wanted.starts, strict=True):
            self._counters.add(f"load_{outcome.value}")
            if outcome is not Outcome.DONE:
                bad.append((segment.group, start, outcome.value))
        good = sum(
            int(s.length.sum())
            for s, outcome in zip(wanted.slices, outcomes, strict=True)
            if outcome is Outcome.DONE
        )
        return _Chunk(good, tuple(bad))


def _first_token(order: LoadOrder) -> int:
    return min((s.start for s in order.segments), default=0)


def _cut(segment: Segment, plan: ReadPlan) -> list[Segment]:
    """Chunks of a segment that end where objects do."""
    if segment.start == segment.stop:  # a state
        return [segment]
    span = plan.theirs.block_tokens(segment.group)
    step = max(span, CHUNK_TOKENS // span * span)
    cuts = [*range(segment.start // step * step + step, segment.stop, step)]
    bounds = [segment.start, *cuts, segment.stop]
    return [replace(segment, start=a, stop=b) for a, b in pairwise(bounds)]


@dataclass(slots=True, eq=False)
class PlanShelf:
    """Read plans by layout, made when first needed."""

    make: Callable[[str], ReadPlan]
    _made: dict[str, ReadPlan] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, layout_id: str) -> ReadPlan:
        with self._lock:
            if layout_id not in self._made:
                self._made[layout_id] = self.make(layout_id)
            return self._made[layout_id]
