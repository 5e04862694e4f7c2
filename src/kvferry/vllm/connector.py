"""`HandoverConnector`: vLLM's connector interface, passed on to a scheduler or a worker of ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.errors import DescriptionError
from kvferry.vllm.base import WholeRequests
from kvferry.vllm.config import FerryConfig, Style
from kvferry.vllm.metadata import (
    FerryHandshake,
    FerryMetadata,
    FerryWorkerMetadata,
    PoolMetadata,
    PoolPromMetrics,
    PoolStats,
)
from kvferry.vllm.metrics import FerryPromMetrics, FerryStats, as_stats
from kvferry.vllm.multiconnector import Family, Siblings, multiconnector
from kvferry.vllm.pool.connector import FerryPoolConnector
from kvferry.vllm.producing import PrefillCut
from kvferry.vllm.scheduler import FerryScheduler
from kvferry.vllm.worker import FerryWorker


class HandoverConnector(WholeRequests):
    """Hands KV caches over between engines of any shape."""

    STYLE: ClassVar[Style] = "ferry"
    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._family = family = Family.of(role, kv_cache_config)
        index = family.join(self.STYLE)
        config = FerryConfig.read(
            vllm_config.kv_transfer_config.kv_connector_extra_config or {},
            self.STYLE,
            rank=vllm_config.parallel_config.data_parallel_index,
        )
        if self.STYLE != "ferry" and config.secret and config.host is None:
            config = replace(config, host=own_address())  # where in-tree connectors listen too
        self.scheduler: FerryScheduler | None = None
        self.worker: FerryWorker | None = None
        handed_over = PrefillCut.of(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = FerryScheduler(config, vllm_config, family, index, handed_over)
        else:
            siblings = Siblings.of(HandoverConnector, index)
            if siblings is not None and vllm_config.kv_transfer_config.is_kv_producer:
                handed_over.require_whole_prompts(siblings)
            self.worker = FerryWorker(config, vllm_config, kv_cache_config, index, siblings)

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        assert self.scheduler is not None
        ours = {key: told for key, told in metadata.items() if isinstance(told, FerryHandshake)}
        self.scheduler.add_handshakes(ours)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.asking.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.asking.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self.scheduler is not None
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, FerryWorkerMetadata):
            self.scheduler.described_by(told.handshakes)
            self.scheduler.offering.closed(told.closed)
        failed = connector_output.failed_recving or ()
        self.scheduler.asking.received(connector_output.finished_recving or (), failed)
        self.scheduler.offering.sent(connector_output.finished_sending or ())

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self.scheduler is not None
        orders = self.scheduler.take_orders()
        orders.idle = scheduler_output.total_num_scheduled_tokens == 0
        return orders

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        return self.scheduler.finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self.scheduler is not None and self.scheduler.offering.moving

    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping until its workers have heard all orders."""
        return self.scheduler is not None and self.scheduler.waits_for_a_step

    def reset_cache(self) -> bool:
        assert self.scheduler is not None
        self.scheduler.reset()
        return True

    # Worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, FerryMetadata) and self.worker is not None
        self.worker.start(orders)

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished_count(self) -> int | None:
        """Every rank of every stage reports every id: vLLM's default, the world's size."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.tell() if self.worker is not None else None

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        part = self.scheduler or self.worker
        return part.take_stats() if part is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return as_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def own_address() -> str:
    """This host's address, as vLLM finds it (VLLM_HOST_IP wins)."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


# --------------------------------------------------------------------------------------------------
# Stand-ins for vLLM's own connectors: their roles, keys, variables and request parameters.
#
#     {"kv_connector": "MooncakeConnector", "kv_connector_module_path": "kvferry.vllm", …}
#
# The classes have names of their own, and `kvferry.vllm` calls them by the in-tree ones too: vLLM
# takes special measures for connectors *named* like its own, which are not for ours.
# --------------------------------------------------------------------------------------------------


class FerryNixlConnector(HandoverConnector):
    """For NixlConnector: prefill first, and its answer is passed on to the decode engine."""

    STYLE: ClassVar[Style] = "nixl"


class FerryNixlPushConnector(HandoverConnector):
    """For NixlPushConnector: as above, or both engines know each other by the request's id."""

    STYLE: ClassVar[Style] = "push"


class FerryMooncakeConnector(HandoverConnector):
    """For MooncakeConnector: both engines get the request at once, with one transfer id."""

    STYLE: ClassVar[Style] = "mooncake"


# --------------------------------------------------------------------------------------------------
# `FerryConnector` with a `pool` section: hand-over and shared pool in one connector.
#
# A request with a ticket is loaded from the engine that prefilled it; any other is looked up in the
# pool. So a prefill engine loads what the pool has, computes the rest, saves it, and hands all of
# it over; the decode engine takes the hand-over, and saves what it adds. Without the section, this
# is the hand-over alone.
# --------------------------------------------------------------------------------------------------

log = logging.getLogger("kvferry")


class FerryConnector(HandoverConnector):
    """Hands KV caches over between engines of any shape, and keeps them in a pool if asked to."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        extra, section = _halves(transfer)
        self.pool: FerryPoolConnector | None = None
        super().__init__(_with_extra(vllm_config, extra), role, kv_cache_config)
        if section is None:
            return
        self.pool = FerryPoolConnector(_with_extra(vllm_config, section), role, kv_cache_config)
        if transfer.kv_load_failure_policy == "fail":
            # Under a MultiConnector this is a copy that vLLM does not read.
            transfer.kv_load_failure_policy = "recompute"
            if role == KVConnectorRole.WORKER and multiconnector() is None:
                log.info("with a pool, what cannot be loaded is computed (kv_load_failure_policy)")

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        if self.pool is not None:
            self.pool.set_xfer_handshake_metadata_pp_aware(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if self.pool is not None:
            self.pool.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if self.pool is not None:
            self.pool.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count != 0 or self.pool is None:
            if count and self.pool is not None and self.pool.scheduler is not None:
                # its producer has saved this already
                self.pool.scheduler.elsewhere(request, num_computed_tokens + count)
            return count, later
        return self.pool.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        promised = self.pool is not None and self.pool.promised(request)
        super().update_state_after_alloc(request, blocks, 0 if promised else num_external_tokens)
        if self.pool is not None:
            self.pool.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        ferry = super().build_connector_meta(scheduler_output)
        if self.pool is None:
            return ferry
        pool = self.pool.build_connector_meta(scheduler_output)
        assert isinstance(pool, PoolMetadata)
        return BothMetadata(ferry, pool)

    def update_connector_output(self, connector_output: Any) -> None:
        if self.pool is None:
            super().update_connector_output(connector_output)
            return
        told = connector_output.kv_connector_worker_meta
        if not isinstance(told, BothReport):
            told = BothReport(None, None)
        ours, pools = copy(connector_output), copy(connector_output)
        ours.kv_connector_worker_meta, pools.kv_connector_worker_meta = told.ferry, told.pool
        super().update_connector_output(ours)
        self.pool.update_connector_output(pools)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.pool is not None:
            self.pool.request_finished_all_groups(request, block_ids)
        return super().request_finished_all_groups(request, block_ids)

    def has_pending_push_work(self) -> bool:
        mine = super().has_pending_push_work()
        return bool(mine) or (self.pool is not None and self.pool.has_pending_push_work())

    def take_events(self) -> Iterable[Any]:
        return self.pool.take_events() if self.pool is not None else ()

    def reset_cache(self) -> bool:
        if self.pool is not None:
            self.pool.reset_cache()
        return super().reset_cache()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self.pool is not None:
            self.pool.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(connector_metadata, BothMetadata):
            assert self.pool is not None
            super().bind_connector_metadata(connector_metadata.ferry)
            self.pool.bind_connector_metadata(connector_metadata.pool)
        else:
            super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self.pool is not None:
            self.pool.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self.pool is not None:
            self.pool.start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self.pool is not None:
            self.pool.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self.pool is not None:
            mine = self.pool.get_transfer_results(finished_req_ids)
            results.finished_sending |= mine.finished_sending
            results.finished_recving |= mine.finished_recving
            results.failed_recving |= mine.failed_recving
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        mine: set[int] = super().get_block_ids_with_load_errors()
        return mine | (self.pool.get_block_ids_with_load_errors() if self.pool else set())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        ferry = super().build_connector_worker_meta()
        if self.pool is None:
            return ferry
        pool = self.pool.build_connector_worker_meta()
        return BothReport(ferry, pool) if ferry or pool else None

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        ferry = super().get_kv_connector_stats()
        if self.pool is None:
            return ferry
        return BothStats.of(ferry, self.pool.get_kv_connector_stats())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        if data and data.keys() <= {"ferry", "pool"}:
            return BothStats(data=data)
        return super().build_kv_connector_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        _, section = _halves(vllm_config.kv_transfer_config)
        kind = FerryPromMetrics if section is None else BothPromMetrics
        return kind(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        super().shutdown()


def _halves(transfer: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The keys of the hand-over, and those of the pool; None where there is none."""
    extra = dict(transfer.kv_connector_extra_config or {})
    section = extra.pop("pool", None)
    if section is not None and not isinstance(section, bool | Mapping):
        raise DescriptionError(
            f"`pool` in kv_connector_extra_config is true, false or an object, not {section!r}"
        )
    if section is None or section is False:
        return extra, None
    return extra, {} if section is True else dict(section)


def _with_extra(vllm_config: Any, extra: dict[str, Any]) -> Any:
    """The same configuration with other keys for the connector, where they differ."""
    if extra == (vllm_config.kv_transfer_config.kv_connector_extra_config or {}):
        return vllm_config
    changed = copy(vllm_config)
    changed.kv_transfer_config = copy(vllm_config.kv_transfer_config)
    changed.kv_transfer_config.kv_connector_extra_config = extra
    return changed


# --------------------------------------------------------------------------------------------------
# What hand-over and pool tell vLLM in one connector: each half's records, side by side.
# --------------------------------------------------------------------------------------------------


@dataclass
class BothMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders."""

    ferry: KVConnectorMetadata = field(default_factory=FerryMetadata)
    pool: PoolMetadata = field(default_factory=PoolMetadata)


@dataclass
class BothReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers report: of one worker, then of all together."""

    ferry: KVConnectorWorkerMetadata | None
    pool: KVConnectorWorkerMetadata | None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> BothReport:
        assert isinstance(other, BothReport)
        return BothReport(_together(self.ferry, other.ferry), _together(self.pool, other.pool))


def _together(
    one: KVConnectorWorkerMetadata | None, other: KVConnectorWorkerMetadata | None
) -> KVConnectorWorkerMetadata | None:
    if one is None or other is None:
        return one or other
    return one.aggregate(other)


@dataclass
class BothStats(KVConnectorStats):  # type: ignore[misc]
    """The halves' own data under their names; either may be missing."""

    @classmethod
    def of(cls, ferry: KVConnectorStats | None, pool: KVConnectorStats | None) -> BothStats | None:
        parts = {"ferry": ferry, "pool": pool}
        data = {name: part.data for name, part in parts.items() if part is not None}
        return cls(data=data) if data else None

    @property
    def ferry(self) -> FerryStats | None:
        return FerryStats(self.data["ferry"]) if "ferry" in self.data else None

    @property
    def pool(self) -> PoolStats | None:
        return PoolStats(data=self.data["pool"]) if "pool" in self.data else None

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> BothStats:
        assert isinstance(other, BothStats)
        for name in ("ferry", "pool"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if theirs is not None:
                added = theirs if mine is None else mine.aggregate(theirs)
                self.data[name] = added.data
        return self

    def reduce(self) -> dict[str, int | float]:
        line: dict[str, int | float] = dict(self.ferry.reduce()) if self.ferry else {}
        if self.pool is not None:
            line |= {f"pool {name}": count for name, count in self.pool.reduce().items()}
        return line


class BothPromMetrics(FerryPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._pool = PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if "ferry" in transfer_stats_data:
            super().observe(transfer_stats_data["ferry"], engine_idx)
        if "pool" in transfer_stats_data:
            self._pool.observe(transfer_stats_data["pool"], engine_idx)
