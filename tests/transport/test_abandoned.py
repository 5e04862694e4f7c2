"""A transfer that its carrier cannot end: its load has failed, and keeps its blocks until then."""

from __future__ import annotations

import threading
import time
from typing import Any

from handover_peers import PATIENCE_SECONDS, Producer, Prompt, Spec, WrappedCarrier, consumer
from kvferry.carriers import TransferState
from kvferry.errors import Cancelled, DeadlineExceeded
from waiting import require_for, wait_until

PROMPT = Prompt(1, 100)


class StuckTransfer:
    def __init__(self, released: threading.Event) -> None:
        self.released = released

    def wait(self, deadline: float) -> None:
        if not self.released.wait(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded("it goes on")
        raise Cancelled("given up")

    def poll(self) -> TransferState:
        return TransferState.FAILED if self.released.is_set() else TransferState.RUNNING

    def settled(self) -> bool:
        return self.released.is_set()

    def cancel(self) -> None:
        if not self.released.is_set():
            raise DeadlineExceeded("the library has no way to end it")


class StuckCarrier(WrappedCarrier):
    """A backend that has taken a batch and does not return."""

    def __init__(self, carrier: Any) -> None:
        super().__init__(carrier)
        self.released, self.asked = threading.Event(), threading.Event()

    def read(self, peer: Any, copies: Any) -> StuckTransfer:
        self.asked.set()
        return StuckTransfer(self.released)


def test_an_abandoned_load_is_counted_and_reported_when_it_has_ended() -> None:
    source, sink = Spec("p", carrier="null"), Spec("d", carrier="null")
    producer = Producer(source)
    try:
        with consumer(sink, source, alone=False) as user:
            (rank,) = user.ranks
            stuck = StuckCarrier(user.racks[0].carrier)
            user.known().carriers = [stuck]
            producer.fill(PROMPT)
            producer.open(PROMPT)
            request = user.start(producer.ticket(PROMPT), PROMPT)
            assert stuck.asked.wait(PATIENCE_SECONDS)
            user.cancel(request)
            wait_until(lambda: rank.stats().abandoned_now)
            require_for(0.2, lambda: user.pending(request))  # its blocks are still the carrier's
            assert rank.stats().abandoned_now == 1 and rank.busy
            stuck.released.set()
            ((loaded,),) = user.wait(request)
            assert loaded.kind == "Cancelled"
            assert rank.stats().abandoned_now == 0 and not rank.busy
    finally:
        producer.close()
