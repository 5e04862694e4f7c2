# SPDX-License-Identifier: Apache-2.0
"""Engines as the measurements see them: started together, asked one at a time, and ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks import ROOT, python_path
from kvferry.errors import DeadlineExceeded, TransferError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in the worker's process
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its bytecode, so no start compiles it
}
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # in a process of its own, as `vllm serve` does it
APART_SECONDS = 10.0  # that the worker may take to end that process
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
END_SECONDS = 30.0  # after it was killed: the system takes back a hundred gigabytes
START_SECONDS = 300.0
MOST_SECONDS = 120.0  # for any other answer
FERRY = {"kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry.vllm"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that has ended, timed in its engine's process."""

    added: float
    times: tuple[float, ...]  # of its tokens
    external: int  # tokens that a connector was ordered to load
    cached: int  # tokens that were not computed
    params: dict[str, Any] | None
    ordered: float = 0.0  # when the load was, and when the scheduler heard of its end
    loaded: float = 0.0

    @property
    def first_token(self) -> float:
        """Seconds from the request to its first token."""
        return self.times[0] - self.added

    @property
    def load(self) -> float:
        return self.loaded - self.ordered if self.loaded else 0.0

    @classmethod
    def read(cls, record: dict[str, Any]) -> Answer:
        return cls(**{**record, "times": tuple(record["times"])})


@dataclass(slots=True)
class Engine:
    """One engine. `arguments` are vLLM's; `error` says why it is not there."""

    name: str
    arguments: dict[str, Any]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    error: str = ""
    ready: dict[str, float] = field(default_factory=dict)
    deadline: float = float("inf")
    _process: subprocess.Popen[bytes] | None = None
    _socket: Connection | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _answers: dict[int, Any] = field(default_factory=dict)

    @property
    def connector(self) -> str:
        return str(self.arguments.get("kv_transfer_config", {}).get("kv_connector", ""))

    def start(self) -> None:
        self.error, self.ready = "", {}
        self._answers.clear()
        ours, theirs = socket.socketpair()
        with self.log.open("wb") as out, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engines.worker", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **self.environment, "PYTHONPATH": python_path()},
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._socket = Connection(ours.detach())
        self._socket.send(self.arguments)

    def wait_ready(self) -> None:
        try:
            self.ready = self.answer(0, START_SECONDS)
        except TransferError as error:
            self.close()
            self.error = f"{error}"

    def send(self, command: str, **options: Any) -> int:
        if self._socket is None:
            raise TransferError(f"engine {self.name} is not there: {self.error or 'it was ended'}")
        number = next(self._numbers)
        self._socket.send((number, command, options))
        return number

    def take(self) -> tuple[int, Any]:
        """The next answer that comes, to whichever command."""
        assert self._socket is not None
        try:
            number, answer = self._socket.recv()
        except (EOFError, OSError):
            number, answer = -1, f"its process ended; {self.log} says why"
        if number < 0:
            self.close()
            self.error = str(answer)
            raise TransferError(f"engine {self.name}: {answer}")
        return number, answer

    def answer(self, number: int, seconds: float = MOST_SECONDS) -> Any:
        until = min(self.deadline, time.monotonic() + seconds)
        while number not in self._answers:
            if self._socket is None or not self._socket.poll(max(0.0, until - time.monotonic())):
                raise DeadlineExceeded(f"engine {self.name} did not answer in time")
            got, answer = self.take()
            self._answers[got] = answer
        return self._answers.pop(number)

    def call(self, command: str, **options: Any) -> Any:
        return self.answer(self.send(command, **options))

    def add(
        self, seed: int, tokens: int, most: int = 1, params: dict[str, Any] | None = None
    ) -> int:
        return self.send("add", seed=seed, tokens=tokens, most=most, params=params)

    def ask(
        self, seed: int, tokens: int, most: int = 1, params: dict[str, Any] | None = None
    ) -> Answer:
        return Answer.read(self.answer(self.add(seed, tokens, most, params)))

    def prefill(self, seed: int, tokens: int) -> Answer:
        """As a router asks a prefill engine."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        told = self.ask(seed, tokens, 1, params)
        if not told.params:
            raise TransferError(f"engine {self.name} gave nothing to hand over")
        return told

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send((0, "close", {}))
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(
                    APART_SECONDS if APART.items() <= self.environment.items() else 0.5
                )
            except subprocess.TimeoutExpired:
                self._process.kill()  # nothing of its is wanted any more
                self._process.wait(END_SECONDS)
            self._process = None


@dataclass(slots=True)
class Fleet:
    """All engines of a run, and what they share."""

    folder: Path  # logs and the model
    shared: Path  # on /dev/shm: the pool's stores
    model: Path
    shape: dict[str, int]
    gpu: bool
    deadline: float
    block: int
    engines: list[Engine] = field(default_factory=list)

    @property
    def token_bytes(self) -> int:
        """Of one token's cache."""
        element = 2 if self.gpu else 4
        shape = self.shape
        return 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * element

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def engine(
        self,
        name: str,
        tokens: int,
        *,
        block: int = 0,
        transfer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Engine:
        """An engine with a cache of that many tokens."""
        size = block or self.block
        blocks = -(-tokens // size) + 1  # vLLM keeps one block for itself
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "load_format": "dummy",
            "dtype": "bfloat16" if self.gpu else "float32",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "max_model_len": tokens,
            "max_num_seqs": 64,
            "block_size": size,
            "kv_cache_memory_bytes": blocks * size * self.token_bytes,
        }
        if self.gpu:
            arguments |= {
                "max_num_batched_tokens": 8192,
                "attention_backend": "FLASH_ATTN",
                "gpu_memory_utilization": 0.05,  # checked at start, not used: the cache is given
                "compilation_config": {
                    "mode": 0,
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
                },
            }
        else:
            arguments |= {"enforce_eager": True, "max_num_batched_tokens": 2048}
        if transfer is not None:
            arguments["kv_transfer_config"] = {
                "kv_role": "kv_both",
                "engine_id": f"bench-{os.getpid()}-{len(self.engines)}",
                **transfer,
            }
        chosen = {**({} if self.gpu else CPU_ENVIRONMENT), **(environment or {})}
        made = Engine(name, arguments, self.folder / f"{name.replace(' ', '-')}.log", chosen)
        made.deadline = self.deadline
        self.engines.append(made)
        return made

    def start(self, *engines: Engine) -> list[Engine]:
        """Start them all at once. Those that do not start have an `error`."""
        for one in engines:
            one.start()
        for one in engines:
            one.wait_ready()
        return [one for one in engines if not one.error]

    def close(self, engines: Sequence[Engine] = ()) -> None:
        for one in engines or self.engines:
            one.close()
            if transfer := one.arguments.get("kv_transfer_config"):
                # vLLM's OffloadingConnector leaves it when its process is killed
                Path(f"/dev/shm/vllm_offload_{transfer['engine_id']}.mmap").unlink(missing_ok=True)
        if not engines:
            shutil.rmtree(self.shared, ignore_errors=True)


def next_answers(engines: Sequence[Engine], seconds: float) -> list[tuple[Engine, int, Any]]:
    """Answers that have come, after waiting for the first of them."""
    sockets = {one._socket: one for one in engines if one._socket is not None}
    ready = wait(list(sockets), max(0.0, seconds))
    return [(sockets[one], *sockets[one].take()) for one in ready]  # type: ignore[index]
