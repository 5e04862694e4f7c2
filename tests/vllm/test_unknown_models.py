"""Models that kvferry has no table of, described from vLLM's specs alone, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import pytest

from golden import Golden, golden
from kvferry.errors import DescriptionError
from kvferry.layout.shape import Rank

torch = pytest.importorskip("torch", reason="this tier runs in the environment with vLLM")
kv = pytest.importorskip("vllm.v1.kv_cache_interface")

from kvferry.vllm.describe import Described
from workers import Worker

ONE_HEAD = "With one head a rank"
PLAIN_ONES = [
    "llama-tp1",
    "llama-tp2",
    "llama-pp2",
    "llama-tp1-block32",
    "llama-tp1-bf16-fp8",
    "llama-tp1-fp8",
    "llama-tp1-head80",
    "mistral-tp1",
    "gemma3-tp1",
    "gpt-oss-tp1",
    "deepseek-v2-tp1-cpu-mla",
    "deepseek-v2-tp2-cpu-mla",
]
DOUBTFUL = {
    "llama-mqa-tp2": ONE_HEAD,
    "gpt-oss-tp2": ONE_HEAD,
    "granite-hybrid-tp1": "MambaSpec",
    "qwen3-next-tp1": "MambaSpec",
}


def unknown(engine: Golden) -> Golden:
    return Golden({**engine.data, "hf_config": {**engine.data["hf_config"], "model_type": "novel"}})


def described(engine: Golden, change: Callable[[Worker], None] | None = None) -> list[Described]:
    """What each rank says."""
    workers = [Worker(engine, rank) for rank in engine.ranks]
    for worker in workers if change else ():
        change(worker)
    return [worker.describe() for worker in workers]


@pytest.mark.parametrize("name", PLAIN_ONES)
def test_they_lie_where_probes_found_them(name: str) -> None:
    engine = golden(name)
    for rank, found in zip(engine.ranks, described(unknown(engine)), strict=True):
        expected = engine.layout(rank)
        assert found.model.fingerprint() == engine.model.fingerprint()
        assert found.layout.tables == expected.tables
        for mine, theirs in zip(found.layout.parts, expected.parts, strict=True):
            assert (mine.group, mine.table) == (theirs.group, theirs.table)
            assert mine.layers.tolist() == theirs.layers.tolist()
            for a, b in zip(mine.placements, theirs.placements, strict=True):
                for field in fields(a):
                    assert np.array_equal(getattr(a, field.name), getattr(b, field.name))


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_specs_do_not_prove_is_refused(name: str) -> None:
    with pytest.raises(DescriptionError, match="'novel' is not in kvferry's table") as error:
        described(unknown(golden(name)))
    assert DOUBTFUL[name] in str(error.value)


def changed(**fields: Any) -> Callable[[Worker], None]:
    """The specs of the first table with other values."""

    def change(worker: Worker) -> None:
        group = worker.kv_cache_config.kv_cache_groups[0]
        group.kv_cache_spec = replace(group.kv_cache_spec, **fields)

    return change


def heads(count: int) -> Callable[[Worker], None]:
    """Another number of heads in the model's configuration."""

    def change(worker: Worker) -> None:
        config = worker.vllm_config.model_config
        config.model_arch_config = [Fake(total_num_kv_heads=count)] * 8

    return change


def stored_as(dtype: str) -> Callable[[Worker], None]:
    def change(worker: Worker) -> None:
        worker.vllm_config.cache_config.cache_dtype = dtype

    return change


def renamed(name: Callable[[str], str]) -> Callable[[Worker], None]:
    def change(worker: Worker) -> None:
        for group in worker.kv_cache_config.kv_cache_groups:
            group.layer_names = [name(layer) for layer in group.layer_names]

    return change


def as_class(cls: str) -> Callable[[Worker], None]:
    """The first table's specs as a subclass of their class, or another one."""

    def change(worker: Worker) -> None:
        group = worker.kv_cache_config.kv_cache_groups[0]
        told = {f.name: getattr(group.kv_cache_spec, f.name) for f in fields(kv.AttentionSpec)}
        group.kv_cache_spec = getattr(kv, cls)(**told)

    return change


DOUBTS = {
    "more heads than configured": ("llama-tp1", heads(2), "1 has 4 heads of 2"),
    "heads repeated on all ranks": ("llama-tp2", heads(2), "2 has 2 heads of 2"),
    "fewer heads than configured": ("llama-tp2", heads(8), "2 has 2 heads of 8"),
    "windows in full attention": ("llama-tp1", changed(sliding_window=96), "hybrid"),
    "chunks in full attention": ("llama-tp1", changed(attention_chunk_size=96), "hybrid"),
    "several states a token": ("llama-tp1", changed(tokens_per_state=4), "one entry a token"),
    "not causal": ("llama-tp1", changed(non_causal=True), "one entry a token"),
    "latents of one rank": ("deepseek-v2-tp2-cpu-mla", changed(max_tp_shards=None), "all ranks"),
    "packed": ("llama-tp1", changed(state_content_bytes=520), "promises 512 bytes"),
    "packed latents": (
        "deepseek-v2-tp1-cpu-mla",
        changed(state_content_bytes=656 * 4),
        "latents are packed",
    ),
    "an unknown type": ("llama-tp1-fp8", stored_as("int4"), "'int4' is not known"),
    "cross attention": ("llama-tp1", as_class("CrossAttentionSpec"), "only FullAttentionSpec"),
    "sinks": ("llama-tp1", as_class("SinkFullAttentionSpec"), "only FullAttentionSpec"),
    "two caches a layer": (
        "llama-tp1",
        renamed(lambda name: name.replace("layers.1.", "layers.0.")),
        "distinct",
    ),
    "layers in layers": (
        "llama-tp1",
        renamed(lambda name: name.replace("self_attn", "self_attn.0")),
        "only contain one integer",
    ),
    "types by layer": ("gemma3-tp1", changed(dtype=torch.bfloat16), "not as in layer"),
    "windows of two lengths": ("gemma3-tp1", changed(sliding_window=64), "not as in layer"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_doubts_are_refused(doubt: str) -> None:
    name, change, why = DOUBTS[doubt]
    with pytest.raises(DescriptionError, match=why):
        described(unknown(golden(name)), change)


def test_a_draft_model_beside_it() -> None:
    """Its layers are numbered after the target's, whatever models call their layers."""

    def shorter(worker: Worker) -> None:
        for group in worker.kv_cache_config.kv_cache_groups:
            group.layer_names = [name.replace("model.layers", "h") for name in group.layer_names]
        for told in (worker.kv_caches, worker.layers):
            for name in list(told):
                told[name.replace("model.layers", "h")] = told.pop(name)

    engine = unknown(golden("llama-tp1"))
    for change in (None, shorter):
        worker = Worker(engine, Rank(0, 0))
        worker.add_draft(2, 4, 32, 128)
        if change is not None:
            change(worker)
        target, draft = worker.describe().model.groups
        assert (target.layers, target.role) == ((0, 1, 2, 3), "target")
        assert (draft.layers, draft.role) == ((0, 1), "draft")
        assert draft.components[0].dims == (32,)
