"""What follows from the few numbers that vLLM's connectors tell of an engine.

A model where only head counts are known, an engine's shape where one of its stages is, and which
ranks of a hybrid engine attention and states are read from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import NamedTuple

from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.shape import EngineShape
from kvferry.plan.assign import Edge
from kvferry.topology.info import EngineTransferInfo, MambaEngineTransferInfo

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
