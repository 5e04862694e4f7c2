"""What is needed of memory that the kernel does not reach run by run.

    gather    many runs of registered memory, one after another, into a staging buffer
    scatter   a staging buffer to many runs of registered memory
    zero      runs that nothing was written to

For carriers, host memory needs none of it: the kernel sends from and receives into the runs
themselves. A GPU's memory hands out chunks (`StagedMemory`).

Every method returns when it is done: what was gathered is in `into`, what was scattered is visible
to whoever uses that memory. Ranges outside of the memory are `OutOfBounds`, and nothing is copied.
Several threads may call at once, each with a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Memory(Protocol):
    """Registered memory of this process, by address."""

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None: ...
    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None: ...
    def zero(self, address: Ints, length: Ints) -> None: ...


class StagedMemory(Memory, Protocol):
    """Memory that hands out chunks of staging memory of its own, and works while one is used.

    Chunks come in the order of the runs' bytes. Close the generator, also where it did not end:
    then nothing that it began is under way.
    """

    def outgoing(self, address: Ints, length: Ints) -> Generator[Bytes]:
        """The runs' bytes; a chunk holds them until the next one is asked for."""
        ...

    def incoming(self, address: Ints, length: Ints) -> Generator[Bytes]:
        """Chunks to be filled before the next one is asked for; visible when it has ended."""
        ...


def is_staged(memory: Memory) -> TypeGuard[StagedMemory]:
    return hasattr(memory, "outgoing")
