"""A store that is one file an object, and one that fails on purpose.

`DirStore` is as simple as a store can be: objects are written under a temporary name and renamed,
with a digest in front; a read checks all of it. `FaultyStore` wraps a store and does what it is
told at each point: raise, hang until released, answer nonsense.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import StoreError
from kvferry.pool.store import Bools, Outcome, Slices, Store

DIGEST = 16


def read_memory(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)


class DirStore:
    name = "directory"

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.regions: list[MemoryRegion] = []
        self.puts = self.gets = 0

    def file(self, key: str) -> Path:
        return self.path / hashlib.sha256(key.encode()).hexdigest()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.regions += regions

    def access(self, keys: Sequence[str], deadline: float) -> None:
        """Nothing is evicted."""

    def _inside(self, address: int, length: int) -> bool:
        stop = address + length
        return any(r.address <= address and stop <= r.address + r.bytes for r in self.regions)

    def exists(self, keys: Sequence[str], deadline: float) -> Bools:
        return np.asarray([self.file(key).exists() for key in keys], dtype=bool)

    def put(self, keys: Sequence[str], objects: Sequence[Slices], deadline: float) -> list[Outcome]:
        outcomes = []
        for key, ranges in zip(keys, objects, strict=True):
            parts = list(zip(ranges.address.tolist(), ranges.length.tolist(), strict=True))
            if not all(self._inside(*part) for part in parts):
                raise StoreError("an object outside of registered memory")
            outcomes.append(self.put_bytes(key, b"".join(read_memory(*p) for p in parts), deadline))
        return outcomes

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        outcomes = []
        for key, slices in zip(keys, wanted, strict=True):
            self.gets += 1
            try:
                raw = self.file(key).read_bytes()
            except FileNotFoundError:
                outcomes.append(Outcome.MISSING)
                continue
            body = raw[DIGEST:]
            if hashlib.sha256(body).digest()[:DIGEST] != raw[:DIGEST]:
                outcomes.append(Outcome.CORRUPT)
                continue
            for offset, address, length in zip(
                slices.offset.tolist(), slices.address.tolist(), slices.length.tolist(), strict=True
            ):
                if not self._inside(address, length) or offset + length > len(body):
                    raise StoreError("a range outside of registered memory or of the object")
                ctypes.memmove(address, body[offset : offset + length], length)
            outcomes.append(Outcome.DONE)
        return outcomes

    def put_bytes(self, key: str, value: bytes, deadline: float) -> Outcome:
        file = self.file(key)
        if file.exists():
            return Outcome.EXISTS
        self.puts += 1
        temporary = self.path.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
        temporary.write_bytes(hashlib.sha256(value).digest()[:DIGEST] + value)
        temporary.rename(file)
        return Outcome.DONE

    def get_bytes(self, key: str, deadline: float) -> bytes | None:
        try:
            return self.file(key).read_bytes()[DIGEST:]
        except FileNotFoundError:
            return None

    def remove(self, keys: Sequence[str], deadline: float) -> int:
        there = [key for key in keys if self.file(key).exists()]
        for key in there:
            self.file(key).unlink(missing_ok=True)  # two ranks may remove it
        return len(there)

    def close(self) -> None:
        """Nothing is open."""


def open_dir_store(path: str) -> DirStore:
    """For `"store": "dir_store:open_dir_store"`."""
    return DirStore(path)


class FaultyStore:
    """Calls `faults[name]` before a call of that name; its answer counts, unless None."""

    def __init__(self, store: Store, faults: dict[str, Callable[..., Any]] | None = None) -> None:
        self.inner, self.faults = store, faults if faults is not None else {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if not callable(method):
            return method

        def call(*args: Any) -> Any:
            self.calls.append(name)
            fault = self.faults.get(name)
            answer = fault(*args) if fault is not None else None
            return method(*args) if answer is None else answer

        return call


class BadCalls:
    """A fault for some calls of one name: they raise, lie, or hang until released."""

    LIES: Mapping[str, Any] = {"exists": True, "put": Outcome.FULL, "get": Outcome.CORRUPT}

    def __init__(self, name: str, how: str, calls: int) -> None:
        self.name, self.how, self.left = name, how, calls
        self.lock, self.released = threading.Lock(), threading.Event()

    def __call__(self, keys: Any, *_: Any) -> Any:
        with self.lock:
            self.left -= 1
            if self.left < 0:
                return None
        if self.how == "raises":
            raise StoreError("a fault that was asked for")
        if self.how == "lies" and self.name in self.LIES:
            answers = [self.LIES[self.name]] * len(keys)
            return np.array(answers) if self.name == "exists" else answers
        if self.how == "hangs" and threading.current_thread() is not threading.main_thread():
            self.released.wait(120)  # the main thread releases it
        return None
