# SPDX-License-Identifier: Apache-2.0
"""The sweep: many random pairs, each planned, executed, and compared byte by byte.

A pair passes if all of this holds:

- every byte that the destination needs has the oracle's value, and was written once;
- no other byte was written, except padding;
- `uncovered` names exactly the other bytes of the loaded blocks, and `whole_blocks` those of layers
  that the source lacks;
- `landing` names all bytes that an edge writes, and none of another request's blocks.

A pair that the product refuses passes if the oracle says that it must be refused.

The product plans and binds to addresses. Every region of every rank gets an address range of its
own, with a gap before the next one, so that a copy that leaves its region is noticed. All copies of
all edges then run at once on numbered bytes.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import BindError, KvferryError
from kvferry.layout import CacheModel, EngineShape, Rank, RankLayout, Region
from kvferry.layout.tensors import LayerKey, TensorView, layout_from_tensors
from kvferry.plan import (
    Bound,
    Copies,
    EdgePlan,
    bind,
    everything_plan,
    plan_pair,
    uncovered,
    whole_blocks,
)
from kvferry.plan.bind import landing, require_distinct_blocks
from kvferry.plan.cover import Uncovered
from kvferry.verify.generate import features, generate
from kvferry.verify.oracle import (
    FREE,
    GAP,
    NOTHING,
    CaseDict,
    CaseEngine,
    Image,
    ModelDict,
    NumberedMemory,
    Oracle,
    SideDict,
    UnplaceableError,
    Worker,
    table_of,
)
from kvferry.verify.oracle import Ints as Ids

CHUNK = 40  # pairs that a process takes at a time
MOST_DETAILS = 20  # mismatches that a report has in full
GUARD_BYTES = 41  # between regions; odd, so that no stride steps over it unnoticed
FIRST_ADDRESS = {"src": 0x7F00_0000_0000, "dst": 0x2AAA_0000_0000}
Ints = NDArray[np.int64]


@dataclass
class Result:
    """The result of one pair."""

    index: int
    mismatch: str = ""  # the difference; "" if the product and the oracle agree
    refused: bool = False  # by product and oracle
    features: tuple[str, ...] = ()


@dataclass
class Report:
    """The result of a sweep. `mix` is the share of pairs with each feature."""

    seed: int
    pairs: int = 0
    mismatches: int = 0
    refused: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    details: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.pairs += 1
        self.refused += result.refused
        self.counts.update(result.features)
        if result.mismatch:
            self.mismatches += 1
            self.details.append({"index": result.index, "what": result.mismatch})

    @property
    def mix(self) -> dict[str, float]:
        return {name: round(n / self.pairs, 4) for name, n in sorted(self.counts.items())}

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON, with stable keys."""
        details = sorted(self.details, key=lambda d: int(d["index"]))
        return {
            "pairs": self.pairs,
            "mismatches": self.mismatches,
            "refused": self.refused,
            "mix": self.mix,
            "seconds": round(self.seconds, 2),
            "seed": self.seed,
            "details": details[:MOST_DETAILS],
        }


def run(
    pairs: int,
    seed: int,
    processes: int = 2,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Check the first `pairs` pairs of a seed. `progress` gets the number done."""
    began = time.perf_counter()
    report = Report(seed)

    def take(results: Iterable[Result]) -> None:
        for result in results:
            report.add(result)
        progress(report.pairs)

    chunks = [range(start, min(start + CHUNK, pairs)) for start in range(0, pairs, CHUNK)]
    if processes <= 1:
        for chunk in chunks:
            take(_check_all(seed, chunk))
    else:
        pool = ProcessPoolExecutor(processes, get_context("spawn"))
        try:
            for future in as_completed([pool.submit(_check_all, seed, c) for c in chunks]):
                take(future.result())
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt ends it before all pairs are done
    report.seconds = time.perf_counter() - began
    return report


def check(seed: int, index: int) -> Result:
    """Check pair number `index` of a seed, which is the same pair each time."""
    case = generate(seed, index)
    result = Result(index, features=features(case))
    try:
        result.refused = check_case(case)
    except MismatchError as wrong:
        result.mismatch = str(wrong)
    except Exception:  # a crash of the product is a mismatch too
        result.mismatch = traceback.format_exc(limit=-3)
    return result


def check_case(case: CaseDict) -> bool:
    """Whether product and oracle both refuse the case. Raises MismatchError if they differ."""
    oracle = Oracle(case)
    expected = oracle.errors()
    try:
        product = Product(case)
        if expected and not expected & {"BindError"}:
            raise MismatchError(f"must be refused with {sorted(expected)}, but was planned")
        lacking = oracle.lacking()
        if lacking and not expected:
            _require_refusals(product, lacking)
        copies = product.copies(allow_uncacheable=bool(lacking))
    except KvferryError as error:
        if type(error).__name__ in expected:
            return True
        raise MismatchError(
            f"refused with {type(error).__name__}: {error}; expected {sorted(expected)}"
        ) from error
    if expected:
        raise MismatchError(f"must be refused with {sorted(expected)}, but was bound")
    _compare(product, oracle, copies)
    return bool(lacking)


class MismatchError(Exception):
    """The product and the oracle disagree, or the product disagrees with itself."""


class Product:
    """Both engines of a case, and the plans of all their edges."""

    def __init__(self, case: CaseDict) -> None:
        self.case = case
        sides = (case["src"], case["dst"])
        src_model, dst_model = models = [build_model(case["model"], side) for side in sides]
        src, dst = shapes = [build_shape(side) for side in sides]
        self.model = dst_model
        self.pair = plan_pair(src_model, src, dst, dst_model=dst_model, optional_roles=["draft"])
        src_layouts, dst_layouts = (
            {rank: build_layout(case["model"], side, model, shape, rank) for rank in shape.ranks}
            for model, shape, side in zip(models, shapes, sides, strict=True)
        )
        self.plans = [
            self.pair.plan(e, src_layouts[e.src], dst_layouts[e.dst]) for e in self.pair.edges
        ]
        self._made: list[Copies] = []  # of each plan
        self.src = AddressSpace.build("src", src_layouts)
        self.dst = AddressSpace.build("dst", dst_layouts)
        self._src_tables, self._dst_tables = (
            [np.asarray(side["tables"][name]) for name in table_names(case["model"], side)]
            for side in sides
        )

    def bind(self, plan: EdgePlan, allow_uncacheable: bool) -> Bound:
        return bind(
            plan,
            tokens=self.case["tokens"],
            skip=self.case["skip"],
            src_tables=self._src_tables,
            dst_tables=self._dst_tables,
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
        self._made = made[1:]
        src, dst, length = (
            np.concatenate([getattr(c, name) for c in made]) for name in ("src", "dst", "length")
        )
        return Copies(src, dst, length)

    def uncovered(self, rank: Rank) -> Iterator[Uncovered]:
        """The bytes that a destination rank zeroes: uncovered ones, and layers without a source."""
        layout, where = self.dst.layouts[rank], self._where(rank)
        yield uncovered(everything_plan(self.pair.model, layout), self.pair.src, **where)
        if lacking := self.model.beyond(self.pair.model):
            yield whole_blocks(everything_plan(lacking, layout), **where)

    def require_landings(self, own_blocks: Ids) -> None:
        """Require that a destination alone knows how many bytes each edge writes, and where.

        own_blocks  1 for each byte of a block of this request
        """
        for plan, copies in zip(self.plans, self._made, strict=True):
            land = landing(plan, **self._where(plan.dst))
            stray = self.dst.stray(land.address, land.length, plan.dst) is not None
            opened = np.zeros(self.dst.size, dtype=np.bool_)
            opened[self.dst.bytes_of(land.address, land.length)] = True
            if stray or (opened & (own_blocks == 0)).any():
                raise MismatchError(f"{plan.src} -> {plan.dst} may write into others' blocks")
            written = self.dst.bytes_of(copies.dst, copies.length)
            if land.bytes != int(copies.length.sum()) or not opened[written].all():
                raise MismatchError(f"{plan.src} -> {plan.dst} writes outside of its landing")
        for rank, layout in self.dst.layouts.items():
            where = {k: v for k, v in self._where(rank).items() if k != "dst_bases"}
            require_distinct_blocks(self.model, layout, self.pair.src, **where)

    def _where(self, rank: Rank) -> dict[str, Any]:
        return {
            "tokens": self.case["tokens"],
            "skip": self.case["skip"],
            "dst_tables": self._dst_tables,
            "dst_bases": self.dst.bases[rank],
        }


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
        owners = [rank for rank, layout in layouts.items() for _ in layout.regions]
        sizes = [region.bytes for layout in layouts.values() for region in layout.regions]
        first = FIRST_ADDRESS[side]
        ends = first + np.cumsum(np.asarray(sizes, dtype=np.int64) + GUARD_BYTES)  # with gaps
        stops = ends - GUARD_BYTES
        starts = stops - sizes
        counts = np.cumsum([len(layout.regions) for layout in layouts.values()])
        bases = dict(zip(layouts, np.split(starts, counts[:-1]), strict=True))
        return cls(layouts, bases, starts, stops, owners, first, int(ends[-1]) - first)

    def fill(self, images: dict[Rank, Image], between: int) -> Ids:
        """One array over the whole address range, with these images in it."""
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
        known = np.asarray([owner == rank for owner in self.owners], dtype=np.bool_)
        region = np.maximum(np.searchsorted(self.starts, addresses, side="right") - 1, 0)
        inside = (addresses >= self.starts[region]) & (addresses + lengths <= self.stops[region])
        inside &= known[region] & (lengths > 0)
        return None if inside.all() else int(np.argmin(inside))

    def bytes_of(self, addresses: Ints, lengths: Ints) -> Ints:
        """The index of every byte of these ranges, in the array that `fill` makes."""
        ends = np.cumsum(lengths)
        steps = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
        steps += np.repeat(addresses - self.first - (ends - lengths), lengths)
        return steps


def build_model(model: ModelDict, side: SideDict) -> CacheModel:
    groups = [
        {**group, "residency": (group["residency"]["kind"], group["residency"]["span"])}
        for group in CaseEngine(model, side).groups.values()
    ]
    return msgspec.convert({**model, "groups": groups}, CacheModel)


def build_shape(side: SideDict) -> EngineShape:
    fields: dict[str, Any] = dict(side["shape"])
    fields["stages"] = tuple(fields["stages"])
    for name in ("role_tp", "block_size_of", "kernel_block_size_of", "interior_of"):
        fields[name] = tuple(fields[name].items())
    return EngineShape(**fields)


def build_layout(
    case: ModelDict, side: SideDict, model: CacheModel, shape: EngineShape, rank: Rank
) -> RankLayout:
    """A rank's layout, from the tensors that its engine registers, or from its shape."""
    tensors = side.get("tensors")
    memory = NumberedMemory(CaseEngine(case, side))
    try:
        arrays = memory.regions(Worker(*rank)) if tensors else []
    except UnplaceableError:  # there can be no such tensors
        arrays, tensors = [], None
    if tensors is None:
        return RankLayout.build(model, shape, rank, side["blocks"])
    regions = [Region(f"{n}", len(views[0].numbers)) for n, views in enumerate(arrays)]
    views: dict[LayerKey, list[TensorView]] = {}
    tables: dict[LayerKey, int] = {}
    padded: dict[str, int] = {}
    for one in memory.tensors(Worker(*rank), tensors):
        key = one.group, one.layer
        view = TensorView(one.region, one.offset, one.shape, one.strides, 1)
        views.setdefault(key, []).append(view)
        tables[key], padded[one.group] = one.table, one.padded_page
    return layout_from_tensors(
        model, shape, rank, regions, views, tables=tables, padded_page_bytes=padded
    )


def table_names(case: ModelDict, side: SideDict) -> list[str]:
    engine = CaseEngine(case, side)
    return [table_of(one) for group in engine.groups.values() for one in engine.dealt(group)]


def require_same_copies(bound: Bound, copies: Copies) -> None:
    """Require that slices, strided batches and counts agree with the copies."""
    if (bound.descriptors, bound.bytes) != (len(copies), int(copies.length.sum())):
        raise MismatchError("the counts of copies and bytes do not match the copies")
    most = max(1, len(copies) // 3)
    sliced, strided = [], []
    for piece in bound.slices(most):
        if len(piece) > most:
            raise MismatchError(f"a slice of at most {most} copies has {len(piece)}")
        sliced.append(np.stack([piece.src, piece.dst, piece.length]))
    for b in bound.batches:
        src = b.src_rows[:, None, None] + b.src_segments[:, None] + b.src_steps
        dst = b.dst_rows[:, None, None] + b.dst_segments[:, None] + b.dst_steps
        length = np.broadcast_to(b.lengths[:, None], src.shape)
        strided.append(np.stack([src, dst, length]).reshape(3, -1))
    expected = np.stack([copies.src, copies.dst, copies.length])
    for what, parts in ((f"slices of {most}", sliced), ("strided batches", strided)):
        if not np.array_equal(np.concatenate([expected[:, :0], *parts], axis=1), expected):
            raise MismatchError(f"{what} differ from the copies")


def _check_all(seed: int, indices: range) -> list[Result]:
    return [check(seed, index) for index in indices]


def _require_refusals(product: Product, lacking: set[str]) -> None:
    """Require that binding refuses exactly the edges with a group that lacks a block's head."""
    for plan in product.plans:
        refused = False
        try:
            product.bind(plan, allow_uncacheable=False)
        except BindError:
            refused = True
        if refused != bool(lacking & set(plan.groups)):
            raise MismatchError(
                f"edge {plan.src} -> {plan.dst} was {'' if refused else 'not '}refused, though the "
                f"groups that lack the head of a block are {sorted(lacking)}"
            )


def _compare(product: Product, oracle: Oracle, copies: Copies) -> None:
    source = product.src.fill({r: oracle.source(Worker(*r)) for r in product.src.layouts}, NOTHING)
    target = product.dst.fill({r: oracle.target(Worker(*r)) for r in product.dst.layouts}, NOTHING)
    reads = product.src.bytes_of(copies.src, copies.length)
    writes = product.dst.bytes_of(copies.dst, copies.length)
    arrived = np.full(len(target), NOTHING, dtype=np.int32)
    arrived[writes] = source[reads]
    times = np.bincount(writes, minlength=len(target))
    needed = target >= 0
    _require("hold something else than they must", needed & (arrived != target), product.dst)
    _require("are not written exactly once", needed & (times != 1), product.dst)
    _require("are written but must not be", ~needed & (target != FREE) & (times > 0), product.dst)
    if not oracle.lacking():
        own = {rank: oracle.own_blocks(Worker(*rank)) for rank in product.dst.layouts}
        product.require_landings(product.dst.fill(own, 0))
        _compare_uncovered(product, target == GAP, target == FREE)


def _compare_uncovered(product: Product, gap: Any, free: Any) -> None:
    named = np.zeros(len(gap), dtype=np.int64)
    for rank in product.dst.layouts:
        for told in product.uncovered(rank):
            if product.dst.stray(told.address, told.length, rank) is not None:
                raise MismatchError(f"rank {tuple(rank)}: an uncovered range is outside a region")
            np.add.at(named, product.dst.bytes_of(told.address, told.length), 1)
    _require("are not named uncovered exactly once", gap & (named != 1), product.dst)
    _require("are wrongly named uncovered", ~gap & ~free & (named > 0), product.dst)


def _require(what: str, wrong: Any, memory: AddressSpace) -> None:
    """Raise a MismatchError if the mask has a byte set. The error names the first one."""
    places = np.flatnonzero(wrong)
    if len(places) == 0:
        return
    address = memory.first + int(places[0])
    region = int(np.searchsorted(memory.starts, address, side="right")) - 1
    raise MismatchError(
        f"{len(places)} bytes {what}; the first is byte {address - int(memory.starts[region])} of "
        f"a region of rank {tuple(memory.owners[region])}"
    )
