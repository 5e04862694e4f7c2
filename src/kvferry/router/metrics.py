"""The router's counters, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.router.engines import UpstreamEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = (
    "ok",
    "client_error",  # 4xx, an engine's or the router's
    "engine_error",  # 5xx, also the router's own 502 and 504
    "unavailable",  # 503: no decode engine is up, or an engine answered so
    "busy",  # 429, the router's or an engine's
    "broken_stream",  # the decode engine failed after the first byte
    "client_gone",
    "stopped",  # still in flight when the router's time to drain was over
    "internal",  # a bug of the router
)
STAGES = (
    "prefill",
    "prefill_again",  # the decode engine that got the ticket failed
    "decode",
)
FALLBACKS = (
    "no_prefill_engine",
    "prefill_failed",  # all tries failed
    "no_ticket",  # the prefill engine has nothing to hand over, such as for a short prompt
    "batch",
    "prompt_logprobs",
)


class Metrics:
    """Counts since the start."""

    def __init__(self) -> None:
        self.requests = Counter(dict.fromkeys(OUTCOMES, 0))
        self.retries = Counter(dict.fromkeys(STAGES, 0))
        self.fallbacks = Counter(dict.fromkeys(FALLBACKS, 0))

    def render(self, engines: Sequence[UpstreamEngine], in_flight: int, held_bytes: int) -> str:
        lines: list[str] = []

        def add(name: str, kind: str, what: str, samples: dict[str, int]) -> None:
            name = f"kvferry_router_{name}"
            lines.extend((f"# HELP {name} {what}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{labels} {value}" for labels, value in samples.items())

        def by(label: str, counts: Counter[str]) -> dict[str, int]:
            return {f'{{{label}="{value}"}}': count for value, count in counts.items()}

        def each(of: Callable[[UpstreamEngine], int]) -> dict[str, int]:
            return {f'{{engine="{_escape(e.url)}",role="{e.role}"}}': of(e) for e in engines}

        what = "Requests by how they ended."
        add("requests_total", "counter", what, by("outcome", self.requests))
        what = "Engines asked again, before the first byte."
        add("retries_total", "counter", what, by("stage", self.retries))
        what = "Requests decoded without a prefill engine."
        add("fallbacks_total", "counter", what, by("reason", self.fallbacks))
        add("in_flight", "gauge", "Requests that are being served.", {"": in_flight})
        add("held_bytes", "gauge", "Charged for bodies and answers.", {"": held_bytes})
        what = "Whether the engine gets requests."
        add("engine_up", "gauge", what, each(lambda e: int(e.up)))
        add("engine_in_flight", "gauge", "Requests at the engine.", each(lambda e: e.in_flight))
        what = "Failed probes, requests."
        add("engine_failures_total", "counter", what, each(lambda e: e.failures))
        return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
