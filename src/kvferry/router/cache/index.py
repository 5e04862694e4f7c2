# SPDX-License-Identifier: Apache-2.0
"""Which engine holds which prefix, in which tier.

Engines name a block by a hash of their own. The router names it by a digest of the block's tokens
and of the digest before it, so a digest stands for the whole prefix that ends with the block; the
first one follows the namespace's seed. A digest is Python's own hash of bytes, which is keyed by
this process and three times as fast as any of `hashlib`. It has 61 bits: two of a million prefixes
are equal in one of five million routers, and a request is placed badly there.

    told       from an engine's events. Exact: the index counts every block that is stored or
               removed
    estimated  from the prompts that were sent to an engine. Used for engines without events, or
               whose events were lost; for other engines, for some seconds until their events come

One dictionary maps the digest of a block to an integer, with one bit for each slot that holds the
block. A slot is one group of one tier of one engine. A lookup walks along the prompt's digests once
and keeps the bits that all blocks have in common, so its time does not depend on the number of
engines. Each block size needs a walk of its own. Removals name a block by the engine's hash, so
each engine has a dictionary from hash to digest.

An estimate is one dictionary for each engine. A prompt goes in and out as a whole, in C, and its
end leaves before its beginning. So a lookup is a binary search.

Groups: a prefix is as long as its full-attention groups are. A window group must hold the last
blocks before the prefix ends, a state group the block at which it ends; else the prefix is shorter.
Groups of other kinds are ignored, so there the answer is an upper bound. A model with windows only
skips blocks, and its events do not say which ones; these are not indexed.

Everything is bounded by `most_blocks`. The engine with the most blocks loses its oldest ones first,
except those that were looked up since they were last spared.

Forgetting takes slots out of use, so lookups miss their blocks at once. The blocks leave the
dictionary in small steps, with later events and requests, so that no request waits for it.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat, takewhile
from typing import Any, Literal

import msgspec

from kvferry.router.choice import Holding, Tier

Digest = int  # the router's name of a block
Hash = int | bytes  # an engine's own name of it
State = Literal["live", "replaying", "estimated", "lost"]

PENDING_SECONDS = 10.0  # in which the events of a prompt that was sent to an engine must come
_MOST_GROUPS = 64  # of one engine; real models have up to a dozen
_MOST_SIZES = 16  # of blocks, of all engines; each size costs a walk
# After so many removals of known blocks in a row, an engine has evicted everything that it stored
# before its events were lost, because engines evict the oldest blocks first.
_TURNED_OVER = 64
_DROPPED_SHARE = 64  # 1/64 of an engine's estimates leaves at a time: finding the oldest is slow
_SWEPT_EACH_TIME = 1024  # forgotten blocks, about 0.3 ms; a million of them take 0.4 s
_TRIMMED_SHARE = 256  # 1/256 of all blocks leaves at a time: finding the largest engine is slow
_FULL = ("full_attention", "mla_attention", "sink_full_attention")
_WINDOW = ("sliding_window", "sliding_window_mla")
_STATE = ("mamba",)
_TOKEN_BYTES = 4
_BEGINNING_BYTES = 16 * _TOKEN_BYTES
_TOKEN_TYPE = "I" if array("I").itemsize == _TOKEN_BYTES else "L"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Caches are shared only within one namespace; "" is the usual one."""

    lora: str = ""
    salt: str = ""  # a request's `cache_salt`

    @property
    def seed(self) -> Digest:
        return hash((self.lora, self.salt))


class PromptChain:
    """The tokens of one prompt, and the digests of its blocks."""

    __slots__ = ("_digests", "_packed", "namespace", "tokens")

    def __init__(self, namespace: Namespace, token_ids: Iterable[int]) -> None:
        """Raises ValueError for what cannot be a token."""
        self.namespace = namespace
        self._packed = pack(token_ids)
        self.tokens = len(self._packed) // _TOKEN_BYTES
        # Tuples: the collector of garbage does not look into them, as it does into lists.
        self._digests: dict[int, tuple[Digest, ...]] = {}

    @property
    def beginning(self) -> bytes:
        """The first tokens, which tell most prompts apart that have nothing in common."""
        return self._packed[:_BEGINNING_BYTES]

    def digests(self, block_tokens: int) -> tuple[Digest, ...]:
        """One digest for each whole block of `block_tokens` tokens. Made once for each size."""
        digests = self._digests.get(block_tokens)
        if digests is None:
            digests = tuple(extend(self.namespace.seed, self._packed, block_tokens))
            self._digests[block_tokens] = digests
        return digests


def pack(token_ids: Iterable[int]) -> bytes:
    """Tokens as bytes, for `extend`. Raises ValueError for what cannot be a token."""
    try:
        return array(_TOKEN_TYPE, token_ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be from 0 to 2**32 - 1: {error}") from None


def extend(
    parent: Digest, packed: bytes, block_tokens: int, extras: Sequence[bytes] = ()
) -> list[Digest]:
    """Digests of the whole blocks that follow the block with the digest `parent`.

    `extras`: for each block, what else its cache depends on, such as an image; b"" for nothing.
    """
    size = block_tokens * _TOKEN_BYTES
    digests = []
    for number, at in enumerate(range(0, len(packed) - size + 1, size)):
        block = packed[at : at + size]
        if extras and extras[number]:
            block += extras[number]
        parent = hash((parent, block))
        digests.append(parent)
    return digests


class Stored(msgspec.Struct, tag="BlockStored"):
    """Blocks that follow each other, as vLLM publishes them.

    There may be fewer hashes than blocks: groups that need only some blocks skip the others.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # one for each hash
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None  # None: of all groups
    locality: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The engine's own cache is empty. It does not tell of the pool."""


Event = Stored | Removed | Cleared


@dataclass(slots=True, eq=False)
class Slot:
    """One group of one tier of one engine; to look a pool up, of all engines that tell of it."""

    tier: Tier
    group: int
    block_tokens: int
    bits: int
    kind: str | None = None  # vLLM's word; None: it was not told, and counts as full attention
    window_tokens: int = 0

    @property
    def is_prefix(self) -> bool:
        return self.kind is None or self.kind in _FULL

    @property
    def counts(self) -> bool:
        return self.is_prefix or self.kind in _STATE or (self.kind in _WINDOW and self.window > 0)

    @property
    def window(self) -> int:
        """Blocks that a prefix needs before its end; 1 for a state, 0 for all blocks."""
        if self.kind in _STATE:
            return 1
        return math.ceil((self.window_tokens - 1) / self.block_tokens)


@dataclass(slots=True, eq=False)
class Publisher:
    """One engine, as far as its events and its requests tell."""

    engine: str
    estimate_tokens: int = 16  # in one block of an estimate, until the true size is known
    capacity_blocks: int = 16_384  # of an estimate, until the true size is known
    view: Literal["live", "estimated", "lost"] = "estimated"
    replaying: bool = False
    slots: dict[tuple[Tier, int], Slot] = field(default_factory=dict)
    blocks: dict[int, dict[Hash, Digest]] = field(default_factory=dict)  # by size; oldest first
    copies: dict[tuple[int, Hash], int] = field(default_factory=dict)  # beyond the first, by slot
    estimates: dict[Digest, float] = field(default_factory=dict)  # and when they end; oldest first
    known_in_a_row: int = 0  # removals, while the view is "lost"
    # Since the router started:
    events: int = 0  # batches that were applied
    lost_events: int = 0  # batches that could not be had
    restarts: int = 0  # the engine's sequence began again
    garbage: int = 0  # frames and events that cannot be read
    unplaced: int = 0  # blocks whose parent is not known

    @property
    def state(self) -> State:
        return "replaying" if self.replaying else self.view

    @property
    def known(self) -> int:
        """Blocks that the engine told of."""
        return sum(map(len, self.blocks.values()))

    @property
    def size(self) -> int:
        """All blocks that it is believed to hold."""
        return self.known + len(self.estimates)


class CacheIndex:
    """What all engines hold. It belongs to one thread: the router's event loop."""

    def __init__(
        self, most_blocks: int = 2_000_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most_blocks = most_blocks
        self._clock = clock
        self._where: dict[Digest, int] = {}  # a digest, and the bits of the slots that hold it
        self._parts: dict[str, Publisher] = {}
        # Of a group and a block size in the pool: the bits of all engines that tell of it.
        self._pools: dict[tuple[int, int], int] = {}
        self._walks: dict[int, int] = {}  # by block size, the bits of the slots that are prefixes
        self._used: set[Digest] = set()  # digests that were looked up
        self._bits = 0  # that are in use
        # Bits of slots that are out of use, and the blocks that may have them.
        self._forgotten: deque[tuple[int, dict[Hash, Digest]]] = deque()
        self.size = 0  # blocks of all engines; one that two engines hold counts twice

    # Engines

    def part(self, engine: str) -> Publisher:
        """The part of one engine, made when it is first asked for."""
        part = self._parts.get(engine)
        if part is None:
            part = self._parts[engine] = Publisher(engine)
        return part

    def forget(self, engine: str) -> None:
        """An engine restarted or lost its cache: forget all its blocks."""
        if engine in self._parts:
            self.forget_part(self._parts[engine])

    def emptied(self, engine: str) -> None:
        """An engine used none of the blocks that it was believed to hold, so forget them. Later
        events count; a replay, which tells of earlier moments, goes on."""
        part = self._parts.get(engine)
        if part is not None and not part.replaying:
            tells = part.view != "estimated"
            self.forget_part(part)
            if tells:
                self.incomplete(part)

    def remove(self, engine: str) -> None:
        """An engine is gone for good."""
        self.forget(engine)
        self._parts.pop(engine, None)

    def forget_part(self, part: Publisher) -> None:
        self._retire(part, list(part.slots))
        part.known_in_a_row = 0
        part.view = "estimated"
        self._drop_estimates(part, len(part.estimates))

    def state(self, engine: str) -> State:
        """The state of an engine's part."""
        return self._parts[engine].state if engine in self._parts else "estimated"

    def pooled(self) -> set[str]:
        """Engines that have told of a pool, which they read then."""
        if not self._pools:
            return set()
        return {
            p.engine for p in self._parts.values() if any(tier == "pool" for tier, _ in p.slots)
        }

    def stats(self) -> Mapping[str, Publisher]:
        """By engine, without estimates that have ended."""
        now = self._clock()
        for part in self._parts.values():
            ends = part.estimates
            ended = takewhile(lambda digest: ends[digest] <= now, ends)  # noqa: B023
            self._take_out(part, list(ended))
        return self._parts

    # Lookups

    def holdings(self, chain: PromptChain) -> list[Holding]:
        """The longest prefix of a prompt that each engine holds, in each tier that holds any.

        An engine computes at least the last token, so its own tiers never hold the whole prompt;
        the pool, which has no engine, may. An engine's estimate counts where it is longer than what
        the engine told.
        """
        now, lengths = self._clock(), self._walk(chain)
        best: dict[tuple[str, Tier], Holding] = {}

        def offer(engine: str, tier: Tier, tokens: int) -> None:
            known = best.get((engine, tier))
            if tokens > (known.tokens if known else 0):
                best[engine, tier] = Holding(engine, tokens, tier)

        for part in self._parts.values():
            for tier in ("gpu", "cpu") if part.slots else ():
                slots = [slot for slot in part.slots.values() if slot.tier == tier]
                offer(part.engine, tier, self._length(chain, slots, lengths))
            if part.estimates:
                offer(part.engine, "gpu", _estimated(part, chain, now))
        for slots in self._pool_layouts():
            offer("", "pool", self._length(chain, slots, lengths))
        return list(best.values())

    def sent(
        self, engine: str, chain: PromptChain, block_tokens: int = 0, cache_tokens: int = 0
    ) -> None:
        """A prompt was sent to an engine, which will hold it soon. `block_tokens`: of its blocks,
        as its metrics say, for as long as no event does. `cache_tokens`: all that its cache holds,
        as they say. 0: they do not say."""
        part = self.part(engine)
        told = part.slots.get(("gpu", 0))
        size = block_tokens if told is None else told.block_tokens
        if size > 0 and size != part.estimate_tokens:
            self._drop_estimates(part, len(part.estimates))
            tokens = part.capacity_blocks * part.estimate_tokens
            part.estimate_tokens, part.capacity_blocks = size, max(1, tokens // size)
        if cache_tokens > 0:
            part.capacity_blocks = max(1, cache_tokens // part.estimate_tokens)
        ends = self._clock() + PENDING_SECONDS if part.view == "live" else math.inf
        estimates, digests = part.estimates, chain.digests(part.estimate_tokens)
        self._take_out(part, digests)
        # The last block goes in first: of one prompt, it is also the first to leave.
        estimates.update(dict.fromkeys(reversed(digests), ends))
        self.size += len(digests)
        if (over := len(estimates) - part.capacity_blocks) > 0:
            self._drop_estimates(part, over + part.capacity_blocks // _DROPPED_SHARE)
        self._tidy()

    def missed(self, engine: str, chain: PromptChain, cached_tokens: int) -> None:
        """An engine used only `cached_tokens` of a prompt that it was believed to hold. Forget the
        blocks behind them."""
        part = self._parts.get(engine)
        if part is None:
            return
        for slot in part.slots.values():
            if slot.tier == "gpu":
                first = cached_tokens // slot.block_tokens
                for digest in chain.digests(slot.block_tokens)[first:]:
                    self._unset(digest, slot.bits)
        size = part.estimate_tokens
        self._take_out(part, chain.digests(size)[cached_tokens // size :])

    # Events

    def told(self, part: Publisher, batch: Sequence[Event]) -> None:
        """Apply one batch of events. An engine that was removed may still publish."""
        if self._parts.get(part.engine) is not part:
            return
        part.events += 1
        for event in batch:
            if isinstance(event, Stored):
                self._stored(part, event, batch)
            elif isinstance(event, Removed):
                self._removed(part, event)
            else:
                self._cleared(part)
        self._tidy()

    def whole(self, part: Publisher) -> None:
        """The part is complete: every event since the engine's start was applied."""
        if part.view != "live":
            part.view = "live"
            self._drop_estimates(part, len(part.estimates))

    def incomplete(self, part: Publisher) -> None:
        """The engine may hold blocks whose events were missed."""
        part.view = "lost"
        part.known_in_a_row = 0

    def _stored(self, part: Publisher, event: Stored, batch: Sequence[Event]) -> None:
        slot = self._slot(part, event)
        if slot is None:
            part.unplaced += len(event.block_hashes)
            return
        try:
            places = self._place(part, slot, event, batch)
        except ValueError:  # no tokens
            part.garbage += 1
            return
        blocks = part.blocks.setdefault(slot.block_tokens, {})
        for name, digest in zip(event.block_hashes, places, strict=True):
            if digest is None:
                part.unplaced += 1
                continue
            bits = self._where.get(digest, 0)
            if not bits & slot.bits:
                self._where[digest] = bits | slot.bits
            elif slot.tier != "pool":  # a pool has one, also if two requests save it
                key = (slot.bits, name)
                part.copies[key] = part.copies.get(key, 0) + 1
            if name not in blocks:
                blocks[name] = digest
                self.size += 1

    def _place(
        self, part: Publisher, slot: Slot, event: Stored, batch: Sequence[Event]
    ) -> list[Digest | None]:
        """The digests of an event's hashes; None for those whose place is not known."""
        size, hashes, parent = slot.block_tokens, event.block_hashes, event.parent_block_hash
        blocks = part.blocks.get(size, {})
        known = [blocks.get(name) for name in hashes]
        count, rest = divmod(len(event.token_ids), size)
        if None not in known or rest or count < len(hashes):
            return known
        if count > len(hashes):
            # Which blocks were skipped is not told. A group that skips none has the same hashes.
            places = dict(zip(hashes, known, strict=True))
            for other in batch:
                if (
                    isinstance(other, Stored)
                    and len(other.token_ids) == size * len(other.block_hashes)
                    and not places.keys().isdisjoint(other.block_hashes)
                ):
                    of_other = self._place(part, slot, other, batch)
                    places |= dict(zip(other.block_hashes, of_other, strict=True))
            return [places[name] for name in hashes]
        found = _salt_and_extras(event)
        if found is None:
            return known
        (salt, extras), first = found, 0
        if parent is None:  # the salt is told with the first block
            start: Digest | None = Namespace(event.lora_name or "", salt).seed
        else:
            start = blocks.get(parent)
        if start is None:
            # Blocks before the first known one have no place; the others follow it.
            first = next((n + 1 for n, digest in enumerate(known) if digest is not None), 0)
            start = known[first - 1] if first else None
        if start is None:
            return known
        packed = pack(event.token_ids[first * size :])
        fresh = extend(start, packed, size, extras[first:] if any(extras) else ())
        return known[:first] + [old or new for old, new in zip(known[first:], fresh, strict=True)]

    def _removed(self, part: Publisher, event: Removed) -> None:
        tier = _tier(event.medium, event.locality)
        slots = [
            slot
            for (of_tier, group), slot in part.slots.items()
            if of_tier == tier and event.group_idx in (None, group)
        ]
        for name in event.block_hashes:
            found = False
            for slot in slots:
                blocks = part.blocks.get(slot.block_tokens, {})
                digest = blocks.get(name)
                if digest is None:
                    continue
                found = True
                copies = part.copies.pop((slot.bits, name), 0)
                if copies > 1:
                    part.copies[slot.bits, name] = copies - 1
                if copies:
                    continue
                # A block that one engine did not find in the pool is not there for any.
                mask = self._unset(digest, self._shared_bits(slot))
                if not mask & self._bits_of(part, slot.block_tokens):
                    del blocks[name]
                    self.size -= 1
            if tier == "gpu" and part.view == "lost":
                part.known_in_a_row = part.known_in_a_row + 1 if found else 0
                if part.known_in_a_row >= _TURNED_OVER:
                    self.whole(part)

    def _cleared(self, part: Publisher) -> None:
        """vLLM has emptied its own cache. The pool has events of its own. The CPU's tier may have
        been emptied too, without an event, so it is forgotten with the GPU's."""
        self._retire(part, [key for key in part.slots if key[0] != "pool"])
        self._drop_estimates(part, len(part.estimates))
        self.whole(part)

    # Slots and their bits

    def _slot(self, part: Publisher, event: Stored) -> Slot | None:
        """The slot of an event, made when it is first needed; None if it can have none."""
        tier, group = _tier(event.medium, event.locality), event.group_idx or 0
        size = self._size_of(part, event)
        if tier is None or not 0 <= group < _MOST_GROUPS or size <= 0:
            return None
        slot = part.slots.get((tier, group))
        if slot is None or slot.block_tokens < size:
            if size not in self._walks and len(self._walks) >= _MOST_SIZES:
                return None
            if slot is not None:  # those were parts of blocks
                self._retire(part, [(tier, group)])
            same = part.slots.get(("gpu", group))  # the pool's events do not tell the kind
            kind, window = (same.kind, same.window_tokens) if same is not None else (None, 0)
            slot = Slot(tier, group, size, self._new_bit(), kind, window)
            part.slots[tier, group] = slot
            if tier == "pool":
                self._pools[group, size] = self._pools.get((group, size), 0) | slot.bits
            self._plan_walks()
        if slot.block_tokens > size:
            return None
        kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window or 0
        if kind is not None and (kind, window) != (slot.kind, slot.window_tokens):
            for other in part.slots.values():
                if other.group == group:
                    other.kind, other.window_tokens = kind, window
            self._plan_walks()
        return slot

    def _size_of(self, part: Publisher, event: Stored) -> int:
        """Tokens in a block. Without tokens, an event tells of blocks that the GPU holds too."""
        same = None if event.token_ids else part.slots.get(("gpu", event.group_idx or 0))
        return same.block_tokens if same is not None else event.block_size

    def _plan_walks(self) -> None:
        """Slots have changed: collect the bits that a walk over blocks of each size looks for."""
        self._walks = {}
        for part in self._parts.values():
            for slot in part.slots.values():
                bits = slot.bits if slot.is_prefix and slot.tier != "pool" else 0
                self._walks[slot.block_tokens] = self._walks.get(slot.block_tokens, 0) | bits

    def _retire(self, part: Publisher, keys: Iterable[tuple[Tier, int]]) -> None:
        """Take slots out of use at once. `_sweep` takes their bits off the blocks."""
        gone: dict[int, int] = {}  # bits by block size
        for key in keys:
            slot = part.slots.pop(key)
            gone[slot.block_tokens] = gone.get(slot.block_tokens, 0) | slot.bits
        if not gone:
            return
        for size, bits in gone.items():
            blocks, others = part.blocks.pop(size, {}), self._bits_of(part, size)
            self.size -= len(blocks)
            if others:
                kept = {n: d for n, d in blocks.items() if self._where.get(d, 0) & others}
                self.size += len(kept)
                if kept:
                    part.blocks[size] = kept
            self._forgotten.append((bits, blocks))
        all_bits = sum(gone.values())
        part.copies = {key: count for key, count in part.copies.items() if not key[0] & all_bits}
        self._pools = {key: left for key, bits in self._pools.items() if (left := bits & ~all_bits)}
        self._plan_walks()
        self._sweep(_SWEPT_EACH_TIME)

    def _sweep(self, count: int) -> None:
        """Take the bits of slots that are out of use off `count` blocks. Until all blocks of a slot
        are swept, no other slot gets its bits."""
        while self._forgotten:
            bits, blocks = self._forgotten[0]
            while blocks and count:
                self._unset(blocks.popitem()[1], bits)
                count -= 1
            if blocks:
                return
            self._forgotten.popleft()
            self._bits &= ~bits

    def _shared_bits(self, slot: Slot) -> int:
        """A slot's bits; in a pool, those of all engines whose blocks are the same."""
        if slot.tier != "pool":
            return slot.bits
        return self._pools.get((slot.group, slot.block_tokens), 0)

    def _pool_layouts(self) -> list[list[Slot]]:
        """The slots of the pool, once for each way in which engines cut it into blocks."""
        layouts: dict[tuple[int, ...], list[Slot]] = {}
        if not self._pools:
            return []
        for part in self._parts.values():
            own = [slot for slot in part.slots.values() if slot.tier == "pool"]
            if own:
                slots = [replace(slot, bits=self._shared_bits(slot)) for slot in own]
                layouts[tuple(sorted(slot.bits for slot in slots))] = slots
        return list(layouts.values())

    def _bits_of(self, part: Publisher, block_tokens: int) -> int:
        return sum(s.bits for s in part.slots.values() if s.block_tokens == block_tokens)

    def _new_bit(self) -> int:
        bit = ~self._bits & (self._bits + 1)  # the lowest that is not in use
        self._bits |= bit
        return bit

    def _unset(self, digest: Digest, bits: int) -> int:
        """Clear bits. Returns those that are left."""
        mask = self._where.get(digest, 0) & ~bits
        if mask:
            self._where[digest] = mask
        else:
            self._where.pop(digest, None)
            self._used.discard(digest)
        return mask

    # Bounds

    def _tidy(self) -> None:
        if self._forgotten:
            unswept = sum(len(blocks) for _, blocks in self._forgotten)
            self._sweep(max(_SWEPT_EACH_TIME, unswept - self.most_blocks))
        while self.size > self.most_blocks:
            part = max(self._parts.values(), key=lambda p: p.size)
            self._trim(part, self.size - self.most_blocks + self.most_blocks // _TRIMMED_SHARE)

    def _trim(self, part: Publisher, count: int) -> None:
        """Remove up to `count` blocks of an engine: estimates first, then the oldest."""
        count -= self._drop_estimates(part, count)
        for size, blocks in sorted(part.blocks.items(), key=lambda item: -len(item[1])):
            slots = [slot for slot in part.slots.values() if slot.block_tokens == size]
            bits = sum(slot.bits for slot in slots)
            while blocks and count > 0:
                for name in list(islice(blocks, count)):
                    digest = blocks.pop(name)
                    if digest in self._used:
                        self._used.discard(digest)
                        blocks[name] = digest
                        continue
                    self._unset(digest, bits)
                    for slot in slots:
                        part.copies.pop((slot.bits, name), None)
                    self.size -= 1
                    count -= 1

    def _drop_estimates(self, part: Publisher, count: int) -> int:
        """The oldest ones, `count` or as many as there are. Returns how many."""
        return self._take_out(part, list(islice(part.estimates, count)))

    def _take_out(self, part: Publisher, digests: Iterable[Digest]) -> int:
        """Returns how many of these blocks were estimated."""
        before = len(part.estimates)
        deque(map(part.estimates.pop, digests, repeat(0.0)), maxlen=0)
        gone = before - len(part.estimates)
        self.size -= gone
        return gone

    # Walks

    def _walk(self, chain: PromptChain) -> dict[int, int]:
        """Tokens of the prefix that each prefix slot holds, by its bit, if it holds any."""
        lengths: dict[int, int] = {}
        get = self._where.get
        for size, bits in self._walks.items():
            if not bits:
                continue
            alive, held, digests = bits, 0, chain.digests(size)
            ended: list[tuple[int, int]] = []  # bits, and how many blocks they have in common
            same: int | None = -1  # neighbours mostly have one mask
            for held, mask in enumerate(map(get, digests)):
                if mask == same:
                    continue
                same = mask
                left = alive & (mask or 0)
                if left != alive:
                    ended.append((alive ^ left, held))
                    alive = left
                    if not alive:
                        break
            else:
                held = len(digests)
            ended.append((alive, held))
            if (
                held
                and self.size > self.most_blocks // 2  # else nothing has to leave soon
                and not self._used.issuperset((digests[0], digests[held - 1]))
            ):
                self._used.update(digests[:held])
            for which, blocks in ended:
                for bit in _each_bit(which) if blocks else ():
                    lengths[bit] = blocks * size
        return lengths

    def _length(self, chain: PromptChain, slots: Sequence[Slot], lengths: dict[int, int]) -> int:
        """Tokens of the prefix that slots of one tier hold together."""
        slots = [slot for slot in slots if slot.counts]
        if not slots:
            return 0
        tokens = chain.tokens if slots[0].tier == "pool" else chain.tokens - 1
        for slot in slots:
            if slot.is_prefix:
                held = self._run(chain, slot) if slot.tier == "pool" else lengths.get(slot.bits, 0)
                tokens = min(tokens, held)
        step = math.lcm(*(slot.block_tokens for slot in slots))
        others = [slot for slot in slots if not slot.is_prefix]
        while tokens > 0:
            tokens = before = tokens // step * step
            for slot in others:
                tokens = min(tokens, self._last_window(chain, slot, tokens))
            if tokens == before:
                break
        return tokens

    def _run(self, chain: PromptChain, slot: Slot) -> int:
        blocks = 0
        for digest in chain.digests(slot.block_tokens):
            if not self._where.get(digest, 0) & slot.bits:
                break
            blocks += 1
        return blocks * slot.block_tokens

    def _last_window(self, chain: PromptChain, slot: Slot, tokens: int) -> int:
        """The longest prefix up to `tokens` that ends with what a window or a state needs."""
        digests, size, window = chain.digests(slot.block_tokens), slot.block_tokens, slot.window
        end = tokens // size
        held = 0
        for block in range(end - 1, -1, -1):
            if self._where.get(digests[block], 0) & slot.bits:
                held += 1
                if held == window:
                    break
            else:
                end, held = block, 0
        return end * size


def _estimated(part: Publisher, chain: PromptChain, now: float) -> int:
    """Tokens of the prefix that an engine should hold, by the prompts that were sent to it. Blocks
    behind a gap, which `missed` may leave, may count or not."""
    size, ends = part.estimate_tokens, part.estimates.get
    most, digests = (chain.tokens - 1) // size, chain.digests(size)
    if not digests or digests[0] not in part.estimates:
        return 0
    return size * bisect_left(digests, True, 0, most, key=lambda digest: ends(digest, now) <= now)


def _salt_and_extras(event: Stored) -> tuple[str, list[bytes]] | None:
    """The salt, and the other keys of each block; None if keys and blocks do not match. A block's
    keys are the adapter's name, pairs for each image, the salt (of the first block), and digests of
    embeddings."""
    count = len(event.block_hashes)
    if event.extra_keys is None:
        return "", [b""] * count
    if len(event.extra_keys) != count:
        return None
    salt, of_blocks = "", []
    for number, keys in enumerate(event.extra_keys):
        left = list(keys or ())
        if event.lora_name and left[:1] == [event.lora_name]:
            del left[0]
        if number == 0 and event.parent_block_hash is None:
            salts = [key for key in left if isinstance(key, str)]
            if salts:
                salt = salts[0]
                left.remove(salt)
        of_blocks.append(repr(left).encode("utf-8", "surrogatepass") if left else b"")
    return salt, of_blocks


def _tier(medium: str | None, locality: str | None) -> Tier | None:
    if medium is None or medium == "GPU":
        return "gpu"
    if medium == "CPU" or locality == "LOCAL":
        return "cpu"
    return "pool" if medium == "STORAGE" else None


def _each_bit(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit
