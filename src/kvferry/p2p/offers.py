"""A consumer rank that lets producers write: it opens its blocks, and takes them back.

For every source whose carrier can be revoked, a load opens a *grant* of exactly the bytes that the
source's edge covers, and offers it. The source writes, and answers `delivered`; the load counts
that source as done if as many bytes arrived here, under that grant, as the plan says, and as the
source claims. Where a carrier cannot be revoked (same-host memory, CUDA IPC, RDMA) nothing is
offered: the answer to a parked claim is the signal, and the consumer reads.

Whatever happens, all grants of a load are closed before it is reported, by this side alone. A
source that is stopped, gone or lying cannot write after that; its blocks may be used again.

    source answers         the load
    delivered              counts it, after its own count of bytes
    refused: unable        claims and reads from that source instead
    refused: unmet         introduces itself again, and offers once more
    refused: anything else fails
    nothing                fails at its deadline, or when the connection breaks
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvferry.errors import DeadlineExceeded, HandoverError, StaleTicket
from kvferry.layout.parts import Ints
from kvferry.p2p.caller import Caller
from kvferry.p2p.remote import Remote, Source
from kvferry.p2p.stats import ConsumerTally
from kvferry.p2p.transfers import Stuck, end_for_good
from kvferry.p2p.watch import Watch
from kvferry.plan.landing import landing
from kvferry.transport.base import is_granting
from kvferry.wire.messages import (
    MOST_OFFERED_IDS,
    VERSION,
    Delivered,
    EngineInfo,
    Introduce,
    Offer,
    RankInfo,
    Reader,
    Refused,
    ReplyBody,
    pack_tables,
)

log = logging.getLogger("kvferry")

CLOSE_GRANT_SECONDS = 5.0  # for a writer to leave; its connection is shut down, so it is at once
INTRODUCE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class _Offered:
    source: Source
    offer: Offer
    bytes: int  # that are due
    call: Future[ReplyBody]
    open: bool = True
    again: bool = False  # whether it was offered twice


@dataclass(frozen=True, slots=True)
class Arrived:
    """What sources wrote, and those that would rather be read."""

    bytes: int
    descriptors: int
    delivered: tuple[Source, ...]
    declined: tuple[Source, ...]
    write_seconds: float = 0.0  # of the source that wrote longest, as it says


@dataclass(frozen=True, slots=True, eq=False)
class Offering:
    """How one consumer rank offers its blocks."""

    reader: Reader
    engine: EngineInfo
    info: RankInfo  # our own memory, as producers have to know it
    bases: Ints
    caller: Caller
    tally: ConsumerTally
    _introduced: set[tuple[str, str]] = field(default_factory=set)  # addresses, incarnations
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, source: Source, tables: tuple[tuple[int, ...], ...]) -> bool:
        ids = sum(len(table) for table in tables)
        return source.plan is not None and is_granting(source.carrier) and ids <= MOST_OFFERED_IDS

    def introduce(self, source: Source) -> None:
        """Sent ahead of the offer on the same connection, so that nobody waits for its answer."""
        key = (source.address, source.incarnation)
        with self._lock:  # so that no other load's offer comes before it
            if key in self._introduced:
                return
            self._introduced.add(key)
            introduce = Introduce(VERSION, source.incarnation, self.engine, self.info)
            self.caller.call(source.address, introduce, time.monotonic() + INTRODUCE_SECONDS)

    def forget(self, source: Source) -> None:
        with self._lock:
            self._introduced.discard((source.address, source.incarnation))


class Offers:
    """The offers of one load. Close them, whatever happens."""

    def __init__(
        self,
        offering: Offering,
        remote: Remote,
        stuck: Stuck,
    ) -> None:
        self._offering, self._remote, self._stuck = offering, remote, stuck
        self._offered: list[_Offered] = []

    @property
    def sources(self) -> set[Source]:
        return {one.source for one in self._offered}

    def open(
        self,
        *,
        hold_id: str,
        digest: str,
        tokens: int,
        skip: int,
        tables: tuple[tuple[int, ...], ...],
        keep_open: bool,
        watch: Watch,
    ) -> None:
        """Open and offer what each source that can be revoked is to write."""
        offering = self._offering
        packed = pack_tables(tables)
        for source in self._remote.sources:
            carrier = source.carrier
            if not offering.takes(source, tables) or not is_granting(carrier):
                continue
            assert source.plan is not None
            land = landing(
                source.plan, tokens=tokens, skip=skip, dst_tables=tables, dst_bases=offering.bases
            )
            offer = Offer(
                VERSION,
                source.incarnation,
                hold_id,
                digest,
                offering.reader,
                source.readers,
                max(0.0, watch.deadline - time.monotonic()),
                carrier.name,
                carrier.open_grant(land.address, land.length),
                tokens,
                skip,
                packed,
                keep_open,
            )
            one = _Offered(source, offer, land.bytes, Future())
            self._offered.append(one)  # from here on it is closed, whatever happens
            self._call(one, watch)

    def arrive(self, watch: Watch, answer: Callable[[Future[ReplyBody]], ReplyBody]) -> Arrived:
        """Wait until every source has written or declined; raise the first other answer."""
        waiting = list(self._offered)
        delivered: list[Source] = []
        declined: list[Source] = []
        moved = descriptors = 0
        seconds = 0.0
        while waiting:
            call = watch.first([one.call for one in waiting])
            one = next(one for one in waiting if one.call is call)
            reply = answer(call)
            if isinstance(reply, Refused) and reply.reason == "unmet" and not one.again:
                one.again = True
                self._offering.forget(one.source)
                self._call(one, watch)
                continue
            waiting.remove(one)
            if isinstance(reply, Refused) and reply.reason == "unable":
                log.info("rank %s is read: %s", tuple(one.source.rank), reply.message)
                self._close(one)
                declined.append(one.source)
                continue
            said = _delivered(one, reply)
            came = self._close(one)
            if not said.bytes == came == one.bytes or said.grant != one.offer.grant:
                raise HandoverError(
                    f"rank {tuple(one.source.rank)} says that it wrote {said.bytes} bytes, {came} "
                    f"arrived and {one.bytes} were due; what came is discarded"
                )
            moved, descriptors = moved + came, descriptors + said.descriptors
            seconds = max(seconds, said.write_seconds)
            delivered.append(one.source)
        return Arrived(moved, descriptors, tuple(delivered), tuple(declined), seconds)

    def close(self) -> None:
        """Take all grants back. No byte of any arrives after this returns."""
        for one in self._offered:
            if one.open:
                self._offering.tally.revoked()
                self._close(one)

    def _call(self, one: _Offered, watch: Watch) -> None:
        self._offering.introduce(one.source)
        one.call = self._offering.caller.call(one.source.address, one.offer, watch.deadline)

    def _close(self, one: _Offered) -> int:
        """Bytes that came under a grant, when no more can."""
        carrier, came = one.source.carrier, 0
        assert is_granting(carrier)

        def end() -> bool:
            nonlocal came
            try:
                came = carrier.close_grant(one.offer.grant, CLOSE_GRANT_SECONDS)
            except DeadlineExceeded as error:
                log.error("a load that is over keeps its blocks: %s", error)
                return False
            return True

        end_for_good(end, self._stuck)
        one.open = False
        return came


def _delivered(one: _Offered, reply: ReplyBody) -> Delivered:
    who = f"rank {tuple(one.source.rank)}"
    if isinstance(reply, Refused):
        if reply.reason in ("stale", "closed", "expired"):
            raise StaleTicket(f"{who} refuses the offer: {reply.message}")
        raise HandoverError(f"{who} refuses the offer: {reply.message}")
    if not isinstance(reply, Delivered):
        raise HandoverError(f"{who} answered an offer with a {type(reply).__name__}")
    return reply
