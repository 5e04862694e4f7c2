"""Mooncake Store for memory that is used again: a put or get ends when its memory is free.

A call given up at its deadline may still read or write the caller's blocks: a late put would
store another request's bytes under this one's key, a late get would overwrite another request's
cache. Savers and loaders have an answer to a call that takes too long (pinned and quarantined
blocks), so these calls stay until the client is done with the memory. Lookups move no blocks, and
keep their deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvferry.pool.mooncake import MooncakeStore

T = TypeVar("T")
FOREVER = 1e9  # seconds


class HeldMemoryMooncakeStore(MooncakeStore):
    def _call(
        self,
        what: str,
        function: Callable[[], T],
        deadline: float,
        *,
        writes: bool = False,
        closing: bool = False,
    ) -> T:
        moves_blocks = writes or what == "put"
        until = deadline + FOREVER if moves_blocks else deadline
        return super()._call(what, function, until, writes=writes, closing=closing)
