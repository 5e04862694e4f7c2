"""A producer rank of the demo: fills its cache, and is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.demo.cache import POISON, View, slot_entries, write_byte, write_entries
from kvferry.demo.ends import carriers_for, key_of, map_rank, views_of
from kvferry.demo.memory import Memory
from kvferry.demo.orders import Greeting, Report
from kvferry.demo.work import Request, Work, source_extent
from kvferry.layout.shape import Rank, Span
from kvferry.transport import Carrier
from kvferry.transport.vm import allow_any_reader


@dataclass(slots=True, eq=False)
class Producer:
    work: Work
    rank: Rank
    fault: str
    files: list[int]
    report: Report
    memory: Memory | None = None
    carriers: list[Carrier] = field(default_factory=list)
    spare: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1, dtype=np.uint8))

    def greet(self) -> Greeting:
        allow_any_reader()
        return Greeting(self.rank, os.getpid(), self.spare.ctypes.data)

    def set_up(self, method: str) -> Greeting:
        file = self.files[0] if method == "shared" else None
        self.memory = map_rank(self.work, True, self.rank, file, method)
        self.carriers = carriers_for(method, self.memory)
        endpoints = {carrier.name: carrier.endpoint() for carrier in self.carriers}
        return Greeting(self.rank, os.getpid(), self.memory.address, endpoints)

    def fill(self) -> None:
        assert self.memory is not None
        work = self.work
        views = views_of(work, self.memory)
        for view in views:
            index = work.model.groups.index(view.group)
            used = np.concatenate([request.src_tables[index] for request in work.requests])
            free = np.setdiff1d(np.arange(work.src_pools[index][-1] + 1), used)
            write_byte(view, free, POISON)
        for request in work.requests:
            self.report(sum(self._fill(view, request) for view in views))
        self.memory.publish()

    def _fill(self, view: View, request: Request) -> int:
        work = self.work
        index = work.model.groups.index(view.group)
        extent = source_extent(view.group, work.src, request.tokens)
        blocks = Span(extent.first_held, extent.blocks)
        ids = request.src_tables[index][blocks.start :]
        entries = slot_entries(view.group, work.src, self.rank.tp, blocks, extent.entries)
        return write_entries(view, key_of(work, request, view), ids, entries)
