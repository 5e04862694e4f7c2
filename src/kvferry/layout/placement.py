# SPDX-License-Identifier: Apache-2.0
"""Where components lie on one rank: regions, and affine placements in them.

The byte of (layer, block b, slot s, unit u, dims d...) of a component lies at

    offsets[layer] + b * block_stride + s // tile_slots * tile_stride + s % tile_slots * slot_stride
                   + (u - units.start) * unit_stride + d . dim_strides

in region `regions[layer]`. A tile is a kernel's block, if the engine's blocks are larger, or the
slots that the interior keeps together. Regions have numbers; their addresses are bound later.

A layout comes from an engine's tensors (`tensors.layout_from_tensors`), from a peer, or from the
shape alone (`RankLayout.build`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DescriptionError
from kvferry.layout.interior import OPAQUE, Inside, PageQuestion, Place, arrange
from kvferry.layout.model import CacheModel, Group
from kvferry.layout.shape import EngineShape, Rank, Span

Ints = NDArray[np.int64]
MOST_STRIDE_BYTES = 1 << 56  # more than processors address; products of it fit into 64 bits


@dataclass(frozen=True, slots=True, eq=False)
class RankLayout:
    """All that one rank holds. `tables` counts the block tables of a request on its engine."""

    rank: Rank
    shape: EngineShape
    parts: tuple[Part, ...]
    regions: tuple[Region, ...]
    tables: int

    def __post_init__(self) -> None:
        held: dict[str, list[Ints]] = {}
        for part in self.parts:
            if part.table >= self.tables:
                raise DescriptionError(
                    f"group {part.group!r} has its blocks in table {part.table}, but a request has "
                    f"only {self.tables} tables"
                )
            held.setdefault(part.group, []).append(part.layers)
        for group, parts in held.items():
            if len(parts) == 1:
                continue  # a part's own layers are distinct
            layers, times = np.unique(np.concatenate(parts), return_counts=True)
            twice = layers[times > 1]
            if len(twice):
                raise DescriptionError(
                    f"layers of group {group!r} must lie in one place on a rank, found "
                    f"{len(twice)} in several parts of its memory: {twice[:8].tolist()}"
                )

    @property
    def total_bytes(self) -> int:
        return sum(region.bytes for region in self.regions)

    def parts_of(self, group: str) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.group == group)

    def transfer_regions(self, bases: Sequence[int]) -> tuple[TransferRegion, ...]:
        """The blocks of every layer, if this layout's regions lie at these addresses."""
        return tuple(
            region
            for part in self.parts
            for row in range(len(part.layers))
            for region in part.transfer_regions(row, bases)
        )

    def require_all_blocks(self, bases: Sequence[int]) -> None:
        """Refuse a layout that has blocks outside its regions."""
        for region in self.transfer_regions(bases):
            needed = (region.num_blocks - 1) * region.block_len + region.kv_block_len
            memory = self.regions[region.memory]
            room = bases[region.memory] + memory.bytes - region.base_addr
            if needed > room:
                raise DescriptionError(
                    f"{region.num_blocks} blocks in {memory.name!r}, {region.block_len} bytes "
                    f"apart, need {needed} bytes there, found room for {room}"
                )

    @classmethod
    def build(
        cls, model: CacheModel, shape: EngineShape, rank: Rank, num_blocks: int
    ) -> RankLayout:
        """The layout that the shape alone implies: one array per group, dense but for padding."""
        builder = _Builder(model, shape, rank, num_blocks)
        parts = builder.build()
        return cls(rank, shape, parts, tuple(builder.regions), len(model.groups))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Layers of one group on one rank that share a block table and all strides."""

    group: str
    layers: Ints  # ordinals, ascending
    table: int  # number of the request's block table that names its blocks
    pool: int  # tables of one pool share memory: a request uses each block in one table only
    num_blocks: int
    block_entries: int
    page_bytes: int  # used bytes of one page of all heads; 0 if a page is not contiguous
    page_slack: int  # unused bytes after a page
    interior: str
    placements: tuple[Placement, ...]
    # bytes from the first placement to each other one, if equal in all layers; else None
    shifts: tuple[int | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        numbers = (self.num_blocks, self.block_entries, self.table + 1)
        if min(numbers) < 1 or not self.placements:
            raise DescriptionError(
                f"group {self.group!r} must have blocks, entries, a block table and placed "
                f"components, found {self.num_blocks} blocks of {self.block_entries} entries, "
                f"table {self.table}, {len(self.placements)} components"
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

    def transfer_regions(self, row: int, bases: Sequence[int]) -> list[TransferRegion]:
        """The blocks of one layer. Components that lie apart have regions of their own."""
        found: list[TransferRegion] = []
        for p in sorted(self.placements, key=lambda p: (p.regions[row], p.offsets[row])):
            memory = int(p.regions[row])
            base, span = bases[memory] + int(p.offsets[row]), p.span_bytes(self.block_entries)
            last = found[-1] if found else None
            if last is None or not last.has_inside(memory, base, p.block_stride):
                found.append(TransferRegion(base, p.block_stride, span, self.num_blocks, memory))
            else:
                span = max(last.kv_block_len, base - last.base_addr + span)
                found[-1] = replace(last, kv_block_len=span)
        if len(found) == 1:
            found = [replace(found[0], kv_block_len=max(found[0].kv_block_len, self.page_bytes))]
        return found

    def index(self, component: str) -> int:
        for index, placement in enumerate(self.placements):
            if placement.component == component:
                return index
        raise DescriptionError(f"group {self.group!r} places no component {component!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """One component of some layers on one rank. Strides are in bytes."""

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

    def span_bytes(self, block_entries: int) -> int:
        """Bytes from the first byte of a block to the start of its last element, and one more."""
        axes = [
            (block_entries // self.tile_slots, self.tile_stride),
            (self.tile_slots, self.slot_stride),
            (self.units.size, self.unit_stride),
            *zip(self.dim_sizes, self.dim_strides, strict=True),
        ]
        return 1 + sum((size - 1) * stride for size, stride in axes)

    def _refuse(self, expected: str, found: object) -> None:
        raise DescriptionError(
            f"component {self.component!r} must be placed with {expected}, found {found}"
        )


@dataclass(frozen=True, slots=True)
class Region:
    """One allocation that a rank registers."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TransferRegion:
    """The blocks of one layer on one rank, or of its K or V if these lie apart."""

    base_addr: int  # of block 0
    block_len: int  # bytes from one block to the next
    kv_block_len: int  # bytes from the first to the last used byte of a block
    num_blocks: int = 1
    memory: int = 0  # number of the registered region that it lies in

    def has_inside(self, memory: int, base_addr: int, block_len: int) -> bool:
        """Whether a component of these strides lies in the blocks of this region."""
        apart = base_addr - self.base_addr
        return (memory, block_len) == (self.memory, self.block_len) and 0 <= apart < block_len


def _constant_shift(origin: Placement, other: Placement) -> int | None:
    if other is origin:
        return 0
    shifts = other.offsets - origin.offsets
    together = (origin.regions == other.regions) & (shifts == shifts[0])
    return int(shifts[0]) if together.all() else None


def page_question(group: Group, shape: EngineShape, rank: Rank) -> PageQuestion:
    """All that the interior of a group's pages on a rank depends on."""
    return PageQuestion(
        group=group,
        units=tuple(shape.units(group, c, rank.tp).size for c in group.components),
        slots=shape.entries(group)[1],
        token_major=shape.order.index("N") < shape.order.index("H"),
        conv_order=shape.conv_order,
    )


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
    """A component's placement, from the strides around its page and page 0 of each layer.

    Strides that the interior sets win over those of the engine's order.
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
    # an opaque page has the units of the group's first component
    opaque = place.component == OPAQUE
    component = group.components[0] if opaque else group.component(place.component)
    return Placement(
        component=place.component,
        units=shape.units(group, component, rank.tp),
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


@dataclass(slots=True)
class _Builder:
    """Builds the memory that a shape implies.

    The engine's order walks layers, blocks, heads and slots around the interior. With `overlay`,
    all groups share one storage, whose pages are as large as the largest group's. Combinations of
    order, interior and padding that do not exist are refused.
    """

    model: CacheModel
    shape: EngineShape
    rank: Rank
    num_blocks: int
    regions: list[Region] = field(default_factory=list)

    def build(self) -> tuple[Part, ...]:
        if self.num_blocks < 1:
            raise DescriptionError(f"num_blocks must be at least 1, found {self.num_blocks}")
        arranged = []
        for table, group in enumerate(self.model.groups):
            layers = self.shape.layers(self.model, group, self.rank.pp)
            question = page_question(group, self.shape, self.rank)
            insides = arrange(self.shape.interior_for(group), question)
            if layers:
                arranged.append((table, group, layers, insides))
        shared_page = self._shared_page(arranged) if self.shape.overlay else 0
        most_layers = max((len(layers) for _, _, layers, _ in arranged), default=0)
        return tuple(self._part(*one, shared_page, most_layers) for one in arranged)

    def _shared_page(self, arranged: list[tuple[int, Group, Any, tuple[Inside, ...]]]) -> int:
        pages, walks = [], set()
        for _, group, _, insides in arranged:
            if len(insides) != 1:
                raise DescriptionError(
                    f"group {group.name!r}: interior 'split' keeps several arrays, "
                    "which cannot overlay other groups in one storage"
                )
            pages.append(self._page_bytes(group, insides[0]))
            walks.add(self._walk(group, insides[0]))
        if len(walks) > 1:
            raise DescriptionError(
                f"order {self.shape.order} keeps heads outside blocks, and the heads of the groups "
                f"{[group.name for _, group, _, _ in arranged]} differ: a block of one group would "
                "overlay parts of several blocks of another; choose an order that begins with LB "
                "or BL"
            )
        return _round_up(max(pages, default=1), self.shape.page_align)

    def _walk(self, group: Group, inside: Inside) -> tuple[str, int]:
        """The axes outside the blocks of one array, and the number of heads among these axes."""
        outer = self._grid(group, inside).partition("B")[0]
        return outer, inside.units if "H" in outer else 1

    def _page_bytes(self, group: Group, inside: Inside) -> int:
        """Bytes of one block of all heads in one array."""
        block, kernel = self.shape.entries(group)
        return inside.bytes * inside.units * (block if inside.level == "cell" else block // kernel)

    def _part(
        self,
        table: int,
        group: Group,
        layers: tuple[int, ...],
        insides: tuple[Inside, ...],
        shared_page: int,
        most_layers: int,
    ) -> Part:
        held = most_layers if shared_page else len(layers)
        placements: list[Placement] = []
        for inside in insides:
            page = self._page_bytes(group, inside)
            target = shared_page or _round_up(page, self.shape.page_align)
            strides, size = self._strides(group, inside, held, page, target)
            region = 0 if shared_page else len(self.regions)
            if not shared_page or not self.regions:
                suffix = f".{inside.places[0].component}" if len(insides) > 1 else ""
                name = "cache" if shared_page else group.name + suffix
                self.regions.append(Region(name, size))
            rows = np.arange(len(layers), dtype=np.int64) * strides["L"]
            placements += [
                place_component(
                    group,
                    self.shape,
                    self.rank,
                    place,
                    kernel_block_stride=strides["B"],
                    slot_stride=strides["N"],
                    unit_stride=strides["H"],
                    regions=np.full(len(rows), region, dtype=np.int64),
                    pages=rows,
                )
                for place in inside.places
            ]
        paged = len(insides) == 1 and set(self._grid(group, inside)[:2]) == {"L", "B"}
        return Part(
            group=group.name,
            layers=np.asarray(layers, dtype=np.int64),
            table=table,
            pool=0 if shared_page else table,
            num_blocks=self.num_blocks,
            block_entries=self.shape.entries(group)[0],
            page_bytes=page if paged else 0,
            page_slack=target - page if paged else 0,
            interior=self.shape.interior_for(group),
            placements=tuple(placements),
        )

    def _grid(self, group: Group, inside: Inside) -> str:
        """Axes that the engine's order walks around this interior, outermost first."""
        order = self.shape.order.removesuffix("C")
        if inside.level == "page" or inside.units == 1:
            # the order does not walk a single head, or heads that the page arranges itself
            crossed = inside.level == "page" and order[:2] not in ("LB", "BL")
            if (
                crossed
                and not group.is_state
                and max(page_question(group, self.shape, self.rank).units) > 1
            ):
                self._refuse_order(group)
            order = order.replace("H", "")
        if inside.level == "cell":
            return order
        if "H" in order and order.index("N") < order.index("H"):
            self._refuse_order(group)
        return order.replace("N", "")

    def _refuse_order(self, group: Group) -> None:
        raise DescriptionError(
            f"group {group.name!r}: interior {self.shape.interior_for(group)!r} does not exist in "
            f"order {self.shape.order}, which keeps heads or slots outside that the interior "
            "arranges itself; choose LBHNC or BLHNC"
        )

    def _strides(
        self, group: Group, inside: Inside, layers: int, page: int, target: int
    ) -> tuple[dict[str, int], int]:
        """Strides of the axes L, B (kernel blocks), H and N of one array, and its size."""
        block, kernel = self.shape.entries(group)
        grid = self._grid(group, inside)
        sizes = {"L": layers, "B": self.num_blocks * (block // kernel)}
        sizes |= {"H": inside.units, "N": kernel}
        outer = max(grid.index("L"), grid.index("B")) + 1
        if target != page:
            if set(grid[:outer]) != {"L", "B"}:
                raise DescriptionError(
                    f"order {self.shape.order} cannot pad pages to {target} bytes: heads lie "
                    "outside the page; choose page_align=1 or an order that begins with LB or BL"
                )
            if block != kernel:
                raise DescriptionError(
                    f"pages of group {group.name!r} cannot be padded to {target} bytes and split "
                    f"into kernel blocks of {kernel} entries; drop one of the two"
                )
        strides, current = {"H": 0, "N": 0}, inside.bytes
        for index in reversed(range(len(grid))):
            axis = grid[index]
            if index == outer - 1 and target != page:
                current = target
            strides[axis] = current
            current *= sizes[axis]
        return strides, current


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
