"""Loads as the scheduler sees them: what is ordered of a promise, and which loads hang.

A load outlives its request: it is over when every rank has ended it. One that hangs on some ranks
may still be written, so its blocks stay pinned, in quarantine, until the last of these ended it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvferry.pool.hits import Segment
from kvferry.pool.orders import LoadOrder
from kvferry.pool.requests import LoadSpec

log = logging.getLogger("kvferry")


def segments_to_load(spec: LoadSpec, external: int, full: bool) -> tuple[Segment, ...]:
    """What of a promise is loaded where the engine takes `external` tokens of it.

    full  all groups keep all of their tokens
    """
    if external == spec.tokens:
        return spec.hit.segments
    # an engine that takes less than it was offered gets what a hit of that length needs
    stop = spec.computed + external
    if external > spec.tokens or not full:
        log.error(
            "the engine asks for %d tokens, the pool promised %d: they are computed",
            external,
            spec.tokens,
        )
        return ()  # a load of nothing fails
    return tuple(
        Segment(s.layout_id, s.group, s.start, min(s.stop, stop))
        for s in spec.hit.segments
        if s.start < stop
    )


@dataclass(slots=True)
class _Hung:
    block_ids: list[int]
    ranks: int = 0  # on which it has not ended


class LoadJobs:
    """Loads that some rank has not ended, and the pins of those that hang."""

    def __init__(
        self,
        pin: Callable[[Sequence[int]], None],
        unpin: Callable[[Sequence[int]], None],
        null_block: int | None,
    ) -> None:
        self._pin, self._unpin, self._null = pin, unpin, null_block
        self._orders: dict[str, LoadOrder] = {}
        self._hung: dict[str, _Hung] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def order(self, order: LoadOrder) -> None:
        self._orders[order.request_id] = order

    def over(self, request_id: str) -> None:
        """All ranks have ended it, or left it hanging."""
        self._orders.pop(request_id, None)

    def hung(self, request_id: str) -> None:
        """A load hangs on one more rank."""
        order = self._orders.get(request_id)
        if order is None:
            return
        hung = self._hung.get(request_id)
        if hung is None:
            ids = [i for table in order.tables for i in table if i != self._null]
            self._pin(ids)
            hung = self._hung[request_id] = _Hung(ids)
        hung.ranks += 1

    def recovered(self, request_ids: Iterable[str]) -> None:
        """Hung loads that have ended on some rank."""
        for request_id in request_ids:
            hung = self._hung.get(request_id)
            if hung is None:
                continue
            hung.ranks -= 1
            if hung.ranks == 0:
                del self._hung[request_id]
                self._unpin(hung.block_ids)

    @property
    def quarantined(self) -> frozenset[str]:
        """Requests whose blocks are kept from everybody."""
        return frozenset(self._hung)

    @property
    def quarantined_blocks(self) -> int:
        return sum(len(hung.block_ids) for hung in self._hung.values())
