"""Tests wait on conditions. A busy machine may take its time, within a generous limit."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 30.0  # generous: the machine may be busy


def soon(seconds: float = PATIENCE_SECONDS) -> float:
    """The deadline of what should end long before."""
    return time.monotonic() + seconds


def wait_until(
    condition: Callable[[], object],
    seconds: float = PATIENCE_SECONDS,
    what: str | Callable[[], str] = "it did not happen",
) -> None:
    """Return as soon as the condition holds; fail with `what` when it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            words = what if isinstance(what, str) else what()
            raise AssertionError(f"{words} in {seconds:g} s")
        time.sleep(0.002)


def require_for(seconds: float, condition: Callable[[], object]) -> None:
    """The condition holds all this time: for what must not happen. Load cannot make it fail."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition()
        time.sleep(0.002)
    assert condition()
