# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store as a `Store`: objects across hosts, put from and got into registered memory.

A put hands the ranges of all objects to the client in one call. A get reads whole objects by one
call as well; for parts it opens a session (one question to the master), reads ranges straight into
their places, and ends it. The client reconnects by itself when its master comes back.

The client's calls take no deadline and may block for seconds when the master is gone. Calls that
move no blocks run in `LateCalls`. Calls that move blocks run on the caller's thread until they end,
however long that takes: a late put would store another request's bytes under this request's key,
and a late get would overwrite another request's cache. The client is closed after the last call.

`MooncakeStoreConfig` comes from the JSON file that `MOONCAKE_CONFIG_PATH` names, or from
`MOONCAKE_*` variables, which win over the file. A variable is the field in capitals
(`MOONCAKE_GLOBAL_SEGMENT_SIZE=80GB`), or Mooncake's own name for it, which wins where both are set.
As in Mooncake and vLLM, a GB is 2^30 bytes. A file that names no protocol means rdma, as it does to
vLLM; variables alone mean tcp.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvferry.carriers.base import MemoryRegion
from kvferry.errors import StoreError, install_command
from kvferry.net.names import source_address
from kvferry.pool.embedded.index import Calls
from kvferry.pool.store import AlikeSlices, Bools, Outcome, Slices, batch_parts
from kvferry.units import parse_size
from kvferry.workers import LateCalls

_log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_SECONDS = 5.0
SETUP_SECONDS = 60.0
CLOSE_SECONDS = 10.0
NO_ROOM, NOT_FOUND, EXISTS_ALREADY, RPC_FAILED = -200, -704, -705, -900  # Mooncake's codes
OTHER_SIZE = (-600, -800)  # buffers shorter, or longer, than the object
_MODES = ("embedded", "standalone-store")
_THEIRS = {  # variables that Mooncake's own processes read
    "master_server_address": "MOONCAKE_MASTER",
    "device_name": "MOONCAKE_DEVICE",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
}

_VLLMS = {  # fields that no file has, by vLLM's variables
    "staging_share": "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO",
    "tier_log": "VLLM_MOONCAKE_STORE_TIER_LOG",
}
STAGING_BYTES = 1280 << 20  # of the buffer through which Mooncake's disk tier reads, by default
DIRECT_IO_BYTES = 4096  # to which it aligns, with one such block at either end


class MooncakeStore:
    """A `Store` over one `MooncakeDistributedStore`."""

    def __init__(self, config: MooncakeStoreConfig) -> None:
        self.config = config
        try:
            client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        except ImportError as error:
            raise StoreError(
                f"the store 'mooncake' needs Mooncake ({error}): "
                f"{install_command('mooncake-cpu')} (with CUDA the extra is 'mooncake')"
            ) from None
        self._client = client
        self.calls = LateCalls("Mooncake")
        self._sessions: set[str] = set()
        self._session_ended = threading.Condition()
        self._regions: list[MemoryRegion] = []
        self._using = Calls()
        c = self.config
        _require_listening(c.master_server_address)
        extra = {} if c.tenant_id == "default" else {"tenant_id": c.tenant_id}
        try:
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
        except StoreError:
            self.calls.close()  # lookups try again every few seconds
            raise

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
        self._require_master("exists", codes)
        return np.asarray([code == 1 for code in codes])

    def put(self, keys: Sequence[str], objects: Sequence[Slices], deadline: float) -> list[Outcome]:
        if not keys:
            return []
        addresses, lengths = lists(objects)
        with self._moving("put"):
            codes = self._client.batch_put_from_multi_buffers(list(keys), addresses, lengths)
            self._require_master("put", codes)
            return [_put_outcome(code) if code else Outcome.DONE for code in codes]

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        if self.config.tier_log and keys:
            self._log_tiers(list(keys), deadline)
        for part in portions(wanted, self.config.staging_bytes):
            outcomes += self._get(keys[part], wanted[part], deadline)
        return outcomes

    def _log_tiers(self, keys: list[str], deadline: float) -> None:
        """For `VLLM_MOONCAKE_STORE_TIER_LOG`: where the objects of a load lie."""
        try:
            found = self._call(
                "describe", lambda: dict(self._client.batch_get_replica_desc(keys)), deadline
            )
            tiers = Counter(_tier(found.get(key)) for key in keys)
        except Exception as error:  # the load itself may still go well
            _log.warning("Mooncake does not say where %d objects lie: %s", len(keys), error)
            return
        _log.info(
            "a load of %d objects from Mooncake: %d in memory, %d on disk, %d unknown",
            len(keys),
            *(tiers[tier] for tier in ("memory", "disk", "unknown")),
        )

    def _get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        names, parts = list(keys), parts_of(wanted)
        outcomes = [Outcome.FAILED] * len(names)
        rest = set(range(len(names)))
        with self._moving("get"):
            if parts.whole:
                asked: list[list[Any]] = [names, parts.addresses, parts.lengths]
                if len(parts.whole) < len(names):
                    asked = [_some(rows, parts.whole) for rows in asked]
                counts = self._client.batch_get_into_multi_buffers(*asked)
                if counts == parts.sizes:
                    return [Outcome.DONE] * len(names)
                self._require_master("get", counts)
                for i, count in zip(parts.whole, counts, strict=True):
                    if count not in OTHER_SIZE:
                        outcomes[i] = _get_outcome(count, parts.sizes[i])
                        rest.discard(i)
            if rest:
                self._get_ranges(names, wanted, parts, sorted(rest), outcomes, deadline)
        return outcomes

    def _get_ranges(
        self,
        names: list[str],
        wanted: Sequence[Slices],
        parts: Parts,
        places: list[int],
        outcomes: list[Outcome],
        deadline: float,
    ) -> None:
        """Read the wanted parts of the objects at these places, and set their outcomes."""
        with self._session(_some(names, places), deadline) as codes:
            self._require_master("get", codes)
            for i, code in zip(places, codes, strict=True):
                if code in (0, NOT_FOUND):
                    outcomes[i] = Outcome.MISSING
            there = [i for i, code in zip(places, codes, strict=True) if code == 0]
            if not there:
                return
            moved = self._client.batch_get_into_multi_buffer_ranges(
                _some(names, there),
                _some(parts.addresses, there),
                _some(parts.lengths, there),
                [wanted[i].offset.tolist() for i in there],
            )
            for i, count in zip(there, moved, strict=True):
                outcomes[i] = _get_outcome(count, parts.sizes[i])

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

    def close(self) -> None:
        """The last call under way closes the client, because it may still use registered memory."""
        if left := self._using.close(0.0, self._end):
            _log.warning("Mooncake's client is closed after %d calls that are under way", left)

    def _end(self) -> None:
        def end() -> None:
            for region in self._regions:
                self._client.unregister_buffer(region.address)
            self._client.close()

        try:
            self.calls("close", end, time.monotonic() + CLOSE_SECONDS)
        except StoreError as error:
            _log.warning("Mooncake's client did not close: %s", error)
        self.calls.close()

    def _call(self, what: str, function: Callable[[], T], deadline: float) -> T:
        """A call that moves no blocks."""
        if self._using.closing.is_set():
            raise StoreError("the store is closed")

        def counted() -> T:
            with self._using:
                return function()

        return self.calls(what, counted, deadline)

    @contextmanager
    def _moving(self, what: str) -> Iterator[None]:
        """Calls that move blocks."""
        try:
            with self._using:
                yield
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"Mooncake's {what} failed: {error!r}") from error

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
    """Fail at once if no master listens; the client would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():  # a directory of masters, which the client resolves
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    except OSError as error:
        raise StoreError(
            f"no Mooncake master answers at {address} ({error}); is mooncake_master running there?"
        ) from None


def _tier(replicas: Any) -> str:
    """Where the first replica of an object lies."""
    kinds = {
        "is_memory_replica": "memory",
        "is_disk_replica": "disk",
        "is_local_disk_replica": "disk",
    }
    for question, tier in kinds.items():
        if replicas and getattr(replicas[0], question, bool)():
            return tier
    return "unknown"


def portions(wanted: Sequence[Slices], most_bytes: int) -> list[slice]:
    """Cut a batch so that each portion fits the buffer through which Mooncake reads its disk.

    most_bytes  of the buffer; 0: no limit. An object that does not fit is a portion by itself
    """
    if not wanted or not most_bytes:
        return [slice(0, len(wanted))] if wanted else []
    # at least this is read
    reach = [int((part.offset + part.length).max(initial=0)) for part in wanted]
    blocks = [-(-size // DIRECT_IO_BYTES) + 2 for size in reach]
    return list(batch_parts([count * DIRECT_IO_BYTES for count in blocks], most_bytes))


def _some(rows: list[T], places: list[int]) -> list[T]:
    return [rows[i] for i in places]


def _put_outcome(code: int) -> Outcome:
    known = {0: Outcome.DONE, EXISTS_ALREADY: Outcome.EXISTS, NO_ROOM: Outcome.FULL}
    if code not in known:
        _log.warning("Mooncake refused an object (code %d)", code)
    return known.get(code, Outcome.FAILED)


def _get_outcome(count: int, expected: int) -> Outcome:
    if count == expected:
        return Outcome.DONE
    if count == NOT_FOUND:
        return Outcome.MISSING
    _log.warning("Mooncake moved %d bytes of an object where %d were expected", count, expected)
    return Outcome.FAILED


@dataclass(frozen=True, slots=True)
class MooncakeStoreConfig:
    """How to reach a master, and the memory that this process gives to the pool."""

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    mode: str = "embedded"  # or standalone-store: this process gives no memory
    global_segment_size: int = 4 << 30  # bytes that this process gives to the pool
    local_buffer_size: int = 1 << 30
    tenant_id: str = "default"
    local_hostname: str = ""  # empty: the address from which the master is reached
    enable_offload: bool = False  # the pool has a disk tier: reads are cut to its buffer
    staging_share: float = 0.9  # of that buffer, which one read may take
    tier_log: bool = False  # log where the objects of each load lie

    def __post_init__(self) -> None:
        if not self.master_server_address:
            raise StoreError(
                "no Mooncake master: set master_server_address in the file that "
                "MOONCAKE_CONFIG_PATH names, or MOONCAKE_MASTER=host:port"
            )
        if self.mode not in _MODES:
            raise StoreError(f"Mooncake mode {self.mode!r}: expected one of {', '.join(_MODES)}")
        if (self.mode == "embedded") != (self.global_segment_size > 0):
            raise StoreError(
                f"mode {self.mode} with a global_segment_size of {self.global_segment_size}: "
                "embedded gives memory to the pool, standalone-store gives none (0)"
            )
        if self.local_buffer_size <= 0:
            raise StoreError("local_buffer_size must be more than 0")
        if not 0 < self.staging_share <= 1:
            raise StoreError(
                "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO must be more than 0 and at most 1, found "
                f"{self.staging_share}"
            )

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer of Mooncake's disk tier that one read may use; 0: no limit."""
        return int(STAGING_BYTES * self.staging_share) if self.enable_offload else 0

    @classmethod
    def load_from_env(cls, environ: Mapping[str, str] = os.environ) -> MooncakeStoreConfig:
        """From the environment and the file that it names."""
        path = environ.get("MOONCAKE_CONFIG_PATH")
        found = _read_file(path) if path else {}
        for name, variable in _VLLMS.items():
            if environ.get(variable):
                found[name] = environ[variable]
        for f in fields(cls):
            if f.name in _VLLMS:
                continue
            for variable in (f"MOONCAKE_{f.name.upper()}", _THEIRS.get(f.name, "")):
                if environ.get(variable):
                    found[f.name] = environ[variable]
        named = environ.get("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "").strip()
        if named:  # wins over the file, in which vLLM does not look for it
            found["local_hostname"] = named
        elif not found.get("local_hostname") and environ.get("VLLM_HOST_IP", "").strip():
            found["local_hostname"] = environ["VLLM_HOST_IP"].strip()
        return cls.of(found)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MooncakeStoreConfig:
        """From values as files and users write them; null and unknown keys are left out."""
        known: dict[str, Any] = {
            f.name: values[f.name] for f in fields(cls) if values.get(f.name) is not None
        }
        known.setdefault("master_server_address", "")
        if known.get("mode") == "standalone-store":
            known.setdefault("global_segment_size", 0)
        for name, value in known.items():
            if name in ("global_segment_size", "local_buffer_size"):
                known[name] = parse_size(value)
            elif name in ("enable_offload", "tier_log"):
                known[name] = _flag(name, value)
            elif name == "staging_share":
                known[name] = _number(value)
            elif not isinstance(value, str):
                raise StoreError(f"Mooncake's {name} must be a text, found {value!r:.100}")
            else:
                known[name] = value.strip()
        if "protocol" in known:
            known["protocol"] = known["protocol"].lower()  # Mooncake compares small letters
        for name in ("metadata_server", "protocol", "tenant_id"):
            if not known.get(name, "x"):
                del known[name]
        return cls(**known)

    @property
    def hostname(self) -> str:
        if self.local_hostname:
            return self.local_hostname
        return _address_towards(self.master_server_address)


def _flag(name: str, value: Any) -> bool:
    found = str(value).strip().lower() if isinstance(value, str | bool) else ""
    if found not in ("true", "1", "false", "0"):
        what = _VLLMS.get(name, f"Mooncake's {name}")
        raise StoreError(f"{what} must be true or false, found {value!r:.100}")
    return found in ("true", "1")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise StoreError(
            f"{_VLLMS['staging_share']} must be a number, found {value!r:.100}"
        ) from None


def _read_file(path: str) -> dict[str, Any]:
    named = f"MOONCAKE_CONFIG_PATH={path}"
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{named} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise StoreError(f"{named}: expected a JSON object")
    found = {name: value for name, value in found.items() if value is not None}
    _name_unknown(path, frozenset(found).difference(_FIELDS))
    return {"protocol": "rdma", **{k: v for k, v in found.items() if k in _FIELDS}}


_FIELDS = tuple(f.name for f in fields(MooncakeStoreConfig) if f.name not in _VLLMS)


@lru_cache(maxsize=64)  # each process opens several stores
def _name_unknown(path: str, names: frozenset[str]) -> None:
    if names:
        _log.warning(
            "kvferry: %s in MOONCAKE_CONFIG_PATH=%s have no meaning here; known are %s",
            ", ".join(sorted(names)),
            path,
            ", ".join(_FIELDS),
        )


def _address_towards(master: str) -> str:
    """This host's address on the way to a master, `host:port` or `etcd://host:port;…`."""
    first = re.split("[;,]", master.rpartition("//")[2])[0]
    host, _, port = first.rpartition(":")
    host = (host or first).strip("[]")
    try:
        return source_address(host, int(port) if port.isdigit() else 1)
    except OSError as error:
        raise StoreError(
            f"no way to Mooncake's master at {master}: {error}; check master_server_address, or "
            "name this host with local_hostname"
        ) from None


# The client takes blocks as lists of integers, which are made in as few steps as possible. Blocks
# that stream through the processor's caches displace Python there, so a step next to a call of the
# client costs several times as much as elsewhere: a few steps for each of 64 objects of 1 MiB cost
# 0.6 ms of a load and 0.25 ms of a save, which take 10 to 15 ms.


def lists(objects: Sequence[Slices]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and lengths of each object's ranges."""
    if isinstance(objects, AlikeSlices):
        return objects.address.tolist(), [objects.length.tolist()] * len(objects)
    return [o.address.tolist() for o in objects], [o.length.tolist() for o in objects]


@dataclass(frozen=True, slots=True)
class Parts:
    """The wanted parts of some objects."""

    addresses: list[list[int]]
    lengths: list[list[int]]
    sizes: list[int]  # bytes of each
    whole: list[int]  # those that may be all of their object


def parts_of(wanted: Sequence[Slices]) -> Parts:
    """Lists for the client. It reads whole objects several times faster than ranges.

    If the wanted part is only the object's beginning, the client refuses before it writes.
    """
    addresses, lengths = lists(wanted)
    if isinstance(wanted, AlikeSlices):
        whole = list(range(len(wanted))) if _from_the_start([wanted[0]]) else []
        return Parts(addresses, lengths, [sum(lengths[0])] * len(wanted), whole)
    return Parts(addresses, lengths, [sum(one) for one in lengths], _from_the_start(wanted))


def _from_the_start(wanted: Sequence[Slices]) -> list[int]:
    """Which of these are contiguous in their object, from its first byte on."""
    counts = np.array([len(one.length) for one in wanted], dtype=np.int64)
    some = np.flatnonzero(counts)
    if len(some) == 0:
        return []
    offset = np.concatenate([one.offset for one in wanted])
    length = np.concatenate([one.length for one in wanted])
    heads = np.cumsum(counts[some]) - counts[some]
    follows = np.empty(len(offset), dtype=bool)
    follows[1:] = offset[1:] == offset[:-1] + length[:-1]
    follows[heads] = offset[heads] == 0
    found: list[int] = some[np.logical_and.reduceat(follows, heads)].tolist()
    return found
