# SPDX-License-Identifier: Apache-2.0
"""The tokens of a request, as its engine will see them.

    token ids      are taken as they are
    text, chats    the router asks an engine: `/render` prepares the request as the engine will.
                   vLLM has it with `--enable-scale-out`; otherwise `/tokenize`. Or the router runs
                   the model's own tokenizer, if it was given one

An adapter's name in `model` (engines say at `/v1/models` which names are adapters) and a
`cache_salt` are part of the prompt's namespace.

The tokens of a prompt are remembered. Requests wait for them no longer than `seconds`. An engine
that fails several times in a row is not asked for a while. In all these cases, and for images,
embeddings, several prompts in one request, more than 4 MiB of text and more than 8 MiB of token
ids, there is no chain: the request is placed without a view of its prefix, and never refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from kvferry.errors import DescriptionError
from kvferry.router.api import Headers
from kvferry.router.cache.index import Namespace, PromptChain
from kvferry.router.fleet.connections import (
    BrokenAnswer,
    EngineTransport,
    NoConnection,
    address_of_url,
)

log = logging.getLogger(__name__)

COUNTED = (
    "ids",  # the request has token ids
    "remembered",
    "asked",
    "local",  # tokenized here
    "unsupported",  # such as images
    "failed",  # no answer, or none in time
    "busy",  # too many prompts are being asked for
)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_FAILURES = 3  # in a row, after which an engine is not asked for _PAUSE_SECONDS
_PAUSE_SECONDS = 5.0
_REFRESH_SECONDS = 5.0  # between two requests for an engine's models, while a name is missing
_RECHECK_SECONDS = 60.0  # until a route that an engine did not have is tried again
_MOST_ANSWER_BYTES = 64 << 20
# Of a prompt of token ids: 1.2 million tokens of a large vocabulary. A million take 30 ms of the
# router's only thread and 60 MB, so a body of 64 MiB would stop all streams for more than a second.
_MOST_IDS_BYTES = 8 << 20
# Of all other prompts: about a million tokens, for which a tokenizer takes seconds. A longer one
# would keep the router's own tokenizer from other prompts, whose requests would wait in vain.
_MOST_TEXT_BYTES = 4 << 20
_NOT_THERE = (404, 405, 501)
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
# The fields of a request that its tokens depend on.
_FIELDS = (
    *("model", "prompt", "messages", "tools", "tool_choice", "documents", "reasoning_effort"),
    *("include_reasoning", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "truncate_prompt_tokens"),
    *("truncation_side", "suffix"),
)
# The fields that `/tokenize` takes for a chat. It gets the others in `chat_template_kwargs`.
_TOKENIZE_CHAT = (
    *("model", "messages", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens"),
)
_TEMPLATE_FIELDS = ("documents", "reasoning_effort")


class PromptChains:
    """Chains of prompts, for all requests of one router."""

    def __init__(
        self,
        transport: EngineTransport,
        *,
        tokenizer: LocalTokenizer | None = None,
        seconds: float = 1.0,
        most_tokens: int = 8_000_000,
        most_asked: int = 64,
    ) -> None:
        """`most_tokens` are remembered, of all prompts, at about 8 bytes each; `most_asked` prompts
        are asked for at one time."""
        self.counts = Counter(dict.fromkeys(COUNTED, 0))
        self._transport = transport
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._most_tokens = most_tokens
        self._most_asked = most_asked
        self._engines: dict[str, _TokenSource] = {}
        self._known: OrderedDict[bytes, PromptChain] = OrderedDict()  # last used last
        self.known_tokens = 0
        self._asking = 0  # prompts

    def at_once(
        self, engine: str, path: str, fields: Mapping[str, msgspec.Raw]
    ) -> PromptChain | AskedPrompt | None:
        """The chain of a request's prompt, or what `chain` needs to find it; None: there is none.
        `engine`, by its URL, serves the request's model; `fields` are the request's."""
        try:
            asked = AskedPrompt(path, fields)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._without("unsupported")
        if not asked.supported:
            return self._without("unsupported")
        ids = asked.token_ids
        if ids is not None and (namespace := self._engine(engine).namespace(asked)) is not None:
            # Not remembered: to find them again would take as long as to make the chain again.
            try:
                chain = PromptChain(namespace, ids)
            except ValueError:
                return self._without("unsupported")
            self.counts["ids"] += 1
            return chain
        size = sum(memoryview(raw).nbytes for raw in asked.fields.values())
        if ids is None and size > _MOST_TEXT_BYTES:
            return self._without("unsupported")
        asked.key = asked.digest()
        known = self._known.get(asked.key)
        if known is None:
            return asked
        self._known.move_to_end(asked.key)
        self.counts["remembered"] += 1
        return known

    async def chain(self, engine: str, asked: AskedPrompt, headers: Headers) -> PromptChain | None:
        """The chain of a prompt; None if there is none in time. The engine may want the
        Authorization of the request's headers."""
        until = asyncio.get_running_loop().time() + self._seconds
        if self._asking >= self._most_asked:
            return self._without("busy")
        if time.monotonic() < self._engine(engine).paused_until:
            return self._without("failed")
        authorization = [(k, v) for k, v in headers if k == b"authorization"]
        self._asking += 1
        try:
            return await self._find(engine, asked, authorization, until)
        finally:
            self._asking -= 1

    def forget(self, engine: str) -> None:
        """An engine restarted or is gone. It may serve other models now, and an equal name may
        stand for another tokenizer, so nothing is remembered."""
        self._engines.pop(engine, None)
        self._known.clear()
        self.known_tokens = 0

    def close(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _without(self, why: str) -> PromptChain | None:
        self.counts[why] += 1
        return None

    def _engine(self, url: str) -> _TokenSource:
        return self._engines.setdefault(url, _TokenSource(url))

    async def _find(
        self, url: str, asked: AskedPrompt, headers: Headers, until: float
    ) -> PromptChain | None:
        engine = self._engine(url)
        how = "ids" if asked.token_ids is not None else "local" if self._tokenizer else "asked"
        try:
            namespace = engine.namespace(asked)
            if namespace is None:
                await self._look_at_models(engine, headers, until)
                namespace = engine.namespace(asked)
            if namespace is None:  # its 404 would be taken for an engine that has no such route
                return self._without("unsupported")
            if asked.token_ids is not None:
                token_ids: list[int] | None = asked.token_ids
            elif self._tokenizer is not None:
                async with asyncio.timeout_at(until):
                    token_ids = await self._tokenizer.tokens(asked)
            else:
                token_ids = await self._ask(engine, asked, headers, until)
            if token_ids is None:
                return self._without("unsupported")
            chain = PromptChain(namespace, token_ids)
        except (NoConnection, BrokenAnswer, TimeoutError, msgspec.DecodeError, _Broken) as error:
            engine.failed(f"{type(error).__name__}: {error}".removesuffix(": "))
            return self._without("failed")
        except ValueError:  # the request's fault: the engine will say so
            return self._without("unsupported")
        engine.failures = 0
        self.counts[how] += 1
        kept = self._engines.get(url) is engine  # was not forgotten meanwhile
        if asked.token_ids is None and kept and asked.key not in self._known:
            self._remember(asked.key, chain)
        return chain

    def _remember(self, key: bytes, chain: PromptChain) -> None:
        self._known[key] = chain
        self.known_tokens += chain.tokens + _CHAIN_TOKENS
        while self.known_tokens > self._most_tokens:
            _, oldest = self._known.popitem(last=False)
            self.known_tokens -= oldest.tokens + _CHAIN_TOKENS

    async def _look_at_models(self, engine: _TokenSource, headers: Headers, until: float) -> None:
        now = time.monotonic()
        if now - engine.looked_at > _REFRESH_SECONDS:
            answer = await self._call(b"GET", f"{engine.url}/v1/models", b"", headers, until)
            engine.looked_at = now
            cards = msgspec.json.decode(answer, type=_Models).data if answer else []
            engine.parents = {card.id: card.parent or "" for card in cards}
            if cards:
                engine.parents[""] = ""  # a request without a model

    async def _ask(
        self, engine: _TokenSource, asked: AskedPrompt, headers: Headers, until: float
    ) -> list[int] | None:
        now = time.monotonic()
        if now >= engine.render_at:
            url = f"{engine.url}{asked.path}/render"
            body, absent = msgspec.json.encode(asked.fields), (*_NOT_THERE, 403)
            answer = await self._call(b"POST", url, body, headers, until, absent)
            if answer:
                if asked.path == CHAT:
                    return msgspec.json.decode(answer, type=_Rendered).token_ids
                (only,) = msgspec.json.decode(answer, type=list[_Rendered])
                return only.token_ids
            engine.render_at = now + _RECHECK_SECONDS
        if now < engine.tokenize_at or asked.truncated:  # /tokenize leaves the whole prompt
            return None
        url = f"{engine.url}/tokenize"
        try:
            body = asked.to_tokenize()
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None  # the request's fault
        answer = await self._call(b"POST", url, body, headers, until)
        if answer:
            return msgspec.json.decode(answer, type=_Tokenized).tokens
        engine.looked_at = float("-inf")
        await self._look_at_models(engine, headers, until)
        if engine.namespace(asked) is None:  # an adapter that was taken out is a 404 too
            engine.render_at = 0.0
            return None
        engine.tokenize_at = now + _RECHECK_SECONDS
        log.warning("%s has neither /render nor /tokenize: no view of prompts", engine.url)
        return None

    async def _call(
        self,
        method: bytes,
        url: str,
        body: bytes,
        headers: Headers,
        until: float,
        absent: tuple[int, ...] = _NOT_THERE,
    ) -> bytes:
        """An answer of 2xx; an empty one if the status says that there is no such thing.

        Raises ValueError if the engine refuses the request, and _Broken if it fails.
        """
        kind = [(b"content-type", b"application/json")] if body else []
        at = address_of_url(url)
        status, answer = await self._transport.fetch(
            method, at, _MOST_ANSWER_BYTES, until, [*headers, *kind], body
        )
        if status in absent:
            return b""
        if not 200 <= status < 300:
            why = f"{url} answered {status}"
            raise ValueError(why) if 400 <= status < 500 else _Broken(why)
        if len(answer) > _MOST_ANSWER_BYTES:
            raise _Broken(f"{url} answered more than {_MOST_ANSWER_BYTES} bytes")
        return answer


class LocalTokenizer:
    """A model's own tokenizer and chat template, from its folder.

    It tokenizes texts, and chats whose messages are texts, as vLLM does. It never runs a template
    that a client sends.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises DescriptionError if there is no tokenizer, or no library to read it."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise DescriptionError(
                "a tokenizer of the router's own needs the package transformers; install it, or "
                "leave the tokenizer out: engines will be asked"
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DescriptionError(f"no tokenizer in {str(folder)!r}: {error}") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def tokens(self, asked: AskedPrompt) -> list[int] | None:
        """None: only an engine can tokenize this prompt. Raises ValueError."""
        work = self._chat if asked.path == CHAT else self._text
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, asked)
        except Exception as error:  # templates, and what clients write, raise what they like
            raise ValueError(f"the tokenizer: {error}") from error

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _text(self, asked: AskedPrompt) -> list[int] | None:
        if asked.truncated or "suffix" in asked.fields:
            return None
        special = asked.value("add_special_tokens")
        return list(
            self._tokenizer.encode(asked.value("prompt"), add_special_tokens=special is not False)
        )

    def _chat(self, asked: AskedPrompt) -> list[int] | None:
        messages = asked.value("messages")
        plain = all(isinstance(message.get("content"), str | None) for message in messages)
        values = asked.template_values()
        # A client may also send a template among the values for it; vLLM refuses that.
        if asked.truncated or not plain or "chat_template" in asked.fields.keys() | values.keys():
            return None
        for message in messages:
            for call in message.get("tool_calls") or ():
                arguments = call.get("function", {}).get("arguments")
                if isinstance(arguments, str):  # templates expect an object, as vLLM gives them
                    call["function"]["arguments"] = json.loads(arguments or "{}")
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=asked.value("tools"),
            tokenize=False,
            add_generation_prompt=asked.value("add_generation_prompt") is not False,
            continue_final_message=bool(asked.value("continue_final_message")),
            **values,
        )
        special = asked.value("add_special_tokens")
        return list(self._tokenizer.encode(text, add_special_tokens=bool(special)))


@dataclass(slots=True)
class _TokenSource:
    """One engine that is asked for tokens."""

    url: str
    parents: dict[str, str] = field(default_factory=dict)  # by model; "" for a base model
    looked_at: float = float("-inf")
    render_at: float = 0.0  # from when on it may be asked
    tokenize_at: float = 0.0
    failures: int = 0  # in a row
    paused_until: float = 0.0

    def namespace(self, asked: AskedPrompt) -> Namespace | None:
        """None: it is not known that the engine serves this model."""
        parent = self.parents.get(asked.model)
        return None if parent is None else Namespace(asked.model if parent else "", asked.salt)

    def failed(self, why: str) -> None:
        self.failures += 1
        if self.failures >= _FAILURES:
            self.failures = 0
            self.paused_until = time.monotonic() + _PAUSE_SECONDS
            log.warning("no tokens from %s (%s); it is not asked for a while", self.url, why)


class _Broken(Exception):
    """An engine's answer cannot be used."""


class AskedPrompt:
    """The prompt of a request, before it is tokenized."""

    __slots__ = ("fields", "key", "model", "path", "salt", "supported", "token_ids", "truncated")

    def __init__(self, path: str, every: Mapping[str, msgspec.Raw]) -> None:
        """`every`: all fields of the request. Raises msgspec.DecodeError."""
        self.path = path
        self.key = b""
        self.fields = {
            name: value for name in _FIELDS if (value := every.get(name)) and bytes(value) != _NULL
        }
        self.model = self.value("model") or ""
        salt = every.get("cache_salt")
        self.salt = "" if not salt or bytes(salt) == _NULL else msgspec.json.decode(salt, type=str)
        self.truncated = "truncate_prompt_tokens" in self.fields
        self.token_ids: list[int] | None = None
        embedded = every.get("prompt_embeds")
        self.supported = isinstance(self.model, str) and (
            embedded is None or bytes(embedded) == _NULL
        )
        if path == CHAT:
            self.supported &= "messages" in self.fields and self._is_text()
        elif path == COMPLETION:
            self.supported &= self._one_prompt()
        else:
            self.supported = False

    def digest(self) -> bytes:
        """Equal for requests whose prompts have equal tokens and caches."""
        hashed = blake2b(repr((self.path, self.salt)).encode("utf-8", "surrogatepass"))
        for name, raw in self.fields.items():
            hashed.update(b"%b %d " % (name.encode(), memoryview(raw).nbytes))
            hashed.update(raw)
        return hashed.digest()

    def value(self, name: str) -> Any:
        raw = self.fields.get(name)
        return None if raw is None else msgspec.json.decode(raw)

    def template_values(self) -> dict[str, Any]:
        """The values that vLLM gives a chat template besides messages and tools."""
        values = {name: self.value(name) for name in _TEMPLATE_FIELDS if name in self.fields}
        if "reasoning_effort" in values:
            values["enable_thinking"] = values["reasoning_effort"] != "none"
        return values | dict(self.value("chat_template_kwargs") or {})

    def to_tokenize(self) -> bytes:
        if self.path == COMPLETION:
            names = ("model", "prompt", "add_special_tokens")
            return msgspec.json.encode({n: self.fields[n] for n in names if n in self.fields})
        body: dict[str, Any] = {n: self.fields[n] for n in _TOKENIZE_CHAT if n in self.fields}
        body["chat_template_kwargs"] = self.template_values()
        return msgspec.json.encode(body)

    def _one_prompt(self) -> bool:
        """Whether there is one prompt, of text or of token ids, and not several."""
        raw = bytes(self.fields.get("prompt", b"")).strip()
        if not raw.startswith(b"["):
            return raw.startswith(b'"')
        if len(raw) > _MOST_IDS_BYTES:
            return False
        try:
            self.token_ids = msgspec.json.decode(raw, type=list[int])
        except msgspec.ValidationError:
            return False
        return bool(self.token_ids) and not self.truncated

    def _is_text(self) -> bool:
        for message in msgspec.json.decode(self.fields["messages"], type=list[_Message]):
            content = bytes(message.content).strip()
            if content.startswith(b"["):
                parts = msgspec.json.decode(content, type=list[_Part])
                if any(part.type not in _TEXT_PARTS for part in parts):
                    return False
        return True


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Part(msgspec.Struct):
    type: str = ""


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_NULL = b"null"
_CHAIN_TOKENS = 256  # what a chain without tokens takes
