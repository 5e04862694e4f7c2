"""NIXL itself: its agents, the settings of UCX, its descriptors and errors.

UCX finds its own way to a peer: shared memory, TCP, RDMA, NVLink. Where `host` is loopback and the
environment says nothing else, it is kept to the loopback device: so it works without a network, and
cannot be reached from outside. With another `host`, UCX chooses its devices. Its InfiniBand module
stays unloaded on loopback and where there is no such device, because the one in NIXL 1.5.1's wheel
crashes the process when it exits. What the environment sets (UCX_NET_DEVICES, UCX_TLS,
UCX_MODULES) is never overridden.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import OutOfBounds, PeerLost, TransferError
from kvferry.transport.base import Ints
from kvferry.transport.foreign_library import environment
from kvferry.transport.foreign_peer import ON_HOST

MEMORY = "DRAM"  # a host's
PROGRESS_MICROSECONDS = 1000  # that the progress thread sleeps at most; events wake it


def make_agent(nixl: Any, backends: list[str], threads: int) -> Any:
    """An agent whose progress thread sleeps between events.

    The one that `nixl_agent` makes spins (`pthrDelay` 0, which it does not let one choose): a
    processor gone on each side while nothing moves, and on few processors also most of the speed.
    """
    name = f"kvferry-{secrets.token_hex(8)}"
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[]))
    missing = sorted(set(backends) - set(agent.plugin_list))
    if missing:
        raise TransferError(
            f"no backend {', '.join(missing)} in this NIXL, which has "
            f"{', '.join(agent.plugin_list)}"
        )
    native = nixl.nixlBind
    config = native.nixlAgentConfig()
    config.useProgThread = True
    config.syncMode = native.NIXL_THREAD_SYNC_STRICT
    config.pthrDelay = PROGRESS_MICROSECONDS
    agent.agent = native.nixlAgent(name, config)
    for backend in backends:
        takes_threads = threads > 0 and backend in ("UCX", "LIBFABRIC")
        agent.create_backend(backend, {"num_threads": str(threads)} if takes_threads else {})
    return agent


def place(device: int) -> tuple[str, int]:
    """NIXL's kind of memory, and its device."""
    return (MEMORY, 0) if device == ON_HOST else ("VRAM", device)


def rows(address: Ints, length: Ints, device: int = 0) -> NDArray[np.uint64]:
    """Descriptors as NIXL takes them: address, length, device."""
    table = np.empty((len(address), 3), dtype=np.uint64)
    table[:, 0] = address
    table[:, 1] = length
    table[:, 2] = device
    return table


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def mapped(error: Exception) -> TransferError:
    """NIXL's errors, by their names, as ours."""
    match type(error).__name__:
        case "nixlRemoteDisconnectError":
            return PeerLost(f"NIXL lost its connection to the peer ({text_of(error)})")
        case "nixlNotFoundError":
            return OutOfBounds(
                f"NIXL does not find the descriptors in registered memory ({text_of(error)}); "
                "nothing of the batch was copied"
            )
    return TransferError(f"NIXL refused a batch: {text_of(error)}")


def api() -> Any:
    if "NIXL_LOG_LEVEL" not in os.environ:  # it logs to standard output, which is for results
        logging.getLogger("nixl").setLevel(logging.WARNING)
    try:
        from nixl import _api
    except ImportError as error:
        raise TransferError(
            f"the carrier 'nixl' needs NIXL ({error}): pip install 'kvferry[nixl]'"
        ) from None
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


@contextlib.contextmanager
def ucx_settings(loopback: bool) -> Iterator[None]:
    """Settings for agents that are made meanwhile, where the environment has none."""
    ours = {}
    if "UCX_NET_DEVICES" not in os.environ:
        if loopback:
            ours["UCX_NET_DEVICES"] = "lo"
        if "UCX_MODULES" not in os.environ and (loopback or not has_rdma()):
            ours["UCX_MODULES"] = "^ib"
    with environment(ours):
        yield


def has_rdma() -> bool:
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False
