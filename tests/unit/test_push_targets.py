"""Connections to those who are written to: made once, in bounded time, and always given back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.errors import Cancelled, DeadlineExceeded
from kvferry.handover import push
from kvferry.handover.deadline import Deadline
from kvferry.handover.push import CannotWrite, Target
from kvferry.net.messages import EngineInfo, RankInfo

SECONDS = 10.0


class Line:
    """A carrier whose connections are made when the test says so, or not by their deadline."""

    name = "line"

    def __init__(self) -> None:
        self.asked, self.answers = threading.Semaphore(0), threading.Event()
        self.patience: list[float] = []
        self.left: list[Any] = []

    def connect(self, endpoint: bytes, deadline: float) -> str:
        self.patience.append(deadline - time.monotonic())
        self.asked.release()
        if not self.answers.wait(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded("it says nothing")
        return f"peer {len(self.patience)} at {endpoint.decode()}"

    def disconnect(self, peer: Any) -> None:
        self.left.append(peer)


def target() -> Target:
    return Target.of(
        EngineInfo("d", "life", "model", [], 0, {}, {}),
        RankInfo(0, 0, "", "life", {"line": b"there"}, [], [], 0),
    )


def soon(seconds: float = SECONDS) -> Deadline:
    return Deadline(time.monotonic() + seconds)


def took(action: Callable[[], Any]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def test_a_connection_is_made_once_for_all() -> None:
    line: Any = Line()
    to = target()
    with ThreadPoolExecutor(3) as threads:
        made = [threads.submit(to.peer, line, soon()) for _ in range(3)]
        assert line.asked.acquire(timeout=SECONDS)
        line.answers.set()
        assert {one.result(SECONDS) for one in made} == {"peer 1 at there"}
    assert to.take_peer() == "peer 1 at there"
    assert to.peer(line, soon()) == "peer 2 at there"  # it was idle, and is used again


@pytest.mark.parametrize(("left", "most"), [(120.0, 10.0), (20.0, 5.0), (6.0, 2.0), (1.0, 0.5)])
def test_time_is_left_for_reading(left: float, most: float) -> None:
    line: Any = Line()
    line.answers.set()
    target().peer(line, soon(left))
    assert line.patience[0] == pytest.approx(most, abs=0.2)


def test_a_failure_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "CONNECT_SECONDS", 0.2)
    line: Any = Line()
    to = target()
    for _ in range(3):
        with pytest.raises(CannotWrite, match="it says nothing"):
            to.peer(line, soon(0.8))
    assert len(line.patience) == 1
    monkeypatch.setattr(push, "RETRY_SECONDS", 0.0)
    line.answers.set()
    assert to.peer(line, soon()) == "peer 2 at there"


def test_one_in_haste_does_not_speak_for_others() -> None:
    """Its time was too short to tell anything: the next one tries itself."""
    line: Any = Line()
    to = target()
    with ThreadPoolExecutor(1) as threads:
        hasty = threads.submit(to.peer, line, soon(0.4))
        assert line.asked.acquire(timeout=SECONDS)
        patient = threading.Timer(0.3, line.answers.set)
        patient.start()
        assert to.peer(line, soon()) == "peer 2 at there"
        with pytest.raises(CannotWrite):
            hasty.result(SECONDS)
        patient.join()


def test_those_that_wait_have_their_own_time_and_can_be_given_up() -> None:
    line: Any = Line()
    to = target()
    with ThreadPoolExecutor(2) as threads:
        maker = threads.submit(to.peer, line, soon(4 * SECONDS))
        assert line.asked.acquire(timeout=SECONDS)
        with pytest.raises(CannotWrite, match="yet"):
            to.peer(line, soon(0.4))
        watch = soon()
        waiter = threads.submit(to.peer, line, watch)
        watch.give_up()
        with pytest.raises(Cancelled):
            waiter.result(SECONDS)
        line.answers.set()
        assert maker.result(SECONDS) == "peer 1 at there"


def test_a_connection_for_a_target_that_was_dropped_is_given_back() -> None:
    line: Any = Line()
    to = target()
    with ThreadPoolExecutor(2) as threads:
        maker = threads.submit(to.peer, line, soon())
        assert line.asked.acquire(timeout=SECONDS)
        waiter = threads.submit(to.peer, line, soon())
        assert took(lambda: to.take_peer(drop=True)) < SECONDS / 2  # it does not wait
        line.answers.set()
        for one in (maker, waiter):
            with pytest.raises(Cancelled):
                one.result(SECONDS)
    assert line.left == ["peer 1 at there"]
    with pytest.raises(Cancelled):  # a push that had not connected yet
        to.peer(line, soon())
    assert (len(line.patience), to.take_peer()) == (1, None)
