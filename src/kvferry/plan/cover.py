# SPDX-License-Identifier: Apache-2.0
"""Proof of exact cover, and the bytes of loaded blocks that a load leaves uncovered.

`require_exact_cover` counts how often the edges assign each (layer, unit, dcp class) that a
destination rank holds, and refuses any count but one. It shares only the shapes, and which dcp
ranks `meet`, with the code that made the edges. `uncovered` finds the bytes of loaded blocks that
no source writes, such as the tail after the last token, so that the destination can zero them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from kvferry.errors import CoverError
from kvferry.layout.interior import OPAQUE
from kvferry.layout.model import CacheModel, Component, Group
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import EngineShape, Rank, Span
from kvferry.plan.assign import Edge, Share, meet
from kvferry.plan.bind import Binder, Bound
from kvferry.plan.edge import EdgePlan, plan_edge
from kvferry.plan.pieces import Piece
from kvferry.plan.tokens import Paging, moved, paging_for


def require_exact_cover(
    model: CacheModel, src: EngineShape, dst: EngineShape, edges: Sequence[Edge]
) -> None:
    """Refuse edges that leave out or repeat a part of what a destination rank holds."""
    counts: dict[tuple[Rank, str, str], tuple[Ints, Ints, Ints]] = {}
    for group in model.groups:
        stages = [np.asarray(dst.layers(model, group, p), dtype=np.int64) for p in range(dst.pp)]
        for component in group.components:
            boundaries = _boundaries(group, component, src) | _boundaries(group, component, dst)
            all_cuts = np.asarray(sorted(boundaries), dtype=np.int64)
            for rank in dst.ranks:
                layers = stages[rank.pp]
                first, last = np.searchsorted(all_cuts, dst.units(group, component, rank.tp))
                cuts = all_cuts[first : last + 1]
                count = np.zeros((len(layers), len(cuts) - 1, src.dcp_for(group)), dtype=np.int64)
                counts[rank, group.name, component.name] = layers, cuts, count
    for edge in edges:
        for share in edge.shares:
            phase = edge.src.tp % src.dcp_for(model.group(share.group))
            for name in share.components:
                layers, cuts, count = counts[edge.dst, share.group, name]
                rows = np.searchsorted(layers, share.layers)
                first, last = np.searchsorted(cuts, [share.units.start, share.units.stop])
                count[rows, first:last, phase] += 1
    for (rank, group_name, name), (layers, cuts, count) in counts.items():
        expected = _expected(model.group(group_name), src, dst, rank)
        wrong = np.argwhere(count != expected)
        if len(wrong):
            layer, unit, phase = wrong[0].tolist()
            raise CoverError(
                f"rank {tuple(rank)} of the destination would get component {name!r} of group "
                f"{group_name!r}, layer {layers[layer]}, units {cuts[unit]}..{cuts[unit + 1] - 1} "
                f"(dcp rank {phase} of the source) {count[layer, unit, phase]} times; expected "
                f"{expected[phase]}"
            )


def _boundaries(group: Group, component: Component, shape: EngineShape) -> set[int]:
    """Units at which some rank's share begins or ends."""
    return {edge for r in range(shape.tp) for edge in shape.units(group, component, r)}


def _expected(group: Group, src: EngineShape, dst: EngineShape, rank: Rank) -> Ints:
    """How often each dcp class of the source is due: once if it shares tokens with the rank."""
    src_dcp, dst_dcp = src.dcp_for(group), dst.dcp_for(group)
    mine = rank.tp % dst_dcp
    due = [
        meet(src_dcp, src.interleave, phase, dst_dcp, dst.interleave, mine)
        for phase in range(src_dcp)
    ]
    return np.asarray(due, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Uncovered:
    """Ranges of loaded destination blocks that the load does not write."""

    address: Ints
    length: Ints

    @property
    def bytes(self) -> int:
        return int(self.length.sum())


def everything_plan(model: CacheModel, layout: RankLayout) -> EdgePlan:
    """A plan from a rank to itself, over all that both the rank and `model` have.

    The rank makes it once, and keeps it for `uncovered` and `whole_blocks`.
    """
    shares = [
        Share(group.name, (c.name,), layout.shape.units(group, c, layout.rank.tp), layers)
        for group in model.groups
        for part in layout.parts_of(group.name)
        if part.placements[0].component != OPAQUE
        and len(layers := np.intersect1d(part.layers, group.layers))
        for c in group.components
    ]
    plan = plan_edge(model, Edge(layout.rank, layout.rank, tuple(shares)), layout, layout)
    return replace(plan, pieces=tuple(_without_context(piece) for piece in plan.pieces))


def _without_context(piece: Piece) -> Piece:
    """The piece with local slots as positions: without dcp and rings."""
    paging = piece.dst.paging
    local = Paging(paging.block_entries, paging.tile)
    src, dst = (replace(side, paging=local) for side in (piece.src, piece.dst))
    return Piece(piece.group, piece.opaque, src, dst, piece.slabs)


def uncovered(
    plan: EdgePlan,
    src: EngineShape,
    *,
    tokens: int,
    dst_tables: Sequence[ArrayLike],
    dst_bases: ArrayLike,
    skip: int = 0,
) -> Uncovered:
    """What a load of this request leaves unwritten on a rank. `plan` is its `everything_plan`."""
    dst = plan.dst_shape
    spans = {}
    for name, group in plan.groups.items():
        paging = paging_for(group, dst, plan.dst.tp)
        spans[name] = _gaps(group, dst, paging, moved(group, src, dst, tokens, skip), tokens)
    return _bind_slots(plan, spans, dst_tables, dst_bases)


def whole_blocks(
    plan: EdgePlan,
    *,
    tokens: int,
    dst_tables: Sequence[ArrayLike],
    dst_bases: ArrayLike,
    skip: int = 0,
) -> Uncovered:
    """All that a load of this request would fill on the rank of `plan`, and the tail after it.

    For layers that the source does not have: no bytes arrive for them, so the rank zeroes them.
    """
    dst = plan.dst_shape
    spans: dict[str, list[Span]] = {}
    for name, group in plan.groups.items():
        due = moved(group, dst, dst, tokens, skip)
        paging = paging_for(group, dst, plan.dst.tp)
        if group.is_state or paging.ring:
            spans[name] = [Span(0, paging.block_entries)]
        else:
            held = Span(paging.local_count(due.start), paging.local_count(due.stop))
            spans[name] = [held, *_gaps(group, dst, paging, due, tokens)]
    return _bind_slots(plan, spans, dst_tables, dst_bases)


def _bind_slots(
    plan: EdgePlan,
    spans: Mapping[str, Sequence[Span]],
    dst_tables: Sequence[ArrayLike],
    dst_bases: ArrayLike,
) -> Uncovered:
    """Local slots of each group, as addresses."""
    tables = [np.asarray(t, dtype=np.int64) for t in dst_tables]
    bases = np.asarray(dst_bases, dtype=np.int64)
    binder = Binder(tables, tables, bases, bases)
    batches = [
        batch
        for piece in plan.pieces
        for span in spans[piece.group]
        if span.size > 0
        for batch in binder.batches(piece, span)
    ]
    copies = Bound(tuple(batches)).copies()
    return Uncovered(copies.dst, copies.length)


def _gaps(group: Group, dst: EngineShape, paging: Paging, range_: Span, tokens: int) -> list[Span]:
    """Local slots of loaded blocks that no entry of the load fills."""
    if group.is_state or range_.size <= 0:
        return []
    if paging.ring:
        return _ring_gaps(paging, range_)
    blocks = -(-tokens // (dst.block_tokens(group) * paging.context))
    return [Span(paging.local_count(range_.stop), blocks * paging.block_entries)]


def _ring_gaps(paging: Paging, held: Span) -> list[Span]:
    """The free slots of a ring: around the entries that it holds, and with dcp between them."""
    positions = np.arange(held.start, held.stop, dtype=np.int64)
    free = np.ones(paging.block_entries, dtype=np.int64)
    free[paging.local(positions[paging.holds(positions)])] = 0
    edges = np.flatnonzero(np.diff(free, prepend=0, append=0))
    return [Span(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
