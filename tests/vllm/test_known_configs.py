"""A config.json and what an engine makes of it describe the same cache."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from typing import Any

import pytest

from known_configs import KNOWN, Config
from kvferry.layout.hf import FAMILIES, model_from_config

transformers = pytest.importorskip("transformers", reason="in the environment with vLLM")
pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

REMOTE = {"kimi_k2"}  # its class is not in transformers


def read(config: Config) -> Any:
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    return made.get_text_config()


@pytest.mark.parametrize("config", [config for config, _ in KNOWN.values()], ids=KNOWN)
def test_an_engine_describes_the_same(config: Config) -> None:
    by_engine = model_from_config({**read(config).to_dict(), "dtype": "bfloat16"})
    by_file = model_from_config(config)
    assert by_engine.fingerprint() == by_file.fingerprint()


@pytest.mark.parametrize("config", [config for config, _ in KNOWN.values()], ids=KNOWN)
def test_heads_are_those_that_vllm_counts(config: Config) -> None:
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    text = read(config)
    for group in model_from_config(config).groups:
        alike = not getattr(text, "is_heterogeneous", False)
        own = text if alike else text.per_layer_config[group.layers[0]]
        vllm = ModelArchConfigConvertorBase(own, own)
        if group.components[0].name == "k":
            assert group.components[0].units == vllm.get_total_num_kv_heads()
            assert group.components[0].dims == (vllm.get_head_size(),)
        elif group.name == "mla":
            assert group.components[0].dims == (vllm.get_head_size(),)


def test_mistrals_own_format() -> None:
    from vllm.transformers_utils.configs.mistral import adapt_config_dict

    params = {"dim": 4096, "n_layers": 36, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}
    plain = adapt_config_dict(dict(params), {}).get_text_config()
    (group,) = model_from_config(plain.to_dict()).groups
    assert (group.name, group.components[0].units) == ("attention", 8)
    windows = [None, 32768, 32768, 32768]
    vision = {"sliding_window": windows, "vision_encoder": {"hidden_size": 1024}}
    mixed = adapt_config_dict({**params, **vision}, {}).get_text_config()
    groups = model_from_config(mixed.to_dict()).groups
    assert [(g.name, len(g.layers)) for g in groups] == [("attention", 9), ("window", 27)]


@pytest.mark.parametrize("family", sorted({*FAMILIES} - REMOTE))
def test_what_a_configuration_leaves_out(family: str) -> None:
    """Our table has what the class fills in, wherever that is not what the reader would assume."""
    table = json.loads(files("kvferry.layout").joinpath("defaults.json").read_text())
    ours = table.get(family.removesuffix("_text"), {})
    made = transformers.CONFIG_MAPPING[family]().get_text_config().to_dict()
    patterns = {"sliding_window_pattern"}  # some classes make layer_types of them and forget them
    for name in {*ours} - patterns:
        assert ours[name] == made[name], name
    spans = ("sliding_window", "attention_chunk_size")
    for name in (*spans, "index_head_dim", "num_kv_shared_layers"):
        assert ours.get(name) == (made.get(name) or None), name
    if made.get("kv_lora_rank"):
        return
    heads = made.get("num_attention_heads")
    if made.get("num_key_value_heads") not in (None, heads):
        assert ours["num_key_value_heads"] == made["num_key_value_heads"]
    head_dim = getattr(transformers.CONFIG_MAPPING[family], "head_dim", None)
    if heads and isinstance(head_dim, int):
        assert ours["head_dim"] == head_dim


def test_deepseeks_small_models_without_latents() -> None:
    """Those of DeepSeek-OCR and DeepSeek-VL2-tiny are of DeepSeek V2's type, with plain heads."""
    from vllm.transformers_utils.configs.deepseek_vl2 import DeepseekVLV2Config

    told = {"num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10}
    told |= {"hidden_size": 1280, "kv_lora_rank": None, "q_lora_rank": None}
    told |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
    made = DeepseekVLV2Config(language_config=told, projector_config={}, vision_config={})
    (group,) = model_from_config(made.get_text_config().to_dict()).groups
    assert [(c.units, c.dims) for c in group.components] == [(10, (128,))] * 2
