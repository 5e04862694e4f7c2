"""Every architecture between engines too large for a CPU, as vLLM lays them out: bytes are equal.

Specs, groups, memory and views are vLLM's own; the adapter describes them; producer and consumer
are processes with a real carrier (`registered`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from registered import Registered, RegisteredConsumer

from p2p_peers import Child

pytestmark = pytest.mark.filterwarnings("ignore")

HEADS = (("num_key_value_heads", 24),)
EIGHT = (("num_key_value_heads", 8),)
TWO = (("num_key_value_heads", 2),)
MAMBA = (*EIGHT, ("mamba_n_groups", 8))
DELTA = (*EIGHT, ("linear_num_key_heads", 8), ("linear_num_value_heads", 16))


def engine(like: str, tp: int = 1, pp: int = 1, dcp: int = 1, **more: object) -> Registered:
    return Registered(like, tp, pp, dcp, **more)  # type: ignore[arg-type]


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
]


@pytest.fixture(scope="module")
def host() -> Iterator[Child]:
    child = Child.start("registered", None)  # type: ignore[arg-type]
    yield child
    child.stop()


def name(case: tuple[Registered, Registered, int]) -> str:
    def said(e: Registered) -> str:
        return f"tp{e.tp} pp{e.pp}" + (f" dcp{e.dcp}" if e.dcp > 1 else "")

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
