"""A remote engine as a consumer rank knows it: one handshake per incarnation, all plans kept.

The directory's welcome is checked (model, meaning, layouts), the pair is planned, and for every
source rank that concerns this rank there is a `Source`: whom to ask, and how to read from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import HandoverError, IncompatibleError, StaleTicket
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.p2p.describe import read_layout, read_model, read_shape, require_same_meaning
from kvferry.p2p.ticket import Ticket
from kvferry.plan.edge import EdgePlan
from kvferry.plan.pair import PairPlan, plan_pair
from kvferry.topology.partners import targets
from kvferry.transport.auto import connect
from kvferry.transport.base import Carrier
from kvferry.wire.messages import EngineInfo, RankInfo, Refused, ReplyBody, Welcome


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


@dataclass(frozen=True, slots=True, eq=False)
class Remote:
    engine: EngineInfo
    shape: EngineShape
    pair: PairPlan
    sources: tuple[Source, ...]


def knows_all_ranks(welcome: ReplyBody) -> bool:
    """Whether an engine can be met, or refused, already: its workers may still be starting."""
    if not isinstance(welcome, Welcome):
        return True
    told = {Rank(info.pp_rank, info.tp_rank) for info in welcome.ranks}
    return told >= set(read_shape(welcome.engine).ranks)


def meet(
    welcome: ReplyBody,
    ticket: Ticket,
    ours: EngineInfo,
    model: CacheModel,
    layout: RankLayout,
    carriers: Sequence[Carrier],
    deadline: float,
    optional_roles: frozenset[str] = frozenset(),
) -> Remote:
    """Turn a directory's answer into plans and connections, or refuse it with the reason."""
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
    shape = read_shape(welcome.engine)
    pair = plan_pair(
        read_model(welcome.engine),
        shape,
        layout.shape,
        dst_model=model,
        optional_roles=optional_roles,
    )
    by_rank = {Rank(info.pp_rank, info.tp_rank): info for info in welcome.ranks}
    missing = sorted(set(shape.ranks) - set(by_rank))
    if missing:
        raise HandoverError(
            f"engine {welcome.engine.engine_id!r} has not told of its ranks "
            f"{[tuple(r) for r in missing]} yet"
        )
    speaking = {rank: targets(pair, rank) for rank in layout.shape.ranks}
    readers = {s: sum(s in spoken for spoken in speaking.values()) for s in shape.ranks}
    sources = tuple(
        _source(pair, by_rank[s], layout, shape, readers[s], carriers, deadline)
        for s in speaking[layout.rank]
    )
    return Remote(welcome.engine, shape, pair, sources)


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
    return Source(rank, info.address, info.incarnation, readers, plan, tuple(bases), carrier, peer)
