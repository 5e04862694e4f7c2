"""The scheduler loads where that is faster than computing, and counts the hits that it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dir_store import DirStore
from kvferry.costs import ENOUGH
from kvferry.pool.cost import LoadChoice
from kvferry.pool.scheduler import PoolLimits
from kvferry.verify.oracle import CaseDict, Oracle
from pool_cases import pool_case
from pool_engine import SmallEngine

SEED = 23
TOKEN_SECONDS = 0.001  # of prefill on the engines here


def cases(count: int) -> list[CaseDict]:
    """With full attention, windows, states and several groups, whose hits can be whole."""
    found = []
    for index in range(4000):
        case = pool_case(SEED, index, both_whole=True)
        if case is not None and not case["skip"] and not Oracle(case).errors():
            found.append(case)
        if len(found) == count:
            return found
    raise AssertionError("too few cases")


@pytest.fixture(scope="module")
def case() -> CaseDict:
    return cases(1)[0]


class Engines:
    """A writer that has saved a prompt, and a reader on a clock of its own."""

    def __init__(self, case: CaseDict, path: Path, limits: PoolLimits | None = None) -> None:
        self.now = 0.0
        self.choice = LoadChoice(lambda: self.now)
        self.oracle = Oracle(case)
        self.tokens = [(7919 + 31 * i) % 50_000 for i in range(case["tokens"] + 1)]

        def open_store() -> DirStore:
            return DirStore(str(path / "store"))

        self.writer = SmallEngine(case, "src", open_store)
        self.writer.fill(self.oracle)
        self.writer.save("w", self.tokens)
        self.writer.published()
        # a reader knows the layouts that were there when it began
        self.reader = SmallEngine(case, "dst", open_store, choice=self.choice, limits=limits)

    def hit(self, name: str) -> int:
        """Tokens that the reader would load of the prompt."""
        return self.reader.matched(name, self.tokens)

    def teach(self, times: float) -> None:
        """Loading the prompt takes so many times as long as computing it."""
        scheduler, tokens = self.reader.scheduler, len(self.tokens) - 1
        assert self.hit("question") == tokens
        spec = scheduler.track("question", tuple).load
        assert spec is not None
        size = scheduler._bytes_of(spec.hit.segments)
        for _ in range(ENOUGH):
            self.choice.steps.sent(tokens, 1)
            self.now += tokens * TOKEN_SECONDS
            self.choice.steps.over()
            self.choice.loads.ordered("lesson", size)
            self.choice.loads.reported("lesson", times * tokens * TOKEN_SECONDS, failed=False)
            self.choice.loads.over("lesson")

    def declined(self) -> dict[str, int]:
        counters = self.reader.scheduler.counters
        return {r: n for r in ("short", "slower", "queued") if (n := counters[f"declined_{r}"])}

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


def test_a_load_that_computing_beats_is_declined(case: CaseDict, tmp_path: Path) -> None:
    engines = Engines(case, tmp_path)
    engines.teach(5.0)
    assert [engines.hit("r") for _ in range(3)] == [0, 0, 0]
    assert not engines.reader.scheduler.promised("r") and not engines.declined()
    engines.reader.scheduler.allocated("r", engines.reader.tables, 0)
    engines.reader.scheduler.allocated("r", engines.reader.tables, 0)
    assert engines.declined() == {"slower": 1}, "once, when the request has blocks"
    assert not engines.reader.scheduler.take_orders().loads
    engines.now += 30.0
    assert engines.hit("s") == len(engines.tokens) - 1, "it is tried again"
    engines.close()


def test_a_load_that_beats_computing_is_taken(case: CaseDict, tmp_path: Path) -> None:
    engines = Engines(case, tmp_path)
    engines.teach(0.2)
    tokens = engines.hit("r")
    assert tokens == len(engines.tokens) - 1
    assert all(loaded.ok for loaded in engines.reader.load("r", tokens))
    assert engines.reader.wrong_bytes(engines.oracle) == 0
    assert not engines.declined() and engines.choice.loads.queued_bytes == 0
    engines.close()


def test_loads_under_way_are_counted_ahead(case: CaseDict, tmp_path: Path) -> None:
    engines = Engines(case, tmp_path)
    engines.teach(0.4)
    scheduler, tables = engines.reader.scheduler, engines.reader.tables
    trackers = {name: scheduler.track(name, tuple) for name in "abc"}
    assert all(engines.hit(name) for name in trackers)  # the lookups' answers are there

    def hit(name: str) -> int | None:
        """As above, but no rank begins to load meanwhile."""
        return scheduler.matched(name, trackers[name], engines.tokens, 0)

    for name in "ab":
        scheduler.allocated(name, tables, hit(name) or 0)
    assert hit("c") == 0, "three times 0.4"
    scheduler.allocated("c", tables, 0)
    assert engines.declined() == {"queued": 1}
    engines.reader.until(lambda: engines.choice.loads.queued_bytes == 0)
    assert engines.hit("c") == len(engines.tokens) - 1
    engines.close()


@pytest.mark.parametrize("least", [0, 1, "all", "more"])
def test_a_number_is_obeyed_whatever_it_costs(
    case: CaseDict, tmp_path: Path, least: int | str
) -> None:
    tokens = case["tokens"]
    number = {"all": tokens, "more": tokens + 1}.get(str(least), least)
    assert isinstance(number, int)
    engines = Engines(case, tmp_path, PoolLimits(lookup_seconds=5, min_load_tokens=0))
    engines.teach(100.0)
    engines.reader.scheduler.limits = PoolLimits(lookup_seconds=5, min_load_tokens=number)
    assert engines.hit("r") == (0 if least == "more" else tokens)
    engines.reader.scheduler.allocated("r", engines.reader.tables, 0)
    assert engines.declined() == ({"short": 1} if least == "more" else {})
    engines.close()


def test_nothing_is_declined_where_the_pool_has_nothing(case: CaseDict, tmp_path: Path) -> None:
    engines = Engines(case, tmp_path)
    engines.teach(5.0)
    other = [token + 1 for token in engines.tokens]
    assert engines.reader.matched("r", other) == 0
    engines.reader.scheduler.allocated("r", engines.reader.tables, 0)
    assert not engines.declined()
    engines.close()


@pytest.mark.parametrize("number", range(8))
def test_a_load_has_the_bytes_that_it_was_judged_by(tmp_path: Path, number: int) -> None:
    """Over windows, states and groups. Ranks with replicas load more, all of them alike."""
    case = cases(8)[number]
    engines = Engines(case, tmp_path)
    tokens = engines.hit("r")
    spec = engines.reader.scheduler.track("r", tuple).load
    assert spec is not None
    judged = engines.reader.scheduler._bytes_of(spec.hit.segments)
    engines.reader.scheduler.allocated("r", engines.reader.tables, tokens)
    assert engines.choice.loads.queued_bytes == judged
    engines.reader.until(lambda: engines.choice.loads.queued_bytes == 0)
    ended = engines.reader.ends["r"]
    assert all(loaded.ok for loaded in ended)
    moved = sum(loaded.bytes for loaded in ended)
    if case["dst"]["shape"]["tp"] == 1:
        assert moved == judged
    else:
        assert judged <= moved <= judged * case["dst"]["shape"]["tp"]
    engines.close()
