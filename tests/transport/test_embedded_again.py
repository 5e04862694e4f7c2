"""The embedded store where two things happen at once: locks that outlive their holder, threads that
outlive their store, extents and files that change hands half-way."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_embedded_troubles import (
    OBJECT,
    SUPPORT,
    Small,
    bytes_on_disk,
    locked_before_it_reaps,
    soon,
)

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import StoreError
from kvferry.pool.embedded import disk, eviction, store
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import Arena
from kvferry.pool.embedded.disk import DiskTier
from kvferry.pool.embedded.eviction import Tiers
from kvferry.pool.embedded.store import EmbeddedStore, default_directory
from kvferry.pool.store import Outcome, Slices
from waiting import wait_until

TESTS = str(Path(__file__).parent)


def row_of(one: Small, key: str) -> int:
    return int(one.index.find(*ix.hash_keys([key]))[0])


def flip(one: Small, key: str) -> None:
    row = row_of(one, key)
    last = int(one.index.offset[row]) + int(one.index.image_bytes[row]) - 1
    view = one.tiers.arena.view(last, 1)
    view[0] ^= 1


def walked(one: Small) -> None:
    """Its process has looked at all files of the disk tier."""
    assert one.tiers.disk is not None and one.tiers.disk.wait(20)


def no_threads() -> bool:
    """Of a store's own; other tests may leave others that hang for a while."""
    mine = ("kvferry-files", "kvferry-store")
    return not any(t.name.startswith(mine) for t in threading.enumerate())


# A lock that no process gives back


def test_what_is_corrupt_is_removed_when_that_can_be(tmp_path: Path) -> None:
    """Another process is stopped with the lock. The reader is told at once, each time, and the
    object goes with the next call that gets the lock."""
    one, stopped = Small(tmp_path), Small(tmp_path)
    one.put("a", "b")
    assert one.store.put_bytes("layout", b"x" * 1000, soon()) is Outcome.DONE
    for key in ("a", "layout"):
        flip(one, key)
    with stopped.tiers.lock.held(soon()):
        begun = time.monotonic()
        assert [one.get("a") for _ in range(5)] == [Outcome.CORRUPT] * 5
        assert one.store.get_bytes("layout", soon()) is None
        assert time.monotonic() - begun < 5  # each would wait for a second, or for thirty
        good, corrupt, unread, why = one.store.verify(soon(1.5))
        assert (good, corrupt, unread) == (1, 0, 2) and "lock" in why  # they are still there
        assert one.store.exists(["a", "layout"], 0.0).all()
    one.store.access(["b"], soon())
    assert not one.store.exists(["a", "layout"], 0.0).any()
    assert stopped.store.counters()["corrupt"] == 2 and one.get("b") is Outcome.DONE
    assert one.put("a") == [Outcome.DONE] and one.get("a") is Outcome.DONE
    stopped.store.close()
    one.store.close()


def test_a_store_without_damage_is_verified_without_the_lock(tmp_path: Path) -> None:
    one, stopped = Small(tmp_path), Small(tmp_path)
    one.put("a", "b")
    with stopped.tiers.lock.held(soon()):
        assert one.store.verify(soon(10)) == (2, 0, 0, "")
    stopped.store.close()
    one.store.close()


def test_updates_are_written_when_the_lock_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the engine that was granted extents can give them back, and others need them."""
    monkeypatch.setattr(eviction, "UPDATE_SECONDS", 0.05)
    one, other = Small(tmp_path), Small(tmp_path)
    one.put(*(f"a{i}" for i in range(7)), size=120_000)
    held = other.tiers.lock.held(soon())
    with locked_before_it_reaps(monkeypatch, one, held):
        assert set(one.put("b0", "b1", "b2", "b3", size=60_000, seconds=1.5)) == {Outcome.FAILED}
    assert other.count(ix.WRITING) == 3
    held.__exit__(None, None, None)
    one.store.access(["c"], soon())
    assert other.count(ix.WRITING) == 0
    other.store.close()
    one.store.close()


def test_stopped_while_room_is_made_for_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object comes up from disk, another goes down for it, and meanwhile a process is stopped
    with the lock: the read goes on without it, and nothing stays half-way."""
    monkeypatch.setattr(eviction, "UPDATE_SECONDS", 0.05)
    one, two, key = demoted(tmp_path)
    held, write = two.tiers.lock.held(soon()), DiskTier.write

    def stopped(self: DiskTier, *args: Any) -> bool:
        held.__enter__()
        return write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "write", stopped)
        begun = time.monotonic()
        assert one.get(key) is Outcome.DONE
        assert time.monotonic() - begun < 10  # its deadline is far away
    assert one.index.state[row_of(one, key)] == ix.DISK
    held.__exit__(None, None, None)
    one.store.access(["c"], soon())
    assert one.count(*ix.OWNED) == 0
    assert {one.get(f"a{i}") for i in range(14)} == {Outcome.DONE}
    assert bytes_on_disk(tmp_path) == one.store.counters()["disk_bytes"]
    two.store.close()
    one.store.close()


FORKED = """
import os, sys, time
sys.path[:0] = [{support!r}, {tests!r}]
from pathlib import Path
from test_embedded_troubles import Small, soon
one = Small(Path({place!r}), disk=64 << 20)
one.put("mine")
with one.tiers.locked(soon()):
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:  # a data loader's worker, say: it has never heard of the store
        os.write(1, b"%d " % one.tiers.members.me)
        os.close(1); os.close(2)
        os.write(said, b"x")
        time.sleep(30)
        os._exit(0)
    os.write(1, b"%d " % child)
    os.read(heard, 1)
    os.kill(os.getpid(), 9)
"""


def test_a_forked_child_keeps_nothing_of_its_parents(tmp_path: Path) -> None:
    """Killed with the lock; its child lives on, with all that a fork copies."""
    watcher = Small(tmp_path, disk=64 << 20)
    code = FORKED.format(support=str(SUPPORT), tests=TESTS, place=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=300, check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    member, child = sorted(map(int, done.stdout.split()))
    try:
        os.kill(child, 0)
        assert watcher.put("a", seconds=10.0) == [Outcome.DONE]
        assert not watcher.tiers.members.alive(member)
        watcher.store.close()
        other = Small(tmp_path, disk=64 << 20, name="other")  # no process has the disk any more
        other.store.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_store_that_was_forked_is_refused(tmp_path: Path) -> None:
    one = Small(tmp_path, disk=64 << 20)
    one.put("a")
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcomes = one.put("b")
            one.store.close()
            os.write(said, str(outcomes == [Outcome.FAILED]).encode())
        finally:
            os._exit(0)
    os.close(said)
    assert os.read(heard, 10) == b"True"
    os.close(heard)
    os.waitpid(child, 0)
    assert one.put("b") == [Outcome.DONE] and one.get("a") is Outcome.DONE
    again = Small(tmp_path, disk=64 << 20)
    assert again.tiers.members.alive(one.tiers.members.me)
    again.store.close()
    one.store.close()


# Threads


def test_closed_while_a_walk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that does not answer: the walk keeps the store that it works on, and ends it."""
    monkeypatch.setattr(store, "CLOSE_SECONDS", 0.2)
    go_on, inside = threading.Event(), threading.Event()
    names = DiskTier.names

    def hang(self: DiskTier) -> Any:
        inside.set()
        assert go_on.wait(20)
        return names(self)

    watcher = Small(tmp_path, disk=64 << 20)
    walked(watcher)
    monkeypatch.setattr(DiskTier, "names", hang)
    one = Small(tmp_path, disk=64 << 20)  # a process that opens it looks for files of the dead
    tiers, me = one.tiers, one.tiers.members.me
    assert inside.wait(20)
    begun = time.monotonic()
    one.store.close()
    assert time.monotonic() - begun < 10  # the disk answers after twenty
    assert watcher.tiers.members.alive(me) and tiers.arena.fd >= 0
    with caplog.at_level(logging.WARNING):
        go_on.set()
        wait_until(lambda: tiers.arena.fd < 0)
    assert not watcher.tiers.members.alive(me)
    assert "failed" not in caplog.text
    assert watcher.put("a") == [Outcome.DONE]
    watcher.store.close()
    wait_until(no_threads)


def test_no_thread_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that cannot begin costs neither an opening nor a put."""

    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        one = Small(tmp_path, disk=64 << 20)
        for i in range(14):
            assert one.put(f"a{i}") == [Outcome.DONE]
        assert one.index.files_due != 0
    again = Small(tmp_path, disk=64 << 20)
    walked(again)
    assert one.index.files_due == 0
    again.store.close()
    one.store.close()


def test_closed_stores_are_told_nothing(tmp_path: Path) -> None:
    one = Small(tmp_path)
    one.store.close()
    one.store.access(["a"], soon())  # never raises
    with pytest.raises(StoreError, match="closed"):
        one.store.exists(["a"], soon())


def test_objects_that_fit_a_gap_get_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch in a full store: records are written once for each gap, not for each object."""
    one = Small(tmp_path)
    size = 10_000
    one.put("0", size=size)
    room = one.tiers.arena.capacity // int(one.index.extent[row_of(one, "0")])
    for i in range(1, room):
        assert one.put(str(i), size=size) == [Outcome.DONE]
    gone = [*range(3, 9), *range(20, 26)]
    assert one.store.remove([str(i) for i in gone], soon()) == 12
    grant, granted = Tiers._grant, list[int]()

    def counted(tiers: Tiers, wishes: list[eviction.Wish], offset: int) -> None:
        granted.append(len(wishes))
        grant(tiers, wishes, offset)

    monkeypatch.setattr(Tiers, "_grant", counted)
    new = [f"new {i}" for i in range(12)]
    assert one.put(*new, size=size) == [Outcome.DONE] * 12
    assert granted == [6, 6]
    kept = [str(i) for i in range(room) if i not in gone]
    assert all(one.get(key, size) is Outcome.DONE for key in new + kept)
    one.store.close()


def test_a_process_that_only_reads_gives_extents_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process was stopped with the lock while this one gave a put up."""
    one, two = Small(tmp_path), Small(tmp_path)
    monkeypatch.setattr(eviction, "UPDATE_SECONDS", 0.05)
    good = [True]
    with one.store.granting(["a"], [OBJECT], good, soon()):
        held = two.tiers.lock.held(soon())
        held.__enter__()
    assert one.count(ix.WRITING) == 1
    assert not one.store.exists(["a"], soon()).any()  # and does not wait
    held.__exit__(None, None, None)
    assert not one.store.exists(["a"], soon()).any()
    assert one.count(ix.WRITING) == 0
    one.store.close()
    two.store.close()


# Extents and files that change hands


def demoted(place: Path) -> tuple[Small, Small, str]:
    """Two processes, and an object that is on disk alone."""
    one, two = Small(place, disk=64 << 20), Small(place, disk=64 << 20)
    for i in range(14):
        one.put(f"a{i}")
    key = next(f"a{i}" for i in range(14) if one.index.state[row_of(one, f"a{i}")] == ix.DISK)
    return one, two, key


def test_another_brings_it_up_right_after_me(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brought up, evicted, and under way again in another process before the first looks back: what
    is under way is the other's, and its extent is not given away under it."""
    one, two, key = demoted(tmp_path)
    row, count = row_of(one, key), one.index.count

    def meanwhile(name: str, by: int = 1) -> None:
        count(name, by)
        if name == "promoted":
            tiers = two.tiers
            with tiers.locked(soon()):
                tiers.index.leave_memory(np.array([row]), ix.DISK)
                tiers.index.generation[row] += np.uint32(1)
                tiers.index.owner[row] = tiers.members.me
                tiers.index.state[row] = ix.PROMOTING

    with monkeypatch.context() as patch:
        patch.setattr(one.index, "count", meanwhile)
        assert one.store.promote(row, soon())
    assert one.index.state[row] == ix.PROMOTING and one.index.owner[row] == two.tiers.members.me
    two.store.close()
    one.store.close()


def test_a_slow_file_does_not_replace_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one process writes an object's file, others remove the object, put it again and send it
    down; the first one's file, of an extent that is no longer its own, must not appear."""
    one, two = Small(tmp_path, disk=64 << 20), Small(tmp_path, disk=64 << 20)
    keys = [f"a{i}" for i in range(10)]
    one.put(*keys)
    go_on, waiting, create = threading.Event(), threading.Event(), disk.create_private

    def slow(path: Path) -> int:
        if threading.current_thread().name == "slow":
            waiting.set()
            assert go_on.wait(20)
        return create(path)

    monkeypatch.setattr(disk, "create_private", slow)
    first = threading.Thread(target=one.put, args=("b",), name="slow")
    first.start()
    assert waiting.wait(20)
    (row,) = one.index.in_state(ix.DEMOTING)
    key = next(k for k in keys if row_of(one, k) == row)
    assert two.store.remove([key], soon()) == 1
    for i in range(4):  # into what was its extent
        assert two.put(f"c{i}") == [Outcome.DONE]
    assert two.put(key) == [Outcome.DONE]
    for i in range(40):
        if two.index.state[row_of(two, key)] == ix.DISK:
            break
        two.put(f"d{i}")
    assert two.index.state[row_of(two, key)] == ix.DISK
    go_on.set()
    first.join(20)
    assert two.get(key) is Outcome.DONE
    assert two.store.counters()["corrupt"] == 0
    assert bytes_on_disk(tmp_path) == two.store.counters()["disk_bytes"]
    two.store.close()
    one.store.close()


SWEEPING = """
import os, sys, time
sys.path[:0] = [{support!r}, {tests!r}]
from pathlib import Path
from test_embedded_troubles import Small
from kvferry.pool.embedded.disk import DiskTier
DiskTier._sweep = lambda self, *_: os.kill(os.getpid(), 9)
one = Small(Path({place!r}), disk=64 << 20)
time.sleep(20)
"""


def test_who_swept_is_gone(tmp_path: Path) -> None:
    """Killed outside of the lock, with nothing of its own: the next process that opens the store
    begins the walk again."""
    one, two, key = demoted(tmp_path)
    two.store.close()
    walked(one)
    one.index.state[row_of(one, key)] = ix.GHOST  # a file without a record
    assert bytes_on_disk(tmp_path) > one.store.counters()["disk_bytes"]
    code = SWEEPING.format(support=str(SUPPORT), tests=TESTS, place=str(tmp_path))
    child = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    assert bytes_on_disk(tmp_path) > one.store.counters()["disk_bytes"]
    again = Small(tmp_path, disk=64 << 20)
    walked(again)
    assert bytes_on_disk(tmp_path) == one.store.counters()["disk_bytes"]
    again.store.close()
    one.store.close()


def test_parts_of_the_dead_whose_objects_were_removed(tmp_path: Path) -> None:
    """No record says that they died at it; the next walk finds what they left, and the living's
    stays."""
    one, two, _ = demoted(tmp_path)
    walked(one)
    theirs = tmp_path / "d" / ".part-999-3"
    mine = tmp_path / "d" / f".part-{one.tiers.members.me}-999"
    for part in (theirs, mine):
        part.write_bytes(b"half")
    two.store.close()
    two = Small(tmp_path, disk=64 << 20)
    walked(two)
    assert mine.exists() and not theirs.exists()
    two.store.close()
    one.store.close()


def test_a_disk_that_is_elsewhere_for_this_process(tmp_path: Path) -> None:
    """A container shares memory with the store's processes, but not their disk. It is refused, and
    takes nothing away."""
    one, two, key = demoted(tmp_path)
    two.store.close()
    (tmp_path / "d").rename(tmp_path / "theirs")
    (tmp_path / "mine").mkdir(mode=0o700)
    with pytest.raises(StoreError, match="have the store open"):
        EmbeddedStore(tmp_path / "s", 1 << 20, tmp_path / "mine", 64 << 20, slots=1 << 10)
    assert (tmp_path / "s" / "disk").readlink() == tmp_path / "d"
    (tmp_path / "theirs").rename(tmp_path / "d")
    assert one.get(key) is Outcome.DONE
    one.store.close()


def test_another_disk_under_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container shares memory with the store's processes, and has a disk of its own under their
    path. It is refused, and takes nothing away."""
    one, two, key = demoted(tmp_path)
    two.store.close()
    (tmp_path / "d").rename(tmp_path / "theirs")
    (tmp_path / "d").mkdir(mode=0o700)
    monkeypatch.setattr(disk, "GOING_SECONDS", 0.1)
    with pytest.raises(StoreError, match="another directory for the processes"):
        Small(tmp_path, disk=64 << 20)
    (tmp_path / "d" / disk.OWNER_FILE).unlink()
    (tmp_path / "d").rmdir()
    (tmp_path / "theirs").rename(tmp_path / "d")
    again = Small(tmp_path, disk=64 << 20)
    assert again.get(key) is Outcome.DONE
    again.store.close()
    one.store.close()


# Where it lies


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run under numbers that no passwd file knows."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(store.getpass, "getuser", unknown)
    assert default_directory().name == f"kvferry-{os.getuid()}"


def test_a_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user may make directories in /dev/shm, also under this user's name."""
    monkeypatch.setattr(store, "default_directory", lambda: tmp_path / "planted")
    (tmp_path / "planted").mkdir(mode=0o700)
    os.chown(tmp_path / "planted", os.getuid() + 1 if os.getuid() == 0 else os.getuid(), -1)
    if os.getuid() != 0:
        pytest.skip("only root can make directories of others")
    with pytest.raises(StoreError, match="belongs to user"):
        EmbeddedStore(memory_bytes=1 << 20, slots=1 << 10)
    os.chown(tmp_path / "planted", 0, -1)
    EmbeddedStore(memory_bytes=1 << 20, slots=1 << 10).close()


def test_sizes(tmp_path: Path) -> None:
    assert OBJECT * 10 < 1 << 20 < OBJECT * 11  # what the tests above count on


def test_a_request_that_is_told_of_after_its_objects_were_put(tmp_path: Path) -> None:
    """A save may be faster than the thread that tells: eviction learns the same."""

    def learned(first: str) -> list[int]:
        made = EmbeddedStore(tmp_path / first, 16 << 20)
        data = np.ones(1000, dtype=np.uint8)
        made.register([MemoryRegion(data.ctypes.data, data.nbytes)])
        ranges = Slices.whole(np.array([data.ctypes.data]), np.array([1000]))
        turns = []
        for turn in range(1, 4):
            keys = [f"talk/{n}" for n in range(8 * turn)]
            steps = [
                lambda keys=keys: made.access(keys, time.monotonic() + 5),
                lambda keys=keys: made.put(keys, [ranges] * len(keys), time.monotonic() + 5),
            ]
            for step in steps if first == "told" else steps[::-1]:
                step()
            turns.append(max(one.turns for one in made.listed()))
        made.close()
        return turns

    assert learned("put") == learned("told") == [1, 2, 3]


def test_memory_that_is_short_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were made cannot be given back: others may have grown into them."""
    made = EmbeddedStore(tmp_path / "store", 64 << 20)
    asked: list[int] = []
    monkeypatch.setattr(Arena, "_advise", lambda self, first, last, advice: asked.append(last))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=16, f_frsize=4096))
        made.back_memory(0, 32 << 20)
    assert asked == []
    assert made.back_memory(0, 48 << 20) == 48 << 20 and max(asked) == 48 << 20
    made.close()
