"""Notes over real NIXL: they follow the bytes, come once, and only from those who may connect."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import notes_owner
import numpy as np
import pytest
from carrier_peer import copies, soon
from notes_owner import BYTES

from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.library.nixl import MOST_NOTE_BYTES, opened, sealed
from kvferry.carriers.library.shared import LibraryEndpoint
from kvferry.copies import Copies
from kvferry.errors import OutOfBounds, PeerLost, TransferError

RUN_BYTES = 256
HEAR_SECONDS = 30.0


@dataclass
class Side:
    """This process's carrier and memory, and the owner that it writes to."""

    carrier: Any
    memory: np.ndarray
    link: Any
    process: subprocess.Popen[str]
    address: int
    endpoint: bytes

    def every(self, run_bytes: int, count: int = 0) -> Copies:
        """Runs with gaps between them, on both sides."""
        at = np.arange(count or BYTES // run_bytes // 2) * 2 * run_bytes
        return copies(self.memory.ctypes.data + at, self.address + at, np.full(len(at), run_bytes))

    def ask(self, count: int, seconds: float = HEAR_SECONDS) -> list[Any]:
        """So many notes, if they come: each with the bytes then held, by value."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([count, seconds]) + "\n")
        self.process.stdin.flush()
        found: list[Any] = json.loads(self.process.stdout.readline())
        return found


@pytest.fixture
def side() -> Iterator[Side]:
    pytest.importorskip("nixl._api")
    carrier = make_carrier("nixl")
    memory = np.zeros(BYTES, dtype=np.uint8)
    carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    with subprocess.Popen(
        [sys.executable, notes_owner.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            address, raw = process.stdout.readline().split()
            endpoint = bytes.fromhex(raw)
            link = carrier.connect(endpoint, soon())
            yield Side(carrier, memory, link, process, int(address), endpoint)
        finally:
            process.kill()
            carrier.close()


def test_a_note_follows_the_bytes(side: Side) -> None:
    every = side.every(RUN_BYTES)
    held = len(every) * RUN_BYTES
    for value in range(1, 12):
        side.memory[:] = value
        note = bytes([value]) * value
        sent = side.carrier.write(side.link, every, note=note)
        assert side.ask(1) == [[note.hex(), {"0": BYTES - held, str(value): held}]]
        sent.wait(soon())
    back = Copies(every.dst, every.src, every.length)
    side.carrier.read(side.link, back, note=b"read").wait(soon())
    assert [note for note, _ in side.ask(1)] == [b"read".hex()]
    assert side.ask(1, 0.2) == []  # each once


def test_notes_keep_a_peers_order_and_silence_says_nothing(side: Side) -> None:
    few = side.every(4096, 1)
    for number in range(50):
        side.carrier.write(side.link, few).wait(soon())
        side.carrier.write(side.link, few, note=b"%d" % number).wait(soon())
    side.carrier.write(side.link, side.every(4096, 0), note=b"a" * MOST_NOTE_BYTES).wait(soon())
    heard = [bytes.fromhex(note) for note, _ in side.ask(51)]
    assert heard == [b"%d" % number for number in range(50)] + [b"a" * MOST_NOTE_BYTES]


def test_what_fails_says_nothing(side: Side) -> None:
    beyond = copies([side.memory.ctypes.data], [side.address + BYTES], [1])
    with pytest.raises(OutOfBounds):
        side.carrier.write(side.link, beyond, note=b"no").wait(soon())
    for wrong in (b"", b"a" * (MOST_NOTE_BYTES + 1)):
        with pytest.raises(TransferError, match="a note has between 1 and 4096 bytes"):
            side.carrier.write(side.link, side.every(4096, 1), note=wrong)
    assert side.ask(1, 0.3) == []
    side.process.kill()
    side.process.wait()
    with pytest.raises(PeerLost):
        side.carrier.write(side.link, side.every(4096, 1), note=b"anybody?").wait(soon())


def test_strangers_are_not_heard() -> None:
    """An agent that nobody introduced reaches the owner's; what it says is no note."""
    nixl = pytest.importorskip("nixl._api")
    owner, peer = (make_carrier("nixl") for _ in range(2))
    memory = np.zeros(4096, dtype=np.uint8)
    try:
        for carrier in (owner, peer):
            carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        endpoint = LibraryEndpoint.decode(owner.endpoint(), "nixl")
        stranger = nixl.nixl_agent("stranger")
        name = stranger.add_remote_agent(endpoint.address)
        other = LibraryEndpoint.decode(peer.endpoint(), "nixl")
        words = (b"hello", b"", sealed(b"to another", other), sealed(b"cut", endpoint)[:-1])
        for word in words:
            stranger.send_notif(name, word)
        until = soon(HEAR_SECONDS)
        while owner.counters["notes_refused"] < len(words) and time.monotonic() < until:  # type: ignore[attr-defined]
            assert owner.notes() == []  # type: ignore[attr-defined]
        assert owner.counters["notes_refused"] == len(words)  # type: ignore[attr-defined]
        # and what is right is heard, whoever brings it: the endpoint is the capability
        stranger.send_notif(name, sealed(b"from one who was told", endpoint))
        heard: list[bytes] = []
        while not heard and time.monotonic() < until:
            heard = owner.notes()  # type: ignore[attr-defined]
        assert heard == [b"from one who was told"]
    finally:
        owner.close()
        peer.close()
    with pytest.raises(TransferError, match="closed"):
        owner.notes()  # type: ignore[attr-defined]


def test_a_seal_is_for_one_incarnation() -> None:
    endpoint = LibraryEndpoint("nixl", "UCX", "", 1, b"t" * 16, b"i" * 16, [], -1, b"")
    message = sealed(b"note", endpoint)
    assert opened([message], b"t" * 16, b"i" * 16) == ([b"note"], 0)
    assert opened([message], b"t" * 16, b"j" * 16) == ([], 1)  # restarted
    assert opened([message], b"u" * 16, b"i" * 16) == ([], 1)
    for at in range(len(message)):
        changed = bytearray(message)
        changed[at] ^= 1
        assert opened([bytes(changed)], b"t" * 16, b"i" * 16) == ([], 1)
