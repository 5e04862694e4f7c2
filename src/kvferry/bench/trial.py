# SPDX-License-Identifier: Apache-2.0
"""Try a carrier: one process owns memory, another one connects to it, reads and compares.

A carrier's library may print, hang, or end its process. So each side of a try is a child process
(`child`). The question goes to the child's standard input as JSON, because it may hold a secret.
The answer comes back as one line on a separate pipe. If a child does not answer, the report says
how it ended, with the last line that it printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from ctypes import c_size_t, c_uint64
from subprocess import PIPE, Popen
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.cuda.driver import device, driver
from kvferry.copies import Copies
from kvferry.errors import HandoverError, KvferryError, text_of

Program = Callable[[dict[str, Any]], Generator[Any]]

START_SECONDS = 30.0  # for a child to start and to load a library
TRY_SECONDS = 10.0  # for one endpoint
CARRIER_SECONDS = 30.0  # for all endpoints of one carrier
TRIED_BYTES = 1 << 20
LAST_WORDS = 300  # characters


class Tried(msgspec.Struct, frozen=True):
    """How a carrier reaches memory of another process, or why it does not.

    `carriers.auto` gets it in place of the carrier and of its connection.
    """

    name: str
    why_not: str = ""
    flavour: str = ""  # a library's protocol or backends, which both sides must share
    milliseconds: float = 0.0  # to connect

    def connect(self, endpoint: bytes, deadline: float) -> Tried:
        if self.why_not:
            raise HandoverError(self.why_not)
        return self

    def disconnect(self, peer: Tried) -> None:
        """Nothing to close."""


def try_here(name: str, options: Mapping[str, Any]) -> Tried:
    """Try a carrier between two processes of this host."""
    try:
        with child(own, {"name": name, "options": options}, START_SECONDS) as offer:
            endpoints = {name: bytes.fromhex(offer["endpoint"])}
            return try_endpoints(name, options, endpoints, offer["address"])[name]
    except KvferryError as error:
        return Tried(name, str(error))


def try_endpoints(
    name: str,
    options: Mapping[str, Any],
    endpoints: Mapping[str, bytes],
    address: int | None = None,
) -> dict[str, Tried]:
    """Try a carrier with each endpoint. `address`: memory there to read and compare."""
    question = {
        "name": name,
        "options": options,
        "endpoints": {where: endpoint.hex() for where, endpoint in endpoints.items()},
        "address": address,
    }
    try:
        with child(reach, question, START_SECONDS + CARRIER_SECONDS) as found:
            return msgspec.convert(found, dict[str, Tried])
    except KvferryError as error:
        return dict.fromkeys(endpoints, Tried(name, str(error)))


def own(question: dict[str, Any]) -> Generator[Any]:
    """The program of the process that owns the memory."""
    name, data = question["name"], _pattern()
    address = _place(name, data)
    carrier = make_carrier(name, **question["options"])
    carrier.register([MemoryRegion(address, TRIED_BYTES)])
    yield {"address": address, "endpoint": carrier.endpoint().hex()}


def reach(question: dict[str, Any]) -> Generator[Any]:
    """The program of the process that connects."""
    until = time.monotonic() + CARRIER_SECONDS
    carrier = make_carrier(question["name"], **question["options"])
    found = {
        where: _connect(carrier, bytes.fromhex(endpoint), until, question["address"])
        for where, endpoint in question["endpoints"].items()
    }
    yield msgspec.to_builtins(found)


def _connect(carrier: Any, endpoint: bytes, until: float, address: int | None) -> Tried:
    begin = time.monotonic()
    deadline = min(begin + TRY_SECONDS, until)
    try:
        peer = carrier.connect(endpoint, deadline)
        took = (time.monotonic() - begin) * 1e3
        if address is not None:
            _compare(carrier, peer, address, deadline)
    except Exception as error:  # the library's errors too
        return Tried(carrier.name, text_of(error))
    with contextlib.suppress(Exception):
        carrier.disconnect(peer)
    return Tried(carrier.name, "", carrier.flavour, took)


def _compare(carrier: Any, peer: Any, address: int, deadline: float) -> None:
    landing = np.zeros(TRIED_BYTES, dtype=np.uint8)
    place = _place(carrier.name, landing)
    carrier.register([MemoryRegion(place, TRIED_BYTES)])
    copies = Copies(*(np.array([v]) for v in (address, place, TRIED_BYTES)))
    carrier.read(peer, copies).wait(deadline)
    if carrier.name == "cuda":
        _copy(landing.ctypes.data, place)
    if not np.array_equal(landing, _pattern()):
        raise KvferryError("the bytes that arrived are not those that were sent")


def _pattern() -> NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, TRIED_BYTES, dtype=np.uint8)


def _place(name: str, data: NDArray[np.uint8]) -> int:
    """The address of these bytes; for cuda, of a copy on GPU 0."""
    if name != "cuda":
        return int(data.ctypes.data)
    with device(0).current():
        address = device(0).allocate(TRIED_BYTES)
    _copy(address, data.ctypes.data)
    return address


def _copy(destination: int, source: int) -> None:
    with device(0).current():
        driver().call("cuMemcpy", c_uint64(destination), c_uint64(source), c_size_t(TRIED_BYTES))


@contextlib.contextmanager
def child(program: Program, question: dict[str, Any], seconds: float) -> Iterator[Any]:
    """The value that `program(question)` yields in a child process, which lives as long as the
    block. If the child has no answer after `seconds`, its own alarm ends it."""
    name = program.__name__
    # Output of libraries goes to standard error; only the answer goes to the pipe.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import os, signal; "
        f"signal.alarm({seconds:.0f}); pipe = os.dup(1); os.dup2(2, 1); "
        f"from {program.__module__} import {name}; from {__name__} import run; run({name}, pipe)"
    )
    command = [sys.executable, "-P", "-c", code]  # -P: no modules from the working directory
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        Popen(command, stdin=PIPE, stdout=PIPE, stderr=stderr, errors="replace") as process,
    ):
        try:
            assert process.stdin and process.stdout
            with contextlib.suppress(BrokenPipeError):  # the child has ended; handled below
                os.write(process.stdin.fileno(), json.dumps(question).encode() + b"\n")
            said = process.stdout.readline()
            if not said:
                raise KvferryError(_ending(process.wait(), stderr))
            reply = json.loads(said)
            if "error" in reply:
                raise KvferryError(reply["error"])
            yield reply["answer"]
        finally:
            process.kill()


def run(program: Program, pipe: int) -> None:
    """A child's main function. The child keeps its memory until its parent kills it, or ends."""
    try:
        running = program(json.loads(sys.stdin.readline()))
        reply = {"answer": next(running)}
    except Exception as error:  # a library's errors too
        reply = {"error": text_of(error)}
    os.write(pipe, json.dumps(reply).encode() + b"\n")
    signal.alarm(0)
    sys.stdin.read()
    os._exit(0)  # without waiting for a library's threads


def _ending(code: int, stderr: IO[str]) -> str:
    if code == -signal.SIGALRM:
        return "no answer in time"
    stderr.seek(0)
    words = stderr.read().strip().rpartition("\n")[2][-LAST_WORDS:]
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"the process that tried it ended by {how}" + (f": {words}" if words else "")
