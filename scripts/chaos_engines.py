"""Random faults while prompts flow between two real vLLM engines; every answer has its tokens.

A prefill and a decode engine of different block sizes, and what an engine without a connector
answers to each prompt, asked before. Loads that fail are computed again (`recompute`), so whatever
the fault:

    every answer of an engine that lives has the right tokens
    an engine that was not killed answers for ever after
    at the end, no block of either engine is in use
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.demo.engines import Engine
from kvferry.demo.tiny_model import make_model
from kvferry.errors import TransferError

TOKENS = 6  # of an answer
PROMPTS = 24  # different ones, again and again
PER_FAULT = 3  # prompts in flight
LEASE_SECONDS, LOAD_SECONDS = 20.0, 60.0
ANSWER_SECONDS = 180.0
USAGE = "vllm:kv_cache_usage_perc"


class BrokenEngines(Exception):
    """Something that must never be."""


def prompt(number: int) -> list[int]:
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
    expected: list[list[int]] = field(default_factory=list)
    lives: Counter[str] = field(default_factory=Counter)
    engines: dict[str, Engine] = field(default_factory=dict)
    table: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        for name in names:
            self.lives[name] += 1
            # few blocks, so that caches are evicted and blocks reused all the time
            blocks = ["--num-gpu-blocks-override", "40" if name == "p" else "160"]
            settings = {
                "lease_seconds": LEASE_SECONDS,
                "load_seconds": LOAD_SECONDS,
                "carriers": ["tcp"],
                **MODES.get(name, {}),
            }
            engine = Engine(
                name,
                self.model,
                self.folder / f"{name}-{self.lives[name]}.log",
                block_size=128 if name == "p" else 32,
                connector=settings,
                on_failure="recompute",
                arguments=blocks,
            )
            if name in self.ports:
                engine.port = self.ports[name]
            self.ports[name] = engine.port
            self.engines[name] = engine.start()
        for name in names:
            self.engines[name].wait_ready()

    def prefill(self, number: int) -> dict[str, Any] | None:
        """A ticket, or None where the prefill engine gave none."""
        try:
            answer = self.engines["p"].complete(
                prompt(number),
                seconds=ANSWER_SECONDS,
                max_tokens=1,
                kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
            )
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            return None
        ticket: dict[str, Any] | None = answer.get("kv_transfer_params")
        return ticket

    def decode(self, number: int, ticket: dict[str, Any] | None) -> str:
        """Whether the answer is right; an engine that was killed has none."""
        more = {"kv_transfer_params": ticket} if ticket else {}
        try:
            answer = self.engines["d"].complete(
                prompt(number), seconds=ANSWER_SECONDS, max_tokens=TOKENS, **more
            )
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            return "no answer"
        found = tokens_of(answer)
        if found is None:
            return "no answer"
        if found != self.expected[number]:
            raise BrokenEngines(
                f"prompt {number}: {found}, but an engine alone says {self.expected[number]}"
            )
        return "right" if ticket else "right, alone"

    def close(self) -> None:
        for engine in self.engines.values():
            engine.kill()


MODES: dict[str, dict[str, Any]] = {}  # what an engine is told besides


def usual(pair: Pair, number: int) -> str:
    return pair.decode(number, pair.prefill(number))


def abort(pair: Pair, number: int, rng: random.Random) -> None:
    """A client that goes away at some moment of its answer."""
    ticket = pair.prefill(number)
    connection = http.client.HTTPConnection("127.0.0.1", pair.engines["d"].port, timeout=30)
    body = {
        "model": "tiny",
        "prompt": prompt(number),
        "temperature": 0,
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
        "kv_transfer_params": ticket,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    time.sleep(rng.choice((0.0, 0.02, 0.1, 0.5)))
    connection.close()


def stop(pair: Pair, name: str, seconds: float) -> None:
    group = pair.engines[name].pid
    os.killpg(group, signal.SIGSTOP)
    time.sleep(seconds)
    os.killpg(group, signal.SIGCONT)


def kill(pair: Pair, name: str) -> None:
    pair.engines[name].kill()
    pair.start(name)


def wrong_ticket(pair: Pair, number: int) -> None:
    """One prompt with another's ticket: computed here, never the other's answer."""
    other = (number + 1) % PROMPTS
    pair.decode(number, pair.prefill(other))


def used_ticket(pair: Pair, number: int) -> None:
    ticket = pair.prefill(number)
    for _ in range(2):
        pair.decode(number, ticket)


FAULTS: dict[str, tuple[int, Callable[[Pair, int, random.Random], None]]] = {
    # weight: engines take half a minute to come back
    "prefill engine killed": (1, lambda p, n, r: kill(p, "p")),
    "decode engine killed": (1, lambda p, n, r: kill(p, "d")),
    "prefill engine stopped": (3, lambda p, n, r: stop(p, "p", r.uniform(0.2, 3.0))),
    "decode engine stopped": (3, lambda p, n, r: stop(p, "d", r.uniform(0.2, 3.0))),
    "decode engine stopped past lease": (1, lambda p, n, r: stop(p, "d", LEASE_SECONDS + 3)),
    "client went away": (5, abort),
    "another prompt's ticket": (4, lambda p, n, r: wrong_ticket(p, n)),
    "ticket used twice": (4, lambda p, n, r: used_ticket(p, n)),
}


def require_idle(pair: Pair) -> None:
    """All blocks come back, when the last lease has run out; small requests keep engines going."""
    until = time.monotonic() + LEASE_SECONDS + LOAD_SECONDS
    for name, engine in pair.engines.items():
        while True:
            engine.complete([5, 6, 7], seconds=ANSWER_SECONDS, max_tokens=1)
            time.sleep(0.5)
            if engine.metric(USAGE) == 0:
                break
            if time.monotonic() > until:
                raise BrokenEngines(f"engine {name} keeps {engine.metric(USAGE):.1%} of its blocks")


def run_engines(faults: int, seed: int, first: int = 0) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvferry-chaos-"))
    pair = Pair(folder, make_model(folder / "tiny"))
    begun = time.monotonic()
    print(f"engines: logs in {folder}", file=sys.stderr, flush=True)
    with Engine("alone", pair.model, folder / "alone.log") as alone:
        alone.start().wait_ready()
        for number in range(PROMPTS):
            answer = tokens_of(alone.complete(prompt(number), max_tokens=TOKENS))
            assert answer is not None
            pair.expected.append(answer)
    if len({tuple(one) for one in pair.expected}) < PROMPTS * 3 // 4:
        raise BrokenEngines("prompts have the same answers: equality would show nothing")
    number = first
    try:
        pair.start("p", "d")
        names = [name for name, (weight, _) in FAULTS.items() for _ in range(weight)]
        for number in range(first, first + faults):
            rng = random.Random(f"{seed}-engines-{number}")
            fault = rng.choice(names)
            with ThreadPoolExecutor(PER_FAULT) as threads:
                chosen = [rng.randrange(PROMPTS) for _ in range(PER_FAULT)]
                answers = [threads.submit(usual, pair, one) for one in chosen]
                time.sleep(rng.uniform(0.0, 0.3))
                FAULTS[fault][1](pair, rng.randrange(PROMPTS), rng)
                found = [answer.result() for answer in answers]
            pair.table[fault].update(["rounds", *found])
            if "killed" not in fault and "no answer" in found:
                raise BrokenEngines(f"{fault}: a request had no answer, and no engine was killed")
            if pair.decode(chosen[0], pair.prefill(chosen[0])) != "right":
                raise BrokenEngines(f"after {fault}, the engines hand nothing over")
            spent = time.monotonic() - begun
            done = number - first + 1
            print(f"engines: {done}/{faults}, {spent:.0f} s  {fault}", file=sys.stderr, flush=True)
        require_idle(pair)
    except BaseException:
        print(
            f"engine round {number} broke; seed {seed}; logs in {folder}",
            file=sys.stderr,
            flush=True,
        )
        raise
    finally:
        pair.close()
    columns = ("rounds", "right", "right, alone", "no answer")
    print(f"\n{'fault of an engine':36}" + "".join(f"{c:>14}" for c in columns))
    for fault, counts in sorted(pair.table.items()):
        print(f"{fault:36}" + "".join(f"{counts[c]:>14}" for c in columns))
    print(f"every answer had its tokens; no block is in use; {time.monotonic() - begun:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    try:
        run_engines(options.faults, options.seed, options.first)
    except (BrokenEngines, TransferError) as error:
        sys.exit(f"broken: {error}")


if __name__ == "__main__":
    main()
