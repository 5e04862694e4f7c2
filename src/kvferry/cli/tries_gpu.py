"""What `kvferry doctor` tries for real on a GPU: its memory shared between two processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from ctypes import c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np

from kvferry.cli import checks, children
from kvferry.cli.asked import Asked
from kvferry.cli.checks import Finding
from kvferry.cli.tries import TRIED_BYTES, TRY_SECONDS, compared, pattern, read_into, second_process
from kvferry.errors import KvferryError
from kvferry.transport import MemoryRegion, make_carrier
from kvferry.transport.cuda_driver import device, driver

WHAT = "CUDA IPC"
PLAIN = {"triton": False}  # the driver's copies: no kernel has to be compiled first
ADVICE = "caches on GPUs are moved by tcp instead, which stages them in host memory and is slower"


def tried(asked: Asked) -> Iterator[Finding]:
    """`cuda`, where there is a GPU: between two processes, bytes compared."""
    if checks.cuda().state != "ok":
        return
    options = {**PLAIN, **asked.opening("cuda")}
    try:
        why = children.ask("tries_gpu", {"options": options}, 4 * TRY_SECONDS)
    except KvferryError as error:
        why = str(error)
    if why:
        state: checks.State = "broken" if "cuda" in asked.named else "missing"
        yield Finding("reachable", WHAT, state, why, ADVICE)
    else:
        yield Finding("reachable", WHAT, "ok", "1 MiB read and compared, on GPU 0")


def answer(question: dict[str, Any]) -> str:
    """The program of the process that reads; it starts the one that owns the memory."""
    mine = device(0)
    with mine.current():
        landing = mine.allocate(TRIED_BYTES)
    with second_process("from kvferry.cli.tries_gpu import _own; _own()") as found:
        carrier = make_carrier("cuda", **question["options"])
        read_into(carrier, bytes.fromhex(found["endpoint"]), found["address"], landing)
        back = np.zeros(TRIED_BYTES, dtype=np.uint8)
        with mine.current():
            driver().call(
                "cuMemcpyDtoH_v2",
                c_void_p(back.ctypes.data),
                c_uint64(landing),
                c_size_t(TRIED_BYTES),
            )
        return compared(back)


def _own() -> None:
    """The program of the process that owns the memory."""
    kept: list[Any] = []

    def offer() -> dict[str, Any]:
        mine, bytes_of = device(0), pattern()
        with mine.current():
            address = mine.allocate(TRIED_BYTES)
            driver().call(
                "cuMemcpyHtoD_v2",
                c_uint64(address),
                c_void_p(bytes_of.ctypes.data),
                c_size_t(TRIED_BYTES),
            )
        kept.append(make_carrier("cuda", **PLAIN))
        kept[0].register([MemoryRegion(address, TRIED_BYTES)])
        return {"address": address, "endpoint": kept[0].endpoint().hex()}

    if children.say(offer):
        sys.stdin.read()
