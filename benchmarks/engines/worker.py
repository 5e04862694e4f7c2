# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: `python -m benchmarks.engines.worker FD`.

The engine's core runs in this process, and a loop here steps it; with
`VLLM_ENABLE_V1_MULTIPROCESSING=1` it has a process of its own, as `vllm serve` does it, and tells
the times of its tokens itself. The parent sends commands over the socket FD, and gets one answer to
each, as (command's number, answer); `add` is answered when its request has ended. All times are of
the clock that all processes of a host share.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

IDLE_SECONDS = 0.001  # between two looks at the socket of an engine that has nothing to do
SETTLE_SECONDS = 30.0
PIN_SECONDS = 60.0
PINNED_BYTES = 1 << 30
PINNED_ROUNDS = 5


def prompt(seed: int, tokens: int, vocabulary: int) -> list[int]:
    """Prompts of different seeds share no block."""
    made: list[int] = np.random.default_rng(seed).integers(3, vocabulary, tokens).tolist()
    return made


class Worker:
    def __init__(self, parent: Connection, arguments: dict[str, Any]) -> None:
        self.parent = parent
        began = time.monotonic()
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from vllm import SamplingParams

        self._sampling = SamplingParams
        imported = time.monotonic()
        if transfer := arguments.pop("kv_transfer_config", None):
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        built = time.monotonic()
        self.core = getattr(self.engine.engine_core, "engine_core", None)  # None: elsewhere
        self.vocabulary = self.engine.model_config.get_vocab_size()
        self.running: dict[str, Request] = {}
        self.by_inner_id: dict[str, Request] = {}
        if self.core is not None and self.core.scheduler.connector is not None:
            self._watch_loads(self.core.scheduler.connector)
        self.ready = {"import_seconds": imported - began, "build_seconds": built - imported}

    def _watch_loads(self, connector: Any) -> None:
        """Note when a load is ordered and when the scheduler hears of its end. That means the same
        for all connectors."""
        allocated, output = connector.update_state_after_alloc, connector.update_connector_output

        def on_allocated(request: Any, blocks: Any, external: int) -> None:
            allocated(request, blocks, external)
            found = self.by_inner_id.get(request.request_id)
            if external and found is not None:
                found.record["external"] = external
                found.record["ordered"] = time.monotonic()

        def on_output(told: Any) -> None:
            output(told)
            for inner_id in told.finished_recving or ():
                if (found := self.by_inner_id.get(inner_id)) is not None:
                    found.record["loaded"] = time.monotonic()

        connector.update_state_after_alloc = on_allocated
        connector.update_connector_output = on_output

    @property
    def busy(self) -> bool:
        """Also while a connector has blocks of finished requests, or saves under way."""
        if self.core is None:
            return bool(self.engine.has_unfinished_requests())
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def serve(self) -> None:
        while True:
            while self.parent.poll(0 if self.busy else IDLE_SECONDS):
                number, name, options = self.parent.recv()
                if name == "close":
                    if self.core is None:
                        self.engine.engine_core.shutdown()
                    return
                answer = getattr(self, name)(number=number, **options)
                if answer is not None:
                    self.parent.send((number, answer))
            if self.busy:
                self.step()

    def step(self) -> None:
        outputs = self.engine.step()
        now = time.monotonic()
        for output in outputs:
            request = self.running.get(output.request_id)
            if request is None:
                continue
            new = len(output.outputs[0].token_ids) - len(request.record["times"])
            at = now if self.core is not None else output.metrics.last_token_ts
            request.record["times"] += [at] * new
            if output.finished:
                request.record["cached"] = output.num_cached_tokens or 0
                request.record["params"] = output.kv_transfer_params
                self._end(output.request_id)

    def _end(self, name: str) -> None:
        request = self.running.pop(name)
        self.by_inner_id.pop(request.inner_id, None)
        self.parent.send((request.number, request.record))

    # Commands

    def add(
        self, number: int, seed: int, tokens: int, most: int, params: dict[str, Any] | None
    ) -> None:
        ids = prompt(seed, tokens, self.vocabulary)
        sampling = self._sampling(
            temperature=0.0,
            max_tokens=most,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        name = str(number)
        record: dict[str, Any] = {"times": [], "external": 0, "cached": 0, "params": None}
        self.running[name] = request = Request(number, record)
        record["added"] = time.monotonic()
        request.inner_id = self.engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        self.by_inner_id[request.inner_id] = request

    def abort(self, number: int, which: list[int]) -> bool:
        """End these requests, or all; they are answered with what they had."""
        names = [str(one) for one in which] or list(self.running)
        self.engine.abort_request([name for name in names if name in self.running])
        for name in names:
            if name in self.running:
                self._end(name)
        return True

    def reset(self, number: int) -> dict[str, Any]:
        """Empty the engine's own prefix cache, not the connector's. vLLM refuses while blocks are
        in use, so this also waits for saves."""
        began = time.monotonic()
        while True:
            while self.busy and time.monotonic() < began + SETTLE_SECONDS:
                self.step()
            if self.engine.reset_prefix_cache():
                return {"ok": True, "seconds": time.monotonic() - began}
            if time.monotonic() > began + SETTLE_SECONDS:
                return {"ok": False, "seconds": time.monotonic() - began}
            time.sleep(IDLE_SECONDS)

    def ready_memory(self, number: int) -> float:
        """Wait until the pool's memory is pinned, which goes on after the start; how long."""
        began = time.monotonic()
        while any(thread.name == "kvferry-pin" for thread in threading.enumerate()):
            if time.monotonic() > began + PIN_SECONDS:
                break
            time.sleep(IDLE_SECONDS)
        return time.monotonic() - began

    def pinned(self, number: int) -> float:
        """GB/s of a plain copy from pinned host memory to the GPU; on the CPU, of a copy."""
        import torch

        gpu = torch.cuda.is_available()
        size = PINNED_BYTES if gpu else PINNED_BYTES // 16
        host = torch.empty(size, dtype=torch.uint8, pin_memory=gpu)
        device = torch.empty(size, dtype=torch.uint8, device="cuda" if gpu else "cpu")
        seconds = []
        for _ in range(PINNED_ROUNDS):
            began = time.perf_counter()
            device.copy_(host, non_blocking=True)
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return size / min(seconds) / 1e9


class Request:
    __slots__ = ("inner_id", "number", "record")

    def __init__(self, number: int, record: dict[str, Any]) -> None:
        self.number, self.record, self.inner_id = number, record, ""


def main() -> None:
    fd = int(sys.argv[1])
    socket.socket(fileno=fd).detach()  # it must be one
    parent = Connection(fd)
    try:
        worker = Worker(parent, parent.recv())
        parent.send((0, worker.ready))
        worker.serve()
    except EOFError:
        return  # the parent is gone
    except Exception as error:
        traceback.print_exc()
        parent.send((-1, f"{type(error).__name__}: {error}"[:300]))


if __name__ == "__main__":
    main()
