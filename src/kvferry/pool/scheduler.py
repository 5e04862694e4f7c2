# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the pool, for any engine: what to look up, load, save and pin.

A request is tracked from its first lookup to its end, through chunked prefill, preemption and
abort.

- *match*: how many tokens beyond the local ones the pool has, in whole blocks. `None` while the
  lookup is under way. 0 where computing is faster (`kvferry.pool.cost`).
- *load*: ordered once the request has blocks. After a failed load, the request never matches again.
  A load is over when every rank has ended it, even if its request is gone. If it hangs on a rank,
  the store may still write into its blocks: they stay pinned, in quarantine, until the last rank
  has ended it.
- *save*: a block of tokens is ordered in the step that makes its last token final, or once the
  tokens are known on which a draft model's bytes depend. Only the engine knows when a recurrent
  state is whole, and names its block then. Blocks are pinned until every rank has reported the job.
  If too many would be pinned, the request tries again in its next step, at the latest when it ends.
  A state comes once: it has the room of a request that ends, or is not saved.
- *reset*: the weights have changed. Blocks computed before are never saved under the new namespace.

The scheduler's thread calls all methods. They never wait for the store, except `wait_for_lookup`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain as joined
from itertools import compress, count
from math import lcm
from typing import Any, Literal

from kvferry.errors import DescriptionError
from kvferry.layout.model import Residency
from kvferry.pool.cost import LoadChoice
from kvferry.pool.hits import Hit, Need, PoolReader, Segment
from kvferry.pool.keys import ContentChain, Extra, KeyMetadata, object_keys
from kvferry.pool.layout_registry import PoolLayout
from kvferry.pool.lookup import EvictionWatch, Lookups
from kvferry.pool.objects import TableKind, block_span
from kvferry.pool.orders import (
    LaterTexts,
    LoadOrder,
    PoolCounters,
    PoolLoaded,
    Saved,
    SaveOrder,
    Scope,
    TableBlocks,
)
from kvferry.pool.store import Store

log = logging.getLogger("kvferry")


class PoolScheduler:
    def __init__(
        self,
        limits: PoolLimits,
        open_store: Callable[[], Store],
        *,
        pin: Callable[[Sequence[int]], None],
        unpin: Callable[[Sequence[int]], None],
        null_block: int | None = 0,
        choice: LoadChoice | None = None,
    ) -> None:
        """choice  learns from the steps that the engine reports; without any, hits are loaded"""
        self.limits, self.counters = limits, PoolCounters()
        self.choice = choice or LoadChoice()
        self._open_store = open_store
        self._null = null_block
        self._lookups: Lookups | None = None  # once it has started
        self._epoch = ""  # of the last reset
        self._trackers: dict[str, RequestTracker] = {}
        self._jobs: dict[int, SaveJob] = {}  # saves that some rank has not reported, by job id
        self._job_ids = count()
        self._saving = Pins(pin, unpin)  # blocks of these jobs
        self._save_rate = SaveRate()
        self._loads: dict[str, LoadOrder] = {}  # loads that some rank has not reported, by request
        self._quarantine = Pins(pin, unpin)  # blocks of hung loads, by request
        self._has_states = False
        self._keeps_old = False  # the engine's own cache may hold blocks of replaced weights
        self._orders = PoolOrders()
        self._told: set[str] = set()
        self.watch = EvictionWatch()  # of blocks by hash and table

    # Start

    def start(
        self,
        metadata: KeyMetadata,
        ours: PoolLayout,
        ranks: int,
        *,
        full_residency: bool = False,
        computes_last_again: bool = False,
    ) -> None:
        """Begin, once all ranks have described themselves.

        full_residency       the engine keeps every block, also of layers with a window
        computes_last_again  where all tokens of a sequence were loaded, the engine computes the
                             last one again (not with states, which would advance twice)
        """
        self.layout, self._ranks = ours, ranks
        groups = ours.model.groups
        spans = [block_span(group, ours.shape) for group in groups]
        needs = [
            Need(g.name, Residency() if full_residency and not g.is_state else g.residency, span)
            for g, span in zip(groups, spans, strict=True)
        ]
        self.align_tokens = lcm(*spans)
        leaves_last = not computes_last_again or any(need.last_needs_more for need in needs)
        self._reader = PoolReader(tuple(needs), self.align_tokens, ours.id, leaves_last)
        self._least_tokens = self.align_tokens + leaves_last  # of a sequence that can have a hit
        self._has_states = any(g.is_state for g in groups)
        self._entries = {
            g.name: (len(g.layers) * g.entry_bytes, g.tokens_per_entry) for g in groups
        }
        self._unit_blocks = sum(
            self.align_tokens // kind.block_tokens
            for kind in ours.kinds
            if kind.residency.kind != "state"
        )
        self._use(replace(metadata, epoch=self._epoch))

    def _use(self, metadata: KeyMetadata) -> None:
        """Look up, save and load in this namespace from now on."""
        self.metadata = metadata
        self._tell({self.layout.id: self.layout})
        if self._lookups is None:
            self._lookups = Lookups(
                self._open_store,
                self._reader,
                self.counters,
                self.watch,
                self.limits.lookup_seconds,
                at_once=self.limits.lookup_at_once,
            )
        self._lookups.use(metadata, self.layout)

    @property
    def started(self) -> bool:
        return self._lookups is not None

    def keys_of(self, table: int, contents: Sequence[str]) -> list[list[str]]:
        """For each of these blocks, the keys of all its fragments in our layout."""
        fragments = [f for f in self.layout.fragments if f.table == table]
        columns = [object_keys(self.metadata, self.layout.id, f, contents) for f in fragments]
        return [list(keys) for keys in zip(*columns, strict=True)]

    def _tell(self, layouts: dict[str, PoolLayout]) -> None:
        """Send ranks the layout records that they lack."""
        new = {name: layout.encoded for name, layout in layouts.items() if name not in self._told}
        self._told |= set(new)
        before = self._orders.scope.records if self._orders.scope is not None else {}
        self._orders.scope = Scope(self.metadata, self.layout.id, {**before, **new})

    def reset(self, *, keeps_blocks: bool = False) -> None:
        """Use a new namespace, because the engine's weights have changed.

        keeps_blocks  the engine's own cache was not emptied. Until a reset that finds it empty, a
                      request that hits it saves nothing
        """
        self._epoch = secrets.token_hex(8)
        log.info("the pool's namespace changes (epoch %s)", self._epoch)
        self._keeps_old = keeps_blocks
        if self._lookups is None:
            return
        for tracker in self._trackers.values():
            tracker.saved_tokens, tracker.load, tracker.old = 0, None, True
        for order in self._orders.saves:  # ranks would name these blocks by the new namespace
            self.saved([Saved(order.job_id)] * self._ranks)
        self._orders.saves.clear()
        for job in self._jobs.values():
            job.tag = None  # no request finds these blocks any more
        self.watch.lose_all()
        self._use(replace(self.metadata, epoch=self._epoch))

    def block_tokens(self, table: int) -> int:
        return self.layout.kind(table).block_tokens

    # Requests

    def track(self, request_id: str, extras: Callable[[], Sequence[Extra]]) -> RequestTracker:
        tracker = self._trackers.get(request_id)
        if tracker is None:
            tracker = self._trackers[request_id] = RequestTracker(ContentChain(extras()))
        return tracker

    def arrived(self, request_id: str, tracker: RequestTracker, tokens: Sequence[int]) -> None:
        """Look a new request up, so that the answer is there when the engine schedules it."""
        count = len(tokens)
        lookups = self._lookups_for(tracker, count)
        if lookups is not None:
            lookups.lookup(request_id, tracker.chain, tokens, count)

    def _lookups_for(self, tracker: RequestTracker, count: int) -> Lookups | None:
        """None: a request of `count` tokens gets nothing from the pool."""
        if self._lookups is None or not self.limits.lookup or count < self._least_tokens:
            return None
        return None if tracker.over or tracker.loading is not None else self._lookups

    def begins(self, tracker: RequestTracker, computed: int) -> None:
        """The request has no blocks, or none any more, and `computed` tokens in the engine's own
        cache. It loads or computes everything else from here on. With states, the engine may use
        some tokens more, of a part of a block."""
        tracker.load, tracker.declined, tracker.final = None, "", 0
        tracker.old = self._keeps_old and (tracker.old or computed > 0 or self._has_states)

    def matched(
        self, request_id: str, tracker: RequestTracker, tokens: Sequence[int], computed: int
    ) -> int | None:
        """Tokens beyond the computed ones to load from the pool; None: ask again."""
        self.begins(tracker, computed)
        if tracker.failed:
            # An engine may wait for blocks at a request whose load has failed, while loaded ones
            # behind it hold them. With this answer, it looks at those first.
            tracker.failed = False
            return None
        count = len(tokens)
        lookups = self._lookups_for(tracker, count)
        if lookups is None:
            return 0
        answer = lookups.lookup(request_id, tracker.chain, tokens, count, full=computed > 0)
        if answer is None:
            return None
        tracker.saved_tokens = max(tracker.saved_tokens, answer.saved_tokens)
        hit = answer.hit_after(self._reader, count, computed)
        found = hit.tokens - computed
        if found < 1:
            return 0
        least = self.limits.min_load_tokens
        if least != "auto":
            tracker.declined = "short" if found < least else ""
        elif self.choice.loads.enough:
            load_bytes, rest = self._bytes_of(hit.segments), count - hit.tokens
            tracker.declined = self.choice.why_not(found, load_bytes, rest)
        if tracker.declined:
            return 0
        tracker.load = LoadSpec(hit, computed, answer.layouts)
        return found

    def _bytes_of(self, segments: Iterable[Segment]) -> int:
        """Bytes of these segments, over all layers and ranks. A state is one entry."""
        total = 0
        for segment in segments:
            entry_bytes, tokens = self._entries[segment.group]
            total += entry_bytes * max(1, (segment.stop - segment.start) // tokens)
        return total

    def promised(self, request_id: str) -> bool:
        tracker = self._trackers.get(request_id)
        return tracker is not None and tracker.load is not None

    def allocated(self, request_id: str, tables: Tables, external: int) -> None:
        """The request has blocks. Load `external` tokens into them; 0: load nothing after all."""
        tracker = self._trackers.get(request_id)
        if tracker is None:
            return
        if tracker.declined:
            self.counters.add(f"declined_{tracker.declined}")
        spec, tracker.load, tracker.declined = tracker.load, None, ""
        if spec is None or external <= 0:
            return
        segments = spec.hit.segments
        if external != spec.tokens:
            log.error(
                "the engine asks for %d tokens, but the pool promised %d: the engine computes them",
                external,
                spec.tokens,
            )
            segments = ()  # a load without segments fails
        used = {name: spec.layouts[name] for name in {s.layout_id for s in segments}}
        self._tell(used)
        contents = {
            (layout.id, kind.table): tuple(layout.contents(tracker.chain, kind.table))
            for layout in used.values()
            for kind in layout.kinds
        }
        tracker.loading = LoadOrder(
            request_id,
            segments,
            contents,
            tuple(tuple(ids) for ids in tables),
            self.limits.load_seconds,
        )
        self._loads[request_id] = tracker.loading
        self._orders.loads.append(tracker.loading)
        self.choice.loads.ordered(request_id, self._bytes_of(segments))
        self.counters.add("hit_tokens", external)

    def computed(
        self,
        request_id: str,
        tokens: Sequence[int],
        final: int,
        tables: Callable[[], Tables],
        *,
        states: Sequence[WholeState] = (),
        tag: Any = None,
    ) -> None:
        """After this step, `final` tokens of a request are computed. Save the blocks they fill.

        states  recurrent states that are whole after this step
        """
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.old or self._lookups is None or not self.limits.save:
            return
        tracker.final = final
        if not states and final < self._aligned(tracker.saved_tokens) + self.align_tokens:
            return  # most steps of a request that decodes fill no block
        self._save_up_to(tracker, tokens, tables, self.limits.most_pinned_blocks, states, tag)

    def _save_up_to(
        self,
        tracker: RequestTracker,
        tokens: Sequence[int],
        tables: Callable[[], Tables],
        most: int,
        states: Sequence[WholeState],
        tag: Any,
    ) -> None:
        """Order saves of final blocks that were not ordered yet, while few enough are pinned."""
        final = min(tracker.final, len(tokens))
        ahead = self.layout.ahead
        # A draft's last slots are final, and their keys known, some tokens later than the target's.
        stop = self._aligned(max(0, min(final - max(0, ahead - 1), len(tokens) - ahead)))
        start = min(stop, self._aligned(tracker.saved_tokens))
        chain, kinds = tracker.chain, self.layout.kinds
        last = start + self._units(most) * self.align_tokens
        # The engine offers a state once, so more may be pinned for it, as when a request is over.
        lost = len(states) > max(0, self._room(self.limits.most_pinned_at_end))
        if last < stop or lost:
            self.counters.add("save_postponed")
        states, stop = () if lost else states, min(last, stop)
        if start == stop and not states:
            return
        try:
            chain.cover(tokens, min(len(tokens), final + ahead))
        except DescriptionError as error:  # an engine without a tokenizer takes any number
            log.warning("a request is not saved to the pool: %s", error)
            tracker.old = True
            return
        blocks = list(states_to_save(kinds, chain, states, self._null))
        if start < stop:
            blocks += blocks_to_save(kinds, chain, start, stop, tables(), self._null)
            tracker.saved_tokens = stop
        if blocks:
            self._save(tuple(blocks), tag)

    def _units(self, most: int) -> int:
        """How many times `align_tokens` tokens may be saved now. If one unit has more than `most`
        blocks, it is saved when no others are pinned."""
        room = self._room(most)
        if room < min(self._unit_blocks, most):
            return 0
        return max(1, room // max(1, self._unit_blocks))

    def _room(self, most: int) -> int:
        """How many more blocks may be pinned."""
        if len(self._jobs) >= MOST_JOBS:
            return 0
        return max(most, self._soon()) - self._saving.blocks

    def _soon(self) -> int:
        """Blocks that the store saves in a moment; 0 while the store seems to hang."""
        oldest = next(iter(self._jobs.values()), None)
        if oldest is not None and time.monotonic() > oldest.at + HEALTHY_SECONDS:
            return 0
        soon = self._save_rate.blocks_in(SOON_SECONDS)
        return min(soon, self.limits.most_pinned_soon)

    def _aligned(self, tokens: int) -> int:
        return tokens // self.align_tokens * self.align_tokens

    def _save(self, tables: tuple[TableBlocks, ...], tag: Any) -> None:
        """Order a job for these blocks."""
        job_id = next(self._job_ids)
        self._jobs[job_id] = SaveJob(tables, tag)
        block_ids = list(joined.from_iterable(t.block_ids for t in tables))
        self._saving.add(job_id, block_ids, self._ranks)
        self._orders.saves.append(SaveOrder(job_id, tables, self.limits.save_seconds))
        self.counters.add("save_jobs")

    def finished(
        self, request_id: str, tokens: Sequence[int] = (), tables: Tables = (), *, tag: Any = None
    ) -> None:
        """A request is over. Its pinned blocks stay pinned until their jobs have ended.

        If it still has its blocks, those whose saves were postponed are ordered now, though more
        may be pinned than otherwise. Only tokens count that a step was told to compute. The last
        token was sampled, and its place may hold what a rejected draft left there.
        """
        tracker = self._trackers.pop(request_id, None)
        if self._lookups is None:
            return
        self._lookups.discard(request_id)
        if tracker is not None and tables and tracker.final and not tracker.old:
            tracker.final = min(tracker.final, len(tokens) - 1)
            most = self.limits.most_pinned_at_end
            self._save_up_to(tracker, tokens, lambda: tables, most, (), tag)

    def wait_for_lookup(self, seconds: float) -> bool:
        """For a step that computes nothing: wait until a lookup is answered, at most this long.
        Returns whether one was open."""
        return self._lookups is not None and self._lookups.wait_answered(seconds)

    # Reports

    def take_orders(self) -> PoolOrders:
        orders, self._orders = self._orders, PoolOrders()
        return orders

    def saved(self, reports: Iterable[Saved]) -> list[SaveJob]:
        """Take ranks' reports about save jobs. Returns the jobs that are over now."""
        over = []
        for report in reports:
            job = self._jobs.get(report.job_id)
            if job is None:
                log.error("a rank reported save job %d, which is not open", report.job_id)
                continue
            job.failed.update(report.failed)
            job.paused |= report.paused
            job.seconds = max(job.seconds, report.seconds)  # the slowest rank keeps the blocks
            job.put = max(job.put, report.put)
            if self._saving.release(report.job_id):
                over.append(self._jobs.pop(report.job_id))
                self._save_rate.add(job)
        return over

    def loaded(self, reports: Iterable[PoolLoaded]) -> None:
        """Take one rank's reports about loads."""
        for report in reports:
            tracker = self._trackers.get(report.request_id)
            if not report.ok and tracker is not None:
                tracker.over = tracker.failed = True  # it computes the rest, and saves that again
                tracker.saved_tokens = min(tracker.saved_tokens, report.bad_from or 0)
            self.choice.loads.reported(report.request_id, report.seconds, failed=not report.ok)
            order = self._loads.get(report.request_id)
            if report.hung and order is not None:
                ids = [i for table in order.tables for i in table if i != self._null]
                self._quarantine.add(report.request_id, ids, ranks=1)

    def load_over(self, request_id: str) -> None:
        """All ranks have reported a request's load. The request itself may be gone."""
        self._loads.pop(request_id, None)
        self.choice.loads.over(request_id)
        tracker = self._trackers.get(request_id)
        if tracker is not None and tracker.loading is not None:
            stop = max((s.stop for s in tracker.loading.segments), default=0)
            if not tracker.over:  # these blocks came from the pool, and need no save
                tracker.saved_tokens = max(tracker.saved_tokens, self._aligned(stop))
            tracker.loading = None

    def recovered(self, request_ids: Iterable[str]) -> None:
        """Hung loads that have ended on some rank."""
        for request_id in request_ids:
            self._quarantine.release(request_id)

    @property
    def pinned_blocks(self) -> int:
        return self._saving.blocks + self._quarantine.blocks

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of loads that hang. The engine must not reuse them until the loads have ended."""
        return self._quarantine.blocks

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping to hear of ended jobs."""
        return bool(self._jobs or self._orders.saves or self._orders.loads)

    def close(self) -> None:
        if self._lookups is not None:
            self._lookups.close()
            self._lookups = None


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Time limits of lookups, loads and saves, and how many blocks may be pinned."""

    lookup_seconds: float = 2.0
    load_seconds: float = 60.0
    save_seconds: float = 60.0
    most_pinned_blocks: int = 1 << 30
    most_pinned_at_end: int = 1 << 30  # when a request is over
    most_pinned_soon: int = 1 << 30  # if the store saves them in a moment
    min_load_tokens: int | Literal["auto"] = "auto"
    lookup: bool = True
    lookup_at_once: bool = False  # the store's index is this host's memory
    save: bool = True


@dataclass(slots=True)
class LoadSpec:
    """The promise to a request: tokens that it can load from the pool."""

    hit: Hit
    computed: int
    layouts: dict[str, PoolLayout] = field(repr=False)

    @property
    def tokens(self) -> int:
        return self.hit.tokens - self.computed


@dataclass(slots=True)
class RequestTracker:
    """The pool's state of one request."""

    chain: ContentChain
    saved_tokens: int = 0  # leading tokens that are in the pool, or ordered to be saved
    final: int = 0  # leading tokens, drafts too, that a step was told to compute into its blocks
    load: LoadSpec | None = None  # promised, not yet ordered
    declined: str = ""  # why a hit was not promised
    loading: LoadOrder | None = None
    over: bool = False  # a load failed: the request never matches again
    failed: bool = False  # a load, and the engine has not asked since
    old: bool = False  # it holds blocks of replaced weights, or has no keys, and saves nothing


@dataclass(slots=True)
class PoolOrders:
    scope: Scope | None = None
    saves: list[SaveOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)


# Saves

MOST_JOBS = 64  # saves under way; more would only wait for the store
Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class WholeState:
    """A block that holds the state after exactly `tokens` tokens, and stays unchanged."""

    table: int
    block_id: int
    tokens: int


def blocks_to_save(
    kinds: Iterable[TableKind],
    chain: ContentChain,
    start_tokens: int,
    stop_tokens: int,
    tables: Tables,
    null_block: int | None,
) -> Iterator[TableBlocks]:
    """The full blocks of tokens of each table that the request still has. Their contents are hashed
    when a rank asks for them: its step has begun by then."""
    for kind in kinds:
        if kind.residency.kind == "state" or kind.table >= len(tables):
            continue
        first, stop = start_tokens // kind.block_tokens, stop_tokens // kind.block_tokens
        ids = tuple(tables[kind.table][first:stop])
        numbers = tuple(range(first, first + len(ids)))
        if null_block in ids:  # a window has left them
            kept = [block != null_block for block in ids]
            numbers, ids = tuple(compress(numbers, kept)), tuple(compress(ids, kept))
        if ids:
            contents = LaterTexts(partial(_contents_of, kind, chain, numbers))
            yield TableBlocks(kind.table, numbers, ids, contents)


def _contents_of(kind: TableKind, chain: ContentChain, numbers: Sequence[int]) -> list[str]:
    digests = chain.digests(kind.block_tokens, numbers[-1] + 1, kind.ahead)
    return [digests[number] for number in numbers]


def states_to_save(
    kinds: Iterable[TableKind],
    chain: ContentChain,
    states: Sequence[WholeState],
    null_block: int | None,
) -> Iterator[TableBlocks]:
    """The states at the ends of blocks. No lookup would find other states."""
    for kind in kinds:
        span = kind.block_tokens
        mine = [
            state
            for state in states
            if state.table == kind.table
            and kind.residency.kind == "state"
            and state.block_id != null_block
            and 0 < state.tokens <= chain.tokens
            and state.tokens % span == 0
        ]
        if mine:
            numbers = tuple(state.tokens // span - 1 for state in mine)
            contents = chain.digests(span, max(numbers) + 1)
            yield TableBlocks(
                kind.table,
                numbers,
                tuple(state.block_id for state in mine),
                tuple(contents[n] for n in numbers),
            )


@dataclass(slots=True)
class SaveJob:
    """Blocks that ranks save. It is over when every rank has reported it."""

    tables: tuple[TableBlocks, ...]
    tag: Any  # the caller's; None after a reset
    failed: set[tuple[int, int]] = field(default_factory=set)  # not stored, as (table, number)
    seconds: float = 0.0  # of the slowest rank
    put: int = 0  # blocks that a rank put into the store
    paused: bool = False  # the store failed on some rank
    at: float = field(default_factory=time.monotonic)


# Blocks that the store saves in this time may be pinned beyond the limit: a running request keeps
# its blocks in any case.
SOON_SECONDS = 0.1
HEALTHY_SECONDS = 2.0  # age of the oldest job, with its step; a slower store may hang


class SaveRate:
    """How fast a rank saves blocks: the best rate of the last jobs."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=8)

    def add(self, job: SaveJob) -> None:
        """Learn from a job that is over. If the store failed, this erases what was learned."""
        if job.paused:
            self._seen.clear()
        elif job.put and job.seconds > 0:
            self._seen.append(job.put / job.seconds)

    def blocks_in(self, seconds: float) -> int:
        return int(max(self._seen, default=0.0) * seconds)


@dataclass(slots=True)
class _Pinned:
    block_ids: list[int]
    ranks: int = 0  # that still use the blocks


class Pins:
    """Blocks that the engine must not reuse yet, because ranks use them for a job or a load."""

    def __init__(
        self, pin: Callable[[Sequence[int]], None], unpin: Callable[[Sequence[int]], None]
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._pinned: dict[Hashable, _Pinned] = {}
        self.blocks = 0

    def add(self, name: Hashable, block_ids: list[int], ranks: int) -> None:
        """`ranks` more ranks use these blocks."""
        pinned = self._pinned.get(name)
        if pinned is None:
            self._pin(block_ids)
            self.blocks += len(block_ids)
            pinned = self._pinned[name] = _Pinned(block_ids)
        pinned.ranks += ranks

    def release(self, name: Hashable) -> bool:
        """One rank no longer uses the blocks. True if it was the last one."""
        pinned = self._pinned.get(name)
        if pinned is None:
            return False
        pinned.ranks -= 1
        if pinned.ranks:
            return False
        del self._pinned[name]
        self.blocks -= len(pinned.block_ids)
        self._unpin(pinned.block_ids)
        return True
