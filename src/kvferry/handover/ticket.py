# SPDX-License-Identifier: Apache-2.0
"""Tickets: a consumer claims a hold with a ticket, which proxies pass on as request parameters.

The prefill engine puts a ticket into its response. The proxy sends it to the decode engine with the
same request. Keys that vLLM's own connectors use keep their names (`do_remote_prefill`,
`remote_engine_id`, `remote_host`, `remote_port`, `remote_request_id`, `tp_size`), so that existing
proxies work unchanged. A ticket names no blocks: block ids in a message are never trusted.

A ticket is void once its hold has closed; until then, more than one engine may read with it. It is
also void once its engine's incarnation has changed. An incarnation names one life of an
engine: every start has a new one. Several connectors in one engine (children of vLLM's
MultiConnector) append their number and live side by side. A reset of the caches appends a random
word.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import ProtocolError

MARK = "kvferry"  # tells our tickets from an in-tree connector's parameters
FORMAT = 2
NO_TICKET = (
    f"kv_transfer_params ask for a remote prefill, but hold no kvferry ticket ({MARK!r}); the "
    "prefill engine must run kvferry too, and the proxy pass its answer on unchanged"
)
MOST_TEXT = 512
MOST_HOLD_BYTES = 128  # kvferry's ids have 32 or 64; a `Renew` has thousands of them
MOST_PORT = 65_535
HOST = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?")


@dataclass(frozen=True, slots=True)
class Ticket:
    engine_id: str
    incarnation: str
    hold_id: str
    digest: str
    tokens: int
    host: str
    port: int
    request_id: str
    tp_size: int = 1
    pp_size: int = 1

    @property
    def directory(self) -> str:
        return f"{self.host}:{self.port}"

    def to_params(self, *, flat: bool = True) -> dict[str, Any]:
        """The ticket as request parameters; with `flat=False`, all of it under our own key."""
        ours = {
            "format": FORMAT,
            "incarnation": self.incarnation,
            "hold": self.hold_id,
            "digest": self.digest,
            "tokens": self.tokens,
        }
        where = {
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
        }
        if not flat:
            return {MARK: {**ours, **where}}
        flags = {"do_remote_prefill": True, "do_remote_decode": False}
        # The ticket may reach vLLM's own NixlConnector, which ends its engine if there are no block
        # ids. With an empty list, it asks our directory and gets no answer.
        return {**flags, **where, "remote_block_ids": [[]], MARK: ours}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Ticket:
        """Read and check a ticket. Any client of the API may have written it."""
        ours = params.get(MARK) if isinstance(params, Mapping) else None
        if not isinstance(ours, Mapping):
            raise ProtocolError(NO_TICKET)
        if ours.get("format") != FORMAT:
            raise ProtocolError(
                f"the ticket has format {ours.get('format')!r:.40}, this engine reads {FORMAT}; "
                "run the same kvferry version on both sides"
            )
        if "remote_engine_id" in ours:  # not flat
            params = ours
        return cls(
            engine_id=_text(params, "remote_engine_id"),
            incarnation=_text(ours, "incarnation"),
            hold_id=_hold(ours, "hold"),
            digest=_text(ours, "digest"),
            tokens=_count(ours, "tokens"),
            host=_host(params, "remote_host"),
            port=_count(params, "remote_port", MOST_PORT),
            request_id=_text(params, "remote_request_id"),
            tp_size=_count(params, "tp_size"),
            pp_size=_count(params, "pp_size"),
        )


def is_text(value: Any) -> bool:
    """Whether the value can be an id in a message. JSON can spell texts that UTF-8 cannot."""
    if not isinstance(value, str) or not 0 < len(value) <= MOST_TEXT:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def is_host(value: Any) -> bool:
    return is_text(value) and HOST.fullmatch(value) is not None


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if not is_text(value):
        raise _damaged(key, f"a text of at most {MOST_TEXT} characters", value)
    return str(value)


def _hold(values: Mapping[str, Any], key: str) -> str:
    value = _text(values, key)
    if len(value.encode()) > MOST_HOLD_BYTES:
        raise _damaged(key, f"the id of a hold, of at most {MOST_HOLD_BYTES} bytes", value)
    return value


def _host(values: Mapping[str, Any], key: str) -> str:
    value = _text(values, key)
    if not is_host(value):
        raise _damaged(key, "the name or address of a host", value)
    return value


def _count(values: Mapping[str, Any], key: str, most: int = (1 << 31) - 1) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise _damaged(key, f"a number from 1 to {most}", value)
    return value


def _damaged(key: str, expected: str, found: Any) -> ProtocolError:
    shown = f"{found:.40}" if isinstance(found, str) else type(found).__name__
    if isinstance(found, int) and abs(found) < 1 << 63:
        shown = str(found)
    return ProtocolError(
        f"the ticket is damaged: {key} must be {expected}, found {shown!r}; the proxy must pass "
        "the prefill engine's answer on unchanged"
    )


def prompt_digest(token_ids: Sequence[int], extra: Iterable[str] = ()) -> str:
    """Digest of the tokens and of all else that decides the cache (LoRA, images, salt).

    Each item follows its length, so that two different prompts never give the same bytes.
    """
    hasher = hashlib.sha256()
    try:
        items = [array("I", token_ids).tobytes()]  # takes a quarter of the time of eight bytes each
    except OverflowError:  # an id that no vocabulary has
        items = [b"q", array("q", token_ids).tobytes()]
    for item in (*items, *(text.encode() for text in extra)):
        hasher.update(len(item).to_bytes(8, "little") + item)
    return hasher.hexdigest()


# Incarnations

_CHILD = re.compile(r"^(?P<engine>.*)\.(?P<child>\d{1,2})(\.[0-9a-f]{8})?$")


def child(engine: str, index: int) -> str:
    return f"{engine}.{index}"


def after_reset(first: str) -> str:
    """A new incarnation for an engine or a child, made from its first one."""
    return f"{first}.{secrets.token_hex(4)}"


def are_siblings(one: str, other: str) -> bool:
    """Whether both belong to different children of the same life of one engine."""
    a, b = _CHILD.match(one), _CHILD.match(other)
    return bool(a and b and a["engine"] == b["engine"] and a["child"] != b["child"])


def supersedes(new: str, old: str) -> bool:
    """Whether an engine's incarnation shows that an older one of the same engine has ended."""
    return new != old and not are_siblings(new, old)
