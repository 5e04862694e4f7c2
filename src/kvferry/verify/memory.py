"""Where bytes lie, without a stride: numbered logical arrays, transposed and reshaped by NumPy.

Every byte that a rank could hold of a group gets a number, in an array with the axes

    layer, block, slot, unit, dims..., byte

and the memory order is NumPy's transpose of it. What comes out is a *map*: for each byte of a
region, the number that lies there (or none, in padding) and the block that it belongs to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvferry.verify.case import GroupDict
from kvferry.verify.engine import Engine, Ints, Worker

NOBODY = -1  # in a map: padding. An index that takes the last value of an array


class UnplaceableError(Exception):
    """The shape asks for an arrangement that does not exist; the product must refuse it too."""


class Sheet(NamedTuple):
    """One array of a group: NumPy axes, named by `axes`, the content last."""

    axes: str
    numbers: Ints

    @property
    def paged(self) -> bool:
        return set(self.axes[:2]) == {"L", "B"}

    def page_bytes(self, blocks: int) -> int:
        layers: int = self.numbers.shape[self.axes.index("L")]
        return self.numbers.size // (layers * blocks)


class View(NamedTuple):
    """What of a region belongs to one group."""

    group: str
    numbers: Ints  # of each byte
    blocks: Ints  # of each byte, padding included


@dataclass
class Memory:
    """Maps of all ranks of an engine. Ranks of equal extent share theirs."""

    engine: Engine
    _numbered: dict[tuple[str, tuple[int, ...]], list[Ints]] = field(default_factory=dict)
    _regions: dict[tuple[object, ...], list[list[View]]] = field(default_factory=dict)

    def extent(self, group: GroupDict, worker: Worker) -> tuple[int, ...]:
        """Layers, and units of each component, that a rank holds."""
        units = [len(self.engine.units(group, c, worker.tp)) for c in group["components"]]
        return (len(self.engine.layers(group, worker.pp)), *units)

    def numbered(self, group: GroupDict, worker: Worker) -> list[Ints]:
        """For each component, an array of the numbers of its bytes with all logical axes."""
        key = (group["name"], self.extent(group, worker))
        if key not in self._numbered:
            self._numbered[key] = self._number(group, *key[1])
        return self._numbered[key]

    def _number(self, group: GroupDict, layers: int, *units: int) -> list[Ints]:
        blocks, slots = self.engine.side["blocks"], self.engine.block_entries(group)
        arrays, first = [], 0
        for component, held in zip(group["components"], units, strict=True):
            axes = (layers, blocks, slots, held, *component["dims"], component["element_bytes"])
            size = math.prod(axes)
            arrays.append(np.arange(first, first + size, dtype=np.int32).reshape(axes))
            first += size
        return arrays

    def regions(self, worker: Worker) -> list[list[View]]:
        """The regions of a rank in order, each with the groups that live in it."""
        present = [g for g in self.engine.groups.values() if self.engine.layers(g, worker.pp)]
        key = tuple((g["name"], self.extent(g, worker)) for g in present)
        if key not in self._regions:
            self._regions[key] = self._make(present, worker)
        return self._regions[key]

    def _make(self, present: list[GroupDict], worker: Worker) -> list[list[View]]:
        blocks, align = self.engine.side["blocks"], self.engine.shape["page_align"]
        sheets = {g["name"]: self._arrange(g, worker) for g in present}
        if not self.engine.shape["overlay"]:
            return [
                [_settle(group["name"], sheet, blocks, _up(sheet.page_bytes(blocks), align))]
                for group in present
                for sheet in sheets[group["name"]]
            ]
        if not present:
            return []
        if any(len(s) > 1 for s in sheets.values()):
            raise UnplaceableError("several arrays cannot share a storage")
        page = _up(max(s[0].page_bytes(blocks) for s in sheets.values()), align)
        layers = max(self.extent(g, worker)[0] for g in present)
        views = [_settle(g["name"], sheets[g["name"]][0], blocks, page, layers) for g in present]
        if any(not np.array_equal(v.blocks, views[0].blocks) for v in views):
            raise UnplaceableError("blocks of different ids share bytes")
        return [views]

    def _arrange(self, group: GroupDict, worker: Worker) -> list[Sheet]:
        kernel = self.engine.kernel_entries(group)
        parts = [
            a.reshape(a.shape[0], -1, kernel, *a.shape[3:]) for a in self.numbered(group, worker)
        ]  # layer, kernel block, slot, unit, dims..., byte
        interior, order = self.engine.interior(group), self.engine.shape["order"]
        if interior in ("joined", "split"):
            cells = [a.reshape(*a.shape[:4], -1) for a in parts]
            if interior == "joined":
                cells = [np.concatenate(cells, axis=-1)]
            return [_ordered("LBNHC", cell, order) for cell in cells]
        if interior in ("cpu", "cpu_amx"):
            heads = _cpu(*parts) if interior == "cpu" else self._amx(group, *parts)
            head = np.concatenate([a.reshape(*a.shape[:3], -1) for a in heads], axis=-1)
            if head.shape[2] > 1 and order.index("N") < order.index("H"):
                raise UnplaceableError("the page keeps slots inside heads")
            return [_ordered("LBHC", head, order)]
        if interior == "state":
            return [_ordered("LBC", self._state(group, parts), order)]
        if order[:2] not in ("LB", "BL") and max(a.shape[3] for a in parts) > 1:
            raise UnplaceableError("the page keeps its heads together")
        if order.index("H") < order.index("N"):
            parts = [a.swapaxes(2, 3) for a in parts]
        planes = [a.reshape(*a.shape[:2], -1) for a in parts]
        return [_ordered("LBC", np.concatenate(planes, axis=-1), order)]

    def _amx(self, group: GroupDict, k: Ints, v: Ints) -> list[Ints]:
        """K in tiles of 16 slots, [dim/2][slot][2]; V in tiles of 16 dims, [slot/2][dim][2]."""
        if self.engine.kernel_entries(group) != self.engine.block_entries(group):
            raise UnplaceableError("tiles inside kernel blocks")
        layers, blocks, slots, units, dims, size = k.shape
        if slots % 16 or dims % 16 or v.shape[4] % 16:
            raise UnplaceableError("tiles of 16 do not fit")
        tiles = k.reshape(layers, blocks, slots // 16, 16, units, dims // 2, 2, size)
        pairs = v.reshape(layers, blocks, slots // 2, 2, units, v.shape[4] // 16, 16, size)
        return [tiles.transpose(0, 1, 4, 2, 5, 3, 6, 7), pairs.transpose(0, 1, 4, 5, 2, 6, 3, 7)]

    def _state(self, group: GroupDict, parts: list[Ints]) -> Ints:
        sections, rest = [], []
        for component, part in zip(group["components"], parts, strict=True):
            layers, blocks, _, units, *dims = part.shape
            if component["name"].startswith("conv_"):
                channels = part.reshape(layers, blocks, units * dims[0], *dims[1:])
                sections.append(channels)
            else:
                rest.append(part.reshape(layers, blocks, -1))
        if sections:
            conv = np.concatenate(sections, axis=2)  # layer, block, channel, row, byte
            if self.engine.shape["conv_order"] == "SD":
                conv = conv.swapaxes(2, 3)
            rest.insert(0, conv.reshape(*conv.shape[:2], -1))
        return np.concatenate(rest, axis=-1)


def _cpu(k: Ints, v: Ints) -> list[Ints]:
    """Per head, K as [dim][slot] and V as [slot][dim]."""
    return [k.transpose(0, 1, 3, 4, 2, 5), v.transpose(0, 1, 3, 2, 4, 5)]


def _ordered(axes: str, array: Ints, order: str) -> Sheet:
    """Transpose to the engine's order; a single head takes no part in it."""
    if "H" in axes and array.shape[axes.index("H")] == 1:
        array = array.squeeze(axes.index("H"))
        axes = axes.replace("H", "")
    wanted = "".join(axis for axis in order if axis in axes)
    return Sheet(wanted, array.transpose([axes.index(axis) for axis in wanted]))


def _settle(group: str, sheet: Sheet, blocks: int, page: int, layers: int = 0) -> View:
    """Pad pages to `page` bytes and the layer axis to `layers`, and flatten."""
    axes, numbers = sheet
    if page != sheet.page_bytes(blocks):
        ratio = numbers.shape[axes.index("B")] // blocks
        if not sheet.paged or ratio > 1:
            raise UnplaceableError("a page that is not in one piece cannot be padded")
        numbers = numbers.reshape(*numbers.shape[:2], -1)
        short = page - numbers.shape[2]
        numbers = np.pad(numbers, ((0, 0), (0, 0), (0, short)), constant_values=NOBODY)
    if layers:
        missing = [(0, 0)] * numbers.ndim
        missing[axes.index("L")] = (0, layers - numbers.shape[axes.index("L")])
        numbers = np.pad(numbers, missing, constant_values=NOBODY)
    ids = np.repeat(np.arange(blocks, dtype=np.int32), numbers.shape[axes.index("B")] // blocks)
    along = [1] * numbers.ndim
    along[axes.index("B")] = -1
    owners = np.broadcast_to(ids.reshape(along), numbers.shape)
    return View(group, numbers.ravel(), owners.ravel())


def _up(value: int, step: int) -> int:
    return value + -value % step
