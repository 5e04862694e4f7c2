# SPDX-License-Identifier: Apache-2.0
"""A model's cache from its Hugging Face `config.json`, or from a preset of a well-known model.

One function for each family of architectures makes the groups from a `ConfigReader`, whose methods
describe one kind of layer each. An unknown architecture is refused, never guessed: a wrong
description would copy wrong bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.layout.model import CacheModel, Component, Group, Residency

Config = Mapping[str, Any]
ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
# Latents that carry their own scales: bytes of a token, with a rank of 512 and 64 rope values
PACKED_LATENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
PACKED_WIDTHS = (512, 64)
DRAFT_GROUPS = ("draft", "draft.indexer")
INDEX_SCALED = 128  # values of an index key that share one scale


def presets() -> dict[str, dict[str, Any]]:
    """By name, the parts of each model's public configuration that its cache depends on."""
    return _table("presets.json")


@cache
def _table(name: str) -> dict[str, dict[str, Any]]:
    text = files("kvferry.layout").joinpath(name).read_text()
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def load_model(name: str, **options: Any) -> CacheModel:
    """A preset, or the model at the path of a `config.json` or its folder.

    The options are those of `model_from_config`.
    """
    if name in presets():
        return model_from_config(presets()[name], name=name, **options)
    path = Path(name)
    if path.exists():
        named = path.absolute().parent if path.name == "config.json" else path.absolute()
        return model_from_config(path, name=named.name.removesuffix(".json"), **options)
    raise DescriptionError(
        f"{name!r} is neither a preset nor a path of a config.json; names of the Hub are not "
        "downloaded: give the path of the model's config.json, or one of the presets "
        f"{', '.join(presets())}"
    )


def model_from_config(
    config: str | Path | Config,
    *,
    name: str = "",
    cache_dtype: str = "auto",
    state_dtype: str = "auto",
    ssm_dtype: str = "auto",
    draft_layers: int = 0,
) -> CacheModel:
    """Describe the cache of the model that a `config.json` (path, folder or dict) configures.

    cache_dtype   type of attention caches; "auto": that of the checkpoint's scales, or its own
    state_dtype   type of convolution states; "auto": the model's own
    ssm_dtype     type of the other recurrent states; "auto": the one that the configuration
                  names, or that of convolution states
    draft_layers  layers of an MTP or Eagle draft model that has the target's attention, and its
                  indexer

    A dict's dtype is the engine's; of a file it is the checkpoint's, and vLLM serves float32 as
    bfloat16.
    """
    data = _read(config)
    nested = data.get("text_config")
    text = {**data, **nested} if isinstance(nested, Mapping) else data
    model_type = _model_type(text)
    describe = FAMILIES.get(model_type)
    if describe is None:
        raise DescriptionError(
            f"model_type {model_type!r} is not known; {len(FAMILIES)} are, among them "
            f"{', '.join(get_close_matches(model_type, FAMILIES, 4, 0.0))}. "
            "Describe its cache by hand: CacheModel(name, groups=(Group(...), ...))"
            if model_type
            else "the configuration names no model_type; give the model's config.json (Mistral's "
            "params.json is another)"
        )
    # a nested configuration leaves out all that is as in its class
    text = {**_table("defaults.json").get(model_type.removesuffix("_text"), {}), **text}
    own = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if own == "float32" and data is not config:
        own = "bfloat16"
    conv_dtype = own if state_dtype == "auto" else state_dtype
    named = text.get("mamba_ssm_cache_dtype") or text.get("mamba_ssm_dtype")  # Nemotron-H, Qwen 3.5
    try:
        if cache_dtype == "auto":
            cache_dtype = _quantized(text) or own
        reader = ConfigReader(
            text,
            cache_dtype=(
                cache_dtype if cache_dtype in PACKED_LATENT_BYTES else _known_dtype(cache_dtype)
            ),
            conv_dtype=_known_dtype(conv_dtype),
            ssm_dtype=_known_dtype(str(named or conv_dtype) if ssm_dtype == "auto" else ssm_dtype),
        )
        groups = list(describe(reader))
    except DescriptionError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DescriptionError(
            f"the configuration of {model_type!r} holds a value that its model cannot have "
            f"({type(error).__name__}: {error}); compare it with the model's own config.json"
        ) from None
    if draft_layers:
        groups += reader.draft(groups, draft_layers)
    label = name or str(data.get("_name_or_path") or model_type)
    return CacheModel(label, tuple(groups), total_layers=reader.layers)


def knows(config: Config) -> bool:
    """Whether there is a description of this model's family."""
    return _model_type(config) in FAMILIES


def _model_type(config: Config) -> str:
    architecture, *_ = config.get("architectures") or [""]
    return str(config.get("model_type") or MISTRALS.get(architecture, ""))


def _read(config: str | Path | Config) -> Config:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DescriptionError(f"cannot read a model configuration from {path}: {error}") from None
    if not isinstance(data, dict):
        raise DescriptionError(f"{path} is no model configuration: expected a JSON object")
    return data


def _quantized(model: Config) -> str | None:
    """The cache type that vLLM takes from a checkpoint with scales for its attention caches."""
    config = model.get("quantization_config") or {}
    config = {**config, **(config.get("quantization") or {})}
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        scheme = {8: "fp8", 4: "nvfp4"}.get(scheme.get("num_bits", 0))
    method, scheme = str(config.get("quant_method")), str(scheme).lower()
    if method.startswith("modelopt"):
        return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(scheme)
    if model.get("kv_lora_rank"):
        return None  # scales of compressed-tensors reach vLLM's attention layers, not its MLA ones
    return "fp8" if method == "compressed-tensors" and scheme == "fp8" else None


def _known_dtype(dtype: str) -> str:
    if dtype not in ELEMENT_BYTES:
        known = ", ".join([*ELEMENT_BYTES, *PACKED_LATENT_BYTES])
        raise DescriptionError(f"cache type {dtype!r} is not known; known are {known}")
    return dtype


def index_components(width: int) -> tuple[Component, Component]:
    """Index keys of sparse attention, on every rank: fp8 values, and an fp32 scale per 128."""
    values = Component("index", 1, (width,), 1, "replicated", "fp8_e4m3")
    scales = Component("scale", 1, (width // INDEX_SCALED,), 4, "replicated", "float32")
    return values, scales


def _dense(r: ConfigReader, own_token: int = 0) -> list[Group]:
    """Llama and similar models, with a sliding window on all, some or no layers. The last layers
    may read what earlier ones cached.

    own_token  1 where `sliding_window` does not count the token that looks back
    """
    layers = range(r.layers - r.integer("num_kv_shared_layers", default=0))
    if r.config.get("use_sliding_window") is False or not r.config.get("sliding_window"):
        return r.attention("attention", layers)
    if types := r.per_layer("layer_types", str):
        unknown = {*types} - {"full_attention", "attention", "sliding_attention"}
        if unknown:
            kinds = ", ".join(sorted(unknown))
            raise DescriptionError(f"layer types {kinds} are not known for this model")
        full = [i for i in layers if types[i] != "sliding_attention"]
    elif "sliding_window_pattern" in r.config:
        period = r.positive("sliding_window_pattern")
        full = [i for i in layers if (i + 1) % period == 0]
    elif "use_sliding_window" in r.config:
        full = list(layers[: r.integer("max_window_layers", default=0)])
    else:
        full = []
    span = Residency("window", r.integer("sliding_window") + own_token)
    windowed = [i for i in layers if i not in full]
    return r.attention("attention", full) + r.attention("window", windowed, span)


def _gemma4(r: ConfigReader) -> list[Group]:
    """As Gemma 3n, but layers of full attention have heads of their own number and size."""
    types, told = r.per_layer("layer_types", str), r.config.get("per_layer_config")
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    if told is None:  # a file; an engine's configuration has what differs, by layer
        told = {i: {"head_dim": r.integer("global_head_dim", default=512)} for i in full}
        heads = r.config.get("num_global_key_value_heads")
        if heads is not None and r.config.get("attention_k_eq_v"):
            told = {i: {**own, "num_key_value_heads": heads} for i, own in told.items()}
    owns = [own for _, own in sorted((int(i), own) for i, own in told.items())]
    if not full or sorted(map(int, told)) != full or any(own != owns[0] for own in owns):
        raise DescriptionError(
            f"layers of full attention must have heads alike and others none of their own: found "
            f"{told!r}, and 'layer_types' {types!r}"
        )
    attention, *window = _dense(r)
    (like,) = r.alike(**owns[0]).attention("attention", attention.layers)
    return [like, *window]


def _llama4(r: ConfigReader) -> list[Group]:
    if not r.config.get("attention_chunk_size"):
        return r.attention("attention", range(r.layers))
    interval = r.positive("no_rope_layer_interval", default=4)
    rope = r.per_layer("no_rope_layers", int) or [(i + 1) % interval for i in range(r.layers)]
    full = [i for i in range(r.layers) if not rope[i]]
    span = Residency("chunk", r.integer("attention_chunk_size"))
    return r.attention("attention", full) + r.attention("chunk", r.others(full), span)


def _deepseek(r: ConfigReader) -> list[Group]:
    if r.config.get("qk_nope_head_dim") == r.config.get("qk_rope_head_dim") == 0:
        return r.attention("attention", range(r.layers))  # DeepSeek-OCR, DeepSeek-VL2-tiny
    return r.latent() + (r.indexer() if r.config.get("index_head_dim") else [])


def _bamba(r: ConfigReader) -> list[Group]:
    """Mamba 2 and attention: Bamba's configuration lists attention layers, Granite's all types."""
    attention = r.config.get("attn_layer_indices") or r.layers_of("attention", "full_attention")
    heads = r.integer("mamba_n_heads")
    inner = r.integer("mamba_expand", default=2) * r.integer("hidden_size")
    head_dim = r.config.get("mamba_d_head")
    return r.attention("attention", attention) + r.mamba2(
        r.others(attention),
        heads=heads,
        head_dim=head_dim if isinstance(head_dim, int) else inner // heads,
        groups=r.integer("mamba_n_groups"),
        state=r.integer("mamba_d_state"),
        conv=r.integer("mamba_d_conv"),
    )


def _jamba(r: ConfigReader) -> list[Group]:
    period, offset = r.positive("attn_layer_period"), r.integer("attn_layer_offset")
    attention = [i for i in range(r.layers) if i % period == offset]
    inner = r.integer("mamba_expand") * r.integer("hidden_size")
    return r.attention("attention", attention) + r.mamba1(
        r.others(attention), inner, r.integer("mamba_d_state"), r.integer("mamba_d_conv")
    )


def _mamba(r: ConfigReader) -> list[Group]:
    inner = r.integer(
        "intermediate_size", default=r.integer("expand", default=2) * r.integer("hidden_size")
    )
    return r.mamba1(range(r.layers), inner, r.integer("state_size"), r.integer("conv_kernel"))


def _mamba2(r: ConfigReader) -> list[Group]:
    names = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    return r.mamba2(range(r.layers), *map(r.integer, names))


def _nemotron_h(r: ConfigReader) -> list[Group]:
    kinds = r.config.get("hybrid_override_pattern") or r.per_layer("layers_block_type", str)
    attention = [i for i, kind in enumerate(kinds) if kind in ("*", "attention", "full_attention")]
    mamba = [i for i, kind in enumerate(kinds) if kind in ("M", "mamba", "linear_attention")]
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    return r.attention("attention", attention) + r.mamba2(mamba, *map(r.integer, names))


def _qwen3_next(r: ConfigReader) -> list[Group]:
    full = r.layers_of("full_attention")
    if not full:
        interval = r.positive("full_attention_interval", default=4)
        full = [i for i in range(r.layers) if (i + 1) % interval == 0]
    return r.attention("attention", full) + r.delta_net(r.others(full))


DENSE = """
llama mistral ministral ministral3 mixtral phi3 phimoe granite granitemoe ernie4_5 ernie4_5_moe
qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_vl_text
qwen3_vl_moe_text qwen2_5_omni_text qwen3_omni_moe_text glm glm4 glm4_moe glm4v_text glm4v_moe_text
gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text olmo2 olmo3 olmoe smollm3 cohere gpt_oss
exaone4 exaone_moe minimax_m2 starcoder2 seed_oss
"""
LATENT = "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa glm4_moe_lite"
FAMILIES: dict[str, Callable[[ConfigReader], list[Group]]] = {
    name: describe
    for names, describe in (
        (DENSE, _dense),
        ("cohere2 cohere2_moe", partial(_dense, own_token=1)),
        ("gemma4 gemma4_text", _gemma4),
        ("llama4 llama4_text", _llama4),
        (LATENT, _deepseek),
        ("bamba granitemoehybrid", _bamba),
        ("jamba", _jamba),
        ("mamba falcon_mamba", _mamba),
        ("mamba2", _mamba2),
        ("nemotron_h", _nemotron_h),
        ("qwen3_next qwen3_5_text qwen3_5_moe_text", _qwen3_next),
    )
    for name in names.split()
}

# What vLLM makes of Mistral's params.json has no model_type.
MISTRALS = {
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "MistralLarge3ForCausalLM": "deepseek_v3",
}


class ConfigReader:
    """Reads a model configuration, and refuses values that are missing or impossible."""

    def __init__(
        self, config: Config, *, cache_dtype: str, conv_dtype: str, ssm_dtype: str
    ) -> None:
        self.config = config
        self.cache_dtype = cache_dtype
        self.conv_dtype = conv_dtype
        self.ssm_dtype = ssm_dtype
        kinds = config.get("layers_block_type")  # an engine's Nemotron-H has no number of layers
        count = len(kinds) if kinds else None
        self.layers = self.positive("num_hidden_layers", "n_layer", "num_layers", default=count)

    def alike(self, **changes: Any) -> ConfigReader:
        """A reader of the same configuration with other values."""
        other = copy(self)
        other.config = {**self.config, **changes}
        return other

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise DescriptionError(
                f"the configuration of {self.config.get('model_type')!r} has no {names[0]!r}"
            )
        return default

    def positive(self, *names: str, default: int | None = None) -> int:
        value = self.integer(*names, default=default)
        if value < 1:
            raise DescriptionError(
                f"the configuration of {self.config.get('model_type')!r} must have a {names[0]!r} "
                f"of at least 1, found {value}"
            )
        return value

    def per_layer(self, name: str, kind: type) -> list[Any]:
        """A list with one value for each layer; empty if the configuration has none."""
        values = self.config.get(name)
        if values is None or values in ([], ()):
            return []
        if (
            not isinstance(values, list | tuple)
            or len(values) < self.layers
            or not all(isinstance(value, kind) for value in values)
        ):
            raise DescriptionError(
                f"{name!r} must have one {kind.__name__} for each of the {self.layers} layers, "
                f"found {values!r}"
            )
        return list(values[: self.layers])

    def component(self, name: str, units: int, *dims: int, **options: Any) -> Component:
        dtype = options.pop("dtype", self.cache_dtype)
        if dtype in PACKED_LATENT_BYTES:
            raise DescriptionError(f"cache type {dtype!r} is one of latents (MLA), not of {name!r}")
        return Component(name, units, dims, ELEMENT_BYTES[dtype], content=dtype, **options)

    def conv(self, name: str, units: int, *dims: int, **options: Any) -> Component:
        """A section of the convolution state. Its dims are the channels of a unit, and rows."""
        return self.component(name, units, *dims, dtype=self.conv_dtype, **options)

    @property
    def head_dim(self) -> int:
        heads = self.positive("num_attention_heads")
        return self.integer("head_dim", default=0) or self.integer("hidden_size") // heads

    @property
    def kv_heads(self) -> int:
        return self.integer("num_key_value_heads", default=self.integer("num_attention_heads"))

    def attention(
        self, name: str, layers: Iterable[int], residency: Residency | None = None
    ) -> list[Group]:
        """K and V of these layers; no group if there are none."""
        held = tuple(layers)
        if not held:
            return []
        components = tuple(self.component(c, self.kv_heads, self.head_dim) for c in "kv")
        return [Group(name, held, components, residency or Residency())]

    def latent(self) -> list[Group]:
        """MLA: one latent of kv_lora_rank and the shared rope part, on every rank."""
        widths = self.integer("kv_lora_rank"), self.integer("qk_rope_head_dim")
        packed = PACKED_LATENT_BYTES.get(self.cache_dtype)
        if packed is None:
            component = self.component("latent", 1, sum(widths), sharding="replicated")
        elif widths == PACKED_WIDTHS:
            component = Component("latent", 1, (packed,), 1, "replicated", self.cache_dtype)
        else:
            raise DescriptionError(
                f"cache type {self.cache_dtype!r} is one of latents with kv_lora_rank and "
                f"qk_rope_head_dim {PACKED_WIDTHS}, found {widths}"
            )
        return [Group("mla", tuple(range(self.layers)), (component,))]

    def indexer(self) -> list[Group]:
        """Index keys of sparse attention.

        A layer may share what the last layer with an indexer chose, and then has no keys.
        """
        pattern = self.config.get("index_topk_pattern")
        every = self.positive("index_topk_freq", default=1)
        offset = self.integer("index_skip_topk_offset", default=2)
        layers = tuple(
            i
            for i in range(self.layers)
            if (
                max(i - offset + 1, 0) % every == 0
                if pattern is None
                else i >= len(pattern) or pattern[i] != "S"
            )
        )
        components = index_components(self.integer("index_head_dim"))
        return [Group("indexer", layers, components, role="indexer")]

    def state(self, layers: Iterable[int], *components: Component) -> list[Group]:
        """Recurrent states of these layers; no group if there are none."""
        held = tuple(layers)
        return [Group("state", held, components, Residency("state"))] if held else []

    def mamba1(self, layers: Iterable[int], inner: int, state: int, conv: int) -> list[Group]:
        return self.state(
            layers,
            self.conv("conv_x", inner, 1, conv - 1),
            self.component("ssm", inner, state, dtype=self.ssm_dtype),
        )

    def mamba2(
        self, layers: Iterable[int], heads: int, head_dim: int, groups: int, state: int, conv: int
    ) -> list[Group]:
        """Convolution sections x | B | C and the SSM state. A single B and C is replicated."""
        shared = "replicated" if groups == 1 else "split"
        return self.state(
            layers,
            self.conv("conv_x", heads, head_dim, conv - 1),
            self.conv("conv_B", groups, state, conv - 1, sharding=shared),
            self.conv("conv_C", groups, state, conv - 1, sharding=shared),
            self.component("ssm", heads, head_dim, state, dtype=self.ssm_dtype),
        )

    def delta_net(self, layers: Iterable[int]) -> list[Group]:
        """Gated delta net: convolution sections q | k | v, and one matrix state per value head."""
        k_heads = self.integer("linear_num_key_heads")
        v_heads = self.integer("linear_num_value_heads")
        k_dim = self.integer("linear_key_head_dim")
        v_dim = self.integer("linear_value_head_dim")
        rows = self.integer("linear_conv_kernel_dim") - 1
        return self.state(
            layers,
            self.conv("conv_q", k_heads, k_dim, rows),
            self.conv("conv_k", k_heads, k_dim, rows),
            self.conv("conv_v", v_heads, v_dim, rows),
            self.component("ssm", v_heads, v_dim, k_dim, dtype=self.ssm_dtype),
        )

    def draft(self, groups: Sequence[Group], layers: int) -> list[Group]:
        """Draft layers with the components of the target's first attention group and indexer."""
        like = [g for g in groups if not g.is_state and g.role == "target"][:1]
        if not like:
            raise DescriptionError("draft layers copy the target's attention, and it has none")
        held = tuple(range(layers))
        indexer = [g for g in groups if g.role == "indexer"]
        return [
            Group(name, held, g.components, role="draft")
            for name, g in zip(DRAFT_GROUPS, like + indexer, strict=False)
        ]

    def others(self, layers: Iterable[int]) -> list[int]:
        return sorted({*range(self.layers)} - {*layers})

    def layers_of(self, *kinds: str) -> list[int]:
        """Layers whose `layer_types` entry is one of `kinds`."""
        types = self.per_layer("layer_types", str)
        return [i for i, kind in enumerate(types) if kind in kinds]
