# SPDX-License-Identifier: Apache-2.0
"""What a router learns of its engines: prefill, steps, hand-overs, and how busy they are."""

from __future__ import annotations

import pytest

from kvferry.costs import ENOUGH, FEW, CostLine
from kvferry.router.choice import Role
from kvferry.router.rates import (
    PREFILL,
    STALE_SECONDS,
    STEP_GROWTH_SECONDS,
    STEP_SECONDS,
    TRANSFER,
    EngineMetrics,
    FleetMeter,
)

ROLES: frozenset[Role] = frozenset(("decode",))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> FleetMeter:
    return FleetMeter(clock)


def compute(fleet: FleetMeter, clock: Clock, name: str, tokens: int, cached: int = 0) -> None:
    """A prompt alone on an idle engine that takes 20 ms, and 50 us for each token of work."""
    clock.now += 3.0
    visit = fleet[name].prefill(tokens, cached)
    clock.now += 0.02 + 5e-5 * PREFILL.work(tokens - cached, cached)
    visit.computed()


def taught(fleet: FleetMeter, clock: Clock, name: str) -> None:
    for tokens in (500, 1000, 2000, 4000, 8000, 16_000):
        compute(fleet, clock, name, tokens)


def test_until_something_is_learned_an_engine_costs_what_was_measured(fleet: FleetMeter):
    view = fleet.view("d", ROLES)
    assert view.prefill == PREFILL
    assert view.receive == TRANSFER
    assert view.step_seconds == pytest.approx(STEP_SECONDS + STEP_GROWTH_SECONDS)
    assert view.step_growth_seconds == pytest.approx(STEP_GROWTH_SECONDS)
    assert (view.waiting_tokens, view.running, view.free_blocks, view.pool) == (0, 0, 1.0, None)


def test_prefill_is_learned_from_single_prompts(fleet: FleetMeter, clock: Clock):
    taught(fleet, clock, "d")
    rate = fleet.view("d", ROLES).prefill
    assert rate.fixed_seconds == pytest.approx(0.02)
    assert rate.token_seconds == pytest.approx(5e-5)


def test_prefill_of_cached_prompts_is_learned_as_well(fleet: FleetMeter, clock: Clock):
    for tokens in (1000, 2000, 4000, 8000, 16_000):
        compute(fleet, clock, "d", 30_000 + tokens, 30_000)
    assert fleet.view("d", ROLES).prefill.token_seconds == pytest.approx(5e-5)


def test_prompts_that_share_a_step_are_learned_together(fleet: FleetMeter, clock: Clock):
    """Eight prompts, answered at once: the first one did not take the time of all of them."""
    for tokens in (200, 400, 600, 800, 1000, 1200):
        visits = [fleet["d"].prefill(tokens, 0) for _ in range(8)]
        clock.now += 8 * 5e-5 * visits[0].work
        for visit in visits:
            visit.computed()
    assert fleet.view("d", ROLES).prefill.token_seconds == pytest.approx(5e-5, rel=0.01)


def test_short_prompts_say_little_about_long_ones(fleet: FleetMeter, clock: Clock):
    """30 ms for each, whatever its length: 8,000 tokens do not take 100 times as long as 80."""
    for number in range(20):
        visit = fleet["d"].prefill(80 + number % 3, 0)
        clock.now += 0.03
        visit.computed()
    rate = fleet.view("d", ROLES).prefill
    assert rate.seconds(80) == pytest.approx(0.03, rel=0.05)
    assert rate.token_seconds == pytest.approx(PREFILL.token_seconds, rel=0.05)
    assert fleet.view("new", ROLES).prefill == PREFILL, "nor is it believed of others"


def test_an_engine_that_is_never_idle_teaches_too(fleet: FleetMeter, clock: Clock):
    ahead = [fleet["d"].prefill(10_000, 0) for _ in range(2)]
    for _ in range(40):
        ahead.append(fleet["d"].prefill(10_000, 0))
        visit = ahead.pop(0)
        clock.now += 5e-5 * visit.work
        visit.computed()
    rate = fleet.view("d", ROLES).prefill
    assert rate.seconds(50_000) == pytest.approx(5e-5 * rate.work(50_000), rel=0.05)


def test_dropped_prompts_and_guessed_sizes_teach_nothing(fleet: FleetMeter, clock: Clock):
    for _ in range(2 * ENOUGH):
        visit = fleet["d"].prefill(1000, 0)
        clock.now += 100
        visit.dropped()
        visit.computed()  # too late: nothing happens
        guessed = fleet["d"].prefill(1000, 0, known=False)
        clock.now += 100
        guessed.computed()
    assert fleet.view("d", ROLES).prefill == PREFILL
    assert fleet.view("d", ROLES).waiting_tokens == 0


def test_a_dropped_prompt_spoils_no_other(fleet: FleetMeter, clock: Clock):
    taught(fleet, clock, "d")
    for _ in range(40):
        other = fleet["d"].prefill(1000, 0)
        clock.now += 50.0
        visit = fleet["d"].prefill(1000, 0)
        other.dropped()
        clock.now += 0.02 + 5e-5 * visit.work
        visit.computed()
    assert fleet.view("d", ROLES).prefill.token_seconds < 1e-4


def test_an_unknown_engine_costs_what_the_others_do(fleet: FleetMeter, clock: Clock):
    taught(fleet, clock, "a")
    new = fleet.view("new", ROLES)
    assert new.prefill == fleet.view("a", ROLES).prefill
    fleet.keep(["new"])
    clock.now += 1
    assert fleet.view("new", ROLES).prefill == PREFILL


def test_work_waits_until_it_is_computed(fleet: FleetMeter, clock: Clock):
    taught(fleet, clock, "d")
    first, second = fleet["d"].prefill(8000, 0), fleet["d"].prefill(4000, 1000)
    work = first.work + second.work
    assert fleet.view("d", ROLES).waiting_tokens == round(work)
    clock.now += 0.02 + 5e-5 * 3000  # the first one is under way
    assert fleet.view("d", ROLES).waiting_tokens == pytest.approx(work - 3000, abs=1)
    clock.now += 100.0  # it takes longer than expected: the second one still waits
    assert fleet.view("d", ROLES).waiting_tokens == round(second.work)
    first.computed()
    second.computed()
    assert fleet.view("d", ROLES).waiting_tokens == 0


def test_steps_are_learned_by_running_requests(fleet: FleetMeter, clock: Clock):
    for count in (1, 2, 4, 8, 16, 8, 4, 2):
        streams = [fleet["d"].stream() for _ in range(count)]
        for stream in streams:
            stream.first()
        clock.now += 100 * (0.01 + 0.002 * count)
        mine = streams.pop()
        mine.ended(101)
        for stream in streams:
            stream.ended(0)  # cut: they teach nothing
    view = fleet.view("d", ROLES)
    # A stream's mean of running requests is between its own first and last moment.
    assert view.step_growth_seconds == pytest.approx(0.002, rel=0.15)
    assert view.running == 0


def test_a_stream_ends_once(fleet: FleetMeter, clock: Clock):
    one, other = fleet["d"].stream(), fleet["d"].stream()
    assert fleet.view("d", ROLES).running == 2
    one.ended(0)
    one.ended(0)
    assert fleet.view("d", ROLES).running == 1
    other.ended(5)  # it never began
    assert fleet.view("d", ROLES).running == 0


def test_hand_overs_are_learned_while_an_engine_has_no_prompts(fleet: FleetMeter, clock: Clock):
    for tokens in (1000, 2000, 4000, 8000, 16_000):
        fleet["d"].received(tokens, STEP_SECONDS + 0.03 + 2e-5 * tokens)
    rate = fleet.view("d", ROLES).receive
    assert (rate.fixed_seconds, rate.token_seconds) == pytest.approx((0.03, 2e-5))
    fleet["d"].prefill(1000, 0)
    for _ in range(40):
        fleet["d"].received(1000, 90.0)
    assert fleet.view("d", ROLES).receive == rate


def test_a_slow_hand_over_is_doubted_after_a_while(fleet: FleetMeter, clock: Clock):
    """It is not chosen, so nothing new is seen of it: it must be tried again one day."""
    meter = fleet["d"]
    for tokens in (100, 1000, 3000, 6000, 9000, 12_000):
        meter.received(tokens, 0.7 + 1e-4 * tokens)
    slow = fleet.view("d", ROLES).receive
    assert slow.seconds(1000) > 0.5
    clock.now += 60
    later = fleet.view("d", ROLES).receive
    assert later.seconds(1000) == pytest.approx(
        (slow.seconds(1000) + TRANSFER.seconds(1000)) / 2, rel=0.01
    )
    clock.now += 600
    assert fleet.view("d", ROLES).receive.seconds(1000) < 1.05 * TRANSFER.seconds(1000)
    for tokens in (100, 1000, 3000, 6000, 9000, 12_000):  # what is fast stays known
        meter.received(tokens, 0.005 + 1e-6 * tokens)
    clock.now += 1
    fast = fleet.view("d", ROLES).receive.seconds(9000)
    clock.now += 600
    assert fleet.view("d", ROLES).receive.seconds(9000) == fast


def test_metrics_tell_of_requests_of_others(fleet: FleetMeter, clock: Clock):
    compute(fleet, clock, "d", 2000)
    streams = [fleet["d"].stream() for _ in range(3)]
    fleet["d"].prefill(2000, 0)  # of the third stream
    fleet["d"].told(EngineMetrics(running=7, waiting=5, used_blocks=0.9, cache_tokens=50_000))
    view = fleet.view("d", ROLES)
    assert view.running == 3 + (7 + 5 - 3 - 4)
    assert view.waiting == 5
    assert view.waiting_tokens == pytest.approx(5 * PREFILL.work(2000), rel=0.01)
    assert (view.free_blocks, view.cache_tokens) == (pytest.approx(0.1), 50_000)
    streams.pop().ended(0)
    assert fleet.view("d", ROLES).running == 2 + 5, "its own requests count at once"
    clock.now += STALE_SECONDS + 1
    view = fleet.view("d", ROLES)
    assert (view.running, view.waiting, view.free_blocks, view.cache_tokens) == (2, 0, 1.0, 0)


def test_a_prompt_that_decodes_elsewhere_is_no_request_of_others(fleet: FleetMeter):
    fleet["p"].prefill(1000, 0, decoded_elsewhere=True)
    fleet["p"].told(EngineMetrics(running=1, waiting=0, used_blocks=0.1))
    assert fleet.view("p", ROLES).running == 0


def test_answers_are_expected_to_be_as_long_as_others(fleet: FleetMeter):
    assert fleet.output_tokens(None) == 256
    assert fleet.output_tokens(16) == 16
    for tokens in (100, 200, 300):
        fleet.answered(tokens)
    assert fleet.output_tokens(None) == 200
    assert fleet.output_tokens(1000) == 200
    assert fleet.output_tokens(0) == 1


def test_a_few_observations_wait_for_the_next_fit():
    line = CostLine(refit_seconds=0.5)
    for size in range(1, ENOUGH + 1):
        line.add(100.0 * size, 0.1 * size, 10.0)
    first = line.fit()
    assert first is not None and first.slope == pytest.approx(0.001)
    for _ in range(FEW - 1):
        line.add(1000.0, 2.0, 10.1)
    assert line.fit() is first  # and the one that is asked for beside a slope stays as well
    line.add(1000.0, 2.0, 10.6)
    later = line.fit()
    assert later is not None and later.slope > 0.0015
    for _ in range(FEW):  # many do not wait
        line.add(1000.0, 4.0, 10.7)
    assert line.fit() is not later


def test_fits_beside_several_slopes_follow_new_observations():
    line = CostLine()
    for _ in range(ENOUGH):
        line.add(100.0, 0.2, 1.0)
    before = [line.fit_beside(slope, 1.0) for slope in (1e-4, 2e-4, 1e-4, 2e-4)]
    assert before[:2] == before[2:] and before[0] != before[1]
    for _ in range(32):
        line.add(100.0, 0.4, 2.0)
    assert line.fit_beside(1e-4, 1.0) != before[0] and line.fit_beside(2e-4, 1.0) != before[1]
