"""Memory as a peer tells of it: all that an edge assigns must be there, once, or nothing moves."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry import CacheModel, Component, EngineShape, Group, Rank, RankLayout, bind, plan_pair
from kvferry.errors import (
    BindError,
    DescriptionError,
    IncompatibleError,
    KvferryError,
    ProtocolError,
)
from kvferry.handover.describe import (
    engine_info,
    rank_info,
    read_layout,
    read_model,
    read_shape,
    require_plannable,
)
from kvferry.layout.hf import load_model
from kvferry.net.messages import (
    Claimed,
    PartInfo,
    RankInfo,
    Reply,
    decode_reply,
    encode,
    pack_tables,
    read_tables,
)
from kvferry.plan.pieces import refine
from kvferry.topology import TransferTopology
from kvferry.verify.generate import generate
from kvferry.verify.sweep import build_model, build_shape
from plan_digest import digest

MODEL = load_model("llama-3.1-8b")
SRC, DST = EngineShape(tp=2), EngineShape(tp=1)
FIRST = Rank(0, 0)
BLOCKS = 64
Change = dict[str, Any]
change = msgspec.structs.replace


def told() -> RankInfo:
    return rank_info(RankLayout.build(MODEL, SRC, FIRST, BLOCKS), [4096], "h:1", "i", {})


def with_part(**changes: Any) -> RankInfo:
    info = told()
    return change(info, parts=[change(info.parts[0], **changes)])


def with_placements(**changes: Any) -> RankInfo:
    return with_part(placements=[change(p, **changes) for p in told().parts[0].placements])


def some_layers(part: PartInfo, which: slice) -> PartInfo:
    placements = [
        change(p, regions=p.regions[which], offsets=p.offsets[which]) for p in part.placements
    ]
    return change(part, layers=part.layers[which], placements=placements)


def moved_bytes(info: RankInfo, reading: bool = True) -> int:
    """Bytes of 256 tokens from or to the rank that tells this of itself; ours is the other one."""
    theirs, _ = read_layout(info, SRC)
    ours = RankLayout.build(MODEL, DST, FIRST, BLOCKS)
    src, dst = (theirs, ours) if reading else (ours, theirs)
    pair = plan_pair(MODEL, src.shape, dst.shape)
    plan = pair.plan(pair.edge(FIRST, FIRST), src, dst)
    tables, bases = [np.arange(1, 17)], [0]
    return bind(
        plan,
        tokens=256,
        src_tables=tables,
        dst_tables=tables,
        src_bases=bases,
        dst_bases=bases,
    ).bytes


PART = told().parts[0]


@pytest.mark.parametrize("reading", [True, False], ids=["read from", "written to"])
def test_every_part_of_a_table_must_have_the_blocks(reading: bool) -> None:
    few = change(some_layers(PART, slice(16, 32)), num_blocks=8)
    with pytest.raises(BindError, match="names block 8, but its ids go from 0 to 7"):
        moved_bytes(change(told(), parts=[some_layers(PART, slice(0, 16)), few]), reading)


LESS: dict[str, tuple[RankInfo, list[str]]] = {
    "no parts": (change(told(), parts=[]), ["must hold layers", "no layers [0, 1,", "stages"]),
    "half of the layers": (
        change(told(), parts=[some_layers(PART, slice(0, 16))]),
        ["must hold layers", "no layers [16, 17,"],
    ),
    "a layer missing in the middle": (
        change(told(), parts=[some_layers(PART, slice(0, 9)), some_layers(PART, slice(10, 32))]),
        ["no layers [9] "],
    ),
    "the same part twice": (change(told(), parts=[PART, PART]), ["one place", "several parts"]),
    "one layer twice, one not at all": (
        change(told(), parts=[some_layers(PART, slice(0, 31)), some_layers(PART, slice(0, 1))]),
        ["memory: [0]", "several parts"],
    ),
    "layers unsorted": (with_part(layers=PART.layers[::-1]), ["ascending", "[31, 30,"]),
    "half of a head": (with_placements(dim_sizes=(64,)), ["128 elements", "holds 64", "(64,)"]),
    "one element of a head": (with_placements(dim_sizes=(1,)), ["128", "holds 1 "]),
    "other heads": (with_placements(units=(4, 8)), ["0..3", "4..7"]),
    "fewer heads": (with_placements(units=(0, 3)), ["0..3", "0..2"]),
    "no heads": (with_placements(units=(3, 3)), ["a range of units", "(3, 3)"]),
    "blocks of another size": (
        with_part(block_entries=32, num_blocks=BLOCKS // 2),
        ["32 entries", "16 by its shape"],
    ),
    "more blocks than memory": (
        with_part(num_blocks=BLOCKS + 1),
        ["65 blocks in 'attention'", "room for 2097152"],
    ),
    "blocks too far apart": (
        with_placements(block_stride=1 << 20),
        ["64 blocks", "1048576 bytes apart", "room for"],
    ),
    "one component": (with_part(placements=PART.placements[:1]), ["no component 'v'"]),
}


@pytest.mark.parametrize("reading", [True, False], ids=["read from", "written to"])
@pytest.mark.parametrize("name", LESS)
def test_memory_that_does_not_hold_what_is_due(name: str, reading: bool) -> None:
    info, words = LESS[name]
    assert moved_bytes(told(), reading) == 256 * MODEL.token_bytes() // 2
    with pytest.raises(KvferryError) as error:
        moved_bytes(info, reading)
    for word in words:
        assert word in str(error.value), str(error.value)


IMPOSSIBLE: dict[str, tuple[RankInfo, list[str]]] = {
    "dims of 0": (with_placements(dim_sizes=(0,)), ["at least one element", "(0,)"]),
    "dims below 0": (with_placements(dim_sizes=(-2,)), ["at least one element", "(-2,)"]),
    "no dims": (with_placements(dim_sizes=(), dim_strides=()), ["at least one element", "()"]),
    "strides of other dims": (with_placements(dim_strides=(1, 2)), ["one stride each", "(1, 2)"]),
    "tiles of 0 slots": (with_placements(tile_slots=0), ["at least one slot", "found 0"]),
    "tiles that do not divide": (with_placements(tile_slots=3), ["tiles of 3 slots", "16"]),
    "table below 0": (with_part(table=-1), ["a block table", "table -1"]),
    "table that is not there": (with_part(table=1), ["table 1", "only 1 tables"]),
    "no blocks": (with_part(num_blocks=0), ["found 0 blocks"]),
    "a stride below 0": (with_placements(unit_stride=-8), ["strides of 0", "-8"]),
    "a stride of 2**63": (with_placements(block_stride=1 << 63), ["strides of 0", str(1 << 63)]),
    "a block outside its region": (with_placements(unit_stride=1 << 50), ["needs", "room for"]),
    "an offset outside": (with_placements(offsets=[1 << 40] * 32), ["needs", "room for -"]),
    "an offset of 2**63": (with_placements(offsets=[1 << 63] * 32), ["too large"]),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_memory_that_cannot_be(name: str) -> None:
    info, words = IMPOSSIBLE[name]
    with pytest.raises(ProtocolError, match="no possible layout") as error:
        moved_bytes(info)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "name", [n for n in IMPOSSIBLE if "divide" not in n and "outside" not in n and "not" not in n]
)
def test_impossible_numbers_do_not_pass_the_wire(name: str) -> None:
    info, _ = IMPOSSIBLE[name]
    if name == "strides of other dims":
        return  # which only both lists together show
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=RankInfo)


@pytest.mark.parametrize("block", [1 << 63, (1 << 64) - 1, -(1 << 63)])
def test_block_ids_that_are_no_numbers_of_blocks(block: int) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_tables(pack_tables([[block]]))
    with pytest.raises(ProtocolError, match="tables"):
        decode_reply(encode(Reply(1, Claimed(9, [[1, block]]))))
    assert decode_reply(encode(Reply(1, Claimed(9, [[-1, 7]])))).body == Claimed(9, [[-1, 7]])


@pytest.mark.parametrize("size", [1 << 25, 1 << 70])
def test_block_sizes_beyond_reason(size: int) -> None:
    engine = engine_info("p", "i", MODEL, SRC, {})
    for name, value in (("block_size", size), ("kernel_block_size_of", [["attention", size]])):
        with pytest.raises(ProtocolError, match="engine 'p'"):
            read_shape(change(engine, shape={**engine.shape, name: value}))


def test_stages_that_are_not_as_described() -> None:
    """An engine that cuts 20 + 12 layers but is described with even stages."""
    cut, said = EngineShape(pp=2, stages=(20, 12)), EngineShape(pp=2)
    pair = plan_pair(MODEL, said, DST)
    ours = RankLayout.build(MODEL, DST, FIRST, BLOCKS)
    for stage in range(2):
        real = replace(RankLayout.build(MODEL, cut, Rank(stage, 0), BLOCKS), shape=said)
        edge = pair.edge(Rank(stage, 0), FIRST)
        if stage == 0:  # it has more than is asked of it
            assert sum(p.layers for p in pair.plan(edge, real, ours).pieces) == 16
        else:
            with pytest.raises(IncompatibleError, match=r"no layers \[16, 17, 18, 19\]"):
                pair.plan(edge, real, ours)


def test_models_with_another_number_of_layers() -> None:
    """The last layers may cache nothing, and yet they move the cuts between stages."""
    longer = replace(MODEL, total_layers=1000)
    with pytest.raises(IncompatibleError, match=r"has 1000, .* has 32"):
        plan_pair(longer, EngineShape(), EngineShape(pp=2), dst_model=MODEL)
    assert longer.fingerprint() != MODEL.fingerprint()
    assert replace(MODEL, total_layers=0).fingerprint() == MODEL.fingerprint()
    topology = TransferTopology("d", MODEL, SRC, FIRST)
    topology._pair(EngineShape())
    with pytest.raises(IncompatibleError, match="1000"):
        topology._pair(EngineShape(), remote_model=longer)


def test_axes_that_do_not_end_together() -> None:
    assert [a.times for a in refine([(1, 64), (16, 1)], [(8, 2), (2, 1)])] == [8, 2]
    for other in ([(8, 1)], [(2, 8), (2, 1)], []):
        for src, dst in (([(16, 1)], other), (other, [(16, 1)])):
            with pytest.raises(IncompatibleError, match="different numbers of elements"):
                refine(src, dst)


def test_draft_layers_of_one_side_and_shared_layers_are_no_lack() -> None:
    kv = tuple(Component(name, 4, (8,), 2) for name in "kv")
    target, draft = Group("a", (0, 2, 3), kv), Group("draft", (0,), kv, role="draft")
    plain = CacheModel("m", (target,), 6)  # layers 1, 4 and 5 read the cache of others
    pair = plan_pair(
        CacheModel("m", (target, draft), 6),
        EngineShape(pp=2),
        EngineShape(tp=2),
        dst_model=plain,
        optional_roles=["draft"],
    )
    ours = CacheModel("m", (target, draft), 6)
    for edge in pair.edges:
        src = RankLayout.build(ours, EngineShape(pp=2), edge.src, 4)
        dst = RankLayout.build(plain, EngineShape(tp=2), edge.dst, 4)
        layers = sum(piece.layers for piece in pair.plan(edge, src, dst).pieces)
        assert layers == (2 if edge.src.pp == 0 else 1)


def test_honest_engines_of_all_kinds_are_read_as_they_are() -> None:
    compared = 0
    for index in range(60):
        case = generate(11, index)
        sides = case["src"], case["dst"]
        models = [build_model(case["model"], side) for side in sides]
        try:
            shapes = [build_shape(side) for side in sides]
            pair = plan_pair(models[0], *shapes, dst_model=models[1], optional_roles=["draft"])
            for edge in pair.edges:
                here = [
                    RankLayout.build(model, shape, rank, side["blocks"])
                    for model, shape, rank, side in zip(
                        models, shapes, (edge.src, edge.dst), sides, strict=True
                    )
                ]
                direct = digest(pair.plan(edge, *here))
                assert digest(pair.plan(edge, *map(over_the_wire, here))) == direct
                compared += 1
        except ProtocolError:
            raise  # a layout that was read
        except KvferryError:
            continue  # pairs that must be refused are among them
    assert compared > 300


def over_the_wire(layout: RankLayout) -> RankLayout:
    info = rank_info(layout, [0] * len(layout.regions), "h:1", "i", {})
    return read_layout(msgspec.convert(msgspec.to_builtins(info), RankInfo), layout.shape)[0]


def test_what_a_peer_tells_is_judged_quickly() -> None:
    """Told by a peer, on a thread that others wait for: nothing may grow with the square."""
    model = load_model("llama-3.1-8b")
    engine = engine_info("p", "i", model, EngineShape(tp=2), {})
    many = [[f"g{n}", 16] for n in range(20_000)]
    engine = msgspec.structs.replace(engine, shape={**engine.shape, "block_size_of": many})
    begin = time.process_time()
    with pytest.raises(ProtocolError, match="names"):
        read_shape(engine)
    layout = RankLayout.build(model, EngineShape(), FIRST, 4)
    placements = tuple(
        replace(one, regions=np.zeros(30_000, int), offsets=np.zeros(30_000, int))
        for one in layout.parts[0].placements
    )
    many_layers = replace(layout.parts[0], layers=np.arange(30_000), placements=placements)
    with pytest.raises(DescriptionError, match="30000 in several"):
        replace(layout, parts=(many_layers, many_layers))
    assert time.process_time() - begin < 1


SLOW: list[dict[str, Any]] = [
    {"tp": 1024, "pp": 1, "role_tp": [[f"r{n}", 1] for n in range(4000)]},
    {"tp": 1024, "pp": 1, "dcp": 64},
    {"tp": 1, "pp": 1024},
    {"tp": 1024, "pp": 1, "dcp": 64, "interleave": 1021, "block_size": 1021},
]


@pytest.mark.parametrize("told", SLOW, ids=["roles", "dcp", "stages", "interleave"])
def test_engines_that_would_take_seconds_to_plan_are_refused_before(told: dict[str, Any]) -> None:
    """Of a model with a group for each of its 62 layers, as some of vLLM's are."""
    model = load_model("gemma-3-27b")
    groups = tuple(
        replace(group, name=f"{group.name}-{layer}", layers=(layer,))
        for group in model.groups
        for layer in group.layers
    )
    many, ours = replace(model, groups=groups), EngineShape(tp=4, pp=4)
    engine = engine_info("p", "i", many, ours, {})
    engine = msgspec.structs.replace(engine, shape={**engine.shape, **told})
    begin = time.process_time()
    with pytest.raises(ProtocolError):
        require_plannable(read_model(engine), read_shape(engine), ours)
    assert time.process_time() - begin < 1
