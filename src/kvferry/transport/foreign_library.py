"""What a carrier's library gives, as `foreign` asks for it: batches between two processes."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kvferry.transport.base import MemoryRegion
from kvferry.transport.foreign_peer import ON_HOST, ForeignEndpoint, ForeignPeer, batches
from kvferry.transport.jobs import Job
from kvferry.transport.regions import Arrays


class Library(ABC):
    name: ClassVar[str]
    batch_descriptors: ClassVar[int]
    batch_bytes: ClassVar[int]
    listens_everywhere: ClassVar[bool] = False  # whatever `host` is
    device: int = ON_HOST  # where what is registered lies, if the library must know

    @abstractmethod
    def register_one(self, region: MemoryRegion) -> None:
        """With the library; or `TransferError`."""

    @abstractmethod
    def unregister_one(self, region: MemoryRegion) -> None:
        """One that was registered. Never raises."""

    @abstractmethod
    def _address(self) -> bytes:
        """What a peer's library needs."""

    @abstractmethod
    def _attach(self, endpoint: ForeignEndpoint) -> Any:
        """The library's handle for a peer."""

    @abstractmethod
    def _detach(self, handle: Any) -> None:
        """Nothing of ours is under way to or from that peer."""

    def _batches(self, peer: ForeignPeer, part: Arrays, *, reading: bool) -> Iterator[Arrays]:
        """What `_carry` gets, one after the other."""
        return batches(part, self.batch_descriptors, self.batch_bytes)

    @abstractmethod
    def _carry(self, job: Job, peer: ForeignPeer, batch: Arrays, *, reading: bool) -> None:
        """Move one batch. Returns or raises when the library has let it go."""

    @abstractmethod
    def _shut(self) -> None:
        """End the library's part; nothing of ours is under way in it."""


@contextlib.contextmanager
def environment(ours: Mapping[str, str]) -> Iterator[None]:
    """With variables that the environment does not have."""
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
