"""Who this rank is, and which ranks of remote engines it must talk to.

The names and arguments are those that vLLM's connectors use; the answers come from the planner, so
they hold for every pair of shapes that it takes: sizes that do not divide, replicated heads,
pipeline stages on either side, dcp. A registry keyed `(engine_id, pp_rank)` keeps what handshakes
taught; within one incarnation of a remote engine it never changes, and a new incarnation replaces
all of it.

Without a `model` and a `shape` the topology stands on the head counts alone, with one attention
layer (and one state layer for hybrids): enough for rank lists, not for bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from kvferry.errors import IncompatibleError, TopologyError
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.plan.assign import Edge
from kvferry.plan.pair import PairPlan, plan_pair
from kvferry.topology.implied import Stage, hybrid_reads, remote_stage, stand_in_model
from kvferry.topology.info import EngineTransferInfo
from kvferry.topology.partners import targets


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
