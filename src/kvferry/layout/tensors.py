# SPDX-License-Identifier: Apache-2.0
"""A rank's layout, read from the tensors that its engine registered.

The tensors give the outer strides: layers, blocks, heads, slots. The interior that the shape names
gives the arrangement inside a page. If the two contradict each other, the cache is refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import DescriptionError
from kvferry.layout.interior import OPAQUE, Inside, arrange
from kvferry.layout.model import CacheModel, Group
from kvferry.layout.placement import Part, RankLayout, Region, page_question, place_component
from kvferry.layout.shape import EngineShape, Rank


@dataclass(frozen=True, slots=True)
class TensorView:
    """One layer's cache as `[kernel block, head, slot, content]`. Strides are in elements."""

    region: int
    offset: int  # bytes from the start of the region
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int

    def __post_init__(self) -> None:
        if len(self.shape) != 4 or len(self.strides) != 4:
            raise DescriptionError(
                f"a cache tensor has the axes block, head, slot and content, found shape "
                f"{self.shape} with strides {self.strides}"
            )

    def stride_bytes(self, axis: int) -> int:
        return self.strides[axis] * self.element_bytes

    @property
    def page_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.element_bytes

    def inner_is_dense(self, axis: int) -> bool:
        """Whether all bytes from `axis` inwards are contiguous."""
        expected = 1
        for size, stride in zip(
            reversed(self.shape[axis:]), reversed(self.strides[axis:]), strict=True
        ):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


LayerKey = tuple[str, int]  # group, ordinal


def layout_from_tensors(
    model: CacheModel,
    shape: EngineShape,
    rank: Rank,
    regions: Sequence[Region],
    tensors: Mapping[LayerKey, Sequence[TensorView]],
    *,
    tables: Mapping[LayerKey, int] | None = None,
    padded_page_bytes: Mapping[str, int] | None = None,
) -> RankLayout:
    """Describe a rank's real memory.

    tensors            for each layer, its tensor; with interior `split`, one for each component
    tables             for each layer, its block table; default: one table for each group
    padded_page_bytes  for each group, the size to which the engine pads a page
    """
    numbered = {group.name: index for index, group in enumerate(model.groups)}
    if strange := sorted({group for group, _ in tensors if group not in numbered}):
        raise DescriptionError(
            f"tensors must be of the model's groups {sorted(numbered)}, found some of {strange}; "
            "name groups as the model does"
        )
    table_of = tables or {key: numbered[key[0]] for key in tensors}
    pools = _pools(tensors, table_of)
    parts = []
    for group in model.groups:
        held = shape.layers(model, group, rank.pp)
        found = sorted(o for name, o in tensors if name == group.name)
        if sorted(held) != found:
            raise DescriptionError(
                f"group {group.name!r}: the shape puts layers {sorted(held)} on this rank, but "
                f"tensors were registered for {found}"
            )
        insides = arrange(shape.interior_for(group), page_question(group, shape, rank))
        alike: dict[tuple[int, object], list[int]] = defaultdict(list)  # by table and strides
        for ordinal in held:
            views = tensors[group.name, ordinal]
            _require_fit(group, shape, ordinal, insides, views)
            strides = tuple((v.shape, v.strides, v.element_bytes) for v in views)
            alike[table_of[group.name, ordinal], strides].append(ordinal)
        padded = (padded_page_bytes or {}).get(group.name, 0)
        for (table, _), ordinals in alike.items():
            layers = [tensors[group.name, o] for o in ordinals]
            part = _part(group, shape, rank, insides, ordinals, layers, padded)
            parts.append(replace(part, table=table, pool=pools[table]))
    return RankLayout(
        rank,
        shape,
        tuple(parts),
        tuple(regions),
        1 + max(table_of.values(), default=len(model.groups) - 1),
    )


def _part(
    group: Group,
    shape: EngineShape,
    rank: Rank,
    insides: tuple[Inside, ...],
    ordinals: list[int],
    layers: list[Sequence[TensorView]],
    padded_page: int,
) -> Part:
    block, kernel = shape.entries(group)
    placements = []
    for index, inside in enumerate(insides):
        views = [layer[index] for layer in layers]
        first = views[0]
        for place in inside.places:
            placements.append(
                place_component(
                    group,
                    shape,
                    rank,
                    place,
                    kernel_block_stride=first.stride_bytes(0),
                    slot_stride=first.stride_bytes(2),
                    unit_stride=first.stride_bytes(1),
                    regions=np.asarray([v.region for v in views], dtype=np.int64),
                    pages=np.asarray([v.offset for v in views], dtype=np.int64),
                )
            )
    view = layers[0][0]
    whole = len(insides) == 1 and view.inner_is_dense(1)
    page = view.page_bytes * (block // kernel) if whole else 0
    return Part(
        group=group.name,
        layers=np.asarray(ordinals, dtype=np.int64),
        table=0,
        pool=0,
        num_blocks=view.shape[0] * kernel // block,
        block_entries=block,
        page_bytes=page,
        page_slack=max(0, padded_page - page) if page else 0,
        interior=shape.interior_for(group),
        placements=tuple(placements),
    )


def _pools(
    tensors: Mapping[LayerKey, Sequence[TensorView]], table_of: Mapping[LayerKey, int]
) -> dict[int, int]:
    """The pool of each table. Tables whose layers share a region share a pool."""
    pool = {table: table for table in table_of.values()}
    owner: dict[int, int] = {}
    for key, views in tensors.items():
        for view in views:
            other = owner.setdefault(view.region, table_of[key])
            old, new = pool[table_of[key]], pool[other]
            pool = {table: new if p == old else p for table, p in pool.items()}
    return pool


def _require_fit(
    group: Group,
    shape: EngineShape,
    ordinal: int,
    insides: tuple[Inside, ...],
    views: Sequence[TensorView],
) -> None:
    """Refuse a tensor that does not fit the interior."""

    def refuse(what: str, expected: object, found: object) -> None:
        raise DescriptionError(
            f"layer {ordinal} of group {group.name!r}: interior {shape.interior_for(group)!r} "
            f"expects {what} {expected}, the tensor has {found}"
        )

    if len(views) != len(insides):
        refuse("a number of tensors of", len(insides), len(views))
    block, kernel = shape.entries(group)
    for inside, view in zip(insides, views, strict=True):
        _, heads, slots, content = view.shape
        if inside.level == "page":
            if view.page_bytes != inside.bytes or not view.inner_is_dense(1):
                refuse("dense pages of bytes", inside.bytes, (view.page_bytes, view.strides))
            # An opaque block moves as one run: its kernel blocks must lie together.
            opaque = inside.places[0].component == OPAQUE
            if opaque and block != kernel and view.stride_bytes(0) != view.page_bytes:
                refuse("kernel blocks at a distance of", view.page_bytes, view.stride_bytes(0))
            continue
        if (heads, slots) != (inside.units, kernel):
            refuse("heads and slots", (inside.units, kernel), (heads, slots))
        inner, dense_from = (content, 3) if inside.level == "cell" else (slots * content, 2)
        if inner * view.element_bytes != inside.bytes or not view.inner_is_dense(dense_from):
            refuse(
                f"dense bytes a {inside.level}",
                inside.bytes,
                (inner * view.element_bytes, view.strides),
            )
