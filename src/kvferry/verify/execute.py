"""The product's answer to a case: planned on both sides, bound to addresses, run on numbered bytes.

Every region of every rank gets an address range of its own with a gap before the next, so that a
copy that leaves its region is seen. All copies of all edges are then run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import CacheModel, Component, EngineShape, Group, Rank, RankLayout, Residency
from kvferry.plan import (
    Bound,
    Copies,
    EdgePlan,
    PairPlan,
    bind,
    everything_plan,
    plan_pair,
    uncovered,
)
from kvferry.plan.cover import Uncovered
from kvferry.plan.runs import axis_offsets
from kvferry.plan.serial import digest
from kvferry.verify.case import CaseDict, ModelDict, SideDict
from kvferry.verify.engine import Ints as Ids
from kvferry.verify.oracle import Image

Ints = NDArray[np.int64]

GUARD_BYTES = 41  # between regions; odd, so that no stride steps over it unseen
FIRST_ADDRESS = {"src": 0x7F00_0000_0000, "dst": 0x2AAA_0000_0000}


def build_model(model: ModelDict, side: SideDict) -> CacheModel:
    groups = []
    for g in model["groups"]:
        components = tuple(
            Component(c["name"], c["units"], tuple(c["dims"]), c["element_bytes"], _sharding(c))
            for c in g["components"]
        )
        kind: Any = g["residency"]["kind"]
        groups.append(
            Group(
                name=g["name"],
                layers=tuple(g["layers"]),
                components=components,
                residency=Residency(kind, g["residency"]["span"]),
                role=g["role"],
                tokens_per_entry=g["tokens_per_entry"],
                partial_entries=g["partial_entries"],
                context_parallel=g["context_parallel"],
            )
        )
    whole = CacheModel(model["name"], tuple(groups), model["total_layers"])
    return whole.without(*side["absent_roles"])


def _sharding(component: Any) -> Any:
    return component["sharding"]


def build_shape(side: SideDict) -> EngineShape:
    fields: dict[str, Any] = dict(side["shape"])
    fields["stages"] = tuple(fields["stages"])
    for name in ("role_tp", "block_size_of", "kernel_block_size_of", "interior_of"):
        fields[name] = tuple(fields[name].items())
    return EngineShape(**fields)


@dataclass
class AddressSpace:
    """All regions of all ranks of one engine in one address range."""

    layouts: dict[Rank, RankLayout]
    bases: dict[Rank, Ints]
    starts: Ints  # of all regions, ascending
    stops: Ints
    owners: list[Rank]  # of all regions
    first: int
    size: int

    @classmethod
    def build(cls, side: str, layouts: dict[Rank, RankLayout]) -> AddressSpace:
        starts, stops, owners = [], [], []
        bases = {}
        address = FIRST_ADDRESS[side]
        for rank, layout in layouts.items():
            mine = []
            for region in layout.regions:
                mine.append(address)
                stops.append(address + region.bytes)
                owners.append(rank)
                address = stops[-1] + GUARD_BYTES
            bases[rank] = np.asarray(mine, dtype=np.int64)
            starts += mine
        first = FIRST_ADDRESS[side]
        return cls(
            layouts,
            bases,
            np.asarray(starts, dtype=np.int64),
            np.asarray(stops, dtype=np.int64),
            owners,
            first,
            address - first,
        )

    def fill(self, images: dict[Rank, Image], between: int) -> Ids:
        """One array over the whole range with these images in it."""
        whole = np.full(self.size, between, dtype=np.int32)
        for rank, layout in self.layouts.items():
            sizes = [region.bytes for region in layout.regions]
            if sizes != [len(a) for a in images[rank]]:
                raise MismatchError(
                    f"rank {tuple(rank)} has regions of {sizes} bytes, the oracle "
                    f"{[len(a) for a in images[rank]]}"
                )
            for base, array in zip(self.bases[rank].tolist(), images[rank], strict=True):
                whole[base - self.first : base - self.first + len(array)] = array
        return whole

    def stray(self, addresses: Ints, lengths: Ints, rank: Rank) -> int | None:
        """The first copy that is not inside one region of the rank, if any."""
        if len(addresses) == 0:
            return None
        known = np.asarray([owner == rank for owner in self.owners])
        region = np.maximum(np.searchsorted(self.starts, addresses, side="right") - 1, 0)
        inside = (addresses >= self.starts[region]) & (addresses + lengths <= self.stops[region])
        inside &= known[region] & (lengths > 0)
        return None if inside.all() else int(np.argmin(inside))

    def bytes_of(self, addresses: Ints, lengths: Ints) -> Ints:
        """Index of every byte of these ranges in the array of `fill`."""
        ends = np.cumsum(lengths)
        steps = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
        steps += np.repeat(addresses - self.first - (ends - lengths), lengths)
        return steps


class MismatchError(Exception):
    """The product and the oracle disagree, or the product disagrees with itself."""


@dataclass
class Product:
    """Both engines of a case, planned once by each side."""

    case: CaseDict
    thorough: bool  # also compare slices and strided batches with the copies

    def __post_init__(self) -> None:
        self.pair = self._plan_side(False)
        theirs = self._plan_side(True)
        if _edges(self.pair) != _edges(theirs):
            raise MismatchError("the two sides find different edges")
        model, side = self.case["model"], self.case
        self.dst_model = build_model(model, side["dst"])
        src, dst = self._layouts(), self._layouts()
        self.src, self.dst = (AddressSpace.build(n, src[n]) for n in ("src", "dst"))
        self.plans: list[EdgePlan] = []
        for mine, other in zip(self.pair.edges, theirs.edges, strict=True):
            plan = self.pair.plan(mine, src["src"][mine.src], src["dst"][mine.dst])
            again = theirs.plan(other, dst["src"][mine.src], dst["dst"][mine.dst])
            if digest(plan) != digest(again):
                raise MismatchError(f"the two sides plan {mine.src} -> {mine.dst} differently")
            self.plans.append(plan)
        self._tables = {
            n: [np.asarray(side[n]["tables"][g.name]) for g in build_model(model, side[n]).groups]
            for n in ("src", "dst")
        }

    def _plan_side(self, by_destination: bool) -> PairPlan:
        case = self.case
        src, dst = build_shape(case["src"]), build_shape(case["dst"])
        src_model, dst_model = (build_model(case["model"], case[n]) for n in ("src", "dst"))
        if src_model == dst_model and by_destination:
            return plan_pair(dst_model, src, dst)
        return plan_pair(src_model, src, dst, dst_model=dst_model, optional_roles=["draft"])

    def _layouts(self) -> dict[str, dict[Rank, RankLayout]]:
        made: dict[str, dict[Rank, RankLayout]] = {}
        for name, side in (("src", self.case["src"]), ("dst", self.case["dst"])):
            model, shape = build_model(self.case["model"], side), build_shape(side)
            made[name] = {
                rank: RankLayout.build(model, shape, rank, side["blocks"]) for rank in shape.ranks
            }
        return made

    def bind(self, plan: EdgePlan, allow_uncacheable: bool) -> Bound:
        return bind(
            plan,
            tokens=self.case["tokens"],
            skip=self.case["skip"],
            src_tables=self._tables["src"],
            dst_tables=self._tables["dst"],
            src_bases=self.src.bases[plan.src],
            dst_bases=self.dst.bases[plan.dst],
            allow_uncacheable=allow_uncacheable,
        )

    def copies(self, allow_uncacheable: bool) -> Copies:
        """Copies of all edges, each checked to stay inside one region of its rank."""
        made = [Copies.empty(0)]
        for plan in self.plans:
            bound = self.bind(plan, allow_uncacheable)
            copies = bound.copies()
            if self.thorough:
                require_same_copies(bound, copies)
            for name, memory, addresses, rank in (
                ("reads", self.src, copies.src, plan.src),
                ("writes", self.dst, copies.dst, plan.dst),
            ):
                stray = memory.stray(addresses, copies.length, rank)
                if stray is not None:
                    raise MismatchError(
                        f"copy {stray} of {plan.src} -> {plan.dst} {name} outside a region"
                    )
            made.append(copies)
        src, dst, length = (
            np.concatenate([getattr(c, name) for c in made]) for name in ("src", "dst", "length")
        )
        return Copies(src, dst, length)

    def uncovered(self, rank: Rank, allow_uncacheable: bool) -> Uncovered:
        """What the product says of a destination rank."""
        return uncovered(
            everything_plan(self.pair.model, self.dst.layouts[rank]),
            self.pair.src,
            tokens=self.case["tokens"],
            skip=self.case["skip"],
            dst_tables=self._tables["dst"],
            dst_bases=self.dst.bases[rank],
            allow_uncacheable=allow_uncacheable,
        )


def _edges(pair: PairPlan) -> list[object]:
    return [
        (e.src, e.dst, [(s.group, s.components, s.units, s.layers.tolist()) for s in e.shares])
        for e in pair.edges
    ]


def require_same_copies(bound: Bound, copies: Copies) -> None:
    """Slices and strided batches must say what the copies say, and the counts must be true."""
    if (bound.descriptors, bound.bytes) != (len(copies), int(copies.length.sum())):
        raise MismatchError("the counts of copies and bytes are not those of the copies")
    most = max(1, len(copies) // 3)
    sliced = [np.concatenate([[0], *parts]) for parts in _sliced(bound, most)]
    strided = [np.concatenate([[0], *parts]) for parts in _strided(bound)]
    for index, expected in enumerate((copies.src, copies.dst, copies.length)):
        if not np.array_equal(sliced[index][1:], expected):
            raise MismatchError(f"slices of {most} differ from the copies")
        if not np.array_equal(strided[index][1:], expected):
            raise MismatchError("strided batches differ from the copies")


def _sliced(bound: Bound, most: int) -> list[list[Ints]]:
    parts: list[list[Ints]] = [[], [], []]
    for piece in bound.slices(most):
        if len(piece) > most:
            raise MismatchError(f"a slice of at most {most} copies has {len(piece)}")
        for into, array in zip(parts, (piece.src, piece.dst, piece.length), strict=True):
            into.append(array.copy())
    return parts


def _strided(bound: Bound) -> list[list[Ints]]:
    parts: list[list[Ints]] = [[], [], []]
    for b in bound.batches:
        steps = axis_offsets(b.axes, "src"), axis_offsets(b.axes, "dst")
        for into, rows, segments, offsets in zip(
            parts,
            (b.src_rows, b.dst_rows),
            (b.src_segments, b.dst_segments),
            steps,
            strict=False,
        ):
            into.append((rows[:, None, None] + segments[None, :, None] + offsets).ravel())
        shape = (len(b.src_rows), len(b.lengths), len(steps[0]))
        parts[2].append(np.broadcast_to(b.lengths[None, :, None], shape).ravel())
    return parts
