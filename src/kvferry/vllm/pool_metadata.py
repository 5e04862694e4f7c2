"""What the pool's scheduler and workers tell each other through vLLM, step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.pool.orders import Loaded, Saved
from kvferry.pool.requests import PoolOrders
from kvferry.vllm.metadata import FerryHandshake


@dataclass
class PoolMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, the same for all workers."""

    orders: PoolOrders = field(default_factory=PoolOrders)
    idle: bool = False  # the step computes nothing


@dataclass
class PoolReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended on workers since the last step: of one worker, then of all together."""

    saved: list[Saved] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)
    handshakes: list[FerryHandshake] = field(default_factory=list)  # under a MultiConnector

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PoolReport:
        assert isinstance(other, PoolReport)
        return PoolReport(
            self.saved + other.saved,
            self.loaded + other.loaded,
            self.recovered + other.recovered,
            self.handshakes + other.handshakes,
        )


@dataclass
class PoolStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval, by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> PoolStats:
        return PoolStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class PoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvferry_pool_total{event="..."}`: one counter for each thing that is counted."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter = self._counter_cls(
            name="vllm:kvferry_pool",
            documentation="What kvferry's pool looked up, loaded and saved, and what went wrong.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for event, count in (transfer_stats_data or {}).items():
            labels = [*self.per_engine_labelvalues[engine_idx], event]
            self._counter.labels(*labels).inc(count)
