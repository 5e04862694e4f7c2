"""What a carrier needs of memory that it cannot, or should not, reach run by run.

    gather    many runs of registered memory, one after another, into a staging buffer
    scatter   a staging buffer to many runs of registered memory
    zero      runs that nothing was written to

Host memory that plain pointers reach (`addressable`) needs none of it: the kernel sends from and
receives into the runs themselves, which wins for long ones. Short runs are gathered first
(*packed* mode); which of the two is decided by a cost model (cost.py), and both put the same bytes
on the wire. Memory that is not addressable (a GPU's) is always packed.

Every method returns when it is done: what was gathered is in `into`, what was scattered is visible
to whoever uses that memory. Ranges outside of the memory are `OutOfBounds`, and nothing is copied.
Several threads may call at once, each with a buffer of its own.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Memory(Protocol):
    """Registered memory of this process, by address.

    A class may also have `addressable: bool` (taken as false where it is missing), and
    `buffer(count: int) -> Bytes`, which makes staging memory of its own kind (pinned, say).
    """

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None: ...
    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None: ...
    def zero(self, address: Ints, length: Ints) -> None: ...


def is_addressable(memory: Memory) -> bool:
    """Whether the kernel reaches it by plain pointers, so that packing is a choice."""
    return bool(getattr(memory, "addressable", False))


def make_buffer(memory: Memory, count: int) -> Bytes:
    """A staging buffer of at least `count` bytes that this memory likes best."""
    make = getattr(memory, "buffer", None)
    made: Bytes = make(count) if make is not None else np.empty(count, dtype=np.uint8)
    return made
