"""Same-host memory copies by `process_vm_readv` and `process_vm_writev`.

One-sided: the other process takes no part, and only needs to stay alive. Copies come as three
integer arrays and leave as iovec tables, at most 1,024 a system call, so that Python
runs once per call and never per descriptor.

Each side's neighbours are joined before anything is issued: the kernel pins pages once per remote
vector, so heads that lie together at the source and apart at the destination cost one pin, not
one each (twice the rate at 256 bytes a descriptor). Both tables always describe the same stream of
bytes; a call moves as much of it as both of its lists cover, and the next one resumes there, in
the middle of a vector where need be. A short transfer is therefore nothing special.

The kernel checks every address on both sides: a wrong one is an error here, never a crash.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from kvferry.errors import PeerLost, PermissionDenied, TransferError
from kvferry.transport.iovec import Vectors, libc

PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

# pid, local table, local count, remote table, remote count -> bytes moved, or -1 with errno set
Call = Callable[[int, int, int, int, int], int]


def read(pid: int, src: ArrayLike, dst: ArrayLike, length: ArrayLike) -> int:
    """Copy `length[i]` bytes from `src[i]` in process `pid` to `dst[i]` here; say how many."""
    return move(system_call("process_vm_readv"), pid, local=dst, remote=src, length=length)


def write(pid: int, src: ArrayLike, dst: ArrayLike, length: ArrayLike) -> int:
    """Copy `length[i]` bytes from `src[i]` here to `dst[i]` in process `pid`; say how many."""
    return move(system_call("process_vm_writev"), pid, local=src, remote=dst, length=length)


def allow_any_reader() -> bool:
    """Let any process of the same user reach this one's memory, where Yama would forbid it.

    False where the kernel has no such restriction to lift. Lasts as long as the process.
    """
    prctl = libc().prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    prctl.restype = ctypes.c_int
    return bool(prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) == 0)


def move(call: Call, pid: int, *, local: ArrayLike, remote: ArrayLike, length: ArrayLike) -> int:
    """Move all copies through `call`, however little it moves at a time."""
    ours, theirs, lengths = (np.asarray(a, dtype=np.int64) for a in (local, remote, length))
    if not ours.shape == theirs.shape == lengths.shape or lengths.ndim != 1:
        raise TransferError(
            "copies are three arrays of one length, found "
            f"local {ours.shape}, remote {theirs.shape}, length {lengths.shape}"
        )
    if not lengths.all():
        some = lengths != 0
        ours, theirs, lengths = ours[some], theirs[some], lengths[some]
    if len(lengths) == 0:
        return 0
    if int(lengths.min()) < 0:
        raise TransferError(f"a copy has a length of {int(lengths.min())} bytes")
    here, there = Vectors.join(ours, lengths), Vectors.join(theirs, lengths)
    total, done = int(lengths.sum()), 0
    while done < total:
        moved = call(pid, *here.head(), *there.head())
        if moved <= 0:
            raise _error(ctypes.get_errno() if moved < 0 else 0, pid, done, total)
        done += moved
        here.advance(done)
        there.advance(done)
    return total


@cache
def system_call(name: str) -> Call:
    """`process_vm_readv` or `process_vm_writev` of this system's C library, typed."""
    try:
        function = getattr(libc(), name)
    except AttributeError:
        raise TransferError(
            f"this system's C library has no {name}; it exists on Linux only. Use another carrier"
        ) from None
    table = (ctypes.c_void_p, ctypes.c_ulong)
    function.argtypes = (ctypes.c_int, *table, *table, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t

    def call(pid: int, local: int, local_count: int, remote: int, remote_count: int) -> int:
        moved: int = function(pid, local, local_count, remote, remote_count, 0)
        return moved

    return call


def _error(code: int, pid: int, done: int, total: int) -> TransferError:
    after = f"after {done} of {total} bytes"
    match code:
        case errno.EPERM | errno.EACCES:
            return PermissionDenied(
                f"the system does not let process {os.getpid()} reach the memory of process {pid} "
                f"({after}). Run both as the same user; with Yama, set kernel.yama.ptrace_scope=0 "
                "or let the other process call prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); in a "
                "container, allow process_vm_readv (--cap-add SYS_PTRACE). Or use another carrier"
            )
        case errno.ENOSYS:
            return PermissionDenied(
                f"this kernel or sandbox has no process_vm_readv and process_vm_writev ({after}); "
                "use another carrier"
            )
        case errno.ESRCH:
            return PeerLost(f"the peer is gone: there is no process {pid} ({after})")
        case errno.EFAULT:
            return TransferError(
                f"an address is not mapped, here or in process {pid} ({after}): the peer freed the "
                "memory, or the layouts that were exchanged are not those of this memory"
            )
        case 0:
            return TransferError(
                f"process {pid}: the system moved nothing, without error ({after})"
            )
    return TransferError(f"process {pid}: {os.strerror(code)} ({after})")
