"""kvferry's metrics in vLLM's `/metrics`: names, kinds and meaning.

Names begin with `vllm:kvferry_`, so that vLLM treats them as its own (multi-process mode, several
engines behind one API server, unregistering). Loads are counted by rank: each rank moves its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvferry.vllm.multiconnector import Shared
from kvferry.vllm.stats import LEVELS, Here, levels

PREFIX = "vllm:kvferry_"
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
HISTOGRAMS: Mapping[str, str] = {
    "queue_seconds": "From a request's arrival at the decode engine to the order to load its cache",
    "claim_seconds": "From the order until bytes can move, by rank; early ones wait here",
    "plan_seconds": "Binding plans to a request's blocks, by rank",
    "transfer_seconds": "Moving bytes, by rank",
    "total_seconds": "From a request's arrival at the decode engine to its cache being there",
}
COUNTERS: Mapping[str, str] = {  # of observations
    "bytes": "Bytes of KV cache loaded, all ranks",
    "zeroed_bytes": "Bytes of draft layers zeroed, which the prefill engine has not, all ranks",
    "descriptors": "Copies that loads were made of, all ranks",
}
REASONS: Mapping[
    str, tuple[str, tuple[str, ...]]
] = {  # stats, then reasons that show from the start
    "load_failures": ("failures", ("StaleTicket", "PeerLost", "DeadlineExceeded", "Cancelled")),
    "holds_closed": ("holds", ("delivered", "failed", "expired", "withdrawn")),
    "requests_not_held": ("unheld", ("limit", "reused id", "bad id", "cut", "unfit", "lora")),
    "requests_computed_here": ("computed_here", get_args(Here)),
}
MEANING: Mapping[str, str] = {
    "load_failures": "Loads that failed, by rank and kind of error",
    "holds_closed": "Holds that ended, by how",
    "requests_not_held": "Prefills whose cache was not kept for a consumer, by reason",
    "requests_computed_here": "Requests for a remote prefill that were not loaded, by reason",
    "holds_open": "Finished requests whose blocks are kept for a consumer",
    "held_blocks": "Blocks that those requests keep",
    "claims_parked": "Claims that wait for a prefill to finish, all ranks",
    "loads_abandoned": "Loads that are over and not reported: bytes of theirs may still arrive",
    "blocks_quarantined": "Blocks that abandoned loads keep",
}


@dataclass(slots=True)
class _Made:
    """Metrics of one engine configuration; children of a MultiConnector share them."""

    histograms: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    levels: dict[str, Any] = field(default_factory=dict)
    last: dict[int, dict[str, dict[str, int]]] = field(default_factory=dict)  # by engine, reporter


_shared: Shared[_Made] = Shared()


class FerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = _shared.get(per_engine_labelvalues, lambda: self._make(labelnames))

    def _make(self, labels: list[str]) -> _Made:
        made = _Made()
        for name, meaning in HISTOGRAMS.items():
            made.histograms[name] = self._histogram_cls(
                name=PREFIX + name, documentation=meaning, buckets=SECONDS, labelnames=labels
            )
        loads = "Loads that ended well, by rank"
        for name, meaning in {"loads": loads, **COUNTERS}.items():
            made.counters[name] = self._counter_cls(
                name=PREFIX + name, documentation=meaning, labelnames=labels
            )
        for name in REASONS:
            made.counters[name] = self._counter_cls(
                name=PREFIX + name, documentation=MEANING[name], labelnames=[*labels, "reason"]
            )
        for name in LEVELS:
            made.levels[name] = self._gauge_cls(
                name=PREFIX + name,
                documentation=MEANING[name],
                labelnames=labels,
                multiprocess_mode="mostrecent",
            )
        for values in self.per_engine_labelvalues.values():  # all are there from the start
            for metric in (*made.histograms.values(), *made.levels.values()):
                metric.labels(*values)
            for name in ("loads", *COUNTERS):
                made.counters[name].labels(*values)
            for name, (_, reasons) in REASONS.items():
                for reason in reasons:
                    made.counters[name].labels(*values, reason)
        return made

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        data, made = transfer_stats_data, self._metrics
        for name in HISTOGRAMS:
            metric = made.histograms[name].labels(*values)
            for value in data[name]:
                metric.observe(value)
        made.counters["loads"].labels(*values).inc(len(data["bytes"]))
        for name in COUNTERS:
            made.counters[name].labels(*values).inc(sum(data[name]))
        for name, (stats, _) in REASONS.items():
            for reason, times in data[stats].items():
                made.counters[name].labels(*values, reason).inc(times)
        if data["levels"]:
            last = made.last.setdefault(engine_idx, {})
            last.update(data["levels"])
            for name, level in levels(last).items():
                made.levels[name].labels(*values).set(level)
