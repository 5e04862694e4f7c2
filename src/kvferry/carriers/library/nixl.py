# SPDX-License-Identifier: Apache-2.0
"""The carrier over NIXL: UCX by default, its other backends by option.

NIXL checks on the initiator's side that descriptors lie in regions that the peer registered; NICs
check again (RDMA keys). UCX chooses how it reaches a peer: shared memory, TCP, RDMA, NVLink. If
`host` is loopback, UCX may use only the loopback device, unless UCX_NET_DEVICES names another. So
it works without a network, and other hosts cannot reach it. On that device, and on hosts without an
InfiniBand device, UCX's InfiniBand module stays unloaded, because the one in NIXL 1.5.1's wheel
crashes the process when it exits. The carrier never overrides UCX_NET_DEVICES or UCX_MODULES of the
environment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.library.shared import (
    ENVIRONMENT,
    GRACE_SECONDS,
    ON_HOST,
    LibraryCarrier,
    LibraryEndpoint,
    LibraryPeer,
    environment,
    rdma_devices,
)
from kvferry.carriers.transfer import Job
from kvferry.copies import Copies, Ints
from kvferry.errors import OutOfBounds, PeerLost, TransferError, install_command, text_of
from kvferry.net.names import Admits, is_loopback

log = logging.getLogger(__name__)

BATCH_DESCRIPTORS = 1024  # 4,096 are a tenth slower at 256 B; two batches at once are no faster
BATCH_BYTES = 64 << 20  # some 50 ms on loopback; between two checks for a cancel
MEMORY = "DRAM"  # NIXL's name for host memory
PROGRESS_MICROSECONDS = 1000  # the progress thread sleeps at most so long; events wake it
SPINS = 50  # polls of a batch before the thread sleeps between polls
SHORT_NAP_SECONDS, LONG_NAP_SECONDS = 20e-6, 1e-3
LIVENESS_SECONDS = 0.02  # between two checks whether the peer lives


class NixlCarrier(LibraryCarrier):
    """`backends`: NIXL's names, in order of preference; both sides need the same. `threads`: of
    UCX and LIBFABRIC, beside the one that makes progress."""

    name = "nixl"
    batch_descriptors = BATCH_DESCRIPTORS
    batch_bytes = BATCH_BYTES

    def __init__(
        self,
        *,
        host: str | None = None,
        secret: bytes | str | None = None,
        backends: Sequence[str] = ("UCX",),
        threads: int = 0,
        admits: Admits | None = None,
        gpu: int = ON_HOST,
    ) -> None:
        self._api, self._threads = api(), threads
        self._backends = [backends] if isinstance(backends, str) else list(backends)
        if not self._backends:
            raise TransferError('`backends` names none of NIXL\'s; the usual one is ["UCX"]')
        self._agents: dict[Any, int] = {}  # remote agents by name, and how many peers use each
        self._agents_lock = threading.Lock()
        self._handles: dict[int, Any] = {}  # of registered memory, by address
        flavour = ",".join(self._backends)
        super().__init__(host=host, secret=secret, flavour=flavour, admits=admits, gpu=gpu)

    def _start(self) -> None:
        try:
            with ucx_settings(is_loopback(self.host)):
                self._agent = make_agent(self._api, self._backends, self._threads)
        except Exception as error:
            raise TransferError(
                f"NIXL's agent does not start with {self._backends}: {text_of(error)}; its own log "
                "says why. With UCX_NET_DEVICES set, the device must exist"
            ) from None

    def register_one(self, region: MemoryRegion) -> None:
        kind, device = self._place(region.address)
        try:
            self._handles[region.address] = self._agent.register_memory(
                [(region.address, region.bytes, device, "")], mem_type=kind
            )
        except Exception as error:
            raise TransferError(
                f"NIXL does not register {region.bytes} bytes at {region.address:#x}: "
                f"{text_of(error)}. The memory must be mapped, and for RDMA the limit of "
                "locked memory (ulimit -l) must allow it"
            ) from None

    def unregister_one(self, region: MemoryRegion) -> None:
        try:
            self._agent.deregister_memory(self._handles.pop(region.address))
        except Exception as error:
            log.warning("NIXL does not let go of registered memory: %s", text_of(error))

    def _address(self) -> bytes:
        try:
            metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferError(
                f"NIXL has no metadata for peers ({text_of(error)}): of {self.flavour}, one "
                "backend must reach memory of other processes, as UCX does"
            ) from None
        return metadata

    def _attach(self, endpoint: LibraryEndpoint) -> Any:
        with self._agents_lock:  # so that `_detach` of an older connection does not remove it
            try:
                name = self._agent.add_remote_agent(endpoint.address)
            except Exception as error:
                raise TransferError(
                    f"NIXL does not take the peer's metadata: {text_of(error)}"
                ) from None
            self._agents[name] = self._agents.get(name, 0) + 1
        return name

    def _detach(self, handle: Any) -> None:
        with self._agents_lock:
            self._agents[handle] -= 1
            if self._agents[handle]:
                return
            del self._agents[handle]
            with contextlib.suppress(Exception):  # NIXL drops dead peers by itself
                self._agent.remove_remote_agent(handle)

    def _place(self, address: int) -> tuple[str, int]:
        """NIXL's place of memory registered here. The carrier's scratch is host memory."""
        own = 0 <= address - self._own.address < self._own.bytes
        return place(ON_HOST if own else self.gpu)

    def _carry(self, job: Job, peer: LibraryPeer, batch: Copies, *, reading: bool) -> None:
        try:
            request = self._request(peer, batch, reading)
        except Exception as error:
            raise mapped(error) from None
        try:
            run(self._agent, job, peer, request)
        except TransferError:
            job.late_bytes |= not peer.liveness.gone()  # NIXL does not report the rest
            raise
        finally:
            try:
                request.release()
            except Exception as error:
                log.warning("NIXL does not let go of a batch: %s", text_of(error))

    def _request(self, peer: LibraryPeer, batch: Copies, reading: bool) -> Any:
        local, remote = (batch.dst, batch.src) if reading else (batch.src, batch.dst)
        mine = self._descriptors(local, batch.length, self._place(int(local[0])))
        theirs = self._descriptors(remote, batch.length, place(peer.endpoint.gpu))
        op = "READ" if reading else "WRITE"
        return self._agent.initialize_xfer(op, mine, theirs, peer.handle)

    def _descriptors(self, address: Ints, length: Ints, where: tuple[str, int]) -> Any:
        kind, device = where
        return self._agent.get_xfer_descs(rows(address, length, device), mem_type=kind)

    def _shut(self) -> None:
        self._agent = None


def make_agent(nixl: Any, backends: list[str], threads: int) -> Any:
    """An agent whose progress thread sleeps between events.

    The progress thread of `nixl_agent` spins (`pthrDelay` 0, which cannot be configured). It would
    use up a processor on each side while nothing moves, and on few processors most of the speed.
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


def place(gpu: int) -> tuple[str, int]:
    """NIXL's kind of memory, and its device."""
    return (MEMORY, 0) if gpu == ON_HOST else ("VRAM", gpu)


def rows(address: Ints, length: Ints, device: int = 0) -> NDArray[np.uint64]:
    """Descriptors as NIXL takes them: address, length, device."""
    table = np.empty((len(address), 3), dtype=np.uint64)
    table[:, 0] = address
    table[:, 1] = length
    table[:, 2] = device
    return table


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
    if "NIXL_LOG_LEVEL" not in os.environ:  # NIXL logs to standard output, which is for results
        logging.getLogger("nixl").setLevel(logging.WARNING)
    try:
        from nixl import _api
    except ImportError as error:
        raise TransferError(
            f"the carrier 'nixl' needs NIXL ({error}): {install_command('nixl')}"
        ) from None
    if "NIXL_LOG_LEVEL" not in os.environ:  # its import sets another level
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


@contextlib.contextmanager
def ucx_settings(loopback: bool) -> Iterator[None]:
    """Settings for agents that are made inside, unless the environment has its own."""
    with ENVIRONMENT:
        ours = {"UCX_MODULES": "^ib"}
        if loopback and "UCX_NET_DEVICES" not in os.environ:
            ours["UCX_NET_DEVICES"] = "lo"
        elif rdma_devices():
            del ours["UCX_MODULES"]
        with environment(ours):
            yield


def run(agent: Any, job: Job, peer: LibraryPeer, request: Any) -> None:
    """Start a batch, and return when NIXL no longer uses its memory. Until then its bytes may be
    under way, even if the peer is gone. A caller that waits gets `PeerLost` before that."""
    looks, next_look, dead_until = 0, time.monotonic() + LIVENESS_SECONDS, 0.0
    try:
        state = agent.transfer(request)
        while state == "PROC":
            looks += 1
            if looks > SPINS:
                time.sleep(SHORT_NAP_SECONDS if looks < 100 * SPINS else LONG_NAP_SECONDS)
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LIVENESS_SECONDS
                if not dead_until and not peer.liveness.alive():
                    dead_until = now + GRACE_SECONDS
                if dead_until and now > dead_until:
                    job.give_up(PeerLost("the peer is gone: it died or closed its carrier"))
            state = agent.check_xfer_state(request)
    except Exception as error:
        raise mapped(error) from None
    if state != "DONE":
        raise TransferError("NIXL reports that the batch failed; its own log says why")
