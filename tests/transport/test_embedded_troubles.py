"""The embedded store in trouble: disks that are full or shared, failures half-way, full indexes,
restarts of the host with many files."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import StoreError
from kvferry.pool.embedded import arena, disk, eviction
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.disk import DiskTier
from kvferry.pool.embedded.eviction import Tiers
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices
from pool_peers import Peer, in_pieces, tiers_of
from waiting import soon, wait_until

SUPPORT = Path(__file__).parents[1] / "support"
OBJECT = 100_000


def content(key: str, size: int) -> np.ndarray:
    seed = np.random.default_rng(zlib.crc32(key.encode()))
    return np.frombuffer(seed.bytes(size), dtype=np.uint8)


class Small:
    """A store of 1 MiB, and objects of which each byte is known."""

    def __init__(self, place: Path, disk: int = 0, slots: int = 1 << 10, name: str = "s") -> None:
        self.store = EmbeddedStore(
            place / name, 1 << 20, place / "d" if disk else None, disk, slots=slots
        )
        self.memory = np.zeros(1 << 20, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data)
        self.store.register([MemoryRegion(self.base, self.memory.nbytes)])
        self.tiers = tiers_of(self.store)
        self.index = self.tiers.index

    def put(self, *keys: str, size: int = OBJECT, seconds: float = 20.0) -> list[Outcome]:
        ranges: list[Slices] = []
        for at, key in enumerate(keys):
            self.memory[at * size : (at + 1) * size] = content(key, size)
            ranges.append(in_pieces(self.base + at * size, size, 3))
        return self.store.put(list(keys), ranges, soon(seconds))

    def get(self, key: str, size: int = OBJECT) -> Outcome:
        self.memory[:size] = 255
        whole = in_pieces(self.base, size, 1)
        wanted = Slices(np.zeros(1, dtype=np.int64), whole.address, whole.length)
        outcome = self.store.get([key], [wanted], soon())[0]
        if outcome is Outcome.DONE:
            assert np.array_equal(self.memory[:size], content(key, size)), key
        return outcome

    def count(self, *states: int) -> int:
        return len(self.index.in_state(*states))


def files_of(place: Path) -> list[Path]:
    return sorted((place / "d").glob("??/*"))


def bytes_on_disk(place: Path) -> int:
    total = 0
    for file in [*files_of(place), *(place / "d").glob(".part-*")]:
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            total += file.stat().st_size
    return total


def forget_memory(place: Path) -> None:
    """As a restart of the host does."""
    shutil.rmtree(place / "s")


# Failures half-way


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    """No folder can be made: what goes down is dropped, puts go on, nothing stays half-way."""
    one = Small(tmp_path, disk=64 << 20)
    one.put(*(f"a{i}" for i in range(9)))
    shutil.rmtree(tmp_path / "d")
    for i in range(6):
        assert one.put(f"b{i}", f"c{i}") == [Outcome.DONE] * 2
    assert one.count(*ix.OWNED) == 0
    assert one.store.counters()["disk_full"] > 0
    assert one.get("c5") is Outcome.DONE
    (tmp_path / "d").mkdir()
    for i in range(12):
        assert one.put(f"e{i}") == [Outcome.DONE]
    assert one.store.counters()["demoted"] > 0 and one.get("e0") is Outcome.DONE
    one.store.close()


def test_a_demotion_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one file was written: its victims are in memory as before, and no file is left."""
    one = Small(tmp_path, disk=64 << 20)
    before = [f"a{i}" for i in range(10)]  # no more fit
    one.put(*before)
    write, calls = DiskTier.write, iter(range(100))

    def second_fails(self: DiskTier, *args: Any) -> bool:
        if next(calls) == 1:
            raise MemoryError
        return write(self, *args)

    monkeypatch.setattr(DiskTier, "write", second_fails)
    with pytest.raises(MemoryError):
        one.put("b0", "b1")
    assert one.count(*ix.OWNED) == 0 and files_of(tmp_path) == []
    assert {one.get(key) for key in before} == {Outcome.DONE}
    assert one.put("b0", "b1") == [Outcome.DONE] * 2
    assert {one.get(key) for key in before} == {Outcome.DONE}
    one.store.close()


@contextlib.contextmanager
def locked_before_it_reaps(
    monkeypatch: pytest.MonkeyPatch, one: Small, held: AbstractContextManager[Any]
) -> Iterator[None]:
    """The lock is taken from a store between a batch's first extents and the rest."""
    reap = Tiers._reap

    def too_late(self: Tiers, *by: float, now: bool = False) -> bool:
        if self is one.tiers and not now:
            held.__enter__()
        return reap(self, *by, now=now)

    with monkeypatch.context() as patch:
        patch.setattr(Tiers, "_reap", too_late)
        yield


def test_extents_granted_before_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process gets the lock, and keeps it, between a batch's first extents and the rest."""
    monkeypatch.setattr(eviction, "UPDATE_SECONDS", 0.1)
    one, other = Small(tmp_path), Small(tmp_path)
    one.put(*(f"a{i}" for i in range(7)), size=120_000)
    held = other.tiers.lock.held(soon())
    with locked_before_it_reaps(monkeypatch, one, held):
        begun = time.monotonic()
        keys = ["b0", "b1", "b2", "b3"]
        assert one.put(*keys, size=60_000, seconds=1.5) == [Outcome.FAILED] * 4
        assert time.monotonic() - begun < 5
        assert one.count(ix.WRITING) == 3  # the other process has the lock
    held.__exit__(None, None, None)
    assert one.put(*keys, size=60_000) == [Outcome.DONE] * 4
    assert {one.get(key, 60_000) for key in keys} == {Outcome.DONE}
    assert one.count(ix.WRITING) == 0
    other.store.close()
    one.store.close()


# A full index


@pytest.mark.parametrize("others", ["write", "just ended", "write again"])
def test_all_memory_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """As when many ranks save at a time: a put waits until others have written what may then be
    evicted for it. Where they do not end in time, it is told that there is no room. They may end
    just before the put looks for them, or begin again just after it saw none."""
    one, two = Small(tmp_path), Small(tmp_path)
    keys, size = [f"a{i}" for i in range(10)], OBJECT
    waiting, published, outcomes = threading.Event(), threading.Event(), list[Outcome]()
    others_work, looks = Tiers._others_work, list[bool]()

    def seen(self: Tiers) -> bool:
        if others == "just ended":
            waiting.set()
            assert published.wait(20)
        looks.append(others_work(self))
        if others == "write again" and len(looks) == 1:
            return False
        waiting.set()
        return looks[-1]

    monkeypatch.setattr(Tiers, "_others_work", seen)
    monkeypatch.setattr(eviction, "PATIENCE_SECONDS", 20.0)
    put = threading.Thread(target=lambda: outcomes.extend(two.put("b")))
    with one.store.granting(keys, [size] * 10, [True] * 10, soon()) as granted:
        assert len(granted.wishes) == 10
        put.start()
        assert waiting.wait(20)
        granted.publish(np.full(10, size), np.zeros(10, dtype=np.uint64))  # of one chunk each
        published.set()
    put.join(20)
    assert outcomes == [Outcome.DONE] and two.get("b") is Outcome.DONE
    one.store.clear(soon())
    monkeypatch.setattr(eviction, "PATIENCE_SECONDS", 0.05)
    with one.store.granting(keys, [size] * 10, [True] * 10, soon()):
        assert two.put("c") == [Outcome.FULL]
    two.store.close()
    one.store.close()


@pytest.mark.parametrize("order", ["ghost first", "ghost last"])
def test_a_batch_leaves_its_own_ghosts_alone(tmp_path: Path, order: str) -> None:
    """Sixteen slots, fifteen objects: a new key may not take the slot of a known one beside it."""
    one = Small(tmp_path, slots=16)
    one.put(*(f"a{i}" for i in range(15)), size=1000)
    one.store.access(["known"], soon())
    keys = ["known", "new"] if order == "ghost first" else ["new", "known"]
    assert one.put(*keys, size=1000) == [Outcome.DONE] * 2
    assert one.store.exists(keys, soon()).all()
    assert {one.get(key, 1000) for key in keys} == {Outcome.DONE}
    assert one.store.counters()["objects"] == 16
    one.store.remove(keys, soon())
    one.store.access([keys[0]], soon())
    one.store.access(keys, soon())  # two ghosts, two slots
    assert (one.index.find(*ix.hash_keys(keys)) >= 0).all()
    one.store.close()


@pytest.mark.parametrize("disk", [0, 64 << 20])
def test_an_index_that_is_full(tmp_path: Path, disk: int) -> None:
    """The least valuable of sixteen goes, with its file; never one of the batch, nor a record."""
    one = Small(tmp_path, disk=disk, slots=16)
    assert one.store.put_bytes("layout", b"x" * 100, soon()) is Outcome.DONE
    size = 70_000 if disk else 1000  # of those, fourteen fit in memory
    for i in range(40):
        assert one.put(f"a{i}", size=size) == [Outcome.DONE]
        assert one.get(f"a{i}", size) is Outcome.DONE
    assert one.store.get_bytes("layout", soon()) == b"x" * 100
    assert one.get("a0", size) is Outcome.MISSING
    batch = [f"b{i}" for i in range(20)]
    outcomes = one.put(*batch, size=1000)
    assert outcomes.count(Outcome.DONE) >= 15 and set(outcomes) <= {Outcome.DONE, Outcome.FULL}
    for key, outcome in zip(batch, outcomes, strict=True):
        expected = Outcome.DONE if outcome is Outcome.DONE else Outcome.MISSING
        assert one.get(key, 1000) is expected
    assert one.store.counters()["full"] == outcomes.count(Outcome.FULL)
    assert len(files_of(tmp_path)) == one.count(ix.DISK, ix.BOTH)
    one.store.close()


# The disk's capacity


def test_files_on_their_way_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes send objects down at the same time, two each, where three have room."""
    one, two = Small(tmp_path, disk=350_000), Small(tmp_path, disk=350_000)
    one.put(*(f"a{i}" for i in range(10)))
    write, go_on, waiting = DiskTier.write, threading.Event(), threading.Event()

    def slow(self: DiskTier, *args: Any) -> bool:
        if self is one.tiers.disk:
            waiting.set()
            assert go_on.wait(20)
        return write(self, *args)

    monkeypatch.setattr(DiskTier, "write", slow)
    first = threading.Thread(target=one.put, args=("b0", "b1"))
    first.start()
    assert waiting.wait(20)
    two.put("c0", "c1")
    go_on.set()
    first.join()
    assert len(files_of(tmp_path)) == 3 and bytes_on_disk(tmp_path) <= 350_000
    assert bytes_on_disk(tmp_path) == one.store.counters()["disk_bytes"]
    two.store.close()
    one.store.close()


DYING = """
import os, sys
sys.path[:0] = [{support!r}, {tests!r}]
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from test_embedded_troubles import Small
from kvferry.pool.embedded.disk import DiskTier
real = DiskTier.{method}
def die(self, *args):
    if {after}: real(self, *args)
    os.kill(os.getpid(), 9)
one = Small(Path({place!r}), disk={disk})
one.put(*("a%d" % i for i in range(9)))
for i in range({puts}): one.put("b%d" % i)
DiskTier.{method} = die
for i in range(20): one.put("c%d" % i)
"""


@pytest.mark.parametrize(
    ("method", "after", "puts"), [("write", True, 0), ("remove", False, 6), ("clean", False, 0)]
)
def test_files_of_the_dead(tmp_path: Path, method: str, after: bool, puts: int) -> None:
    """Killed between a file and its record, either way round: once a process has opened the store
    again, no file is there that no record names."""
    disk, tests = 400_000, str(Path(__file__).parent)
    program = DYING.format(
        support=str(SUPPORT), tests=tests, place=str(tmp_path), method=method, after=after,
        puts=puts, disk=disk,
    )  # fmt: skip
    if method == "clean":  # a part that was never renamed
        program = program.replace("DiskTier.clean = die", "Path.rename = die")
    watcher = Small(tmp_path, disk=disk)
    child = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    for i in range(12):  # needs room
        assert watcher.put(f"e{i}") == [Outcome.DONE]
    again = Small(tmp_path, disk=disk)
    assert again.tiers.disk is not None and again.tiers.disk.wait(20)
    assert bytes_on_disk(tmp_path) == watcher.store.counters()["disk_bytes"] <= disk
    again.store.close()
    assert watcher.store.verify(soon())[1:3] == (0, 0)
    watcher.store.clear(soon())
    assert files_of(tmp_path) == []
    watcher.store.close()


def test_clear_removes_what_no_record_names(tmp_path: Path) -> None:
    one = Small(tmp_path, disk=4 << 20)
    for i in range(15):
        one.put(f"a{i}")
    (lost,) = one.index.in_state(ix.DISK)[:1]
    one.index.state[lost] = ix.GHOST
    theirs = tmp_path / "d" / "ab" / "notes"
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_bytes(b"another program's")
    one.store.clear(soon())
    assert files_of(tmp_path) == [theirs]
    one.store.close()


# One store to a disk


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_two_stores_on_one_disk(tmp_path: Path) -> None:
    """Refused while the first is in use, by any process, and nothing of it touched."""
    first, again = Small(tmp_path, disk=4 << 20), Small(tmp_path, disk=4 << 20)
    keys = [f"a{i}" for i in range(15)]
    for key in keys:
        first.put(key)
    part = tmp_path / "d" / ".part-1-99"
    part.write_bytes(b"being written")
    before = files_of(tmp_path)
    open_files = count_open_files()
    for _ in range(3):
        with pytest.raises(StoreError, match="disk_path of its own") as refused:
            Small(tmp_path, disk=4 << 20, name="other")
        assert str(tmp_path / "s") in str(refused.value)
        del refused
    wait_until(lambda: count_open_files() <= open_files)  # other threads open and close some too
    assert files_of(tmp_path) == before and part.exists()
    first.store.close()
    with pytest.raises(StoreError, match="disk_path of its own"):  # a second process has it open
        Small(tmp_path, disk=4 << 20, name="other")
    assert {again.get(key) for key in keys} == {Outcome.DONE}
    again.store.close()
    after = len(files_of(tmp_path))
    other = Small(tmp_path, disk=4 << 20, name="other")  # no store's now, and taken in
    assert other.store.counters()["objects"] == after >= len(before)
    with pytest.raises(StoreError, match="disk_path of its own"):  # and no longer the first one's
        Small(tmp_path, disk=4 << 20)
    other.store.close()


def test_a_killed_process_holds_no_disk(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(SUPPORT)!r})
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from pool_peers import Peer
peer = Peer(Path({str(tmp_path)!r}))
os.kill(os.getpid(), 9)
"""
    child = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    shutil.rmtree(tmp_path / "memory")
    Peer(tmp_path).close()


def test_a_file_with_a_key_that_is_no_text(tmp_path: Path) -> None:
    rest = arena._HEAD.pack(0, arena._MAGIC, 2, 0, 1 << 18, 0)[8:] + b"\xff\xfe"
    rest += bytes(64 - 8 - len(rest))
    path = tmp_path / "d" / "ab" / ("ab" + "0" * 30)
    path.parent.parent.mkdir(mode=0o700)
    path.parent.mkdir()
    path.write_bytes(xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest)
    Small(tmp_path, disk=4 << 20).store.close()
    assert not path.exists()


# After a restart of the host


def left_behind(place: Path) -> list[str]:
    """A disk tier with files, and no memory."""
    one = Small(place, disk=64 << 20)
    for i in range(40):
        one.put(f"a{i}")
    one.store.close()
    forget_memory(place)
    keys = [f"a{i}" for i in range(40)]
    names = {f"{a:016x}{b:016x}": k for k, a, b in zip(keys, *ix.hash_keys(keys), strict=True)}
    return [names[f.name] for f in files_of(place)]


def test_taking_in_files_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first process takes in files one by one, others open the store and use it."""
    keys = left_behind(tmp_path)
    monkeypatch.setattr(disk, "BATCH_FILES", 4)
    monkeypatch.setattr(eviction, "ADOPT_SECONDS", 0.1)
    header, go_on, reading = DiskTier.header, threading.Semaphore(6), threading.Event()

    def slow(self: DiskTier, name: str) -> arena.Image | None:
        reading.set()
        assert go_on.acquire(timeout=20)
        return header(self, name)

    monkeypatch.setattr(DiskTier, "header", slow)
    begun = time.monotonic()
    first = Small(tmp_path, disk=64 << 20)
    second = Small(tmp_path, disk=64 << 20)
    assert time.monotonic() - begun < 5
    wait_until(reading.is_set)
    # one batch of four, and half of the next
    wait_until(lambda: second.store.counters()["objects"] == 4)
    assert second.put(keys[-1], "new") == [Outcome.DONE] * 2  # a file that is not taken in yet
    assert second.get("new") is Outcome.DONE and first.get(keys[0]) is Outcome.DONE
    assert second.store.put_bytes("layout", b"x", soon()) is Outcome.DONE
    for _ in range(2 * len(keys)):
        go_on.release()
    wait_until(lambda: first.index.files_due == 0)
    assert {second.get(key) for key in [*keys, "new"]} == {Outcome.DONE}
    assert bytes_on_disk(tmp_path) == first.store.counters()["disk_bytes"]
    second.store.close()
    first.store.close()


@pytest.mark.parametrize("what", ["files", "folders"])
def test_files_that_cannot_be_read_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A process without file descriptors to spare looks at files: they stay, and the next process
    that opens the store takes them in."""
    keys = left_behind(tmp_path)
    before = files_of(tmp_path)

    scandir = os.scandir

    def none_left(*_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def no_folder(path: Any) -> Any:
        return none_left() if len(Path(path).name) == 2 else scandir(path)

    with monkeypatch.context() as patch:
        if what == "files":
            patch.setattr(DiskTier, "_open", none_left)
        else:
            patch.setattr(os, "scandir", no_folder)
        one = Small(tmp_path, disk=64 << 20)
        assert one.tiers.disk is not None and one.tiers.disk.wait(20)
    assert files_of(tmp_path) == before and one.store.counters()["objects"] == 0
    again = Small(tmp_path, disk=64 << 20)
    wait_until(lambda: one.index.files_due == 0)
    assert {again.get(key) for key in keys} == {Outcome.DONE}
    again.store.close()
    one.store.close()


@pytest.mark.parametrize("how", ["killed", "closed", "cleared"])
def test_who_took_in_files_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The next one goes on where it was; unless the store was cleared meanwhile."""
    keys = left_behind(tmp_path)
    monkeypatch.setattr(disk, "BATCH_FILES", 4)
    if how == "killed":
        code = f"""
import os, sys
sys.path[:0] = [{str(SUPPORT)!r}, {str(Path(__file__).parent)!r}]
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from test_embedded_troubles import Small
from kvferry.pool.embedded import disk
disk.BATCH_FILES = 4
real, calls = disk.DiskTier.used, iter(range(9))
def die(self):
    if next(calls) == 2: os.kill(os.getpid(), 9)  # with the lock
    return real(self)
disk.DiskTier.used = die
Small(Path({str(tmp_path)!r}), disk={64 << 20})
"""
        child = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
        assert child.returncode == -signal.SIGKILL
    else:
        go_on, header = threading.Semaphore(10), DiskTier.header
        with monkeypatch.context() as patch:
            patch.setattr(eviction, "ADOPT_SECONDS", 0.1)
            patch.setattr(
                DiskTier, "header", lambda self, n: go_on.acquire(timeout=20) and header(self, n)
            )
            first = Small(tmp_path, disk=64 << 20)
            wait_until(lambda: first.store.counters()["objects"] == 8)
            if how == "cleared":
                assert first.store.clear(soon()) == 8
            threading.Timer(0.2, go_on.release, [1000]).start()
            first.store.close()
    one = Small(tmp_path, disk=64 << 20)
    wait_until(lambda: one.index.files_due == 0)
    found = {one.get(key) for key in keys}
    assert found == {Outcome.MISSING if how == "cleared" else Outcome.DONE}
    assert (files_of(tmp_path) == []) == (how == "cleared")
    assert one.store.verify(soon())[1:3] == (0, 0)
    assert bytes_on_disk(tmp_path) == one.store.counters()["disk_bytes"]
    one.store.close()
