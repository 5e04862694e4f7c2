"""What a consumer rank says to a hold's sources, and what it makes of their answers.

A **claim** asks every source at once for the hold's blocks; it may be parked there until the hold
arrives. The **last word** goes to every source, also to those that nothing is read from: `done`,
`failed` or `not needed`. Its answer says whether the hold was open, which alone makes a load count.
Where other requests share the ticket, the same is asked without closing the hold.

    a source answers                    what follows
    stale                               the engine is forgotten, the ticket is void
    closed, expired                     the ticket is void
    refused otherwise, or nonsense      the load fails
    nothing in time, or is gone         the load fails; the engine is forgotten, and met again
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.errors import Cancelled, HandoverError, KvferryError, StaleTicket
from kvferry.layout.model import CacheModel
from kvferry.p2p.acquaintances import Acquaintances
from kvferry.p2p.caller import Caller
from kvferry.p2p.remote import Remote, Source
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.watch import Watch
from kvferry.wire.messages import (
    VERSION,
    Claim,
    Claimed,
    Closing,
    Complete,
    Outcome,
    Reader,
    Refused,
    Renew,
    Renewed,
    ReplyBody,
)

Calls = dict[Source, Future[ReplyBody]]


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """One rank's; holds no state of any single load."""

    reader: Reader  # who we are, to producers
    model: CacheModel
    known: Acquaintances
    caller: Caller

    def answer(self, remote: Remote, call: Future[ReplyBody], watch: Watch) -> ReplyBody:
        try:
            return watch.result(call)
        except Cancelled:
            raise
        except KvferryError:
            self.known.forget(remote)  # the peer may have restarted: meet it again next time
            raise

    def claim(
        self, remote: Remote, sources: Sequence[Source], ticket: Ticket, watch: Watch
    ) -> dict[Source, Claimed]:
        """What each of these sources holds, when all have answered."""
        patience = max(0.0, watch.deadline - time.monotonic())
        calls = {
            source: self.caller.call(
                source.address,
                Claim(
                    VERSION,
                    source.incarnation,
                    ticket.hold_id,
                    ticket.digest,
                    self.reader,
                    source.readers,
                    patience,
                ),
                watch.deadline,
            )
            for source in sources
        }
        claimed = {}
        for source, call in calls.items():
            reply = self.answer(remote, call, watch)
            who = f"rank {tuple(source.rank)}"
            if isinstance(reply, Refused):
                if reply.reason == "stale":
                    self.known.forget(remote)
                if reply.reason in ("stale", "closed", "expired"):
                    raise StaleTicket(f"{who} refuses the claim: {reply.message}")
                raise HandoverError(f"{who} refuses the claim: {reply.message}")
            if not isinstance(reply, Claimed):
                raise HandoverError(f"{who} answered a claim with a {type(reply).__name__}")
            exact = self.model.of_one_length and reply.tokens != ticket.tokens
            if exact or reply.tokens < ticket.tokens:
                raise HandoverError(
                    f"the ticket promises {ticket.tokens} tokens, {who} holds {reply.tokens}"
                )
            claimed[source] = reply
        watch.require_wanted()
        return claimed

    def say(
        self, sources: Sequence[Source], ticket: Ticket, outcome: Outcome, deadline: float
    ) -> Calls:
        """Send our last word to these sources."""
        return {
            source: self.caller.call(
                source.address,
                Complete(
                    VERSION,
                    source.incarnation,
                    ticket.hold_id,
                    self.reader,
                    source.readers,
                    outcome,
                ),
                deadline,
            )
            for source in sources
        }

    def ask_open(self, sources: Sequence[Source], ticket: Ticket, deadline: float) -> Calls:
        """Ask these sources whether the hold is open, and leave it so."""
        return {
            source: self.caller.call(
                source.address, Renew(VERSION, source.incarnation, [ticket.hold_id]), deadline
            )
            for source in sources
        }

    def require_open(self, remote: Remote, ticket: Ticket, calls: Calls, watch: Watch) -> None:
        """Whichever was asked: every source kept the hold open until after the last byte."""
        for source, call in calls.items():
            reply = self.answer(remote, call, watch)
            was_open = isinstance(reply, Closing) and reply.was_open
            was_open |= isinstance(reply, Renewed) and ticket.hold_id in reply.open
            if not was_open:
                raise StaleTicket(
                    f"rank {tuple(source.rank)} closed the hold before the load was over; what was "
                    "read is discarded"
                )
