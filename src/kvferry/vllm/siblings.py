"""Tickets that several requests came with (`n > 1`): given back when the last one is through."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvferry.p2p.ticket import Ticket

SIBLING_SECONDS = 1.0  # samples of one request arrive together; the last within this


@dataclass(slots=True)
class _Family:
    ticket: Ticket
    requests: set[str] = field(default_factory=set)
    release_at: float | None = None  # a sibling may still be on its way until then


class Siblings:
    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}  # by hold

    def join(self, request_id: str, ticket: Ticket) -> None:
        family = self._families.setdefault(ticket.hold_id, _Family(ticket))
        family.requests.add(request_id)
        family.release_at = None

    def leave(self, request_id: str, ticket: Ticket) -> None:
        family = self._families.get(ticket.hold_id)
        if family is not None:
            family.requests.discard(request_id)
            if not family.requests:
                family.release_at = time.monotonic() + SIBLING_SECONDS

    @property
    def leaving(self) -> bool:
        """Whether `due` will have something though no request comes."""
        return any(family.release_at is not None for family in self._families.values())

    def due(self) -> list[Ticket]:
        """Those that nobody needs any more, each once."""
        now = time.monotonic()
        over = [
            hold_id
            for hold_id, family in self._families.items()
            if family.release_at is not None and family.release_at <= now
        ]
        return [self._families.pop(hold_id).ticket for hold_id in over]
