"""The kernel that mixes the words of runs (mixing.py); needs Triton, imported when it is used.

As in the copy kernel, runs are cut into chunks, and each program takes `COUNT` of them. Addresses
and lengths are multiples of 16. `out` has `SLOTS` pairs of sums, so that few programs add to one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_runs(
    address,
    lengths,
    words,
    firsts,
    out,
    length,
    number,
    runs,
    chunks,
    items,
    rounds,
    SEARCH: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    item = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    live = item < items
    item = tl.minimum(item, items - 1)
    if SEARCH:  # firsts: the number of each run's first chunk; words: of its first word
        low = tl.zeros([COUNT], tl.int32)
        high = low + runs
        for _ in range(rounds):
            middle = (low + high) // 2
            beyond = tl.load(firsts + middle) > item
            high = tl.where(beyond, middle, high)
            low = tl.where(beyond, low, middle)
        run = low
        chunk = item - tl.load(firsts + run).to(tl.int32)
        full = tl.load(lengths + run)
        begin = tl.load(words + run)
    else:
        run = item // chunks
        chunk = item - run * chunks
        full = length
        begin = run.to(tl.int64) * (length // 8)
    done = chunk.to(tl.int64) * CHUNK
    count = tl.where(live, tl.minimum(full - done, CHUNK), 0).to(tl.int32)
    at = tl.arange(0, CHUNK // 8)[None, :]
    wanted = at < (count // 16 * 2)[:, None]  # seen to be even: masks come in pairs of words
    of = tl.load(address + run) + done
    of = tl.multiple_of(of[:, None].to(tl.pointer_type(tl.int64)) + at, (16, 16))
    of = tl.max_contiguous(of, (1, CHUNK // 8))
    word = tl.load(of, mask=wanted, other=0, cache_modifier=".cg").to(tl.uint64, bitcast=True)
    place = (number + begin + done // 8)[:, None] + at
    h = word ^ (place.to(tl.uint64) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03)
    h ^= h >> 32
    h *= 0xFF51AFD7ED558CCD
    h ^= h >> 29
    h *= 0xC4CEB9FE1A85EC53
    h ^= h >> 32
    g = (h ^ (h >> 31)) * 0xBF58476D1CE4E5B9
    g ^= g >> 33
    first = tl.where(wanted, h.to(tl.int64, bitcast=True), 0)
    second = tl.where(wanted, g.to(tl.int64, bitcast=True), 0)
    slot = out + 2 * (tl.program_id(0) % SLOTS)
    tl.atomic_add(slot, tl.sum(tl.sum(first, 1), 0))
    tl.atomic_add(slot + 1, tl.sum(tl.sum(second, 1), 0))
