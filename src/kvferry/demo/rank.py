"""One rank of the demo, in a process of its own.

A rank does what it is told over a pipe, one order at a time, and ends when the pipe closes:

    greet           -> Greeting   its pid, and an address to try to read
    probe(peers)    -> str        consumer: what keeps it from reading the producers' memory
    set_up(method)  -> Greeting   allocates; a producer fills, a consumer plans its edges; both make
                                  their carrier, where the method is one
    pull(peers)     -> Pulled     consumer: loads every request from the producers
    check()         -> Checked    consumer: compares every byte with what it should be

While it works it reports bytes done as `Progress`; every order is answered by `Done` or `Failed`.
Producers do nothing while consumers pull: reading is one-sided.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.demo.cache import (
    ABSENT,
    CANARY,
    POISON,
    View,
    make_views,
    slot_entries,
    write_byte,
    write_entries,
    wrong_byte,
    wrong_entries,
)
from kvferry.demo.memory import Memory, SharedFile, region_starts
from kvferry.demo.work import Request, Work, destination_extent, source_extent
from kvferry.errors import KvferryError
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import Rank, Span
from kvferry.plan import Bound, Copies, EdgePlan, bind, everything_plan, plan_pair, uncovered
from kvferry.transport import Carrier, MemoryRegion, make_carrier
from kvferry.transport.scatter import copy_scattered
from kvferry.transport.vm import allow_any_reader, read, why_unreachable

OWN_METHODS = ("vm", "shared")  # others are names of carriers
CARRIER_SECONDS = 50.0  # for one batch; below the silence that ends the demo
COPIES_AT_A_TIME = 1 << 16  # bound into one buffer, used again and again

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Order:
    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    error: KvferryError | None  # as it was raised, where it is one of ours
    text: str


@dataclass(frozen=True, slots=True)
class Greeting:
    """Where a rank can be reached."""

    rank: Rank
    pid: int
    address: int
    endpoint: bytes = b""  # of its carrier, where the method is one


@dataclass(frozen=True, slots=True)
class Pulled:
    bytes: int
    descriptors: int
    copy_seconds: float  # spent in the carrier alone


@dataclass(frozen=True, slots=True)
class Checked:
    arrived_bytes: int  # compared with their own values
    guarded_bytes: int  # had to be zero, or unchanged
    wrong_bytes: int


Report = Callable[[int], None]


def rank_main(
    work: Work,
    is_producer: bool,
    rank: Rank,
    fault: str,
    files: list[SharedFile],
    pipe: Connection,
) -> None:
    """Body of a rank's process. `files`: its own of a producer, of a consumer all producers'."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the demo itself decides, and closes the pipe
    descriptors = [file.descriptor for file in files]
    kind = Producer if is_producer else Consumer
    worker = kind(work, rank, fault, descriptors, lambda done: pipe.send(Progress(done)))
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, ConnectionError):
            if worker.carrier is not None:
                worker.carrier.close()
            return
        answer: Done | Failed
        try:
            answer = Done(getattr(worker, order.name)(*order.arguments))
        except KvferryError as error:
            answer = Failed(error, str(error))
        except Exception:
            answer = Failed(None, traceback.format_exc())
        try:
            pipe.send(answer)
        except ConnectionError:
            return


def _views(work: Work, memory: Memory) -> list[View]:
    layout = memory.layout
    blocks = layout.parts[0].num_blocks if layout.parts else 0
    return make_views(work.model, layout.shape, layout.rank, blocks, memory.regions())


def _map_rank(work: Work, is_producer: bool, rank: Rank, file: int | None) -> Memory:
    shape, blocks = (work.src, work.src_blocks) if is_producer else (work.dst, work.dst_blocks)
    return Memory.map(RankLayout.build(work.model, shape, rank, blocks), file)


def _make_carrier(method: str, memory: Memory) -> Carrier | None:
    if method in OWN_METHODS:
        return None
    carrier = make_carrier(method)
    carrier.register([MemoryRegion(memory.address, memory.bytes.nbytes)])
    return carrier


@dataclass(slots=True, eq=False)
class Producer:
    work: Work
    rank: Rank
    fault: str
    files: list[int]
    report: Report
    memory: Memory | None = None
    carrier: Carrier | None = None
    spare: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1, dtype=np.uint8))

    def greet(self) -> Greeting:
        allow_any_reader()
        return Greeting(self.rank, os.getpid(), self.spare.ctypes.data)

    def set_up(self, method: str) -> Greeting:
        work = self.work
        memory = _map_rank(work, True, self.rank, self.files[0] if method == "shared" else None)
        self.memory = memory
        views = _views(work, memory)
        for view in views:
            index = work.model.groups.index(view.group)
            used = np.concatenate([request.src_tables[index] for request in work.requests])
            free = np.setdiff1d(np.arange(work.src_pools[index][-1] + 1), used)
            write_byte(view, free, POISON)
        for request in work.requests:
            self.report(sum(self._fill(view, request) for view in views))
        self.carrier = _make_carrier(method, memory)
        endpoint = self.carrier.endpoint() if self.carrier else b""
        return Greeting(self.rank, os.getpid(), memory.address, endpoint)

    def _fill(self, view: View, request: Request) -> int:
        work = self.work
        index = work.model.groups.index(view.group)
        extent = source_extent(view.group, work.src, request.tokens)
        blocks = Span(extent.first_held, extent.blocks)
        ids = request.src_tables[index][blocks.start :]
        entries = slot_entries(view.group, work.src, self.rank.tp, blocks, extent.entries)
        return write_entries(view, _key(work, request, view), ids, entries)


@dataclass(slots=True, eq=False)
class Consumer:
    work: Work
    rank: Rank
    fault: str
    files: list[int]
    report: Report
    memory: Memory | None = None
    carrier: Carrier | None = None
    plans: list[EdgePlan] = field(default_factory=list)
    method: str = ""

    def greet(self) -> Greeting:
        return Greeting(self.rank, os.getpid(), 0)

    def probe(self, peers: list[Greeting]) -> str:
        reasons = (why_unreachable(peer.pid, peer.address) for peer in peers)
        return next(filter(None, reasons), "")

    def set_up(self, method: str) -> Greeting:
        work = self.work
        self.method = method
        self.memory = _map_rank(work, False, self.rank, None)
        self.carrier = _make_carrier(method, self.memory)
        for view in _views(work, self.memory):
            pool = work.dst_pools[work.model.groups.index(view.group)]
            write_byte(view, np.arange(pool[-1] + 1), CANARY)
        pair = plan_pair(work.model, work.src, work.dst)
        for edge in pair.edges:
            if edge.dst == self.rank:
                layout = RankLayout.build(work.model, work.src, edge.src, work.src_blocks)
                self.plans.append(pair.plan(edge, layout, self.memory.layout))
        return Greeting(self.rank, os.getpid(), self.memory.address)

    def pull(self, peers: list[Greeting]) -> Pulled:
        """Load every request: copy what the plans say, zero what they leave uncovered."""
        assert self.memory is not None
        work, memory = self.work, self.memory
        carriers = [self._carrier(plan, peers) for plan in self.plans]
        everything = everything_plan(work.model, memory.layout)
        buffer = Copies.empty(COPIES_AT_A_TIME)
        moved, descriptors = 0, 0
        copy_seconds = 0.0
        for request in work.requests:
            if self.fault == "die" and request.number > 0:
                os._exit(3)
            before = moved
            for plan, (src_bases, carry) in zip(self.plans, carriers, strict=True):
                bound = bind(
                    plan,
                    tokens=request.tokens,
                    skip=request.skip,
                    src_tables=request.src_tables,
                    dst_tables=request.dst_tables,
                    src_bases=src_bases,
                    dst_bases=memory.bases,
                    allow_uncacheable=True,
                )
                for copies in _buffered(bound, buffer):
                    begun = time.perf_counter()
                    moved += carry(copies)
                    copy_seconds += time.perf_counter() - begun
                descriptors += bound.descriptors
            gaps = uncovered(
                everything,
                work.src,
                tokens=request.tokens,
                skip=request.skip,
                dst_tables=request.dst_tables,
                dst_bases=memory.starts,
                allow_uncacheable=True,
            )
            zeros = np.zeros(int(gaps.length.max(initial=1)), dtype=np.uint8)
            start = np.zeros_like(gaps.address)
            copy_scattered(zeros, start, memory.bytes, gaps.address, gaps.length)
            self.report(moved - before)
        self._corrupt()
        return Pulled(moved, descriptors, copy_seconds)

    def _carrier(
        self, plan: EdgePlan, peers: list[Greeting]
    ) -> tuple[Ints, Callable[[Copies], int]]:
        """Base addresses of a source's regions, and what copies from there to here."""
        assert self.memory is not None
        work, here = self.work, self.memory
        index = next(i for i, peer in enumerate(peers) if peer.rank == plan.src)
        peer = peers[index]
        if self.method == "shared":
            there = _map_rank(work, True, plan.src, self.files[index])

            def carry(c: Copies) -> int:
                src, dst = c.src - there.address, c.dst - here.address
                return copy_scattered(there.bytes, src, here.bytes, dst, c.length)

            return there.bases, carry
        layout = RankLayout.build(work.model, work.src, plan.src, work.src_blocks)
        bases = region_starts(layout)[:-1] + peer.address
        if self.carrier is None:
            return bases, lambda c: read(peer.pid, c.src, c.dst, c.length)
        carrier = self.carrier
        link = carrier.connect(peer.endpoint, time.monotonic() + CARRIER_SECONDS)

        def pull(c: Copies) -> int:
            carrier.read(link, c).wait(time.monotonic() + CARRIER_SECONDS)
            return int(c.length.sum())

        return bases, pull

    def check(self) -> Checked:
        assert self.memory is not None
        work = self.work
        views = _views(work, self.memory)
        arrived, guarded, wrong = 0, 0, 0
        loaded: dict[str, list[Ints]] = {group.name: [] for group in work.model.groups}
        for request in work.requests:
            before = arrived
            for view in views:
                extent = destination_extent(
                    view.group, work.src, work.dst, request.tokens, request.skip
                )
                blocks = Span(extent.first_loaded, extent.blocks)
                index = work.model.groups.index(view.group)
                ids = request.dst_tables[index][blocks.start :]
                entries = slot_entries(view.group, work.dst, self.rank.tp, blocks, extent.entries)
                wrong += wrong_entries(view, _key(work, request, view), ids, entries)
                loaded[view.group.name].append(ids)
                slot_bytes = len(view.layers) * view.units.size * view.component.unit_bytes
                present = int(np.count_nonzero(entries != ABSENT))
                arrived += present * slot_bytes
                guarded += (entries.size - present) * slot_bytes
            self.report(arrived - before)
        for view in views:
            index = work.model.groups.index(view.group)
            sharing = loaded.values() if work.dst.overlay else [loaded[view.group.name]]
            written = np.concatenate([ids for group in sharing for ids in group])
            free = np.setdiff1d(np.arange(work.dst_pools[index][-1] + 1), written)
            wrong += wrong_byte(view, free, CANARY)
            guarded += view.block_bytes * len(free)
        return Checked(arrived, guarded, wrong)

    def _corrupt(self) -> None:
        """Do what a broken copy would, where a test asks for it."""
        assert self.memory is not None
        if self.fault not in ("flip", "stray"):
            return
        work, view = self.work, _views(self.work, self.memory)[0]
        index = work.model.groups.index(view.group)
        if self.fault == "flip":
            block = int(work.requests[0].dst_tables[index][-1])
        else:
            used = np.concatenate([r.dst_tables[index] for r in work.requests])
            block = int(np.setdiff1d(work.dst_pools[index], used)[0])
        bytes_ = view.array[-1, block, 0, 0, -1].view(np.uint8)
        bytes_[..., :3] ^= 0xFF


def _buffered(bound: Bound, buffer: Copies) -> Iterable[Copies]:
    """All copies, in as few pieces as the buffer allows."""
    if bound.descriptors <= len(buffer):
        return [bound.copies(buffer)]
    return bound.slices(len(buffer), buffer)


def _key(work: Work, request: Request, view: View) -> tuple[int, ...]:
    """What distinguishes one component of one request from all others."""
    group = work.model.groups.index(view.group)
    return (work.seed, request.number, group, view.group.components.index(view.component))
