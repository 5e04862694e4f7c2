"""The pool's vLLM adapter without engines: configuration, pins, events of all workers together."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch

# imported like this, warnings of libraries are not errors
pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    reason="this tier runs in the environment with vLLM",
)
pytest.importorskip("kvferry.vllm.connector")

from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import kvferry.vllm
from kvferry.carriers.base import Ready
from kvferry.errors import DescriptionError
from kvferry.handover.describe import engine_info, rank_info
from kvferry.layout import CacheModel, Component, EngineShape, Group, Rank, RankLayout
from kvferry.net.messages import EngineInfo, RankInfo
from kvferry.pool.keys import KeyMetadata
from kvferry.pool.orders import LoadOrder, PoolLoaded, Saved, SaveOrder, Scope
from kvferry.pool.rank import Ended
from kvferry.pool.scheduler import PoolLimits, PoolOrders
from kvferry.pool.weights import Adapters, engine_weights
from kvferry.vllm.check import sections
from kvferry.vllm.config import FerryConfig
from kvferry.vllm.describe import _interior, cache_rank, replicas
from kvferry.vllm.fingerprint import Prompts
from kvferry.vllm.metadata import FerryReport
from kvferry.vllm.pool import worker as pool_worker
from kvferry.vllm.pool.config import PoolConfig
from kvferry.vllm.pool.scheduler import VllmPoolScheduler, _draft_ahead
from kvferry.vllm.pool.worker import PoolWorker
from waiting import require_for, wait_until

BLOCK = 16


def test_loads_wait_for_a_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: vLLM gives blocks away that the step before still writes (`kv_producer`)."""
    events: list[str] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None: ...

        def record(self) -> None:
            events.append("recorded")

        def synchronize(self) -> None:
            events.append("reached")

    class Rank:
        def load(self, order: LoadOrder, fence: Any) -> None:
            events.append(order.request_id)
            if fence is not None:
                fence.wait()

    def started(on_device: bool, *names: str) -> list[str]:
        worker = PoolWorker(PoolConfig())
        worker._rank, worker._on_device = Rank(), on_device  # type: ignore[assignment]
        loads = [LoadOrder(name, (), {}, (), 1.0) for name in names]
        events.clear()
        worker.start(PoolOrders(loads=loads))
        return list(events)

    monkeypatch.setattr("torch.Event", Event)
    assert started(True, "a", "b") == ["recorded", "a", "reached", "b", "reached"]
    assert started(False, "a") == ["a"]
    assert started(True) == []


@pytest.mark.parametrize("ahead", ["four layers", "the step", "idle"])
def test_a_save_ends_when_the_engine_is_ahead_of_its_device(
    ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while it prepares a step; and not never, if there is no other."""
    monkeypatch.setattr(torch, "Event", lambda blocking=False: Recorded())
    monkeypatch.setattr(pool_worker, "QUIET_SECONDS", 60.0)
    fences: list[Any] = []
    worker, saves = PoolWorker(PoolConfig()), [SaveOrder(1, (), 1.0)]
    worker._rank = SimpleNamespace(  # type: ignore[assignment]
        save=lambda order, fence: fences.append(fence), wait_done=lambda _: None, take=Ended
    )
    worker._on_device = True
    worker._layers = pool_worker._Layers({f"layer {n}": torch.zeros(9) for n in range(8)})
    worker.start(PoolOrders(saves=saves))
    worker.launched()
    (fence,) = fences
    end = threading.Thread(target=fence.quiet)
    end.start()
    wait_until(lambda: not worker._quiet.is_set())
    worker.start(PoolOrders(saves=saves), idle=True)
    worker.results()
    for number in range(3):
        worker.layer_computed(f"layer {number}", saves)
    require_for(0.05, end.is_alive)
    if ahead == "four layers":
        worker.layer_computed("layer 3", saves)
    elif ahead == "the step":
        worker.launched()
    else:
        worker.start(PoolOrders(), idle=True)
        worker.results()
    end.join(20)
    assert not end.is_alive()
    monkeypatch.setattr(pool_worker, "QUIET_SECONDS", 0.01)
    fence.quiet()  # no step comes any more


def test_saves_of_a_step_that_vllm_did_not_end() -> None:
    """Its V1 runner calls no `wait_for_save` on an early pipeline stage while it speculates."""
    saved: list[object] = []
    worker = PoolWorker(PoolConfig())
    worker._rank = SimpleNamespace(  # type: ignore[assignment]
        save=lambda order, fence: saved.append(order.job_id), tell=saved.append
    )
    worker.start(PoolOrders(saves=[SaveOrder(1, (), 1.0)]))
    worker.start(PoolOrders(saves=[SaveOrder(2, (), 1.0)]))
    assert saved == [1]
    worker.save()
    worker.start(PoolOrders())
    assert saved == [1, 2]  # each once
    worker.start(PoolOrders(saves=[SaveOrder(3, (), 1.0)]))
    scope = Scope(KeyMetadata("", "", (), epoch="after a reset"), "")
    worker.start(PoolOrders(scope=scope))
    assert saved == [1, 2, 3, scope]  # under the name that the weights had when it was computed


def test_configuration_of_the_connector_in_vllm_is_understood() -> None:
    extra = {
        "load_async": True,
        "discard_partial_chunks": True,
        "lookup_rpc_port": "0",
        "cache_prefix": "team",
        "enable_group_semantics": False,
        "lookup_async": True,
    }
    config = PoolConfig.read(extra, **kvferry.vllm.MooncakeStoreConnector.POOL_DEFAULTS)
    assert (config.store, config.cache_prefix, config.save_decode_cache) == (
        "mooncake",
        "team",
        False,
    )
    for key in ("load_async", "discard_partial_chunks"):
        assert PoolConfig.read({key: None}) == PoolConfig.read({})
        for value in (False, "false", 0):
            with pytest.raises(DescriptionError, match=f"{key} must be true or left out.*the pool"):
                PoolConfig.read({key: value})
    with pytest.raises(DescriptionError, match="colour"):
        PoolConfig.read({"colour": "red"})
    with pytest.raises(DescriptionError, match="load_seconds"):
        PoolConfig.read({"load_seconds": 0})
    with pytest.raises(DescriptionError, match="module:function"):
        PoolConfig.read({"store": "rocks"}).opener()


@pytest.mark.parametrize(
    ("role", "told", "saves"),
    [
        ("kv_both", None, True),
        ("kv_producer", None, True),
        ("kv_producer", False, True),
        ("kv_consumer", None, False),
        ("kv_consumer", False, False),
        ("kv_consumer", True, True),
    ],
)
@pytest.mark.parametrize("name", ["FerryPoolConnector", "MooncakeStoreConnector"])
def test_roles_mean_what_they_mean_to_vllm(name: str, role: str, told: Any, saves: bool) -> None:
    """All look up unless told not to: a prefill engine gains most. Consumers save if told to."""
    extra = {} if told is None else {"save_decode_cache": told}
    config = PoolConfig.read(extra, **getattr(kvferry.vllm, name).POOL_DEFAULTS)
    limits = config.limits(100, produces=role != "kv_consumer")
    assert (limits.lookup, limits.save) == (True, saves)
    off = PoolConfig.read({**extra, "enable_lookup": False})
    assert not off.limits(100, produces=True).lookup


def test_unknown_backends_are_told_apart() -> None:
    """Pages of two backends that nobody has looked into are not taken for the same."""

    def layer(name: str, isa: str = "") -> Any:
        backend = SimpleNamespace(get_name=lambda: name)
        return SimpleNamespace(get_attn_backend=lambda: backend, isa=isa)

    found = [
        _interior(layer(*words))
        for words in (("ROCM_ATTN",), ("ROCM_SEGMENTED_ATTN",), ("CPU_ATTN", "neon"))
    ]
    assert len(set(found)) == 3 and all(f.startswith("opaque:") for f in found)
    assert _interior(layer("FLASH_ATTN")) == "joined"
    assert _interior(layer("CPU_ATTN", "vec")) == "cpu"


def test_a_pool_section_that_is_off() -> None:
    for off in (False, None):
        extra, pool = sections("ferry", {"pool": off, "lease_seconds": 7})
        assert pool is None
        assert FerryConfig.read(extra, "ferry", {}).lease_seconds == 7  # and refuses no key
    found = [sections("ferry", {"pool": on})[1] for on in (True, {}, {"size": 1})]
    assert found == [{}, {}, {"size": 1}]
    with pytest.raises(DescriptionError, match="'yes'"):
        sections("ferry", {"pool": "yes"})


def test_names() -> None:
    """vLLM branches on class names: ours are our own, under the names that configurations use."""
    assert kvferry.vllm.MooncakeStoreConnector.__name__ == "FerryMooncakeStoreConnector"
    assert supports_hma(kvferry.vllm.FerryPoolConnector)


class Blocks:
    """vLLM's block pool, as far as pins go."""

    def __init__(self) -> None:
        self.blocks = list(range(100))
        self.references: Counter[int] = Counter()
        self.hash_block_size = BLOCK

    def touch(self, blocks: list[int]) -> None:
        self.references.update(blocks)

    def free_blocks(self, blocks: list[int]) -> None:
        self.references.subtract(blocks)


def described() -> tuple[EngineInfo, list[RankInfo]]:
    group = Group("all", (0, 1), (Component("k", 4, (8,), 2), Component("v", 4, (8,), 2)))
    model, shape = CacheModel("m", (group,)), EngineShape(tp=2, block_size=BLOCK)
    layouts = [RankLayout.build(model, shape, rank, 100) for rank in shape.ranks]
    ranks = [rank_info(layout, [0] * len(layout.regions), "", "", {}) for layout in layouts]
    return engine_info("", "", model, shape, {}), ranks


def request(tokens: int) -> Any:
    return SimpleNamespace(
        request_id="r",
        prompt_token_ids=list(range(tokens)),
        all_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens,
        num_in_flight_tokens=0,
        block_hashes=[bytes([i]) * 32 for i in range(tokens // BLOCK)],
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        cache_salt=None,
    )


def step(request_id: str, computed: int, scheduled: int, table: list[int]) -> Any:
    return SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (table,)),
        scheduled_new_reqs=[SimpleNamespace(req_id=request_id, num_computed_tokens=computed)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={request_id: scheduled},
        total_num_scheduled_tokens=scheduled,
    )


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[VllmPoolScheduler, Blocks]]:
    config = PoolConfig.read({"path": str(tmp_path / "store"), "size": "4MiB"})
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model="m", revision=None, hf_config=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1
        ),
    )
    scheduler = VllmPoolScheduler(
        config, vllm_config, PoolLimits(), Prompts(), Adapters(), events=True
    )
    blocks = Blocks()
    scheduler.bind_blocks(blocks)
    scheduler.described(*described())
    yield scheduler, blocks
    scheduler.close()


def test_the_pool_has_its_own_name_of_the_model(made: tuple[VllmPoolScheduler, Blocks]) -> None:
    """Beside a hand-over, workers describe the model by the hand-over's name of it."""
    scheduler, _ = made
    scheduler.config = replace(scheduler.config, model_id="ours")
    scheduler.described(*described())
    assert dict(scheduler.pool.metadata.meaning)["model"] == "ours"


def test_events_wait_for_all_workers(made: tuple[VllmPoolScheduler, Blocks]) -> None:
    scheduler, blocks = made
    asked = request(40)
    asked.cache_salt = "secret"
    scheduler.on_new_request(asked)
    metadata = scheduler.step(step("r", 0, 40, [5, 7, 9]))
    (save,) = metadata.saves
    assert save.tables[0].block_ids == (5, 7)  # whole blocks only
    assert blocks.references[5] == blocks.references[7] == 1 and blocks.references[9] == 0
    scheduler.finished(asked)
    scheduler.reported(FerryReport(saved=[Saved(save.job_id)]), ())
    assert scheduler.take_events() == [] and blocks.references[5] == 1
    scheduler.reported(FerryReport(saved=[Saved(save.job_id, ((0, 1),))]), ())  # its block 1 failed
    (event,) = scheduler.take_events()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [maybe_convert_block_hash(asked.block_hashes[0])]
    assert event.token_ids == list(range(16))
    assert event.medium == "STORAGE" and event.block_size == BLOCK
    assert event.extra_keys == [("secret",)]  # routers must not offer it to others
    assert +blocks.references == Counter()
    assert not scheduler.pool.has_work


@pytest.mark.parametrize("hashed", [BLOCK, BLOCK // 2])  # tokens, which vLLM hashes together
@pytest.mark.parametrize("as_numbers", [True, False])
def test_events_have_the_hashes_of_vllm(
    made: tuple[VllmPoolScheduler, Blocks],
    hashed: int,
    as_numbers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the blocks of a later chunk, around one that was not saved."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(as_numbers)))
    scheduler, _ = made
    scheduler._events.hash_tokens = hashed
    asked = request(6 * BLOCK)
    asked.block_hashes = [bytes([i]) * 32 for i in range(6 * BLOCK // hashed)]
    every = BLOCK // hashed
    ends = [maybe_convert_block_hash(one) for one in asked.block_hashes[every - 1 :: every]]
    scheduler.on_new_request(asked)
    scheduler.step(step("r", 0, 2 * BLOCK, [1, 2]))
    (save,) = scheduler.step(step("r", 2 * BLOCK, 4 * BLOCK, [1, 2, 3, 4, 5, 6])).saves
    scheduler.reported(FerryReport(saved=[Saved(save.job_id, ((0, 4),)), Saved(save.job_id)]), ())
    before, after = scheduler.take_events()
    assert (before.parent_block_hash, before.block_hashes) == (ends[1], ends[2:4])
    assert (after.parent_block_hash, after.block_hashes) == (ends[4], ends[5:])
    assert after.token_ids == list(range(5 * BLOCK, 6 * BLOCK)) and after.extra_keys == [None]


def test_no_event_for_blocks_of_replaced_weights(made: tuple[VllmPoolScheduler, Blocks]) -> None:
    """A save ends after a reset: no request finds its blocks any more."""
    scheduler, blocks = made
    scheduler.on_new_request(request(40))
    (save,) = scheduler.step(step("r", 0, 40, [5, 7, 9])).saves
    scheduler.pool.reset()
    for _ in range(2):
        scheduler.reported(FerryReport(saved=[Saved(save.job_id)]), ())
    assert scheduler.take_events() == [] and +blocks.references == Counter()


def test_a_reset_takes_back_what_routers_were_told(
    made: tuple[VllmPoolScheduler, Blocks],
) -> None:
    """vLLM's own event tells only that the engine's cache is empty."""
    scheduler, _ = made
    asked = request(40)
    scheduler.on_new_request(asked)
    (save,) = scheduler.step(step("r", 0, 40, [5, 7, 9])).saves
    for _ in range(2):
        scheduler.reported(FerryReport(saved=[Saved(save.job_id)]), ())
    (stored,) = scheduler.take_events()
    assert isinstance(stored, BlockStored) and len(stored.block_hashes) == 2
    scheduler.pool.reset()
    assert scheduler.waits_for_a_step
    (event,) = scheduler.take_events()
    assert isinstance(event, BlockRemoved) and event.medium == "STORAGE"
    assert event.block_hashes == stored.block_hashes
    assert not scheduler.waits_for_a_step and scheduler.take_events() == []


def test_an_evicted_block_is_told(
    made: tuple[VllmPoolScheduler, Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gives up a block that routers were told of: they are told, once."""
    monkeypatch.setattr("kvferry.pool.lookup.PERIOD_SECONDS", 0.0)
    scheduler, _ = made
    asked = request(40)
    scheduler.on_new_request(asked)
    (save,) = scheduler.step(step("r", 0, 40, [5, 7, 9])).saves
    store, soon = scheduler.config.opener()(), time.monotonic() + 30
    keys = scheduler.pool.keys_of(0, save.tables[0].contents)
    assert [len(of_block) for of_block in keys] == [2, 2]  # one of each rank
    for key in (k for of_block in keys for k in of_block):
        store.put_bytes(key, b"some block", soon)
    for _ in range(2):
        scheduler.reported(FerryReport(saved=[Saved(save.job_id)]), ())
    assert [type(e) for e in scheduler.take_events()] == [BlockStored]
    scheduler.pool.watch.look(store, soon)
    assert not scheduler.waits_for_a_step
    store.remove([keys[1][1]], soon)  # one rank's part is enough
    scheduler.pool.watch.look(store, soon)
    assert scheduler.waits_for_a_step
    (event,) = scheduler.take_events()
    assert isinstance(event, BlockRemoved) and event.medium == "STORAGE"
    assert event.block_hashes == [maybe_convert_block_hash(asked.block_hashes[1])]
    scheduler.pool.watch.look(store, soon)
    assert scheduler.take_events() == []
    store.close()


def test_after_a_failed_load_a_request_is_not_matched_again(
    made: tuple[VllmPoolScheduler, Blocks],
) -> None:
    scheduler, _ = made
    asked = request(40)
    scheduler.on_new_request(asked)
    lost = PoolLoaded("r", "one object", bad_from=16)
    scheduler.reported(FerryReport(loaded=[lost]), ["r"])
    assert scheduler.matched(asked, 0) == (None, False), "loaded requests come first"
    assert scheduler.matched(asked, 0) == (0, False)


def test_chunks_decode_and_drafts(made: tuple[VllmPoolScheduler, Blocks]) -> None:
    """Each block is ordered once, when its last token is known; drafted tokens do not count."""
    scheduler, _ = made
    asked = request(40)
    scheduler.on_new_request(asked)
    table = [5, 7, 9, 11]
    ordered = []
    for computed, scheduled in ((0, 20), (20, 20), (40, 12)):  # the last: 1 token and 11 drafts
        orders = scheduler.step(step("r", computed, scheduled, table))
        ordered += [list(b.block_ids) for s in orders.saves for b in s.tables]
    assert ordered == [[5], [7]]
    asked.all_token_ids += range(40, 49)
    orders = scheduler.step(step("r", 48, 1, table))
    assert [list(b.block_ids) for s in orders.saves for b in s.tables] == [[9]]


@pytest.mark.parametrize("computed", [0, BLOCK])
def test_a_hand_over_behind_old_blocks_saves_nothing(
    made: tuple[VllmPoolScheduler, Blocks], computed: int
) -> None:
    """After a reset while blocks were in use, vLLM's own cache has blocks of replaced weights. What
    is computed on them is not new, also where a hand-over brought the tokens in between."""
    scheduler, _ = made
    scheduler.pool.reset(keeps_blocks=True)
    asked = request(40)
    scheduler.on_new_request(asked)
    scheduler.elsewhere(asked, computed, 2 * BLOCK)
    asked.all_token_ids += range(40, 49)
    orders = scheduler.step(step("r", 40, 9, [5, 7, 9, 11]))
    saved = [list(b.block_ids) for s in orders.saves for b in s.tables]
    assert saved == ([] if computed else [[9]])


def test_requests_without_token_ids_are_left_alone(
    made: tuple[VllmPoolScheduler, Blocks],
) -> None:
    scheduler, _ = made
    asked = request(40)
    asked.prompt_token_ids = None
    scheduler.on_new_request(asked)
    assert scheduler.matched(asked, 0) == (0, False)
    assert scheduler.step(step("r", 0, 40, [1, 2, 3])).saves == []


def parallel(tp: int, pcp: int, dcp: int) -> Any:
    return SimpleNamespace(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
    )


def test_prefill_context_parallel_ranks() -> None:
    alone = cache_rank(parallel(2, 1, 2), 1, 1, 0)
    assert (alone.rank, alone.tp, alone.replicas) == (Rank(1, 1), 2, 1)
    copies = [cache_rank(parallel(2, 2, 1), 0, tp, pcp) for pcp in range(2) for tp in range(2)]
    assert [(c.rank.tp, c.replica, c.replicas) for c in copies] == [
        (0, 0, 2),
        (1, 0, 2),
        (0, 1, 2),
        (1, 1, 2),
    ]
    for dcp in (2, 4):  # tokens shared out over pcp, and over all: the dcp rank is r % dcp
        shared = {
            (tp, pcp): cache_rank(parallel(2, 2, dcp), 0, tp, pcp)
            for tp in range(2)
            for pcp in range(2)
        }
        assert {one.rank.tp for one in shared.values()} == set(range(4))
        assert all(one.tp == 4 and one.replicas == 1 for one in shared.values())
        assert [shared[1, pcp].rank.tp % 2 for pcp in range(2)] == [0, 1]
    assert (replicas(parallel(1, 2, 1)), replicas(parallel(1, 2, 2))) == (2, 1)


def test_how_far_drafts_read_ahead() -> None:
    """As vLLM itself says it."""

    def ahead(method: str | None, modules: int = 1) -> int:
        speculative: Any = SpeculativeConfig.__new__(SpeculativeConfig)
        speculative.method = method
        speculative.num_speculative_tokens = modules
        hf_config = SimpleNamespace(num_nextn_predict_layers=modules)
        speculative.draft_model_config = SimpleNamespace(hf_config=hf_config)
        config = VllmConfig.__new__(VllmConfig)
        config.speculative_config = None if method is None else speculative
        return _draft_ahead(config)

    for method in ("eagle", "eagle3", "mtp", "dflash", "dspark"):
        assert ahead(method) == 1, method
    assert ahead("mtp", modules=3) == 3
    assert [ahead(method) for method in (None, "draft_model", "extract_hidden_states")] == [0, 0, 0]


class Recorded:
    """Stands in for torch's event, which needs a GPU."""

    def record(self) -> None:
        recorded.append(self)


recorded: list[Recorded] = []


def test_most_layers_of_a_step_are_final_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of which a step does not tell, nor memory that such a layer has too, nor what is
    computed twice."""
    monkeypatch.setattr(torch, "Event", Recorded)
    memory = torch.zeros(10, 4096, dtype=torch.uint8)
    caches = {f"layer {n}": memory[n] for n in range(8)}
    caches["half"] = memory[8][:2048]
    caches["state"] = [memory[9], memory[0][:16]]  # shares the first layer's memory
    layers = pool_worker._Layers(caches)
    names = [f"layer {n}" for n in range(8)]
    addresses = np.array([row.data_ptr() + 32 for row in memory])

    def early(*told: str) -> list[int] | None:
        saves: list[SaveOrder] = []
        for name in told:
            layers.computed(name, saves)
        assert layers.take_early([]) is None  # another step's
        found = layers.take_early(saves)
        if found is None:
            return None
        ready = Ready(2, 1, found.memory)
        return np.flatnonzero(ready.is_early(addresses, np.full(10, 64))).tolist()

    assert early(*names) is None  # ten were expected, so no event was recorded in time
    for _ in range(2):
        assert early(*names) == [1, 2, 3, 4, 5, 6]
    assert early() is None  # a graph of the whole step
    assert early("half", "half") is None  # and a draft's own, twice
    assert early(*names) == [1, 2, 3, 4, 5, 6]
    assert early(*names, "layer 7", "layer 0") == [1, 2, 3, 4, 5, 6]
    assert early(*names) is None  # of ten
    assert early(*names) == [1, 2, 3, 4, 5, 6]
    assert early(*sorted([*names, *names])) == []
    layers.computed("layer 1", [])  # of a step whose saves never began
    assert early(*sorted([*names, *names])) == []
    assert early(*names, "state", "half") is None  # of sixteen
    assert early(*names, "state", "half") == [0, 1, 2, 3, 4, 5, 6, 7, 9]


def test_a_model_of_the_hub_is_named_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM resolves a branch once, here from the cache, and tells its other processes."""
    commit = "12ab" * 10
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    (snapshot / "config.json").write_text(json.dumps(text))
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    made = ModelConfig("org/tiny", dtype="float32", skip_tokenizer_init=True)
    engine = SimpleNamespace(model_config=pickle.loads(pickle.dumps(made)))
    assert engine_weights(engine) == f"hub org/tiny {commit}"
