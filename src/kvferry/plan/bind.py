# SPDX-License-Identifier: Apache-2.0
"""Binding: a plan, block ids and base addresses become strided batches, or arrays of copies.

All checks come before the result: tables must be long enough, ids in range, no hole where bytes
move, no destination block twice. The work is done for each *segment* (a block or less of one
layer): block ids become byte offsets, and neighbours merge. Rows (layers) are multiplied in last.
There is no loop over blocks, layers or tokens.

Strided batches (`Bound.batches`) are the primary form: a few numbers for each segment, which some
carriers and kernels take as they are. `Bound.copies` writes the same as arrays, into the caller's
buffer if it has one, with one broadcast for each batch. `Bound.slices` makes new arrays of a part.

`landing` says where an edge's bytes land, without the source's block ids. A destination that lets
a source write opens exactly these ranges, and expects exactly this many bytes. The ranges are a
little coarse: they may include parts of the same blocks that other edges of the request write,
but never another block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from kvferry.copies import Copies, StridedCopies
from kvferry.errors import BindError
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import EngineShape, Span
from kvferry.plan.edge import EdgePlan
from kvferry.plan.pieces import Piece, Runs, Side
from kvferry.plan.tokens import Segments, moved, paging_for, walk


def bind(
    plan: EdgePlan,
    *,
    tokens: int,
    src_tables: Sequence[ArrayLike],
    dst_tables: Sequence[ArrayLike],
    src_bases: ArrayLike,
    dst_bases: ArrayLike,
    skip: int = 0,
    allow_uncacheable: bool = False,
) -> Bound:
    """Bind a plan to one request.

    tokens       tokens whose cache the source has computed
    *_tables     for each block table of that side, the request's block ids from its first block on
    *_bases      address of each region of that rank
    skip         tokens at the front that the destination already holds
    allow_uncacheable  see `kvferry.plan.tokens.moved`
    """
    binder = Binder(
        [np.asarray(t, dtype=np.int64) for t in src_tables],
        [np.asarray(t, dtype=np.int64) for t in dst_tables],
        np.asarray(src_bases, dtype=np.int64),
        np.asarray(dst_bases, dtype=np.int64),
    )
    batches = _batches(plan, binder, tokens, skip, allow_uncacheable)
    return Bound(tuple(batch for _, batch in batches))


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A request's share of one edge, bound to memory."""

    batches: tuple[StridedCopies, ...]

    @property
    def bytes(self) -> int:
        return sum(batch.bytes for batch in self.batches)

    @property
    def entries(self) -> int:
        """Strided runs of all batches."""
        return sum(batch.entries for batch in self.batches)

    @property
    def descriptors(self) -> int:
        """Single copies of all batches."""
        return sum(batch.descriptors for batch in self.batches)

    def copies(self, out: Copies | None = None) -> Copies:
        """All copies as arrays, in plan order. They are written into `out` if it is given."""
        count = self.descriptors
        if out is None:
            out = Copies.empty(count)
        if len(out) < count:
            raise BindError(
                f"the buffer holds {len(out)} copies, but this request needs {count}; "
                "give a larger one, or take slices"
            )
        done = 0
        for batch in self.batches:
            whole = Span(0, len(batch.src_rows)), Span(0, len(batch.src_segments))
            done += batch.fill(out[done:], *whole, Span(0, len(batch.src_steps)))
        return out[:done]

    def slices(self, most: int) -> Iterator[Copies]:
        """The same copies in the same order, at most `most` at a time."""
        for batch in self.batches:
            for rows, segments, steps in _tiles(batch, most):
                out = Copies.empty(rows.size * segments.size * steps.size)
                batch.fill(out, rows, segments, steps)
                yield out


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """Ranges of the destination's memory, and the number of bytes that arrive in them."""

    address: Ints
    length: Ints
    bytes: int


def landing(
    plan: EdgePlan,
    *,
    tokens: int,
    dst_tables: Sequence[ArrayLike],
    dst_bases: ArrayLike,
    skip: int = 0,
) -> Landing:
    """Where a request's share of an edge lands. It checks the destination's tables like `bind`."""
    sides = [piece.src for piece in plan.pieces]
    binder = Binder(
        _any_tables(sides, tokens),
        [np.asarray(t, dtype=np.int64) for t in dst_tables],
        np.zeros(max((int(s.regions.max()) for s in sides), default=-1) + 1, dtype=np.int64),
        np.asarray(dst_bases, dtype=np.int64),
    )
    address, length = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    total = 0
    for piece, batch in _batches(plan, binder, tokens, skip):
        at, count = _hulls(batch, piece.dst.block_stride)
        address.append(at)
        length.append(count)
        total += batch.bytes
    return Landing(np.concatenate(address), np.concatenate(length), total)


def require_distinct_blocks(
    model: CacheModel,
    layout: RankLayout,
    src: EngineShape,
    *,
    tokens: int,
    dst_tables: Sequence[ArrayLike],
    skip: int = 0,
) -> None:
    """Refuse a block that a request uses twice in one memory pool, whichever edges write it.

    `bind` sees the tables of one edge. Groups that are overlaid in one pool may come over several
    edges, from different pipeline stages for example. Only this check sees all of them.
    """
    tables = [np.asarray(t, dtype=np.int64) for t in dst_tables]
    written: dict[int, dict[int, Ints]] = {}
    for part in layout.parts:
        group = model.group(part.group)
        range_ = moved(group, src, layout.shape, tokens, skip)
        if range_.size <= 0 or part.table >= len(tables):
            continue
        paging = paging_for(group, layout.shape, layout.rank.tp)
        first, last = range_.start // paging.span, -(-range_.stop // paging.span)
        if paging.ring or group.is_state:
            first, last = 0, 1
        ids = tables[part.table][first:last]
        ids = ids[ids != layout.shape.null_block] if layout.shape.null_block is not None else ids
        _note(written, part.pool, part.table, ids)
    _require_once(written)


@dataclass(slots=True)
class Binder:
    """Binds the pieces of one request. Pieces share its tables, checks and walks."""

    src_tables: list[Ints]
    dst_tables: list[Ints]
    src_bases: Ints
    dst_bases: Ints
    _segments: dict[object, Segments] = field(default_factory=dict)
    _ids: dict[object, Ints] = field(default_factory=dict)
    _written: dict[int, dict[int, Ints]] = field(default_factory=dict)  # by pool and table

    def batches(self, piece: Piece, span: Span) -> list[StridedCopies]:
        src, dst = piece.src, piece.dst
        key = (src.paging, dst.paging, span)
        if key not in self._segments:
            self._segments[key] = walk(src.paging, dst.paging, span)
        segments = self._segments[key]
        if len(segments.kinds) == 0:
            return []
        self._require_bases(piece)
        src_ids = self._block_ids("source", src, segments.src_block, key)
        dst_ids = self._block_ids("destination", dst, segments.dst_block, key)
        _note(self._written, dst.pool, dst.table, dst_ids[segments.dst_heads])
        return [
            self._batch(piece, runs, segments, which, src_ids, dst_ids)
            for runs, which in _by_template(piece, segments)
        ]

    def _require_bases(self, piece: Piece) -> None:
        for name, side, bases in (
            ("source", piece.src, self.src_bases),
            ("destination", piece.dst, self.dst_bases),
        ):
            needed = int(side.regions.max()) + 1
            if len(bases) < needed:
                raise BindError(
                    f"the {name} rank's layout has at least {needed} regions, but {len(bases)} "
                    "base addresses were given; give one address for each region"
                )

    def _block_ids(self, name: str, side: Side, blocks: Ints, key: object) -> Ints:
        """The checked ids of the blocks that the segments use."""
        known = (name, side.table, side.num_blocks, key)
        if known in self._ids:
            return self._ids[known]
        tables = self.src_tables if name == "source" else self.dst_tables
        if side.table >= len(tables):
            raise BindError(
                f"the {name} has a block table number {side.table}, but only {len(tables)} tables "
                "were given; give one table for each group of the engine"
            )
        table = tables[side.table]
        last = int(blocks.max())
        if last >= len(table):
            raise BindError(
                f"the {name}'s block table {side.table} is too short: the request needs block "
                f"number {last}, the table has {len(table)} entries; tables begin with the "
                "request's first block and mark dropped blocks with the null id"
            )
        ids = table[blocks]
        if int(ids.min()) < 0 or int(ids.max()) >= side.num_blocks:
            bad = ids[(ids < 0) | (ids >= side.num_blocks)]
            raise BindError(
                f"the {name}'s block table {side.table} names block {int(bad[0])}, but its ids go "
                f"from 0 to {side.num_blocks - 1}"
            )
        if side.null_block is not None and (ids == side.null_block).any():
            where = int(blocks[int(np.argmax(ids == side.null_block))])
            raise BindError(
                f"the {name}'s block table {side.table} has a hole (null block "
                f"{side.null_block}) at block number {where}, which the request needs; "
                + (
                    "the source has dropped it"
                    if name == "source"
                    else "allocate a block there before loading"
                )
            )
        self._ids[known] = ids
        return ids

    def require_distinct_destinations(self) -> None:
        """Refuse a destination block that is written twice, also through two overlaid tables."""
        _require_once(self._written)

    def _batch(
        self,
        piece: Piece,
        runs: Runs,
        segments: Segments,
        which: Ints | slice,
        src_ids: Ints,
        dst_ids: Ints,
    ) -> StridedCopies:
        src = _offsets(piece.src, src_ids[which], segments.src_slot[which], runs.src_slot)
        dst = _offsets(piece.dst, dst_ids[which], segments.dst_slot[which], runs.dst_slot)
        if not runs.entry_bytes:
            lengths = _constant(runs.length, len(src))
        elif len(segments.forms) == 1:
            lengths = _constant(int(segments.forms[0, 0]) * runs.entry_bytes, len(src))
        else:
            lengths = segments.forms[:, 0][segments.kinds[which]] * runs.entry_bytes
        joined = Copies(src, dst, lengths).joined()
        return StridedCopies(
            src_rows=self.src_bases[runs.src_regions] + runs.src_offsets,
            dst_rows=self.dst_bases[runs.dst_regions] + runs.dst_offsets,
            src_segments=joined.src,
            dst_segments=joined.dst,
            lengths=joined.length,
            src_steps=runs.src_steps,
            dst_steps=runs.dst_steps,
        )


def _batches(
    plan: EdgePlan, binder: Binder, tokens: int, skip: int, allow_uncacheable: bool = False
) -> Iterator[tuple[Piece, StridedCopies]]:
    """What a request moves over an edge, each batch with its piece."""
    ranges = {
        name: moved(group, plan.src_shape, plan.dst_shape, tokens, skip, allow_uncacheable)
        for name, group in plan.groups.items()
    }
    for piece in plan.pieces:
        for batch in binder.batches(piece, _moved_span(plan, piece, ranges[piece.group])):
            yield piece, batch
    binder.require_distinct_destinations()


def _moved_span(plan: EdgePlan, piece: Piece, range_: Span) -> Span:
    """Entries of a piece to move. An opaque page is one entry."""
    if not piece.opaque:
        return range_
    group = plan.groups[piece.group]
    if group.is_state or group.residency.kind == "ring":
        return Span(0, 1)
    block, _ = plan.dst_shape.entries(group)
    per_block = block * plan.dst_shape.dcp_for(group)
    if range_.size <= 0:
        return Span(0, 0)
    return Span(range_.start // per_block, -(-range_.stop // per_block))


def _by_template(piece: Piece, segments: Segments) -> Iterator[tuple[Runs, Ints | slice]]:
    """Runs, each with the segments that it moves. Equal templates go together."""
    alike: dict[tuple[object, ...], tuple[tuple[Runs, ...], list[int]]] = {}
    for kind, form in enumerate(segments.forms.tolist()):
        template = piece.template((form[0], form[1], form[2], form[3]))
        key = template.signature if template.linear else (kind,)
        alike.setdefault(key, (template.runs, []))[1].append(kind)
    for all_runs, kinds in alike.values():
        which: Ints | slice
        if len(alike) == 1:
            which = slice(None)
        elif len(kinds) == 1:
            which = np.flatnonzero(segments.kinds == kinds[0])
        else:
            which = np.flatnonzero(np.isin(segments.kinds, kinds))
        for runs in all_runs:
            yield runs, which


def _offsets(side: Side, ids: Ints, slots: Ints, slot_stride: int) -> Ints:
    """Byte offset of each segment's first slot from its row."""
    offsets: Ints = ids * side.block_stride
    if not slots.any():
        return offsets
    if side.paging.tile == 1:
        offsets += slots * slot_stride
        return offsets
    tile, slot = np.divmod(slots, side.paging.tile)
    offsets += tile * side.tile_stride + slot * slot_stride
    return offsets


def _constant(value: int, count: int) -> Ints:
    """An array of one repeated number. A stride of zero marks the repeated axis."""
    numbers: Ints = np.ndarray((count,), np.int64, np.array([value], dtype=np.int64), 0, (0,))
    numbers.flags.writeable = False
    return numbers


def _note(written: dict[int, dict[int, Ints]], pool: int, table: int, ids: Ints) -> None:
    """Remember a table's longest list of blocks. Its groups write different bytes of them."""
    tables = written.setdefault(pool, {})
    if table not in tables or len(ids) > len(tables[table]):
        tables[table] = ids


def _require_once(written: dict[int, dict[int, Ints]]) -> None:
    """Refuse a block that occurs twice in one pool; `written` has its blocks by pool and table."""
    for pool, tables in written.items():
        ids = np.sort(np.concatenate(list(tables.values())))
        twice = ids[1:][ids[1:] == ids[:-1]]
        if len(twice):
            raise BindError(
                f"destination block {int(twice[0])} appears twice in block tables "
                f"{sorted(tables)} (pool {pool}); each block of a request is written once"
            )


def _tiles(batch: StridedCopies, most: int) -> Iterator[tuple[Span, Span, Span]]:
    """Cut rows x segments x steps into boxes of at most `most` copies, in the same order."""
    sizes = (len(batch.src_rows), len(batch.src_segments), len(batch.src_steps))
    steps = min(sizes[2], most)
    segments = min(sizes[1], most // steps) if steps == sizes[2] else 1
    rows = min(sizes[0], most // (steps * segments)) if segments == sizes[1] else 1
    for r in range(0, sizes[0], max(rows, 1)):
        for s in range(0, sizes[1], max(segments, 1)):
            for k in range(0, sizes[2], steps):
                yield (
                    Span(r, min(r + rows, sizes[0])),
                    Span(s, min(s + segments, sizes[1])),
                    Span(k, min(k + steps, sizes[2])),
                )


def _any_tables(sides: Sequence[Side], tokens: int) -> list[Ints]:
    """Stand-ins for the source's tables: long enough, and full of one block that exists."""
    found = {side.table: int(side.null_block == 0) for side in sides}
    return [np.full(tokens + 1, found.get(table, 0)) for table in range(max(found, default=-1) + 1)]


def _hulls(batch: StridedCopies, block_stride: int) -> tuple[Ints, Ints]:
    """Ranges around the steps of each row and segment. Steps of different blocks stay apart."""
    steps = np.unique(batch.dst_steps)
    heads = np.flatnonzero(np.append(True, np.diff(steps) >= block_stride))
    first, last = steps[heads], steps[np.append(heads[1:], len(steps)) - 1]
    address = (
        batch.dst_rows[:, None, None] + batch.dst_segments[None, :, None] + first[None, None, :]
    )
    length = batch.lengths[None, :, None] + (last - first)[None, None, :]
    return address.ravel(), np.broadcast_to(length, address.shape).ravel()
