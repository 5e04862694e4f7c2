"""What `kvferry bench transport` compares: our carriers, and the libraries called directly.

A mover is made in both processes on their own memory. The owner's tells where it is; the other one
connects and prepares batches, so that only moving is timed:

    there = MOVERS["nixl"](memory); endpoint = there.endpoint()
    here = MOVERS["nixl"](landing); here.connect(endpoint)
    go = here.prepare("read", copies); go()

`raw-mooncake` and `raw-nixl` are the libraries as their own examples use them, with the batches
that our carriers make. Their batches are cut beforehand; the lists or descriptors that the library
takes are made as they are needed, by its own functions, as for every new request.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransferError
from kvferry.transport import foreign_library, mooncake, mooncake_engine, nixl, nixl_agent
from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.foreign_peer import batches
from kvferry.transport.regions import Arrays
from kvferry.transport.registry import make_carrier

LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 60.0
# Of one batch: what the slower ones move in about a tenth of a second.
MOST_DESCRIPTORS = {
    "mooncake": 1 << 11,
    "raw-mooncake": 1 << 11,
    "nixl": 1 << 15,
    "raw-nixl": 1 << 15,
}
QUIET = {"MC_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}

Bytes = NDArray[np.uint8]


class Mover(Protocol):
    def endpoint(self) -> bytes: ...
    def connect(self, endpoint: bytes) -> None: ...
    def prepare(self, op: str, copies: Arrays) -> Callable[[], None]: ...
    def close(self) -> None: ...


class OurCarrier:
    """One of kvferry's."""

    def __init__(self, name: str, memory: Bytes) -> None:
        options = {"writable": True} if name in ("local", "tcp") else {}
        self._carrier: Any = make_carrier(name, host=LOOPBACK, **options)
        self._carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        self._peer: Any = None

    @property
    def detour(self) -> str:
        """Why it goes to its peer by another carrier; empty where it does not."""
        return getattr(self._peer, "detour", "")

    def endpoint(self) -> bytes:
        endpoint: bytes = self._carrier.endpoint()
        return endpoint

    def connect(self, endpoint: bytes) -> None:
        self._peer = self._carrier.connect(endpoint, time.monotonic() + WAIT_SECONDS)

    def prepare(self, op: str, copies: Arrays) -> Callable[[], None]:
        start = self._carrier.read if op == "read" else self._carrier.write
        return lambda: start(self._peer, copies).wait(time.monotonic() + WAIT_SECONDS)

    def library(self, op: str, copies: Arrays) -> Callable[[], None]:
        """The same over the library alone: the carrier's own engine, called directly."""
        engine, peer = self.engine()
        calls = mooncake_calls if self._carrier.name == "mooncake" else nixl_calls
        return calls(engine, peer, op, copies)

    def engine(self) -> tuple[Any, Any]:
        """The library's engine in this carrier, and its name for the peer."""
        carrier = self._carrier
        engine = carrier._engine if carrier.name == "mooncake" else carrier._agent
        return engine, self._peer.handle.name

    def close(self) -> None:
        self._carrier.close()


class RawMooncake:
    """Mooncake's engine: one blocking call after another."""

    def __init__(self, memory: Bytes) -> None:
        self._engine = mooncake_engine.engine_class()()
        if self._engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferError("Mooncake's engine does not start")
        self._memory = memory.ctypes.data
        if self._engine.register_memory(self._memory, memory.nbytes) != 0:
            raise TransferError("Mooncake's engine does not register the memory")
        self._target = ""

    def endpoint(self) -> bytes:
        return f"{LOOPBACK}:{self._engine.get_rpc_port()}".encode()

    def connect(self, endpoint: bytes) -> None:
        self._target = endpoint.decode()

    def prepare(self, op: str, copies: Arrays) -> Callable[[], None]:
        return mooncake_calls(self._engine, self._target, op, copies)

    def close(self) -> None:
        self._engine.unregister_memory(self._memory)
        self._engine = None


class RawNixl:
    """A NIXL agent with UCX: a request for each batch, asked about until it is done."""

    def __init__(self, memory: Bytes) -> None:
        api = nixl_agent.api()
        config = api.nixl_agent_config(backends=["UCX"])
        with nixl_agent.ucx_settings(loopback=True):
            self._agent = api.nixl_agent(f"raw-{os.getpid()}", config)
        self._registered = self._agent.register_memory(
            [(memory.ctypes.data, memory.nbytes, 0, "")], mem_type=nixl_agent.MEMORY
        )
        self._peer: Any = None

    def endpoint(self) -> bytes:
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, endpoint: bytes) -> None:
        self._peer = self._agent.add_remote_agent(endpoint)

    def prepare(self, op: str, copies: Arrays) -> Callable[[], None]:
        return nixl_calls(self._agent, self._peer, op, copies)

    def close(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
        self._agent = None


def mooncake_calls(engine: Any, target: str, op: str, copies: Arrays) -> Callable[[], None]:
    call = getattr(engine, f"batch_transfer_sync_{op}")
    parts = list(batches(copies, mooncake.BATCH_DESCRIPTORS, mooncake.BATCH_BYTES))

    def go() -> None:
        for part in parts:
            local, remote = _sides(op, part)
            if call(target, local.tolist(), remote.tolist(), part.length.tolist()) != 0:
                raise TransferError("raw Mooncake failed a batch")

    return go


def nixl_calls(agent: Any, peer: Any, op: str, copies: Arrays) -> Callable[[], None]:
    parts = list(batches(copies, nixl.BATCH_DESCRIPTORS, nixl.BATCH_BYTES))

    def go() -> None:
        for part in parts:
            local, remote = (
                agent.get_xfer_descs(nixl_agent.rows(side, part.length), mem_type=nixl_agent.MEMORY)
                for side in _sides(op, part)
            )
            handle = agent.initialize_xfer(op.upper(), local, remote, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise TransferError("raw NIXL failed a batch")

    return go


def _sides(op: str, part: Arrays) -> tuple[Ints, Ints]:
    """Addresses here and there."""
    return (part.dst, part.src) if op == "read" else (part.src, part.dst)


def _ours(name: str) -> Callable[[Bytes], Mover]:
    return lambda memory: OurCarrier(name, memory)


# In the order of their turns: a carrier and its library side by side.
MOVERS: dict[str, Callable[[Bytes], Mover]] = {
    "local": _ours("local"),
    "tcp": _ours("tcp"),
    "mooncake": _ours("mooncake"),
    "raw-mooncake": RawMooncake,
    "nixl": _ours("nixl"),
    "raw-nixl": RawNixl,
}
# Opened by their owners for pairs with their libraries, over one engine.
IN_PAIRS = ("mooncake", "nixl")
# The progress threads of plain NIXL agents spin, on both sides, whoever moves: measured alone.
ALONE = ("raw-nixl",)


def installed() -> dict[str, str]:
    """Why a mover cannot run here, by name; empty where it can."""
    reasons = {}
    for name in MOVERS:
        reasons[name] = ""
        try:
            if "mooncake" in name:
                mooncake_engine.engine_class()
            if "nixl" in name:
                nixl_agent.api()
        except TransferError as error:
            reasons[name] = str(error)
    return reasons


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """The libraries log every connection unless told otherwise before they are loaded."""
    ours = {name: value for name, value in QUIET.items() if name not in os.environ}
    with foreign_library.environment(ours):
        yield
