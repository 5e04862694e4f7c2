# SPDX-License-Identifier: Apache-2.0
"""Fleets on paper: what a simulation must conserve, whatever the load, and its command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.errors import DescriptionError
from kvferry.router.choice import Rate
from kvferry.simulate.engine import (
    CopyCost,
    EngineRates,
    Gaps,
    ModelledEngine,
    ModelledPool,
    PrefixCache,
    SimulatedRequest,
    StepTime,
    VirtualClock,
    read_rates,
)
from kvferry.simulate.run import POLICIES, FleetShape, Plan, Policy, SimulationResult, simulate
from kvferry.simulate.trace import OUR_BLOCK_TOKENS, Trace, TraceRequest, read_trace

RATES = read_rates()


def conversations(count: int, turns: int, seed: int = 1, gap: float = 2.0) -> Trace:
    """Users who ask again and again, each time with all that was said before."""
    random = Random(seed)
    requests, at, numbers = [], 0.0, iter(range(10**9))
    system = [next(numbers) for _ in range(4)]
    histories = [list(system) for _ in range(count)]
    for _ in range(count * turns):
        history = random.choice(histories)
        history += [next(numbers) for _ in range(random.randrange(1, 8))]
        tokens = len(history) * 64 + random.randrange(64)
        requests.append(TraceRequest(at, tokens, random.randrange(1, 300), tuple(history)))
        at += random.expovariate(1 / gap)
    return Trace(tuple(requests), 64)


def plan(policy: Policy = "cost", engines: str = "4", **known: object) -> Plan:
    usual: dict[str, object] = {"blocks": 2000}
    return Plan(policy, FleetShape.read(engines), RATES, **(usual | known))  # type: ignore[arg-type]


def counts(result: SimulationResult) -> int:
    return sum(result.hit_tokens.values())


@pytest.mark.parametrize("engines", ["4", "2P2D", "1P3D", "1"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gap", [2.0, 0.02, 0.001])
def test_every_request_ends_once_and_every_token_is_hit_or_computed(
    policy: Policy, engines: str, gap: float
):
    trace = conversations(20, 10, gap=gap)
    result = simulate(trace, plan(policy, engines, blocks=300))  # `run` refuses a second end
    assert result.requests == 200
    served = result.requests - result.refused
    assert sum(use.requests for use in result.uses) == served
    assert counts(result) == result.tokens
    computed = sum(use.computed_tokens for use in result.uses)
    assert computed >= result.hit_tokens["none"]  # more where a hand-over was given up
    first = result.first_token
    assert 0 < first.p50 <= first.p90 <= first.p99 < math.inf
    assert all(0 <= use.busy_share <= 1 + 1e-9 for use in result.uses)


def test_hits_are_at_most_what_any_cache_could_hold():
    trace = conversations(30, 10)
    seen: set[int] = set()
    possible = 0
    for request in trace.requests:
        count = 0
        for block in request.blocks:
            if block not in seen:
                break
            count += 1
        possible += min(count * 64, request.tokens - 1)
        seen |= set(request.blocks)
    one = simulate(trace, plan(engines="1", blocks=100_000))
    hits = one.tokens - one.hit_tokens["none"]
    assert 0 < hits <= possible
    assert hits == possible, "one engine with room for all and time between requests misses nothing"
    for policy in POLICIES:
        result = simulate(trace, plan(policy, "4"))
        assert result.tokens - result.hit_tokens["none"] <= possible


def test_the_choice_finds_what_single_engines_hold():
    trace = conversations(60, 6)
    rates = {policy: simulate(trace, plan(policy, "8")).hit_rate for policy in POLICIES}
    assert rates["cost"] > 1.5 * rates["round-robin"]
    assert rates["cost"] > rates["prefix-hash"] > rates["round-robin"]


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_results(policy: Policy):
    def run(seed: int) -> tuple[object, ...]:
        result = simulate(conversations(20, 10, gap=0.05), plan(policy, "4", seed=seed))
        return (result.first_token, result.hit_tokens, result.uses, result.seconds)

    assert run(1) == run(1)
    if policy in ("cost", "least-loaded"):
        assert run(1) != run(2)


def test_one_request_takes_what_the_rates_say():
    request = TraceRequest(0.0, 8000, 101, tuple(range(125)))
    result = simulate(Trace((request,), 64), plan(engines="1"))
    first = RATES.prefill.seconds(8000) + 0.0  # one chunk, and nothing else runs
    assert result.first_token.p50 == pytest.approx(first)
    step = RATES.step.fixed_seconds + RATES.step.context_token_seconds * 8050
    assert result.token.p50 == pytest.approx(step, rel=0.001)
    assert result.gap.p50 == pytest.approx(step, rel=0.03)  # a logarithmic scale
    assert result.expected_error < 0.05


def test_a_hand_over_takes_prefill_transfer_and_a_step():
    request = TraceRequest(0.0, 8000, 101, tuple(range(125)))
    result = simulate(Trace((request,), 64), plan("round-robin", "1P1D"))
    transfer = RATES.copy_rate(RATES.transfer).seconds(8000)
    prefill = RATES.prefill.seconds(8000)
    step = RATES.step.fixed_seconds + RATES.step.context_token_seconds * 8000
    assert result.first_token.p50 == pytest.approx(prefill + transfer + step, rel=0.001)
    assert result.handed_over == 1


def test_a_cached_prompt_is_not_computed_again():
    blocks = tuple(range(100))
    requests = (TraceRequest(0.0, 6400, 5, blocks), TraceRequest(9.0, 6400, 5, blocks))
    one = simulate(Trace(requests, 64), plan(engines="1"))
    assert one.uses[0].computed_tokens == 6400 + 1  # the last token is computed in any case
    assert one.hit_tokens == {"local": 6399, "handover": 0, "pool": 0, "none": 6401}
    two = simulate(Trace(requests, 64), plan("round-robin", "2"))
    assert two.hit_tokens["local"] == 0
    pooled = simulate(Trace(requests, 64), plan("round-robin", "2", pool_blocks=1000))
    assert pooled.hit_tokens["pool"] == 6399


def test_requests_that_fit_no_cache_are_refused_and_counted():
    small = TraceRequest(0.0, 640, 10, tuple(range(10)))
    large = TraceRequest(1.0, 64_000, 10, tuple(range(10, 1010)))
    for shape in ("1", "1P1D"):
        result = simulate(Trace((small, large), 64), plan("round-robin", shape, blocks=100))
        assert (result.requests, result.refused, counts(result)) == (2, 1, 640)
    with pytest.raises(DescriptionError, match="give more blocks"):
        simulate(Trace((large,), 64), plan(engines="1", blocks=100))


def test_two_full_engines_do_not_wait_for_each_other_for_ever():
    """Each has computed a prompt for the other, and neither has room."""
    clock, ended = VirtualClock(), []

    def engine(name: str) -> ModelledEngine:
        cache = PrefixCache(10)
        roles = FleetShape(both=1).roles()[0]
        return ModelledEngine(
            name, roles, RATES, 64, cache, None, clock, Gaps(), lambda job: ended.append(job)
        )

    a, b = engine("a"), engine("b")
    for number, (p, d) in enumerate(((a, b), (b, a))):
        blocks = tuple(range(100 * number, 100 * number + 8))
        job = SimulatedRequest(TraceRequest(0.0, 512, 10, blocks), d, p)
        d.assigned += 1
        clock.at(0.0, lambda job=job: job.computed_on.submit(job))
    clock.run()
    assert [job.refused for job in ended] == [False, False]
    assert clock.now > 300


def test_a_prompt_that_comes_with_a_first_step_takes_nothing_from_it():
    """Both at the same instant: a handed-over request begins to run, and a prompt arrives."""
    rates = EngineRates(
        bytes_per_token=1.0,
        cache_bytes=1e6,
        prefill=Rate(1.0, 2.0**-10),
        step=StepTime(1.0),
        transfer=CopyCost(1.0, 1024.0),
    )
    clock, ended = VirtualClock(), []
    p, d = (
        ModelledEngine(name, roles, rates, 64, PrefixCache(99), None, clock, Gaps(), ended.append)
        for name, roles in zip("pd", FleetShape(prefill=1, decode=1).roles(), strict=True)
    )
    handed = SimulatedRequest(TraceRequest(0.0, 1024, 3, tuple(range(16))), d, p)
    other = SimulatedRequest(TraceRequest(4.0, 1024, 3, tuple(range(16, 32))), d, None)
    clock.at(0.0, lambda: p.submit(handed))
    # 1 + 1 s of prefill, 1 + 1 s of transfer; planned then, the prompt comes after the step began.
    clock.at(4.0, lambda: clock.at(4.0, lambda: d.submit(other)))
    clock.run()
    assert handed.first_token == 5.0
    assert other.first_token == 7.0
    assert ended == [handed, other]


def test_long_prompts_are_computed_in_chunks_between_which_others_decode():
    clock, gaps, ended = VirtualClock(), Gaps(), []
    roles = FleetShape(1).roles()[0]
    cache = PrefixCache(2000)
    engine = ModelledEngine("e", roles, RATES, 64, cache, None, clock, gaps, ended.append)
    stream = SimulatedRequest(TraceRequest(0.0, 64, 2000, (1,)), engine, None)
    long = SimulatedRequest(TraceRequest(1.0, 60_000, 2, tuple(range(2, 939))), engine, None)
    clock.at(0.0, lambda: engine.submit(stream))
    clock.at(1.0, lambda: engine.submit(long))
    clock.run()
    rate = RATES.prefill
    last_chunk = rate.seconds(8192, 52_000)
    assert 0.9 * last_chunk < gaps.percentile(1.0) < 1.1 * last_chunk
    # The stream loses the whole prefill, in pieces.
    assert stream.ended == pytest.approx(2000 * 0.0049 + rate.seconds(60_000), rel=0.05)


def test_the_choice_hands_long_prompts_over_while_others_decode():
    streams = [TraceRequest(0.001 * n, 64, 2000, (n,)) for n in range(50)]
    long = [
        TraceRequest(2.0 + n, 30_000, 20, tuple(range(n * 1000, n * 1000 + 468))) for n in (1, 2)
    ]
    result = simulate(Trace((*streams, *long), 64), plan(engines="1P1D"))
    assert 2 <= result.handed_over < 52
    assert result.uses[0].computed_tokens >= 60_000


def test_more_engines_are_never_much_slower():
    trace = conversations(40, 8, gap=0.02)
    p90 = [simulate(trace, plan(engines=str(n))).first_token.p90 for n in (1, 2, 4)]
    assert p90[0] > p90[1] > p90[2]


# The cache


def test_a_cache_keeps_what_is_held_and_evicts_the_oldest():
    cache = PrefixCache(4)
    assert cache.take((), 2)
    assert cache.name((1, 2)) == [1, 2]
    assert not cache.take((), 3), "two are held"
    cache.release([1, 2], 0)
    assert cache.leading((1, 2, 3)) == 2
    assert cache.take((1,), 2)  # 4 blocks: 1 is held, 2 is cached, two are new
    assert cache.leading((1, 2)) == 2
    assert cache.take((), 1)
    assert cache.leading((1, 2)) == 1, "2 was the oldest that nobody holds"
    assert not cache.take((), 1)
    assert cache.free_share == 0


def test_the_end_of_a_prompt_leaves_before_its_beginning():
    cache = PrefixCache(4)
    cache.take((), 4)
    cache.name((1, 2, 3, 4))
    cache.release([1, 2, 3, 4], 0)
    cache.take((), 1)
    assert cache.leading((1, 2, 3, 4)) == 3


def test_a_pool_forgets_the_least_recently_used():
    pool = ModelledPool(4)
    pool.put((1, 2))
    pool.put((3, 4))
    pool.put((1, 2))
    pool.put((5,))
    assert pool.leading((1, 2)) == 2
    assert pool.leading((3, 4)) == 1


# Traces, rates and the command


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_mooncakes_traces_count_whole_blocks(tmp_path: Path):
    row = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]}
    trace = read_trace(write(tmp_path / "t", row))
    assert trace.requests == (TraceRequest(1.5, 1100, 7, (4, 5)),)
    assert trace.block_tokens == 512


def test_our_traces_share_system_prompts_and_conversations(tmp_path: Path):
    size = OUR_BLOCK_TOKENS
    row = {"seconds": 0, "input_tokens": 4 * size, "output_tokens": 5}
    shared = {"system": "s", "system_tokens": 2 * size}
    trace = read_trace(
        write(
            tmp_path / "t",
            {**row, **shared, "conversation": "a"},
            {**row, **shared, "conversation": "b"},
            {**row, **shared, "conversation": "a", "input_tokens": 6 * size},
            {**row, **shared},
            {**row, **shared},
            row,
        )
    )
    a, b, again, alone, other, plain = (request.blocks for request in trace.requests)
    assert a[:2] == b[:2] == alone[:2] == other[:2]
    assert not set(a[2:]) & set(b[2:]) and not set(alone[2:]) & set(other[2:])
    assert again[:4] == a and len(again) == 6
    assert not set(plain) & {*a, *b, *again, *alone, *other}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"seconds": 0, "input_tokens": 5}, "line 2 of the trace"),
        ({"seconds": -1, "input_tokens": 5, "output_tokens": 5}, ">= 0.0 - at `"),
        ({"seconds": 0, "input_tokens": 0, "output_tokens": 5}, ">= 1 - at `"),
        ({"seconds": 0, "input_tokens": 5, "output_tokens": 5, "typo": 1}, "typo"),
        (
            {"seconds": 0, "input_tokens": 5, "output_tokens": 5, "system_tokens": 6},
            "a part of input_tokens",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, row: dict[str, object], words: str):
    good = {"seconds": 0, "input_tokens": 5, "output_tokens": 5}
    with pytest.raises(DescriptionError, match=words):
        read_trace(write(tmp_path / "t", good, row))


def test_hash_ids_must_cover_the_prompt(tmp_path: Path):
    row = {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [4]}
    with pytest.raises(DescriptionError, match="1 hash_ids are too few for 1100 tokens"):
        read_trace(write(tmp_path / "t", row))


def test_the_measured_rates_meet_the_measurements():
    """docs/benchmarks.md, "Engines on a GPU": prefill without a connector, loads from the pool."""
    prefill = RATES.prefill
    for tokens, seconds in ((2000, 0.0507), (8000, 0.2133), (32_000, 1.1741), (128_000, 9.9284)):
        assert prefill.seconds(tokens) == pytest.approx(seconds, rel=0.03)
    assert RATES.pool is not None
    for tokens, seconds in ((2000, 0.0112), (8000, 0.0330), (32_000, 0.1020)):
        assert RATES.copy_rate(RATES.pool).seconds(tokens) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"prefill": {"fixed_seconds": 0.1, "token_seconds": 0}},
            r"> 0.0 - at `\$.prefill.token_seconds",
        ),
        ({"cache_bytes": -1}, r"> 0.0 - at `\$.cache_bytes"),
        ({"typo": 1}, "typo"),
        ({"step": None}, "step"),
    ],
)
def test_bad_rates_are_named(tmp_path: Path, change: dict[str, object], words: str):
    good = json.loads((Path(read_rates.__code__.co_filename).parent / "h200-8b.json").read_text())
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(good | change))
    with pytest.raises(DescriptionError, match=words):
        read_rates(path)


@pytest.mark.parametrize("text", ["", "0", "4P", "4P0D", "x"])
def test_fleets_that_cannot_be(text: str):
    with pytest.raises(DescriptionError):
        FleetShape.read(text)


def small_trace(tmp_path: Path) -> Path:
    rows = [
        {
            "seconds": 0.2 * n,
            "input_tokens": 400 + 100 * (n // 5),
            "output_tokens": 20,
            "conversation": f"c{n % 5}",
        }
        for n in range(50)
    ]
    return write(tmp_path / "trace.jsonl", *rows)


def test_the_command_prints_json_and_writes_a_page(tmp_path: Path):
    page = tmp_path / "page.html"
    trace = str(small_trace(tmp_path))
    args = ["simulate", "--trace", trace, "--engines", "3", "--policy", "all", "--json"]
    args += ["--speed", "1", "--speed", "4", "--html", str(page)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    runs = json.loads(done.stdout)["runs"]
    assert [(run["policy"], run["speed"]) for run in runs] == [
        (policy, speed) for speed in (1.0, 4.0) for policy in POLICIES
    ]
    assert all(run["requests"] == 50 and run["refused"] == 0 for run in runs)
    assert runs[0]["hit_rate"] > runs[1]["hit_rate"]
    html = page.read_text()
    assert html.count("<svg") == 3
    assert "http" not in html.replace("http-equiv", ""), "the page loads nothing"
    assert "nan" not in html.lower().replace("finance", "")


def test_one_load_is_seen_on_the_page_and_answers_of_one_token_are_json(tmp_path: Path):
    row = {"seconds": 0, "input_tokens": 900, "output_tokens": 1}
    trace, page = str(write(tmp_path / "trace.jsonl", row)), tmp_path / "page.html"
    args = ["simulate", "--trace", trace, "--engines", "1", "--json", "--html", str(page)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (run,) = json.loads(done.stdout, parse_constant=refuse)["runs"]
    assert run["token"]["p50"] is None and run["policy"] == "cost"
    assert page.read_text().count("<circle") == 3  # a point on each plot


def test_the_command_prints_a_table(tmp_path: Path):
    args = ["simulate", "--trace", str(small_trace(tmp_path)), "--policy", "all"]
    done = CliRunner().invoke(app, args, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert all(f"{policy} " in done.stdout for policy in POLICIES) and "50 requests" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "luck"], "'luck' is no policy"),
        (["--engines", "many"], "cannot read the engines"),
        (["--rates", "/nowhere"], "cannot read the rates /nowhere: No such file or directory;"),
        (["--trace", "/none"], "cannot read the trace /none: No such file or directory\n"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, args: list[str], words: str):
    done = CliRunner().invoke(app, ["simulate", "--trace", str(small_trace(tmp_path)), *args])
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_pool_needs_rates(tmp_path: Path):
    fields = {name: getattr(RATES, name) for name in RATES.__struct_fields__} | {"pool": None}
    with pytest.raises(DescriptionError, match="a pool needs"):
        simulate(conversations(2, 2), Plan("cost", FleetShape(1), EngineRates(**fields), None, 9))
