"""Holds: a producer rank's promise to keep a request's blocks untouched until it is closed.

vLLM reuses no block of a finished request until every rank has reported it sent. So the hold, not
the block, is the fence of every transfer: a rank closes a hold *before* it reports, and a load
counts only if the hold was still open after its last byte.

A hold's life on one rank:

    (unknown) --claim------> parked, until the hold arrives or the claim's patience ends
    (unknown) --last word--> kept until the hold arrives (failed, or not needed: never done)
    (unknown) --withdrawn--> CLOSED "withdrawn" as soon as it arrives; parked claims are refused
    (unknown) --open-------> OPEN, claims are answered with its blocks; then early words count
    OPEN --all readers spoke--> CLOSED "delivered", or "failed" if any of them said so
    OPEN --lease ran out------> CLOSED "expired"
    OPEN --withdrawn----------> CLOSED "withdrawn" (aborted, preempted, shut down)
    CLOSED: claims and last words are stale; a closed hold never opens again

Readers are counted by distinct (engine, incarnation, rank). Each sends exactly one last word; an
engine is through when as many ranks as it announced have spoken; the hold closes when all engines
that showed up are through. The lease is renewed by consumers' schedulers, and by every claim. No
clock but this rank's own is read. What peers can make a rank remember is bounded, in bytes.

This module is the state machine alone: no sockets, no threads, time is passed in. Deadlines lie in
heaps, so that a look at the clock costs the same with ten holds and with ten thousand (4 µs; a walk
over 10,000 took 1.2 ms after every message).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Generic, Literal, TypeVar

from kvferry.net.messages import MAX_READERS, Outcome, Reader
from kvferry.net.server import ENTRY_BYTES, Budget, reader_bytes

Why = Literal["delivered", "failed", "expired", "withdrawn"]
Parked = TypeVar("Parked")

TOMBSTONES = 65_536  # closed holds remembered, so that late claims are refused at once
# Of claims and offers that wait: 10,000 offers of 128,000 tokens in blocks of 16. A connection (one
# consumer rank) has half.
PARKED_BYTES = 256 << 20
EARLY_BYTES = 16 << 20  # of words about holds that have not arrived; the oldest are forgotten
READERS_BYTES = 64 << 20  # of engines and ranks that open holds remember: 30,000 of them
MOST_ENGINES = 64  # that may read one hold
SPOKE_BYTES = 256  # of a rank that has spoken: a tuple, two numbers, its place in a set
STALE_ENTRIES = 64  # of a heap that may lie around, beyond as many as are alive


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
    budget: Budget  # of readers, of all holds
    charged_bytes: int = 0
    packed: Any = None  # the answer to its claims, kept by the server
    expected: dict[tuple[str, str], int] = field(default_factory=dict)  # readers of an engine
    spoke: dict[tuple[str, str], set[tuple[int, int]]] = field(default_factory=dict)
    outcomes: dict[Outcome, int] = field(default_factory=dict)

    def announce(self, reader: Reader, readers: int) -> bool:
        """Count on a reader's engine; False where too many engines came."""
        engine = (reader.engine_id, reader.incarnation)
        if engine not in self.expected:
            full = len(self.expected) >= MOST_ENGINES
            if full or not self._charge(ENTRY_BYTES + reader_bytes(reader)):
                return False
        self.expected[engine] = max(self.expected.get(engine, 0), readers)
        self.spoke.setdefault(engine, set())
        return True

    def hear(self, reader: Reader, readers: int, outcome: Outcome) -> None:
        """A reader's last word; only its first counts."""
        if self.announce(reader, readers):
            spoke = self.spoke[reader.engine_id, reader.incarnation]
            rank = (reader.pp_rank, reader.tp_rank)
            if rank not in spoke and len(spoke) < MAX_READERS and self._charge(SPOKE_BYTES):
                spoke.add(rank)
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def _charge(self, count: int) -> bool:
        taken = self.budget.take(count)
        self.charged_bytes += count if taken else 0
        return taken

    @property
    def over(self) -> Why | None:
        """How it ended, when all readers have spoken; one that failed counts more than the rest."""
        if not self.expected or any(
            len(self.spoke[engine]) < count for engine, count in self.expected.items()
        ):
            return None
        return "failed" if "failed" in self.outcomes else "delivered"


@dataclass(frozen=True, slots=True)
class Closed:
    """A hold that has just been closed; to be reported once."""

    hold_id: str
    request_id: str
    why: Why
    outcomes: dict[Outcome, int]


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Parked]):
    hold_id: str
    claim: Parked
    until: float
    charged_bytes: int
    sender: bytes
    waits: bool = True


@dataclass(frozen=True, slots=True)
class _Early:
    """A last word about a hold that has not arrived."""

    hold_id: str
    reader: Reader
    readers: int
    outcome: Outcome
    until: float

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES + getsizeof(self.hold_id) + reader_bytes(self.reader)


@dataclass(slots=True)
class HoldTable(Generic[Parked]):
    """All holds of one rank."""

    lease_seconds: float
    open: dict[str, Hold] = field(default_factory=dict)
    parked: int = 0  # claims that wait
    # Why a hold was closed, and the hash of its request: clients may name requests at length.
    _tombstones: OrderedDict[str, tuple[Why, int]] = field(default_factory=OrderedDict)
    _unborn: OrderedDict[str, None] = field(default_factory=OrderedDict)  # withdrawn, not arrived
    _parked: dict[str, dict[_Waiting[Parked], None]] = field(default_factory=dict)
    _early: deque[_Early] = field(default_factory=deque)  # oldest first
    _early_bytes: int = 0
    _parked_budget: Budget = field(default_factory=lambda: Budget(PARKED_BYTES, PARKED_BYTES // 2))
    _readers_budget: Budget = field(default_factory=lambda: Budget(READERS_BYTES))
    # Heaps. A hold has one entry, at or before its expiry: renewing does not touch it. Entries of
    # what is gone stay until they come up, or until there are too many of them.
    _leases: list[tuple[float, str]] = field(default_factory=list)
    _patience: list[tuple[float, int, _Waiting[Parked]]] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=itertools.count)

    def add(self, order: HoldOrder, now: float) -> tuple[list[Parked], Closed | None]:
        """Open a hold. Returns the claims that waited for it: answer them, then call `settle`.

        A hold that was withdrawn before it arrived, or whose id was used before, is closed at once,
        and returned as such.
        """
        hold_id, request_id = order.hold_id, order.request_id
        if hold_id in self._unborn:
            del self._unborn[hold_id]
            return [], self._bury(Closed(hold_id, request_id, "withdrawn", {}))
        known, buried = self.open.get(hold_id), self._tombstones.get(hold_id)
        if known is not None or buried is not None:  # an id serves one request
            used_by = hash(known.order.request_id) if known else buried[1] if buried else 0
            other = used_by != hash(request_id)
            return [], Closed("", request_id, "withdrawn", {}) if other else None
        expires = now + self.lease_seconds
        self.open[hold_id] = Hold(order, expires, self._readers_budget)
        heapq.heappush(self._leases, (expires, hold_id))
        return self._unpark(hold_id), None

    def settle(self, hold_id: str) -> Closed | None:
        """Count the words that came before the hold did; the hold, if they close it."""
        early = [word for word in self._early if word.hold_id == hold_id]
        hold = self.open.get(hold_id)
        if hold is None or not early:
            return None
        self._early = deque(word for word in self._early if word.hold_id != hold_id)
        for word in early:
            self._early_bytes -= word.bytes
            hold.hear(word.reader, word.readers, word.outcome)
        return self._close_if_over(hold)

    def find(self, hold_id: str, now: float) -> Hold | Why | None:
        """An open hold (its lease renewed), why it is closed, or None where it is not known yet."""
        hold = self.open.get(hold_id)
        if hold is None:
            buried = self._tombstones.get(hold_id)
            return "withdrawn" if hold_id in self._unborn else buried[0] if buried else None
        hold.expires = now + self.lease_seconds
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
        """Let a claim of so many bytes wait for its hold; False where too much waits."""
        if not self._parked_budget.take(bytes_, sender):
            return False
        waiting = _Waiting(hold_id, claim, until, bytes_, sender)
        self._parked.setdefault(hold_id, {})[waiting] = None
        self.parked += 1
        heapq.heappush(self._patience, (until, next(self._number), waiting))
        if len(self._patience) > 2 * self.parked + STALE_ENTRIES:
            self._patience = [entry for entry in self._patience if entry[2].waits]
            heapq.heapify(self._patience)
        return True

    def last_word(
        self, hold_id: str, reader: Reader, readers: int, outcome: Outcome, now: float
    ) -> tuple[bool, Closed | None]:
        """Whether the hold was open when a reader spoke, and the hold if that closed it."""
        hold = self.open.get(hold_id)
        if hold is None:
            if outcome != "done" and self.find(hold_id, now) is None:
                until = now + self.lease_seconds
                word = _Early(hold_id, reader, readers, outcome, until)
                self._early.append(word)
                self._early_bytes += word.bytes
                while self._early_bytes > EARLY_BYTES:
                    self._forget_earliest()
            return False, None
        hold.hear(reader, readers, outcome)
        return True, self._close_if_over(hold)

    def withdraw(self, hold_id: str) -> tuple[Closed | None, list[Parked]]:
        """Close a hold, or keep it from opening; then also the claims that waited for it."""
        hold = self.open.get(hold_id)
        if hold is not None:
            return self._close(hold, "withdrawn"), []
        if hold_id not in self._tombstones:
            self._unborn[hold_id] = None
            while len(self._unborn) > TOMBSTONES:
                self._unborn.popitem(last=False)
        return None, self._unpark(hold_id)

    def unpark_all(self) -> list[Parked]:
        """All claims that wait, which then wait no more."""
        return [claim for hold_id in list(self._parked) for claim in self._unpark(hold_id)]

    def expire(self, now: float) -> tuple[list[Closed], list[Parked]]:
        """Holds whose lease ran out, and claims whose patience did."""
        closed, impatient = [], []
        while (hold := self._first_to_expire()) is not None and hold.expires <= now:
            closed.append(self._close(hold, "expired"))
        while (waiting := self._least_patient()) is not None and waiting.until <= now:
            impatient.append(waiting.claim)
            del self._parked[waiting.hold_id][waiting]
            if not self._parked[waiting.hold_id]:
                del self._parked[waiting.hold_id]
            self._leave(waiting)
        while self._early and self._early[0].until <= now:
            self._forget_earliest()
        return closed, impatient

    def next_deadline(self) -> float | None:
        """When `expire` has something to do; early words can wait."""
        hold, waiting = self._first_to_expire(), self._least_patient()
        if hold is None or waiting is None:
            return waiting.until if waiting is not None else hold.expires if hold else None
        return min(hold.expires, waiting.until)

    def _first_to_expire(self) -> Hold | None:
        """The open hold whose lease runs out first; brings the top of the heap up to date."""
        while self._leases:
            when, hold_id = self._leases[0]
            hold = self.open.get(hold_id)
            if hold is None:
                heapq.heappop(self._leases)
            elif hold.expires > when:
                heapq.heapreplace(self._leases, (hold.expires, hold_id))
            else:
                return hold
        return None

    def _least_patient(self) -> _Waiting[Parked] | None:
        while self._patience and not self._patience[0][2].waits:
            heapq.heappop(self._patience)
        return self._patience[0][2] if self._patience else None

    def _leave(self, waiting: _Waiting[Parked]) -> None:
        waiting.waits = False
        self.parked -= 1
        self._parked_budget.give_back(waiting.charged_bytes, waiting.sender)

    def _forget_earliest(self) -> None:
        self._early_bytes -= self._early.popleft().bytes

    def _unpark(self, hold_id: str) -> list[Parked]:
        waiting = self._parked.pop(hold_id, {})
        for one in waiting:
            self._leave(one)
        return [one.claim for one in waiting]

    def _close_if_over(self, hold: Hold) -> Closed | None:
        why = hold.over
        return self._close(hold, why) if why is not None else None

    def _close(self, hold: Hold, why: Why) -> Closed:
        order = hold.order
        del self.open[order.hold_id]
        hold.budget.give_back(hold.charged_bytes)
        if len(self._leases) > 2 * len(self.open) + STALE_ENTRIES:
            self._leases = [entry for entry in self._leases if entry[1] in self.open]
            heapq.heapify(self._leases)
        return self._bury(Closed(order.hold_id, order.request_id, why, dict(hold.outcomes)))

    def _bury(self, closed: Closed) -> Closed:
        self._tombstones[closed.hold_id] = closed.why, hash(closed.request_id)
        while len(self._tombstones) > TOMBSTONES:
            self._tombstones.popitem(last=False)
        return closed
