# SPDX-License-Identifier: Apache-2.0
"""What keeps a rush or an outage from growing: turns for requests, and a budget for retries.

A request that finds no engine with room waits in one line (`Turns`). The line is bounded, in total
and for one client. When there is room, clients take turns, and each client's requests go in their
order; so a client with a hundred requests delays another one's first request by one. A new request
never passes those that wait.

`RetryBudget` bounds retries by the requests that came: each request adds `retry_share`, each retry
takes one, and `retry_burst` are there at the start. So engines that fail all requests get a tenth
more of them, not `tries` times as many.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import anyio

from kvferry.errors import KvferryError
from kvferry.router.guard import Quota

# From so many of the last requests that ended, the time until the next turn is estimated.
_ENDS = 64
# Nobody needs to ask again sooner or later than this.
_SOONEST_SECONDS, _LATEST_SECONDS = 1.0, 60.0


class LineFull(KvferryError):
    """The line, or this client's part of it, is full."""


@dataclass(eq=False, slots=True)
class _Waiting:
    besides: Collection[Any]
    turn: asyncio.Future[bool]  # False: something changed, look again


class Turns:
    """The line of requests that wait for an engine with room."""

    def __init__(
        self,
        most: int,
        share: float,
        room: Callable[[Collection[Any]], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`room` says how many requests can go, besides to some engines."""
        self._quota = Quota(most, share)
        self._room = room
        self._clock = clock
        self._line: dict[str, deque[_Waiting]] = {}  # by client; whose turn is next comes first
        self._ahead = 0  # requests that have their turn, and have not gone yet
        self._ends: deque[float] = deque(maxlen=_ENDS)

    @property
    def waiting(self) -> int:
        return self._quota.taken

    def at_once(self, besides: Collection[Any] = ()) -> bool:
        """Whether a new request may go now."""
        return not self._line and self._room(besides) > self._ahead

    async def wait(self, client: str, besides: Collection[Any], seconds: float) -> bool:
        """Wait for a turn. If there is none within `seconds`, or sooner if engines changed: False.

        The caller uses its turn before it awaits anything. Raises LineFull.
        """
        if lack := self._quota.take(client):
            most = self._quota.most_each if lack == "address" else self._quota.most
            raise LineFull(f"{most} requests {'of this client ' * (lack == 'address')}wait")
        mine = _Waiting(besides, asyncio.get_running_loop().create_future())
        self._line.setdefault(client, deque()).append(mine)
        gone = True  # by cancellation
        try:
            self.give()
            with anyio.move_on_after(seconds):
                await mine.turn
            gone = False
        finally:
            self._quota.take(client, -1)
            granted = mine.turn.done() and not mine.turn.cancelled() and mine.turn.result()
            if granted:
                self._ahead -= 1
            else:
                self._leave(client, mine)
            if granted and gone:
                self.give()  # to another
        return granted

    def give(self) -> None:
        """Give turns to as many as there is room for."""
        gave = True
        while gave and self._line and self._room(()) > self._ahead:
            gave = False
            for client, line in list(self._line.items()):
                found = next((w for w in line if self._room(w.besides) > self._ahead), None)
                if found is None:
                    continue
                self._leave(client, found)
                if line:  # the client is last now
                    self._line[client] = self._line.pop(client)
                self._ahead += 1
                found.turn.set_result(True)
                gave = True

    def stir(self) -> None:
        """Let all look again, in their order."""
        for line in self._line.values():
            for waiting in line:
                if not waiting.turn.done():
                    waiting.turn.set_result(False)
        self._line.clear()

    def ended(self) -> None:
        """A request ended, and left room."""
        self._ends.append(self._clock())
        self.give()

    def expected_seconds(self) -> float:
        """When a request that comes now should have its turn, by how fast requests end."""
        if len(self._ends) < 2:
            return _LATEST_SECONDS / 2
        each = (self._clock() - self._ends[0]) / len(self._ends)
        return min(max((self.waiting + 1) * each, _SOONEST_SECONDS), _LATEST_SECONDS)

    def _leave(self, client: str, waiting: _Waiting) -> None:
        line = self._line.get(client)
        if line is not None and waiting in line:
            line.remove(waiting)
            if not line:
                del self._line[client]


class RetryBudget:
    """How many retries all requests together may cause."""

    def __init__(self, share: float, burst: int) -> None:
        self.left = float(burst)
        self.refused = 0
        self._share = share
        self._burst = burst

    def request(self) -> None:
        """A request came."""
        self.left = min(self._burst, self.left + self._share)

    def take(self) -> bool:
        if self.left < 1:
            return False
        self.left -= 1
        return True
