"""Tickets: what a consumer gets to claim a hold, as request parameters that proxies pass on.

The names that in-tree connectors use for the same things are kept (`do_remote_prefill`,
`remote_engine_id`, `remote_host`, `remote_port`, `remote_request_id`, `tp_size`), so that proxies
which pass parameters through work as they are. The ticket names no blocks: block ids that arrive in
a message are never trusted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.errors import ProtocolError

MARK = "kvferry"  # tells our tickets from an in-tree connector's parameters
FORMAT = 1


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

    def to_params(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            MARK: {
                "format": FORMAT,
                "incarnation": self.incarnation,
                "hold": self.hold_id,
                "digest": self.digest,
                "tokens": self.tokens,
            },
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Ticket:
        """Read a ticket that came with a request, from any client of the API: trust nothing."""
        ours = params.get(MARK)
        if not isinstance(ours, Mapping):
            raise ProtocolError(
                "kv_transfer_params ask for a remote prefill, but hold no kvferry ticket; the "
                "prefill engine must run kvferry too, and the proxy pass its answer on unchanged"
            )
        if ours.get("format") != FORMAT:
            raise ProtocolError(
                f"the ticket has format {ours.get('format')!r}, this engine reads {FORMAT}; run "
                "the same kvferry version on both sides"
            )
        try:
            ticket = cls(
                engine_id=_text(params, "remote_engine_id"),
                incarnation=_text(ours, "incarnation"),
                hold_id=_text(ours, "hold"),
                digest=_text(ours, "digest"),
                tokens=_count(ours, "tokens"),
                host=_text(params, "remote_host"),
                port=_count(params, "remote_port"),
                request_id=_text(params, "remote_request_id"),
                tp_size=_count(params, "tp_size"),
                pp_size=_count(params, "pp_size"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the ticket is damaged: {error}") from None
        return ticket


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values[key]
    if not isinstance(value, str) or not 0 < len(value) <= 512:
        raise ValueError(f"{key} must be a short text")
    return value


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ValueError(f"{key} must be a positive number")
    return value


def prompt_digest(token_ids: Iterable[int], extra: Iterable[str] = ()) -> str:
    """Digest of what was computed: tokens, and what else decides the cache (LoRA, images, salt)."""
    hasher = hashlib.sha256(np.fromiter(token_ids, dtype=np.int64).tobytes())
    for item in extra:
        hasher.update(b"\0" + item.encode())
    return hasher.hexdigest()
