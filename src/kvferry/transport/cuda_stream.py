"""What is queued on a device: streams, marks in them, and kernels.

What is queued needs its device to be current (`Device.current`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import byref, c_int64, c_size_t, c_uint64, c_void_p

from kvferry.transport.cuda_driver import driver

# Numbers of cuda.h
_NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_DEFAULT, _EVENT_DISABLE_TIMING = 0, 2
_FUNCTION_MAX_SHARED = 8


class Stream:
    """A queue of work on a device, apart from all others."""

    def __init__(self) -> None:
        self._driver = driver()
        handle = c_void_p()
        self._driver.call("cuStreamCreate", byref(handle), _STREAM_NON_BLOCKING)
        self.handle = handle

    def copy(self, dst: int, src: int, size: int) -> None:
        """Between any two memories that the device knows. Waits where much is queued already."""
        code = self._driver.copy_waiting(dst, src, size, self.handle)
        if code:
            raise self._driver.error("cuMemcpyAsync", code)

    def copy_at_once(self, dst: int, src: int, size: int) -> None:
        """The same for few copies, of memory that is the device's or pinned; keeps the lock."""
        code = self._driver.copy(dst, src, size, self.handle)
        if code:
            raise self._driver.error("cuMemcpyAsync", code)

    def zero(self, dst: int, size: int) -> None:
        self._driver.call(
            "cuMemsetD8Async", c_uint64(dst), ctypes.c_ubyte(0), c_size_t(size), self.handle
        )

    def wait_for(self, event: Event) -> None:
        """What is queued from now on begins after the event."""
        code = self._driver.after(self.handle, event.handle, 0)
        if code:
            raise self._driver.error("cuStreamWaitEvent", code)

    def synchronize(self) -> None:
        self._driver.call("cuStreamSynchronize", self.handle)

    def destroy(self) -> None:
        self._driver.call("cuStreamDestroy_v2", self.handle)


class Event:
    """A mark in a stream."""

    def __init__(self, *, timing: bool = False) -> None:
        self._driver = driver()
        handle = c_void_p()
        flags = _EVENT_DEFAULT if timing else _EVENT_DISABLE_TIMING
        self._driver.call("cuEventCreate", byref(handle), flags)
        self.handle = handle

    def record(self, stream: Stream) -> None:
        code = self._driver.record(self.handle, stream.handle)
        if code:
            raise self._driver.error("cuEventRecord", code)

    def done(self) -> bool:
        """Raises where what came before it failed. No device need be current."""
        return self._is_done(self._driver.query(self.handle))

    def done_yet(self) -> bool:
        """The same for who asks again and again: other threads may run meanwhile."""
        return self._is_done(self._driver.ask(self.handle))

    def _is_done(self, code: int) -> bool:
        if code not in (0, _NOT_READY):
            raise self._driver.error("cuEventQuery", code)
        return code == 0

    def milliseconds_since(self, other: Event) -> float:
        """Both with timing, both done."""
        value = ctypes.c_float()
        call = self._driver.status("cuEventElapsedTime", byref(value), other.handle, self.handle)
        if call:
            raise self._driver.error("cuEventElapsedTime", call)
        return value.value

    def destroy(self) -> None:
        self._driver.call("cuEventDestroy_v2", self.handle)


class Function:
    """A kernel from machine code; `launch` from any thread on whose device it was loaded."""

    def __init__(self, code: bytes, name: str, *, warps: int, shared_bytes: int) -> None:
        self._driver = driver()
        module, handle = c_void_p(), c_void_p()
        self._driver.call("cuModuleLoadData", byref(module), code)
        self._driver.call("cuModuleGetFunction", byref(handle), module, name.encode())
        if shared_bytes > 48 << 10:
            self._driver.call("cuFuncSetAttribute", handle, _FUNCTION_MAX_SHARED, shared_bytes)
        self._handle, self._threads, self._shared = handle, 32 * warps, shared_bytes
        self._local = threading.local()
        self._launch = self._driver.launch

    def launch(self, grid: int, stream: Stream, values: Sequence[int]) -> None:
        """`values`: the arguments, each in the low bytes of its eight."""
        arguments = getattr(self._local, "arguments", None)
        if arguments is None or len(arguments[0]) != len(values):
            numbers = (c_int64 * len(values))()
            base = ctypes.addressof(numbers)
            pointers = (c_void_p * len(values))(*range(base, base + 8 * len(values), 8))
            arguments = self._local.arguments = (numbers, pointers)
        numbers, pointers = arguments
        numbers[:] = values
        code = self._launch(
            self._handle, grid, 1, 1, self._threads, 1, 1, self._shared, stream.handle, pointers, 0
        )
        if code:
            raise self._driver.error("cuLaunchKernel", code)
