# SPDX-License-Identifier: Apache-2.0
"""Host memory: this process's own, by address, and that of other processes of this host.

`HostMemory` gathers, scatters and zeroes without a Python loop. It sees all regions as one array of
bytes that spans them, gaps included. Ranges are checked against the regions first, so no byte in a
gap is ever touched.

`copy_runs` copies inside one process: runs to a buffer, a buffer to runs, runs to runs. It needs no
system call and no permission. Copies of one length go together: seen through a dtype of that many
bytes and a stride of one byte, a memory is an array in which every byte begins an element, and
NumPy's indexing moves whole elements from anywhere to anywhere. So Python runs once per distinct
length and chunk, and alignment does not matter. Where many lengths are mixed, each run is cut into
powers of two, so that there are never more than a few groups. A gather whose runs lie a multiple of
their length apart is one `np.take` straight into its buffer, which needs no intermediate array and
is twice as fast.

`Vectors` is a table of (address, length) as the kernel takes it: a stream of bytes, the ranges one
after another. A system call takes at most `VECTORS_PER_CALL` of them and moves as much as it likes.
`Vectors` remembers how far the stream has come, and cuts the range in which it stopped. Python runs
once per call, never per range.

`read` and `write` copy between processes by `process_vm_readv` and `process_vm_writev`. They are
one-sided: the other process takes no part, and only needs to stay alive. Each side's neighbours are
joined before anything is issued: the kernel pins pages once per remote vector, so heads that lie
together at the source and apart at the destination cost one pin, not one each (twice the rate at
256 bytes a descriptor). Both tables always describe the same stream of bytes; a call moves as much
of it as both of its lists cover, and the next call resumes there, in the middle of a vector where
need be. The kernel checks every address on both sides: a wrong one is an error, never a crash.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.carriers.base import Bytes, Memory, MemoryRegion, RegionTable
from kvferry.copies import WINDOW, Ints
from kvferry.errors import PeerLost, PermissionDenied, TransferError

CHUNK_BYTES = 1 << 18  # moved by one NumPy call: a tenth of a millisecond, and it stays cached
# Longer runs are copied in pieces of this. Times the widest address space (2**48), it still fits 63
# bits, which is the limit of NumPy for an array that spans all of it.
PIECE_BYTES = 1 << 14
PIECES_AT_A_TIME = 1 << 15
MOST_LENGTHS = 8  # distinct ones, each copied as it is; beyond, runs are cut into powers of two
TAKE_RUNS = 64  # a `take` for fewer runs than this does not pay
VECTORS_PER_CALL = 1024  # Linux's UIO_MAXIOV
IOVEC_BYTES = 16
SAMPLE = 512  # pairs of neighbours looked at before all are
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
# pid, local table, local count, remote table, remote count, flags (none) -> bytes moved, or -1 with
# errno set
SystemCall = Callable[[int, int, int, int, int, int], int]


class HostMemory(Memory):
    """Regions of host memory."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._table = RegionTable.of(regions)
        self._base, span = 0, 0
        if len(self._table):
            self._base = int(self._table.starts[0])
            span = int(self._table.ends.max()) - self._base
        self._bytes: Bytes = np.ctypeslib.as_array(
            (ctypes.c_uint8 * span).from_address(self._base or ctypes.addressof(_nowhere))
        )

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None:
        """The runs, one after another, to the beginning of `into`."""
        self._require(address, length, into)
        for runs, sizes, where in self._runs(address, length):
            copy_runs(self._bytes, runs, into, where, sizes)

    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None:
        """The beginning of `source` to the runs, in their order."""
        self._require(address, length, source)
        for runs, sizes, where in self._runs(address, length):
            copy_runs(source, where, self._bytes, runs, sizes)

    def place(self, source: Bytes, at: Ints, address: Ints, length: Ints) -> None:
        """Runs of `source`, from anywhere in it, to runs of this memory. One window at most."""
        self._require(address, length, None)
        if len(at) and (int(at.min()) < 0 or int((at + length).max()) > len(source)):
            raise TransferError(f"a run leaves its buffer of {len(source)} bytes")
        copy_runs(source, at, self._bytes, address - self._base, length)

    def zero(self, address: Ints, length: Ints) -> None:
        """Set ranges to zero."""
        self._require(address, length, None)
        for runs, sizes, _ in self._runs(address, length):
            short = sizes <= CHUNK_BYTES
            nowhere = np.zeros(int(np.count_nonzero(short)), dtype=np.int64)
            copy_runs(ZEROS, nowhere, self._bytes, runs[short], sizes[short])
            for at, size in zip(runs[~short].tolist(), sizes[~short].tolist(), strict=True):
                for begin in range(at, at + size, CHUNK_BYTES):
                    self._bytes[begin : min(begin + CHUNK_BYTES, at + size)] = 0

    def _runs(self, address: Ints, length: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Offsets and lengths of the runs, and where each begins if they lie one after another: a
        window at a time, neighbours joined."""
        done = 0
        for first in range(0, len(address), WINDOW):
            part = slice(first, first + WINDOW)
            runs, sizes = address[part], length[part]
            if not bool(sizes.all()):
                some = sizes != 0
                runs, sizes = runs[some], sizes[some]
            runs, sizes = joined(runs, sizes)
            ends = done + np.cumsum(sizes)
            yield runs - self._base, sizes, ends - sizes
            done = int(ends[-1]) if len(ends) else done

    def _require(self, address: Ints, length: Ints, buffer: Bytes | None) -> None:
        total = 0
        for first in range(0, len(address), WINDOW):
            part = slice(first, first + WINDOW)
            self._table.require("this process", address[part], length[part])
            total += int(length[part].sum())
        if buffer is not None and total > len(buffer):
            raise TransferError(f"runs of {total} bytes and a buffer of {len(buffer)}")


ZEROS = np.zeros(CHUNK_BYTES, dtype=np.uint8)
_nowhere = ctypes.c_uint8()


def copy_runs(src_memory: Bytes, src: Ints, dst_memory: Bytes, dst: Ints, length: Ints) -> None:
    """Copy `length[i]` bytes from offset `src[i]` to offset `dst[i]`. The caller has checked that
    they lie inside of the two memories, which must not overlap."""
    if len(length) and int(length.max()) > PIECE_BYTES:
        _copy_pieces(src_memory, src, dst_memory, dst, length // PIECE_BYTES)
        whole = length // PIECE_BYTES * PIECE_BYTES
        src, dst, length = src + whole, dst + whole, length - whole
    for which, before, size in _groups(length):
        a, b = (src, dst) if which is None else (src[which], dst[which])
        if before is not None:
            a, b = a + before, b + before
        _copy_equal(src_memory, a, dst_memory, b, size)


@dataclass(slots=True)
class Vectors:
    """A stream of bytes as an iovec table, and how far it has come."""

    table: Ints  # (n, 2): address, length
    ends: Ints  # bytes of the stream up to the end of each vector
    first: int = 0  # vector that the next call begins with

    @classmethod
    def join(cls, address: Ints, length: Ints) -> Vectors:
        """The table of these ranges, none of them empty, with neighbours made one."""
        return cls.of(*joined(address, length))

    @classmethod
    def of(cls, address: Ints, length: Ints) -> Vectors:
        """The table of these ranges as they are."""
        table = np.empty((len(address), 2), dtype=np.int64)
        table[:, 0] = address
        table[:, 1] = length
        return cls(table, np.cumsum(length))

    @property
    def bytes(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def head(self) -> tuple[int, int]:
        """Where the next call's vectors lie, and how many there are."""
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
    """The same bytes in the same order, with ranges that touch made one. None may be empty."""
    if len(length) < 2 or _apart(address, length):
        return address, length
    apart = np.flatnonzero(address[1:] != address[:-1] + length[:-1]) + 1
    if len(apart) + 1 == len(address):  # nothing to join, as is usual for scattered blocks
        return address, length
    heads = np.concatenate((np.zeros(1, dtype=np.int64), apart))
    return address[heads], np.add.reduceat(length, heads)


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


def move(
    call: SystemCall, pid: int, *, local: ArrayLike, remote: ArrayLike, length: ArrayLike
) -> int:
    """Move all copies through `call`, however little it moves at a time.

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
    """The C library; its calls release the interpreter's lock."""
    return ctypes.CDLL(None, use_errno=True)


def _apart(address: Ints, length: Ints) -> bool:
    """Whether, of many ranges, no two touch as far as some of them show: then few do."""
    step = len(length) // SAMPLE
    if step < 2:
        return False
    return bool((address[1::step] != (address[:-1:step] + length[:-1:step])).all())


def _groups(length: Ints) -> Iterator[tuple[Ints | None, Ints | None, int]]:
    """Which runs (None: all), how far into each, and how many bytes of each: all runs, cut up."""
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


def _copy_equal(src_memory: Bytes, src: Ints, dst_memory: Bytes, dst: Ints, size: int) -> None:
    step = max(1, CHUNK_BYTES // size)
    scratch = _scratch()
    in_order = len(dst) > 1 and _in_order(dst, size)
    from_order = not in_order and len(src) > 1 and _in_order(src, size)
    targets = _windows(dst_memory, size)
    for start in range(0, len(src), step):
        a, b = src[start : start + step], dst[start : start + step]
        if in_order:
            _take(src_memory, a, _dense(dst_memory, int(b[0]), size, len(b)), size)
        elif from_order:
            targets[b] = _dense(src_memory, int(a[0]), size, len(a))
        else:
            between = _dense(scratch, 0, size, len(a))
            _take(src_memory, a, between, size)
            targets[b] = between


def _take(memory: Bytes, offsets: Ints, into: NDArray[np.void], size: int) -> None:
    """Elements at these offsets, in order. `take` wants a dense array: one for each remainder."""
    number = offsets // size
    remainder = offsets - number * size  # NumPy divides by a scalar faster than it takes `%`
    cuts = np.flatnonzero(remainder[1:] != remainder[:-1]) + 1
    if (len(cuts) + 1) * TAKE_RUNS > len(offsets) and len(cuts):
        into[...] = _windows(memory, size)[offsets]
        return
    edges = [0, *cuts.tolist(), len(offsets)]
    for first, last in itertools.pairwise(edges):
        begin = int(remainder[first])
        dense = _dense(memory, begin, size, (len(memory) - begin) // size)
        # clip: with "raise", NumPy buffers the output. The offsets were checked
        np.take(dense, number[first:last], out=into[first:last], mode="clip")


def _copy_pieces(src_memory: Bytes, src: Ints, dst_memory: Bytes, dst: Ints, count: Ints) -> None:
    """The first `count[i]` pieces of each run."""
    ends = np.cumsum(count)
    for first in range(0, int(ends[-1]), PIECES_AT_A_TIME):
        number = np.arange(first, min(first + PIECES_AT_A_TIME, int(ends[-1])))
        run = np.searchsorted(ends, number, side="right")
        within = (number - ends[run] + count[run]) * PIECE_BYTES
        _copy_equal(src_memory, src[run] + within, dst_memory, dst[run] + within, PIECE_BYTES)


_mine = threading.local()


def _scratch() -> Bytes:
    """A chunk's worth of bytes, one for each thread: a new array each time costs page faults."""
    if not hasattr(_mine, "scratch"):
        _mine.scratch = np.empty(CHUNK_BYTES, dtype=np.uint8)
    made: Bytes = _mine.scratch
    return made


def _in_order(offsets: Ints, size: int) -> bool:
    return bool((offsets[1:] - offsets[:-1] == size).all())


def _windows(memory: Bytes, size: int) -> NDArray[np.void]:
    """Element i is the `size` bytes from byte i on."""
    return np.ndarray((len(memory) - size + 1,), f"V{size}", memory, strides=(1,))


def _dense(memory: Bytes, begin: int, size: int, count: int) -> NDArray[np.void]:
    return np.ndarray((count,), f"V{size}", memory, offset=begin)


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
