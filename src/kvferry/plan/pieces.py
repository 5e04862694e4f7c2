# SPDX-License-Identifier: Apache-2.0
"""Pieces: components of some layers of one group that move together from one rank to another.

On both sides a piece has one block table and one set of strides. For each kind of segment (its
number of entries, single or folded) a piece computes a *template* once: strided runs over rows. A
row is one place for each layer, or one place for all layers if both memories allow it.

The runs come from boxes of bytes. A box is `length` contiguous bytes that repeat over axes; each
axis has a count and a stride on both sides. Two rules coalesce the boxes, until nothing changes:

- If an axis has a stride equal to the length on both sides, the length absorbs it.
- If two boxes have equal axes, and one ends where the other begins on both sides, they become one.

So K and V fuse if they lie side by side, then slots, then heads, then layers: as far as the two
memories have the same arrangement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from kvferry.errors import IncompatibleError
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints
from kvferry.layout.shape import EngineShape
from kvferry.plan.tokens import Paging, whole_tiles

IRREGULAR = -1  # stride of layers at irregular distances; no run has this length


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
    """One component of a piece: its offsets from the page, and its axes."""

    src_offset: int
    dst_offset: int
    element_bytes: int
    axes: tuple[Axis, ...]
    src_slot: int
    dst_slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Merged boxes that differ in offsets only: one row for each offset and layer."""

    src_regions: Ints
    src_offsets: Ints
    dst_regions: Ints
    dst_offsets: Ints
    src_steps: Ints  # offsets of the repetitions
    dst_steps: Ints
    length: int
    entry_bytes: int
    src_slot: int
    dst_slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """How one kind of segment moves. Linear templates differ in their lengths only."""

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
        merged = [self._pad(box, pinned) for box in merge(boxes, pinned)]
        by_key: dict[tuple[object, ...], list[Box]] = {}
        for box in merged:
            by_key.setdefault(box.shape_key(), []).append(box)
        runs = tuple(self._runs(same) for same in by_key.values())
        offsets = tuple((box.src_offset, box.dst_offset) for box in merged)
        linear = repeats == 1 and all(box.entry_bytes for box in merged)
        return Template(runs, (tuple(by_key), offsets, 0 if linear else entries), linear)

    def _entry_axes(self, slab: Slab, entries: int) -> list[Axis]:
        """The axes of a segment's entries: evenly spaced slots, or whole tiles of slots."""
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

    def _pad(self, box: Box, pinned: Pinned) -> Box:
        """Extend a whole page over its padding, so that neighbouring pages become one run."""
        src, dst = self.src, self.dst
        whole = (
            all(pinned)
            and all(axis.role == "layers" for axis in box.axes)
            and box.src_offset == box.dst_offset == 0
            and box.length == src.page_bytes == dst.page_bytes
            and src.block_stride == dst.block_stride
        )
        padding = src.block_stride - box.length
        if not whole or not 0 < padding <= min(src.page_slack, dst.page_slack):
            return box
        return Box(0, 0, src.block_stride, box.axes)

    def _runs(self, boxes: Sequence[Box]) -> Runs:
        first = boxes[0]
        axes = [axis for axis in first.axes if axis.role != "layers"]
        rows = slice(0, 1) if len(axes) == len(first.axes) else slice(None)

        def spread(bases: Ints, offsets: list[int]) -> Ints:
            return (np.asarray(offsets, dtype=np.int64)[:, None] + bases[None, rows]).reshape(-1)

        none = [0] * len(boxes)
        return Runs(
            src_regions=spread(self.src.regions, none),
            src_offsets=spread(self.src.offsets, [box.src_offset for box in boxes]),
            dst_regions=spread(self.dst.regions, none),
            dst_offsets=spread(self.dst.offsets, [box.dst_offset for box in boxes]),
            src_steps=axis_offsets(axes, "src"),
            dst_steps=axis_offsets(axes, "dst"),
            length=first.length,
            entry_bytes=first.entry_bytes,
            src_slot=first.src_slot,
            dst_slot=first.dst_slot,
        )


def _layer_stride(side: Side) -> int:
    """The constant distance between layers of one region, or IRREGULAR."""
    if len(side.offsets) == 1:
        return 0
    if (side.regions != side.regions[0]).any():
        return IRREGULAR
    steps = np.diff(side.offsets)
    return int(steps[0]) if (steps == steps[0]).all() else IRREGULAR


class Axis(NamedTuple):
    times: int
    src_stride: int
    dst_stride: int
    role: str = ""  # "entries" (their number varies by request), "layers" (rows), or ""


@dataclass(frozen=True, slots=True)
class Box:
    """Bytes of one or more components, for one run of entries."""

    src_offset: int
    dst_offset: int
    length: int
    axes: tuple[Axis, ...]
    src_slot: int = 0  # bytes from one slot to the next, for runs that begin inside a block
    dst_slot: int = 0
    entry_bytes: int = 0  # > 0: `length` is this many bytes times the entries

    def shape_key(self) -> tuple[object, ...]:
        """Merged boxes with equal keys differ in their offsets only, and are bound together."""
        size = ("per entry", self.entry_bytes) if self.entry_bytes else self.length
        return (self.axes, size, self.src_slot, self.dst_slot)


class Pinned(NamedTuple):
    """On each side, whether every run begins at slot 0, so that slot strides do not matter."""

    src: bool
    dst: bool


def merge(boxes: Sequence[Box], pinned: Pinned) -> tuple[Box, ...]:
    """The fewest boxes that move exactly the bytes of these."""
    current = [_swallow(box) for box in boxes]
    while True:
        fused = [_swallow(box) for box in _fuse(current, pinned)]
        if len(fused) == len(current):
            return tuple(_finish(box) for box in fused)
        current = fused


def _swallow(box: Box) -> Box:
    """Absorb into the length every axis that continues it on both sides."""
    axes = [a for a in box.axes if a.times > 1 or a.role == "entries"]
    length, entry_bytes = box.length, box.entry_bytes
    found = True
    while found:
        found = False
        for axis in axes:
            if axis.src_stride == axis.dst_stride == length:
                entry_bytes = length if axis.role == "entries" else 0
                length *= axis.times
                axes.remove(axis)
                found = True
                break
    return replace(box, length=length, axes=tuple(axes), entry_bytes=entry_bytes)


def _fuse(boxes: list[Box], pinned: Pinned) -> list[Box]:
    """Join boxes that touch on both sides. A joined length is no longer a multiple of entries."""
    fused: list[Box] = []
    for box in sorted(boxes, key=lambda b: (b.dst_offset, b.src_offset)):
        last = fused[-1] if fused else None
        if (
            last is not None
            and last.axes == box.axes
            and (pinned.src or last.src_slot == box.src_slot)
            and (pinned.dst or last.dst_slot == box.dst_slot)
            and last.src_offset + last.length == box.src_offset
            and last.dst_offset + last.length == box.dst_offset
        ):
            fused[-1] = replace(
                last,
                length=last.length + box.length,
                src_slot=last.src_slot if last.src_slot == box.src_slot else 0,
                dst_slot=last.dst_slot if last.dst_slot == box.dst_slot else 0,
                entry_bytes=0,
            )
        else:
            fused.append(box)
    return fused


def _finish(box: Box) -> Box:
    """Merge neighbouring axes and order them for locality. A layer axis stays outermost."""
    layers = [a for a in box.axes if a.role == "layers"]
    axes = sorted(
        (a._replace(role="") for a in box.axes if a.role != "layers" and a.times > 1),
        key=lambda a: (a.src_stride, a.dst_stride),
    )
    merged: list[Axis] = []
    for axis in axes:  # in ascending order of strides: each may continue the one before it
        if merged:
            inner = merged[-1]
            if (
                axis.src_stride == inner.src_stride * inner.times
                and axis.dst_stride == inner.dst_stride * inner.times
            ):
                merged[-1] = inner._replace(times=inner.times * axis.times)
                continue
        merged.append(axis)
    return replace(box, axes=(*layers, *reversed(merged)))


def refine(src: Sequence[tuple[int, int]], dst: Sequence[tuple[int, int]]) -> list[Axis]:
    """Axes for both sides, from the (size, stride) pairs of each side, outermost first.

    If one side has an axis of 64 elements and the other 32 pairs, both get 32 pairs. Both sides
    must have the same number of elements, or some would be left out.
    """
    ours, theirs = list(src), list(dst)
    axes: list[Axis] = []
    while ours and theirs:
        (a, a_stride), (b, b_stride) = ours.pop(), theirs.pop()
        step = min(a, b)
        if max(a, b) % step:
            raise IncompatibleError(
                f"the two sides cut the same elements into {a}s and {b}s, which do not fit "
                f"together (source {list(src)}, destination {list(dst)})"
            )
        axes.append(Axis(step, a_stride, b_stride))
        if a > step:
            ours.append((a // step, a_stride * step))
        if b > step:
            theirs.append((b // step, b_stride * step))
    if (ours or theirs) and any(size != 1 for size, _ in (*ours, *theirs)):
        raise IncompatibleError(
            f"the two sides hold different numbers of elements: {math.prod(n for n, _ in src)} at "
            f"the source ({list(src)}), {math.prod(n for n, _ in dst)} at the destination "
            f"({list(dst)}); sizes and strides of one extent were expected"
        )
    return list(reversed(axes))


def axis_offsets(axes: Sequence[Axis], side: str) -> Ints:
    """Offsets of all repetitions of a run. The outermost axis varies slowest."""
    offsets = np.zeros(1, dtype=np.int64)
    for axis in axes:
        stride = axis.src_stride if side == "src" else axis.dst_stride
        steps = np.arange(axis.times, dtype=np.int64) * stride
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    return offsets


MOST_PADDING = 1 / 8  # of the request; beyond it, the extra bytes cost more than the runs save


def padded_tokens(model: CacheModel, src: EngineShape, dst: EngineShape, tokens: int) -> int:
    """How many tokens to move: up to the end of the last block if it pays, else `tokens`.

    Most prompts end inside a block. If the page keeps slots innermost (K of vLLM's CPU attention),
    the tokens of that block are hundreds of short runs, and the whole block is one run. The extra
    bytes land in blocks of this request, which the destination zeroes after the last token.

    Both sides' last blocks must end at the same token. Models with windows or states are never
    padded, because what they move depends on the token at which a request ends.
    """
    if any(group.residency.kind != "full" for group in model.groups):
        return tokens
    spans = {s.block_tokens(g) * s.dcp_for(g) for g in model.groups for s in (src, dst)}
    ends = {-(-tokens // span) * span for span in spans}
    end = max(ends)
    return end if len(ends) == 1 and end - tokens <= tokens * MOST_PADDING else tokens
