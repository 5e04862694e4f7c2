"""What waits for a device: in order, once, and also where the device fails."""

from __future__ import annotations

import queue
import threading

import pytest

from kvferry.handover.wakeup import KEPT_STEPS, WhenReady


class Mark:
    """An event that the test lets the device come to, or not."""

    def __init__(self, error: str = "") -> None:
        self.reached, self._error = threading.Event(), error

    def synchronize(self) -> None:
        assert self.reached.wait(60)
        if self._error:
            raise RuntimeError(self._error)


def test_actions_wait_their_turn_and_failures_are_passed_on() -> None:
    marks = [Mark(), Mark("an illegal memory access"), Mark()]
    left, said, over = iter(marks), [], threading.Event()
    ready = WhenReady(gpu=True, record=lambda: next(left))
    for number in range(3):
        ready.begin(number)
        ready.after(number - 1, lambda why, number=number: said.append((number, why)))  # type: ignore[misc]
    assert said == []
    marks[2].reached.set()  # later ones do not overtake
    marks[0].reached.set()
    marks[1].reached.set()
    with pytest.raises(StopIteration):
        next(left)
    ready._queue.put((marks[0], lambda why: over.set()))
    assert over.wait(30)
    assert said == [(0, ""), (1, "the device failed: an illegal memory access"), (2, "")]
    ready.close()


def test_an_action_that_raises_does_not_end_the_others() -> None:
    mark, said, over = Mark(), [], threading.Event()
    mark.reached.set()
    ready = WhenReady(gpu=True, record=lambda: mark)
    ready.begin(1)
    ready.after(0, lambda why: 1 / 0)  # type: ignore[arg-type, return-value]
    ready.after(0, lambda why: (said.append(why), over.set()))  # type: ignore[arg-type, func-returns-value, return-value]
    assert over.wait(30) and said == [""]
    ready.close()


def test_a_device_that_cannot_even_be_marked() -> None:
    def record() -> Mark:
        raise RuntimeError("CUDA error: unspecified launch failure")

    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    ready = WhenReady(gpu=True, record=record)
    ready.begin(1)
    ready.after(0, said.put)
    failed = "the device failed: CUDA error: unspecified launch failure"
    assert said.get(timeout=30) == failed
    ready.close()
    host = WhenReady(gpu=False)
    host.begin(1)
    host.after(0, said.put)
    assert said.get_nowait() == ""


def test_an_action_waits_for_its_own_step_not_for_those_queued_since() -> None:
    marks = [Mark() for _ in range(3 + KEPT_STEPS)]
    left, said = iter(marks), queue.SimpleQueue[str]()
    ready = WhenReady(gpu=True, record=lambda: next(left))
    for step in (1, 2, 4):  # the third was not told
        ready.begin(step)
    ready.after(1, said.put)
    with pytest.raises(queue.Empty):
        said.get(timeout=0.1)
    marks[1].reached.set()  # the second step began: the first is over
    assert said.get(timeout=30) == ""
    ready.after(2, said.put)
    with pytest.raises(queue.Empty):
        said.get(timeout=0.1)
    marks[2].reached.set()
    assert said.get(timeout=30) == ""
    for step in range(5, 5 + KEPT_STEPS):
        ready.begin(step)
    ready.after(0, said.put)  # that event is not kept: a later one serves, and none before it
    with pytest.raises(queue.Empty):
        said.get(timeout=0.1)
    marks[3].reached.set()
    assert said.get(timeout=30) == ""
    ready.close()
