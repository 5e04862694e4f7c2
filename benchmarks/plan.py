# SPDX-License-Identifier: Apache-2.0
"""`make bench-plan` (`python -m benchmarks.plan`): planning speed, beside vLLM's planner.

Every case is one request on one edge. `kvferry_ms` is the time from block ids to three arrays in
reused buffers, `strided_ms` to strided runs. `vllm_ms` is the time of vLLM's planner with the same
block ids, `nixl_ms` and `mooncake_*_ms` the time to hand our copies to these libraries. Ratios are
vLLM's time over ours. Without vLLM, what needs it stays empty.
"""

from __future__ import annotations

import asyncio
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import make_command, vllm_installed
from benchmarks.measuring import median_milliseconds
from kvferry.cli.bench import show
from kvferry.cli.console import Commands, Html, Json, libraries_to_stderr, say
from kvferry.cli.page import Curve, Page, TableSheet, plot
from kvferry.layout.hf import load_model
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import EngineShape
from kvferry.plan import Bound, Copies, EdgePlan, bind, plan_pair
from kvferry.units import show_number

REPEATS = 9
VLLM_REPEATS = 2  # of vLLM's planner; each takes seconds
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


NOT_COMPARED = {
    "token-major": "vLLM plans this as if it were head-major, and copies wrong bytes",
    "unequal-blocks": "vLLM refuses it",
}
SAME = {True: "yes", False: "NO", None: "-"}
app = Commands()


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    kvferry_ms: float
    strided_ms: float
    descriptors: int
    strided_entries: int
    ns_per_descriptor: float
    peak_bytes_per_descriptor: float
    # beside others, where these are installed
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


@app.command()
def main(
    as_json: Json = False,
    html: Html = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and repeats.")] = False,
) -> None:
    """Planning speed, beside vLLM's planner if it is installed."""
    with libraries_to_stderr():
        if not vllm_installed():
            say(f"vLLM is not installed here, its columns stay empty: {make_command('bench-plan')}")
        result = run(quick)
    show(result, page(result), as_json, html)


def run(quick: bool) -> BenchResult:
    model = load_model("llama-3.1-70b")
    results = []
    for case in CASES[:2] if quick else CASES:
        say(f"{case.name}: {case.src} -> {case.dst}, {case.blocks} blocks")
        results.append(measure(case, model))
    say("all plans of tp=8,pp=8 -> tp=64")
    all_ms, edges = _all_plans(model)
    say("cost by number of blocks")
    curve = tuple(_curve(model, CURVE_BLOCKS[:3] if quick else CURVE_BLOCKS))
    return BenchResult(tuple(results), all_ms, edges, curve, os.cpu_count() or 1)


def measure(case: Case, model: CacheModel, repeats: int = VLLM_REPEATS) -> CaseResult:
    setup = prepare(case, model)
    bound = setup.bind()
    kvferry_ms, strided_ms = setup.times()
    ours = CaseResult(
        name=case.name,
        kvferry_ms=kvferry_ms,
        strided_ms=strided_ms,
        descriptors=bound.descriptors,
        strided_entries=bound.entries,
        ns_per_descriptor=kvferry_ms * 1e6 / bound.descriptors,
        peak_bytes_per_descriptor=_peak(setup) / bound.descriptors,
    )
    if not vllm_installed():
        return ours
    copies = bound.copies()
    nixl_ms = _nixl(copies)
    list_ms, binding_ms = _mooncake(copies)
    ours = replace(ours, nixl_ms=nixl_ms, mooncake_list_ms=list_ms, mooncake_binding_ms=binding_ms)
    if case.name in NOT_COMPARED:
        return replace(ours, note=NOT_COMPARED[case.name])
    vllm_ms, vllm_copies = _vllm(setup, repeats)
    return replace(
        ours,
        vllm_ms=vllm_ms,
        ratio=vllm_ms / ours.kvferry_ms,
        strided_ratio=vllm_ms / ours.strided_ms,
        nixl_handover_ratio=vllm_ms / (ours.kvferry_ms + nixl_ms) if nixl_ms else None,
        vllm_descriptors=len(vllm_copies),
        same_bytes_as_vllm=_canonical(copies) == _canonical(vllm_copies),
    )


def page(result: BenchResult) -> Page:
    """The cases, and the cost by number of blocks."""
    cases, first = result.cases, result.cases[0]
    columns = {
        "case": [c.name for c in cases],
        "arrays ms": [_told(c.kvferry_ms) for c in cases],
        "strided ms": [_told(c.strided_ms) for c in cases],
        "vLLM ms": [_told(c.vllm_ms) for c in cases],
        "ratio": [_told(c.ratio, " x") for c in cases],
        "strided": [_told(c.strided_ratio, " x") for c in cases],
        "+ NIXL": [_told(c.nixl_handover_ratio, " x") for c in cases],
        "copies": [_told(c.descriptors) for c in cases],
        "vLLM's": [_told(c.vllm_descriptors) for c in cases],
        "entries": [_told(c.strided_entries) for c in cases],
        "ns a copy": [_told(c.ns_per_descriptor) for c in cases],
        "same bytes": [SAME[c.same_bytes_as_vllm] for c in cases],
    }
    shown = {title: cells for title, cells in columns.items() if {*cells} != {"-"}}
    notes = [
        f"{first.name}: memory while binding {first.peak_bytes_per_descriptor:.1f} bytes a copy",
        f"all {result.all_plans_edges} plans of tp=8,pp=8 -> tp=64, 80 layers: "
        f"{result.all_plans_ms:.1f} ms",
        *(f"{c.name}: {c.note}" for c in cases if c.note),
    ]
    if first.mooncake_list_ms is not None and first.mooncake_binding_ms is not None:
        notes.append(
            f"{first.name}, handed to Mooncake: bind {first.kvferry_ms:.3g} ms, lists "
            f"{first.mooncake_list_ms:.3g} ms, its binding {first.mooncake_binding_ms:.3g} ms"
        )
    if first.nixl_ms is not None:
        notes.append(f"{first.name}, handed to NIXL as arrays: {first.nixl_ms:.3g} ms, both ends")
    curves = [
        Curve("arrays", "#0072b2", [(blocks, ms) for blocks, ms, _ in result.curve]),
        Curve("strided runs", "#d55e00", [(blocks, ms) for blocks, _, ms in result.curve]),
    ]
    cost = plot(
        curves, "blocks of the request", "milliseconds", "{:,.0f}".format, log_x=True, log_y=True
    )
    return Page(
        "make bench-plan",
        "Planning",
        "80 layers of llama-3.1-70b, one request on one edge, times in milliseconds.",
        [TableSheet("Cases", list(shown), list(zip(*shown.values(), strict=True)))],
        notes,
        [("Cost by number of blocks", cost)],
    )


def _told(value: float | None, unit: str = "") -> str:
    return "-" if value is None else show_number(value) + unit


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
        return median_milliseconds(
            lambda: self.bind().copies(buffer), REPEATS
        ), median_milliseconds(self.bind, REPEATS)


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

    return median_milliseconds(everything, 5), everything()


def _curve(model: CacheModel, blocks: tuple[int, ...]) -> Iterator[tuple[int, float, float]]:
    for count in blocks:
        setup = prepare(Case("curve", "tp=4,block=16", "tp=8,block=16", count), model)
        yield count, *setup.times()


def _vllm(setup: Setup, repeats: int) -> tuple[float, Copies]:
    sides = []
    for layout, bases in zip(setup.layouts, (setup.src_bases, setup.dst_bases), strict=True):
        (part,) = layout.parts
        first = part.placements[0]
        sides.append(
            VllmSide(
                layout.rank.tp,
                layout.shape.tp,
                first.block_stride,
                tuple((bases[first.regions] + first.offsets).tolist()),
            )
        )
    heads = setup.plan.groups["attention"].components[0].units
    ids = setup.src_ids.tolist(), setup.dst_ids.tolist()
    _, plan = prepare_vllm_worker(sides[0], sides[1], heads, *ids)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        *made, _, refused = asyncio.run(plan())
        taken.append((time.perf_counter() - start) * 1e3)
        if refused is not None:
            raise RuntimeError(f"vLLM's planner refused the request: {refused}")
    src, dst, length = (np.asarray(values, dtype=np.int64) for values in made)
    return min(taken), Copies(src, dst, length)


def _canonical(copies: Copies) -> bytes:
    """Copies sorted by destination, neighbours joined: equal if they move the same bytes."""
    order = np.argsort(copies.dst, kind="stable")
    src, dst, length = copies.src[order], copies.dst[order], copies.length[order]
    apart = (src[1:] != src[:-1] + length[:-1]) | (dst[1:] != dst[:-1] + length[:-1])
    heads = np.concatenate(([0], np.flatnonzero(apart) + 1))
    joined = np.stack([src[heads], dst[heads], np.add.reduceat(length, heads)])
    return joined.tobytes()


def _nixl(copies: Copies) -> float | None:
    """Milliseconds to pass both ends to NIXL as arrays."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError:
        return None
    agent = nixl_agent("kvferry-bench", nixl_agent_config(backends=[]))
    rows = np.zeros((len(copies), 3), dtype=np.uint64)  # address, length, device; reused

    def hand_over() -> None:
        rows[:, 1] = copies.length
        for addresses in (copies.src, copies.dst):
            rows[:, 0] = addresses
            agent.get_xfer_descs(rows, mem_type="DRAM")

    return median_milliseconds(hand_over, 3)


def _mooncake(copies: Copies) -> tuple[float | None, float | None]:
    """Milliseconds to make lists, and in Mooncake's binding before it looks for its peer.

    The peer is a closed port, so the call ends once its arguments are converted.
    """
    try:
        from mooncake.engine import TransferEngine
    except ImportError:
        return None, None
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        return None, None
    list_ms = median_milliseconds(
        lambda: (copies.src.tolist(), copies.dst.tolist(), copies.length.tolist()), 3
    )
    lists = copies.src.tolist(), copies.dst.tolist(), copies.length.tolist()
    binding_ms = median_milliseconds(
        lambda: engine.batch_transfer_sync_write("127.0.0.1:1", *lists), 3
    )
    return list_ms, binding_ms


@dataclass(frozen=True, slots=True)
class VllmSide:
    """One rank as vLLM's Mooncake connector sees it: one region per layer."""

    tp_rank: int
    tp_size: int
    block_bytes: int
    layer_bases: tuple[int, ...]


def prepare_vllm_worker(
    src: VllmSide,
    dst: VllmSide,
    total_kv_heads: int,
    src_ids: list[int],
    dst_ids: list[int],
) -> tuple[Any, Callable[[], Any]]:
    """A worker of vLLM, and the coroutine with which it plans one request.

    `MooncakeConnectorWorker._build_transfer_params` turns block ids into three lists of integers,
    one entry per copy. It uses few attributes of its worker, which are set by hand here.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as module

    class Worker(module.MooncakeConnectorWorker):  # type: ignore[misc]
        def __init__(self) -> None:
            self.kv_cache_config = SimpleNamespace(
                transfer_groups=[SimpleNamespace(kv_cache_spec=None)], has_mamba_layers=False
            )
            self._physical_blocks_per_logical_kv_block = 1
            self.tp_rank, self.tp_size, self.use_mla = src.tp_rank, src.tp_size, False
            self.transfer_topo = SimpleNamespace(
                local_replicates_kv_cache=src.tp_size > total_kv_heads,
                total_num_kv_heads=total_kv_heads,
            )

        def __del__(self) -> None:  # nothing was started
            pass

    def regions(side: VllmSide) -> list[Any]:
        return [
            module.TransferRegion(f"layer.{i}", i, base, side.block_bytes, side.block_bytes)
            for i, base in enumerate(side.layer_bases)
        ]

    worker = Worker()
    metadata = SimpleNamespace(
        req_blocks={"r": ("t", [dst_ids])},
        remote_hostname="",
        remote_port=0,
        remote_tp_rank=dst.tp_rank,
        remote_tp_size=dst.tp_size,
    )
    request = [("r", SimpleNamespace(local_block_ids=[src_ids]))]
    ours, theirs = regions(src), regions(dst)

    return worker, lambda: worker._build_transfer_params(request, metadata, ours, theirs)


if __name__ == "__main__":
    app()
