"""`FerryPoolConnector`: vLLM's connector interface over the shared pool."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvferry.vllm.base import WholeRequests
from kvferry.vllm.metadata import FerryHandshake, PoolMetadata, PoolPromMetrics, PoolStats
from kvferry.vllm.multiconnector import multiconnector
from kvferry.vllm.pool.config import PoolConfig, default_tenant
from kvferry.vllm.pool.scheduler import VllmPoolScheduler
from kvferry.vllm.pool.worker import PoolWorker

log = logging.getLogger("kvferry")

# Names under which the pool is all that an engine has as a connector.
POOL_NAMES = ("FerryPoolConnector", "FerryMooncakeStoreConnector", "MooncakeStoreConnector")


class FerryPoolConnector(WholeRequests):
    """Keeps KV blocks by content, for engines of any shape."""

    defaults: dict[str, Any] = {}

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        defaults = {"cache_prefix": default_tenant(), **self.defaults}
        config = PoolConfig.read(transfer.kv_connector_extra_config or {}, **defaults)
        if transfer.kv_load_failure_policy == "fail" and transfer.kv_connector in POOL_NAMES:
            # a block that a cache lost is computed; that is no reason to end a request
            transfer.kv_load_failure_policy = "recompute"
        self.scheduler: VllmPoolScheduler | None = None
        self.worker: PoolWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            limits = config.limits(kv_cache_config.num_blocks, produces=transfer.is_kv_producer)
            events = vllm_config.kv_events_config
            self.scheduler = VllmPoolScheduler(
                config,
                vllm_config,
                limits,
                events=bool(events and events.enable_kv_cache_events),
            )
        else:
            parent = multiconnector()
            if parent is not None and vllm_config.parallel_config.rank == 0:
                _warn_of_policy(parent)
            alone = parent is None
            self.worker = PoolWorker(config, vllm_config, kv_cache_config, alone=alone)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, and nothing worse."""
        return False

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        assert self.scheduler is not None
        # Under a MultiConnector they are a sibling's; ours come with the workers' first step.
        if metadata and all(isinstance(told, FerryHandshake) for told in metadata.values()):
            self.scheduler.set_handshakes(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.bind_blocks(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.matched(request, num_computed_tokens)

    def promised(self, request: Any) -> bool:
        """Whether the last match of this request was ours."""
        return self.scheduler is not None and self.scheduler.pool.promised(request.request_id)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self.scheduler is not None
        return self.scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler is not None:
            self.scheduler.reported(
                connector_output.kv_connector_worker_meta, connector_output.finished_recving or ()
            )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        self.scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping until saves have ended and routers were told; and at the
        start under a MultiConnector, until its workers have described themselves."""
        return self.scheduler is not None and (
            self.scheduler.pool.has_work
            or self.scheduler.has_events
            or not self.scheduler.pool.started
        )

    # `has_pending_block_frees` stays False: it makes vLLM wait for a store that may hang, where
    # it can preempt. Pinned blocks are just not there, until they are released.

    def take_events(self) -> Iterable[Any]:
        return self.scheduler.take_events() if self.scheduler is not None else ()

    def reset_cache(self) -> bool | None:
        """Weights were replaced, or the operator wants a clean start: a namespace of its own."""
        if self.scheduler is None:
            return None
        self.scheduler.reset()
        return True

    # Worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PoolMetadata) and self.worker is not None
        self.worker.start(metadata)

    def wait_for_save(self) -> None:
        """Saves begin; nobody waits for them."""
        assert self.worker is not None
        self.worker.save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        return self.worker.take_invalid()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self.worker is not None
        return self.worker.take_report()

    # Both

    def get_kv_connector_stats(self) -> PoolStats | None:
        part = self.worker or self.scheduler
        counts = part.take_counts() if part is not None else {}
        return PoolStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolPromMetrics:
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _warn_of_policy(transfer: Any) -> None:
    """Of a MultiConnector, which is not ours to change: a sibling may rely on it."""
    if transfer.kv_load_failure_policy == "fail":
        log.warning(
            "a request ends when a block that the pool promised is gone, because "
            "kv_load_failure_policy is 'fail'; set it to 'recompute' beside MultiConnector"
        )


class FerryMooncakeStoreConnector(FerryPoolConnector):
    """What stands in for vLLM's MooncakeStoreConnector, with its configuration and its store."""

    defaults = {"store": "mooncake", "save_decode_cache": False}
