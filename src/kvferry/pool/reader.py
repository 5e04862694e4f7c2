"""Reading another shape's objects: the planner's copies, turned into parts of objects.

For each layout in the pool, a rank plans once: every writer rank that holds something of ours, as
the planner sees any other engine. A read binds these plans to tokens: blocks of the writer are
numbered by their place in the sequence, so an address on the source side *is* an object and an
offset in it. The result is one list of slices an object, with only the bytes that are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import BindError
from kvferry.layout.model import CacheModel
from kvferry.layout.parts import Ints
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import Span
from kvferry.plan import EdgePlan, plan_pair
from kvferry.plan.bind import Binder
from kvferry.plan.bound import Bound
from kvferry.plan.piece import Piece
from kvferry.pool.hits import Segment
from kvferry.pool.keys import Fragment
from kvferry.pool.objects import block_span, object_stride
from kvferry.pool.records import PoolLayout
from kvferry.pool.store import Slices

TABLE_SHIFT = 52  # a source address here is table << 52 | block * stride | offset


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Parts of objects: `slices[i]` of block `blocks[i]` of `fragments[i]`."""

    fragments: list[Fragment]
    blocks: list[int]
    starts: list[int]  # first token of each that was asked for
    slices: list[Slices]

    @property
    def bytes(self) -> int:
        return sum(int(s.length.sum()) for s in self.slices)


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """How one rank reads one layout; made once, kept."""

    theirs: PoolLayout
    ours: RankLayout
    plans: tuple[EdgePlan, ...]

    def bind(self, segment: Segment, tables: Sequence[Ints], bases: Ints) -> Wanted:
        """What to read for a segment into these blocks."""
        src_bases = np.arange(self._tables, dtype=np.int64) << TABLE_SHIFT
        made: list[tuple[Ints, Ints, Ints, Ints]] = []
        fragments: list[Fragment] = []
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
                batches = binder.batches(piece, self._span(plan, piece, segment))
                copies = Bound(tuple(batches), 0, sum(b.descriptors for b in batches)).copies()
                if len(copies) == 0:
                    continue
                at = copies.src & ((1 << TABLE_SHIFT) - 1)
                stride = object_stride(self.theirs.ranks[plan.src].regions[piece.src.table].bytes)
                fragments.append(self.theirs.owner[piece.src.table, plan.src])
                which = np.full(len(copies), len(fragments) - 1, dtype=np.int64)
                block = at // stride
                made.append(((which << 40) + block, at - block * stride, copies.dst, copies.length))
            binder.require_distinct_destinations()
        return self._grouped(segment, made, fragments)

    @property
    def _tables(self) -> int:
        return max(layout.tables for layout in self.theirs.ranks.values())

    def _state_block(self, table: int, segment: Segment, tables: Sequence[Ints]) -> Ints:
        """A state lies in the block that its last token is in."""
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
        """Entries of a piece; a state or an opaque page is one entry."""
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
        self,
        segment: Segment,
        made: list[tuple[Ints, Ints, Ints, Ints]],
        fragments: list[Fragment],
    ) -> Wanted:
        """One list of slices an object, objects in the order of their blocks."""
        if not made:
            return Wanted([], [], [], [])
        distinct = sorted(set(fragments))
        number = np.asarray([distinct.index(f) for f in fragments], dtype=np.int64)
        keys, offset, address, length = (np.concatenate([m[i] for m in made]) for i in range(4))
        block = keys & ((1 << 40) - 1)
        objects = block * len(distinct) + number[keys >> 40]
        order = np.argsort(objects, kind="stable")
        objects, offset = objects[order], offset[order]
        address, length = address[order], length[order]
        heads = np.concatenate(([0], np.flatnonzero(np.diff(objects)) + 1))
        blocks, which = np.divmod(objects[heads], len(distinct))
        group = self.theirs.model.group(segment.group)
        span = block_span(group, self.theirs.shape)
        starts = np.maximum(blocks * span, 0 if group.is_state else segment.start)
        return Wanted(
            [distinct[i] for i in which.tolist()],
            blocks.tolist(),
            starts.tolist(),
            _slices(offset, address, length, heads),
        )


def _slices(offset: Ints, address: Ints, length: Ints, heads: Ints) -> list[Slices]:
    """Cut before each head. Objects of which the same is wanted, as most are, share its arrays."""
    count, per = len(heads), len(offset) // len(heads)
    if np.array_equal(heads, np.arange(count) * per) and count * per == len(offset):
        offsets, lengths = offset.reshape(count, per), length.reshape(count, per)
        first, sizes = offsets[0], lengths[0]
        if (offsets == first).all() and (lengths == sizes).all():
            return [Slices(first, row, sizes) for row in address.reshape(count, per)]
    cuts = heads[1:]
    parts = zip(
        np.split(offset, cuts), np.split(address, cuts), np.split(length, cuts), strict=True
    )
    return [Slices(*part) for part in parts]


def plan_read(theirs: PoolLayout, model: CacheModel, ours: RankLayout) -> ReadPlan:
    """Plan all that a rank can read of a layout, or refuse with the planner's reason."""
    pair = plan_pair(theirs.model, theirs.shape, ours.shape, dst_model=model)
    plans = [
        pair.plan(edge, theirs.ranks[edge.src], ours)
        for edge in pair.edges
        if edge.dst == ours.rank
    ]
    return ReadPlan(theirs, ours, tuple(plans))
