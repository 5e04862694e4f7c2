"""How long something is wanted, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_any
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.errors import Cancelled, DeadlineExceeded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Watch:
    """How long something is wanted: until a deadline, or until it is given up."""

    deadline: float
    given_up: Future[None] = field(default_factory=Future)

    def give_up(self) -> None:
        """Once; the caller sees to it that nobody else does so at the same time."""
        if not self.given_up.done():
            self.given_up.set_result(None)

    @property
    def over(self) -> bool:
        return self.given_up.done() or time.monotonic() >= self.deadline

    def require_wanted(self) -> None:
        if self.given_up.done():
            raise Cancelled("the request was given up")

    def pause(self, seconds: float) -> None:
        wait_any([self.given_up], timeout=seconds)
        self.require_wanted()

    def first(self, futures: Sequence[Future[T]]) -> Future[T]:
        """Whichever of these is done first."""
        either: list[Future[Any]] = [*futures, self.given_up]
        left = max(0.0, self.deadline - time.monotonic())
        wait_any(either, timeout=left, return_when=FIRST_COMPLETED)
        self.require_wanted()
        for future in futures:
            if future.done():
                return future
        raise DeadlineExceeded("the peer did not answer in time")

    def result(self, future: Future[T]) -> T:
        """A future's result, or the error that ended the wait for it."""
        either: list[Future[Any]] = [future, self.given_up]
        left = max(0.0, self.deadline - time.monotonic())
        wait_any(either, timeout=left, return_when=FIRST_COMPLETED)
        self.require_wanted()
        if not future.done():
            raise DeadlineExceeded("the peer did not answer in time")
        return future.result()


class Clock:
    """Seconds spent, by step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._last = time.monotonic()

    def stop(self, step: str) -> None:
        now = time.monotonic()
        self.spent[step] = now - self._last
        self._last = now

    def split(self, first: str, second: str, seconds: float) -> None:
        """Two steps end: the second took this long, as somebody else says; the first, the rest."""
        self.stop(first)
        whole = self.spent[first]
        self.spent[second] = min(whole, seconds) if seconds > 0 else 0.0  # nor NaN
        self.spent[first] = whole - self.spent[second]
