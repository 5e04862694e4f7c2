"""Descriptions: what models cache, how shapes cut it, where ranks keep it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from known_configs import KNOWN, NEMOTRON, Config, Told
from kvferry import CacheModel, Component, EngineShape, Group, Rank, RankLayout, bind, plan_pair
from kvferry.errors import DescriptionError
from kvferry.layout import ORDERS, shard
from kvferry.layout.hf import load_model, model_from_config, presets
from kvferry.layout.placement import Region, TransferRegion
from kvferry.layout.shape import even_stages
from kvferry.layout.tensors import TensorView, layout_from_tensors


@given(st.integers(1, 200), st.integers(1, 64))
def test_shards_cover_all_units_evenly(units: int, parts: int) -> None:
    spans = [shard(units, parts, part) for part in range(parts)]
    assert {u for span in spans for u in range(*span)} == set(range(units))
    assert max(s.size for s in spans) - min(s.size for s in spans) <= 1
    if units < parts:
        assert [s.start for s in spans] == [p * units // parts for p in range(parts)]


def test_stages_give_the_remainder_to_those_before_the_last() -> None:
    assert even_stages(61, 4) == (15, 15, 16, 15)
    assert even_stages(5, 3) == (2, 2, 1)


def test_draft_tp_and_stage() -> None:
    model = load_model("llama-3.1-8b", draft_layers=1)
    draft = model.group("draft")
    shape = EngineShape(tp=4, pp=2, role_tp=(("draft", 1),))
    assert shape.layers(model, draft, 0) == () and shape.layers(model, draft, 1) == (0,)
    assert shape.units(draft, draft.components[0], 3) == (0, 8)
    assert shape.units(model.group("attention"), draft.components[0], 3) == (6, 8)


TEXTS = [
    "tp=4,pp=2,block=16,order=LBNHC",
    "tp=8,pp=30+50,block=32,order=LBHNC",
    "tp=8,dcp=2,interleave=4,draft_tp=1,block=16,block.window=32,order=LBHNC,align=512,overlay=1",
    "tp=1,block=64,kernel=16,kernel.window=32,order=LBNHC,interior=planes,interior.window=joined,conv=SD,full=1",
]


@pytest.mark.parametrize("text", TEXTS)
def test_shapes_are_written_as_they_are_read(text: str) -> None:
    assert EngineShape.parse(text).describe() == text


class TestHuggingFace:
    def test_presets_are_a_dozen_and_more(self) -> None:
        assert len(presets()) >= 12
        for name in presets():
            assert load_model(name).groups

    def test_bytes_of_a_token(self) -> None:
        assert load_model("llama-3.1-70b").token_bytes() == 80 * 2 * 8 * 128 * 2
        assert load_model("deepseek-v3").token_bytes() == 61 * 576 * 2
        assert load_model("llama-3.1-70b", cache_dtype="fp8_e4m3").token_bytes() == 80 * 2 * 8 * 128

    def test_windows_and_full_layers(self) -> None:
        gemma = load_model("gemma-3-27b")
        assert gemma.group("attention").layers[:2] == (5, 11)
        assert gemma.group("window").residency.span == 1024
        oss = load_model("gpt-oss-120b")
        assert oss.group("window").layers[:2] == (0, 2)
        assert [g.name for g in load_model("mistral-7b").groups] == ["window"]
        assert load_model("llama-4-maverick").group("chunk").residency.kind == "chunk"

    def test_states(self) -> None:
        bamba = load_model("bamba-9b").group("state")
        assert [c.name for c in bamba.components] == ["conv_x", "conv_B", "conv_C", "ssm"]
        assert bamba.component("conv_B").sharding == "replicated"
        qwen = load_model("qwen3-next-80b").group("state")
        assert [c.units for c in qwen.components] == [16, 16, 32, 32]
        assert load_model("jamba-1.5-mini").group("state").component("ssm").units == 8192

    def test_indexer_is_a_role_of_its_own(self) -> None:
        assert load_model("deepseek-v3.2").group("indexer").role == "indexer"

    @pytest.mark.parametrize(
        ("cache_dtype", "latent_bytes"),
        [("bfloat16", 1152), ("fp8", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)],
    )
    def test_latents_and_index_keys_of_every_cache_type(
        self, cache_dtype: str, latent_bytes: int
    ) -> None:
        model = load_model("deepseek-v3.2", cache_dtype=cache_dtype, draft_layers=1)
        sizes = {g.name: (len(g.layers), g.entry_bytes, g.role) for g in model.groups}
        assert sizes == {
            "mla": (61, latent_bytes, "target"),
            "indexer": (61, 132, "indexer"),
            "draft": (1, latent_bytes, "draft"),
            "draft.indexer": (1, 132, "draft"),
        }
        assert model.num_layers == 61
        assert all(c.sharding == "replicated" for g in model.groups for c in g.components)

    def test_a_draft_without_an_indexer_is_one_group(self) -> None:
        names = [g.name for g in load_model("deepseek-v3", draft_layers=1).groups]
        assert names == ["mla", "draft"]

    def test_packed_latents_are_of_one_size_and_of_no_other_attention(self) -> None:
        with pytest.raises(DescriptionError, match=r"is one of latents .*, not of 'k'"):
            load_model("llama-3.1-8b", cache_dtype="fp8_ds_mla")
        narrow = {**presets()["deepseek-v3.2"], "kv_lora_rank": 256}
        with pytest.raises(DescriptionError, match=r"\(512, 64\), found \(256, 64\)"):
            model_from_config(narrow, cache_dtype="fp8_ds_mla")
        few = {**presets()["deepseek-v3.2"], "index_head_dim": 64}
        with pytest.raises(DescriptionError, match="'scale': units and dims must be positive"):
            model_from_config(few)

    def test_from_a_file_a_folder_and_nested_text(self, tmp_path: Path) -> None:
        inner = presets()["gemma-3-27b"]
        config = {"model_type": "gemma3", "text_config": inner}
        (tmp_path / "config.json").write_text(json.dumps(config))
        by_folder = load_model(str(tmp_path))
        by_file = model_from_config(tmp_path / "config.json")
        assert by_folder.name == load_model(str(tmp_path / "config.json")).name == tmp_path.name
        assert by_folder.fingerprint() == by_file.fingerprint()
        assert by_file.fingerprint() == load_model("gemma-3-27b").fingerprint()

    def test_fingerprints_tell_formats_apart(self) -> None:
        prints = {
            load_model(name, cache_dtype=dtype).fingerprint()
            for name in ("llama-3.1-8b", "mistral-7b", "deepseek-v3")
            for dtype in ("bfloat16", "float16", "fp8_e4m3")
        }
        assert len(prints) == 9

    @pytest.mark.parametrize(("config", "told"), KNOWN.values(), ids=KNOWN)
    def test_known_models(self, config: Config, told: Told) -> None:
        groups = model_from_config(config).groups
        assert {
            g.name: (
                len(g.layers),
                g.residency.span,
                {c.name: (c.units, c.dims) for c in g.components},
            )
            for g in groups
        } == told

    def test_what_vllm_makes_of_mistrals_own_format(self) -> None:
        """It has no model_type; a window is on all layers, or as layer_types say."""
        config = {"model_type": "", "architectures": ["MistralForCausalLM"]}
        config |= {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8}
        config |= {"hidden_size": 5120, "head_dim": 128}
        (group,) = model_from_config(config).groups
        assert (group.name, group.components[0].dims) == ("attention", (128,))
        types = ["full_attention", *["sliding_attention"] * 3] * 10
        mixed = model_from_config({**config, "sliding_window": 32768, "layer_types": types})
        assert [len(g.layers) for g in mixed.groups] == [10, 30]
        large = {"architectures": ["MistralLarge3ForCausalLM"], "kv_lora_rank": 512}
        mla = model_from_config({**config, **large, "qk_rope_head_dim": 64})
        assert [g.name for g in mla.groups] == ["mla"]

    def test_a_file_that_is_no_configuration_of_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "params.json").write_text(json.dumps({"dim": 5120, "n_layers": 40}))
        with pytest.raises(DescriptionError, match="names no model_type; give"):
            load_model(str(tmp_path / "params.json"))

    def test_layers_with_an_indexer_of_their_own(self) -> None:
        def layers(name: str) -> tuple[int, ...]:
            return model_from_config(KNOWN[name][0]).group("indexer").layers

        assert layers("glm-5-shared") == (0, 1, 2, 6, 10)
        assert layers("glm-5-pattern") == (0, 1, 4, 8)
        short = {**KNOWN["glm-5-pattern"][0], "index_topk_pattern": "FSSS"}
        assert model_from_config(short).group("indexer").layers == (0, *range(4, 12))

    def test_heads_of_gemma_4s_full_layers(self) -> None:
        text = KNOWN["gemma-4-26b"][0]["text_config"]
        full = [5, 11, 17, 23, 29]

        def heads(**changes: Any) -> int:
            return model_from_config({**text, **changes}).group("attention").components[0].units

        def by_layer(layers: Iterable[int], **own: int) -> dict[str, dict[str, int]]:
            return {f"{i:02}": own for i in layers}  # as an engine writes it

        assert (heads(), heads(attention_k_eq_v=False)) == (2, 8)
        assert heads(per_layer_config=by_layer(full, head_dim=512, num_key_value_heads=4)) == 4
        mixed = by_layer(full[:4], head_dim=512) | by_layer(full[4:], head_dim=256)
        beyond = by_layer([4, *full], head_dim=512)
        for wrong in (mixed, beyond, by_layer(full[:4], head_dim=512)):
            with pytest.raises(DescriptionError, match="must have heads alike"):
                heads(per_layer_config=wrong)
        with pytest.raises(DescriptionError, match="must have heads alike"):
            heads(layer_types=None)

    def test_states_of_the_type_that_the_model_asks_for(self) -> None:
        def sizes(config: Config) -> list[int]:
            state = model_from_config(config).group("state")
            return [state.component(name).element_bytes for name in ("conv_x", "ssm")]

        assert sizes(NEMOTRON) == [2, 4]
        assert sizes({**NEMOTRON, "mamba_ssm_cache_dtype": "float16"}) == [2, 2]
        qwen = {**presets()["qwen3-next-80b"], "model_type": "qwen3_5_text"}
        nested = {"model_type": "qwen3_5", "text_config": {**qwen, "mamba_ssm_dtype": "float32"}}
        assert model_from_config(nested).group("state").component("ssm").element_bytes == 4

    def test_a_checkpoint_in_float32_is_served_in_bfloat16(self, tmp_path: Path) -> None:
        config = {**presets()["llama-3.1-8b"], "dtype": "float32"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_model(str(tmp_path)).groups[0].components[0].content == "bfloat16"
        asked = load_model(str(tmp_path), cache_dtype="float32")
        assert asked.groups[0].components[0].content == "float32"
        assert model_from_config(config).groups[0].components[0].content == "float32"

    @pytest.mark.parametrize(
        ("quantization", "content"),
        [
            ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
            (
                {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
                "fp8_e4m3",
            ),
            (
                {
                    "quant_method": "modelopt",
                    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
                },
                "fp8_e4m3",
            ),
            (
                {
                    "quant_method": "compressed-tensors",
                    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                },
                "fp8",
            ),
            ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bfloat16"),
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "bfloat16"),
        ],
        ids=str,
    )
    def test_a_checkpoint_that_says_how_its_cache_is_kept(
        self, quantization: Config, content: str
    ) -> None:
        config = {**presets()["llama-3.1-8b"], "quantization_config": quantization}
        model = model_from_config(config)
        assert {c.content for c in model.groups[0].components} == {content}
        own = model_from_config(config, cache_dtype="bfloat16")
        assert {c.content for c in own.groups[0].components} == {"bfloat16"}

    @pytest.mark.parametrize(
        ("method", "content"), [("compressed-tensors", "bfloat16"), ("modelopt", "fp8_e4m3")]
    )
    def test_scales_for_latents_count_only_where_vllm_uses_them(
        self, method: str, content: str
    ) -> None:
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
        quantization = {"quant_method": method, "kv_cache_scheme": scheme}
        config = {**presets()["deepseek-v2"], "quantization_config": quantization}
        (latent,) = model_from_config(config).groups[0].components
        assert latent.content == content

    def test_a_checkpoint_with_a_cache_that_is_not_known(self) -> None:
        quantization = {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}
        config = {**presets()["llama-3.1-8b"], "quantization_config": quantization}
        with pytest.raises(DescriptionError, match="'nvfp4' is not known"):
            model_from_config(config)


@pytest.mark.parametrize("order", ORDERS)
def test_placements_fill_their_region_without_overlap(order: str) -> None:
    """Every byte of a dense region belongs to exactly one element."""
    components = (Component("k", 4, (3,), 2), Component("v", 4, (5,), 2))
    model = CacheModel("m", (Group("attention", (0, 1, 2), components),))
    shape = EngineShape(tp=2, block_size=4, order=order)
    layout = RankLayout.build(model, shape, Rank(0, 1), num_blocks=3)
    (part,), (region,) = layout.parts, layout.regions
    times = np.zeros(region.bytes, dtype=int)
    for placement, component in zip(part.placements, components, strict=True):
        for row, block, slot, unit, dim in np.ndindex(3, 3, 4, 2, component.dims[0]):
            at = int(placement.offsets[row]) + block * placement.block_stride
            at += slot * placement.slot_stride + unit * placement.unit_stride
            at += dim * placement.dim_strides[0]
            times[at : at + 2] += 1
    assert (times == 1).all()


class TestTensors:
    """Layers at uneven distances, as an engine that packs several groups may leave them."""

    page = 4 * 4 * 2 * 3 * 2
    components = (Component("k", 4, (3,), 2), Component("v", 4, (3,), 2))
    model = CacheModel("m", (Group("attention", (0, 1, 2), components),))

    def layout(self, pages: tuple[int, ...], shape: EngineShape) -> RankLayout:
        view = {"shape": (2, 4, 4, 6), "strides": (8 * self.page // 2, 24, 6, 1)}
        tensors = {
            ("attention", i): [TensorView(0, at * self.page, element_bytes=2, **view)]
            for i, at in enumerate(pages)
        }
        region = Region("cache", 16 * self.page)
        return layout_from_tensors(self.model, shape, Rank(0, 0), [region], tensors)

    @pytest.mark.parametrize(("pages", "runs"), [((0, 1, 2), 1), ((0, 1, 3), 3)])
    def test_only_even_layers_become_one_run(self, pages: tuple[int, ...], runs: int) -> None:
        shape = EngineShape(block_size=4)
        layout = self.layout(pages, shape)
        pair = plan_pair(self.model, shape, shape)
        copies = bind(
            pair.plan(pair.edges[0], layout, layout),
            tokens=4,
            src_tables=[[1]],
            dst_tables=[[1]],
            src_bases=[0],
            dst_bases=[0],
        ).copies()
        assert len(copies) == runs and int(copies.length.sum()) == 3 * self.page
        starts = {(8 + page) * self.page for page in pages}
        assert set(copies.src.tolist()) == (starts if runs == 3 else {8 * self.page})

    def test_layers_of_two_tables_are_two_parts_of_one_pool(self) -> None:
        view = TensorView(0, 0, (2, 4, 4, 6), (96, 24, 6, 1), 2)
        keys = [("attention", i) for i in range(3)]
        layout = layout_from_tensors(
            self.model,
            EngineShape(block_size=4),
            Rank(0, 0),
            [Region("cache", 2 * self.page)],
            {key: [view] for key in keys},
            tables={key: i for i, key in enumerate(keys)},
        )
        assert [(p.table, p.pool) for p in layout.parts] == [(0, 0), (1, 0), (2, 0)]
        assert layout.tables == 3


class TestTransferRegions:
    """Where the blocks of each layer lie, as connectors of the field say it."""

    def regions(self, **shape: Any) -> tuple[TransferRegion, ...]:
        kv = tuple(Component(name, 4, (8,), 2) for name in "kv")
        model = CacheModel("m", (Group("attention", (0, 1), kv),))
        layout = RankLayout.build(model, EngineShape(**shape), Rank(0, 0), 5)
        bases = [1000 * (1 + n) for n in range(len(layout.regions))]
        layout.require_all_blocks(bases)
        return layout.transfer_regions(bases)

    def test_k_and_v_together(self) -> None:
        page = 16 * 4 * 2 * 8 * 2
        assert self.regions() == (
            TransferRegion(1000, page, page, 5),
            TransferRegion(1000 + 5 * page, page, page, 5),
        )

    def test_padding_is_not_used(self) -> None:
        first, _ = self.regions(page_align=3000)
        assert (first.block_len, first.kv_block_len) == (3000, 2048)

    def test_k_and_v_apart(self) -> None:
        found = self.regions(interior="split")
        assert [r.memory for r in found] == [0, 1, 0, 1]
        assert [r.base_addr for r in found] == [1000, 2000, 6120, 7120]
        assert {r.block_len for r in found} == {1024}

    @pytest.mark.parametrize("order", ORDERS)
    def test_every_order_has_all_its_blocks(self, order: str) -> None:
        assert len(self.regions(order=order)) == 2
