"""Keys of `kv_connector_extra_config` that an operator may set. Every key has a default.

`FerryConfig` is a dataclass; the type of each field has a rule for its value:

    port: Port = 0  # of the directory

`read_keys` checks parsed JSON against these rules. A text never counts as a number or a flag:
"false" would count as true, and "64" would end the first request instead of the start. null means
that the key is not given. A value that breaks its rule is a `DescriptionError` with the key, the
expected value and the found one. A field without a rule cannot be read.

Keys of earlier versions (`REMOVED_KEYS`) are accepted. A log line says what became of each.

The classes that stand in for vLLM's own connectors also take those connectors' keys and environment
variables. Keys with a meaning here are translated, and keys without one are named once in the log.
A key that would change results (to switch a handshake check off) is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

from kvferry.carriers.auto import require_carriers, require_options
from kvferry.errors import DescriptionError, ProtocolError
from kvferry.handover.consumer import Mode
from kvferry.handover.holds import DEFAULT_LEASE_SECONDS
from kvferry.handover.ticket import is_host
from kvferry.net.keys import HOW_TO_MAKE_ONE, Key
from kvferry.net.names import is_loopback
from kvferry.support import SUPPORTED_VLLM
from kvferry.units import MOST_PORT

log = logging.getLogger("kvferry")

# Keys of earlier versions, of either configuration, and what became of them.
REMOVED_KEYS = {
    "packing": "has no effect any more",
    "lora_files_final": "has no effect any more: an engine reads an adapter's files once, when it "
    "first serves the adapter",
}
MOST_SECONDS = 1e6  # ZMQ takes milliseconds in 32 bits, which is 24 days
MOST_COUNT = 1 << 31


@dataclass(frozen=True, slots=True)
class Rule:
    """`take` returns the value, or raises a ValueError whose text may add advice."""

    expected: str
    take: Callable[[Any], Any]
    hidden: bool = False  # messages must not show the value

    def read(self, name: str, value: Any) -> Any:
        try:
            return self.take(value)
        except ValueError as error:
            found = f"{value!r:.100}" if not (self.hidden and value) else type(value).__name__
            more = f"; {error}" if str(error) else ""
            raise DescriptionError(f"{name} must be {self.expected}, found {found}{more}") from None


def rules(kind: Any) -> dict[str, Rule]:
    """The rules of a dataclass, by field."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for name in (f.name for f in fields(kind)):
        parts = (hints[name], *get_args(hints[name]))  # `Port`, or `Port | None`
        said = [m for part in parts for m in getattr(part, "__metadata__", ())]
        if len(said) != 1 or not isinstance(said[0], Rule):
            raise TypeError(f"{kind.__name__}.{name} has no rule")
        found[name] = said[0]
    return found


def read_keys(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of those fields of a dataclass that are given."""
    by = rules(kind)
    return {name: by[name].read(name, value) for name, value in told(given).items()}


def told(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose values are not null."""
    return {name: value for name, value in given.items() if value is not None}


def without_removed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that this version has. One line in the log answers each key of earlier versions."""
    for name in sorted(REMOVED_KEYS.keys() & told(given).keys()):
        log.warning("kvferry: `%s` %s; remove it", name, REMOVED_KEYS[name])
    return {name: value for name, value in given.items() if name not in REMOVED_KEYS}


def spelled(name: str, value: Any, rule: Rule, kind: type[int] | type[float]) -> Any:
    """A number that may also be a text: from the environment, or a key that vLLM defines."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # the rule then reports it
            value = kind(value)
    return rule.read(name, value)


def whole(least: int = 0, most: int = MOST_COUNT, what: str = "a whole number") -> Rule:
    def take(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:  # True is an int, but no number
            raise ValueError
        return value

    return Rule(f"{what} from {least} to {most}", take)


def amount(most: float, what: str) -> Rule:
    """A number above 0."""

    def take(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not 0 < value <= most:  # also false for NaN
            raise ValueError
        return value

    return Rule(f"{what}, more than 0 and at most {most:,.10g}", take)


def choice(*names: str) -> Rule:
    def take(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Rule(" or ".join(f'"{name}"' for name in names), take)


def take_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell texts that UTF-8 cannot
        raise ValueError("it has characters that cannot be written") from None
    return value


def take_name(value: Any) -> str:
    if not take_text(value).strip():
        raise ValueError("leave the key out if there is none")
    return str(value)


def take_path(value: Any) -> str:
    if "\0" in take_name(value):
        raise ValueError("it has a null character")
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:  # ~user without a home directory
        raise ValueError(str(error)) from None


def _take_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("write it without quotation marks" if isinstance(value, str) else "")
    return value


def _take_texts(value: Any) -> tuple[str, ...]:
    """A single text counts as a list of one."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts:
        raise ValueError
    return tuple(take_name(text) for text in texts)


def _take_options(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return value


FLAG = Rule("true or false", _take_flag)
TEXT = Rule("a text", take_text)
SECRET = Rule("a text that is not empty", take_name, hidden=True)
PATH = Rule("a path", take_path)
NAMES = Rule("a name, or a list of names that is not empty", _take_texts)
OPTIONS = Rule("an object", _take_options)
PORT = whole(0, MOST_PORT, "a port")
COUNT = whole()
SECONDS = amount(MOST_SECONDS, "a number of seconds")
SHARE = amount(1, "a share")

Flag = Annotated[bool, FLAG]
Text = Annotated[str, TEXT]
Secret = Annotated[str, SECRET]
FilePath = Annotated[str, PATH]
Names = Annotated[tuple[str, ...], NAMES]
Options = Annotated[Mapping[str, Any], OPTIONS]
Port = Annotated[int, PORT]
Count = Annotated[int, COUNT]
Seconds = Annotated[float, SECONDS]
Share = Annotated[float, SHARE]

# How a proxy connects a prefill with its decode. ferry, nixl: it sends the prefill first, and
# passes the answer on. push: it may also send both at once, with one request id. mooncake: it sends
# both at once, with one transfer id.
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

    # The alternatives are secret_file and the environment's KVFERRY_SECRET.
    secret: Secret | None = field(default=None, repr=False)
    host: Host | None = None  # address at which peers reach this engine; None: loopback
    port: Port = 0  # of the directory; 0: any
    carriers: Names = ("auto",)  # or names, in order of preference
    checksums: Flag = False  # compare bytes that arrive with digests from the source
    carrier_options: Options = field(default_factory=dict)  # by carrier
    mode: Annotated[Mode, MODE] = "pull"  # push: the producer writes if it can be stopped
    lease_seconds: Seconds = DEFAULT_LEASE_SECONDS  # a hold that is not renewed closes
    load_seconds: Seconds = 120.0  # a load fails after this long
    model_id: Text = ""  # names the weights, if the model's path differs between engines
    draft_layers: Annotated[str, DRAFTS] = "refuse"  # if a prefill engine lacks them; or "zero"
    # Blocks that holds of finished requests may keep; None: half of the cache; 0: no limit.
    max_held_blocks: Count | None = None
    peers: Hosts = ()  # hosts and networks that tickets may name; empty: any
    bootstrap_port: Port = 0  # where proxies ask for engine ids (Mooncake style); 0: no server
    bootstrap_server: Server = ""  # another engine's bootstrap, to register with instead
    bootstrap_seconds: Seconds = 10.0  # for one question to a bootstrap or a directory

    @classmethod
    def read(
        cls,
        extra: Mapping[str, Any],
        style: Style = "ferry",
        environment: Mapping[str, str] | None = None,
        rank: int = 0,
    ) -> FerryConfig:
        """`rank` is the data-parallel rank: each is an engine and has its own port."""
        environment = os.environ if environment is None else environment
        names = set(rules(cls))
        known = names | {"secret_file"} | THEIR_KEYS[style]
        extra = without_removed(extra)
        unknown = sorted(set(extra) - known)
        if unknown:
            raise DescriptionError(
                f"kv_connector_extra_config has {unknown}, which kvferry does not know; it knows "
                f"{sorted(known)}"
            )
        given = told(extra)
        values = _translated(given, style, environment)
        values |= read_keys(cls, {k: v for k, v in given.items() if k in names and k != "secret"})
        values["secret"] = _secret(given, environment)
        config = cls(**values)
        if config.secret is None and config.host is not None and not is_loopback(config.host):
            raise DescriptionError(
                f"host is {config.host}, and there is no secret: any process that reaches it could "
                f"read and write KV caches. Set secret_file ({HOW_TO_MAKE_ONE}), or leave "
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
    """The configured secret, or None. An empty one is refused: it would disable authentication."""
    if "secret" in given and "secret_file" in given:
        raise DescriptionError("secret and secret_file are both given; remove one of them")
    if "secret" in given:
        log.warning(
            "kvferry: `secret` stands in the configuration itself, which vLLM writes into its log "
            "and the system shows in its list of processes; use `secret_file` or the environment "
            "variable KVFERRY_SECRET"
        )
        return _long("secret", SECRET.read("secret", given["secret"]))
    if "secret_file" not in given:
        variable = environment.get("KVFERRY_SECRET")  # an empty variable counts as unset
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
    """Require a secret that a recorded handshake does not let anyone guess."""
    found = str(secret).strip()  # an editor or a shell may have added a newline
    try:
        Key.of(found)
    except DescriptionError as error:
        raise DescriptionError(f"{name}: {error}") from None
    return found


def _translated(
    extra: Mapping[str, Any], style: Style, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Our keys, from the keys and environment variables of vLLM's own connectors."""
    values: dict[str, Any] = {}
    variables = {name: text for name, text in environment.items() if text}

    def take(ours: str, source: Mapping[str, Any], theirs: str, rule: Rule) -> None:
        """Take a number over. Our own keys win over environment variables."""
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
                "offered; remove it, and share blocks between turns in a pool"
            )
        if extra.get("enforce_handshake_compat", True) is not True:
            raise DescriptionError(
                "enforce_handshake_compat cannot be switched off: every handshake checks what two "
                "engines must have in common, and bridges what may differ; remove it "
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
    """The same for all processes of an engine, and new after each start."""
    return str(vllm_config.instance_id)


def require_supported_vllm(version: str) -> None:
    if not version.startswith(SUPPORTED_VLLM):
        raise DescriptionError(
            f"kvferry's connector is made for vLLM {', '.join(v + 'x' for v in SUPPORTED_VLLM)}; "
            f"this is {version}. The connector interface changes between versions: install a "
            "matching pair"
        )


# Hosts. An engine's host goes into its tickets, and peers dial it, so it cannot be an address like
# 0.0.0.0 that stands for all addresses of a host.

_NUMBERS = re.compile(r"[0-9.]+")  # a text like this is an address or a mistake, never a name


@dataclass(frozen=True, slots=True)
class AllowedPeers:
    """Hosts that tickets may name. Names are compared as texts, and never resolved."""

    networks: tuple[IPv4Network | IPv6Network, ...]
    names: frozenset[str]  # in lower case

    def admit(self, host: str) -> bool:
        try:
            address = ip_address(_bare(host))
        except ValueError:
            return host.lower() in self.names
        return any(address in network for network in self.networks)


@lru_cache(maxsize=64)
def parse_peers(peers: tuple[str, ...]) -> AllowedPeers:
    """Raises a ValueError that names the text that is no peer."""
    networks, names = [], set()
    for peer in peers:
        try:
            networks.append(ip_network(_bare(peer), strict=False))
        except ValueError:
            if not _is_name(peer):
                raise ValueError(
                    f"{peer!r:.100} is none of these; give each its own text, without a port"
                ) from None
            names.add(peer.lower())
    return AllowedPeers(tuple(networks), frozenset(names))


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_name(text: str) -> bool:
    return is_host(text) and ":" not in text and not _NUMBERS.fullmatch(text)


def _take_host(value: Any) -> str:
    host = _bare(take_name(value))
    try:
        address = ip_address(host)
    except ValueError:
        if not _is_name(host):
            raise ValueError("write it without a scheme or a port") from None
        return host
    if address.is_unspecified:
        raise ValueError(
            "tickets name this address and peers dial it: give an address of this host that they "
            "reach, such as 10.0.0.1"
        )
    if not is_host(host):
        raise ValueError("an address with a zone means nothing to peers")
    return host


def _take_peers(value: Any) -> tuple[str, ...]:
    """An empty list admits all hosts. A single text counts as a list of one."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ValueError
    peers = tuple(take_name(text) for text in texts)
    parse_peers(peers)
    return peers


def _take_server(value: Any) -> str:
    server = take_text(value)
    if server:
        try:
            host_port(server)
        except ProtocolError:
            raise ValueError from None
    return server


HOST = Rule("the name or an address of this host", _take_host)
PEERS = Rule("a list of addresses, networks (10.0.0.0/8) and names of hosts", _take_peers)
SERVER = Rule("an address such as http://10.0.0.1:8998", _take_server)

Host = Annotated[str, HOST]
Hosts = Annotated[tuple[str, ...], PEERS]
Server = Annotated[str, SERVER]


def host_port(server: str) -> tuple[str, int]:
    """Host and port of `http://host:port` or `host:port`."""
    if not isinstance(server, str) or len(server) > 512:
        raise ProtocolError("a bootstrap address is a text such as http://10.0.0.1:8998")
    try:
        parts = urlsplit(server if "//" in server else f"//{server}")
        host, port = parts.hostname, parts.port
        plain = parts.scheme in ("", "http") and not parts.username
        if plain and host and port and host.encode("idna"):
            return host, port
    except ValueError:  # UnicodeError is one
        pass
    raise ProtocolError(f"{server!r:.100} is no bootstrap address such as http://10.0.0.1:8998")
