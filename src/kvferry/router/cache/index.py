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

What an engine tells is kept by slot: one group of one tier of one engine. Removals name a block by
the engine's hash, so a slot has a dictionary from hash to digest. One dictionary of all engines
maps a digest to an integer, with the bit of each slot that holds the block. A lookup walks once for
each block size and keeps the bits that all blocks have in common, so a prefix that a hundred
engines hold costs little more than that of one. The pool is what any engine told of it: a block is
there until each of these engines has removed it.

An estimate is one dictionary for each engine. A prompt goes in and out as a whole, in C, and its
end leaves before its beginning. So a lookup is a binary search.

Groups: a prefix is as long as its full-attention groups are. A window group must hold the last
blocks before the prefix ends, a state group the block at which it ends; else the prefix is shorter.
Groups of other kinds are ignored, so there the answer is an upper bound. A model with windows only
skips blocks, and its events do not say which ones; these are not indexed.

Everything is bounded by `most_blocks`. The engine with the most blocks loses its oldest ones first,
except those that were looked up since they were last spared: prompts begin with the oldest ones.

Forgetting takes slots out of use, so lookups miss their blocks at once. The blocks leave the
dictionaries in small steps, with later events and requests, so that no request waits for it.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat, takewhile
from typing import Any, Literal

import msgspec

from kvferry.router.choice import Holding, Tier

Digest = int  # the router's name of a block
Hash = int | bytes  # an engine's own name of it
State = Literal["live", "replaying", "estimated", "lost"]

PENDING_SECONDS = 10.0  # in which the events of a prompt that was sent to an engine must come
_MOST_GROUPS = 64  # of one engine; real models have up to a dozen
# After so many removals of known blocks in a row, an engine has evicted everything that it stored
# before its events were lost, because engines evict the oldest blocks first.
_TURNED_OVER = 64
_DROPPED_SHARE = 64  # 1/64 of an engine's estimates leaves at a time: finding the oldest is slow
_SWEPT_EACH_TIME = 1024  # forgotten blocks, about 0.3 ms; a million of them take 0.4 s
_TRIMMED_SHARE = 256  # 1/256 of all blocks leaves at a time: finding the largest engine is slow
_SPARED_SHARE = 64  # at most 1/64 is spared meanwhile, in 20 ms; a million would take two seconds
_FULL = ("full_attention", "mla_attention", "sink_full_attention")
_WINDOW = ("sliding_window", "sliding_window_mla")
_STATE = ("mamba",)
_TOKEN_BYTES = 4
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


def extend(parent: Digest, packed: bytes, block_tokens: int) -> list[Digest]:
    """Digests of the whole blocks that follow the block with the digest `parent`."""
    size = block_tokens * _TOKEN_BYTES
    digests = []
    for at in range(0, len(packed) - size + 1, size):
        parent = hash((parent, packed[at : at + size]))
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
    """What one engine told of one group of one tier."""

    tier: Tier
    group: int
    block_tokens: int
    bit: int
    kind: str | None = None  # vLLM's word; None: it was not told, and counts as full attention
    window_tokens: int = 0
    blocks: dict[Hash, Digest] = field(default_factory=dict)  # the oldest first
    copies: dict[Hash, int] = field(default_factory=dict)  # of equal blocks, beyond the first

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


_Bits = tuple[Slot, int]  # a slot, and its bit; in the pool, one slot, and the bits of all engines


@dataclass(slots=True, eq=False)
class Publisher:
    """One engine, as far as its events and its requests tell."""

    engine: str
    estimate_tokens: int = 16  # in one block of an estimate, until the true size is known
    capacity_blocks: int = 16_384  # of an estimate, until the true size is known
    view: Literal["live", "estimated", "lost"] = "estimated"
    replaying: bool = False
    slots: dict[tuple[Tier, int], Slot] = field(default_factory=dict)
    estimates: dict[Digest, float] = field(default_factory=dict)  # and when they end; oldest first
    known_in_a_row: int = 0  # removals, while the view is "lost"
    lost_events: int = 0  # batches that could not be had, since the router started

    @property
    def state(self) -> State:
        return "replaying" if self.replaying else self.view

    @property
    def known(self) -> int:
        """Blocks that the engine told of."""
        return sum([len(slot.blocks) for slot in self.slots.values()])

    @property
    def size(self) -> int:
        """All blocks that it is believed to hold."""
        return self.known + len(self.estimates)

    def drop_estimates(self, count: int | None = None) -> None:
        """The oldest ones; None: all."""
        self.take_out(list(islice(self.estimates, count)))

    def take_out(self, digests: Iterable[Digest]) -> None:
        """What is estimated of these blocks."""
        deque(map(self.estimates.pop, digests, repeat(0.0)), maxlen=0)

    def digest_of(self, name: Hash, block_tokens: int) -> Digest | None:
        """Of a block of this size that any tier or group holds."""
        for slot in self.slots.values():
            if slot.block_tokens == block_tokens and name in slot.blocks:
                return slot.blocks[name]
        return None


class CacheIndex:
    """What all engines hold. It belongs to one thread: the router's event loop."""

    def __init__(
        self, most_blocks: int = 2_000_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most_blocks = most_blocks
        self._clock = clock
        self._parts: dict[str, Publisher] = {}
        self._where: dict[Digest, int] = {}  # a digest, and the bits of the slots that hold it
        self._used: set[Digest] = set()  # digests that were looked up
        self._bits = 0  # that are in use
        self._forgotten: deque[Slot] = deque()  # out of use, with blocks that may have their bits

    @property
    def size(self) -> int:
        """Blocks of all engines; one that two engines hold counts twice."""
        return sum([part.size for part in self._parts.values()])

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

    def remove(self, engine: str) -> None:
        """An engine is gone for good."""
        self.forget(engine)
        self._parts.pop(engine, None)

    def forget_part(self, part: Publisher) -> None:
        self._retire(part, list(part.slots))
        part.estimates.clear()
        part.view, part.known_in_a_row = "estimated", 0

    def pooled(self) -> set[str]:
        """Engines that have told of a pool, which they read then."""
        parts = self._parts.values()
        return {p.engine for p in parts if any(tier == "pool" for tier, _ in p.slots)}

    def stats(self) -> Mapping[str, Publisher]:
        """By engine, without estimates that have ended."""
        now = self._clock()
        for part in self._parts.values():
            ends = part.estimates
            part.take_out(list(takewhile(lambda digest: ends[digest] <= now, ends)))  # noqa: B023
        return self._parts

    # Lookups

    def holdings(self, chain: PromptChain) -> list[Holding]:
        """The longest prefix of a prompt that each engine holds, in each tier that holds any.

        An engine computes at least the last token, so its own tiers never hold the whole prompt;
        the pool, which has no engine, may. An engine's estimate counts where it is longer than what
        the engine told.
        """
        now, found, lengths = self._clock(), [], self._walk(chain)
        pool: dict[tuple[int, int], _Bits] = {}  # by group and size, of all engines that tell of it
        layouts = set()  # ways in which engines cut the pool
        for part in self._parts.values():
            tiers: dict[Tier, list[_Bits]] = {}
            for slot in part.slots.values():
                tiers.setdefault(slot.tier, []).append((slot, slot.bit))
            if shared := tiers.pop("pool", None):
                for slot, bit in shared:
                    one, bits = pool.get((slot.group, slot.block_tokens), (slot, 0))
                    pool[slot.group, slot.block_tokens] = one, bits | bit
                layouts.add(tuple(sorted((slot.group, slot.block_tokens) for slot, _ in shared)))
            local = 0
            if part.estimates:
                local = _estimated(part, chain, now)
            if "gpu" in tiers:
                local = max(local, self._length(chain, tiers["gpu"], lengths))
            if local:
                found.append(Holding(part.engine, local, "gpu"))
            if "cpu" in tiers and (tokens := self._length(chain, tiers["cpu"], lengths)):
                found.append(Holding(part.engine, tokens, "cpu"))
        for slot, bits in pool.values():
            lengths[bits] = self._run(chain, slot, bits)
        ways = [[pool[key] for key in keys] for keys in layouts]
        stored = max([self._length(chain, way, lengths) for way in ways], default=0)
        return [*found, Holding("", stored, "pool")] if stored else found

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
            part.drop_estimates()
            tokens = part.capacity_blocks * part.estimate_tokens
            part.estimate_tokens, part.capacity_blocks = size, max(1, tokens // size)
        if cache_tokens > 0:
            part.capacity_blocks = max(1, cache_tokens // part.estimate_tokens)
        ends = self._clock() + PENDING_SECONDS if part.view == "live" else math.inf
        estimates, digests = part.estimates, chain.digests(part.estimate_tokens)
        part.take_out(digests)
        # The last block goes in first: of one prompt, it is also the first to leave.
        estimates.update(dict.fromkeys(reversed(digests), ends))
        if (over := len(estimates) - part.capacity_blocks) > 0:
            part.drop_estimates(over + part.capacity_blocks // _DROPPED_SHARE)
        self._tidy()

    # Events

    def told(self, part: Publisher, batch: Sequence[Event]) -> None:
        """Apply one batch of events. An engine that was removed may still publish."""
        if self._parts.get(part.engine) is not part:
            return
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
            part.drop_estimates()

    def incomplete(self, part: Publisher) -> None:
        """The engine may hold blocks whose events were missed."""
        part.view = "lost"
        part.known_in_a_row = 0

    def _stored(self, part: Publisher, event: Stored, batch: Sequence[Event]) -> None:
        slot = self._slot(part, event)
        if slot is None:
            return
        try:
            places = self._place(part, slot.block_tokens, event, batch)
        except ValueError:  # no tokens
            return
        for name, digest in zip(event.block_hashes, places, strict=True):
            if digest is not None:
                self._store(slot, name, digest)

    def _place(
        self, part: Publisher, size: int, event: Stored, batch: Sequence[Event]
    ) -> list[Digest | None]:
        """The digests of an event's hashes; None for those whose place is not known."""
        hashes, parent = event.block_hashes, event.parent_block_hash
        known = [part.digest_of(name, size) for name in hashes]
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
                    of_other = self._place(part, size, other, batch)
                    places |= dict(zip(other.block_hashes, of_other, strict=True))
            return [places[name] for name in hashes]
        salt, text = _salt_and_text(event)
        first = 0
        if parent is None:  # the salt is told with the first block
            start: Digest | None = Namespace(event.lora_name or "", salt).seed
        else:
            start = part.digest_of(parent, size)
        if start is None:
            # Blocks before the first known one have no place; the others follow it.
            first = next((n + 1 for n, digest in enumerate(known) if digest is not None), 0)
            start = known[first - 1] if first else None
        if start is None:
            return known
        fresh = extend(start, pack(event.token_ids[first * size : text * size]), size)
        found = [*known[:first], *fresh, *[None] * (len(hashes) - max(first, text))]
        return [old or new for old, new in zip(known, found, strict=True)]

    def _removed(self, part: Publisher, event: Removed) -> None:
        tier = _tier(event.medium, event.locality)
        slots = [
            slot
            for (of_tier, group), slot in part.slots.items()
            if of_tier == tier and event.group_idx in (None, group)
        ]
        for name in event.block_hashes:
            found = sum([self._take(slot, name) for slot in slots])
            if tier == "gpu" and part.view == "lost":
                part.known_in_a_row = part.known_in_a_row + 1 if found else 0
                if part.known_in_a_row >= _TURNED_OVER:
                    self.whole(part)

    def _cleared(self, part: Publisher) -> None:
        """vLLM has emptied its own cache. The pool has events of its own. The CPU's tier may have
        been emptied too, without an event, so it is forgotten with the GPU's."""
        self._retire(part, [key for key in part.slots if key[0] != "pool"])
        part.drop_estimates()
        self.whole(part)

    def _slot(self, part: Publisher, event: Stored) -> Slot | None:
        """The slot of an event, made when it is first needed; None if it can have none."""
        tier, group = _tier(event.medium, event.locality), event.group_idx or 0
        same = part.slots.get(("gpu", group))
        # Without tokens, an event tells of blocks that the GPU holds too.
        size = event.block_size if event.token_ids or same is None else same.block_tokens
        if tier is None or not 0 <= group < _MOST_GROUPS or size <= 0:
            return None
        slot = part.slots.get((tier, group))
        if slot is None or slot.block_tokens < size:
            if slot is not None:  # what it has are parts of blocks
                self._retire(part, [(tier, group)])
            # The pool's events do not tell the kind.
            kind, window = (same.kind, same.window_tokens) if same is not None else (None, 0)
            bit = ~self._bits & (self._bits + 1)  # the lowest that is not in use
            self._bits |= bit
            slot = part.slots[tier, group] = Slot(tier, group, size, bit, kind, window)
        if slot.block_tokens > size:
            return None
        if event.kv_cache_spec_kind is not None:
            for other in part.slots.values():
                if other.group == group:
                    other.kind = event.kv_cache_spec_kind
                    other.window_tokens = event.kv_cache_spec_sliding_window or 0
        return slot

    # Slots and their bits

    def _store(self, slot: Slot, name: Hash, digest: Digest) -> None:
        if name not in slot.blocks:
            slot.blocks[name] = digest
            self._where[digest] = self._where.get(digest, 0) | slot.bit
        elif slot.tier != "pool":  # which has a block once, also if two requests save it
            slot.copies[name] = slot.copies.get(name, 0) + 1

    def _take(self, slot: Slot, name: Hash) -> bool:
        """Remove a block. Returns whether it was known."""
        if name not in slot.blocks:
            return False
        if copies := slot.copies.pop(name, 0):
            if copies > 1:
                slot.copies[name] = copies - 1
        else:
            self._unset(slot.blocks.pop(name), slot.bit)
        return True

    def _unset(self, digest: Digest, bit: int) -> None:
        if mask := self._where.get(digest, 0) & ~bit:
            self._where[digest] = mask
        else:
            self._where.pop(digest, None)
            self._used.discard(digest)

    def _retire(self, part: Publisher, keys: Iterable[tuple[Tier, int]]) -> None:
        """Take slots out of use at once. `_sweep` takes their bits off the blocks."""
        self._forgotten.extend([part.slots.pop(key) for key in keys])
        self._sweep(_SWEPT_EACH_TIME)

    def _sweep(self, count: int) -> None:
        """Take the bits of slots that are out of use off `count` blocks. Until all blocks of a slot
        are swept, no other slot gets its bit."""
        while self._forgotten:
            slot = self._forgotten[0]
            while slot.blocks and count > 0:
                self._unset(slot.blocks.popitem()[1], slot.bit)
                count -= 1
            if slot.blocks:
                return
            self._forgotten.popleft()
            self._bits &= ~slot.bit

    def _tidy(self) -> None:
        if self._forgotten:
            unswept = sum([len(slot.blocks) for slot in self._forgotten])
            self._sweep(max(_SWEPT_EACH_TIME, unswept - self.most_blocks))
        self._trim()

    def _trim(self) -> None:
        """The engine with the most blocks loses its oldest ones: estimates first."""
        spare = self.most_blocks // _SPARED_SHARE
        while (over := self.size - self.most_blocks) > 0:
            count = over + self.most_blocks // _TRIMMED_SHARE
            part = max(self._parts.values(), key=lambda part: part.size)
            if part.estimates:
                part.drop_estimates(count)
                continue
            slot = max(part.slots.values(), key=lambda slot: len(slot.blocks))
            for name in list(islice(slot.blocks, count + spare)):
                digest = slot.blocks.pop(name)
                if spare > 0 and digest in self._used:
                    spare -= 1
                    self._used.discard(digest)
                    slot.blocks[name] = digest
                    continue
                self._unset(digest, slot.bit)
                slot.copies.pop(name, None)
                count -= 1
                if count == 0:
                    break

    # Walks

    def _walk(self, chain: PromptChain) -> dict[int, int]:
        """Tokens of the prefix that each slot of a full-attention group holds, by its bit, if it
        holds any. Without the pool."""
        wanted: dict[int, int] = {}  # bits by block size
        for part in self._parts.values():
            for slot in part.slots.values():
                if slot.tier != "pool" and slot.is_prefix:
                    wanted[slot.block_tokens] = wanted.get(slot.block_tokens, 0) | slot.bit
        lengths: dict[int, int] = {}
        for size, alive in wanted.items():
            held, digests = 0, chain.digests(size)
            ended: list[tuple[int, int]] = []  # bits, and how many blocks they have in common
            same: int | None = -1  # neighbours mostly have one mask
            for held, mask in enumerate(map(self._where.get, digests)):
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
            for bits, blocks in ended:
                while blocks and bits:
                    bit = bits & -bits
                    lengths[bit] = blocks * size
                    bits ^= bit
        return lengths

    def _run(self, chain: PromptChain, slot: Slot, bits: int) -> int:
        """Tokens of the longest prefix of which each block has one of the bits."""
        get, blocks = self._where.get, 0
        for digest in chain.digests(slot.block_tokens):
            if not get(digest, 0) & bits:
                break
            blocks += 1
        return blocks * slot.block_tokens

    def _length(
        self, chain: PromptChain, groups: Iterable[_Bits], lengths: Mapping[int, int]
    ) -> int:
        """Tokens of the prefix that the groups of one tier hold together."""
        groups = [(slot, bits) for slot, bits in groups if slot.counts]
        if not groups:
            return 0
        tokens = chain.tokens if groups[0][0].tier == "pool" else chain.tokens - 1
        for slot, bits in groups:
            if slot.is_prefix:
                tokens = min(tokens, lengths.get(bits, 0))
        step = math.lcm(*(slot.block_tokens for slot, _ in groups))
        others = [(slot, bits) for slot, bits in groups if not slot.is_prefix]
        while tokens > 0:
            tokens = before = tokens // step * step
            for slot, bits in others:
                tokens = min(tokens, self._last_window(chain, slot, bits, tokens))
            if tokens == before:
                break
        return tokens

    def _last_window(self, chain: PromptChain, slot: Slot, bits: int, tokens: int) -> int:
        """The longest prefix up to `tokens` that ends with what a window or a state needs."""
        size, window, get = slot.block_tokens, slot.window, self._where.get
        digests = chain.digests(size)
        end = tokens // size
        held = 0
        for block in range(end - 1, -1, -1):
            if get(digests[block], 0) & bits:
                held += 1
                if held == window:
                    break
            else:
                end, held = block, 0
        return end * size


def _estimated(part: Publisher, chain: PromptChain, now: float) -> int:
    """Tokens of the prefix that an engine should hold, by the prompts that were sent to it."""
    size, ends = part.estimate_tokens, part.estimates.get
    most, digests = (chain.tokens - 1) // size, chain.digests(size)
    if not digests or digests[0] not in part.estimates:
        return 0
    return size * bisect_left(digests, True, 0, most, key=lambda digest: ends(digest, now) <= now)


def _salt_and_text(event: Stored) -> tuple[str, int]:
    """The salt, and how many blocks hold text alone. A block's keys are the adapter's name, pairs
    for each image, the salt (of the first block), and digests of embeddings. Prompts with images or
    embeddings are not looked up, so their blocks are not indexed from there on."""
    count = len(event.block_hashes)
    if event.extra_keys is None:
        return "", count
    salt = ""
    for number, keys in enumerate(event.extra_keys):
        left = [key for key in keys or () if key != event.lora_name]
        if number == 0 and event.parent_block_hash is None and left and isinstance(left[0], str):
            salt = left.pop(0)
        if left:
            return salt, number
    return salt, min(count, len(event.extra_keys))


def _tier(medium: str | None, locality: str | None) -> Tier | None:
    if medium is None or medium == "GPU":
        return "gpu"
    if medium == "CPU" or locality == "LOCAL":
        return "cpu"
    return "pool" if medium == "STORAGE" else None
