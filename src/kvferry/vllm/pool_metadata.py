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
from kvferry.pool.stats import EVENTS
from kvferry.vllm.metadata import FerryHandshake
from kvferry.vllm.multiconnector import Shared


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
    """Counts of one interval, by name, and under `levels` what is so now, by who said it last."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> PoolStats:
        levels = {**self.data.get("levels", {}), **other.data.get("levels", {})}
        counts = Counter(self.counts) + Counter(PoolStats(data=other.data).counts)
        return PoolStats(data={**counts, **({"levels": levels} if levels else {})})

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.data.items() if name != "levels"}

    def reduce(self) -> dict[str, int | float]:
        level = sum(self.data.get("levels", {}).values())
        return dict(sorted(self.counts.items())) | ({"blocks_quarantined": level} if level else {})

    def is_empty(self) -> bool:
        return not self.data


@dataclass(slots=True)
class _Made:
    """Metrics of one logger; children of a MultiConnector share them."""

    events: Any
    quarantined: Any
    last: dict[int, dict[str, int]] = field(default_factory=dict)  # by engine, who said it


_shared: Shared[_Made] = Shared()


class PoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvferry_pool_total{event="..."}`: one counter for each thing that is counted; and
    `vllm:kvferry_pool_blocks_quarantined`, which falls again."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = _shared.get(per_engine_labelvalues, lambda: self._make(labelnames))

    def _make(self, labels: list[str]) -> _Made:
        made = _Made(
            self._counter_cls(
                name="vllm:kvferry_pool",
                documentation="What kvferry's pool looked up, loaded and saved, and what failed.",
                labelnames=[*labels, "event"],
            ),
            self._gauge_cls(
                name="vllm:kvferry_pool_blocks_quarantined",
                documentation="Blocks that a store may still write, of loads that were given up",
                labelnames=labels,
                multiprocess_mode="mostrecent",
            ),
        )
        for values in self.per_engine_labelvalues.values():  # all are there from the start
            made.quarantined.labels(*values)
            for event in EVENTS:
                made.events.labels(*values, event)
        return made

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        stats, values = PoolStats(data=transfer_stats_data), self.per_engine_labelvalues[engine_idx]
        for event, count in stats.counts.items():
            self._metrics.events.labels(*values, event).inc(count)
        if levels := stats.data.get("levels"):
            last = self._metrics.last.setdefault(engine_idx, {})
            last.update(levels)
            self._metrics.quarantined.labels(*values).set(sum(last.values()))
