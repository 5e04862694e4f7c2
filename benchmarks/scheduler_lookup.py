# SPDX-License-Identifier: Apache-2.0
"""What a lookup costs the scheduler, beside vLLM's MooncakeStoreConnector in its default mode.

Both ask one real Mooncake Store, with a master of our own, about prompts of which it has every
block. Theirs: `get_num_new_matched_tokens` with the real scheduler and worker halves, which waits
for the answer. Ours: all calls that one request takes of the scheduler's thread, from its arrival
to its answer, a step apart. The lookup itself runs on another thread of the same process.

In a process of its own: vLLM wants a distributed group, and Mooncake its environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT
from benchmarks.measuring import scratch
from kvferry.errors import StoreError
from mooncake_master import Master
from vllm_engines import ENVIRONMENT

TOKENS, BLOCK = 8192, 16
PROMPTS = 30
STEP_SECONDS = 0.002
SEGMENT_BYTES = 256 << 20
RUN_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class SchedulerShare:
    """Medians over prompts."""

    tokens: int
    keys: int  # of one lookup
    kvferry_us: float  # in the scheduler's thread
    answer_us: float  # until there was an answer
    vllm_us: float  # in the scheduler's thread, and until there was an answer
    ratio: float


def scheduler_share(notes: list[str]) -> SchedulerShare | None:
    """None where vLLM or Mooncake is not installed; `notes` then say so."""
    for name in ("vllm", "mooncake"):
        if importlib.util.find_spec(name) is None:
            notes.append(f"no lookup beside vLLM's: {name} is not installed")
            return None
    try:
        with scratch() as folder, contextlib.closing(Master(folder / "master.log")) as master:
            settings = folder / "mooncake.json"
            settings.write_text(
                json.dumps(
                    {
                        "metadata_server": "P2PHANDSHAKE",
                        "master_server_address": master.address,
                        "global_segment_size": SEGMENT_BYTES,
                        "local_buffer_size": 64 << 20,
                        "protocol": "tcp",
                        "device_name": "",
                    }
                )
            )
            environment = {
                **os.environ,
                **ENVIRONMENT,
                "MOONCAKE_CONFIG_PATH": str(settings),
                "VLLM_RPC_BASE_PATH": str(folder),
            }
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.scheduler_lookup", str(folder)],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
            )
            result = folder / "result.json"
            if ran.returncode or not result.exists():
                lines = [line for line in ran.stderr.splitlines() if "Error" in line]
                raise StoreError("; ".join(lines[-3:]) or f"status {ran.returncode}")
            return SchedulerShare(**json.loads(result.read_text()))
    except (StoreError, OSError, AssertionError, subprocess.TimeoutExpired) as error:
        notes.append(f"no lookup beside vLLM's: {error}")
        return None


def _vllm(folder: Path) -> tuple[Any, Any]:
    """A configuration of vLLM with its own connector, and a cache of one group."""
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from tiny_models import llama_config

    (folder / "model").mkdir()
    description = {**llama_config(), "max_position_embeddings": 2 * TOKENS}
    (folder / "model" / "config.json").write_text(json.dumps(description))
    model = ModelConfig(
        model=str(folder / "model"),
        dtype="float32",
        max_model_len=2 * TOKENS,
        skip_tokenizer_init=True,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=2 * TOKENS,
            max_model_len=2 * TOKENS,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MooncakeStoreConnector", kv_role="kv_both"
        ),
    )
    config.cache_config.num_gpu_blocks = TOKENS // BLOCK
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    group = KVCacheGroupSpec(["layers.0"], spec)
    return config, KVCacheConfig(
        num_blocks=TOKENS // BLOCK, kv_cache_tensors=[], kv_cache_groups=[group]
    )


def _ours(config: Any) -> Any:
    """The pool's scheduler half over the same store."""
    from kvferry.handover.describe import engine_info, rank_info
    from kvferry.layout import CacheModel, Component, EngineShape, Group, Rank, RankLayout
    from kvferry.pool.scheduler import PoolLimits
    from kvferry.pool.weights import Adapters
    from kvferry.vllm.fingerprint import Prompts
    from kvferry.vllm.pool.config import PoolConfig
    from kvferry.vllm.pool.scheduler import VllmPoolScheduler

    model = CacheModel("m", (Group("all", (0,), (Component("kv", 1, (8,), 1),)),))
    shape = EngineShape(block_size=BLOCK)
    layout = RankLayout.build(model, shape, Rank(0, 0), 8)
    rank = rank_info(layout, [0] * len(layout.regions), "", "", {})
    limits = PoolLimits(lookup_seconds=30)
    pool, prompts, adapters = PoolConfig(store="mooncake"), Prompts(), Adapters()
    scheduler = VllmPoolScheduler(pool, config, limits, prompts, adapters, events=False)
    scheduler.described(engine_info("", "", model, shape, {}), [rank])
    return scheduler


def _prompts() -> list[Any]:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    params = SamplingParams(max_tokens=1)
    return [
        Request(f"r{n}", [n + 1, *range(1, TOKENS + 1)], params, None, block_hasher=hasher)
        for n in range(PROMPTS)
    ]


def _fill(store: Any, keys: list[str]) -> None:
    codes = store.put_batch(keys, [b"x"] * len(keys))
    if codes != 0:
        raise StoreError(f"Mooncake refused the keys of a prompt (code {codes})")


def _measure(folder: Path) -> SchedulerShare:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
        MooncakeStoreConnector,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import PoolKey
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    from kvferry.pool.lookup import sequence_keys

    config, cache = _vllm(folder)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel(1)
        worker = MooncakeStoreConnector(config, KVConnectorRole.WORKER, cache)
        theirs = MooncakeStoreConnector(config, KVConnectorRole.SCHEDULER, cache)
    ours = _ours(config)
    pool = ours.pool
    half = worker.connector_worker
    (prefixes,) = half._lookup_key_prefixes
    requests = _prompts()
    keys = 0
    for request in requests:
        hashes = [h.hex() for h in request.block_hashes]
        chain = pool.track(request.request_id, tuple).chain
        chain.cover(request.all_token_ids, len(request.all_token_ids))
        (part,) = sequence_keys(pool.metadata, chain, [pool.layout])
        keys = len(part.keys)
        _fill(half.store, part.keys)
        _fill(half.store, [PoolKey.build_key_string(p, h) for p in prefixes for h in hashes])
        pool.finished(request.request_id)
    rows: list[tuple[float, float, float]] = []
    for request in requests:
        begin = time.perf_counter()
        found, _ = theirs.get_num_new_matched_tokens(request, 0)
        waited = time.perf_counter() - begin
        if found != TOKENS // BLOCK * BLOCK:
            raise StoreError(f"vLLM's connector found {found} of {TOKENS} tokens")
        rows.append((*_ask(ours, request), waited))
    ours.close()
    called, answer, waited = (median(column) * 1e6 for column in zip(*rows, strict=True))
    return SchedulerShare(TOKENS, keys, called, answer, waited, called / waited)


def _ask(ours: Any, request: Any) -> tuple[float, float]:
    """Seconds in calls, and seconds until the answer."""
    begin = time.perf_counter()
    ours.on_new_request(request)
    called, found = time.perf_counter() - begin, None
    while found is None:
        time.sleep(STEP_SECONDS)
        asked = time.perf_counter()
        found, _ = ours.matched(request, 0)
        called += time.perf_counter() - asked
    answer = time.perf_counter() - begin
    if found != TOKENS // BLOCK * BLOCK:
        raise StoreError(f"the pool found {found} of {TOKENS} tokens")
    ours.finished(request)
    return called, answer


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "result.json").write_text(json.dumps(asdict(_measure(place))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Mooncake's and ZMQ's threads have nothing to say any more
