"""What moves in one go: some components of some layers of one group, from one rank to another.

On both sides a piece has one block table and one set of strides. What it needs per kind of segment
(so many entries, once or folded) is worked out once, as a *template* of strided runs over rows;
a row is one place per layer, or one for all of them where both memories allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.layout.parts import Ints
from kvferry.plan.runs import Axis, Box, Pattern, Pinned, axis_offsets, merge, refine
from kvferry.plan.tokens import Paging, whole_tiles

IRREGULAR = -1  # stride of layers that have none; no run ever matches it


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One rank's end of a piece."""

    table: int
    pool: int
    num_blocks: int
    null_block: int | None
    paging: Paging
    block_stride: int
    tile_stride: int
    page_bytes: int
    page_slack: int
    regions: Ints  # of each layer
    offsets: Ints  # of each layer: its page 0


@dataclass(frozen=True, slots=True)
class Slab:
    """One component as a piece moves it: offsets from the page, axes within it."""

    src_offset: int
    dst_offset: int
    element_bytes: int
    axes: tuple[Axis, ...]
    src_slot: int
    dst_slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Patterns that differ in offsets only: one row for each offset and layer."""

    src_regions: Ints
    src_offsets: Ints
    dst_regions: Ints
    dst_offsets: Ints
    axes: tuple[Axis, ...]
    src_steps: Ints  # offsets of the repetitions that `axes` describe
    dst_steps: Ints
    length: int
    entry_bytes: int
    src_slot: int
    dst_slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """How one kind of segment moves. Linear templates of different lengths are one and the same."""

    runs: tuple[Runs, ...]
    signature: tuple[object, ...]
    linear: bool


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    group: str
    opaque: bool
    src: Side
    dst: Side
    slabs: tuple[Slab, ...]
    _templates: dict[tuple[int, ...], Template] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> int:
        return len(self.src.offsets)

    def template(self, form: tuple[int, int, int, int]) -> Template:
        """Runs of a segment of `form`: entries, repeats, and the slots between repeats."""
        if form not in self._templates:
            self._templates[form] = self._make(*form)
        return self._templates[form]

    def _make(self, entries: int, repeats: int, src_step: int, dst_step: int) -> Template:
        pinned = Pinned(
            repeats == 1 and entries == self.src.paging.block_entries,
            repeats == 1 and entries == self.dst.paging.block_entries,
        )
        layers = Axis(self.layers, _layer_stride(self.src), _layer_stride(self.dst), "layers")
        boxes = [
            Box(
                slab.src_offset,
                slab.dst_offset,
                slab.element_bytes,
                (
                    *slab.axes,
                    *self._entry_axes(slab, entries),
                    Axis(repeats, src_step * slab.src_slot, dst_step * slab.dst_slot),
                    layers,
                ),
                slab.src_slot,
                slab.dst_slot,
            )
            for slab in self.slabs
        ]
        patterns = [self._pad(p, pinned) for p in merge(boxes, pinned)]
        by_key: dict[tuple[object, ...], list[Pattern]] = {}
        for pattern in patterns:
            by_key.setdefault(pattern.shape_key(), []).append(pattern)
        runs = tuple(self._runs(same) for same in by_key.values())
        offsets = tuple((p.src_offset, p.dst_offset) for p in patterns)
        linear = repeats == 1 and all(p.entry_bytes for p in patterns)
        return Template(runs, (tuple(by_key), offsets, 0 if linear else entries), linear)

    def _entry_axes(self, slab: Slab, entries: int) -> list[Axis]:
        """A segment's entries: evenly spaced slots, or whole tiles of them."""
        src, dst = self.src, self.dst
        whole = whole_tiles(src.paging, dst.paging)
        if whole <= 1 or entries % whole:
            return [Axis(entries, slab.src_slot, slab.dst_slot, "entries")]

        def tiled(paging: Paging, tile_stride: int, slot_stride: int) -> list[tuple[int, int]]:
            if paging.tile == 1:
                return [(entries, slot_stride)]
            return [(entries // paging.tile, tile_stride), (paging.tile, slot_stride)]

        return refine(
            tiled(src.paging, src.tile_stride, slab.src_slot),
            tiled(dst.paging, dst.tile_stride, slab.dst_slot),
        )

    def _pad(self, pattern: Pattern, pinned: Pinned) -> Pattern:
        """Let a whole page take its padding along, so that neighbouring pages become one run."""
        src, dst = self.src, self.dst
        whole = (
            all(pinned)
            and not pattern.axes
            and pattern.src_offset == pattern.dst_offset == 0
            and pattern.length == src.page_bytes == dst.page_bytes
            and src.block_stride == dst.block_stride
        )
        padding = src.block_stride - pattern.length
        if not whole or not 0 < padding <= min(src.page_slack, dst.page_slack):
            return pattern
        return Pattern(0, 0, src.block_stride, (), 0, 0, 0, pattern.spans_layers)

    def _runs(self, patterns: Sequence[Pattern]) -> Runs:
        first = patterns[0]
        rows = slice(0, 1) if first.spans_layers else slice(None)

        def spread(bases: Ints, offsets: list[int]) -> Ints:
            return (np.asarray(offsets, dtype=np.int64)[:, None] + bases[None, rows]).reshape(-1)

        none = [0] * len(patterns)
        return Runs(
            src_regions=spread(self.src.regions, none),
            src_offsets=spread(self.src.offsets, [p.src_offset for p in patterns]),
            dst_regions=spread(self.dst.regions, none),
            dst_offsets=spread(self.dst.offsets, [p.dst_offset for p in patterns]),
            axes=first.axes,
            src_steps=axis_offsets(first.axes, "src"),
            dst_steps=axis_offsets(first.axes, "dst"),
            length=first.length,
            entry_bytes=first.entry_bytes,
            src_slot=first.src_slot,
            dst_slot=first.dst_slot,
        )


def _layer_stride(side: Side) -> int:
    """Constant distance between layers in one region, if there is one."""
    if len(side.offsets) == 1:
        return 0
    if (side.regions != side.regions[0]).any():
        return IRREGULAR
    steps = np.diff(side.offsets)
    return int(steps[0]) if (steps == steps[0]).all() else IRREGULAR
