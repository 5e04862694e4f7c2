# SPDX-License-Identifier: Apache-2.0
"""A decode engine's requests whose prompt was, or is being, computed elsewhere.

A request arrives with a ticket, or with the name of a producer that got it at the same time. Its
tokens count as external, and an asynchronous load is ordered when vLLM has allocated blocks.
However the request ends, every source hears one last word: from the load, or `not needed`.

A ticket that cannot be for its request is given back, and the prompt is computed here; the log says
so, and a metric counts it once, by reason. So is the ticket of a producer that has dropped what a
load would fill (windows, in smaller blocks than here): an engine with windows asks for the
producer's shape before it promises anything. A load that failed is not tried again: the request is
matched no more, and vLLM's `kv_load_failure_policy` decides. The same holds after a preemption.

Block pressure (docs/protocol.md has the argument). A request gets blocks for a load only when its
prompt is computed at its producer: until then vLLM is told to ask again, and the request owns
nothing. An engine that stands still, though requests with tickets queue, while it holds prompts
for others gives way: one ticket goes back to its producer, and its prompt is computed here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
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

SIBLING_SECONDS = 1.0  # samples of one request arrive together; the last within this
QUESTIONS = 3  # that may go before a request's own, each as long as one may take
# An engine that computes nothing and loads nothing, with holds of its own and tickets in its queue,
# gives one ticket back after this long. A fetch, or a router that passes a ticket on, takes
# milliseconds.
STANDSTILL_SECONDS = 0.5
ADAPTER_SECONDS = 2.0  # a request waits for the first reading of its adapter; then it is computed


@dataclass(slots=True)
class Consuming:
    parts: HandoverParts
    rendezvous: Rendezvous
    renewer: Renewer
    _wanted: dict[str, _Wanted] = field(default_factory=dict)
    _siblings: SharedTickets = field(default_factory=lambda: SharedTickets())
    _unfound: list[Appointment] = field(default_factory=list)  # of requests that are over
    _described: bool = False  # whether this engine's workers have said what they have
    _windows: tuple[CacheModel, EngineShape] | None = None  # of this engine, if it has windows
    _still_since: float | None = None  # when this engine came to a standstill

    def described_as(self, model: CacheModel, shape: EngineShape) -> None:
        """This engine. With windows, not every prompt of every shape can be loaded."""
        self._described = True
        if any(group.residency.kind in ("window", "chunk") for group in model.groups):
            self._windows = model, shape

    def arrived(self, request: Any) -> None:
        """A request asks for a remote prefill."""
        try:
            self._arrived(request)
        except Exception:  # whatever a client's parameters are, the engine goes on
            log.exception("request %s", request.request_id)
            self._here(request, "error", "of an error of ours")
            if (wanted := self._wanted.get(request.request_id)) is not None:
                self._through(request.request_id, wanted)

    def _arrived(self, request: Any) -> None:
        request_id, marked = request.request_id, request.kv_transfer_params.get(MARK)
        if isinstance(marked, dict) and "not_held" in marked:
            why = f"it is not held: {str(marked['not_held'])[:300]!r}"
            self._here(request, "not held", why, logging.INFO)
            return
        wanted = _Wanted(time.monotonic(), bool(CHILD.match(request_id)))
        wanted.lora = self.parts.adapters.ask(request, ADAPTER_SECONDS)
        unfit = self.parts.prompts.unfit(request)
        if isinstance(marked, dict):
            self._came_with_ticket(request, wanted, unfit)
            return
        try:
            wanted.appointment = appointment(
                request.kv_transfer_params, request_id, self.parts.style
            )
        except KvferryError as error:
            self._here(request, "no ticket", str(error))
            return
        self._wanted[request_id] = wanted
        if unfit:
            self._here(request, "unfit", unfit)
            self._through(request_id, wanted)  # its producer may hold it
        else:
            self._find(request, wanted)

    def _came_with_ticket(self, request: Any, wanted: _Wanted, unfit: str) -> None:
        try:
            ticket = Ticket.from_params(request.kv_transfer_params)
        except KvferryError as error:
            self._here(request, "bad ticket", str(error))
            return
        if not self.parts.config.admits(ticket.host):
            why = (
                f"its ticket names the host {ticket.host}, which is not among the configured peers"
            )
            self._here(request, "not allowed", why)
            return
        refusal: tuple[ComputedHere, str] | None
        refusal = ("unfit", unfit) if unfit else _unfit(ticket, request, self.parts.cut)
        if refusal is not None:
            self._here(request, *refusal)
            self.parts.orders.releases.append(ticket)
            return
        self._wanted[request.request_id] = wanted
        self._ticketed(request.request_id, wanted, ticket)

    def _here(
        self, request: Any, reason: ComputedHere, why: str, level: int = logging.WARNING
    ) -> None:
        """Log and count a request that is computed here. Callers do it once for a request."""
        if getattr(request, "abort_immediately", False):
            return  # vLLM tells that it rejected a request: its prompt is no prompt
        self._computed_here(request.request_id, reason, why, level)

    def _computed_here(self, request_id: str, reason: ComputedHere, why: str, level: int) -> None:
        self.parts.stats.count("requests_computed_here", reason)
        log.log(level, "request %s: computed here, because %s", request_id, why)

    def _find(self, request: Any, wanted: _Wanted) -> None:
        """Look for the producer that a request named. Once it is found, there is a ticket."""
        assert wanted.appointment is not None
        try:
            ticket = self._ticket(wanted.appointment, request)
        except KvferryError as error:
            allowed = not isinstance(error, AuthenticationError)
            self._here(request, "not found" if allowed else "not allowed", str(error))
            wanted.over = True
            return
        except Exception:  # whatever a client or a bootstrap says, the engine goes on
            log.exception("request %s", request.request_id)
            self._here(request, "error", "of an error of ours")
            wanted.over = True
            return
        if ticket is not None:
            wanted.ready = False  # its prefill may not even have begun
            self._ticketed(request.request_id, wanted, ticket)
        elif time.monotonic() > wanted.arrived + QUESTIONS * self.parts.config.bootstrap_seconds:
            why = f"{wanted.appointment.place.address} did not answer in time"
            self._here(request, "not found", why)
            self._through(request.request_id, wanted)

    def _ticket(self, named: Appointment, request: Any = None) -> Ticket | None:
        found = self.rendezvous.find(named.place)
        if found is None:
            return None
        return Ticket(
            engine_id=found.engine_id,
            incarnation=found.incarnation,
            hold_id=derived_hold(found.incarnation, named.name),
            digest=request_digest(request) if request is not None else "-",
            tokens=self.parts.cut.tokens(request) if request is not None else 1,
            host=found.host,
            port=found.port,
            request_id=named.name,
        )

    def _ticketed(self, request_id: str, wanted: _Wanted, ticket: Ticket) -> None:
        wanted.ticket = ticket
        self.renewer.watch(ticket, early=not wanted.ready)  # also while the request queues
        if wanted.shared:
            self._siblings.join(request_id, ticket)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.over or wanted.loading:
            return 0, False
        if wanted.ticket is None:
            self._find(request, wanted)
            if wanted.ticket is None:
                return (0, False) if wanted.over else (None, False)
        if not wanted.ready and not self._arrived_there(request, wanted):
            return (0, False) if wanted.over else (None, False)
        if wanted.lora is not None:
            same = self._adapted(request, wanted, wanted.lora)
            if not same:
                return (None if same is None else 0), False
        if self.parts.cut.windows and not self._described:
            return None, False  # under a MultiConnector, workers do so with their first step
        if self._windows is not None and computed < wanted.ticket.tokens:
            loadable = self._loadable(request, wanted, computed, *self._windows)
            if not loadable:
                return (None if loadable is None else 0), False
        wanted.matched = max(0, wanted.ticket.tokens - computed)
        return wanted.matched, wanted.matched > 0

    def _loadable(
        self, request: Any, wanted: _Wanted, computed: int, model: CacheModel, shape: EngineShape
    ) -> bool | None:
        """Whether the producer still has all blocks that a load would fill; None: not known yet."""
        assert wanted.ticket is not None
        reason: ComputedHere = "not found"
        now = time.monotonic()
        if wanted.asked is None:
            wanted.asked = now
        try:
            theirs = self.rendezvous.shape(wanted.ticket, wanted.arrived)
        except KvferryError as error:
            theirs, why = None, str(error)
        else:
            if theirs is not None:
                reason = "shape"
                why = unloadable(model, theirs, shape, wanted.ticket.tokens, computed)
                if not why:
                    return True
            elif now <= wanted.asked + QUESTIONS * self.parts.config.bootstrap_seconds:
                return None
            else:
                why = f"{wanted.ticket.directory} did not answer in time"
        self._here(request, reason, why, logging.INFO if reason == "shape" else logging.WARNING)
        self._through(request.request_id, wanted)
        return False

    def _arrived_there(self, request: Any, wanted: _Wanted) -> bool:
        """Whether the producer has computed a prompt that it got when we did."""
        assert wanted.ticket is not None and wanted.appointment is not None
        hold_id, seconds = wanted.ticket.hold_id, self.parts.config.load_seconds
        there = self.renewer.arrived(hold_id)
        late = time.monotonic() > wanted.arrived + seconds
        if there is None and not late:
            return False
        wanted.ready = bool(there)
        if not there:
            why = "its prefill was aborted or not held there, or that engine is gone"
            if late:
                why = f"its prefill did not end within load_seconds ({seconds:g})"
            self._here(request, "not held", why)
            self.rendezvous.forget(wanted.appointment.place)
            self._through(request.request_id, wanted)
        return wanted.ready

    def _adapted(self, request: Any, wanted: _Wanted, lora: Asked) -> bool | None:
        """Whether a ticket is of the adapter that this engine has; None: not known yet."""
        assert wanted.ticket is not None
        adapter, why = lora.digest, ""
        if adapter is None:
            return None
        if not adapter:
            why = lora.unknown
        elif not wanted.digest:
            wanted.digest = adapted(request_digest(request), adapter)
            # without a ticket that came with it, the producer's ranks compare
            if wanted.appointment is None and wanted.ticket.digest != wanted.digest:
                why = (
                    "its ticket is for another prompt, or its LoRA adapter "
                    f"{lora.adapter.name!r:.100} has other files or settings here"
                )
        if why:
            self._here(request, "lora", why)
            self._through(request.request_id, wanted)
        return not why

    def allocated(self, request: Any, block_ids: Iterable[Iterable[int]], external: int) -> None:
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.over:
            return
        if external == 0:
            if not wanted.loading:  # all of it was here already, or a sibling connector had it
                self._through(request.request_id, wanted)
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
            # Other positions than those that vLLM counts on must not be filled. vLLM waits for
            # a load, so one is ordered that fails and tells its source: it has no block to fill.
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

    def received(self, request_ids: Iterable[str], failed: Collection[str]) -> None:
        """Loads that all workers have ended, well or not."""
        for request_id in request_ids:
            self.parts.spans.end("load", request_id, "failed" if request_id in failed else "")
            wanted = self._wanted.get(request_id)
            if wanted is None or not wanted.loading or wanted.ticket is None:
                continue  # aborted meanwhile, or a sibling connector's
            wanted.over = True
            if request_id not in failed:
                self.parts.stats.observe("total_seconds", time.monotonic() - wanted.arrived)
            elif wanted.appointment is not None:
                self.rendezvous.forget(wanted.appointment.place)
            if wanted.shared:
                self._through(request_id, wanted)
            else:
                self.renewer.drop(wanted.ticket.hold_id)

    def finished(self, request_id: str) -> None:
        """A request is over, however it ended."""
        wanted = self._wanted.pop(request_id, None)
        if wanted is not None and not wanted.over:
            if wanted.loading:
                self.parts.orders.cancels.append(request_id)
            if wanted.loading and not wanted.shared and wanted.ticket is not None:
                self.renewer.drop(wanted.ticket.hold_id)  # the load says the last word
            else:
                self._through(request_id, wanted)

    def reset(self) -> None:
        """Tickets from before are void: what queues is computed here, what loads is given up."""
        for request_id, wanted in self._wanted.items():
            if not wanted.over:
                if wanted.loading:
                    self.parts.orders.cancels.append(request_id)
                else:
                    self.parts.stats.count("requests_computed_here", "reset")
                    self._through(request_id, wanted)

    def _through(self, request_id: str, wanted: _Wanted) -> None:
        """A request needs its ticket no more, and is not matched again."""
        wanted.over = True
        if wanted.ticket is None:
            if wanted.appointment is not None:
                self._unfound.append(wanted.appointment)
        elif wanted.shared:
            self._siblings.leave(request_id, wanted.ticket)
        else:
            self._give_back(wanted.ticket)

    def _give_back(self, ticket: Ticket) -> None:
        self.parts.orders.releases.append(ticket)
        self.renewer.drop(ticket.hold_id)

    @property
    def unsettled(self) -> bool:
        """Whether `settle` will have something to do though no request comes."""
        return bool(self._unfound) or self._siblings.leaving

    @property
    def busy(self) -> bool:
        """Whether requests that came for a remote prefill live here, loaded or not."""
        return bool(self._wanted)

    @property
    def queueing(self) -> bool:
        """Whether requests wait for their prefill elsewhere, or for blocks to load it into."""
        return any(not one.over and not one.loading for one in self._wanted.values())

    def give_way(self, *, still: bool) -> None:
        """Once a step. `still`: it computes nothing, and this engine holds prompts for others.

        If nothing loads either, what queues here waits for blocks that others must fetch first, and
        those may wait for blocks that they hold for us.
        """
        live = [(name, one) for name, one in self._wanted.items() if not one.over] if still else []
        queued = [name for name, one in live if one.ready and one.ticket and not one.loading]
        now = time.monotonic()
        if not queued or any(one.loading for _, one in live):
            self._still_since = None
        elif self._still_since is None:
            self._still_since = now
        elif now > self._still_since + STANDSTILL_SECONDS:
            self._still_since = now
            why = "no block came free here while its prefill engine may wait for blocks of ours"
            self._computed_here(queued[0], "gave way", why, logging.INFO)
            self._through(queued[0], self._wanted[queued[0]])

    def settle(self) -> None:
        """Once a step: give back tickets that no request needs."""
        for unneeded in self._siblings.due():
            self._give_back(unneeded)
        for named in list(self._unfound):
            try:
                ticket = self._ticket(named)
            except Exception as error:  # whatever a client or a bootstrap says, the engine goes on
                self._unfound.remove(named)
                ours = None if isinstance(error, KvferryError) else error
                log.log(
                    logging.INFO if ours is None else logging.ERROR,
                    "the hold of %r at %s is not given back, and will expire: %s",
                    named.name,
                    named.place.address,
                    error,
                    exc_info=ours,
                )
                continue
            if ticket is not None:
                self._unfound.remove(named)
                self.parts.orders.releases.append(ticket)


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
    loading: bool = False  # a load was ordered: its last word is the load's
    over: bool = False  # loaded, failed or not needed: never matched again


class SharedTickets:
    """Tickets that several requests came with (`n > 1`): given back when the last is through."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}  # by hold

    def join(self, request_id: str, ticket: Ticket) -> None:
        family = self._families.setdefault(ticket.hold_id, _Family(ticket))
        family.requests.add(request_id)
        family.release_at = None

    def leave(self, request_id: str, ticket: Ticket) -> None:
        family = self._families.get(ticket.hold_id)
        if family is not None:
            family.requests.discard(request_id)
            if not family.requests:
                family.release_at = time.monotonic() + SIBLING_SECONDS

    @property
    def leaving(self) -> bool:
        """Whether `due` will have something though no request comes."""
        return any(family.release_at is not None for family in self._families.values())

    def due(self) -> list[Ticket]:
        """Tickets that no request needs any more, each once."""
        now = time.monotonic()
        over = [
            hold_id
            for hold_id, family in self._families.items()
            if family.release_at is not None and family.release_at <= now
        ]
        return [self._families.pop(hold_id).ticket for hold_id in over]


@dataclass(slots=True)
class _Family:
    ticket: Ticket
    requests: set[str] = field(default_factory=set)
    release_at: float | None = None  # a sibling may still be on its way until then


def _unfit(ticket: Ticket, request: Any, cut: PrefillCut) -> tuple[ComputedHere, str] | None:
    """Why a ticket cannot be for this request; None where it can."""
    lora = getattr(request, "lora_request", None) is not None  # compared when its files are known
    if not lora and ticket.digest != request_digest(request):
        return "another prompt", "its ticket is for another prompt"
    if ticket.tokens > request.num_tokens:
        words = f"its ticket is for {ticket.tokens} tokens, and it has {request.num_tokens}"
        return "bad ticket", words
    if cut.reaches_too_far(ticket.tokens, request.num_tokens):
        words = f"its ticket leaves less than {cut.held_back} tokens to compute here"
        short = request.num_tokens <= cut.held_back  # for any prefill engine
        return "unfit" if short else "bad ticket", words
    return None
