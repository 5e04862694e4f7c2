"""What an operator may set in `kv_connector_extra_config`, with defaults that need nothing.

The classes that stand in for vLLM's own connectors also take those connectors' keys and environment
variables: what has a meaning here is translated, what has none is named once in the log, and what
would change results (a handshake check that is switched off) is refused.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Literal

from kvferry.errors import DescriptionError
from kvferry.p2p.consumer import Mode
from kvferry.support import SUPPORTED_VLLM
from kvferry.transport.cost import Packing, require_packing
from kvferry.transport.options import require_options

log = logging.getLogger("kvferry")

# How requests are told of each other. ferry, nixl: prefill first, its answer is passed on. push:
# also both at once, known to each other by request id. mooncake: both at once, by transfer id.
Style = Literal["ferry", "nixl", "push", "mooncake"]
NIXL_KEYS = """
backends bidirectional_kv_xfer decoder_kv_blocks_ttl enforce_handshake_compat engine_ttl
kv_lease_duration kv_recompute_threshold num_threads push_registration_timeout
"""
MOONCAKE_KEYS = "bootstrap_server_address device_name mooncake_protocol num_workers"
THEIR_KEYS: Mapping[Style, frozenset[str]] = {
    "ferry": frozenset(),
    "nixl": frozenset(NIXL_KEYS.split()),
    "push": frozenset(NIXL_KEYS.split()),
    "mooncake": frozenset(MOONCAKE_KEYS.split()),
}
MOONCAKE_PORT = 8998  # vLLM's default
MOONCAKE_SECONDS = 480.0  # vLLM's default


@dataclass(frozen=True, slots=True)
class FerryConfig:
    """Keys of `kv_connector_extra_config`."""

    secret: str | None = None  # or secret_file, or the environment's KVFERRY_SECRET
    host: str | None = None  # address that peers reach this engine at; None: loopback
    port: int = 0  # of the directory; 0: any
    carriers: tuple[str, ...] = ("auto",)  # or names, in order of preference
    packing: Packing = "auto"  # or direct, packed: how short runs are moved
    checksums: bool = False  # compare what arrives with digests of what the source holds
    carrier_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by carrier
    mode: Mode = "pull"  # who moves the bytes; push: the producer, where its carrier can be stopped
    lease_seconds: float = 60.0  # a hold lasts this long without a word from its consumer
    load_seconds: float = 120.0  # a load has failed after this long
    model_id: str = ""  # names the weights, where the model's path differs between engines
    draft_layers: str = "refuse"  # a prefill engine without our draft layers; or "zero" them
    lora_files_final: bool = False  # adapters' files never change: see `kvferry.pool.adapters`
    max_held_blocks: int = 0  # that finished requests may keep at once; 0: no limit
    peers: tuple[str, ...] = ()  # hosts and networks that tickets may name; empty: any
    bootstrap_port: int = 0  # where proxies ask for engine ids (Mooncake style); 0: not at all
    bootstrap_server: str = ""  # of another engine, to register with instead of an own one
    bootstrap_seconds: float = 10.0  # for one question to a bootstrap, or to a directory

    @classmethod
    def read(
        cls,
        extra: Mapping[str, Any],
        style: Style = "ferry",
        environment: Mapping[str, str] | None = None,
        rank: int = 0,
    ) -> FerryConfig:
        """`rank` is the data-parallel one: each is an engine, with ports of its own."""
        environment = os.environ if environment is None else environment
        ours = {f.name for f in fields(cls)} | {"secret_file"}
        known = ours | THEIR_KEYS[style]
        unknown = sorted(set(extra) - known)
        if unknown:
            raise DescriptionError(
                f"kv_connector_extra_config has {unknown}, which kvferry does not know; it knows "
                f"{sorted(known)}"
            )
        values = _translated(extra, style, environment)
        values |= {k: v for k, v in extra.items() if k in ours and k != "secret_file"}
        if "secret_file" in extra:
            values["secret"] = Path(extra["secret_file"]).read_text().strip()
        values.setdefault("secret", environment.get("KVFERRY_SECRET") or None)
        for name in ("carriers", "peers"):
            if name in values:
                chosen = values[name]
                values[name] = (chosen,) if isinstance(chosen, str) else tuple(chosen)
        config = cls(**values)
        require_packing(config.packing)
        require_options(config.carriers, config.carrier_options)
        if min(config.lease_seconds, config.load_seconds, config.bootstrap_seconds) <= 0:
            raise DescriptionError(
                "lease_seconds, load_seconds and bootstrap_seconds must be positive"
            )
        if config.draft_layers not in ("refuse", "zero"):
            raise DescriptionError(
                f'draft_layers is "refuse" or "zero", found {config.draft_layers!r}'
            )
        if config.mode not in ("pull", "push"):
            raise DescriptionError(f"mode must be pull or push, not {config.mode!r}")
        if config.max_held_blocks < 0:
            raise DescriptionError("max_held_blocks must be a number of blocks, or 0 for no limit")
        return replace(config, port=config.port + rank) if config.port else config

    def admits(self, host: str) -> bool:
        """Whether a ticket may send this engine to a host."""
        if not self.peers:
            return True
        try:
            address = ip_address(host.strip("[]"))
        except ValueError:
            return host in self.peers
        return any(_covers(peer, address) for peer in self.peers)


def _covers(peer: str, address: Any) -> bool:
    try:
        return address in ip_network(peer, strict=False)
    except ValueError:
        return False


def _translated(
    extra: Mapping[str, Any], style: Style, environment: Mapping[str, str]
) -> dict[str, Any]:
    """What an in-tree connector's keys and variables mean here."""
    values: dict[str, Any] = {}
    if style == "push":
        values["mode"] = "push"
    if style in ("nixl", "push"):
        host = environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
        if host:
            values["host"] = "127.0.0.1" if host == "localhost" else host
        if environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT"):
            values["port"] = int(environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        if "kv_lease_duration" in extra:
            values["lease_seconds"] = float(extra["kv_lease_duration"])
        if "push_registration_timeout" in extra:
            values["load_seconds"] = float(extra["push_registration_timeout"])
        if extra.get("bidirectional_kv_xfer"):
            raise DescriptionError(
                "bidirectional_kv_xfer (decode engines that keep blocks for the next turn) is not "
                "offered; remove it, or share blocks between turns by a pool"
            )
        if extra.get("enforce_handshake_compat") is False:
            raise DescriptionError(
                "enforce_handshake_compat cannot be switched off: what two engines must have in "
                "common is checked at every handshake, and what may differ is bridged; remove it"
            )
    if style == "mooncake":
        port = int(environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") or MOONCAKE_PORT)
        values["bootstrap_port"] = port
        seconds = float(environment.get("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT") or MOONCAKE_SECONDS)
        values["lease_seconds"] = values["load_seconds"] = seconds
        if environment.get("VLLM_MOONCAKE_CONNECTOR_TIMEOUT"):
            values["bootstrap_seconds"] = float(environment["VLLM_MOONCAKE_CONNECTOR_TIMEOUT"])
        values["bootstrap_server"] = str(extra.get("bootstrap_server_address") or "")
    idle = {"kv_lease_duration", "push_registration_timeout", "bootstrap_server_address"}
    idle |= {"bidirectional_kv_xfer", "enforce_handshake_compat"}
    unused = sorted((set(extra) & THEIR_KEYS[style]) - idle)
    if unused:
        log.info("kvferry: %s of the in-tree connector have no meaning here", ", ".join(unused))
    if extra.get("mooncake_protocol", "tcp") != "tcp":
        log.warning(
            "kvferry: mooncake_protocol %r is not taken over: kvferry moves caches by its own "
            'carriers. For Mooncake with it, set "carrier_options": {"mooncake": {"protocol": %s, '
            '"device": %s}}',
            extra["mooncake_protocol"],
            json.dumps(extra["mooncake_protocol"]),
            json.dumps(extra.get("device_name") or ""),
        )
    return values


def incarnation(vllm_config: Any) -> str:
    """One value for all processes of an engine, and another one after each start."""
    return str(vllm_config.instance_id)


def require_supported_vllm(version: str) -> None:
    if not version.startswith(SUPPORTED_VLLM):
        raise DescriptionError(
            f"kvferry's connector is made for vLLM {', '.join(v + 'x' for v in SUPPORTED_VLLM)}; "
            f"this is {version}. The connector interface changes between versions: install a "
            "matching pair"
        )
