# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo, in its own process: a producer or a consumer of the hand-over.

The demo's main process tells its ranks over a pipe which of these methods to call, one at a time:

    describe()       -> RankInfo    producer: as an engine's worker describes itself
    fill()                          producer: write the requests; consumer: write canaries
    hold(tickets)                   producer: open a hold for every request
    load(tickets)    -> RankMoved   consumer: load every request by its ticket
    delivered()      -> int         producer: number of holds that closed as delivered
    check()          -> Checked     consumer: compare every byte with its expected value

A working rank reports each request that it has done. It ends when the pipe closes. Producers are
idle while consumers load, because reading is one-sided.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
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
    Extent,
    View,
    destination_extent,
    make_views,
    slot_entries,
    source_extent,
)
from kvferry.demo.work import DemoEngine, DemoRequest, DemoWork
from kvferry.errors import KvferryError, TransferError
from kvferry.handover.consumer import ConsumerRank
from kvferry.handover.describe import engine_info, rank_info
from kvferry.handover.holds import Closed, HoldOrder
from kvferry.handover.load import Load, Loaded
from kvferry.handover.producer import ProducerRank
from kvferry.handover.ticket import Ticket
from kvferry.handover.wakeup import Wakeup
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import Rank, Span
from kvferry.net.messages import EngineInfo, RankInfo
from kvferry.net.rpc import Sockets

LOOPBACK = "127.0.0.1"
ON_GPU = "cuda"  # the carrier that moves only GPU memory
PAGE_BYTES = 4096
LOAD_SECONDS = 50.0  # for one load; less than the SILENCE_SECONDS after which the demo fails
LEASE_SECONDS = 3600.0  # longer than the demo: a request may wait for its turn until the end

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Report = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Done:
    """A rank's answer."""

    value: Any


@dataclass(frozen=True, slots=True)
class RankMoved:
    """What a consumer rank loaded."""

    bytes: int
    descriptors: int
    read_seconds: float
    links: list[tuple[str, str]]  # the carrier to each source, with its reason


@dataclass(frozen=True, slots=True)
class Checked:
    arrived_bytes: int  # compared with their expected values
    guarded_bytes: int  # that had to be zero or unchanged
    wrong_bytes: int


def rank_main(
    kind: type[PrefillRank | DecodeRank],
    work: DemoWork,
    rank: Rank,
    transport: str,
    pipe: Connection,
) -> None:
    """Body of a rank's process. It ends after its first error, which the main process raises."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it, and closes the pipe
    with suppress(ConnectionError), ExitStack() as stack:
        try:
            made = kind(work, rank, transport, partial(pipe.send, None))
            stack.callback(made.close)
            while True:
                name, arguments = pipe.recv()
                pipe.send(Done(getattr(made, name)(*arguments)))
        except EOFError:
            return  # the main process has closed the pipe
        except KvferryError as error:
            pipe.send(error)
        except Exception:
            name = current_process().name
            pipe.send(TransferError(f"{name} failed:\n{traceback.format_exc()}"))


def describe_engine(work: DemoWork, name: str, engine: DemoEngine) -> EngineInfo:
    return engine_info(name, "demo", work.model, engine.shape, {"model": work.model.name})


class RankMemory:
    """All regions of a rank in one piece of host memory, or in GPU memory with a copy on the host.

    The demo writes and compares `bytes`. Carriers use `address`.
    """

    def __init__(self, layout: RankLayout, *, on_gpu: bool = False) -> None:
        sizes = [-(-region.bytes // PAGE_BYTES) * PAGE_BYTES for region in layout.regions]
        starts = np.cumsum([0, *sizes], dtype=np.int64)
        total = max(int(starts[-1]), PAGE_BYTES)  # a stage may have no cache
        self.bytes: Bytes = np.zeros(total, dtype=np.uint8)
        self.regions = [
            self.bytes[start : start + region.bytes]
            for region, start in zip(layout.regions, starts[:-1].tolist(), strict=True)
        ]
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


def open_carriers(transport: str, memory: RankMemory) -> list[Carrier]:
    """The named carrier, or all carriers that an engine opens for "auto"."""
    names = [chosen.name for chosen in auto.select([transport]) if not chosen.why_not]
    carriers = [make_carrier(name, host=LOOPBACK) for name in names]
    for carrier in carriers:
        carrier.register([memory.region])
    return carriers


class DemoRank:
    """The common part of producers and consumers: memory, views of it, and carriers."""

    def __init__(
        self, work: DemoWork, engine: DemoEngine, rank: Rank, transport: str, report: Report
    ) -> None:
        self.work, self.engine, self.rank, self.report = work, engine, rank, report
        self.layout = RankLayout.build(work.model, engine.shape, rank, engine.blocks)
        self.memory = RankMemory(self.layout, on_gpu=transport == ON_GPU)
        self.views = make_views(work.model, self.layout, self.memory.regions)
        self.sockets = Sockets()
        self.carriers = open_carriers(transport, self.memory)
        self.wakeup = Wakeup()

    def table(self, view: View, request: DemoRequest) -> Ints:
        return self.engine.tables[request.number][view.number[0]]

    def blocks_but(self, view: View, used: Sequence[Ints]) -> Ints:
        """Ids of the null block and of all blocks of the view's group, except for these."""
        pool = self.engine.pools[view.number[0]]
        return np.setdiff1d(np.arange(pool[-1] + 1), np.concatenate([np.zeros(0, np.int64), *used]))

    def places(
        self, view: View, request: DemoRequest, extent: Extent, first_block: int
    ) -> tuple[Ints, Ints]:
        """Ids of a request's blocks from this number on, and the entry in each of their slots."""
        blocks = Span(first_block, extent.blocks)
        entries = slot_entries(view, self.engine.shape, self.rank.tp, blocks, extent.entries)
        return self.table(view, request)[first_block:], entries

    def key_of(self, request: DemoRequest, view: View) -> tuple[int, ...]:
        """The key of one component of one request."""
        return (self.work.seed, request.number, *view.number)

    def close(self) -> None:
        for carrier in self.carriers:
            carrier.close()
        self.sockets.close()


class PrefillRank(DemoRank):
    def __init__(self, work: DemoWork, rank: Rank, transport: str, report: Report) -> None:
        super().__init__(work, work.src, rank, transport, report)
        self.incarnation = describe_engine(work, "prefill", work.src).incarnation
        self.producer = ProducerRank(
            self.sockets, self.incarnation, lease_seconds=LEASE_SECONDS, wakeup=self.wakeup
        )
        self.producer.start()

    def describe(self) -> RankInfo:
        address = f"{LOOPBACK}:{self.producer.port}"
        endpoints = {carrier.name: carrier.endpoint() for carrier in self.carriers}
        bases = self.memory.bases.tolist()
        return rank_info(self.layout, bases, address, self.incarnation, endpoints)

    def fill(self) -> None:
        for view in self.views:
            used = [self.table(view, request) for request in self.work.requests]
            view.write(self.blocks_but(view, used), POISON)
        for request in self.work.requests:
            for view in self.views:
                extent = source_extent(view.group, self.engine.shape, request.tokens)
                ids, entries = self.places(view, request, extent, extent.first_held)
                view.write(ids, POISON, self.key_of(request, view), entries)
            self.report()
        self.memory.publish()

    def hold(self, tickets: list[Ticket]) -> None:
        for ticket, tables in zip(tickets, self.engine.tables, strict=True):
            ids = [table.tolist() for table in tables]
            self.producer.open_hold(
                HoldOrder(ticket.hold_id, ticket.request_id, ticket.digest, ticket.tokens, ids)
            )

    def delivered(self) -> int:
        until = time.monotonic() + LOAD_SECONDS
        closed: list[Closed] = []
        while len(closed) < len(self.work.requests) and time.monotonic() < until:
            self.wakeup.wait(1.0)
            closed += self.producer.take_closed()
        return sum(one.why == "delivered" for one in closed)

    def close(self) -> None:
        self.producer.close()
        super().close()


class DecodeRank(DemoRank):
    def __init__(self, work: DemoWork, rank: Rank, transport: str, report: Report) -> None:
        super().__init__(work, work.dst, rank, transport, report)
        self.consumer = ConsumerRank(
            self.sockets,
            describe_engine(work, "decode", work.dst),
            work.model,
            self.layout,
            self.memory.bases.tolist(),
            self.carriers,
            zero=self.memory.reach.zero,
            wakeup=self.wakeup,
        )

    def fill(self) -> None:
        for view in self.views:
            view.write(self.blocks_but(view, []), CANARY)
        self.memory.publish()

    def load(self, tickets: list[dict[str, Any]]) -> RankMoved:
        """Load one request after the other. Tickets come as a router's request parameters."""
        moved: list[Loaded] = []
        for request, params in zip(self.work.requests, tickets, strict=True):
            ticket = Ticket.from_params(params)
            tables = tuple(tuple(ids.tolist()) for ids in self.engine.tables[request.number])
            load = Load(ticket.request_id, ticket, tables, request.skip, LOAD_SECONDS)
            self.consumer.start(load)
            while not (done := self.consumer.take_done()):
                self.wakeup.wait(1.0)
            (loaded,) = done
            if not loaded.ok:
                raise TransferError(f"request {request.number}: {loaded.error}")
            moved.append(loaded)
            self.report()
        return RankMoved(
            sum(one.bytes for one in moved),
            sum(one.descriptors for one in moved),
            sum(one.seconds["read"] for one in moved),
            self.consumer.links,
        )

    def check(self) -> Checked:
        work = self.work
        self.memory.fetch()
        arrived, guarded, wrong = 0, 0, 0
        loaded: list[list[Ints]] = [[] for _ in work.model.groups]
        for request in work.requests:
            for view in self.views:
                extent = destination_extent(
                    view.group, work.src.shape, work.dst.shape, request.tokens, request.skip
                )
                ids, entries = self.places(view, request, extent, extent.first_loaded)
                wrong += view.wrong(ids, 0, self.key_of(request, view), entries)
                loaded[view.number[0]].append(ids)
                slot_bytes = len(view.layers) * view.units.size * view.component.unit_bytes
                present = int(np.count_nonzero(entries != ABSENT))
                arrived += present * slot_bytes
                guarded += (entries.size - present) * slot_bytes
            self.report()
        for view in self.views:
            sharing = loaded if work.dst.shape.overlay else [loaded[view.number[0]]]
            free = self.blocks_but(view, [ids for group in sharing for ids in group])
            wrong += view.wrong(free, CANARY)
            guarded += view.block_bytes * len(free)
        return Checked(arrived, guarded, wrong)

    def close(self) -> None:
        self.consumer.close()
        super().close()
