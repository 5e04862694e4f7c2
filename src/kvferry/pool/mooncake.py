"""Mooncake Store as a `Store`: objects across hosts, put from and got into registered memory.

A put hands the ranges of all objects to the client in one call. A get reads whole objects by one
call as well; for parts it opens a session (one question to the master), reads ranges straight into
their places, and ends it. Nothing is copied on our side. The client reconnects by itself when its
master comes back; what the old master knew is then a miss.

The client's calls take no deadline and may block for seconds when the master is gone: they run as
`late_calls`.

Mooncake keeps no checksums: a byte that flips in its memory is not seen here. Lengths are checked,
and an object is readable only after it was put whole.
"""

from __future__ import annotations

import importlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from kvferry.errors import StoreError
from kvferry.pool.late_calls import LateCalls, Memory
from kvferry.pool.mooncake_config import MooncakeStoreConfig
from kvferry.pool.mooncake_lists import lists, parts_of
from kvferry.pool.store import Bools, Outcome, Ranges, Slices, StoreStats
from kvferry.transport.base import MemoryRegion

_log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_SECONDS = 5.0
SETUP_SECONDS = 60.0
CLOSE_SECONDS = 10.0
NO_ROOM, NOT_FOUND, EXISTS_ALREADY, RPC_FAILED = -200, -704, -705, -900  # Mooncake's codes
OTHER_SIZE = (-600, -800)  # buffers shorter, or longer, than the object


class MooncakeStore:
    """A `Store` over one `MooncakeDistributedStore`."""

    name = "mooncake"

    def __init__(
        self, config: MooncakeStoreConfig | None = None, *, hold_memory: bool = False
    ) -> None:
        self.config = config or MooncakeStoreConfig.load()
        try:
            client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        except ImportError as error:
            raise StoreError(
                f"Mooncake is not installed ({error}); install kvferry[mooncake-cpu], or "
                "mooncake-transfer-engine on machines with CUDA"
            ) from None
        self._client = client
        self.calls = LateCalls("Mooncake", hold_memory=hold_memory)
        self._lock = threading.Lock()
        self._sessions: set[str] = set()
        self._session_ended = threading.Condition(self._lock)
        self._puts = self._put_bytes = 0
        self._regions: list[MemoryRegion] = []
        self._closed = False
        c = self.config
        _require_listening(c.master_server_address)
        extra = {} if c.tenant_id == "default" else {"tenant_id": c.tenant_id}
        code = self._call(
            "setup",
            lambda: client.setup(
                c.hostname,
                c.metadata_server,
                c.global_segment_size,
                c.local_buffer_size,
                c.protocol,
                c.device_name,
                c.master_server_address,
                **extra,
            ),
            time.monotonic() + SETUP_SECONDS,
        )
        if code != 0:
            raise StoreError(
                f"Mooncake's client could not be set up with the master at "
                f"{c.master_server_address} (code {code}); is mooncake_master running there?"
            )

    # --- the protocol --------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for region in regions:
            code = self._client.register_buffer(region.address, region.bytes)
            if code != 0:
                raise StoreError(
                    f"Mooncake refused {region.bytes:,} bytes at {region.address:#x} (code {code})"
                )
            self._regions.append(region)

    def access(self, keys: Sequence[str], deadline: float) -> None:
        """Mooncake's master evicts by itself."""

    def exists(self, keys: Sequence[str], deadline: float) -> Bools:
        if not keys:
            return np.zeros(0, dtype=bool)
        codes = self._call("exists", lambda: self._client.batch_is_exist(list(keys)), deadline)
        found = np.asarray(codes)
        self._require_master("exists", codes)
        return np.asarray(found == 1)

    def put(self, keys: Sequence[str], objects: Sequence[Ranges], deadline: float) -> list[Outcome]:
        if not keys:
            return []
        names, addresses = list(keys), lists([o.address for o in objects])
        lengths = lists([o.length for o in objects])
        codes = self._call(
            "put",
            lambda: self._client.batch_put_from_multi_buffers(names, addresses, lengths),
            deadline,
            Memory.READS,
        )
        self._require_master("put", codes)
        outcomes = [_put_outcome(code) if code else Outcome.DONE for code in codes]
        if len(outcomes) != len(names):
            raise StoreError(f"Mooncake told {len(outcomes)} of {len(names)} outcomes")
        done = outcomes.count(Outcome.DONE)
        if all(one is lengths[0] for one in lengths):
            moved = done * sum(lengths[0])
        else:
            pairs = zip(lengths, outcomes, strict=True)
            moved = sum(sum(length) for length, told in pairs if told is Outcome.DONE)
        with self._lock:
            self._puts += done
            self._put_bytes += moved
        return outcomes

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        if not keys:
            return []
        names, parts_wanted = list(keys), parts_of(wanted)
        addresses, lengths = parts_wanted.addresses, parts_wanted.lengths
        sizes, whole = parts_wanted.sizes, parts_wanted.whole

        def read() -> list[Outcome]:
            outcomes = [Outcome.FAILED] * len(names)
            rest = set(range(len(names)))
            if whole:
                asked = (names, addresses, lengths)
                if len(whole) < len(names):
                    asked = (
                        [names[i] for i in whole],
                        _some(addresses, whole),
                        _some(lengths, whole),
                    )
                counts = self._client.batch_get_into_multi_buffers(*asked)
                if counts == sizes:
                    return [Outcome.DONE] * len(names)
                self._require_master("get", counts)
                for i, count in zip(whole, counts, strict=True):
                    if count not in OTHER_SIZE:
                        outcomes[i] = _get_outcome(count, sizes[i])
                        rest.discard(i)
            parts = sorted(rest)
            if parts:
                for i, outcome in zip(parts, read_ranges(parts), strict=True):
                    outcomes[i] = outcome
            return outcomes

        def read_ranges(parts: list[int]) -> list[Outcome]:
            keys_of_parts = [names[i] for i in parts]
            with self._session(keys_of_parts, deadline) as codes:
                self._require_master("get", codes)
                there = [i for i, code in zip(parts, codes, strict=True) if code == 0]
                found = {
                    i: Outcome.MISSING if code in (0, NOT_FOUND) else Outcome.FAILED
                    for i, code in zip(parts, codes, strict=True)
                }
                if there:
                    moved = self._client.batch_get_into_multi_buffer_ranges(
                        [names[i] for i in there],
                        _some(addresses, there),
                        _some(lengths, there),
                        [wanted[i].offset.tolist() for i in there],
                    )
                    for i, count in zip(there, moved, strict=True):
                        found[i] = _get_outcome(count, sizes[i])
            return [found[i] for i in parts]

        return self._call("get", read, deadline, Memory.WRITES)

    def put_bytes(self, key: str, value: bytes, deadline: float) -> Outcome:
        code = self._call("put", lambda: self._client.put(key, value), deadline)
        self._require_master("put", [code])
        return _put_outcome(code)

    def get_bytes(self, key: str, deadline: float) -> bytes | None:
        value: bytes = self._call("get", lambda: self._client.get(key), deadline)
        return value or None  # empty is how the client says that there is none

    def remove(self, keys: Sequence[str], deadline: float) -> int:
        if not keys:
            return 0
        codes = self._call("remove", lambda: self._client.batch_remove(list(keys), True), deadline)
        self._require_master("remove", codes)
        return sum(code == 0 for code in codes)

    def stats(self) -> StoreStats:
        """What this client put, and what it gives to the pool: a client cannot see more."""
        return StoreStats(self._puts, self._put_bytes, self.config.global_segment_size)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True

        def end() -> None:
            for region in self._regions:
                self._client.unregister_buffer(region.address)
            self._client.close()

        try:
            self.calls("close", end, time.monotonic() + CLOSE_SECONDS)
        except StoreError as error:
            _log.warning("Mooncake's client did not close: %s", error)
        self.calls.close()

    # --- helpers -------------------------------------------------------------------------------

    def _call(
        self,
        what: str,
        function: Callable[[], T],
        deadline: float,
        memory: Memory = Memory.NONE,
    ) -> T:
        if self._closed:
            raise StoreError("the store is closed")
        return self.calls(what, function, deadline, memory)

    @contextmanager
    def _session(self, keys: list[str], deadline: float) -> Iterator[list[int]]:
        """A read session; sessions are by key, so one key is in one of them at a time."""
        mine = set(keys)
        with self._session_ended:
            while self._sessions & mine:
                if not self._session_ended.wait(max(0.0, deadline - time.monotonic())):
                    raise StoreError("the same objects are still being read, past the deadline")
            self._sessions |= mine
        try:
            codes = self._client.batch_get_session_start(keys)
            try:
                yield codes
            finally:
                self._client.batch_get_session_end(keys)
        finally:
            with self._session_ended:
                self._sessions -= mine
                self._session_ended.notify_all()

    def _require_master(self, what: str, codes: Sequence[int]) -> None:
        if len(codes) and all(code == RPC_FAILED for code in codes):
            raise StoreError(
                f"Mooncake's master at {self.config.master_server_address} cannot be reached "
                f"({what}); it is asked again with the next call"
            )


def _require_listening(address: str) -> None:
    """A master that is not there: said at once, where the client would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():  # a directory of masters, which the client resolves
        return
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except OSError as error:
        raise StoreError(
            f"no Mooncake master answers at {address} ({error}); is mooncake_master running there?"
        ) from None


def _some(rows: list[list[int]], places: list[int]) -> list[list[int]]:
    return [rows[i] for i in places]


def _put_outcome(code: int) -> Outcome:
    match code:
        case 0:
            return Outcome.DONE
        case _ if code == EXISTS_ALREADY:
            return Outcome.EXISTS
        case _ if code == NO_ROOM:
            return Outcome.FULL
    _log.warning("Mooncake refused an object (code %d)", code)
    return Outcome.FAILED


def _get_outcome(count: int, expected: int) -> Outcome:
    if count == expected:
        return Outcome.DONE
    if count == NOT_FOUND:
        return Outcome.MISSING
    _log.warning("Mooncake moved %d bytes of an object where %d were expected", count, expected)
    return Outcome.FAILED
