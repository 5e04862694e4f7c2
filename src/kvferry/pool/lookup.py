# SPDX-License-Identifier: Apache-2.0
"""Lookups: what the pool holds of a sequence. The scheduler asks, and never waits.

A thread with its own store (`kvferry-lookup`) turns tokens into content hashes, asks the store one
batched question about all fragments in all known layouts, and finds the hit. Any error of the store
is a miss, and counted. Between questions, the thread keeps our own layout published, and checks
whether blocks that routers know of still exist (`EvictionWatch`). If the store's index is in this
host's memory (`at_once`), the scheduler's thread asks the store itself while the other thread does
not use it: that takes less time than passing the interpreter's lock to the other thread and back.

The scheduler asks once per step. The answer is `None` while the thread works, and a miss once the
deadline has passed.

    the thread dies                     a new one opens a store, and takes over open questions
    the thread is stuck in the store    lookups are misses at once, until it comes back
    past its deadline
    the store is still being opened     the same, once that takes longer than a lookup may
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from kvferry.errors import StoreError, text_of
from kvferry.pool.hits import Held, Hit, PoolReader, covered_prefix, longest_hit
from kvferry.pool.keys import ContentChain, Fragment, KeyMetadata, PoolKey, object_keys
from kvferry.pool.layout_registry import LayoutRegistry, PoolLayout
from kvferry.pool.objects import TableKind
from kvferry.pool.orders import PoolCounters, StoreOperation
from kvferry.pool.store import Bools, Store, require_answers

log = logging.getLogger("kvferry")

CACHE_SECONDS = 1.0  # an answer may be this old; the load notices evictions
CACHED_ANSWERS = 256
IDLE_SECONDS = 2.0  # between two checks of published layouts while no question comes
OPEN_AGAIN_SECONDS = 1.0  # after a failure to open the store
OLDEST_ANSWER_SECONDS = 10.0  # for a request that queued; longer than any step
STUCK_SECONDS = 1.0  # past the deadline of a call; then lookups do not wait for it
CLOSE_SECONDS = 1.0
# With `at_once`, the thread looks for layouts this often while questions come, so that the
# scheduler's thread need not. After a longer pause, the thread looks for them, and then answers.
TEND_SECONDS = 0.4
FRESH_SECONDS = 1.0
# The store hears of a request after this delay: by then the engine has given its device work to do,
# and the interpreter's lock is free. A long prompt takes longer to begin. The request's load ends,
# and its saves begin, later still.
TELL_SECONDS, TELL_TOKEN_SECONDS = 0.005, 0.5e-6
MOST_UNTOLD = 64  # beyond, the store hears of them even while questions wait


@dataclass(frozen=True, slots=True, eq=False)
class LookupAnswer:
    """What the pool holds of a sequence."""

    hit: Hit = field(default_factory=Hit)
    held: tuple[Held, ...] = ()
    layouts: dict[str, PoolLayout] = field(default_factory=dict)
    saved_tokens: int = 0  # leading tokens that the pool has in our own layout
    head_only: bool = False  # the first block is not there, and the others were not asked for
    failed: bool = False
    at: float = field(default_factory=time.monotonic)

    def hit_after(self, reader: PoolReader, count: int, computed: int) -> Hit:
        """The hit of a sequence of `count` tokens for a reader that has `computed` already."""
        if computed == 0:
            return self.hit
        return longest_hit(reader, self.held, reader.most_tokens(count), computed)


@dataclass(slots=True, eq=False)
class LookupQuestion:
    """A question, and its answer once a thread or the deadline has set it."""

    registry: LayoutRegistry
    chain: ContentChain
    tokens: Sequence[int]
    count: int  # tokens that the sequence had then; it may have grown since
    deadline: float
    first: bool = True  # False: asked again, because the first answer was too old, or too short
    full: bool = False  # ask for all blocks even if the pool lacks the first
    answer: LookupAnswer | None = None
    given_at: float | None = None  # when the scheduler got the answer


class Lookups:
    """Asks on behalf of requests. Only the scheduler's thread calls this; only `wait_answered`
    waits."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        reader: PoolReader,
        counters: PoolCounters,
        watch: EvictionWatch,
        lookup_seconds: float,
        *,
        at_once: bool = False,
    ) -> None:
        self._open, self._reader, self._counters = open_store, reader, counters
        self._full = frozenset(n.group for n in reader.needs if n.residency.kind == "full")
        self._watch, self._seconds, self._at_once = watch, lookup_seconds, at_once
        self._registry: LayoutRegistry
        self._asked: dict[str, LookupQuestion] = {}  # by request
        self._asked_at = -math.inf  # when the last question came
        self._queue: SimpleQueue[LookupQuestion | None] = SimpleQueue()
        self._answered = threading.Event()  # set with each answer of the thread
        self._using = threading.Lock()  # guards the store, and the fields down to `_recent`
        self._store: Store | None = None
        self._open_after = 0.0
        self._recent: OrderedDict[tuple[object, ...], LookupAnswer] = OrderedDict()
        self._opening_since: float | None = None
        self._busy_until: float | None = None  # deadline of the thread's current call of the store
        self._closed = False
        self._thread = threading.Thread()

    def use(self, metadata: KeyMetadata, ours: PoolLayout) -> None:
        """Look in this namespace from now on, and forget all answers."""
        self._registry = LayoutRegistry(metadata, ours, self._counters)
        self._asked.clear()
        self._queue.put(None)  # the thread publishes our layout
        self._keep_running()

    def lookup(
        self,
        request_id: str,
        chain: ContentChain,
        tokens: Sequence[int],
        count: int,
        *,
        full: bool = False,
    ) -> LookupAnswer | None:
        """What the pool holds of these `count` tokens, or None: ask again in the next step.

        full  ask for all blocks even if the pool lacks the first
        """
        now = time.monotonic()
        asked = self._asked.get(request_id)
        if asked is None or asked.count != count or _useless(asked, now, full):
            deadline, first = now + self._seconds, asked is None
            asked = LookupQuestion(self._registry, chain, tokens, count, deadline, first, full)
            self._asked[request_id] = asked
            self._counters.add("lookups")
            if self._held_up(now):
                self._counters.add("lookup_refused")
                asked.answer = LookupAnswer(failed=True)
            else:
                self._ask(asked, now)
        answer = asked.answer
        if answer is None and now >= asked.deadline:
            self._counters.add("lookup_timeouts")
            answer = asked.answer = LookupAnswer(failed=True)
        if answer is None:
            self._keep_running()
        elif asked.given_at is None:
            asked.given_at = now
        return answer

    def wait_answered(self, seconds: float) -> bool:
        """Wait for an answer, at most this long. Returns whether a question was open."""
        self._answered.clear()
        if all(asked.answer is not None for asked in self._asked.values()):
            return False
        self._answered.wait(seconds)
        return True

    def discard(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def close(self) -> None:
        """The thread ends as soon as its call of the store returns."""
        self._closed = True
        self._queue.put(None)
        self._asked.clear()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _keep_running(self) -> None:
        """Start the thread if none runs: the first, or one after a death. If that fails, questions
        wait."""
        if self._thread.is_alive() or self._closed:
            return
        self._thread = threading.Thread(target=self._run, name="kvferry-lookup", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            log.warning("no lookup is answered: %s", error)

    def _held_up(self, now: float) -> bool:
        """Whether opening or calling the store already takes longer than a lookup may."""
        opening, busy_until = self._opening_since, self._busy_until
        if opening is not None:
            return now > opening + self._seconds
        return busy_until is not None and now > busy_until + STUCK_SECONDS

    def _ask(self, asked: LookupQuestion, now: float) -> None:
        """Answer now if that needs no waiting; else the thread answers."""
        self._asked_at = now
        fresh = self._at_once and now < self._registry.refreshed_at + FRESH_SECONDS
        if fresh and self._using.acquire(blocking=False):
            try:
                if self._store is not None:
                    asked.answer = self._answer(asked)
            finally:
                self._using.release()
        self._queue.put(asked)  # to answer it, or to tell the store of it

    # The thread

    def _run(self) -> None:
        try:
            untold: deque[tuple[float, LookupQuestion]] = deque()  # when to tell the store of each
            while not self._closed:
                now = time.monotonic()
                due = bool(untold) and now >= untold[0][0] and self._queue.empty()
                if due or len(untold) > MOST_UNTOLD:
                    self._tell(untold.popleft()[1])
                busy = self._at_once and now < self._asked_at + IDLE_SECONDS
                if busy and now > self._registry.refreshed_at + TEND_SECONDS:
                    self._tend()
                seconds = TEND_SECONDS if busy else IDLE_SECONDS
                if untold:
                    seconds = max(0.0, untold[0][0] - now)
                try:
                    asked = self._queue.get(timeout=seconds)
                except Empty:
                    if untold:
                        continue
                    asked = None
                if asked is None:  # nothing to do, a new namespace, or the end
                    if not self._closed:
                        self._tend()
                    continue
                if asked.answer is None:
                    with self._using:
                        answer = self._answer(asked)
                    if asked.answer is None:  # otherwise the scheduler gave it up
                        asked.answer = answer
                    self._answered.set()
                after = TELL_SECONDS + TELL_TOKEN_SECONDS * asked.count if self._at_once else 0.0
                untold.append((time.monotonic() + after, asked))
        finally:
            self._busy_until = self._opening_since = None
            with self._using:
                store, self._store = self._store, None
                if store is not None:
                    store.close()

    def _opened(self) -> Store:
        """The store. No deadline runs while it is being opened."""
        if self._store is None:
            now = time.monotonic()
            if now < self._open_after:
                raise StoreError("the store could not be opened a moment ago")
            self._busy_until, self._opening_since = None, now
            try:
                self._store = self._open()
            except Exception:
                self._open_after = time.monotonic() + OPEN_AGAIN_SECONDS
                raise
            finally:
                self._opening_since = None
        return self._store

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Calls of the store. Any error is counted and logged as `what`, and the thread goes on."""
        try:
            yield
        except Exception as error:
            self._counters.add("lookup_errors")
            log.warning("%s: %s", what, text_of(error))
        finally:
            self._busy_until = None

    def _tend(self) -> None:
        """Keep our layout published, learn others, and look for evictions."""
        if time.monotonic() < self._open_after:
            return
        with self._using, self._guarded("the pool's layouts were not read"):
            store = self._opened()
            deadline = self._busy_until = time.monotonic() + IDLE_SECONDS
            self._registry.refresh(store, deadline)
            self._watch.look(store, deadline)
            return
        self._open_after = time.monotonic() + OPEN_AGAIN_SECONDS

    def _answer(self, asked: LookupQuestion) -> LookupAnswer:
        """Answer a question. Any error is a miss."""
        with self._guarded("a lookup failed, and is a miss"):
            self._opened()
            if time.monotonic() < asked.deadline:
                self._busy_until = asked.deadline
                return self._look_up(asked)
        return LookupAnswer(failed=True)

    def _look_up(self, asked: LookupQuestion) -> LookupAnswer:
        chain, reader, registry = asked.chain, self._reader, asked.registry
        most = reader.most_tokens(asked.count)
        store = self._opened()
        if threading.current_thread() is self._thread:  # it may wait; the scheduler's may not
            registry.refresh(store, asked.deadline)
        if not asked.full and self._begins_new(asked, store):
            return LookupAnswer(head_only=True)
        chain.cover(asked.tokens, asked.count)
        layouts = registry.layouts
        parts = sequence_keys(registry.metadata, chain, layouts)
        name = (most, *(part.keys[-1] for part in parts if part.keys))  # names all before
        recent = self._recent.get(name)
        if recent is not None and time.monotonic() - recent.at < CACHE_SECONDS:
            self._counters.add("lookup_cached")
            return recent
        keys = [key for part in parts for key in part.keys]
        self._counters.add("lookup_keys", len(keys))
        with self._counters.operation(StoreOperation("lookup_exists", len(keys))):
            found = store.exists(keys, asked.deadline)
            require_answers(found, keys)
        held = held_blocks(parts, found)
        hit = longest_hit(reader, held, most)
        saved = covered_prefix(held, reader.layout_id)
        answer = LookupAnswer(hit, tuple(held), {x.id: x for x in layouts}, saved)
        if hit.tokens < most // reader.align_tokens * reader.align_tokens:
            return answer  # not cached: the pool may have more in a moment
        self._recent[name] = answer
        if len(self._recent) > CACHED_ANSWERS:
            self._recent.popitem(last=False)
        return answer

    def _begins_new(self, asked: LookupQuestion, store: Store) -> bool:
        """Whether no layout has the first block of this sequence. If a group keeps all tokens,
        every hit needs that block. So most new prompts cost one question, however long they are."""
        chain, registry = asked.chain, asked.registry
        heads = _first_blocks(registry.metadata, tuple(registry.layouts), self._full)
        most = max((kind.block_tokens + kind.ahead for kind, _ in heads), default=0)
        chain.cover(asked.tokens, min(asked.count, most))
        keys = [
            prefix + content
            for kind, prefix in heads
            for content in chain.digests(kind.block_tokens, 1, kind.ahead)
        ]
        if not keys:
            return False
        with self._counters.operation(StoreOperation("lookup_exists", len(keys))):
            found = store.exists(keys, asked.deadline)
            require_answers(found, keys)
        self._counters.add("lookup_keys", len(keys))
        return not found.any()

    def _tell(self, asked: LookupQuestion) -> None:
        """Tell the store about an answered request, once, so that its eviction can learn."""
        answer = asked.answer
        if answer is None or answer.failed or not asked.first:
            return
        registry, align = asked.registry, self._reader.align_tokens
        most = self._reader.most_tokens(asked.count)
        used = {s.layout_id for s in answer.hit.segments}
        if not used or answer.hit.tokens < most // align * align:
            used.add(registry.ours.id)  # this engine will save the rest in its own layout
        # Without `_using`: eviction's lock may take a while, and lookups must not wait for it.
        with self._guarded("eviction was not told of a request"):
            asked.chain.cover(asked.tokens, asked.count)
            deadline = self._busy_until = time.monotonic() + IDLE_SECONDS
            for layout_id in sorted(used):
                layout = answer.layouts.get(layout_id, registry.ours)
                for part in sequence_keys(registry.metadata, asked.chain, [layout]):
                    self._opened().access(part.keys, deadline)
            self._watch.look(self._opened(), deadline)


@lru_cache(maxsize=8)
def _first_blocks(
    metadata: KeyMetadata, layouts: tuple[PoolLayout, ...], groups: frozenset[str]
) -> list[tuple[TableKind, str]]:
    """For each fragment with one of these groups: its table, and how its keys begin. Cached: every
    new request needs it."""
    return [
        (kind, PoolKey.build_prefix(metadata, layout.id, fragment))
        for layout in layouts
        for kind in layout.kinds
        for fragment in layout.fragments
        if fragment.table == kind.table and groups & set(kind.groups)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class FragmentKeys:
    """Keys of one fragment of a sequence's blocks, from the first block on."""

    layout: PoolLayout
    fragment: Fragment
    keys: list[str]


def sequence_keys(
    metadata: KeyMetadata, chain: ContentChain, layouts: Iterable[PoolLayout]
) -> list[FragmentKeys]:
    """The keys of all whole blocks of a sequence, in all these layouts."""
    parts = []
    for layout in layouts:
        for fragment in layout.fragments:
            contents = layout.contents(chain, fragment.table)
            keys = object_keys(metadata, layout.id, fragment, contents)
            parts.append(FragmentKeys(layout, fragment, keys))
    return parts


def held_blocks(parts: Sequence[FragmentKeys], found: Bools) -> list[Held]:
    """By layout and group: the blocks of which every fragment was found."""
    layouts: dict[str, PoolLayout] = {}
    tables: dict[tuple[str, int], Bools] = {}  # by layout and table
    start = 0
    for part in parts:
        here = found[start : start + len(part.keys)]
        start += len(part.keys)
        layouts[part.layout.id] = part.layout
        at = part.layout.id, part.fragment.table
        tables[at] = tables[at] & here if at in tables else here
    held = []
    for layout in layouts.values():
        for group in layout.model.groups:
            mine = [tables[layout.id, k.table] for k in layout.kinds if group.name in k.groups]
            span = layout.block_tokens(group.name)
            known = min(map(len, mine))  # tables keyed by later tokens have fewer keys
            whole = np.logical_and.reduce([found[:known] for found in mine])
            held.append(Held(layout.id, group.name, span, whole))
    return held


def _useless(asked: LookupQuestion, now: float, full: bool) -> bool:
    """Whether an answer is too short, or too old to promise anything. The second answer to a
    question counts however slow the scheduler's steps are, or a request could wait for ever."""
    if asked.answer is None or asked.answer.failed:
        return False
    if full and asked.answer.head_only:
        return True
    if asked.given_at is None:
        return asked.first and now - asked.answer.at > OLDEST_ANSWER_SECONDS
    return now - asked.given_at > CACHE_SECONDS


PERIOD_SECONDS = 2.0
BLOCKS_AT_A_TIME = 1024
TOLD_AT_A_TIME = 1 << 14  # after a reset; a router takes 20 ms for so many, and requests wait
MOST_BLOCKS = 1 << 18  # beyond, the oldest are forgotten, and never reported as gone


class EvictionWatch:
    """Blocks that routers know of, checked in turn. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Hashable, tuple[str, ...]] = OrderedDict()
        self._gone: dict[Hashable, None] = {}  # in the order in which they were missed
        self._next_at = 0.0

    def add(self, name: Hashable, keys: Sequence[str]) -> None:
        """Watch a block. It exists while all these objects exist."""
        with self._lock:
            self._gone.pop(name, None)  # it is back before routers have heard that it was gone
            self._blocks[name] = tuple(keys)
            if len(self._blocks) > MOST_BLOCKS:
                self._blocks.popitem(last=False)

    def lose_all(self) -> None:
        """This engine does not find these blocks any more. The store still has them, and so have
        engines with the former weights, until they are reset too."""
        with self._lock:
            self._gone |= dict.fromkeys(self._blocks)
            self._blocks.clear()

    @property
    def has_gone(self) -> bool:
        return bool(self._gone)

    def take_gone(self) -> list[Any]:
        """The next blocks for routers. There may be more."""
        with self._lock:
            gone = list(islice(self._gone, TOLD_AT_A_TIME))
            for name in gone:
                del self._gone[name]
            return gone

    def look(self, store: Store, deadline: float) -> None:
        """Ask the store about the next blocks, if it is time. Raises the store's errors."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_at or not self._blocks:
                return
            self._next_at = now + PERIOD_SECONDS
            names = list(islice(self._blocks, BLOCKS_AT_A_TIME))
            keys = [self._blocks[name] for name in names]
            for name in names:
                self._blocks.move_to_end(name)
        asked = [key for of_block in keys for key in of_block]
        there = store.exists(asked, deadline)
        require_answers(there, asked)
        heads = np.cumsum([0, *map(len, keys)])[:-1]
        whole = np.logical_and.reduceat(there, heads).tolist()
        with self._lock:
            for name, known, is_there in zip(names, keys, whole, strict=True):
                if not is_there and self._blocks.get(name) == known:
                    del self._blocks[name]
                    self._gone[name] = None
