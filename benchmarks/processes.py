# SPDX-License-Identifier: Apache-2.0
"""Processor time of the processes that a benchmark started, and of all others.

On a shared machine, a figure says little where other programs took the processors meanwhile.
Engines whose turn it is not are stopped, because some connectors have threads that never rest.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_engines import Engine

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


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
        busy = (everything - idle) / everything if everything else 0.0
        return busy, max(0.0, busy - ours / everything) if everything else 0.0

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
