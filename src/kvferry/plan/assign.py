# SPDX-License-Identifier: Apache-2.0
"""Edges: which source rank sends what to which destination rank, from the two shapes alone.

Layers are intersected stage by stage, units at every boundary of either side, tokens by dcp rank.

If several source ranks hold the same bytes, the demands for these bytes are put on one line,
ordered by destination rank and layer. The line is cut into equal parts, one for each holder. So
the load is even to within a layer, and a rank speaks to few others. Both engines compute the same
cuts on their own, because all of it is integer arithmetic on the two shapes.

Replicated bytes may be few beside the bytes with one holder: a Mamba layer's shared B and C, for
example, beside its heads. Such bytes come from ranks that the destination reads from anyway, so
that they need no connections of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np

from kvferry.errors import CoverError
from kvferry.layout.model import CacheModel, Component, Group
from kvferry.layout.placement import Ints
from kvferry.layout.shape import EngineShape, Rank, Span

# Entries that a group of states and a group of tokens count for when the load is spread. Both
# engines must use the same numbers.
STATE_WEIGHT_ENTRIES = 1
TOKEN_WEIGHT_ENTRIES = 4096
# Replicated bytes ride along if a stage's bytes with one holder are at least this many times as
# many. Then even the worst spread among partners adds little to the busiest rank's load.
RIDE_ALONG_PART = 16


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Components, units and layers of one group that an edge carries."""

    group: str
    components: tuple[str, ...]
    units: Span
    layers: Ints  # ordinals, ascending


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A source rank, a destination rank, and what the first sends to the second."""

    src: Rank
    dst: Rank
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class _Atom:
    """Units between two boundaries of either side, for one pair of dcp ranks."""

    components: tuple[str, ...]
    units: Span
    holders: tuple[int, ...]  # source tp ranks
    wanted_by: tuple[int, ...]  # destination tp ranks
    weight: int  # of one layer


@dataclass(frozen=True, slots=True, eq=False)
class _Demand:
    dst: Rank
    group_index: int
    layers: Ints
    atoms: tuple[_Atom, ...]

    @property
    def layer_weight(self) -> int:
        return sum(atom.weight for atom in self.atoms)

    @property
    def weight(self) -> int:
        return self.layer_weight * len(self.layers)


def assign(model: CacheModel, src: EngineShape, dst: EngineShape) -> tuple[Edge, ...]:
    """All edges between two engines that serve `model`, by destination rank, then source rank."""
    atoms = [tuple(_atoms(group, src, dst)) for group in model.groups]
    shares: dict[tuple[Rank, Rank], list[Share]] = defaultdict(list)
    dst_layers = [[dst.layers(model, g, p) for g in model.groups] for p in range(dst.pp)]
    for stage in range(src.pp):
        lines: dict[tuple[int, ...], list[_Demand]] = defaultdict(list)
        for index, group in enumerate(model.groups):
            held = src.layers(model, group, stage)
            for dst_stage in range(dst.pp):
                both = sorted(set(held) & set(dst_layers[dst_stage][index]))
                if both:
                    layers = np.asarray(both, dtype=np.int64)
                    for holders, demand in _demands(index, layers, dst_stage, atoms[index]):
                        lines[holders].append(demand)
        for holder, demand, layers in _spread(lines):
            group = model.groups[demand.group_index]
            shares[demand.dst, Rank(stage, holder)] += [
                Share(group.name, atom.components, atom.units, layers) for atom in demand.atoms
            ]
    return tuple(
        Edge(source, target, tuple(shares[target, source])) for target, source in sorted(shares)
    )


def _demands(
    index: int, layers: Ints, dst_stage: int, atoms: tuple[_Atom, ...]
) -> Iterator[tuple[tuple[int, ...], _Demand]]:
    """What each destination rank of a stage needs, with the source ranks that hold it."""
    wanted: dict[tuple[tuple[int, ...], int], list[_Atom]] = defaultdict(list)
    for atom in atoms:
        for rank in atom.wanted_by:
            wanted[atom.holders, rank].append(atom)
    for (holders, rank), mine in wanted.items():
        yield holders, _Demand(Rank(dst_stage, rank), index, layers, tuple(mine))


def _spread(
    lines: dict[tuple[int, ...], list[_Demand]],
) -> Iterator[tuple[int, _Demand, Ints]]:
    """Choose a holder for every layer of every demand on one source stage."""
    for demands in lines.values():
        demands.sort(key=lambda d: (d.dst, d.group_index))
    partners: dict[Rank, set[int]] = defaultdict(set)
    fixed_weight = 0
    for holders, demands in lines.items():
        if len(holders) == 1:
            fixed_weight += sum(d.weight for d in demands)
            for demand in demands:
                partners[demand.dst].add(holders[0])
                yield holders[0], demand, demand.layers
    for holders, demands in lines.items():
        if len(holders) == 1:
            continue
        if sum(d.weight for d in demands) * RIDE_ALONG_PART > fixed_weight:
            yield from _cut(demands, holders)
            continue
        for demand in demands:
            near = tuple(h for h in holders if h in partners[demand.dst])
            yield from _cut([demand], near or holders)


def _cut(demands: list[_Demand], holders: tuple[int, ...]) -> Iterator[tuple[int, _Demand, Ints]]:
    """Cut the line of demands at layer boundaries into equal parts, one for each holder."""
    weights = np.asarray([d.layer_weight for d in demands], dtype=np.int64)
    item_weights = np.repeat(weights, [len(d.layers) for d in demands])
    ends = np.cumsum(item_weights)
    middles = 2 * ends - item_weights  # twice the middle of each layer's part of the line
    owner = middles * len(holders) // (2 * ends[-1])
    start = 0
    for demand in demands:
        mine = owner[start : start + len(demand.layers)]
        start += len(demand.layers)
        for part in range(int(mine[0]), int(mine[-1]) + 1):
            layers = demand.layers[mine == part]
            if len(layers):
                yield holders[part], demand, layers


def _atoms(group: Group, src: EngineShape, dst: EngineShape) -> Iterator[_Atom]:
    """Cut the units of each kind of component at every boundary of either side."""
    kinds: dict[tuple[int, str], list[Component]] = defaultdict(list)
    for component in group.components:
        kinds[component.units, component.sharding].append(component)
    for components in kinds.values():
        first = components[0]
        src_spans = [src.units(group, first, r) for r in range(src.tp)]
        dst_spans = [dst.units(group, first, r) for r in range(dst.tp)]
        cuts = sorted({edge for span in src_spans + dst_spans for edge in span})
        names = tuple(c.name for c in components)
        entries = STATE_WEIGHT_ENTRIES if group.is_state else TOKEN_WEIGHT_ENTRIES
        unit_weight = entries * sum(c.unit_bytes for c in components)
        src_dcp, dst_dcp = src.dcp_for(group), dst.dcp_for(group)
        for start, stop in pairwise(cuts):
            for a in range(src_dcp):
                holders = _covering(src_spans, start, stop, a, src_dcp)
                for b in range(dst_dcp):
                    wanted = _covering(dst_spans, start, stop, b, dst_dcp)
                    if not wanted or not meet(
                        src_dcp, src.interleave, a, dst_dcp, dst.interleave, b
                    ):
                        continue
                    if not holders:
                        raise CoverError(
                            f"no source rank holds heads {start}..{stop - 1} of "
                            f"{'+'.join(names)} in group {group.name!r} for the tokens of dcp "
                            f"rank {a} of {src_dcp}: dcp shares tokens only among ranks with equal "
                            f"heads (source {src.describe()}, destination {dst.describe()})"
                        )
                    weight = unit_weight * (stop - start)
                    yield _Atom(names, Span(start, stop), holders, wanted, weight)


def _covering(spans: list[Span], start: int, stop: int, phase: int, dcp: int) -> tuple[int, ...]:
    return tuple(
        rank
        for rank, span in enumerate(spans)
        if span.start <= start and stop <= span.stop and rank % dcp == phase
    )


def meet(
    src_dcp: int,
    src_interleave: int,
    src_rank: int,
    dst_dcp: int,
    dst_interleave: int,
    dst_rank: int,
) -> bool:
    """Whether two dcp ranks have a token in common.

    Each rank holds one run of `interleave` tokens in every `dcp * interleave`. The distances from
    the source's runs to the destination's are all numbers that equal `ahead` modulo `period`.
    """
    period = gcd(src_dcp * src_interleave, dst_dcp * dst_interleave)
    ahead = (dst_rank * dst_interleave - src_rank * src_interleave) % period
    return ahead < src_interleave or period - ahead < dst_interleave
