"""Loading against computing: what is learned of both, and what is decided."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from kvferry.costs import ENOUGH, CostLine
from kvferry.pool.cost import FORGET_SECONDS, REFIT_SECONDS, RETRY_SECONDS, LoadChoice

MB = 1_000_000
TOKEN_BYTES = 128_000


class Engine:
    """An engine on a clock of its own. Prefill: 5 ms a step and 25 us a token."""

    def __init__(self, fixed: float = 0.005, per_token: float = 25e-6) -> None:
        self.now = 1000.0
        self.fixed, self.per_token = fixed, per_token
        self.choice = LoadChoice(lambda: self.now)
        self._names = iter(range(10**6))

    def step(self, tokens: int, requests: int = 1) -> None:
        self.choice.steps.sent(tokens, requests)
        self.now += self.fixed + self.per_token * tokens
        self.choice.steps.over()

    def load(self, load_bytes: int, per_second: float, fixed: float = 0.002) -> None:
        name = self.order(load_bytes)
        seconds = fixed + load_bytes / per_second
        self.now += seconds
        self.end(name, seconds)

    def order(self, load_bytes: int) -> str:
        name = f"r{next(self._names)}"
        self.choice.loads.ordered(name, load_bytes)
        return name

    def end(self, name: str, seconds: float, *, failed: bool = False) -> None:
        self.choice.loads.reported(name, seconds, failed=failed)
        self.choice.loads.over(name)

    def why_not(self, tokens: int) -> str:
        return self.choice.why_not(tokens, tokens * TOKEN_BYTES)


def taught(per_second: float) -> Engine:
    engine = Engine()
    for tokens in (500, 1000, 2000, 4000, 8000, 6000):
        engine.step(tokens)
        engine.load(tokens * TOKEN_BYTES, per_second)
    return engine


def test_computing_is_learned_with_its_fixed_part() -> None:
    engine, chance = Engine(), random.Random(1)
    assert engine.choice.steps.seconds(1000) is None
    for _ in range(100):
        tokens = chance.randint(16, 8192)
        engine.fixed = 0.005 * chance.uniform(0.8, 1.2)
        engine.step(tokens)
    assert engine.choice.steps.seconds(8000) == pytest.approx(0.205, rel=0.05)
    assert engine.choice.steps.seconds(16) == pytest.approx(0.005 + 16 * 25e-6, rel=0.1)


def test_loading_is_learned_with_its_fixed_part() -> None:
    engine = taught(5e9)
    assert engine.choice.loads.seconds(1000 * MB) == pytest.approx(0.202, rel=0.01)
    assert engine.choice.loads.seconds(1) == pytest.approx(0.002, rel=0.05)


def test_idle_time_and_decoding_are_no_prefill() -> None:
    engine = Engine()
    for tokens in (500, 1000, 2000, 4000, 8000):
        engine.step(tokens)
        engine.now += 60  # nothing to do
        for _ in range(40):
            engine.step(8, requests=8)
        engine.step(0, requests=0)
        engine.choice.steps.over()  # of a step that nobody sent
    assert engine.choice.steps.seconds(8000) == pytest.approx(0.205, rel=0.01)


def test_a_load_of_the_whole_prompt_saves_a_slow_step() -> None:
    """A step of few tokens takes 30 ms, one that decodes 5 ms: so a load of 10 ms pays although
    prefill takes only 8 ms more than such a step, if it leaves nothing but the last token."""
    engine = Engine()
    for number in range(8):
        engine.fixed = 0.030
        engine.step(200 + 40 * number)
        engine.fixed = 0.005
        engine.step(1)
        engine.load((200 + 40 * number) * TOKEN_BYTES, 1e12, 0.010)
    size = 320 * TOKEN_BYTES
    assert engine.choice.why_not(320, size, 0) == ""
    assert engine.choice.why_not(320, size, 1) == ""
    assert engine.choice.why_not(320, size, 16) == "slower"


def test_what_small_steps_take_is_not_forgotten_among_large_ones() -> None:
    """Steps of 16 tokens take 28 ms here, as long as those of 900; then only prompts of 8,000
    tokens come. The last block of a prompt that the engine has itself is still worth loading."""
    engine = Engine(per_token=30e-6)
    for number in range(100):
        engine.fixed = 0.0275 if number == 3 else 0.0
        engine.step(16 if number == 3 else 8192 - number)
        engine.load(8192 * TOKEN_BYTES, 50e9)
    assert engine.choice.steps.seconds(16) == pytest.approx(0.028, rel=0.01)
    assert engine.choice.why_not(16, 16 * TOKEN_BYTES, 0) == ""
    assert engine.choice.steps.seconds(8000) == pytest.approx(0.240, rel=0.05)
    assert engine.choice.steps.seconds(32000) == pytest.approx(0.960, rel=0.05)


def test_one_slow_step_counts_no_more_than_larger_ones() -> None:
    engine = Engine()
    for tokens in (2000, 4000, 8000, 1000, 3000):
        engine.step(tokens)
    engine.fixed = 5.0  # a kernel is compiled
    engine.step(16)
    assert engine.choice.steps.seconds(16) == pytest.approx(0.005 + 25e-6 * 1000, rel=0.05)


def test_steps_that_are_sent_ahead_take_from_end_to_end() -> None:
    """With async scheduling a step waits for the one before it, which is not its own time."""
    engine = Engine()
    steps = engine.choice.steps
    sizes = [2000, 500, 4000, 1000, 8000, 3000]
    steps.sent(sizes[0], 1)
    for tokens, after in zip(sizes, [*sizes[1:], 0], strict=True):
        if after:
            steps.sent(after, 1)
        engine.now += 0.005 + 25e-6 * tokens
        steps.over()
    assert steps.seconds(8000) == pytest.approx(0.205, rel=0.01)


def test_a_step_of_nothing_that_is_heard_of_late_takes_no_time_from_the_next() -> None:
    """vLLM hears of an empty step only after it has told the device of the next one."""
    engine = Engine(fixed=0.001)
    steps = engine.choice.steps
    for tokens in (16, 2000) * 4:
        steps.sent(0, 0)
        engine.now += 0.01
        steps.sent(tokens, 1)
        engine.now += 0.03  # the processor tells the device
        steps.over()  # of the empty one
        engine.now += engine.fixed + engine.per_token * tokens
        steps.over()
    assert steps.seconds(16) == pytest.approx(0.031 + 16 * 25e-6, rel=0.01)
    assert steps.seconds(2000) == pytest.approx(0.031 + 2000 * 25e-6, rel=0.01)


def test_what_was_learned_counts_soon_also_if_nothing_more_is_learned() -> None:
    engine = Engine(fixed=0.5, per_token=0.0)
    for tokens in (500, 1000, 2000, 400, 300):
        engine.step(tokens)
    assert engine.choice.steps.seconds(500) == pytest.approx(0.5, rel=0.3)
    engine.fixed = 0.02
    for tokens in (500, 1000, 2000, 400, 300, 700) * 2:
        engine.step(tokens)
    engine.now += REFIT_SECONDS
    assert engine.choice.steps.seconds(500) == pytest.approx(0.02, rel=0.3)


def test_a_few_odd_ones_do_not_decide() -> None:
    """Kernels that are compiled, a machine that stands still: computing and loading alike."""
    engine = Engine()
    for number in range(12):
        engine.fixed = 9.0 if number in (0, 7) else 0.005
        engine.step(2000 + 500 * number)
        engine.load((2000 + 500 * number) * TOKEN_BYTES, 20e9, 3.0 if number in (0, 4) else 0.002)
    assert engine.choice.steps.seconds(8000) == pytest.approx(0.2, rel=0.05)
    assert engine.choice.loads.seconds(1000 * MB) == pytest.approx(0.052, rel=0.1)


def test_sizes_that_are_alike_give_a_rate() -> None:
    """The fixed part cannot be told then, and noise must not become a slope."""
    engine, chance = Engine(), random.Random(2)
    for _ in range(20):
        engine.fixed = 0.005 * chance.uniform(0.0, 2.0)
        engine.step(chance.randint(7990, 8010))
    assert engine.choice.steps.seconds(4000) == pytest.approx(0.1025, rel=0.05)


def test_many_small_ones_do_not_hide_how_size_counts() -> None:
    engine, chance = Engine(), random.Random(3)
    for number in range(32):
        engine.fixed = 0.005 * chance.uniform(0.8, 1.2)
        engine.step(8000 if number == 20 else chance.randint(16, 60))
    assert engine.choice.steps.seconds(8000) == pytest.approx(0.2, rel=0.05)


def test_the_cheaper_one_is_taken() -> None:
    slow, fast = taught(1e9), taught(30e9)
    assert slow.why_not(8000) == "slower"
    assert fast.why_not(8000) == ""
    assert fast.why_not(32) == "slower", "what a load costs in any case"
    assert fast.why_not(1000) == ""


def test_everything_is_loaded_until_enough_is_known() -> None:
    engine = Engine()
    for _ in range(ENOUGH - 1):
        engine.step(8000)
        engine.load(8000 * TOKEN_BYTES, 1e9)
    assert engine.why_not(8000) == ""
    engine.step(8000)
    assert engine.why_not(8000) == "", "of loads, not enough"
    engine.load(8000 * TOKEN_BYTES, 1e9)
    assert engine.why_not(8000) == "slower"


def test_loads_under_way_are_ahead() -> None:
    engine = taught(30e9)  # 8,000 tokens: 36 ms instead of 200
    names = []
    while not (why := engine.why_not(8000)):
        names.append(engine.order(8000 * TOKEN_BYTES))
    assert why == "queued" and len(names) == 5
    assert engine.choice.loads.queued_bytes == 5 * 8000 * TOKEN_BYTES
    engine.end(names.pop(), 0.03)
    assert engine.why_not(8000) == ""
    for name in names:
        engine.end(name, 0.03)
    assert engine.choice.loads.queued_bytes == 0


@pytest.mark.parametrize("shared", [False, True], ids=["one by one", "all at once"])
def test_loads_that_share_the_bus_do_not_look_slow(shared: bool) -> None:
    """Four at a time: each waits for those before it, or all go on together and end together."""
    engine = taught(30e9)
    alone = engine.choice.loads.seconds(1000 * MB)
    for _ in range(40):
        names = [engine.order(1000 * MB) for _ in range(4)]
        each = 1000 * MB / 30e9
        for number, name in enumerate(names, 1):
            engine.end(name, 0.002 + each * (4 if shared else number))
    assert engine.choice.loads.seconds(1000 * MB) == pytest.approx(alone, rel=0.1)


def test_a_store_that_became_faster_is_noticed() -> None:
    """One load at a time is tried; the first good ones do not decide either."""
    engine, tried = taught(1e9), []
    for _ in range(10 * 60):
        engine.now += 0.5
        if not engine.why_not(8000):
            tried.append(engine.now)
            engine.load(8000 * TOKEN_BYTES, 30e9)
        if engine.choice.loads.seconds(8000 * TOKEN_BYTES) < 0.2:
            break
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert 3 <= len(tried) <= FORGET_SECONDS / RETRY_SECONDS + ENOUGH
    assert min(waits) >= RETRY_SECONDS, "one load at a time"
    assert engine.why_not(8000) == ""


def test_asking_changes_nothing() -> None:
    engine = taught(1e9)
    engine.now += RETRY_SECONDS
    assert [engine.why_not(8000) for _ in range(3)] == ["", "", ""]
    engine.order(8000 * TOKEN_BYTES)
    assert [engine.why_not(8000) for _ in range(3)] == ["slower"] * 3


def test_failed_loads_count_where_they_were_slow() -> None:
    engine = taught(30e9)
    before = engine.choice.loads.seconds(1000 * MB)
    for _ in range(40):  # gone from the store, which is quick
        engine.now += 0.0001
        engine.end(engine.order(1000 * MB), 0.0001, failed=True)
    assert engine.choice.loads.seconds(1000 * MB) == before
    for _ in range(40):  # hung: a rank cannot say how long
        name = engine.order(1000 * MB)
        engine.now += 62
        engine.end(name, 0.0, failed=True)
    assert engine.why_not(8000) == "slower"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_impossible_times_teach_nothing(seconds: float) -> None:
    line, engine = CostLine(), taught(30e9)
    for _ in range(ENOUGH):
        line.add(100, seconds, 0.0)
        line.add(0, 1.0, 0.0)
    assert line.fit() is None
    before = engine.choice.loads.seconds(1000 * MB)
    for _ in range(40):
        engine.end(engine.order(1000 * MB), seconds)
        engine.end(engine.order(0), 1.0)
    assert engine.choice.loads.seconds(1000 * MB) == before
    assert engine.choice.loads.queued_bytes == 0


def test_reports_of_unknown_loads_are_ignored() -> None:
    engine = taught(30e9)
    engine.choice.loads.reported("stranger", 99.0, failed=False)
    engine.choice.loads.over("stranger")
    assert engine.choice.loads.queued_bytes == 0 and engine.why_not(8000) == ""


def test_the_slowest_rank_counts() -> None:
    engine = Engine()
    for tokens in (500, 1000, 2000, 4000, 8000):
        name = engine.order(tokens * TOKEN_BYTES)
        for rank in (0.1, 1.0, 0.2):
            engine.choice.loads.reported(name, rank * tokens / 1000, failed=False)
        engine.choice.loads.over(name)
    assert engine.choice.loads.seconds(8000 * TOKEN_BYTES) == pytest.approx(8.0)
