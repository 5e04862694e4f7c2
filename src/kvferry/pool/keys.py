"""Names of objects: what the bytes mean, who laid them out how, which part, and of which content.

    kvferry1 / tenant / namespace / layout / part / content

The *namespace* is a digest of all that decides what bytes mean and that no shape can bridge:
tenant, model fingerprint, what engines compare at a handshake, weight revision. The *layout* is the
id of a record that tells where in the object each byte lies; engines of other shapes read it. The
*part* is the writer's block table and rank. The *content* is a digest of every token up to the
block's end.

Digests are BLAKE2b. Content comes from users, who may look for collisions on purpose: a fast hash
that is not made to resist them (xxh3, or vLLM's own seeded hashes) would let one user's prompt hit
another's cache. 192 bits put a birthday attack at 2^96.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from kvferry.errors import DescriptionError
from kvferry.layout.placement import Ints

ROOT = "kvferry1"  # also the version of this format
CONTENT_BYTES = 24
NAMESPACE_BYTES = 12
INDEX_SLOTS = 32  # layouts that one namespace can have at a time


@dataclass(frozen=True, slots=True)
class KeyMetadata:
    """What must be equal for bytes to mean the same, whatever their shape."""

    tenant: str
    model: str  # fingerprint of the cache's description
    meaning: tuple[tuple[str, str], ...]  # what engines compare at a handshake, sorted
    weights: str = ""  # revision of the weights, where known
    epoch: str = ""  # changed when weights are replaced in a running engine

    @classmethod
    def of(
        cls, tenant: str, model: str, meaning: Mapping[str, str], weights: str = ""
    ) -> KeyMetadata:
        return cls(tenant, model, tuple(sorted(meaning.items())), weights)

    def at_epoch(self, epoch: str) -> KeyMetadata:
        return replace(self, epoch=epoch)

    @property
    def namespace(self) -> str:
        text = json.dumps(
            [self.tenant, self.model, self.meaning, self.weights, self.epoch],
            separators=(",", ":"),
        )
        return blake2b(text.encode(), digest_size=NAMESPACE_BYTES).hexdigest()

    @property
    def root(self) -> str:
        return f"{ROOT}/{quote(self.tenant, safe='')}/{self.namespace}"

    def record_key(self, layout_id: str) -> str:
        """Where a layout's record is kept."""
        return f"{self.root}/layout/{layout_id}"

    def index_keys(self) -> list[str]:
        """Slots that name the layouts of this namespace; each is written once."""
        return [f"{self.root}/index/{slot}" for slot in range(INDEX_SLOTS)]


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
    """One object, spelled out: for tools and tests. Requests build whole batches by `prefix`."""

    tenant: str
    namespace: str
    layout_id: str
    fragment: Fragment
    content: str  # hexadecimal

    def to_string(self) -> str:
        return prefix_of(self.tenant, self.namespace, self.layout_id, self.fragment) + self.content

    @classmethod
    def parse(cls, key: str) -> PoolKey:
        words = key.split("/")
        try:
            root, tenant, namespace, layout_id, part, content = words
            table, pp, tp = map(int, part.split("."))
            bytes.fromhex(content)
        except ValueError:
            raise DescriptionError(f"{key!r} is no key of a pool's object") from None
        if root != ROOT:
            raise DescriptionError(f"{key!r} is of another format than {ROOT!r}")
        return cls(unquote(tenant), namespace, layout_id, Fragment(table, pp, tp), content)


def prefix_of(tenant: str, namespace: str, layout_id: str, fragment: Fragment) -> str:
    return f"{ROOT}/{quote(tenant, safe='')}/{namespace}/{layout_id}/{fragment.name}/"


def object_keys(
    metadata: KeyMetadata, layout_id: str, fragment: Fragment, contents: Sequence[str]
) -> list[str]:
    """Keys of many blocks of one fragment."""
    prefix = f"{metadata.root}/{layout_id}/{fragment.name}/"
    return [prefix + content for content in contents]


# --------------------------------------------------------------------------------------------------
# Content hashes: a digest of every token up to a block's end, and of all else that shaped it.
#
# A prefix's digest covers its tokens from the first one on, so equal digests mean equal prefixes,
# and a block's digest names all blocks before it. LoRA and cache salt go in first; an image goes in
# where its placeholder tokens begin. The stream is framed so that nothing can pass for something
# else: a token is four bytes below `MARK`, everything else is `MARK`, its length, its bytes.
#
# Digests depend on content and block size alone: not on PYTHONHASHSEED, not on the process. They
# are extended as tokens come, never computed again; one pass hashes 128 k tokens in about 10 ms, on
# a thread that no step waits for.
# --------------------------------------------------------------------------------------------------

MARK = 0xFFFFFFFF  # no token id


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """What else the cache depends on, from this token on."""

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
    """The content hashes of one sequence; grows with it. May be used from any thread."""

    def __init__(self, extras: Sequence[Extra] = ()) -> None:
        self._extras = sorted(extras)
        self._stream = bytearray()
        self._walks: dict[int, _Walk] = {}
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        return len(self._stream) // 4

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        ids = np.asarray(tokens, dtype=np.int64)
        with self._lock:
            self._append(ids)

    def _append(self, ids: Ints) -> None:
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= MARK):
            raise DescriptionError(f"token ids are below {MARK}, found {ids.min()}..{ids.max()}")
        self._stream += ids.astype("<u4").tobytes()

    def signature(self) -> str:
        """A digest of everything, also of what fills no block."""
        with self._lock:
            whole = blake2b(self._stream, digest_size=CONTENT_BYTES)
            for extra in self._extras:
                whole.update(frame(f"{extra.position} {extra.text}"))
            return whole.hexdigest()

    def cover(self, tokens: Sequence[int], count: int) -> None:
        """Append what is missing of the first `count` of all tokens of the sequence."""
        while (have := self.tokens) < count:
            ids = np.asarray(tokens[have:count], dtype=np.int64)
            if not ids.size:
                raise DescriptionError(f"the sequence has {have} tokens, expected {count}")
            with self._lock:  # somebody else may have appended them meanwhile
                if self.tokens == have:
                    self._append(ids)

    def digests(self, block_tokens: int, blocks: int | None = None) -> list[str]:
        """Digests of the first whole blocks of this size, as hexadecimal."""
        with self._lock:
            whole = self.tokens // block_tokens
            wanted = whole if blocks is None else min(blocks, whole)
            walk = self._walks.get(block_tokens)
            if walk is None:
                walk = self._walks[block_tokens] = _Walk(blake2b(digest_size=CONTENT_BYTES))
            if len(walk.digests) < wanted:
                self._advance(walk, block_tokens, wanted)
            return walk.digests[:wanted]

    def _advance(self, walk: _Walk, block_tokens: int, wanted: int) -> None:
        start = len(walk.digests) * block_tokens
        stop = wanted * block_tokens
        extras = [e for e in self._extras if start <= max(e.position, 0) < stop]
        size = block_tokens * 4
        hasher, digests = walk.hasher, walk.digests
        with memoryview(bytes(self._stream[start * 4 : stop * 4])) as view:
            if not extras:
                for at in range(0, len(view), size):
                    hasher.update(view[at : at + size])
                    digests.append(hasher.copy().hexdigest())
                return
            at = 0
            for number in range(len(digests), wanted):
                end = (number + 1) * size - start * 4
                while extras and max(extras[0].position, 0) * 4 - start * 4 < end:
                    extra = extras.pop(0)
                    here = max(extra.position, 0) * 4 - start * 4
                    hasher.update(view[at:here])
                    hasher.update(frame(extra.text))
                    at = here
                hasher.update(view[at:end])
                at = end
                digests.append(hasher.copy().hexdigest())
