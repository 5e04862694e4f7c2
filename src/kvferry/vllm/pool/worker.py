# SPDX-License-Identifier: Apache-2.0
"""The pool in a worker's process.

It registers the cache's memory with the store, passes orders on, and reports each end once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.carriers.base import MemoryRegion, Ready, RegionTable
from kvferry.carriers.cuda.bus import Bus
from kvferry.errors import DescriptionError, TransferError
from kvferry.handover.describe import engine_info, rank_info
from kvferry.pool.embedded.device import DeviceStore
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.objects import block_span
from kvferry.pool.orders import LoadOrder, SaveOrder
from kvferry.pool.rank import PoolRank
from kvferry.pool.scheduler import PoolOrders
from kvferry.pool.store import Store
from kvferry.pool.wrappers import CheckedStore, StagedStore
from kvferry.vllm.describe import CacheRank, Described
from kvferry.vllm.metadata import FerryHandshake, FerryReport
from kvferry.vllm.metrics import FerryStats
from kvferry.vllm.pool.config import PoolConfig
from kvferry.vllm.worker import gpu_of, memory_of

log = logging.getLogger("kvferry")

# How long a step that computes nothing waits for the store. New requests wait at most this long,
# and the store's threads have the interpreter to themselves.
STEP_SECONDS = 0.002
# A save ends a moment after its step, while the device waits for the engine's thread to prepare the
# next one. So its last work waits until this many layers of a step are launched, but not for long.
QUIET_LAYERS, QUIET_SECONDS = 4, 0.005
LATE_SHARE = 8  # the last eighth of a step's layers is copied after the step, the others during it


class PoolWorker:
    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self._rank: PoolRank | None = None
        self.handshake: FerryHandshake | None = None
        self._orders: dict[str, LoadOrder] = {}  # loads under way
        self._saves: list[SaveOrder] = []
        self._report = FerryReport()
        self._invalid: set[int] = set()
        self._prefix_tokens = 0  # in a block, if a failed load may keep a valid prefix; else 0
        self._on_device = False
        self._layers: _Layers | None = None  # on a device that waits by itself
        self._idle = self._was_idle = False
        self._quiet = threading.Event()  # set when the engine's thread is ahead of its device

    def register(
        self, place: CacheRank, described: Described, kv_caches: Mapping[str, Any]
    ) -> None:
        device = next(iter(kv_caches.values())).device
        self._on_device = device.type != "cpu"
        staged = self._on_device and (self.config.store == "embedded" or self.config.checked)
        if staged and gpu_of(kv_caches) is None:
            raise DescriptionError(
                f"the cache lies on {device}, from where nothing here brings it to host memory, "
                'which is what the embedded store moves, and what checksums need; use "store": '
                '"mooncake" without "checksums"'
            )
        layout, bases = described.layout, described.bases
        groups = described.model.groups
        if layout.tables == 1 and all(
            g.residency.kind == "full" or layout.shape.full_residency for g in groups
        ):
            self._prefix_tokens = block_span(groups[0], layout.shape)
        store = self.config.opener()()
        if staged or self.config.checked:
            store = _staged(store, described.memory, self.config.checked, self._on_device)
        if isinstance(store, DeviceStore):
            self._layers = _Layers(kv_caches)
        self._rank = PoolRank(
            store, described.model, layout, bases, replica=place.replica, replicas=place.replicas
        )
        engine = engine_info("", "", described.model, layout.shape, described.meaning)
        info = rank_info(layout, [0] * len(bases), "", "", {})
        self.handshake = FerryHandshake(
            msgspec.msgpack.encode(engine), msgspec.msgpack.encode(info)
        )
        log.info(
            "kvferry: rank %s uses the pool (%s store) with %s, %s",
            tuple(place.rank),
            self.config.store,
            layout.shape.describe(),
            described.summary(),
        )

    def start(self, orders: PoolOrders, *, idle: bool = False) -> None:
        """Begin a step's loads. Its saves wait until the step has computed their blocks."""
        if self._rank is None:
            return
        self._idle, self._was_idle = idle, self._idle
        # vLLM's V1 runner does not end the steps of an early pipeline stage while it speculates.
        # These saves belong to the scope that the rank has now.
        self.save()
        if orders.scope is not None:
            self._rank.tell(orders.scope)
        # vLLM reuses blocks that a running step still writes, unless the engine is a consumer
        fence = self._fence() if orders.loads else None
        for order in orders.loads:
            self._orders[order.request_id] = order
            self._rank.load(order, fence)
        self._saves = orders.saves

    def layer_computed(self, name: str, saves: list[SaveOrder]) -> None:
        """This layer of the blocks to save is computed, or queued on the device."""
        if self._layers is not None and self._layers.computed(name, saves) == QUIET_LAYERS:
            self._quiet.set()

    def launched(self) -> None:
        """All of a step is launched."""
        self._quiet.set()
        self.save()

    def save(self) -> None:
        """The step's blocks are computed, or queued on the device."""
        if self._rank is None or not self._saves:
            return
        fence = self._fence(blocking=True)
        if fence is not None and self._layers is not None:
            fence.early = self._layers.take_early(self._saves)
        for order in self._saves:
            self._rank.save(order, fence)
        self._saves = []

    def _fence(self, *, blocking: bool = False) -> _DeviceFence | None:
        """The end of all work that the device has been given up to now.

        blocking  a thread that waits sleeps, and wakes some ten microseconds later; else it spins
        """
        return _DeviceFence(blocking, self._quiet) if self._on_device else None

    def results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self._rank is None:
            return results
        # after a step that computes, the engine waits for its results, and must not wait here
        if self._idle and self._was_idle:
            self._quiet.set()
            self._rank.wait_done(STEP_SECONDS)
        ended = self._rank.take()
        for loaded in ended.loaded:
            order = self._orders.pop(loaded.request_id, None)
            results.finished_recving.add(loaded.request_id)
            if loaded.ok:
                size, ms = loaded.bytes / (1 << 20), loaded.seconds * 1e3
                message = "request %s: loaded %.1f MiB from the pool in %.1f ms"
                log.info(message, loaded.request_id, size, ms)
            elif order and self._prefix_tokens and not loaded.hung and loaded.bad_from is not None:
                # nothing from the first bad block on is trusted, also where it arrived
                first = loaded.bad_from // self._prefix_tokens
                self._invalid |= set(order.tables[0][first:])
            else:
                results.failed_recving.add(loaded.request_id)
        if ended.saved or ended.loaded or ended.recovered:
            self._report = self._report.aggregate(
                FerryReport(saved=ended.saved, loaded=ended.loaded, recovered=ended.recovered)
            )
        return results

    def take_invalid(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> FerryReport:
        report, self._report = self._report, FerryReport()
        return report

    def add_stats(self, stats: FerryStats) -> None:
        if self._rank is not None:
            stats.add_pool(self._rank.counters)

    def close(self) -> None:
        if self._rank is not None:
            self._rank.close()


class _DeviceFence:
    """A `Fence` in torch's current stream."""

    def __init__(self, blocking: bool, quiet: threading.Event) -> None:
        import torch

        self._quiet = quiet
        self._event = torch.Event(blocking=blocking)
        self._event.record()
        self._one = threading.Lock()
        self.early: _LayersDone | None = None

    @property
    def ready(self) -> Ready:
        last = int(self._event.event_id)
        if self.early is None:
            return Ready(last)
        return Ready(last, int(self.early.event.event_id), self.early.memory)

    def wait(self) -> None:
        with self._one:  # one thread waits, and the others sleep: CUDA may wait by spinning
            self._event.synchronize()

    def quiet(self) -> None:
        self._quiet.clear()
        self._quiet.wait(QUIET_SECONDS)


class _LayersDone(NamedTuple):
    event: Any  # torch's
    memory: RegionTable  # that is final after it


class _Layers:
    """The memory that a step has filled before its end.

    After one event, the bytes of most layers cross the bus while the device computes the others.
    Layers that a step computes twice (drafts, micro-batches) are not early. Memory that several
    layers share is final when all of them are.
    """

    def __init__(self, kv_caches: Mapping[str, Any]) -> None:
        self._memory: list[tuple[MemoryRegion, set[str]]] = []  # with the layers that use it
        low = high = 0
        for begin, end, name in sorted(
            (*_span(part), name)
            for name, parts in kv_caches.items()
            for part in (parts if isinstance(parts, (list, tuple)) else [parts])
        ):
            owners = {name}
            if begin < high:
                owners |= self._memory.pop()[1]
            else:
                low = begin
            high = max(high, end)
            self._memory.append((MemoryRegion(low, high - low), owners))
        self._most = len(kv_caches)
        # How many layers a step reports, by the first of them. In a step that decodes, a graph of
        # the target reports none, and a draft model its own.
        self._usual: dict[str, int] = {}
        self._saves: list[SaveOrder] | None = None  # of this step
        self._names: list[str] = []  # of this step
        self._event: Any = None
        self._before = 0  # layers before the event

    def computed(self, name: str, saves: list[SaveOrder]) -> int:
        """Note a layer; returns how many of this step there are."""
        names = self._names
        if saves is not self._saves:
            names = self._names = []
            self._saves, self._event = saves, None
        names.append(name)
        usual = self._usual.get(names[0], self._most)
        if len(names) == usual - usual // LATE_SHARE:
            import torch

            self._event, self._before = torch.Event(), len(names)
            self._event.record()
        return len(names)

    def take_early(self, saves: list[SaveOrder]) -> _LayersDone | None:
        """The memory that the step of these saves has filled early."""
        if saves is not self._saves:  # a graph of the whole step reports no layer
            return None
        names, event, before = self._names, self._event, self._before
        self._saves, self._names, self._event = None, [], None
        self._usual[names[0]] = len(names)
        if event is None:
            return None
        once = len(set(names[:before])) == before
        done = set(names[:before]) - set(names[before:]) if once else set()
        final = [memory for memory, owners in self._memory if owners <= done]
        return _LayersDone(event, RegionTable.of(final))


def _span(tensor: Any) -> tuple[int, int]:
    """Its first byte, and the one after its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((count - 1) * step for count, step in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _staged(store: Store, regions: list[MemoryRegion], checked: bool, gpu: bool) -> Store:
    """The store for a cache that it cannot reach by itself, or with checksums that it lacks."""
    memory = memory_of(regions, gpu=gpu)
    if checked:
        return CheckedStore(store, memory)
    if isinstance(store, EmbeddedStore):
        try:
            return DeviceStore(store, memory, Bus(regions))
        except TransferError as error:
            log.warning("kvferry: the pool goes through buffers, which is slow: %s", error)
    return StagedStore(store, memory)
