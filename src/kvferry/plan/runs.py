"""Strided runs: boxes of bytes that are affine on both sides, made as few and as long as possible.

A box is `length` contiguous bytes repeated over axes, each with a count and a stride on both sides.
Two rules, applied until nothing changes, do all the coalescing:

- an axis whose stride equals the length on both sides is swallowed by the length;
- two boxes with equal axes, of which one ends where the other begins on both sides, become one.

So K and V fuse where they lie side by side, then slots, then heads, then layers: whatever both
memories have in common, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvferry.errors import IncompatibleError
from kvferry.layout.parts import Ints


class Axis(NamedTuple):
    times: int
    src_stride: int
    dst_stride: int
    role: str = ""  # "entries" and "layers" are told apart: they vary per request and per row


@dataclass(frozen=True, slots=True)
class Box:
    """Bytes of some components of one layer, for one run of entries."""

    src_offset: int
    dst_offset: int
    length: int
    axes: tuple[Axis, ...]
    src_slot: int = 0  # bytes from one slot to the next: where a run begins that starts mid-block
    dst_slot: int = 0
    entry_bytes: int = 0  # > 0: `length` is this times the entries, and nothing was merged since


@dataclass(frozen=True, slots=True)
class Pattern:
    """One box as it is moved: axes outermost first, the layer axis taken out if it remains."""

    src_offset: int
    dst_offset: int
    length: int
    axes: tuple[Axis, ...]
    src_slot: int
    dst_slot: int
    entry_bytes: int
    spans_layers: bool  # the length covers all layers at once

    def shape_key(self) -> tuple[object, ...]:
        """Patterns with equal keys differ in offsets only, and are bound together."""
        size = ("per entry", self.entry_bytes) if self.entry_bytes else self.length
        return (self.axes, size, self.src_slot, self.dst_slot, self.spans_layers)


class Pinned(NamedTuple):
    """Whether every run begins at slot 0 on a side, so that slot strides do not matter there."""

    src: bool
    dst: bool


def merge(boxes: Sequence[Box], pinned: Pinned) -> tuple[Pattern, ...]:
    """The fewest patterns that move exactly these boxes."""
    current = [_swallow(box) for box in boxes]
    while True:
        fused = [_swallow(box) for box in _fuse(current, pinned)]
        if len(fused) == len(current):
            return tuple(_finish(box) for box in fused)
        current = fused


def _swallow(box: Box) -> Box:
    """Let the length absorb every axis that continues it on both sides."""
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
    """Join boxes that touch on both sides. A joined length is no multiple of entries any more."""
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


def _finish(box: Box) -> Pattern:
    """Merge neighbouring axes, order them for locality, and take the layer axis out."""
    spans_layers = not any(a.role == "layers" for a in box.axes)
    axes = sorted(
        (a._replace(role="") for a in box.axes if a.role != "layers" and a.times > 1),
        key=lambda a: (a.src_stride, a.dst_stride),
    )
    merged: list[Axis] = []
    for axis in axes:  # ascending strides: each may continue the one before it
        if merged:
            inner = merged[-1]
            if (
                axis.src_stride == inner.src_stride * inner.times
                and axis.dst_stride == inner.dst_stride * inner.times
            ):
                merged[-1] = inner._replace(times=inner.times * axis.times)
                continue
        merged.append(axis)
    return Pattern(
        box.src_offset,
        box.dst_offset,
        box.length,
        tuple(reversed(merged)),
        box.src_slot,
        box.dst_slot,
        box.entry_bytes,
        spans_layers,
    )


def refine(src: Sequence[tuple[int, int]], dst: Sequence[tuple[int, int]]) -> list[Axis]:
    """Axes that both sides walk alike, from (size, stride) pairs of one extent, outermost first.

    Where one side keeps 64 elements in a row and the other 32 pairs, both are 32 pairs. Both must
    end together: what only one of them walks would be left out.
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
    """Offsets of all repetitions of a run, outermost axis slowest."""
    offsets = np.zeros(1, dtype=np.int64)
    for axis in axes:
        stride = axis.src_stride if side == "src" else axis.dst_stride
        steps = np.arange(axis.times, dtype=np.int64) * stride
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    return offsets
