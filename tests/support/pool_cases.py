"""Random pairs of engines over a pool, judged by the oracle of `kvferry.verify`.

The writer's memory holds numbered bytes, as the oracle puts them there. All its blocks go into a
dictionary under their keys; every rank of the reader then looks up, plans and reads. What the
reader's memory must hold comes from the oracle, which shares no code with layouts or plans.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np

from kvferry.layout import Rank, RankLayout
from kvferry.layout.model import Residency
from kvferry.pool.hits import Held, Need, PoolReader, longest_hit
from kvferry.pool.layout_registry import (
    PoolLayout,
    make_layout,
    plan_read,
    read_record,
    require_readable,
)
from kvferry.pool.objects import block_span, object_memory
from kvferry.verify.generate import _Generator, generate
from kvferry.verify.oracle import FREE, NOTHING, CaseDict, CaseEngine, Oracle, Worker
from kvferry.verify.sweep import AddressSpace, build_model, build_shape


def pool_case(seed: int, index: int, *, both_whole: bool = False) -> CaseDict | None:
    """A random case as a pool meets it: whole blocks of the reader, nothing dropped at the writer.

    None where the models cannot be kept in a pool (rings), or differ. `both_whole`: the tokens are
    whole blocks of the writer too, and there are no states, so that all is saved as it is computed.
    """
    case = generate(seed, index)
    groups = case["model"]["groups"]
    if any(g["residency"]["kind"] == "ring" for g in groups):
        return None
    case["fault"] = ""
    rng = Random(f"pool {seed} {index}")
    for side in (case["src"], case["dst"]):
        side["absent_roles"], side["tables"] = [], {}
        side.pop("tensors", None)  # a pool has one table for each group
        side.pop("fewer", None)
    case["src"]["shape"]["full_residency"] = True
    src, dst = (CaseEngine(case["model"], case[n]) for n in ("src", "dst"))
    state = any(g["residency"]["kind"] == "state" for g in groups)
    spans = [dst.block_positions(g) for g in groups]
    if state and both_whole:
        return None
    if state or both_whole:
        spans += [src.block_positions(g) for g in groups]
    align = math.lcm(*spans)
    if align > 240:
        return None
    case["tokens"] = align * rng.randint(1, max(1, 120 // align))
    own = math.lcm(*[dst.block_positions(g) for g in groups])
    case["skip"] = rng.choice((0, 0, rng.randrange(0, case["tokens"], own)))
    generator = _Generator(rng)
    for engine in (src, dst):
        generator._allocate(engine, case["tokens"])
    return case


def plain_shape(**fields: object) -> dict[str, object]:
    """An engine of one rank as cases describe it, but for `fields`."""
    return {
        "tp": 1,
        "pp": 1,
        "stages": [],
        "dcp": 1,
        "interleave": 1,
        "role_tp": {},
        "block_size": 2,
        "block_size_of": {},
        "kernel_block_size": 0,
        "kernel_block_size_of": {},
        "order": "LBHNC",
        "interior": "joined",
        "interior_of": {},
        "conv_order": "DS",
        "page_align": 1,
        "overlay": False,
        "full_residency": False,
        "null_block": 0,
    } | fields


def plain_group(name: str, role: str, components: list[dict[str, object]]) -> dict[str, object]:
    """One layer with full attention, as cases describe it."""
    return {
        "name": name,
        "role": role,
        "layers": [0],
        "components": components,
        "residency": {"kind": "full", "span": 0},
        "tokens_per_entry": 1,
        "partial_entries": False,
        "context_parallel": True,
    }


def layouts(case: CaseDict, name: str) -> dict[Rank, RankLayout]:
    side: Any = case[name]  # type: ignore[literal-required]
    model, shape = build_model(case["model"], side), build_shape(side)
    return {r: RankLayout.build(model, shape, r, side["blocks"]) for r in shape.ranks}


def write_all(case: CaseDict, oracle: Oracle) -> tuple[PoolLayout, dict[str, np.ndarray]]:
    """Every block of the writer, as objects of numbered bytes."""
    model = build_model(case["model"], case["src"])
    ranks = layouts(case, "src")
    published = make_layout(model, {"dtype": "test"}, list(ranks.values()))
    layout = read_record(published.encoded, published.id)
    memory = AddressSpace.build("src", ranks)
    images = {rank: oracle.source(Worker(*rank)) for rank in ranks}
    whole = memory.fill(images, NOTHING)
    objects: dict[str, np.ndarray] = {}
    for rank, mine in ranks.items():
        for table, template in object_memory(model, mine).items():
            group = model.groups[table]
            ids = case["src"]["tables"][group.name]
            span = block_span(group, layout.shape)
            blocks = case["tokens"] // span if group.is_state else -(-case["tokens"] // span)
            fragment = layout.owner[table, rank]
            turns = layout.turns[fragment]
            for number in range(blocks):
                if turns[number % len(turns)] != rank:
                    continue
                if group.is_state and number != blocks - 1:
                    continue
                block = ids[0 if group.is_state else number]
                at = template.blocks(memory.bases[rank], np.asarray([block])).address[0]
                content = whole[memory.bytes_of(at, template.lengths)]
                key = f"{fragment.name}/{number}"
                assert key not in objects
                objects[key] = content
    return layout, objects


def check(case: CaseDict, *, break_range: bool = False) -> int:
    """Write, look up and read a case; the number of bytes compared."""
    oracle = Oracle(case)
    layout, objects = write_all(case, oracle)
    model = build_model(case["model"], case["dst"])
    ranks = layouts(case, "dst")
    ours = make_layout(model, {"dtype": "test"}, list(ranks.values()))
    require_readable(ours, layout)
    shape = ours.shape
    full = case["dst"]["shape"]["full_residency"]
    needs = [
        Need(g.name, Residency() if full and not g.is_state else g.residency, block_span(g, shape))
        for g in model.groups
    ]
    held = []
    for group in layout.model.groups:
        span = block_span(group, layout.shape)
        tables = {kind.table for kind in layout.kinds if group.name in kind.groups}
        fragments = [f for f in layout.fragments if f.table in tables]
        exists = [
            all(f"{f.name}/{i}" in objects for f in fragments)
            for i in range(-(-case["tokens"] // span))
        ]
        held.append(Held(layout.id, group.name, span, np.asarray(exists, dtype=bool)))
    align = math.lcm(*[need.block_tokens for need in needs])
    if case["skip"] >= case["tokens"]:
        return 0
    hit = longest_hit(PoolReader(tuple(needs), align), held, case["tokens"], case["skip"])
    assert hit.tokens == case["tokens"], (hit, case["tokens"])
    memory = AddressSpace.build("dst", ranks)
    expected = memory.fill({r: oracle.target(Worker(*r)) for r in ranks}, NOTHING)
    compared = 0
    for rank, mine in ranks.items():
        plan = plan_read(layout, model, mine)
        tables = []
        for group in model.groups:
            ids = list(case["dst"]["tables"][group.name])
            if group.is_state:
                ids = [0] * (case["tokens"] // block_span(group, shape) - 1) + ids
            tables.append(np.asarray(ids, dtype=np.int64))
        whole = np.full(memory.size, NOTHING, dtype=np.int32)
        times = np.zeros(memory.size, dtype=np.int8)
        for segment in hit.segments:
            wanted = plan.bind(segment, tables, memory.bases[rank])
            parts = zip(wanted.fragments, wanted.blocks, wanted.slices, strict=True)
            for fragment, block, slices in parts:
                content = objects[f"{fragment.name}/{block}"]
                assert memory.stray(slices.address, slices.length, rank) is None
                to = memory.bytes_of(slices.address, slices.length)
                ends = np.cumsum(slices.length)
                steps = np.arange(int(ends[-1]))
                offset = slices.offset + (1 if break_range else 0)
                from_ = steps + np.repeat(offset - (ends - slices.length), slices.length)
                whole[to] = content[np.minimum(from_, len(content) - 1)]
                np.add.at(times, to, 1)
        where = np.zeros(memory.size, dtype=bool)  # this rank's memory
        for base, region in zip(memory.bases[rank].tolist(), mine.regions, strict=True):
            where[base - memory.first : base - memory.first + region.bytes] = True
        due = where & (expected >= 0)
        assert (times[due] == 1).all(), "a byte was not written once"
        assert (whole[due] == expected[due]).all(), "a byte is wrong"
        untouched = where & (expected != FREE) & (expected < 0)
        assert not times[untouched].any(), "a byte was written that nobody asked for"
        compared += int(due.sum())
    return compared
