"""The engines that a consumer rank has met: one handshake per incarnation, made when first needed.

A handshake has a short time of its own (`meetings`), far less than a load: its directory may be
somebody who takes connections and says nothing. Loads that need the same engine at the same time
share one handshake. A handshake that failed is made again by the next load; an engine whose peers
were lost is forgotten, and met again. So is one that nothing was loaded from for a while: it may be
gone, and its successor has another name. Its connections are given back when the last load that
uses them has left.

What a directory says counts for the tickets that name this directory: a ticket that tells another
is met there, whatever is known of an engine of the same name. A new incarnation of an engine voids
those before it, but for children of the same engine, which live side by side.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
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
from kvferry.handover.ticket import Ticket, are_siblings
from kvferry.layout.model import CacheModel, require_same_cache
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.net.messages import VERSION, EngineInfo, Hello, RankInfo, Refused, ReplyBody, Welcome
from kvferry.net.names import is_loopback
from kvferry.net.rpc import Caller
from kvferry.plan.cover import everything_plan
from kvferry.plan.edge import EdgePlan
from kvferry.plan.pair import PairPlan
from kvferry.topology import EngineTransferInfo, TransferTopology
from kvferry.workers import Threads

# --------------------------------------------------------------------------------------------------
# A remote engine as a consumer rank knows it: one handshake per incarnation, all plans kept.
#
# The directory's welcome is checked (model, meaning, layouts), and the engine is entered into this
# rank's topology, which plans the pair and says whom this rank speaks to. For each of these there
# is a `Source`: whom to ask, and how to read from it.
# --------------------------------------------------------------------------------------------------

log = logging.getLogger("kvferry")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A producer rank that this rank must speak to; `plan` is None where it reads nothing there."""

    rank: Rank
    address: str
    incarnation: str
    readers: int  # ranks of our engine that speak to it
    plan: EdgePlan | None
    bases: tuple[int, ...]
    carrier: Carrier | None
    peer: Any
    sums: tuple[str, ...]  # checksums that it makes


@dataclass(frozen=True, slots=True, eq=False)
class Remote:
    engine: EngineInfo
    shape: EngineShape
    pair: PairPlan
    sources: tuple[Source, ...]
    lacking: EdgePlan | None = None  # layers that only we have, to be zeroed; None: there are none

    def describe(self) -> str:
        """One line for logs: who it is, and what is read from which of its ranks."""
        read = [
            f"{tuple(source.rank)} over {source.carrier.name}"
            for source in self.sources
            if source.carrier is not None
        ]
        return (
            f"engine {self.engine.engine_id} ({self.shape.describe()}, incarnation "
            f"{self.engine.incarnation}): reads from ranks {', '.join(read) or 'none'}; speaks to "
            f"{len(self.sources)}"
        )


def knows_all_ranks(welcome: ReplyBody) -> bool:
    """Whether an engine can be met, or refused, already: its workers may still be starting."""
    if not isinstance(welcome, Welcome):
        return not (isinstance(welcome, Refused) and welcome.reason == "busy")
    told = {Rank(info.pp_rank, info.tp_rank) for info in welcome.ranks}
    return told >= set(read_shape(welcome.engine).ranks)


def meet(
    welcome: ReplyBody,
    ticket: Ticket,
    ours: EngineInfo,
    topology: TransferTopology,
    layout: RankLayout,
    carriers: Sequence[Carrier],
    deadline: float,
    name: str = "",
) -> Remote:
    """Turn a directory's answer into plans and connections, or refuse it with the reason.

    `name` is what this rank's topology calls the engine, where it is not the engine's id.
    """
    if isinstance(welcome, Refused):
        raise IncompatibleError(f"the prefill engine refuses us: {welcome.message}")
    if not isinstance(welcome, Welcome):
        raise HandoverError(f"the directory answered a hello with a {type(welcome).__name__}")
    if welcome.engine.engine_id != ticket.engine_id:
        raise StaleTicket(
            f"the ticket is of engine {ticket.engine_id!r}, but {ticket.directory} is the "
            f"directory of engine {welcome.engine.engine_id!r}; prefill again"
        )
    if welcome.engine.incarnation != ticket.incarnation:
        raise StaleTicket(
            f"engine {welcome.engine.engine_id!r} was restarted since it issued the ticket; "
            "prefill again"
        )
    require_same_meaning(ours, welcome.engine)
    shape, model = read_shape(welcome.engine), read_model(welcome.engine)
    require_same_cache(model, topology.model, topology.optional_roles)
    require_plannable(topology.model, shape, layout.shape)
    by_rank = {Rank(info.pp_rank, info.tp_rank): info for info in welcome.ranks}
    missing = sorted(set(shape.ranks) - set(by_rank))
    if missing:
        raise HandoverError(
            f"engine {welcome.engine.engine_id!r} has not told of its ranks "
            f"{[tuple(r) for r in missing]} yet"
        )
    name = name or topology_name(topology, ticket.engine_id)
    register(topology, name, welcome.engine, model, shape, by_rank)
    pair = topology.pair_with(name)
    sources: list[Source] = []
    try:
        for source, readers in topology.partners(name).items():
            info = by_rank[source]
            sources.append(_source(pair, info, layout, shape, readers, carriers, deadline))
    except BaseException:
        disconnect(sources)
        raise
    lacking = topology.model.beyond(pair.model)
    if lacking is not None:
        log.warning(
            "kvferry: engine %r has no %s, which will be zeroed here",
            welcome.engine.engine_id,
            ", ".join(f"layers {list(g.layers)} of group {g.name!r}" for g in lacking.groups),
        )
    plan = everything_plan(lacking, layout) if lacking else None
    return Remote(welcome.engine, shape, pair, tuple(sources), plan)


def disconnect(sources: Iterable[Source]) -> None:
    """Give the connections to these back."""
    for source in sources:
        if source.carrier is not None:
            source.carrier.disconnect(source.peer)


def topology_name(topology: TransferTopology, engine_id: str) -> str:
    """What a topology calls an engine; its id, unless it is our own."""
    # an engine may prefill and decode the same request: to the topology, that is another one
    return f"{engine_id} itself" if engine_id == topology.engine_id else engine_id


def register(
    topology: TransferTopology,
    name: str,
    engine: EngineInfo,
    model: CacheModel,
    shape: EngineShape,
    by_rank: Mapping[Rank, RankInfo],
) -> None:
    """Enter a remote engine into the topology, stage by stage."""
    for stage in range(shape.pp):
        parts = by_rank[Rank(stage, 0)].parts
        layers = shape.stage_layers(model, stage)
        attention = [g for g in model.groups if not g.is_state]
        block, kernel = shape.entries(attention[0]) if attention else (1, 1)
        topology.register_remote_engine(
            name,
            EngineTransferInfo(
                remote_tp_size=shape.tp,
                remote_block_len=parts[0].page_bytes if parts else 0,
                remote_block_size=shape.block_size,
                remote_physical_blocks_per_logical=block // kernel,
                remote_pp_rank=stage,
                start_layer=layers.start,
                end_layer=layers.stop,
                remote_dcp_size=shape.dcp,
                incarnation=engine.incarnation,
                remote_shape=shape,
                remote_model=model,
            ),
        )
        log.debug("kvferry: met %s", topology.describe(name, stage))


def _source(
    pair: PairPlan,
    info: RankInfo,
    layout: RankLayout,
    shape: EngineShape,
    readers: int,
    carriers: Sequence[Carrier],
    deadline: float,
) -> Source:
    rank = Rank(info.pp_rank, info.tp_rank)
    plan, carrier, peer = None, None, None
    bases: list[int] = []
    if rank in pair.sources(layout.rank):
        remote_layout, bases = read_layout(info, shape)
        plan = pair.plan(pair.edge(rank, layout.rank), remote_layout, layout)
        who = f"rank {tuple(rank)} at {info.address}"
        carrier, peer = connect(info.carriers, carriers, deadline, who)
    return Source(
        rank,
        info.address,
        info.incarnation,
        readers,
        plan,
        tuple(bases),
        carrier,
        peer,
        info.sums,
    )


# --------------------------------------------------------------------------------------------------
# Asking servers that clients of the API name, and that this process may never have heard of.
#
# Whoever names a server may lie: it may take a connection and say nothing. So questions have
# threads of their own, which nobody who was met before needs, and
#
# - each address is asked one question at a time; questions behind it wait without a thread;
# - the fuller the threads are, the shorter is a question's patience;
# - an address that was silent for a whole question is not asked again for a few seconds: what comes
#   for it meanwhile, and what waited, fails at once;
# - an address, or a host, gets another place to wait while it has fewer than are free, so that one
#   has half of them at most; what comes beyond that is refused at once. Loopback is one host.
# --------------------------------------------------------------------------------------------------

MEET_SECONDS = 8.0  # for a question, where few are asked; a busy host was seen to take over five
LEAST_SECONDS = 1.0  # where all threads ask
SILENT_SECONDS = 5.0  # for these, whoever was silent is not asked again
THREADS = 64
MOST_WAITING = 1024  # one host may have half: a burst of requests right after its engine's start
MOST_SILENT = 4096  # addresses remembered
ASKED_AT_ONCE = 128  # addresses of one host, whatever else waits there


class Meetings:
    """Any method, from any thread; none waits."""

    def __init__(self, name: str, most_seconds: float | None = None) -> None:
        """`most_seconds` is for one question, `MEET_SECONDS` where it is None."""
        self._threads = Threads(name, THREADS, per_lane=1)
        self._most_seconds = MEET_SECONDS if most_seconds is None else most_seconds
        self._lock = threading.Lock()
        self._waiting: Counter[str] = Counter()  # by address, by host, and all
        self._addresses: Counter[str] = Counter()  # that somebody waits for, by host
        self._silent: dict[str, tuple[float, str]] = {}  # until when, and why; by address

    def submit(
        self, address: str, ask: Callable[[float], None], fail: Callable[[KvferryError], None]
    ) -> None:
        """Call `ask` with the seconds that it has, or `fail` with why it was not called or failed.

        Raises what `fail` would get, and calls neither, where that is known at once.
        """
        self._require_answering(address)
        host = address.rpartition(":")[0]
        keys = (address, "this host" if is_loopback(host) else f"host {host}", "")
        with self._lock:
            free = MOST_WAITING - self._waiting[""]
            # a few silent ones at its host do not keep an address from being asked
            first = not self._waiting[address] and self._addresses[keys[1]] < ASKED_AT_ONCE
            if not free or (not first and max(map(self._waiting.__getitem__, keys[:2])) >= free):
                raise HandoverError(
                    f"{self._waiting['']} requests wait already to meet somebody, "
                    f"{self._waiting[keys[1]]} of them at the host of {address}, which may be "
                    "silent; no more are taken now"
                )
            self._addresses[keys[1]] += not self._waiting[address]
            self._waiting.update(keys)
        try:
            self._threads.submit(partial(self._run, keys, ask, fail), address)
        except BaseException:
            self._leave(keys)
            raise

    def close(self) -> None:
        self._threads.close()

    def _run(
        self,
        keys: tuple[str, ...],
        ask: Callable[[float], None],
        fail: Callable[[KvferryError], None],
    ) -> None:
        address, begun, most = keys[0], time.monotonic(), self._most_seconds
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
        except Exception as error:  # ours: whoever waits is told
            log.exception("%s could not be asked", address)
            fail(HandoverError(f"internal error: {error!r}"))
        finally:
            self._leave(keys)

    def _require_answering(self, address: str) -> None:
        with self._lock:
            until, why = self._silent.get(address, (0.0, ""))
            if until and until <= time.monotonic():
                del self._silent[address]
                return
        if why:
            raise HandoverError(f"{address} is not asked again for some seconds: {why}")

    def _leave(self, keys: tuple[str, ...]) -> None:
        with self._lock:
            for key in keys:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key]
            self._addresses[keys[1]] -= keys[0] not in self._waiting
            if not self._addresses[keys[1]]:
                del self._addresses[keys[1]]


# --------------------------------------------------------------------------------------------------

IDLE_SECONDS = 600.0  # an engine without a load is forgotten after this long
ASK_AGAIN_SECONDS = 0.2  # where a directory does not know all its ranks yet
STARTING = 4  # times as long as for a silent directory is waited for one that says it is starting


@dataclass(frozen=True, slots=True)
class PeerKey:
    """An engine's life, and who told of it."""

    engine_id: str
    incarnation: str
    directory: str

    @classmethod
    def of(cls, ticket: Ticket) -> PeerKey:
        return cls(ticket.engine_id, ticket.incarnation, ticket.directory)

    def voids(self, other: PeerKey) -> bool:
        """Whether an engine that lives this life has ended that one."""
        return (
            self.engine_id == other.engine_id
            and self.incarnation != other.incarnation
            and not are_siblings(self.incarnation, other.incarnation)
        )


@dataclass(slots=True, eq=False)
class Known:
    """An engine that was met, or is being met."""

    name: str  # in our topology
    remote: Future[Remote] = field(default_factory=Future)
    users: int = 0  # loads that have it, or wait for it
    used: float = field(default_factory=time.monotonic)  # when a load last left it
    forgotten: bool = False  # the last user gives its connections back

    @property
    def met(self) -> bool:
        return self.remote.done() and self.remote.exception() is None

    def is_of(self, remote: Remote) -> bool:
        return self.met and self.remote.result() is remote


@dataclass(slots=True)
class Peers:
    """Remote engines. Any method, from any thread."""

    caller: Caller
    engine: EngineInfo  # ours
    topology: TransferTopology
    layout: RankLayout
    carriers: Sequence[Carrier]
    _remotes: dict[PeerKey, Known] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def engines(self) -> dict[PeerKey, Known]:
        """Those that were met, or are being met; a copy."""
        with self._lock:
            return dict(self._remotes)

    def using(self, ticket: Ticket) -> Known | None:
        """The engine of a ticket, if it is met; it is kept until the caller says `leave`."""
        with self._lock:
            known = self._remotes.get(PeerKey.of(ticket))
            if known is None or not known.met:
                return None
            known.users += 1
            return known

    def meet(self, ticket: Ticket, watch: Deadline, seconds: float = MEET_SECONDS) -> Known:
        """The same for one that may have to be met first, in these seconds; one handshake for all
        that need it."""
        key = PeerKey.of(ticket)
        while True:
            with self._lock:
                known = self._remotes.get(key)
                mine = known is None
                if known is None:
                    known = self._remotes[key] = Known(self._free_name(key))
                known.users += 1
            try:
                if mine:
                    self._make_known(known, key, ticket, watch, seconds)
                else:
                    watch.result(known.remote)
                return known
            except (Cancelled, DeadlineExceeded):
                self.leave(known)
                if mine or watch.over or not known.remote.done():
                    raise
                # it was the other load that ran out of time: try ourselves
            except BaseException:
                self.leave(known)
                raise

    def _free_name(self, key: PeerKey) -> str:
        """With the lock held: what our topology calls an engine and nobody who is met beside it.

        It has the engine's id to itself, but for siblings and for what other directories tell.
        """
        taken = {
            known.name
            for other, known in self._remotes.items()
            if not (key.voids(other) and known.remote.done())
        }
        name = plain = topology_name(self.topology, key.engine_id)
        numbers = itertools.count(2)
        while name in taken:
            name = f"{plain} ({next(numbers)})"
        return name

    def _drop(self, key: PeerKey) -> Known:
        """With the lock held: forget one that nobody is meeting just now."""
        known = self._remotes.pop(key)
        known.forgotten = True
        if all(known.name != other.name for other in self._remotes.values()):
            self.topology.unregister_remote_engine(known.name)
        return known

    def leave(self, known: Known) -> None:
        now = time.monotonic()
        with self._lock:
            known.users -= 1
            known.used = now
            over = [known] if known.forgotten and known.users == 0 else self._idle(now)
        for one in over:
            _disconnect(one)

    def _idle(self, now: float) -> list[Known]:
        """With the lock held: engines that were not used for long, which are forgotten now."""
        idle = [
            key
            for key, known in self._remotes.items()
            if not known.users and known.used + IDLE_SECONDS <= now
        ]
        return [self._drop(key) for key in idle]

    def _make_known(
        self, known: Known, key: PeerKey, ticket: Ticket, watch: Deadline, seconds: float
    ) -> None:
        try:
            welcome = self._ask_directory(ticket, watch, seconds)
            remote = meet(
                welcome,
                ticket,
                self.engine,
                self.topology,
                self.layout,
                self.carriers,
                min(watch.deadline, time.monotonic() + seconds),
                known.name,
            )
        except BaseException as error:
            with self._lock:
                self._drop(key)  # the next load tries again, and may find it otherwise
                self.topology.unregister_remote_engine(known.name)
            known.remote.set_exception(error)
            raise
        with self._lock:  # a new incarnation voids all that was known of the engine
            void = [k for k, old in self._remotes.items() if key.voids(k) and old.remote.done()]
            idle = [old for old in map(self._drop, void) if not old.users]
        for old in idle:
            _disconnect(old)
        known.remote.set_result(remote)

    def _ask_directory(self, ticket: Ticket, watch: Deadline, seconds: float) -> ReplyBody:
        """Its welcome; asked again while its workers are still starting."""
        hello = Hello(VERSION, self.engine)
        last = min(watch.deadline, time.monotonic() + STARTING * seconds)
        while True:
            now = time.monotonic()
            brief = Deadline(min(watch.deadline, now + seconds), watch.given_up)
            welcome = brief.result(self.caller.call(ticket.directory, hello, brief.deadline))
            if knows_all_ranks(welcome) or time.monotonic() + ASK_AGAIN_SECONDS >= last:
                return welcome
            watch.pause(ASK_AGAIN_SECONDS)

    def forget(self, remote: Remote) -> None:
        """Meet it again next time; a handshake that was made since is kept."""
        with self._lock:
            keys = [key for key, known in self._remotes.items() if known.is_of(remote)]
            idle = [known for known in map(self._drop, keys) if not known.users]
        for known in idle:
            _disconnect(known)


def _disconnect(known: Known) -> None:
    """Give back the connections to an engine that is no more, or was lost."""
    if known.met:
        disconnect(known.remote.result().sources)
