# SPDX-License-Identifier: Apache-2.0
"""One rank's side of the pool, for any engine: it takes orders, returns reports, and never waits.

`tell` gives it the scope (keys, our own layout, records of others). `save` and `load` start work.
`take` returns what has ended. Every save and every load is reported exactly once.

**Saving** (`Saver`, one thread). A job names whole blocks whose tokens are final. A rank reports a
job only when the store no longer reads the blocks' memory, which stays pinned until then. A step
may still compute them: the thread waits for its end, or the device does (`FencedStore`). A rank
writes its own fragment of each block, unless a replica has the turn or the store has the object. If
the store is full, slow or broken, the thread pauses, twice as long each time.
Jobs that come meanwhile are reported at once, with nothing saved.

**Loading** (`Loader`, several threads). A load is cut into chunks of tokens, and each chunk is read
on its own. An object that is missing, short or damaged is reported with its first token, and no
token from there on is trusted.

    all chunks have ended               the load is reported, good or failed
    the store had not begun by the      failed; nothing was written
    deadline, or no thread was free
    the store is past the deadline      *hung*: failed for the engine, but its blocks must not be
                                        reused, because the store may still write into them
    the store ends a hung load          its request is reported as recovered; blocks may be reused
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from kvferry.carriers.base import MemoryRegion, Ready
from kvferry.errors import DescriptionError, KvferryError, text_of
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import Rank
from kvferry.pool.hits import Segment
from kvferry.pool.keys import Fragment, KeyMetadata, PoolKey, object_keys
from kvferry.pool.layout_registry import (
    PoolLayout,
    ReadPlan,
    WantedParts,
    plan_read,
    read_record,
)
from kvferry.pool.objects import ObjectMemory, object_memory
from kvferry.pool.orders import (
    LoadOrder,
    PoolCounters,
    PoolLoaded,
    Saved,
    SaveOrder,
    Scope,
    StoreOperation,
    TableBlocks,
)
from kvferry.pool.store import (
    Fence,
    FencedStore,
    Outcome,
    Store,
    require_answers,
    sizes_of,
)
from kvferry.workers import Call, Threads

log = logging.getLogger("kvferry")

CLOSE_SECONDS = 5.0  # for running saves and loads when the engine ends


@dataclass(frozen=True, slots=True)
class Ended:
    """What has ended since the last call."""

    saved: list[Saved] = field(default_factory=list)
    loaded: list[PoolLoaded] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class RankScope:
    """What a rank needs to save and load in one namespace."""

    metadata: KeyMetadata
    layout: PoolLayout  # our own
    rank: Rank
    memory: Mapping[int, ObjectMemory]  # by table
    bases: Ints
    plan: Callable[[str], ReadPlan]  # by layout id; raises a KvferryError
    replica: int  # this worker's number among those with the same rank and bytes
    replicas: int
    null_block: int | None = 0  # an id that means "no block"

    def my_turn(self, table: int, numbers: Ints) -> Ints:
        """Indices of those blocks that this rank writes. Replicas take turns."""
        turns = self.layout.turns[self.layout.owner[table, self.rank]]
        turn = turns.index(self.rank) + len(turns) * self.replica
        mine: Ints = np.flatnonzero(numbers % (len(turns) * self.replicas) == turn)
        return mine

    def keys(self, table: int, contents: Sequence[str]) -> list[str]:
        """Keys of this rank's objects."""
        fragment = self.layout.owner[table, self.rank]
        return object_keys(self.metadata, self.layout.id, fragment, contents)

    def own_blocks(self, segment: Segment, tables: Sequence[Ints]) -> WantedParts | None:
        """Whole blocks in our own layout, as this rank would save them. None: the segment needs a
        plan."""
        if segment.layout_id != self.layout.id:
            return None
        kinds = [kind for kind in self.layout.kinds if segment.group in kind.groups]
        if len(kinds) != 1 or len(kinds[0].groups) != 1 or kinds[0].residency.kind != "full":
            return None
        (kind,), span = kinds, kinds[0].block_tokens
        first, last = segment.start // span, segment.stop // span
        ids = tables[kind.table][first:last]
        whole = segment.start % span == segment.stop % span == 0 and len(ids) == last - first
        if kind.table not in self.memory or not whole or len(np.unique(ids)) < len(ids):
            return None
        if self.null_block is not None and bool((ids == self.null_block).any()):
            return None
        return WantedParts(
            [self.layout.owner[kind.table, self.rank]] * len(ids),
            list(range(first, last)),
            list(range(segment.start, segment.stop, span)),
            self.memory[kind.table].blocks(self.bases, ids),
        )


class PoolRank:
    def __init__(
        self,
        store: Store,
        model: CacheModel,
        layout: RankLayout,
        bases: Sequence[int],
        *,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        """`replica` of `replicas`: this worker among those with the same rank and bytes."""
        self.counters = PoolCounters()
        self._store, self._model, self._layout = store, model, layout
        self._make_scope = partial(
            RankScope,
            rank=layout.rank,
            memory=object_memory(model, layout),
            bases=np.asarray(bases, dtype=np.int64),
            plan=self._plan,
            replica=replica,
            replicas=replicas,
            null_block=layout.shape.null_block,
        )
        self._records: dict[str, PoolLayout] = {}
        self._plans: dict[str, ReadPlan] = {}  # by layout id, made when first needed
        self._planning = threading.Lock()
        self._scope: RankScope | None = None
        store.register(
            [
                MemoryRegion(base, region.bytes)
                for base, region in zip(bases, layout.regions, strict=True)
            ]
        )
        self._ended = threading.Event()  # set when a save or a load ends
        self._saver = Saver(store, self.counters, self._ended)
        self._loader = Loader(store, self.counters, self._ended)

    def tell(self, scope: Scope) -> None:
        """Take the scope from which keys are made."""
        for layout_id, encoded in scope.records.items():
            if layout_id not in self._records:
                self._records[layout_id] = read_record(encoded, layout_id)
        self._scope = self._make_scope(scope.metadata, self._records[scope.layout_id])

    def _plan(self, layout_id: str) -> ReadPlan:
        with self._planning:
            if layout_id not in self._plans:
                if layout_id not in self._records:
                    raise DescriptionError(f"this rank never got the record of layout {layout_id}")
                record = self._records[layout_id]
                self._plans[layout_id] = plan_read(record, self._model, self._layout)
            return self._plans[layout_id]

    def save(self, order: SaveOrder, fence: Fence | None = None) -> None:
        assert self._scope is not None, "a scope is told before the first save"
        self._saver.start(order, self._scope, fence)

    def load(self, order: LoadOrder, fence: Fence | None = None) -> None:
        assert self._scope is not None, "a scope is told before the first load"
        self._loader.start(order, self._scope, fence)

    def wait_done(self, seconds: float) -> None:
        """Sleep until a load or save under way has ended, at most this long."""
        if self._loader.running or self._saver.running:
            self._ended.wait(seconds)

    def take(self) -> Ended:
        self._ended.clear()  # first: a job that ends from now on sets it again
        return Ended(
            self._saver.take_done(), self._loader.take_done(), self._loader.take_recovered()
        )

    def close(self) -> None:
        """Close. Running saves and loads share a time limit to end."""
        deadline = time.monotonic() + CLOSE_SECONDS
        self._saver.stop()
        self._loader.stop()
        self._saver.close(max(0.0, deadline - time.monotonic()))
        self._loader.close(max(0.0, deadline - time.monotonic()))
        self._store.close()


FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 8.0
STORED = (Outcome.DONE, Outcome.EXISTS)
BROKEN = (Outcome.FULL, Outcome.FAILED)  # the next objects would end so too


class Saver:
    """One thread that saves jobs in order."""

    def __init__(
        self, store: Store, counters: PoolCounters, ended: threading.Event | None = None
    ) -> None:
        """ended  set when a job has ended"""
        self._store, self._counters = store, counters
        self._fenced = store if isinstance(store, FencedStore) else None
        self._most = Pace.of(store).save_objects
        self._ended = ended or threading.Event()
        self._started = self._reported = 0  # jobs
        self._put = 0  # blocks of the job at hand
        self._threads = Threads("kvferry-save", 1)
        self._done: deque[Saved] = deque()
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._paused_until = 0.0
        self._closed = False

    def start(self, order: SaveOrder, scope: RankScope, fence: Fence | None = None) -> None:
        """Take a job. `take_done` returns its report later."""
        self._started += 1
        try:
            self._threads.submit(partial(self._run, order, scope, fence, self._started))
        except KvferryError as error:  # the next job tries again
            self._counters.add("save_errors")
            log.warning("nothing is saved to the pool: %s", error)
            self._end(order, _all_blocks(order))

    @property
    def running(self) -> bool:
        """Whether a job has no report yet. For the thread that starts jobs and takes reports."""
        return self._started > self._reported

    def take_done(self) -> list[Saved]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        self._reported += len(done)
        return done

    def stop(self) -> None:
        """Give the store nothing more. The rest is reported as not saved."""
        self._closed = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """The store's current call gets this long to end."""
        self.stop()
        self._threads.close()
        self._threads.join(seconds)

    def _run(self, order: SaveOrder, scope: RankScope, fence: Fence | None, number: int) -> None:
        failed, began = _all_blocks(order), time.monotonic()
        timed = None
        if fence is not None:
            timed = _TimedFence(fence, hurry=lambda: self._started > number)
        try:
            if self._closed:
                self._counters.add("save_dropped")
            else:
                failed = self._save(order, scope, timed)
        except Exception as error:
            self._pause()
            self._counters.add("save_errors")
            log.warning("saving to the pool failed: %s", text_of(error))
        finally:  # whatever was raised: the blocks stay pinned until this report
            waited = timed.waited if timed is not None else 0.0
            put, self._put = self._put, 0
            self._end(order, failed, time.monotonic() - began - waited, put)

    def _end(
        self, order: SaveOrder, failed: set[tuple[int, int]], seconds: float = 0.0, put: int = 0
    ) -> None:
        """Report the job, with the blocks that were not saved."""
        paused = time.monotonic() < self._paused_until
        self._done.append(Saved(order.job_id, tuple(sorted(failed)), seconds, put, paused))
        self._ended.set()

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def _save(
        self, order: SaveOrder, scope: RankScope, fence: _TimedFence | None
    ) -> set[tuple[int, int]]:
        """Save a job's blocks. Returns those that are not stored."""
        if time.monotonic() < self._paused_until:
            self._counters.add("save_dropped")
            return _all_blocks(order)
        if fence is not None and self._fenced is None:
            fence.wait()
            fence = None
        deadline = time.monotonic() + order.seconds
        failed: set[tuple[int, int]] = set()
        for blocks in order.tables:
            if blocks.table in scope.memory:
                failed |= self._save_table(blocks, scope, deadline, fence)
        if time.monotonic() >= self._paused_until:
            self._pause_seconds = FIRST_PAUSE_SECONDS
        return failed

    def _save_table(
        self, blocks: TableBlocks, scope: RankScope, deadline: float, fence: _TimedFence | None
    ) -> set[tuple[int, int]]:
        numbers = np.asarray(blocks.numbers, dtype=np.int64)
        mine = scope.my_turn(blocks.table, numbers)
        ids = np.asarray(blocks.block_ids, dtype=np.int64)
        keys = scope.keys(blocks.table, [blocks.contents[i] for i in mine.tolist()])
        if not keys:
            return set()
        with self._counters.operation(StoreOperation("save_exists", len(keys))):
            known = self._store.exists(keys, deadline)
            require_answers(known, keys)
        self._counters.add("save_known", int(known.sum()))
        new, object_bytes = np.flatnonzero(~known), scope.memory[blocks.table].object_bytes
        failed: set[tuple[int, int]] = set()
        for start in range(0, len(new), self._most):
            some = new[start : start + self._most]
            names = [keys[i] for i in some.tolist()]
            objects = scope.memory[blocks.table].blocks(scope.bases, ids[mine[some]])
            if self._closed or time.monotonic() >= deadline:
                outcomes = [Outcome.FAILED] * len(names)
            else:
                put = StoreOperation("save_put", len(names), len(names) * object_bytes)
                with self._counters.operation(put):
                    if self._fenced is not None and fence is not None:
                        before = fence.waited
                        outcomes = self._fenced.put_after(names, objects, deadline, fence)
                        put.waited = fence.waited - before
                    else:
                        outcomes = self._store.put(names, objects, deadline)
                    require_answers(outcomes, names)
                    put.failed = sum(o in BROKEN for o in outcomes)
            counts = Counter(outcomes)
            for outcome, count in counts.items():
                self._counters.add(f"save_{outcome.value}", count)
            self._counters.add("saved_bytes", counts[Outcome.DONE] * object_bytes)
            self._put += counts[Outcome.DONE]
            lost = [at for at, o in zip(some.tolist(), outcomes, strict=True) if o not in STORED]
            broken = any(counts[outcome] for outcome in BROKEN)
            if broken:
                self._pause()  # the rest would fail too
                lost += new[start + self._most :].tolist()
            failed |= {(blocks.table, number) for number in numbers[mine[lost]].tolist()}
            if broken:
                break
        return failed


class _TimedFence:
    """A job's fence. It measures how long its thread waited, and hurries if other jobs wait."""

    def __init__(self, fence: Fence, hurry: Callable[[], bool]) -> None:
        self._fence, self._hurry, self.waited = fence, hurry, 0.0
        self._was_quiet = False

    @property
    def ready(self) -> Ready:
        return self._fence.ready

    def wait(self) -> None:
        before = time.monotonic()
        self._fence.wait()
        self.waited += time.monotonic() - before

    def quiet(self) -> None:
        """Waits once, for all tables of the job."""
        if not (self._was_quiet or self._hurry()):
            self._was_quiet = True
            before = time.monotonic()
            self._fence.quiet()
            self.waited += time.monotonic() - before


def _all_blocks(order: SaveOrder) -> set[tuple[int, int]]:
    return {(b.table, number) for b in order.tables for number in b.numbers}


HUNG_SECONDS = 2.0  # past its deadline; then a load counts as hung
MOST_LOADS = 64  # at once; each has a thread that waits for its chunks
MOST_LOST_THREADS = 32  # stuck in the store; beyond, loads wait for the other threads, and fail


@dataclass(frozen=True, slots=True)
class Pace:
    """How loads and saves ask the store."""

    threads: int = 4  # of loads
    chunk_tokens: int = 2048  # loaded at a time; bounds memory, and spreads work over threads
    save_objects: int = 256  # put at a time; the deadline is checked in between

    @classmethod
    def of(cls, store: Store) -> Pace:
        """If a device copies by itself, more threads only compete for the interpreter's lock. Its
        store cuts loads and puts into parts that overlap."""
        if not isinstance(store, FencedStore):
            return cls()
        return cls(threads=2, chunk_tokens=1 << 30, save_objects=1 << 14)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """How one chunk ended."""

    bytes: int
    bad: tuple[tuple[str, int, str], ...] = ()  # group, first token, outcome


@dataclass(slots=True, eq=False)
class _Running:
    order: LoadOrder
    deadline: float
    begun: bool = False
    hung: bool = False
    chunks: list[Call[_Chunk]] = field(default_factory=list)


class Loader:
    """Runs loads. `take_done` reports each exactly once."""

    def __init__(
        self, store: Store, counters: PoolCounters, ended: threading.Event | None = None
    ) -> None:
        """ended  set when a load has ended"""
        self._ended = ended or threading.Event()
        self._store, self._counters, self._pace = store, counters, Pace.of(store)
        self._running: set[_Running] = set()
        self._done: list[PoolLoaded] = []
        self._recovered: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        self._crew = Threads("kvferry-load", self._pace.threads, most_stuck=MOST_LOST_THREADS)
        self._threads = Threads("kvferry-load-one", MOST_LOADS)

    def start(self, order: LoadOrder, scope: RankScope, fence: Fence | None = None) -> None:
        """Begin a load once the device has come to `fence`. This never raises and never waits."""
        running = _Running(order, time.monotonic() + order.seconds)
        with self._changed:
            self._running.add(running)
        try:
            self._threads.submit(partial(self._run, running, scope, fence))
        except KvferryError as error:
            with self._changed:
                self._running.discard(running)
                self._report(_failure(order, f"it did not begin: {error}"), raised=True)

    @property
    def running(self) -> bool:
        return bool(self._running)

    def take_done(self) -> list[PoolLoaded]:
        now = time.monotonic()
        with self._changed:
            late = [r for r in self._running if not r.hung and now > r.deadline + HUNG_SECONDS]
            for running in late:
                if not running.begun:  # it has written nothing, and never will
                    self._running.discard(running)
                    why = "no thread had begun it by its deadline"
                    self._report(_failure(running.order, why), raised=True)
                    continue
                running.hung = True
                self._counters.add("load_hung")
                why = "the store did not end the load by its deadline"
                self._report(replace(_failure(running.order, why), hung=True))
                for chunk in running.chunks:  # other loads must not wait behind these
                    self._crew.give_up(chunk)
            done, self._done = self._done, []
            return done

    def take_recovered(self) -> list[str]:
        """Requests whose hung loads have ended after all. Their blocks may be reused."""
        with self._changed:
            recovered, self._recovered = self._recovered, []
            return recovered

    def stop(self) -> None:
        """Ask the store for nothing more. The rest fails."""
        self._closed = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop. The store's current calls get this long to end."""
        self.stop()
        with self._changed:  # hung loads had their time
            self._changed.wait_for(lambda: all(r.hung for r in self._running), seconds)
        self._crew.close()
        self._threads.close()

    def _run(self, running: _Running, scope: RankScope, fence: Fence | None) -> None:
        order, began = running.order, time.monotonic()
        loaded = _failure(order, "ended without a report")
        raised = False
        try:
            if fence is not None:  # an earlier step may still write to these blocks
                fence.wait()
            with self._changed:
                if running not in self._running:
                    return  # given up
                running.begun = True
            began = time.monotonic()  # steps that it waited for are no cost of the load
            loaded = self._load(running, scope)
        except Exception as error:
            raised = True
            loaded = replace(loaded, error=text_of(error))
        finally:  # whatever was raised: the request waits for this report
            loaded = replace(loaded, seconds=time.monotonic() - began)
            with self._changed:
                reported = running not in self._running
                self._running.discard(running)
                if running.hung:
                    self._recovered.append(order.request_id)
                elif not reported:
                    self._report(loaded, raised=raised)
                self._changed.notify_all()

    def _report(self, loaded: PoolLoaded, *, raised: bool = False) -> None:
        """Report a load, once: when it ends or hangs. Call it with the lock held."""
        self._done.append(loaded)
        self._ended.set()
        self._counters.add("loads")
        self._counters.add("load_errors", int(raised))
        self._counters.add("loaded_bytes", loaded.bytes)
        if not loaded.ok:
            self._counters.add("load_failures")
            log.warning("request %s was not loaded in full: %s", loaded.request_id, loaded.error)

    def _load(self, running: _Running, scope: RankScope) -> PoolLoaded:
        order, deadline, futures = running.order, running.deadline, running.chunks
        if self._closed:  # the threads that read have stopped
            raise KvferryError("the engine is closing")
        if not order.segments:
            raise KvferryError("the load has no segments")
        tables = [np.asarray(ids, dtype=np.int64) for ids in order.tables]
        reads = [
            partial(self._read, chunk, order.contents, tables, scope, deadline)
            for segment in order.segments
            for chunk in _cut(segment, scope.plan(segment.layout_id), self._pace)
        ]
        if len(reads) == 1 and len(self._running) == 1:
            ended = [reads[0]()]  # on this thread: waking another takes longer
        else:
            try:
                for read in reads:
                    futures.append(self._crew.call(read))
                seconds = max(0.0, deadline - time.monotonic())
                wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
            finally:
                begun = [future for future in futures if not future.cancel()]
                wait(begun)  # no byte of this load may be written after its end
            ended = [future.result() for future in begun]
            if len(begun) < len(futures):
                raise KvferryError("the store had not begun all of it by the load's deadline")
        bad = sorted((b for c in ended for b in c.bad), key=lambda b: b[1])
        moved = sum(c.bytes for c in ended)
        if not bad:
            return PoolLoaded(order.request_id, bytes=moved)
        self._counters.add("load_bad_objects", len(bad))
        group, token, why = bad[0]
        return PoolLoaded(
            order.request_id,
            f"{len(bad)} objects, the first ({why}) of group {group!r} at token {token}",
            bad_from=token,
            bytes=moved,
        )

    def _read(
        self,
        segment: Segment,
        contents: Mapping[tuple[str, int], Sequence[str]],
        tables: Sequence[Ints],
        scope: RankScope,
        deadline: float,
    ) -> _Chunk:
        wanted = scope.own_blocks(segment, tables)
        if wanted is None:
            wanted = scope.plan(segment.layout_id).bind(segment, tables, scope.bases)
        if not len(wanted.slices):
            return _Chunk(0)
        keys = _wanted_keys(wanted, segment.layout_id, contents, scope.metadata)
        if self._closed:
            raise KvferryError("the engine is closing")
        if time.monotonic() >= deadline:
            raise KvferryError("the load's deadline has passed")
        sizes = sizes_of(wanted.slices)
        get = StoreOperation("load_get", len(keys), int(sizes.sum()))
        with self._counters.operation(get):
            outcomes = self._store.get(keys, wanted.slices, deadline)
            require_answers(outcomes, keys)
            get.failed = len(outcomes) - outcomes.count(Outcome.DONE)
        for outcome, count in Counter(outcomes).items():
            self._counters.add(f"load_{outcome.value}", count)
        if not get.failed:
            return _Chunk(get.bytes)
        done = np.array([outcome is Outcome.DONE for outcome in outcomes])
        bad = [(segment.group, wanted.starts[i], outcomes[i].value) for i in np.flatnonzero(~done)]
        return _Chunk(int(sizes[done].sum()), tuple(bad))


def _wanted_keys(
    wanted: WantedParts,
    layout_id: str,
    contents: Mapping[tuple[str, int], Sequence[str]],
    metadata: KeyMetadata,
) -> list[str]:
    """The key of each object. Neighbours mostly share a fragment, which is looked up once."""
    named: dict[Fragment, tuple[str, Sequence[str]]] = {}
    keys: list[str] = []
    last: Fragment | None = None
    for fragment, block in zip(wanted.fragments, wanted.blocks, strict=True):
        if fragment is not last:
            last = fragment
            if fragment not in named:
                prefix = PoolKey.build_prefix(metadata, layout_id, fragment)
                named[fragment] = prefix, contents[layout_id, fragment.table]
            prefix, digests = named[fragment]
        keys.append(prefix + digests[block])
    return keys


def _failure(order: LoadOrder, why: str) -> PoolLoaded:
    """A report that nothing of a load can be used."""
    first = min((s.start for s in order.segments), default=0)
    return PoolLoaded(order.request_id, why, bad_from=first)


def _cut(segment: Segment, plan: ReadPlan, pace: Pace) -> list[Segment]:
    """Cut a segment into chunks that end where objects end."""
    if segment.start == segment.stop:  # a state
        return [segment]
    span = plan.theirs.block_tokens(segment.group)
    step = max(span, pace.chunk_tokens // span * span)
    first = segment.start // span * span + step
    bounds = [segment.start, *range(first, segment.stop, step), segment.stop]
    return [replace(segment, start=a, stop=b) for a, b in pairwise(bounds)]
