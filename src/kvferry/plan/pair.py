# SPDX-License-Identifier: Apache-2.0
"""The plan of two engines, and how a caller uses it.

pair = plan_pair(model, EngineShape(tp=4), EngineShape(tp=8))
for edge in pair.edges:                                   # pairs of ranks, from shapes alone
    plan = pair.plan(edge, src_layout, dst_layout)        # without addresses: made once, kept
    bound = bind(plan, tokens=..., src_tables=..., ...)   # for each request
    bound.copies() or bound.batches
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.errors import CoverError
from kvferry.layout.model import CacheModel, require_same_cache
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape, Rank
from kvferry.plan.assign import Edge, assign
from kvferry.plan.cover import require_exact_cover
from kvferry.plan.edge import EdgePlan, plan_edge


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """All edges between two engines. `model` has the layers that both hold."""

    model: CacheModel
    src: EngineShape
    dst: EngineShape
    edges: tuple[Edge, ...]

    def sources(self, dst: Rank) -> tuple[Rank, ...]:
        """Source ranks that a destination rank reads from."""
        return tuple(edge.src for edge in self.edges if edge.dst == dst)

    def edge(self, src: Rank, dst: Rank) -> Edge:
        for edge in self.edges:
            if edge.src == src and edge.dst == dst:
                return edge
        raise CoverError(
            f"rank {tuple(src)} of the source sends nothing to rank {tuple(dst)} of the "
            f"destination, which reads from {[tuple(r) for r in self.sources(dst)]}"
        )

    def plan(self, edge: Edge, src: RankLayout, dst: RankLayout) -> EdgePlan:
        return plan_edge(self.model, edge, src, dst)


def plan_pair(
    model: CacheModel,
    src: EngineShape,
    dst: EngineShape,
    *,
    dst_model: CacheModel | None = None,
    optional_roles: Iterable[str] = (),
) -> PairPlan:
    """Plan two engines, or refuse them with the reason.

    Give `dst_model` if the destination described its own cache. The two models must then agree in
    everything but the layers of `optional_roles`.
    """
    common = model
    if dst_model is not None:
        roles = frozenset(optional_roles)
        require_same_cache(model, dst_model, roles)
        common = model.common(dst_model)
    edges = assign(common, src, dst)
    require_exact_cover(common, src, dst, edges)
    return PairPlan(common, src, dst, edges)
