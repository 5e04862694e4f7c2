# SPDX-License-Identifier: Apache-2.0
"""A block as an object: the memory that it consists of, and where in the object each byte lies.

An object is the memory of one block of one block table on one rank: its ranges in ascending order,
one after the other. The store takes it as it lies, so kvferry makes no copy of its own.

To the planner, an object is a block of a rank whose memory consists of such blocks. `compact` gives
that rank's layout, with the same axes, and with strides inside the object. The layout depends on
the shape alone, not on the number of blocks, so engines of one shape share one layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from kvferry.copies import Copies
from kvferry.errors import DescriptionError
from kvferry.layout.model import CacheModel, Group, Residency
from kvferry.layout.placement import Ints, Part, Placement, RankLayout, Region
from kvferry.layout.shape import EngineShape, Span
from kvferry.plan.bind import Binder, Bound
from kvferry.plan.cover import everything_plan
from kvferry.plan.pieces import Piece
from kvferry.pool.store import AlikeSlices

REGION_SHIFT = 44  # an address in this module is region << 44 | offset
MANY_BLOCKS = 1 << 40  # an object's block id is its block number in the sequence
GUARD_BYTES = 64  # between objects, so that no run of the planner spans two


@dataclass(frozen=True, slots=True)
class TableKind:
    """What the blocks of one block table hold, on every rank of an engine."""

    table: int
    groups: tuple[str, ...]
    block_tokens: int  # positions that one block covers over all context parallel ranks
    residency: Residency
    ahead: int = 0  # tokens after a block on which its bytes depend too


@dataclass(frozen=True, slots=True, eq=False)
class ObjectMemory:
    """The ranges of block 0 of one table in this rank's memory. Block b is b strides further."""

    regions: Ints
    offsets: Ints
    lengths: Ints
    strides: Ints
    starts: Ints  # of each range in the object

    @property
    def object_bytes(self) -> int:
        return int(self.lengths.sum())

    def blocks(self, bases: Ints, block_ids: Ints) -> AlikeSlices:
        """The memory of these blocks, each of them an object."""
        first = bases[self.regions] + self.offsets
        addresses = first[None, :] + block_ids[:, None] * self.strides[None, :]
        return AlikeSlices(self.starts, addresses, self.lengths)

    def position(self, regions: Ints, offsets: Ints) -> Ints:
        """Offsets in the object of bytes of block 0."""
        known = (self.regions << REGION_SHIFT) + self.offsets
        asked = (regions << REGION_SHIFT) + offsets
        index = np.maximum(np.searchsorted(known, asked, side="right") - 1, 0)
        inside = asked - known[index]
        if bool(((inside < 0) | (inside >= self.lengths[index])).any()):
            raise DescriptionError("a block's layout reaches outside of the block's own memory")
        found: Ints = self.starts[index] + inside
        return found


def table_kinds(
    model: CacheModel, shape: EngineShape, tables: dict[int, set[str]], ahead: Mapping[str, int]
) -> list[TableKind]:
    """What each table holds. Raises the reason why a table cannot be kept in a pool.

    ahead  tokens after a block on which its bytes depend, by group
    """
    kinds = []
    for table, names in sorted(tables.items()):
        groups = [model.group(name) for name in sorted(names)]
        if any(group.residency.kind == "ring" for group in groups):
            raise DescriptionError(
                f"block table {table} is a ring, which keeps no whole blocks; it cannot be kept in "
                "a pool"
            )
        facts = {(block_span(group, shape), group.residency) for group in groups}
        if len(facts) > 1:
            raise DescriptionError(
                f"block table {table} serves groups {sorted(names)} with different block sizes or "
                f"residencies: {facts}"
            )
        span, residency = facts.pop()
        most = max(ahead.get(name, 0) for name in names)
        kinds.append(TableKind(table, tuple(sorted(names)), span, residency, most))
    return kinds


def block_span(group: Group, shape: EngineShape) -> int:
    """Positions that a block of a group covers."""
    return shape.block_tokens(group) * shape.dcp_for(group)


def copies_of(binder: Binder, piece: Piece, span: Span) -> Copies:
    """All copies of a piece, over these entries."""
    batches = binder.batches(piece, span)
    return Bound(tuple(batches)).copies()


def object_memory(model: CacheModel, layout: RankLayout) -> dict[int, ObjectMemory]:
    """The memory of block 0, for each table of which this rank has layers."""
    found: dict[int, list[tuple[Ints, Ints, int]]] = {}  # by table
    anywhere = replace(layout.shape, null_block=None)
    plan = everything_plan(model, replace(layout, shape=anywhere))
    tables = [np.zeros(1, dtype=np.int64)] * layout.tables
    bases = np.arange(len(layout.regions), dtype=np.int64) << REGION_SHIFT
    for piece in plan.pieces:
        binder = Binder(tables, tables, bases, bases)
        copies = copies_of(binder, piece, Span(0, piece.dst.paging.block_entries))
        ranges = copies.dst, copies.length, piece.dst.block_stride
        found.setdefault(piece.dst.table, []).append(ranges)
    for part in layout.parts:
        if part.is_opaque:
            first = part.placements[0]
            lengths = np.full(len(part.layers), part.page_bytes, dtype=np.int64)
            at = (first.regions << REGION_SHIFT) + first.offsets
            found.setdefault(part.table, []).append((at, lengths, first.block_stride))
    return {table: _merged(table, ranges) for table, ranges in sorted(found.items())}


def _merged(table: int, ranges: list[tuple[Ints, Ints, int]]) -> ObjectMemory:
    """Sort ranges by address and join neighbours."""
    at = np.concatenate([r[0] for r in ranges])
    lengths = np.concatenate([r[1] for r in ranges])
    strides = np.concatenate([np.full(len(r[0]), r[2], dtype=np.int64) for r in ranges])
    order = np.argsort(at, kind="stable")
    at, lengths, strides = at[order], lengths[order], strides[order]
    if bool((at[1:] < (at + lengths)[:-1]).any()):
        raise DescriptionError(f"layers of block table {table} share bytes of one block")
    apart = (at[1:] != (at + lengths)[:-1]) | (strides[1:] != strides[:-1])
    heads = np.concatenate(([0], np.flatnonzero(apart) + 1))
    joined = np.add.reduceat(lengths, heads)
    at, strides = at[heads], strides[heads]
    mask = (1 << REGION_SHIFT) - 1
    starts = np.cumsum(joined) - joined
    return ObjectMemory(at >> REGION_SHIFT, at & mask, joined, strides, starts)


def compact(layout: RankLayout, memory: dict[int, ObjectMemory]) -> RankLayout:
    """The layout of a rank whose memory is this rank's objects: region t is table t's."""
    parts = tuple(_compact_part(part, memory[part.table]) for part in layout.parts)
    regions = tuple(
        Region(f"table {t}", memory[t].object_bytes if t in memory else 0)
        for t in range(layout.tables)
    )
    # A pool keeps blocks of windows as long as others.
    shape = replace(layout.shape, null_block=None, full_residency=True, overlay=False, page_align=1)
    return RankLayout(layout.rank, shape, parts, regions, layout.tables)


def object_stride(object_bytes: int) -> int:
    """The distance between objects in the compact layout."""
    return object_bytes + GUARD_BYTES


def _compact_part(part: Part, memory: ObjectMemory) -> Part:
    placements = tuple(_compact_placement(part, p, memory) for p in part.placements)
    return replace(
        part,
        pool=part.table,
        num_blocks=MANY_BLOCKS,
        page_slack=0,
        placements=placements,
    )


def _compact_placement(part: Part, p: Placement, memory: ObjectMemory) -> Placement:
    offsets = memory.position(p.regions, p.offsets)

    def inner(stride: int, times: int) -> int:
        """The stride inside the object."""
        if times < 2:
            return 0
        step = memory.position(p.regions[:1], p.offsets[:1] + stride) - offsets[:1]
        return int(step[0])

    tiles = part.block_entries // p.tile_slots
    even = p.tile_stride == p.tile_slots * p.slot_stride
    slot = inner(p.slot_stride, part.block_entries if even else p.tile_slots)
    tile = p.tile_slots * slot if even or tiles < 2 else inner(p.tile_stride, tiles)
    unit = inner(p.unit_stride, p.units.size)
    dims = tuple(inner(s, n) for s, n in zip(p.dim_strides, p.dim_sizes, strict=True))
    made = replace(
        p,
        block_stride=object_stride(memory.object_bytes),
        tile_stride=tile,
        slot_stride=slot,
        unit_stride=unit,
        dim_strides=dims,
        regions=np.full(len(p.regions), part.table, dtype=np.int64),
        offsets=offsets,
    )
    if not part.is_opaque:
        _require_affine(part, p, made, memory)
    return made


def _require_affine(part: Part, p: Placement, made: Placement, memory: ObjectMemory) -> None:
    """Require that strides in the object lead to the same bytes as in memory, on every axis."""
    tiles = part.block_entries // p.tile_slots
    axes = [
        (tiles, p.tile_stride, made.tile_stride),
        (p.tile_slots, p.slot_stride, made.slot_stride),
        (p.units.size, p.unit_stride, made.unit_stride),
        *zip(p.dim_sizes, p.dim_strides, made.dim_strides, strict=True),
    ]
    for corner in product(*[sorted({0, min(1, n - 1), n - 1}) for n, _, _ in axes]):
        here = sum(i * before for i, (_, before, _) in zip(corner, axes, strict=True))
        there = sum(i * after for i, (_, _, after) in zip(corner, axes, strict=True))
        if (memory.position(p.regions, p.offsets + here) != made.offsets + there).any():
            raise DescriptionError(
                f"group {part.group!r}: a block's memory is not evenly spaced, so that it cannot "
                "be described as an object"
            )
