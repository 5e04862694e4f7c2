"""What schedulers and workers tell each other, step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.handover.holds import HoldOrder
from kvferry.handover.load import Load
from kvferry.handover.ticket import Ticket
from kvferry.pool.orders import EVENTS, PoolLoaded, Saved
from kvferry.pool.scheduler import PoolOrders
from kvferry.vllm.multiconnector import Shared

ENDS = ("delivered", "withdrawn", "expired", "failed")  # of holds, from good to bad


@dataclass
class FerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, the same for all workers."""

    holds: list[HoldOrder] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[Ticket] = field(default_factory=list)
    withdrawals: list[str] = field(default_factory=list)  # holds that will not come, or must go
    incarnation: str = ""  # not empty: be another one from now on, before all else
    idle: bool = False  # the step computes nothing

    @property
    def pending(self) -> bool:
        """Whether workers should hear of it, also where there is nothing to compute."""
        return bool(
            self.holds
            or self.loads
            or self.cancels
            or self.releases
            or self.withdrawals
            or self.incarnation
        )


@dataclass
class FerryHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's description, for the directory."""

    engine: bytes  # msgpack of EngineInfo
    rank: bytes  # msgpack of RankInfo
    flat: bool = True  # whether no other child of a MultiConnector answers in responses too
    second: bool = False  # whether another child sees requests first


@dataclass
class FerryWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell with a step: how holds ended, by request; under a MultiConnector, with
    their first one, what they are."""

    handshakes: list[FerryHandshake]
    closed: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FerryWorkerMetadata:
        assert isinstance(other, FerryWorkerMetadata)
        closed = dict(self.closed)
        for request_id, why in other.closed.items():
            closed[request_id] = worse(why, closed.get(request_id))
        return FerryWorkerMetadata(self.handshakes + other.handshakes, closed)


def worse(one: str, other: str | None) -> str:
    """Of two ends of one hold, on two ranks."""
    return one if other is None else max(one, other, key=ENDS.index)


# --------------------------------------------------------------------------------------------------
# What the pool's scheduler and workers tell each other through vLLM, step by step.
# --------------------------------------------------------------------------------------------------


@dataclass
class PoolMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, the same for all workers."""

    orders: PoolOrders = field(default_factory=PoolOrders)
    idle: bool = False  # the step computes nothing


@dataclass
class PoolReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended on workers since the last step: of one worker, then of all together."""

    saved: list[Saved] = field(default_factory=list)
    loaded: list[PoolLoaded] = field(default_factory=list)
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
class _PoolMade:
    """Metrics of one logger; children of a MultiConnector share them."""

    events: Any
    quarantined: Any
    last: dict[int, dict[str, int]] = field(default_factory=dict)  # by engine, who said it


_shared: Shared[_PoolMade] = Shared()


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

    def _make(self, labels: list[str]) -> _PoolMade:
        made = _PoolMade(
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
