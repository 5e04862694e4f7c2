"""Memory that no pointer reaches, over a store of host memory: as a GPU's, without one."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pool_faults import all_ended, cases, sequence

from dir_store import DirStore, FaultyStore
from kvferry.carriers.base import Memory, MemoryRegion
from kvferry.errors import StoreError, TransferError
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices
from kvferry.pool.wrappers import StagedStore
from kvferry.verify.oracle import Oracle
from pool_engine import SmallEngine
from waiting import soon

FAR = 1 << 60  # device addresses are host addresses plus this


class FarMemory(Memory):
    """A device: only gather and scatter reach its memory."""

    def __init__(self) -> None:
        self.fails = False

    def _check(self) -> None:
        if self.fails:
            raise TransferError("an illegal memory access was encountered")

    def gather(self, address: np.ndarray, length: np.ndarray, into: np.ndarray) -> None:
        self._check()
        data = [
            ctypes.string_at(a - FAR, n)
            for a, n in zip(address.tolist(), length.tolist(), strict=True)
        ]
        whole = np.frombuffer(b"".join(data), dtype=np.uint8)
        into[: len(whole)] = whole

    def scatter(self, source: np.ndarray, address: np.ndarray, length: np.ndarray) -> None:
        self._check()
        at = 0
        for a, n in zip(address.tolist(), length.tolist(), strict=True):
            ctypes.memmove(a - FAR, source[at : at + n].tobytes(), n)
            at += n
        assert at == len(source)

    def zero(self, address: np.ndarray, length: np.ndarray) -> None:
        raise AssertionError("nothing is zeroed")


def test_every_byte_between_devices(tmp_path: Path) -> None:
    """Random shapes, written from and read to far memory; every byte judged by the oracle."""
    compared = 0
    for number, case in enumerate(cases(6)):
        oracle, tokens = Oracle(case), sequence(case)

        def open_store(number: int = number) -> StagedStore:
            inner = EmbeddedStore(tmp_path / str(number), 4 << 20, slots=1 << 12)
            return StagedStore(inner, FarMemory(), stage_bytes=4096, buffers=2)

        writer = SmallEngine(case, "src", open_store, shift=FAR)
        writer.fill(oracle)
        writer.save("w", tokens)
        writer.published()
        reader = SmallEngine(case, "dst", open_store, shift=FAR)
        found = reader.matched("r", tokens)
        assert found == case["tokens"]
        ends = reader.load("r", found)
        assert all(end.ok for end in ends), ends
        assert reader.wrong_bytes(oracle) == 0, number
        compared += sum(end.bytes for end in ends)
        for engine in (writer, reader):
            all_ended(engine)
            engine.close()
    assert compared > 10_000


class Far:
    """A store of files behind far memory, and bytes in both halves of it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.host = np.zeros(1 << 16, dtype=np.uint8)
        self.base = int(self.host.ctypes.data) + FAR
        self.memory, self.faults = FarMemory(), dict[str, Callable[..., Any]]()
        self.inner = DirStore(str(path))
        self.store = StagedStore(FaultyStore(self.inner, self.faults), self.memory, **options)
        self.store.register([MemoryRegion(self.base, self.host.nbytes)])

    def ranges(self, at: int, size: int) -> Slices:
        half = np.array([size // 2, size - size // 2], dtype=np.int64)
        return Slices.whole(self.base + at + np.array([0, size // 2]), half)

    def slices(self, at: int, size: int) -> Slices:
        """Backwards, in three parts, so that nothing is contiguous."""
        cuts = np.linspace(0, size, 4).astype(np.int64)
        offset, length = cuts[:-1][::-1].copy(), np.diff(cuts)[::-1].copy()
        return Slices(offset, self.base + at + offset, length)


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return Far(tmp_path, stage_bytes=1000, buffers=1)


def test_batches_larger_than_a_buffer(far: Far) -> None:
    sizes = [700, 700, 3000, 1, 999]
    keys = [f"k{i}" for i in range(5)]
    starts = [5000 * i for i in range(5)]
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        far.host[start : start + size] = np.random.default_rng(i).integers(1, 255, size)
    before = far.host.copy()
    pairs = list(zip(starts, sizes, strict=True))
    put = far.store.put(keys, [far.ranges(*p) for p in pairs], soon())
    assert put == [Outcome.DONE] * 5
    far.host[:30000] = 0
    assert far.store.get(keys, [far.slices(*p) for p in pairs], soon()) == [Outcome.DONE] * 5
    assert np.array_equal(far.host, before)


def test_only_what_is_whole_reaches_the_device(far: Far) -> None:
    keys = ["a", "b", "c"]
    far.host[:300] = 7
    far.store.put(keys, [far.ranges(100 * i, 100) for i in range(3)], soon())
    file = far.inner.file("b")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    far.host[:] = 0
    wanted = [far.slices(1000 * i, 100) for i in range(3)]
    assert far.store.get(keys, wanted, soon()) == [Outcome.DONE, Outcome.CORRUPT, Outcome.DONE]
    assert far.host[:100].all() and far.host[2000:2100].all()
    assert not far.host[1000:1100].any() and far.host.sum() == 1400


def test_outside_of_registered_memory(far: Far) -> None:
    """One object of a batch; the others go on."""
    good, bad = far.ranges(0, 10), Slices.whole(np.array([far.base - 5]), np.array([10]))
    assert far.store.put(["x", "y"], [bad, good], soon()) == [Outcome.FAILED, Outcome.DONE]
    end = far.base + far.host.nbytes - 5
    beyond = Slices(np.array([0]), np.array([end]), np.array([10]))
    got = far.store.get(["y", "y"], [beyond, far.slices(100, 10)], soon())
    assert got == [Outcome.FAILED, Outcome.DONE]


def test_a_device_that_fails(far: Far) -> None:
    assert far.store.put(["a"], [far.ranges(0, 10)], soon()) == [Outcome.DONE]
    far.memory.fails = True
    assert far.store.put(["b"], [far.ranges(0, 10)], soon()) == [Outcome.FAILED]
    assert far.store.get(["a"], [far.slices(0, 10)], soon()) == [Outcome.FAILED]
    far.memory.fails = False
    assert far.store.get(["a", "b"], [far.slices(0, 10)] * 2, soon()) == [
        Outcome.DONE,
        Outcome.MISSING,
    ]


def test_a_store_that_keeps_all_buffers(far: Far) -> None:
    """Others end by their deadlines, with nothing moved; all goes on when it lets go."""
    far.store.put(["a"], [far.ranges(0, 10)], soon())
    release, inside = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        inside.set()
        release.wait(30)

    far.faults["get"] = hang
    stuck = threading.Thread(target=far.store.get, args=(["a"], [far.slices(0, 10)], soon()))
    stuck.start()
    assert inside.wait(30)
    began = time.monotonic()
    late = far.store.get(["a"], [far.slices(100, 10)], time.monotonic() + 0.1)
    assert late == [Outcome.FAILED] and time.monotonic() - began < 15
    far.faults.clear()
    release.set()
    stuck.join(30)
    assert far.store.get(["a"], [far.slices(100, 10)], soon()) == [Outcome.DONE]
    far.store.close()
    assert far.store.put(["z"], [far.ranges(0, 10)], time.monotonic()) == [Outcome.FAILED]


class Impatient(DirStore):
    """Closed while a call is inside, as the embedded store is after some seconds."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("what", ["put", "get", "nothing"])
def test_closed_under_a_call(tmp_path: Path, monkeypatch: Any, what: str) -> None:
    """A call that its store has given up keeps its buffer and the device's memory, and gives them
    back; idle buffers go only after the store, which knows their addresses, is closed."""
    far = Far(tmp_path, stage_bytes=1000, buffers=2)
    inner = far.inner = Impatient(str(tmp_path))
    far.store._store = FaultyStore(inner, far.faults)
    made, closed = [], list[bool]()
    empty = np.empty

    def remembered(*args: Any, **options: Any) -> np.ndarray:
        array = empty(*args, **options)
        made.append(weakref.ref(array, lambda _: closed.append(inner.closed)))
        return array

    def end() -> None:
        assert not under_way.is_set(), "closed under a call"
        far.memory.fails = True

    monkeypatch.setattr(np, "empty", remembered)
    far.memory.close = end  # type: ignore[attr-defined]
    assert far.store.put(["a"], [far.ranges(0, 900)], soon()) == [Outcome.DONE]
    release, under_way, told = threading.Event(), threading.Event(), list[Outcome]()

    def hang(*_: Any) -> None:
        under_way.set()
        assert release.wait(60)

    def call() -> None:
        parts: Any = far.ranges(0, 900) if what == "put" else far.slices(0, 900)
        told.extend(getattr(far.store, what)(["a" if what == "get" else "b"], [parts], soon()))
        under_way.clear()

    if what == "nothing":
        far.store.close()
    else:
        far.faults[what] = hang
        stuck = threading.Thread(target=call)
        stuck.start()
        assert under_way.wait(30)
        far.store.close()
        assert not far.memory.fails and all(array() is not None for array in made)
        under_way.clear()  # what comes now is the call's own
        release.set()
        stuck.join(30)
        assert told == [Outcome.DONE]
    assert far.memory.fails and closed == [True] * len(made)
    assert far.store.put(["z"], [far.ranges(0, 10)], soon()) == [Outcome.FAILED]
    far.store.close()


class Registrar(DirStore):
    """A store that knows its memory by address, and for ever: like Mooncake's client."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.known: list[MemoryRegion] = []
        self.refuses = False

    def register(self, regions: Any) -> None:
        if self.refuses:
            raise StoreError("no memory can be registered now")
        for new in regions:
            for old in self.known:
                apart = new.address + new.bytes <= old.address
                assert apart or old.address + old.bytes <= new.address, "registered twice"
            self.known.append(new)
        super().register(regions)


def test_buffers_that_grow(tmp_path: Path, monkeypatch: Any) -> None:
    """Memory that a store knows stays where it is; memory that it refused is never handed to it."""
    host = np.arange(1 << 16, dtype=np.uint32).view(np.uint8)
    base, inner = int(host.ctypes.data) + FAR, Registrar(str(tmp_path))
    store = StagedStore(inner, FarMemory(), stage_bytes=1000, buffers=2)
    store.register([MemoryRegion(base, host.nbytes)])
    made = []
    empty = np.empty

    def remembered(*args: Any, **options: Any) -> np.ndarray:
        array = empty(*args, **options)
        made.append(weakref.ref(array))
        return array

    def put(key: str, size: int) -> list[Outcome]:
        return store.put([key], [Slices.whole(np.array([base]), np.array([size]))], soon())

    monkeypatch.setattr(np, "empty", remembered)
    inner.refuses = True
    with pytest.raises(StoreError, match="registered now"):
        put("refused", 500)
    inner.refuses = False
    made.clear()
    for number, size in enumerate((500, 3000, 700, 9000, 40_000, 900)):
        assert put(f"k{number}", size) == [Outcome.DONE]
    assert len(made) == len(inner.known) == 4 and all(array() is not None for array in made)
    assert sum(array().nbytes for array in made) == 1000 + 4000 + 16_000 + 64_000
    store.close()
