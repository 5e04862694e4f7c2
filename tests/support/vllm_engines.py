"""Real vLLM engines (CPU build) as processes, for tests, measurements and `make demo-vllm`.

`Engine` starts vLLM's OpenAI server with our connector, waits until it answers, and ends it: by
asking, then by killing. Its log goes to a file. One thread an engine, loopback only.

An engine gets a process group of its own, but no session. Linux gives each session its own share of
the processors (autogroup), and vLLM's workers spin in `sched_yield`: on a kernel 6.18 with two
cores, one session's spinning kept all threads of another from running for 15 to 60 seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvferry.errors import TransferError
from kvferry.private_files import create_private

START_SECONDS = 300.0
STOP_SECONDS = 20.0
PORTS = (18_000, 30_000)  # below those that Linux hands out by itself
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens at, and that the system gives to nobody who asks for any port; nor
    did this process get it before: whom it was for may not listen yet."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def open_log(path: Path) -> IO[bytes]:
    """A new file for what a process says: private, because engines print their configuration."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return os.fdopen(create_private(path), "wb")


@dataclass(slots=True)
class Engine:
    """One vLLM server."""

    name: str
    model: Path
    log: Path
    tp: int = 1
    pp: int = 1
    block_size: int = 0  # 0: vLLM's choice
    connector: dict[str, Any] | None = None  # kv_connector_extra_config; None: no connector
    transfer: dict[str, Any] = field(default_factory=dict)  # more of vLLM's kv_transfer_config
    on_failure: str = "fail"  # vLLM's kv_load_failure_policy
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Engine:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        command += ["--max-model-len", "2048", "--tensor-parallel-size", str(self.tp)]
        command += ["--pipeline-parallel-size", str(self.pp), "--enable-prefix-caching"]
        if self.pp > 1:  # eager mode dies on its first request with stages on the CPU build
            command += ["--compilation-config", json.dumps({"mode": 2, "backend": "eager"})]
        else:
            command += ["--enforce-eager"]
        if self.block_size:
            command += ["--block-size", str(self.block_size)]
        if self.connector is not None:
            transfer = {
                "kv_connector": "FerryConnector",
                "kv_connector_module_path": "kvferry.vllm",
                "kv_role": "kv_both",
                "engine_id": self.name,
                "kv_load_failure_policy": self.on_failure,
                "kv_connector_extra_config": self.connector,
                **self.transfer,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        with open_log(self.log) as out:
            self._process = subprocess.Popen(
                [*command, *self.arguments],
                env={**os.environ, **ENVIRONMENT, **self.environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,  # and not a session: see above
            )
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, seconds: float = START_SECONDS) -> Engine:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise TransferError(f"engine {self.name} ended at start:\n{self.tail()}")
            if self._answers():
                return self
            time.sleep(0.5)
        raise TransferError(f"engine {self.name} was not ready in {seconds:.0f} s:\n{self.tail()}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def complete(self, prompt: list[int], seconds: float = 120.0, **options: Any) -> dict[str, Any]:
        """One completion; the answer's JSON."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **options,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                loaded: dict[str, Any] = json.load(answer)
                return loaded
        except urllib.error.HTTPError as error:
            return {"status": error.code, "error": error.read().decode(errors="replace")}

    def metric(self, name: str) -> float:
        """The sum of a metric of this engine."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name))

    def kill(self) -> None:
        """End it at once, with all its workers (-9)."""
        if self._process is None:
            return
        deadline = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_SECONDS)
            while time.monotonic() < deadline:  # until the last of its workers is gone
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)
        self._process.wait(STOP_SECONDS)

    def stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def nixl_environment() -> dict[str, str]:
    """Of an engine with vLLM's NixlConnector: a port of its own, on loopback alone."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_NET_DEVICES": "lo",
    }


def publish_events(engine: Engine) -> Engine:
    """Let an engine that is not started yet publish its KV events."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
        "topic": "",
    }
    engine.arguments += ["--kv-events-config", json.dumps(events)]
    return engine


def events_of(engine: Engine) -> str:
    """Where it publishes them, as `kvferry router --engine-events` takes it."""
    told = json.loads(engine.arguments[engine.arguments.index("--kv-events-config") + 1])
    return f"{engine.url}={told['endpoint']},{told['replay_endpoint']}"


def hand_over(prefill: Engine, decode: Engine, prompt: list[int], **options: Any) -> dict[str, Any]:
    """Prefill on one engine, decode on another, as a router does it."""
    first = prefill.complete(
        prompt,
        **{**options, "n": 1, "max_tokens": 1},
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
    )
    params = first.get("kv_transfer_params")
    if not params:
        raise TransferError(f"engine {prefill.name} gave no ticket: {first}")
    return decode.complete(prompt, kv_transfer_params=params, **options)
