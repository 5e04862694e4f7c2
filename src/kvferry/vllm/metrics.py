"""kvferry's metrics: from workers and the scheduler to vLLM's log and `/metrics`; and its traces.

Workers report loads and how holds ended, the scheduler reports requests and blocks. vLLM adds the
reports up every step (`FerryStats.aggregate`) and sends them to the process that logs. There,
`FerryPromMetrics` turns them into `/metrics`, and `FerryStats.reduce` into one line of log per
interval. Lists hold observations, counts add up. Levels (holds open now) are kept by reporter:
the sum goes over reporters, and a reporter's later level replaces its earlier one.

Names begin with `vllm:kvferry_`, so that vLLM treats them as its own (multi-process mode, several
engines behind one API server, unregistering). Loads are counted by rank: each rank moves its part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.handover.load import Loaded
from kvferry.pool.orders import EVENTS
from kvferry.vllm.multiconnector import Shared

# Observations: one number a load and rank, or one a request.
PER_LOAD = (
    "bytes",
    "descriptors",
    "zeroed_bytes",
    "claim_seconds",
    "plan_seconds",
    "transfer_seconds",
)
PER_REQUEST = ("queue_seconds", "total_seconds")
COUNTS = ("failures", "holds", "unheld", "computed_here")  # each by reason
# Why a request that asked for a remote prefill was not loaded. Comments: the part to look at.
Here = Literal[
    "no ticket",  # the proxy, or another connector on the prefill engine
    "bad ticket",  # the proxy changed it, or the engines' versions or models differ
    "another prompt",  # the proxy: chat template, truncation
    "not held",  # the prefill engine: its `requests_not_held` says why
    "not allowed",  # `peers` or the secret
    "not found",  # the prefill engine is gone, or not reachable, or not known where it was named
    "unfit",  # the request itself: embeddings, a session, media without names
    "lora",  # other files of its adapter, or it is not known which were loaded
    "reset",  # this engine's caches were, while the request waited
    "error",  # of ours; the log has the traceback
]
LEVELS = (
    "holds_open",
    "held_blocks",
    "claims_parked",
    "loads_abandoned",
    "blocks_quarantined",
)
WORDS: Mapping[str, str] = {  # of the log's line
    "failures": "failed",
    "holds": "hold",
    "unheld": "not held",
    "computed_here": "computed here",
}
STEPS: Mapping[str, tuple[str, ...]] = {  # of a load, by the names in `Loaded.seconds`
    "claim_seconds": ("meet", "offer", "wait", "claim"),
    "plan_seconds": ("bind",),
    "transfer_seconds": ("read", "push", "zero"),
}


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """What one interval brought: plain dicts and lists, `handover` and `pool`; either may be
    missing. vLLM sends the data between processes."""

    @classmethod
    def of(cls, handover: HandoverStats | None, pool: dict[str, Any]) -> FerryStats | None:
        """None where there is nothing to tell."""
        data = {"handover": handover.data} if handover is not None else {}
        if pool:
            data["pool"] = pool
        return cls(data) if data else None

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        kinds: dict[str, Any] = {"handover": HandoverStats, "pool": PoolStats}
        for name, theirs in other.data.items():
            kind, mine = kinds[name], self.data.get(name)
            self.data[name] = kind(mine).aggregate(kind(theirs)).data if mine else theirs
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of log."""
        line: dict[str, int | float] = {}
        if "handover" in self.data:
            line |= HandoverStats(self.data["handover"]).reduce()
        if "pool" in self.data:
            pool = PoolStats(self.data["pool"]).reduce()
            line |= {f"pool {name}": count for name, count in pool.items()}
        return line


@dataclass
class HandoverStats:
    """Where the scheduler or a worker gathers what happened to its hand-overs."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {name: [] for name in (*PER_LOAD, *PER_REQUEST)}
        self.data |= {name: {} for name in (*COUNTS, "levels")}

    def observe(self, name: str, value: float) -> None:
        self.data[name].append(value)

    def count(self, name: str, reason: str, times: int = 1) -> None:
        self.data[name][reason] = self.data[name].get(reason, 0) + times

    def level(self, reporter: str, **values: int) -> None:
        self.data["levels"][reporter] = values

    def loaded(self, load: Loaded) -> None:
        """How a load of one rank ended."""
        if not load.ok:
            self.count("failures", load.error.partition(":")[0])
            return
        self.observe("bytes", load.bytes)
        self.observe("descriptors", load.descriptors)
        self.observe("zeroed_bytes", load.zeroed_bytes)
        for name, steps in STEPS.items():
            self.observe(name, sum(load.seconds.get(step, 0.0) for step in steps))

    def take(self) -> HandoverStats | None:
        """What was gathered since the last call; None where nothing was."""
        if not any(self.data.values()):
            return None
        taken = HandoverStats(self.data)
        self.reset()
        return taken

    def aggregate(self, other: HandoverStats) -> HandoverStats:
        for name in (*PER_LOAD, *PER_REQUEST):
            self.data[name] = self.data[name] + other.data[name]
        for name in COUNTS:
            for reason, times in other.data[name].items():
                self.count(name, reason, times)
        self.data["levels"] = {**self.data["levels"], **other.data["levels"]}
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of log: what an operator looks at first."""
        moved, total = sum(self.data["bytes"]), self.data["total_seconds"]
        seconds = sum(self.data["transfer_seconds"])
        line: dict[str, int | float] = {
            "loads": len(total) or len(self.data["bytes"]),
            "MiB": round(moved / (1 << 20), 1),
            "MiB/s": round(moved / (1 << 20) / seconds, 1) if seconds else 0,
        }
        if total:
            middle, most = np.percentile(total, (50, 99))
            line |= {
                "total p50 ms": round(float(middle) * 1e3, 1),
                "p99 ms": round(float(most) * 1e3, 1),
            }
        for name, words in WORDS.items():
            line |= {f"{words}: {reason}": n for reason, n in sorted(self.data[name].items())}
        return line | {name: n for name, n in levels(self.data["levels"]).items() if n}


def levels(by_reporter: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The sum over all reporters."""
    return {name: sum(told.get(name, 0) for told in by_reporter.values()) for name in LEVELS}


@dataclass
class PoolStats:
    """Counts by name, and under `levels` the blocks in quarantine, by reporter."""

    data: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.data.items() if name != "levels"}

    def aggregate(self, other: PoolStats) -> PoolStats:
        data = {**self.data, **other.data}
        for name, count in self.counts.items():
            data[name] = count + other.data.get(name, 0)
        levels = {**self.data.get("levels", {}), **other.data.get("levels", {})}
        return PoolStats({**data, **({"levels": levels} if levels else {})})

    def reduce(self) -> dict[str, int | float]:
        level = sum(self.data.get("levels", {}).values())
        return dict(sorted(self.counts.items())) | ({"blocks_quarantined": level} if level else {})


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
    "loads": "Loads that ended well, by rank",
    "bytes": "Bytes of KV cache loaded, all ranks",
    "zeroed_bytes": "Bytes of draft layers zeroed, which the prefill engine has not, all ranks",
    "descriptors": "Copies that loads were made of, all ranks",
}
# The name in the stats, then the reasons that show from the start.
REASONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
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


class FerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Metrics of the halves that a connector has; children of a MultiConnector share them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        handover: bool,
        pool: bool,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = Kinds(self._histogram_cls, self._counter_cls, self._gauge_cls)
        told, values = (kinds, labelnames, per_engine_labelvalues), per_engine_labelvalues
        self.handover = _handovers.get(values, lambda: HandoverMetrics(*told)) if handover else None
        self.pool = _pools.get(values, lambda: PoolMetrics(*told)) if pool else None

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if self.handover is not None and "handover" in transfer_stats_data:
            self.handover.observe(transfer_stats_data["handover"], engine_idx)
        if self.pool is not None and "pool" in transfer_stats_data:
            self.pool.observe(transfer_stats_data["pool"], engine_idx)


class Kinds(NamedTuple):
    """How vLLM makes metrics."""

    histogram: Any
    counter: Any
    gauge: Any


class HandoverMetrics:
    def __init__(self, kinds: Kinds, labels: list[str], values: dict[int, list[object]]) -> None:
        self._values = values  # of labels, by engine
        self._last: dict[int, dict[str, dict[str, int]]] = {}  # levels, by engine and reporter
        self.histograms = {
            name: kinds.histogram(
                name=PREFIX + name, documentation=meaning, buckets=SECONDS, labelnames=labels
            )
            for name, meaning in HISTOGRAMS.items()
        }
        self.counters = {
            name: kinds.counter(name=PREFIX + name, documentation=meaning, labelnames=labels)
            for name, meaning in COUNTERS.items()
        }
        for name in REASONS:
            self.counters[name] = kinds.counter(
                name=PREFIX + name, documentation=MEANING[name], labelnames=[*labels, "reason"]
            )
        self.levels = {
            name: kinds.gauge(
                name=PREFIX + name,
                documentation=MEANING[name],
                labelnames=labels,
                multiprocess_mode="mostrecent",
            )
            for name in LEVELS
        }
        for of_engine in values.values():  # all are there from the start
            for metric in (*self.histograms.values(), *self.levels.values()):
                metric.labels(*of_engine)
            for name in COUNTERS:
                self.counters[name].labels(*of_engine)
            for name, (_, reasons) in REASONS.items():
                for reason in reasons:
                    self.counters[name].labels(*of_engine, reason)

    def observe(self, data: dict[str, Any], engine: int) -> None:
        values = self._values[engine]
        for name in HISTOGRAMS:
            metric = self.histograms[name].labels(*values)
            for value in data[name]:
                metric.observe(value)
        for name in COUNTERS:
            moved = len(data["bytes"]) if name == "loads" else sum(data[name])
            self.counters[name].labels(*values).inc(moved)
        for name, (stats, _) in REASONS.items():
            for reason, times in data[stats].items():
                self.counters[name].labels(*values, reason).inc(times)
        if data["levels"]:
            last = self._last.setdefault(engine, {})
            last.update(data["levels"])
            for name, level in levels(last).items():
                self.levels[name].labels(*values).set(level)


class PoolMetrics:
    """`vllm:kvferry_pool_total{event="..."}`, one counter for each event; and the gauge
    `vllm:kvferry_pool_blocks_quarantined`, which falls again."""

    def __init__(self, kinds: Kinds, labels: list[str], values: dict[int, list[object]]) -> None:
        self._values = values
        self._last: dict[int, dict[str, int]] = {}  # levels, by engine and reporter
        self.events = kinds.counter(
            name=PREFIX + "pool",
            documentation="What kvferry's pool looked up, loaded and saved, and what failed.",
            labelnames=[*labels, "event"],
        )
        self.quarantined = kinds.gauge(
            name=PREFIX + "pool_blocks_quarantined",
            documentation="Blocks that a store may still write, of loads that were given up",
            labelnames=labels,
            multiprocess_mode="mostrecent",
        )
        for of_engine in values.values():  # all are there from the start
            self.quarantined.labels(*of_engine)
            for event in EVENTS:
                self.events.labels(*of_engine, event)

    def observe(self, data: dict[str, Any], engine: int) -> None:
        values = self._values[engine]
        for event, count in PoolStats(data).counts.items():
            self.events.labels(*values, event).inc(count)
        if levels := data.get("levels"):
            last = self._last.setdefault(engine, {})
            last.update(levels)
            self.quarantined.labels(*values).set(sum(last.values()))


_handovers: Shared[HandoverMetrics] = Shared()
_pools: Shared[PoolMetrics] = Shared()


class Spans:
    """OpenTelemetry spans of loads and holds, where vLLM traces (`--otlp-traces-endpoint`).

    A span begins when the scheduler orders a load or a hold, and ends when the scheduler hears of
    its end. It belongs to the trace that the request's headers name, so that a router's trace shows
    both engines. Without tracing, nothing is imported and nothing is kept.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._tracer: Any = None
        self._open: dict[tuple[str, str], Any] = {}
        endpoint = getattr(vllm_config.observability_config, "otlp_traces_endpoint", None)
        if endpoint:
            from opentelemetry import trace  # vLLM set the provider of this process up

            self._tracer = trace.get_tracer("kvferry")

    def begin(self, what: str, request: Any, **attributes: Any) -> None:
        if self._tracer is None:
            return
        from vllm.tracing import extract_trace_context

        self._open[what, request.request_id] = self._tracer.start_span(
            f"kvferry {what}",
            context=extract_trace_context(request.trace_headers),
            attributes={"gen_ai.request.id": request.request_id} | attributes,
            start_time=time.time_ns(),
        )

    def end(self, what: str, request_id: str, error: str = "") -> None:
        span = self._open.pop((what, request_id), None)
        if span is None:
            return
        if error:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def close(self) -> None:
        for what, request_id in list(self._open):
            self.end(what, request_id, "the engine was shut down")
