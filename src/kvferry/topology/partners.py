"""Which ranks of a remote engine a rank must speak to."""

from __future__ import annotations

from kvferry.layout.shape import Rank
from kvferry.plan.pair import PairPlan


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
