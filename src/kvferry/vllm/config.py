# SPDX-License-Identifier: Apache-2.0
"""Keys of `kv_connector_extra_config` that an operator may set. Every key has a default.

`FerryConfig` is a dataclass; the type of each field has a rule for its value:

    port: Port = 0  # of the directory

`good_keys` checks parsed JSON against these rules. A text never counts as a number or a flag, and
null means that the key is not given. All mistakes of a configuration are named at once
(`gathering`).

Keys of earlier versions (`REMOVED_KEYS`) are accepted. A log line says what became of each.

The classes that stand in for vLLM's own connectors also take those connectors' keys and environment
variables. A key that would change results (to switch a handshake check off) is refused.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry import SUPPORTED_VLLM
from kvferry.carriers.auto import CARRIERS, require_carriers, require_options
from kvferry.errors import DescriptionError, KvferryError, ProtocolError, SettingsError
from kvferry.handover.consumer import Mode
from kvferry.handover.holds import DEFAULT_LEASE_SECONDS
from kvferry.handover.ticket import is_host
from kvferry.net.keys import Key
from kvferry.net.names import Reach, literal
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

# How a proxy connects a prefill with its decode. ferry, nixl: it sends the prefill first, and
# passes the answer on. push: it may also send both at once, with one request id. mooncake: it sends
# both at once, with one transfer id.
Style = Literal["ferry", "nixl", "push", "mooncake"]


@dataclass(frozen=True, slots=True)
class InTree:
    """What the stand-in for one of vLLM's own connectors takes over from it.

    Our names are keys of `FerryConfig`, or `library.option` for an option of the library's carrier.
    """

    keys: Mapping[str, str | None] = field(default_factory=dict)  # to our names; None: no effect
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment, by our name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # by our name
    library: str = ""  # whose carrier is there by default


NIXL = InTree(
    {
        "kv_lease_duration": "lease_seconds",
        "push_registration_timeout": "load_seconds",
        "backends": "nixl.backends",
        "num_threads": "nixl.threads",
        "bidirectional_kv_xfer": None,
        "decoder_kv_blocks_ttl": None,
        "enforce_handshake_compat": None,
        "engine_ttl": None,
        "kv_recompute_threshold": None,
    },
    {"host": "VLLM_NIXL_SIDE_CHANNEL_HOST", "port": "VLLM_NIXL_SIDE_CHANNEL_PORT"},
    library="nixl",
)
IN_TREE: Mapping[Style, InTree] = {
    "ferry": InTree(),
    "nixl": NIXL,
    "push": replace(NIXL, defaults={"mode": "push"}),
    "mooncake": InTree(
        {
            "bootstrap_server_address": "bootstrap_server",
            "mooncake_protocol": "mooncake.protocol",
            "device_name": "mooncake.device",
            "num_workers": "mooncake.workers",
        },
        {
            "bootstrap_port": "VLLM_MOONCAKE_BOOTSTRAP_PORT",
            "lease_seconds": "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
            "load_seconds": "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
            "bootstrap_seconds": "VLLM_MOONCAKE_CONNECTOR_TIMEOUT",
        },
        {
            "bootstrap_port": 8998,
            "lease_seconds": 480.0,
            "load_seconds": 480.0,
            "mooncake.protocol": "rdma",
        },
        library="mooncake",
    ),
}


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
    optional_carriers: AnyNames = ()  # left out with a warning where they cannot be used
    mode: Annotated[Mode, MODE] = "pull"  # push: the producer writes if it can be stopped
    lease_seconds: Seconds = DEFAULT_LEASE_SECONDS  # a hold that is not renewed closes
    load_seconds: Seconds = 120.0  # a load fails after this long
    model_id: Text = ""  # names the weights, if the model's path differs between engines
    draft_layers: Annotated[str, DRAFTS] = "refuse"  # if a prefill engine lacks them; or "zero"
    # Of requests whose load failed; None: vLLM's kv_load_failure_policy, or "recompute" if unset.
    load_failure_policy: Annotated[str | None, POLICY] = None
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
        names, in_tree, found = rules(cls).keys(), IN_TREE[style], list[str]()
        known = names | {"secret_file"} | in_tree.keys.keys()
        extra = without_removed(extra)
        if unknown := sorted(extra.keys() - known):
            found.append(
                f"kv_connector_extra_config has {unknown}, which kvferry does not know; it knows "
                f"{sorted(known)}"
            )
        given = told(extra)
        own = good_keys(cls, {k: given[k] for k in given if k in names and k != "secret"}, found)
        values = _translated(given, in_tree, environment, found) | own
        options = {k: values.pop(k) for k in list(values) if "." in k}
        config = cls(**values | _library(given, own, in_tree, options))
        with gathering(found):
            config = replace(config, secret=_secret(given, environment))
            if config.host is not None:
                Reach(config.secret is not None).require_listening(config.host)
        with gathering(found):
            require_carriers(config.carriers)
            require_options(config.carriers, config.carrier_options)
        if others := sorted(set(config.optional_carriers) - set(CARRIERS)):
            found.append(f"optional_carriers must be some of {', '.join(CARRIERS)}, found {others}")
        if config.port:
            sum_of = f"port {config.port} + data-parallel rank {rank}"
            with gathering(found):
                config = replace(config, port=PORT.read(sum_of, config.port + rank))
        if found:
            raise SettingsError(found)
        return config

    def admits(self, host: str) -> bool:
        """Whether a ticket may send this engine to a host. Names are compared, never resolved."""
        if not self.peers:
            return True
        allowed = [parse_peer(peer) for peer in self.peers]
        try:
            address = ip_address(_bare(host))
        except ValueError:
            return host.lower() in allowed
        return any(address in network for network in allowed if not isinstance(network, str))


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


@lru_cache(maxsize=1024)
def parse_peer(peer: str) -> IPv4Network | IPv6Network | str:
    """The network that a text names, or the name of a host in lower case."""
    try:
        return ip_network(_bare(peer), strict=False)
    except ValueError:
        if _is_name(peer):
            return peer.lower()
    raise ValueError(f"{peer!r:.100} is none of these; give each its own text, without a port")


# Rules


@dataclass(frozen=True, slots=True)
class Rule:
    """`take` returns the value, or raises; the text of a ValueError may add advice."""

    expected: str
    take: Callable[[Any], Any]
    hidden: bool = False  # messages must not show the value

    def read(self, name: str, value: Any) -> Any:
        try:
            return self.take(value)
        except (ValueError, KvferryError, msgspec.ValidationError) as error:
            found = f"{value!r:.100}" if not (self.hidden and value) else type(value).__name__
            more = f"; {error}" if isinstance(error, ValueError) and str(error) else ""
            raise DescriptionError(f"{name} must be {self.expected}, found {found}{more}") from None

    @classmethod
    def of(cls, expected: str, kind: Any) -> Rule:
        """A rule that a type expresses."""
        return cls(expected, partial(msgspec.convert, type=kind))


def rules(kind: Any) -> dict[str, Rule]:
    """The rules of a dataclass, by field. Each field's type has one."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Rule] = {}
    for name in (f.name for f in fields(kind)):
        parts = (hints[name], *get_args(hints[name]))  # `Port`, or `Port | None`
        (found[name],) = (m for part in parts for m in getattr(part, "__metadata__", ()))
    return found


@contextmanager
def gathering(found: list[str]) -> Iterator[None]:
    """Add an error of the block to those that were found, and go on after the block."""
    try:
        yield
    except SettingsError as error:
        found += error.found
    except KvferryError as error:
        found.append(str(error))


def good_keys(kind: Any, given: Mapping[str, Any], found: list[str]) -> dict[str, Any]:
    """The values of those fields of a dataclass that are given. Messages about values that break
    their rule are added to `found`."""
    by, values = rules(kind), {}
    for name, value in told(given).items():
        with gathering(found):
            values[name] = by[name].read(name, value)
    return values


def told(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose values are not null."""
    return {name: value for name, value in given.items() if value is not None}


def without_removed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that this version has. One line in the log answers each key of earlier versions."""
    for name in sorted(REMOVED_KEYS.keys() & told(given).keys()):
        log.warning("kvferry: `%s` %s; remove it", name, REMOVED_KEYS[name])
    return {name: value for name, value in given.items() if name not in REMOVED_KEYS}


def take_text(value: Any) -> str:
    text: str = msgspec.convert(value, str)
    text.encode()  # JSON can spell texts that UTF-8 cannot
    return text


def take_name(value: Any) -> str:
    if not take_text(value).strip():
        raise ValueError("leave the key out if there is none")
    return str(value)


def take_path(value: Any) -> str:
    try:
        return str(Path(take_name(value)).expanduser())
    except RuntimeError as error:  # ~user without a home directory
        raise ValueError(str(error)) from None


def take_names(value: Any) -> tuple[str, ...]:
    texts = msgspec.convert(value, str | tuple[str, ...])
    return tuple(take_name(text) for text in ((texts,) if isinstance(texts, str) else texts))


def take_some_names(value: Any) -> tuple[str, ...]:
    if not (names := take_names(value)):
        raise ValueError
    return names


def take_host(value: Any) -> str:
    """An engine's host goes into its tickets, and peers dial it."""
    name = take_name(value)
    address = literal(name)
    if address is None:
        if not _is_name(name):
            raise ValueError("write it without a scheme or a port")
        return name
    if ip_address(address).is_unspecified:
        raise ValueError(
            "tickets name this address and peers dial it: give an address of this host that they "
            "reach, such as 10.0.0.1"
        )
    if not is_host(address):
        raise ValueError("an address with a zone means nothing to peers")
    return address


def take_peers(value: Any) -> tuple[str, ...]:
    """An empty list admits all hosts."""
    peers = take_names(value)
    for peer in peers:
        parse_peer(peer)
    return peers


def take_server(value: Any) -> str:
    server = take_text(value)
    if server:
        host_port(server)
    return server


SECRET = Rule("a text that is not empty", take_name, hidden=True)
PATH = Rule("a path", take_path)
MODE = Rule.of('"pull" or "push"', Mode)
DRAFTS = Rule.of('"refuse" or "zero"', Literal["refuse", "zero"])
POLICY = Rule.of('"recompute" or "fail"', Literal["recompute", "fail"])
PORT = Rule.of(f"a port from 0 to {MOST_PORT}", Annotated[int, Meta(ge=0, le=MOST_PORT)])

Secret = Annotated[str, SECRET]
FilePath = Annotated[str, PATH]
Port = Annotated[int, PORT]
Flag = Annotated[bool, Rule.of("true or false", bool)]
Text = Annotated[str, Rule("a text", take_text)]
Names = Annotated[
    tuple[str, ...], Rule("a name, or a list of names that is not empty", take_some_names)
]
AnyNames = Annotated[tuple[str, ...], Rule("a name, or a list of names", take_names)]
Options = Annotated[Mapping[str, Any], Rule.of("an object", dict[str, Any])]
Count = Annotated[
    int,
    Rule.of(f"a whole number from 0 to {MOST_COUNT}", Annotated[int, Meta(ge=0, le=MOST_COUNT)]),
]
Seconds = Annotated[
    float,
    Rule.of(
        f"a number of seconds, more than 0 and at most {MOST_SECONDS:,.10g}",
        Annotated[float, Meta(gt=0, le=MOST_SECONDS)],
    ),
]
Share = Annotated[
    float, Rule.of("a share, more than 0 and at most 1", Annotated[float, Meta(gt=0, le=1)])
]
Host = Annotated[str, Rule("the name or an address of this host", take_host)]
Hosts = Annotated[
    tuple[str, ...],
    Rule("a list of addresses, networks (10.0.0.0/8) and names of hosts", take_peers),
]
Server = Annotated[str, Rule("an address such as http://10.0.0.1:8998", take_server)]

_NUMBERS = re.compile(r"[0-9.]+")  # a text like this is an address or a mistake, never a name


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_name(text: str) -> bool:
    return is_host(text) and ":" not in text and not _NUMBERS.fullmatch(text)


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
        source, secret = "secret", SECRET.read("secret", given["secret"])
    elif "secret_file" in given:
        path = PATH.read("secret_file", given["secret_file"])
        source, secret = f"secret_file {path}", _secret_in(Path(path))
    elif environment.get("KVFERRY_SECRET"):  # an empty variable counts as unset
        source = "KVFERRY_SECRET"
        secret = SECRET.read(source, environment[source])
    else:
        return None
    secret = secret.strip()  # an editor or a shell may have added a newline
    try:
        Key.of(secret)  # refuses a secret that can be guessed from a recorded handshake
    except DescriptionError as error:
        raise DescriptionError(f"{source}: {error}") from None
    return str(secret)


def _secret_in(path: Path) -> str:
    try:
        secret = path.read_text("utf-8")
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # no text in UTF-8, or no path
        no_text = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        why = error.strerror if isinstance(error, OSError) else no_text
        raise DescriptionError(
            f"secret_file {path} cannot be read: {why}; name a text file that this user may read, "
            "with the same secret on all engines"
        ) from None
    if mode & 0o077:
        log.warning("kvferry: other users may read secret_file %s; run `chmod 600 %s`", path, path)
    return secret


# What an option of a library's carrier may be, as vLLM's connectors take it.
LIBRARY_OPTIONS: Mapping[str, Rule] = {
    "nixl.backends": Rule("a name, or a list of names that is not empty", take_some_names),
    "nixl.threads": Rule.of("a whole number, 0 or more", Annotated[int, Meta(ge=0, le=MOST_COUNT)]),
    "mooncake.protocol": Rule("a text", take_text),
    "mooncake.device": Rule("a text", take_text),
    "mooncake.workers": Rule.of(
        "a whole number from 1 to 1024", Annotated[int, Meta(ge=1, le=1024)]
    ),
}


def _translated(
    extra: Mapping[str, Any], in_tree: InTree, environment: Mapping[str, str], found: list[str]
) -> dict[str, Any]:
    """Values by our names, from the keys and environment variables of vLLM's own connectors."""
    values, by = dict(in_tree.defaults), {**rules(FerryConfig), **LIBRARY_OPTIONS}
    given = {
        ours: (variable, environment[variable])
        for ours, variable in in_tree.variables.items()
        if ours not in extra and environment.get(variable)
    }
    given |= {
        ours: (theirs, extra[theirs])
        for theirs, ours in sorted(in_tree.keys.items())
        if ours is not None and theirs in extra
    }
    for ours, (theirs, value) in given.items():
        meant: Any = value
        if isinstance(value, str) and "." not in ours:  # vLLM's connectors take "60" for 60, too
            with suppress(msgspec.ValidationError):  # no number: the rule decides
                meant = msgspec.convert(value, int | float, strict=False)
        with gathering(found):
            values[ours] = by[ours].read(theirs, meant)
    if extra.get("bidirectional_kv_xfer"):
        found.append(
            "bidirectional_kv_xfer (decode engines that keep blocks for the next turn) is not "
            "offered; remove it, and share blocks between turns in a pool"
        )
    if extra.get("enforce_handshake_compat", True) is not True:
        found.append(
            "enforce_handshake_compat cannot be switched off: every handshake checks what two "
            "engines must have in common, and bridges what may differ; remove it "
            f"(found {extra['enforce_handshake_compat']!r:.40})"
        )
    if unused := sorted(key for key, ours in in_tree.keys.items() if not ours and key in extra):
        log.info("kvferry: %s of the in-tree connector have no meaning here", ", ".join(unused))
    return values


def _library(
    given: Mapping[str, Any],
    own: Mapping[str, Any],
    in_tree: InTree,
    translated: Mapping[str, Any],
) -> dict[str, Any]:
    """The carriers of a class that stands in for one over a library: that library's is there too.

    The class's name or keys of vLLM's connector alone do not make it a must: where the library
    cannot be used, the engine says why and does without. An operator who names it in `carriers` or
    in `carrier_options` must have it. `carriers` wins over all, "auto" too.
    """
    name, named = in_tree.library, own.get("carrier_options", {})
    mine = named.get(name, {})
    if not name or not isinstance(mine, Mapping):  # the latter is refused with the other carriers'
        return {}
    if "carriers" in own and name not in own["carriers"] and name not in named:
        said = sorted(key for key, ours in in_tree.keys.items() if "." in (ours or ""))
        if said := [key for key in said if key in given]:
            log.warning(
                "kvferry: %s have no effect: `carriers` does not name %s", ", ".join(said), name
            )
        return {}
    options = {ours.partition(".")[2]: value for ours, value in translated.items()}
    values: dict[str, Any] = {"carrier_options": {**named, name: {**options, **mine}}}
    if "carriers" not in own and name not in named:
        values["optional_carriers"] = (name, *own.get("optional_carriers", ()))
    return values
