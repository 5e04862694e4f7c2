"""Mooncake Store with a real master on loopback: bytes, ranges, a full pool, a master that dies."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mooncake.store", reason="this tier runs in the environment with Mooncake")

from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.host import HostMemory
from kvferry.errors import StoreError
from kvferry.pool.mooncake import MooncakeStore, MooncakeStoreConfig
from kvferry.pool.store import Outcome, Slices
from kvferry.pool.wrappers import CheckedStore
from waiting import soon, wait_until

MIB = 1 << 20


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class Master:
    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            self.port, self.metrics = (one.getsockname()[1] for one in sockets)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("mooncake_master")),
                f"-rpc_port={self.port}",
                "-rpc_address=127.0.0.1",
                f"-metrics_port={self.metrics}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = soon()
        while time.monotonic() < until:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return
            time.sleep(0.1)
        raise AssertionError("mooncake_master did not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    one = Master()
    one.start()
    yield one
    one.kill()


@pytest.fixture(scope="module")
def store(master: Master) -> Iterator[MooncakeStore]:
    config = MooncakeStoreConfig.of(
        {
            "master_server_address": f"127.0.0.1:{master.port}",
            "global_segment_size": "64MB",
            "local_buffer_size": "16MB",
        }
    )
    one = MooncakeStore(config)
    yield one
    one.close()
    one.close()


@pytest.fixture(scope="module")
def memory(store: MooncakeStore) -> np.ndarray:
    """The first half is random, the second is read into."""
    whole = np.random.default_rng(1).integers(0, 256, 16 * MIB, dtype=np.uint8)
    store.register([MemoryRegion(whole.ctypes.data, whole.nbytes)])
    return whole


def test_ranges_of_objects(store: MooncakeStore, memory: np.ndarray) -> None:
    base = memory.ctypes.data
    objects = [
        Slices.whole(base + ints(0, 5 * MIB, MIB), ints(1000, 70_000, 3)),
        Slices.whole(base + ints(2 * MIB), ints(MIB)),
    ]
    assert store.put(["a", "b"], objects, soon()) == [Outcome.DONE] * 2
    assert store.exists(["a", "nothing", "b"], soon()).tolist() == [True, False, True]
    written = np.concatenate(
        (memory[:1000], memory[5 * MIB : 5 * MIB + 70_000], memory[MIB : MIB + 3])
    )
    into = base + 8 * MIB
    memory[8 * MIB :] = 0
    wanted = [
        Slices(ints(990, 70_000, 0), into + ints(0, 100, 5000), ints(20, 1003, 7)),
        Slices(ints(0), ints(into + 9000), ints(10)),
        Slices(ints(5), ints(into + 10_000), ints(MIB - 5)),
    ]
    outcomes = store.get(["a", "nothing", "b"], wanted, soon())
    assert outcomes == [Outcome.DONE, Outcome.MISSING, Outcome.DONE]
    got = memory[8 * MIB :]
    assert np.array_equal(got[:20], written[990:1010])
    assert np.array_equal(got[100:1103], written[70_000:71_003])
    assert np.array_equal(got[5000:5007], written[:7])
    assert np.array_equal(got[10_000 : 10_000 + MIB - 5], memory[2 * MIB + 5 : 3 * MIB])
    assert not got[20:100].any() and not got[9000:9010].any()
    memory[8 * MIB :] = 0
    # the whole of one object, the beginning of another, and more than there is
    wanted = [
        Slices(ints(0, 500), into + ints(0, MIB), ints(500, 70_503)),
        Slices(ints(0, 10), into + ints(3 * MIB, 4 * MIB), ints(10, 90)),
        Slices(ints(0), ints(into + 5 * MIB), ints(71_004)),
    ]
    outcomes = store.get(["a", "b", "a"], wanted, soon())
    assert outcomes == [Outcome.DONE, Outcome.DONE, Outcome.FAILED]
    assert np.array_equal(got[:500], written[:500])
    assert np.array_equal(got[MIB : MIB + 70_503], written[500:])
    assert np.array_equal(got[3 * MIB : 3 * MIB + 10], memory[2 * MIB : 2 * MIB + 10])
    assert np.array_equal(got[4 * MIB : 4 * MIB + 90], memory[2 * MIB + 10 : 2 * MIB + 100])
    assert not got[5 * MIB :].any()
    beyond = [Slices(ints(70_000), ints(into), ints(2000))]
    assert store.get(["a"], beyond, soon()) == [Outcome.FAILED]


def test_checksums_of_our_own(store: MooncakeStore) -> None:
    """Mooncake serves a flipped byte; with our checksums it is found, and nothing is written."""
    whole = np.random.default_rng(7).integers(1, 256, 2 * MIB, dtype=np.uint8)
    base, region = int(whole.ctypes.data), MemoryRegion(int(whole.ctypes.data), whole.nbytes)
    checked = CheckedStore(store, HostMemory([region]), stage_bytes=MIB, buffers=1)
    checked.register([region])
    objects = [
        Slices.whole(base + ints(0, 200_000), ints(100_000, 5)),
        Slices.whole(ints(base), ints(77)),
    ]
    assert checked.put(["sum/a", "sum/b"], objects, soon()) == [Outcome.DONE] * 2
    wanted = [
        Slices(ints(99_000, 10), base + MIB + ints(0, 2000), ints(1005, 20)),
        Slices(ints(0), ints(base + MIB + 5000), ints(77)),
    ]
    whole[MIB:] = 0
    assert checked.get(["sum/a", "sum/b"], wanted, soon()) == [Outcome.DONE] * 2
    assert np.array_equal(whole[MIB : MIB + 1000], whole[99_000:100_000])
    assert np.array_equal(whole[MIB + 1000 : MIB + 1005], whole[200_000:200_005])
    assert np.array_equal(whole[MIB + 2000 : MIB + 2020], whole[10:30])
    assert np.array_equal(whole[MIB + 5000 : MIB + 5077], whole[:77])
    raw = bytearray(store.get_bytes("sum/a", soon()) or b"")
    raw[50_000] ^= 1
    until = soon()
    while not store.remove(["sum/a"], soon()):  # leases of reads keep it for seconds
        assert time.monotonic() < until
        time.sleep(0.2)
    assert store.put_bytes("sum/a", bytes(raw), soon()) is Outcome.DONE
    whole[MIB:] = 0
    told = checked.get(["sum/a", "sum/b"], wanted, soon())
    assert told == [Outcome.CORRUPT, Outcome.DONE]
    assert not whole[MIB : MIB + 5000].any()


def test_records_and_removal(store: MooncakeStore) -> None:
    assert store.put_bytes("layout", b"some bytes", soon()) is Outcome.DONE
    assert store.get_bytes("layout", soon()) == b"some bytes"
    assert store.get_bytes("no layout", soon()) is None
    assert store.remove(["layout", "no layout"], soon()) == 1
    assert store.get_bytes("layout", soon()) is None


def test_a_full_pool(store: MooncakeStore, memory: np.ndarray) -> None:
    base = memory.ctypes.data
    keys = [f"full/{n}" for n in range(12)]
    outcomes = store.put(keys, [Slices.whole(ints(base), ints(8 * MIB))] * 12, soon())
    assert set(outcomes) == {Outcome.DONE, Outcome.FULL}
    there = store.exists(keys, soon()).tolist()
    assert there == [outcome is Outcome.DONE for outcome in outcomes]
    store.remove(keys, soon())


def test_a_call_that_hangs(store: MooncakeStore) -> None:
    release = threading.Event()

    class Hanging:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: release.wait(30) and None

    patch = pytest.MonkeyPatch()
    patch.setattr(store, "_client", Hanging())
    with pytest.raises(StoreError, match="deadline"):
        store.exists(["a"], soon(0.1))
    assert not release.is_set() and store.calls.hanging == 1
    # whatever uses blocks stays until the client has ended, past any deadline
    for move, parts in (
        (store.put, [Slices.whole(ints(0), ints(1))]),
        (store.get, [Slices(ints(0), ints(0), ints(1))]),
    ):
        release.clear()
        threading.Timer(0.5, release.set).start()
        with pytest.raises(StoreError, match=r"(put|get) failed"):
            move(["a"], parts, soon(0.1))
        assert release.is_set()
    patch.undo()
    wait_until(lambda: store.calls.hanging == 0)
    assert store.exists(["a"], soon()).shape == (1,)


def test_a_master_that_dies(store: MooncakeStore, memory: np.ndarray, master: Master) -> None:
    base = memory.ctypes.data
    assert store.put(["before"], [Slices.whole(ints(base), ints(MIB))], soon()) == [Outcome.DONE]
    master.kill()
    begun = time.monotonic()
    with pytest.raises(StoreError):
        store.exists(["before"], soon(3))
    with pytest.raises(StoreError):
        store.put(["during"], [Slices.whole(ints(base), ints(MIB))], soon(3))
    wanted = [Slices(ints(0), ints(base + 8 * MIB), ints(MIB))]
    with pytest.raises(StoreError):
        store.get(["before"], wanted, soon(3))
    assert time.monotonic() - begun < 30
    master.start()
    until = soon()
    outcome = None
    while outcome is not Outcome.DONE and time.monotonic() < until:
        with contextlib.suppress(StoreError):
            outcome = store.put(["after"], [Slices.whole(ints(base), ints(MIB))], soon(3))[0]
        time.sleep(0.2)
    assert outcome is Outcome.DONE
    memory[8 * MIB :] = 0
    assert store.get(["after", "before"], wanted * 2, soon()) == [Outcome.DONE, Outcome.MISSING]
    assert np.array_equal(memory[8 * MIB : 9 * MIB], memory[:MIB])


def test_a_client_that_is_killed_in_a_save(
    store: MooncakeStore, memory: np.ndarray, master: Master
) -> None:
    """Its objects are there with all their bytes, or not at all; others go on."""
    code = f"""
import sys, time
import numpy as np
from kvferry.pool.mooncake import MooncakeStore
from kvferry.pool.mooncake import MooncakeStoreConfig
from kvferry.pool.store import Slices
from kvferry.carriers.base import MemoryRegion
store = MooncakeStore(MooncakeStoreConfig(
    {store.config.master_server_address!r}, mode="standalone-store", global_segment_size=0,
    local_buffer_size=16 << 20, local_hostname="127.0.0.1"))
memory = np.arange({MIB} // 8, dtype=np.int64).view(np.uint8)
store.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
one = Slices.whole(np.array([memory.ctypes.data]), np.array([memory.nbytes]))
print("ready", flush=True)
for n in range(100):
    keys = [f"killed/{{n}}/{{k}}" for k in range(4)]
    store.put(keys, [one] * 4, time.monotonic() + 30)
    store.remove(keys[:2], time.monotonic() + 30)
"""
    base = memory.ctypes.data + 8 * MIB
    want = np.arange(MIB // 8, dtype=np.int64).view(np.uint8)
    seen = 0
    for attempt in range(3):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        while child.stdout.readline().strip() not in (b"ready", b""):
            pass
        time.sleep(0.02 + 0.015 * attempt)
        child.kill()
        with child:  # closes its pipe, and waits
            pass
        keys = [f"killed/{n}/{k}" for n in range(100) for k in range(4)]
        for key in [k for k, there in zip(keys, store.exists(keys, soon()), strict=True) if there]:
            memory[8 * MIB : 9 * MIB] = 0
            (outcome,) = store.get([key], [Slices(ints(0), ints(base), ints(MIB))], soon())
            if outcome is Outcome.DONE:
                assert np.array_equal(memory[8 * MIB : 9 * MIB], want), key
                seen += 1
        store.remove(keys, soon())
    assert seen, "nothing was written before the kill: this test saw nothing"
    assert store.put(["alive"], [Slices.whole(ints(base), ints(MIB))], soon()) == [Outcome.DONE]


def test_no_master() -> None:
    config = MooncakeStoreConfig.of({"master_server_address": "127.0.0.1:1"})
    with pytest.raises(StoreError, match="mooncake_master"):
        MooncakeStore(config)
