"""Who asks lookup servers: a client that never waits.

It is asked once a step. It passes a question on the first time, answers `None` while the server
works, and a miss when the deadline has passed. A server whose thread died, or that is stuck in the
store past its deadline, is replaced by a new one with a store of its own; the questions that waited
behind it move over. When too many are stuck, there is no point in more: lookups are misses at once
until one of them comes back.

Opening a store may take far longer than a lookup may (Mooncake's set-up: a minute). That is no
question's time: a server that opens its store is left to it, and lookups are misses meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvferry.pool.chain import ContentChain
from kvferry.pool.lookup import CACHE_SECONDS, Answer, Asked, LookupKeyServer
from kvferry.pool.stats import PoolCounters

log = logging.getLogger("kvferry")

OLDEST_ANSWER_SECONDS = 10.0  # of a request that queued; longer than any step
STUCK_SECONDS = 1.0  # after its deadline, a server is given up
OPEN_SECONDS = 180.0  # a server that has not opened its store by then is given up, too
MOST_STUCK = 4


def _stale(asked: Asked, now: float) -> bool:
    """Whether an answer is too old to promise anything.

    One that nobody took in time is asked for once more. That answer is given to the scheduler
    however slow its steps are, or a request could wait for ever for one that is always too old.
    """
    if asked.answer is None or asked.answer.failed:
        return False
    if asked.given_at is None:
        return asked.first and now - asked.answer.at > OLDEST_ANSWER_SECONDS
    return now - asked.given_at > CACHE_SECONDS


class LookupKeyClient:
    """Asks for requests, by id; never waits. Used by the scheduler's thread alone."""

    def __init__(
        self,
        make_server: Callable[[], LookupKeyServer],
        counters: PoolCounters,
        lookup_seconds: float,
    ) -> None:
        self._make, self._counters, self._seconds = make_server, counters, lookup_seconds
        self._server: LookupKeyServer | None = make_server()
        self._stuck: list[LookupKeyServer] = []
        self._asked: dict[str, Asked] = {}

    @property
    def pending(self) -> int:
        return sum(asked.answer is None for asked in self._asked.values())

    def lookup(
        self,
        request_id: str,
        chain: ContentChain,
        tokens: Sequence[int],
        count: int,
        most_tokens: int,
    ) -> Answer | None:
        """What the pool holds; None: ask again."""
        now = time.monotonic()
        asked = self._asked.get(request_id)
        if asked is None or asked.most_tokens != most_tokens or _stale(asked, now):
            deadline = now + self._seconds
            asked = Asked(chain, tokens, count, most_tokens, deadline, first=asked is None)
            self._asked[request_id] = asked
            self._counters.add("lookups")
            server = self._able_server(now)
            if server is None or self._opens_slowly(server, now):
                self._counters.add("lookup_refused")
                asked.answer = Answer(failed=True)
            else:
                server.ask(asked)
        if asked.answer is None and now >= asked.deadline:
            self._counters.add("lookup_timeouts")
            asked.answer = Answer(failed=True)
        if asked.answer is None:
            self._able_server(now)
        elif asked.given_at is None:
            asked.given_at = now
        return asked.answer

    def _opens_slowly(self, server: LookupKeyServer, now: float) -> bool:
        """Whether there is no point in waiting: the store is not there, and may not be for long."""
        opening = server.opening_since
        return opening is not None and now > opening + self._seconds

    def discard(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def _able_server(self, now: float) -> LookupKeyServer | None:
        """The server, or a new one where it is dead or stuck; None: too many are stuck."""
        self._stuck = [s for s in self._stuck if s.alive]
        server = self._server
        if server is None:
            if len(self._stuck) >= MOST_STUCK:
                return None
            self._server = self._make()
            return self._server
        busy_until, opening = server.busy_until, server.opening_since
        stuck = busy_until is not None and now > busy_until + STUCK_SECONDS
        stuck |= opening is not None and now > opening + OPEN_SECONDS
        if server.alive and not stuck:
            return server
        self._counters.add("lookup_servers_replaced")
        log.warning("a lookup server %s, and is replaced", "is stuck" if stuck else "died")
        waiting = server.drain()
        if server.alive:
            server.close()
            self._stuck.append(server)
        self._server = None
        if len(self._stuck) < MOST_STUCK:
            self._server = self._make()
            for asked in waiting:
                self._server.ask(asked)
        else:
            for asked in waiting:
                asked.answer = Answer(failed=True)
        return self._server

    def replace(self, make_server: Callable[[], LookupKeyServer]) -> None:
        """Forget all answers: the namespace has changed."""
        if self._server is not None:
            self._server.close()
        self._make = make_server
        self._server = make_server()
        self._asked.clear()

    def close(self) -> None:
        if self._server is not None:
            self._server.close(seconds=1.0)
            self._server = None
        self._asked.clear()
