"""kvferry's metrics in vLLM's `/metrics`: names, kinds and meaning.

Names begin with `vllm:kvferry_`, so that vLLM treats them as its own (multi-process mode, several
engines behind one API server, unregistering). Loads are counted by rank: each rank moves its part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.handover.load import Loaded
from kvferry.vllm.multiconnector import Shared

# --------------------------------------------------------------------------------------------------
# What is measured, step by step, on its way from workers and scheduler to vLLM's loggers.
#
# Workers report loads and how holds ended, the scheduler requests and blocks; vLLM adds them up
# every step, sends them to the process that logs, and there `prometheus` turns them into `/metrics`
# and `reduce` into one line of log per interval. Lists hold observations, counts add up, and levels
# (what is open now) are kept by whoever reported them last, so that adding over ranks and replacing
# over time do not get in each other's way.
# --------------------------------------------------------------------------------------------------

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
# Why a request that asked for a remote prefill was not loaded, by who can do something about it.
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
STEPS: Mapping[str, tuple[str, ...]] = {  # of a load, by the names that p2p gives them
    "claim_seconds": ("meet", "offer", "wait", "claim"),
    "plan_seconds": ("bind",),
    "transfer_seconds": ("read", "push", "zero"),
}


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """Serialises as plain dicts and lists, which is how vLLM sends it between processes."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        fresh: dict[str, Any] = {name: [] for name in (*PER_LOAD, *PER_REQUEST)}
        fresh |= {name: {} for name in (*COUNTS, "levels")}
        self.data: dict[str, Any] = fresh

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def observe(self, name: str, value: float) -> None:
        self.data[name].append(value)

    def count(self, name: str, reason: str, times: int = 1) -> None:
        self.data[name][reason] = self.data[name].get(reason, 0) + times

    def level(self, who: str, **values: int) -> None:
        self.data["levels"][who] = values

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

    def take(self) -> FerryStats | None:
        """What was gathered since the last call; None where nothing was."""
        if self.is_empty():
            return None
        taken = FerryStats(self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
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
    """The sum over whoever reported."""
    return {name: sum(told.get(name, 0) for told in by_reporter.values()) for name in LEVELS}


def as_stats(data: dict[str, Any] | None) -> FerryStats:
    return FerryStats(data) if data else FerryStats()


# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# OpenTelemetry spans of loads and holds, where vLLM's tracing is on (`--otlp-traces-endpoint`).
#
# A span begins when the scheduler orders something and ends when it hears of its end, under the
# trace that the request's headers name: a router's trace shows both engines. Without tracing,
# nothing is imported and nothing is kept.
# --------------------------------------------------------------------------------------------------


class Spans:
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
