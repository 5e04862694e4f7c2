"""Grants: ranges of own memory that whoever knows an unguessable id may write, until they close.

The owner opens a grant for what one transfer may write and closes it when it wants the memory back.
Every granted write names its grant, and all its ranges are checked against it before the first byte
is taken. Closing ends the connections that write under the grant at that moment, waits until their
threads have left the memory, and takes nothing more: a peer that stalled, was stopped or lies can
then send what it likes. It also says how many bytes were written, as counted on this side.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.errors import DeadlineExceeded
from kvferry.transport.base import GRANT_BYTES, Ints
from kvferry.transport.regions import RegionTable
from kvferry.transport.tcp_frames import Code
from kvferry.transport.tcp_stream import Stream


class Refused(Exception):
    """A frame that is answered with an error."""

    def __init__(self, code: Code, text: str, *, fatal: bool = False) -> None:
        super().__init__(text)
        self.code, self.text = code, text
        self.fatal = fatal  # the connection ends: what follows cannot be told apart any more


@dataclass(slots=True)
class _Grant:
    ranges: RegionTable
    writing: set[Stream] = field(default_factory=set)
    applied_bytes: int = 0


class Grants:
    """All open grants of one server. Any method, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)  # a stream is through with a grant
        self._open: dict[bytes, _Grant] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, ranges: RegionTable) -> bytes:
        grant = secrets.token_bytes(GRANT_BYTES)
        with self._lock:
            self._open[grant] = _Grant(ranges)
        return grant

    def close(self, grant: bytes, seconds: float) -> int:
        """Bytes written under it; none arrives after this returns. 0 where it is closed already."""
        with self._left:
            entry = self._open.get(grant)
            if entry is None:
                return 0
            del self._open[grant]
            for stream in entry.writing:
                stream.abort()
            if not self._left.wait_for(lambda: not entry.writing, seconds):
                self._open[grant] = _Grant(RegionTable.of([]), entry.writing, entry.applied_bytes)
                raise DeadlineExceeded(
                    f"{len(entry.writing)} writers did not leave a grant within {seconds:g} s; "
                    "close it again"
                )
            return entry.applied_bytes

    @contextlib.contextmanager
    def writing(self, grant: bytes, stream: Stream, address: Ints, length: Ints) -> Iterator[None]:
        """While a stream's payload is taken into these ranges; refuses what is not granted."""
        with self._lock:
            entry = self._open.get(grant)
            if entry is None:
                raise Refused(Code.REVOKED, "there is no such grant, or it was taken back")
            bad = entry.ranges.first_outside(address, length)
            if bad >= 0:
                text = (
                    f"{int(length[bad])} bytes at {int(address[bad]):#x} are not inside what was "
                    "granted; nothing was copied"
                )
                raise Refused(Code.OUT_OF_BOUNDS, text)
            entry.writing.add(stream)
        total = 0
        try:
            yield
            total = int(length.sum())
        finally:
            with self._left:
                entry.applied_bytes += total
                entry.writing.discard(stream)
                self._left.notify_all()
