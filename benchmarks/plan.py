# SPDX-License-Identifier: Apache-2.0
"""`make bench-plan` (`python -m benchmarks.plan`): planning speed, beside vLLM's planner.

The cases are those of `kvferry bench plan` (kvferry/bench/plan.py). `vllm_ms` is the time of vLLM's
planner with the same block ids, `nixl_ms` and `mooncake_*_ms` the time to hand our copies to these
libraries. Ratios are vLLM's time over ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import make_command, vllm_installed
from kvferry.bench import plan
from kvferry.bench.plan import BenchResult, Case, CaseResult, Setup, prepare, timed
from kvferry.cli.bench import plan_page, show
from kvferry.cli.console import Commands, Html, Json, libraries_to_stderr, say
from kvferry.cli.page import Page, TableSheet
from kvferry.layout.model import CacheModel
from kvferry.plan import Copies
from kvferry.units import show_number

REPEATS = 2  # of vLLM's planner; each takes seconds
NOT_COMPARED = {
    "token-major": "vLLM plans this as if it were head-major, and copies wrong bytes",
    "unequal-blocks": "vLLM refuses it",
}
SAME = {True: "yes", False: "NO", None: ""}
app = Commands()


@app.command()
def main(
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Planning speed, beside vLLM's planner if it is installed."""
    with libraries_to_stderr():
        if not vllm_installed():
            say(f"vLLM is not installed here, its columns stay empty: {make_command('bench-plan')}")
        result = plan.run(say, measure=measure if vllm_installed() else plan.measure)
    show(result, page(result), as_json, html)


def measure(case: Case, model: CacheModel, repeats: int = REPEATS) -> CaseResult:
    ours = plan.measure(case, model)
    setup = prepare(case, model)
    copies = setup.bind().copies()
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
    """The page of `kvferry bench plan`, with the columns that were measured beside others."""
    plain, cases = plan_page(result), result.cases
    ours = plain.sheets[0]
    columns = dict(zip(ours.head, zip(*ours.rows, strict=True), strict=True))
    beside = {
        "vLLM ms": [_told(c.vllm_ms) for c in cases],
        "ratio": [_told(c.ratio, "x") for c in cases],
        "strided": [_told(c.strided_ratio, "x") for c in cases],
        "+ NIXL": [_told(c.nixl_handover_ratio, "x") for c in cases],
        "vLLM's": [_told(c.vllm_descriptors) for c in cases],
        "same bytes": [SAME[c.same_bytes_as_vllm] for c in cases],
    }
    for title, cells in beside.items():
        if any(cells):
            columns[title] = tuple(cell or "-" for cell in cells)
    rows = list(zip(*columns.values(), strict=True))
    notes, first = [*plain.notes, *(f"{c.name}: {c.note}" for c in cases if c.note)], cases[0]
    if first.mooncake_list_ms is not None and first.mooncake_binding_ms is not None:
        notes.append(
            f"{first.name}, handed to Mooncake: bind {first.kvferry_ms:.3g} ms, lists "
            f"{first.mooncake_list_ms:.3g} ms, its binding {first.mooncake_binding_ms:.3g} ms"
        )
    if first.nixl_ms is not None:
        notes.append(f"{first.name}, handed to NIXL as arrays: {first.nixl_ms:.3g} ms, both ends")
    return replace(plain, sheets=[TableSheet(ours.title, list(columns), rows)], notes=notes)


def _told(value: float | None, unit: str = "") -> str:
    return "" if value is None else show_number(value) + unit


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
