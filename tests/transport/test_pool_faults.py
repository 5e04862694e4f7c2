"""The pool without vLLM: real memory, real threads, a store of files; bytes judged by the oracle.

Every fault ends with the same questions: does anything hang, is a byte wrong, is a block still
pinned or a job still open, and was it counted?
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dir_store import DirStore, FaultyStore
from kvferry.errors import KvferryError, StoreError
from kvferry.pool import lookup
from kvferry.pool import lookup as lookup_module
from kvferry.pool import rank as rank_module
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.layout_registry import PoolLayout
from kvferry.pool.lookup import Lookups, sequence_keys
from kvferry.pool.scheduler import PoolLimits
from kvferry.pool.store import Outcome, Store
from kvferry.verify.oracle import CaseDict, Oracle
from no_threads import no_threads
from pool_cases import pool_case
from pool_engine import SmallEngine
from waiting import PATIENCE_SECONDS, wait_until

SEED = 611
FAST = PoolLimits(lookup_seconds=0.4)


def sequence(case: CaseDict, seed: int = 1) -> list[int]:
    """Tokens of a request whose hit can be all of the case's: one is left to compute."""
    return [(seed * 7919 + 31 * i) % 50_000 for i in range(case["tokens"] + 1)]


def cases(count: int, wanted: Callable[[CaseDict], bool] = lambda case: True) -> list[CaseDict]:
    found = []
    for index in range(4000):
        case = pool_case(SEED, index, both_whole=True)
        if case is None or case["skip"] or not wanted(case) or Oracle(case).errors():
            continue
        found.append(case)
        if len(found) == count:
            return found
    raise AssertionError("too few cases")


def simple(case: CaseDict) -> bool:
    """One full-attention group over several blocks; tp 2 and more on both sides, split heads."""
    groups = case["model"]["groups"]
    blocks = case["tokens"] // case["src"]["shape"]["block_size"]
    return (
        len(groups) == 1
        and groups[0]["residency"]["kind"] == "full"
        and groups[0]["components"][0]["sharding"] == "split"
        and groups[0]["components"][0]["units"] >= 2
        and case["src"]["shape"]["tp"] == 2
        and case["dst"]["shape"]["tp"] != 2
        and case["src"]["shape"]["dcp"] == case["dst"]["shape"]["dcp"] == 1
        and blocks >= 3
        and case["tokens"] // case["dst"]["shape"]["block_size"] >= 3
        and case["src"]["shape"]["pp"] == 1
    )


@pytest.fixture(scope="module")
def case() -> CaseDict:
    return cases(1, simple)[0]


@pytest.fixture
def pair(case: CaseDict, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(case, tmp_path)
    yield made
    made.close()


class Pair:
    """A writer and a reader of one case over one directory, each store with faults to set."""

    def __init__(
        self,
        case: CaseDict,
        path: Path,
        limits: PoolLimits | None = None,
        *,
        embedded: bool = False,
    ) -> None:
        self.case, self.path, self.oracle = case, path, Oracle(case)
        self._embedded = embedded
        self.faults: dict[str, Callable[..., Any]] = {}
        self.limits = limits
        self.engines: list[SmallEngine] = []

    def open_store(self) -> Store:
        if self._embedded:
            return EmbeddedStore(self.path / "embedded", 4 << 20, slots=1 << 12)
        return FaultyStore(DirStore(str(self.path / "store")), self.faults)

    def engine(self, side: str, **options: Any) -> SmallEngine:
        options.setdefault("limits", self.limits)
        made = SmallEngine(self.case, side, self.open_store, **options)
        if side == "src":
            made.fill(self.oracle)
        self.engines.append(made)
        return made

    @property
    def objects(self) -> list[Path]:
        return sorted((self.path / "store").iterdir())

    def close(self) -> None:
        self.faults.clear()
        for engine in self.engines:
            engine.close()


def written(engine: SmallEngine, tokens: list[int], at: int, fragment: int = 0) -> str:
    """Key of block `at` of one of an engine's fragments."""
    chain = engine.scheduler.track("key", tuple).chain
    chain.cover(tokens, len(tokens))
    return sequence_keys(engine.metadata, chain, [engine.layout])[fragment].keys[at]


def counters(engine: SmallEngine, *names: str) -> dict[str, int]:
    """Of all ranks."""
    return {n: sum(rank.counters[n] for rank in engine.ranks.values()) for n in names}


def all_ended(engine: SmallEngine) -> None:
    """Nothing is pinned, open or leaked."""
    engine.until(lambda: engine.pinned == 0 and not engine.scheduler.has_work)
    assert engine.scheduler.pinned_blocks == 0
    assert all(count == 0 for count in engine.pins.values())


@pytest.mark.parametrize("kind", ["directory", "embedded"])
def test_every_byte_of_every_hit(tmp_path: Path, kind: str) -> None:
    """Writers and readers of random shapes, through threads and a store."""
    compared = 0
    for number, case in enumerate(cases(10)):
        pair = Pair(case, tmp_path / str(number), embedded=kind == "embedded")
        tokens = sequence(case)
        writer = pair.engine("src")
        writer.save("w", tokens)
        writer.published()
        reader = pair.engine("dst")
        found = reader.matched("r", tokens)
        assert found == case["tokens"], (number, found)
        ends = reader.load("r", found)
        assert all(end.ok for end in ends), ends
        assert reader.wrong_bytes(pair.oracle) == 0, number
        compared += sum(end.bytes for end in ends)
        other = reader.matched("other", sequence(case, seed=2))
        assert other == 0, "another prompt must not hit"
        all_ended(writer)
        all_ended(reader)
        pair.close()
    assert compared > 30_000


def test_writer_gone_and_back(pair: Pair) -> None:
    """The pool outlives its writers; a restarted one finds its blocks, and writes none again."""
    tokens = sequence(pair.case)
    first = pair.engine("src")
    first.save("w", tokens)
    first.close()
    pair.engines.remove(first)
    count = len(pair.objects)
    again = pair.engine("src")
    assert again.matched("w", tokens) > 0
    again.save("w2", tokens)
    assert len(pair.objects) == count
    assert sum(rank.counters["save_done"] for rank in again.ranks.values()) == 0


def test_two_writers_at_once(pair: Pair) -> None:
    tokens = sequence(pair.case)
    writers = [pair.engine("src") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda w: w.save("w", tokens), writers))
    reader = pair.engine("dst")
    found = reader.matched("r", tokens)
    assert found == pair.case["tokens"]
    assert all(end.ok for end in reader.load("r", found))
    assert reader.wrong_bytes(pair.oracle) == 0
    for engine in pair.engines:
        all_ended(engine)


def test_replicas_take_turns(tmp_path: Path) -> None:
    """Bytes that several ranks hold are written once, by each of them in turn."""

    def replicated(case: CaseDict) -> bool:
        shape, groups = case["src"]["shape"], case["model"]["groups"]
        return (
            len(groups) == 1
            and groups[0]["residency"]["kind"] == "full"
            and all(c["sharding"] == "replicated" for c in groups[0]["components"])
            and (shape["tp"], shape["pp"], shape["dcp"]) == (2, 1, 1)
            and case["tokens"] // shape["block_size"] >= 2
        )

    pair = Pair(cases(1, replicated)[0], tmp_path)
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.save("w", tokens)
    done = [rank.counters["save_done"] for rank in writer.ranks.values()]
    blocks = pair.case["tokens"] // pair.case["src"]["shape"]["block_size"]
    assert sum(done) == blocks and min(done) >= blocks // 2, done
    reader = pair.engine("dst")
    assert all(end.ok for end in reader.load("r", reader.matched("r", tokens)))
    assert reader.wrong_bytes(pair.oracle) == 0
    pair.close()


def test_tenants_weights_and_resets_share_nothing(pair: Pair) -> None:
    tokens = sequence(pair.case)
    pair.engine("src", tenant="a", weights="1").save("w", tokens)
    assert pair.engine("dst", tenant="a", weights="1").matched("r", tokens) == pair.case["tokens"]
    assert pair.engine("dst", tenant="b", weights="1").matched("r", tokens) == 0
    assert pair.engine("dst", tenant="a", weights="2").matched("r", tokens) == 0
    engine = pair.engine("dst", tenant="a", weights="1")
    engine.scheduler.reset()
    assert engine.matched("r", tokens) == 0


def test_a_new_namespace_gets_our_layout_before_a_question_comes(
    pair: Pair, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lookup_module, "IDLE_SECONDS", 600.0)
    engine = pair.engine("src")
    engine.published()
    engine.scheduler.reset()
    engine.until(lambda: engine.scheduler.counters["layouts_published"] == 2, seconds=20)


def test_an_evicted_record_is_republished(pair: Pair) -> None:
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.save("w", tokens)
    metadata = writer.metadata
    store = DirStore(str(pair.path / "store"))
    record = metadata.record_key(writer.layout.id)
    assert store.remove([record, *metadata.index_keys()], 0) == 2
    late = pair.engine("dst")
    assert late.matched("r", tokens) == 0  # without its record, a layout is a miss
    writer.until(lambda: store.file(record).exists())  # its owner looks after it
    late.until(lambda: bool(late.matched("r2", tokens)))


def test_a_damaged_record_is_refused(pair: Pair) -> None:
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.save("w", tokens)
    store = DirStore(str(pair.path / "store"))
    file = store.file(writer.metadata.record_key(writer.layout.id))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    reader = pair.engine("dst")
    assert reader.matched("r", tokens) == 0
    assert reader.scheduler.counters["layouts_refused"] == 1


# Faults


def raising(error: BaseException) -> Callable[..., Any]:
    def fault(*_: Any) -> Any:
        raise error

    return fault


ERRORS = [StoreError("the store is gone"), RuntimeError("a bug"), KeyError("x")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("point", ["exists", "put"])
def test_an_exception_in_a_save(pair: Pair, point: str, error: Exception) -> None:
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.until(lambda: writer.scheduler.counters["layouts_published"] > 0)
    pair.faults[point] = raising(error)
    writer.save("w", tokens)
    all_ended(writer)
    assert all(saved.failed for saved in writer.saved)
    assert sum(rank.counters["save_errors"] for rank in writer.ranks.values()) > 0
    pair.faults.clear()
    assert pair.engine("dst").matched("r", tokens) == 0


class Gone(BaseException):
    """What no guard for errors catches."""


def broken(monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException) -> None:
    """`module.function` or `module.Class.method` of the pool raises."""
    monkeypatch.setattr(f"kvferry.pool.{where}", raising(error))


SAVE_POINTS = [
    "rank.RankScope.my_turn",
    "rank.RankScope.keys",
    "rank.object_keys",
    "objects.ObjectMemory.blocks",
    "fence",
]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), Gone()], ids=["error", "gone"])
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_an_exception_at_each_point_of_a_save(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, point: str, error: BaseException
) -> None:
    """Whatever raises: the job is reported, its blocks are free, nothing is found, saves go on."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(rank_module, "FIRST_PAUSE_SECONDS", 0.0)  # the store is asked again at once
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.until(lambda: writer.scheduler.counters["layouts_published"] > 0)
    with monkeypatch.context() as patch:
        if point == "fence":
            start, fence = rank_module.Saver.start, SimpleNamespace(event=0, wait=raising(error))
            patch.setattr(
                rank_module.Saver,
                "start",
                lambda self, o, d, f=None: start(self, o, d, fence),
            )
        else:
            broken(patch, point, error)
        writer.save("w", tokens)
        all_ended(writer)
    assert all(saved.failed for saved in writer.saved)
    if isinstance(error, Exception):
        assert sum(rank.counters["save_errors"] for rank in writer.ranks.values()) > 0
    assert pair.engine("dst").matched("r", tokens) == 0
    writer.save("again", tokens)
    assert pair.engine("dst").matched("r", tokens) == pair.case["tokens"]


LOAD_POINTS = [
    "rank.plan_read",
    "layout_registry.ReadPlan.bind",
    "keys.PoolKey.build_prefix",
    "rank._cut",
    "rank.Loader._read",
]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), Gone()], ids=["error", "gone"])
@pytest.mark.parametrize("point", LOAD_POINTS)
def test_an_exception_at_each_point_of_a_load(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, point: str, error: BaseException
) -> None:
    """Whatever raises: every rank reports once, nothing is trusted, and the next load works."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst")
    found = reader.matched("r", tokens)
    with monkeypatch.context() as patch:
        broken(patch, point, error)
        ends = reader.load("r", found)
        all_ended(reader)
    assert len(ends) == len(reader.ranks)
    assert all(not end.ok and end.bad_from == 0 for end in ends)
    counters = [rank.counters for rank in reader.ranks.values()]
    assert sum(c["load_failures"] for c in counters) == len(ends)
    tracker = reader.scheduler.track("r", tuple)
    assert reader.scheduler.matched("r", tracker, tokens, 0) is None, "loaded requests come first"
    assert reader.matched("r", tokens) == 0, "a request whose load failed is not matched again"
    assert reader.matched("new", tokens) == found
    assert all(end.ok for end in reader.load("new", found))
    assert reader.wrong_bytes(pair.oracle) == 0
    all_ended(reader)


LOOKUP_POINTS = [
    "keys.ContentChain.digests",
    "lookup.held_blocks",
    "layout_registry.LayoutRegistry.refresh",
    "lookup.longest_hit",
    "lookup.covered_prefix",
]


@pytest.mark.parametrize("point", LOOKUP_POINTS)
def test_an_exception_at_each_point_of_a_lookup(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst")
    reader.until(lambda: reader.scheduler.counters["layouts_published"] > 0)
    with monkeypatch.context() as patch:
        broken(patch, point, RuntimeError("a bug"))
        assert reader.matched("r", tokens) == 0
    assert reader.scheduler.counters["lookup_errors"] > 0
    reader.until(lambda: reader.matched("r2", tokens) == pair.case["tokens"])
    all_ended(reader)


@pytest.mark.parametrize("outcome", [Outcome.FULL, Outcome.FAILED])
def test_a_store_without_room(pair: Pair, outcome: Outcome) -> None:
    """What is not stored is not found; the store is left alone for a while, and tried again."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    pair.faults["put"] = lambda keys, *_: [outcome] * len(keys)
    writer.save("w", tokens)
    all_ended(writer)
    counters = [rank.counters for rank in writer.ranks.values()]
    assert sum(c[f"save_{outcome.value}"] for c in counters) > 0
    writer.save("w2", tokens)  # in the pause: reported at once
    assert sum(c["save_dropped"] for c in counters) > 0
    pair.faults.clear()
    assert writer.matched("w3", tokens) == 0
    more = itertools.count(4)
    while not all(c["save_done"] for c in counters):  # the pause is over
        writer.save(f"w{next(more)}", tokens)
    assert pair.engine("dst").matched("r", tokens) == pair.case["tokens"]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("point", ["exists", "get_bytes", "put_bytes"])
def test_an_exception_in_a_lookup(pair: Pair, point: str, error: Exception) -> None:
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    pair.faults[point] = raising(error)
    reader = pair.engine("dst")
    assert reader.matched("r", tokens) == 0
    assert reader.scheduler.counters["lookup_errors"] > 0
    pair.faults.clear()
    time.sleep(0.01)
    assert reader.matched("r2", tokens) == pair.case["tokens"]  # and works again by itself


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_exception_in_a_load(pair: Pair, error: Exception) -> None:
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst")
    found = reader.matched("r", tokens)
    pair.faults["get"] = raising(error)
    ends = reader.load("r", found)
    assert all(not end.ok and end.bad_from == 0 for end in ends)
    assert sum(rank.counters["load_errors"] for rank in reader.ranks.values()) == len(ends)
    pair.faults.clear()
    assert reader.matched("r", tokens) == 0, "a request whose load failed is not matched again"
    assert reader.matched("new", tokens) == found
    all_ended(reader)


@pytest.mark.parametrize("point", ["exists", "put", "get"])
def test_answers_of_the_wrong_length(pair: Pair, point: str) -> None:
    """A store that answers too little is not trusted with any of it."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.until(lambda: writer.scheduler.counters["layouts_published"] > 0)
    short = {"exists": np.ones(1, dtype=bool), "put": [], "get": [Outcome.DONE]}[point]
    if point == "put":
        pair.faults[point] = lambda *_: short
    writer.save("w", tokens)
    all_ended(writer)
    reader = pair.engine("dst")
    if point == "put":
        assert reader.matched("r", tokens) == 0
        return
    found = reader.matched("r", tokens)
    assert found
    pair.faults[point] = lambda *_: short
    if point == "exists":
        assert reader.matched("r2", [*tokens, 1]) == 0
    else:
        assert not any(end.ok for end in reader.load("r", found))


def test_no_later_block_is_trusted(pair: Pair) -> None:
    """A flipped byte, a missing and a truncated object: the load tells the first bad token."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.save("w", tokens)
    reader = pair.engine("dst")
    store = DirStore(str(pair.path / "store"))
    span = pair.case["src"]["shape"]["block_size"]
    file = store.file(written(writer, tokens, at=1))
    whole = file.read_bytes()
    broken = bytearray(whole)
    broken[-1] ^= 1
    damages: list[tuple[str, Callable[[], Any]]] = [
        ("corrupt", lambda: file.write_bytes(broken)),
        ("corrupt", lambda: file.write_bytes(whole[: len(whole) // 2])),
        ("missing", lambda: file.unlink()),
    ]
    for number, (why, damage) in enumerate(damages):
        file.write_bytes(whole)
        found = reader.matched(f"r{number}", [*tokens, number])
        assert found == pair.case["tokens"]
        damage()
        ends = reader.load(f"r{number}", found)
        bad = [end for end in ends if not end.ok]
        assert bad and all(end.bad_from == span and why in end.error for end in bad), ends
        counted = [rank.counters.take() for rank in reader.ranks.values()]
        told = sum(c.get(f"load_{why}", 0) for c in counted)
        assert told == sum(c.get("load_bad_objects", 0) for c in counted) == len(bad)
        assert sum(c["loads"] for c in counted) == len(ends)
        assert reader.matched(f"r{number}", tokens) == 0
    all_ended(reader)


def test_a_load_that_hangs(case: CaseDict, tmp_path: Path, monkeypatch: Any) -> None:
    """It fails by its deadline; its blocks are kept from reuse until the store comes back."""
    monkeypatch.setattr(rank_module, "HUNG_SECONDS", 0.1)
    pair = Pair(case, tmp_path, PoolLimits(lookup_seconds=20, load_seconds=0.5))
    tokens = sequence(case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst")
    found = reader.matched("r", tokens)
    release = threading.Event()
    pair.faults["get"] = lambda *_: release.wait(30) and None
    ends = reader.load("r", found)
    assert all(end.hung for end in ends)
    counted = {"load_hung": len(ends), "loads": len(ends), "load_failures": len(ends)}
    assert counters(reader, *counted, "loaded_bytes") == {**counted, "loaded_bytes": 0}
    assert reader.pinned == reader.scheduler.quarantined_blocks > 0
    reader.scheduler.finished("r")  # also when the request is gone
    pair.faults.clear()
    reader.scheduler.limits = PoolLimits()  # the machine may be busy: the next load has time
    assert reader.matched("r2", tokens) == found
    assert reader.load("r2", found)[0].ok  # others load meanwhile
    moved = counters(reader, "loaded_bytes")["loaded_bytes"]
    release.set()
    all_ended(reader)
    # what the store brought late is nobody's: no load more, and no bytes
    counted = {"loads": 2 * len(ends), "load_failures": len(ends), "loaded_bytes": moved}
    assert counters(reader, *counted) == counted and moved > 0
    assert counters(reader, "load_errors") == {"load_errors": 0}
    assert reader.scheduler.quarantined_blocks == 0
    pair.close()


def test_what_the_store_finds_not_worth_its_place(pair: Pair) -> None:
    """No error: it is not found, and the store is not left alone for it."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    pair.faults["put"] = lambda keys, *_: [Outcome.DECLINED] * len(keys)
    writer.save("w", tokens)
    writer.save("w2", tokens)
    all_ended(writer)
    told = counters(writer, "save_declined", "save_done", "save_errors", "save_dropped")
    assert told.pop("save_declined") > 0 and not any(told.values())
    pair.faults.clear()
    assert pair.engine("dst").matched("r", tokens) == 0
    writer.save("w3", tokens)
    assert pair.engine("dst").matched("r", tokens) == pair.case["tokens"]


def test_a_load_that_hangs_and_whose_request_is_gone(
    case: CaseDict, tmp_path: Path, monkeypatch: Any
) -> None:
    """The client leaves before the load is given up: its blocks are kept from reuse too."""
    monkeypatch.setattr(rank_module, "HUNG_SECONDS", 0.1)
    pair = Pair(case, tmp_path, PoolLimits(lookup_seconds=20, load_seconds=0.5))
    tokens = sequence(case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst")
    found = reader.matched("r", tokens)
    release = threading.Event()
    pair.faults["get"] = lambda *_: release.wait(30) and None
    reader.scheduler.allocated("r", reader.tables, found)
    reader.step()
    reader.scheduler.finished("r")
    reader.until(lambda: len(reader.ends.get("r", ())) == len(reader.ranks))
    assert all(end.hung for end in reader.ends["r"])
    assert reader.pinned == len({i for table in reader.tables for i in table} - {reader.null})
    release.set()
    all_ended(reader)
    assert reader.scheduler.pinned_blocks == 0
    pair.close()


def test_a_reset_saves_nothing_old(pair: Pair) -> None:
    """What runs on with old weights is not saved under the new namespace; what is new, is."""
    tokens, other = sequence(pair.case), sequence(pair.case, seed=2)
    engine = pair.engine("src")
    half = engine.scheduler.align_tokens
    engine.matched("runs", tokens)
    engine.save("runs", tokens, half)
    count = len(pair.objects)
    engine.scheduler.reset(keeps_blocks=True)
    engine.save("runs", tokens)
    assert engine.matched("hits", tokens, computed=half) == 0
    engine.save("hits", tokens)  # on top of blocks that the engine had
    assert engine.scheduler.counters["save_jobs"] == 1
    engine.until(lambda: len(pair.objects) >= count + 2)  # the layout, published again
    assert len(pair.objects) == count + 2, "an old block was saved"
    assert engine.matched("new", other) == 0
    engine.save("new", other)
    assert engine.scheduler.counters["save_jobs"] == 2
    engine.scheduler.reset()  # nothing is kept: all that is computed from now on is new
    assert engine.matched("hits", tokens) == 0
    engine.save("hits", tokens)
    assert engine.scheduler.counters["save_jobs"] == 3


def test_a_reset_takes_back_saves_that_no_rank_has(pair: Pair) -> None:
    """A request ends, and a reset comes before the next step: ranks would give the old blocks names
    of the new namespace."""
    tokens = sequence(pair.case)
    engine = pair.engine("src")
    engine.published()
    engine.matched("r", tokens)
    engine.scheduler.computed("r", tokens, len(tokens), lambda: engine.tables)
    assert engine.pinned > 0
    engine.scheduler.finished("r", tokens, engine.tables)
    engine.scheduler.reset()
    engine.until(lambda: not engine.scheduler.has_work)
    assert engine.matched("again", tokens) == 0
    assert not engine.reports and engine.pinned == engine.scheduler.pinned_blocks == 0


# What review of vLLM's own connector left open: each guard, and what happens without it


def lookup_raises(pair: Pair, seconds: float = PATIENCE_SECONDS) -> None:
    """A lookup that raises is a miss, at once; the next one is answered."""
    tokens = sequence(pair.case)
    reader = pair.engine("dst", limits=PoolLimits(lookup_seconds=60))
    reader.until(lambda: reader.scheduler.counters["layouts_published"] > 0)
    pair.faults["exists"] = raising(RuntimeError("no answer"))
    tracker = reader.scheduler.track("r", tuple)
    wait_until(  # long before a lookup's 60 s are over
        lambda: reader.scheduler.matched("r", tracker, tokens, 0) is not None,
        seconds,
        what="the scheduler waits for a lookup that raised; no answer",
    )


def test_a_lookup_that_raises(pair: Pair) -> None:
    lookup_raises(pair)


def test_a_lookup_that_raises_without_its_guard(pair: Pair, monkeypatch: Any) -> None:
    monkeypatch.setattr(Lookups, "_answer", Lookups._look_up)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(AssertionError):
        lookup_raises(pair, 1.0)


def one_rank_is_missing(pair: Pair) -> None:
    """A block of which another rank's part is missing is no hit, whatever rank 0 has."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.save("w", tokens)
    store = DirStore(str(pair.path / "store"))
    assert len(writer.layout.fragments) == 2
    assert store.remove([written(writer, tokens, at=0, fragment=1)], 0) == 1
    assert pair.engine("dst").matched("r", tokens) == 0


def test_a_lookup_asks_for_all_ranks(pair: Pair) -> None:
    one_rank_is_missing(pair)


def test_a_lookup_for_rank_0_alone(pair: Pair, monkeypatch: Any) -> None:
    def first_only(metadata: Any, chain: Any, layouts: list[PoolLayout]) -> Any:
        parts = sequence_keys(metadata, chain, layouts)
        return [part for part in parts if part.fragment.tp == 0]

    monkeypatch.setattr(lookup, "sequence_keys", first_only)
    with pytest.raises(AssertionError):
        one_rank_is_missing(pair)


def transfer_raises(pair: Pair, seconds: float = PATIENCE_SECONDS) -> None:
    """A save whose thread raises is reported all the same, and its blocks unpinned."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.until(lambda: writer.scheduler.counters["layouts_published"] > 0)
    pair.faults["put"] = raising(RuntimeError("in the transfer thread"))
    writer.scheduler.track("w", tuple)
    writer.scheduler.computed("w", tokens, len(tokens), lambda: writer.tables)
    writer.until(lambda: writer.pinned == 0, seconds=seconds)
    assert not writer.scheduler.has_work


def test_a_transfer_thread_that_raises(pair: Pair) -> None:
    transfer_raises(pair)


def test_a_transfer_thread_that_raises_without_its_guard(pair: Pair, monkeypatch: Any) -> None:
    def unguarded(self: Any, order: Any, scope: Any, fence: Any) -> None:
        self._end(order, self._save(order, scope, fence))

    monkeypatch.setattr(rank_module.Saver, "_run", unguarded)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(AssertionError):
        transfer_raises(pair, 1.0)


def test_a_lookup_that_never_answers(case: CaseDict, tmp_path: Path, monkeypatch: Any) -> None:
    """A miss by the deadline; the next ones are misses at once, until the store comes back."""
    monkeypatch.setattr(lookup, "STUCK_SECONDS", 0.0)
    pair = Pair(case, tmp_path, FAST)
    tokens = sequence(case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst")
    reader.until(lambda: reader.scheduler.counters["layouts_published"] > 0)
    release = threading.Event()
    pair.faults["exists"] = lambda *_: release.wait(30) and None
    assert reader.matched("r", tokens) == 0
    assert not release.is_set()
    assert reader.scheduler.counters["lookup_timeouts"] == 1
    pair.faults.clear()
    tracker = reader.scheduler.track("r2", tuple)
    assert reader.scheduler.matched("r2", tracker, tokens, 0) == 0
    assert reader.scheduler.counters["lookup_refused"] == 1
    release.set()
    more = itertools.count()
    reader.until(lambda: reader.matched(f"r3 {next(more)}", tokens) == case["tokens"])
    pair.close()


def test_steps_that_are_slower_than_answers_age(pair: Pair, monkeypatch: Any) -> None:
    """An answer reaches the scheduler however seldom it asks."""
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst")
    reader.until(lambda: reader.scheduler.counters["layouts_published"] > 0)
    monkeypatch.setattr(lookup_module, "CACHE_SECONDS", 0.05)
    tracker = reader.scheduler.track("r", tuple)
    found: list[int | None] = []
    while found.count(pair.case["tokens"]) < 3:
        assert len(found) < 100, found
        found.append(reader.scheduler.matched("r", tracker, tokens, 0))
        time.sleep(0.1)  # an engine's step


def lookup_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kvferry-lookup"}


def test_a_lookup_thread_that_died(pair: Pair, monkeypatch: Any) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    others = lookup_threads()
    reader = pair.engine("dst")
    reader.until(lambda: reader.scheduler.counters["layouts_published"] > 0)
    (old,) = lookup_threads() - others

    pair.faults["exists"] = raising(Gone())
    reader.scheduler.matched("r", reader.scheduler.track("r", tuple), tokens, 0)
    reader.until(lambda: not old.is_alive())
    pair.faults.clear()
    assert reader.matched("r2", tokens) == pair.case["tokens"]
    (new,) = lookup_threads() - others
    assert new is not old


def test_an_engine_that_asks_for_other_tokens_than_promised(pair: Pair) -> None:
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst")
    found = reader.matched("r", tokens)
    ends = reader.load("r", found - reader.scheduler.align_tokens)
    assert all(not end.ok and not end.hung and end.bad_from == 0 for end in ends)
    assert reader.matched("r", tokens) == 0 and reader.matched("new", tokens) == found
    assert all(end.ok for end in reader.load("new", found))


def test_a_store_that_cannot_be_opened(case: CaseDict, tmp_path: Path) -> None:
    """The scheduler's store fails: lookups are misses, and the engine goes on."""
    shape = case["dst"]["shape"]
    left = [shape["tp"] * shape["pp"]]  # what the ranks open

    def open_store() -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KvferryError("no store here")
        return FaultyStore(DirStore(str(tmp_path)))

    engine = SmallEngine(case, "dst", open_store)
    assert engine.matched("r", sequence(case)) == 0
    assert engine.scheduler.counters["lookup_errors"] > 0
    engine.close()


def test_backpressure(pair: Pair) -> None:
    """While the store is slow, few blocks are pinned; what was postponed is saved later."""
    tokens = sequence(pair.case)
    writer = pair.engine("src", limits=PoolLimits(most_pinned_blocks=1))
    release = threading.Event()
    pair.faults["put"] = lambda *_: release.wait(30) and None
    span = writer.scheduler.align_tokens
    writer.scheduler.track("w", tuple)
    writer.scheduler.computed("w", tokens, span, lambda: writer.tables)
    pinned = writer.pinned
    writer.scheduler.computed("w", tokens, len(tokens), lambda: writer.tables)
    assert writer.pinned == pinned and writer.scheduler.counters["save_postponed"] == 1
    release.set()
    writer.until(lambda: not writer.scheduler.has_work)
    for _ in range(0, len(tokens), span):  # so many blocks in each step
        writer.save("w", tokens)
    all_ended(writer)
    assert pair.engine("dst").matched("r", tokens) == pair.case["tokens"]


def test_a_request_ends_while_its_saves_are_postponed(pair: Pair) -> None:
    """What it has computed is saved all the same; what it was still loading is not."""
    tokens = sequence(pair.case)
    writer = pair.engine("src", limits=PoolLimits(most_pinned_blocks=1))
    release = threading.Event()
    pair.faults["put"] = lambda *_: release.wait(30) and None
    span = writer.scheduler.align_tokens
    writer.scheduler.track("w", tuple)
    writer.scheduler.computed("w", tokens, span, lambda: writer.tables)
    writer.scheduler.computed("w", tokens, len(tokens), lambda: writer.tables)
    assert writer.scheduler.counters["save_postponed"] == 1
    writer.scheduler.finished("w", tokens, writer.tables)
    writer.scheduler.track("loads", tuple)  # aborted before a step has computed anything of it
    writer.scheduler.finished("loads", tokens, writer.tables)
    assert writer.scheduler.counters["save_jobs"] == 2
    release.set()
    all_ended(writer)
    assert pair.engine("dst").matched("r", tokens) == pair.case["tokens"]


def test_a_request_leaves_no_more_pinned_than_it_may(pair: Pair) -> None:
    """Or the engine would wait for a store that hangs."""
    tokens = sequence(pair.case)
    limits = PoolLimits(most_pinned_blocks=1, most_pinned_at_end=3)
    writer = pair.engine("src", limits=limits)
    release = threading.Event()
    pair.faults["put"] = lambda *_: release.wait(30) and None
    span, tables = writer.scheduler.align_tokens, writer.tables
    writer.scheduler.track("w", tuple)
    writer.scheduler.computed("w", tokens, span, lambda: tables)
    each = writer.pinned  # by the smallest save that there is
    writer.scheduler.finished("w", tokens, tables)
    writer.scheduler.track("v", tuple)
    writer.scheduler.computed("v", tokens[::-1], len(tokens), lambda: tables)
    writer.scheduler.finished("v", tokens[::-1], tables)
    assert each <= writer.pinned <= max(3, each) < len(tokens) // span
    assert writer.scheduler.counters["save_postponed"] > 0
    release.set()
    all_ended(writer)


def test_the_first_block_is_gone(pair: Pair) -> None:
    """A new request misses by one question. One that has the block itself finds the rest."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    writer.save("w", tokens)
    first = [
        keys.keys[0]
        for keys in sequence_keys(
            writer.metadata, writer.scheduler.track("w", tuple).chain, [writer.layout]
        )
    ]
    store = pair.open_store()
    assert store.remove(first, time.monotonic() + 10) == len(first)
    reader, span = pair.engine("src"), writer.scheduler.align_tokens
    assert reader.matched("new", tokens) == 0
    assert reader.scheduler.counters["lookup_keys"] == len(first)
    assert reader.matched("has it", tokens) == 0
    assert reader.matched("has it", tokens, computed=span) == pair.case["tokens"] - span


def test_what_a_rejected_draft_left_is_not_saved(pair: Pair) -> None:
    """A request ends while the last of its tokens fills a block: that token was sampled, and its
    place may hold a draft's bytes."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    scheduler, span = writer.scheduler, writer.scheduler.align_tokens
    ended = tokens[: 2 * span]
    scheduler.track("w", tuple)
    # a step with drafts: more tokens than the request has now, and than are accepted
    scheduler.computed("w", ended[:span], 3 * span, lambda: writer.tables)
    scheduler.finished("w", ended, writer.tables)
    saved = [
        (max(blocks.numbers) + 1) * scheduler.block_tokens(blocks.table)
        for order in scheduler._orders.saves
        for blocks in order.tables
    ]
    assert saved and max(saved) < len(ended)
    all_ended(writer)


def test_aborted_while_saving(pair: Pair) -> None:
    """A request that ends does not take its pins along; they end with the save."""
    tokens = sequence(pair.case)
    writer = pair.engine("src")
    release = threading.Event()
    pair.faults["put"] = lambda *_: release.wait(30) and None
    writer.scheduler.track("w", tuple)
    writer.scheduler.computed("w", tokens, len(tokens), lambda: writer.tables)
    writer.scheduler.finished("w")
    writer.step()
    assert writer.pinned > 0
    release.set()
    all_ended(writer)
    assert pair.engine("dst").matched("r", tokens) == pair.case["tokens"]


def test_no_thread_for_lookups(pair: Pair, monkeypatch: Any) -> None:
    """The engine goes on with misses; when there are threads again, it finds what there is."""
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    with no_threads(monkeypatch, "kvferry-lookup"):
        reader = pair.engine("dst", limits=PoolLimits(lookup_seconds=1))
        assert reader.matched("r", tokens) == 0
    more = itertools.count()
    reader.until(lambda: reader.matched(f"r{next(more)}", tokens) == pair.case["tokens"])
