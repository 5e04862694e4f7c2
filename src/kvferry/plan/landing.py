"""Where an edge's bytes land, as the destination alone can say: it knows no block of the source.

A destination that lets a source write opens exactly this much of its memory, and expects exactly
this many bytes. Ranges are a little coarse: parts of the same blocks that belong to other edges of
the request may be inside, no other block ever is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kvferry.errors import BindError
from kvferry.layout.model import CacheModel
from kvferry.layout.parts import Ints
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import EngineShape
from kvferry.plan.bind import Binder, moved_span
from kvferry.plan.bound import Batch
from kvferry.plan.edge import EdgePlan
from kvferry.plan.piece import Side
from kvferry.plan.tokens import moved, paging_for


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """Ranges of the destination's memory, and how many bytes come into them."""

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
    """Where a request's share of an edge lands. Checks the destination's tables as `bind` does."""
    sides = [piece.src for piece in plan.pieces]
    binder = Binder(
        _any_tables(sides, tokens),
        [np.asarray(t, dtype=np.int64) for t in dst_tables],
        np.zeros(max((int(s.regions.max()) for s in sides), default=-1) + 1, dtype=np.int64),
        np.asarray(dst_bases, dtype=np.int64),
    )
    address: list[Ints] = []
    length: list[Ints] = []
    total = 0
    ranges = {
        name: moved(group, plan.src_shape, plan.dst_shape, tokens, skip)
        for name, group in plan.groups.items()
    }
    for piece in plan.pieces:
        for batch in binder.batches(piece, moved_span(plan, piece, ranges[piece.group])):
            at, count = _hulls(batch, piece.dst.block_stride)
            address.append(at)
            length.append(count)
            total += batch.bytes
    binder.require_distinct_destinations()
    nothing = np.zeros(0, dtype=np.int64)
    return Landing(
        np.concatenate(address) if address else nothing,
        np.concatenate(length) if length else nothing,
        total,
    )


def _any_tables(sides: Sequence[Side], tokens: int) -> list[Ints]:
    """Tables that stand for the source's: long enough, of a block that exists."""
    found = {side.table: side for side in sides}
    return [
        np.full(tokens + 1, min(1, found[table].num_blocks - 1) if table in found else 0)
        for table in range(max(found, default=-1) + 1)
    ]


def _hulls(batch: Batch, block_stride: int) -> tuple[Ints, Ints]:
    """Ranges around the steps of each row and segment; steps a block or more apart stay apart."""
    steps = np.unique(batch.dst_steps)
    heads = np.flatnonzero(np.append(True, np.diff(steps) >= block_stride))
    first, last = steps[heads], steps[np.append(heads[1:], len(steps)) - 1]
    address = (
        batch.dst_rows[:, None, None] + batch.dst_segments[None, :, None] + first[None, None, :]
    )
    length = batch.lengths[None, :, None] + (last - first)[None, None, :]
    return address.ravel(), np.broadcast_to(length, address.shape).ravel()


def require_distinct_blocks(
    model: CacheModel,
    layout: RankLayout,
    src: EngineShape,
    *,
    tokens: int,
    dst_tables: Sequence[ArrayLike],
    skip: int = 0,
) -> None:
    """No block of one memory pool in two places of a request, whichever edges write them.

    `bind` sees the tables of one edge only. Groups that are overlaid in one pool and come from
    different sources (of a pipeline, say) meet nowhere but here.
    """
    tables = [np.asarray(t, dtype=np.int64) for t in dst_tables]
    written: dict[int, dict[int, Ints]] = {}
    for part in layout.parts:
        group = model.group(part.group)
        range_ = moved(group, src, layout.shape, tokens, skip).range
        if range_.size <= 0 or part.table >= len(tables):
            continue
        paging = paging_for(group, layout.shape, layout.rank.tp)
        first, last = range_.start // paging.span, -(-range_.stop // paging.span)
        if paging.ring or group.is_state:
            first, last = 0, 1
        ids = tables[part.table][first:last]
        ids = ids[ids != layout.shape.null_block] if layout.shape.null_block is not None else ids
        known = written.setdefault(part.pool, {}).get(part.table)
        if known is None or len(ids) > len(known):
            written[part.pool][part.table] = ids
    for pool, by_table in written.items():
        ids = np.sort(np.concatenate(list(by_table.values())))
        twice = ids[1:][ids[1:] == ids[:-1]]
        if len(twice):
            raise BindError(
                f"destination block {int(twice[0])} appears twice in block tables "
                f"{sorted(by_table)} (pool {pool}); each block of a request is written once"
            )
