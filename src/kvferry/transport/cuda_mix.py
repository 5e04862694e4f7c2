"""`mix128` of a GPU's own memory: one launch for up to 32,768 runs. What it means: mixing.py."""

from __future__ import annotations

import threading

import numpy as np

from kvferry.transport.base import Ints
from kvferry.transport.cuda_driver import Device
from kvferry.transport.cuda_kernels import SCRATCH_ARGUMENTS, compile_kernel
from kvferry.transport.cuda_lane import Lane
from kvferry.transport.cuda_stream import Function
from kvferry.transport.cuda_work import best_chunk
from kvferry.transport.mixing import WORD_BYTES, Mixed
from kvferry.transport.regions import Arrays, slices

GRAIN = 16  # what addresses and lengths are multiples of
SLOTS = 64  # pairs of sums
WHOLE = 1 << 40  # bytes of a launch: only the number of runs is bounded
# Chunks of a program and its warps, measured on an H200: 2.4 TB/s at 256 B, 3.0 from 1 KiB on.
TUNING = {64: (64, 2), 256: (16, 2), 1024: (4, 1), 4096: (1, 2)}

_lock = threading.Lock()
_functions: dict[tuple[int, int, bool], Function] = {}


def takes(address: Ints, length: Ints) -> bool:
    """Whether the kernel can mix these."""
    bits = int(np.bitwise_or.reduce(address)) | int(np.bitwise_or.reduce(length))
    return bits % GRAIN == 0


def mix(lane: Lane, address: Ints, length: Ints) -> Mixed:
    """The runs, which have been checked; on a lane of their device, which is current."""
    total = Mixed()
    for part in slices(Arrays(address, address, length), WHOLE):
        total = total.plus(_mix(lane, part.src, part.length, total.words))
    return total


def _mix(lane: Lane, address: Ints, length: Ints, number: int) -> Mixed:
    runs, longest = len(address), int(length.max())
    even = longest == int(length.min())
    chunk = best_chunk(length[:1] if even else length)
    tables = [address]
    chunks = -(-longest // chunk)
    items, words = chunks * runs, longest // WORD_BYTES * runs
    if not even:
        firsts, ends = np.cumsum(-(-length // chunk)), np.cumsum(length // WORD_BYTES)
        items, words = int(firsts[-1]), int(ends[-1])
        tables += [length, ends - length // WORD_BYTES, np.append(0, firsts)]
    count, _ = TUNING[chunk]
    kernel = _function(lane.device, chunk, search=not even)
    sizes = [len(table) for table in tables]
    used = sum(sizes)
    slot = lane.slot(used + 2 * SLOTS)
    np.concatenate(tables, out=slot.numbers[:used])
    lane.upload(slot.there, slot.address, 8 * used)
    places = [slot.there + 8 * sum(sizes[:i]) for i in range(len(sizes))]
    places += [slot.there] * (4 - len(places))
    out = slot.there + 8 * used
    lane.stream.zero(out, 16 * SLOTS)
    values = [*places, out, longest, number, runs, chunks, items, runs.bit_length()]
    kernel.launch(-(-items // count), lane.stream, [*values, *SCRATCH_ARGUMENTS])
    lane.stream.copy(slot.address + 8 * used, out, 16 * SLOTS)
    lane.finish()
    sums = slot.numbers[used : used + 2 * SLOTS].view(np.uint64).reshape(-1, 2)
    first, second = (int(s) for s in np.add.reduce(sums, axis=0))
    return Mixed(first, second, words)


def _function(device: Device, chunk: int, *, search: bool) -> Function:
    key = (device.ordinal, chunk, search)
    with _lock:
        if key not in _functions:
            from kvferry.transport.cuda_mix_triton import mix_runs

            count, warps = TUNING[chunk]
            signature = {
                **dict.fromkeys(("address", "lengths", "words", "firsts", "out"), "*i64"),
                **dict.fromkeys(("length", "number"), "i64"),
                **dict.fromkeys(("runs", "chunks", "items", "rounds"), "i32"),
            }
            constants = {"SEARCH": search, "CHUNK": chunk, "COUNT": count, "SLOTS": SLOTS}
            code = compile_kernel(mix_runs, signature, constants, device.capability, warps)
            _functions[key] = Function(*code[:2], warps=warps, shared_bytes=code[2])
        return _functions[key]
