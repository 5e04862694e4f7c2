# SPDX-License-Identifier: Apache-2.0
"""Turns models, shapes and layouts into messages of the handshake, and back.

The structs of `net.messages` are plain values from a peer that may send anything. Reading them runs
the same checks as a description made by hand, and limits the time and memory of planning. Groups of
a model are checked when their message is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvferry.errors import DescriptionError, IncompatibleError, ProtocolError
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Part, Placement, RankLayout, Region
from kvferry.layout.shape import EngineShape, Rank, Span
from kvferry.net.messages import (
    MOST_RANKS,
    EngineInfo,
    PartInfo,
    PlacementInfo,
    RankInfo,
    RegionInfo,
)

# The time and memory of planning grow with these.
MOST_NAMES = 4096  # groups with their own block size or interior
MOST_ROLES = 16
MOST_DCP = 64
MOST_INTERLEAVE = 1024
MOST_BLOCK_TOKENS = 1 << 24  # a state's block may span the longest sequence of its engine
# Steps of Python for one plan, less than a second. 8 to 64 ranks with ten groups need a hundredth
# of this; 1,024 ranks with 60 groups of one layer need half.
MOST_PLAN_STEPS = 10_000_000
SHARE_STEPS = 100  # for the share of one rank in one stage


def engine_info(
    engine_id: str,
    incarnation: str,
    model: CacheModel,
    shape: EngineShape,
    meaning: Mapping[str, str],
) -> EngineInfo:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(shape))  # as plain values
    return EngineInfo(
        engine_id, incarnation, model.name, model.groups, model.total_layers, plain, dict(meaning)
    )


def read_model(info: EngineInfo) -> CacheModel:
    try:
        return CacheModel(info.model, info.groups, info.total_layers)
    except DescriptionError as error:
        raise ProtocolError(
            f"engine {info.engine_id!r} describes no possible model: {error}"
        ) from None


# msgspec (0.22) inspects a dataclass when it first converts to it, and crashes the process if two
# threads do so at once. So the first conversion is here, while one thread imports this module.
msgspec.convert({}, EngineShape)


def read_shape(info: EngineInfo) -> EngineShape:
    known = {f.name for f in fields(EngineShape)}
    unknown = sorted(set(info.shape) - known)
    if unknown:
        raise ProtocolError(
            f"engine {info.engine_id!r} has a shape with {unknown}, which this version does not "
            "know; run the same kvferry version on both sides"
        )
    try:
        shape = msgspec.convert(info.shape, EngineShape)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"engine {info.engine_id!r} has no possible shape: {error}") from None
    for name, value, most in (
        ("ranks", shape.tp * shape.pp, MOST_RANKS),
        ("dcp", shape.dcp, MOST_DCP),
        ("interleave", shape.interleave, MOST_INTERLEAVE),
        ("blocks of tokens", max(shape.block_sizes), MOST_BLOCK_TOKENS),
        ("names", len(shape.block_sizes) + len(shape.interior_of), MOST_NAMES),
        ("roles", len(shape.role_tp), MOST_ROLES),
    ):
        if value > most:
            raise ProtocolError(
                f"engine {info.engine_id!r} has a shape with {name} {value}; at most {most} can be "
                "planned in the time that a handshake may take"
            )
    return shape


def plan_steps(model: CacheModel, src: EngineShape, dst: EngineShape) -> int:
    """An estimate of the steps of `plan.assign`, which walks ranks at every cut, and stages."""
    steps = 0
    for group in model.groups:
        layers, src_dcp, dst_dcp = len(group.layers), src.dcp_for(group), dst.dcp_for(group)
        meeting = min(src.pp + dst.pp, layers)  # pairs of stages with common layers
        for units in {(c.units, c.sharding): c.units for c in group.components}.values():
            cuts = min(units, src.tp + dst.tp)
            steps += cuts * src_dcp * (src.tp + dst_dcp * dst.tp)
            steps += SHARE_STEPS * meeting * max(cuts, dst.tp) * src_dcp
        steps += (src.pp + dst.pp) * (src.pp + dst.pp + layers)
        steps += dst.pp * (16 * src.pp + layers) + src.pp * layers
    return steps


def require_plannable(model: CacheModel, src: EngineShape, dst: EngineShape) -> None:
    """Refuse a pair of shapes whose plan would take seconds. One of them is a peer's."""
    steps = plan_steps(model, src, dst)
    if steps > MOST_PLAN_STEPS:
        raise ProtocolError(
            f"planning {len(model.groups)} groups from tp={src.tp} pp={src.pp} dcp={src.dcp} to "
            f"tp={dst.tp} pp={dst.pp} dcp={dst.dcp} takes {steps} steps; at most {MOST_PLAN_STEPS} "
            "fit into the time that a handshake may take"
        )


def rank_info(
    layout: RankLayout,
    bases: Sequence[int],
    address: str,
    incarnation: str,
    carriers: Mapping[str, bytes],
    sums: Sequence[str] = ("xxh3",),
) -> RankInfo:
    regions = [
        RegionInfo(region.name, base, region.bytes)
        for region, base in zip(layout.regions, bases, strict=True)
    ]
    parts = [
        _info(PartInfo, part, placements=[_info(PlacementInfo, p) for p in part.placements])
        for part in layout.parts
    ]
    rank = layout.rank
    return RankInfo(
        rank.pp,
        rank.tp,
        address,
        incarnation,
        dict(carriers),
        regions,
        parts,
        layout.tables,
        tuple(sums),
    )


def read_layout(
    info: RankInfo, shape: EngineShape, *, whole: bool = True
) -> tuple[RankLayout, list[int]]:
    """A running rank's layout and the addresses of its regions, which hold all of its blocks.

    `whole=False`: the layout of a pool's objects. They have one region per table, and each region
    has room for one object.
    """
    rank = Rank(info.pp_rank, info.tp_rank)
    bases = [region.address for region in info.regions]
    try:
        layout = _layout(info, shape, rank)
        if whole:
            layout.require_all_blocks(bases)
    except (DescriptionError, OverflowError) as error:
        raise ProtocolError(
            f"rank {tuple(rank)} describes no possible layout: {error}; run the same kvferry "
            "version on both sides"
        ) from None
    return layout, bases


def require_same_meaning(ours: EngineInfo, theirs: EngineInfo) -> None:
    """Refuse engines whose bytes have another meaning, even if their shapes fit."""
    for key in sorted({*ours.meaning, *theirs.meaning}):
        a, b = ours.meaning.get(key), theirs.meaning.get(key)
        if a != b:
            raise IncompatibleError(
                f"{key}: engine {ours.engine_id!r} has {a!r}, engine {theirs.engine_id!r} has "
                f"{b!r}; both must serve the same model in the same way"
            )


# A message and the thing that it describes have fields of the same names.

Message = TypeVar("Message", bound=msgspec.Struct)
Thing = TypeVar("Thing")


def _info(kind: type[Message], thing: Any, **values: Any) -> Message:
    """The message that describes a thing; `values` are the fields that differ in type."""
    for name in kind.__struct_fields__:
        if name not in values:
            value = getattr(thing, name)
            values[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return kind(**values)


def _made(kind: type[Thing], info: msgspec.Struct, **values: Any) -> Thing:
    """The thing that a message describes; `values` are the fields that differ in type."""
    return kind(**{**msgspec.structs.asdict(info), **values})


def _layout(info: RankInfo, shape: EngineShape, rank: Rank) -> RankLayout:
    parts = tuple(
        _made(
            Part,
            part,
            layers=np.asarray(part.layers, dtype=np.int64),
            placements=tuple(
                _made(
                    Placement,
                    p,
                    units=Span(*p.units),
                    regions=np.asarray(p.regions, dtype=np.int64),
                    offsets=np.asarray(p.offsets, dtype=np.int64),
                )
                for p in part.placements
            ),
        )
        for part in info.parts
    )
    regions = tuple(Region(region.name, region.bytes) for region in info.regions)
    for made in parts:
        for placement in made.placements:
            _require_inside(made, placement, regions)
    return RankLayout(rank, shape, parts, regions, info.tables)


def _require_inside(part: Part, p: Placement, regions: Sequence[Region]) -> None:
    """Require that a block of each layer lies in its region, which also bounds its strides.

    Only the first block is checked: the regions of a pool's objects have room for one object.
    """
    if int(p.regions.min()) < 0 or int(p.regions.max()) >= len(regions):
        raise DescriptionError(f"group {part.group!r} lies in a region that is not there")
    reach = part.page_bytes if part.is_opaque else p.span_bytes(part.block_entries)
    room = min(
        regions[region].bytes - offset
        for region, offset in zip(p.regions.tolist(), p.offsets.tolist(), strict=True)
    )
    if int(p.offsets.min()) < 0 or reach > room:
        raise DescriptionError(
            f"a block of {p.component!r} in group {part.group!r} needs {reach} bytes of its "
            f"region, from offsets of 0 on, found room for {room} (least offset "
            f"{int(p.offsets.min())})"
        )
