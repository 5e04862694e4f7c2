# SPDX-License-Identifier: Apache-2.0
"""Whole plans on one GPU: Llama 70B from tp 4 to tp 8, all ranks' caches in its memory.

The owner's process holds the four source ranks, this one the eight destinations. *direct*: strided
runs, one read for each edge; all binding is done by this one process. *one rank alone*: its own
edge. A plan is made once for a pair of engines and kept; binding is paid by every request. A sample
of bytes is compared with the source by arithmetic of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_size_t, c_uint64
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.bench import GB, download, of, soon, yes
from benchmarks.gpu.owner import Remote
from benchmarks.report import Report
from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.cuda.carrier import CudaCarrier, CudaPeer
from kvferry.carriers.cuda.driver import Device, device, driver
from kvferry.layout.hf import load_model
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import EngineShape
from kvferry.plan import Bound, EdgePlan, bind, plan_pair
from kvferry.plan.assign import Edge
from kvferry.units import show_bytes

MODEL, LAYERS, HEADS, HEAD_BYTES, BLOCK = "llama-3.1-70b", 80, 8, 512, 16
SOURCES, DESTINATIONS = 4, 8
CASES = (("LBHNC", 8 << 10), ("LBNHC", 8 << 10), ("LBHNC", 128 << 10), ("LBNHC", 128 << 10))
REPEATS = 5


@dataclass(slots=True)
class Setup:
    """A request of one length, in both engines' memories."""

    order: str
    tokens: int
    plans: list[tuple[Edge, EdgePlan]]
    src_ids: Ints
    dst_ids: Ints
    src_bases: list[int]
    dst_bases: list[int]
    carrier: CudaCarrier
    peer: CudaPeer

    def bind(self, edge: Edge, plan: EdgePlan) -> Bound:
        return bind(
            plan,
            tokens=self.tokens,
            src_tables=[self.src_ids],
            dst_tables=[self.dst_ids],
            src_bases=[self.src_bases[edge.src.tp]],
            dst_bases=[self.dst_bases[edge.dst.tp]],
        )


def measure(owner: Remote, report: Report, peak: float, order: str, tokens: int) -> None:
    model = load_model(MODEL)
    src = EngineShape.parse(f"tp={SOURCES},block={BLOCK},order={order}")
    dst = EngineShape.parse(f"tp={DESTINATIONS},block={BLOCK},order={order}")
    blocks = tokens // BLOCK
    begin = time.perf_counter()
    pair = plan_pair(model, src, dst)
    layouts = [
        {rank.tp: RankLayout.build(model, shape, rank, blocks + 1) for rank in shape.ranks}
        for shape in (src, dst)
    ]
    plans = [(e, pair.plan(e, layouts[0][e.src.tp], layouts[1][e.dst.tp])) for e in pair.edges]
    plan_seconds = time.perf_counter() - begin
    sizes = [[side[tp].regions[0].bytes for tp in sorted(side)] for side in layouts]
    answer = owner.ask("allocate", sizes=sizes[0], seed=7)
    on = device(0)
    with on.current():
        bases = [on.allocate(size) for size in sizes[1]]
    carrier = make_carrier("cuda")
    assert isinstance(carrier, CudaCarrier)
    carrier.register([MemoryRegion(a, n) for a, n in zip(bases, sizes[1], strict=True)])
    peer = carrier.connect(bytes.fromhex(answer["cuda"]), soon())
    rng = np.random.default_rng(tokens)
    ids = [1 + rng.permutation(blocks).astype(np.int64) for _ in range(2)]
    setup = Setup(order, tokens, plans, ids[0], ids[1], answer["addresses"], bases, carrier, peer)
    bound = [setup.bind(*edge) for edge in plans]
    total, copies = sum(one.bytes for one in bound), sum(one.descriptors for one in bound)
    clear(on, bases, sizes[1])
    seconds, bind_share = median_run(lambda: direct(setup))
    is_right = right(setup, on)
    alone, alone_share = median_run(lambda: direct(setup, 1))
    report.row(
        "Whole plans, Llama 70B, 80 layers, tp 4 to tp 8, all twelve ranks on this GPU",
        order_and_length=f"{order}, {tokens >> 10}k tokens",
        GB=f"{total / GB:.2f}",
        copies=f"{copies:,} x {show_bytes(total // copies)}",
        plan_ms_once=1e3 * plan_seconds,
        direct_ms=f"{1e3 * seconds:.2f}",
        GB_s_of_peak=of(total / seconds, peak / 2, GB),
        bindings_share=f"{bind_share:.0%}",
        one_rank_alone_ms_binding=f"{1e3 * alone:.2f} ({alone_share:.0%})",
        right=yes(is_right),
    )
    carrier.close()
    with on.current():
        for base in bases:
            on.free(base)
    owner.ask("release")


def median_run(task: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Seconds of the median run after one that warms up, and what share of them was binding."""
    task()
    seconds, bound = sorted(task() for _ in range(REPEATS))[REPEATS // 2]
    return seconds, bound / seconds


def direct(setup: Setup, edges: int | None = None) -> tuple[float, float]:
    begin, bound_seconds = time.perf_counter(), 0.0
    transfers = []
    for edge, plan in setup.plans[:edges]:
        started = time.perf_counter()
        bound = setup.bind(edge, plan)
        bound_seconds += time.perf_counter() - started
        transfers += [setup.carrier.read(setup.peer, batch) for batch in bound.batches]
    for transfer in transfers:
        transfer.wait(soon())
    return time.perf_counter() - begin, bound_seconds


def clear(on: Device, bases: list[int], sizes: list[int]) -> None:
    with on.current():
        for base, size in zip(bases, sizes, strict=True):
            driver().call("cuMemsetD8_v2", c_uint64(base), 0x5A, c_size_t(size))


def right(setup: Setup, on: Device) -> bool:
    """Random tokens of random layers and heads, found on both sides by their own arithmetic."""
    rng = np.random.default_rng(3)
    shifts = setup.peer.memory

    def at(base: int, ids: Ints, layer: int, head: int, token: int, heads: int) -> int:
        block, slot = int(ids[token // BLOCK]), token % BLOCK
        page = base + (layer * (len(ids) + 1) + block) * heads * BLOCK * HEAD_BYTES
        inner = head * BLOCK + slot if setup.order == "LBHNC" else slot * heads + head
        return page + inner * HEAD_BYTES

    for _ in range(400):
        layer, head = int(rng.integers(LAYERS)), int(rng.integers(HEADS))
        token = int(rng.integers(setup.tokens))
        per_src, per_dst = HEADS // SOURCES, HEADS // DESTINATIONS
        src_base = setup.src_bases[head // per_src]
        src = at(src_base, setup.src_ids, layer, head % per_src, token, per_src)
        dst_base = setup.dst_bases[head // per_dst]
        dst = at(dst_base, setup.dst_ids, layer, head % per_dst, token, per_dst)
        shift = shifts.shift_of(src, src + HEAD_BYTES)
        assert shift is not None
        if download(on, src + shift, HEAD_BYTES) != download(on, dst, HEAD_BYTES):
            return False
    return True
