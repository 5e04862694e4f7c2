"""vLLM's real scheduler and cache manager over the pool, with a model runner of our own.

The runner computes nothing but bytes: what a token leaves in the cache is a function of all tokens
up to it, and of the engine's weights. In each step it checks that the cache holds exactly that for
every token that the scheduler takes for computed; so a wrong, stale or missing byte is noticed
wherever it comes from.

`step` does what vLLM's engine core does in one turn of its loop. So an engine that vLLM takes for
idle does not step.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.handover.describe import engine_info, rank_info
from kvferry.layout import CacheModel, Component, EngineShape, Group, RankLayout, Residency
from kvferry.pool.rank import PoolRank
from kvferry.pool.store import Store
from kvferry.vllm.describe import cache_rank
from kvferry.vllm.metadata import FerryHandshake, FerryReport
from kvferry.vllm.pool.config import PoolConfig
from kvferry.vllm.pool.worker import PoolWorker
from tiny_models import llama_config
from vllm_loop import VllmLoop

HEADS, DIM, LAYERS = 4, 8, 2
WINDOW = 24
CELL = (Component("kv", HEADS, (DIM,), 1),)
PLAIN = CacheModel("m", (Group("all", tuple(range(LAYERS)), CELL),))
# one layer with full attention, one with a window; each with a block table of its own
HYBRID = CacheModel(
    "h", (Group("full", (0,), CELL), Group("window", (1,), CELL, Residency("window", WINDOW)))
)
# one layer with full attention, one with a recurrent state
MAMBA = CacheModel("s", (Group("full", (0,), CELL), Group("state", (1,), CELL, Residency("state"))))
# every rank keeps all of a token, so that context parallelism can share tokens out
LATENT = CacheModel(
    "l",
    (
        Group(
            "all",
            tuple(range(LAYERS)),
            (Component("kv", 1, (HEADS * DIM,), 1, sharding="replicated"),),
        ),
    ),
)
ALWAYS = {"min_load_tokens": 0}  # computing bytes is faster than any load
MODELS = {"": PLAIN, "window": HYBRID, "state": MAMBA, "latent": LATENT}


def content(tokens: list[int]) -> np.ndarray:
    """What each token leaves in the cache: [token, layer, head, dim]."""
    state, rows = 7, []
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1) & (2**63 - 1)
        rows.append(state)
    cells = np.arange(LAYERS * HEADS * DIM, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (np.asarray(rows, dtype=np.uint64)[:, None] + cells[None, :]) * np.uint64(2**61 - 1)
    return (mixed >> np.uint64(40)).astype(np.uint8).reshape(-1, LAYERS, HEADS, DIM)


def answer(tokens: list[int]) -> int:
    """The token that any engine says after these, whatever its weights."""
    return int(content(tokens)[-1].astype(int).sum()) % 997


def expected(prompt: list[int], count: int) -> list[int]:
    """What any engine must answer, computed without one."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens))
    return tokens[len(prompt) :]


def _extra(connector: str, pool: dict[str, Any]) -> dict[str, Any]:
    """The pool's keys where a connector has them."""
    if connector == "FerryConnector":
        return {"pool": pool}
    if connector != "MultiConnector":
        return pool
    common = {"kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both"}
    return {
        "connectors": [
            {"kv_connector": "FerryConnector", **common},
            {
                "kv_connector": "FerryPoolConnector",
                **common,
                "kv_connector_extra_config": pool,
            },
        ]
    }


class SchedulerEngine(VllmLoop):
    """One engine: vLLM's scheduler, our connector, `tp` workers in this process."""

    def __init__(
        self,
        folder: Path,
        open_store: Callable[[], Store],
        *,
        tp: int = 1,
        block_size: int = 16,
        blocks: int = 64,
        extra: dict[str, Any] | None = None,
        batched: int = 64,
        connector: str = "FerryPoolConnector",
        hybrid: str = "",
        pcp: int = 1,
        dcp: int = 1,
        order: str = "LBHNC",
        on_failure: str = "",
        asynchronous: bool = False,
        drafts: int = 0,
        slots: int = 8,
        policy: str = "fcfs",
    ) -> None:
        """`drafts`: tokens that are guessed in each step, some of them wrong; not with states.
        `slots`: requests that run at a time. `policy`: the order in which vLLM schedules them."""
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / "model" / "config.json").write_text(json.dumps(llama_config()))
        own = {"path": str(folder / "unused"), "weight_revision": "test", **ALWAYS, **(extra or {})}
        own.setdefault("lookup_seconds", 20.0)  # a busy machine's lookup is no miss
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=None if connector == "MultiConnector" else "kvferry.vllm",
            kv_load_failure_policy=on_failure
            or ("recompute" if connector == "MultiConnector" else "fail"),
            kv_role="kv_both",
            kv_connector_extra_config=_extra(connector, own),
        )
        model = ModelConfig(
            model=str(folder / "model"),
            dtype="float32",
            max_model_len=1024,
            skip_tokenizer_init=True,
        )
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(
                block_size=block_size,
                enable_prefix_caching=True,
                mamba_cache_mode="align" if hybrid == "state" else "none",
                mamba_block_size=block_size if hybrid == "state" else None,
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=slots,
                policy=policy,
                max_num_batched_tokens=batched,
                max_model_len=1024,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
            ),
            kv_transfer_config=transfer,
        )
        config.scheduler_config.async_scheduling = asynchronous  # vLLM has none on a CPU
        config.cache_config.num_gpu_blocks = blocks
        if drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=drafts,
                prompt_lookup_max=4,
                target_model_config=model,
                target_parallel_config=config.parallel_config,
            )
        config.parallel_config.tensor_parallel_size = tp
        config.parallel_config.prefill_context_parallel_size = pcp
        config.parallel_config.decode_context_parallel_size = dcp
        sizes = {"block_size": block_size, "num_kv_heads": HEADS, "head_size": DIM}
        specs: list[Any] = [FullAttentionSpec(**sizes, dtype=model.dtype)]
        if hybrid == "window":
            specs.append(SlidingWindowSpec(**sizes, dtype=model.dtype, sliding_window=WINDOW))
        elif hybrid == "state":
            specs.append(
                MambaSpec(
                    block_size=block_size,
                    shapes=((HEADS, DIM),),
                    dtypes=(torch.int8,),
                    mamba_cache_mode="align",
                )
            )
        self.model = MODELS[hybrid]
        groups = [
            KVCacheGroupSpec([f"layers.{i}" for i in group.layers], spec)
            for group, spec in zip(self.model.groups, specs, strict=True)
        ]
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        init_none_hash(sha256)
        span, hash_size = resolve_kv_cache_block_sizes(cache, config)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        with set_current_vllm_config(config):
            self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=span,
                hash_block_size=hash_size,
                log_stats=True,
            )
        self.connector = self.scheduler.connector
        several = connector == "MultiConnector"
        self.adapter = (self.connector._connectors[1] if several else self.connector).pool
        self.pool, self.block_size = self.adapter.pool, block_size
        self.pool._open_store = self.open_store = open_store
        places = [(tp_rank, pcp_rank) for pcp_rank in range(pcp) for tp_rank in range(tp)]
        ranks = [cache_rank(config.parallel_config, 0, *place) for place in places]
        self.dcp, self.order = dcp, order
        shape = EngineShape(tp=ranks[0].tp, dcp=dcp, block_size=block_size, order=order)
        self.ranks = [one.rank.tp for one in ranks]  # as the planner sees them
        self.layouts = [RankLayout.build(self.model, shape, one.rank, blocks) for one in ranks]
        self.memory = [
            [np.zeros(region.bytes, np.uint8) for region in layout.regions]
            for layout in self.layouts
        ]
        self.workers, handshakes = [], {}
        self.pool_ranks: list[PoolRank] = []
        for rank, layout in enumerate(self.layouts):
            alone = connector != "MultiConnector"
            worker = PoolWorker(PoolConfig())
            bases = [array.ctypes.data for array in self.memory[rank]]
            me = ranks[rank]
            self.pool_ranks.append(
                PoolRank(
                    open_store(),
                    self.model,
                    layout,
                    bases,
                    replica=me.replica,
                    replicas=me.replicas,
                )
            )
            worker._rank = self.pool_ranks[-1]
            worker._prefix_tokens = block_size * dcp if hybrid in ("", "latent") else 0
            self.workers.append(worker)
            tp_rank, pcp_rank = places[rank]  # keyed as vLLM does
            handshakes[0, tp_rank + (pcp_rank * tp if dcp > 1 else 0)] = FerryHandshake(
                msgspec.msgpack.encode(engine_info("", "", self.model, shape, {})),
                msgspec.msgpack.encode(rank_info(layout, [0] * len(bases), "", "", {})),
            )
        # Under a MultiConnector, what vLLM passes on is a sibling's; ours come with the first step.
        told: dict[Any, Any] = handshakes if alone else dict.fromkeys(handshakes, object())
        self._first = FerryReport([] if alone else list(handshakes.values()))
        self.connector.set_xfer_handshake_metadata_pp_aware(told)
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}  # of each group
        self.computed: dict[str, int] = {}  # tokens that were computed, not loaded or hit
        self.out: dict[str, list[int]] = {}
        self.ended: dict[str, list[str]] = {}  # reasons: one, unless a request ends twice
        # The bytes of a token also depend on the weights. Blocks in vLLM's own cache may be of any
        # since the last reset that emptied it.
        self.weights = self.oldest_weights = 0
        self._loading: dict[str, tuple[int, int, int]] = {}  # weights, first token, and the end
        super().__init__(asynchronous=asynchronous)
        self._drafts = drafts
        self._guesses: dict[str, list[int]] = {}  # of the next tokens
        # Of each step in flight, by request and its preemptions: drafts that were wrong. vLLM's
        # asynchronous scheduler counts them as computed until it hears of them.
        self._rejected: list[dict[tuple[str, int], int]] = []
        self._aggregator = KVOutputAggregator(len(self.workers))
        self.preempted = 0
        while not self.pool.started:
            assert self.scheduler.has_requests()  # vLLM steps while there are
            self.step()

    def cells(self, rank: int, table: int) -> np.ndarray:
        """A rank's memory of one group as [layer, block, head, slot, dim], whatever its order."""
        group = self.model.groups[table]
        slots = 1 if group.is_state else self.block_size
        heads, dim = (1, HEADS * DIM) if self.model is LATENT else (self._heads, DIM)
        sizes = {"L": len(group.layers), "B": -1, "H": heads, "N": slots, "C": dim}
        raw = self.memory[rank][table].reshape([sizes[axis] for axis in self.order])
        return raw.transpose([self.order.index(axis) for axis in "LBHNC"])

    @property
    def _heads(self) -> int:
        return HEADS // self.layouts[0].shape.tp

    def _mine(self, rows: np.ndarray, rank: int) -> np.ndarray:
        """What a rank keeps of tokens."""
        if self.model is LATENT:
            return rows.reshape(*rows.shape[:2], 1, HEADS * DIM)
        return rows[:, :, self.ranks[rank] * self._heads : (self.ranks[rank] + 1) * self._heads]

    def add(
        self,
        name: str,
        tokens: list[int],
        output: int = 4,
        lora: Any = None,
        *,
        priority: int = 0,
        uncached: bool = False,
    ) -> None:
        """`uncached`: its prompt is computed whole, as where its logprobs are wanted."""
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        params.update_from_generation_config({}, None)
        params.skip_reading_prefix_cache = uncached
        own: dict[str, Any] = {"lora_request": lora, "priority": priority}
        request = Request(name, list(tokens), params, None, block_hasher=self._hasher, **own)
        self.tokens[name], self.computed[name], self.out[name] = list(tokens), 0, []
        self.ended[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def change_weights(self, *, running: bool = False) -> None:
        """As an operator does it. The pool has a new epoch; vLLM keeps blocks if any are in use.
        `running`: preempt requests that run. If blocks stay in use, vLLM refuses, and so the
        weights do not change."""
        try:
            emptied = self.scheduler.reset_prefix_cache(running, reset_connector=True)
        except RuntimeError:
            return
        self.weights += 1
        if emptied:
            self.oldest_weights = self.weights

    def forget(self) -> None:
        """Empty vLLM's own cache, of which nothing is in use."""
        assert self.scheduler.reset_prefix_cache()
        self.oldest_weights = self.weights

    def run(self, seconds: float = 30.0) -> None:
        """Steps until nothing is left to do, saves included."""
        self.until(lambda: not self.scheduler.has_requests(), seconds, "the engine hangs")

    def until(
        self, done: Callable[[], bool], seconds: float = 30.0, else_: str = "it did not happen"
    ) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, else_
            self.step()

    def _report(self, output: Any, results: ModelRunnerOutput) -> None:
        for told in self.scheduler.update_from_output(output, results).values():
            for one in told.outputs:
                self.out[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.ended[one.request_id].append(str(one.finish_reason))
        rejected = self._rejected.pop(0)
        if self._drafts and not self._asynchronous and rejected:
            names = [name for name, _ in rejected]
            guesses = [list(self._guesses[name]) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))

    def _run_model(self, output: Any) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        steps = {name: self._inputs(name, output) for name in names}
        self.execute(output, steps)
        self._rejected.append({})
        sampled = [self._sample(name, *steps[name]) for name in names]
        metadata = output.kv_connector_metadata
        several = isinstance(metadata, MultiKVConnectorMetadata)
        if several:
            metadata = metadata.metadata[1]
        self.preempted += len(output.preempted_req_ids or ())
        for order in metadata.pool.loads:
            if order.segments:
                first = min(segment.start for segment in order.segments)
                stop = max(segment.stop for segment in order.segments)
                self._loading[order.request_id] = (self.weights, first, stop)
        outputs = [
            ModelRunnerOutput([], {}, kv_connector_output=self._connect(worker, metadata))
            for worker in self.workers
        ]
        first = outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(outputs)
        assert first is not None and first.kv_connector_output is not None
        results = first.kv_connector_output
        report, self._first = self._first.aggregate(results.kv_connector_worker_meta), FerryReport()
        for loaded in report.loaded:
            if not loaded.ok:  # the engine may find the same tokens in its own cache
                self._loading.pop(loaded.request_id, None)
        results.kv_connector_worker_meta = report
        if several:
            sibling = FerryReport(report.handshakes)
            results.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata((sibling, report))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=results,
        )

    def _connect(self, worker: PoolWorker, metadata: Any) -> KVConnectorOutput:
        """One worker's part of a step, after it has computed."""
        worker.start(metadata.pool, idle=metadata.idle)
        worker.save()
        results = worker.results()
        return KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.take_invalid(),
            kv_connector_worker_meta=worker.take_report(),
        )

    def _inputs(self, name: str, output: Any) -> tuple[int, list[int], int]:
        """Of one request's step: its first token, all tokens up to its end, and the drafts."""
        request, count = self.scheduler.requests[name], output.num_scheduled_tokens[name]
        told = list(request.all_token_ids)
        known = told + self.tokens[name][len(told) :]
        life = (name, request.num_preemptions)
        # vLLM counts what it scheduled as computed
        stop = request.num_computed_tokens - sum(step.get(life, 0) for step in self._rejected)
        drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
        if self._asynchronous and drafts:  # the scheduler knows only how many there are
            drafts = [*self._guesses.get(name, []), *[-1] * len(drafts)][: len(drafts)]
        tokens = known[: stop - len(drafts)] + drafts
        assert len(tokens) == stop, "the scheduler counts on tokens that there are not"
        return stop - count, tokens, len(drafts)

    def _sample(self, name: str, start: int, tokens: list[int], drafts: int) -> list[int]:
        """The tokens after a step, where it computed all tokens before them."""
        request, first = self.scheduler.requests[name], len(tokens) - drafts
        if request.is_prefill_chunk:
            return []
        sampled: list[int] = []
        for stop in range(first, len(tokens) + 1):
            sampled.append(answer(tokens[:stop]))
            if stop == len(tokens) or tokens[stop] != sampled[-1]:
                break
        self.tokens[name] = known = tokens[:first] + sampled
        if self._drafts:
            self._rejected[-1][name, request.num_preemptions] = drafts + 1 - len(sampled)
            right = sum(known[-3:]) % (self._drafts + 1)
            guesses = expected(known, self._drafts)
            self._guesses[name] = guesses[:right] + [guess + 1 for guess in guesses[right:]]
        return sampled

    def execute(self, output: Any, steps: dict[str, tuple[int, list[int], int]]) -> None:
        """Compute, and check what counts as computed before."""
        for request in output.scheduled_new_reqs:
            self.tables[request.req_id] = [list(ids) for ids in request.block_ids]
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(ids) for ids in blocks]
            elif blocks:
                for table, ids in zip(self.tables[name], blocks, strict=True):
                    table += ids
        starts = [(name, start) for name, (start, *_) in steps.items()]
        told = []
        for name, start in starts:
            rows = content(steps[name][1])
            for number, group in enumerate(self.model.groups):
                mine = rows[:, list(group.layers)]
                if group.is_state:
                    self._advance(name, number, mine, start)
                else:
                    self._compute(name, number, mine, start)
                    told.append((name, number, mine, group.residency.needed_from(start), start))
            self.computed[name] += len(rows) - start
        for one in told:  # a request may read what another one computes in the same step
            self._check(*one)
        for name, _ in starts:
            self._loading.pop(name, None)

    def _places(self, name: str, number: int, rank: int, positions: np.ndarray) -> Any:
        """Block and slot of each of these tokens that a rank keeps, and the tokens."""
        table, span = np.asarray(self.tables[name][number]), self.block_size * self.dcp
        positions = positions[positions % self.dcp == self.ranks[rank] % self.dcp]
        block, slot = table[positions // span], positions % span // self.dcp
        assert block.all(), f"{name}: a token that is needed has no block"
        return block, slot, positions

    def _compute(self, name: str, number: int, rows: np.ndarray, start: int) -> None:
        """One group: make all tokens from `start` on."""
        for rank in range(len(self.workers)):
            block, slot, made = self._places(name, number, rank, np.arange(start, len(rows)))
            new = self._mine(rows, rank)[made] ^ np.uint8(self.weights)
            self.cells(rank, number)[:, block, :, slot, :] = new

    def _check(self, name: str, number: int, rows: np.ndarray, needed: int, start: int) -> None:
        """One group: tokens from `needed` on must be there up to `start`."""
        for rank in range(len(self.workers)):
            block, slot, old = self._places(name, number, rank, np.arange(needed, start))
            held = self.cells(rank, number)[:, block, :, slot, :]  # token, layer, head, dim
            mine = self._mine(rows, rank)[old]
            assert held.shape == mine.shape, (held.shape, mine.shape)
            wrong = np.flatnonzero(~self._right(name, old, held, mine))
            assert not len(wrong), f"{name}: token {old[wrong[0]]} is not in the cache"

    def _right(
        self, name: str, positions: np.ndarray, held: np.ndarray, mine: np.ndarray
    ) -> np.ndarray:
        """Whether each token's bytes are right. What was loaded is of the weights of that time."""
        of_load, first, stop = self._loading.get(name, (0, 0, 0))
        right = np.zeros(len(positions), dtype=bool)
        for weights in range(self.oldest_weights, self.weights + 1):
            same = (held == mine ^ np.uint8(weights)).all(axis=tuple(range(1, held.ndim)))
            right |= same & ((weights >= of_load) | (positions < first) | (positions >= stop))
        return right

    def _advance(self, name: str, number: int, rows: np.ndarray, start: int) -> None:
        """A recurrent state: the one after `start` tokens must be there; then the next is made."""
        table, stop = self.tables[name][number], len(rows)
        for rank in range(len(self.workers)):
            cells, mine = self.cells(rank, number), self._mine(rows, rank)
            if start:
                held = cells[:, table[(start - 1) // self.block_size], :, 0, :]
                right = self._right(name, np.array([start - 1]), held[None], mine[start - 1][None])
                assert right.all(), f"{name}: no state after token {start}"
            block = table[(stop - 1) // self.block_size]
            assert block, f"{name}: the state after token {stop} has no block"
            cells[:, block, :, 0, :] = mine[stop - 1] ^ np.uint8(self.weights)

    @property
    def pinned(self) -> int:
        return self.pool.pinned_blocks

    @property
    def in_use(self) -> int:
        """Blocks that anybody still refers to; the null block is always in use."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return sum(block.ref_cnt > 0 for block in pool.blocks if not block.is_null)

    def left(self) -> dict[str, int]:
        """What requests have left behind, without what there is none of. After them: nothing."""
        lookups = self.pool._lookups
        kept = Counter(
            blocks=self.in_use,
            pinned=self.pinned,
            quarantined=self.pool.quarantined_blocks,
            requests=len(self.scheduler.requests),
            received=len(self.scheduler.finished_recving_kv_req_ids),
            failed=len(self.scheduler.failed_recving_kv_req_ids),
            trackers=len(self.pool._trackers),
            known=len(self.adapter._requests),
            questions=len(lookups._asked) if lookups is not None else 0,
            jobs=len(self.pool._jobs),
            loads=len(self.pool._loads),
            orders=int(self.pool.has_work),
            loads_of_workers=sum(len(worker._orders) for worker in self.workers),
            running=sum(rank._loader.running + rank._saver.running for rank in self.pool_ranks),
            told_in_part=len(self._aggregator._recv_remaining_count),
            failed_in_part=len(self._aggregator._failed_recving_pending),
            children=len(getattr(self.connector, "_requests_to_connector", ())),
        )
        return {name: count for name, count in kept.items() if count}

    def close(self) -> None:
        self.connector.shutdown()
        for worker in self.workers:
            worker.close()
