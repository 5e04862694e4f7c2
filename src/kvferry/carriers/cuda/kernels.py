# SPDX-License-Identifier: Apache-2.0
"""Kernels as machine code: Triton compiles each form once, and the driver launches it.

Triton compiles for the device without torch. This module loads the machine code and launches it on
our own streams. Compiling takes about a second for each form, and Triton keeps the result on disk.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from kvferry.carriers.cuda.driver import Device, Function
from kvferry.errors import TransferError

log = logging.getLogger(__name__)

# The arguments of `copy_runs`, in their order
_TABLES = (
    *("src_rows", "dst_rows", "src_segments", "dst_segments", "src_steps", "dst_steps"),
    *("lengths", "firsts"),
)
_WIDE = ("length", "src_shift", "dst_shift")
_NUMBERS = ("segments", "steps", "chunks", "search_rounds", "begin_item", "end_item")
_SIGNATURE = {
    **dict.fromkeys(_TABLES, "*i64"),
    **dict.fromkeys(_WIDE, "i64"),
    **dict.fromkeys(_NUMBERS, "i32"),
}

# By chunk size: the chunks of a program, and its warps. Small programs are faster (H200: 92 % of
# the copy peak, 86 % with 16 KiB by four warps), with eight or sixteen 16-byte accesses a thread.
# With as many chunks as threads, each thread finds one chunk and tells the others.
TUNING = {64: (64, 2), 256: (32, 1), 1024: (4, 1), 4096: (1, 2)}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded copy kernel, the bytes of a chunk, and the chunks of a program."""

    function: Function
    chunk: int
    count: int


_lock = threading.Lock()
_loaded: dict[tuple[object, ...], Function | str] = {}  # or the compiler's error
_kernels: dict[tuple[int, int, bool, bool, int], Kernel] = {}


@cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernel(device: Device, chunk: int, *, search: bool, fill: bool, grain: int) -> Kernel | None:
    """The copy kernel of this form (triton_kernels.py) for a device, which must be current.

    It has another chunk if the compiler fails for this one, and is None if it fails for all.
    """
    key = (device.ordinal, chunk, search, fill, grain)
    if key in _kernels:
        return _kernels[key]
    for other in (chunk, *TUNING):
        count, warps = TUNING[other]
        constants = {
            "SEARCH": search,
            "FILL": fill,
            "GRAIN": grain,
            "CHUNK": other,
            "COUNT": count,
            "COUNT_LOG": count.bit_length(),
        }
        try:
            function = load(device, "copy_runs", _SIGNATURE, constants, warps)
        except TransferError:
            continue
        _kernels[key] = Kernel(function, other, count)
        return _kernels[key]
    return None


def warm(device: Device) -> None:
    """Compile and load the kernels that copy caches, then those that set memory to zero."""
    with device.current():
        for fill, search, chunk in product((False, True), (False, True), TUNING):
            kernel(device, chunk, search=search, fill=fill, grain=16)


def load(
    device: Device,
    name: str,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    warps: int,
) -> Function:
    """A kernel of triton_kernels.py, compiled if necessary. Raises a `TransferError` if Triton does
    not compile it, which happens for single forms. `constants` are its last arguments. The device
    is current."""
    key = (device.ordinal, name, *constants.values())
    if key not in _loaded:
        with _lock:
            if key not in _loaded:
                try:
                    code, entry, shared = compiled(
                        name, signature, constants, device.capability, warps
                    )
                except Exception as error:  # the compiler raises anything
                    log.warning("Triton does not compile %s %s: %s", name, constants, error)
                    _loaded[key] = str(error)
                else:  # if the device has no memory for it now, the next call tries again
                    _loaded[key] = Function(code, entry, warps=warps, shared_bytes=shared)
    found = _loaded[key]
    if isinstance(found, str):
        raise TransferError(f"Triton does not compile {name}: {found}")
    return found


def compiled(
    name: str,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    capability: int,
    warps: int,
) -> tuple[bytes, str, int]:
    """Machine code, the kernel's name in it, and the shared memory that it needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvferry.carriers.cuda import triton_kernels

    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    places = list(signature)
    source = ASTSource(
        getattr(triton_kernels, name),
        signature,
        constexprs={(places.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps})
    return made.asm["cubin"], made.metadata.name, made.metadata.shared
