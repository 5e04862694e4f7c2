"""The token axis against the plain definition, position by position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import BindError
from kvferry.layout import Span
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.shape import EngineShape
from kvferry.plan.tokens import (
    Paging,
    moved,
    unloadable,
    walk,
    whole_tiles,
)


@st.composite
def pagings(draw: st.DrawFn) -> Paging:
    interleave = draw(st.sampled_from([1, 1, 2, 3, 4]))
    tile = draw(st.sampled_from([1, 1, 2, 3, 4]))
    block = tile * interleave * draw(st.integers(1, 6))
    context = draw(st.sampled_from([1, 1, 2, 3, 4]))
    if context == 1:
        return Paging(block, tile)
    return Paging(block, tile, context, draw(st.integers(0, context - 1)), interleave)


def place(paging: Paging, position: int) -> tuple[int, int] | None:
    """Block and slot of a position, in vLLM's words; None where another rank holds it."""
    virtual = paging.block_entries * paging.context
    number, inside = divmod(position, virtual)
    if inside // paging.interleave % paging.context != paging.context_rank:
        return None
    cycle = paging.interleave * paging.context
    return number, inside // cycle * paging.interleave + inside % paging.interleave


@settings(max_examples=400)
@example(Paging(12, 1, 2, 0, 3), Paging(12, 1, 2, 0, 1), 0, 48)  # distances that change
@given(pagings(), pagings(), st.integers(0, 150), st.integers(0, 150))
def test_segments_are_what_both_hold(src: Paging, dst: Paging, start: int, size: int) -> None:
    segments = walk(src, dst, Span(start, start + size))
    found = []
    for i, kind in enumerate(segments.kinds.tolist()):
        entries, repeats, src_step, dst_step = segments.forms[kind].tolist()
        first = [int(a[i]) for a in (segments.src_slot, segments.dst_slot)]
        whole = whole_tiles(src, dst)
        for r in range(repeats):
            at = first[0] + r * src_step, first[1] + r * dst_step
            for slot, tile in zip(at, (src.tile, dst.tile), strict=True):
                in_one = slot // tile == (slot + entries - 1) // tile
                assert in_one or tile == 1 or (whole and entries % whole == 0 == slot % tile)
            found += [
                (int(segments.src_block[i]), at[0] + e, int(segments.dst_block[i]), at[1] + e)
                for e in range(entries)
            ]
    expected = []
    for position in range(start, start + size):
        a, b = place(src, position), place(dst, position)
        if a is not None and b is not None:
            expected.append((*a, *b))
    assert sorted(found) == sorted(expected)


@given(pagings(), st.integers(0, 300))
def test_local_count(paging: Paging, stop: int) -> None:
    held = sum(place(paging, p) is not None for p in range(stop))
    assert paging.local_count(stop) == held


@given(st.integers(1, 12), st.integers(0, 60), st.integers(1, 12))
def test_rings_wrap(capacity: int, start: int, size: int) -> None:
    ring = Paging(capacity, ring=True)
    other = Paging(16)
    segments = walk(ring, other, Span(start, start + min(size, capacity)))
    for i, kind in enumerate(segments.kinds.tolist()):
        entries = int(segments.forms[kind, 0])
        positions = int(segments.dst_block[i]) * 16 + int(segments.dst_slot[i]) + np.arange(entries)
        slots = int(segments.src_slot[i]) + np.arange(entries)
        assert np.array_equal(positions % capacity, slots)
        assert int(segments.src_block[i]) == 0


def test_context_parallel_blocks_stay_few_runs() -> None:
    """Single interleaved tokens fold into one strided segment a block."""
    segments = walk(Paging(16, context=2, context_rank=1), Paging(16), Span(0, 1024))
    assert len(segments.kinds) == 1024 // 16
    assert segments.forms.tolist() == [[1, 8, 1, 2]]


@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize(("src", "dst"), [(16, 32), (32, 16), (48, 32), (16, 16), (8, 24)])
def test_what_cannot_be_loaded_is_known_beforehand(kind: Any, src: int, dst: int) -> None:
    """`unloadable` says what `moved` does, for every length."""
    component = Component("k", 1, (8,), 2)
    full = Group("full", (0,), (component,))
    model = CacheModel("m", (full, Group("w", (1,), (component,), Residency(kind, 56))))
    shapes = EngineShape(block_size=src), EngineShape(block_size=dst)
    refused = 0
    for tokens in range(1, 56 + 56 * 96):
        try:
            moved(model.groups[1], *shapes, tokens, 0)
            why = ""
        except BindError as error:
            why = str(error)
        assert unloadable(model, *shapes, tokens, 0) == why
        refused += bool(why)
    if kind == "window":
        assert bool(refused) == (src % dst > 0)
