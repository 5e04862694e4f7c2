"""Real engines' memory, described: every probe lies where our layout says, and bytes move right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from golden import NAMES, Golden, golden, ordinal
from kvferry import Rank, bind, plan_pair
from kvferry.layout import Part, Placement
from kvferry.plan.report import synthetic_tables

WITH_PROBES = [n for n in NAMES if any(r["probes"] for r in golden(n).data["ranks"])]
WITH_STATES = [n for n in NAMES if any(r["state_views"] for r in golden(n).data["ranks"])]


def address(
    part: Part, placement: Placement, layer: int, block: int, slot: int, head: int, dim: int
) -> int:
    """The affine formula of `kvferry.layout.placement`, spelled out."""
    row = int(np.flatnonzero(part.layers == layer)[0])
    tile, inside = divmod(slot, placement.tile_slots)
    where = int(placement.offsets[row]) + block * placement.block_stride
    where += tile * placement.tile_stride + inside * placement.slot_stride
    where += head * placement.unit_stride
    for size, stride in zip(
        reversed(placement.dim_sizes), reversed(placement.dim_strides), strict=True
    ):
        dim, index = divmod(dim, size)
        where += index * stride
    return where


def find(engine: Golden, rank: Rank, layer: str) -> Part:
    layout = engine.layout(rank)
    for part in layout.parts_of(engine.group_name(layer)):
        if ordinal(layer) in part.layers:
            return part
    raise AssertionError(layer)


def coordinates(engine: Golden, rank: Rank, probe: dict[str, Any]) -> tuple[str, int, int, int]:
    """Component, slot, local unit and flat index in its dims of a probed element."""
    if probe["component"] == "conv":
        conv, _ = engine.rank(rank)["state_views"][probe["layer"]]
        section = next(
            s for s in reversed(conv["conv_sections"]) if s["start_channel"] <= probe["channel"]
        )
        name = f"conv_{section['name']}"
        group = engine.model.group("state")
        per_unit, rows = group.component(name).dims
        unit, channel = divmod(probe["channel"] - section["start_channel"], per_unit)
        return name, 0, unit, channel * rows + probe["row"]
    if probe["component"] == "ssm":
        outer, inner = list(probe)[4:6]  # named as the engine's kernel writes them
        _, size = engine.model.group("state").component("ssm").dims
        return "ssm", 0, probe["head"], probe[outer] * size + probe[inner]
    return probe["component"], probe["slot"], probe["head"], probe["dim"]


def test_fixtures_cover_the_architectures() -> None:
    for family in ("llama", "deepseek-v2", "gemma3", "gpt-oss", "mistral", "qwen3-next", "granite"):
        assert any(n.startswith(family) and "tp1" in n for n in NAMES), family
        assert any(n.startswith(family) and "tp2" in n for n in NAMES), family
    assert "llama-pp2" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_is_described(name: str) -> None:
    engine = golden(name)
    for rank in engine.ranks:
        layout = engine.layout(rank)
        layers = sum(len(part.layers) for part in layout.parts)
        assert layers == len(engine.rank(rank)["tensors"])
        for part in layout.parts:
            assert part.num_blocks == engine.rank(rank)["num_blocks"]


@pytest.mark.parametrize("name", WITH_PROBES)
def test_probes_lie_where_the_layout_says(name: str) -> None:
    engine = golden(name)
    checked = 0
    for rank in engine.ranks:
        for probe in engine.rank(rank)["probes"]:
            part = find(engine, rank, probe["layer"])
            component, slot, head, dim = coordinates(engine, rank, probe)
            placement = part.placements[part.index(component)]
            layer, block = ordinal(probe["layer"]), probe["block"]
            found = address(part, placement, layer, block, slot, head, dim)
            assert found == probe["byte_offset"], probe
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize("name", WITH_STATES)
def test_states_lie_where_the_engine_keeps_them(name: str) -> None:
    engine = golden(name)
    for rank in engine.ranks:
        for layer, views in engine.rank(rank)["state_views"].items():
            part = find(engine, rank, layer)
            conv, ssm = views
            size = conv["element_size"]
            rows_first = conv["conv_order"] == "rows_first"
            channel = conv["strides"][2 if rows_first else 1] * size
            row = conv["strides"][1 if rows_first else 2] * size
            for section in conv["conv_sections"]:
                placement = part.placements[part.index(f"conv_{section['name']}")]
                expected = conv["storage_offset_bytes"] + section["start_channel"] * channel
                assert placement.offsets[part.layers == ordinal(layer)] == expected
                assert placement.dim_strides == (channel, row)
                assert placement.block_stride == conv["strides"][0] * size
                assert placement.units.size * placement.dim_sizes[0] == section["channels"]
            state = part.placements[part.index("ssm")]
            assert state.offsets[part.layers == ordinal(layer)] == ssm["storage_offset_bytes"]
            assert (state.unit_stride, *state.dim_strides) == tuple(
                stride * ssm["element_size"] for stride in ssm["strides"][1:]
            )
            assert state.block_stride == ssm["strides"][0] * ssm["element_size"]


PAIRS = [
    ("llama-tp1", "llama-tp2"),
    ("llama-tp2", "llama-tp1"),
    ("llama-pp2", "llama-tp2"),
    ("llama-tp2", "llama-pp2"),
    ("llama-tp1", "llama-tp1-block32"),
    ("llama-tp1-block32", "llama-tp2"),
    ("llama-tp1-bf16", "llama-tp2-bf16-block32"),
    ("llama-tp2-bf16-block32", "llama-tp1-bf16"),
    ("mistral-tp1", "mistral-tp2"),
    ("mistral-tp2", "mistral-tp1"),
    ("gpt-oss-tp1", "gpt-oss-tp2"),
    ("gemma3-tp2", "gemma3-tp1"),
    ("deepseek-v2-tp2", "deepseek-v2-tp1"),
    ("deepseek-v2-tp1", "deepseek-v2-tp1-blhnc"),
]


@pytest.mark.parametrize(("src_name", "dst_name"), PAIRS)
@pytest.mark.parametrize("tokens", [256, 333])
def test_bytes_move_between_real_geometries(src_name: str, dst_name: str, tokens: int) -> None:
    """Fill by the captured formulas, move by the plan, and read by the captured formulas."""
    src, dst = golden(src_name), golden(dst_name)
    if not dst.data["interior"]:  # captured geometry only: same inside as its tp1 sibling
        dst = Golden({**dst.data, "interior": src.data["interior"]})
        for rank in dst.data["ranks"]:
            rank["backends"] = rank["backends"] or src.data["ranks"][0]["backends"]
    model = src.model
    pair = plan_pair(model, src.shape, dst.shape, dst_model=dst.model)
    src_tables, dst_tables = (
        _tables(engine, tokens, seed) for seed, engine in enumerate((src, dst))
    )
    memory = {("src", r): _memory(src, r) for r in src.ranks}
    memory |= {("dst", r): _memory(dst, r) for r in dst.ranks}
    for rank in src.ranks:
        _each_layer(src, rank, src_tables, tokens, memory["src", rank], write=True)
    for edge in pair.edges:
        a, b = memory["src", edge.src], memory["dst", edge.dst]
        bound = bind(
            pair.plan(edge, src.layout(edge.src), dst.layout(edge.dst)),
            tokens=tokens,
            src_tables=src_tables,
            dst_tables=dst_tables,
            src_bases=[0],
            dst_bases=[0],
        )
        copies = bound.copies()
        assert (copies.dst + copies.length).max() <= len(b)
        for s, d, n in zip(copies.src, copies.dst, copies.length, strict=True):
            b[d : d + n] = a[s : s + n]
    for rank in dst.ranks:
        _each_layer(dst, rank, dst_tables, tokens, memory["dst", rank], write=False)


def _memory(engine: Golden, rank: Rank) -> np.ndarray:
    (storage,) = engine.rank(rank)["storages"]
    return np.full(storage["bytes"], 0xEE, dtype=np.uint8)


def _tables(engine: Golden, tokens: int, seed: int) -> list[np.ndarray]:
    """Distinct blocks for each of vLLM's groups (which are more than the model's)."""
    groups = engine.data["ranks"][0]["groups"]
    one, _ = synthetic_tables(engine.model, engine.shape, tokens, scattered=False, seed=seed)
    rng = np.random.default_rng(seed)
    length = max(len(table) for table in one)
    ids = rng.permutation(np.arange(1, engine.data["ranks"][0]["num_blocks"]))
    return [ids[i * length : (i + 1) * length] for i in range(len(groups))]


def _each_layer(
    engine: Golden,
    rank: Rank,
    tables: list[np.ndarray],
    tokens: int,
    memory: np.ndarray,
    *,
    write: bool,
) -> None:
    """Write, or check, a value for every (layer, component, head, token, dim) that a rank holds."""
    captured = engine.rank(rank)
    for group in captured["groups"]:
        window = group["spec"].get("sliding_window")
        block_size = group["spec"]["block_size"]
        for layer in group["layers"]:
            components = ("latent",) if "MLA" in group["spec"]["type"] else ("k", "v")
            for number, component in enumerate(components):
                size = captured["tensors"][layer]["element_size"]
                for index in range(-(-tokens // block_size)):
                    at = engine.element_offsets(
                        rank, layer, component, int(tables[group["group_id"]][index])
                    )
                    heads, slots, dims = at.shape
                    held = min(slots, tokens - index * block_size)
                    first = engine.model.group(engine.group_name(layer))
                    units = engine.shape.units(first, first.component(component), rank.tp)
                    position = index * block_size + np.arange(held)
                    value = (
                        ordinal(layer) * 7919
                        + number * 104729
                        + (units.start + np.arange(heads))[:, None, None] * 1299709
                        + position[None, :, None] * 15485863
                        + np.arange(dims)[None, None, :] * 32452843
                    )
                    for byte in range(size):
                        expected = (value * 2654435761 >> (8 + 7 * byte)) & 0xFF
                        where = at[:, :held, :] + byte
                        if write:
                            memory[where] = expected
                            continue
                        needed = position >= (max(0, tokens - window + 1) if window else 0)
                        assert (memory[where] == expected)[:, needed].all(), (layer, component)
