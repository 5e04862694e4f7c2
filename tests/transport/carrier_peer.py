"""A peer for the carrier tests: a process that owns memory and lets others reach it.

Its memory is a file that the test maps too, at another address, so that bytes can be compared and
changes noticed without the carrier that is under test. Run as a program, it is that process:
`python carrier_peer.py FD CARRIER OPTIONS`. A line on its standard input closes its carrier.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.carriers import Carrier, MemoryRegion, make_carrier
from kvferry.carriers.null import NullCarrier
from kvferry.copies import Copies

PAGE = 4096
BIG = 64 << 20
SMALL = 4 << 20
# Two regions with unregistered pages before, between and after.
FIRST = (PAGE, BIG + 2 * PAGE)  # offset, bytes
SECOND = (FIRST[0] + FIRST[1] + PAGE, SMALL)
TOTAL = SECOND[0] + SECOND[1] + PAGE
SECRET = "a secret for these tests"


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def threads_left(prefix: str) -> list[str]:
    """Threads of that name that do not end soon."""
    until = soon(30)
    while left := [t.name for t in threading.enumerate() if t.name.startswith(prefix)]:
        if time.monotonic() > until:
            return left
        time.sleep(0.01)
    return []


def copies(src: Any, dst: Any, length: Any) -> Copies:
    return Copies(*(np.asarray(a, dtype=np.int64).reshape(-1) for a in (src, dst, length)))


@dataclass
class Memory:
    """Some bytes with the regions above in them."""

    bytes: np.ndarray

    @classmethod
    def anonymous(cls) -> Memory:
        return cls(np.zeros(TOTAL, dtype=np.uint8))

    @classmethod
    def shared(cls, fd: int) -> Memory:
        return cls(np.frombuffer(mmap.mmap(fd, TOTAL), dtype=np.uint8))

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def regions(self) -> list[MemoryRegion]:
        return [MemoryRegion(self.address + at, size) for at, size in (FIRST, SECOND)]


@dataclass
class Peer:
    """The owner, as a test sees it. `address` is in the owner's address space."""

    memory: Memory  # the same bytes, mapped here
    address: int
    endpoint: bytes
    process: subprocess.Popen[str] | None = None  # None: in this process
    carrier: Carrier | None = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        else:
            assert self.carrier is not None
            self.carrier.close()

    def close_carrier(self) -> None:
        """Its process goes on."""
        assert self.process and self.process.stdin and self.process.stdout
        self.process.stdin.write("close\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "closed\n"


@dataclass(frozen=True)
class Kind:
    """A carrier under test: how each side is made."""

    name: str
    owner: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    second: int = 200_000  # descriptors that take it about a second, or less

    def carrier(self) -> Carrier:
        return NullCarrier() if self.name == "null" else make_carrier(self.name, **self.user)


KINDS = {
    "null": Kind("null"),
    "local": Kind("local"),
    "tcp": Kind(
        "tcp",
        {"secret": SECRET, "host": "127.0.0.1", "writable": True},
        {"secret": SECRET, "host": "127.0.0.1"},
    ),
    "tcp-open": Kind("tcp", {"writable": True}),
    "mooncake": Kind("mooncake", second=40_000),
    "nixl": Kind("nixl"),
}


@contextmanager
def owner(kind: Kind) -> Iterator[Peer]:
    if kind.name == "null":
        memory, carrier = Memory.anonymous(), NullCarrier()
        carrier.register(memory.regions())
        try:
            yield Peer(memory, memory.address, carrier.endpoint(), carrier=carrier)
        finally:
            carrier.close()
        return
    fd = os.memfd_create("kvferry-test")
    os.ftruncate(fd, TOTAL)
    with subprocess.Popen(
        [sys.executable, __file__, str(fd), kind.name, json.dumps(kind.owner)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[fd],
    ) as process:
        try:
            assert process.stdout
            address, endpoint = process.stdout.readline().split()
            yield Peer(Memory.shared(fd), int(address), bytes.fromhex(endpoint), process)
        finally:
            process.kill()
            os.close(fd)


@contextmanager
def user(kind: Kind, memory: Memory) -> Iterator[Carrier]:
    carrier = kind.carrier()
    carrier.register(memory.regions())
    try:
        yield carrier
    finally:
        carrier.close()


def main() -> None:
    memory = Memory.shared(int(sys.argv[1]))
    carrier = make_carrier(sys.argv[2], **json.loads(sys.argv[3]))
    carrier.register(memory.regions())
    print(memory.address, carrier.endpoint().hex(), flush=True)
    if sys.stdin.readline():
        carrier.close()
        print("closed", flush=True)
        sys.stdin.readline()
    carrier.close()


if __name__ == "__main__":
    main()
