"""Holds: a producer rank's promise to keep a request's blocks untouched until it is closed.

vLLM reuses no block of a finished request until every rank has reported it sent. So the hold, not
the block, is the fence of every transfer: a rank closes a hold *before* it reports, and a load
counts only if the hold was still open after its last byte.

A hold's life on one rank:

    (unknown) --claim--> parked, until the hold arrives or the claim's patience ends
    (unknown) --open---> OPEN, claims are answered with its blocks
    OPEN --all readers spoke--> CLOSED "delivered"
    OPEN --lease ran out------> CLOSED "expired"
    OPEN --withdrawn----------> CLOSED "withdrawn" (aborted, preempted, shut down)
    CLOSED: claims and last words are stale; a closed hold never opens again

Readers are counted by distinct (engine, incarnation, rank). Each sends exactly one last word; an
engine is through when as many ranks as it announced have spoken; the hold closes when all engines
that showed up are through. The lease is renewed by consumers' schedulers, and by every claim. No
clock but this rank's own is read.

This module is the state machine alone: no sockets, no threads, time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from kvferry.wire.messages import Outcome, Reader

Why = Literal["delivered", "expired", "withdrawn"]
Parked = TypeVar("Parked")

TOMBSTONES = 65_536  # closed holds remembered, so that late claims are refused at once


@dataclass(slots=True)
class Hold:
    hold_id: str
    request_id: str
    digest: str
    tokens: int
    tables: list[list[int]]
    expires: float
    expected: dict[tuple[str, str], int] = field(default_factory=dict)  # readers of an engine
    spoke: dict[tuple[str, str], set[tuple[int, int]]] = field(default_factory=dict)
    outcomes: dict[Outcome, int] = field(default_factory=dict)

    def announce(self, reader: Reader, readers: int) -> None:
        engine = (reader.engine_id, reader.incarnation)
        self.expected[engine] = max(self.expected.get(engine, 0), readers)
        self.spoke.setdefault(engine, set())

    @property
    def delivered(self) -> bool:
        return bool(self.expected) and all(
            len(self.spoke[engine]) >= count for engine, count in self.expected.items()
        )


@dataclass(frozen=True, slots=True)
class Closed:
    """A hold that has just been closed; to be reported once."""

    hold_id: str
    request_id: str
    why: Why
    outcomes: dict[Outcome, int]


@dataclass(slots=True)
class _Waiting(Generic[Parked]):
    claim: Parked
    until: float


@dataclass(slots=True)
class HoldTable(Generic[Parked]):
    """All holds of one rank."""

    lease_seconds: float
    open: dict[str, Hold] = field(default_factory=dict)
    _tombstones: OrderedDict[str, Why] = field(default_factory=OrderedDict)
    _parked: dict[str, list[_Waiting[Parked]]] = field(default_factory=dict)

    def add(
        self,
        hold_id: str,
        request_id: str,
        digest: str,
        tokens: int,
        tables: list[list[int]],
        now: float,
    ) -> list[Parked]:
        """Open a hold; returns the claims that waited for it."""
        if hold_id in self.open or hold_id in self._tombstones:
            return []
        self.open[hold_id] = Hold(
            hold_id, request_id, digest, tokens, tables, now + self.lease_seconds
        )
        return [waiting.claim for waiting in self._parked.pop(hold_id, [])]

    def find(self, hold_id: str, now: float) -> Hold | Why | None:
        """An open hold (its lease renewed), why it is closed, or None where it is not known yet."""
        hold = self.open.get(hold_id)
        if hold is None:
            return self._tombstones.get(hold_id)
        hold.expires = now + self.lease_seconds
        return hold

    def park(self, hold_id: str, claim: Parked, until: float) -> None:
        self._parked.setdefault(hold_id, []).append(_Waiting(claim, until))

    @property
    def parked(self) -> int:
        return sum(len(waiting) for waiting in self._parked.values())

    def last_word(
        self, hold_id: str, reader: Reader, readers: int, outcome: Outcome
    ) -> tuple[bool, Closed | None]:
        """Whether the hold was open when a reader spoke, and the hold if that closed it."""
        hold = self.open.get(hold_id)
        if hold is None:
            return False, None
        hold.announce(reader, readers)
        spoke = hold.spoke[reader.engine_id, reader.incarnation]
        rank = (reader.pp_rank, reader.tp_rank)
        if rank not in spoke:
            spoke.add(rank)
            hold.outcomes[outcome] = hold.outcomes.get(outcome, 0) + 1
        return True, self._close(hold, "delivered") if hold.delivered else None

    def withdraw(self, hold_id: str) -> Closed | None:
        hold = self.open.get(hold_id)
        if hold is not None:
            return self._close(hold, "withdrawn")
        self._bury(hold_id, "withdrawn")  # it must not open later either
        return None

    def expire(self, now: float) -> tuple[list[Closed], list[Parked]]:
        """Holds whose lease ran out, and claims whose patience did."""
        closed = [
            self._close(hold, "expired") for hold in list(self.open.values()) if hold.expires <= now
        ]
        return closed, list(self._impatient(now))

    def _impatient(self, now: float) -> Iterator[Parked]:
        for hold_id, waiting in list(self._parked.items()):
            for one in waiting:
                if one.until <= now:
                    yield one.claim
            left = [one for one in waiting if one.until > now]
            if left:
                self._parked[hold_id] = left
            else:
                del self._parked[hold_id]

    def next_deadline(self) -> float | None:
        times = [hold.expires for hold in self.open.values()]
        times += [one.until for waiting in self._parked.values() for one in waiting]
        return min(times, default=None)

    def _close(self, hold: Hold, why: Why) -> Closed:
        del self.open[hold.hold_id]
        self._bury(hold.hold_id, why)
        return Closed(hold.hold_id, hold.request_id, why, dict(hold.outcomes))

    def _bury(self, hold_id: str, why: Why) -> None:
        self._tombstones[hold_id] = why
        while len(self._tombstones) > TOMBSTONES:
            self._tombstones.popitem(last=False)
