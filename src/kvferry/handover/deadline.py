# SPDX-License-Identifier: Apache-2.0
"""Deadlines of loads and writes, the time their steps took, and how their transfers end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_any
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.carriers.base import Transfer, TransferState
from kvferry.errors import Cancelled, DeadlineExceeded, KvferryError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A load or a write is wanted until its deadline, or until it is given up."""

    deadline: float
    given_up: Future[None] = field(default_factory=Future)

    def give_up(self) -> None:
        """Give up. The caller's lock prevents two calls at the same time."""
        if not self.given_up.done():
            self.given_up.set_result(None)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def require_wanted(self) -> None:
        if self.given_up.done():
            raise Cancelled("the request was given up")

    def pause(self, seconds: float) -> None:
        wait_any([self.given_up], timeout=seconds)
        self.require_wanted()

    def first(self, futures: Sequence[Future[T]]) -> Future[T]:
        """The first of these futures that is done.

        Raises if the wait is given up or runs out of time.
        """
        either: list[Future[Any]] = [*futures, self.given_up]
        wait_any(either, timeout=self.left, return_when=FIRST_COMPLETED)
        self.require_wanted()
        for future in futures:
            if future.done():
                return future
        raise DeadlineExceeded("the peer did not answer in time")

    def result(self, future: Future[T]) -> T:
        return self.first([future]).result()


class Clock:
    """Seconds spent on each step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._last = time.monotonic()

    def stop(self, step: str) -> None:
        now = time.monotonic()
        self.spent[step] = now - self._last
        self._last = now

    def split(self, first: str, second: str, seconds: float) -> None:
        """Two steps have ended. A peer says how long the second took; the first gets the rest."""
        self.stop(first)
        whole = self.spent[first]
        self.spent[second] = min(whole, seconds) if seconds > 0 else 0.0  # also for NaN
        self.spent[first] = whole - self.spent[second]


log = logging.getLogger("kvferry")

STUCK_LOOK_SECONDS = 1.0  # between two attempts to end a transfer
TRANSFER_LOOK_SECONDS = 0.1  # between two checks whether a transfer is still wanted


def await_transfer(transfer: Transfer, watch: Deadline) -> None:
    """Wait for a transfer while it is wanted."""
    while True:
        watch.require_wanted()
        try:
            transfer.wait(min(watch.deadline, time.monotonic() + TRANSFER_LOOK_SECONDS))
            return
        except DeadlineExceeded:
            if time.monotonic() >= watch.deadline or transfer.poll() is TransferState.FAILED:
                raise


Stuck = Callable[[], AbstractContextManager[None]]


def end_for_good(end: Callable[[], bool], stuck: Stuck) -> None:
    """Call `end` until it returns true. Only then can no byte arrive any more.

    After the first failure, `stuck` is entered until the end; it counts the stuck load. This does
    not return earlier, because the engine must not reuse the memory before.
    """
    if not end():
        with stuck():
            while not end():
                pass


def end_transfers(transfers: Sequence[Transfer], stuck: Stuck) -> None:
    """Cancel all transfers. Returns only when no byte can arrive, so that blocks may be reused."""
    left = list(transfers)

    def end() -> bool:
        while left:
            try:
                left[-1].cancel()
            except DeadlineExceeded as error:
                if not left[-1].settled():
                    log.error("a transfer that was cancelled keeps its blocks: %s", error)
                    _look_at(left[-1])
                    return False
            left.pop()
        return True

    end_for_good(end, stuck)


def _look_at(transfer: Transfer) -> None:
    """Wait a short time for a cancelled transfer to end, in success or failure."""
    try:
        transfer.wait(time.monotonic() + STUCK_LOOK_SECONDS)
    except DeadlineExceeded:
        pass  # it is still running; the caller has logged that
    except KvferryError as error:
        log.info("a transfer that was cancelled has failed: %s", error)
