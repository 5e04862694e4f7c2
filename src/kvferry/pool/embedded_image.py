"""An object as it lies in the arena and on disk: a header that proves itself, then the bytes.

    digest   8  xxh3 of the rest of the header
    magic    4  `KVF1`
    key      4  bytes of the key
    length   8  bytes of the object
    chunk    4  bytes that one checksum covers
    chunks   4
    checksums   8 each, xxh3
    the key, and zeros up to a multiple of 64

A part of an object is checked by the checksums of the chunks that it touches, without the rest.
A reader hashes bytes a few hundred KiB after it has copied them, so that they are in the cache.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

CHUNK_BYTES = 256 << 10  # hashed at 10 GB/s from memory; chunks of 64 KiB at 9
_HEAD = struct.Struct("<QIIQII")
_MAGIC = 0x3146564B
_ALIGN = 64
_checksum = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A header that was found whole."""

    key: str
    header_bytes: int
    length: int
    chunk_bytes: int
    checksums: Words


def header_bytes(key_bytes: int, length: int) -> int:
    chunks = -(-length // CHUNK_BYTES)
    return -(-(_HEAD.size + 8 * chunks + key_bytes) // _ALIGN) * _ALIGN


def image_bytes(key_bytes: int, length: int) -> int:
    return header_bytes(key_bytes, length) + length


def seal(image: memoryview, key: bytes, length: int) -> None:
    """Write the header in front of data that is in place."""
    size = header_bytes(len(key), length)
    data = image[size : size + length]
    sums = [_checksum(data[at : at + CHUNK_BYTES]) for at in range(0, length, CHUNK_BYTES)]
    rest = _HEAD.pack(0, _MAGIC, len(key), length, CHUNK_BYTES, len(sums))[8:]
    rest += np.asarray(sums, dtype="<u8").tobytes() + key
    rest += bytes(size - 8 - len(rest))
    image[:size] = _checksum(rest).to_bytes(8, "little") + rest


def open_image(image: memoryview) -> Image | None:
    """The header at the beginning of `image`; None where it is not whole."""
    if len(image) < _HEAD.size:
        return None
    digest, magic, key_bytes, length, chunk_bytes, chunks = _HEAD.unpack_from(image)
    if magic != _MAGIC or not chunk_bytes or chunks != -(-length // chunk_bytes):
        return None
    used = _HEAD.size + 8 * chunks
    size = -(-(used + key_bytes) // _ALIGN) * _ALIGN
    if size > len(image) or _checksum(image[8:size]) != digest:
        return None
    sums = np.frombuffer(bytes(image[_HEAD.size : used]), dtype="<u8")
    try:
        key = bytes(image[used : used + key_bytes]).decode()
    except UnicodeDecodeError:  # a right digest, but nothing that this store wrote
        return None
    return Image(key, size, length, chunk_bytes, sums)


def header_size(head: bytes) -> int:
    """Bytes of the header that begins like this; 0 where it is none."""
    if len(head) < _HEAD.size:
        return 0
    _, magic, key_bytes, _, _, chunks = _HEAD.unpack_from(head)
    return -(-(_HEAD.size + 8 * chunks + key_bytes) // _ALIGN) * _ALIGN if magic == _MAGIC else 0


def begins_image(head: bytes) -> bool:
    """Whether a file that begins like this is an image, or one whose beginning was never written.

    The digest in front may be anything; a file system that lost power shows zeros or an early end.
    """
    return not head.strip(b"\0") or head[8:12] == _MAGIC.to_bytes(4, "little")


def check(image: Image, data: memoryview, chunks: Ints) -> bool:
    """Whether these chunks of the object are what was written."""
    step, sums = image.chunk_bytes, image.checksums
    for chunk, wanted in zip(chunks.tolist(), sums[chunks].tolist(), strict=True):
        at = chunk * step
        if _checksum(data[at : min(at + step, image.length)]) != wanted:
            return False
    return True


def check_range(image: Image, data: memoryview, first: int, last: int) -> bool:
    """The same for chunks `first` up to `last`."""
    step = image.chunk_bytes
    at = first * step
    for wanted in image.checksums[first:last].tolist():
        # the last slice ends with the data
        if _checksum(data[at : at + step]) != wanted:
            return False
        at += step
    return True


def check_all(image: Image, data: memoryview) -> bool:
    return check_range(image, data, 0, len(image.checksums))


def touched(image: Image, offset: Ints, length: Ints) -> Ints:
    """Chunks that these parts lie in."""
    if len(offset) == 0:
        return np.empty(0, dtype=np.int64)
    edges = np.zeros(len(image.checksums) + 1, dtype=np.int64)
    some = length > 0
    np.add.at(edges, offset[some] // image.chunk_bytes, 1)
    np.add.at(edges, (offset[some] + length[some] - 1) // image.chunk_bytes + 1, -1)
    return np.flatnonzero(np.cumsum(edges[:-1]))
