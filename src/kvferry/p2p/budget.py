"""What peers can have a server keep, counted in bytes.

A peer that holds the secret may still be faulty. Whatever stays in memory because it asked for it
is charged here first, and refused as `busy` where there is no room: neither one connection nor all
of them together can fill the engine's memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from sys import getsizeof

from kvferry.wire.messages import Claim, Complete, Offer, Reader

# Of structs, tuples, list and heap entries around what is counted; measured with tracemalloc.
ENTRY_BYTES = 1024


@dataclass(slots=True, eq=False)
class Budget:
    """Bytes in all and of one sender; any thread."""

    limit_bytes: int
    share_bytes: int = 0  # of one sender; 0: all
    used_bytes: int = 0
    _senders: dict[bytes, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int, sender: bytes = b"") -> bool:
        """Charge so many bytes; False, and nothing is charged, where they are too many."""
        with self._lock:
            mine = self._senders.get(sender, 0) + count
            if self.used_bytes + count > self.limit_bytes or mine > (
                self.share_bytes or self.limit_bytes
            ):
                return False
            self.used_bytes += count
            self._senders[sender] = mine
            return True

    def give_back(self, count: int, sender: bytes = b"") -> None:
        with self._lock:
            self.used_bytes -= count
            left = self._senders.pop(sender, 0) - count
            if left:
                self._senders[sender] = left


def kept_bytes(kept: Claim | Offer | Complete) -> int:
    """What a message takes while it waits; a text of 512 characters may take 2 KiB."""
    texts = [kept.incarnation, kept.hold_id]
    if not isinstance(kept, Complete):
        texts.append(kept.digest)
    tables = len(kept.tables) if isinstance(kept, Offer) else 0
    return ENTRY_BYTES + tables + sum(map(getsizeof, texts)) + reader_bytes(kept.reader)


def reader_bytes(reader: Reader) -> int:
    return getsizeof(reader.engine_id) + getsizeof(reader.incarnation)
