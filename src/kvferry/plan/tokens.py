# SPDX-License-Identifier: Apache-2.0
"""The token axis: which entries move, and how the two pagings cut them.

`moved` takes the range of entries from the residencies of both sides. `walk` cuts the range at
every block and interleave boundary of either side. It also cuts at tiles (kernel blocks), unless a
segment consists of whole tiles. So within a segment both sides have plain strides. Both functions
are arithmetic on the request's length; block ids come later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import BindError, DescriptionError
from kvferry.layout.model import CacheModel, Group
from kvferry.layout.placement import Ints
from kvferry.layout.shape import EngineShape, Span


@dataclass(frozen=True, slots=True)
class Paging:
    """How one rank pages the entries of a group."""

    block_entries: int
    tile: int = 1  # entries in a tile, whose slots are evenly spaced; 1: the whole block's are
    context: int = 1  # dcp ranks that share the entries
    context_rank: int = 0
    interleave: int = 1  # consecutive entries of one dcp rank
    ring: bool = False  # entry p lies at slot p mod block_entries of the only block

    @property
    def span(self) -> int:
        """Positions that one block covers."""
        return self.block_entries * self.context

    @property
    def step(self) -> int:
        """Every multiple of this many positions is a cut: slots in between are consecutive."""
        if self.context == 1:
            return self.block_entries
        return gcd(self.tile, self.interleave) if self.tile > 1 else self.interleave

    def holds(self, positions: Ints) -> NDArray[np.bool_]:
        held: NDArray[np.bool_] = positions // self.interleave % self.context == self.context_rank
        return held

    def local(self, positions: Ints) -> Ints:
        """Index of each position among this rank's own entries."""
        if self.ring:
            return positions % self.block_entries
        if self.context == 1:
            return positions
        chunk = positions // (self.interleave * self.context)
        return chunk * self.interleave + positions % self.interleave

    def local_count(self, stop: int) -> int:
        """How many entries before position `stop` this rank holds."""
        cycle = self.interleave * self.context
        rest = stop % cycle - self.context_rank * self.interleave
        return stop // cycle * self.interleave + min(max(rest, 0), self.interleave)


def paging_for(group: Group, shape: EngineShape, tp_rank: int, tile: int = 1) -> Paging:
    """How a rank pages a group. Give `tile` if the slots of a block are not evenly spaced."""
    block, _ = shape.entries(group)
    context = shape.dcp_for(group)
    interleave = shape.interleave if context > 1 else 1
    if interleave % group.tokens_per_entry and context > 1:
        raise DescriptionError(
            f"group {group.name!r} stores one entry per {group.tokens_per_entry} tokens, which "
            f"dcp with interleave {interleave} would split; use a multiple of it as interleave"
        )
    return Paging(
        block_entries=block,
        tile=tile,
        context=context,
        context_rank=tp_rank % context,
        interleave=max(1, interleave // group.tokens_per_entry),
        ring=group.residency.kind == "ring",
    )


def moved(
    group: Group,
    src: EngineShape,
    dst: EngineShape,
    tokens: int,
    skip: int,
    allow_uncacheable: bool = False,
) -> Span:
    """Entries to move of a request of `tokens` tokens, of which the destination has `skip`.

    For windows and chunks, every destination block with a needed token moves whole, because the
    destination hashes whole blocks. If the source has dropped the head of such a block, the request
    is refused. With `allow_uncacheable`, what is left of the block moves; no engine asks for that,
    because it would have to keep the block out of its prefix cache.
    States and rings always move: they depend on all tokens of the request.
    """
    if tokens < 1 or not 0 <= skip <= tokens:
        raise BindError(f"expected 0 <= skip <= tokens and tokens >= 1, found {skip=}, {tokens=}")
    if group.is_state:
        return Span(0, 1)
    needed = group.residency.needed_from(tokens)
    if group.residency.kind == "ring":
        for side, shape in (("source", src), ("destination", dst)):
            if shape.block_tokens(group) < group.residency.span:
                raise BindError(
                    f"group {group.name!r}: the {side}'s ring of {shape.block_tokens(group)} slots "
                    f"is shorter than the {group.residency.span} tokens that must be held"
                )
        return Span(needed, tokens)
    wanted = max(skip, _block_floor(group, dst, needed))
    held = _block_floor(group, src, needed)
    start = min(tokens, max(wanted, held))
    if start > wanted and not allow_uncacheable:
        raise BindError(
            f"group {group.name!r}: of {tokens} tokens the source keeps those from {held} on, but "
            f"the destination would fill and hash whole blocks from token {wanted} on (source "
            f"blocks of {src.block_tokens(group)}, destination blocks of "
            f"{dst.block_tokens(group)}); use source blocks that are a multiple of the "
            "destination's, or a source that keeps every block (full=1; in vLLM, "
            "--disable-hybrid-kv-cache-manager)"
        )
    per = group.tokens_per_entry
    stop = -(-tokens // per) if group.partial_entries else tokens // per
    # if no token moves, the entry that the last token is a part of does not move either
    return Span(stop if start == tokens else min(start // per, stop), stop)


def unloadable(
    model: CacheModel, src: EngineShape, dst: EngineShape, tokens: int, skip: int
) -> str:
    """The reason why `moved` refuses this request, or an empty string."""
    for group in model.groups:
        if group.residency.kind not in ("window", "chunk"):
            continue
        try:
            moved(group, src, dst, tokens, skip)
        except BindError as error:
            return str(error)
    return ""


def _block_floor(group: Group, shape: EngineShape, token: int) -> int:
    """First token of the block with `token`, or 0 on a side that keeps every block."""
    if shape.full_residency:
        return 0
    span = shape.block_tokens(group) * shape.dcp_for(group)
    return token // span * span


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of entries with consecutive slots on both sides, in ascending order of position.

    A segment is `repeats` pieces of `entries` entries, `src_step` and `dst_step` slots apart. It
    consists of whole tiles of both sides, or lies within one tile of each.
    """

    src_block: Ints
    src_slot: Ints
    dst_block: Ints
    dst_slot: Ints
    kinds: Ints  # of each segment: its row of `forms`
    forms: Ints  # (kinds, 4): entries, repeats, src_step, dst_step

    @cached_property
    def dst_heads(self) -> Ints | slice:
        """The first segment of each run of segments in one destination block."""
        if len(self.dst_block) < 2 or bool((self.dst_block[1:] != self.dst_block[:-1]).all()):
            return slice(None)
        return np.flatnonzero(np.diff(self.dst_block, prepend=-1))


# Edges of one request, and requests of one length, share a walk. A long one takes a megabyte.
@lru_cache(maxsize=16)
def walk(src: Paging, dst: Paging, span: Span) -> Segments:
    """Cut the positions of `span` at every boundary of both sides; keep those that both ranks hold.

    Callers share the arrays, so they are read-only.
    """
    found = _walk(src, dst, span)
    for array in (found.src_block, found.src_slot, found.dst_block, found.dst_slot):
        array.flags.writeable = False
    found.kinds.flags.writeable = found.forms.flags.writeable = False
    return found


def _walk(src: Paging, dst: Paging, span: Span) -> Segments:
    starts, entries = _cut(src, dst, span)
    if src.context > 1 or dst.context > 1:
        both = src.holds(starts) & dst.holds(starts)
        starts, entries = starts[both], entries[both]
    src_local, dst_local = src.local(starts), dst.local(starts)
    src_block, src_slot = np.divmod(src_local, src.block_entries)
    dst_block, dst_slot = np.divmod(dst_local, dst.block_entries)
    if (src.context > 1 or dst.context > 1) and len(starts) > 1:
        return _fold(src, dst, src_block, src_slot, dst_block, dst_slot, entries)
    lengths, kinds = _distinct(entries)
    forms = np.stack([lengths, *[np.full_like(lengths, x) for x in (1, 0, 0)]], axis=1)
    return Segments(src_block, src_slot, dst_block, dst_slot, kinds, forms)


def _cut(src: Paging, dst: Paging, span: Span) -> tuple[Ints, Ints]:
    """Starts and lengths of the pieces of `span` between the boundaries of both sides."""
    whole = whole_tiles(src, dst)
    if not whole:
        return _between(_steps(src) + _steps(dst), span)
    # only the two ends of the span are less than whole tiles
    body = Span(-(-span.start // whole) * whole, span.stop // whole * whole)
    if body.size <= 0:
        return _between(_steps(src) + _steps(dst), span)
    parts = [
        _between(_steps(src) + _steps(dst), Span(span.start, body.start)),
        _between([src.step, dst.step], body),
        _between(_steps(src) + _steps(dst), Span(body.stop, span.stop)),
    ]
    starts, entries = zip(*parts, strict=True)
    return np.concatenate(starts), np.concatenate(entries)


def whole_tiles(src: Paging, dst: Paging) -> int:
    """Entries in a tile of the side with the larger tiles, if the two tilings fit; else 0.

    They fit if one tile divides the other and both sides' blocks consist of whole tiles; with dcp,
    only if there are no tiles. Otherwise no set of even axes walks both sides.
    """
    tiles = lcm(src.tile, dst.tile)
    if tiles not in (src.tile, dst.tile):
        return 0
    if src.context > 1 or dst.context > 1:
        return 1 if tiles == 1 else 0
    return 0 if src.block_entries % tiles or dst.block_entries % tiles else tiles


def _steps(paging: Paging) -> list[int]:
    return [paging.step, paging.tile] if paging.tile > 1 else [paging.step]


def _between(steps: list[int], span: Span) -> tuple[Ints, Ints]:
    """Starts and lengths of the pieces of `span` between multiples of any of the steps."""

    def multiples(step: int) -> Ints:
        return np.arange(span.start // step * step, span.stop, step, dtype=np.int64)

    if span.size <= 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    fine, *coarser = sorted(set(steps))
    starts = multiples(fine)
    for step in coarser:
        if step % fine:
            starts = np.union1d(starts, multiples(step))
    starts = starts[max(0, int(np.searchsorted(starts, span.start, "right")) - 1) :]
    starts[0] = span.start
    return starts, np.diff(starts, append=span.stop)


def _distinct(values: Ints) -> tuple[Ints, Ints]:
    """np.unique with inverse. It does not sort equal values, which are the usual case."""
    if len(values) == 0 or bool((values == values[0]).all()):
        return values[:1].copy(), np.zeros(len(values), dtype=np.int64)
    distinct, kinds = np.unique(values, return_inverse=True)
    return distinct, kinds.astype(np.int64)


def _fold(
    src: Paging,
    dst: Paging,
    src_block: Ints,
    src_slot: Ints,
    dst_block: Ints,
    dst_slot: Ints,
    entries: Ints,
) -> Segments:
    """Fold segments that repeat at constant distances inside one tile of both sides.

    Context parallelism scatters single tokens. Folding makes a block one strided run again.
    """
    linked = entries[1:] == entries[:-1]
    for axis in (src_block, dst_block):
        linked &= axis[1:] == axis[:-1]
    for slots, tile in ((src_slot, src.tile), (dst_slot, dst.tile)):
        if tile > 1:
            linked &= slots[1:] // tile == slots[:-1] // tile
    src_step, dst_step = np.diff(src_slot), np.diff(dst_slot)
    first = np.ones(len(entries), dtype=bool)
    first[1:] = ~linked
    # a change of distance also begins a new segment
    steady = (src_step[1:] == src_step[:-1]) & (dst_step[1:] == dst_step[:-1])
    first[2:] |= linked[1:] & linked[:-1] & ~steady
    heads = np.flatnonzero(first)
    repeats = np.diff(heads, append=len(entries))
    steps = np.where(repeats > 1, np.minimum(heads, len(src_step) - 1), 0)
    table = np.stack(
        [
            entries[heads],
            repeats,
            np.where(repeats > 1, src_step[steps], 0),
            np.where(repeats > 1, dst_step[steps], 0),
        ],
        axis=1,
    )
    forms, kinds = np.unique(table, axis=0, return_inverse=True)
    return Segments(
        src_block[heads],
        src_slot[heads],
        dst_block[heads],
        dst_slot[heads],
        kinds.reshape(-1).astype(np.int64),
        forms,
    )
