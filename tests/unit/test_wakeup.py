"""An idle engine waits for what it would report, and not longer."""

from __future__ import annotations

import threading
import time

from kvferry.handover.wakeup import Wakeup


def test_rings_of_before_and_of_meanwhile_end_the_wait() -> None:
    wakeup = Wakeup()
    wakeup.ring()
    begun = time.monotonic()
    wakeup.wait(30.0)
    threading.Timer(0.05, wakeup.ring).start()
    wakeup.wait(30.0)
    assert 0.04 < time.monotonic() - begun < 10.0


def test_a_ring_is_heard_once() -> None:
    wakeup = Wakeup()
    wakeup.ring()
    wakeup.wait(30.0)
    begun = time.monotonic()
    wakeup.wait(0.05)
    assert time.monotonic() - begun > 0.04
