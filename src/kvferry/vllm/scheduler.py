"""The scheduler's side: tickets out, tickets in, and what workers are to do about them.

A producer's request finishes: its blocks stay, a hold is ordered, and the ticket goes into the
response. A consumer's request arrives with a ticket: its tokens count as external, an asynchronous
load is ordered when blocks are there, and whatever becomes of the request, every source hears one
last word (from the load, or `not needed`). A load that failed is not tried again: the request is
matched no more, and vLLM's `kv_load_failure_policy` decides.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.errors import DescriptionError, ProtocolError
from kvferry.p2p.load import Load
from kvferry.p2p.producer import Directory
from kvferry.p2p.renewer import Renewer
from kvferry.p2p.ticket import Ticket, prompt_digest
from kvferry.vllm.config import FerryConfig
from kvferry.vllm.metadata import FerryHandshake, FerryMetadata, HoldOrder
from kvferry.vllm.prefill import HandedOver
from kvferry.wire.messages import EngineInfo, RankInfo
from kvferry.wire.sockets import Sockets

log = logging.getLogger("kvferry")

RENEWALS = 4  # of a lease; three may be lost before it runs out
SIBLING_SECONDS = 1.0  # samples of one request arrive together; the last within this
CHILD = re.compile(r"^\d+_")  # vLLM's request ids of the samples of one `n > 1` request


@dataclass(slots=True)
class _Wanted:
    """A consumer's request with a ticket."""

    ticket: Ticket
    loading: bool = False  # a load was ordered: its last word is the load's
    over: bool = False  # loaded, failed or not needed: never matched again
    shared: bool = False  # other requests may come with the same ticket


@dataclass(slots=True)
class _Shared:
    """A ticket that several requests came with (`n > 1`): released when the last is through."""

    ticket: Ticket
    requests: set[str] = field(default_factory=set)
    release_at: float | None = None  # a sibling may still be on its way until then


@dataclass(slots=True)
class FerryScheduler:
    config: FerryConfig
    engine_id: str
    incarnation: str
    produces: bool = True  # roles of the engine
    consumes: bool = True
    handed_over: HandedOver = field(default_factory=HandedOver)
    _orders: FerryMetadata = field(default_factory=FerryMetadata)
    _wanted: dict[str, _Wanted] = field(default_factory=dict)
    _shared: dict[str, _Shared] = field(default_factory=dict)  # by hold
    _digests: dict[str, str] = field(default_factory=dict)  # of prompts that are to be handed over
    _sockets: Sockets | None = None
    _directory: Directory | None = None
    _renewer: Renewer | None = None
    _shape: tuple[int, int] = (1, 1)

    def set_handshakes(self, handshakes: Mapping[tuple[int, int], Any]) -> None:
        """All workers' descriptions, by (pp_rank, tp_rank): start the directory."""
        engines, ranks = [], []
        for (pp_rank, tp_rank), handshake in sorted(handshakes.items()):
            if not isinstance(handshake, FerryHandshake):
                raise DescriptionError(
                    f"worker (pp {pp_rank}, tp {tp_rank}) sent a {type(handshake).__name__}; all "
                    "workers must run kvferry's connector"
                )
            engines.append(msgspec.msgpack.decode(handshake.engine, type=EngineInfo))
            ranks.append(msgspec.msgpack.decode(handshake.rank, type=RankInfo))
        first = engines[0]
        for engine, rank in zip(engines, ranks, strict=True):
            if engine != first:
                raise DescriptionError(
                    f"worker (pp {rank.pp_rank}, tp {rank.tp_rank}) describes the engine as "
                    f"{engine}, worker 0 as {first}"
                )
        self._shape = (int(first.shape["tp"]), int(first.shape["pp"]))
        self._sockets = Sockets(self.config.secret)
        self._directory = Directory(
            self._sockets, first, host=self.config.host, port=self.config.port
        )
        self._directory.start()
        self._directory.set_ranks(ranks)
        self._renewer = Renewer(
            self._sockets, first, interval_seconds=self.config.lease_seconds / RENEWALS
        )
        log.info(
            "kvferry: engine %s offers its caches at port %d", self.engine_id, self._directory.port
        )

    # Consumer

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and self.produces:
            self._shorten(request)
        if not params.get("do_remote_prefill") or not self.consumes:
            return
        try:
            ticket = Ticket.from_params(params)
        except ProtocolError as error:
            log.warning("request %s: computed here, because %s", request.request_id, error)
            return
        refusal = _unfit(ticket, request, self.handed_over)
        if refusal:  # vLLM also sends such a request to say that it rejected the real one
            log.warning("request %s: computed here, because %s", request.request_id, refusal)
            self._orders.releases.append(ticket)
            return
        if self._renewer is not None:  # from now on, also while the request queues
            self._renewer.watch(ticket)
        shared = bool(CHILD.match(request.request_id))
        self._wanted[request.request_id] = _Wanted(ticket, shared=shared)
        if shared:
            family = self._shared.setdefault(ticket.hold_id, _Shared(ticket))
            family.requests.add(request.request_id)
            family.release_at = None

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.over or wanted.loading:
            return 0, False
        count = wanted.ticket.tokens - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, block_ids: Iterable[Iterable[int]], external: int) -> None:
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.over:
            return
        if external == 0:
            if not wanted.loading:  # all of it was here already
                self._through(request.request_id, wanted)
            wanted.over = True
            return
        if wanted.loading:
            return
        wanted.loading = True
        self._orders.loads.append(
            Load(
                request_id=request.request_id,
                ticket=wanted.ticket,
                tables=self.handed_over.tables(block_ids),
                skip=wanted.ticket.tokens - external,
                seconds=self.config.load_seconds,
                keep_open=wanted.shared,
            )
        )

    def received(self, request_ids: Iterable[str]) -> None:
        """Loads that all workers have ended, well or not."""
        for request_id in request_ids:
            wanted = self._wanted.get(request_id)
            if wanted is not None:
                wanted.over = True
                if wanted.shared:
                    self._through(request_id, wanted)
                else:
                    self._drop(wanted.ticket)

    def _through(self, request_id: str, wanted: _Wanted) -> None:
        """A request needs its ticket no more."""
        if not wanted.shared:
            self._orders.releases.append(wanted.ticket)
            self._drop(wanted.ticket)
            return
        family = self._shared.get(wanted.ticket.hold_id)
        if family is not None:
            family.requests.discard(request_id)
            if not family.requests:
                family.release_at = time.monotonic() + SIBLING_SECONDS

    def _drop(self, ticket: Ticket) -> None:
        if self._renewer is not None:
            self._renewer.drop(ticket.hold_id)

    # Producer

    def _shorten(self, request: Any) -> None:
        """A prompt to hand over: its digest is of all of it, what is computed may be less."""
        if request.prompt_token_ids and request.request_id not in self._digests:
            self._digests[request.request_id] = request_digest(request)
            self.handed_over.stop_short(request)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: whether its blocks stay, and what goes into its response."""
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is not None and not wanted.over:
            if wanted.loading:
                self._orders.cancels.append(request.request_id)
                self._drop(wanted.ticket)
            else:
                self._through(request.request_id, wanted)
        digest = self._digests.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or self._directory is None or not self.produces:
            return False, None
        if digest is None or not _completed(request):
            return False, None
        tokens = len(request.prompt_token_ids)
        ticket = Ticket(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            hold_id=secrets.token_hex(16),
            digest=digest,
            tokens=tokens,
            host=self.config.host or "127.0.0.1",
            port=self._directory.port,
            request_id=request.request_id,
            tp_size=self._shape[0],
            pp_size=self._shape[1],
        )
        self._orders.holds.append(
            HoldOrder(
                ticket.hold_id,
                request.request_id,
                ticket.digest,
                tokens,
                self.handed_over.tables(block_ids),
            )
        )
        return True, ticket.to_params()

    def take_orders(self) -> FerryMetadata:
        now = time.monotonic()
        for hold_id, family in list(self._shared.items()):
            if family.release_at is not None and family.release_at <= now:
                self._orders.releases.append(family.ticket)
                self._drop(family.ticket)
                del self._shared[hold_id]
        orders, self._orders = self._orders, FerryMetadata()
        return orders

    def close(self) -> None:
        if self._renewer is not None:
            self._renewer.close()
        if self._directory is not None:
            self._directory.close()
        if self._sockets is not None:
            self._sockets.close()


def _unfit(ticket: Ticket, request: Any, handed_over: HandedOver) -> str:
    """Why a ticket cannot be for this request; empty where it can."""
    if ticket.digest != request_digest(request):
        return "its ticket is for another prompt"
    if ticket.tokens > request.num_tokens:
        return f"its ticket is for {ticket.tokens} tokens, and it has {request.num_tokens}"
    if handed_over.reaches_too_far(ticket.tokens, request.num_tokens):
        return f"its ticket leaves less than {handed_over.held_back} tokens to compute here"
    return ""


def _completed(request: Any) -> bool:
    """Whether the prompt was computed whole: an aborted request has nothing to hand over."""
    from vllm.v1.request import RequestStatus

    return request.status in (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
    )


def request_digest(request: Any) -> str:
    """What the prompt's cache depends on: tokens, LoRA, images, salt."""
    extra = []
    if getattr(request, "lora_request", None) is not None:
        extra.append(f"lora {request.lora_request.lora_name}")
    for feature in getattr(request, "mm_features", None) or ():
        extra.append(f"mm {feature.identifier} {feature.mm_position.offset}")
    if getattr(request, "cache_salt", None):
        extra.append(f"salt {request.cache_salt}")
    return prompt_digest(request.prompt_token_ids or (), extra)
