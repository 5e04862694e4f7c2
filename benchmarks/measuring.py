# SPDX-License-Identifier: Apache-2.0
"""Ways to measure on a machine that others use too.

Contenders take turns, so that other programs slow all of them down alike. A result is a median.
Engines that wait for their turn are stopped (SIGSTOP), because some connectors have threads that
never rest. The more processor time other programs had, the less a figure is worth.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.bench.plan import timed as milliseconds
from vllm_engines import Engine

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
Timed = Callable[[], float]  # runs once, and returns the seconds


def median_seconds(task: Callable[[], object], repeats: int = 7) -> float:
    """Median seconds of a task, after one run that warms up."""
    return milliseconds(task, repeats) / 1e3


def timed(task: Callable[[], Iterable[object]], wanted: object) -> float:
    """Seconds of a task whose outcomes must all be `wanted`."""
    begin = time.perf_counter()
    outcomes = task()
    took = time.perf_counter() - begin
    assert set(outcomes) == {wanted}, outcomes
    return took


def middle(values: Sequence[float]) -> float:
    """The median, without the first where there are more than two: it warms up."""
    kept = values[1:] if len(values) > 2 else values
    return statistics.median(kept) if kept else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def in_turns(
    ours: Timed, theirs: Timed, least: int, most: int = 0, seconds: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Their seconds, and a ratio for each turn of ours: the mean of their turns before and after
    it, over its own. There are at least `least` turns, and up to `most` while there is time."""
    mine: list[float] = []
    others = [theirs()]
    until = time.monotonic() + seconds
    while len(mine) < least or (len(mine) < most and time.monotonic() < until):
        mine.append(ours())
        others.append(theirs())
    found = np.array(others)
    return found, (found[1:] + found[:-1]) / 2 / np.array(mine)


@contextmanager
def scratch(in_memory: bool = True) -> Iterator[Path]:
    """A directory for one measurement."""
    base = "/dev/shm" if in_memory and Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(
        prefix="kvferry-bench-", dir=base, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


# Processors


def cpu_seconds(ours: Collection[int]) -> float:
    """Processor time that these processes, and all processes of these groups, have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(stat.parent.name) in ours or int(fields[2]) in ours:
                ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_SECONDS


class ProcessorShares:
    """How busy the processors are from now on, and with whose work."""

    def __init__(self, ours: Collection[int]) -> None:
        """`ours`: processes and process groups."""
        self._ours = ours
        self._begun = self._now()

    def busy_and_others(self) -> tuple[float, float]:
        """The share of all processor time in use, and what of it other programs have."""
        idle, everything, ours = (b - a for a, b in zip(self._begun, self._now(), strict=True))
        if not everything:
            return 0.0, 0.0
        busy = (everything - idle) / everything
        return busy, max(0.0, busy - ours / everything)

    def _now(self) -> tuple[float, float, float]:
        first = Path("/proc/stat").read_text().split("\n")[0]
        seconds = [int(text) * TICK_SECONDS for text in first.split()[1:9]]
        return seconds[3] + seconds[4], sum(seconds), cpu_seconds(self._ours)


def pause(engines: Iterable[Engine]) -> None:
    for engine in engines:
        with suppress(ProcessLookupError):  # one that has died
            os.killpg(engine.pid, signal.SIGSTOP)


@contextmanager
def awake(engines: Collection[Engine]) -> Iterator[None]:
    """Let paused engines run."""
    for engine in engines:
        os.killpg(engine.pid, signal.SIGCONT)
    try:
        yield
    finally:
        pause(engines)
