"""The carrier over NIXL: UCX by default, its other backends by option.

    make_carrier("nixl", backends=["UCX"])

Descriptors go to NIXL as NumPy arrays, a batch at a time. Lists that are prepared beforehand and
used by index bring nothing measurable here (a batch's lists are 1 to 3 % of moving it, of which
indices save a third: bench/prepared.py), and copies are arbitrary: so there are none. Its
notifications are not needed: who reads tells the owner itself when it is done.

UCX finds its own way to a peer: shared memory, TCP, RDMA, NVLink. Where `host` is loopback and the
environment says nothing else, it is kept to the loopback device: so it works without a network, and
cannot be reached from outside. With another `host`, UCX chooses its devices. Its InfiniBand module
stays unloaded on loopback and where there is no such device, because the one in NIXL 1.5.1's wheel
crashes the process when it exits. What the environment sets (UCX_NET_DEVICES, UCX_TLS,
UCX_MODULES) is never overridden.

NIXL checks on the initiator's side that descriptors lie in what the peer registered; NICs check
again (RDMA keys). It authenticates nobody. See `foreign`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import OutOfBounds, PeerLost, TransferError
from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.cost import Costs, Packing
from kvferry.transport.foreign import GRACE_SECONDS, ForeignCarrier
from kvferry.transport.foreign_peer import (
    LOOPBACK,
    ON_HOST,
    ForeignEndpoint,
    ForeignPeer,
    is_loopback,
)
from kvferry.transport.jobs import Job
from kvferry.transport.regions import Arrays

log = logging.getLogger(__name__)

BATCH_DESCRIPTORS = 1024  # 4,096 are a tenth slower at 256 B; two batches at once are no faster
BATCH_BYTES = 64 << 20  # some 50 ms on loopback: between two looks at cancel
SPINS = 50  # looks at a batch before sleeping in between
SHORT_NAP_SECONDS, LONG_NAP_SECONDS = 20e-6, 1e-3
PULSE_SECONDS = 0.02  # between two looks at whether the peer lives
MEMORY = "DRAM"  # a host's
PROGRESS_MICROSECONDS = 1000  # that the progress thread sleeps at most; events wake it


class NixlCarrier(ForeignCarrier):
    """`backends`: NIXL's names, in order of preference; both sides need the same. `threads`: of
    UCX and LIBFABRIC, beside the one that makes progress. `device`: the number of the GPU that
    holds what is registered; either side may be a host's memory."""

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
        packing: Packing = "auto",
        costs: Costs | None = None,
        device: int = ON_HOST,
    ) -> None:
        nixl = api()
        self.device = device
        if device != ON_HOST:
            packing = "direct"  # runs of a GPU are not gathered by its host
        chosen = [backends] if isinstance(backends, str) else list(backends)
        rdma = not is_loopback(host or LOOPBACK) and _has_rdma()
        super().__init__(
            host=host,
            secret=secret,
            flavour=",".join(chosen),
            costs_of=f"{self.name}-rdma" if rdma or chosen != ["UCX"] else self.name,
            packing=packing,
            costs=costs,
        )
        self._handles: dict[Any, int] = {}  # remote agents, and how many peers use each
        self._handles_lock = threading.Lock()
        try:
            with ucx_settings(is_loopback(self.host)):
                self._agent = _agent(nixl, chosen, threads)
        except Exception as error:
            self._fail_to_start()
            raise TransferError(
                f"NIXL's agent does not start with {chosen}: {_text(error)}; its own log says why. "
                "With UCX_NET_DEVICES set, the device must exist"
            ) from None
        self._registered: dict[int, Any] = {}
        self._own = [(r.address, r.address + r.bytes) for r in self._own_regions()]
        self._register(self._own_regions(), [])

    def _register(self, added: list[MemoryRegion], gone: list[MemoryRegion]) -> None:
        for region in gone:
            self._agent.deregister_memory(self._registered.pop(region.address))
        for region in added:
            kind, device = self._place(region.address)
            try:
                self._registered[region.address] = self._agent.register_memory(
                    [(region.address, region.bytes, device, "")], mem_type=kind
                )
            except Exception as error:
                raise TransferError(
                    f"NIXL does not register {region.bytes} bytes at {region.address:#x}: "
                    f"{_text(error)}. The memory must be mapped, and for RDMA the limit of locked "
                    "memory (ulimit -l) must allow it"
                ) from None

    def _address(self) -> bytes:
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def _attach(self, endpoint: ForeignEndpoint) -> Any:
        with self._handles_lock:  # or `_detach` of an older connection could remove it again
            try:
                handle = self._agent.add_remote_agent(endpoint.address)
            except Exception as error:
                raise TransferError(
                    f"NIXL does not take the peer's metadata: {_text(error)}"
                ) from None
            self._handles[handle] = self._handles.get(handle, 0) + 1
        return handle

    def _detach(self, handle: Any) -> None:
        with self._handles_lock:
            self._handles[handle] -= 1
            if self._handles[handle]:
                return
            del self._handles[handle]
            with contextlib.suppress(Exception):  # it forgets dead peers by itself
                self._agent.remove_remote_agent(handle)

    def _place(self, address: int) -> tuple[str, int]:
        """Of memory registered here: the carrier's own is the host's."""
        own = any(begin <= address < end for begin, end in self._own)
        return place(ON_HOST if own else self.device)

    def _carry(self, job: Job, peer: ForeignPeer, batch: Arrays, *, reading: bool) -> None:
        local, remote = (batch.dst, batch.src) if reading else (batch.src, batch.dst)
        here = self._descriptors(local, batch.length, *self._place(int(local[0])))
        there = self._descriptors(remote, batch.length, *place(peer.endpoint.device))
        try:
            request = self._agent.initialize_xfer(
                "READ" if reading else "WRITE", here, there, peer.handle
            )
        except Exception as error:
            raise _mapped(error) from None
        try:
            self._run(peer, request)
        except TransferError:
            job.late_bytes |= peer.pulse.alive()  # NIXL says nothing of the rest of the batch
            raise
        finally:
            try:
                request.release()
            except Exception as error:
                log.warning("NIXL does not let go of a batch: %s", _text(error))

    def _descriptors(self, address: Ints, length: Ints, kind: str, device: int) -> Any:
        return self._agent.get_xfer_descs(rows(address, length, device), mem_type=kind)

    def _run(self, peer: ForeignPeer, request: Any) -> None:
        """Until NIXL has let go of the batch, or the peer is dead."""
        looks, next_pulse, dead_until = 0, time.monotonic() + PULSE_SECONDS, 0.0
        try:
            state = self._agent.transfer(request)
            while state == "PROC":
                looks += 1
                if looks > SPINS:
                    time.sleep(SHORT_NAP_SECONDS if looks < 100 * SPINS else LONG_NAP_SECONDS)
                now = time.monotonic()
                if now >= next_pulse:
                    next_pulse = now + PULSE_SECONDS
                    if not dead_until and not peer.pulse.alive():
                        dead_until = now + GRACE_SECONDS
                    if dead_until and now > dead_until:
                        raise PeerLost("the peer is gone: it died or closed its carrier")
                state = self._agent.check_xfer_state(request)
        except TransferError:
            raise
        except Exception as error:
            raise _mapped(error) from None
        if state != "DONE":
            raise TransferError("NIXL reports that the batch failed; its own log says why")

    def _shut(self) -> None:
        for registered in self._registered.values():
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registered)
        self._registered.clear()
        self._agent = None


def _agent(nixl: Any, backends: list[str], threads: int) -> Any:
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


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _mapped(error: Exception) -> TransferError:
    """NIXL's errors, by their names, as ours."""
    match type(error).__name__:
        case "nixlRemoteDisconnectError":
            return PeerLost(f"NIXL lost its connection to the peer ({_text(error)})")
        case "nixlNotFoundError":
            return OutOfBounds(
                f"NIXL does not find the descriptors in registered memory ({_text(error)}); "
                "nothing of the batch was copied"
            )
    return TransferError(f"NIXL refused a batch: {_text(error)}")


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
        if "UCX_MODULES" not in os.environ and (loopback or not _has_rdma()):
            ours["UCX_MODULES"] = "^ib"
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _has_rdma() -> bool:
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False
