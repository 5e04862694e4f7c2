"""`kvferry bench handover`: real engines, prefill to decode, beside vLLM's own connectors.

For each connector, two engines of vLLM's CPU build (tp 1, equal blocks, which all of them take)
hand prompts over, one after another, prefill first. Measured per request:

    first token   from the prefill engine's answer to the decode engine's first streamed token: the
                  load, and one step
    P, D cpu      processor time of all processes of each engine

One run compares all, one pair of engines after the other. Every answer is compared with the prefill
engine's own: a connector that is fast and wrong is shown as wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.demo.engines import Engine, free_port
from kvferry.demo.tiny_model import llama_config, make_model
from kvferry.errors import KvferryError, TransferError

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
OURS = {"kv_connector_module_path": "kvferry.vllm"}
DECODE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Kind:
    """A connector to compare."""

    name: str
    transfer: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    transfer_ids: bool = False  # requests name each other by transfer id
    environment: Mapping[str, str] = field(default_factory=dict)


KINDS = (
    Kind("kvferry", {"kv_connector": "FerryConnector", **OURS}),
    Kind("kvferry for NIXL", {"kv_connector": "NixlConnector", **OURS}),
    Kind("kvferry for Mooncake", {"kv_connector": "MooncakeConnector", **OURS}, {}, True),
    Kind(
        "vLLM's NIXL",
        {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": None,
            "kv_buffer_device": "cpu",
        },
        environment={"UCX_NET_DEVICES": "lo"},
    ),
    Kind(
        "vLLM's Mooncake",
        {
            "kv_connector": "MooncakeOnCpu",
            "kv_connector_module_path": "kvferry.bench.mooncake_on_cpu",
        },
        {"mooncake_protocol": "tcp"},
        True,
    ),
)


@dataclass(frozen=True, slots=True)
class HandoverResult:
    name: str
    requests: int
    first_token_ms: float
    prefill_cpu_ms: float
    decode_cpu_ms: float
    wrong: int  # answers that differ from the prefill engine's own
    error: str = ""


@dataclass(slots=True)
class _Pair:
    kind: Kind
    prefill: Engine
    decode: Engine
    bootstrap: int
    first_tokens: list[float] = field(default_factory=list)
    prefill_cpu: list[float] = field(default_factory=list)
    decode_cpu: list[float] = field(default_factory=list)
    wrong: int = 0
    count: int = 0

    def hand_over(self, prompt: list[int], *, measured: bool = True) -> None:
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
        first, tokens = stream(self.decode, prompt, params)
        time.sleep(0.05)  # what is left to do on either side belongs to the request
        after = cpu_seconds(self.prefill.pid), cpu_seconds(self.decode.pid)
        if measured:
            self.first_tokens.append(first - answered)
            self.prefill_cpu.append(after[0] - before[0])
            self.decode_cpu.append(after[1] - before[1])
        alone = self.prefill.complete(prompt, max_tokens=DECODE_TOKENS)
        self.wrong += tokens != alone["choices"][0]["token_ids"]

    def result(self) -> HandoverResult:
        return HandoverResult(
            self.kind.name,
            len(self.first_tokens),
            statistics.median(self.first_tokens) * 1e3,
            statistics.mean(self.prefill_cpu) * 1e3,
            statistics.mean(self.decode_cpu) * 1e3,
            self.wrong,
        )


def stream(engine: Engine, prompt: list[int], params: Mapping[str, Any]) -> tuple[float, list[int]]:
    """When the first token came, and all of them."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": DECODE_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{engine.url}/v1/completions",
        json.dumps({**body, "kv_transfer_params": dict(params)}).encode(),
        {"Content-Type": "application/json"},
    )
    first = 0.0
    tokens: list[int] = []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
    if not first:
        raise TransferError(f"engine {engine.name} gave no token:\n{engine.tail()}")
    return first, tokens


def cpu_seconds(group: int) -> float:
    """Processor time that an engine's processes have used, all of them."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_SECONDS


@contextlib.contextmanager
def started(kind: Kind, model: Path, logs: Path) -> Iterator[_Pair]:
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
            **kind.environment,
        }
        return made

    # In-tree MooncakeConnector wants roles apart; the others take them as well.
    pair = _Pair(
        kind,
        engine("p", "kv_producer" if kind.transfer_ids else "kv_both", bootstrap),
        engine("d", "kv_consumer" if kind.transfer_ids else "kv_both", free_port()),
        bootstrap,
    )
    try:
        for one in (pair.prefill, pair.decode):
            one.start()
        for one in (pair.prefill, pair.decode):
            one.wait_ready()
        yield pair
    finally:
        for one in (pair.prefill, pair.decode):
            one.stop()


def run(
    requests: int = 20,
    tokens: int = 1000,
    kinds: tuple[str, ...] = (),
    tell: Callable[[HandoverResult], None] = lambda result: None,
) -> list[HandoverResult]:
    """Compare connectors. Each pair of engines is started alone: two cores hold no more."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    chosen = [kind for kind in KINDS if not kinds or kind.name in kinds]
    results = []
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        logs = Path(folder)
        model = make_model(logs / "tiny", llama_config(num_hidden_layers=8))
        for number, kind in enumerate(chosen):
            try:
                with started(kind, model, logs) as pair:
                    for i in range(3):  # handshake, first plans, first steps
                        pair.hand_over(_prompt(1000 * number + i, tokens), measured=False)
                    for i in range(requests):
                        pair.hand_over(_prompt(1000 * number + 10 + i, tokens))
                    results.append(pair.result())
            except (KvferryError, OSError, KeyError) as error:
                results.append(HandoverResult(kind.name, 0, 0, 0, 0, 0, f"{error}"[-600:]))
            tell(results[-1])
    return results


def _prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + i * (37 + seed % 400)) % 500 + 3 for i in range(tokens)]
