"""The pool over a real Mooncake Store, without engines: other shapes read, masters come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mooncake", reason="this tier runs in the environment with Mooncake")

from kvferry.pool.mooncake import MooncakeStore
from kvferry.pool.scheduler import PoolLimits
from kvferry.verify.oracle import CaseDict, Oracle
from mooncake_master import Master
from pool_cases import pool_case
from pool_engine import SmallEngine

LIMITS = PoolLimits(lookup_seconds=10, load_seconds=30, save_seconds=30)
MEMORY = 32 << 20


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path / "master.log")
    yield made
    made.close()


def opener(master: Master) -> Callable[[], MooncakeStore]:
    return lambda: MooncakeStore(master.config(MEMORY, MEMORY))


def two_to_one() -> CaseDict:
    """tp 2 writes and tp 1 reads, with blocks of another size."""
    for index in range(4000):
        case = pool_case(77, index, both_whole=True)
        if case is None or case["skip"] or Oracle(case).errors():
            continue
        src, dst = case["src"]["shape"], case["dst"]["shape"]
        if (src["tp"], src["pp"], dst["tp"], dst["pp"]) != (2, 1, 1, 1):
            continue
        if src["block_size"] != dst["block_size"] and case["tokens"] >= 24:
            return case
    raise AssertionError("no such case")


def test_other_shapes_and_a_master_that_dies(master: Master) -> None:
    case = two_to_one()
    oracle, tokens = Oracle(case), [7 * i % 1000 for i in range(case["tokens"] + 1)]
    writer = SmallEngine(case, "src", opener(master), limits=LIMITS)
    writer.fill(oracle)
    writer.save("w", tokens)
    reader = SmallEngine(case, "dst", opener(master), limits=LIMITS)
    try:
        found = reader.matched("r", tokens)
        assert found == case["tokens"]
        assert all(end.ok for end in reader.load("r", found))
        assert reader.wrong_bytes(oracle) == 0
        other = [8 * i % 1000 for i in range(case["tokens"] + 1)]
        assert reader.matched("other", other) == 0

        master.kill()
        deadline = time.monotonic() + 2 * LIMITS.lookup_seconds + 5
        third = [9 * i % 1000 for i in range(case["tokens"] + 1)]  # nothing that was just answered
        assert _matched(reader, "gone", third, deadline) == 0  # a miss, and no hang
        assert (
            reader.scheduler.counters["lookup_errors"]
            + reader.scheduler.counters["lookup_timeouts"]
        )
        writer.scheduler.track("w2", tuple)
        writer.scheduler.computed("w2", other, len(other), lambda: writer.tables)
        writer.until(lambda: writer.pinned == 0, seconds=60)  # given up, and released

        master.start()
        for attempt in range(60):  # clients come back by themselves
            name = f"w{attempt + 3}"
            writer.save(name, tokens)
            if reader.matched(name, tokens) == case["tokens"]:
                break
            time.sleep(0.5)
        else:
            raise AssertionError("the pool did not come back with its master")
        assert writer.pinned == 0 and not writer.scheduler.has_work
    finally:
        writer.close()
        reader.close()


def _matched(engine: SmallEngine, name: str, tokens: list[int], deadline: float) -> int:
    tracker = engine.scheduler.track(name, tuple)
    while True:
        found = engine.scheduler.matched(name, tracker, tokens, 0)
        if found is not None:
            return found
        assert time.monotonic() < deadline, "the scheduler waits for a dead master"
        time.sleep(0.01)
