"""The worker's side: memory, holds and loads. The engine's step only passes orders and results.

`register_kv_caches` describes the cache, registers it with the carriers, and starts the threads.
`start` passes a step's orders on and returns; `results` collects what ended since the last step,
each id exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.layout.shape import Rank
from kvferry.p2p.consumer import ConsumerRank
from kvferry.p2p.describe import engine_info, rank_info
from kvferry.p2p.load import Loaded
from kvferry.p2p.producer import ProducerRank
from kvferry.p2p.ready import WhenReady
from kvferry.p2p.stats import ConsumerStats
from kvferry.transport.auto import AUTO, by_cost
from kvferry.transport.base import Carrier, MemoryRegion
from kvferry.vllm.config import FerryConfig, incarnation
from kvferry.vllm.describe import describe_worker
from kvferry.vllm.device import cache_carriers, memory_of, on_gpu
from kvferry.vllm.metadata import FerryHandshake, FerryMetadata
from kvferry.wire.sockets import Sockets

log = logging.getLogger("kvferry")

# While requests wait for their caches and nothing else runs, vLLM's steps spin. A step that
# computes nothing waits this long for a load to end, and leaves the processors to others.
IDLE_STEP_SECONDS = 0.002


class FerryWorker:
    def __init__(self, config: FerryConfig, vllm_config: Any, kv_cache_config: Any) -> None:
        self.config, self._vllm, self._kv = config, vllm_config, kv_cache_config
        self.engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._incarnation = incarnation(vllm_config)
        self._sockets: Sockets | None = None
        self._carriers: list[Carrier] = []
        self._producer: ProducerRank | None = None
        self._consumer: ConsumerRank | None = None
        self._handshake: FerryHandshake | None = None
        self._idle = False
        self._ready = WhenReady(gpu=False)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        rank = Rank(get_pp_group().rank_in_group, get_tensor_model_parallel_rank())
        described = describe_worker(self._vllm, self._kv, kv_caches, rank, self.config.model_id)
        layout, bases = described.layout, described.bases
        memory = [
            MemoryRegion(base, region.bytes)
            for base, region in zip(bases, layout.regions, strict=True)
        ]
        self._sockets = Sockets(self.config.secret)
        gpu = on_gpu(kv_caches)
        self._ready = WhenReady(gpu)
        reached = memory_of(memory, gpu)
        self._carriers = cache_carriers(self.config, memory, reached, gpu)
        if self.config.carriers == (AUTO,) and not gpu:
            self._carriers = by_cost(self._carriers)
        self._producer = ProducerRank(
            self._sockets,
            self._incarnation,
            host=self.config.host,
            lease_seconds=self.config.lease_seconds,
            memory=reached,
        )
        self._producer.start()
        engine = engine_info(
            self.engine_id, self._incarnation, described.model, layout.shape, described.meaning
        )
        self._consumer = ConsumerRank(
            self._sockets,
            engine,
            described.model,
            layout,
            bases,
            self._carriers,
            zero=reached.zero,
            checked=reached if self.config.checksums else None,
        )
        address = f"{self.config.host or '127.0.0.1'}:{self._producer.port}"
        info = rank_info(
            layout,
            bases,
            address,
            self._incarnation,
            {carrier.name: carrier.endpoint() for carrier in self._carriers},
        )
        self._handshake = FerryHandshake(
            msgspec.msgpack.encode(engine), msgspec.msgpack.encode(info)
        )
        log.info(
            "kvferry: rank %s of %s (%s), %s, carriers %s",
            tuple(rank),
            self.engine_id,
            layout.shape.describe(),
            described.summary(),
            ", ".join(carrier.name for carrier in self._carriers),
        )

    def handshake(self) -> FerryHandshake | None:
        return self._handshake

    def start(self, orders: FerryMetadata) -> None:
        """Pass a step's orders on to the threads."""
        if self._producer is None or self._consumer is None:
            return
        self._idle = orders.idle
        if orders.holds or orders.cancels or orders.loads or orders.releases:
            self._ready.mark()(partial(self._pass_on, orders, self._producer, self._consumer))

    def _pass_on(
        self, orders: FerryMetadata, producer: ProducerRank, consumer: ConsumerRank
    ) -> None:
        """What the orders say of blocks is true by now: the device has come to them."""
        for hold in orders.holds:
            tables = [list(table) for table in hold.tables]
            producer.open_hold(hold.hold_id, hold.request_id, hold.digest, hold.tokens, tables)
        for request_id in orders.cancels:
            consumer.cancel(request_id)
        for load in orders.loads:
            consumer.start(load)
        for ticket in orders.releases:
            consumer.release(ticket, "not needed")

    def results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self._producer is None or self._consumer is None:
            return results
        if self._idle:
            self._consumer.wait_done(IDLE_STEP_SECONDS)
        for closed in self._producer.take_closed():
            results.finished_sending.add(closed.request_id)
            if closed.why == "expired":
                log.warning("request %s: nobody fetched its KV cache in time", closed.request_id)
        for loaded in self._consumer.take_done():
            results.finished_recving.add(loaded.request_id)
            if not loaded.ok:
                results.failed_recving.add(loaded.request_id)
            else:
                _log_load(loaded)
        return results

    def stats(self) -> ConsumerStats | None:
        """What this rank has loaded so far."""
        return self._consumer.stats() if self._consumer is not None else None

    def close(self) -> None:
        for part in (self._ready, self._consumer, self._producer, *self._carriers, self._sockets):
            if part is not None:
                part.close()


def _log_load(loaded: Loaded) -> None:
    seconds = sum(loaded.seconds.values())
    log.info(
        "request %s: loaded %.1f MiB in %.1f ms (%s; %d descriptors)",
        loaded.request_id,
        loaded.bytes / (1 << 20),
        seconds * 1e3,
        ", ".join(f"{step} {spent * 1e3:.1f}" for step, spent in loaded.seconds.items()),
        loaded.descriptors,
    )
