"""What hand-over and pool tell vLLM in one connector: each half's records, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvferry.vllm.metadata import FerryMetadata
from kvferry.vllm.pool_metadata import PoolMetadata, PoolPromMetrics, PoolStats
from kvferry.vllm.prometheus import FerryPromMetrics
from kvferry.vllm.stats import FerryStats


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
