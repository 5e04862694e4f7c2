"""Producers and consumers without an engine: real memory, real sockets, processes of their own.

What a producer's blocks hold and what a consumer's should is said by `kvferry.demo.cache`, which
shares no code with plans.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

import forkserver
from kvferry.carriers import make_carrier
from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.checksum import Mixed, MixingMemory, mix_on_host
from kvferry.carriers.host import HostMemory
from kvferry.carriers.null import NullCarrier
from kvferry.carriers.tcp.carrier import TcpCarrier
from kvferry.demo.cache import (
    CANARY,
    POISON,
    View,
    destination_extent,
    make_views,
    slot_entries,
    source_extent,
)
from kvferry.demo.rank import RankMemory
from kvferry.handover import push as push_module
from kvferry.handover.checksum import offered
from kvferry.handover.consumer import ConsumerRank
from kvferry.handover.describe import engine_info, rank_info
from kvferry.handover.holds import Closed, HoldOrder
from kvferry.handover.load import ConsumerStats, Load, Loaded
from kvferry.handover.peers import Peers
from kvferry.handover.producer import Directory, ProducerRank
from kvferry.handover.push import Pusher
from kvferry.handover.ticket import Ticket
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank, Span
from kvferry.net.messages import RankInfo, Welcome
from kvferry.net.rpc import Sockets
from waiting import PATIENCE_SECONDS, wait_until

LOOPBACK = "127.0.0.1"
SHORT_SECONDS = 1.5  # a load's deadline, where it is to run out
SILENT_SECONDS = 0.3  # the same, where no peer has to do anything before it
SLACK_SECONDS = 15.0  # the machine may be busy; without it, all ends within milliseconds
QUIET = "KVFERRY_PEERS_QUIET"  # set: peers in processes of their own do not log

_kv = tuple(Component(name, 12, (16,), 2, content="bf16") for name in ("k", "v"))


def _mamba2(groups: int) -> Group:
    shared: Any = "replicated" if groups == 1 else "split"
    return Group(
        "state",
        (0, 1, 3, 4),
        (
            Component("conv_x", 16, (4, 3), 2),
            Component("conv_B", groups, (8, 3), 2, shared),
            Component("conv_C", groups, (8, 3), 2, shared),
            Component("ssm", 16, (4, 8), 4),
        ),
        Residency("state"),
    )


MODELS = {
    "gqa": CacheModel("gqa", (Group("full", tuple(range(6)), _kv),)),
    "window": CacheModel(
        "window",
        (
            Group("full", (0, 2, 4), _kv),
            Group("window", (1, 3, 5), _kv, Residency("window", 40)),
        ),
    ),
    "mla": CacheModel(
        "mla",
        (
            Group(
                "latent",
                tuple(range(5)),
                (Component("latent", 1, (72,), 2, "replicated", content="bf16"),),
            ),
        ),
    ),
    # latents, and a draft of grouped heads: pages of two lengths in one cache
    "mla and a draft": CacheModel(
        "mla and a draft",
        (
            Group(
                "latent",
                tuple(range(5)),
                (Component("latent", 1, (72,), 2, "replicated", content="bf16"),),
            ),
            Group("draft", (0,), tuple(replace(c, units=4) for c in _kv), role="draft"),
        ),
    ),
    # two heads on up to eight ranks: copies that context parallelism can use
    "few heads": CacheModel(
        "few heads",
        (Group("full", tuple(range(4)), tuple(replace(c, units=2) for c in _kv)),),
    ),
    "mamba2": CacheModel("mamba2", (Group("full", (2, 5), _kv), _mamba2(groups=8))),
    "mamba2, one group": CacheModel(
        "mamba2, one group", (Group("full", (2, 5), _kv), _mamba2(groups=1))
    ),
    "delta net": CacheModel(
        "delta net",
        (
            Group("full", (3,), _kv),
            Group(
                "state",
                (0, 1, 2),
                (
                    Component("conv_q", 8, (4, 3), 2),
                    Component("conv_k", 8, (4, 3), 2),
                    Component("conv_v", 16, (4, 3), 2),
                    Component("ssm", 16, (4, 4), 4),
                ),
                Residency("state"),
            ),
        ),
    ),
    "draft": CacheModel(
        "draft",
        (
            Group("full", tuple(range(4)), _kv),
            Group(
                "draft", (0, 1), tuple(replace(c, units=4, dims=(8,)) for c in _kv), role="draft"
            ),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """An engine of these tests."""

    engine_id: str
    shape: str = "tp=1,block=16"
    model: str = "gqa"
    blocks: int = 64
    incarnation: str = "first"
    carrier: str = "local"
    secret: str | None = None
    lease_seconds: float = 60.0
    port: int = 0
    meaning: tuple[tuple[str, str], ...] = (("weights", "w1"),)
    content: str = "bf16"
    told: bool = True  # whether the directory knows the ranks from the start
    only: tuple[Rank, ...] = ()  # ranks of this process; empty: all
    gate_after: int | None = None  # transfers of a rank before its gate
    mode: Literal["pull", "push"] = "pull"
    # How a producer writes; its process is its own.
    slice_descriptors: int | None = None
    idle_seconds: float | None = None
    writes: bool = True  # whether it can
    absent: tuple[str, ...] = ()  # roles whose layers this engine does not have
    checksums: bool = False
    mixes: bool = False  # whether its memory has the checksum of a GPU's
    optional: tuple[str, ...] = ()  # roles whose layers a peer may lack

    @property
    def is_written(self) -> bool:
        """Whether producers write this consumer's blocks."""
        return self.mode == "push" and self.carrier == "tcp"

    @property
    def cache_model(self) -> CacheModel:
        model = MODELS[self.model]
        groups = tuple(
            replace(g, components=tuple(replace(c, content=self.content) for c in g.components))
            for g in model.groups
            if g.role not in self.absent
        )
        return replace(model, groups=groups)

    @property
    def engine_shape(self) -> EngineShape:
        return EngineShape.parse(self.shape)


class WrappedCarrier:
    """A real carrier, some of whose calls a test changes."""

    def __init__(self, carrier: Any) -> None:
        self._carrier = carrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)


class GatedCarrier(WrappedCarrier):
    """Transfers, after the first few, wait until the gate is open."""

    def __init__(self, carrier: Any, after: int) -> None:
        super().__init__(carrier)
        self._left = after
        self.gate, self.reached = threading.Event(), threading.Event()

    def read(self, peer: Any, copies: Any) -> Any:
        self._pass()
        return self._carrier.read(peer, copies)

    def write_granted(self, peer: Any, copies: Any, grant: bytes) -> Any:
        self._pass()
        return self._carrier.write_granted(peer, copies, grant)

    def shut(self, after: int) -> None:
        self._left = after
        self.gate.clear()
        self.reached.clear()

    def _pass(self) -> None:
        if self._left <= 0:
            self.reached.set()
            assert self.gate.wait(2 * PATIENCE_SECONDS)
        self._left -= 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: what it is, and where it lies on both sides."""

    number: int
    tokens: int
    src_first: int = 1  # block that its last block has; ids descend
    dst_first: int = 1
    skip: int = 0

    def tables(self, spec: Spec, first: int, source: Spec | None = None) -> list[list[int]]:
        """Block ids of each group; `source` is given for a destination."""
        shape, tables = spec.engine_shape, []
        for group in spec.cache_model.groups:
            if source is None:
                extent = source_extent(group, shape, self.tokens)
            else:
                extent = destination_extent(
                    group, source.engine_shape, shape, self.tokens, self.skip
                )
            count = extent.blocks
            ids = list(range(first + count - 1, first - 1, -1))
            tables.append([0] * extent.first_held + ids[extent.first_held :])
            first += count if shape.overlay else 0  # one pool for all groups
        return tables

    def key(self, model: CacheModel, view: View) -> tuple[int, ...]:
        group = model.groups.index(view.group)
        return (self.number, group, view.group.components.index(view.component))


class MixingHostMemory(HostMemory, MixingMemory):
    """Host memory that has the checksum of a GPU's."""

    def mix(self, address: Any, length: Any) -> Mixed:
        return mix_on_host(self, address, length)


@dataclass(slots=True)
class Rack:
    """Memory of one rank."""

    spec: Spec
    rank: Rank
    layout: RankLayout
    memory: RankMemory
    views: list[View]
    carrier: Any

    @classmethod
    def make(cls, spec: Spec, rank: Rank, fill: int) -> Rack:
        model, shape = spec.cache_model, spec.engine_shape
        layout = RankLayout.build(model, shape, rank, spec.blocks)
        memory = RankMemory(layout)
        views = make_views(model, layout, memory.regions)
        for view in views:
            view.write(np.arange(spec.blocks), fill)
        carrier: Any = NullCarrier()
        if spec.carrier != "null":
            carrier = make_carrier(spec.carrier, secret=spec.secret, host=LOOPBACK)
        if spec.gate_after is not None:
            carrier = GatedCarrier(carrier, spec.gate_after)
        carrier.register(memory_regions(layout, memory))
        return cls(spec, rank, layout, memory, views, carrier)

    def host_memory(self) -> HostMemory:
        kind = MixingHostMemory if self.spec.mixes else HostMemory
        return kind(memory_regions(self.layout, self.memory))

    def fill(self, prompt: Prompt) -> None:
        tables = prompt.tables(self.spec, prompt.src_first)
        model, shape = self.spec.cache_model, self.spec.engine_shape
        for view in self.views:
            extent = source_extent(view.group, shape, prompt.tokens)
            blocks = Span(extent.first_held, extent.blocks)
            ids = np.asarray(tables[model.groups.index(view.group)])[blocks.start :]
            entries = slot_entries(view, shape, self.rank.tp, blocks, extent.entries)
            view.write(ids, POISON, prompt.key(model, view), entries)

    def wrong_bytes(self, prompts: list[Prompt], source: Spec, free_byte: int = CANARY) -> int:
        """Bytes that are not as they should be after loading these, and nothing else.

        `free_byte` is what all other blocks hold; -1: anything.
        """
        model, shape = self.spec.cache_model, self.spec.engine_shape
        wrong = 0
        for view in self.views:
            index, written = model.groups.index(view.group), []
            for prompt in prompts:
                extent = destination_extent(
                    view.group, source.engine_shape, shape, prompt.tokens, prompt.skip
                )
                blocks = Span(extent.first_loaded, extent.blocks)
                table = prompt.tables(self.spec, prompt.dst_first, source)[index]
                ids = np.asarray(table, dtype=np.int64)[blocks.start :]
                entries = slot_entries(view, shape, self.rank.tp, blocks, extent.entries)
                if view.group.role in source.absent:
                    wrong += view.wrong(ids, 0)
                else:
                    wrong += view.wrong(ids, 0, prompt.key(model, view), entries)
                written.append(ids)
            if shape.overlay:  # blocks of other groups lie in the same memory
                written = [
                    np.asarray(table, dtype=np.int64)
                    for prompt in prompts
                    for table in prompt.tables(self.spec, prompt.dst_first, source)
                ]
            used = np.concatenate(written) if written else np.zeros(0, dtype=np.int64)
            free = np.setdiff1d(np.arange(self.spec.blocks), used)
            wrong += view.wrong(free, free_byte) if free_byte >= 0 else 0
        return wrong


def memory_regions(layout: RankLayout, memory: RankMemory) -> list[MemoryRegion]:
    bases = memory.bases.tolist()
    return [MemoryRegion(b, r.bytes) for b, r in zip(bases, layout.regions, strict=True)]


def _is_counted(thread: str) -> bool:
    """Pools keep their threads, and start one more where none is idle yet: their size is bounded,
    but not told by what they had to do."""
    kept = ("kvferry-load", "kvferry-push", "kvferry-names")
    return "kvferry" in thread and not thread.startswith(kept)


class Gates:
    """Stand before the racks of whoever moves the bytes."""

    racks: list[Rack]

    def census(self) -> dict[str, int]:
        """What this process has that could leak. Peers in other processes are not in it."""
        gc.collect()
        return {
            "threads": sum(_is_counted(thread.name) for thread in threading.enumerate()),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "grants": sum(
                len(rack.carrier.server.grants)
                for rack in self.racks
                if isinstance(rack.carrier, TcpCarrier)
            ),
            **self.counts(),
        }

    def counts(self) -> dict[str, int]:
        raise NotImplementedError

    def resident_bytes(self) -> int:
        """Without what the allocator merely keeps."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def limit_descriptors(self, most: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def wait_at_gate(self) -> None:
        for rack in self.racks:
            assert rack.carrier.reached.wait(PATIENCE_SECONDS)

    def open_gate(self) -> None:
        for rack in self.racks:
            rack.carrier.gate.set()


class Producer(Gates):
    """An engine that holds blocks; all its ranks in this process."""

    def __init__(self, spec: Spec) -> None:
        if spec.slice_descriptors is not None:
            push_module.SLICE_DESCRIPTORS = spec.slice_descriptors
        if spec.idle_seconds is not None:
            push_module.IDLE_SECONDS = spec.idle_seconds
        self.spec = spec
        self.sockets = Sockets(spec.secret)
        self.engine = engine_info(
            spec.engine_id,
            spec.incarnation,
            spec.cache_model,
            spec.engine_shape,
            dict(spec.meaning),
        )
        self.racks: list[Rack] = []
        self.ranks: list[ProducerRank] = []
        self.infos: list[RankInfo] = []
        self.pushers: list[Pusher] = []
        for rank in spec.only or spec.engine_shape.ranks:
            rack = Rack.make(spec, rank, POISON)
            server = ProducerRank(
                self.sockets,
                f"{spec.incarnation}-{rank.pp}-{rank.tp}",
                lease_seconds=spec.lease_seconds,
                pusher=self._pusher(rack) if spec.writes else None,
                memory=rack.host_memory(),
            )
            server.start()
            self.racks.append(rack)
            self.ranks.append(server)
            self.infos.append(
                rank_info(
                    rack.layout,
                    rack.memory.bases.tolist(),
                    f"{LOOPBACK}:{server.port}",
                    server.incarnation,
                    {spec.carrier: rack.carrier.endpoint()},
                    offered(rack.host_memory()),
                )
            )
        self.directory = Directory(self.sockets, self.engine, port=spec.port)
        self.directory.start()
        if spec.told:
            self.tell(self.infos)

    def _pusher(self, rack: Rack) -> Pusher:
        bases = rack.memory.bases.tolist()
        made = Pusher(self.engine, self.spec.cache_model, rack.layout, bases, [rack.carrier])
        self.pushers.append(made)
        return made

    def wrap_carriers(self, wrap: Callable[[Any], Any]) -> list[Any]:
        """Put something between each rank and the carrier that it writes with."""
        writing: list[Any] = [pusher for pusher in self.pushers if pusher._carrier is not None]
        for pusher in writing:
            pusher._carrier = wrap(pusher._carrier)
        return [pusher._carrier for pusher in writing]

    def tell(self, infos: list[RankInfo] | None = None) -> None:
        self.directory.set_engine(self.engine, self.infos if infos is None else infos)

    def ticket(self, prompt: Prompt, hold_id: str = "") -> Ticket:
        return make_ticket(self.spec, self.directory.port, prompt, hold_id)

    def fill(self, prompt: Prompt) -> None:
        for rack in self.racks:
            rack.fill(prompt)

    def open(self, prompt: Prompt, hold_id: str = "", ranks: Sequence[int] = ()) -> None:
        tables = prompt.tables(self.spec, prompt.src_first)
        ticket = self.ticket(prompt, hold_id)
        for server in [self.ranks[i] for i in ranks] or self.ranks:
            server.open_hold(
                HoldOrder(ticket.hold_id, ticket.request_id, ticket.digest, prompt.tokens, tables)
            )

    def withdraw(self, hold_id: str) -> None:
        for server in self.ranks:
            server.withdraw(hold_id)

    def flush(self) -> None:
        """Until the servers have done what they were told so far."""
        for server in self.ranks:
            done = threading.Event()
            server.submit(done.set)
            assert done.wait(PATIENCE_SECONDS)

    def closed(self) -> list[list[Closed]]:
        return [server.take_closed() for server in self.ranks]

    def counters(self) -> list[dict[str, int]]:
        return [dict(server.counters) for server in [*self.ranks, self.directory]]

    def welcome(self) -> Welcome:
        return Welcome(self.engine, self.infos)

    def parked(self) -> int:
        return sum(server.parked_claims for server in self.ranks)

    def open_holds(self) -> int:
        return sum(server.open_holds for server in self.ranks)

    def pushes(self) -> list[int]:
        """Writes that are queued or under way, by rank."""
        return [len(pusher._pushes) for pusher in self.pushers]

    def counts(self) -> dict[str, int]:
        return {
            "holds": self.open_holds(),
            "parked": self.parked(),
            "pushes": sum(self.pushes()),
        }

    def descriptions(self) -> tuple[int, list[RankInfo]]:
        return self.directory.port, self.infos

    def close(self) -> None:
        for part in (self.directory, *self.ranks, *(rack.carrier for rack in self.racks)):
            part.close()
        self.sockets.close()


def make_ticket(spec: Spec, port: int, prompt: Prompt, hold_id: str = "") -> Ticket:
    return Ticket(
        engine_id=spec.engine_id,
        incarnation=spec.incarnation,
        hold_id=hold_id or f"hold-{prompt.number}",
        digest=f"digest-{prompt.number}",
        tokens=prompt.tokens,
        host=LOOPBACK,
        port=port,
        request_id=f"prompt-{prompt.number}",
    )


class Consumer(Gates):
    """An engine that loads; all its ranks in this process."""

    def __init__(self, spec: Spec, source: Spec) -> None:
        self.spec, self.source = spec, source
        self.sockets = Sockets(spec.secret)
        engine = engine_info(
            spec.engine_id,
            spec.incarnation,
            spec.cache_model,
            spec.engine_shape,
            dict(spec.meaning),
        )
        self.engine = engine
        self.racks = [Rack.make(spec, rank, CANARY) for rank in spec.engine_shape.ranks]
        self.ranks = [
            ConsumerRank(
                self.sockets,
                engine,
                spec.cache_model,
                rack.layout,
                rack.memory.bases.tolist(),
                [rack.carrier],
                zero=rack.host_memory().zero,
                checked=rack.host_memory() if spec.checksums else None,
                mode=spec.mode,
                optional_roles=frozenset(spec.optional),
            )
            for rack in self.racks
        ]
        self._done: dict[str, dict[int, Loaded]] = {}
        self._waiting: list[Callable[[str], None]] = []

    def known(self, rank: int = 0) -> Peers:
        """The engines that a rank has met."""
        return self.ranks[rank]._loading.peers

    def start(
        self,
        ticket: Ticket,
        prompt: Prompt,
        *,
        seconds: float = PATIENCE_SECONDS,
        keep_open: bool = False,
        request_id: str = "",
        fails: str = "",
        waits: bool = False,
    ) -> str:
        """`waits`: the load begins, or fails, with `begin`."""
        request_id = request_id or f"load-{prompt.number}"
        tables = prompt.tables(self.spec, prompt.dst_first, self.source)
        load = Load(
            request_id, ticket, tuple(tuple(t) for t in tables), prompt.skip, seconds, keep_open
        )
        self._waiting = [rank.accept(load) for rank in self.ranks]
        if not waits:
            self.begin(fails)
        return request_id

    def begin(self, fails: str = "") -> None:
        for begin in self._waiting:
            begin(fails)

    def wait(self, *request_ids: str, seconds: float = 2 * PATIENCE_SECONDS) -> list[list[Loaded]]:
        """What each rank reports of each load; every report must come once."""
        until = time.monotonic() + seconds
        while True:
            self._collect()
            if all(len(self._done.get(r, {})) == len(self.ranks) for r in request_ids):
                return [[one for _, one in sorted(self._done.pop(r).items())] for r in request_ids]
            assert time.monotonic() < until, f"loads {request_ids} did not end: {self._done}"
            time.sleep(0.005)

    def load(self, ticket: Ticket, prompt: Prompt, **options: Any) -> list[Loaded]:
        return self.wait(self.start(ticket, prompt, **options))[0]

    def pending(self, request_id: str) -> bool:
        self._collect()
        return len(self._done.get(request_id, {})) < len(self.ranks)

    def finished(self) -> dict[str, list[Loaded]]:
        """Loads that all ranks have reported since the last call."""
        self._collect()
        whole = [r for r, reports in self._done.items() if len(reports) == len(self.ranks)]
        return {r: [one for _, one in sorted(self._done.pop(r).items())] for r in whole}

    def _collect(self) -> None:
        for number, rank in enumerate(self.ranks):
            for loaded in rank.take_done():
                reports = self._done.setdefault(loaded.request_id, {})
                assert number not in reports, f"{loaded} was reported twice"
                reports[number] = loaded

    def stats(self) -> list[ConsumerStats]:
        return [rank.stats() for rank in self.ranks]

    def counts(self) -> dict[str, int]:
        return {
            "abandoned": sum(one.abandoned_now for one in self.stats()),
            "quarantined": sum(one.quarantined_blocks for one in self.stats()),
        }

    def cancel(self, request_id: str) -> None:
        for rank in self.ranks:
            rank.cancel(request_id)

    def release(self, ticket: Ticket, outcome: Any = "not needed") -> None:
        for rank in self.ranks:
            rank.release(ticket, outcome)

    def wrong_bytes(self, *prompts: Prompt) -> int:
        """Bytes of these prompts that are not right, and of other blocks that were touched."""
        return sum(rack.wrong_bytes(list(prompts), self.source) for rack in self.racks)

    def wrong_bytes_of(self, *prompts: Prompt) -> int:
        """The same, of these prompts alone."""
        return sum(rack.wrong_bytes(list(prompts), self.source, -1) for rack in self.racks)

    def close(self) -> None:
        for part in (*self.ranks, *(rack.carrier for rack in self.racks)):
            part.close()
        self.sockets.close()


# --- processes -----------------------------------------------------------------------------------


class Crowd:
    """Several consumers in one process."""

    def __init__(self, specs: Sequence[Spec], source: Spec) -> None:
        self.members = [Consumer(spec, source) for spec in specs]

    def load_all(
        self, work: Sequence[Sequence[tuple[Ticket, Prompt]]], seconds: float
    ) -> tuple[list[str], int, float]:
        """All loads of all members at once: their errors, wrong bytes, and seconds."""
        begun = time.monotonic()
        started = [
            [member.start(ticket, prompt, seconds=seconds) for ticket, prompt in loads]
            for member, loads in zip(self.members, work, strict=True)
        ]
        errors = [
            said(one)
            for member, ids in zip(self.members, started, strict=True)
            for loaded in member.wait(*ids, seconds=seconds)
            for one in loaded
            if one.error
        ]
        spent = time.monotonic() - begun
        wrong = sum(
            member.wrong_bytes(*(prompt for _, prompt in loads))
            for member, loads in zip(self.members, work, strict=True)
        )
        return errors, wrong, spent

    def close(self) -> None:
        for member in self.members:
            member.close()


def said(loaded: Loaded) -> str:
    """The class of a load's error, and its message; empty if the load is good."""
    assert not loaded.error.startswith(loaded.kind or " "), "the class leads the message"
    return f"{loaded.kind}: {loaded.error}" if loaded.error else ""


def error_of(loaded: Sequence[Loaded]) -> str:
    """Of all ranks; empty if all loads are good."""
    return " / ".join(filter(None, map(said, loaded)))


def _serve(kind: str, arguments: tuple[Any, ...], pipe: Connection) -> None:
    """A process: makes a peer and calls its methods as told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.environ.get(QUIET):
        logging.getLogger("kvferry").setLevel(logging.CRITICAL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    kinds: dict[str, Any] = {"producer": Producer, "consumer": Consumer, "crowd": Crowd}
    if kind == "captured":
        from captured import CapturedProducer

        kinds[kind] = CapturedProducer
    elif kind == "registered":
        from registered import Host

        kinds[kind] = Host
    peer: Any = kinds[kind](*arguments)
    pipe.send(peer.descriptions() if kind in ("producer", "captured") else None)
    with contextlib.suppress(EOFError):
        while True:
            name, values, options = pipe.recv()
            try:
                pipe.send((True, getattr(peer, name)(*values, **options)))
            except Exception as error:
                pipe.send((False, repr(error)))
            if name == "close":
                return


def _end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@dataclass(slots=True)
class Child:
    """A peer in a process of its own."""

    process: Any
    pipe: Connection
    spec: Spec
    port: int = 0
    infos: list[RankInfo] = field(default_factory=list)

    @classmethod
    def start(cls, kind: str, spec: Spec, *more: Any) -> Child:
        here, there = forkserver.context.Pipe()
        process = forkserver.context.Process(
            target=_serve, args=(kind, (spec, *more), there), daemon=True
        )
        process.start()
        there.close()
        child = cls(process, here, spec)
        assert here.poll(PATIENCE_SECONDS), "the peer did not start"
        told = here.recv()
        if told is not None:
            child.port, child.infos = told
        return child

    def ask(self, name: str, *values: Any, **options: Any) -> Any:
        self.pipe.send((name, values, options))
        assert self.pipe.poll(PATIENCE_SECONDS), f"the peer did not answer {name}"
        fine, value = self.pipe.recv()
        assert fine, value
        return value

    def wait_at_gate(self) -> None:
        self.ask("wait_at_gate")

    def open_gate(self) -> None:
        self.ask("open_gate")

    def ticket(self, prompt: Prompt, hold_id: str = "") -> Ticket:
        return make_ticket(self.spec, self.port, prompt, hold_id)

    def hold(self, prompt: Prompt, hold_id: str = "") -> Ticket:
        """Fill a prompt's blocks and open its hold."""
        self.ask("fill", prompt)
        self.ask("open", prompt, hold_id)
        return self.ticket(prompt, hold_id)

    def closed(self, holds: int, seconds: float = PATIENCE_SECONDS) -> list[list[Closed]]:
        """What each rank reports, when each has closed that many holds."""
        until = time.monotonic() + seconds
        found: list[list[Closed]] = []
        while True:
            fresh = self.ask("closed")
            found = [a + b for a, b in zip(found or [[] for _ in fresh], fresh, strict=True)]
            if all(len(one) >= holds for one in found):
                return found
            assert time.monotonic() < until, f"holds stayed open: {found}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            # The kernel stops the threads when one of them takes the signal. On a busy machine the
            # others go on until then, and may answer everything that a load asks.
            wait_until(self._stands_still, what="the peer did not stop")

    def _stands_still(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        self.process.join(PATIENCE_SECONDS)

    def stop(self) -> None:
        """Ask it to end, and see that it does so by itself."""
        if self.process.is_alive():
            self.ask("close")
            self.process.join(PATIENCE_SECONDS)
            assert self.process.exitcode == 0
        self.pipe.close()


@contextlib.contextmanager
def producer(spec: Spec) -> Iterator[Child]:
    child = Child.start("producer", spec)
    try:
        yield child
        if child.process.is_alive():
            child.stop()
    finally:
        if child.process.is_alive():
            child.kill()
        child.pipe.close()


@contextlib.contextmanager
def consumer(spec: Spec, source: Spec, *, alone: bool = True) -> Iterator[Consumer]:
    """In this process; its threads and sockets must be gone soon after it is closed.

    Not `alone`: others come and go meanwhile, so that nothing can be said of these.
    """
    threads, sockets = set(threading.enumerate()), _sockets()
    made = Consumer(spec, source)
    try:
        yield made
    finally:
        made.close()
    until = time.monotonic() + PATIENCE_SECONDS
    while alone:
        new = [t.name for t in threading.enumerate() if t not in threads]
        # the threads that look up names belong to the process
        left = [name for name in new if "kvferry" in name and "kvferry-names" not in name]
        if not left and _sockets() <= sockets:
            return
        assert time.monotonic() < until, f"{left} and {_sockets() - sockets} sockets stayed"
        time.sleep(0.01)


def _sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(entry.readlink()).startswith("socket:")
    return found


def start_and_hold(p: Child, d: Child | Consumer, prompt: Prompt) -> str:
    """Start a load, and open its hold once the claims wait for it: the lease begins only then.

    On a busy machine, a load may take longer than a short lease to get that far.
    """
    load: str = d.ask("start", p.ticket(prompt), prompt) if isinstance(d, Child) else ""
    if isinstance(d, Consumer):
        load = d.start(p.ticket(prompt), prompt)
    wait_until(lambda: p.ask("parked") == len(p.infos))
    p.hold(prompt)
    return load


@contextlib.contextmanager
def side_by_side(*sources: Spec, target: Spec) -> Iterator[tuple[Any, ...]]:
    """Producers and a consumer that all share this process, in this order."""
    with contextlib.ExitStack() as stack:
        made: list[Any] = []
        for spec in sources:
            made.append(Producer(spec))
            stack.callback(made[-1].close)
        made.append(Consumer(target, sources[0]))
        stack.callback(made[-1].close)
        yield tuple(made)


def hold(producer: Producer, prompt: Prompt) -> Ticket:
    """A ticket for a prompt that was computed just now."""
    producer.fill(prompt)
    producer.open(prompt)
    return producer.ticket(prompt)
