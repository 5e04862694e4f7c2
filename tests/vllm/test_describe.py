"""The adapter, given what real engines registered: specs of vLLM's own classes, real tensors.

The configuration and the tensors' geometry are those of the fixtures; the layouts that the adapter
finds must be those that the fixtures' probes confirmed (`tests/unit/test_golden.py`).
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from golden import NAMES, golden
from kvferry.errors import DescriptionError
from kvferry.layout.model import Residency
from kvferry.layout.shape import Rank
from kvferry.plan import bind, plan_pair

torch = pytest.importorskip("torch", reason="this tier runs in the environment with vLLM")
kv = pytest.importorskip("vllm.v1.kv_cache_interface")
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")

from transformers import LlamaConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig

from kvferry.vllm import describe
from kvferry.vllm.producing import PrefillCut
from vllm_pairs import handover_parts
from workers import Layer, Worker


@pytest.fixture(autouse=True)
def conv_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of convolution states is a setting of the process."""
    from vllm.model_executor.layers.mamba import mamba_utils

    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name", "")
    first = bool(name) and name.endswith("-ds")
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: first)


CAPTURED = [n for n in NAMES if golden(n).data["ranks"][0]["backends"]]


@pytest.mark.parametrize("name", CAPTURED)
def test_layouts_are_those_that_probes_confirmed(name: str) -> None:
    engine = golden(name)
    told = []
    for rank in engine.ranks:
        worker = Worker(engine, rank)
        found, expected = worker.describe(), engine.layout(rank)
        told.append((found.model, found.layout.shape, found.meaning))
        assert told[-1] == told[0]  # all workers describe the same engine
        assert found.model.fingerprint() == engine.model.fingerprint()
        assert found.layout.tables == expected.tables
        assert len(found.layout.parts) == len(expected.parts)
        for mine, theirs in zip(found.layout.parts, expected.parts, strict=True):
            for field in ("group", "table", "pool", "num_blocks", "block_entries", "page_bytes"):
                assert getattr(mine, field) == getattr(theirs, field), field
            assert (mine.interior, mine.page_slack) == (theirs.interior, theirs.page_slack)
            assert mine.layers.tolist() == theirs.layers.tolist()
            for a, b in zip(mine.placements, theirs.placements, strict=True):
                for field in fields(a):
                    same = np.array_equal(getattr(a, field.name), getattr(b, field.name))
                    assert same, field.name
        lengths = Counter(
            tensor.stride(0)
            * (tensor.element_size() * tensor.shape[0] // expected.parts[0].num_blocks)
            for tensor in worker.kv_caches.values()
        )
        said = re.findall(r"(\d+) layers of (\d+) bytes a block", found.summary())
        assert {int(size): int(count) for count, size in said} == lengths
        starts = {tensor.untyped_storage().data_ptr() for tensor in worker.kv_caches.values()}
        assert set(found.bases) == starts


def test_states_that_are_not_as_configured_are_refused() -> None:
    worker = Worker(golden("granite-hybrid-tp2"), Rank(0, 1))
    spec = worker.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    object.__setattr__(spec, "shapes", (spec.shapes[0], (5, 64, 32)))
    with pytest.raises(DescriptionError, match="kvferry cannot describe it"):
        worker.describe()


def test_a_stage_without_states_describes_those_of_others() -> None:
    """vLLM's groups are those of all stages. Their specs tell the states' types."""
    worker = Worker(golden("granite-hybrid-tp1"), Rank(0, 0))
    for group in worker.kv_cache_config.kv_cache_groups:
        if describe.is_state(group.kv_cache_spec):
            object.__setattr__(group.kv_cache_spec, "dtypes", (torch.bfloat16, torch.float32))

    def model() -> str:
        target, _ = describe.split_layers(worker.vllm_config, worker.kv_cache_config, 0)
        return target.fingerprint()

    whole = model()
    for group in worker.kv_cache_config.kv_cache_groups:
        if describe.is_state(group.kv_cache_spec):
            group.layer_names = []
    assert model() == whole


@pytest.mark.parametrize("name", ["llama-tp1", "deepseek-v2-tp1-cpu-mla"])
def test_scales_of_a_checkpoint_that_vllm_does_not_use(name: str) -> None:
    """It stores latents as the model's own type whatever a checkpoint says, and DeepSeek V3.2's in
    bfloat16 if that is asked for. Both are called auto."""
    engine = golden(name)
    worker = Worker(engine, Rank(0, 0))
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    told = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    text = {**engine.data["hf_config"], "quantization_config": told}
    worker.vllm_config.model_config.hf_text_config.to_dict = lambda: dict(text)
    assert worker.vllm_config.cache_config.cache_dtype == "auto"
    assert worker.describe().model.fingerprint() == engine.model.fingerprint()


def test_windows_that_are_not_configured_are_refused() -> None:
    worker = Worker(golden("mistral-tp1"), Rank(0, 0))
    text = {**golden("mistral-tp1").data["hf_config"], "sliding_window": None}
    worker.vllm_config.model_config.hf_text_config.to_dict = lambda: text
    with pytest.raises(DescriptionError, match=r"span of 0, vLLM's .* has .* and 96;"):
        worker.describe()


def test_vllms_window_may_be_that_of_other_layers_of_a_group() -> None:
    """Without the hybrid cache manager, vLLM merges the specs of full and windowed layers."""
    worker = Worker(golden("gemma3-tp1"), Rank(0, 0))
    found = worker.describe()
    told = {f.name: getattr(next(specs(worker)), f.name) for f in fields(kv.AttentionSpec)}
    merged = kv.FullAttentionSpec(**told, sliding_window=96)
    for group in found.model.groups:
        describe.require_spec(group, found.layout.shape, Rank(0, 0), merged, "layer")


@pytest.mark.parametrize("heads", [2, 4])
def test_keys_that_lie_apart_from_values_are_not_joined(heads: int) -> None:
    """On AMD, a backend with FlashAttention's name keeps K of all heads and then V, shuffled. With
    two heads a rank, its pages have the axes of joined ones."""
    worker = Worker(golden({2: "llama-tp2", 4: "llama-tp1"}[heads]), Rank(0, 0))
    (group,) = worker.kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    content = heads * spec.head_size * spec.dtype.itemsize
    group.kv_cache_spec = replace(spec, num_head_slots=2, state_content_bytes=content)
    for name, tensor in worker.kv_caches.items():
        worker.layers[name] = Layer({"backend": "FLASH_ATTN", "isa": None})
        pages, _, slots, _ = tensor.shape
        worker.kv_caches[name] = tensor.view(pages, 2, slots, heads * spec.head_size)
    found = worker.describe()
    (part,) = found.layout.parts
    assert part.is_opaque
    assert part.page_bytes == spec.page_size_bytes


def test_windows_of_generated_tokens_are_refused() -> None:
    """A layer that keeps the prompt and the last generated tokens is not one of full attention."""
    worker = Worker(golden("llama-tp1"), Rank(0, 0))
    (group,) = worker.kv_cache_config.kv_cache_groups
    told = {f.name: getattr(group.kv_cache_spec, f.name) for f in fields(kv.AttentionSpec)}
    group.kv_cache_spec = kv.RSWASpec(**told, rswa_window=96)
    with pytest.raises(DescriptionError, match=r"a span of 0, vLLM's RSWASpec has .* and 96;"):
        worker.describe()


def specs(worker: Worker) -> Iterator[Any]:
    return (spec for _, _, spec in describe.layer_specs(worker.kv_cache_config))


def test_states_hand_over_one_block_and_stop_short() -> None:
    worker = Worker(golden("granite-hybrid-tp1"), Rank(0, 0))
    facts = PrefillCut.of(worker.vllm_config, worker.kv_cache_config)
    assert facts.held_back == 1 and facts.scratch == (0, 0, 0, None)
    assert facts.tables(([0, 0, 7], [0, 0, 8], [9], [1, 2, 3])) == ((7,), (8,), (9,), (1, 2, 3))
    speculating = PrefillCut(1, (2, None))  # the last two blocks are for trying things out
    assert speculating.tables(([0, 5, 6, 7], [1, 2])) == ((5,), (1, 2))
    assert speculating.tables(([5], [1])) == ((5,), (1,))
    assert facts.reaches_too_far(10, 10) and not facts.reaches_too_far(9, 10)
    plain = PrefillCut.of(*[getattr(Worker(golden("llama-tp1"), Rank(0, 0)), a) for a in CONFIGS])
    assert plain.held_back == 0 and plain.tables(([1, 2],)) == ((1, 2),)


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_block_that_only_the_last_token_reads_is_handed_over(kind: Any) -> None:
    """vLLM drops it once it has the whole prompt. So a prefill stops before."""
    kept, block = Residency(kind, 40), 8
    cut = PrefillCut(windows=((kept, block),))
    for count in range(2, 200):
        request = SimpleNamespace(
            prompt_token_ids=[5] * count,
            _all_token_ids=[5] * count,
            num_prompt_tokens=count,
            kv_transfer_params={},
            block_hashes=[],
            update_block_hashes=lambda: None,
        )
        cut.stop_short(request)
        computed = request.num_prompt_tokens
        assert computed == len(request.prompt_token_ids) >= count - 1
        first_held = kept.needed_from(computed) // block
        loaded = min(computed, cut.loaded(count))
        assert loaded == count - 1  # vLLM computes the last token, and no other
        assert first_held <= kept.needed_from(loaded) // block
    worker = Worker(golden("gemma3-tp1"), Rank(0, 0))
    told = PrefillCut.of(worker.vllm_config, worker.kv_cache_config).windows
    spans = {g.residency for g in golden("gemma3-tp1").model.groups if g.residency.span}
    assert {kept for kept, _ in told} == spans


def test_a_prefill_stops_short_and_its_digest_is_of_the_whole_prompt() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    from kvferry.handover.ticket import Ticket
    from kvferry.vllm.consuming import ComputeHere, require_fit
    from kvferry.vllm.fingerprint import request_digest
    from kvferry.vllm.producing import Producing

    def request(tokens: int, **params: Any) -> Request:
        made = Request("r", list(range(3, 3 + tokens)), SamplingParams(max_tokens=9), None)
        made.kv_transfer_params = params
        return made

    facts = PrefillCut(1, (0, None))
    parts = handover_parts("ferry", cut=facts)
    offering = Producing(parts, "p", "first", (1, 1), 1, second=False)

    def prefilled(made: Request, tables: tuple[list[int], ...]) -> Ticket:
        offering.accept(made)
        made.status = RequestStatus.FINISHED_LENGTH_CAPPED
        held, params = offering.finished(made, tables)
        assert held and params is not None
        return Ticket.from_params(params)

    # what a client says of a digest is not believed
    prefill = request(129, do_remote_decode=True, kvferry_digest="another prompt's")
    whole = request_digest(prefill)
    for _ in range(2):  # told again, nothing more is taken off
        offering.accept(prefill)
        assert prefill.num_prompt_tokens == len(prefill.prompt_token_ids) == 128
        assert prefill.num_tokens == 128 and prefill.max_tokens == 1
    ticket = prefilled(prefill, ([0, 7], [1, 2]))
    (order,) = parts.orders.holds
    assert (order.tokens, order.digest, order.tables) == (128, whole, ((7,), (1, 2)))
    # the same prompt is known again by its whole; one that leaves nothing to compute is not used
    require_fit(ticket, request(129), facts)
    with pytest.raises(ComputeHere, match="another prompt"):
        require_fit(ticket, request(128), facts)
    single = prefilled(request(1, do_remote_decode=True), ([7], [1]))
    too_short = "its ticket leaves less than 1 tokens to compute here"
    with pytest.raises(ComputeHere, match=too_short) as refused:
        require_fit(single, request(1), facts)
    assert refused.value.reason == "unfit"
    uncut = replace(ticket, digest=whole, tokens=129)  # of an engine that leaves nothing to others
    with pytest.raises(ComputeHere, match=too_short) as refused:
        require_fit(uncut, request(129), facts)
    assert refused.value.reason == "bad ticket"
    assert not offering.accepted
    scored = Request("s", [3, 4, 5], SamplingParams(max_tokens=1, prompt_logprobs=0), None)
    scored.kv_transfer_params = {"do_remote_decode": True}
    assert prefilled(scored, ([7], [1])).tokens == 3  # a decode engine loads none of it
    shared = list(range(20))  # where the engine runs in its client's process, and `n` is 2
    for _ in range(2):
        sample = Request("n", shared, SamplingParams(max_tokens=1), None)
        sample.kv_transfer_params = {"do_remote_decode": True}
        assert prefilled(sample, ([7], [1, 2])).tokens == 19


CONFIGS = ("vllm_config", "kv_cache_config")


class TestDraftLayers:
    def test_they_are_numbered_by_themselves(self) -> None:
        worker = Worker(golden("llama-tp1"), Rank(0, 0))
        worker.add_draft(layers=2, heads=2, head_size=32, block=64)
        found = worker.describe()
        draft = found.model.group("draft")
        assert draft.layers == (0, 1) and draft.role == "draft"
        assert [(c.units, c.dims) for c in draft.components] == [(2, (32,)), (2, (32,))]
        assert found.model.num_layers == 4
        assert found.layout.shape.block_tokens(draft) == 64
        (part,) = found.layout.parts_of("draft")
        assert part.table == 1 and part.interior == "cpu" and len(set(part.placements[0].regions))
        assert found.summary().count(" layers of ") == 2  # main and draft pages differ

    def test_a_draft_model_on_one_rank_of_two(self) -> None:
        worker = Worker(golden("llama-tp2"), Rank(0, 1))
        worker.add_draft(layers=1, heads=4, head_size=64, block=128)
        found = worker.describe()
        assert found.layout.shape.role_tp == (("draft", 1),)
        assert found.layout.parts_of("draft")[0].placements[0].units == (0, 4)

    def test_a_name_of_its_own(self) -> None:
        """Draft models may have a prefix of their own, and numbers that the target has too."""
        worker = Worker(golden("llama-tp1"), Rank(0, 0))
        worker.add_draft(layers=1, heads=2, head_size=32, block=64)
        own, other = "model.layers.4.self_attn.attn", "draft_model.model.layers.0.self_attn.attn"
        worker.kv_cache_config.kv_cache_groups[-1].layer_names = [other]
        worker.kv_caches[other], worker.layers[other] = (
            worker.kv_caches.pop(own),
            worker.layers[own],
        )
        found = worker.describe()
        assert found.model.group("draft").layers == (0,)
        assert found.model.group("attention").layers == (0, 1, 2, 3)

    def test_one_of_the_hub_by_its_name_or_its_snapshot(self) -> None:
        snapshot = f"/cache/models--org--eagle/snapshots/{'a' * 40}"
        groups = []
        for name in ("org/eagle", snapshot, "org/other"):
            worker = Worker(golden("llama-tp1"), Rank(0, 0))
            worker.add_draft(layers=1, heads=2, head_size=32, block=64)
            worker.vllm_config.speculative_config.draft_model_config.model = name
            groups.append(worker.describe().model.group("draft"))
        assert groups[0] == groups[1] != groups[2]

    @pytest.mark.parametrize("first", [4, 0])  # from the model's count, or as a first layer has it
    def test_with_stages_the_last_one_tells(self, first: int) -> None:
        """All stages describe one engine; what it hands over arrives, also at an engine without
        stages."""
        stages = [Worker(golden("llama-pp2"), Rank(pp, 0)) for pp in range(2)]
        alone = Worker(golden("llama-tp1"), Rank(0, 0))
        told: list[Any] = []
        for worker in (*stages, alone):
            worker.add_draft(2, heads=2, head_size=32, block=64, first=4, isa="amx")
            worker.kv_cache_config.kv_cache_groups[-1].layer_names[:] = [
                name.replace("4", str(first)).replace("5", str(first + 1))
                if worker is not alone
                else name
                for name in worker.kv_cache_config.kv_cache_groups[-1].layer_names
            ]
            for old in [f"model.layers.{n}.self_attn.attn" for n in (4, 5)]:
                if worker is stages[1] and first != 4:
                    new = old.replace("4", str(first)).replace("5", str(first + 1))
                    worker.kv_caches[new] = worker.kv_caches.pop(old)
                    worker.layers[new] = worker.layers.pop(old)
        for worker in (stages[1], alone):  # vLLM writes into it when it loads the draft
            config = worker.vllm_config.speculative_config.draft_model_config.hf_text_config
            loaded = {**config.to_dict(), "target_layer_count": 4}
            config.to_dict = partial(dict, loaded)
        last = stages[1].describe(lambda mine: told.append(mine) or mine)
        first_stage = stages[0].describe(lambda mine: told[0])
        src, dst = [first_stage, last], alone.describe()
        assert (first_stage.model, first_stage.meaning) == (last.model, last.meaning)
        assert first_stage.layout.shape == last.layout.shape
        assert last.layout.shape.interior_of == (("attention", "cpu"), ("draft", "cpu_amx"))
        assert not first_stage.layout.parts_of("draft") and last.layout.parts_of("draft")
        assert last.model.group("draft").layers == (0, 1)
        self._hand_over(stages, src, alone, dst)

    def _hand_over(self, stages: list[Any], src: list[Any], alone: Any, dst: Any) -> None:
        """Blocks are of one size on both sides: every page must come as it is."""
        filler = np.random.default_rng(1)
        for worker in stages:
            for tensor in worker.kv_caches.values():
                tensor.copy_(torch.from_numpy(filler.standard_normal(tuple(tensor.shape))))
        pair = plan_pair(src[0].model, src[0].layout.shape, dst.layout.shape, dst_model=dst.model)
        tokens, blocks = 128, dict(src[0].layout.shape.block_size_of)
        sizes = [src[0].layout.shape.block_size, blocks["draft"]]
        src_tables = [list(range(2, 2 + tokens // size)) for size in sizes]
        dst_tables = [list(range(9 + tokens // size, 9, -1)) for size in sizes]
        for edge in pair.edges:
            one = src[edge.src.pp]
            bound = bind(
                pair.plan(edge, one.layout, dst.layout),
                tokens=tokens,
                src_tables=src_tables,
                dst_tables=dst_tables,
                src_bases=np.asarray(one.bases),
                dst_bases=np.asarray(dst.bases),
            )
            copies = bound.copies()
            for a, b, length in zip(copies.src, copies.dst, copies.length, strict=True):
                ctypes.memmove(int(b), int(a), int(length))
        moved = 0
        for number, worker in enumerate(stages):
            for table, group in enumerate(worker.kv_cache_config.kv_cache_groups):
                for name in group.layer_names:
                    theirs = name if table == 0 else self._draft_name(name)
                    for a, b in zip(src_tables[table], dst_tables[table], strict=True):
                        page = worker.kv_caches[name][a]
                        assert torch.equal(page, alone.kv_caches[theirs][b]), (number, name)
                        moved += page.numel()
        assert moved

    def _draft_name(self, name: str) -> str:
        ordinal = int(name.split(".")[2])
        return name.replace(f".{ordinal}.", f".{4 + ordinal % 4}.")


def test_an_eagle_draft_counts_by_its_configuration_not_its_place() -> None:
    def told(place: str, **more: int) -> str:
        """vLLM puts the draft's own configuration inside another."""
        own = LlamaConfig(architectures=["LlamaForCausalLM"], **more)
        own._name_or_path = place
        return describe.configuration_digest(EAGLEConfig(own, method="eagle").to_dict())

    assert told("/models/draft") == told("/other/draft") != told("/models/draft", vocab_size=77)


class TestScales:
    def test_they_are_part_of_what_bytes_mean(self) -> None:
        one = Worker(golden("llama-tp1-fp8"), Rank(0, 0))
        two = Worker(golden("llama-tp1-fp8"), Rank(0, 0))
        assert one.describe().meaning == two.describe().meaning
        assert one.describe().meaning["cache scales"] == "1.0"
        next(iter(two.layers.values()))._k_scale = torch.tensor(0.5)
        assert one.describe().meaning != two.describe().meaning
        assert "cache scales" not in Worker(golden("llama-tp1"), Rank(0, 0)).describe().meaning

    def test_scales_of_single_heads_are_alike_on_all_ranks_of_all_shapes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def told(heads: list[float], tp: int) -> set[str]:
            """What the ranks of an engine say of a checkpoint with a scale for each head."""
            each = np.repeat(heads, max(1, tp // len(heads))).reshape(tp, -1)
            workers = [Worker(golden("llama-tp1-fp8"), Rank(0, 0)) for _ in range(tp)]
            for worker, own in zip(workers, each, strict=True):
                worker.vllm_config.parallel_config.tensor_parallel_size = tp
                for layer in worker.layers.values():  # as compressed-tensors sets them
                    layer._k_scale = torch.tensor(own, dtype=torch.float32)
                    layer._k_scale_float = float(own.max())
            mine: list[object] = []

            def say() -> list[str]:
                return [
                    describe.meaning(w.vllm_config, w.kv_cache_config, "")["cache scales"]
                    for w in workers
                ]

            with monkeypatch.context() as patch:  # each rank says its own, then hears all
                patch.setattr(describe, "of_all_ranks", lambda m: [mine.append(m) or m] * tp, False)
                say()
                patch.setattr(describe, "of_all_ranks", lambda _: mine, False)
                return set(say())

        heads = [0.25, 0.5, 0.5, 2.0]
        assert told(heads, 1) == told(heads, 2) == told(heads, 4) == told(heads, 8)
        assert len(told(heads, 2)) == 1
        assert told(heads, 2) != told([0.25, 0.5, 0.125, 2.0], 2)  # of the same greatest ones


class TestContextParallel:
    def test_it_is_part_of_the_shape(self) -> None:
        worker = Worker(golden("deepseek-v2-tp2-cpu-mla"), Rank(0, 1))
        worker.vllm_config.parallel_config.decode_context_parallel_size = 2
        worker.vllm_config.parallel_config.cp_kv_cache_interleave_size = 4
        shape = worker.describe().layout.shape
        assert (shape.tp, shape.dcp, shape.interleave) == (2, 2, 4)

    def test_layers_that_do_not_take_part_are_refused(self) -> None:
        worker = Worker(golden("deepseek-v2-tp2-cpu-mla"), Rank(0, 1))
        worker.vllm_config.parallel_config.decode_context_parallel_size = 2
        spec = worker.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        object.__setattr__(spec, "dcp_sharded", False)
        with pytest.raises(DescriptionError, match="keeps all tokens on every rank"):
            worker.describe()
