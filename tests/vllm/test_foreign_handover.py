"""Hand-overs between real engines, tp 1 to tp 2, over Mooncake and over NIXL.

One decode engine has both carriers; each prefill engine has one, so which one moved the bytes is
not a matter of choice. fp32 and greedy; a control beside each equality.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
pytest.importorskip("nixl", reason="needs NIXL")

from test_handover import FAST, HIT, ids, loads, prompt, settled, started, ticket_of

from kvferry.errors import DescriptionError
from tiny_models import make_model
from vllm_engines import Engine, hand_over

OPTIONS: dict[str, Any] = {"mooncake": {"protocol": "tcp"}, "nixl": {"backends": ["UCX"]}}

OPTIONS_OF_NIXL = {"nixl": OPTIONS["nixl"]}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    folder: Path = tmp_path_factory.mktemp("foreign")
    model = make_model(folder / "tiny")

    def engine(name: str, carriers: list[str], **shape: int) -> Engine:
        options = {carrier: OPTIONS[carrier] for carrier in carriers}
        config = {**FAST, "carriers": carriers, "carrier_options": options}
        return Engine(name, model, folder / f"{name}.log", connector=config, **shape)

    every = {name: engine(name, [name]) for name in OPTIONS}
    every["decode"] = engine("decode", list(OPTIONS), tp=2, block_size=32)
    started(*every.values())
    yield every
    for one in every.values():
        one.stop()


@pytest.mark.parametrize("carrier", list(OPTIONS))
def test_tokens_are_equal(engines: dict[str, Engine], carrier: str) -> None:
    prefill, decode = engines[carrier], engines["decode"]
    others = []
    for tokens in (33, 300, 1000):
        asked = prompt(tokens + len(carrier), tokens)
        before, loaded = decode.metric(HIT), loads(decode)
        answer = ids(hand_over(prefill, decode, asked, max_tokens=8))
        assert answer == ids(prefill.complete(asked, max_tokens=8))
        assert decode.metric(HIT) - before == tokens  # all of it came from the prefill engine
        assert loads(decode) - loaded == 1
        others.append(answer)
    assert len({str(answer) for answer in others}) == 3  # prompts do make a difference
    # a ticket for one prompt gives nothing to another
    before = decode.metric(HIT)
    params = ticket_of(prefill, prompt(201, 200))
    asked = prompt(202, 200)
    answer = ids(decode.complete(asked, max_tokens=8, kv_transfer_params=params))
    assert answer == ids(prefill.complete(asked, max_tokens=8))
    assert answer != ids(prefill.complete(prompt(201, 200), max_tokens=8))
    assert decode.metric(HIT) == before
    assert settled(decode)


@pytest.mark.filterwarnings("ignore")  # of vLLM's and torch's imports
def test_options_for_a_carrier_that_is_not_used_are_refused() -> None:
    from kvferry.vllm.config import FerryConfig

    with pytest.raises(DescriptionError, match="nixl"):
        FerryConfig.read({"carriers": ["tcp"], "carrier_options": {"nixl": {}}})
    for wrong in (["tcpp"], [], ["auto", "tcp"], "tcpp"):
        with pytest.raises(DescriptionError, match="carriers"):
            FerryConfig.read({"carriers": wrong})
    with pytest.raises(DescriptionError, match=r"mooncak.*there are no such carriers"):
        FerryConfig.read({"carrier_options": {"mooncak": {"protocol": "rdma"}}})
    with pytest.raises(DescriptionError, match="mapping"):
        FerryConfig.read({"carriers": ["nixl"], "carrier_options": {"nixl": ["UCX"]}})
    config = FerryConfig.read({"carriers": ["nixl"], "carrier_options": OPTIONS_OF_NIXL})
    assert config.carrier_options["nixl"] == {"backends": ["UCX"]}
