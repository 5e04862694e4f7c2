"""The scheduler's side of the pool, for any engine: what to look up, load, save and pin.

A request is tracked from its first lookup to its end, through chunked prefill, preemption and
abort.

- *match*: how many tokens beyond the local ones the pool has, in whole blocks. The last token is
  never among them, because one has to be computed. `None` while the lookup is under way.
- *load*: ordered once the request has blocks. After a failed load, the request never matches again.
  A load is over when every rank has ended it, even if its request is gone. If it hangs on a rank,
  the store may still write into its blocks. They stay pinned, in quarantine, until the last rank
  has ended it.
- *save*: a block of tokens is ordered in the step that makes its last token final. Only the engine
  knows when a recurrent state is whole, and names its block then. Blocks are pinned until every
  rank has reported the job. If too many are pinned already, nothing is ordered, and the request
  tries again in its next step.
- *reset*: the weights have changed. Blocks computed before are never saved under the new namespace:
  neither those of running requests, nor those that the engine keeps and hits again.

The scheduler's thread calls all methods. They take plain values, and never wait for the store.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

from kvferry.layout.model import Residency
from kvferry.pool.hits import Hit, Need, Reader, Segment
from kvferry.pool.keys import ContentChain, Extra, KeyMetadata, object_keys
from kvferry.pool.layout_registry import PoolLayout
from kvferry.pool.lookup import EvictionWatch, LookupKeyClient, LookupKeyServer
from kvferry.pool.objects import TableKind, block_span
from kvferry.pool.orders import (
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
        counters: PoolCounters | None = None,
    ) -> None:
        self.limits, self.counters = limits, counters or PoolCounters()
        self._open_store = open_store
        self._null = null_block
        self._client: LookupKeyClient | None = None
        self._epoch = ""  # set by a reset before the start
        self._trackers: dict[str, RequestTracker] = {}
        self._jobs = SaveJobs(pin, unpin, limits.most_pinned_blocks)
        self._loads = LoadJobs(pin, unpin, null_block)
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
    ) -> None:
        """Begin, once all ranks have described themselves.

        full_residency  the engine keeps every block, also of layers with a window
        """
        if self._client is None and self._epoch:
            metadata = replace(metadata, epoch=self._epoch)
        self._metadata, self._ours, self._ranks = metadata, ours, ranks
        self._full = full_residency
        groups = ours.model.groups
        spans = [block_span(group, ours.shape) for group in groups]
        needs = [
            Need(g.name, Residency() if full_residency and not g.is_state else g.residency, span)
            for g, span in zip(groups, spans, strict=True)
        ]
        self.align_tokens = lcm(*spans)
        self._reader = Reader(tuple(needs), self.align_tokens, ours.id)
        self._tell({ours.id: ours})
        if self._client is not None:
            self._client.restart()
        else:
            self._client = LookupKeyClient(
                self._make_server, self.counters, self.limits.lookup_seconds
            )

    @property
    def started(self) -> bool:
        return self._client is not None

    def _make_server(self) -> LookupKeyServer:
        return LookupKeyServer(
            self._open_store,
            self._metadata,
            self._ours,
            self._reader,
            self.counters,
            self.watch,
        )

    def keys_of(self, table: int, contents: Sequence[str]) -> list[list[str]]:
        """For each of these blocks, the keys of all its fragments in our layout."""
        of_fragment = [
            object_keys(self._metadata, self._ours.id, fragment, contents)
            for fragment in self._ours.fragments
            if fragment.table == table
        ]
        return [list(keys) for keys in zip(*of_fragment, strict=True)]

    def _tell(self, layouts: dict[str, PoolLayout]) -> None:
        """Send ranks the layout records that they lack."""
        new = {name: layout.encoded for name, layout in layouts.items() if name not in self._told}
        self._told |= set(new)
        before = self._orders.scope.records if self._orders.scope is not None else {}
        self._orders.scope = Scope(self._metadata, self._ours.id, {**before, **new})

    def reset(self, *, keeps_blocks: bool = False) -> None:
        """Use a new namespace, because the engine's weights have changed.

        keeps_blocks  the engine's own cache was not emptied. Until a reset that finds it empty, a
                      request that hits it saves nothing
        """
        epoch = secrets.token_hex(8)
        log.info("the pool's namespace changes (epoch %s)", epoch)
        self._keeps_old = keeps_blocks
        if self._client is None:
            self._epoch = epoch
            return
        for tracker in self._trackers.values():
            tracker.saved_tokens, tracker.load, tracker.old = 0, None, True
        self.watch.clear()
        metadata = replace(self._metadata, epoch=epoch)
        self.start(metadata, self._ours, self._ranks, full_residency=self._full)

    @property
    def tables(self) -> int:
        return len(self._ours.kinds)

    def block_tokens(self, table: int) -> int:
        return self._ours.kind(table).block_tokens

    # Requests

    def track(self, request_id: str, extras: Callable[[], Sequence[Extra]]) -> RequestTracker:
        tracker = self._trackers.get(request_id)
        if tracker is None:
            tracker = self._trackers[request_id] = RequestTracker(ContentChain(extras()))
        return tracker

    def matched(
        self, request_id: str, tracker: RequestTracker, tokens: Sequence[int], computed: int
    ) -> int | None:
        """Tokens beyond the computed ones that the pool has; None: ask again."""
        tracker.load = None
        # The request computes everything from here on, except for its local hit.
        tracker.old = self._keeps_old and (tracker.old or computed > 0)
        count = len(tokens)
        if (
            self._client is None
            or not self.limits.lookup
            or tracker.over
            or tracker.loading is not None
            or count - 1 < self.align_tokens
        ):
            return 0
        answer = self._client.lookup(request_id, tracker.chain, tokens, count, count - 1)
        if answer is None:
            return None
        tracker.saved_tokens = max(tracker.saved_tokens, answer.saved_tokens)
        hit = answer.hit_after(self._reader, count - 1, computed)
        spec = LoadSpec(hit, computed, answer.layouts)
        if spec.tokens < max(1, self.limits.min_load_tokens):
            return 0
        tracker.load = spec
        return spec.tokens

    def promised(self, request_id: str) -> bool:
        tracker = self._trackers.get(request_id)
        return tracker is not None and tracker.load is not None

    def allocated(self, request_id: str, tables: Tables, external: int) -> None:
        """The request has blocks. Load `external` tokens into them; 0: load nothing after all."""
        tracker = self._trackers.get(request_id)
        spec = tracker.load if tracker is not None else None
        if tracker is None or spec is None:
            return
        tracker.load = None
        if external <= 0:
            return
        full = all(group.residency.kind == "full" for group in self._ours.model.groups)
        segments = segments_to_load(spec, external, full)
        used = {name: spec.layouts[name] for name in {s.layout_id for s in segments}}
        self._tell(used)
        spans = {used[s.layout_id].block_tokens(s.group) for s in segments}
        tracker.loading = LoadOrder(
            request_id,
            segments,
            {span: tuple(tracker.chain.digests(span)) for span in spans},
            tuple(tuple(ids) for ids in tables),
            self.limits.load_seconds,
        )
        self._loads.order(tracker.loading)
        self._orders.loads.append(tracker.loading)
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
        if tracker is None or tracker.old or self._client is None or not self.limits.save:
            return
        final = min(final, len(tokens))
        stop = final // self.align_tokens * self.align_tokens
        start = min(stop, tracker.saved_tokens // self.align_tokens * self.align_tokens)
        if start == stop and not states:
            return
        if self._jobs.full:
            self.counters.add("save_postponed")
            return
        chain, kinds = tracker.chain, self._ours.kinds
        chain.cover(tokens, final)
        blocks = list(states_to_save(kinds, chain, states, self._null))
        if start < stop:
            blocks += blocks_to_save(kinds, chain, start, stop, tables(), self._null)
            tracker.saved_tokens = stop
        order = self._jobs.order(tuple(blocks), self._ranks, self.limits.save_seconds, tag)
        if order is not None:
            self._orders.saves.append(order)
            self.counters.add("save_jobs")

    def finished(self, request_id: str) -> None:
        """A request is over. Its pinned blocks stay pinned until their jobs have ended."""
        self._trackers.pop(request_id, None)
        if self._client is not None:
            self._client.discard(request_id)

    # Reports

    def take_orders(self) -> PoolOrders:
        orders, self._orders = self._orders, PoolOrders()
        return orders

    def saved(self, reports: Iterable[Saved]) -> list[SavedBlocks]:
        """Take ranks' reports about save jobs. Returns the jobs that are over now."""
        return self._jobs.reported(reports)

    def loaded(self, reports: Iterable[PoolLoaded]) -> None:
        """Take one rank's reports about loads."""
        for report in reports:
            tracker = self._trackers.get(report.request_id)
            if not report.ok and tracker is not None:
                tracker.over = True  # it computes the rest, and saves that again
                tracker.saved_tokens = min(tracker.saved_tokens, report.bad_from or 0)
            if report.hung:
                self._loads.hung(report.request_id)

    def load_over(self, request_id: str) -> None:
        """All ranks have ended a request's load; the request itself may be gone."""
        self._loads.over(request_id)
        tracker = self._trackers.get(request_id)
        if tracker is not None and tracker.loading is not None:
            stop = max((s.stop for s in tracker.loading.segments), default=0)
            if not tracker.over:  # these blocks came from the pool, and need no save
                tracker.saved_tokens = max(
                    tracker.saved_tokens, stop // self.align_tokens * self.align_tokens
                )
            tracker.loading = None

    def recovered(self, request_ids: Iterable[str]) -> None:
        """Hung loads that have ended on some rank."""
        self._loads.recovered(request_ids)

    @property
    def pinned_blocks(self) -> int:
        return self._jobs.pinned_blocks + self._loads.quarantined_blocks

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of loads that hang. The engine must not reuse them until the loads have ended."""
        return self._loads.quarantined_blocks

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping to hear of ended jobs."""
        return bool(self._jobs or self._orders.saves or self._orders.loads)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Time limits of lookups, loads and saves, and how many blocks may be pinned."""

    lookup_seconds: float = 2.0
    load_seconds: float = 60.0
    save_seconds: float = 60.0
    most_pinned_blocks: int = 1 << 30
    min_load_tokens: int = 1
    lookup: bool = True
    save: bool = True


@dataclass(frozen=True, slots=True)
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
    load: LoadSpec | None = None  # promised, not yet ordered
    loading: LoadOrder | None = None
    over: bool = False  # a load failed: the request never matches again
    old: bool = False  # it holds blocks of replaced weights, and saves nothing


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
    """The full blocks of tokens of each table that the request still has."""
    for kind in kinds:
        if kind.residency.kind == "state" or kind.table >= len(tables):
            continue
        first, stop = start_tokens // kind.block_tokens, stop_tokens // kind.block_tokens
        ids = list(tables[kind.table][first:stop])
        contents = chain.digests(kind.block_tokens, stop)[first:stop]
        kept = [i for i, block in enumerate(ids) if block != null_block]
        if kept:
            yield TableBlocks(
                kind.table,
                tuple(first + i for i in kept),
                tuple(ids[i] for i in kept),
                tuple(contents[i] for i in kept),
            )


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
class _Job:
    """A save job that some rank has not reported."""

    block_ids: list[int]
    tables: tuple[TableBlocks, ...]
    tag: Any
    waiting: int
    failed: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """A save job that all ranks have reported, with the caller's tag."""

    tables: tuple[TableBlocks, ...]
    failed: frozenset[tuple[int, int]]
    tag: Any


class SaveJobs:
    """Jobs under way, and their pins."""

    def __init__(
        self,
        pin: Callable[[Sequence[int]], None],
        unpin: Callable[[Sequence[int]], None],
        most_pinned_blocks: int,
    ) -> None:
        self._pin, self._unpin, self._most = pin, unpin, most_pinned_blocks
        self._jobs: dict[int, _Job] = {}
        self._next = 0
        self.pinned_blocks = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def full(self) -> bool:
        return len(self._jobs) >= MOST_JOBS or self.pinned_blocks >= self._most

    def order(
        self, tables: tuple[TableBlocks, ...], ranks: int, seconds: float, tag: Any
    ) -> SaveOrder | None:
        """A job for these blocks; None if there are none."""
        ids = [i for blocks in tables for i in blocks.block_ids]
        if not ids:
            return None
        job_id, self._next = self._next, self._next + 1
        self._pin(ids)
        self.pinned_blocks += len(ids)
        self._jobs[job_id] = _Job(ids, tables, tag, ranks)
        return SaveOrder(job_id, tables, seconds)

    def reported(self, reports: Iterable[Saved]) -> list[SavedBlocks]:
        """Take ranks' reports. Unpins and returns the jobs that all ranks have reported."""
        over = []
        for report in reports:
            job = self._jobs.get(report.job_id)
            if job is None:
                log.error("a rank reported save job %d, which is not open", report.job_id)
                continue
            job.failed |= set(report.failed)
            job.waiting -= 1
            if job.waiting == 0:
                del self._jobs[report.job_id]
                self.pinned_blocks -= len(job.block_ids)
                self._unpin(job.block_ids)
                over.append(SavedBlocks(job.tables, frozenset(job.failed), job.tag))
        return over


# Loads


def segments_to_load(spec: LoadSpec, external: int, full: bool) -> tuple[Segment, ...]:
    """The segments to load if the engine takes `external` tokens of a promise.

    full  all groups keep all of their tokens
    """
    if external == spec.tokens:
        return spec.hit.segments
    # An engine that takes fewer tokens gets the segments of a shorter hit.
    stop = spec.computed + external
    if external > spec.tokens or not full:
        log.error(
            "the engine asks for %d tokens, but the pool promised %d: the engine computes them",
            external,
            spec.tokens,
        )
        return ()  # a load without segments fails
    return tuple(
        Segment(s.layout_id, s.group, s.start, min(s.stop, stop))
        for s in spec.hit.segments
        if s.start < stop
    )


@dataclass(slots=True)
class _Hung:
    block_ids: list[int]
    ranks: int = 0  # ranks on which it has not ended


class LoadJobs:
    """Loads that some rank has not ended, and the pinned blocks of those that hang."""

    def __init__(
        self,
        pin: Callable[[Sequence[int]], None],
        unpin: Callable[[Sequence[int]], None],
        null_block: int | None,
    ) -> None:
        self._pin, self._unpin, self._null = pin, unpin, null_block
        self._orders: dict[str, LoadOrder] = {}
        self._hung: dict[str, _Hung] = {}

    def order(self, order: LoadOrder) -> None:
        self._orders[order.request_id] = order

    def over(self, request_id: str) -> None:
        """All ranks have reported the load, as ended or as hung."""
        self._orders.pop(request_id, None)

    def hung(self, request_id: str) -> None:
        """A load hangs on one more rank."""
        order = self._orders.get(request_id)
        if order is None:
            return
        hung = self._hung.get(request_id)
        if hung is None:
            ids = [i for table in order.tables for i in table if i != self._null]
            self._pin(ids)
            hung = self._hung[request_id] = _Hung(ids)
        hung.ranks += 1

    def recovered(self, request_ids: Iterable[str]) -> None:
        """Hung loads that have ended on some rank."""
        for request_id in request_ids:
            hung = self._hung.get(request_id)
            if hung is None:
                continue
            hung.ranks -= 1
            if hung.ranks == 0:
                del self._hung[request_id]
                self._unpin(hung.block_ids)

    @property
    def quarantined_blocks(self) -> int:
        return sum(len(hung.block_ids) for hung in self._hung.values())
