"""The list of gaps in the embedded store's arena: kept up to date, distrusted where a record may be
wrong; and memory that the system gives without the store's lock being held."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from kvferry.pool.embedded import arena
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import Arena
from kvferry.pool.embedded.index import SharedIndex
from kvferry.pool.store import Ints, Outcome
from pool_peers import MEMORY, Peer

PAGE = arena.ALIGN


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


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
def test_a_full_store_is_not_searched_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    """However objects come and go, in two processes, the list is the one that the records give."""
    one, two = Peer(tmp_path, disk), Peer(tmp_path, disk)
    rng = random.Random(7)
    in_state = SharedIndex.in_state

    def without_the_lock(self: SharedIndex, *states: int) -> Ints:
        assert not any(each.tiers.lock._threads.locked() for each in (one, two))
        return in_state(self, *states)

    with monkeypatch.context() as patch:
        patch.setattr(SharedIndex, "in_state", without_the_lock)
        for number in range(300):
            assert rng.choice((one, two)).put(number) is Outcome.DONE
            if number % 10 == 9:
                old = [f"object/{rng.randrange(number)}" for _ in range(3)]
                rng.choice((one, two)).store.remove(old, soon())
                two.get(rng.randrange(number))  # may come up from disk
    counters = one.store.counters()
    assert counters["evicted"] > 100 and counters["dropped"] > 50
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
    """Others use the store meanwhile. One that needs memory too waits: where memory is short, the
    system would take back from one process what it gave to the other."""
    monkeypatch.setattr(arena, "GROW_BYTES", PAGE)
    one, two = Peer(tmp_path, disk=False), Peer(tmp_path, disk=False)
    allocate, steps = os.posix_fallocate, list[tuple[int, int]]()
    also = Thread(target=two.put, args=(100,))

    def slow(fd: int, first: int, size: int) -> None:
        allocate(fd, first, size)
        steps.append((first, first + size))
        if len(steps) == 1:
            also.start()
        if fd == one.tiers.arena._fd:
            with two.tiers.locked(soon()):
                assert two.tiers.arena.backed() == first
            time.sleep(0.02)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    assert {one.put(number) for number in range(20)} == {Outcome.DONE}
    also.join(20)
    assert len(steps) == 21 and all(last == first for (_, last), (first, _) in pairwise(steps))
    assert one.store.counters()["evicted"] == 0
    assert {two.get(number) for number in (*range(20), 100)} == {Outcome.DONE}
    assert gaps_of(one) == found(two)
    two.close()
    one.close()


def test_another_takes_the_gap_first(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the arena can grow, nothing is evicted."""
    monkeypatch.setattr(arena, "GROW_BYTES", PAGE)
    lacks, answers = Arena.lacks, iter([False])
    assert peer.put(1) is Outcome.DONE
    monkeypatch.setattr(Arena, "lacks", lambda *args: next(answers, lacks(*args)))
    assert peer.put(2) is Outcome.DONE and next(answers, None) is None
    assert peer.store.counters()["evicted"] == 0


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
