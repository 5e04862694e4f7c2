"""Copies between real processes: bytes are compared, and every failure has its own error."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvferry.carriers import host
from kvferry.errors import PermissionDenied, TransferError

CHILD_BYTES = 64 << 20
CHILD = f"""
import numpy as np, sys
from kvferry.carriers.host import allow_any_reader
allow_any_reader()
memory = np.empty({CHILD_BYTES}, dtype=np.uint8)
memory[:] = np.random.default_rng(7).integers(0, 256, {CHILD_BYTES}, dtype=np.uint8)
print(memory.ctypes.data, flush=True)
for line in sys.stdin:  # "sum" asks for a digest of what the memory holds now
    import hashlib
    print(hashlib.sha256(memory).hexdigest(), flush=True)
"""


@dataclass
class Child:
    process: subprocess.Popen[str]
    address: int

    def digest(self) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("sum\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        yield Child(process, int(process.stdout.readline()))
        process.kill()


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, CHILD_BYTES, dtype=np.uint8)


@pytest.mark.parametrize("size", [1, 3, 4095, 4096, 65537, 8 << 20])
def test_reads_one_range_of_any_size(child: Child, content: np.ndarray, size: int) -> None:
    out = np.zeros(size + 2, dtype=np.uint8)
    moved = host.read(child.process.pid, [child.address + 777], [out.ctypes.data + 1], [size])
    assert moved == size
    assert out[0] == out[-1] == 0
    assert np.array_equal(out[1:-1], content[777 : 777 + size])


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 5000])
def test_reads_scattered_ranges(child: Child, content: np.ndarray, count: int) -> None:
    rng = np.random.default_rng(count)
    length = rng.integers(0, 3000, count)  # some are empty
    src = rng.integers(0, CHILD_BYTES - 3000, count)
    order = rng.permutation(count)
    dst = np.empty(count, dtype=np.int64)
    dst[order] = np.cumsum(length[order] + 1) - length[order]
    out = np.zeros(int(length.sum()) + count + 1, dtype=np.uint8)
    expected = out.copy()
    for s, d, n in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
        expected[d : d + n] = content[s : s + n]
    moved = host.read(child.process.pid, src + child.address, dst + out.ctypes.data, length)
    assert moved == length.sum()
    assert np.array_equal(out, expected)


def test_neighbours_on_one_side_only_are_joined_there(child: Child, content: np.ndarray) -> None:
    """Heads lie together at the source and apart here: few remote vectors, many local ones."""
    heads, tokens, size = 4, 900, 64
    src = np.arange(tokens * heads) * size
    dst = (np.arange(heads) * tokens + np.arange(tokens)[:, None]).reshape(-1) * size
    out = np.zeros(tokens * heads * size, dtype=np.uint8)
    calls = []

    def counting(*arguments: int) -> int:
        calls.append(arguments)
        return host.system_call("process_vm_readv")(*arguments)

    host.move(
        counting,
        child.process.pid,
        local=dst + out.ctypes.data,
        remote=src + child.address,
        length=np.full(len(src), size),
    )
    expected = content[: len(out)].reshape(tokens, heads, size).swapaxes(0, 1).reshape(-1)
    assert np.array_equal(out, expected)
    assert {remote_count for *_, remote_count, _ in calls} == {1}


def test_writes_into_another_process(content: np.ndarray) -> None:
    import hashlib

    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        other = Child(process, int(process.stdout.readline()))
        source = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
        src = np.arange(2048) * 512
        dst = np.random.default_rng(2).permutation(2048) * 700
        length = np.full(2048, 512)
        moved = host.write(process.pid, src + source.ctypes.data, dst + other.address, length)
        expected = content.copy()
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            expected[d : d + 512] = source[s : s + 512]
        assert moved == 1 << 20
        assert other.digest() == hashlib.sha256(expected).hexdigest()
        process.kill()


def test_kernel_cuts_a_long_call_and_it_resumes_mid_vector(
    child: Child, content: np.ndarray
) -> None:
    """Linux moves at most 2 GiB less a page in one call; that falls into vector 511 here."""
    size, count = 4 << 20, 515
    aside = np.empty(size, dtype=np.uint8)
    tail = np.zeros(4 * size, dtype=np.uint8)
    dst = np.full(count, aside.ctypes.data, dtype=np.int64)
    dst[-4:] = tail.ctypes.data + np.arange(4)[::-1] * size
    src = np.full(count, child.address, dtype=np.int64)
    src[-4:] += np.arange(1, 5) * size + 5
    assert host.read(child.process.pid, src, dst, np.full(count, size)) == count * size
    for i in range(4):
        start = (i + 1) * size + 5
        here = (3 - i) * size
        assert np.array_equal(tail[here : here + size], content[start : start + size])


@pytest.mark.parametrize("most", [1, 7, 1000, 100_000])
def test_resumes_after_any_short_transfer(child: Child, content: np.ndarray, most: int) -> None:
    """A system call that moves only `most` bytes at a time, of whatever it is given."""
    length = np.asarray([5, 300, 1, 2000, 64, 64, 9], dtype=np.int64)
    src = np.asarray([10, 9000, 15, 77, 5000, 5064, 1], dtype=np.int64)
    dst = np.asarray([0, 5, 2400, 305, 2401, 3000, 3064], dtype=np.int64)
    out = np.zeros(3100, dtype=np.uint8)

    def short(pid: int, local: int, _: int, remote: int, *__: int) -> int:
        ours = np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(local)).copy()
        theirs = np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(remote)).copy()
        ours[1] = theirs[1] = min(ours[1], theirs[1], most)
        call = host.system_call("process_vm_readv")
        return call(pid, ours.ctypes.data, 1, theirs.ctypes.data, 1, 0)

    moved = host.move(
        short,
        child.process.pid,
        local=dst + out.ctypes.data,
        remote=src + child.address,
        length=length,
    )
    expected = np.zeros_like(out)
    for s, d, n in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
        expected[d : d + n] = content[s : s + n]
    assert moved == length.sum()
    assert np.array_equal(out, expected)


def test_nothing_to_move(child: Child) -> None:
    assert host.read(child.process.pid, [], [], []) == 0
    assert host.read(child.process.pid, [1, 2], [3, 4], [0, 0]) == 0


@pytest.mark.parametrize("side", ["remote", "local"])
def test_wrong_address(child: Child, side: str) -> None:
    """An error, not a crash; what had moved before it is said."""
    unmapped = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(unmapped, dtype=np.uint8).ctypes.data
    unmapped.close()
    out = np.zeros(200, dtype=np.uint8)
    src = np.asarray([child.address, child.address + 100])
    dst = np.asarray([out.ctypes.data, out.ctypes.data + 100])
    (src if side == "remote" else dst)[1] = 64 if side == "remote" else address
    with pytest.raises(TransferError, match=r"not mapped.*after (0|100) of 200 bytes"):
        host.read(child.process.pid, src, dst, [100, 100])


def test_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    out = np.zeros(1, dtype=np.uint8)
    with pytest.raises(TransferError, match="peer is gone"):
        host.read(process.pid, [out.ctypes.data], [out.ctypes.data], [1])


@pytest.mark.parametrize(("code", "says"), [("EPERM", "same user"), ("ENOSYS", "another carrier")])
def test_forbidden(code: str, says: str) -> None:
    import errno

    def forbidden(*_: int) -> int:
        ctypes.set_errno(getattr(errno, code))
        return -1

    with pytest.raises(PermissionDenied, match=says):
        host.move(forbidden, 1, local=[1], remote=[1], length=[1])


def test_a_call_that_moves_nothing_is_no_endless_loop() -> None:
    with pytest.raises(TransferError, match="moved nothing"):
        host.move(lambda *_: 0, 1, local=[1], remote=[1], length=[1])


def test_scattered_copies_inside_one_process(content: np.ndarray) -> None:
    rng = np.random.default_rng(3)
    length = rng.choice([0, 1, 7, 512, 1536, 3 << 20], 400, p=[0.1, 0.2, 0.2, 0.3, 0.19, 0.01])
    src = rng.integers(0, CHILD_BYTES - (3 << 20), len(length))
    dst = np.cumsum(length) - length
    out = np.zeros(int(length.sum()), dtype=np.uint8)
    host.copy_runs(content.ctypes.data + src, out.ctypes.data + dst, length)
    pieces = [content[s : s + n] for s, n in zip(src.tolist(), length.tolist(), strict=True)]
    assert np.array_equal(out, np.concatenate(pieces))
