"""vLLM's real scheduler and block pool with the pool's connector; only the model is ours.

Every cached byte that the scheduler relies on is checked before it is used (see `vllm_scheduler`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "vllm.v1.core.sched.scheduler", reason="this tier runs in the environment with vLLM"
)
pytest.importorskip("kvferry.vllm.connector")

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import vllm_scheduler
from dir_store import DirStore, FaultyStore
from kvferry.errors import StoreError
from kvferry.pool.cost import MOST_OF_A_SIZE
from kvferry.pool.lookup import FragmentKeys, sequence_keys
from kvferry.pool.rank import RankScope
from kvferry.pool.scheduler import PoolScheduler
from vllm_scheduler import SchedulerEngine

Make = Callable[..., SchedulerEngine]


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + i * 37) % 5000 for i in range(count)]


@pytest.fixture
def faults() -> dict[str, Callable[..., Any]]:
    return {}


@pytest.fixture
def make(tmp_path: Path, faults: dict[str, Callable[..., Any]]) -> Iterator[Make]:
    made: list[SchedulerEngine] = []

    def one(**options: Any) -> SchedulerEngine:
        engine = SchedulerEngine(
            tmp_path, lambda: FaultyStore(DirStore(str(tmp_path / "store")), faults), **options
        )
        made.append(engine)
        return engine

    yield one
    faults.clear()
    for engine in made:
        engine.close()


def keys_of(engine: SchedulerEngine, tokens: list[int]) -> list[FragmentKeys]:
    """The keys of all objects that the engine saves of these tokens."""
    chain = engine.pool.track("question", tuple).chain
    chain.cover(tokens, len(tokens))
    engine.pool.finished("question")
    return sequence_keys(engine.pool.metadata, chain, [engine.pool.layout])


def ended(engine: SchedulerEngine) -> None:
    assert not engine.left()


@pytest.mark.parametrize(
    ("writer", "reader", "hits"),
    [
        ({"tp": 1, "block_size": 16}, {"tp": 2, "block_size": 16}, 96),
        ({"tp": 2, "block_size": 16}, {"tp": 1, "block_size": 32}, 96),
        ({"tp": 1, "block_size": 32}, {"tp": 4, "block_size": 16}, 96),
        ({"tp": 1, "order": "LBHNC"}, {"tp": 2, "order": "BLNHC"}, 96),
        ({"tp": 2, "order": "BHLNC"}, {"tp": 1, "order": "LBNHC", "block_size": 32}, 96),
        ({"tp": 1, "order": "LHBNC", "block_size": 32}, {"tp": 4, "order": "BLHNC"}, 96),
        ({"tp": 2, "connector": "FerryConnector"}, {"tp": 1, "connector": "FerryConnector"}, 96),
        ({"tp": 1, "connector": "MultiConnector"}, {"tp": 2, "connector": "MultiConnector"}, 96),
    ],
)
def test_other_shapes_read(make: Make, writer: Any, reader: Any, hits: int) -> None:
    """Chunked prefill writes; another shape reads, computes the rest, and says the same."""
    first = make(**writer)
    first.add("a", prompt(1, 100))
    first.run()
    ended(first)
    second = make(**reader)
    assert first.computed["a"] == 100 + 3
    second.add("b", prompt(1, 100))
    second.add("other", prompt(2, 100))
    second.run()
    ended(second)
    assert second.out["b"] == first.out["a"] != second.out["other"]
    assert second.computed["b"] == 103 - hits and second.computed["other"] == 103
    third = make(**writer)  # a conversation goes on, over blocks of both
    third.add("c", [*prompt(1, 100), *first.out["a"], *prompt(3, 20)])
    third.run()
    ended(third)
    assert third.computed["c"] <= 100 + 4 + 20 + 3 - hits


@pytest.mark.parametrize(
    ("writer", "reader", "hits"),
    [
        ({"pcp": 2}, {"tp": 2}, 96),  # replicas
        ({"tp": 2}, {"pcp": 2, "tp": 2}, 96),
        ({"hybrid": "latent", "tp": 2, "dcp": 2}, {"hybrid": "latent"}, 96),  # tokens shared out
        ({"hybrid": "latent"}, {"hybrid": "latent", "tp": 4, "dcp": 2}, 96),
        ({"hybrid": "latent", "pcp": 2, "dcp": 2}, {"hybrid": "latent", "block_size": 32}, 96),
        ({"hybrid": "latent"}, {"hybrid": "latent", "tp": 2, "pcp": 2, "dcp": 4}, 64),
    ],
)
def test_context_parallelism(make: Make, writer: Any, reader: Any, hits: int) -> None:
    """Prefill and decode context parallelism: blocks are as long as vLLM's scheduler says."""
    first = make(**writer)
    first.add("a", prompt(1, 100))
    first.run()
    ended(first)
    saved = sum(rank.counters["save_done"] for rank in first.pool_ranks)
    assert saved == sum(len(part.keys) for part in keys_of(first, prompt(1, 100))), (
        "each object, once"
    )
    second = make(**reader)
    second.add("b", prompt(1, 100))
    second.add("other", prompt(2, 100))
    second.run()
    ended(second)
    assert second.out["b"] == first.out["a"] != second.out["other"]
    assert second.computed["b"] == 103 - hits and second.computed["other"] == 103


def test_a_policy_that_ends_requests_is_warned_of(make: Make, caplog: Any) -> None:
    """Alone, the pool sets it; a MultiConnector's is its siblings' too."""
    alone = make()
    assert alone.scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"

    def workers(**options: Any) -> None:
        """What MultiConnector does on an engine's first worker, as far as the pool goes."""
        engine = make(connector="MultiConnector", **options)
        config, cache = engine.scheduler.vllm_config, engine.scheduler.kv_cache_config
        _, (pool, its_config) = engine.connector._get_connector_classes_and_configs(config)
        with set_current_vllm_config(config):
            pool(its_config, KVConnectorRole.WORKER, cache)

    with caplog.at_level("WARNING", logger="kvferry"):
        workers()
        assert "kv_load_failure_policy" not in caplog.text
        workers(on_failure="fail")
    assert "kv_load_failure_policy is 'fail'" in caplog.text


def test_one_token_is_left_to_compute(make: Make) -> None:
    first = make()
    first.add("a", prompt(1, 96), output=1)
    first.run()
    second = make(tp=2)
    second.add("b", prompt(1, 96), output=1)
    second.run()
    assert second.computed["b"] == 1 and second.out["b"] == first.out["a"]


@pytest.mark.parametrize("tp", [1, 2])
def test_exactly_the_right_blocks_are_computed_again(make: Make, tp: int, faults: Any) -> None:
    """One object is lost between lookup and load: what is before it is used, nothing after it."""
    first = make()
    first.add("a", prompt(1, 100))
    first.run()
    second = make(tp=tp)  # a layout that is published later is noticed later
    store = DirStore(str(first.open_store().path))
    key = keys_of(first, prompt(1, 100))[0].keys[3]

    def lose(*_: Any) -> None:
        store.remove([key], 0)

    faults["get"] = lose
    second.add("b", prompt(1, 100))
    second.run()
    ended(second)
    assert second.out["b"] == first.out["a"]
    assert second.computed["b"] == 103 - 3 * 16
    assert second.pool.counters["hit_tokens"] == 96


def test_a_store_that_fails_in_every_call(make: Make, faults: Any) -> None:
    engine = make()

    def fail(*_: Any) -> None:
        raise StoreError("gone")

    for name in ("exists", "put", "get", "put_bytes", "get_bytes"):
        faults[name] = fail
    for number in range(3):
        engine.add(f"r{number}", prompt(number, 100))
    engine.run()
    ended(engine)
    assert [engine.computed[f"r{n}"] for n in range(3)] == [103] * 3


def test_loads_fail_and_nothing_loops(make: Make, faults: Any) -> None:
    first, second = make(), make()
    first.add("a", prompt(1, 100))
    first.run()

    def fail(*_: Any) -> None:
        raise RuntimeError("in a load")

    faults["get"] = fail
    second.add("b", prompt(1, 100))
    second.run()
    ended(second)
    assert second.out["b"] == first.out["a"] and second.computed["b"] == 103


def test_preemption(make: Make) -> None:
    """Too few blocks for all: requests are preempted, match again, and say what they should."""
    alone = make(blocks=128)
    prompts = {f"r{n}": prompt(n + 5, 90) for n in range(4)}
    for name, tokens in prompts.items():
        alone.add(name, tokens, output=40)
    alone.run()
    crowded = make(blocks=20, tp=2)
    for name, tokens in prompts.items():
        crowded.add(name, tokens, output=40)
    crowded.run(60)
    ended(crowded)
    assert crowded.out == alone.out and crowded.preempted > 0


@pytest.mark.parametrize("connector", ["FerryPoolConnector", "FerryConnector"])
def test_a_store_that_hangs_does_not_stop_the_engine(
    make: Make, faults: Any, connector: str
) -> None:
    """Blocks of a save that never ends stay away; the engine preempts, and goes on without them."""
    release = threading.Event()
    faults["put"] = lambda *_: release.wait(60) and None
    engine = make(blocks=20, connector=connector)
    names = [f"r{n}" for n in range(3)]
    for number, name in enumerate(names):
        engine.add(name, prompt(number + 20, 60), output=60)
    engine.until(
        lambda: all(len(engine.out[name]) == 60 for name in names),
        else_="the engine waits for a store that hangs",
    )
    assert engine.preempted > 0 and engine.pinned > 0
    release.set()
    engine.run()
    ended(engine)


def test_abort_while_loading_saves_nothing(make: Make, faults: Any) -> None:
    """vLLM counts tokens as computed before they are loaded: an abort must not save such blocks."""
    first = make()
    first.add("a", prompt(1, 200))
    first.run()
    reading, release = threading.Event(), threading.Event()
    faults["get"] = lambda *_: reading.set() or (release.wait(20) and None)
    second = make(tp=2)
    second.add("b", prompt(1, 200))
    second.until(reading.is_set)
    second.abort("b")
    second.step()
    release.set()
    second.run()
    ended(second)
    assert second.pool.counters["save_jobs"] == 0
    third = make(tp=2)
    third.add("c", prompt(1, 200))
    third.run()
    assert third.out["c"] == first.out["a"]


def test_abort_while_a_load_hangs(make: Make, faults: Any, monkeypatch: Any) -> None:
    """The store writes late into blocks whose request is long gone: nobody else has them."""
    from kvferry.pool import rank as load_module

    monkeypatch.setattr(load_module, "HUNG_SECONDS", 0.1)
    first = make()
    first.add("a", prompt(1, 200))
    first.run()
    reading, release = threading.Event(), threading.Event()
    second = make(tp=2, blocks=40, extra={"load_seconds": 2.0})
    faults["get"] = lambda *_: reading.set() or (release.wait(30) and None)
    told, take = [0], second.connector.get_kv_connector_stats

    def stats() -> Any:
        taken = take()
        levels = taken.data.get("levels", {}) if taken is not None else {}
        told.extend(level["pool_blocks_quarantined"] for level in levels.values())
        return taken

    monkeypatch.setattr(second.connector, "get_kv_connector_stats", stats)
    second.add("b", prompt(1, 200))
    second.until(reading.is_set)
    second.abort("b")
    second.until(
        lambda: "b" not in second.scheduler.requests, else_="the aborted request is never over"
    )
    assert second.pool.quarantined_blocks == second.pinned == second.in_use == told[-1] > 0
    faults.clear()
    for number in range(3):  # over all blocks that are left, again and again
        second.add(f"c{number}", prompt(30 + number, 200), output=40)
    for _ in range(60):
        second.step()
    second.until(lambda: second.ended["c2"] and not second.pool.has_work)
    for _ in range(3):  # then nothing else is to be done
        second.step()
    release.set()  # the late write
    second.until(lambda: not second.pinned, 10, "blocks are kept though the store is done")
    second.run()
    ended(second)
    assert told == [0, told[1], 0]  # as the metric shows it


def test_abort_at_any_time(make: Make) -> None:
    first = make()
    first.add("a", prompt(1, 200))
    first.run()
    for steps in range(6):
        engine = make(tp=2)
        engine.add("b", prompt(1, 200))
        for _ in range(steps):
            engine.step()
        engine.abort("b")
        engine.run()
        ended(engine)
        engine.close()


def test_tokens_that_no_vocabulary_has(make: Make) -> None:
    """Without a tokenizer, vLLM lets them through, and ranks that share a vocabulary out compute
    them. They have no key: the engine goes on, and others' prompts are saved."""
    engine = make(tp=2)
    engine.add("bad", [*prompt(1, 50), -7, *prompt(2, 49)])
    engine.add("good", prompt(3, 100))
    engine.run()
    ended(engine)
    assert engine.computed["bad"] == engine.computed["good"] == 103
    second = make()
    second.add("good", prompt(3, 100))
    second.run()
    assert second.computed["good"] == 103 - 96


@pytest.mark.parametrize("kind", ["window", "state"])
@pytest.mark.parametrize("fail", [False, True])
def test_hybrid_models(make: Make, faults: Any, kind: str, fail: bool) -> None:
    """Full attention beside windows or recurrent states (vLLM's `align` mode), two tables.

    The hit is right for both groups, or all of it is computed.
    """
    first = make(hybrid=kind, blocks=256)  # so that no save is postponed
    first.add("a", prompt(1, 200))
    first.run()
    ended(first)
    second = make(hybrid=kind, tp=2, block_size=32)

    def fault(*_: Any) -> None:
        raise StoreError("gone")

    if fail:
        faults["get"] = fault
    second.add("b", prompt(1, 200))
    second.add("other", prompt(2, 200))
    second.run()
    ended(second)
    assert second.out["b"] == first.out["a"] != second.out["other"]
    assert second.computed["b"] == 203 - (0 if fail else 192)
    assert second.computed["other"] == 203
    # a conversation goes on from a state that decoding left, or the prompt's last
    third = make(hybrid=kind, blocks=256)
    faults.clear()
    third.add("c", [*prompt(1, 200), *first.out["a"], *prompt(3, 20)])
    third.run()
    ended(third)
    assert third.computed["c"] == 200 + 4 + 20 + 3 - 192


def test_a_failed_load_does_not_block_the_loads_behind_it(make: Make, faults: Any) -> None:
    """A load has the blocks of its window, computing needs those of all tokens. vLLM would wait for
    blocks at the failed request, while the loaded one has them."""
    first = make(hybrid="window", blocks=256)
    for seed in (1, 2):
        first.add(f"a{seed}", prompt(seed, 200))
        first.run()
    second = make(hybrid="window", blocks=33)
    calls, both, failed = itertools.count(), threading.Event(), threading.Event()

    def fault(*_: Any) -> None:
        if next(calls):
            assert failed.wait(20)
        else:
            assert both.wait(20)
            raise StoreError("gone")

    faults["get"] = fault
    for seed in (1, 2):
        second.add(f"b{seed}", prompt(seed, 200))
    second.until(lambda: len(second.pool._loads) == 2)
    both.set()
    second.until(lambda: len(second.pool._loads) == 1)
    for _ in range(3):
        second.step()
    failed.set()
    second.run()
    ended(second)
    assert [second.out[f"b{seed}"] for seed in (1, 2)] == list(first.out.values())
    assert sorted(second.computed.values()) == [203 - 192, 203]


def test_a_state_that_is_not_at_the_hit(make: Make, faults: Any) -> None:
    """The attention blocks are there, the state at their end is lost: the hit is shorter."""
    first = make(hybrid="state", blocks=256)
    first.add("a", prompt(1, 100))
    first.run()
    store = DirStore(str(first.open_store().path))
    (table,) = [kind.table for kind in first.pool.layout.kinds if "state" in kind.groups]
    parts = keys_of(first, prompt(1, 100))
    states = next(part.keys for part in parts if part.fragment.table == table)
    there = store.exists(states, 0)
    assert there[5], "the state after 96 tokens"
    store.remove([states[5]], 0)
    second = make(hybrid="state", blocks=256)
    second.add("b", prompt(1, 100))
    second.run()
    ended(second)
    assert second.out["b"] == first.out["a"]
    before = [n for n in range(5) if there[n]]
    assert second.computed["b"] == 103 - (16 * (before[-1] + 1) if before else 0)


def test_a_state_comes_while_much_is_pinned(make: Make, faults: Any) -> None:
    """vLLM offers a state once. Blocks of tokens that lead to it are saved later."""
    release = threading.Event()
    faults["put"] = lambda *_: release.wait(30) and None
    first = make(hybrid="state", blocks=56)
    first.add("a", prompt(1, 264))
    while first.computed["a"] < 264:
        first.step()
    assert first.pool.counters["save_postponed"] > 0
    assert first.pool.pinned_blocks <= first.pool.limits.most_pinned_at_end
    release.set()
    first.run()
    ended(first)
    second = make(hybrid="state", blocks=256)
    second.add("b", prompt(1, 264))
    second.run()
    ended(second)
    assert second.out["b"] == first.out["a"]
    assert second.computed["b"] == 267 - 256


def test_a_wrong_byte_is_noticed(make: Make, monkeypatch: Any) -> None:
    """The check of the cache can fail: a load that puts bytes elsewhere does."""
    own = RankScope.own_blocks

    def shifted(self: Any, segment: Any, tables: Any) -> Any:
        return own(self, segment, [np.roll(table, 1) for table in tables])

    first, second = make(), make()
    first.add("a", prompt(1, 100))
    first.run()
    monkeypatch.setattr(RankScope, "own_blocks", shifted)
    second.add("b", prompt(1, 100))
    with pytest.raises(AssertionError, match="is not in the cache"):
        second.run()


def test_reset(make: Make) -> None:
    """After a reset nothing old is found; what is computed since is."""
    first, second = make(), make()
    first.add("a", prompt(1, 100))
    first.run()
    assert second.scheduler.reset_prefix_cache(reset_connector=True)
    second.add("b", prompt(1, 100))
    second.run()
    assert second.computed["b"] == 103


def test_reset_before_the_start(make: Make) -> None:
    """Under a MultiConnector, workers describe themselves late: the reset is not forgotten."""
    engine = make()
    known = engine.pool
    late = PoolScheduler(known.limits, engine.open_store, pin=print, unpin=print, null_block=0)
    late.reset()
    late.start(known.metadata, known.layout, len(engine.pool_ranks))
    try:
        assert late.metadata.namespace != known.metadata.namespace
    finally:
        late.close()


def test_reset_while_a_part_of_a_block_is_cached(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With states and `prefix_match_unit`, vLLM's own cache also has parts of blocks, which it does
    not tell a connector of. What is computed on an old one is not saved as new, either."""
    monkeypatch.setattr(vllm_scheduler, "resolve_kv_cache_block_sizes", lambda *_: (16, 8))
    engine = make(hybrid="state", blocks=256)
    engine.add("runs", prompt(1, 12), output=40)
    engine.until(lambda: bool(engine.out["runs"]))
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    jobs = engine.pool.counters["save_jobs"]
    engine.add("hits", [*prompt(1, 8), *prompt(2, 40)])
    output = engine.scheduler.schedule()
    while not output.scheduled_new_reqs:
        output = engine.scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8
    assert engine.pool.counters["save_jobs"] == jobs


def test_reset_while_something_runs(make: Make) -> None:
    """vLLM keeps its blocks then: neither they nor what is computed on them is saved as new."""
    engine = make()
    engine.add("runs", prompt(1, 100), output=40)
    engine.until(lambda: bool(engine.out["runs"]))
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    jobs = engine.pool.counters["save_jobs"]
    engine.run()
    engine.add("hits", prompt(1, 100), output=40)  # in vLLM's own cache, which is old
    engine.run()
    assert engine.computed["hits"] < 100
    assert engine.pool.counters["save_jobs"] == jobs
    engine.add("new", prompt(2, 100))
    engine.run()
    assert engine.pool.counters["save_jobs"] > jobs
    ended(engine)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)  # nothing runs: all is new
    engine.add("again", prompt(1, 100))
    jobs = engine.pool.counters["save_jobs"]
    engine.run()
    assert engine.computed["again"] == 103 and engine.pool.counters["save_jobs"] > jobs


@pytest.mark.parametrize("connector", ["FerryPoolConnector", "FerryConnector", "MultiConnector"])
def test_loads_where_computing_is_slower(make: Make, faults: Any, connector: str) -> None:
    """Times are real: of steps that vLLM's scheduler sends and takes back, and of loads."""
    extra = {"min_load_tokens": "auto"}
    writer, reader = (
        make(batched=512),
        make(connector=connector, extra=extra, batched=512, blocks=256),
    )
    prompts = [prompt(seed, 100 + 20 * seed) for seed in range(1, 10)]
    for number, tokens in enumerate(prompts):
        writer.add(f"w{number}", tokens, output=1)
        writer.run()
    compute, token_seconds = reader.execute, 0.0

    def slow(output: Any, steps: Any) -> None:
        time.sleep(output.total_num_scheduled_tokens * token_seconds)
        compute(output, steps)

    reader.execute = slow  # type: ignore[method-assign]
    asked = iter(range(1000))

    def loaded(tokens: list[int]) -> bool:
        """Whether a prompt is loaded. vLLM's own cache never has it."""
        assert reader.scheduler.reset_prefix_cache()
        name = f"r{next(asked)}"
        reader.add(name, tokens, output=1)
        reader.run()
        ended(reader)
        return reader.computed[name] < len(tokens)

    faults["get"] = lambda *_: time.sleep(0.05)
    for seed in range(20, 26):  # the pool has none of these
        assert not loaded(prompt(seed, 40 * seed % 500 + 60))
    assert [loaded(tokens) for tokens in prompts[:5]] == [True] * 5, "not enough is known"
    assert not any(loaded(tokens) for tokens in prompts), "loads take 50 ms, steps much less"
    assert reader.pool.counters["declined_slower"] == len(prompts)
    assert not reader.pool.choice.steps._sent, "every step that was sent is over"
    token_seconds = 0.0008
    for seed in range(100, 100 + MOST_OF_A_SIZE // 2 + 1):  # most that is known of each size
        for size in (60, 120, 240, 480):
            assert not loaded(prompt(seed + size, size))
    assert all(loaded(tokens) for tokens in prompts), "computing takes 0.1 s and more"
    assert reader.pool.counters["declined_slower"] == len(prompts)
