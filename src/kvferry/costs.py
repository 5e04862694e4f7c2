# SPDX-License-Identifier: Apache-2.0
"""A cost by size, learned as a line through observations: `fixed + slope * size`.

The pool learns the costs of loads and steps, the router those of prefills, hand-overs and decode
steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np

ENOUGH = 5  # observations before an estimate counts; two outliers among five do not decide
MOST = 32  # latest observations that a fit uses; it takes less than 0.1 ms
FEW = MOST  # new observations that cause a fit before `refit_seconds` are over
SPREAD = 1.5  # second largest size over second smallest; below, the fixed part is unknown

_MOST_BESIDE = 4  # results of `fit_beside` that are kept


@dataclass(frozen=True, slots=True)
class Fit:
    fixed: float
    slope: float
    guessed: bool = False  # sizes are too equal, or noise too large, to tell the two parts apart


class CostLine:
    """Seconds by size, as a line through the latest observations.

    Its slope is the median of the slopes between all pairs, each with the weight of its distance
    (Theil and Sen). So single outliers do not move it: a kernel that is compiled, a cold disk, a
    machine that stands still. Least squares would follow them.

    forget_seconds  older observations are dropped, but at least `ENOUGH` are kept
    refit_seconds   least time between two fits, unless `FEW` observations came since the last one.
                    So a busy caller does not fit every observation. The time is the latest
                    observation's, or the one given to `fit` if that is later
    """

    def __init__(self, forget_seconds: float = math.inf, refit_seconds: float = 0.0) -> None:
        self._forget = forget_seconds
        self._refit = refit_seconds
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=MOST)  # size, seconds, when
        self._fit: Fit | None = None
        self._fitted_at = -math.inf
        self._beside: dict[float, Fit] = {}  # results of `fit_beside`, by slope
        self._new = 0  # observations since the last fit

    @property
    def enough(self) -> bool:
        """Whether there are enough observations for a fit."""
        return len(self._seen) >= ENOUGH

    @property
    def latest(self) -> float:
        return self._seen[-1][2] if self._seen else -math.inf

    def add(self, size: float, seconds: float, now: float) -> None:
        """Add an observation. Impossible values are ignored: a clock or a rank may be wrong."""
        if not (0 < size < math.inf and 0 < seconds < math.inf):
            return
        self._seen.append((size, seconds, now))
        while len(self._seen) > ENOUGH and self._seen[0][2] < now - self._forget:
            self._seen.popleft()
        self._new += 1

    def fit(self, now: float = -math.inf) -> Fit | None:
        if not self._new or not self.enough:
            return self._fit
        latest = max(now, self._seen[-1][2])
        if self._new >= FEW or abs(latest - self._fitted_at) >= self._refit:
            sizes, seconds, _ = np.asarray(self._seen, dtype=np.float64).T
            self._fit = _fit(sizes, seconds)
            self._fitted_at, self._new = latest, 0
            self._beside.clear()
        return self._fit

    def fit_beside(self, slope: float, most_fixed: float) -> Fit | None:
        """Like `fit`, for a cost whose slope is roughly known. If the sizes do not tell the two
        parts apart, the time beyond that slope is fixed, up to `most_fixed` seconds."""
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
    if ordered[-2] < SPREAD * ordered[1]:  # a single outlier decides nothing
        return through_zero
    one, other = np.triu_indices(len(sizes), 1)
    distance = sizes[other] - sizes[one]
    apart = distance != 0
    slopes = (seconds[other] - seconds[one])[apart] / distance[apart]
    order = np.argsort(slopes)
    weight = np.cumsum(np.abs(distance[apart])[order])
    slope = float(slopes[order][np.searchsorted(weight, weight[-1] / 2)])
    if slope <= 0:  # the noise is larger than the effect of size
        return through_zero
    return Fit(max(0.0, _median(seconds - slope * sizes)), slope)


def _median(values: np.ndarray) -> float:
    # NumPy's median takes ten times as long, and its first call imports a module for 13 ms.
    return float(statistics.median(values.tolist()))
