"""Packed transfers over a library: gathered at the source, moved slot by slot, scattered.

A transfer's parts, none longer than a slot, are shared by a few lanes. Each lane has a connection
to the peer's desk (desk.py) and a slot of this side's staging memory, so that one lane's bytes
move while another one's are gathered or scattered. Where either side has no slot free, a part goes
directly. A transfer that fails gives its slots back, on both sides, unless its library says that
bytes may still arrive: then they are retired. A desk that was told to apply a slot does so,
whatever becomes of the transfer: that is waited for, and where its end is not seen, bytes may still
arrive too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from kvferry.errors import ProtocolError
from kvferry.transport.cost import Choice
from kvferry.transport.desk import Say
from kvferry.transport.desk_visit import Busy, Visit
from kvferry.transport.foreign_peer import LANES_PER_TRANSFER, ForeignPeer, follow
from kvferry.transport.iovec import joined
from kvferry.transport.jobs import Job, share
from kvferry.transport.memory import Memory
from kvferry.transport.regions import Arrays, slices
from kvferry.transport.slots import Slot, Slots


class Mover(Protocol):
    """A carrier, as packed transfers use it."""

    def move_direct(self, job: Job, peer: ForeignPeer, part: Arrays, *, reading: bool) -> None:
        """In batches, each in its turn."""

    def move_batch(self, job: Job, peer: ForeignPeer, part: Arrays, *, reading: bool) -> None:
        """One batch; whose turn it is."""


class Packer:
    """Moves transfers of one carrier, or parts of them."""

    def __init__(self, slots: Slots, choice: Choice, mover: Mover) -> None:
        self._slots, self.choice, self._mover = slots, choice, mover
        self.memory: Memory | None = None  # set with the regions, by who owns them

    def split(self, peer: ForeignPeer, copies: Arrays) -> tuple[list[Arrays], list[Arrays]]:
        """What is cheaper to move directly, and what packed, window by window."""
        if not peer.packs or self.choice.packing == "direct":
            return [copies], []
        direct: list[Arrays] = []
        packed: list[Arrays] = []
        for window in copies.windows():
            some = window.without_empty()
            if len(some):
                apart = len(some) - int(np.count_nonzero(follow(some)))
                mode = self.choice.mode(apart, int(some.length.sum()))
                (packed if mode == "packed" else direct).append(some)
        return direct, packed

    def move(self, job: Job, peer: ForeignPeer, packed: list[Arrays], *, reading: bool) -> None:
        if not packed:
            return
        most = min(self._slots.slot_bytes, peer.endpoint.slot_bytes)
        parts = itertools.chain.from_iterable(slices(window, most) for window in packed)
        lanes = _Lanes(peer, job)
        with job.woken_by(lanes.abort):
            share(
                job,
                parts,
                lambda part, _: self._part(lanes, part, reading),
                peer.helpers,
                LANES_PER_TRANSFER - 1,
            )

    def _part(self, lanes: _Lanes, part: Arrays, reading: bool) -> None:
        slot = self._slots.take()
        if slot is not None:
            done = False
            try:
                done = self._through(lanes, slot, part, reading)
            except Busy:
                pass
            except BaseException:
                if slot.number in lanes.lost:
                    self._slots.retire(slot)
                else:
                    self._slots.give_back(slot)
                raise
            self._slots.give_back(slot)
            if done:
                return
        self._mover.move_direct(lanes.job, lanes.peer, part, reading=reading)

    def _through(self, lanes: _Lanes, slot: Slot, part: Arrays, reading: bool) -> bool:
        """Move a part through a slot on each side; false where the peer has none free."""
        memory, peer, job = self.memory, lanes.peer, lanes.job
        assert memory is not None
        count = int(part.length.sum())
        runs, lengths = joined(part.src if reading else part.dst, part.length)
        what = Say.GATHER if reading else Say.LEND
        with lanes.visit() as visit:
            try:
                there = _address(peer, visit.ask(what, runs, lengths, lanes.check), count)
            except Busy:
                return False
            if not reading:
                memory.gather(part.src, part.length, slot.bytes)
            ends = (there, slot.address) if reading else (slot.address, there)
            try:
                with peer.turn(job):
                    self._mover.move_batch(job, peer, _one(*ends, count), reading=reading)
            except BaseException:
                if job.late_bytes:
                    lanes.lost.add(slot.number)
                raise
            visit.say(Say.RETURN if reading else Say.APPLY)
            if reading:
                memory.scatter(slot.bytes, part.dst, part.length)  # while the desk answers
            visit.done(lanes.check)
        return True


class _Lanes:
    """The connections to a peer's desk that one transfer uses now."""

    def __init__(self, peer: ForeignPeer, job: Job) -> None:
        self.peer, self.job = peer, job
        self._used: set[Visit] = set()
        self.lost: set[int] = set()  # numbers of our slots that the library may still write to

    def check(self) -> None:
        self.job.checkpoint()
        self.peer.require_usable()

    @contextlib.contextmanager
    def visit(self) -> Iterator[Visit]:
        visit = self.peer.take_visit()
        self._used.add(visit)
        try:
            self.check()  # after it can be ended: a cancel comes either before or after
            yield visit
        except BaseException:
            self._used.discard(visit)
            if not visit.close(writing=self.job.late_bytes):
                self.job.late_bytes = True  # the desk may still scatter
            raise
        self._used.discard(visit)
        self.peer.put_visit(visit)

    def abort(self) -> None:
        """From any thread."""
        for visit in list(self._used):
            visit.abort()


def _address(peer: ForeignPeer, offset: int, count: int) -> int:
    """Where a slot begins, in the peer's address space."""
    begin, size = peer.endpoint.staging
    if not 0 <= offset <= size - count:
        raise ProtocolError(
            f"the peer lends {count} bytes at {offset} of a staging memory of {size} bytes"
        )
    return begin + offset


def _one(src: int, dst: int, count: int) -> Arrays:
    return Arrays(*(np.array([n], dtype=np.int64) for n in (src, dst, count)))
