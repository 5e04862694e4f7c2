"""The demo's processes, seen from the one that started them.

Every wait has a deadline, also the last one: a rank that has died, hangs or fails ends the demo
with an error that names it, and all others with it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from kvferry.demo.memory import SharedFile
from kvferry.demo.orders import Done, Failed, Order, Progress
from kvferry.demo.rank import rank_main
from kvferry.demo.work import Work
from kvferry.errors import TransferError
from kvferry.layout.shape import Rank

SILENCE_SECONDS = 60.0  # a rank that works reports many times a second
FAREWELL_SECONDS = 2.0  # for a rank to end by itself, before it is made to


@dataclass(slots=True, eq=False)
class Member:
    """A rank's process, as the demo sees it."""

    name: str
    process: SpawnProcess
    pipe: Connection


@dataclass(slots=True, eq=False)
class Crew:
    """All ranks. Leaving the context ends every process, in whatever state it is."""

    producers: list[Member] = field(default_factory=list)
    consumers: list[Member] = field(default_factory=list)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        members = [*self.producers, *self.consumers]
        for member in members:
            member.pipe.close()  # a rank that is idle ends now
        deadline = time.monotonic() + FAREWELL_SECONDS
        for end in (SpawnProcess.terminate, SpawnProcess.kill):
            for member in members:
                if kind is None:  # all is well: no hurry
                    member.process.join(max(0.0, deadline - time.monotonic()))
                if member.process.is_alive():
                    end(member.process)
            for member in members:
                member.process.join(FAREWELL_SECONDS)
        for member in members:
            member.process.close()

    def start(self, work: Work, fault: str, files: Sequence[SharedFile]) -> None:
        for index, rank in enumerate(work.src.ranks):
            mine = list(files[index : index + 1])
            self.producers.append(_member(work, True, rank, "", mine))
        for rank in work.dst.ranks:
            broken = fault if rank == work.dst.ranks[0] else ""
            self.consumers.append(_member(work, False, rank, broken, list(files)))

    def ask(self, members: Sequence[Member], order: Order, advance: Callable[[int], None]) -> Any:
        """Give all of them an order; their answers, in the same order."""
        for member in members:
            self._send(member, order)
        answers: dict[str, Any] = {}
        everyone = [*self.producers, *self.consumers]
        while len(answers) < len(members):
            pipes = {m.pipe: m for m in members if m.name not in answers}
            ended = {m.process.sentinel: m for m in everyone}
            ready = wait([*pipes, *ended], SILENCE_SECONDS)
            if not ready:
                silent = ", ".join(m.name for m in pipes.values())
                raise TransferError(
                    f"no word from {silent} for {SILENCE_SECONDS:.0f} s while waiting for "
                    f"{order.name!r}; the machine is overloaded, or a rank hangs"
                )
            for item in ready:
                if item in ended and not ended[item].pipe.poll():
                    raise _gone(ended[item], order)
                if item not in pipes:
                    continue
                member = pipes[item]
                match self._receive(member, order):
                    case Progress(done):
                        advance(done)
                    case Done(value):
                        answers[member.name] = value
                    case Failed(error, text):
                        raise error or TransferError(f"{member.name} failed:\n{text}")
        return [answers[member.name] for member in members]

    def _send(self, member: Member, order: Order) -> None:
        try:
            member.pipe.send(order)
        except ConnectionError:
            raise _gone(member, order) from None

    def _receive(self, member: Member, order: Order) -> object:
        try:
            return member.pipe.recv()
        except (EOFError, ConnectionError):
            raise _gone(member, order) from None


def _member(
    work: Work, is_producer: bool, rank: Rank, fault: str, files: list[SharedFile]
) -> Member:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    name = f"{'producer' if is_producer else 'consumer'} pp{rank.pp} tp{rank.tp}"
    process = context.Process(
        target=rank_main,
        args=(work, is_producer, rank, fault, files, theirs),
        name=name,
        daemon=True,
    )
    process.start()
    theirs.close()
    return Member(name, process, ours)


def _gone(member: Member, order: Order) -> TransferError:
    member.process.join(FAREWELL_SECONDS)
    return TransferError(
        f"{member.name} ended with status {member.process.exitcode} during {order.name!r}; "
        "a negative status is a signal (-9: often out of memory). All other ranks were ended too"
    )
