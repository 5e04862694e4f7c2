# SPDX-License-Identifier: Apache-2.0
"""Host memory: this process's own, by address, and that of other processes of this host.

`HostMemory` checks ranges against its regions, and then gathers, scatters and zeroes them.

`copy_runs` and `spread` copy inside one process, without a Python loop. Copies of one length go
together: seen through a dtype of that many bytes and a stride of one byte, memory is an array in
which every byte begins an element, and NumPy's indexing moves whole elements from anywhere to
anywhere, without the interpreter's lock. Where many lengths are mixed, each run is cut into powers
of two, so that there are never more than a few groups. Long runs move by one call each, which is
faster, because NumPy's own copy of a long element is not memcpy.

`Vectors` is a table of (address, length) as the kernel takes it: a stream of bytes, the ranges one
after another. A system call takes at most `VECTORS_PER_CALL` of them and moves as much as it likes.
`Vectors` remembers how far the stream has come, and cuts the range in which it stopped.

`read` and `write` copy between processes by `process_vm_readv` and `process_vm_writev`. They are
one-sided: the other process only needs to stay alive. Each side's neighbours are joined first: the
kernel pins pages once per remote vector, so heads that lie together at the source and apart at the
destination cost one pin, not one each (twice the rate at 256 bytes a descriptor). The kernel checks
every address on both sides: a wrong one is an error, never a crash.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.carriers.base import Bytes, Memory, MemoryRegion, RegionTable
from kvferry.copies import WINDOW, Ints
from kvferry.errors import PeerLost, PermissionDenied, TransferError

STEP_BYTES = 1 << 20  # copied at a time through another array, if both sides are scattered
# Runs of this length and more are copied by one call each; for shorter ones NumPy is faster. Times
# the address space of a process (2**47) it fits 63 bits, NumPy's limit for an array's size.
LONG_RUN_BYTES = 32 << 10
MOST_LENGTHS = 8  # distinct ones, copied one by one; with more, runs are cut into powers of two
TAKE_RUNS = 64  # a `take` for fewer runs than this does not pay
VECTORS_PER_CALL = 1024  # Linux's UIO_MAXIOV
IOVEC_BYTES = 16
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
# pid, local table, local count, remote table, remote count, flags (none) -> bytes moved, or -1 with
# errno set
SystemCall = Callable[[int, int, int, int, int, int], int]


class HostMemory(Memory):
    """Regions of host memory; see `Memory`."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._table = RegionTable.of(regions)

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None:
        self._require(address, length, into)
        for runs, sizes, where in self._runs(address, length):
            copy_runs(runs, into.ctypes.data + where, sizes)

    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None:
        self._require(address, length, source)
        for runs, sizes, where in self._runs(address, length):
            copy_runs(source.ctypes.data + where, runs, sizes)

    def zero(self, address: Ints, length: Ints) -> None:
        self._require(address, length, None)
        for runs, sizes, _ in self._runs(address, length):
            short = sizes < LONG_RUN_BYTES
            nothing = np.full(int(np.count_nonzero(short)), ZEROS.ctypes.data)
            copy_runs(nothing, runs[short], sizes[short])
            for at, size in zip(runs[~short].tolist(), sizes[~short].tolist(), strict=True):
                ctypes.memset(at, 0, size)

    def _runs(self, address: Ints, length: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Addresses and lengths of the runs, with neighbours joined, and the offset of each in a
        dense buffer; one window at a time."""
        done = 0
        for first in range(0, len(address), WINDOW):
            part = slice(first, first + WINDOW)
            runs, sizes = address[part], length[part]
            if not bool(sizes.all()):
                some = sizes != 0
                runs, sizes = runs[some], sizes[some]
            runs, sizes = joined(runs, sizes)
            ends = done + np.cumsum(sizes)
            yield runs, sizes, ends - sizes
            done = int(ends[-1]) if len(ends) else done

    def _require(self, address: Ints, length: Ints, buffer: Bytes | None) -> None:
        total = 0
        for first in range(0, len(address), WINDOW):
            part = slice(first, first + WINDOW)
            self._table.require("this process", address[part], length[part])
            total += int(length[part].sum())
        if buffer is not None and total > len(buffer):
            raise TransferError(f"runs of {total} bytes and a buffer of {len(buffer)}")


ZEROS = np.zeros(LONG_RUN_BYTES, dtype=np.uint8)


def copy_runs(src: Ints, dst: Ints, length: Ints) -> None:
    """Copy `length[i]` bytes from address `src[i]` to address `dst[i]` of this process. The caller
    has checked the addresses. The two never overlap."""
    if len(length) and int(length.max()) >= LONG_RUN_BYTES:
        long = length >= LONG_RUN_BYTES
        runs = zip(dst[long].tolist(), src[long].tolist(), length[long].tolist(), strict=True)
        for to, at, size in runs:
            ctypes.memmove(to, at, size)
        src, dst, length = src[~long], dst[~long], length[~long]
    for which, before, size in _groups(length):
        a, b = (src, dst) if which is None else (src[which], dst[which])
        if before is not None:
            a, b = a + before, b + before
        _copy_equal(a, b, size)


def spread(src: int, dst: Ints, size: int) -> None:
    """Copy `size` bytes to each address of `dst`, from consecutive memory at `src`."""
    if size >= LONG_RUN_BYTES or len(dst) == 1:
        for to in dst.tolist():
            ctypes.memmove(to, src, size)
            src += size
        return
    low = int(dst.min())
    _windows(low, int(dst.max()), size)[dst - low] = _row(src, len(dst), size)


@dataclass(slots=True)
class Vectors:
    """A stream of bytes as an iovec table, and the position in it."""

    table: Ints  # (n, 2): address, length
    ends: Ints  # bytes of the stream up to the end of each vector
    first: int = 0  # vector that the next call begins with

    @classmethod
    def join(cls, address: Ints, length: Ints) -> Vectors:
        """The table of these ranges, with neighbours joined. No range may be empty."""
        return cls.of(*joined(address, length))

    @classmethod
    def of(cls, address: Ints, length: Ints) -> Vectors:
        table = np.empty((len(address), 2), dtype=np.int64)
        table[:, 0] = address
        table[:, 1] = length
        return cls(table, np.cumsum(length))

    @property
    def bytes(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def head(self) -> tuple[int, int]:
        """The address and the number of the next call's vectors."""
        count = min(VECTORS_PER_CALL, len(self.table) - self.first)
        return self.table.ctypes.data + IOVEC_BYTES * self.first, count

    def advance(self, done: int) -> None:
        """Go to byte `done` of the stream, cutting the vector that it falls into."""
        self.first = int(np.searchsorted(self.ends, done, side="right"))
        if self.first < len(self.table):
            vector = self.table[self.first]
            left = int(self.ends[self.first]) - done
            vector[0] += vector[1] - left
            vector[1] = left


def joined(address: Ints, length: Ints) -> tuple[Ints, Ints]:
    """The same bytes in the same order, with touching ranges joined. No range may be empty."""
    if len(length) < 2:
        return address, length
    apart = np.flatnonzero(address[1:] != address[:-1] + length[:-1]) + 1
    if len(apart) + 1 == len(address):  # nothing to join, as is usual for scattered blocks
        return address, length
    heads = np.concatenate((np.zeros(1, dtype=np.int64), apart))
    return address[heads], np.add.reduceat(length, heads)


def read(pid: int, src: ArrayLike, dst: ArrayLike, length: ArrayLike) -> int:
    """Copy `length[i]` bytes from `src[i]` in process `pid` to `dst[i]` here; return the total."""
    return move(system_call("process_vm_readv"), pid, local=dst, remote=src, length=length)


def write(pid: int, src: ArrayLike, dst: ArrayLike, length: ArrayLike) -> int:
    """Copy `length[i]` bytes from `src[i]` here to `dst[i]` in process `pid`; return the total."""
    return move(system_call("process_vm_writev"), pid, local=src, remote=dst, length=length)


def allow_any_reader() -> None:
    """Let any process of the same user reach this one's memory, as long as this process lives. A
    kernel without Yama refuses the call, and has nothing to allow."""
    prctl = libc().prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    prctl.restype = ctypes.c_int
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)


def move(
    call: SystemCall, pid: int, *, local: ArrayLike, remote: ArrayLike, length: ArrayLike
) -> int:
    """Move all copies through `call`, which may move a part at a time.

    The carrier has checked that they pair up, and that no length is negative.
    """
    ours, theirs, lengths = (np.asarray(a, dtype=np.int64) for a in (local, remote, length))
    here, there = Vectors.join(ours, lengths), Vectors.join(theirs, lengths)
    total, done = int(lengths.sum()), 0
    while done < total:
        moved = call(pid, *here.head(), *there.head(), 0)
        if moved <= 0:
            raise _error(ctypes.get_errno() if moved < 0 else 0, pid, done, total)
        done += moved
        here.advance(done)
        there.advance(done)
    return total


@cache
def system_call(name: str) -> SystemCall:
    """`process_vm_readv` or `process_vm_writev` of the C library, typed."""
    function = getattr(libc(), name)
    table = (ctypes.c_void_p, ctypes.c_ulong)
    function.argtypes = (ctypes.c_int, *table, *table, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    call: SystemCall = function
    return call


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _groups(length: Ints) -> Iterator[tuple[Ints | None, Ints | None, int]]:
    """Cut runs into groups of one length: which runs (None: all), the offset in each, bytes."""
    if len(length) == 0:
        return
    shortest, longest = int(length.min()), int(length.max())
    if shortest == longest:
        if shortest:
            yield None, None, shortest
        return
    sizes = np.unique(length)
    if len(sizes) <= MOST_LENGTHS:
        for size in sizes.tolist():
            if size:
                yield np.flatnonzero(length == size), None, size
        return
    for bit in range(longest.bit_length()):
        which = np.flatnonzero(length & (1 << bit))
        if len(which):
            yield which, length[which] >> (bit + 1) << (bit + 1), 1 << bit


def _copy_equal(src: Ints, dst: Ints, size: int) -> None:
    if _in_a_row(src, size):
        spread(int(src[0]), dst, size)
        return
    if _in_a_row(dst, size):
        _take(src, int(dst[0]), size)
        return
    low, into = int(src.min()), int(dst.min())
    source, target = _windows(low, int(src.max()), size), _windows(into, int(dst.max()), size)
    step = max(1, STEP_BYTES // size)
    for first in range(0, len(src), step):
        part = slice(first, first + step)
        target[dst[part] - into] = source[src[part] - low]


def _take(src: Ints, dst: int, size: int) -> None:
    """Copy `size` bytes from each address of `src` to consecutive memory at `dst`. NumPy's `take`
    needs elements that do not overlap: one array for each remainder of the addresses."""
    low = int(src.min())
    offsets, into = src - low, _row(dst, len(src), size)
    number = offsets // size
    remainder = offsets - number * size  # NumPy divides by a scalar faster than it takes `%`
    edges = [0, len(src)]
    if remainder.any():
        cuts = np.flatnonzero(remainder[1:] != remainder[:-1]) + 1
        if (len(cuts) + 1) * TAKE_RUNS > len(src):
            into[...] = _windows(low, int(src.max()), size)[offsets]
            return
        edges = [0, *cuts.tolist(), len(src)]
    for first, last in itertools.pairwise(edges):
        some = number[first:last]
        row = _row(low + int(remainder[first]), int(some.max()) + 1, size)
        # clip: with "raise", NumPy buffers the output. The addresses were checked
        np.take(row, some, out=into[first:last], mode="clip")


def _in_a_row(address: Ints, size: int) -> bool:
    return bool((address[1:] - address[:-1] == size).all())


class _Memory:
    """An address as NumPy's array interface."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, count: int, size: int, stride: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": f"|V{size}",
            "strides": (stride,),
            "version": 3,
        }


def _windows(low: int, high: int, size: int) -> NDArray[Any]:
    """Element i is the `size` bytes at address `low + i`. The last one begins at `high`."""
    return np.asarray(_Memory(low, high - low + 1, size, 1))


def _row(address: int, count: int, size: int) -> NDArray[Any]:
    """`count` elements of `size` bytes, one after another."""
    return np.asarray(_Memory(address, count, size, size))


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
