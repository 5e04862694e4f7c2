"""Block pressure: engines that wait for each other's blocks go on (docs/protocol.md).

vLLM's scheduler and block pool are real, and so are the transfers. There are prompts of more than
half a cache, four times more of them than blocks, and engines that hold for each other.
"""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")
with warnings.catch_warnings():  # torch and vLLM warn of themselves
    warnings.simplefilter("ignore")
    from vllm.v1.core.sched.interface import PauseState

    from modelless import Modelless, expected, pool_in, run

from dir_store import DirStore
from kvferry.vllm import consuming
from tiny_models import make_model
from vllm_engines import free_port
from vllm_pairs import mooncake_decode, mooncake_prefill

pytestmark = pytest.mark.filterwarnings("ignore")
BLOCKS = 32  # of 16 tokens; one of them is vLLM's null block
TOKENS = 3  # of an answer
LARGE, SMALL = 18 * 16 + 5, 5 * 16 + 3  # of more than half a cache, and of a sixth


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Modelless]]:
    engines: list[Modelless] = []
    folder = make_model(tmp_path / "tiny")

    def made(name: str, **options: Any) -> Modelless:
        engines.append(Modelless(name, folder, blocks=BLOCKS, **options))
        return engines[-1]

    yield made
    try:
        run(*engines, until=lambda: not any(e.used_blocks for e in engines), seconds=15)
        for engine in engines:
            assert not engine.scheduler.requests and not engine.ferry.producing.held_blocks
            assert not engine.ferry.consuming.wanted
    finally:
        for engine in engines:
            engine.close()


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 131 + i * 17) % 997 for i in range(count)]


def lengths(count: int) -> list[int]:
    return [SMALL if i % 3 == 2 else LARGE for i in range(count)]


def answered(
    engines: list[Modelless], waits: dict[str, tuple[Modelless, list[int]]], forward: Any
) -> list[float]:
    """Step until all requests are answered rightly; how long each took."""
    begun, took = time.monotonic(), {}
    deadline = begun + 40
    while len(took) < len(waits):
        assert time.monotonic() < deadline, f"{sorted(set(waits) - set(took))} have no answer"
        for engine in engines:
            engine.step()
        forward()
        for name, (engine, tokens) in waits.items():
            if name not in took and name in engine.ended:
                took[name] = time.monotonic() - begun
                assert engine.tokens[name] == expected(tokens, TOKENS), name
    return list(took.values())


def no_straggler(took: list[float]) -> None:
    assert max(took) <= 3 * statistics.median(took), sorted(took)


@pytest.mark.parametrize("count", [2, 3])
def test_a_ring(make: Callable[..., Modelless], count: int) -> None:
    """Each engine prefills for the next one; a router passes tickets on as they come."""
    ring = [make(f"e{i}") for i in range(count)]
    waits, on_the_way = {}, {}
    for i, engine in enumerate(ring):
        for number, length in enumerate(lengths(9)):
            tokens, after = prompt(i * 50 + number, length), ring[(i + 1) % count]
            engine.add(f"p{i}.{number}", tokens, 1, do_remote_decode=True)
            waits[f"d{i}.{number}"] = after, tokens
            on_the_way[f"p{i}.{number}"] = engine

    def forward() -> None:
        for name, engine in list(on_the_way.items()):
            if name in engine.ended:
                del on_the_way[name]
                after, tokens = waits[f"d{name[1:]}"]
                after.add(f"d{name[1:]}", tokens, TOKENS, **engine.params[name])

    no_straggler(answered(ring, waits, forward))
    assert sum(sum(e.told("loads")) for e in ring), "some are handed over all the same"


def test_both_engines_at_once(make: Callable[..., Modelless]) -> None:
    """Mooncake style, with P and D in opposite orders: D's first request is P's last."""
    port = free_port()
    p = make("p", connector="MooncakeConnector", role="kv_producer", bootstrap_port=port)
    d = make("d", connector="MooncakeConnector", role="kv_consumer")
    prompts = {f"t{i}": prompt(i, length) for i, length in enumerate(lengths(17))}
    for name, tokens in prompts.items():
        d.add(name, tokens, TOKENS, **mooncake_decode(name, port, "p"))
    for name, tokens in reversed(prompts.items()):
        p.add(name, tokens, 1, **mooncake_prefill(name))
    waits = {name: (d, tokens) for name, tokens in prompts.items()}
    no_straggler(answered([p, d], waits, lambda: None))
    assert sum(d.told("loads"))


def test_a_wait_for_a_prefill_has_an_end(make: Callable[..., Modelless]) -> None:
    """Its engine is there, and never gets the prompt; meanwhile others have all of the blocks."""
    port = free_port()
    make("p", connector="MooncakeConnector", role="kv_producer", bootstrap_port=port)
    d = make("d", connector="MooncakeConnector", role="kv_consumer", load_seconds=3)
    d.add("late", prompt(1, LARGE), TOKENS, **mooncake_decode("never", port, "p"))
    d.add("local", prompt(2, LARGE), TOKENS)
    run(d, until=lambda: "local" in d.ended, seconds=2)
    assert not d.used_blocks and "late" not in d.ended
    run(d, until=lambda: "late" in d.ended, seconds=10)
    assert d.tokens["late"] == expected(prompt(1, LARGE), TOKENS)
    assert d.told("requests_computed_here") == [{"not held": 1}]


def test_who_stands_still_gives_way(
    make: Callable[..., Modelless], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines hold a large prompt for each other: neither can load."""
    monkeypatch.setattr(consuming, "STANDSTILL_SECONDS", 60.0)
    one, two = make("one"), make("two")
    for seed, engine in enumerate((one, two)):
        engine.add("p", prompt(seed, LARGE), 1, do_remote_decode=True)
        run(engine, until=lambda: "p" in engine.ended)  # noqa: B023
    two.add("d", prompt(0, LARGE), TOKENS, **one.params["p"])
    begun = time.monotonic()
    run(one, two, until=lambda: time.monotonic() > begun + 0.1)
    assert two.ferry.consuming.queueing  # there is no room for it
    monkeypatch.setattr(consuming, "STANDSTILL_SECONDS", 0.2)
    one.add("d", prompt(1, LARGE), TOKENS, **two.params["p"])
    run(one, two, until=lambda: "d" in one.ended and "d" in two.ended, seconds=10)
    assert one.tokens["d"] == expected(prompt(1, LARGE), TOKENS)
    assert two.tokens["d"] == expected(prompt(0, LARGE), TOKENS)
    assert {"gave way": 1} in one.told("requests_computed_here") + two.told(
        "requests_computed_here"
    )


def test_who_waits_for_one_more_block_gives_way(
    make: Callable[..., Modelless], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded prompt needs a block more, for drafts, and all are held. vLLM looks at loaded
    prompts first, so it does not even ask for the tickets behind them."""
    monkeypatch.setattr(consuming, "STANDSTILL_SECONDS", 60.0)
    p = make("p")
    pair = [make(name, drafts=2, batched=512, max_held_blocks=0) for name in ("one", "two")]
    loaded, held = 5 * 16, 26 * 16  # together, the whole cache
    for seed, engine in enumerate(pair):
        p.add(f"d{seed}", prompt(seed, loaded), 1, do_remote_decode=True)
        run(p, until=lambda: f"d{seed}" in p.ended)  # noqa: B023
        engine.add("d", prompt(seed, loaded), TOKENS, **p.params[f"d{seed}"])
        engine.add("x", prompt(seed + 2, held), 1, do_remote_decode=True)
        run(engine, until=lambda: "x" in engine.ended)  # noqa: B023
    run(p, *pair, until=lambda: sum(sum(engine.told("loads")) for engine in pair) == 2)
    for seed, (engine, other) in enumerate(zip(pair, reversed(pair), strict=True)):
        engine.add("e", prompt(3 - seed, held), TOKENS, **other.params["x"])
    begun = time.monotonic()
    run(*pair, until=lambda: time.monotonic() > begun + 0.1)
    assert all(engine.ended.keys() == {"x"} for engine in pair)
    monkeypatch.setattr(consuming, "STANDSTILL_SECONDS", 0.2)
    run(*pair, until=lambda: all({"d", "e"} <= engine.ended.keys() for engine in pair), seconds=10)
    for seed, engine in enumerate(pair):
        assert engine.tokens["d"] == expected(prompt(seed, loaded), TOKENS)
        assert engine.tokens["e"] == expected(prompt(3 - seed, held), TOKENS)
    assert sum(engine.counted("requests_computed_here")["gave way"] for engine in pair) in (1, 2)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_paused_engine_does_not_give_way(
    make: Callable[..., Modelless], monkeypatch: pytest.MonkeyPatch, state: PauseState
) -> None:
    """It computes nothing, with holds and tickets of its own, because an operator wants that."""
    monkeypatch.setattr(consuming, "STANDSTILL_SECONDS", 0.05)
    one, two = make("one"), make("two")
    for seed, engine in enumerate((one, two)):
        engine.add("p", prompt(seed, SMALL), 1, do_remote_decode=True)
        run(engine, until=lambda: "p" in engine.ended)  # noqa: B023
    two.scheduler.set_pause_state(state)
    two.add("d", prompt(0, SMALL), TOKENS, **one.params["p"])
    begun = time.monotonic()
    run(one, two, until=lambda: time.monotonic() > begun + 0.3)
    monkeypatch.setattr(consuming, "STANDSTILL_SECONDS", 60.0)
    two.scheduler.set_pause_state(PauseState.UNPAUSED)
    run(one, two, until=lambda: "d" in two.ended)
    assert sum(two.told("loads")) == 1 and not two.counted("requests_computed_here")
    one.add("d", prompt(1, SMALL), TOKENS, **two.params["p"])
    run(one, two, until=lambda: "d" in one.ended)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_paused_engine_looks_for_producers(
    make: Callable[..., Modelless], state: PauseState
) -> None:
    """A hold is renewed once its producer is found, and a pause may be longer than a lease."""
    port = free_port()
    p = make("p", connector="MooncakeConnector", role="kv_producer", bootstrap_port=port)
    d = make("d", connector="MooncakeConnector", role="kv_consumer")
    d.scheduler.set_pause_state(state)
    d.add("r", prompt(1, SMALL), TOKENS, **mooncake_decode("t", port, "p"))
    run(d, until=lambda: d.ferry.consuming.renewer.watched)
    d.step()
    assert not d.scheduler.has_requests(), "it would not come to rest"
    p.add("r", prompt(1, SMALL), 1, **mooncake_prefill("t"))
    run(p, until=lambda: p.ferry.producing.held)
    d.scheduler.set_pause_state(PauseState.UNPAUSED)
    run(p, d, until=lambda: "r" in d.ended)
    assert d.tokens["r"] == expected(prompt(1, SMALL), TOKENS) and sum(d.told("loads")) == 1


def test_an_engine_that_loads_from_a_pool_does_not_stand_still(
    make: Callable[..., Modelless], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: it will have blocks for its tickets."""
    monkeypatch.setattr(consuming, "STANDSTILL_SECONDS", 0.05)
    pool = pool_in(tmp_path / "pool")
    one, two = make("one", pool=pool), make("two", pool=pool)
    one.add("saved", prompt(3, LARGE), 1)
    run(one, until=lambda: "saved" in one.ended and not one.used_blocks)
    for seed, (engine, length) in enumerate(((one, LARGE), (two, SMALL))):
        engine.add("p", prompt(seed, length), 1, do_remote_decode=True)
        run(engine, until=lambda: "p" in engine.ended)  # noqa: B023
    reading, go_on, get = threading.Event(), threading.Event(), DirStore.get

    def slow(*call: Any) -> Any:
        reading.set()
        go_on.wait(20)
        return get(*call)

    monkeypatch.setattr(DirStore, "get", slow)
    two.add("loads", prompt(3, LARGE), TOKENS)
    run(two, until=reading.is_set)
    two.add("d", prompt(0, LARGE), TOKENS, **one.params["p"])
    begun = time.monotonic()
    run(one, two, until=lambda: time.monotonic() > begun + 0.3)
    monkeypatch.setattr(consuming, "STANDSTILL_SECONDS", 60.0)
    go_on.set()
    run(one, two, until=lambda: "d" in two.ended)
    assert sum(two.told("loads")) == 1 and not two.counted("requests_computed_here")
    one.add("d", prompt(1, SMALL), TOKENS, **two.params["p"])
    run(one, two, until=lambda: "d" in one.ended)
