"""One model configuration, read with care: what is asked for must be there, and possible.

Each method that gives groups describes one kind of layer; which kinds a family of architectures has
is said in hf.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.layout.model import Component, Group, Residency

Config = Mapping[str, Any]
MOST_LAYERS = 1 << 16

ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


class Reader:
    """Reads a configuration; each method describes one kind of layer."""

    def __init__(
        self, config: Config, *, cache_dtype: str, conv_dtype: str, ssm_dtype: str
    ) -> None:
        self.config = config
        self.cache_dtype = cache_dtype
        self.conv_dtype = conv_dtype
        self.ssm_dtype = ssm_dtype
        self.layers = self.positive("num_hidden_layers", "n_layer", "num_layers")
        if self.layers > MOST_LAYERS:
            raise DescriptionError(f"at most {MOST_LAYERS} layers are read, found {self.layers}")

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
        """A list with one value a layer; empty where the configuration has none."""
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
        return Component(name, units, dims, ELEMENT_BYTES[dtype], content=dtype, **options)

    def conv(self, name: str, units: int, *dims: int, **options: Any) -> Component:
        """A section of the convolution state: (channels of a unit, rows)."""
        return self.component(name, units, *dims, dtype=self.conv_dtype, **options)

    @property
    def head_dim(self) -> int:
        heads = self.positive("num_attention_heads")
        return self.integer("head_dim", default=self.integer("hidden_size") // heads)

    @property
    def kv_heads(self) -> int:
        return self.integer("num_key_value_heads", default=self.integer("num_attention_heads"))

    def attention(
        self, name: str, layers: Iterable[int], residency: Residency | None = None
    ) -> list[Group]:
        """K and V of some layers; nothing for no layers."""
        held = tuple(layers)
        if not held:
            return []
        components = tuple(self.component(c, self.kv_heads, self.head_dim) for c in "kv")
        return [Group(name, held, components, residency or Residency())]

    def window(self, layers: Iterable[int], key: str = "sliding_window") -> list[Group]:
        return self.attention("window", layers, Residency("window", self.integer(key)))

    def latent(self) -> list[Group]:
        """MLA: one latent of kv_lora_rank and the shared rope part, replicated over ranks."""
        width = self.integer("kv_lora_rank") + self.integer("qk_rope_head_dim")
        component = self.component("latent", 1, width, sharding="replicated")
        return [Group("mla", tuple(range(self.layers)), (component,))]

    def indexer(self) -> list[Group]:
        """Sparse attention's index keys: fp8 with one fp32 scale per 128 values, replicated."""
        width = self.integer("index_head_dim")
        component = Component(
            "index", 1, (width + 4 * width // 128,), 1, "replicated", "fp8_with_scale"
        )
        return [Group("indexer", tuple(range(self.layers)), (component,), role="indexer")]

    def mamba2(
        self, layers: Sequence[int], heads: int, head_dim: int, groups: int, state: int, conv: int
    ) -> list[Group]:
        """x | B | C convolution sections and the SSM state. One group of B and C is replicated."""
        shared = "replicated" if groups == 1 else "split"
        components = (
            self.conv("conv_x", heads, head_dim, conv - 1),
            self.conv("conv_B", groups, state, conv - 1, sharding=shared),
            self.conv("conv_C", groups, state, conv - 1, sharding=shared),
            self.component("ssm", heads, head_dim, state, dtype=self.ssm_dtype),
        )
        return [Group("state", tuple(layers), components, Residency("state"))] if layers else []

    def mamba1(self, layers: Sequence[int], inner: int, state: int, conv: int) -> list[Group]:
        components = (
            self.conv("conv_x", inner, 1, conv - 1),
            self.component("ssm", inner, state, dtype=self.ssm_dtype),
        )
        return [Group("state", tuple(layers), components, Residency("state"))] if layers else []

    def delta_net(self, layers: Sequence[int]) -> list[Group]:
        """Gated delta net: q | k | v convolution sections and one matrix state a value head."""
        k_heads = self.integer("linear_num_key_heads")
        v_heads = self.integer("linear_num_value_heads")
        k_dim = self.integer("linear_key_head_dim")
        v_dim = self.integer("linear_value_head_dim")
        rows = self.integer("linear_conv_kernel_dim") - 1
        components = (
            self.conv("conv_q", k_heads, k_dim, rows),
            self.conv("conv_k", k_heads, k_dim, rows),
            self.conv("conv_v", v_heads, v_dim, rows),
            self.component("ssm", v_heads, v_dim, k_dim, dtype=self.ssm_dtype),
        )
        return [Group("state", tuple(layers), components, Residency("state"))] if layers else []

    def draft(self, groups: Sequence[Group], layers: int) -> Group:
        """Draft layers that cache what the target's first attention group caches."""
        like = next((g for g in groups if not g.is_state and g.role == "target"), None)
        if like is None:
            raise DescriptionError("a model without attention layers has no draft layers like them")
        return Group("draft", tuple(range(layers)), like.components, role="draft")

    def layers_of(self, *kinds: str) -> list[int]:
        """Ordinals whose `layer_types` entry is one of `kinds`."""
        types = self.per_layer("layer_types", str)
        return [i for i, kind in enumerate(types) if kind in kinds]
