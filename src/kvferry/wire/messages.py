"""Every message between producers and consumers, and its version.

A request is one frame with a `Request`, answered by one frame with a `Reply` of the same `id`.
Messages are msgspec structs in MessagePack, told apart by a tag. A message that cannot be decoded
is answered with `Refused` where its id can be read, and counted; it never ends a server.

    Hello     -> Welcome           the directory: who this engine is, and all its ranks
    Claim     -> Claimed | Refused a consumer rank asks for a hold; answered when it is readable
    Complete  -> Closing           its one last word: done, failed or not needed
    Renew     -> Renewed           a consumer's scheduler keeps holds open while it queues
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvferry.errors import ProtocolError

VERSION = 1
MAX_FRAME_BYTES = 64 << 20  # a directory of 64 ranks with 100 layers each is below 1 MB

Outcome = Literal["done", "failed", "not needed"]
Reason = Literal["stale", "digest", "version", "model", "malformed", "expired", "closed"]


class RegionInfo(msgspec.Struct, frozen=True):
    name: str
    address: int
    bytes: int


class PlacementInfo(msgspec.Struct, frozen=True):
    component: str
    units: tuple[int, int]
    block_stride: int
    tile_slots: int
    tile_stride: int
    slot_stride: int
    unit_stride: int
    dim_sizes: tuple[int, ...]
    dim_strides: tuple[int, ...]
    regions: list[int]
    offsets: list[int]


class PartInfo(msgspec.Struct, frozen=True):
    group: str
    layers: list[int]
    table: int
    pool: int
    num_blocks: int
    block_entries: int
    page_bytes: int
    page_slack: int
    interior: str
    placements: list[PlacementInfo]


class RankInfo(msgspec.Struct, frozen=True):
    """One worker of an engine: where to ask it, how to reach its memory, what lies there."""

    pp_rank: int
    tp_rank: int
    address: str  # of its own server, host:port
    incarnation: str
    carriers: dict[str, bytes]  # endpoints by carrier name
    regions: list[RegionInfo]
    parts: list[PartInfo]
    tables: int


class ComponentInfo(msgspec.Struct, frozen=True):
    name: str
    units: int
    dims: tuple[int, ...]
    element_bytes: int
    sharding: str
    content: str


class GroupInfo(msgspec.Struct, frozen=True):
    name: str
    layers: list[int]
    components: list[ComponentInfo]
    residency: tuple[str, int]
    role: str
    tokens_per_entry: int
    partial_entries: bool
    context_parallel: bool


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine tells about itself at the handshake."""

    engine_id: str
    incarnation: str
    model: str
    groups: list[GroupInfo]
    total_layers: int
    shape: dict[str, Any]
    meaning: dict[str, str]  # what else must be equal for bytes to mean the same


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    engine: EngineInfo  # the consumer's: the producer refuses what it cannot serve, too


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    engine: EngineInfo
    ranks: list[RankInfo]


class Reader(msgspec.Struct, frozen=True):
    """A consumer rank, as holds count them."""

    engine_id: str
    incarnation: str
    pp_rank: int
    tp_rank: int


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    version: int
    incarnation: str  # of the producer, as the ticket says
    hold_id: str
    digest: str
    reader: Reader
    readers: int  # ranks of that engine that will speak to this producer rank
    patience_seconds: float  # how long the claim may be parked


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    tokens: int
    tables: list[list[int]]


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    version: int
    incarnation: str
    hold_id: str
    reader: Reader
    readers: int
    outcome: Outcome


class Closing(msgspec.Struct, frozen=True, tag="closing"):
    was_open: bool


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    version: int
    incarnation: str
    hold_ids: list[str]


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    closed: list[str]  # those that are not open any more


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: Reason
    message: str


RequestBody = Hello | Claim | Complete | Renew
ReplyBody = Welcome | Claimed | Closing | Renewed | Refused


class Request(msgspec.Struct, frozen=True, array_like=True):
    id: int
    body: RequestBody


class Reply(msgspec.Struct, frozen=True, array_like=True):
    id: int
    body: ReplyBody


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    request: Request = _decode(_requests, frame)
    return request


def decode_reply(frame: bytes) -> Reply:
    reply: Reply = _decode(_replies, frame)
    return reply


def _decode(decoder: Any, frame: bytes) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"a message that cannot be read: {e}") from None
