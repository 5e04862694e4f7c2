# SPDX-License-Identifier: Apache-2.0
"""Layouts of objects in the pool: records of them, reading another shape's objects, their registry.

**Records.** A record holds the model's description, the facts that engines compare at a handshake,
the writer's shape, and the layout of each of its ranks. Its id is a digest of these. So engines of
one shape share an id, and a damaged record is noticed. Ranks that hold the same bytes of a table
(replicated heads, latents) form one *fragment*, named after the first of them. They write its
blocks in turns.

**Reading** (`ReadPlan`). For each layout in the pool, a rank plans once, as if the writer were
another engine. A read binds the plan to tokens. The writer's blocks are numbered by their place in
the sequence, so a source address is an object and an offset in it.

**The registry** (`LayoutRegistry`). A namespace has a fixed number of index slots. A writer puts
its record under the layout's id, and the id into the first free slot. Nothing is ever changed, so
two writers cannot damage each other's entries. If the store has evicted a slot or a record, its
owner writes it again. Until then, engines that do not know the layout miss its objects.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np

from kvferry.errors import BindError, IncompatibleError, ProtocolError, text_of
from kvferry.handover.describe import (
    engine_info,
    rank_info,
    read_layout,
    read_model,
    read_shape,
)
from kvferry.layout.model import CacheModel, require_same_cache
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import EngineShape, Rank, Span
from kvferry.net.messages import EngineInfo, RankInfo
from kvferry.plan import EdgePlan, plan_pair
from kvferry.plan.bind import Binder
from kvferry.plan.pieces import Piece
from kvferry.pool.hits import Segment
from kvferry.pool.keys import INDEX_SLOTS, ContentChain, Fragment, KeyMetadata
from kvferry.pool.objects import (
    TableKind,
    block_span,
    compact,
    copies_of,
    object_memory,
    object_stride,
    table_kinds,
)
from kvferry.pool.orders import PoolCounters
from kvferry.pool.store import MOST_RECORD_BYTES, AlikeSlices, Outcome, Slices, Store

log = logging.getLogger("kvferry")

FORMAT = 1
ID_BYTES = 12
MOST_AHEAD = 64  # tokens; a draft of many modules reads one more with each


class LayoutRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A layout as the store keeps it."""

    format: int
    engine: EngineInfo
    ranks: list[RankInfo]
    ahead: dict[str, int] = {}  # by group of a draft model


_records = msgspec.msgpack.Decoder(LayoutRecord)  # made at import: many threads use it at once


@dataclass(frozen=True, slots=True, eq=False)
class PoolLayout:
    """A writer's layout, ready to plan with."""

    id: str
    encoded: bytes
    model: CacheModel
    meaning: dict[str, str]
    shape: EngineShape
    ranks: dict[Rank, RankLayout]  # compact layouts, of objects
    kinds: tuple[TableKind, ...]
    fragments: tuple[Fragment, ...]
    owner: dict[tuple[int, Rank], Fragment] = field(repr=False)  # by table and rank
    turns: dict[Fragment, tuple[Rank, ...]] = field(repr=False)  # ranks that write the fragment

    def kind(self, table: int) -> TableKind:
        return next(kind for kind in self.kinds if kind.table == table)

    @property
    def ahead(self) -> int:
        """Tokens after a block that must be known before it is saved."""
        return max(kind.ahead for kind in self.kinds)

    def contents(self, chain: ContentChain, table: int) -> list[str]:
        """Content hashes of a sequence's whole blocks in a table."""
        kind = self.kind(table)
        return chain.digests(kind.block_tokens, ahead=kind.ahead)

    def block_tokens(self, group: str) -> int:
        return next(kind.block_tokens for kind in self.kinds if group in kind.groups)


def make_layout(
    model: CacheModel,
    meaning: Mapping[str, str],
    ranks: Sequence[RankLayout],
    draft_ahead: int = 1,
) -> PoolLayout:
    """The layout of an engine, from the memory of all its ranks.

    draft_ahead  tokens after a block on which a draft model's bytes depend
    """
    compacted = [compact(layout, object_memory(model, layout)) for layout in ranks]
    shape = compacted[0].shape
    nameless = CacheModel("", model.groups, model.total_layers)  # the name is a path
    compacted.sort(key=lambda layout: layout.rank)
    record = LayoutRecord(
        FORMAT,
        engine_info("", "", nameless, shape, meaning),
        [rank_info(r, [0] * len(r.regions), "", "", {}) for r in compacted],
        {group.name: draft_ahead for group in model.groups if group.role == "draft"},
    )
    return _ready(msgspec.msgpack.encode(record), record)


def layout_id(encoded: bytes) -> str:
    return blake2b(encoded, digest_size=ID_BYTES).hexdigest()


def read_record(encoded: bytes, expected_id: str) -> PoolLayout:
    """Check and read a record from a store. Raises a `KvferryError` with the reason."""
    if len(encoded) > MOST_RECORD_BYTES or layout_id(encoded) != expected_id:
        raise ProtocolError(
            f"the record of layout {expected_id} has {len(encoded)} bytes and the digest "
            f"{layout_id(encoded)}; it was damaged, and its objects cannot be read"
        )
    try:
        record = _records.decode(encoded)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"layout {expected_id} cannot be read: {error}") from None
    if record.format != FORMAT:
        raise ProtocolError(
            f"layout {expected_id} has format {record.format}; this version reads {FORMAT}"
        )
    return _ready(encoded, record)


def _ready(encoded: bytes, record: LayoutRecord) -> PoolLayout:
    model, shape = read_model(record.engine), read_shape(record.engine)
    ranks = {}
    for info in record.ranks:
        layout, _ = read_layout(info, shape, whole=False)
        ranks[layout.rank] = layout
    missing = sorted(set(shape.ranks) ^ set(ranks))
    if missing:
        raise ProtocolError(f"a layout's record lacks or repeats ranks {missing}")
    drafts = {group.name for group in model.groups if group.role == "draft"}
    if record.ahead.keys() != drafts or not all(
        0 <= tokens <= MOST_AHEAD for tokens in record.ahead.values()
    ):  # earlier versions did not say it, and keyed these blocks by too few tokens
        raise ProtocolError(
            f"a layout's record must say, for each draft group of {sorted(drafts)}, on how many "
            f"tokens after a block its bytes depend (0 to {MOST_AHEAD}), found {record.ahead}"
        )
    tables: dict[int, set[str]] = {}
    for layout in ranks.values():
        for part in layout.parts:
            tables.setdefault(part.table, set()).add(part.group)
    owner, turns = _replicas(ranks)
    return PoolLayout(
        id=layout_id(encoded),
        encoded=encoded,
        model=model,
        meaning=dict(record.engine.meaning),
        shape=shape,
        ranks=ranks,
        kinds=tuple(table_kinds(model, shape, tables, record.ahead)),
        fragments=tuple(sorted(turns)),
        owner=owner,
        turns=turns,
    )


def _replicas(
    ranks: Mapping[Rank, RankLayout],
) -> tuple[dict[tuple[int, Rank], Fragment], dict[Fragment, tuple[Rank, ...]]]:
    """Group ranks whose objects of a table hold the same bytes into fragments."""
    first: dict[object, Fragment] = {}
    owner: dict[tuple[int, Rank], Fragment] = {}
    turns: dict[Fragment, list[Rank]] = {}
    for rank, layout in sorted(ranks.items()):
        for table in sorted({part.table for part in layout.parts}):
            parts = tuple(
                (
                    part.group,
                    tuple(part.layers.tolist()),
                    tuple(
                        (p.component, p.units, tuple(p.offsets.tolist())) for p in part.placements
                    ),
                )
                for part in layout.parts
                if part.table == table
            )
            # The content of opaque pages is unknown, so they have no replicas.
            opaque = any(part.is_opaque for part in layout.parts if part.table == table)
            phase = rank.tp if opaque else rank.tp % layout.shape.dcp
            held = (table, rank.pp, phase, parts)
            fragment = first.setdefault(held, Fragment(table, rank.pp, rank.tp))
            owner[table, rank] = fragment
            turns.setdefault(fragment, []).append(rank)
    return owner, {fragment: tuple(members) for fragment, members in turns.items()}


def require_readable(ours: PoolLayout, theirs: PoolLayout) -> None:
    """Refuse a record whose bytes have another meaning, although its key says the same."""
    require_same_cache(theirs.model, ours.model)
    if theirs.meaning != ours.meaning:
        raise IncompatibleError(
            f"layout {theirs.id} holds {theirs.meaning}, this engine {ours.meaning}"
        )


TABLE_SHIFT = 52  # a source address of a ReadPlan is table << 52 | block * stride | offset


@dataclass(frozen=True, slots=True, eq=False)
class WantedParts:
    """Parts of objects: `slices[i]` of block `blocks[i]` of `fragments[i]`."""

    fragments: list[Fragment]
    blocks: list[int]
    starts: list[int]  # first wanted token of each
    slices: Sequence[Slices]


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """How one rank reads one layout. It is made once and kept."""

    theirs: PoolLayout
    ours: RankLayout
    plans: tuple[EdgePlan, ...]

    def bind(self, segment: Segment, tables: Sequence[Ints], bases: Ints) -> WantedParts:
        """The parts of objects to read for a segment, into these blocks."""
        src_bases = np.arange(self._tables, dtype=np.int64) << TABLE_SHIFT
        fragments = self.theirs.fragments
        made: list[tuple[Ints, Ints, Ints, Ints]] = []
        for plan in self.plans:
            group = plan.groups.get(segment.group)
            if group is None:
                continue
            span = block_span(group, self.theirs.shape)
            if group.is_state:
                numbers = np.asarray([segment.stop // span - 1], dtype=np.int64)
                dst_tables = [self._state_block(t, segment, tables) for t in range(len(tables))]
            else:
                numbers = np.arange(-(-segment.stop // span), dtype=np.int64)
                dst_tables = list(tables)
            binder = Binder([numbers] * self._tables, dst_tables, src_bases, bases)
            for piece in plan.pieces:
                if piece.group != segment.group:
                    continue
                copies = copies_of(binder, piece, self._span(plan, piece, segment))
                if len(copies) == 0:
                    continue
                at = copies.src & ((1 << TABLE_SHIFT) - 1)
                stride = object_stride(self.theirs.ranks[plan.src].regions[piece.src.table].bytes)
                number = fragments.index(self.theirs.owner[piece.src.table, plan.src])
                block = at // stride
                objects = block * len(fragments) + number
                made.append((objects, at - block * stride, copies.dst, copies.length))
            binder.require_distinct_destinations()
        return self._grouped(segment, made)

    @property
    def _tables(self) -> int:
        return max(layout.tables for layout in self.theirs.ranks.values())

    def _state_block(self, table: int, segment: Segment, tables: Sequence[Ints]) -> Ints:
        """The block of a state is the one of its last token."""
        for part in self.ours.parts_of(segment.group):
            if part.table == table:
                group = self.theirs.model.group(segment.group)
                number = segment.stop // block_span(group, self.ours.shape) - 1
                if not 0 <= number < len(tables[table]):
                    raise BindError(
                        f"block table {table} has no block number {number} for a state at token "
                        f"{segment.stop}"
                    )
                return tables[table][number : number + 1]
        return tables[table]

    def _span(self, plan: EdgePlan, piece: Piece, segment: Segment) -> Span:
        """The entries of a piece. A state or an opaque page is one entry."""
        group = plan.groups[piece.group]
        if group.is_state:
            return Span(0, 1)
        per = block_span(group, self.ours.shape) if piece.opaque else group.tokens_per_entry
        if segment.start % per or segment.stop % per:
            raise BindError(
                f"tokens {segment.start}..{segment.stop} of group {segment.group!r} do not begin "
                f"and end at a multiple of {per}"
            )
        return Span(segment.start // per, segment.stop // per)

    def _grouped(
        self, segment: Segment, made: Sequence[tuple[Ints, Ints, Ints, Ints]]
    ) -> WantedParts:
        """Group copies (object, offset, address, length) by object, in the order of blocks."""
        if not made:
            return WantedParts([], [], [], [])
        objects, offset, address, length = (np.concatenate([m[i] for m in made]) for i in range(4))
        order = np.argsort(objects, kind="stable")
        objects = objects[order]
        heads = np.concatenate(([0], np.flatnonzero(np.diff(objects)) + 1))
        fragments = self.theirs.fragments
        blocks, which = np.divmod(objects[heads], len(fragments))
        group = self.theirs.model.group(segment.group)
        span = block_span(group, self.theirs.shape)
        starts = np.maximum(blocks * span, 0 if group.is_state else segment.start)
        return WantedParts(
            [fragments[i] for i in which.tolist()],
            blocks.tolist(),
            starts.tolist(),
            _slices(offset[order], address[order], length[order], heads),
        )


def _slices(offset: Ints, address: Ints, length: Ints, heads: Ints) -> Sequence[Slices]:
    """Cut before each head. Usually the same parts of all objects are wanted."""
    count, per = len(heads), len(offset) // len(heads)
    if np.array_equal(heads, np.arange(count) * per) and count * per == len(offset):
        offsets, lengths = offset.reshape(count, per), length.reshape(count, per)
        first, sizes = offsets[0], lengths[0]
        if (offsets == first).all() and (lengths == sizes).all():
            return AlikeSlices(first, address.reshape(count, per), sizes)
    cuts = heads[1:]
    parts = zip(
        np.split(offset, cuts), np.split(address, cuts), np.split(length, cuts), strict=True
    )
    return [Slices(*part) for part in parts]


def plan_read(theirs: PoolLayout, model: CacheModel, ours: RankLayout) -> ReadPlan:
    """Plan all that a rank can read of a layout. Raises the planner's reason if it cannot."""
    pair = plan_pair(theirs.model, theirs.shape, ours.shape, dst_model=model)
    plans = [
        pair.plan(edge, theirs.ranks[edge.src], ours)
        for edge in pair.edges
        if edge.dst == ours.rank
    ]
    return ReadPlan(theirs, ours, tuple(plans))


REFRESH_SECONDS = 0.5  # a new layout is noticed within this time, if a request comes


class LayoutRegistry:
    """The layouts of one namespace: publishes our own, finds others. For one thread at a time."""

    def __init__(self, metadata: KeyMetadata, ours: PoolLayout, counters: PoolCounters) -> None:
        self.metadata, self.ours = metadata, ours
        self._counters = counters
        self._known: dict[str, PoolLayout] = {ours.id: ours}
        self._refused: set[str] = set()
        self._crowded = False  # the log says so once
        self._next = 0.0
        self.refreshed_at = -math.inf  # new layouts are noticed soon after this

    @property
    def layouts(self) -> list[PoolLayout]:
        return list(self._known.values())

    def refresh(self, store: Store, deadline: float) -> None:
        """Every `REFRESH_SECONDS`, look for new layouts, and publish ours if it is missing."""
        now = time.monotonic()
        if now >= self._next:
            self._look(store, deadline)
            self._next = now + REFRESH_SECONDS
        self.refreshed_at = time.monotonic()

    def _look(self, store: Store, deadline: float) -> None:
        index = self.metadata.index_keys()
        record = self.metadata.record_key(self.ours.id)
        found = store.exists([*index, record], deadline)
        slots: dict[str, str] = {}  # layout id by index key
        for key, here in zip(index, found.tolist(), strict=False):
            name = store.get_bytes(key, deadline) if here else None
            if name is not None:
                slots[key] = name.decode(errors="replace")
        for layout_id in set(slots.values()) - set(self._known) - self._refused:
            self._learn(store, layout_id, deadline)
        if not found[-1]:
            self._count(store.put_bytes(record, self.ours.encoded, deadline))
        if self.ours.id not in slots.values():
            self._take_slot(store, [key for key in index if key not in slots], deadline)

    def _learn(self, store: Store, layout_id: str, deadline: float) -> None:
        encoded = store.get_bytes(self.metadata.record_key(layout_id), deadline)
        if encoded is None:
            self._counters.add("layouts_missing")
            return
        try:
            layout = read_record(encoded, layout_id)
            require_readable(self.ours, layout)
            for rank in self.ours.ranks.values():  # the scheduler promises only what all can read
                plan_read(layout, self.ours.model, rank)
        except Exception as error:  # a record may hold anything
            self._refused.add(layout_id)
            self._counters.add("layouts_refused")
            log.warning("layout %s of the pool is not read: %s", layout_id, text_of(error))
            return
        self._known[layout_id] = layout
        log.info("the pool has a layout %s: %s", layout_id, layout.shape.describe())

    def _take_slot(self, store: Store, free: list[str], deadline: float) -> None:
        for key in free:
            outcome = store.put_bytes(key, self.ours.id.encode(), deadline)
            if outcome is Outcome.EXISTS:  # another engine was faster, perhaps with our layout
                name = store.get_bytes(key, deadline)
                if name != self.ours.id.encode():
                    continue
            elif outcome is not Outcome.DONE:
                self._count(outcome)
                return
            self._counters.add("layouts_published")
            return
        if self._crowded:
            return
        self._crowded = True
        log.error(
            "all %d layouts of the pool's namespace are taken: other engines cannot find what this "
            "engine saves; give it its own `cache_prefix`",
            INDEX_SLOTS,
        )

    def _count(self, outcome: Outcome) -> None:
        if outcome not in (Outcome.DONE, Outcome.EXISTS):
            self._counters.add("layouts_unpublished")
