"""Checksums: bytes that were damaged on the way are noticed, and nothing of them is used."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import xxhash

from handover_peers import LOOPBACK, Prompt, Spec, consumer, producer, side_by_side
from kvferry.carriers import MemoryRegion
from kvferry.carriers.host import HostMemory
from kvferry.carriers.null import Faults
from kvferry.carriers.tcp.carrier import TcpEndpoint
from kvferry.copies import table_bytes
from kvferry.errors import OutOfBounds, ProtocolError
from kvferry.handover.checksum import MIX128, XXH3, decode_runs, digest
from kvferry.handover.holds import Closed
from kvferry.net.messages import VERSION, Refused, Sum, Summed, Text
from kvferry.net.rpc import Caller
from waiting import wait_until

PROMPT = Prompt(1, 200)
SOURCE = Spec("p", "tp=2,block=16", carrier="null")
SINK = Spec("d", "tp=1,block=16", carrier="null", checksums=True)


@pytest.mark.parametrize("copy", [1, 5, None])
def test_a_bit_that_flips_fails_the_load(copy: int | None) -> None:
    with side_by_side(SOURCE, target=SINK) as (source, sink):
        sink.racks[0].carrier.faults = Faults(corrupt_at=copy)
        source.fill(PROMPT)
        source.open(PROMPT)
        (loaded,) = sink.load(source.ticket(PROMPT), PROMPT)
        if copy is None:
            assert loaded.ok
            assert sink.wrong_bytes(PROMPT) == 0
            assert not sink.ranks[0].busy
            assert loaded.bytes > 0
            assert set(loaded.seconds) >= {"meet", "claim", "bind", "read", "check", "confirm"}
        else:
            assert loaded.kind == "ChecksumError" and loaded.error.startswith("rank ")
            assert "arrived differently" in loaded.error
            assert loaded.bytes == 0
            closed: list[Closed] = []  # a hold is closed a little earlier than it is reported

            def reported() -> bool:
                closed.extend(itertools.chain(*source.closed()))
                return len(closed) == len(source.ranks)

            wait_until(reported)
            assert [one.outcomes for one in closed] == [{"failed": 1}, {"failed": 1}]


@pytest.mark.parametrize("mixes", [(True, True), (True, False), (False, True)])
def test_the_quickest_that_both_ends_have(mixes: tuple[bool, bool]) -> None:
    """A GPU's checksum where both name it in the handshake, else the one that all have."""
    expected = "mix128" if all(mixes) else "xxh3"
    theirs, ours = (replace(one, mixes=it) for one, it in zip((SOURCE, SINK), mixes, strict=True))
    for flipped in (None, 5):
        with side_by_side(theirs, target=ours) as (source, sink):
            sink.racks[0].carrier.faults = Faults(corrupt_at=flipped)
            source.fill(PROMPT)
            source.open(PROMPT)
            (loaded,) = sink.load(source.ticket(PROMPT), PROMPT)
            assert loaded.ok == (flipped is None)
            assert loaded.ok or f"({expected} " in loaded.error


def test_without_checksums_the_same_bit_goes_unseen() -> None:
    """What they are for; and that the tests above flip a bit that matters."""
    with side_by_side(SOURCE, target=replace(SINK, checksums=False)) as (source, sink):
        sink.racks[0].carrier.faults = Faults(corrupt_at=5)
        source.fill(PROMPT)
        source.open(PROMPT)
        (loaded,) = sink.load(source.ticket(PROMPT), PROMPT)
        assert loaded.ok
        assert sink.wrong_bytes(PROMPT) == 1


class Wire(threading.Thread):
    """Passes a tcp carrier's bytes on, and flips one bit of what the server sends."""

    def __init__(self, port: int, flip_at: int) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        self._to, self._flip_at, self.flipped = port, flip_at, 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((LOOPBACK, self._to))
                for a, b, flip in ((near, far, -1), (far, near, self._flip_at)):
                    threading.Thread(target=self._pass, args=(a, b, flip), daemon=True).start()

    def _pass(self, a: socket.socket, b: socket.socket, flip: int) -> None:
        done = 0
        with contextlib.suppress(OSError):
            while data := bytearray(a.recv(1 << 16)):
                if done <= flip < done + len(data):
                    data[flip - done] ^= 4
                    self.flipped += 1
                done += len(data)
                b.sendall(data)
        with contextlib.suppress(OSError):
            b.shutdown(socket.SHUT_RDWR)  # the other direction ends too, and closes its source
        a.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize("checksums", [True, False])
def test_a_byte_flipped_in_flight(checksums: bool) -> None:
    source = Spec(
        "p", "tp=1,block=16", carrier="tcp", secret="a secret for these tests", told=False
    )
    sink = Spec(
        "d", "tp=1,block=32", carrier="tcp", secret="a secret for these tests", checksums=checksums
    )
    with producer(source) as peer:
        (info,) = peer.infos
        real = TcpEndpoint.decode(info.carriers["tcp"])
        wire = Wire(real.port, flip_at=20_000)
        tapped = msgspec.structs.replace(real, port=wire.port)
        carriers = {"tcp": msgspec.msgpack.encode(tapped)}
        peer.ask("tell", [msgspec.structs.replace(info, carriers=carriers)])
        with consumer(sink, source, alone=False) as user:
            (loaded,) = user.load(peer.hold(PROMPT), PROMPT)
            assert wire.flipped == 1
            if checksums:
                assert loaded.kind == "ChecksumError"
            else:
                assert loaded.ok
                assert user.wrong_bytes(PROMPT) == 1
        wire.close()


def test_what_a_source_refuses_to_digest() -> None:
    with side_by_side(SOURCE, target=SINK) as (source, sink):
        source.fill(PROMPT)
        source.open(PROMPT)
        caller = Caller(sink.sockets)
        rank, rack = source.ranks[0], source.racks[0]
        base = int(rack.memory.bases[0])

        def ask(address: list[int], length: list[int], hold: Text = "hold-1") -> object:
            runs = table_bytes(np.array(address), np.array(length))
            request = Sum(VERSION, rank.incarnation, hold, runs)
            call = caller.call(f"{LOOPBACK}:{rank.port}", request, time.monotonic() + 20)
            return call.result(20)

        good = ask([base, base + 64], [10, 20])
        assert isinstance(good, Summed)
        assert good.digest == digest(
            rack.host_memory(), np.array([base, base + 64]), np.array([10, 20])
        )
        for address, length in (
            ([base - 1], [1]),
            ([0], [8]),
            ([-1], [8]),
            ([base], [-1]),
            ([base], [0]),
            ([base], [1 << 62]),
            ([base] * 3, [XXH3.slice_bytes] * 3),
            ([], []),
        ):
            refused = ask(address, length)
            assert isinstance(refused, Refused), (address, length)
            assert refused.reason == "malformed"
        runs = table_bytes(np.array([base]), np.array([8]))
        for algorithm in ("mix128", "md5", ""):  # not of this memory, not of any
            request = Sum(VERSION, rank.incarnation, "hold-1", runs, algorithm)
            call = caller.call(f"{LOOPBACK}:{rank.port}", request, time.monotonic() + 20)
            refused = call.result(20)
            assert isinstance(refused, Refused) and refused.reason == "malformed"
        unknown = ask([base], [8], "another hold")
        assert isinstance(unknown, Refused)
        assert unknown.reason == "closed"
        source.withdraw("hold-1")
        closed = ask([base], [8])
        assert isinstance(closed, Refused)
        assert closed.reason == "closed"
        assert rank.counters["internal errors"] == 0
        caller.close()


def test_a_digest_depends_on_order_and_every_byte() -> None:
    memory = np.arange(4096, dtype=np.uint32).view(np.uint8)
    there = HostMemory([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    runs = memory.ctypes.data + np.array([0, 100, 7000])
    length = np.array([50, 1, 4000])
    whole = digest(there, runs, length)
    assert whole != digest(there, runs[::-1].copy(), length[::-1].copy())
    assert whole == digest(
        there, np.append(runs[:2], [runs[2], runs[2] + 1]), np.array([50, 1, 1, 3999])
    )
    memory[10_999] ^= 1
    assert whole != digest(there, runs, length)
    with pytest.raises(OutOfBounds):
        digest(there, runs, length * 1000)
    for raw in (b"", b"1234567", bytes(16)):
        with pytest.raises(ProtocolError):
            decode_runs(raw)


def by_hand(runs: list[bytes]) -> bytes:
    """`mix128` in plain integers."""
    mask, sums, number = (1 << 64) - 1, [0, 0], 0
    for run in runs:
        for at in range(0, len(run), 8):
            word = int.from_bytes(run[at : at + 8].ljust(8, b"\0"), "little")
            h = word ^ ((number * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & mask)
            h ^= h >> 32
            h = h * 0xFF51AFD7ED558CCD & mask
            h ^= h >> 29
            h = h * 0xC4CEB9FE1A85EC53 & mask
            h ^= h >> 32
            g = (h ^ (h >> 31)) * 0xBF58476D1CE4E5B9 & mask
            g ^= g >> 33
            sums = [(sums[0] + h) & mask, (sums[1] + g) & mask]
            number += 1
    lengths = b"".join(len(run).to_bytes(8, "little") for run in runs)
    sums_bytes = b"".join(s.to_bytes(8, "little") for s in sums)
    return xxhash.xxh3_128_digest(sums_bytes + lengths)


@pytest.mark.parametrize("grain", [16, 8, 1])
def test_mix128_is_what_it_says(grain: int) -> None:
    rng = np.random.default_rng(grain)
    memory = rng.integers(0, 256, 3 << 20, dtype=np.uint8)
    there = HostMemory([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    lengths = np.array([grain, 3 * grain, 304, (1 << 20) + 16 * grain, 4096])  # one beyond a chunk
    starts = np.array([0, 1 << 10, 2 << 10, 4 << 10, 2 << 20])
    runs = [memory[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)]
    found = digest(there, starts + memory.ctypes.data, lengths, MIX128)
    assert found == by_hand(runs) and len(found) == 16
    others = {
        digest(there, starts[::-1] + memory.ctypes.data, lengths[::-1], MIX128),  # other order
        digest(there, starts[:-1] + memory.ctypes.data, lengths[:-1], MIX128),
        digest(there, starts[:1] + memory.ctypes.data, lengths[:1], MIX128),
    }
    cut = np.concatenate([lengths[:-1], [2048, 2048]])  # the same bytes, cut elsewhere
    at = np.concatenate([starts, [(2 << 20) + 2048]]) + memory.ctypes.data
    others.add(digest(there, at, cut, MIX128))
    for bit in (0, 8 * (2 << 10) + 3, 8 * ((2 << 20) + 4095) + 7):
        memory[bit // 8] ^= 1 << bit % 8
        others.add(digest(there, starts + memory.ctypes.data, lengths, MIX128))
        memory[bit // 8] ^= 1 << bit % 8
    words = memory[4 << 10 : (4 << 10) + 16].view(np.uint64)
    words[:] = words[::-1].copy()  # two words change places
    others.add(digest(there, starts + memory.ctypes.data, lengths, MIX128))
    assert len(others) == 8 and found not in others
