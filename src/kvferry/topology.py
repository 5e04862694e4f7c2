"""Topology: who this rank is, and what it knows of remote engines."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Any, NamedTuple

from kvferry.errors import IncompatibleError, TopologyError
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.plan.assign import Edge
from kvferry.plan.pair import PairPlan, plan_pair

__all__ = ["EngineTransferInfo", "MambaEngineTransferInfo", "TransferRegion", "TransferTopology"]


# --------------------------------------------------------------------------------------------------
# Who this rank is, and which ranks of remote engines it must talk to.
#
# The names and arguments are those that vLLM's connectors use; the answers come from the planner,
# so they hold for every pair of shapes that it takes: sizes that do not divide, replicated heads,
# pipeline stages on either side, dcp. A registry keyed `(engine_id, pp_rank)` keeps what handshakes
# taught; within one incarnation of a remote engine it never changes, and a new incarnation replaces
# all of it.
#
# Without a `model` and a `shape` the topology stands on the head counts alone, with one attention
# layer (and one state layer for hybrids): enough for rank lists, not for bytes.
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TransferTopology:
    """This rank's identity and all that it knows of remote engines."""

    tp_rank: int
    tp_size: int
    block_size: int
    engine_id: str
    is_mla: bool
    is_mamba: bool
    total_num_kv_heads: int
    attn_backends: Sequence[Any] = ()
    dcp_size: int = 1
    tensor_shape: Any = None
    pp_rank: int = 0
    pp_size: int = 1
    model: CacheModel | None = None
    shape: EngineShape | None = None
    optional_roles: frozenset[str] = frozenset()  # roles whose layers one side may lack
    _engines: dict[tuple[str, int], EngineTransferInfo] = field(default_factory=dict, repr=False)
    _pairs: dict[tuple[EngineShape, bool, str], PairPlan] = field(default_factory=dict, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @classmethod
    def of(
        cls,
        engine_id: str,
        model: CacheModel,
        layout: RankLayout,
        optional_roles: frozenset[str] = frozenset(),
    ) -> TransferTopology:
        """The topology of a rank that has described its cache."""
        shape, rank = layout.shape, layout.rank
        attention = [g for g in model.groups if not g.is_state and g.role == "target"]
        first = attention[0].components[0] if attention else None
        return cls(
            tp_rank=rank.tp,
            tp_size=shape.tp,
            block_size=shape.block_size,
            engine_id=engine_id,
            is_mla=first is not None and first.sharding == "replicated",
            is_mamba=any(g.is_state for g in model.groups),
            total_num_kv_heads=first.units if first else 1,
            dcp_size=shape.dcp,
            pp_rank=rank.pp,
            pp_size=shape.pp,
            model=model,
            shape=shape,
            optional_roles=optional_roles,
        )

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size or not 0 <= self.pp_rank < self.pp_size:
            raise TopologyError(
                f"rank (pp {self.pp_rank}, tp {self.tp_rank}) is outside its engine of "
                f"pp_size={self.pp_size}, tp_size={self.tp_size}"
            )
        if self.model is None:
            self.model = stand_in_model(
                self.engine_id,
                stages=self.pp_size,
                kv_heads=self.total_num_kv_heads,
                is_mla=self.is_mla,
                is_mamba=self.is_mamba,
            )
        if self.shape is None:
            self.shape = EngineShape(
                tp=self.tp_size,
                pp=self.pp_size,
                dcp=self.dcp_size,
                block_size=self.block_size,
            )
        if (self.shape.tp, self.shape.pp) != (self.tp_size, self.pp_size):
            raise TopologyError(
                f"tp_size={self.tp_size} and pp_size={self.pp_size} contradict the shape "
                f"{self.shape.describe()}"
            )

    # What this rank is

    @property
    def rank(self) -> Rank:
        return Rank(self.pp_rank, self.tp_rank)

    @property
    def dcp_rank(self) -> int:
        return self.tp_rank % self.dcp_size

    @property
    def local_physical_heads(self) -> int:
        return max(1, self.total_num_kv_heads // self.tp_size)

    @property
    def local_replicates_kv_cache(self) -> bool:
        return self.is_mla or self.tp_size > self.total_num_kv_heads

    # The registry

    def register_remote_engine(
        self, remote_engine_id: str, info: EngineTransferInfo
    ) -> EngineTransferInfo:
        """Remember one stage of a remote engine. Registering the same again changes nothing."""
        if remote_engine_id == self.engine_id:
            raise TopologyError(
                f"engine {remote_engine_id!r} is this engine itself; register remote engines only"
            )
        self._require_same_model(remote_engine_id, info)
        if self.is_mamba:
            assert self.model is not None
            edges = self._edges(info)
            info = hybrid_reads(info, edges, self.model, self.total_num_kv_heads)
        with self._lock:
            known = self._stages(remote_engine_id)
            if any(stage.incarnation != info.incarnation for stage in known):
                self.unregister_remote_engine(remote_engine_id)
            key = (remote_engine_id, info.remote_pp_rank)
            if key in self._engines and self._engines[key] != info:
                differences = "; ".join(self._engines[key].differences(info))
                raise TopologyError(
                    f"engine {remote_engine_id!r}, stage {info.remote_pp_rank}, is registered with "
                    f"other facts ({differences}) in the same incarnation {info.incarnation!r}; a "
                    "restarted engine must come with a new incarnation"
                )
            self._engines[key] = info
        return info

    def unregister_remote_engine(self, remote_engine_id: str) -> None:
        """Forget all stages of an engine; forgetting an unknown one is no error."""
        with self._lock:
            for key in [k for k in self._engines if k[0] == remote_engine_id]:
                del self._engines[key]

    def get_engine_info(self, remote_engine_id: str, remote_pp_rank: int = 0) -> EngineTransferInfo:
        info = self._engines.get((remote_engine_id, remote_pp_rank))
        if info is None:
            stages = [stage.remote_pp_rank for stage in self._stages(remote_engine_id)]
            raise TopologyError(
                f"stage {remote_pp_rank} of engine {remote_engine_id!r} is not registered "
                f"(stages known: {stages or 'none'}); shake hands with it first"
            )
        return info

    def _stages(self, engine_id: str) -> list[EngineTransferInfo]:
        with self._lock:
            return [info for (engine, _), info in self._engines.items() if engine == engine_id]

    def _require_same_model(self, engine_id: str, info: EngineTransferInfo) -> None:
        assert self.model is not None
        ours = self.model.fingerprint()
        if info.model_fingerprint and info.model_fingerprint != ours:
            raise IncompatibleError(
                f"engine {engine_id!r} caches another model or format: its fingerprint is "
                f"{info.model_fingerprint}, ours is {ours} ({self.model.name})"
            )

    # Questions

    def handshake_target_ranks(
        self,
        remote_tp_size: int,
        remote_dcp_size: int = 1,
        remote_pp_rank: int = 0,
        remote_shape: EngineShape | None = None,
    ) -> list[int]:
        """Remote tp ranks to shake hands with, before anything of the engine is registered.

        These are the ranks this rank reads from, and its part of those that nobody reads from, so
        that every rank of the remote engine hears from someone.
        """
        shape = remote_shape or EngineShape(
            tp=remote_tp_size, dcp=remote_dcp_size, block_size=self.block_size
        )
        pair = self._pair(shape)
        stage = remote_pp_rank if remote_shape else 0
        return [source.tp for source in targets(pair, self.rank) if source.pp == stage]

    def target_remote_ranks(self, remote_engine_id: str, remote_pp_rank: int = 0) -> list[int]:
        """Remote tp ranks of a stage that this rank reads from."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return sorted({edge.src.tp for edge in self._edges(info)})

    def pair_with(self, remote_engine_id: str) -> PairPlan:
        """The plan from a registered engine to ours."""
        shape, _ = self._remote(self.get_engine_info(remote_engine_id))
        return self._pair(shape, remote_model=self.get_engine_info(remote_engine_id).remote_model)

    def partners(self, remote_engine_id: str) -> Mapping[Rank, int]:
        """Ranks of a registered engine that this rank speaks to, and how many of ours do so.

        A rank speaks to those that it reads from, and to its part of those that nobody reads from,
        so that every rank of the remote engine hears from someone.
        """
        pair = self.pair_with(remote_engine_id)
        spoken = {rank: targets(pair, rank) for rank in pair.dst.ranks}
        return {
            source: sum(source in theirs for theirs in spoken.values())
            for source in spoken[self.rank]
        }

    def remote_readers(self, remote_engine_id: str, remote_pp_rank: int = 0) -> list[int]:
        """Remote tp ranks of a stage that read from this rank, where the remote is the reader."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        shape, stage = self._remote(info)
        pair = self._pair(shape, reading=True, remote_model=info.remote_model)
        return sorted({r.tp for r in pair.readers(self.rank) if r.pp == stage})

    def is_kv_replicated(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether remote ranks share heads because there are more ranks than heads."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return info.remote_tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether remote ranks hold equal bytes: for MLA always, else where heads are shared."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id, remote_pp_rank)

    @staticmethod
    def compute_physical_blocks_per_logical(ssm_sizes: Sequence[int], block_len: int) -> int:
        """Attention blocks of `block_len` bytes that one logical block of a hybrid spans."""
        return ceil(sum(ssm_sizes) / block_len)

    def describe(self, remote_engine_id: str, remote_pp_rank: int = 0) -> str:
        """One line for logs."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        shape, _ = self._remote(info)
        layers = f"{info.start_layer}..{info.end_layer - 1}" if info.end_layer else "all"
        assert self.shape is not None
        return (
            f"engine {remote_engine_id!r} stage {remote_pp_rank} ({shape.describe()}, "
            f"layers {layers}, {info.remote_block_len} bytes a block) -> rank {tuple(self.rank)} "
            f"of {self.engine_id!r} ({self.shape.describe()}): reads from tp ranks "
            f"{self.target_remote_ranks(remote_engine_id, remote_pp_rank)}"
            + (", replicated" if self.replicates_kv_cache(remote_engine_id, remote_pp_rank) else "")
        )

    # From the planner

    def _remote(self, info: EngineTransferInfo) -> Stage:
        assert self.model is not None
        return remote_stage(info, self.model)

    def _pair(
        self, remote: EngineShape, reading: bool = False, remote_model: CacheModel | None = None
    ) -> PairPlan:
        """The plan from a remote shape to ours, or from ours to it where the remote is reading."""
        assert self.model is not None and self.shape is not None
        theirs = remote_model or self.model
        key = (remote, reading, theirs.fingerprint())
        if key not in self._pairs:
            src, dst = (self.shape, remote) if reading else (remote, self.shape)
            models = (self.model, theirs) if reading else (theirs, self.model)
            self._pairs[key] = plan_pair(
                models[0], src, dst, dst_model=models[1], optional_roles=self.optional_roles
            )
        return self._pairs[key]

    def _edges(self, info: EngineTransferInfo) -> list[Edge]:
        shape, stage = self._remote(info)
        return [
            edge
            for edge in self._pair(shape, remote_model=info.remote_model).edges
            if edge.dst == self.rank and edge.src.pp == stage
        ]


# --------------------------------------------------------------------------------------------------
# What a rank learns of a remote engine at the handshake, one record per pipeline stage.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferRegion:
    """One layer's cache on this rank: layers of one engine may have pages of different lengths."""

    layer_name: str
    layer_index: int
    base_addr: int
    block_len: int  # bytes from one block to the next
    kv_block_len: int  # bytes of a block that are used
    group_index: int = 0


@dataclass(frozen=True, slots=True)
class EngineTransferInfo:
    """A remote engine's pipeline stage. The first fields are those that vLLM's connectors use."""

    remote_tp_size: int
    remote_block_len: int  # bytes of one block of one layer on one rank
    remote_block_size: int  # tokens in a block
    remote_physical_blocks_per_logical: int
    remote_pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0  # exclusive; 0: this stage holds all layers
    remote_dcp_size: int = 1
    # what the planner needs beyond that
    incarnation: str = ""  # random per start of the engine; another one voids all that was known
    remote_shape: EngineShape | None = None  # None: as the fields above imply
    model_fingerprint: str = ""  # of the remote's CacheModel; "": not compared
    remote_model: CacheModel | None = None  # as it described itself; None: as ours

    def differences(self, other: EngineTransferInfo) -> list[str]:
        """Fields in which two records disagree, with both values."""
        return [
            f"{f.name}: {getattr(self, f.name)!r}, now {getattr(other, f.name, None)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name, None)
        ]


@dataclass(frozen=True, slots=True)
class MambaEngineTransferInfo(EngineTransferInfo):
    """A stage of a hybrid engine: which ranks to read attention from, and which states.

    `TransferTopology.register_remote_engine` works these out where they are left at their defaults.
    """

    remote_fa_source_ranks: tuple[int, ...] = ()
    remote_all_source_ranks: tuple[int, ...] = ()  # all to be read, attention or state
    remote_num_fa_reads: int = 0
    remote_num_mamba_reads: int = 0
    remote_fa_descriptor_bytes: int = 0  # read from one block of one layer of the first source
    is_remote_replicated: bool = False
    remote_physical_heads: int = 0  # heads on one remote rank


# --------------------------------------------------------------------------------------------------
# What follows from the few numbers that vLLM's connectors tell of an engine.
#
# A model where only head counts are known, an engine's shape where one of its stages is, and which
# ranks of a hybrid engine attention and states are read from.
# --------------------------------------------------------------------------------------------------

# Channels of the stand-in state of a hybrid whose model was not given: more than ranks, so that
# every rank holds some of them.
STAND_IN_CHANNELS = 1 << 16


def stand_in_model(
    engine_id: str, *, stages: int, kv_heads: int, is_mla: bool, is_mamba: bool
) -> CacheModel:
    """One attention layer a stage, and one state layer for hybrids: for rank lists, not bytes."""
    layers = tuple(range(stages))
    if is_mla:
        component = Component("latent", 1, (1,), 1, "replicated")
    else:
        component = Component("kv", kv_heads, (1,), 1)
    groups = [Group("attention", layers, (component,))]
    if is_mamba:
        state = Component("ssm", STAND_IN_CHANNELS, (1,), 1)
        groups.append(Group("state", layers, (state,), Residency("state")))
    return CacheModel(f"engine {engine_id}", tuple(groups))


class Stage(NamedTuple):
    """A remote engine's shape, and which of its stages a record is about."""

    shape: EngineShape
    number: int


def remote_stage(info: EngineTransferInfo, model: CacheModel) -> Stage:
    """As the record says; else with the layers before and after this stage in one stage each."""
    if info.remote_shape is not None:
        return Stage(info.remote_shape, info.remote_pp_rank)
    layers = model.num_layers
    number, stages = 0, [layers]
    if info.end_layer and info.end_layer <= layers:
        before, after = info.start_layer, layers - info.end_layer
        held = info.end_layer - info.start_layer
        stages = [n for n in (before, held, after) if n]
        number = 1 if before else 0
    shape = EngineShape(
        tp=info.remote_tp_size,
        pp=len(stages),
        stages=tuple(stages) if len(stages) > 1 else (),
        dcp=info.remote_dcp_size,
        block_size=info.remote_block_size,
    )
    return Stage(shape, number)


def hybrid_reads(
    info: EngineTransferInfo, edges: Iterable[Edge], model: CacheModel, kv_heads: int
) -> MambaEngineTransferInfo:
    """The record of a hybrid's stage with what is read from where; what it says itself stays."""
    states = {g.name for g in model.groups if g.is_state}
    attention: dict[int, int] = {}  # heads read, by remote rank
    every: set[int] = set()
    mamba: set[int] = set()
    for edge in edges:
        every.add(edge.src.tp)
        for share in edge.shares:
            if share.group in states:
                mamba.add(edge.src.tp)
            else:
                heads = max(attention.get(edge.src.tp, 0), share.units.size)
                attention[edge.src.tp] = heads
    physical_heads = max(1, kv_heads // info.remote_tp_size)
    first = attention[min(attention)] if attention else 0
    worked_out = {
        "remote_fa_source_ranks": tuple(sorted(attention)),
        "remote_all_source_ranks": tuple(sorted(every)),
        "remote_num_fa_reads": len(attention),
        "remote_num_mamba_reads": len(mamba),
        "remote_fa_descriptor_bytes": info.remote_block_len // physical_heads * first,
        "is_remote_replicated": info.remote_tp_size > kv_heads,
        "remote_physical_heads": physical_heads,
    }
    given = {f.name: getattr(info, f.name) for f in fields(info)}
    told = {k: v for k, v in given.items() if k not in worked_out or v}
    return MambaEngineTransferInfo(**{**worked_out, **told})


# --------------------------------------------------------------------------------------------------
# Which ranks of a remote engine a rank must speak to.
# --------------------------------------------------------------------------------------------------


def targets(pair: PairPlan, rank: Rank) -> list[Rank]:
    """Source ranks a destination rank speaks to: those it reads, and its part of those unread.

    Every source rank hears from someone, so that none waits for a word that nobody sends.
    """
    read = {edge.src for edge in pair.edges}
    ranks = pair.dst.ranks
    mine = set(pair.sources(rank))
    for number, source in enumerate(pair.src.ranks):
        if source not in read and ranks[number * len(ranks) // len(pair.src.ranks)] == rank:
            mine.add(source)
    return sorted(mine)
