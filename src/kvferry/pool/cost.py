# SPDX-License-Identifier: Apache-2.0
"""Whether a load is worth it: what it costs, and what computing the same tokens costs.

Both costs are learned from the engine's own steps and loads, as `fixed + slope * size` seconds:

- *computing*: a step that is mostly prefill, by its tokens. A step begins when the scheduler sends
  it, or when the step before it is over, if that is later. A request needs one step in any case.
  After a load of the whole prompt that is a step of one token, which engines run much faster (as a
  CUDA graph), so steps that decode are learned too. A step of 16 tokens may take as long as one of
  500, so the times of each size are remembered; the line serves sizes that were not seen. For long
  prompts the estimate is too low, so in doubt they are computed.
- *loading*: the seconds of the slowest rank, by bytes over all ranks. A load waits for the loads
  before it, so their bytes are added to its own. For the same reason, a load is learned only if no
  other one is under way when it ends: its time covers all loads that ended while it ran.

Until both costs are known, everything is loaded. Later, a load that seems too slow is still tried
if none has run for a while: the store may have become faster.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvferry.costs import MOST, CostLine

# Tokens per request, on average, from which a step counts as prefill. A step that mixes a little
# prefill with much decoding is not learned.
PREFILL_TOKENS = 16
MOST_STEPS = 64  # steps under way
MOST_OF_A_SIZE = 8  # steps remembered for each power of two of tokens
FEW_OF_A_SIZE = 3
FORGET_SECONDS = 120.0  # a store's speed changes with its neighbours, an engine's hardly does
REFIT_SECONDS = 0.25  # a fit takes 0.1 ms, and a request waits for it
RETRY_SECONDS = 30.0  # without a load; then one is tried, whatever its estimate

Reason = Literal["", "slower", "queued"]
Clock = Callable[[], float]


class LoadChoice:
    """Decides between loading and computing."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.steps, self.loads = StepCost(clock), LoadCost(clock)

    def why_not(self, tokens: int, load_bytes: int, rest: int = PREFILL_TOKENS) -> Reason:
        """The reason to compute these tokens; empty: load them.

        rest  tokens of the prompt after them, which are computed in any case; 0 and 1 both mean the
              last token alone
        """
        alone = self.loads.seconds(load_bytes)
        if alone is None:
            return ""
        whole, after = self.steps.seconds(tokens + rest), self.steps.seconds(rest)
        if whole is None or after is None:
            return ""
        computing = whole - after  # what the load must beat
        if alone >= computing:
            return "" if self.loads.idle_seconds() >= RETRY_SECONDS else "slower"
        behind = self.loads.seconds(self.loads.queued_bytes + load_bytes)
        return "queued" if behind is not None and behind >= computing else ""


class StepCost:
    """What prefill costs on this engine. Steps end in the order in which they were sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sent: deque[tuple[float, int, int]] = deque(maxlen=MOST_STEPS)
        self._last_end = -math.inf
        self._line = CostLine(refit_seconds=REFIT_SECONDS)
        self._by_size: dict[int, deque[tuple[int, float]]] = {}  # tokens and seconds of prefills
        self._sizes: list[float] = []  # of the points between which `_between` interpolates
        self._times: list[float] = []
        self._decode: deque[float] = deque(maxlen=MOST)  # seconds of steps that only decode

    def sent(self, tokens: int, requests: int) -> None:
        """The scheduler sends a step to the ranks."""
        self._sent.append((self._clock(), tokens, requests))

    def over(self) -> None:
        """The results of the oldest step that was sent are back."""
        sent, tokens, requests = self._sent.popleft() if self._sent else (0.0, 0, 0)
        if not tokens:
            return
        now = self._clock()
        seconds = now - max(sent, self._last_end)
        self._last_end = now
        if tokens >= PREFILL_TOKENS * requests:
            self._line.add(tokens, seconds, now)
            same = self._by_size.setdefault(tokens.bit_length(), deque(maxlen=MOST_OF_A_SIZE))
            same.append((tokens, seconds))
            self._sizes.clear()
        elif tokens == requests:
            self._decode.append(seconds)

    def seconds(self, tokens: int) -> float | None:
        """Seconds of a step with this many tokens of one request; None: not known yet."""
        fit = self._line.fit(self._clock())
        if fit is None:
            return None
        prefill = self._between(tokens)
        if prefill is None:
            prefill = fit.fixed + fit.slope * tokens
        if tokens > 1 or not self._decode:
            return prefill
        return min(prefill, statistics.median(self._decode))

    def _between(self, tokens: int) -> float | None:
        """Interpolated between steps of nearby sizes; None outside of the sizes that were seen."""
        if not self._sizes:
            self._find_points()
        sizes, times = self._sizes, self._times
        if not sizes[0] <= tokens <= sizes[-1]:
            return None
        above = bisect_left(sizes, tokens)
        if sizes[above] == tokens:
            return times[above]
        step = (times[above] - times[above - 1]) / (sizes[above] - sizes[above - 1])
        return times[above - 1] + step * (tokens - sizes[above - 1])

    def _find_points(self) -> None:
        self._times.clear()
        for _, same in sorted(self._by_size.items(), reverse=True):
            size, seconds = (statistics.median(values) for values in zip(*same, strict=True))
            # One of a few steps may have waited for a compiler: a larger step takes no less time.
            if self._times and len(same) < FEW_OF_A_SIZE:
                seconds = min(seconds, self._times[-1])
            self._sizes.append(size)
            self._times.append(seconds)
        self._sizes.reverse()
        self._times.reverse()


@dataclass(slots=True)
class _Load:
    bytes: int
    since: float
    moved_before: int  # bytes of loads that had ended when it was ordered
    seconds: float = 0.0  # of the slowest rank so far
    failed: bool = False


class LoadCost:
    """What loads cost on this engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: dict[str, _Load] = {}
        self._moved = 0
        self._line = CostLine(FORGET_SECONDS, REFIT_SECONDS)
        self._last_end = -math.inf
        self.queued_bytes = 0  # of loads that are under way
        self.enough = False  # whether there were enough of them for an estimate

    def ordered(self, request_id: str, load_bytes: int) -> None:
        self.over(request_id)
        self._under_way[request_id] = _Load(load_bytes, self._clock(), self._moved)
        self.queued_bytes += load_bytes

    def reported(self, request_id: str, seconds: float, *, failed: bool) -> None:
        """One rank has ended a load."""
        load = self._under_way.get(request_id)
        if load is not None:
            load.seconds = max(load.seconds, seconds)
            load.failed |= failed

    def over(self, request_id: str) -> None:
        """All ranks have ended a load."""
        load = self._under_way.pop(request_id, None)
        if load is None:
            return
        self.queued_bytes -= load.bytes
        self._moved += load.bytes
        self._last_end = now = self._clock()
        if self._under_way:
            return
        size = self._moved - load.moved_before
        if load.failed:
            # A load that brought little may have been quick. It counts only if it was slow.
            load.seconds = now - load.since
            expected = self.seconds(size)
            if expected is None or load.seconds <= expected:
                return
        self._line.add(size, load.seconds, now)
        self.enough = self._line.enough

    def idle_seconds(self) -> float:
        """Since the last load ended; 0 while one is under way."""
        return 0.0 if self._under_way else self._clock() - self._last_end

    def seconds(self, load_bytes: int) -> float | None:
        """Seconds to load this many bytes; None: not known yet."""
        fit = self._line.fit(self._clock())
        return fit.fixed + fit.slope * load_bytes if fit is not None else None
