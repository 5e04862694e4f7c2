"""Carriers by name."""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import Any

from kvferry.errors import TransferError
from kvferry.transport.base import Carrier
from kvferry.transport.local import LocalCarrier
from kvferry.transport.null import NullCarrier
from kvferry.transport.tcp import TcpCarrier

log = logging.getLogger("kvferry")

# A class, or where it is: module and name, for those that need a library of their own.
CARRIERS: dict[str, type[Any] | tuple[str, str]] = {
    "null": NullCarrier,
    "local": LocalCarrier,
    "tcp": TcpCarrier,
    "mooncake": ("kvferry.transport.mooncake", "MooncakeCarrier"),
    "nixl": ("kvferry.transport.nixl", "NixlCarrier"),
    "cuda": ("kvferry.transport.cuda", "CudaCarrier"),
}
HAD_PACKING = ("local", "tcp", "mooncake", "nixl")  # an option that configurations may still have


def make_carrier(name: str, **options: Any) -> Carrier:
    """The carrier of that name; `options` are its constructor's."""
    kind = CARRIERS.get(name)
    if kind is None:
        raise TransferError(f"there is no carrier {name!r}; there are {', '.join(CARRIERS)}")
    if isinstance(kind, tuple):
        kind = getattr(import_module(kind[0]), kind[1])
    if name in HAD_PACKING and "packing" in options:
        del options["packing"]
        log.warning("carrier %s: `packing` has no effect any more; remove it", name)
    takes = inspect.signature(kind).parameters
    unknown = sorted(set(options) - set(takes))
    if unknown:
        raise TransferError(
            f"the carrier {name!r} has no option {', '.join(unknown)}; it has {', '.join(takes)}"
        )
    try:
        carrier: Carrier = kind(**options)
    except TypeError as error:
        raise TransferError(f"the carrier {name!r} cannot be made: {error}") from None
    return carrier
