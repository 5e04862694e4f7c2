"""A remote engine as a consumer rank knows it: one handshake per incarnation, all plans kept.

The directory's welcome is checked (model, meaning, layouts), and the engine is entered into this
rank's topology, which plans the pair and says whom this rank speaks to. For each of these there is
a `Source`: whom to ask, and how to read from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import HandoverError, IncompatibleError, StaleTicket
from kvferry.layout.model import CacheModel, require_same_cache
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.p2p.describe import (
    read_layout,
    read_model,
    read_shape,
    require_plannable,
    require_same_meaning,
)
from kvferry.p2p.ticket import Ticket
from kvferry.plan.cover import everything_plan
from kvferry.plan.edge import EdgePlan
from kvferry.plan.pair import PairPlan
from kvferry.topology import EngineTransferInfo, TransferTopology
from kvferry.transport.auto import connect
from kvferry.transport.base import Carrier
from kvferry.wire.messages import EngineInfo, RankInfo, Refused, ReplyBody, Welcome

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
    assert topology.model is not None
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
