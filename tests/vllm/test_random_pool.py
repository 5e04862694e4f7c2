"""Random requests to engines that share a pool: right tokens, each end told once, nothing is left.

vLLM's schedulers, the pool and its embedded store are real (tests/support/vllm_scheduler.py, which
checks each cached byte before it is used). A seed draws a `Scenario` before anything runs: engines
of other shapes (`SHAPES`) and schedulers, with speculation or without; prompts with common
prefixes, conversations that go on at any engine, and what goes wrong (`KINDS`):

    calm     nothing: a new engine of each shape loads something in the end
    crowded  the store and the caches are small: objects are evicted while others read them, and
             requests are preempted; clients leave at any time, also while a step runs; engines are
             paused
    rough    besides, weights change, also under running requests, the store fails, lies or hangs
             for some calls, and lookups, loads and saves have little time

What is loaded depends on the machine's speed, except in `calm`. A store that hangs does so for some
rounds of steps. A failure shows its scenario and what is left. Its seed is in the test's name:

    SEED=17 pytest tests/vllm/test_random_pool.py -k state-rough    that seed alone
    SEEDS=200 pytest tests/vllm/test_random_pool.py                 200 seeds, from SEED or 0
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.core.sched.scheduler", reason="this tier runs in the environment with vLLM"
)
pytest.importorskip("kvferry.vllm.connector")

from vllm.v1.core.sched.interface import PauseState

from dir_store import BadCalls, FaultyStore
from kvferry.pool import layout_registry, lookup, rank
from kvferry.pool.embedded.index import OWNED
from kvferry.pool.embedded.store import EmbeddedStore
from pool_scenarios import SHAPES, Client, Fault, Scenario
from seeds import SEEDS
from vllm_scheduler import SchedulerEngine, expected

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("calm", "crowded", "rough")
FAILURES = ("lookup_errors", "load_failures", "save_errors", "save_failed", "save_dropped")
DEADLINE_SECONDS = 120.0  # an idle machine takes 1 or 2


class Crowd:
    """Engines over one store while a scenario runs."""

    def __init__(self, folder: Path, scenario: Scenario, random: Random) -> None:
        self.scenario, self.random, self.folder = scenario, random, folder
        self.faults: dict[str, Any] = {}
        self.bad: list[tuple[Fault, BadCalls]] = []
        self.engines: list[SchedulerEngine] = []
        self.aborted: set[str] = set()

    def open_store(self) -> Any:
        size = self.scenario.store_bytes
        store = EmbeddedStore(self.folder / "store", size, slots=1 << 14)
        return FaultyStore(store, self.faults)

    def start(self) -> None:
        for options in self.scenario.engines:
            self.engines.append(SchedulerEngine(self.folder, self.open_store, **options))

    def run(self) -> None:
        """Round by round, until all requests are over; then until nothing is left of them."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        for now in count():
            self.begin(now)
            for engine in self.engines:
                for _ in range(self.random.choice([0, 1, 1, 2])):
                    engine.step(throttle=self.random.random() < 0.2)
            over = all(self.over(client) for client in self.scenario.clients)
            if over and now > self.scenario.last:
                break
            assert time.monotonic() < deadline, "not all requests are over in time"
        self.end_faults()
        self.settle()

    def begin(self, now: int) -> None:
        for client in self.scenario.clients:
            if client.round == now:
                own: dict[str, Any] = {"priority": client.priority, "uncached": client.uncached}
                engine = self.engines[client.engine]
                engine.add(client.name, client.prompt, len(client.right), **own)
        for when, client, inside in self.scenario.aborts:
            if when == now and not self.over(client):
                self.aborted.add(client.name)
                engine = self.engines[client.engine]
                engine.leaving.append(client.name) if inside else engine.abort(client.name)
        for when, number, running in self.scenario.changes:
            if when == now:
                self.engines[number].change_weights(running=running)
        for when, stop, number, state in self.scenario.pauses:
            if now in (when, stop):
                state = state if now == when else PauseState.UNPAUSED
                self.engines[number].scheduler.set_pause_state(state)
        for fault in self.scenario.faults:
            if fault.round == now:
                bad = self.faults[fault.call] = BadCalls(fault.call, fault.how, fault.calls)
                self.bad.append((fault, bad))
        for fault, bad in self.bad:
            if now >= fault.round + fault.rounds:
                bad.released.set()

    def over(self, client: Client) -> bool:
        ended = self.engines[client.engine].ended.get(client.name)
        return client.name in self.aborted or bool(ended)

    def end_faults(self) -> None:
        self.faults.clear()
        for _, bad in self.bad:
            bad.released.set()

    def settle(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while any(engine.left() for engine in self.engines):
            assert time.monotonic() < deadline, "something is left"
            for engine in self.engines:
                engine.step()

    def check_answers(self) -> None:
        """Each request ended once. Its tokens are right, and all are there, or it has a reason."""
        for client in self.scenario.clients:
            engine, name = self.engines[client.engine], client.name
            tokens, ends = engine.out[name], engine.ended[name]
            assert tokens == client.right[: len(tokens)], f"{name} has wrong tokens"
            if name in self.aborted:
                assert not ends, f"{name} was aborted, and ended: {ends}"
                continue
            may_fail = not engine.scheduler.recompute_kv_load_failures
            failures = sum(one.counters["load_failures"] for one in engine.pool_ranks)
            failed = ends == ["error"] and may_fail and failures
            whole = ends == ["length"] and tokens == client.right
            assert whole or failed, f"{name}: {ends}"

    def ask_again(self) -> None:
        """Without its own cache, each engine loads what the pool has under its weights."""
        for engine in self.engines:
            engine.forget()
            for client in self.scenario.clients:
                prompt = [*client.prompt, *client.right]
                engine.add(f"again {client.name}", prompt, 1)
            engine.run(DEADLINE_SECONDS)
            for client in self.scenario.clients:
                told = engine.out[f"again {client.name}"]
                right = expected([*client.prompt, *client.right], 1)
                assert told == right[: len(told)], (
                    f"{client.name} has wrong tokens when asked again"
                )
        self.settle()

    def check_hits(self, engines: list[SchedulerEngine]) -> None:
        """New engines loaded what others had saved, and nothing failed."""
        for engine in engines:
            assert engine.pool.counters["hit_tokens"], "nothing was loaded"
        for engine in self.engines:
            counters = [engine.pool.counters, *(one.counters for one in engine.pool_ranks)]
            bad = {name: sum(c[name] for c in counters) for name in FAILURES}
            assert not any(bad.values()), bad

    def close(self) -> None:
        self.end_faults()
        for engine in self.engines:
            engine.close()

    def check_store(self) -> None:
        """Every object is whole, nobody works on any, and all of the room can be had again."""
        store = self.open_store().inner
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            verified = store.verify(deadline)
            assert not verified.corrupt and not verified.unread, verified
            assert not len(store._index.in_state(*OWNED)), "an object is still being written"
            store.clear(deadline)
            counters = store.counters()
            assert not counters["objects"] and not counters["memory_bytes"], counters
        finally:
            store.close()


@contextmanager
def shown(crowd: Crowd) -> Iterator[None]:
    """Add to whatever fails what somebody needs who looks for the reason."""
    try:
        yield
    except BaseException as error:
        for number, engine in enumerate(crowd.engines):
            error.add_note(f"left on {number}: {engine.left() or 'nothing'}; {engine.ended}")
        error.add_note(f"{crowd.scenario}")
        raise
    finally:
        crowd.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", SHAPES)
def test_random_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, kind: str, seed: int
) -> None:
    monkeypatch.setattr(rank, "HUNG_SECONDS", 0.01)
    monkeypatch.setattr(lookup, "TEND_SECONDS", 0.01)
    monkeypatch.setattr(layout_registry, "REFRESH_SECONDS", 0.01)  # engines soon know each other
    crowd = Crowd(tmp_path, Scenario.draw(model, kind, seed), Random(seed))
    with shown(crowd):
        crowd.start()
        crowd.run()
        crowd.check_answers()
        old = len(crowd.engines)
        if kind == "calm":  # engines that come later know all layouts at once
            crowd.start()
        crowd.ask_again()
        if kind == "calm":
            crowd.check_hits(crowd.engines[old:])
    crowd.check_store()
