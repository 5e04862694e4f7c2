"""The embedded store among processes: deaths at any point, pressure, bytes that are not right."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import StoreError
from kvferry.pool.embedded import arena, store
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices
from pool_peers import DISK, MEMORY, OBJECTS, ROOM, Peer, content, in_pieces, tiers_of
from waiting import soon, wait_until

PEER = Path(__file__).parents[1] / "support" / "pool_peers.py"
KILLS = 60
SEED = int(os.environ.get("KVFERRY_SEED", "20261115"))  # the same seed kills after the same times


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def start(directory: Path, seed: int, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PEER), str(directory), str(seed), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )


def invariants(store: EmbeddedStore, told: str = "") -> None:
    """What must hold in a store at rest: extents apart, nothing half-done, bounds kept."""
    tiers = tiers_of(store)
    index, arena = tiers.index, tiers.arena
    with tiers.locked(soon()):
        for mended in (False, True):
            if mended:
                tiers.mend()
            rows, gaps = index.in_state(*ix.WITH_EXTENT), index.gaps
            begin = np.concatenate((index.offset[rows], index.gap_offset[:gaps]))
            size = np.concatenate((index.extent[rows], index.gap_bytes[:gaps]))
            order = np.argsort(begin)
            begin, size = begin[order], size[order]
            assert (begin[1:] >= (begin + size)[:-1]).all(), f"two owners ({mended}) {told}"
            lost = index.arena_bytes - int(size.sum())
            assert lost == 0 or (index.gaps_stale and not mended), f"memory lost ({mended}) {told}"
        assert index.arena_bytes <= arena.capacity
        assert len(index.in_state(*ix.OWNED)) == 0, told
    counters = store.counters()
    assert counters["disk_bytes"] <= DISK


def test_processes_share_it(place: Path) -> None:
    seeds = itertools.count()

    def all_has_happened() -> bool:
        """After two seconds of work; on a busy machine, after a few times that."""
        for peer in [start(place, next(seeds), 2.0) for _ in range(3)]:
            said, _ = peer.communicate(timeout=300)
            assert peer.returncode == 0, said
        with contextlib.closing(Peer(place)) as watcher:
            counters = watcher.store.counters()
        return all(counters[what] for what in ("evicted", "demoted", "promoted"))

    wait_until(all_has_happened, 120)
    last = Peer(place)
    good, bad, *_ = last.store.verify(soon())
    assert good > 0 and bad == 0
    invariants(last.store)
    assert last.store.counters()["corrupt"] == 0
    last.close()


def only_dead_ones_work(watcher: Peer) -> bool:
    """Whether nothing is under way in other processes. A killed one is gone with its last thread,
    which may take a moment longer than what /proc says of it."""
    tiers = watcher.tiers
    owned = tiers.index.in_state(*ix.OWNED)
    others = set(tiers.index.owner[owned].tolist()) - {tiers.members.me}
    return others <= tiers.dead_owners(owned)


def test_killed_at_any_point(place: Path) -> None:
    """Two workers at a time, one of them killed after a random while, and replaced."""
    rng = random.Random(SEED)
    watcher = Peer(place)
    workers: list[int] = []
    nursery = subprocess.Popen(
        [sys.executable, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert nursery.stdin is not None and nursery.stdout is not None
    try:
        for kill in range(KILLS):
            while len(workers) < 2:
                nursery.stdin.write(f"{place} {SEED + kill} 60\n")
                nursery.stdin.flush()
                workers.append(int(nursery.stdout.readline()))
                assert workers[-1] > 0, "a worker could not open the store"
            time.sleep(rng.uniform(0.0, 0.05))
            os.kill(workers.pop(rng.randrange(len(workers))), signal.SIGKILL)
            begun = time.monotonic()
            outcomes = {watcher.get(rng.randrange(OBJECTS)) for _ in range(3)}
            assert outcomes <= {Outcome.DONE, Outcome.MISSING}, f"seed {SEED}"
            assert watcher.put(rng.randrange(OBJECTS)) not in (Outcome.FAILED, Outcome.FULL)
            assert time.monotonic() - begun < 10, "a dead process held the others up"
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        nursery.kill()
        nursery.communicate(timeout=30)
    wait_until(lambda: only_dead_ones_work(watcher))
    good, bad, *_ = watcher.store.verify(soon())
    assert good > 0 and bad == 0, f"seed {SEED}"
    invariants(watcher.store)
    files = watcher.tiers.disk
    assert files is not None
    files.begin()  # as the next process that opens the store does
    files.wait(30)
    on_disk = sum(f.stat().st_size for f in (place / "disk").glob("??/*"))
    assert on_disk == watcher.store.counters()["disk_bytes"], f"seed {SEED}"
    watcher.close()
    assert not list((place / "disk").glob(".part-*")) or _reopened_is_clean(place)


def _reopened_is_clean(place: Path) -> bool:
    """Parts of dead members go when their number is taken again."""
    peers = [Peer(place) for _ in range(4)]
    for peer in peers:
        peer.close()
    return not list((place / "disk").glob(".part-*"))


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("where", ["header", "data", "last"])
def test_a_flipped_byte(place: Path, tier: str, where: str) -> None:
    peer = Peer(place)
    number = 77  # 10,283 bytes
    assert peer.put(number) is Outcome.DONE
    length = len(content(number))
    if tier == "disk":
        for other in range(100, 180):  # pushes it down
            peer.put(other)
    index, tiers = peer.tiers.index, peer.tiers
    row = int(index.find(*ix.hash_keys([f"object/{number}"]))[0])
    size = int(index.image_bytes[row])
    at = {"header": 40, "data": size - length // 2, "last": size - 1}[where]
    if tier == "memory":
        tiers.arena.view(int(index.offset[row]), size)[at] ^= 1
    else:
        assert int(index.state[row]) == ix.DISK
        path = tiers.disk.path(index.names(np.array([row]))[0])
        image = bytearray(path.read_bytes())
        image[at] ^= 1
        path.write_bytes(image)
    whole = in_pieces(peer.base + ROOM, length, 1)
    wanted = Slices(np.zeros(1, dtype=np.int64), whole.address, whole.length)
    assert peer.store.get([f"object/{number}"], [wanted], soon()) == [Outcome.CORRUPT]
    assert not peer.store.exists([f"object/{number}"], soon())[0]
    assert peer.store.counters()["corrupt"] == 1
    assert peer.put(number) is Outcome.DONE  # and can be written again
    invariants(peer.store)
    peer.close()


def test_a_slice_is_checked_by_itself(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped byte elsewhere in the object does not make a slice of other chunks fail."""
    peer = Peer(place)
    for module in (arena, store):
        monkeypatch.setattr(module, "CHUNK_BYTES", 64 << 10)
    number = next(n for n in range(1000) if len(content(n)) > 200_000)
    data = content(number)
    peer.put(number)
    index = peer.tiers.index
    row = int(index.find(*ix.hash_keys([f"object/{number}"]))[0])
    view = peer.tiers.arena.view(int(index.offset[row]), int(index.image_bytes[row]))
    view[-1] ^= 1
    ints = [np.array([x], dtype=np.int64) for x in (70_000, peer.base + ROOM, 1000)]
    assert peer.store.get([f"object/{number}"], [Slices(*ints)], soon()) == [Outcome.DONE]
    assert np.array_equal(peer.memory[ROOM : ROOM + 1000], data[70_000:71_000])
    ints[0] = np.array([len(data) - 1000], dtype=np.int64)
    assert peer.store.get([f"object/{number}"], [Slices(*ints)], soon()) == [Outcome.CORRUPT]
    peer.close()


def test_a_truncated_file(place: Path) -> None:
    peer = Peer(place)
    for number in range(60):
        peer.put(number)
    index, disk = peer.tiers.index, peer.tiers.disk
    row = int(index.in_state(ix.DISK)[0])
    path = disk.path(index.names(np.array([row]))[0])
    path.write_bytes(path.read_bytes()[:-10])
    good, bad, *_ = peer.store.verify(soon())
    assert bad == 1 and good == peer.store.counters()["objects"]
    peer.close()


def test_files_outlive_the_index(place: Path) -> None:
    """A new index (a reboot empties /dev/shm) takes in what is whole on disk, and nothing else."""
    peer = Peer(place)
    for number in range(80):
        peer.put(number)
    files = list((place / "disk").glob("??/*"))
    assert len(files) > 10
    peer.close()
    files[0].write_bytes(files[0].read_bytes()[:-1])
    (place / "disk" / ".part-1-1").write_bytes(b"half")
    for path in (place / "memory").iterdir():
        path.unlink()
    peer = Peer(place)
    assert peer.store.counters()["objects"] == len(files) - 1
    assert not (place / "disk" / ".part-1-1").exists()
    outcomes = [peer.get(number) for number in range(80)]
    assert outcomes.count(Outcome.DONE) == len(files) - 1
    peer.close()


def test_two_writers_of_one_key(place: Path) -> None:
    one, two = Peer(place), Peer(place)
    tiers = one.tiers
    keys, low_high = ["object/5"], ix.hash_keys(["object/5"])
    with tiers.locked(soon()):
        row = int(tiers.index.claim(*low_high, 0.0)[0])
        tiers.index.offset[row] = tiers.arena.take(1 << 20)
        tiers.index.extent[row] = 1 << 20
        tiers.index.owner[row] = tiers.members.me
        tiers.index.state[row] = ix.WRITING
    assert two.put(5) is Outcome.EXISTS  # while the first is alive and writes
    assert not two.store.exists(keys, soon())[0]
    one.close()  # it ends without having finished
    assert two.put(5) is Outcome.DONE
    assert two.get(5) is Outcome.DONE
    assert two.put(5) is Outcome.EXISTS
    invariants(two.store)
    two.close()


def test_memory_full(place: Path) -> None:
    peer = Peer(place, disk=False, memory=1 << 20)
    big = np.zeros(2 << 20, dtype=np.uint8)
    peer.store.register([MemoryRegion(big.ctypes.data, big.nbytes)])
    ranges = in_pieces(big.ctypes.data, big.nbytes, 3)
    assert peer.store.put(["big"], [ranges], soon()) == [Outcome.FULL]
    assert peer.store.counters()["full"] == 1
    assert peer.store.counters()["objects"] == 0
    outcomes = [peer.put(number) for number in range(30)]  # unknown to any request: never declined
    assert set(outcomes) == {Outcome.DONE}
    assert peer.store.counters()["dropped"] > 0
    assert peer.store.counters()["bytes"] <= 1 << 20
    invariants(peer.store)
    peer.close()


def test_a_batch_larger_than_memory(place: Path) -> None:
    """What does not stay in memory goes down while the rest of the batch comes."""
    peer = Peer(place, memory=1 << 20)
    numbers = range(40)
    data = np.concatenate([content(n) for n in numbers])
    peer.store.register([MemoryRegion(data.ctypes.data, data.nbytes)])
    ends = np.cumsum([len(content(n)) for n in numbers])
    ranges = [
        in_pieces(data.ctypes.data + int(end) - len(content(n)), len(content(n)), 2)
        for n, end in zip(numbers, ends, strict=True)
    ]
    keys = [f"object/{n}" for n in numbers]
    assert set(peer.store.put(keys, ranges, soon())) == {Outcome.DONE}
    assert {peer.get(n) for n in numbers} == {Outcome.DONE}
    invariants(peer.store)
    peer.close()


def test_disk_full(place: Path) -> None:
    """Files may not grow beyond 40 KB here: larger objects cannot go down, smaller ones can."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(PEER.parent)!r})
from pathlib import Path
from pool_peers import Peer, content
from kvferry.pool.store import Outcome
peer = Peer(Path({str(place)!r}), memory=1 << 20)
for number in range(20): peer.put(number)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
before = peer.store.counters()["disk_full"]
assert {{peer.put(n) for n in range(100, 140)}} == {{Outcome.DONE}}
counters = peer.store.counters()
assert counters["disk_full"] > before, counters
small = [n for n in range(140) if len(content(n)) < 30_000]
assert any(peer.get(n) is Outcome.DONE for n in small)
good, bad, *_ = peer.store.verify(9e9)
assert bad == 0 and good == peer.store.counters()["objects"]
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert done.returncode == 0
    assert not list((place / "disk").glob(".part-*"))


def test_a_stopped_process_costs_a_deadline(place: Path) -> None:
    """A process that is stopped with the lock delays no reader, and no writer past its deadline."""
    peer = Peer(place)
    assert peer.put(1) is Outcome.DONE
    code = f"""
import sys, time
sys.path.insert(0, {str(PEER.parent)!r})
from pathlib import Path
from pool_peers import Peer
peer = Peer(Path({str(place)!r}))
with peer.tiers.locked(time.monotonic() + 5):
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        assert peer.store.exists(["object/1"], soon())[0]
        assert peer.get(1) is Outcome.DONE
        ranges = in_pieces(peer.base, 1000, 1)
        assert peer.store.put(["x"], [ranges], time.monotonic() + 0.3) == [Outcome.FAILED]
        with pytest.raises(StoreError, match="busy"):
            peer.store.remove(["object/1"], time.monotonic() + 0.1)
        assert time.monotonic() - begun < 10
    finally:
        holder.kill()
        holder.communicate()
    assert peer.store.put(["x"], [ranges], soon()) == [Outcome.DONE]
    assert peer.store.counters()["mended"] > 0
    invariants(peer.store)
    peer.close()


def test_nothing_leaks(place: Path) -> None:
    def used() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count(str(place))

    before = used()
    for _ in range(5):
        peer = Peer(place)
        for number in range(20):
            peer.put(number)
            peer.get(number)
        peer.close()
        peer.close()
        del peer
    # threads of other tests open and close files too
    wait_until(lambda: used()[0] <= before[0] and used()[1] == before[1])
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before[0]


def test_refusals(place: Path) -> None:
    peer = Peer(place)
    elsewhere = np.zeros(100, dtype=np.uint8)
    one = np.array([elsewhere.ctypes.data], dtype=np.int64)
    size = np.array([100], dtype=np.int64)
    assert peer.store.put(["k"], [Slices.whole(one, size)], soon()) == [Outcome.FAILED]
    assert peer.put(1) is Outcome.DONE
    wanted = Slices(np.zeros(1, dtype=np.int64), one, size)
    assert peer.store.get(["object/1"], [wanted], soon()) == [Outcome.FAILED]
    beyond = Slices(
        np.array([len(content(1)) - 10], dtype=np.int64),
        np.array([peer.base], dtype=np.int64),
        np.array([20], dtype=np.int64),
    )
    assert peer.store.get(["object/1"], [beyond], soon()) == [Outcome.FAILED]
    assert peer.store.exists(["object/1"], soon())[0]  # a wrong question removes nothing
    assert peer.store.put_bytes("layout", b"x" * 5000, soon()) is Outcome.DONE
    assert peer.store.get_bytes("layout", soon()) == b"x" * 5000
    assert peer.store.get_bytes("nothing", soon()) is None
    assert peer.store.remove(["layout", "nothing"], soon()) == 1
    assert peer.store.clear(soon()) == 1
    peer.close()
    with pytest.raises(StoreError, match="closed"):
        peer.store.exists(["a"], soon())
    with pytest.raises(StoreError, match="disk tier"):
        EmbeddedStore(place / "x", MEMORY, None, 100)
