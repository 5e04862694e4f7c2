"""A consumer rank of the demo: plans its edges, loads every request, and checks every byte."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvferry.demo.cache import (
    ABSENT,
    CANARY,
    slot_entries,
    write_byte,
    wrong_byte,
    wrong_entries,
)
from kvferry.demo.ends import carriers_for, key_of, map_rank, views_of
from kvferry.demo.memory import Memory, region_starts
from kvferry.demo.orders import Checked, Greeting, Link, Pulled, Report
from kvferry.demo.work import Work, destination_extent
from kvferry.layout.parts import Ints
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import Rank, Span
from kvferry.plan import Bound, Copies, EdgePlan, bind, everything_plan, plan_pair, uncovered
from kvferry.transport import Carrier, auto
from kvferry.transport.scatter import copy_scattered
from kvferry.transport.vm import read, why_unreachable

CARRIER_SECONDS = 50.0  # for one batch; below the silence that ends the demo
COPIES_AT_A_TIME = 1 << 16  # bound into one buffer, used again and again


@dataclass(slots=True, eq=False)
class Consumer:
    work: Work
    rank: Rank
    fault: str
    files: list[int]
    report: Report
    memory: Memory | None = None
    carriers: list[Carrier] = field(default_factory=list)
    plans: list[EdgePlan] = field(default_factory=list)
    pulls: list[tuple[Ints, Callable[[Copies], int]]] = field(default_factory=list)  # of each plan
    method: str = ""

    def greet(self) -> Greeting:
        return Greeting(self.rank, os.getpid(), 0)

    def probe(self, peers: list[Greeting]) -> str:
        reasons = (why_unreachable(peer.pid, peer.address) for peer in peers)
        return next(filter(None, reasons), "")

    def set_up(self, method: str) -> Greeting:
        work = self.work
        self.method = method
        self.memory = map_rank(work, False, self.rank, method=method)
        self.carriers = carriers_for(method, self.memory)
        pair = plan_pair(work.model, work.src, work.dst)
        for edge in pair.edges:
            if edge.dst == self.rank:
                layout = RankLayout.build(work.model, work.src, edge.src, work.src_blocks)
                self.plans.append(pair.plan(edge, layout, self.memory.layout))
        return Greeting(self.rank, os.getpid(), self.memory.address)

    def link(self, peers: list[Greeting]) -> list[Link]:
        links = []
        for plan in self.plans:
            index = next(i for i, peer in enumerate(peers) if peer.rank == plan.src)
            link, bases, pull = self._reach(plan.src, peers[index], index)
            links.append(link)
            self.pulls.append((bases, pull))
        return links

    def fill(self) -> None:
        assert self.memory is not None
        work = self.work
        for view in views_of(work, self.memory):
            pool = work.dst_pools[work.model.groups.index(view.group)]
            write_byte(view, np.arange(pool[-1] + 1), CANARY)
        self.memory.publish()

    def pull(self) -> Pulled:
        """Load every request: copy what the plans say, zero what they leave uncovered."""
        assert self.memory is not None
        work, memory = self.work, self.memory
        everything = everything_plan(work.model, memory.layout)
        buffer = Copies.empty(COPIES_AT_A_TIME)
        moved, descriptors = 0, 0
        copy_seconds = 0.0
        for request in work.requests:
            if self.fault == "die" and request.number > 0:
                os._exit(3)
            before = moved
            for plan, (src_bases, carry) in zip(self.plans, self.pulls, strict=True):
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
            memory.zero(gaps.address, gaps.length)
            self.report(moved - before)
        return Pulled(moved, descriptors, copy_seconds)

    def _reach(
        self, rank: Rank, peer: Greeting, index: int
    ) -> tuple[Link, Ints, Callable[[Copies], int]]:
        """How, base addresses of a source's regions, and what copies from there to here."""
        assert self.memory is not None
        work, here = self.work, self.memory
        if self.method == "shared":
            there = map_rank(work, True, rank, self.files[index])

            def carry(c: Copies) -> int:
                src, dst = c.src - there.address, c.dst - here.address
                return copy_scattered(there.bytes, src, here.bytes, dst, c.length)

            return Link("shared"), there.bases, carry
        layout = RankLayout.build(work.model, work.src, rank, work.src_blocks)
        bases = region_starts(layout)[:-1] + peer.address
        if self.method == "vm":
            return Link("vm"), bases, lambda c: read(peer.pid, c.src, c.dst, c.length)
        deadline = time.monotonic() + CARRIER_SECONDS
        why = ""
        if self.method == auto.AUTO:
            with _words_of_auto() as said:
                carrier, link = auto.connect(
                    peer.endpoints, auto.fastest_first(self.carriers), deadline, "a producer"
                )
            why = "; ".join(said)
        else:
            (carrier,) = self.carriers
            link = carrier.connect(peer.endpoints[carrier.name], deadline)

        def pull(c: Copies) -> int:
            carrier.read(link, c).wait(time.monotonic() + CARRIER_SECONDS)
            return int(c.length.sum())

        return Link(carrier.name, why, getattr(link, "detour", "")), bases, pull

    def check(self) -> Checked:
        assert self.memory is not None
        work = self.work
        self.memory.fetch()
        self._corrupt()
        views = views_of(work, self.memory)
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
                wrong += wrong_entries(view, key_of(work, request, view), ids, entries)
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
        work, view = self.work, views_of(self.work, self.memory)[0]
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


@contextmanager
def _words_of_auto() -> Iterator[list[str]]:
    """What it logs of its choice."""
    said: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == auto.log.name and record.levelno == logging.INFO:
                said.append(record.getMessage())

    handler, level = Hear(), auto.log.level
    auto.log.addHandler(handler)
    auto.log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        auto.log.removeHandler(handler)
        auto.log.setLevel(level)
