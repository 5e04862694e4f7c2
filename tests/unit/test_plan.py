"""Plans: who talks to whom, how evenly, how few runs, and that both sides agree."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvferry import (
    Bound,
    CacheModel,
    Component,
    Copies,
    EngineShape,
    Group,
    RankLayout,
    bind,
    plan_pair,
)
from kvferry.errors import CoverError
from kvferry.layout.hf import load_model, presets
from kvferry.plan import everything_plan, uncovered
from kvferry.plan.assign import meet
from kvferry.plan.cover import require_exact_cover
from kvferry.plan.report import report, synthetic_tables
from plan_digest import digest

SHAPES = [
    "tp=1,block=16",
    "tp=3,block=24",
    "tp=4,pp=2,block=16,order=LBNHC",
    "tp=8,block=48,order=BLHNC",
    "tp=6,pp=3,block=32,order=LHBNC",
    "tp=16,block=16",
]


def bind_first(
    model: CacheModel,
    src: EngineShape,
    dst: EngineShape,
    tokens: int,
    scattered: bool,
) -> Bound:
    pair = plan_pair(model, src, dst)
    edge = pair.edges[0]
    src_tables, src_blocks = synthetic_tables(model, src, tokens, scattered, 1)
    dst_tables, dst_blocks = synthetic_tables(model, dst, tokens, scattered, 2)
    a = RankLayout.build(model, src, edge.src, src_blocks)
    b = RankLayout.build(model, dst, edge.dst, dst_blocks)
    return bind(
        pair.plan(edge, a, b),
        tokens=tokens,
        src_tables=src_tables,
        dst_tables=dst_tables,
        src_bases=np.zeros(len(a.regions), dtype=np.int64),
        dst_bases=np.zeros(len(b.regions), dtype=np.int64),
    )


@pytest.mark.parametrize("name", presets())
def test_every_preset_between_unlike_shapes(name: str) -> None:
    """What moves is exactly what the destination needs, evenly spread."""
    model = load_model(name)
    for src, dst in [("tp=4,pp=2,block=48", "tp=8,block=32"), ("tp=8,block=32", "tp=3,pp=3")]:
        result = report(model, EngineShape.parse(src), EngineShape.parse(dst), 5000)
        assert result.total_bytes == result.lower_bound_bytes > 0
        assert result.imbalance < 1.51, (name, src, dst)


class TestReplicas:
    @pytest.mark.parametrize(("src", "dst"), list(product((1, 2, 3, 4, 8, 16), repeat=2)))
    def test_mla_load_is_even_and_partners_few(self, src: int, dst: int) -> None:
        model = load_model("deepseek-v3")
        pair = plan_pair(model, EngineShape(tp=src), EngineShape(tp=dst))
        load = Counter[int]()
        for edge in pair.edges:
            load[edge.src.tp] += sum(len(share.layers) for share in edge.shares)
        assert len(load) == min(src, 61 * dst)
        assert max(load.values()) - min(load.values()) <= 1
        assert len(pair.edges) <= src + dst - 1

    def test_replicated_heads_are_shared_out(self) -> None:
        model = load_model("qwen3-235b-a22b")  # 4 kv heads
        pair = plan_pair(model, EngineShape(tp=16), EngineShape(tp=2))
        load: dict[int, int] = defaultdict(int)
        for edge in pair.edges:
            load[edge.src.tp] += sum(len(s.layers) * s.units.size for s in edge.shares)
        assert set(load) == set(range(16))
        assert max(load.values()) - min(load.values()) <= 1

    def test_small_replicated_parts_open_no_connections(self) -> None:
        model = load_model("bamba-9b")
        with_shared = plan_pair(model, EngineShape(tp=8), EngineShape(tp=2, pp=2))
        state = model.group("state")
        split = replace(
            state,
            components=tuple(c for c in state.components if c.sharding == "split"),
        )
        without = plan_pair(
            replace(model, groups=(model.group("attention"), split)),
            EngineShape(tp=8),
            EngineShape(tp=2, pp=2),
        )
        assert len(with_shared.edges) == len(without.edges)


class TestCoalescing:
    model = load_model("llama-3.1-8b")

    @pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
    def test_contiguous_blocks_of_equal_shapes_are_one_run_a_layer(self, order: str) -> None:
        shape = EngineShape(tp=2, order=order)
        assert bind_first(self.model, shape, shape, 4096, scattered=False).descriptors == 32

    @pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC"])
    def test_block_outermost_is_one_run_in_all(self, order: str) -> None:
        shape = EngineShape(tp=2, order=order)
        assert bind_first(self.model, shape, shape, 4096, scattered=False).descriptors == 1
        assert bind_first(self.model, shape, shape, 4096, scattered=True).descriptors == 256

    def test_padding_is_carried_along(self) -> None:
        shape = EngineShape(tp=2, page_align=24_000)
        assert bind_first(self.model, shape, shape, 4096, scattered=False).descriptors == 32

    def test_padding_of_one_side_alone_is_not_carried_along(self) -> None:
        """A page may be followed by its padding on one side, and by another layer on the other."""
        kv = tuple(Component(name, 2, (8,), 2) for name in "kv")
        model = CacheModel("m", (Group("all", (0, 1), kv),))
        page = 16 * model.groups[0].entry_bytes
        padded, layers_inside = EngineShape(page_align=2 * page), EngineShape(order="BLHNC")
        for src, dst in ((padded, layers_inside), (layers_inside, padded)):
            bound = bind_first(model, src, dst, 64, scattered=True)
            assert bound.bytes == 64 * model.token_bytes()

    def test_heads_outside_blocks_merge_blocks(self) -> None:
        src, dst = EngineShape(tp=2, order="LHBNC"), EngineShape(tp=4, order="LHBNC")
        bound = bind_first(self.model, src, dst, 4096, scattered=False)
        assert bound.descriptors == 32 * 2  # a head each, all blocks in one run

    def test_token_major_has_no_more_strided_runs_than_head_major(self) -> None:
        entries = {}
        for order in ("LBHNC", "LBNHC"):
            src, dst = EngineShape(tp=4, order=order), EngineShape(tp=8, order=order)
            entries[order] = bind_first(self.model, src, dst, 8192, scattered=True).entries
        assert entries["LBNHC"] <= entries["LBHNC"]

    def test_kernel_blocks_that_do_not_divide_each_other(self) -> None:
        src = EngineShape(tp=2, block_size=12, kernel_block_size=3)
        dst = EngineShape(tp=2, block_size=12, kernel_block_size=2)
        bound = bind_first(self.model, src, dst, 120, scattered=True)
        assert bound.bytes == 120 * 131072 // 2

    def test_equal_tiled_interiors_move_whole_blocks(self) -> None:
        for interior in ("cpu", "cpu_amx"):
            shape = EngineShape(tp=2, block_size=32, interior=interior)
            bound = bind_first(self.model, shape, shape, 4096, scattered=False)
            per_block_and_layer = bound.descriptors / 32 / 128
            assert per_block_and_layer <= 4 * 2, interior  # K and V of each head at the most


class TestBinding:
    model = load_model("gemma-3-27b")

    def test_slices_and_strides_say_the_same_as_copies(self) -> None:
        src, dst = EngineShape(tp=4, order="LBNHC"), EngineShape(tp=8, block_size=24)
        bound = bind_first(self.model, src, dst, 3000, scattered=True)
        whole = bound.copies()
        assert len(whole) == bound.descriptors and int(whole.length.sum()) == bound.bytes
        for most in (1000, 4097, 10**7):
            parts = list(bound.slices(most))
            assert max(len(p) for p in parts) <= most
            for field in ("src", "dst", "length"):
                joined = np.concatenate([getattr(p, field) for p in parts])
                assert np.array_equal(joined, getattr(whole, field))
        strided = []
        for batch in bound.batches:
            starts = batch.src_rows[:, None] + batch.src_segments[None, :]
            strided.append((starts[..., None] + batch.src_steps).reshape(-1))
        assert np.array_equal(np.concatenate(strided), whole.src)

    def test_a_buffer_is_reused(self) -> None:
        src, dst = EngineShape(tp=4), EngineShape(tp=8)
        bound = bind_first(self.model, src, dst, 3000, scattered=True)
        buffer = Copies.empty(bound.descriptors + 10)
        assert bound.copies(buffer).src.base is buffer.src.base

    def test_a_prefix_is_skipped(self) -> None:
        model = load_model("llama-3.1-8b")
        shape = EngineShape(tp=2)
        whole = report(model, shape, shape, 4096).total_bytes
        assert report(model, shape, shape, 4096, skip=1024).total_bytes * 4 == whole * 3
        assert report(model, shape, shape, 4096, skip=4096).total_bytes == 0

    def test_states_are_never_skipped(self) -> None:
        model = load_model("falcon-mamba-7b")
        shape = EngineShape(tp=2)
        whole = report(model, shape, shape, 4096).total_bytes
        assert report(model, shape, shape, 4096, skip=4096).total_bytes == whole > 0


class TestUncovered:
    def test_the_tail_of_the_last_block_is_named(self) -> None:
        model = load_model("llama-3.1-8b")
        shape = EngineShape(tp=4)
        layout = RankLayout.build(model, shape, shape.ranks[1], 8)
        rest = uncovered(
            everything_plan(model, layout),
            shape,
            tokens=37,
            dst_tables=[[4, 2, 6]],
            dst_bases=[1000],
        )
        assert rest.bytes == 32 * (48 - 37) * 2 * 2 * 128 * 2
        (part,) = layout.parts
        block = part.placements[0].block_stride
        first_layer = rest.address[rest.address < 1000 + 8 * block]
        assert ((first_layer - 1000) // block == 6).all()


class TestAgreement:
    PROGRAM = """
import sys
from kvferry import EngineShape, RankLayout, plan_pair
from kvferry.layout.hf import load_model
from plan_digest import digest
model = load_model("granite-4.0-h-small")
src, dst = EngineShape.parse(sys.argv[1]), EngineShape.parse(sys.argv[2])
pair = plan_pair(model, src, dst)
for edge in pair.edges:
    a = RankLayout.build(model, src, edge.src, 64)
    b = RankLayout.build(model, dst, edge.dst, 64)
    print(*edge.src, *edge.dst, digest(pair.plan(edge, a, b)))
"""

    def test_two_processes_find_the_same_plans(self) -> None:
        command = [sys.executable, "-c", self.PROGRAM, "tp=8,block=48", "tp=3,pp=2,block=32"]
        outputs = {
            subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
                timeout=300,
            ).stdout
            for seed in ("0", "1")
        }
        assert len(outputs) == 1
        lines = outputs.pop().splitlines()
        assert len(lines) >= 12 and len({line.split()[-1] for line in lines}) == len(lines)

    def test_digests_tell_plans_apart(self) -> None:
        model = load_model("llama-3.1-8b")
        digests = set()
        for text in SHAPES:
            shape = EngineShape.parse(text)
            pair = plan_pair(model, EngineShape(), shape)
            edge = pair.edges[0]
            a = RankLayout.build(model, EngineShape(), edge.src, 64)
            b = RankLayout.build(model, shape, edge.dst, 64)
            digests.add(digest(pair.plan(edge, a, b)))
        assert len(digests) == len(SHAPES)


class TestExactCover:
    model = load_model("llama-3.1-8b")
    src, dst = EngineShape(tp=3, pp=2), EngineShape(tp=4)

    def test_a_missing_edge_is_refused(self) -> None:
        edges = plan_pair(self.model, self.src, self.dst).edges
        with pytest.raises(CoverError, match="0 times; expected 1"):
            require_exact_cover(self.model, self.src, self.dst, edges[1:])

    def test_a_doubled_edge_is_refused(self) -> None:
        edges = plan_pair(self.model, self.src, self.dst).edges
        with pytest.raises(CoverError, match="2 times; expected 1"):
            require_exact_cover(self.model, self.src, self.dst, [*edges, edges[0]])


def test_edges_are_known_from_shapes_alone() -> None:
    pair = plan_pair(load_model("llama-3.1-70b"), EngineShape(tp=3), EngineShape(tp=8))
    for rank in pair.dst.ranks:
        assert [pair.edge(src, rank).dst for src in pair.sources(rank)] == [rank] * len(
            pair.sources(rank)
        )


def test_dcp_ranks_that_share_a_token() -> None:
    for src, dst in product(product(range(1, 6), range(1, 7)), repeat=2):
        tokens = np.arange(math.lcm(math.prod(src), math.prod(dst)))
        ours, theirs = (tokens // interleave % dcp for dcp, interleave in (src, dst))
        together = set(zip(ours.tolist(), theirs.tolist(), strict=True))
        for a, b in product(range(src[0]), range(dst[0])):
            assert meet(*src, a, *dst, b) == ((a, b) in together)
