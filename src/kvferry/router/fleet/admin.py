# SPDX-License-Identifier: Apache-2.0
"""The admin API: the fleet as a resource, for clients with the token.

    GET    /admin/engines             all engines, with their state
    POST   /admin/engines             add one: {"url", "roles", "events", "replay", "weight"}, or
                                      take a draining one back, with its former values by default
    PATCH  /admin/engines?url=URL     change roles, events, replay or weight; or drain it, with
                                      "draining": "remove" or "stay"; null takes it back
    DELETE /admin/engines?url=URL     forget it at once; its running requests go on to their end

An answer has a "warning" where the change left no decode engine.

Without a token these routes do not exist. Every request needs `Authorization: Bearer TOKEN`, which
is checked before its body is read; a body has 64 KiB at most. Errors have OpenAI's format. Change
an engine of a fleet file or a DNS name there, because its source would bring it back. Here it can
only be drained to stay, and taken back.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

from kvferry.errors import DescriptionError
from kvferry.router.api import (
    COMMAND_LINE,
    ROLES,
    Answer,
    ApiError,
    base_url,
    json_answer,
)
from kvferry.router.clients import ClientRequest
from kvferry.router.fleet.engines import UpstreamEngine
from kvferry.router.fleet.sources import SPEC_FIELDS, read_spec
from kvferry.router.flow import Router
from kvferry.router.guard import RequestMemory, read_body
from kvferry.router.keys import Secrets

log = logging.getLogger(__name__)
PATH = "/admin/engines"
METHODS = ("GET", "POST", "PATCH", "DELETE")
SOURCE = "the admin API"
_MAX_BODY_BYTES = 64 << 10
_NONE_LEFT = "this was the last decode engine: requests get 503 until one is added"


class Admin:
    """The admin API of one router."""

    def __init__(self, router: Router, token: str) -> None:
        self._router = router
        self._fleet = router.fleet
        self._token = Secrets("admin token", token)
        self._limits = replace(router.limits, max_body_bytes=_MAX_BODY_BYTES)

    async def engines(self, request: ClientRequest) -> Answer:
        headers, method = request.head.headers, request.head.method
        held = RequestMemory(self._router.memory, request.address)
        try:
            self._token.require(headers)
            body = await read_body(headers, request.read, held, self._limits)
            answer = self._answer(method, request.head.target, body)
        except (ApiError, DescriptionError) as error:
            if not isinstance(error, ApiError):
                error = ApiError(400, "invalid_engine", str(error))
            log.warning("admin API: %s from %s: %d", method, request.address, error.answer.status)
            raise error from None
        finally:
            held.close()
        if method != "GET":
            log.info("admin API: %s from %s: done", method, request.address)
        return answer

    def _answer(self, method: str, target: bytes, body: bytes) -> Answer:
        if method == "GET":
            return json_answer({"engines": [described(e) for e in self._fleet.engines]})
        if method == "POST":
            return self._add(_object(body))
        engine = self._named(target)
        decoded = "decode" in engine.roles
        if method == "PATCH":
            self._change(engine, _object(body))
        else:
            _require_ours(engine)
            self._fleet.remove(engine)
        answer = described(engine)
        left = any(other.draining is None for other in self._fleet.with_role("decode"))
        if decoded and not left:
            answer["warning"] = _NONE_LEFT
        return json_answer(answer)

    def _add(self, said: dict[str, Any]) -> Answer:
        there, url = None, said.get("url")
        if isinstance(url, str) and not url.strip().startswith("dns://"):
            there = self._fleet.get(url := base_url(url))
            if there is None and "roles" not in said:
                raise DescriptionError(
                    f"{url} is not in the fleet, so its roles must be said: prefill, decode or "
                    "both (kvferry router add --role)"
                )
        if there is not None:
            said = _fields(there) | said
        spec = read_spec(said, SOURCE)
        if spec.is_name:
            raise DescriptionError("a name is for the command line or a fleet file; add addresses")
        if there is not None and there.draining is None:
            raise ApiError(409, "engine_exists", f"{spec.url} is in the fleet, as {there.role}")
        if there is not None and there.draining == "stay" and not _ours(there):
            spec = there.spec  # taken back as its source names it
        return json_answer(described(self._fleet.add(spec)), 201)

    def _named(self, target: bytes) -> UpstreamEngine:
        query = parse_qs(target.partition(b"?")[2].decode())
        url = base_url(query.get("url", [""])[-1])
        engine = self._fleet.get(url)
        if engine is None:
            raise ApiError(404, "no_such_engine", f"{url} is not in the fleet")
        return engine

    def _change(self, engine: UpstreamEngine, said: dict[str, Any]) -> None:
        then = said.pop("draining", "no word")
        if then not in ("remove", "stay", None, "no word"):
            raise DescriptionError(f'draining must be "remove", "stay" or null, not {then!r:.80}')
        if said or then == "remove":
            _require_ours(engine)
        if said:
            self._fleet.change(engine, read_spec(_fields(engine) | said, engine.spec.source))
        if then in ("remove", "stay"):
            self._fleet.drain(engine, then)
        elif then is None and engine.draining is not None:
            self._fleet.add(engine.spec)


def described(engine: UpstreamEngine) -> dict[str, Any]:
    """An engine as JSON."""
    spec = engine.spec
    return {
        "url": spec.url,
        "roles": [role for role in ROLES if role in spec.roles],
        "events": spec.events,
        "replay": spec.replay,
        "weight": spec.weight,
        "source": spec.source,
        "up": engine.up,
        "was_up": engine.starts > 0,
        "trial": engine.trial,
        "reason": engine.reason or None,
        "draining": engine.draining,
        "removed": engine.removed,
        "in_flight": engine.in_flight,
        "idle": engine.idle,
    }


def _fields(engine: UpstreamEngine) -> dict[str, Any]:
    """The fields of an engine that a request may set, with their present values."""
    now = {name: getattr(engine.spec, name) for name in SPEC_FIELDS}
    return now | {"roles": sorted(engine.roles)}


def _ours(engine: UpstreamEngine) -> bool:
    """Whether only this API can change the engine while the router runs."""
    return engine.spec.source in (SOURCE, COMMAND_LINE)


def _require_ours(engine: UpstreamEngine) -> None:
    """Refuse to change an engine that a file or a name would bring back."""
    if not _ours(engine):
        raise ApiError(
            409,
            "engine_of_another_source",
            f"{engine.url} comes from {engine.spec.source}, which would bring it back; change it "
            "there, or drain it to stay",
        )


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DescriptionError(f"the body must be a JSON object: {error}") from None
    if not isinstance(said, dict):
        raise DescriptionError("the body must be a JSON object")
    return said
