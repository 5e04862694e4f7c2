"""The memory that a shape implies, where no tensors say otherwise: one array a group.

Arrays are dense but for padding. The engine's order walks layers, blocks, heads and slots around
what the interior arranges; with `overlay` all groups lie over each other in one storage, whose
pages are as large as the largest. What an order, an interior and a padding cannot be together is
refused here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import DescriptionError
from kvferry.layout.interior import Inside, Place, arrange
from kvferry.layout.model import CacheModel, Group
from kvferry.layout.parts import Ints, Part, Placement, Region, page_question, place_component
from kvferry.layout.shape import EngineShape, Rank


@dataclass(frozen=True, slots=True)
class Built:
    """What one rank holds, and where."""

    parts: tuple[Part, ...]
    regions: tuple[Region, ...]


def build_parts(model: CacheModel, shape: EngineShape, rank: Rank, num_blocks: int) -> Built:
    return _Builder(model, shape, rank, num_blocks).build()


@dataclass(slots=True)
class _Builder:
    model: CacheModel
    shape: EngineShape
    rank: Rank
    num_blocks: int
    regions: list[Region] = field(default_factory=list)

    def build(self) -> Built:
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
        parts = []
        for table, group, layers, insides in arranged:
            parts.append(self._part(table, group, layers, insides, shared_page, most_layers))
        return Built(tuple(parts), tuple(self.regions))

    def _shared_page(self, arranged: list[tuple[int, Group, Any, tuple[Inside, ...]]]) -> int:
        pages, walks = [], set()
        for _, group, _, insides in arranged:
            if len(insides) != 1:
                raise DescriptionError(
                    f"group {group.name!r}: interior 'split' keeps several arrays, "
                    "which cannot overlay other groups in one storage"
                )
            _, kernel = self.shape.entries(group)
            pages.append(self._page_bytes(insides[0], kernel) * self._ratio(group))
            walks.add(self._walk(group, insides[0]))
        if len(walks) > 1:
            raise DescriptionError(
                f"order {self.shape.order} keeps heads outside blocks, and the groups "
                f"{[group.name for _, group, _, _ in arranged]} do not have the same: blocks of "
                "one would overlay parts of several of another; choose an order that begins "
                "with LB or BL"
            )
        return _round_up(max(pages, default=1), self.shape.page_align)

    def _walk(self, group: Group, inside: Inside) -> tuple[str, int]:
        """How the blocks of one array lie: axes outside of them, and heads among these."""
        outer = self._grid(group, inside).partition("B")[0]
        return outer, inside.units if "H" in outer else 1

    def _ratio(self, group: Group) -> int:
        block, kernel = self.shape.entries(group)
        return block // kernel

    def _page_bytes(self, inside: Inside, slots: int) -> int:
        """Bytes of one kernel block of all heads in one array."""
        if inside.level == "cell":
            return inside.bytes * inside.units * slots
        return inside.bytes * (inside.units if inside.level == "head" else 1)

    def _part(
        self,
        table: int,
        group: Group,
        layers: tuple[int, ...],
        insides: tuple[Inside, ...],
        shared_page: int,
        most_layers: int,
    ) -> Part:
        block, kernel = self.shape.entries(group)
        held = max(most_layers, 1) if shared_page else len(layers)
        placements: list[Placement] = []
        page, slack = 0, 0
        for index, inside in enumerate(insides):
            page = self._page_bytes(inside, kernel) * self._ratio(group)
            target = shared_page or _round_up(page, self.shape.page_align)
            strides, size = self._strides(group, inside, held, page, target)
            paged = set(self._grid(group, inside)[:2]) == {"L", "B"}
            slack = target - page if paged else 0
            region = 0 if shared_page else len(self.regions)
            if not shared_page or not self.regions:
                suffix = f".{inside.places[0].component}" if len(insides) > 1 else ""
                name = "cache" if shared_page else group.name + suffix
                self.regions.append(Region(name, size))
            rows = np.arange(len(layers), dtype=np.int64) * strides["L"]
            placements += [
                self._placement(group, place, strides, region, rows) for place in inside.places
            ]
            if index == 0 and not paged:
                page = 0
        return Part(
            group=group.name,
            layers=np.asarray(layers, dtype=np.int64),
            table=table,
            pool=0 if shared_page else table,
            num_blocks=self.num_blocks,
            block_entries=block,
            page_bytes=page if len(insides) == 1 else 0,
            page_slack=slack if len(insides) == 1 else 0,
            interior=self.shape.interior_for(group),
            placements=tuple(placements),
        )

    def _grid(self, group: Group, inside: Inside) -> str:
        """Axes that the engine's order walks around this interior, outermost first."""
        order = self.shape.order.removesuffix("C")
        if inside.level == "page" or inside.units == 1:
            # heads that the page arranges itself (or a single one) take no part in the order
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
            f"order {self.shape.order}, whose heads lie outside what it arranges; choose "
            "LBHNC or BLHNC"
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

    def _placement(
        self, group: Group, place: Place, strides: dict[str, int], region: int, rows: Ints
    ) -> Placement:
        return place_component(
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


def _round_up(value: int, step: int) -> int:
    return math.ceil(value / step) * step
