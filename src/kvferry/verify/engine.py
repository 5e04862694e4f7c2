"""Who holds what, worked out by enumeration: stages, shards, tokens, blocks.

Nothing here comes from `kvferry.layout`: the rules are written a second time, on plain lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.verify.case import ComponentDict, GroupDict, ModelDict, ShapeDict, SideDict

Ints = NDArray[np.int32]


class Worker(NamedTuple):
    """A rank: pipeline stage and tensor parallel rank."""

    pp: int
    tp: int


class Placing(NamedTuple):
    """Entries that a rank holds, each with the number of its block in the table and its slot."""

    entries: Ints
    blocks: Ints
    slots: Ints

    def only(self, wanted: set[int]) -> Placing:
        keep = np.isin(self.entries, list(wanted))
        return Placing(self.entries[keep], self.blocks[keep], self.slots[keep])


@dataclass
class Engine:
    """One side of a case."""

    model: ModelDict
    side: SideDict
    groups: dict[str, GroupDict] = field(init=False)
    _placings: dict[tuple[str, int, int], Placing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        absent = self.side["absent_roles"]
        self.groups = {g["name"]: g for g in self.model["groups"] if g["role"] not in absent}

    @property
    def shape(self) -> ShapeDict:
        return self.side["shape"]

    def workers(self) -> list[Worker]:
        return [Worker(p, t) for p in range(self.shape["pp"]) for t in range(self.shape["tp"])]

    def layers(self, group: GroupDict, pp: int) -> list[int]:
        """Layer ordinals of a group on one stage."""
        stages = self.shape["pp"]
        if group["role"] == "draft":
            return group["layers"] if pp == stages - 1 else []
        cached = [
            layer for g in self.groups.values() if g["role"] != "draft" for layer in g["layers"]
        ]
        total = max([self.model["total_layers"], *(layer + 1 for layer in cached)])
        counts = list(self.shape["stages"])
        if not counts:
            counts = [total // stages] * stages
            lucky = stages - 2
            while sum(counts) < total:
                counts[lucky] += 1
                lucky -= 1
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        return [layer for layer in group["layers"] if stage_of[layer] == pp]

    def units(self, group: GroupDict, component: ComponentDict, tp: int) -> list[int]:
        """Units of a component on one tensor parallel rank."""
        units = component["units"]
        if component["sharding"] == "replicated":
            return list(range(units))
        parts = self.shape["role_tp"].get(group["role"], self.shape["tp"])
        part = tp * parts // self.shape["tp"]
        if units < parts:
            return [part * units // parts]
        return [u for u in range(units) if part * units // parts <= u < (part + 1) * units // parts]

    def dcp(self, group: GroupDict) -> int:
        alone = group["residency"]["kind"] == "state" or not group["context_parallel"]
        return 1 if alone else self.shape["dcp"]

    def holds_token(self, group: GroupDict, tp: int, token: int) -> bool:
        dcp = self.dcp(group)
        return dcp == 1 or token // self.shape["interleave"] % dcp == tp % dcp

    def block_tokens(self, group: GroupDict) -> int:
        return self.shape["block_size_of"].get(group["name"], self.shape["block_size"])

    def block_positions(self, group: GroupDict) -> int:
        """Consecutive positions that one block id stands for, over all dcp ranks."""
        return self.block_tokens(group) * self.dcp(group)

    def block_entries(self, group: GroupDict) -> int:
        if group["residency"]["kind"] == "state":
            return 1
        return self.block_tokens(group) // group["tokens_per_entry"]

    def kernel_entries(self, group: GroupDict) -> int:
        block, kernel = self.block_tokens(group), self.shape["kernel_block_size"]
        kernel = self.shape["kernel_block_size_of"].get(group["name"], kernel)
        if group["residency"]["kind"] == "state":
            return 1
        if kernel and block % kernel == 0:
            return kernel // group["tokens_per_entry"]
        return block // group["tokens_per_entry"]

    def interior(self, group: GroupDict) -> str:
        if group["residency"]["kind"] == "state":
            return "state"
        return self.shape["interior_of"].get(group["name"], self.shape["interior"])

    def needed_from(self, group: GroupDict, tokens: int) -> int:
        """First position that the next token, itself included, looks at."""
        kind, span = group["residency"]["kind"], group["residency"]["span"]
        for position in range(tokens):
            behind = tokens - position
            if (
                kind in ("full", "state")
                or (kind == "window" and behind < span)
                or (kind == "ring" and behind <= span)
                or (kind == "chunk" and tokens // span == position // span)
            ):
                return position
        return tokens

    def kept(self, group: GroupDict, tokens: int) -> set[int]:
        """Tokens of a request that are in blocks which the engine keeps."""
        first = self.needed_from(group, tokens)
        kind = group["residency"]["kind"]
        if kind == "ring":
            return set(range(first, tokens))
        if kind == "full" or self.shape["full_residency"]:
            return set(range(tokens))
        per_block = self.block_positions(group)
        wanted = {p // per_block for p in range(first, tokens + 1)}
        return {p for p in range(tokens) if p // per_block in wanted}

    def block_id(self, group: GroupDict, number: int) -> int | None:
        """The id of a request's block by its number, if the table names one."""
        table = self.side["tables"][group["name"]]
        if number >= len(table) or table[number] == self.shape["null_block"]:
            return None
        return table[number] if 0 <= table[number] < self.side["blocks"] else None

    def allocated(self, group: GroupDict, placing: Placing) -> Placing:
        """Entries whose block has an id."""
        named = {n for n in set(placing.blocks.tolist()) if self.block_id(group, n) is not None}
        keep = np.isin(placing.blocks, list(named))
        return Placing(placing.entries[keep], placing.blocks[keep], placing.slots[keep])

    def placing(self, group: GroupDict, tp: int, entries: int) -> Placing:
        """Where a rank keeps the first `entries` entries of a sequence: counted, one by one."""
        key = (group["name"], tp % self.dcp(group), entries)
        if key not in self._placings:
            self._placings[key] = self._count(group, tp, entries)
        return self._placings[key]

    def _count(self, group: GroupDict, tp: int, entries: int) -> Placing:
        rows: list[tuple[int, int, int]] = []
        filled: dict[int, int] = {}
        ring = group["residency"]["kind"] == "ring"
        for entry in range(entries):
            token = entry * group["tokens_per_entry"]
            if not self.holds_token(group, tp, token):
                continue
            if ring:
                rows.append((entry, 0, entry % self.block_entries(group)))
                continue
            block = token // self.block_positions(group)
            rows.append((entry, block, filled.get(block, 0)))
            filled[block] = filled.get(block, 0) + 1
        table = np.array(rows, dtype=np.int32).reshape(-1, 3)
        return Placing(table[:, 0], table[:, 1], table[:, 2])
