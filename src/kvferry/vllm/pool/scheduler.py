# SPDX-License-Identifier: Apache-2.0
"""The pool in the scheduler's process: vLLM's requests, blocks and events in the pool's terms."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.handover.describe import read_layout, read_model, read_shape
from kvferry.net.messages import EngineInfo, RankInfo
from kvferry.pool.keys import Extra, KeyMetadata
from kvferry.pool.layout_registry import make_layout
from kvferry.pool.scheduler import (
    PoolLimits,
    PoolOrders,
    PoolScheduler,
    RequestTracker,
    SaveJob,
    WholeState,
)
from kvferry.pool.weights import NOT_SHARED, Adapters, Asked, engine_weights
from kvferry.pool.wrappers import MEANING
from kvferry.vllm.describe import replicas
from kvferry.vllm.fingerprint import Prompts, content
from kvferry.vllm.metadata import FerryReport
from kvferry.vllm.metrics import FerryStats
from kvferry.vllm.pool.config import PoolConfig

log = logging.getLogger("kvferry")
_numbers = itertools.count()  # of the pools of one engine: several under a MultiConnector


class VllmPoolScheduler:
    def __init__(
        self,
        config: PoolConfig,
        vllm_config: Any,
        limits: PoolLimits,
        prompts: Prompts,
        adapters: Adapters,
        *,
        events: bool,
    ) -> None:
        self.config, self._vllm = config, vllm_config
        self._prompts, self._adapters = prompts, adapters
        self._requests: dict[str, _PoolRequest] = {}  # those that are for the pool
        self._number = str(next(_numbers))
        self._quarantined = 0  # blocks, as last told
        self._blocks: Any = None  # vLLM's block pool
        if self._prompts.media_unseen:
            log.warning(
                "kvferry: requests with images or other media are not kept in the pool: %s",
                self._prompts.media_unseen,
            )
        self.pool = PoolScheduler(
            limits, config.opener(lookups_only=True), pin=self._pin, unpin=self._unpin, null_block=0
        )
        self._events = PoolEvents(self.pool, wanted=events)

    def described(self, engine: EngineInfo, ranks: Sequence[RankInfo]) -> None:
        """All workers have described themselves: the engine's layout is published."""
        model, shape = read_model(engine), read_shape(engine)
        layouts = [read_layout(r, shape)[0] for r in ranks]
        meaning = dict(engine.meaning)
        if self.config.model_id:  # beside a hand-over, workers name the model as its keys say
            meaning["model"] = self.config.model_id
        layout = make_layout(model, meaning, layouts, _draft_ahead(self._vllm))
        weights = engine_weights(self._vllm, self.config.weight_revision)
        if self.config.checked:
            meaning |= dict([MEANING])
        metadata = KeyMetadata.of(self.config.cache_prefix, model.fingerprint(), meaning, weights)
        workers = len(ranks) * replicas(self._vllm.parallel_config)
        self.pool.start(
            metadata,
            layout,
            workers,
            full_residency=shape.full_residency,
            computes_last_again=True,
        )
        log.info(
            "kvferry: the pool's namespace is %s, our layout %s (%s)",
            metadata.namespace,
            layout.id,
            shape.describe(),
        )

    def bind_blocks(self, block_pool: Any) -> None:
        self._blocks = block_pool
        self._events.hash_tokens = getattr(block_pool, "hash_block_size", None)

    def _pin(self, block_ids: Sequence[int]) -> None:
        self._blocks.touch([self._blocks.blocks[i] for i in block_ids])

    def _unpin(self, block_ids: Sequence[int]) -> None:
        self._blocks.free_blocks([self._blocks.blocks[i] for i in reversed(block_ids)])

    def reset(self) -> None:
        """Use a new namespace. vLLM empties its own cache first, unless blocks are in use."""
        blocks = self._blocks
        kept = blocks is None or blocks.get_num_free_blocks() < blocks.num_gpu_blocks - 1
        if kept:
            log.warning(
                "the pool is reset while blocks are in use: vLLM keeps its own cache, so nothing "
                "that requests find there is saved; reset again when nothing runs"
            )
        self.pool.reset(keeps_blocks=kept)

    # Requests

    def on_new_request(self, request: Any) -> None:
        if why := self._prompts.unfit(request):
            log.debug("request %s is not for the pool: %s", request.request_id, why)
            return
        asked = self._adapters.ask(request, self.config.lookup_seconds)
        known = self._requests[request.request_id] = _PoolRequest(request, asked)
        tracker = self._begin(known)
        if tracker is not None:
            self.pool.arrived(request.request_id, tracker, request.all_token_ids)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        tracker = self._tracker(request)
        if tracker is None:
            waits = request.request_id in self._requests and self.pool.started
            return (None if waits else 0), False
        count = self.pool.matched(request.request_id, tracker, request.all_token_ids, computed)
        return count, bool(count)

    def elsewhere(self, request: Any, computed: int, tokens: int) -> None:
        """The hand-over loads the tokens from `computed` up to `tokens`. The engine that computed
        them saves them."""
        tracker = self._tracker(request)
        if tracker is not None:
            self.pool.begins(tracker, computed)
            tracker.saved_tokens = max(tracker.saved_tokens, tokens)

    def _tracker(self, request: Any) -> RequestTracker | None:
        """None: the request is not for the pool, or its adapter's digest is not known."""
        known = self._requests.get(request.request_id)
        if known is None:
            return None
        if known.tracker is not None and known.asked is None:
            return known.tracker
        return self._begin(known)  # with an adapter: its digest may no longer be known

    def _begin(self, known: _PoolRequest) -> RequestTracker | None:
        """Track a request as soon as that is possible."""
        if not self.pool.started:
            return None
        request, adapter = known.request, None
        if known.asked is not None:
            adapter = known.asked.digest
            if adapter == NOT_SHARED:
                self.finished(request)
            if not adapter:
                return None
        known.tracker = self.pool.track(request.request_id, lambda: _extras(request, adapter))
        return known.tracker

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        self.pool.allocated(request.request_id, tables, external)

    def step(self, output: Any) -> PoolOrders:
        """One step's orders: saves of the blocks that it fills."""
        state = output.kv_connector_block_state
        offered = getattr(state, "boundary_state_offloads", None)  # states, by request
        cached = output.scheduled_cached_reqs
        progress = [(r.req_id, r.num_computed_tokens) for r in output.scheduled_new_reqs]
        progress += list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, computed in progress:
            known = self._requests.get(request_id)
            if known is None:
                continue
            request = known.request
            final = computed + output.num_scheduled_tokens[request_id]
            if self.config.save_decode_cache is False:
                final = min(final, request.num_prompt_tokens)
            self.pool.computed(
                request_id,
                request.all_token_ids,
                final,
                lambda r=request_id: state.get_block_ids(r),  # type: ignore[misc]
                states=_states(offered.get(request_id, ()), final) if offered else (),
                tag=request if self._events.wanted else None,
            )
        self.pool.choice.steps.sent(
            output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        )
        return self.pool.take_orders()

    def finished(self, request: Any, tables: Sequence[Sequence[int]] = ()) -> None:
        """A request is over; its pins outlive it. `tables`: the blocks that it still has."""
        self._requests.pop(request.request_id, None)
        self.pool.finished(
            request.request_id,
            request.all_token_ids,
            tables,
            tag=request if self._events.wanted else None,
        )

    # Reports

    def reported(self, report: FerryReport, received: Iterable[str]) -> None:
        for saved in self.pool.saved(report.saved):
            self._events.stored(saved)
        self.pool.loaded(report.loaded)
        self.pool.recovered(report.recovered)
        for request_id in received:
            self.pool.load_over(request_id)

    @property
    def waits_for_a_step(self) -> bool:
        """Whether an idle engine should step: until saves and hung loads have ended, so that it has
        all its blocks, and routers were told."""
        waiting = self.pool.has_work or self._events.waiting
        return waiting or self.pool.quarantined_blocks > 0

    def take_events(self) -> list[Any]:
        """vLLM calls this once for every step, when its results are back, so this is where steps
        end. It passes results to the connector only if there are any."""
        self.pool.choice.steps.over()
        return self._events.take()

    def add_stats(self, stats: FerryStats) -> None:
        """Counts since the last call, and the number of blocks in quarantine, if it has changed."""
        stats.add_pool(self.pool.counters)
        if self.pool.quarantined_blocks != self._quarantined:
            self._quarantined = self.pool.quarantined_blocks
            stats.level(f"pool {self._number}", pool_blocks_quarantined=self._quarantined)

    def close(self) -> None:
        self.pool.close()


@dataclass(slots=True)
class _PoolRequest:
    request: Any  # vLLM's
    asked: Asked | None  # for its adapter's digest
    tracker: RequestTracker | None = None  # once the pool has started, and the digest is known


def _draft_ahead(vllm_config: Any) -> int:
    """Tokens after a slot on which a draft layer's bytes depend.

    Eagle, MTP and their kin combine a target's hidden state with the next token, and each further
    MTP module with one token more. A draft model of its own reads tokens as the target does.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in ("draft_model", "extract_hidden_states"):
        return 0
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def _extras(request: Any, adapter: str | None) -> list[Extra]:
    extras = [] if adapter is None else [Extra(0, f"lora {adapter}")]
    if getattr(request, "cache_salt", None):
        extras.append(Extra(0, f"salt {request.cache_salt}"))
    for feature in getattr(request, "mm_features", None) or ():
        extras.append(Extra(feature.mm_position.offset, f"mm {content(feature)}"))
    return extras


def _states(offered: Iterable[tuple[int, int, int]], final: int) -> list[WholeState]:
    """States that vLLM hands out with this step, each with the block that holds it.

    A state after a draft may be of tokens that are rejected: only those of final tokens count.
    """
    return [WholeState(group, block, tokens) for group, block, tokens in offered if tokens <= final]


MEDIUM = "STORAGE"  # vLLM's word for where a pool's blocks are


class PoolEvents:
    """vLLM's events for routers: blocks that every worker has saved, and blocks that the store has
    evicted since. Events wait for the next step. A job's tag is vLLM's request."""

    def __init__(self, pool: PoolScheduler, *, wanted: bool) -> None:
        self.wanted = wanted
        self.hash_tokens: int | None = None  # tokens of a block that vLLM hashes
        self._pool = pool
        self._events: list[Any] = []

    @property
    def waiting(self) -> bool:
        return bool(self._events) or self._pool.watch.has_gone

    def take(self) -> list[Any]:
        if self._pool.watch.has_gone:
            from vllm.distributed.kv_events import BlockRemoved

            by_table: dict[int, list[Any]] = {}
            for block_hash, table in self._pool.watch.take_gone():
                by_table.setdefault(table, []).append(block_hash)
            self._events += [
                BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=table)
                for table, hashes in by_table.items()
            ]
        events, self._events = self._events, []
        return events

    def stored(self, saved: SaveJob) -> None:
        request = saved.tag
        if request is None:  # no events are wanted, or the weights have been replaced
            return
        from vllm.distributed.kv_events import BlockStored

        lora = getattr(request, "lora_request", None)
        for blocks in saved.tables:
            table, size = blocks.table, self._pool.block_tokens(blocks.table)
            hashes = self._hashes(request, size, blocks.numbers)
            kept = {
                number: content
                for number, content in zip(blocks.numbers, blocks.contents, strict=True)
                if number in hashes and (table, number) not in saved.failed
            }
            keys = self._pool.keys_of(table, list(kept.values()))
            for number, of_block in zip(kept, keys, strict=True):
                self._pool.watch.add((hashes[number], table), of_block)
            for run in _runs(list(kept)):
                self._events.append(
                    BlockStored(
                        block_hashes=[hashes[number] for number in run],
                        parent_block_hash=hashes[run[0] - 1] if run[0] else None,
                        token_ids=list(request.all_token_ids[run[0] * size : (run[-1] + 1) * size]),
                        block_size=size,
                        lora_id=getattr(lora, "lora_int_id", None),
                        medium=MEDIUM,
                        lora_name=getattr(lora, "lora_name", None),
                        extra_keys=_extra_keys(request, run, size),
                        group_idx=table,
                    )
                )

    def _hashes(
        self, request: Any, block_tokens: int, numbers: Sequence[int]
    ) -> dict[int, int | bytes]:
        """vLLM's hashes of the tokens up to the end of each of our blocks, and of those before
        them, as its events have them. Without blocks for which vLLM has none."""
        from vllm import envs

        every, rest = divmod(block_tokens, self.hash_tokens or block_tokens)
        if rest:
            return {}
        first, stop = max(0, min(numbers) - 1), max(numbers) + 1
        of_ours = request.block_hashes[(first + 1) * every - 1 : stop * every : every]
        found = enumerate(of_ours, first)
        if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
            return dict(found)
        # as `maybe_convert_block_hash`, which looks the setting up for each block
        return {n: int.from_bytes(one, "big") & ((1 << 64) - 1) for n, one in found}


def _extra_keys(request: Any, numbers: Sequence[int], block_tokens: int) -> list[Any] | None:
    """The keys besides tokens in vLLM's hashes of these blocks: salts, adapters, images."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    if not (request.lora_request or request.mm_features or request.cache_salt):
        return [None] * len(numbers)
    keys = []
    for number in numbers:
        start = number * block_tokens
        of_block, _ = generate_block_hash_extra_keys(request, start, start + block_tokens, 0)
        keys.append(of_block)
    return to_event_extra_keys(keys)  # type: ignore[no-any-return]


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
