# SPDX-License-Identifier: Apache-2.0
"""Where a request is served: the cost of every option, and which one is taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import msgspec
import pytest

from kvferry.router.choice import (
    MOST_ALONE,
    MOST_DECODE,
    MOST_PREFILL,
    PARTS,
    Decision,
    EngineView,
    Holding,
    Option,
    PromptView,
    Rate,
    Role,
    Tier,
    Weights,
    choose,
    options,
    place,
)

BOTH: frozenset[Role] = frozenset(("prefill", "decode"))
PREFILL: frozenset[Role] = frozenset(("prefill",))
DECODE: frozenset[Role] = frozenset(("decode",))
# Only this request's first token counts.
SELFISH = Weights(tie_share=0.0, tie_seconds=0.0, stream=0.0, work=0.0, decode=0.0)


def engine(name: str, roles: frozenset[Role] = DECODE, **known: object) -> EngineView:
    usual = EngineView(
        name=name,
        roles=roles,
        up=True,
        waiting_tokens=0,
        running=0,
        prefill=Rate(0.01, 1e-4),
        step_seconds=0.005,
        receive=Rate(0.006, 1e-5),
    )
    return msgspec.structs.replace(usual, **known)  # type: ignore[arg-type]


def held(name: str, tokens: int, tier: Tier = "gpu") -> Holding:
    return Holding(name, tokens, tier)


def placed(prompt: PromptView, *engines: EngineView, weights: Weights = SELFISH) -> Decision:
    decision = place(prompt, engines, Random(1), weights)
    assert decision is not None
    return decision


def option(decision: Decision, prefill: str | None, decode: str) -> Option:
    (found,) = [o for o in decision.options if (o.prefill, o.decode) == (prefill, decode)]
    return found


def test_seconds_of_a_prompt_computed_where_it_is_decoded():
    d = engine("d", waiting_tokens=1000)
    chosen = placed(PromptView(2000, (held("d", 500),)), d).chosen
    assert chosen.parts == pytest.approx(
        {"queue": 0.1, "load": 0, "prefill": 0.01 + 0.15, "transfer": 0, "decode": 0.005}
    )
    assert chosen.seconds == pytest.approx(0.265)
    assert (chosen.cached_tokens, chosen.source, chosen.prefill) == (500, "local", None)


def test_seconds_of_a_hand_over():
    p, d = engine("p", PREFILL, waiting_tokens=3000), engine("d", waiting_tokens=20_000)
    prompt = PromptView(10_000, (held("p", 4000), held("d", 1000)))
    pair = option(placed(prompt, p, d), "p", "d")
    assert pair.parts == pytest.approx(
        {
            "queue": 0.3 + 0.8192,  # all that waits on P, and one chunk of D's
            "load": 0,
            "prefill": 0.01 + 0.6,
            "transfer": 0.006 + 9000e-5,  # D has 1,000 of them
            "decode": 0.005,
        }
    )
    assert (pair.cached_tokens, pair.source) == (4000, "handover")


@pytest.mark.parametrize("tokens", [1, 100, 5000, 100_000])
def test_parts_add_up_and_all_are_named(tokens: int):
    fleet = [engine(f"e{n}", BOTH, waiting_tokens=n * 700, running=n) for n in range(4)]
    prompt = PromptView(tokens, (held("e2", 64), held("e3", 3000, "pool")))
    for found in placed(prompt, *fleet, weights=Weights()).options:
        assert tuple(found.parts) == PARTS
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert found.cached_tokens < tokens or tokens == 1


def test_attention_makes_later_tokens_dearer():
    rate = Rate(0.0, 1e-4, attention_tokens=1000)
    assert rate.seconds(1000) == pytest.approx(0.15)
    assert rate.seconds(1000, cached=1000) == pytest.approx(0.25)
    assert rate.seconds(500) + rate.seconds(500, cached=500) == pytest.approx(rate.seconds(1000))
    assert rate.seconds(0, cached=1000) == 0


def test_short_prompts_are_computed_where_they_are_decoded_and_long_ones_handed_over():
    p = engine("p", PREFILL)
    d = engine("d", running=20)
    weights = replace(SELFISH, stream=0.05)
    assert placed(PromptView(20), p, d, weights=weights).chosen.prefill is None
    assert placed(PromptView(20_000), p, d, weights=weights).chosen.prefill == "p"
    mostly_cached = PromptView(20_000, (held("d", 19_990),))
    assert placed(mostly_cached, p, d, weights=weights).chosen.prefill is None


def test_a_long_queue_where_the_cache_is_costs_more_than_computing_elsewhere():
    prompt = PromptView(4000, (held("a", 3000),))
    idle, busy = engine("a"), engine("a", waiting_tokens=5000)
    assert placed(prompt, idle, engine("b")).chosen.decode == "a"
    assert placed(prompt, busy, engine("b")).chosen.decode == "b"


def test_a_prefix_of_another_engine_is_used_only_through_its_prefill_role():
    prompt = PromptView(50_000, (held("holder", 49_000),))
    only_decodes = engine("holder", DECODE, waiting_tokens=60_000)
    assert placed(prompt, only_decodes, engine("d")).chosen.source == "none"
    also_prefills = engine("holder", BOTH, running=100)
    weights = replace(SELFISH, decode=0.01)
    slow = msgspec.structs.replace(
        also_prefills, step_seconds=0.5
    )  # good to prefill on, bad to decode on
    chosen = placed(prompt, slow, engine("d"), weights=weights).chosen
    assert (chosen.prefill, chosen.decode, chosen.source) == ("holder", "d", "handover")


def test_the_pool_is_read_if_that_is_faster_than_computing():
    prompt = PromptView(10_000, (held("x", 9000, "pool"), held("d", 1000)))
    fast = engine("d", pool=Rate(0.004, 1e-5))
    chosen = placed(prompt, fast).chosen
    assert (chosen.source, chosen.cached_tokens) == ("pool", 9000)
    assert chosen.parts["load"] == pytest.approx(0.004 + 8000e-5)
    slow = placed(prompt, engine("d", pool=Rate(0.004, 2e-4))).chosen
    assert (slow.source, slow.cached_tokens, slow.parts["load"]) == ("local", 1000, 0)
    without = placed(prompt, engine("d")).chosen
    assert (without.source, without.cached_tokens) == ("local", 1000)


def test_an_engines_own_memory_is_read_without_a_pool():
    prompt = PromptView(10_000, (held("d", 8000, "cpu"), held("other", 9000, "cpu")))
    chosen = placed(prompt, engine("d")).chosen
    assert (chosen.source, chosen.cached_tokens) == ("pool", 8000)


def test_a_prefill_is_charged_for_the_streams_that_it_stops():
    busy, quiet = engine("busy", running=30), engine("quiet", running=2, waiting_tokens=500)
    prompt = PromptView(5000)
    assert placed(prompt, busy, quiet).chosen.decode == "busy"
    weights = replace(SELFISH, stream=0.05)
    decision = placed(prompt, busy, quiet, weights=weights)
    assert decision.chosen.decode == "quiet"
    assert option(decision, None, "busy").harm_seconds == pytest.approx(0.5 * 0.05 * 30)


def test_a_prefill_is_charged_for_the_requests_behind_it():
    """With queues everywhere, what is cached decides, though its own queue is longer."""
    a = engine("a", waiting_tokens=15_000, waiting=20)
    b = engine("b", waiting_tokens=10_000, waiting=20)
    prompt = PromptView(1200, (held("a", 1100),))
    assert placed(prompt, a, b).chosen.decode == "b"
    decision = placed(prompt, a, b, weights=replace(SELFISH, work=1.0))
    assert decision.chosen.decode == "a"
    assert option(decision, None, "b").harm_seconds == pytest.approx(0.12 * 21)


def test_requests_that_wait_for_a_step_are_no_queue():
    few, many = engine("few", waiting=2), engine("many", waiting=10)
    decision = placed(PromptView(1000), few, many, weights=replace(SELFISH, work=1.0))
    assert option(decision, None, "few").harm_seconds == pytest.approx(0.1 * (1 + 6))  # the mean
    assert option(decision, None, "many").harm_seconds == pytest.approx(0.1 * (1 + 10))


def test_the_last_token_is_computed_in_any_case():
    chosen = placed(PromptView(1000, (held("d", 1000),)), engine("d")).chosen
    assert chosen.cached_tokens == 999
    assert chosen.parts["prefill"] == pytest.approx(0.01 + 1e-4)


def test_an_engine_hands_nothing_over_to_itself():
    found = placed(PromptView(50_000), engine("a", BOTH), engine("b", BOTH)).options
    assert {(o.prefill, o.decode) for o in found} == {
        *((None, "a"), (None, "b"), ("a", "b"), ("b", "a"))
    }


def test_slow_steps_are_charged_for_the_whole_answer():
    fast = engine("fast", waiting_tokens=100)
    slow = engine("slow", running=10, step_seconds=0.01, step_growth_seconds=0.001)
    prompt = PromptView(100, output_tokens=500)
    assert placed(prompt, fast, slow).chosen.decode == "slow"
    decision = placed(prompt, fast, slow, weights=replace(SELFISH, decode=0.05))
    assert decision.chosen.decode == "fast"
    assert option(decision, None, "slow").harm_seconds == pytest.approx(0.05 * 500 * 0.02)


def test_a_full_engine_is_waited_for_as_long_as_answers_take():
    full = engine("full", running=10, waiting=5, free_blocks=0.0, cache_tokens=100_000)
    # 5 requests of 10,000 tokens wait, and this one: 60,256 of 100,000 in 256 steps of 5 ms.
    prompt = PromptView(10_000)
    queue = placed(prompt, full).chosen.parts["queue"]
    assert queue == pytest.approx((10_000 + 256 + 50_000) / 100_000 * 256 * 0.005)
    roomy = msgspec.structs.replace(full, free_blocks=0.7)
    assert placed(prompt, roomy).chosen.parts["queue"] == 0
    unknown = msgspec.structs.replace(full, cache_tokens=0)
    assert placed(prompt, unknown).chosen.parts["queue"] == 0


def test_a_hand_over_waits_for_blocks_of_both_engines():
    full = {"running": 10, "waiting": 5, "free_blocks": 0.0, "cache_tokens": 100_000}
    p, d = engine("p", PREFILL), engine("d", **full)
    assert option(placed(PromptView(10_000), p, d), "p", "d").parts["queue"] > 0.5
    p, d = engine("p", PREFILL, **full), engine("d")
    assert option(placed(PromptView(10_000), p, d), "p", "d").parts["queue"] > 0.5


def test_engines_that_are_down_are_never_chosen() -> None:
    out = engine("out", BOTH, up=False)
    slow = engine("slow", waiting_tokens=10**6)
    prompt = PromptView(5000, (held("out", 4999),))
    for found in placed(prompt, out, slow).options:
        assert "out" not in (found.decode, found.prefill)
    assert place(prompt, [out], Random(1)) is None


def test_what_may_not_be_handed_over_is_not():
    fleet = [engine("p", PREFILL), engine("d", running=50)]
    decision = placed(PromptView(50_000, may_hand_over=False), *fleet, weights=Weights())
    assert {found.prefill for found in decision.options} == {None}


def test_of_equal_engines_the_least_loaded_one_is_taken():
    loaded = [engine(f"d{n}", running=4 + n, step_growth_seconds=0.001) for n in range(5)]
    free = engine("free", running=1, step_growth_seconds=0.001)
    for seed in range(20):
        decision = place(PromptView(1), [*loaded, free], Random(seed))
        assert decision is not None and decision.chosen.decode == "free"


def test_options_are_bounded_and_the_best_engines_are_among_them():
    fleet = [engine(f"e{n}", BOTH, waiting_tokens=100 * (50 - n)) for n in range(50)]
    prompt = PromptView(30_000, (held("e0", 29_000),))
    found = options(prompt, fleet, SELFISH)
    assert len(found) <= 64
    assert MOST_ALONE + MOST_PREFILL * MOST_DECODE <= 64
    assert "e49" in {o.decode for o in found}
    assert "e0" in {o.prefill for o in found}, "most cached, though its queue is the longest"
    assert [o.cost for o in found] == sorted(o.cost for o in found)


def test_equal_engines_share_requests():
    fleet = [engine(f"d{n}") for n in range(4)]
    random = Random(3)
    counts: Counter[str] = Counter()
    for _ in range(400):
        decision = place(PromptView(1000), fleet, random)
        assert decision is not None
        counts[decision.chosen.decode] += 1
    assert set(counts) == {"d0", "d1", "d2", "d3"}
    assert max(counts.values()) < 150


def test_of_two_nearly_equal_engines_the_less_loaded_one_is_taken():
    light, heavy = engine("light", running=1), engine("heavy", running=3)
    weights = replace(SELFISH, tie_seconds=0.01)
    for seed in range(20):
        decision = place(PromptView(1000), [heavy, light], Random(seed), weights=weights)
        assert decision is not None and decision.chosen.decode == "light"


def test_routers_that_see_the_same_make_no_herd():
    """Of three engines within the tolerance, the best two are taken, the best more often."""
    fleet = [engine(f"d{n}", running=n) for n in range(3)]
    weights = replace(SELFISH, tie_seconds=0.01)
    counts = Counter(
        decision.chosen.decode
        for seed in range(300)
        if (decision := place(PromptView(1000), fleet, Random(seed), weights=weights)) is not None
    )
    assert counts["d0"] > counts["d1"] > 50
    assert counts["d2"] == 0


def test_a_conversation_stays_where_its_cache_is_among_equals():
    """A few cached tokens are worth less than the tolerance, and decide nevertheless."""
    fleet = [engine("here", running=1), *(engine(f"d{n}") for n in range(3))]
    prompt = PromptView(1000, (held("here", 16),))
    for seed in range(20):
        decision = place(prompt, fleet, Random(seed))
        assert decision is not None and decision.chosen.decode == "here"


def test_options_beyond_the_tolerance_are_not_drawn():
    near = Option("near", None, 1.0, {}, 0, "none")
    far = Option("far", None, 1.03, {}, 500, "local")
    views = [engine("near"), engine("far")]
    assert choose([near, far], views, Random(1)).chosen is near
    assert choose([near, far], views, Random(1), Weights(tie_share=0.05)).chosen is far


def test_equal_seeds_decide_equally():
    fleet = [engine(f"d{n}") for n in range(8)]

    def run(seed: int) -> list[str]:
        random = Random(seed)
        found = [place(PromptView(1000), fleet, random) for _ in range(50)]
        return [decision.chosen.decode for decision in found if decision is not None]

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_the_sentence_says_what_and_why():
    prompt = PromptView(4000, (held("d", 3000),))
    fleet = [engine("p", PREFILL), engine("d")]
    why = placed(prompt, *fleet).why
    assert why == (
        "first token in 115 ms if d computes it, in 431 ms with a hand-over; "
        "3000 tokens are cached there"
    )
    why = placed(PromptView(100_000), *fleet, weights=replace(SELFISH, stream=1.0)).why
    assert "nothing of it is cached" in why
    busy = engine("d", waiting_tokens=9 * 10**5)
    assert "cached on p" in placed(PromptView(4000, (held("p", 64),)), fleet[0], busy).why
