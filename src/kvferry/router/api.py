# SPDX-License-Identifier: Apache-2.0
"""The part of OpenAI's API that the router understands, and the router's configuration.

A request is a JSON object whose values stay as received, in bytes. The router replaces only the few
values that a prefill must not see, so fields that only the engine understands pass unchanged.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args
from urllib.parse import urlsplit

import msgspec

from kvferry.errors import DescriptionError, KvferryError
from kvferry.net.names import at_port
from kvferry.router.choice import Role

log = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]
ROLES: tuple[Role, ...] = get_args(Role)

PARAMS = "kv_transfer_params"
_PREFILL = {
    "max_tokens": b"1",
    "max_completion_tokens": b"1",
    "n": b"1",
    "stream": b"false",
    PARAMS: b'{"do_remote_decode":true,"do_remote_prefill":false}',
}
# They mean nothing for one token, and engines refuse them together with `max_tokens` 1.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "best_of")

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# Headers that the router sets on its answers; the same headers of an engine are dropped.
REQUEST_ID, PATH, DECISION = b"x-request-id", b"x-kvferry-path", b"x-kvferry-decision"
OWN_HEADERS = (REQUEST_ID, PATH, DECISION)
# Headers of one connection, not of the message (RFC 9110, 7.6.1), and headers that each sender
# makes itself.
_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
    *(b"proxy-connection", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    *(b"host", b"content-length", b"date", b"server", *OWN_HEADERS),
}
# A dict of short fields takes 18 times the memory of its JSON, and 0.9 us per field. Each field has
# a colon, so a limit on colons bounds both before the dict is made: 90 MB, 0.5 s. Prompts have
# fewer colons. The dict lives as long as its request, so its fields have a lower limit.
_MAX_COLONS = 500_000
_MAX_FIELDS = 1024


class StreamSink(Protocol):
    """The receiver of a stream."""

    def take(self, data: bytes, last: bool) -> bool:
        """Take the next bytes. Returns whether to pause until `on_drain`'s callback is called."""

    def on_drain(self, go_on: Callable[[], None] | None) -> None:
        """Set the callback for when the receiver has room again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a client: an engine's, unchanged, or the router's own."""

    status: int
    headers: Headers
    body: bytes  # of a stream, the first bytes
    # Of a stream: passes the other bytes to a sink as they arrive, and returns at their end.
    rest: Callable[[StreamSink], Awaitable[None]] | None = None


def json_answer(value: object, status: int = 200) -> Answer:
    body = json.dumps(value, separators=(",", ":")).encode()
    return Answer(status, [(b"content-type", b"application/json")], body)


class ApiError(KvferryError):
    """A request that the router answers itself, in OpenAI's error format."""

    def __init__(
        self, status: int, code: str, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        if status == 429:
            kind = "rate_limit_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        self.answer = json_answer({"error": error}, status)
        if retry_after_seconds is not None:
            after = b"%d" % max(1, round(retry_after_seconds))
            self.answer.headers.append((b"retry-after", after))


class Generation:
    """A request for a completion or a chat completion."""

    def __init__(self, body: bytes) -> None:
        if body.count(b":") > _MAX_COLONS:
            raise _too_many(f"{_MAX_COLONS} colons")
        try:
            self.fields: dict[str, msgspec.Raw] = _FIELDS.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ApiError(
                400, "invalid_json", f"the body must be a JSON object: {error}"
            ) from None
        if len(self.fields) > _MAX_FIELDS:
            raise _too_many(f"{_MAX_FIELDS} fields")
        self.body = body

    @property
    def streamed(self) -> bool:
        return self._get("stream") == b"true"

    def max_tokens(self) -> int | None:
        """The client's limit for the answer, or None."""
        for name in ("max_completion_tokens", "max_tokens"):
            value = self._get(name)
            if value.isdigit() and len(value) < 10:
                return int(value)
        return None

    def decode_only_because(self) -> str | None:
        """Why this request cannot be handed over, or None.

        `batch`: several prompts in one request. Engines answer a prefill with the ticket of the
        first prompt alone, and would load that prompt's cache for all of them.

        `prompt_logprobs`: an engine gets them by computing the prompt, which a hand-over avoids.
        """
        if _many(self._get("prompt")) or _many(self._get("prompt_embeds")):
            return "batch"
        if self._get("prompt_embeds") and self._get("prompt"):
            return "batch"
        if self._get("prompt_logprobs"):
            return "prompt_logprobs"
        if self._get("echo") == b"true" and self._get("logprobs") not in (b"", b"false"):
            return "prompt_logprobs"
        return None

    def for_prefill(self) -> bytes:
        wanted = {k: v for k, v in self.fields.items() if k not in _NOT_FOR_PREFILL}
        wanted |= {k: msgspec.Raw(v) for k, v in _PREFILL.items()}
        return msgspec.json.encode(wanted)

    def for_decode(self, ticket: bytes) -> bytes:
        """The request with a ticket, or without one (b"").

        A client's own `kv_transfer_params` never reach an engine, because they name hosts to dial.
        """
        if not ticket and PARAMS not in self.fields:
            return self.body
        wanted = {k: v for k, v in self.fields.items() if k != PARAMS}
        if ticket:
            wanted[PARAMS] = msgspec.Raw(ticket)
        return msgspec.json.encode(wanted)

    def _get(self, name: str) -> bytes:
        """A field's JSON; empty if it is missing or null."""
        value = bytes(self.fields.get(name, b"")).strip()
        return b"" if value == b"null" else value


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _too_many(most: str) -> ApiError:
    return ApiError(400, "too_many_fields", f"a request has {most} at most")


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


def ticket_of(answer: bytes) -> bytes:
    """`kv_transfer_params` of a prefill engine's answer, unchanged; b"" if there are none.

    Raises msgspec.DecodeError if the answer is not a JSON object.
    """
    params = bytes(msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params)
    return params if params.startswith(b"{") and params.strip(b"{} \t\r\n") else b""


def request_id_of(headers: Headers) -> bytes:
    """The client's X-Request-Id, or a new one if that is missing or not fit for a log."""
    for name, value in headers:
        if name == REQUEST_ID and _REQUEST_ID.fullmatch(value):
            return value
    return os.urandom(16).hex().encode()


def client_seconds(headers: Headers, most: float) -> float | None:
    """The client's deadline for the whole answer, at most `most` seconds; None if it sets none.

    Raises ApiError.
    """
    said = [value for name, value in headers if name == b"x-request-timeout"]
    if not said:
        return None
    try:
        seconds = float(said[0])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        message = "x-request-timeout must be a number of seconds above 0"
        raise ApiError(400, "invalid_timeout", message)
    return min(most, seconds)


def end_to_end(headers: Headers) -> Headers:
    """The headers of a request or an answer that the router passes on. Names are in lower case."""
    drop = set(_HOP_BY_HOP)
    for name, value in headers:
        if name == b"connection":
            drop.update(part.strip().lower() for part in value.split(b","))
    return [field for field in headers if field[0] not in drop]


def _many(value: bytes) -> bool:
    """Whether JSON is a list of several prompts. [1, 2] is one prompt of token ids."""
    first = value[1:64].lstrip()[:1] if value.startswith(b"[") else b"]"
    if first == b"]" or first.isdigit():
        return False
    try:
        msgspec.json.decode(value, type=tuple[msgspec.Raw])  # stops at the second
    except msgspec.ValidationError:
        return True
    except msgspec.DecodeError:
        return False  # the engine will report the mistake
    return False


# Configuration

_TCP_ADDRESS = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.%]+\]|[\w.-]+):(\d{1,5})", re.ASCII)
_URL = re.compile(r"[!-~]+")
_LEAST_WEIGHT = 0.001
COMMAND_LINE = "the command line"  # as a source of engines
_WITHOUT_EFFECT = ("max_engines",)  # limits of earlier versions


@dataclass(frozen=True, slots=True)
class Limits:
    """Every deadline and bound of the router. None can be switched off."""

    tries: int = 3  # engines asked for one request, at most, per stage
    max_running: int = 1024  # requests at one engine; more wait in the line
    max_queued: int = 512  # requests in that line; more are answered 429
    max_index_blocks: int = 2_000_000  # of engines' caches that are known, of all engines together
    max_connections: int = 2048  # of clients; fewer if the limit of descriptors is low
    max_viewers: int = 64  # of the page that follow it live
    max_in_flight: int = 1024  # requests whose body has come; more are answered 429
    max_body_bytes: int = 64 << 20  # of one request; chats carry images inside the JSON
    max_answer_bytes: int = 64 << 20  # of one answer that is not streamed
    max_held_bytes: int = 1 << 30  # of all these bodies and answers; each byte counts twice
    address_share: float = 0.5  # of connections, requests, bytes and the line, for one client
    retry_share: float = 0.1  # retries that each request allows; the rest fail at once
    retry_burst: int = 10  # retries beyond that

    header_seconds: float = 10.0  # for a client to send headers, or to stay idle
    body_seconds: float = 60.0  # for the whole body
    progress_seconds: float = 5.0  # in which at least progress_bytes of a body must come
    progress_bytes: int = 16 << 10
    client_seconds: float = 60.0  # for a client to take 64 KiB, or its host to be silent

    connect_seconds: float = 3.0
    prefill_seconds: float = 300.0  # the whole prefill: queueing, computing, answering
    first_byte_seconds: float = 300.0  # streamed answers, until the first byte
    answer_seconds: float = 1800.0  # answers that are not streamed come after the last token
    chunk_seconds: float = 120.0  # between two chunks of a stream
    wait_seconds: float = 5.0  # for a decode engine to come up, where none is
    queue_seconds: float = 30.0  # in the line, while all decode engines are at their limit
    start_seconds: float = 30.0  # until a lost engine is back, while the router has not seen any
    drain_seconds: float = 30.0  # for requests in flight when the router is told to stop

    tokenize_seconds: float = 1.0  # for an engine to tokenize a prompt; then it is placed by load
    metrics_seconds: float = 2.0  # between two looks at an engine's metrics
    probe_every_seconds: float = 2.0
    probe_seconds: float = 2.0  # for one probe to be answered
    fail_after: int = 2  # failures in a row; one refused connection is enough
    recover_after: int = 2  # good probes in a row, so that an unstable engine stays out
    reload_seconds: float = 1.0  # between two looks at files that may change
    dns_seconds: float = 10.0  # between two lookups of a name
    trial_seconds: float = 60.0  # until an engine that failed its trial gets another, at most

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 < value < math.inf:
                raise DescriptionError(f"{limit.name} must be more than 0, and finite: {value!r}")
        if self.address_share > 1:
            raise DescriptionError(f"address_share must be 1 at most, not {self.address_share!r}")
        largest = 2 * max(self.max_body_bytes, self.max_answer_bytes)
        if largest > self.max_held_bytes * self.address_share:
            raise DescriptionError(
                f"max_held_bytes times address_share must be {largest} at least, twice the largest "
                f"body or answer; it is {self.max_held_bytes * self.address_share:g}"
            )

    @classmethod
    def read(cls, texts: Iterable[str]) -> Limits:
        """Limits from texts like name=value; the others have their defaults."""
        kinds: dict[str, Any] = {limit.name: type(limit.default) for limit in fields(cls)}
        given = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name in _WITHOUT_EFFECT:
                log.warning("the limit %s has no effect any more", name)
                continue
            if name not in kinds:
                names = ", ".join(kinds)
                raise DescriptionError(f"{name!r} is no limit of the router; there are: {names}")
            try:
                given[name] = kinds[name](value)
            except ValueError:
                kind = "a whole number" if kinds[name] is int else "a number"
                raise DescriptionError(f"{name} must be {kind}, not {value!r}") from None
        return cls(**given)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an operator says about one engine, or about all engines behind one name."""

    url: str  # http://host:port, or dns://name:port
    roles: frozenset[Role]
    events: str | None = None  # where it publishes KV events, tcp://host:port; host *: its own
    replay: str | None = None  # where it sends lost ones again
    weight: float = 1.0  # its share of requests, beside those of the others
    source: str = COMMAND_LINE  # who named it, and may take it away

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _engine_url(self.url))
        object.__setattr__(self, "roles", frozenset(self.roles))
        if not self.roles or not self.roles <= set(ROLES):
            raise DescriptionError(
                f"the engine {self.url} has the roles {sorted(self.roles)}; expected prefill, "
                "decode, or both"
            )
        for name in ("events", "replay"):
            address = getattr(self, name)
            if address is None:
                continue
            found = _TCP_ADDRESS.fullmatch(address)
            if found is None or not 0 < int(found[2]) < 1 << 16:
                raise DescriptionError(
                    f"{name} of {self.url} is {address!r:.80}; expected tcp://host:port"
                )
            if not self.is_name:
                host = at_port(urlsplit(self.url).hostname or "", "")
                object.__setattr__(self, name, address.replace("//*:", f"//{host}"))
        if self.replay is not None and self.events is None:
            raise DescriptionError(f"{self.url} has replay and no events; name both, or neither")
        if not _LEAST_WEIGHT <= self.weight <= 1 / _LEAST_WEIGHT:
            raise DescriptionError(
                f"the weight of {self.url} is {self.weight!r}; expected {_LEAST_WEIGHT} to "
                f"{1 / _LEAST_WEIGHT:g}"
            )

    @property
    def is_name(self) -> bool:
        return self.url.startswith("dns://")

    def name_and_port(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    def at(self, address: str) -> EngineSpec:
        """The engine behind this name that has the address."""
        _, port = self.name_and_port()
        return replace(self, url=f"http://{at_port(address, port)}", source=self.url)


# By expected time to first token, or by the fewest requests alone.
PlaceBy = Literal["cost", "load"]


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The engines by role, and where more of them are named. Without prefill engines, every request
    is decode-only."""

    prefill: tuple[str, ...]  # base URLs, http://host:port, or dns://name:port
    decode: tuple[str, ...]
    limits: Limits = Limits()
    both: tuple[str, ...] = ()  # engines with both roles
    events: tuple[str, ...] = ()  # URL=tcp://host:port[,tcp://host:port]: KV events, and replay
    fleet_file: Path | None = None
    token: str | None = field(default=None, repr=False)  # of the admin API; None: there is none
    api_keys_file: Path | None = None  # None: every client may ask
    engine_key_file: Path | None = None  # None: engines see the clients' keys
    engine_ca: Path | None = None  # who signs the engines' certificates; None: the usual ones
    place: PlaceBy = "cost"
    tokenizer: Path | None = None  # a model's folder; None: engines are asked for tokens

    def __post_init__(self) -> None:
        if self.place not in get_args(PlaceBy):
            raise DescriptionError(f"--place must be cost or load; found {self.place!r:.80}")
        if not (self.decode or self.both or self.fleet_file or self.token):
            raise DescriptionError(
                "a router needs at least one decode engine; none was given. Name one with --decode "
                "or --engine, or give a --fleet file, or a --token-file to add engines later"
            )
        self.specs()

    def specs(self) -> list[EngineSpec]:
        """The engines and names of the command line. Raises DescriptionError."""
        events: dict[str, tuple[str, str | None]] = {}
        for text in self.events:
            url, found, addresses = text.rpartition("=")
            if not found:
                raise DescriptionError(
                    f"cannot read the events {text!r:.80}; write URL=tcp://host:port, for all "
                    "engines *=tcp://*:port, and a comma and the replay address after it"
                )
            first, _, second = addresses.partition(",")
            events[url if url == "*" else _engine_url(url)] = (first, second or None)
        named: dict[str, frozenset[Role]] = {}
        prefill, decode = ROLES
        for roles, urls in (
            ([prefill], self.prefill),
            ([decode], self.decode),
            (list(ROLES), self.both),
        ):
            for url in map(_engine_url, urls):
                if url in named:
                    message = f"the engine {url} is named twice; name it once"
                    raise DescriptionError(f"{message}, with --engine if it has both roles")
                named[url] = frozenset(roles)
        if unknown := set(events) - set(named) - {"*"}:
            raise DescriptionError(f"events of {sorted(unknown)}, which is no engine that is named")
        nothing = events.get("*", (None, None))
        return [EngineSpec(url, roles, *events.get(url, nothing)) for url, roles in named.items()]


def _engine_url(text: str) -> str:
    """An engine's address, or the name of several, in one form."""
    if not text.strip().startswith("dns://"):
        return base_url(text)
    http = base_url("http" + text.strip().removeprefix("dns"))
    parts = urlsplit(http)
    if parts.port is None or parts.path:
        raise DescriptionError(f"cannot read the name {text!r:.80}; write dns://name:port")
    return "dns" + http.removeprefix("http")


def base_url(text: str) -> str:
    """`text` as scheme://host:port[/path]: http is the default, and a final /v1 is removed."""
    if "@" in text:
        # No message may repeat this text: the part before the @ is a secret.
        raise DescriptionError(
            "an engine's address holds a user or a password; leave them out: "
            "clients' Authorization headers are passed on"
        )
    try:
        parts = urlsplit(text.strip() if "://" in text else f"http://{text.strip()}")
        # A bad port raises ValueError, and so does a host that no lookup takes, such as a..b.
        named = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError as error:
        raise DescriptionError(f"cannot read the engine's address {text!r}: {error}") from None
    named &= parts.scheme in ("http", "https") and _URL.fullmatch(parts.geturl()) is not None
    if not named or parts.query or parts.fragment:
        raise DescriptionError(f"cannot read the engine's address {text!r}; write http://host:port")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"
