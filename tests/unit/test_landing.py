"""Where an edge lands: all of it, in no block of another request, as the receiver can say alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.errors import BindError
from kvferry.layout.model import CacheModel, Component, Group, Residency
from kvferry.layout.placement import RankLayout
from kvferry.layout.shape import EngineShape
from kvferry.plan import bind, plan_pair
from kvferry.plan.bind import landing, require_distinct_blocks

_kv = tuple(Component(name, 12, (16,), 2) for name in ("k", "v"))
MODELS = {
    "gqa": CacheModel("gqa", (Group("full", tuple(range(6)), _kv),)),
    "window": CacheModel(
        "window",
        (
            Group("full", (0, 2, 4), _kv),
            Group("window", (1, 3, 5), _kv, Residency("window", 40)),
        ),
    ),
    "mla": CacheModel(
        "mla",
        (Group("latent", tuple(range(5)), (Component("l", 1, (72,), 2, "replicated"),)),),
    ),
}
PAIRS = [
    ("gqa", "tp=1,block=16", "tp=2,block=16"),
    ("gqa", "tp=3,block=16,order=LBNHC", "tp=4,block=24,order=LBHNC"),
    ("gqa", "tp=2,block=16", "tp=3,block=24,order=LHBNC"),
    ("gqa", "tp=2,pp=2,block=32", "tp=3,pp=3,block=16,order=BLNHC,interior=split"),
    ("gqa", "tp=4,block=16", "tp=1,block=32,order=BLHNC"),
    ("window", "tp=2,block=16", "tp=1,pp=2,block=16"),
    ("mla", "tp=3,block=16", "tp=4,block=24"),
    ("mla", "tp=2,dcp=2,block=16,interleave=4", "tp=1,block=16"),
]
BLOCKS = 64


def marked(ranges: tuple[np.ndarray, np.ndarray], size: int) -> np.ndarray:
    """Which bytes are in any of these ranges."""
    found = np.zeros(size, dtype=bool)
    for address, length in zip(*(a.tolist() for a in ranges), strict=True):
        found[address : address + length] = True
    return found


@pytest.mark.parametrize(("model", "src", "dst"), PAIRS, ids=str)
def test_a_landing_has_every_byte_of_its_edge_and_no_other_request(
    model: str, src: str, dst: str
) -> None:
    shapes = EngineShape.parse(src), EngineShape.parse(dst)
    pair = plan_pair(MODELS[model], *shapes)
    tokens, skip, tables = 150, 48, len(MODELS[model].groups)
    rng = np.random.default_rng(3)
    ids = 1 + rng.permutation(BLOCKS - 1)
    # ids of one pool: a request's tables have nothing in common, nor have two requests
    mine, other = ([ids[n::4].copy() for n in range(k, k + tables)] for k in (0, 2))
    for edge in pair.edges:
        a = RankLayout.build(MODELS[model], shapes[0], edge.src, BLOCKS)
        b = RankLayout.build(MODELS[model], shapes[1], edge.dst, BLOCKS)
        starts = np.cumsum([0, *(region.bytes for region in b.regions)])
        plan = pair.plan(edge, a, b)
        for cut in (0, skip):
            bound = bind(
                plan,
                tokens=tokens,
                skip=cut,
                src_tables=[rng.permutation(BLOCKS - 1) + 1 for _ in range(tables)],
                dst_tables=mine,
                src_bases=np.zeros(len(a.regions), dtype=np.int64),
                dst_bases=starts[:-1],
            )
            land, theirs = (
                landing(plan, tokens=tokens, skip=cut, dst_tables=t, dst_bases=starts[:-1])
                for t in (mine, other)
            )
            copies = bound.copies()
            written = marked((copies.dst, copies.length), int(starts[-1]))
            opened = marked((land.address, land.length), int(starts[-1]))
            assert land.bytes == bound.bytes == written.sum()
            assert not (written & ~opened).any()
            assert not (opened & marked((theirs.address, theirs.length), int(starts[-1]))).any()


def test_a_block_in_two_tables_is_seen_whichever_sources_write_it() -> None:
    """Two overlaid groups, each from a stage of its own: no edge has both tables."""
    model = CacheModel(
        "halves",
        (
            Group("full", (0, 1), _kv),
            Group("window", (2, 3), _kv, Residency("window", 40)),
        ),
    )
    src, dst = EngineShape.parse("pp=2,block=16"), EngineShape.parse("tp=1,block=16")
    dst = replace(dst, overlay=True)
    pair = plan_pair(model, src, dst)
    layout = RankLayout.build(model, dst, dst.ranks[0], 32)
    assert len({part.pool for part in layout.parts}) == 1
    good = [[1, 2, 3, 4], [0, 6, 7, 8]]
    shared = [[1, 2, 3, 4], [0, 6, 3, 8]]
    for edge in pair.edges:  # each alone sees nothing wrong
        plan = pair.plan(edge, RankLayout.build(model, src, edge.src, 32), layout)
        assert len({piece.dst.table for piece in plan.pieces}) == 1
        landing(plan, tokens=64, dst_tables=shared, dst_bases=[0] * len(layout.regions))
    require_distinct_blocks(model, layout, src, tokens=64, dst_tables=good)
    with pytest.raises(BindError, match="destination block 3 appears twice in block tables"):
        require_distinct_blocks(model, layout, src, tokens=64, dst_tables=shared)
    # the null block is nobody's, and blocks that are skipped are not written
    holes = [[1, 2, 0, 4], [0, 0, 7, 8]]
    require_distinct_blocks(model, layout, src, tokens=64, dst_tables=holes)
    skipped = [[6, 2, 3, 4], [0, 6, 7, 8]]
    require_distinct_blocks(model, layout, src, tokens=64, skip=16, dst_tables=skipped)
    apart = replace(layout, parts=tuple(replace(p, pool=p.table) for p in layout.parts))
    require_distinct_blocks(model, apart, src, tokens=64, dst_tables=shared)


@pytest.mark.parametrize("null", [0, 1, None])
def test_a_landing_does_not_depend_on_which_block_of_the_source_is_null(null: int | None) -> None:
    src, dst = EngineShape(null_block=null), EngineShape()
    pair = plan_pair(MODELS["gqa"], src, dst)
    edge = pair.edges[0]
    a = RankLayout.build(MODELS["gqa"], src, edge.src, 2)
    b = RankLayout.build(MODELS["gqa"], dst, edge.dst, 2)
    land = landing(pair.plan(edge, a, b), tokens=16, dst_tables=[[1]], dst_bases=[0])
    assert land.bytes == 16 * MODELS["gqa"].token_bytes()
