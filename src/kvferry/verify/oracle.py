# SPDX-License-Identifier: Apache-2.0
"""The oracle: by brute force, which byte each rank holds before a request, and must hold after it.

Every logical byte of a request (group, component, layer, entry, unit, dims, byte) has an id. The
image of a source rank has the ids of the bytes that the rank holds. The image of a destination rank
has the ids that must arrive, and three codes for all other bytes. The oracle also decides which
cases must be refused.

A case is a model, two engines and one request in plain JSON values (`CaseDict`). An engine's layers
lie as its shape implies, or each is a tensor that the engine registers (`TensorsDict`). Nothing is
imported from `kvferry.layout` or `kvferry.plan`: the rules are written a second time. `CaseEngine`
enumerates which rank holds which stages, shards, tokens and blocks, on plain lists.
`NumberedMemory` finds where bytes lie, without strides. It numbers every byte that a rank could
hold of a group, in an array with the axes

    layer, block, slot, unit, dims..., byte

and the memory order is NumPy's transpose of it. The result is a *map*: for each byte of a region,
its number (none in padding) and its block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Image = list[Ints]  # one array for each region
NOTHING = -1  # no byte of the request; on the destination it must stay as it is
FREE = -2  # padding of a loaded block, which may be written or not
GAP = -3  # a byte of a loaded block that must stay unwritten, and be named as uncovered
ANY_STRIDE = 7  # of an axis of one
PADDING = -1  # the number of padding in a map; as an index, it takes an array's last value


class ComponentDict(TypedDict):
    name: str
    units: int
    dims: list[int]
    element_bytes: int
    sharding: Literal["split", "replicated"]


class ResidencyDict(TypedDict):
    kind: str
    span: int


class GroupDict(TypedDict):
    name: str
    role: str
    layers: list[int]
    components: list[ComponentDict]
    residency: ResidencyDict
    tokens_per_entry: int
    partial_entries: bool
    context_parallel: bool
    table: NotRequired[str]  # of `CaseEngine.dealt` alone: the block table of these layers


class ModelDict(TypedDict):
    name: str
    total_layers: int
    groups: list[GroupDict]


class ShapeDict(TypedDict):
    tp: int
    pp: int
    stages: list[int]
    dcp: int
    interleave: int
    role_tp: dict[str, int]
    block_size: int
    block_size_of: dict[str, int]
    kernel_block_size: int
    kernel_block_size_of: dict[str, int]
    order: str
    interior: str
    interior_of: dict[str, str]
    conv_order: str
    page_align: int
    overlay: bool
    full_residency: bool
    null_block: int | None


class TensorsDict(TypedDict):
    """How an engine keeps its layers, if each layer is a tensor of its own."""

    tables: dict[str, int]  # block tables of a group, among which its layers are dealt
    turned: int  # places by which the layers of an array are turned
    apart: bool  # whether each layer has a region of its own, where layers are outermost
    backwards: bool  # whether the engine names its groups in the opposite order


class SideDict(TypedDict):
    shape: ShapeDict
    blocks: int
    tables: dict[str, list[int]]
    absent_roles: list[str]  # roles whose groups this engine does not have
    fewer: NotRequired[dict[str, int]]  # groups of which this engine has only so many layers
    tensors: NotRequired[TensorsDict]  # missing: one array for each group, as the shape implies


class CaseDict(TypedDict):
    kind: str  # of the model
    fault: str  # how a table was broken on purpose; "" if none was
    model: ModelDict
    src: SideDict
    dst: SideDict
    tokens: int
    skip: int


class Worker(NamedTuple):
    """A rank: pipeline stage and tensor parallel rank."""

    pp: int
    tp: int


@dataclass
class Oracle:
    """Answers for one case. Ask `errors` first: there are images only if it is empty."""

    case: CaseDict

    def __post_init__(self) -> None:
        self.src = CaseEngine(self.case["model"], self.case["src"])
        self.dst = CaseEngine(self.case["model"], self.case["dst"])
        self.groups = [g for n, g in self.src.groups.items() if n in self.dst.groups]
        self.loads = {n: self._load(g) for n, g in self.dst.groups.items()}
        self._ids = self._number()
        self._memories = NumberedMemory(self.src), NumberedMemory(self.dst)

    # Entries that arrive

    def _load(self, group: GroupDict) -> GroupLoad:
        tokens, per = self.case["tokens"], group["tokens_per_entry"]
        kind = group["residency"]["kind"]
        if kind == "state":
            return GroupLoad({0}, set(), 0)
        if kind == "ring":
            return GroupLoad(self.dst.kept(group, tokens), set(), 0)
        due = {p for p in self.dst.kept(group, tokens) if p >= self.case["skip"]}
        there = self.src if group["name"] in self.src.groups else self.dst
        have = there.kept(group, tokens)
        moved = {p // per for p in due & have if self._exists(group, p // per)}
        missing = {p // per for p in due - have} - moved
        return GroupLoad(moved, missing, min(due, default=tokens) // per)

    def _exists(self, group: GroupDict, entry: int) -> bool:
        """Whether an entry is stored: if all its tokens exist, or one if entries may be partial."""
        per = group["tokens_per_entry"]
        tokens = [t for t in range(entry * per, entry * per + per) if t < self.case["tokens"]]
        return len(tokens) == per or (group["partial_entries"] and len(tokens) > 0)

    def lacking(self) -> set[str]:
        """Groups that must be refused unless uncacheable blocks are allowed."""
        return {name for name, load in self.loads.items() if load.missing}

    # Refusals

    def errors(self) -> set[str]:
        """The product must raise one of these errors. If there are none, it must plan and bind."""
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
        """Whether every token and unit that a destination rank needs is on some source rank."""
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
        """Whether opaque pages of every destination rank are identical to some source rank's."""
        if "opaque" not in (self.src.interior(group), self.dst.interior(group)):
            return True

        def page(engine: CaseEngine, tp: int) -> tuple[object, ...]:
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
        """Whether both tables name a block for all that moves, the destination's only once."""
        moved = self.loads[group["name"]].moved
        for engine in (self.src, self.dst):
            numbers: set[int] = set()
            for tp in range(engine.shape["tp"]):
                placing = engine.placing(group, tp, max(moved, default=-1) + 1).only(moved)
                numbers |= set(placing.blocks.tolist())
            for dealt in engine.dealt(group):
                ids = {engine.block_id(dealt, number) for number in numbers}
                if None in ids or (engine is self.dst and len(ids) < len(numbers)):
                    return False
        return True

    def _ring_fits(self, group: GroupDict) -> bool:
        kind, span = group["residency"]["kind"], group["residency"]["span"]
        return kind != "ring" or all(e.block_tokens(group) >= span for e in (self.src, self.dst))

    # Images

    def _number(self) -> dict[str, list[Ints]]:
        """Ids of all logical bytes: for each component, [layer, entry, unit, dims..., byte]."""
        ids: dict[str, list[Ints]] = {}
        first = 0
        for group in self.case["model"]["groups"]:
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
        """The bytes that a source rank holds."""
        vectors, used = {}, {}
        for group in self.src.dealt_on(worker):
            name, entries = table_of(group), self._held(group)
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
        if kind == "ring":  # all its slots, also those that the next token does not read
            return set(range(max(0, tokens - self.src.block_entries(group)), tokens))
        entries = {p // group["tokens_per_entry"] for p in self.src.kept(group, tokens)}
        return {e for e in entries if self._exists(group, e)}

    def target(self, worker: Worker) -> Image:
        """The bytes that a destination rank must hold afterwards: ids, NOTHING, FREE or GAP."""
        vectors, used = {}, {}
        for group in self.dst.dealt_on(worker):
            if self.loads[group["name"]].moved:
                vector, numbers = self._wanted(group, worker)
                self._lack(group, worker, vector)
                vectors[table_of(group)] = vector
                used[table_of(group)] = self._used(self.dst, group, numbers)
        return self._image(1, worker, vectors, used)

    def own_blocks(self, worker: Worker) -> Image:
        """On a destination rank, 1 for each byte of a block of this request, and 0 elsewhere."""
        image = []
        for views in self._memories[1].regions(worker):
            mine = np.zeros(len(views[0].blocks), dtype=np.int32)
            for view in views:
                ids = {*self.dst.side["tables"][view.table]} - {self.dst.shape["null_block"]}
                mine |= np.isin(view.blocks, list(ids))
            image.append(mine)
        return image

    def _lack(self, group: GroupDict, worker: Worker, vector: Ints) -> None:
        """What would be loaded of layers that the source lacks is to be zeroed."""
        whole = self.src.groups.get(group["name"])
        there = whole["layers"] if whole else []
        held = self.dst.layers(group, worker.pp)
        rows = [row for row, layer in enumerate(held) if layer not in there]
        for view in self._views(1, group, worker, vector):
            view[rows] = np.where(view[rows] == NOTHING, NOTHING, GAP)

    def _wanted(self, group: GroupDict, worker: Worker) -> tuple[Ints, set[int]]:
        """The vector of a group on a destination rank, and the numbers of the loaded blocks."""
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
            table = self.dst.side["tables"][table_of(group)]
            blocks_of = [table[n] for n in numbers]
            for view in self._views(1, group, worker, vector):
                mine = view[:, blocks_of]
                view[:, blocks_of] = np.where(mine == NOTHING, rest, mine)
            return vector, numbers
        last = max(all_slots.entries.tolist(), default=-1)
        lost = {e for e in range(load.first_due, last + 1) if e not in load.moved}
        placing = all_slots.only(lost)
        ids = np.asarray(self.dst.side["tables"][table_of(group)])[placing.blocks]
        for view in self._views(1, group, worker, vector):
            view[:, ids, placing.slots] = rest
        return vector, numbers

    def _used(self, engine: CaseEngine, group: GroupDict, numbers: set[int]) -> list[int]:
        return [engine.side["tables"][table_of(group)][n] for n in numbers]

    def _views(self, side: int, group: GroupDict, worker: Worker, vector: Ints) -> list[Ints]:
        """A vector of numbered bytes as arrays with all logical axes, sharing its memory."""
        views, first = [], 0
        for array in self._memories[side].numbered(group, worker):
            views.append(vector[first : first + array.size].reshape(array.shape))
            first += array.size
        return views

    def _vector(self, side: int, group: GroupDict, worker: Worker, placing: Placing) -> Ints:
        """An array over byte numbers: ids where these entries lie, NOTHING elsewhere."""
        engine = self._memories[side].engine
        numbered = self._memories[side].numbered(group, worker)
        vector = np.full(sum(a.size for a in numbered), NOTHING, dtype=np.int32)
        if len(placing.entries) == 0:
            return vector
        blocks = np.asarray(engine.side["tables"][table_of(group)])[placing.blocks]
        held = engine.layers(group, worker.pp)
        (whole,) = (g for g in self.case["model"]["groups"] if g["name"] == group["name"])
        rows = [whole["layers"].index(layer) for layer in held]
        views = self._views(side, group, worker, vector)
        for c, ids, view in zip(group["components"], self._ids[group["name"]], views, strict=True):
            units = engine.units(group, c, worker.tp)
            mine = ids[rows][:, placing.entries][:, :, units]
            view[:, blocks, placing.slots] = mine
        return vector

    def _image(
        self, side: int, worker: Worker, vectors: dict[str, Ints], used: dict[str, list[int]]
    ) -> Image:
        """The regions of a rank with the values of the vectors, and FREE in padding."""
        image = []
        for views in self._memories[side].regions(worker):
            region = np.full(len(views[0].numbers), NOTHING, dtype=np.int32)
            for view in views:
                if view.table in vectors:
                    # padding has the number -1, so it takes the last value
                    values = np.append(vectors[view.table], np.int32(FREE))
                    loaded = np.zeros(self._memories[side].engine.side["blocks"], dtype=bool)
                    loaded[used[view.table]] = True
                    mine = loaded[view.blocks]
                    region[mine] = values[view.numbers[mine]]
            image.append(region)
        return image


class GroupLoad(NamedTuple):
    """Entries of one group that arrive, and entries that the source has dropped."""

    moved: set[int]
    missing: set[int]
    first_due: int  # first entry that the destination does not have


@dataclass
class CaseEngine:
    """One side of a case."""

    model: ModelDict
    side: SideDict
    groups: dict[str, GroupDict] = field(init=False)

    def __post_init__(self) -> None:
        absent = self.side["absent_roles"]
        groups = [g for g in self.model["groups"] if g["role"] not in absent]
        for name, most in self.side.get("fewer", {}).items():
            groups = [
                {**g, "layers": g["layers"][:most]} if g["name"] == name else g for g in groups
            ]
        if self.tensors and self.tensors["backwards"]:
            groups.reverse()
        self.groups = {g["name"]: g for g in groups}

    @property
    def tensors(self) -> TensorsDict | None:
        return self.side.get("tensors")

    def dealt(self, group: GroupDict) -> list[GroupDict]:
        """A group once for each of its block tables, with that table's layers."""
        if not self.tensors:
            return [group]
        count = self.tensors["tables"].get(group["name"], 1)
        return [
            {**group, "layers": group["layers"][i::count], "table": f"{group['name']}/{i}"}
            for i in range(count)
        ]

    def dealt_on(self, worker: Worker) -> list[GroupDict]:
        """The groups with layers on a rank, by block table."""
        dealt = [one for group in self.groups.values() for one in self.dealt(group)]
        return [group for group in dealt if self.layers(group, worker.pp)]

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
            stage = stages - 2
            while sum(counts) < total:
                counts[stage] += 1
                stage -= 1
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
        """First position that the next token reads. It reads its own position too."""
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
        """Tokens of a request whose blocks the engine keeps."""
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
        """The id of a request's block with this number, or None if the table has none."""
        table = self.side["tables"][table_of(group)]
        if number >= len(table) or table[number] == self.shape["null_block"]:
            return None
        return table[number] if 0 <= table[number] < self.side["blocks"] else None

    def allocated(self, group: GroupDict, placing: Placing) -> Placing:
        """Entries whose block has an id."""
        named = {n for n in set(placing.blocks.tolist()) if self.block_id(group, n) is not None}
        keep = np.isin(placing.blocks, list(named))
        return Placing(placing.entries[keep], placing.blocks[keep], placing.slots[keep])

    def placing(self, group: GroupDict, tp: int, entries: int) -> Placing:
        """Where a rank keeps the first `entries` entries of a sequence, counted one by one."""
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


def table_of(group: GroupDict) -> str:
    """The name of the block table of a group, or of one part of a dealt group."""
    return group.get("table", group["name"])


class Placing(NamedTuple):
    """Entries that a rank holds, each with its slot and its block's number in the table."""

    entries: Ints
    blocks: Ints
    slots: Ints

    def only(self, wanted: set[int]) -> Placing:
        keep = np.isin(self.entries, list(wanted))
        return Placing(self.entries[keep], self.blocks[keep], self.slots[keep])


class UnplaceableError(Exception):
    """The shape asks for an arrangement that does not exist. The product must refuse it too."""


@dataclass
class NumberedMemory:
    """The maps of all ranks of an engine."""

    engine: CaseEngine
    _regions: dict[Worker, list[list[GroupView]]] = field(default_factory=dict)

    def extent(self, group: GroupDict, worker: Worker) -> tuple[int, ...]:
        """How many layers, and units of each component, a rank holds."""
        units = [len(self.engine.units(group, c, worker.tp)) for c in group["components"]]
        return (len(self.engine.layers(group, worker.pp)), *units)

    def numbered(self, group: GroupDict, worker: Worker) -> list[Ints]:
        """For each component, an array of the numbers of its bytes with all logical axes."""
        layers, *units = self.extent(group, worker)
        blocks, slots = self.engine.side["blocks"], self.engine.block_entries(group)
        arrays, first = [], 0
        for component, held in zip(group["components"], units, strict=True):
            axes = (layers, blocks, slots, held, *component["dims"], component["element_bytes"])
            size = math.prod(axes)
            arrays.append(np.arange(first, first + size, dtype=np.int32).reshape(axes))
            first += size
        return arrays

    def regions(self, worker: Worker) -> list[list[GroupView]]:
        """The regions of a rank in order, each with the maps of its groups."""
        if worker not in self._regions:
            self._regions[worker] = self._make(worker)
        return self._regions[worker]

    def _make(self, worker: Worker) -> list[list[GroupView]]:
        present = self.engine.dealt_on(worker)
        blocks, align = self.engine.side["blocks"], self.engine.shape["page_align"]
        tensors = self.engine.tensors
        sheets = {table_of(g): self._arrange(g, worker) for g in present}
        if tensors:
            by = tensors["turned"]
            sheets = {name: [s.turned(by) for s in arrays] for name, arrays in sheets.items()}
        if not self.engine.shape["overlay"]:
            views = [
                _settle(name, sheet, blocks, _up(sheet.page_bytes(blocks), align))
                for name in sheets
                for sheet in sheets[name]
            ]
            if tensors and tensors["apart"]:
                return [[part] for view in views for part in view.layers_apart()]
            return [[view] for view in views]
        if not present:
            return []
        if any(len(s) > 1 for s in sheets.values()):
            raise UnplaceableError("several arrays cannot share a storage")
        page = _up(max(s[0].page_bytes(blocks) for s in sheets.values()), align)
        layers = max(self.extent(g, worker)[0] for g in present)
        views = [_settle(name, sheet, blocks, page, layers) for name, (sheet,) in sheets.items()]
        if any(not np.array_equal(v.blocks, views[0].blocks) for v in views):
            raise UnplaceableError("blocks of different ids share bytes")
        return [views]

    def tensors(self, worker: Worker, tensors: TensorsDict) -> list[Tensor]:
        """What the rank's engine registers: a tensor for each layer, or one for its K and V each.

        Strides are differences between places of bytes.
        """
        found = []
        tables = [dealt for g in self.engine.groups.values() for dealt in self.engine.dealt(g)]
        names = [table_of(dealt) for dealt in tables]
        for number, views in enumerate(self.regions(worker)):
            for view in views:
                table = names.index(view.table)
                group = tables[table]
                held = self.engine.layers(group, worker.pp)
                for row, layer in enumerate(view.places):
                    axes = layer.reshape(self._tensor_shape(group, view.axes, layer.shape))
                    origin = int(axes[0, 0, 0, 0])
                    ahead = (axes[1:2, 0, 0], axes[0, 1:2, 0], axes[0, 0, 1:2], axes[0, 0, 0, 1:2])
                    strides = [int(a.flat[0]) - origin if a.size else ANY_STRIDE for a in ahead]
                    found.append(
                        Tensor(
                            group["name"],
                            held[(view.first + row - tensors["turned"]) % len(held)],
                            table,
                            number,
                            origin,
                            axes.shape,
                            tuple(strides),
                            view.padded_page,
                        )
                    )
        return found

    def _tensor_shape(
        self, group: GroupDict, axes: str, shape: tuple[int, ...]
    ) -> tuple[int, int, int, int]:
        """The axes block, head, slot and content of a layer whose bytes have these axes."""
        sizes = dict(zip(axes, shape, strict=True))
        blocks, heads, content = sizes["B"], sizes.get("H", 1), sizes["C"]
        if self.engine.interior(group).startswith("cpu"):  # heads arrange their slots
            slots = self.engine.kernel_entries(group)
            return blocks, heads, slots, content // slots
        return blocks, heads, sizes.get("N", 1), content

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


class Sheet(NamedTuple):
    """One array of a group. `axes` names its NumPy axes; the content is the last one."""

    axes: str
    numbers: Ints

    def turned(self, by: int) -> Sheet:
        """The same, with the layers `by` places further. The last ones come first."""
        return Sheet(self.axes, np.roll(self.numbers, by, axis=self.axes.index("L")))

    @property
    def paged(self) -> bool:
        return set(self.axes[:2]) == {"L", "B"}

    def page_bytes(self, blocks: int) -> int:
        layers: int = self.numbers.shape[self.axes.index("L")]
        return self.numbers.size // (layers * blocks)


class GroupView(NamedTuple):
    """The map of one group's bytes in a region, or of those layers with one block table."""

    table: str
    numbers: Ints  # of each byte
    blocks: Ints  # of each byte, padding included
    axes: str  # of `places` after the layers: block, head, slot and content, as far as there are
    places: Ints  # where each byte is that is no padding
    padded_page: int  # bytes to which pages are padded; 0 if they are not
    first: int = 0  # place in its array of the first layer in this region

    def layers_apart(self) -> list[GroupView]:
        """A region for each layer, if layers are outermost."""
        size = len(self.numbers) // len(self.places)
        if (np.diff(self.places.reshape(len(self.places), -1).max(axis=1)) != size).any():
            return [self]
        return [
            GroupView(
                self.table,
                self.numbers[start : start + size],
                self.blocks[start : start + size],
                self.axes,
                self.places[row : row + 1] - start,
                self.padded_page,
                row,
            )
            for row, start in enumerate(range(0, len(self.numbers), size))
        ]


class Tensor(NamedTuple):
    """One layer, or its K or V, as an engine registers it. In bytes."""

    group: str
    layer: int
    table: int
    region: int
    offset: int
    shape: tuple[int, ...]  # block, head, slot, content
    strides: tuple[int, ...]
    padded_page: int


def _cpu(k: Ints, v: Ints) -> list[Ints]:
    """Per head, K as [dim][slot] and V as [slot][dim]."""
    return [k.transpose(0, 1, 3, 4, 2, 5), v.transpose(0, 1, 3, 2, 4, 5)]


def _ordered(axes: str, array: Ints, order: str) -> Sheet:
    """Transpose to the engine's order. A single head takes no part in the order."""
    if "H" in axes and array.shape[axes.index("H")] == 1:
        array = array.squeeze(axes.index("H"))
        axes = axes.replace("H", "")
    wanted = "".join(axis for axis in order if axis in axes)
    return Sheet(wanted, array.transpose([axes.index(axis) for axis in wanted]))


def _settle(table: str, sheet: Sheet, blocks: int, page: int, layers: int = 0) -> GroupView:
    """Pad pages to `page` bytes and the layer axis to `layers`, and flatten."""
    axes, numbers = sheet
    used = [slice(size) for size in numbers.shape]
    if page != sheet.page_bytes(blocks):
        ratio = numbers.shape[axes.index("B")] // blocks
        if not sheet.paged or ratio > 1:
            raise UnplaceableError("a page that is not in one piece cannot be padded")
        numbers = numbers.reshape(*numbers.shape[:2], -1)
        short = page - numbers.shape[2]
        used = [*used[:2], slice(numbers.shape[2])]
        numbers = np.pad(numbers, ((0, 0), (0, 0), (0, short)), constant_values=PADDING)
    if layers:
        missing = [(0, 0)] * numbers.ndim
        missing[axes.index("L")] = (0, layers - numbers.shape[axes.index("L")])
        numbers = np.pad(numbers, missing, constant_values=PADDING)
    ids = np.repeat(np.arange(blocks, dtype=np.int32), numbers.shape[axes.index("B")] // blocks)
    along = [1] * numbers.ndim
    along[axes.index("B")] = -1
    owners = np.broadcast_to(ids.reshape(along), numbers.shape)
    places = np.arange(numbers.size, dtype=np.int32).reshape(numbers.shape)[tuple(used)]
    places = places.reshape(sheet.numbers.shape)
    usual = "".join(axis for axis in "LBHNC" if axis in axes)
    places = places.transpose([axes.index(axis) for axis in usual])
    padded = page if page != sheet.page_bytes(blocks) else 0
    rest = usual.removeprefix("L")
    return GroupView(table, numbers.ravel(), owners.ravel(), rest, places, padded)


def _up(value: int, step: int) -> int:
    return value + -value % step
