# SPDX-License-Identifier: Apache-2.0
"""The hit: how much of a sequence the pool holds, and in which layouts.

Each group of layers has its own need. Full attention needs every token up to the hit. A window or a
chunk needs the blocks that the next token still reads. A recurrent state needs the one state at
exactly that token. The hit is the longest prefix for which all of this exists.

Several layouts may hold parts of a sequence. A run is taken from the layout that reaches furthest.
So a conversation that moved between engines of different shapes is read from all their layouts.

This is arithmetic on small arrays with one value per unit of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from kvferry.layout.model import Residency
from kvferry.pool.store import Bools, Ints


@dataclass(frozen=True, slots=True)
class Need:
    """What the reading engine keeps of one group."""

    group: str
    residency: Residency  # full where the reader keeps every block, also of windows and chunks
    block_tokens: int  # of the reader

    @property
    def last_needs_more(self) -> bool:
        """Whether computing a sequence's last token needs more than computing the next one."""
        kind, span = self.residency.kind, self.residency.span
        if kind == "window":
            return (span - 1) % self.block_tokens == 0
        return kind != "full"


@dataclass(frozen=True, slots=True)
class PoolReader:
    """The facts about the reading engine on which its hits depend."""

    needs: tuple[Need, ...]
    align_tokens: int  # a hit is a multiple of this
    layout_id: str = ""  # preferred where it reaches as far as any other
    leaves_last: bool = True  # the last token is never loaded; else the engine computes it again

    def most_tokens(self, count: int) -> int:
        """The longest possible hit of a sequence of `count` tokens."""
        return count - self.leaves_last


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Which blocks of one group the pool has in one layout, from the first block on."""

    layout_id: str
    group: str
    block_tokens: int
    exists: Bools


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one group that come from one layout. For a state: the state at `stop`."""

    layout_id: str
    group: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Hit:
    """`tokens` are in the pool. `segments` say where those that the reader lacks come from."""

    tokens: int = 0
    segments: tuple[Segment, ...] = ()


def longest_hit(
    reader: PoolReader, held: Sequence[Held], most_tokens: int, computed: int = 0
) -> Hit:
    """The longest hit of at most `most_tokens`.

    computed  leading tokens that the reader has already
    """
    needs, align_tokens = reader.needs, reader.align_tokens
    most = most_tokens // align_tokens * align_tokens
    if most <= computed or not needs:
        return Hit()
    unit = align_tokens
    for h in held:
        unit = gcd(unit, h.block_tokens)
    unit = gcd(unit, computed)
    units = most // unit
    covers = {need.group: _covers(need, held, unit, units) for need in needs}
    ends = np.arange(align_tokens, most + 1, align_tokens, dtype=np.int64)
    ends = ends[ends > computed]
    good = np.ones(len(ends), dtype=bool)
    for need in needs:
        cover = np.zeros(units, dtype=bool)
        for one in covers[need.group].values():
            cover |= one
        if need.residency.kind == "state":
            good &= cover[ends // unit - 1]
            continue
        lacking = np.concatenate(([0], np.cumsum(~cover)))
        starts = np.maximum(_needed_from(need, ends), computed)
        good &= lacking[ends // unit] == lacking[np.minimum(starts, ends) // unit]
    if not good.any():
        return Hit()
    tokens = int(ends[np.flatnonzero(good)[-1]])
    segments: list[Segment] = []
    for need in needs:
        start = max(int(_needed_from(need, np.asarray([tokens], dtype=np.int64))[0]), computed)
        segments += _segments(need, covers[need.group], unit, start, tokens, reader.layout_id)
    return Hit(tokens, tuple(segments))


def _needed_from(need: Need, ends: Ints) -> Ints:
    """First token of the blocks that the reader needs for each hit length."""
    span = need.residency.span
    match need.residency.kind:
        case "window":
            first = np.maximum(0, ends - span + 1)
        case "chunk":
            first = ends // span * span
        case _:
            first = np.zeros_like(ends)
    # The reader fills and hashes whole blocks.
    found: Ints = first // need.block_tokens * need.block_tokens
    return found


def _covers(need: Need, held: Sequence[Held], unit: int, units: int) -> dict[str, Bools]:
    """By layout: which units of the sequence it has. For a state: at which units' ends."""
    found: dict[str, Bools] = {}
    for h in held:
        if h.group != need.group:
            continue
        per = h.block_tokens // unit
        exists = np.zeros(-(-units // per), dtype=bool)
        count = min(len(exists), len(h.exists))
        exists[:count] = h.exists[:count]
        if need.residency.kind == "state":
            cover = np.zeros(units, dtype=bool)
            ends = (np.flatnonzero(exists) + 1) * per - 1
            cover[ends[ends < units]] = True
        else:
            cover = np.repeat(exists, per)[:units]
        found[h.layout_id] = cover
    return found


def _segments(
    need: Need, covers: Mapping[str, Bools], unit: int, start: int, stop: int, preferred: str
) -> list[Segment]:
    if need.residency.kind == "state":
        at = stop // unit - 1
        holders = [name for name, cover in covers.items() if cover[at]]
        name = preferred if preferred in holders else holders[0]
        return [Segment(name, need.group, stop, stop)]
    reach = {name: _run_ends(cover) for name, cover in covers.items()}
    segments = []
    here, last = start // unit, stop // unit
    while here < last:
        name = max(reach, key=lambda n: (int(reach[n][here]), n == preferred, n))
        end = min(int(reach[name][here]), last)
        segments.append(Segment(name, need.group, here * unit, end * unit))
        here = end
    return segments


def _run_ends(cover: Bools) -> Ints:
    """For each unit, the end of its run of covered units; the unit itself if it is not covered."""
    gaps = np.where(cover, len(cover), np.arange(len(cover)))
    return np.minimum.accumulate(gaps[::-1])[::-1]


def covered_prefix(held: Sequence[Held], layout_id: str) -> int:
    """Leading tokens that one layout has in all groups."""
    ends = [
        (len(h.exists) if h.exists.all() else int(np.argmin(h.exists))) * h.block_tokens
        for h in held
        if h.layout_id == layout_id
    ]
    return min(ends, default=0)
