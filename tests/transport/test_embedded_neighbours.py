"""The embedded store beside what is not its own: other people's files, other configurations,
processes that died while they held nothing but memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import StoreError
from kvferry.pool.embedded import eviction
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.disk import DiskTier
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome
from pool_peers import DISK, MEMORY, ROOM, Peer, content
from waiting import soon

SUPPORT = Path(__file__).parents[1] / "support"


def filled(place: Path) -> Peer:
    """A store with objects in both tiers."""
    peer = Peer(place)
    for number in range(70):
        assert peer.put(number) is Outcome.DONE
    assert peer.store.counters()["demoted"] > 10
    return peer


def restarted(place: Path) -> Peer:
    """As after a restart of the host: no memory, the disk as it was."""
    for file in (place / "memory").iterdir():
        file.unlink()
    return Peer(place)


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    """A disk tier in a directory that others use: nothing of theirs is read, counted or removed."""
    digits = "0123456789abcdef" * 2
    theirs = {
        "hf/model.bin": b"weights",
        "ab/notes.txt": b"",
        f"ab/{digits}": b"KVF1 is not where we have it, and the folder is not ours either",
        ".part-of-a-download": b"half",
        ".part-1-2.tmp": b"half",
    }
    (tmp_path / "disk").mkdir(mode=0o700)
    for name, data in theirs.items():
        (tmp_path / "disk" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "disk" / name).write_bytes(data)
    (tmp_path / "disk/01").mkdir()
    (tmp_path / "disk/01/link").symlink_to(tmp_path / "disk/hf/model.bin")
    peer = filled(tmp_path)
    peer.close()
    again = restarted(tmp_path)
    assert again.store.counters()["disk_bytes"] > 0
    again.store.verify(soon())
    again.store.clear(soon())
    again.close()
    for name, data in theirs.items():
        assert (tmp_path / "disk" / name).read_bytes() == data, name
    assert (tmp_path / "disk/01/link").is_symlink()


def test_what_a_loss_of_power_leaves_is_removed(tmp_path: Path) -> None:
    filled(tmp_path).close()
    files = sorted(p for p in (tmp_path / "disk").glob("??/*"))
    whole = files[0].read_bytes()
    files[0].write_bytes(b"")
    files[1].write_bytes(bytes(len(whole)))
    files[2].write_bytes(files[2].read_bytes()[:-1])
    (tmp_path / "disk/.part-7-1").write_bytes(whole[:100])
    again = restarted(tmp_path)
    assert not any(f.exists() for f in files[:3]) and files[3].exists()
    assert not (tmp_path / "disk/.part-7-1").exists()
    again.close()


def on_disk(peer: Peer) -> list[int]:
    return [int(one.key.split("/")[1]) for one in peer.store.listed() if one.tier == "disk"]


@pytest.mark.parametrize("other", ["none", "elsewhere"])
def test_an_engine_with_another_disk_configuration(tmp_path: Path, other: str) -> None:
    """The store's own disk tier holds; an engine that does not know it loses nothing of it."""
    first = filled(tmp_path)
    numbers = on_disk(first)
    before = first.store.counters()
    elsewhere = tmp_path / "other" if other == "elsewhere" else None
    second = EmbeddedStore(
        tmp_path / "memory", MEMORY, elsewhere, DISK if elsewhere else 0, slots=1 << 12
    )
    peer = Peer.__new__(Peer)
    peer.memory, peer.store, peer.base = first.memory, second, first.base
    second.register([MemoryRegion(first.base, first.memory.nbytes)])
    assert {peer.get(n) for n in numbers} == {Outcome.DONE}
    for number in range(100, 130):  # evictions go down to the same disk
        peer.put(number)
    second.close()
    assert first.store.verify(soon())[1:3] == (0, 0)
    after = first.store.counters()
    assert after["corrupt"] == 0 and after["demoted"] > before["demoted"]
    files = sum(f.stat().st_size for f in (tmp_path / "disk").glob("??/*"))
    assert files == after["disk_bytes"]
    assert elsewhere is None or not elsewhere.exists()
    first.close()


def test_a_disk_that_is_not_there(tmp_path: Path) -> None:
    """Refused with the place, and nothing removed; served again when it is back, or where it is."""
    first = filled(tmp_path)
    numbers = on_disk(first)
    first.close()
    (tmp_path / "disk").rename(tmp_path / "moved")
    for disk in (None, tmp_path / "nowhere"):
        with pytest.raises(StoreError, match=str(tmp_path / "disk")):
            EmbeddedStore(tmp_path / "memory", MEMORY, disk, DISK if disk else 0, slots=1 << 12)
    EmbeddedStore(tmp_path / "memory", MEMORY, tmp_path / "moved", DISK, slots=1 << 12).close()
    (tmp_path / "disk").symlink_to(tmp_path / "moved")
    again = Peer(tmp_path)
    assert {again.get(n) for n in numbers} == {Outcome.DONE}
    again.close()


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_directory_that_is_removed_while_it_is_used(tmp_path: Path, has_disk: bool) -> None:
    """Its processes go on. The next one shares nothing with them, and takes no file of theirs."""
    one = Peer(tmp_path, disk=has_disk)
    assert one.put(1) is Outcome.DONE
    shutil.rmtree(tmp_path / "memory")
    assert {one.put(number) for number in range(2, 60)} == {Outcome.DONE}
    if has_disk:
        with pytest.raises(StoreError, match="another store that is in use"):
            Peer(tmp_path)
        assert {one.get(number) for number in range(1, 60)} == {Outcome.DONE}
    else:
        two = Peer(tmp_path, disk=False)
        assert two.get(59) is Outcome.MISSING and two.put(1) is Outcome.DONE
        assert one.get(59) is Outcome.DONE
        two.close()
    one.close()
    last = Peer(tmp_path, disk=has_disk)
    assert last.store.verify(soon()).corrupt == 0 and last.get(1) is Outcome.DONE
    last.close()


def test_a_store_without_a_disk_stays_without(tmp_path: Path) -> None:
    first = Peer(tmp_path, disk=False)
    second = Peer(tmp_path)
    assert second.put(1) is Outcome.DONE and first.get(1) is Outcome.DONE
    assert not (tmp_path / "disk").exists()
    second.close()
    first.close()


def test_a_file_that_cannot_be_opened_now_is_not_lost(tmp_path: Path) -> None:
    peer = filled(tmp_path)
    number = on_disk(peer)[0]
    with pytest.MonkeyPatch.context() as patch:

        def too_many(*_: object, **__: object) -> int:
            raise OSError(24, "Too many open files")

        patch.setattr(os, "open", too_many)
        assert peer.get(number) is Outcome.FAILED
    assert peer.get(number) is Outcome.DONE
    assert peer.store.counters()["corrupt"] == 0
    peer.close()


def test_memory_of_a_process_that_died_outside_the_lock(tmp_path: Path) -> None:
    """A quarter of the memory belongs to a dead process; the next that needs it uses it again."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
import numpy as np
from pool_peers import Peer, ROOM, in_pieces
from kvferry.pool.embedded import store
store.copy_runs = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
peer = Peer(Path({str(tmp_path)!r}), disk=False)
peer.store.put(["a/%d" % i for i in range(5)], [in_pieces(peer.base, 280_000, 2)] * 5, 1e6)
"""
    watcher = Peer(tmp_path, disk=False)
    child = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    index = watcher.tiers.index
    assert len(index.in_state(ix.WRITING)) == 5
    room = index.geometry.memory_bytes
    data = content(7)
    for number in range(room // len(data) + 40):
        watcher.store.put_bytes(f"b/{number}", data.tobytes(), soon())
    assert watcher.store.counters()["evicted"] > 0
    assert len(index.in_state(ix.WRITING)) == 0, "memory of the dead is still held"
    watcher.close()


def test_one_object_larger_than_what_the_living_hold(tmp_path: Path) -> None:
    """Also where nothing can be evicted, because the dead hold all of it."""
    watcher = Peer(tmp_path, disk=False, memory=2 << 20)
    index = watcher.tiers.index
    assert watcher.put(3) is Outcome.DONE
    row = index.in_state(ix.MEMORY)
    with watcher.tiers.locked(soon()):
        index.extent[row], index.offset[row] = watcher.tiers.arena.capacity, 0
        index.owner[row] = 999  # a number that no process has
        index.state[row] = ix.WRITING
        watcher.tiers.arena.find_gaps()
    assert watcher.put(9) is Outcome.DONE
    watcher.close()


def test_a_slot_that_went_to_another_key(tmp_path: Path) -> None:
    """A writer that was not served is not told that its key exists, when the slot is another's."""
    peer = Peer(tmp_path, disk=False)
    assert peer.put(3) is Outcome.DONE
    index = peer.tiers.index
    row = int(index.in_state(ix.MEMORY)[0])
    assert index.is_of(row, "object/3") and not index.is_of(row, "object/4")
    peer.close()


def test_a_file_that_goes_while_its_object_comes_to_memory(tmp_path: Path) -> None:
    """BOTH becomes MEMORY and the file goes, between a reader's look and its read."""
    peer = filled(tmp_path)
    number = on_disk(peer)[0]
    index = peer.tiers.index
    read_file = EmbeddedStore._read_file

    def late(self: EmbeddedStore, key: str | None, row: int, need: object) -> Outcome:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(EmbeddedStore, "_read_file", read_file)
            assert self.promote(row, soon())  # another thread brings it up
        index.state[row] = ix.MEMORY  # and the disk needed room
        name = index.names(np.array([row]))[0]
        assert peer.tiers.disk is not None
        peer.tiers.disk.remove([name])
        return read_file(self, key, row, need)  # type: ignore[arg-type]

    promote = EmbeddedStore.promote
    first = [True]

    def not_the_first(self: EmbeddedStore, row: int, deadline: float) -> bool:
        if first:
            first.clear()
            return False
        return promote(self, row, deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedStore, "_read_file", late)
        patch.setattr(EmbeddedStore, "promote", not_the_first)
        assert peer.get(number) is Outcome.DONE
    assert peer.store.counters()["corrupt"] == 0
    assert np.count_nonzero(peer.memory[ROOM:]) > 0
    peer.close()


def test_others_get_the_lock_while_many_objects_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To remove a million files takes a minute: other engines store what they compute meanwhile."""
    one, two = filled(tmp_path), Peer(tmp_path)
    monkeypatch.setattr(eviction, "BATCH_FILES", 8)
    remove, removes = DiskTier.remove, Event()

    def slow(disk: DiskTier, names: Sequence[str]) -> None:
        removes.set()
        time.sleep(0.02 * len(names))
        remove(disk, names)

    monkeypatch.setattr(DiskTier, "remove", slow)
    clearing = Thread(target=one.store.clear, args=(soon(),))
    clearing.start()
    assert removes.wait(30)
    with two.tiers.locked(time.monotonic() + 0.4):
        assert two.store.counters()["objects"] > 20
    clearing.join(30)
    assert one.store.counters()["objects"] == 0
    two.close()
    one.close()


def test_clear_removes_what_a_dead_process_was_bringing_up(tmp_path: Path) -> None:
    """A process was killed while it read an object from disk: the object does not come back."""
    peer = filled(tmp_path)
    number = on_disk(peer)[0]
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
from kvferry.pool.embedded.disk import DiskTier
from pool_peers import Peer
peer = Peer(Path({str(tmp_path)!r}))
DiskTier.read = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
peer.get({number})
"""
    child = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    assert len(peer.tiers.index.in_state(ix.PROMOTING)) == 1
    peer.store.clear(soon())
    assert peer.store.counters()["objects"] == 0
    assert peer.get(number) is Outcome.MISSING
    peer.close()
