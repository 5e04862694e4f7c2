"""Hosts, peers and servers as operators write them, and which hosts a ticket may name.

An engine's host goes into its tickets, and peers dial it: an address that stands for all of a
host's means nothing to them. Peers are addresses, networks and names; a name admits a ticket that
names the host by it, in whatever case, and nothing is looked up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Annotated, Any
from urllib.parse import urlsplit

from kvferry.errors import ProtocolError
from kvferry.p2p.ticket import is_host
from kvferry.vllm.settings import Rule, take_name, take_text

_NUMBERS = re.compile(r"[0-9.]+")  # what is no address then is a damaged one


@dataclass(frozen=True, slots=True)
class Peers:
    networks: tuple[IPv4Network | IPv6Network, ...]
    names: frozenset[str]  # in small letters

    def admit(self, host: str) -> bool:
        try:
            address = ip_address(_bare(host))
        except ValueError:
            return host.lower() in self.names
        return any(address in network for network in self.networks)


@lru_cache(maxsize=64)
def parse_peers(peers: tuple[str, ...]) -> Peers:
    """Raises a ValueError that says which of them is none."""
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
    return Peers(tuple(networks), frozenset(names))


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
            "tickets name this address and peers dial it: give one of this host's that they reach, "
            "such as 10.0.0.1"
        )
    if not is_host(host):
        raise ValueError("an address with a zone means nothing to peers")
    return host


def _take_peers(value: Any) -> tuple[str, ...]:
    """An empty list admits all; one text is a list of one."""
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
    """Of `http://host:port` or `host:port`."""
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
