"""Mooncake Store's configuration, under the names that its users know.

From the JSON file that `MOONCAKE_CONFIG_PATH` names, or from `MOONCAKE_*` variables, which also win
over the file. Variables are the field in capitals (`MOONCAKE_GLOBAL_SEGMENT_SIZE=80GB`), or what
Mooncake itself calls it, which wins where both are set: `MOONCAKE_MASTER`, `MOONCAKE_DEVICE`,
`MOONCAKE_TE_META_DATA_SERVER`, `MOONCAKE_OFFLOAD_ENABLED`. Sizes are written as 80GB, 512 MB or a
number of bytes; as in Mooncake and vLLM, a GB is 2^30 bytes. A file that names no protocol means
rdma, as it does to vLLM; variables alone mean tcp. null is as if the key were not there, and keys
that we do not know are named once in the log.

Others must reach this process under the name that it gives itself: vLLM's
MOONCAKE_REQUESTER_LOCAL_HOSTNAME, a `local_hostname`, VLLM_HOST_IP, or else the address from which
this host reaches the master. What a host calls itself is often 127.0.1.1.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvferry.errors import StoreError

_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_MODES = ("embedded", "standalone-store")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "enable": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False, "disable": False, "": False}
_THEIRS = {  # variables that Mooncake's own processes read
    "master_server_address": "MOONCAKE_MASTER",
    "device_name": "MOONCAKE_DEVICE",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "enable_offload": "MOONCAKE_OFFLOAD_ENABLED",
}

log = logging.getLogger("kvferry")


@dataclass(frozen=True, slots=True)
class MooncakeStoreConfig:
    """How to reach a master, and what this process gives to the pool."""

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    mode: str = "embedded"  # or standalone-store: this process gives no memory
    global_segment_size: int = 4 << 30  # bytes that this process gives to the pool
    local_buffer_size: int = 1 << 30
    enable_offload: bool = False
    tenant_id: str = "default"
    local_hostname: str = ""  # empty: the address from which the master is reached

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

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> MooncakeStoreConfig:
        """From the environment and the file that it names."""
        found: dict[str, Any] = {}
        path = environ.get("MOONCAKE_CONFIG_PATH")
        if path:
            try:
                found = json.loads(Path(path).read_text())
            except (OSError, ValueError) as error:
                raise StoreError(f"MOONCAKE_CONFIG_PATH={path} cannot be read: {error}") from None
            if not isinstance(found, dict):
                raise StoreError(f"MOONCAKE_CONFIG_PATH={path}: expected a JSON object")
            found = {name: value for name, value in found.items() if value is not None}
            _name_unknown(path, frozenset(found).difference(_FIELDS))
            found.setdefault("protocol", "rdma")
        for f in fields(cls):
            for variable in (f"MOONCAKE_{f.name.upper()}", _THEIRS.get(f.name, "")):
                if environ.get(variable):
                    found[f.name] = environ[variable]
        named = environ.get("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "").strip()
        if named:  # wins over the file, which vLLM does not ask
            found["local_hostname"] = named
        elif not found.get("local_hostname") and environ.get("VLLM_HOST_IP", "").strip():
            found["local_hostname"] = environ["VLLM_HOST_IP"].strip()
        return cls.of(found)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MooncakeStoreConfig:
        """From values as files and users write them; null, and what we do not know, is left out."""
        known: dict[str, Any] = {
            f.name: values[f.name] for f in fields(cls) if values.get(f.name) is not None
        }
        known.setdefault("master_server_address", "")
        if known.get("mode") == "standalone-store":
            known.setdefault("global_segment_size", 0)
        for name, value in known.items():
            if name in ("global_segment_size", "local_buffer_size"):
                known[name] = parse_size(value)
            elif name == "enable_offload":
                known[name] = _parse_flag(name, value)
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


_FIELDS = tuple(f.name for f in fields(MooncakeStoreConfig))


@lru_cache(maxsize=64)  # each process opens several stores
def _name_unknown(path: str, names: frozenset[str]) -> None:
    if names:
        log.warning(
            "kvferry: %s in MOONCAKE_CONFIG_PATH=%s have no meaning here; known are %s",
            ", ".join(sorted(names)),
            path,
            ", ".join(_FIELDS),
        )


def _parse_flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | int):
        return bool(value)
    found = _WORDS.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise StoreError(f"Mooncake's {name} must be true or false, found {value!r:.100}")
    return found


def _address_towards(master: str) -> str:
    """This host's address on the way to a master, `host:port` or `etcd://host:port;…`."""
    first = re.split("[;,]", master.rpartition("//")[2])[0]
    host, _, port = first.rpartition(":")
    host = (host or first).strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port) if port.isdigit() else 1, type=socket.SOCK_DGRAM)
        for family, kind, _, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing: asks for a route
                return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError(
            f"no way to Mooncake's master at {master}: {error}; check master_server_address, or "
            "name this host with local_hostname"
        ) from None
    raise StoreError(f"no route to Mooncake's master at {master}; name this host: local_hostname")


def parse_size(value: Any) -> int:
    """Bytes of 80GB, 80GiB, "512 mb", 1024; all of these units are powers of 1024."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", str(value).lower())
    unit = match.group(2).replace("i", "") if match else ""
    unit = unit + "b" if unit in ("k", "m", "g", "t") else unit
    if match is None or unit not in _UNITS:
        raise StoreError(f"a size of {value!r}; write 80GB, 512MB or a number of bytes")
    return int(float(match.group(1)) * _UNITS[unit])
