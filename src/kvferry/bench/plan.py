"""`kvferry bench plan`: planning speed, beside vLLM's planner in the same run.

Every case is one request on one edge. `kvferry_ms` is the time from block ids to three arrays in
reused buffers. `strided_ms` is the time to strided runs. `vllm_ms` is the time of vLLM's planner
with the same ids. Our times are medians of several runs. Ratios are vLLM's time over ours.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.presets import load_model
from kvferry.layout.shape import EngineShape
from kvferry.plan import Bound, Copies, EdgePlan, bind, plan_pair

REPEATS = 9
VLLM_REPEATS = 2  # each takes seconds
CURVE_BLOCKS = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Case:
    """A request of `blocks` blocks on the first edge between two shapes."""

    name: str
    src: str
    dst: str
    blocks: int
    scattered: bool = True
    beside_vllm: bool = True
    note: str = ""


CASES = (
    Case("scattered", "tp=4,block=16", "tp=8,block=16", 8192),
    Case("scattered-2048", "tp=4,block=16", "tp=8,block=16", 2048),
    Case("contiguous-same-shape", "tp=4,block=16", "tp=4,block=16", 8192, scattered=False),
    Case("contiguous", "tp=4,block=16", "tp=8,block=16", 8192, scattered=False),
    Case("gather-tp8-to-tp4", "tp=8,block=16", "tp=4,block=16", 8192),
    Case(
        "token-major",
        "tp=4,block=16,order=LBNHC",
        "tp=8,block=16,order=LBNHC",
        8192,
        beside_vllm=False,
        note="vLLM plans this as if it were head-major, and copies wrong bytes",
    ),
    Case(
        "unequal-blocks",
        "tp=4,block=16",
        "tp=8,block=24",
        8192,
        beside_vllm=False,
        note="vLLM refuses it",
    ),
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    kvferry_ms: float
    strided_ms: float
    vllm_ms: float | None
    ratio: float | None
    strided_ratio: float | None
    nixl_ms: float | None
    nixl_handover_ratio: float | None
    mooncake_list_ms: float | None
    mooncake_binding_ms: float | None
    descriptors: int
    strided_entries: int
    vllm_descriptors: int | None
    same_bytes_as_vllm: bool | None
    ns_per_descriptor: float
    peak_bytes_per_descriptor: float
    note: str


@dataclass(frozen=True, slots=True)
class BenchResult:
    cases: tuple[CaseResult, ...]
    all_plans_ms: float  # tp8 pp8 -> tp64: 512 edges of 80 layers
    all_plans_edges: int
    curve: tuple[tuple[int, float, float], ...]  # blocks, arrays ms, strided ms
    cpu_count: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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


def run(progress: Callable[[str], None] = lambda _: None, *, quick: bool = False) -> BenchResult:
    model = load_model("llama-3.1-70b")
    beside = vllm_installed()
    if not beside:
        progress("vLLM is not installed here: its columns stay empty (make bench-plan installs it)")
    results = []
    for case in CASES[:2] if quick else CASES:
        progress(f"{case.name}: {case.src} -> {case.dst}, {case.blocks} blocks")
        results.append(_measure(case, model, beside, quick))
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


def _measure(case: Case, model: CacheModel, beside: bool, quick: bool) -> CaseResult:
    setup = prepare(case, model)
    bound = setup.bind()
    buffer = Copies.empty(bound.descriptors)
    kvferry_ms = timed(lambda: setup.bind().copies(buffer), REPEATS)
    strided_ms = timed(setup.bind, REPEATS)
    copies = bound.copies(buffer)
    vllm_ms = vllm_count = same = None
    if beside and case.beside_vllm:
        vllm_ms, vllm_copies = _vllm(setup, 1 if quick else VLLM_REPEATS)
        vllm_count = len(vllm_copies)
        same = same_bytes(copies, vllm_copies)
    nixl_ms = _nixl(copies) if beside else None
    list_ms, binding_ms = _mooncake(copies) if beside else (None, None)

    def over(ours: float | None) -> float | None:
        return vllm_ms / ours if vllm_ms is not None and ours else None

    return CaseResult(
        name=case.name,
        kvferry_ms=kvferry_ms,
        strided_ms=strided_ms,
        vllm_ms=vllm_ms,
        ratio=over(kvferry_ms),
        strided_ratio=over(strided_ms),
        nixl_ms=nixl_ms,
        nixl_handover_ratio=over(kvferry_ms + nixl_ms if nixl_ms is not None else None),
        mooncake_list_ms=list_ms,
        mooncake_binding_ms=binding_ms,
        descriptors=bound.descriptors,
        strided_entries=bound.entries,
        vllm_descriptors=vllm_count,
        same_bytes_as_vllm=same,
        ns_per_descriptor=kvferry_ms * 1e6 / bound.descriptors,
        peak_bytes_per_descriptor=_peak(setup) / bound.descriptors,
        note=case.note,
    )


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
    plan = prepare_vllm(sides[0], sides[1], heads, setup.src_ids.tolist(), setup.dst_ids.tolist())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        made = plan()
        taken.append((time.perf_counter() - start) * 1e3)
    src, dst, length = (np.asarray(values, dtype=np.int64) for values in made)
    return min(taken), Copies(src, dst, length)


def same_bytes(a: Copies, b: Copies) -> bool:
    """Whether two lists of copies move the same bytes, however they are cut."""
    return _canonical(a) == _canonical(b)


def _canonical(copies: Copies) -> bytes:
    """Copies sorted by destination, neighbours joined."""
    order = np.argsort(copies.dst, kind="stable")
    src, dst, length = copies.src[order], copies.dst[order], copies.length[order]
    apart = (src[1:] != src[:-1] + length[:-1]) | (dst[1:] != dst[:-1] + length[:-1])
    heads = np.concatenate(([0], np.flatnonzero(apart) + 1))
    joined = np.stack([src[heads], dst[heads], np.add.reduceat(length, heads)])
    return joined.tobytes()


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

    return timed(hand_over, 3)


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
    list_ms = timed(lambda: (copies.src.tolist(), copies.dst.tolist(), copies.length.tolist()), 3)
    lists = copies.src.tolist(), copies.dst.tolist(), copies.length.tolist()
    binding_ms = timed(lambda: engine.batch_transfer_sync_write("127.0.0.1:1", *lists), 3)
    return list_ms, binding_ms


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
        buffer = Copies.empty(setup.bind().descriptors)

        def arrays(setup: Setup = setup, buffer: Copies = buffer) -> None:
            setup.bind().copies(buffer)

        yield count, timed(arrays, REPEATS), timed(setup.bind, REPEATS)


# vLLM's planner, driven outside an engine


def vllm_installed() -> bool:
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None  # not just a folder of that name


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


def prepare_vllm(
    src: VllmSide, dst: VllmSide, total_kv_heads: int, src_ids: list[int], dst_ids: list[int]
) -> Callable[[], tuple[list[int], list[int], list[int]]]:
    """vLLM's planner for one request: sources, destinations and lengths when called."""
    _, coroutine = prepare_vllm_worker(src, dst, total_kv_heads, src_ids, dst_ids)

    def plan() -> tuple[list[int], list[int], list[int]]:
        made = asyncio.run(coroutine())
        if made[4] is not None:
            raise RuntimeError(f"vLLM's planner refused the request: {made[4]}")
        return made[0], made[1], made[2]

    return plan
