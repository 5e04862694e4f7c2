"""Sockets that no forked child keeps.

A connection ends, and a port is free, once the last process that has it lets go. A forked child has
copies that it knows nothing of: as long as it lived, peers would take its dead parent for alive.
So a child closes its copies before it does anything else. It only closes them, which its parent
does not notice; to shut them down would end them for both. (Programs that are started by `exec` get
none of these descriptors anyway.)

Who ends a connection for good shuts it down first: that holds for all copies, also for one that a
child got in the microseconds before it was named here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def ours_alone(sock: socket.socket) -> socket.socket:
    """The same, which children of this process close."""
    _ours.add(sock)
    return sock


def hang_up(sock: socket.socket) -> None:
    """Close it, whoever else has a copy. Idempotent."""
    with contextlib.suppress(OSError):  # nobody is connected any more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _let_go_in_child() -> None:
    for sock in list(_ours):  # no other thread is here, and nothing is waited for
        with contextlib.suppress(Exception):
            sock.close()


os.register_at_fork(after_in_child=_let_go_in_child)
