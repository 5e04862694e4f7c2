"""Reads from the embedded store while something happens: extents that change hands under a reader,
one object that fails among others, a lock that no process gives back, a store that is closed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.errors import StoreError
from kvferry.pool.embedded import arena, store
from kvferry.pool.embedded import index as ix
from kvferry.pool.store import Outcome, Slices
from pool_peers import ROOM, Peer
from waiting import soon, wait_until

SUPPORT = str(Path(__file__).parents[1] / "support")
PART, PARTS = 100_000, 5  # so that chunks of 256 KiB end inside parts
WHOLE = PART * PARTS
DATA = np.random.default_rng(5).integers(0, 256, WHOLE, dtype=np.uint8)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path)
    made.memory[:WHOLE] = DATA
    whole = Slices.whole(np.array([made.base]), np.array([WHOLE]))
    assert made.store.put(["a"], [whole], soon()) == [Outcome.DONE]
    yield made
    made.close()


def wanted(peer: Peer, plain: bool = True) -> Slices:
    """All of the object, in parts that are alike, or in parts that are not and in another order."""
    cuts = np.arange(0, WHOLE + 1, PART)
    if not plain:
        cuts[1:-1] += [1, 22, 333] + [44] * (PARTS - 4)
    offset, length = cuts[:-1], np.diff(cuts)
    order = slice(None) if plain else slice(None, None, -1)
    return Slices(offset[order], peer.base + ROOM + offset[order], length[order])


def landed(peer: Peer) -> bool:
    return bool(np.array_equal(peer.memory[ROOM : ROOM + WHOLE], DATA))


def row_of(peer: Peer, key: str = "a") -> int:
    return int(peer.tiers.index.find(*ix.hash_keys([key]))[0])


def on_both_tiers(peer: Peer) -> int:
    """The object's row, with a file as if it had been promoted."""
    tiers, row = peer.tiers, row_of(peer)
    image = tiers.arena.view(int(tiers.index.offset[row]), int(tiers.index.image_bytes[row]))
    name = tiers.index.names(np.array([row]))[0]
    assert tiers.disk is not None and tiers.disk.write(name, image)
    tiers.index.state[row] = ix.BOTH
    return row


def interrupted(
    monkeypatch: pytest.MonkeyPatch, at: int, before: Callable[[], None], after: Any = None
) -> None:
    """Copy number `at` of a read comes between these two."""
    calls = []

    def around(real: Callable[..., None]) -> Callable[..., None]:
        def copy(*args: Any) -> None:
            calls.append(1)
            if len(calls) == at:
                before()
            real(*args)
            if len(calls) == at and after is not None:
                after()

        return copy

    for name in ("spread", "copy_runs"):
        monkeypatch.setattr(arena, name, around(getattr(arena, name)))


def scribble(peer: Peer, begin: int, end: int) -> None:
    tiers, row = peer.tiers, row_of(peer)
    head = int(tiers.index.image_bytes[row]) - WHOLE
    at = int(tiers.index.offset[row]) + head
    tiers.arena.view(at + begin, end - begin)[:] = bytes(end - begin)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_bytes_that_change_under_a_reader(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, plain: bool, at: int
) -> None:
    """Whatever was copied wrong is checked afterwards, wherever a chunk ends."""
    begin = (at - 1) * 2 * PART  # two parts are copied at a time
    interrupted(monkeypatch, at, lambda: scribble(peer, begin + 1000, begin + 50_000))
    got = peer.store.get(["a"], [wanted(peer, plain)], soon())
    assert got == [Outcome.CORRUPT] and not landed(peer)
    assert peer.store.counters()["corrupt"] == 1


@pytest.mark.parametrize("plain", [True, False])
def test_all_forms_arrive(peer: Peer, plain: bool) -> None:
    assert peer.store.get(["a"], [wanted(peer, plain)], soon()) == [Outcome.DONE]
    assert landed(peer)
    rng = np.random.default_rng(9)
    for _ in range(50):  # overlapping, sparse, empty, in any order
        count = int(rng.integers(1, 40))
        offset = rng.integers(0, WHOLE, count)
        length = np.minimum(rng.integers(0, 40_000, count), WHOLE - offset)
        length = np.minimum(length, ROOM // count)
        to = np.arange(count) * (ROOM // count)
        peer.memory[ROOM:] = 0
        parts = Slices(offset, peer.base + ROOM + to, length)
        assert peer.store.get(["a"], [parts], soon()) == [Outcome.DONE]
        for a, b, size in zip(offset, to, length, strict=True):
            assert np.array_equal(peer.memory[ROOM + b : ROOM + b + size], DATA[a : a + size])


def test_who_evicted_it_died_before_the_generation(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its extent is another object's, and nothing of the record changed but its state: the reader
    takes the file, and does not throw out what is there."""
    row, tiers = on_both_tiers(peer), peer.tiers

    def evicted() -> None:
        with tiers.locked(soon()):
            tiers.index.state[row] = ix.DISK  # killed here
            tiers.mend()
        scribble(peer, 0, WHOLE)

    interrupted(monkeypatch, 2, evicted)
    assert peer.store.get(["a"], [wanted(peer)], soon()) == [Outcome.DONE]
    assert landed(peer) and peer.store.exists(["a"], soon())[0]
    assert peer.store.counters()["corrupt"] == 0


def test_it_came_back_to_where_it_was(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and another reader has brought it to memory again, to the same place: at the end
    all is as it was, but what was copied in between is not the object."""
    row, tiers = on_both_tiers(peer), peer.tiers
    offset = int(tiers.index.offset[row])

    def evicted() -> None:
        with tiers.locked(soon()):
            tiers.index.state[row] = ix.DISK
            tiers.mend()
        scribble(peer, 0, WHOLE)

    def promoted() -> None:
        assert peer.store.promote(row, soon())
        assert int(tiers.index.offset[row]) == offset and tiers.index.state[row] == ix.BOTH

    interrupted(monkeypatch, 2, evicted, promoted)
    assert peer.store.get(["a"], [wanted(peer)], soon()) == [Outcome.DONE]
    assert landed(peer)


class Flips(np.ndarray):
    """States of which one changes from PROMOTING to BOTH after it was asked for BOTH."""

    live: Any = None
    row = 0

    def __eq__(self, other: Any) -> Any:
        same = np.asarray(self) == other
        if other == ix.BOTH and Flips.live is not None:
            Flips.live[Flips.row] = ix.BOTH
        return same


def test_a_promotion_ends_while_gaps_are_looked_for(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners change states without the lock; their extents are taken before and after."""
    index, row = peer.tiers.index, row_of(peer)
    index.state[row] = ix.PROMOTING
    monkeypatch.setattr(Flips, "live", index.state)
    monkeypatch.setattr(Flips, "row", row)
    monkeypatch.setattr(index, "state", index.state.view(Flips))
    with peer.tiers.locked(soon()):
        peer.tiers.arena.find_gaps()
    assert index.state[row] == ix.BOTH, "it did not change meanwhile"
    gaps = slice(0, index.gaps)
    begin, end = index.gap_offset[gaps], index.gap_offset[gaps] + index.gap_bytes[gaps]
    assert not ((begin <= index.offset[row]) & (index.offset[row] < end)).any()


def test_another_keys_bytes(peer: Peer) -> None:
    """A record that names this key over an image of another is damage, and not a miss for ever."""
    index, row = peer.tiers.index, row_of(peer)
    assert peer.store.put_bytes("b", b"b" * 1000, soon()) is Outcome.DONE
    other = row_of(peer, "b")
    for field in (index.offset, index.extent, index.length, index.image_bytes):
        field[row], field[other] = field[other].copy(), field[row].copy()
    assert peer.store.get(["a"], [wanted(peer)], soon()) == [Outcome.CORRUPT]
    assert not peer.store.exists(["a"], soon())[0]


def test_one_object_fails_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told with the others."""
    peer = Peer(tmp_path)
    keys = [f"k{n}" for n in range(6)]
    for number, key in enumerate(keys):
        assert peer.store.put_bytes(key, bytes([number]) * 1000, soon()) is Outcome.DONE
    real = store.serve

    def serve(key: str, *rest: Any) -> Outcome:
        if key == "k0":
            raise OSError(28, "No space left on device")
        return real(key, *rest)

    monkeypatch.setattr(store, "serve", serve)
    one = np.array([1000])
    slices = [Slices(one * 0, one * n + peer.base + ROOM, one) for n in range(6)]
    got = peer.store.get(keys, slices, soon())
    assert got == [Outcome.FAILED] + [Outcome.DONE] * 5
    assert (peer.memory[ROOM + 1000 : ROOM + 6000 : 2000] == [1, 3, 5]).all()
    peer.close()


def test_the_lock_is_not_waited_for(peer: Peer, tmp_path: Path) -> None:
    """A process is stopped with it: objects on disk are read from there, many of them, at once."""
    tiers, row = peer.tiers, on_both_tiers(peer)
    stopped = Peer(tmp_path)
    with tiers.locked(soon()):
        tiers.index.leave_memory(np.array([row]), ix.DISK)
        tiers.index.gaps_stale = True
    with stopped.tiers.lock.held(soon()):
        begun = time.monotonic()
        for _ in range(20):
            peer.memory[ROOM:] = 0
            assert peer.store.get(["a"], [wanted(peer)], soon(5.0)) == [Outcome.DONE]
            assert landed(peer)
        assert time.monotonic() - begun < 10.0  # each would wait for a second, or for five
    assert tiers.index.state[row] == ix.DISK

    def in_memory_again() -> bool:
        assert peer.store.get(["a"], [wanted(peer)], soon()) == [Outcome.DONE]
        return bool(tiers.index.state[row] == ix.BOTH)

    wait_until(in_memory_again)
    stopped.close()


@pytest.mark.parametrize("error", [StoreError("cannot grow"), OSError(30, "Read-only")])
def test_no_place_in_memory_is_no_failure(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tiers, row = peer.tiers, on_both_tiers(peer)

    def reserve(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(tiers, "reserve", reserve)
    with tiers.locked(soon()):
        tiers.index.leave_memory(np.array([row]), ix.DISK)
        tiers.index.gaps_stale = True
    assert peer.store.get(["a"], [wanted(peer)], soon()) == [Outcome.DONE]
    assert landed(peer)


CLOSED_UNDER_CALLS = """
import sys, threading, time
sys.path.insert(0, {support!r})
from pathlib import Path
import numpy as np
from kvferry.errors import StoreError
from kvferry.pool.embedded import arena, store
from kvferry.pool.store import Slices
from pool_peers import ROOM, Peer
store.CLOSE_SECONDS = {patience}
peer, other = Peer(Path({place!r})), Peer(Path({place!r}))
one = np.array([1000])
begun, go_on, told = threading.Barrier(3), threading.Event(), []
def slowly(real):
    def copy(*args):
        begun.wait(30)
        assert go_on.wait(30)
        real(*args)
    return copy
peer.memory[:] = 7
print(peer.store.put(["old"], [Slices.whole(one * 0 + peer.base, one)], time.monotonic() + 5))
store.copy_runs = slowly(store.copy_runs)
arena.spread = slowly(arena.spread)
def put():
    one_more = [Slices.whole(one * 0 + peer.base, one)]
    told.extend(peer.store.put(["new"], one_more, time.monotonic() + 20))
def get():
    to = Slices(one * 0, one * 0 + peer.base + ROOM, one)
    told.extend(peer.store.get(["old"], [to], time.monotonic() + 20))
threads = [threading.Thread(target=f) for f in (put, get)]
for t in threads: t.start()
begun.wait(30)
me, tiers = peer.tiers.members.me, peer.tiers
if {late}:
    peer.store.close()
    assert other.tiers.members.alive(me), "what it writes would be a dead process's"
    go_on.set()
else:
    threading.Timer(0.3, go_on.set).start()
    peer.store.close()
    assert not other.tiers.members.alive(me)
for t in threads: t.join()
assert [o.value for o in told] == ["done", "done"], told
assert not other.tiers.members.alive(me), "no call has closed it"
assert tiers.arena.fd == -1
try:
    peer.store.exists(["old"], 0.0)
except StoreError:
    pass
else:
    raise SystemExit("a closed store answers")
arena.spread = lambda *a: None
assert other.store.exists(["old", "new"], 0.0).all()
assert other.store.verify(time.monotonic() + 5)[:3] == (2, 0, 0)
peer.close()
"""


@pytest.mark.parametrize("late", [False, True])
def test_closed_while_calls_are_under_way(tmp_path: Path, late: bool) -> None:
    """They are waited for; and where that takes too long, nothing is taken from under them."""
    code = CLOSED_UNDER_CALLS.format(
        support=SUPPORT, place=str(tmp_path), patience=0.1 if late else 10.0, late=late
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=300, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_not_begun_when_it_is_closed(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends after the object at hand, not after the batch."""
    closing: list[threading.Thread] = []

    def close() -> None:
        closing.append(threading.Thread(target=peer.close))
        closing[0].start()
        wait_until(lambda: peer.store._calls.closing.is_set())

    interrupted(monkeypatch, 1, close)
    got = peer.store.get(["a"] * 3, [wanted(peer)] * 3, soon())
    closing[0].join(10)
    assert got == [Outcome.DONE, Outcome.FAILED, Outcome.FAILED] and landed(peer)
