"""The demo's work: a model, two shapes, and requests with block tables on both engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DescriptionError
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.presets import load_model
from kvferry.layout.shape import EngineShape, Span
from kvferry.plan.pair import plan_pair
from kvferry.plan.report import needed_bytes

Ints = NDArray[np.int64]
Cost = Callable[[int, int], int]  # tokens, skip -> bytes that all destination ranks need

DEMO_MODEL = "demo"
# Nothing divides: 12 heads over tp 2 and 3, blocks of 16 and 24 tokens, 7 layers over 2 stages.
DEMO_FROM = "tp=2,pp=2,block=16,order=LBNHC"
DEMO_TO = "tp=3,block=24,order=LBHNC"
SKIP_PART = 0.25  # of the requests find a prefix at the destination
SPARE_PART = 0.05  # of the blocks belong to no request, and must not change
TOKENS_SPREAD = 1.0  # standard deviation of the logarithm of a request's length
ROUNDS = 12  # of growing requests towards the bytes that were asked for


def demo_model() -> CacheModel:
    """Small, but with all that makes pairing hard: 12 heads, 7 layers, two kinds of attention."""
    kv = tuple(Component(name, 12, (128,), 2, content="bf16") for name in ("k", "v"))
    window = Residency("window", 128)
    return CacheModel(
        DEMO_MODEL, (Group("full", (0, 1, 3, 4, 6), kv), Group("window", (2, 5), kv, window))
    )


def find_model(name: str) -> CacheModel:
    return demo_model() if name == DEMO_MODEL else load_model(name)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    number: int
    tokens: int
    skip: int  # tokens at the front that the destination already holds
    src_tables: tuple[Ints, ...]  # of each group; dropped blocks have the null id
    dst_tables: tuple[Ints, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """All that both engines know of before anything moves."""

    model: CacheModel
    src: EngineShape
    dst: EngineShape
    seed: int
    requests: tuple[Request, ...]
    src_pools: tuple[Ints, ...]  # of each group: ids that may be in use
    dst_pools: tuple[Ints, ...]
    bytes: int

    @property
    def src_blocks(self) -> int:
        return 1 + max(int(pool[-1]) for pool in self.src_pools)

    @property
    def dst_blocks(self) -> int:
        return 1 + max(int(pool[-1]) for pool in self.dst_pools)


def block_span(group: Group, shape: EngineShape) -> int:
    """Entries that one block stands for, over the ranks that share them."""
    return shape.entries(group)[0] * shape.dcp_for(group)


def is_single(group: Group) -> bool:
    """One block a request, whatever its length; never part of a held prefix."""
    return group.residency.kind in ("state", "ring")


@dataclass(frozen=True, slots=True)
class Extent:
    """Entries of one group of a request, in blocks of one side."""

    blocks: int  # that the request's table has
    first_held: int  # block number; those before it were dropped
    entries: Span  # that lie in the blocks
    first_loaded: int = 0  # block number; those before it are not to be touched


def source_extent(group: Group, src: EngineShape, tokens: int) -> Extent:
    """What the source holds of a request."""
    stop, needed = _stop_and_needed(group, tokens)
    if is_single(group):
        return Extent(1, 0, Span(needed, stop))
    span = block_span(group, src)
    first = 0 if src.full_residency else needed // span
    blocks = max(-(-stop // span), first)
    return Extent(blocks, first, Span(min(first * span, stop), stop))


def destination_extent(
    group: Group, src: EngineShape, dst: EngineShape, tokens: int, skip: int
) -> Extent:
    """What the destination should hold after loading a request: what it lacks, as whole blocks,
    as far as the source still has it."""
    given = source_extent(group, src, tokens)
    if is_single(group):
        return given
    stop, needed = _stop_and_needed(group, tokens)
    span = block_span(group, dst)
    first = 0 if dst.full_residency else needed // span
    loaded = max(first, skip // group.tokens_per_entry // span)
    start = max(loaded * span, given.entries.start)
    blocks = max(-(-stop // span), first)
    if start >= stop:
        return Extent(blocks, first, Span(stop, stop), blocks)
    return Extent(blocks, first, Span(start, stop), loaded)


def _stop_and_needed(group: Group, tokens: int) -> tuple[int, int]:
    """End of the entries that exist, and the first one that the next token reads."""
    if group.is_state:
        return 1, 0
    per = group.tokens_per_entry
    stop = -(-tokens // per) if group.partial_entries else tokens // per
    return stop, group.residency.needed_from(tokens) // per


def make_work(
    model: CacheModel,
    src: EngineShape,
    dst: EngineShape,
    *,
    min_bytes: int,
    requests: int,
    seed: int,
) -> Work:
    """Requests of varied lengths that together move at least `min_bytes`.

    Their number differs from `requests` only where the model leaves no choice: states that are
    large by themselves allow fewer, caches that do not grow with the tokens need more.
    """
    if requests < 1 or min_bytes < 1:
        raise DescriptionError(f"expected requests and bytes, found {requests=}, {min_bytes=}")
    rng = np.random.default_rng(seed)
    pair = plan_pair(model, src, dst)

    def cost(tokens: int, skip: int) -> int:
        return sum(needed_bytes(pair, rank, tokens, skip) for rank in dst.ranks)

    least = cost(1, 0)
    requests = max(1, min(requests, min_bytes // max(least, 1) + 1))
    align = lcm(
        *[block_span(g, dst) * g.tokens_per_entry for g in model.groups if not is_single(g)]
    )
    lengths, skips, total = _draw(rng, requests, align, min_bytes, cost)
    while total < min_bytes:
        requests = requests * min_bytes // max(total, 1) + 1
        lengths, skips, total = _draw(rng, requests, align, min_bytes, cost)
    drawn = list(zip(lengths, skips, strict=True))
    held = [[source_extent(g, src, t) for g in model.groups] for t, _ in drawn]
    due = [[destination_extent(g, src, dst, t, s) for g in model.groups] for t, s in drawn]
    src_tables, src_pools = _tables(src, held, rng)
    dst_tables, dst_pools = _tables(dst, due, rng)
    made = [
        Request(i, lengths[i], skips[i], src_tables[i], dst_tables[i]) for i in range(len(lengths))
    ]
    return Work(model, src, dst, seed, tuple(made), src_pools, dst_pools, total)


def _draw(
    rng: np.random.Generator, requests: int, align: int, min_bytes: int, cost: Cost
) -> tuple[list[int], list[int], int]:
    """Lengths and held prefixes, scaled until they move enough (or more would not help)."""
    weights = rng.lognormal(0.0, TOKENS_SPREAD, requests)
    prefixes = np.where(rng.random(requests) < SKIP_PART, rng.random(requests), 0.0)
    scale, before = 1.0, 0  # tokens of a request of middling length
    for _ in range(ROUNDS):
        lengths = np.maximum(1, np.ceil(weights * scale)).astype(np.int64)
        skips = (prefixes * lengths).astype(np.int64) // align * align
        skips = np.minimum(skips, (lengths - 1) // align * align)
        pairs = list(zip(lengths.tolist(), skips.tolist(), strict=True))
        total = sum(cost(*pair) for pair in pairs)
        if total >= min_bytes or total == before:
            break
        before = total
        scale *= 1.01 * min_bytes / max(total, 1)
    return [t for t, _ in pairs], [s for _, s in pairs], total


def _tables(
    shape: EngineShape, extents: list[list[Extent]], rng: np.random.Generator
) -> tuple[list[tuple[Ints, ...]], tuple[Ints, ...]]:
    """Scattered block ids for all requests, and the ids of each group's pool."""
    null = shape.null_block or 0
    groups = range(len(extents[0]))
    counts = np.asarray([[e.blocks - e.first_held for e in row] for row in extents])
    if shape.overlay:  # one pool for all groups
        pools = [_pool(int(counts.sum()), null)] * len(groups)
        taken = np.split(rng.permutation(pools[0])[: counts.sum()], np.cumsum(counts)[:-1])
        ids = [[taken[r * len(groups) + g] for g in groups] for r in range(len(extents))]
    else:
        pools = [_pool(int(counts[:, g].sum()), null) for g in groups]
        columns = []
        for g in groups:
            shuffled = rng.permutation(pools[g])[: counts[:, g].sum()]
            columns.append(np.split(shuffled, np.cumsum(counts[:, g])[:-1]))
        ids = [[columns[g][r] for g in groups] for r in range(len(extents))]
    tables = [
        tuple(
            np.concatenate((np.full(extent.first_held, null, dtype=np.int64), mine))
            for extent, mine in zip(row, row_ids, strict=True)
        )
        for row, row_ids in zip(extents, ids, strict=True)
    ]
    return tables, tuple(pools)


def _pool(needed: int, null: int) -> Ints:
    return np.arange(null + 1, null + 2 + needed + int(needed * SPARE_PART), dtype=np.int64)
