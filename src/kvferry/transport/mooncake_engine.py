"""Mooncake's engine itself: how it is made, which way it takes, and its codes.

Mooncake (0.3.13) does not go by the protocol that it is told: it takes RDMA where it finds a device
that the names allow, and TCP where it finds none. So what was asked for is seen to here. For `tcp`,
MC_FORCE_TCP is set while an engine is made; for `rdma`, the devices must be there, or the engine is
not made. No other protocol is taken: nothing tells whether a build of Mooncake has it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvferry.errors import TransferError
from kvferry.transport.foreign_library import environment

PROTOCOLS = ("tcp", "rdma")
DEVICES = Path("/sys/class/infiniband")
TIMEOUT_VARIABLE, TIMEOUT_SECONDS = "MC_TRANSFER_TIMEOUT", 86_400
FORCE_TCP, FORCE_RDMA = "MC_FORCE_TCP", "MC_FORCE_HCA"
# its header error.h
CODES = {
    -1: "an invalid argument",
    -2: "too many requests",
    -3: "an address that is not registered",
    -4: "a batch that is busy",
    -6: "no such device",
    -7: "an address that is registered already",
    -101: "a name that cannot be resolved",
    -102: "a socket's error",
    -103: "damaged JSON",
    -104: "a handshake that was rejected",
    -200: "metadata",
    -201: "an endpoint",
    -202: "a context of a device",
    -300: "NUMA",
    -301: "the clock",
    -302: "memory",
    -303: "what is not implemented",
}


def engine_class() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransferError(
            f"the carrier 'mooncake' needs Mooncake's transfer engine ({error}): pip install "
            "'kvferry[mooncake]' (with CUDA) or 'kvferry[mooncake-cpu]', and the system's "
            "libibverbs1"
        ) from None
    return TransferEngine


def require_way(protocol: str, device: str) -> None:
    """Refuse what Mooncake would replace by something else without a word."""
    if protocol not in PROTOCOLS:
        raise TransferError(
            f"the mooncake carrier's protocol is one of {', '.join(PROTOCOLS)}, found {protocol!r}"
        )
    if protocol == "tcp":
        if device:
            raise TransferError(
                f"the mooncake carrier's device {device!r} is for protocol rdma; with tcp there is "
                "none: set protocol to rdma, or drop the device"
            )
        return
    if FORCE_TCP in os.environ:
        raise TransferError(
            f"the mooncake carrier is to use rdma, and {FORCE_TCP} is set; unset one of the two"
        )
    there = sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []
    wanted = [name.strip() for name in device.split(",") if name.strip()]
    missing = [name for name in wanted if name not in there]
    if missing or (not there and FORCE_RDMA not in os.environ):
        raise TransferError(
            f"the mooncake carrier is to use rdma with {device or 'any device'}, and this host has "
            f"{', '.join(there) or 'no RDMA device'} ({DEVICES}); name devices that are there, or "
            "set protocol to tcp"
        )


def make_engine(engine: Any, where: str, protocol: str, device: str) -> Any:
    """An engine that goes by this protocol. It reads its settings once, from the environment; what
    the user has set stays."""
    ours = {TIMEOUT_VARIABLE: str(TIMEOUT_SECONDS)}
    if protocol == "tcp":
        ours[FORCE_TCP] = "1"
    with environment({name: value for name, value in ours.items() if name not in os.environ}):
        made = engine()
        code = made.initialize(where, "P2PHANDSHAKE", protocol, device)
    if code != 0:
        raise TransferError(
            f"Mooncake's engine does not start on {where} with protocol {protocol!r} and device "
            f"{device!r} ({meaning(code)}); its own log says why. `device` must name RDMA devices "
            "of this host (ibv_devices lists them); protocol tcp needs none"
        )
    return made


def meaning(code: int) -> str:
    return f"code {code}, {CODES[code]}" if code in CODES else f"code {code}"
