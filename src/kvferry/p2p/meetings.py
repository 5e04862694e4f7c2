"""Asking servers that clients of the API name, and that this process may never have heard of.

Whoever names a server may lie: it may take a connection and say nothing. So questions have threads
of their own, which nobody who was met before needs, and

- each address is asked one question at a time; questions behind it wait without a thread;
- the fuller the threads are, the shorter is a question's patience;
- an address that was silent for a whole question is not asked again for a few seconds: what comes
  for it meanwhile, and what waited, fails at once;
- an address, or a host, gets another place to wait while it has fewer than are free, so that one
  has half of them at most; what comes beyond that is refused at once. Loopback is one host.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from kvferry.errors import Cancelled, HandoverError, KvferryError
from kvferry.p2p.threads import Threads
from kvferry.wire.names import is_loopback

log = logging.getLogger("kvferry")

MEET_SECONDS = 8.0  # for a question, where few are asked; a busy host was seen to take over five
LEAST_SECONDS = 1.0  # where all threads ask
SILENT_SECONDS = 5.0  # for these, whoever was silent is not asked again
THREADS = 64
MOST_WAITING = 1024  # one host may have half: a burst of requests right after its engine's start
MOST_SILENT = 4096  # addresses remembered
ASKED_AT_ONCE = 128  # addresses of one host, whatever else waits there


class Meetings:
    """Any method, from any thread; none waits."""

    def __init__(self, name: str, most_seconds: float | None = None) -> None:
        """`most_seconds` is for one question, `MEET_SECONDS` where it is None."""
        self._threads = Threads(name, THREADS, per_lane=1)
        self._most_seconds = MEET_SECONDS if most_seconds is None else most_seconds
        self._lock = threading.Lock()
        self._waiting: Counter[str] = Counter()  # by address, by host, and all
        self._addresses: Counter[str] = Counter()  # that somebody waits for, by host
        self._silent: dict[str, tuple[float, str]] = {}  # until when, and why; by address

    def submit(
        self, address: str, ask: Callable[[float], None], fail: Callable[[KvferryError], None]
    ) -> None:
        """Call `ask` with the seconds that it has, or `fail` with why it was not called or failed.

        Raises what `fail` would get, and calls neither, where that is known at once.
        """
        self._require_answering(address)
        host = address.rpartition(":")[0]
        keys = (address, "this host" if is_loopback(host) else f"host {host}", "")
        with self._lock:
            free = MOST_WAITING - self._waiting[""]
            # a few silent ones at its host do not keep an address from being asked
            first = not self._waiting[address] and self._addresses[keys[1]] < ASKED_AT_ONCE
            if not free or (not first and max(map(self._waiting.__getitem__, keys[:2])) >= free):
                raise HandoverError(
                    f"{self._waiting['']} requests wait already to meet somebody, "
                    f"{self._waiting[keys[1]]} of them at the host of {address}, which may be "
                    "silent; no more are taken now"
                )
            self._addresses[keys[1]] += not self._waiting[address]
            self._waiting.update(keys)
        try:
            self._threads.submit(partial(self._run, keys, ask, fail), address)
        except BaseException:
            self._leave(keys)
            raise

    def close(self) -> None:
        self._threads.close()

    def _run(
        self,
        keys: tuple[str, ...],
        ask: Callable[[float], None],
        fail: Callable[[KvferryError], None],
    ) -> None:
        address, begun, most = keys[0], time.monotonic(), self._most_seconds
        seconds = max(min(LEAST_SECONDS, most), most * self._threads.free / THREADS)
        try:
            self._require_answering(address)
            ask(seconds)
        except KvferryError as error:
            if time.monotonic() - begun >= seconds and not isinstance(error, Cancelled):
                with self._lock:
                    while len(self._silent) >= MOST_SILENT:
                        self._silent.pop(next(iter(self._silent)))
                    self._silent[address] = (time.monotonic() + SILENT_SECONDS, str(error))
            fail(error)
        except Exception as error:  # ours: whoever waits is told
            log.exception("%s could not be asked", address)
            fail(HandoverError(f"internal error: {error!r}"))
        finally:
            self._leave(keys)

    def _require_answering(self, address: str) -> None:
        with self._lock:
            until, why = self._silent.get(address, (0.0, ""))
            if until and until <= time.monotonic():
                del self._silent[address]
                return
        if why:
            raise HandoverError(f"{address} is not asked again for some seconds: {why}")

    def _leave(self, keys: tuple[str, ...]) -> None:
        with self._lock:
            for key in keys:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key]
            self._addresses[keys[1]] -= keys[0] not in self._waiting
            if not self._addresses[keys[1]]:
                del self._addresses[keys[1]]
