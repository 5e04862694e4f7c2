"""Which carrier an engine would use for another, from what is known of each carrier.

The choice is made by `transport.auto` itself: its `select` says what is opened, its
`fastest_first` the order, its `connect` which is taken. A `Way` is as much of a carrier as those
need: it stands for one that was tried (`peers`), or for what two reports say of it (`between`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import HandoverError, KvferryError
from kvferry.transport.auto import Selected, connect, fastest_first
from kvferry.transport.foreign_peer import ForeignEndpoint

FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Link:
    detour: str


@dataclass(frozen=True, slots=True)
class Way:
    """A carrier, and how it reaches the peer: it does, by a detour, or why not."""

    name: str
    flavour: str = ""  # of a library's carrier
    offered: bool = True  # whether the peer has it
    why_not: str = ""
    detour: str = ""

    def connect(self, endpoint: bytes, deadline: float) -> Link:
        if self.why_not:
            raise HandoverError(self.why_not)
        return Link(self.detour)

    def disconnect(self, peer: Link) -> None:
        """Nothing is open."""

    @property
    def trouble(self) -> str:
        if not self.offered:
            return self.why_not or "the peer does not offer it"
        return self.why_not or self.detour


@dataclass(frozen=True, slots=True)
class Picked:
    name: str  # empty where no carrier reaches the peer
    said: str


def pick(ways: Sequence[Way], left_out: Sequence[Selected], *, in_order: bool = False) -> Picked:
    """What is used, and why: what comes after it, what was ruled out.

    `in_order`: as a user named them, however fast they are.
    """
    carriers: list[Any] = list(ways)
    ordered: list[Any] = carriers if in_order else [*fastest_first(carriers)]
    offered = {way.name: b"" for way in ways if way.offered}
    out = [f"{way.name}: {way.trouble}" for way in ordered if way.trouble]
    out += [f"{one.name}: {one.why_not}" for one in left_out]
    try:
        found: Any = connect(offered, ordered, FOREVER)[0]
    except KvferryError:
        return Picked("", f"no carrier reaches it ({'; '.join(out) or 'there is none'})")
    parts = [found.name]
    if found.detour:
        parts[0] += f", by tcp: {found.detour}"
    later = [w for w in ordered if w is not found and w.offered and not w.trouble]
    if later:
        parts.append("else " + ", then ".join(w.name for w in later))
    out = [reason for reason in out if not reason.startswith(f"{found.name}: ")]
    if out:
        parts.append(f"ruled out: {'; '.join(out)}")
    return Picked(found.name, "; ".join(parts))


def options_of(name: str, endpoint: bytes) -> dict[str, Any]:
    """Options of a library's carrier that speaks as the peer's does."""
    flavour = ForeignEndpoint.decode(endpoint, name).flavour
    return {"backends": flavour.split(",")} if name == "nixl" else {"protocol": flavour}


def usual_options(name: str, rdma: Sequence[str]) -> dict[str, Any]:
    """Options of a library's carrier for a host with these devices."""
    if name == "nixl":
        return {"backends": ["UCX"]}
    return {"protocol": "rdma", "device": ",".join(rdma)} if rdma else {"protocol": "tcp"}


def as_configured(name: str, options: dict[str, Any]) -> str:
    """The line of the configuration."""
    return f'"carrier_options": {json.dumps({name: options})}'
