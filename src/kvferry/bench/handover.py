"""`kvferry bench handover`: real engines, prefill to decode, beside vLLM's own connectors.

For each connector, two engines of vLLM's CPU build (tp 1, equal blocks, which all of them take).
All are started first; then they hand prompts over one after another, taking turns, so that what the
machine does besides hits all alike; those whose turn it is not are stopped (SIGSTOP), because some
have threads that never rest. Compared per request:

    first token   from the prefill engine's answer to the decode engine's first streamed token: the
                  load, and one step
    P, D cpu      processor time of all processes of each engine

and, in rounds of their own in which both engines also decode another request, of all rounds

    P, D step     the longest that the connector's calls kept one step of the engine
    gap           the longest between two tokens of that other request on the decode engine; of all
                  hand-overs, the median

Every answer is compared with the prefill engine's own: a connector that is fast and wrong is shown
as wrong. An engine whose steps are held up by planning needs a long prompt on many layers to show
it: see `kvferry bench stall`.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.bench.handover_pair import KINDS, USUAL, Cost, Kind, Pair, Stalls, make_pair
from kvferry.demo.tiny_model import llama_config, make_model
from kvferry.errors import DescriptionError, KvferryError

LAYERS = 8
WARM_UP = 3  # handshake, first plans, first steps
BUSY_ROUNDS = 2
PER_BUSY_ROUND = 3
# Of a noisy machine: medians of alternating requests differ by this much between equal engines.
NOISE = 0.05
LEAST_STALL_MS = 1.0  # what a step does not feel


@dataclass(frozen=True, slots=True)
class HandoverResult:
    name: str
    ours: bool
    requests: int = 0
    first_token_ms: float = 0.0
    prefill_cpu_ms: float = 0.0
    decode_cpu_ms: float = 0.0
    prefill_step_ms: float = 0.0
    decode_step_ms: float = 0.0
    gap_ms: float = 0.0
    wrong: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is compared with one of vLLM's connectors, and how it came out."""

    what: str
    ours_ms: float
    theirs: str
    theirs_ms: float
    limit: float  # of ours / theirs

    floor_ms: float = 0.0  # below it, all are alike

    @property
    def met(self) -> bool:
        return self.ours_ms <= max(self.theirs_ms * self.limit, self.floor_ms)


@dataclass(slots=True)
class _Runner:
    kind: Kind
    pair: Pair | None
    costs: list[Cost] = field(default_factory=list)
    stalls: list[Stalls] = field(default_factory=list)
    error: str = ""

    def start(self) -> None:
        assert self.pair is not None
        try:
            for engine in self.pair.engines:
                engine.start()
            for engine in self.pair.engines:
                engine.wait_ready()
            self.pair.signal(signal.SIGSTOP)
        except KvferryError as error:
            self.error = f"{error}"[-2000:]
            self.pair = None

    def attempt(self, action: Callable[[Pair], object]) -> None:
        """A connector that fails is out; the others go on."""
        if self.pair is None:
            return
        try:
            with self.pair.awake():
                action(self.pair)
        except (KvferryError, OSError, KeyError) as error:
            self.error = f"{type(error).__name__}: {error}"[-2000:]
            self.pair = None

    def measure(self, prompt: list[int]) -> None:
        self.attempt(lambda pair: self.costs.append(pair.hand_over(prompt)))

    def stall(self, prompts: list[list[int]], busy: list[int]) -> None:
        self.attempt(lambda pair: self.stalls.append(pair.stalls(prompts, busy)))

    def result(self) -> HandoverResult:
        if self.pair is None:
            return HandoverResult(self.kind.name, self.kind.ours, error=self.error)
        gaps = [gap for one in self.stalls for gap in one.gaps]
        return HandoverResult(
            self.kind.name,
            self.kind.ours,
            len(self.costs),
            statistics.median(cost.first_token_seconds for cost in self.costs) * 1e3,
            statistics.mean(cost.prefill_cpu_seconds for cost in self.costs) * 1e3,
            statistics.mean(cost.decode_cpu_seconds for cost in self.costs) * 1e3,
            max((one.prefill_step for one in self.stalls), default=0.0) * 1e3,
            max((one.decode_step for one in self.stalls), default=0.0) * 1e3,
            statistics.median(gaps) * 1e3 if gaps else 0.0,
            self.pair.wrong,
        )


def run(
    requests: int = 20,
    tokens: int = 1000,
    kinds: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> list[HandoverResult]:
    """Compare connectors, all in one run."""
    names = [kind.name for kind in KINDS]
    if unknown := set(kinds) - set(names):
        raise DescriptionError(f"no connectors {sorted(unknown)}; there are {names}")
    # engines are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        model = make_model(Path(folder) / "tiny", llama_config(num_hidden_layers=LAYERS))
        pairs = [
            make_pair(kind, model, Path(folder)) for kind in KINDS if kind.name in (kinds or USUAL)
        ]
        try:
            return _compare([_Runner(pair.kind, pair) for pair in pairs], requests, tokens, tell)
        finally:
            for engine in (engine for pair in pairs for engine in pair.engines):
                engine.kill()  # at once: nothing of theirs is wanted any more


def _compare(
    runners: list[_Runner], requests: int, tokens: int, tell: Callable[[str], None]
) -> list[HandoverResult]:
    for runner in runners:
        runner.start()
        tell(f"{runner.kind.name}: {_last_line(runner.error) or 'started'}")
    seeds = iter(range(1, 1_000_000))
    for number in range(WARM_UP + requests):
        for runner in runners:
            runner.measure(_prompt(next(seeds), tokens))
            if number < WARM_UP:
                runner.costs.clear()
    for runner in runners:
        tell(so_far(runner.result()))
    for _ in range(BUSY_ROUNDS):
        for runner in runners:
            prompts = [_prompt(next(seeds), tokens) for _ in range(PER_BUSY_ROUND)]
            runner.stall(prompts, _prompt(next(seeds), 32))
    return [runner.result() for runner in runners]


def so_far(result: HandoverResult) -> str:
    """One line of progress, before the rounds with another request; the table has all of it."""
    if result.error:
        return f"{result.name}: did not run: {_last_line(result.error)}"
    wrong = f", {result.wrong} answered wrong" if result.wrong else ""
    return (
        f"{result.name}: {result.requests} hand-overs{wrong}; first token after "
        f"{result.first_token_ms:.1f} ms, processor time {result.prefill_cpu_ms:.1f} ms on P, "
        f"{result.decode_cpu_ms:.1f} ms on D"
    )


def _last_line(text: str) -> str:
    """Of an error, which may come with the end of an engine's log."""
    return text.strip().rpartition("\n")[2]


def verdicts(results: Sequence[HandoverResult]) -> list[Verdict]:
    """Every target, for the first of ours beside each of vLLM's."""
    ours = next((one for one in results if one.ours and not one.error), None)
    if ours is None:
        return []
    return [
        Verdict(
            what,
            getattr(ours, name),
            theirs.name,
            getattr(theirs, name),
            1 + NOISE,
            LEAST_STALL_MS if "step" in name else 0.0,
        )
        for theirs in results
        if not theirs.ours and not theirs.error
        for what, name in (
            ("first token", "first_token_ms"),
            ("processor time on P", "prefill_cpu_ms"),
            ("processor time on D", "decode_cpu_ms"),
            ("longest step on P", "prefill_step_ms"),
            ("longest step on D", "decode_step_ms"),
            ("longest gap between tokens on D", "gap_ms"),
        )
    ]


def _prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + i * (37 + seed % 400)) % 500 + 3 for i in range(tokens)]
