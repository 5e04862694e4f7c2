"""Two real engines with one connector, and what one hand-over between them costs.

Prefill first, then decode, as a proxy does it. The client's clock says how long it takes from the
prefill's answer to the first token of the decode engine; the system says how much processor time
each engine's processes used meanwhile; the connector's own calls are timed in the engines
(`bench/timed.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench.timed import FILE, Times
from kvferry.demo.engines import Engine, free_port
from kvferry.errors import TransferError

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
DECODE_TOKENS = 4
MOST_TOKENS = 1900  # of a request that is decoded meanwhile
BUSY_SECONDS = 0.5
REST_SECONDS = 0.05  # what is left to do on either side belongs to the request
OURS = {"kv_connector_module_path": "kvferry.bench.timed_ours"}
THEIRS = {"kv_connector_module_path": "kvferry.bench.timed_vllm"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A connector to compare."""

    name: str
    ours: bool
    transfer: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    transfer_ids: bool = False  # requests name each other by transfer id
    environment: Mapping[str, str] = field(default_factory=dict)


KINDS = (
    Kind("kvferry", True, {"kv_connector": "FerryConnector", **OURS}),
    Kind(
        "vLLM's NIXL",
        False,
        {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", **THEIRS},
        environment={"UCX_NET_DEVICES": "lo"},
    ),
    Kind(
        "vLLM's Mooncake",
        False,
        {"kv_connector": "MooncakeConnector", **THEIRS},
        {"mooncake_protocol": "tcp"},
        True,
    ),
    Kind("kvferry for NIXL", True, {"kv_connector": "NixlConnector", **OURS}),
    Kind("kvferry for Mooncake", True, {"kv_connector": "MooncakeConnector", **OURS}, {}, True),
)
USUAL = ("kvferry", "vLLM's NIXL", "vLLM's Mooncake")


@dataclass(slots=True)
class Cost:
    """What one hand-over took."""

    first_token_seconds: float
    prefill_cpu_seconds: float
    decode_cpu_seconds: float


@dataclass(slots=True)
class Stalls:
    """Seconds that hand-overs held up another request."""

    prefill_step: float  # the connector's longest in one step
    decode_step: float
    gaps: list[float]  # for each hand-over, the longest between two tokens on the decode engine


@dataclass(slots=True)
class Pair:
    kind: Kind
    prefill: Engine
    decode: Engine
    bootstrap: int
    prefill_times: Times
    decode_times: Times
    wrong: int = 0  # answers that differ from the prefill engine's own
    count: int = 0

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Its engines run; before and after they are stopped, for some never rest."""
        self.signal(signal.SIGCONT)
        time.sleep(REST_SECONDS)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        for engine in self.engines:
            os.killpg(engine.pid, number)

    def hand_over(self, prompt: list[int]) -> Cost:
        self.count += 1
        name = f"xfer-{self.kind.name}-{self.count}"
        asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.kind.transfer_ids:
            asked["transfer_id"] = name
        before = cpu_seconds(self.prefill.pid), cpu_seconds(self.decode.pid)
        told = self.prefill.complete(prompt, max_tokens=1, kv_transfer_params=asked)
        answered = time.perf_counter()
        params = told.get("kv_transfer_params") or {}
        if self.kind.transfer_ids:
            params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name}
            params["remote_engine_id"] = self.prefill.name
            params["remote_bootstrap_addr"] = f"http://127.0.0.1:{self.bootstrap}"
        times, tokens = stream(self.decode, prompt, DECODE_TOKENS, params)
        time.sleep(REST_SECONDS)
        after = cpu_seconds(self.prefill.pid), cpu_seconds(self.decode.pid)
        alone = self.prefill.complete(prompt, max_tokens=DECODE_TOKENS)
        self.wrong += tokens != alone["choices"][0]["token_ids"]
        return Cost(times[0] - answered, after[0] - before[0], after[1] - before[1])

    def stalls(self, prompts: list[list[int]], busy: list[int]) -> Stalls:
        """Hand prompts over while both engines decode another request (`busy`), so that no step is
        empty."""
        times: dict[str, list[float]] = {}
        over = threading.Event()

        def decode(engine: Engine) -> None:
            times[engine.name] = stream(engine, busy, MOST_TOKENS, {}, over)[0]

        threads = [threading.Thread(target=decode, args=(engine,)) for engine in self.engines]
        for thread in threads:
            thread.start()
        moments = []
        try:
            time.sleep(BUSY_SECONDS)  # until they decode
            self.prefill_times.clear()
            self.decode_times.clear()
            for prompt in prompts:
                begun = time.perf_counter()
                self.hand_over(prompt)
                moments.append((begun, time.perf_counter()))
            steps = self.prefill_times.read()[0], self.decode_times.read()[0]
            if not all(thread.is_alive() for thread in threads):
                raise TransferError("the other request ended before the hand-overs did")
        finally:
            over.set()
            for thread in threads:
                thread.join()
        pairs = list(itertools.pairwise(times[self.decode.name]))
        gaps = [max(b - a for a, b in pairs if b > start and a < end) for start, end in moments]
        return Stalls(*steps, gaps)


def stream(
    engine: Engine,
    prompt: list[int],
    tokens: int,
    params: Mapping[str, Any],
    over: threading.Event | None = None,
) -> tuple[list[float], list[int]]:
    """When each token came, and all of them, until it is `over`."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    if params:
        body["kv_transfer_params"] = dict(params)
    request = urllib.request.Request(
        f"{engine.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    times: list[float] = []
    found: list[int] = []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                found += json.loads(line[6:])["choices"][0].get("token_ids") or []
            if over is not None and over.is_set():
                break
    if not times:
        raise TransferError(f"engine {engine.name} gave no token:\n{engine.tail()}")
    return times, found


def cpu_seconds(group: int) -> float:
    """Processor time that an engine's processes have used, all of them."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_SECONDS


def make_pair(kind: Kind, model: Path, logs: Path) -> Pair:
    """Its engines, not started yet."""
    bootstrap = free_port()
    short = kind.name.replace(" ", "-").replace("'", "")

    def engine(name: str, role: str, port: int) -> Engine:
        made = Engine(f"{name}-{short}", model, logs / f"{name}-{short}.log")
        made.connector = dict(kind.extra)
        made.transfer = {**kind.transfer, "kv_role": role}
        made.environment = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
            FILE: str(logs / f"{name}-{short}.times"),
            **kind.environment,
        }
        return made

    # In-tree MooncakeConnector wants roles apart; the others take them as well.
    prefill = engine("p", "kv_producer" if kind.transfer_ids else "kv_both", bootstrap)
    decode = engine("d", "kv_consumer" if kind.transfer_ids else "kv_both", free_port())
    times = [Times(Path(one.environment[FILE])) for one in (prefill, decode)]
    return Pair(kind, prefill, decode, bootstrap, times[0], times[1])
