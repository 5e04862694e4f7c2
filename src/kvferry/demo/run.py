# SPDX-License-Identifier: Apache-2.0
"""The demo's main process: a hand-over between two engines of different shape, every byte checked.

Every rank is a process. The main process stands for the rest: the schedulers, which assign blocks;
the prefill engine's directory; and the router, which passes tickets on.

1. The prefill ranks describe themselves to the directory. They fill the blocks of some hundred
   requests with bytes that show where they belong (cache.py). Each request gets a hold at every
   rank, and a ticket.
2. The decode ranks get only the tickets. They ask the directory for the prefill ranks, plan, claim
   the holds, read each request from the prefill ranks' memory by a carrier, and send their last
   words. This is `kvferry.handover` as engines use it.
3. The decode ranks compare every byte that arrived with its expected value, and check that all
   other bytes are unchanged.

However the demo ends, its processes end with it.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kvferry.carriers.auto import AUTO, CARRIERS
from kvferry.demo.rank import (
    LOOPBACK,
    Checked,
    DecodeRank,
    Done,
    PrefillRank,
    RankMoved,
    describe_engine,
    rank_main,
)
from kvferry.demo.work import DEMO_FROM, DEMO_MODEL, DEMO_TO, DemoWork, find_model, make_work
from kvferry.errors import DescriptionError, KvferryError, TransferError
from kvferry.handover.producer import Directory
from kvferry.handover.ticket import Ticket, prompt_digest
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.net.messages import RankInfo
from kvferry.net.rpc import Sockets
from kvferry.units import show_bytes

TRANSPORTS = (AUTO, *CARRIERS)
SILENCE_SECONDS = 60.0  # a working rank reports many times a second
FAREWELL_SECONDS = 2.0  # for a rank to end by itself, before it is killed
Progress = Callable[[str, int, int], None]  # the phase, its requests done, and all


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of a run.

    `gb_per_s` is `bytes` over `transfer_seconds`: the wall time from the tickets' arrival until the
    last decode rank had all its requests, with handshakes, claims, planning and last words.
    `copy_gb_per_s` is `bytes` over the time that the busiest rank spent reading. `method` has the
    carriers that moved bytes.
    """

    requests: int
    bytes: int
    mismatched_bytes: int
    gb_per_s: float
    method: str
    why: str  # the reason for the method
    asked: str  # the requested transport
    seconds: float  # of the whole run, with starting processes, filling and checking
    transfer_seconds: float
    copy_gb_per_s: float
    descriptors: int
    checked_bytes: int  # that arrived, and were compared with their expected values
    guarded_bytes: int  # that had to be zero or unchanged
    tokens: int
    skipped_tokens: int
    model: str
    src: str
    dst: str
    src_ranks: int
    dst_ranks: int

    @property
    def ok(self) -> bool:
        return self.mismatched_bytes == 0 and 0 < self.checked_bytes <= self.bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def run_demo(
    model_name: str = DEMO_MODEL,
    from_shape: str = DEMO_FROM,
    to_shape: str = DEMO_TO,
    *,
    min_bytes: int = 1 << 30,
    requests: int = 300,
    seed: int = 0,
    transport: str = AUTO,
    progress: Progress = lambda phase, done, total: None,
) -> DemoResult:
    """Run the whole demo."""
    if transport not in TRANSPORTS:
        raise DescriptionError(
            f"transport must be one of {', '.join(TRANSPORTS)}, found {transport!r}"
        )
    started = time.monotonic()
    src, dst = EngineShape.parse(from_shape), EngineShape.parse(to_shape)
    _require_memory(min_bytes)  # tables of far too many blocks would take minutes
    work = make_work(
        find_model(model_name), src, dst, min_bytes=min_bytes, requests=requests, seed=seed
    )
    _require_memory(
        sum(
            region.bytes
            for engine in (work.src, work.dst)
            for rank in engine.shape.ranks
            for region in RankLayout.build(work.model, engine.shape, rank, engine.blocks).regions
        )
    )
    with closing(Prefill(work)) as prefill, Ranks(work, progress) as ranks:
        ranks.start(transport)
        prefill.introduce(ranks.ask(ranks.prefill, "describe"))
        ranks.ask(ranks.everyone, "fill")
        ranks.ask(ranks.prefill, "hold", prefill.tickets)
        begun = time.monotonic()
        params = [ticket.to_params() for ticket in prefill.tickets]  # as a router passes them on
        moved: list[RankMoved] = ranks.ask(ranks.decode, "load", params)
        transfer_seconds = time.monotonic() - begun
        delivered: list[int] = ranks.ask(ranks.prefill, "delivered")
        if min(delivered) < len(work.requests):
            raise TransferError(f"of {len(work.requests)} holds, ranks closed {delivered}")
        checked: list[Checked] = ranks.ask(ranks.decode, "check")
    way, why = _reached([link for one in moved for link in one.links])
    total = sum(one.bytes for one in moved)
    return DemoResult(
        requests=len(work.requests),
        bytes=total,
        mismatched_bytes=sum(c.wrong_bytes for c in checked),
        gb_per_s=total / transfer_seconds / 1e9,
        method=way,
        why=why,
        asked=transport,
        seconds=time.monotonic() - started,
        transfer_seconds=transfer_seconds,
        copy_gb_per_s=total / max(one.read_seconds for one in moved) / 1e9,
        descriptors=sum(one.descriptors for one in moved),
        checked_bytes=sum(c.arrived_bytes for c in checked),
        guarded_bytes=sum(c.guarded_bytes for c in checked),
        tokens=sum(r.tokens for r in work.requests),
        skipped_tokens=sum(r.skip for r in work.requests),
        model=work.model.name,
        src=src.describe(),
        dst=dst.describe(),
        src_ranks=len(src.ranks),
        dst_ranks=len(dst.ranks),
    )


def _require_memory(needed: int) -> None:
    """Refuse what would end by the kernel's hand."""
    free = available_bytes()
    if needed > free:
        raise DescriptionError(
            f"the demo needs {show_bytes(needed)} of memory or more, and {show_bytes(free)} are "
            "available; choose a smaller --gib"
        )


def available_bytes() -> int:
    """Memory that new processes can use, as the kernel estimates it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10


def _reached(links: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The carriers that moved bytes, and the reason for each."""
    ways: dict[str, str] = {}
    for name, why in links:
        ways.setdefault(name, why)
    return " and ".join(ways), ". ".join(ways.values())


class Prefill:
    """The prefill engine without its ranks: its directory, and the tickets that it issues."""

    def __init__(self, work: DemoWork) -> None:
        self._engine = engine = describe_engine(work, "prefill", work.src)
        self._sockets = Sockets()
        self._directory = Directory(self._sockets, engine)
        self._directory.start()
        self.tickets = [
            Ticket(
                engine_id=engine.engine_id,
                incarnation=engine.incarnation,
                hold_id=secrets.token_hex(16),
                digest=prompt_digest(range(request.number, request.number + request.tokens)),
                tokens=request.tokens,
                host=LOOPBACK,
                port=self._directory.port,
                request_id=str(request.number),
                tp_size=work.src.shape.tp,
                pp_size=work.src.shape.pp,
            )
            for request in work.requests
        ]

    def introduce(self, ranks: list[RankInfo]) -> None:
        self._directory.set_engine(self._engine, ranks)

    def close(self) -> None:
        self._directory.close()
        self._sockets.close()


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A rank's process. The pipe ends when the process does."""

    process: BaseProcess
    pipe: Connection


class Ranks:
    """The processes of all ranks. Leaving the context ends every process, in any state.

    Every wait has a deadline. If a rank dies, hangs or fails, the demo ends with an error that
    names the rank, and all other ranks end too.
    """

    def __init__(self, work: DemoWork, progress: Progress) -> None:
        self._work, self._progress = work, progress
        self.prefill: list[Member] = []
        self.decode: list[Member] = []

    @property
    def everyone(self) -> list[Member]:
        return [*self.prefill, *self.decode]

    def start(self, transport: str) -> None:
        """Start all ranks."""
        context = multiprocessing.get_context("forkserver")
        # The fork server imports the modules of ranks once. A rank is then a fork of it.
        context.set_forkserver_preload(["kvferry.demo.rank", "kvferry.cli.main"])

        def member(kind: type[PrefillRank | DecodeRank], role: str, rank: Rank) -> Member:
            name = f"{role} rank pp{rank.pp} tp{rank.tp}"
            ours, theirs = context.Pipe()
            arguments = (kind, self._work, rank, transport, theirs)
            process = context.Process(target=rank_main, args=arguments, name=name, daemon=True)
            process.start()
            theirs.close()
            return Member(process, ours)

        for rank in self._work.src.shape.ranks:
            self.prefill.append(member(PrefillRank, "prefill", rank))
        for rank in self._work.dst.shape.ranks:
            self.decode.append(member(DecodeRank, "decode", rank))

    def ask(self, members: Sequence[Member], name: str, *arguments: Any) -> Any:
        """Let these ranks call a method. Returns their results in the same order."""
        for member in members:
            with suppress(ConnectionError):  # it has ended; its last message is read below
                member.pipe.send((name, arguments))
        by_pipe: dict[Any, Member] = {member.pipe: member for member in self.everyone}
        answers: dict[Member, Any] = {}
        reporting = self.prefill if name == "fill" else members  # decode ranks fill no requests
        done, total = 0, len(reporting) * len(self._work.requests)
        while len(answers) < len(members):
            # The pipe of a rank that has nothing to answer is ready only when the rank has ended.
            ready = wait(list(by_pipe), SILENCE_SECONDS)
            if not ready:
                silent = ", ".join(m.process.name for m in members if m not in answers)
                raise TransferError(
                    f"no word from {silent} for {SILENCE_SECONDS:.0f} s while waiting for "
                    f"{name!r}; the machine is overloaded, or a rank hangs"
                )
            for member in map(by_pipe.__getitem__, ready):
                try:
                    told = member.pipe.recv()
                except (EOFError, ConnectionError):
                    member.process.join(FAREWELL_SECONDS)
                    raise TransferError(
                        f"{member.process.name} ended with status {member.process.exitcode} during "
                        f"{name!r}; a negative status is a signal (-9: often out of memory). All "
                        "other ranks were ended too"
                    ) from None
                match told:
                    case Done(value):
                        answers[member] = value
                    case KvferryError():
                        raise told
                    case None:
                        done += 1
                        self._progress(name, done, total)
        return [answers[member] for member in members]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for member in self.everyone:
            member.pipe.close()  # an idle rank ends now
        # After a good run, ranks get time to end by themselves.
        deadline = time.monotonic() + (FAREWELL_SECONDS if kind is None else 0.0)
        for member in self.everyone:
            member.process.join(max(0.0, deadline - time.monotonic()))
            member.process.kill()
        for member in self.everyone:
            member.process.join(FAREWELL_SECONDS)
