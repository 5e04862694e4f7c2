# SPDX-License-Identifier: Apache-2.0
"""The costs of a pair of engines before either runs.

`report` plans every edge and binds it for one synthetic request, so its bytes, strided runs and
descriptors are those of a real request. The lower bounds come from the shapes alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.plan.assign import Share
from kvferry.plan.bind import bind
from kvferry.plan.pair import PairPlan, plan_pair
from kvferry.plan.tokens import moved, paging_for, unloadable


@dataclass(frozen=True, slots=True, eq=False)
class EdgeReport:
    src: Rank
    dst: Rank
    bytes: int
    runs: int  # strided runs
    descriptors: int
    shares: tuple[Share, ...]

    @property
    def mean_run_bytes(self) -> float:
        return self.bytes / self.descriptors if self.descriptors else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PlanReport:
    model: str
    src: str
    dst: str
    tokens: int
    skip: int
    edges: tuple[EdgeReport, ...]
    total_bytes: int
    lower_bound_bytes: int  # that the destination ranks need, counted from the shapes
    busiest_source_bytes: int
    ideal_source_bytes: int  # busiest source, if each stage's bytes were spread evenly
    busiest_destination_bytes: int
    notes: tuple[str, ...] = ()  # for the operator

    @property
    def imbalance(self) -> float:
        """The busiest source's load, divided by the ideal load."""
        return self.busiest_source_bytes / self.ideal_source_bytes if self.total_bytes else 1.0

    def seconds(self, link_bytes_per_s: float) -> float:
        """Time on the wire if every rank has one link and all links run at once."""
        busiest = max(self.busiest_source_bytes, self.busiest_destination_bytes)
        return busiest / link_bytes_per_s

    def to_dict(self, link_bytes_per_s: float | None = None) -> dict[str, Any]:
        edges = [
            {
                **asdict(edge),
                "src": list(edge.src),
                "dst": list(edge.dst),
                "mean_run_bytes": edge.mean_run_bytes,
                "shares": [{**asdict(s), "layers": s.layers.tolist()} for s in edge.shares],
            }
            for edge in self.edges
        ]
        result = {**asdict(self), "edges": edges, "imbalance": self.imbalance}
        if link_bytes_per_s is not None:
            result["link_bytes_per_s"] = link_bytes_per_s
            result["predicted_seconds"] = self.seconds(link_bytes_per_s)
        return result


def report(
    model: CacheModel,
    src: EngineShape,
    dst: EngineShape,
    tokens: int,
    *,
    skip: int = 0,
    scattered: bool = True,
) -> PlanReport:
    """Plan a pairing and bind one request of `tokens` tokens on every edge."""
    for shape in (src, dst):
        shape.require_possible(model)
    pair = plan_pair(model, src, dst)
    src_tables, src_blocks = synthetic_tables(model, src, tokens, scattered, seed=1)
    dst_tables, dst_blocks = synthetic_tables(model, dst, tokens, scattered, seed=2)
    src_layouts = {rank: RankLayout.build(model, src, rank, src_blocks) for rank in src.ranks}
    dst_layouts = {rank: RankLayout.build(model, dst, rank, dst_blocks) for rank in dst.ranks}
    edges = []
    by_src: Counter[Rank] = Counter()
    by_dst: Counter[Rank] = Counter()
    for edge in pair.edges:
        ends = src_layouts[edge.src], dst_layouts[edge.dst]
        bound = bind(
            pair.plan(edge, *ends),
            tokens=tokens,
            skip=skip,
            src_tables=src_tables,
            dst_tables=dst_tables,
            src_bases=np.zeros(len(ends[0].regions), dtype=np.int64),
            dst_bases=np.zeros(len(ends[1].regions), dtype=np.int64),
            allow_uncacheable=True,
        )
        edges.append(
            EdgeReport(
                edge.src, edge.dst, bound.bytes, bound.entries, bound.descriptors, edge.shares
            )
        )
        by_src[edge.src] += bound.bytes
        by_dst[edge.dst] += bound.bytes
    notes = [f"from: {note}" for note in src.oddities(model)]
    notes += [f"to: {note}" for note in dst.oddities(model)]
    if why := unloadable(model, src, dst, tokens, skip):  # the source dropped blocks
        notes.append(f"not loaded but computed by the destination: {why}")
    return PlanReport(
        model=model.name,
        src=src.describe(),
        dst=dst.describe(),
        tokens=tokens,
        skip=skip,
        edges=tuple(edges),
        total_bytes=sum(edge.bytes for edge in edges),
        lower_bound_bytes=sum(needed_bytes(pair, rank, tokens, skip) for rank in dst.ranks),
        busiest_source_bytes=max(by_src.values(), default=0),
        ideal_source_bytes=_ideal(pair, by_src),
        busiest_destination_bytes=max(by_dst.values(), default=0),
        notes=tuple(notes),
    )


def synthetic_tables(
    model: CacheModel, shape: EngineShape, tokens: int, scattered: bool, seed: int
) -> tuple[list[Ints], int]:
    """Block tables for one request, with distinct ids in all groups, and the blocks they need."""
    counts = []
    for group in model.groups:
        one = group.is_state or group.residency.kind == "ring"
        span = shape.block_tokens(group) * shape.dcp_for(group)
        counts.append(1 if one else -(-tokens // span))
    first = 1 if shape.null_block == 0 else 0
    ids = np.arange(first, first + sum(counts), dtype=np.int64)
    if scattered:
        ids = np.random.default_rng(seed).permutation(ids)
    tables = np.split(ids, np.cumsum(counts)[:-1])
    return [np.ascontiguousarray(t) for t in tables], first + sum(counts)


def needed_bytes(pair: PairPlan, rank: Rank, tokens: int, skip: int) -> int:
    """Bytes that one destination rank needs for a request, from its shape alone."""
    total = 0
    for group in pair.model.groups:
        layers = len(pair.dst.layers(pair.model, group, rank.pp))
        range_ = moved(group, pair.src, pair.dst, tokens, skip, allow_uncacheable=True)
        paging = paging_for(group, pair.dst, rank.tp)
        entries = paging.local_count(range_.stop) - paging.local_count(range_.start)
        total += (
            layers
            * entries
            * sum(pair.dst.units(group, c, rank.tp).size * c.unit_bytes for c in group.components)
        )
    return total


def _ideal(pair: PairPlan, by_src: Counter[Rank]) -> int:
    """The load of the busiest rank if each stage's bytes were spread evenly over its ranks."""
    stages: Counter[int] = Counter()
    for rank, load in by_src.items():
        stages[rank.pp] += load
    return max((-(-load // pair.src.tp) for load in stages.values()), default=1) or 1
