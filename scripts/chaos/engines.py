"""Random faults while prompts flow between two real vLLM engines; every answer has its tokens.

A prefill and a decode engine of different block sizes, with few blocks, so that caches are evicted
and blocks reused all the time. What each prompt is answered with is asked of the prefill engine
alone, before the first fault. Loads that fail are computed again (`recompute`), so whatever the
fault:

    every answer of an engine that lives has the right tokens
    an engine that was not killed answers for ever after
    after each fault, a new prompt is handed over, by one more load
    at the end, no block of either engine is in use, and no engine has more threads or file
    descriptors than before

Engines start once, and again only when they were killed.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.outcome import Broken, Outcomes
from tiny_models import make_model
from vllm_engines import Engine

TOKENS = 6  # of an answer
PROMPTS = 16  # different ones, again and again
PER_FAULT = 3  # prompts in flight
LEASE_SECONDS, LOAD_SECONDS = 8.0, 30.0
ANSWER_SECONDS = 180.0
USAGE, LOADS, FAILURES = (
    "vllm:kv_cache_usage_perc",
    "vllm:kvferry_loads_total",
    "vllm:kvferry_load_failures_total",
)
SPARE_DESCRIPTORS, SPARE_THREADS = 10, 8  # what pools may have more by chance
UNREACHED = (OSError, http.client.HTTPException, json.JSONDecodeError)


def prompt(number: int) -> list[int]:
    """The first 500 of these differ from their first token on."""
    length = 150 + 61 * number % 900
    return [(number * 7919 + i * (37 + number)) % 500 + 3 for i in range(length)]


def tokens_of(answer: dict[str, Any]) -> list[int] | None:
    if "choices" not in answer:
        return None
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@dataclass
class Pair:
    folder: Path
    model: Path
    seed: int
    expected: list[list[int]] = field(default_factory=list)
    lives: Counter[str] = field(default_factory=Counter)
    engines: dict[str, Engine] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    usual: dict[str, tuple[int, int]] = field(default_factory=dict)  # threads, descriptors
    old: list[dict[str, Any]] = field(default_factory=list)  # tickets that were given out

    def start(self, *names: str) -> None:
        for name in names:
            self.lives[name] += 1
            engine = Engine(
                name,
                self.model,
                self.folder / f"{name}-{self.lives[name]}.log",
                block_size=128 if name == "p" else 32,
                connector={
                    "lease_seconds": LEASE_SECONDS,
                    "load_seconds": LOAD_SECONDS,
                    "carriers": ["tcp"],
                    # whoever decodes decides; it changes its mind when it was killed
                    "mode": ("pull", "push")[(self.seed + self.lives["d"] - 1) % 2],
                },
                on_failure="recompute",
                arguments=["--num-gpu-blocks-override", "40" if name == "p" else "160"],
                environment={"VLLM_SERVER_DEV_MODE": "1"},  # so that caches can be reset
            )
            engine.port = self.ports.setdefault(name, engine.port)
            self.engines[name] = engine.start()
        for name in names:
            self.engines[name].wait_ready()

    def answers_alone(self) -> None:
        p = self.engines["p"]
        for number in range(PROMPTS):
            answer = tokens_of(p.complete(prompt(number), max_tokens=TOKENS))
            assert answer is not None
            self.expected.append(answer)
        if len({tuple(one) for one in self.expected}) < PROMPTS * 3 // 4:
            raise Broken("prompts have the same answers: equality would show nothing")

    def prefill(self, number: int) -> dict[str, Any] | None:
        """A ticket, or None where the prefill engine gave none."""
        try:
            answer = self.engines["p"].complete(
                prompt(number),
                seconds=ANSWER_SECONDS,
                max_tokens=1,
                kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
            )
        except UNREACHED:
            return None
        ticket: dict[str, Any] | None = answer.get("kv_transfer_params")
        if ticket:
            self.old.append(ticket)
        return ticket

    def decode(self, number: int, ticket: dict[str, Any] | None) -> str:
        """Whether the answer is right; an engine that was killed has none."""
        more = {"kv_transfer_params": ticket} if ticket else {}
        try:
            answer = self.engines["d"].complete(
                prompt(number), seconds=ANSWER_SECONDS, max_tokens=TOKENS, **more
            )
        except UNREACHED:
            return "no answer"
        found = tokens_of(answer)
        if found is None:
            return "no answer"
        expected = self.expected[number]
        if found != expected:
            raise Broken(f"prompt {number}: {found}, but an engine alone says {expected}")
        return "right" if ticket else "right, alone"

    def hand_over(self, number: int) -> str:
        return self.decode(number, self.prefill(number))

    def loads(self) -> tuple[float, float]:
        d = self.engines["d"]
        return d.metric(LOADS), d.metric(FAILURES)

    def require_new_prompts_to_flow(self, number: int) -> None:
        """One that neither has seen: the prefill engine's own answer, by one more load."""
        before = self.loads()[0]
        ticket = self.prefill(number)
        answer = self.engines["d"].complete(
            prompt(number), seconds=ANSWER_SECONDS, max_tokens=TOKENS, kv_transfer_params=ticket
        )
        alone = self.engines["p"].complete(prompt(number), max_tokens=TOKENS)
        if tokens_of(answer) is None or tokens_of(answer) != tokens_of(alone):
            raise Broken(f"a new prompt: {answer}, alone {alone}")
        until = time.monotonic() + ANSWER_SECONDS
        while self.loads()[0] <= before:  # what is counted comes with a later step
            if time.monotonic() > until:
                raise Broken("a new prompt was answered, but not handed over")
            self.engines["d"].complete([5, 6, 7], max_tokens=2)

    def require_idle(self) -> None:
        """All blocks come back when the last lease has run out; small requests keep engines on."""
        until = time.monotonic() + LEASE_SECONDS + LOAD_SECONDS + ANSWER_SECONDS
        for name, engine in self.engines.items():
            while engine.metric(USAGE):
                if time.monotonic() > until:
                    raise Broken(f"engine {name} keeps {engine.metric(USAGE):.1%} of its blocks")
                engine.complete([5, 6, 7], seconds=ANSWER_SECONDS, max_tokens=1)
                time.sleep(0.5)

    def require_no_more_than_usual(self) -> None:
        for name, engine in self.engines.items():
            threads, descriptors = belongings(engine.pid)
            usual = self.usual[name]
            if threads > usual[0] + SPARE_THREADS or descriptors > usual[1] + SPARE_DESCRIPTORS:
                raise Broken(
                    f"engine {name} has {threads} threads and {descriptors} descriptors; before "
                    f"the first fault it had {usual[0]} and {usual[1]}"
                )

    def close(self) -> None:
        for engine in self.engines.values():
            engine.kill()


def belongings(group: int) -> tuple[int, int]:
    """Threads and file descriptors of an engine's processes."""
    threads = descriptors = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rsplit(")", 1)[1].split()[2]) == group:
                threads += len(list((process / "task").iterdir()))
                descriptors += len(list((process / "fd").iterdir()))
        except OSError:
            continue
    return threads, descriptors


def play(outcomes: Outcomes, rounds: range, seed: int, after: Callable[[str], None]) -> None:
    """Play these rounds, and call `after` each of them with its fault."""
    from chaos.engine_faults import FAULTS

    folder = Path(tempfile.mkdtemp(prefix="kvferry-chaos-"))
    pair = Pair(folder, make_model(folder / "tiny"), seed)
    names = [name for name, (weight, _) in FAULTS.items() for _ in range(weight)]
    random.Random(f"{seed}-engines").shuffle(names)  # so that each has its turn
    print(f"engines: logs in {folder}", flush=True)
    try:
        pair.start("p", "d")
        pair.answers_alone()
        with ThreadPoolExecutor(PER_FAULT) as threads:
            list(threads.map(pair.hand_over, range(PER_FAULT)))
        pair.usual = {name: belongings(engine.pid) for name, engine in pair.engines.items()}
        for number in rounds:
            rng = random.Random(f"{seed}-engines-{number}")
            fault = names[number % len(names)]
            _round(pair, outcomes, fault, FAULTS[fault][1], number, rng)
            outcomes.played += 1
            after(fault)
        pair.require_idle()
        pair.require_no_more_than_usual()
    finally:
        pair.close()


def _round(
    pair: Pair,
    outcomes: Outcomes,
    fault: str,
    act: Callable[[Pair, int, random.Random], None],
    number: int,
    rng: random.Random,
) -> None:
    before, life = pair.loads(), pair.lives["d"]
    with ThreadPoolExecutor(PER_FAULT) as threads:
        chosen = [rng.randrange(PROMPTS) for _ in range(PER_FAULT)]
        answers = [threads.submit(pair.hand_over, one) for one in chosen]
        time.sleep(rng.uniform(0.0, 0.3))
        act(pair, rng.randrange(PROMPTS), rng)
        found = [answer.result() for answer in answers]
    outcomes.count(fault, "rounds", *found)
    if "killed" not in fault and "no answer" in found:
        raise Broken(f"{fault}: a request had no answer, and no engine was killed")
    pair.require_new_prompts_to_flow(PROMPTS + number % 400)
    now = pair.loads()
    start = before if pair.lives["d"] == life else (0.0, 0.0)
    outcomes.table[fault]["loads"] += round(now[0] - start[0])
    outcomes.table[fault]["loads failed"] += round(now[1] - start[1])
