# SPDX-License-Identifier: Apache-2.0
"""xxh3 (64 bits, seed 0) of a GPU's memory, computed there, with the results of the host's library.

So a processor can check what a GPU has written, and the reverse. triton_kernels.py explains how
many threads compute xxh3.

A piece begins at a multiple of 16 bytes. Its length is a multiple of 8, and at least `LEAST_BYTES`,
because xxh3 is another function for shorter ones. It may lie in several runs of memory.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from kvferry.carriers.cuda.driver import CudaStream, Device, Function
from kvferry.carriers.cuda.kernels import load
from kvferry.copies import Ints

LEAST_BYTES = 241
GRAIN = 8
BLOCK_BYTES = 1024
SUMS = 8  # numbers of each block, between the two kernels

# The algorithm's published constants.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIMES_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIMES_64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_BEGIN = (_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0])
_LAST_STRIPE, _MERGE = 121, 11  # offsets in the secret

# Blocks or pieces of a program, and its warps
BLOCKS, BLOCK_WARPS = 32, 4
PIECES, PIECE_WARPS = 2, 1
AHEAD = 16  # blocks whose sums are loaded at a time

_TABLES = dict.fromkeys(("runs", "offsets", "lengths", "constants"), "*i64")
_NUMBERS = {"run_bytes": "i64", "per_piece": "i32"}
_BLOCKS = {**_TABLES, "out": "*i64", **_NUMBERS, "items": "i32"}
_PIECES = {**_TABLES, "sums": "*i64", "out": "*i64", **_NUMBERS, "pieces": "i32"}


def constants() -> Ints:
    """The kernels' table: the secret's words, then the words for the end of a piece."""
    words = [
        *struct.unpack("<24Q", _SECRET),
        *struct.unpack_from("<8Q", _SECRET, _LAST_STRIPE),
        *struct.unpack_from("<8Q", _SECRET, _MERGE),
        *_BEGIN,
    ]
    return np.array(words, dtype=np.uint64).view(np.int64)


def takes(length: Ints) -> NDArray[np.bool_]:
    """Which pieces of these lengths the kernels can hash, at multiples of 16."""
    return np.asarray((length >= LEAST_BYTES) & (length % GRAIN == 0))


def blocks_of(longest: int) -> int:
    """Blocks of a piece that the first kernel adds up."""
    return max(1, (longest - 1) // BLOCK_BYTES)


def warm(device: Device) -> tuple[Function, Function]:
    """Both kernels, compiled if necessary, or a `TransferError`. The device is current."""
    return (
        load(device, "xxh3_blocks", _BLOCKS, {"COUNT": BLOCKS}, BLOCK_WARPS),
        load(device, "xxh3_pieces", _PIECES, {"COUNT": PIECES, "AHEAD": AHEAD}, PIECE_WARPS),
    )


def queue(
    device: Device,
    stream: CudaStream,
    *,
    runs: int,
    run_bytes: int,
    offsets: int,
    lengths: int,
    table: int,
    sums: int,
    out: int,
    pieces: int,
    per_piece: int,
) -> None:
    """Queue the hashing of `pieces` pieces. All addresses are the device's.

    runs, run_bytes   addresses of runs, each of so many bytes (a multiple of `BLOCK_BYTES`). The
                      offsets of pieces count through the runs as if these were contiguous
    offsets, lengths  a number for each piece
    table             `constants()`
    sums              room for `pieces * per_piece * SUMS` numbers
    out               the hashes, once the kernels are done
    per_piece         `blocks_of` the longest one
    """
    first, second = warm(device)
    items = pieces * per_piece
    values = [runs, offsets, lengths, table, sums, run_bytes, per_piece, items]
    first.launch(-(-items // BLOCKS), stream, values)
    values = [runs, offsets, lengths, table, sums, out, run_bytes, per_piece, pieces]
    second.launch(-(-pieces // PIECES), stream, values)
