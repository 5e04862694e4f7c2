"""Scattered copies by a plain loop: what carriers and kernels are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np


def copy_scattered(
    src_memory: np.ndarray, src: Any, dst_memory: np.ndarray, dst: Any, length: Any
) -> None:
    """`length[i]` bytes from offset `src[i]` to offset `dst[i]`."""
    lists = (np.asarray(offsets).tolist() for offsets in (src, dst, length))
    for a, b, n in zip(*lists, strict=True):
        dst_memory[b : b + n] = src_memory[a : a + n]
