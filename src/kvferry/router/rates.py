# SPDX-License-Identifier: Apache-2.0
"""The costs and the load of engines, learned from the requests of this router.

- *Prefill*, by work (`Rate.work`). An engine computes prompts one after another, several in a step
  if they are short. So a sample is a window in which prompts were waiting all along: the work done
  in it, and its length. A window ends when no prompt waits, or after `WINDOW_SECONDS`. The engine's
  other work (decoding, other clients) makes prefill slower, which is learned too.
- *A decode step*, by running requests: a stream's seconds for each event after the first one.
- *A hand-over*, by tokens: from the request to D until its first byte, less a decode step, if D had
  no prompts of its own to compute.

Where prompts are too equal, or too short, to tell a fixed part from a slope, the slope is that of
other engines as far as `MOST_FIXED_SECONDS` explain the rest. An engine with too few samples gets
the costs of the others, or without others those of a Llama 8B on one H200 (docs/benchmarks.md).

The router counts its own requests at an engine. Requests of other clients are known from the
engine's metrics: the requests there beyond the router's own at that moment.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.costs import CostLine, Fit
from kvferry.router.choice import EngineView, Rate, Role

Clock = Callable[[], float]

# `python -m benchmarks.engines --parts pool,handover`: prefill of 2,000 to 128,000 tokens is met
# within 3 %; transfers: `tcp` on loopback from device memory, 13 GB/s.
PREFILL = Rate(0.002, 2.365e-5, attention_tokens=28_200)
TRANSFER = Rate(0.0064, 1.01e-5)
POOL_LOAD = Rate(0.007, 2.98e-6)
STEP_SECONDS = 0.0049
STEP_GROWTH_SECONDS = 0.0004  # for each request, with a context of 12,000 tokens

WINDOW_SECONDS = 2.0
MOST_FIXED_SECONDS = 0.1  # that one request costs besides its tokens: HTTP, scheduling, a step
FORGET_SECONDS = 600.0  # engines change with their load, not by themselves
REFIT_SECONDS = 0.5  # a fit takes 0.1 ms, which not every request should pay for every engine
# Between two looks at what engines cost. Not for each request, which would pay for all engines; not
# more seldom, because each line that is due then takes up to 0.1 ms at once.
RATES_SECONDS = 0.05
# A hand-over that seems slow is not chosen, and so not measured again. After this time without one,
# the measurements count half, so that it is tried now and then.
DOUBT_SECONDS = 60.0
MEAN_OF = 32  # prompts, for the work of requests that are not this router's
STALE_SECONDS = 15.0  # after which an engine's metrics say nothing about now
OUTPUT_TOKENS = 256  # of an answer, until some were seen


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """An engine's own figures, from its /metrics."""

    running: int
    waiting: int
    used_blocks: float  # share, 0 to 1
    cache_tokens: int = 0  # 0: it does not say
    block_tokens: int = 0  # of one block; 0: it does not say


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The costs of one engine, learned or usual."""

    prefill: Rate
    step: Fit  # by running requests
    receive: Rate  # a hand-over to it


_DEFAULT = EngineCosts(PREFILL, Fit(STEP_SECONDS, STEP_GROWTH_SECONDS), TRANSFER)


def _doubted(learned: float, usual: float, trust: float) -> float:
    """A learned value that is slower than usual, moved towards the usual one by lack of trust."""
    return usual + (learned - usual) * trust if learned > usual else learned


@dataclass(slots=True, eq=False)
class PrefillVisit:
    """A prompt that an engine computes. Ends by `computed` or `dropped`, of which one is enough."""

    meter: EngineMeter
    work: float
    since: float
    decoded_elsewhere: bool
    known: bool  # its tokens were counted, not guessed

    def computed(self) -> None:
        """The engine has answered: with the prefill's answer, or with a first token."""
        meter = self.meter
        if self not in meter._pending:
            return
        del meter._pending[self]
        now = meter._last_end = meter._clock()
        meter._works.append(self.work)
        meter._done_work += self.work
        meter._window_known &= self.known
        if not meter._pending or now - meter._mark >= WINDOW_SECONDS:
            if meter._window_known:
                meter.prefill_line.add(meter._done_work, now - meter._mark, now)
            meter._open_window(now)

    def dropped(self) -> None:
        """It failed, or its client is gone. Nothing is learned. Does nothing if it has ended."""
        meter = self.meter
        if self in meter._pending:
            del meter._pending[self]
            # The router cannot know how much of it was computed.
            meter._open_window(meter._clock())


@dataclass(slots=True, eq=False)
class StreamVisit:
    """A request that an engine decodes."""

    meter: EngineMeter
    running: int
    began: float | None = None

    def first(self) -> None:
        """The first event is there."""
        self.began = self.meter._clock()

    def ended(self, events: int) -> None:
        """The stream is over. 0 or 1 events teach nothing. May be called again, in vain."""
        meter = self.meter
        if self not in meter._streams:
            return
        running = (self.running + meter.running) / 2
        del meter._streams[self]
        if self.began is not None and events > 1:
            now = meter._clock()
            meter.step_line.add(running, (now - self.began) / (events - 1), now)


class EngineMeter:
    """One engine's rates and load."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.prefill_line = CostLine(FORGET_SECONDS, REFIT_SECONDS)
        self.step_line = CostLine(FORGET_SECONDS, REFIT_SECONDS)
        self.receive_line = CostLine(FORGET_SECONDS, REFIT_SECONDS)
        self._pending: dict[PrefillVisit, None] = {}  # the oldest first
        self._streams: dict[StreamVisit, None] = {}
        self._works: deque[float] = deque(maxlen=MEAN_OF)
        self._open_window(0.0)
        self._last_end = 0.0
        self._told: EngineMetrics | None = None
        self._told_at = 0.0
        self._foreign_running = self._foreign_waiting = 0
        self._costs = self._beside = _DEFAULT  # its own, and the usual ones beside which they hold

    # Samples

    def prefill(
        self, tokens: int, cached: int, *, decoded_elsewhere: bool = False, known: bool = True
    ) -> PrefillVisit:
        """A prompt is on its way to the engine."""
        now = self._clock()
        if not self._pending:
            self._open_window(now)
        work = PREFILL.work(max(1, tokens - cached), cached)
        visit = PrefillVisit(self, work, now, decoded_elsewhere, known)
        self._pending[visit] = None
        return visit

    def stream(self) -> StreamVisit:
        """A request that is, or will be, decoded on the engine."""
        visit = StreamVisit(self, self.running + 1)
        self._streams[visit] = None
        return visit

    def received(self, tokens: int, seconds: float) -> None:
        """A hand-over was answered while no prompt of its own kept the engine."""
        if not self._pending:
            step = self._costs.step
            seconds -= step.fixed + step.slope * self.running
            self.receive_line.add(tokens, seconds, self._clock())

    def told(self, metrics: EngineMetrics) -> None:
        """The engine's metrics came in."""
        self._told, self._told_at = metrics, self._clock()
        ours = len(self._streams) + sum(visit.decoded_elsewhere for visit in self._pending)
        self._foreign_waiting = max(0, metrics.waiting - len(self._pending))
        others = metrics.running + metrics.waiting - ours - self._foreign_waiting
        self._foreign_running = max(0, others)

    # Results

    @property
    def running(self) -> int:
        return len(self._streams) + (self._foreign_running if self._fresh else 0)

    @property
    def waiting_work(self) -> float:
        work = sum([visit.work for visit in self._pending])
        if self._fresh and self._foreign_waiting and self._works:
            work += self._foreign_waiting * statistics.fmean(self._works)
        if self._pending:
            first, rate = next(iter(self._pending)), self._costs.prefill
            spent = self._clock() - max(first.since, self._last_end) - rate.fixed_seconds
            work -= min(first.work, max(0.0, spent) / rate.token_seconds)
        return work

    @property
    def metrics(self) -> EngineMetrics | None:
        return self._told if self._fresh else None

    def costs(self, usual: EngineCosts) -> EngineCosts:
        """Its costs, with the usual ones where it has too few samples. Computed once for each
        `usual`."""
        if self._beside is usual:
            return self._costs
        prefill, receive, most = usual.prefill, usual.receive, MOST_FIXED_SECONDS
        step = self.step_line.fit_beside(usual.step.slope, most) or usual.step
        if fit := self.prefill_line.fit_beside(prefill.token_seconds, most):
            prefill = _prefill_rate(fit)
        if fit := self.receive_line.fit_beside(receive.token_seconds, most):
            trust = 0.5 ** ((self._clock() - self.receive_line.latest) / DOUBT_SECONDS)
            receive = Rate(
                _doubted(fit.fixed, TRANSFER.fixed_seconds, trust),
                _doubted(fit.slope, TRANSFER.token_seconds, trust),
            )
        self._costs, self._beside = EngineCosts(prefill, step, receive), usual
        return self._costs

    @property
    def _fresh(self) -> bool:
        return self._told is not None and self._clock() - self._told_at <= STALE_SECONDS

    def _open_window(self, now: float) -> None:
        self._mark, self._done_work, self._window_known = now, 0.0, True


class FleetMeter:
    """The meters of all engines, by name, and engines as the choice sees them."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.meters: dict[str, EngineMeter] = {}  # by engine
        self._outputs: deque[int] = deque(maxlen=MEAN_OF)
        self._usual, self._usual_at = _DEFAULT, -math.inf

    def __getitem__(self, engine: str) -> EngineMeter:
        if engine not in self.meters:
            self.meters[engine] = EngineMeter(self._clock)
        return self.meters[engine]

    def keep(self, engines: Iterable[str]) -> None:
        """Forget all engines but these."""
        wanted = set(engines)
        self.meters = {name: m for name, m in self.meters.items() if name in wanted}

    def answered(self, tokens: int) -> None:
        """An answer had so many tokens."""
        self._outputs.append(tokens)

    def output_tokens(self, most: int | None) -> int:
        """Of an answer that may have `most`: as many as the others had."""
        usual = round(statistics.fmean(self._outputs)) if self._outputs else OUTPUT_TOKENS
        return max(1, usual if most is None else min(usual, most))

    def view(
        self,
        engine: str,
        roles: frozenset[Role],
        *,
        up: bool = True,
        pooled: bool = False,
        weight: float = 1.0,
    ) -> EngineView:
        """An engine as the choice sees it. `pooled`: it reads the pool. `weight`: its share of
        requests; a light engine seems busier than it is, a heavy one less."""
        if (now := self._clock()) - self._usual_at > RATES_SECONDS:
            self._usual, self._usual_at = self._learned(), now
        meter = self[engine]
        metrics, running, costs = meter.metrics, meter.running, meter.costs(self._usual)
        step = costs.step
        return EngineView(
            name=engine,
            roles=roles,
            up=up,
            waiting_tokens=round(max(0.0, meter.waiting_work) / weight),
            running=round(running / weight),
            prefill=costs.prefill,
            step_seconds=step.fixed + step.slope * (running + 1),
            free_blocks=1.0 if metrics is None else 1.0 - metrics.used_blocks,
            cache_tokens=0 if metrics is None else metrics.cache_tokens,
            waiting=0 if metrics is None else metrics.waiting,
            step_growth_seconds=step.slope,
            receive=costs.receive,
            pool=POOL_LOAD if pooled else None,
        )

    def _learned(self) -> EngineCosts:
        """The costs of an engine with too few samples: the median of the others."""
        meters, default = self.meters.values(), _DEFAULT
        prefill = _median(meter.prefill_line.fit() for meter in meters)
        step = _median(meter.step_line.fit() for meter in meters)
        receive = _median(meter.receive_line.fit() for meter in meters)
        return EngineCosts(
            default.prefill if prefill is None else _prefill_rate(prefill),
            step or default.step,
            default.receive if receive is None else Rate(receive.fixed, receive.slope),
        )


def _prefill_rate(fit: Fit) -> Rate:
    return Rate(fit.fixed, fit.slope, PREFILL.attention_tokens)


def _median(fits: Iterable[Fit | None]) -> Fit | None:
    """The one in the middle, by slope."""
    sure = (fit for fit in fits if fit is not None and not fit.guessed)
    known = sorted(sure, key=lambda fit: fit.slope)
    return known[len(known) // 2] if known else None
