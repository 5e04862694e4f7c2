"""What the scheduler keeps of a request, what it may order, and what it has ordered."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.pool.chain import ContentChain
from kvferry.pool.hits import Hit
from kvferry.pool.orders import LoadOrder, SaveOrder, Scope
from kvferry.pool.records import PoolLayout


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How long things may take, and how much may be pinned."""

    lookup_seconds: float = 2.0
    load_seconds: float = 60.0
    save_seconds: float = 60.0
    most_pinned_blocks: int = 1 << 30
    min_load_tokens: int = 1
    lookup: bool = True
    save: bool = True


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What a request was promised from the pool."""

    hit: Hit
    computed: int
    layouts: dict[str, PoolLayout] = field(repr=False)

    @property
    def tokens(self) -> int:
        return self.hit.tokens - self.computed


@dataclass(slots=True)
class RequestTracker:
    """What the pool knows of one request."""

    chain: ContentChain
    saved_tokens: int = 0  # at the front: in the pool, or ordered
    load: LoadSpec | None = None  # promised, not yet ordered
    loading: LoadOrder | None = None
    over: bool = False  # a load failed: never matched again
    old: bool = False  # holds what weights computed that are replaced now: never saved


@dataclass(slots=True)
class PoolOrders:
    scope: Scope | None = None
    saves: list[SaveOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
