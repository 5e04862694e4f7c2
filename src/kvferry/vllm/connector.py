"""`HandoverConnector`: vLLM's connector interface, passed on to a scheduler or a worker of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.vllm.base import WholeRequests
from kvferry.vllm.config import FerryConfig, Style
from kvferry.vllm.metadata import FerryHandshake, FerryMetadata, FerryWorkerMetadata
from kvferry.vllm.multiconnector import Family, Siblings
from kvferry.vllm.prefill import HandedOver
from kvferry.vllm.prometheus import FerryPromMetrics
from kvferry.vllm.scheduler import FerryScheduler
from kvferry.vllm.stats import as_stats
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
        handed_over = HandedOver.of(vllm_config, kv_cache_config)
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
