"""Random requests between two engines: right tokens, each end told once, and nothing is left.

vLLM's schedulers and our transfers are real (tests/support/modelless.py). A seed draws a `Scenario`
before anything runs: the engines' shapes and schedulers, with speculation or without; the prompts
(with common prefixes), how many samples are wanted, how the decode engine learns of each prefill
(`STYLES`), and what goes wrong (`KINDS`):

    calm    nothing: requests are handed over, and no lease ends
    aborts  clients leave, at either engine and at any time, also while a step runs; engines are
            paused; no lease ends
    rough   besides, caches are reset, also under running requests, proxies lose tickets, leases and
            loads have little time, failed loads may fail their requests, and the prefill engine may
            end in between

What is loaded depends on the machine's speed where time is short: then the decode engine computes a
prompt by itself, which is right too. So only `calm` asks for loads.

A failure shows its scenario, and what is left on both engines. Its seed is in the test's name:

    SEED=17 pytest tests/vllm/test_random_requests.py -k mooncake-rough    that seed alone
    SEEDS=200 pytest tests/vllm/test_random_requests.py                    200 seeds, from SEED or 0
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from vllm.v1.core.sched.interface import PauseState

    from modelless import Modelless, child, expected, pool_in

from seeds import SEEDS
from tiny_models import make_model
from vllm_engines import free_port
from vllm_pairs import mooncake_decode, mooncake_prefill, push_decode, toy_proxy_prefill

pytestmark = pytest.mark.filterwarnings("ignore")
STYLES = {
    "ticket": "FerryConnector",  # the response of the prefill has it
    "mooncake": "MooncakeConnector",  # both engines get the request at once, in any order
    "push": "NixlPushConnector",  # so too, and know it by its id
    "pool": "FerryConnector",  # as a ticket, and the engines share a pool
    "multi": "MultiConnector",  # of ticket, mooncake and a pool; each request has one of two styles
}
KINDS = ("calm", "aborts", "rough")
DEADLINE_SECONDS = 120.0  # an idle machine takes 1 or 2; a lease of LONG would end later
LONG = {"lease_seconds": 600, "load_seconds": 300, "bootstrap_seconds": 60}
PAUSES = (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL)
NOT_A_FAULT = {"not held", "shape", "unfit"}  # P keeps to its limit; a load could not fill all
Options = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """What a client wants, and what a proxy makes of it."""

    style: str
    prompt: list[int]
    tokens: int  # of each answer
    names: list[str]  # of the samples; P has one request, or one of each name
    prefills: int
    round: int  # it comes then
    decode_first: bool
    ticket_lost: bool
    priority: int
    uncached: bool  # vLLM reads no cache for the prompt


@dataclass(frozen=True)
class Scenario:
    p: Options  # of both engines
    d: Options
    port: int  # of P's bootstrap
    clients: list[Client]
    aborts: list[tuple[int, str, str, bool]]  # round, engine, request; while a step runs
    resets: list[tuple[int, str, bool]]  # round, engine; under running requests too
    pauses: list[tuple[int, int, str, PauseState]]  # first and last round, engine
    end: int | None = None  # the round in which P ends

    @property
    def last(self) -> int:
        """The last round in which something comes, or an engine goes on."""
        return max(self.clients[-1].round, *(stop for _, stop, *_ in [(0, 0), *self.pauses]))

    @classmethod
    def draw(cls, style: str, kind: str, seed: int, folder: Path) -> Scenario:
        random = Random(f"{style} {kind} {seed}")
        port = free_port()
        p, d = draw_engines(random, style, kind, port, folder)
        base, clients = [random.randrange(900) for _ in range(200)], list[Client]()
        for number in range(random.choice([12, 20])):
            come = clients[-1].round + random.choice([0, 1, 2, 6]) if clients else 0
            client = draw_client(random, style, number, base, come)
            lost = kind == "rough" and random.random() < 0.1
            clients.append(replace(client, ticket_lost=lost))
        scenario, last = cls(p, d, port, clients, [], [], []), clients[-1].round
        if kind != "calm":
            for client in random.choices(clients, k=len(clients) // 3):
                when, where = client.round + random.randrange(12), random.choice("pdd")
                name, inside = random.choice(client.names), random.random() < 0.5
                scenario.aborts.append((when, where, name, inside))
            for _ in range(2):
                when, state = random.randrange(last + 9), random.choice(PAUSES)
                stop = when + random.choice([1, 5, 30])
                scenario.pauses.append((when, stop, random.choice("pd"), state))
        if kind == "rough":
            for _ in range(3):
                when, running = random.randrange(last + 9), random.random() < 0.5
                scenario.resets.append((when, random.choice("pd"), running))
            if random.random() < 0.3:
                return replace(scenario, end=random.randrange(last + 9))
        return scenario


def draw_engines(
    random: Random, style: str, kind: str, port: int, folder: Path
) -> tuple[Options, Options]:
    windows = [{"window": 24}, {"window": 40}, {"window": (0, 24)}]
    special: Options = random.choice([{}, {}, {"states": True}, *windows])
    pool = style == "pool" or (style == "multi" and random.random() < 0.5)
    if pool and "states" in special:  # of which there are no bytes
        special = {}
    p_size, d_size = random.choice([(16, 16), (16, 8), (8, 16)])
    shapes: list[Options] = [{}, {"tp": 2}]
    if not special:
        shapes += [{"pcp": 2}, {"pcp": 2, "dcp": 2}]
    mode, times = random.choice(["pull", "push"]), LONG
    p: Options = {"block_size": p_size, "blocks": random.choice([48, 96]) * 16 // p_size}
    d: Options = {"block_size": d_size, "blocks": random.choice([40, 64, 128]) * 16 // d_size}
    for engine, listens, role in ((p, port, "kv_producer"), (d, 0, "kv_consumer")):
        if kind == "rough":
            lease, load = random.choice([0.3, 1, 4]), random.choice([0.02, 0.1, 3])
            times = {"lease_seconds": lease, "load_seconds": load}
        policy = random.choice(["fail", "recompute"])
        engine |= {**special, **random.choice(shapes), "asynchronous": random.random() < 0.5}
        engine |= {
            "drafts": random.choice([0, 0, 1, 3]),
            "caching": random.random() < 0.8,
            "slots": random.choice([2, 16]),
            "batched": random.choice([24, 64]),
            "order": random.choice(["fcfs", "priority"]),
            "role": random.choice(["kv_both", role]),
        }
        ours: Options = {"mode": mode, **times}
        if style == "multi":
            mooncake = child("MooncakeConnector", **ours, bootstrap_port=listens)
            children = [child("FerryConnector", **ours), mooncake]
            children += [child("FerryPoolConnector", **pool_in(folder))] if pool else []
            children = random.sample(children, len(children))
            engine |= {"children": children, "policy": policy}
        else:
            engine |= {"connector": STYLES[style], "load_failure_policy": policy, **ours}
            engine |= {"bootstrap_port": listens} if style == "mooncake" else {}
            engine |= {"pool": pool_in(folder)} if pool else {}
    return p, d


def draw_client(random: Random, style: str, number: int, base: list[int], come: int) -> Client:
    length = random.choice([1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 150, 200])
    common, samples = random.randrange(length + 1), random.choice([1, 1, 1, 2, 3])
    if random.random() < (0.4 if style == "pool" else 0.1):
        style = "plain"  # for the decode engine alone
    elif style == "pool":
        style = "ticket"
    elif style == "multi":
        style = random.choice(["ticket", "mooncake"])
    return Client(
        style=style,
        prompt=base[:common] + [random.randrange(900) for _ in range(length - common)],
        tokens=random.choice([1, 2, 5, 20, 60]),
        names=[f"{i}_r{number}" for i in range(samples)] if samples > 1 else [f"r{number}"],
        prefills={"ticket": 1, "push": samples}.get(style, random.choice([1, samples])),
        round=come,
        decode_first=random.random() < 0.5,
        ticket_lost=False,
        priority=random.randrange(3),
        uncached=random.random() < 0.1,
    )


class Pair:
    """Two engines while a scenario runs between them."""

    def __init__(self, folder: Path, scenario: Scenario, random: Random) -> None:
        self.scenario, self.random = scenario, random
        self.p = Modelless("p", folder, **scenario.p)
        self.d = Modelless("d", folder, **scenario.d)
        self.engines = {"p": self.p, "d": self.d}
        self.aborted: set[tuple[str, str]] = set()  # engine, request
        self.expecting: list[Client] = []  # a ticket

    @property
    def live(self) -> list[Modelless]:
        return list(self.engines.values())

    def run(self) -> None:
        """Round by round, until all requests are over; then until nothing is left of them."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        for now in count():
            if now == self.scenario.end:
                self.engines.pop("p").close()
            for client in [c for c in self.scenario.clients if c.round == now]:
                self.begin(client)
                self.expecting += [client] * (client.style == "ticket")
            for client in [c for c in self.expecting if self.over("p", c.names[0])]:
                self.expecting.remove(client)
                if not client.ticket_lost:
                    self.decode(client, self.p.params.get(client.names[0], {}))
            self.disturb(now)
            self.step()
            begun = now > self.scenario.last and not self.expecting
            if begun and all(self.over(n, r) for n, e in self.engines.items() for r in e.tokens):
                break
            assert time.monotonic() < deadline, "not all requests are over in time"
        deadline = time.monotonic() + DEADLINE_SECONDS
        while any(engine.left() for engine in self.live):
            assert time.monotonic() < deadline, "something is left"
            self.step()

    def disturb(self, now: int) -> None:
        """What clients and operators do in this round."""
        for when, where, name, inside in self.scenario.aborts:
            engine = self.engines.get(where)
            if engine is None or when != now:
                continue
            if name in engine.tokens and name not in engine.ended:
                self.aborted.add((where, name))
                engine.leaving.append(name) if inside else engine.abort(name)
        for when, where, running in self.scenario.resets:
            if when == now and where in self.engines:
                self.reset(self.engines[where].scheduler, running)
        for when, stop, where, state in self.scenario.pauses:
            if now in (when, stop) and where in self.engines:
                state = state if now == when else PauseState.UNPAUSED
                self.engines[where].scheduler.set_pause_state(state)

    def step(self) -> None:
        for engine in self.live:
            for _ in range(self.random.choice([0, 1, 1, 2])):
                engine.step(throttle=self.random.random() < 0.2)

    def reset(self, scheduler: Any, running: bool) -> None:
        """As an operator does it. vLLM cannot preempt requests that wait for their cache."""
        with suppress(RuntimeError):
            scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True)

    def over(self, where: str, name: str) -> bool:
        engine = self.engines.get(where)
        return engine is None or name in engine.ended or (where, name) in self.aborted

    def begin(self, client: Client) -> None:
        prefill, decode = toy_proxy_prefill(), dict[str, Any]()
        if client.style == "mooncake":
            transfer = client.names[0].partition("_")[2] or client.names[0]
            prefill = mooncake_prefill(transfer)
            decode = mooncake_decode(transfer, self.scenario.port, "p")
        elif client.style == "push":
            decode = push_decode("told by its id", "p", self.p.ferry.producing.port)
        if client.style == "plain" or (decode and client.decode_first):
            self.decode(client, decode)
        if client.style == "plain":
            return
        for name in client.names[: client.prefills] if "p" in self.engines else ():
            self.p.add(name, client.prompt, 1, priority=client.priority, **prefill)
        if decode and not client.decode_first:
            self.decode(client, decode)

    def decode(self, client: Client, params: dict[str, Any]) -> None:
        for name in client.names:
            own = {"priority": client.priority, "uncached": client.uncached}
            self.d.add(name, client.prompt, client.tokens, **own, **params)

    def check_answers(self) -> None:
        """All tokens are right, and all are there unless the request was aborted or failed."""
        for client in self.scenario.clients:
            right = expected(client.prompt, client.tokens, self.scenario.d.get("window", 0))
            for name in client.names:
                if client.ticket_lost and client.style == "ticket":
                    assert name not in self.d.tokens
                    continue
                tokens, end = self.d.tokens[name], str(self.d.ended.get(name))
                failed = end == "error" and not self.d.scheduler.recompute_kv_load_failures
                assert tokens == right[: len(tokens)], f"{name} has wrong tokens"
                whole = end == "length" and tokens == right
                assert whole or failed or ("d", name) in self.aborted, f"{name}: {end}"

    def check_ends(self, kind: str) -> None:
        """Every hold was told to a proxy and ended, and once."""
        ends, here = self.p.counted("holds_closed"), self.d.counted("requests_computed_here")
        failures = self.d.counted("load_failures")
        told = [x.get("kvferry", {}) for x in self.p.params.values()]
        if "p" in self.engines:
            assert sum(ends.values()) == sum("hold" in x for x in told), ends
        assert "error" not in here and "internal error" not in failures
        assert not self.d.counted("holds_closed") and not self.p.told("loads")
        if kind != "rough":
            assert "expired" not in ends
        if kind == "calm":
            assert sum(self.d.told("loads")) and not failures
            assert here.keys() <= NOT_A_FAULT
            # Where the first sample is over P's limit, the hold of another comes withdrawn.
            full = self.p.counted("requests_not_held")["limit"] > 0
            assert ends.keys() - {"delivered"} <= ({"withdrawn"} if full else set())


@contextmanager
def shown(scenario: Scenario, pair: Pair) -> Iterator[None]:
    """Add to whatever fails what somebody needs who looks for the reason."""
    try:
        yield
    except BaseException as error:
        for name, engine in pair.engines.items():
            error.add_note(f"left on {name}: {engine.left() or 'nothing'}; ended: {engine.ended}")
        error.add_note(f"{scenario}")
        raise
    finally:
        for engine in pair.live:
            engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_random_requests(folder: Path, tmp_path: Path, style: str, kind: str, seed: int) -> None:
    scenario = Scenario.draw(style, kind, seed, tmp_path)
    pair = Pair(folder, scenario, Random(seed))
    with shown(scenario, pair):
        pair.run()
        pair.check_answers()
        pair.check_ends(kind)
