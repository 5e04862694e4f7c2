"""What a carrier has registered with its library: all of a call's regions, or none of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvferry.errors import TransferError
from kvferry.transport.base import MemoryRegion
from kvferry.transport.foreign_library import Library
from kvferry.transport.regions import RegionTable

log = logging.getLogger(__name__)


class Registered:
    """The regions that peers are told of. One thread at a time."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.regions: list[MemoryRegion] = []
        self.table = RegionTable.of([])

    def add(self, regions: Sequence[MemoryRegion]) -> None:
        table = RegionTable.of([*self.regions, *regions])
        before, after = set(self.table.regions()), set(table.regions())
        self.swap(
            sorted(after - before, key=lambda r: r.address),
            sorted(before - after, key=lambda r: r.address),
        )
        self.regions, self.table = [*self.regions, *regions], table

    def swap(self, added: Sequence[MemoryRegion], gone: Sequence[MemoryRegion]) -> None:
        """Neighbours that become one are registered anew."""
        done: list[MemoryRegion] = []
        for region in gone:
            self._library.unregister_one(region)
        try:
            for region in added:
                self._library.register_one(region)
                done.append(region)
        except TransferError:
            for region in done:
                self._library.unregister_one(region)
            for region in gone:
                self._again(region)
            raise

    def _again(self, region: MemoryRegion) -> None:
        """Where that fails, nobody is told of it any more."""
        try:
            self._library.register_one(region)
        except TransferError as error:
            log.error("memory that was registered is not any more: %s", error)
            end = region.address + region.bytes
            self.regions = [r for r in self.regions if not region.address <= r.address < end]
            self.table = RegionTable.of(self.regions)
