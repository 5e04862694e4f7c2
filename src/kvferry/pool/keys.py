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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from urllib.parse import quote, unquote

from kvferry.errors import DescriptionError

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
