"""Counters of the router, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvferry.router.engines import UpstreamEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = (
    "ok",
    "client_error",  # 4xx, the engine's or ours
    "engine_error",  # 5xx, 502 and 504 of ours included
    "unavailable",  # 503: no decode engine, or one that says so itself
    "busy",  # 429, ours or an engine's
    "broken_stream",  # the decode engine failed after the first byte
    "client_gone",
    "stopped",  # still in flight when the router had drained for long enough
    "internal",  # a defect of the router
)
STAGES = (
    "prefill",
    "prefill_again",  # the ticket was spent on a decode engine that failed
    "decode",
)
FALLBACKS = (
    "no_prefill_engine",
    "prefill_failed",  # all tries
    "no_ticket",  # the prefill engine has nothing to hand over, for instance a short prompt
    "batch",
    "prompt_logprobs",
)


class Metrics:
    """What was counted since the start."""

    def __init__(self) -> None:
        self.requests = Counter(dict.fromkeys(OUTCOMES, 0))
        self.retries = Counter(dict.fromkeys(STAGES, 0))
        self.fallbacks = Counter(dict.fromkeys(FALLBACKS, 0))

    def render(self, engines: Iterable[UpstreamEngine], in_flight: int, held_bytes: int) -> str:
        return "\n".join(self._lines(list(engines), in_flight, held_bytes)) + "\n"

    def _lines(
        self, engines: list[UpstreamEngine], in_flight: int, held_bytes: int
    ) -> Iterator[str]:
        for name, label, counts, what in (
            ("requests", "outcome", self.requests, "Requests by how they ended."),
            ("retries", "stage", self.retries, "Engines asked again, before the first byte."),
            ("fallbacks", "reason", self.fallbacks, "Requests decoded without a prefill engine."),
        ):
            yield from _head(f"{name}_total", "counter", what)
            for value, count in counts.items():
                yield f'kvferry_router_{name}_total{{{label}="{value}"}} {count}'
        yield from _head("in_flight", "gauge", "Requests that are being served.")
        yield f"kvferry_router_in_flight {in_flight}"
        yield from _head("held_bytes", "gauge", "Charged for bodies and answers.")
        yield f"kvferry_router_held_bytes {held_bytes}"
        for name, kind, what, of in (
            ("engine_up", "gauge", "Whether the engine gets requests.", lambda e: int(e.up)),
            ("engine_in_flight", "gauge", "Requests at the engine.", lambda e: e.in_flight),
            ("engine_failures_total", "counter", "Failed probes, requests.", lambda e: e.failures),
        ):
            yield from _head(name, kind, what)
            for engine in engines:
                labels = f'engine="{_escape(engine.url)}",role="{engine.role}"'
                yield f"kvferry_router_{name}{{{labels}}} {of(engine)}"


def _head(name: str, kind: str, what: str) -> tuple[str, str]:
    return f"# HELP kvferry_router_{name} {what}", f"# TYPE kvferry_router_{name} {kind}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
