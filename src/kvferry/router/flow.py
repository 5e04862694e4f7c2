# SPDX-License-Identifier: Apache-2.0
"""The life of a request, from its placement to the last byte of its answer.

    1. `placing` chooses by expected time which engine decodes the request, and whether another one
       prefills it. Without the prompt's tokens, the engines with the fewest requests are taken. The
       request counts at its decode engine while the other one prefills.
    2. A prefill engine gets the request for one token, with `do_remote_decode`. Its answer holds
       a ticket: `kv_transfer_params`. An engine with both roles never hands over to itself. A
       request that is computed where it is decoded skips this step.
    3. The decode engine gets the request as the client wrote it, and the unchanged ticket.
    4. Its answer goes to the client byte for byte: streams as they come, others when complete.

What happens when an engine fails before the first byte to the client:

    prefill engine fails            another one is tried, up to `tries` in all
    none is up, or all tries fail   decode-only: the decode engine computes the prompt itself
    it answers without a ticket     decode-only: there is nothing to hand over
    decode engine accepts no        another one gets the same ticket, which is still unused
      connection
    decode engine fails otherwise   the request is placed anew: another prefill and decode engine,
      (5xx, broken, silent)         or one that computes the prompt. The ticket is dropped, because
                                    the failed one may have used it
    all decode engines are busy     the request waits in line (`Turns`) up to `queue_seconds`; then
                                    429, with the time after which it should have its turn
    no decode engine is up          the request waits up to `wait_seconds` for one, also for one
                                    that failed it and has started again; then 503, with the
                                    time after which an engine should be back
    all tries fail                  the engine's own 5xx if there was one; else 504 if it was
                                    silent, 502 if it broke off and is still up
    any engine answers 4xx          the client gets that answer
    decode answers too much         502: another engine would answer as much
    too many requests fail          retries that reach an engine have one budget for all requests;
                                    when it is used up, the first failure counts

After the first byte nothing is tried again, because the client has tokens already. A stream of
events passes event by event. If it is cut, the client gets the whole events, then an event with an
error in OpenAI's format, and the end of the body, without `[DONE]`. A compressed stream, or one cut
within an event of more than 64 KiB, has no room for that event: the router closes the connection
in the middle of the answer, which every HTTP client notices. An HTTP/1.0 answer ends with its
connection, so there the router resets the connection behind the error.

A client that disconnects cancels its request at any point. The router closes its connections to
engines, and the engines abort. A ticket that no engine has claimed expires at the prefill engine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry, Histogram

from kvferry.router.api import (
    COMMAND_LINE,
    DECISION,
    PATH,
    REQUEST_ID,
    Answer,
    ApiError,
    Generation,
    RouterConfig,
    ticket_of,
)
from kvferry.router.cache.index import Publisher
from kvferry.router.choice import Decision, Option
from kvferry.router.clients import ClientRequest
from kvferry.router.fleet.engines import (
    AnswerTooLong,
    EngineFailure,
    Fleet,
    Incoming,
    UpstreamEngine,
)
from kvferry.router.fleet.sources import Sources
from kvferry.router.guard import LineFull, Quota, RetryBudget
from kvferry.router.keys import EngineKey, Secrets
from kvferry.router.live import CacheNow, EngineNow, LiveState, RouterNow
from kvferry.router.placing import Placer, RequestWay
from kvferry.router.rates import EngineMeter
from kvferry.router.spans import RouterSpans

OUTCOMES = (
    "ok",
    "client_error",  # 4xx, an engine's or the router's
    "unauthorized",  # 401
    "engine_error",  # 5xx, also the router's own 502 and 504
    "unavailable",  # 503: no decode engine is up, or an engine answered so
    "busy",  # 429, the router's or an engine's
    "deadline",  # the client's own deadline was over
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
    "same_engine",  # the only decode engine left made the ticket, and has the cache already
    "batch",
    "prompt_logprobs",
)
# An answer is written in pieces of this size. The server takes the next one when the client has
# read most of the last.
_PIECE_BYTES = 64 << 10
# Histograms, by the name after `kvferry_router_`.
LATENCIES = {
    "request_seconds": "Requests that ended well, from their headers to the end of the answer.",
    "first_byte_seconds": "Completions that ended well, from their headers to the first byte.",
    "prefill_seconds": "Prefills that an engine answered with 200.",
}
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_FEW = 3  # engines or reasons that a message names
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class Router:
    """The engines, connections and counters that all requests share."""

    def __init__(self, config: RouterConfig) -> None:
        self.limits = config.limits
        self.fleet = Fleet(config.specs(), config.limits, ca_file=config.engine_ca)
        self.sources = Sources(self.fleet, config.limits)
        self.sources.names.use(COMMAND_LINE, [s for s in config.specs() if s.is_name])
        if config.fleet_file is not None:
            self.sources.watch_fleet(config.fleet_file)
        self.keys: Secrets | None = None  # None: every client may ask
        if config.api_keys_file is not None:
            self.keys = Secrets("API key")
            self.sources.watch("api_keys", config.api_keys_file, self.keys.use, secret=True)
        self.engine_key: EngineKey | None = None  # None: engines see the clients' keys
        if config.engine_key_file is not None:
            self.engine_key = EngineKey()
            self.sources.watch(
                "engine_key", config.engine_key_file, self.engine_key.use, secret=True
            )
        self.places = Quota(config.limits.max_in_flight, config.limits.address_share)
        self.memory = Quota(config.limits.max_held_bytes, config.limits.address_share)
        self.budget = RetryBudget(config.limits.retry_share, config.limits.retry_burst)
        self.requests = Counter(dict.fromkeys(OUTCOMES, 0))
        self.retries = Counter(dict.fromkeys(RETRIES, 0))
        self.fallbacks = Counter(dict.fromkeys(FALLBACKS, 0))
        self.registry = CollectorRegistry()
        self.latency = {
            name: Histogram(
                f"kvferry_router_{name}", what, registry=self.registry, buckets=_BUCKETS
            )
            for name, what in LATENCIES.items()
        }
        self.placing = Placer(self.fleet, config, self.registry)
        self.live = LiveState(self.now)
        self.spans: RouterSpans | None = None  # while the server runs, and was told of a collector

    def now(self) -> RouterNow:
        """The present state, for the page."""
        stats = self.placing.index.stats() if self.placing.by_cost else {}
        meters = self.placing.meters
        return RouterNow(
            engines=[_engine_now(e, meters[e.url], stats.get(e.url)) for e in self.fleet.engines],
            in_flight=self.places.taken,
            most_in_flight=self.limits.max_in_flight,
            waiting=self.fleet.turns.waiting,
            problems={
                file.name: f"The file of {file.name} is not used: {file.problem}"
                for file in self.sources.files
                if file.problem
            },
        )

    async def generate(self, asked: Incoming, body: bytes, reply: ClientReply) -> None:
        """Serve a completion. Raises ApiError, or EngineFailure if a stream breaks off."""
        await _Trip(self, asked, Generation(body), reply).run()

    async def pass_on(self, asked: Incoming, body: bytes, reply: ClientReply) -> None:
        """Serve a request that any decode engine can answer, such as the list of models."""
        await _Trip(self, asked, None, reply).run()


STARTING_SECONDS = 600.0  # after which an engine that was never up counts as down, not starting


def _engine_now(engine: UpstreamEngine, meter: EngineMeter, part: Publisher | None) -> EngineNow:
    since, running = engine.down_since, meter.running
    prefill, step = meter.prefill_line.fit(), meter.step_line.fit()
    down = None if since is None else time.monotonic() - since
    decodes = "decode" in engine.roles
    cache = None if part is None else CacheNow(part.state, part.size)
    return EngineNow(
        url=engine.url,
        roles=sorted(engine.roles, reverse=True),
        up=engine.up,
        was_up=engine.starts > 0 or (down is not None and down > STARTING_SECONDS),
        draining=engine.draining is not None,
        trial=bool(engine.trial),
        reason=engine.reason,
        down_seconds=down,
        in_flight=engine.in_flight,
        failures=engine.failures - engine.failed_probes,
        failed_probes=engine.failed_probes,
        waiting_tokens=max(0, round(meter.waiting_work)),
        running=running if decodes else None,
        prefill_tokens_per_second=1 / prefill.slope if prefill else None,
        # An idle engine makes no steps.
        step_ms=1000 * (step.fixed + step.slope * running) if step and running else None,
        cache=cache,
    )


def _absence(engine: UpstreamEngine) -> str:
    """Why an engine gets no requests."""
    return engine.reason if engine.draining is None else "draining"


def _is_coded(answer: Answer) -> bool:
    """Whether an answer is compressed, so that its events cannot be told apart."""
    return any(name == b"content-encoding" for name, _ in answer.headers)


class ClientReply:
    """The answer to one client. A client that does not read it in time is gone: see `guard`."""

    def __init__(self, request: ClientRequest, request_id: bytes) -> None:
        self._request = request
        self._request_id = request_id
        self.status = 0  # until the answer begins
        self.began = 0.0  # when it did, by the monotonic clock
        self.saw: Callable[[bytes], None] | None = None  # gets a stream as it passes
        self._by_events = False  # a stream that passes event by event
        self._between_events = False
        self._part = b""  # of the next event

    async def send(self, answer: Answer) -> None:
        """Raises ClientGone."""
        request, body = self._request, answer.body
        self.status = answer.status
        self.began = time.monotonic()
        headers = [*answer.headers, (REQUEST_ID, self._request_id)]
        if answer.rest is None:
            headers.append((b"content-length", b"%d" % len(body)))
        request.begin(answer.status, headers)
        if answer.rest is not None:
            self._by_events = self._between_events = not _is_coded(answer)
            self.take(body, last=False)
            await request.drained()
            await answer.rest(self)
            return
        for at in range(0, len(body) - _PIECE_BYTES, _PIECE_BYTES):
            request.write(body[at : at + _PIECE_BYTES])
            await request.drained()
        request.write(body[(max(0, len(body) - 1) // _PIECE_BYTES) * _PIECE_BYTES :], last=True)

    async def cut(self, code: str, message: str) -> None:
        """End a stream with an error, if it stands between two events. Else the client gets an
        answer without an end."""
        if self._between_events:
            self._between_events = False
            self._request.cut(b"data: %s\n\n" % ApiError(500, code, message).answer.body)
        elif self.status:
            self._request.abort()

    # As a `StreamSink`

    def on_drain(self, go_on: Callable[[], None] | None) -> None:
        if not self._request.answered:  # else the connection is the next request's
            self._request.connection.drained = go_on

    def take(self, data: bytes, last: bool) -> bool:
        """Pass on whole events, and keep the part of the next one, if it is small."""
        if self._by_events and not last:
            if self._part:
                data = self._part + data
            if data.endswith(b"\n\n"):
                end = len(data)
            else:
                end = max(at + len(e) if (at := data.rfind(e)) >= 0 else 0 for e in _EVENT_ENDS)
            large = len(data) - end > _PIECE_BYTES
            if large:
                end = len(data)
            data, self._part = data[:end], data[end:]
            if not end:
                return False
            self._between_events = not large
        elif last:
            data, self._part, self._between_events = self._part + data, b"", False
        if self.saw is not None:
            self.saw(data)
        return self._request.write(data, last)


class _Trip:
    """One request, until it is answered. `wanted` is None if it needs no prefill."""

    def __init__(
        self, router: Router, asked: Incoming, wanted: Generation | None, reply: ClientReply
    ) -> None:
        self._router = router
        self._fleet = router.fleet
        self._limits = router.limits
        self._asked = asked
        self._wanted = wanted
        self._reply = reply
        self._placement: RequestWay | None = None
        # None: a prefill is needed. Empty: decode-only.
        self._ticket: bytes | None = None
        self._alone = False  # decode-only by choice, which the next try may change
        self._chosen_prefill: UpstreamEngine | None = None
        self._ticket_from: UpstreamEngine | None = None  # while the ticket is unused
        self._failed_prefill: set[UpstreamEngine] = set()
        self._tried_decode: dict[UpstreamEngine, int] = {}  # and its `starts` at that time
        self._wait_seconds = self._limits.wait_seconds  # left for an engine to come up
        self._queue_seconds = self._limits.queue_seconds  # left for one to have room
        self._own_seconds = 0.0  # that reading and placing it took
        self._prefilled_by: str | None = None

    async def run(self) -> None:
        try:
            if self._wanted is not None:
                begun = time.monotonic()
                self._asked.part("place")
                self._placement = await self._router.placing.look(
                    self._asked.path, self._asked.headers, self._wanted
                )
                self._own_seconds = time.monotonic() - begun
            await self._run()
        finally:
            self._ticket_ended()
            if self._placement is not None:
                self._placement.ended()

    async def _run(self) -> None:
        tries = 0
        failure: EngineFailure | None = None
        if self._wanted is not None and (reason := self._wanted.decode_only_because()):
            self._fall_back(reason)
        self._router.budget.request()
        # Checked before the prefill, which would be useless without a decode engine.
        while tries < self._limits.tries and await self._turn():
            if self._alone:
                self._ticket, self._alone = None, False
            engine = self._choose() or self._pick_decode()
            if engine is None:  # it went down just now
                continue
            if self._wanted is not None and self._ticket is None:
                with self._fleet.reserved(engine):
                    await self._prefill(self._wanted, engine, again=tries > 0)
                if self._reply.status:
                    return
            if not engine.up:  # it went down while the other prefilled
                continue
            if tries:
                self._router.retries["decode"] += 1
            tries += 1
            self._tried_decode[engine] = engine.starts
            try:
                await self._decode(engine)
                return
            except EngineFailure as error:
                if self._reply.status:
                    raise
                failure = error
                self._asked.failed(str(error))
                if isinstance(error, AnswerTooLong):
                    break
                if error.delivered and self._ticket:
                    self._ticket = None
                    self._ticket_ended()
                if error.broke_off and not self._fleet.some_up("decode", self._failed_decode()):
                    await self._fleet.check(engine)
                if tries < self._limits.tries and not await self._may_retry(error):
                    break
        await self._give_up(failure)

    async def _may_retry(self, error: EngineFailure) -> bool:
        """Whether another engine may be asked. Requests that reached no living engine are free."""
        if not error.delivered or self._router.budget.take():
            return True
        if error.broke_off:
            await self._fleet.check(error.engine)
            if error.engine.gone:
                return True
        self._router.budget.refused += 1
        self._asked.trail.append("no retry: too many requests fail")
        return False

    def _choose(self) -> UpstreamEngine | None:
        """The decode engine of the cheapest way, by cost; None: the prompt has no tokens."""
        self._chosen_prefill = None
        if self._placement is None or self._ticket:
            return None
        begun = time.monotonic()
        decision = self._placement.choose(
            may_hand_over=self._ticket is None,
            not_prefill=self._failed_prefill,
            not_decode=self._failed_decode(),
        )
        if decision is None:
            return None
        self._own_seconds += time.monotonic() - begun
        self._show(decision)
        self._asked.trail.append(decision.why)
        chosen = decision.chosen
        if chosen.prefill is not None:
            self._chosen_prefill = self._fleet.get(chosen.prefill)
        elif self._ticket is None:
            self._ticket, self._alone = b"", True
        return self._fleet.get(chosen.decode)

    def _show(self, decision: Decision) -> None:
        """Show the first decision of this request on the page; its outcome is added later."""
        asked, placement = self._asked, self._placement
        if asked.placed is None and placement is not None:
            asked.placed = self._router.live.decided(
                asked.request_id.decode(), placement.tokens, decision, self._own_seconds
            )

    def _pick_decode(self) -> UpstreamEngine | None:
        """A decode engine that has not failed this request, and did not make its ticket."""
        failed = self._failed_decode()
        others = failed if self._ticket_from is None else failed | {self._ticket_from}
        engine = self._fleet.pick("decode", besides=others)
        if engine is None and self._ticket_from is not None:
            engine = self._fleet.pick("decode", besides=failed)
            if engine is not None:
                self._ticket_ended()
                self._fall_back("same_engine")
        return engine

    def _failed_decode(self) -> set[UpstreamEngine]:
        """Decode engines that failed this request and have not started again since."""
        return {engine for engine, starts in self._tried_decode.items() if engine.starts == starts}

    async def _turn(self) -> bool:
        """Wait until a decode engine has room, and it is this request's turn.

        False if no engine is left that could serve it. Raises ApiError 429 if all are busy.
        """
        fleet = self._fleet
        while not fleet.turns.at_once(failed := self._failed_decode()):
            busy = fleet.some_up("decode")
            if busy and not fleet.some_up("decode", besides=failed):
                return False
            seconds = self._queue_seconds if busy else self._wait_seconds
            if seconds <= 0 and not busy:
                return False
            begun = time.monotonic()
            try:
                if seconds <= 0:
                    raise LineFull(f"this request waited {self._limits.queue_seconds:g} s")
                self._asked.part("wait")
                # An engine that comes up now was started again, and has failed nothing since.
                besides = failed if busy else ()
                granted = await fleet.turns.wait(self._asked.client, besides, seconds)
            except LineFull as error:
                if not busy:
                    return False
                later = fleet.turns.expected_seconds()
                message = f"all decode engines are busy, and {error}; ask again in {later:.0f} s"
                raise ApiError(429, "engines_busy", message, later) from None
            waited = time.monotonic() - begun
            if busy:
                self._queue_seconds -= waited
            else:
                self._wait_seconds -= waited
            self._asked.trail.append(f"waited {waited:.1f} s for a decode engine")
            if granted:
                break
        return True

    async def _prefill(self, wanted: Generation, decode: UpstreamEngine, again: bool) -> None:
        """Get a ticket, or decide for decode-only, or answer the client with an engine's 4xx.

        `decode` is the engine that will use the ticket.
        """
        fleet, failed = self._fleet, self._failed_prefill
        if not failed and self._chosen_prefill is None and not fleet.with_role("prefill"):
            self._fall_back("no_prefill_engine")
            return
        asked, body = self._asked, wanted.for_prefill()
        retry = "prefill_again" if again else ""
        placement = self._placement
        while len(failed) < self._limits.tries and (
            engine := self._chosen_prefill or fleet.pick("prefill", besides=failed | {decode})
        ):
            self._chosen_prefill = None
            if retry:
                self._router.retries[retry] += 1
            retry = "prefill"
            try:
                seconds, begun = self._limits.prefill_seconds, time.monotonic()
                asked.part("prefill", engine.url)
                if placement is not None:
                    placement.compute(engine.url, decoded_elsewhere=True)
                async with fleet.ask(engine, asked, body, seconds, plain=True) as got:
                    asked.trail.append(f"prefill {engine.url} {got.status}")
                    if 400 <= got.status < 500:
                        await self._reply.send(got)
                        return
                    if got.status != 200:
                        raise EngineFailure(engine, f"answered {got.status} to a prefill")
                    self._ticket = ticket_of(got.body)
                    self._prefilled_by = engine.url if self._ticket else None
                    if self._ticket:
                        self._ticket_from = engine
                        engine.tickets += 1
                    if placement is not None:
                        placement.prefilled(got.body)
                    latency = self._router.latency["prefill_seconds"]
                    latency.observe(time.monotonic() - begun)
            except (EngineFailure, msgspec.DecodeError, UnicodeDecodeError) as error:
                asked.failed(f"{error}")
                failed.add(engine)
                if not isinstance(error, EngineFailure):
                    error = EngineFailure(engine, "its answer is no JSON object")
                if len(failed) < self._limits.tries and not await self._may_retry(error):
                    break
                continue
            if not self._ticket:
                self._fall_back("no_ticket")
            return
        self._fall_back("prefill_failed" if failed else "no_prefill_engine")

    def _ticket_ended(self) -> None:
        """The ticket was used, or never will be."""
        if self._ticket_from is not None:
            self._fleet.ticket_ended(self._ticket_from)
            self._ticket_from = None

    def _fall_back(self, reason: str) -> None:
        self._ticket, self._prefilled_by = b"", None
        self._router.fallbacks[reason] += 1
        self._asked.trail.append(f"decode-only: {reason}")

    async def _decode(self, engine: UpstreamEngine) -> None:
        """Pass one decode engine's answer to the client. Raises EngineFailure."""
        asked, wanted, way, live = self._asked, self._wanted, self._placement, self._router.live
        streamed = wanted is None or wanted.streamed
        seconds = self._limits.first_byte_seconds if streamed else self._limits.answer_seconds
        # A GET has no body: an engine that does not expect one would take it for the next request
        # on the connection, which may be another client's.
        body = b"" if wanted is None else wanted.for_decode(self._ticket or b"")
        handed_over = bool(self._ticket)
        asked.part("decode", engine.url)
        if way is not None:
            if asked.placed is None:  # without a choice by cost
                said = (step for step in asked.trail if step.startswith("decode-only"))
                option = Option(engine.url, self._prefilled_by, math.nan, {}, 0, "none")
                self._show(Decision(option, (), next(said, "by load")))
            way.decode(engine.url, handed_over=handed_over)
        async with self._fleet.ask(engine, asked, body, seconds) as got:
            self._ticket_ended()  # the engine has the cache before it answers
            asked.trail.append(f"decode {engine.url} {got.status}")
            if got.rest is not None:
                asked.part("stream")
            if way is None or asked.placed is None:
                await self._send(got)
                return
            if got.status == 200 and got.rest is not None:
                way.first()
                if not _is_coded(got):
                    self._reply.saw = way.saw
            elif got.status == 200:
                way.saw(got.body)
            prefill = self._prefilled_by if handed_over else None
            live.answered(asked.placed, way.actual_seconds, prefill=prefill, decode=engine.url)
            await self._send(got)
            if got.status == 200:
                way.served(handed_over=handed_over)
                live.served(asked.placed, way.cached_tokens)
                if way.decision is not None and way.actual_seconds is not None:
                    expected = way.decision.chosen.seconds
                    took = f"expected {expected:.3f} s, took {way.actual_seconds:.3f} s"
                    asked.trail.append(took)

    async def _give_up(self, failure: EngineFailure | None) -> None:
        if isinstance(failure, AnswerTooLong):  # another engine would answer as much
            message = f"the answer has more than {self._limits.max_answer_bytes} bytes"
            raise ApiError(502, "answer_too_long", f"{message}; ask for a stream")
        fleet = self._fleet
        gone = failure is not None and failure.broke_off and not fleet.some_up("decode")
        if failure is None or not failure.delivered or gone:
            seconds, usual = fleet.absence("decode")
            absent = [engine for engine in fleet.with_role("decode") if not engine.open]
            if not fleet.with_role("decode"):
                message = "the fleet has no decode engine; add one: "
                message += "kvferry router add URL --role decode"
                raise ApiError(503, "no_decode_engine", message, seconds)
            named = [f"{engine.url} ({_absence(engine)})" for engine in absent[:_FEW]]
            if len(absent) > _FEW:
                named.append(f"and {len(absent) - _FEW} more")
            self._asked.trail.append(f"no decode engine is up: {', '.join(named)}")
            # Clients do not see the engines' addresses.
            kinds = Counter(_absence(engine).partition(":")[0] for engine in absent)
            why = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_FEW))
            message = f"no decode engine is up{f' ({why})' * bool(why)}; "
            message += "/health of the router names them; "
            if usual is not None:
                message += f"a lost one usually is back after {usual:.0f} s; "
            message += f"ask again in {seconds:.0f} s"
            raise ApiError(503, "no_decode_engine", message, seconds)
        if failure.timed_out:
            raise ApiError(504, "engine_timeout", "the decode engine did not answer in time")
        if failure.answer is None:
            raise ApiError(502, "engine_failed", "the decode engine broke off before it answered")
        await self._send(failure.answer)

    async def _send(self, answer: Answer) -> None:
        if self._wanted is not None:
            path = b"decode-only" if self._ticket == b"" else b"prefill+decode"
            headers = [*answer.headers, (PATH, path)]
            if self._placement is not None and self._placement.decision is not None:
                headers.append((DECISION, self._placement.summary()))
            answer = Answer(answer.status, headers, answer.body, answer.rest)
        await self._reply.send(answer)
