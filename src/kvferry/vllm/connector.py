"""`FerryConnector`: vLLM's connector interface, passed on to a scheduler or a worker of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.version import __version__ as vllm_version

from kvferry.vllm.config import FerryConfig, incarnation, require_supported_vllm
from kvferry.vllm.metadata import FerryMetadata
from kvferry.vllm.prefill import HandedOver
from kvferry.vllm.scheduler import FerryScheduler
from kvferry.vllm.worker import FerryWorker


class FerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands KV caches over between engines of any shape."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        require_supported_vllm(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = FerryConfig.read(transfer.kv_connector_extra_config or {})
        if config.port:  # each data parallel rank is an engine of its own
            number = vllm_config.parallel_config.data_parallel_index
            config = replace(config, port=config.port + number)
        self._groups = tuple(range(len(kv_cache_config.kv_cache_groups)))
        self.scheduler: FerryScheduler | None = None
        self.worker: FerryWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = FerryScheduler(
                config,
                str(transfer.engine_id),
                incarnation(vllm_config),
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                handed_over=HandedOver.of(vllm_config, kv_cache_config),
            )
        else:
            self.worker = FerryWorker(config, vllm_config, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Head-major pages keep runs long when tp differs; MLA has no heads to order."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    # Scheduler

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): m for tp, m in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        assert self.scheduler is not None
        self.scheduler.set_handshakes(metadata)

    def on_new_request(self, request: Any) -> None:
        if self.scheduler is not None:
            self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler is not None:
            self.scheduler.received(connector_output.finished_recving or ())

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self.scheduler is not None
        orders = self.scheduler.take_orders()
        orders.idle = scheduler_output.total_num_scheduled_tokens == 0
        return orders

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        return self.scheduler.finished(request, block_ids)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self.worker is not None
        self.worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake() if self.worker is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, FerryMetadata) and self.worker is not None
        self.worker.start(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole and asynchronous; no layer is waited for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Consumers read; nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.worker is not None
        return self.worker.results()

    def shutdown(self) -> None:
        for part in (self.scheduler, self.worker):
            if part is not None:
                part.close()
