"""A visitor's connection to a peer's desk (desk.py): asks for one slot at a time."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Callable

from kvferry.errors import DeadlineExceeded, KvferryError, PeerLost, ProtocolError, TransferError
from kvferry.transport.base import Ints
from kvferry.transport.desk import FULL, MAGIC, STALL_SECONDS, Say
from kvferry.transport.tcp_frames import (
    ERROR_CODE,
    HEADER,
    Code,
    Header,
    error_of,
    table_bytes,
)
from kvferry.transport.tcp_stream import Stream
from kvferry.wire.names import dial

CONNECT_SECONDS = 10.0
LOOK_SECONDS = 0.02  # between two looks at cancel
GOODBYE_SECONDS = 0.5  # for a desk to take back a slot
SAY_SECONDS = 2.0  # for the 32 bytes of RETURN or APPLY: an honest desk has read all before them
APPLIED_SECONDS = 8.0  # for a desk to end what it was told to apply: less than `cancel` waits
USED_SECONDS = 300.0  # one that was not used for longer is made anew: the desk closes its own later

Check = Callable[[], None]


class Busy(TransferError):
    """The desk has no slot to lend now."""


class Visit:
    """Used by one thread at a time; `abort` from any. After an error it is of no more use."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._request = 0
        self._asked = self._sending = self._applying = self._aborted = False
        self._used = time.monotonic()

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        token: bytes,
        incarnation: bytes,
        seconds: float = CONNECT_SECONDS,
    ) -> Visit:
        deadline = time.monotonic() + seconds
        try:
            connected = dial(host, port, deadline)
        except TimeoutError:
            raise DeadlineExceeded(f"{host}:{port} does not answer in time") from None
        except OSError as error:
            raise PeerLost(f"nobody listens at {host}:{port} ({error}): the peer is gone") from None
        except (ValueError, OverflowError) as error:
            raise TransferError(f"the peer's desk is at no address: {host!r} ({error})") from None
        stream = Stream(connected, STALL_SECONDS)
        try:
            stream.send(MAGIC + token, deadline)
            said = stream.recv(len(incarnation), deadline)
            if said == FULL:
                raise Busy("the peer has as many visitors as it takes")
            if not hmac.compare_digest(said, incarnation):
                raise PeerLost(f"{host}:{port} is not the peer any more: it restarted")
        except TransferError:
            stream.close()
            raise
        return cls(stream)

    def usable(self) -> bool:
        fresh = time.monotonic() - self._used < USED_SECONDS
        return fresh and not self._stream.wait_readable(0)

    def ask(self, what: Say, address: Ints, length: Ints, check: Check) -> int:
        """GATHER these runs, or LEND room for them: where in the peer's staging memory.

        `check` is called now and then, and raises to give up.
        """
        body = table_bytes(address, length)
        self._request += 1
        self._sending = True
        self._stream.send(Header(what, self._request, len(body)).pack() + body)
        self._sending, self._asked = False, True
        try:
            return self._expect(Say.READY, check).payload_bytes
        except Busy:
            self._asked = False
            raise

    def say(self, what: Say) -> None:
        """RETURN or APPLY the slot; `done` waits for the answer."""
        self._applying = what == Say.APPLY
        frame = Header(what, self._request).pack()
        self._stream.send(frame, time.monotonic() + SAY_SECONDS)
        self._asked = False

    def done(self, check: Check) -> None:
        self._expect(Say.DONE, check)
        self._applying = False
        self._used = time.monotonic()

    def abort(self) -> None:
        """End what is being sent to a desk that does not take it; nothing else: who waits for an
        answer looks at `check` by itself, and may have to see the end of what the desk applies."""
        if self._sending:
            self._aborted = True
            self._stream.abort()

    def close(self, *, writing: bool = False) -> bool:
        """Whether the desk does nothing more for it; waits for what it was told to apply.

        `writing`: the library may still write to the slot, so it is not given back.
        """
        ended = True
        if self._applying:  # nobody can take that back: see the end of it
            ended = self._stream.drain(APPLIED_SECONDS) and not self._aborted
        elif self._asked and not self._sending and not writing:
            with contextlib.suppress(TransferError):
                self.say(Say.RETURN)
                self._stream.drain(GOODBYE_SECONDS)
        self._stream.close()
        return ended

    def _expect(self, kind: Say, check: Check) -> Header:
        deadline = time.monotonic() + STALL_SECONDS
        header = Header.unpack(self._receive(HEADER.size, deadline, check))
        body = self._receive(header.body_bytes, deadline, check)
        if header.kind == Say.ERROR and header.request == self._request:
            raise _refusal(body)
        if header.kind != kind or header.request != self._request or body:
            raise ProtocolError(
                f"expected {kind.name} of request {self._request} from the peer's desk, found kind "
                f"{header.kind} of {header.request}"
            )
        return header

    def _receive(self, count: int, deadline: float, check: Check) -> bytes:
        """However slowly it comes: `check` and the deadline are looked at all along."""
        got = b""
        while len(got) < count:
            if self._stream.wait_readable(LOOK_SECONDS):
                got += self._stream.recv_some(count - len(got))
                if len(got) == count:
                    break
            check()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the peer lives, and its desk has not answered for {STALL_SECONDS:g} s"
                )
        return got


def _refusal(body: bytes) -> KvferryError:
    if len(body) >= ERROR_CODE.size and ERROR_CODE.unpack_from(body)[0] == Code.BUSY:
        return Busy("the peer has no staging memory free")
    return error_of(body)
