"""Checksums over a store that keeps none: every flipped byte is found, whatever is read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_pool_faults import all_ended, cases, sequence, simple, written
from test_pool_staged import FAR, FarMemory

from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.host import HostMemory
from kvferry.pool import wrappers
from kvferry.pool.store import Bools, Outcome, Slices
from kvferry.pool.wrappers import HEADER_BYTES, CheckedStore
from kvferry.verify.oracle import Oracle
from pool_engine import SmallEngine
from waiting import soon


class PlainStore:
    """Bytes in a dictionary, as they come; nothing is checked."""

    name = "plain"

    def __init__(self, objects: dict[str, bytearray]) -> None:
        self.objects = objects
        self.regions: list[MemoryRegion] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.regions += regions

    def _require(self, address: int, length: int) -> None:
        end = address + length
        assert any(r.address <= address and end <= r.address + r.bytes for r in self.regions)

    def access(self, keys: Sequence[str], deadline: float) -> None:
        """Nothing is evicted."""

    def exists(self, keys: Sequence[str], deadline: float) -> Bools:
        return np.array([key in self.objects for key in keys], dtype=bool)

    def put(self, keys: Sequence[str], objects: Sequence[Slices], deadline: float) -> list[Outcome]:
        for key, ranges in zip(keys, objects, strict=True):
            data = bytearray()
            for at, size in zip(ranges.address.tolist(), ranges.length.tolist(), strict=True):
                self._require(at, size)
                data += ctypes.string_at(at, size)
            self.objects[key] = data
        return [Outcome.DONE] * len(keys)

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        outcomes = []
        for key, need in zip(keys, wanted, strict=True):
            data = self.objects.get(key)
            ends = need.offset + need.length
            if data is None or int(ends.max(initial=0)) > len(data):
                outcomes.append(Outcome.MISSING if data is None else Outcome.FAILED)
                continue
            for offset, at, size in zip(
                need.offset.tolist(), need.address.tolist(), need.length.tolist(), strict=True
            ):
                self._require(at, size)
                ctypes.memmove(at, bytes(data[offset : offset + size]), size)
            outcomes.append(Outcome.DONE)
        return outcomes

    def put_bytes(self, key: str, value: bytes, deadline: float) -> Outcome:
        if key in self.objects:
            return Outcome.EXISTS
        self.objects[key] = bytearray(value)
        return Outcome.DONE

    def get_bytes(self, key: str, deadline: float) -> bytes | None:
        return bytes(self.objects[key]) if key in self.objects else None

    def remove(self, keys: Sequence[str], deadline: float) -> int:
        return sum(self.objects.pop(key, None) is not None for key in keys)

    def close(self) -> None:
        """Nothing is open."""


def test_every_byte_of_every_shape() -> None:
    """Random shapes, also from and to a device: right bytes, and only those."""
    for number, case in enumerate(cases(4)):
        objects: dict[str, bytearray] = {}
        oracle, tokens = Oracle(case), sequence(case)

        def open_store(objects: dict[str, bytearray] = objects) -> CheckedStore:
            return CheckedStore(PlainStore(objects), FarMemory(), stage_bytes=8192, buffers=2)

        writer = SmallEngine(case, "src", open_store, shift=FAR)
        writer.fill(oracle)
        writer.save("w", tokens)
        reader = SmallEngine(case, "dst", open_store, shift=FAR)
        ends = reader.load("r", reader.matched("r", tokens))
        assert all(end.ok for end in ends), ends
        assert reader.wrong_bytes(oracle) == 0, number
        for engine in (writer, reader):
            all_ended(engine)
            engine.close()


def test_exactly_the_right_blocks_are_computed_again() -> None:
    """A byte of the second block flips: what is before it is used, nothing from it on."""
    case = cases(1, simple)[0]
    objects: dict[str, bytearray] = {}
    tokens = sequence(case)

    def open_store() -> CheckedStore:
        return CheckedStore(PlainStore(objects), FarMemory())

    writer = SmallEngine(case, "src", open_store, shift=FAR)
    writer.fill(Oracle(case))
    writer.save("w", tokens)

    objects[written(writer, tokens, at=1)][-1] ^= 1
    reader = SmallEngine(case, "dst", open_store, shift=FAR)
    ends = reader.load("r", reader.matched("r", tokens))
    bad = [end for end in ends if not end.ok]
    span = case["src"]["shape"]["block_size"]
    assert bad and all(end.bad_from == span for end in bad), ends
    assert any("corrupt" in end.error for end in bad), ends  # for later ranks it is gone
    for engine in (writer, reader):
        all_ended(engine)
        engine.close()


class Host:
    def __init__(self) -> None:
        self.memory = np.zeros(1 << 16, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data)
        region = MemoryRegion(self.base, self.memory.nbytes)
        self.objects: dict[str, bytearray] = {}
        self.store = CheckedStore(PlainStore(self.objects), HostMemory([region]), buffers=1)
        self.store.register([region])

    def put(self, key: str, data: bytes) -> Outcome:
        self.memory[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        half = len(data) // 2
        ranges = Slices.whole(np.array([0, half]) + self.base, np.array([half, len(data) - half]))
        return self.store.put([key], [ranges], soon())[0]

    def get(self, key: str, *parts: tuple[int, int]) -> tuple[Outcome, bytes]:
        """Parts (offset, length), one after another from 32 KiB on."""
        self.memory[:] = 0
        offset, length = (np.array(x, dtype=np.int64) for x in zip(*parts, strict=True))
        to = self.base + (1 << 15) + np.cumsum(length) - length
        outcome = self.store.get([key], [Slices(offset, to, length)], soon())[0]
        return outcome, self.memory[1 << 15 :][: int(length.sum())].tobytes()


def test_any_flipped_byte_is_found() -> None:
    """In the header or the data, whichever part is wanted; and nothing wrong is written."""
    host = Host()
    data = bytes(np.random.default_rng(3).integers(1, 255, 1000, dtype=np.uint8))
    assert host.put("k", data) is Outcome.DONE
    assert host.get("k", (900, 50), (0, 10)) == (Outcome.DONE, data[900:950] + data[:10])
    used = [*range(HEADER_BYTES), *range(HEADER_BYTES, HEADER_BYTES + 1000, 37), HEADER_BYTES + 999]
    right = bytes(host.objects["k"])
    for place in used:
        host.objects["k"][place] ^= 0x10
        outcome, got = host.get("k", (900, 50), (0, 10))
        assert outcome is Outcome.CORRUPT, place
        assert not any(got), place
        assert "k" not in host.objects, "no engine would save it again"
        host.objects["k"] = bytearray(right)
    assert host.get("k", (0, 1000)) == (Outcome.DONE, data)


def test_other_objects_than_asked_for() -> None:
    host = Host()
    assert host.put("a", b"x" * 100) is Outcome.DONE
    assert host.get("none", (0, 1))[0] is Outcome.MISSING
    assert host.get("a", (90, 11))[0] is Outcome.FAILED  # beyond its end
    host.objects["b"] = bytearray(host.objects["a"])  # one key's bytes under another's
    assert host.get("b", (0, 1))[0] is Outcome.CORRUPT
    host.objects["c"] = bytearray(b"y" * 200)  # written without a header
    assert host.get("c", (0, 1))[0] is Outcome.CORRUPT
    host.objects["d"] = host.objects["a"][:-1]  # cut
    assert host.get("d", (0, 1))[0] in (Outcome.CORRUPT, Outcome.FAILED)


@pytest.mark.parametrize("count", [1, 40])
def test_batches(count: int) -> None:
    host = Host()
    size = 700
    host.memory[: count * size] = np.random.default_rng(count).integers(1, 255, count * size)
    before = host.memory.copy()
    one: Any = np.array([size], dtype=np.int64)
    keys = [f"k{i}" for i in range(count)]
    ranges = [Slices.whole(np.array([host.base + i * size]), one) for i in range(count)]
    assert host.store.put(keys, ranges, soon()) == [Outcome.DONE] * count
    host.memory[:] = 0
    zero = np.zeros(1, dtype=np.int64)
    wanted = [Slices(zero, r.address, one) for r in ranges]
    host.objects[keys[-1]][-1] ^= 1
    told = host.store.get([*keys, "gone"], [*wanted, wanted[0]], soon())
    assert told == [Outcome.DONE] * (count - 1) + [Outcome.CORRUPT, Outcome.MISSING]
    good = (count - 1) * size
    assert np.array_equal(host.memory[:good], before[:good]) and not host.memory[good:].any()


@pytest.mark.parametrize("length", [1 << 40, 1 << 62, (1 << 64) - 1])
def test_a_forged_length(length: int) -> None:
    """Whoever writes to the store can seal any header; none asks a reader for so much memory."""
    key, objects = "k", {"k": bytearray(wrappers._seal("k", length, 0) + b"short")}
    into = np.zeros(16, dtype=np.uint8)
    region, plain = MemoryRegion(into.ctypes.data, into.nbytes), PlainStore(objects)
    store = CheckedStore(plain, HostMemory([region]), stage_bytes=8192, buffers=1)
    store.register([region])
    one = np.array([into.ctypes.data], dtype=np.int64)
    wanted = Slices(np.zeros(1, dtype=np.int64), one, np.full(1, 5, dtype=np.int64))
    assert store.get([key], [wanted], soon()) == [Outcome.CORRUPT]
    assert [buffer.bytes for buffer in plain.regions] == [8192]
    store.close()
