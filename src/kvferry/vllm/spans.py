"""OpenTelemetry spans of loads and holds, where vLLM's tracing is on (`--otlp-traces-endpoint`).

A span begins when the scheduler orders something and ends when it hears of its end, under the trace
that the request's headers name: a router's trace shows both engines. Without tracing, nothing is
imported and nothing is kept.
"""

from __future__ import annotations

import time
from typing import Any


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
