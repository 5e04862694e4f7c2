"""Where components lie on one rank: regions, and affine placements in them.

The byte of (layer, block b, slot s, unit u, dims d...) of a component lies at

    offsets[layer] + b * block_stride + s // tile_slots * tile_stride + s % tile_slots * slot_stride
                   + (u - units.start) * unit_stride + d . dim_strides

in region `regions[layer]`. A tile is a kernel's block, where that is smaller than the engine's, or
what the interior keeps together. Regions are numbered, not addressed: addresses are bound later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DescriptionError
from kvferry.layout.interior import OPAQUE, PageQuestion, Place
from kvferry.layout.model import Group
from kvferry.layout.shape import EngineShape, Rank, Span

Ints = NDArray[np.int64]
MOST_STRIDE_BYTES = 1 << 56  # more than processors address, and small enough to calculate with


@dataclass(frozen=True, slots=True)
class Region:
    """One allocation that a rank registers."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """One component of some layers on one rank. Strides in bytes."""

    component: str
    units: Span
    block_stride: int
    tile_slots: int
    tile_stride: int
    slot_stride: int
    unit_stride: int
    dim_sizes: tuple[int, ...]
    dim_strides: tuple[int, ...]
    regions: Ints  # of each layer
    offsets: Ints  # of each layer: block 0, slot 0, first unit held

    def __post_init__(self) -> None:
        sizes, strides = self.dim_sizes, self.dim_strides
        if not sizes or len(sizes) != len(strides) or min(sizes) < 1:
            self._refuse(
                "dims of at least one element each, with one stride each",
                f"sizes {sizes} and strides {strides}",
            )
        if self.tile_slots < 1:
            self._refuse("tiles of at least one slot", self.tile_slots)
        if not 0 <= self.units.start < self.units.stop:
            self._refuse("a range of units", tuple(self.units))
        outer = (self.block_stride, self.tile_stride, self.slot_stride, self.unit_stride)
        if min(*outer, *strides) < 0 or max(*outer, *strides) > MOST_STRIDE_BYTES:
            self._refuse(f"strides of 0 to {MOST_STRIDE_BYTES} bytes", (*outer, *strides))

    def _refuse(self, expected: str, found: object) -> None:
        raise DescriptionError(
            f"component {self.component!r} must be placed with {expected}, found {found}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Layers of one group on one rank that share a block table and all strides."""

    group: str
    layers: Ints  # ordinals, ascending
    table: int  # which of the request's block tables names its blocks
    pool: int  # tables of one pool share memory, so one request never uses a block in two of them
    num_blocks: int
    block_entries: int
    page_bytes: int  # used bytes of one page of all heads; 0 where a page is not contiguous
    page_slack: int  # bytes after a page that belong to nobody
    interior: str
    placements: tuple[Placement, ...]
    # bytes from the first placement to each other one, where the same for all layers; else None
    shifts: tuple[int | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        numbers = (self.num_blocks, self.block_entries, self.table + 1)
        if min(numbers) < 1 or not self.placements:
            raise DescriptionError(
                f"group {self.group!r} must have blocks, entries in them, a block table and "
                f"something placed in them, found {self.num_blocks} blocks of "
                f"{self.block_entries} entries, table {self.table}, {len(self.placements)} "
                "components placed"
            )
        count = len(self.layers)
        if count == 0 or bool((self.layers[1:] <= self.layers[:-1]).any()):
            raise DescriptionError(
                f"group {self.group!r} must have distinct layers in ascending order, found "
                f"{self.layers.tolist()}"
            )
        for p in self.placements:
            if not len(p.regions) == len(p.offsets) == count:
                raise DescriptionError(
                    f"group {self.group!r} has {count} layers, but places {p.component!r} of "
                    f"{len(p.regions)} (regions) and {len(p.offsets)} (offsets)"
                )
            if self.block_entries % p.tile_slots:
                raise DescriptionError(
                    f"group {self.group!r} has blocks of {self.block_entries} entries, which "
                    f"tiles of {p.tile_slots} slots do not divide ({p.component!r})"
                )
        shifts = tuple(_constant_shift(self.placements[0], p) for p in self.placements)
        object.__setattr__(self, "shifts", shifts)

    @property
    def is_opaque(self) -> bool:
        return self.placements[0].component == OPAQUE

    def index(self, component: str) -> int:
        for index, placement in enumerate(self.placements):
            if placement.component == component:
                return index
        raise DescriptionError(f"group {self.group!r} places no component {component!r}")

    def placement(self, component: str) -> Placement:
        return self.placements[self.index(component)]


def _constant_shift(origin: Placement, other: Placement) -> int | None:
    if other is origin:
        return 0
    shifts = other.offsets - origin.offsets
    together = (origin.regions == other.regions) & (shifts == shifts[0])
    return int(shifts[0]) if together.all() else None


def page_question(group: Group, shape: EngineShape, rank: Rank) -> PageQuestion:
    """What the interior of this group's pages depends on, on this rank."""
    return PageQuestion(
        group=group,
        units=tuple(shape.units(group, c, rank.tp).size for c in group.components),
        slots=shape.entries(group)[1],
        token_major=shape.order.index("N") < shape.order.index("H"),
        conv_order=shape.conv_order,
    )


def _held_units(group: Group, shape: EngineShape, rank: Rank, component: str) -> Span:
    """Units a placement holds; of an opaque page, those of the group's first component."""
    known = group.components[0] if component == OPAQUE else group.component(component)
    return shape.units(group, known, rank.tp)


def place_component(
    group: Group,
    shape: EngineShape,
    rank: Rank,
    place: Place,
    *,
    kernel_block_stride: int,
    slot_stride: int,
    unit_stride: int,
    regions: Ints,
    pages: Ints,
) -> Placement:
    """A component's placement, given the strides around its page and where page 0 of each layer is.

    The interior's own strides win over those of the engine's order.
    """
    block, kernel = shape.entries(group)
    if place.tile_slots and block != kernel:
        raise DescriptionError(
            f"group {group.name!r}: interior {shape.interior_for(group)!r} tiles its slots, and "
            f"cannot also be split into kernel blocks of {kernel} entries"
        )
    slot = place.slot_stride or slot_stride
    if kernel == 1 < block:  # with one slot in a tile, slots are as far apart as tiles
        slot = kernel_block_stride
    return Placement(
        component=place.component,
        units=_held_units(group, shape, rank, place.component),
        block_stride=kernel_block_stride * (block // kernel),
        tile_slots=place.tile_slots or kernel,
        tile_stride=place.tile_stride or kernel_block_stride,
        slot_stride=slot,
        unit_stride=place.unit_stride or unit_stride,
        dim_sizes=place.dim_sizes,
        dim_strides=place.dim_strides,
        regions=regions,
        offsets=pages + place.offset,
    )
