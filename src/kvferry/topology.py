# SPDX-License-Identifier: Apache-2.0
"""The remote engines that one rank has met, and which of their ranks it must speak to.

A consumer rank registers a remote engine at the handshake, one record for each pipeline stage. The
handshake then asks which ranks to meet (`partners`), and which of them to read from
(`source_ranks`).

The registry's key is `(engine_id, pp_rank)`. Within one incarnation of a remote engine a record
never changes: a different one is refused. A record of a new incarnation replaces all stages.

The planner answers every question about ranks, so the answers hold for every pair of shapes that it
takes: sizes that do not divide, replicated heads, pipeline stages on either side, dcp. Questions
that vLLM's connectors ask too have the same names here, and the same answers where vLLM has one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from kvferry.errors import TopologyError, UnknownEngine
from kvferry.layout.model import CacheModel, Group
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.plan.pair import PairPlan, plan_pair

MOST_PAIRS = 64  # plans kept, for as many shapes and models of engines


@dataclass(slots=True)
class TransferTopology:
    """One rank of this engine, and the remote engines that it has met."""

    engine_id: str
    model: CacheModel
    shape: EngineShape
    rank: Rank
    optional_roles: frozenset[str] = frozenset()  # roles whose layers one side may lack
    _engines: dict[tuple[str, int], EngineTransferInfo] = field(default_factory=dict, repr=False)
    _pairs: dict[tuple[EngineShape, CacheModel], PairPlan] = field(default_factory=dict, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    # The registry

    def register_remote_engine(
        self, engine_id: str, info: EngineTransferInfo
    ) -> EngineTransferInfo:
        """Remember one stage of a remote engine. Registering the same again changes nothing."""
        if engine_id == self.engine_id:
            raise TopologyError(
                f"engine {engine_id!r} is this engine itself; register remote engines only"
            )
        with self._lock:
            known = self._stages(engine_id)
            if any(stage.incarnation != info.incarnation for stage in known):
                self.unregister_remote_engine(engine_id)
            key = (engine_id, info.remote_pp_rank)
            if key in self._engines and self._engines[key] != info:
                differences = "; ".join(self._engines[key].differences(info))
                raise TopologyError(
                    f"engine {engine_id!r}, stage {info.remote_pp_rank}, is registered with "
                    f"other facts ({differences}) in the same incarnation {info.incarnation!r}; a "
                    "restarted engine must come with a new incarnation"
                )
            self._engines[key] = info
        return info

    def unregister_remote_engine(self, remote_engine_id: str) -> None:
        """Forget all stages of an engine. An unknown engine is no error."""
        with self._lock:
            for key in [k for k in self._engines if k[0] == remote_engine_id]:
                del self._engines[key]

    def get_engine_info(self, remote_engine_id: str, remote_pp_rank: int = 0) -> EngineTransferInfo:
        info = self._engines.get((remote_engine_id, remote_pp_rank))
        if info is None:
            stages = [stage.remote_pp_rank for stage in self._stages(remote_engine_id)]
            raise UnknownEngine(
                f"stage {remote_pp_rank} of engine {remote_engine_id!r} is not registered "
                f"(stages known: {stages or 'none'}); shake hands with it first"
            )
        return info

    # Ranks: the planner's answers

    def pair_with(self, remote_engine_id: str, remote_pp_rank: int = 0) -> PairPlan:
        """The plan from a registered engine to this one."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return self._pair(info.shape, info.remote_model)

    def partners(self, remote_engine_id: str, remote_pp_rank: int = 0) -> Mapping[Rank, int]:
        """Remote ranks that this rank meets, each with how many of our ranks meet it.

        They are the ranks that it reads from, and its share of the ranks that none of ours reads
        from, because other ranks hold the same bytes. So every remote rank is met.
        """
        return _partners(self.pair_with(remote_engine_id, remote_pp_rank), self.rank)

    def handshake_target_ranks(self, remote_tp_size: int, remote_dcp_size: int = 1) -> list[int]:
        """The tp ranks of `partners`, for an engine of one stage that is not registered yet."""
        remote = EngineShape(
            tp=remote_tp_size, dcp=remote_dcp_size, block_size=self.shape.block_size
        )
        return [source.tp for source in _partners(self._pair(remote), self.rank)]

    def target_remote_ranks(self, remote_engine_id: str, remote_pp_rank: int = 0) -> list[int]:
        """The tp ranks of `partners` in one stage. This rank may read from some of them only."""
        stage = self.get_engine_info(remote_engine_id, remote_pp_rank).stage
        partners = self.partners(remote_engine_id, remote_pp_rank)
        return [source.tp for source in partners if source.pp == stage]

    def source_ranks(self, remote_engine_id: str, remote_pp_rank: int = 0) -> list[int]:
        """Remote tp ranks of a stage that this rank reads from."""
        stage = self.get_engine_info(remote_engine_id, remote_pp_rank).stage
        sources = self.pair_with(remote_engine_id, remote_pp_rank).sources(self.rank)
        return sorted(source.tp for source in sources if source.pp == stage)

    # Sizes

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Our ranks for each remote rank, or remote ranks for each of ours as a negative number."""
        larger, smaller = self.shape.tp, remote_tp_size
        sign = 1 if larger >= smaller else -1
        return sign * _whole("tp", max(larger, smaller), min(larger, smaller))

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Remote blocks that hold the tokens of one of ours."""
        return _whole("block size", self.shape.block_size, remote_block_size)

    def is_kv_replicated(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether remote ranks hold equal heads because there are more ranks than heads."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return any(
            component.units < info.shape.tp_for(group)
            for group in self._attention(info)
            for component in group.components
        )

    def replicates_kv_cache(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether remote ranks hold equal bytes: MLA's always, others where heads are equal."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return self.is_kv_replicated(remote_engine_id, remote_pp_rank) or any(
            c.sharding == "replicated" for g in self._attention(info) for c in g.components
        )

    def describe(self, remote_engine_id: str, remote_pp_rank: int = 0) -> str:
        """One line for logs."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        met = self.target_remote_ranks(remote_engine_id, remote_pp_rank)
        read = self.source_ranks(remote_engine_id, remote_pp_rank)
        equal = self.replicates_kv_cache(remote_engine_id, remote_pp_rank)
        return (
            f"engine {remote_engine_id!r} ({info.describe()}) -> rank {tuple(self.rank)} of "
            f"{self.engine_id!r} ({self.shape.describe()}): meets tp ranks {met}, reads from tp "
            f"ranks {read}{'; some remote ranks hold equal bytes' if equal else ''}"
        )

    def _attention(self, info: EngineTransferInfo) -> list[Group]:
        model = info.remote_model or self.model
        return [g for g in model.groups if not g.is_state and g.role == "target"]

    def _stages(self, engine_id: str) -> list[EngineTransferInfo]:
        with self._lock:
            return [info for (engine, _), info in self._engines.items() if engine == engine_id]

    def _pair(self, remote: EngineShape, remote_model: CacheModel | None = None) -> PairPlan:
        """The plan from a remote shape to ours, made once while it is kept."""
        theirs = remote_model or self.model
        key = (remote, theirs)
        pair = self._pairs.get(key)
        if pair is None:
            pair = plan_pair(
                theirs,
                remote,
                self.shape,
                dst_model=self.model,
                optional_roles=self.optional_roles,
            )
            with self._lock:
                self._pairs[key] = pair
                while len(self._pairs) > MOST_PAIRS:
                    del self._pairs[next(iter(self._pairs))]
        return pair


@dataclass(frozen=True, slots=True)
class EngineTransferInfo:
    """One pipeline stage of a remote engine, as it described itself at the handshake.

    The fields down to `remote_dcp_size` are those that vLLM's connectors use.
    """

    remote_tp_size: int
    remote_block_len: int  # bytes of one block of one layer on one rank
    remote_block_size: int  # tokens in a block
    remote_physical_blocks_per_logical: int  # of the first attention group
    remote_pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0  # exclusive; 0: this stage holds all layers
    remote_dcp_size: int = 1
    incarnation: str = ""  # random for each start of the engine
    remote_shape: EngineShape | None = None  # None: this stage alone, with the sizes above
    remote_model: CacheModel | None = None  # as the engine described it; None: as ours

    @classmethod
    def of_stage(
        cls,
        shape: EngineShape,
        model: CacheModel,
        first: RankLayout,
        bases: Sequence[int],
        incarnation: str,
    ) -> EngineTransferInfo:
        """The record of a stage, from its engine's description and its first rank's memory."""
        layers = shape.stage_layers(model, first.rank.pp)
        attention = [g for g in model.groups if not g.is_state]
        block, kernel = shape.entries(attention[0]) if attention else (1, 1)
        regions = first.transfer_regions(bases)
        return cls(
            remote_tp_size=shape.tp,
            remote_block_len=regions[0].kv_block_len if regions else 0,
            remote_block_size=shape.block_size,
            remote_physical_blocks_per_logical=block // kernel,
            remote_pp_rank=first.rank.pp,
            start_layer=layers.start,
            end_layer=layers.stop,
            remote_dcp_size=shape.dcp,
            incarnation=incarnation,
            remote_shape=shape,
            remote_model=model,
        )

    @property
    def shape(self) -> EngineShape:
        """The shape of the whole engine, or of this stage alone."""
        return self.remote_shape or EngineShape(
            tp=self.remote_tp_size, dcp=self.remote_dcp_size, block_size=self.remote_block_size
        )

    @property
    def stage(self) -> int:
        """The number of this stage in `shape`."""
        return self.remote_pp_rank if self.remote_shape else 0

    def describe(self) -> str:
        """One line for logs."""
        layers = f"{self.start_layer}..{self.end_layer - 1}" if self.end_layer else "all"
        return (
            f"remote_pp={self.remote_pp_rank} of {self.shape.describe()}, layers {layers}, "
            f"{self.remote_block_len} bytes and {self.remote_physical_blocks_per_logical} physical "
            "blocks a block"
        )

    def differences(self, other: EngineTransferInfo) -> list[str]:
        """Fields in which two records disagree, with both values."""
        return [
            f"{f.name}: {getattr(self, f.name)!r}, now {getattr(other, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


def _partners(pair: PairPlan, rank: Rank) -> dict[Rank, int]:
    """Source ranks that a destination rank meets, each with how many ranks meet it."""
    met: dict[Rank, set[Rank]] = {source: set() for source in pair.src.ranks}
    for edge in pair.edges:
        met[edge.src].add(edge.dst)
    ranks = pair.dst.ranks
    for number, readers in enumerate(met.values()):
        if not readers:  # the ranks without a reader are shared out
            readers.add(ranks[number * len(ranks) // len(met)])
    return {source: len(readers) for source, readers in met.items() if rank in readers}


def _whole(what: str, larger: int, smaller: int) -> int:
    if larger % smaller:
        raise TopologyError(
            f"{what} {smaller} must divide {larger} for a whole ratio; kvferry plans such a "
            "pair all the same, so ask for ranks instead"
        )
    return larger // smaller
