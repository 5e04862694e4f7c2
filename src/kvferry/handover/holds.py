# SPDX-License-Identifier: Apache-2.0
"""Holds: a producer rank promises to leave a request's blocks untouched while its hold is open.

vLLM reuses the blocks of a finished request once every rank has reported the request as sent. A
producer rank closes a hold before it sends that report. A load counts only if the hold was still
open after the load's last byte. So the hold, not the block, guards every transfer.

A hold's life on one rank:

    (unknown) --claim------> the claim is parked until the hold arrives or its patience ends
    (unknown) --last word--> "failed" and "not needed" are kept until the hold arrives
    (unknown) --withdrawn--> CLOSED "withdrawn" as soon as it arrives; parked claims are refused
    (unknown) --open-------> OPEN: claims are answered with its blocks, then early words count
    OPEN --all readers have spoken--> CLOSED "delivered", or "failed" if one reader failed
    OPEN --lease ran out------------> CLOSED "expired"
    OPEN --withdrawn----------------> CLOSED "withdrawn" (aborted, not held, reset, device error)
    CLOSED: claims and last words are refused; a closed hold never opens again

Counting readers. A reader is one rank of one incarnation of a consumer engine. Each reader sends
one last word. An engine is finished when as many of its ranks have spoken as it announced. The hold
closes when all engines that claimed it are finished.

Failure path. A decode engine that dies in the middle of a load sends no last word and renews
nothing. Its hold stays open until the lease runs out, and then closes as "expired". Consumers'
schedulers renew leases while requests queue and load; every claim renews one too.

This module is the state machine alone: it has no sockets and no threads, and callers pass the time
in. Only this rank's clock counts. The memory that peers can make a rank use is bounded. Holds are
kept in the order in which their leases run out, so a check of the leases takes microseconds. Claims
that wait are looked at once a second: their consumers know the same deadlines.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from kvferry.net.messages import MAX_READERS, Outcome, Reader
from kvferry.net.server import ENTRY_BYTES, Budget

Why = Literal["delivered", "failed", "expired", "withdrawn"]
Parked = TypeVar("Parked")

DEFAULT_LEASE_SECONDS = 60.0  # a hold without a claim or a renewal closes after this long
TOMBSTONES = 65_536  # closed holds remembered, so that late claims are refused at once
# For parked claims and offers: 10,000 offers of 128,000 tokens in blocks of 16. One connection (one
# consumer rank) may use half.
PARKED_BYTES = 256 << 20
MOST_EARLY = 4_096  # last words that came before their hold; the oldest are dropped
MOST_ENGINES = 64  # engines that may read one hold
SWEEP_SECONDS = 1.0  # between two looks at claims and early words that wait


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """Keep this request's blocks: what a scheduler sends to all its ranks."""

    hold_id: str
    request_id: str
    digest: str
    tokens: int
    tables: Sequence[Sequence[int]]


@dataclass(slots=True)
class Hold:
    """An order that a rank has opened, and its readers."""

    order: HoldOrder
    expires: float
    packed: Any = None  # the encoded answer to claims, which the server keeps here
    engines: dict[int, _ReaderEngine] = field(default_factory=dict)  # by `_key`
    outcomes: dict[Outcome, int] = field(default_factory=dict)

    def announce(self, reader: Reader, readers: int) -> bool:
        """Expect last words from the reader's engine; False if too many engines read already."""
        key = _key(reader)
        if key not in self.engines:
            if len(self.engines) >= MOST_ENGINES:
                return False
            self.engines[key] = _ReaderEngine()
        self.engines[key].ranks = max(self.engines[key].ranks, readers)
        return True

    def hear(self, reader: Reader, readers: int, outcome: Outcome) -> None:
        """Count a reader's last word; only its first one counts."""
        if self.announce(reader, readers):
            spoke = self.engines[_key(reader)].spoke
            rank = (reader.pp_rank, reader.tp_rank)
            if rank not in spoke and len(spoke) < MAX_READERS:
                spoke.add(rank)
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    @property
    def silent(self) -> int:
        """Readers that have not sent their last word."""
        return sum(max(0, one.ranks - len(one.spoke)) for one in self.engines.values())

    @property
    def over(self) -> Why | None:
        """How the hold ended, or None while readers are missing. One failure makes it failed."""
        if not self.engines or self.silent:
            return None
        return "failed" if "failed" in self.outcomes else "delivered"


def _key(reader: Reader) -> int:
    """An engine's incarnation. A hash, because peers may send long names."""
    return hash((reader.engine_id, reader.incarnation))


@dataclass(frozen=True, slots=True)
class Closed:
    """A hold that has just closed. The rank reports it once."""

    hold_id: str
    request_id: str
    why: Why
    outcomes: dict[Outcome, int]  # of the readers that sent a last word
    silent: int = 0  # readers that claimed the hold and sent no last word


@dataclass(slots=True)
class _ReaderEngine:
    ranks: int = 0  # that it announced
    spoke: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _ParkedClaim(Generic[Parked]):
    claim: Parked
    until: float
    charged_bytes: int
    sender: bytes


@dataclass(frozen=True, slots=True)
class _EarlyWord:
    """A last word that came before its hold."""

    hold_id: str
    reader: Reader
    readers: int
    outcome: Outcome
    until: float


@dataclass(slots=True)
class HoldTable(Generic[Parked]):
    lease_seconds: float
    # In the order in which their leases run out: all leases are equally long, and a renewal moves a
    # hold to the end.
    open: OrderedDict[str, Hold] = field(default_factory=OrderedDict)
    parked: int = 0  # number of waiting claims
    # Why each hold closed, and a hash of its request id: clients may send long request ids. None:
    # the hold was withdrawn before it arrived.
    _tombstones: OrderedDict[str, tuple[Why, int | None]] = field(default_factory=OrderedDict)
    _parked: dict[str, list[_ParkedClaim[Parked]]] = field(default_factory=dict)
    _early: deque[_EarlyWord] = field(default_factory=lambda: deque(maxlen=MOST_EARLY))
    _parked_budget: Budget = field(default_factory=lambda: Budget(PARKED_BYTES))
    _sweep_at: float = 0.0

    def add(self, order: HoldOrder, now: float) -> tuple[list[Parked], Closed | None]:
        """Open a hold. Returns the claims that waited for it: answer them, then call `settle`.

        A hold that was withdrawn before it arrived closes at once and is returned as closed. So is
        one whose id another request has used.
        """
        hold_id, request_id = order.hold_id, order.request_id
        known = self.open.get(hold_id)
        why, used_by = self._tombstones.get(hold_id, (None, None))
        if known is not None:
            used_by = hash(known.order.request_id)
        elif why is not None and used_by is None:
            return [], self._bury(Closed(hold_id, request_id, why, {}))
        if used_by is not None:  # an id serves one request
            other = used_by != hash(request_id)
            return [], Closed("", request_id, "withdrawn", {}) if other else None
        self.open[hold_id] = Hold(order, now + self.lease_seconds)
        return self._unpark(hold_id), None

    def settle(self, hold_id: str) -> Closed | None:
        """Count the last words that came before the hold. Returns the hold if they close it."""
        early = [word for word in self._early if word.hold_id == hold_id]
        hold = self.open.get(hold_id)
        if hold is None or not early:
            return None
        others = (word for word in self._early if word.hold_id != hold_id)
        self._early = deque(others, MOST_EARLY)
        for word in early:
            hold.hear(word.reader, word.readers, word.outcome)
        return self._close_if_over(hold)

    def find(self, hold_id: str) -> Hold | Why | None:
        """The open hold, why it closed, or None if it has not arrived."""
        if hold_id in self.open:
            return self.open[hold_id]
        return self._tombstones.get(hold_id, (None, None))[0]

    def renew(self, hold_id: str, now: float) -> Hold | Why | None:
        """Like `find`, and an open hold's lease begins anew."""
        hold = self.find(hold_id)
        if isinstance(hold, Hold):
            hold.expires = now + self.lease_seconds
            self.open.move_to_end(hold_id)
        return hold

    def park(
        self,
        hold_id: str,
        claim: Parked,
        until: float,
        *,
        bytes_: int = ENTRY_BYTES,
        sender: bytes = b"",
    ) -> bool:
        """Let a claim of this size wait for its hold; False if too many bytes wait already."""
        if not self._parked_budget.take(bytes_, sender):
            return False
        waiting = _ParkedClaim(claim, until, bytes_, sender)
        self._parked.setdefault(hold_id, []).append(waiting)
        self.parked += 1
        return True

    def last_word(
        self, hold_id: str, reader: Reader, readers: int, outcome: Outcome, now: float
    ) -> tuple[bool, Closed | None]:
        """Whether the hold was open when the reader spoke, and the hold if this closed it."""
        hold = self.open.get(hold_id)
        if hold is None:
            if outcome != "done" and self.find(hold_id) is None:
                until = now + self.lease_seconds
                self._early.append(_EarlyWord(hold_id, reader, readers, outcome, until))
            return False, None
        hold.hear(reader, readers, outcome)
        return True, self._close_if_over(hold)

    def withdraw(self, hold_id: str) -> tuple[Closed | None, list[Parked]]:
        """Close a hold, or prevent it from opening; then also return the claims that waited."""
        hold = self.open.get(hold_id)
        if hold is not None:
            return self._close(hold, "withdrawn"), []
        if hold_id not in self._tombstones:
            self._remember(hold_id, "withdrawn", None)
        return None, self._unpark(hold_id)

    def unpark_all(self) -> list[Parked]:
        return [claim for hold_id in list(self._parked) for claim in self._unpark(hold_id)]

    def expire(self, now: float) -> tuple[list[Closed], list[Parked]]:
        """Close holds whose lease ran out, and remove claims whose patience ended. Call it at least
        every `SWEEP_SECONDS`."""
        closed, impatient = [], []
        while (hold := self._first_to_expire()) is not None and hold.expires <= now:
            closed.append(self._close(hold, "expired"))
        if self._sweep_at <= now:
            self._sweep_at = now + SWEEP_SECONDS
            for hold_id in list(self._parked):
                impatient += self._unpark(hold_id, now)
            while self._early and self._early[0].until <= now:
                self._early.popleft()
        return closed, impatient

    def next_deadline(self) -> float | None:
        """When a lease runs out next."""
        hold = self._first_to_expire()
        return hold.expires if hold is not None else None

    def _first_to_expire(self) -> Hold | None:
        return next(iter(self.open.values()), None)

    def _unpark(self, hold_id: str, until: float = math.inf) -> list[Parked]:
        """Remove the claims for a hold whose patience ends by then."""
        waiting = self._parked.pop(hold_id, [])
        leave = [one for one in waiting if one.until <= until]
        if len(leave) < len(waiting):
            self._parked[hold_id] = [one for one in waiting if one.until > until]
        for one in leave:
            self.parked -= 1
            self._parked_budget.give_back(one.charged_bytes, one.sender)
        return [one.claim for one in leave]

    def _close_if_over(self, hold: Hold) -> Closed | None:
        why = hold.over
        return self._close(hold, why) if why is not None else None

    def _close(self, hold: Hold, why: Why) -> Closed:
        order = hold.order
        del self.open[order.hold_id]
        outcomes = dict(hold.outcomes)
        return self._bury(Closed(order.hold_id, order.request_id, why, outcomes, hold.silent))

    def _bury(self, closed: Closed) -> Closed:
        self._remember(closed.hold_id, closed.why, hash(closed.request_id))
        return closed

    def _remember(self, hold_id: str, why: Why, used_by: int | None) -> None:
        self._tombstones[hold_id] = why, used_by
        while len(self._tombstones) > TOMBSTONES:
            self._tombstones.popitem(last=False)
