"""Engines and prompts whose caches differ for equal tokens, by vLLM's own classes: told apart."""

from __future__ import annotations

import functools
import gc
import itertools
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from golden import golden
from kvferry.layout.shape import Rank

torch = pytest.importorskip("torch", reason="this tier runs in the environment with vLLM")
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
with warnings.catch_warnings():  # torch warns of itself
    warnings.simplefilter("ignore")
    from PIL import Image
    from vllm.config.ec_transfer import ECTransferConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as rope
    from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache
    from vllm.multimodal.cache.shm import ShmObjectStoreSenderCache
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalSharedField,
        PlaceholderRange,
    )
    from vllm.multimodal.parse import ImageProcessorItems
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.sampling_params import SamplingParams
    from vllm.transformers_utils.config import patch_rope_parameters
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from kvferry.handover.describe import engine_info, rank_info
from kvferry.handover.ticket import Ticket
from kvferry.pool.orders import SaveOrder
from kvferry.pool.scheduler import PoolLimits
from kvferry.pool.weights import Adapters
from kvferry.vllm import fingerprint
from kvferry.vllm.bootstrap import derived_hold
from kvferry.vllm.connector import FerryConnector
from kvferry.vllm.consuming import Consuming
from kvferry.vllm.describe import meaning
from kvferry.vllm.fingerprint import Prompts, content, request_digest
from kvferry.vllm.pool.config import PoolConfig
from kvferry.vllm.pool.scheduler import VllmPoolScheduler
from kvferry.vllm.producing import Producing
from vllm_pairs import AllArrived, handover_parts
from workers import Worker

ORIGINAL = 64  # tokens that the model was trained on first


def told(max_model_len: int = 4096, text: dict[str, Any] | None = None, **config: Any) -> Any:
    """What an engine of a captured model says that its bytes mean."""
    worker = Worker(golden("llama-tp1"), Rank(0, 0))
    whole = {**worker.vllm_config.model_config.hf_text_config.to_dict(), **(text or {})}
    worker.vllm_config.model_config.hf_text_config = Fake(to_dict=lambda: whole)
    for name, value in {"max_model_len": max_model_len, **config}.items():
        setattr(worker.vllm_config.model_config, name, value)
    return meaning(worker.vllm_config, worker.kv_cache_config, "")


def phi3() -> dict[str, Any]:
    """As vLLM reads a checkpoint with LongRoPE."""
    from transformers import Phi3Config

    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=4 * ORIGINAL,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
        pad_token_id=0,
    )
    patch_rope_parameters(config)
    return dict(config.to_dict())


class TestLengths:
    def test_long_rope(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Engines match exactly where vLLM's rotation gives the same keys for the same tokens."""
        text = phi3()
        told_rope = text["rope_parameters"]

        def keys(max_model_len: int) -> Any:
            config = Fake(model_config=Fake(max_model_len=max_model_len))
            monkeypatch.setattr(rope, "get_current_vllm_config", lambda: config)
            rotate = rope.Phi3LongRoPEScaledRotaryEmbedding(
                8,
                8,
                text["max_position_embeddings"],
                told_rope["original_max_position_embeddings"],
                told_rope["rope_theta"],
                True,
                torch.float32,
                told_rope["short_factor"],
                told_rope["long_factor"],
            )
            return rotate(torch.arange(9), torch.ones(9, 8), torch.ones(9, 8))[1]

        for a, b in itertools.combinations((40, ORIGINAL, ORIGINAL + 1, 200), 2):
            same = torch.equal(keys(a), keys(b))
            assert same == (told(a, text) == told(b, text)), (a, b)
            nested = {**text, "rope_parameters": {"full_attention": told_rope}}
            assert same == (told(a, nested) == told(b, nested)), (a, b)

    def test_a_length_that_is_fitted_to_memory(self) -> None:
        """vLLM cuts it when the layers are there already, with the long factors."""
        fitted = {"original_max_model_len": -1, "get_and_verify_max_len": lambda _: 4 * ORIGINAL}
        assert told(ORIGINAL // 2, phi3(), **fitted) == told(4 * ORIGINAL, phi3())

    def test_lengths_of_other_models_do_not_count(self) -> None:
        assert told(100) == told(100_000)
        # MiniMax-M2 writes its engine's into the configuration
        assert told(100, {"max_model_len": 100}) == told(200, {"max_model_len": 200})

    def test_llama4_tunes_by_length(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.models import llama4

        monkeypatch.setattr(llama4.LlamaForCausalLM, "__init__", lambda *_, **__: None)
        monkeypatch.setattr(llama4.Llama4ForCausalLM, "set_moe_parameters", lambda _: None)

        def engine(length: int, **generation: Any) -> tuple[bool, Any]:
            config = Fake(
                max_model_len=length,
                hf_config=Fake(),
                try_get_generation_config=dict,
                override_generation_config=generation,
            )
            llama4.Llama4ForCausalLM(vllm_config=Fake(model_config=config))
            text = {"model_type": "llama4_text", "attn_temperature_tuning": True}
            return config.hf_config.attn_temperature_tuning, told(text=text, **vars(config))

        engines = [engine(n) for n in (20_000, 32_768, 32_769, 100_000)]
        engines += [engine(n, attn_temperature_tuning=False) for n in (20_000, 100_000)]
        for (tuned, one), (also, other) in itertools.combinations(engines, 2):
            assert (tuned == also) == (one == other)

    def test_a_draft_model(self) -> None:
        def fingerprint(length: int, **draft: Any) -> str:
            worker = Worker(golden("llama-tp1"), Rank(0, 0))
            worker.add_draft(layers=1, heads=2, head_size=32, block=64)
            worker.vllm_config.model_config.max_model_len = length
            drafting = worker.vllm_config.speculative_config
            drafting.kv_cache_dtype = draft.pop("kv_cache_dtype", None)
            config = drafting.draft_model_config
            for name, value in {"max_model_len": ORIGINAL, **draft}.items():
                setattr(config, name, value)
            text = {"num_hidden_layers": 1, **phi3()}
            config.hf_text_config = Fake(to_dict=lambda: text)
            return worker.describe().model.fingerprint()

        plain = fingerprint(ORIGINAL)
        assert plain == fingerprint(ORIGINAL // 2)
        others = [
            fingerprint(ORIGINAL + 1),
            fingerprint(ORIGINAL, quantization="fp8"),
            fingerprint(ORIGINAL, kv_cache_dtype="fp8_e5m2"),
        ]
        assert len({plain, *others}) == 4


def test_quantization_while_loading() -> None:
    """One name, several ways; said alike by two processes."""
    ways: list[dict[str, Any] | None] = [
        None,
        {"linear": {"weight": "fp8_per_tensor_static"}},
        {"linear": {"weight": "fp8_per_tensor_static"}, "ignore": ["*.o_proj"]},
    ]
    configs = [resolve_quantization_config("online", way) for way in ways]
    assert "0x" not in repr(configs)
    said = [told(quantization="online", quantization_config=config) for config in configs]
    assert not any(a == b for a, b in itertools.combinations(said, 2))


def test_what_is_done_to_images(tmp_path: Path) -> None:
    """None of it is in the names that vLLM gives to images, nor always in their processed data."""

    def scaled(name: str, q: float) -> Any:
        (tmp_path / name).write_text(f'{{"blocks.0.attn": {{"q": {q}, "k": 1.0, "v": 1.0}}}}')
        options: dict[str, Any] = {"mm_encoder_fp8_scale_path": str(tmp_path / name)}
        return told(multimodal_config=MultiModalConfig(mm_encoder_attn_dtype="fp8", **options))

    plain = told(multimodal_config=MultiModalConfig(mm_device_do_normalize=False), hf_overrides={})
    assert plain == told()
    others = [
        told(multimodal_config=MultiModalConfig(mm_device_do_normalize=True)),
        told(multimodal_config=MultiModalConfig(mm_encoder_attn_dtype="fp8")),
        scaled("one", 1.0),
        scaled("two", 2.0),
        told(multimodal_config=MultiModalConfig(mm_processor_kwargs={"do_normalize": False})),
        told(multimodal_config=MultiModalConfig(video_pruning_rate=0.5)),
        told(
            multimodal_config=MultiModalConfig(
                video_pruning_rate=0.5, video_pruning_method="vidcom2"
            )
        ),
        told(
            multimodal_config=MultiModalConfig(),
            hf_overrides={"vision_config": {"spatial_merge_size": 4}},
        ),
    ]
    assert not any(a == b for a, b in itertools.combinations([plain, *others], 2))
    # what only says where and how much
    assert others[2] == scaled("a copy", 1.0)
    assert others[0] == told(
        multimodal_config=MultiModalConfig(mm_processor_cache_gb=0, mm_encoder_tp_mode="data")
    )


def engine_config(encoders: Any = None, **media: Any) -> Any:
    return Fake(
        speculative_config=None,
        model_config=Fake(
            model="m", revision=None, hf_config=None, multimodal_config=MultiModalConfig(**media)
        ),
        ec_transfer_config=encoders,
        parallel_config=Fake(prefill_context_parallel_size=1, decode_context_parallel_size=1),
    )


COUNT = 300
PARAMS: dict[str, Any] = {"do_remote_decode": True, "transfer_id": "t"}


FIRST, SECOND = torch.zeros(3, 8, 8), torch.ones(3, 8, 8)  # what two images show


def item(shows: Any, field: Any = None) -> MultiModalKwargsItem:
    elem = MultiModalFieldElem(shows, field or MultiModalBatchedField())
    return MultiModalKwargsItem({"pixel_values": elem})


def image(identifier: str, shows: Any = None, offset: int = 4) -> MultiModalFeatureSpec:
    data = item(shows) if isinstance(shows, torch.Tensor) else shows
    where = PlaceholderRange(offset, 8)
    return MultiModalFeatureSpec(data, "image", identifier, where, identifier)


def request(**more: Any) -> Request:
    made = Request("r", list(range(7, 7 + COUNT)), SamplingParams(max_tokens=9), None, **more)
    made.kv_transfer_params = dict(PARAMS)
    return made


# Prompts that tokens and names do not tell from others.
UNFIT: dict[str, Callable[[], Request]] = {
    "image that is not here": lambda: request(mm_features=[image("abc")]),
    "image in shared memory": lambda: request(
        mm_features=[image("abc", ShmObjectStoreSenderCache.address_as_item(Fake(), 64, 1, [7, 8]))]
    ),
    "image on another device": lambda: request(mm_features=[image("abc", FIRST.to("meta"))]),
    "one of two images": lambda: request(mm_features=[image("a", FIRST), image("b", offset=90)]),
    "session": lambda: request(resumable=True),
    "embeddings among tokens": lambda: request(
        prompt_embeds=torch.ones(COUNT, 4), prompt_is_token_ids=[True] * (COUNT - 1) + [False]
    ),
}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[VllmPoolScheduler]:
    config = PoolConfig.read({"path": str(tmp_path / "store"), "size": "4MiB"})
    told = engine_config()
    made = VllmPoolScheduler(config, told, PoolLimits(), Prompts.of(told), Adapters(), events=False)
    made.bind_blocks(Fake(blocks=list(range(100)), touch=lambda _: None, free_blocks=lambda _: ()))
    engine = golden("llama-tp1")
    layout = engine.layout(Rank(0, 0))
    info = engine_info("", "", engine.model, layout.shape, {})
    told_rank = rank_info(layout, [0] * len(layout.regions), "", "", {})
    made.described(info, [told_rank])
    yield made
    made.close()


def saves(pool: VllmPoolScheduler, asked: Request) -> int:
    """Blocks that are ordered to be saved when all of a request is computed."""
    return sum(len(b.block_ids) for order in ordered(pool, asked) for b in order.tables)


def ordered(pool: VllmPoolScheduler, asked: Request) -> list[SaveOrder]:
    count = asked.num_tokens
    table = list(range(1, 2 + count // pool.pool.align_tokens))
    output = Fake(
        kv_connector_block_state=Fake(get_block_ids=lambda _: (table,)),
        scheduled_new_reqs=[Fake(req_id="r", num_computed_tokens=0)],
        scheduled_cached_reqs=Fake(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={"r": count},
        total_num_scheduled_tokens=count,
    )
    return list(pool.step(output).saves)


class TestPool:
    @pytest.mark.parametrize("kind", UNFIT)
    def test_nothing_is_looked_up_or_saved(self, pool: VllmPoolScheduler, kind: str) -> None:
        asked = UNFIT[kind]()
        pool.on_new_request(asked)
        if asked.resumable:  # an image comes with the session's second part
            asked.num_computed_tokens = COUNT
            later = StreamingUpdate.from_request(
                request(resumable=True, mm_features=[image("abc")])
            )
            sessions = Fake(hash_block_size=16, log_stats=False)
            Scheduler._update_request_as_session(sessions, asked, later)
            assert [f.mm_position.offset for f in asked.mm_features] == [COUNT + 4]
        assert pool.matched(asked, 0) == (0, False)
        assert saves(pool, asked) == 0
        pool.finished(asked)
        plain = request()
        pool.on_new_request(plain)
        assert saves(pool, plain) > 0


class Ends:
    """Both ends of a hand-over."""

    def __init__(self) -> None:
        prompts = Prompts.of(engine_config())
        parts = handover_parts("mooncake", prompts=prompts)
        self.orders, self.stats = parts.orders, parts.stats
        self.offering = Producing(parts, "e", "i", (1, 1), 1234, flat=True, second=False)
        found: Any = Fake(find=lambda _: Fake(engine_id="e", incarnation="i", host="h", port=1))
        self.asking = Consuming(parts, found, AllArrived())


class TestHandover:
    @pytest.mark.parametrize("kind", UNFIT)
    def test_the_prefill_engine_does_not_hold_it(self, kind: str) -> None:
        ends, asked = Ends(), UNFIT[kind]()
        ends.offering.accept(asked)
        asked.status, asked.resumable = RequestStatus.FINISHED_LENGTH_CAPPED, False
        held, answer = ends.offering.finished(asked, ([1, 2, 3],))
        assert not held and answer is not None and answer["kvferry"]["not_held"]
        assert ends.orders.withdrawals == [derived_hold("i", "transfer t")]  # nobody waits for it
        assert ends.stats.data["requests_not_held"] == {"unfit": 1}
        assert not ends.orders.holds and not ends.offering.accepted

    @pytest.mark.parametrize("kind", UNFIT)
    @pytest.mark.parametrize("named", [False, True])
    def test_the_decode_engine_computes_it(self, kind: str, named: bool) -> None:
        """Whatever ticket comes with it; the producer hears that it is not needed."""
        ends, asked = Ends(), UNFIT[kind]()
        hold = derived_hold("i", "transfer t")
        ticket = Ticket("e", "i", hold, request_digest(asked), COUNT, "h", 1, "r")
        where = {"remote_engine_id": "e", "remote_bootstrap_addr": "http://h:1", **PARAMS}
        asked.kv_transfer_params = where if named else ticket.to_params()
        ends.asking.arrived(asked)
        assert ends.asking.matched(asked, 0) == (0, False)
        ends.asking.settle()
        assert [released.hold_id for released in ends.orders.releases] == [hold]

    def test_others_are_handed_over(self) -> None:
        ends, asked = Ends(), request()
        ends.offering.accept(asked)
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        assert ends.offering.finished(asked, ([1, 2, 3],))[0]


def client_uuid(shown: Any, stolen: str) -> str:
    """The id that a client sends with an image, as vLLM's front end takes it over."""
    images = ImageProcessorItems([shown.numpy()])
    inputs = ProcessorInputs([], {"image": images}, {"image": [stolen]})
    return str(inputs.get_mm_hashes("m", "blake3")["image"][0])


def exif_id(shown: Any, _: str) -> str:
    """An id beside an image's pixels, which vLLM hashes in place of them."""
    made = Image.new("RGB", (8, 8), "white" if shown.any() else "black")
    made.getexif()[Image.ExifTags.Base.ImageID] = uuid.UUID(int=1)
    return str(MultiModalHasher.hash_kwargs("blake3", model_id="m", image=made))


def hashed(identifier: str, shows: Any, **more: Any) -> Request:
    """A request as an engine's core makes it, with the names of its blocks."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    return request(mm_features=[image(identifier, shows)], block_hasher=hasher, **more)


def contents(pool: VllmPoolScheduler, asked: Request) -> list[str]:
    """Keys under which the blocks of a request are saved, once it is computed."""
    pool.on_new_request(asked)
    made = [c for order in ordered(pool, asked) for blocks in order.tables for c in blocks.contents]
    pool.finished(asked)
    assert made
    return made


@pytest.mark.parametrize("forge", [client_uuid, exif_id])
class TestImagesNamedByClients:
    """A client gives its image the name by which vLLM knows somebody else's."""

    @pytest.fixture
    def names(self, forge: Callable[[Any, str], str]) -> tuple[str, str]:
        hashed_by_vllm = MultiModalHasher.hash_kwargs("blake3", model_id="m", image=FIRST.numpy())
        victims = exif_id(FIRST, "") if forge is exif_id else hashed_by_vllm
        assert forge(SECOND, victims) == victims  # vLLM believes it
        return victims, forge(SECOND, victims)

    def test_nothing_is_saved_under_the_other_image(
        self, pool: VllmPoolScheduler, names: tuple[str, str]
    ) -> None:
        victims, forged = names
        good = contents(pool, hashed(victims, FIRST))
        assert not set(good) & set(contents(pool, hashed(forged, SECOND)))
        assert good == contents(pool, hashed(victims, FIRST.clone()))  # of another engine

    def test_nor_handed_over(self, names: tuple[str, str]) -> None:
        victims, forged = names
        prefill, decode = Ends(), hashed(victims, FIRST.clone())
        for name, shown in ((victims, FIRST), (forged, SECOND)):
            prefill.offering.accept(replace_id(hashed(name, shown), str(shown is FIRST)))
        digests = {name: one.digest for name, one in prefill.offering.accepted.items()}
        assert digests["True"] == request_digest(decode) != digests["False"]
        for digest, tokens in ((digests["True"], COUNT), (digests["False"], 0)):
            asking = Ends().asking
            ticket = Ticket("e", "i", "a", digest, COUNT, "h", 1, "r")
            decode.kv_transfer_params = ticket.to_params()
            asking.arrived(decode)
            assert asking.matched(decode, 0)[0] == tokens

    @pytest.mark.parametrize("connector", ["pool", "handover"])
    def test_nor_found_in_caches_of_the_engine(
        self, connector: str, pool: VllmPoolScheduler, names: tuple[str, str]
    ) -> None:
        """What vLLM finds there is saved and handed over like what it computes.

        Blocks and outputs of encoders are found by names. Requests that are for no connector come
        to the same caches.
        """
        asked = [hashed(names[0], FIRST), hashed(names[1], SECOND), hashed("other", FIRST.clone())]
        before = [list(each.block_hashes) for each in asked]
        assert before[0] == before[1] != before[2]
        idle: Any = Fake(handover=None, pool=None, _prompts=Prompts(), _adapters=Adapters())
        if connector == "pool":
            idle.pool = pool
        arrived = functools.partial(FerryConnector.on_new_request, idle)
        for each in asked:
            each.kv_transfer_params = None
            arrived(each)
            arrived(each)  # of a second connector of ours
            pool.finished(each)
        victim, forger, same = ([f.identifier for f in each.mm_features] for each in asked)
        assert victim == same != forger
        assert asked[0].block_hashes == asked[2].block_hashes
        assert not set(asked[0].block_hashes) & set(asked[1].block_hashes)
        assert len(asked[0].block_hashes) == len(before[0])
        assert [f.mm_hash for f in asked[1].mm_features] == [names[1]]  # of vLLM's own cache
        # a session's next image comes unseen, under any name that a client can work out
        assert content(asked[0].mm_features[0]) not in victim


class TestContent:
    """What an image is known by."""

    def test_it_is_the_same_everywhere(self) -> None:
        shows = torch.arange(6, dtype=torch.float32).reshape(2, 3)
        assert content(image("abc", shows)) == content(image("abd", shows.t().contiguous().t()))
        known = "d55b8142f887e5323c53ca64c8cb59cea17f6c63b9bd3feb01a4c3e2a76ebeaa"
        assert content(image("abc", shows)) == known

    def test_all_of_it_counts(self) -> None:
        shows = torch.arange(6, dtype=torch.int32)
        parts: list[Any] = [
            shows,
            shows.reshape(2, 3),
            shows.view(torch.float32),
            shows.to(torch.int64),
            [shows],
            [shows[:3], shows[3:]],
            [[shows[:3]], shows[3:]],
            [shows, 1],
            [shows, 1.0],
            [shows, "1"],
            shows.numpy().reshape(1, 6),
            torch.tensor(1),
            shows[:0],
        ]
        made = [content(image("a", item(part))) for part in parts]
        field = MultiModalSharedField(batch_size=1)
        made.append(content(image("a", item(shows, field))))
        made.append(content(image("a", MultiModalKwargsItem({"p": item(shows)["pixel_values"]}))))
        made.append(content(replace(image("a", item(shows)), modality="video")))
        where = PlaceholderRange(4, 9)
        made.append(content(replace(image("a", item(shows)), mm_position=where)))
        masks = [torch.arange(8) < 4, torch.arange(8) < 5]
        for mask in masks:
            where = PlaceholderRange(4, 8, mask)
            made.append(content(replace(image("a", item(shows)), mm_position=where)))
        assert all(made) and len(set(made)) == len(made)

    @pytest.mark.parametrize(
        "data", [None, item(None), item(1), item([FIRST, object()]), item([FIRST, {"a": FIRST}])]
    )
    def test_what_cannot_be_read_has_no_name(self, data: Any) -> None:
        assert content(image("abc", data)) == ""

    def test_vllm_fills_in_what_came_as_a_name_alone(self) -> None:
        """A client names an image that the engine has in its cache of processed media."""
        media = Fake(get_multimodal_config=lambda: Fake(mm_processor_cache_gb=1))
        cache = LruKeyReplicatedReceiverCache(media)
        cache.get_and_update_features([image("abc", SECOND)])
        (named,) = cache.get_and_update_features([image("abc")])
        assert content(named) == content(image("other", SECOND)) != content(image("abc", FIRST))

    def test_a_cached_image_is_hashed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = item(FIRST.clone())
        first = content(image("a", data))
        monkeypatch.setattr(fingerprint, "_digest", lambda _: pytest.fail("hashed again"))
        assert content(image("b", data)) == first
        number = id(data)
        assert number in fingerprint._hashed
        del data
        gc.collect()
        assert number not in fingerprint._hashed

    @pytest.mark.parametrize(
        "config",
        [
            engine_config(encoders=ECTransferConfig()),
            engine_config(mm_processor_cache_type="shm"),
        ],
    )
    def test_engines_that_do_not_see_media(self, config: Any) -> None:
        """Encoders elsewhere know them by names; in shared memory only workers see them."""
        asked = hashed("abc", FIRST)
        Prompts.of(config).name_media(asked)
        assert asked.mm_features[0].identifier == "abc"
        assert "media" in Prompts.of(config).unfit(asked)
        assert Prompts.of(config).unfit(request()) == ""
        assert Prompts.of(engine_config(mm_processor_cache_gb=0)).unfit(asked) == ""


def replace_id(made: Request, request_id: str) -> Request:
    made.request_id = request_id
    return made
