# SPDX-License-Identifier: Apache-2.0
"""Conversations through the router to a prefill and two decode engines, which are all real.

Every engine publishes KV events. One decode engine is killed in the middle and started again. Every
answer is that of an engine alone. What the engines had cached is compared with an oracle that knows
which prompt every engine has computed since its start, and takes the best for each request.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

import httpx

from router_process import RouterProcess
from tiny_models import llama_config, make_model
from vllm_engines import Engine, events_of, publish_events
from vllm_pairs import ids, prompt, reaches, started

pytestmark = pytest.mark.matrix
BLOCK = 32  # the CPU build takes multiples of it
TOKENS = 6  # of each answer
CONVERSATIONS, TURNS = 8, 5
SYSTEM = prompt(77, 3 * BLOCK)  # all conversations begin with it
HITS = "vllm:prefix_cache_hits_total"
SHARE = 0.95  # of the oracle's hits, at least


@dataclass
class Told:
    """What the oracle knows of one engine: every prompt that it has computed or received."""

    engine: Engine
    prompts: list[list[int]] = field(default_factory=list)
    hits: float = 0.0  # by its own counter, so far

    def held(self, tokens: list[int]) -> int:
        """Leading tokens that it holds, in whole blocks; the last token is never taken from it."""
        most = (len(tokens) - 1) // BLOCK
        best = 0
        for known in self.prompts:
            count = 0
            while count < min(most, len(known) // BLOCK) and (
                known[count * BLOCK : (count + 1) * BLOCK]
                == tokens[count * BLOCK : (count + 1) * BLOCK]
            ):
                count += 1
            best = max(best, count)
        return best * BLOCK

    def new_hits(self) -> float:
        now = self.engine.metric(HITS)
        before, self.hits = self.hits, now
        return now - before


def engine(folder: Path, name: str) -> Engine:
    made = Engine(name, folder / "tiny", folder / f"{name}.log", block_size=BLOCK, connector={})
    made.transfer = {"kv_load_failure_policy": "recompute"}
    return publish_events(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    make_model(folder / "tiny", llama_config(num_hidden_layers=2))
    return folder


def dialogues() -> list[list[list[int]]]:
    """For each conversation its prompts, each of which continues the one before."""
    made = []
    for number in range(CONVERSATIONS):
        said, prompts = list(SYSTEM), []
        for turn in range(TURNS):
            said = said + prompt(100 * number + turn, 50 + 19 * ((number + turn) % 5))
            prompts.append(said)
        made.append(prompts)
    return made


def order() -> Iterator[int]:
    """Which conversation is next, until all are over."""
    dice, left = random.Random(5), Counter(dict.fromkeys(range(CONVERSATIONS), TURNS))
    while left:
        number = dice.choice(sorted(left))
        left[number] -= 1
        left += Counter()
        yield number


def test_hits_are_those_of_an_oracle_and_answers_those_of_an_engine_alone(folder: Path) -> None:
    alone = Engine("alone", folder / "tiny", folder / "alone.log", block_size=BLOCK)
    all_prompts = [tuple(p) for dialogue in dialogues() for p in dialogue]
    with alone.start().wait_ready():
        right = {p: ids(alone.complete(list(p), max_tokens=TOKENS))[0] for p in all_prompts}
    assert len(set(map(tuple, right.values()))) > len(right) // 2  # or a mix-up would not show
    p, d1, d2 = started(*(engine(folder, name) for name in ("p", "d1", "d2")))
    more = [f"--decode={d2.url}", "--limit=tokenize_seconds=10", "--limit=metrics_seconds=0.5"]
    more += [f"--engine-events={events_of(each)}" for each in (p, d1, d2)]
    with p, d1, d2:
        router = RouterProcess([p, d1], {}, None, more=more)
        try:
            converse(router, {e.url: Told(e) for e in (p, d1, d2)}, d1, right)
        finally:
            router.stop()
            (folder / "router.log").write_text("".join(router.log))


def converse(
    router: RouterProcess,
    told: dict[str, Told],
    victim: Engine,
    right: dict[tuple[int, ...], list[int]],
) -> None:
    turns = [iter(dialogue) for dialogue in dialogues()]
    numbers = list(order())
    got = possible = in_vain = 0
    for each in told.values():
        each.new_hits()
    with httpx.Client(base_url=f"http://127.0.0.1:{router.port}", timeout=120) as client:
        for count, number in enumerate(numbers):
            if count == len(numbers) // 2:
                victim.kill()
                told[victim.url].prompts.clear()
                told[victim.url].hits = 0.0
                victim.start().wait_ready()
                assert reaches(lambda: up(client), len(told))
                time.sleep(1.0)  # its first events
            tokens = next(turns[number])
            answer = ask(router, client, tokens, streamed=count % 2 == 0)
            assert answer.ids == right[tuple(tokens)], number
            best = max(each.held(tokens) for each in told.values())
            hits = {url: each.new_hits() for url, each in told.items()}
            used = hits[answer.prefill or answer.decode]
            possible += best
            got += used
            in_vain += answer.expected > used == 0
            for url in filter(None, (answer.prefill, answer.decode)):
                told[url].prompts.append(tokens)
    print(f"{got:.0f} of {possible} tokens that some engine held; in vain: {in_vain}")
    assert possible > 0.5 * sum(len(p) for p in right)
    assert got >= SHARE * possible
    assert in_vain <= 1


@dataclass(frozen=True)
class Answered:
    ids: list[int]
    decode: str
    prefill: str | None
    expected: int  # cached tokens


def ask(router: RouterProcess, client: httpx.Client, tokens: list[int], streamed: bool) -> Answered:
    body = {"model": "tiny", "prompt": tokens, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": streamed}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if streamed:
        lines = [x[6:] for x in answer.text.splitlines() if x.startswith("data: {")]
        found = [i for x in lines for c in json.loads(x)["choices"] for i in c["token_ids"]]
    else:
        (found,) = ids(answer.json())
    cached = re.search(r"cached=(\d+)", answer.headers["x-kvferry-decision"])
    assert cached is not None
    number = answer.headers["x-request-id"]
    assert reaches(lambda: any(number in line for line in list(router.log)), True)
    (line,) = [line for line in list(router.log) if number in line]
    decode = re.search(r"decode (http\S+) 200", line)
    prefill = re.search(r"prefill (http\S+) 200", line)
    assert decode is not None, line
    return Answered(found, decode[1], prefill and prefill[1], int(cached[1]))


def up(client: httpx.Client) -> int:
    return sum(engine["healthy"] for engine in client.get("/health").json()["engines"])
