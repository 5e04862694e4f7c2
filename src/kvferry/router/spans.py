# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests, in the traces that clients begin and engines continue.

Traces are off unless a standard variable names a collector (`ENDPOINTS`). Then OpenTelemetry is not
imported, and a client's `traceparent` reaches the engines unchanged.

With traces, every request of the API is one span, and its parts are children, one after the other
(docs/operating.md, "Traces").

A thread of the SDK sends spans in batches. While the collector is slow or away, spans are dropped.
No request waits for it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from typing import Any

from kvferry.errors import install_command
from kvferry.router.api import Headers
from kvferry.router.live import Placed

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# Headers of W3C's trace context, which each hop writes anew.
_CONTEXT = (b"traceparent", b"tracestate")
_WELL = ("ok", "client_error", "unauthorized", "busy", "client_gone")  # `flow.OUTCOMES`
_CLOSE_SECONDS = 3.0  # for the last spans to reach the collector when the router stops


class RouterSpans:
    """The spans of one router."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self.trace = provider, trace
        self.tracer = provider.get_tracer("kvferry.router")
        self.propagator = TraceContextTextMapPropagator()

    @classmethod
    def from_environment(cls) -> RouterSpans | None:
        """None: traces are off, or cannot be sent, which is logged."""
        named = next((name for name in ENDPOINTS if os.environ.get(name)), None)
        disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if named is None or disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
            return None
        try:
            made = cls(_provider())
        except ImportError as error:
            install = install_command("otel")
            log.warning("no traces: %s is set, but %s; %s", named, error, install)
            return None
        except Exception as error:  # a bad variable of OpenTelemetry's must not stop the router
            log.warning("no traces: %s is set, but OpenTelemetry does not start: %s", named, error)
            return None
        log.info("traces go to the collector that %s names", named)  # it may hold a password
        return made

    def close(self) -> None:
        """Send the last spans, unless the collector does not answer in time."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)


class RequestSpans:
    """One request's span, and the part of it that is under way."""

    def __init__(
        self, router: RouterSpans, method: str, path: str, request_id: str, headers: Headers
    ) -> None:
        self._router = router
        carried = {k.decode(): v.decode("latin-1") for k, v in headers if k in _CONTEXT}
        self._span = router.tracer.start_span(
            f"{method} {path}",
            context=router.propagator.extract(carried),
            kind=router.trace.SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "url.path": path,
                "kvferry.request_id": request_id,
            },
        )
        self._part: Any = None

    def part(self, name: str, engine: str = "") -> None:
        """The part before ends, and this one begins."""
        trace = self._router.trace
        if self._part is not None:
            self._part.end()
        self._part = self._router.tracer.start_span(
            name,
            context=trace.set_span_in_context(self._span),
            kind=trace.SpanKind.CLIENT if engine else trace.SpanKind.INTERNAL,
            attributes={"server.address": engine} if engine else None,
        )

    def part_failed(self, why: str) -> None:
        self._failed(self._part or self._span, why)

    def passed_on(self, headers: Headers) -> Headers:
        """A request's headers for the engine that is asked in this part."""
        carried: dict[str, str] = {}
        context = self._router.trace.set_span_in_context(self._part or self._span)
        self._router.propagator.inject(carried, context)
        ours = [(name.encode(), value.encode("latin-1")) for name, value in carried.items()]
        return [(k, v) for k, v in headers if k not in _CONTEXT] + ours

    def ended(self, outcome: str, status: int, placed: Placed | None) -> None:
        if self._part is not None:
            self._part.end()
        figures = {"kvferry.outcome": outcome, **_figures(placed)}
        if status:
            figures["http.response.status_code"] = status
        self._span.set_attributes(figures)
        if outcome not in _WELL:
            self._failed(self._span, outcome)
        self._span.end()

    def _failed(self, span: Any, why: str) -> None:
        trace = self._router.trace
        span.set_status(trace.Status(trace.StatusCode.ERROR, why))


def _figures(placed: Placed | None) -> dict[str, Any]:
    """The decision for a request and its outcome, as attributes."""
    if placed is None:
        return {}
    chosen = placed.decision.chosen
    figures: dict[str, Any] = {"why": placed.decision.why, "decode": placed.decode}
    if placed.prefill is not None:
        figures["prefill"] = placed.prefill
    if placed.tokens:
        figures |= {"tokens": placed.tokens, "cached_tokens": placed.cached}
    if math.isfinite(chosen.seconds):  # else it was placed by load
        figures |= {"source": chosen.source, "options": len(placed.decision.options)}
        figures["expected_seconds"] = chosen.seconds
        figures |= {f"expected.{part}_seconds": spent for part, spent in chosen.parts.items()}
    if placed.actual_ms is not None:
        figures["actual_seconds"] = placed.actual_ms / 1000
    return {f"kvferry.{name}": value for name, value in figures.items()}


def _provider() -> Any:
    """The SDK with the settings of the standard variables; HTTP unless they say gRPC."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if next((p for name in _PROTOCOLS if (p := os.environ.get(name))), "") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    theirs = f"{SERVICE_NAME}=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = theirs or "OTEL_SERVICE_NAME" in os.environ
    resource = Resource.create({} if named else {SERVICE_NAME: "kvferry-router"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `close` does it
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
