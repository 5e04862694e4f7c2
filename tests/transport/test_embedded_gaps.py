"""The list of gaps in the embedded store's arena: kept up to date, distrusted where a record may be
wrong; and memory that the system gives without the store's lock being held."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pool_peers
from kvferry.pool.embedded import arena
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import Arena
from kvferry.pool.store import Outcome
from pool_peers import MEMORY, Peer
from waiting import soon

PAGE = arena.ALIGN


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.close()


def gaps_of(peer: Peer) -> list[tuple[int, int]]:
    index = peer.tiers.index
    count = index.gaps
    pairs = zip(index.gap_offset[:count], index.gap_bytes[:count], strict=True)
    return sorted((int(begin), int(size)) for begin, size in pairs)


def found(peer: Peer) -> list[tuple[int, int]]:
    """The gaps by the records."""
    with peer.tiers.locked(soon()):
        peer.tiers.arena.find_gaps()
    return gaps_of(peer)


@pytest.mark.parametrize("disk", [False, True])
def test_a_full_store_is_not_searched_for_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    """However objects come and go, in two processes, the list is the one that the records give."""
    one, two = Peer(tmp_path, disk), Peer(tmp_path, disk)
    rng = random.Random(7)
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "find_gaps", lambda _: pytest.fail("looked at all records"))
        for number in range(300):
            assert rng.choice((one, two)).put(number) is Outcome.DONE
            if number % 10 == 9:
                old = [f"object/{rng.randrange(number)}" for _ in range(3)]
                rng.choice((one, two)).store.remove(old, soon())
                two.get(rng.randrange(number))  # may come up from disk
    assert one.store.counters()["evicted"] > 100
    kept = gaps_of(one)
    assert kept == found(two) and sum(size for _, size in kept) < MEMORY // 2
    two.close()
    one.close()


def test_gaps_that_touch_become_one(peer: Peer) -> None:
    index = peer.tiers.index
    with peer.tiers.locked(soon()):
        index.arena_bytes, index.gaps = 100 * PAGE, 0
        for begin, size in ((10, 2), (50, 1), (14, 2), (12, 2), (8, 2), (90, 10)):
            index.add_gaps(np.array([begin * PAGE]), np.array([size * PAGE]))
        assert gaps_of(peer) == [(8 * PAGE, 8 * PAGE), (50 * PAGE, PAGE), (90 * PAGE, 10 * PAGE)]
        assert not index.gaps_stale
        peer.tiers.mend()


@pytest.mark.parametrize(
    ("begin", "size"), [(11, 1), (9, 2), (5, 20), (-1, 2), (99, 2), (30, 0), (30, -1), (1 << 50, 1)]
)
def test_memory_that_cannot_be_free(peer: Peer, begin: int, size: int) -> None:
    """It is a gap already, or outside of the arena: no gap of the list is used any more."""
    index = peer.tiers.index
    assert peer.put(1) is Outcome.DONE
    with peer.tiers.locked(soon()):
        index.arena_bytes, index.gaps = 100 * PAGE, 0
        index.add_gaps(np.array([10 * PAGE]), np.array([2 * PAGE]))
        index.add_gaps(np.array([begin * PAGE]), np.array([size * PAGE]))
        assert (index.gaps, index.gaps_stale) == (0, 1)
        index.arena_bytes = MEMORY
    assert {peer.put(number) for number in range(2, 6)} == {Outcome.DONE}
    assert {peer.get(number) for number in range(1, 6)} == {Outcome.DONE}
    assert gaps_of(peer) == found(peer)


def test_more_gaps_than_the_list_has_places(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest are kept; those that were left out are found when nothing else fits."""
    monkeypatch.setattr(ix, "MAX_GAPS", 3)
    for number in range(8):
        assert peer.store.put_bytes(f"k{number}", bytes(30_000), soon()) is Outcome.DONE
    peer.store.remove([f"k{number}" for number in (0, 2, 4, 6)], soon())
    index, total = peer.tiers.index, len(gaps_of(peer))
    assert total == 3 and index.gaps_stale
    with peer.tiers.locked(soon()):
        peer.tiers.arena.take(int(index.gap_bytes[: index.gaps].max()))  # all but the small ones
        index.gaps = 0
    assert peer.store.put_bytes("again", bytes(30_000), soon()) is Outcome.DONE
    assert peer.store.counters()["evicted"] == 0


@pytest.mark.parametrize("field", ["offset", "extent"])
def test_a_damaged_record_names_anothers_memory(peer: Peer, field: str) -> None:
    """It is removed; the other object's memory stays taken."""
    assert peer.put(1) is peer.put(2) is Outcome.DONE  # the second one is longer
    index = peer.tiers.index
    first, second = index.find(*ix.hash_keys(["object/1", "object/2"]))
    if field == "offset":
        index.offset[first] = index.offset[second]
        assert peer.get(1) is Outcome.CORRUPT
    else:
        index.extent[first] += index.extent[second]
        assert peer.store.remove(["object/1"], soon()) == 1
    assert index.gaps_stale
    assert {peer.put(number) for number in range(3, 9)} == {Outcome.DONE}
    assert {peer.get(number) for number in range(2, 9)} == {Outcome.DONE}


def test_the_system_gives_memory_without_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others use the store meanwhile, and may be given the same memory: one of them adds it."""
    monkeypatch.setattr(arena, "GROW_BYTES", PAGE)
    one, two = Peer(tmp_path, disk=False), Peer(tmp_path, disk=False)
    allocate, others = os.posix_fallocate, list(range(100, 110))

    def slow(fd: int, first: int, size: int) -> None:
        allocate(fd, first, size)
        if fd == one.tiers.arena.fd and others:
            assert two.put(others.pop()) is Outcome.DONE

    monkeypatch.setattr(os, "posix_fallocate", slow)
    assert {one.put(number) for number in range(10)} == {Outcome.DONE}
    assert not others and one.store.counters()["evicted"] == 0
    assert {two.get(number) for number in (*range(10), *range(100, 110))} == {Outcome.DONE}
    assert gaps_of(one) == found(two)
    two.close()
    one.close()


def test_the_system_has_no_more_memory(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store stays as large as it got, and the system is not asked for every put."""
    monkeypatch.setattr(arena, "GROW_BYTES", 1 << 20)
    allocate, asked = os.posix_fallocate, list[int]()

    def none_left(fd: int, first: int, size: int) -> None:
        asked.append(first + size)
        if first + size > 3 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, first, size)

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    monkeypatch.setattr(arena, "NO_MEMORY_SECONDS", 1000.0)
    assert {peer.put(number) for number in range(60)} == {Outcome.DONE}
    assert 2 << 20 < peer.tiers.arena.backed() <= 3 << 20
    assert peer.store.counters()["evicted"] > 0
    assert sum(end > 3 << 20 for end in asked) == 2  # a large step, and a small one
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    peer.tiers.arena._grow_after = 0.0
    assert {peer.put(number) for number in range(60, 100)} == {Outcome.DONE}
    assert peer.tiers.arena.backed() == MEMORY


KILLED = """
import os, signal, sys
sys.path.insert(0, {support!r})
from pathlib import Path
from kvferry.pool.embedded import index as ix
from pool_peers import Peer

class Deadly:
    def __init__(self, array): self.array = array
    def __getitem__(self, at): return self.array[at]
    def __setitem__(self, at, value): os.kill(os.getpid(), signal.SIGKILL)

made = ix.SharedIndex.__init__
def make(self, *given, **more):
    made(self, *given, **more)
    self.gap_bytes = Deadly(self.gap_bytes)
ix.SharedIndex.__init__ = make
Peer(Path({place!r}), disk=False)
"""


def test_a_process_is_killed_between_two_writes_to_the_gaps(tmp_path: Path) -> None:
    """It opens the store, and has written the gaps' offsets, but not their lengths."""
    one = Peer(tmp_path, disk=False)
    by_size = sorted(range(40), key=lambda number: len(pool_peers.content(number)))
    short, long, *rest = by_size[0], by_size[-1], *by_size[1:-1]
    order = [rest[0], rest[1], short, rest[2], long, *rest[3:8]]
    for number in order:
        assert one.put(number) is Outcome.DONE
    for gone in (rest[0], short, long):
        one.store.remove([f"object/{gone}"], soon())
    assert one.put(rest[0]) is Outcome.DONE  # the last gap takes the place of the first one
    index = one.tiers.index
    assert index.gap_offset[0] > index.gap_offset[1] and index.gap_bytes[0] > index.gap_bytes[1]
    support = str(Path(pool_peers.__file__).parent)
    program = KILLED.format(support=support, place=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert {one.put(number) for number in (long, short)} == {Outcome.DONE}
    assert {one.get(number) for number in order} == {Outcome.DONE}
    assert one.store.verify(soon()).corrupt == 0 and gaps_of(one) == found(one)
    one.close()


def test_where_memory_is_short_the_store_takes_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is too large for what is left gets room for some of its objects."""
    data, count = pool_peers.content(3), 8
    allocate, most = os.posix_fallocate, count // 2 * (len(data) + PAGE) // PAGE * PAGE

    def short(fd: int, first: int, size: int) -> None:
        if first + size > most:
            raise OSError(errno.ENOSPC, "no memory")
        allocate(fd, first, size)

    one = Peer(tmp_path, disk=False)
    monkeypatch.setattr(os, "posix_fallocate", short)
    ranges = pool_peers.in_pieces(one.base, len(data), 1)
    outcomes = one.store.put([f"k{n}" for n in range(count)], [ranges] * count, soon())
    assert outcomes.count(Outcome.DONE) >= 2 and outcomes.count(Outcome.FULL) >= 1
    one.close()
