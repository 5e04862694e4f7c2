# SPDX-License-Identifier: Apache-2.0
"""Serves what `live` knows: the page at /, its state at /live, and the same as server-sent events.

The page is one file. Its policy allows its own style and script by their hashes, a connection back
to the router, and nothing else; texts of clients and engines become text nodes, never HTML. The
script draws the state that the page carries, then each one that comes from /live/stream.

All viewers of the stream get the same bytes, once a second. None has a queue: a viewer that reads
slowly misses states, and one that takes none for `_VIEWER_SECONDS` is dropped.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
from pathlib import Path

from kvferry.router.api import Answer, ApiError, Headers, Limits
from kvferry.router.clients import ClientRequest, not_served
from kvferry.router.guard import Quota
from kvferry.router.page.live import LiveState

log = logging.getLogger(__name__)

_VIEWER_SECONDS = 10.0
_RETRY_SECONDS = 10.0  # after a refusal; viewers stay long
_SOURCE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
_STATE_MARK = "<!--state-->"


class LivePage:
    """The pages / and /live of one router."""

    def __init__(self, live: LiveState) -> None:
        self._live = live

    async def state(self, request: ClientRequest) -> Answer:
        kind = (b"content-type", b"application/json")
        return Answer(200, [*_HEADERS, kind], self._live.snapshot())

    async def page(self, request: ClientRequest) -> Answer:
        html = _SOURCE.replace(_STATE_MARK, _inside_html(self._live.snapshot()))
        kind = (b"content-type", b"text/html; charset=utf-8")
        policy = (b"content-security-policy", _POLICY.encode())
        return Answer(200, [*_HEADERS, kind, policy], html.encode())


class LiveStream:
    """The route /live/stream."""

    def __init__(self, live: LiveState, limits: Limits) -> None:
        self._live = live
        self._viewers = Quota(limits.max_viewers, limits.address_share)

    async def serve(self, request: ClientRequest) -> None:
        if request.head.method != "GET":
            request.answer(not_served(405, request).answer)
            return
        viewers = ("viewers of the page", "too_many_viewers", _RETRY_SECONDS)
        try:
            with self._viewers.place(request.address, *viewers):
                await self._show(request)
        except ApiError as error:
            request.answer(error.answer)

    async def _show(self, request: ClientRequest) -> None:
        """Send each new state, until the viewer is gone, which cancels this."""
        self._live.watched += 1
        try:
            events = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
            request.begin(200, [*_HEADERS, *events])
            while True:
                published = self._live.published
                request.write(b"data: %s\n\n" % self._live.snapshot())
                async with asyncio.timeout(_VIEWER_SECONDS):
                    await request.drained()
                await published.wait()
        except TimeoutError:
            seconds = _VIEWER_SECONDS
            log.info("a viewer of the page at %s took nothing for %g s", request.address, seconds)
            request.abort()
        finally:
            self._live.watched -= 1


def _hash_of(tag: str) -> str:
    """The content-security-policy's name of the page's only style or script."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", _SOURCE, re.DOTALL)
    assert found is not None
    digest = hashlib.sha256(found[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash_of('style')}",
        f"script-src {_hash_of('script')}",
        "connect-src 'self'",
        "require-trusted-types-for 'script'",  # the browser refuses any text as HTML
        "trusted-types 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Headers = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


def _inside_html(json: bytes) -> str:
    """JSON that ends no element; it stays the same JSON, because these stand in strings only."""
    text = json.decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
