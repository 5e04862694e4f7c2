"""Random scenarios over a pool: all that happens is drawn before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from vllm_scheduler import expected

Options = dict[str, Any]
ORDERS = ("LBHNC", "BLNHC", "BHLNC", "LBNHC", "LHBNC", "BLHNC")
PLAIN: list[Options] = [{"tp": tp, "order": order} for tp in (1, 2, 4) for order in ORDERS]
SHAPES: dict[str, list[Options]] = {  # by kind of model
    "plain": [*PLAIN, {"pcp": 2}, {"pcp": 2, "tp": 2}],
    "latent": [{}, {"tp": 2}, {"tp": 2, "dcp": 2}, {"tp": 4, "dcp": 2}, {"pcp": 2, "dcp": 2}],
    "window": [{}, {"tp": 2}, {"tp": 4}],
    "state": [{}, {"tp": 2}, {"tp": 4}],
}
CONNECTORS = ("FerryPoolConnector", "FerryConnector", "MultiConnector")
PAUSES = (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL)
MOST_TOKENS = 300  # of a request, its answer included


@dataclass(frozen=True)
class Client:
    """What a client wants."""

    name: str
    engine: int
    prompt: list[int] = field(repr=False)
    right: list[int] = field(repr=False)  # the whole answer
    round: int  # it comes then
    priority: int
    uncached: bool  # vLLM reads no cache for the prompt


@dataclass(frozen=True)
class Fault:
    """What the store does to a number of calls, of all engines."""

    round: int
    call: str
    how: str
    calls: int
    rounds: int  # that calls hang


@dataclass(frozen=True)
class Scenario:
    engines: list[Options]
    store_bytes: int
    clients: list[Client]
    aborts: list[tuple[int, Client, bool]]  # with their rounds; while a step runs
    changes: list[tuple[int, int, bool]]  # of weights: round, engine; under running requests
    pauses: list[tuple[int, int, int, PauseState]]  # first and last round, engine
    faults: list[Fault]

    @property
    def last(self) -> int:
        """The last round in which something comes, or an engine goes on."""
        rounds = [when for when, *_ in self.changes] + [stop for _, stop, *_ in self.pauses]
        return max([self.clients[-1].round, *rounds])

    @classmethod
    def draw(cls, model: str, kind: str, seed: int) -> Scenario:
        random = Random(f"{model} {kind} {seed}")
        number = random.choice([2, 3])
        engines = [draw_engine(random, model, kind) for _ in range(number)]
        clients = draw_clients(random, number)
        if kind == "calm":
            return cls(engines, 64 << 20, clients, [], [], [], [])
        size, rounds = random.choice([1 << 16, 1 << 18, 1 << 20, 4 << 20]), clients[-1].round + 20
        leave = random.choices(clients, k=len(clients) // 4)
        aborts = [
            (client.round + random.randrange(15), client, random.random() < 0.5) for client in leave
        ]
        pauses = [draw_pause(random, rounds, number) for _ in range(2)]
        if kind == "crowded":
            return cls(engines, size, clients, aborts, [], pauses, [])
        changes = [
            (random.randrange(rounds), random.randrange(number), random.random() < 0.5)
            for _ in range(2)
        ]
        faults = [draw_fault(random, rounds) for _ in range(6)]
        return cls(engines, size, clients, aborts, changes, pauses, faults)


def draw_engine(random: Random, model: str, kind: str) -> Options:
    block_size = random.choice([16, 16, 32])
    tokens = 4096 if kind == "calm" else random.choice([320, 320, 400, 600])
    groups = 2 if model in ("window", "state") else 1
    extra: Options = {}
    if kind == "rough":
        for name in ("lookup_seconds", "load_seconds", "save_seconds"):
            extra |= {name: random.choice([0.02, 60, 60])}
    return {
        **random.choice(SHAPES[model]),
        "hybrid": model if model != "plain" else "",
        "block_size": block_size,
        "blocks": 1 + groups * tokens // block_size,
        "batched": random.choice([64, 200]),
        "connector": (connector := random.choice(CONNECTORS)),
        "on_failure": random.choice(["fail", "recompute"]) if connector == "MultiConnector" else "",
        "asynchronous": random.random() < 0.5,
        "drafts": 0 if model == "state" else random.choice([0, 0, 1, 3]),
        "slots": random.choice([2, 8]),
        "policy": random.choice(["fcfs", "priority"]),
        "extra": extra,
    }


def draw_clients(random: Random, engines: int) -> list[Client]:
    """Half of them go on with the conversation of an earlier one."""
    base, clients = [random.randrange(900) for _ in range(200)], list[Client]()
    for number in range(random.choice([12, 20])):
        length = random.choice([1, 15, 16, 17, 33, 64, 65, 100, 150, 200])
        before = base[: random.randrange(length + 1)]
        if clients and random.random() < 0.5:
            said = random.choice(clients)
            before = said.prompt + said.right
            length = len(before) + random.choice([1, 16, 40])
        if length > MOST_TOKENS - 60:
            before, length = [], 60
        prompt = before + [random.randrange(900) for _ in range(length - len(before))]
        come = clients[-1].round + random.choice([0, 0, 0, 1, 8]) if clients else 0
        right = expected(prompt, random.choice([1, 5, 20, 60, 60]))
        engine, priority = random.randrange(engines), random.randrange(3)
        uncached = random.random() < 0.1
        clients.append(Client(f"r{number}", engine, prompt, right, come, priority, uncached))
    return clients


def draw_pause(random: Random, rounds: int, engines: int) -> tuple[int, int, int, PauseState]:
    first, state = random.randrange(rounds), random.choice(PAUSES)
    return first, first + random.choice([1, 5, 30]), random.randrange(engines), state


def draw_fault(random: Random, rounds: int) -> Fault:
    return Fault(
        round=random.randrange(rounds),
        call=random.choice(["exists", "put", "put", "get", "get", "get", "get_bytes"]),
        how=random.choice(["raises", "lies", "hangs", "hangs"]),
        calls=random.choice([1, 2, 5, 20]),
        rounds=random.choice([1, 10, 60]),
    )
