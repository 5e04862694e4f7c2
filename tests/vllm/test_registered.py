"""Every architecture between engines too large for a CPU, as vLLM lays them out: bytes are equal.

Specs, groups, memory and views are vLLM's own; the adapter describes them; producer and consumer
are processes with a real carrier (`registered`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from registered import Draft, LaidOut, Registered, RegisteredConsumer, Sparse

from handover_peers import Child
from kvferry.layout.shape import Rank

pytestmark = pytest.mark.filterwarnings("ignore")

HEADS = (("num_key_value_heads", 24),)
EIGHT = (("num_key_value_heads", 8),)
TWO = (("num_key_value_heads", 2),)
NOVEL = ("model_type", "novel")
MAMBA = (*EIGHT, ("mamba_n_groups", 8))
DELTA = (*EIGHT, ("linear_num_key_heads", 8), ("linear_num_value_heads", 16))


def engine(like: str, tp: int = 1, pp: int = 1, dcp: int = 1, **more: object) -> Registered:
    return Registered(like, tp, pp, dcp, **more)  # type: ignore[arg-type]


# DeepSeek's latents and a draft of grouped heads: pages of two lengths behind one table
P = Registered("deepseek-v2-tp1-cpu-mla", 2, block=32, kernel=16, order="LBHNC", draft=Draft())
D = replace(P, tp=4, block=64, kernel=32)
SPLIT = Draft(layers=2, tp=2)  # over both ranks of P
CPU = Draft(layers=2, backend="CPU_ATTN")
LATENT_BYTES = 576 * 4  # a token of one layer
DRAFT_BYTES = 2 * 4 * 32 * 4  # K and V of all four heads

# DeepSeek V3.2 and GLM: index keys beside latents, also in a module for multi-token prediction
DSA = Registered("deepseek-v2-tp1-cpu-mla", block=64, order="LBNHC", sparse=Sparse("fp8_ds_mla"))
WIDE = replace(DSA, block=128, kernel=64)
MTP = replace(DSA, sparse=Sparse("fp8_ds_mla", mtp=2))
LONE = replace(DSA, sparse=Sparse("auto", layers="FSSS"))  # a stage without index keys
SHARED = replace(DSA, sparse=Sparse("auto", layers="FSFS"))

# source, destination, tokens
CASES = [
    (
        engine("llama-tp1", 8, block=32, changes=HEADS),
        engine("llama-tp1", 3, block=64, changes=HEADS),
        333,
    ),
    (
        engine("llama-tp1", 2, 4, changes=EIGHT),
        engine("llama-tp1", 8, block=32, changes=EIGHT),
        300,
    ),
    (engine("llama-tp1", 1, 2, changes=EIGHT), engine("llama-tp1", 4, 4, changes=EIGHT), 129),
    # fewer heads than ranks: copies, or shares of context parallelism
    (engine("llama-mqa-tp2", 8), engine("llama-mqa-tp2", 2, 2), 140),
    (
        engine("llama-tp1", 8, dcp=4, block=32, changes=TWO),
        engine("llama-tp1", 1, changes=TWO),
        333,
    ),
    (
        engine("llama-tp1", 2, block=64, changes=TWO),
        engine("llama-tp1", 8, dcp=2, interleave=8, block=32, changes=TWO),
        500,
    ),
    (engine("deepseek-v2-tp1-cpu-mla", 8, dcp=8), engine("deepseek-v2-tp1-cpu-mla", 2), 333),
    (
        engine("deepseek-v2-tp1-cpu-mla", 4, 3),
        engine("deepseek-v2-tp1-cpu-mla", 8, dcp=4, interleave=4),
        200,
    ),
    # windows beside full layers, in groups that lie over each other
    (engine("gemma3-tp1", 8, changes=EIGHT), engine("gemma3-tp1", 2, 2, changes=EIGHT), 333),
    (engine("gpt-oss-tp1", 1, 2), engine("gpt-oss-tp1", 8), 300),
    # states between different tp, also with stages
    (
        engine("granite-hybrid-tp1", 8, changes=MAMBA),
        engine("granite-hybrid-tp1", 2, changes=MAMBA),
        333,
    ),
    (
        engine("granite-hybrid-tp1", 2, 2, changes=MAMBA),
        engine("granite-hybrid-tp1", 4, changes=MAMBA),
        256,
    ),
    (engine("granite-hybrid-1group-tp2", 4), engine("granite-hybrid-1group-tp2", 1), 100),
    (
        engine("qwen3-next-tp1", 8, changes=DELTA),
        engine("qwen3-next-tp1", 1, 2, changes=DELTA),
        333,
    ),
    (engine("qwen3-next-tp1", 2, changes=DELTA), engine("qwen3-next-tp1", 4, changes=DELTA), 130),
    # fp8
    (
        engine("llama-tp1-fp8", 8, block=64, changes=EIGHT),
        engine("llama-tp1-fp8", 2, 4, changes=EIGHT),
        333,
    ),
    # of a model that we have no table of, described from vLLM's specs
    (
        engine("llama-tp1", 2, 2, block=32, changes=(*EIGHT, NOVEL)),
        engine("llama-tp1", 1, changes=(*EIGHT, NOVEL)),
        333,
    ),
    (
        engine("gemma3-tp1", 4, changes=(*EIGHT, NOVEL)),
        engine("gemma3-tp1", 2, 3, changes=(*EIGHT, NOVEL)),
        333,
    ),
    # with a draft: different blocks and kernel blocks, all its heads on every rank
    (P, D, 333),
    (replace(P, kernel=0), replace(D, block=48, kernel=16), 200),
    (replace(D, carrier="tcp"), replace(P, carrier="tcp"), 129),
    (replace(P, draft=SPLIT), replace(D, draft=replace(SPLIT, tp=1)), 300),
    (replace(P, draft=CPU), replace(D, draft=CPU), 170),
    (replace(P, kernel=0, order="BLHNC"), replace(D, kernel=0, order="BLHNC"), 140),
    # sparse attention
    (replace(DSA, tp=4), replace(WIDE, tp=8), 333),
    (replace(WIDE, tp=2, block=256), replace(WIDE, kernel=128), 1000),
    (replace(MTP, tp=2), replace(MTP, tp=1, pp=2, block=128), 333),
    (replace(MTP, pp=2, block=128, kernel=64), replace(MTP, tp=2), 200),
    (replace(SHARED, order="BLHNC", carrier="tcp"), replace(SHARED, pp=2, carrier="tcp"), 300),
    (replace(DSA, tp=8, dcp=4, interleave=4), replace(WIDE, tp=2), 333),
    (replace(LONE, pp=2), replace(LONE, tp=2, block=128, kernel=64), 150),
    (replace(LONE, tp=2), replace(LONE, pp=2, block=128, kernel=64), 150),
    (replace(DSA, sparse=Sparse("nvfp4_ds_mla")), replace(WIDE, sparse=Sparse("nvfp4_ds_mla")), 90),
]


@pytest.fixture(scope="module")
def host() -> Iterator[Child]:
    child = Child.start("registered", None)  # type: ignore[arg-type]
    yield child
    child.stop()


def name(case: tuple[Registered, Registered, int]) -> str:
    def said(e: Registered) -> str:
        shape = f"tp{e.tp} pp{e.pp}" + (f" dcp{e.dcp}" if e.dcp > 1 else "")
        return shape + (f" draft-tp{e.draft.tp}" if e.draft else "")

    return f"{case[0].like}: {said(case[0])} to {said(case[1])}"


@pytest.mark.parametrize("case", CASES, ids=map(name, CASES))
def test_bytes_are_equal(case: tuple[Registered, Registered, int], host: Child) -> None:
    source, destination, tokens = case
    ticket = host.ask("hold", source, tokens)
    d = RegisteredConsumer(destination)
    try:
        assert d.wrong_bytes(tokens) > 0
        loaded = d.load(ticket)
        assert [one.error for one in loaded] == [""] * len(d.ranks)
        assert d.wrong_bytes(tokens) == 0
    finally:
        d.close()


@pytest.mark.parametrize("side", [P, D], ids=["prefill", "decode"])
def test_latents_and_a_draft_are_described(side: Registered) -> None:
    """By group: heads, blocks, kernel blocks, tensor parallel size and length of a page."""
    laid_out = LaidOut(side)
    (group,) = laid_out.engine.data["ranks"][0]["groups"]
    assert group["spec"]["type"] == "UniformTypeKVCacheSpecs" and len(group["layers"]) == 4
    for tp in range(side.tp):
        found = laid_out.engine.worker(Rank(0, tp)).describe()
        latent, draft = found.model.groups
        assert (latent.layers, draft.layers, draft.role) == ((0, 1, 2), (0,), "draft")
        assert [c.units for c in draft.components] == [4, 4]
        shape = found.layout.shape
        assert (shape.tp, shape.role_tp) == (side.tp, (("draft", 1),))
        assert {shape.block_tokens(g) for g in (latent, draft)} == {side.block}
        assert shape.kernel_block_size == side.kernel
        (mine,) = found.layout.parts_of("draft")
        assert mine.placements[0].units == (0, 4)  # all heads on every rank
        assert mine.table == found.layout.parts_of(latent.name)[0].table == 0
        said = re.findall(r"(\d+) layers of (\d+) bytes a block", found.summary())
        assert said == [
            ("3", str(side.block * LATENT_BYTES)),
            ("1", str(side.block * DRAFT_BYTES)),
        ]
