"""What another user gets of an embedded store, and what a damaged one does to an engine.

Damage is tried in a process of its own, because it must not end that process.
"""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from forked import forks
from kvferry.errors import StoreError
from kvferry.pool.embedded.store import EmbeddedStore
from pool_peers import Peer

SUPPORT = Path(__file__).parents[1] / "support"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may enter, unlike pytest's own."""
    before = os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
    os.umask(before)


def as_nobody(code: str, *arguments: Path) -> str:
    """What a program of another user prints."""
    become = f"import os, sys\nos.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    command = [sys.executable, "-S", "-c", become + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


READ_ALL = """
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        try: print(name, len(open(os.path.join(folder, name), "rb").read()))
        except OSError: pass
"""


# Another user


@needs_root
def test_another_user_reads_no_file_of_the_disk_tier(place: Path) -> None:
    """Also none that is being written, in a directory that was opened to all meanwhile."""
    (place / "disk").mkdir(mode=0o700)
    peer = Peer(place)
    (place / "disk").chmod(0o755)
    (place / "memory").chmod(0o755)
    read: list[str] = []

    def attack() -> bool:
        read.append(as_nobody(READ_ALL, place))
        return True

    image = memoryview(np.full(100_000, 7, dtype=np.uint8))
    assert peer.tiers.disk is not None
    assert peer.tiers.disk.write("ab" * 16, image, attack)
    (place / "disk" / "ab").chmod(0o755)
    attack()
    assert read == ["", ""]
    assert {stat.S_IMODE(p.stat().st_mode) for p in place.rglob("*") if p.is_file()} == {0o600}
    peer.close()


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_directory_that_others_may_enter_is_refused(place: Path, tier: str) -> None:
    (place / tier).mkdir(mode=0o755)
    with pytest.raises(StoreError, match=rf"mode 0755.*chmod 700 {place / tier}`"):
        Peer(place)
    (place / tier).chmod(0o700)
    Peer(place).close()


@needs_root
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_directory_of_another_user_is_refused(place: Path, tier: str) -> None:
    """Also one that is named, and not the default: what lies in it is that user's."""
    (place / tier).mkdir(mode=0o700)
    os.chown(place / tier, NOBODY, NOBODY)
    with pytest.raises(StoreError, match=r"belongs to user .*65534"):
        Peer(place)
    assert list((place / tier).iterdir()) == []


@needs_root
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_planted_link_is_not_followed(place: Path, tier: str) -> None:
    """A store's path in /dev/shm can be guessed, and any user may put a link there."""
    place.chmod(0o1777)
    mine = place / "mine"
    mine.mkdir(mode=0o700)
    as_nobody("os.symlink(sys.argv[1], sys.argv[2])", mine, place / tier)
    with pytest.raises(StoreError, match="symbolic link"):
        Peer(place)
    assert list(mine.iterdir()) == []


@needs_root
@pytest.mark.parametrize("name", ["lock", "index", "arena", "members"])
def test_planted_files_are_refused(place: Path, name: str) -> None:
    Peer(place).close()
    os.chown(place / "memory" / name, NOBODY, NOBODY)
    with pytest.raises(StoreError, match=r"belongs to user .*65534"):
        Peer(place)


# Damage

DAMAGED = f"""
import sys, time
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
import numpy as np
from pool_peers import Peer, content
from kvferry.errors import StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.store import Outcome
soon = lambda: time.monotonic() + 30
peer = Peer(Path(sys.argv[1]))
tiers, index = peer.tiers, peer.tiers.index
def row(key): return int(index.find(*ix.hash_keys([key]))[0])
"""


Damage = Callable[[Path, str], None]


@pytest.fixture(scope="module")
def damage() -> Iterator[Damage]:
    """Runs a program with a store at a place."""
    with forks() as python:

        def run(place: Path, code: str) -> None:
            ended = python.run(DAMAGED + code, str(place), seconds=120)
            assert ended.status == 0, f"status {ended.status}\n{ended.complaints[-3000:]}"

        yield run


def test_a_record_that_points_in_front_of_the_arena(place: Path, damage: Damage) -> None:
    """A negative offset means the arena's end to a slice, and another's memory to a copy."""
    damage(
        place,
        """
peer.put(3)
index.offset[row("object/3")] -= tiers.arena.capacity
assert peer.get(3) is Outcome.CORRUPT
assert peer.put(3) is Outcome.DONE and peer.get(3) is Outcome.DONE
""",
    )


@pytest.mark.parametrize("offset", [-(1 << 40), 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_a_writer_goes_where_it_was_sent(place: Path, damage: Damage, offset: int) -> None:
    """Another process changes a record between its writer's grant and its writer's copy."""
    damage(
        place,
        f"""
reserve = tiers.reserve
def changed(wishes, *rest):
    reserve(wishes, *rest)
    for wish in wishes: index.offset[wish.row] = {offset}
tiers.reserve = changed
peer.put(3)
del tiers.reserve
assert peer.get(3) is not Outcome.DONE
""",
    )


@pytest.mark.parametrize("offset", [-(1 << 40), 1 << 40])
def test_gaps_that_are_outside_of_the_arena(place: Path, damage: Damage, offset: int) -> None:
    damage(
        place,
        f"""
peer.put(1)
index.gap_offset[:8], index.gap_bytes[:8] = {offset}, 1 << 50
index.gaps = 8
assert peer.put(3) is Outcome.FAILED
assert peer.put(3) is Outcome.DONE and peer.get(3) is Outcome.DONE  # found anew
assert peer.get(1) is Outcome.DONE
""",
    )


@pytest.mark.parametrize("gaps", [-5, 1 << 40])
def test_a_number_of_gaps_that_cannot_be(place: Path, damage: Damage, gaps: int) -> None:
    damage(
        place,
        f"""
peer.put(1)
index.header[9] = {gaps}
outcomes = [peer.put(3), peer.put(3)]
assert Outcome.DONE in outcomes or Outcome.EXISTS in outcomes, outcomes
assert peer.get(3) is Outcome.DONE and peer.get(1) is Outcome.DONE
""",
    )


@pytest.mark.parametrize("length", [0, 10, 4999, 5001, 1 << 50, -1, -(1 << 63)])
@pytest.mark.parametrize("field", ["length", "image_bytes"])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_flipped_length_in_a_record(
    place: Path, damage: Damage, field: str, tier: str, length: int
) -> None:
    """It is found: a record is never cut short, nor asked for with a petabyte."""
    damage(
        place,
        f"""
assert peer.store.put_bytes("layout", b"x" * 5000, soon()) is Outcome.DONE
if {tier!r} == "disk":
    at = np.array([row("layout")])
    tiers.evict_rows(at, soon())
    assert index.state[at[0]] == ix.DISK
index.{field}[row("layout")] = {length}
assert peer.store.get_bytes("layout", soon()) is None
assert not peer.store.exists(["layout"], soon())[0]
assert peer.store.counters()["corrupt"] == 1
assert peer.store.put_bytes("layout", b"x" * 5000, soon()) is Outcome.DONE
assert peer.store.get_bytes("layout", soon()) == b"x" * 5000
""",
    )


def test_states_that_do_not_exist(place: Path, damage: Damage) -> None:
    damage(
        place,
        """
peer.put(3)
index.state[row("object/3")] = 200
assert peer.get(3) is Outcome.MISSING
assert not peer.store.exists(["object/3"], soon())[0]
peer.store.access(["object/3"], soon())
peer.put(3), peer.store.remove(["object/3"], soon()), peer.store.counters()
""",
    )


def test_work_that_does_not_exist(place: Path, damage: Damage) -> None:
    """The thread that walks through the files does not go round for ever."""
    damage(
        place,
        """
index.header[14] = 99
tiers.disk.begin()
assert tiers.disk.wait(30) and index.files_due == 0
""",
    )


@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 0), (0, 5), (1, 24), (1, 1 << 50), (2, 1 << 20), (2, 1 << 62), (2, -1), (3, -1)],
)
def test_sizes_of_a_damaged_index(place: Path, damage: Damage, word: int, value: int) -> None:
    """A second process refuses it, and cuts nothing that the first one has mapped."""
    damage(
        place,
        f"""
peer.put(3)
before = int(index.header[{word}])
index.header[{word}] = {value}
try: Peer(Path(sys.argv[1]))
except StoreError: pass
else: raise AssertionError("opened")
index.header[{word}] = before
assert peer.get(3) is Outcome.DONE
assert peer.put(4) is Outcome.DONE and peer.get(4) is Outcome.DONE
""",
    )


@pytest.mark.parametrize(
    ("name", "size"),
    [("index", 100), ("index", 5000), *(("arena", n) for n in (0, 100, 5000, 1 << 30))],
)
def test_files_of_another_length(place: Path, name: str, size: int) -> None:
    """Cut or grown while no process had them open."""
    Peer(place).close()
    os.truncate(place / "memory" / name, size)
    with pytest.raises(StoreError, match="remove"):
        Peer(place)


def test_extents_that_overlap_and_leave_the_arena(place: Path, damage: Damage) -> None:
    damage(
        place,
        """
for n in range(20): peer.put(n)
rows = index.in_state(*ix.WITH_EXTENT)
index.offset[rows[0]] = 1 << 60
index.extent[rows[1]] = 1 << 62
index.extent[rows[2]] = -4096
index.offset[rows[3]] = index.offset[rows[4]]
with tiers.locked(soon()): tiers.mend()
starts = index.gap_offset[: index.gaps]
ends = starts + index.gap_bytes[: index.gaps]
assert (starts >= 0).all() and (ends <= tiers.arena.capacity).all()
for n in range(20, 60): peer.put(n)
for n in range(60): peer.get(n)
""",
    )


# Machines


def test_machines_that_reorder_stores_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(StoreError, match=r"expected x86_64 .*found aarch64.*mooncake"):
        EmbeddedStore(place / "memory", 1 << 20)
    assert not (place / "memory").exists()
