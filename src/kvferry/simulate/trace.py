# SPDX-License-Identifier: Apache-2.0
"""Traces of requests, from JSON lines of two kinds: Mooncake's and ours (docs/routing.md).

In Mooncake's, equal `hash_ids` mean that all tokens up to there are equal. The number of a block
that is not full is not used: engines cache whole blocks.

In ours, a prompt begins with `system_tokens` tokens that all prompts of the same `system` share.
The rest is the conversation's: its next prompt continues this one as far as both go. Without
`conversation`, the rest is shared with no other request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from kvferry.errors import DescriptionError
from kvferry.router.choice import NotNegative

MOONCAKE_BLOCK_TOKENS = 512
OUR_BLOCK_TOKENS = 64
# Of one prompt. A trace is a file of the user's own; this refuses what is a mistake.
Tokens = Annotated[int, msgspec.Meta(ge=1, le=16 << 20)]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    seconds: float  # since the trace's beginning
    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # the whole blocks of the prompt; equal numbers: equal prefixes


@dataclass(frozen=True, slots=True)
class Trace:
    requests: tuple[TraceRequest, ...]  # in order of time
    block_tokens: int

    @property
    def seconds(self) -> float:
        return self.requests[-1].seconds - self.requests[0].seconds

    def faster(self, speed: float) -> Trace:
        """The same requests, `speed` times as many a second."""
        requests = tuple(replace(r, seconds=r.seconds / speed) for r in self.requests)
        return replace(self, requests=requests)


def read_trace(path: Path, most: int | None = None) -> Trace:
    """A trace, or its first requests. Raises DescriptionError that names the line."""
    try:
        with path.open("rb") as file:
            lines = [line for line in file if line.strip()]
    except OSError as error:
        raise DescriptionError(f"cannot read the trace {path}: {error.strerror}") from None
    if not lines:
        raise DescriptionError(f"the trace {path} has no requests; each line is one, as JSON")
    mooncake = b'"hash_ids"' in lines[0]
    if mooncake:
        requests = _from_mooncake(_rows(path, lines[:most], _Mooncake))
    else:
        requests = _from_ours(_rows(path, lines[:most], _Ours))
    ordered = tuple(sorted(requests, key=lambda request: request.seconds))
    return Trace(ordered, MOONCAKE_BLOCK_TOKENS if mooncake else OUR_BLOCK_TOKENS)


_Row = TypeVar("_Row", bound=msgspec.Struct)


def _rows(path: Path, lines: Iterable[bytes], kind: type[_Row]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DescriptionError(
                f"line {number} of the trace {path} is not like Mooncake's traces (timestamp, "
                "input_length, output_length, hash_ids) or ours (seconds, input_tokens, "
                f"output_tokens): {error}"
            ) from None


class _Mooncake(msgspec.Struct):
    timestamp: NotNegative
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]

    def __post_init__(self) -> None:
        if len(self.hash_ids) * MOONCAKE_BLOCK_TOKENS < self.input_length:
            raise ValueError(
                f"{len(self.hash_ids)} hash_ids are too few for {self.input_length} tokens in "
                f"blocks of {MOONCAKE_BLOCK_TOKENS}"
            )


class _Ours(msgspec.Struct, forbid_unknown_fields=True):
    seconds: NotNegative
    input_tokens: Tokens
    output_tokens: Tokens
    conversation: str = ""
    system: str = ""
    system_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.system_tokens <= self.input_tokens:
            raise ValueError(
                f"system_tokens are a part of input_tokens, {self.system_tokens} is not within "
                f"{self.input_tokens}"
            )


def _from_mooncake(rows: Iterable[_Mooncake]) -> list[TraceRequest]:
    return [
        TraceRequest(
            row.timestamp / 1000,
            row.input_length,
            row.output_length,
            tuple(row.hash_ids[: row.input_length // MOONCAKE_BLOCK_TOKENS]),
        )
        for row in rows
    ]


def _from_ours(rows: Iterable[_Ours]) -> list[TraceRequest]:
    numbers: dict[tuple[str, str, int], int] = {}  # of blocks by system, conversation, position

    def number(system: str, conversation: str, at: int) -> int:
        return numbers.setdefault((system, conversation, at), len(numbers))

    requests = []
    for index, row in enumerate(rows):
        # A name with a NUL cannot come from a file by accident: it is this request's alone.
        conversation = row.conversation or f"\0{index}"
        shared = row.system_tokens // OUR_BLOCK_TOKENS if row.system else 0
        blocks = tuple(
            number(row.system, "" if at < shared else conversation, at)
            for at in range(row.input_tokens // OUR_BLOCK_TOKENS)
        )
        requests.append(TraceRequest(row.seconds, row.input_tokens, row.output_tokens, blocks))
    return requests
