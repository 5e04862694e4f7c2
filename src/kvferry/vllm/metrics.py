# SPDX-License-Identifier: Apache-2.0
"""kvferry's metrics: from workers and the scheduler to vLLM's log and `/metrics`; and its traces.

Workers report loads, the scheduler reports requests, blocks and how holds ended. vLLM adds the
reports up every step (`FerryStats.aggregate`) and sends them to the process that logs. There,
`FerryPromMetrics` turns them into `/metrics`, and `FerryStats.reduce` into one line of log per
interval. Loads are counted by rank: each rank moves its part.

Four tables list all metrics; statistics go by the same names. Names of the pool begin with `pool`.
Two more have the metrics of vLLM's own connectors, which their stand-ins expose beside ours.
`vllm:kvferry_` before a name makes vLLM treat the metric as its own (multi-process mode, several
engines behind one API server, unregistering).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.handover.load import Loaded
from kvferry.pool.orders import METRICS, PoolCounters

log = logging.getLogger("kvferry")

PREFIX = "vllm:kvferry_"
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# Why a request that asked for a remote prefill was not loaded. Comments: where to look.
ComputedHere = Literal[
    "no ticket",  # the proxy, or another connector on the prefill engine
    "bad ticket",  # the proxy changed it, or the engines' versions or models differ
    "another prompt",  # the proxy: chat template, truncation
    "not held",  # the prefill engine: its `requests_not_held` says why
    "not allowed",  # `peers` or the secret
    "not found",  # the prefill engine is gone or not reachable, or the bootstrap does not know it
    "unfit",  # the request itself: embeddings, a session, media without names
    "lora",  # the adapter's files differ, or the files that were loaded are not known
    "shape",  # the prefill engine drops blocks of windows that this engine would fill whole
    "gave way",  # block pressure: two engines may have waited for each other's blocks
    "reset",  # this engine's caches were reset while the request waited
    "error",  # a fault of kvferry; the log has the traceback
]


HISTOGRAMS: Mapping[str, str] = {
    "queue_seconds": "From a request's arrival at the decode engine to the order to load its cache",
    "claim_seconds": "From the order until bytes can move, by rank; early ones wait here",
    "plan_seconds": "Binding plans to a request's blocks, by rank",
    "transfer_seconds": "Moving bytes, by rank",
    "total_seconds": "From a request's arrival at the decode engine to its cache being there",
}
COUNTERS: Mapping[str, str] = {
    "loads": "Loads that ended well, by rank",
    "bytes": "Bytes of KV cache loaded, all ranks",
    "zeroed_bytes": "Bytes zeroed in draft layers that the prefill engine lacks, all ranks",
    "descriptors": "Copies that loads were made of, all ranks",
}
LEVELS: Mapping[str, str] = {
    "holds_open": "Finished requests whose blocks are kept for a consumer",
    "held_blocks": "Blocks that those requests keep",
    "claims_parked": "Claims that wait for a prefill to finish, all ranks",
    "loads_abandoned": "Loads that ended but are not reported: their bytes may still arrive",
    "blocks_quarantined": "Blocks that abandoned loads keep",
    "pool_blocks_quarantined": "Blocks that a store may still write, of loads that were given up",
}


class ByReason(NamedTuple):
    meaning: str
    line: str  # comes before a reason in the line of log
    reasons: tuple[str, ...]  # those that are exposed from the start


BY_REASON: Mapping[str, ByReason] = {
    "load_failures": ByReason(
        "Loads that failed, by rank and kind of error",
        "failed: ",
        ("StaleTicket", "PeerLost", "DeadlineExceeded", "Cancelled"),
    ),
    "holds_closed": ByReason(
        "Holds that ended, by how", "hold: ", ("delivered", "failed", "expired", "withdrawn")
    ),
    "requests_not_held": ByReason(
        "Prefills whose cache was not kept for a consumer, by reason",
        "not held: ",
        ("limit", "reused id", "bad id", "cut", "unfit", "lora"),
    ),
    "requests_computed_here": ByReason(
        "Requests for a remote prefill that were not loaded, by reason",
        "computed here: ",
        get_args(ComputedHere),
    ),
}
# The pool's metrics: `METRICS` of `kvferry.pool.orders`, with `pool_` before each name.
POOL_EVENTS = {  # by event: its metric, and its label
    event: (f"pool_{name}", (outcome,) if outcome else ())
    for name, metric in METRICS.items()
    for event, outcome in metric.events.items()
}


class InTreeMetric(NamedTuple):
    """A metric of one of vLLM's own connectors, for dashboards that were made for it."""

    meaning: str
    of: str  # the statistic that feeds it, by its name in `FerryStats.data`
    reasons: tuple[str, ...] = ()  # only these are counted; none: all
    field: str = ""  # of a `StoreOperation`; the labels are the operation and its status
    buckets: tuple[float, ...] = ()  # of a histogram, as vLLM has them; none: it is a counter

    def amounts(self, told: Any) -> list[tuple[tuple[str, ...], float]]:
        if self.field:
            return [((one["name"], one["status"]), one.get(self.field, 1)) for one in told]
        if self.buckets:
            return [((), amount) for amount in told]
        return [((), n) for why, n in told.items() if not self.reasons or why in self.reasons]


_TIMES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_COUNTS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
_SIZES = tuple(1 << bits for bits in range(11, 35, 2))
NIXL_METRICS: Mapping[str, InTreeMetric] = {
    "vllm:nixl_xfer_time_seconds": InTreeMetric(
        "Moving bytes, by load and rank", "transfer_seconds", buckets=_TIMES[1:]
    ),
    "vllm:nixl_post_time_seconds": InTreeMetric(
        "Making a transfer ready, by load and rank", "plan_seconds", buckets=_TIMES
    ),
    "vllm:nixl_bytes_transferred": InTreeMetric(
        "Bytes of one load, by rank", "load_bytes", buckets=_SIZES
    ),
    "vllm:nixl_num_descriptors": InTreeMetric(
        "Copies of one load, by rank", "load_descriptors", buckets=_COUNTS
    ),
    "vllm:nixl_num_failed_transfers": InTreeMetric("Loads that failed, by rank", "load_failures"),
    "vllm:nixl_num_failed_notifications": InTreeMetric(
        "Always 0: a hold that is not released expires", "nothing"
    ),
    "vllm:nixl_num_kv_expired_reqs": InTreeMetric(
        "Requests whose blocks no decode engine fetched in time", "holds_closed", ("expired",)
    ),
    "vllm:nixl_num_notifications_after_expiry": InTreeMetric(
        "Always 0: a claim after expiry is refused, and the load fails", "nothing"
    ),
}
_STORE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 4)
STORE_METRICS: Mapping[str, InTreeMetric] = {
    f"vllm:mooncake_store_operation{name}": InTreeMetric(
        meaning, "pool_operations", field=told, buckets=buckets
    )
    for name, told, meaning, buckets in (
        ("_time_seconds", "seconds", "Time of one call of the store", _STORE_SECONDS),
        ("_total", "calls", "Calls of the store", ()),
        ("_keys_total", "keys", "Keys that the store was asked for", ()),
        ("_bytes_total", "bytes", "Bytes that the store was asked to move", ()),
        ("_failed_keys_total", "failed", "Keys that the store did not serve", ()),
    )
}
STEPS: Mapping[str, tuple[str, ...]] = {  # of a load, by the names in `Loaded.seconds`
    "claim_seconds": ("meet", "offer", "wait", "claim"),
    "plan_seconds": ("bind",),
    "transfer_seconds": ("read", "push", "zero"),
}


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """The statistics of one interval, by name of the metric. vLLM sends `data` between processes.

    A histogram has a list of observations, a counter a number, or numbers by reason. Levels (holds
    open now) are under `levels`, by reporter. The sum goes over reporters, and a reporter's later
    level replaces its earlier one.
    """

    def observe(self, name: str, value: float) -> None:
        self.data.setdefault(name, []).append(value)

    def count(self, name: str, reason: str, times: int = 1) -> None:
        by_reason = self.data.setdefault(name, {})
        by_reason[reason] = by_reason.get(reason, 0) + times

    def level(self, reporter: str, **values: int) -> None:
        self.data.setdefault("levels", {})[reporter] = values

    def loaded(self, load: Loaded) -> None:
        if not load.ok:
            self.count("load_failures", load.kind)
            return
        moved = {
            "loads": 1,
            "bytes": load.bytes,
            "descriptors": load.descriptors,
            "zeroed_bytes": load.zeroed_bytes,
        }
        for name, count in moved.items():
            self.data[name] = self.data.get(name, 0) + count
        for name, count in (("load_bytes", load.bytes), ("load_descriptors", load.descriptors)):
            self.observe(name, count)
        for name, steps in STEPS.items():
            self.observe(name, sum(load.seconds.get(step, 0.0) for step in steps))

    def add_pool(self, counters: PoolCounters) -> None:
        """The pool's counts by event, and its calls of the store, since the last call."""
        for event, count in counters.take().items():
            self.count("pool", event, count)
        if operations := msgspec.to_builtins(counters.take_operations()):
            self.data.setdefault("pool_operations", []).extend(operations)

    def take(self) -> FerryStats:
        taken = FerryStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        for name, theirs in other.data.items():
            mine = self.data.get(name)
            if mine is None:
                self.data[name] = theirs
            elif name == "levels":
                self.data[name] = {**mine, **theirs}
            elif isinstance(mine, dict):
                names = mine.keys() | theirs.keys()
                self.data[name] = {n: mine.get(n, 0) + theirs.get(n, 0) for n in names}
            else:
                self.data[name] = mine + theirs
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of log, with what an operator looks at first."""
        line = self._loads() if self.data.keys() - {"pool", "pool_operations", "levels"} else {}
        for name, counter in BY_REASON.items():
            told = sorted(self.data.get(name, {}).items())
            line |= {f"{counter.line}{reason}": times for reason, times in told}
        line |= {f"pool {event}": n for event, n in sorted(self.data.get("pool", {}).items())}
        for name, level in levels(self.data.get("levels", {})).items():
            if level:
                line[name.replace("pool_", "pool ")] = level
        return line

    def _loads(self) -> dict[str, int | float]:
        moved, total = self.data.get("bytes", 0) / (1 << 20), self.data.get("total_seconds", [])
        seconds = sum(self.data.get("transfer_seconds", ()))
        line: dict[str, int | float] = {
            "loads": len(total) or self.data.get("loads", 0),
            "MiB": round(moved, 1),
            "MiB/s": round(moved / seconds, 1) if seconds else 0,
        }
        if total:
            middle, most = np.percentile(total, (50, 99))
            line["total p50 ms"] = round(float(middle) * 1e3, 1)
            line["p99 ms"] = round(float(most) * 1e3, 1)
        return line


def levels(by_reporter: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for told in by_reporter.values():
        for name, level in told.items():
            found[name] = found.get(name, 0) + level
    return found


class FerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Metrics of the halves that a connector has."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        handover: bool,
        pool: bool,
        beside: Mapping[str, InTreeMetric],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._exposed = _Exposed.of(per_engine_labelvalues)

        def expose(
            name: str,
            make: Any,
            meaning: str,
            *label: str,
            reasons: Iterable[str] = (),
            **options: Any,
        ) -> None:
            if name in self._exposed.metrics or not (pool if name.startswith("pool") else handover):
                return
            names = [*labelnames, *label]
            metric = make(name=PREFIX + name, documentation=meaning, labelnames=names, **options)
            self._exposed.metrics[name] = metric
            for values in per_engine_labelvalues.values():  # so that it is exposed at once
                if not label:
                    metric.labels(*values)
                for reason in reasons:
                    metric.labels(*values, reason)

        for name, meaning in HISTOGRAMS.items():
            expose(name, self._histogram_cls, meaning, buckets=SECONDS)
        for name, meaning in COUNTERS.items():
            expose(name, self._counter_cls, meaning)
        for name, counter in BY_REASON.items():
            expose(name, self._counter_cls, counter.meaning, "reason", reasons=counter.reasons)
        for name, told in METRICS.items():
            outcomes = [outcome for outcome in told.events.values() if outcome]
            label = ("outcome",) if outcomes else ()
            expose(f"pool_{name}", self._counter_cls, told.meaning, *label, reasons=outcomes)
        for name, meaning in LEVELS.items():
            expose(name, self._gauge_cls, meaning, multiprocess_mode="mostrecent")
        self._beside, self._labelnames = beside, labelnames

    def _make_beside(self, name: str, like: InTreeMetric) -> Any:
        """A metric under vLLM's own name, or None if another connector has that name. It is made at
        the first report, because Prometheus takes a name once: under a MultiConnector, vLLM's own
        connector may need it."""
        make = self._histogram_cls if like.buckets else self._counter_cls
        options = {"buckets": like.buckets} if like.buckets else {}
        labels = [*self._labelnames, *(("operation", "status") if like.field else ())]
        try:
            metric = make(name=name, documentation=like.meaning, labelnames=labels, **options)
        except ValueError as error:
            log.info("kvferry: %s is another connector's: %s", name, error)
            return None
        for values in () if like.field else self.per_engine_labelvalues.values():
            metric.labels(*values)  # so that it is exposed at once
        return metric

    def _observe_beside(self, data: Mapping[str, Any], values: list[object]) -> None:
        made = self._exposed.beside
        for name, like in self._beside.items():
            if name not in made:
                made[name] = self._make_beside(name, like)
            if made[name] is not None and like.of in data:
                for labels, amount in like.amounts(data[like.of]):
                    metric = made[name].labels(*values, *labels)
                    metric.observe(amount) if like.buckets else metric.inc(amount)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        exposed, last = self._exposed.metrics, self._exposed.levels.setdefault(engine_idx, {})
        self._observe_beside(transfer_stats_data, values)
        for name, told in transfer_stats_data.items():
            if name in ("load_bytes", "load_descriptors", "pool_operations"):
                continue  # these feed only vLLM's names
            if name == "levels":
                last.update(told)
                for gauge, level in levels(last).items():
                    exposed[gauge].labels(*values).set(level)
            elif name == "pool":
                for event, times in told.items():
                    metric, label = POOL_EVENTS[event]
                    exposed[metric].labels(*values, *label).inc(times)
            elif isinstance(told, list):
                for seconds in told:
                    exposed[name].labels(*values).observe(seconds)
            elif isinstance(told, dict):
                for value, times in told.items():
                    exposed[name].labels(*values, value).inc(times)
            else:
                exposed[name].labels(*values).inc(told)


@dataclass(slots=True)
class _Exposed:
    """Metrics that children of a MultiConnector share, because Prometheus takes a name once.

    vLLM makes all metrics of a logger together, with one call per child and the same object of
    label values. A new logger unregisters the metrics of the one before it, and has another object.
    """

    labelvalues: Any  # kept, so that no later logger's object has the same id
    metrics: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)  # by vLLM's name; None: another's
    levels: dict[int, dict[str, dict[str, int]]] = field(default_factory=dict)  # last, by engine

    @classmethod
    def of(cls, labelvalues: Any) -> _Exposed:
        global _latest
        if _latest is None or _latest.labelvalues is not labelvalues:
            _latest = cls(labelvalues)
        return _latest


_latest: _Exposed | None = None


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
