"""The scheduler's side of the pool, for any engine: what to look up, load, save and pin.

A request is tracked from its first lookup to its end, through chunked prefill, preemption, abort.

- *match*: how many tokens beyond the local ones the pool has. Whole blocks only, and never the last
  token: one is left to compute. `None` while the lookup is under way.
- *load*: ordered when blocks are there. A load that failed makes its request never match again. One
  that hangs keeps its blocks from everybody, also when its request is long gone.
- *save*: a block is ordered in the step that fills it, once its tokens are final, and pinned until
  every rank has reported the job. Where too much is pinned already, nothing is ordered; the request
  tries again with its next step.

- *reset*: weights are not what they were. What was computed before is never saved under the new
  namespace: neither of requests that run on, nor of blocks that the engine keeps and hits again.

All methods are called by the scheduler's thread, take plain values, and never wait for the store.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from kvferry.pool.chain import ContentChain, Extra
from kvferry.pool.hits import Hit, Need, Segment
from kvferry.pool.keys import KeyMetadata
from kvferry.pool.lookup import LookupKeyClient, LookupKeyServer, Reader
from kvferry.pool.objects import block_span
from kvferry.pool.orders import Loaded, LoadOrder, Saved, SaveOrder, Scope, TableBlocks
from kvferry.pool.records import PoolLayout
from kvferry.pool.stats import PoolCounters
from kvferry.pool.store import Store

log = logging.getLogger("kvferry")

MOST_JOBS = 64  # saves under way; more wait for nothing but the store
Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How long things may take, and how much may be pinned."""

    lookup_seconds: float = 2.0
    load_seconds: float = 60.0
    save_seconds: float = 60.0
    most_pinned_blocks: int = 1 << 30
    min_load_tokens: int = 1
    lookup: bool = True
    save: bool = True


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What a request was promised from the pool."""

    hit: Hit
    computed: int
    layouts: dict[str, PoolLayout] = field(repr=False)

    @property
    def tokens(self) -> int:
        return self.hit.tokens - self.computed


@dataclass(slots=True)
class RequestTracker:
    """What the pool knows of one request."""

    chain: ContentChain
    saved_tokens: int = 0  # at the front: in the pool, or ordered
    load: LoadSpec | None = None  # promised, not yet ordered
    loading: LoadOrder | None = None
    over: bool = False  # a load failed: never matched again
    old: bool = False  # holds what weights computed that are replaced now: never saved


@dataclass(slots=True)
class _Job:
    """A save that not all ranks have reported."""

    block_ids: list[int]
    tables: tuple[TableBlocks, ...]
    tag: Any
    waiting: int
    failed: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """A job that all ranks have reported: what is stored in full, with the caller's tag."""

    tables: tuple[TableBlocks, ...]
    failed: frozenset[tuple[int, int]]
    tag: Any


@dataclass(slots=True)
class PoolOrders:
    scope: Scope | None = None
    saves: list[SaveOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)


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
        self._open_store, self._pin, self._unpin = open_store, pin, unpin
        self._null = null_block
        self._client: LookupKeyClient | None = None
        self._trackers: dict[str, RequestTracker] = {}
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0
        self._pinned = 0
        self._loads: dict[str, LoadOrder] = {}  # that some rank has not ended; outlive requests
        self._quarantine: dict[str, tuple[list[int], int]] = {}  # blocks, ranks that hang
        self._keeps_old = False  # the engine may have blocks that replaced weights computed
        self._orders = PoolOrders()
        self._told: set[str] = set()

    # Start

    def start(
        self,
        metadata: KeyMetadata,
        ours: PoolLayout,
        ranks: int,
        *,
        full_residency: bool = False,
    ) -> None:
        """Begin, when all ranks have described themselves.

        full_residency  the engine keeps every block, also of layers with a window
        """
        self._metadata, self._ours, self._ranks = metadata, ours, ranks
        self._full = full_residency
        groups = ours.model.groups
        spans = [block_span(group, ours.shape) for group in groups]
        needs = [
            Need(group.name, group.residency, span, full_residency)
            for group, span in zip(groups, spans, strict=True)
        ]
        self.align_tokens = lcm(*spans)
        self._reader = Reader(tuple(needs), self.align_tokens, ours.id)
        self._tell({ours.id: ours})
        if self._client is not None:
            self._client.replace(self._make_server)
        else:
            self._client = LookupKeyClient(
                self._make_server, self.counters, self.limits.lookup_seconds
            )

    @property
    def started(self) -> bool:
        return self._client is not None

    def _make_server(self) -> LookupKeyServer:
        return LookupKeyServer(
            self._open_store, self._metadata, self._ours, self._reader, self.counters
        )

    def _tell(self, layouts: dict[str, PoolLayout]) -> None:
        """Send ranks the records that they do not have."""
        new = {name: layout.encoded for name, layout in layouts.items() if name not in self._told}
        self._told |= set(new)
        before = self._orders.scope.records if self._orders.scope is not None else {}
        self._orders.scope = Scope(self._metadata, self._ours.id, {**before, **new})

    def reset(self, *, keeps_blocks: bool = False) -> None:
        """Forget all that the pool holds for this engine: its weights are not what they were.

        keeps_blocks  the engine's own cache was not emptied: until a reset that finds it empty,
                      what a request finds there is not saved, nor what it computes on top of it
        """
        if self._client is None:
            return
        epoch = secrets.token_hex(8)
        log.info("the pool's namespace changes (epoch %s)", epoch)
        self._keeps_old = keeps_blocks
        for tracker in self._trackers.values():
            tracker.saved_tokens, tracker.load, tracker.old = 0, None, True
        metadata = self._metadata.at_epoch(epoch)
        self.start(metadata, self._ours, self._ranks, full_residency=self._full)

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
        # all of it is computed from here on, but for what the engine has
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
        """Blocks are there. `external` tokens are to be loaded; 0: none after all."""
        tracker = self._trackers.get(request_id)
        spec = tracker.load if tracker is not None else None
        if tracker is None or spec is None:
            return
        tracker.load = None
        if external <= 0:
            return
        segments = self._promised(spec, external)
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
        self._loads[request_id] = tracker.loading
        self._orders.loads.append(tracker.loading)
        self.counters.add("hit_tokens", external)

    def _promised(self, spec: LoadSpec, external: int) -> tuple[Segment, ...]:
        if external == spec.tokens:
            return spec.hit.segments
        # an engine that takes less than it was offered gets what a hit of that length needs
        stop = spec.computed + external
        full = all(group.residency.kind == "full" for group in self._ours.model.groups)
        if external > spec.tokens or not full:
            log.error(
                "the engine asks for %d tokens, the pool promised %d: they are computed",
                external,
                spec.tokens,
            )
            return ()  # a load of nothing fails
        return tuple(
            Segment(s.layout_id, s.group, s.start, min(s.stop, stop))
            for s in spec.hit.segments
            if s.start < stop
        )

    def computed(
        self,
        request_id: str,
        tokens: Sequence[int],
        final: int,
        tables: Callable[[], Tables],
        tag: Any = None,
    ) -> None:
        """After this step, `final` tokens of a request are computed: save the blocks they fill."""
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.old or self._client is None or not self.limits.save:
            return
        final = min(final, len(tokens))
        if final // self.align_tokens <= tracker.saved_tokens // self.align_tokens:
            return
        if len(self._jobs) >= MOST_JOBS or self._pinned >= self.limits.most_pinned_blocks:
            self.counters.add("save_postponed")
            return
        tracker.chain.cover(tokens, final)
        blocks = tuple(self._to_save(tracker, final, tables()))
        tracker.saved_tokens = final // self.align_tokens * self.align_tokens
        ids = [i for b in blocks for i in b.block_ids]
        if not ids:
            return
        job_id, self._next_job = self._next_job, self._next_job + 1
        self._pin(ids)
        self._pinned += len(ids)
        self._jobs[job_id] = _Job(ids, blocks, tag, self._ranks)
        self._orders.saves.append(SaveOrder(job_id, blocks, self.limits.save_seconds))
        self.counters.add("save_jobs")

    def _to_save(
        self, tracker: RequestTracker, final: int, tables: Tables
    ) -> Iterable[TableBlocks]:
        """Blocks of each table that are full and still there."""
        stop_tokens = final // self.align_tokens * self.align_tokens
        for kind in self._ours.kinds:
            if kind.residency.kind == "state" or kind.table >= len(tables):
                continue  # states are saved where the engine says that one is whole
            first, stop = (
                tracker.saved_tokens // kind.block_tokens,
                stop_tokens // kind.block_tokens,
            )
            ids = list(tables[kind.table][first:stop])
            contents = tracker.chain.digests(kind.block_tokens, stop)[first:stop]
            kept = [i for i, block in enumerate(ids) if block != self._null]
            if kept:
                yield TableBlocks(
                    kind.table,
                    tuple(first + i for i in kept),
                    tuple(ids[i] for i in kept),
                    tuple(contents[i] for i in kept),
                )

    def finished(self, request_id: str) -> None:
        """A request is over, well or not. Its pinned blocks stay until their jobs have ended."""
        self._trackers.pop(request_id, None)
        if self._client is not None:
            self._client.discard(request_id)

    # Reports

    def take_orders(self) -> PoolOrders:
        orders, self._orders = self._orders, PoolOrders()
        return orders

    def saved(self, reports: Iterable[Saved]) -> list[SavedBlocks]:
        """Ranks' last words about jobs. Jobs that all have reported are over, and unpinned."""
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
                self._pinned -= len(job.block_ids)
                self._unpin(job.block_ids)
                over.append(SavedBlocks(job.tables, frozenset(job.failed), job.tag))
        return over

    def loaded(self, reports: Iterable[Loaded]) -> None:
        """One rank's ends of loads."""
        for report in reports:
            tracker = self._trackers.get(report.request_id)
            if not report.ok and tracker is not None:
                tracker.over = True  # what is computed again is saved again
                tracker.saved_tokens = min(tracker.saved_tokens, report.bad_from or 0)
            order = self._loads.get(report.request_id)
            if report.hung and order is not None:
                ids = self._quarantine.get(report.request_id, ([], 0))
                if not ids[0]:
                    blocks = [i for t in order.tables for i in t if i != self._null]
                    self._pin(blocks)
                    self.counters.add("quarantined_blocks", len(blocks))
                    ids = (blocks, 0)
                self._quarantine[report.request_id] = (ids[0], ids[1] + 1)

    def load_over(self, request_id: str) -> None:
        """All ranks have ended a request's load; the request itself may be gone."""
        self._loads.pop(request_id, None)
        tracker = self._trackers.get(request_id)
        if tracker is not None and tracker.loading is not None:
            stop = max((s.stop for s in tracker.loading.segments), default=0)
            if not tracker.over:  # it came from the pool: it need not go there again
                tracker.saved_tokens = max(
                    tracker.saved_tokens, stop // self.align_tokens * self.align_tokens
                )
            tracker.loading = None

    def recovered(self, request_ids: Iterable[str]) -> None:
        """Hung loads that have ended on some rank."""
        for request_id in request_ids:
            ids, ranks = self._quarantine.get(request_id, ([], 0))
            if ranks > 1:
                self._quarantine[request_id] = (ids, ranks - 1)
            elif ids:
                del self._quarantine[request_id]
                self._unpin(ids)

    @property
    def pinned_blocks(self) -> int:
        return self._pinned + sum(len(ids) for ids, _ in self._quarantine.values())

    @property
    def has_work(self) -> bool:
        """Whether steps are needed to hear of ends."""
        return bool(self._jobs or self._orders.saves or self._orders.loads)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
