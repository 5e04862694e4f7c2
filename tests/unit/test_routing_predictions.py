# SPDX-License-Identifier: Apache-2.0
"""What `python -m benchmarks.routing --part engines` asks, and how it reads rates off engines."""

from __future__ import annotations

import pytest

from benchmarks.routing.conversations import BLOCK_TOKENS, SYSTEM_TOKENS, as_trace, conversations
from benchmarks.routing.predict import SIZES, STREAMS, Calibration, predict, single_asks

STEP, MORE, FIXED, TOKEN, ATTENTION, LOAD, LOADED = 0.008, 0.001, 0.02, 2e-4, 900.0, 0.015, 1e-6


def calibrated() -> Calibration:
    """Engines that cost exactly what the constants say."""
    made = Calibration()
    for size in SIZES:
        made.computed[size] = [FIXED + TOKEN * (size + size * size / (2 * ATTENTION))]
        made.handed[size] = [LOAD + LOADED * size + STEP + MORE]
    made.steps = {1: [STEP + MORE], STREAMS: [STEP + STREAMS * MORE]}
    return made


def test_turns_continue_their_conversation_and_share_their_system_prompt() -> None:
    asks = conversations(4)
    assert [ask.seconds for ask in asks] == sorted(ask.seconds for ask in asks)
    trace = as_trace(asks)
    last: dict[int, int] = {}
    for at, (ask, request) in enumerate(zip(asks, trace.requests, strict=True)):
        assert len(request.blocks) == len(ask.tokens) // BLOCK_TOKENS
        before = last.get(ask.conversation)
        if before is not None:
            assert ask.tokens[: len(asks[before].tokens)] == asks[before].tokens
            held = trace.requests[before].blocks
            assert request.blocks[: len(held)] == held
        last[ask.conversation] = at
    shared = SYSTEM_TOKENS // BLOCK_TOKENS
    assert len({request.blocks[:shared] for request in trace.requests}) == 2


def test_rates_are_read_off_what_engines_took() -> None:
    rates = calibrated().rates(16_384)
    assert rates.prefill.fixed_seconds == pytest.approx(FIXED)
    assert rates.prefill.token_seconds == pytest.approx(TOKEN)
    assert rates.prefill.attention_tokens == pytest.approx(ATTENTION)
    assert rates.step.fixed_seconds == pytest.approx(STEP)
    assert rates.step.request_seconds == pytest.approx(MORE)
    assert rates.transfer.fixed_seconds == pytest.approx(LOAD)
    assert rates.transfer.bytes_per_second == pytest.approx(16_384 / LOADED)


def test_a_prompt_that_costs_by_its_square_alone_can_be_predicted() -> None:
    """On a busy machine, the best curve may have no part that grows with the tokens."""
    made = calibrated()
    made.computed = {size: [FIXED + 1e-7 * size * size] for size in SIZES}
    cost = made.rates(16_384).prefill
    assert cost.token_seconds > 0 and cost.attention_tokens > 0
    assert cost.token_seconds / (2 * cost.attention_tokens) == pytest.approx(1e-7, rel=0.01)


def test_requests_are_predicted_with_the_routers_time_that_single_ones_showed() -> None:
    rates, router = calibrated().rates(16_384), 0.03

    def alone(size: int) -> float:
        return FIXED + TOKEN * (size + size * size / (2 * ATTENTION))

    def load(size: int) -> float:
        return LOAD + LOADED * size + STEP + MORE

    ask = conversations(2)[0]
    size, single = len(ask.tokens), len(single_asks()[0].tokens)
    handed = [alone(single) + load(single) + router]
    found = predict("one", "round-robin", [ask], rates, 2, handed, [1.0])
    assert found.router_ms == pytest.approx(router * 1e3, rel=0.01)
    assert found.predicted_ms == pytest.approx((alone(size) + load(size) + router) * 1e3, rel=0.01)
    measured = alone(size) + router
    found = predict("one", "cost", [ask], rates, 2, [alone(single) + router], [measured])
    assert found.ratio == pytest.approx(1, rel=0.01) and found.met
