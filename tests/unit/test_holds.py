"""The state machine of holds: every transition, and random histories against a small model."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
)

from kvferry.handover import holds as module
from kvferry.handover.holds import Closed, Hold, HoldOrder, HoldTable
from kvferry.net.messages import VERSION, Claim, Reader
from kvferry.net.server import ENTRY_BYTES, Budget, kept_bytes

LEASE = 10.0


def reader(rank: int = 0, engine: str = "d", incarnation: str = "x", stage: int = 0) -> Reader:
    return Reader(engine, incarnation, stage, rank)


def table() -> HoldTable[str]:
    return HoldTable(LEASE)


def opened(now: float = 0.0) -> HoldTable[str]:
    made = table()
    assert made.add(HoldOrder("h", "r", "digest", 100, [[1, 2]]), now) == ([], None)
    return made


def test_an_open_hold_is_found_with_its_blocks() -> None:
    hold = opened().find("h")
    assert isinstance(hold, Hold)
    assert hold.order == HoldOrder("h", "r", "digest", 100, [[1, 2]])


def test_unknown_holds_are_neither_open_nor_closed() -> None:
    made = table()
    assert made.find("h") is None
    assert made.last_word("h", reader(), 1, "done", 0.0) == (False, None)
    assert made.expire(1e9) == ([], [])
    assert made.next_deadline() is None


def test_claims_wait_until_the_hold_arrives() -> None:
    made = table()
    assert made.park("h", "first", 5.0) and made.park("h", "second", 6.0)
    assert made.park("other", "third", 7.0)
    assert made.parked == 3
    assert made.add(HoldOrder("h", "r", "d", 1, []), 1.0) == (["first", "second"], None)
    assert made.parked == 1
    assert made.expire(1e9)[1] == ["third"]


def test_claims_lose_patience_one_by_one() -> None:
    made = table()
    made.park("h", "first", 5.0)
    made.park("h", "second", 6.0)
    assert made.expire(4.0) == ([], [])
    assert made.expire(5.0) == ([], ["first"])
    assert made.expire(5.9) == ([], [])
    assert made.expire(6.0) == ([], ["second"])
    assert made.parked == 0 and made._parked_budget.used_bytes == 0
    assert made.add(HoldOrder("h", "r", "d", 1, []), 7.0) == ([], None)


def test_parked_claims_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARKED_BYTES", 2 * 3 * ENTRY_BYTES)  # of one sender, half
    made = table()
    assert [made.park(f"h{i}", "claim", 5.0) for i in range(5)] == [True] * 3 + [False] * 2
    made.expire(5.0)
    assert made.park("h9", "claim", 9.0)


def test_a_hold_is_delivered_when_all_ranks_of_its_reader_spoke() -> None:
    made = opened()
    assert made.last_word("h", reader(0), 3, "done", 1.0) == (True, None)
    assert made.last_word("h", reader(1), 3, "done", 1.0) == (True, None)
    was_open, closed = made.last_word("h", reader(0, stage=1), 3, "not needed", 1.0)
    assert was_open
    assert closed == Closed("h", "r", "delivered", {"done": 2, "not needed": 1})
    assert made.find("h") == "delivered"
    assert made.last_word("h", reader(0), 3, "done", 1.0) == (False, None)


@pytest.mark.parametrize("last", ["done", "failed", "not needed"])
def test_a_hold_that_a_reader_failed_to_load_is_not_delivered(last: Any) -> None:
    made = opened()
    assert made.last_word("h", reader(0), 2, "failed", 1.0) == (True, None)
    was_open, closed = made.last_word("h", reader(1), 2, last, 1.0)
    assert was_open and closed is not None and closed.why == "failed"
    assert made.find("h") == "failed"
    assert made.last_word("h", reader(0), 2, "done", 1.0) == (False, None)


def test_a_rank_that_speaks_twice_counts_once() -> None:
    made = opened()
    for outcome in ("done", "failed", "done"):
        assert made.last_word("h", reader(0), 2, outcome, 1.0) == (True, None)  # type: ignore[arg-type]
    _, closed = made.last_word("h", reader(1), 2, "done", 1.0)
    assert closed is not None
    assert closed.outcomes == {"done": 2}


def test_a_hold_waits_for_every_engine_that_showed_up() -> None:
    made = opened()
    hold = made.find("h")
    assert isinstance(hold, Hold)
    assert hold.announce(reader(0, "a"), 1) and hold.announce(reader(0, "b"), 2)
    assert made.last_word("h", reader(0, "a"), 1, "done", 1.0) == (True, None)
    assert made.last_word("h", reader(0, "b"), 2, "done", 1.0) == (True, None)
    _, closed = made.last_word("h", reader(1, "b"), 2, "done", 1.0)
    assert closed is not None


def test_incarnations_of_one_engine_are_readers_of_their_own() -> None:
    made = opened()
    hold = made.find("h")
    assert isinstance(hold, Hold)
    hold.announce(reader(0, incarnation="dead"), 1)
    hold.announce(reader(0, incarnation="alive"), 1)
    assert made.last_word("h", reader(0, incarnation="alive"), 1, "done", 1.0) == (True, None)
    assert made.expire(LEASE)[0] == [Closed("h", "r", "expired", {"done": 1}, silent=1)]


def test_engines_of_one_hold_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ENGINES", 2)
    hold = opened().open["h"]
    assert [hold.announce(reader(0, name), 1) for name in "abcab"] == [
        True,
        True,
        False,
        True,
        True,
    ]


def test_a_hold_without_claims_expires() -> None:
    made = opened(now=3.0)
    assert made.next_deadline() == 3.0 + LEASE
    assert made.expire(3.0 + LEASE - 0.1) == ([], [])
    assert made.expire(3.0 + LEASE) == ([Closed("h", "r", "expired", {})], [])
    assert made.expire(1e9) == ([], [])
    assert made.find("h") == "expired"
    assert made.last_word("h", reader(), 1, "done", 1e9) == (False, None)


def test_claims_and_renewals_renew_the_lease_and_last_words_do_not() -> None:
    made = opened()
    made.renew("h", 8.0)
    assert made.next_deadline() == 8.0 + LEASE
    made.find("h")
    made.last_word("h", reader(0), 2, "done", 9.0)
    assert made.next_deadline() == 8.0 + LEASE
    assert made.expire(8.0 + LEASE)[0][0].why == "expired"


def test_a_withdrawn_hold_is_closed_once() -> None:
    made = opened()
    assert made.withdraw("h") == (Closed("h", "r", "withdrawn", {}), [])
    assert made.withdraw("h") == (None, [])
    assert made.find("h") == "withdrawn"
    assert made.add(HoldOrder("h", "r", "d", 1, []), 1.0) == ([], None)
    assert not made.open


def test_a_hold_withdrawn_before_it_arrives_never_opens_and_is_reported() -> None:
    made = table()
    made.park("h", "claim", 5.0)
    assert made.withdraw("h") == (None, ["claim"])
    assert made.parked == 0
    assert made.find("h") == "withdrawn"
    assert made.add(HoldOrder("h", "r", "d", 1, []), 1.0) == ([], Closed("h", "r", "withdrawn", {}))
    assert made.add(HoldOrder("h", "r", "d", 1, []), 1.0) == ([], None)
    assert made.find("h") == "withdrawn"


def test_closed_holds_never_open_again() -> None:
    made = opened()
    made.last_word("h", reader(), 1, "done", 1.0)
    assert made.add(HoldOrder("h", "r", "d", 1, []), 2.0) == ([], None)
    assert made.find("h") == "delivered"


def test_opening_a_hold_twice_changes_nothing() -> None:
    made = opened()
    assert made.add(HoldOrder("h", "r", "d2", 1, []), 5.0) == ([], None)
    assert made.open["h"].order.digest == "digest"
    assert made.next_deadline() == LEASE


def test_an_id_that_another_request_has_used_is_reported_at_once() -> None:
    """Its blocks are to be freed: it can never be claimed. The first hold stays as it is."""
    made = opened()
    closed = Closed("", "other", "withdrawn", {})
    assert made.add(HoldOrder("h", "other", "d2", 1, []), 5.0) == ([], closed)
    assert made.open["h"].order.request_id == "r" and made.next_deadline() == LEASE
    made.withdraw("h")
    assert made.add(HoldOrder("h", "other", "d2", 1, []), 6.0) == ([], closed)
    assert made.add(HoldOrder("h", "r", "d", 1, []), 7.0) == ([], None)  # reported before


def test_all_claims_can_be_sent_away() -> None:
    made = table()
    for number, hold_id in enumerate(("a", "a", "b")):
        assert made.park(hold_id, str(number), 5.0)
    assert made.unpark_all() == ["0", "1", "2"]
    assert made.parked == 0


@pytest.mark.parametrize("outcome", ["failed", "not needed"])
def test_a_word_that_comes_before_the_hold_counts_when_it_arrives(outcome: Any) -> None:
    made = table()
    assert made.last_word("h", reader(0), 2, outcome, 0.0) == (False, None)
    assert made.last_word("h", reader(1), 2, outcome, 0.0) == (False, None)
    assert made.add(HoldOrder("h", "r", "d", 1, []), 1.0) == ([], None)
    why = "failed" if outcome == "failed" else "delivered"
    assert made.settle("h") == Closed("h", "r", why, {outcome: 2})
    assert made.settle("h") is None


def test_done_before_the_hold_arrives_is_not_believed() -> None:
    made = table()
    assert made.last_word("h", reader(0), 1, "done", 0.0) == (False, None)
    made.add(HoldOrder("h", "r", "d", 1, []), 1.0)
    assert made.settle("h") is None
    assert "h" in made.open


def test_early_words_of_one_engine_do_not_close_a_hold_that_another_waits_for() -> None:
    made = table()
    made.park("h", "claim of b", 5.0)
    made.last_word("h", reader(0, "a"), 1, "not needed", 0.0)
    claims, _ = made.add(HoldOrder("h", "r", "d", 1, []), 1.0)
    assert claims == ["claim of b"]
    made.open["h"].announce(reader(0, "b"), 1)
    assert made.settle("h") is None
    assert made.last_word("h", reader(0, "b"), 1, "done", 2.0)[1] is not None


def test_early_words_are_forgotten_in_time_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EARLY", 2)
    made = table()
    for name in "abc":
        made.last_word(name, reader(), 1, "failed", 0.0)
    made.add(HoldOrder("a", "r", "d", 1, []), 1.0)
    assert made.settle("a") is None  # the oldest was forgotten
    made.expire(LEASE)
    made.add(HoldOrder("b", "r", "d", 1, []), LEASE)
    assert made.settle("b") is None


def test_tombstones_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOMBSTONES", 4)
    made = table()
    for number in range(10):
        made.add(HoldOrder(f"h{number}", "r", "d", 1, []), 0.0)
        made.withdraw(f"h{number}")
        made.withdraw(f"unborn{number}")
    assert [made.find(f"h{n}") for n in (5, 8, 9)] == [None, "withdrawn", "withdrawn"]
    assert [made.find(f"unborn{n}") for n in (5, 8, 9)] == [None, "withdrawn", "withdrawn"]


IDS = st.sampled_from(["a", "b", "c"])
RANKS = st.integers(0, 2)
ENGINES = st.sampled_from(["p", "q"])
OUTCOMES = st.sampled_from(["done", "failed", "not needed"])


class Histories(RuleBasedStateMachine):
    """Any order of events: holds are reported once, closed for good, and answer only while open."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table: HoldTable[int] = HoldTable(LEASE)
        self.arrived: set[str] = set()
        self.reports: Counter[str] = Counter()
        self.parked: dict[int, str] = {}
        self.claims = 0

    def report(self, closed: Closed | None) -> None:
        if closed is not None:
            assert closed.hold_id in self.arrived
            self.reports[closed.hold_id] += 1

    def answer(self, claim: int) -> None:
        """A claim that waited is answered: its hold must be open."""
        hold_id = self.parked.pop(claim)
        assert hold_id in self.table.open
        assert not self.reports[hold_id]

    @rule(hold_id=IDS)
    def arrive(self, hold_id: str) -> None:
        first = hold_id not in self.arrived
        self.arrived.add(hold_id)
        claims, closed = self.table.add(HoldOrder(hold_id, "r", "d", 1, []), self.now)
        assert first or (claims == [] and closed is None)
        for claim in claims:
            self.answer(claim)
            self.table.open[hold_id].announce(reader(claim % 3, "p"), 1 + claim % 3)
        self.report(closed)
        self.report(self.table.settle(hold_id))

    @rule(hold_id=IDS, patience=st.floats(0.1, 30.0))
    def claim(self, hold_id: str, patience: float) -> None:
        found = self.table.renew(hold_id, self.now)
        if isinstance(found, Hold):
            assert hold_id in self.arrived
            assert not self.reports[hold_id]
            found.announce(reader(self.claims % 3, "q"), 1 + self.claims % 3)
        elif found is None:
            assert hold_id not in self.arrived
            self.claims += 1
            self.parked[self.claims] = hold_id
            assert self.table.park(hold_id, self.claims, self.now + patience)
        else:
            assert self.reports[hold_id] == 1 or hold_id not in self.arrived

    @rule(hold_id=IDS, rank=RANKS, engine=ENGINES, readers=st.integers(1, 3), outcome=OUTCOMES)
    def speak(self, hold_id: str, rank: int, engine: str, readers: int, outcome: Any) -> None:
        expected = hold_id in self.arrived and not self.reports[hold_id]
        was_open, closed = self.table.last_word(
            hold_id, reader(rank, engine), readers, outcome, self.now
        )
        assert was_open == expected
        assert closed is None or was_open
        self.report(closed)

    @rule(hold_id=IDS)
    def withdraw(self, hold_id: str) -> None:
        closed, waited = self.table.withdraw(hold_id)
        for claim in waited:
            assert self.parked.pop(claim) == hold_id
        self.report(closed)
        assert hold_id not in self.table.open

    @rule(seconds=st.floats(0.0, 15.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        closed, impatient = self.table.expire(self.now)
        for one in closed:
            assert one.why == "expired"
            self.report(one)
        for claim in impatient:
            del self.parked[claim]
        due = self.table.next_deadline()
        assert due is None or due > self.now

    @invariant()
    def reported_exactly_when_closed(self) -> None:
        for hold_id in self.arrived:
            assert self.reports[hold_id] == (hold_id not in self.table.open)
        assert self.table.parked == len(self.parked)
        assert not set(self.parked.values()) & self.arrived


Histories.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True
)
TestHistories = Histories.TestCase


def test_what_waits_takes_no_more_than_it_is_charged() -> None:
    """Texts with one wide character take four bytes for each; of all that is kept around them."""
    wide = "\U0001f6a2" + "x" * 500
    made, charged = table(), 0
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2000):
            who = Reader(f"{wide}e{number}", f"{wide}i{number}", 0, 0)
            claim = Claim(VERSION, f"{wide}p", f"{wide}{number}", f"{wide}d", who, 1, 60.0)
            charged += kept_bytes(claim)
            assert made.park(claim.hold_id, claim, 60.0, bytes_=kept_bytes(claim), sender=b"s")
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert charged / 2 < grown < charged
    made.expire(60.0)
    assert made._parked_budget.used_bytes == 0


def test_one_sender_leaves_room_for_others() -> None:
    budget = Budget(100)
    assert [budget.take(n, who) for n, who in ((30, b"a"), (30, b"a"), (50, b"b"))] == [
        True,
        False,
        True,
    ]
    assert budget.take(20, b"c") and not budget.take(1, b"d")  # all is taken
    budget.give_back(30, b"a")
    assert budget.take(30, b"d") and budget.used_bytes == 100
