"""Staging memory of a carrier, in slots that are lent one at a time.

The memory is registered with the library before any peer connects, as one region. A slot that
somebody may still write to (a transfer that the library has not let go of, a peer that vanished
with a write under way) is *retired*: it is never lent again. So late bytes only ever land where
nobody looks. Who finds no slot moves its runs directly.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np

from kvferry.transport.base import MemoryRegion
from kvferry.transport.memory import Bytes

log = logging.getLogger(__name__)

SLOT_BYTES = 2 << 20  # a millisecond or two of any library's time: hides the round trip to the desk
SLOTS = 16


@dataclass(frozen=True, slots=True)
class Slot:
    number: int
    offset: int  # in the staging memory
    address: int
    bytes: Bytes


class Slots:
    """Any thread may take and give back. The pages come into being when they are first used."""

    def __init__(self, count: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._memory = np.zeros(count * slot_bytes, dtype=np.uint8)
        self._lock = threading.Lock()
        base = self._memory.ctypes.data
        self._free = [
            Slot(n, at, base + at, self._memory[at : at + slot_bytes])
            for n, at in enumerate(range(0, count * slot_bytes, slot_bytes))
        ]
        self.slot_bytes = slot_bytes
        self.retired = 0

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self._memory.ctypes.data, self._memory.nbytes)

    @property
    def free(self) -> int:
        with self._lock:
            return len(self._free)

    def take(self) -> Slot | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        """By who took it, when nobody can write to it any more."""
        with self._lock:
            self._free.append(slot)

    def retire(self, slot: Slot) -> None:
        """By who took it, where somebody may still write to it."""
        with self._lock:
            self.retired += 1
        log.warning(
            "staging slot %d is never lent again, because bytes may still arrive in it; %d of %d "
            "are so. Short runs go directly where none is left",
            slot.number,
            self.retired,
            len(self._memory) // self.slot_bytes,
        )
