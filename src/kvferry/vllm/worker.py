# SPDX-License-Identifier: Apache-2.0
"""The hand-over in a worker's process: memory, holds and loads.

A step of the engine only passes orders and results; threads do the work.

`register` registers the cache with the carriers, and `serve` starts the threads.
`start` passes a step's orders on and returns; `results` collects what ended since the last step,
each id exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.carriers import make_carrier
from kvferry.carriers.auto import AUTO, LIBRARIES, fastest_first, select
from kvferry.carriers.base import Carrier, Memory, MemoryRegion
from kvferry.carriers.host import HostMemory
from kvferry.errors import TransferError
from kvferry.handover.checksum import offered
from kvferry.handover.consumer import ConsumerRank
from kvferry.handover.describe import engine_info, rank_info
from kvferry.handover.load import Loaded
from kvferry.handover.producer import ProducerRank
from kvferry.handover.push import Pusher
from kvferry.handover.ticket import child
from kvferry.handover.wakeup import Wakeup, WhenReady
from kvferry.layout.model import CacheModel
from kvferry.layout.shape import Rank
from kvferry.net.rpc import Sockets
from kvferry.vllm.config import FerryConfig, incarnation
from kvferry.vllm.describe import CacheRank, Described
from kvferry.vllm.metadata import FerryHandshake, FerryReport, HandoverOrders
from kvferry.vllm.metrics import FerryStats
from kvferry.vllm.multiconnector import Siblings

log = logging.getLogger("kvferry")

# vLLM steps without a pause while requests wait for their caches or finished ones' blocks are held.
# A step that computes nothing waits until a load ends or a hold closes, at most this long, and
# leaves the processors to other threads. A new request is delayed by no more than this.
IDLE_STEP_SECONDS = 0.002


class FerryWorker:
    def __init__(
        self,
        config: FerryConfig,
        vllm_config: Any,
        index: int,
        siblings: Siblings | None,
    ) -> None:
        self.config = config
        self.engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._incarnation = child(incarnation(vllm_config), index)
        self._index, self._siblings = index, siblings
        self._place = CacheRank(Rank(0, 0), 1)
        self._stats = FerryStats()
        self._levels: dict[str, int] = {}  # as they were told last; all are 0 before that
        self._unread: set[str] = set()  # requests that the first replica holds
        self._closed: dict[str, str] = {}  # how holds ended, since the last step
        self._sockets: Sockets | None = None
        self._memory: Memory | None = None
        self.carriers: list[Carrier] = []
        self.producer: ProducerRank | None = None
        self.consumer: ConsumerRank | None = None
        self.handshake: FerryHandshake | None = None
        self._idle = self._queueing = False
        self._wakeup = Wakeup()
        self.ready = WhenReady(gpu=False)
        self._written_late = False  # see `written_late`

    def register(
        self, place: CacheRank, described: Described, kv_caches: Mapping[str, Any]
    ) -> None:
        number, regions = gpu_of(kv_caches), described.memory
        self.ready = WhenReady(gpu=number is not None)
        memory = memory_of(regions, gpu=number is not None)
        self.serve(place, described, memory, cache_carriers(self.config, regions, memory, number))
        log.info(
            "kvferry: rank %s of %s (%s), %s, carriers %s",
            tuple(place.rank),
            self.engine_id,
            described.layout.shape.describe(),
            described.summary(),
            ", ".join(carrier.name for carrier in self.carriers),
        )

    def serve(
        self, place: CacheRank, described: Described, memory: Memory, carriers: Sequence[Carrier]
    ) -> None:
        """Take part in hand-overs. The carriers have registered the cache. `close` closes the
        memory and the carriers."""
        self._place, self._memory, self.carriers = place, memory, list(carriers)
        self._sockets = Sockets(self.config.secret, self.config.admits)
        layout, bases = described.layout, described.bases
        self._written_late = written_late(described.model)
        engine = engine_info(
            self.engine_id, self._incarnation, described.model, layout.shape, described.meaning
        )
        self.producer = ProducerRank(
            self._sockets,
            self._incarnation,
            host=self.config.host,
            lease_seconds=self.config.lease_seconds,
            memory=memory,
            pusher=Pusher(engine, described.model, layout, bases, self.carriers),
            wakeup=self._wakeup,
        )
        self.producer.start()
        self.consumer = ConsumerRank(
            self._sockets,
            engine,
            described.model,
            layout,
            bases,
            self.carriers,
            zero=memory.zero,
            optional_roles=frozenset({"draft"} if self.config.draft_layers == "zero" else ()),
            checked=memory if self.config.checksums else None,
            mode=self.config.mode,
            wakeup=self._wakeup,
            replica=place.replica,
            replicas=place.replicas,
        )
        address = f"{self.config.host or '127.0.0.1'}:{self.producer.port}"
        info = rank_info(
            layout,
            bases,
            address,
            self._incarnation,
            {carrier.name: carrier.endpoint() for carrier in self.carriers},
            offered(memory),
        )
        if place.replica:
            return  # the first replica describes them all; consumers read only that one
        beside = self._siblings or Siblings()
        self.handshake = FerryHandshake(  # for the scheduler: this worker, and what is beside it
            msgspec.msgpack.encode(engine),
            msgspec.msgpack.encode(info),
            flat=beside.flat,
            second=beside.ahead,
        )

    def take_report(self) -> FerryReport:
        report, self._closed = FerryReport(closed=self._closed), {}
        return report

    def start(
        self, orders: HandoverOrders, *, step: int, idle: bool = False, queueing: bool = False
    ) -> None:
        """Pass a step's orders on to the threads, before vLLM launches that step.

        Earlier steps may still write into the blocks of a load, so the load waits until the device
        has finished them; it can be cancelled meanwhile. The blocks of a hold are final, because
        the scheduler has seen the token sampled after them. If they may be `written_late`, the hold
        waits for the last step that writes into them, but not for the steps queued since. If the
        device fails, loads fail, and waiting holds are closed as they open.
        """
        producer, consumer = self.producer, self.consumer
        if producer is None or consumer is None:
            return
        self._idle, self._queueing = idle, queueing
        spare = self._place.replica > 0
        if spare:
            # vLLM frees a request's blocks once all workers have reported it. So the first
            # replica's hold keeps them everywhere, and the other replicas report at once.
            self._unread.update(hold.request_id for hold in orders.holds)

        def produce(error: str) -> None:
            if orders.incarnation:
                producer.reset(orders.incarnation)
            if spare:
                return
            for hold in orders.holds:
                if error:
                    producer.withdraw(hold.hold_id)  # it cannot be read, and is still reported
                producer.open_hold(hold)
            for hold_id in orders.withdrawals:
                producer.withdraw(hold_id)

        if self._written_late or orders.loads:
            self.ready.begin(step)
        if not orders.pending:
            return
        if self._written_late:
            self.ready.after(orders.written, produce)
        else:
            produce("")
        for request_id in orders.cancels:  # first: they are for loads of earlier orders
            consumer.cancel(request_id)
        for ticket in orders.releases:  # no load that is wanted has the ticket
            consumer.release(ticket, "not needed")
        for load in orders.loads:
            self.ready.after(step - 1, consumer.accept(load))

    def results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self.producer is None or self.consumer is None:
            return results
        expecting = self.consumer.busy or self.producer.open_holds or self._queueing
        self._wakeup.wait(IDLE_STEP_SECONDS if self._idle and expecting else 0.0)
        results.finished_sending, self._unread = self._unread, set()
        for closed in self.producer.take_closed():
            results.finished_sending.add(closed.request_id)
            self._closed[closed.request_id] = closed.why
            if closed.why == "expired":
                why = "no decode engine fetched its KV cache in time"
                if closed.silent:
                    why = (
                        f"the lease of its KV cache ran out before {closed.silent} decode ranks "
                        "had read it: they died, stalled, or cannot reach this engine"
                    )
                log.warning("request %s: %s", closed.request_id, why)
        for loaded in self.consumer.take_done():
            results.finished_recving.add(loaded.request_id)
            self._stats.loaded(loaded)
            if not loaded.ok:
                results.failed_recving.add(loaded.request_id)
            else:
                _log_load(loaded)
        return results

    def take_stats(self) -> FerryStats:
        if self.producer is not None and self.consumer is not None:
            loads = self.consumer.stats()
            levels = {
                "claims_parked": self.producer.parked_claims,
                "loads_abandoned": loads.abandoned_now,
                "blocks_quarantined": loads.quarantined_blocks,
            }
            if levels != (self._levels or dict.fromkeys(levels, 0)):
                self._levels = levels
                (pp, tp), replica = self._place.rank, self._place.replica
                reporter = f"{self._index}/{pp}.{tp}" + (f".{replica}" if replica else "")
                self._stats.level(reporter, **levels)
        return self._stats.take()

    def close(self) -> None:
        parts = (self.ready, self.consumer, self.producer, *self.carriers)
        close_all(*parts, self._memory, self._sockets)


def close_all(*parts: Any) -> None:
    """Close in this order what is not None. If one part fails, the others are closed."""
    for part in parts:
        try:
            if part is not None:
                part.close()
        except Exception:
            log.exception("a %s could not be closed", type(part).__name__)


def written_late(model: CacheModel) -> bool:
    """Whether a prompt's blocks may be written after the token that follows it is sampled.

    A draft model computes after sampling. States, rings and entries of several tokens are written
    in place.
    """
    return any(
        group.role == "draft" or group.residency.kind in ("state", "ring") or group.partial_entries
        for group in model.groups
    )


def _log_load(loaded: Loaded) -> None:
    seconds = sum(loaded.seconds.values())
    log.info(
        "request %s: loaded %.1f MiB in %.1f ms (%s; %d descriptors%s)",
        loaded.request_id,
        loaded.bytes / (1 << 20),
        seconds * 1e3,
        ", ".join(f"{step} {spent * 1e3:.1f}" for step, spent in loaded.seconds.items()),
        loaded.descriptors,
        f"; {loaded.zeroed_bytes} bytes of draft layers zeroed" if loaded.zeroed_bytes else "",
    )


def gpu_of(kv_caches: Mapping[str, Any]) -> int | None:
    """The number of the GPU that holds the cache's tensors; None: they are in host memory."""
    found = [t.device.index or 0 for t in kv_caches.values() if t.device.type == "cuda"]
    return found[0] if found else None


def memory_of(regions: Sequence[MemoryRegion], gpu: bool) -> Memory:
    """The cache's memory, to be gathered, scattered and zeroed."""
    if not gpu:
        return HostMemory(regions)
    from kvferry.carriers.cuda.staging import DeviceMemory

    return DeviceMemory(regions)


def cache_carriers(
    config: FerryConfig, regions: Sequence[MemoryRegion], memory: Memory, number: int | None
) -> list[Carrier]:
    """The carriers that were configured, with the cache registered, in order of preference.

    On a GPU, `local` is `cuda`, and `tcp` stages. A carrier of ours that cannot take the GPU's
    memory is left out if another can: CUDA IPC cannot share allocations of virtual memory. A
    library that was named must work; an optional one is left out with a warning.
    """
    wanted, gpu = config.carriers, number is not None
    if gpu:
        wanted = tuple(dict.fromkeys("cuda" if name == "local" else name for name in wanted))
    carriers: list[Carrier] = []
    left_out: list[str] = []
    for chosen in select(wanted, device=gpu, configured=tuple(config.carrier_options)):
        if chosen.why_not:
            left_out.append(f"{chosen.name}: {chosen.why_not}")
            continue
        # carriers listen at the directory's address, and nowhere else
        host = config.host or "127.0.0.1"
        options: dict[str, Any] = {"secret": config.secret, "host": host}
        if config.peers:
            options["admits"] = config.admits
        if gpu and chosen.name == "tcp":
            options["memory"] = memory
        if gpu and chosen.name in LIBRARIES:
            options["gpu"] = number
        options |= config.carrier_options.get(chosen.name, {})
        carrier: Carrier | None = None
        try:
            carrier = make_carrier(chosen.name, **options)
            carrier.register(regions)
            carrier.endpoint()
        except TransferError as error:
            if carrier is not None:
                carrier.close()
            optional = chosen.name in config.optional_carriers
            if not optional and (not gpu or chosen.name in LIBRARIES):
                raise
            log.warning("kvferry: the carrier %s is not used: %s", chosen.name, error)
            continue
        carriers.append(carrier)
    if not carriers:
        raise TransferError(f"none of the carriers {', '.join(wanted)} can move this cache")
    if left_out:
        log.info("kvferry: auto leaves out %s", "; ".join(left_out))
    return fastest_first(carriers) if config.carriers == (AUTO,) else carriers
