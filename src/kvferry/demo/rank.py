"""One rank of the demo, in its own process: a producer or a consumer of the hand-over.

The demo's main process tells its ranks over a pipe which of these methods to call, one at a time:

    (start)          -> RankInfo    a rank describes itself, as an engine's worker does
    fill()                          producer: write the requests; consumer: write canaries
    hold(tickets)                   producer: open a hold for every request
    load(tickets)    -> RankMoved   consumer: load every request by its ticket
    delivered()      -> int         producer: number of holds that closed as delivered
    check()          -> Checked     consumer: compare every byte with its expected value

A working rank reports the bytes that it has done. It ends when the pipe closes. Producers are idle
while consumers load, because reading is one-sided.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.carriers import Carrier, MemoryRegion, auto, make_carrier
from kvferry.carriers.base import Memory
from kvferry.carriers.host import HostMemory
from kvferry.demo.cache import (
    ABSENT,
    CANARY,
    POISON,
    View,
    destination_extent,
    make_views,
    slot_entries,
    source_extent,
    write_byte,
    write_entries,
    wrong_byte,
    wrong_entries,
)
from kvferry.demo.work import DemoRequest, DemoWork
from kvferry.errors import KvferryError, TransferError
from kvferry.handover.consumer import ConsumerRank
from kvferry.handover.describe import engine_info, rank_info
from kvferry.handover.holds import Closed, HoldOrder
from kvferry.handover.load import Load
from kvferry.handover.producer import ProducerRank
from kvferry.handover.stats import ConsumerStats
from kvferry.handover.ticket import Ticket
from kvferry.handover.wakeup import Wakeup
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import Rank, Span
from kvferry.net.messages import EngineInfo, RankInfo
from kvferry.net.rpc import Sockets

LOOPBACK = "127.0.0.1"
ON_GPU = "cuda"  # the carrier that moves only GPU memory
PAGE_BYTES = 4096
MAP_NORESERVE = 0x4000  # because unused blocks are never touched
LOAD_SECONDS = 50.0  # for one load; less than SILENCE_SECONDS, which end the demo
LEASE_SECONDS = 3600.0  # a request may wait for its turn as long as the demo takes

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Done:
    """A rank's answer."""

    value: Any


@dataclass(frozen=True, slots=True)
class RankMoved:
    """What a consumer rank loaded, and its log lines about the carrier to each source."""

    stats: ConsumerStats
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    arrived_bytes: int  # compared with their expected values
    guarded_bytes: int  # that had to be zero or unchanged
    wrong_bytes: int


def describe_engine(work: DemoWork, *, producer: bool) -> EngineInfo:
    """The description of one of the two engines."""
    name, shape = ("prefill", work.src) if producer else ("decode", work.dst)
    return engine_info(name, "demo", work.model, shape, {"model": work.model.name})


class RankMemory:
    """All regions of a rank in one mapping, or in GPU memory with a copy on the host.

    The demo writes and compares `bytes`. Carriers use `address`.
    """

    def __init__(self, layout: RankLayout, *, on_gpu: bool = False) -> None:
        sizes = [-(-region.bytes // PAGE_BYTES) * PAGE_BYTES for region in layout.regions]
        starts = np.cumsum([0, *sizes], dtype=np.int64)
        total = max(int(starts[-1]), PAGE_BYTES)  # a stage may have no cache
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.bytes: Bytes = np.frombuffer(mmap.mmap(-1, total, flags=flags), dtype=np.uint8)
        self.regions = {
            region.name: self.bytes[start : start + region.bytes]
            for region, start in zip(layout.regions, starts[:-1].tolist(), strict=True)
        }
        self._on_gpu = on_gpu
        self.reach: Memory
        if on_gpu:
            from kvferry.carriers.cuda.driver import device
            from kvferry.carriers.cuda.staging import DeviceMemory

            on = device(0)
            with on.current():
                self.address = on.allocate(total)
            self.reach = DeviceMemory([self.region])
        else:
            self.address = self.bytes.ctypes.data
            self.reach = HostMemory([self.region])
        self.bases: Ints = starts[:-1] + self.address

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self.address, self.bytes.nbytes)

    def publish(self) -> None:
        """Copy `bytes` to the memory that carriers read."""
        if self._on_gpu:
            self.reach.scatter(self.bytes, *self._whole())

    def fetch(self) -> None:
        """Copy the memory that carriers wrote to `bytes`."""
        if self._on_gpu:
            self.reach.gather(*self._whole(), self.bytes)

    def _whole(self) -> tuple[Ints, Ints]:
        return np.array([self.address]), np.array([self.bytes.nbytes])


class DemoRank:
    """The common part of producers and consumers: memory, views of it, and carriers."""

    def __init__(
        self, work: DemoWork, rank: Rank, transport: str, report: Report, *, producer: bool
    ) -> None:
        self.work, self.rank, self.report = work, rank, report
        shape, pools = (work.src, work.src_pools) if producer else (work.dst, work.dst_pools)
        blocks = 1 + max(int(pool[-1]) for pool in pools)
        self.engine = describe_engine(work, producer=producer)
        self.layout = RankLayout.build(work.model, shape, rank, blocks)
        self.memory = RankMemory(self.layout, on_gpu=transport == ON_GPU)
        self.views = make_views(work.model, shape, rank, blocks, self.memory.regions)
        self.pools = pools
        self.sockets = Sockets()
        self.carriers = open_carriers(transport, self.memory)

    def describe(self, address: str = "") -> RankInfo:
        endpoints = {carrier.name: carrier.endpoint() for carrier in self.carriers}
        return rank_info(
            self.layout, self.memory.bases.tolist(), address, self.engine.incarnation, endpoints
        )

    def group_of(self, view: View) -> int:
        return self.work.model.groups.index(view.group)

    def blocks_but(self, view: View, used: Sequence[Ints]) -> Ints:
        """Ids of the null block and of all blocks of the view's group, except for these."""
        pool = self.pools[self.group_of(view)]
        return np.setdiff1d(np.arange(pool[-1] + 1), np.concatenate([np.zeros(0, np.int64), *used]))

    def key_of(self, request: DemoRequest, view: View) -> tuple[int, ...]:
        """The key of one component of one request."""
        component = view.group.components.index(view.component)
        return (self.work.seed, request.number, self.group_of(view), component)

    def close(self) -> None:
        for carrier in self.carriers:
            carrier.close()
        self.sockets.close()


def open_carriers(transport: str, memory: RankMemory) -> list[Carrier]:
    """The named carrier, or all carriers that an engine opens for "auto"."""
    names = [chosen.name for chosen in auto.select([transport]) if not chosen.why_not]
    carriers = [make_carrier(name, host=LOOPBACK) for name in names]
    for carrier in carriers:
        carrier.register([memory.region])
    return carriers


class PrefillRank(DemoRank):
    def __init__(self, work: DemoWork, rank: Rank, transport: str, report: Report) -> None:
        super().__init__(work, rank, transport, report, producer=True)
        self.bell = Wakeup()
        self.producer = ProducerRank(
            self.sockets, self.engine.incarnation, lease_seconds=LEASE_SECONDS, bell=self.bell
        )
        self.producer.start()

    def start(self) -> RankInfo:
        return self.describe(f"{LOOPBACK}:{self.producer.port}")

    def fill(self) -> None:
        work = self.work
        for view in self.views:
            used = [request.src_tables[self.group_of(view)] for request in work.requests]
            write_byte(view, self.blocks_but(view, used), POISON)
        for request in work.requests:
            self.report(sum(self._fill(view, request) for view in self.views))
        self.memory.publish()

    def _fill(self, view: View, request: DemoRequest) -> int:
        extent = source_extent(view.group, self.work.src, request.tokens)
        blocks = Span(extent.first_held, extent.blocks)
        ids = request.src_tables[self.group_of(view)][blocks.start :]
        entries = slot_entries(view.group, self.work.src, self.rank.tp, blocks, extent.entries)
        return write_entries(view, self.key_of(request, view), ids, entries)

    def hold(self, tickets: list[Ticket]) -> None:
        for ticket, request in zip(tickets, self.work.requests, strict=True):
            tables = [table.tolist() for table in request.src_tables]
            self.producer.open_hold(
                HoldOrder(ticket.hold_id, ticket.request_id, ticket.digest, ticket.tokens, tables)
            )

    def delivered(self) -> int:
        until = time.monotonic() + LOAD_SECONDS
        closed: list[Closed] = []
        while len(closed) < len(self.work.requests) and time.monotonic() < until:
            self.bell.wait(1.0)
            closed += self.producer.take_closed()
        return sum(one.why == "delivered" for one in closed)

    def close(self) -> None:
        self.producer.close()
        super().close()


class DecodeRank(DemoRank):
    def __init__(
        self, work: DemoWork, rank: Rank, transport: str, report: Report, fault: str = ""
    ) -> None:
        super().__init__(work, rank, transport, report, producer=False)
        self.fault, self.bell = fault, Wakeup()
        self.consumer = ConsumerRank(
            self.sockets,
            self.engine,
            work.model,
            self.layout,
            self.memory.bases.tolist(),
            self.carriers,
            zero=self.memory.reach.zero,
            bell=self.bell,
        )

    def start(self) -> RankInfo:
        return self.describe()

    def fill(self) -> None:
        for view in self.views:
            write_byte(view, self.blocks_but(view, []), CANARY)
        self.memory.publish()

    def load(self, tickets: list[dict[str, Any]]) -> RankMoved:
        """Load one request after the other. Tickets come as a router's request parameters."""
        with _words_of_auto() as said:
            for request, params in zip(self.work.requests, tickets, strict=True):
                ticket = Ticket.from_params(params)
                tables = tuple(tuple(table.tolist()) for table in request.dst_tables)
                load = Load(ticket.request_id, ticket, tables, request.skip, LOAD_SECONDS)
                self.consumer.start(load)
                while not (done := self.consumer.take_done()):
                    self.bell.wait(1.0)
                (loaded,) = done
                if not loaded.ok:
                    raise TransferError(f"request {request.number}: {loaded.error}")
                self.report(loaded.bytes)
                if self.fault == "die":
                    os._exit(3)
        return RankMoved(self.consumer.stats(), tuple(said))

    def check(self) -> Checked:
        work = self.work
        self.memory.fetch()
        self._corrupt()
        arrived, guarded, wrong = 0, 0, 0
        loaded: list[list[Ints]] = [[] for _ in work.model.groups]
        for request in work.requests:
            before = arrived
            for view in self.views:
                extent = destination_extent(
                    view.group, work.src, work.dst, request.tokens, request.skip
                )
                blocks = Span(extent.first_loaded, extent.blocks)
                ids = request.dst_tables[self.group_of(view)][blocks.start :]
                entries = slot_entries(view.group, work.dst, self.rank.tp, blocks, extent.entries)
                wrong += wrong_entries(view, self.key_of(request, view), ids, entries)
                loaded[self.group_of(view)].append(ids)
                slot_bytes = len(view.layers) * view.units.size * view.component.unit_bytes
                present = int(np.count_nonzero(entries != ABSENT))
                arrived += present * slot_bytes
                guarded += (entries.size - present) * slot_bytes
            self.report(arrived - before)
        for view in self.views:
            sharing = loaded if work.dst.overlay else [loaded[self.group_of(view)]]
            free = self.blocks_but(view, [ids for group in sharing for ids in group])
            wrong += wrong_byte(view, free, CANARY)
            guarded += view.block_bytes * len(free)
        return Checked(arrived, guarded, wrong)

    def _corrupt(self) -> None:
        """Damage bytes like a broken copy, if a test asks for it."""
        if self.fault not in ("flip", "stray"):
            return
        view = self.views[0]
        tables = [request.dst_tables[self.group_of(view)] for request in self.work.requests]
        if self.fault == "flip":
            block = int(tables[0][-1])
        else:
            block = int(self.blocks_but(view, tables)[-1])
        view.array[-1, block, 0, 0, -1].view(np.uint8)[..., :3] ^= 0xFF

    def close(self) -> None:
        self.consumer.close()
        super().close()


@contextmanager
def _words_of_auto() -> Iterator[list[str]]:
    """Collect the log lines about the carrier chosen for each source."""
    said: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.module == "auto" and record.levelno == logging.INFO:
                said.append(record.getMessage())

    handler, level = Hear(), auto.log.level
    auto.log.addHandler(handler)
    auto.log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        auto.log.removeHandler(handler)
        auto.log.setLevel(level)


def rank_main(
    work: DemoWork, producer: bool, rank: Rank, transport: str, fault: str, pipe: Connection
) -> None:
    """Body of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it, and closes the pipe
    with ExitStack() as stack, suppress(EOFError, ConnectionError):

        def make() -> PrefillRank | DecodeRank:
            if producer:
                return PrefillRank(work, rank, transport, pipe.send)
            return DecodeRank(work, rank, transport, pipe.send, fault)

        made = _answer(make)
        if not isinstance(made, Done):
            pipe.send(made)
            return
        stack.callback(made.value.close)
        pipe.send(_answer(made.value.start))
        while True:
            name, arguments = pipe.recv()
            pipe.send(_answer(partial(getattr(made.value, name), *arguments)))


def _answer(call: Callable[[], Any]) -> Done | KvferryError:
    """A call's result, or the error for the main process to raise."""
    try:
        return Done(call())
    except KvferryError as error:
        return error
    except Exception:
        return TransferError(f"{current_process().name} failed:\n{traceback.format_exc()}")
