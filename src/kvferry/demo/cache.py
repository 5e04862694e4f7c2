# SPDX-License-Identifier: Apache-2.0
"""The expected value of every byte of the demo's caches, computed without the planner.

A hash gives each logical byte (request, group, component, layer, entry, unit, byte of the unit) its
own value. Producers write these values and consumers look for them, where the rank's layout says
that its engine keeps them. Which entries a rank holds before and after a hand-over is counted here,
from lengths and shapes: nothing of `plan` is used, so that the check finds mistakes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DescriptionError
from kvferry.layout.model import CacheModel, Component, Group
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Span

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

POISON = 0x5A  # source bytes that belong to no request
CANARY = 0xA5  # destination bytes that nothing may write
CHUNK_BYTES = 2 << 20  # of values made at a time, so that they stay in the processor's cache
ABSENT = -1  # stands for the entry of an empty slot


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One component on one rank.

    `array` has the axes layer, block, tile, slot, unit, and then the axes of a unit, in logical
    order, as unsigned words of one size.
    """

    number: tuple[int, int]  # of the group in its model, and of the component in the group
    group: Group
    component: Component
    layers: tuple[int, ...]
    units: Span
    array: NDArray[Any]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.array[:, 0].size * self.array.itemsize

    def write(
        self, ids: Ints, empty: int, key: tuple[int, ...] = (), entries: Ints | None = None
    ) -> None:
        """Write blocks `ids`. `entries` (blocks x tiles x slots) are of the request and component
        that `key` names. All bytes of a slot without an entry become `empty`."""
        for some, values in self._expected(ids, empty, key, entries):
            self.array[:, some] = values

    def wrong(
        self, ids: Ints, empty: int, key: tuple[int, ...] = (), entries: Ints | None = None
    ) -> int:
        """Number of bytes in blocks `ids` that differ from what `write` writes."""
        wrong = 0
        for some, values in self._expected(ids, empty, key, entries):
            found = self.array[:, some]
            if not np.array_equal(found, values):
                a, b = (np.ascontiguousarray(x).view(np.uint8) for x in (found, values))
                wrong += int(np.count_nonzero(a != b))
        return wrong

    def _expected(
        self, ids: Ints, empty: int, key: tuple[int, ...], entries: Ints | None
    ) -> Iterator[tuple[Ints, NDArray[Any]]]:
        """Some blocks at a time, with their values in the form of `array`."""
        word = np.frombuffer(bytes([empty]) * self.array.itemsize, self.array.dtype)[0]
        step = max(1, CHUNK_BYTES // self.block_bytes)
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            if entries is None:
                shape = (len(self.layers), len(some), *self.array.shape[2:])
                yield some, np.full(shape, word)
                continue
            present = entries[start : start + step]
            values = self._content(key, present)
            values[:, present == ABSENT] = word
            yield some, values

    def _content(self, key: tuple[int, ...], entries: Ints) -> NDArray[Any]:
        """Values of these entries. Absent ones get values too."""
        seed = np.asarray(np.random.SeedSequence(key).generate_state(1, np.uint64))
        layers = _mix(np.asarray(self.layers, dtype=np.uint64) + seed)
        units = _mix(np.arange(*self.units, dtype=np.uint64) ^ ~seed)
        mixed = _mix(entries.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed)
        mixed = _mix((mixed[None, ...] ^ layers[:, None, None, None])[..., None] + units)
        unit_bytes = self.component.unit_bytes
        places = np.arange(1, -(-unit_bytes // 8) + 1, dtype=np.uint64)
        words = mixed[..., None] * (_mix(places) | np.uint64(1))
        words ^= _mix(~places)
        found = words.view(np.uint8)
        if found.shape[-1] != unit_bytes:
            found = np.ascontiguousarray(found[..., :unit_bytes])
        shape = (len(self.layers), *entries.shape, *self.array.shape[4:])
        return found.view(self.array.dtype).reshape(shape)


def make_views(model: CacheModel, layout: RankLayout, regions: Sequence[Bytes]) -> list[View]:
    """Views of all components on a rank. `regions` are the regions of its layout."""
    views = []
    for part in layout.parts:
        group, layers = model.group(part.group), tuple(part.layers.tolist())
        number = model.groups.index(group)
        if part.is_opaque:
            raise DescriptionError(
                f"group {group.name!r}: the content of an opaque page is not known, so it "
                "cannot be checked; choose another interior"
            )
        for p in part.placements:
            component = group.component(p.component)
            sizes, strides, run_bytes = [*p.dim_sizes], [*p.dim_strides], component.element_bytes
            while sizes and strides[-1] == run_bytes:  # inner dims that are contiguous
                run_bytes *= sizes.pop()
                strides.pop()
            tiles = part.block_entries // p.tile_slots
            outer = (len(layers), part.num_blocks, tiles, p.tile_slots, p.units.size)
            layer_stride = int(p.offsets[1] - p.offsets[0]) if len(layers) > 1 else 0
            outer_strides = (layer_stride, p.block_stride, p.tile_stride, p.slot_stride)
            array: Bytes = np.ndarray(
                (*outer, *sizes, run_bytes),
                np.uint8,
                regions[int(p.regions[0])],
                int(p.offsets[0]),
                (*outer_strides, p.unit_stride, *strides, 1),
            )
            word = next(size for size in (8, 4, 2, 1) if run_bytes % size == 0)
            which = number, group.components.index(component)
            views.append(View(which, group, component, layers, p.units, array.view(f"u{word}")))
    return views


def slot_entries(view: View, shape: EngineShape, tp_rank: int, blocks: Span, held: Span) -> Ints:
    """The entry in each slot (blocks x tiles x slots) of a request's blocks on one rank."""
    group, in_block = view.group, view.array.shape[2:4]
    block = in_block[0] * in_block[1]
    per = max(1, shape.interleave // group.tokens_per_entry)
    ranks = shape.dcp_for(group)
    mine = tp_rank % ranks
    if group.residency.kind == "ring":
        entries = np.full(block, ABSENT, dtype=np.int64)
        every = np.arange(*held)
        every = every[every // per % ranks == mine]
        entries[every % block] = every
    else:
        local = np.arange(blocks.start * block, blocks.stop * block)
        entries = (local // per * ranks + mine) * per + local % per
        entries[(entries < held.start) | (entries >= held.stop)] = ABSENT
    return entries.reshape(-1, *in_block)


def block_span(group: Group, shape: EngineShape) -> int:
    """Entries that one block covers, over the ranks that share them."""
    return shape.entries(group)[0] * shape.dcp_for(group)


def is_single(group: Group) -> bool:
    """Whether the group has one block per request of any length. A prefix never contains it."""
    return group.residency.kind in ("state", "ring")


@dataclass(frozen=True, slots=True)
class Extent:
    """Entries of one group of a request, in blocks of one side."""

    blocks: int  # in the request's table
    first_held: int  # block number; the blocks before it were dropped
    entries: Span  # that lie in the blocks
    first_loaded: int = 0  # block number; a load must not touch the blocks before it


def source_extent(group: Group, src: EngineShape, tokens: int) -> Extent:
    """The entries that the source holds of a request."""
    stop, needed = _stop_and_needed(group, tokens)
    if is_single(group):
        return Extent(1, 0, Span(needed, stop))
    span = block_span(group, src)
    first = 0 if src.full_residency else needed // span
    blocks = max(-(-stop // span), first)
    return Extent(blocks, first, Span(min(first * span, stop), stop))


def destination_extent(
    group: Group, src: EngineShape, dst: EngineShape, tokens: int, skip: int
) -> Extent:
    """The entries that a load must bring to the destination: whole blocks with entries that it
    lacked, as far as the source still holds them."""
    given = source_extent(group, src, tokens)
    if is_single(group):
        return given
    stop, needed = _stop_and_needed(group, tokens)
    span = block_span(group, dst)
    first = 0 if dst.full_residency else needed // span
    loaded = max(first, skip // group.tokens_per_entry // span)
    start = max(loaded * span, given.entries.start)
    blocks = max(-(-stop // span), first)
    if start >= stop:
        return Extent(blocks, first, Span(stop, stop), blocks)
    return Extent(blocks, first, Span(start, stop), loaded)


def _stop_and_needed(group: Group, tokens: int) -> tuple[int, int]:
    """The end of the existing entries, and the first entry that the next token reads."""
    if group.is_state:
        return 1, 0
    per = group.tokens_per_entry
    stop = -(-tokens // per) if group.partial_entries else tokens // per
    return stop, group.residency.needed_from(tokens) // per


def _mix(values: Words) -> Words:
    """The finaliser of splitmix64: every input bit changes about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
