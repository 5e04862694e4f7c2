# SPDX-License-Identifier: Apache-2.0
"""Engines of ours behind existing gateways: vllm-router and llm-d's routing sidecar.

vllm-router's requests are replayed from a recording, and llm-d's as its source builds them
(`gateways`). Where vllm-router is installed (the extra `gateways`, or KVFERRY_VLLM_ROUTER), it also
runs itself, and the recording is compared with what it sends. Tokens are those of an engine alone,
and counters say that they came from a load. As a control, a ticket for another prompt is not used.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from modelless import Modelless, expected
    from modelless_front import Front

import gateways
from gateways import PARAMS, STYLES, Json, Reply, Style, through_go
from kvferry.handover.ticket import Ticket
from tiny_models import make_model
from vllm_engines import Engine, free_port
from vllm_pairs import ids, prompt, reaches, started, toy_proxy_prefill

pytestmark = pytest.mark.filterwarnings("ignore")
needs_the_program = pytest.mark.skipif(
    gateways.program() is None, reason="needs vllm-router: the extra 'gateways'"
)
CONNECTORS = {"nixl": "FerryConnector", "mooncake": "MooncakeConnector"}
LOADS, HITS = "vllm:kvferry_loads_total", "vllm:external_prefix_cache_hits_total"
JSON_HEADERS = [("content-type", "application/json")]


@needs_the_program
def test_the_recording_is_what_vllm_router_sends(tmp_path: Path) -> None:
    assert gateways.record(tmp_path) == json.loads(gateways.RECORDED.read_text())


@pytest.mark.parametrize("name", list(gateways.ASKED))
def test_vllm_router_passes_the_ticket_on(name: str) -> None:
    first, second = gateways.recording("nixl", name)
    assert (first.to, second.to) == ("prefill", "decode")
    assert second.body[PARAMS] == gateways.TICKET
    assert first.headers == second.headers  # both engines know the request by one id


# Engines without a model: both styles, in seconds


class Fronts:
    """A prefill and a decode engine, and the ways to them."""

    def __init__(self, style: Style, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.style, self.bootstrap = style, free_port() if style == "mooncake" else None
        monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(self.bootstrap or free_port()))
        model = make_model(folder / "tiny")
        self.p = Front(Modelless("p", model, connector=CONNECTORS[style]))
        monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(free_port()))
        self.d = Front(Modelless("d", model, connector=CONNECTORS[style], blocks=128, block_size=8))

    def replay(self, tokens: list[int]) -> Reply:
        """As vllm-router."""
        asked = (self.style, "completion", {"prompt": tokens}, self.p.url, self.d.url)
        return gateways.replayed(*asked, self.bootstrap, "p")

    def llm_d(self, tokens: list[int]) -> Reply:
        body = {"prompt": tokens, "max_tokens": 8}
        urls = (self.p.url, self.d.url)
        return gateways.llm_d(self.style, *urls, "/v1/completions", body, self.bootstrap)

    @property
    def loads(self) -> int:
        return sum(self.d.engine.told("loads"))

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture(params=STYLES)
def fronts(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fronts]:
    made = Fronts(request.param, tmp_path, monkeypatch)
    yield made
    made.close()


def handed_over(fronts: Fronts, ask: Callable[[list[int]], Reply]) -> None:
    """Three prompts of unlike lengths, answered right and loaded, and nothing is left."""
    for number, count in enumerate((20, 200, 64)):
        tokens = prompt(number, count)
        assert ask(tokens).token_ids() == expected(tokens, 8)
        assert fronts.loads == number + 1
    engines = (fronts.p.engine, fronts.d.engine)
    assert reaches(lambda: [engine.used_blocks for engine in engines], [0, 0])


@pytest.mark.parametrize("gateway", ["replay", "llm_d"])
def test_requests_of_gateways(fronts: Fronts, gateway: str) -> None:
    handed_over(fronts, getattr(fronts, gateway))


def test_without_a_ticket_the_decode_engine_computes(fronts: Fronts) -> None:
    """The control of all counts above. llm-d sends null if the prefill engine answered without."""
    tokens = prompt(5, 100)
    body = {"prompt": tokens, "max_tokens": 8, PARAMS: None}
    answer = gateways.send(fronts.d.url, "/v1/completions", body, JSON_HEADERS)
    assert answer.token_ids() == expected(tokens, 8)
    assert fronts.loads == 0


@pytest.mark.parametrize("fronts", ["nixl"], indirect=True)
def test_anothers_ticket_is_not_used(fronts: Fronts) -> None:
    mine, other = prompt(6, 100), prompt(7, 100)
    body = {"prompt": other, "max_tokens": 1, PARAMS: toy_proxy_prefill()}
    ticket = gateways.send(fronts.p.url, "/v1/completions", body, JSON_HEADERS).json()[PARAMS]
    body = {"prompt": mine, "max_tokens": 8, PARAMS: through_go(ticket)}
    answer = gateways.send(fronts.d.url, "/v1/completions", body, JSON_HEADERS)
    assert answer.token_ids() == expected(mine, 8) != expected(other, 8)
    assert fronts.loads == 0


@needs_the_program
def test_vllm_router_before_engines_without_a_model(fronts: Fronts, tmp_path: Path) -> None:
    urls, log = (fronts.p.url, fronts.d.url), tmp_path / "router.log"
    with gateways.vllm_router(fronts.style, *urls, fronts.bootstrap, log) as url:

        def ask(tokens: list[int]) -> Reply:
            body = {"model": "tiny", "prompt": tokens, "max_tokens": 8}
            return gateways.send(url, "/v1/completions", body, JSON_HEADERS)

        handed_over(fronts, ask)


# Real engines: vLLM's own server reads what gateways send

Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Blocks of 128 to blocks of 32."""
    folder = tmp_path_factory.mktemp("gateways")
    model = make_model(folder / "tiny")
    p = Engine("p", model, folder / "p.log", connector={}, on_failure="recompute")
    d = Engine("d", model, folder / "d.log", connector={}, on_failure="recompute", block_size=32)
    started(p, d)
    yield p, d
    p.stop()
    d.stop()


def asked(name: str, tokens: list[int]) -> Json:
    """The field with the prompt."""
    if name != "chat":
        return {"prompt": tokens}
    return {"messages": [{"role": "user", "content": " ".join(f"t{token}" for token in tokens)}]}


def by_llm_d(pair: Pair, name: str, tokens: list[int]) -> Reply:
    path, body = gateways.ASKED[name]
    # llm-d leaves `min_tokens` in the request for one token, which vLLM refuses.
    body = {k: v for k, v in body.items() if k != "min_tokens"} | asked(name, tokens)
    return gateways.llm_d("nixl", pair[0].url, pair[1].url, path, body)


def by_replay(pair: Pair, name: str, tokens: list[int]) -> Reply:
    return gateways.replayed("nixl", name, asked(name, tokens), pair[0].url, pair[1].url)


@pytest.fixture(scope="module")
def by_the_program(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Pair, str, list[int]], Reply]]:
    log = tmp_path_factory.mktemp("program") / "router.log"
    with gateways.vllm_router("nixl", pair[0].url, pair[1].url, None, log) as url:

        def ask(pair: Pair, name: str, tokens: list[int]) -> Reply:
            path, body = gateways.ASKED[name]
            return gateways.send(url, path, body | asked(name, tokens), JSON_HEADERS)

        yield ask


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(gateways.ASKED))
@pytest.mark.parametrize(
    "gateway", ["llm_d", "replay", pytest.param("program", marks=needs_the_program)]
)
def test_before_real_engines(
    pair: Pair, gateway: str, name: str, request: pytest.FixtureRequest
) -> None:
    p, d = pair
    ask = {"llm_d": by_llm_d, "replay": by_replay}.get(gateway)
    ask = ask or request.getfixturevalue("by_the_program")
    number = 10 * ["llm_d", "replay", "program"].index(gateway) + list(gateways.ASKED).index(name)
    tokens = prompt(number, 300)
    loads, hits = d.metric(LOADS), d.metric(HITS)
    found = ask(pair, name, tokens).token_ids()
    path, body = gateways.ASKED["completion" if name == "stream" else name]
    alone = gateways.send(p.url, path, body | asked(name, tokens), JSON_HEADERS)
    assert len(found) == 8 and found == alone.token_ids()
    assert d.metric(LOADS) - loads == 1
    assert d.metric(HITS) - hits == alone.json()["usage"]["prompt_tokens"] >= 300
    other = p.complete(prompt(number + 100, 300), max_tokens=8)
    assert found != ids(other)[0]  # prompts differ in their answers


@pytest.mark.matrix
def test_a_ticket_for_another_prompt_is_not_used(pair: Pair) -> None:
    p, d = pair
    mine, other = prompt(50, 300), prompt(51, 300)
    answer = p.complete(other, max_tokens=1, **{PARAMS: toy_proxy_prefill()})
    ticket = answer[PARAMS]
    assert Ticket.from_params(through_go(ticket)) == Ticket.from_params(ticket)
    loads = d.metric(LOADS)
    found = d.complete(mine, max_tokens=8, **{PARAMS: through_go(ticket)})
    assert d.metric(LOADS) == loads
    assert ids(found) == ids(p.complete(mine, max_tokens=8))
