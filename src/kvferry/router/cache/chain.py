# SPDX-License-Identifier: Apache-2.0
"""Names of a prompt's blocks, which are the router's own.

Engines name a block by a hash of their own. The router names it by a digest of the block's tokens
and of the digest before it, so a digest stands for the whole prefix that ends with the block. The
first digest follows the namespace's seed. Digests of a prompt come from its tokens, those of an
engine's blocks from the tokens in its events; both are equal where the tokens are.

A digest is Python's own hash of bytes: keyed by this process, and three times as fast as any of
`hashlib`. It has 61 bits. Two of a million prefixes have the same one in one of five million
routers, and a request is placed badly there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Digest = int
_TOKEN_BYTES = 4
_TOKEN_TYPE = "I" if array("I").itemsize == _TOKEN_BYTES else "L"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Caches are shared only within one namespace; "" is the usual one."""

    lora: str = ""
    salt: str = ""  # a request's `cache_salt`

    @property
    def seed(self) -> Digest:
        return hash((self.lora, self.salt))


class PromptChain:
    """The tokens of one prompt, and the digests of its blocks."""

    __slots__ = ("_digests", "_packed", "namespace", "tokens")

    def __init__(self, namespace: Namespace, token_ids: Iterable[int]) -> None:
        """Raises ValueError for what cannot be a token."""
        self.namespace = namespace
        self._packed = pack(token_ids)
        self.tokens = len(self._packed) // _TOKEN_BYTES
        # Tuples: the collector of garbage does not look into them, as it does into lists.
        self._digests: dict[int, tuple[Digest, ...]] = {}

    def digests(self, block_tokens: int) -> tuple[Digest, ...]:
        """One digest for each whole block of `block_tokens` tokens. Made once for each size."""
        digests = self._digests.get(block_tokens)
        if digests is None:
            digests = tuple(extend(self.namespace.seed, self._packed, block_tokens))
            self._digests[block_tokens] = digests
        return digests


def pack(token_ids: Iterable[int]) -> bytes:
    """Tokens as bytes, for `extend`. Raises ValueError for what cannot be a token."""
    try:
        return array(_TOKEN_TYPE, token_ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be from 0 to 2**32 - 1: {error}") from None


def extend(
    parent: Digest, packed: bytes, block_tokens: int, extras: Sequence[bytes] = ()
) -> list[Digest]:
    """Digests of the whole blocks that follow the block with the digest `parent`.

    `extras`: for each block, what else its cache depends on, such as an image; b"" for nothing.
    """
    size = block_tokens * _TOKEN_BYTES
    digests = []
    for number, at in enumerate(range(0, len(packed) - size + 1, size)):
        block = packed[at : at + size]
        if extras and extras[number]:
            block += extras[number]
        parent = hash((parent, block))
        digests.append(parent)
    return digests
