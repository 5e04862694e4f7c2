# SPDX-License-Identifier: Apache-2.0
"""A thread that serves connections of clients that may be slow, silent, hostile or many.

No client has a thread of its own: each is a `Guest`, which a coroutine serves. A connection ends
when its coroutine does, or when too many guests are pending and it is the oldest of them. A
subclass says how a guest is served, and when it is no longer pending: it has done what the server
asks of a good client. The server reads a new connection before it accepts the next two, and good
clients speak at once. So the oldest pending connections are not theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvferry.net.names import hang_up, ours_alone

log = logging.getLogger("kvferry")

MOST_PENDING = 64  # connections
CLOSE_SECONDS = 5.0
PAUSE_SECONDS = 0.2  # before the next accept, after one that failed


@dataclass(slots=True, eq=False)
class Guest:
    connection: socket.socket
    address: str  # empty for a Unix socket
    pending: bool = True
    received: bytearray = field(default_factory=bytearray)  # of an unfinished message


class GuestServer(ABC):
    """Serves a bound socket. Only its thread uses its guests."""

    def __init__(self, listener: socket.socket, name: str) -> None:
        listener.setblocking(False)
        self._listener = ours_alone(listener)
        self.guests: dict[Guest, asyncio.Task[None]] = {}  # the oldest first
        self._short = False  # whether the last connection could not be accepted
        self._loop = asyncio.SelectorEventLoop()
        self._serving = self._loop.create_task(self._serve_all())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the process has too many threads
            self._serving.cancel()
            self._run()
            raise

    def close(self) -> None:
        """Stop the thread and close all connections. Closing again does nothing."""
        self.soon(self._serving.cancel)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    # For subclasses

    @abstractmethod
    async def serve(self, guest: Guest) -> None:
        """Serve a connection to its end. An `OSError` ends it."""

    def make_way(self, address: str) -> None:
        """Send a guest away if one more, from this address, would be one too many."""
        if sum(guest.pending for guest in self.guests) >= MOST_PENDING:
            self.send_away(self.guests)

    def send_away(self, guests: Iterable[Guest]) -> None:
        """End the oldest of these connections that is pending."""
        oldest = next((guest for guest in guests if guest.pending), None)
        if oldest is not None:
            self.guests.pop(oldest).cancel()

    def stop_listening(self) -> bool:
        """Accept no more connections; whether they were accepted until now."""
        if self._listener.fileno() < 0:
            return False
        self._loop.remove_reader(self._listener)
        hang_up(self._listener)
        return True

    async def receive(self, guest: Guest, most: int) -> bytes:
        await asyncio.sleep(0)  # data may always be there: other connections have their turns
        return await self._loop.sock_recv(guest.connection, most)

    def soon(self, action: Callable[[], object]) -> None:
        """Have the thread do this, unless it has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    # The thread

    def _run(self) -> None:
        _running.add(self)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self.stop_listening()  # in case it was closed before it began
        self._loop.close()
        _running.discard(self)

    async def _serve_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # it ends with all connections
            self._tasks = tasks
            self._listen()
            try:
                await self._loop.create_future()
            finally:
                self.stop_listening()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept one connection; before the next, all connections have their turns."""
        try:
            connection, where = self._listener.accept()
            connection.setblocking(False)
            guest = Guest(ours_alone(connection), str(where[0] if where else ""))
            self.make_way(guest.address)
            task = self.guests[guest] = self._tasks.create_task(self._serve(guest))
            task.add_done_callback(partial(self._leave, guest))
            self._short = False
        except (BlockingIOError, ConnectionError):  # it broke before it was accepted
            pass
        except Exception as error:  # the process may have no descriptors left
            level = logging.DEBUG if self._short else logging.WARNING
            ours = error if not isinstance(error, OSError) else None
            log.log(level, "%s pauses: %s", self._thread.name, error, exc_info=ours)
            self._short = True
            self.send_away(self.guests)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(PAUSE_SECONDS, self._listen)

    async def _serve(self, guest: Guest) -> None:
        try:
            await self.serve(guest)
        except OSError:  # the client is gone, or its time is over
            pass
        except Exception:  # a bug of ours
            log.exception("%s could not answer", self._thread.name)

    def _leave(self, guest: Guest, _: asyncio.Task[None]) -> None:
        self.guests.pop(guest, None)
        hang_up(guest.connection)


# A forked child has no such threads. There, asyncio would complain of tasks that are collected.
_running: set[GuestServer] = set()
