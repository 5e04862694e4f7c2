"""DeepSeek V3.2 and GLM: index keys as vLLM's kernels write them, latents as vLLM's layers declare.

Hand-overs of such engines are in `test_registered`.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from registered import LaidOut, Registered, Sparse

from kvferry import EngineShape, Rank, RankLayout
from kvferry.errors import DescriptionError, IncompatibleError
from kvferry.layout.hf import load_model
from kvferry.plan import bind, plan_pair
from kvferry.vllm import describe
from workers import Worker

pytestmark = pytest.mark.filterwarnings("ignore")

SUPPORT = Path(__file__).parents[1] / "support"
TOKENS = 300
LATENT_BYTES = {"auto": 1152, "fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


def engine(**more: object) -> Registered:
    made = Registered("deepseek-v2-tp1-cpu-mla", block=64, order="LBNHC", sparse=Sparse(mtp=1))
    return replace(made, **more)  # type: ignore[arg-type]


def worker(made: Registered) -> Worker:
    return LaidOut(made).engine.worker(Rank(made.pp - 1, 0))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[int, np.ndarray]:
    """Caches of the same keys, by the size of a kernel's block."""
    folder = tmp_path_factory.mktemp("keys")
    keys = np.random.default_rng(7).normal(size=(TOKENS, 128)).astype(np.float32)
    np.save(folder / "keys.npy", keys)
    program = [sys.executable, "-W", "ignore", str(SUPPORT / "index_kernel.py")]
    sizes = ["16", "64", "128"]
    subprocess.run([*program, str(folder / "keys.npy"), str(folder / "cache"), *sizes], check=True)
    return {int(size): np.fromfile(folder / f"cache.{size}", dtype=np.uint8) for size in sizes}


@pytest.mark.parametrize(
    ("source", "destination"), [(64, 64), (64, 128), (128, 64), (16, 64), (64, 16)]
)
def test_keys_land_where_the_kernel_writes_them(
    source: int, destination: int, written: dict[int, np.ndarray]
) -> None:
    whole = load_model("deepseek-v3.2")
    indexer = replace(whole.group("indexer"), layers=(0,))
    model = replace(whole, groups=(indexer,), total_layers=0)
    shapes = [EngineShape(block_size=b, interior="planes") for b in (source, destination)]
    memory, layouts, tables = [], [], []
    for block, shape in zip((source, destination), shapes, strict=True):
        blocks = len(written[block]) // (block * 132)
        layouts.append(RankLayout.build(model, shape, Rank(0, 0), blocks))
        memory.append(written[block].copy())
        tables.append([np.arange(1, blocks)])
    memory[1][:] = 0
    pair = plan_pair(model, *shapes)
    bound = bind(
        pair.plan(pair.edges[0], *layouts),
        tokens=TOKENS,
        src_tables=tables[0],
        dst_tables=tables[1],
        src_bases=[0],
        dst_bases=[0],
    )
    copies = bound.copies()
    for src, dst, size in zip(copies.src, copies.dst, copies.length, strict=True):
        memory[1][dst : dst + size] = memory[0][src : src + size]
    assert np.count_nonzero(memory[1]) > TOKENS * 100
    assert np.array_equal(memory[1], written[destination])


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


def test_formats_of_fp8_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    mine = worker(engine(sparse=Sparse("fp8_ds_mla")))
    usual = mine.describe().meaning
    monkeypatch.setattr(current_platform, "is_fp8_fnuz", lambda: True, raising=False)
    assert mine.describe().meaning == {**usual, "fp8 format": "fnuz"}
    assert "fp8 format" in worker(engine()).describe().meaning  # index keys are fp8


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
