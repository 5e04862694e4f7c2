"""Lookups off the scheduler's critical path: a server on a thread of its own.

It turns tokens into content hashes, asks the store one batched question for all fragments of all
known layouts, and finds the hit. What goes wrong in it (the store cannot be reached, answers
nonsense, raises anything) is a miss, and counted. Between questions it keeps our own layout
published, and looks whether blocks that routers were told of are still there. Who asks it, and what
becomes of a server that is stuck, is in `lookup_client`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from kvferry.errors import StoreError
from kvferry.pool.book import LayoutBook
from kvferry.pool.chain import ContentChain
from kvferry.pool.database import ChunkedTokenDatabase
from kvferry.pool.hits import Held, Hit, Need, covered_prefix, longest_hit
from kvferry.pool.keys import KeyMetadata
from kvferry.pool.records import PoolLayout
from kvferry.pool.stats import PoolCounters
from kvferry.pool.store import Store
from kvferry.pool.watch import Watch

log = logging.getLogger("kvferry")

CACHE_SECONDS = 1.0  # an answer may be this old: evictions are noticed by the load
CACHED_ANSWERS = 256
IDLE_SECONDS = 2.0  # between two looks at published layouts while nobody asks
OPEN_AGAIN_SECONDS = 1.0  # a store that could not be opened is tried again after this


@dataclass(frozen=True, slots=True)
class Reader:
    """What a hit depends on at the reader."""

    needs: tuple[Need, ...]
    align_tokens: int
    layout_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What the pool holds of a sequence."""

    hit: Hit = field(default_factory=Hit)
    held: tuple[Held, ...] = ()
    layouts: dict[str, PoolLayout] = field(default_factory=dict)
    saved_tokens: int = 0  # at the front, in our own layout
    failed: bool = False
    at: float = field(default_factory=time.monotonic)

    def hit_after(self, reader: Reader, most_tokens: int, computed: int) -> Hit:
        """The hit for a reader that has `computed` tokens already."""
        if computed == 0 or self.failed:
            return self.hit
        return longest_hit(
            reader.needs,
            self.held,
            most_tokens=most_tokens,
            align_tokens=reader.align_tokens,
            computed=computed,
            preferred=reader.layout_id,
        )


@dataclass(slots=True, eq=False)
class Asked:
    """A question on its way."""

    chain: ContentChain
    tokens: Sequence[int]
    count: int
    most_tokens: int
    deadline: float
    first: bool = True  # not asked again because the answer grew old
    answer: Answer | None = None
    given_at: float | None = None  # when the scheduler got it


class LookupKeyServer:
    """One thread with one store. `ask` returns at once; answers appear in what was asked."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        metadata: KeyMetadata,
        ours: PoolLayout,
        reader: Reader,
        counters: PoolCounters,
        watch: Watch[Any] | None = None,
    ) -> None:
        self._open, self._reader, self._counters = open_store, reader, counters
        self._watch: Watch[Any] = watch or Watch()
        self._book = LayoutBook(metadata, ours, counters)
        self._database = ChunkedTokenDatabase(metadata, ours)
        self._queue: SimpleQueue[Asked | None] = SimpleQueue()
        self._store: Store | None = None
        self._open_after = 0.0
        self._recent: OrderedDict[tuple[str, int], Answer] = OrderedDict()
        self._closed = False
        self.busy_until: float | None = None  # deadline of what it does now
        self.opening_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-lookup", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # not alive: it is replaced, as a dead one is
            log.warning("a lookup server does not start: %s", error)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ask(self, asked: Asked) -> None:
        self._queue.put(asked)

    def drain(self) -> list[Asked]:
        """Questions that nobody has begun to answer."""
        left: list[Asked] = []
        while True:
            try:
                asked = self._queue.get_nowait()
            except Empty:
                return left
            if asked is not None:
                left.append(asked)

    def close(self, seconds: float = 0.0) -> None:
        """Let the thread end as soon as the store lets it."""
        self._closed = True
        self._queue.put(None)
        if seconds and self.alive:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._tend()
            while not self._closed:
                try:
                    asked = self._queue.get(timeout=IDLE_SECONDS)
                except Empty:
                    self._tend()
                    continue
                if asked is not None:
                    answer = self._answer(asked)
                    if asked.answer is None:  # else the client gave it up
                        asked.answer = answer
                    if asked.first and not answer.failed:
                        self._tell(asked, answer)
        finally:
            if self._store is not None:
                self._store.close()

    def _opened(self) -> Store:
        """The store; no deadline runs while it is opened."""
        if self._store is None:
            now = time.monotonic()
            if now < self._open_after:
                raise StoreError("the store could not be opened a moment ago")
            self.busy_until, self.opening_since = None, now
            try:
                self._store = self._open()
            except Exception:
                self._open_after = time.monotonic() + OPEN_AGAIN_SECONDS
                raise
            finally:
                self.opening_since = None
        return self._store

    def _tend(self) -> None:
        """Keep our layout published, and know the others'."""
        if time.monotonic() < self._open_after:
            return
        try:
            store = self._opened()
            deadline = self.busy_until = time.monotonic() + IDLE_SECONDS
            self._book.refresh(store, deadline)
            self._watch.look(store, deadline)
        except Exception as error:
            self._open_after = time.monotonic() + OPEN_AGAIN_SECONDS
            self._counters.add("lookup_errors")
            log.warning("the pool cannot be looked after: %s: %s", type(error).__name__, error)
        finally:
            self.busy_until = None

    def _answer(self, asked: Asked) -> Answer:
        """Always an answer: whatever goes wrong is a miss."""
        try:
            self._opened()
            if time.monotonic() >= asked.deadline:
                return Answer(failed=True)
            self.busy_until = asked.deadline
            return self._look_up(asked)
        except Exception as error:
            self._counters.add("lookup_errors")
            log.warning("a lookup failed, and is a miss: %s: %s", type(error).__name__, error)
            return Answer(failed=True)
        finally:
            self.busy_until = None

    def _look_up(self, asked: Asked) -> Answer:
        chain, reader = asked.chain, self._reader
        chain.cover(asked.tokens, asked.count)
        store = self._opened()
        self._book.refresh(store, asked.deadline)
        name = (chain.signature(), asked.most_tokens)
        recent = self._recent.get(name)
        if recent is not None and time.monotonic() - recent.at < CACHE_SECONDS:
            self._counters.add("lookup_cached")
            return recent
        layouts = self._book.layouts
        question = self._database.question(chain, layouts)
        self._counters.add("lookup_keys", len(question.keys))
        held = question.answer(store.exists(question.keys, asked.deadline))
        hit = longest_hit(
            reader.needs,
            held,
            most_tokens=asked.most_tokens,
            align_tokens=reader.align_tokens,
            preferred=reader.layout_id,
        )
        saved = covered_prefix(held, reader.layout_id)
        answer = Answer(hit, tuple(held), {x.id: x for x in layouts}, saved)
        self._recent[name] = answer
        if len(self._recent) > CACHED_ANSWERS:
            self._recent.popitem(last=False)
        return answer

    def _tell(self, asked: Asked, answer: Answer) -> None:
        """Tell the store about a request, once, when it has its answer: eviction learns from it."""
        ours, align = self._book.ours, self._reader.align_tokens
        used = {s.layout_id for s in answer.hit.segments}
        if not used or answer.hit.tokens < asked.most_tokens // align * align:
            used.add(ours.id)  # what is missing will be put in our own layout
        deadline = self.busy_until = time.monotonic() + IDLE_SECONDS
        try:
            for layout_id in sorted(used):
                layout = answer.layouts.get(layout_id, ours)
                for _, keys in self._database.question(asked.chain, [layout]).by_fragment():
                    self._opened().access(keys, deadline)
            self._watch.look(self._opened(), deadline)
        except Exception as error:
            self._counters.add("lookup_errors")
            log.warning("a request was not told to the store: %s: %s", type(error).__name__, error)
        finally:
            self.busy_until = None
