"""The adapter, given what real engines registered: specs of vLLM's own classes, real tensors.

The configuration and the tensors' geometry are those of the fixtures; the layouts that the adapter
finds must be those that the fixtures' probes confirmed (`tests/unit/test_golden.py`).
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import pytest

from golden import NAMES, Golden, golden
from kvferry.errors import DescriptionError
from kvferry.layout.shape import Rank

torch = pytest.importorskip("torch", reason="this tier runs in the environment with vLLM")
kv = pytest.importorskip("vllm.v1.kv_cache_interface")
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")

from kvferry.vllm.describe import Described, describe_worker  # noqa: E402
from kvferry.vllm.prefill import HandedOver  # noqa: E402


def make_spec(told: dict[str, Any]) -> Any:
    """A spec of vLLM's own class, from what was captured of it."""
    kind = getattr(kv, told["type"])
    values = {f.name: told[f.name] for f in fields(kind) if f.init and f.name in told}
    if "dtype" in values:
        values["dtype"] = getattr(torch, values["dtype"])
    if "kv_quant_mode" in values:
        values["kv_quant_mode"] = kv.KVQuantMode[values["kv_quant_mode"]]
    if told["type"] == "MambaSpec":
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

        values["mamba_type"] = MambaAttentionBackendEnum[told["mamba_type"]]
        values["shapes"] = tuple(map(tuple, told["shapes"]))
        values["dtypes"] = tuple(getattr(torch, d) for d in told["dtypes"])
    return kind(**values)


class Layer:
    def __init__(self, backend: dict[str, Any], scale: float = 1.0) -> None:
        self.isa = backend["isa"] or ""
        self._k_scale_float = self._v_scale_float = scale
        self._backend = Fake(get_name=lambda: backend["backend"])

    def get_attn_backend(self) -> Any:
        return self._backend


class Worker:
    """One rank of a captured engine, as vLLM shows it to a connector."""

    def __init__(self, engine: Golden, rank: Rank) -> None:
        captured, told = engine.rank(rank), engine.engine
        self.kv_cache_config = Fake(
            kv_cache_groups=[
                Fake(layer_names=list(g["layers"]), kv_cache_spec=make_spec(g["spec"]))
                for g in captured["groups"]
            ]
        )
        storages = [torch.zeros(s["bytes"], dtype=torch.uint8) for s in captured["storages"]]
        self.kv_caches = {}
        for name, t in captured["tensors"].items():
            whole = storages[t["storage"]].view(getattr(torch, t["dtype"]))
            offset = t["storage_offset_bytes"] // t["element_size"]
            self.kv_caches[name] = whole.as_strided(t["shape"], t["strides"], offset)
        layers = {name: Layer(backend) for name, backend in captured["backends"].items()}
        text = engine.data["hf_config"]
        self.vllm_config = Fake(
            model_config=Fake(
                hf_text_config=Fake(to_dict=lambda: dict(text)),
                dtype=getattr(torch, told["dtype"]),
                model="models/tiny",
                quantization=None,
            ),
            cache_config=Fake(
                cache_dtype=told["cache_dtype"],
                block_size=told["block_size"],
                kv_cache_layout=told["kv_cache_layout"],
                calculate_kv_scales=False,
            ),
            parallel_config=Fake(
                tensor_parallel_size=told["tp"],
                pipeline_parallel_size=told["pp"],
                decode_context_parallel_size=1,
                cp_kv_cache_interleave_size=1,
            ),
            speculative_config=None,
            num_prefill_lookahead_tokens=0,
            device_config=Fake(device_type="cpu"),
            compilation_config=Fake(static_forward_context=layers),
        )
        self.rank = rank

    def describe(self) -> Described:
        return describe_worker(self.vllm_config, self.kv_cache_config, self.kv_caches, self.rank)

    def add_draft(self, layers: int, heads: int, head_size: int, block: int, tp: int = 1) -> None:
        """A draft model behind the target's layers, in a group and a storage of its own."""
        names = [f"model.layers.{4 + i}.self_attn.attn" for i in range(layers)]
        spec = kv.FullAttentionSpec(
            block_size=block, num_kv_heads=heads, head_size=head_size, dtype=torch.float32
        )
        self.kv_cache_config.kv_cache_groups.append(Fake(layer_names=names, kv_cache_spec=spec))
        for name in names:
            self.kv_caches[name] = torch.zeros(29, heads, block, 2 * head_size)
            self.layers[name] = Layer({"backend": "CPU_ATTN", "isa": "vec"})
        self.vllm_config.speculative_config = Fake(
            draft_parallel_config=Fake(tensor_parallel_size=tp),
            draft_model_config=Fake(
                model="models/draft",
                dtype=torch.float32,
                get_total_num_kv_heads=lambda: heads * tp,
                hf_text_config=Fake(to_dict=lambda: {"num_hidden_layers": layers}),
            ),
        )

    @property
    def layers(self) -> dict[str, Any]:
        found: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        return found


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
    for rank in engine.ranks:
        worker = Worker(engine, rank)
        found, expected = worker.describe(), engine.layout(rank)
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
        assert len(found.regions) == len(worker.kv_caches)
        for region in found.regions:
            tensor = worker.kv_caches[region.layer_name]
            assert region.base_addr == tensor.data_ptr()
            assert (
                region.kv_block_len
                <= region.block_len
                == tensor.stride(0)
                * (tensor.element_size() * tensor.shape[0] // expected.parts[0].num_blocks)
            )


def test_states_that_are_not_as_configured_are_refused() -> None:
    worker = Worker(golden("granite-hybrid-tp2"), Rank(0, 1))
    spec = worker.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    object.__setattr__(spec, "shapes", (spec.shapes[0], (5, 64, 32)))
    with pytest.raises(DescriptionError, match="kvferry cannot describe it"):
        worker.describe()


def test_states_hand_over_one_block_and_stop_short() -> None:
    worker = Worker(golden("granite-hybrid-tp1"), Rank(0, 0))
    facts = HandedOver.of(worker.vllm_config, worker.kv_cache_config)
    assert facts.held_back == 1 and facts.scratch == (0, 0, 0, None)
    assert facts.tables(([0, 0, 7], [0, 0, 8], [9], [1, 2, 3])) == ((7,), (8,), (9,), (1, 2, 3))
    speculating = HandedOver(1, (2, None))  # the last two blocks are for trying things out
    assert speculating.tables(([0, 5, 6, 7], [1, 2])) == ((5,), (1, 2))
    assert speculating.tables(([5], [1])) == ((5,), (1,))
    assert facts.reaches_too_far(10, 10) and not facts.reaches_too_far(9, 10)
    plain = HandedOver.of(*[getattr(Worker(golden("llama-tp1"), Rank(0, 0)), a) for a in CONFIGS])
    assert plain.held_back == 0 and plain.tables(([1, 2],)) == ((1, 2),)


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
        lengths = {r.layer_name[-19:]: r.block_len for r in found.regions}
        assert len(set(lengths.values())) == 2  # main and draft pages differ

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

    def test_with_stages_they_are_refused(self) -> None:
        worker = Worker(golden("llama-pp2"), Rank(1, 0))
        worker.add_draft(layers=1, heads=2, head_size=32, block=64)
        with pytest.raises(DescriptionError, match="only the last stage knows"):
            worker.describe()


class TestScales:
    def test_they_are_part_of_what_bytes_mean(self) -> None:
        one = Worker(golden("llama-tp1-fp8"), Rank(0, 0))
        two = Worker(golden("llama-tp1-fp8"), Rank(0, 0))
        assert one.describe().meaning == two.describe().meaning
        assert one.describe().meaning["cache scales"] == "1.0"
        next(iter(two.layers.values()))._k_scale_float = 0.5
        assert one.describe().meaning != two.describe().meaning
        assert "cache scales" not in Worker(golden("llama-tp1"), Rank(0, 0)).describe().meaning

    def test_scales_found_while_running_are_refused(self) -> None:
        worker = Worker(golden("llama-tp1-fp8"), Rank(0, 0))
        worker.vllm_config.cache_config.calculate_kv_scales = True
        with pytest.raises(DescriptionError, match="calculate_kv_scales"):
            worker.describe()
