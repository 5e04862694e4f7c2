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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from kvferry.errors import DescriptionError
from kvferry.p2p.consumer import Mode
from kvferry.support import SUPPORTED_VLLM
from kvferry.transport.options import require_carriers, require_options
from kvferry.vllm.addresses import HOST, SERVER, Host, Hosts, Server, parse_peers
from kvferry.vllm.settings import (
    PATH,
    PORT,
    SECONDS,
    SECRET,
    Count,
    Flag,
    Names,
    Options,
    Port,
    Rule,
    Seconds,
    Secret,
    Text,
    choice,
    read_keys,
    rules,
    spelled,
    told,
)
from kvferry.wire.keys import HOW_TO_MAKE_ONE, Key
from kvferry.wire.names import is_loopback

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
MODE = choice("pull", "push")
DRAFTS = choice("refuse", "zero")
MOONCAKE_PORT = 8998  # vLLM's default
MOONCAKE_SECONDS = 480.0  # vLLM's default


@dataclass(frozen=True, slots=True)
class FerryConfig:
    """Keys of `kv_connector_extra_config`."""

    # or secret_file, or the environment's KVFERRY_SECRET
    secret: Secret | None = field(default=None, repr=False)
    host: Host | None = None  # address that peers reach this engine at; None: loopback
    port: Port = 0  # of the directory; 0: any
    carriers: Names = ("auto",)  # or names, in order of preference
    checksums: Flag = False  # compare what arrives with digests of what the source holds
    carrier_options: Options = field(default_factory=dict)  # by carrier
    mode: Annotated[Mode, MODE] = "pull"  # push: the producer writes, where it can be stopped
    lease_seconds: Seconds = 60.0  # a hold lasts this long without a word from its consumer
    load_seconds: Seconds = 120.0  # a load has failed after this long
    model_id: Text = ""  # names the weights, where the model's path differs between engines
    draft_layers: Annotated[str, DRAFTS] = "refuse"  # that a prefill engine lacks; or "zero" them
    lora_files_final: Flag = False  # adapters' files never change: see `kvferry.pool.adapters`
    # that finished requests may keep at once; None: half of the cache (`offering`); 0: no limit
    max_held_blocks: Count | None = None
    peers: Hosts = ()  # hosts and networks that tickets may name; empty: any
    bootstrap_port: Port = 0  # where proxies ask for engine ids (Mooncake style); 0: not at all
    bootstrap_server: Server = ""  # of another engine, to register with instead of an own one
    bootstrap_seconds: Seconds = 10.0  # for one question to a bootstrap, or to a directory

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
        names = set(rules(cls))
        known = names | {"secret_file", "packing"} | THEIR_KEYS[style]
        unknown = sorted(set(extra) - known)
        if unknown:
            raise DescriptionError(
                f"kv_connector_extra_config has {unknown}, which kvferry does not know; it knows "
                f"{sorted(known)}"
            )
        given = told(extra)
        if "packing" in given:
            log.warning("kvferry: `packing` has no effect any more; remove it")
        values = _translated(given, style, environment)
        values |= read_keys(cls, {k: v for k, v in given.items() if k in names and k != "secret"})
        values["secret"] = _secret(given, environment)
        config = cls(**values)
        if config.secret is None and config.host is not None and not is_loopback(config.host):
            raise DescriptionError(
                f"host is {config.host}, and there is no secret: whoever reaches that address "
                f"could read and write KV caches. Set secret_file ({HOW_TO_MAKE_ONE}), or leave "
                "host out: engines of one user on one host then find each other by loopback"
            )
        require_carriers(config.carriers)
        require_options(config.carriers, config.carrier_options)
        if not config.port:
            return config
        sum_of = f"port {config.port} + data-parallel rank {rank}"
        return replace(config, port=PORT.read(sum_of, config.port + rank))

    def admits(self, host: str) -> bool:
        """Whether a ticket may send this engine to a host."""
        return not self.peers or parse_peers(self.peers).admit(host)


def _secret(given: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """Where one is asked for there is one: an empty one would switch authentication off."""
    if "secret" in given and "secret_file" in given:
        raise DescriptionError("secret and secret_file are both given; remove one of them")
    if "secret" in given:
        log.warning(
            "kvferry: `secret` stands in the configuration itself, which vLLM writes into its log "
            "and the system shows in its list of processes; use `secret_file` or the variable "
            "KVFERRY_SECRET"
        )
        return _long("secret", SECRET.read("secret", given["secret"]))
    if "secret_file" not in given:
        variable = environment.get("KVFERRY_SECRET")  # an empty variable is none
        if not variable:
            return None
        return _long("KVFERRY_SECRET", SECRET.read("KVFERRY_SECRET", variable))
    path = PATH.read("secret_file", given["secret_file"])
    try:
        secret = Path(path).read_text("utf-8").strip()
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise DescriptionError(
            f"secret_file {path} cannot be read: {error.strerror}; name a file that this user may "
            "read, with the same secret on all engines"
        ) from None
    except UnicodeDecodeError:
        raise DescriptionError(
            f"secret_file {path} is no text in UTF-8; write the secret into it as text"
        ) from None
    if not secret:
        raise DescriptionError(
            f"secret_file {path} is empty; write the secret into it, or remove the key"
        )
    if mode & 0o077:
        log.warning("kvferry: other users may read secret_file %s; run `chmod 600 %s`", path, path)
    return _long(f"secret_file {path}", secret)


def _long(name: str, secret: Any) -> str:
    """A secret that cannot be guessed from a handshake that somebody has recorded."""
    found = str(secret).strip()  # an editor or a shell may have added a line's end
    try:
        Key.of(found)
    except DescriptionError as error:
        raise DescriptionError(f"{name}: {error}") from None
    return found


def _translated(
    extra: Mapping[str, Any], style: Style, environment: Mapping[str, str]
) -> dict[str, Any]:
    """What an in-tree connector's keys and variables mean here."""
    values: dict[str, Any] = {}
    variables = {name: text for name, text in environment.items() if text}

    def take(ours: str, source: Mapping[str, Any], theirs: str, rule: Rule) -> None:
        """Take a number over. Our own keys win over variables, whatever these say."""
        if theirs in source and not (source is variables and ours in extra):
            kind = int if rule is PORT else float
            values[ours] = spelled(theirs, source[theirs], rule, kind)

    if style == "push":
        values["mode"] = "push"
    if style in ("nixl", "push"):
        host = variables.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
        if host and "host" not in extra:
            host = HOST.read("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
            values["host"] = "127.0.0.1" if host == "localhost" else host
        take("port", variables, "VLLM_NIXL_SIDE_CHANNEL_PORT", PORT)
        take("lease_seconds", extra, "kv_lease_duration", SECONDS)
        take("load_seconds", extra, "push_registration_timeout", SECONDS)
        if extra.get("bidirectional_kv_xfer"):
            raise DescriptionError(
                "bidirectional_kv_xfer (decode engines that keep blocks for the next turn) is not "
                "offered; remove it, or share blocks between turns by a pool"
            )
        if extra.get("enforce_handshake_compat", True) is not True:
            raise DescriptionError(
                "enforce_handshake_compat cannot be switched off: what two engines must have in "
                "common is checked at every handshake, and what may differ is bridged; remove it "
                f"(found {extra['enforce_handshake_compat']!r:.40})"
            )
    if style == "mooncake":
        values["bootstrap_port"] = MOONCAKE_PORT
        take("bootstrap_port", variables, "VLLM_MOONCAKE_BOOTSTRAP_PORT", PORT)
        values["lease_seconds"] = values["load_seconds"] = MOONCAKE_SECONDS
        for name in ("lease_seconds", "load_seconds"):
            take(name, variables, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", SECONDS)
        take("bootstrap_seconds", variables, "VLLM_MOONCAKE_CONNECTOR_TIMEOUT", SECONDS)
        address = extra.get("bootstrap_server_address", "")
        values["bootstrap_server"] = SERVER.read("bootstrap_server_address", address)
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
