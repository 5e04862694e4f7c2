"""What the demo and its ranks tell each other, over a pipe.

A rank does what it is told, one order at a time, and ends when the pipe closes:

    greet           -> Greeting   its pid, and an address to try to read
    probe(peers)    -> str        consumer: what keeps it from reading the producers' memory
    set_up(method)  -> Greeting   allocates; a producer fills, a consumer plans its edges; both make
                                  their carrier, where the method is one
    pull(peers)     -> Pulled     consumer: loads every request from the producers
    check()         -> Checked    consumer: compares every byte with what it should be

While it works it reports bytes done as `Progress`; every order is answered by `Done` or `Failed`.
Producers do nothing while consumers pull: reading is one-sided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.errors import KvferryError
from kvferry.layout.shape import Rank


@dataclass(frozen=True, slots=True)
class Order:
    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    error: KvferryError | None  # as it was raised, where it is one of ours
    text: str


@dataclass(frozen=True, slots=True)
class Greeting:
    """Where a rank can be reached."""

    rank: Rank
    pid: int
    address: int
    endpoint: bytes = b""  # of its carrier, where the method is one


@dataclass(frozen=True, slots=True)
class Pulled:
    bytes: int
    descriptors: int
    copy_seconds: float  # spent in the carrier alone


@dataclass(frozen=True, slots=True)
class Checked:
    arrived_bytes: int  # compared with their own values
    guarded_bytes: int  # had to be zero, or unchanged
    wrong_bytes: int


Report = Callable[[int], None]
