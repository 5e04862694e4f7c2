# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's requests: which are held for a consumer, under what name, and for how long.

A request is held if it ends with its prompt computed: at its length, at a stop token, or at a
repetition. Its ticket goes into the response. A request is not held, and the response says so, if

- its blocks would exceed `max_held_blocks`. By default this is half of the cache, so that prefills
  that are never fetched leave the rest to others; a lone prompt may be longer;
- its transfer id was used before;
- its prompt cannot be told from others (see `fingerprint`);
- its LoRA adapter has no digest (see `pool.weights`);
- another connector has cut its prompt (see `PrefillCut`).

Consumers that got the request at the same time know the hold by a name (see `bootstrap`) and may
already ask for it. If such a request is aborted or not held, all ranks withdraw the hold, and these
consumers hear of it at once.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import DescriptionError, ProtocolError
from kvferry.handover.holds import HoldOrder
from kvferry.handover.ticket import FORMAT, MARK, Ticket
from kvferry.layout.model import Residency, ResidencyKind
from kvferry.pool.weights import Adapters, Asked
from kvferry.vllm.bootstrap import CHILD, derived_hold, transfer_name
from kvferry.vllm.config import FerryConfig, Style
from kvferry.vllm.describe import group_spec, is_state
from kvferry.vllm.fingerprint import Prompts, adapted, request_digest
from kvferry.vllm.metadata import HandoverOrders, worse
from kvferry.vllm.metrics import FerryStats, Spans
from kvferry.vllm.multiconnector import CUTTING_ONE, Siblings

log = logging.getLogger("kvferry")

CUT = "_p_side_truncated"  # vLLM's mark, in the request's parameters
CUT_BEFORE = (
    "a connector before kvferry has cut the prompt; list kvferry first in MultiConnector's "
    "`connectors`"
)
MOST_NAMES = 65_536  # transfer ids remembered, to refuse those that come again
# The share of the cache that finished requests may keep by default. Requests do not name their
# clients, so all clients share it.
HELD_SHARE = 0.5
# If a hold came or went within this time, vLLM waits for held blocks instead of preempting.
MOVING_SECONDS = 1.0


@dataclass(slots=True)
class Producing:
    parts: HandoverParts
    engine_id: str
    incarnation: str
    shape: tuple[int, int]  # tp, pp
    port: int  # of the directory
    # These two are safe with any siblings, until the workers have named this connector's.
    flat: bool = False  # whether tickets may use in-tree names
    second: bool = True  # whether a sibling sees requests before us
    told_too: Mapping[str, Any] = field(default_factory=dict)  # in-tree fields of flat answers
    loads_here: Callable[[], bool] = lambda: False  # whether this engine has requests with tickets
    step: int = 0  # number of the last step that was scheduled
    held: dict[str, frozenset[int]] = field(default_factory=dict)  # blocks, by request
    _blocks: set[int] = field(default_factory=set)  # of all requests in `held`
    _again: Counter[int] = field(default_factory=Counter)  # of a block: its holds after the first
    _names: OrderedDict[str, _Named] = field(default_factory=OrderedDict)
    _moved: float = 0.0  # when a hold last came or went
    accepted: dict[str, _Accepted] = field(default_factory=dict)  # by request
    _ends: dict[str, str] = field(default_factory=dict)  # of holds that some workers have closed

    def accept(self, request: Any) -> None:
        """Note a prompt to hand over. Its digest covers all of it; the prefill may stop earlier."""
        request_id = request.request_id
        if request_id in self.accepted:
            return
        if self.second and request.kv_transfer_params.get(CUT):
            self.accepted[request_id] = _Accepted(refusal=("cut", CUT_BEFORE))
        elif why := self.parts.prompts.unfit(request):
            self.accepted[request_id] = _Accepted(refusal=("unfit", why))
        elif request.prompt_token_ids:
            digest, lora = request_digest(request), self.parts.adapters.ask(request)
            self.accepted[request_id] = _Accepted(digest, lora)
            self.parts.cut.stop_short(request)

    def scheduled(self, request_ids: Iterable[str]) -> int:
        """Count a step with these requests. Returns the step's number."""
        self.step += 1
        for request_id in self.accepted.keys() & request_ids:
            self.accepted[request_id].step = self.step
        return self.step

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A prefill is over. Returns whether its blocks stay, and fields for its response."""
        accepted = self.accepted.pop(request.request_id, None)
        try:
            name = transfer_name(request.kv_transfer_params, request.request_id, self.parts.style)
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
            elif self.parts.style == "push":  # a ticket still serves, if the proxy passes it on
                name = None
            else:
                return self._unheld(
                    "reused id",
                    f"{name!r:.100} was used before, by request {first.request_id}; a proxy must "
                    "choose a new one for each request",
                    None,
                )
        awaited = hold_id if name is not None else None  # consumers may know it already
        if accepted is None or not completed(request):
            if awaited is not None:
                self.parts.orders.withdrawals.append(awaited)
            return False, None
        if accepted.refusal is not None:
            return self._unheld(*accepted.refusal, awaited)
        digest, lora = accepted.digest, accepted.lora
        if lora is not None:
            adapter = lora.digest
            if not adapter:
                return self._unheld("lora", lora.unknown, awaited)
            digest = adapted(digest, adapter)
        blocks = frozenset().union(*block_ids) - {0}  # without the null block
        if over := self._over_limit(blocks):
            return self._unheld("limit", over, awaited)
        if name is not None:
            self._names[name].held = True
        tokens, request_id = len(request.prompt_token_ids), request.request_id
        tables = self.parts.cut.tables(block_ids)
        self.parts.orders.holds.append(HoldOrder(hold_id, request_id, digest, tokens, tables))
        # A step writes only into blocks of its own requests. But an earlier pipeline stage may move
        # a state in a later step, when it hears how many tokens were sampled.
        written = accepted.step if self.shape[1] == 1 else self.step
        self.parts.orders.written = max(self.parts.orders.written, written)
        self.held[request_id] = blocks
        self._again.update(blocks & self._blocks)
        self._blocks |= blocks
        self._moved = time.monotonic()
        self.parts.spans.begin(
            "hold", request, **{"kvferry.tokens": tokens, "kvferry.blocks": len(blocks)}
        )
        ticket = Ticket(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            hold_id=hold_id,
            digest=digest,
            tokens=tokens,
            host=self.parts.config.host or "127.0.0.1",
            port=self.port,
            request_id=request_id,
            tp_size=self.shape[0],
            pp_size=self.shape[1],
        )
        told = ticket.to_params(flat=self.flat)
        if self.flat and self.told_too:
            told |= {"remote_num_tokens": tokens, **self.told_too}
        return True, told

    @property
    def held_blocks(self) -> int:
        """Blocks that holds keep. Prompts with a common prefix share blocks."""
        return len(self._blocks)

    def _over_limit(self, blocks: frozenset[int]) -> str:
        """Why these blocks may not be held too, or an empty text."""
        limit, which = self.parts.config.max_held_blocks, "max_held_blocks"
        if limit is None:
            # A lone prompt may be longer, or it would never be handed over. But if requests load
            # here too, this engine and another one could wait for each other's blocks.
            lone = not self.held_blocks and not self.loads_here()
            limit = 0 if lone else int(HELD_SHARE * self.parts.cut.cache_blocks)
            which += f", by default a share of the cache of {HELD_SHARE:g}"
        more = len(blocks - self._blocks)
        if not limit or self.held_blocks + more <= limit:
            return ""
        return (
            f"{self.held_blocks} blocks are held already, {more} more would be over {limit} "
            f"({which})"
        )

    def _unheld(
        self, reason: str, message: str, awaited: str | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep nothing, and say why in the response. Its consumer then computes the prompt."""
        self.parts.stats.count("requests_not_held", reason)
        log.warning("a prefill is not held for a consumer: %s", message)
        if awaited is not None:
            self.parts.orders.withdrawals.append(awaited)
        told: dict[str, Any] = {MARK: {"format": FORMAT, "not_held": message}}
        if self.flat:
            told |= {"do_remote_prefill": False, "do_remote_decode": False}
        return False, told

    def closed(self, ends: Mapping[str, str]) -> None:
        """Note how holds ended on some workers, by request."""
        for request_id, why in ends.items():
            self._ends[request_id] = worse(why, self._ends.get(request_id))

    def sent(self, request_ids: Iterable[str]) -> None:
        """All workers have closed the holds of these requests, so their blocks are free."""
        for request_id in request_ids:
            if why := self._ends.pop(request_id, ""):
                self.parts.stats.count("holds_closed", why)
            if request_id in self.held:
                blocks = self.held.pop(request_id)
                shared = blocks & self._again.keys()
                self._blocks -= blocks - shared
                for block in shared:
                    self._again[block] -= 1
                    if not self._again[block]:
                        del self._again[block]
                self._moved = time.monotonic()
                self.parts.spans.end("hold", request_id)

    @property
    def moving(self) -> bool:
        """Whether held blocks are likely to come back soon."""
        return bool(self.held) and time.monotonic() - self._moved < MOVING_SECONDS


@dataclass(slots=True)
class _Named:
    request_id: str
    held: bool = False


@dataclass(slots=True)
class _Accepted:
    digest: str = ""  # of the whole prompt
    lora: Asked | None = None  # its adapter
    refusal: tuple[str, str] | None = None  # reason and message: it will not be held
    step: int = 0  # the last one that it was scheduled in


def completed(request: Any) -> bool:
    """Whether the whole prompt was computed. An aborted request has nothing to hand over."""
    from vllm.v1.request import RequestStatus

    return request.status in (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_REPETITION,
    )


@dataclass(slots=True)
class HandoverParts:
    """What `Producing` and `Consuming` of one engine share."""

    config: FerryConfig
    style: Style
    spans: Spans
    cut: PrefillCut
    prompts: Prompts
    adapters: Adapters
    orders: HandoverOrders = field(default_factory=HandoverOrders)  # of the next step
    stats: FerryStats = field(default_factory=FerryStats)


@dataclass(frozen=True, slots=True)
class PrefillCut:
    """How far a prefill goes, and which of its blocks are handed over.

    Recurrent states have no positions. A decode engine has to compute the last token of a prompt,
    to sample from it. If it got the state after the whole prompt, it would apply that token twice.
    So the prefill stops one token short. Drafters that read ahead (several MTP modules) need more
    tokens held back. A state is in one block: the last of its table that is not for speculation.

    A window (or chunk) of the last token may begin one block before that of the token after it.
    When vLLM has computed or loaded a whole prompt, it drops that block. A decode engine that had
    loaded all tokens would compute the last one again, without the block. So a decode engine leaves
    out the last token, and a prefill engine whose blocks end there stops one token short.

    In-tree connectors cut prompts too. Under a MultiConnector a prompt must be cut only once, so
    the connector that cuts it marks the request. Our tickets are for whole prompts, so a prompt
    that another connector has cut is not held.
    """

    held_back: int = 0  # last tokens of a prompt, which the decode engine computes
    # by table: blocks for speculation behind the state; None: the table is not of a state
    scratch: tuple[int | None, ...] = ()
    cache_blocks: int = 0  # of this engine; 0: not known
    # of groups that drop blocks which no later token reads: what they keep, and tokens in a block
    windows: tuple[tuple[Residency, int], ...] = ()

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> PrefillCut:
        specs = [group_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        scratch = tuple(int(s.num_speculative_blocks) if is_state(s) else None for s in specs)
        has_states = any(blocks is not None for blocks in scratch)
        ahead = int(vllm_config.num_prefill_lookahead_tokens) - 1
        kinds: tuple[tuple[str, ResidencyKind], ...] = (
            ("sliding_window", "window"),
            ("attention_chunk_size", "chunk"),
        )
        windows = tuple(
            (Residency(kind, span), int(spec.block_size))
            for spec in specs
            for name, kind in kinds
            if (span := int(getattr(spec, name, None) or 0))
        )
        held_back, blocks = max(int(has_states), ahead, 0), int(kv_cache_config.num_blocks)
        return cls(held_back, scratch, blocks, windows)

    def require_fellows(self, siblings: Siblings) -> None:
        """Refuse siblings whose decode engines expect more tokens than this engine computes."""
        other = sorted(set(siblings.others) & set(CUTTING_ONE))
        if self.held_back > 1 and other:
            raise DescriptionError(
                f"kvferry leaves the last {self.held_back} tokens of this model's prompts to "
                f"decode engines, and {', '.join(other)} leaves one at most: their decode "
                "engines would count on tokens that were not computed. Do not run both in one "
                "engine"
            )

    def tables(self, block_ids: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        """A request's block tables. Tables of states have only the block of the state."""
        tables = tuple(tuple(ids) for ids in block_ids)
        if not self.scratch:
            return tables
        return tuple(
            ids if scratch is None else ids[: max(1, len(ids) - scratch)][-1:]
            for ids, scratch in zip(tables, self.scratch, strict=True)
        )

    def stop_short(self, request: Any) -> None:
        """Let a prefill end before the tokens that are held back. A prompt whose cache must not be
        read (its logprobs are wanted) stays whole: vLLM's decode engine loads none of it."""
        short = self._short(request.num_prompt_tokens)
        if not short or request.num_prompt_tokens <= short:
            return
        if getattr(request, "skip_reading_prefix_cache", False):
            return
        # a new list: in the client's process, its other samples and its response have the old one
        request.prompt_token_ids = request.prompt_token_ids[:-short]
        del request._all_token_ids[-short:]
        request.num_prompt_tokens -= short
        request.max_tokens = 1
        # so that siblings do not cut it again
        request.kv_transfer_params = {**request.kv_transfer_params, CUT: True}
        request.block_hashes.clear()  # the last block may not be whole any more
        request.update_block_hashes()

    def _short(self, prompt_tokens: int) -> int:
        """How many tokens short of a prompt its prefill stops."""
        dropped = any(
            kept.needed_from(prompt_tokens - 1) // block < kept.needed_from(prompt_tokens) // block
            for kept, block in self.windows
        )
        return max(self.held_back, int(dropped))

    def loaded(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt a decode engine loads at most."""
        return max(0, prompt_tokens - max(self.held_back, int(bool(self.windows))))

    def reaches_too_far(self, tokens: int, prompt_tokens: int) -> bool:
        """Whether so many prefilled tokens leave this engine too few to compute."""
        return tokens > prompt_tokens - self.held_back
