"""A prefill engine's requests: which are kept for a consumer, under what name, and for how long.

A request that ends with its prompt computed (at its length, at a stop token, at a repetition: its
cache is valid in each case) is held, and its ticket goes into the response. It is not held, and the
response says so, when that would keep more than `max_held_blocks` (by default half of the cache:
prefills that are never fetched leave the rest to others), when its transfer id was used before,
when nothing tells its prompt from others (see `prompts`), or when its LoRA adapter has no digest
(see `pool.adapters`). Consumers that got the request at the same time know the hold by a name (see
`rendezvous`) and may wait for it already; so a named request that is aborted, or not held, is
withdrawn at all ranks, which refuse those claims at once.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import ProtocolError
from kvferry.p2p.ticket import FORMAT, MARK, Ticket, prompt_digest
from kvferry.pool.adapters import Adapters, Asked
from kvferry.vllm.config import FerryConfig, Style
from kvferry.vllm.metadata import FerryMetadata, HoldOrder, worse
from kvferry.vllm.prefill import CUT, HandedOver
from kvferry.vllm.prompts import Prompts, content
from kvferry.vllm.rendezvous import CHILD, derived_hold, transfer_name
from kvferry.vllm.spans import Spans
from kvferry.vllm.stats import FerryStats

CUT_BEFORE = (
    "a connector before kvferry has cut the prompt; list kvferry first in MultiConnector's "
    "`connectors`"
)

log = logging.getLogger("kvferry")

MOST_NAMES = 65_536  # transfer ids remembered, to refuse those that come again
# Of the cache, that finished requests may keep where nothing is configured: whoever sends prefills
# that are never fetched pins no more. Nothing in a request names its client, so all share it.
HELD_SHARE = 0.5
# Held blocks are worth waiting for, rather than preempting a request, while holds come and go.
MOVING_SECONDS = 1.0


@dataclass(slots=True)
class _Named:
    """Who used a transfer's name first."""

    request_id: str
    held: bool = False


@dataclass(slots=True)
class Offering:
    config: FerryConfig
    engine_id: str
    incarnation: str
    style: Style
    flat: bool  # whether tickets may use in-tree names
    shape: tuple[int, int]  # tp, pp
    port: int  # of the directory
    handed_over: HandedOver
    orders: Callable[[], FerryMetadata]
    stats: FerryStats
    spans: Spans
    second: bool = False  # whether a sibling sees requests before us
    prompts: Prompts = field(default_factory=Prompts)
    adapters: Adapters = field(default_factory=Adapters)
    held: dict[str, int] = field(default_factory=dict)  # blocks, by request
    held_blocks: int = 0
    _names: OrderedDict[str, _Named] = field(default_factory=OrderedDict)
    _moved: float = 0.0  # when a hold last came or went
    _digests: dict[str, str] = field(default_factory=dict)  # of whole prompts, by request
    _adapters: dict[str, Asked] = field(default_factory=dict)  # by request, where it has one
    _ends: dict[str, str] = field(default_factory=dict)  # of holds that some workers have closed
    _refusals: dict[str, tuple[str, str]] = field(default_factory=dict)  # by request

    def accept(self, request: Any) -> None:
        """A prompt to hand over: its digest is of all of it, what is computed may be less."""
        if self.second and request.kv_transfer_params.get(CUT):
            self._refusals[request.request_id] = ("cut", CUT_BEFORE)
        elif why := self.prompts.unfit(request):
            self._refusals[request.request_id] = ("unfit", why)
        elif request.prompt_token_ids and request.request_id not in self._digests:
            self._digests[request.request_id] = request_digest(request)
            if (lora := self.adapters.ask(request)) is not None:
                self._adapters[request.request_id] = lora
            self.handed_over.stop_short(request)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A prefill is over: whether its blocks stay, and what goes into its response."""
        digest = self._digests.pop(request.request_id, None)
        lora = self._adapters.pop(request.request_id, None)
        refusal = self._refusals.pop(request.request_id, None)
        try:
            name = transfer_name(request.kv_transfer_params, request.request_id, self.style)
        except ProtocolError as error:
            return self._unheld("bad id", f"{error}", None)
        hold_id = secrets.token_hex(16)
        if name is not None:
            parent = CHILD.sub("", request.request_id)
            first = self._names.setdefault(name, _Named(parent))
            while len(self._names) > MOST_NAMES:
                self._names.popitem(last=False)
            if first.request_id == parent:
                if first.held:  # by another sample of the same request
                    return False, None
                hold_id = derived_hold(self.incarnation, name)
            elif self.style == "push":  # a ticket still serves, if the proxy passes it on
                name = None
            else:
                return self._unheld(
                    "reused id",
                    f"{name!r:.100} was used before, by request {first.request_id}; a proxy must "
                    "choose a new one for each request",
                    None,
                )
        if refusal and completed(request):
            return self._unheld(*refusal, hold_id if name is not None else None)
        if digest is None or not completed(request):
            if name is not None:
                self.orders().withdrawals.append(hold_id)
            return False, None
        if lora is not None:
            adapter = lora.digest
            if not adapter:
                return self._unheld("lora", lora.unknown, hold_id if name is not None else None)
            digest = adapted(digest, adapter)
        blocks = len({block for table in block_ids for block in table if block})
        if over := self._over_limit(blocks):
            return self._unheld("limit", over, hold_id if name is not None else None)
        if name is not None:
            self._names[name].held = True
        return True, self._hold(request, digest, hold_id, block_ids, blocks)

    def _over_limit(self, blocks: int) -> str:
        """Why so many more may not be held; empty where they may."""
        limit, which = self.config.max_held_blocks, "max_held_blocks"
        if limit is None:  # a lone prompt may be longer than that: it would never be handed over
            limit = int(HELD_SHARE * self.handed_over.cache_blocks) if self.held_blocks else 0
            which += f", by default a share of the cache of {HELD_SHARE:g}"
        if not limit or self.held_blocks + blocks <= limit:
            return ""
        return (
            f"{self.held_blocks} blocks are held already, {blocks} more would be over {limit} "
            f"({which})"
        )

    def _hold(
        self,
        request: Any,
        digest: str,
        hold_id: str,
        block_ids: tuple[list[int], ...],
        blocks: int,
    ) -> dict[str, Any]:
        tokens = len(request.prompt_token_ids)
        ticket = Ticket(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            hold_id=hold_id,
            digest=digest,
            tokens=tokens,
            host=self.config.host or "127.0.0.1",
            port=self.port,
            request_id=request.request_id,
            tp_size=self.shape[0],
            pp_size=self.shape[1],
        )
        self.orders().holds.append(
            HoldOrder(
                hold_id,
                request.request_id,
                ticket.digest,
                tokens,
                self.handed_over.tables(block_ids),
            )
        )
        self.held[request.request_id] = blocks
        self.held_blocks += blocks
        self._moved = time.monotonic()
        self.spans.begin("hold", request, **{"kvferry.tokens": tokens, "kvferry.blocks": blocks})
        return ticket.to_params(flat=self.flat)

    def _unheld(
        self, reason: str, message: str, hold_id: str | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say why nothing is kept; a consumer that reads it computes the prompt itself."""
        self.stats.count("unheld", reason)
        log.warning("a prefill is not held for a consumer: %s", message)
        if hold_id is not None:
            self.orders().withdrawals.append(hold_id)
        told: dict[str, Any] = {MARK: {"format": FORMAT, "not_held": message}}
        if self.flat:
            told |= {"do_remote_prefill": False, "do_remote_decode": False}
        return False, told

    def closed(self, ends: Mapping[str, str]) -> None:
        """How some workers' parts of holds ended, by request."""
        for request_id, why in ends.items():
            self._ends[request_id] = worse(why, self._ends.get(request_id))

    def sent(self, request_ids: Iterable[str]) -> None:
        """Holds that all workers have closed: their blocks are free."""
        for request_id in request_ids:
            if why := self._ends.pop(request_id, ""):
                self.stats.count("holds", why)
            if request_id in self.held:
                self.held_blocks -= self.held.pop(request_id)
                self._moved = time.monotonic()
                self.spans.end("hold", request_id)

    @property
    def moving(self) -> bool:
        """Whether held blocks are likely to come back soon."""
        return bool(self.held) and time.monotonic() - self._moved < MOVING_SECONDS


def completed(request: Any) -> bool:
    """Whether the prompt was computed whole: an aborted request has nothing to hand over."""
    from vllm.v1.request import RequestStatus

    return request.status in (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_REPETITION,
    )


def request_digest(request: Any) -> str:
    """What the prompt's cache depends on: tokens, images, salt. With LoRA it is not the whole
    truth, nor that of any prompt: the adapter's files are missing (`adapted`)."""
    extra = []
    if getattr(request, "lora_request", None) is not None:
        extra.append("lora")
    for feature in getattr(request, "mm_features", None) or ():
        extra.append(f"mm {content(feature)} {feature.mm_position.offset}")
    if getattr(request, "cache_salt", None):
        extra.append(f"salt {request.cache_salt}")
    return prompt_digest(request.prompt_token_ids or (), extra)


def adapted(digest: str, adapter: str) -> str:
    """The digest of a prompt, with that of the adapter that computes it."""
    if not adapter:
        raise ValueError("an adapter that is not shared has no digest")
    return prompt_digest((), (digest, f"lora {adapter}"))
