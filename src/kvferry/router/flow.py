"""The life of a request, from prefill to the last byte.

    1. A prefill engine gets the request for one token, with `do_remote_decode`. Its answer holds
       a ticket: `kv_transfer_params`.
    2. A decode engine gets the request as the client wrote it, and the unchanged ticket.
    3. Its answer goes to the client byte for byte: streams as they come, others when complete.

What happens when an engine fails before the first byte to the client:

    prefill engine fails            another one is tried, up to `tries` in all
    none is up, or all tries fail   decode-only: the decode engine computes the prompt itself
    it answers without a ticket     decode-only: there is nothing to hand over
    decode engine accepts no        another one gets the same ticket, which is still unused
      connection
    decode engine fails otherwise   prefill again, then another decode engine: the failed one may
      (5xx, broken, silent)         have claimed the ticket, and a ticket serves once
    all tries fail                  the engine's own 5xx if there was one; else 504 if it was
                                    silent, 502 if it broke off, 503 if none accepted the request
    any engine answers 4xx          the client gets that answer
    decode answers too much         502: another engine would answer as much

After the first byte nothing is tried again, because the client has tokens already. The router
closes the client's connection in the middle of the answer, which every HTTP client notices.

A client that disconnects cancels its request at any point. The router closes its connections to
engines, and the engines abort. A ticket that no engine has claimed expires at the prefill engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import msgspec
from starlette.types import Message, Send

from kvferry.router.api import Answer, ApiError, Generation, RouterConfig, ticket_of
from kvferry.router.engines import (
    AnswerTooLong,
    EngineFailure,
    EngineGroup,
    Incoming,
    Upstream,
    UpstreamEngine,
)
from kvferry.router.guard import ClientGone, MemoryLimit, Places

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
RETRIES = (
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
# An answer is written in pieces of this size. The server takes the next one when the client has
# read most of the last.
_PIECE_BYTES = 64 << 10


class Router:
    """Engines, connections and counters, which all requests share."""

    def __init__(self, config: RouterConfig) -> None:
        self.limits = config.limits
        self.prefill = EngineGroup(config.prefill, "prefill", config.limits)
        self.decode = EngineGroup(config.decode, "decode", config.limits)
        self.engines = self.prefill.engines + self.decode.engines
        self.upstream = Upstream(config.limits)
        self.places = Places(config.limits.max_in_flight, config.limits.address_share)
        self.memory = MemoryLimit(config.limits)
        self.requests = Counter(dict.fromkeys(OUTCOMES, 0))
        self.retries = Counter(dict.fromkeys(RETRIES, 0))
        self.fallbacks = Counter(dict.fromkeys(FALLBACKS, 0))

    async def generate(self, asked: Incoming, body: bytes, reply: ClientReply) -> None:
        """Serve a completion. Raises ApiError, or EngineFailure if a stream breaks off."""
        await _Trip(self, asked, Generation(body), reply).run()

    async def pass_on(self, asked: Incoming, body: bytes, reply: ClientReply) -> None:
        """Serve what any decode engine can answer, such as the list of models."""
        await _Trip(self, asked, None, reply).run()


class ClientReply:
    """The answer to one client. Every send has a deadline, after which it raises ClientGone."""

    def __init__(self, send: Send, request_id: bytes, client_seconds: float) -> None:
        self.status = 0  # until the answer begins
        self._raw_send = send
        self._request_id = request_id
        self._client_seconds = client_seconds

    async def send(self, answer: Answer) -> None:
        self.status = answer.status
        headers = [*answer.headers, (b"x-request-id", self._request_id)]
        if answer.rest is None:
            headers.append((b"content-length", b"%d" % len(answer.body)))
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await self._send(start)
        for at in range(0, len(answer.body), _PIECE_BYTES):
            await self._send_body(answer.body[at : at + _PIECE_BYTES])
        if answer.rest is not None:
            async for data in answer.rest:
                await self._send_body(data)
        await self._send_body(b"", more=False)

    async def _send_body(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._client_seconds):
                await self._raw_send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


class _Trip:
    """One request, until it is answered. `wanted` is None if it needs no prefill."""

    def __init__(
        self, router: Router, asked: Incoming, wanted: Generation | None, reply: ClientReply
    ) -> None:
        self._router = router
        self._limits = router.limits
        self._asked = asked
        self._wanted = wanted
        self._reply = reply
        # None: a prefill is needed. Empty: decode-only.
        self._ticket: bytes | None = None
        self._failed_prefill: set[UpstreamEngine] = set()

    async def run(self) -> None:
        decode, tried = self._router.decode, set[UpstreamEngine]()
        failure: EngineFailure | None = None
        if self._wanted is not None and (reason := self._wanted.decode_only_because()):
            self._fall_back(reason)
        # Checked before the prefill, which would be useless without a decode engine.
        while len(tried) < self._limits.tries and decode.some_up(besides=tried):
            if self._wanted is not None and self._ticket is None:
                await self._prefill(self._wanted, again=bool(tried))
                if self._reply.status:
                    return
            engine = decode.pick(besides=tried)
            if engine is None:
                break
            if tried:
                self._router.retries["decode"] += 1
            tried.add(engine)
            try:
                await self._decode(engine)
                return
            except EngineFailure as error:
                if self._reply.status:
                    raise
                failure = error
                self._asked.trail.append(str(error))
                if isinstance(error, AnswerTooLong):
                    break
                if error.delivered and self._ticket:
                    self._ticket = None
        await self._give_up(failure)

    async def _prefill(self, wanted: Generation, again: bool) -> None:
        """Get a ticket, or decide for decode-only, or answer the client with an engine's 4xx."""
        prefill, failed = self._router.prefill, self._failed_prefill
        headers = [(k, v) for k, v in self._asked.headers if k != b"accept-encoding"]
        headers.append((b"accept-encoding", b"identity"))  # the router reads this answer itself
        asked, body = replace(self._asked, headers=headers), wanted.for_prefill()
        retry = "prefill_again" if again else ""
        while len(failed) < self._limits.tries and (engine := prefill.pick(besides=failed)):
            if retry:
                self._router.retries[retry] += 1
            retry = "prefill"
            try:
                seconds = self._limits.prefill_seconds
                async with self._router.upstream.ask(engine, asked, body, seconds) as got:
                    asked.trail.append(f"prefill {engine.url} {got.status}")
                    if 400 <= got.status < 500:
                        await self._reply.send(got)
                        return
                    if got.status != 200:
                        raise EngineFailure(engine, f"answered {got.status} to a prefill")
                    self._ticket = ticket_of(got.body)
            except (EngineFailure, msgspec.DecodeError, UnicodeDecodeError) as error:
                asked.trail.append(f"{error}")
                failed.add(engine)
                continue
            if not self._ticket:
                self._fall_back("no_ticket")
            return
        self._fall_back("prefill_failed" if failed else "no_prefill_engine")

    def _fall_back(self, reason: str) -> None:
        self._ticket = b""
        self._router.fallbacks[reason] += 1
        self._asked.trail.append(f"decode-only: {reason}")

    async def _decode(self, engine: UpstreamEngine) -> None:
        """Pass one decode engine's answer to the client. Raises EngineFailure."""
        asked, wanted = self._asked, self._wanted
        streamed = wanted is None or wanted.streamed
        seconds = self._limits.first_byte_seconds if streamed else self._limits.answer_seconds
        # A GET has no body: an engine that does not expect one would take it for the next request
        # on the connection, which may be another client's.
        body = b"" if wanted is None else wanted.for_decode(self._ticket or b"")
        async with self._router.upstream.ask(engine, asked, body, seconds) as got:
            asked.trail.append(f"decode {engine.url} {got.status}")
            await self._send(got)

    async def _give_up(self, failure: EngineFailure | None) -> None:
        if failure is None or not failure.delivered:
            count, wait = len(self._router.decode.engines), self._limits.probe_every_seconds
            raise ApiError(503, "no_decode_engine", f"none of {count} decode engines is up", wait)
        if isinstance(failure, AnswerTooLong):  # another engine would answer as much
            message = f"the answer has more than {self._limits.max_answer_bytes} bytes"
            raise ApiError(502, "answer_too_long", f"{message}; ask for a stream")
        if failure.timed_out:
            raise ApiError(504, "engine_timeout", "the decode engine did not answer in time")
        if failure.answer is None:
            raise ApiError(502, "engine_failed", "the decode engine broke off before it answered")
        await self._send(failure.answer)

    async def _send(self, answer: Answer) -> None:
        if self._wanted is not None:
            path = b"decode-only" if self._ticket == b"" else b"prefill+decode"
            answer = replace(answer, headers=[*answer.headers, (b"x-kvferry-path", path)])
        await self._reply.send(answer)
