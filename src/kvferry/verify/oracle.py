"""The truth about a case, by brute force: which byte holds what before, and must hold after.

Every logical byte of a request (group, component, layer, entry, unit, dims, byte) has an id. The
source's memory is filled with the ids of what it holds; the destination's with the ids that must
arrive, and with three codes for all the rest. What must be refused is decided here too. Nothing is
imported from `kvferry.layout` or `kvferry.plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from kvferry.verify.case import CaseDict, GroupDict
from kvferry.verify.engine import Engine, Ints, Placing, Worker
from kvferry.verify.memory import Memory, UnplaceableError

NOTHING = -1  # holds nothing; on the destination: must stay as it is
FREE = -2  # padding of a loaded block: may be written or not
GAP = -3  # a slot of a loaded block that nothing arrives for: untouched, and named as uncovered

Image = list[Ints]  # one array a region


class Load(NamedTuple):
    """Entries of one group: what arrives, and what was due but is gone at the source."""

    moved: set[int]
    missing: set[int]
    first_due: int  # entry from which on the destination has nothing yet


@dataclass
class Oracle:
    """Answers for one case. `errors` are to be asked first: images exist only without any."""

    case: CaseDict

    def __post_init__(self) -> None:
        self.src = Engine(self.case["model"], self.case["src"])
        self.dst = Engine(self.case["model"], self.case["dst"])
        self.groups = [g for n, g in self.src.groups.items() if n in self.dst.groups]
        self.loads = {g["name"]: self._load(g) for g in self.groups}
        self._ids = self._number()
        self._memories = Memory(self.src), Memory(self.dst)

    # what arrives

    def _load(self, group: GroupDict) -> Load:
        tokens, per = self.case["tokens"], group["tokens_per_entry"]
        kind = group["residency"]["kind"]
        if kind == "state":
            return Load({0}, set(), 0)
        if kind == "ring":
            return Load(self.dst.kept(group, tokens), set(), 0)
        due = {p for p in self.dst.kept(group, tokens) if p >= self.case["skip"]}
        have = self.src.kept(group, tokens)
        moved = {p // per for p in due & have if self._exists(group, p // per)}
        missing = {p // per for p in due - have} - moved
        return Load(moved, missing, min(due, default=tokens) // per)

    def _exists(self, group: GroupDict, entry: int) -> bool:
        """An entry over several tokens exists when all of them do, or when one does."""
        per = group["tokens_per_entry"]
        tokens = [t for t in range(entry * per, entry * per + per) if t < self.case["tokens"]]
        return len(tokens) == per or (group["partial_entries"] and len(tokens) > 0)

    def lacking(self) -> set[str]:
        """Groups that must be refused unless uncacheable blocks are allowed."""
        return {name for name, load in self.loads.items() if load.missing}

    def uncacheable(self, group: str) -> set[int]:
        """Numbers of the destination's blocks that lack an entry."""
        known = self.dst.groups[group]
        per_block = self.dst.block_positions(known) // known["tokens_per_entry"]
        return {entry // per_block for entry in self.loads[group].missing}

    # what is refused

    def errors(self) -> set[str]:
        """Names of errors of which the product must raise one; none: it must plan and bind."""
        found = set()
        for memory in self._memories:
            try:
                for worker in memory.engine.workers():
                    memory.regions(worker)
            except UnplaceableError:
                found.add("DescriptionError")
        for group in self.groups:
            if not self._covered(group):
                found.add("CoverError")
            if not self._same_if_opaque(group):
                found.add("IncompatibleError")
            if not self._tables_fit(group) or not self._ring_fits(group):
                found.add("BindError")
        return found

    def _covered(self, group: GroupDict) -> bool:
        """Whether every token and unit that a destination rank wants is on some source rank."""
        cycles = [
            1 if e.dcp(group) == 1 else e.dcp(group) * e.shape["interleave"]
            for e in (self.src, self.dst)
        ]
        if cycles[0] == 1:
            return True  # every source rank has all tokens, and every unit is on some rank
        for component, token in product(group["components"], range(math.lcm(*cycles))):
            have, want = (
                {
                    unit
                    for tp in range(engine.shape["tp"])
                    if engine.holds_token(group, tp, token)
                    for unit in engine.units(group, component, tp)
                }
                for engine in (self.src, self.dst)
            )
            if not want <= have:
                return False
        return True

    def _same_if_opaque(self, group: GroupDict) -> bool:
        """Whether some source rank has the very same pages, where they are opaque."""
        if "opaque" not in (self.src.interior(group), self.dst.interior(group)):
            return True

        def page(engine: Engine, tp: int) -> tuple[object, ...]:
            order, dcp = engine.shape["order"], engine.dcp(group)
            units = [engine.units(group, c, tp) for c in group["components"]]
            return (
                engine.interior(group),
                engine.block_tokens(group),
                engine.kernel_entries(group),
                units,
                dcp > 1 and (dcp, tp % dcp, engine.shape["interleave"]),
                max(map(len, units)) > 1 and order.index("N") < order.index("H"),
            )

        pages = [page(self.src, tp) for tp in range(self.src.shape["tp"])]
        return all(page(self.dst, tp) in pages for tp in range(self.dst.shape["tp"]))

    def _tables_fit(self, group: GroupDict) -> bool:
        """Whether both tables name a block for all that moves, on the destination each once."""
        moved = self.loads[group["name"]].moved
        for engine in (self.src, self.dst):
            numbers: set[int] = set()
            for tp in range(engine.shape["tp"]):
                placing = engine.placing(group, tp, max(moved, default=-1) + 1).only(moved)
                numbers |= set(placing.blocks.tolist())
            if any(engine.block_id(group, number) is None for number in numbers):
                return False
            ids = {engine.block_id(group, number) for number in numbers}
            if engine is self.dst and len(ids) < len(numbers):
                return False
        return True

    def _ring_fits(self, group: GroupDict) -> bool:
        kind, span = group["residency"]["kind"], group["residency"]["span"]
        return kind != "ring" or all(e.block_tokens(group) >= span for e in (self.src, self.dst))

    # images

    def _number(self) -> dict[str, list[Ints]]:
        """Ids of all logical bytes: for each component, [layer, entry, unit, dims..., byte]."""
        ids: dict[str, list[Ints]] = {}
        first = 0
        for group in self.groups:
            per = group["tokens_per_entry"]
            state = group["residency"]["kind"] == "state"
            entries = 1 if state else -(-self.case["tokens"] // per)
            arrays = ids[group["name"]] = []
            for c in group["components"]:
                axes = (len(group["layers"]), entries, c["units"], *c["dims"], c["element_bytes"])
                size = math.prod(axes)
                arrays.append(np.arange(first, first + size, dtype=np.int32).reshape(axes))
                first += size
        return ids

    def source(self, worker: Worker) -> Image:
        """What a source rank holds."""
        vectors, used = {}, {}
        for group in self.groups:
            if self.src.layers(group, worker.pp):
                name, entries = group["name"], self._held(group)
                placing = self.src.placing(group, worker.tp, max(entries, default=-1) + 1)
                placing = self.src.allocated(group, placing.only(entries))
                vectors[name] = self._vector(0, group, worker, placing)
                used[name] = self._used(self.src, group, set(placing.blocks.tolist()))
        return self._image(0, worker, vectors, used)

    def _held(self, group: GroupDict) -> set[int]:
        """Entries that the source still has."""
        kind, tokens = group["residency"]["kind"], self.case["tokens"]
        if kind == "state":
            return {0}
        if kind == "ring":  # all its slots, also those that no longer matter
            return set(range(max(0, tokens - self.src.block_entries(group)), tokens))
        entries = {p // group["tokens_per_entry"] for p in self.src.kept(group, tokens)}
        return {e for e in entries if self._exists(group, e)}

    def target(self, worker: Worker) -> Image:
        """What a destination rank must hold afterwards: ids, NOTHING, FREE or GAP."""
        vectors, used = {}, {}
        for group in self.groups:
            if self.dst.layers(group, worker.pp) and self.loads[group["name"]].moved:
                vectors[group["name"]], numbers = self._wanted(group, worker)
                used[group["name"]] = self._used(self.dst, group, numbers)
        return self._image(1, worker, vectors, used)

    def _wanted(self, group: GroupDict, worker: Worker) -> tuple[Ints, set[int]]:
        """Numbered bytes of a group on a destination rank, and the blocks that are loaded."""
        load, kind = self.loads[group["name"]], group["residency"]["kind"]
        opaque = self.dst.interior(group) == "opaque"
        per_block = self.dst.block_positions(group) // group["tokens_per_entry"]
        if kind in ("state", "ring"):
            all_slots = self.dst.placing(group, worker.tp, max(load.moved) + 1)
            numbers = {0}
        else:
            blocks = -(-self.case["tokens"] // self.dst.block_positions(group))
            all_slots = self.dst.placing(group, worker.tp, blocks * per_block)
            due = load.missing | load.moved
            numbers = set(range(min(due) // per_block, blocks))
        arriving = load.moved
        if opaque and kind not in ("state", "ring"):  # whole pages, or none
            loaded = {e // per_block for e in load.moved}
            arriving = {e for e in self._held(group) if e // per_block in loaded}
            numbers = loaded
        vector = self._vector(1, group, worker, all_slots.only(arriving))
        if kind == "state":
            return vector, numbers
        rest = FREE if opaque else GAP
        if kind == "ring" or opaque:
            table = self.dst.side["tables"][group["name"]]
            blocks_of = [table[n] for n in numbers]
            for view in self._views(1, group, worker, vector):
                mine = view[:, blocks_of]
                view[:, blocks_of] = np.where(mine == NOTHING, rest, mine)
            return vector, numbers
        last = max(all_slots.entries.tolist(), default=-1)
        lost = {e for e in range(load.first_due, last + 1) if e not in load.moved}
        placing = all_slots.only(lost)
        ids = np.asarray(self.dst.side["tables"][group["name"]])[placing.blocks]
        for view in self._views(1, group, worker, vector):
            view[:, ids, placing.slots] = rest
        return vector, numbers

    def _used(self, engine: Engine, group: GroupDict, numbers: set[int]) -> list[int]:
        return [engine.side["tables"][group["name"]][n] for n in numbers]

    def _views(self, side: int, group: GroupDict, worker: Worker, vector: Ints) -> list[Ints]:
        """A vector of numbered bytes as arrays with all logical axes, sharing its memory."""
        views, first = [], 0
        for array in self._memories[side].numbered(group, worker):
            views.append(vector[first : first + array.size].reshape(array.shape))
            first += array.size
        return views

    def _vector(self, side: int, group: GroupDict, worker: Worker, placing: Placing) -> Ints:
        """Ids at the numbers of the bytes that hold these entries; NOTHING elsewhere."""
        engine = self._memories[side].engine
        numbered = self._memories[side].numbered(group, worker)
        vector = np.full(sum(a.size for a in numbered), NOTHING, dtype=np.int32)
        if len(placing.entries) == 0:
            return vector
        blocks = np.asarray(engine.side["tables"][group["name"]])[placing.blocks]
        held = engine.layers(group, worker.pp)
        rows = [group["layers"].index(layer) for layer in held]
        views = self._views(side, group, worker, vector)
        for c, ids, view in zip(group["components"], self._ids[group["name"]], views, strict=True):
            units = engine.units(group, c, worker.tp)
            mine = ids[rows][:, placing.entries][:, :, units]
            view[:, blocks, placing.slots] = mine
        return vector

    def _image(
        self, side: int, worker: Worker, vectors: dict[str, Ints], used: dict[str, list[int]]
    ) -> Image:
        """Regions of a rank, each byte with what the vectors say, or FREE in padding."""
        image = []
        for views in self._memories[side].regions(worker):
            region = np.full(len(views[0].numbers), NOTHING, dtype=np.int32)
            for view in views:
                if view.group in vectors:
                    # the number of padding is -1: it takes the last of the values
                    values = np.append(vectors[view.group], np.int32(FREE))
                    loaded = np.zeros(self._memories[side].engine.side["blocks"], dtype=bool)
                    loaded[used[view.group]] = True
                    mine = loaded[view.blocks]
                    region[mine] = values[view.numbers[mine]]
            image.append(region)
        return image
