# SPDX-License-Identifier: Apache-2.0
"""Producer engines as a consumer rank knows them: one handshake per incarnation, when first needed.

A handshake asks the engine's directory for a welcome and checks it (model, meaning, layouts). Then
it enters the engine into this rank's topology, which plans the pair. For each producer rank that
this rank talks to there is a `Source`: where to send messages, and how to read.

    (unknown) --a load needs it----> being met: further loads wait behind it (`Meetings`)
    being met --handshake failed---> (unknown): the next load tries again
    being met --all plans made-----> met
    met --a peer was lost, or a reply was stale--> (unknown)
    met --no load for IDLE_SECONDS---------------> (unknown): it may be gone
    met --a newer incarnation is met-------------> (unknown), unless both are children of one engine
    met --a carrier was late at the handshake----> met again every `RETRY_SECONDS`, beside the loads

Connections of an engine that is forgotten are closed when the last load that uses them has ended.

Clients of the API name directories in tickets, and may name one that accepts connections and never
answers. So handshakes run on threads of their own (`Meetings`), each with a short time limit. A
directory's answer counts only for tickets that name this directory.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvferry.carriers.auto import connect
from kvferry.carriers.base import Carrier
from kvferry.errors import (
    Cancelled,
    DeadlineExceeded,
    HandoverError,
    IncompatibleError,
    KvferryError,
    StaleTicket,
)
from kvferry.handover.deadline import Deadline
from kvferry.handover.describe import (
    read_layout,
    read_model,
    read_shape,
    require_plannable,
    require_same_meaning,
)
from kvferry.handover.ticket import Ticket, supersedes
from kvferry.layout.model import require_same_cache
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.net.messages import (
    VERSION,
    EngineInfo,
    Hello,
    RankInfo,
    Reader,
    Refused,
    ReplyBody,
    Welcome,
)
from kvferry.net.rpc import Caller
from kvferry.plan.cover import everything_plan
from kvferry.plan.edge import EdgePlan
from kvferry.plan.pair import PairPlan
from kvferry.topology import EngineTransferInfo, TransferTopology
from kvferry.workers import Threads

log = logging.getLogger("kvferry")

MEET_SECONDS = 8.0  # for one handshake, if most threads are free; busy hosts took more than five
LEAST_SECONDS = 1.0  # for one handshake, if all threads are busy
SILENT_SECONDS = 5.0  # a silent address is not asked again for this long
THREADS = 64
MOST_WAITING = 16_384  # one address may use half: a burst meets an engine that has just started
MOST_SILENT = 4096  # addresses remembered
IDLE_SECONDS = 600.0  # an engine without loads is forgotten after this long
RETRY_SECONDS = 300.0  # until a carrier that did not connect in time is tried again
ASK_AGAIN_SECONDS = 0.2  # if a directory does not know all its ranks yet
STARTING = 4  # a directory whose engine is starting gets this many times the time limit


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A producer rank that this rank talks to. `plan` is None if it reads nothing from there."""

    rank: Rank
    address: str
    incarnation: str
    readers: int  # workers of our engine that talk to it
    plan: EdgePlan | None
    bases: tuple[int, ...]
    carrier: Carrier | None
    peer: Any
    why: str  # why this carrier was chosen
    late: tuple[str, ...]  # those that were tried before it and did not connect in time
    sums: tuple[str, ...]  # checksum algorithms that it offers

    def __str__(self) -> str:
        return f"rank {tuple(self.rank)}"


@dataclass(slots=True, eq=False)
class Remote:
    """A producer engine that this rank has met, and what keeps its connections open.

    `Peers` alone changes it, with its lock held.
    """

    shape: EngineShape
    pair: PairPlan
    sources: tuple[Source, ...]
    lacking: EdgePlan | None = None  # layers that only our engine has; loads zero them
    users: int = 0  # loads
    used: float = field(default_factory=time.monotonic)  # when a load last left it
    forgotten: bool = False  # its last user closes its connections
    retry_at: float = math.inf  # when to meet it once more


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One incarnation of an engine, and the directory that described it."""

    engine_id: str
    incarnation: str
    directory: str

    @classmethod
    def of(cls, ticket: Ticket) -> PeerKey:
        return cls(ticket.engine_id, ticket.incarnation, ticket.directory)

    @property
    def name(self) -> str:
        """The engine's name in our topology. Engines of two directories may have the same id, and
        our own engine may prefill what it decodes."""
        return f"{self.engine_id} at {self.directory}, {self.incarnation}"

    def voids(self, other: PeerKey) -> bool:
        """Whether this incarnation shows that the other one has ended."""
        return self.engine_id == other.engine_id and supersedes(self.incarnation, other.incarnation)


@dataclass(slots=True)
class Peers:
    """The engines that this rank has met. Any method, from any thread."""

    caller: Caller
    engine: EngineInfo  # ours
    topology: TransferTopology
    layout: RankLayout
    carriers: Sequence[Carrier]
    replica: int = 0  # of `replicas` workers with the same rank, which all load
    replicas: int = 1
    _remotes: dict[PeerKey, Remote] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def reader(self) -> Reader:
        """This rank, as producers count it."""
        engine, rank = self.engine, self.layout.rank
        number = rank.tp + self.layout.shape.tp * self.replica  # producers only count it
        return Reader(engine.engine_id, engine.incarnation, rank.pp, number)

    @property
    def engines(self) -> dict[PeerKey, Remote]:
        with self._lock:
            return dict(self._remotes)

    def using(self, ticket: Ticket) -> Remote | None:
        """The engine of a ticket, or None if it is not met. The caller must call `leave` later."""
        with self._lock:
            remote = self._remotes.get(PeerKey.of(ticket))
            if remote is not None:
                remote.users += 1
            return remote

    def meet(self, ticket: Ticket, watch: Deadline, seconds: float = MEET_SECONDS) -> Remote:
        """Like `using`, but do the handshake first if necessary. `Meetings` calls this for one
        directory at a time, so no two handshakes with an engine run at once."""
        return self.using(ticket) or self._shake_hands(ticket, None, watch, seconds)

    def wants_retry(self, remote: Remote) -> bool:
        """Whether to call `meet_again` now, because a carrier was late at the handshake."""
        with self._lock:
            now = time.monotonic()
            due = remote.retry_at <= now and not remote.forgotten
            if due:
                remote.retry_at = now + RETRY_SECONDS
        return due

    def meet_again(self, ticket: Ticket, old: Remote, seconds: float) -> None:
        """Replace an engine's connections. Loads that use the old ones go on with them."""
        watch = Deadline(time.monotonic() + seconds)
        self.leave(self._shake_hands(ticket, old, watch, seconds))

    def leave(self, remote: Remote) -> None:
        """A load has ended. Closes connections that are no longer used, of any engine."""
        now = time.monotonic()
        with self._lock:
            remote.users -= 1
            remote.used = now
            idle = [
                key
                for key, one in self._remotes.items()
                if not one.users and one.used + IDLE_SECONDS <= now
            ]
            over = self._drop(idle)
            if remote.forgotten and not remote.users:
                over.append(remote)
        _disconnect(over)

    def forget(self, remote: Remote) -> None:
        """Let the next load meet the engine again. A newer handshake with it is kept."""
        with self._lock:
            over = self._drop([key for key, one in self._remotes.items() if one is remote])
        _disconnect(over)

    def _drop(self, keys: Iterable[PeerKey]) -> list[Remote]:
        """Forget engines. Call it with the lock held.

        Returns those without a load; the caller closes their connections, without the lock.
        """
        dropped = []
        for key in keys:
            remote = self._remotes.pop(key)
            remote.forgotten = True
            self._unregister(key)
            dropped.append(remote)
        return [remote for remote in dropped if not remote.users]

    def _shake_hands(
        self, ticket: Ticket, old: Remote | None, watch: Deadline, seconds: float
    ) -> Remote:
        """Meet an engine, in the place of `old`. The caller must call `leave` later."""
        key = PeerKey.of(ticket)
        try:
            reply = ask_directory(self.caller, key.directory, self.engine, watch, seconds)
            deadline = min(watch.deadline, time.monotonic() + seconds)
            remote = self.plan_with(reply, key, deadline)
        except BaseException:
            with self._lock:
                self._unregister(key)
            raise
        remote.users = 1
        with self._lock:
            over = self._keep(key, remote, old)
        _disconnect(over)
        return remote

    def _keep(self, key: PeerKey, remote: Remote, old: Remote | None) -> list[Remote]:
        """Put an engine in the place of `old`, unless that was forgotten meanwhile.

        Call it with the lock held. Returns engines to disconnect, as `_drop` does.
        """
        if self._remotes.get(key) is not old:
            remote.forgotten = True
            self._unregister(key)
            return []
        self._remotes[key] = remote
        if any(source.late for source in remote.sources):
            remote.retry_at = time.monotonic() + RETRY_SECONDS
        over = self._drop([k for k in self._remotes if key.voids(k)])  # the older incarnations
        if old is not None:
            old.forgotten = True
            over += [] if old.users else [old]
        return over

    def _unregister(self, key: PeerKey) -> None:
        if key not in self._remotes:
            self.topology.unregister_remote_engine(key.name)

    def plan_with(self, reply: ReplyBody, key: PeerKey, deadline: float) -> Remote:
        """Turn a directory's answer into plans and connections, or raise the reason against it."""
        welcome, topology, name = require_welcome(reply, key), self.topology, key.name
        require_same_meaning(self.engine, welcome.engine)
        shape, model = read_shape(welcome.engine), read_model(welcome.engine)
        require_same_cache(model, topology.model, topology.optional_roles)
        require_plannable(topology.model, shape, self.layout.shape)
        by_rank = {Rank(info.pp_rank, info.tp_rank): info for info in welcome.ranks}
        missing = sorted(set(shape.ranks) - set(by_rank))
        if missing:
            raise HandoverError(
                f"the directory of engine {key.engine_id!r} does not know its ranks "
                f"{[tuple(r) for r in missing]} yet"
            )
        for stage in range(shape.pp):
            first, bases = read_layout(by_rank[Rank(stage, 0)], shape)
            life = welcome.engine.incarnation
            record = EngineTransferInfo.of_stage(shape, model, first, bases, life)
            topology.register_remote_engine(name, record)
            log.debug("kvferry: met %s", topology.describe(name, stage))
        pair = topology.pair_with(name)
        sources: list[Source] = []
        carriers = self.carriers
        try:
            for rank, readers in topology.partners(name).items():
                info = by_rank[rank]
                sources.append(self._source(name, info, shape, readers, carriers, deadline))
                # one that was late comes last from now on, or it could use up all time
                late = sources[-1].late
                carriers = sorted(carriers, key=lambda carrier: carrier.name in late)
        except BaseException:
            _leave(sources)
            raise
        lacking = topology.model.beyond(pair.model)
        if lacking is not None:
            log.warning(
                "kvferry: engine %r has no %s, which will be zeroed here",
                key.engine_id,
                ", ".join(f"layers {list(g.layers)} of group {g.name!r}" for g in lacking.groups),
            )
        plan = everything_plan(lacking, self.layout) if lacking else None
        return Remote(shape, pair, tuple(sources), plan)

    def _source(
        self,
        name: str,
        info: RankInfo,
        shape: EngineShape,
        readers: int,
        carriers: Sequence[Carrier],
        deadline: float,
    ) -> Source:
        rank, ours = Rank(info.pp_rank, info.tp_rank), self.layout.rank
        plan, carrier, peer, why = None, None, None, ""
        late: tuple[str, ...] = ()
        bases: list[int] = []
        if rank.tp in self.topology.source_ranks(name, rank.pp):
            layout, bases = read_layout(info, shape)
            pair = self.topology.pair_with(name)
            plan = pair.plan(pair.edge(rank, ours), layout, self.layout)
            who = f"rank {tuple(rank)} at {info.address}"
            carrier, peer, why, late = connect(info.carriers, carriers, deadline, who)
        return Source(
            rank,
            info.address,
            info.incarnation,
            readers * self.replicas,
            plan,
            tuple(bases),
            carrier,
            peer,
            why,
            late,
            info.sums,
        )


def ask_directory(
    caller: Caller, directory: str, engine: EngineInfo, watch: Deadline, seconds: float
) -> ReplyBody:
    """The directory's answer to our hello. Ask again while the engine's workers are starting. If
    there is no answer any more, the last one says best what is wrong."""
    last = min(watch.deadline, time.monotonic() + STARTING * seconds)
    reply: ReplyBody | None = None
    while True:
        now = time.monotonic()
        brief = Deadline(min(watch.deadline, now + seconds), watch.given_up)
        try:
            reply = brief.result(caller.call(directory, Hello(VERSION, engine), brief.deadline))
        except DeadlineExceeded:
            if reply is None:
                raise
            return reply
        if not _is_starting(reply) or time.monotonic() + ASK_AGAIN_SECONDS >= last:
            return reply
        watch.pause(ASK_AGAIN_SECONDS)


def require_welcome(reply: ReplyBody, key: PeerKey) -> Welcome:
    """A directory's answer to a hello, if it is a welcome to this incarnation of this engine."""
    if isinstance(reply, Refused):
        kind = HandoverError if reply.reason == "busy" else IncompatibleError  # it may be starting
        raise kind(f"the prefill engine refuses us: {reply.message}")
    if not isinstance(reply, Welcome):
        raise HandoverError(f"the directory answered a hello with a {type(reply).__name__}")
    if reply.engine.engine_id != key.engine_id:
        raise StaleTicket(
            f"the ticket is of engine {key.engine_id!r}, but {key.directory} is the directory of "
            f"engine {reply.engine.engine_id!r}; prefill again"
        )
    if reply.engine.incarnation != key.incarnation:
        raise StaleTicket(
            f"engine {key.engine_id!r} was restarted since it issued the ticket; prefill again"
        )
    return reply


def _is_starting(reply: ReplyBody) -> bool:
    """Whether a directory will know more soon, because its engine's workers are starting."""
    if not isinstance(reply, Welcome):
        return isinstance(reply, Refused) and reply.reason == "busy"
    told = {Rank(info.pp_rank, info.tp_rank) for info in reply.ranks}
    return not told >= set(read_shape(reply.engine).ranks)


def _disconnect(remotes: Iterable[Remote]) -> None:
    for remote in remotes:
        _leave(remote.sources)


def _leave(sources: Iterable[Source]) -> None:
    for source in sources:
        if source.carrier is not None:
            try:
                source.carrier.disconnect(source.peer)
            except Exception:  # the others are given back nevertheless, and the load goes on
                log.exception("a connection of %s was not given back", source.carrier.name)


class Meetings:
    """Threads for handshakes with directories that may be silent. Any method, from any thread.

    - One address is asked one question at a time; further questions wait without a thread.
    - The more threads are busy, the shorter is a question's time limit.
    - An address that was silent for a whole question is not asked again for a few seconds. Its
      waiting and new questions fail at once.
    - One address has at most half of the places to wait. Further questions are refused at once.
    """

    def __init__(self, name: str, most_seconds: float | None = None) -> None:
        """`most_seconds`: the time limit of one question; None: `MEET_SECONDS`."""
        self._threads = Threads(name, THREADS, per_lane=1, most_waiting=MOST_WAITING)
        self._most_seconds = MEET_SECONDS if most_seconds is None else most_seconds
        self._lock = threading.Lock()
        self._silent: dict[str, tuple[float, str]] = {}  # by address: until when, and why

    def submit(
        self, address: str, ask: Callable[[float], None], fail: Callable[[KvferryError], None]
    ) -> None:
        """Call `ask` on a thread with its time limit, and `fail` with the error if it fails.

        Raises the error and calls neither if the question is refused at once.
        """
        self._require_answering(address)
        self._threads.submit(partial(self._run, address, ask, fail), address)

    def close(self) -> None:
        self._threads.close()

    def _run(
        self, address: str, ask: Callable[[float], None], fail: Callable[[KvferryError], None]
    ) -> None:
        begun, most = time.monotonic(), self._most_seconds
        seconds = max(min(LEAST_SECONDS, most), most * self._threads.free / THREADS)
        try:
            self._require_answering(address)
            ask(seconds)
        except KvferryError as error:
            if time.monotonic() - begun >= seconds and not isinstance(error, Cancelled):
                with self._lock:
                    while len(self._silent) >= MOST_SILENT:
                        self._silent.pop(next(iter(self._silent)))
                    self._silent[address] = (time.monotonic() + SILENT_SECONDS, str(error))
            fail(error)
        except Exception as error:  # a bug of ours; the load still has to end
            log.exception("%s could not be asked", address)
            fail(HandoverError(f"internal error: {error!r}"))

    def _require_answering(self, address: str) -> None:
        with self._lock:
            until, why = self._silent.get(address, (0.0, ""))
            if until and until <= time.monotonic():
                del self._silent[address]
                return
        if why:
            raise HandoverError(f"{address} is not asked again for some seconds: {why}")
