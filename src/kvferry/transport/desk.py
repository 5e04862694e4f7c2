"""Packed mode over one-sided libraries: the owner's desk, which gathers and scatters on request.

A library that moves a run of 256 bytes in 25 microseconds moves two megabytes in two milliseconds.
So the owner of memory keeps a *desk* beside its data plane: a visitor names ranges of registered
memory, the desk gathers them into a slot of registered staging memory (slots.py), the library
moves the slot in one piece, and the visitor scatters it. Writes go the other way.

    visitor                     owner
    MAGIC, token          ---->          both are in the endpoint, as those of the pulse
                          <----          incarnation, or FULL where too many visit already
    GATHER table          ---->          checks every range, then gathers
                          <----  READY   payload_bytes = where the slot begins in the staging memory
    (the library reads the slot)
    RETURN                ---->          the slot may be lent again
                          <----  DONE    it was this visitor's all along
    LEND table            ---->          checks every range
                          <----  READY   as above
    (the library writes the slot)
    APPLY                 ---->          scatters
                          <----  DONE    every byte is in place
    RETURN                ---->          instead of APPLY: nothing was written, or it has ended
                          <----  ERROR   code, text: in place of any answer

Frames are those of the tcp carrier (tcp_frames.py). What may go wrong in between:

    the owner dies      the connection ends: `PeerLost`, as its pulse says
    the owner stalls    no whole answer within `STALL_SECONDS`: `DeadlineExceeded`; who cancels
                        before is heard at once
    the owner lies      it can spoil what is read from it, as it can by writing to its own memory.
                        A slot outside of the staging memory is refused; bytes only go where the
                        visitor's own copies say
    the visitor dies    a slot that was lent for reading is lent again; one that was lent for
                        writing is retired, because bytes may still be on their way into it
    the visitor stalls  after `LEND_SECONDS` the same. If it reads on, its RETURN is not answered
                        with DONE, and its transfer fails. A request that is not whole within
                        `FRAME_SECONDS` ends its connection
    the visitor lies    ranges outside of registered memory are refused before a byte moves
    no slot is free     BUSY, or FULL: the visitor moves these runs directly
    no way to the desk  found when a peer is connected: all runs are moved directly, and it is said
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections import Counter
from enum import IntEnum

from kvferry.errors import DeadlineExceeded, PeerLost, ProtocolError, TransferError
from kvferry.transport.base import Ints
from kvferry.transport.forks import hang_up, ours_alone
from kvferry.transport.memory import Memory
from kvferry.transport.pulse import TOKEN_BYTES
from kvferry.transport.regions import RegionTable
from kvferry.transport.slots import Slot, Slots
from kvferry.transport.tcp_frames import HEADER, ROW_BYTES, Code, Header, error_frame, table_of
from kvferry.transport.tcp_frames import Kind as Frame
from kvferry.transport.tcp_stream import Stream

log = logging.getLogger(__name__)

MAGIC = b"kvferry-desk-01\n"
GREETING_SECONDS = 5.0
FRAME_SECONDS = 10.0  # from a request's first byte to the end of its table
STALL_SECONDS = 30.0
LEND_SECONDS = 120.0  # for the library to move one slot: behind others, over a slow network
IDLE_SECONDS = 900.0
MOST_VISITORS = 256
MOST_UNGREETED = 64  # a new visitor takes the place of the oldest of these
FULL = b"\0" * TOKEN_BYTES


class Say(IntEnum):
    """Kinds of frames between a visitor and a desk."""

    GATHER = 32
    LEND = 33
    READY = 34
    RETURN = 35
    APPLY = 36
    DONE = 37
    ERROR = Frame.ERROR


class _Refused(Exception):
    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Desk:
    """One thread accepts, one serves each visitor."""

    def __init__(self, host: str, token: bytes, incarnation: bytes, slots: Slots) -> None:
        self._token, self._incarnation, self._slots = token, incarnation, slots
        self.memory: Memory | None = None  # set with the regions, by who owns them
        self.regions = RegionTable.of([])
        self.counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._ungreeted: dict[Stream, None] = {}  # of them, the oldest first
        self._threads: set[threading.Thread] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise TransferError(
                f"cannot listen on {host}: {error}; `host` must be an address of this machine"
            ) from None
        self._listener = ours_alone(listener)
        self.port = int(self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="kvferry-desk", daemon=True)
        self._acceptor.start()

    def close(self, seconds: float) -> None:
        """Idempotent. When it returns in time, nothing of this touches memory any more."""
        with self._lock:
            self._closed = True
            streams, threads = list(self._streams), list(self._threads)
        hang_up(self._listener)  # wakes the thread that accepts
        for stream in streams:
            stream.abort()
        until = time.monotonic() + seconds
        for thread in (self._acceptor, *threads):
            thread.join(max(0.0, until - time.monotonic()))

    def _accept(self) -> None:
        while not self._closed:
            try:
                visitor, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.debug("accept failed: %s", error)
                    time.sleep(0.05)
                continue
            try:
                self._attach(visitor)
            except Exception as error:  # the system has no thread, or the visitor is gone
                log.debug("a visitor could not be served: %s", error)
                visitor.close()

    def _attach(self, visitor: socket.socket) -> None:
        stream = Stream(visitor, STALL_SECONDS)
        thread = threading.Thread(
            target=self._serve, args=(stream,), name="kvferry-desk-serve", daemon=True
        )
        with self._lock:  # `close` comes before all of it, or after
            full = self._closed or len(self._streams) >= MOST_VISITORS
            if not full:
                if len(self._ungreeted) >= MOST_UNGREETED:
                    oldest = next(iter(self._ungreeted))
                    del self._ungreeted[oldest]
                    oldest.abort()
                thread.start()
                self._streams.add(stream)
                self._ungreeted[stream] = None
                self._threads.add(thread)
        if full:
            with contextlib.suppress(TransferError):
                stream.send(FULL, time.monotonic() + 0.1)
            stream.close()

    def _serve(self, stream: Stream) -> None:
        try:
            self._greet(stream)
            while stream.wait_readable(IDLE_SECONDS) and self._request(stream):
                pass
        except (PeerLost, DeadlineExceeded, ProtocolError) as error:
            log.debug("a visitor left: %s", error)
        except Exception:
            log.exception("a visitor's connection ended by an error of ours")
        finally:
            self._leave(stream, threading.current_thread())

    def _leave(self, stream: Stream, thread: threading.Thread) -> None:
        with self._lock:
            self._streams.discard(stream)
            self._ungreeted.pop(stream, None)
            self._threads.discard(thread)
        stream.close()

    def _greet(self, stream: Stream) -> None:
        expected = MAGIC + self._token
        said = stream.recv(len(expected), time.monotonic() + GREETING_SECONDS)
        if not hmac.compare_digest(said, expected):
            raise ProtocolError("a visitor does not know the token")
        with self._lock:
            self._ungreeted.pop(stream, None)
        stream.send(self._incarnation)

    def _request(self, stream: Stream) -> bool:
        """Serve one; false when the visitor has left."""
        deadline = time.monotonic() + FRAME_SECONDS
        raw = stream.recv(HEADER.size, deadline, end_ok=True)
        if not raw:
            return False
        header = Header.unpack(raw)
        body = stream.recv(header.body_bytes, deadline)
        try:
            address, length = self._checked(header, body)
            slot = self._slots.take()
            if slot is None:
                raise _Refused(Code.BUSY, "no staging memory is free")
        except _Refused as refused:
            self._count(f"refused_{refused.code.name.lower()}")
            stream.send(error_frame(header.request, refused.code, refused.text))
            return True
        if header.kind == Say.GATHER:
            self._lend_read(stream, header, slot, address, length)
        else:
            self._lend_write(stream, header, slot, address, length)
        return True

    def _lend_read(
        self, stream: Stream, header: Header, slot: Slot, address: Ints, length: Ints
    ) -> None:
        try:
            assert self.memory is not None
            self.memory.gather(address, length, slot.bytes)
            stream.send(Header(Say.READY, header.request, 0, slot.offset).pack())
            self._answer(stream, header, (Say.RETURN,))
        finally:
            self._slots.give_back(slot)  # whoever reads it too late is not told that it was right
        self._count("gathered")
        stream.send(Header(Say.DONE, header.request).pack())

    def _lend_write(
        self, stream: Stream, header: Header, slot: Slot, address: Ints, length: Ints
    ) -> None:
        ended = False  # whether the visitor said that it writes no more
        try:
            stream.send(Header(Say.READY, header.request, 0, slot.offset).pack())
            said = self._answer(stream, header, (Say.RETURN, Say.APPLY))
            ended = True
            if said == Say.APPLY:
                assert self.memory is not None
                self.memory.scatter(slot.bytes, address, length)
                self._count("scattered")
        finally:
            if ended:
                self._slots.give_back(slot)
            else:
                self._slots.retire(slot)
                self._count("retired")
        stream.send(Header(Say.DONE, header.request).pack())

    def _answer(self, stream: Stream, asked: Header, kinds: tuple[Say, ...]) -> int:
        """What the visitor says about the slot that it has."""
        deadline = time.monotonic() + LEND_SECONDS
        if not stream.wait_readable(LEND_SECONDS):
            raise DeadlineExceeded("a visitor keeps a slot for too long")
        header = Header.unpack(stream.recv(HEADER.size, deadline))
        if header.kind not in kinds or header.request != asked.request or header.body_bytes:
            raise ProtocolError(f"a visitor says {header.kind} while it has a slot")
        return header.kind

    def _checked(self, header: Header, body: bytes) -> tuple[Ints, Ints]:
        """The ranges, all of them inside registered memory, and no more than a slot holds."""
        if header.kind not in (Say.GATHER, Say.LEND) or not body or len(body) % ROW_BYTES:
            raise _Refused(Code.MALFORMED, f"a frame of kind {header.kind} with {len(body)} bytes")
        address, length = table_of(body)
        if int(length.min()) <= 0 or int(length.max()) > self._slots.slot_bytes:
            raise _Refused(Code.OUT_OF_BOUNDS, "a range is empty, negative or too long")
        if int(length.sum()) > self._slots.slot_bytes:
            raise _Refused(Code.TOO_LARGE, f"a slot has {self._slots.slot_bytes} bytes")
        bad = self.regions.first_outside(address, length)
        if bad >= 0:
            raise _Refused(
                Code.OUT_OF_BOUNDS,
                f"{int(length[bad])} bytes at {int(address[bad]):#x} are not inside the memory "
                "that is registered here; nothing was copied",
            )
        return address, length

    def _count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1
