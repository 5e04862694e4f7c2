"""Runs the kernels in Triton's interpreter, on host memory, against NumPy and xxhash.

A program, because TRITON_INTERPRET must be set before Triton is imported: prints how many cases.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import host_device
from kvferry.carriers.checksum import mix_words
from kvferry.carriers.cuda import kernels, staging, triton_kernels, xxh3
from kvferry.carriers.cuda.stream import ANYWHERE, StreamBuffers
from kvferry.copies import StridedCopies

MEMORY = 1 << 15
TABLE = 1 << 10  # numbers that a kernel may read of a table


@dataclass
class Interpreted:
    """A kernel of one form; it takes the arguments that the driver would be given."""

    function: Any
    tables: int  # arguments that are addresses of numbers; they come first
    constants: dict[str, int]

    def launch(self, grid: int, stream: object, values: list[int]) -> None:
        tables = [(ctypes.c_int64 * TABLE).from_address(place) for place in values[: self.tables]]
        self.function[(grid,)](
            *(torch.from_numpy(np.ctypeslib.as_array(table)) for table in tables),
            *values[self.tables :],
            **self.constants,
        )


def load(
    device: object,
    name: str,
    signature: dict[str, str],
    constants: dict[str, int],
    warps: int,
) -> Interpreted:
    """In place of `kernels.load`."""
    tables = list(signature.values()).count("*i64")
    return Interpreted(getattr(triton_kernels, name), tables, constants)


def run(copies: StridedCopies, *, fill: bool) -> None:
    buffers = StreamBuffers(host_device.HostDevice(), triton=True)  # type: ignore[arg-type]
    buffers.copy(copies, ANYWHERE, ANYWHERE, fill=fill)


def case(rng: np.random.Generator, grain: int, uniform: bool, strided: bool, fill: bool) -> None:
    src = rng.integers(1, 256, MEMORY, dtype=np.uint8)
    dst = np.full(MEMORY, 7, dtype=np.uint8)
    segments, rows, steps = (
        int(rng.integers(1, n)) for n in ((9, 4, 4) if strided else (40, 2, 2))
    )
    slot = MEMORY // (segments * rows * steps) // 16 * 16
    most = slot - 16
    lengths = rng.integers(0, most // grain + 1, segments) * grain
    if uniform:
        lengths[:] = max(grain, int(lengths.max()))
    if not lengths.any():
        lengths[0] = grain
    addresses = []
    for memory in (src, dst):
        where = rng.permutation(segments).astype(np.int64) * (rows * steps * slot)
        where += rng.integers(0, 16 // grain) * grain  # a phase
        if grain < 16:
            where += rng.integers(0, 16 // grain, segments) * grain * rng.integers(0, 2)
        row = memory.ctypes.data + np.arange(rows, dtype=np.int64) * steps * slot
        addresses.append((row, where, np.arange(steps, dtype=np.int64) * slot))
    (src_rows, src_at, src_steps), (dst_rows, dst_at, dst_steps) = addresses
    expected = dst.copy()
    for r in range(rows):
        for s in range(segments):
            for k in range(steps):
                a = int(src_rows[r] + src_at[s] + src_steps[k]) - src.ctypes.data
                b = int(dst_rows[r] + dst_at[s] + dst_steps[k]) - dst.ctypes.data
                n = int(lengths[s])
                expected[b : b + n] = 0 if fill else src[a : a + n]
    run(StridedCopies(src_rows, dst_rows, src_at, dst_at, lengths, src_steps, dst_steps), fill=fill)
    wrong = np.flatnonzero(dst != expected)
    assert len(wrong) == 0, (grain, uniform, strided, fill, lengths, wrong[:5])


def mixing(rng: np.random.Generator, even: bool) -> None:
    """The kernel of checksums, against what its sums mean."""
    memory = rng.integers(0, 256, MEMORY, dtype=np.uint8)
    runs = int(rng.integers(2, 9))
    slot = MEMORY // runs // 16 * 16
    lengths = rng.integers(1, slot // 16, runs) * 16
    if even:
        lengths[:] = lengths[0]
    address = rng.permutation(runs).astype(np.int64) * slot + memory.ctypes.data
    number = int(rng.integers(0, 1 << 40))
    buffers = StreamBuffers(host_device.HostDevice(), triton=True)  # type: ignore[arg-type]
    found = staging._mix(buffers, address, lengths, number)
    at = address - memory.ctypes.data
    dense = np.concatenate([memory[a : a + n] for a, n in zip(at, lengths, strict=True)])
    expected = mix_words(dense.view(np.uint64), number)
    assert found == expected, (even, lengths)


def hashing(rng: np.random.Generator, run_bytes: int) -> None:
    """The kernels of xxh3, against the library; pieces that lie in several runs, or in one."""
    runs, count = (12, 3) if run_bytes else (1, 6)
    memory = rng.integers(0, 256, MEMORY * 2, dtype=np.uint8)
    base = memory.ctypes.data + -memory.ctypes.data % 16
    if run_bytes:
        address = base + rng.permutation(runs).astype(np.int64) * (run_bytes + 64)
        cuts = np.sort(rng.choice(np.arange(1, runs * run_bytes // 1024), count - 1, False)) * 1024
        offsets = np.append(0, cuts)
        lengths = np.diff(np.append(offsets, runs * run_bytes))
    else:
        address = np.array([base], dtype=np.int64)
        offsets = np.arange(count, dtype=np.int64) * 8192
        lengths = rng.integers(xxh3.LEAST_BYTES // 8 + 1, 1024, count) * 8
    size = run_bytes or 1 << 60
    per_piece = xxh3.blocks_of(int(lengths.max()))
    sums = np.full(count * per_piece * xxh3.SUMS, -7, dtype=np.int64)
    out = np.zeros(count, dtype=np.int64)
    tables = (address, offsets, lengths, xxh3.constants(), sums, out)
    runs_at, offsets_at, lengths_at, table, sums_at, out_at = (t.ctypes.data for t in tables)
    xxh3.queue(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        runs=runs_at,
        run_bytes=size,
        offsets=offsets_at,
        lengths=lengths_at,
        table=table,
        sums=sums_at,
        out=out_at,
        pieces=count,
        per_piece=per_piece,
    )
    whole = b"".join(ctypes.string_at(a, run_bytes or MEMORY * 2 - 16) for a in address.tolist())
    expected = [
        xxhash.xxh3_64_intdigest(whole[at : at + n]) for at, n in zip(offsets, lengths, strict=True)
    ]
    assert out.view(np.uint64).tolist() == expected, (run_bytes, lengths)


def main() -> None:
    patch = pytest.MonkeyPatch()
    host_device.use(patch)
    for module in (kernels, xxh3):
        patch.setattr(module, "load", load)
    done = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        for grain in (16, 4, 1):
            for uniform in (True, False):
                for strided in (True, False):
                    for fill in (False, True):
                        case(rng, grain, uniform, strided, fill)
                        done += 1
        for even in (True, False):
            mixing(rng, even)
            done += 1
        for run_bytes in (0, 1024, 3072):
            hashing(rng, run_bytes)
            done += 1
    print(done)


if __name__ == "__main__":
    main()
