"""What `kvferry doctor` tries for real on this host: carriers, in two places, bytes compared.

`local` and `tcp` between this process and another one. A carrier's library twice in a process of
its own (`children`), as it is configured: with its options, at `host`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.cli import children
from kvferry.cli.asked import LOOPBACK, Asked
from kvferry.cli.checks import Finding, State, version_of
from kvferry.errors import KvferryError
from kvferry.transport import MemoryRegion, make_carrier
from kvferry.transport.auto import ENGINES
from kvferry.transport.base import Carrier
from kvferry.transport.foreign_peer import ForeignEndpoint
from kvferry.transport.regions import Arrays

START_SECONDS = 30.0
TRY_SECONDS = 15.0
TRIED_BYTES = 1 << 20
ON_HOST = {"local": "process_vm_readv", "tcp": "loopback tcp"}


def tried(asked: Asked) -> Iterator[Finding]:
    """`local` and `tcp`, between this process and another one, bytes compared."""
    try:
        with second_process("from kvferry.cli.tries import _own; _own()") as found:
            for name, what in ON_HOST.items():
                endpoint = bytes.fromhex(found[name])
                why = try_read(make_carrier(name, host=LOOPBACK), endpoint, found["address"])
                if not why:
                    yield Finding("reachable", what, "ok", "1 MiB read and compared")
                    continue
                needed = name == "tcp" or name in asked.named
                advice = (
                    "two engines of one host use tcp instead, which is slower; containers need "
                    "one pid namespace and the ptrace permission (--cap-add SYS_PTRACE)"
                    if name == "local"
                    else "allow TCP connections over the loopback interface"
                )
                yield Finding("reachable", what, "broken" if needed else "missing", why, advice)
    except KvferryError as error:
        advice = "engines would end by the same: mend this first"
        yield Finding("reachable", "two processes", "broken", str(error), advice)


def tried_libraries(asked: Asked, facts: dict[str, dict[str, str]]) -> Iterator[Finding]:
    """`nixl` and `mooncake`, where they are installed: two of each, bytes compared.

    `facts` gets what two hosts have to know of one that works: see `answer`.
    """
    names = [name for name in ENGINES if version_of(name) is not None]
    with ThreadPoolExecutor(len(ENGINES)) as pool:
        outcomes = pool.map(lambda name: _try_library(name, asked), names)
    for name, found in zip(names, outcomes, strict=True):
        what = f"loopback {name}"
        if not isinstance(found, str):
            facts[name] = found
            yield Finding("reachable", what, "ok", "1 MiB read and compared")
            continue
        needed = name in asked.named
        state: State = "broken" if needed else "missing"
        advice = (
            f"an engine with these options of {name} does not start, or does not reach others"
            if needed
            else f"only needed where {name} is configured as a carrier"
        )
        yield Finding("reachable", what, state, found, advice)


def _try_library(name: str, asked: Asked) -> dict[str, str] | str:
    """What is to be known of it, or why it does not work."""
    question = {"name": name, "options": asked.opening(name)}
    try:
        found: dict[str, str] = children.ask("tries", question, 2 * TRY_SECONDS)
    except KvferryError as error:
        return str(error)
    return found


def answer(question: dict[str, Any]) -> dict[str, str]:
    """The program of the process that tries a library. Both hosts must have the same
    `flavour`."""
    name, options, memory = question["name"], question["options"], pattern()
    owner = make_carrier(name, **options)
    owner.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    endpoint = owner.endpoint()
    why = try_read(make_carrier(name, **options), endpoint, memory.ctypes.data)
    if why:
        raise KvferryError(why)
    flavour = ForeignEndpoint.decode(endpoint, name).flavour
    return {"flavour": flavour}


def try_read(carrier: Carrier, endpoint: bytes, address: int) -> str:
    """Why not; empty where the bytes came."""
    landing = np.zeros(TRIED_BYTES, dtype=np.uint8)
    try:
        why = read_into(carrier, endpoint, address, landing.ctypes.data)
    except KvferryError as error:
        return str(error)
    finally:
        carrier.close()
    return why or compared(landing)


def read_into(carrier: Carrier, endpoint: bytes, address: int, landing: int) -> str:
    """By a detour, which one; nothing is read then."""
    carrier.register([MemoryRegion(landing, TRIED_BYTES)])
    peer = carrier.connect(endpoint, time.monotonic() + TRY_SECONDS)
    detour = str(getattr(peer, "detour", ""))
    if not detour:
        one = [np.array([v]) for v in (address, landing, TRIED_BYTES)]
        carrier.read(peer, Arrays(*one)).wait(time.monotonic() + TRY_SECONDS)
    return detour


def compared(found: NDArray[np.uint8]) -> str:
    same = np.array_equal(found, pattern())
    return "" if same else "the bytes that arrived are not those that were sent"


def pattern() -> NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, TRIED_BYTES, dtype=np.uint8)


@contextmanager
def second_process(code: str) -> Iterator[Any]:
    """What a process says of the memory that it offers, until the end of this."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as process,
    ):
        try:
            found = _first_words(process)
            if found is None:
                stderr.seek(0)
                how = children.ending(process.poll(), stderr.read())
                raise KvferryError(f"a second process ended by {how}")
            yield found
        finally:
            process.kill()


def _first_words(process: subprocess.Popen[bytes]) -> Any | None:
    """What it says of itself; None where it ended without a word."""
    assert process.stdout
    until, text = time.monotonic() + START_SECONDS, b""
    while True:
        left = max(0.0, until - time.monotonic())
        if not select.select([process.stdout], [], [], left)[0]:
            raise KvferryError(f"a second process did not start within {START_SECONDS:g} seconds")
        more = os.read(process.stdout.fileno(), 1 << 16)
        if not more:
            process.wait(TRY_SECONDS)
            return None
        text += more
        whole = text[: text.rfind(b"\n") + 1].decode(errors="replace")
        found = children.read_reply(whole)
        if found is not None:
            return found


def _own() -> None:
    """The other process's program."""
    memory = pattern()
    kept: list[Carrier] = []

    def offer() -> dict[str, Any]:
        found: dict[str, Any] = {"address": memory.ctypes.data}
        for name in ON_HOST:
            carrier = make_carrier(name, host=LOOPBACK)
            kept.append(carrier)
            carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
            found[name] = carrier.endpoint().hex()
        return found

    if children.say(offer):
        sys.stdin.read()
