"""What happens to real engines while prompts flow, each fault one function."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from chaos.engines import LEASE_SECONDS, PROMPTS, Pair, prompt


def kill(pair: Pair, name: str) -> None:
    pair.engines[name].kill()
    pair.start(name)


def stop(pair: Pair, name: str, seconds: float) -> None:
    group = pair.engines[name].pid
    os.killpg(group, signal.SIGSTOP)
    time.sleep(seconds)
    os.killpg(group, signal.SIGCONT)


def go_away(pair: Pair, name: str, number: int, rng: random.Random) -> None:
    """A client that goes away at some moment of its answer."""
    params: dict[str, Any] | None = {"do_remote_decode": True, "do_remote_prefill": False}
    if name == "d":
        params = pair.prefill(number)
    connection = http.client.HTTPConnection("127.0.0.1", pair.engines[name].port, timeout=30)
    body = {
        "model": "tiny",
        "prompt": prompt(number),
        "temperature": 0,
        "max_tokens": 200 if name == "d" else 1,
        "stream": True,
        "ignore_eos": True,
        "kv_transfer_params": params,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    time.sleep(rng.choice((0.0, 0.01, 0.05, 0.2)))
    connection.close()


def another_prompts_ticket(pair: Pair, number: int) -> None:
    """Computed here, never the other's answer."""
    other = (number + 1) % PROMPTS
    pair.decode(number, pair.prefill(other))


def used_ticket(pair: Pair, number: int) -> None:
    ticket = pair.prefill(number)
    for _ in range(2):
        pair.decode(number, ticket)


def old_tickets(pair: Pair, number: int, rng: random.Random) -> None:
    """Any that was ever given out: to another prompt, by an earlier life, fetched long ago."""
    for ticket in rng.sample(pair.old, min(3, len(pair.old))):
        pair.decode(number, ticket)


def reset(pair: Pair) -> None:
    """As new weights do it: all tickets are void, blocks come back."""
    url = f"{pair.engines['p'].url}/reset_prefix_cache?reset_external=true"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as answer:
        answer.read()


FAULTS: dict[str, tuple[int, Callable[[Pair, int, random.Random], None]]] = {
    # weight: engines take half a minute to come back
    "prefill engine killed": (2, lambda p, n, r: kill(p, "p")),
    "decode engine killed": (2, lambda p, n, r: kill(p, "d")),
    "prefill engine stopped": (3, lambda p, n, r: stop(p, "p", r.uniform(0.2, 3.0))),
    "decode engine stopped": (3, lambda p, n, r: stop(p, "d", r.uniform(0.2, 3.0))),
    "decode engine stopped past lease": (2, lambda p, n, r: stop(p, "d", LEASE_SECONDS + 2)),
    "client of decode engine went away": (4, lambda p, n, r: go_away(p, "d", n, r)),
    "client of prefill engine went away": (3, lambda p, n, r: go_away(p, "p", n, r)),
    "prefill engine's caches reset": (3, lambda p, n, r: reset(p)),
    "another prompt's ticket": (3, lambda p, n, r: another_prompts_ticket(p, n)),
    "ticket used twice": (3, lambda p, n, r: used_ticket(p, n)),
    "old tickets": (3, old_tickets),
}
