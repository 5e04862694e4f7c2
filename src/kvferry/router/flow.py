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
from dataclasses import replace

import msgspec
from starlette.types import Message, Send

from kvferry.router.api import ApiError, Generation, Headers, RouterConfig, ticket_of
from kvferry.router.engines import (
    AnswerTooLong,
    EngineFailure,
    EngineGroup,
    Upstream,
    UpstreamAnswer,
    UpstreamEngine,
)
from kvferry.router.guard import Incoming, MemoryLimit, Quota
from kvferry.router.metrics import Metrics

# An answer is written in pieces of this size. The server takes the next one when the client has
# read most of the last.
_PIECE_BYTES = 64 << 10


class Router:
    """Engines, connections and counters, which all requests share."""

    def __init__(self, config: RouterConfig) -> None:
        self.limits = config.limits
        self.prefill = EngineGroup(config.prefill, "prefill", config.limits)
        self.decode = EngineGroup(config.decode, "decode", config.limits)
        self.upstream = Upstream(config.limits)
        self.metrics = Metrics()
        self.places = Quota(self.limits.max_in_flight, self.limits.address_share)
        self.memory = MemoryLimit(self.limits)

    @property
    def engines(self) -> list[UpstreamEngine]:
        return self.prefill.engines + self.decode.engines

    async def generate(self, asked: Incoming, reply: ClientReply) -> None:
        """Serve a completion. Raises ApiError, or EngineFailure if a stream breaks off."""
        await _Trip(self, asked, Generation(asked.body), reply).run()

    async def pass_on(self, asked: Incoming, reply: ClientReply) -> None:
        """Serve what any decode engine can answer, such as the list of models."""
        await _Trip(self, asked, None, reply).run()


class ClientGone(Exception):
    """The client closed its connection, or stopped reading or writing."""


class ClientReply:
    """The answer to one client. Every send has a deadline, after which it raises ClientGone."""

    def __init__(self, send: Send, request_id: bytes, client_seconds: float) -> None:
        self.started = False
        self.status = 0
        self._raw_send = send
        self._request_id = request_id
        self._client_seconds = client_seconds

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        for at in range(0, len(body), _PIECE_BYTES):
            await self.chunk(body[at : at + _PIECE_BYTES])
        await self.end()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        headers = [*headers, (b"x-request-id", self._request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

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
        self._ticket = b""
        self._decode_only: str | None = None  # the reason, once this is decided
        self._prefills = 0
        self._failed_prefill: set[UpstreamEngine] = set()
        self._tried_decode: set[UpstreamEngine] = set()

    async def run(self) -> None:
        if self._wanted is not None:
            self._fall_back(self._wanted.decode_only_because())
        failure: EngineFailure | None = None
        while len(self._tried_decode) < self._limits.tries:
            # Checked before the prefill, which would be useless without a decode engine.
            if not self._router.decode.some_up(besides=self._tried_decode):
                break
            if self._wanted is not None and not self._ticket and self._decode_only is None:
                refusal = await self._prefill(self._wanted)
                if refusal is not None:
                    await self._reply.whole(refusal.status, refusal.headers, refusal.body)
                    return
            engine = self._router.decode.pick(besides=self._tried_decode)
            if engine is None:
                break
            if self._tried_decode:
                self._router.metrics.retries["decode"] += 1
            self._tried_decode.add(engine)
            try:
                await self._decode(engine)
                return
            except AnswerTooLong as error:  # another engine would answer as much
                self._asked.trail.append(str(error))
                message = f"the answer has more than {self._limits.max_answer_bytes} bytes"
                raise ApiError(502, "answer_too_long", f"{message}; ask for a stream") from error
            except EngineFailure as error:
                if self._reply.started:
                    raise
                failure = error
                self._asked.trail.append(str(error))
                if error.delivered:
                    self._ticket = b""
        await self._give_up(failure)

    async def _prefill(self, wanted: Generation) -> UpstreamAnswer | None:
        """Get a ticket, or decide for decode-only. Returns a 4xx, which is the client's answer."""
        group, failed = self._router.prefill, self._failed_prefill
        stage = "prefill_again" if self._prefills else "prefill"
        while len(failed) < self._limits.tries:
            engine = group.pick(besides=failed)
            if engine is None:
                break
            if self._prefills:
                self._router.metrics.retries[stage] += 1
            self._prefills += 1
            stage = "prefill"
            try:
                ticket = await self._ask_for_ticket(engine, wanted)
            except EngineFailure as error:
                self._asked.trail.append(str(error))
                failed.add(engine)
                continue
            if isinstance(ticket, UpstreamAnswer):
                return ticket
            self._ticket = ticket
            if not ticket:
                self._fall_back("no_ticket")
            return None
        self._fall_back("prefill_failed" if failed else "no_prefill_engine")
        return None

    async def _ask_for_ticket(
        self, engine: UpstreamEngine, wanted: Generation
    ) -> bytes | UpstreamAnswer:
        """The ticket (b"" for none), or a 4xx. Raises EngineFailure."""
        headers = [(k, v) for k, v in self._asked.headers if k != b"accept-encoding"]
        headers.append((b"accept-encoding", b"identity"))  # the router reads this answer itself
        asked = replace(self._asked, headers=headers)
        seconds = self._limits.prefill_seconds
        async with self._router.upstream.ask(engine, asked, wanted.for_prefill(), seconds) as got:
            self._asked.trail.append(f"prefill {engine.url} {got.status}")
            if 400 <= got.status < 500:
                return got
            if got.status != 200:
                raise EngineFailure(engine, f"answered {got.status} to a prefill")
            try:
                return ticket_of(got.body)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise EngineFailure(engine, f"its answer cannot be read: {error}") from None

    async def _decode(self, engine: UpstreamEngine) -> None:
        """Pass one decode engine's answer to the client. Raises EngineFailure."""
        asked, wanted = self._asked, self._wanted
        streamed = wanted is None or wanted.streamed
        seconds = self._limits.first_byte_seconds if streamed else self._limits.answer_seconds
        # A GET has no body: an engine that does not expect one would take it for the next request
        # on the connection, which may be another client's.
        body = b"" if wanted is None else wanted.for_decode(self._ticket)
        async with self._router.upstream.ask(engine, asked, body, seconds) as got:
            asked.trail.append(f"decode {engine.url} {got.status}")
            headers = got.headers + self._path_header()
            if got.stream is None:
                await self._reply.whole(got.status, headers, got.body)
                return
            await self._reply.start(got.status, headers)
            data = got.body
            while data:
                await self._reply.chunk(data)
                data = await got.stream.next()
            await self._reply.end()

    async def _give_up(self, failure: EngineFailure | None) -> None:
        decode, wait = self._router.decode, self._limits.probe_every_seconds
        if failure is None or not failure.delivered:
            count = len(decode.engines)
            raise ApiError(503, "no_decode_engine", f"none of {count} decode engines is up", wait)
        if failure.answer is not None:
            answer = failure.answer
            headers = answer.headers + self._path_header()
            await self._reply.whole(answer.status, headers, answer.body)
            return
        if failure.timed_out:
            raise ApiError(504, "engine_timeout", "the decode engine did not answer in time")
        raise ApiError(502, "engine_failed", "the decode engine broke off before it answered")

    def _fall_back(self, reason: str | None) -> None:
        if reason is not None:
            self._decode_only = reason
            self._router.metrics.fallbacks[reason] += 1
            self._asked.trail.append(f"decode-only: {reason}")

    def _path_header(self) -> Headers:
        if self._wanted is None:
            return []
        path = b"decode-only" if self._decode_only else b"prefill+decode"
        return [(b"x-kvferry-path", path)]
