# SPDX-License-Identifier: Apache-2.0
"""Vouching: the kernel and the owner confirm whose memory an endpoint names.

An endpoint of `local` or `cuda` names memory. It comes from a peer, and a peer may lie: it may name
this very process, or regions that were never registered. So a process that is about to reach that
memory asks the owner first, on a socket that only processes of this user can open:

    reader  -> owner   SHA-256 of the endpoint, as it was received
    owner   -> reader  YES if one of its open carriers made exactly that endpoint, else NO

The kernel says which process answered, and which user runs it (`SO_PEERCRED`). So the content of
the endpoint comes from that process itself.

Each process has one such socket while it has such carriers, and one thread that answers. Sockets
lie in the runtime directory of the user (`keys.py`); an endpoint names the file, never a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

from kvferry.errors import DeadlineExceeded, KvferryError, PeerLost, PermissionDenied, ProtocolError
from kvferry.net.guests import Guest, GuestServer
from kvferry.net.keys import runtime_directory
from kvferry.net.names import hang_up

log = logging.getLogger(__name__)

YES, NO = b"\1", b"\0"
DIGEST_BYTES = 32
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
ASK_SECONDS = 5.0  # the owner only compares digests; if it takes longer, it is suspended
CONNECT_AGAIN_SECONDS = 0.01
ANSWER_SECONDS = 1.0  # for a process of this user to send its question
UNHEARD_SECONDS = 60.0  # for a new process to listen on its socket; it takes microseconds
PREFIX = "vouch-"
_NAME = re.compile(PREFIX + r"[0-9a-f]{32}")


def ask(name: str, endpoint: bytes, deadline: float) -> int:
    """The pid of the process that made this endpoint, as the kernel knows it.

    `PermissionDenied` if no process of this user answers: another carrier may reach the peer.
    `PeerLost` if the process does not know the endpoint.
    """
    if not name:
        raise PermissionDenied(
            "the peer has no socket to vouch for its memory at; its log says why"
        )
    if not _NAME.fullmatch(name):
        raise ProtocolError(f"an endpoint names {name!r:.80} as the file of its owner's socket")
    deadline = min(deadline, time.monotonic() + ASK_SECONDS)
    if deadline <= time.monotonic():
        raise DeadlineExceeded("no time left to ask which process owns the peer's memory")
    try:
        path = runtime_directory() / name
    except KvferryError as error:
        raise PermissionDenied(f"no owner can be asked: {error}") from None
    with socket.socket(socket.AF_UNIX) as question:
        try:
            _connect(question, str(path), deadline)
            owner, uid = _other_end(question)
            if uid != os.geteuid():
                raise PermissionDenied(f"the peer's memory belongs to user {uid}, not to this one")
            question.sendall(hashlib.sha256(endpoint).digest())
            answer = question.recv(1)
        except TimeoutError:
            raise DeadlineExceeded("the owner of the peer's memory does not answer") from None
        except ConnectionError:
            raise PeerLost("the process that owns the peer's memory is gone") from None
        except OSError as error:
            raise PermissionDenied(
                f"no process of this user answers for the peer's memory ({error.strerror}): it "
                "runs as another user, or in a container with a /dev/shm of its own (--ipc=host)"
            ) from None
    if answer != YES:
        raise PeerLost(
            f"process {owner} is not the peer any more: it has no open carrier with this "
            "endpoint. Ask for its new endpoint"
        )
    return owner


def _connect(question: socket.socket, path: str, deadline: float) -> None:
    """Connect, or raise TimeoutError; later calls have the time that is left. While too many others
    wait to be accepted, Linux refuses at once, whatever the time limit of the socket."""
    while (left := deadline - time.monotonic()) > 0:
        question.settimeout(left)
        with contextlib.suppress(BlockingIOError):
            return question.connect(path)
        time.sleep(CONNECT_AGAIN_SECONDS)
    raise TimeoutError


def vouch_for(make: Callable[[str], bytes]) -> bytes:
    """Make an endpoint that this process vouches for from now on.

    `make` gets the name of the socket's file. The name is empty if there can be no socket; only
    another carrier reaches this process then.
    """
    global _voucher
    with _lock:
        if _voucher is None:
            try:
                _sweep()
                _voucher = _Voucher()
            except (KvferryError, OSError, RuntimeError) as error:
                log.warning("no peer reaches this process by `local` or `cuda`: %s", error)
                return make("")
        endpoint = make(_voucher.name)
        _voucher.digests.add(hashlib.sha256(endpoint).digest())
        return endpoint


def forget(endpoints: Iterable[bytes]) -> None:
    """Stop vouching for these. The socket and its thread end with the last endpoint."""
    global _voucher
    with _lock:
        if _voucher is None:
            return
        _voucher.digests.difference_update(hashlib.sha256(one).digest() for one in endpoints)
        if not _voucher.digests:
            _voucher.close()
            _voucher = None


class _Voucher(GuestServer):
    """The socket of this process, and the endpoints that it vouches for."""

    def __init__(self) -> None:
        self.name = PREFIX + secrets.token_hex(16)
        self.digests: set[bytes] = set()
        self._path = runtime_directory() / self.name
        listener = socket.socket(socket.AF_UNIX)
        unheard = self._path.with_name(f".{self.name}")
        try:
            listener.bind(str(unheard))
            listener.listen(128)
            unheard.rename(self._path)  # other processes see it only once it listens
            super().__init__(listener, "kvferry-vouch")
        except BaseException:
            hang_up(listener)
            for path in (unheard, self._path):
                path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        super().close()

    async def serve(self, guest: Guest) -> None:
        async with asyncio.timeout(ANSWER_SECONDS):
            if _other_end(guest.connection)[1] == os.geteuid():
                asked = await self.receive(guest, DIGEST_BYTES)
                answer = YES if asked in self.digests else NO
                await self._loop.sock_sendall(guest.connection, answer)


_voucher: _Voucher | None = None
_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked child: the parent vouches for its own endpoints."""
    global _voucher, _lock
    _voucher, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def _sweep() -> None:
    """Remove the sockets of processes that are gone."""
    for path in runtime_directory().glob(f"*{PREFIX}*"):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            if path.name.startswith(".") and time.time() - path.stat().st_mtime < UNHEARD_SECONDS:
                continue
            probe.settimeout(ANSWER_SECONDS)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:  # its process is gone
                path.unlink(missing_ok=True)


def _other_end(sock: socket.socket) -> tuple[int, int]:
    """The pid at the other end and its user, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(raw)
    return pid, uid
