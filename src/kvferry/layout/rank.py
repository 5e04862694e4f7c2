"""All that one rank holds: parts of groups, and the regions that they lie in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.errors import DescriptionError
from kvferry.layout.build import build_parts
from kvferry.layout.model import CacheModel
from kvferry.layout.parts import Ints, Part, Region
from kvferry.layout.shape import EngineShape, Rank


@dataclass(frozen=True, slots=True, eq=False)
class RankLayout:
    """All that one rank holds. `tables` counts the block tables a request has on its engine."""

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
                continue  # whose layers are distinct
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

    @classmethod
    def build(
        cls, model: CacheModel, shape: EngineShape, rank: Rank, num_blocks: int
    ) -> RankLayout:
        """The layout that the shape itself implies: one array a group, dense but for padding."""
        built = build_parts(model, shape, rank, num_blocks)
        return cls(rank, shape, built.parts, built.regions, len(model.groups))
