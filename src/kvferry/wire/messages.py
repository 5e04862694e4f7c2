"""Every message between producers and consumers, and its version.

A request is one frame with a `Request`, answered by one frame with a `Reply` of the same `id`.
Messages are msgspec structs in MessagePack, told apart by a tag. A message that cannot be decoded
is answered with `Refused` where its id can be read, and counted; it never ends a server. Texts and
counts have bounds, because servers keep some of what they are sent.

    Hello     -> Welcome           the directory: who this engine is, and all its ranks
    Claim     -> Claimed | Refused a consumer rank asks for a hold; answered when it is readable
    Complete  -> Closing           its one last word: done, failed or not needed
    Renew     -> Renewed           a consumer's scheduler keeps holds open while it queues
    Introduce -> Introduced        a consumer rank says where its own memory lies, before it offers
    Offer     -> Delivered | Refused  it opens blocks for a hold; answered when they are written
    Sum       -> Summed | Refused  the digest of runs that a consumer rank has read, if it checks
    Look      -> Seen              the directory: who this is and how to reach it, for a doctor

Version 2 added the last ones, from Introduce on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvferry.errors import ProtocolError

VERSION = 2
MAX_REQUEST_BYTES = 1 << 20  # an engine of 100 groups with 100 layers each is below 100 kB
MAX_REPLY_BYTES = 64 << 20  # a directory of 64 ranks with 100 layers each is below 1 MB
MAX_READERS = 1 << 16
MOST_RUNS = 1 << 15  # of one Sum: half a MiB
RUN_BYTES = 16  # address and length, little-endian

Outcome = Literal["done", "failed", "not needed"]
Reason = Literal[
    "stale",
    "digest",
    "version",
    "model",
    "malformed",
    "expired",
    "closed",
    "busy",
    "unmet",  # an offer of a rank that has not introduced itself (to this incarnation)
    "unable",  # this producer does not write, or its carrier does not reach the consumer: read
    "transfer",  # a write failed
]
ResidencyName = Literal["full", "window", "chunk", "ring", "state"]
ShardingName = Literal["split", "replicated"]
Text = Annotated[str, msgspec.Meta(max_length=512)]  # an id, a digest, an address
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
Some = Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]
Stride = Annotated[int, msgspec.Meta(ge=0, le=1 << 56)]  # more bytes than processors address
Dims = Annotated[tuple[Some, ...], msgspec.Meta(min_length=1, max_length=16)]
DimStrides = Annotated[tuple[Stride, ...], msgspec.Meta(min_length=1, max_length=16)]
# Any number that an array of 64-bit integers takes: -1 may mean "no block".
BlockId = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=(1 << 62) - 1)]
Grant = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Runs = Annotated[bytes, msgspec.Meta(max_length=MOST_RUNS * RUN_BYTES)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)]


class RegionInfo(msgspec.Struct, frozen=True):
    name: str
    address: Count
    bytes: Count


class PlacementInfo(msgspec.Struct, frozen=True):
    component: str
    units: tuple[Count, Count]
    block_stride: Stride
    tile_slots: Some
    tile_stride: Stride
    slot_stride: Stride
    unit_stride: Stride
    dim_sizes: Dims
    dim_strides: DimStrides
    regions: list[Count]
    offsets: list[Count]


class PartInfo(msgspec.Struct, frozen=True):
    group: str
    layers: list[Count]
    table: Count
    pool: Count
    num_blocks: Some
    block_entries: Some
    page_bytes: Count
    page_slack: Count
    interior: str
    placements: list[PlacementInfo]


class RankInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker of an engine: where to ask it, how to reach its memory, what lies there."""

    pp_rank: int
    tp_rank: int
    address: Text  # of its own server, host:port
    incarnation: Text
    carriers: dict[str, bytes]  # endpoints by carrier name
    regions: list[RegionInfo]
    parts: list[PartInfo]
    tables: Count
    sums: tuple[Text, ...] = ("xxh3",)  # checksums that it makes, the quickest first


class ComponentInfo(msgspec.Struct, frozen=True):
    name: str
    units: int
    dims: tuple[int, ...]
    element_bytes: int
    sharding: ShardingName
    content: str


class GroupInfo(msgspec.Struct, frozen=True):
    name: str
    layers: list[int]
    components: list[ComponentInfo]
    residency: tuple[ResidencyName, int]
    role: str
    tokens_per_entry: int
    partial_entries: bool
    context_parallel: bool


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine tells about itself at the handshake."""

    engine_id: Text
    incarnation: Text
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


class Look(msgspec.Struct, frozen=True, tag="look"):
    """From one who holds no cache, and so is not judged."""

    version: int


class SeenRank(msgspec.Struct, frozen=True):
    pp_rank: int
    tp_rank: int
    address: Text
    carriers: dict[str, bytes]


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    engine_id: Text
    incarnation: Text
    model: str
    shape: dict[str, Any]
    ranks: list[SeenRank]


class Reader(msgspec.Struct, frozen=True):
    """A consumer rank, as holds count them."""

    engine_id: Text
    incarnation: Text
    pp_rank: Count
    tp_rank: Count


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    version: int
    incarnation: Text  # of the producer, as the ticket says
    hold_id: Text
    digest: Text
    reader: Reader
    readers: Readers  # ranks of that engine that will speak to this producer rank
    patience_seconds: float  # how long the claim may be parked


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    tokens: int
    tables: list[list[BlockId]]


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    version: int
    incarnation: Text
    hold_id: Text
    reader: Reader
    readers: Readers
    outcome: Outcome


class Closing(msgspec.Struct, frozen=True, tag="closing"):
    was_open: bool


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    version: int
    incarnation: Text
    hold_ids: list[Text]


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    open: list[str]  # those that are, and were renewed
    closed: list[str]  # those that are not any more; what is in neither list is not known yet


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    version: int
    incarnation: Text
    engine: EngineInfo  # the consumer's
    rank: RankInfo  # the one that will offer


class Introduced(msgspec.Struct, frozen=True, tag="introduced"):
    pass


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Blocks of a consumer rank, open to one producer rank for one hold until the grant closes."""

    version: int
    incarnation: Text  # of the producer, as the ticket says
    hold_id: Text
    digest: Text
    reader: Reader
    readers: Readers
    patience_seconds: float  # to the offer's end: parked or under way
    carrier: Text
    grant: Grant
    tokens: Count
    skip: Count
    tables: list[list[BlockId]]  # the consumer's
    keep_open: bool  # whether other requests share the ticket: delivering is no last word then


class Delivered(msgspec.Struct, frozen=True, tag="delivered"):
    """All bytes of an offer are in place, and the hold was open until after the last one."""

    grant: Grant
    bytes: Count
    descriptors: int
    write_seconds: float = 0.0  # how long they took to write; before that, the offer waited


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    version: int
    incarnation: Text
    hold_id: Text
    runs: Runs  # rows of (address, length) in the source's memory
    algorithm: Text = "xxh3"  # one of those that the source has named


class Summed(msgspec.Struct, frozen=True, tag="summed"):
    digest: bytes  # 128 bits of the runs' bytes in their order


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: Reason
    message: str


RequestBody = Hello | Look | Claim | Complete | Renew | Introduce | Offer | Sum
ReplyBody = Welcome | Seen | Claimed | Closing | Renewed | Introduced | Delivered | Summed | Refused


class Request(msgspec.Struct, frozen=True, array_like=True):
    id: int
    body: RequestBody


class Reply(msgspec.Struct, frozen=True, array_like=True):
    id: int
    body: ReplyBody


class _Envelope(msgspec.Struct, array_like=True):
    """A request whose body is not looked at."""

    id: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    request: Request = _decode(_requests, frame, MAX_REQUEST_BYTES)
    return request


def decode_reply(frame: bytes) -> Reply:
    reply: Reply = _decode(_replies, frame, MAX_REPLY_BYTES)
    return reply


def read_id(frame: bytes) -> int | None:
    """The id of a request that cannot be decoded, so that its sender learns of it; or None."""
    try:
        envelope: _Envelope = _decode(_envelopes, frame, MAX_REQUEST_BYTES)
    except ProtocolError:
        return None
    return envelope.id


def _decode(decoder: Any, frame: bytes, most: int) -> Any:
    if len(frame) > most:
        raise ProtocolError(f"a message of {len(frame)} bytes; at most {most} are read")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"a message that cannot be read: {e}") from None
