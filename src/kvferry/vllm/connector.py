# SPDX-License-Identifier: Apache-2.0
"""`FerryConnector`: vLLM's connector interface over the hand-over, the shared pool, or both.

A connector lives in one process: the scheduler's or a worker's. In the scheduler's process it has a
`handover`, a `pool` or both; in a worker's process a `worker`, a `pool_worker` or both. The class
and its configuration decide. How a finished prefill becomes a hold:

    vLLM's scheduler  request_finished_all_groups -> Producing.finished, which orders the hold
                      build_connector_meta, which sends a step's orders to all workers
    each worker       bind_connector_metadata -> FerryWorker.start -> ProducerRank.open_hold

With hand-over and pool, a request with a ticket is loaded from the engine that prefilled it; any
other request is looked up in the pool. A prefill engine loads what the pool has, computes and saves
the rest, and hands over the whole prompt. The decode engine loads it, and saves what it adds.

Failures: a decode engine computes a prompt that cannot be handed over. A load that fails is
reported to vLLM, whose `kv_load_failure_policy` decides. That policy is `recompute` here unless the
operator set `fail` (`choose_policy`); with a pool it is always `recompute`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.utils.network_utils import get_ip
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from kvferry.errors import DescriptionError
from kvferry.handover.describe import read_model, read_shape
from kvferry.handover.producer import Directory
from kvferry.handover.renew import RENEWALS, Renewer
from kvferry.handover.ticket import MARK, after_reset, child
from kvferry.net.messages import EngineInfo, RankInfo
from kvferry.net.names import at_port, is_loopback
from kvferry.net.rpc import Sockets
from kvferry.pool.weights import Adapters, adapter_settings
from kvferry.vllm import plugin
from kvferry.vllm.bootstrap import Bootstrap, Registration, Rendezvous, Whereabouts
from kvferry.vllm.check import sections
from kvferry.vllm.config import FerryConfig, Style, incarnation, require_supported_vllm
from kvferry.vllm.consuming import Consuming
from kvferry.vllm.describe import cache_rank, describe_worker, this_place
from kvferry.vllm.fingerprint import Prompts
from kvferry.vllm.metadata import FerryHandshake, FerryMetadata, FerryReport
from kvferry.vllm.metrics import (
    NIXL_METRICS,
    STORE_METRICS,
    FerryPromMetrics,
    FerryStats,
    InTreeMetric,
    Spans,
)
from kvferry.vllm.multiconnector import Family, Siblings, multiconnector
from kvferry.vllm.pool.config import PoolConfig
from kvferry.vllm.pool.scheduler import VllmPoolScheduler
from kvferry.vllm.pool.worker import PoolWorker
from kvferry.vllm.producing import HandoverParts, PrefillCut, Producing
from kvferry.vllm.worker import FerryWorker, close_all

log = logging.getLogger("kvferry")

# vLLM's NIXL connectors take prefills and decodes in every `kv_role`, so their stand-ins do.
ROLELESS: tuple[Style, ...] = ("nixl", "push")
LOOKUP_SECONDS = 0.005  # a step that computes nothing waits for a lookup; most take 1 to 4 ms
# Workers of in-tree decode engines connect to this address. It is invalid, so they fail at once and
# log it. A valid one would keep them waiting eight minutes for an answer.
NOT_FOR_OTHERS = "kvferry://run kvferry's connector on both sides"


class FerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands KV caches over between engines of any shape, and keeps them in a pool if asked to."""

    STYLE: ClassVar[Style | None] = "ferry"  # of the hand-over; None: only the pool
    POOL_DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    IN_TREE_METRICS: ClassVar[Mapping[str, InTreeMetric]] = {}  # of the in-tree one it replaces

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        require_supported_vllm(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        self.handover: FerryScheduler | None = None
        self.pool: VllmPoolScheduler | None = None
        self.worker: FerryWorker | None = None
        self.pool_worker: PoolWorker | None = None
        self._policy = ""  # a line for the log
        self._told: dict[tuple[int, int], FerryHandshake] = {}  # descriptions, by (pp, tp) rank
        self._described = False  # the scheduler: by all workers; a worker: to the scheduler
        schedules = role == KVConnectorRole.SCHEDULER
        if schedules:
            self._prompts = Prompts.of(vllm_config)
            self._adapters = Adapters(adapter_settings(vllm_config))
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        handover, pool = sections(self.STYLE, extra or {})
        self._parent = None if schedules else multiconnector()
        fails = self._parent is not None and self._parent.kv_load_failure_policy == "fail"
        meant = pool is None and names_policy(sys.argv)
        if fails and not meant and vllm_config.parallel_config.rank == 0:
            log.warning(  # we do not change it, because a sibling may rely on it
                "a request ends when its KV cache cannot be loaded, because "
                "kv_load_failure_policy is 'fail'; set it to 'recompute' beside MultiConnector"
            )
        if handover is not None:
            self._make_handover(handover, schedules)
        if pool is not None:
            self._make_pool(pool, schedules)
        if schedules and self.STYLE in ROLELESS:
            # vLLM's scheduler reads the role after it has made its connector. In a consumer it
            # delays the reuse of blocks that a step in flight may still write.
            vllm_config.kv_transfer_config.kv_role = "kv_both"

    def _make_handover(self, extra: dict[str, Any], schedules: bool) -> None:
        vllm_config, cache, style = self._vllm_config, self._kv_cache_config, self.STYLE
        assert style is not None
        self._family = Family.of(self._role, cache)
        index = self._family.join(style)
        rank = vllm_config.parallel_config.data_parallel_index
        config = FerryConfig.read(extra, style, rank=rank)
        if style != "ferry" and config.secret and config.host is None:
            config = replace(config, host=str(get_ip()))  # where in-tree connectors listen too
        cut = PrefillCut.of(vllm_config, cache)
        if schedules:
            wanted = config.load_failure_policy
            self._policy = choose_policy(vllm_config.kv_transfer_config, wanted, sys.argv)
            spans = Spans(vllm_config)
            parts = HandoverParts(config, style, spans, cut, self._prompts, self._adapters)
            self.handover = FerryScheduler(parts, vllm_config, self._family, index)
            return
        siblings = Siblings.of(index)
        if siblings is not None and vllm_config.kv_transfer_config.is_kv_producer:
            cut.require_fellows(siblings)
        self.worker = FerryWorker(config, vllm_config, index, siblings)

    def _make_pool(self, extra: dict[str, Any], schedules: bool) -> None:
        vllm_config, transfer = self._vllm_config, self._vllm_config.kv_transfer_config
        config = PoolConfig.read(extra, **self.POOL_DEFAULTS)
        if transfer.kv_load_failure_policy == "fail":
            # A request must not end because a cache lost a block: the block is computed. Under a
            # MultiConnector this is a copy that vLLM does not read.
            transfer.kv_load_failure_policy = "recompute"
            if not schedules and self._parent is None and self.STYLE is not None:
                log.info("with a pool, what cannot be loaded is computed (kv_load_failure_policy)")
        if schedules:
            blocks, events = self._kv_cache_config.num_blocks, vllm_config.kv_events_config
            self.pool = VllmPoolScheduler(
                config,
                vllm_config,
                config.limits(blocks, produces=transfer.is_kv_producer),
                self._prompts,
                self._adapters,
                events=bool(events and events.enable_kv_cache_events),
            )
            return
        self.pool_worker = PoolWorker(config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Head-major pages keep runs long when tp differs; MLA has no heads to order."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        """Not for the pool: a dropped save is only a later miss."""
        return self.STYLE is not None and bool(super().requires_kv_delivery)

    # In the scheduler's process: requests

    def on_new_request(self, request: Any) -> None:
        """First of all, name every request's media and note its adapter, shared or not."""
        self._prompts.name_media(request)
        self._adapters.ask(request)
        if self.handover is not None:
            if self.handover.prefills(request):
                self.handover.producing.accept(request)
            if self.handover.wants_prefill(request):
                self.handover.consuming.arrived(request)
        if self.pool is not None:
            self.pool.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.handover is not None:
            count, later = self.handover.consuming.matched(request, num_computed_tokens)
            if count and self.pool is not None:  # the producer has saved these tokens
                self.pool.elsewhere(request, num_computed_tokens, num_computed_tokens + count)
            if count != 0 or self.pool is None:
                return count, later
        assert self.pool is not None
        return self.pool.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids()
        if self.handover is not None:
            # whether the last match of this request was the pool's
            promised = self.pool is not None and self.pool.pool.promised(request.request_id)
            external = 0 if promised else num_external_tokens
            self.handover.consuming.allocated(request, tables, external)
            if num_external_tokens:
                self.handover.consuming.begins(request.request_id)
        if self.pool is not None:
            self.pool.allocated(request, tables, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """For vLLM's metrics. It has no name for a pool, which may be memory, disk or a service."""
        ours = self.handover is not None and self.handover.consuming.loads(request.request_id)
        source = CacheHitSource.P2P if ours else CacheHitSource.EXTERNAL_UNSPECIFIED
        return {source: num_external_tokens} if num_external_tokens else {}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over. Returns whether its blocks stay, and fields for its response."""
        if self.pool is not None:
            self.pool.finished(request, block_ids)
        if self.handover is None:
            return False, None
        self.handover.consuming.finished(request.request_id)
        if not self.handover.prefills(request):
            return False, None
        return self.handover.producing.finished(request, block_ids)

    # In the scheduler's process: steps

    def build_connector_meta(self, scheduler_output: Any) -> FerryMetadata:
        handover, pool, step = None, None, 0
        idle, queueing = scheduler_output.total_num_scheduled_tokens == 0, False
        if self.handover is not None:
            consuming = self.handover.consuming
            still = idle and not (self.pool is not None and self.pool.pool.loading)
            still = still and bool(self.handover.producing.held)
            consuming.give_way(scheduler_output.num_scheduled_tokens, still=still)
            consuming.settle()
            queueing = idle and consuming.queueing
            handover = self.handover.parts.orders.take()
            step = self.handover.producing.scheduled(scheduler_output.num_scheduled_tokens)
        if self.pool is not None:
            pool = self.pool.step(scheduler_output)
            if idle and self.pool.pool.wait_for_lookup(LOOKUP_SECONDS):
                idle = False  # do not wait in this step: that request can be scheduled next
        return FerryMetadata(handover, pool, idle, queueing, step)

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        report = told if isinstance(told, FerryReport) else FerryReport()
        received = connector_output.finished_recving or ()
        self._hear(report.handshakes, alone=False)
        if self.handover is not None:
            self.handover.producing.closed(report.closed)
            self.handover.consuming.received(received, connector_output.failed_recving or ())
            self.handover.producing.sent(connector_output.finished_sending or ())
        if self.pool is not None:
            self.pool.reported(report, received)

    def has_pending_block_frees(self) -> bool:
        """Whether vLLM should wait for blocks instead of preempting. Blocks that the pool pins do
        not count: vLLM would wait for a store that may hang."""
        return self.handover is not None and self.handover.producing.moving

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must step on, because orders or reports are under way. vLLM asks
        in every mode, not only in push mode. It steps for held blocks anyway."""
        waits = self.handover is not None and self.handover.waits_for_a_step
        waits = waits or (self.pool is not None and self.pool.waits_for_a_step)
        return waits or not self._described

    def take_events(self) -> Iterable[Any]:
        return self.pool.take_events() if self.pool is not None else ()

    def reset_cache(self) -> bool:
        """vLLM calls this when weights were replaced, or when an operator clears the caches."""
        if self.pool is not None:
            self.pool.reset()
        if self.handover is not None:
            self.handover.reset()
        return True

    # In the scheduler's process: once

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Under a MultiConnector this brings only a sibling's; ours come with the first step."""
        ours = [told for told in metadata.values() if isinstance(told, FerryHandshake)]
        if ours and self._policy:
            log.info(self._policy)
            self._policy = ""
        self._hear(ours, alone=True)

    def _hear(self, handshakes: Iterable[FerryHandshake], *, alone: bool) -> None:
        """Collect the workers' descriptions. Once all are there, the engine is described."""
        if self._described:
            return
        for handshake in handshakes:
            rank = msgspec.msgpack.decode(handshake.rank, type=RankInfo)
            self._told[rank.pp_rank, rank.tp_rank] = handshake
        parallel = self._vllm_config.parallel_config
        expected = parallel.pipeline_parallel_size * cache_rank(parallel, 0, 0, 0).tp
        if len(self._told) < expected:
            return
        told = [handshake for _, handshake in sorted(self._told.items())]
        engines = [msgspec.msgpack.decode(one.engine, type=EngineInfo) for one in told]
        ranks = [msgspec.msgpack.decode(one.rank, type=RankInfo) for one in told]
        for engine, rank in zip(engines, ranks, strict=True):
            if engine != engines[0]:
                raise DescriptionError(
                    f"worker (pp {rank.pp_rank}, tp {rank.tp_rank}) describes the engine as "
                    f"{engine}, worker 0 as {engines[0]}"
                )
        self._described = True
        if self.handover is not None:
            producing = self.handover.producing
            producing.flat = all(one.flat for one in told)
            producing.second = any(one.second for one in told)
            self.handover.described(engines[0], ranks, alone=alone)
        if self.pool is not None:
            self.pool.described(engines[0], ranks)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self.pool is not None:
            self.pool.bind_blocks(gpu_block_pool)

    # In a worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe the cache once, for the hand-over and for the pool."""
        parts = [part for part in (self.worker, self.pool_worker) if part is not None]
        place = this_place(self._vllm_config.parallel_config)
        described = describe_worker(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            place.rank,
            parts[0].config.model_id,
            place.tp,
        )
        for part in parts:
            part.register(place, described, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None under a MultiConnector: it passes on one child's only, so in-tree ones get that."""
        return self._handshake if self._parent is None else None

    @property
    def _handshake(self) -> FerryHandshake | None:
        """This worker's description; None before `register_kv_caches`, and of later replicas."""
        part = self.worker or self.pool_worker
        return part.handshake if part is not None else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step's orders before vLLM launches the step, so that they do not wait for it."""
        super().bind_connector_metadata(connector_metadata)
        step = connector_metadata
        assert isinstance(step, FerryMetadata)
        if self.worker is not None and step.handover is not None:
            self.worker.start(step.handover, step=step.step, idle=step.idle, queueing=step.queueing)
        if self.pool_worker is not None and step.pool is not None:
            self.pool_worker.start(step.pool, idle=step.idle)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """vLLM calls this after it has launched the step, which is too late for loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves begin after the step is launched, and may copy this layer before the step ends."""
        if self.pool_worker is None:
            return
        step = self._get_connector_metadata()
        assert isinstance(step, FerryMetadata)
        if step.pool is not None and step.pool.saves:
            self.pool_worker.layer_computed(layer_name, step.pool.saves)

    def wait_for_save(self) -> None:
        if self.pool_worker is not None:
            self.pool_worker.launched()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for part in (self.worker, self.pool_worker):
            if part is not None:
                mine = part.results()
                results.finished_sending |= mine.finished_sending
                results.finished_recving |= mine.finished_recving
                results.failed_recving |= mine.failed_recving
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.pool_worker.take_invalid() if self.pool_worker is not None else set()

    def build_connector_worker_meta(self) -> FerryReport | None:
        """What ended since the last step. Under a MultiConnector, the first report also has this
        worker's description."""
        report = FerryReport()
        for part in (self.worker, self.pool_worker):
            if part is not None:
                report = report.aggregate(part.take_report())
        if not self._described and self._parent is not None and self._handshake is not None:
            self._described = True
            report.handshakes.append(self._handshake)
        return report if report != FerryReport() else None

    # In both

    def get_kv_connector_stats(self) -> FerryStats | None:
        handover, pool = self.handover or self.worker, self.pool or self.pool_worker
        stats = handover.take_stats() if handover is not None else FerryStats()
        if pool is not None:
            pool.add_stats(stats)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        return FerryStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        handover, pool = sections(cls.STYLE, extra or {})
        return FerryPromMetrics(
            vllm_config,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            handover=handover is not None,
            pool=pool is not None,
            beside=cls.IN_TREE_METRICS,
        )

    def shutdown(self) -> None:
        adapters = self._adapters if self._role == KVConnectorRole.SCHEDULER else None
        close_all(self.pool, self.pool_worker, self.handover, self.worker, adapters)


# Stand-ins for vLLM's own connectors, with their roles, keys, variables and request parameters:
#
#     {"kv_connector": "MooncakeConnector", "kv_connector_module_path": "kvferry.vllm", …}
#
# The classes have names of their own, because vLLM treats connectors that are *named* like its own
# in special ways. `kvferry.vllm` also exports them under the in-tree names.


class FerryNixlConnector(FerryConnector):
    """For NixlConnector: prefill first, and its answer is passed on to the decode engine."""

    STYLE: ClassVar[Style | None] = "nixl"
    IN_TREE_METRICS: ClassVar[Mapping[str, InTreeMetric]] = NIXL_METRICS


class FerryNixlPushConnector(FerryNixlConnector):
    """For NixlPushConnector: as above, or both engines get the request at once, with one id."""

    STYLE: ClassVar[Style | None] = "push"


class FerryMooncakeConnector(FerryConnector):
    """For MooncakeConnector: both engines get the request at once, with one transfer id."""

    STYLE: ClassVar[Style | None] = "mooncake"


class FerryPoolConnector(FerryConnector):
    """The pool alone: keeps KV blocks by content, for engines of any shape."""

    STYLE: ClassVar[Style | None] = None


class FerryMooncakeStoreConnector(FerryPoolConnector):
    """For MooncakeStoreConnector, with its configuration and its store."""

    POOL_DEFAULTS: ClassVar[Mapping[str, Any]] = {"store": "mooncake", "save_decode_cache": False}
    IN_TREE_METRICS: ClassVar[Mapping[str, InTreeMetric]] = STORE_METRICS


plugin.register()  # in case the package's entry points are not installed


def choose_policy(transfer: Any, wanted: str | None, arguments: Sequence[str]) -> str:
    """Compute what cannot be loaded, unless the operator wants such requests to fail. Returns a
    line for the log if the operator chose neither.

    vLLM's configuration does not show whether `fail` was chosen or is its default. So a choice is
    one that the process's arguments name, or our own key. vLLM's scheduler reads the policy after
    it has made its connector. Under a MultiConnector, `transfer` is a copy that vLLM does not read.
    """
    if wanted is not None:
        transfer.kv_load_failure_policy = wanted
    if wanted is not None or transfer.kv_load_failure_policy != "fail" or names_policy(arguments):
        return ""
    transfer.kv_load_failure_policy = "recompute"
    return (
        "kvferry: requests whose KV cache cannot be loaded are computed here "
        "(kv_load_failure_policy: recompute); to let them fail, set "
        '"load_failure_policy": "fail" in kv_connector_extra_config'
    )


def names_policy(arguments: Iterable[str]) -> bool:
    return any("load_failure_policy" in one.replace("-", "_") for one in arguments)


class FerryScheduler:
    """The hand-over in the scheduler's process: prefills for other engines (`producing`), prefills
    from other engines (`consuming`), the next step's `orders`, and how others find this engine.

    Others find it by its directory or its entry in a bootstrap. The directory is reachable from the
    start, and describes the engine once the workers have described themselves. The incarnation
    changes when vLLM resets its caches (new weights, sleep): that withdraws all holds and voids all
    tickets.
    """

    def __init__(self, parts: HandoverParts, vllm_config: Any, family: Family, index: int) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self.parts, self.config = parts, parts.config
        self._family, self._index = family, index
        self.engine_id = str(transfer.engine_id)
        self._loads_by_role = transfer.is_kv_consumer
        self._produces = transfer.is_kv_producer or parts.style in ROLELESS
        self._consumes = transfer.is_kv_consumer or parts.style in ROLELESS
        self._first = child(incarnation(vllm_config), index)
        self._dp_rank = int(parallel.data_parallel_index)
        self._shape = (cache_rank(parallel, 0, 0, 0).tp, parallel.pipeline_parallel_size)
        self._described: tuple[EngineInfo, list[RankInfo]] | None = None
        self._levels: dict[str, int] = {}
        config = parts.config
        self._sockets = Sockets(config.secret, config.admits)
        self._directory = Directory(self._sockets, host=config.host, port=config.port)
        self._directory.start()
        interval = config.lease_seconds / RENEWALS
        self._renewer = Renewer(self._sockets, interval_seconds=interval)
        self._rendezvous = Rendezvous(config, self._sockets)
        self.consuming = Consuming(parts, self._rendezvous, self._renewer)
        nixl_fields = {
            "dcp_size": parallel.decode_context_parallel_size,
            "transfer_mode": "push" if parts.style == "push" else "pull",
            # for blocks that a decode engine keeps, which kvferry does not offer
            "remote_blocks_expiry_time": None,
        }
        self.producing = Producing(
            parts,
            self.engine_id,
            self._first,
            self._shape,
            self._directory.port,
            told_too=nixl_fields if parts.style in ROLELESS else {},
            loads_here=lambda: self.consuming.busy,
        )
        self._bootstrap: Bootstrap | Registration | None = None
        if (config.bootstrap_port or config.bootstrap_server) and self._produces:
            self._bootstrap = self._open_bootstrap(parallel)
            self._tell_bootstrap()
        log.info(
            "kvferry: engine %s offers its caches at port %d", self.engine_id, self._directory.port
        )

    def prefills(self, request: Any) -> bool:
        """Whether a request is a prefill that this connector hands over."""
        params = request.kv_transfer_params or {}
        asked = self._produces and params.get("do_remote_decode")
        return bool(asked) and self._family.takes(self._index, params)

    def wants_prefill(self, request: Any) -> bool:
        """Whether this connector is to load a request's prompt from elsewhere."""
        params = request.kv_transfer_params or {}
        asked = self._consumes and (params.get("do_remote_prefill") or MARK in params)
        return bool(asked) and self._family.takes(self._index, params)

    @property
    def waits_for_a_step(self) -> bool:
        """Whether an idle engine should step, because orders or tickets wait for it."""
        return self.parts.orders.pending or self.consuming.unsettled

    def described(self, engine: EngineInfo, ranks: list[RankInfo], *, alone: bool) -> None:
        """All workers have described themselves.

        `alone`: not under a MultiConnector. Under one, vLLM's scheduler reads the MultiConnector's
        role, which no child can change. So a child loads only if its role says so.
        """
        if not alone:
            self._consumes = self._loads_by_role
        self._described = (engine, ranks)
        engine = self._publish()  # there may have been a reset since
        self._rendezvous.introduce(engine)
        self._renewer.introduce(engine)
        self.consuming.described_as(read_model(engine), read_shape(engine))

    def _publish(self) -> EngineInfo:
        """Let the directory answer with the descriptions, under the present incarnation."""
        assert self._described is not None
        now, (engine, ranks) = self.producing.incarnation, self._described
        engine = msgspec.structs.replace(engine, incarnation=now)
        ranks = [msgspec.structs.replace(rank, incarnation=now) for rank in ranks]
        self._directory.set_engine(engine, ranks)
        return engine

    def reset(self) -> None:
        """Void all tickets of this engine, because vLLM drops its caches."""
        self.consuming.reset()
        self.producing.incarnation = self.parts.orders.incarnation = after_reset(self._first)
        self.parts.orders.withdrawals += [hold.hold_id for hold in self.parts.orders.holds]
        if self._described is not None:
            self._publish()
        self._tell_bootstrap()
        log.info("kvferry: engine %s is reset: tickets from before are void", self.engine_id)

    def _open_bootstrap(self, parallel: Any) -> Bootstrap | Registration:
        """The bootstrap that Mooncake-style proxies ask. The first data-parallel rank serves all
        ranks, or those of its host if every host has its own API server."""
        config, local = self.config, parallel.local_engines_only
        first = not (parallel.data_parallel_rank_local if local else self._dp_rank)
        if first and not config.bootstrap_server:
            bootstrap = Bootstrap(config.host, config.bootstrap_port, config.secret)
            log.info("kvferry: bootstrap at port %d", bootstrap.port)
            return bootstrap
        host = config.host or "127.0.0.1"
        if not local and not is_loopback(parallel.data_parallel_master_ip):
            host = parallel.data_parallel_master_ip
        server = config.bootstrap_server or at_port(host.strip("[]"), config.bootstrap_port)
        return Registration(server, config.secret, config.bootstrap_seconds)

    def _tell_bootstrap(self) -> None:
        if self._bootstrap is None:
            return
        host = self.config.host or "127.0.0.1"
        where = (self.engine_id, host, self._directory.port, self.producing.incarnation)
        ranks = {
            tp: dict.fromkeys(range(self._shape[1]), NOT_FOR_OTHERS) for tp in range(self._shape[0])
        }
        self._bootstrap.put(self._dp_rank, Whereabouts(*where).entry(ranks))

    def take_stats(self) -> FerryStats:
        held = {"holds_open": len(self.producing.held), "held_blocks": self.producing.held_blocks}
        if held != self._levels:
            self._levels = held
            self.parts.stats.level(f"{self._index}/scheduler", **held)
        return self.parts.stats.take()

    def close(self) -> None:
        close_all(self.parts.spans, self._rendezvous, self._renewer, self._bootstrap)
        close_all(self._directory, self._sockets)
