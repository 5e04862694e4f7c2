"""vLLM's own planner, driven outside an engine, so that it can be timed and compared.

`MooncakeConnectorWorker._build_transfer_params` turns block ids into three lists of integers, one
entry a copy. It needs little of its worker; that little is set by hand here.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


def installed() -> bool:
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None  # not just a folder of that name


@dataclass(frozen=True, slots=True)
class VllmSide:
    """One rank as vLLM's Mooncake connector sees it: a region a layer."""

    tp_rank: int
    tp_size: int
    block_bytes: int
    layer_bases: tuple[int, ...]


def prepare_worker(
    src: VllmSide,
    dst: VllmSide,
    total_kv_heads: int,
    src_ids: list[int],
    dst_ids: list[int],
    *,
    use_mla: bool = False,
) -> tuple[Any, Callable[[], Any]]:
    """A worker of vLLM's, and the coroutine with which it plans one request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as module

    class Worker(module.MooncakeConnectorWorker):  # type: ignore[misc]
        def __init__(self) -> None:
            self.kv_cache_config = SimpleNamespace(
                transfer_groups=[SimpleNamespace(kv_cache_spec=None)], has_mamba_layers=False
            )
            self._physical_blocks_per_logical_kv_block = 1
            self.tp_rank, self.tp_size, self.use_mla = src.tp_rank, src.tp_size, use_mla
            self.transfer_topo = SimpleNamespace(
                local_replicates_kv_cache=use_mla or src.tp_size > total_kv_heads,
                total_num_kv_heads=total_kv_heads,
            )

        def __del__(self) -> None:  # nothing was started, so nothing is shut down
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


def prepare(
    src: VllmSide, dst: VllmSide, total_kv_heads: int, src_ids: list[int], dst_ids: list[int]
) -> Callable[[], tuple[list[int], list[int], list[int]]]:
    """vLLM's planner for one request: sources, destinations and lengths when called."""
    _, coroutine = prepare_worker(src, dst, total_kv_heads, src_ids, dst_ids)

    def plan() -> tuple[list[int], list[int], list[int]]:
        made = asyncio.run(coroutine())
        if made[4] is not None:
            raise RuntimeError(f"vLLM's planner refused the request: {made[4]}")
        return made[0], made[1], made[2]

    return plan
