"""What waits for a device: in order, once, and also where the device fails."""

from __future__ import annotations

import threading

import pytest

from kvferry.handover.wakeup import WhenReady


class Mark:
    """An event that the test lets the device come to, or not."""

    def __init__(self, error: str = "") -> None:
        self.reached, self._error = threading.Event(), error

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        assert self.reached.wait(10)
        if self._error:
            raise RuntimeError(self._error)


def test_actions_wait_their_turn_and_failures_are_passed_on() -> None:
    marks = [Mark(), Mark("an illegal memory access"), Mark()]
    left, said, over = iter(marks), [], threading.Event()
    ready = WhenReady(gpu=True, record=lambda: next(left))
    for number in range(3):
        ready.mark()(lambda why, number=number: said.append((number, why)))  # type: ignore[misc]
    assert said == []
    marks[2].reached.set()  # later ones do not overtake
    marks[0].reached.set()
    marks[1].reached.set()
    with pytest.raises(StopIteration):
        next(left)
    ready._queue.put((marks[0], lambda why: over.set()))
    assert over.wait(10)
    assert said == [(0, ""), (1, "the device failed: an illegal memory access"), (2, "")]
    ready.close()


def test_an_action_that_raises_does_not_end_the_others() -> None:
    mark, said, over = Mark(), [], threading.Event()
    mark.reached.set()
    ready = WhenReady(gpu=True, record=lambda: mark)
    ready.mark()(lambda why: 1 / 0)  # type: ignore[arg-type, return-value]
    ready.mark()(lambda why: (said.append(why), over.set()))  # type: ignore[arg-type, func-returns-value, return-value]
    assert over.wait(10) and said == [""]
    ready.close()


def test_a_device_that_cannot_even_be_marked() -> None:
    def record() -> Mark:
        raise RuntimeError("CUDA error: unspecified launch failure")

    said: list[str] = []
    WhenReady(gpu=True, record=record).mark()(said.append)
    assert said == ["the device failed: CUDA error: unspecified launch failure"]
    WhenReady(gpu=False).mark()(said.append)
    assert said[1:] == [""]
