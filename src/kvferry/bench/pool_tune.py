"""`kvferry bench pool --tune`: the eviction policy's constants, chosen on the first half hour.

Nothing after the first half is replayed until the choice is made. Candidates run through the policy
itself in a model of the store (`pool_rules`), at four capacities. A candidate is admissible if it
hits no less than LRU at any of them; of those, the one with the highest mean ratio to LRU is best.
From the first value of every row of the grid on, one constant is moved at a time, in the grid's
order, to its best value, and kept where nothing is better by `WORTH`, until a whole sweep changes
nothing. Then the choice, its variants and the policies that look at single blocks are replayed over
the whole trace. `kvferry bench pool` replays what is in use through the real store.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.bench.pool_policies import BY_BLOCK, VARIANTS
from kvferry.bench.pool_rules import replay_rules
from kvferry.bench.pool_trace import Rates, Trace, read_trace
from kvferry.pool.policy import ConversationPolicy, Tuning

CAPACITIES = (1000, 3000, 10_000, 30_000)
WORTH = 0.002  # of the mean ratio to LRU: less is noise
SWEEPS = 4
GRID: dict[str, tuple[float, ...]] = {
    "turn_classes": (1, 2, 4, 8),
    "unseen_tail": (0, 1, 2),
    "shortest_chain": (1, 2, 3),
    "prior_starts": (5, 20, 80),
    "prior_return_s": (100, 200, 400),
    "fade_s": (15, 60, 240),
    "patience": (1, 2, 4, 8),
    "count_decay": (0.99, 0.999, 1.0),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replay of the first half at all capacities."""

    sweep: int
    constant: str
    value: float
    hit_rates: tuple[float, ...]
    mean_ratio: float  # to LRU
    worst_ratio: float
    taken: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy over the whole trace, by capacity."""

    name: str
    first: tuple[float, ...]
    second: tuple[float, ...]
    whole: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TuneResult:
    trace: str
    first_half_requests: int
    capacities: tuple[int, ...]
    lru: tuple[float, ...]  # first half
    candidates: tuple[Candidate, ...]
    chosen: dict[str, float]
    shipped: dict[str, float]
    policies: tuple[Compared, ...]


_traces: dict[str, Trace] = {}  # of a worker process


def _begin(path: Path) -> None:
    whole = read_trace(path)
    _traces.update(whole=whole, first=whole.first_half())


def _candidate(tuning: Tuning, capacity: int) -> Rates:
    return replay_rules(_traces["first"], capacity, partial(ConversationPolicy, tuning=tuning))


def _replay(variant: int, tuning: Tuning, capacity: int) -> Rates:
    return replay_rules(_traces["whole"], capacity, partial(VARIANTS[variant], tuning=tuning))


def _by_block(part: str, name: str, capacity: int) -> Rates:
    return BY_BLOCK[name](_traces[part], capacity)


@contextmanager
def _workers(path: Path) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    count = max(1, min(8, os.cpu_count() or 1))
    with ProcessPoolExecutor(count, context, _begin, (path,)) as pool:
        yield pool


class _Search:
    def __init__(self, pool: ProcessPoolExecutor, say: Callable[[str], None]) -> None:
        self._pool, self._say = pool, say
        self._known: dict[Tuning, tuple[float, ...]] = {}
        self.tried: list[Candidate] = []
        jobs = [pool.submit(_by_block, "first", "LRU", c) for c in CAPACITIES]
        self.lru = tuple(job.result().whole for job in jobs)

    def evaluate(self, tunings: list[Tuning]) -> list[tuple[float, ...]]:
        jobs = {
            tuning: [self._pool.submit(_candidate, tuning, c) for c in CAPACITIES]
            for tuning in tunings
            if tuning not in self._known
        }
        for tuning, of_capacity in jobs.items():
            self._known[tuning] = tuple(job.result().whole for job in of_capacity)
        return [self._known[tuning] for tuning in tunings]

    def _worth(self, rates: tuple[float, ...]) -> tuple[float, float]:
        ratio = np.array(rates) / np.array(self.lru)
        return float(ratio.mean()), float(ratio.min())

    def move(self, current: Tuning, sweep: int, constant: str) -> Tuning:
        """The best value of one constant, the others as they are."""
        options = [_with(current, constant, value) for value in GRID[constant]]
        found = self.evaluate(options)
        (mine,) = self.evaluate([current])
        best, best_worth = current, _admissible(*self._worth(mine)) + WORTH
        for option, rates in zip(options, found, strict=True):
            worth = _admissible(*self._worth(rates))
            if worth > best_worth:
                best, best_worth = option, worth
        for option, rates in zip(options, found, strict=True):
            mean, worst = self._worth(rates)
            value = getattr(option, constant)
            one = Candidate(sweep, constant, value, rates, mean, worst, option == best)
            self.tried.append(one)
            self._say(
                f"sweep {sweep}  {constant:15}{value:>8g}  mean {mean:.4f}  worst {worst:.4f}"
                + ("  taken" if one.taken else "")
            )
        return best


def _admissible(mean: float, worst: float) -> float:
    """Candidates that lose to LRU anywhere come after all that do not."""
    return mean if worst >= 1.0 else mean - 1e3 * (1.0 - worst)


def tune(path: Path, say: Callable[[str], None]) -> TuneResult:
    trace = read_trace(path)
    with _workers(path) as pool:
        search = _Search(pool, say)
        tuning = Tuning(**{name: values[0] for name, values in GRID.items()})  # type: ignore[arg-type]
        for sweep in range(1, SWEEPS + 1):
            before = tuning
            for constant in GRID:
                tuning = search.move(tuning, sweep, constant)
            if tuning == before:
                break
        say("the choice is made; now the whole trace")
        jobs = {
            variant.name: [pool.submit(_replay, at, tuning, c) for c in CAPACITIES]
            for at, variant in enumerate(VARIANTS)
        }
        for name in BY_BLOCK:
            jobs[name] = [pool.submit(_by_block, "whole", name, c) for c in CAPACITIES]
        compared = tuple(
            _compared(name, [job.result() for job in of_capacity])
            for name, of_capacity in jobs.items()
        )
    return TuneResult(
        trace=path.name,
        first_half_requests=trace.half,
        capacities=CAPACITIES,
        lru=search.lru,
        candidates=tuple(search.tried),
        chosen=asdict(tuning),
        shipped=asdict(Tuning()),
        policies=compared,
    )


def _compared(name: str, rates: list[Rates]) -> Compared:
    return Compared(
        name,
        tuple(rate.first for rate in rates),
        tuple(rate.second for rate in rates),
        tuple(rate.whole for rate in rates),
    )


def _with(tuning: Tuning, constant: str, value: float) -> Tuning:
    changed: dict[str, Any] = {constant: value}
    return replace(tuning, **changed)
