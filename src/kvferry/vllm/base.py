"""What our connectors share of vLLM's interface: caches are described by stage and rank, loads and
saves are whole and asynchronous, and every group of a request is loaded."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.version import __version__ as vllm_version

from kvferry.vllm.config import require_supported_vllm


class WholeRequests(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A connector of ours; what it does is its `scheduler`'s or its `worker`'s: one is None."""

    scheduler: Any = None
    worker: Any = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        require_supported_vllm(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        self._groups = tuple(range(len(kv_cache_config.kv_cache_groups)))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Head-major pages keep runs long when tp differs; MLA has no heads to order."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    # Scheduler

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): m for tp, m in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        if self.scheduler is not None:
            self.scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._groups

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer: tuple[bool, dict[str, Any] | None]
        answer = self.request_finished_all_groups(request, (block_ids,))
        return answer

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self.worker is not None
        self.worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake() if self.worker is not None else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No layer is waited for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        assert self.worker is not None
        return self.worker.results()

    # Both

    def shutdown(self) -> None:
        for part in (self.scheduler, self.worker):
            if part is not None:
                part.close()
