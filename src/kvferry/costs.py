# SPDX-License-Identifier: Apache-2.0
"""What something costs by its size, as a line through what was seen: `fixed + slope * size`.

The pool learns loads and steps with it, the router prefills, hand-overs and decode steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np

ENOUGH = 5  # observations before an estimate counts; two odd ones of five do not decide
MOST = 32  # observations that an estimate is made of; a fit of them takes less than 0.1 ms
FEW = MOST  # new observations that may wait for `refit_seconds`
SPREAD = 1.5  # second largest size by second smallest; below, they do not tell the fixed part

_MOST_BESIDE = 4  # slopes that are asked for in turn


@dataclass(frozen=True, slots=True)
class Fit:
    fixed: float
    slope: float
    guessed: bool = False  # sizes are too equal, or noise too large, to tell the two parts apart


class CostLine:
    """Seconds by size, as a line through the latest observations.

    Its slope is the median of the slopes between all pairs, each with the weight of its distance
    (Theil and Sen). So single odd observations do not move it: a kernel that is compiled, a cold
    disk, a machine that stands still. Least squares would follow them.

    forget_seconds  older observations go, except for the latest few
    refit_seconds   new observations count only when the last fit is that old, or when they are all
                    that is left, so that a busy caller does not make a fit for each of them. Its
                    age counts up to the time that `fit` is given, or else the last observation's
    """

    def __init__(self, forget_seconds: float = math.inf, refit_seconds: float = 0.0) -> None:
        self._forget = forget_seconds
        self._refit = refit_seconds
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=MOST)  # size, seconds, when
        self._fit: Fit | None = None
        self._fitted_at = -math.inf
        self._beside: dict[float, Fit] = {}  # of `fit_beside`, by the slope; the last few
        self._new = 0  # observations since the last fit

    @property
    def latest(self) -> float:
        return self._seen[-1][2] if self._seen else -math.inf

    def add(self, size: float, seconds: float, now: float) -> None:
        """Impossible observations are left out, whatever a clock or a rank said."""
        if not (0 < size < math.inf and 0 < seconds < math.inf):
            return
        self._seen.append((size, seconds, now))
        while len(self._seen) > ENOUGH and self._seen[0][2] < now - self._forget:
            self._seen.popleft()
        self._new += 1

    def fit(self, now: float = -math.inf) -> Fit | None:
        if not self._new or len(self._seen) < ENOUGH:
            return self._fit
        latest = max(now, self._seen[-1][2])
        if self._new >= FEW or abs(latest - self._fitted_at) >= self._refit:
            sizes, seconds, _ = np.asarray(self._seen, dtype=np.float64).T
            self._fit = _fit(sizes, seconds)
            self._fitted_at, self._new = latest, 0
            self._beside.clear()
        return self._fit

    def fit_beside(self, slope: float, most_fixed: float) -> Fit | None:
        """The same, for a cost whose slope is roughly known. Where sizes do not tell the two parts
        apart, what that slope does not explain is fixed, up to `most_fixed` seconds."""
        fit = self.fit()
        if fit is None or not fit.guessed or fit.slope <= slope:
            return fit
        beside = self._beside.get(slope)
        if beside is None:
            sizes, seconds, _ = np.asarray(self._seen, dtype=np.float64).T
            fixed = min(most_fixed, max(0.0, _median(seconds - slope * sizes)))
            more = max(slope, _median((seconds - fixed) / sizes))
            if len(self._beside) >= _MOST_BESIDE:
                self._beside.clear()
            beside = self._beside[slope] = Fit(fixed, more, guessed=True)
        return beside


def _fit(sizes: np.ndarray, seconds: np.ndarray) -> Fit:
    through_zero = Fit(0.0, _median(seconds / sizes), guessed=True)
    ordered = np.sort(sizes)
    if ordered[-2] < SPREAD * ordered[1]:  # so that a single odd observation decides nothing
        return through_zero
    one, other = np.triu_indices(len(sizes), 1)
    distance = sizes[other] - sizes[one]
    apart = distance != 0
    slopes = (seconds[other] - seconds[one])[apart] / distance[apart]
    order = np.argsort(slopes)
    weight = np.cumsum(np.abs(distance[apart])[order])
    slope = float(slopes[order][np.searchsorted(weight, weight[-1] / 2)])
    if slope <= 0:  # noise is larger than what size adds
        return through_zero
    return Fit(max(0.0, _median(seconds - slope * sizes)), slope)


def _median(values: np.ndarray) -> float:
    # Not NumPy's, which takes ten times as long, and imports a module for 13 ms at its first call.
    return float(statistics.median(values.tolist()))
