"""Binding: a plan, block ids and base addresses in; strided batches or copies out.

Everything is checked before anything is emitted: tables long enough, ids in range, no hole in what
moves, no destination block twice. Then the work is per *segment* (a block or less of one layer):
ids become byte offsets, neighbours merge, and rows (layers) are multiplied in only at the end
(`bound`). There is no loop over blocks, layers or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from kvferry.errors import BindError, LimitError
from kvferry.layout.parts import Ints
from kvferry.layout.shape import Span
from kvferry.plan.bound import Batch, Bound
from kvferry.plan.edge import EdgePlan
from kvferry.plan.piece import Piece, Runs, Side
from kvferry.plan.tokens import Moved, Segments, moved, walk


def bind(
    plan: EdgePlan,
    *,
    tokens: int,
    src_tables: Sequence[ArrayLike],
    dst_tables: Sequence[ArrayLike],
    src_bases: ArrayLike,
    dst_bases: ArrayLike,
    skip: int = 0,
    limit: int | None = None,
    allow_uncacheable: bool = False,
) -> Bound:
    """Bind a plan to one request.

    tokens       tokens whose cache the source has computed
    *_tables     for each block table of that side, the request's block ids from its first block on
    *_bases      address of each region of that rank
    skip         tokens at the front that the destination already holds
    limit        most descriptors allowed
    allow_uncacheable  see `kvferry.plan.tokens.moved`
    """
    binder = Binder(
        [np.asarray(t, dtype=np.int64) for t in src_tables],
        [np.asarray(t, dtype=np.int64) for t in dst_tables],
        np.asarray(src_bases, dtype=np.int64),
        np.asarray(dst_bases, dtype=np.int64),
    )
    ranges = {
        name: moved(group, plan.src_shape, plan.dst_shape, tokens, skip, allow_uncacheable)
        for name, group in plan.groups.items()
    }
    batches = [
        batch
        for piece in plan.pieces
        for batch in binder.batches(piece, moved_span(plan, piece, ranges[piece.group]))
    ]
    binder.require_distinct_destinations()
    descriptors = sum(batch.descriptors for batch in batches)
    if limit is not None and descriptors > limit:
        raise LimitError(
            f"this request needs {descriptors} descriptors from rank {tuple(plan.src)} to rank "
            f"{tuple(plan.dst)}, more than the limit of {limit}; take strided runs or slices, "
            "or raise the limit"
        )
    return Bound(tuple(batches), sum(batch.bytes for batch in batches), descriptors)


def moved_span(plan: EdgePlan, piece: Piece, range_: Moved) -> Span:
    """Entries of a piece to move; an opaque page is one entry, and moves whole."""
    if not piece.opaque:
        return range_.range
    group = plan.groups[piece.group]
    if group.is_state or group.residency.kind == "ring":
        return Span(0, 1)
    block, _ = plan.dst_shape.entries(group)
    per_block = block * plan.dst_shape.dcp_for(group)
    if range_.range.size <= 0:
        return Span(0, 0)
    return Span(range_.range.start // per_block, -(-range_.range.stop // per_block))


@dataclass(slots=True)
class Binder:
    """What pieces of one request share while they are bound: tables, checks, walks."""

    src_tables: list[Ints]
    dst_tables: list[Ints]
    src_bases: Ints
    dst_bases: Ints
    _segments: dict[object, Segments] = field(default_factory=dict)
    _ids: dict[object, Ints] = field(default_factory=dict)
    _written: dict[int, dict[int, Ints]] = field(default_factory=dict)  # by pool and table

    def batches(self, piece: Piece, span: Span) -> list[Batch]:
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
        self._note_written(dst, dst_ids[segments.dst_heads])
        return [
            self._batch(piece, runs, segments, which, src_ids, dst_ids)
            for runs, which in _by_template(piece, segments)
        ]

    def _note_written(self, side: Side, ids: Ints) -> None:
        """Remember the most blocks a table has: its groups write different bytes of them."""
        tables = self._written.setdefault(side.pool, {})
        if side.table not in tables or len(ids) > len(tables[side.table]):
            tables[side.table] = ids

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
        """Ids of the blocks that the segments use, checked."""
        cached = self._ids.get((name, side.table, key))
        if cached is not None:
            return cached
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
        self._ids[name, side.table, key] = ids
        return ids

    def require_distinct_destinations(self) -> None:
        """No destination block may be written twice, also not through two overlaid tables."""
        for pool, tables in self._written.items():
            ids = np.sort(np.concatenate(list(tables.values())))
            twice = ids[1:][ids[1:] == ids[:-1]]
            if len(twice):
                raise BindError(
                    f"destination block {int(twice[0])} appears twice in block tables "
                    f"{sorted(tables)} (pool {pool}); each block of a request is written once"
                )

    def _batch(
        self,
        piece: Piece,
        runs: Runs,
        segments: Segments,
        which: Ints | slice,
        src_ids: Ints,
        dst_ids: Ints,
    ) -> Batch:
        src = _offsets(piece.src, src_ids[which], segments.src_slot[which], runs.src_slot)
        dst = _offsets(piece.dst, dst_ids[which], segments.dst_slot[which], runs.dst_slot)
        if not runs.entry_bytes:
            lengths = _constant(runs.length, len(src))
        elif len(segments.forms) == 1:
            lengths = _constant(int(segments.forms[0, 0]) * runs.entry_bytes, len(src))
        else:
            lengths = segments.forms[:, 0][segments.kinds[which]] * runs.entry_bytes
        src, dst, lengths = _join(src, dst, lengths)
        return Batch(
            src_rows=self.src_bases[runs.src_regions] + runs.src_offsets,
            dst_rows=self.dst_bases[runs.dst_regions] + runs.dst_offsets,
            src_segments=src,
            dst_segments=dst,
            lengths=lengths,
            axes=runs.axes,
            src_steps=runs.src_steps,
            dst_steps=runs.dst_steps,
        )


def _by_template(piece: Piece, segments: Segments) -> Iterator[tuple[Runs, Ints | slice]]:
    """Runs, each with the segments that it moves. Templates that say the same go together."""
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
    """One number as often as needed, at one place: its stride of zero says so to who looks."""
    numbers: Ints = np.ndarray((count,), np.int64, np.array([value], dtype=np.int64), 0, (0,))
    numbers.flags.writeable = False
    return numbers


def _join(src: Ints, dst: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Merge segments of which one begins where the one before it ends, on both sides."""
    if len(src) < 2:
        return src, dst, lengths
    apart = (src[1:] - src[:-1] != lengths[:-1]) | (dst[1:] - dst[:-1] != lengths[:-1])
    if apart.all():
        return src, dst, lengths
    heads = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return src[heads], dst[heads], np.add.reduceat(lengths, heads)
