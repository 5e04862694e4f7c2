# SPDX-License-Identifier: Apache-2.0
"""The demo's input: a model, two shapes, and requests with block tables on both engines."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from kvferry.demo.cache import Extent, block_span, destination_extent, is_single, source_extent
from kvferry.errors import DescriptionError
from kvferry.layout.hf import load_model
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.shape import EngineShape
from kvferry.plan.pair import plan_pair
from kvferry.plan.report import needed_bytes
from kvferry.plan.tokens import moved

Ints = NDArray[np.int64]

DEMO_MODEL = "demo"
# Few numbers divide each other: 12 heads over tp 2 and 3, blocks of 16 and 24 tokens, 7 layers over
# 2 stages. The source keeps all blocks of the window (full=1). Otherwise it would drop blocks whose
# tokens the destination needs for its larger blocks, and the hand-over would refuse the pair.
DEMO_FROM = "tp=2,pp=2,block=16,order=LBNHC,full=1"
DEMO_TO = "tp=3,block=24,order=LBHNC"
SKIP_PART = 0.25  # share of requests with a prefix at the destination
SPARE_PART = 0.05  # share of blocks that belong to no request, and must not change
TOKENS_SPREAD = 1.0  # standard deviation of the logarithm of a request's length


def find_model(name: str) -> CacheModel:
    """A preset, a config.json, or the demo's own small model, which is hard to pair: 12 heads, 7
    layers, two kinds of attention."""
    if name != DEMO_MODEL:
        return load_model(name)
    kv = tuple(Component(name, 12, (128,), 2, content="bf16") for name in ("k", "v"))
    window = Residency("window", 128)
    return CacheModel(
        DEMO_MODEL, (Group("full", (0, 1, 3, 4, 6), kv), Group("window", (2, 5), kv, window))
    )


@dataclass(frozen=True, slots=True)
class DemoRequest:
    number: int
    tokens: int
    skip: int  # leading tokens that the destination already holds


@dataclass(frozen=True, slots=True, eq=False)
class DemoEngine:
    """One of the two engines, and its blocks as its scheduler would assign them."""

    shape: EngineShape
    tables: tuple[tuple[Ints, ...], ...]  # by request and group; dropped blocks have the null id
    pools: tuple[Ints, ...]  # by group: the ids that requests may use

    @property
    def blocks(self) -> int:
        return 1 + max(int(pool[-1]) for pool in self.pools)


@dataclass(frozen=True, slots=True, eq=False)
class DemoWork:
    model: CacheModel
    src: DemoEngine
    dst: DemoEngine
    seed: int
    requests: tuple[DemoRequest, ...]
    bytes: int  # that the destination ranks need


def make_work(
    model: CacheModel,
    src: EngineShape,
    dst: EngineShape,
    *,
    min_bytes: int,
    requests: int,
    seed: int,
) -> DemoWork:
    """Requests of varied lengths that together move at least `min_bytes`.

    Their number is `requests`, except for some models: large states allow fewer, and caches that do
    not grow with the tokens need more. Raises for pairs of shapes that the hand-over refuses.
    """
    if requests < 1 or min_bytes < 1:
        raise DescriptionError(f"expected requests and bytes, found {requests=}, {min_bytes=}")
    for shape in (src, dst):
        shape.require_possible(model)
    pair = plan_pair(model, src, dst)

    def cost(tokens: int, skip: int) -> int:
        """Bytes that all destination ranks need."""
        return sum(needed_bytes(pair, rank, tokens, skip) for rank in dst.ranks)

    align = lcm(
        *[block_span(g, dst) * g.tokens_per_entry for g in model.groups if not is_single(g)]
    )
    requests = max(1, min(requests, min_bytes // max(cost(1, 0), 1) + 1))
    median, total = 1.0, 0
    while total < min_bytes:
        rng = np.random.default_rng(seed)
        drawn = _draw(rng, requests, median, align)
        before, total = total, sum(cost(*one) for one in drawn)
        if total < 1.1 * before:  # longer requests hardly need more
            requests = requests * min_bytes // max(total, 1) + 1
        else:
            median *= 1.01 * min_bytes / max(total, 1)
    for tokens, skip in drawn:
        for group in model.groups:
            moved(group, src, dst, tokens, skip)  # raises if the source has dropped too much
    held = [[source_extent(g, src, t) for g in model.groups] for t, _ in drawn]
    due = [[destination_extent(g, src, dst, t, s) for g in model.groups] for t, s in drawn]
    made = tuple(DemoRequest(number, *one) for number, one in enumerate(drawn))
    return DemoWork(model, _engine(src, held, rng), _engine(dst, due, rng), seed, made, total)


def _draw(
    rng: np.random.Generator, requests: int, median: float, align: int
) -> list[tuple[int, int]]:
    """Lengths around a median, and prefixes that the destination holds."""
    lengths = np.ceil(median * rng.lognormal(0.0, TOKENS_SPREAD, requests)).astype(np.int64)
    prefixes = np.where(rng.random(requests) < SKIP_PART, rng.random(requests), 0.0)
    skips = np.minimum((prefixes * lengths).astype(np.int64), lengths - 1) // align * align
    return list(zip(lengths.tolist(), skips.tolist(), strict=True))


def _engine(
    shape: EngineShape, extents: list[list[Extent]], rng: np.random.Generator
) -> DemoEngine:
    """Scattered block ids for all requests."""
    null = shape.null_block or 0
    counts = np.asarray([[e.blocks - e.first_held for e in row] for row in extents])
    # With an overlay, all groups share one pool: one column of ids, request by request.
    columns = counts.reshape(-1, 1) if shape.overlay else counts
    pools, ids = [], []
    for column in columns.T:
        needed = int(column.sum())
        pool = np.arange(null + 1, null + 2 + needed + int(needed * SPARE_PART), dtype=np.int64)
        pools.append(pool)
        ids.append(np.split(rng.permutation(pool)[:needed], np.cumsum(column)[:-1]))
    groups = counts.shape[1]
    if shape.overlay:
        pools, ids = pools * groups, [ids[0][group::groups] for group in range(groups)]
    tables = tuple(
        tuple(
            np.concatenate((np.full(extent.first_held, null, dtype=np.int64), ids[group][number]))
            for group, extent in enumerate(row)
        )
        for number, row in enumerate(extents)
    )
    return DemoEngine(shape, tables, tuple(pools))
