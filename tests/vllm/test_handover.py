"""Two real engines of different shapes: what one prefills, the other decodes, token for token.

fp32 and greedy, on vLLM's CPU build, as processes, over our own carriers. Every test that shows
equality stands beside a control: prompts give different outputs, and a ticket for another prompt is
not used.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from tiny_models import llama_config, make_model
from vllm_engines import Engine, free_port, hand_over
from vllm_pairs import ids, prompt, settled, start_lines, started

# Loads take milliseconds; deadlines are long, because two cores are shared by all engines' workers,
# and short only where one must pass.
LEASE, LOAD, SHORT_LEASE = 60.0, 120.0, 20.0
FAST: dict[str, Any] = {"lease_seconds": LEASE, "load_seconds": LOAD}
HIT = "vllm:external_prefix_cache_hits_total"


def ticket_of(prefill: Engine, tokens: list[int]) -> dict[str, Any]:
    answer = prefill.complete(tokens, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def loads(engine: Engine) -> int:
    """Loads that an engine's first worker has completed."""
    lines = engine.log.read_text(errors="replace").splitlines()
    return sum(": loaded " in x and ("Worker pid" in x or "TP0" in x) for x in lines)


Pair = tuple[Engine, Engine]
SECRET = "a secret for this test"


@pytest.fixture(scope="module")
def one_to_two(model: Path, logs: Path) -> Iterator[Pair]:
    config = {**FAST, "carriers": ["local"]}
    prefill = Engine("p1", model, logs / "p1.log", connector=config)
    prefill.arguments = ["--max-num-batched-tokens", "256"]  # longer prompts come in chunks
    decode = Engine("d2", model, logs / "d2.log", tp=2, block_size=32, connector=config)
    started(prefill, decode)
    yield prefill, decode
    prefill.stop()
    decode.stop()


@pytest.fixture(scope="module")
def two_to_one(model: Path, logs: Path) -> Iterator[Pair]:
    config = {**FAST, "carriers": ["tcp"], "secret": SECRET, "lease_seconds": SHORT_LEASE}
    prefill = Engine("p2", model, logs / "p2.log", tp=2, block_size=32, connector=config)
    decode = Engine("d1", model, logs / "d1.log", connector=config, on_failure="recompute")
    started(prefill, decode)
    yield prefill, decode
    prefill.stop()
    decode.stop()


class TestOneToTwo:
    """tp 1 with blocks of 128 to tp 2 with blocks of 32, over `local`."""

    @pytest.fixture
    def pair(self, one_to_two: Pair) -> Pair:
        return one_to_two

    @pytest.mark.parametrize("tokens", [20, 128, 300, 1000])
    def test_tokens_are_equal(self, pair: Pair, tokens: int) -> None:
        prefill, decode = pair
        before, loaded = decode.metric(HIT), loads(decode)
        asked = prompt(tokens, tokens)
        answer = hand_over(prefill, decode, asked, max_tokens=12)
        assert ids(answer) == ids(prefill.complete(asked, max_tokens=12))
        assert ids(answer) != ids(prefill.complete(prompt(tokens + 1, tokens), max_tokens=12))
        assert decode.metric(HIT) - before == tokens
        assert loads(decode) - loaded == 1

    @pytest.mark.parametrize("side", [0, 1])
    def test_each_process_says_once_that_it_starts(self, pair: Pair, side: int) -> None:
        engine = pair[side]
        lines = start_lines(engine.log.read_text(errors="replace"))
        assert sorted(line.what for line in lines) == ["engine", *["rank"] * engine.tp]
        assert len({line.pid for line in lines}) == len(lines)

    def test_a_prefix_that_the_destination_has_is_not_moved(self, pair: Pair) -> None:
        prefill, decode = pair
        asked = prompt(50, 500)
        decode.complete(asked[:200], max_tokens=1)
        before = decode.metric(HIT)
        answer = hand_over(prefill, decode, asked, max_tokens=8)
        assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))
        assert decode.metric(HIT) - before == 500 - 192

    def test_what_was_loaded_is_hit_again(self, pair: Pair) -> None:
        prefill, decode = pair
        asked = prompt(60, 450)
        first = hand_over(prefill, decode, asked, max_tokens=4)
        longer = asked + prompt(61, 60)
        assert ids(first) == ids(prefill.complete(asked, max_tokens=4))
        assert ids(decode.complete(longer, max_tokens=8)) == ids(
            prefill.complete(longer, max_tokens=8)
        )

    def test_eight_at_once(self, pair: Pair) -> None:
        prefill, decode = pair
        prompts = [prompt(70 + i, 90 + 60 * i) for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda p: hand_over(prefill, decode, p, max_tokens=6), prompts))
        alone = [ids(prefill.complete(p, max_tokens=6)) for p in prompts]
        assert [ids(a) for a in answers] == alone
        assert len({str(a) for a in alone}) == 8

    def test_two_samples_share_a_ticket(self, pair: Pair) -> None:
        prefill, decode = pair
        asked = prompt(80, 333)
        answer = hand_over(prefill, decode, asked, max_tokens=6, n=2, temperature=1, top_k=1)
        (alone,) = ids(prefill.complete(asked, max_tokens=6))
        assert ids(answer) == [alone, alone]

    def test_a_ticket_for_another_prompt_is_not_used(self, pair: Pair) -> None:
        prefill, decode = pair
        before = decode.metric(HIT)
        params = ticket_of(prefill, prompt(90, 200))
        asked = prompt(91, 200)
        answer = decode.complete(asked, max_tokens=8, kv_transfer_params=params)
        assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))
        assert decode.metric(HIT) == before
        assert "its ticket is for another prompt" in decode.tail(400)

    def test_a_used_ticket_is_stale(self, pair: Pair) -> None:
        prefill, decode = pair
        asked = prompt(92, 200)
        params = ticket_of(prefill, asked)
        first = decode.complete(asked, max_tokens=4, kv_transfer_params=params)
        assert ids(first) == ids(prefill.complete(asked, max_tokens=4))
        again = decode.complete(asked, max_tokens=4, kv_transfer_params=params)
        assert again.get("status") == 500, again  # nothing was computed from what was not there
        assert "the hold is closed (delivered)" in decode.tail(100)
        assert ids(decode.complete(asked, max_tokens=4)) == ids(first)

    def test_a_client_that_goes_away(self, pair: Pair) -> None:
        """Abort while the load waits for a producer that does not answer."""
        prefill, decode = pair
        params = ticket_of(prefill, prompt(96, 400))
        os.killpg(prefill.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                decode.complete(prompt(96, 400), seconds=2, max_tokens=4, kv_transfer_params=params)
        finally:
            os.killpg(prefill.pid, signal.SIGCONT)
        assert settled(decode, LOAD + 10)
        assert settled(prefill)
        asked = prompt(97, 150)
        assert ids(hand_over(prefill, decode, asked, max_tokens=4)) == ids(
            prefill.complete(asked, max_tokens=4)
        )

    def test_blocks_come_back(self, pair: Pair) -> None:
        assert settled(pair[0]) and settled(pair[1])


class TestTwoToOne:
    """tp 2 to tp 1 with other blocks, over `tcp`, with a secret; and what must be refused."""

    @pytest.fixture
    def pair(self, two_to_one: Pair) -> Pair:
        return two_to_one

    def test_tokens_are_equal(self, pair: Pair) -> None:
        prefill, decode = pair
        for tokens in (33, 260, 700):
            before = loads(decode)
            asked = prompt(tokens, tokens)
            answer = hand_over(prefill, decode, asked, max_tokens=8)
            assert ids(answer) == ids(decode.complete(asked, max_tokens=8))
            assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))
            assert loads(decode) - before == 1

    def test_wrong_secret_another_model_and_a_killed_producer(
        self, pair: Pair, model: Path, logs: Path
    ) -> None:
        """Each is refused within its deadline, and the decode engine computes by itself."""
        _, decode = pair
        other = make_model(model.parent / "other", llama_config(num_hidden_layers=3), seed=1)
        port = free_port()
        stranger = Engine(
            "stranger", model, logs / "s.log", connector={**FAST, "secret": "a secret of others"}
        )
        config = {**FAST, "secret": SECRET, "port": port}
        foreign = Engine("foreign", other, logs / "o.log", connector=config)
        started(stranger, foreign)
        try:
            for engine, reason in ((stranger, "secret"), (foreign, "layers")):
                asked = prompt(len(engine.name), 222)
                began = time.monotonic()
                answer = decode.complete(
                    asked, max_tokens=4, kv_transfer_params=ticket_of(engine, asked)
                )
                assert time.monotonic() - began < LOAD
                assert ids(answer) == ids(decode.complete(asked, max_tokens=4))
                assert reason in decode.tail(200), decode.tail(40)
            asked = prompt(123, 222)
            params = ticket_of(foreign, asked)
            foreign.kill()
            answer = decode.complete(asked, max_tokens=4, kv_transfer_params=params)
            assert ids(answer) == ids(decode.complete(asked, max_tokens=4))
        finally:
            stranger.stop()
            foreign.stop()
        assert settled(decode)

    def test_a_restarted_producer_is_another_one(self, pair: Pair, model: Path, logs: Path) -> None:
        _, decode = pair
        config = {**FAST, "secret": SECRET, "port": free_port()}
        first = Engine("again", model, logs / "r1.log", connector=config)
        started(first)
        asked = prompt(130, 260)
        params = ticket_of(first, asked)
        # killed while a load waits for its answer: the load ends at once, not at its deadline
        during = prompt(132, 260)
        waiting = ticket_of(first, during)
        os.killpg(first.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(decode.complete, during, max_tokens=4, kv_transfer_params=waiting)
            time.sleep(1.0)
            began = time.monotonic()
            first.kill()
            recomputed = ids(answer.result(LOAD))
            assert time.monotonic() - began < LOAD / 2
        assert recomputed == ids(decode.complete(during, max_tokens=4))
        second = Engine("again", model, logs / "r2.log", connector=config)
        started(second)
        try:
            answer = decode.complete(asked, max_tokens=4, kv_transfer_params=params)
            assert ids(answer) == ids(second.complete(asked, max_tokens=4))
            assert "restarted" in decode.tail(100)
            fresh = prompt(131, 260)
            answer = hand_over(second, decode, fresh, max_tokens=4)
            assert ids(answer) == ids(second.complete(fresh, max_tokens=4))
        finally:
            second.stop()

    def test_a_killed_consumer_leaves_nothing_behind(
        self, pair: Pair, model: Path, logs: Path
    ) -> None:
        prefill, decode = pair
        asked = prompt(140, 600)
        params = ticket_of(prefill, asked)
        done = threading.Event()

        def ask() -> None:
            with pytest.raises(Exception):  # noqa: B017, the connection breaks in some way
                decode.complete(asked, max_tokens=500, kv_transfer_params=params)
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        time.sleep(0.3)
        decode.kill()
        assert done.wait(30)
        assert settled(prefill)
        assert ids(prefill.complete(prompt(141, 50), max_tokens=2))


class TestStagesToOne:
    """pp 2 to tp 1, over `local`."""

    def test_tokens_are_equal(self, model: Path, logs: Path) -> None:
        prefill = Engine("pp2", model, logs / "pp2.log", pp=2, connector=dict(FAST))
        decode = Engine("dp1", model, logs / "dp1.log", block_size=64, connector=dict(FAST))
        started(prefill, decode)
        try:
            for tokens in (40, 500):
                before, loaded = decode.metric(HIT), loads(decode)
                asked = prompt(tokens, tokens)
                answer = hand_over(prefill, decode, asked, max_tokens=8)
                assert decode.metric(HIT) - before == tokens
                assert loads(decode) - loaded == 1
                assert ids(answer) == ids(prefill.complete(asked, max_tokens=8))
            assert settled(decode)
        finally:
            prefill.stop()
            decode.stop()
        assert subprocess.run(["pgrep", "-g", str(prefill.pid)], capture_output=True).stdout == b""
