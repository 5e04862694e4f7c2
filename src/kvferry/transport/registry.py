"""Carriers by name."""

from __future__ import annotations

import importlib
from typing import Any

from kvferry.errors import TransferError
from kvferry.transport.base import Carrier
from kvferry.transport.local import LocalCarrier
from kvferry.transport.null import NullCarrier
from kvferry.transport.tcp import TcpCarrier

CARRIERS: dict[str, type[Any]] = {
    "null": NullCarrier,
    "local": LocalCarrier,
    "tcp": TcpCarrier,
}
LAZY = {"cuda": "kvferry.transport.cuda:CudaCarrier"}  # need a library or a device of their own


def make_carrier(name: str, **options: Any) -> Carrier:
    """The carrier of that name; `options` are its constructor's."""
    kind = CARRIERS.get(name)
    if kind is None and name in LAZY:
        module, _, class_name = LAZY[name].partition(":")
        kind = getattr(importlib.import_module(module), class_name)
    if kind is None:
        names = ", ".join([*CARRIERS, *LAZY])
        raise TransferError(f"there is no carrier {name!r}; there are {names}")
    try:
        carrier: Carrier = kind(**options)
    except TypeError as error:
        raise TransferError(f"the carrier {name!r} cannot be made: {error}") from None
    return carrier
