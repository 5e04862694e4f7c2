# SPDX-License-Identifier: Apache-2.0
"""What one rank knows of remote engines, and which of their ranks it must speak to.

A consumer rank registers a remote engine after the handshake, one record for each pipeline stage.
The registry's key is `(engine_id, pp_rank)`. Within one incarnation of a remote engine a record
never changes: a different one is refused. A record of a new incarnation replaces all stages.

The planner answers every question, so the answers hold for every pair of shapes that it takes:
sizes that do not divide, replicated heads, pipeline stages on either side, dcp. Where vLLM's
connectors ask the same question, the name is theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kvferry.errors import TopologyError
from kvferry.layout.model import CacheModel
from kvferry.layout.shape import EngineShape, Rank
from kvferry.plan.pair import PairPlan, plan_pair


@dataclass(slots=True)
class TransferTopology:
    """One rank of this engine, and the remote engines that it has met."""

    engine_id: str
    model: CacheModel
    shape: EngineShape
    rank: Rank
    optional_roles: frozenset[str] = frozenset()  # roles whose layers one side may lack
    _engines: dict[tuple[str, int], EngineTransferInfo] = field(default_factory=dict, repr=False)
    _pairs: dict[tuple[EngineShape, str], PairPlan] = field(default_factory=dict, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def register_remote_engine(self, remote_engine_id: str, info: EngineTransferInfo) -> None:
        """Remember one stage of a remote engine. Registering the same again changes nothing."""
        if remote_engine_id == self.engine_id:
            raise TopologyError(
                f"engine {remote_engine_id!r} is this engine itself; register remote engines only"
            )
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

    def unregister_remote_engine(self, remote_engine_id: str) -> None:
        """Forget all stages of an engine. An unknown engine is no error."""
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

    def pair_with(self, remote_engine_id: str) -> PairPlan:
        """The plan from a registered engine to this one."""
        info = self.get_engine_info(remote_engine_id)
        return self._pair(info.shape, info.remote_model)

    def partners(self, remote_engine_id: str) -> Mapping[Rank, int]:
        """Remote ranks that this rank speaks to, each with how many of our ranks speak to it."""
        pair = self.pair_with(remote_engine_id)
        spoken = {rank: _targets(pair, rank) for rank in pair.dst.ranks}
        return {
            source: sum(source in theirs for theirs in spoken.values())
            for source in spoken[self.rank]
        }

    def handshake_target_ranks(self, remote_tp_size: int, remote_dcp_size: int = 1) -> list[int]:
        """The tp ranks of `partners`, for an engine of one stage that is not registered yet."""
        remote = EngineShape(
            tp=remote_tp_size, dcp=remote_dcp_size, block_size=self.shape.block_size
        )
        return [source.tp for source in _targets(self._pair(remote), self.rank)]

    def target_remote_ranks(self, remote_engine_id: str, remote_pp_rank: int = 0) -> list[int]:
        """Remote tp ranks of a stage that this rank reads from."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        sources = self._pair(info.shape, info.remote_model).sources(self.rank)
        return sorted(source.tp for source in sources if source.pp == remote_pp_rank)

    def describe(self, remote_engine_id: str, remote_pp_rank: int = 0) -> str:
        """One line for logs."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        layers = f"{info.start_layer}..{info.end_layer - 1}" if info.end_layer else "all"
        return (
            f"engine {remote_engine_id!r} stage {remote_pp_rank} ({info.shape.describe()}, "
            f"layers {layers}, {info.remote_block_len} bytes a block) -> rank {tuple(self.rank)} "
            f"of {self.engine_id!r} ({self.shape.describe()}): reads from tp ranks "
            f"{self.target_remote_ranks(remote_engine_id, remote_pp_rank)}"
        )

    def _stages(self, engine_id: str) -> list[EngineTransferInfo]:
        with self._lock:
            return [info for (engine, _), info in self._engines.items() if engine == engine_id]

    def _pair(self, remote: EngineShape, remote_model: CacheModel | None = None) -> PairPlan:
        """The plan from a remote shape to ours, made once."""
        theirs = remote_model or self.model
        key = (remote, theirs.fingerprint())
        if key not in self._pairs:
            self._pairs[key] = plan_pair(
                theirs,
                remote,
                self.shape,
                dst_model=self.model,
                optional_roles=self.optional_roles,
            )
        return self._pairs[key]


@dataclass(frozen=True, slots=True)
class EngineTransferInfo:
    """One pipeline stage of a remote engine, as it described itself at the handshake.

    The fields down to `remote_dcp_size` are those that vLLM's connectors use.
    """

    remote_tp_size: int
    remote_block_len: int  # bytes of one block of one layer on one rank
    remote_block_size: int  # tokens in a block
    remote_physical_blocks_per_logical: int
    remote_pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0  # exclusive; 0: this stage holds all layers
    remote_dcp_size: int = 1
    incarnation: str = ""  # random for each start of the engine
    remote_shape: EngineShape | None = None  # None: one stage, with the sizes above
    remote_model: CacheModel | None = None  # as the engine described it; None: as ours

    @property
    def shape(self) -> EngineShape:
        """The shape of the whole engine."""
        return self.remote_shape or EngineShape(
            tp=self.remote_tp_size, dcp=self.remote_dcp_size, block_size=self.remote_block_size
        )

    def differences(self, other: EngineTransferInfo) -> list[str]:
        """Fields in which two records disagree, with both values."""
        return [
            f"{f.name}: {getattr(self, f.name)!r}, now {getattr(other, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


def _targets(pair: PairPlan, rank: Rank) -> list[Rank]:
    """Source ranks that a destination rank speaks to.

    It speaks to the ranks that it reads from. The source ranks that no rank reads from are shared
    out among the destination ranks, so that every source rank hears from at least one of them.
    """
    read = {edge.src for edge in pair.edges}
    ranks = pair.dst.ranks
    mine = set(pair.sources(rank))
    for number, source in enumerate(pair.src.ranks):
        if source not in read and ranks[number * len(ranks) // len(pair.src.ranks)] == rank:
            mine.add(source)
    return sorted(mine)
