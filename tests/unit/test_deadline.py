"""Where a load's time went, also where another engine says so."""

from __future__ import annotations

import math
import time

import pytest

from kvferry.handover.deadline import Clock
from waiting import wait_until


@pytest.mark.parametrize("said", [0.005, 0.0, -1.0, math.nan, math.inf])
def test_what_a_peer_says_is_never_longer_than_it_was(said: float) -> None:
    begun = time.monotonic()
    clock = Clock()
    made = time.monotonic()
    wait_until(lambda: time.monotonic() > made + 0.01)
    split = time.monotonic()
    clock.split("wait", "push", said)
    lasted = time.monotonic() - begun
    assert all(0.0 <= spent <= lasted for spent in clock.spent.values())
    assert 0.01 <= sum(clock.spent.values()) <= lasted
    if said == 0.005:
        assert clock.spent["push"] == said
    clock.stop("zero")
    assert clock.spent["zero"] <= time.monotonic() - split
