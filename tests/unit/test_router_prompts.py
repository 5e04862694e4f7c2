"""A request's tokens, from engines that speak the little that is needed, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from kvferry.errors import DescriptionError
from kvferry.router.api import ApiError, Generation
from kvferry.router.cache import prompts as prompts_module
from kvferry.router.cache.index import Namespace, PromptChain
from kvferry.router.cache.prompts import (
    CHAT,
    COMPLETION,
    AskedPrompt,
    LocalTokenizer,
    PromptChains,
)
from kvferry.router.fleet.connections import EngineTransport
from waiting import PATIENCE_SECONDS

USUAL = Namespace()
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Engine:
    """Tokens are the letters of a prompt. `script`: answers to the next questions, by status."""

    url: str = ""
    ways: tuple[str, ...] = ("render", "tokenize")
    script: list[int | bytes] = field(default_factory=list)
    hang: bool = False
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "base"}, {"id": "poet", "parent": "base"}]
    )
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        path = scope["path"]
        body = json.loads(raw) if raw else {}
        self.seen.append((path, body))
        self.keys.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        if self.hang:
            await asyncio.sleep(60)
        if self.script and path != "/v1/models":
            given = self.script.pop(0)
            status, answer = (given, b"{}") if isinstance(given, int) else (200, given)
        else:
            found = self.answer(path, body)
            status, answer = (404, b"{}") if found is None else (200, found)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    def answer(self, path: str, body: dict[str, Any]) -> bytes | None:
        if path == "/v1/models":
            return json.dumps({"object": "list", "data": self.models}).encode()
        text = body.get("prompt") or "".join(m["content"] for m in body.get("messages", ()))
        letters = [ord(letter) for letter in text]
        if path == f"{CHAT}/render" and "render" in self.ways:
            return json.dumps({"request_id": "r", "token_ids": letters}).encode()
        if path == f"{COMPLETION}/render" and "render" in self.ways:
            return json.dumps([{"request_id": "r", "token_ids": letters}]).encode()
        if path == "/tokenize" and "tokenize" in self.ways:
            return json.dumps({"count": len(letters), "tokens": letters}).encode()
        return None

    def asked(self, path: str) -> int:
        return sum(seen == path for seen, _ in self.seen)


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[EngineTransport]:
    config = uvicorn.Config(engine, log_config=None, ws="none", lifespan="off", port=0)
    server = uvicorn.Server(config)
    server.config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    engine.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    transport = EngineTransport(ssl.create_default_context(), 2.0, 1.0)
    try:
        yield transport
    finally:
        transport.close()
        server.force_exit = True
        await server.shutdown()


def with_engine(
    test: Callable[[Engine, PromptChains], Awaitable[None]],
) -> Callable[[], None]:
    def run() -> None:
        async def inside() -> None:
            engine = Engine()
            async with serving(engine) as client:
                prompts = PromptChains(client, seconds=PATIENCE_SECONDS)
                try:
                    await test(engine, prompts)
                finally:
                    prompts.close()

        asyncio.run(inside())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def ask(
    prompts: PromptChains, engine: Engine, path: str = COMPLETION, key: bytes = b"", **body: Any
) -> PromptChain | None:
    headers = [(b"authorization", key)] if key else []
    fields = Generation(json.dumps(body).encode()).fields
    found = prompts.at_once(engine.url, path, fields)
    if isinstance(found, AskedPrompt):
        return await prompts.chain(engine.url, found, headers)
    return found


def same(chain: PromptChain | None, text: str, namespace: Namespace = USUAL) -> bool:
    wanted = PromptChain(namespace, [ord(letter) for letter in text])
    return (
        chain is not None
        and chain.tokens == wanted.tokens
        and chain.digests(2) == wanted.digests(2)
    )


@with_engine
async def test_texts_and_chats_are_rendered_by_the_engine(
    engine: Engine, prompts: PromptChains
) -> None:
    assert same(await ask(prompts, engine, prompt="hello", model="base"), "hello")
    assert same(await ask(prompts, engine, CHAT, key=b"k1", messages=HELLO, tools=[]), "hello")
    assert engine.seen[-1] == (f"{CHAT}/render", {"messages": HELLO, "tools": []})
    assert engine.keys[-1] == "k1"
    assert prompts.counts["asked"] == 2 and engine.asked("/v1/models") == 1


@with_engine
async def test_an_engine_that_does_not_render_tokenizes(
    engine: Engine, prompts: PromptChains
) -> None:
    engine.ways = ("tokenize",)
    assert same(await ask(prompts, engine, prompt="hello", max_tokens=4), "hello")
    assert engine.seen[-1] == ("/tokenize", {"prompt": "hello"})
    chat = {"messages": HELLO, "reasoning_effort": "low", "temperature": 1}
    chain = await ask(prompts, engine, CHAT, chat_template_kwargs={"x": 1}, **chat)
    assert same(chain, "hello")
    values = {"reasoning_effort": "low", "enable_thinking": True, "x": 1}
    body = {"messages": HELLO, "chat_template_kwargs": values}
    assert engine.seen[-1] == ("/tokenize", body)
    assert engine.asked(f"{COMPLETION}/render") == 1 and engine.asked(f"{CHAT}/render") == 0
    # /tokenize would not cut it
    assert await ask(prompts, engine, prompt="hello", truncate_prompt_tokens=2) is None
    engine.ways = ()
    prompts.forget(engine.url)
    for text in ("a", "b", "c"):
        assert await ask(prompts, engine, prompt=text) is None
    assert engine.asked("/tokenize") == 3  # once more since then
    # vLLM's word for "not switched on"
    engine.ways = ("tokenize",)
    prompts.forget(engine.url)
    engine.script = [403]
    assert same(await ask(prompts, engine, prompt="d"), "d")


@with_engine
async def test_token_ids_need_no_engine_but_its_models(
    engine: Engine, prompts: PromptChains
) -> None:
    letters = [ord(letter) for letter in "hello"]
    assert same(await ask(prompts, engine, prompt=letters), "hello")
    assert same(await ask(prompts, engine, prompt=letters), "hello")
    assert [path for path, _ in engine.seen] == ["/v1/models"]
    assert (prompts.counts["ids"], prompts.known_tokens) == (2, 0)  # not worth remembering
    assert await ask(prompts, engine, prompt=[1, -5]) is None


@with_engine
async def test_token_ids_that_would_stop_all_streams_are_not_read(
    engine: Engine, prompts: PromptChains
) -> None:
    assert same(await ask(prompts, engine, prompt=[ord("x")] * 1000), "x" * 1000)
    assert await ask(prompts, engine, prompt=[ord("x")] * (2 << 20)) is None
    assert prompts.counts["unsupported"] == 1


@with_engine
async def test_texts_that_would_keep_a_tokenizer_from_others_are_not_tokenized(
    engine: Engine, prompts: PromptChains
) -> None:
    assert same(await ask(prompts, engine, prompt="x" * 1000), "x" * 1000)
    assert await ask(prompts, engine, prompt="x" * (4 << 20)) is None
    long = [{"role": "user", "content": "x" * (2 << 20)}] * 2
    assert await ask(prompts, engine, CHAT, messages=long) is None
    assert prompts.counts["unsupported"] == 2 and len(engine.seen) == 2


@with_engine
async def test_adapters_and_salts_are_namespaces(engine: Engine, prompts: PromptChains) -> None:
    poet = await ask(prompts, engine, prompt="hello", model="poet")
    assert same(poet, "hello", Namespace(lora="poet"))
    salted = await ask(prompts, engine, prompt="hello", model="base", cache_salt="s")
    assert same(salted, "hello", Namespace(salt="s"))
    assert same(await ask(prompts, engine, prompt="hello", model="base"), "hello")
    # an adapter that is loaded later; looking for it has its limits
    assert await ask(prompts, engine, prompt="hello", model="new") is None
    engine.models.append({"id": "new", "parent": "base"})
    assert await ask(prompts, engine, prompt="hello", model="new") is None
    assert engine.asked("/v1/models") == 1
    prompts.forget(engine.url)
    new = await ask(prompts, engine, prompt="hello", model="new")
    assert same(new, "hello", Namespace(lora="new")) and engine.asked("/v1/models") == 2


@with_engine
async def test_a_prompt_is_remembered(engine: Engine, prompts: PromptChains) -> None:
    for stream in (False, True):
        assert same(await ask(prompts, engine, prompt="hello", stream=stream), "hello")
    assert engine.asked(f"{COMPLETION}/render") == 1
    assert (prompts.counts["asked"], prompts.counts["remembered"]) == (1, 1)
    await ask(prompts, engine, prompt="hello", add_special_tokens=False)
    assert engine.asked(f"{COMPLETION}/render") == 2


@with_engine
async def test_an_answer_of_an_engine_that_was_forgotten_is_not_remembered(
    engine: Engine, prompts: PromptChains
) -> None:
    asking = asyncio.create_task(ask(prompts, engine, prompt="hello"))
    while not engine.asked(f"{COMPLETION}/render"):
        await asyncio.sleep(0)
    prompts.forget(engine.url)
    assert same(await asking, "hello") and prompts.known_tokens == 0


@with_engine
async def test_an_engine_that_restarts_may_have_another_tokenizer(
    engine: Engine, prompts: PromptChains
) -> None:
    assert same(await ask(prompts, engine, prompt="hello"), "hello")
    engine.script = [b'[{"token_ids": [120]}]']  # of a new version of the model
    prompts.forget(engine.url)
    assert same(await ask(prompts, engine, prompt="hello"), "x")
    assert prompts.counts["remembered"] == 0 and prompts.known_tokens == 1 + 256


@with_engine
async def test_what_cannot_be_told_is_left(engine: Engine, prompts: PromptChains) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": [image]}]}),
        (CHAT, {"prompt": "x"}),
        (CHAT, {"messages": 5}),
        (COMPLETION, {"prompt": ["a", "b"]}),
        (COMPLETION, {"prompt": [[1], [2]]}),
        (COMPLETION, {"prompt": []}),
        (COMPLETION, {"prompt": "a", "prompt_embeds": "b"}),
        (COMPLETION, {"prompt": [1, 2], "truncate_prompt_tokens": 1}),
        (COMPLETION, {"prompt": "a", "model": 7}),
        (COMPLETION, {}),
        ("/v1/embeddings", {"prompt": "a"}),
    ):
        assert await ask(prompts, engine, path, **body) is None, body
    assert not engine.seen and prompts.counts["unsupported"] == 11
    text = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    engine.script = [b'{"token_ids": [1, 2]}']
    assert await ask(prompts, engine, CHAT, messages=text) is not None


@with_engine
async def test_a_model_that_no_engine_has_takes_nothing_from_others(
    engine: Engine, prompts: PromptChains
) -> None:
    engine.script = [404, 404]  # vLLM's answer where it does not know the model
    assert await ask(prompts, engine, prompt="hello", model="misspelt") is None
    assert prompts.counts["unsupported"] == 1
    engine.script = []
    assert same(await ask(prompts, engine, prompt="hello", model="base"), "hello")
    engine.models.pop()  # an adapter that is taken out
    engine.script = [404, 404]
    assert await ask(prompts, engine, prompt="other", model="poet") is None
    assert same(await ask(prompts, engine, prompt="other", model="base"), "other")


@with_engine
async def test_an_engine_that_fails_is_left_alone_for_a_while(
    engine: Engine, prompts: PromptChains
) -> None:
    broken: list[int | bytes] = [500, b"no JSON", b'{"token_ids": "x"}']
    engine.script = list(broken)
    for text in "abcd":
        assert await ask(prompts, engine, prompt=text) is None
    assert prompts.counts["failed"] == 4 and engine.asked(f"{COMPLETION}/render") == 3
    prompts.forget(engine.url)
    assert same(await ask(prompts, engine, prompt="hello"), "hello")
    # what a client does wrong is no failure of the engine
    engine.script = [400, 401, 413, 422, 400]
    for text in "efghi":
        assert await ask(prompts, engine, prompt=text) is None
    assert same(await ask(prompts, engine, prompt="j"), "j")


@with_engine
async def test_what_a_client_writes_is_no_failure_of_the_router_or_of_an_engine(
    engine: Engine, prompts: PromptChains
) -> None:
    engine.ways = ("tokenize",)
    messages = json.dumps(HELLO).encode()
    for kwargs in (b"5", b"[1]", b'"abc"', b'{"a": 1e999}'):
        body = b'{"messages": %b, "chat_template_kwargs": %b}' % (messages, kwargs)
        found = prompts.at_once(engine.url, CHAT, Generation(body).fields)
        assert isinstance(found, AskedPrompt)
        assert await prompts.chain(engine.url, found, []) is None, kwargs
    assert prompts.counts["unsupported"] == 4 and not prompts.counts["failed"]

    prompts._tokenizer = local = LocalTokenizer.__new__(LocalTokenizer)  # without a model
    local._thread = ThreadPoolExecutor(1)
    for calls in (5, [5], {"a": 1}, [{"function": None}]):
        said = [{"role": "user", "content": "x", "tool_calls": calls}]
        assert await ask(prompts, engine, CHAT, messages=said) is None, calls
    assert prompts.counts["unsupported"] == 8 and not prompts.counts["failed"]


@with_engine
async def test_values_that_are_nested_too_deeply_are_the_clients_fault(
    engine: Engine, prompts: PromptChains
) -> None:
    """The interpreter's limit counts the callers too, so it may be met late."""
    engine.ways = ("tokenize",)
    for depth in range(sys.getrecursionlimit() - 80, sys.getrecursionlimit()):
        nested = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
        body = b'{"messages": [{"content": "x"}], "chat_template_kwargs": %b}' % nested
        try:
            found = prompts.at_once(engine.url, CHAT, Generation(body).fields)
        except ApiError:
            break
        assert isinstance(found, AskedPrompt)
        await prompts.chain(engine.url, found, [])
    assert not prompts.counts["failed"]  # other versions of Python have another limit


@with_engine
async def test_a_template_that_a_client_sends_is_never_run_here(
    engine: Engine, prompts: PromptChains
) -> None:
    templates: list[Any] = []

    class Tokenizer:
        def apply_chat_template(self, messages: Any, **given: Any) -> str:
            templates.append(given.pop("chat_template", "its own"))
            return "x"

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1, 2]

    prompts._tokenizer = local = LocalTokenizer.__new__(LocalTokenizer)  # without a model
    local._thread, local._tokenizer = ThreadPoolExecutor(1), Tokenizer()
    assert await ask(prompts, engine, CHAT, messages=HELLO) is not None
    theirs = {"chat_template": "{{ 'x' * 9999999 }}"}
    for more in (theirs, {"chat_template_kwargs": theirs}):
        assert await ask(prompts, engine, CHAT, messages=HELLO, **more) is None, more
    assert templates == ["its own"] and prompts.counts["unsupported"] == 2


def test_an_engine_that_is_silent_or_gone_costs_little() -> None:
    async def inside() -> None:
        engine = Engine(hang=True)
        loop = asyncio.get_running_loop()
        async with serving(engine) as client:
            prompts = PromptChains(client, seconds=0.2, most_asked=2)
            begun = loop.time()
            chains = await asyncio.gather(*(ask(prompts, engine, prompt=text) for text in "abcd"))
            assert chains == [None] * 4 and loop.time() - begun < PATIENCE_SECONDS / 3
            assert prompts.counts["busy"] == 2
            prompts.close()
        prompts = PromptChains(client, seconds=5)  # the engine is gone
        for text in "abcd":
            assert await ask(prompts, engine, prompt=text) is None
        assert prompts.counts["failed"] == 4
        prompts.close()

    asyncio.run(inside())


def test_what_is_remembered_is_bounded() -> None:
    async def inside() -> None:
        engine = Engine()
        async with serving(engine) as client:
            prompts = PromptChains(client, seconds=PATIENCE_SECONDS, most_tokens=3000)
            for n in range(30):
                assert await ask(prompts, engine, prompt=f"{n:100}") is not None
                assert await ask(prompts, engine, prompt=f"{0:100}") is not None
            assert prompts.known_tokens // 356 == 3000 // 356
            assert prompts.counts["remembered"] == 30 and prompts.known_tokens <= 3000
            # one that is too large is not remembered, and leaves no trace
            assert await ask(prompts, engine, prompt="x" * 5000) is not None
            assert prompts.known_tokens == 0
            prompts.close()

    asyncio.run(inside())


def test_an_answer_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "_MOST_ANSWER_BYTES", 1000)

    async def inside() -> None:
        engine = Engine()
        async with serving(engine) as client:
            prompts = PromptChains(client, seconds=PATIENCE_SECONDS)
            assert await ask(prompts, engine, prompt="x" * 100) is not None
            assert await ask(prompts, engine, prompt="x" * 500) is None
            assert prompts.counts["failed"] == 1
            prompts.close()

    asyncio.run(inside())


def test_a_tokenizer_that_is_not_there(tmp_path: Any) -> None:
    with pytest.raises(DescriptionError, match=r"needs the package transformers|no tokenizer in"):
        LocalTokenizer(tmp_path / "nothing")
