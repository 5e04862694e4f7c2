"""What the router says about itself: /health, /metrics and a page for people."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from kvferry.router import metrics
from kvferry.router.engines import Engine
from kvferry.router.flow import Router

_PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
_NO_RESOURCES = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Status:
    """The three pages, over one router's state."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def health(self, request: Request) -> Response:
        """200 while requests can be served: `degraded` where an engine is missing, else `ok`."""
        state = self._state()
        engines = [
            {
                "url": engine.url,
                "role": engine.role,
                "healthy": engine.up,
                "in_flight": engine.in_flight,
                "reason": engine.reason or None,
            }
            for engine in self._router.engines
        ]
        body = {"status": state, "in_flight": self._router.places.taken, "engines": engines}
        return JSONResponse(body, status_code=503 if state == "down" else 200)

    async def metrics(self, request: Request) -> Response:
        router = self._router
        held_bytes = router.memory.quota.taken
        text = router.metrics.render(router.engines, router.places.taken, held_bytes)
        return PlainTextResponse(text, media_type=metrics.CONTENT_TYPE)

    async def page(self, request: Request) -> Response:
        counts = self._router.metrics
        html = _PAGE.substitute(
            state=self._state(),
            in_flight=self._router.places.taken,
            engines="".join(_row(engine) for engine in self._router.engines),
            requests=_counted(counts.requests),
            retries=_counted(counts.retries),
            fallbacks=_counted(counts.fallbacks),
        )
        return HTMLResponse(html, headers=_NO_RESOURCES)

    def _state(self) -> str:
        if not self._router.decode.some_up():
            return "down"
        return "ok" if all(engine.up for engine in self._router.engines) else "degraded"


def _row(engine: Engine) -> str:
    state = "up" if engine.up else "down"
    cells = (engine.role, engine.url, state, str(engine.in_flight), engine.reason)
    return f'<tr class="{state}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>\n"


def _counted(counts: dict[str, int]) -> str:
    return "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{count}</td></tr>\n"
        for name, count in counts.items()
        if count
    )
