# SPDX-License-Identifier: Apache-2.0
"""Names of objects in the pool, and the content hashes in them.

    kvferry1 / tenant / namespace / layout / part / content

The *namespace* is a digest of everything that must be equal for bytes to have the same meaning. The
*layout* is the id of a record that says where in the object each byte lies. The *part* is the
writer's block table and rank. The *content* is a digest of every token on which the bytes depend.

Which tokens. A block of a target model depends on the tokens up to its end. An Eagle or MTP layer
combines the hidden state of token i with token i + 1, so its block depends on `ahead` tokens more.
A block table that such a layer shares is keyed by these tokens too, or two prompts that differ
right after the block would exchange its bytes.

Content hashes. A digest covers all tokens of a prefix, so a block's digest names all blocks before
it. LoRA and cache salt come first in the hashed stream; an image comes where its placeholder tokens
begin. A token is four bytes below `MARK`; anything else is `MARK`, its length and its bytes, so
that nothing can pass for something else. One pass hashes 128,000 tokens in about 10 ms.

Digests are BLAKE2b. Users choose the content and may search for collisions. A fast hash that does
not resist them (xxh3, vLLM's own seeded hashes) would let one user's prompt hit another's cache.
"""

from __future__ import annotations

import json
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

import numpy as np

from kvferry.errors import DescriptionError

ROOT = "kvferry1"  # also the version of this format
CONTENT_BYTES = 24
NAMESPACE_BYTES = 12
INDEX_SLOTS = 32  # layouts that one namespace can have at once


@dataclass(frozen=True, slots=True)
class KeyMetadata:
    """The facts that must be equal for bytes to have the same meaning, in any shape."""

    tenant: str
    model: str  # fingerprint of the cache's description
    meaning: tuple[tuple[str, str], ...]  # facts that engines compare at a handshake, sorted
    weights: str = ""  # revision of the weights, if known
    epoch: str = ""  # changes when weights are replaced in a running engine

    @classmethod
    def of(
        cls, tenant: str, model: str, meaning: Mapping[str, str], weights: str = ""
    ) -> KeyMetadata:
        return cls(tenant, model, tuple(sorted(meaning.items())), weights)

    @property
    def namespace(self) -> str:
        return _namespace(self)

    @property
    def root(self) -> str:
        return f"{ROOT}/{quote(self.tenant, safe='')}/{self.namespace}"

    def record_key(self, layout_id: str) -> str:
        """The key of a layout's record."""
        return f"{self.root}/layout/{layout_id}"

    def index_keys(self) -> list[str]:
        """Keys of the slots that name the layouts of this namespace; each is written once."""
        return [f"{self.root}/index/{slot}" for slot in range(INDEX_SLOTS)]


@lru_cache(maxsize=64)
def _namespace(known: KeyMetadata) -> str:
    """Cached: every key of a request's first block needs it."""
    text = json.dumps(
        [known.tenant, known.model, known.meaning, known.weights, known.epoch],
        separators=(",", ":"),
    )
    return blake2b(text.encode(), digest_size=NAMESPACE_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, order=True)
class Fragment:
    """The part of a block that one rank (or any of its replicas) writes."""

    table: int
    pp: int
    tp: int

    @property
    def name(self) -> str:
        return f"{self.table}.{self.pp}.{self.tp}"


@dataclass(frozen=True, slots=True)
class PoolKey:
    """The name of one object; see the module."""

    key_metadata: KeyMetadata
    layout_id: str
    fragment: Fragment
    chunk_hash: str  # a digest of the tokens on which the bytes depend, from a `ContentChain`

    @staticmethod
    def build_prefix(key_metadata: KeyMetadata, layout_id: str, fragment: Fragment) -> str:
        """The common beginning of the keys of a fragment's blocks."""
        return f"{key_metadata.root}/{layout_id}/{fragment.name}/"

    def to_string(self) -> str:
        """The key as stores know it."""
        prefix = self.build_prefix(self.key_metadata, self.layout_id, self.fragment)
        return prefix + self.chunk_hash


def object_keys(
    metadata: KeyMetadata, layout_id: str, fragment: Fragment, contents: Sequence[str]
) -> list[str]:
    """Keys of many blocks of one fragment, as `PoolKey.to_string` makes them."""
    prefix = PoolKey.build_prefix(metadata, layout_id, fragment)
    return [prefix + content for content in contents]


MARK = 0xFFFFFFFF  # no token has this id
_MARK_BYTES = MARK.to_bytes(4, "little")


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """A key besides the tokens on which the cache depends, from this token on."""

    position: int
    text: str


def frame(text: str) -> bytes:
    """An extra key as it goes into the stream."""
    raw = text.encode()
    head = np.asarray([MARK, len(raw)], dtype="<u4").tobytes()
    return head + raw + b"\0" * (-len(raw) % 4)


@dataclass(slots=True)
class _Walk:
    """Digests at the ends of blocks of one size."""

    hasher: Any
    digests: list[str] = field(default_factory=list)


class ContentChain:
    """The content hashes of one sequence, which grow with it. Any thread may call any method."""

    def __init__(self, extras: Sequence[Extra] = ()) -> None:
        self._extras = sorted(extras)
        self._extras_at: dict[int, list[Extra]] = {}
        for extra in self._extras:
            self._extras_at.setdefault(extra.position, []).append(extra)
        self._stream = bytearray()
        self._walks: dict[tuple[int, int], _Walk] = {}  # by block size and tokens ahead
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        return len(self._stream) // 4

    def cover(self, tokens: Sequence[int], count: int) -> None:
        """Append the missing part of the first `count` tokens. `tokens` is the whole sequence."""
        while (have := self.tokens) < count:
            try:
                ids = array("I", tokens[have:count])
            except OverflowError:
                raise DescriptionError(f"token ids are from 0 to {MARK - 1}") from None
            if not ids:
                raise DescriptionError(f"the sequence has {have} tokens, expected {count}")
            if sys.byteorder == "big":
                ids.byteswap()  # which leaves MARK as it is
            raw = ids.tobytes()
            if _MARK_BYTES in raw and MARK in ids:  # the first is quick, but may be of two tokens
                raise DescriptionError(f"token ids are from 0 to {MARK - 1}")
            with self._lock:  # another thread may have appended them meanwhile
                if self.tokens == have:
                    self._stream += raw

    def digests(self, block_tokens: int, blocks: int | None = None, ahead: int = 0) -> list[str]:
        """Digests of the first whole blocks of this size, as hexadecimal.

        ahead  tokens after a block that its digest covers too; blocks without them have none
        """
        with self._lock:
            whole = max(0, self.tokens - ahead) // block_tokens
            wanted = whole if blocks is None else min(blocks, whole)
            walk = self._walks.get((block_tokens, ahead))
            if walk is None:
                walk = _Walk(blake2b(digest_size=CONTENT_BYTES))
                self._walks[block_tokens, ahead] = walk
            if len(walk.digests) < wanted:
                self._advance(walk, block_tokens, wanted, ahead)
            return walk.digests[:wanted]

    def _advance(self, walk: _Walk, block_tokens: int, wanted: int, ahead: int) -> None:
        start, stop = len(walk.digests) * block_tokens, wanted * block_tokens
        places = [(max(extra.position, 0), extra) for extra in self._extras]
        extras = [((at - start) * 4, extra) for at, extra in places if start <= at < stop]
        size = block_tokens * 4
        hasher, digests = walk.hasher, walk.digests
        with memoryview(bytes(self._stream[start * 4 : stop * 4])) as view:
            at = 0
            for end in range(size, len(view) + 1, size):
                while extras and extras[0][0] < end:
                    begin, extra = extras.pop(0)
                    hasher.update(view[at:begin])
                    hasher.update(frame(extra.text))
                    at = begin
                hasher.update(view[at:end])
                at = end
                if not ahead:
                    digests.append(hasher.hexdigest())
                    continue
                here = hasher.copy()
                here.update(self._tail(start + end // 4, ahead))
                digests.append(here.hexdigest())

    def _tail(self, start: int, tokens: int) -> bytes:
        """Tokens after a block, each with the extra keys that begin at it."""
        found = bytearray()
        for position in range(start, start + tokens):
            for extra in self._extras_at.get(position, ()):
                found += frame(extra.text)
            found += self._stream[position * 4 : position * 4 + 4]
        return bytes(found)
