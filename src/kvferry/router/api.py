"""The part of OpenAI's API that the router has to understand, which is little.

A request is a JSON object whose values are kept as the bytes that came; only the few that a
prefill must not see as they are get replaced. So nothing that an engine understands and this
module does not is lost or rounded.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvferry.errors import KvferryError

Headers = list[tuple[bytes, bytes]]

PARAMS = "kv_transfer_params"
_PREFILL = {
    "max_tokens": b"1",
    "max_completion_tokens": b"1",
    "n": b"1",
    "stream": b"false",
    PARAMS: b'{"do_remote_decode":true,"do_remote_prefill":false}',
}
# Of no use with one token, and refused by engines together with it.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "best_of")

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# Of one connection, not of the message (RFC 9110, 7.6.1); or made anew by whoever sends.
_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
    *(b"proxy-connection", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    *(b"host", b"content-length", b"date", b"server", b"x-request-id", b"x-kvferry-path"),
}
# A dict of short fields takes 18 times the memory of its JSON and 0.9 us for each field. Each field
# has a colon, so counting colons bounds both before the dict is made: 90 MB, 0.5 s. Colons inside
# of prompts count too; the limit is a choice, above what we expect of prompts.
_MAX_FIELDS = 1024
_MAX_COLONS = 500_000


class ApiError(KvferryError):
    """A request that the router answers itself, in OpenAI's error format."""

    def __init__(
        self, status: int, code: str, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers: Headers = [(b"content-type", b"application/json")]
        if retry_after_seconds is not None:
            self.headers.append((b"retry-after", b"%d" % max(1, round(retry_after_seconds))))

    @property
    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


class Held(Protocol):
    """The account of the memory that one request holds."""

    bytes: int

    def add(self, count: int) -> None:
        """Charges for bytes; a negative count gives them back. Raises ApiError."""


@dataclass(slots=True)
class Incoming:
    """One request of a client, and the trail that it leaves."""

    request_id: bytes
    method: str
    path: str
    headers: Headers  # what is passed on to engines, Authorization included: never log it
    held: Held
    body: bytes = b""
    trail: list[str] = field(default_factory=list)  # what was done, for the log


class Generation:
    """A completion or chat completion that was asked for."""

    def __init__(self, body: bytes) -> None:
        too_many = ApiError(400, "too_many_fields", f"a request has {_MAX_FIELDS} fields at most")
        if body.count(b":") > _MAX_COLONS:
            raise too_many
        try:
            self._fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ApiError(
                400, "invalid_json", f"the body must be a JSON object: {error}"
            ) from None
        if len(self._fields) > _MAX_FIELDS:
            raise too_many
        self._body = body

    @property
    def streamed(self) -> bool:
        return self._get("stream") == b"true"

    def decode_only_because(self) -> str | None:
        """Why this request cannot be handed over, if it cannot.

        `batch`: several prompts in one request. Engines answer a prefill with the ticket of the
        first prompt alone, and would load that prompt's cache for all of them.

        `prompt_logprobs`: they come out of computing the prompt, which a hand-over avoids.
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
        wanted = {k: v for k, v in self._fields.items() if k not in _NOT_FOR_PREFILL}
        wanted |= {k: msgspec.Raw(v) for k, v in _PREFILL.items()}
        return msgspec.json.encode(wanted)

    def for_decode(self, ticket: bytes) -> bytes:
        """The request with a ticket; with none (b""), as it came.

        Parameters that the client sent itself never reach an engine: they name hosts to contact.
        """
        if not ticket and PARAMS not in self._fields:
            return self._body
        wanted = {k: v for k, v in self._fields.items() if k != PARAMS}
        if ticket:
            wanted[PARAMS] = msgspec.Raw(ticket)
        return msgspec.json.encode(wanted)

    def _get(self, name: str) -> bytes:
        """A field's JSON; empty where it is missing or null."""
        value = bytes(self._fields.get(name, b"")).strip()
        return b"" if value == b"null" else value


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


def ticket_of(answer: bytes) -> bytes:
    """`kv_transfer_params` of a prefill engine's answer as they came; b"" where it gave none.

    Raises msgspec.DecodeError for what is not a JSON object.
    """
    params = bytes(msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params)
    return params if params.startswith(b"{") and params.strip(b"{} \t\r\n") else b""


def request_id_of(headers: Headers) -> bytes:
    """The client's X-Request-Id, or a new one where it gave none that can stand in a log."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()


def end_to_end(headers: Headers) -> Headers:
    """The headers that are passed on, of a request or of an answer; names in lower case."""
    named = {
        part.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for part in value.split(b",")
    }
    drop = _HOP_BY_HOP | named
    return [(name.lower(), value) for name, value in headers if name.lower() not in drop]


def _many(value: bytes) -> bool:
    """Whether JSON is a list of more than one prompt. [1, 2] is one prompt, of token ids."""
    first = value[1:64].lstrip()[:1] if value.startswith(b"[") else b"]"
    if first == b"]" or first.isdigit():
        return False
    try:
        msgspec.json.decode(value, type=tuple[msgspec.Raw])  # stops at the second
    except msgspec.ValidationError:
        return True
    except msgspec.DecodeError:
        return False  # the engine will say what is wrong with it
    return False
