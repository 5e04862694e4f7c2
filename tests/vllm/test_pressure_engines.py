"""Block pressure between real engines (`make pressure`): rings, and Mooncake style.

Every answer is compared with that of an engine alone. Caches have 40 blocks, and prompts of more
than half of them are among the requests.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from tiny_models import make_model
from vllm_engines import Engine, free_port, hand_over
from vllm_pairs import (
    USAGE,
    ids,
    mooncake_decode,
    mooncake_prefill,
    prompt,
    reaches,
    settled,
    started,
)

pytestmark = pytest.mark.matrix
BLOCKS, BLOCK = 40, 32
LARGE, SMALL = 22 * BLOCK + 5, 6 * BLOCK + 3
FEW = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024"]
CHUNKED = ["--max-num-batched-tokens", "128", "--enable-chunked-prefill"]
SECONDS = {"lease_seconds": 15.0, "load_seconds": 60.0}
TOKENS = 6
Ask = Callable[[], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pressure")
    make_model(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Engine]:
    with started(Engine("alone", folder / "tiny", folder / "alone.log"))[0] as engine:
        yield engine


def made(folder: Path, name: str, **transfer: Any) -> Engine:
    """Its policy for failed loads is the one that a user gets."""
    engine = Engine(name, folder / "tiny", folder / f"{name}.log", block_size=BLOCK)
    engine.connector, engine.arguments = dict(SECONDS), FEW + CHUNKED
    engine.transfer = {"kv_load_failure_policy": "recompute", **transfer}
    return engine


def lengths(count: int) -> list[int]:
    return [SMALL if i % 3 == 2 else LARGE for i in range(count)]


def timed(ask: Ask) -> tuple[float, Any]:
    begun = time.monotonic()
    answer = ask()
    return time.monotonic() - begun, answer


def all_answered(alone: Engine, asks: list[tuple[list[int], Ask]], what: str) -> None:
    """Send all requests at once: each has the right answer, and none takes far longer."""
    with ThreadPoolExecutor(len(asks)) as pool:
        ended = list(pool.map(timed, [ask for _, ask in asks]))
    took = [seconds for seconds, _ in ended]
    middle, longest = statistics.median(took), max(took)
    print(f"{what}: {len(took)} answered, median {middle:.2f} s, longest {longest:.2f} s")
    for (tokens, _), (_, answer) in zip(asks, ended, strict=True):
        assert ids(answer) == ids(alone.complete(tokens, max_tokens=TOKENS))
    assert longest <= 3 * middle


def nothing_left(*engines: Engine) -> None:
    for engine in engines:
        assert settled(engine)
        for name in ("holds_open", "held_blocks", "claims_parked"):
            assert reaches(lambda: engine.metric(f"vllm:kvferry_{name}"), 0), name  # noqa: B023
        assert engine.metric(USAGE) == 0


@pytest.mark.parametrize("count", [2, 3])
def test_a_ring(folder: Path, alone: Engine, count: int) -> None:
    ring = started(*(made(folder, f"ring{count}.{i}") for i in range(count)))
    with contextlib.ExitStack() as stack:
        for engine in ring:
            stack.enter_context(engine)
        asks: list[tuple[list[int], Ask]] = []
        for i, engine in enumerate(ring):
            for number, length in enumerate(lengths(14)):
                tokens, after = prompt(i * 40 + number, length), ring[(i + 1) % count]

                def ask(p: Engine = engine, d: Engine = after, t: list[int] = tokens) -> Any:
                    return hand_over(p, d, t, max_tokens=TOKENS)

                asks.append((tokens, ask))
        all_answered(alone, asks, f"ring of {count}")
        nothing_left(*ring)


def test_both_engines_at_once(folder: Path, alone: Engine) -> None:
    port = free_port()
    p = made(folder, "p", kv_connector="MooncakeConnector", kv_role="kv_producer")
    d = made(folder, "d", kv_connector="MooncakeConnector", kv_role="kv_consumer")
    p.environment = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
    with started(p, d)[0], d:
        asks: list[tuple[list[int], Ask]] = []
        for number, length in enumerate(lengths(32)):
            tokens = prompt(number, length)

            def ask(t: list[int] = tokens, name: str = f"t{number}") -> Any:
                with ThreadPoolExecutor(1) as side:
                    params = mooncake_prefill(name)
                    side.submit(p.complete, t, max_tokens=1, kv_transfer_params=params)
                    there = mooncake_decode(name, port, "p")
                    return d.complete(t, max_tokens=TOKENS, kv_transfer_params=there)

            asks.append((tokens, ask))
        all_answered(alone, asks, "both engines at once")
        assert d.metric("vllm:kvferry_loads_total") > 0
        nothing_left(p, d)
