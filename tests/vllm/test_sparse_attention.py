"""DeepSeek V3.2 and GLM: latents and index keys as vLLM writes them, and as its layers declare them
(hand-overs of such engines: `test_registered`).
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from registered import LaidOut, Registered, RegisteredRack, Sparse

from kvferry import EngineShape, Rank, RankLayout
from kvferry.errors import DescriptionError, IncompatibleError
from kvferry.layout.hf import load_model
from kvferry.plan import bind, plan_pair
from kvferry.pool.hits import Segment
from kvferry.pool.layout_registry import make_layout, plan_read, read_record
from kvferry.pool.objects import object_memory
from kvferry.vllm import describe
from workers import Worker

pytestmark = pytest.mark.filterwarnings("ignore")

SUPPORT = Path(__file__).parents[1] / "support"
TOKENS = 150
KERNEL_TYPES = ("auto", "fp8", "fp8_ds_mla")  # Triton's interpreter writes no fp4
LATENT_BYTES = {"auto": 1152, "fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


def engine(**more: object) -> Registered:
    made = Registered("deepseek-v2-tp1-cpu-mla", block=64, order="LBNHC", sparse=Sparse(mtp=1))
    return replace(made, **more)  # type: ignore[arg-type]


def worker(made: Registered) -> Worker:
    return LaidOut(made).engine.worker(Rank(made.pp - 1, 0))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., np.ndarray]:
    """The cache of the same tokens in a type, with a size of a kernel's blocks, of a group."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("sparse") / "cache"
    cases = [f"{kind}:{block}" for kind in KERNEL_TYPES for block in (16, 64, 128)]
    program = [sys.executable, "-W", "ignore", str(SUPPORT / "sparse_kernel.py")]
    subprocess.run([*program, str(out), str(TOKENS), *cases], check=True)

    def read(cache_dtype: str, block: int, group: str) -> np.ndarray:
        return np.fromfile(f"{out}.{cache_dtype}.{block}.{group}", dtype=np.uint8)

    return read


@pytest.mark.parametrize("cache_dtype", KERNEL_TYPES)
@pytest.mark.parametrize(
    ("source", "destination"), [(64, 64), (64, 128), (128, 64), (16, 64), (64, 16)]
)
def test_bytes_land_where_the_kernel_writes_them(
    cache_dtype: str, source: int, destination: int, written: Callable[..., np.ndarray]
) -> None:
    whole = load_model("deepseek-v3.2", cache_dtype=cache_dtype)
    for name in ("mla", "indexer"):
        group = replace(whole.group(name), layers=(0,))
        model = replace(whole, groups=(group,), total_layers=0)
        interior = "planes" if name == "indexer" else "joined"
        memory, layouts, tables, shapes = [], [], [], []
        for block in (source, destination):
            memory.append(written(cache_dtype, block, name))
            blocks = len(memory[-1]) // (block * group.entry_bytes)
            shapes.append(EngineShape(block_size=block, interior=interior))
            layouts.append(RankLayout.build(model, shapes[-1], Rank(0, 0), blocks))
            tables.append([np.arange(1, blocks)])
        pair = plan_pair(model, *shapes)
        bound = bind(
            pair.plan(pair.edges[0], *layouts),
            tokens=TOKENS,
            src_tables=tables[0],
            dst_tables=tables[1],
            src_bases=[0],
            dst_bases=[0],
        )
        copies, moved = bound.copies(), np.zeros_like(memory[1])
        for src, dst, size in zip(copies.src, copies.dst, copies.length, strict=True):
            moved[dst : dst + size] = memory[0][src : src + size]
        assert np.count_nonzero(moved) > TOKENS * 100
        assert np.array_equal(moved, memory[1]), name


@pytest.mark.parametrize("cache_dtype", LATENT_BYTES)
def test_pages_are_as_long_as_vllms(cache_dtype: str) -> None:
    made = engine(sparse=Sparse(cache_dtype, mtp=1, layers="FSF"))
    expected = {"attn": 64 * LATENT_BYTES[cache_dtype], "k_cache": 64 * 132}
    specs = made.specs()
    assert len(specs) == 7
    for name, spec in specs.items():
        assert spec.page_size_bytes == expected[name.rpartition(".")[2]]
    found = worker(made).describe()
    assert [(g.name, g.layers) for g in found.model.groups] == [
        ("mla", (0, 1, 2)),
        ("indexer", (0, 2)),
        ("draft", (0,)),
        ("draft.indexer", (0,)),
    ]
    for part in found.layout.parts:
        assert part.page_bytes == expected["k_cache" if "indexer" in part.group else "attn"]
    planned = load_model("deepseek-v3.2", cache_dtype=cache_dtype, draft_layers=1)
    for group in planned.groups:
        theirs = found.model.group(group.name)
        assert [(c.name, c.dims) for c in group.components] == [
            (c.name, c.dims) for c in theirs.components
        ]


def test_keys_of_other_devices_move_between_blocks_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels for AMD shuffle the values of 16 tokens; of another device we know nothing."""
    told = {}
    for name, made in (("wide", engine(block=128, kernel=64)), ("usual", engine())):
        told[name] = worker(made).describe()
        monkeypatch.setattr("workers.ON_NVIDIA", False)
        told[f"{name} elsewhere"] = worker(made).describe()
        monkeypatch.undo()
    for pair in itertools.permutations(told, 2):
        if {*pair} == {"wide", "usual"}:
            require_plan(*(told[name] for name in pair))
            continue
        with pytest.raises(IncompatibleError, match="opaque"):
            require_plan(*(told[name] for name in pair))
    require_plan(*[told["usual elsewhere"]] * 2)


def require_plan(src: describe.Described, dst: describe.Described) -> None:
    shapes = src.layout.shape, dst.layout.shape
    pair = plan_pair(src.model, *shapes, dst_model=dst.model)
    assert pair.plan(pair.edges[0], src.layout, dst.layout).pieces


@pytest.mark.parametrize("turned", [False, True])
def test_a_pool_is_shared_between_shapes(turned: bool) -> None:
    tokens, sparse = 512, Sparse("fp8_ds_mla", mtp=1)
    sides = [engine(tp=2, sparse=sparse), engine(pp=2, block=128, sparse=sparse)]
    writer, reader = (LaidOut(side) for side in (reversed(sides) if turned else sides))
    racks = [RegisteredRack(writer, rank, 0x5A) for rank in writer.engine.ranks]
    made = make_layout(writer.engine.model, {}, [rack.layout for rack in racks])
    layout, tables, objects = read_record(made.encoded, made.id), writer.tables(tokens, 1), {}
    for rack in racks:
        rack.fill(tables, tokens)
        for table, memory in object_memory(writer.engine.model, rack.layout).items():
            fragment = layout.owner[table, rack.rank]
            pages = memory.blocks(np.asarray(rack.bases), np.asarray(tables[table])).address
            for number, at in enumerate(pages.tolist()):
                parts = zip(at, memory.lengths.tolist(), strict=True)
                content = b"".join(ctypes.string_at(start, length) for start, length in parts)
                # ranks of one fragment hold equal bytes
                assert objects.setdefault((fragment.name, number), content) == content
    wanted = reader.tables(tokens, 2)
    for rank in reader.engine.ranks:
        rack = RegisteredRack(reader, rank, 0xEE)
        assert rack.wrong_bytes(wanted, tokens)
        plan = plan_read(layout, reader.engine.model, rack.layout)
        blocks = [np.asarray(table) for table in wanted]
        for group in reader.engine.model.groups:
            segment = Segment(layout.id, group.name, 0, tokens)
            found = plan.bind(segment, blocks, np.asarray(rack.bases))
            for fragment, number, s in zip(
                found.fragments, found.blocks, found.slices, strict=True
            ):
                content = objects[fragment.name, number]
                for start, to, length in zip(s.offset, s.address, s.length, strict=True):
                    ctypes.memmove(int(to), content[start : start + length], int(length))
        assert rack.wrong_bytes(wanted, tokens) == 0


def test_formats_of_fp8_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    lone = LaidOut(engine(pp=2, sparse=Sparse(layers="FSS"))).engine  # a stage without index keys
    plain = LaidOut(Registered("llama-tp1")).engine
    workers = [lone.worker(Rank(0, 0)), lone.worker(Rank(1, 0))]
    usual = [one.describe().meaning for one in workers]
    monkeypatch.setattr(current_platform, "is_fp8_fnuz", lambda: True, raising=False)
    for one, before in zip(workers, usual, strict=True):
        assert one.describe().meaning == {**before, "fp8 format": "fnuz"}
    assert "fp8 format" not in plain.worker(Rank(0, 0)).describe().meaning
    fp8 = LaidOut(Registered("llama-tp1-fp8")).engine.worker(Rank(0, 0))
    assert fp8.describe().meaning["fp8 format"] == "fnuz"


def test_a_cache_in_host_memory_is_refused() -> None:
    from vllm.v1.kv_cache_interface import HiSparseResidentSpec

    mine = worker(engine())
    (group,) = mine.kv_cache_config.kv_cache_groups
    resident = HiSparseResidentSpec(block_size=64, page_size=64 * 656)
    mine.kv_cache_config.kv_cache_groups.append(
        type(group)(layer_names=["model.layers.0.self_attn.attn.resident"], kv_cache_spec=resident)
    )
    with pytest.raises(DescriptionError, match="HiSparse"):
        mine.describe()


def test_names_of_indexers_are_vllms() -> None:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    assert DeepseekV32IndexerBackend.get_name() == describe.INDEXER
