"""What `kvferry doctor` tries for real: carriers, between two processes, bytes compared.

A carrier's library is tried in a process of its own, which it may end as it likes.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvferry.cli.checks import Finding, State, version_of
from kvferry.errors import KvferryError
from kvferry.transport import MemoryRegion, make_carrier
from kvferry.transport.regions import Arrays

START_SECONDS = 30.0
TRY_SECONDS = 15.0
TRIED_BYTES = 1 << 20
SAID = "kvferry doctor: "  # before the answer of a process whose output belongs to a library


def tried(carriers: Sequence[str]) -> Iterator[Finding]:
    """`local` and `tcp`, between this process and another one, bytes compared."""
    try:
        with _owner() as (address, endpoints):
            for name in ("local", "tcp"):
                why = _try(name, endpoints[name], address)
                what = "process_vm_readv" if name == "local" else "loopback tcp"
                if not why:
                    yield Finding("reachable", what, "ok", "1 MiB read and compared")
                else:
                    needed = name == "tcp" or name in carriers
                    yield Finding(
                        "reachable",
                        what,
                        "broken" if needed else "missing",
                        why,
                        "two engines of one host use tcp instead, which is slower"
                        if name == "local"
                        else "allow TCP connections over the loopback interface",
                    )
    except KvferryError as error:
        yield Finding("reachable", "two processes", "broken", str(error), "see the text")


def tried_libraries(carriers: Sequence[str]) -> Iterator[Finding]:
    """`nixl` and `mooncake`, where they are installed: two of each, bytes compared."""
    for name in ("nixl", "mooncake"):
        if version_of(name) is None:
            continue
        why = _try_library(name)
        if not why:
            yield Finding("reachable", f"loopback {name}", "ok", "1 MiB read and compared")
            continue
        state: State = "broken" if name in carriers else "missing"
        advice = f"only needed where {name} is configured as a carrier"
        yield Finding("reachable", f"loopback {name}", state, why, advice)


def _try_library(name: str) -> str:
    code = f"from kvferry.cli.tries import _try_both; _try_both({name!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * TRY_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no byte came within {2 * TRY_SECONDS:g} s"
    said = [line for line in done.stdout.splitlines() if line.startswith(SAID)]
    if not said:
        return f"its library ended the process that tried it (code {done.returncode})"
    return said[-1].removeprefix(SAID)


def _try_both(name: str) -> None:
    """The program of the process that tries a library."""
    memory = _pattern()
    why = ""
    try:
        owner = make_carrier(name, host="127.0.0.1")
        owner.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        why = _try(name, owner.endpoint(), memory.ctypes.data)
    except KvferryError as error:
        why = str(error)
    print(SAID + why, flush=True)
    os._exit(0)  # whatever the library's threads do


def _try(name: str, endpoint: bytes, address: int) -> str:
    """Why not; empty where the bytes came."""
    landing = np.zeros(TRIED_BYTES, dtype=np.uint8)
    carrier = make_carrier(name, host="127.0.0.1")
    try:
        carrier.register([MemoryRegion(landing.ctypes.data, TRIED_BYTES)])
        peer = carrier.connect(endpoint, time.monotonic() + TRY_SECONDS)
        detour = getattr(peer, "detour", "")
        if detour:
            return str(detour)
        one = [np.array([v]) for v in (address, landing.ctypes.data, TRIED_BYTES)]
        carrier.read(peer, Arrays(*one)).wait(time.monotonic() + TRY_SECONDS)
        same = np.array_equal(landing, _pattern())
        return "" if same else "the bytes that arrived are not those that were sent"
    except KvferryError as error:
        return str(error)
    finally:
        carrier.close()


def _pattern() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(7).integers(0, 256, TRIED_BYTES, dtype=np.uint8)


@contextmanager
def _owner() -> Iterator[tuple[int, dict[str, bytes]]]:
    code = "from kvferry.cli.tries import _own; _own()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        try:
            ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
            said = process.stdout.readline().split() if ready else []
            if len(said) != 3:
                raise KvferryError(
                    f"a second process did not start within {START_SECONDS:g} seconds"
                )
            yield (
                int(said[0]),
                {n: bytes.fromhex(e) for n, e in zip(("local", "tcp"), said[1:], strict=True)},
            )
        finally:
            process.kill()


def _own() -> None:
    """The other process's program."""
    memory = _pattern()
    carriers = [make_carrier(name, host="127.0.0.1") for name in ("local", "tcp")]
    for carrier in carriers:
        carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    print(memory.ctypes.data, *(c.endpoint().hex() for c in carriers), flush=True)
    sys.stdin.read()
