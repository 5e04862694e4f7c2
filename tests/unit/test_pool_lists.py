"""Lists for Mooncake's client, beside the plain way to make them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.pool.mooncake import lists, parts_of
from kvferry.pool.scheduler import SaveJob, SaveRate
from kvferry.pool.store import AlikeSlices, Slices


def plainly_whole(wanted: Slices) -> bool:
    at = 0
    for offset, length in zip(wanted.offset.tolist(), wanted.length.tolist(), strict=True):
        if offset != at:
            return False
        at += length
    return at > 0


def some_slices(rng: np.random.Generator, alike: bool) -> Sequence[Slices]:
    def one() -> tuple[np.ndarray, np.ndarray]:
        length = rng.integers(1, 50, rng.integers(0, 5))
        offset = np.cumsum(length) - length
        match rng.integers(4):
            case 0:
                offset = offset + 1
            case 1:
                offset = offset[::-1].copy()
        return offset, length

    count = rng.integers(1, 9)
    if alike:
        offset, length = one()
        return AlikeSlices(offset, rng.integers(0, 1 << 40, (count, len(offset))), length)
    pairs = [one() for _ in range(count)]
    return [Slices(o, rng.integers(0, 1 << 40, len(o)), n) for o, n in pairs]


@pytest.mark.parametrize("alike", [False, True])
def test_parts(alike: bool) -> None:
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(300):
        wanted = some_slices(rng, alike)
        parts = parts_of(wanted)
        assert parts.addresses == [w.address.tolist() for w in wanted]
        assert parts.lengths == [w.length.tolist() for w in wanted]
        assert parts.sizes == [int(w.length.sum()) for w in wanted]
        assert parts.whole == [i for i, w in enumerate(wanted) if plainly_whole(w)]
        found += len(parts.whole)
    assert found > 100


def test_lists() -> None:
    one, other = np.arange(3), np.arange(3) + 7
    alike = AlikeSlices(np.cumsum(one) - one, np.arange(12).reshape(4, 3), one)
    unlike = [
        Slices.whole(one, other),
        Slices.whole(other[:2], one[:2]),
        Slices.whole(one[:0], one[:0]),
    ]
    for objects in (alike, unlike):
        assert lists(objects) == (
            [o.address.tolist() for o in objects],
            [o.length.tolist() for o in objects],
        )


def test_what_a_store_saves_soon() -> None:
    """A fast store's saves are not held back; of one that hangs, or knew all blocks, nothing is
    known."""
    rate = SaveRate()

    def over(put: int, seconds: float, *declined: tuple[int, int], paused: bool = False) -> int:
        rate.add(SaveJob((), None, set(declined), seconds, put, paused))
        return rate.blocks_in(0.2)

    assert rate.blocks_in(0.2) == over(0, 0.001) == 0
    over(500, 0.25)
    assert over(500, 0.1) == 1000  # waited for less
    for _ in range(8):
        slow = over(10, 1.0)  # the store has become slow
    assert slow == 2
    assert over(10, 1.0, (0, 3)) == 2  # a block that is not worth its place is no failure
    assert over(10, 1.0, paused=True) == 0
