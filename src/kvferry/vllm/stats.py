"""What is measured, step by step, on its way from workers and scheduler to vLLM's loggers.

Workers report loads and how holds ended, the scheduler requests and blocks; vLLM adds them up every
step, sends them to the process that logs, and there `prometheus` turns them into `/metrics` and
`reduce` into one line of log per interval. Lists hold observations, counts add up, and levels (what
is open now) are kept by whoever reported them last, so that adding over ranks and replacing over
time do not get in each other's way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvferry.p2p.load import Loaded

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
