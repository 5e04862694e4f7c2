# SPDX-License-Identifier: Apache-2.0
"""`kvferry bench plan`: planning speed on this machine.

Every case is one request on one edge. `kvferry_ms` is the time from block ids to three arrays in
reused buffers. `strided_ms` is the time to strided runs. Times are medians of several runs.

`make bench-plan` (benchmarks/plan.py) runs the same cases beside vLLM's planner. Only it fills the
fields that are empty here.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvferry.layout.hf import load_model
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import EngineShape
from kvferry.plan import Bound, Copies, EdgePlan, bind, plan_pair

REPEATS = 9
CURVE_BLOCKS = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Case:
    """A request of `blocks` blocks on the first edge between two shapes."""

    name: str
    src: str
    dst: str
    blocks: int
    scattered: bool = True


CASES = (
    Case("scattered", "tp=4,block=16", "tp=8,block=16", 8192),
    Case("scattered-2048", "tp=4,block=16", "tp=8,block=16", 2048),
    Case("contiguous-same-shape", "tp=4,block=16", "tp=4,block=16", 8192, scattered=False),
    Case("contiguous", "tp=4,block=16", "tp=8,block=16", 8192, scattered=False),
    Case("gather-tp8-to-tp4", "tp=8,block=16", "tp=4,block=16", 8192),
    Case("token-major", "tp=4,block=16,order=LBNHC", "tp=8,block=16,order=LBNHC", 8192),
    Case("unequal-blocks", "tp=4,block=16", "tp=8,block=24", 8192),
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    kvferry_ms: float
    strided_ms: float
    descriptors: int
    strided_entries: int
    ns_per_descriptor: float
    peak_bytes_per_descriptor: float
    # Only from benchmarks/plan.py. Ratios are vLLM's time over ours.
    note: str = ""
    vllm_ms: float | None = None
    ratio: float | None = None
    strided_ratio: float | None = None
    vllm_descriptors: int | None = None
    same_bytes_as_vllm: bool | None = None
    nixl_ms: float | None = None
    nixl_handover_ratio: float | None = None
    mooncake_list_ms: float | None = None
    mooncake_binding_ms: float | None = None


@dataclass(frozen=True, slots=True)
class BenchResult:
    cases: tuple[CaseResult, ...]
    all_plans_ms: float  # tp8 pp8 -> tp64: 512 edges of 80 layers
    all_plans_edges: int
    curve: tuple[tuple[int, float, float], ...]  # blocks, arrays ms, strided ms
    cpu_count: int


def measure(case: Case, model: CacheModel) -> CaseResult:
    setup = prepare(case, model)
    bound = setup.bind()
    kvferry_ms, strided_ms = setup.times()
    return CaseResult(
        name=case.name,
        kvferry_ms=kvferry_ms,
        strided_ms=strided_ms,
        descriptors=bound.descriptors,
        strided_entries=bound.entries,
        ns_per_descriptor=kvferry_ms * 1e6 / bound.descriptors,
        peak_bytes_per_descriptor=_peak(setup) / bound.descriptors,
    )


def run(
    progress: Callable[[str], None],
    *,
    quick: bool = False,
    measure: Callable[[Case, CacheModel], CaseResult] = measure,
) -> BenchResult:
    model = load_model("llama-3.1-70b")
    results = []
    for case in CASES[:2] if quick else CASES:
        progress(f"{case.name}: {case.src} -> {case.dst}, {case.blocks} blocks")
        results.append(measure(case, model))
    progress("all plans of tp=8,pp=8 -> tp=64")
    all_ms, edges = _all_plans(model)
    progress("cost by number of blocks")
    curve = tuple(_curve(model, CURVE_BLOCKS[:3] if quick else CURVE_BLOCKS))
    return BenchResult(tuple(results), all_ms, edges, curve, os.cpu_count() or 1)


def timed(action: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of `repeats` runs, after one to warm up."""
    action()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        taken.append((time.perf_counter() - start) * 1e3)
    return median(taken)


@dataclass(slots=True)
class Setup:
    """One edge, its request and its buffers."""

    plan: EdgePlan
    tokens: int
    src_ids: Ints
    dst_ids: Ints
    src_bases: Ints
    dst_bases: Ints
    layouts: tuple[RankLayout, RankLayout]

    def bind(self) -> Bound:
        return bind(
            self.plan,
            tokens=self.tokens,
            src_tables=[self.src_ids],
            dst_tables=[self.dst_ids],
            src_bases=self.src_bases,
            dst_bases=self.dst_bases,
        )

    def times(self) -> tuple[float, float]:
        """Milliseconds to arrays in a reused buffer, and to strided runs."""
        buffer = Copies.empty(self.bind().descriptors)
        return timed(lambda: self.bind().copies(buffer), REPEATS), timed(self.bind, REPEATS)


def prepare(case: Case, model: CacheModel) -> Setup:
    src, dst = EngineShape.parse(case.src), EngineShape.parse(case.dst)
    pair = plan_pair(model, src, dst)
    edge = pair.edges[0]
    tokens = case.blocks * src.block_size
    counts = [-(-tokens // shape.block_size) for shape in (src, dst)]
    pools = [2 * count for count in counts]  # a cache twice the request
    layouts = [
        RankLayout.build(model, shape, rank, pool)
        for shape, rank, pool in zip((src, dst), (edge.src, edge.dst), pools, strict=True)
    ]
    rng = np.random.default_rng(0)
    ids = [
        1 + rng.permutation(pool - 1)[:count] if case.scattered else np.arange(1, count + 1)
        for pool, count in zip(pools, counts, strict=True)
    ]
    bases = np.asarray([1 << 40], dtype=np.int64), np.asarray([1 << 41], dtype=np.int64)
    plan = pair.plan(edge, *layouts)
    return Setup(plan, tokens, ids[0], ids[1], *bases, (layouts[0], layouts[1]))


def _peak(setup: Setup) -> int:
    """Peak bytes allocated while binding into fresh arrays."""
    tracemalloc.start()
    try:
        copies = setup.bind().copies()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del copies
    return peak


def _all_plans(model: CacheModel) -> tuple[float, int]:
    """Every plan of a pair of 64-rank engines, from shapes to address-free plans."""
    src, dst = EngineShape(tp=8, pp=8), EngineShape(tp=64)

    def everything() -> int:
        pair = plan_pair(model, src, dst)
        src_layouts = {r: RankLayout.build(model, src, r, 1024) for r in src.ranks}
        dst_layouts = {r: RankLayout.build(model, dst, r, 1024) for r in dst.ranks}
        for edge in pair.edges:
            pair.plan(edge, src_layouts[edge.src], dst_layouts[edge.dst])
        return len(pair.edges)

    return timed(everything, 5), everything()


def _curve(model: CacheModel, blocks: tuple[int, ...]) -> Iterator[tuple[int, float, float]]:
    for count in blocks:
        setup = prepare(Case("curve", "tp=4,block=16", "tp=8,block=16", count), model)
        yield count, *setup.times()
