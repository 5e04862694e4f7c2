"""Damage to the files of an embedded store: whatever they hold, an engine that uses them lives on.

    python scripts/fuzz/store.py SEED [NUMBER]     # repeats one seed, or one of its stores

A real store with objects on both tiers is copied, damaged in one to four places, opened and used by
a child process. The damage knows the structure: fields of records, gaps, header words, what the
policy learned, headers of objects (with a wrong digest, or a right one), and the lengths, kinds
and names of files. Half of it comes while the store is open, between calls and during them, as from
another process. Files that are mapped are not cut then: that ends a process (docs/pool.md).

The child must not crash, hang, raise anything but a `StoreError`, leave files open, write beside
the memory that it was given, or return bytes for a key that are not what was put.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import StoreError
from kvferry.pool.embedded import arena as image
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.index import HEADER_WORDS, MAX_GAPS
from kvferry.pool.embedded.policy import LEARNED_FLOATS
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices

MEMORY_BYTES, DISK_BYTES, SLOTS = 1 << 20, 4 << 20, 64
OBJECTS, RECORDS = 24, 4
LONGEST = 300_000  # bytes: more than one checksum covers
CANARY = 4096  # bytes on either side of the memory that objects are read into
CALL_SECONDS = 5.0  # for each call of the store
HANG_SECONDS = 120.0  # without a word of the child: many calls with all their deadlines
PER_CHILD = 200  # stores; a child that is new starts in half a second
REST = 24  # header words that mean something, counters too


def content(key: str) -> bytes:
    """What is put under a key; it follows from the key alone."""
    rng = random.Random(key)
    size = 1 + rng.randrange(4000) if key.startswith("record") else rng.randrange(1, 90_000)
    return rng.randbytes(LONGEST if key == "object/7" else size)


KEYS = [f"object/{n}" for n in range(OBJECTS)] + [f"record/{n}" for n in range(RECORDS)]


class User:
    """A store, and memory with a canary on either side."""

    def __init__(self, place: Path) -> None:
        self.memory = np.zeros(CANARY + LONGEST + CANARY, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data) + CANARY
        self.store = EmbeddedStore(
            place / "memory", MEMORY_BYTES, place / "disk", DISK_BYTES, slots=SLOTS
        )
        self.store.register([MemoryRegion(self.base, LONGEST)])

    def put(self, key: str) -> Outcome:
        value = content(key)
        self.memory[CANARY : CANARY + len(value)] = np.frombuffer(value, dtype=np.uint8)
        where = Slices.whole(_ints(self.base), _ints(len(value)))
        return self.store.put([key], [where], _soon())[0]

    def get(self, key: str, rng: random.Random) -> Outcome:
        """Some parts of an object, which must be right if the store says so."""
        value = content(key)
        cuts = sorted(
            {0, len(value), *(rng.randrange(len(value)) for _ in range(rng.randrange(4)))}
        )
        if rng.random() < 0.3:
            cuts = cuts[rng.randrange(len(cuts) - 1) :]
        offset = np.array(cuts[:-1], dtype=np.int64)
        length = np.diff(np.array(cuts, dtype=np.int64))
        self.memory[:] = 0xA5
        wanted = Slices(offset, self.base + offset, length)
        outcome = self.store.get([key], [wanted], _soon())[0]
        got = self.memory[CANARY + cuts[0] : CANARY + len(value)].tobytes()
        if outcome is Outcome.DONE and got != value[cuts[0] :]:
            raise AssertionError(f"{key} has wrong bytes")
        if (self.memory[:CANARY] != 0xA5).any() or (self.memory[-CANARY:] != 0xA5).any():
            raise AssertionError(f"{key} was written beside its memory")
        return outcome


def _ints(value: int) -> np.ndarray:
    return np.array([value], dtype=np.int64)


def _soon() -> float:
    return time.monotonic() + CALL_SECONDS


def make(place: Path) -> None:
    """A store with whole objects on both tiers."""
    user = User(place)
    for key in KEYS:
        if key.startswith("record"):
            user.store.put_bytes(key, content(key), _soon())
        else:
            user.put(key)
    user.store.access([k for k in KEYS if k.startswith("object")], _soon())
    counters = user.store.counters()
    user.store.close()
    if not counters["disk_bytes"] or not counters["memory_bytes"]:
        raise AssertionError("the store to be damaged lacks a tier")


def copy(template: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(template, place, symlinks=True)
    link = place / "memory" / "disk"
    link.unlink()
    link.symlink_to(place / "disk")


# Damage


class Damage:
    """Writes to the files of one store, in places that mean something."""

    def __init__(self, place: Path, rng: random.Random) -> None:
        self.place, self.rng = place, rng
        self.index, self.arena = place / "memory" / "index", place / "memory" / "arena"
        at = HEADER_WORDS * 8 + LEARNED_FLOATS * 8
        self.gaps = at
        at = -(-(at + 2 * MAX_GAPS * 8) // 64) * 64
        self.fields: dict[str, tuple[int, int]] = {}
        for name, dtype in ix.FIELDS:
            size = np.dtype(dtype).itemsize
            self.fields[name] = (at, size)
            at += SLOTS * size

    def any(self, *, mapped: bool) -> None:
        kinds: list[Callable[[], None]] = [self.field] * 6
        kinds += [self.image] * 3 + [self.word, self.gap, self.learned, self.noise, self.file]
        if not mapped:
            kinds += [self.length]
        self.rng.choice(kinds)()

    def value(self, old: int, size: int) -> bytes:
        """One that is near the old one, at an end of something, or noise."""
        rng, bits = self.rng, 8 * size
        near = [old + 1, old - 1, -old, old ^ (1 << rng.randrange(bits)), 2 * old, old // 2]
        ends = [0, 1, -1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 4096, -4096]
        sizes = [MEMORY_BYTES, -MEMORY_BYTES, old - MEMORY_BYTES, DISK_BYTES, 1 << 40, SLOTS]
        new = rng.choice([*near, *ends, *sizes, rng.getrandbits(bits)])
        return (new % (1 << bits)).to_bytes(size, "little")

    def change(self, path: Path, at: int, size: int) -> None:
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.seek(at)
            old = int.from_bytes(file.read(size), "little", signed=True)
            file.seek(at)
            file.write(self.value(old, size))

    def row(self) -> int:
        """One that has an object, mostly."""
        at, _ = self.fields["state"]
        with self.index.open("rb") as file:
            file.seek(at)
            states = file.read(SLOTS)
        used = [row for row, state in enumerate(states) if state > ix.GHOST]
        return (
            self.rng.choice(used) if used and self.rng.random() < 0.9 else self.rng.randrange(SLOTS)
        )

    def field(self) -> None:
        name = self.rng.choice([*self.fields, "offset", "extent", "length", "image_bytes", "state"])
        at, size = self.fields[name]
        self.change(self.index, at + self.row() * size, size)

    def word(self) -> None:
        self.change(self.index, 8 * self.rng.randrange(REST), 8)

    def gap(self) -> None:
        which = self.rng.randrange(4) + self.rng.randrange(2) * MAX_GAPS
        self.change(self.index, self.gaps + 8 * which, 8)

    def learned(self) -> None:
        odd = self.rng.choice([float("nan"), float("inf"), -float("inf"), -1.0, 1e308, 0.0])
        at = HEADER_WORDS * 8 + 8 * self.rng.randrange(LEARNED_FLOATS)
        if self.rng.random() < 0.3:
            start, size = self.fields[self.rng.choice(["last", "first"])]
            at = start + self.row() * size
        with self.index.open("r+b") as file:
            file.seek(at)
            file.write(struct.pack("<d", odd))

    def noise(self) -> None:
        path = self.rng.choice([self.index, self.arena, *self.files()])
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.seek(self.rng.randrange(max(1, path.stat().st_size)))
            file.write(self.rng.randbytes(self.rng.choice([1, 8, 100])))

    def image(self) -> None:
        """A header of an object, in the arena or in a file; sometimes with the right digest."""
        files = self.files()
        path, at = self.arena, 0
        if files and self.rng.random() < 0.5:
            path = self.rng.choice(files)
        else:
            start, size = self.fields["offset"]
            with self.index.open("rb") as file:
                file.seek(start + self.row() * size)
                at = int.from_bytes(file.read(size), "little", signed=True)
            at = at if 0 <= at < MEMORY_BYTES else 0
        where, size = self.rng.choice([(0, 8), (8, 4), (12, 4), (16, 8), (24, 4), (28, 4), (32, 8)])
        self.change(path, at + where, size)
        if self.rng.random() < 0.5:
            with contextlib.suppress(OSError), path.open("r+b") as file:
                file.seek(at)
                head = file.read(image._HEAD.size)
                if len(head) < image._HEAD.size:
                    return
                _, _, key_bytes, _, _, chunks = image._HEAD.unpack(head)
                whole = image.aligned(len(head) + 8 * chunks + key_bytes, 64)
                if whole <= LONGEST:
                    file.seek(at + 8)
                    digest = xxhash.xxh3_64_intdigest(file.read(whole - 8))
                    file.seek(at)
                    file.write(digest.to_bytes(8, "little"))

    def files(self) -> list[Path]:
        return [p for p in sorted((self.place / "disk").glob("??/*")) if p.is_file()]

    def file(self) -> None:
        """A file of the disk tier: cut, grown, gone, another one's, no file, or half of one."""
        files = self.files()
        if not files:
            return
        path, other = self.rng.choice(files), self.rng.choice(files)
        owner, part = self.place / "disk" / ".kvferry-store", self.place / "disk" / ".part-1-1"
        with contextlib.suppress(OSError):
            match self.rng.randrange(9):
                case 0:
                    os.truncate(path, self.rng.randrange(path.stat().st_size + 1))
                case 1:
                    os.truncate(path, self.rng.choice([1 << 20, 1 << 40]))
                case 2:
                    path.unlink()
                case 3:
                    path.write_bytes(other.read_bytes() if _is_short(other) else b"")
                case 4:
                    path.unlink()
                    path.mkdir()
                case 5:
                    path.unlink()
                    path.symlink_to(other)
                case 6:
                    path.unlink()
                    os.mkfifo(path)
                case 7:
                    owner.write_bytes(self.rng.randbytes(self.rng.randrange(60)))
                case _:
                    part.write_bytes(b"half")

    def length(self) -> None:
        """Of a file that processes map; only while none has."""
        path = self.rng.choice([self.index, self.arena, self.index.parent / "members"])
        size = path.stat().st_size
        ends = [0, 1, 31, 32, size // 2, max(0, size - 1), size + 1, 2 * size]
        os.truncate(path, self.rng.choice(ends))


def _is_short(path: Path) -> bool:
    return path.stat().st_size <= 2 * LONGEST  # not one that was grown before


# The child


def use(place: Path, rng: random.Random) -> Counter[str]:
    """Damage a store, open it, damage it again, and do all that an engine and a person may do."""
    told: Counter[str] = Counter()
    damage = Damage(place, rng)
    while_open = rng.random() < 0.5
    for _ in range(0 if while_open else rng.randint(1, 4)):
        damage.any(mapped=False)
    try:
        user = User(place)
    except StoreError:
        return Counter(refused=1)
    told["opened"] += 1
    store = user.store
    people: list[Callable[[], object]] = [
        store.counters,
        store.learned,
        lambda: list(store.listed()),
        lambda: store.verify(_soon()),
        lambda: store.evict(rng.randrange(200_000), _soon()),
        lambda: store.remove([rng.choice(KEYS)], _soon()),
        lambda: store.access(rng.sample(KEYS, 9), _soon()),
        lambda: store.exists(KEYS, _soon()),
        lambda: store.clear(_soon()),
    ]

    def one() -> str:
        key, chance = rng.choice(KEYS), rng.random()
        if chance < 0.2:
            rng.choice(people)()
            return "asked"
        if key.startswith("record"):
            value = store.get_bytes(key, _soon())
            if value is not None and value != content(key):
                raise AssertionError(f"{key} has wrong bytes")
            return "missing" if value is None else "done"
        if chance < 0.5:
            return f"put {user.put(rng.choice([key, f'object/{rng.randrange(60)}'])).value}"
        return user.get(key, rng).value

    stop = threading.Event()
    beside = threading.Thread(target=_keep_damaging, args=(place, rng.random(), stop))
    if while_open and rng.random() < 0.5:  # at any point of a call
        beside.start()
    try:
        for step in range(16):
            if while_open and step < 4:
                damage.any(mapped=True)
            try:
                told[one()] += 1
            except StoreError:
                told["error"] += 1
    finally:
        stop.set()
        if beside.ident is not None:
            beside.join()
        store.close()
    return told


def _keep_damaging(place: Path, seed: float, stop: threading.Event) -> None:
    damage = Damage(place, random.Random(seed))
    for _ in range(12):
        if not stop.wait(0.002):
            damage.any(mapped=True)


def child(template: Path, place: Path, seed: int, first: int, last: int) -> None:
    """One line for each store: what came of it, or what must not have."""
    logging.disable()
    warnings.simplefilter("ignore")  # of arithmetic on what another process wrote
    raised: list[str] = []  # in threads, the store's and this program's
    threading.excepthook = lambda found: raised.append(f"in a thread: {found.exc_value!r}")
    for number in range(first, last):
        copy(template, place)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        said: dict[str, object]
        try:
            said = dict(use(place, random.Random(f"{seed}/{number}")))
            gc.collect()
            left = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
            if left > 0 or raised:
                said = {"bug": raised[0] if raised else f"{left} files are left open"}
        except Exception as error:
            if last - first == 1:
                raise
            said = {"bug": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


# The parent


def run(frames: int, seed: int) -> dict[str, int]:
    """Damage so many stores; how often each outcome was seen. Raises where one must not be."""
    counts: Counter[str] = Counter()
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvferry-fuzz-", dir=base) as folder:
        template = Path(folder) / "template"
        template.mkdir()
        make(template)
        for first in range(0, frames, PER_CHILD):
            last = min(frames, first + PER_CHILD)
            counts += _one_child(template, Path(folder) / "place", seed, first, last)
    return dict(counts)


def _one_child(template: Path, place: Path, seed: int, first: int, last: int) -> Counter[str]:
    counts: Counter[str] = Counter(stores=last - first)
    command = [sys.executable, __file__, "--child", str(template), str(place)]
    command += [str(seed), str(first), str(last)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        try:
            for number in range(first, last):
                again = f"store {number} of seed {seed} (python {__file__} {seed} {number})"
                if not select.select([process.stdout], [], [], HANG_SECONDS)[0]:
                    raise AssertionError(f"{again}: no answer for {HANG_SECONDS:g} s")
                line = process.stdout.readline()
                if not line:
                    status = process.wait(30)
                    how = signal.Signals(-status).name if status < 0 else f"status {status}"
                    raise AssertionError(f"{again}: the process that read it died ({how})")
                said = json.loads(line)
                if "bug" in said:
                    raise AssertionError(f"{again}: {said['bug']}")
                counts.update(said)
        finally:
            process.kill()
    return counts


def _main(arguments: list[str]) -> None:
    if arguments[0] == "--child":
        template, place, *numbers = arguments[1:]
        child(Path(template), Path(place), *map(int, numbers))
    elif len(arguments) == 1:
        print(run(1000, int(arguments[0])))
    else:
        seed, number = map(int, arguments)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            template = Path(folder) / "template"
            template.mkdir()
            make(template)
            child(template, Path(folder) / "place", seed, number, number + 1)


if __name__ == "__main__":
    _main(sys.argv[1:])
