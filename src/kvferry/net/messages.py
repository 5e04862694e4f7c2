# SPDX-License-Identifier: Apache-2.0
"""Every message between producers and consumers, and its version.

A request is one frame with a `Request`. Its answer is one frame with a `Reply` of the same `id`.
Messages are msgspec structs in MessagePack; a tag names the type. If a server cannot decode a
message, it answers `Refused` if it can read the id.

Texts, lists and counts have bounds, several times what real engines need, because a peer may be
faulty and a decoded frame may take thirty times its size. Block tables that a server keeps for long
stay packed (`Raw`).

    Hello     -> Welcome           the directory describes its engine and all ranks
    Claim     -> Claimed | Refused a consumer rank asks for a hold; answered when it is readable
    Complete  -> Closing           the consumer rank's last message: done, failed or not needed
    Renew     -> Renewed           a consumer's scheduler keeps holds open while requests queue
    Introduce -> Introduced        a consumer rank describes its own memory, before it offers
    Offer     -> Delivered | Refused  it opens blocks for a hold; answered when they are written
    Sum       -> Summed | Refused  the digest of runs that a consumer rank has read, if it checks
    Look      -> Seen              the directory says how to reach its engine, for a doctor

Version 2 added the messages from Introduce on. Version 3 has other digests of prompts, and other
endpoints of `cuda`, `mooncake` and `nixl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import ProtocolError
from kvferry.layout.model import MOST_LAYERS, Count, Group

VERSION = 3
MAX_REQUEST_BYTES = 1 << 20  # an engine of 100 groups with 100 layers each is below 100 kB
MAX_REPLY_BYTES = 64 << 20  # a directory of 64 ranks with 100 layers each is below 1 MB
MAX_SMALL_REPLY_BYTES = 8 << 20  # of all replies but a directory's: 2^20 block ids are 5 MiB
MOST_RANKS = 1024  # of one engine
MAX_READERS = MOST_RANKS
MOST_GROUPS = 1024  # also of tables and parts; vLLM makes about ten, at most one for each layer
MOST_REGIONS = 16_384  # of one rank; two for each layer if K and V are apart
MOST_IDS = 1 << 20  # of one table: 2^24 tokens in blocks of 16
MOST_OFFERED_IDS = 1 << 17  # in all tables of one offer; the consumer reads larger requests
MOST_RENEWED = 4096  # holds of one Renew
MAX_ENDPOINT_BYTES = 512 << 10  # NIXL's have about 100 bytes for each region
MAX_REFUSAL_CHARS = 2000  # of the text of a Refused; a longer text is cut
MOST_RUNS = 1 << 15  # of one Sum: half a MiB
RUN_BYTES = 16  # address and length, little-endian

Outcome = Literal["done", "failed", "not needed"]
Reason = Literal[
    "stale",
    "digest",
    "version",
    "malformed",
    "expired",
    "closed",
    "busy",
    "unmet",  # the offering rank has not introduced itself to this incarnation
    "unable",  # the producer cannot write to this consumer: the consumer must read
    "transfer",  # a write failed
]
Text = Annotated[str, msgspec.Meta(max_length=512)]  # an id, a digest, an address, a name
LongText = Annotated[str, msgspec.Meta(max_length=4096)]  # a path, the value of a setting
Some = Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]
Stride = Annotated[int, msgspec.Meta(ge=0, le=1 << 56)]  # more bytes than processors address
Dims = Annotated[tuple[Some, ...], msgspec.Meta(min_length=1, max_length=16)]
DimStrides = Annotated[tuple[Stride, ...], msgspec.Meta(min_length=1, max_length=16)]
# Any number that fits into 64 bits: -1 may mean "no block".
BlockId = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=(1 << 62) - 1)]
Grant = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Endpoints = Annotated[
    dict[Text, Annotated[bytes, msgspec.Meta(max_length=MAX_ENDPOINT_BYTES)]],
    msgspec.Meta(max_length=16),
]
Layers = Annotated[list[Count], msgspec.Meta(max_length=MOST_LAYERS)]
Table = Annotated[list[BlockId], msgspec.Meta(max_length=MOST_IDS)]
Tables = Annotated[list[Table], msgspec.Meta(max_length=MOST_GROUPS)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
# The types of fields of an `EngineShape`; `read_shape` checks each field.
_Pair = Annotated[list[int | Text], msgspec.Meta(max_length=2)]
_Pairs = Annotated[list[int | _Pair], msgspec.Meta(max_length=MOST_LAYERS)]
Shape = Annotated[dict[Text, bool | int | Text | _Pairs | None], msgspec.Meta(max_length=64)]
Runs = Annotated[bytes, msgspec.Meta(max_length=MOST_RUNS * RUN_BYTES)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)]


class RegionInfo(msgspec.Struct, frozen=True):
    name: Text
    address: Count
    bytes: Count


class PlacementInfo(msgspec.Struct, frozen=True):
    component: Text
    units: tuple[Count, Count]
    block_stride: Stride
    tile_slots: Some
    tile_stride: Stride
    slot_stride: Stride
    unit_stride: Stride
    dim_sizes: Dims
    dim_strides: DimStrides
    regions: Layers
    offsets: Layers


class PartInfo(msgspec.Struct, frozen=True):
    group: Text
    layers: Layers
    table: Count
    pool: Count
    num_blocks: Some
    block_entries: Some
    page_bytes: Count
    page_slack: Count
    interior: Text
    placements: Annotated[list[PlacementInfo], msgspec.Meta(max_length=64)]


class RankInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank of an engine: its server, its carriers, and the layout of its memory."""

    pp_rank: RankNumber
    tp_rank: RankNumber
    address: Text  # of its own server, host:port
    incarnation: Text
    carriers: Endpoints  # by carrier name
    regions: Annotated[list[RegionInfo], msgspec.Meta(max_length=MOST_REGIONS)]
    parts: Annotated[list[PartInfo], msgspec.Meta(max_length=MOST_GROUPS)]
    tables: Count
    # checksum algorithms of this rank, the fastest first
    sums: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ("xxh3",)


class EngineInfo(msgspec.Struct, frozen=True):
    """How an engine describes itself at the handshake."""

    engine_id: Text
    incarnation: Text
    model: LongText
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=MOST_GROUPS)]
    total_layers: Count
    shape: Shape
    # other settings that must be equal, or the bytes would mean something else
    meaning: Annotated[dict[Text, LongText], msgspec.Meta(max_length=256)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    engine: EngineInfo  # the consumer's; the directory compares nothing, the consumer does


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    engine: EngineInfo
    ranks: Annotated[list[RankInfo], msgspec.Meta(max_length=MOST_RANKS)]


class Look(msgspec.Struct, frozen=True, tag="look"):
    """The request of a doctor. It has no cache, so the directory compares nothing."""

    version: int


class SeenRank(msgspec.Struct, frozen=True):
    pp_rank: RankNumber
    tp_rank: RankNumber
    address: Text
    carriers: Endpoints


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    engine_id: Text
    incarnation: Text
    model: LongText
    shape: Shape
    ranks: Annotated[list[SeenRank], msgspec.Meta(max_length=MOST_RANKS)]


class Reader(msgspec.Struct, frozen=True):
    """A consumer rank. A hold counts its readers."""

    engine_id: Text
    incarnation: Text
    pp_rank: RankNumber
    tp_rank: RankNumber


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    version: int
    incarnation: Text  # of the producer, from the ticket
    hold_id: Text
    digest: Text
    reader: Reader
    readers: Readers  # number of ranks of that engine that will speak to this producer rank
    patience_seconds: float  # how long the producer may wait until the hold is readable


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    tokens: Count
    tables: Tables


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
    hold_ids: Annotated[list[Text], msgspec.Meta(max_length=MOST_RENEWED)]


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    # holds that are open, and were renewed
    open: Annotated[list[Text], msgspec.Meta(max_length=MOST_RENEWED)]
    # holds that are closed; the producer does not know those in neither list yet
    closed: Annotated[list[Text], msgspec.Meta(max_length=MOST_RENEWED)]


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    version: int
    incarnation: Text
    engine: EngineInfo  # the consumer's
    rank: RankInfo  # the rank that will offer


class Introduced(msgspec.Struct, frozen=True, tag="introduced"):
    pass


class Offer(Claim, frozen=True, tag="offer"):
    """A consumer rank opens blocks to one producer rank, for one hold, until the grant closes. Its
    patience is until the offer ends, waiting or under way."""

    carrier: Text
    grant: Grant
    tokens: Count
    skip: Count
    tables: msgspec.Raw  # the consumer's; see `pack_tables` and `read_tables`
    keep_open: bool  # whether the hold stays open after delivery, for requests with the same ticket


class Delivered(msgspec.Struct, frozen=True, tag="delivered"):
    """All bytes of an offer are written, and the hold was open until the last one was."""

    grant: Grant
    bytes: Count
    descriptors: Count
    write_seconds: float = 0.0  # without the time that the offer waited


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    version: int
    incarnation: Text
    hold_id: Text
    runs: Runs  # rows of (address, length) in the source's memory
    algorithm: Text = "xxh3"  # one of the source's `sums`


class Summed(msgspec.Struct, frozen=True, tag="summed"):
    # of the runs' bytes, in the order of the runs
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: Reason
    message: LongText


def refusal(reason: Reason, why: object) -> Refused:
    """A Refused with a bounded text, because the text may repeat a peer's words."""
    text = str(why)
    cut = len(text) > MAX_REFUSAL_CHARS
    return Refused(reason, text[:MAX_REFUSAL_CHARS] + " ..." if cut else text)


RequestBody = Hello | Look | Claim | Complete | Renew | Introduce | Offer | Sum
ReplyBody = Welcome | Seen | Claimed | Closing | Renewed | Introduced | Delivered | Summed | Refused


class Request(msgspec.Struct, frozen=True, array_like=True):
    id: int
    body: RequestBody


class Reply(msgspec.Struct, frozen=True, array_like=True):
    id: int
    body: ReplyBody


class _LargeReply(msgspec.Struct, frozen=True, array_like=True):
    id: int
    body: Welcome | Seen


class _Envelope(msgspec.Struct, array_like=True):
    """A request whose body stays encoded."""

    id: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_large_replies = msgspec.msgpack.Decoder(_LargeReply)
_tables = msgspec.msgpack.Decoder(Tables)
_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    request: Request = _decode(_requests, frame, MAX_REQUEST_BYTES)
    return request


def decode_reply(frame: bytes) -> Reply:
    if len(frame) > MAX_SMALL_REPLY_BYTES:
        large: _LargeReply = _decode(_large_replies, frame, MAX_REPLY_BYTES)
        return Reply(large.id, large.body)
    reply: Reply = _decode(_replies, frame, MAX_REPLY_BYTES)
    return reply


def pack_tables(tables: Sequence[Sequence[int]]) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(tables))


def read_tables(packed: msgspec.Raw) -> list[NDArray[np.int64]]:
    """The tables of an offer, as arrays: lists would take up to thirty times the frame's size."""
    tables = _decode(_tables, packed, MAX_REQUEST_BYTES)
    if sum(map(len, tables)) > MOST_OFFERED_IDS:
        raise ProtocolError(f"the offer has more than {MOST_OFFERED_IDS} blocks")
    return [np.asarray(table, dtype=np.int64) for table in tables]


def read_id(frame: bytes) -> int | None:
    """The id of a request that cannot be decoded, for the refusal; or None."""
    try:
        envelope: _Envelope = _decode(_envelopes, frame, MAX_REQUEST_BYTES)
    except ProtocolError:
        return None
    return envelope.id


def _decode(decoder: Any, frame: bytes | msgspec.Raw, most: int) -> Any:
    if len(frame) > most:
        raise ProtocolError(f"the message has {len(frame)} bytes; expected at most {most}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"the message cannot be read: {e}") from None
