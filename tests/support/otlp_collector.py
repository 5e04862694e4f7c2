"""An OpenTelemetry collector on loopback, which takes spans over HTTP."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JOIN_SECONDS = 10.0


class Collector(ThreadingHTTPServer):
    """`spans` are those that came, as protobuf messages; `services` names who sent them."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.asked = 0  # also requests that it does not answer
        self.go_on = threading.Event()  # while it is not set, no request is answered
        self.go_on.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.asked += 1
                collector.go_on.wait(60)
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                told = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                for resource in told.resource_spans:
                    collector.services.add(attributes(resource.resource).get("service.name", ""))
                    for scope in resource.scope_spans:
                        collector.spans += list(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def close(self) -> None:
        self.go_on.set()
        self.shutdown()
        self.server_close()
        self._thread.join(JOIN_SECONDS)

    def handle_error(self, *args: object) -> None:
        """A sender that gave up has closed its connection; that is no news."""


def attributes(of: Any) -> dict[str, Any]:
    """Attributes of a span or a resource, as Python's own values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in of.attributes}
