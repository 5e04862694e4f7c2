# SPDX-License-Identifier: Apache-2.0
"""The copy kernel as machine code: compiled by Triton once for each form, launched by the driver.

Triton compiles for the device without torch. The machine code is loaded and launched here, on our
own streams. Compiling takes about a second for each form, and Triton keeps the result on disk.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvferry.carriers.cuda.driver import Device, Function

log = logging.getLogger(__name__)

_TABLES = (
    "src_rows",
    "dst_rows",
    "src_segments",
    "dst_segments",
    "src_steps",
    "dst_steps",
    "lengths",
    "firsts",
)
_WIDE = ("length", "src_shift", "dst_shift")
_NUMBERS = ("segments", "steps", "chunks", "search_rounds", "begin_item", "end_item")
# Newer versions of Triton append pointers to scratch memory, which this kernel does not use.
SCRATCH_ARGUMENTS = (0, 0, 0, 0)

# Chunks that a program moves, and its warps. Small programs win (measured on an H200: 92 % of the
# copy peak against 86 % for 16 KiB by four warps), with eight or sixteen 16-byte accesses a thread.
# Where there are as many chunks as threads, each thread looks one up and the others get it from it.
TUNING = {64: (64, 2), 256: (32, 1), 1024: (4, 1), 4096: (1, 2)}


@dataclass(frozen=True, slots=True)
class Form:
    """The constants of one kernel: see triton_kernels.py."""

    chunk: int
    search: bool = False
    fill: bool = False
    grain: int = 16


# The forms that copies of a cache use, then those that set bytes to zero which no copy covers.
USUAL = tuple(
    Form(chunk, search, fill)
    for fill in (False, True)
    for search in (False, True)
    for chunk in TUNING
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that is loaded, the bytes of a chunk, and the chunks of a program."""

    function: Function
    chunk: int
    count: int


_lock = threading.Lock()
_functions: dict[tuple[int, Form], Function | None] = {}  # None: the compiler failed
_kernels: dict[tuple[int, int, bool, bool, int], Kernel] = {}


@cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def kernel(device: Device, chunk: int, *, search: bool, fill: bool, grain: int) -> Kernel | None:
    """The kernel of this form for a device, which must be current; compiled if need be.

    It has another chunk if the compiler fails for this one, and is None if it fails for all.
    """
    key = (device.ordinal, chunk, search, fill, grain)
    found = _kernels.get(key)
    if found is None:
        for other in (chunk, *TUNING):
            function = _function(device, Form(other, search, fill, grain))
            if function is not None:
                found = _kernels[key] = Kernel(function, other, TUNING[other][0])
                break
    return found


def warm(device: Device) -> None:
    """Have the usual kernels ready."""
    with device.current():
        for form in USUAL:
            _function(device, form)


def warm_aside(device: Device) -> None:
    """The same on a thread of its own, where Triton is installed."""
    if available():
        threading.Thread(
            target=warm, args=(device,), name="kvferry-cuda-compile", daemon=True
        ).start()


def _function(device: Device, form: Form) -> Function | None:
    """None where the compiler fails, which it does for a form now and then."""
    key = (device.ordinal, form)
    if key not in _functions:
        with _lock:
            if key not in _functions:
                try:
                    _functions[key] = _load(device, form)
                except Exception as error:
                    log.warning("Triton does not compile %s: %s", form, error)
                    _functions[key] = None
    return _functions[key]


def _load(device: Device, form: Form) -> Function:
    code, name, shared = compile_form(form, device.capability)
    return Function(code, name, warps=TUNING[form.chunk][1], shared_bytes=shared)


def compile_form(form: Form, capability: int) -> tuple[bytes, str, int]:
    """Machine code, the kernel's name in it, and the shared memory that it needs."""
    from kvferry.carriers.cuda.triton_kernels import copy_runs

    count, warps = TUNING[form.chunk]
    constants = {
        "SEARCH": form.search,
        "FILL": form.fill,
        "GRAIN": form.grain,
        "CHUNK": form.chunk,
        "COUNT": count,
        "COUNT_LOG": count.bit_length(),
    }
    signature = {
        **dict.fromkeys(_TABLES, "*i64"),
        **dict.fromkeys(_WIDE, "i64"),
        **dict.fromkeys(_NUMBERS, "i32"),
    }
    return compile_kernel(copy_runs, signature, constants, capability, warps)


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    capability: int,
    warps: int,
) -> tuple[bytes, str, int]:
    """The same of any kernel; `constants` are its last arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    places = list(signature)
    source = ASTSource(
        kernel,
        signature,
        constexprs={(places.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    return compiled.asm["cubin"], compiled.metadata.name, compiled.metadata.shared
