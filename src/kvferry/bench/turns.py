"""Two things compared on a machine that drifts: they take turns, and each is held against its
neighbours of the other kind."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Timed = Callable[[], float]  # does it once, and tells the seconds


def in_turns(
    ours: Timed, theirs: Timed, least: int, most: int = 0, seconds: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Their seconds, and for each turn of ours how fast it was: the mean of their turns before and
    after it, over its own. At least so many turns; up to `most` while there is time."""
    mine: list[float] = []
    others = [theirs()]
    until = time.monotonic() + seconds
    while len(mine) < least or (len(mine) < most and time.monotonic() < until):
        mine.append(ours())
        others.append(theirs())
    found = np.array(others)
    return found, (found[1:] + found[:-1]) / 2 / np.array(mine)
