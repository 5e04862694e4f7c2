"""Scattered copies inside one process, for memory that both ends have mapped.

No system call and no permission is needed. Copies of one length go together: seen through a dtype
of that many bytes and a stride of one byte, a memory is an array in which every byte begins an
element, and NumPy's indexing moves whole elements from anywhere to anywhere. So Python runs once
per distinct length and chunk, and alignment does not matter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import TransferError

CHUNK_BYTES = 1 << 20  # goes through one intermediate array, which should stay in the cache

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def copy_scattered(
    src_memory: Bytes, src: ArrayLike, dst_memory: Bytes, dst: ArrayLike, length: ArrayLike
) -> int:
    """Copy `length[i]` bytes from offset `src[i]` to offset `dst[i]`; say how many in all.

    The two memories must not overlap.
    """
    sources, targets, lengths = (np.asarray(a, dtype=np.int64) for a in (src, dst, length))
    if not sources.shape == targets.shape == lengths.shape or lengths.ndim != 1:
        raise TransferError(
            "copies are three arrays of one length, found "
            f"src {sources.shape}, dst {targets.shape}, length {lengths.shape}"
        )
    _require_inside("source", src_memory, sources, lengths)
    _require_inside("destination", dst_memory, targets, lengths)
    for size in np.unique(lengths).tolist():
        if size == 0:
            continue
        same = np.flatnonzero(lengths == size)
        src_windows, dst_windows = _windows(src_memory, size), _windows(dst_memory, size)
        step = max(1, CHUNK_BYTES // size)
        for start in range(0, len(same), step):
            which = same[start : start + step]
            dst_windows[targets[which]] = src_windows[sources[which]]
    return int(lengths.sum())


def _windows(memory: Bytes, size: int) -> NDArray[np.void]:
    """Element i is the `size` bytes from byte i on."""
    return np.ndarray((len(memory) - size + 1,), f"V{size}", memory, strides=(1,))


def _require_inside(name: str, memory: Bytes, offsets: Ints, lengths: Ints) -> None:
    if len(offsets) == 0:
        return
    if int(lengths.min()) < 0:
        raise TransferError(f"a copy has a length of {int(lengths.min())} bytes")
    if int(offsets.min()) < 0 or int((offsets + lengths).max()) > len(memory):
        raise TransferError(
            f"a copy leaves the {name}'s memory of {len(memory)} bytes: offsets "
            f"{int(offsets.min())} to {int((offsets + lengths).max())} were asked for"
        )
