"""Every refusal: the right error, before a byte moves, with both values and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry import (
    CacheModel,
    Component,
    EngineShape,
    Group,
    Rank,
    RankLayout,
    Residency,
    bind,
    plan_pair,
)
from kvferry.errors import (
    BindError,
    CoverError,
    DescriptionError,
    IncompatibleError,
    KvferryError,
)
from kvferry.layout.hf import load_model, model_from_config
from kvferry.layout.placement import Region
from kvferry.layout.tensors import TensorView, layout_from_tensors


def gqa(heads: int = 4, layers: int = 2, dim: int = 8, content: str = "bf16") -> CacheModel:
    components = tuple(Component(name, heads, (dim,), 2, content=content) for name in "kv")
    return CacheModel("gqa", (Group("attention", tuple(range(layers)), components),))


def bound(
    model: CacheModel, src: EngineShape, dst: EngineShape, blocks: int = 8, **request: Any
) -> Any:
    pair = plan_pair(model, src, dst)
    edge = pair.edges[0]
    layouts = [
        RankLayout.build(model, shape, rank, blocks)
        for shape, rank in ((src, edge.src), (dst, edge.dst))
    ]
    defaults: dict[str, Any] = {
        "tokens": 40,
        "src_tables": [[1, 2, 3]] * len(model.groups),
        "dst_tables": [[3, 2, 1]] * len(model.groups),
        "src_bases": [0] * 4,
        "dst_bases": [0] * 4,
    }
    return bind(pair.plan(edge, *layouts), **(defaults | request))


def says(error: pytest.ExceptionInfo[KvferryError], *words: str) -> None:
    for word in words:
        assert word in str(error.value), str(error.value)


class TestIncompatibleModels:
    @pytest.mark.parametrize(
        ("other", "words"),
        [
            (gqa(dim=16), ["dims", "(8,)", "(16,)"]),
            (gqa(heads=8), ["units", "4", "8"]),
            (gqa(content="fp8_e4m3"), ["content", "bf16", "fp8_e4m3"]),
            (gqa(layers=3), ["layers", "[2]"]),
            (load_model("deepseek-v3"), ["'attention'", "no such group"]),
        ],
    )
    def test_both_values_are_named(self, other: CacheModel, words: list[str]) -> None:
        with pytest.raises(IncompatibleError) as error:
            plan_pair(gqa(), EngineShape(), EngineShape(), dst_model=other)
        says(error, *words, "source", "destination")

    def test_window_of_another_size(self) -> None:
        def windowed(span: int) -> CacheModel:
            (group,) = gqa().groups
            return CacheModel("w", (replace(group, residency=Residency("window", span)),))

        with pytest.raises(IncompatibleError) as error:
            plan_pair(windowed(64), EngineShape(), EngineShape(), dst_model=windowed(128))
        says(error, "residency", "64", "128")

    def test_draft_layers_on_one_side_are_refused_unless_optional(self) -> None:
        draft = replace(gqa().groups[0], name="draft", role="draft")
        with_draft = CacheModel("gqa", (*gqa().groups, draft))
        with pytest.raises(IncompatibleError) as error:
            plan_pair(gqa(), EngineShape(), EngineShape(), dst_model=with_draft)
        says(error, "draft", "one side only")
        pair = plan_pair(
            gqa(),
            EngineShape(tp=2),
            EngineShape(),
            dst_model=with_draft,
            optional_roles=["draft"],
        )
        assert [g.name for g in pair.model.groups] == ["attention"]


class TestOpaquePages:
    opaque = EngineShape(interior="opaque")

    def test_identical_pages_move_whole(self) -> None:
        copies = bound(gqa(), self.opaque, self.opaque).copies()
        assert set(copies.length.tolist()) == {2 * 4 * 16 * 8 * 2}

    @pytest.mark.parametrize(
        "other",
        [
            EngineShape(interior="opaque", tp=2),
            EngineShape(interior="opaque", block_size=32),
            EngineShape(interior="joined"),
        ],
    )
    def test_anything_else_is_refused(self, other: EngineShape) -> None:
        with pytest.raises(IncompatibleError) as error:
            bound(gqa(), self.opaque, other)
        says(error, "unknown", "identical pages", "name the interior")


class TestDescriptions:
    def test_unknown_interior(self) -> None:
        with pytest.raises(DescriptionError) as error:
            RankLayout.build(gqa(), EngineShape(interior="shuffled"), Rank(0, 0), 4)
        says(error, "'shuffled'", "joined", "opaque")

    def test_interior_that_its_order_does_not_have(self) -> None:
        with pytest.raises(DescriptionError) as error:
            RankLayout.build(gqa(), EngineShape(interior="cpu", order="LBNHC"), Rank(0, 0), 4)
        says(error, "cpu", "LBNHC", "LBHNC")

    @pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
    def test_padding_where_heads_lie_outside_the_page(self, order: str) -> None:
        with pytest.raises(DescriptionError) as error:
            RankLayout.build(gqa(), EngineShape(order=order, page_align=4096), Rank(0, 0), 4)
        says(error, order, "page_align")

    def test_kernel_blocks_in_another_order(self) -> None:
        with pytest.raises(DescriptionError) as error:
            EngineShape(order="BLHNC", kernel_block_size=8)
        says(error, "LBHNC", "BLHNC")

    @pytest.mark.parametrize(
        ("text", "word"),
        [("tp=x", "whole number"), ("tp", "tp=4"), ("order=NHD", "LBHNC"), ("speed=1", "tp=4")],
    )
    def test_shapes_that_cannot_be_read(self, text: str, word: str) -> None:
        with pytest.raises(DescriptionError) as error:
            EngineShape.parse(text)
        says(error, word)

    def test_stages_that_do_not_add_up(self) -> None:
        with pytest.raises(DescriptionError) as error:
            plan_pair(gqa(), EngineShape(pp=2, stages=(1, 5)), EngineShape())
        says(error, "(1, 5)", "6 layers", "has 2")

    def test_unknown_architecture(self) -> None:
        with pytest.raises(DescriptionError) as error:
            model_from_config({"model_type": "llama5", "num_hidden_layers": 2})
        says(error, "'llama5'", "llama4", "by hand")
        assert len(str(error.value)) < 200  # not every name

    def test_unknown_model_name(self) -> None:
        with pytest.raises(DescriptionError) as error:
            load_model("gpt-17")
        says(error, "gpt-17", "llama-3.1-70b")

    def test_tensor_that_contradicts_its_interior(self) -> None:
        view = TensorView(0, 0, (4, 4, 16, 8), (512, 128, 8, 1), 2)
        with pytest.raises(DescriptionError) as error:
            layout_from_tensors(
                gqa(layers=1),
                EngineShape(),
                Rank(0, 0),
                [Region("r", 4096)],
                {("attention", 0): [view]},
            )
        says(error, "layer 0", "joined", "32", "16")

    def test_tensor_missing(self) -> None:
        with pytest.raises(DescriptionError) as error:
            layout_from_tensors(gqa(), EngineShape(), Rank(0, 0), [Region("r", 1)], {})
        says(error, "[0, 1]", "[]")

    view = TensorView(0, 0, (4, 4, 16, 8), (512, 128, 8, 1), 2)

    def test_tensor_of_no_group(self) -> None:
        with pytest.raises(DescriptionError) as error:
            layout_from_tensors(
                gqa(layers=1),
                EngineShape(),
                Rank(0, 0),
                [Region("r", 4096)],
                {("atention", 0): [self.view]},
            )
        says(error, "['attention']", "['atention']", "as the model does")

    def test_opaque_block_in_two_places(self) -> None:
        shape = EngineShape(interior="opaque", block_size=32, kernel_block_size=16)
        apart = TensorView(0, 0, (8, 1, 1, 2048), (4096, 2048, 2048, 1), 1)
        with pytest.raises(DescriptionError) as error:
            layout_from_tensors(
                gqa(layers=1),
                shape,
                Rank(0, 0),
                [Region("r", 8 * 4096)],
                {("attention", 0): [apart]},
            )
        says(error, "layer 0", "opaque", "kernel blocks", "2048", "4096")


class TestRequests:
    shape = EngineShape()

    def refused(self, **request: Any) -> pytest.ExceptionInfo[KvferryError]:
        with pytest.raises(BindError) as error:
            bound(gqa(), self.shape, self.shape, **request)
        return error

    def test_source_table_too_short(self) -> None:
        says(
            self.refused(src_tables=[[1, 2]]), "source", "too short", "block number 2", "2 entries"
        )

    def test_destination_table_too_short(self) -> None:
        says(self.refused(dst_tables=[[1]]), "destination", "too short")

    def test_missing_table(self) -> None:
        says(self.refused(src_tables=[]), "table number 0", "only 0 tables")

    def test_id_out_of_range(self) -> None:
        says(self.refused(src_tables=[[1, 8, 2]]), "block 8", "0 to 7")
        says(self.refused(dst_tables=[[1, -1, 2]]), "block -1", "0 to 7")

    def test_repeated_destination(self) -> None:
        says(self.refused(dst_tables=[[1, 2, 1]]), "block 1", "twice")

    def test_repeated_source_is_a_shared_prefix_and_fine(self) -> None:
        assert bound(gqa(), self.shape, self.shape, src_tables=[[1, 2, 1]]).bytes > 0

    def test_null_blocks(self) -> None:
        says(self.refused(src_tables=[[1, 0, 2]]), "hole", "block number 1", "dropped")
        says(self.refused(dst_tables=[[0, 1, 2]]), "hole", "block number 0", "allocate")

    def test_no_null_block(self) -> None:
        shape = EngineShape(null_block=None)
        assert bound(gqa(), shape, shape, src_tables=[[0, 1, 2]], dst_tables=[[0, 1, 2]]).bytes

    def test_tokens_and_skip(self) -> None:
        says(self.refused(tokens=0), "tokens")
        says(self.refused(skip=41), "skip")

    def test_too_few_bases(self) -> None:
        says(self.refused(src_bases=[]), "source", "base addresses")

    def test_small_buffer(self) -> None:
        from kvferry import Copies

        result = bound(gqa(), self.shape, self.shape)
        with pytest.raises(BindError) as error:
            result.copies(Copies.empty(1))
        says(error, "holds 1", "slices")

    def test_overlaid_groups_may_not_share_a_block(self) -> None:
        (group,) = gqa().groups
        model = CacheModel("two", (group, replace(group, name="second", layers=(2, 3))))
        shape = EngineShape(overlay=True)
        with pytest.raises(BindError) as error:
            bound(model, shape, shape, dst_tables=[[1, 2, 3], [4, 5, 3]])
        says(error, "block 3", "twice", "[0, 1]")
        assert bound(model, shape, shape, dst_tables=[[1, 2, 3], [4, 5, 6]]).bytes
        apart = EngineShape()
        assert bound(model, apart, apart, dst_tables=[[1, 2, 3], [1, 2, 3]]).bytes


class TestCover:
    def test_dcp_among_ranks_with_other_heads(self) -> None:
        with pytest.raises(CoverError) as error:
            plan_pair(gqa(heads=4), EngineShape(tp=4, dcp=2), EngineShape())
        says(error, "dcp", "heads 0", "tp=4,dcp=2")

    def test_window_whose_head_was_dropped(self) -> None:
        (group,) = gqa().groups
        model = CacheModel("w", (replace(group, residency=Residency("window", 24)),))
        src, dst = EngineShape(block_size=16), EngineShape(block_size=64)
        tables = {"src_tables": [np.arange(1, 9)], "dst_tables": [[1, 2]]}
        with pytest.raises(BindError) as error:
            bound(model, src, dst, blocks=16, tokens=120, **tables)
        says(error, "keeps those from 96 on", "from token 64 on", "full=1")
        assert bound(model, src, dst, blocks=16, tokens=120, allow_uncacheable=True, **tables).bytes
