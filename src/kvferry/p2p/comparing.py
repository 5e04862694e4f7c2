"""A consumer's side of checksums: what arrived, compared with what each source holds.

Slice by slice: all sources digest theirs while we digest ours. `checksum` says why this is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from kvferry.errors import ChecksumError, HandoverError
from kvferry.p2p.caller import Caller
from kvferry.p2p.checksum import Algorithm, common, digest, encode_runs, parts
from kvferry.p2p.remote import Source
from kvferry.plan import Bound
from kvferry.transport.memory import Memory
from kvferry.transport.regions import Arrays
from kvferry.wire.messages import VERSION, Refused, ReplyBody, Sum, Summed

Asked = tuple[Source, Arrays, Future[ReplyBody]]


def require_equal(
    caller: Caller,
    hold_id: str,
    bound: Mapping[Source, Bound],
    memory: Memory,
    deadline: float,
    answer: Callable[[Future[ReplyBody]], ReplyBody],
) -> None:
    """`ChecksumError` where bytes differ from their source's, as long as the hold is open."""
    by = {source: common(memory, source.sums) for source in bound}
    left = {source: parts(copies, by[source]) for source, copies in bound.items()}
    while left:
        asked: list[Asked] = []
        for source, more in list(left.items()):
            part = next(more, None)
            if part is None:
                del left[source]
                continue
            runs = encode_runs(part.src, part.length)
            question = Sum(VERSION, source.incarnation, hold_id, runs, by[source].name)
            call = caller.call(source.address, question, deadline)
            asked.append((source, part, call))
        for source, part, call in asked:
            ours = digest(memory, part.dst, part.length, by[source])
            _require_same(source, part, by[source], ours, answer(call))


def _require_same(
    source: Source, part: Arrays, by: Algorithm, ours: bytes, reply: ReplyBody
) -> None:
    who = f"rank {tuple(source.rank)}"
    if not isinstance(reply, Summed):
        why = reply.message if isinstance(reply, Refused) else type(reply).__name__
        raise HandoverError(f"{who} gives no checksum: {why}")
    if reply.digest != ours:
        raise ChecksumError(
            f"{who}: {len(part)} runs of {int(part.length.sum())} bytes arrived differently than "
            f"the source holds them ({by.name} {reply.digest.hex()} there, {ours.hex()} here); "
            "nothing of this load is used. The carrier or the network between the two engines "
            "damages bytes"
        )
