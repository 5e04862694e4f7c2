"""From tokens to keys and addresses: one place that knows how the two are made.

A reader asks for the content hashes of a sequence once for each published layout, at that layout's
block sizes; a writer finds the memory of its blocks and the keys that they go under.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import StoreError
from kvferry.layout.parts import Ints
from kvferry.layout.shape import Rank
from kvferry.pool.chain import ContentChain
from kvferry.pool.hits import Held
from kvferry.pool.keys import Fragment, KeyMetadata, object_keys
from kvferry.pool.objects import ObjectMemory
from kvferry.pool.records import PoolLayout
from kvferry.pool.store import Bools, Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """All fragments of all blocks of a sequence, in all known layouts."""

    keys: list[str]
    parts: tuple[tuple[PoolLayout, Fragment, int], ...]  # with how many keys each

    def by_fragment(self) -> Iterator[tuple[Fragment, list[str]]]:
        start = 0
        for _, fragment, count in self.parts:
            yield fragment, self.keys[start : start + count]
            start += count

    def answer(self, found: Bools) -> list[Held]:
        """By layout and group: which blocks exist with *every* fragment, from whatever rank."""
        if len(found) != len(self.keys):
            raise StoreError(f"a store answered {len(found)} of {len(self.keys)} questions")
        by_layout: dict[str, dict[int, Bools]] = {}
        layouts: dict[str, PoolLayout] = {}
        start = 0
        for layout, fragment, count in self.parts:
            one = found[start : start + count]
            start += count
            layouts[layout.id] = layout
            tables = by_layout.setdefault(layout.id, {})
            before = tables.get(fragment.table)
            tables[fragment.table] = one if before is None else before & one
        held = []
        for layout_id, tables in by_layout.items():
            for group in layouts[layout_id].model.groups:
                mine = [
                    tables[kind.table]
                    for kind in layouts[layout_id].kinds
                    if group.name in kind.groups
                ]
                span = layouts[layout_id].block_tokens(group.name)
                held.append(Held(layout_id, group.name, span, np.logical_and.reduce(mine)))
        return held


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedTokenDatabase:
    """Keys of one namespace; with a rank's memory, also the addresses of its blocks."""

    metadata: KeyMetadata
    layout: PoolLayout  # our own
    rank: Rank | None = None
    memory: Mapping[int, ObjectMemory] = field(default_factory=dict)  # by table
    bases: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    replica: int = 0  # among workers with the same rank and the same bytes
    replicas: int = 1

    def question(self, chain: ContentChain, layouts: Sequence[PoolLayout]) -> Question:
        keys: list[str] = []
        parts = []
        for layout in layouts:
            for fragment in layout.fragments:
                contents = chain.digests(layout.kind(fragment.table).block_tokens)
                keys += object_keys(self.metadata, layout.id, fragment, contents)
                parts.append((layout, fragment, len(contents)))
        return Question(keys, tuple(parts))

    def my_turn(self, table: int, numbers: Ints) -> Ints:
        """Which of these blocks this rank writes, as indices: replicas take turns."""
        assert self.rank is not None
        turns = self.layout.turns[self.layout.owner[table, self.rank]]
        turn = turns.index(self.rank) + len(turns) * self.replica
        mine: Ints = np.flatnonzero(numbers % (len(turns) * self.replicas) == turn)
        return mine

    def keys(self, table: int, contents: Sequence[str]) -> list[str]:
        """Keys of this rank's objects."""
        assert self.rank is not None
        fragment = self.layout.owner[table, self.rank]
        return object_keys(self.metadata, self.layout.id, fragment, contents)

    def objects(self, table: int, block_ids: Ints) -> list[Ranges]:
        """Memory of this rank's blocks."""
        template = self.memory[table]
        rows = template.addresses(self.bases, block_ids)
        return [Ranges(row, template.lengths) for row in rows]
