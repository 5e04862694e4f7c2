"""Clocks and units that the measurements on a GPU share."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

REPEATS = 7
WAIT_SECONDS = 120.0
GB, TB = 1e9, 1e12


def soon() -> float:
    return time.monotonic() + WAIT_SECONDS


def wall(task: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median seconds after one run that warms up."""
    task()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        task()
        taken.append(time.perf_counter() - begin)
    return median(taken)
