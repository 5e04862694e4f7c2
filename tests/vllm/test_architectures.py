"""Every architecture that the CPU build runs, prefilled by one real engine and decoded by another.

Tokens must be those of one engine alone, and what the destination's blocks hold when a load ends
must be, byte for byte, what the source's held when its hold was opened: `cache_probe` looks at both
with vLLM's own arrangement. Each check has a control that differs. Pairs marked `matrix` are left
to the long run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from kvferry.layout.hf import knows
from real_pairs import Digests, call, probed, require_same_cache, seen
from tiny_models import TINY, WINDOW, llama_config, make_model
from vllm_engines import Engine, free_port, hand_over
from vllm_pairs import ids, prompt, settled, started
from waiting import wait_until

CONFIG: dict[str, Any] = {"lease_seconds": 60.0, "load_seconds": 60.0}
HITS = "vllm:prefix_cache_hits_total"
Pair = tuple[Engine, Engine]
Start = Callable[..., Pair]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts pairs of engines that tell of their caches; one pair at a time."""
    folder = tmp_path_factory.mktemp("architectures")
    running: list[Engine] = []

    def stop() -> None:
        while running:
            running.pop().stop()

    def start(
        model: str, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None, *more: str
    ) -> Pair:
        stop()
        weights = folder / model
        if not weights.exists():
            make_model(weights, TINY[model])
        made = []
        for name, options in (("p", p or {}), ("d", d or {})):
            engine = Engine(
                name,
                weights,
                folder / f"{model}-{name}.log",
                **{"connector": CONFIG, **options},
            )
            engine.arguments += more
            made.append(probed(engine))
        running.extend(made)
        started(*made)
        for engine in made:
            call(engine, "watch_cache")
        return made[0], made[1]

    yield start
    stop()


def handed(pair: Pair, asked: list[int], **options: Any) -> tuple[list[list[int]], Digests]:
    """Tokens of a hand-over, and what was loaded, after it was found to be what was held."""
    answer = hand_over(*pair, asked, max_tokens=6, **options)
    (source,), (loaded,) = seen(pair[0]), seen(pair[1])
    first = max(0, len(asked) - WINDOW)  # what the last token's window no longer reaches
    assert require_same_cache(source, loaded, first) > 0
    return ids(answer), loaded


def require_equal(pair: Pair, tokens: int) -> None:
    """Bytes and tokens of one hand-over; neither is another prompt's."""
    asked, other = prompt(tokens, tokens), prompt(tokens + 1, tokens)
    answer, loaded = handed(pair, asked)
    assert answer == ids(pair[0].complete(asked, max_tokens=6))
    different, other_loaded = handed(pair, other)
    assert different != answer
    with pytest.raises(AssertionError):
        require_same_cache(other_loaded, loaded, 0)


@pytest.fixture(scope="module")
def windows(start: Start) -> Pair:
    tcp = {**CONFIG, "carriers": ["tcp"]}
    return start(
        "gemma3",
        {"connector": tcp},
        {"connector": tcp, "block_size": 32, "on_failure": "recompute"},
    )


class TestWindows:
    """Gemma 3: six groups of one layer overlaid in one storage, five with a window."""

    @pytest.fixture
    def pair(self, windows: Pair) -> Pair:
        return windows

    @pytest.mark.parametrize("tokens", [20, 128, 129, 223, 300, 319, 700])
    def test_bytes_and_tokens_are_equal(self, pair: Pair, tokens: int) -> None:
        """The window after 223 tokens begins with a block here and there, after 319 with one here;
        that of the last token begins before it."""
        require_equal(pair, tokens)

    def test_loaded_blocks_are_hit_and_right(self, pair: Pair) -> None:
        """Blocks at the window's edge came whole: a longer prompt reads them from the cache."""
        asked = prompt(60, 330)  # needs tokens from 235 on, so blocks of 32 from 224 on are loaded
        handed(pair, asked)
        for more in (5, 40, 200):
            longer = asked + prompt(61 + more, more)
            before = pair[1].metric(HITS)
            answer = ids(pair[1].complete(longer, max_tokens=6))
            assert pair[1].metric(HITS) - before >= 320
            assert answer == ids(pair[0].complete(longer, max_tokens=6))

    def test_a_prefix_that_the_destination_has(self, pair: Pair) -> None:
        asked = prompt(50, 500)
        pair[1].complete(asked[:200], max_tokens=1)
        answer, _ = handed(pair, asked)
        assert answer == ids(pair[0].complete(asked, max_tokens=6))

    def test_a_producer_killed_while_it_is_read(self, pair: Pair) -> None:
        """Reads wait until P has stopped; it does not answer them, and dies."""
        prefill, decode = pair
        assert settled(decode)
        asked = prompt(70, 700)
        first = prefill.complete(asked, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        call(decode, "delay_reads")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                decode.complete,
                asked,
                max_tokens=6,
                kv_transfer_params=first["kv_transfer_params"],
            )
            wait_until(lambda: "a read begins" in decode.tail(200))
            os.killpg(prefill.pid, signal.SIGSTOP)
            wait_until(lambda: "a read is under way" in decode.tail(200))
            time.sleep(0.5)
            assert not answer.done()
            began = time.monotonic()
            prefill.kill()
            recomputed = ids(answer.result(CONFIG["load_seconds"]))
            assert time.monotonic() - began < CONFIG["load_seconds"] / 2
        assert "not loaded" in decode.tail(200)
        assert recomputed == ids(decode.complete(asked, max_tokens=6))
        assert settled(decode)


class TestLatents:
    """DeepSeek V2, tp 1 to tp 2. The CPU's decode and prefill disagree: bytes are compared."""

    def test_bytes_are_equal(self, start: Start) -> None:
        pair = start("mla", {}, {"tp": 2}, "--attention-backend", "CPU_MLA")
        held = []
        for tokens in (5, 16, 33, 500):
            _, loaded = handed(pair, prompt(tokens, tokens))
            held.append(loaded)
        with pytest.raises(AssertionError):
            require_same_cache(held[0], {k: v[:5] for k, v in held[1].items()}, 0)


class TestStates:
    """Granite hybrid: Mamba 2 states and attention; P stops a token short of the prompt."""

    def test_bytes_and_tokens_are_equal(self, start: Start) -> None:
        # with prefix caching, vLLM's CPU build dies by itself on prompts longer than a block
        pair = start("granite", {}, {}, "--no-enable-prefix-caching")
        for tokens in (2, 20, 128, 129, 500):
            require_equal(pair, tokens)
        alone = prompt(3, 1)  # nothing can be held back of one token: computed where it is decoded
        answer = hand_over(*pair, alone, max_tokens=6)
        assert ids(answer) == ids(pair[0].complete(alone, max_tokens=6))
        assert "tokens to compute here" in pair[1].tail(100)
        assert settled(pair[0]) and settled(pair[1])


class TestNoTable:
    """StableLM, which kvferry describes from vLLM's specs alone."""

    def test_bytes_and_tokens_are_equal(self, start: Start) -> None:
        assert not knows(TINY["stablelm"])
        pair = start("stablelm", {}, {"block_size": 64})
        for tokens in (20, 300):
            require_equal(pair, tokens)


class TestDraftModel:
    """Llama with a smaller Llama that drafts: pages of two lengths, on both sides or only on D."""

    def test_drafts_are_handed_over_or_zeroed(self, start: Start, tmp_path: Path) -> None:
        small = llama_config(num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=4)
        draft = make_model(tmp_path / "draft", small, seed=5)
        weights = make_model(tmp_path / "llama", TINY["llama"])
        speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        more = ["--speculative-config", json.dumps(speculation)]
        bare = Engine("bare", weights, tmp_path / "bare.log", connector=CONFIG).start()
        try:
            pair = start(
                "llama",
                {"arguments": list(more)},
                {
                    "arguments": list(more),
                    "block_size": 64,
                    "connector": {**CONFIG, "draft_layers": "zero"},
                },
            )
            bare.wait_ready()
            for tokens in (20, 300):
                require_equal(pair, tokens)
            _, loaded = handed(pair, prompt(9, 200))
            drafted = [key for key in loaded if "draft_model" in key]
            assert len(drafted) == 2 * 2 * 2  # layers, heads, K and V
            asked = prompt(8, 200)
            answer = hand_over(bare, pair[1], asked, max_tokens=6)
            assert ids(answer) == ids(bare.complete(asked, max_tokens=6))
            log = pair[1].tail(400)
            assert "which will be zeroed here" in log and "bytes of draft layers zeroed" in log
            (zeroed,) = seen(pair[1])
            drafts = [digest for key in drafted for digest in zeroed[key]]
            assert len(drafts) == 8 * 200 and len(set(drafts)) == 1  # all the same: zeros
        finally:
            bare.stop()


@pytest.mark.matrix
class TestMatrix:
    @pytest.mark.parametrize(
        ("model", "p", "d", "more"),
        [
            ("mistral", {"tp": 2}, {"block_size": 64}, ()),
            ("gemma3", {}, {"tp": 2, "block_size": 32}, ()),
            ("gemma4", {}, {"block_size": 32}, ()),
            ("stablelm", {"pp": 2}, {"block_size": 64}, ()),
            ("granite", {}, {"tp": 2}, ("--no-enable-prefix-caching",)),
            ("granite", {"tp": 2}, {}, ("--no-enable-prefix-caching",)),
            ("llama", {}, {"block_size": 64}, ("--kv-cache-dtype", "fp8")),
        ],
        ids=[
            "all sliding",
            "windows to tp 2",
            "heads by layer",
            "no table, stages",
            "states up",
            "states down",
            "fp8",
        ],
    )
    def test_bytes_and_tokens_are_equal(
        self, start: Start, model: str, p: dict[str, Any], d: dict[str, Any], more: tuple[str, ...]
    ) -> None:
        pair = start(model, p, d, *more)
        for tokens in (20, 129, 500):
            require_equal(pair, tokens)
        assert settled(pair[0]) and settled(pair[1])

    def test_each_data_parallel_rank_is_an_engine(self, tmp_path: Path) -> None:
        weights = make_model(tmp_path / "llama", TINY["llama"])
        port = free_port()
        prefill = Engine("p", weights, tmp_path / "p.log", connector={**CONFIG, "port": port})
        prefill.arguments += ["--data-parallel-size", "2"]
        decode = Engine("d", weights, tmp_path / "d.log", block_size=64, connector=CONFIG)
        started(prefill, decode)

        def ask(number: int) -> tuple[str, int]:
            asked = prompt(number, 100 + number)
            first = prefill.complete(
                asked, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
            )
            ticket = first["kv_transfer_params"]
            answer = decode.complete(asked, max_tokens=6, kv_transfer_params=ticket)
            assert ids(answer) == ids(prefill.complete(asked, max_tokens=6))
            return ticket["remote_engine_id"], ticket["remote_port"]

        try:
            with ThreadPoolExecutor(4) as pool:
                engines = set(pool.map(ask, range(12)))
            assert engines == {("p_dp0", port), ("p_dp1", port + 1)}
            assert decode.log.read_text().count(": loaded ") == 12
        finally:
            prefill.stop()
            decode.stop()
