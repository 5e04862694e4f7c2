# SPDX-License-Identifier: Apache-2.0
"""The address-free plan of one pair of ranks: their two layouts, intersected into pieces.

Components that lie at constant distances on both sides go into one piece. If the two sides cut an
axis differently, it is refined. A layout that comes from real memory or from a peer may contradict
its shape. If it lacks layers, units or elements that the edge needs, it is refused: they would
silently stay unwritten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvferry.errors import IncompatibleError
from kvferry.layout.interior import OPAQUE
from kvferry.layout.model import CacheModel, Component, Group
from kvferry.layout.placement import Ints, Part, Placement, RankLayout
from kvferry.layout.shape import EngineShape, Rank, Span
from kvferry.plan.assign import Edge, Share
from kvferry.plan.pieces import Axis, Piece, Side, Slab, refine
from kvferry.plan.tokens import Paging, paging_for


@dataclass(frozen=True, slots=True, eq=False)
class EdgePlan:
    """Which bytes of rank `src` go where in rank `dst`. `bind` binds it to a request."""

    src: Rank
    dst: Rank
    pieces: tuple[Piece, ...]
    groups: dict[str, Group]
    src_shape: EngineShape
    dst_shape: EngineShape


def plan_edge(model: CacheModel, edge: Edge, src: RankLayout, dst: RankLayout) -> EdgePlan:
    """Intersect two ranks' layouts over what the edge assigns. Both must hold all of it."""
    pieces: list[Piece] = []
    for share in edge.shares:
        group = model.group(share.group)
        missing = len(share.layers)  # parts of a rank have no layer in common, so a count is enough
        for a in src.parts_of(share.group):
            for b in dst.parts_of(share.group):
                layers = _held(b.layers, _held(a.layers, share.layers))
                if len(layers):
                    missing -= len(layers)
                    pieces += _pieces(group, share, layers, a, b, src, dst)
        if missing:
            _refuse_layers(share, src, dst)
    groups = {share.group: model.group(share.group) for share in edge.shares}
    return EdgePlan(edge.src, edge.dst, tuple(pieces), groups, src.shape, dst.shape)


def _refuse_layers(share: Share, src: RankLayout, dst: RankLayout) -> None:
    for name, layout in (("source", src), ("destination", dst)):
        held = {layer for part in layout.parts_of(share.group) for layer in part.layers.tolist()}
        lacking = [layer for layer in share.layers.tolist() if layer not in held]
        if lacking:
            raise IncompatibleError(
                f"rank {tuple(layout.rank)} of the {name} must hold layers "
                f"{share.layers.tolist()} of group {share.group!r}, as its shape "
                f"{layout.shape.describe()} says, but its memory has no layers {lacking} of it "
                f"(it has {sorted(held)}); describe its pipeline stages as the engine cuts them "
                "(stages, or pp=30+50)"
            )
    raise AssertionError("both sides hold all layers, each once")


def _pieces(
    group: Group,
    share: Share,
    layers: Ints,
    a: Part,
    b: Part,
    src: RankLayout,
    dst: RankLayout,
) -> list[Piece]:
    a_rows, b_rows = a.layers.searchsorted(layers), b.layers.searchsorted(layers)
    opaque = a.is_opaque or b.is_opaque
    if opaque:
        if group.components[0].name not in share.components:
            return []  # the page moves once, with its first component
        _require_identical_pages(group, share, a, b, src, dst)
    # components that lie at constant distances on both sides go into one piece
    made: dict[tuple[object, ...], tuple[Side, Side, list[Slab]]] = {}
    for name in (OPAQUE,) if opaque else share.components:
        i, j = a.index(name), b.index(name)
        key = (*_array_key(a, i), *_array_key(b, j))
        if key not in made:
            sides = _side(group, a, i, a_rows, src, opaque), _side(group, b, j, b_rows, dst, opaque)
            made[key] = (*sides, [])
        made[key][2].append(_slab(group, share.units, a, i, b, j, opaque))
    return [Piece(group.name, opaque, x, y, tuple(slabs)) for x, y, slabs in made.values()]


def _held(held: Ints, wanted: Ints) -> Ints:
    """The wanted layers that are held. Both are in ascending order."""
    found = held.take(held.searchsorted(wanted), mode="clip") == wanted
    return wanted if found.all() else wanted[found]


def _array_key(part: Part, index: int) -> tuple[object, ...]:
    """Equal for components of a part whose pages share an origin and the outer strides."""
    p = part.placements[index]
    origin = 0 if part.shifts[index] is not None else index
    return (origin, p.block_stride, p.tile_slots, p.tile_stride, _tile(part, p))


def _tile(part: Part, placement: Placement) -> int:
    """Slots in a tile, or 1 if all slots of a block are evenly spaced."""
    even = placement.tile_stride == placement.tile_slots * placement.slot_stride
    return 1 if even or part.block_entries == placement.tile_slots else placement.tile_slots


def _side(group: Group, part: Part, index: int, rows: Ints, rank: RankLayout, opaque: bool) -> Side:
    placement = part.placements[index]
    origin = part.placements[0] if part.shifts[index] is not None else placement
    if opaque:  # whole blocks move: a block is one entry
        paging = Paging(1)
    else:
        paging = paging_for(group, rank.shape, rank.rank.tp, _tile(part, placement))
        if paging.block_entries != part.block_entries:
            raise IncompatibleError(
                f"rank {tuple(rank.rank)} has blocks of {part.block_entries} entries of group "
                f"{group.name!r} in its memory, but {paging.block_entries} by its shape "
                f"{rank.shape.describe()}; describe the block size as the engine has it"
            )
    return Side(
        table=part.table,
        pool=part.pool,
        num_blocks=part.num_blocks,
        null_block=rank.shape.null_block,
        paging=paging,
        block_stride=placement.block_stride,
        tile_stride=placement.tile_stride,
        page_bytes=part.page_bytes,
        page_slack=part.page_slack,
        regions=origin.regions[rows],
        offsets=origin.offsets[rows],
    )


def _slab(group: Group, units: Span, a: Part, i: int, b: Part, j: int, opaque: bool) -> Slab:
    pa, pb = a.placements[i], b.placements[j]
    a_shift, b_shift = a.shifts[i] or 0, b.shifts[j] or 0
    if opaque:
        return Slab(a_shift, b_shift, a.page_bytes, (), 0, 0)
    component = group.component(pa.component)
    _require_component(group, component, units, pa, "source")
    _require_component(group, component, units, pb, "destination")
    axes = [Axis(units.size, pa.unit_stride, pb.unit_stride)]
    axes += refine(
        list(zip(pa.dim_sizes, pa.dim_strides, strict=True)),
        list(zip(pb.dim_sizes, pb.dim_strides, strict=True)),
    )
    return Slab(
        src_offset=a_shift + (units.start - pa.units.start) * pa.unit_stride,
        dst_offset=b_shift + (units.start - pb.units.start) * pb.unit_stride,
        element_bytes=component.element_bytes,
        axes=tuple(axes),
        src_slot=pa.slot_stride,
        dst_slot=pb.slot_stride,
    )


def _require_component(
    group: Group, component: Component, units: Span, placed: Placement, side: str
) -> None:
    """Refuse a placement that lacks units that are due, or elements of a unit."""
    due, held = component.dims, placed.dim_sizes
    if held != due and math.prod(held) != math.prod(due):
        raise IncompatibleError(
            f"component {component.name!r} of group {group.name!r} has {math.prod(due)} elements a "
            f"unit (dims {due}), but the {side}'s memory holds {math.prod(held)} (dims {held}); "
            "both engines must serve the same model"
        )
    if not placed.units[0] <= units[0] <= units[1] <= placed.units[1]:
        raise IncompatibleError(
            f"the {side} must hold units {units.start}..{units.stop - 1} of component "
            f"{component.name!r} in group {group.name!r}, as its shape says, but its memory has "
            f"{placed.units.start}..{placed.units.stop - 1}; describe the engine's tp as it is"
        )


def _require_identical_pages(
    group: Group, share: Share, a: Part, b: Part, src: RankLayout, dst: RankLayout
) -> None:
    def page(part: Part, rank: RankLayout) -> dict[str, object]:
        shape, dcp = rank.shape, rank.shape.dcp_for(group)
        heads = tuple(tuple(shape.units(group, c, rank.rank.tp)) for c in group.components)
        orders_heads = max(stop - start for start, stop in heads) > 1
        return {
            "interior": part.interior,
            "page bytes": part.page_bytes,
            "block tokens": shape.block_tokens(group),
            "kernel block entries": shape.entries(group)[1],
            "heads": heads,
            "order": shape.order.replace("L", "").replace("B", "") if orders_heads else "",
            "dcp": (dcp, rank.rank.tp % dcp, shape.interleave) if dcp > 1 else 1,
        }

    ours, theirs = page(a, src), page(b, dst)
    if ours != theirs or share.units != a.placements[0].units:
        raise IncompatibleError(
            f"group {group.name!r} has pages whose inside is unknown, so they move only between "
            f"identical pages: rank {tuple(src.rank)} of the source has {ours}, rank "
            f"{tuple(dst.rank)} of the destination has {theirs}; give both engines the same "
            "shape, or name the interior"
        )
