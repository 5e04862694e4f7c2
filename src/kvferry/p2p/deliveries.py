"""What a producer rank makes of offers: who may be written to, and whether a write has counted.

The `Pusher` writes, on threads of its own, and knows nothing of holds. Here, on the server's
thread, is what surrounds it:

    an offer comes     a rank that cannot write, does not know the consumer, or holds something else
                       than the offer asks for, refuses; else the write begins, or is queued
    a write has ended  it counts only if its hold is open still, after the last byte; unless others
                       share the ticket, that is the reader's last word, and may close the hold
    a hold is closed   what is being written of it is given up: its blocks will be used again
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvferry.errors import KvferryError
from kvferry.p2p.holds import Closed, Hold, HoldTable, Why
from kvferry.p2p.push import Pushed, Pusher
from kvferry.p2p.targets import Unreachable
from kvferry.wire.messages import Delivered, Introduce, Offer, Reader, Reason, Refused, refusal


def refuse_closed(why: Why) -> Refused:
    return Refused("closed", f"the hold is closed ({why}); prefill again")


class Deliveries:
    """Of one rank, for its server's thread alone; without a pusher, offers are refused."""

    def __init__(
        self,
        pusher: Pusher | None,
        table: HoldTable[Any],
        counters: Counter[str],
        report: Callable[[Closed], None],
    ) -> None:
        self.pusher, self._table, self._counters, self._report = pusher, table, counters, report

    @property
    def under_way(self) -> int:
        return self.pusher.under_way if self.pusher else 0

    def introduce(self, body: Introduce) -> None:
        if self.pusher is not None:
            self.pusher.introduce(body.engine, body.rank)

    def refuse(self, offer: Offer, hold: Hold) -> Refused | None:
        """Why an offer cannot be taken; None where it can."""
        if self.pusher is None:
            return Refused("unable", "this engine writes nothing; read")
        if not self.pusher.knows(offer.reader):
            return Refused("unmet", "a rank offers its blocks, but has not introduced itself")
        if not self.pusher.can_serve(offer.tokens, hold.tokens):
            return Refused(
                "digest",
                f"the ticket promises {offer.tokens} tokens, this rank holds {hold.tokens}",
            )
        return None

    def start(
        self,
        offer: Offer,
        hold: Hold,
        patience_seconds: float,
        done: Callable[[Pushed | KvferryError], None],
    ) -> Refused | None:
        """Have the offered blocks written; `done` is called from another thread.

        `patience_seconds` is what is left of the offer's: it may have been parked for most of them.
        """
        if not patience_seconds > 0:  # nor NaN
            return Refused("expired", "the offer has no time left")
        assert self.pusher is not None  # it was not refused
        if not self.pusher.start(offer, hold.tables, patience_seconds, done):
            return Refused("busy", "too many offers wait to be written")
        return None

    def ended(self, offer: Offer, outcome: Pushed | KvferryError) -> Delivered | Refused:
        """A write has ended; what its reader is told."""
        body: Delivered | Refused
        if isinstance(outcome, KvferryError):
            reason: Reason = "unable" if isinstance(outcome, Unreachable) else "transfer"
            body = refusal(reason, f"{type(outcome).__name__}: {outcome}")
        elif not self._still_open(offer):
            why = self._table.find(offer.hold_id, time.monotonic())
            body = refuse_closed(why if isinstance(why, str) else "withdrawn")
        else:
            body = Delivered(offer.grant, outcome.bytes, outcome.descriptors, outcome.seconds)
            self._counters["bytes pushed"] += outcome.bytes
        self._counters["pushes done" if isinstance(body, Delivered) else "pushes failed"] += 1
        return body

    def _still_open(self, offer: Offer) -> bool:
        now = time.monotonic()
        if offer.keep_open:
            return isinstance(self._table.find(offer.hold_id, now), Hold)
        was_open, closed = self._table.last_word(
            offer.hold_id, offer.reader, offer.readers, "done", now
        )
        self._counters["last words: done"] += was_open
        if closed is not None:
            self._report(closed)
        return was_open

    def cancel(self, hold_id: str, reader: Reader | None = None) -> None:
        """Give up what is written of a hold, to one reader or to all."""
        if self.pusher is not None:
            self.pusher.cancel(hold_id, reader)

    def tidy(self, now: float) -> None:
        if self.pusher is not None:
            self.pusher.tidy(now)

    def close(self) -> None:
        if self.pusher is not None:
            self.pusher.close()
