"""Lists of descriptors that NIXL has prepared, from which batches are made by index.

Batches mostly have one length, which divides the pages that they lie in. So each side's registered
memory is cut into slots of that length, from the first byte of each region: one strided range for
each region, which NIXL takes as it is. A batch is then two arrays of slots' numbers, and NIXL need
not look up the registration of every descriptor (benchmarks/prepared.py measures it). Whatever
does not lie in such slots goes to NIXL as descriptors.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.base import Ints
from kvferry.transport.foreign_peer import cut, windows
from kvferry.transport.nixl_agent import text_of
from kvferry.transport.regions import Arrays, RegionTable

log = logging.getLogger(__name__)

HERE = "NIXL_INIT_AGENT"  # NIXL's word for the local side
MOST_SLOTS = 1 << 31  # numbers are signed and have 32 bits
Numbers = NDArray[np.int32]
MOST_LISTS = 16  # of one side; each is as long as there are regions


@dataclass(frozen=True, slots=True)
class SlotList:
    """One side's memory in slots of `length` bytes. NIXL's list goes with the last reference."""

    starts: Ints
    first: Ints  # number of each region's first slot
    slots: Ints  # of each region
    length: int
    handle: Any

    @classmethod
    def prepare(
        cls, agent: Any, whose: Any, regions: RegionTable, length: int, kind: str, device: int
    ) -> SlotList | None:
        """None where there is no slot, or more than numbers for them."""
        slots = (regions.ends - regions.starts) // length
        some = slots > 0
        starts, slots = regions.starts[some], slots[some]
        total = int(slots.sum())
        if not 0 < total < MOST_SLOTS:
            return None
        columns = np.broadcast_arrays(starts, length, device, length, slots)  # as NIXL orders them
        ranges = np.stack(columns, axis=1).astype(np.uint64)
        handle = agent.prep_xfer_dlist(whose, ranges, kind)
        return cls(starts, np.cumsum(slots) - slots, slots, length, handle)

    def numbers(self, address: Ints) -> Numbers | None:
        """Of the slots at these addresses, or None if one of them is not a slot's."""
        if len(self.starts) == 1:
            offset, slots, first = address - self.starts[0], self.slots[0], self.first[0]
        else:
            at = self.starts.searchsorted(address, side="right") - 1  # -1, the last one: refused
            offset, slots, first = address - self.starts[at], self.slots[at], self.first[at]
        number = offset // self.length
        if not (
            int(offset.min()) >= 0
            and bool((number < slots).all())
            and bool((number * self.length == offset).all())
        ):
            return None
        found: Numbers = (number + first).astype(np.int32)
        return found


@dataclass(frozen=True, slots=True)
class Numbered(Arrays):
    """A batch, or several, whose copies are also known by their slots' numbers."""

    here: SlotList
    there: SlotList
    mine: Numbers
    theirs: Numbers

    def cut(self, descriptors: int) -> list[Arrays]:
        return [
            Numbered(
                part.src,
                part.dst,
                part.length,
                self.here,
                self.there,
                self.mine[few],
                self.theirs[few],
            )
            for part, few in zip(
                cut(self, descriptors), windows(len(self), descriptors), strict=True
            )
        ]


class SlotLists:
    """The lists of one side, by length; the oldest goes when there are many. Not for two threads
    at once."""

    def __init__(self, whose: Any, kind: str, device: int) -> None:
        self._whose, self._kind, self._device = whose, kind, device
        self._regions: RegionTable | None = None
        self._lists: dict[int, SlotList | None] = {}

    def get(self, agent: Any, regions: RegionTable, length: int) -> SlotList | None:
        if regions is not self._regions:
            self.clear()
            self._regions = regions
        if length not in self._lists:
            if len(self._lists) >= MOST_LISTS:
                del self._lists[next(iter(self._lists))]
            try:
                found = SlotList.prepare(
                    agent, self._whose, regions, length, self._kind, self._device
                )
            except Exception as error:  # there is another way, which says what is wrong
                log.debug("NIXL prepares no list of %d byte slots: %s", length, text_of(error))
                found = None
            self._lists[length] = found
        return self._lists[length]

    def has(self, one: SlotList) -> bool:
        """Whether it was made of what is registered now."""
        return self._lists.get(one.length) is one

    def clear(self) -> None:
        self._lists.clear()
        self._regions = None
