# SPDX-License-Identifier: Apache-2.0
"""Interiors: how the bytes inside a page are arranged, by name.

An engine's strides say where a page begins, not how its inside is arranged. vLLM's CPU attention,
for example, registers `[block, head, slot, 2 * head_dim]` and keeps K transposed inside. So the
attention backend names the interior; kvferry never guesses it. Each interior has a *level*: how
much of `[head, slot, content]` it arranges itself. The engine's memory order arranges the rest.

    name        level  inside
    joined      cell   per head and slot, the components side by side (K|V, K|scale|V|scale)
    split       cell   each component in an array of its own, in the same order
    cpu         head   per head, K as [dim][slot], then V as [slot][dim] (vLLM's vec and vec16)
    cpu_amx     head   per head, K in tiles of 16 slots as [dim/2][slot][2], then V in tiles of 16
                       dims as [slot/2][dim][2] (vLLM's CPU attention with AMX)
    planes      page   per page, one plane a component, each [head][slot] or [slot][head]
    nvfp4       page   `planes` of K data, K scale, V data, V scale
    mla_scaled  page   `planes` of latent, scale
    state       page   convolution state (sections side by side in channels), then the other states
    opaque      page   unknown: moves whole, between identical pages only. `opaque:NAME` names the
                       backend; pages of different backends are never identical
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from kvferry.errors import DescriptionError
from kvferry.layout.model import Component, Group

Level = Literal["cell", "head", "page"]
OPAQUE = "*"  # name of the only component of an opaque page


@dataclass(frozen=True, slots=True)
class Place:
    """Where a component lies inside a cell, a head or a page. Strides are in bytes."""

    component: str
    offset: int
    dim_sizes: tuple[int, ...]  # the component's dims, or a finer cut of them
    dim_strides: tuple[int, ...]
    slot_stride: int = 0  # 0: set by the engine's order
    unit_stride: int = 0  # 0: set by the engine's order
    tile_slots: int = 0  # > 0: slots come in tiles of this many, `tile_stride` bytes apart
    tile_stride: int = 0


@dataclass(frozen=True, slots=True)
class Inside:
    """One array's part of a page. `bytes` is the size of one cell, one head or the page."""

    level: Level
    bytes: int
    units: int  # heads that the engine's order walks; 1 if the page arranges them itself
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class PageQuestion:
    """All that the arrangement of a page depends on."""

    group: Group
    units: tuple[int, ...]  # units of each component on this rank
    slots: int  # entries in one kernel block
    token_major: bool
    conv_order: str

    def common_units(self, interior: str) -> int:
        if len(set(self.units)) != 1:
            names = [c.name for c in self.group.components]
            raise DescriptionError(
                f"interior {interior!r} needs components with equally many heads on a rank, "
                f"but group {self.group.name!r} has {dict(zip(names, self.units, strict=True))}"
            )
        return self.units[0]


def dense_strides(sizes: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """Strides of a dense array, outermost first."""
    products = accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=element_bytes)
    return tuple(reversed(list(products)))


def _content(component: Component, offset: int, slot: int = 0, unit: int = 0) -> Place:
    strides = dense_strides(component.dims, component.element_bytes)
    return Place(component.name, offset, component.dims, strides, slot, unit)


def _joined(q: PageQuestion) -> tuple[Inside, ...]:
    units = q.common_units("joined")
    places, offset = [], 0
    for component in q.group.components:
        places.append(_content(component, offset))
        offset += component.unit_bytes
    return (Inside("cell", offset, units, tuple(places)),)


def _split(q: PageQuestion) -> tuple[Inside, ...]:
    return tuple(
        Inside("cell", c.unit_bytes, units, (_content(c, 0),))
        for c, units in zip(q.group.components, q.units, strict=True)
    )


def _keys_and_values(q: PageQuestion, interior: str) -> tuple[Component, Component]:
    names = [c.name for c in q.group.components]
    if names != ["k", "v"] or any(len(c.dims) != 1 for c in q.group.components):
        raise DescriptionError(
            f"interior {interior!r} holds components k and v with one dim each, found {names}"
        )
    k, v = q.group.components
    return k, v


def _cpu(q: PageQuestion) -> tuple[Inside, ...]:
    k, v = _keys_and_values(q, "cpu")
    k_plane = k.unit_bytes * q.slots
    places = (
        Place("k", 0, k.dims, (q.slots * k.element_bytes,), slot_stride=k.element_bytes),
        _content(v, k_plane, slot=v.unit_bytes),
    )
    size = k_plane + v.unit_bytes * q.slots
    return (Inside("head", size, q.common_units("cpu"), places),)


AMX_TILE = 16  # rows of an AMX tile; each row holds pairs of elements


def _cpu_amx(q: PageQuestion) -> tuple[Inside, ...]:
    k, v = _keys_and_values(q, "cpu_amx")
    if k.dims[0] % AMX_TILE or v.dims[0] % AMX_TILE or q.slots % AMX_TILE:
        raise DescriptionError(
            f"interior 'cpu_amx' needs head sizes and blocks that are multiples of {AMX_TILE}, "
            f"found head sizes {k.dims[0]} and {v.dims[0]}, blocks of {q.slots}"
        )
    size, k_plane = k.element_bytes, k.unit_bytes * q.slots
    keys = Place(
        "k",
        0,
        (k.dims[0] // 2, 2),
        (2 * AMX_TILE * size, size),
        slot_stride=2 * size,
        tile_slots=AMX_TILE,
        tile_stride=AMX_TILE * k.unit_bytes,
    )
    values = Place(
        "v",
        k_plane,
        (v.dims[0] // AMX_TILE, AMX_TILE),
        (AMX_TILE * q.slots * size, 2 * size),
        slot_stride=size,
        tile_slots=2,
        tile_stride=2 * AMX_TILE * size,
    )
    total = k_plane + v.unit_bytes * q.slots
    return (Inside("head", total, q.common_units("cpu_amx"), (keys, values)),)


def _planes(q: PageQuestion) -> tuple[Inside, ...]:
    places, offset = [], 0
    for c, units in zip(q.group.components, q.units, strict=True):
        sizes = (q.slots, units) if q.token_major else (units, q.slots)
        outer, inner = dense_strides(sizes, c.unit_bytes)
        slot, unit = (outer, inner) if q.token_major else (inner, outer)
        places.append(_content(c, offset, slot, unit))
        offset += math.prod(sizes) * c.unit_bytes
    return (Inside("page", offset, 1, tuple(places)),)


def _state(q: PageQuestion) -> tuple[Inside, ...]:
    """Convolution sections (conv_*) share one channels x rows array. The other states follow."""
    pairs = list(zip(q.group.components, q.units, strict=True))
    conv = [(c, units) for c, units in pairs if c.name.startswith("conv_")]
    channels = sum(units * c.dims[0] for c, units in conv)
    places, first, offset = [], 0, 0
    for c, units in conv:
        if len(c.dims) != 2 or c.dims[1] != conv[0][0].dims[1]:
            raise DescriptionError(
                f"convolution section {c.name!r} must be (channels, rows) with the rows of "
                f"{conv[0][0].name!r}, found {c.dims} and {conv[0][0].dims}"
            )
        per_unit, rows = c.dims
        channel = rows * c.element_bytes if q.conv_order == "DS" else c.element_bytes
        row = c.element_bytes if q.conv_order == "DS" else channels * c.element_bytes
        unit = per_unit * channel
        places.append(Place(c.name, first * channel, c.dims, (channel, row), unit_stride=unit))
        first += units * per_unit
        offset += units * c.unit_bytes
    for c, units in pairs:
        if not c.name.startswith("conv_"):
            places.append(_content(c, offset, unit=c.unit_bytes))
            offset += units * c.unit_bytes
    return (Inside("page", offset, 1, tuple(places)),)


def _opaque(q: PageQuestion) -> tuple[Inside, ...]:
    size = q.slots * sum(
        units * c.unit_bytes for c, units in zip(q.group.components, q.units, strict=True)
    )
    return (Inside("page", size, 1, (Place(OPAQUE, 0, (1,), (1,)),)),)


INTERIORS: dict[str, Callable[[PageQuestion], tuple[Inside, ...]]] = {
    "joined": _joined,
    "split": _split,
    "cpu": _cpu,
    "cpu_amx": _cpu_amx,
    "planes": _planes,
    "nvfp4": _planes,
    "mla_scaled": _planes,
    "state": _state,
    "opaque": _opaque,
}


def arrange(interior: str, question: PageQuestion) -> tuple[Inside, ...]:
    """The arrays that hold a group's pages, and where each component lies in them."""
    name, _, whose = interior.partition(":")
    if name not in INTERIORS or (whose and name != "opaque"):
        raise DescriptionError(
            f"interior {interior!r} is not known; name one of {', '.join(INTERIORS)}. "
            "Name an unknown interior 'opaque': its pages move whole, between identical pages"
        )
    return INTERIORS[name](question)
