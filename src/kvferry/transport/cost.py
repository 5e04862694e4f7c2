"""What a batch of copies costs, by carrier and mode: a line per kind, measured.

    seconds = batch_seconds + descriptors x descriptor_seconds + bytes x byte_seconds

*Direct*: every run is moved where it is. *Packed*: runs are gathered into a staging buffer, moved
as one, and scattered. For tcp each end decides for itself, by the runs that it has: the bytes on
the wire are the same. For local, packed reads long ranges that cover the runs and scatters from
there (local.py): its descriptors and bytes are those of the covers at the direct rate, and those of
the runs at the packed rate.

Numbers come from one of

    the file that KVFERRY_COSTS names
    $XDG_CONFIG_HOME/kvferry/costs.json (~/.config), by `kvferry bench transport --calibrate`
    the default that ships (costs.json beside this module: it says on what, when and how)
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

import msgspec

from kvferry.errors import DescriptionError

log = logging.getLogger("kvferry")

Mode = Literal["direct", "packed"]
Packing = Literal["auto", "direct", "packed"]
ENVIRONMENT = "KVFERRY_COSTS"
# Direct is never left for less than this: lines fitted twice on a busy machine differ by as much.
MARGIN = 0.8


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    batch_seconds: float
    descriptor_seconds: float
    byte_seconds: float

    def seconds(self, descriptors: int, count_bytes: int) -> float:
        return (
            self.batch_seconds
            + descriptors * self.descriptor_seconds
            + count_bytes * self.byte_seconds
        )


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of costs, and where it comes from."""

    name: str
    date: str
    command: str
    carriers: dict[str, dict[Mode, Cost]]

    def of(self, carrier: str, mode: Mode) -> Cost | None:
        """None where this carrier has no such mode, or was not measured."""
        return self.carriers.get(carrier, {}).get(mode)

    def seconds(self, carrier: str, descriptors: int, count_bytes: int) -> float:
        """The cheaper of its modes; infinite where nothing is known of it."""
        modes = dict(self.carriers.get(carrier, {}))
        if carrier == "local":
            modes.pop("packed", None)  # which is only what comes on top of reading the covers
        found = (cost.seconds(descriptors, count_bytes) for cost in modes.values())
        return min(found, default=float("inf"))


@dataclass(slots=True)
class Choice:
    """Which mode one carrier uses for a batch. `packing` may be set anew between transfers."""

    carrier: str
    packing: Packing = "auto"
    costs: Costs | None = None  # None: those of this machine

    def __post_init__(self) -> None:
        require_packing(self.packing)
        if self.packing == "auto" and self.costs is None:
            current_costs()  # a file that was named and is bad is refused here, not in a thread

    @property
    def may_pack(self) -> bool:
        known = self.packing != "direct" and None not in (self.cost("direct"), self.cost("packed"))
        return known or self.packing == "packed"

    def mode(self, descriptors: int, count_bytes: int) -> Mode:
        if self.packing != "auto":
            return self.packing
        direct, packed = self.cost("direct"), self.cost("packed")
        if direct is None or packed is None:
            return "direct"
        packs = packed.seconds(descriptors, count_bytes)
        return "packed" if pays(packs, direct.seconds(descriptors, count_bytes)) else "direct"

    def cost(self, mode: Mode) -> Cost | None:
        return (self.costs or current_costs()).of(self.carrier, mode)


def pays(packed_seconds: float, direct_seconds: float) -> bool:
    """Whether packing is worth it, with room for what the model does not know."""
    return packed_seconds < MARGIN * direct_seconds


def require_packing(packing: str) -> None:
    if packing not in get_args(Packing):
        raise DescriptionError(
            f"packing is one of {', '.join(get_args(Packing))}; found {packing!r}"
        )


def user_path() -> Path:
    """Where calibration writes, and where costs are looked for."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "kvferry" / "costs.json"


# made here: msgspec 0.22 crashes where two threads are the first to decode a type
_costs = msgspec.json.Decoder(Costs)


def read_costs(raw: bytes, whose: str) -> Costs:
    try:
        costs = _costs.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DescriptionError(
            f"{whose} is no file of costs ({error}); make it again by "
            "`kvferry bench transport --calibrate`"
        ) from None
    numbers = [
        n for m in costs.carriers.values() for c in m.values() for n in msgspec.structs.astuple(c)
    ]
    if any(not 0 <= n < float("inf") for n in numbers):
        raise DescriptionError(f"{whose} has costs that are negative or not numbers")
    return costs


def load_costs() -> Costs:
    """The user's own, else what ships. A file that was named must be good; another is skipped."""
    path = user_path()
    named = bool(os.environ.get(ENVIRONMENT))
    try:
        raw = path.read_bytes()
    except OSError as error:
        if named:
            raise DescriptionError(f"{ENVIRONMENT} names {path}: {error.strerror}") from None
        return shipped_costs()
    try:
        return read_costs(raw, str(path))
    except DescriptionError as error:
        if named:
            raise
        log.warning("%s; the costs that ship are used", error)
        return shipped_costs()


@cache
def shipped_costs() -> Costs:
    file = resources.files("kvferry.transport").joinpath("costs.json")
    return read_costs(file.read_bytes(), "kvferry's own costs.json")


@cache
def current_costs() -> Costs:
    """Those of this process, read once."""
    return load_costs()
