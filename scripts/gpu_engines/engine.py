"""One engine, in its own process: vLLM with its engine core inside, driven over a pipe.

`python scripts/gpu_engines --engine FD` gets its options over the pipe, answers when it is up, and
then answers one call after another. Between calls it goes on stepping, as a server does: holds
close and saves end in steps.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

IDLE_SECONDS = 0.003
ORDERED_STEPS = 4  # more than it takes until a worker hears what the scheduler has ordered


@dataclass
class Ask:
    """One request."""

    prompt: list[int]
    max_tokens: int = 12
    n: int = 1
    kv: dict[str, Any] | None = None  # kv_transfer_params
    abort_steps: int | None = None  # abort it after so many steps
    abort_tokens: int | None = None  # or when it has so many tokens


@dataclass
class Answer:
    """What became of it."""

    request_id: str  # the engine's own
    tokens: list[list[int]] = field(default_factory=list)  # of each sample
    # for each token of the first sample: log-probabilities of the two best tokens, by token
    best: list[dict[int, float]] = field(default_factory=list)
    cached: int = 0  # tokens of the prompt that were not computed
    kv: dict[str, Any] | None = None
    ended: str | None = None


@dataclass
class Answers:
    answers: list[Answer]
    peak_blocks: int = 0  # in use at once
    preemptions: int = 0


def serve(fd: int) -> int:
    """An engine's process, until the other end of the pipe is closed."""
    pipe = Connection(fd)
    try:
        engine = Engine(pipe.recv())
        pipe.send(("ok", engine.describe()))
    except Exception:
        traceback.print_exc()
        pipe.send(("error", traceback.format_exc(limit=-4)))
        return 1
    while True:
        if not pipe.poll(IDLE_SECONDS):
            engine.step()
            continue
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return 0
        if method == "stop":
            engine.stop()
            return 0
        try:
            pipe.send(("ok", getattr(engine, method)(*arguments)))
        except Exception:
            traceback.print_exc()
            pipe.send(("error", traceback.format_exc(limit=-4)))


class Engine:
    """vLLM's engine, and a look into its scheduler."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**options))
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._blocks = self._scheduler.kv_cache_manager.block_pool
        self._all_blocks = self._blocks.get_num_free_blocks()
        self._taken: list[Any] = []  # blocks that requests may not use
        self._count = self._preemptions = 0
        preempt = self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self._preemptions += 1
            preempt(*args, **kwargs)

        self._scheduler._preempt_request = counted

    def describe(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        config = self._engine.vllm_config
        return {
            "layout": str(config.cache_config.kv_cache_layout),
            "block_size": config.cache_config.block_size,
            "blocks": self._all_blocks,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "runner": 2 if config.use_v2_model_runner else 1,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "caches": get_kv_transfer_group()._cache.describe(),
        }

    def step(self) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        return outputs

    def used(self) -> int:
        """Blocks that requests, holds and saves keep."""
        free: int = self._blocks.get_num_free_blocks()
        return self._all_blocks - free - len(self._taken)

    def ask(self, asked: list[Ask], seconds: float) -> Answers:
        """Run requests at once."""
        deadline, before = time.monotonic() + seconds, self._preemptions
        answers, places, peak, steps = [], {}, 0, 0
        for one in asked:
            self._count += 1
            name = f"r{self._count}"
            internal = self._engine.add_request(
                name, {"prompt_token_ids": one.prompt}, self._sampling(one)
            )
            answers.append(Answer(internal))
            places[name] = len(answers) - 1
        try:
            while places:
                for name, place in list(places.items()):
                    if _enough(asked[place], answers[place], steps):
                        self._engine.abort_request([name])
                        answers[place].ended = "abort"
                        del places[name]
                for output in self.step():
                    if output.request_id in places:
                        self._note(answers[places[output.request_id]], output)
                        if output.finished:
                            del places[output.request_id]
                peak, steps = max(peak, self.used()), steps + 1
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(places)} of {len(asked)} requests did not end")
        finally:
            self._engine.abort_request(list(places))
        return Answers(answers, peak, self._preemptions - before)

    def _sampling(self, one: Ask) -> Any:
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        # the best token alone: samples of n > 1 may not be greedy by temperature
        greedy = {"temperature": 0.0} if one.n == 1 else {"temperature": 1.0, "top_k": 1}
        return SamplingParams(
            **greedy,
            n=one.n,
            max_tokens=one.max_tokens,
            ignore_eos=True,
            detokenize=False,
            # several samples come together only at the end
            output_kind=RequestOutputKind.FINAL_ONLY if one.n > 1 else RequestOutputKind.CUMULATIVE,
            logprobs=2,
            extra_args={"kv_transfer_params": one.kv} if one.kv is not None else None,
        )

    def _note(self, answer: Answer, output: Any) -> None:
        answer.tokens = [list(sample.token_ids) for sample in output.outputs]
        answer.cached = output.num_cached_tokens or 0
        answer.kv = output.kv_transfer_params
        first = output.outputs[0]
        answer.best = [
            {int(token): float(one.logprob) for token, one in best.items()}
            for best in first.logprobs or ()
        ]
        answer.ended = first.finish_reason

    def settle(self, seconds: float) -> int:
        """Step until no block is in use; how many still are."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.step()
            if not self.used() and not self._scheduler.has_requests():
                return 0
            time.sleep(IDLE_SECONDS)
        return self.used()

    def reset(self, seconds: float) -> None:
        """Forget the prefix cache; the pool stays."""
        if left := self.settle(seconds):
            raise TimeoutError(f"{left} blocks are still in use after {seconds:g} s")
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def leave_blocks(self, count: int) -> None:
        """Take blocks away, until so many are left for requests; 0: give all back."""
        self._blocks.free_blocks(self._taken)
        self._taken = []
        if count:
            self._taken = self._blocks.get_new_blocks(self._all_blocks - count)

    def take_remembered(self) -> dict[str, Any]:
        from gpu_engines.probe import remembered

        for _ in range(ORDERED_STEPS):
            self.step()
        return remembered.take()

    def saved(self, names: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """What was saved under names of the pool, where this engine did."""
        from gpu_engines.probe import saved

        return {name: saved[name] for name in names if name in saved}

    def stop(self) -> None:
        self._engine.engine_core.shutdown()


def _enough(asked: Ask, answer: Answer, steps: int) -> bool:
    """Whether a request is to be aborted now."""
    if asked.abort_steps is not None and steps >= asked.abort_steps:
        return True
    return asked.abort_tokens is not None and any(
        len(sample) >= asked.abort_tokens for sample in answer.tokens
    )
