"""The expected value of every byte of the demo's caches, computed without the planner.

A hash gives each logical byte (request, group, component, layer, entry, unit, byte of the unit) its
own value. Producers write these values and consumers look for them, through plain NumPy views of a
rank's memory: the memory is reshaped in the engine's physical order and transposed to the logical
one. These views use no placement, stride or address of `layout` and `plan`, so that the check finds
mistakes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DescriptionError
from kvferry.layout.model import CacheModel, Component, Group
from kvferry.layout.shape import EngineShape, Rank, Span

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

    `array` has the axes layer, block, kernel block, slot, unit, and then the axes of a unit, in
    logical order, as unsigned words of one size.
    """

    group: Group
    component: Component
    layers: tuple[int, ...]
    units: Span
    array: NDArray[Any]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.array[:, 0].size * self.array.itemsize

    def chunks(self, ids: Ints) -> Iterator[slice]:
        step = max(1, CHUNK_BYTES // self.block_bytes)
        return (slice(start, start + step) for start in range(0, len(ids), step))


def make_views(
    model: CacheModel,
    shape: EngineShape,
    rank: Rank,
    num_blocks: int,
    regions: dict[str, Bytes],
) -> list[View]:
    """Views of all components on a rank. `regions` is its memory, by the names of its layout."""
    held = {g.name: shape.layers(model, g, rank.pp) for g in model.groups}
    most = max(map(len, held.values()))
    views = []
    for group in model.groups:
        layers = held[group.name]
        if layers:
            pager = _Pager(group, shape, rank, num_blocks, most if shape.overlay else len(layers))
            for component, raw in pager.components(regions):
                units = shape.units(group, component, rank.tp)
                views.append(View(group, component, layers, units, _words(raw[: len(layers)])))
    return views


def content(view: View, key: tuple[int, ...], entries: Ints) -> NDArray[Any]:
    """Values of these entries (blocks x kernel blocks x slots) in the form of `view.array`.

    `key` names the request and the component. Absent entries get values too; the caller overwrites
    them.
    """
    seed = np.asarray(np.random.SeedSequence(key).generate_state(1, np.uint64))
    layers = _mix(np.asarray(view.layers, dtype=np.uint64) + seed)
    units = _mix(np.arange(*view.units, dtype=np.uint64) ^ ~seed)
    mixed = _mix(entries.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed)
    mixed = _mix((mixed[None, ...] ^ layers[:, None, None, None])[..., None] + units)
    unit_bytes = view.component.unit_bytes
    places = np.arange(1, -(-unit_bytes // 8) + 1, dtype=np.uint64)
    words = mixed[..., None] * (_mix(places) | np.uint64(1))
    words ^= _mix(~places)
    found = words.view(np.uint8)
    if found.shape[-1] != unit_bytes:
        found = np.ascontiguousarray(found[..., :unit_bytes])
    shape = (len(view.layers), *entries.shape, *view.array.shape[4:])
    return found.view(view.array.dtype).reshape(shape)


def write_entries(view: View, key: tuple[int, ...], ids: Ints, entries: Ints) -> int:
    """Write entries into blocks `ids`, and poison into empty slots. Returns the number of bytes."""
    for part in view.chunks(ids):
        values = content(view, key, entries[part])
        values[:, entries[part] == ABSENT] = _repeated(POISON, view.array.dtype)
        view.array[:, ids[part]] = values
    return view.block_bytes * len(ids)


def wrong_entries(view: View, key: tuple[int, ...], ids: Ints, entries: Ints) -> int:
    """Number of wrong bytes in blocks `ids`. Empty slots must be zero."""
    wrong = 0
    for part in view.chunks(ids):
        values = content(view, key, entries[part])
        values[:, entries[part] == ABSENT] = 0
        wrong += _differing(view.array[:, ids[part]], values)
    return wrong


def write_byte(view: View, ids: Ints, byte: int) -> None:
    for part in view.chunks(ids):
        view.array[:, ids[part]] = _repeated(byte, view.array.dtype)


def wrong_byte(view: View, ids: Ints, byte: int) -> int:
    """Number of bytes in blocks `ids` that are not `byte`."""
    wrong = 0
    for part in view.chunks(ids):
        found = view.array[:, ids[part]]
        wrong += _differing(found, np.full(found.shape, _repeated(byte, found.dtype)))
    return wrong


def slot_entries(group: Group, shape: EngineShape, tp_rank: int, blocks: Span, held: Span) -> Ints:
    """The entry in each slot (blocks x kernel blocks x slots) of a request's blocks on one rank."""
    block, kernel = shape.entries(group)
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
    return entries.reshape(-1, block // kernel, kernel)


def block_span(group: Group, shape: EngineShape) -> int:
    """Entries that one block covers, over the ranks that share them."""
    return shape.entries(group)[0] * shape.dcp_for(group)


def is_single(group: Group) -> bool:
    """Whether the group has one block per request, whatever its length. Never in a held prefix."""
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
    """The entries that the destination should hold after a load.

    It loads what it lacks, in whole blocks, as far as the source still has it.
    """
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


def _repeated(byte: int, dtype: np.dtype[Any]) -> Any:
    return np.frombuffer(bytes([byte]) * dtype.itemsize, dtype)[0]


def _differing(found: NDArray[Any], expected: NDArray[Any]) -> int:
    if np.array_equal(found, expected):
        return 0
    a, b = (np.ascontiguousarray(x).view(np.uint8) for x in (found, expected))
    return int(np.count_nonzero(a != b))


@dataclass(frozen=True, slots=True)
class _Pager:
    group: Group
    shape: EngineShape
    rank: Rank
    num_blocks: int
    layers: int

    def components(self, regions: dict[str, Bytes]) -> Iterator[tuple[Component, Bytes]]:
        """Bytes with the axes layer, block, kernel block, slot, unit, and the axes of a unit."""
        interior = self.shape.interior_for(self.group)
        if interior.partition(":")[0] == "opaque":
            raise DescriptionError(
                f"group {self.group.name!r}: the content of an opaque page is not known, so it "
                "cannot be checked; choose another interior"
            )
        if interior == "split" and len(self.group.components) > 1:
            for c in self.group.components:
                yield c, self._cells(regions[f"{self.group.name}.{c.name}"], c, c.unit_bytes)
            return
        memory = regions["cache" if self.shape.overlay else self.group.name]
        if interior in ("joined", "split"):
            cell = sum(c.unit_bytes for c in self.group.components)
            pages = self._cells(memory, self.group.components[0], cell)
            sizes = [c.unit_bytes for c in self.group.components]
            yield from zip(self.group.components, _cut(pages, sizes), strict=True)
        elif interior == "cpu":
            yield from self._cpu(memory)
        elif interior == "state":
            yield from self._state(memory)
        else:
            yield from self._planes(memory)

    @property
    def _split(self) -> tuple[int, int]:
        """Kernel blocks in a block, and slots in a kernel block."""
        block, kernel = self.shape.entries(self.group)
        return block // kernel, kernel

    def _units(self, component: Component) -> int:
        return self.shape.units(self.group, component, self.rank.tp).size

    def _grid(self, memory: Bytes, order: str, sizes: dict[str, int]) -> Bytes:
        """Memory of this physical order, with axes sorted L, B, N, H, C; B is split in two."""
        ratio, _ = self._split
        sizes = {"L": self.layers, "B": self.num_blocks * ratio} | sizes
        if sizes.get("H") == 1:  # with one head, the place of its axis makes no difference
            order = order.replace("H", "").replace("C", "HC")
        lengths = [sizes[axis] for axis in order]
        if set(order[:2]) == {"L", "B"}:  # pages may be padded
            pages = memory.reshape(lengths[0], lengths[1], -1)
            memory = pages[:, :, : prod(lengths[2:])]
        array = memory.reshape(lengths)
        array = array.transpose([order.index(axis) for axis in "LBNHC" if axis in order])
        shape = (self.layers, self.num_blocks, ratio, *array.shape[2:])
        return _same_memory(array, array.reshape(shape))

    def _cells(self, memory: Bytes, component: Component, cell_bytes: int) -> Bytes:
        sizes = {"N": self._split[1], "H": self._units(component), "C": cell_bytes}
        return self._grid(memory, self.shape.order, sizes)

    def _cpu(self, memory: Bytes) -> Iterator[tuple[Component, Bytes]]:
        k, v = self.group.components
        slots, k_bytes = self._split[1], self._split[1] * k.unit_bytes
        sizes = {"H": self._units(k), "C": k_bytes + slots * v.unit_bytes}
        heads = self._grid(memory, self.shape.order.replace("N", ""), sizes)
        outer = heads.shape[:-1]
        keys = heads[..., :k_bytes].reshape(*outer, *k.dims, slots, k.element_bytes)
        yield k, np.moveaxis(keys, -2, 3)
        yield v, np.moveaxis(heads[..., k_bytes:].reshape(*outer, slots, v.unit_bytes), -2, 3)

    def _pages(self, memory: Bytes, page_bytes: int) -> Bytes:
        order = "".join(axis for axis in self.shape.order if axis in "LBC")
        return self._grid(memory, order, {"C": page_bytes})

    def _planes(self, memory: Bytes) -> Iterator[tuple[Component, Bytes]]:
        slots = self._split[1]
        sizes = [slots * self._units(c) * c.unit_bytes for c in self.group.components]
        planes = _cut(self._pages(memory, sum(sizes)), sizes)
        token_major = self.shape.order.index("N") < self.shape.order.index("H")
        for c, plane in zip(self.group.components, planes, strict=True):
            if token_major:
                yield c, plane.reshape(*plane.shape[:3], slots, -1, c.unit_bytes)
            else:
                heads = plane.reshape(*plane.shape[:3], -1, slots, c.unit_bytes)
                yield c, heads.swapaxes(3, 4)

    def _state(self, memory: Bytes) -> Iterator[tuple[Component, Bytes]]:
        """Convolution sections share one channels x rows array; the other states follow it."""
        conv = [c for c in self.group.components if c.name.startswith("conv_")]
        rest = [c for c in self.group.components if c not in conv]
        sizes = [self._units(c) * c.unit_bytes for c in (*conv, *rest)]
        conv_bytes = sum(sizes[: len(conv)])
        pages = self._pages(memory, sum(sizes))[:, :, :, None, :]  # one slot
        outer = pages.shape[:-1]
        if conv:
            rows, element = conv[0].dims[1], conv[0].element_bytes
            if self.shape.conv_order == "DS":
                channels = pages[..., :conv_bytes].reshape(*outer, -1, rows, element)
            else:
                by_row = pages[..., :conv_bytes].reshape(*outer, rows, -1, element)
                channels = by_row.swapaxes(-3, -2)
            sections = _cut(channels, [self._units(c) * c.dims[0] for c in conv], axis=-3)
            for c, mine in zip(conv, sections, strict=True):
                yield c, mine.reshape(*outer, -1, c.dims[0], rows, element)
        if rest:
            planes = _cut(pages[..., conv_bytes:], sizes[len(conv) :])
            for c, plane in zip(rest, planes, strict=True):
                yield c, plane.reshape(*outer, -1, c.unit_bytes)


def _cut(array: Bytes, sizes: list[int], axis: int = -1) -> list[Bytes]:
    """Views of consecutive parts of an axis."""
    return np.split(array, np.cumsum(sizes)[:-1], axis)


def _same_memory(before: Bytes, after: Bytes) -> Bytes:
    """Require that a reshape made a view, not a copy."""
    assert np.may_share_memory(before, after)
    return after


def _words(raw: Bytes) -> NDArray[Any]:
    """The same bytes in the largest words that the last axes allow."""
    while raw.ndim > 6 and raw.strides[-1] == 1 and raw.strides[-2] == raw.shape[-1]:
        raw = _same_memory(raw, raw.reshape(*raw.shape[:-2], -1))
    size = next(size for size in (8, 4, 2, 1) if raw.shape[-1] % size == 0)
    return raw.view(f"u{size}")
