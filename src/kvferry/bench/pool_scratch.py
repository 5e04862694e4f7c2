"""Directories for measurements, which go when they end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch(in_memory: bool = True) -> Iterator[Path]:
    base = "/dev/shm" if in_memory and Path("/dev/shm").is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
