"""An engine without a model: vLLM's real scheduler and block pool, our connector, real transfers.

The "model" writes eight bytes for each token it computes, made from the token and its place, into
the slot that vLLM's block table names; the next token is a checksum of all bytes of the sequence
as they lie in memory. So a cache that did not come whole, or came from another prompt, shows in the
next token, and a step takes a millisecond. Only the model is missing: requests are scheduled,
preempted, held and freed by vLLM, and bytes move by our carriers.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.host import HostMemory
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape
from kvferry.vllm.connector import FerryConnector
from kvferry.vllm.describe import CacheRank, Described, cache_rank
from kvferry.vllm.worker import FerryWorker
from vllm import SamplingParams

TOKEN_BYTES = 8
PER_REQUEST = (  # what vLLM's aggregator and its MultiConnector keep of requests
    "_recv_remaining_count",
    "_send_remaining_count",
    "_failed_recving_pending",
    "_extra_async_saves",
    "_requests_to_connector",
)
MODEL = CacheModel("modelless", (Group("g", (0,), (Component("k", 1, (TOKEN_BYTES,), 1),)),))
init_none_hash(sha256)


def token_bytes(token: int, position: int) -> np.ndarray:
    return np.frombuffer(zlib.crc32(f"{token} {position}".encode()).to_bytes(8), dtype=np.uint8)


def expected(prompt: list[int], count: int, window: int = 0) -> list[int]:
    """What any engine must answer, computed without one."""
    tokens = list(prompt)
    for _ in range(count):
        cache = b"".join(token_bytes(t, p).tobytes() for p, t in in_window(tokens, window))
        tokens.append(zlib.crc32(cache) % 1000)
    return tokens[len(prompt) :]


def in_window(tokens: list[int], window: int) -> list[tuple[int, int]]:
    """The tokens that the last one reads, itself among them, with their positions."""
    return list(enumerate(tokens))[max(0, len(tokens) - window) if window else 0 :]


def child(name: str, **extra: Any) -> dict[str, Any]:
    """One of ours, for a MultiConnector."""
    extra = {"lease_seconds": 30, "load_seconds": 20, **extra}
    ours = {"kv_connector_module_path": "kvferry.vllm", "kv_connector_extra_config": extra}
    return {"kv_connector": name, "kv_role": "kv_both", **ours}


class Modelless:
    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        connector: str = "FerryConnector",
        blocks: int = 64,
        block_size: int = 16,
        role: str = "kv_both",
        policy: str = "recompute",
        asynchronous: bool = False,
        children: list[dict[str, Any]] | None = None,
        with_worker: bool = True,
        states: bool = False,
        traces: str | None = None,
        tp: int = 1,
        pcp: int = 1,
        dcp: int = 1,
        window: int = 0,
        longest: int = 512,
        **extra: Any,
    ) -> None:
        """`children`: of a MultiConnector; those that are not ours must need no device.

        `states`: to the scheduler, the model has a layer with a recurrent state too; there are no
        bytes of it.

        `window`: of the only layer. `longest`: tokens of a request.

        `pcp`: prefill context parallel ranks. Each is a worker with the whole cache, or, where
        `dcp` is more than 1, with each `dcp`th token. All `tp` ranks have the same head.
        """
        self.name, self.block_size, self.window = name, block_size, window
        module: str | None = "kvferry.vllm"
        extra = {"lease_seconds": 30, "load_seconds": 20, **extra}
        if children is not None:
            connector, module, extra = "MultiConnector", None, {"connectors": children}
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=longest
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=64,  # longer prompts come in chunks
                max_model_len=longest,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                # for in-tree children
                disable_hybrid_kv_cache_manager=not states and not window,
            ),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=not states),
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector,
                kv_connector_module_path=module,
                kv_role=role,
                engine_id=name,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra,
            ),
            device_config=DeviceConfig("cpu"),
            observability_config=ObservabilityConfig(otlp_traces_endpoint=traces),
        )
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = asynchronous  # vLLM has none on a CPU
        config.parallel_config.tensor_parallel_size = tp
        config.parallel_config.prefill_context_parallel_size = pcp
        config.parallel_config.decode_context_parallel_size = dcp
        told = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1}
        spec: Any = FullAttentionSpec(**told, dtype=torch.float32)
        if window:
            spec = SlidingWindowSpec(**told, dtype=torch.float32, sliding_window=window)
        groups = [KVCacheGroupSpec(["l"], spec)]
        if states:
            # as long as a request: vLLM's, of states that are not cached
            state = MambaSpec(block_size=longest, shapes=((8,),), dtypes=(torch.int8,))
            groups.append(KVCacheGroupSpec(["s"], state))
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=longest if states else block_size * dcp,  # of all groups
            hash_block_size=block_size * dcp,
        )
        self.connector = self.scheduler.connector
        size = blocks * block_size * TOKEN_BYTES
        places = [(tp_rank, pcp_rank) for pcp_rank in range(pcp) for tp_rank in range(tp)]
        self._places = [cache_rank(config.parallel_config, 0, *place) for place in places]
        # As vLLM makes its groups (`initialize_model_parallel`), whatever `cache_rank` says.
        self._turns = [(tp_rank * pcp + pcp_rank) % dcp for tp_rank, pcp_rank in places]
        self._shape = EngineShape(tp=self._places[0].tp, dcp=dcp, block_size=block_size)
        self.memories = [np.zeros(size, dtype=np.uint8) for _ in places]
        self.memory = self.memories[0]
        self.children = getattr(self.connector, "sub_connectors", [self.connector])
        self.worker_sides: list[Any] = []
        described: dict[tuple[int, int], Any] = {}
        for number in range(len(places) if with_worker else 0):
            with set_current_vllm_config(config):  # as vLLM does
                side = KVConnectorFactory.create_connector(
                    config,
                    KVConnectorRole.WORKER,
                    replace(cache),  # a worker has its own
                )
            self.worker_sides.append(side)
            for child in getattr(side, "sub_connectors", [side]):
                if isinstance(child, FerryConnector) and child.worker is not None:
                    memory = self.memories[number]
                    self._fill(child.worker, self._places[number], blocks, memory)
            told = side.get_handshake_metadata()
            if told is not None:  # vLLM keeps one of a (pp, tp) rank, or of all that share tokens
                described[0, number if dcp > 1 else places[number][0]] = told
        if described:
            self.connector.set_xfer_handshake_metadata_pp_aware(described)
        self._aggregator = KVOutputAggregator(len(self.worker_sides))
        self.tokens: dict[str, list[int]] = {}  # sampled, by request
        self.ended: dict[str, Any] = {}  # finish reason, by request
        self.params: dict[str, dict[str, Any]] = {}  # of responses
        self.stats: list[Any] = []
        self._hasher = get_request_block_hasher(block_size * dcp, sha256)
        self._in_flight: list[tuple[Any, Any]] = []
        self._asynchronous = asynchronous

    def _fill(self, worker: FerryWorker, place: CacheRank, blocks: int, memory: np.ndarray) -> None:
        """Give a worker an array of ours for a cache."""
        model = MODEL
        if self.window:
            group = replace(MODEL.groups[0], residency=Residency("window", self.window))
            model = replace(MODEL, groups=(group,))
        layout = RankLayout.build(model, self._shape, place.rank, blocks)
        assert layout.total_bytes == memory.nbytes
        region = MemoryRegion(memory.ctypes.data, memory.nbytes)
        push = worker.config.mode == "push"
        carrier = make_carrier("tcp", host="127.0.0.1") if push else make_carrier("local")
        carrier.register([region])
        described = Described(model, layout, (region.address,), {})
        worker.serve(place, described, HostMemory([region]), [carrier])

    @property
    def ferry(self) -> Any:
        """Our connector's scheduler side; of several, the first."""
        return self.ferries[0]

    @property
    def ferries(self) -> list[Any]:
        """The scheduler sides of all our connectors that hand over."""
        ours = [c for c in self.children if isinstance(c, FerryConnector) and c.STYLE]
        return [c.handover for c in ours]

    @property
    def workers(self) -> list[Any]:
        sides = [c for side in self.worker_sides for c in getattr(side, "sub_connectors", [side])]
        return [c.worker for c in sides if isinstance(c, FerryConnector) and c.STYLE]

    def told(self, name: str) -> list[Any]:
        """A metric, step by step, of the steps that had something to tell of it."""
        several = len(self.children) > 1  # then each child's metrics are by its name
        told = [one for step in self.stats for one in (step.values() if several else [step])]
        return [one[name] for one in told if name in one]

    def counted(self, name: str) -> Counter[str]:
        """All that a metric counted, by reason."""
        return sum((Counter(one) for one in self.told(name)), Counter())

    @property
    def parked_claims(self) -> int:
        return sum(worker.producer.parked_claims for worker in self.workers)

    @property
    def pushes(self) -> int:
        """What this engine wrote into others."""
        return sum(worker.producer.counters["pushes done"] for worker in self.workers)

    # Requests

    def add(self, request_id: str, prompt: list[int], count: int = 1, **params: Any) -> Request:
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=count, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        request.kv_transfer_params = params or None
        self.tokens[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step; an asynchronous scheduler is told of it one step later."""
        scheduled = self.scheduler.schedule()
        self._in_flight.append((scheduled, self._compute(scheduled)))
        if not self._asynchronous or len(self._in_flight) > 1:
            self._report(*self._in_flight.pop(0))

    def _report(self, scheduled: Any, output: Any) -> None:
        outputs = self.scheduler.update_from_output(scheduled, output)
        for told in outputs.values():
            if told.scheduler_stats is not None and told.scheduler_stats.kv_connector_stats:
                self.stats.append(told.scheduler_stats.kv_connector_stats)
            for one in told.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.ended[one.request_id] = one.finish_reason
                if one.kv_transfer_params:
                    self.params[one.request_id] = one.kv_transfer_params

    def _compute(self, scheduled: Any) -> ModelRunnerOutput:
        for side in self.worker_sides:
            side.handle_preemptions(scheduled.kv_connector_metadata)
            side.bind_connector_metadata(scheduled.kv_connector_metadata)
        sampled = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            end = request.num_computed_tokens  # vLLM counts what it scheduled as computed
            tokens = [*request.prompt_token_ids, *self._own(request)]
            for position in range(end - count, end):
                for slot in self._slots(table, position):
                    slot[:] = token_bytes(tokens[position], position)
            if end >= len(tokens):
                read = []
                for position, _ in in_window(tokens[:end], self.window):
                    first, *copies = (x.tobytes() for x in self._slots(table, position))
                    assert all(copy == first for copy in copies), "replicas differ"
                    read.append(first)
                cache = b"".join(read)
                sampled[request_id] = [zlib.crc32(cache) % 1000]
                self._history.setdefault(request_id, []).append(sampled[request_id][0])
            else:
                sampled[request_id] = []
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={r: i for i, r in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=self._connected(scheduled) if self.worker_sides else None,
        )

    def _connected(self, scheduled: Any) -> KVConnectorOutput | None:
        """What vLLM's executor makes of all workers' answers."""
        outputs = [
            ModelRunnerOutput([], {}, kv_connector_output=self._connect(scheduled, side))
            for side in self.worker_sides
        ]
        if len(outputs) == 1:
            return outputs[0].kv_connector_output
        together = self._aggregator.aggregate(outputs)
        return together.kv_connector_output if together is not None else None

    def _connect(self, scheduled: Any, side: Any) -> KVConnectorOutput:
        """What vLLM's model runner does with a connector after it has computed, in its order."""
        side.start_load_kv(SimpleNamespace(attn_metadata=None))
        side.wait_for_save()
        results = side.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=side.get_kv_connector_stats(),
            kv_connector_worker_meta=side.build_connector_worker_meta(),
        )
        side.clear_connector_metadata()
        return output

    @property
    def _history(self) -> dict[str, list[int]]:
        """Tokens the model sampled, also those that the scheduler has not heard of yet."""
        return self.__dict__.setdefault("_sampled", {})

    def _own(self, request: Request) -> list[int]:
        return self._history.get(request.request_id, [])

    def _slots(self, table: list[int], position: int) -> list[np.ndarray]:
        """Where a token lies, on every worker that has it."""
        there, turn = divmod(position, self._shape.dcp)
        block, slot = table[there // self.block_size], there % self.block_size
        assert block > 0, "the null block is never used"
        start = (block * self.block_size + slot) * TOKEN_BYTES
        return [
            memory[start : start + TOKEN_BYTES]
            for memory, mine in zip(self.memories, self._turns, strict=True)
            if mine == turn
        ]

    # What is left

    @property
    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def left(self) -> dict[str, int]:
        """What requests have left behind, without what there is none of. After them: nothing."""
        kept = Counter(
            blocks=self.used_blocks,
            requests=len(self.scheduler.requests),
            received=len(self.scheduler.finished_recving_kv_req_ids),
        )
        for ferry in self.ferries:
            consuming, producing = ferry.consuming, ferry.producing
            kept.update(
                wanted=len(consuming.wanted),
                unsettled=int(consuming.unsettled),
                renewals=consuming.renewer.watched,
                accepted=len(producing.accepted),
                holds=len(producing.held),
                held_blocks=producing.held_blocks,
                ends=len(producing._ends),
                orders=int(consuming.parts.orders.pending),
            )
        for worker in self.workers:
            consumer, producer = worker.consumer, worker.producer
            kept.update(
                loads=int(consumer.busy),
                abandoned=consumer.stats().abandoned_now,
                open_holds=producer.open_holds,
                parked_claims=producer.parked_claims,
            )
        vllm = [vars(self._aggregator)]  # which forgets what all workers have told
        if len(self.children) > 1:
            vllm.append(vars(self.connector))
        for name in PER_REQUEST:
            kept[name] = sum(len(there.get(name, ())) for there in vllm)
        return {name: count for name, count in kept.items() if count}

    def close(self) -> None:
        for side in self.worker_sides:
            side.shutdown()
        self.connector.shutdown()


def run(*engines: Modelless, until: Callable[[], Any], seconds: float = 30.0) -> None:
    """Step engines in turn until something is so."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it did not come true in time"
        for engine in engines:
            engine.step()
