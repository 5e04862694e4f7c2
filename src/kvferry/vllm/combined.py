"""`FerryConnector` with a `pool` section: hand-over and shared pool in one connector.

A request with a ticket is loaded from the engine that prefilled it; any other is looked up in the
pool. So a prefill engine loads what the pool has, computes the rest, saves it, and hands all of it
over; the decode engine takes the hand-over, and saves what it adds. Without the section, this is
the hand-over alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvferry.errors import DescriptionError
from kvferry.vllm.both import BothMetadata, BothPromMetrics, BothReport, BothStats
from kvferry.vllm.connector import HandoverConnector
from kvferry.vllm.multiconnector import multiconnector
from kvferry.vllm.pool_connector import FerryPoolConnector
from kvferry.vllm.pool_metadata import PoolMetadata
from kvferry.vllm.prometheus import FerryPromMetrics

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
