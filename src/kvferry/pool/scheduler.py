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
from math import lcm
from typing import Any

from kvferry.pool.chain import ContentChain, Extra
from kvferry.pool.hits import Need
from kvferry.pool.keys import KeyMetadata, object_keys
from kvferry.pool.load_jobs import LoadJobs, segments_to_load
from kvferry.pool.lookup import LookupKeyServer, Reader
from kvferry.pool.lookup_client import LookupKeyClient
from kvferry.pool.objects import block_span
from kvferry.pool.orders import Loaded, LoadOrder, Saved, Scope
from kvferry.pool.records import PoolLayout
from kvferry.pool.requests import LoadSpec, PoolLimits, PoolOrders, RequestTracker
from kvferry.pool.save_jobs import (
    SavedBlocks,
    SaveJobs,
    Tables,
    WholeState,
    blocks_to_save,
    states_to_save,
)
from kvferry.pool.stats import PoolCounters
from kvferry.pool.store import Store
from kvferry.pool.watch import Watch

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
        self._epoch = ""  # of a reset before the start
        self._trackers: dict[str, RequestTracker] = {}
        self._jobs = SaveJobs(pin, unpin, limits.most_pinned_blocks)
        self._loads = LoadJobs(pin, unpin, null_block)
        self._keeps_old = False  # the engine may have blocks that replaced weights computed
        self._orders = PoolOrders()
        self._told: set[str] = set()
        self.watch: Watch[tuple[Any, int]] = Watch()  # by hash and table

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
        if self._client is None and self._epoch:
            metadata = metadata.at_epoch(self._epoch)
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
            self._open_store,
            self._metadata,
            self._ours,
            self._reader,
            self.counters,
            self.watch,
        )

    def keys_of(self, table: int, contents: Sequence[str]) -> list[list[str]]:
        """Keys of all parts of each of these blocks of ours."""
        of_fragment = [
            object_keys(self._metadata, self._ours.id, fragment, contents)
            for fragment in self._ours.fragments
            if fragment.table == table
        ]
        return [list(keys) for keys in zip(*of_fragment, strict=True)]

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
        epoch = secrets.token_hex(8)
        log.info("the pool's namespace changes (epoch %s)", epoch)
        self._keeps_old = keeps_blocks
        if self._client is None:
            self._epoch = epoch
            return
        for tracker in self._trackers.values():
            tracker.saved_tokens, tracker.load, tracker.old = 0, None, True
        self.watch.clear()
        metadata = self._metadata.at_epoch(epoch)
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
        """After this step, `final` tokens of a request are computed: save the blocks they fill.

        states  that this step leaves behind
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
        """A request is over, well or not. Its pinned blocks stay until their jobs have ended."""
        self._trackers.pop(request_id, None)
        if self._client is not None:
            self._client.discard(request_id)

    # Reports

    def take_orders(self) -> PoolOrders:
        orders, self._orders = self._orders, PoolOrders()
        return orders

    def saved(self, reports: Iterable[Saved]) -> list[SavedBlocks]:
        """Ranks' last words about save jobs; those that are over now."""
        return self._jobs.reported(reports)

    def loaded(self, reports: Iterable[Loaded]) -> None:
        """One rank's ends of loads."""
        for report in reports:
            tracker = self._trackers.get(report.request_id)
            if not report.ok and tracker is not None:
                tracker.over = True  # what is computed again is saved again
                tracker.saved_tokens = min(tracker.saved_tokens, report.bad_from or 0)
            if report.hung:
                self._loads.hung(report.request_id)

    def load_over(self, request_id: str) -> None:
        """All ranks have ended a request's load; the request itself may be gone."""
        self._loads.over(request_id)
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
        self._loads.recovered(request_ids)

    @property
    def pinned_blocks(self) -> int:
        return self._jobs.pinned_blocks + self._loads.quarantined_blocks

    @property
    def quarantined_blocks(self) -> int:
        """Of loads that hang: kept from everybody until the store has let go of them."""
        return self._loads.quarantined_blocks

    @property
    def has_work(self) -> bool:
        """Whether steps are needed to hear of ends."""
        return bool(self._jobs or self._orders.saves or self._orders.loads)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
