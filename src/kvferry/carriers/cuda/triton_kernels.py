# SPDX-License-Identifier: Apache-2.0
"""The kernels: one executes all copies of a batch, one mixes the words of runs, two make xxh3.

This module needs Triton, and is imported when a kernel is used.

A copy's addresses are sums, `rows[r] + segments[s] + steps[k]` on each side, plus a shift. Three
arrays of single copies are the case of one row and one step. Copies are cut into *chunks* of at
most `CHUNK` bytes, and each program moves `COUNT` chunks at once. So long runs spread over the
whole GPU, short runs share a program, and every thread has several 16-byte accesses under way.

Which chunk belongs to which copy:

    uniform   all lengths are `length`: a division
    search    `firsts[s]` is the first chunk of segment s: a binary search for the program's first
              chunk, and a short one from there for the others (each segment has a chunk or more)

`GRAIN` is the largest of 16, 4 and 1 that divides all addresses and lengths. Below 16, if source
and destination of a chunk have the same misalignment, its edges move in grains and the rest in
16-byte accesses. If their misalignments differ, the whole chunk moves in grains.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_runs(
    src_rows,
    dst_rows,
    src_segments,
    dst_segments,
    src_steps,
    dst_steps,
    lengths,
    firsts,
    length,
    src_shift,
    dst_shift,
    segments,
    steps,
    chunks,
    search_rounds,
    begin_item,
    end_item,
    SEARCH: tl.constexpr,
    FILL: tl.constexpr,
    GRAIN: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_LOG: tl.constexpr,
):
    first = begin_item + tl.program_id(0) * COUNT
    item = first + tl.arange(0, COUNT)
    live = item < end_item
    item = tl.minimum(item, end_item - 1)
    if SEARCH:
        # items: (row, step), then the chunks of all segments in order
        outer = item // chunks
        within = item - outer * chunks
        row = outer // steps
        step = outer - row * steps
        low = tl.zeros([], tl.int32)
        high = segments.to(tl.int32)
        target = first % chunks
        for _ in range(search_rounds):
            middle = (low + high) // 2
            beyond = tl.load(firsts + middle) > target
            high = tl.where(beyond, middle, high)
            low = tl.where(beyond, low, middle)
        # chunks of the next (row, step) begin again at segment 0
        begin = tl.where(within >= target, low, 0) + tl.zeros([COUNT], tl.int32)
        end = tl.minimum(begin + COUNT, segments)
        for _ in range(COUNT_LOG):
            centre = (begin + end) // 2
            past = tl.load(firsts + centre) > within
            end = tl.where(past, centre, end)
            begin = tl.where(past, begin, centre)
        segment = begin
        chunk = within - tl.load(firsts + segment).to(tl.int32)
        full = tl.load(lengths + segment)
    else:
        # items: row, segment, step, chunk
        copy = item // chunks
        chunk = item - copy * chunks
        outer = copy // steps
        step = copy - outer * steps
        row = outer // segments
        segment = outer - row * segments
        full = length
    done = chunk.to(tl.int64) * CHUNK
    count = tl.minimum(full - done, CHUNK)
    count = tl.where(live, count, 0).to(tl.int32)
    dst = tl.load(dst_rows + row) + tl.load(dst_segments + segment) + tl.load(dst_steps + step)
    dst += done + dst_shift
    src = dst
    if not FILL:
        src = tl.load(src_rows + row) + tl.load(src_segments + segment) + tl.load(src_steps + step)
        src += done + src_shift
    if GRAIN == 16:
        _move(src, dst, count, FILL, CHUNK)
    else:
        alike = ((src ^ dst) & 15) == 0
        head = tl.minimum((0 - dst) & 15, count.to(tl.int64)).to(tl.int32)
        head = tl.where(alike, head, 0)
        body = tl.where(alike, (count - head) // 16 * 16, 0)
        _move(src + head, dst + head, body, FILL, CHUNK)
        _move_grains(src, dst, head, FILL, 16, GRAIN)
        tail = tl.where(alike, count - head - body, 0)
        _move_grains(src + head + body, dst + head + body, tail, FILL, 16, GRAIN)
        other = tl.where(alike, 0, count)
        most = tl.max(other, 0)
        for at in range(0, most, 64 * GRAIN):
            left = tl.minimum(tl.maximum(other - at, 0), 64 * GRAIN)
            _move_grains(src + at, dst + at, left, FILL, 64 * GRAIN, GRAIN)


@triton.jit
def _move(src, dst, count, FILL: tl.constexpr, MOST: tl.constexpr):
    """`count[i]` bytes, a multiple of 16, between addresses that are multiples of 16."""
    at = tl.arange(0, MOST // 8)[None, :]
    wanted = at < (count // 16 * 2)[:, None]  # seen to be even: masks come in pairs of words
    to = tl.multiple_of(dst[:, None].to(tl.pointer_type(tl.int64)) + at, (16, 16))
    to = tl.max_contiguous(to, (1, MOST // 8))
    if FILL:
        words = tl.zeros([dst.shape[0], MOST // 8], tl.int64)
    else:
        of = tl.multiple_of(src[:, None].to(tl.pointer_type(tl.int64)) + at, (16, 16))
        of = tl.max_contiguous(of, (1, MOST // 8))
        words = tl.load(of, mask=wanted, cache_modifier=".cg")  # read once, so not cached in the L1
    tl.store(to, words, mask=wanted)


@triton.jit
def _move_grains(src, dst, count, FILL: tl.constexpr, MOST: tl.constexpr, GRAIN: tl.constexpr):
    """`count[i]` bytes, at most MOST, a multiple of GRAIN as the addresses are."""
    kind: tl.constexpr = tl.int32 if GRAIN == 4 else tl.int8
    at = tl.arange(0, MOST // GRAIN)[None, :]
    wanted = at * GRAIN < count[:, None]
    to = dst[:, None].to(tl.pointer_type(kind)) + at
    if FILL:
        some = tl.zeros([dst.shape[0], MOST // GRAIN], kind)
    else:
        some = tl.load(src[:, None].to(tl.pointer_type(kind)) + at, mask=wanted)
    tl.store(to, some, mask=wanted)


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
    """`mix128` (checksum.py) of runs, which are cut into chunks as copies are.

    Addresses and lengths are multiples of 16. `out` has `SLOTS` pairs of sums, so that few programs
    add to one.
    """
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


# xxh3 of 64 bits (xxh3.py has its constants), for pieces of memory that begin at a multiple of 16
# bytes and have more than 240 bytes, a multiple of 8.
# xxh3 has eight lanes. Every 64 bytes (a stripe) are added to the lanes, and after every 16 stripes
# (a block) the lanes are scrambled. Additions commute, so `xxh3_blocks` sums all blocks of all
# pieces at once. Only the scrambling goes block by block, in `xxh3_pieces`, for all pieces at once.
XXH3_BLOCK = tl.constexpr(1024)
XXH3_STRIPE = tl.constexpr(64)
XXH3_LAST = tl.constexpr(24)  # places in the table of constants; the secret's words come first
XXH3_MERGE = tl.constexpr(32)
XXH3_BEGIN = tl.constexpr(40)
XXH3_SCRAMBLE = tl.constexpr(16)


@triton.jit
def xxh3_blocks(
    runs, offsets, lengths, constants, out, run_bytes, per_piece, items, COUNT: tl.constexpr
):
    """The sums that each whole block, but a piece's last one, adds to the eight lanes.

    Offsets count through runs of `run_bytes` each, a multiple of a block, at addresses `runs`.
    """
    item = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    live = item < items
    item = tl.minimum(item, items - 1)
    piece = item // per_piece
    block = item - piece * per_piece
    live = live & (block < (tl.load(lengths + piece) - 1) // XXH3_BLOCK)
    at = tl.load(offsets + piece) + block.to(tl.int64) * XXH3_BLOCK
    at = tl.load(runs + at // run_bytes) + at % run_bytes
    added = _stripes(at, tl.where(live, 16, 0), constants)
    place = out + item[:, None].to(tl.int64) * 8 + tl.arange(0, 8)[None, :]
    tl.store(place, added.to(tl.int64, bitcast=True), mask=live[:, None])


@triton.jit
def xxh3_pieces(
    runs,
    offsets,
    lengths,
    constants,
    sums,
    out,
    run_bytes,
    per_piece,
    pieces,
    COUNT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The hashes of pieces, from the sums of their blocks. `AHEAD` sums are loaded at a time: a
    block's scrambling waits for the block before it, but its load need not."""
    piece = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    live = piece < pieces
    piece = tl.minimum(piece, pieces - 1)
    lane = tl.arange(0, 8)
    length = tl.load(lengths + piece)
    begin = tl.load(offsets + piece)
    blocks = ((length - 1) // XXH3_BLOCK).to(tl.int32)
    acc = _unsigned(tl.load(constants + XXH3_BEGIN + lane))[None, :]
    acc = acc + tl.zeros([COUNT, 8], tl.uint64)
    key = _unsigned(tl.load(constants + XXH3_SCRAMBLE + lane))[None, :]
    place = sums + piece[:, None].to(tl.int64) * per_piece * 8 + lane[None, :]
    for first in range(0, tl.max(blocks, 0), AHEAD):
        for more in tl.static_range(AHEAD):
            there = (first + more < blocks)[:, None]
            added = acc + _unsigned(tl.load(place + (first + more) * 8, mask=there, other=0))
            acc = tl.where(there, ((added ^ (added >> 47)) ^ key) * 0x9E3779B1, acc)
    left = length - 1 - blocks.to(tl.int64) * XXH3_BLOCK
    tail = begin + blocks.to(tl.int64) * XXH3_BLOCK
    tail = tl.load(runs + tail // run_bytes) + tail % run_bytes
    acc += _stripes(tail, (left // XXH3_STRIPE).to(tl.int32), constants)
    last = tail + left + 1 - XXH3_STRIPE
    at = last[:, None].to(tl.pointer_type(tl.int64))
    key = _unsigned(tl.load(constants + XXH3_LAST + lane))[None, :]
    mixed = _unsigned(tl.load(at + lane[None, :])) ^ key
    acc += (mixed & 0xFFFFFFFF) * (mixed >> 32)
    acc += _unsigned(tl.load(at + (lane[None, :] ^ 1)))
    acc ^= _unsigned(tl.load(constants + XXH3_MERGE + lane))[None, :]
    even, odd = tl.split(tl.reshape(acc, [COUNT, 4, 2]))
    folded = (even * odd) ^ tl.umulhi(even, odd)
    total = _unsigned(tl.sum(folded.to(tl.int64, bitcast=True), 1))
    total += _unsigned(length) * 0x9E3779B185EBCA87
    total ^= total >> 37
    total *= 0x165667919E3779F9
    total ^= total >> 32
    tl.store(out + piece, total.to(tl.int64, bitcast=True), mask=live)


@triton.jit
def _unsigned(words):
    return words.to(tl.uint64, bitcast=True)


@triton.jit
def _stripes(begin, count, constants):
    """The sums that `count` stripes at each `begin` add to the lanes. Each word is added to the
    neighbour of its lane.

    A thread keeps its lanes from stripe to stripe, so that threads exchange nothing.
    """
    lane = tl.arange(0, 8)
    place = begin[:, None].to(tl.pointer_type(tl.int64)) + lane[None, :]
    place = tl.max_contiguous(tl.multiple_of(place, (16, 16)), (1, 8))
    products = tl.zeros(place.shape, tl.uint64)
    words = tl.zeros(place.shape, tl.uint64)
    for stripe in tl.static_range(16):
        wanted = (stripe < count)[:, None]
        word = _unsigned(tl.load(place + stripe * 8, mask=wanted, other=0))
        mixed = word ^ _unsigned(tl.load(constants + stripe + lane))[None, :]
        products += tl.where(wanted, (mixed & 0xFFFFFFFF) * (mixed >> 32), 0)
        words += word
    even, odd = tl.split(tl.reshape(words, [begin.shape[0], 4, 2]))
    return products + tl.reshape(tl.join(odd, even), [begin.shape[0], 8])
