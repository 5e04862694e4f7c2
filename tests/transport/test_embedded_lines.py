"""The embedded store, stopped or killed before any line of its code.

A tracer stops one process before a line that is drawn at random. Either it dies there, or another
process works meanwhile, on the same objects, and then it goes on. `KVFERRY_SEED` draws the same
lines again, `KVFERRY_LINES` draws more of them.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from test_embedded_store import invariants

from forked import forks
from kvferry.errors import StoreError
from kvferry.pool.embedded import eviction
from kvferry.pool.store import Outcome
from pool_lines import DISK, KEYS, WORK, Point, Process, fill, lines_of, traced
from waiting import soon

SEED = int(os.environ.get("KVFERRY_SEED", "20261119"))
LINES = int(os.environ.get("KVFERRY_LINES", "80"))
SHORT = 0.03  # the other one may hold the lock


def again(other: Process) -> None:
    """The objects go, and come back elsewhere."""
    other.store.remove(["key/0", "key/9", "key/10"], soon(SHORT))
    other.put("key/13", seconds=SHORT)
    other.put("key/10", "key/9", "key/0", seconds=SHORT)


def pressure(other: Process) -> None:
    """Objects go down, come up, and others take their memory."""
    for keys in (("key/13", "key/14"), ("key/15", "key/12")):
        other.put(*keys, seconds=SHORT)
    other.get("key/9", "key/8", "key/0", "key/1", seconds=SHORT)


def back_and_forth(other: Process) -> None:
    """Other bytes come to the same memory, and the objects come back there."""
    for keys in (("key/9", "key/8"), ("key/14", "key/15")):
        other.store.remove(KEYS, soon(SHORT))
        other.put(*keys, seconds=SHORT)


def emptied(other: Process) -> None:
    other.store.clear(soon(SHORT))
    other.put("key/13", "key/9", seconds=SHORT)


MEANWHILE = (again, pressure, back_and_forth, emptied)


def require_sound(one: Process, place: Path, told: str) -> None:
    if one.tiers.disk is not None:
        one.tiers.disk.begin()
        assert one.tiers.disk.wait(20)
    invariants(one.store, told)
    verified = one.store.verify(soon())
    counters = one.store.counters()
    assert verified.corrupt == verified.unread == counters["corrupt"] == 0, told
    on_disk = sum(file.stat().st_size for file in (place / "d").glob("??/*"))
    assert on_disk == counters["disk_bytes"], told
    assert not list((place / "d").glob(".part-*")), told


@pytest.mark.parametrize("disk", [0, DISK])
def test_stopped_before_any_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int
) -> None:
    """Whatever another process does meanwhile, nobody reads wrong bytes or finds damage."""
    monkeypatch.setattr(eviction, "UPDATE_SECONDS", 0.2)
    rng = random.Random(SEED)
    one, other = Process(tmp_path, disk), Process(tmp_path, disk)
    points = []
    for name, work in WORK.items():
        fill(one)
        points += [(name, point) for point in lines_of(lambda work=work: work(one))]
    assert len(points) > 500
    for name, point in rng.sample(points, min(LINES, len(points))):
        meanwhile, times = rng.choice(MEANWHILE), rng.choice((1, 1, 2))
        told = f"{name}, before {point} ({times}), {meanwhile.__name__}, seed {SEED}"
        fill(other)
        outcomes = _stopped(one, name, point, times, lambda m=meanwhile: m(other))
        assert not set(outcomes) & {Outcome.CORRUPT, Outcome.FAILED}, told
        for each in (one, other):
            each.store.exists(["any"], soon())  # writes what it owes the records
        require_sound(other, tmp_path, told)
    one.close()
    other.close()


def _stopped(
    one: Process, name: str, point: Point, times: int, meanwhile: Callable[[], None]
) -> list[Outcome]:
    """Work on a thread that stops before a line, and goes on when `meanwhile` is over."""
    stopped, go_on, ended, left = threading.Event(), threading.Event(), [], times

    def before(*here: object) -> None:
        nonlocal left
        left -= here == point
        if not left and not stopped.is_set():
            stopped.set()
            assert go_on.wait(60)

    def work() -> None:
        try:
            with traced(before):
                ended.append(WORK[name](one))
        finally:
            stopped.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert stopped.wait(60)
    with suppress(StoreError):  # the lock is not free
        meanwhile()
    go_on.set()
    thread.join(60)
    (outcomes,) = ended  # it did not raise
    return outcomes


KILLED = """
from pathlib import Path
from pool_lines import WORK, Process, die_before
place, disk, name = Path({place!r}), {disk}, {name!r}
def begin():
    global one
    one = Process(place, disk)
if name == "open":
    die_before({point!r}, {times}, begin)
else:
    begin()
    die_before({point!r}, {times}, lambda: WORK[name](one))
"""


@pytest.mark.parametrize("survivor", [True, False], ids=["others live", "the last one"])
@pytest.mark.parametrize("disk", [0, DISK])
def test_killed_before_any_line(tmp_path: Path, disk: int, survivor: bool) -> None:
    """What was stored stays or was evicted, and nothing of what was half done."""
    rng = random.Random(SEED)
    one = Process(tmp_path, disk)
    new: list[Process] = []
    opening = lines_of(lambda: new.append(Process(tmp_path / "new", disk)))
    new[0].close()
    points = [("open", point) for point in opening]
    for name, work in WORK.items():
        fill(one)
        points += [(name, point) for point in lines_of(lambda work=work: work(one))]
    with forks() as python:
        for number, (name, point) in enumerate(rng.sample(points, min(LINES // 4, len(points)))):
            times = rng.choice((1, 1, 2))
            told = f"{name}, before {point} ({times}), seed {SEED}"
            place = tmp_path / str(number) if name == "open" else tmp_path
            if place == tmp_path:
                fill(one)
                if not survivor:
                    one.close()
            ended = python.run(
                KILLED.format(place=str(place), disk=disk, name=name, point=point, times=times)
            )
            assert ended.status in (0, -signal.SIGKILL), (told, ended.complaints)
            after = Process(place, disk) if name == "open" or not survivor else one
            begun = time.monotonic()
            outcomes = {*after.put(*KEYS[12:15]), *after.get(*KEYS[7:10])}
            assert outcomes <= {Outcome.DONE, Outcome.EXISTS, Outcome.MISSING}, told
            assert time.monotonic() - begun < 10, "a dead process held the others up"
            require_sound(after, place, told)
            if name == "open":
                after.close()
            else:
                one = after
    one.close()
