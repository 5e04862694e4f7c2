"""The carrier over NIXL: UCX by default, its other backends by option.

    make_carrier("nixl", backends=["UCX"])

Copies of one length become batches by index, from lists prepared for each peer (nixl_lists.py);
others go to NIXL as arrays of descriptors. A transfer can end with a note to the peer
(nixl_notes.py).

NIXL checks on the initiator's side that descriptors lie in what the peer registered; NICs check
again (RDMA keys). It authenticates nobody. See `foreign`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import TransferError
from kvferry.transport.base import CopyArrays, Ints, MemoryRegion, Transfer
from kvferry.transport.foreign import ForeignCarrier
from kvferry.transport.foreign_peer import (
    ON_HOST,
    ForeignEndpoint,
    ForeignPeer,
    cut,
    join,
)
from kvferry.transport.jobs import Job
from kvferry.transport.nixl_agent import (
    api,
    make_agent,
    mapped,
    place,
    rows,
    text_of,
    ucx_settings,
)
from kvferry.transport.nixl_batch import run
from kvferry.transport.nixl_lists import HERE, Numbered, SlotLists
from kvferry.transport.nixl_notes import opened, require_note, sealed
from kvferry.transport.regions import Arrays, slices
from kvferry.wire.names import Admits, is_loopback

log = logging.getLogger(__name__)

BATCH_DESCRIPTORS = 1024  # 4,096 are a tenth slower at 256 B; two batches at once are no faster
BATCH_BYTES = 64 << 20  # some 50 ms on loopback: between two looks at cancel
LEAST_PREPARED = 4 * BATCH_DESCRIPTORS  # finding slots' numbers takes as long as a batch's lists


@dataclass(frozen=True, slots=True)
class RemoteAgent:
    name: Any  # NIXL's, of the peer's agent
    lists: SlotLists


class NixlCarrier(ForeignCarrier):
    """`backends`: NIXL's names, in order of preference; both sides need the same. `threads`: of
    UCX and LIBFABRIC, beside the one that makes progress. `device`: the number of the GPU that
    holds what is registered; either side may be a host's memory."""

    name = "nixl"
    batch_descriptors = BATCH_DESCRIPTORS
    batch_bytes = BATCH_BYTES
    least_prepared = LEAST_PREPARED  # copies that are moved by index

    def __init__(
        self,
        *,
        host: str | None = None,
        secret: bytes | str | None = None,
        backends: Sequence[str] = ("UCX",),
        threads: int = 0,
        admits: Admits | None = None,
        device: int = ON_HOST,
    ) -> None:
        nixl = api()
        self.device = device
        chosen = [backends] if isinstance(backends, str) else list(backends)
        if not chosen:
            raise TransferError('`backends` names none of NIXL\'s; the usual one is ["UCX"]')
        super().__init__(host=host, secret=secret, flavour=",".join(chosen), admits=admits)
        self._agents: dict[Any, int] = {}  # remote ones by name, and how many peers use each
        self._agents_lock = threading.Lock()
        self._lists = SlotLists(HERE, *place(device))
        self._notes_lock = threading.Lock()
        self._lists_lock = threading.Lock()  # memory is not deregistered under a list in use
        self._prepared_batches = self._notes_refused = 0
        try:
            with ucx_settings(is_loopback(self.host)):
                self._agent = make_agent(nixl, chosen, threads)
        except Exception as error:
            self._pulse.close()
            raise TransferError(
                f"NIXL's agent does not start with {chosen}: {text_of(error)}; its own log says "
                "why. With UCX_NET_DEVICES set, the device must exist"
            ) from None
        self._handles: dict[int, Any] = {}
        try:
            self._registered.swap([self._own], [])
        except TransferError:
            self._pulse.close()
            raise

    @property
    def counters(self) -> Mapping[str, int]:
        """`prepared_batches`: those that were made by index. `notes_refused`: notifications of
        others than our peers."""
        own = {"prepared_batches": self._prepared_batches, "notes_refused": self._notes_refused}
        return {**super().counters, **own}

    def read(self, peer: ForeignPeer, copies: CopyArrays, *, note: bytes | None = None) -> Transfer:
        return self._submit(peer, copies, reading=True, last=self._last(peer, note))

    def write(
        self, peer: ForeignPeer, copies: CopyArrays, *, note: bytes | None = None
    ) -> Transfer:
        return self._submit(peer, copies, reading=False, last=self._last(peer, note))

    def notes(self) -> list[bytes]:
        """Of transfers that have ended since the last call: each once, a peer's in its order."""
        with self._notes_lock:
            if self._closed:
                raise TransferError("the carrier is closed")
            try:
                heard = self._agent.get_new_notifs()
            except Exception as error:
                raise mapped(error) from None
            messages = itertools.chain.from_iterable(heard.values())
            notes, others = opened(messages, self._pulse.token, self._pulse.incarnation)
            self._notes_refused += others
        return notes

    def _last(self, peer: ForeignPeer, note: bytes | None) -> Callable[[], None] | None:
        if note is None:
            return None
        require_note(note)
        message = sealed(note, peer.endpoint)

        def say() -> None:
            try:
                self._agent.send_notif(peer.handle.name, message)
            except Exception as error:
                raise TransferError(
                    f"every byte was moved, but NIXL does not send the note: {text_of(error)}"
                ) from None

        return say

    def register_one(self, region: MemoryRegion) -> None:
        kind, device = self._place(region.address)
        with self._lists_lock:
            self._lists.clear()  # they are of the regions before
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
        with self._lists_lock:
            self._lists.clear()
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

    def _attach(self, endpoint: ForeignEndpoint) -> RemoteAgent:
        with self._agents_lock:  # or `_detach` of an older connection could remove it again
            try:
                name = self._agent.add_remote_agent(endpoint.address)
            except Exception as error:
                raise TransferError(
                    f"NIXL does not take the peer's metadata: {text_of(error)}"
                ) from None
            self._agents[name] = self._agents.get(name, 0) + 1
        return RemoteAgent(name, SlotLists(name, *place(endpoint.device)))

    def _detach(self, handle: RemoteAgent) -> None:
        with self._agents_lock:
            handle.lists.clear()
            self._agents[handle.name] -= 1
            if self._agents[handle.name]:
                return
            del self._agents[handle.name]
            with contextlib.suppress(Exception):  # it forgets dead peers by itself
                self._agent.remove_remote_agent(handle.name)

    def _place(self, address: int) -> tuple[str, int]:
        """Of memory registered here: the carrier's own is the host's."""
        own = 0 <= address - self._own.address < self._own.bytes
        return place(ON_HOST if own else self.device)

    def _batches(self, peer: ForeignPeer, part: Arrays, *, reading: bool) -> Iterator[Arrays]:
        for few in slices(part, self.batch_bytes):
            joined = join(few)
            numbered = self._numbered(peer, joined, reading)
            if numbered is None:
                yield from cut(joined, self.batch_descriptors)
            else:
                yield from numbered.cut(self.batch_descriptors)

    def _numbered(self, peer: ForeignPeer, part: Arrays, reading: bool) -> Numbered | None:
        """The same by slots, where it lies in those of one length on both sides."""
        length = int(part.length[0])
        if len(part) < self.least_prepared or not bool((part.length == length).all()):
            return None
        with self._lists_lock:
            here = self._lists.get(self._agent, self._table, length)
            there = peer.handle.lists.get(self._agent, peer.regions, length)
        if here is None or there is None:
            return None
        local, remote = (part.dst, part.src) if reading else (part.src, part.dst)
        mine, theirs = here.numbers(local), there.numbers(remote)
        if mine is None or theirs is None:
            return None
        return Numbered(part.src, part.dst, part.length, here, there, mine, theirs)

    def _carry(self, job: Job, peer: ForeignPeer, batch: Arrays, *, reading: bool) -> None:
        try:
            request = self._request(peer, batch, reading)
        except Exception as error:
            raise mapped(error) from None
        try:
            run(self._agent, job, peer, request)
        except TransferError:
            job.late_bytes |= not peer.pulse.gone()  # NIXL says nothing of the rest of the batch
            raise
        finally:
            try:
                request.release()
            except Exception as error:
                log.warning("NIXL does not let go of a batch: %s", text_of(error))

    def _request(self, peer: ForeignPeer, batch: Arrays, reading: bool) -> Any:
        op = "READ" if reading else "WRITE"
        if isinstance(batch, Numbered):
            here, there = batch.here, batch.there
            with self._lists_lock:
                if self._lists.has(here) and peer.handle.lists.has(there):
                    try:
                        request = self._agent.make_prepped_xfer(
                            op, here.handle, batch.mine, there.handle, batch.theirs
                        )
                    except Exception as error:  # as after NIXL lost the peer, and met it again
                        log.debug("NIXL makes no batch by index: %s", text_of(error))
                        peer.handle.lists.clear()
                    else:
                        self._prepared_batches += 1
                        return request
        local, remote = (batch.dst, batch.src) if reading else (batch.src, batch.dst)
        mine = self._descriptors(local, batch.length, *self._place(int(local[0])))
        theirs = self._descriptors(remote, batch.length, *place(peer.endpoint.device))
        return self._agent.initialize_xfer(op, mine, theirs, peer.handle.name)

    def _descriptors(self, address: Ints, length: Ints, kind: str, device: int) -> Any:
        return self._agent.get_xfer_descs(rows(address, length, device), mem_type=kind)

    def _shut(self) -> None:
        for region in (*self._table.regions(), self._own):
            self.unregister_one(region)
        with self._notes_lock:
            self._agent = None
