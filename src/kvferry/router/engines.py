"""Which engines there are, which of them are up, and which one is next.

An engine is up or down. It goes down after `fail_after` failures in a row, of probes and requests
together, or at once when it takes no connection. It comes back only by probes: `recover_after`
good ones in a row; the first probe of all counts alone, so that a router is ready when it starts.
A plain 500 is the request's failure, not the engine's: else one bad request, tried everywhere,
would take all engines down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from kvferry.router.config import Limits

log = logging.getLogger(__name__)
Role = Literal["prefill", "decode"]


class Engine:
    """One engine: where it is, how it is, how busy it is."""

    def __init__(self, url: str, role: Role, limits: Limits) -> None:
        self.url = url
        self.role: Role = role
        self.up = False
        self.reason = "not probed yet"  # why it is down
        self.in_flight = 0
        self.failures = 0  # ever
        self._limits = limits
        self._probed = False
        self._failed_in_a_row = 0
        self._good_in_a_row = 0

    def answered(self) -> None:
        """A request got an answer."""
        self._failed_in_a_row = 0

    def failed(self, reason: str, *, refused: bool = False) -> None:
        """A request or a probe failed; `refused`: the engine took no connection."""
        self.failures += 1
        self._probed = True
        self._good_in_a_row = 0
        self._failed_in_a_row += 1
        if self.up and (refused or self._failed_in_a_row >= self._limits.fail_after):
            self.up = False
            log.warning("%s engine %s is down: %s", self.role, self.url, reason)
        if not self.up:
            self.reason = reason

    def probed_well(self) -> None:
        enough = self._limits.recover_after if self._probed else 1
        self._probed = True
        self._failed_in_a_row = 0
        self._good_in_a_row += 1
        if not self.up and self._good_in_a_row >= enough:
            self.up = True
            self.reason = ""
            log.info("%s engine %s is up", self.role, self.url)

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Group:
    """The engines of one role."""

    def __init__(self, urls: Sequence[str], role: Role, limits: Limits) -> None:
        self.engines = [Engine(url, role, limits) for url in urls]
        self._next = 0

    def some_up(self, besides: Collection[Engine] = ()) -> bool:
        return any(engine.up and engine not in besides for engine in self.engines)

    def pick(self, besides: Collection[Engine] = ()) -> Engine | None:
        """The engine that is up and has the fewest requests in flight; of equals, in turn."""
        count = len(self.engines)
        places = [
            place
            for place, engine in enumerate(self.engines)
            if engine.up and engine not in besides
        ]
        if not places:
            return None
        best = min(places, key=lambda p: (self.engines[p].in_flight, (p - self._next) % count))
        self._next = (best + 1) % count
        return self.engines[best]


Probe = Callable[[Engine], Awaitable[None]]  # tells the engine how it went; raises nothing


async def keep_probing(engine: Engine, probe: Probe, every_seconds: float) -> None:
    """Probes one engine until cancelled."""
    while True:
        await asyncio.sleep(every_seconds)
        try:
            await probe(engine)
        except Exception:  # a prober that dies would freeze the engine's state for ever
            log.exception("the probe of %s broke", engine.url)
