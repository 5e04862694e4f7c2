"""Engines as captured from real vLLM: their geometry, described by the product, filled by formula.

`tests/fixtures/vllm-0.32/*.json` hold what connectors of real engines were handed, and formulas for
the inside of a page that were found by writing through vLLM's own cache-writing code. `fill` and
`read` use those formulas and the tensors' strides alone; `layout` is the product's view.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.layout import CacheModel, EngineShape, Rank, RankLayout, Region
from kvferry.layout.hf import model_from_config
from kvferry.layout.tensors import TensorView, layout_from_tensors

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.json"))
INTERIORS = {"k_transposed": "cpu", "amx_pairs": "cpu_amx", "latent_rows": "joined"}


def ordinal(layer: str) -> int:
    found = re.search(r"\.layers\.(\d+)\.", layer)
    assert found, layer
    return int(found[1])


@dataclass(frozen=True)
class Golden:
    """One captured engine."""

    data: dict[str, Any]
    _layouts: dict[Rank, RankLayout] = field(default_factory=dict, compare=False)

    @property
    def engine(self) -> dict[str, Any]:
        return self.data["engine"]

    @property
    def ranks(self) -> list[Rank]:
        return [Rank(r["pp_rank"], r["tp_rank"]) for r in self.data["ranks"]]

    def rank(self, rank: Rank) -> dict[str, Any]:
        return self.data["ranks"][self.ranks.index(rank)]

    @cached_property
    def model(self) -> CacheModel:
        cache_dtype = self.engine["cache_dtype"]
        return model_from_config(
            {**self.data["hf_config"], "dtype": self.engine["dtype"]},
            cache_dtype=cache_dtype,
            ssm_dtype=self.engine.get("mamba_ssm_cache_dtype") or "auto",
        )

    @cached_property
    def shape(self) -> EngineShape:
        model = self.model
        first = self.data["ranks"][0]
        interiors = {INTERIORS[entry["name"]] for entry in self.data["interior"].values()}
        views = [v for vs in first["state_views"].values() for v in vs if "conv_order" in v]
        state_tables = {g.name for g in model.groups if g.is_state}
        blocks = {}
        for group in first["groups"]:
            for layer in group["layers"]:
                name = self.group_name(layer)
                if name not in state_tables:
                    blocks[name] = group["spec"]["block_size"]
        return EngineShape(
            tp=self.engine["tp"],
            pp=self.engine["pp"],
            block_size=self.engine["block_size"],
            block_size_of=tuple(blocks.items()),
            order=self.engine["kv_cache_layout"],
            interior=interiors.pop() if interiors else "joined",
            conv_order="DS" if views and views[0]["conv_order"] == "channels_first" else "SD",
        )

    def group_name(self, layer: str) -> str:
        """The product's group of a vLLM layer, by ordinal."""
        number = ordinal(layer)
        names = [g.name for g in self.model.groups if number in g.layers]
        assert len(names) == 1, (layer, names)
        return names[0]

    def layout(self, rank: Rank) -> RankLayout:
        if rank not in self._layouts:
            self._layouts[rank] = self._describe(rank)
        return self._layouts[rank]

    def _describe(self, rank: Rank) -> RankLayout:
        captured = self.rank(rank)
        tensors, tables, padded = {}, {}, {}
        for group in captured["groups"]:
            for layer in group["layers"]:
                key = (self.group_name(layer), ordinal(layer))
                t = captured["tensors"][layer]
                tensors[key] = [
                    TensorView(
                        t["storage"],
                        t["storage_offset_bytes"],
                        tuple(t["shape"]),
                        tuple(t["strides"]),
                        t["element_size"],
                    )
                ]
                tables[key] = group["group_id"]
                padded[key[0]] = group["spec"].get("page_size_padded") or 0
        regions = [Region(f"storage {s['id']}", s["bytes"]) for s in captured["storages"]]
        return layout_from_tensors(
            self.model, self.shape, rank, regions, tensors, tables=tables, padded_page_bytes=padded
        )

    def formula(self, layer: str, rank: Rank) -> dict[str, str]:
        backend = self.rank(rank)["backends"][layer]
        wanted = f"{backend['backend']}/{backend['isa'] or '-'}/"
        for key, entry in self.data["interior"].items():
            if key.startswith(wanted):
                return entry["element_offset"]
        raise AssertionError(f"no interior for {layer}: {wanted}")

    def element_offsets(self, rank: Rank, layer: str, component: str, block: int) -> np.ndarray:
        """Byte offsets [head, slot, dim] of one block, from the captured formula alone."""
        tensor = self.rank(rank)["tensors"][layer]
        _, heads, slots, content = tensor["shape"]
        dims = content if component == "latent" else content // 2
        names = {
            "head": np.arange(heads)[:, None, None],
            "slot": np.arange(slots)[None, :, None],
            "dim": np.arange(dims)[None, None, :],
            "S": slots,
            "D": dims,
        }
        inside = eval(self.formula(layer, rank)[component], {"__builtins__": {}}, names)
        inside = np.broadcast_to(inside, (heads, slots, dims))
        start = (
            tensor["storage_offset_bytes"] + block * tensor["strides"][0] * tensor["element_size"]
        )
        return start + inside * tensor["element_size"]


@cache
def golden(name: str) -> Golden:
    return Golden(json.loads((FIXTURES / f"{name}.json").read_text()))
