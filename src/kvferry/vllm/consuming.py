# SPDX-License-Identifier: Apache-2.0
"""A decode engine's requests whose prompt was, or is being, computed elsewhere.

A request arrives with a ticket, or with the name of a producer that got it at the same time. Its
tokens count as external, and an asynchronous load is ordered when vLLM has allocated blocks.
However the request ends, every source gets one last word: from the load, or `not needed`.

A ticket that cannot be for its request is given back, and the prompt is computed here. The log says
so, and a metric counts it once, by reason. The same happens if the producer has dropped blocks that
a load would fill (windows, in smaller blocks than here). So an engine with windows asks for the
producer's shape before it promises vLLM any tokens. A load that failed is not tried again: the
request is not matched again, and vLLM's `kv_load_failure_policy` decides. A request that was
preempted is not matched again either.

Block pressure (docs/protocol.md has the argument). A request gets blocks for a load only when its
producer has computed its prompt. Until then vLLM is told to ask again, and the request owns no
blocks. Two engines that hold prompts for others may wait for each other's blocks. So an engine that
holds prompts and stands still, although requests with tickets queue, gives one ticket back to its
producer and computes that prompt itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from kvferry.errors import AuthenticationError, KvferryError
from kvferry.handover.load import Load
from kvferry.handover.renew import Renewer
from kvferry.handover.ticket import MARK, Ticket
from kvferry.layout.model import CacheModel
from kvferry.layout.shape import EngineShape
from kvferry.plan.tokens import unloadable
from kvferry.pool.weights import Asked
from kvferry.vllm.bootstrap import CHILD, Appointment, Rendezvous, appointment, derived_hold
from kvferry.vllm.fingerprint import adapted, request_digest
from kvferry.vllm.metrics import ComputedHere
from kvferry.vllm.producing import HandoverParts, PrefillCut

log = logging.getLogger("kvferry")

SIBLING_SECONDS = 1.0  # the samples of one request arrive within this time
QUESTIONS = 3  # an answer may take as long as this many questions: others may be asked first
# An engine that computes nothing and loads nothing, with holds of its own and tickets in its queue,
# gives one ticket back after this long. Fetching a hold, or passing a ticket on, takes
# milliseconds.
STANDSTILL_SECONDS = 0.5
MOST_FOUND = 64  # producers looked for in one step: the digest of a long prompt takes a moment
ADAPTER_SECONDS = 2.0  # a request waits for the first reading of its adapter; then it is computed


@dataclass(slots=True)
class Consuming:
    parts: HandoverParts
    rendezvous: Rendezvous
    renewer: Renewer
    wanted: dict[str, _Wanted] = field(default_factory=dict)
    # Tickets that several requests may share (`n > 1`), by hold, and when each is given back if no
    # request needs it then.
    _leaving: dict[str, tuple[Ticket, float]] = field(default_factory=dict)
    _unfound: list[Appointment] = field(default_factory=list)  # of requests that are over
    # Requests whose producer is not found. `settle` looks for it too, because vLLM asks for no
    # match while its slots are taken.
    _seeking: dict[str, Any] = field(default_factory=dict)
    _described: bool = False  # whether this engine's workers have described themselves
    _windows: tuple[CacheModel, EngineShape] | None = None  # of this engine, if it has windows
    _still_since: float | None = None  # when this engine came to a standstill
    _asked: bool = False  # whether vLLM has asked for a match since the last step
    # Requests with blocks for a load, until vLLM schedules them. It looks at these first, and at no
    # others while one that is loaded waits for one more block.
    _beginning: set[str] = field(default_factory=set)

    def described_as(self, model: CacheModel, shape: EngineShape) -> None:
        """Set this engine's description. With windows, not every shape can be loaded from."""
        self._described = True
        if any(group.residency.kind in ("window", "chunk") for group in model.groups):
            self._windows = model, shape

    def arrived(self, request: Any) -> None:
        """A request asks for a remote prefill."""
        request_id = request.request_id
        wanted = _Wanted(time.monotonic(), bool(CHILD.match(request_id)))
        self.wanted[request_id] = wanted
        self._ask(request, wanted, self._arrived)
        if wanted.over:
            del self.wanted[request_id]
        elif wanted.ticket is None:
            self._seeking[request_id] = request

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self._asked = True
        wanted = self.wanted.get(request.request_id)
        if wanted is not None and wanted.failed:
            # vLLM frees its blocks, and would wait for as many at this request, while loaded ones
            # behind it hold them. After this answer it stands behind those.
            wanted.failed = False
            return None, False
        if wanted is None or wanted.over or wanted.loading:
            return 0, False
        if not self._ask(request, wanted, self._loadable, computed):
            return (0 if wanted.over else None), False
        assert wanted.ticket is not None
        wanted.matched = max(0, wanted.ticket.tokens - computed)
        return wanted.matched, wanted.matched > 0

    def _ask(
        self, request: Any, wanted: _Wanted, question: Callable[..., bool], *more: Any
    ) -> bool:
        """The answer to a question about a request; False also if it is to be computed here."""
        try:
            return question(request, wanted, *more)
        except ComputeHere as refusal:
            here = refusal
        except Exception:  # whatever a client, a proxy or a bootstrap says, the engine goes on
            log.exception("request %s", request.request_id)
            here = ComputeHere("error", "of an error of ours")
        if not getattr(request, "abort_immediately", False):  # vLLM rejected it: it has no prompt
            self._count_here(request.request_id, here)
        self._through(wanted)
        return False

    def _count_here(self, request_id: str, here: ComputeHere) -> None:
        self.parts.stats.count("requests_computed_here", here.reason)
        log.log(here.level, "request %s: computed here, because %s", request_id, here.why)

    # Questions: each returns whether the answer is there, or raises `ComputeHere`

    def _arrived(self, request: Any, wanted: _Wanted) -> bool:
        """Whether a new request has a ticket; raises if the ticket does not fit the request."""
        params = request.kv_transfer_params
        marked = params.get(MARK)
        if isinstance(marked, dict) and "not_held" in marked:
            why = f"it is not held: {str(marked['not_held'])[:300]!r}"
            raise ComputeHere("not held", why, logging.INFO)
        wanted.lora = self.parts.adapters.ask(request, ADAPTER_SECONDS)
        unfit = self.parts.prompts.unfit(request)
        if not isinstance(marked, dict):
            try:
                wanted.appointment = appointment(params, request.request_id, self.parts.style)
            except KvferryError as error:
                raise ComputeHere("no ticket", str(error)) from None
            if unfit:
                raise ComputeHere("unfit", unfit)  # its producer may hold it, and will hear of it
            return self._found(request, wanted)
        try:
            ticket = Ticket.from_params(params)
        except KvferryError as error:
            raise ComputeHere("bad ticket", str(error)) from None
        if not self.parts.config.admits(ticket.host):
            why = (
                f"its ticket names the host {ticket.host}, which is not among the configured peers"
            )
            raise ComputeHere("not allowed", why)
        wanted.ticket = ticket
        if unfit:
            raise ComputeHere("unfit", unfit)
        cut = self.parts.cut
        require_fit(ticket, request, cut)
        tokens = min(ticket.tokens, cut.loaded(request.num_tokens))
        wanted.ticket = replace(ticket, tokens=tokens)
        self.renewer.watch(ticket)  # also while the request queues
        return True

    def _loadable(self, request: Any, wanted: _Wanted, computed: int) -> bool:
        return (
            self._found(request, wanted)
            and self._prefilled(wanted)
            and self._adapted(request, wanted)
            and self._kept(wanted, computed)
        )

    def _found(self, request: Any, wanted: _Wanted) -> bool:
        """Whether the producer that a request named is found. Then there is a ticket."""
        named = wanted.appointment
        if wanted.ticket is not None or named is None:
            return True
        try:
            wanted.ticket = self._ticket(named, request)
        except Exception as error:
            wanted.appointment = None  # it cannot be told that its hold is not needed, either
            if not isinstance(error, KvferryError):
                raise
            allowed = not isinstance(error, AuthenticationError)
            raise ComputeHere("not found" if allowed else "not allowed", str(error)) from None
        if wanted.ticket is not None:
            wanted.ready = False  # its prefill may not even have begun
            self.renewer.watch(wanted.ticket, early=True)
            return True
        if time.monotonic() > wanted.arrived + QUESTIONS * self.parts.config.bootstrap_seconds:
            raise ComputeHere("not found", f"{named.place.address} did not answer in time")
        return False

    def _ticket(self, named: Appointment, request: Any = None) -> Ticket | None:
        found = self.rendezvous.find(named.place)
        if found is None:
            return None
        return Ticket(
            engine_id=found.engine_id,
            incarnation=found.incarnation,
            hold_id=derived_hold(found.incarnation, named.name),
            digest=request_digest(request) if request is not None else "-",
            tokens=self.parts.cut.loaded(request.num_prompt_tokens) if request is not None else 1,
            host=found.host,
            port=found.port,
            request_id=named.name,
        )

    def _prefilled(self, wanted: _Wanted) -> bool:
        """Whether the producer has computed a prompt that it got when we did."""
        if wanted.ready:
            return True
        assert wanted.ticket is not None and wanted.appointment is not None
        seconds = self.parts.config.load_seconds
        there = self.renewer.arrived(wanted.ticket.hold_id)
        late = time.monotonic() > wanted.arrived + seconds
        wanted.ready = bool(there)
        if there is False or (late and not there):
            self.rendezvous.forget(wanted.appointment.place)
            why = "its prefill was aborted or not held there, or that engine is gone"
            if late:
                why = f"its prefill did not end within load_seconds ({seconds:g})"
            raise ComputeHere("not held", why)
        return wanted.ready

    def _adapted(self, request: Any, wanted: _Wanted) -> bool:
        """Whether a ticket is of the adapter that this engine has."""
        if wanted.lora is None:
            return True
        assert wanted.ticket is not None
        adapter = wanted.lora.digest
        if adapter is None:
            return False
        if not adapter:
            raise ComputeHere("lora", wanted.lora.unknown)
        if not wanted.digest:
            wanted.digest = adapted(request_digest(request), adapter)
            # if the request named a producer instead, the producer's ranks compare digests
            if wanted.appointment is None and wanted.ticket.digest != wanted.digest:
                why = (
                    "its ticket is for another prompt, or its LoRA adapter "
                    f"{wanted.lora.adapter.name!r:.100} has other files or settings here"
                )
                raise ComputeHere("lora", why)
        return True

    def _kept(self, wanted: _Wanted, computed: int) -> bool:
        """Whether the producer still has all blocks that a load would fill."""
        if self.parts.cut.windows and not self._described:
            return False  # under a MultiConnector, workers describe themselves in the first step
        assert wanted.ticket is not None
        if self._windows is None or computed >= wanted.ticket.tokens:
            return True
        now = time.monotonic()
        if wanted.asked is None:
            wanted.asked = now
        try:
            theirs = self.rendezvous.shape(wanted.ticket, wanted.arrived)
        except KvferryError as error:
            raise ComputeHere("not found", str(error)) from None
        if theirs is not None:
            model, shape = self._windows
            if why := unloadable(model, theirs, shape, wanted.ticket.tokens, computed):
                raise ComputeHere("shape", why, logging.INFO)
            return True
        if now > wanted.asked + QUESTIONS * self.parts.config.bootstrap_seconds:
            raise ComputeHere("not found", f"{wanted.ticket.directory} did not answer in time")
        return False

    # The rest of a request's life

    def allocated(self, request: Any, block_ids: Iterable[Iterable[int]], external: int) -> None:
        wanted = self.wanted.get(request.request_id)
        if wanted is None or wanted.over:
            return
        if external == 0:
            if not wanted.loading:  # all of it was here already, or a sibling connector had it
                self._through(wanted)
            wanted.over = True
            return
        if wanted.loading or wanted.ticket is None:
            return
        wanted.loading = True
        tables, skip = self.parts.cut.tables(block_ids), wanted.ticket.tokens - external
        if external != wanted.matched:
            log.error(
                "request %s: not loaded, because vLLM makes room for %d tokens from elsewhere, and "
                "its ticket has %d; it is computed here, or fails, as kv_load_failure_policy says",
                request.request_id,
                external,
                wanted.matched,
            )
            # Only the positions that vLLM expects may be filled. vLLM waits for a load, so this
            # orders one without blocks, which fails and tells its source.
            tables, skip = tuple(() for _ in tables), 0
        self.parts.stats.observe("queue_seconds", time.monotonic() - wanted.arrived)
        self.parts.spans.begin(
            "load",
            request,
            **{"kvferry.producer": wanted.ticket.engine_id, "kvferry.tokens": external},
        )
        ticket = replace(wanted.ticket, digest=wanted.digest or wanted.ticket.digest)
        self.parts.orders.loads.append(
            Load(
                request_id=request.request_id,
                ticket=ticket,
                tables=tables,
                skip=skip,
                seconds=self.parts.config.load_seconds,
                keep_open=wanted.shared,
            )
        )

    def begins(self, request_id: str) -> None:
        """A request got blocks for a load, from another engine or from our pool."""
        self._beginning.add(request_id)

    def loads(self, request_id: str) -> bool:
        """Whether this request's prompt is being loaded from another engine."""
        wanted = self.wanted.get(request_id)
        return wanted is not None and wanted.loading and not wanted.over

    def received(self, request_ids: Iterable[str], failed: Collection[str]) -> None:
        """All workers have ended the loads of these requests, good or failed."""
        for request_id in request_ids:
            self.parts.spans.end("load", request_id, "failed" if request_id in failed else "")
            wanted = self.wanted.get(request_id)
            if wanted is None or not wanted.loading or wanted.ticket is None:
                continue  # aborted meanwhile, or a sibling connector's
            wanted.over, wanted.failed = True, request_id in failed
            if not wanted.failed:
                self.parts.stats.observe("total_seconds", time.monotonic() - wanted.arrived)
            elif wanted.appointment is not None:
                self.rendezvous.forget(wanted.appointment.place)
            if wanted.shared:
                self._through(wanted)
            else:
                self.renewer.drop(wanted.ticket.hold_id)

    def finished(self, request_id: str) -> None:
        """A request is over, however it ended."""
        self._beginning.discard(request_id)
        wanted = self.wanted.pop(request_id, None)
        if wanted is not None and not wanted.over:
            if wanted.loading:
                self.parts.orders.cancels.append(request_id)
            if wanted.loading and not wanted.shared and wanted.ticket is not None:
                self.renewer.drop(wanted.ticket.hold_id)  # the load says the last word
            else:
                self._through(wanted)

    def reset(self) -> None:
        """Void all tickets: queued requests are computed here, loads under way are given up."""
        for request_id, wanted in self.wanted.items():
            if not wanted.over:
                if wanted.loading:
                    self.parts.orders.cancels.append(request_id)
                else:
                    self.parts.stats.count("requests_computed_here", "reset")
                    self._through(wanted)

    def _through(self, wanted: _Wanted) -> None:
        """Give up a request's ticket, and never match the request again."""
        wanted.over = True
        if wanted.ticket is None:
            if wanted.appointment is not None:
                self._unfound.append(wanted.appointment)
        elif wanted.shared:
            leaves_at = time.monotonic() + SIBLING_SECONDS
            self._leaving[wanted.ticket.hold_id] = wanted.ticket, leaves_at
        else:
            self._give_back(wanted.ticket)

    def _give_back(self, ticket: Ticket) -> None:
        self.parts.orders.releases.append(ticket)
        self.renewer.drop(ticket.hold_id)

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has work left even if no request comes."""
        return bool(self._seeking or self._unfound or self._leaving)

    @property
    def busy(self) -> bool:
        """Whether this engine has requests that asked for a remote prefill, loaded or not."""
        return bool(self.wanted)

    @property
    def queueing(self) -> bool:
        """Whether requests wait for their prefill elsewhere, or for blocks to load it into."""
        return any(not one.over and not one.loading for one in self.wanted.values())

    def give_way(self, scheduled: Iterable[str], *, still: bool) -> None:
        """Called once a step, with its requests. `still`: there are none, nothing comes from the
        pool, and this engine holds prompts.

        If nothing loads either, the queued requests wait until other engines fetch what this one
        holds, and those engines may do the same. An engine that an operator has paused only seems
        to stand still: vLLM asks for no match. It asks for none either while a loaded request waits
        for a block.
        """
        if self._beginning:
            self._beginning.difference_update(scheduled)
        still, self._asked = still and (self._asked or bool(self._beginning)), False
        live = [(name, one) for name, one in self.wanted.items() if not one.over] if still else []
        queued = [name for name, one in live if one.ready and one.ticket and not one.loading]
        now = time.monotonic()
        if not queued or any(one.loading for _, one in live):
            self._still_since = None
        elif self._still_since is None:
            self._still_since = now
        elif now > self._still_since + STANDSTILL_SECONDS:
            self._still_since = now
            why = "no block came free here while its prefill engine may wait for blocks of ours"
            self._count_here(queued[0], ComputeHere("gave way", why, logging.INFO))
            self._through(self.wanted[queued[0]])

    def settle(self) -> None:
        """Called once a step: find producers, and give back tickets that no request needs."""
        now = time.monotonic()
        for request_id, request in list(islice(self._seeking.items(), MOST_FOUND)):
            del self._seeking[request_id]
            wanted = self.wanted.get(request_id)
            if wanted is None or wanted.over or self._ask(request, wanted, self._found):
                continue
            self._seeking[request_id] = request  # behind the others
        for hold_id in [name for name, (_, at) in self._leaving.items() if at <= now]:
            ticket, _ = self._leaving.pop(hold_id)
            live = [one.ticket for one in self.wanted.values() if one.ticket and not one.over]
            if all(one.hold_id != hold_id for one in live):
                self._give_back(ticket)
        for named in list(self._unfound):
            try:
                found = self._ticket(named)
            except Exception as error:  # whatever a client or a bootstrap says, the engine goes on
                lost = [one for one in self._unfound if one.place == named.place]
                self._unfound = [one for one in self._unfound if one.place != named.place]
                expected = isinstance(error, KvferryError)
                log.log(
                    logging.INFO if expected else logging.ERROR,
                    "the holds of %d requests, %r and others, at %s are not given back, and will "
                    "expire: %s",
                    len(lost),
                    named.name,
                    named.place.address,
                    error,
                    exc_info=None if expected else error,
                )
                return  # the next step goes on
            if found is not None:
                self._unfound.remove(named)
                self.parts.orders.releases.append(found)


@dataclass(slots=True)
class _Wanted:
    """A request that wants a cache from elsewhere."""

    arrived: float
    shared: bool  # other requests may come with the same ticket
    ticket: Ticket | None = None  # None: its producer is not found yet
    appointment: Appointment | None = None
    lora: Asked | None = None  # its adapter
    digest: str = ""  # of its prompt and its adapter, once that is known
    asked: float | None = None  # when its producer's shape was asked for first
    ready: bool = True  # its prompt is computed at the producer
    matched: int = 0  # tokens that we said we would load, when vLLM last asked
    loading: bool = False  # a load was ordered, and will send the last word
    over: bool = False  # loaded, failed or not needed: never matched again
    failed: bool = False  # its load, and vLLM has not asked since


class ComputeHere(Exception):
    """A request for a remote prefill is not loaded. It is logged once, and counted by reason."""

    def __init__(self, reason: ComputedHere, why: str, level: int = logging.WARNING) -> None:
        super().__init__(why)
        self.reason, self.why, self.level = reason, why, level


def require_fit(ticket: Ticket, request: Any, cut: PrefillCut) -> None:
    """Refuse a ticket that cannot be for this request."""
    lora = getattr(request, "lora_request", None) is not None  # compared when its files are known
    if not lora and ticket.digest != request_digest(request):
        raise ComputeHere("another prompt", "its ticket is for another prompt")
    if ticket.tokens > request.num_tokens:
        why = f"its ticket is for {ticket.tokens} tokens, and it has {request.num_tokens}"
        raise ComputeHere("bad ticket", why)
    if cut.reaches_too_far(ticket.tokens, request.num_tokens):
        short = request.num_tokens <= cut.held_back  # for any prefill engine
        why = f"its ticket leaves less than {cut.held_back} tokens to compute here"
        raise ComputeHere("unfit" if short else "bad ticket", why)
