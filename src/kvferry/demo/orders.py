"""What the demo and its ranks tell each other, over a pipe.

A rank does what it is told, one order at a time, and ends when the pipe closes:

    greet           -> Greeting   its pid, and an address to try to read
    probe(peers)    -> str        consumer: what keeps it from reading the producers' memory
    set_up(method)  -> Greeting   allocates, and makes its carriers, where the method is one; a
                                  consumer plans its edges
    link(peers)     -> [Link]     consumer: reaches every producer that it reads from, and says how
    fill()                        writes what is to be moved, or what must not change
    pull()          -> Pulled     consumer: loads every request from the producers
    check()         -> Checked    consumer: compares every byte with what it should be

While it works it reports bytes done as `Progress`; every order is answered by `Done` or `Failed`.
Producers do nothing while consumers pull: reading is one-sided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    endpoints: dict[str, bytes] = field(default_factory=dict)  # of its carriers, by name


@dataclass(frozen=True, slots=True)
class Link:
    """How a consumer reaches a producer."""

    method: str  # vm, shared or a carrier's name
    why: str = ""  # in the words of `auto`, where that chose
    detour: str = ""  # why the carrier goes by tcp; empty where it goes its own way


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
