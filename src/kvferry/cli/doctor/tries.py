"""Tries every carrier on this host: one process owns memory, another one reads and compares it.

A carrier's library may print, hang, or end its process. So each try runs in child processes
(`child`). The question goes to a child's standard input as JSON, because it may hold a secret. The
answer comes back as one marked line of standard output. If a child does not answer, the report says
how it ended, with the last line of its standard error.
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
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_size_t, c_uint64
from subprocess import PIPE, Popen
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.auto import CARRIERS, ENGINES
from kvferry.carriers.cuda.driver import device, driver
from kvferry.carriers.library.shared import LibraryEndpoint
from kvferry.cli.doctor.checks import HOW_TO_INSTALL, Finding, Settings, cuda, version_of
from kvferry.copies import Copies
from kvferry.errors import HandoverError, KvferryError

Program = Callable[[dict[str, Any]], Generator[Any]]

START_SECONDS = 30.0  # for a child to start and to load a library
TRY_SECONDS = 10.0  # for one endpoint
CARRIER_SECONDS = 30.0  # for all endpoints of one carrier
HERE = "here"
TRIED_BYTES = 1 << 20
MARK = "kvferry doctor: "
LAST_WORDS = 300  # characters
# Carriers to try, and advice if one fails.
ADVICE = {
    "local": "two engines of one host use tcp instead, which is slower; containers need one pid "
    "namespace and the ptrace permission (--cap-add SYS_PTRACE)",
    "tcp": "allow TCP connections over the loopback interface and between hosts",
    "cuda": "caches on GPUs move by tcp instead, which stages them in host memory and is slower",
    "nixl": "only needed if it is configured; see --options and --host",
    "mooncake": "only needed if it is configured; see --options and --host",
}


class Tried(msgspec.Struct, frozen=True):
    """How a carrier reaches memory of another process, or why it does not.

    `carriers.auto` gets it in place of the carrier and of its connection.
    """

    name: str
    why_not: str = ""
    detour: str = ""  # why it falls back to tcp
    flavour: str = ""  # a library's protocol or backends, which both sides must share
    milliseconds: float = 0.0  # to connect

    def connect(self, endpoint: bytes, deadline: float) -> Tried:
        if self.why_not:
            raise HandoverError(self.why_not)
        return self

    def detour_to(self, peer: Tried) -> str:
        return self.detour

    def disconnect(self, peer: Tried) -> None:
        """Nothing to close."""


def try_host(settings: Settings) -> dict[str, Tried]:
    """Try every carrier, with the options that an engine here would give it."""
    with ThreadPoolExecutor(len(ADVICE)) as pool:
        return {tried.name: tried for tried in pool.map(lambda n: _try(n, settings), ADVICE)}


def reachable(settings: Settings, tried: Mapping[str, Tried]) -> Iterator[Finding]:
    for name, one in tried.items():
        named = settings.names(name)
        if named or not missing(name):  # `installed` reports what is missing
            must = named or name == "tcp"
            yield finding(name, one, must, "1 MiB read and compared")


def finding(what: str, tried: Tried, must: bool, good: str) -> Finding:
    name, why = tried.name, tried.why_not or tried.detour
    if not why:
        return Finding(what, "ok", good)
    advice = ADVICE.get(name, "run the same kvferry on both")
    if tried.detour:
        return Finding(what, "missing", f"by tcp only: {why}", advice)
    if tried.flavour:
        advice = f"the peer uses {as_configured(tried)}"
    elif missing(name):
        advice = HOW_TO_INSTALL.get(name, advice)
    return Finding(what, "broken" if must else "missing", why, advice)


def missing(name: str) -> str:
    """Why this host cannot open that carrier at all; empty if it can."""
    if name not in CARRIERS:
        return "this kvferry has no such carrier"
    if name in HOW_TO_INSTALL and version_of(name) is None:
        return "its library is not installed"
    return cuda().found if name == "cuda" and cuda().state != "ok" else ""


def flavour_of(name: str, endpoint: bytes) -> str:
    return LibraryEndpoint.decode(endpoint, name).flavour if name in ENGINES else ""


def options_of(name: str, flavour: str) -> dict[str, Any]:
    """The options that give a library's carrier that flavour."""
    return {"backends": flavour.split(",")} if name == "nixl" else {"protocol": flavour}


def as_configured(tried: Tried) -> str:
    options = {tried.name: options_of(tried.name, tried.flavour)}
    return f'"carrier_options": {json.dumps(options)}'


def try_offers(
    name: str, offers: Mapping[str, bytes], settings: Settings, address: int | None = None
) -> dict[str, Tried]:
    """Try one carrier with every offered endpoint. `address`: memory to read and compare."""
    question = {
        "name": name,
        "options": settings.opening(name),
        "configured": name in settings.options,
        "offers": {where: endpoint.hex() for where, endpoint in offers.items()},
        "address": address,
    }
    start = in_process if address is not None and name in ("local", "tcp") else child
    try:
        if why := missing(name):
            raise KvferryError(why)
        with start(reach, question, START_SECONDS + CARRIER_SECONDS) as found:
            return msgspec.convert(found, dict[str, Tried])
    except KvferryError as error:
        return dict.fromkeys(offers, Tried(name, str(error)))


def _try(name: str, settings: Settings) -> Tried:
    if why := missing(name):
        return Tried(name, why)
    question = {"name": name, "options": settings.opening(name)}
    try:
        with child(own, question, START_SECONDS) as offer:
            offers = {HERE: bytes.fromhex(offer["endpoint"])}
            return try_offers(name, offers, settings, offer["address"])[HERE]
    except KvferryError as error:
        return Tried(name, str(error))


def own(question: dict[str, Any]) -> Generator[Any]:
    """The program of the process that owns the memory."""
    name, data = question["name"], _pattern()
    address = _place(name, data)
    carrier = make_carrier(name, **question["options"])
    carrier.register([MemoryRegion(address, TRIED_BYTES)])
    yield {"address": address, "endpoint": carrier.endpoint().hex()}


def reach(question: dict[str, Any]) -> Generator[Any]:
    """The program of the process that connects. Without options, a library uses the peer's."""
    name, options = question["name"], question["options"]
    offers = {where: bytes.fromhex(endpoint) for where, endpoint in question["offers"].items()}
    if name in ENGINES and not question["configured"]:
        options |= options_of(name, flavour_of(name, next(iter(offers.values()))))
    until = time.monotonic() + CARRIER_SECONDS
    with contextlib.closing(make_carrier(name, **options)) as carrier:
        found = {w: _connect(carrier, raw, until, question["address"]) for w, raw in offers.items()}
        yield msgspec.to_builtins(found)


def _connect(carrier: Any, endpoint: bytes, until: float, address: int | None) -> Tried:
    begin, name, flavour = time.monotonic(), carrier.name, ""
    deadline = min(begin + TRY_SECONDS, until)
    try:
        flavour = flavour_of(name, endpoint)
        peer = carrier.connect(endpoint, deadline)
        took = (time.monotonic() - begin) * 1e3
        if address is not None:
            _compare(carrier, peer, address, deadline)
    except Exception as error:  # also one of its library
        return Tried(name, text_of(error), flavour="" if address else flavour)
    with contextlib.suppress(Exception):
        carrier.disconnect(peer)
    return Tried(name, "", carrier.detour_to(peer), flavour, took)


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
def in_process(program: Program, question: dict[str, Any], seconds: float) -> Iterator[Any]:
    with contextlib.closing(program(question)) as running:
        yield next(running)


@contextlib.contextmanager
def child(program: Program, question: dict[str, Any], seconds: float) -> Iterator[Any]:
    """The value that `program(question)` yields in a child process, which lives as long as the
    block. If the child has no answer after `seconds`, its own alarm ends it."""
    name = program.__name__
    code = (
        f"import signal; signal.alarm({seconds:.0f}); from {program.__module__} import {name}; "
        f"from {__name__} import run; run({name})"
    )
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        Popen(
            [sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, stderr=stderr, errors="replace"
        ) as process,
    ):
        try:
            assert process.stdin and process.stdout
            with contextlib.suppress(BrokenPipeError):  # the child has ended; handled below
                os.write(process.stdin.fileno(), json.dumps(question).encode() + b"\n")
            said = next((line for line in process.stdout if line.startswith(MARK)), "")
            if not said:
                raise KvferryError(_ending(process.wait(), stderr))
            reply = json.loads(said.removeprefix(MARK))
            if "error" in reply:
                raise KvferryError(reply["error"])
            yield reply["answer"]
        finally:
            process.kill()


def run(program: Program) -> None:
    """A child's main function. The child keeps its memory until its parent kills it, or ends."""
    try:
        running = program(json.loads(sys.stdin.readline()))
        reply = {"answer": next(running)}
    except Exception as error:  # also one of a library
        reply = {"error": text_of(error)}
    print("\n" + MARK + json.dumps(reply), flush=True)
    signal.alarm(0)
    sys.stdin.read()
    os._exit(0)  # without waiting for a library's threads


def text_of(error: Exception) -> str:
    return str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"


def _ending(code: int, stderr: IO[str]) -> str:
    if code == -signal.SIGALRM:
        return "no answer in time"
    stderr.seek(0)
    words = stderr.read().strip().rpartition("\n")[2][-LAST_WORDS:]
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"the process that tried it ended by {how}" + (f": {words}" if words else "")
