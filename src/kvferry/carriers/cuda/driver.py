# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's driver by ctypes: contexts, memory, memory of other processes, streams and kernels.

Only the driver's own library is needed, neither torch nor the CUDA toolkit. Contexts are the
devices' primary ones, so that torch and kvferry can use each other's memory and streams.
`Device.current` restores the thread's former context. Every return code is checked.

Calls that may wait release the interpreter's lock. Calls that only queue something take a few
microseconds and keep the lock: if several threads stage at once, a thread needs longer to get the
lock back than the call takes, some 50 microseconds with eight threads (H200, 16 cores).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransferError

Numbers = NDArray[np.int64]
IPC_HANDLE_BYTES = 64
UUID_BYTES = 16

# Numbers of cuda.h
_INVALID_VALUE = 1
_PEER_ACCESS_ALREADY_ENABLED = 704
_P2P_ATOMIC = 3  # of CUdevice_P2PAttribute: atomic operations, which only NVLink supports
_HOST_ALLOC_PORTABLE = 1
_IPC_LAZY_PEER_ACCESS = 1
_ATTRIBUTE_MEMORY_TYPE, _ATTRIBUTE_ORDINAL = 2, 9
_ATTRIBUTE_RANGE_START, _ATTRIBUTE_RANGE_BYTES, _ATTRIBUTE_MAPPED = 11, 12, 13
_MEMORY_TYPE_HOST, _MEMORY_TYPE_DEVICE = 1, 2
MOST_PITCH = (1 << 31) - 1  # bytes between two rows of one copy
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_DEFAULT, _EVENT_BLOCKING, _EVENT_DISABLE_TIMING = 0, 1, 2
_CAPTURE_RELAXED = 2
_FUNCTION_MAX_SHARED = 8

# Newer versions of Triton append pointers to scratch memory, which our kernels do not use.
SCRATCH_ARGUMENTS = (0, 0, 0, 0)


class CudaError(TransferError):
    """The driver refused a call."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Copies between host and device. Each has rows of one length, at equal distances."""

    host: Numbers
    host_pitch: Numbers
    device: Numbers
    device_pitch: Numbers
    width: Numbers
    height: Numbers  # rows

    @classmethod
    def of(cls, copies: Sequence[tuple[int, int, int, int, int, int]]) -> Rows:
        """The same from a tuple for each copy, in the order of the fields."""
        return cls(*np.array(copies, dtype=np.int64).reshape(len(copies), 6).T)

    def __len__(self) -> int:
        return len(self.host)

    def cut(self, most_bytes: int) -> tuple[Rows, list[int]]:
        """The same in copies of at most so many bytes, or of one row; and the bounds of pieces of
        about so many bytes, from 0 to the end."""
        if not len(self):
            return self, [0]
        rows = self
        high = np.maximum(1, most_bytes // np.maximum(self.width, 1))  # rows of one copy
        if bool((self.height > high).any()):
            parts = -(-self.height // high)
            number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
            fields = (self.host, self.host_pitch, self.device, self.device_pitch, self.width)
            host, host_pitch, there, pitch, width = (np.repeat(each, parts) for each in fields)
            done = number * np.repeat(high, parts)
            height = np.minimum(np.repeat(high, parts), np.repeat(self.height, parts) - done)
            rows = Rows(
                host + done * host_pitch, host_pitch, there + done * pitch, pitch, width, height
            )
        piece = (np.cumsum(rows.width * rows.height) - 1) // most_bytes
        return rows, [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(rows)]


# CUDA_MEMCPY2D of cuda.h
_MEMCPY_2D = np.dtype(
    [
        (f"{side}_{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("x", np.uint64),
            ("y", np.uint64),
            ("type", np.uint32),
            ("host", np.uint64),
            ("device", np.uint64),
            ("array", np.uint64),
            ("pitch", np.uint64),
        )
    ]
    + [("width", np.uint64), ("height", np.uint64)],
    align=True,
)


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class Driver:
    """The driver's functions by their names in cuda.h; an error becomes a `CudaError`."""

    def __init__(self, library: ctypes.CDLL, keeping: ctypes.PyDLL) -> None:
        self._library, self._keeping = library, keeping
        library.cuIpcOpenMemHandle_v2.argtypes = (c_void_p, _IpcHandle, c_uint)
        # The calls that determine latency: looked up once, with their types, so that they take
        # plain numbers. They keep the interpreter's lock.
        self.launch = self._typed("cuLaunchKernel", c_void_p, *(c_uint,) * 7, *(c_void_p,) * 3)
        self.push = self._typed("cuCtxPushCurrent_v2", c_void_p)
        self.pop = self._typed("cuCtxPopCurrent_v2", c_void_p)
        self.record = self._typed("cuEventRecord", c_void_p, c_void_p)
        self.query = self._typed("cuEventQuery", c_void_p)
        self.after = self._typed("cuStreamWaitEvent", c_void_p, c_void_p, c_uint)
        numbers = (c_uint64, c_uint64, c_size_t, c_void_p)
        self.copy = self._typed("cuMemcpyAsync", *numbers)
        # The same calls for callers that poll or may wait: they release the lock.
        self.ask = self._typed("cuEventQuery", c_void_p, keeping=False)
        self.copy_waiting = self._typed("cuMemcpyAsync", *numbers, keeping=False)
        self.record_waiting = self._typed("cuEventRecord", c_void_p, c_void_p, keeping=False)
        self.after_waiting = self._typed(
            "cuStreamWaitEvent", c_void_p, c_void_p, c_uint, keeping=False
        )
        rows = ("cuMemcpy2DAsync_v2", c_void_p, c_void_p)
        self.copy_rows = self._typed(*rows)
        self.copy_rows_waiting = self._typed(*rows, keeping=False)

    def _typed(self, name: str, *types: Any, keeping: bool = True) -> Callable[..., int]:
        call = getattr(self._keeping if keeping else self._library, name)
        call.argtypes = types
        found: Callable[..., int] = call
        return found

    def status(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        self.check(name, self.status(name, *arguments))

    def check(self, name: str, code: int) -> None:
        """Raise an error for a return code that is not zero."""
        if code:
            raise self.error(name, code)

    def error(self, name: str, code: int) -> CudaError:
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        why = text.value.decode() if text.value else "unknown error"
        return CudaError(f"CUDA: {name} failed with error {code}: {why}")


@cache
def driver() -> Driver:
    """The initialised driver. Raises if this host has none."""
    try:
        library, keeping = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise TransferError(
            f"this host has no NVIDIA driver ({error}); the cuda carrier needs one. Use `local` or "
            "`tcp` for host memory"
        ) from None
    found = Driver(library, keeping)
    found.call("cuInit", 0)
    return found


@cache
def device_count() -> int:
    count = c_int()
    driver().call("cuDeviceGetCount", byref(count))
    return count.value


def gpu_links() -> dict[tuple[int, int], str]:
    """The link between each two GPUs of this host: NVLink or PCIe, or empty if one of them cannot
    reach the other's memory. Allocates no memory on them."""
    found = {}
    for here, there in combinations(map(device, range(device_count())), 2):
        near = here.can_reach(there) and there.can_reach(here)
        found[here.ordinal, there.ordinal] = here.link_to(there) if near else ""
    return found


@cache
def device(ordinal: int) -> Device:
    """The device of that number."""
    return Device(ordinal)


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """The device and the allocation that an address lies in."""

    ordinal: int
    base: int
    bytes: int


def place_of(address: int) -> DevicePlace | None:
    """The place of an address, or None if it is not device memory."""
    kind, ordinal = c_uint(), c_int()
    at = c_uint64(address)
    calls = driver()
    code = calls.status("cuPointerGetAttribute", byref(kind), _ATTRIBUTE_MEMORY_TYPE, at)
    if code or kind.value != _MEMORY_TYPE_DEVICE:
        return None
    calls.call("cuPointerGetAttribute", byref(ordinal), _ATTRIBUTE_ORDINAL, at)
    base, size = c_uint64(), c_size_t()
    with device(ordinal.value).current():
        calls.call("cuMemGetAddressRange_v2", byref(base), byref(size), at)
    return DevicePlace(ordinal.value, base.value, size.value)


def device_of(addresses: Iterable[int]) -> Device:
    """The device in whose memory all these addresses lie."""
    places = [place_of(address) for address in addresses]
    ordinals = {place.ordinal if place is not None else -1 for place in places}
    if len(ordinals) != 1 or -1 in ordinals:
        raise TransferError("the memory is not that of one GPU")
    return device(ordinals.pop())


def is_mapped(address: int, size: int) -> bool:
    """Whether one allocation, of this process or opened by it, holds `size` bytes at the address.

    No device need be current.
    """
    start, length, at = c_uint64(), c_size_t(), c_uint64(address)
    for value, what in ((start, _ATTRIBUTE_RANGE_START), (length, _ATTRIBUTE_RANGE_BYTES)):
        driver().call("cuPointerGetAttribute", byref(value), what, at)
    return start.value <= address and address + size <= start.value + length.value


def has_memory(address: int) -> bool:
    """Whether there is memory behind an address now. An engine that sleeps keeps the addresses of
    its cache and gives the memory back. The device must be current."""
    found = c_uint()
    at = c_uint64(address)
    code = driver().status("cuPointerGetAttribute", byref(found), _ATTRIBUTE_MAPPED, at)
    return found.value != 0 if code == 0 else code != _INVALID_VALUE  # others say nothing about it


class _OurThreads(threading.local):
    relaxed = False


_thread = _OurThreads()


class Current:
    """A context that is current for the thread inside a `with` statement.

    While an engine captures CUDA graphs, a call of another thread, such as an allocation, would end
    the capture. So each of our threads once sets its capture mode to relaxed.
    """

    __slots__ = ("_context", "_driver", "_popped")

    def __init__(self, calls: Driver, context: c_void_p) -> None:
        self._driver, self._context = calls, context
        self._popped = byref(c_void_p())  # never read

    def __enter__(self) -> None:
        self._driver.check("cuCtxPushCurrent", self._driver.push(self._context))
        if not _thread.relaxed:
            _thread.relaxed = True
            if threading.current_thread() is not threading.main_thread():
                mode = c_int(_CAPTURE_RELAXED)
                self._driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def __exit__(self, *_: object) -> None:
        self._driver.check("cuCtxPopCurrent", self._driver.pop(self._popped))


class Device:
    """One GPU. It must be current for its methods, unless they say otherwise."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._driver = driver()
        handle = c_int()
        self._driver.call("cuDeviceGet", byref(handle), ordinal)
        self._handle = handle
        uuid = ctypes.create_string_buffer(UUID_BYTES)
        self._driver.call("cuDeviceGetUuid_v2", uuid, handle)
        self.uuid = uuid.raw
        name = ctypes.create_string_buffer(128)
        self._driver.call("cuDeviceGetName", name, 128, handle)
        self.name = name.value.decode(errors="replace")
        major, minor = c_int(), c_int()
        for value, what in ((major, _CAPABILITY_MAJOR), (minor, _CAPABILITY_MINOR)):
            self._driver.call("cuDeviceGetAttribute", byref(value), what, handle)
        self.capability = 10 * major.value + minor.value

    @cached_property
    def _context(self) -> c_void_p:
        """Its primary context, which is kept. It takes some hundred MiB of the device, so a device
        that is only looked at has none."""
        context = c_void_p()
        self._driver.call("cuDevicePrimaryCtxRetain", byref(context), self._handle)
        return context

    @cached_property
    def _current(self) -> Current:
        return Current(self._driver, self._context)

    def current(self) -> Current:
        """Makes it this thread's device in a `with` statement. From any thread."""
        return self._current

    def can_reach(self, other: Device) -> bool:
        if other.ordinal == self.ordinal:
            return True
        can = c_int()
        self._driver.call("cuDeviceCanAccessPeer", byref(can), self._handle, other._handle)
        return bool(can.value)

    def link_to(self, other: Device) -> str:
        """The link to a device that this one can reach."""
        atomic = c_int()
        handles = self._handle, other._handle
        self._driver.call("cuDeviceGetP2PAttribute", byref(atomic), _P2P_ATOMIC, *handles)
        return "NVLink" if atomic.value else "PCIe"

    def reach(self, other: Device) -> None:
        if other.ordinal != self.ordinal:
            code = self._driver.status("cuCtxEnablePeerAccess", other._context, 0)
            if code not in (0, _PEER_ACCESS_ALREADY_ENABLED):
                raise self._driver.error("cuCtxEnablePeerAccess", code)

    # Memory

    def allocate(self, size: int) -> int:
        address = c_uint64()
        self._driver.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self._driver.call("cuMemFree_v2", c_uint64(address))

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Host memory that the device reads and writes by itself; `free_pinned` gives it back."""
        pointer = c_void_p()
        self._driver.call("cuMemHostAlloc", byref(pointer), c_size_t(size), _HOST_ALLOC_PORTABLE)
        assert pointer.value is not None
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer.value))

    def free_pinned(self, address: int) -> None:
        self._driver.call("cuMemFreeHost", c_void_p(address))

    def register_host(self, address: int, size: int) -> None:
        """Let the device read and write this host memory by itself. No copy may cross the border of
        the memory that one call registered."""
        self._driver.call(
            "cuMemHostRegister_v2", c_void_p(address), c_size_t(size), _HOST_ALLOC_PORTABLE
        )

    def unregister_host(self, address: int) -> None:
        self._driver.call("cuMemHostUnregister", c_void_p(address))

    def export(self, base: int) -> bytes:
        """The handle by which another process opens the allocation that begins at `base`."""
        handle = _IpcHandle()
        self._driver.call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
        return bytes(handle)

    def open(self, exported: bytes) -> int:
        """Open another process's allocation. Returns its address in this process."""
        handle, address = _IpcHandle.from_buffer_copy(exported), c_uint64()
        self._driver.call("cuIpcOpenMemHandle_v2", byref(address), handle, _IPC_LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._driver.call("cuIpcCloseMemHandle", c_uint64(address))


class CudaStream:
    """A queue of work on a device, apart from all others. The device must be current."""

    def __init__(self, *, urgency: int = 0) -> None:
        """urgency  kernels of more urgent streams run first, in hardware queues of their own. An
        engine's streams have urgency 0, so these kernels do not wait behind its steps"""
        self._driver = driver()
        handle, least, greatest = c_void_p(), c_int(), c_int()
        self._driver.call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        priority = max(greatest.value, -urgency)
        self._driver.call(
            "cuStreamCreateWithPriority", byref(handle), _STREAM_NON_BLOCKING, priority
        )
        self.handle = handle

    def copy(self, dst: int, src: int, size: int) -> None:
        """Copy between any two memories that the device knows. Waits if the queue is full."""
        self._driver.check("cuMemcpyAsync", self._driver.copy_waiting(dst, src, size, self.handle))

    def copy_at_once(self, dst: int, src: int, size: int) -> None:
        """The same for a few copies of device or pinned memory; keeps the interpreter's lock."""
        self._driver.check("cuMemcpyAsync", self._driver.copy(dst, src, size, self.handle))

    def copy_rows(
        self,
        rows: Rows,
        *,
        outward: bool,
        waits: bool = False,
        gap: Callable[[], None] | None = None,
        gap_bytes: int = 1 << 62,
    ) -> None:
        """Copy rows to the host (`outward`) or to the device.

        waits  the call may wait: the host's memory is not registered, or the queue may be full
        gap    called between two copies, before more than `gap_bytes` are queued since the last gap
        """
        rows, cuts = rows.cut(gap_bytes)
        host, there = ("dst", "src") if outward else ("src", "dst")
        table = np.zeros(len(rows), dtype=_MEMCPY_2D)
        table[f"{host}_type"], table[f"{there}_type"] = _MEMORY_TYPE_HOST, _MEMORY_TYPE_DEVICE
        table[f"{host}_host"], table[f"{host}_pitch"] = rows.host, rows.host_pitch
        table[f"{there}_device"], table[f"{there}_pitch"] = rows.device, rows.device_pitch
        table["width"], table["height"] = rows.width, rows.height
        call = self._driver.copy_rows_waiting if waits else self._driver.copy_rows
        address, handle, step = table.ctypes.data, self.handle, _MEMCPY_2D.itemsize
        for first, last in pairwise(cuts):
            if first and gap is not None:
                gap()
            for at in range(address + first * step, address + last * step, step):
                code = call(at, handle)
                if code:
                    raise self._driver.error("cuMemcpy2DAsync", code)

    def zero(self, dst: int, size: int) -> None:
        self._driver.call(
            "cuMemsetD8Async", c_uint64(dst), ctypes.c_ubyte(0), c_size_t(size), self.handle
        )

    def wait_for(self, event: CudaEvent | int, *, waits: bool = False) -> None:
        """Work queued from now on begins after the event: ours, or a handle of another library.

        waits  the queue may be full; other threads run meanwhile
        """
        handle = event if isinstance(event, int) else event.handle
        call = self._driver.after_waiting if waits else self._driver.after
        self._driver.check("cuStreamWaitEvent", call(self.handle, handle, 0))

    def synchronize(self) -> None:
        self._driver.call("cuStreamSynchronize", self.handle)

    def destroy(self) -> None:
        self._driver.call("cuStreamDestroy_v2", self.handle)


class CudaEvent:
    """A mark in a stream."""

    def __init__(self, *, timing: bool = False, blocking: bool = False) -> None:
        """blocking  `wait` sleeps instead of spinning"""
        self._driver = driver()
        handle = c_void_p()
        flags = _EVENT_DEFAULT if timing else _EVENT_DISABLE_TIMING
        flags |= _EVENT_BLOCKING * blocking
        self._driver.call("cuEventCreate", byref(handle), flags)
        self.handle = handle

    def record(self, stream: CudaStream, *, waits: bool = False) -> None:
        """waits  the queue may be full; other threads run meanwhile"""
        call = self._driver.record_waiting if waits else self._driver.record
        self._driver.check("cuEventRecord", call(self.handle, stream.handle))

    def done(self) -> bool:
        """Raises if work before the event failed. No device need be current."""
        return self._is_done(self._driver.query(self.handle))

    def done_yet(self) -> bool:
        """The same for callers that poll: other threads run meanwhile."""
        return self._is_done(self._driver.ask(self.handle))

    def wait(self) -> None:
        """Wait until it is done, in one call that does not disturb other threads."""
        self._driver.call("cuEventSynchronize", self.handle)

    def _is_done(self, code: int) -> bool:
        if code not in (0, _NOT_READY):
            raise self._driver.error("cuEventQuery", code)
        return code == 0

    def milliseconds_since(self, other: CudaEvent) -> float:
        """Both events must have timing and be done."""
        value = ctypes.c_float()
        self._driver.call("cuEventElapsedTime", byref(value), other.handle, self.handle)
        return value.value

    def destroy(self) -> None:
        self._driver.call("cuEventDestroy_v2", self.handle)


class Function:
    """A kernel from machine code. Any thread may launch it, with its device current."""

    def __init__(self, code: bytes, name: str, *, warps: int, shared_bytes: int) -> None:
        self._driver = driver()
        module, handle = c_void_p(), c_void_p()
        self._driver.call("cuModuleLoadData", byref(module), code)
        self._driver.call("cuModuleGetFunction", byref(handle), module, name.encode())
        if shared_bytes > 48 << 10:
            self._driver.call("cuFuncSetAttribute", handle, _FUNCTION_MAX_SHARED, shared_bytes)
        self._handle, self._threads, self._shared = handle, 32 * warps, shared_bytes
        self._local = threading.local()

    def launch(self, grid: int, stream: CudaStream, values: Sequence[int]) -> None:
        """`values`: the arguments. Each takes eight bytes; the kernel reads the low ones."""
        values = [*values, *SCRATCH_ARGUMENTS]
        arguments = getattr(self._local, "arguments", None)
        if arguments is None or len(arguments[0]) != len(values):
            numbers = (c_int64 * len(values))()
            base = ctypes.addressof(numbers)
            pointers = (c_void_p * len(values))(*range(base, base + 8 * len(values), 8))
            arguments = self._local.arguments = (numbers, pointers)
        numbers, pointers = arguments
        numbers[:] = values
        code = self._driver.launch(
            self._handle, grid, 1, 1, self._threads, 1, 1, self._shared, stream.handle, pointers, 0
        )
        self._driver.check("cuLaunchKernel", code)
